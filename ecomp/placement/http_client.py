"""HTTP to placement with http.client and ssl alone, because other libraries load too slowly."""

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
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from ecomp.conf import PlacementConfig, connect_tcp
from ecomp.errors import Unreachable
from ecomp.model import allocation
from ecomp.tls import SENTENCES, TlsFailure, classify_tls_error

MICROVERSION = '.'.join(map(str, allocation.MICROVERSION))
MAX_IDLE_CONNECTIONS = 16
HEADERS = {
    'openstack-api-version': f'placement {MICROVERSION}',
    'accept': 'application/json',
    # A compressed answer could be a thousand times as long.
    'accept-encoding': 'identity',
}
# Characters of a path and its query that are sent unquoted, besides letters and digits; `%` begins a quoted one.
SAFE_CHARACTERS = "!$&'()*+,;=:@/?~%-._"
READ_BYTES = 65536
# Seconds that idle connections are kept: more than a minute, in which each compute sends one request, and less than the
# time after which a firewall on the path silently forgets them.
MAX_IDLE_SECONDS = 90.0
# Seconds before a read is sent for the second and third time, give or take a fifth. A write is sent once.
RETRY_PAUSES_SECONDS = (0.0, 0.5)
# Statuses of a proxy to which placement does not answer: reads are sent again.
BUSY_STATUSES = (502, 503, 504)


class Answer(NamedTuple):
    """An answer, with the names of its `headers` in lower case."""

    status_code: int
    content: bytes
    headers: Mapping[str, str]


# A socket's timeout is per read, and http.client has no limit of bytes: a server that sends a byte a second, or never
# stops, would block a thread or fill the memory. So each read of an answer, headers included, checks both limits.
class AnswerLimits(NamedTuple):
    """The maximum bytes of an answer, and the maximum seconds of a call with its retries."""

    size_bytes: int
    seconds: float


# Ten thousand candidates are 10 MB.
DEFAULT_LIMITS = AnswerLimits(64 * 1024**2, 60.0)


class AnswerTooLong(OSError):
    """The answer has more bytes than are accepted."""


class _LimitedReader(io.RawIOBase):
    """The bytes of one answer from its headers on, within the limits of the call."""

    def __init__(self, raw: io.RawIOBase, sock: Any, max_bytes: int, deadline: float) -> None:
        self._raw, self._sock, self._remaining_bytes, self._deadline = raw, sock, max_bytes, deadline
        self._timeout_seconds = sock.gettimeout() or self._deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError('no complete answer in time')
        if seconds < self._timeout_seconds:
            self._sock.settimeout(seconds)
        count: int | None = self._raw.readinto(buffer)  # type: ignore[attr-defined]
        self._remaining_bytes -= count or 0
        if self._remaining_bytes < 0:
            raise AnswerTooLong('the answer is too long')
        return count

    def close(self) -> None:
        # The socket stays with its connection.
        self._raw.close()
        super().close()


class _LimitedResponse(http.client.HTTPResponse):
    """http.client's response, limited to `max_bytes` and by a monotonic `deadline`."""

    def __init__(self, max_bytes: int, deadline: float, sock: Any, **options: Any) -> None:
        super().__init__(sock, **options)
        self.fp = io.BufferedReader(_LimitedReader(self.fp.detach(), sock, max_bytes, deadline))


class Connections:
    """The connections to placement, which threads may share."""

    def __init__(self, config: PlacementConfig, timeout: tuple[float, float], limits: AnswerLimits) -> None:
        self._config = config
        # The seconds to connect, and between two bytes.
        self._timeout = timeout
        self._limits = limits
        self.endpoint = config.endpoint.rstrip('/')
        self.name = f'placement at {self.endpoint}'
        parts = urlsplit(self.endpoint)
        self._is_secure = parts.scheme == 'https'
        self._host, self._path = parts.hostname or '', parts.path
        self._port = parts.port or (443 if self._is_secure else 80)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Any]] = []

    def close(self) -> None:
        """Close the idle connections, but not those in use."""
        with self._lock:
            while self._idle:
                self._idle.pop()[1].close()

    def read_token(self) -> str:
        """Return the token in token_file, `admin` without one, or raise Unreachable if invalid."""
        path = self._config.token_file
        if path is None:
            return 'admin'
        try:
            token = path.read_bytes().decode('ascii').strip()  # read_text() would load a codec
            is_word = token.isprintable() and len(token.split()) == 1
            why = '' if is_word else 'must contain one token, without spaces'
        except (OSError, ValueError) as error:
            why = str(error.strerror) if isinstance(error, OSError) else 'not ASCII'
        if why:
            # Unreachable, because a file is missing or empty while it is replaced. The `backend` names the file,
            # because callers log the loss of each backend once, and this is not the loss of placement.
            raise Unreachable(f'token_file {path}: {why}', f'{self.name} (token_file {path})')
        return token

    def make_foreign_error(self, error_type: type[Unreachable] = Unreachable) -> Unreachable:
        return error_type(f'{self.endpoint} answers, but not as placement does (`placement:` may be wrong)', self.name)

    def send(self, method: str, path: str, body: dict[str, Any] | None, no_answer_error: type[Unreachable]) -> Answer:
        """Send a request and return the answer, whatever its status.

        `path` includes the query. A GET is sent up to three times if the connection breaks, the answer is not HTTP, or
        its status is in BUSY_STATUSES.

        Raises:
            Unreachable: nothing was sent, for lack of a connection, a token or a certificate.
            no_answer_error: the request may have been carried out.
        """
        deadline = time.monotonic() + self._limits.seconds
        path, content = quote_path(self._path + path), None
        if body is not None:
            content = json.dumps(body, allow_nan=False).encode()
        pauses = list(RETRY_PAUSES_SECONDS) if method == 'GET' else []
        while True:
            try:
                answer = self._exchange(method, path, content, no_answer_error, deadline)
            except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
                if not pauses or not _is_retryable(error):
                    raise self._make_call_error(error, no_answer_error, deadline) from error
            else:
                if not pauses or answer.status_code not in BUSY_STATUSES:
                    return answer
            time.sleep(pauses.pop(0) * random.uniform(0.8, 1.2))

    def _exchange(
        self, method: str, path: str, content: bytes | None, no_answer_error: type[Unreachable], deadline: float
    ) -> Answer:
        headers = {**HEADERS, 'x-auth-token': self.read_token()}
        if content is not None:
            headers['content-type'] = 'application/json'
        connection = self._reuse_or_connect()
        connection.response_class = partial(_LimitedResponse, self._limits.size_bytes, deadline)
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            if response.headers.get('content-encoding', 'identity') != 'identity':
                raise self.make_foreign_error(no_answer_error)
            headers_by_name = {name.lower(): value for name, value in response.headers.items()}
            answer = Answer(response.status, _read_body(response), headers_by_name)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                self.close()  # the idle ones are as old: each one that a firewall forgot would take as long again
            raise
        with self._lock:
            is_kept = not response.will_close and len(self._idle) < MAX_IDLE_CONNECTIONS
            if is_kept:
                self._idle.append((time.monotonic(), connection))
        if not is_kept:
            connection.close()
        return answer

    def _make_call_error(self, error: Exception, error_type: type[Unreachable], deadline: float) -> Unreachable:
        if isinstance(error, TimeoutError):
            is_over, seconds = time.monotonic() >= deadline, self._timeout[1]
            limit = f'complete answer within {self._limits.seconds:g}' if is_over else f'answer within {seconds:g}'
            return error_type(f'{self.name} gave no {limit} s', self.name)
        if isinstance(error, OSError) and not isinstance(error, AnswerTooLong):
            return self._make_broken_error(error, error_type)
        return self.make_foreign_error(error_type)

    def _make_unreachable_error(
        self, reason: str, error_type: type[Unreachable] = Unreachable, failure: TlsFailure | None = None
    ) -> Unreachable:
        return error_type(f'{self.name} cannot be reached: {reason}', self.name, failure)

    def _make_broken_error(self, error: OSError, error_type: type[Unreachable] = Unreachable) -> Unreachable:
        if isinstance(error, ssl.SSLError):
            failure = classify_tls_error(error)
            return self._make_unreachable_error(SENTENCES[failure], error_type, failure)
        # A server that rejects our certificate often closes the connection before its alert arrives.
        doubt = ' (the server may refuse our certificate)' if self._is_secure else ''
        return self._make_unreachable_error(f'the connection broke{doubt}', error_type)

    def _reuse_or_connect(self) -> Any:
        with self._lock:
            while self._idle:
                since, idle = self._idle.pop()
                if time.monotonic() < since + MAX_IDLE_SECONDS and _is_open(idle):
                    idle.sock.settimeout(self._timeout[1])
                    return idle
                idle.close()
        context = self._make_tls_context() if self._is_secure else None
        # As bytes: for text Python would load its IDNA codec.
        server_name: Any = self._host.encode() if self._host.isascii() else self._host
        try:
            sock = connect_tcp(server_name, self._port, self._timeout[0], self._timeout[0])
        except (OSError, ValueError) as error:
            raise self._make_unreachable_error('no connection') from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = http.client.HTTPConnection(self._host, self._port)
            connection.sock = sock if context is None else context.wrap_socket(sock, server_hostname=server_name)
        except (OSError, ValueError) as error:
            sock.close()
            if isinstance(error, ssl.SSLError | ConnectionError):
                raise self._make_broken_error(error) from error
            raise self._make_unreachable_error('no connection') from error
        connection.sock.settimeout(self._timeout[1])
        return connection

    def _make_tls_context(self) -> ssl.SSLContext:
        """Make the context, or raise Unreachable for unusable files: a later call may find others."""
        config = self._config
        try:
            for path in (config.ca_cert, config.cert_cert, config.cert_key):
                if path is not None:
                    path.open('rb').close()  # ssl does not name the file that it cannot read
        except OSError as error:
            # Its `backend` is another one, as for a token: see read_token().
            name, why = self.name, f'certificate {error.filename}: {error.strerror}'
            raise Unreachable(f'{name} cannot be reached: {why}', f'{name} (its certificates)') from error
        try:
            context = ssl.create_default_context(cafile=config.ca_cert)
            context.hostname_checks_common_name = False
            if config.cert_cert is not None:
                context.load_cert_chain(config.cert_cert, config.cert_key)
        except OSError as error:
            failure = TlsFailure.UNUSABLE_FILES
            raise self._make_unreachable_error(SENTENCES[failure], failure=failure) from error
        return context


def quote_path(path: str) -> str:
    """Quote what HTTP forbids in a path and its query, unless it is quoted already."""
    return quote(path, SAFE_CHARACTERS, errors='backslashreplace')


def _is_retryable(error: Exception) -> bool:
    # A timeout or an endless answer would come again.
    if isinstance(error, ssl.SSLError):
        return classify_tls_error(error) is TlsFailure.HUNG_UP
    return not isinstance(error, TimeoutError | AnswerTooLong)


def _read_body(response: http.client.HTTPResponse) -> bytes:
    # In pieces, as its announced size may exceed memory.
    body = bytearray()
    while piece := response.read(READ_BYTES):
        body += piece
    if response.length:
        raise http.client.IncompleteRead(b'', response.length)
    return bytes(body)


def _is_open(connection: http.client.HTTPConnection) -> bool:
    # If an idle connection has received anything, the server closed it.
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return not waiting.poll(0)
