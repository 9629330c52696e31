"""The way to a member of etcd that etcd3 and gRPC have: for all there is, and slow to load."""

from __future__ import annotations

import errno
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

import etcd3
import grpc
from etcd3 import etcdrpc
from google.protobuf.internal import api_implementation
from google.protobuf.unknown_fields import UnknownFieldSet

from ecomp.conf import EtcdConfig
from ecomp.errors import UsageError
from ecomp.store.messages import METHODS, KeepAlive, Request, WatchCreate, WatchProgress
from ecomp.store.reasons import CallFailure

METADATA = (('hasleader', 'true'),)

LONGEST = 64 * 1024**2
"""Bytes of an answer. A page or a watch is no longer: see ecomp.store.pages."""

FRAGMENT = 7
"""The number of a WatchResponse's field that says that it is not all of the answer."""

# A frozen peer is noticed in 10 s only with all four; etcd itself cuts clients that ping faster.
KEEPALIVE = (
    ('grpc.keepalive_time_ms', 10_000),
    ('grpc.keepalive_timeout_ms', 5_000),
    ('grpc.http2.ping_timeout_ms', 5_000),
    ('grpc.http2.max_pings_without_data', 0),
    ('grpc.max_receive_message_length', LONGEST),
    # http_proxy is for the way out of the building; etcd is in it.
    ('grpc.enable_http_proxy', 0),
    ('grpc.initial_reconnect_backoff_ms', 200),
    ('grpc.max_reconnect_backoff_ms', 3_000),
)

PUBLIC = Path('the authorities that gRPC knows')
"""In place of ca_cert where there is none: etcd3 speaks in clear text to an etcd without one, certificates or not."""


class Member(etcd3.Etcd3Client):  # type: ignore[misc]
    """etcd3's client of one endpoint, by its channel alone. OSError for a certificate that cannot be read, or is empty.

    gRPC would end the whole process over an empty one.
    """

    def __init__(self, config: EtcdConfig, endpoint: str) -> None:
        if api_implementation.Type() != 'python':
            raise UsageError(
                'etcd3 needs PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python, and it is set to '
                f'{api_implementation.Type()!r}: unset it'
            )
        host, _, port = endpoint.rpartition(':')
        super().__init__(
            host=host,
            port=port,
            ca_cert=config.ca_cert or (PUBLIC if config.cert_cert else None),
            cert_key=config.cert_key,
            cert_cert=config.cert_cert,
            timeout=config.timeout,
            grpc_options=[*KEEPALIVE, ('grpc.min_reconnect_backoff_ms', _longest(config)), *config.grpc_options],
        )

    def call(self, request: Request, limit: float) -> Any:
        """The answer, as etcd3's generated code reads it; None for a stream that ends without one. CallFailure."""
        path, answer = METHODS[type(request)]
        read = getattr(etcdrpc, answer).FromString
        how = {'request_serializer': type(request).to_bytes, 'response_deserializer': read}
        with failures():
            if isinstance(request, KeepAlive):
                stream = self.channel.stream_stream(path, **how)
                return next(iter(stream(iter((request,)), limit, metadata=METADATA)), None)
            return self.channel.unary_unary(path, **how)(request, limit, metadata=METADATA)

    def watch(self, wanted: Sequence[WatchCreate], seconds: float, asking: float | None = None) -> Watch:
        """What answers these, for so many seconds at most, and WatchProgress every `asking` seconds."""
        return Watch(self.channel, wanted, seconds, asking)

    def close(self) -> None:
        """Let the connection go."""
        self.channel.close()  # not etcd3's close(): it ends the watcher thread, and we never start one

    def _get_secure_creds(self, ca_cert: Path, cert_key: Path | None = None, cert_cert: Path | None = None) -> Any:
        given = (None if ca_cert is PUBLIC else ca_cert, cert_key, cert_cert)
        files = [None if each is None else (each, each.read_bytes()) for each in given]
        for each in files:
            if each is not None and not each[1]:
                raise OSError(errno.ENODATA, 'is empty', str(each[0]))
        return grpc.ssl_channel_credentials(*(each and each[1] for each in files))


def _longest(config: EtcdConfig) -> int:
    """Milliseconds that a connection may take to be made."""
    members = len(config.endpoints)
    # One that is off is not to use up the time of those that are there, with which there is time for a third; and one
    # that is slow is to have some. Of one alone a call's own limit ends it.
    return 10_000 if members == 1 else max(int(config.timeout * 400), 1)


class Watch:
    """The answers to watches that are asked for on one stream, as they come; for one loop over them.

    It ends where etcd ends the stream. CallFailure, DEADLINE_EXCEEDED once its time is over.
    """

    def __init__(
        self, channel: grpc.Channel, wanted: Sequence[WatchCreate], seconds: float, asking: float | None
    ) -> None:
        # Until None comes the stream stays open on our side: etcd would end it with us.
        self._asked: queue.SimpleQueue[WatchCreate | None] = queue.SimpleQueue()
        for each in wanted:
            self._asked.put(each)
        path, answer = METHODS[WatchCreate]
        read = getattr(etcdrpc, answer).FromString
        how = {'request_serializer': methodcaller('to_bytes'), 'response_deserializer': read}
        stream = channel.stream_stream(path, **how)
        self._asking = asking
        self._call = stream(self._requests(), seconds, metadata=METADATA)

    def __iter__(self) -> Iterator[Any]:
        with failures():
            try:
                yield from map(_Reply, self._call)
            finally:
                self.cancel()

    def cancel(self) -> None:
        """End it, from any thread."""
        self._asked.put(None)
        self._call.cancel()

    def _requests(self) -> Iterator[WatchCreate | WatchProgress]:
        while True:
            try:
                request = self._asked.get(timeout=self._asking)
            except queue.Empty:
                yield WatchProgress()
                continue
            if request is None:
                return
            yield request


class _Reply:
    """A WatchResponse of etcd3's code, with the field `fragment`, which is younger than that."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.fragment = any(each.field_number == FRAGMENT and each.data for each in UnknownFieldSet(message))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


@contextmanager
def failures() -> Iterator[None]:
    """Have what gRPC raises be a CallFailure."""
    try:
        yield
    except grpc.RpcError as error:
        raise CallFailure(error.code().name, error.details()) from error
