"""What a hypervisor is asked to make, and what it says is there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

CRASHED = 'its QEMU process crashed or was killed'
NO_SPACE = 'it is paused, for its disk cannot be written: is the file system full?'


@dataclass(frozen=True)
class BaseImage:
    """A cached image, ready to be overlaid. `virtual_size` is in bytes."""

    path: str
    format: str
    virtual_size: int


@dataclass(frozen=True)
class GuestSpec:
    """All a hypervisor needs to make one guest. Memory in MiB, disk in GiB.

    `disk_gb` None means the image's own size (`resize: False`). `bridge` None means one interface,
    on the network alone. `virt_type` is libvirt's domain type, `kvm` or `qemu`.
    """

    instance: str
    compute: str
    vcpus: int
    memory_mb: int
    disk_gb: int | None
    base: BaseImage
    virt_type: str
    network: str = 'default'
    bridge: str | None = None

    @property
    def macs(self) -> tuple[str, ...]:
        """The interfaces' MAC addresses, in order: the network's, then the bridge's."""
        return tuple(mac_address(self.instance, n) for n in range(2 if self.bridge else 1))


@dataclass(frozen=True)
class Guest:
    """What is present on this host of one instance that carries our mark.

    `compute` is the provider uuid in the domain's mark, None when only a disk is there. `trouble` is what libvirt says
    is wrong with its QEMU (crashed, or paused for want of disk), in plain words; '' if nothing is.
    """

    instance: str
    compute: str | None
    defined: bool
    running: bool
    disk: bool
    trouble: str = ''


def mac_address(instance: str, number: int) -> str:
    """The MAC of an instance's interface: the same every time, in QEMU's own range 52:54:00."""
    digest = hashlib.sha256(f'{instance}/{number}'.encode()).hexdigest()
    return f'52:54:00:{digest[0:2]}:{digest[2:4]}:{digest[4:6]}'
