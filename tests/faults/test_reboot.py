"""F20 (libvirt): the host is rebooted: everything on it ends at once, /run is empty, and it is another boot."""

from __future__ import annotations

import uuid
from functools import partial

import pytest

from tests.kit.hypervisor import Hypervisor
from tests.kit.servers import until


def boot(host: Hypervisor, another: bool = True) -> None:
    """Start a host that has crashed; the ecompute that elab starts is the host's from then on."""
    if another:
        (host.state / 'boot').write_text(f'{uuid.uuid4()}\n')
    host.lab.start_ecomputes()
    host.armed = ''


def run_here(host: Hypervisor, *instances: str) -> None:
    """Wait until these run, each in one QEMU, and nothing else; their records, which said so all along, still do."""
    try:
        until(lambda: sorted(host.qemus()) == sorted(instances), 90, f'just these run: {instances}')
    except AssertionError as error:
        raise AssertionError(f'{error}, but {host.qemus()}\n{host.said()[-5000:]}') from None
    for each in instances:
        host.reached(each, 'active', fault=None)


def at_least(host: Hypervisor, number: int) -> bool:
    """Whether so many guests run."""
    return len(host.qemus()) >= number


@pytest.mark.slow
def test_rebooted(host: Hypervisor) -> None:
    """F20: what ran runs again on its disk, what was off stays off, what was destroyed meanwhile is gone (libvirt)"""
    ran, asked, off, doomed, stopping = (host.running() for _ in range(5))
    host.virsh('destroy', off)
    host.reached(off, 'stopped', fault=None)
    disks = {each: host.disk(each).stat().st_ino for each in (ran, asked, off)}
    host.restart('built:stop:1')
    new = host.place()
    host.frozen_at('built')
    host.ask('stop', stopping)  # and the host goes down before it is done
    host.crash()
    host.ask_destroy(doomed)
    never = host.place()
    boot(host)
    run_here(host, ran, asked, new, never)
    host.reached(doomed, 'gone')
    host.nothing_of(doomed)
    host.reached(stopping, 'stopped', fault=None)
    assert host.record(off)['state'] == 'stopped'
    assert {each: host.disk(each).stat().st_ino for each in disks} == disks
    # Dealt with: what goes off from now on stays off.
    host.virsh('destroy', ran)
    host.reached(ran, 'stopped', fault=None)
    host.restart()
    assert host.record(ran)['state'] == 'stopped'
    assert ran not in host.qemus()
    for each in (ran, off):
        host.virsh('start', each)
        host.reached(each, 'active', fault=None)
    host.settled()


def test_crashed_in_the_same_boot(host: Hypervisor) -> None:
    """F20: all guests and daemons end, and the machine was not rebooted: what ran is stopped, and stays so (libvirt)"""
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
    """F20: ecompute is killed while it starts what ran before a reboot: the next start goes on with it (libvirt)"""
    instances = [host.running() for _ in range(4)]
    host.crash()
    boot(host)
    for some in range(1, 4):
        until(partial(at_least, host, some), 60, f'{some} of them run')
        host.restart()
    run_here(host, *instances)
    host.settled()
