"""The light way to a member of etcd: gRPC's calls by h2, and without gRPC, which takes longer to load than to ask.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. For calls that are answered once, one after another.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes

from ecomp.conf import EtcdConfig
from ecomp.store.messages import METHODS, KeepAlive, Request, answer
from ecomp.store.reasons import (
    DEADLINE_EXCEEDED,
    NOT_CONNECTED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Failure,
    NotUnderstood,
)

LONGEST = 64 * 1024**2
"""Bytes of an answer, as with gRPC."""
WINDOW = 4 * 1024**2
"""Bytes that a member may send before we have said that we took them."""
PIECE = 65536
"""Bytes that are read at once."""
CODES = (
    *('OK', 'CANCELLED', 'UNKNOWN', 'INVALID_ARGUMENT', DEADLINE_EXCEEDED, 'NOT_FOUND', 'ALREADY_EXISTS'),
    *('PERMISSION_DENIED', RESOURCE_EXHAUSTED, 'FAILED_PRECONDITION', 'ABORTED', 'OUT_OF_RANGE', 'UNIMPLEMENTED'),
    *('INTERNAL', UNAVAILABLE, 'DATA_LOSS', 'UNAUTHENTICATED'),
)
"""gRPC's codes, by their numbers."""
CLOSED = 'Socket closed'
"""What gRPC says of a connection that ended."""

Send = Callable[[float], None]
Receive = Callable[[float], list[Any]]
"""Until when on the monotonic clock; TimeoutError, OSError."""


class Member:
    """One connection to one endpoint, begun at once. OSError for a certificate that cannot be read, or is empty.

    May be shared by threads, which have their turns.
    """

    def __init__(self, config: EtcdConfig, endpoint: str) -> None:
        self._socket: socket.socket | None = None
        self._closed = False
        self._config, self._endpoint = config, endpoint
        for path in (config.ca_cert, config.cert_cert, config.cert_key):
            _check(path)
        self._turn = threading.Lock()
        self._http = H2Connection(H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False))
        self._failed: Failure | NotUnderstood | None = None
        self._maker = threading.Thread(target=self._make, name='etcd', daemon=True)
        self._maker.start()

    def call(self, request: Request, limit: float) -> Any:
        """The answer; None for a stream that ends without one. Failure, NotUnderstood."""
        until = time.monotonic() + limit
        if not self._turn.acquire(timeout=limit):
            raise Failure(DEADLINE_EXCEEDED, 'others are asking', unsent=True)
        try:
            self._maker.join(max(until - time.monotonic(), 0))
            if self._maker.is_alive():
                raise Failure(DEADLINE_EXCEEDED, 'not connected yet', unsent=True)
            if self._failed is None:
                self._look(until)
            if self._failed is not None:
                raise self._failed
            headers = (':scheme', 'https' if self._is_secure else 'http'), (':authority', self._endpoint)
            return _Call(request, until).of(self._http, headers, self._send, self._receive)
        except OSError as error:
            raise self._broken(Failure(UNAVAILABLE, CLOSED)) from error
        except H2Error as error:
            raise self._broken(NotUnderstood(f'no HTTP/2: {error}')) from error
        finally:
            self._turn.release()

    def close(self) -> None:
        """Let the connection go."""
        self._closed = True
        if self._socket is not None:
            self._socket.close()

    __del__ = close

    def _broken(self, error: Failure | NotUnderstood) -> Failure | NotUnderstood:
        """The same error; whoever comes later is told that nothing is sent over this connection any more."""
        self._failed = Failure(UNAVAILABLE, CLOSED, unsent=True)
        return error

    # While the connection is made nothing has been asked, and what goes wrong is told by whoever asks.

    def _make(self) -> None:
        try:
            self._connect()
        except TimeoutError:
            self._failed = Failure(DEADLINE_EXCEEDED, 'not connected', unsent=True)
        except Exception as error:
            # gRPC knows more words for what TLS says, or tries another of the name's addresses.
            self._failed = NotUnderstood(str(error), unsent=True)

    def _connect(self) -> None:
        until = time.monotonic() + 2 * self._config.timeout
        host, _, port = self._endpoint.rpartition(':')
        host = host.strip('[]')
        try:
            # As bytes: of text Python would look whether it is written in another alphabet, and load what that takes.
            where = host.encode() if host.isascii() else host
            made = socket.create_connection((where, int(port)), until - time.monotonic())  # type: ignore[arg-type]
        except ConnectionRefusedError as error:
            words = f'{NOT_CONNECTED}Failed to connect to remote host: {error.strerror}'
            self._failed = Failure(UNAVAILABLE, words, unsent=True)
            return
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = made
        if self._is_secure:
            self._socket = _context(self._config).wrap_socket(made, server_hostname=where)
            if self._socket.selected_alpn_protocol() != 'h2':
                raise ValueError('it does not speak HTTP/2')
        self._http.initiate_connection()
        self._http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW, SettingCodes.ENABLE_PUSH: 0})
        self._http.increment_flow_control_window(WINDOW)
        self._send(until)
        # Whoever does not take our certificate says so only now, and nothing has been asked yet.
        while not any(isinstance(each, RemoteSettingsChanged) for each in self._receive(until)):
            _in_time(until)
        if self._closed:
            self._socket.close()

    @property
    def _is_secure(self) -> bool:
        return self._config.ca_cert is not None or self._config.cert_cert is not None

    def _look(self, until: float) -> None:
        """See whether the connection has ended since it was used."""
        try:
            while self._receive(time.monotonic()):
                _in_time(until)
        except TimeoutError:
            pass
        except (OSError, H2Error):
            self._broken(Failure(UNAVAILABLE, CLOSED))

    def _send(self, until: float) -> None:
        """Send what h2 has to say. TimeoutError, OSError."""
        data = self._http.data_to_send()
        if data:
            assert self._socket is not None
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            try:
                self._socket.sendall(data)
            except TimeoutError:
                # Half of it may be on its way, behind which nothing else makes sense.
                self._broken(Failure(UNAVAILABLE, CLOSED))
                raise

    def _receive(self, until: float) -> list[Any]:
        """What comes next; what h2 has to say to it is sent. TimeoutError, OSError."""
        assert self._socket is not None
        left = until - time.monotonic()
        self._socket.settimeout(left if left > 0 else 0.0)
        try:
            data = self._socket.recv(PIECE)
        except (BlockingIOError, ssl.SSLWantReadError):
            raise TimeoutError from None
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, 'it hung up')
        events = self._http.receive_data(data)
        for each in events:
            if isinstance(each, ConnectionTerminated):
                self._broken(Failure(UNAVAILABLE, CLOSED))
        self._send(max(until, time.monotonic() + 1))
        return events


class _Call:
    """One request, and what has come of its answer."""

    def __init__(self, request: Request, until: float) -> None:
        self._request, self._until = request, until
        self._told: dict[str, str] = {}
        self._body = bytearray()
        self._is_over = False

    def of(self, http: H2Connection, whom: Sequence[tuple[str, str]], send: Send, receive: Receive) -> Any:
        """The answer by a connection. OSError and H2Error: it is of no use any more. Failure, NotUnderstood."""
        stream = http.get_next_available_stream_id()
        try:
            self._ask(http, stream, whom, send, receive)
            while not self._is_over:
                _in_time(self._until)
                self._take(receive(self._until), http, stream)
                send(self._until)
        except TimeoutError as error:
            self._give_up(http, stream, send)
            raise Failure(DEADLINE_EXCEEDED, 'no answer in time') from error
        return self._answer()

    def _ask(
        self, http: H2Connection, stream: int, whom: Sequence[tuple[str, str]], send: Send, receive: Receive
    ) -> None:
        path, _ = METHODS[type(self._request)]
        left = max(int((self._until - time.monotonic()) * 1000), 1)
        headers = [
            *((':method', 'POST'), (':path', path), *whom, ('te', 'trailers')),
            *(('content-type', 'application/grpc'), ('grpc-timeout', f'{left}m'), ('hasleader', 'true')),
        ]
        http.send_headers(stream, headers)
        body = self._request.to_bytes()
        rest = memoryview(b'\0' + len(body).to_bytes(4, 'big') + body)
        while True:
            fits = min(http.local_flow_control_window(stream), http.max_outbound_frame_size)
            if fits >= len(rest):
                break
            if fits > 0:
                http.send_data(stream, rest[:fits].tobytes())
                rest = rest[fits:]
                continue
            _in_time(self._until)
            send(self._until)
            self._take(receive(self._until), http, stream)
            if self._is_over:  # it has heard enough
                return
        http.send_data(stream, rest.tobytes(), end_stream=True)
        send(self._until)

    def _take(self, events: list[Any], http: H2Connection, stream: int) -> None:
        for each in events:
            if isinstance(each, ConnectionTerminated) and (each.last_stream_id or 0) < stream:
                raise Failure(UNAVAILABLE, CLOSED)
            if getattr(each, 'stream_id', None) != stream:
                continue
            if isinstance(each, ResponseReceived | TrailersReceived):
                self._told |= {str(name, 'latin-1'): str(value, 'latin-1') for name, value in each.headers}
            elif isinstance(each, DataReceived):
                self._body += each.data
                if len(self._body) > LONGEST:
                    http.reset_stream(stream)
                    words = f'CLIENT: Received message larger than max ({len(self._body)} vs. {LONGEST})'
                    raise Failure(RESOURCE_EXHAUSTED, words)
                http.acknowledge_received_data(each.flow_controlled_length, stream)
            elif isinstance(each, StreamReset):
                # Of what was too long to be sent whole it has said already what it thinks.
                if 'grpc-status' not in self._told:
                    raise Failure(UNAVAILABLE, 'Stream removed')
                self._is_over = True
            elif isinstance(each, StreamEnded):
                self._is_over = True

    def _give_up(self, http: H2Connection, stream: int, send: Send) -> None:
        try:
            http.reset_stream(stream)
            send(time.monotonic())
        except (OSError, H2Error):
            pass  # whoever comes next sees what is left of the connection

    def _answer(self) -> Any:
        told = self._told
        if told.get(':status') != '200' or not told.get('content-type', '').startswith('application/grpc'):
            raise NotUnderstood('it does not answer as etcd does')
        status = told.get('grpc-status', '')
        if not status.isdecimal() or int(status) >= len(CODES):
            raise NotUnderstood('it does not say what became of the call')
        if int(status):
            from urllib.parse import unquote  # most calls need none

            raise Failure(CODES[int(status)], unquote(told.get('grpc-message', '')))
        if not self._body and isinstance(self._request, KeepAlive):
            return None
        if self._body[:1] != b'\0' or len(self._body) != 5 + int.from_bytes(self._body[1:5], 'big'):
            raise NotUnderstood('its answer is no message')
        try:
            return answer(METHODS[type(self._request)].answer, bytes(self._body[5:]))
        except ValueError as error:
            raise NotUnderstood(f'its answer cannot be read: {error}') from error


def _in_time(until: float) -> None:
    """TimeoutError once it is too late: who never stops sending, and never answers, would be read for ever."""
    if time.monotonic() >= until:
        raise TimeoutError


def _check(path: Path | None) -> None:
    """OSError for a file that cannot be read, or has nothing in it."""
    if path is not None:
        with open(path, 'rb') as file:
            if not file.read(1):
                raise OSError(errno.ENODATA, 'is empty', str(path))


def _context(config: EtcdConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(['h2'])
    if config.ca_cert is not None:
        context.load_verify_locations(config.ca_cert)
    else:
        context.load_default_certs()
    if config.cert_cert is not None:
        context.load_cert_chain(config.cert_cert, config.cert_key)
    return context
