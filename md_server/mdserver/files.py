"""Which guest asks: its address, by the DHCP lease and the neighbour table, to a MAC, and by that to ecompute's file.

What that file leaves open is filled in from mdserver.conf. Everything is read again for each request: the files are
small, and what is read late is never stale. Only who has a lease, asked of each connection, is known for a second.

Whoever may opens them, this process itself or its monitor (see there), asked in one of five ways:

    leases              dnsmasq's status files, and what libvirt wrote beside them: configurations and reservations
    user-data           the file that mdserver.conf names
    guest MAC           ecompute's file of this guest
    ready MAC INSTANCE WORD
                        nothing to read: leave for ecompute what this guest has said of its cloud-init's end, JSON
    refused MAC REASON  nothing to read: leave for ecompute why this guest was refused; no REASON: it was answered
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
from mdserver.guests import Broken, Forged, Guest, Lease, Unknown

LIMIT = 1 << 21
"""Bytes of a file; a larger one is refused. None is honestly: 256 KiB of gzip are 1.5 MiB of JSON."""

CONF, HOSTS = '.conf', '.hostsfile'
"""What libvirt writes of a network for dnsmasq, in the directory of the status files."""

REFUSED = '.refused'
# A guest without filters can send from any MAC: it must not fill the directory.
MAX_REFUSALS = 256

LEASED_SECONDS = 1.0
"""For which it is known who has a lease; one that was given since is seen after it."""

_being_told = threading.Lock()
"""Held while a guest's word is left: without a monitor several threads are at it."""

Opened = tuple[str, 'int | OSError']
"""A file's name and its open descriptor, which the asker closes, or the error of opening it."""


class Files:
    """The files about guests, read anew for each request. `ask` opens them in the five ways above.

    None means that this process opens them itself.
    """

    def __init__(self, config: conf.Config, ask: Callable[[str], list[Opened]] | None = None) -> None:
        self._config = config
        self._ask = ask or partial(carry_out, config)
        self._leased: Container[str] = ()
        self._leased_at = float('-inf')
        self._answered: set[str] = set()

    def leased_to(self, address: str, now: float) -> str:
        """Return the MAC of the guest whose IPv4 address this is, by DHCP; `now` is in seconds since the epoch.

        A reservation counts if the kernel sees its MAC at the address: dnsmasq drops the lease of a guest when another
        one sends the same client identifier. Raises Unknown, Forged if the kernel sees another MAC there, or Broken.
        """
        leases, trouble = self._leases()
        table = self._read_table()
        # On its own bridge: the kernel believes who says on another one that it has this address, and asks it nothing.
        owners = {
            each: guests.parse_neighbours(table, each.bridge).get(address, frozenset())
            for each in [*filter(attrgetter('reserved'), leases), *guests.current(leases, now).values()]
            if each.address == address
        }
        for owner, seen in owners.items():
            # No entry proves nothing (the kernel forgets), so a lease counts without one. A reservation does not: a
            # network that is off may have the same addresses as one that is on.
            if seen == {owner.mac} or not (seen or owner.reserved):
                return owner.mac
        for owner, seen in owners.items():
            if seen:
                detail = f'leased to {owner.mac}, used by {", ".join(sorted(seen))}'
                raise Forged(f'{address} is leased to another machine', detail)
        trouble = trouble or [f'looked in {self._config.leases}']
        raise Unknown(f'no current DHCP lease for {address}', '; '.join(trouble))

    def find_macs(self, address: str) -> list[str]:
        """Return the MACs that the kernel sees at an address, on whichever bridge. Broken."""
        return [fields[3].lower() for fields in self._read_neighbours(address)]

    def note_answer(self, macs: Iterable[str], refusal: str = '') -> None:
        """Tell ecompute, by a file for each MAC, why its guest was refused; '' that it was answered. OSError."""
        for mac in macs:
            if refusal or mac not in self._answered:
                self._ask(f'refused {mac} {refusal}')
            (self._answered.discard if refusal else self._answered.add)(mac)

    def guest(self, mac: str) -> Guest:
        """ecompute's file of the guest with this MAC address. Raises Unknown or Broken."""
        [(name, opened)] = self._ask(f'guest {mac}')
        try:
            return guests.parse_guest(_whole(opened), mac)
        except FileNotFoundError as error:
            raise Unknown(f'no instance with the MAC address {mac}', f'{name} is not there') from error
        except OSError as error:
            raise Broken(f'{name}: {error.strerror}') from error
        except ValueError as error:
            raise Broken(f'{name}: {error}') from error

    def filled_in(self, known: Guest, address: str = '') -> Guest:
        """What the guest is told: its own keys and user-data, else mdserver.conf's. Raises ValueError."""
        keys, user_data = known.public_keys, known.user_data
        if user_data is None and self._config.user_data is not None:
            user_data = conf.read_user_data(self._config.user_data, lambda *_: self._user_data())
        keys = self._config.public_keys if keys is None else keys
        return replace(known, address=address, public_keys=keys, user_data=user_data)

    def note_ready(self, mac: str, instance: str, word: bytes) -> None:
        """Tell ecompute, by a file, what a guest said of its cloud-init's end: its first `word` counts, no further one.

        FileNotFoundError if the guest is gone; OSError.
        """
        for _, opened in self._ask(f'ready {mac} {instance} {word.decode("ascii")}'):
            if isinstance(opened, OSError):
                raise opened

    def is_on(self, bridge: str, address: str) -> bool:
        """Whether the neighbour table has this address on this bridge, as it has for a client that just connected."""
        return any(fields[5:] == [bridge] for fields in self._read_neighbours(address))

    def has_lease(self, address: str, now: float) -> bool:
        """Whether this address is leased to any machine; `now` is in seconds since the epoch. For one thread.

        What it was in the last LEASED_SECONDS counts: whoever connects asks this, before anything limits him.
        """
        if not 0 <= now - self._leased_at < LEASED_SECONDS:
            self._leased = {each.address for each in self._leases()[0] if each.reserved or each.expiry > now}
            self._leased_at = now
        return address in self._leased

    def _leases(self) -> tuple[list[Lease], list[str]]:
        """The leases and reservations in all files that can be read, and a line for each file that cannot."""
        leases: list[Lease] = []
        trouble = []
        bridge = ''
        for name, opened in self._ask('leases'):
            path = Path(name)
            try:
                if path.suffix == CONF:  # comes before the reservations of its network
                    bridge = ''
                    bridge = guests.parse_bridge(_whole(opened))
                elif path.suffix == HOSTS:
                    leases += guests.parse_reservations(_whole(opened), bridge)
                else:
                    leases += guests.parse_leases(_whole(opened), path.stem)
            except OSError as error:
                trouble.append(f'{name}: {error.strerror}')
            except ValueError as error:
                trouble.append(f'{name}: {error}')
        return leases, trouble

    def _read_table(self) -> str:
        neighbours = self._config.neighbours
        try:
            return neighbours.read_text(encoding='ascii', errors='replace')
        except OSError as error:
            raise Broken(f'{neighbours}: {error.strerror}') from error

    def _read_neighbours(self, address: str) -> list[list[str]]:
        # IP address, HW type, Flags, HW address, Mask, Device.
        return [line.split() for line in self._read_table().splitlines() if line.split()[:1] == [address]]

    def _user_data(self) -> int:
        [(_, opened)] = self._ask('user-data')
        if isinstance(opened, OSError):
            raise opened
        return opened


def carry_out(config: conf.Config, request: str) -> list[Opened]:
    """Open the files that `request`, one of the five ways above, names; EINVAL for any other request."""
    # One space between words, nothing in the first three but what a MAC and a uuid have: no path can be said.
    match request.split(' ', 3):
        case ['leases']:
            hosts = sorted(glob.glob(f'{glob.escape(os.path.dirname(config.leases))}/*{HOSTS}'))
            beside = [name for each in hosts for name in (each.removesuffix(HOSTS) + CONF, each)]
            return [_open(Path(name)) for name in (*sorted(glob.glob(config.leases)), *beside)]
        case ['user-data'] if config.user_data is not None:
            return [_open(config.user_data, links=True)]
        case ['guest', mac] if guests.is_mac(mac):
            return [_open(_file_of(config, mac))]
        case ['ready', mac, instance, word] if guests.is_mac(mac) and guests.is_uuid(instance):
            leave = partial(_leave_word, config, mac, instance, word)
        case ['refused', mac, *reason] if guests.is_mac(mac):
            leave = partial(_leave_refusal, config, mac, ' '.join(reason))
        case _:
            return [('', OSError(errno.EINVAL, os.strerror(errno.EINVAL)))]
    try:
        with _being_told:
            leave()
    except OSError as error:
        return [(str(error.filename), error)]
    return []


def _file_of(config: conf.Config, mac: str) -> Path:
    return config.guests / f'{mac}.json'


def _open(path: Path, links: bool = False) -> Opened:
    # O_NONBLOCK: opening a FIFO planted here must not wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return str(path), os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except OSError as error:
        return str(path), error


def _leave_word(config: conf.Config, mac: str, instance: str, word: str) -> None:
    told, being_told = config.guests / f'{instance}.ready', config.guests / f'{instance}.said'
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(told))
    # Of guests that are there alone: nobody fills the directory with words of others.
    if not _is_there(config, mac, instance):
        raise gone
    # What was left of an earlier word goes: killed after the link, it is the first word itself, by another name.
    being_told.unlink(missing_ok=True)
    if told.exists():
        return  # before any write: who says it again and again has the disk do nothing for it
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(being_told, flags, 0o600), 'wb') as file:
        file.write(word.encode())
        file.flush()
        os.fsync(file.fileno())
    # Whole or not at all, and only the first: what runs in a guest later does not take its keys back.
    with suppress(FileExistsError):
        os.link(being_told, told)
    being_told.unlink(missing_ok=True)
    if not _is_there(config, mac, instance):
        told.unlink(missing_ok=True)  # it was removed meanwhile, and nothing of it is to stay
        raise gone


def _leave_refusal(config: conf.Config, mac: str, reason: str) -> None:
    path = config.guests / f'{mac}{REFUSED}'
    with suppress(OSError, ValueError):
        if _whole(_open(path)[1]) == reason.encode():
            return  # before any write: who is refused again and again has the disk do nothing for it
    path.unlink(missing_ok=True)
    if reason and len(list(config.guests.glob(f'*{REFUSED}'))) < MAX_REFUSALS:
        path.write_text(reason)


def _is_there(config: conf.Config, mac: str, instance: str) -> bool:
    with suppress(OSError, ValueError):
        return guests.parse_guest(_whole(_open(_file_of(config, mac))[1]), mac).instance == instance
    return False


def _whole(opened: int | OSError) -> bytes:
    """The bytes of an opened regular file, which is closed. Raises OSError, ValueError for more than LIMIT."""
    if isinstance(opened, OSError):
        raise opened
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise ValueError('is not a regular file')
        with open(opened, 'rb', closefd=False) as file:
            data = file.read(LIMIT + 1)
    finally:
        os.close(opened)
    if len(data) > LIMIT:
        raise ValueError(f'is larger than {LIMIT} bytes')
    return data
