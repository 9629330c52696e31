"""F38: stop, start and reboot are done exactly once, when processes are killed and other requests arrive."""

from __future__ import annotations

import os
import signal

import pytest

from tests.kit.boot_sectors import POWER_BUTTON
from tests.kit.hypervisor import Hypervisor, put_image
from tests.kit.servers import wait_until


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
