"""The hypervisor's border: what ecompute asks of libvirt, and of the fake.

Only virt.connection and its neighbours import libvirt; virt.fake keeps everything in memory. One common
test (tests/functional/test_hypervisor.py) runs over both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Protocol

from ecomp.model.guest import Address, Guest, GuestSpec, Reserved


class Hypervisor(Protocol):
    """One host's guests. Each call is idempotent: asked again, it ends in the same state.

    Errors: BuildFailed where a guest cannot be made; Unreachable when the hypervisor does not answer;
    Conflict when a domain or volume of that name is there and does not carry our mark.
    """

    def prepare(self) -> None:
        """See that the storage pool, the networks and the filters are there, or say what is missing.

        Guests can do without filters, and a log line says so: each can take another one's address then,
        and speak to etcd and placement.
        """

    def virt_type(self, wanted: str) -> str:
        """`kvm` or `qemu` for a wanted `auto`, `kvm` or `qemu`. UsageError if kvm cannot be had."""

    def cpu_features(self, virt_type: str) -> Set[str]:
        """What the processor of a guest here can do, in libvirt's words; none where that cannot be found out."""

    def image_directory(self) -> Path | None:
        """Where base volumes are kept; None where images are only pretended."""

    def guests(self) -> Mapping[str, Guest]:
        """Everything here that carries our mark, by instance uuid: domains and overlay volumes."""

    def without_base(self) -> Mapping[str, str]:
        """The instances whose overlay lies on a base volume that is not there: its path."""

    def open_dhcp(self) -> Set[str]:
        """The networks guests are plugged into whose DHCP gives an address to whatever MAC asks."""

    def users(self, instance: str) -> Set[str]:
        """The names of all domains, whoever's, that have the instance's overlay for a disk."""

    def create_disk(self, spec: GuestSpec) -> None:
        """Make the overlay volume (again, if a half-made one is there). BuildFailed('disk', …)."""

    def create_seed(self, instance: str, files: Mapping[str, bytes]) -> None:
        """Write the guest's NoCloud disk, in place of one that is there. BuildFailed('disk', …)."""

    def seeds(self) -> Set[str]:
        """The instances that have a NoCloud disk here."""

    def delete_seed(self, instance: str) -> None:
        """Remove the NoCloud disk. Nothing there is success; Conflict while a domain runs."""

    def start(self, spec: GuestSpec) -> None:
        """Define the domain and start it; a running one of ours is left alone. BuildFailed('started', …)."""

    def resume(self, instance: str, compute: str) -> None:
        """Start a domain of ours that is defined and off; a running one is left alone. BuildFailed('started', …)."""

    def shutdown(self, instance: str, compute: str) -> None:
        """Ask a guest of ours to turn itself off, as its power button does. Whether it does is its own affair.

        Nothing that runs is success; Conflict as for destroy.
        """

    def switch_off(self, instance: str, compute: str) -> None:
        """End a guest of ours and wait until it is seen off; its domain stays defined. Nothing that runs is success.

        Conflict as for destroy.
        """

    def destroy(self, instance: str, compute: str) -> None:
        """Destroy and undefine the domain and wait until it is seen gone. Nothing there is success.

        Conflict if it does not carry our mark, or another compute's.
        """

    def delete_disk(self, instance: str) -> None:
        """Remove the NoCloud disk, then the overlay volume, and the console log.

        Nothing there is success; Conflict while a domain runs.
        """

    def console(self, instance: str) -> Path | None:
        """The file a guest's serial console is copied to; None where guests are only pretended."""

    def reserve(self, instance: str, mac: str, network: str, wanted: str | None = None) -> str | None:
        """The IPv4 address that libvirt's `network` gives this interface from now on, known before the guest boots.

        The one it has already, or `wanted` if that is free, or one that is. None where libvirt gives out none.
        BuildFailed('scheduled', …) where none is free.
        """

    def reservations(self) -> Mapping[str, Reserved]:
        """All that reserve() keeps for instances, by MAC."""

    def release(self, instance: str) -> None:
        """Remove all that is reserved for the instance, on any network. Nothing there is success."""

    def addresses(self, instance: str) -> Mapping[str, Address]:
        """IPv4 address by MAC, as far as the guest has one now: DHCP leases; the host's ARP table; the guest's agent.

        An agent's answer is there when next asked: it is not waited for.
        """

    def on_change(self, notify: Callable[[str], None], look: Callable[[str], None] | None = None) -> None:
        """From now on call notify(reason) when guests or leases may have changed: a nudge, from any thread.

        look(reason) when a network was started, and what is on the host beside guests is to be looked after.
        """

    def close(self) -> None:
        """Let the connection go. Guests are not touched."""
