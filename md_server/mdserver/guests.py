"""Which guest asks: its address, by the DHCP lease and the neighbour table, to a MAC, and by that to ecompute's file.

What that file leaves open is filled in from mdserver.conf.

Everything is read again for each request: the files are small, and what is read late is never stale.

Sources: libvirt's `leaseshelper` (`<bridge>.status`: a JSON list of `ip-address`, `mac-address` and `expiry-time`,
seconds since the epoch, 0 for never), proc(5) for /proc/net/arp (flag 0x2: the entry is complete).
"""

from __future__ import annotations

import glob
import ipaddress
import json
import os
import re
import stat
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdserver import conf, metadata

LIMIT = 1 << 21  # bytes; nothing read here is honestly larger: 256 KiB of gzip are 1.5 MiB of JSON
VERSION = 1

_MAC = re.compile(r'([0-9a-f]{2}:){5}[0-9a-f]{2}')
_COMPLETE = 0x2


class Unknown(Exception):
    """Nothing is known of who asks. str() may be told to the client; `detail` is for the log only."""

    def __init__(self, message: str, detail: str = '') -> None:
        super().__init__(message)
        self.detail = detail


class Forged(Unknown):
    """The address is somebody's, and the machine that asks is not that somebody."""


class Broken(Exception):
    """A file that should tell of this guest cannot be used. For the log: it names the file."""


@dataclass(frozen=True)
class Lease:
    """One DHCP lease of libvirt's dnsmasq."""

    address: str
    mac: str
    expiry: float  # seconds since the epoch


@dataclass(frozen=True)
class GuestFile:
    """What ecompute wrote of one guest. None in `public_keys` or `user_data`: mdserver.conf's are taken."""

    instance: str
    hostname: str
    public_keys: tuple[str, ...] | None
    user_data: bytes | None
    network_config: Mapping[str, Any] | None = None


def find(address: str, leases: str, neighbours: Path, guests: Path, now: float) -> GuestFile:
    """The guest that asks from this IPv4 address; `leases` is a glob, `now` is in seconds since the epoch.

    Raises Unknown (Forged among them) or Broken.
    """
    known, trouble = _read_leases(leases)
    mac = current(known, now).get(address)
    if mac is None:
        raise Unknown(f'no current DHCP lease for {address}', '; '.join(trouble) or f'looked in {leases}')
    try:
        seen = parse_neighbours(neighbours.read_text(encoding='ascii', errors='replace')).get(address, frozenset())
    except OSError as error:
        raise Broken(f'{neighbours}: {error.strerror}') from error
    # No entry proves nothing (the kernel forgets); an entry that says otherwise is another machine.
    if seen - {mac}:
        raise Forged(f'{address} is leased to another machine', f'leased to {mac}, used by {", ".join(sorted(seen))}')
    return read(guests, mac)


def read(guests: Path, mac: str) -> GuestFile:
    """The guest that has this MAC address. Raises Unknown or Broken."""
    path = guests / f'{mac}.json'
    try:
        return parse_guest(read_file(path), mac)
    except FileNotFoundError as error:
        raise Unknown(f'no instance with the MAC address {mac}', f'{path} is not there') from error
    except OSError as error:
        raise Broken(f'{path}: {error.strerror}') from error
    except ValueError as error:
        raise Broken(f'{path}: {error}') from error


def filled_in(known: GuestFile, config: conf.Config, address: str = '') -> metadata.Guest:
    """All there is to tell it: mdserver.conf's keys and user-data where it has none of its own. Raises ValueError."""
    keys = config.public_keys
    if known.public_keys is not None:
        keys = tuple((f'key-{n}' if n else 'default', key) for n, key in enumerate(known.public_keys))
    user_data = known.user_data
    if user_data is None and config.user_data is not None:
        user_data = conf.read_user_data(config.user_data)
    return metadata.Guest(known.instance, address, known.hostname, keys, user_data, known.network_config)


def note_ready(guests: Path, instance: str) -> None:
    """Leave word for ecompute that this guest's cloud-init is through. OSError."""
    # An empty file of the instance's name; said twice is said once.
    os.close(os.open(_ready(guests, instance), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def take_back(guests: Path, instance: str) -> None:
    """Take back what note_ready() said."""
    _ready(guests, instance).unlink(missing_ok=True)


def _ready(guests: Path, instance: str) -> Path:
    return guests / f'{instance}.ready'


def read_file(path: Path) -> bytes:
    """A whole regular file that is not a symbolic link, at most LIMIT bytes. Raises OSError, ValueError."""
    # O_NONBLOCK: opening a FIFO planted here must not wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, 'rb') as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError('is not a regular file')
        data = file.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise ValueError(f'is larger than {LIMIT} bytes')
    return data


def parse_leases(data: bytes) -> list[Lease]:
    """The IPv4 leases in one status file, in its order; entries that make no sense are passed over.

    An empty file is no leases: so dnsmasq's file begins. Raises ValueError when the whole is not a JSON list.
    """
    if not data.strip():
        return []
    entries = _load(data)
    if not isinstance(entries, list):
        raise ValueError('is not a JSON list')
    leases = []
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        address, mac, expiry = entry.get('ip-address'), entry.get('mac-address'), entry.get('expiry-time')
        if not isinstance(mac, str) or not _MAC.fullmatch(mac.lower()):
            continue
        if not isinstance(address, str) or not _is_ipv4(address):
            continue
        if isinstance(expiry, bool) or not isinstance(expiry, int):
            continue
        leases.append(Lease(address, mac.lower(), expiry or float('inf')))
    return leases


def current(leases: Iterable[Lease], now: float) -> dict[str, str]:
    """Address to MAC of the leases that count: not expired, and of two for one address or one MAC the newest."""
    by_address: dict[str, Lease] = {}
    by_mac: dict[str, Lease] = {}
    for lease in sorted(leases, key=lambda lease: lease.expiry):
        if lease.expiry > now:
            by_address[lease.address] = by_mac[lease.mac] = lease
    return {address: lease.mac for address, lease in by_address.items() if by_mac[lease.mac] is lease}


def is_on(bridge: str, address: str, neighbours: Path) -> bool:
    """Whether the kernel knows this address on this bridge, as it does of whoever has just connected over it."""
    try:
        lines = neighbours.read_text(encoding='ascii', errors='replace').splitlines()
    except OSError:
        return False
    # IP address, HW type, Flags, HW address, Mask, Device.
    return any(fields[0] == address and fields[5:] == [bridge] for fields in map(str.split, lines) if fields)


def has_lease(address: str, leases: str, now: float) -> bool:
    """Whether this address is leased to anybody; `leases` and `now` as of find()."""
    return address in current(_read_leases(leases)[0], now)


def parse_neighbours(text: str) -> dict[str, frozenset[str]]:
    """Address to the MACs of its complete entries, from the text of /proc/net/arp; other lines are passed over."""
    seen: dict[str, set[str]] = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 4 or not _MAC.fullmatch(fields[3].lower()):
            continue
        if re.fullmatch(r'0x[0-9a-f]+', fields[2]) and int(fields[2], 16) & _COMPLETE:
            seen.setdefault(fields[0], set()).add(fields[3].lower())
    return {address: frozenset(macs) for address, macs in seen.items()}


def parse_guest(data: bytes, mac: str) -> GuestFile:
    """ecompute's file of the guest with this MAC; keys it does not know are passed over. Raises ValueError."""
    record = _load(data)
    if not isinstance(record, dict):
        raise ValueError('is not a JSON object')
    if record.get('version', VERSION) != VERSION:
        raise ValueError(f'"version" is {record["version"]!r}, understood is {VERSION}')
    if record.get('mac', mac) != mac:
        raise ValueError('"mac" is another than the name of the file')
    instance, hostname = record.get('instance'), record.get('hostname')
    if not isinstance(instance, str) or not _is_uuid(instance):
        raise ValueError('"instance" is not a uuid')
    if hostname is None:
        hostname = instance
    if not isinstance(hostname, str) or not hostname or not hostname.isprintable():
        raise ValueError('"hostname" is not a name')
    keys, text = record.get('public_keys'), record.get('user_data')
    if keys is not None:
        if not isinstance(keys, list) or not all(isinstance(key, str) and key.strip().isprintable() for key in keys):
            raise ValueError('"public_keys" is not a list of one-line texts')
        keys = tuple(key.strip() for key in keys if key.strip())
    if text is not None and not isinstance(text, str):
        raise ValueError('"user_data" is not text')
    # An older ecompute has nothing to say of its interfaces.
    network_config = record.get('network_config')
    if network_config is not None and not isinstance(network_config, dict):
        raise ValueError('"network_config" is not a JSON object')
    # surrogateescape: bytes that are no UTF-8 (gzip) survive a JSON text that was made with it.
    user_data = None if text is None else text.encode('utf-8', 'surrogateescape')
    return GuestFile(instance, hostname, keys, user_data, network_config)


def _read_leases(pattern: str) -> tuple[list[Lease], list[str]]:
    """The leases in all status files that can be read, and what is wrong with the others."""
    leases: list[Lease] = []
    trouble = []
    for name in sorted(glob.glob(pattern)):
        try:
            leases += parse_leases(read_file(Path(name)))
        except OSError as error:
            trouble.append(f'{name}: {error.strerror}')
        except ValueError as error:
            trouble.append(f'{name}: {error}')
    return leases, trouble


def _load(data: bytes) -> Any:
    try:
        return json.loads(data)
    # RecursionError: ten thousand opening brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError('is not JSON') from error


def _is_ipv4(text: str) -> bool:
    try:
        return str(ipaddress.IPv4Address(text)) == text
    except ValueError:
        return False


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
