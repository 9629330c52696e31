"""Test the etcd client: reads, transactions, leases, connections and malformed answers."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import PingAckReceived, RequestReceived, StreamEnded
from h2.exceptions import H2Error

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, NoSpace, UnknownOutcome, Unreachable
from ecomp.store import http2_client
from ecomp.store.client import Delete, Entry, Exists, Put, Store, Unchanged
from ecomp.store.connection import AnswerTooLong
from ecomp.store.messages import UNAVAILABLE, CallFailure, WatchCreate
from tests.kit.gateway import etcdrpc
from tests.kit.listening import ThreadedServer
from tests.kit.proxy import Proxy
from tests.kit.servers import SLOWDOWN_FACTOR, Etcd, free_port, wait_until
from tests.kit.store_client import open_store, read_entry

# Reads


def test_version_is_that_of_the_member(store: Store) -> None:
    output = subprocess.run(['etcd', '--version'], check=True, capture_output=True, text=True).stdout
    assert output.splitlines()[0] == f'etcd Version: {store.read_version()}'


def test_entry_has_key_value_revision_and_lease(store: Store, prefix: str) -> None:
    lease = store.grant(60)
    revision = store.commit([], [Put(prefix + 'ключ', 'é\n', lease)])
    assert store.get(prefix + 'ключ') == Entry(prefix + 'ключ', 'é\n'.encode(), revision or 0, lease)
    store.revoke(lease)


def test_snapshot_contains_only_the_prefix(store: Store, prefix: str) -> None:
    outside = [prefix[:-1], prefix[:-1] + '0', prefix[:-1] + '0/x']
    store.commit([], [Put(key, 'x') for key in [*outside, prefix, prefix + 'a', prefix + 'a/b']])
    assert list(store.snapshot(prefix).entries) == [prefix, prefix + 'a', prefix + 'a/b']
    assert [entry.value for entry in store.snapshot(prefix, keys_only=True).entries.values()] == [b'', b'', b'']


def test_snapshot_of_many_pages_has_one_revision(etcd: Etcd, store: Store, prefix: str) -> None:
    names = [f'{prefix}{number:05}' for number in range(1203)]
    for start in range(0, len(names), 100):
        store.commit([], [Put(name, '0') for name in names[start : start + 100]])
    stop = threading.Event()

    def change_keys() -> None:
        # The first key is on the first page and the last key on the last one; their values are always equal.
        with open_store(etcd.endpoint) as other_store:
            for number in range(10**6):
                if stop.is_set():
                    return
                other_store.commit([], [Put(names[0], str(number)), Put(names[-1], str(number))])

    thread = threading.Thread(target=change_keys)
    thread.start()
    try:
        values = set()
        for _ in range(10):
            snapshot = store.snapshot(prefix)
            assert list(snapshot.entries) == names
            first, last = snapshot.entries[names[0]], snapshot.entries[names[-1]]
            assert first.value == last.value
            assert max(entry.revision for entry in snapshot.entries.values()) <= snapshot.revision
            values.add(first.value)
    finally:
        stop.set()
        thread.join()
    assert len(values) > 1


# Transactions


def test_commit_with_conditions_detects_lost_races(store: Store, prefix: str) -> None:
    key, other = prefix + 'a', prefix + 'b'
    first = store.commit([Unchanged(key, 0)], [Put(key, '1'), Put(other, '1')])
    assert first
    assert store.commit([Unchanged(key, 0)], [Put(key, '2')]) is None
    assert store.commit([Unchanged(key, first), Unchanged(other, first + 1)], [Put(key, '2')]) is None
    assert [entry.value for entry in store.snapshot(prefix).entries.values()] == [b'1', b'1']
    second = store.commit([Unchanged(key, first), Unchanged(other, first)], [Put(key, '2'), Delete(other)])
    assert second == first + 1
    assert list(store.snapshot(prefix).entries) == [key]
    assert store.commit([Unchanged(other, 0)], [Delete(other)])  # deleting a missing key succeeds


def test_exists_condition(store: Store, prefix: str) -> None:
    key, other = prefix + 'a', prefix + 'b'
    assert store.commit([Exists(key)], [Put(other, '1')]) is None
    assert store.get(other) is None
    first = store.commit([], [Put(key, '1')])
    assert store.commit([Exists(key), Unchanged(key, first or 0)], [Put(other, '1')])
    assert store.commit([Exists(key)], [Delete(key)])
    assert store.commit([Exists(key)], [Put(key, '2')]) is None
    assert store.commit([Exists(other)], [Delete(other)])


def test_count_and_around(store: Store, prefix: str) -> None:
    assert store.count(prefix) == 0
    assert store.commit([], [Put(f'{prefix}{number}', 'x' * 1000) for number in range(120)])
    first_entries, number = store.sample(prefix, prefix, 3)
    assert ([entry.key for entry in first_entries], number) == (sorted(store.snapshot(prefix).entries)[:3], 120)
    assert (store.count(prefix), store.count(f'{prefix}1'), store.count(f'{prefix}x')) == (120, 31, 0)


def test_refusal_contains_etcd_s_message(store: Store, prefix: str) -> None:
    with pytest.raises(EcompError, match='refuses: etcdserver: too many operations') as caught:
        store.commit([], [Put(f'{prefix}{number}', 'x') for number in range(129)])
    assert not isinstance(caught.value, Unreachable)
    with pytest.raises(EcompError, match='too large|larger than max'):
        store.commit([], [Put(prefix + 'a', 'x' * 3 * 2**20)])
    with pytest.raises(
        EcompError, match='requested lease not found: .* and nothing was written. Try: the same command again$'
    ):
        store.commit([], [Put(prefix + 'a', 'x', lease=1)])
    with pytest.raises(EcompError, match='refuses: etcdserver: duplicate key given in txn request'):
        store.commit([], [Put(prefix + 'a', 'x'), Delete(prefix + 'a')])
    with pytest.raises(EcompError, match='refuses: etcdserver: key is not provided'):
        store.commit([], [Put('', 'x')])
    assert store.get(prefix + 'a') is None


def test_full_etcd_refuses_writes_and_accepts_deletes(tmp_path: Path) -> None:
    quota = '--quota-backend-bytes=4194304'
    with Etcd(tmp_path / 'full', quota) as full, open_store(full.endpoint) as store:

        def fill() -> bool:
            store.commit([], [Put('/fill', 'x' * 2**20)])
            return False

        with pytest.raises(Unreachable, match='accepts no writes') as caught:
            wait_until(fill, 30, 'etcd has no space left')
        assert not isinstance(caught.value, UnknownOutcome)
        assert store.commit([Unchanged('/fill', read_entry(store, '/fill').revision)], [Delete('/fill')])


def test_write_while_etcd_becomes_full_is_read_back(tmp_path: Path) -> None:
    """Check calls in flight: etcd answers all of them "no space", but has written most of them."""
    quota = '--quota-backend-bytes=4194304'
    written, refused = dict[str, int | None](), list[str]()

    def fill(number: int) -> None:
        with open_store(full.endpoint) as store:
            for index in range(10**6):
                key = f'/hosts/{number}/{index}'
                try:
                    written[key] = store.commit([Unchanged(key, 0)], [Put(key, 'x' * 4000)])
                except NoSpace:
                    refused.append(key)
                    return

    with Etcd(tmp_path / 'full', quota) as full:
        with ThreadPoolExecutor(8) as writers:
            list(writers.map(fill, range(8)))
        assert len(refused) == 8
        with open_store(full.endpoint) as store:
            entries = store.snapshot('/hosts/', keys_only=True).entries
        assert {key: entry.revision for key, entry in entries.items()} == written


# Unreachable servers


def test_closed_port_is_unreachable_immediately() -> None:
    port = free_port()
    with open_store(f'127.0.0.1:{port}') as store:
        began = time.monotonic()
        calls: tuple[Callable[[], object], ...] = (
            lambda: store.get('/x'),
            lambda: store.snapshot('/x/'),
            lambda: store.grant(5),
            lambda: store.commit([], [Put('/x', 'x')]),
        )
        for call in calls:
            with pytest.raises(Unreachable, match=f'etcd at 127.0.0.1:{port} cannot be reached') as caught:
                call()
            assert not isinstance(caught.value, UnknownOutcome)
        assert time.monotonic() - began < SLOWDOWN_FACTOR * 5


def test_host_name_without_an_address_is_unreachable() -> None:
    for endpoints in (('no-such-host.invalid:2379',), ('no-such-host.invalid:2379', 'nor-this.invalid:2379')):
        with pytest.raises(Unreachable, match='no-such-host.invalid:2379'):
            Store(EtcdConfig(endpoints, timeout=3.0)).get('/x')


def test_calls_to_a_frozen_etcd_time_out(own_etcd: Etcd) -> None:
    with open_store(own_etcd.endpoint, timeout=0.5) as store:
        lease = store.grant(60)
        own_etcd.pause()
        calls: list[tuple[Callable[[], object], type[EcompError]]] = [
            (lambda: store.commit([], [Put('/x', 'x')]), UnknownOutcome),
            (lambda: store.get('/x'), Unreachable),
            (lambda: store.snapshot('/x/'), Unreachable),
            (lambda: store.grant(5), Unreachable),
            (lambda: store.keep_alive(lease), Unreachable),
            (lambda: store.revoke(lease), Unreachable),
        ]
        for call, error in calls:
            began = time.monotonic()
            with pytest.raises(Unreachable, match='no answer in time') as caught:
                call()
            assert type(caught.value) is error
            assert time.monotonic() - began < SLOWDOWN_FACTOR * 2
        own_etcd.resume()
        assert wait_until(lambda: store.snapshot('/'), 10, 'etcd answers again') is not None


def test_revoke_reconnects_after_an_etcd_restart(own_etcd: Etcd) -> None:
    with open_store(own_etcd.endpoint) as store:
        lease = store.grant(60)
        assert store.commit([], [Put('/x', 'leased', lease)])
        own_etcd.kill()
        own_etcd.start()
        wait_until(lambda: own_etcd.get('/x'), 10, 'it is there again')
        store.revoke(lease)
        assert own_etcd.get('/x') is None


def test_client_survives_a_graceful_etcd_restart(own_etcd: Etcd) -> None:
    with open_store(own_etcd.endpoint) as store:
        store.commit([], [Put('/x', 'kept')])
        stop = threading.Event()
        unexpected: list[object] = []

        def read() -> None:
            while not stop.is_set():
                try:
                    entry = store.get('/x')
                    unexpected.extend([entry] if entry is None or entry.value != b'kept' else [])
                except Unreachable:
                    stop.wait(0.1)
                except Exception as error:
                    unexpected.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(3):
            own_etcd.stop()
            own_etcd.start()
        wait_until(lambda: store.get('/x'), 10, 'it is read again')
        stop.set()
        thread.join()
        assert unexpected == []


def test_one_working_endpoint_of_several_is_enough(etcd: Etcd, prefix: str) -> None:
    dead = f'127.0.0.1:{free_port()}'
    for endpoints in ((dead, etcd.endpoint), (etcd.endpoint, dead), ('no-such-host.invalid:1', etcd.endpoint),
                      ('[::1]:1', etcd.endpoint)):  # fmt: skip
        with closing(Store(EtcdConfig(endpoints))) as store:
            assert store.commit([], [Put(prefix + 'x', 'x')])


def test_abandoned_connections_are_closed(etcd: Etcd) -> None:
    def count_open_files() -> int:
        return len(os.listdir('/proc/self/fd'))

    with open_store(etcd.endpoint) as store:
        assert store.get('/nothing') is None
        before, threads = count_open_files(), threading.active_count()
        for _ in range(300):
            store.reconnect()
            assert store.get('/nothing') is None
        wait_until(lambda: count_open_files() <= before + 3, 10, f'there are {before} open files again')
        assert threading.active_count() <= threads + 2


def test_call_in_flight_survives_a_change_of_member(own_etcd: Etcd) -> None:
    with open_store(own_etcd.endpoint) as store:
        assert store.get('/nothing') is None
        own_etcd.pause()
        answers: list[object] = []
        thread = threading.Thread(target=lambda: answers.append(store.get('/nothing')))
        thread.start()
        wait_until(thread.is_alive, 5, 'a call is under way')
        for _ in range(3):
            store.reconnect()
        own_etcd.resume()
        thread.join()
        assert answers == [None]


def test_lost_answer_is_read_back_and_a_lost_request_is_unknown(etcd: Etcd, prefix: str) -> None:
    key = prefix + 'x'
    with Proxy(etcd.port) as proxy, open_store(proxy.address) as store:
        assert store.get(key) is None
        proxy.lose_answer(key.encode(), lambda: etcd.get(key) is not None)
        revision = store.commit([Unchanged(key, 0)], [Put(key, 'applied')])
        assert read_entry(store, key) == Entry(key, b'applied', revision or 0)
        second_key = prefix + 'y'
        wait_until(lambda: _is_readable(store, key), 10, 'the connection is made again')
        proxy.lose_request(second_key.encode())
        with pytest.raises(UnknownOutcome, match='cannot be reached'):
            store.commit([Unchanged(second_key, 0)], [Put(second_key, 'not applied')])
        assert etcd.get(second_key) is None


def _is_readable(store: Store, key: str) -> bool:
    try:
        return store.get(key) is not None
    except Unreachable:
        return False


# Leases


def test_revoked_lease_deletes_its_keys(store: Store, prefix: str) -> None:
    lease = store.grant(60)
    store.commit([], [Put(prefix + 'a', 'x', lease), Put(prefix + 'b', 'x')])
    assert store.keep_alive(lease) == 60
    store.revoke(lease)
    assert list(store.snapshot(prefix).entries) == [prefix + 'b']
    store.revoke(lease)  # revoking it twice succeeds
    assert store.keep_alive(lease) == 0


# Malformed answers: a read is sent again, a write's outcome is unknown, and the error gives the reason.


GRPC_HEADERS = [(':status', '200'), ('content-type', 'application/grpc')]
OK_TRAILERS = [('grpc-status', '0'), ('grpc-message', '')]
KV = {'key': b'/x', 'value': b'y', 'mod_revision': 7, 'create_revision': 7}
RANGE_RESPONSE = etcdrpc.RangeResponse(header={'revision': 7}, kvs=[KV], count=1).SerializeToString()


class CannedAnswer(NamedTuple):
    headers: list[tuple[str, str]]
    body: bytes = b''
    trailers: list[tuple[str, str]] = []


def make_message(content: bytes, flag: int = 0, length: int | None = None) -> bytes:
    return bytes([flag]) + (len(content) if length is None else length).to_bytes(4, 'big') + content


VALID_ANSWER = CannedAnswer(GRPC_HEADERS, make_message(RANGE_RESPONSE), OK_TRAILERS)
NOT_ETCD = 'answer is not gRPC'
NO_STATUS = 'answer has no valid gRPC status'
NO_MESSAGE = 'answer is not one gRPC message'
MALFORMED_ANSWERS = {
    'a page': (NOT_ETCD, CannedAnswer([(':status', '404'), ('content-type', 'text/html')], b'<p>not here')),
    'another content': (
        NOT_ETCD,
        CannedAnswer([(':status', '200'), ('content-type', 'application/json')], b'{}', OK_TRAILERS),
    ),
    'no status': (NO_STATUS, CannedAnswer(GRPC_HEADERS, make_message(RANGE_RESPONSE))),
    'a status that is none': (
        NO_STATUS,
        CannedAnswer(GRPC_HEADERS, make_message(RANGE_RESPONSE), [('grpc-status', 'fine')]),
    ),
    'a status beyond all': (
        NO_STATUS,
        CannedAnswer(GRPC_HEADERS, make_message(RANGE_RESPONSE), [('grpc-status', '99')]),
    ),
    'a status without an end': (
        NO_STATUS,
        CannedAnswer(GRPC_HEADERS, make_message(RANGE_RESPONSE), [('grpc-status', '9' * 5000)]),
    ),
    'no message': (NO_MESSAGE, CannedAnswer(GRPC_HEADERS, b'', OK_TRAILERS)),
    'half a message': (
        NO_MESSAGE,
        CannedAnswer(GRPC_HEADERS, make_message(RANGE_RESPONSE, length=len(RANGE_RESPONSE) + 5), OK_TRAILERS),
    ),
    'two messages': (
        NO_MESSAGE,
        CannedAnswer(GRPC_HEADERS, make_message(RANGE_RESPONSE) + make_message(RANGE_RESPONSE), OK_TRAILERS),
    ),
    'packed': (NO_MESSAGE, CannedAnswer(GRPC_HEADERS, make_message(RANGE_RESPONSE, flag=1), OK_TRAILERS)),
    'no protobuf': ('answer is malformed: ', CannedAnswer(GRPC_HEADERS, make_message(b'\x0a\xff\xff'), OK_TRAILERS)),
}
for_each_malformed_answer = pytest.mark.parametrize(
    ('why', 'junk'), MALFORMED_ANSWERS.values(), ids=MALFORMED_ANSWERS.keys()
)


class CannedEtcd(ThreadedServer):
    """An HTTP/2 server that sends canned answers, the last one repeatedly.

    Without answers a watch gets pings, without end.
    """

    def __init__(self, *says: CannedAnswer) -> None:
        self._says = list(says)
        self.heard: list[str] = []
        self.limits_ms: list[int] = []
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        http = H2Connection(H2Configuration(client_side=False, header_encoding='utf-8'))
        http.initiate_connection()
        with suppress(H2Error):
            connection.sendall(http.data_to_send())
            while data := connection.recv(65536):
                for event in http.receive_data(data):
                    if isinstance(event, RequestReceived):
                        self.heard.append(str(dict(event.headers)[':path']))
                        self.limits_ms.append(int(dict(event.headers)['grpc-timeout'].removesuffix('m')))
                        if self._says and self.heard[-1].endswith('/Watch'):  # the client never ends that stream
                            self._send_answer(http, event.stream_id)
                    if isinstance(event, StreamEnded):
                        self._send_answer(http, event.stream_id)
                    if not self._says and isinstance(event, RequestReceived | PingAckReceived):
                        http.ping(b'for ever')
                connection.sendall(http.data_to_send())

    def _send_answer(self, http: H2Connection, stream: int) -> None:
        answer = self._says.pop(0) if len(self._says) > 1 else self._says[0]
        http.send_headers(stream, answer.headers)
        http.send_data(stream, answer.body, end_stream=not answer.trailers)
        if answer.trailers:
            http.send_headers(stream, answer.trailers, end_stream=True)


@contextmanager
def serve_answers(*answers: CannedAnswer) -> Iterator[tuple[CannedEtcd, Store]]:
    server = CannedEtcd(*answers)
    with closing(Store(EtcdConfig((server.address,), timeout=3.0))) as store:
        yield server, store
        server.close()


def test_valid_answer_is_read_once() -> None:
    with serve_answers(VALID_ANSWER) as (server, store):
        entry = read_entry(store, '/x')
        assert (entry.value, entry.revision) == (b'y', 7)
    assert server.heard == ['/etcdserverpb.KV/Range']


@for_each_malformed_answer
def test_read_is_sent_again_after_a_malformed_answer(why: str, junk: CannedAnswer) -> None:  # noqa: ARG001
    with serve_answers(junk, VALID_ANSWER) as (server, store):
        assert read_entry(store, '/x').value == b'y'
    assert server.heard == ['/etcdserverpb.KV/Range'] * 2


@for_each_malformed_answer
def test_read_with_malformed_answers_gives_the_reason(why: str, junk: CannedAnswer) -> None:
    with serve_answers(junk) as (server, store):
        with pytest.raises(Unreachable, match=f'^etcd at {server.address} cannot be reached: it.* {why}') as caught:
            store.get('/x')
        assert '\n' not in str(caught.value)
        assert type(caught.value) is Unreachable


@for_each_malformed_answer
def test_write_with_a_malformed_answer_is_sent_once(why: str, junk: CannedAnswer) -> None:
    with serve_answers(junk, CannedAnswer(GRPC_HEADERS, make_message(b''), OK_TRAILERS)) as (server, store):
        with pytest.raises(UnknownOutcome, match=f'^etcd at {server.address} cannot be reached: it.* {why}'):
            store.commit([Unchanged('/x', 0)], [Put('/x', 'y')])
        assert server.heard == ['/etcdserverpb.KV/Txn'] * 2  # the second one reads


def test_member_that_is_not_etcd_is_skipped(etcd: Etcd, prefix: str) -> None:
    etcd.put(prefix, 'there')
    server = CannedEtcd(MALFORMED_ANSWERS['a page'][1])
    with closing(Store(EtcdConfig((server.address, etcd.endpoint), timeout=3.0))) as store:
        assert read_entry(store, prefix).value == b'there'
        server.close()
    assert server.heard == ['/etcdserverpb.KV/Range']


def test_revoke_with_a_malformed_answer_gives_the_reason() -> None:
    with (
        serve_answers(MALFORMED_ANSWERS['two messages'][1]) as (_, store),
        pytest.raises(Unreachable, match=f'cannot be reached: its {NO_MESSAGE}'),
    ):
        store.revoke(1)


def test_watch_fails_on_a_malformed_answer() -> None:
    with serve_answers(MALFORMED_ANSWERS['packed'][1]) as (_, store), pytest.raises(CallFailure) as caught:
        list(store.watch([WatchCreate(b'/', b'0', 1)], 5.0))
    assert caught.value.code == UNAVAILABLE


def test_watch_lets_its_consumer_see_the_time_though_pings_arrive() -> None:
    with serve_answers() as (_, store):
        assert not next(iter(store.watch([WatchCreate(b'/', b'0', 1)], 5.0, 0.4))).events


def test_member_is_told_the_time_that_is_left_after_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, clock = http2_client.Transport.reserve, SimpleNamespace(monotonic=time.monotonic)

    @contextmanager
    def reserve_late(transport: http2_client.Transport, deadline: float) -> Iterator[None]:
        with reserve(transport, deadline):
            clock.monotonic = lambda: time.monotonic() + 2.0
            yield

    monkeypatch.setattr(http2_client, 'time', clock)
    monkeypatch.setattr(http2_client.Transport, 'reserve', reserve_late)
    with serve_answers(VALID_ANSWER) as (server, store):
        store.get('/x')
    assert server.limits_ms[0] <= 1000


def test_too_long_answer_leaves_the_outcome_of_a_write_unknown() -> None:
    with serve_answers(CannedAnswer(GRPC_HEADERS, make_message(RANGE_RESPONSE, length=2**31), OK_TRAILERS)) as (
        server,
        store,
    ):
        with pytest.raises(UnknownOutcome):
            store.commit([Unchanged('/x', 0)], [Put('/x', 'y')])
        with pytest.raises(AnswerTooLong):
            store.get('/x')
        assert server.heard == ['/etcdserverpb.KV/Txn', '/etcdserverpb.KV/Txn', '/etcdserverpb.KV/Range']


def test_ended_connection_is_freed(own_etcd: Etcd) -> None:
    """Check that no garbage collection is needed, because a command runs none."""
    with open_store(own_etcd.endpoint) as store:
        store.get('/x')
        before = len(os.listdir('/proc/self/fd'))
        gc.disable()
        try:
            for _ in range(20):
                store._connection.client._socket.shutdown(socket.SHUT_RDWR)
                store.get('/x')
            assert len(os.listdir('/proc/self/fd')) <= before + 2
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ('says', 'why'),
    [
        (b'HTTP/1.1 400 Bad Request\r\n\r\n', 'it closed the connection (if this persists, it may expect TLS, with'),
        (b'\0' * 100, 'does not speak HTTP/2 (it may expect TLS, with'),
        (b'', 'it closed the connection (if this persists, it may expect TLS, with'),
        (b'SSH-2.0-x\r\n', 'it closed the connection (if this persists, it may expect TLS, with'),
    ],
)
def test_server_of_another_protocol_receives_no_call(says: bytes, why: str) -> None:
    heard: list[bytes] = []

    class Other(ThreadedServer):
        def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
            connection.sendall(says)
            heard.append(connection.recv(65536))

    with closing(Other()) as server, closing(Store(EtcdConfig((server.address,), timeout=2.0))) as store:
        with pytest.raises(Unreachable, match=f'etcd at {server.address} cannot be reached: ') as caught:
            store.commit([], [Put('/secret-key', 'x')])
        assert why in str(caught.value)
        assert type(caught.value) is Unreachable
    assert heard
    assert not any(b'/secret-key' in data for data in heard)
