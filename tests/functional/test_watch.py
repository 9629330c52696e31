"""Test watches of etcd, of one prefix and several, and the guard that checks each answer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import grpc
import pytest

from ecomp.agent.host import state
from ecomp.agent.host.state import KnownEtcd
from ecomp.errors import EcompError, StrangeEtcd, UsageError
from ecomp.model import cluster, keys
from ecomp.model.cluster import KnownCluster
from ecomp.model.record import Failure, Record
from ecomp.model.states import ERROR
from ecomp.model.stored import encode
from ecomp.shared.ends import write_final_record
from ecomp.shared.presence import Presence
from ecomp.store.client import Delete, Entry, Guard, Put, Store, Unchanged
from ecomp.store.watch import Follower
from tests.functional.present import start_and_stop
from tests.kit.gateway import etcdrpc
from tests.kit.proxy import Proxy
from tests.kit.servers import SLOWDOWN_FACTOR, Etcd, wait_until
from tests.kit.store_client import make_config

# A reply of a watch, an error that ends the stream, or None to end it normally.
Frame = etcdrpc.WatchResponse | grpc.StatusCode | None


@dataclass
class FakeEtcd(etcdrpc.KVServicer, etcdrpc.WatchServicer):
    """An etcd that answers ranges with `values`, and each watch with the next of `watches`.

    If `watches` is empty, a watch is created and stays silent.
    """

    values: dict[bytes, bytes] = field(default_factory=dict)
    header: tuple[int, int, int] = (1, 10, 2)
    list_count: int = 0

    def __post_init__(self) -> None:
        self.watches: queue.SimpleQueue[list[Frame]] = queue.SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(8))
        etcdrpc.add_KVServicer_to_server(self, self._server)
        etcdrpc.add_WatchServicer_to_server(self, self._server)
        self.endpoint = f'127.0.0.1:{self._server.add_insecure_port("127.0.0.1:0")}'

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def make_frame(self, **fields: Any) -> etcdrpc.WatchResponse:
        return etcdrpc.WatchResponse(header=_make_header(*fields.pop('header', self.header)), watch_id=0, **fields)

    def make_put_frame(self, key: bytes, value: bytes, **fields: Any) -> etcdrpc.WatchResponse:
        frame = self.make_frame(**fields)
        event = frame.events.add()
        event.kv.key, event.kv.value, event.kv.mod_revision = key, value, frame.header.revision
        return frame

    def Range(self, request: Any, _: Any) -> Any:  # noqa: N802
        """Return the requested values, but ignore the requested revision."""
        end = request.range_end or request.key + b'\0'
        self.list_count += bool(request.range_end)
        reply = etcdrpc.RangeResponse(header=_make_header(*self.header))
        for key, value in sorted(self.values.items()):
            if request.key <= key < end:
                reply.kvs.add(key=key, value=value, mod_revision=self.header[1], create_revision=1, version=1)
        return reply

    def Watch(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        next(requests)
        try:
            script = self.watches.get_nowait()
        except queue.Empty:
            script = [self.make_frame(created=True)]
        for frame in script:
            if frame is None:
                return
            if isinstance(frame, grpc.StatusCode):
                context.abort(frame, 'as scripted')
            yield frame
        for _ in requests:
            pass


def _make_header(cluster: int, revision: int, term: int) -> Any:
    return etcdrpc.ResponseHeader(cluster_id=cluster, member_id=7, revision=revision, raft_term=term)


class StateRecorder:
    def __init__(self) -> None:
        self.states: list[dict[str, bytes]] = []

    def on_state(self, state: Mapping[str, Entry]) -> None:
        self.states.append({key: entry.value for key, entry in state.items()})

    def wait_for_state(self, expected: dict[str, bytes], description: str = 'what is there') -> None:
        wait_until(
            lambda: self.states[-1:] == [expected], 15, f'{description}: {expected} is seen, last {self.states[-1:]}'
        )


class RecordingFollower(StateRecorder):
    def __init__(self, endpoint: str, prefix: str, resync: float = 60.0, timeout: float = 2.0, **options: Any) -> None:
        super().__init__()
        self.follower = Follower(make_config(endpoint, timeout), [(prefix, self.on_state)], resync, **options)

    def __enter__(self) -> Self:
        self.follower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.stop()


# A follower on a real etcd sees each change, despite outages of etcd and of the connection.


def test_follower_sees_the_initial_state_and_each_change(etcd: Etcd, store: Store, prefix: str) -> None:
    a, b = prefix + 'a', prefix + 'b'
    store.commit([], [Put(a, '1')])
    with RecordingFollower(etcd.endpoint, prefix) as recorder:
        recorder.wait_for_state({a: b'1'}, 'what was there before')
        store.commit([], [Put(b, '1'), Put(prefix[:-1] + '0', 'beside it')])
        recorder.wait_for_state({a: b'1', b: b'1'}, 'a put')
        store.commit([], [Put(a, '2'), Delete(b)])
        recorder.wait_for_state({a: b'2'}, 'a change and a delete in one transaction')
        store.commit([], [Delete(a)])
        recorder.wait_for_state({}, 'the last delete')
        lease = store.grant(60)
        store.commit([], [Put(b, 'leased', lease)])
        recorder.wait_for_state({b: b'leased'}, 'a leased key')
        store.revoke(lease)
        recorder.wait_for_state({}, 'the end of its lease')
    assert recorder.states[:2] == [{a: b'1'}, {a: b'1', b: b'1'}]


def test_follower_is_not_called_without_a_change(etcd: Etcd, prefix: str) -> None:
    with (
        RecordingFollower(etcd.endpoint, prefix) as recorder,
        RecordingFollower(etcd.endpoint, prefix, resync=0.1) as relisting,
    ):
        wait_until(lambda: len(relisting.states) > 5, 10, 'a follower with a short resync lists again')
        assert recorder.states == [{}]


def test_follower_survives_keys_and_values_that_are_not_text(etcd: Etcd, prefix: str) -> None:
    with RecordingFollower(etcd.endpoint, prefix) as recorder:
        recorder.wait_for_state({}, 'nothing')
        etcd.put(prefix + 'a', b'\xff\xfe')
        etcd.call('kv/put', {'key': 'L3Rlc3Qv//8=', 'value': ''})  # /test/\xff\xff
        etcd.put(prefix + 'b', '')
        recorder.wait_for_state({prefix + 'a': b'\xff\xfe', prefix + 'b': b''}, 'keys and values that are no text')


def test_follower_survives_a_graceful_etcd_restart(own_etcd: Etcd) -> None:
    """Check that etcd's message before it closes the connection does not change later requests."""
    with RecordingFollower(own_etcd.endpoint, '/t/') as recorder:
        for value in ('1', '2', '3'):
            own_etcd.put('/t/a', value)
            recorder.wait_for_state({'/t/a': value.encode()}, 'a change')
            own_etcd.stop()
            own_etcd.start()


def test_stop_returns_quickly(own_etcd: Etcd) -> None:
    def check_stop(state: str, recorder: RecordingFollower) -> None:
        began = time.monotonic()
        recorder.follower.stop()
        assert time.monotonic() - began < SLOWDOWN_FACTOR * 3, state

    RecordingFollower(own_etcd.endpoint, '/t/').follower.stop()  # never started
    recorder = RecordingFollower(own_etcd.endpoint, '/t/').__enter__()
    check_stop('before it saw anything', recorder)
    recorder = RecordingFollower(own_etcd.endpoint, '/t/').__enter__()
    recorder.wait_for_state({}, 'the beginning')
    check_stop('watching', recorder)
    recorder = RecordingFollower(own_etcd.endpoint, '/t/').__enter__()
    recorder.wait_for_state({}, 'the beginning')
    own_etcd.pause()
    check_stop('watching a frozen etcd', recorder)
    check_stop('listing a frozen etcd', RecordingFollower(own_etcd.endpoint, '/t/').__enter__())
    own_etcd.resume()
    own_etcd.kill()
    check_stop('etcd is gone', RecordingFollower(own_etcd.endpoint, '/t/').__enter__())


# One follower of many prefixes on a real etcd: each callback sees only its prefix.


class RecordingMultiFollower:
    def __init__(self, endpoint: str, prefixes: Sequence[str], resync: float = 60.0) -> None:
        self.lost: list[tuple[EcompError, float]] = []
        self.back: list[bool] = []
        self.heard = [StateRecorder() for _ in prefixes]
        subscriptions = [(prefix, recorder.on_state) for prefix, recorder in zip(prefixes, self.heard, strict=True)]
        callbacks = {'on_lost': lambda *loss: self.lost.append(loss), 'on_back': lambda: self.back.append(True)}
        self.follower = Follower(make_config(endpoint, 2.0), subscriptions, resync, **callbacks)  # type: ignore[arg-type]
        self.follower.start()


@pytest.fixture
def follow(etcd_proxy: Proxy) -> Iterator[Callable[..., RecordingMultiFollower]]:
    started: list[RecordingMultiFollower] = []

    def start(*prefixes: str, resync: float = 60.0) -> RecordingMultiFollower:
        started.append(RecordingMultiFollower(etcd_proxy.address, prefixes, resync))
        return started[-1]

    yield start
    for following in started:
        following.follower.stop()


def test_loss_is_reported_with_the_beginning_of_the_list(own_etcd: Etcd) -> None:
    own_etcd.pause()
    began = time.monotonic()
    following = RecordingMultiFollower(own_etcd.endpoint, ['/t/'])
    started = time.monotonic()
    try:
        wait_until(lambda: following.lost, 30, 'the list times out')
        assert began <= following.lost[0][1] <= started + 1 < time.monotonic()
    finally:
        own_etcd.resume()
        following.follower.stop()


def test_each_callback_sees_only_its_prefix(
    follow: Callable[..., RecordingMultiFollower], store: Store, prefix: str
) -> None:
    a, b, unwatched = prefix + 'a/1', prefix + 'b/1', prefix + 'c/1'
    store.commit([], [Put(a, '1'), Put(unwatched, '1')])
    first, second, twin, empty = follow(prefix + 'a/', prefix + 'b/', prefix + 'a/', prefix + 'd/').heard
    first.wait_for_state({a: b'1'})
    second.wait_for_state({})
    store.commit([], [Put(b, '1'), Put(a, '2')])
    first.wait_for_state({a: b'2'})
    second.wait_for_state({b: b'1'})
    store.commit([], [Delete(b), Put(unwatched, '2')])
    second.wait_for_state({})
    twin.wait_for_state({a: b'2'})
    store.commit([], [Delete(a)])
    first.wait_for_state({})
    twin.wait_for_state({})
    assert first.states == twin.states == [{a: b'1'}, {a: b'2'}, {}]
    assert second.states == [{}, {b: b'1'}, {}]
    assert empty.states == [{}]


def test_changes_between_list_and_watch_are_seen(
    follow: Callable[..., RecordingMultiFollower], store: Store, prefix: str
) -> None:
    names = [f'{prefix}{number:03d}/' for number in range(50)]
    following = follow(*names, resync=0.2)
    for value in range(10):
        for name in names:
            store.commit([], [Put(f'{name}x', str(value))])
    for name, recorder in zip(names, following.heard, strict=True):
        recorder.wait_for_state({f'{name}x': b'9'})
        shown = [int(state[f'{name}x']) for state in recorder.states if state]
        assert shown == sorted(shown)


def test_changes_during_an_outage_are_seen_after_it(
    follow: Callable[..., RecordingMultiFollower], etcd_proxy: Proxy, store: Store, prefix: str
) -> None:
    a, b = prefix + 'a/1', prefix + 'b/1'
    store.commit([], [Put(a, '1'), Put(b, '1')])
    following = follow(prefix + 'a/', prefix + 'b/')
    first, second = following.heard
    first.wait_for_state({a: b'1'})
    second.wait_for_state({b: b'1'})
    etcd_proxy.go_away()
    wait_until(lambda: following.lost, 30, 'it is told of the loss')
    store.commit([], [Delete(a), Put(b, '2')])
    etcd_proxy.come_back()
    first.wait_for_state({})
    second.wait_for_state({b: b'2'})
    assert (len(following.lost), following.back) == (1, [True])


# How another etcd is detected on the wire (rule: familiar-etcd); and frames that a real etcd seldom sends.


IDENTITY = 'b8756be5-a30d-4311-920c-0ad996367a8e'
OTHER_IDENTITY = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
CLUSTER_VALUE = encode(cluster.ClusterIdentity(IDENTITY, 'now')).encode()
KNOWN_CLUSTER = KnownCluster(IDENTITY, 1, 10, 2)


class GuardedFollower(RecordingFollower):
    def __init__(self, endpoint: str, initial: KnownCluster = KNOWN_CLUSTER) -> None:
        self.noted: list[KnownCluster] = []
        self.complaints: list[str] = []
        self.guard = Guard(initial, self.noted.append)
        self.guard.add_refusal_listener(self.complaints.append)
        super().__init__(endpoint, '/t/', guard=self.guard)


@pytest.mark.parametrize(
    'frames',
    [
        pytest.param(lambda fake: [fake.make_frame(created=True, canceled=True, cancel_reason='no')], id='refused'),
        pytest.param(lambda fake: [fake.make_frame(compact_revision=9)], id='compacted'),
        pytest.param(
            lambda fake: [fake.make_frame(created=True), fake.make_frame(canceled=True)], id='cancelled later'
        ),
        pytest.param(lambda fake: [fake.make_frame(created=True), None], id='ended'),
        pytest.param(lambda fake: [fake.make_frame(created=True), grpc.StatusCode.UNAVAILABLE], id='broken'),
        pytest.param(lambda fake: [fake.make_put_frame(b'/t/a', b'wrong', header=(1, 10, 1))], id='older term'),
        pytest.param(lambda fake: [fake.make_put_frame(b'/t/a', b'wrong', header=(1, 9, 2))], id='older revision'),
        pytest.param(lambda fake: [fake.make_put_frame(b'/t/a', b'wrong', header=(2, 11, 2))], id='other cluster'),
    ],
)
def test_untrusted_watch_leads_to_a_new_list(frames: object) -> None:
    with FakeEtcd({b'/cluster': CLUSTER_VALUE, b'/t/a': b'1'}) as fake:
        script: list[Frame] = frames(fake)  # type: ignore[operator]
        fake.watches.put(script)
        fake.watches.put([fake.make_frame(created=True), fake.make_put_frame(b'/t/a', b'2', header=(1, 11, 2))])
        with GuardedFollower(fake.endpoint) as recorder:
            recorder.wait_for_state({'/t/a': b'2'})
            assert recorder.states == [{'/t/a': b'1'}, {'/t/a': b'2'}] or recorder.states == [
                {'/t/a': b'1'},
                {'/t/a': b'1'},
                {'/t/a': b'2'},
            ]
            assert fake.list_count == 2
            assert recorder.complaints == []


def test_watch_is_checked_against_the_list_before_it() -> None:
    """Check an etcd that is restored between list and watch, also if less was known before."""
    with FakeEtcd({b'/cluster': CLUSTER_VALUE, b'/t/a': b'1'}) as fake:
        fake.watches.put([fake.make_frame(created=True), fake.make_put_frame(b'/t/a', b'wrong', header=(1, 9, 2))])
        fake.watches.put([fake.make_frame(created=True), fake.make_put_frame(b'/t/a', b'2', header=(1, 11, 2))])
        with GuardedFollower(fake.endpoint, KnownCluster(IDENTITY, 1, 5, 2)) as recorder:
            recorder.wait_for_state({'/t/a': b'2'})
            assert {'/t/a': b'wrong'} not in recorder.states
            assert fake.list_count == 2
            assert recorder.complaints == []


def test_concurrent_answers_do_not_make_a_watch_stale() -> None:
    """Check a busy host: another of our calls is answered before a watched change arrives."""

    class Busy(GuardedFollower):
        def on_state(self, state: Mapping[str, Entry]) -> None:
            super().on_state(state)
            self.guard.accept_reply(self.guard.known_cluster, cluster.Header(1, 20, 2), 'e')

    with FakeEtcd({b'/cluster': CLUSTER_VALUE, b'/t/a': b'1'}) as fake:
        events = [fake.make_put_frame(b'/t/a', value, header=(1, 11, 2)) for value in (b'2', b'3')]
        fake.watches.put([fake.make_frame(created=True), *events])
        with Busy(fake.endpoint) as recorder:
            recorder.wait_for_state({'/t/a': b'3'})
            assert recorder.states == [{'/t/a': b'1'}, {'/t/a': b'2'}, {'/t/a': b'3'}]
            assert fake.list_count == 1
            assert recorder.complaints == []


def test_refused_watch_is_retried_less_and_less_often() -> None:
    with FakeEtcd({b'/cluster': CLUSTER_VALUE}) as fake:
        for _ in range(100):
            fake.watches.put([fake.make_frame(created=True, canceled=True, cancel_reason='permission denied')])
        with GuardedFollower(fake.endpoint):
            wait_until(lambda: fake.list_count >= 3, 10, 'it lists again')
            before = fake.list_count
            threading.Event().wait(4.0)  # a measurement, not a synchronisation
            assert fake.list_count - before <= 4


@pytest.mark.parametrize(
    ('header', 'value', 'said'),
    [
        ((1, 9, 2), CLUSTER_VALUE, 'its revision is 9, and was 10 before'),
        ((1, 10, 1), CLUSTER_VALUE, 'its raft term is 1, and was 2 before'),
        ((2, 10, 2), CLUSTER_VALUE, 'its cluster id is 2, not 1 as before'),
        (
            (1, 10, 2),
            encode(cluster.ClusterIdentity(OTHER_IDENTITY, 'now')).encode(),
            f'its identity is {OTHER_IDENTITY}, not {IDENTITY} as before',
        ),
        ((1, 10, 2), None, f'its /cluster is missing, and had identity {IDENTITY} before'),
        ((1, 10, 2), b'?', 'its /cluster is malformed'),
    ],
)
def test_list_of_another_etcd_is_strange(header: tuple[int, int, int], value: bytes | None, said: str) -> None:
    with FakeEtcd({b'/t/a': b'1', **({b'/cluster': value} if value else {})}, header) as fake:
        with GuardedFollower(fake.endpoint) as recorder:
            wait_until(lambda: recorder.complaints, 10, 'it is told')
            with closing(Store(make_config(fake.endpoint), recorder.guard)) as store:
                for call in (lambda: store.get('/x'), lambda: store.grant(5), lambda: store.keep_alive(1)):
                    with pytest.raises(StrangeEtcd):
                        call()
                with pytest.raises(StrangeEtcd):
                    store.commit([], [Put('/x', 'x')])  # this fake could not answer it
        assert len(recorder.complaints) == 1
        assert said in recorder.complaints[0]
        assert '--accept-new-etcd' in recorder.complaints[0]
        assert recorder.states == []
        assert not any(cluster_noted.revision > 10 or cluster_noted.cluster != 1 for cluster_noted in recorder.noted)


def test_etcd_that_falls_behind_between_two_lists_is_strange() -> None:
    with FakeEtcd({b'/cluster': CLUSTER_VALUE, b'/t/a': b'1'}) as fake:
        fake.watches.put([fake.make_frame(created=True), fake.make_put_frame(b'/t/a', b'2', header=(1, 12, 3)), None])
        with GuardedFollower(fake.endpoint) as recorder:
            wait_until(lambda: recorder.complaints, 10, 'the second list is behind the first')
            assert 'its revision is 10, and was 12 before' in recorder.complaints[0]
            assert recorder.states == [{'/t/a': b'1'}, {'/t/a': b'2'}]


def test_guard_compares_with_the_state_known_at_the_call() -> None:
    """Check that answers may arrive out of order: the older one is not suspicious."""
    noted: list[KnownCluster] = []
    guard = Guard(KNOWN_CLUSTER, noted.append)
    before = guard.known_cluster
    guard.accept_reply(before, cluster.Header(1, 20, 2), 'e')
    guard.accept_reply(before, cluster.Header(1, 15, 2), 'e')
    assert guard.known_cluster == KnownCluster(IDENTITY, 1, 20, 2)
    assert noted == [KnownCluster(IDENTITY, 1, 20, 2)]
    with pytest.raises(StrangeEtcd):
        guard.accept_reply(guard.known_cluster, cluster.Header(1, 19, 2), 'e')
    with pytest.raises(StrangeEtcd):
        guard.raise_if_refused()


def test_raft_term_of_a_candidate_is_not_strange() -> None:
    """Check a watch with a candidate's term while the leader still answers with its own."""
    guard = Guard(KnownCluster(IDENTITY, 1, 10, 2), lambda _: None)
    assert guard.observe(guard.known_cluster, cluster.Header(1, 12, 3))
    guard.accept_reply(guard.known_cluster, cluster.Header(1, 12, 2), 'e')
    assert guard.known_cluster == KnownCluster(IDENTITY, 1, 12, 2)
    guard.accept_reply(guard.known_cluster, cluster.Header(1, 12, 3), 'e')
    with pytest.raises(StrangeEtcd, match='raft term is 2, and was 3 before'):
        guard.accept_reply(guard.known_cluster, cluster.Header(1, 12, 2), 'e')


def test_presence_is_not_published_in_another_etcd(own_etcd: Etcd) -> None:
    """Check an etcd with a higher revision and term than the known ones."""
    with (
        closing(Store(make_config(own_etcd.endpoint), Guard(KnownCluster(IDENTITY, 0, 1, 1), lambda _: None))) as store,
        pytest.raises(StrangeEtcd, match='its /cluster is missing'),
    ):
        Presence(store, '/c', {'token': 'mine'}, lambda _: None).start()
    assert own_etcd.get('/c') is None


def test_first_client_writes_the_identity_and_the_next_adopts_it(own_etcd: Etcd) -> None:
    first, second = Guard(KnownCluster(), lambda _: None), Guard(KnownCluster(), lambda _: None)
    for guard, identity in ((first, IDENTITY), (second, OTHER_IDENTITY)):
        with closing(Store(make_config(own_etcd.endpoint), guard)) as store:
            store.adopt(encode(cluster.ClusterIdentity(identity, 'now')))
            store.require_identity()
    assert own_etcd.get('/cluster') == CLUSTER_VALUE
    assert first.known_cluster.identity == second.known_cluster.identity == IDENTITY
    assert second.known_cluster.revision == 2


def test_identity_is_adopted_despite_a_lost_answer(own_etcd: Etcd) -> None:
    with Proxy(own_etcd.port) as proxy:
        guard = Guard(KnownCluster(), lambda _: None)
        with closing(Store(make_config(proxy.address), guard)) as store:
            assert store.get('/x') is None
            proxy.lose_answer(b'"identity"', lambda: own_etcd.get('/cluster') is not None)
            store.adopt(CLUSTER_VALUE.decode())
    assert guard.known_cluster.identity == IDENTITY


def test_cluster_key_without_an_identity_is_refused(own_etcd: Etcd) -> None:
    own_etcd.put('/cluster', '{}')
    with (
        closing(Store(make_config(own_etcd.endpoint), Guard(KnownCluster(), lambda _: None))) as store,
        pytest.raises(EcompError, match='/cluster is malformed: .* Fix: etcdctl del /cluster'),
    ):
        store.adopt(CLUSTER_VALUE.decode())


# The file that remembers etcd, and an end that is written while etcd becomes strange


def test_written_end_is_kept_if_etcd_is_then_found_strange(own_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the lease is not revoked: that would delete the written record."""
    unguarded_store, guard = Store(make_config(own_etcd.endpoint)), Guard(KnownCluster(), lambda _: None)
    store, instance, compute = Store(make_config(own_etcd.endpoint), guard), str(uuid4()), str(uuid4())
    request, record = keys.request(compute, instance), keys.record(compute, instance)
    own_etcd.put(request, '{}')
    entry, ask = unguarded_store.get(request), store._connection.ask
    assert entry is not None

    def ask_then_mark_strange(*args: Any) -> Any:
        answer = ask(*args)
        if request in args[-1]:
            guard._refusal = 'it is not the one that this compute knew'
        return answer

    monkeypatch.setattr(store._connection, 'ask', ask_then_mark_strange)
    error = Failure('image', 'no such image', 'nothing is left')
    with pytest.raises(StrangeEtcd):
        write_final_record(
            store, Record(instance, compute, ERROR, error=error), [Unchanged(request, entry.revision)], [request]
        )
    assert unguarded_store.get(request) is None
    assert unguarded_store.get(record) is not None


def test_known_etcd_is_written_soon_and_at_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[Path] = []
    real = state.write_durably
    monkeypatch.setattr(state, 'write_durably', lambda path, text: (writes.append(path), real(path, text)))
    memory = KnownEtcd(tmp_path)
    assert memory.load() == KnownCluster()
    with start_and_stop(memory):
        for revision in range(500):
            memory.schedule_write(KnownCluster(IDENTITY, 1, revision, 2))
        wait_until(
            lambda: KnownEtcd(tmp_path).load().revision == 499, 5, 'the last is written without a further change'
        )
        assert len(writes) <= 3
        memory.schedule_write(KnownCluster(IDENTITY, 1, 500, 2))
    assert KnownEtcd(tmp_path).load() == KnownCluster(IDENTITY, 1, 500, 2)
    assert [path.name for path in tmp_path.iterdir()] == ['etcd.json']


def test_first_seen_revision_is_remembered(tmp_path: Path) -> None:
    memory = KnownEtcd(tmp_path)
    assert memory.load().first_seen_revision == 0
    guard = Guard(KnownCluster(), memory.schedule_write)
    guard.accept_reply(guard.known_cluster, cluster.Header(1, 350, 2), 'e')
    guard.adopt(CLUSTER_VALUE, 'e')
    with start_and_stop(memory):
        guard.accept_reply(guard.known_cluster, cluster.Header(1, 400, 2), 'e')
    assert KnownEtcd(tmp_path).load() == KnownCluster(IDENTITY, 1, 400, 2, first_seen_revision=350)


def test_failed_write_is_logged_once_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = KnownEtcd(tmp_path / 'not' / 'there')
    memory.schedule_write(KNOWN_CLUSTER)
    with start_and_stop(memory):
        wait_until(lambda: caplog.records, 5, 'it is said')
        memory.schedule_write(KnownCluster(IDENTITY, 1, 11, 2))
        (tmp_path / 'not' / 'there').mkdir(parents=True)
        memory.schedule_write(KnownCluster(IDENTITY, 1, 12, 2))
        wait_until(
            lambda: KnownEtcd(tmp_path / 'not' / 'there').load().revision == 12, 5, 'it is written when it can be'
        )
    assert len(caplog.records) == 1


@pytest.mark.parametrize('text', ['', '{}', '[]', 'x', '{"version": 2}', encode(KNOWN_CLUSTER).replace('10', '"10"')])
def test_malformed_memory_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / 'etcd.json').write_text(text)
    with pytest.raises(UsageError, match=r'etcd\.json: .*Fix: restore the file, or run `ecompute --accept-new-etcd`'):
        KnownEtcd(tmp_path).load()
