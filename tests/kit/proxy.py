"""A TCP proxy that loses what a test tells it to lose: a request before it is carried out, or its answer after."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self


@dataclass
class _Rule:
    """`applied` None: the request is not passed on. Else it is, and the connection is cut once applied() is true."""

    pattern: bytes
    applied: Callable[[], object] | None
    and_stay_away: bool


class Proxy:
    """Stands before `host`:`port`; `address` is its own. `with` ends it, and all its connections."""

    def __init__(self, port: int, host: str = '127.0.0.1') -> None:
        self._target = (host, port)
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.port = int(self._listener.getsockname()[1])
        self.address = f'127.0.0.1:{self.port}'
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._sockets: set[socket.socket] = set()
        self._away = False
        self.lost = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name='proxy', daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_away()
        # close() alone would not end the accept() that is under way.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def has_lost(self) -> bool:
        """Whether it has lost what it was to lose. Who was cut off may know that before the proxy has said so."""
        return self.lost.wait(10)

    def lose_request(self, pattern: bytes, and_stay_away: bool = False) -> None:
        """The next request that holds `pattern` does not arrive: its connection is cut."""
        self.lose(pattern, None, and_stay_away)

    def lose_answer(self, pattern: bytes, applied: Callable[[], object], and_stay_away: bool = False) -> None:
        """The next request that holds `pattern` arrives, its answer does not: it is cut once `applied()` is true."""
        self.lose(pattern, applied, and_stay_away)

    def lose(self, pattern: bytes, applied: Callable[[], object] | None, and_stay_away: bool = False) -> None:
        """Its answer if there is an `applied`, else the request itself: for tests of both."""
        self._rules.append(_Rule(pattern, applied, and_stay_away))

    def go_away(self) -> None:
        """Cut every connection, and each new one, until come_back()."""
        self._away = True
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            _cut(each)

    def come_back(self) -> None:
        self._away = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._away:
                    raise OSError('away')
                server = socket.create_connection(self._target)
            except OSError:
                _cut(client)
                continue
            with self._lock:
                self._sockets |= {client, server}
            mute = threading.Event()
            for source, sink, of_client in ((client, server, True), (server, client, False)):
                arguments = (source, sink, mute, of_client)
                threading.Thread(target=self._pump, args=arguments, name='proxy', daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, mute: threading.Event, of_client: bool) -> None:
        before = b''
        with suppress(OSError):
            while data := source.recv(65536):
                rule = self._matching(before + data) if of_client else None
                before = (before + data)[-512:]
                if rule is not None and rule.applied is None:
                    self._lose(rule)
                    break
                if rule is not None:
                    mute.set()
                    threading.Thread(target=self._cut_when, args=(rule, source, sink), daemon=True).start()
                if of_client or not mute.is_set():
                    sink.sendall(data)
        # A server that ends the connection behind its answer (waitress does, behind a 204) is not to be quicker than
        # the rule.
        if not mute.is_set():
            _cut(source)
            _cut(sink)

    def _matching(self, data: bytes) -> _Rule | None:
        for rule in self._rules:
            if rule.pattern in data:
                self._rules.remove(rule)
                return rule
        return None

    def _cut_when(self, rule: _Rule, source: socket.socket, sink: socket.socket) -> None:
        assert rule.applied is not None
        pause = threading.Event()
        while not rule.applied():
            pause.wait(0.01)
        self._lose(rule)
        _cut(source)
        _cut(sink)

    def _lose(self, rule: _Rule) -> None:
        if rule.and_stay_away:
            self.go_away()
        self.lost.set()


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
