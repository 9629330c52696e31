"""Parse DHCP leases, the neighbour table and ecompute's files about guests. Pure.

Sources: libvirt's `leaseshelper` (`<bridge>.status`: a JSON list of `ip-address`, `mac-address` and `expiry-time`,
seconds since the epoch, 0 for never), libvirt's files for dnsmasq (`<network>.conf`, `<network>.hostsfile`), and
proc(5) for /proc/net/arp (flag 0x2: the entry is complete).
"""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = 1

# Canonical: colons, lower case.
_MAC = re.compile(r'([0-9a-f]{2}:){5}[0-9a-f]{2}')
_COMPLETE = 0x2


class UnknownGuestError(Exception):
    """The client is not a known guest, and may be sent the message, but not `detail`."""

    def __init__(self, message: str, detail: str = '') -> None:
        super().__init__(message)
        self.detail = detail


class ForgedAddressError(UnknownGuestError):
    """The kernel sees another machine at the address than the one that it is leased to."""


class BrokenFileError(Exception):
    """A file about this guest is unusable: the message, which names it, is only for the log."""


@dataclass(frozen=True)
class Lease:
    """A DHCP lease or reservation, with `expiry` in epoch seconds or infinite."""

    address: str
    mac: str
    expiry: float
    bridge: str = ''
    reserved: bool = False


@dataclass(frozen=True)
class KnownGuest:
    """The metadata of a guest, as ecompute wrote it.

    `public_keys` are pairs of a unique name and an OpenSSH line. None, for `public_keys` or `user_data`, means those of
    mdserver.conf. After Files.fill_in_defaults() it means that there are none.
    """

    instance: str
    hostname: str
    public_keys: tuple[tuple[str, str], ...] | None = None
    user_data: bytes | None = None
    network_config: Mapping[str, Any] | None = None
    address: str = ''


def parse_leases(data: bytes, bridge: str = '') -> list[Lease]:
    """Return the IPv4 leases in a status file, also expired ones, but skip malformed entries."""
    if not data.strip():
        return []  # dnsmasq creates the file empty
    if not isinstance(entries := _load_json(data), list):
        raise ValueError('is not a JSON list')
    leases = []
    for entry in entries:
        match entry:
            case {'ip-address': str(address), 'mac-address': str(mac), 'expiry-time': int(expiry)}:
                if type(expiry) is int and is_mac(mac.lower()) and _is_ipv4(address):
                    leases.append(Lease(address, mac.lower(), expiry or float('inf'), bridge))
    return leases


def select_current(leases: Iterable[Lease], now: float) -> dict[str, Lease]:
    """Return {address: lease} of the leases valid at `now`, the latest for each address and MAC."""
    by_address: dict[str, Lease] = {}
    by_mac: dict[str, Lease] = {}
    for lease in sorted(leases, key=lambda lease: lease.expiry):
        if lease.expiry > now:
            by_address[lease.address] = by_mac[lease.mac] = lease
    return {address: lease for address, lease in by_address.items() if by_mac[lease.mac] is lease}


def parse_bridge(conf: bytes) -> str:
    """Return the bridge that a <network>.conf names, or ''."""
    match = re.search(rb'^interface=(\S+)$', conf, re.MULTILINE)
    return match[1].decode('ascii', 'replace') if match else ''


def parse_reservations(data: bytes, bridge: str) -> list[Lease]:
    """Return the IPv4 reservations in the lines `MAC,ADDRESS[,NAME]` of dnsmasq's hosts file."""
    rows = [(*line.split(','), '') for line in data.decode('ascii', 'replace').lower().splitlines()]
    return [Lease(row[1], row[0], 0, bridge, True) for row in rows if is_mac(row[0]) and _is_ipv4(row[1])]


def parse_neighbours(text: str, device: str) -> dict[str, frozenset[str]]:
    """Return {address: MACs} of the device's complete entries in the text of /proc/net/arp."""
    macs_of: dict[str, set[str]] = {}
    for line in text.splitlines():
        fields = line.split()
        # IP address, HW type, Flags, HW address, Mask, Device.
        if fields[5:] != [device] or not is_mac(fields[3].lower()):
            continue
        if re.fullmatch(r'0x[0-9a-f]+', fields[2]) and int(fields[2], 16) & _COMPLETE:
            macs_of.setdefault(fields[0], set()).add(fields[3].lower())
    return {address: frozenset(macs) for address, macs in macs_of.items()}


def parse_guest(data: bytes, mac: str) -> KnownGuest:
    """Parse ecompute's file of this MAC, ignoring unknown keys, or raise ValueError."""
    if not isinstance(record := _load_json(data), dict):
        raise ValueError('is not a JSON object')
    if record.get('version', FORMAT_VERSION) != FORMAT_VERSION:
        raise ValueError(f'"version" is {record["version"]!r}, but this mdserver supports only {FORMAT_VERSION}')
    if record.get('mac', mac) != mac:
        raise ValueError('"mac" differs from the name of the file')
    for name, (form, is_valid) in _FIELDS.items():
        value = record.get(name)
        if not is_valid(value) and (value is not None or name == 'instance'):
            raise ValueError(f'"{name}" is not {form}')
    instance, keys, text = record['instance'], record.get('public_keys'), record.get('user_data')
    hostname = instance if record.get('hostname') is None else record['hostname']
    if keys is not None:
        lines = filter(None, map(str.strip, keys))
        keys = tuple((f'key-{n}' if n else 'default', key) for n, key in enumerate(lines))
    # ecompute wrote bytes that are not UTF-8 (gzip) with surrogateescape, too.
    user_data = None if text is None else text.encode('utf-8', 'surrogateescape')
    return KnownGuest(instance, hostname, keys, user_data, record.get('network_config'))


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.strip().isprintable()


# What each field must be. All but `instance` may be missing: a guest with one interface has no network_config.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    'instance': ('a uuid', lambda value: isinstance(value, str) and is_uuid(value)),
    'hostname': ('a name', lambda value: isinstance(value, str) and value != '' and value.isprintable()),
    'public_keys': ('a list of one-line texts', lambda value: isinstance(value, list) and all(map(_is_line, value))),
    'user_data': ('text', lambda value: isinstance(value, str)),
    'network_config': ('a JSON object', lambda value: isinstance(value, dict)),
}


def is_mac(text: str) -> bool:
    return _MAC.fullmatch(text) is not None


def is_uuid(text: str) -> bool:
    with suppress(ValueError):
        return str(uuid.UUID(text)) == text
    return False


def _load_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    # RecursionError: for example ten thousand opening brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError('is not JSON') from error


def _is_ipv4(text: str) -> bool:
    with suppress(ValueError):
        return str(ipaddress.IPv4Address(text)) == text
    return False
