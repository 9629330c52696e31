"""F20 (libvirt): the host is rebooted: every process ends, /run is empty, and the boot id is new."""

from __future__ import annotations

import uuid
from functools import partial

import pytest

from tests.kit.hypervisor import Hypervisor
from tests.kit.servers import until


def boot(host: Hypervisor, another: bool = True) -> None:
    """Start a crashed host; from then on its ecompute is the one that elab starts."""
    if another:
        (host.state / 'boot').write_text(f'{uuid.uuid4()}\n')
    host.lab.start_ecomputes()
    host.armed = ''


def run_here(host: Hypervisor, *instances: str) -> None:
    """Wait until exactly these instances run, each in one QEMU, and their records are active."""
    try:
        until(lambda: sorted(host.qemus()) == sorted(instances), 90, f'just these run: {instances}')
    except AssertionError as error:
        raise AssertionError(f'{error}, but {host.qemus()}\n{host.said()[-5000:]}') from None
    for instance in instances:
        host.reached(instance, 'active', fault=None)


def at_least(host: Hypervisor, number: int) -> bool:
    """Return True if at least this many guests run."""
    return len(host.qemus()) >= number


@pytest.mark.slow
def test_rebooted(host: Hypervisor) -> None:
    """F20: running guests run again on their disks, stopped ones stay off, destroyed ones are gone (libvirt)."""
    running, running_too, stopped, doomed, stopping = (host.running() for _ in range(5))
    host.virsh('destroy', stopped)
    host.reached(stopped, 'stopped', fault=None)
    disks = {name: host.disk(name).stat().st_ino for name in (running, running_too, stopped)}
    host.restart('built:stop:1')
    building = host.place()
    host.frozen_at('built')
    host.ask('stop', stopping)  # and the host crashes before it is done
    host.crash()
    host.ask_destroy(doomed)
    unread = host.place()
    boot(host)
    run_here(host, running, running_too, building, unread)
    host.reached(doomed, 'gone')
    host.nothing_of(doomed)
    host.reached(stopping, 'stopped', fault=None)
    assert host.record(stopped)['state'] == 'stopped'
    assert {name: host.disk(name).stat().st_ino for name in disks} == disks
    # The reboot has been handled: guests that are turned off later stay off.
    host.virsh('destroy', running)
    host.reached(running, 'stopped', fault=None)
    host.restart()
    assert host.record(running)['state'] == 'stopped'
    assert running not in host.qemus()
    for name in (running, stopped):
        host.virsh('start', name)
        host.reached(name, 'active', fault=None)
    host.settled()


def test_crashed_in_the_same_boot(host: Hypervisor) -> None:
    """F20: all guests and daemons end without a reboot: the guests are recorded as stopped and stay so (libvirt)."""
    instance = host.running()
    claim = host.held(instance)
    host.crash()
    boot(host, another=False)
    host.reached(instance, 'stopped')
    assert host.qemus() == []
    assert host.held(instance) == claim
    host.virsh('start', instance)
    host.reached(instance, 'active', fault=None)
    host.settled()


@pytest.mark.slow
def test_killed_while_it_starts_them_again(host: Hypervisor) -> None:
    """F20: ecompute killed while it restarts guests after a reboot: the next start continues (libvirt)."""
    instances = [host.running() for _ in range(4)]
    host.crash()
    boot(host)
    for number in range(1, 4):
        until(partial(at_least, host, number), 60, f'{number} of them run')
        host.restart()
    run_here(host, *instances)
    host.settled()
