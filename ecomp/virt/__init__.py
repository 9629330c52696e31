"""The interface between ecompute and its hypervisor: libvirt, or the fake.

Only virt.connection and its neighbours import libvirt. tests/functional/test_hypervisor.py runs against both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Protocol

from ecomp.model.foreign import ForeignGuest
from ecomp.model.guest import Address, Guest, GuestSpec, ReservedAddress, Usage


class Hypervisor(Protocol):
    """The guests of one host, by the uuids of their instances. Every call is idempotent.

    Every call may raise Unreachable if the hypervisor does not answer, Conflict if a domain with the instance's name or
    uuid does not carry this compute's owner mark, and EcompError if the hypervisor reports any other error.
    """

    def prepare(self) -> None:
        """Define the storage pool and network filters, and start the networks, where necessary.

        Raises UsageError if this host cannot run guests as configured, Conflict if the pool is over another directory.
        Missing filters are only logged: a guest can then take another's address, and reach etcd and placement.
        """

    def choose_virt_type(self, setting: str) -> str:
        """Resolve the setting `auto`, `kvm` or `qemu`; UsageError if kvm is unavailable."""

    def read_cpu_features(self, virt_type: str) -> Set[str]:
        """Return a guest's CPU features by libvirt's names; empty if libvirt reports none."""

    def get_image_directory(self) -> Path | None:
        """Return the directory of the base volumes; None if the hypervisor is the fake."""

    def list_guests(self) -> Mapping[str, Guest]:
        """Return {instance: Guest} of all overlays, and of the domains with the owner mark of any compute.

        Adopted domains are listed, too. Everything that defines, deletes or filters leaves them alone.
        """

    def list_foreign(self, instance: str = '') -> Mapping[str, ForeignGuest]:
        """Return the domains without owner mark, adopted ones too, by uuid; with `instance` at least its own."""

    def set_adoption(self, instance: str, compute: str | None) -> None:
        """Put a compute's adoption mark on a domain, or remove it (None). BuildFailed('started', …) if absent."""

    def is_running(self, instance: str) -> bool:
        """Return whether a domain of this instance with the owner mark of any compute runs."""

    def read_usage(self) -> Mapping[str, Usage]:
        """Return the Usage of running domains by uuid, ours or not; without those that libvirt is busy with."""

    def list_missing_bases(self) -> Mapping[str, str]:
        """Return {instance: path of the base volume} of the overlays whose base volume is missing."""

    def list_open_dhcp(self) -> Set[str]:
        """Return the names of this compute's networks whose DHCP serves unknown MACs, too."""

    def find_troubles(self) -> list[str]:
        """Return why no guest can be built now, in short texts that stay the same while the reasons do."""

    def list_disk_users(self, instance: str) -> Set[str]:
        """Return the names of all domains, ours or not, that use the instance's overlay as a disk."""

    def create_disk(self, spec: GuestSpec) -> None:
        """Create the overlay volume, replacing an existing one. Raises BuildFailed('disk', …)."""

    def create_seed(self, instance: str, files: Mapping[str, bytes]) -> None:
        """Write or replace the seed with {name: content}. Raises BuildFailed('disk', …)."""

    def list_seeds(self) -> Set[str]:
        """Return the instances that have a NoCloud disk."""

    def delete_seed(self, instance: str) -> None:
        """Remove the NoCloud disk if there is one. Raises Conflict while the domain runs."""

    def start(self, spec: GuestSpec) -> None:
        """Define the domain and start it; no-op if ours runs. Raises BuildFailed('started', …)."""

    def start_existing(self, instance: str, compute: str) -> None:
        """Start our or an adopted domain; no-op if it runs. Raises BuildFailed('started', …), also if none exists."""

    def shutdown(self, instance: str, compute: str) -> None:
        """Press the power button of our guest if it runs; do not wait until it is off."""

    def switch_off(self, instance: str, compute: str) -> None:
        """Force our guest off if it runs, and wait until it is off; its domain stays defined."""

    def destroy(self, instance: str, compute: str) -> None:
        """Destroy and undefine our domain and wait until it is gone; leave one that ecompute did not create alone."""

    def delete_disk(self, instance: str) -> None:
        """Remove seed, overlay and console log if present; Conflict if the guest runs or another domain uses them."""

    def get_console_path(self, instance: str) -> Path | None:
        """Return the file with a copy of the guest's serial console; None for the fake."""

    def reserve_address(self, instance: str, mac: str, network: str, preferred: str | None = None) -> str | None:
        """Reserve an IPv4 address of libvirt's `network` for the interface with this MAC.

        Returns the address that is already reserved, else `preferred` if it is free, else any free one; None if libvirt
        serves no DHCP there. Raises BuildFailed('scheduled', …) if no address is free or another instance has the MAC.
        """

    def list_reservations(self) -> Mapping[str, ReservedAddress]:
        """Return {MAC: ReservedAddress} of everything that reserve_address() has reserved."""

    def release_addresses(self, instance: str) -> None:
        """Remove all reservations of the instance, on any network."""

    def find_addresses(self, instance: str) -> Mapping[str, Address]:
        """Return {MAC: Address} of the interfaces that have an address, by DHCP lease, ARP or guest agent.

        The agent is queried in the background: its answer is returned by the next call.
        """

    def replug_interfaces(self) -> None:
        """Put interfaces that are on no bridge back; failures, and one that is down, are `troubles` of the guest."""

    def restore_filters(self) -> None:
        """Apply the guests' filters whose rules something removed; failures are `troubles` in list_guests()."""

    def disable_autostart(self) -> None:
        """Remove the autostart of our domains: libvirt would start them before ecompute has read their requests."""

    def watch_changes(
        self, notify: Callable[[str], None], on_network_change: Callable[[str], None] | None = None
    ) -> None:
        """Call notify(reason), from any thread, when guests or leases may have changed.

        on_network_change(reason), unless None, reports a network's start or stop: its bridge lost the interfaces.
        """

    def close(self) -> None:
        """Close the connection; guests keep running."""
