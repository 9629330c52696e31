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

from tests.kit.commands import Control, Ecompute, run_eschedule_process, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.hands import check_settled, expire_key
from tests.kit.invariants import read_lasting_keys
from tests.kit.sharing import parse_notices, read_members, read_usage, start_computes
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    assert_one_line,
    parse_notice,
    place,
    read_record,
    run_concurrently,
    run_in_process,
    wait_address,
    wait_state,
)

# Sets: many instances in one request, placed all or none and never half delivered.


TOY = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'
SCRIPT = '#!/bin/sh\necho canary\n'


def read_allocations(cluster: Control, computes: list[Ecompute]) -> dict[str, dict[str, int]]:
    """Return the allocation of each consumer on these computes."""
    return {
        name: amounts
        for compute in computes
        for name, amounts in cluster.placement.read_consumers(compute.uuid).items()
    }


@pytest.mark.parametrize('count', [40, pytest.param(100, marks=pytest.mark.slow)])
def test_set_costs_one_query_and_at_most_two_claims(cluster: Control, count: int) -> None:
    computes = start_computes(cluster, *[TOY] * (count // 5))
    calls: list[tuple[str, str]] = []
    with FaultyPlacement(cluster.placement.port) as placement:
        # Every request passes and is recorded.
        placement.fail('broken', lambda method, path: bool(calls.append((method, path.split('?')[0]))))
        config = write_config(cluster.directory / 'counted.yaml', cluster.etcd.endpoint, placement.url)
        done = run_eschedule_process(config, SMALL_QUERY, IMAGE, '--count', '100', '--name', 'web')
        assert done.code == 2
        assert 'must be 1 to 60 with --name' in done.stderr
        assert calls == []
        done = run_eschedule_process(config, SMALL_QUERY, IMAGE, '--count', str(count))
    assert done.code == 0, done
    assert Counter(calls)['GET', '/allocation_candidates'] == 1
    assert 1 <= Counter(calls)['POST', '/allocations'] <= 2
    assert {path for _, path in calls} == {'/allocation_candidates', '/allocations'}
    pairs = parse_notices(done.stdout)
    assert len({instance for _, instance in pairs}) == count
    # Spread puts five on each.
    assert Counter(compute for compute, _ in pairs) == {host.uuid: 5 for host in computes}
    for _, instance in pairs:
        wait_state(cluster, instance, 'active')
    small = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
    assert read_allocations(cluster, computes) == {instance: small for _, instance in pairs}
    assert cluster.etcd.list_keys('/requests/') == []


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
    assert read_allocations(cluster, computes).keys() == {row['instance'] for row in placed}
    many = cluster.directory / 'keys.pub'
    blob = base64.b64encode(b'\0\0\0\x0bssh-ed25519\0\0\x02\0' + bytes(512)).decode()
    many.write_text(''.join(f'ssh-ed25519 {blob} {number}\n' for number in range(40)))
    done = cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '100', '--ssh-key', str(many))
    assert_one_line(done, 2, 'bytes of ssh keys each', 'exceed the limit of a transaction in etcd')
    # The keys are delivered in one transaction with the user-data.
    many.write_text(''.join(f'ssh-ed25519 {blob} {number}\n' for number in range(17)))
    data = cluster.directory / 'user-data'
    data.write_text('#!/bin/sh\n' + '#' * 200_000)
    done = cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '100', '--ssh-key', str(many), '--user-data', str(data))
    assert_one_line(done, 2, 'bytes of user-data', 'exceed the limit of a transaction in etcd')
    assert cluster.placement.database.read_allocations().keys() == {row['instance'] for row in placed}


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
    script.write_text(SCRIPT + 'echo more\n')
    assert_one_line(cluster.eschedule(*words), 5, 'with other user-data')
    assert {key: value for key, value in read_lasting_keys(cluster).items() if key.startswith('/')} == before


def test_lost_user_data_of_a_set_is_reported(cluster: Control, tmp_path: Path) -> None:
    compute = cluster.ecompute(TOY)
    compute.pause()
    (tmp_path / 'script').write_text(SCRIPT)
    done = cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '2', '--user-data', str(tmp_path / 'script'))
    (key,) = cluster.etcd.list_keys('/user-data/')
    expire_key(cluster, key)
    compute.resume()
    for _, instance in parse_notices(done.stdout):
        failed_record = wait_state(cluster, instance, 'error')
        assert 'its user-data is no longer in etcd' in failed_record['error']['reason']
    check_settled(cluster, compute)


def test_racing_sets_are_placed_whole_or_not_at_all(cluster: Control) -> None:
    """With room for 24, of four sets of ten two are placed whole and two are refused."""
    computes = start_computes(cluster, *['VCPU:8,DISK_GB:100,MEMORY_MB:4096'] * 3)
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(cluster.eschedule, SMALL_QUERY, IMAGE, '--count', '10') for _ in range(4)]
        results = [result.result() for result in futures]
    assert all(result.code in (0, 3) for result in results), results
    placed = [pair for result in results for pair in (parse_notices(result.stdout) if result.code == 0 else [])]
    assert len(placed) in (10, 20)
    assert read_allocations(cluster, computes).keys() == {instance for _, instance in placed}
    assert len(cluster.etcd.list_keys('/hosts/')) == len(placed)
    assert cluster.etcd.list_keys('/requests/') == []


# Groups: together or apart under concurrent requests, and the reasons of refusals.


ROOMY_INVENTORY = 'VCPU:20,DISK_GB:100,MEMORY_MB:4096'
ANTI_AFFINITY = ('--policy', 'anti-affinity')
AFFINITY = ('--policy', 'affinity')


def make_display_name(compute: str) -> str:
    """Return the displayed name of a compute: all computes of a test are on one host."""
    return f'{socket.gethostname()} ({compute})'


def test_anti_affinity_uses_each_compute_once(cluster: Control) -> None:
    computes = start_computes(cluster, ROOMY_INVENTORY, ROOMY_INVENTORY)
    first, second = (place(cluster, SMALL_QUERY, '--group', 'web', *ANTI_AFFINITY) for _ in range(2))
    assert {first[0], second[0]} == {compute.uuid for compute in computes}
    assert read_members(cluster, 'web') == {first[1]: first[0], second[1]: second[0]}
    refused = run_in_process(cluster, SMALL_QUERY, '--group', 'web')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert 'there is room, but not where group web allows it (strict anti-affinity)' in refused.stderr
    assert refused.stderr.count('group web has a member there (strict anti-affinity)') == 2
    assert 'Try: remove --group web' in refused.stderr
    # The suggested change does fit.
    other = place(cluster, SMALL_QUERY)
    listed = run_in_process(cluster, 'group', 'list').stdout
    assert listed.splitlines()[1].split() == ['web', 'strict', 'anti-affinity', '2', '2']
    shown = json.loads(run_in_process(cluster, 'group', 'show', 'web', '-f', 'json').stdout)
    assert {member['instance']: member['compute'] for member in shown['members']} == read_members(cluster, 'web')
    assert first[1] in run_in_process(cluster, 'group', 'show', 'web').stdout
    for _, instance in (first, second, other):
        wait_address(cluster, instance)
    # A destroyed member makes room for the next, and the last one removes the group.
    assert run_in_process(cluster, 'destroy', '--wait', first[1]).code == 0
    assert read_members(cluster, 'web') == {second[1]: second[0]}
    third = place(cluster, SMALL_QUERY, '--group', 'web')
    assert third[0] == first[0]
    wait_address(cluster, third[1])
    assert run_in_process(cluster, 'destroy', '--wait', second[1], third[1]).code == 0
    assert cluster.etcd.get('/groups/web') is None
    assert_one_line(run_in_process(cluster, 'group', 'show', 'web'), 4, 'no such group')
    check_settled(cluster, *computes)


def test_affinity_places_a_set_on_a_compute_with_room_for_all(cluster: Control) -> None:
    computes = start_computes(cluster, 'VCPU:2,DISK_GB:10,MEMORY_MB:512', 'VCPU:4,DISK_GB:10,MEMORY_MB:1024')
    pairs = parse_notices(run_in_process(cluster, SMALL_QUERY, '--count', '3', '--group', 'db', *AFFINITY).stdout)
    assert {compute for compute, _ in pairs} == {computes[1].uuid}
    assert place(cluster, SMALL_QUERY, '--group', 'db')[0] == computes[1].uuid
    refused = run_in_process(cluster, SMALL_QUERY, '--group', 'db')
    assert refused.code == 3
    assert f'the members of group db are on {make_display_name(computes[1].uuid)} (strict affinity)' in refused.stderr
    assert 'VCPU short by 1 (free 0 of 4)' in refused.stderr
    check_settled(cluster, *computes)


def test_soft_policies_are_only_preferred(cluster: Control) -> None:
    computes = start_computes(cluster, 'VCPU:2,DISK_GB:10,MEMORY_MB:512', 'VCPU:2,DISK_GB:10,MEMORY_MB:512')
    pairs = parse_notices(
        run_in_process(cluster, SMALL_QUERY, '--count', '3', '--group', 'web', *ANTI_AFFINITY, '--soft').stdout
    )
    assert sorted(Counter(compute for compute, _ in pairs).values()) == [1, 2]
    run_in_process(cluster, 'destroy', '--wait', *(instance for _, instance in pairs))
    # Without the group, spread would put one on each.
    pair_result = run_in_process(cluster, SMALL_QUERY, '--count', '2', '--group', 'db', *AFFINITY, '--soft')
    (first, second) = (compute for compute, _ in parse_notices(pair_result.stdout))
    assert first == second
    assert place(cluster, SMALL_QUERY, '--group', 'db')[0] != first, 'there is no room with them'
    check_settled(cluster, *computes)


def test_first_member_defines_the_group(cluster: Control) -> None:
    computes = start_computes(cluster, ROOMY_INVENTORY)
    assert_one_line(
        run_in_process(cluster, SMALL_QUERY, '--group', 'web'), 2, 'group web does not exist', 'Fix: give its policy'
    )
    place(cluster, SMALL_QUERY, '--group', 'web', *ANTI_AFFINITY)
    for other in (AFFINITY, ('--soft',)):
        assert_one_line(
            run_in_process(cluster, SMALL_QUERY, '--group', 'web', *other),
            5,
            'group web has the policy strict anti-affinity',
        )
    for words in (ANTI_AFFINITY, ('--soft',)):
        assert_one_line(run_in_process(cluster, SMALL_QUERY, *words), 2, 'need --group')
    assert_one_line(run_in_process(cluster, SMALL_QUERY, '--group', 'a/b', *ANTI_AFFINITY), 2, '--group')
    check_settled(cluster, *computes)


def test_anti_affinity_set_is_placed_whole_or_with_at_least_min(cluster: Control) -> None:
    computes = start_computes(cluster, ROOMY_INVENTORY, ROOMY_INVENTORY, ROOMY_INVENTORY)
    refused = run_in_process(cluster, SMALL_QUERY, '--count', '4', '--group', 'web', *ANTI_AFFINITY)
    assert refused.code == 3
    assert 'there is room for 3 of 4 in group web (strict anti-affinity)' in refused.stderr
    assert 'Try: --count 3' in refused.stderr
    assert [cluster.placement.read_consumers(host.uuid) for host in computes] == [{}, {}, {}]
    assert read_members(cluster, 'web') == {}
    pairs = parse_notices(
        run_in_process(cluster, SMALL_QUERY, '--count', '4', '--min', '2', '--group', 'web', *ANTI_AFFINITY).stdout
    )
    assert {compute for compute, _ in pairs} == {host.uuid for host in computes}
    check_settled(cluster, *computes)


def test_plan_of_a_group_member_predicts_its_placement(cluster: Control) -> None:
    start_computes(cluster, ROOMY_INVENTORY, ROOMY_INVENTORY, ROOMY_INVENTORY)
    place(cluster, SMALL_QUERY, '--group', 'web', *ANTI_AFFINITY)
    for _ in range(2):
        planned = json.loads(run_in_process(cluster, 'plan', SMALL_QUERY, '--group', 'web', '-f', 'json').stdout)
        compute, _ = place(cluster, SMALL_QUERY, '--group', 'web')
        assert compute in {row['compute'] for row in planned}
        assert len(planned) == 3 - len(read_members(cluster, 'web')) + 1
    assert run_in_process(cluster, 'plan', SMALL_QUERY, '--group', 'web').code == 3


@pytest.mark.parametrize('racers', [8, pytest.param(32, marks=pytest.mark.slow)])
def test_racing_anti_affinity_members_never_share_a_compute(cluster: Control, racers: int) -> None:
    size = 20 if racers > 20 else 5
    computes = start_computes(cluster, *[ROOMY_INVENTORY] * size)
    words = [SMALL_QUERY, '--group', 'web', *ANTI_AFFINITY]
    results = run_concurrently(cluster, [words] * racers, width=racers)
    placed = [parse_notices(result.stdout)[0] for result in results if result.code == 0]
    assert Counter(result.code for result in results) == {0: size, 3: racers - size}
    assert len({compute for compute, _ in placed}) == size
    assert read_members(cluster, 'web') == {instance: compute for compute, instance in placed}
    for result in results:
        assert result.code == 0 or 'not where group web allows it (strict anti-affinity)' in result.stderr, result
    for _, instance in placed:
        wait_state(cluster, instance, 'active')
    check_settled(cluster, *computes)


def test_why_explains_the_placement_of_a_group_member(cluster: Control) -> None:
    computes = start_computes(cluster, ROOMY_INVENTORY, ROOMY_INVENTORY)
    first, second = (place(cluster, SMALL_QUERY, '--group', 'web', *ANTI_AFFINITY) for _ in range(2))
    for _, instance in (first, second):
        wait_address(cluster, instance)
    reasons = run_in_process(cluster, 'why', first[1]).stdout.splitlines()
    assert reasons[0].startswith(f'{first[1]} is on ')
    assert first[0] in reasons[0]
    assert reasons[1] == f'it requested {SMALL_QUERY}'
    assert reasons[2].startswith(
        'when it was placed, 2 computes had room; the order was spread (the emptiest first), and'
    )
    assert reasons[3].endswith(
        f'(strict anti-affinity); the other members: {second[1]} on {make_display_name(second[0])}'
    )
    data = json.loads(run_in_process(cluster, 'why', second[1], '-f', 'json').stdout)
    assert data['why'] == {'weigh': 'spread', 'weight': 0.95, 'of': 1}
    assert data['group']['others'] == {first[1]: first[0]}
    # It also explains a gone instance as long as its record exists.
    assert run_in_process(cluster, 'destroy', '--wait', first[1]).code == 0
    assert '2 computes had room' in run_in_process(cluster, 'why', first[1]).stdout
    assert_one_line(run_in_process(cluster, 'why', 'nobody-1'), 4, 'nobody-1')
    check_settled(cluster, *computes)


# Quotas: the limits of a project, counted exactly under concurrent requests and changes.


LARGE_INVENTORY = 'VCPU:60,DISK_GB:100,MEMORY_MB:8192'


def test_quota_refusal_names_limit_used_and_requested(cluster: Control) -> None:
    computes = start_computes(cluster, LARGE_INVENTORY)
    place(cluster, SMALL_QUERY, '--project', 'web')  # before the limit is set, and counted nevertheless
    place(cluster, SMALL_QUERY, '--project', 'other')
    assert_one_line(
        run_in_process(cluster, 'quota', 'set', 'web', 'VCPU=3', 'instances=5'), 0, 'web: VCPU 1/3, instances 1/5'
    )
    _, second = place(cluster, SMALL_QUERY, '--project', 'web')
    refused = run_in_process(cluster, SMALL_QUERY, '--count', '2', '--project', 'web')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert_one_line(
        refused, 3, 'the quota of project web does not allow this request: VCPU: limit 3, used 2, requested 2'
    )
    assert len(cluster.placement.read_consumers(computes[0].uuid)) == 3
    # With --min 1, one of the two is placed.
    assert (
        len(
            parse_notices(run_in_process(cluster, SMALL_QUERY, '--count', '2', '--min', '1', '--project', 'web').stdout)
        )
        == 1
    )
    assert read_usage(cluster, 'web') == {'VCPU': 3, 'DISK_GB': 3, 'MEMORY_MB': 384, 'instances': 3}
    table = run_in_process(cluster, 'quota', 'show', 'web').stdout.splitlines()
    assert [line.split() for line in table if line.startswith(('VCPU', 'DISK_GB'))] == [
        ['DISK_GB', '-', '3', '-'],
        ['VCPU', '3', '3', '0'],
    ]
    assert run_in_process(cluster, 'quota', 'list').stdout.splitlines()[1].split()[0] == 'web'
    assert json.loads(run_in_process(cluster, 'quota', 'list', '-f', 'json').stdout)[0]['limits'] == {
        'VCPU': 3,
        'instances': 5,
    }
    # Each destroyed instance makes room.
    wait_address(cluster, second)
    assert run_in_process(cluster, 'destroy', '--wait', second).code == 0
    assert read_usage(cluster, 'web')['VCPU'] == 2
    place(cluster, SMALL_QUERY, '--project', 'web')
    assert_one_line(
        run_in_process(cluster, 'quota', 'set', 'web', 'VCPU=1'),
        0,
        'VCPU 3/1',
        'its usage of VCPU exceeds the limit',
    )
    assert_one_line(
        run_in_process(cluster, 'quota', 'set', 'web', 'VCPU=none', 'instances=none'),
        0,
        'the project no longer has limits',
    )
    assert_one_line(run_in_process(cluster, 'quota', 'show', 'web'), 4, 'no limits are set')
    place(cluster, SMALL_QUERY, '--project', 'web')
    check_settled(cluster, *computes)


def test_destroy_before_the_build_releases_quota_and_group(cluster: Control) -> None:
    (compute,) = start_computes(cluster, LARGE_INVENTORY)
    run_in_process(cluster, 'quota', 'set', 'web', 'instances=2')
    compute.pause()
    _, unseen = place(cluster, SMALL_QUERY, '--project', 'web', '--group', 'all', '--policy', 'affinity')
    assert read_usage(cluster, 'web')['instances'] == 1
    assert_one_line(run_in_process(cluster, 'destroy', unseen), 0, 'destroy accepted')
    compute.resume()
    assert run_in_process(cluster, 'destroy', '--wait', unseen).code in (0, 4)
    assert read_usage(cluster, 'web') == {}
    assert cluster.etcd.get('/groups/all') is None
    check_settled(cluster, compute)


@pytest.mark.parametrize(('racers', 'limit'), [(10, 4), pytest.param(32, 10, marks=pytest.mark.slow)])
def test_racing_requests_use_a_quota_exactly(cluster: Control, racers: int, limit: int) -> None:
    computes = start_computes(cluster, LARGE_INVENTORY, LARGE_INVENTORY)
    run_in_process(cluster, 'quota', 'set', 'web', f'instances={limit}')
    results = run_concurrently(cluster, [[SMALL_QUERY, '--project', 'web']] * racers, width=racers)
    assert Counter(result.code for result in results) == {0: limit, 3: racers - limit}, results
    assert read_usage(cluster, 'web')['instances'] == limit
    for result in results:
        assert result.code == 0 or f'instances: limit {limit}, used ' in result.stderr
    placed = [parse_notices(result.stdout)[0][1] for result in results if result.code == 0]
    for instance in placed:
        wait_address(cluster, instance)
    destroys = run_concurrently(
        cluster, [['destroy', '--wait', instance_uuid] for instance_uuid in placed], width=limit
    )
    assert {result.code for result in destroys} == {0}
    assert read_usage(cluster, 'web') == {}
    check_settled(cluster, *computes)


def test_requests_delivered_while_a_quota_is_set_are_counted(cluster: Control) -> None:
    (compute,) = start_computes(cluster, LARGE_INVENTORY)
    place(cluster, SMALL_QUERY, '--project', 'web')
    words = [[SMALL_QUERY, '--project', 'web'] for _ in range(6)]
    words[2:2] = [['quota', 'set', 'web', 'instances=100']]
    assert {result.code for result in run_concurrently(cluster, words, width=7)} == {0}
    assert read_usage(cluster, 'web')['instances'] == 7
    check_settled(cluster, compute)


# Flavors: set by an operator, requested by name, also in a plan and a set.


def test_flavor_is_set_listed_used_and_deleted(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:8,DISK_GB:100,MEMORY_MB:4096')
    assert_one_line(cluster.eschedule('flavor', 'set', 'tiny', SMALL_QUERY), 0, 'flavor tiny: created')
    assert_one_line(
        cluster.eschedule('flavor', 'set', 'tiny', f'{SMALL_QUERY}&required=!MISC_SHARES_VIA_AGGREGATE'), 0, 'changed'
    )
    (line,) = cluster.eschedule('flavor', 'list').stdout.splitlines()[1:]
    assert line.split() == ['tiny', 'VCPU:1,DISK_GB:1,MEMORY_MB:128', '!MISC_SHARES_VIA_AGGREGATE', 'etcd']
    for words in (('--flavor', 'tiny'), ('--flavor', 'tiny', 'http://images.invalid/a=b.qcow2')):
        target, instance = parse_notice(cluster.eschedule(*words))
        assert target == compute.uuid
        assert wait_state(cluster, instance, 'active')['resources'] == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
        assert read_record(cluster, instance)['query'] == f'{SMALL_QUERY}&required=!MISC_SHARES_VIA_AGGREGATE'
    _, instance = parse_notice(cluster.eschedule('resources=VCPU:2', IMAGE, '--flavor', 'tiny'))
    assert wait_state(cluster, instance, 'active')['resources']['VCPU'] == 2
    assert len(cluster.eschedule('--flavor', 'tiny', '--count', '2').stdout.splitlines()) == 2
    planned = json.loads(cluster.eschedule('plan', '--flavor', 'tiny', '-f', 'json').stdout)
    assert planned[0]['asked'] == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
    assert_one_line(cluster.eschedule('flavor', 'delete', 'tiny'), 0, 'removed')
    assert_one_line(cluster.eschedule('--flavor', 'tiny'), 4, 'tiny: no such flavor')
    assert_one_line(cluster.eschedule('flavor', 'delete', 'tiny'), 4, 'no such flavor')


def test_flavors_of_schedule_yaml_come_first(cluster: Control) -> None:
    cluster.ecompute('VCPU:8,DISK_GB:100,MEMORY_MB:4096')
    assert_one_line(cluster.eschedule('flavor', 'set', 'small', SMALL_QUERY.replace('VCPU:1', 'VCPU:7')), 0, 'created')
    flavors = {'flavors': {'small': SMALL_QUERY, 'none': f'{SMALL_QUERY}&required=HW_CPU_X86_AVX512F'}}
    write_config(cluster.schedule_yaml, cluster.etcd.endpoint, cluster.placement.url, **flavors)
    listed = json.loads(cluster.eschedule('flavor', 'list', '-f', 'json').stdout)
    assert [(row['name'], row['source'], row['resources']['VCPU']) for row in listed] == [
        ('none', 'schedule.yaml', 1),
        ('small', 'schedule.yaml', 1),
    ]
    _, instance = parse_notice(cluster.eschedule('--flavor', 'small'))
    assert wait_state(cluster, instance, 'active')['resources']['VCPU'] == 1
    refused = cluster.eschedule('--flavor', 'none')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert 'lacks HW_CPU_X86_AVX512F' in refused.stderr
    nowhere = 'etcd.invalid:1', 'http://placement.invalid'
    bad = write_config(cluster.directory / 'bad.yaml', *nowhere, flavors={'bad': 'x'})
    assert_one_line(
        run_eschedule_process(bad, 'list'),
        2,
        'bad.yaml',
        'flavors: bad',
        'a flavor accepts only resources=… and required=…',
    )


def test_wrong_flavor_commands_are_refused(cluster: Control) -> None:
    assert_one_line(cluster.eschedule('flavor', 'set', 'tiny'), 2, 'needs a name and a quoted query')
    assert_one_line(cluster.eschedule('flavor', 'set', 'a/b', SMALL_QUERY), 2, 'is not a valid flavor name')
    assert_one_line(cluster.eschedule('flavor', 'delete'), 2, 'missing argument: one or more flavors, by name')
    assert_one_line(cluster.eschedule('http://images.invalid/x'), 2, 'neither a command nor an instance')
    assert_one_line(cluster.eschedule('list', '--flavor', 'tiny'), 2, '--flavor is not accepted by this command')
    assert_one_line(cluster.eschedule('plan'), 2, 'missing argument: a quoted placement query, or --flavor')
    cluster.etcd.put('/flavors/odd', '{"version": 7}')
    assert_one_line(cluster.eschedule('--flavor', 'odd'), 1, '/flavors/odd', 'etcdctl del /flavors/odd')
    assert cluster.eschedule('flavor', 'set', 'tiny', SMALL_QUERY).code == 0
    listed = cluster.eschedule('flavor', 'list')
    assert_one_line(listed, 1, '/flavors/odd')
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ['FLAVOR', 'tiny'], 'the others are shown'
