"""A client of one etcd member: gRPC over one HTTP/2 connection by h2.

grpc itself is slow to load and large. Deadlines are of the monotonic clock.
https://www.rfc-editor.org/rfc/rfc9113 and https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import H2Error
from h2.settings import SettingCodes

from ecomp.conf import EtcdConfig, connect_tcp
from ecomp.store import messages

if TYPE_CHECKING:  # it is slow to load, and needed only for TLS
    import ssl

# Bytes that a member may send before we acknowledge them.
WINDOW_BYTES = 4 * 1024**2
READ_BYTES = 65536
# Seconds that a new connection may take before the next endpoint is tried. A member that hangs accepts connections.
NEXT_MEMBER_SECONDS = 0.3
# Details of a call that failed because its connection ended.
CONNECTION_CLOSED = 'Socket closed'
NO_HTTP2 = 'it does not speak HTTP/2'
_EXPECTS_TLS = 'it may expect TLS, with ca_cert, cert_cert and cert_key'
# Maximum bytes of an answer; pages and watches stay below it, see ecomp.store.connection.
MAX_ANSWER_BYTES = 64 * 1024**2
# Seconds of silence before a ping, and until its answer. etcd closes a connection that pings more often than every
# five seconds (--grpc-keepalive-min-time). A frozen member is noticed within 15, with the list that follows.
PING_AFTER_SECONDS = 5.5
PING_ANSWER_SECONDS = 2.5
# gRPC's codes by number.
GRPC_CODES = (
    *('OK', 'CANCELLED', 'UNKNOWN', 'INVALID_ARGUMENT', 'DEADLINE_EXCEEDED', 'NOT_FOUND', 'ALREADY_EXISTS'),
    *('PERMISSION_DENIED', 'RESOURCE_EXHAUSTED', 'FAILED_PRECONDITION', 'ABORTED', 'OUT_OF_RANGE', 'UNIMPLEMENTED'),
    *('INTERNAL', 'UNAVAILABLE', 'DATA_LOSS', 'UNAUTHENTICATED'),
)
MALFORMED_ANSWER = 'its answer is not one gRPC message'


class _Http2(H2Connection):
    """h2's client connection, whose `is_ending` is set when the member sends GOAWAY."""

    # Closed streams that are remembered, for late frames: h2's own 65,536 let an idle process grow by ten megabytes.
    MAX_CLOSED_STREAMS = 256

    def __init__(self) -> None:
        super().__init__(H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False))
        self.is_ending = False

    def _receive_goaway_frame(self, frame: Any) -> Any:
        # After GOAWAY h2 raises an error for all that still arrives, such as a ping, and drops the same bytes' frames.
        self.is_ending = True
        return super()._receive_goaway_frame(frame)


class Transport:
    """One connection to one endpoint, made in its own thread, and used by one thread at a time."""

    def __init__(self, config: EtcdConfig, endpoint: str) -> None:
        self._socket: socket.socket | None = None
        self._is_closed = False
        # What a read raises while nothing has arrived.
        self._no_data_errors: tuple[type[OSError], ...] = (BlockingIOError,)
        self.config = config
        self.endpoint = endpoint
        self._is_secure = config.ca_cert is not None or config.cert_cert is not None
        self.scheme = 'https' if self._is_secure else 'http'
        self._connect_timeout = config.timeout / len(config.endpoints)
        has_others = len(config.endpoints) > 1
        self._patience_seconds = min(NEXT_MEMBER_SECONDS, self._connect_timeout) if has_others else config.timeout
        for path in filter(None, (config.ca_cert, config.cert_cert, config.cert_key)):
            with open(path, 'rb') as file:
                if not file.read(1):
                    raise OSError(errno.ENODATA, 'is empty', str(path))
        self._reservation = threading.Lock()
        self.http = _Http2()
        self._failure: messages.CallFailure | None = None
        self._connect_thread = threading.Thread(target=self._try_connect, name='etcd', daemon=True)
        self._connect_thread.start()

    @contextmanager
    def reserve(self, deadline: float) -> Iterator[None]:
        """Reserve the connection for this thread, and wait until `deadline` for it to be usable.

        If the config has other endpoints, the connection has to be made within NEXT_MEMBER_SECONDS.

        Raises:
            CallFailure: no connection is usable (then `unsent` is True), or the body raised an OSError or H2Error.
        """
        if not self._reservation.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise messages.CallFailure(messages.DEADLINE_EXCEEDED, 'another thread uses the connection', unsent=True)
        try:
            self._connect_thread.join(max(min(deadline - time.monotonic(), self._patience_seconds), 0))
            if self._connect_thread.is_alive():
                raise messages.CallFailure(messages.DEADLINE_EXCEEDED, messages.CONNECTING, unsent=True)
            if self._failure is None:
                self._notice_end(deadline)
            if self._failure is not None:
                raise copy(self._failure)  # a copy: the traceback would refer to this frame and so keep the socket open
            yield
        except OSError as error:
            self._mark_broken()
            raise messages.CallFailure(messages.UNAVAILABLE, CONNECTION_CLOSED) from error
        except H2Error as error:
            why = CONNECTION_CLOSED if self.http.is_ending else f'{NO_HTTP2}: {error}'
            self._mark_broken()
            raise messages.CallFailure(messages.UNAVAILABLE, why) from error
        finally:
            self._reservation.release()

    def send(self, deadline: float) -> None:
        """Send what h2 has queued, or raise an error after which the connection is unusable."""
        data = self.http.data_to_send()
        if data:
            assert self._socket is not None
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                self._socket.sendall(data)
            except TimeoutError:
                # A part may have been sent, and nothing else makes sense after it.
                self._mark_broken()
                raise

    def receive(self, deadline: float) -> list[Any]:
        """Return the next events and send h2's replies to them.

        After `deadline` it returns what has arrived. If nothing has, it raises TimeoutError.
        """
        assert self._socket is not None
        seconds = deadline - time.monotonic()
        self._socket.settimeout(seconds if seconds > 0 else 0.0)
        try:
            data = self._socket.recv(READ_BYTES)
        except self._no_data_errors:
            raise TimeoutError from None
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, 'the member closed the connection')
        received = self.http.receive_data(data)
        for event in received:
            if isinstance(event, events.ConnectionTerminated):
                self._mark_broken()
        self.send(max(deadline, time.monotonic() + 1))
        return received

    def shut_down(self) -> None:
        """Shut the connection down, from any thread, and wake up a thread that waits for data."""
        self._is_closed = True
        if self._socket is not None:
            with suppress(OSError):  # already closed
                # Not the shutdown of TLS, which would interfere with the thread that reads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, which no other thread may be using."""
        self._is_closed = True
        if self._socket is not None:
            self._socket.close()

    __del__ = close

    def _mark_broken(self) -> None:
        self._failure = messages.CallFailure(messages.UNAVAILABLE, CONNECTION_CLOSED, unsent=True)

    def _try_connect(self) -> None:
        try:
            self._connect()
        except TimeoutError:
            self._failure = messages.CallFailure(messages.DEADLINE_EXCEEDED, 'not connected', unsent=True)
        except socket.gaierror as error:
            why = f'DNS resolution failed for {self.endpoint}: {error.strerror}'
            self._failure = messages.CallFailure(messages.UNAVAILABLE, why, unsent=True)
        except Exception as error:
            self._failure = self._make_connect_failure(error)

    def _make_connect_failure(self, error: Exception) -> messages.CallFailure:
        failure = None
        if self._socket is None and isinstance(error, OSError):
            why = f'Failed to connect to remote host: {error.strerror or error}'
        elif isinstance(error, H2Error) and not self.http.is_ending:
            why = NO_HTTP2 if self._is_secure else f'{NO_HTTP2} ({_EXPECTS_TLS})'
        elif self._is_secure:
            import ssl

            from ecomp.tls import ETCD_SENTENCES, TlsFailure, classify_tls_error

            failure = classify_tls_error(error) if isinstance(error, ssl.SSLError) else None
            if self.http.is_ending or isinstance(error, ssl.SSLEOFError | ConnectionError):
                is_encrypted = isinstance(self._socket, ssl.SSLSocket)
                why = CONNECTION_CLOSED if is_encrypted else ETCD_SENTENCES[TlsFailure.HUNG_UP]
            else:
                why = ETCD_SENTENCES[failure] if failure else str(error)
        elif self.http.is_ending or isinstance(error, ConnectionError):
            why = f'it closed the connection (if this persists, {_EXPECTS_TLS})'
        else:
            why = str(error)
        return messages.CallFailure(messages.UNAVAILABLE, why, True, failure)

    def _connect(self) -> None:
        deadline = time.monotonic() + 2 * self.config.timeout
        host, _, port = self.endpoint.rpartition(':')
        host = host.strip('[]')
        # As bytes: for text Python would load its IDNA codec.
        name = host.encode() if host.isascii() else host
        sock = connect_tcp(name, int(port), deadline - time.monotonic(), self._connect_timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        if self._is_secure:
            import ssl

            self._no_data_errors += (ssl.SSLWantReadError,)
            self._socket = _make_tls_context(self.config).wrap_socket(sock, server_hostname=name)
            if self._socket.selected_alpn_protocol() != 'h2':
                raise ValueError(NO_HTTP2)
        self.http.initiate_connection()
        self.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES, SettingCodes.ENABLE_PUSH: 0})
        self.http.increment_flow_control_window(WINDOW_BYTES)
        # A member that hung up may have sent its reason, which is still to be read.
        with suppress(OSError):
            self.send(deadline)
        # A member that rejects our certificate reports that only now, and no request has been sent yet.
        while not any(isinstance(event, events.RemoteSettingsChanged) for event in self.receive(deadline)):
            require_time(deadline)
        if self._is_closed:
            self._socket.close()

    def _notice_end(self, deadline: float) -> None:
        """Read what has arrived since the last use, and notice if the connection has ended."""
        try:
            while self.receive(time.monotonic()):
                require_time(deadline)
        except TimeoutError:
            pass
        except (OSError, H2Error):
            self._mark_broken()


class Stream:
    """One stream of a reserved connection, whose `headers` include the answer's trailers."""

    def __init__(self, transport: Transport, headers: Sequence[tuple[str, str]], max_body_bytes: int) -> None:
        self._transport = transport
        self._http = transport.http
        self._max_body_bytes = max_body_bytes
        self._stream_id = self._http.get_next_available_stream_id()
        self._http.send_headers(self._stream_id, headers)
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_finished = False

    def send(self, data: bytes, deadline: float, end_stream: bool) -> None:
        """Send data, and process what arrives, until all is sent or the member finishes."""
        rest = memoryview(data)
        while True:
            room = min(self._http.local_flow_control_window(self._stream_id), self._http.max_outbound_frame_size)
            if room >= len(rest):
                break
            if room > 0:
                self._http.send_data(self._stream_id, rest[:room].tobytes())
                rest = rest[room:]
                continue
            require_time(deadline)
            self._transport.send(deadline)
            self.receive(deadline)
            if self.is_finished:
                return
        self._http.send_data(self._stream_id, rest.tobytes(), end_stream=end_stream)
        self._transport.send(deadline)

    def receive(self, deadline: float) -> None:
        """Process the next events, and set `is_finished` at the end of the stream."""
        for event in self._transport.receive(deadline):
            if isinstance(event, events.ConnectionTerminated) and (event.last_stream_id or 0) < self._stream_id:
                raise messages.CallFailure(messages.UNAVAILABLE, CONNECTION_CLOSED)
            if getattr(event, 'stream_id', None) != self._stream_id:
                continue
            if isinstance(event, events.ResponseReceived | events.TrailersReceived):
                self.headers |= {str(name, 'latin-1'): str(value, 'latin-1') for name, value in event.headers}
            elif isinstance(event, events.DataReceived):
                self.body += event.data
                if len(self.body) > self._max_body_bytes:
                    self.reset()
                    raise make_too_long_error(len(self.body), self._max_body_bytes)
                self._http.acknowledge_received_data(event.flow_controlled_length, self._stream_id)
            elif isinstance(event, events.StreamReset):
                # A member answers a request that is too long before it resets the stream.
                if 'grpc-status' not in self.headers:
                    raise messages.CallFailure(messages.UNAVAILABLE, 'Stream removed')
                self.is_finished = True
            elif isinstance(event, events.StreamEnded):
                self.is_finished = True
        self._transport.send(max(deadline, time.monotonic() + 1))

    def reset(self) -> None:
        """Cancel the stream, ignoring a broken connection, which the next call notices."""
        with suppress(OSError, H2Error):
            self._http.reset_stream(self._stream_id)
            self._transport.send(time.monotonic())


def make_too_long_error(length_bytes: int, limit_bytes: int) -> messages.CallFailure:
    details = f'CLIENT: Received message larger than max ({length_bytes} vs. {limit_bytes})'
    return messages.CallFailure(messages.RESOURCE_EXHAUSTED, details)


def require_time(deadline: float) -> None:
    """Raise TimeoutError from `deadline` on: a member may send for ever."""
    if time.monotonic() >= deadline:
        raise TimeoutError


def _make_tls_context(config: EtcdConfig) -> ssl.SSLContext:
    import ssl

    from ecomp.tls import ETCD_SENTENCES, TlsFailure

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


class EtcdMember(Transport):
    def call(self, request: messages.Request, timeout_seconds: float) -> Any:
        """Send the request once, and return its answer, or None if a KeepAlive has none."""
        deadline = time.monotonic() + timeout_seconds
        path, name = messages.find_method(request)
        token = [('token', request.token)] if isinstance(request, messages.AuthRequest) and request.token else []
        # A renewal is a stream of requests. `etcd grpc-proxy` cancels it if our side ends before it has answered.
        is_stream, message = isinstance(request, messages.KeepAlive), None
        with self.reserve(deadline):
            stream = Stream(self, [*_make_headers(self, path, deadline), *token], MAX_ANSWER_BYTES)
            try:
                stream.send(_frame_message(request.to_bytes()), deadline, end_stream=not is_stream)
                while not stream.is_finished:
                    require_time(deadline)
                    stream.receive(deadline)
                    if is_stream and (message := _take_message(stream.body)) is not None:
                        stream.reset()
                        return _parse_answer(name, message, deadline)
            except TimeoutError as error:
                stream.reset()
                raise messages.CallFailure(messages.DEADLINE_EXCEEDED, 'no answer in time') from error
        _require_success(stream)
        if not stream.body and is_stream:
            return None
        message = _take_message(stream.body)
        if message is None or stream.body:
            raise messages.CallFailure(messages.UNAVAILABLE, MALFORMED_ANSWER)
        return _parse_answer(name, message, deadline)

    def watch(
        self, requests: Sequence[messages.WatchCreate], duration_seconds: float, progress_seconds: float | None = None
    ) -> WatchStream:
        """Return the answers: iterating over them sends the watches, and may raise CallFailure."""
        return WatchStream(self, requests, duration_seconds, progress_seconds)


@dataclass
class WatchStream:
    """The answers to watches on one stream, as they arrive, to be iterated over once.

    With `progress_seconds` etcd is asked for its progress after each such silence. An empty answer is yielded after it
    and after whatever else arrives, so that the consumer can limit its wait for answers.
    Iteration ends when etcd ends the stream. It raises CallFailure: DEADLINE_EXCEEDED after `duration_seconds` (with
    `unsent`, no connection in time), UNAVAILABLE after cancel() or if the stream or a ping fails, or etcd's own code.
    """

    _transport: Transport
    _requests: Sequence[messages.WatchCreate]
    _duration_seconds: float
    _progress_seconds: float | None
    _is_finished: bool = False

    def __iter__(self) -> Iterator[Any]:
        start, timeout = time.monotonic(), self._transport.config.timeout
        path, name = messages.METHODS[messages.WatchCreate]
        deadline = start + self._duration_seconds
        try:
            with self._transport.reserve(start + timeout):
                stream = Stream(self._transport, _make_headers(self._transport, path, deadline), MAX_ANSWER_BYTES)
                for request in self._requests:
                    # The stream stays open on our side: etcd would end it too.
                    stream.send(_frame_message(request.to_bytes()), start + timeout, end_stream=False)
                try:
                    while not stream.is_finished:
                        self._receive(stream, deadline)
                        if self._progress_seconds is not None:
                            yield _parse_answer(name, b'', deadline)
                        while (message := _take_message(stream.body)) is not None:
                            require_time(deadline)
                            yield _parse_answer(name, message, deadline)
                except TimeoutError:
                    why = 'the watch has lasted as long as requested'
                    raise messages.CallFailure(messages.DEADLINE_EXCEEDED, why) from None
                finally:
                    if not stream.is_finished:
                        stream.reset()
            _require_success(stream)
        finally:
            self._is_finished = True

    def cancel(self) -> None:
        """Shut the stream and its connection down, from any thread, unless the iteration has ended."""
        if not self._is_finished:
            self._transport.shut_down()

    def _receive(self, stream: Stream, deadline: float) -> None:
        """Process the next events, or ask for progress after a silence of `progress_seconds`."""
        progress_seconds = self._progress_seconds
        for seconds in (PING_AFTER_SECONDS, PING_ANSWER_SECONDS) if progress_seconds is None else (progress_seconds,):
            require_time(deadline)
            with suppress(TimeoutError):
                stream.receive(min(time.monotonic() + seconds, deadline))
                return
            require_time(deadline)
            if seconds == PING_AFTER_SECONDS:
                self._transport.http.ping(b'is there')  # receive() gets the answer
                self._transport.send(time.monotonic() + PING_ANSWER_SECONDS)
        if progress_seconds is None:
            raise ConnectionError('the member does not answer')
        try:
            message = _frame_message(messages.WatchProgress().to_bytes())
            stream.send(message, time.monotonic() + self._transport.config.timeout, end_stream=False)
        except TimeoutError:  # a TimeoutError would mean that the time of the watch is over
            raise ConnectionError('the member accepts no data') from None


def _make_headers(transport: Transport, path: str, deadline: float) -> Sequence[tuple[str, str]]:
    timeout_ms = max(int((deadline - time.monotonic()) * 1000), 1)
    return (
        *((':method', 'POST'), (':path', path), (':scheme', transport.scheme), (':authority', transport.endpoint)),
        *(('te', 'trailers'), ('content-type', 'application/grpc'), ('grpc-timeout', f'{timeout_ms}m')),
        ('hasleader', 'true'),  # a member that is cut off would answer with stale data for ever
    )


def _frame_message(message: bytes) -> bytes:
    return b'\0' + len(message).to_bytes(4, 'big') + message


def _take_message(body: bytearray) -> bytes | None:
    """Remove the first message from `body` and return it, or None while it is incomplete."""
    if len(body) < 5:
        return None
    length = int.from_bytes(body[1:5], 'big')
    if body[0]:
        raise messages.CallFailure(messages.UNAVAILABLE, MALFORMED_ANSWER)
    if length > MAX_ANSWER_BYTES:
        raise make_too_long_error(length, MAX_ANSWER_BYTES)
    if len(body) < 5 + length:
        return None
    message = bytes(body[5 : 5 + length])
    del body[: 5 + length]
    return message


def _require_success(stream: Stream) -> None:
    headers = stream.headers
    if headers.get(':status') != '200' or not headers.get('content-type', '').startswith('application/grpc'):
        raise messages.CallFailure(messages.UNAVAILABLE, 'its answer is not gRPC')
    status = headers.get('grpc-status', '')
    if not (status.isascii() and status.isdecimal() and len(status) <= 2) or int(status) >= len(GRPC_CODES):
        raise messages.CallFailure(messages.UNAVAILABLE, 'its answer has no valid gRPC status')
    if int(status):
        from urllib.parse import unquote  # imported here: most calls do not need it

        raise messages.CallFailure(GRPC_CODES[int(status)], unquote(headers.get('grpc-message', '')))


def _parse_answer(name: str, message: bytes, deadline: float) -> Any:
    try:
        return messages.parse_answer(name, message, lambda: require_time(deadline))
    except TimeoutError as error:
        raise messages.CallFailure(messages.DEADLINE_EXCEEDED, 'its answer takes too long to parse') from error
    except ValueError as error:
        raise messages.CallFailure(messages.UNAVAILABLE, f'its answer is malformed: {error}') from error
