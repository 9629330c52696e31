"""Which guest asks: its address, by the DHCP lease and the neighbour table, to a MAC, and by that to ecompute's file.

What that file leaves open is filled in from mdserver.conf. Everything is read again for each request: the files are
small, and what is read late is never stale.

Whoever may opens them, this process itself or its monitor (see there), asked in one of four ways:

    leases              dnsmasq's status files
    user-data           the file that mdserver.conf names
    guest MAC           ecompute's file of this guest
    ready MAC INSTANCE  nothing to read: leave word for ecompute that this guest's cloud-init is through
"""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mdserver import conf, metadata
from mdserver.guests import (
    Broken,
    Forged,
    GuestFile,
    Lease,
    Unknown,
    current,
    is_mac,
    is_uuid,
    parse_guest,
    parse_leases,
    parse_neighbours,
)

LIMIT = 1 << 21  # bytes; nothing read here is honestly larger: 256 KiB of gzip are 1.5 MiB of JSON

Opened = tuple[str, 'int | OSError']
"""A file's name and its descriptor, which is the asker's to close, or why there is none."""


class Files:
    """What is asked of them for one request. `ask` carries out one of the four ways above; without it, this process."""

    def __init__(self, config: conf.Config, ask: Callable[[str], list[Opened]] | None = None) -> None:
        self._config = config
        self._ask = ask or partial(carry_out, config)

    def leased_to(self, address: str, now: float) -> str:
        """The MAC of the guest that asks from this IPv4 address; `now` is in seconds since the epoch.

        Raises Unknown (Forged among them) or Broken.
        """
        leases, trouble = self._leases()
        mac = current(leases, now).get(address)
        if mac is None:
            trouble = trouble or [f'looked in {self._config.leases}']
            raise Unknown(f'no current DHCP lease for {address}', '; '.join(trouble))
        neighbours = self._config.neighbours
        try:
            seen = parse_neighbours(neighbours.read_text(encoding='ascii', errors='replace')).get(address, frozenset())
        except OSError as error:
            raise Broken(f'{neighbours}: {error.strerror}') from error
        # No entry proves nothing (the kernel forgets); an entry that says otherwise is another machine.
        if seen - {mac}:
            detail = f'leased to {mac}, used by {", ".join(sorted(seen))}'
            raise Forged(f'{address} is leased to another machine', detail)
        return mac

    def guest(self, mac: str) -> GuestFile:
        """The guest that has this MAC address. Raises Unknown or Broken."""
        [(name, opened)] = self._ask(f'guest {mac}')
        try:
            return parse_guest(_whole(opened), mac)
        except FileNotFoundError as error:
            raise Unknown(f'no instance with the MAC address {mac}', f'{name} is not there') from error
        except OSError as error:
            raise Broken(f'{name}: {error.strerror}') from error
        except ValueError as error:
            raise Broken(f'{name}: {error}') from error

    def filled_in(self, known: GuestFile, address: str = '') -> metadata.Guest:
        """All there is to tell it: mdserver.conf's keys and user-data where it has none of its own.

        Raises ValueError.
        """
        keys = self._config.public_keys
        if known.public_keys is not None:
            keys = tuple((f'key-{n}' if n else 'default', key) for n, key in enumerate(known.public_keys))
        user_data = known.user_data
        if user_data is None and self._config.user_data is not None:
            user_data = conf.read_user_data(self._config.user_data, lambda *_: self._user_data())
        return metadata.Guest(known.instance, address, known.hostname, keys, user_data, known.network_config)

    def note_ready(self, mac: str, instance: str) -> None:
        """Leave word that cloud-init is through. FileNotFoundError: this guest is gone; OSError."""
        for _, opened in self._ask(f'ready {mac} {instance}'):
            if isinstance(opened, OSError):
                raise opened

    def is_on(self, bridge: str, address: str) -> bool:
        """Whether the kernel knows this address on this bridge, as it does of whoever has just connected over it."""
        try:
            lines = self._config.neighbours.read_text(encoding='ascii', errors='replace').splitlines()
        except OSError:
            return False
        # IP address, HW type, Flags, HW address, Mask, Device.
        return any(fields[0] == address and fields[5:] == [bridge] for fields in map(str.split, lines) if fields)

    def has_lease(self, address: str, now: float) -> bool:
        """Whether this address is leased to anybody; `now` as of leased_to()."""
        return address in current(self._leases()[0], now)

    def _leases(self) -> tuple[list[Lease], list[str]]:
        """The leases in all status files that can be read, and what is wrong with the others."""
        leases: list[Lease] = []
        trouble = []
        for name, opened in self._ask('leases'):
            try:
                leases += parse_leases(_whole(opened))
            except OSError as error:
                trouble.append(f'{name}: {error.strerror}')
            except ValueError as error:
                trouble.append(f'{name}: {error}')
        return leases, trouble

    def _user_data(self) -> int:
        [(_, opened)] = self._ask('user-data')
        if isinstance(opened, OSError):
            raise opened
        return opened


def carry_out(config: conf.Config, request: str) -> list[Opened]:
    """Open what is asked for in one of the four ways, and nothing else."""
    # One space between words, nothing in them but what a MAC and a uuid have: no path can be said.
    match request.split(' '):
        case ['leases']:
            return [_open(Path(name)) for name in sorted(glob.glob(config.leases))]
        case ['user-data'] if config.user_data is not None:
            return [_open(config.user_data, links=True)]
        case ['guest', mac] if is_mac(mac):
            return [_open(_file_of(config, mac))]
        case ['ready', mac, instance] if is_mac(mac) and is_uuid(instance):
            try:
                _leave_word(config, mac, instance)
            except OSError as error:
                return [(str(error.filename), error)]
            return []
    return [('', OSError(errno.EINVAL, os.strerror(errno.EINVAL)))]


def _file_of(config: conf.Config, mac: str) -> Path:
    return config.guests / f'{mac}.json'


def _open(path: Path, links: bool = False) -> Opened:
    # O_NONBLOCK: opening a FIFO planted here must not wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return str(path), os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except OSError as error:
        return str(path), error


def _leave_word(config: conf.Config, mac: str, instance: str) -> None:
    word = config.guests / f'{instance}.ready'
    # Of guests that are there alone: nobody fills the directory with words of others.
    if not _is_there(config, mac, instance):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(word))
    # An empty file of the instance's name; said twice is said once.
    os.close(os.open(word, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    if not _is_there(config, mac, instance):
        word.unlink(missing_ok=True)  # it was removed meanwhile, and nothing of it is to stay
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(word))


def _is_there(config: conf.Config, mac: str, instance: str) -> bool:
    try:
        return parse_guest(_whole(_open(_file_of(config, mac))[1]), mac).instance == instance
    except (OSError, ValueError):
        return False


def _whole(opened: int | OSError) -> bytes:
    """All of a regular file, at most LIMIT bytes, and close it. Raises OSError, ValueError."""
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
