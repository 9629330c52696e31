"""F19, F21, F29: guests that crash, power off or fill their disk, or are changed by others."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import time

import pytest

from ecomp.agent.instance.plan import DISK_GONE, DOMAIN_AND_DISK_GONE, DOMAIN_GONE, UNDEFINED
from ecomp.model.guest import CRASHED, NO_SPACE
from tests.kit.boot_sectors import HALT
from tests.kit.hypervisor import Hypervisor, put_image
from tests.kit.lab_fixtures import SMALL_IMAGES_MB
from tests.kit.servers import wait_until

STEP_FAILPOINTS = ('disk-created',)

# Waits for some 3 s of timer interrupts (55 ms each), then tells the machine's ACPI to turn the power off.
POWER_OFF = (
    bytes.fromhex(
        'fb'  # sti
        'b93700'  # mov cx, 55
        'f4'  # wait: hlt
        'e2fd'  # loop wait
        'ba0406'  # mov dx, 0x604: PM1a control of QEMU's `pc`
        'b80020'  # mov ax, 0x2000: SLP_EN, S5
        'ef'  # out dx, ax
    )
    + HALT
)

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
    """F19: kill -9 of a QEMU, noticed now or at the next start: stopped, claim kept (libvirt)."""
    instance, other = host.start_instance(), host.start_instance()
    before, claim = host.find_qemu(other), host.read_allocation(instance)
    if while_down:
        host.kill()
    os.kill(host.find_qemu(instance), signal.SIGKILL)
    if while_down:
        host.restart()
    host.wait_state(instance, 'stopped', fault=CRASHED)
    assert host.read_allocation(instance) == claim
    assert host.list_qemus() == [other]
    # A restart makes libvirt itself forget the reason.
    host.kill_libvirtd(signal.SIGTERM)
    host.start_libvirtd()
    wait_until(lambda: host.find_log_lines('libvirt qemu:///system is back'), 40, 'ecompute has looked again')
    host.restart()
    assert host.wait_state(instance, 'stopped')['fault'] == CRASHED
    assert host.list_qemus() == [other]
    assert host.find_qemu(other) == before
    if while_down:
        host.virsh('start', instance)
        host.wait_state(instance, 'active', fault=None)
    host.check_settled()


@pytest.mark.slow
def test_guest_powers_off_keeps_its_claim(host: Hypervisor) -> None:
    """F19: a guest powers off: stopped, no fault, claim kept, and active again (libvirt)."""
    instance = host.place(put_image(host, 'power-off.raw', POWER_OFF))
    host.wait_state(instance, 'stopped')
    record = host.read_record(instance)
    assert record['fault'] is None
    assert record['error'] is None
    assert 'started' in record['stages']
    assert host.virsh('domstate', '--reason', instance).strip() == 'shut off (shutdown)'
    assert host.read_allocation(instance) == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}
    host.virsh('start', instance)
    host.wait_state(instance, 'active', fault=None)
    host.wait_state(instance, 'stopped', fault=None)
    host.request_destroy(instance)
    host.wait_state(instance, 'gone')
    host.assert_removed(instance)
    host.check_settled()


@pytest.mark.slow
def test_qemu_start_failure_leaves_nothing(host: Hypervisor) -> None:
    """F19: a QEMU that cannot start: error with QEMU's reason, nothing is left (libvirt)."""
    host.restart('disk-created:stop:1')
    instance = host.place()
    worker = host.wait_frozen_at('disk-created')
    host.get_disk_path(instance).write_bytes(b'no qcow2 any more'.ljust(2**16, b'.'))
    os.kill(worker, signal.SIGCONT)
    record = host.wait_state(instance, 'error')
    assert record['error']['stage'] == 'started'
    assert 'qcow2' in record['error']['reason']
    assert record['error']['cleaned'] == 'nothing remains: no domain, disk or allocation'
    host.assert_removed(instance)
    host.check_settled()


@pytest.mark.slow
def test_full_guest_disk_is_reported_and_resumed(small_host: Hypervisor) -> None:
    """F21: a full file system of a guest's disk: paused, resumed with room (libvirt)."""
    host = small_host
    images = host.state / 'images'
    other = host.start_instance()
    before = host.find_qemu(other)
    instance = host.place(put_image(host, 'writer.raw', WRITE_16_MIB))
    host.wait_state(instance, 'active', fault=NO_SPACE)
    assert host.virsh('domstate', '--reason', instance).strip() == 'paused (I/O error)'
    assert (host.find_qemu(other), host.read_record(other)['fault']) == (before, None)
    refused = host.place()
    error = host.wait_state(refused, 'error')['error']
    assert error['stage'] == 'disk'
    assert f'the file system of {images} is full' in error['reason']
    host.assert_removed(refused)
    try:
        subprocess.run(['mount', '-o', 'remount,size=64m', str(images)], check=True)
        host.virsh('resume', instance)
        host.wait_state(instance, 'active', fault=None)
        wait_until(
            lambda: host.get_disk_path(instance).stat().st_blocks * 512 > 2**24, 60, 'the guest has written all it had'
        )
        assert host.read_record(instance)['fault'] is None
        host.check_settled()
        host.lab.destroy(instance)
    finally:
        subprocess.run(['mount', '-o', f'remount,size={SMALL_IMAGES_MB}m', str(images)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize('long', [False, True])
def test_domains_and_disks_removed_outside_ecomp(host: Hypervisor, long: bool) -> None:
    """F29: domains and disks removed outside ecomp: recorded, or the claim released (libvirt).

    Only the long case waits for the release of that claim.
    """
    names = ['off', 'undefined', 'undefined off', 'both', 'no disk', 'no volume', 'no disk off', 'untouched']
    instances = dict(zip(names, [host.place() for _ in names], strict=True))
    for instance in instances.values():
        host.wait_state(instance, 'active', fault=None)

    began = time.monotonic()
    # libvirt sends no event about a disk; the next plan notices it.
    host.get_disk_path(instances['no disk']).unlink()
    host.virsh('vol-delete', '--pool', 'ecompute', f'{instances["no volume"]}.qcow2')
    for name in ('off', 'undefined off', 'both', 'no disk off'):
        host.virsh('destroy', instances[name])
    host.get_disk_path(instances['no disk off']).unlink()
    for name in ('undefined', 'undefined off', 'both'):
        host.virsh('undefine', instances[name])
    host.get_disk_path(instances['both']).unlink()
    host.wait_state(instances['off'], 'stopped', fault=None)
    host.wait_state(instances['undefined'], 'active', fault=UNDEFINED)
    host.wait_state(instances['undefined off'], 'stopped', fault=DOMAIN_GONE)
    for name in ('no disk', 'no volume'):
        host.wait_state(instances[name], 'active', fault=DISK_GONE)
    host.wait_state(instances['no disk off'], 'stopped', fault=DISK_GONE)
    host.wait_state(instances['both'], 'stopped', fault=DOMAIN_AND_DISK_GONE)
    host.virsh('destroy', instances['undefined'])
    host.wait_state(instances['undefined'], 'stopped', fault=DOMAIN_GONE)
    assert all(host.read_allocation(instance) for instance in instances.values()), 'nobody lost a claim yet'

    if long:
        # Two checks, a minute apart.
        gone = host.wait_state(instances['both'], 'gone', seconds=120)
        assert time.monotonic() - began > 55
        assert gone['fault'] == DOMAIN_AND_DISK_GONE
        host.assert_removed(instances.pop('both'))
    assert all(host.read_allocation(instance) for instance in instances.values())
    assert host.wait_state(instances['untouched'], 'active')['fault'] is None
    host.virsh('start', instances['off'])
    host.wait_state(instances['off'], 'active', fault=None)

    host.lab.destroy(*instances.values())
    for instance in instances.values():
        host.assert_removed(instance)
    host.check_settled()
