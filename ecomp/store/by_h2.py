"""One member of etcd, asked in gRPC's protocol over HTTP/2; without gRPC, which is slow to load and large.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. For calls that are answered once, one after another,
and for watches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ecomp.conf import EtcdConfig
from ecomp.store.messages import METHODS, KeepAlive, Request, WatchCreate, WatchProgress, answer
from ecomp.store.reasons import DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE, CallFailure
from ecomp.store.transport import Stream, Transport, in_time, too_long

LONGEST = 64 * 1024**2
"""Bytes of an answer. A page or a watch is no longer: see ecomp.store.pages."""
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
        self,
        transport: Transport,
        wanted: Sequence[WatchCreate],
        seconds: float,
        timeout: float,
        asking: float | None,
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
