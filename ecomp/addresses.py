"""What addresses a name has now, and whether one is this host's."""

from __future__ import annotations

import socket
from contextlib import suppress

from ecomp.model.image import Address, without_zone


def addresses(host: str, flags: int = 0) -> list[Address]:
    """Of a name or an address, in the order in which they are to be tried; `flags` are getaddrinfo's.

    Errors: OSError, ValueError (an address that nobody understands, a name that cannot be written down).
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [without_zone(str(address[0])) for *_, address in found]


def is_own(address: Address) -> bool:
    """Whether it is this host's: the kernel speaks to it from itself. Nothing is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), 9))
        return address.is_loopback or without_zone(str(probe.getsockname()[0])) == address
    return False
