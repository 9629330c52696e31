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
    """The guests of one host, each named by the uuid of its instance.

    Every call is idempotent. Any call may raise:
        Unreachable: the hypervisor does not answer.
        Conflict: a domain of this name or uuid is not this compute's, or still uses the files to be removed.
        BuildFailed: a guest cannot be built, started or adopted. It names the stage.
        EcompError: the hypervisor reports another error.
    """

    def prepare(self) -> None:
        """Define the storage pool and network filters, and start the networks, where necessary.

        Missing filters are only logged: a guest can then take another's address, and reach etcd and placement.
        It raises UsageError if this host cannot run guests as configured.
        """

    def choose_virt_type(self, setting: str) -> str:
        """Resolve `auto` to kvm or qemu, and raise UsageError for a `kvm` that is unavailable."""

    def read_cpu_features(self, virt_type: str) -> Set[str]:
        """Return a guest's CPU features by libvirt's names, none if libvirt reports none."""

    def get_image_directory(self) -> Path | None:
        """Return the directory of the base volumes, or None for the fake."""

    def list_guests(self) -> Mapping[str, Guest]:
        """Return each guest with an overlay, any compute's owner mark, or an adoption mark."""

    def list_foreign(self, instance: str = '') -> Mapping[str, ForeignGuest]:
        """Return domains without an owner mark, also adopted ones, or just `instance`, by uuid."""

    def set_adoption(self, instance: str, compute: str | None) -> None:
        """Mark a domain as adopted by `compute`, or unmark it for None, even if it is gone."""

    def is_running(self, instance: str) -> bool:
        """Return whether the instance has a running domain with the owner mark of any compute."""

    def read_usage(self) -> Mapping[str, Usage]:
        """Return the usage of running domains, ours or not, except those libvirt is busy with."""

    def list_missing_bases(self) -> Mapping[str, str]:
        """Return {instance: path of the base volume} of the overlays whose base is missing."""

    def list_open_dhcp(self) -> Set[str]:
        """Return the names of this compute's networks whose DHCP serves unknown MACs, too."""

    def find_troubles(self) -> list[str]:
        """Return why no guest can be built now, as texts that stay the same while the reasons do."""

    def list_disk_users(self, instance: str) -> Set[str]:
        """Return the names of all domains, ours or not, that use the instance's overlay."""

    def create_disk(self, spec: GuestSpec) -> None:
        """Create or replace the overlay volume, or raise BuildFailed if the domain runs."""

    def create_seed(self, instance: str, files: Mapping[str, bytes]) -> None:
        """Write or replace the seed, {name: content}, or raise BuildFailed if the domain runs."""

    def list_seeds(self) -> Set[str]:
        """Return the instances that have a NoCloud disk."""

    def delete_seed(self, instance: str) -> None:
        """Remove the NoCloud disk if there is one."""

    def start(self, spec: GuestSpec) -> None:
        """Define the domain and start it, unless ours already runs."""

    def start_existing(self, instance: str, compute: str) -> None:
        """Start an existing domain that is ours or that we adopted, unless it already runs."""

    def resize(self, spec: GuestSpec) -> None:
        """Define the domain for another size, and let its disk grow."""

    def shutdown(self, instance: str, compute: str) -> None:
        """Press the power button of our guest if it runs, without waiting until it is off."""

    def switch_off(self, instance: str, compute: str) -> None:
        """Force our guest off and wait until it is off, but keep its domain defined."""

    def destroy(self, instance: str, compute: str) -> None:
        """Destroy and undefine our domain, but no foreign one, and wait until it is gone."""

    def delete_disk(self, instance: str) -> None:
        """Remove seed, overlay and console log, or raise Conflict if a domain uses them."""

    def get_console_path(self, instance: str) -> Path | None:
        """Return the file with a copy of the guest's serial console, or None for the fake."""

    def reserve_address(self, instance: str, mac: str, network: str, preferred: str | None = None) -> str | None:
        """Reserve an IPv4 address of libvirt's `network` for the interface with this MAC.

        Returns:
            The address that is reserved for the MAC, else the one leased to it, else `preferred`, else any free one.
            None if libvirt serves no DHCP on this network.

        Raises:
            BuildFailed: no address is free, or another instance has the MAC.
        """

    def list_reservations(self) -> Mapping[str, ReservedAddress]:
        """Return {MAC: ReservedAddress} of everything that reserve_address() has reserved."""

    def release_addresses(self, instance: str) -> None:
        """End the leases of the instance and remove its reservations, on all networks."""

    def find_addresses(self, instance: str) -> Mapping[str, Address]:
        """Return {MAC: Address} by leases, ARP or the agent, which is queried for the next call."""

    def replug_interfaces(self) -> None:
        """Put interfaces that are on no bridge back on theirs, or give the guest a trouble."""

    def restore_filters(self) -> None:
        """Apply the filter of each guest again whose rules are gone."""

    def disable_autostart(self) -> None:
        """Remove the autostart of our domains, so that libvirt starts none before ecompute does."""

    def watch_changes(self, notify: Callable[[str], None], on_network: Callable[[str], None] | None = None) -> None:
        """Call notify(reason) when guests or leases change, and on_network(reason) for networks."""

    def close(self) -> None:
        """Close the connection, while guests keep running."""
