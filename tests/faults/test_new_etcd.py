"""F13: etcd wiped, restored or exchanged, with ecompute at work or away."""

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

# F13: etcd wiped, restored or exchanged, with ecompute at work or away: read-only and loud, until it is accepted.


STRANGE = 'is not the one this compute knew'
FAILPOINTS = (REPUBLISHED := 'republished',)


def remembered(compute: Ecompute) -> dict[str, Any]:
    """What its state directory knows of etcd."""
    return dict(json.loads((compute.directory / 'state' / 'etcd.json').read_text()))


def stop(compute: Ecompute) -> None:
    assert compute.stop() == 0


def request_by_hand(control: Control, compute: Ecompute, instance: str, **more: str) -> None:
    """A request of which the claim is in order, as an eschedule with the new etcd would write it."""
    claim(control, instance, compute.uuid)
    value = {'version': 1, **request(compute.uuid, instance), **more}
    control.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(value))


def is_loud(compute: Ecompute, before: int = 0) -> None:
    """It says once what it met and what to do, and goes on running."""
    until(lambda: len(logged(compute, STRANGE, 'From now on')) > before, 30, f'it is loud; see {compute.log}')
    said = logged(compute, STRANGE)
    assert len(said) == before + 1, said
    assert 'ecompute --accept-new-etcd' in said[-1]
    assert compute.is_running


def test_the_first_compute_names_etcd_and_all_remember_it(own_control: Control) -> None:
    """F13: /cluster is written once, and what is seen of etcd is remembered across kill -9 (fake)"""
    first, second = own_control.ecompute(), own_control.ecompute()
    written = json.loads(own_control.etcd.get('/cluster') or b'{}')
    assert written['version'] == 1
    assert written['since'].startswith('20')
    assert remembered(first)['identity'] == remembered(second)['identity'] == written['identity']
    compute, instance = place(own_control)
    addressed(own_control, instance)
    its = first if first.uuid == compute else second
    revision = int(own_control.etcd.call('kv/range', {'key': 'eA=='})['header']['revision'])
    until(lambda: remembered(its)['revision'] >= revision, 10, 'the revision of its own last write is remembered')
    its.kill()
    assert remembered(its)['revision'] >= revision
    its.start()
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
    """F13: etcd wiped, while ecompute is at work or away: guests stay, nothing is done, until it is accepted (fake)"""
    etcd = own_control.etcd
    script = own_control.directory / 'script'
    script.write_text('#!/bin/sh\n')
    _, one = place(own_control, SMALL, '--name', 'one', '--user-data', str(script))
    _, two = place(own_control)
    address = addressed(own_control, one)
    addressed(own_control, two)
    asked = etcd.get(f'/hosts/{compute.uuid}/{one}')
    until(lambda: remembered(compute)['revision'] > 5, 5, 'what was seen is remembered')
    if away:
        compute.kill()
    wipe(etcd)
    if away:
        compute.launch()
    is_loud(compute)
    # A request in it is not built, a tombstone in it is not carried out, and nobody is told that we live.
    request_by_hand(own_control, compute, NOBODY)
    tombstone = {'version': 1, 'instance': one, 'allocations': {}, 'image': None}
    etcd.put(f'/hosts/{compute.uuid}/{one}', json.dumps(tombstone))
    before = reserved(own_control, compute.uuid)
    stop(compute)
    assert 'stopping' in log_of(compute)[-1]
    compute.launch()
    is_loud(compute, 1)
    assert reserved(own_control, compute.uuid) == before
    assert set(guests(compute)) == {one, two}
    assert all(each['running'] for each in guests(compute).values())
    assert etcd.keys('/computes/') == []
    assert etcd.keys('/instances/') == []
    assert etcd.get('/cluster') is None
    etcd.delete(f'/hosts/{compute.uuid}/{one}')
    accept(compute)
    assert addressed(own_control, one) == address
    assert asked == etcd.get(f'/hosts/{compute.uuid}/{one}')
    assert json.loads(etcd.get('/names/one') or b'') == {'version': 1, 'instance': one}
    assert addressed(own_control, two)
    assert addressed(own_control, NOBODY)
    for instance in (one, two):
        kept = known(own_control, instance)
        assert (kept['state'], kept['fault']) == ('active', None)
        assert not logged(compute, 'INSTANTIATE', instance)[1:]
    held = own_control.placement.allocations(one)
    assert held == {compute.uuid: {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}}
    settled(own_control, compute)
    compute.restart()
    done = own_control.eschedule('destroy', '--wait', one)
    assert done.code == 0, done


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
    """F13: etcd restored from an older snapshot: what ended since stays ended, what came since is published (fake)"""
    etcd, compute = own_control.etcd, own_control.ecompute('VCPU:8,DISK_GB:20,MEMORY_MB:2048')
    _, kept = place(own_control, SMALL, '--name', 'kept')
    _, destroyed = place(own_control, SMALL, '--name', 'destroyed')
    for instance in (kept, destroyed):
        addressed(own_control, instance)
    older = kind(etcd)
    until(lambda: not logged(compute, 'cannot be reached') or logged(compute, 'is back'), 15, 'it follows etcd again')
    assert own_control.eschedule('destroy', '--wait', destroyed).code == 0
    came = boot(own_control, SMALL, '--name', 'came')
    compute_log = len(logged(compute, STRANGE))
    assert compute_log == 0
    if away:
        stop(compute)
    older.restore()
    if away:
        compute.launch()
    is_loud(compute)
    assert set(guests(compute)) == {kept, came}
    # One more has a tombstone by the time the etcd is accepted: that one is carried out.
    tombstone = json.loads(etcd.get(f'/hosts/{compute.uuid}/{kept}') or b'{}')
    etcd.put(f'/hosts/{compute.uuid}/{kept}', json.dumps({**tombstone, 'allocations': {}, 'image': None}))
    accept(compute)
    reached(own_control, kept, 'gone')
    reached(own_control, destroyed, 'gone')
    reached(own_control, came, 'active')
    until(lambda: set(guests(compute)) == {came}, 10, 'only what came since is here')
    assert len(logs(compute, 'INSTANTIATE', destroyed)) == 1
    assert etcd.keys('/names/') == ['/names/came']
    settled(own_control, compute)
    stop(compute)
    compute.start()
    settled(own_control, compute)


@pytest.mark.history_broken('etcd is wiped')
def test_a_name_that_was_given_away_meanwhile(own_control: Control, compute: Ecompute) -> None:
    """F13: etcd wiped, and a name in it another instance's by the time it is accepted: a fault says so (fake)"""
    etcd = own_control.etcd
    instance = boot(own_control, SMALL, '--name', 'one')
    wipe(etcd)
    is_loud(compute)
    request_by_hand(own_control, compute, NOBODY, name='one')
    etcd.put('/names/one', json.dumps({'version': 1, 'instance': NOBODY}))
    accept(compute)
    addressed(own_control, NOBODY)
    kept = reached(own_control, instance, 'active')
    assert kept['fault'] == "its name one was another instance's when this etcd was accepted"
    assert len(logs(compute, instance, 'its name one was another')) == 1
    audited = own_control.eschedule('audit')
    assert audited.code == 8
    assert [line.split()[:2] for line in audited.stdout.splitlines()[1:]] == [['name-missing', instance]]
    # It lets go of nothing that is not its own.
    assert own_control.eschedule('destroy', '--wait', instance).code == 0
    assert json.loads(etcd.get('/names/one') or b'')['instance'] == NOBODY


@pytest.mark.slow
@pytest.mark.history_broken('etcd is restored from an older copy')
def test_restored_and_overtaken(own_control: Control, compute: Ecompute) -> None:
    """F13: restored long ago, its revision higher than ever: its raft term tells (fake)"""
    etcd = own_control.etcd
    boot(own_control)
    older = SavedSnapshot(etcd)
    for _ in range(3):
        etcd.restart()
    boot(own_control)
    stop(compute)
    seen = remembered(compute)
    older.restore()
    for number in range(200):
        etcd.put('/elsewhere', str(number))
    assert int(etcd.call('kv/range', {'key': 'eA=='})['header']['revision']) > seen['revision']
    compute.launch()
    is_loud(compute)
    assert 'raft term' in logs(compute, STRANGE)[0]
    accept(compute)


@pytest.mark.history_broken('etcd is wiped')
def test_a_destroy_that_was_accepted_goes_on(own_control: Control) -> None:
    """F13: etcd wiped in the middle of a destroy: accepted, the destroy goes on (fake)"""
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
    """F13: etcd wiped in the middle of a build: accepted, the build goes on (fake)"""
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
    """F13: kill -9 between publishing again and remembering: the next start finds the same, and it goes on (fake)"""
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
    """F13: etcd wiped and the claim lost, too, and its place taken: the guest stays, with a fault (fake)"""
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
    kept = reached(own_control, instance, 'active')
    assert 'without a claim' in kept['fault']
    assert guests(compute)[instance]['running']
    own_control.placement.call('DELETE', f'/allocations/{NOBODY}')
    stop(compute)
    accept(compute)
    assert own_control.placement.allocations(instance)
    settled(own_control, compute)


def test_a_lost_claim_is_made_again(own_control: Control, compute: Ecompute, own_placement: PlacementServer) -> None:
    """F13: etcd wiped and the claim lost, too: claimed again (fake)"""
    instance = boot(own_control)
    held = own_placement.allocations(instance)
    stop(compute)
    wipe(own_control.etcd)
    own_placement.call('DELETE', f'/allocations/{instance}')
    accept(compute)
    assert own_placement.allocations(instance) == held


@pytest.mark.slow
@pytest.mark.parametrize('value', [None, '{"version": 1, "identity": "5ca1ab1e-0000-4000-8000-000000000000"}', 'x'])
def test_another_identity(own_control: Control, value: str | None) -> None:
    """F13: /cluster removed or exchanged: seen at the next start (fake)"""
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
    # Nothing was forgotten: with the right one back it is as before.
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
    """A host of a lab of this test's own, for its etcd is everybody's."""
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
    """Take everything from the lab's etcd."""
    found = state.load(lab.name)
    assert found is not None
    pid = found.processes['etcd'].pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not running(pid), 20, 'etcd ends')
    shutil.rmtree(lab.directory / CONTROL / 'etcd')
    elab.start_control(found)


@pytest.mark.slow
@pytest.mark.history_broken('etcd is wiped')
def test_wiped_under_guests(own_host: Hypervisor) -> None:
    """F13: etcd wiped while guests run: they run on, through a restart and the acceptance (libvirt)"""
    one, two = own_host.running(), own_host.running()
    qemus = {each: own_host.qemu(each) for each in (one, two)}
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
    assert {each: own_host.qemu(each) for each in qemus} == qemus
    assert own_host.lab.etcd('/') == {}
    own_host.kill(signal.SIGTERM)
    own_host.launch('', '--accept-new-etcd')
    own_host.wait_ready()
    for instance in qemus:
        own_host.reached(instance, 'active', fault=None)
    assert {each: own_host.qemu(each) for each in qemus} == qemus
    own_host.settled()
    own_host.restart()
    own_host.ask_destroy(one, two)
    for instance in qemus:
        own_host.reached(instance, 'gone')
        own_host.nothing_of(instance)
    own_host.settled()
