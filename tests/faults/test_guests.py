"""F19, F21, F29 (libvirt): guests that crash, power off or fill their disk, or are changed outside ecomp."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import time

import pytest

from ecomp.agent.instance.plan import GONE_BOTH, GONE_DISK, GONE_DOMAIN, UNDEFINED
from ecomp.model.guest import CRASHED, NO_SPACE
from tests.kit.boot_sectors import HALT
from tests.kit.hypervisor import Hypervisor, put_image
from tests.kit.lab_fixtures import SMALL_MB
from tests.kit.servers import until

STEP_FAILPOINTS = ('disk-created',)

# Waits for some 3 s of timer interrupts (55 ms each), then tells the machine's ACPI to turn the power off.
POWER_OFF = bytes.fromhex(
    'fb'  # sti
    'b93700'  # mov cx, 55
    'f4'  # wait: hlt
    'e2fd'  # loop wait
    'ba0406'  # mov dx, 0x604: PM1a control of QEMU's `pc`
    'b80020'  # mov ax, 0x2000: SLP_EN, S5
    'ef'  # out dx, ax
) + HALT

# Writes some 16 MiB through the firmware, 127 sectors at a time from sector 2048; then halts the processor. It writes
# the firmware's own bytes, because zeroes would not be stored.
PACKET = 0x7C22
WRITE_16_MIB = (
    bytes.fromhex(
        '31c0 8ed8'  # ds = 0
        'b90001'  # mov cx, 256
        '51'  # next: push cx
    )
    + struct.pack('<BH', 0xBE, PACKET)  # mov si, packet
    + bytes.fromhex('b80043 cd13 59')  # ah = 0x43, extended write; int 0x13 with dl as at entry; pop cx
    + struct.pack('<HHH', 0x0681, PACKET + 8, 127)  # add word [packet + 8], 127
    + struct.pack('<HHB', 0x1683, PACKET + 10, 0)  # adc word [packet + 10], 0
    + bytes.fromhex('e2e9')  # loop next
    + HALT
    + struct.pack('<BBHHHQ', 16, 0, 127, 0, 0xF000, 2048)
)


@pytest.mark.parametrize('while_down', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_qemu_killed(host: Hypervisor, while_down: bool) -> None:
    """F19: kill -9 of a QEMU, noticed immediately or at the next start: stopped with a fault, claim kept (libvirt)."""
    instance, other = host.running(), host.running()
    before, claim = host.qemu(other), host.held(instance)
    if while_down:
        host.kill()
    os.kill(host.qemu(instance), signal.SIGKILL)
    if while_down:
        host.restart()
    host.reached(instance, 'stopped', fault=CRASHED)
    assert host.held(instance) == claim
    assert host.qemus() == [other]
    # A restart makes libvirt itself forget the reason.
    host.end_libvirtd(signal.SIGTERM)
    host.start_libvirtd()
    until(lambda: host.lines('libvirt qemu:///system is back'), 40, 'ecompute has looked again')
    host.restart()
    assert host.reached(instance, 'stopped')['fault'] == CRASHED
    assert host.qemus() == [other]
    assert host.qemu(other) == before
    host.virsh('start', instance)
    host.reached(instance, 'active', fault=None)
    host.settled()


def test_guest_powers_off(host: Hypervisor) -> None:
    """F19: a guest powers off: stopped, no fault, claim kept; virsh start makes it active (libvirt)."""
    instance = host.place(put_image(host, 'power-off.raw', POWER_OFF))
    host.reached(instance, 'stopped')
    record = host.record(instance)
    assert record['fault'] is None
    assert record['error'] is None
    assert 'started' in record['stages']
    assert host.virsh('domstate', '--reason', instance).strip() == 'shut off (shutdown)'
    assert host.held(instance) == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}
    host.virsh('start', instance)
    host.reached(instance, 'active', fault=None)
    host.reached(instance, 'stopped', fault=None)
    host.ask_destroy(instance)
    host.reached(instance, 'gone')
    host.nothing_of(instance)
    host.settled()


def test_qemu_that_does_not_start(host: Hypervisor) -> None:
    """F19: a QEMU that cannot start: error at stage started with QEMU's reason, and nothing is left (libvirt)."""
    host.restart('disk-created:stop:1')
    instance = host.place()
    worker = host.frozen_at('disk-created')
    host.disk(instance).write_bytes(b'no qcow2 any more'.ljust(2**16, b'.'))
    os.kill(worker, signal.SIGCONT)
    record = host.reached(instance, 'error')
    assert record['error']['stage'] == 'started'
    assert 'qcow2' in record['error']['reason']
    assert record['error']['cleaned'] == 'nothing of it is left: no domain, disk or allocation'
    host.nothing_of(instance)
    host.settled()


def test_guests_disk_is_full(small_host: Hypervisor) -> None:
    """F21: the file system of a guest's disk is full: paused and reported; resumed once there is room (libvirt)."""
    host = small_host
    images = host.state / 'images'
    other = host.running()
    before = host.qemu(other)
    instance = host.place(put_image(host, 'writer.raw', WRITE_16_MIB))
    host.reached(instance, 'active', fault=NO_SPACE)
    assert host.virsh('domstate', '--reason', instance).strip() == 'paused (I/O error)'
    assert (host.qemu(other), host.record(other)['fault']) == (before, None)
    refused = host.place()
    error = host.reached(refused, 'error')['error']
    assert error['stage'] == 'disk'
    assert f'the file system of {images} is full' in error['reason']
    host.nothing_of(refused)
    try:
        subprocess.run(['mount', '-o', 'remount,size=64m', str(images)], check=True)
        host.virsh('resume', instance)
        host.reached(instance, 'active', fault=None)
        until(lambda: host.disk(instance).stat().st_blocks * 512 > 2**24, 60, 'the guest has written all it had')
        assert host.record(instance)['fault'] is None
        host.settled()
        host.lab.destroy(instance)
    finally:
        subprocess.run(['mount', '-o', f'remount,size={SMALL_MB}m', str(images)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize('long', [False, True])
def test_changed_by_hand(host: Hypervisor, long: bool) -> None:
    """F29: domains and disks removed outside ecomp: recorded; without both the claim is released (libvirt).

    Only the long case waits for the release of that claim.
    """
    names = ['off', 'undefined', 'undefined off', 'both', 'no disk', 'no volume', 'no disk off', 'untouched']
    instances = dict(zip(names, [host.place() for _ in names], strict=True))
    for instance in instances.values():
        host.reached(instance, 'active', fault=None)

    began = time.monotonic()
    # libvirt sends no event about a disk; the next plan notices it.
    host.disk(instances['no disk']).unlink()
    host.virsh('vol-delete', '--pool', 'ecompute', f'{instances["no volume"]}.qcow2')
    for name in ('off', 'undefined off', 'both', 'no disk off'):
        host.virsh('destroy', instances[name])
    host.disk(instances['no disk off']).unlink()
    for name in ('undefined', 'undefined off', 'both'):
        host.virsh('undefine', instances[name])
    host.disk(instances['both']).unlink()
    host.reached(instances['off'], 'stopped', fault=None)
    host.reached(instances['undefined'], 'active', fault=UNDEFINED)
    host.reached(instances['undefined off'], 'stopped', fault=GONE_DOMAIN)
    for name in ('no disk', 'no volume'):
        host.reached(instances[name], 'active', fault=GONE_DISK)
    host.reached(instances['no disk off'], 'stopped', fault=GONE_DISK)
    host.reached(instances['both'], 'stopped', fault=GONE_BOTH)
    host.virsh('destroy', instances['undefined'])
    host.reached(instances['undefined'], 'stopped', fault=GONE_DOMAIN)
    assert all(host.held(instance) for instance in instances.values()), 'nobody lost a claim yet'

    if long:
        # Two checks, a minute apart.
        gone = host.reached(instances['both'], 'gone', seconds=120)
        assert time.monotonic() - began > 55
        assert gone['fault'] == GONE_BOTH
        host.nothing_of(instances.pop('both'))
    assert all(host.held(instance) for instance in instances.values())
    assert host.reached(instances['untouched'], 'active')['fault'] is None
    host.virsh('start', instances['off'])
    host.reached(instances['off'], 'active', fault=None)

    host.lab.destroy(*instances.values())
    for instance in instances.values():
        host.nothing_of(instance)
    host.settled()
