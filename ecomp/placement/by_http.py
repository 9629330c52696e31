"""The light way to placement: http.client and ssl alone. requests is slow to load, and large.

What it does not understand it hands over. https://docs.python.org/3/library/http.client.html
"""

from __future__ import annotations

import http.client
import json
import re
import select
import socket
import ssl
import sys
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ecomp.endpoints import connection_to
from ecomp.errors import Unreachable
from ecomp.placement import limited, tls
from ecomp.placement.limited import Response
from ecomp.placement.way import HEADERS, POOL, Answer, Asked, NotUnderstood, Words

if TYPE_CHECKING:
    from ecomp.conf import PlacementConfig

PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/?-]*")
"""A path and its query that requests would send just so. All others are its business."""

PIECE = 65536
"""Bytes that are read at once."""

KEPT = 90.0
"""Seconds for which connections are kept: a firewall on the way forgets them at last, without a word.

More than a minute, in which each compute asks once.
"""


class _Http(http.client.HTTPConnection):
    response_class = Response


class Light:
    """http.client's connections to placement. May be shared by threads.

    NotUnderstood for whatever it cannot tell: of a GET always, of a write as long as nothing was sent.
    """

    def __init__(self, config: PlacementConfig, timeout: tuple[float, float], words: Words) -> None:
        self._config, self._timeout, self._words = config, timeout, words
        parts = urlsplit(words.endpoint)
        self._is_secure = parts.scheme == 'https'
        self._host, self._path = parts.hostname or '', parts.path
        self._port = parts.port or (443 if self._is_secure else 80)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []

    def close(self) -> None:
        """Let the connections go."""
        with self._lock:
            while self._idle:
                self._idle.pop()[1].close()

    def send(self, asked: Asked, unanswered: type[Unreachable], until: float) -> Answer:
        """See Way."""
        path = self._path + asked.path
        # The authorities that requests brings, or finds in its variables, are its own.
        if not PLAIN.fullmatch(path) or (self._is_secure and self._config.ca_cert is None):
            raise NotUnderstood('left to requests', unsent=True)
        headers = {**HEADERS, 'x-auth-token': self._words.token()}
        body = None
        if asked.body is not None:
            body, headers['content-type'] = json.dumps(asked.body, allow_nan=False).encode(), 'application/json'
        connection = self._connected()
        try:
            connection.request(asked.method, path, body, headers)
            response = connection.getresponse()
            if response.headers.get('content-encoding', 'identity') != 'identity':
                raise self._words.foreign(unanswered)
            told = {name.lower(): value for name, value in response.headers.items()}
            answer = Answer(response.status, _whole(response), told)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                self.close()  # the others are as old: each that was forgotten on the way would take as long again
            if isinstance(error, OSError | http.client.HTTPException | ValueError | OverflowError):
                raise self._lost(error, asked, unanswered, until) from error
            raise
        if response.will_close:
            connection.close()
        else:
            self._keep(connection)
        if answer.status_code in (502, 503, 504) and asked.method == 'GET':
            raise NotUnderstood(f'HTTP {answer.status_code}')  # which is asked again
        return answer

    def _lost(
        self, error: Exception, asked: Asked, unanswered: type[Unreachable], until: float
    ) -> Unreachable | NotUnderstood:
        """What became of a call without an answer, or without a whole one."""
        if limited.is_overlong(error):
            return self._words.foreign(unanswered)
        if isinstance(error, TimeoutError):
            return self._words.late(unanswered, until)
        if asked.method == 'GET':
            return NotUnderstood(error)
        if isinstance(error, ssl.SSLError):
            return self._words.lost(unanswered, tls.reason(error)[1])
        return self._words.broken(unanswered) if isinstance(error, OSError) else self._words.foreign(unanswered)

    def _connected(self) -> http.client.HTTPConnection:
        """A connection. Unreachable where there is none; NotUnderstood where TLS fails."""
        with self._lock:
            while self._idle:
                since, kept = self._idle.pop()
                if time.monotonic() < since + KEPT and _is_open(kept):
                    kept.sock.settimeout(self._timeout[1])
                    return kept
                kept.close()
        # As bytes: of text Python would look whether it is written in another alphabet, and load what that takes.
        where: Any = self._host.encode() if self._host.isascii() else self._host
        try:
            sock = connection_to(where, self._port, self._timeout[0], self._timeout[0])
        except (OSError, ValueError) as error:
            raise self._words.lost(Unreachable, 'no connection') from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made = _Http(self._host, self._port)
            made.sock = self._context().wrap_socket(sock, server_hostname=where) if self._is_secure else sock
        except (OSError, ValueError) as error:
            sock.close()
            raise NotUnderstood(error, unsent=True) from error
        made.sock.settimeout(self._timeout[1])
        return made

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < POOL:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def _context(self) -> ssl.SSLContext:
        """What TLS goes by, as urllib3 has it. The files are read anew for each connection."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.hostname_checks_common_name = False
        if sys.version_info >= (3, 13):
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT
        context.load_verify_locations(self._config.ca_cert)
        if self._config.cert_cert is not None:
            context.load_cert_chain(self._config.cert_cert, self._config.cert_key)
        return context


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
