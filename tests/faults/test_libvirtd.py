"""F18 (libvirt): libvirtd killed, ended and frozen, while idle and in the middle of each step of a worker."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.kit.hands import assert_idle
from tests.kit.hypervisor import Hypervisor
from tests.kit.servers import wait_until

STEP_FAILPOINTS = ('disk-created', 'domain-defined', 'domain-destroyed')
LIBVIRT = 'libvirt qemu:///system'


def wait_until_lost(host: Hypervisor) -> None:
    """Wait until ecompute has logged the loss of libvirtd."""
    wait_until(lambda: host.count_losses(LIBVIRT)[0], 40, 'the loss is logged')


def wait_until_back(host: Hypervisor) -> None:
    """Wait until ecompute has logged the return of libvirtd; check that the loss was logged once."""
    wait_until(lambda: host.count_losses(LIBVIRT)[1], 40, 'the return is logged')
    assert host.count_losses(LIBVIRT)[0] == 1, host.read_log()


KILL = signal.SIGKILL
TERM = signal.SIGTERM
ALL = [(step, how, when) for step in STEP_FAILPOINTS for how in (KILL, TERM) for when in ('away', 'back')]


@pytest.mark.slow
@pytest.mark.parametrize(('step', 'how', 'when'), ALL)
def test_libvirtd_ended_during_a_step(host: Hypervisor, step: str, how: int, when: str) -> None:
    """F18: libvirtd killed or stopped, and restarted, while a worker is in a step: the step is repeated (libvirt).

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
    """F18: kill -9 of libvirtd for ten seconds: guests keep running, ecompute idles, requests wait (libvirt)."""
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
    """F18: SIGSTOP of libvirtd in a build, until the keepalive fails: no hang, SIGCONT completes it (libvirt)."""
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
