"""Hosts: names, tables, disable, drain and enable."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ecomp.model.host import parse_hostname
from ecomp.version import read_version
from tests.kit.commands import Control, Ecompute, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.hands import Eschedule
from tests.kit.invariants import check_invariants
from tests.kit.servers import wait_until
from tests.kit.sharing import kill_and_lapse, list_hosts, list_states
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    boot,
    boot_all,
    place,
    require_record,
    wait_address,
    wait_state,
)

# eschedule hosts: computes that are up, closed, silent or orphaned, as placement and etcd know them.


def test_hosts_shows_up_closed_silent_and_orphaned(cluster: Control) -> None:
    up_compute, closed, silent, orphaned = (cluster.ecompute() for _ in range(4))
    for compute in (up_compute, closed, silent):
        wait_address(cluster, place(cluster, f'{SMALL_QUERY}&in_tree={compute.uuid}')[1])
    assert set(list_states(cluster).values()) == {'up'}
    wait_until(lambda: cluster.etcd.list_keys(f'/hostnames/{orphaned.uuid}'), 30, 'it has written down its name')
    closed.stop()
    kill_and_lapse(cluster, silent)
    kill_and_lapse(cluster, orphaned)

    name = socket.gethostname()
    shown = list_hosts(cluster)
    assert {compute: (row['state'], row['hostname'], row['instances']) for compute, row in shown.items()} == {
        up_compute.uuid: ('up', name, 1),
        closed.uuid: ('closed', name, 1),
        silent.uuid: ('silent', name, 1),
        orphaned.uuid: ('orphaned', name, 0),
    }
    assert shown[up_compute.uuid]['resources'] == {
        'VCPU': {'used': 1, 'free': 3, 'capacity': 4, 'over': 0},
        'DISK_GB': {'used': 1, 'free': 9, 'capacity': 10, 'over': 0},
        'MEMORY_MB': {'used': 128, 'free': 384, 'capacity': 512, 'over': 0},
    }
    assert shown[closed.uuid]['resources']['VCPU'] == {'used': 1, 'free': 0, 'capacity': 0, 'over': 0}

    table = cluster.eschedule('hosts')
    assert (table.code, table.stderr) == (0, '')
    head, *lines = table.stdout.splitlines()
    assert ' '.join(head.split()) == (
        'COMPUTE HOST STATE INSTANCES VCPU USED/CAPACITY MEMORY_MB USED/CAPACITY DISK_GB USED/CAPACITY VERSION KIND'
    )
    assert sorted(line.split() for line in lines) == sorted(
        [
            [up_compute.uuid, name, 'up', '1', '1/4', '128/512', '1/10', read_version(), 'fake'],
            [closed.uuid, name, 'closed', '1', '1/0', '128/512', '1/10', '-', '-'],
            [silent.uuid, name, 'silent', '1', '1/4', '128/512', '1/10', '-', '-'],
            [orphaned.uuid, name, 'orphaned', '0', '0/4', '0/512', '0/10', '-', '-'],
        ]
    )
    # They have their earlier state as soon as they are back.
    for compute in (closed, silent, orphaned):
        compute.start()
    assert set(list_states(cluster).values()) == {'up'}
    check_invariants(cluster, up_compute, closed, silent, orphaned)


def test_hosts_known_to_etcd_alone_are_shown(cluster: Control) -> None:
    other = str(uuid.uuid4())
    cluster.placement.call('POST', '/resource_providers', {'uuid': other, 'name': 'nova-compute-7'})
    cluster.placement.make_provider(DISK_GB=1000)
    assert list_hosts(cluster) == {}
    assert cluster.eschedule('hosts').stdout.splitlines()[1:] == []

    alive, requested = str(uuid.uuid4()), str(uuid.uuid4())
    cluster.etcd.put(f'/computes/{alive}', '{"hostname": "hv9"}', cluster.etcd.grant())
    # A presence key without a lease is not a living compute.
    cluster.etcd.put(f'/computes/{(nobody := str(uuid.uuid4()))}', '{"hostname": "hv8"}')
    cluster.etcd.put(f'/hosts/{requested}/{UNKNOWN_UUID}', 'not JSON')
    expected = f'{alive} hv9 up 0 - - - - -\n{requested} - silent 1 - - - - -'
    shown = cluster.eschedule('hosts').stdout
    assert [row.split() for row in shown.splitlines()[1:]] == [row.split() for row in expected.splitlines()]
    cluster.etcd.delete(f'/hosts/{requested}/{UNKNOWN_UUID}')
    for compute in (alive, nobody):
        cluster.etcd.delete(f'/computes/{compute}')


def test_hosts_shows_claims_above_the_capacity(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:4,DISK_GB:10,MEMORY_MB:512')
    instances = boot_all(cluster, 3)
    compute.stop()
    compute.inventory = 'VCPU:2,DISK_GB:10,MEMORY_MB:256'
    compute.start()

    def read_row() -> str:
        return ' '.join(cluster.eschedule('hosts').stdout.splitlines()[1].split())

    assert ' up 3 3/2 (1 too many) 384/256 (128 too many) 3/10 ' in read_row()
    assert list_hosts(cluster)[compute.uuid]['resources']['VCPU'] == {'used': 3, 'free': 0, 'capacity': 2, 'over': 1}
    assert cluster.eschedule('destroy', '--wait', instances[0]).code == 0
    assert ' up 2 2/2 256/256 2/10 ' in read_row()
    check_invariants(cluster, compute)


def test_malformed_record_is_named_with_its_cure(cluster: Control) -> None:
    compute = cluster.ecompute()
    instance, other = boot_all(cluster, 2)
    cluster.etcd.put(f'/instances/{compute.uuid}/{instance}', '{"version": 99}')
    cure = f'etcdctl del /instances/{compute.uuid}/{instance}'
    for command, shown in (('hosts', compute.uuid), ('list', other)):
        result = cluster.eschedule(command)
        assert_one_line(result, 1, f'/instances/{compute.uuid}/{instance}: ', 'version 99', cure)
        assert shown in result.stdout
    # The printed cure works: the compute writes the record again.
    cluster.etcd.delete(cluster.etcd.find_record_key(instance))
    compute.restart()
    wait_state(cluster, instance, 'active')
    assert cluster.eschedule('list').code == 0
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check_invariants(cluster, compute)


# A compute has its host's name wherever users read or type it, even while it is down.


def rename_host(control: Control, compute: Ecompute, name: str) -> None:
    """Change the host name in etcd of a compute that is down: all of a test share one host."""
    key = f'/hostnames/{compute.uuid}'
    wait_until(lambda: control.etcd.list_keys(key), 30, 'it has written down its name')
    control.etcd.put(key, json.dumps({'version': 1, 'hostname': name}))


def test_closed_and_silent_computes_keep_their_host_names(cluster: Control) -> None:
    up_compute, closed, silent = (cluster.ecompute() for _ in range(3))
    instance = boot(cluster, f'{SMALL_QUERY}&in_tree={silent.uuid}')
    closed.stop()
    rename_host(cluster, closed, 'hv4')
    kill_and_lapse(cluster, silent)
    rename_host(cluster, silent, 'hv5')

    assert {compute: shown['hostname'] for compute, shown in list_hosts(cluster).items()} == {
        up_compute.uuid: list_hosts(cluster)[up_compute.uuid]['hostname'], closed.uuid: 'hv4', silent.uuid: 'hv5',
    }  # fmt: skip
    (line,) = [row for row in cluster.eschedule('list').stdout.splitlines() if instance in row]
    assert 'hv5' in line
    assert json.loads(cluster.eschedule('show', '-f', 'json', instance).stdout)['host'] == 'hv5'
    show_result = cluster.eschedule('host', 'show', 'hv6', 'hv4')
    assert (show_result.code, 'hv4' in show_result.stdout) == (4, True), show_result
    assert show_result.stderr.startswith('eschedule: hv6: no host has this name or uuid')
    for command, expected in (
        ('disable', 'disabled: '),
        ('drain', 'is already disabled'),
        ('enable', 'enabled; instances are placed there once'),
    ):
        reply = cluster.eschedule('host', command, 'hv4')
        assert (reply.code, reply.stderr.splitlines()[0][: len(expected) + 16]) == (0, f'eschedule: hv4: {expected}'), (
            reply
        )
    refusal = cluster.eschedule('--on', 'hv4', SMALL_QUERY)
    assert (refusal.code, refusal.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), refusal
    assert 'eschedule: hv4: is closed: its ecompute was stopped' in refusal.stderr.splitlines()

    assert_one_line(cluster.eschedule('host', 'forget', 'hv5'), 5, 'compute hv5 is not forgotten', instance)
    assert cluster.eschedule('destroy', instance).code == 0
    forget_result = cluster.eschedule('host', 'forget', '--fenced', 'hv4', 'hv5', 'hv6')
    assert forget_result.code == 4, forget_result
    assert 'eschedule: hv4: its resource provider is removed' in forget_result.stderr
    assert 'eschedule: hv5: its resource provider is removed' in forget_result.stderr
    assert forget_result.stderr.splitlines()[-1].startswith('eschedule: hv6: no host has this name or uuid')
    assert list(list_hosts(cluster)) == [up_compute.uuid]
    assert cluster.etcd.list_keys('/hostnames/') == [f'/hostnames/{up_compute.uuid}']
    # The record of a gone instance is kept for a day and is not evidence of a compute.
    assert silent.uuid not in cluster.eschedule('audit').stderr
    assert_one_line(cluster.eschedule('host', 'forget', 'hv5'), 4, 'no host has this name')


def test_hosts_and_host_show_count_the_same_instances(cluster: Control) -> None:
    """They differed while a destroy waited for its host, and by the records of failed builds."""
    cluster.ecompute()
    silent = cluster.ecompute()
    kept, destroyed = (boot(cluster, f'{SMALL_QUERY}&in_tree={silent.uuid}') for _ in range(2))
    failed = str(uuid.uuid4())
    record = {**require_record(cluster, kept), 'instance': failed, 'state': 'error'}
    record['error'] = {'stage': 'image', 'reason': 'not found', 'cleaned': 'nothing to clean'}
    cluster.etcd.put(f'/instances/{silent.uuid}/{failed}', json.dumps(record))
    kill_and_lapse(cluster, silent)
    assert cluster.eschedule('destroy', destroyed).code == 0

    def list_shown() -> set[str]:
        shown = cluster.eschedule('host', 'show', silent.uuid).stdout
        return {instance for instance in (kept, destroyed, failed) if instance in shown}

    assert (list_hosts(cluster)[silent.uuid]['instances'], list_shown()) == (2, {kept, destroyed})
    silent.start()
    wait_state(cluster, destroyed, 'gone')
    assert (list_hosts(cluster)[silent.uuid]['instances'], list_shown()) == (1, {kept})
    assert cluster.eschedule('destroy', failed, kept).code == 0


def test_computes_with_one_host_name_need_their_uuids(cluster: Control) -> None:
    first, second = cluster.ecompute(), cluster.ecompute()
    name = str(list_hosts(cluster)[first.uuid]['hostname'])
    for words in (('--on', name, SMALL_QUERY), ('host', 'drain', name), ('host', 'forget', name)):
        assert_one_line(
            cluster.eschedule(*words), 5, f'{name}: 2 computes have this host name', first.uuid, second.uuid
        )
    assert place(cluster, SMALL_QUERY, '--on', second.uuid[:6])[0] == second.uuid
    # The dead one keeps its name until it is forgotten, for example after the host was installed again.
    wait_until(lambda: len(cluster.etcd.list_keys('/hostnames/')) == 2, 30, 'both have written down their names')
    first.stop()
    for words in (('--on', name, SMALL_QUERY), ('host', 'forget', name)):
        assert_one_line(
            cluster.eschedule(*words), 5, f'{name}: 2 computes have this host name', first.uuid, second.uuid
        )
    assert cluster.eschedule('host', 'forget', first.uuid[:8]).code == 0
    assert place(cluster, SMALL_QUERY, '--on', name)[0] == second.uuid
    ambiguous = ['feed0000-0000-4000-8000-00000000000' + digit for digit in '12']
    for compute in ambiguous:
        cluster.etcd.put(f'/hostnames/{compute}', '{"version": 1, "hostname": "hv9"}')
    assert_one_line(
        cluster.eschedule('host', 'enable', 'feed'), 2, 'feed: 2 uuids of computes begin with it', *ambiguous
    )
    for compute in ambiguous:
        assert (
            cluster.eschedule('host', 'forget', compute).stderr == f'eschedule: {compute}: its host name is removed\n'
        )


def test_host_name_is_written_once_and_restored_when_malformed(cluster: Control) -> None:
    compute = cluster.ecompute()
    key = f'/hostnames/{compute.uuid}'
    wait_until(lambda: cluster.etcd.list_keys(key), 30, 'it has written down its name')
    value = cluster.etcd.get(key)
    compute.restart()
    assert cluster.etcd.get(key) == value
    compute.stop()
    cluster.etcd.put(key, 'rubbish')
    name = str(list_hosts(cluster)[compute.uuid]['hostname'])
    assert name == 'None', 'what makes no sense is no name'
    compute.start()
    named = parse_hostname(value or b'')
    wait_until(lambda: parse_hostname(cluster.etcd.get(key) or b'') == named, 30, 'it has written it down again')


def test_invalid_host_names_in_etcd_are_not_shown(cluster: Control) -> None:
    compute = cluster.ecompute()
    key = f'/hostnames/{compute.uuid}'
    wait_until(lambda: cluster.etcd.list_keys(key), 30, 'it has written down its name')
    compute.stop()
    for name in ('\x1b[2J', 'a b', str(uuid.uuid4()), 'x' * 10_000, 7, None):
        cluster.etcd.put(key, json.dumps({'version': 1, 'hostname': name}))
        shown = cluster.eschedule('hosts')
        assert shown.code == 0, shown
        assert shown.stdout.splitlines()[1].split()[:3] == [compute.uuid, '-', 'closed']


# host disable, drain and enable: a disabled compute gets no new instances, even after a restart or a kill.


DISABLED_TRAITS = {'COMPUTE_STATUS_DISABLED', 'CUSTOM_ECOMP_DISABLED'}


def read_traits(control: Control, compute: Ecompute) -> set[str]:
    return set(control.placement.call('GET', f'/resource_providers/{compute.uuid}/traits')['traits'])


def run_host_command(control: Control, command: str, compute: str, *options: str) -> list[str]:
    """Run `host disable`, `drain` or `enable` and return its messages."""
    result = control.eschedule('host', command, compute, *options)
    assert (result.code, result.stdout) == (0, ''), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def start_named_compute(control: Control, **settings: object) -> tuple[Ecompute, str]:
    """Start a compute; return it and its host name in etcd."""
    compute = control.ecompute(**settings)  # type: ignore[arg-type]
    return compute, str(list_hosts(control)[compute.uuid]['hostname'])


def expect_refusal(control: Control, *words: str) -> list[str]:
    result = control.eschedule(*(words or (SMALL_QUERY,)))
    assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def test_disabled_compute_gets_no_instances_until_enabled(cluster: Control) -> None:
    first, second = cluster.ecompute(), cluster.ecompute()
    guest = place(cluster, f'{SMALL_QUERY}&in_tree={first.uuid}')[1]
    address = wait_address(cluster, guest)
    assert run_host_command(cluster, 'disable', first.uuid) == [
        f'{first.uuid}: disabled: no new instances are placed there; those that run there continue'
    ]
    assert run_host_command(cluster, 'disable', first.uuid.upper()) == [f'{first.uuid}: is already disabled']
    assert list_states(cluster) == {first.uuid: 'disabled', second.uuid: 'up'}
    assert f'{first.uuid}  ' in cluster.eschedule('hosts').stdout
    assert [row['disabled'] for row in list_hosts(cluster).values()] == [
        row == first.uuid for row in list_hosts(cluster)
    ]
    # The other compute has room for four. --count and plan respect the disabled state, too.
    plan = cluster.eschedule('plan', SMALL_QUERY).stdout
    assert second.uuid in plan
    assert first.uuid not in plan
    placed = cluster.eschedule('--count', '4', SMALL_QUERY)
    assert placed.code == 0, placed
    assert placed.stdout.count(f'NOTIFIED TARGET, {second.uuid}, ') == 4
    assert any('is disabled (eschedule host enable ' in line for line in expect_refusal(cluster))
    assert wait_address(cluster, guest) == address
    assert run_host_command(cluster, 'enable', first.uuid) == [f'{first.uuid}: enabled']
    assert run_host_command(cluster, 'enable', first.uuid) == [f'{first.uuid}: is already enabled']
    assert place(cluster)[0] == first.uuid
    check_invariants(cluster, first, second)


def test_disable_by_host_name_and_unknown_hosts(cluster: Control) -> None:
    compute, name = start_named_compute(cluster)
    assert run_host_command(cluster, 'disable', name)[0].startswith(f'{name}: disabled')
    assert expect_refusal(cluster) == [
        'no compute satisfies the whole query',
        f'{name}: is disabled (eschedule host enable {name})',
        f'the closest host is {name}',
        f'Try: eschedule host enable {name}',
    ]
    assert expect_refusal(cluster, '--on', name, SMALL_QUERY) == [
        'no compute satisfies the whole query',
        f'{name}: is disabled (eschedule host enable {name})',
        f'Try: eschedule host enable {name}',
    ]
    assert run_host_command(cluster, 'enable', compute.uuid[:8]) == [f'{compute.uuid[:8]}: enabled']
    for command in ('disable', 'drain', 'enable'):
        assert_one_line(cluster.eschedule('host', command, 'no-such-host'), 4, 'no host has this name or uuid')
        assert_one_line(
            cluster.eschedule('host', command, UNKNOWN_UUID), 4, UNKNOWN_UUID, 'no host has this name or uuid'
        )
        assert_one_line(cluster.eschedule('host', command), 2, 'missing argument: one or more hosts')
    cluster.placement.call('POST', '/resource_providers', {'uuid': UNKNOWN_UUID, 'name': 'nova-compute-7'})
    assert_one_line(cluster.eschedule('host', 'disable', UNKNOWN_UUID), 4, 'no ecompute created this provider')
    second, _ = start_named_compute(cluster)
    assert_one_line(
        cluster.eschedule('host', 'disable', name), 5, '2 computes have this host name', compute.uuid, second.uuid
    )


def test_query_that_requires_disabled_computes_gets_one(cluster: Control, compute: Ecompute) -> None:
    run_host_command(cluster, 'disable', compute.uuid)
    query = f'{SMALL_QUERY}&required=COMPUTE_STATUS_DISABLED'
    uuid, instance = place(cluster, query)
    assert uuid == compute.uuid
    # The record has the query as the user wrote it, so the same request is recognised.
    assert wait_state(cluster, instance, 'active')['query'] == query
    run_host_command(cluster, 'enable', compute.uuid)
    _, plain = place(cluster)
    assert wait_state(cluster, plain, 'active')['query'] == SMALL_QUERY
    assert_one_line(cluster.eschedule('--uuid', plain, SMALL_QUERY), 0, 'was requested before')


def test_restarted_compute_keeps_its_disabled_state(cluster: Control) -> None:
    compute = cluster.ecompute(traits=['CUSTOM_RACK_7'])
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7'}
    compute.stop()
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7', 'COMPUTE_STATUS_DISABLED'}
    assert (list_states(cluster), list_hosts(cluster)[compute.uuid]['disabled']) == ({compute.uuid: 'closed'}, False)
    compute.start()
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7'}
    run_host_command(cluster, 'disable', compute.uuid)
    for stop in (compute.stop, compute.kill):
        stop()
        compute.start()
        assert read_traits(cluster, compute) == {'CUSTOM_RACK_7', *DISABLED_TRAITS}
        expect_refusal(cluster)
    # Enabled while it is stopped, it is open as soon as it starts.
    compute.stop()
    assert (list_states(cluster), list_hosts(cluster)[compute.uuid]['disabled']) == ({compute.uuid: 'closed'}, True)
    assert 'closed, disabled' in cluster.eschedule('hosts').stdout
    assert run_host_command(cluster, 'enable', compute.uuid) == [
        f'{compute.uuid}: enabled; instances are placed there once its ecompute is started'
    ]
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7', 'COMPUTE_STATUS_DISABLED'}
    compute.start()
    place(cluster)
    # Disabled and enabled while it is silent and may not come back.
    kill_and_lapse(cluster, compute)
    assert 'disabled: no new instances' in run_host_command(cluster, 'disable', compute.uuid)[0]
    run_host_command(cluster, 'enable', compute.uuid)
    compute.start()
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7'}
    place(cluster)


def test_drain_lists_the_instances_and_waits_for_their_end(cluster: Control, compute: Ecompute) -> None:
    assert run_host_command(cluster, 'drain', compute.uuid, '--wait') == [
        f'{compute.uuid}: disabled: no new instances are placed there; those that run there continue',
        f'{compute.uuid}: no instances there',
        f'{compute.uuid}: no instances remain',
    ]
    run_host_command(cluster, 'enable', compute.uuid)
    web1 = place(cluster, SMALL_QUERY, '--name', 'web1')[1]
    instances = sorted([web1, place(cluster)[1]])
    for instance in instances:
        wait_address(cluster, instance)
    messages = run_host_command(cluster, 'drain', compute.uuid)
    assert messages[1] == f'{compute.uuid}: 2 instances there'
    assert messages[2:] == [f'{"web1" if instance == web1 else instance}: active' for instance in instances]
    timed_out = cluster.eschedule('host', 'drain', '--wait', '--timeout', '0', compute.uuid)
    assert timed_out.code == 6, timed_out
    assert 'still waiting for 2 instances to leave; the host stays disabled' in timed_out.stderr.splitlines()[-1]
    with Eschedule(cluster, 'host', 'drain', '--wait', compute.uuid) as draining:
        # Draining destroys nothing by itself.
        assert cluster.eschedule('destroy', '--wait', instances[0]).code == 0
        assert not draining.has_ended
        assert cluster.eschedule('destroy', instances[1]).code == 0
        result = draining.wait()
    assert result.code == 0, result
    assert result.stderr.splitlines()[-1].endswith(f'{compute.uuid}: no instances remain')
    assert not cluster.etcd.list_keys(f'/hosts/{compute.uuid}/')
    assert cluster.placement.read_consumers(compute.uuid) == {}


def test_drain_stops_guests_of_several_hosts_and_enable_starts_those_again(cluster: Control) -> None:
    computes = [cluster.ecompute(), cluster.ecompute()]
    hosts = [compute.uuid for compute in computes]
    instances = [boot(cluster, f'{SMALL_QUERY}&in_tree={host}') for host in hosts]
    off = boot(cluster, f'{SMALL_QUERY}&in_tree={hosts[0]}')
    assert cluster.eschedule('stop', '--wait', off).code == 0
    drained = cluster.eschedule('host', 'drain', '--stop', '--wait', '-f', 'json', *hosts)
    assert drained.code == 0, drained
    for host, instance, result in zip(hosts, instances, json.loads(drained.stdout), strict=True):
        assert (result['compute'], result['error']) == (host, None)
        assert result['said'][-1].endswith(f'{host}): no guest runs'), 'both have the name of this machine'
        assert any(line.startswith(f'{instance}: stop accepted') for line in result['said'])
        assert wait_state(cluster, instance, 'stopped')
    # A guest that its user started is not the drain's any more.
    assert cluster.eschedule('start', '--wait', instances[1]).code == 0
    enabled = cluster.eschedule('host', 'enable', '--start', *hosts)
    assert enabled.code == 0, enabled
    first, started, second = enabled.stderr.splitlines()
    assert first == f'eschedule: {hosts[0]}: enabled'
    assert started.startswith(f'eschedule: {instances[0]}: start accepted')
    assert second.endswith(f'{hosts[1]}): enabled')
    assert cluster.eschedule('wait', instances[0]).code == 0
    assert wait_state(cluster, off, 'stopped')
    check_invariants(cluster, *computes)


def test_unknown_host_is_refused_before_any_host_is_changed(cluster: Control, compute: Ecompute) -> None:
    for unknown in ('no-such-host', UNKNOWN_UUID):
        refused = cluster.eschedule('host', 'disable', '-f', 'json', compute.uuid, unknown)
        assert refused.code == 4, refused
        known, missing = json.loads(refused.stdout)
        assert (known['said'], known['error'], missing['error']['code']) == ([], None, 4)
    assert not read_traits(cluster, compute) & DISABLED_TRAITS
    second = cluster.ecompute()
    assert cluster.eschedule('host', 'disable', compute.uuid, second.uuid).code == 0
    assert all(read_traits(cluster, disabled) >= DISABLED_TRAITS for disabled in (compute, second))


@contextmanager
def start_observed_drain(control: Control, compute: Ecompute, checks: int = 2) -> Iterator[Eschedule]:
    """Start a drain and wait until it has made `checks` checks, about one a second.

    By then it knows the attempts that were in flight before it.
    """
    requested_paths: list[str] = []
    with FaultyPlacement(control.placement.port) as placement:
        placement.fail('broken', lambda _, path: bool(requested_paths.append(path)))
        config = write_config(control.directory / 'drain.yaml', control.etcd.endpoint, placement.url)
        with Eschedule(control, 'host', 'drain', '--wait', compute.uuid, config=config) as draining:
            # The allocations are read once for the message, and then at each check, after the attempts in flight.
            allocations_path = f'/resource_providers/{compute.uuid}/allocations'
            wait_until(lambda: requested_paths.count(allocations_path) > checks, 40, 'it has looked')
            yield draining


def test_drain_waits_for_an_earlier_attempt(cluster: Control, compute: Ecompute) -> None:
    """The attempt has its candidates; it claims and delivers after it continues."""
    with Eschedule(cluster, SMALL_QUERY, failpoint='announced:stop') as create:
        create.wait_frozen_at('announced')
        with start_observed_drain(cluster, compute) as draining:
            assert read_traits(cluster, compute) >= DISABLED_TRAITS
            assert not draining.has_ended
            create.resume()
            result = create.wait()
            if result.code == 0:  # placement had already answered
                instance = result.stdout.split()[-1]
                wait_address(cluster, instance)
                assert not draining.has_ended
                assert cluster.eschedule('destroy', instance).code == 0
            assert draining.wait().code == 0
    assert cluster.placement.read_consumers(compute.uuid) == {}


def test_drain_waits_for_a_request_being_taken_from_a_queue(cluster: Control) -> None:
    """Only a taker key from before the disable may belong to a taker that saw it enabled."""
    assert cluster.eschedule('flavor', 'set', 'small', SMALL_QUERY).code == 0
    compute = cluster.ecompute()
    queued = cluster.eschedule('--queue', '--flavor', 'small')
    assert queued.code == 0, queued
    key = f'/queues/small/{queued.stdout.split()[-1]}/taker'

    def put_taker_key() -> None:
        cluster.etcd.put(key, f'{{"version": 1, "compute": "{compute.uuid}"}}', cluster.etcd.grant())

    put_taker_key()
    timed_out = cluster.eschedule('host', 'drain', '--wait', '--timeout', '0', compute.uuid)
    assert timed_out.code == 6, timed_out
    assert 'requests that may still be placed there; the host stays disabled' in timed_out.stderr.splitlines()[-1]
    # A taker key of the first two seconds may belong to a taker that checked its compute before it was disabled.
    with start_observed_drain(cluster, compute, checks=6) as draining:
        assert not draining.has_ended
        put_taker_key()  # as another taker does after the first gave the request back
        assert draining.wait().code == 0
    cluster.etcd.delete(key)


@pytest.mark.slow
def test_enable_during_a_start_takes_effect_within_a_minute(cluster: Control) -> None:
    """The start saw it disabled and `enable` saw it stopped: a periodic check enables it."""
    compute = cluster.ecompute()
    run_host_command(cluster, 'disable', compute.uuid)
    path = f'/resource_providers/{compute.uuid}/traits'
    traits_reply = cluster.placement.call('GET', path)
    body = {**traits_reply, 'traits': ['COMPUTE_STATUS_DISABLED']}
    cluster.placement.call('PUT', path, body)
    wait_until(lambda: not read_traits(cluster, compute), 90, 'it is enabled')
    place(cluster)


def test_traits_aggregates_and_ratios(cluster: Control) -> None:
    group, traits_of_one = UNKNOWN_UUID, ['CUSTOM_RACK_7', 'STORAGE_DISK_SSD']
    settings = {'traits': traits_of_one, 'aggregates': [group], 'allocation_ratios': {'VCPU': 2}}
    tuned_compute = cluster.ecompute('VCPU:1,DISK_GB:10,MEMORY_MB:512', **settings)
    cluster.ecompute()
    assert read_traits(cluster, tuned_compute) == {'CUSTOM_RACK_7', 'STORAGE_DISK_SSD'}, 'a fake has no processor'
    assert place(cluster, f'{SMALL_QUERY}&required=CUSTOM_RACK_7')[0] == tuned_compute.uuid
    assert place(cluster, f'{SMALL_QUERY}&member_of={group}&required=STORAGE_DISK_SSD')[0] == tuned_compute.uuid
    messages = expect_refusal(cluster, f'{SMALL_QUERY}&required=CUSTOM_RACK_7')
    assert any('VCPU short by 1 (free 0 of 2)' in line for line in messages), messages
    assert any(line.endswith('lacks CUSTOM_RACK_7') for line in messages), messages
