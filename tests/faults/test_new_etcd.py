"""F13: etcd wiped, restored or replaced, while ecompute runs or is away."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from ecomp.lab import elab, state
from ecomp.lab.machine import CONTROL
from tests.faults.etcds import SavedSnapshot, Snapshot, wipe
from tests.kit.boot_sectors import HALT, boot_disk
from tests.kit.by_hand import claim, request
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import accept, guests, settled
from tests.kit.hypervisor import ROOM, Hypervisor
from tests.kit.lab import Lab, lab_name, running
from tests.kit.servers import Etcd, PlacementServer, until
from tests.kit.story import NOBODY, SMALL, addressed, boot, known, log_of, logged, logs, place, reached, reserved
from tests.kit.tuned import tuned

# F13: etcd wiped, restored or replaced, while ecompute runs or is away: it is read-only and logs this until accepted.


STRANGE = 'is not the one this compute knew'
FAILPOINTS = (REPUBLISHED := 'republished',)


def remembered(compute: Ecompute) -> dict[str, Any]:
    """Read what its state directory has recorded of etcd."""
    return dict(json.loads((compute.directory / 'state' / 'etcd.json').read_text()))


def stop(compute: Ecompute) -> None:
    assert compute.stop() == 0


def request_by_hand(control: Control, compute: Ecompute, instance: str, **more: str) -> None:
    """Write a request with a valid claim, as an eschedule of the new etcd would."""
    claim(control, instance, compute.uuid)
    value = {'version': 1, **request(compute.uuid, instance), **more}
    control.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(value))


def is_loud(compute: Ecompute, before: int = 0) -> None:
    """Check that it logs once what is strange and how to accept it, and keeps running."""
    until(lambda: len(logged(compute, STRANGE, 'From now on')) > before, 30, f'it is loud; see {compute.log}')
    lines = logged(compute, STRANGE)
    assert len(lines) == before + 1, lines
    assert 'ecompute --accept-new-etcd' in lines[-1]
    assert compute.is_running


def test_the_first_compute_names_etcd_and_all_remember_it(own_control: Control) -> None:
    """F13: /cluster is written once, and facts seen of etcd are remembered across kill -9 (fake)."""
    first, second = own_control.ecompute(), own_control.ecompute()
    written = json.loads(own_control.etcd.get('/cluster') or b'{}')
    assert written['version'] == 1
    assert written['since'].startswith('20')
    assert remembered(first)['identity'] == remembered(second)['identity'] == written['identity']
    compute, instance = place(own_control)
    addressed(own_control, instance)
    owner = first if first.uuid == compute else second
    revision = int(own_control.etcd.call('kv/range', {'key': 'eA=='})['header']['revision'])
    until(lambda: remembered(owner)['revision'] >= revision, 10, 'the revision of its own last write is remembered')
    owner.kill()
    assert remembered(owner)['revision'] >= revision
    owner.start()
    own_control.etcd.kill()
    own_control.etcd.start()
    own_control.etcd.compact()
    boot(own_control)
    assert json.loads(own_control.etcd.get('/cluster') or b'{}') == written
    assert logged(first, STRANGE) + logged(second, STRANGE) == []
    settled(own_control, first, second)


@pytest.mark.parametrize('away', [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.history_broken('etcd is wiped')
def test_wiped(own_control: Control, compute: Ecompute, away: bool) -> None:
    """F13: etcd wiped, while ecompute runs or is away: guests stay, nothing is done until it is accepted (fake)."""
    etcd = own_control.etcd
    script = own_control.directory / 'script'
    script.write_text('#!/bin/sh\n')
    _, named = place(own_control, SMALL, '--name', 'one', '--user-data', str(script))
    _, unnamed = place(own_control)
    address = addressed(own_control, named)
    addressed(own_control, unnamed)
    original_request = etcd.get(f'/hosts/{compute.uuid}/{named}')
    until(lambda: remembered(compute)['revision'] > 5, 5, 'what was seen is remembered')
    if away:
        compute.kill()
    wipe(etcd)
    if away:
        compute.launch()
    is_loud(compute)
    # It does not build a request in that etcd, carry out a tombstone or publish its presence.
    request_by_hand(own_control, compute, NOBODY)
    tombstone = {'version': 1, 'instance': named, 'allocations': {}, 'image': None}
    etcd.put(f'/hosts/{compute.uuid}/{named}', json.dumps(tombstone))
    before = reserved(own_control, compute.uuid)
    stop(compute)
    assert 'stopping' in log_of(compute)[-1]
    compute.launch()
    is_loud(compute, 1)
    assert reserved(own_control, compute.uuid) == before
    assert set(guests(compute)) == {named, unnamed}
    assert all(guest['running'] for guest in guests(compute).values())
    assert etcd.keys('/computes/') == []
    assert etcd.keys('/instances/') == []
    assert etcd.get('/cluster') is None
    etcd.delete(f'/hosts/{compute.uuid}/{named}')
    accept(compute)
    assert addressed(own_control, named) == address
    assert original_request == etcd.get(f'/hosts/{compute.uuid}/{named}')
    assert json.loads(etcd.get('/names/one') or b'') == {'version': 1, 'instance': named}
    assert addressed(own_control, unnamed)
    assert addressed(own_control, NOBODY)
    for instance in (named, unnamed):
        status = known(own_control, instance)
        assert (status['state'], status['fault']) == ('active', None)
        assert not logged(compute, 'INSTANTIATE', instance)[1:]
    allocation = own_control.placement.allocations(named)
    assert allocation == {compute.uuid: {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}}
    settled(own_control, compute)
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
def test_restored(own_control: Control, kind: Callable[[Etcd], Snapshot], away: bool) -> None:
    """F13: etcd restored from an older snapshot: destroyed instances stay gone, newer ones are published (fake)."""
    etcd, compute = own_control.etcd, own_control.ecompute('VCPU:8,DISK_GB:20,MEMORY_MB:2048')
    _, surviving = place(own_control, SMALL, '--name', 'kept')
    _, destroyed = place(own_control, SMALL, '--name', 'destroyed')
    for instance in (surviving, destroyed):
        addressed(own_control, instance)
    older = kind(etcd)
    until(lambda: not logged(compute, 'cannot be reached') or logged(compute, 'is back'), 15, 'it follows etcd again')
    assert own_control.eschedule('destroy', '--wait', destroyed).code == 0
    newer = boot(own_control, SMALL, '--name', 'came')
    compute_log = len(logged(compute, STRANGE))
    assert compute_log == 0
    if away:
        stop(compute)
    older.restore()
    if away:
        compute.launch()
    is_loud(compute)
    assert set(guests(compute)) == {surviving, newer}
    # One more instance has a tombstone when the etcd is accepted: that one is carried out.
    tombstone = json.loads(etcd.get(f'/hosts/{compute.uuid}/{surviving}') or b'{}')
    etcd.put(f'/hosts/{compute.uuid}/{surviving}', json.dumps({**tombstone, 'allocations': {}, 'image': None}))
    accept(compute)
    reached(own_control, surviving, 'gone')
    reached(own_control, destroyed, 'gone')
    reached(own_control, newer, 'active')
    until(lambda: set(guests(compute)) == {newer}, 10, 'only what came since is here')
    assert len(logs(compute, 'INSTANTIATE', destroyed)) == 1
    assert etcd.keys('/names/') == ['/names/came']
    settled(own_control, compute)
    stop(compute)
    compute.start()
    settled(own_control, compute)


@pytest.mark.history_broken('etcd is wiped')
def test_a_name_that_was_given_away_meanwhile(own_control: Control, compute: Ecompute) -> None:
    """F13: etcd wiped, and a name taken by another instance before it is accepted: a fault reports it (fake)."""
    etcd = own_control.etcd
    instance = boot(own_control, SMALL, '--name', 'one')
    wipe(etcd)
    is_loud(compute)
    request_by_hand(own_control, compute, NOBODY, name='one')
    etcd.put('/names/one', json.dumps({'version': 1, 'instance': NOBODY}))
    accept(compute)
    addressed(own_control, NOBODY)
    status = reached(own_control, instance, 'active')
    assert status['fault'] == "its name one was another instance's when this etcd was accepted"
    assert len(logs(compute, instance, 'its name one was another')) == 1
    audit = own_control.eschedule('audit')
    assert audit.code == 8
    assert [line.split()[:2] for line in audit.stdout.splitlines()[1:]] == [['name-missing', instance]]
    # It releases only what is its own.
    assert own_control.eschedule('destroy', '--wait', instance).code == 0
    assert json.loads(etcd.get('/names/one') or b'')['instance'] == NOBODY


@pytest.mark.slow
@pytest.mark.history_broken('etcd is restored from an older copy')
def test_restored_and_overtaken(own_control: Control, compute: Ecompute) -> None:
    """F13: restored long ago, with a revision higher than before: noticed by its raft term (fake)."""
    etcd = own_control.etcd
    boot(own_control)
    older = SavedSnapshot(etcd)
    for _ in range(3):
        etcd.restart()
    boot(own_control)
    stop(compute)
    before = remembered(compute)
    older.restore()
    for number in range(200):
        etcd.put('/elsewhere', str(number))
    assert int(etcd.call('kv/range', {'key': 'eA=='})['header']['revision']) > before['revision']
    compute.launch()
    is_loud(compute)
    assert 'raft term' in logs(compute, STRANGE)[0]
    accept(compute)


@pytest.mark.history_broken('etcd is wiped')
def test_a_destroy_that_was_accepted_goes_on(own_control: Control) -> None:
    """F13: etcd wiped during a destroy: after acceptance the destroy continues (fake)."""
    compute = tuned(own_control)
    instance = boot(own_control)
    stop(compute)
    compute.failpoint = 'destroying:stop'
    compute.start()
    assert own_control.eschedule('destroy', instance).code == 0
    compute.stopped_at('destroying')
    compute.kill()
    compute.failpoint = ''
    assert known(own_control, instance)['state'] == 'destroying'
    wipe(own_control.etcd)
    accept(compute)
    reached(own_control, instance, 'gone')
    settled(own_control, compute)


def test_a_build_under_way_goes_on(own_control: Control) -> None:
    """F13: etcd wiped during a build: after acceptance the build continues (fake)."""
    compute = tuned(own_control)
    stop(compute)
    compute.failpoint = 'seeded:stop'
    compute.start()
    _, instance = place(own_control)
    compute.stopped_at('seeded')
    compute.kill()
    compute.failpoint = ''
    wipe(own_control.etcd)
    accept(compute)
    addressed(own_control, instance)
    settled(own_control, compute)


@pytest.mark.history_broken('etcd is wiped')
def test_killed_while_it_accepts(own_control: Control) -> None:
    """F13: kill -9 between publishing and recording: the next start finds the same state and continues (fake)."""
    compute = tuned(own_control)
    instance = boot(own_control)
    stop(compute)
    wipe(own_control.etcd)
    compute.failpoint = f'{REPUBLISHED}:stop'
    compute.options = ['--accept-new-etcd']
    compute.launch()
    compute.stopped_at(REPUBLISHED)
    compute.kill()
    compute.failpoint = ''
    compute.options = []
    compute.launch()
    is_loud(compute)
    accept(compute)
    reached(own_control, instance, 'active')
    settled(own_control, compute)


def test_no_room_for_a_lost_claim(own_control: Control) -> None:
    """F13: etcd wiped, and the claim lost and its room taken: the guest stays, with a fault (fake)."""
    compute = own_control.ecompute('VCPU:1,DISK_GB:10,MEMORY_MB:512')
    instance = boot(own_control)
    stop(compute)
    wipe(own_control.etcd)
    own_control.placement.call('DELETE', f'/allocations/{instance}')
    provider = f'/resource_providers/{compute.uuid}'
    inventories = {'VCPU': {'total': 1}, 'DISK_GB': {'total': 10}, 'MEMORY_MB': {'total': 512}}
    generation = own_control.placement.call('GET', provider)['generation']
    body = {'inventories': inventories, 'resource_provider_generation': generation}
    own_control.placement.call('PUT', f'{provider}/inventories', body)
    claim(own_control, NOBODY, compute.uuid, room={'VCPU': 1})
    accept(compute)
    status = reached(own_control, instance, 'active')
    assert 'without a claim' in status['fault']
    assert guests(compute)[instance]['running']
    own_control.placement.call('DELETE', f'/allocations/{NOBODY}')
    stop(compute)
    accept(compute)
    assert own_control.placement.allocations(instance)
    settled(own_control, compute)


def test_a_lost_claim_is_made_again(own_control: Control, compute: Ecompute, own_placement: PlacementServer) -> None:
    """F13: etcd wiped and the claim lost, too: claimed again (fake)."""
    instance = boot(own_control)
    allocation = own_placement.allocations(instance)
    stop(compute)
    wipe(own_control.etcd)
    own_placement.call('DELETE', f'/allocations/{instance}')
    accept(compute)
    assert own_placement.allocations(instance) == allocation


@pytest.mark.slow
@pytest.mark.parametrize('value', [None, '{"version": 1, "identity": "5ca1ab1e-0000-4000-8000-000000000000"}', 'x'])
def test_another_identity(own_control: Control, value: str | None) -> None:
    """F13: /cluster deleted or replaced: noticed at the next start (fake)."""
    compute = own_control.ecompute()
    stop(compute)
    written = own_control.etcd.get('/cluster')
    assert written is not None
    if value is None:
        own_control.etcd.delete('/cluster')
    else:
        own_control.etcd.put('/cluster', value)
    compute.launch()
    is_loud(compute)
    stop(compute)
    # Its records are intact: with the original value it works as before.
    own_control.etcd.put('/cluster', written)
    compute.start()
    compute.stop(signal.SIGINT)
    if value == 'x':
        own_control.etcd.put('/cluster', value)
        compute.options = ['--accept-new-etcd']
        compute.launch()
        until(lambda: not compute.is_running, 20, 'there is nothing to accept')
        assert '/cluster' in log_of(compute)[-1]
    else:
        own_control.etcd.delete('/cluster')
        accept(compute)


# F13 with real guests: the etcd of a lab is wiped, and accepted.


@pytest.fixture
def own_host() -> Iterator[Hypervisor]:
    """A host of a lab of this test's own, because wiping its etcd affects every host."""
    if os.geteuid() != 0:
        pytest.skip('hypervisors in namespaces need root')
    lab = Lab(lab_name('etcd'), 1)
    try:
        (lab.directory / 'images/idle.raw').write_bytes(boot_disk(HALT))
        host = Hypervisor(lab, 'hv1')
        host.compute = lab.compute('hv1')
        config = host.directory / 'compute.yaml'
        config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), 'inventory': ROOM}))
        host.restart()
        yield host
    finally:
        lab.close()


def wipe_lab(lab: Lab) -> None:
    """Delete everything from the lab's etcd."""
    lab_state = state.load(lab.name)
    assert lab_state is not None
    pid = lab_state.processes['etcd'].pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not running(pid), 20, 'etcd ends')
    shutil.rmtree(lab.directory / CONTROL / 'etcd')
    elab.start_control(lab_state)


@pytest.mark.slow
@pytest.mark.history_broken('etcd is wiped')
def test_wiped_under_guests(own_host: Hypervisor) -> None:
    """F13: etcd wiped while guests run: they keep running through a restart and the acceptance (libvirt)."""
    first, second = own_host.running(), own_host.running()
    qemus = {name: own_host.qemu(name) for name in (first, second)}
    assert all(qemus.values())
    destroyed = own_host.running()
    own_host.ask_destroy(destroyed)
    own_host.reached(destroyed, 'gone')
    wipe_lab(own_host.lab)
    until(lambda: own_host.lines('is not the one this compute knew'), 30, 'it is loud')
    assert own_host.is_running
    own_host.kill(signal.SIGTERM)
    own_host.launch()
    until(lambda: own_host.lines('is not the one this compute knew'), 30, 'it is loud again')
    assert {name: own_host.qemu(name) for name in qemus} == qemus
    assert own_host.lab.etcd('/') == {}
    own_host.kill(signal.SIGTERM)
    own_host.launch('', '--accept-new-etcd')
    own_host.wait_ready()
    for instance in qemus:
        own_host.reached(instance, 'active', fault=None)
    assert {name: own_host.qemu(name) for name in qemus} == qemus
    own_host.settled()
    own_host.restart()
    own_host.ask_destroy(first, second)
    for instance in qemus:
        own_host.reached(instance, 'gone')
        own_host.nothing_of(instance)
    own_host.settled()
