"""F18 (libvirt): libvirtd killed, ended and frozen, at rest and in the middle of each step of a worker."""

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
    """Wait until ecompute has said that libvirtd is away."""
    until(lambda: host.losses(LIBVIRT)[0], 40, 'the loss is logged')


def found_again(host: Hypervisor) -> None:
    """ecompute says once that libvirtd was lost, and once that it is back, whoever else meets it later."""
    until(lambda: host.losses(LIBVIRT)[1], 40, 'the return is logged')
    assert host.losses(LIBVIRT)[0] == 1, host.said()


KILL, TERM = signal.SIGKILL, signal.SIGTERM
ALL = [(step, how, when) for step in STEP_FAILPOINTS for how in (KILL, TERM) for when in ('away', 'back')]


@pytest.mark.slow
@pytest.mark.parametrize(('step', 'how', 'when'), ALL)
def test_libvirtd_ends_in_a_step(host: Hypervisor, step: str, how: int, when: str) -> None:
    """F18: libvirtd killed or stopped, and started again, while a worker is in a step: the step is done again (libvirt)

    The worker goes on while libvirtd is `away`, or when it is `back`.
    """
    kept = host.running()
    qemu, destroyed = host.qemu(kept), step == 'domain-destroyed'
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
    assert host.qemu(kept) == qemu
    assert sorted(host.qemus()) == sorted([kept] if destroyed else [kept, instance])
    host.settled()


def test_libvirtd_away(host: Hypervisor) -> None:
    """F18: kill -9 of libvirtd for ten seconds: guests run on, ecompute idles, requests wait (libvirt)"""
    kept, doomed = host.running(), host.running()
    qemus = {each: host.qemu(each) for each in (kept, doomed)}
    host.end_libvirtd()
    lost(host)
    instance = host.place()
    host.ask_destroy(doomed)
    began = time.monotonic()
    with idle(host.pid):
        until(lambda: time.monotonic() - began > 10, 20, 'ten seconds have passed')
    assert {each: host.qemu(each) for each in (kept, doomed)} == qemus
    assert host.record(kept)['state'] == 'active'
    assert host.record(kept)['fault'] is None
    host.start_libvirtd()
    host.reached(instance, 'active')
    host.reached(doomed, 'gone')
    found_again(host)
    assert host.qemu(kept) == qemus[kept]
    host.settled()


@pytest.mark.slow
@pytest.mark.parametrize('long', [False, True])
def test_libvirtd_frozen(host: Hypervisor, long: bool) -> None:
    """F18: SIGSTOP of libvirtd in a build, until the keepalive fails: nobody hangs, it ends on CONT (libvirt)"""
    kept = host.running()
    qemu = host.qemu(kept)
    host.restart('disk-created:stop:1')
    instance = host.place()
    worker = host.frozen_at('disk-created')
    os.kill(host.libvirtd, signal.SIGSTOP)
    os.kill(worker, signal.SIGCONT)
    with idle(host.pid):
        lost(host)
        if long:
            until(lambda: host.is_free(instance), 120, 'the worker has given up, and its undoing, too')
    assert host.qemu(kept) == qemu
    assert host.record(instance)['state'] == 'building'
    os.kill(host.libvirtd, signal.SIGCONT)
    assert host.reached(instance, 'active')['attempts'] == 0
    found_again(host)
    assert host.qemu(kept) == qemu
    assert host.record(kept)['fault'] is None
    host.settled()
