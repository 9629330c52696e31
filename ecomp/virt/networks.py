"""What guests are plugged into: that it is there, and to whom it gave which address."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from ecomp.errors import EcompError, UsageError
from ecomp.files import watch
from ecomp.model.guest import Address
from ecomp.model.network import Attachment
from ecomp.model.record import timestamp
from ecomp.virt import dhcp
from ecomp.virt.connection import Connection, libvirt
from ecomp.virt.ip import INTERFACES

LEASES = Path('/var/lib/libvirt/dnsmasq')
"""The directory where libvirt's helper for dnsmasq writes `<bridge>.status`, anew for each lease."""


class Networks:
    """The networks of one libvirt. Errors: UsageError, Unreachable, EcompError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def check(self, attachment: Attachment) -> bool:
        """Whether guests can be plugged into it now: libvirt's network may be off.

        UsageError if it is not defined, or a bridge is not there.
        """
        kind, name = attachment
        if kind == 'bridge':
            if not (INTERFACES / name / 'bridge').is_dir():
                raise UsageError(f'this host has no bridge {name}: make it (see docs/howto/bridge.md) or leave it out')
            return True
        with self._connection.use(f'looking for the network {name}') as connection:
            try:
                return bool(connection.networkLookupByName(name).isActive())
            except libvirt.libvirtError as error:
                if error.get_error_code() != libvirt.VIR_ERR_NO_NETWORK:
                    raise
                usual = 'virsh net-define /usr/share/libvirt/networks/default.xml; virsh net-autostart default'
                cure = usual if name == 'default' else 'virsh net-list --all has those there are'
                raise UsageError(f'libvirt has no network {name!r}: {cure}') from error

    def prepare(self, attachment: Attachment) -> None:
        """Start libvirt's network if it is off. UsageError as check() has it."""
        if not self.check(attachment):
            with self._connection.use(f'starting the network {attachment.name}') as connection:
                connection.networkLookupByName(attachment.name).create()

    def own_bridge(self, name: str) -> str | None:
        """The bridge that libvirt made for the network; None if the network uses one made by others."""
        with self._connection.use(f'asking for the bridge of network {name}') as connection:
            network = connection.networkLookupByName(name)
            return str(network.bridgeName()) if dhcp.read(network.XMLDesc()).served else None

    def gives(self, name: str, address: str) -> bool:
        """Whether the network's DHCP may give out the address; False if the network is not there."""
        definition = self._dhcp(name)
        return definition is not None and dhcp.is_in(definition, IPv4Address(address))

    def answers_anybody(self, name: str) -> bool:
        """Whether the network's DHCP gives an address to any MAC that asks; False if the network is not there."""
        definition = self._dhcp(name)
        return definition is not None and bool(definition.ranges) and definition.served and not definition.known_only

    def without_ipv6(self, attachments: Iterable[Attachment]) -> list[Attachment]:
        """Those that are networks of libvirt's own on which it has no IPv6."""
        found = {each: self._dhcp(each.name) for each in attachments if each.kind == 'network'}
        return [each for each, definition in found.items() if definition is not None and not definition.ipv6]

    def explain_unfit(self, attachment: Attachment, has_filters: bool) -> tuple[str, str]:
        """Return why no guest can be made there, and why none gets an IPv4 address, each with its fix, or ''."""
        definition = self._dhcp(attachment.name) if attachment.kind == 'network' else None
        unmade, unaddressed = definition.unfit if definition is not None else ('', '')
        return unmade if has_filters else '', unaddressed

    def _dhcp(self, name: str) -> dhcp.Dhcp | None:
        try:
            with self._connection.use(f'asking for the DHCP of network {name}') as connection:
                return dhcp.read(connection.networkLookupByName(name).XMLDesc())
        except EcompError as error:
            if _code(error) != libvirt.VIR_ERR_NO_NETWORK:
                raise
            return None

    def leases(self, name: str, macs: Iterable[str]) -> Mapping[str, Address]:
        """{MAC: the IPv4 address leased to it last} of these MACs; empty if the network is not there, or off."""
        try:
            with self._connection.use(f'asking for the leases of network {name}') as connection:
                network = connection.networkLookupByName(name)
                leases, definition = network.DHCPLeases(), network.XMLDesc()
        except EcompError as error:
            if _code(error) not in (libvirt.VIR_ERR_NO_NETWORK, libvirt.VIR_ERR_OPERATION_INVALID):
                raise
            return {}
        return newest(leases, macs, dhcp.read(definition))


def _code(error: EcompError) -> int | None:
    """The code of the libvirt error that caused this one; None if none did."""
    return error.__cause__.get_error_code() if isinstance(error.__cause__, libvirt.libvirtError) else None


def newest(leases: Iterable[Mapping[str, Any]], macs: Iterable[str], network: dhcp.Dhcp) -> dict[str, Address]:
    """{MAC: IPv4 address} of these MACs, by the lease in virNetworkGetDHCPLeases' answer that expires last."""
    wanted = set(macs)
    by_expiry = sorted(leases, key=lambda lease: int(lease['expirytime']))
    return {
        lease['mac'].lower(): Address(lease['ipaddr'], 'lease', _given(lease, network))
        for lease in by_expiry
        if lease['type'] == libvirt.VIR_IP_ADDR_TYPE_IPV4 and lease['mac'] and lease['mac'].lower() in wanted
    }


def _given(lease: Mapping[str, Any], network: dhcp.Dhcp) -> str:
    """When a lease was given, or given again, by when it expires; '' where that is no time."""
    lasts = network.lasts(IPv4Address(lease['ipaddr']))
    try:
        return timestamp(datetime.fromtimestamp(int(lease['expirytime']) - lasts, UTC)) if lasts else ''
    except (ValueError, OverflowError, OSError):
        return ''  # libvirt takes a lease of a million years, too


def leased(path: Path) -> frozenset[tuple[str, ...]] | None:
    """The (MAC, address, expiry) of each lease in a file of the helper's; None if it cannot be read."""
    parts = 'mac-address', 'ip-address', 'expiry-time'
    try:
        return frozenset(tuple(str(each[part]) for part in parts) for each in json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def watch_leases(directory: Path, notify: Callable[[str], None]) -> Callable[[], None]:
    """From now on call notify(reason) within milliseconds of a lease being given, or given again.

    So until the returned function is called.

    OSError if the directory cannot be watched.
    """
    known: dict[Path, object] = {}

    def written(path: Path) -> None:
        # Each change of a reservation has dnsmasq run the helper once for every lease there is.
        leases = leased(path)
        if leases is None or leases != known.get(path):
            known[path] = leases
            notify(f'leases: {path.name} was written')

    return watch(directory, '.status', written)
