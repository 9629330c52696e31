"""Answers that etcd would not give: a read is asked once more, a write's outcome is unknown, and the error says why."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived, StreamEnded
from h2.exceptions import H2Error

from ecomp.conf import EtcdConfig
from ecomp.errors import UnknownOutcome, Unreachable
from ecomp.store.client import Put, Store, Unchanged
from ecomp.store.connection import TooLong
from ecomp.store.messages import UNAVAILABLE, CallFailure, WatchCreate
from ecomp.store.roles import etcdrpc
from tests.kit.listening import Listening
from tests.kit.servers import Etcd
from tests.kit.store_client import connected, read_entry

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
OTHER, SILENT, NONE = 'does not answer as etcd does', 'does not say what became of the call', 'answer is no message'
JUNK = {
    'a page': (OTHER, Said([(':status', '404'), ('content-type', 'text/html')], b'<p>not here')),
    'another content': (OTHER, Said([(':status', '200'), ('content-type', 'application/json')], b'{}', DONE)),
    'no status': (SILENT, Said(GRPC, message(FOUND))),
    'a status that is none': (SILENT, Said(GRPC, message(FOUND), [('grpc-status', 'fine')])),
    'a status beyond all': (SILENT, Said(GRPC, message(FOUND), [('grpc-status', '99')])),
    'a status without an end': (SILENT, Said(GRPC, message(FOUND), [('grpc-status', '9' * 5000)])),
    'no message': (NONE, Said(GRPC, b'', DONE)),
    'half a message': (NONE, Said(GRPC, message(FOUND, length=len(FOUND) + 5), DONE)),
    'two messages': (NONE, Said(GRPC, message(FOUND) + message(FOUND), DONE)),
    'packed': (NONE, Said(GRPC, message(FOUND, flag=1), DONE)),
    'no protobuf': ('answer cannot be read: ', Said(GRPC, message(b'\x0a\xff\xff'), DONE)),
}
each_junk = pytest.mark.parametrize(('why', 'junk'), JUNK.values(), ids=JUNK.keys())


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
                        if self.heard[-1].endswith('/Watch'):  # the client never ends that
                            self._say(http, each.stream_id)
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
    with closing(Store(EtcdConfig((server.address,), timeout=3.0))) as store:
        yield server, store
        server.close()


def test_a_good_answer_is_taken_as_it_is() -> None:
    with answering(GOOD) as (server, store):
        entry = read_entry(store, '/x')
        assert (entry.value, entry.revision) == (b'y', 7)
    assert server.heard == ['/etcdserverpb.KV/Range']


@each_junk
def test_read_is_asked_once_more(why: str, junk: Said) -> None:  # noqa: ARG001
    with answering(junk, GOOD) as (server, store):
        assert read_entry(store, '/x').value == b'y'
    assert server.heard == ['/etcdserverpb.KV/Range'] * 2


@each_junk
def test_read_that_is_never_answered_says_why(why: str, junk: Said) -> None:
    with answering(junk) as (server, store):
        with pytest.raises(Unreachable, match=f'^etcd at {server.address} cannot be reached: it.* {why}') as caught:
            store.get('/x')
        assert '\n' not in str(caught.value)
        assert type(caught.value) is Unreachable


@each_junk
def test_write_is_sent_once(why: str, junk: Said) -> None:
    with answering(junk, GOOD) as (server, store):
        with pytest.raises(UnknownOutcome, match=f'^etcd at {server.address} cannot be reached: it.* {why}'):
            store.commit([Unchanged('/x', 0)], [Put('/x', 'y')])
        assert server.heard == ['/etcdserverpb.KV/Txn']
        assert store.get('/x') is not None  # which reads back what became of it


def test_member_that_is_no_etcd_is_passed_over(etcd: Etcd, prefix: str) -> None:
    etcd.put(prefix, 'there')
    server = Answers(JUNK['a page'][1])
    with closing(Store(EtcdConfig((server.address, etcd.endpoint), timeout=3.0))) as store:
        assert read_entry(store, prefix).value == b'there'
        server.close()
    assert server.heard == ['/etcdserverpb.KV/Range']


def test_lease_is_not_revoked_and_the_error_says_why() -> None:
    with (
        answering(JUNK['two messages'][1]) as (_, store),
        pytest.raises(Unreachable, match=f'cannot be reached: its {NONE}'),
    ):
        store.revoke(1)


def test_watch_breaks() -> None:
    with answering(JUNK['packed'][1]) as (_, store), pytest.raises(CallFailure) as caught:
        list(store.watch([WatchCreate(b'/', b'0', 1)], 5.0))
    assert caught.value.code == UNAVAILABLE


def test_an_answer_to_a_write_that_is_too_long_tells_nothing() -> None:
    with answering(Said(GRPC, message(FOUND, length=2**31), DONE)) as (server, store):
        with pytest.raises(UnknownOutcome):
            store.commit([Unchanged('/x', 0)], [Put('/x', 'y')])
        with pytest.raises(TooLong):
            store.get('/x')
        assert server.heard == ['/etcdserverpb.KV/Txn', '/etcdserverpb.KV/Range']


def test_a_connection_that_has_ended_is_let_go_of(own_etcd: Etcd) -> None:
    """Without anybody who collects garbage, as in a command."""
    with connected(own_etcd.endpoint) as store:
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


@pytest.mark.parametrize(
    ('says', 'why'),
    [
        (b'HTTP/1.1 400 Bad Request\r\n\r\n', 'the connection was closed (if that stays so: does it expect TLS, with'),
        (b'\0' * 100, 'does not speak HTTP/2 (does it expect TLS, with'),
        (b'', 'the connection was closed (if that stays so: does it expect TLS, with'),
        (b'SSH-2.0-x\r\n', 'the connection was closed (if that stays so: does it expect TLS, with'),
    ],
)
def test_what_speaks_something_else_was_sent_nothing(says: bytes, why: str) -> None:
    heard: list[bytes] = []

    class Other(Listening):
        def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
            connection.sendall(says)
            heard.append(connection.recv(65536))

    with closing(Other()) as other, closing(Store(EtcdConfig((other.address,), timeout=2.0))) as store:
        with pytest.raises(Unreachable, match=f'etcd at {other.address} cannot be reached: ') as caught:
            store.commit([], [Put('/secret-key', 'x')])
        assert why in str(caught.value)
        assert type(caught.value) is Unreachable
    assert heard
    assert not any(b'/secret-key' in each for each in heard)
