"""F20 (libvirt): the host is rebooted: every process ends, /run is empty, and the boot id is new."""

from __future__ import annotations

import uuid
from functools import partial

import pytest

from tests.kit.hypervisor import Hypervisor
from tests.kit.servers import wait_until


def boot_host(host: Hypervisor, new_boot_id: bool = True) -> None:
    """Start a crashed host; from then on its ecompute is the one that elab starts."""
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


def has_running_guests(host: Hypervisor, number: int) -> bool:
    """Return True if at least this many guests run."""
    return len(host.list_qemus()) >= number


@pytest.mark.slow
def test_reboot_restores_every_guest_state(host: Hypervisor) -> None:
    """F20: running guests run again on their disks, stopped ones stay off, destroyed ones are gone (libvirt)."""
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
    """F20: all guests and daemons end without a reboot: the guests are recorded as stopped and stay so (libvirt)."""
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
    """F20: ecompute killed while it restarts guests after a reboot: the next start continues (libvirt)."""
    instances = [host.start_instance() for _ in range(4)]
    host.crash()
    boot_host(host)
    for number in range(1, 4):
        wait_until(partial(has_running_guests, host, number), 60, f'{number} of them run')
        host.restart()
    check_running(host, *instances)
    host.check_settled()
