"""One member of etcd, asked in gRPC's protocol over HTTP/2; without gRPC, which is slow to load and large.

One connection by h2, over which one stream after another is asked and answered, and watches.
https://www.rfc-editor.org/rfc/rfc9113 and https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
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

from ecomp.conf import EtcdConfig, connection_to
from ecomp.store.messages import (
    DEADLINE_EXCEEDED,
    METHODS,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    CallFailure,
    KeepAlive,
    Request,
    WatchCreate,
    WatchProgress,
    answer,
)
from ecomp.tls import ETCD_SENTENCES, TlsFailure, tls_failure

WINDOW = 4 * 1024**2
"""Bytes that a member may send before we have said that we took them."""
PIECE = 65536
"""Bytes that are read at once."""
CLOSED = 'Socket closed'
"""Why a call failed whose connection ended."""
NO_HTTP2 = 'it does not speak HTTP/2'
_EXPECTS_TLS = 'does it expect TLS, with ca_cert, cert_cert, cert_key?'


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
            check_certificate(path)
        self._turn = threading.Lock()
        self.http = _Http2()
        self._failed: CallFailure | None = None
        self._maker = threading.Thread(target=self._make, name='etcd', daemon=True)
        self._maker.start()

    @property
    def scheme(self) -> str:
        """`https` or `http`."""
        return 'https' if self._is_secure else 'http'

    @contextmanager
    def turn(self, until: float) -> Iterator[None]:
        """Have the connection to oneself, as soon as it is made; `until` when to wait, on the monotonic clock.

        CallFailure: also in place of an OSError or H2Error raised inside, after which it is of no use.
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
            why = CLOSED if self.http.ends else f'{NO_HTTP2}: {error}'
            raise self._broken(CallFailure(UNAVAILABLE, why)) from error
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

    def _broken(self, error: CallFailure) -> CallFailure:
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
            why = f'DNS resolution failed for {self.endpoint}: {error.strerror}'
            self._failed = CallFailure(UNAVAILABLE, why, unsent=True)
        except Exception as error:
            self._failed = CallFailure(UNAVAILABLE, self._reason(error), unsent=True)

    def _reason(self, error: Exception) -> str:
        """Say in plain words why no connection came of it."""
        if self._socket is None and isinstance(error, OSError):
            return f'Failed to connect to remote host: {error.strerror or error}'
        is_encrypted = isinstance(self._socket, ssl.SSLSocket)
        if self.http.ends or isinstance(error, ssl.SSLEOFError | ConnectionError):
            if not self._is_secure:
                return f'the connection was closed (if that stays so: {_EXPECTS_TLS})'
            return CLOSED if is_encrypted else ETCD_SENTENCES[TlsFailure.HUNG_UP]
        if isinstance(error, H2Error):
            return NO_HTTP2 if self._is_secure else f'{NO_HTTP2} ({_EXPECTS_TLS})'
        return ETCD_SENTENCES[tls_failure(error)] if isinstance(error, ssl.SSLError) else str(error)

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
                raise ValueError(NO_HTTP2)
        self.http.initiate_connection()
        self.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW, SettingCodes.ENABLE_PUSH: 0})
        self.http.increment_flow_control_window(WINDOW)
        with suppress(ssl.SSLEOFError, ConnectionError):  # who hung up may have said why: that is still to be read
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
    """What is raised of an answer of so many bytes."""
    return CallFailure(RESOURCE_EXHAUSTED, f'CLIENT: Received message larger than max ({length} vs. {longest})')


def in_time(until: float) -> None:
    """TimeoutError once it is too late: who never stops sending, and never answers, would be read for ever."""
    if time.monotonic() >= until:
        raise TimeoutError


def check_certificate(path: Path | None) -> None:
    """Raise OSError for a file that cannot be read, or has nothing in it."""
    if path is not None:
        with open(path, 'rb') as file:
            if not file.read(1):
                raise OSError(errno.ENODATA, 'is empty', str(path))


def _context(config: EtcdConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False
    context.set_alpn_protocols(['h2'])
    try:
        if config.ca_cert is not None:
            context.load_verify_locations(config.ca_cert)
        else:
            context.load_default_certs()
        if config.cert_cert is not None:
            context.load_cert_chain(config.cert_cert, config.cert_key)
    except ssl.SSLError as error:
        raise ValueError(ETCD_SENTENCES[TlsFailure.UNUSABLE_FILES]) from error
    return context


LONGEST = 64 * 1024**2
"""Bytes of an answer. A page or a watch is no longer: see ecomp.store.connection."""
SILENT, ANSWERED = 5.5, 2.5
"""Seconds without a word after which a member is asked whether it is there, and in which it is to say so.

etcd ends the connection of whoever asks more often than every five seconds (--grpc-keepalive-min-time). What is frozen
is noticed in 15: the list that comes then takes its time, too.
"""
CODES = (
    *('OK', 'CANCELLED', 'UNKNOWN', 'INVALID_ARGUMENT', DEADLINE_EXCEEDED, 'NOT_FOUND', 'ALREADY_EXISTS'),
    *('PERMISSION_DENIED', RESOURCE_EXHAUSTED, 'FAILED_PRECONDITION', 'ABORTED', 'OUT_OF_RANGE', 'UNIMPLEMENTED'),
    *('INTERNAL', UNAVAILABLE, 'DATA_LOSS', 'UNAUTHENTICATED'),
)
"""gRPC's codes, by their numbers."""
NO_MESSAGE = 'its answer is no message'


class Member:
    """One connection to one endpoint, begun at once. OSError for a certificate that cannot be read, or is empty.

    May be shared by threads, which have their turns; a watch is a turn, as long as it is read.
    """

    def __init__(self, config: EtcdConfig, endpoint: str) -> None:
        self._transport, self._timeout = Transport(config, endpoint), config.timeout

    def call(self, request: Request, limit: float) -> Any:
        """Return the answer; None for a stream that ends without one. CallFailure, also for what is no answer."""
        until = time.monotonic() + limit
        path, name = METHODS[type(request)]
        # A renewal is a stream of requests. `etcd grpc-proxy` cancels one whose end it sees before it has answered.
        is_stream, message = isinstance(request, KeepAlive), None
        with self._transport.turn(until):
            stream = Stream(self._transport, _headers(self._transport, path, until), LONGEST)
            try:
                stream.send(_framed(request.to_bytes()), until, ends=not is_stream)
                while not stream.is_over:
                    in_time(until)
                    stream.receive(until)
                    if is_stream and (message := _taken(stream.body)) is not None:
                        stream.reset()
                        return _read(name, message, until)
            except TimeoutError as error:
                stream.reset()
                raise CallFailure(DEADLINE_EXCEEDED, 'no answer in time') from error
        _check_end(stream)
        if not stream.body and is_stream:
            return None
        message = _taken(stream.body)
        if message is None or stream.body:
            raise CallFailure(UNAVAILABLE, NO_MESSAGE)
        return _read(name, message, until)

    def watch(self, wanted: Sequence[WatchCreate], seconds: float, asking: float | None = None) -> Watch:
        """What answers these, for so many seconds at most, and WatchProgress after each `asking` seconds of silence."""
        return Watch(self._transport, wanted, seconds, self._timeout, asking)

    def close(self) -> None:
        """Let the connection go."""
        self._transport.close()


class Watch:
    """The answers to watches that are asked for on one stream, as they come; for one loop over them.

    It ends where etcd ends the stream. CallFailure: DEADLINE_EXCEEDED and sent once its time is over.
    """

    def __init__(
        self, transport: Transport, wanted: Sequence[WatchCreate], seconds: float, timeout: float, asking: float | None
    ) -> None:
        """`timeout` is how many seconds the connection may take to be made, and the watches to be asked for."""
        self._transport, self._wanted = transport, wanted
        self._seconds, self._timeout, self._asking = seconds, timeout, asking
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        began = time.monotonic()
        path, name = METHODS[WatchCreate]
        until = began + self._seconds
        try:
            with self._transport.turn(began + self._timeout):
                stream = Stream(self._transport, _headers(self._transport, path, until), LONGEST)
                for each in self._wanted:
                    # The stream stays open on our side: etcd would end it with us.
                    stream.send(_framed(each.to_bytes()), began + self._timeout, ends=False)
                try:
                    while not stream.is_over:
                        self._receive(stream, until)
                        while (message := _taken(stream.body)) is not None:
                            in_time(until)
                            yield _read(name, message, until)
                except TimeoutError:
                    raise CallFailure(DEADLINE_EXCEEDED, 'its time is over') from None
                finally:
                    if not stream.is_over:
                        stream.reset()
            _check_end(stream)
        finally:
            self._is_over = True

    def cancel(self) -> None:
        """End it, from any thread, and the connection with it unless it has ended already."""
        if not self._is_over:
            self._transport.cut()

    def _receive(self, stream: Stream, until: float) -> None:
        """Take what comes next; TimeoutError once it is too late.

        A member that is not there any more is found out: nothing else would tell.
        """
        in_time(until)
        for wait, asks in ((SILENT, True), (ANSWERED, False)):
            if self._hears(stream, min(time.monotonic() + wait, until)):
                return
            in_time(until)
            if asks:
                self._transport.ping(time.monotonic() + ANSWERED)
        raise ConnectionError('it does not answer')

    def _hears(self, stream: Stream, until: float) -> bool:
        """Take what comes next, and ask meanwhile how far was told; False where nothing comes until then."""
        while True:
            now = time.monotonic()
            at = until if self._asking is None else min(now + self._asking, until)
            try:
                stream.receive(at)
                return True
            except TimeoutError:
                if at >= until:
                    return False
            try:
                stream.send(_framed(WatchProgress().to_bytes()), now + self._timeout, ends=False)
            except TimeoutError:  # which is not that the time of the watch is over
                raise ConnectionError('it takes nothing') from None


def _headers(transport: Transport, path: str, until: float) -> Sequence[tuple[str, str]]:
    left = max(int((until - time.monotonic()) * 1000), 1)
    return (
        *((':method', 'POST'), (':path', path), (':scheme', transport.scheme), (':authority', transport.endpoint)),
        *(('te', 'trailers'), ('content-type', 'application/grpc'), ('grpc-timeout', f'{left}m')),
        ('hasleader', 'true'),
    )


def _framed(message: bytes) -> bytes:
    """A message as gRPC sends it: not compressed, and how long it is."""
    return b'\0' + len(message).to_bytes(4, 'big') + message


def _taken(body: bytearray) -> bytes | None:
    """Take the first message out of what was said; None: not all of it is there. CallFailure."""
    if len(body) < 5:
        return None
    length = int.from_bytes(body[1:5], 'big')
    if body[0]:
        raise CallFailure(UNAVAILABLE, NO_MESSAGE)
    if length > LONGEST:
        raise too_long(length, LONGEST)
    if len(body) < 5 + length:
        return None
    message = bytes(body[5 : 5 + length])
    del body[: 5 + length]
    return message


def _check_end(stream: Stream) -> None:
    """Raise CallFailure where etcd says why it did not do it, and where it does not say that it did."""
    told = stream.headers
    if told.get(':status') != '200' or not told.get('content-type', '').startswith('application/grpc'):
        raise CallFailure(UNAVAILABLE, 'it does not answer as etcd does')
    status = told.get('grpc-status', '')
    if not (status.isascii() and status.isdecimal() and len(status) <= 2) or int(status) >= len(CODES):
        raise CallFailure(UNAVAILABLE, 'it does not say what became of the call')
    if int(status):
        from urllib.parse import unquote  # most calls need none

        raise CallFailure(CODES[int(status)], unquote(told.get('grpc-message', '')))


def _read(name: str, message: bytes, until: float) -> Any:
    try:
        return answer(name, message, lambda: in_time(until))
    except TimeoutError as error:
        raise CallFailure(DEADLINE_EXCEEDED, 'its answer is too long to be read in time') from error
    except ValueError as error:
        raise CallFailure(UNAVAILABLE, f'its answer cannot be read: {error}') from error
