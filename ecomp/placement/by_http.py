"""HTTP to placement by http.client and ssl alone: any HTTP library takes a command more time to load than this takes.

https://docs.python.org/3/library/http.client.html
"""

from __future__ import annotations

import http.client
import json
import random
import select
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from ecomp.endpoints import connection_to
from ecomp.errors import Unreachable
from ecomp.placement.limited import Overlong, Response
from ecomp.placement.way import HEADERS, POOL, Answer, Asked, Words
from ecomp.tls import TlsFailure, tls_failure

if TYPE_CHECKING:
    from ecomp.conf import PlacementConfig

SAFE = "!$&'()*+,;=:@/?~%-._"
"""Characters of a path and its query that are sent as they are, as letters and digits are; `%` begins a quoted one."""

PIECE = 65536
"""Bytes that are read at once."""

KEPT = 90.0
"""Seconds for which connections are kept: a firewall on the way forgets them at last, without a word.

More than a minute, in which each compute asks once.
"""

RETRY_PAUSES = (0.0, 0.5)
"""Seconds before a read is sent for the second and third time, give or take a fifth. A write is sent once."""

BUSY = (502, 503, 504)
"""Statuses with which a proxy says that placement does not answer it: reads are sent again."""


class _Http(http.client.HTTPConnection):
    response_class = Response


class Connections:
    """The connections to placement. May be shared by threads."""

    def __init__(self, config: PlacementConfig, timeout: tuple[float, float], words: Words) -> None:
        self._config, self._timeout, self._words = config, timeout, words
        parts = urlsplit(words.endpoint)
        self._is_secure = parts.scheme == 'https'
        self._host, self._path = parts.hostname or '', parts.path
        self._port = parts.port or (443 if self._is_secure else 80)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []

    def close(self) -> None:
        """Close all connections that are idle."""
        with self._lock:
            while self._idle:
                self._idle.pop()[1].close()

    def send(self, asked: Asked, unanswered: type[Unreachable], until: float) -> Answer:
        """Send a request and return the answer, whatever its status.

        Args:
            unanswered: the error where the request may have been carried out.
            until: when the time of the answer is up, as limited.begin() returned it.

        Raises:
            Unreachable: nothing was sent.
        """
        body = None if asked.body is None else json.dumps(asked.body, allow_nan=False).encode()
        pauses = list(RETRY_PAUSES) if asked.method == 'GET' else []
        while True:
            try:
                answer = self._exchange(asked.method, quote_path(self._path + asked.path), body, unanswered)
            except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
                if not pauses or not _may_pass(error):
                    raise self._lost(error, unanswered, until) from error
            else:
                if not pauses or answer.status_code not in BUSY:
                    return answer
            time.sleep(pauses.pop(0) * random.uniform(0.8, 1.2))

    def _exchange(self, method: str, path: str, body: bytes | None, unanswered: type[Unreachable]) -> Answer:
        headers = {**HEADERS, 'x-auth-token': self._words.token()}
        if body is not None:
            headers['content-type'] = 'application/json'
        connection = self._connected()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            if response.headers.get('content-encoding', 'identity') != 'identity':
                raise self._words.foreign(unanswered)
            told = {name.lower(): value for name, value in response.headers.items()}
            answer = Answer(response.status, _whole(response), told)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                self.close()  # the others are as old: each that was forgotten on the way would take as long again
            raise
        if response.will_close:
            connection.close()
        else:
            self._keep(connection)
        return answer

    def _lost(self, error: Exception, unanswered: type[Unreachable], until: float) -> Unreachable:
        """Make the error for a call without an answer, or without a whole one."""
        if isinstance(error, TimeoutError):
            return self._words.late(unanswered, until)
        if isinstance(error, ssl.SSLError):
            return self._words.no_tls(unanswered, tls_failure(error))
        if isinstance(error, OSError) and not isinstance(error, Overlong):
            return self._words.broken(unanswered)
        return self._words.foreign(unanswered)

    def _connected(self) -> http.client.HTTPConnection:
        """Return an idle connection, or a new one. Unreachable if there is none."""
        with self._lock:
            while self._idle:
                since, kept = self._idle.pop()
                if time.monotonic() < since + KEPT and _is_open(kept):
                    kept.sock.settimeout(self._timeout[1])
                    return kept
                kept.close()
        context = self._context() if self._is_secure else None
        # As bytes: of text Python would look whether it is written in another alphabet, and load what that takes.
        where: Any = self._host.encode() if self._host.isascii() else self._host
        try:
            sock = connection_to(where, self._port, self._timeout[0], self._timeout[0])
        except (OSError, ValueError) as error:
            raise self._words.lost(Unreachable, 'no connection') from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made = _Http(self._host, self._port)
            made.sock = sock if context is None else context.wrap_socket(sock, server_hostname=where)
        except (OSError, ValueError) as error:
            sock.close()
            if isinstance(error, ssl.SSLError):
                raise self._words.no_tls(Unreachable, tls_failure(error)) from error
            if isinstance(error, ConnectionError):
                raise self._words.broken(Unreachable) from error
            raise self._words.lost(Unreachable, 'no connection') from error
        made.sock.settimeout(self._timeout[1])
        return made

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < POOL:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def _context(self) -> ssl.SSLContext:
        """Read the certificates, anew for each connection. Unreachable, for they may be there at the next call."""
        config = self._config
        try:
            for path in (config.ca_cert, config.cert_cert, config.cert_key):
                if path is not None:
                    path.open('rb').close()  # ssl does not name the file that it cannot read
        except OSError as error:
            # Its `backend` is another one, as that of a token is: see _token_in().
            name, why = self._words.name, f'{error.filename}: {error.strerror}'
            raise Unreachable(f'{name} cannot be asked: {why}', f'{name} (its certificates)') from error
        try:
            context = ssl.create_default_context(cafile=config.ca_cert)
            context.hostname_checks_common_name = False
            if config.cert_cert is not None:
                context.load_cert_chain(config.cert_cert, config.cert_key)
        except OSError as error:
            raise self._words.no_tls(Unreachable, TlsFailure.UNUSABLE_FILES) from error
        return context


def quote_path(path: str) -> str:
    """Quote what HTTP does not allow in a path and its query. `%` and what is quoted already stay as they are."""
    return quote(path, SAFE, errors='backslashreplace')


def _may_pass(error: Exception) -> bool:
    """Whether a read is sent again after this error.

    A server that gave no answer in time, or one without an end, would do so again. TLS fails for a reason that lasts,
    unless the other side hung up.
    """
    if isinstance(error, ssl.SSLError):
        return tls_failure(error) is TlsFailure.HUNG_UP
    return not isinstance(error, TimeoutError | Overlong)


def _whole(response: http.client.HTTPResponse) -> bytes:
    """The body, in pieces: one may be announced that is longer than all memory. HTTPException where it is cut off."""
    body = bytearray()
    while piece := response.read(PIECE):
        body += piece
    if response.length:
        raise http.client.IncompleteRead(b'', response.length)
    return bytes(body)


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """Whether nothing has come over an idle connection: else it was its end."""
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return not waiting.poll(0)
