"""Resolve host names, and recognize this host's addresses."""

from __future__ import annotations

import socket
from contextlib import suppress

from ecomp.model.image import Address, parse_address


def resolve_addresses(host: str, flags: int = 0) -> list[Address]:
    """Resolve a host name by getaddrinfo, with its `flags`, or raise OSError."""
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [parse_address(str(sockaddr[0])) for *_, sockaddr in entries]


def is_own_address(address: Address) -> bool:
    """Return True if the kernel routes the address to this host itself."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), 9))  # this sends nothing
        return address.is_loopback or parse_address(str(probe.getsockname()[0])) == address
    return False
