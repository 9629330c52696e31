"""What says which guest asks: DHCP leases, the neighbour table and ecompute's files, as they are written, understood.

Sources: libvirt's `leaseshelper` (`<bridge>.status`: a JSON list of `ip-address`, `mac-address` and `expiry-time`,
seconds since the epoch, 0 for never), the files that libvirt writes for dnsmasq (`<network>.conf` and
`<network>.hostsfile`), proc(5) for /proc/net/arp (flag 0x2: the entry is complete). Pure.
"""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

VERSION = 1

_MAC = re.compile(r'([0-9a-f]{2}:){5}[0-9a-f]{2}')
_COMPLETE = 0x2


class Unknown(Exception):
    """Which guest asks is not known. str() may be sent to the client, `detail` goes to the log alone."""

    def __init__(self, message: str, detail: str = '') -> None:
        super().__init__(message)
        self.detail = detail


class Forged(Unknown):
    """The address is leased to another machine than the one that asks."""


class Broken(Exception):
    """A file about this guest cannot be used. str() names the file, and goes to the log alone."""


@dataclass(frozen=True)
class Lease:
    """One DHCP lease of libvirt's dnsmasq; `expiry` is in seconds since the epoch, infinite for a lease without end.

    `bridge` is that of the network which gave it, '' where that is not known. `reserved`: it is no lease, but reserved.
    """

    address: str
    mac: str
    expiry: float
    bridge: str = ''
    reserved: bool = False


@dataclass(frozen=True)
class Guest:
    """What ecompute wrote of one guest, and so what it is told; `address` is the IPv4 address it asks from.

    `instance` is its uuid; `public_keys` are pairs of a unique name and an OpenSSH line. `public_keys` or `user_data`
    None means mdserver.conf's, or none once that is filled in; `network_config` None means that it has none.
    """

    instance: str
    hostname: str
    public_keys: tuple[tuple[str, str], ...] | None = None
    user_data: bytes | None = None
    network_config: Mapping[str, Any] | None = None
    address: str = ''


def parse_leases(data: bytes, bridge: str = '') -> list[Lease]:
    """The IPv4 leases in the status file of one bridge, in its order, without those entries that are no lease.

    An empty file has no leases: dnsmasq's begins empty. Raises ValueError for what is no JSON list.
    """
    if not data.strip():
        return []
    entries = _load(data)
    if not isinstance(entries, list):
        raise ValueError('is not a JSON list')
    leases = []
    for entry in entries:
        match entry:
            case {'ip-address': str(address), 'mac-address': str(mac), 'expiry-time': int(expiry)}:
                if type(expiry) is int and is_mac(mac.lower()) and _is_ipv4(address):
                    leases.append(Lease(address, mac.lower(), expiry or float('inf'), bridge))
    return leases


def current(leases: Iterable[Lease], now: float) -> dict[str, Lease]:
    """By address the leases that have not expired at `now`, of two for one address or one MAC the later.

    `now` is in seconds since the epoch.
    """
    by_address: dict[str, Lease] = {}
    by_mac: dict[str, Lease] = {}
    for lease in sorted(leases, key=lambda lease: lease.expiry):
        if lease.expiry > now:
            by_address[lease.address] = by_mac[lease.mac] = lease
    return {address: lease for address, lease in by_address.items() if by_mac[lease.mac] is lease}


def parse_bridge(conf: bytes) -> str:
    """Return the bridge that a configuration file of dnsmasq serves, '' if it names none."""
    found = re.search(rb'^interface=(\S+)$', conf, re.MULTILINE)
    return found[1].decode('ascii', 'replace') if found else ''


def parse_reservations(data: bytes, bridge: str) -> list[Lease]:
    """Return the IPv4 reservations in a hosts file of dnsmasq, whose lines are `MAC,ADDRESS[,NAME]`."""
    fields = [(*line.split(','), '') for line in data.decode('ascii', 'replace').lower().splitlines()]
    return [Lease(each[1], each[0], 0, bridge, True) for each in fields if is_mac(each[0]) and _is_ipv4(each[1])]


def parse_neighbours(text: str, device: str) -> dict[str, frozenset[str]]:
    """{address: MACs} of the device's complete entries in `text`, that of /proc/net/arp, without any other line."""
    seen: dict[str, set[str]] = {}
    for line in text.splitlines():
        fields = line.split()
        # IP address, HW type, Flags, HW address, Mask, Device.
        if fields[5:] != [device] or not is_mac(fields[3].lower()):
            continue
        if re.fullmatch(r'0x[0-9a-f]+', fields[2]) and int(fields[2], 16) & _COMPLETE:
            seen.setdefault(fields[0], set()).add(fields[3].lower())
    return {address: frozenset(macs) for address, macs in seen.items()}


def parse_guest(data: bytes, mac: str) -> Guest:
    """What `data`, ecompute's file of the guest with this MAC, says, without unknown keys. Raises ValueError."""
    record = _load(data)
    if not isinstance(record, dict):
        raise ValueError('is not a JSON object')
    if record.get('version', VERSION) != VERSION:
        raise ValueError(f'"version" is {record["version"]!r}, understood is {VERSION}')
    if record.get('mac', mac) != mac:
        raise ValueError('"mac" is another than the name of the file')
    instance, hostname = record.get('instance'), record.get('hostname')
    if not isinstance(instance, str) or not is_uuid(instance):
        raise ValueError('"instance" is not a uuid')
    if hostname is None:
        hostname = instance
    if not isinstance(hostname, str) or not hostname or not hostname.isprintable():
        raise ValueError('"hostname" is not a name')
    keys, text = record.get('public_keys'), record.get('user_data')
    if keys is not None:
        if not isinstance(keys, list) or not all(isinstance(key, str) and key.strip().isprintable() for key in keys):
            raise ValueError('"public_keys" is not a list of one-line texts')
        lines = filter(None, map(str.strip, keys))
        keys = tuple((f'key-{n}' if n else 'default', key) for n, key in enumerate(lines))
    if text is not None and not isinstance(text, str):
        raise ValueError('"user_data" is not text')
    # An older ecompute has nothing to say of its interfaces.
    network_config = record.get('network_config')
    if network_config is not None and not isinstance(network_config, dict):
        raise ValueError('"network_config" is not a JSON object')
    # surrogateescape: bytes that are no UTF-8 (gzip) survive a JSON text that was made with it.
    user_data = None if text is None else text.encode('utf-8', 'surrogateescape')
    return Guest(instance, hostname, keys, user_data, network_config)


def is_mac(text: str) -> bool:
    """Whether this is a MAC address as it is always written: with colons, in small letters."""
    return _MAC.fullmatch(text) is not None


def is_uuid(text: str) -> bool:
    """Whether this is a uuid as it is always written: 36 characters, in small letters."""
    with suppress(ValueError):
        return str(uuid.UUID(text)) == text
    return False


def _load(data: bytes) -> Any:
    try:
        return json.loads(data)
    # RecursionError: ten thousand opening brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError('is not JSON') from error


def _is_ipv4(text: str) -> bool:
    with suppress(ValueError):
        return str(ipaddress.IPv4Address(text)) == text
    return False
