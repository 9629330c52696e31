"""Who may enter which directory, and which virtualization can be had."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import pytest

from ecomp.errors import UsageError
from ecomp.virt import libvirt_host

QEMU = libvirt_host.User('qemu', 100, frozenset({200, 201}))


def acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *entry) for entry in entries)


@pytest.mark.parametrize(
    ('mode', 'owner', 'group', 'entries', 'bits'),
    [
        (0o40711, 0, 0, (), 1),
        (0o40700, 0, 0, (), 0),
        (0o40700, 100, 0, (), 7),
        (0o40077, 100, 0, (), 0),
        (0o40710, 0, 201, (), 1),
        (0o40701, 0, 201, (), 0),
        (0o40710, 0, 0, ((libvirt_host.ACL_USER, 1, 100), (libvirt_host.ACL_MASK, 1, 0)), 1),
        (0o40700, 0, 0, ((libvirt_host.ACL_USER, 1, 100), (libvirt_host.ACL_MASK, 0, 0)), 0),
        (0o40711, 0, 0, ((libvirt_host.ACL_USER, 0, 100), (libvirt_host.ACL_MASK, 1, 0)), 0),
        (0o40711, 0, 0, ((libvirt_host.ACL_USER, 7, 999), (libvirt_host.ACL_MASK, 7, 0)), 1),
        (0o40770, 0, 0, ((libvirt_host.ACL_GROUP, 5, 201), (libvirt_host.ACL_MASK, 7, 0)), 5),
        (
            *(0o40770, 0, 200),
            ((libvirt_host.ACL_GROUP_OBJ, 4, 0), (libvirt_host.ACL_GROUP, 5, 201), (libvirt_host.ACL_MASK, 7, 0)),
            5,
        ),
    ],
)
def test_granted(mode: int, owner: int, group: int, entries: tuple[tuple[int, int, int], ...], bits: int) -> None:
    assert libvirt_host.granted(mode, owner, group, acl(*entries) if entries else b'', QEMU) == bits
    assert libvirt_host.granted(mode, owner, group, b'', libvirt_host.User('root', 0, frozenset({0}))) == 7


def test_unreachable_directory_is_named_with_the_command(tmp_path: Path) -> None:
    (tmp_path / 'a b' / 'images').mkdir(parents=True)
    for step in (tmp_path, *tmp_path.parents):
        if not libvirt_host.can(libvirt_host.ENTER, step, QEMU):
            step.chmod(step.stat().st_mode | 0o001)
    libvirt_host.check_reachable(tmp_path / 'a b' / 'images', QEMU)
    (tmp_path / 'a b').chmod(0o700)
    with pytest.raises(UsageError) as refused:
        libvirt_host.check_reachable(tmp_path / 'a b' / 'images', QEMU)
    assert f"setfacl -m u:qemu:x '{tmp_path}/a b' " in str(refused.value)


@pytest.mark.parametrize(('cpu_flag', 'device', 'offered'), list(itertools.product((False, True), repeat=3)))
def test_virt_type(
    *, cpu_flag: bool, device: bool, offered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'cpuinfo').write_text('flags : fpu vmx' if cpu_flag else 'flags : fpu')
    (tmp_path / 'kvm').touch()
    (tmp_path / 'kvm').chmod(0o666 if device else 0o600)
    monkeypatch.setattr(libvirt_host, 'CPUINFO', tmp_path / 'cpuinfo')
    monkeypatch.setattr(libvirt_host, 'KVM', tmp_path / 'kvm')
    no_kvm = libvirt_host.explain_no_kvm(QEMU, {'kvm', 'qemu'} if offered else {'qemu'})

    def choose(wanted: str) -> str:
        return libvirt_host.choose_virt_type(wanted, no_kvm)

    assert libvirt_host.is_kvm_closed(QEMU) == (not device)
    assert choose('qemu') == 'qemu'
    if cpu_flag and device and offered:
        assert (choose('auto'), choose('kvm')) == ('kvm', 'kvm')
        return
    assert choose('auto') == 'qemu'
    with pytest.raises(UsageError) as refused:
        choose('kvm')
    assert ('vmx' in str(refused.value)) == (not cpu_flag)
    assert ('/dev/kvm' in str(refused.value)) == (not device)
    assert ('libvirt' in str(refused.value)) == (not offered)


def test_unknown_virt_type() -> None:
    with pytest.raises(UsageError, match='xen'):
        libvirt_host.choose_virt_type('xen', '')
