"""host disable, drain and enable: what is disabled gets nothing new, whoever restarts or kills it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kit.commands import Control, Ecompute, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.hands import Eschedule
from tests.kit.invariants import check
from tests.kit.servers import until
from tests.kit.sharing import hosts, silence, states
from tests.kit.story import NOBODY, SMALL, addressed, one_line, place, reached

BOTH = {'COMPUTE_STATUS_DISABLED', 'CUSTOM_ECOMP_DISABLED'}


def traits(control: Control, compute: Ecompute) -> set[str]:
    return set(control.placement.call('GET', f'/resource_providers/{compute.uuid}/traits')['traits'])


def host(control: Control, command: str, word: str, *options: str) -> list[str]:
    """What `host disable|drain|enable` says."""
    result = control.eschedule('host', command, word, *options)
    assert (result.code, result.stdout) == (0, ''), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def named(control: Control, **settings: object) -> tuple[Ecompute, str]:
    """A compute, and its host name as etcd has it."""
    compute = control.ecompute(**settings)  # type: ignore[arg-type]
    return compute, str(hosts(control)[compute.uuid]['hostname'])


def refused(control: Control, *words: str) -> list[str]:
    result = control.eschedule(*(words or (SMALL,)))
    assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def test_disabled_it_gets_nothing_while_others_do_and_enabled_it_does(cluster: Control) -> None:
    one, two = cluster.ecompute(), cluster.ecompute()
    kept = place(cluster, f'{SMALL}&in_tree={one.uuid}')[1]
    address = addressed(cluster, kept)
    assert host(cluster, 'disable', one.uuid) == [
        f'{one.uuid}: disabled: nothing new is placed there, and what lives there goes on'
    ]
    assert host(cluster, 'disable', one.uuid.upper()) == [f'{one.uuid}: is disabled already']
    assert states(cluster) == {one.uuid: 'disabled', two.uuid: 'up'}
    assert f'{one.uuid}  ' in cluster.eschedule('hosts').stdout
    assert [each['disabled'] for each in hosts(cluster).values()] == [each == one.uuid for each in hosts(cluster)]
    # Four fill it: --count asks as well, and so does plan.
    plan = cluster.eschedule('plan', SMALL).stdout
    assert two.uuid in plan
    assert one.uuid not in plan
    placed = cluster.eschedule('--count', '4', SMALL)
    assert placed.code == 0, placed
    assert placed.stdout.count(f'NOTIFIED TARGET, {two.uuid}, ') == 4
    assert any('is disabled (eschedule host enable ' in line for line in refused(cluster))
    assert addressed(cluster, kept) == address
    assert host(cluster, 'enable', one.uuid) == [f'{one.uuid}: enabled']
    assert host(cluster, 'enable', one.uuid) == [f'{one.uuid}: is enabled already']
    assert place(cluster)[0] == one.uuid
    check(cluster, one, two)


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
    two, _ = named(cluster)
    one_line(cluster.eschedule('host', 'disable', name), 5, 'the host name of 2 computes', compute.uuid, two.uuid)


def test_who_asks_for_disabled_ones_gets_them(cluster: Control, compute: Ecompute) -> None:
    host(cluster, 'disable', compute.uuid)
    query = f'{SMALL}&required=COMPUTE_STATUS_DISABLED'
    uuid, instance = place(cluster, query)
    assert uuid == compute.uuid
    # The record has the words of the user, and so the same request is the same.
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
    for end in (compute.stop, compute.kill):
        end()
        compute.start()
        assert traits(cluster, compute) == {'CUSTOM_RACK_7', *BOTH}
        refused(cluster)
    # Enabled while it is stopped, it is open as soon as it is started.
    compute.stop()
    assert (states(cluster), hosts(cluster)[compute.uuid]['disabled']) == ({compute.uuid: 'closed'}, True)
    assert 'closed, disabled' in cluster.eschedule('hosts').stdout
    assert host(cluster, 'enable', compute.uuid) == [f'{compute.uuid}: enabled, as soon as its ecompute is started']
    assert traits(cluster, compute) == {'CUSTOM_RACK_7', 'COMPUTE_STATUS_DISABLED'}
    compute.start()
    place(cluster)
    # Disabled and enabled while nobody knows whether it will be back.
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
    named = place(cluster, SMALL, '--name', 'web1')[1]
    instances = sorted([named, place(cluster)[1]])
    for each in instances:
        addressed(cluster, each)
    said = host(cluster, 'drain', compute.uuid)
    assert said[1] == f'{compute.uuid}: 2 instances there'
    assert said[2:] == [f'{"web1" if each == named else each}: active' for each in instances]
    late = cluster.eschedule('host', 'drain', '--wait', '--timeout', '0', compute.uuid)
    assert late.code == 6, late
    assert 'still waiting for: 2 instances to go; it stays disabled' in late.stderr.splitlines()[-1]
    with Eschedule(cluster, 'host', 'drain', '--wait', compute.uuid) as draining:
        # Nothing is destroyed but by who wants it.
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
    """A drain that has looked so often at what is there, about once a second: it knows who was at it before."""
    asked: list[str] = []
    with FaultyPlacement(control.placement.port) as placement:
        placement.fail('broken', lambda _, path: bool(asked.append(path)))
        config = write_config(control.directory / 'drain.yaml', control.etcd.endpoint, placement.url)
        with Eschedule(control, 'host', 'drain', '--wait', compute.uuid, config=config) as draining:
            # Once for what it says, and then at each look, behind the one at who is at it.
            held = f'/resource_providers/{compute.uuid}/allocations'
            until(lambda: asked.count(held) > looks, 40, 'it has looked')
            yield draining


def test_drain_waits_for_one_that_asked_before(cluster: Control, compute: Ecompute) -> None:
    """It has its candidates, and claims and delivers when it goes on."""
    with Eschedule(cluster, SMALL, failpoint='announced:stop') as slow:
        slow.stopped_at('announced')
        with draining_in_sight(cluster, compute) as draining:
            assert traits(cluster, compute) >= BOTH
            assert not draining.has_ended
            slow.go_on()
            result = slow.end()
            if result.code == 0:  # placement had answered before
                instance = result.stdout.split()[-1]
                addressed(cluster, instance)
                assert not draining.has_ended
                assert cluster.eschedule('destroy', instance).code == 0
            assert draining.end().code == 0
    assert cluster.placement.consumers(compute.uuid) == {}


def test_drain_waits_for_one_that_is_being_taken_from_a_queue(cluster: Control) -> None:
    """The taker may have heard that it is open; who marks a request from then on hears that it is not."""
    assert cluster.eschedule('flavor', 'set', 'small', SMALL).code == 0
    compute = cluster.ecompute()
    queued = cluster.eschedule('--queue', '--flavor', 'small')
    assert queued.code == 0, queued
    key = f'/queues/small/{queued.stdout.split()[-1]}/taker'

    def mark() -> None:
        cluster.etcd.put(key, f'{{"version": 1, "compute": "{compute.uuid}"}}', cluster.etcd.grant())

    mark()
    late = cluster.eschedule('host', 'drain', '--wait', '--timeout', '0', compute.uuid)
    assert late.code == 6, late
    assert 'requests under way, which may be for it; it stays disabled' in late.stderr.splitlines()[-1]
    # Who marks it in the first two seconds may have looked at its compute before that was disabled.
    with draining_in_sight(cluster, compute, looks=6) as draining:
        assert not draining.has_ended
        mark()  # as another does after the first has given it back
        assert draining.end().code == 0
    cluster.etcd.delete(key)


@pytest.mark.slow
def test_enabled_in_the_moment_it_starts(cluster: Control) -> None:
    """The start saw it disabled, and enable saw it stopped: within a minute it is open all the same."""
    compute = cluster.ecompute()
    host(cluster, 'disable', compute.uuid)
    path = f'/resource_providers/{compute.uuid}/traits'
    there = cluster.placement.call('GET', path)
    body = {**there, 'traits': ['COMPUTE_STATUS_DISABLED']}
    cluster.placement.call('PUT', path, body)
    until(lambda: not traits(cluster, compute), 90, 'it is enabled')
    place(cluster)


def test_traits_aggregates_and_ratios(cluster: Control) -> None:
    group, traits_of_one = NOBODY, ['CUSTOM_RACK_7', 'STORAGE_DISK_SSD']
    settings = {'traits': traits_of_one, 'aggregates': [group], 'allocation_ratios': {'VCPU': 2}}
    one = cluster.ecompute('VCPU:1,DISK_GB:10,MEMORY_MB:512', **settings)
    cluster.ecompute()
    assert traits(cluster, one) == {'CUSTOM_RACK_7', 'STORAGE_DISK_SSD'}, 'a fake has no processor'
    assert place(cluster, f'{SMALL}&required=CUSTOM_RACK_7')[0] == one.uuid
    assert place(cluster, f'{SMALL}&member_of={group}&required=STORAGE_DISK_SSD')[0] == one.uuid
    said = refused(cluster, f'{SMALL}&required=CUSTOM_RACK_7')
    assert any('VCPU short by 1 (free 0 of 2)' in line for line in said), said
    assert any(line.endswith('lacks CUSTOM_RACK_7') for line in said), said
