"""F13: etcd wiped, restored or replaced, while ecompute runs or is away."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.etcds import SavedSnapshot, Snapshot, wipe
from tests.kit.by_hand import make_request, put_claim
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import check_settled, read_guests, restart_accepting_etcd
from tests.kit.servers import Etcd, wait_until
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    boot,
    find_log_lines,
    place,
    read_log,
    read_reserved,
    require_record,
    wait_address,
    wait_log_lines,
    wait_state,
)
from tests.kit.tuned import make_tuned

STRANGE_ETCD_MESSAGE = 'is not the one that this compute used before'
FAILPOINTS = (REPUBLISHED := 'republished',)


def read_known_etcd(compute: Ecompute) -> dict[str, Any]:
    return dict(json.loads((compute.directory / 'state' / 'etcd.json').read_text()))


def stop_compute(compute: Ecompute) -> None:
    assert compute.stop() == 0


def put_request(control: Control, compute: Ecompute, instance: str, **more: str) -> None:
    """Write a request with a valid claim, as an eschedule of the new etcd would."""
    put_claim(control, instance, compute.uuid)
    value = {'version': 1, **make_request(compute.uuid, instance), **more}
    control.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(value))


def check_strange_etcd_logged(compute: Ecompute, before: int = 0) -> None:
    wait_until(
        lambda: len(find_log_lines(compute, STRANGE_ETCD_MESSAGE, 'this compute is read-only from now on')) > before,
        30,
        f'it is loud; see {compute.log}',
    )
    lines = find_log_lines(compute, STRANGE_ETCD_MESSAGE)
    assert len(lines) == before + 1, lines
    assert 'ecompute --accept-new-etcd' in lines[-1]
    assert compute.is_running


@pytest.mark.parametrize('away', [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.history_broken('etcd is wiped')
def test_wiped_etcd_changes_nothing_until_accepted(own_control: Control, compute: Ecompute, away: bool) -> None:
    """F13: etcd wiped: guests stay, and nothing is done until it is accepted (fake)."""
    etcd = own_control.etcd
    script = own_control.directory / 'script'
    script.write_text('#!/bin/sh\n')
    _, named = place(own_control, SMALL_QUERY, '--name', 'one', '--user-data', str(script))
    _, unnamed = place(own_control)
    address = wait_address(own_control, named)
    wait_address(own_control, unnamed)
    original_request = etcd.get(f'/hosts/{compute.uuid}/{named}')
    wait_until(lambda: read_known_etcd(compute)['revision'] > 5, 5, 'what was seen is remembered')
    if away:
        compute.kill()
    wipe(etcd)
    if away:
        compute.launch()
    check_strange_etcd_logged(compute)
    # It does not build a request in that etcd, carry out a tombstone or publish its presence.
    put_request(own_control, compute, UNKNOWN_UUID)
    tombstone = {'version': 1, 'instance': named, 'allocations': {}, 'image': None}
    etcd.put(f'/hosts/{compute.uuid}/{named}', json.dumps(tombstone))
    before = read_reserved(own_control, compute.uuid)
    stop_compute(compute)
    assert 'stopping' in read_log(compute)[-1]
    compute.launch()
    check_strange_etcd_logged(compute, 1)
    assert read_reserved(own_control, compute.uuid) == before
    assert set(read_guests(compute)) == {named, unnamed}
    assert all(guest['running'] for guest in read_guests(compute).values())
    assert etcd.list_keys('/computes/') == []
    assert etcd.list_keys('/instances/') == []
    assert etcd.get('/cluster') is None
    etcd.delete(f'/hosts/{compute.uuid}/{named}')
    restart_accepting_etcd(compute)
    assert wait_address(own_control, named) == address
    assert original_request == etcd.get(f'/hosts/{compute.uuid}/{named}')
    assert json.loads(etcd.get('/names/one') or b'') == {'version': 1, 'instance': named}
    assert wait_address(own_control, unnamed)
    assert wait_address(own_control, UNKNOWN_UUID)
    for instance in (named, unnamed):
        status = require_record(own_control, instance)
        assert (status['state'], status['fault']) == ('active', None)
        assert not find_log_lines(compute, 'INSTANTIATE', instance)[1:]
    allocation = own_control.placement.read_allocations(named)
    assert allocation == {compute.uuid: {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}}
    check_settled(own_control, compute)
    compute.restart()
    result = own_control.eschedule('destroy', '--wait', named)
    assert result.code == 0, result


@pytest.mark.parametrize(
    ('kind', 'away'),
    [
        (Snapshot, True),
        pytest.param(SavedSnapshot, False, marks=pytest.mark.slow),
        pytest.param(Snapshot, False, marks=pytest.mark.slow),
        pytest.param(SavedSnapshot, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.history_broken('etcd is restored from an older copy')
def test_restored_etcd_is_repaired_after_acceptance(
    own_control: Control, kind: Callable[[Etcd], Snapshot], away: bool
) -> None:
    """F13: etcd restored: destroyed instances stay gone, newer ones are published (fake)."""
    etcd, compute = own_control.etcd, own_control.ecompute('VCPU:8,DISK_GB:20,MEMORY_MB:2048')
    _, surviving = place(own_control, SMALL_QUERY, '--name', 'kept')
    _, destroyed = place(own_control, SMALL_QUERY, '--name', 'destroyed')
    for instance in (surviving, destroyed):
        wait_address(own_control, instance)
    older = kind(etcd)
    wait_until(
        lambda: not find_log_lines(compute, 'cannot be reached') or find_log_lines(compute, 'is back'),
        15,
        'it follows etcd again',
    )
    assert own_control.eschedule('destroy', '--wait', destroyed).code == 0
    newer = boot(own_control, SMALL_QUERY, '--name', 'came')
    compute_log = len(find_log_lines(compute, STRANGE_ETCD_MESSAGE))
    assert compute_log == 0
    if away:
        stop_compute(compute)
    older.restore()
    if away:
        compute.launch()
    check_strange_etcd_logged(compute)
    assert set(read_guests(compute)) == {surviving, newer}
    # One more instance has a tombstone when the etcd is accepted: that one is carried out.
    tombstone = json.loads(etcd.get(f'/hosts/{compute.uuid}/{surviving}') or b'{}')
    etcd.put(f'/hosts/{compute.uuid}/{surviving}', json.dumps({**tombstone, 'allocations': {}, 'image': None}))
    restart_accepting_etcd(compute)
    wait_state(own_control, surviving, 'gone')
    wait_state(own_control, destroyed, 'gone')
    wait_state(own_control, newer, 'active')
    wait_until(lambda: set(read_guests(compute)) == {newer}, 10, 'only what came since is here')
    assert len(wait_log_lines(compute, 'INSTANTIATE', destroyed)) == 1
    assert etcd.list_keys('/names/') == ['/names/came']
    check_settled(own_control, compute)
    stop_compute(compute)
    compute.start()
    check_settled(own_control, compute)


@pytest.mark.history_broken('etcd is wiped')
def test_killed_during_acceptance(own_control: Control) -> None:
    """F13: kill -9 between publishing and recording: the next start continues (fake)."""
    compute = make_tuned(own_control)
    instance = boot(own_control)
    stop_compute(compute)
    wipe(own_control.etcd)
    compute.failpoint = f'{REPUBLISHED}:stop'
    compute.options = ['--accept-new-etcd']
    compute.launch()
    compute.wait_frozen_at(REPUBLISHED)
    compute.kill()
    compute.failpoint = ''
    compute.options = []
    compute.launch()
    check_strange_etcd_logged(compute)
    restart_accepting_etcd(compute)
    wait_state(own_control, instance, 'active')
    check_settled(own_control, compute)


def test_lost_claim_without_room_is_a_fault(own_control: Control) -> None:
    """F13: etcd wiped, the claim lost and its room taken: the guest stays, a fault (fake)."""
    compute = own_control.ecompute('VCPU:1,DISK_GB:10,MEMORY_MB:512')
    instance = boot(own_control)
    stop_compute(compute)
    wipe(own_control.etcd)
    own_control.placement.call('DELETE', f'/allocations/{instance}')
    provider = f'/resource_providers/{compute.uuid}'
    inventories = {'VCPU': {'total': 1}, 'DISK_GB': {'total': 10}, 'MEMORY_MB': {'total': 512}}
    generation = own_control.placement.call('GET', provider)['generation']
    body = {'inventories': inventories, 'resource_provider_generation': generation}
    own_control.placement.call('PUT', f'{provider}/inventories', body)
    put_claim(own_control, UNKNOWN_UUID, compute.uuid, amounts={'VCPU': 1})
    restart_accepting_etcd(compute)
    status = wait_state(own_control, instance, 'active')
    assert 'has no claim for it' in status['fault']
    assert read_guests(compute)[instance]['running']
    own_control.placement.call('DELETE', f'/allocations/{UNKNOWN_UUID}')
    stop_compute(compute)
    restart_accepting_etcd(compute)
    assert own_control.placement.read_allocations(instance)
    check_settled(own_control, compute)
