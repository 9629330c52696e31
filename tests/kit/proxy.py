"""A TCP proxy that drops a chosen request before it arrives, or its answer afterwards."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self


@dataclass
class _Rule:
    """A request to drop, or a request whose answer to drop.

    With `applied` None the request is dropped. Otherwise its connection is cut once applied() is true.
    With `stay_away` all connections are cut, as go_away() does.
    """

    pattern: bytes
    applied: Callable[[], object] | None
    stay_away: bool


class Proxy:
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
        # close() alone would not interrupt an accept() in progress.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def has_lost(self) -> bool:
        # A client may notice the cut connection before the proxy has set the event, so this waits.
        return self.lost.wait(10)

    def lose_request(self, pattern: bytes, stay_away: bool = False) -> None:
        self.lose(pattern, None, stay_away)

    def lose_answer(self, pattern: bytes, applied: Callable[[], object], stay_away: bool = False) -> None:
        """Let the next request with `pattern` arrive, and cut it off once `applied()` is true."""
        self.lose(pattern, applied, stay_away)

    def lose(self, pattern: bytes, applied: Callable[[], object] | None, stay_away: bool = False) -> None:
        self._rules.append(_Rule(pattern, applied, stay_away))

    def go_away(self) -> None:
        """Cut every connection, and each new one, until come_back()."""
        self._away = True
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for connection in sockets:
            _cut(connection)

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
            for source, sink, from_client in ((client, server, True), (server, client, False)):
                arguments = (source, sink, mute, from_client)
                threading.Thread(target=self._pump, args=arguments, name='proxy', daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, mute: threading.Event, from_client: bool) -> None:
        before = b''
        with suppress(OSError):
            while data := source.recv(65536):
                rule = self._take_rule(before + data) if from_client else None
                before = (before + data)[-512:]
                if rule is not None and rule.applied is None:
                    self._apply_rule(rule)
                    break
                if rule is not None:
                    mute.set()
                    threading.Thread(target=self._cut_once_applied, args=(rule, source, sink), daemon=True).start()
                if from_client or not mute.is_set():
                    sink.sendall(data)
        # A server may close the connection after its answer (waitress does after a 204). That must not overtake the
        # rule.
        if not mute.is_set():
            _cut(source)
            _cut(sink)

    def _take_rule(self, data: bytes) -> _Rule | None:
        for rule in self._rules:
            if rule.pattern in data:
                self._rules.remove(rule)
                return rule
        return None

    def _cut_once_applied(self, rule: _Rule, source: socket.socket, sink: socket.socket) -> None:
        assert rule.applied is not None
        pause = threading.Event()
        while not rule.applied():
            pause.wait(0.01)
        self._apply_rule(rule)
        _cut(source)
        _cut(sink)

    def _apply_rule(self, rule: _Rule) -> None:
        if rule.stay_away:
            self.go_away()
        self.lost.set()


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
