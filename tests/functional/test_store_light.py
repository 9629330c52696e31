"""The light way to etcd, where what answers is none: a read goes etcd3's way then, and a write's outcome is unknown."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived, StreamEnded
from h2.exceptions import H2Error

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, UnknownOutcome, Unreachable, UsageError
from ecomp.store.by_etcd3 import etcdrpc
from ecomp.store.client import Delete, Put, Store, Unchanged
from ecomp.store.connection import Connection
from ecomp.store.pages import TooLong
from tests.kit.listening import Listening
from tests.kit.servers import Etcd
from tests.kit.store_client import connected

pytestmark = pytest.mark.fast

GRPC = [(':status', '200'), ('content-type', 'application/grpc')]
DONE = [('grpc-status', '0'), ('grpc-message', '')]
KV = {'key': b'/x', 'value': b'y', 'mod_revision': 7, 'create_revision': 7}
FOUND = etcdrpc.RangeResponse(header={'revision': 7}, kvs=[KV], count=1).SerializeToString()


class Said(NamedTuple):
    """An answer: its headers, its body and its trailers."""

    headers: list[tuple[str, str]]
    body: bytes = b''
    trailers: list[tuple[str, str]] = []


def message(content: bytes, flag: int = 0, length: int | None = None) -> bytes:
    return bytes([flag]) + (len(content) if length is None else length).to_bytes(4, 'big') + content


GOOD = Said(GRPC, message(FOUND), DONE)
JUNK = {
    'a page': Said([(':status', '404'), ('content-type', 'text/html')], b'<p>not here'),
    'another content': Said([(':status', '200'), ('content-type', 'application/json')], b'{}', DONE),
    'no status': Said(GRPC, message(FOUND)),
    'a status that is none': Said(GRPC, message(FOUND), [('grpc-status', 'fine')]),
    'a status beyond all': Said(GRPC, message(FOUND), [('grpc-status', '99')]),
    'a status without an end': Said(GRPC, message(FOUND), [('grpc-status', '9' * 5000)]),
    'no message': Said(GRPC, b'', DONE),
    'half a message': Said(GRPC, message(FOUND, length=len(FOUND) + 5), DONE),
    'two messages': Said(GRPC, message(FOUND) + message(FOUND), DONE),
    'packed': Said(GRPC, message(FOUND, flag=1), DONE),
    'no protobuf': Said(GRPC, message(b'\x0a\xff\xff'), DONE),
}


class Answers(Listening):
    """Speaks HTTP/2, and says what it is told, the last of it again and again. `heard` are the paths it was asked."""

    def __init__(self, *says: Said) -> None:
        self._says = list(says)
        self.heard: list[str] = []
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        """See Listening."""
        http = H2Connection(H2Configuration(client_side=False, header_encoding='utf-8'))
        http.initiate_connection()
        with suppress(H2Error):
            connection.sendall(http.data_to_send())
            while data := connection.recv(65536):
                for each in http.receive_data(data):
                    if isinstance(each, RequestReceived):
                        self.heard.append(str(dict(each.headers)[':path']))
                    if isinstance(each, StreamEnded):
                        self._say(http, each.stream_id)
                connection.sendall(http.data_to_send())

    def _say(self, http: H2Connection, stream: int) -> None:
        said = self._says.pop(0) if len(self._says) > 1 else self._says[0]
        http.send_headers(stream, said.headers)
        http.send_data(stream, said.body, end_stream=not said.trailers)
        if said.trailers:
            http.send_headers(stream, said.trailers, end_stream=True)


@contextmanager
def answering(*says: Said) -> Iterator[tuple[Answers, Store]]:
    server = Answers(*says)
    store = Store(EtcdConfig((server.address,), timeout=3.0))
    try:
        yield server, store
    finally:
        store.close()
        server.close()


def test_a_good_answer_is_taken_as_it_is() -> None:
    with answering(GOOD) as (server, store):
        entry = store.get('/x')
        assert entry is not None
        assert (entry.value, entry.revision) == (b'y', 7)
        assert store._connection._light
    assert server.heard == ['/etcdserverpb.KV/Range']


@pytest.mark.parametrize('junk', JUNK.values(), ids=JUNK.keys())
def test_a_read_that_is_not_understood_goes_the_other_way(junk: Said) -> None:
    with answering(junk, GOOD) as (server, store):
        entry = store.get('/x')
        assert entry is not None
        assert entry.value == b'y'
        assert not store._connection._light
    assert server.heard == ['/etcdserverpb.KV/Range'] * 2


@pytest.mark.parametrize('junk', JUNK.values(), ids=JUNK.keys())
def test_a_write_that_is_not_understood_is_sent_once(junk: Said) -> None:
    with answering(junk, GOOD) as (server, store):
        with pytest.raises(UnknownOutcome, match=f'etcd at {server.address} cannot be reached'):
            store.commit([Unchanged('/x', 0)], [Put('/x', 'y')])
        assert server.heard == ['/etcdserverpb.KV/Txn']
        assert store.get('/x') is not None  # which reads back what became of it
        assert not store._connection._light


def test_an_answer_to_a_write_that_is_too_long_tells_nothing() -> None:
    with answering(Said(GRPC, message(FOUND, length=2**31), DONE)) as (server, store):
        with pytest.raises(UnknownOutcome):
            store.commit([Unchanged('/x', 0)], [Put('/x', 'y')])
        with pytest.raises(TooLong):
            store.get('/x')
        assert server.heard == ['/etcdserverpb.KV/Txn', '/etcdserverpb.KV/Range']


@pytest.mark.parametrize('error', [UsageError('no certificate'), TypeError('no messages'), RuntimeError('no thread')])
def test_what_keeps_the_other_way_from_being_gone_is_not_said_of_a_write(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connected(self: Connection, light: bool) -> Any:
        if not light:
            raise error
        return real(self, light)

    real = Connection._connected
    monkeypatch.setattr(Connection, '_connected', connected)
    with answering(JUNK['no status'], GOOD) as (_, store):
        with pytest.raises(UnknownOutcome):
            store.commit([Unchanged('/x', 0)], [Put('/x', 'y')])
        assert store.get('/x') is not None


def test_a_connection_that_has_ended_is_let_go_of(own_etcd: Etcd) -> None:
    """Without anybody who collects garbage, as in a command."""
    with connected(own_etcd.endpoint, light=True) as store:
        store.get('/x')
        before = len(os.listdir('/proc/self/fd'))
        gc.disable()
        try:
            for _ in range(20):
                store._connection.client._transport._socket.shutdown(socket.SHUT_RDWR)
                store.get('/x')
            assert len(os.listdir('/proc/self/fd')) <= before + 2
        finally:
            gc.enable()


@pytest.mark.parametrize('says', [b'HTTP/1.1 400 Bad Request\r\n\r\n', b'\0' * 100, b'', b'SSH-2.0-x\r\n'])
def test_what_speaks_something_else_was_sent_nothing(says: bytes) -> None:
    heard: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(says)
                    heard.append(connection.recv(65536))

    with socket.create_server(('127.0.0.1', 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        address = f'127.0.0.1:{listener.getsockname()[1]}'
        store = Store(EtcdConfig((address,), timeout=2.0))
        with pytest.raises(Unreachable, match=f'etcd at {address} cannot be reached'):
            store.commit([], [Put('/secret-key', 'x')])
        store.close()
        listener.shutdown(socket.SHUT_RDWR)
    assert heard
    assert not any(b'/secret-key' in each for each in heard)


def test_both_ways_say_the_same_of_what_etcd_refuses(etcd: Etcd, prefix: str) -> None:
    calls: tuple[Callable[[Store], Any], ...] = (
        lambda store: store.commit([], [Put(prefix + 'a', 'x', lease=1)]),
        lambda store: store.commit([], [Put(f'{prefix}{number}', 'x') for number in range(129)]),
        lambda store: store.commit([], [Put(prefix + 'a', 'x'), Delete(prefix + 'a')]),
        lambda store: store.commit([], [Put('', 'x')]),
    )
    said = []
    for light in (False, True):
        with connected(etcd.endpoint, light=light) as store:
            said.append([])
            for call in calls:
                with pytest.raises(EcompError) as caught:
                    call(store)
                said[-1].append(f'{type(caught.value).__name__}: {caught.value}')
            assert store._connection._light is light
    assert said[0] == said[1]
