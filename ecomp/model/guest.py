"""Guests on a host: their networks, specifications and troubles. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ecomp.errors import BuildFailed

# A configuration with more interfaces for each guest is refused.
MAX_INTERFACES = 8


class Attachment(NamedTuple):
    """The network of an interface: `kind` is libvirt's `network` or the host's `bridge`."""

    kind: str
    name: str


# The address of EC2's metadata server, at which guests look for one. It is link-local, so no router forwards to it.
METADATA_ADDRESS = '169.254.169.254'

DEFAULT_NETWORKS = (Attachment('network', 'default'),)

# The route metric of the first interface, the default of networkd and NetworkManager; further ones get multiples.
FIRST_ROUTE_METRIC = 100


def make_network_config(macs: Sequence[str]) -> dict[str, Any] | None:
    """Return a cloud-init configuration with DHCP on each interface, or None for only one."""
    if len(macs) < 2:
        return None  # on a single one every image uses DHCP by default
    # The format is netplan's version 2, which cloud-init passes to netplan or translates. It matches by MAC, so the
    # keys need not be names. Sources: cloud-init's "Networking config version 2" and network_state.py (22.4 to 25.1),
    # netplan-yaml(5).
    ethernets: dict[str, Any] = {}
    for index, mac in enumerate(macs):
        ethernets[f'eth{index}'] = {
            'match': {'macaddress': mac},
            'dhcp4': True,
            # With equal metrics a guest may use either default route.
            'dhcp4-overrides': {'route-metric': FIRST_ROUTE_METRIC * (index + 1)},
            # Do not delay the boot for a network without DHCP.
            **({'optional': True} if index else {}),
        }
    return {'version': 2, 'ethernets': ethernets}


class Usage(NamedTuple):
    """What a running guest has used since its start, and the host's memory that it uses now."""

    vcpu_seconds_total: float | None
    resident_memory_bytes: int
    disk_read_bytes_total: int = 0
    disk_written_bytes_total: int = 0


# A fault: the domain is transient.
UNDEFINED = 'its domain runs and is not defined: once it stops it is gone'
CRASHED = 'its QEMU process crashed or was killed'
NO_SPACE = 'it is paused, for its disk cannot be written: is the file system full?'
PAUSED = 'it is paused outside of ecomp. Fix: virsh resume, or virsh dompmwakeup where it was put to sleep'
UNLIKE = 'its domain differs from its claim'
UNPLUGGED = 'its interface is on no bridge'
INTERFACE_DOWN = 'its interface is down'
UNFILTERED = 'its interface has no filter'
REFUSED_METADATA = 'the metadata server refuses it'
TROUBLE_KINDS = CRASHED, NO_SPACE, PAUSED, UNLIKE, UNPLUGGED, INTERFACE_DOWN, UNFILTERED, REFUSED_METADATA


class Address(NamedTuple):
    address: str  # IPv4, of a guest
    source: str  # `lease` (DHCP), `arp` (the host's) or `agent`
    since: str = ''  # ISO time at which the lease was granted or renewed; '' if unknown


class ReservedAddress(NamedTuple):
    instance: str
    address: str  # IPv4; the DHCP of a network reserves it for an interface of the instance


class BaseImage(NamedTuple):
    """A cached image, ready for overlays, with its virtual size in bytes."""

    path: str
    format: str
    virtual_size: int


@dataclass(frozen=True)
class GuestSpec:
    """The specification from which a hypervisor makes a guest."""

    instance: str
    compute: str
    vcpus: int
    memory_mb: int
    disk_gb: int | None  # None: the image's own size (`resize: False`)
    base: BaseImage
    virt_type: str  # libvirt's domain type, `kvm` or `qemu`
    networks: tuple[Attachment, ...] = DEFAULT_NETWORKS  # one interface on each, at most MAX_INTERFACES
    seed: Mapping[str, bytes] | None = field(default=None, repr=False)  # of the NoCloud disk; None: metadata server
    reserved_addresses: tuple[str | None, ...] = ()  # IPv4, in the order of `networks`; None or missing: not reserved
    rebuilt: int = 0  # the number of the rebuild that makes it, for the owner mark

    @property
    def macs(self) -> tuple[str, ...]:
        return tuple(make_mac_address(self.instance, index) for index in range(len(self.networks)))


class GuestTrouble(NamedTuple):
    """What is wrong with a guest on its host: a kind, such as PAUSED, and a sentence's end."""

    kind: str
    detail: str = ''


@dataclass(frozen=True)
class Guest:
    """An instance's guest as it is on a host: a domain with our owner mark, a disk, or both."""

    instance: str
    compute: str | None  # the uuid in the owner mark; None if there is only a disk
    defined: bool
    running: bool
    disk: bool
    troubles: tuple[GuestTrouble, ...] = ()
    # The domain's amounts by class, if known. `MEMORY_MB now` is the memory that its balloon leaves it.
    size: Mapping[str, int] = field(default_factory=dict, compare=False)
    is_adopted: bool = False  # it has the adoption mark instead: of its domain only the power is changed
    rebuilt: int = 0  # the number of its last rebuild in the owner mark
    # Of a fake guest: what its size becomes at its next start.
    next_size: Mapping[str, int] = field(default_factory=dict, compare=False)

    def with_trouble(self, trouble: GuestTrouble | None) -> Guest:
        return replace(self, troubles=(*self.troubles, trouble)) if trouble else self

    def list_troubles(self, *claims: Mapping[str, int]) -> tuple[GuestTrouble, ...]:
        """Return the `troubles`, and one more for a `size` in no claim, but not for a smaller disk."""
        differences = []
        for name, size in self.size.items():
            amounts = [each.get(name.partition(' ')[0], size) for each in claims]
            # A disk may be smaller: without `resize` it is as large as its image.
            if size not in amounts and not (name == 'DISK_GB' and size < max(amounts)):
                differences.append(f'{name}:{size} for {" or ".join(map(str, amounts))}')
        return (*self.troubles, *([GuestTrouble(UNLIKE, f': {", ".join(differences)}')] if differences else ()))

    def describe_trouble(self, *claims: Mapping[str, int]) -> str:
        return '; '.join(map(''.join, self.list_troubles(*claims)))

    def runs_with(self, resources: Mapping[str, int]) -> bool:
        # Without the disk, which grows at once and may be smaller.
        return self.running and all(self.size.get(name, -1) == resources.get(name) for name in ('VCPU', 'MEMORY_MB'))

    @property
    def condition(self) -> str:
        return 'runs' if self.running else 'is defined'

    @property
    def is_built(self) -> bool:
        """True if it runs or may have run: a build defines the domain last, after the disk."""
        return self.running or (self.defined and self.disk)


def make_mac_address(instance: str, number: int) -> str:
    """Return the MAC of an interface: 52:54:00, then 24 bits of a hash of both arguments."""
    import hashlib

    digest = hashlib.sha256(f'{instance}/{number}'.encode()).hexdigest()
    return f'52:54:00:{digest[0:2]}:{digest[2:4]}:{digest[4:6]}'


def list_macs(instance: str) -> tuple[str, ...]:
    """Return the MACs of as many interfaces as an instance may have."""
    return tuple(make_mac_address(instance, index) for index in range(MAX_INTERFACES))


def make_mac_conflict(mac: str, other: str) -> BuildFailed:
    """Make the error for a MAC that the instance `other` on this host has, too."""
    reason = f'its MAC {mac} is also that of instance {other} on this host'
    return BuildFailed('scheduled', f'{reason}. Fix: create the instance with another uuid, which gives another MAC')
