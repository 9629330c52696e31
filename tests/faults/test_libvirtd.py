"""F18 (libvirt): libvirtd killed, ended and frozen, while idle and in the middle of each step of a worker."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.kit.hands import idle
from tests.kit.hypervisor import Hypervisor
from tests.kit.servers import until

STEP_FAILPOINTS = ('disk-created', 'domain-defined', 'domain-destroyed')
LIBVIRT = 'libvirt qemu:///system'


def lost(host: Hypervisor) -> None:
    """Wait until ecompute has logged the loss of libvirtd."""
    until(lambda: host.losses(LIBVIRT)[0], 40, 'the loss is logged')


def found_again(host: Hypervisor) -> None:
    """Wait until ecompute has logged the return of libvirtd; check that the loss was logged once."""
    until(lambda: host.losses(LIBVIRT)[1], 40, 'the return is logged')
    assert host.losses(LIBVIRT)[0] == 1, host.said()


KILL = signal.SIGKILL
TERM = signal.SIGTERM
ALL = [(step, how, when) for step in STEP_FAILPOINTS for how in (KILL, TERM) for when in ('away', 'back')]


@pytest.mark.slow
@pytest.mark.parametrize(('step', 'how', 'when'), ALL)
def test_libvirtd_ends_in_a_step(host: Hypervisor, step: str, how: int, when: str) -> None:
    """F18: libvirtd killed or stopped, and restarted, while a worker is in a step: the step is repeated (libvirt).

    The worker is continued while libvirtd is `away`, or when it is `back`.
    """
    surviving = host.running()
    qemu, destroyed = host.qemu(surviving), step == 'domain-destroyed'
    host.restart(f'{step}:stop:1')
    instance = host.running() if destroyed else host.place()
    if destroyed:
        host.ask_destroy(instance)
    worker = host.frozen_at(step)
    host.end_libvirtd(how)
    lost(host)
    if when == 'away':
        os.kill(worker, signal.SIGCONT)
        until(lambda: host.is_free(instance), 60, 'the worker has given up')
        assert host.record(instance)['state'] == ('destroying' if destroyed else 'building')
    host.start_libvirtd()
    if when == 'back':
        os.kill(worker, signal.SIGCONT)
    record = host.reached(instance, 'gone' if destroyed else 'active')
    assert record['attempts'] == 0, "that libvirtd is away is nobody's failure"
    found_again(host)
    assert host.qemu(surviving) == qemu
    assert sorted(host.qemus()) == sorted([surviving] if destroyed else [surviving, instance])
    host.settled()


def test_libvirtd_away(host: Hypervisor) -> None:
    """F18: kill -9 of libvirtd for ten seconds: guests keep running, ecompute idles, requests wait (libvirt)."""
    surviving, doomed = host.running(), host.running()
    qemus = {name: host.qemu(name) for name in (surviving, doomed)}
    host.end_libvirtd()
    lost(host)
    instance = host.place()
    host.ask_destroy(doomed)
    began = time.monotonic()
    with idle(host.pid):
        until(lambda: time.monotonic() - began > 10, 20, 'ten seconds have passed')
    assert {name: host.qemu(name) for name in (surviving, doomed)} == qemus
    assert host.record(surviving)['state'] == 'active'
    assert host.record(surviving)['fault'] is None
    host.start_libvirtd()
    host.reached(instance, 'active')
    host.reached(doomed, 'gone')
    found_again(host)
    assert host.qemu(surviving) == qemus[surviving]
    host.settled()


@pytest.mark.slow
@pytest.mark.parametrize('long', [False, True])
def test_libvirtd_frozen(host: Hypervisor, long: bool) -> None:
    """F18: SIGSTOP of libvirtd in a build, until the keepalive fails: no hang, SIGCONT completes it (libvirt)."""
    surviving = host.running()
    qemu = host.qemu(surviving)
    host.restart('disk-created:stop:1')
    instance = host.place()
    worker = host.frozen_at('disk-created')
    os.kill(host.libvirtd, signal.SIGSTOP)
    os.kill(worker, signal.SIGCONT)
    with idle(host.pid):
        lost(host)
        if long:
            until(lambda: host.is_free(instance), 120, 'the worker has given up, and its undoing, too')
    assert host.qemu(surviving) == qemu
    assert host.record(instance)['state'] == 'building'
    os.kill(host.libvirtd, signal.SIGCONT)
    assert host.reached(instance, 'active')['attempts'] == 0
    found_again(host)
    assert host.qemu(surviving) == qemu
    assert host.record(surviving)['fault'] is None
    host.settled()
