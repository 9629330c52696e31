"""Many computes and requests with fake guests: place, refuse, show and destroy."""

from __future__ import annotations

import json
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute, write_config
from tests.kit.hands import expire_key
from tests.kit.invariants import check_invariants, read_allocations, read_lasting_keys
from tests.kit.servers import Server
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

TOY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


class Toy(Server):
    """`ecompute --fake` as in the README: ten in one directory, without other options."""

    def __init__(self, directory: Path, number: int) -> None:
        self.name = f'toy-{number}'
        super().__init__(directory)

    def command(self) -> list[str]:
        """Return the command; compute.yaml is in the directory in which it starts."""
        return [sys.executable, '-m', 'ecomp.compute', '--fake', TOY]

    def environment(self) -> dict[str, str]:
        """Return the environment, with the temporary state in the test's directory."""
        return {**super().environment(), 'TMPDIR': str(self.directory)}

    def is_ready(self) -> bool:
        return ' ready: ' in self.tail_log()


@pytest.mark.slow
def test_ten_fakes_take_forty_of_fifty_requests(cluster: Control) -> None:
    write_config(cluster.directory / 'compute.yaml', cluster.etcd.endpoint, cluster.placement.url)
    toys = [Toy(cluster.directory, number) for number in range(10)]
    for toy in toys:
        cluster.at_exit.callback(toy.close)
        toy.launch()
    for toy in toys:
        toy.wait_ready()
    computes = {key.rsplit('/', 1)[1] for key in cluster.etcd.list_keys('/computes/')}
    assert len(computes) == 10

    results = run_concurrently(cluster, [[SMALL_QUERY]] * 50)

    assert Counter(result.code for result in results) == {0: 40, 3: 10}
    placed = [parse_notice(result) for result in results if result.code == 0]
    assert len({instance for _, instance in placed}) == 40
    assert Counter(compute for compute, _ in placed) == dict.fromkeys(computes, 4)
    for refused in (result for result in results if result.code == 3):
        assert refused.stdout == 'NO ALLOCATIONS LEFT\n'
        assert all(line.startswith('eschedule: ') for line in refused.stderr.splitlines()), refused
    held = read_allocations(cluster)
    assert held == {instance: {compute: {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}} for compute, instance in placed}
    for _, instance in placed:
        assert wait_address(cluster, instance) == wait_state(cluster, instance, 'active')['addresses'][0]['address']
    check_invariants(cluster)


def test_concurrent_requests_fill_a_compute_exactly(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:12,DISK_GB:100,MEMORY_MB:4096')
    first = [parse_notice(result)[1] for result in run_concurrently(cluster, [[SMALL_QUERY]] * 10, width=10)]
    assert len(set(first)) == 10
    for instance in first:
        assert wait_state(cluster, instance, 'active')['compute'] == compute.uuid

    second = run_concurrently(cluster, [[SMALL_QUERY]] * 10, width=10)

    assert Counter(result.code for result in second) == {0: 2, 3: 8}
    assert [result.stdout for result in second if result.code == 3] == ['NO ALLOCATIONS LEFT\n'] * 8
    usages = cluster.placement.call('GET', f'/resource_providers/{compute.uuid}/usages')['usages']
    assert usages == {'VCPU': 12, 'DISK_GB': 12, 'MEMORY_MB': 12 * 128}
    check_invariants(cluster, compute)
    log = compute.log.read_text()
    assert log.count('INSTANTIATE INSTANCE ') == log.count('ALLOCATIONS ARE {') == 12


@pytest.mark.fast
def test_log_has_the_lines_of_the_readme(cluster: Control, compute: Ecompute) -> None:
    _, instance = place(cluster, SMALL_QUERY, IMAGE)
    wait_state(cluster, instance, 'active')
    assert wait_log_lines(compute, f' INSTANTIATE INSTANCE {instance} WITH IMAGE {IMAGE}')
    wire = f"{{'{compute.uuid}': {{'resources': {{'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}}}}}}"
    assert wait_log_lines(compute, f' ALLOCATIONS ARE {wire}')


@pytest.mark.usefixtures('compute')
def test_refusal_names_the_missing_trait(cluster: Control) -> None:
    refused = cluster.eschedule(f'{SMALL_QUERY}&required=MISC_SHARES_VIA_AGGREGATE')
    assert refused.stdout == 'NO ALLOCATIONS LEFT\n'
    assert refused.code == 3
    host = socket.gethostname()
    assert refused.stderr.splitlines() == [
        'eschedule: no compute satisfies the whole query',
        f'eschedule: {host}: lacks MISC_SHARES_VIA_AGGREGATE',
        f'eschedule: the closest host is {host}',
        f'eschedule: Try: remove required=MISC_SHARES_VIA_AGGREGATE, which fits on {host}',
    ]


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


def test_dead_compute_is_skipped(cluster: Control) -> None:
    dead = cluster.ecompute('VCPU:64,DISK_GB:100,MEMORY_MB:65536')
    living = cluster.ecompute()
    dead.kill()
    lease = read_lasting_keys(cluster)[f'/computes/{dead.uuid}'].lease
    cluster.etcd.call('lease/revoke', {'ID': lease})

    placed = cluster.eschedule(SMALL_QUERY)

    assert parse_notice(placed)[0] == living.uuid
    assert_one_line(placed, 0, dead.uuid, 'not alive', 'skipped')
    refused = cluster.eschedule(f'{SMALL_QUERY}&in_tree={dead.uuid}')
    assert refused.stdout == 'NO ALLOCATIONS LEFT\n'
    assert refused.code == 3
    assert 'none of them is alive' in refused.stderr
    wait_state(cluster, parse_notice(placed)[1], 'active')
    check_invariants(cluster, living)


def test_granular_groups_and_member_of_reach_placement(cluster: Control, compute: Ecompute) -> None:
    aggregate = 'a66e9a7e-0000-4000-8000-000000000001'
    path = f'/resource_providers/{compute.uuid}'
    generation = cluster.placement.call('GET', path)['generation']
    body = {'aggregates': [aggregate], 'resource_provider_generation': generation}
    cluster.placement.call('PUT', f'{path}/aggregates', body)
    groups = 'resources1=VCPU:1&resources2=DISK_GB:1,MEMORY_MB:128&group_policy=none'
    for query in (
        groups,
        f'{SMALL_QUERY}&member_of={aggregate}',
        f'{SMALL_QUERY}&limit=1',
        f'{SMALL_QUERY}&in_tree={compute.uuid}',
    ):
        _, instance = place(cluster, query)
        assert wait_state(cluster, instance, 'active')['query'] == query


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


@pytest.mark.usefixtures('compute')
def test_destroy_of_an_instance_without_allocation(cluster: Control) -> None:
    _, instance = place(cluster)
    wait_address(cluster, instance)
    cluster.placement.call('DELETE', f'/allocations/{instance}')
    assert cluster.eschedule('destroy', instance).code == 0
    wait_state(cluster, instance, 'gone')


@pytest.mark.usefixtures('compute')
def test_destroy_of_several_reports_an_unknown_one(cluster: Control) -> None:
    first, second = place(cluster)[1], place(cluster)[1]
    done = cluster.eschedule('destroy', first, UNKNOWN_UUID, second)
    assert done.code == 4
    lines = done.stderr.splitlines()
    assert [line.partition(' ')[0] for line in lines] == ['eschedule:'] * 3
    assert lines[1] == f'eschedule: {UNKNOWN_UUID}: no such instance'
    for instance in (first, second):
        wait_state(cluster, instance, 'gone')


def test_destroy_of_a_failed_instance_removes_its_record(cluster: Control, compute: Ecompute) -> None:
    _, instance = place(cluster)
    wait_state(cluster, instance, 'active')
    request = {'allocations': {compute.uuid: {'resources': {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 1}}}, 'image': IMAGE}
    cluster.etcd.put(f'/hosts/{compute.uuid}/{UNKNOWN_UUID}', json.dumps({**request, 'instance': UNKNOWN_UUID}))
    wait_state(cluster, UNKNOWN_UUID, 'error')
    assert_one_line(cluster.eschedule('destroy', UNKNOWN_UUID), 0, 'its record is removed')
    assert read_record(cluster, UNKNOWN_UUID) is None
    assert_one_line(cluster.eschedule('destroy', UNKNOWN_UUID), 4, 'no such instance')


@pytest.mark.fast
@pytest.mark.usefixtures('compute')
def test_list_and_show(cluster: Control) -> None:
    assert cluster.eschedule('list', '-f', 'json').stdout == '[]\n'
    first, second = place(cluster, SMALL_QUERY, IMAGE)[1], place(cluster)[1]
    address = wait_address(cluster, first)
    wait_address(cluster, second)
    assert cluster.eschedule('destroy', '--wait', second).code == 0

    table = cluster.eschedule('list')
    assert table.code == 0
    assert table.stderr == ''
    head, *rows = table.stdout.splitlines()
    assert head.split() == ['INSTANCE', 'NAME', 'STATE', 'ADDRESS', 'HOST', 'REQUESTED']
    assert len(rows) == 1
    assert rows[0].split()[:5] == [first, '-', 'active', address, socket.gethostname()]
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
    for words in (['list', '--all', '--format=json'], ['show', '-f', 'json', second]):
        json.loads(cluster.eschedule(*words).stdout)

    detail = cluster.eschedule('show', first)
    assert detail.code == 0
    assert detail.stderr == ''
    rows = detail.stdout.splitlines()
    assert dict(row.split(None, 1) for row in rows)['state'] == 'active'
    assert any(address in row for row in rows)
    assert_one_line(cluster.eschedule('show', UNKNOWN_UUID), 4, UNKNOWN_UUID, 'no such instance')


def test_request_not_seen_by_its_compute_is_scheduled(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    _, instance = place(cluster)
    assert cluster.eschedule('list').stdout.splitlines()[1].split()[:4] == [instance, '-', 'scheduled', '-']
    shown = json.loads(cluster.eschedule('show', instance, '-f', 'json').stdout)
    assert (shown['state'], shown['compute'], shown['query']) == ('scheduled', compute.uuid, SMALL_QUERY)
    assert_one_line(cluster.eschedule(instance), 6, instance, 'no address yet', 'scheduled')
    expire_key(cluster, f'/computes/{compute.uuid}')  # an audit waits for a compute that seems to be alive
    check_invariants(cluster)
    compute.resume()
    wait_address(cluster, instance)
