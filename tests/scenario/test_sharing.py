"""Sets, groups, quotas and flavors."""

from __future__ import annotations

import base64
import json
import socket
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute, eschedule, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.hands import lapse, settled
from tests.kit.invariants import everything
from tests.kit.sharing import all_notified, members, started, used
from tests.kit.story import IMAGE, SMALL, addressed, at_once, called, notified, one_line, place, reached, record

# Sets: many instances in one request, placed all or none and never half delivered.


TOY = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'
SCRIPT = '#!/bin/sh\necho canary\n'


def held(cluster: Control, computes: list[Ecompute]) -> dict[str, dict[str, int]]:
    """Return the allocation of each consumer on these computes."""
    return {
        name: amounts for compute in computes for name, amounts in cluster.placement.consumers(compute.uuid).items()
    }


@pytest.mark.parametrize('count', [40, pytest.param(100, marks=pytest.mark.slow)])
def test_a_hundred_cost_one_question_and_one_claim(cluster: Control, count: int) -> None:
    computes = started(cluster, *[TOY] * (count // 5))
    calls: list[tuple[str, str]] = []
    with FaultyPlacement(cluster.placement.port) as placement:
        # Every request passes and is recorded.
        placement.fail('broken', lambda method, path: bool(calls.append((method, path.split('?')[0]))))
        config = write_config(cluster.directory / 'counted.yaml', cluster.etcd.endpoint, placement.url)
        done = eschedule(config, SMALL, IMAGE, '--count', '100', '--name', 'web')
        assert done.code == 2
        assert '1 to 60 with names' in done.stderr
        assert calls == []
        done = eschedule(config, SMALL, IMAGE, '--count', str(count))
    assert done.code == 0, done
    assert Counter(calls)['GET', '/allocation_candidates'] == 1
    assert 1 <= Counter(calls)['POST', '/allocations'] <= 2
    assert {path for _, path in calls} == {'/allocation_candidates', '/allocations'}
    pairs = all_notified(done.stdout)
    assert len({instance for _, instance in pairs}) == count
    # Spread puts five on each.
    assert Counter(compute for compute, _ in pairs) == {host.uuid: 5 for host in computes}
    for _, instance in pairs:
        reached(cluster, instance, 'active')
    small = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
    assert held(cluster, computes) == {instance: small for _, instance in pairs}
    assert cluster.etcd.keys('/requests/') == []


def test_all_or_none_and_at_least(cluster: Control) -> None:
    computes = started(cluster, *['VCPU:3,DISK_GB:100,MEMORY_MB:4096'] * 3)
    for min_option in ((), ('--min', '10')):
        done = cluster.eschedule(SMALL, IMAGE, '--count', '10', *min_option)
        assert (done.code, done.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
        assert 'there is room for 9 of 10' in done.stderr
        assert held(cluster, computes) == {}
        assert cluster.etcd.keys('/requests/') == cluster.etcd.keys('/hosts/') == []
    done = cluster.eschedule(SMALL, IMAGE, '--count', '10', '--min', '4', '-f', 'json')
    one_line(done, 0, '9 of 10 are placed')
    placed = json.loads(done.stdout)
    assert Counter(row['compute'] for row in placed) == {row.uuid: 3 for row in computes}
    assert held(cluster, computes).keys() == {row['instance'] for row in placed}
    many = cluster.directory / 'keys.pub'
    blob = base64.b64encode(b'\0\0\0\x0bssh-ed25519\0\0\x02\0' + bytes(512)).decode()
    many.write_text(''.join(f'ssh-ed25519 {blob} {number}\n' for number in range(40)))
    done = cluster.eschedule(SMALL, IMAGE, '--count', '100', '--ssh-key', str(many))
    one_line(done, 2, 'bytes of ssh keys each', 'more than etcd takes at once')
    # The keys are delivered in one transaction with the user-data.
    many.write_text(''.join(f'ssh-ed25519 {blob} {number}\n' for number in range(17)))
    data = cluster.directory / 'user-data'
    data.write_text('#!/bin/sh\n' + '#' * 200_000)
    done = cluster.eschedule(SMALL, IMAGE, '--count', '100', '--ssh-key', str(many), '--user-data', str(data))
    one_line(done, 2, 'bytes of user-data', 'more than etcd takes at once')
    assert cluster.placement.database.allocations().keys() == {row['instance'] for row in placed}


def test_names_data_and_waiting(cluster: Control, tmp_path: Path) -> None:
    computes = started(cluster, TOY, TOY)
    script = tmp_path / 'script'
    script.write_text(SCRIPT)
    words = (SMALL, IMAGE, '--count', '3', '--name', 'web', '--user-data', str(script), '--uuid', str(uuid.uuid4()))
    done = cluster.eschedule(*words, '--wait')
    assert done.code == 0, done
    lines = done.stdout.splitlines()
    instances = [instance for _, instance in all_notified('\n'.join(lines[:3]) + '\n')]
    assert lines[3:] == [addressed(cluster, instance) for instance in instances]
    records = [json.loads(cluster.eschedule('show', name, '-f', 'json').stdout) for name in ('web-1', 'web-2', 'web-3')]
    assert [record_of_name['instance'] for record_of_name in records] == instances
    # It is in etcd once, and not in the requests.
    assert len(cluster.etcd.keys('/user-data/')) == 1
    user_data_by_name = {
        data['hostname']: data['user_data']
        for compute in computes
        for path in (compute.directory / 'state/metadata').glob('*.json')
        if (data := json.loads(path.read_text()))
    }
    assert user_data_by_name == dict.fromkeys(('web-1', 'web-2', 'web-3'), SCRIPT)
    # The same request again changes nothing and reports that; a different one is a conflict.
    before = {key: value for key, value in everything(cluster).items() if key.startswith('/')}
    repeated = cluster.eschedule(*words)
    assert repeated.code == 0, repeated
    assert repeated.stdout.splitlines() == lines[:3]
    assert repeated.stderr.count('requested before: nothing is changed') == 3
    # A set's uuid is not an instance's and the reverse, and another count is another request.
    set_uuid = words[-1]
    one_line(cluster.eschedule(SMALL, IMAGE, '--uuid', set_uuid), 5, 'is the uuid of a set')
    one_line(cluster.eschedule(SMALL, IMAGE, '--count', '2', '--uuid', instances[0]), 5, 'is the uuid of an instance')
    fewer = tuple('2' if word == '3' else word for word in words)
    one_line(cluster.eschedule(*fewer), 5, 'one of 3 that were asked for at once')
    script.write_text(SCRIPT + 'echo more\n')
    one_line(cluster.eschedule(*words), 5, 'with other user-data')
    assert {key: value for key, value in everything(cluster).items() if key.startswith('/')} == before


def test_user_data_that_is_gone_from_etcd_is_said(cluster: Control, tmp_path: Path) -> None:
    compute = cluster.ecompute(TOY)
    compute.pause()
    (tmp_path / 'script').write_text(SCRIPT)
    done = cluster.eschedule(SMALL, IMAGE, '--count', '2', '--user-data', str(tmp_path / 'script'))
    (key,) = cluster.etcd.keys('/user-data/')
    lapse(cluster, key)
    compute.resume()
    for _, instance in all_notified(done.stdout):
        failed_record = reached(cluster, instance, 'error')
        assert 'its user-data is not in etcd any more' in failed_record['error']['reason']
    settled(cluster, compute)


def test_sets_that_race_are_whole_or_not_at_all(cluster: Control) -> None:
    """With room for 24, of four sets of ten two are placed whole and two are refused."""
    computes = started(cluster, *['VCPU:8,DISK_GB:100,MEMORY_MB:4096'] * 3)
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(cluster.eschedule, SMALL, IMAGE, '--count', '10') for _ in range(4)]
        results = [result.result() for result in futures]
    assert all(result.code in (0, 3) for result in results), results
    placed = [pair for result in results for pair in (all_notified(result.stdout) if result.code == 0 else [])]
    assert len(placed) in (10, 20)
    assert held(cluster, computes).keys() == {instance for _, instance in placed}
    assert len(cluster.etcd.keys('/hosts/')) == len(placed)
    assert cluster.etcd.keys('/requests/') == []


# Groups: together or apart under concurrent requests, and the reasons of refusals.


ROOMY = 'VCPU:20,DISK_GB:100,MEMORY_MB:4096'
APART = ('--policy', 'anti-affinity')
TOGETHER = ('--policy', 'affinity')


def called_so(compute: str) -> str:
    """Return the displayed name of a compute: all computes of a test are on one host."""
    return f'{socket.gethostname()} ({compute})'


def test_apart_until_there_is_no_other_compute(cluster: Control) -> None:
    computes = started(cluster, ROOMY, ROOMY)
    first, second = (place(cluster, SMALL, '--group', 'web', *APART) for _ in range(2))
    assert {first[0], second[0]} == {compute.uuid for compute in computes}
    assert members(cluster, 'web') == {first[1]: first[0], second[1]: second[0]}
    refused = called(cluster, SMALL, '--group', 'web')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert 'there is room, but not where group web allows it (strict anti-affinity)' in refused.stderr
    assert refused.stderr.count('group web has a member there (strict anti-affinity)') == 2
    assert 'the smallest change that fits: ask without --group web' in refused.stderr
    # The suggested change does fit.
    other = place(cluster, SMALL)
    listed = called(cluster, 'group', 'list').stdout
    assert listed.splitlines()[1].split() == ['web', 'strict', 'anti-affinity', '2', '2']
    shown = json.loads(called(cluster, 'group', 'show', 'web', '-f', 'json').stdout)
    assert {member['instance']: member['compute'] for member in shown['members']} == members(cluster, 'web')
    assert first[1] in called(cluster, 'group', 'show', 'web').stdout
    for _, instance in (first, second, other):
        addressed(cluster, instance)
    # A destroyed member makes room for the next, and the last one removes the group.
    assert called(cluster, 'destroy', '--wait', first[1]).code == 0
    assert members(cluster, 'web') == {second[1]: second[0]}
    third = place(cluster, SMALL, '--group', 'web')
    assert third[0] == first[0]
    addressed(cluster, third[1])
    assert called(cluster, 'destroy', '--wait', second[1], third[1]).code == 0
    assert cluster.etcd.get('/groups/web') is None
    one_line(called(cluster, 'group', 'show', 'web'), 4, 'no such group')
    settled(cluster, *computes)


def test_together_where_all_of_them_fit(cluster: Control) -> None:
    computes = started(cluster, 'VCPU:2,DISK_GB:10,MEMORY_MB:512', 'VCPU:4,DISK_GB:10,MEMORY_MB:1024')
    pairs = all_notified(called(cluster, SMALL, '--count', '3', '--group', 'db', *TOGETHER).stdout)
    assert {compute for compute, _ in pairs} == {computes[1].uuid}
    assert place(cluster, SMALL, '--group', 'db')[0] == computes[1].uuid
    refused = called(cluster, SMALL, '--group', 'db')
    assert refused.code == 3
    assert f'group db is on {called_so(computes[1].uuid)} (strict affinity)' in refused.stderr
    assert 'VCPU short by 1 (free 0 of 4)' in refused.stderr
    settled(cluster, *computes)


def test_softly(cluster: Control) -> None:
    computes = started(cluster, 'VCPU:2,DISK_GB:10,MEMORY_MB:512', 'VCPU:2,DISK_GB:10,MEMORY_MB:512')
    pairs = all_notified(called(cluster, SMALL, '--count', '3', '--group', 'web', *APART, '--soft').stdout)
    assert sorted(Counter(compute for compute, _ in pairs).values()) == [1, 2]
    called(cluster, 'destroy', '--wait', *(instance for _, instance in pairs))
    # Without the group, spread would put one on each.
    pair_result = called(cluster, SMALL, '--count', '2', '--group', 'db', *TOGETHER, '--soft')
    (first, second) = (compute for compute, _ in all_notified(pair_result.stdout))
    assert first == second
    assert place(cluster, SMALL, '--group', 'db')[0] != first, 'there is no room with them'
    settled(cluster, *computes)


def test_what_it_is_the_first_one_says(cluster: Control) -> None:
    computes = started(cluster, ROOMY)
    one_line(called(cluster, SMALL, '--group', 'web'), 2, 'no group web yet', '--policy')
    place(cluster, SMALL, '--group', 'web', *APART)
    for other in (TOGETHER, ('--soft',)):
        one_line(called(cluster, SMALL, '--group', 'web', *other), 5, 'group web is strict anti-affinity')
    for words in (APART, ('--soft',)):
        one_line(called(cluster, SMALL, *words), 2, 'go with --group')
    one_line(called(cluster, SMALL, '--group', 'a/b', *APART), 2, '--group')
    settled(cluster, *computes)


def test_a_set_that_is_to_be_apart_is_all_or_none(cluster: Control) -> None:
    computes = started(cluster, ROOMY, ROOMY, ROOMY)
    refused = called(cluster, SMALL, '--count', '4', '--group', 'web', *APART)
    assert refused.code == 3
    assert 'there is room for 3 of 4 in group web (strict anti-affinity)' in refused.stderr
    assert 'the smallest change that fits: --count 3' in refused.stderr
    assert [cluster.placement.consumers(host.uuid) for host in computes] == [{}, {}, {}]
    assert members(cluster, 'web') == {}
    pairs = all_notified(called(cluster, SMALL, '--count', '4', '--min', '2', '--group', 'web', *APART).stdout)
    assert {compute for compute, _ in pairs} == {host.uuid for host in computes}
    settled(cluster, *computes)


def test_plan_and_then_the_real_thing(cluster: Control) -> None:
    started(cluster, ROOMY, ROOMY, ROOMY)
    place(cluster, SMALL, '--group', 'web', *APART)
    for _ in range(2):
        planned = json.loads(called(cluster, 'plan', SMALL, '--group', 'web', '-f', 'json').stdout)
        compute, _ = place(cluster, SMALL, '--group', 'web')
        assert compute in {row['compute'] for row in planned}
        assert len(planned) == 3 - len(members(cluster, 'web')) + 1
    assert called(cluster, 'plan', SMALL, '--group', 'web').code == 3


@pytest.mark.parametrize('racers', [8, pytest.param(32, marks=pytest.mark.slow)])
def test_never_two_on_a_compute_however_many_ask_at_once(cluster: Control, racers: int) -> None:
    size = 20 if racers > 20 else 5
    computes = started(cluster, *[ROOMY] * size)
    words = [SMALL, '--group', 'web', *APART]
    results = at_once(cluster, [words] * racers, width=racers)
    placed = [all_notified(result.stdout)[0] for result in results if result.code == 0]
    assert Counter(result.code for result in results) == {0: size, 3: racers - size}
    assert len({compute for compute, _ in placed}) == size
    assert members(cluster, 'web') == {instance: compute for compute, instance in placed}
    for result in results:
        assert result.code == 0 or 'not where group web allows it (strict anti-affinity)' in result.stderr, result
    for _, instance in placed:
        reached(cluster, instance, 'active')
    settled(cluster, *computes)


def test_why_it_is_where_it_is(cluster: Control) -> None:
    computes = started(cluster, ROOMY, ROOMY)
    first, second = (place(cluster, SMALL, '--group', 'web', *APART) for _ in range(2))
    for _, instance in (first, second):
        addressed(cluster, instance)
    reasons = called(cluster, 'why', first[1]).stdout.splitlines()
    assert reasons[0].startswith(f'{first[1]} is on ')
    assert first[0] in reasons[0]
    assert reasons[1] == f'it asked for {SMALL}'
    assert reasons[2].startswith('2 computes could have taken it then; spread (the emptiest first) was asked for, and')
    assert reasons[3].endswith(f'(strict anti-affinity), apart from its others: {second[1]} on {called_so(second[0])}')
    data = json.loads(called(cluster, 'why', second[1], '-f', 'json').stdout)
    assert data['why'] == {'weigh': 'spread', 'weight': 0.95, 'of': 1}
    assert data['group']['others'] == {first[1]: first[0]}
    # It also explains a gone instance as long as its record exists.
    assert called(cluster, 'destroy', '--wait', first[1]).code == 0
    assert '2 computes could have taken it' in called(cluster, 'why', first[1]).stdout
    one_line(called(cluster, 'why', 'nobody-1'), 4, 'nobody-1')
    settled(cluster, *computes)


# Quotas: the limits of a project, counted exactly under concurrent requests and changes.


ROOM_FOR_ALL = 'VCPU:60,DISK_GB:100,MEMORY_MB:8192'


def test_limit_used_and_asked_are_named(cluster: Control) -> None:
    computes = started(cluster, ROOM_FOR_ALL)
    place(cluster, SMALL, '--project', 'web')  # before the limit is set, and counted nevertheless
    place(cluster, SMALL, '--project', 'other')
    one_line(called(cluster, 'quota', 'set', 'web', 'VCPU=3', 'instances=5'), 0, 'web: VCPU 1/3, instances 1/5')
    _, second = place(cluster, SMALL, '--project', 'web')
    refused = called(cluster, SMALL, '--count', '2', '--project', 'web')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    one_line(refused, 3, 'the quota of project web does not allow it: VCPU: limit 3, used 2, asked 2')
    assert len(cluster.placement.consumers(computes[0].uuid)) == 3
    # With --min 1, one of the two is placed.
    assert len(all_notified(called(cluster, SMALL, '--count', '2', '--min', '1', '--project', 'web').stdout)) == 1
    assert used(cluster, 'web') == {'VCPU': 3, 'DISK_GB': 3, 'MEMORY_MB': 384, 'instances': 3}
    table = called(cluster, 'quota', 'show', 'web').stdout.splitlines()
    assert [line.split() for line in table if line.startswith(('VCPU', 'DISK_GB'))] == [
        ['DISK_GB', '-', '3', '-'],
        ['VCPU', '3', '3', '0'],
    ]
    assert called(cluster, 'quota', 'list').stdout.splitlines()[1].split()[0] == 'web'
    assert json.loads(called(cluster, 'quota', 'list', '-f', 'json').stdout)[0]['limits'] == {'VCPU': 3, 'instances': 5}
    # Each destroyed instance makes room.
    addressed(cluster, second)
    assert called(cluster, 'destroy', '--wait', second).code == 0
    assert used(cluster, 'web')['VCPU'] == 2
    place(cluster, SMALL, '--project', 'web')
    one_line(called(cluster, 'quota', 'set', 'web', 'VCPU=1'), 0, 'VCPU 3/1', 'more VCPU than that already')
    one_line(called(cluster, 'quota', 'set', 'web', 'VCPU=none', 'instances=none'), 0, 'no limits any more')
    one_line(called(cluster, 'quota', 'show', 'web'), 4, 'no limits are set')
    place(cluster, SMALL, '--project', 'web')
    settled(cluster, *computes)


def test_what_is_destroyed_unseen_is_given_back(cluster: Control) -> None:
    (compute,) = started(cluster, ROOM_FOR_ALL)
    called(cluster, 'quota', 'set', 'web', 'instances=2')
    compute.pause()
    _, unseen = place(cluster, SMALL, '--project', 'web', '--group', 'all', '--policy', 'affinity')
    assert used(cluster, 'web')['instances'] == 1
    one_line(called(cluster, 'destroy', unseen), 0, 'destroy accepted')
    compute.resume()
    assert called(cluster, 'destroy', '--wait', unseen).code in (0, 4)
    assert used(cluster, 'web') == {}
    assert cluster.etcd.get('/groups/all') is None
    settled(cluster, compute)


@pytest.mark.parametrize(('racers', 'most'), [(10, 4), pytest.param(32, 10, marks=pytest.mark.slow)])
def test_however_many_ask_at_once_it_is_just_so_many(cluster: Control, racers: int, most: int) -> None:
    computes = started(cluster, ROOM_FOR_ALL, ROOM_FOR_ALL)
    called(cluster, 'quota', 'set', 'web', f'instances={most}')
    results = at_once(cluster, [[SMALL, '--project', 'web']] * racers, width=racers)
    assert Counter(result.code for result in results) == {0: most, 3: racers - most}, results
    assert used(cluster, 'web')['instances'] == most
    for result in results:
        assert result.code == 0 or f'instances: limit {most}, used ' in result.stderr
    placed = [all_notified(result.stdout)[0][1] for result in results if result.code == 0]
    for instance in placed:
        addressed(cluster, instance)
    destroys = at_once(cluster, [['destroy', '--wait', instance_uuid] for instance_uuid in placed], width=most)
    assert {result.code for result in destroys} == {0}
    assert used(cluster, 'web') == {}
    settled(cluster, *computes)


def test_what_is_delivered_while_a_quota_is_made_is_counted(cluster: Control) -> None:
    (compute,) = started(cluster, ROOM_FOR_ALL)
    place(cluster, SMALL, '--project', 'web')
    words = [[SMALL, '--project', 'web'] for _ in range(6)]
    words[2:2] = [['quota', 'set', 'web', 'instances=100']]
    assert {result.code for result in at_once(cluster, words, width=7)} == {0}
    assert used(cluster, 'web')['instances'] == 7
    settled(cluster, compute)


# Flavors: set by an operator, requested by name, also in a plan and a set.


def test_made_listed_asked_for_and_removed(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:8,DISK_GB:100,MEMORY_MB:4096')
    one_line(cluster.eschedule('flavor', 'set', 'tiny', SMALL), 0, 'flavor tiny: made')
    one_line(cluster.eschedule('flavor', 'set', 'tiny', f'{SMALL}&required=!MISC_SHARES_VIA_AGGREGATE'), 0, 'changed')
    (line,) = cluster.eschedule('flavor', 'list').stdout.splitlines()[1:]
    assert line.split() == ['tiny', 'VCPU:1,DISK_GB:1,MEMORY_MB:128', '!MISC_SHARES_VIA_AGGREGATE', 'etcd']
    for words in (('--flavor', 'tiny'), ('--flavor', 'tiny', 'http://images.invalid/a=b.qcow2')):
        target, instance = notified(cluster.eschedule(*words))
        assert target == compute.uuid
        assert reached(cluster, instance, 'active')['resources'] == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
        assert record(cluster, instance)['query'] == f'{SMALL}&required=!MISC_SHARES_VIA_AGGREGATE'
    _, instance = notified(cluster.eschedule('resources=VCPU:2', IMAGE, '--flavor', 'tiny'))
    assert reached(cluster, instance, 'active')['resources']['VCPU'] == 2
    assert len(cluster.eschedule('--flavor', 'tiny', '--count', '2').stdout.splitlines()) == 2
    planned = json.loads(cluster.eschedule('plan', '--flavor', 'tiny', '-f', 'json').stdout)
    assert planned[0]['asked'] == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
    one_line(cluster.eschedule('flavor', 'delete', 'tiny'), 0, 'removed')
    one_line(cluster.eschedule('--flavor', 'tiny'), 4, 'tiny: no such flavor')
    one_line(cluster.eschedule('flavor', 'delete', 'tiny'), 4, 'no such flavor')


def test_schedule_yaml_comes_first(cluster: Control) -> None:
    cluster.ecompute('VCPU:8,DISK_GB:100,MEMORY_MB:4096')
    one_line(cluster.eschedule('flavor', 'set', 'small', SMALL.replace('VCPU:1', 'VCPU:7')), 0, 'made')
    flavors = {'flavors': {'small': SMALL, 'none': f'{SMALL}&required=HW_CPU_X86_AVX512F'}}
    write_config(cluster.schedule_yaml, cluster.etcd.endpoint, cluster.placement.url, **flavors)
    listed = json.loads(cluster.eschedule('flavor', 'list', '-f', 'json').stdout)
    assert [(row['name'], row['source'], row['resources']['VCPU']) for row in listed] == [
        ('none', 'schedule.yaml', 1),
        ('small', 'schedule.yaml', 1),
    ]
    _, instance = notified(cluster.eschedule('--flavor', 'small'))
    assert reached(cluster, instance, 'active')['resources']['VCPU'] == 1
    refused = cluster.eschedule('--flavor', 'none')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert 'lacks HW_CPU_X86_AVX512F' in refused.stderr
    nowhere = 'etcd.invalid:1', 'http://placement.invalid'
    bad = write_config(cluster.directory / 'bad.yaml', *nowhere, flavors={'bad': 'x'})
    one_line(eschedule(bad, 'list'), 2, 'bad.yaml', 'flavors: bad', 'nothing else')


def test_what_is_asked_wrongly(cluster: Control) -> None:
    one_line(cluster.eschedule('flavor', 'set', 'tiny'), 2, 'give a name and what it asks for')
    one_line(cluster.eschedule('flavor', 'set', 'a/b', SMALL), 2, 'is no name of a flavor')
    one_line(cluster.eschedule('flavor', 'delete'), 2, 'which flavor?')
    one_line(cluster.eschedule('http://images.invalid/x'), 2, 'neither a command nor an instance')
    one_line(cluster.eschedule('list', '--flavor', 'tiny'), 2, '--flavor does not go with this form')
    one_line(cluster.eschedule('plan'), 2, 'give a placement query')
    cluster.etcd.put('/flavors/odd', '{"version": 7}')
    one_line(cluster.eschedule('--flavor', 'odd'), 1, '/flavors/odd', 'etcdctl del /flavors/odd')
    assert cluster.eschedule('flavor', 'set', 'tiny', SMALL).code == 0
    listed = cluster.eschedule('flavor', 'list')
    one_line(listed, 1, '/flavors/odd')
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ['FLAVOR', 'tiny'], 'the others are shown'
