"""Many computes and requests with fake guests: place, refuse, show and destroy."""

from __future__ import annotations

import json
import socket
from collections import Counter

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check_invariants, read_lasting_keys
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    parse_notice,
    place,
    read_record,
    run_concurrently,
    wait_address,
    wait_log_lines,
    wait_state,
)


def test_concurrent_requests_fill_a_compute_exactly(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:7,DISK_GB:100,MEMORY_MB:4096')
    first = [parse_notice(result)[1] for result in run_concurrently(cluster, [[SMALL_QUERY]] * 5, width=5)]
    assert len(set(first)) == 5
    for instance in first:
        assert wait_state(cluster, instance, 'active')['compute'] == compute.uuid

    second = run_concurrently(cluster, [[SMALL_QUERY]] * 5, width=5)

    assert Counter(result.code for result in second) == {0: 2, 3: 3}
    assert [result.stdout for result in second if result.code == 3] == ['NO ALLOCATIONS LEFT\n'] * 3
    usages = cluster.placement.call('GET', f'/resource_providers/{compute.uuid}/usages')['usages']
    assert usages == {'VCPU': 7, 'DISK_GB': 7, 'MEMORY_MB': 7 * 128}
    check_invariants(cluster, compute)
    log = compute.log.read_text()
    assert log.count('INSTANTIATE INSTANCE ') == log.count('ALLOCATIONS ARE {') == 7


@pytest.mark.fast
def test_refusal_names_what_each_compute_lacks(cluster: Control) -> None:
    small, full, dead = cluster.ecompute(), cluster.ecompute('VCPU:1,DISK_GB:10,MEMORY_MB:8192'), cluster.ecompute()
    place(cluster, f'{SMALL_QUERY}&in_tree={full.uuid}')
    assert dead.stop() == 0
    host = socket.gethostname()

    refused = cluster.eschedule('resources=VCPU:1,DISK_GB:1,MEMORY_MB:1741')

    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    first, *reasons = [line.removeprefix('eschedule: ') for line in refused.stderr.splitlines()]
    assert first == 'no compute satisfies the whole query'
    assert reasons[:2] == sorted(
        [
            f'{host} ({small.uuid}): MEMORY_MB short by 1229 (free 512 of 512)',
            f'{host} ({full.uuid}): VCPU short by 1 (free 0 of 1)',
        ]
    )
    assert reasons[2:] == [
        f'{host} ({dead.uuid}): is closed: its ecompute was stopped',
        f'the closest host is {host} ({small.uuid})',
        f'Try: request MEMORY_MB:512, which fits on {host} ({small.uuid})',
    ]
    # The suggested change does fit.
    assert place(cluster, 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:512')[0] == small.uuid
    for query, word in (
        ('resources1=VCPU:9&resources=DISK_GB:1,MEMORY_MB:128', 'what each compute lacks is unknown'),
        (SMALL_QUERY, 'short by'),
    ):
        refused = cluster.eschedule(query)
        assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
        assert word in refused.stderr
    dead.start()
    check_invariants(cluster, small, full, dead)


def test_refusal_without_any_compute(cluster: Control) -> None:
    refused = cluster.eschedule(SMALL_QUERY)
    assert refused.stdout == 'NO ALLOCATIONS LEFT\n'
    assert_one_line(refused, 3, 'no compute is alive')
    assert read_lasting_keys(cluster) == {}


@pytest.mark.fast
def test_destroy_and_destroy_again(cluster: Control, compute: Ecompute) -> None:
    _, instance = place(cluster)
    address = wait_address(cluster, instance)
    assert cluster.eschedule(instance).stdout == f'{address}\n'

    done = cluster.eschedule('destroy', instance)

    assert_one_line(done, 0, instance, 'destroy accepted')
    assert done.stdout == ''
    gone = wait_state(cluster, instance, 'gone')
    check_invariants(cluster, compute)
    assert_one_line(cluster.eschedule('destroy', instance), 4, instance, 'gone since', gone['stages']['gone'])
    assert_one_line(cluster.eschedule(instance), 4, instance, 'gone since')
    assert_one_line(cluster.eschedule('destroy', UNKNOWN_UUID), 4, UNKNOWN_UUID, 'no such instance')
    # The resources of the destroyed instance are free again.
    for _ in range(4):
        place(cluster)


@pytest.mark.fast
def test_list_show_and_the_log_of_the_readme(cluster: Control, compute: Ecompute) -> None:
    assert cluster.eschedule('list', '-f', 'json').stdout == '[]\n'
    first, second = place(cluster, SMALL_QUERY, IMAGE)[1], place(cluster)[1]
    address = wait_address(cluster, first)
    wait_address(cluster, second)
    assert cluster.eschedule('destroy', '--wait', second).code == 0

    (row,) = cluster.eschedule('list').stdout.splitlines()[1:]
    assert row.split()[:5] == [first, '-', 'active', address, socket.gethostname()]
    all_rows = cluster.eschedule('list', '--all').stdout.splitlines()
    assert {tuple(row.split()[:3]) for row in all_rows[1:]} == {(first, '-', 'active'), (second, '-', 'gone')}

    listed = json.loads(cluster.eschedule('list', '-f', 'json').stdout)
    shown = json.loads(cluster.eschedule('show', first, '-f', 'json').stdout)
    assert listed == [shown]
    host = {'host': socket.gethostname(), 'host_state': 'up', 'host_last_seen': None, 'stale': False}
    assert shown == {**(read_record(cluster, first) or {}), **host}
    assert set(shown) == {
        'version', 'instance', 'compute', 'state', 'image', 'resources', 'query', 'user_id', 'project_id',
        'addresses', 'console', 'stages', 'error', 'fault', 'attempts', 'name', 'power', 'progress', 'group', 'why',
        'boots', 'host', 'host_state', 'host_last_seen', 'stale',
    }  # fmt: skip
    assert list(shown['stages']) == ['requested', 'scheduled', 'image', 'disk', 'started', 'addressed']
    assert list(shown['stages'].values()) == sorted(shown['stages'].values())
    assert (shown['image'], shown['query'], shown['error'], shown['fault']) == (IMAGE, SMALL_QUERY, None, None)
    assert wait_log_lines(compute, f' INSTANTIATE INSTANCE {first} WITH IMAGE {IMAGE}')
    wire = f"{{'{compute.uuid}': {{'resources': {{'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}}}}}}"
    assert wait_log_lines(compute, f' ALLOCATIONS ARE {wire}')
