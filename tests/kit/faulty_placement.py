"""An HTTP proxy for a real placement, which fails as placement or a proxy can fail."""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

CONFLICT_BODY = (
    b'{"errors": [{"status": 409, "code": "placement.concurrent_update", "detail": "a generation has moved"}]}'
)
WRONG_BODIES = itertools.cycle(
    [b'{"hello": "world"}', b'[]', b'{"allocations": 7}', b'null', b'{"resource_providers"', b'"']
)

KINDS = {
    'refused': 'nobody listens',
    'broken': 'the connection ends without an answer',
    '500': 'an error of its own',
    '503': 'a gateway that says to come back in an hour',
    '409': 'every PUT loses its race (placement.concurrent_update)',
    'lost': 'every write is carried out, and its answer lost',
    'html': "200, and a proxy's welcome page",
    'wrong': '200, and JSON that is not what was asked for',
    'truncated': '200, and half an answer',
    'slow': 'the answer takes `seconds`: the request itself arrives that late',
}
# The kinds of failure that apply only to some methods.
METHODS_BY_KIND = {'409': {'PUT'}, 'lost': {'PUT', 'POST', 'DELETE'}}


class FaultyPlacement:
    def __init__(self, port: int) -> None:
        self._target = port
        self._kind = ''
        self._matches: Callable[[str, str], bool] = lambda *_: True
        self._seconds = 0.0
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self.hits = 0
        self._server: ThreadingHTTPServer | None = self._listen(0)
        self.port = int(self._server.server_address[1])
        self.url = f'http://127.0.0.1:{self.port}'

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._close()

    def fail(self, kind: str, matches: Callable[[str, str], bool] = lambda *_: True, seconds: float = 0.0) -> None:
        """Fail the requests for which `matches(method, path)` is true, until heal()."""
        assert kind in KINDS, kind
        self._kind, self._matches, self._seconds = kind, matches, seconds
        if kind == 'refused':
            self._close()
        else:
            self.cut()  # a kept-alive connection must not be answered as before

    def heal(self) -> None:
        self._kind = ''
        if self._server is None:
            self._server = self._listen(self.port)

    def fails(self, method: str, path: str) -> str:
        kind = self._kind
        if not kind or not self._matches(method, path) or method not in METHODS_BY_KIND.get(kind, {method}):
            return ''
        self.hits += 1
        return kind

    def wait(self) -> None:
        self._closing.wait(self._seconds)

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        with closing(http.client.HTTPConnection('127.0.0.1', self._target, timeout=30)) as connection:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get('content-type', ''), answer.read()

    def wrap(self, connection: socket.socket) -> socket.socket:
        return connection

    def cut(self) -> None:
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _listen(self, port: int) -> ThreadingHTTPServer:
        faulty = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
                connection, address = super().get_request()
                return faulty.wrap(connection), address

            def process_request(self, request: socket.socket, address: tuple[str, int]) -> None:  # type: ignore[override]
                faulty._open.add(request)
                super().process_request(request, address)

            def handle_error(self, *_: object) -> None:
                """Ignore clients that have disconnected: the tests provoke that."""

        server = Server(('127.0.0.1', port), type('Handler', (_Handler,), {'faulty': faulty}))
        threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True).start()
        return server

    def _close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self.cut()


class _Handler(BaseHTTPRequestHandler):
    faulty: FaultyPlacement
    protocol_version = 'HTTP/1.1'

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get('content-length', 0)))
        kind = self.faulty.fails(self.command, self.path)
        if kind == 'slow':
            self.faulty.wait()
        if kind in ('', 'slow', 'lost'):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            status, content_type, answer = self.faulty.pass_on(self.command, self.path, headers, body)
            if kind != 'lost':
                self._answer(status, content_type, answer)
        elif kind == '500':
            self._answer(500, 'application/json', b'{"errors": [{"status": 500, "detail": "database is locked"}]}')
        elif kind == '503':
            self._answer(503, 'text/html', b'<html>come again</html>', {'retry-after': '3600'})
        elif kind == '409':
            self._answer(409, 'application/json', CONFLICT_BODY)
        elif kind == 'html':
            self._answer(200, 'text/html', b'<html><body>Welcome</body></html>')
        elif kind == 'wrong':
            self._answer(200, 'application/json', next(WRONG_BODIES))
        elif kind == 'truncated':
            self._answer(200, 'application/json', b'{"allocations": {"', {'content-length': '4096'})
        self.close_connection = self.close_connection or kind in ('lost', 'truncated', 'broken')

    do_GET = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815

    def _answer(self, status: int, content_type: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {'content-length': str(len(body)), **(more or {})}
        if content_type:
            headers['content-type'] = content_type
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


HOP_BY_HOP = {'host', 'connection', 'content-length', 'accept-encoding'}
