"""F18, F20, F38: libvirtd is killed, the host rebooted, and guests are switched."""

from __future__ import annotations

import os
import signal
import time
import uuid

import pytest

from tests.kit.boot_sectors import POWER_BUTTON
from tests.kit.hands import assert_idle
from tests.kit.hypervisor import Hypervisor, put_image
from tests.kit.servers import wait_until


def boot_host(host: Hypervisor, new_boot_id: bool = True) -> None:
    """Start a crashed host. From then on its ecompute is the one that elab starts."""
    if new_boot_id:
        (host.state / 'boot').write_text(f'{uuid.uuid4()}\n')
    host.lab.start_ecomputes()
    host.armed_failpoint = ''


def check_running(host: Hypervisor, *instances: str) -> None:
    """Wait until exactly these instances run, each in one QEMU, and their records are active."""
    try:
        wait_until(lambda: sorted(host.list_qemus()) == sorted(instances), 90, f'just these run: {instances}')
    except AssertionError as error:
        raise AssertionError(f'{error}, but {host.list_qemus()}\n{host.read_log()[-5000:]}') from None
    for instance in instances:
        host.wait_state(instance, 'active', fault=None)


@pytest.mark.slow
def test_reboot_restores_every_guest_state(host: Hypervisor) -> None:
    """F20: running guests run again, stopped ones stay off, destroyed ones are gone (libvirt)."""
    running, running_too, stopped, doomed, stopping = (host.start_instance() for _ in range(5))
    host.virsh('destroy', stopped)
    host.wait_state(stopped, 'stopped', fault=None)
    disks = {name: host.get_disk_path(name).stat().st_ino for name in (running, running_too, stopped)}
    host.restart('built:stop:1')
    building = host.place()
    host.wait_frozen_at('built')
    host.request_action('stop', stopping)  # and the host crashes before it is done
    host.crash()
    host.request_destroy(doomed)
    unread = host.place()
    boot_host(host)
    check_running(host, running, running_too, building, unread)
    host.wait_state(doomed, 'gone')
    host.assert_removed(doomed)
    host.wait_state(stopping, 'stopped', fault=None)
    assert host.read_record(stopped)['state'] == 'stopped'
    assert {name: host.get_disk_path(name).stat().st_ino for name in disks} == disks
    # The reboot has been handled: guests that are turned off later stay off.
    host.virsh('destroy', running)
    host.wait_state(running, 'stopped', fault=None)
    host.restart()
    assert host.read_record(running)['state'] == 'stopped'
    assert running not in host.list_qemus()
    for name in (running, stopped):
        host.virsh('start', name)
        host.wait_state(name, 'active', fault=None)
    host.check_settled()


@pytest.mark.slow
def test_crash_without_reboot_leaves_guests_stopped(host: Hypervisor) -> None:
    """F20: all guests and daemons end without a reboot: the guests stay stopped (libvirt)."""
    instance = host.start_instance()
    claim = host.read_allocation(instance)
    host.crash()
    boot_host(host, new_boot_id=False)
    host.wait_state(instance, 'stopped')
    assert host.list_qemus() == []
    assert host.read_allocation(instance) == claim
    host.virsh('start', instance)
    host.wait_state(instance, 'active', fault=None)
    host.check_settled()


@pytest.mark.slow
def test_killed_while_restarting_guests(host: Hypervisor) -> None:
    """F20: ecompute killed while it restarts guests: the next start continues (libvirt)."""
    instances = [host.start_instance() for _ in range(4)]
    host.crash()
    boot_host(host)
    for number in range(1, 4):
        wait_until(lambda number=number: len(host.list_qemus()) >= number, 60, f'{number} of them run')
        host.restart()
    check_running(host, *instances)
    host.check_settled()


# F38: stop, start and reboot are done exactly once, when processes are killed and other requests arrive.


def read_domain_state(host: Hypervisor, instance: str) -> str:
    return host.virsh('domstate', '--reason', instance).strip()


@pytest.mark.slow
def test_reacting_and_deaf_guests_stop_and_start(host: Hypervisor) -> None:
    """F38: reacting guests turn off, others are switched off, both start again (libvirt)."""
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
def test_frozen_qemu_is_switched_off(host: Hypervisor) -> None:
    """F38: a frozen QEMU accepts no command: it is switched off anyway (libvirt)."""
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
    """F38: libvirtd killed as a stop or start is requested: both done when it is back (libvirt)."""
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


# F18: libvirtd killed, ended and frozen, while idle and in the middle of each step of a worker.


STEP_FAILPOINTS = ('disk-created', 'domain-defined', 'domain-destroyed')
LIBVIRT = 'libvirt qemu:///system'


def wait_until_lost(host: Hypervisor) -> None:
    wait_until(lambda: host.count_losses(LIBVIRT)[0], 40, 'the loss is logged')


def wait_until_back(host: Hypervisor) -> None:
    wait_until(lambda: host.count_losses(LIBVIRT)[1], 40, 'the return is logged')
    assert host.count_losses(LIBVIRT)[0] == 1, host.read_log()


KILL = signal.SIGKILL
TERM = signal.SIGTERM
ALL = [(step, how, when) for step in STEP_FAILPOINTS for how in (KILL, TERM) for when in ('away', 'back')]


@pytest.mark.slow
@pytest.mark.parametrize(('step', 'how', 'when'), ALL)
def test_libvirtd_ended_during_a_step(host: Hypervisor, step: str, how: int, when: str) -> None:
    """F18: libvirtd killed or stopped during a worker's step: the step is repeated (libvirt).

    The worker is continued while libvirtd is `away`, or when it is `back`.
    """
    surviving = host.start_instance()
    qemu, destroyed = host.find_qemu(surviving), step == 'domain-destroyed'
    host.restart(f'{step}:stop:1')
    instance = host.start_instance() if destroyed else host.place()
    if destroyed:
        host.request_destroy(instance)
    worker = host.wait_frozen_at(step)
    host.kill_libvirtd(how)
    wait_until_lost(host)
    if when == 'away':
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: host.is_free(instance), 60, 'the worker has given up')
        assert host.read_record(instance)['state'] == ('destroying' if destroyed else 'building')
    host.start_libvirtd()
    if when == 'back':
        os.kill(worker, signal.SIGCONT)
    record = host.wait_state(instance, 'gone' if destroyed else 'active')
    assert record['attempts'] == 0, "that libvirtd is away is nobody's failure"
    wait_until_back(host)
    assert host.find_qemu(surviving) == qemu
    assert sorted(host.list_qemus()) == sorted([surviving] if destroyed else [surviving, instance])
    host.check_settled()


@pytest.mark.slow
def test_libvirtd_killed_for_ten_seconds(host: Hypervisor) -> None:
    """F18: kill -9 of libvirtd for ten seconds: guests run, requests wait (libvirt)."""
    surviving, doomed = host.start_instance(), host.start_instance()
    qemus = {name: host.find_qemu(name) for name in (surviving, doomed)}
    host.kill_libvirtd()
    wait_until_lost(host)
    instance = host.place()
    host.request_destroy(doomed)
    began = time.monotonic()
    with assert_idle(host.pid):
        wait_until(lambda: time.monotonic() - began > 10, 20, 'ten seconds have passed')
    assert {name: host.find_qemu(name) for name in (surviving, doomed)} == qemus
    assert host.read_record(surviving)['state'] == 'active'
    assert host.read_record(surviving)['fault'] is None
    host.start_libvirtd()
    host.wait_state(instance, 'active')
    host.wait_state(doomed, 'gone')
    wait_until_back(host)
    assert host.find_qemu(surviving) == qemus[surviving]
    host.check_settled()


@pytest.mark.slow
@pytest.mark.parametrize('long', [False, True])
def test_libvirtd_frozen_during_a_build(host: Hypervisor, long: bool) -> None:
    """F18: SIGSTOP of libvirtd in a build: no hang, SIGCONT completes it (libvirt)."""
    surviving = host.start_instance()
    qemu = host.find_qemu(surviving)
    host.restart('disk-created:stop:1')
    instance = host.place()
    worker = host.wait_frozen_at('disk-created')
    os.kill(host.libvirtd_pid, signal.SIGSTOP)
    os.kill(worker, signal.SIGCONT)
    with assert_idle(host.pid):
        wait_until_lost(host)
        if long:
            wait_until(lambda: host.is_free(instance), 120, 'the worker has given up, and its undoing, too')
    assert host.find_qemu(surviving) == qemu
    assert host.read_record(instance)['state'] == 'building'
    os.kill(host.libvirtd_pid, signal.SIGCONT)
    assert host.wait_state(instance, 'active')['attempts'] == 0
    wait_until_back(host)
    assert host.find_qemu(surviving) == qemu
    assert host.read_record(surviving)['fault'] is None
    host.check_settled()
