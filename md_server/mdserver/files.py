"""Identify a client by its address, and read and write ecompute's files about it.

A DHCP lease and the neighbour table give the client's MAC, which names the file. mdserver.conf, read once, supplies
what that file leaves open. Files are read again for each request. Only leased addresses are cached for a second.

This process, or its monitor (see there), executes one of five requests:

    leases              read dnsmasq's status files, and libvirt's configurations and reservations beside them
    user-data           read the file that mdserver.conf names
    guest MAC           read ecompute's file of this guest
    ready MAC INSTANCE REPORT
                        store for ecompute what this guest reports about the end of its cloud-init, JSON
    refused MAC REASON  store for ecompute why this guest was refused; without REASON it was answered
"""

from __future__ import annotations

import errno
import glob
import os
import stat
import threading
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from mdserver import conf, guests
from mdserver.guests import BrokenFileError, ForgedAddressError, KnownGuest, Lease, UnknownGuestError

# Bytes of a file; a larger one is refused. Legitimate files are smaller: 256 KiB of gzip are 1.5 MiB of JSON.
MAX_FILE_BYTES = 1 << 21

# Suffixes of libvirt's files for dnsmasq, one each for a network, in the directory of the status files.
CONF_SUFFIX = '.conf'
HOSTS_SUFFIX = '.hostsfile'

REFUSAL_SUFFIX = '.refused'
# A guest without filters can send from any MAC, and must not fill the directory.
MAX_REFUSALS = 256

# How long the leased addresses are cached, which every connection needs before any limit applies.
LEASE_CACHE_SECONDS = 1.0

# Held while a report or refusal is stored: without a monitor, several threads do that.
_write_lock = threading.Lock()

# A file's name and its content, or why that cannot be read.
ReadFile = tuple[str, 'bytes | OSError | ValueError']


class Files:
    """The files about guests, which `ask` reads and writes on request, by default carry_out()."""

    def __init__(self, config: conf.Config, ask: Callable[[str], list[ReadFile]] | None = None) -> None:
        self._config = config
        self._ask = ask or partial(carry_out, config)
        self._leased_addresses: Container[str] = ()
        self._leases_read_at = float('-inf')
        self._answered_macs: set[str] = set()

    def find_leased_mac(self, address: str, now: float) -> str:
        """Return the MAC of the guest with this IPv4 address, by DHCP at `now`, in epoch seconds.

        Raises:
            ForgedAddressError: the kernel sees another MAC at the address.
            UnknownGuestError: there is no lease, and no reservation that counts. Its detail names unreadable files.
            BrokenFileError: the neighbour table is unreadable.
        """
        leases, problems = self._read_leases()
        table = self._read_table()
        # Only on the lease's bridge: the kernel also accepts a guest's claim to this address on another one.
        owners = {
            lease: guests.parse_neighbours(table, lease.bridge).get(address, frozenset())
            for lease in [*filter(attrgetter('reserved'), leases), *guests.select_current(leases, now).values()]
            if lease.address == address
        }
        for owner, macs in owners.items():
            # A missing entry proves nothing (entries expire), so a lease counts without one. A reservation does not: an
            # inactive network may have the same addresses as an active one. With one it counts, because dnsmasq drops a
            # guest's lease when another sends the same client identifier.
            if macs == {owner.mac} or not (macs or owner.reserved):
                return owner.mac
        for owner, macs in owners.items():
            if macs:
                detail = f'leased to {owner.mac}, used by {", ".join(sorted(macs))}'
                raise ForgedAddressError(f'{address} is leased to another machine', detail)
        problems = problems or [f'searched in {self._config.leases}']
        raise UnknownGuestError(f'no current DHCP lease for {address}', '; '.join(problems))

    def find_macs(self, address: str) -> list[str]:
        """Return the MACs that the kernel sees at an address."""
        return [fields[3].lower() for fields in self._read_neighbours(address)]

    def note_answer(self, macs: Iterable[str], refusal: str = '') -> None:
        """Store the refusal of these guests or, if it is '', delete it: they were answered."""
        for mac in macs:
            if refusal or mac not in self._answered_macs:
                self._ask(f'refused {mac} {refusal}')
            (self._answered_macs.discard if refusal else self._answered_macs.add)(mac)

    def read_guest(self, mac: str) -> KnownGuest:
        """Read ecompute's file of this MAC, or raise UnknownGuestError or BrokenFileError."""
        [(name, content)] = self._ask(f'guest {mac}')
        try:
            return guests.parse_guest(_get_bytes(content), mac)
        except FileNotFoundError as error:
            raise UnknownGuestError(f'no instance with the MAC address {mac}', f'{name} does not exist') from error
        except OSError as error:
            raise BrokenFileError(f'{name}: {error.strerror}') from error
        except ValueError as error:
            raise BrokenFileError(f'{name}: {error}') from error

    def fill_in_defaults(self, guest: KnownGuest, address: str = '') -> KnownGuest:
        """Return the guest with `address`, and with mdserver.conf's values in place of None."""
        keys, user_data = guest.public_keys, guest.user_data
        if user_data is None and self._config.user_data is not None:
            [(_, content)] = self._ask('user-data')
            user_data = _get_bytes(content)
        keys = self._config.public_keys if keys is None else keys
        return replace(guest, address=address, public_keys=keys, user_data=user_data)

    def note_ready(self, mac: str, instance: str, report: bytes) -> None:
        """Store a guest's first ready report, or raise FileNotFoundError if there is no guest."""
        for _, error in self._ask(f'ready {mac} {instance} {report.decode("ascii")}'):
            _get_bytes(error)

    def is_on_bridge(self, bridge: str, address: str) -> bool:
        return any(fields[5:] == [bridge] for fields in self._read_neighbours(address))

    def has_lease(self, address: str, now: float) -> bool:
        """Return whether any machine has a lease or reservation of this address."""
        # Not thread-safe.
        if not 0 <= now - self._leases_read_at < LEASE_CACHE_SECONDS:
            leases, _ = self._read_leases()
            self._leased_addresses = {lease.address for lease in leases if lease.reserved or lease.expiry > now}
            self._leases_read_at = now
        return address in self._leased_addresses

    def _read_leases(self) -> tuple[list[Lease], list[str]]:
        leases, problems, bridge = list[Lease](), list[str](), ''
        for name, content in self._ask('leases'):
            path = Path(name)
            try:
                data = _get_bytes(content)
                if path.suffix == CONF_SUFFIX:  # precedes the reservations of its network
                    bridge = ''
                    bridge = guests.parse_bridge(data)
                elif path.suffix == HOSTS_SUFFIX:
                    leases += guests.parse_reservations(data, bridge)
                else:
                    leases += guests.parse_leases(data, path.stem)
            except OSError as error:
                problems.append(f'{name}: {error.strerror}')
            except ValueError as error:
                problems.append(f'{name}: {error}')
        return leases, problems

    def _read_table(self) -> str:
        neighbours = self._config.neighbours
        try:
            return neighbours.read_text(encoding='ascii', errors='replace')
        except OSError as error:
            raise BrokenFileError(f'{neighbours}: {error.strerror}') from error

    def _read_neighbours(self, address: str) -> list[list[str]]:
        return [line.split() for line in self._read_table().splitlines() if line.split()[:1] == [address]]


def carry_out(config: conf.Config, request: str) -> list[ReadFile]:
    """Carry out one of the five requests above, and return the files that it read.

    Errors are in the answer. EINVAL: it is another request, or `user-data` without a configured file.
    """
    # Words are separated by single spaces, and the first three must be a MAC or uuid, so no request can name a path.
    match request.split(' ', 3):
        case ['leases']:
            hosts_files = sorted(glob.glob(f'{glob.escape(os.path.dirname(config.leases))}/*{HOSTS_SUFFIX}'))
            files = [name for hosts in hosts_files for name in (hosts.removesuffix(HOSTS_SUFFIX) + CONF_SUFFIX, hosts)]
            return [_try_read(Path(name)) for name in (*sorted(glob.glob(config.leases)), *files)]
        case ['user-data'] if config.user_data is not None:
            try:
                return [(str(config.user_data), conf.read_user_data(config.user_data))]
            except ValueError as error:
                return [(str(config.user_data), error)]
        case ['guest', mac] if guests.is_mac(mac):
            return [_try_read(config.guests / f'{mac}.json')]
        case ['ready', mac, instance, word] if guests.is_mac(mac) and guests.is_uuid(instance):
            write = partial(_write_report, config, mac, instance, word)
        case ['refused', mac, *reason] if guests.is_mac(mac):
            write = partial(_write_refusal, config, mac, ' '.join(reason))
        case _:
            return [('', OSError(errno.EINVAL, os.strerror(errno.EINVAL)))]
    try:
        with _write_lock:
            write()
    except OSError as error:
        return [(str(error.filename), error)]
    return []


def _get_bytes(content: bytes | OSError | ValueError) -> bytes:
    if isinstance(content, bytes):
        return content
    raise content


def _try_read(path: Path) -> ReadFile:
    try:
        # O_NONBLOCK: opening a FIFO that was planted here must not wait for a writer.
        with open(path, 'rb', opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return str(path), ValueError('is not a regular file')
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return str(path), error
    is_too_large = len(data) > MAX_FILE_BYTES
    return str(path), ValueError(f'is larger than {MAX_FILE_BYTES} bytes') if is_too_large else data


def _write_report(config: conf.Config, mac: str, instance: str, report: str) -> None:
    """Store a guest's first report, or raise FileNotFoundError if there is no such guest."""
    report_path, temporary = config.guests / f'{instance}.ready', config.guests / f'{instance}.said'
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(report_path))
    # Only existing guests may report, so that nobody can fill the directory.
    if not _is_guest_present(config, mac, instance):
        raise missing
    # Remove the rest of an interrupted write first: killed after the link, it is another name of the first report.
    temporary.unlink(missing_ok=True)
    if report_path.exists():
        return  # before any write: repeated reports cause no disk writes
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), 'wb') as file:
        file.write(report.encode())
        file.flush()
        os.fsync(file.fileno())
    # Atomic, and only the first report: programs that run in the guest later cannot replace its keys.
    with suppress(FileExistsError):
        os.link(temporary, report_path)
    temporary.unlink(missing_ok=True)
    if not _is_guest_present(config, mac, instance):
        report_path.unlink(missing_ok=True)  # the guest was removed concurrently: keep no files of it
        raise missing


def _write_refusal(config: conf.Config, mac: str, reason: str) -> None:
    """Store the reason, unless MAX_REFUSALS are stored, or delete it if it is ''."""
    path = config.guests / f'{mac}{REFUSAL_SUFFIX}'
    if _try_read(path)[1] == reason.encode():
        return  # before any write: repeated refusals cause no disk writes
    path.unlink(missing_ok=True)
    if reason and len(list(config.guests.glob(f'*{REFUSAL_SUFFIX}'))) < MAX_REFUSALS:
        path.write_text(reason)


def _is_guest_present(config: conf.Config, mac: str, instance: str) -> bool:
    with suppress(OSError, ValueError):
        return guests.parse_guest(_get_bytes(_try_read(config.guests / f'{mac}.json')[1]), mac).instance == instance
    return False
