"""Read mdserver.conf, an INI file in the format of 2019, into a Config.

The example file explains the keys. Paths are relative to the file. Errors name each bad key and its line.
"""

from __future__ import annotations

import base64
import configparser
import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_USER_DATA_BYTES = 1 << 20


class ConfError(Exception):
    """The configuration is unusable, as str() explains in one line."""


def read_user_data(path: Path) -> bytes:
    """Read a file of at most MAX_USER_DATA_BYTES, or raise ValueError."""
    try:
        # O_NONBLOCK: a FIFO must not wait for a writer.
        with open(path, 'rb', opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            data = file.read(MAX_USER_DATA_BYTES + 1) or b''  # None: a FIFO whose writer has written nothing
    except OSError as error:
        raise ValueError(f'{path}: {error.strerror}') from error
    if len(data) > MAX_USER_DATA_BYTES:
        raise ValueError(f'{path} is larger than {MAX_USER_DATA_BYTES} bytes')
    return data


def _parse_ipv4_address(value: str, _: Path = Path()) -> str:
    try:
        return str(ipaddress.IPv4Address(value))
    except ValueError as error:
        raise ValueError(f'{value!r} is not an IPv4 address') from error


def _parse_port(value: str, _: Path = Path()) -> int:
    if not re.fullmatch('[0-9]{1,5}', value) or int(value) > 65535:
        raise ValueError(f'{value!r} is not a port from 0 to 65535')
    return int(value)


def _parse_path(value: str, base: Path, description: str = 'a directory') -> Path:
    if not value:
        raise ValueError(f'is empty: must be {description}')
    return base / value


def _parse_user_data(value: str, base: Path) -> Path:
    path = _parse_path(value, base, 'a file')
    read_user_data(path)  # it is read again for each request; this reports a wrong name now, not in a guest
    return path


# Converts the text of each key of [mdserver]; the path is the directory that paths in it are relative to. ValueError.
READERS: dict[str, Callable[[str, Path], object]] = {
    'listen_address': _parse_ipv4_address,
    'port': _parse_port,
    'guests': _parse_path,
    'leases': lambda value, base: str(_parse_path(value, base, "a pattern of status files of libvirt's dnsmasq")),
    'user-data': _parse_user_data,
}


@dataclass(frozen=True)
class Config:
    """The configuration of mdserver, most of whose keys are in READERS.

    `guests` is ecompute's directory of guests' files, `leases` a glob of dnsmasq's status files. `public_keys`, pairs
    of name and line, and the file `user_data` are for guests without their own. No key sets `neighbours`.
    """

    listen_address: str = '169.254.169.254'
    port: int = 80
    guests: Path = Path('/var/lib/ecompute/metadata')
    leases: str = '/var/lib/libvirt/dnsmasq/*.status'
    user_data: Path | None = None
    public_keys: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    neighbours: Path = Path('/proc/net/arp')  # the ARP table


def load(path: Path | None) -> Config:
    """Read the file at `path`, or return the defaults for None, or raise ConfError."""
    if path is None:
        return Config()
    named_path, descriptor = path, None
    if path.parent == Path('/proc/self/fd'):  # opened by our parent: report, and resolve against, the real path
        descriptor, path = int(path.name), path.resolve()
    try:
        text = named_path.read_bytes().decode('utf-8-sig')
    except OSError as error:
        fix = 'give a readable file, or omit CONF to use the defaults'
        raise ConfError(f'{path}: {error.strerror}. Fix: {fix}') from error
    except UnicodeDecodeError as error:
        raise ConfError(f'{path}: is not UTF-8 text') from error
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return parse(text, path)


def parse(text: str, path: Path) -> Config:
    """Parse the text of the file at `path`, or raise ConfError with all its mistakes."""
    # Raw: a key's comment may contain '%'. No section has defaults for others, so [DEFAULT] is an unknown section.
    parser = configparser.RawConfigParser(default_section='', empty_lines_in_values=False)
    try:
        parser.read_string(text, str(path))
    except configparser.MissingSectionHeaderError as error:
        problem = 'this line is before the first [section]. Fix: begin the file with [mdserver]'
        raise ConfError(f'{path}: line {error.lineno}: {problem}') from error
    except configparser.ParsingError as error:
        lines = ', '.join(str(number) for number, _ in error.errors)
        raise ConfError(f'{path}: line {lines}: must be [section] or "key = value"') from error
    except configparser.DuplicateSectionError as error:
        raise ConfError(f'{path}: line {error.lineno}: [{error.section}] is given more than once') from error
    except configparser.DuplicateOptionError as error:
        problem = f'"{error.option}" is given more than once in [{error.section}]'
        raise ConfError(f'{path}: line {error.lineno}: {problem}') from error

    lines_of = _find_line_numbers(text)
    values: dict[str, Any] = {}
    keys: list[tuple[str, str]] = []
    problems: list[tuple[int, str]] = []
    for section in parser.sections():
        if section not in ('mdserver', 'public-keys'):
            problem = f'unknown section [{section}]: must be [mdserver] or [public-keys]'
            problems.append((lines_of[section, None], problem))
            continue
        for name, value in parser.items(section):
            try:
                if section == 'public-keys':
                    keys.append((_check_key_name(name), check_public_key(value)))
                else:
                    values[name.replace('-', '_')] = _find_reader(name)(value, path.parent)
            except ValueError as error:
                problems.append((lines_of[section, name], f'"{name}": {error}'))
    if problems:
        raise ConfError(f'{path}: ' + '; '.join(f'line {line}: {problem}' for line, problem in sorted(problems)))
    return Config(public_keys=tuple(keys), **values)


def check_public_key(text: str) -> str:
    problem = 'is not an OpenSSH public key: such a key is one line that begins like ssh-ed25519 AAAA'
    kind, _, rest = text.partition(' ')
    blob = rest.split(' ')[0]
    try:
        decoded = base64.b64decode(blob, validate=True)
    except ValueError as error:
        raise ValueError(problem) from error
    name = kind.encode()  # RFC 4253 6.6: the blob begins with the key's type
    if not kind or not text.isprintable() or not decoded.startswith(len(name).to_bytes(4, 'big') + name):
        raise ValueError(problem)
    return text


def parse_ipv4_endpoint(text: str, default_port: int) -> tuple[str, int]:
    address, colon, port = text.partition(':')
    return _parse_ipv4_address(address), _parse_port(port) if colon else default_port


def _find_reader(key: str) -> Callable[[str, Path], object]:
    if key == 'password':  # in 2019 every guest on the host got this one, in clear text
        fix = 'remove `password`, and put a key into [public-keys]'
        raise ValueError(f'passwords for guests are no longer supported. Fix: {fix}')
    if key not in READERS:
        raise ValueError(f'unknown key in [mdserver]: must be one of {", ".join(READERS)}')
    return READERS[key]


def _check_key_name(name: str) -> str:
    if not re.fullmatch('[a-z0-9._@+-]+', name):
        raise ValueError('is not a valid name of a key: a name has only letters, digits and . _ @ + -')
    return name


def _find_line_numbers(text: str) -> dict[tuple[str, str | None], int]:
    """Return {(section, key): line number}, with the key None for a section's header."""
    line_numbers: dict[tuple[str, str | None], int] = {}
    section = ''
    key_indent: int | None = None
    for number, line in enumerate(text.split('\n'), 1):
        content = line.strip()
        indent = len(line) - len(line.lstrip())
        if not content or content[0] in '#;':
            key_indent = None
        elif key_indent is not None and indent > key_indent:  # continues the value, as in configparser
            continue
        elif header := configparser.RawConfigParser.SECTCRE.match(content):
            section, key_indent = header['header'], None
            line_numbers[section, None] = number
        else:
            key_indent = indent
            line_numbers[section, re.split('[=:]', content)[0].strip().lower()] = number
    return line_numbers
