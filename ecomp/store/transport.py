"""HTTP/2 to one endpoint by h2: one connection, over which one stream after another is asked and answered.

https://www.rfc-editor.org/rfc/rfc9113. What is said over a stream is ecomp.store.by_h2's.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
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
from ecomp.endpoints import connection_to
from ecomp.store.reasons import (
    DEADLINE_EXCEEDED,
    HUNG_UP,
    NO_ADDRESS,
    NOT_CONNECTED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    CallFailure,
    NotUnderstood,
)
from ecomp.tls import SENTENCES, TlsFailure, tls_failure

WINDOW = 4 * 1024**2
"""Bytes that a member may send before we have said that we took them."""
PIECE = 65536
"""Bytes that are read at once."""
CLOSED = 'Socket closed'
"""What gRPC says of a connection that ended."""
_NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_CERTAIN = {TlsFailure.EXPIRED, TlsFailure.NOT_YET_VALID, TlsFailure.OTHER_NAME, TlsFailure.OTHER_ADDRESS}
"""Failures that gRPC has no better words for. It would accept a common name, which we do not."""


class _Http2(H2Connection):
    # How many closed streams it knows of, for what may still come of them: with its own 65,536 an idle process grows by
    # ten megabytes.
    MAX_CLOSED_STREAMS = 256

    def __init__(self) -> None:
        super().__init__(H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False))
        self.ends = False

    def _receive_goaway_frame(self, frame: Any) -> Any:
        # h2 takes the connection for closed at once. What else a member says that ends in peace, a ping, is an error
        # then, and what came with the same bytes is never told.
        self.ends = True
        return super()._receive_goaway_frame(frame)


class Transport:
    """One connection to one endpoint, begun at once. OSError for a certificate that cannot be read, or is empty.

    May be shared by threads, which have their turns.
    """

    def __init__(self, config: EtcdConfig, endpoint: str) -> None:
        self._socket: socket.socket | None = None
        self._closed = False
        self._config, self.endpoint = config, endpoint
        self._patience = config.timeout / len(config.endpoints)
        for path in (config.ca_cert, config.cert_cert, config.cert_key):
            _check(path)
        self._turn = threading.Lock()
        self.http = _Http2()
        self._failed: CallFailure | NotUnderstood | None = None
        self._maker = threading.Thread(target=self._make, name='etcd', daemon=True)
        self._maker.start()

    @property
    def scheme(self) -> str:
        """`https` or `http`."""
        return 'https' if self._is_secure else 'http'

    @contextmanager
    def turn(self, until: float) -> Iterator[None]:
        """Have the connection to oneself, as soon as it is made; `until` when to wait, on the monotonic clock.

        CallFailure, NotUnderstood: also in place of an OSError or H2Error raised inside, after which it is of no use.
        """
        if not self._turn.acquire(timeout=max(until - time.monotonic(), 0)):
            raise CallFailure(DEADLINE_EXCEEDED, 'others are asking', unsent=True)
        try:
            # Of several members those that are off are not to use up the time of those that are there; one that is
            # there, and is slow, has all of it.
            self._maker.join(max(min(until - time.monotonic(), self._patience), 0))
            if self._maker.is_alive() and self._socket is not None:
                self._maker.join(max(until - time.monotonic(), 0))
            if self._maker.is_alive():
                raise CallFailure(DEADLINE_EXCEEDED, 'not connected yet', unsent=True)
            if self._failed is None:
                self._look(until)
            if self._failed is not None:
                raise copy(self._failed)  # it would have this frame, which has us: a socket that nobody closes
            yield
        except OSError as error:
            raise self._broken(CallFailure(UNAVAILABLE, CLOSED)) from error
        except H2Error as error:
            ended = CallFailure(UNAVAILABLE, CLOSED) if self.http.ends else None
            raise self._broken(ended or NotUnderstood(f'no HTTP/2: {error}')) from error
        finally:
            self._turn.release()

    def send(self, until: float) -> None:
        """Send what h2 has to say. TimeoutError, OSError."""
        data = self.http.data_to_send()
        if data:
            assert self._socket is not None
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            try:
                self._socket.sendall(data)
            except TimeoutError:
                # Half of it may be on its way, behind which nothing else makes sense.
                self._broken(CallFailure(UNAVAILABLE, CLOSED))
                raise

    def receive(self, until: float) -> list[Any]:
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
        events = self.http.receive_data(data)
        for each in events:
            if isinstance(each, ConnectionTerminated):
                self._broken(CallFailure(UNAVAILABLE, CLOSED))
        self.send(max(until, time.monotonic() + 1))
        return events

    def ping(self, until: float) -> None:
        """Have the other side say something. TimeoutError, OSError."""
        self.http.ping(b'is there')
        self.send(until)

    def cut(self) -> None:
        """Have whoever waits for something hear at once that the connection has ended. From any thread."""
        self._closed = True
        if self._socket is not None:
            with suppress(OSError):  # it has ended already
                # Not TLS's own shutdown, which would end it under the hands of whoever reads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Let the connection go."""
        self._closed = True
        if self._socket is not None:
            self._socket.close()

    __del__ = close

    def _broken(self, error: CallFailure | NotUnderstood) -> CallFailure | NotUnderstood:
        """The same error; whoever comes later is told that nothing is sent over this connection any more."""
        self._failed = CallFailure(UNAVAILABLE, CLOSED, unsent=True)
        return error

    # While the connection is made nothing has been asked, and what goes wrong is told by whoever asks.

    def _make(self) -> None:
        try:
            self._connect()
        except TimeoutError:
            self._failed = CallFailure(DEADLINE_EXCEEDED, 'not connected', unsent=True)
        except socket.gaierror as error:
            self._failed = CallFailure(UNAVAILABLE, f'{NO_ADDRESS} for {self.endpoint}: {error.strerror}', unsent=True)
        except Exception as error:
            words = self._words(error)
            # gRPC knows more words for what TLS says, and takes names of a certificate that ssl does not.
            understood = CallFailure(UNAVAILABLE, NOT_CONNECTED + words, unsent=True) if words else None
            self._failed = understood or NotUnderstood(str(error), unsent=True)

    def _words(self, error: Exception) -> str:
        """Say in gRPC's words, or in ours, why no connection came of it, '' where it may mean more than one thing."""
        if self.http.ends:
            return CLOSED
        if isinstance(error, ssl.SSLCertVerificationError):
            failure = tls_failure(error)
            return SENTENCES[failure] if failure in _CERTAIN else ''
        if isinstance(error, ConnectionRefusedError) or (isinstance(error, OSError) and error.errno in _NO_WAY):
            return f'Failed to connect to remote host: {error.strerror}'
        if isinstance(error, ssl.SSLEOFError | ConnectionError):
            # After the handshake it may be our certificate that is not taken.
            return CLOSED if not self._is_secure else '' if isinstance(self._socket, ssl.SSLSocket) else HUNG_UP
        return ''

    def _connect(self) -> None:
        until = time.monotonic() + 2 * self._config.timeout
        host, _, port = self.endpoint.rpartition(':')
        host = host.strip('[]')
        # As bytes: of text Python would look whether it is written in another alphabet, and load what that takes.
        where = host.encode() if host.isascii() else host
        made = connection_to(where, int(port), until - time.monotonic(), self._patience)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = made
        if self._is_secure:
            self._socket = _context(self._config).wrap_socket(made, server_hostname=where)
            if self._socket.selected_alpn_protocol() != 'h2':
                raise ValueError('it does not speak HTTP/2')
        self.http.initiate_connection()
        self.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW, SettingCodes.ENABLE_PUSH: 0})
        self.http.increment_flow_control_window(WINDOW)
        self.send(until)
        # Whoever does not take our certificate says so only now, and nothing has been asked yet.
        while not any(isinstance(each, RemoteSettingsChanged) for each in self.receive(until)):
            in_time(until)
        if self._closed:
            self._socket.close()

    @property
    def _is_secure(self) -> bool:
        return self._config.ca_cert is not None or self._config.cert_cert is not None

    def _look(self, until: float) -> None:
        """See whether the connection has ended since it was used."""
        try:
            while self.receive(time.monotonic()):
                in_time(until)
        except TimeoutError:
            pass
        except (OSError, H2Error):
            self._broken(CallFailure(UNAVAILABLE, CLOSED))


class Stream:
    """One stream of a connection, which is the caller's turn: what was said to us over it, as far as it has come.

    `headers` are those of the answer and of its end. OSError and H2Error: the connection is of no use any more.
    """

    def __init__(self, transport: Transport, headers: Sequence[tuple[str, str]], longest: int) -> None:
        """`longest` is how many bytes may wait in `body`: CallFailure for more."""
        self._transport, self._http, self._longest = transport, transport.http, longest
        self._number = self._http.get_next_available_stream_id()
        self._http.send_headers(self._number, headers)
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_over = False

    def send(self, data: bytes, until: float, ends: bool) -> None:
        """Say this, as the last of it or not. What comes meanwhile is taken. TimeoutError, OSError, CallFailure."""
        rest = memoryview(data)
        while True:
            fits = min(self._http.local_flow_control_window(self._number), self._http.max_outbound_frame_size)
            if fits >= len(rest):
                break
            if fits > 0:
                self._http.send_data(self._number, rest[:fits].tobytes())
                rest = rest[fits:]
                continue
            in_time(until)
            self._transport.send(until)
            self.receive(until)
            if self.is_over:  # it has heard enough
                return
        self._http.send_data(self._number, rest.tobytes(), end_stream=ends)
        self._transport.send(until)

    def receive(self, until: float) -> None:
        """Take what comes next. TimeoutError, OSError, CallFailure."""
        for each in self._transport.receive(until):
            if isinstance(each, ConnectionTerminated) and (each.last_stream_id or 0) < self._number:
                raise CallFailure(UNAVAILABLE, CLOSED)
            if getattr(each, 'stream_id', None) != self._number:
                continue
            if isinstance(each, ResponseReceived | TrailersReceived):
                self.headers |= {str(name, 'latin-1'): str(value, 'latin-1') for name, value in each.headers}
            elif isinstance(each, DataReceived):
                self.body += each.data
                if len(self.body) > self._longest:
                    self.reset()
                    raise too_long(len(self.body), self._longest)
                self._http.acknowledge_received_data(each.flow_controlled_length, self._number)
            elif isinstance(each, StreamReset):
                # Of what was too long to be sent whole it has said already what it thinks.
                if 'grpc-status' not in self.headers:
                    raise CallFailure(UNAVAILABLE, 'Stream removed')
                self.is_over = True
            elif isinstance(each, StreamEnded):
                self.is_over = True
        self._transport.send(max(until, time.monotonic() + 1))

    def reset(self) -> None:
        """Want to hear no more of it. Never raises: whoever comes next sees what is left of the connection."""
        with suppress(OSError, H2Error):
            self._http.reset_stream(self._number)
            self._transport.send(time.monotonic())


def too_long(length: int, longest: int) -> CallFailure:
    """What is raised of an answer of so many bytes, in gRPC's words."""
    return CallFailure(RESOURCE_EXHAUSTED, f'CLIENT: Received message larger than max ({length} vs. {longest})')


def in_time(until: float) -> None:
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
    context.hostname_checks_common_name = False
    context.set_alpn_protocols(['h2'])
    if config.ca_cert is not None:
        context.load_verify_locations(config.ca_cert)
    else:
        context.load_default_certs()
    if config.cert_cert is not None:
        context.load_cert_chain(config.cert_cert, config.cert_key)
    return context
