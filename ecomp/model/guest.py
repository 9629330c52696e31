"""What a hypervisor is asked to make, and what it says is there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ecomp.errors import BuildFailed
from ecomp.model.network import DEFAULT_NETWORKS, MOST_INTERFACES, Attachment

CRASHED = 'its QEMU process crashed or was killed'
NO_SPACE = 'it is paused, for its disk cannot be written: is the file system full?'
PAUSED = 'it is paused outside of ecomp. Fix: virsh resume, or virsh dompmwakeup where it was put to sleep'
UNLIKE = 'its domain differs from its claim'
UNPLUGGED = 'its interface is on no bridge'
REFUSED_METADATA = 'the metadata server refuses it'


class Address(NamedTuple):
    """An IPv4 address a guest has, and what says so: `lease` (libvirt's DHCP), `arp` (the host's table) or `agent`.

    `since` is the ISO time at which a lease was given, or given again; '' where that is not known.
    """

    address: str
    source: str
    since: str = ''


class ReservedAddress(NamedTuple):
    """An IPv4 address that a network's DHCP reserves for an interface of an instance."""

    instance: str
    address: str


@dataclass(frozen=True)
class BaseImage:
    """A cached image, ready to be overlaid. `virtual_size` is in bytes."""

    path: str
    format: str
    virtual_size: int


@dataclass(frozen=True)
class GuestSpec:
    """All a hypervisor needs to make one guest. Memory is in MiB, disk in GiB.

    `disk_gb` None means the image's own size (`resize: False`). The guest has an interface on each of `networks`, at
    most MOST_INTERFACES; `reserved` has their IPv4 addresses in the same order, None or nothing where none is reserved.
    `virt_type` is libvirt's domain type, `kvm` or `qemu`. `seed` has the files of its NoCloud disk, {name: content};
    None means that it has no such disk and asks the metadata server.
    """

    instance: str
    compute: str
    vcpus: int
    memory_mb: int
    disk_gb: int | None
    base: BaseImage
    virt_type: str
    networks: tuple[Attachment, ...] = DEFAULT_NETWORKS
    seed: Mapping[str, bytes] | None = field(default=None, repr=False)
    reserved: tuple[str | None, ...] = ()

    @property
    def macs(self) -> tuple[str, ...]:
        """The MAC addresses of the interfaces, in the order of `networks`."""
        return tuple(mac_address(self.instance, number) for number in range(len(self.networks)))


@dataclass(frozen=True)
class Guest:
    """What a host has of one instance: a domain with our mark, its disk, or both.

    `compute` is the provider uuid in the domain's mark, None when only a disk is there. `trouble` is what is wrong with
    it on this host (its QEMU crashed, or is paused for want of disk), in plain words; '' if nothing is. `size` is what
    its domain has by the names of resource classes, where that is known; `MEMORY_MB now` is what its balloon leaves it.
    """

    instance: str
    compute: str | None
    defined: bool
    running: bool
    disk: bool
    trouble: str = ''
    size: Mapping[str, int] = field(default_factory=dict, compare=False)

    def with_trouble(self, trouble: str) -> Guest:
        """Return the guest with this trouble beside what it has."""
        return replace(self, trouble='; '.join(filter(None, (self.trouble, trouble))))

    @property
    def is_built(self) -> bool:
        """Whether it runs, or may have run: a domain is defined last, on a disk that is there by then."""
        return self.running or (self.defined and self.disk)


def mac_address(instance: str, number: int) -> str:
    """The MAC of an instance's interface: the same every time, in QEMU's own range 52:54:00."""
    digest = hashlib.sha256(f'{instance}/{number}'.encode()).hexdigest()
    return f'52:54:00:{digest[0:2]}:{digest[2:4]}:{digest[4:6]}'


def all_macs(instance: str) -> tuple[str, ...]:
    """Every MAC an interface of the instance can have, for as many networks as it can be on."""
    return tuple(mac_address(instance, number) for number in range(MOST_INTERFACES))


def same_mac(mac: str, other: str) -> BuildFailed:
    """Why no guest is made whose MAC the instance `other` of this host has: that is 24 bits of a hash."""
    why = f'its MAC {mac} is that of instance {other} here'
    return BuildFailed('scheduled', f'{why}: ask again, a new uuid has another')
