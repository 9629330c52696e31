"""A TCP relay that can hold back answers: the moment between "done" and "known to be done"."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Gate:
    """Relays to a port of 127.0.0.1. hold() makes it hold an answer, and all data after it.

    `held` is set once the server has carried out the request.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f'http://127.0.0.1:{self.port}'
        self._marker: bytes | None = None
        self._open = threading.Event()
        self._sockets: list[socket.socket] = []
        self.held = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def hold(self, marker: bytes) -> None:
        """Hold the answer to the next request that contains `marker`, until open() or cut()."""
        self._marker = marker
        self._open.clear()
        self.held.clear()

    def open(self) -> None:
        self._marker = None
        self._open.set()

    def cut(self) -> None:
        self._marker = None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_connections()
        self._open.set()

    def break_connections(self) -> None:
        self._marker = None
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()
        self._open.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(('127.0.0.1', self._target))
            except OSError:
                return
            self._sockets += [client, server]
            marker_seen = threading.Event()
            threading.Thread(target=self._relay_requests, args=(client, server, marker_seen), daemon=True).start()
            threading.Thread(target=self._relay_answers, args=(server, client, marker_seen), daemon=True).start()

    def _relay_requests(self, client: socket.socket, server: socket.socket, marker_seen: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._marker is not None and self._marker in data:
                    marker_seen.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _relay_answers(self, server: socket.socket, client: socket.socket, marker_seen: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if marker_seen.is_set():
                    self.held.set()
                    self._open.wait()
                    marker_seen.clear()
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
