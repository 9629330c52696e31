"""Hosts: names, tables, disable, drain and enable."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ecomp.version import read_version
from tests.kit.commands import Control, Ecompute, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.hands import Eschedule
from tests.kit.invariants import check
from tests.kit.servers import until
from tests.kit.sharing import hosts, silence, states
from tests.kit.story import NOBODY, SMALL, addressed, boot, boot_all, one_line, place, reached

# eschedule hosts: computes that are up, closed, silent or orphaned, as placement and etcd know them.


def test_up_closed_silent_and_orphaned(cluster: Control) -> None:
    up_compute, closed, silent, orphaned = (cluster.ecompute() for _ in range(4))
    for compute in (up_compute, closed, silent):
        addressed(cluster, place(cluster, f'{SMALL}&in_tree={compute.uuid}')[1])
    assert set(states(cluster).values()) == {'up'}
    until(lambda: cluster.etcd.keys(f'/hostnames/{orphaned.uuid}'), 30, 'it has written down its name')
    closed.stop()
    silence(cluster, silent)
    silence(cluster, orphaned)

    name = socket.gethostname()
    shown = hosts(cluster)
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
    assert set(states(cluster).values()) == {'up'}
    check(cluster, up_compute, closed, silent, orphaned)


def test_what_only_one_plane_knows_is_shown_too(cluster: Control) -> None:
    other = str(uuid.uuid4())
    cluster.placement.call('POST', '/resource_providers', {'uuid': other, 'name': 'nova-compute-7'})
    cluster.placement.make_provider(DISK_GB=1000)
    assert hosts(cluster) == {}
    assert cluster.eschedule('hosts').stdout.splitlines()[1:] == []

    alive, requested = str(uuid.uuid4()), str(uuid.uuid4())
    cluster.etcd.put(f'/computes/{alive}', '{"hostname": "hv9"}', cluster.etcd.grant())
    # A presence key without a lease is not a living compute.
    cluster.etcd.put(f'/computes/{(nobody := str(uuid.uuid4()))}', '{"hostname": "hv8"}')
    cluster.etcd.put(f'/hosts/{requested}/{NOBODY}', 'not JSON')
    expected = f'{alive} hv9 up 0 - - - - -\n{requested} - silent 1 - - - - -'
    shown = cluster.eschedule('hosts').stdout
    assert [row.split() for row in shown.splitlines()[1:]] == [row.split() for row in expected.splitlines()]
    cluster.etcd.delete(f'/hosts/{requested}/{NOBODY}')
    for compute in (alive, nobody):
        cluster.etcd.delete(f'/computes/{compute}')


def test_more_claimed_than_there_is(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:4,DISK_GB:10,MEMORY_MB:512')
    instances = boot_all(cluster, 3)
    compute.stop()
    compute.inventory = 'VCPU:2,DISK_GB:10,MEMORY_MB:256'
    compute.start()

    def read_row() -> str:
        return ' '.join(cluster.eschedule('hosts').stdout.splitlines()[1].split())

    assert ' up 3 3/2 (1 too many) 384/256 (128 too many) 3/10 ' in read_row()
    assert hosts(cluster)[compute.uuid]['resources']['VCPU'] == {'used': 3, 'free': 0, 'capacity': 2, 'over': 1}
    assert cluster.eschedule('destroy', '--wait', instances[0]).code == 0
    assert ' up 2 2/2 256/256 2/10 ' in read_row()
    check(cluster, compute)


def test_a_record_that_cannot_be_read_is_named_with_its_cure_and_the_rest_is_shown(cluster: Control) -> None:
    compute = cluster.ecompute()
    instance, other = boot_all(cluster, 2)
    cluster.etcd.put(f'/instances/{compute.uuid}/{instance}', '{"version": 99}')
    cure = f'etcdctl del /instances/{compute.uuid}/{instance}'
    for command, shown in (('hosts', compute.uuid), ('list', other)):
        result = cluster.eschedule(command)
        one_line(result, 1, f'/instances/{compute.uuid}/{instance}: ', 'version 99', cure)
        assert shown in result.stdout
    # The printed cure works: the compute writes the record again.
    cluster.etcd.delete(cluster.etcd.record_key(instance))
    compute.restart()
    reached(cluster, instance, 'active')
    assert cluster.eschedule('list').code == 0
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute)


# A compute has its host's name wherever users read or type it, even while it is down.


def rename(control: Control, compute: Ecompute, name: str) -> None:
    """Change the host name in etcd of a compute that is down: all of a test share one host."""
    key = f'/hostnames/{compute.uuid}'
    until(lambda: control.etcd.keys(key), 30, 'it has written down its name')
    control.etcd.put(key, json.dumps({'version': 1, 'hostname': name}))


def test_closed_and_silent_it_goes_by_its_name_until_it_is_forgotten(cluster: Control) -> None:
    up_compute, closed, silent = (cluster.ecompute() for _ in range(3))
    instance = boot(cluster, f'{SMALL}&in_tree={silent.uuid}')
    closed.stop()
    rename(cluster, closed, 'hv4')
    silence(cluster, silent)
    rename(cluster, silent, 'hv5')

    assert {compute: shown['hostname'] for compute, shown in hosts(cluster).items()} == {
        up_compute.uuid: hosts(cluster)[up_compute.uuid]['hostname'], closed.uuid: 'hv4', silent.uuid: 'hv5',
    }  # fmt: skip
    (line,) = [row for row in cluster.eschedule('list').stdout.splitlines() if instance in row]
    assert 'hv5' in line
    assert json.loads(cluster.eschedule('show', '-f', 'json', instance).stdout)['host'] == 'hv5'
    show_result = cluster.eschedule('host', 'show', 'hv6', 'hv4')
    assert (show_result.code, 'hv4' in show_result.stdout) == (4, True), show_result
    assert show_result.stderr.startswith('eschedule: hv6: no compute has this host name or uuid')
    for command, expected in (
        ('disable', 'disabled: '),
        ('drain', 'is disabled already'),
        ('enable', 'enabled, as soon'),
    ):
        reply = cluster.eschedule('host', command, 'hv4')
        assert (reply.code, reply.stderr.splitlines()[0][: len(expected) + 16]) == (0, f'eschedule: hv4: {expected}'), (
            reply
        )
    refusal = cluster.eschedule('--on', 'hv4', SMALL)
    assert (refusal.code, refusal.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), refusal
    assert 'eschedule: hv4: is closed: its ecompute was stopped' in refusal.stderr.splitlines()

    one_line(cluster.eschedule('host', 'forget', 'hv5'), 5, 'compute hv5 is not forgotten', instance)
    assert cluster.eschedule('destroy', instance).code == 0
    forget_result = cluster.eschedule('host', 'forget', '--fenced', 'hv4', 'hv5', 'hv6')
    assert forget_result.code == 4, forget_result
    assert 'eschedule: hv4: its resource provider is removed' in forget_result.stderr
    assert 'eschedule: hv5: its resource provider is removed' in forget_result.stderr
    assert forget_result.stderr.splitlines()[-1].startswith('eschedule: hv6: no compute has this host name or uuid')
    assert list(hosts(cluster)) == [up_compute.uuid]
    assert cluster.etcd.keys('/hostnames/') == [f'/hostnames/{up_compute.uuid}']
    # The record of a gone instance is kept for a day and is not evidence of a compute.
    assert silent.uuid not in cluster.eschedule('audit').stderr
    one_line(cluster.eschedule('host', 'forget', 'hv5'), 4, 'no compute has this host name')


def test_two_of_one_name_are_told_apart_by_their_uuids(cluster: Control) -> None:
    first, second = cluster.ecompute(), cluster.ecompute()
    name = str(hosts(cluster)[first.uuid]['hostname'])
    for words in (('--on', name, SMALL), ('host', 'drain', name), ('host', 'forget', name)):
        one_line(cluster.eschedule(*words), 5, f'{name} is the host name of 2 computes', first.uuid, second.uuid)
    assert place(cluster, SMALL, '--on', second.uuid[:6])[0] == second.uuid
    # The dead one keeps its name until it is forgotten, for example after the host was installed again.
    until(lambda: len(cluster.etcd.keys('/hostnames/')) == 2, 30, 'both have written down their names')
    first.stop()
    for words in (('--on', name, SMALL), ('host', 'forget', name)):
        one_line(cluster.eschedule(*words), 5, f'{name} is the host name of 2 computes', first.uuid, second.uuid)
    assert cluster.eschedule('host', 'forget', first.uuid[:8]).code == 0
    assert place(cluster, SMALL, '--on', name)[0] == second.uuid
    ambiguous = ['feed0000-0000-4000-8000-00000000000' + digit for digit in '12']
    for compute in ambiguous:
        cluster.etcd.put(f'/hostnames/{compute}', '{"version": 1, "hostname": "hv9"}')
    one_line(cluster.eschedule('host', 'enable', 'feed'), 2, 'feed: 2 computes begin so', *ambiguous)
    for compute in ambiguous:
        assert cluster.eschedule('host', 'forget', compute).stderr == f'eschedule: {compute}: its name is forgotten\n'


def test_a_name_is_written_once_and_again_where_it_is_lost(cluster: Control) -> None:
    compute = cluster.ecompute()
    key = f'/hostnames/{compute.uuid}'
    until(lambda: cluster.etcd.keys(key), 30, 'it has written down its name')
    value = cluster.etcd.get(key)
    compute.restart()
    assert cluster.etcd.get(key) == value
    compute.stop()
    cluster.etcd.put(key, 'rubbish')
    name = str(hosts(cluster)[compute.uuid]['hostname'])
    assert name == 'None', 'what makes no sense is no name'
    compute.start()
    until(lambda: cluster.etcd.get(key) == value, 30, 'it has written it down again')


def test_what_is_written_there_is_believed_as_a_name_alone(cluster: Control) -> None:
    compute = cluster.ecompute()
    key = f'/hostnames/{compute.uuid}'
    until(lambda: cluster.etcd.keys(key), 30, 'it has written down its name')
    compute.stop()
    for name in ('\x1b[2J', 'a b', str(uuid.uuid4()), 'x' * 10_000, 7, None):
        cluster.etcd.put(key, json.dumps({'version': 1, 'hostname': name}))
        shown = cluster.eschedule('hosts')
        assert shown.code == 0, shown
        assert shown.stdout.splitlines()[1].split()[:3] == [compute.uuid, '-', 'closed']


# host disable, drain and enable: a disabled compute gets no new instances, even after a restart or a kill.


BOTH = {'COMPUTE_STATUS_DISABLED', 'CUSTOM_ECOMP_DISABLED'}


def traits(control: Control, compute: Ecompute) -> set[str]:
    return set(control.placement.call('GET', f'/resource_providers/{compute.uuid}/traits')['traits'])


def host(control: Control, command: str, word: str, *options: str) -> list[str]:
    """Run `host disable`, `drain` or `enable` and return its messages."""
    result = control.eschedule('host', command, word, *options)
    assert (result.code, result.stdout) == (0, ''), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def named(control: Control, **settings: object) -> tuple[Ecompute, str]:
    """Start a compute; return it and its host name in etcd."""
    compute = control.ecompute(**settings)  # type: ignore[arg-type]
    return compute, str(hosts(control)[compute.uuid]['hostname'])


def refused(control: Control, *words: str) -> list[str]:
    result = control.eschedule(*(words or (SMALL,)))
    assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def test_disabled_it_gets_nothing_while_others_do_and_enabled_it_does(cluster: Control) -> None:
    first, second = cluster.ecompute(), cluster.ecompute()
    guest = place(cluster, f'{SMALL}&in_tree={first.uuid}')[1]
    address = addressed(cluster, guest)
    assert host(cluster, 'disable', first.uuid) == [
        f'{first.uuid}: disabled: nothing new is placed there, and what lives there goes on'
    ]
    assert host(cluster, 'disable', first.uuid.upper()) == [f'{first.uuid}: is disabled already']
    assert states(cluster) == {first.uuid: 'disabled', second.uuid: 'up'}
    assert f'{first.uuid}  ' in cluster.eschedule('hosts').stdout
    assert [row['disabled'] for row in hosts(cluster).values()] == [row == first.uuid for row in hosts(cluster)]
    # The other compute has room for four. --count and plan respect the disabled state, too.
    plan = cluster.eschedule('plan', SMALL).stdout
    assert second.uuid in plan
    assert first.uuid not in plan
    placed = cluster.eschedule('--count', '4', SMALL)
    assert placed.code == 0, placed
    assert placed.stdout.count(f'NOTIFIED TARGET, {second.uuid}, ') == 4
    assert any('is disabled (eschedule host enable ' in line for line in refused(cluster))
    assert addressed(cluster, guest) == address
    assert host(cluster, 'enable', first.uuid) == [f'{first.uuid}: enabled']
    assert host(cluster, 'enable', first.uuid) == [f'{first.uuid}: is enabled already']
    assert place(cluster)[0] == first.uuid
    check(cluster, first, second)


def test_by_its_host_name_and_what_is_none(cluster: Control) -> None:
    compute, name = named(cluster)
    assert host(cluster, 'disable', name)[0].startswith(f'{name}: disabled')
    assert refused(cluster) == [
        'placement names no provider with that much free and all that is required',
        f'{name}: is disabled (eschedule host enable {name})',
        f'the nearest miss is {name}',
        f'the smallest change that fits: eschedule host enable {name}',
    ]
    assert refused(cluster, '--on', name, SMALL) == [
        'placement names no provider with that much free and all that is required',
        f'{name}: is disabled (eschedule host enable {name})',
        f'the smallest change that fits: eschedule host enable {name}',
    ]
    assert host(cluster, 'enable', compute.uuid[:8]) == [f'{compute.uuid[:8]}: enabled']
    for command in ('disable', 'drain', 'enable'):
        one_line(cluster.eschedule('host', command, 'no-such-host'), 4, 'no compute has this host name or uuid')
        one_line(cluster.eschedule('host', command, NOBODY), 4, NOBODY, 'no such compute')
        one_line(cluster.eschedule('host', command), 2, 'which compute?')
    cluster.placement.call('POST', '/resource_providers', {'uuid': NOBODY, 'name': 'nova-compute-7'})
    one_line(cluster.eschedule('host', 'disable', NOBODY), 4, 'no ecompute made it')
    second, _ = named(cluster)
    one_line(cluster.eschedule('host', 'disable', name), 5, 'the host name of 2 computes', compute.uuid, second.uuid)


def test_who_asks_for_disabled_ones_gets_them(cluster: Control, compute: Ecompute) -> None:
    host(cluster, 'disable', compute.uuid)
    query = f'{SMALL}&required=COMPUTE_STATUS_DISABLED'
    uuid, instance = place(cluster, query)
    assert uuid == compute.uuid
    # The record has the query as the user wrote it, so the same request is recognised.
    assert reached(cluster, instance, 'active')['query'] == query
    host(cluster, 'enable', compute.uuid)
    _, plain = place(cluster)
    assert reached(cluster, plain, 'active')['query'] == SMALL
    one_line(cluster.eschedule('--uuid', plain, SMALL), 0, 'was requested before')


def test_stopped_and_started_it_is_as_the_operator_left_it(cluster: Control) -> None:
    compute = cluster.ecompute(traits=['CUSTOM_RACK_7'])
    assert traits(cluster, compute) == {'CUSTOM_RACK_7'}
    compute.stop()
    assert traits(cluster, compute) == {'CUSTOM_RACK_7', 'COMPUTE_STATUS_DISABLED'}
    assert (states(cluster), hosts(cluster)[compute.uuid]['disabled']) == ({compute.uuid: 'closed'}, False)
    compute.start()
    assert traits(cluster, compute) == {'CUSTOM_RACK_7'}
    host(cluster, 'disable', compute.uuid)
    for stop in (compute.stop, compute.kill):
        stop()
        compute.start()
        assert traits(cluster, compute) == {'CUSTOM_RACK_7', *BOTH}
        refused(cluster)
    # Enabled while it is stopped, it is open as soon as it starts.
    compute.stop()
    assert (states(cluster), hosts(cluster)[compute.uuid]['disabled']) == ({compute.uuid: 'closed'}, True)
    assert 'closed, disabled' in cluster.eschedule('hosts').stdout
    assert host(cluster, 'enable', compute.uuid) == [f'{compute.uuid}: enabled, as soon as its ecompute is started']
    assert traits(cluster, compute) == {'CUSTOM_RACK_7', 'COMPUTE_STATUS_DISABLED'}
    compute.start()
    place(cluster)
    # Disabled and enabled while it is silent and may not come back.
    silence(cluster, compute)
    assert 'disabled: nothing new' in host(cluster, 'disable', compute.uuid)[0]
    host(cluster, 'enable', compute.uuid)
    compute.start()
    assert traits(cluster, compute) == {'CUSTOM_RACK_7'}
    place(cluster)


def test_drain_says_what_lives_there_and_waits_for_it(cluster: Control, compute: Ecompute) -> None:
    assert host(cluster, 'drain', compute.uuid, '--wait') == [
        f'{compute.uuid}: disabled: nothing new is placed there, and what lives there goes on',
        f'{compute.uuid}: no instances there',
        f'{compute.uuid}: nothing lives there any more',
    ]
    host(cluster, 'enable', compute.uuid)
    web1 = place(cluster, SMALL, '--name', 'web1')[1]
    instances = sorted([web1, place(cluster)[1]])
    for instance in instances:
        addressed(cluster, instance)
    messages = host(cluster, 'drain', compute.uuid)
    assert messages[1] == f'{compute.uuid}: 2 instances there'
    assert messages[2:] == [f'{"web1" if instance == web1 else instance}: active' for instance in instances]
    timed_out = cluster.eschedule('host', 'drain', '--wait', '--timeout', '0', compute.uuid)
    assert timed_out.code == 6, timed_out
    assert 'still waiting for: 2 instances to go; it stays disabled' in timed_out.stderr.splitlines()[-1]
    with Eschedule(cluster, 'host', 'drain', '--wait', compute.uuid) as draining:
        # Draining destroys nothing by itself.
        assert cluster.eschedule('destroy', '--wait', instances[0]).code == 0
        assert not draining.has_ended
        assert cluster.eschedule('destroy', instances[1]).code == 0
        result = draining.end()
    assert result.code == 0, result
    assert result.stderr.splitlines()[-1].endswith(f'{compute.uuid}: nothing lives there any more')
    assert not cluster.etcd.keys(f'/hosts/{compute.uuid}/')
    assert cluster.placement.consumers(compute.uuid) == {}


@contextmanager
def draining_in_sight(control: Control, compute: Ecompute, looks: int = 2) -> Iterator[Eschedule]:
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
            until(lambda: requested_paths.count(allocations_path) > looks, 40, 'it has looked')
            yield draining


def test_drain_waits_for_one_that_asked_before(cluster: Control, compute: Ecompute) -> None:
    """The attempt has its candidates; it claims and delivers after it continues."""
    with Eschedule(cluster, SMALL, failpoint='announced:stop') as create:
        create.stopped_at('announced')
        with draining_in_sight(cluster, compute) as draining:
            assert traits(cluster, compute) >= BOTH
            assert not draining.has_ended
            create.go_on()
            result = create.end()
            if result.code == 0:  # placement had already answered
                instance = result.stdout.split()[-1]
                addressed(cluster, instance)
                assert not draining.has_ended
                assert cluster.eschedule('destroy', instance).code == 0
            assert draining.end().code == 0
    assert cluster.placement.consumers(compute.uuid) == {}


def test_drain_waits_for_one_that_is_being_taken_from_a_queue(cluster: Control) -> None:
    """Only a taker key from before the disable may belong to a taker that saw it enabled."""
    assert cluster.eschedule('flavor', 'set', 'small', SMALL).code == 0
    compute = cluster.ecompute()
    queued = cluster.eschedule('--queue', '--flavor', 'small')
    assert queued.code == 0, queued
    key = f'/queues/small/{queued.stdout.split()[-1]}/taker'

    def put_taker_key() -> None:
        cluster.etcd.put(key, f'{{"version": 1, "compute": "{compute.uuid}"}}', cluster.etcd.grant())

    put_taker_key()
    timed_out = cluster.eschedule('host', 'drain', '--wait', '--timeout', '0', compute.uuid)
    assert timed_out.code == 6, timed_out
    assert 'requests under way, which may be for it; it stays disabled' in timed_out.stderr.splitlines()[-1]
    # A taker key of the first two seconds may belong to a taker that checked its compute before it was disabled.
    with draining_in_sight(cluster, compute, looks=6) as draining:
        assert not draining.has_ended
        put_taker_key()  # as another taker does after the first gave the request back
        assert draining.end().code == 0
    cluster.etcd.delete(key)


@pytest.mark.slow
def test_enabled_in_the_moment_it_starts(cluster: Control) -> None:
    """The start saw it disabled and `enable` saw it stopped: a periodic check enables it."""
    compute = cluster.ecompute()
    host(cluster, 'disable', compute.uuid)
    path = f'/resource_providers/{compute.uuid}/traits'
    traits_reply = cluster.placement.call('GET', path)
    body = {**traits_reply, 'traits': ['COMPUTE_STATUS_DISABLED']}
    cluster.placement.call('PUT', path, body)
    until(lambda: not traits(cluster, compute), 90, 'it is enabled')
    place(cluster)


def test_traits_aggregates_and_ratios(cluster: Control) -> None:
    group, traits_of_one = NOBODY, ['CUSTOM_RACK_7', 'STORAGE_DISK_SSD']
    settings = {'traits': traits_of_one, 'aggregates': [group], 'allocation_ratios': {'VCPU': 2}}
    tuned_compute = cluster.ecompute('VCPU:1,DISK_GB:10,MEMORY_MB:512', **settings)
    cluster.ecompute()
    assert traits(cluster, tuned_compute) == {'CUSTOM_RACK_7', 'STORAGE_DISK_SSD'}, 'a fake has no processor'
    assert place(cluster, f'{SMALL}&required=CUSTOM_RACK_7')[0] == tuned_compute.uuid
    assert place(cluster, f'{SMALL}&member_of={group}&required=STORAGE_DISK_SSD')[0] == tuned_compute.uuid
    messages = refused(cluster, f'{SMALL}&required=CUSTOM_RACK_7')
    assert any('VCPU short by 1 (free 0 of 2)' in line for line in messages), messages
    assert any(line.endswith('lacks CUSTOM_RACK_7') for line in messages), messages
