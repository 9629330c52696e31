"""F38: stop, start and reboot are done exactly once, when processes are killed and other requests arrive."""

from __future__ import annotations

import itertools
import json
import os
import signal
from typing import Any

import pytest

from tests.faults.etcds import SavedSnapshot, wipe
from tests.kit.boot_sectors import POWER_BUTTON
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, accept, guests, settled, start_again
from tests.kit.hypervisor import Hypervisor, put_image
from tests.kit.servers import until
from tests.kit.story import at_once, boot, logged, logs, one_line, reached, record
from tests.kit.tuned import tuned

STEP_FAILPOINTS = POWERING, POWERED = ('powering', 'powered')
ASKED_FAILPOINTS = (POWER_ASKED := 'power-asked',)
ENDS = {'stop': 'stopped', 'start': 'active', 'reboot': 'active'}
QUICK = [('reboot', POWERED), ('start', POWERED), ('stop', POWERING)]
MEANWHILE = [('reboot', POWERING, 'stop'), ('reboot', POWERED, 'destroy')]
ALL = [
    pytest.param(action, step, marks=[] if (action, step) in QUICK else [pytest.mark.slow])
    for action in ENDS
    for step in STEP_FAILPOINTS
]


def asked_for(control: Control, instance: str) -> dict[str, Any]:
    """Return the power change that the request contains."""
    (key,) = (key for key in control.etcd.keys('/hosts/') if key.endswith(instance))
    return dict(json.loads(control.etcd.get(key) or b'{}').get('power') or {})


def done(control: Control, instance: str) -> dict[str, Any]:
    """Wait until the latest power change is carried out; return the record."""

    def find_finished() -> dict[str, Any] | None:
        finished = record(control, instance)
        return finished if finished and finished['power'] == asked_for(control, instance)['id'] else None

    finished = until(find_finished, 20, f'{asked_for(control, instance)} is done; it is {record(control, instance)}')
    assert finished is not None
    return finished


def runs(compute: Ecompute, instance: str) -> bool:
    """Return True if a fake's guest runs."""
    return bool(guests(compute)[instance]['running'])


def made(control: Control, compute: Ecompute, action: str) -> str:
    """Create an instance that `action` can change: running, or stopped for a start."""
    instance = boot(control)
    if action == 'start':
        assert control.eschedule('stop', '--wait', instance).code == 0
    assert runs(compute, instance) == (action != 'start')
    return instance


@pytest.mark.parametrize(('action', 'step'), ALL)
def test_killed_while_switching(cluster: Control, action: str, step: str) -> None:
    """F38: kill -9 of ecompute at a step of a stop, start or reboot: the next one completes it, once (fake)."""
    compute = tuned(cluster)
    instance, other = made(cluster, compute, action), made(cluster, compute, '')
    compute.kill()
    compute.failpoint = f'{step}:kill'
    compute.start()
    one_line(cluster.eschedule(action, instance), 0, f'{action} accepted')
    until(lambda: not compute.is_running, 30, f'it is killed at {step}')
    start_again(compute)
    finished = done(cluster, instance)
    assert (finished['state'], finished['fault'], finished['attempts']) == (ENDS[action], None, 0)
    assert runs(compute, instance) == (action != 'stop')
    assert runs(compute, other)
    # A guest that was started before the kill is not started again.
    assert len(logged(compute, 'START INSTANCE', instance)) == (action != 'stop')
    settled(cluster, compute)


@pytest.mark.parametrize(
    ('action', 'step', 'then'),
    [
        pytest.param(*each, marks=[] if each in MEANWHILE else [pytest.mark.slow])
        for each in itertools.product(('reboot', 'start'), STEP_FAILPOINTS, ('stop', 'destroy'))
    ],
)
def test_something_else_is_asked_meanwhile(cluster: Control, action: str, step: str, then: str) -> None:
    """F38: a stop or destroy that comes while a start or reboot is at a step: the last request decides (fake)."""
    compute = tuned(cluster)
    instance = made(cluster, compute, action)
    compute.kill()
    compute.failpoint = f'{step}:stop:1'
    compute.start()
    one_line(cluster.eschedule(action, instance), 0, f'{action} accepted')
    compute.stopped_at(step)
    one_line(cluster.eschedule(then, instance), 0, f'{then} accepted')
    compute.resume()
    if then == 'destroy':
        reached(cluster, instance, 'gone')
        assert instance not in guests(compute)
    else:
        assert done(cluster, instance)['state'] == 'stopped'
        assert not runs(compute, instance)
    settled(cluster, compute)


def test_a_start_after_a_stop_that_is_under_way(cluster: Control) -> None:
    """F38: a start after the guest was asked to turn itself off, and ecompute killed then: it runs (fake)."""
    compute = tuned(cluster)
    instance = made(cluster, compute, 'stop')
    compute.kill()
    compute.failpoint = f'{POWERING}:stop:1'
    compute.start()
    one_line(cluster.eschedule('stop', instance), 0, 'stop accepted')
    compute.stopped_at(POWERING)
    one_line(cluster.eschedule('start', instance), 0, 'start accepted')
    compute.kill()
    start_again(compute)
    assert done(cluster, instance)['state'] == 'active'
    assert runs(compute, instance)
    # The guest was asked to turn itself off and may do so late: ecompute waits for that.
    assert len(logs(compute, 'START INSTANCE', instance)) == 1
    settled(cluster, compute)


def test_switched_by_several_at_once(cluster: Control) -> None:
    """F38: stops, starts, reboots and another's destroy by ten eschedules: the last request decides (fake)."""
    compute = tuned(cluster)
    instance, other = made(cluster, compute, ''), made(cluster, compute, '')
    words = [[action, instance] for action in ('stop', 'start', 'reboot') * 3] + [['destroy', other]]
    results = at_once(cluster, words, width=5)
    assert {result.code for result in results} <= {0, 5}, results
    finished = done(cluster, instance)
    assert finished['state'] == ENDS[asked_for(cluster, instance)['action']]
    assert runs(compute, instance) == (finished['state'] == 'active')
    reached(cluster, other, 'gone')
    settled(cluster, compute)


def test_eschedule_killed_when_it_has_asked(cluster: Control) -> None:
    """F38: kill -9 of eschedule after its stop is written: it is carried out, and a repeat reports it (fake)."""
    compute = tuned(cluster)
    instance = made(cluster, compute, 'stop')
    with Eschedule(cluster, 'stop', instance, failpoint=f'{POWER_ASKED}:kill') as eschedule:
        eschedule.killed_at(POWER_ASKED)
    reached(cluster, instance, 'stopped')
    done(cluster, instance)
    one_line(cluster.eschedule('stop', instance), 0, 'is stopped already')
    settled(cluster, compute)


def test_a_record_removed_by_hand(cluster: Control) -> None:
    """F38: the record deleted outside ecomp after a reboot: written again, and the reboot not repeated (fake)."""
    compute = tuned(cluster, numbers={'EVERY': 0.3})
    instance = made(cluster, compute, '')
    assert cluster.eschedule('reboot', '--wait', instance).code == 0
    cluster.etcd.delete(cluster.etcd.record_key(instance))
    assert 'its record was lost' in reached(cluster, instance, 'active')['fault']
    done(cluster, instance)
    assert len(logs(compute, 'START INSTANCE', instance)) == 1
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    settled(cluster, compute)


WIPED = pytest.mark.history_broken('etcd is wiped')


@pytest.mark.parametrize(
    'lost', [pytest.param('wiped', marks=WIPED), pytest.param('restored', marks=pytest.mark.slow)]
)
def test_etcd_has_forgotten(own_control: Control, compute: Ecompute, lost: str) -> None:
    """F38: etcd wiped, or restored from before a start: finished changes stay, unread ones are lost (fake)."""
    stopped, running, unread = (made(own_control, compute, '') for _ in range(3))
    assert own_control.eschedule('stop', '--wait', stopped, running).code == 0
    older = SavedSnapshot(own_control.etcd) if lost == 'restored' else None
    assert own_control.eschedule('start', '--wait', running).code == 0
    started = len(logged(compute, 'START INSTANCE'))
    compute.stop()
    one_line(own_control.eschedule('stop', unread), 0, 'silent now')
    if older is not None:
        older.restore()
    else:
        wipe(own_control.etcd)
    accept(compute)
    reached(own_control, stopped, 'stopped')
    for instance in (running, unread):  # its compute had not read the latter's stop
        reached(own_control, instance, 'active')
    compute.restart()
    assert [runs(compute, instance) for instance in (stopped, running, unread)] == [False, True, True]
    assert len(logged(compute, 'START INSTANCE')) == started
    assert own_control.eschedule('start', '--wait', stopped).code == 0


def lasts(host: Hypervisor, instance: str) -> str:
    """Return libvirt's state and reason for an instance."""
    return host.virsh('domstate', '--reason', instance).strip()


@pytest.mark.slow
def test_off_and_on(host: Hypervisor) -> None:
    """F38: a guest that reacts turns itself off, one that does not is switched off; both start again (libvirt)."""
    host.restart(numbers={'planner.GRACE': 12, 'planner.ASK_AGAIN': 0.5})
    reacting, deaf = host.place(put_image(host, 'power-button.raw', POWER_BUTTON)), host.place()
    other = host.running()
    for name in (reacting, deaf):
        host.reached(name, 'active')
    disks = {name: host.disk(name).stat().st_ino for name in (reacting, deaf)}
    claims = {name: host.held(name) for name in (reacting, deaf)}
    qemu = host.qemu(other)
    stopped = host.lab.eschedule('stop', '--wait', reacting, deaf)
    assert stopped.code == 0, stopped
    assert (lasts(host, reacting), lasts(host, deaf)) == ('shut off (shutdown)', 'shut off (destroyed)')
    assert host.qemus() == [other]
    assert {name: host.held(name) for name in claims} == claims
    host.settled()  # a stopped guest is not a finding
    assert host.lab.eschedule('start', '--wait', deaf).code == 0
    assert host.lab.eschedule('reboot', '--wait', reacting).code == 0
    assert sorted(host.qemus()) == sorted([reacting, deaf, other])
    before = host.qemu(reacting)
    rebooted = host.lab.eschedule('reboot', '--wait', reacting)
    assert rebooted.code == 0, rebooted
    assert host.qemu(reacting) not in (0, before)
    assert host.qemu(other) == qemu
    assert {name: host.disk(name).stat().st_ino for name in disks} == disks
    assert len(host.lines('SWITCH OFF INSTANCE')) == 1
    host.settled()


@pytest.mark.slow
def test_restarted_while_a_guest_has_time(host: Hypervisor) -> None:
    """F38: ecompute killed during a guest's time to turn itself off: it gets that time once more only (libvirt)."""
    instance = host.running()
    host.ask('stop', instance)
    until(lambda: host.lines('SHUT DOWN INSTANCE', instance), 20, 'it was asked')
    assert host.qemu(instance), 'it has a minute'
    host.restart(numbers={'planner.GRACE': 1})
    host.reached(instance, 'stopped')
    assert lasts(host, instance) == 'shut off (destroyed)'
    host.ask('start', instance)
    host.reached(instance, 'active')
    host.settled()


@pytest.mark.slow
def test_qemu_frozen(host: Hypervisor) -> None:
    """F38: a frozen QEMU accepts no command: it is switched off anyway, and no worker hangs (libvirt)."""
    host.restart(numbers={'planner.GRACE': 2})
    instance, other = host.running(), host.running()
    os.kill(host.qemu(instance), signal.SIGSTOP)
    host.ask('stop', instance)
    host.reached(instance, 'stopped')
    assert host.qemus() == [other]
    until(lambda: host.is_free(instance), 20, 'no worker is at it')
    host.ask('reboot', other)
    until(lambda: len(host.lines('START INSTANCE', other)) == 1, 60, 'it is started again')
    host.reached(other, 'active')
    host.settled()


@pytest.mark.slow
def test_libvirtd_away(host: Hypervisor) -> None:
    """F38: libvirtd killed when a stop, and when a start, is requested: both are done when it is back (libvirt)."""
    host.restart(numbers={'planner.GRACE': 2})
    off, on = host.running(), host.running()
    host.ask('stop', on)
    host.reached(on, 'stopped')
    host.end_libvirtd()
    until(lambda: host.losses('libvirt qemu:///system')[0], 40, 'the loss is logged')
    host.ask('stop', off)
    host.ask('start', on)
    assert host.qemus() == [off]
    host.start_libvirtd()
    host.reached(off, 'stopped')
    host.reached(on, 'active', fault=None)
    assert host.qemus() == [on]
    host.settled()
