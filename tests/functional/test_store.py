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
from typing import NamedTuple

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived, StreamEnded
from h2.exceptions import H2Error

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, NoSpace, UnknownOutcome, Unreachable
from ecomp.store.client import Delete, Entry, Exists, Put, Store, Unchanged
from ecomp.store.connection import TooLong
from ecomp.store.messages import UNAVAILABLE, CallFailure, WatchCreate
from ecomp.store.roles import etcdrpc
from tests.kit.listening import Listening
from tests.kit.proxy import Proxy
from tests.kit.servers import PATIENCE, Etcd, free_port, until
from tests.kit.store_client import connected, read_entry

# The store on a real etcd that answers, refuses, is frozen, is stopped or is restarted.


pytestmark = pytest.mark.fast


# Reads


def test_a_key_that_is_not_there_is_none(store: Store, prefix: str) -> None:
    assert store.get(prefix + 'x') is None
    assert store.snapshot(prefix).entries == {}


def test_a_member_says_its_version(store: Store) -> None:
    output = subprocess.run(['etcd', '--version'], check=True, capture_output=True, text=True).stdout
    assert output.splitlines()[0] == f'etcd Version: {store.version()}'


def test_an_entry_is_whole(store: Store, prefix: str) -> None:
    lease = store.grant(60)
    revision = store.commit([], [Put(prefix + 'ключ', 'é\n', lease)])
    assert store.get(prefix + 'ключ') == Entry(prefix + 'ключ', 'é\n'.encode(), revision or 0, lease)
    store.revoke(lease)


def test_a_snapshot_is_the_prefix_and_nothing_beside_it(store: Store, prefix: str) -> None:
    outside = [prefix[:-1], prefix[:-1] + '0', prefix[:-1] + '0/x']
    store.commit([], [Put(key, 'x') for key in [*outside, prefix, prefix + 'a', prefix + 'a/b']])
    assert list(store.snapshot(prefix).entries) == [prefix, prefix + 'a', prefix + 'a/b']
    assert [entry.value for entry in store.snapshot(prefix, keys_only=True).entries.values()] == [b'', b'', b'']


def test_a_snapshot_of_many_pages_is_of_one_revision(etcd: Etcd, store: Store, prefix: str) -> None:
    names = [f'{prefix}{number:05}' for number in range(1203)]
    for start in range(0, len(names), 100):
        store.commit([], [Put(name, '0') for name in names[start : start + 100]])
    stop = threading.Event()

    def change_keys() -> None:
        # The first key is on the first page and the last key on the last one; their values are always equal.
        with connected(etcd.endpoint) as other_store:
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


def test_conditions_and_lost_races(store: Store, prefix: str) -> None:
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


def test_a_key_that_has_to_be_there(store: Store, prefix: str) -> None:
    key, other = prefix + 'a', prefix + 'b'
    assert store.commit([Exists(key)], [Put(other, '1')]) is None
    assert store.get(other) is None
    first = store.commit([], [Put(key, '1')])
    assert store.commit([Exists(key), Unchanged(key, first or 0)], [Put(other, '1')])
    assert store.commit([Exists(key)], [Delete(key)])
    assert store.commit([Exists(key)], [Put(key, '2')]) is None
    assert store.commit([Exists(other)], [Delete(other)])


def test_how_many_there_are(store: Store, prefix: str) -> None:
    assert store.count(prefix) == 0
    assert store.commit([], [Put(f'{prefix}{number}', 'x' * 1000) for number in range(120)])
    first_entries, number = store.around(prefix, prefix, 3)
    assert ([entry.key for entry in first_entries], number) == (sorted(store.snapshot(prefix).entries)[:3], 120)
    assert (store.count(prefix), store.count(f'{prefix}1'), store.count(f'{prefix}x')) == (120, 31, 0)


def test_a_hundred_instances_fit_into_one_transaction(store: Store, prefix: str) -> None:
    assert store.commit([], [Put(f'{prefix}{number}', 'x') for number in range(128)])
    assert len(store.snapshot(prefix).entries) == 128


def test_what_etcd_refuses_is_said_in_its_words(store: Store, prefix: str) -> None:
    with pytest.raises(EcompError, match='refuses: etcdserver: too many operations') as caught:
        store.commit([], [Put(f'{prefix}{number}', 'x') for number in range(129)])
    assert not isinstance(caught.value, Unreachable)
    with pytest.raises(EcompError, match='too large|larger than max'):
        store.commit([], [Put(prefix + 'a', 'x' * 3 * 2**20)])
    with pytest.raises(EcompError, match='requested lease not found: .* not written. Try: the same command again$'):
        store.commit([], [Put(prefix + 'a', 'x', lease=1)])
    with pytest.raises(EcompError, match='refuses: etcdserver: duplicate key given in txn request'):
        store.commit([], [Put(prefix + 'a', 'x'), Delete(prefix + 'a')])
    with pytest.raises(EcompError, match='refuses: etcdserver: key is not provided'):
        store.commit([], [Put('', 'x')])
    assert store.get(prefix + 'a') is None


def test_without_space_nothing_is_written_and_deletes_still_go(tmp_path: Path) -> None:
    quota = '--quota-backend-bytes=4194304'
    with Etcd(tmp_path / 'full', quota) as full, connected(full.endpoint) as store:

        def fill() -> bool:
            store.commit([], [Put('/fill', 'x' * 2**20)])
            return False

        with pytest.raises(Unreachable, match='takes no writes') as caught:
            until(fill, 30, 'etcd has no space left')
        assert not isinstance(caught.value, UnknownOutcome)
        assert store.commit([Unchanged('/fill', read_entry(store, '/fill').revision)], [Delete('/fill')])


def test_what_is_written_while_etcd_becomes_full_is_not_said_to_be_refused(tmp_path: Path) -> None:
    """Check calls in flight: etcd answers all of them "no space", but has written most of them."""
    quota = '--quota-backend-bytes=4194304'
    refused, unknown = [], []

    def fill(number: int) -> None:
        with connected(full.endpoint) as store:
            for index in range(10**6):
                key = f'/hosts/{number}/{index}'
                try:
                    assert store.commit([Unchanged(key, 0)], [Put(key, 'x' * 4000)])
                except UnknownOutcome as error:
                    unknown.append((key, str(error)))
                    return
                except NoSpace:
                    refused.append(key)
                    return

    with Etcd(tmp_path / 'full', quota) as full:
        with ThreadPoolExecutor(8) as writers:
            list(writers.map(fill, range(8)))
        assert len(refused) + len(unknown) == 8
        with connected(full.endpoint) as store:
            assert [key for key in refused if store.get(key) is not None] == []
            assert [key for key, _ in unknown if store.get(key) is None] == []
        for _, text in unknown:
            assert 'takes no writes' in text
            assert text.endswith('whether this was written before that is not known')


# Unreachable servers


def test_a_closed_port_is_unreachable_at_once() -> None:
    port = free_port()
    with connected(f'127.0.0.1:{port}') as store:
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
        assert time.monotonic() - began < PATIENCE * 5


def test_a_name_without_an_address_is_unreachable() -> None:
    for endpoints in (('no-such-host.invalid:2379',), ('no-such-host.invalid:2379', 'nor-this.invalid:2379')):
        with pytest.raises(Unreachable, match='no-such-host.invalid:2379'):
            Store(EtcdConfig(endpoints, timeout=3.0)).get('/x')


def test_a_frozen_etcd_keeps_nobody_longer_than_the_time_limit(own_etcd: Etcd) -> None:
    with connected(own_etcd.endpoint, timeout=0.5) as store:
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
            assert time.monotonic() - began < PATIENCE * 2
        own_etcd.resume()
        assert until(lambda: store.snapshot('/'), 10, 'etcd answers again') is not None


def test_a_client_outlives_a_killed_etcd(own_etcd: Etcd) -> None:
    with connected(own_etcd.endpoint) as store:
        store.commit([], [Put('/x', 'kept')])
        own_etcd.kill()
        with pytest.raises(Unreachable):
            store.get('/x')
        own_etcd.start()

        def is_answering() -> bool:
            try:
                entry = store.get('/x')
            except Unreachable:
                return False
            return entry is not None and entry.value == b'kept'

        until(is_answering, 10, 'the same client reads from the new etcd')


def test_a_lease_is_revoked_over_a_connection_that_ended_meanwhile(own_etcd: Etcd) -> None:
    with connected(own_etcd.endpoint) as store:
        lease = store.grant(60)
        assert store.commit([], [Put('/x', 'leased', lease)])
        own_etcd.kill()
        own_etcd.start()
        until(lambda: own_etcd.get('/x'), 10, 'it is there again')
        store.revoke(lease)
        assert own_etcd.get('/x') is None


def test_a_client_outlives_an_etcd_that_ends_in_peace(own_etcd: Etcd) -> None:
    with connected(own_etcd.endpoint) as store:
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
        until(lambda: store.get('/x'), 10, 'it is read again')
        stop.set()
        thread.join()
        assert unexpected == []


def test_one_of_several_endpoints_will_do(etcd: Etcd, prefix: str) -> None:
    dead = f'127.0.0.1:{free_port()}'
    for endpoints in ((dead, etcd.endpoint), (etcd.endpoint, dead), ('no-such-host.invalid:1', etcd.endpoint),
                      ('[::1]:1', etcd.endpoint)):  # fmt: skip
        with closing(Store(EtcdConfig(endpoints))) as store:
            assert store.commit([], [Put(prefix + 'x', 'x')])


def test_connections_that_were_left_are_closed(etcd: Etcd) -> None:
    def count_open_files() -> int:
        return len(os.listdir('/proc/self/fd'))

    with connected(etcd.endpoint) as store:
        assert store.get('/nothing') is None
        before, threads = count_open_files(), threading.active_count()
        for _ in range(300):
            store.move_on()
            assert store.get('/nothing') is None
        until(lambda: count_open_files() <= before + 3, 10, f'there are {before} open files again')
        assert threading.active_count() <= threads + 2


def test_a_call_goes_on_while_another_one_moves(own_etcd: Etcd) -> None:
    with connected(own_etcd.endpoint) as store:
        assert store.get('/nothing') is None
        own_etcd.pause()
        answers: list[object] = []
        thread = threading.Thread(target=lambda: answers.append(store.get('/nothing')))
        thread.start()
        until(thread.is_alive, 5, 'a call is under way')
        for _ in range(3):
            store.move_on()
        own_etcd.resume()
        thread.join()
        assert answers == [None]


def test_a_lost_answer_is_an_unknown_outcome(etcd: Etcd, prefix: str) -> None:
    key = prefix + 'x'
    with Proxy(etcd.port) as proxy, connected(proxy.address) as store:
        assert store.get(key) is None
        proxy.lose_answer(key.encode(), lambda: etcd.get(key) is not None)
        with pytest.raises(UnknownOutcome, match='cannot be reached'):
            store.commit([Unchanged(key, 0)], [Put(key, 'applied')])
        assert etcd.get(key) == b'applied'
        second_key = prefix + 'y'
        until(lambda: _reads(store, key), 10, 'the connection is made again')
        proxy.lose_request(second_key.encode())
        with pytest.raises(UnknownOutcome, match='cannot be reached'):
            store.commit([Unchanged(second_key, 0)], [Put(second_key, 'not applied')])
        assert etcd.get(second_key) is None


def _reads(store: Store, key: str) -> bool:
    try:
        return store.get(key) is not None
    except Unreachable:
        return False


# Leases


def test_a_lease_keeps_its_keys_and_takes_them_along(store: Store, prefix: str) -> None:
    lease = store.grant(60)
    store.commit([], [Put(prefix + 'a', 'x', lease), Put(prefix + 'b', 'x')])
    assert store.keep_alive(lease) == 60
    store.revoke(lease)
    assert list(store.snapshot(prefix).entries) == [prefix + 'b']
    store.revoke(lease)  # revoking it twice succeeds
    assert store.keep_alive(lease) == 0


def test_a_key_put_again_without_its_lease_outlives_it(store: Store, prefix: str) -> None:
    lease = store.grant(60)
    store.commit([], [Put(prefix + 'a', 'x', lease)])
    store.commit([], [Put(prefix + 'a', 'x')])
    store.revoke(lease)
    assert store.get(prefix + 'a') is not None


# Malformed answers: a read is sent again, a write's outcome is unknown, and the error gives the reason.


GRPC = [(':status', '200'), ('content-type', 'application/grpc')]
DONE = [('grpc-status', '0'), ('grpc-message', '')]
KV = {'key': b'/x', 'value': b'y', 'mod_revision': 7, 'create_revision': 7}
FOUND = etcdrpc.RangeResponse(header={'revision': 7}, kvs=[KV], count=1).SerializeToString()


class Said(NamedTuple):
    """The headers, body and trailers of an answer."""

    headers: list[tuple[str, str]]
    body: bytes = b''
    trailers: list[tuple[str, str]] = []


def message(content: bytes, flag: int = 0, length: int | None = None) -> bytes:
    return bytes([flag]) + (len(content) if length is None else length).to_bytes(4, 'big') + content


GOOD = Said(GRPC, message(FOUND), DONE)
OTHER = 'does not answer as etcd does'
SILENT = 'does not say what became of the call'
NONE = 'answer is no message'
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
    """An HTTP/2 server that sends canned answers, the last one repeatedly.

    `heard` are the paths of the calls.
    """

    def __init__(self, *says: Said) -> None:
        self._says = list(says)
        self.heard: list[str] = []
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
                        if self.heard[-1].endswith('/Watch'):  # the client never ends that stream
                            self._say(http, event.stream_id)
                    if isinstance(event, StreamEnded):
                        self._say(http, event.stream_id)
                connection.sendall(http.data_to_send())

    def _say(self, http: H2Connection, stream: int) -> None:
        answer = self._says.pop(0) if len(self._says) > 1 else self._says[0]
        http.send_headers(stream, answer.headers)
        http.send_data(stream, answer.body, end_stream=not answer.trailers)
        if answer.trailers:
            http.send_headers(stream, answer.trailers, end_stream=True)


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
        assert store.get('/x') is not None  # reads the outcome


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
    """Check that no garbage collection is needed, because a command runs none."""
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

    with closing(Other()) as server, closing(Store(EtcdConfig((server.address,), timeout=2.0))) as store:
        with pytest.raises(Unreachable, match=f'etcd at {server.address} cannot be reached: ') as caught:
            store.commit([], [Put('/secret-key', 'x')])
        assert why in str(caught.value)
        assert type(caught.value) is Unreachable
    assert heard
    assert not any(b'/secret-key' in data for data in heard)
