"""mdserver.conf: INI as in 2019, read once, typed, complete; every bad key is named with its line.

The example file explains the keys. Paths are relative to the file. str() of a ConfError is one line: what, where, what
to do.
"""

from __future__ import annotations

import base64
import configparser
import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

USER_DATA_LIMIT = 1 << 20
"""Bytes of the user-data file; a larger one is refused."""
T = TypeVar('T')
Reader = Callable[[str, Path], T]
"""Makes a value of a key's text; the path is the directory that paths in it are relative to. Raises ValueError."""


class ConfError(Exception):
    """The configuration cannot be used; str() is one line that says why."""


def read_user_data(path: Path, opener: Callable[[str, int], int] | None = None) -> bytes:
    """The bytes of the user-data file: text, gzip or multipart. Raises ValueError with a reason.

    `opener` opens the file, as that of open() does; None: this process does.
    """
    try:
        with open(path, 'rb', opener=opener) as file:
            data = file.read(USER_DATA_LIMIT + 1)
    except OSError as error:
        raise ValueError(f'{path}: {error.strerror}') from error
    if len(data) > USER_DATA_LIMIT:
        raise ValueError(f'{path} is larger than {USER_DATA_LIMIT} bytes')
    return data


def _address(value: str, _: Path = Path()) -> str:
    try:
        return str(ipaddress.IPv4Address(value))
    except ValueError as error:
        raise ValueError(f'{value!r} is not an IPv4 address') from error


def _port(value: str, _: Path = Path()) -> int:
    # 0 is any free port: for tests.
    if not re.fullmatch('[0-9]{1,5}', value) or int(value) > 65535:
        raise ValueError(f'{value!r} is not a port, 0 to 65535')
    return int(value)


def _path_to(what: str, check: Callable[[Path], T]) -> Reader[T]:
    """A reader of a path to `what`, of which `check` makes the value."""

    def read(value: str, base: Path) -> T:
        if not value:
            raise ValueError(f'is empty: name {what}')
        return check(base / value)

    return read


def _readable(path: Path) -> Path:
    read_user_data(path)  # served anew for each request; read here so that a wrong name is told now, not in a guest
    return path


def _key(default: T, read: Reader[T], name: str = '') -> T:
    """A field that the key of its name, or of `name`, sets in [mdserver]."""
    made: T = field(default=default, metadata={'read': read, 'name': name})
    return made


@dataclass(frozen=True)
class Config:
    """What mdserver is told: a row a key of [mdserver]. `guests` is ecompute's directory with a file for each guest.

    `leases` is a glob of dnsmasq's status files. `user_data` (None: none) and `public_keys`, of names and lines, are
    for guests that have none of their own. `neighbours`, the kernel's ARP table, is no key of the file.
    """

    listen_address: str = _key('169.254.169.254', _address)
    port: int = _key(80, _port)
    guests: Path = _key(Path('/var/lib/ecompute/metadata'), _path_to('a directory', Path))
    leases: str = _key('/var/lib/libvirt/dnsmasq/*.status', _path_to("the status files of libvirt's dnsmasq", str))
    user_data: Path | None = _key(None, _path_to('a file', _readable), name='user-data')
    public_keys: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    neighbours: Path = Path('/proc/net/arp')


KEYS = {each.metadata['name'] or each.name: each for each in fields(Config) if each.metadata}
"""The fields that have a key, by its name."""


def load(path: Path | None) -> Config:
    """The configuration in the file at `path`; None means the defaults."""
    if path is None:
        return Config()
    given, opened = path, None
    if path.parent == Path('/proc/self/fd'):  # somebody has opened it for us: it is called, and lies, as it does
        opened, path = int(path.name), path.resolve()
    try:
        text = given.read_bytes().decode('utf-8-sig')
    except OSError as error:
        raise ConfError(f'{path}: {error.strerror}: name a file that can be read, or none for the defaults') from error
    except UnicodeDecodeError as error:
        raise ConfError(f'{path}: is not UTF-8 text') from error
    finally:
        if opened is not None:
            os.close(opened)
    return parse(text, path)


def parse(text: str, path: Path) -> Config:
    """The configuration in `text`; `path` is its file, whose directory paths are relative to."""
    # Raw: a key's comment may hold a '%'. No section's keys are everybody's, so [DEFAULT] is one more unknown section.
    parser = configparser.RawConfigParser(default_section='', empty_lines_in_values=False)
    try:
        parser.read_string(text, str(path))
    except configparser.MissingSectionHeaderError as error:
        raise ConfError(f'{path}: line {error.lineno}: no [section] before it: begin with [mdserver]') from error
    except configparser.ParsingError as error:
        lines = ', '.join(str(number) for number, _ in error.errors)
        raise ConfError(f'{path}: line {lines}: neither [section] nor "key = value"') from error
    except configparser.DuplicateSectionError as error:
        raise ConfError(f'{path}: line {error.lineno}: [{error.section}] is there twice') from error
    except configparser.DuplicateOptionError as error:
        raise ConfError(f'{path}: line {error.lineno}: "{error.option}" is there twice in [{error.section}]') from error

    lines_of = _lines(text)
    values: dict[str, Any] = {}
    keys: list[tuple[str, str]] = []
    bad: list[tuple[int, str]] = []
    for section in parser.sections():
        if section not in ('mdserver', 'public-keys'):
            what = f'unknown section [{section}]: known are [mdserver] and [public-keys]'
            bad.append((lines_of[section, None], what))
            continue
        for name, value in parser.items(section):
            try:
                if section == 'public-keys':
                    keys.append((_key_name(name), public_key(value)))
                else:
                    row = _row(name)
                    values[row.name] = row.metadata['read'](value, path.parent)
            except ValueError as error:
                bad.append((lines_of[section, name], f'"{name}": {error}'))
    if bad:
        raise ConfError(f'{path}: ' + '; '.join(f'line {line}: {what}' for line, what in sorted(bad)))
    return Config(public_keys=tuple(keys), **values)


def public_key(text: str) -> str:
    """The one line of an OpenSSH public key as it is. Raises ValueError if it is none.

    RFC 4253 6.6: the blob begins with the key's type.
    """
    what = 'is not an OpenSSH public key: put the one line of ~/.ssh/id_ed25519.pub or the like here'
    kind, _, rest = text.partition(' ')
    blob = rest.split(' ')[0]
    try:
        decoded = base64.b64decode(blob, validate=True)
    except ValueError as error:
        raise ValueError(what) from error
    name = kind.encode()
    if not kind or not text.isprintable() or not decoded.startswith(len(name).to_bytes(4, 'big') + name):
        raise ValueError(what)
    return text


def address_port(text: str, default: int) -> tuple[str, int]:
    """The address and the port in `ADDRESS[:PORT]`, `default` without a port. Raises ValueError."""
    address, colon, port = text.partition(':')
    return _address(address), _port(port) if colon else default


def _row(key: str) -> Field[Any]:
    if key == 'password':  # in 2019 every guest on the host was given this one, in clear text
        raise ValueError('guests are given no password any more: remove it and put a key into [public-keys]')
    if key not in KEYS:
        raise ValueError(f'unknown key in [mdserver]: known are {", ".join(KEYS)}')
    return KEYS[key]


def _key_name(name: str) -> str:
    if not re.fullmatch('[a-z0-9._@+-]+', name):
        raise ValueError('is no name for a key: use letters, digits and . _ @ + -')
    return name


def _lines(text: str) -> dict[tuple[str, str | None], int]:
    """{(section, key): line number} with (section, None) for the section's own line: configparser does not keep them.

    As configparser reads them: a line that is indented more than the key above it goes on with that key's value.
    """
    found: dict[tuple[str, str | None], int] = {}
    section = ''
    inside: int | None = None
    for number, line in enumerate(text.split('\n'), 1):
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        if not words or words[0] in '#;':
            inside = None
        elif inside is not None and indent > inside:
            continue
        elif header := configparser.RawConfigParser.SECTCRE.match(words):
            section, inside = header['header'], None
            found[section, None] = number
        else:
            inside = indent
            found[section, re.split('[=:]', words)[0].strip().lower()] = number
    return found
