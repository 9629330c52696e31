"""What a hypervisor is asked to make, and what it says is there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ecomp.model.network import DEFAULT_NETWORKS, MOST_INTERFACES, Attachment

CRASHED = 'its QEMU process crashed or was killed'
NO_SPACE = 'it is paused, for its disk cannot be written: is the file system full?'


class Address(NamedTuple):
    """An IPv4 address a guest has, and what says so.

    That is `lease` (libvirt's DHCP), `arp` (the host's neighbour table) or `agent` (the guest itself).
    """

    address: str
    source: str


class Reserved(NamedTuple):
    """An IPv4 address that is kept for an interface of an instance."""

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
    """All a hypervisor needs to make one guest. Memory in MiB, disk in GiB.

    `disk_gb` None means the image's own size (`resize: False`). `networks` has an interface each, in order, at most
    MOST_INTERFACES; `reserved` has the IPv4 address kept for each, or None, or ends before. `virt_type` is libvirt's
    domain type, `kvm` or `qemu`. `seed` is what a NoCloud disk tells it, by the names of its files; None where it asks
    the network.
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
        """The interfaces' MAC addresses, in order."""
        return tuple(mac_address(self.instance, number) for number in range(len(self.networks)))


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


def all_macs(instance: str) -> tuple[str, ...]:
    """Every MAC an interface of the instance can have, whatever the networks were when it was made."""
    return tuple(mac_address(instance, number) for number in range(MOST_INTERFACES))
