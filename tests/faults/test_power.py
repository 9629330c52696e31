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
from tests.kit.hands import Eschedule, check_settled, read_guests, restart_accepting_etcd, restart_unarmed
from tests.kit.hypervisor import Hypervisor, put_image
from tests.kit.servers import wait_until
from tests.kit.story import (
    assert_one_line,
    boot,
    find_log_lines,
    read_record,
    run_concurrently,
    wait_log_lines,
    wait_state,
)
from tests.kit.tuned import make_tuned

STEP_FAILPOINTS = POWERING_STEP, POWERED_STEP = ('powering', 'powered')
ASKED_FAILPOINTS = (POWER_REQUESTED_STEP := 'power-asked',)
FINAL_STATES = {'stop': 'stopped', 'start': 'active', 'reboot': 'active'}
QUICK_CASES = [('reboot', POWERED_STEP), ('start', POWERED_STEP), ('stop', POWERING_STEP)]
QUICK_INTERRUPTIONS = [('reboot', POWERING_STEP, 'stop'), ('reboot', POWERED_STEP, 'destroy')]
ALL_CASES = [
    pytest.param(action, step, marks=[] if (action, step) in QUICK_CASES else [pytest.mark.slow])
    for action in FINAL_STATES
    for step in STEP_FAILPOINTS
]


def read_power_change(control: Control, instance: str) -> dict[str, Any]:
    """Return the power change that the request contains."""
    (key,) = (key for key in control.etcd.list_keys('/hosts/') if key.endswith(instance))
    return dict(json.loads(control.etcd.get(key) or b'{}').get('power') or {})


def wait_until_done(control: Control, instance: str) -> dict[str, Any]:
    """Wait until the latest power change is carried out; return the record."""

    def find_finished() -> dict[str, Any] | None:
        finished = read_record(control, instance)
        return finished if finished and finished['power'] == read_power_change(control, instance)['id'] else None

    finished = wait_until(
        find_finished, 20, f'{read_power_change(control, instance)} is done; it is {read_record(control, instance)}'
    )
    assert finished is not None
    return finished


def is_guest_running(compute: Ecompute, instance: str) -> bool:
    """Return True if a fake's guest runs."""
    return bool(read_guests(compute)[instance]['running'])


def create_instance(control: Control, compute: Ecompute, action: str) -> str:
    """Create an instance that `action` can change: running, or stopped for a start."""
    instance = boot(control)
    if action == 'start':
        assert control.eschedule('stop', '--wait', instance).code == 0
    assert is_guest_running(compute, instance) == (action != 'start')
    return instance


@pytest.mark.parametrize(('action', 'step'), ALL_CASES)
def test_killed_during_a_power_change(cluster: Control, action: str, step: str) -> None:
    """F38: kill -9 of ecompute at a step of a stop, start or reboot: the next one completes it, once (fake)."""
    compute = make_tuned(cluster)
    instance, other = create_instance(cluster, compute, action), create_instance(cluster, compute, '')
    compute.kill()
    compute.failpoint = f'{step}:kill'
    compute.start()
    assert_one_line(cluster.eschedule(action, instance), 0, f'{action} accepted')
    wait_until(lambda: not compute.is_running, 30, f'it is killed at {step}')
    restart_unarmed(compute)
    finished = wait_until_done(cluster, instance)
    assert (finished['state'], finished['fault'], finished['attempts']) == (FINAL_STATES[action], None, 0)
    assert is_guest_running(compute, instance) == (action != 'stop')
    assert is_guest_running(compute, other)
    # A guest that was started before the kill is not started again.
    assert len(find_log_lines(compute, 'START INSTANCE', instance)) == (action != 'stop')
    check_settled(cluster, compute)


@pytest.mark.parametrize(
    ('action', 'step', 'then'),
    [
        pytest.param(*each, marks=[] if each in QUICK_INTERRUPTIONS else [pytest.mark.slow])
        for each in itertools.product(('reboot', 'start'), STEP_FAILPOINTS, ('stop', 'destroy'))
    ],
)
def test_later_request_during_a_power_change_decides(cluster: Control, action: str, step: str, then: str) -> None:
    """F38: a stop or destroy that comes while a start or reboot is at a step: the last request decides (fake)."""
    compute = make_tuned(cluster)
    instance = create_instance(cluster, compute, action)
    compute.kill()
    compute.failpoint = f'{step}:stop:1'
    compute.start()
    assert_one_line(cluster.eschedule(action, instance), 0, f'{action} accepted')
    compute.wait_frozen_at(step)
    assert_one_line(cluster.eschedule(then, instance), 0, f'{then} accepted')
    compute.resume()
    if then == 'destroy':
        wait_state(cluster, instance, 'gone')
        assert instance not in read_guests(compute)
    else:
        assert wait_until_done(cluster, instance)['state'] == 'stopped'
        assert not is_guest_running(compute, instance)
    check_settled(cluster, compute)


def test_start_during_a_stop_runs_the_guest(cluster: Control) -> None:
    """F38: a start after the guest was asked to turn itself off, and ecompute killed then: it runs (fake)."""
    compute = make_tuned(cluster)
    instance = create_instance(cluster, compute, 'stop')
    compute.kill()
    compute.failpoint = f'{POWERING_STEP}:stop:1'
    compute.start()
    assert_one_line(cluster.eschedule('stop', instance), 0, 'stop accepted')
    compute.wait_frozen_at(POWERING_STEP)
    assert_one_line(cluster.eschedule('start', instance), 0, 'start accepted')
    compute.kill()
    restart_unarmed(compute)
    assert wait_until_done(cluster, instance)['state'] == 'active'
    assert is_guest_running(compute, instance)
    # The guest was asked to turn itself off and may do so late: ecompute waits for that.
    assert len(wait_log_lines(compute, 'START INSTANCE', instance)) == 1
    check_settled(cluster, compute)


def test_concurrent_power_changes(cluster: Control) -> None:
    """F38: stops, starts, reboots and another's destroy by ten eschedules: the last request decides (fake)."""
    compute = make_tuned(cluster)
    instance, other = create_instance(cluster, compute, ''), create_instance(cluster, compute, '')
    words = [[action, instance] for action in ('stop', 'start', 'reboot') * 3] + [['destroy', other]]
    results = run_concurrently(cluster, words, width=5)
    assert {result.code for result in results} <= {0, 5}, results
    finished = wait_until_done(cluster, instance)
    assert finished['state'] == FINAL_STATES[read_power_change(cluster, instance)['action']]
    assert is_guest_running(compute, instance) == (finished['state'] == 'active')
    wait_state(cluster, other, 'gone')
    check_settled(cluster, compute)


def test_eschedule_killed_after_a_stop_is_written(cluster: Control) -> None:
    """F38: kill -9 of eschedule after its stop is written: it is carried out, and a repeat reports it (fake)."""
    compute = make_tuned(cluster)
    instance = create_instance(cluster, compute, 'stop')
    with Eschedule(cluster, 'stop', instance, failpoint=f'{POWER_REQUESTED_STEP}:kill') as eschedule:
        eschedule.assert_killed_at(POWER_REQUESTED_STEP)
    wait_state(cluster, instance, 'stopped')
    wait_until_done(cluster, instance)
    assert_one_line(cluster.eschedule('stop', instance), 0, 'is already stopped')
    check_settled(cluster, compute)


def test_deleted_record_does_not_repeat_a_reboot(cluster: Control) -> None:
    """F38: the record deleted outside ecomp after a reboot: written again, and the reboot not repeated (fake)."""
    compute = make_tuned(cluster, numbers={'PLAN_INTERVAL_SECONDS': 0.3})
    instance = create_instance(cluster, compute, '')
    assert cluster.eschedule('reboot', '--wait', instance).code == 0
    cluster.etcd.delete(cluster.etcd.find_record_key(instance))
    assert 'its record was lost' in wait_state(cluster, instance, 'active')['fault']
    wait_until_done(cluster, instance)
    assert len(wait_log_lines(compute, 'START INSTANCE', instance)) == 1
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check_settled(cluster, compute)


WIPED_MARK = pytest.mark.history_broken('etcd is wiped')


@pytest.mark.parametrize(
    'lost', [pytest.param('wiped', marks=WIPED_MARK), pytest.param('restored', marks=pytest.mark.slow)]
)
def test_wiped_or_restored_etcd_repeats_no_power_change(own_control: Control, compute: Ecompute, lost: str) -> None:
    """F38: etcd wiped, or restored from before a start: finished changes stay, unread ones are lost (fake)."""
    stopped, running, unread = (create_instance(own_control, compute, '') for _ in range(3))
    assert own_control.eschedule('stop', '--wait', stopped, running).code == 0
    older = SavedSnapshot(own_control.etcd) if lost == 'restored' else None
    assert own_control.eschedule('start', '--wait', running).code == 0
    started = len(find_log_lines(compute, 'START INSTANCE'))
    compute.stop()
    assert_one_line(own_control.eschedule('stop', unread), 0, 'once this compute is no longer silent')
    if older is not None:
        older.restore()
    else:
        wipe(own_control.etcd)
    restart_accepting_etcd(compute)
    wait_state(own_control, stopped, 'stopped')
    for instance in (running, unread):  # its compute had not read the latter's stop
        wait_state(own_control, instance, 'active')
    compute.restart()
    assert [is_guest_running(compute, instance) for instance in (stopped, running, unread)] == [False, True, True]
    assert len(find_log_lines(compute, 'START INSTANCE')) == started
    assert own_control.eschedule('start', '--wait', stopped).code == 0


def read_domain_state(host: Hypervisor, instance: str) -> str:
    """Return libvirt's state and reason for an instance."""
    return host.virsh('domstate', '--reason', instance).strip()


@pytest.mark.slow
def test_reacting_and_deaf_guests_stop_and_start(host: Hypervisor) -> None:
    """F38: a guest that reacts turns itself off, one that does not is switched off; both start again (libvirt)."""
    host.restart(numbers={'planner.SHUTDOWN_GRACE_SECONDS': 12, 'planner.SHUTDOWN_REPEAT_SECONDS': 0.5})
    reacting, deaf = host.place(put_image(host, 'power-button.raw', POWER_BUTTON)), host.place()
    other = host.start_instance()
    for name in (reacting, deaf):
        host.wait_state(name, 'active')
    disks = {name: host.get_disk_path(name).stat().st_ino for name in (reacting, deaf)}
    claims = {name: host.read_allocation(name) for name in (reacting, deaf)}
    qemu = host.find_qemu(other)
    stopped = host.lab.eschedule('stop', '--wait', reacting, deaf)
    assert stopped.code == 0, stopped
    assert (read_domain_state(host, reacting), read_domain_state(host, deaf)) == (
        'shut off (shutdown)',
        'shut off (destroyed)',
    )
    assert host.list_qemus() == [other]
    assert {name: host.read_allocation(name) for name in claims} == claims
    host.check_settled()  # a stopped guest is not a finding
    assert host.lab.eschedule('start', '--wait', deaf).code == 0
    assert host.lab.eschedule('reboot', '--wait', reacting).code == 0
    assert sorted(host.list_qemus()) == sorted([reacting, deaf, other])
    before = host.find_qemu(reacting)
    rebooted = host.lab.eschedule('reboot', '--wait', reacting)
    assert rebooted.code == 0, rebooted
    assert host.find_qemu(reacting) not in (0, before)
    assert host.find_qemu(other) == qemu
    assert {name: host.get_disk_path(name).stat().st_ino for name in disks} == disks
    assert len(host.find_log_lines('SWITCH OFF INSTANCE')) == 1
    host.check_settled()


@pytest.mark.slow
def test_restart_during_the_grace_period(host: Hypervisor) -> None:
    """F38: ecompute killed during a guest's time to turn itself off: it gets that time once more only (libvirt)."""
    instance = host.start_instance()
    host.request_action('stop', instance)
    wait_until(lambda: host.find_log_lines('SHUT DOWN INSTANCE', instance), 20, 'it was asked')
    assert host.find_qemu(instance), 'it has a minute'
    host.restart(numbers={'planner.SHUTDOWN_GRACE_SECONDS': 1})
    host.wait_state(instance, 'stopped')
    assert read_domain_state(host, instance) == 'shut off (destroyed)'
    host.request_action('start', instance)
    host.wait_state(instance, 'active')
    host.check_settled()


@pytest.mark.slow
def test_frozen_qemu_is_switched_off(host: Hypervisor) -> None:
    """F38: a frozen QEMU accepts no command: it is switched off anyway, and no worker hangs (libvirt)."""
    host.restart(numbers={'planner.SHUTDOWN_GRACE_SECONDS': 2})
    instance, other = host.start_instance(), host.start_instance()
    os.kill(host.find_qemu(instance), signal.SIGSTOP)
    host.request_action('stop', instance)
    host.wait_state(instance, 'stopped')
    assert host.list_qemus() == [other]
    wait_until(lambda: host.is_free(instance), 20, 'no worker is at it')
    host.request_action('reboot', other)
    wait_until(lambda: len(host.find_log_lines('START INSTANCE', other)) == 1, 60, 'it is started again')
    host.wait_state(other, 'active')
    host.check_settled()


@pytest.mark.slow
def test_libvirtd_killed_before_power_changes(host: Hypervisor) -> None:
    """F38: libvirtd killed when a stop, and when a start, is requested: both are done when it is back (libvirt)."""
    host.restart(numbers={'planner.SHUTDOWN_GRACE_SECONDS': 2})
    off, on = host.start_instance(), host.start_instance()
    host.request_action('stop', on)
    host.wait_state(on, 'stopped')
    host.kill_libvirtd()
    wait_until(lambda: host.count_losses('libvirt qemu:///system')[0], 40, 'the loss is logged')
    host.request_action('stop', off)
    host.request_action('start', on)
    assert host.list_qemus() == [off]
    host.start_libvirtd()
    host.wait_state(off, 'stopped')
    host.wait_state(on, 'active', fault=None)
    assert host.list_qemus() == [on]
    host.check_settled()
