"""F38: stopped, started and rebooted once, whoever is killed at it, and whatever else is asked meanwhile."""

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
    """What the request asks of its power."""
    (key,) = (key for key in control.etcd.keys('/hosts/') if key.endswith(instance))
    return dict(json.loads(control.etcd.get(key) or b'{}').get('power') or {})


def done(control: Control, instance: str) -> dict[str, Any]:
    """The record once what was asked last of its power is carried out."""

    def said() -> dict[str, Any] | None:
        found = record(control, instance)
        return found if found and found['power'] == asked_for(control, instance)['id'] else None

    found = until(said, 20, f'{asked_for(control, instance)} is done; it is {record(control, instance)}')
    assert found is not None
    return found


def runs(compute: Ecompute, instance: str) -> bool:
    """Whether a fake's guest runs."""
    return bool(guests(compute)[instance]['running'])


def made(control: Control, compute: Ecompute, action: str) -> str:
    """An instance of which the first step of `action` is one to be taken: stopped, to be started."""
    instance = boot(control)
    if action == 'start':
        assert control.eschedule('stop', '--wait', instance).code == 0
    assert runs(compute, instance) == (action != 'start')
    return instance


@pytest.mark.parametrize(('action', 'step'), ALL)
def test_killed_while_switching(cluster: Control, action: str, step: str) -> None:
    """F38: kill -9 of ecompute before or after a step of a stop, start or reboot: the next one ends it, once (fake)"""
    compute = tuned(cluster)
    instance, other = made(cluster, compute, action), made(cluster, compute, '')
    compute.kill()
    compute.failpoint = f'{step}:kill'
    compute.start()
    one_line(cluster.eschedule(action, instance), 0, f'{action} accepted')
    until(lambda: not compute.is_running, 30, f'it is killed at {step}')
    start_again(compute)
    found = done(cluster, instance)
    assert (found['state'], found['fault'], found['attempts']) == (ENDS[action], None, 0)
    assert runs(compute, instance) == (action != 'stop')
    assert runs(compute, other)
    # One that was started before the kill is not started again.
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
    """F38: a stop or destroy that comes while a start or reboot is at a step: the last word counts (fake)"""
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
    """F38: a start that comes when the guest was asked to turn itself off, and ecompute killed then: it runs (fake)"""
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
    # It was asked, so it may go off late: that is waited for.
    assert len(logs(compute, 'START INSTANCE', instance)) == 1
    settled(cluster, compute)


def test_switched_by_several_at_once(cluster: Control) -> None:
    """F38: stops, starts, reboots and a destroy of others by ten eschedules at once: the last word counts (fake)"""
    compute = tuned(cluster)
    instance, other = made(cluster, compute, ''), made(cluster, compute, '')
    words = [[action, instance] for action in ('stop', 'start', 'reboot') * 3] + [['destroy', other]]
    results = at_once(cluster, words, width=5)
    assert {each.code for each in results} <= {0, 5}, results
    found = done(cluster, instance)
    assert found['state'] == ENDS[asked_for(cluster, instance)['action']]
    assert runs(compute, instance) == (found['state'] == 'active')
    reached(cluster, other, 'gone')
    settled(cluster, compute)


def test_eschedule_killed_when_it_has_asked(cluster: Control) -> None:
    """F38: kill -9 of eschedule after its stop is written: it is carried out, and the same again says so (fake)"""
    compute = tuned(cluster)
    instance = made(cluster, compute, 'stop')
    with Eschedule(cluster, 'stop', instance, failpoint=f'{POWER_ASKED}:kill') as eschedule:
        eschedule.killed_at(POWER_ASKED)
    reached(cluster, instance, 'stopped')
    done(cluster, instance)
    one_line(cluster.eschedule('stop', instance), 0, 'is stopped already')
    settled(cluster, compute)


def test_a_record_removed_by_hand(cluster: Control) -> None:
    """F38: the record removed by hand after a reboot: written again, and the reboot is not done again (fake)"""
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
    """F38: etcd wiped, or restored from before a start: what was done is not done again, what was not is (fake)"""
    off, on, asked = (made(own_control, compute, '') for _ in range(3))
    assert own_control.eschedule('stop', '--wait', off, on).code == 0
    older = SavedSnapshot(own_control.etcd) if lost == 'restored' else None
    assert own_control.eschedule('start', '--wait', on).code == 0
    started = len(logged(compute, 'START INSTANCE'))
    compute.stop()
    one_line(own_control.eschedule('stop', asked), 0, 'silent now')
    if older is not None:
        older.restore()
    else:
        wipe(own_control.etcd)
    accept(compute)
    reached(own_control, off, 'stopped')
    for each in (on, asked):  # of what was asked of the last, nobody who remembers had heard
        reached(own_control, each, 'active')
    compute.restart()
    assert [runs(compute, each) for each in (off, on, asked)] == [False, True, True]
    assert len(logged(compute, 'START INSTANCE')) == started
    assert own_control.eschedule('start', '--wait', off).code == 0


def lasts(host: Hypervisor, instance: str) -> str:
    """How libvirt says that it ended."""
    return host.virsh('domstate', '--reason', instance).strip()


@pytest.mark.slow
def test_off_and_on(host: Hypervisor) -> None:
    """F38: a guest that listens turns itself off, one that does not is switched off; both start again (libvirt)"""
    host.restart(numbers={'planner.GRACE': 12, 'planner.ASK_AGAIN': 0.5})
    listens, deaf = host.place(put_image(host, 'power-button.raw', POWER_BUTTON)), host.place()
    other = host.running()
    for each in (listens, deaf):
        host.reached(each, 'active')
    disks = {each: host.disk(each).stat().st_ino for each in (listens, deaf)}
    claims = {each: host.held(each) for each in (listens, deaf)}
    qemu = host.qemu(other)
    stopped = host.lab.eschedule('stop', '--wait', listens, deaf)
    assert stopped.code == 0, stopped
    assert (lasts(host, listens), lasts(host, deaf)) == ('shut off (shutdown)', 'shut off (destroyed)')
    assert host.qemus() == [other]
    assert {each: host.held(each) for each in claims} == claims
    host.settled()  # a stopped guest is no finding
    assert host.lab.eschedule('start', '--wait', deaf).code == 0
    assert host.lab.eschedule('reboot', '--wait', listens).code == 0
    assert sorted(host.qemus()) == sorted([listens, deaf, other])
    before = host.qemu(listens)
    rebooted = host.lab.eschedule('reboot', '--wait', listens)
    assert rebooted.code == 0, rebooted
    assert host.qemu(listens) not in (0, before)
    assert host.qemu(other) == qemu
    assert {each: host.disk(each).stat().st_ino for each in disks} == disks
    assert len(host.lines('SWITCH OFF INSTANCE')) == 1
    host.settled()


@pytest.mark.slow
def test_restarted_while_a_guest_has_time(host: Hypervisor) -> None:
    """F38: ecompute killed while a guest has time to turn itself off: it has it once more, and no longer (libvirt)"""
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
    """F38: a QEMU that is frozen takes no order: it is switched off all the same, and nobody hangs (libvirt)"""
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
    """F38: libvirtd killed when a stop, and when a start, is asked for: both are done when it is back (libvirt)"""
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
