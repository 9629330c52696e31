"""HTTP to placement by http.client and ssl alone: any HTTP library takes a command more time to load than this takes.

https://docs.python.org/3/library/http.client.html
"""

from __future__ import annotations

import http.client
import io
import json
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit

from ecomp.conf import connection_to
from ecomp.errors import Unreachable
from ecomp.model import allocation
from ecomp.tls import SENTENCES, TlsFailure, tls_failure

if TYPE_CHECKING:
    from ecomp.conf import PlacementConfig

MICROVERSION = '.'.join(map(str, allocation.MICROVERSION))

POOL = 16
"""Connections to placement that a process keeps for the next call."""

HEADERS = {
    'openstack-api-version': f'placement {MICROVERSION}',
    'accept': 'application/json',
    # What is packed may be a thousand times as long.
    'accept-encoding': 'identity',
}

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


class Answer(NamedTuple):
    """An answer. Of `headers` each is there by its name in small letters."""

    status_code: int
    content: bytes
    headers: Mapping[str, str]


def _token_in(path: Path, placement: str) -> str:
    """The token in a file. Unreachable for one that cannot be read, is empty or is none of a header's words.

    Unreachable, because a file that is being exchanged is missing or empty for a moment, and the next call may do. Its
    `backend` names the file too: who logs a backend's loss once must not take it for a loss of placement before.
    """
    backend = f'{placement} (token_file {path})'
    try:
        token = path.read_bytes().decode('ascii').strip()  # read_text() would load a codec
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else 'not ASCII'
        raise Unreachable(f'token_file {path}: {why}', backend) from error
    if not token or not token.isprintable() or ' ' in token:
        raise Unreachable(f'token_file {path}: must hold one word', backend)
    return token


# A socket's time limit is between two bytes, and http.client has no limit of bytes: a server that sends a byte a
# second, or never stops, would hold a thread, or fill the memory, for ever. So each read of an answer, its head
# included, looks at both.


class AnswerLimits(NamedTuple):
    """Limits of one answer, over all the tries it takes."""

    size: int
    seconds: float


LIMITS = AnswerLimits(64 * 1024**2, 60.0)
"""Ten thousand candidates are 10 MB."""


class Overlong(OSError):
    """The answer has more bytes than are taken."""


_LEFT: ContextVar[tuple[int, float]] = ContextVar('what is left of the call of this thread')
"""Bytes of each answer, and until when on the monotonic clock."""


def _begin(limits: AnswerLimits) -> float:
    """Start these limits for the next call of this thread, retries included; return when its time is up."""
    until = time.monotonic() + limits.seconds
    _LEFT.set((limits.size, until))
    return until


class _Reader(io.RawIOBase):
    """The bytes of one answer, from its head on."""

    def __init__(self, raw: io.RawIOBase, sock: Any) -> None:
        self._raw, self._sock = raw, sock
        self._left, self._until = _LEFT.get()
        self._patience = sock.gettimeout() or self._until

    def readable(self) -> bool:
        """It is there for nothing else."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """See io.RawIOBase. TimeoutError, Overlong."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError('no whole answer in time')
        if left < self._patience:
            self._sock.settimeout(left)
        count: int | None = self._raw.readinto(buffer)  # type: ignore[attr-defined]
        self._left -= count or 0
        if self._left < 0:
            raise Overlong('the answer is too long')
        return count

    def close(self) -> None:
        """The socket stays with its connection."""
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """http.client's, with limits. Call _begin() before each request."""

    def __init__(self, sock: Any, *given: Any, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp = io.BufferedReader(_Reader(self.fp.detach(), sock))


class _Http(http.client.HTTPConnection):
    response_class = _Response


class Connections:
    """The connections to placement. May be shared by threads."""

    def __init__(self, config: PlacementConfig, timeout: tuple[float, float], limits: AnswerLimits) -> None:
        """`timeout` is how many seconds it may take to connect, and pass without a byte."""
        self._config, self._timeout, self._limits = config, timeout, limits
        self.endpoint = config.endpoint.rstrip('/')
        self.name = f'placement at {self.endpoint}'
        parts = urlsplit(self.endpoint)
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

    def token(self) -> str:
        """What the file has at each call, or `admin`, which placement takes without authentication. Unreachable."""
        return 'admin' if self._config.token_file is None else _token_in(self._config.token_file, self.name)

    def foreign(self, kind: type[Unreachable] = Unreachable) -> Unreachable:
        """Make the error for an answer that placement does not give, so that something else is listening there."""
        return kind(f'{self.endpoint} answers, but not as placement does: is `placement:` right?', self.name)

    def lost(self, kind: type[Unreachable], why: str) -> Unreachable:
        """Make the error for a call that got no answer, and why."""
        return kind(f'{self.name} cannot be reached: {why}', self.name)

    def broken(self, kind: type[Unreachable]) -> Unreachable:
        """Make the error for a call whose connection broke."""
        # Whoever does not take our certificate often hangs up before its word about that arrives.
        question = ': does it take our certificate?' if self.endpoint.startswith('https:') else ''
        return self.lost(kind, f'the connection broke{question}')

    def late(self, kind: type[Unreachable], until: float) -> Unreachable:
        """Make the error for an answer that did not come, or not whole; `until` is when its time is up."""
        if time.monotonic() < until:
            return kind(f'{self.name} gave no answer in {self._timeout[1]:g} s', self.name)
        return kind(f'{self.name} gave no whole answer in {self._limits.seconds:g} s', self.name)

    def send(self, method: str, path: str, body: dict[str, Any] | None, unanswered: type[Unreachable]) -> Answer:
        """Send a request and return the answer, whatever its status.

        Args:
            path: with its query.
            body: sent as JSON; None for no body.

        Raises:
            Unreachable: nothing was sent. `unanswered`: the request may have been carried out.
        """
        until = _begin(self._limits)
        path, content = quote_path(self._path + path), None
        if body is not None:
            content = json.dumps(body, allow_nan=False).encode()
        pauses = list(RETRY_PAUSES) if method == 'GET' else []
        while True:
            try:
                answer = self._exchange(method, path, content, unanswered)
            except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
                if not pauses or not _may_pass(error):
                    raise self._failure(error, unanswered, until) from error
            else:
                if not pauses or answer.status_code not in BUSY:
                    return answer
            time.sleep(pauses.pop(0) * random.uniform(0.8, 1.2))

    def _exchange(self, method: str, path: str, content: bytes | None, unanswered: type[Unreachable]) -> Answer:
        headers = {**HEADERS, 'x-auth-token': self.token()}
        if content is not None:
            headers['content-type'] = 'application/json'
        connection = self._connected()
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            if response.headers.get('content-encoding', 'identity') != 'identity':
                raise self.foreign(unanswered)
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

    def _failure(self, error: Exception, unanswered: type[Unreachable], until: float) -> Unreachable:
        """Make the error for a call without an answer, or without a whole one."""
        if isinstance(error, TimeoutError):
            return self.late(unanswered, until)
        if isinstance(error, ssl.SSLError):
            return self.lost(unanswered, SENTENCES[tls_failure(error)])
        if isinstance(error, OSError) and not isinstance(error, Overlong):
            return self.broken(unanswered)
        return self.foreign(unanswered)

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
            raise self.lost(Unreachable, 'no connection') from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made = _Http(self._host, self._port)
            made.sock = sock if context is None else context.wrap_socket(sock, server_hostname=where)
        except (OSError, ValueError) as error:
            sock.close()
            if isinstance(error, ssl.SSLError):
                raise self.lost(Unreachable, SENTENCES[tls_failure(error)]) from error
            if isinstance(error, ConnectionError):
                raise self.broken(Unreachable) from error
            raise self.lost(Unreachable, 'no connection') from error
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
            name, why = self.name, f'{error.filename}: {error.strerror}'
            raise Unreachable(f'{name} cannot be asked: {why}', f'{name} (its certificates)') from error
        try:
            context = ssl.create_default_context(cafile=config.ca_cert)
            context.hostname_checks_common_name = False
            if config.cert_cert is not None:
                context.load_cert_chain(config.cert_cert, config.cert_key)
        except OSError as error:
            raise self.lost(Unreachable, SENTENCES[TlsFailure.UNUSABLE_FILES]) from error
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
