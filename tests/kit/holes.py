"""Addresses that drop all connection attempts, like a firewall or a host that is off."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from tests.kit.servers import wait_until

# Connections that are never accepted: with the shortest queue the kernel drops all that follow.
FILLING_CONNECTIONS = 4


@contextmanager
def open_hole(port: int, *addresses: str) -> Iterator[None]:
    with ExitStack() as stack:
        for address in addresses:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(0)
            for _ in range(FILLING_CONNECTIONS):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                with suppress(BlockingIOError):
                    filler.connect((address, port))
            wait_until(lambda address=address: _is_silent(address, port), 5, f'nobody answers at {address}')
        yield


def _is_silent(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        try:
            probe.connect((address, port))
        except TimeoutError:
            return True
    return False
