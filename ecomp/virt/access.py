"""What the user QEMU runs as can get at: directories above the disks (libvirt gives it the disks alone), and KVM."""

from __future__ import annotations

import os
import pwd
import shlex
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ecomp.errors import UsageError

ACL = 'system.posix_acl_access'
ACL_USER, ACL_GROUP_OBJ, ACL_GROUP, ACL_MASK = 0x02, 0x04, 0x08, 0x10
ENTER, READ_WRITE = 0o1, 0o6

KVM = Path('/dev/kvm')
# libvirt then holds its own cache of what QEMU can do for outdated whenever it looks.
UNUSABLE_KVM = (
    'cannot be opened by {name}: every start of a guest, and this one of ecompute, takes up to a minute longer, while '
    'libvirt probes QEMU again. chgrp kvm /dev/kvm; chmod 660 /dev/kvm'
)


@dataclass(frozen=True)
class User:
    """The user QEMU runs as: its name, its number, and the numbers of all its groups."""

    name: str
    uid: int
    groups: frozenset[int]


def user(uid: int, gid: int) -> User:
    """The user of this host with these numbers."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return User(str(uid), uid, frozenset({gid}))
    # libvirt's group for QEMU need not be the user's own: it has both.
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return User(entry.pw_name, uid, frozenset({*groups, gid}))


def check_reachable(directory: Path, qemu: User) -> None:
    """UsageError, with the command that helps, for the first directory on the way that QEMU cannot enter.

    One that is not there is made by ecompute, so that it can.
    """
    if (step := blocked(directory, qemu)) is not None:
        raise UsageError(
            f'QEMU runs as {qemu.name}, who cannot enter {step}, on the way to the disks in {directory}: '
            f'setfacl -m u:{qemu.name}:x {shlex.quote(str(step))} (or chmod o+x, or another `state:`)'
        )


def blocked(directory: Path, qemu: User) -> Path | None:
    """The first directory that is there on the way, and that QEMU cannot enter."""
    real = directory.resolve()
    steps = (*reversed(real.parents), real)
    # os.path's is false, and no error, below what we may not enter.
    return next((step for step in steps if os.path.exists(step) and not can(ENTER, step, qemu)), None)


def can(wanted: int, path: Path, qemu: User) -> bool:
    """Whether QEMU may use an existing file or directory in the `wanted` way, ENTER or READ_WRITE.

    By that file's own mode and ACL; the directories above it are not looked at.
    """
    status = path.stat()
    try:
        acl = os.getxattr(path, ACL)
    except OSError:
        # None set, or a file system without them: the mode alone counts.
        acl = b''
    permissions = granted(status.st_mode, status.st_uid, status.st_gid, acl, qemu)
    return permissions & wanted == wanted


def granted(mode: int, owner: int, group: int, acl: bytes, qemu: User) -> int:
    """The rwx bits a user has on a file with this owner, group, mode and ACL (b'' is none): acl(5)'s algorithm."""
    if qemu.uid == 0:
        return 0o7
    if owner == qemu.uid:
        return mode >> 6 & 0o7
    if not acl:
        return mode >> 3 & 0o7 if group in qemu.groups else mode & 0o7
    # A version number, then (tag, permissions, id) for each entry.
    entries = list(struct.iter_unpack('<HHI', acl[4:]))
    mask = next((permissions for tag, permissions, _ in entries if tag == ACL_MASK), 0o7)
    for tag, permissions, number in entries:
        if tag == ACL_USER and number == qemu.uid:
            return permissions & mask
    by_group = [
        permissions
        for tag, permissions, number in entries
        if (tag == ACL_GROUP and number in qemu.groups) or (tag == ACL_GROUP_OBJ and group in qemu.groups)
    ]
    if by_group:
        # One entry must grant all that is wanted, says acl(5); we want one bit, or two that are given together.
        return max(by_group) & mask
    return mode & 0o7


def look_for_kvm(qemu: User, domain_types: Collection[str]) -> dict[str, bool]:
    """What no_kvm() and choose_virt_type() are told, as it is on this machine; libvirt offers `domain_types`."""
    flags = Path('/proc/cpuinfo').read_text(errors='replace').split()
    return {
        'cpu_flag': 'vmx' in flags or 'svm' in flags,
        'device': KVM.exists() and can(READ_WRITE, KVM, qemu),
        'offered': 'kvm' in domain_types,
    }


def no_kvm(*, cpu_flag: bool, device: bool, offered: bool) -> list[str]:
    """Why guests cannot have KVM, in words; nothing if they can."""
    needed = {
        'the CPU has neither vmx nor svm': cpu_flag,
        '/dev/kvm is not there for QEMU to open': device,
        'libvirt does not offer it': offered,
    }
    return [what for what, there in needed.items() if not there]


def choose_virt_type(wanted: str, *, cpu_flag: bool, device: bool, offered: bool) -> str:
    """`kvm` or `qemu` for a `wanted` auto, kvm or qemu. UsageError where kvm is wanted and one of the three is missing.

    /dev/kvm alone proves nothing: it may be there where the CPU cannot do it, and a guest then hangs for ever.
    """
    missing = no_kvm(cpu_flag=cpu_flag, device=device, offered=offered)
    if wanted == 'qemu' or (wanted == 'auto' and missing):
        return 'qemu'
    if wanted not in ('auto', 'kvm'):
        raise UsageError(f'virt_type {wanted!r} is not known: auto, kvm or qemu')
    if missing:
        raise UsageError(f'virt_type kvm cannot be had: {"; ".join(missing)}. Use virt_type: auto or qemu')
    return 'kvm'
