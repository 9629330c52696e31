"""Sets, groups, quotas and flavors, and plans of them.

Their races are in tests/model (scenarios of shared keys), their rules in tests/unit/test_sharing.py.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections import Counter
from pathlib import Path

from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import expire_key
from tests.kit.invariants import read_lasting_keys
from tests.kit.sharing import parse_notices, start_computes
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    assert_one_line,
    place,
    wait_address,
    wait_state,
)

# Sets: many instances in one request, placed all or none and never half delivered.


TOY = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'
SCRIPT = '#!/bin/sh\necho canary\n'


def read_allocations(cluster: Control, computes: list[Ecompute]) -> dict[str, dict[str, int]]:
    return {
        name: amounts
        for compute in computes
        for name, amounts in cluster.placement.read_consumers(compute.uuid).items()
    }


def test_set_is_placed_whole_or_with_at_least_min(cluster: Control) -> None:
    computes = start_computes(cluster, *['VCPU:3,DISK_GB:100,MEMORY_MB:4096'] * 3)
    for min_option in ((), ('--min', '10')):
        done = cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '10', *min_option)
        assert (done.code, done.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
        assert 'there is room for 9 of 10' in done.stderr
        assert read_allocations(cluster, computes) == {}
        assert cluster.etcd.list_keys('/requests/') == cluster.etcd.list_keys('/hosts/') == []
    done = cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '10', '--min', '4', '-f', 'json')
    assert_one_line(done, 0, 'only 9 of 10 instances were placed: there is no room or quota for more')
    placed = json.loads(done.stdout)
    assert Counter(row['compute'] for row in placed) == {row.uuid: 3 for row in computes}
    # The keys are delivered in one transaction with the user-data.
    keys, data = cluster.directory / 'keys.pub', cluster.directory / 'user-data'
    blob = base64.b64encode(b'\0\0\0\x0bssh-ed25519\0\0\x02\0' + bytes(512)).decode()
    keys.write_text(''.join(f'ssh-ed25519 {blob} {number}\n' for number in range(17)))
    data.write_text('#!/bin/sh\n' + '#' * 200_000)
    done = cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '100', '--ssh-key', str(keys), '--user-data', str(data))
    assert_one_line(done, 2, 'bytes of user-data', 'exceed the limit of a transaction in etcd')
    assert read_allocations(cluster, computes).keys() == {row['instance'] for row in placed}


def test_set_has_names_user_data_and_a_repeatable_uuid(cluster: Control, tmp_path: Path) -> None:
    computes = start_computes(cluster, TOY, TOY)
    script = tmp_path / 'script'
    script.write_text(SCRIPT)
    words = (
        SMALL_QUERY,
        IMAGE,
        '--count',
        '3',
        '--name',
        'web',
        '--user-data',
        str(script),
        '--uuid',
        str(uuid.uuid4()),
    )
    done = cluster.eschedule(*words, '--wait')
    assert done.code == 0, done
    lines = done.stdout.splitlines()
    instances = [instance for _, instance in parse_notices('\n'.join(lines[:3]) + '\n')]
    assert lines[3:] == [wait_address(cluster, instance) for instance in instances]
    records = [json.loads(cluster.eschedule('show', name, '-f', 'json').stdout) for name in ('web-1', 'web-2', 'web-3')]
    assert [record_of_name['instance'] for record_of_name in records] == instances
    # It is in etcd once, and not in the requests.
    assert len(cluster.etcd.list_keys('/user-data/')) == 1
    user_data_by_name = {
        data['hostname']: data['user_data']
        for compute in computes
        for path in (compute.directory / 'state/metadata').glob('*.json')
        if (data := json.loads(path.read_text()))
    }
    assert user_data_by_name == dict.fromkeys(('web-1', 'web-2', 'web-3'), SCRIPT)
    # The same request again changes nothing and reports that; a different one is a conflict.
    before = {key: value for key, value in read_lasting_keys(cluster).items() if key.startswith('/')}
    repeated = cluster.eschedule(*words)
    assert repeated.code == 0, repeated
    assert repeated.stdout.splitlines() == lines[:3]
    assert repeated.stderr.count('requested before: this command changed nothing') == 3
    # A set's uuid is not an instance's and the reverse, and another count is another request.
    set_uuid = words[-1]
    assert_one_line(cluster.eschedule(SMALL_QUERY, IMAGE, '--uuid', set_uuid), 5, 'is the uuid of a set')
    assert_one_line(
        cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '2', '--uuid', instances[0]), 5, 'is the uuid of an instance'
    )
    fewer = tuple('2' if word == '3' else word for word in words)
    assert_one_line(cluster.eschedule(*fewer), 5, 'exists, but was requested in a set of 3')
    assert {key: value for key, value in read_lasting_keys(cluster).items() if key.startswith('/')} == before
    # User-data that is lost before the build is reported.
    for compute in computes:
        compute.pause()
    script.write_text(SCRIPT + 'echo more\n')
    lost = parse_notices(cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '2', '--user-data', str(script)).stdout)
    (key,) = {key for key in cluster.etcd.list_keys('/user-data/') if key not in before}
    expire_key(cluster, key)
    for compute in computes:
        compute.resume()
    for _, instance in lost:
        assert 'its user-data is no longer in etcd' in wait_state(cluster, instance, 'error')['error']['reason']


# Planning: where instances would go, compared with where they go.


def count_by_compute(done: Result) -> Counter[str]:
    assert done.code == 0, done
    if done.stdout.startswith('NOTIFIED'):
        return Counter(line.split(', ')[1] for line in done.stdout.splitlines())
    return Counter({row['compute']: row['instances'] for row in json.loads(done.stdout) if row['instances']})


def test_plan_predicts_the_placement_of_a_set(cluster: Control) -> None:
    computes = [cluster.ecompute(f'VCPU:{size},DISK_GB:100,MEMORY_MB:4096').uuid for size in (2, 4, 8)]
    place(cluster, SMALL_QUERY, '--on', computes[2])
    place(cluster, SMALL_QUERY, '--on', computes[0])
    for words in (
        ('--count', '5'),
        ('--count', '2', '--weigh', 'pack'),
        ('--count', '2', '--group', 'web', '--policy', 'anti-affinity'),
        ('--count', '3', '--group', 'db', '--policy', 'affinity', '--weigh', 'pack'),
    ):
        # Options of a new instance, such as the image, are accepted but do not affect a plan.
        planned = count_by_compute(cluster.eschedule('create', '--dry-run', SMALL_QUERY, IMAGE, *words, '-f', 'json'))
        assert sum(planned.values()) == int(words[1])
        if words[-1] != 'anti-affinity':  # any of equal computes
            assert count_by_compute(cluster.eschedule(SMALL_QUERY, IMAGE, *words)) == planned
        else:
            assert set(planned.values()) == {1}
    # Fourteen slots had two left; now one.
    assert sum(count_by_compute(cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '1')).values()) == 1
    results = [cluster.eschedule(*words, SMALL_QUERY, '--count', '2') for words in (('create', '--dry-run'), ())]
    for done in results:
        assert (done.code, done.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
        assert 'there is room for 1 of 2' in done.stderr
    assert results[0].stderr == results[1].stderr
    done = cluster.eschedule('create', '--dry-run', SMALL_QUERY, '--count', '2', '--min', '1', '-f', 'json')
    assert sum(count_by_compute(done).values()) == 1
    assert '1 of 2 instances would be placed: there is no room or quota for more' in done.stderr


def test_plan_refuses_what_create_refuses(cluster: Control) -> None:
    cluster.ecompute(TOY)
    assert_one_line(cluster.eschedule('quota', 'set', 'shop', 'instances=2'), 0, 'quota of project shop')
    place(cluster, SMALL_QUERY, '--project', 'shop')
    assert (
        count_by_compute(
            cluster.eschedule('create', '--dry-run', SMALL_QUERY, '--project', 'shop', '-f', 'json')
        ).total()
        == 1
    )
    for words in (('--project', 'shop', '--count', '2'), ('--count', '2', '--project', 'shop', '--group', 'new')):
        real, planned = (
            cluster.eschedule(SMALL_QUERY, *words),
            cluster.eschedule('create', '--dry-run', SMALL_QUERY, *words),
        )
        assert real.code == planned.code != 0
        assert (planned.stdout, planned.stderr) == (real.stdout, real.stderr)
    done = cluster.eschedule('create', '--dry-run', SMALL_QUERY, '--project', 'shop', '--count', '2')
    assert 'instances: limit 2, used 1, requested 2' in done.stderr
    assert cluster.eschedule('create', '--dry-run', SMALL_QUERY, '--project', 'other', '--count', '2').code == 0
    for query in ('resources=VCPU:1', 'resources=VCPU:1,MEMORY_MB:64'):
        real, planned = cluster.eschedule(query), cluster.eschedule('create', '--dry-run', query)
        assert real.code == planned.code == 2
        assert real.stderr == planned.stderr
