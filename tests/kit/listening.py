"""A server of the test's own at a port of 127.0.0.1: each connection has a thread."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Listening:
    """Takes connections until close(). What is said on each is serve()'s."""

    def __init__(self) -> None:
        self.made = 0
        """How many connections were made."""
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.address = f'127.0.0.1:{self._listener.getsockname()[1]}'
        threading.Thread(target=self._accept, daemon=True).start()

    def serve(self, connection: socket.socket, number: int) -> None:
        """Answer on a connection, the `number`th; it is closed then, and an OSError is its end."""
        raise NotImplementedError

    def close(self) -> None:
        """Take nobody any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.made += 1
                threading.Thread(target=self._serve, args=(connection, self.made), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, suppress(OSError):
            self.serve(connection, number)
