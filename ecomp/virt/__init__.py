"""The hypervisor's border: what ecompute asks of libvirt, and of the fake.

Only virt.connection and its neighbours import libvirt; virt.fake keeps everything in memory. One common
test (tests/functional/test_hypervisor.py) runs over both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Protocol

from ecomp.model.guest import Address, Guest, GuestSpec, ReservedAddress


class Hypervisor(Protocol):
    """One host's guests, by the uuids of their instances. Each call can be repeated, and ends in the same state.

    Errors: BuildFailed where a guest cannot be made; Unreachable when the hypervisor gives no answer; Conflict when a
    domain or volume of that name is there without our mark.
    """

    def prepare(self) -> None:
        """Define the storage pool and the filters, and start the networks, where they are not. UsageError.

        Filters that cannot be had are a line in the log: without them a guest can take another one's address, and
        reach etcd and placement.
        """

    def virt_type(self, wanted: str) -> str:
        """`kvm` or `qemu` for a wanted `auto`, `kvm` or `qemu`. UsageError if kvm cannot be had."""

    def cpu_features(self, virt_type: str) -> Set[str]:
        """The features of a guest's processor, by libvirt's names; empty where libvirt does not say."""

    def image_directory(self) -> Path | None:
        """The directory of the base volumes; None where images are only pretended."""

    def guests(self) -> Mapping[str, Guest]:
        """{instance: Guest} of the domains and overlays with our mark."""

    def runs(self, instance: str) -> bool:
        """Whether a domain with our mark, of this instance, runs."""

    def without_base(self) -> Mapping[str, str]:
        """{instance: path} of the overlays whose base volume, at that path, is missing."""

    def open_dhcp(self) -> Set[str]:
        """The names of the guests' networks whose DHCP gives an address to any MAC that asks."""

    def users(self, instance: str) -> Set[str]:
        """The names of all domains, ours or not, that have the instance's overlay for a disk."""

    def create_disk(self, spec: GuestSpec) -> None:
        """Make the overlay volume, anew if one is there. BuildFailed('disk', …)."""

    def create_seed(self, instance: str, files: Mapping[str, bytes]) -> None:
        """Write the guest's NoCloud disk with these files, {name: content}, anew if one is there.

        BuildFailed('disk', …).
        """

    def seeds(self) -> Set[str]:
        """The instances that have a NoCloud disk."""

    def delete_seed(self, instance: str) -> None:
        """Remove the NoCloud disk, if there is one. Conflict while the domain runs."""

    def start(self, spec: GuestSpec) -> None:
        """Define the domain and start it; do nothing if ours runs. BuildFailed('started', …)."""

    def resume(self, instance: str, compute: str) -> None:
        """Start our domain as it is defined; do nothing if it runs. BuildFailed('started', …)."""

    def shutdown(self, instance: str, compute: str) -> None:
        """Press the power button of our guest, if it runs, and do not wait for what it does. Conflict as destroy."""

    def switch_off(self, instance: str, compute: str) -> None:
        """End our guest, if it runs, and wait until it is off; its domain stays defined. Conflict as destroy."""

    def destroy(self, instance: str, compute: str) -> None:
        """Destroy and undefine the domain, if there is one, and wait until it is gone.

        Conflict if it has no mark of ours, or another compute's.
        """

    def delete_disk(self, instance: str) -> None:
        """Remove the NoCloud disk, the overlay volume and the console log, if there. Conflict while the domain runs."""

    def console(self, instance: str) -> Path | None:
        """The file that the guest's serial console is copied to; None where guests are only pretended."""

    def reserve(self, instance: str, mac: str, network: str, wanted: str | None = None) -> str | None:
        """Reserve an IPv4 address of libvirt's `network` for the interface with this MAC, and return it.

        It is the one reserved already, else `wanted` if that is free, else any free one. None where libvirt gives out
        no addresses. BuildFailed('scheduled', …) where none is free, or the MAC is another instance's.
        """

    def reservations(self) -> Mapping[str, ReservedAddress]:
        """{MAC: ReservedAddress} of all that reserve() has reserved."""

    def release(self, instance: str) -> None:
        """Remove all that is reserved for the instance, on any network."""

    def addresses(self, instance: str) -> Mapping[str, Address]:
        """{MAC: Address} of each interface that has one now, by DHCP leases, the host's ARP table or the guest's agent.

        The agent is not waited for: its answer is there at the next call.
        """

    def plug_in(self) -> None:
        """Put running guests' interfaces that are on no bridge back on theirs; a failure is a trouble in guests()."""

    def on_change(self, notify: Callable[[str], None], look: Callable[[str], None] | None = None) -> None:
        """From now on call notify(reason), from any thread, when guests or leases may have changed.

        Call look(reason), None for nothing, when a network was started or stopped: what was put on its bridge is lost.
        """

    def close(self) -> None:
        """Close the connection. Guests run on."""
