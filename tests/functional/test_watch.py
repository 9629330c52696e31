"""Test watches of etcd, of one prefix and several, and the guard that checks each answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest

from ecomp.agent.host import state
from ecomp.agent.host.state import KnownEtcd
from ecomp.errors import EcompError, StrangeEtcd, UsageError
from ecomp.model import cluster, keys
from ecomp.model.cluster import KnownCluster
from ecomp.model.record import ERROR, Failure, Record
from ecomp.store.client import Delete, Entry, Guard, Put, Store, Unchanged
from ecomp.store.presence import Presence
from ecomp.store.sharing import write_end
from ecomp.store.watch import Follower
from tests.functional.fake_etcd import FakeEtcd, Frame
from tests.functional.following import Following, Hearing
from tests.functional.present import start_and_stop
from tests.kit.proxy import Proxy
from tests.kit.servers import PATIENCE, Etcd, until
from tests.kit.store_client import config

# A follower on a real etcd sees each change, despite outages of etcd and of the connection.


def test_a_follower_sees_what_is_there_then_each_change(etcd: Etcd, store: Store, prefix: str) -> None:
    a, b = prefix + 'a', prefix + 'b'
    store.commit([], [Put(a, '1')])
    with Following(etcd.endpoint, prefix) as recorder:
        recorder.sees({a: b'1'}, 'what was there before')
        store.commit([], [Put(b, '1'), Put(prefix[:-1] + '0', 'beside it')])
        recorder.sees({a: b'1', b: b'1'}, 'a put')
        store.commit([], [Put(a, '2'), Delete(b)])
        recorder.sees({a: b'2'}, 'a change and a delete in one transaction')
        store.commit([], [Delete(a)])
        recorder.sees({}, 'the last delete')
        lease = store.grant(60)
        store.commit([], [Put(b, 'leased', lease)])
        recorder.sees({b: b'leased'}, 'a leased key')
        store.revoke(lease)
        recorder.sees({}, 'the end of its lease')
    assert recorder.states[:2] == [{a: b'1'}, {a: b'1', b: b'1'}]


def test_a_follower_is_told_of_nothing_when_nothing_happens(etcd: Etcd, prefix: str) -> None:
    with Following(etcd.endpoint, prefix) as recorder, Following(etcd.endpoint, prefix, resync=0.1) as relisting:
        until(lambda: len(relisting.states) > 5, 10, 'a follower with a short resync lists again')
        assert recorder.states == [{}]


def test_a_key_that_is_no_text_is_no_end(etcd: Etcd, prefix: str) -> None:
    with Following(etcd.endpoint, prefix) as recorder:
        recorder.sees({}, 'nothing')
        etcd.put(prefix + 'a', b'\xff\xfe')
        etcd.call('kv/put', {'key': 'L3Rlc3Qv//8=', 'value': ''})  # /test/\xff\xff
        etcd.put(prefix + 'b', '')
        recorder.sees({prefix + 'a': b'\xff\xfe', prefix + 'b': b''}, 'keys and values that are no text')


def test_a_killed_etcd_is_followed_again_and_said_once(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, 'ecomp.store.watch')
    own_etcd.put('/t/a', '1')
    with Following(own_etcd.endpoint, '/t/') as recorder:
        recorder.sees({'/t/a': b'1'}, 'the beginning')
        for value in ('2', '3'):
            caplog.clear()
            own_etcd.kill()
            until(lambda: caplog.records, 10, 'the loss is logged')
            cpu_before, began = time.process_time(), time.monotonic()
            threading.Event().wait(3.0)  # a measurement, not a synchronisation
            cpu_share = (time.process_time() - cpu_before) / (time.monotonic() - began)
            own_etcd.start()
            own_etcd.put('/t/a', value)
            recorder.sees({'/t/a': value.encode()}, 'a change after the restart')
            assert [record.levelname for record in caplog.records] == ['WARNING', 'INFO']
            assert own_etcd.endpoint in caplog.messages[0]
            assert 'is back' in caplog.messages[1]
            assert cpu_share < 0.05


def test_an_etcd_that_ends_in_peace_is_followed_again(own_etcd: Etcd) -> None:
    """Check that etcd's message before it closes the connection does not change later requests."""
    with Following(own_etcd.endpoint, '/t/') as recorder:
        for value in ('1', '2', '3'):
            own_etcd.put('/t/a', value)
            recorder.sees({'/t/a': value.encode()}, 'a change')
            own_etcd.stop()
            own_etcd.start()


def test_a_frozen_etcd_is_noticed_and_followed_again(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, 'ecomp.store.watch')
    with Following(own_etcd.endpoint, '/t/') as recorder:
        recorder.sees({}, 'the beginning')
        own_etcd.pause()
        until(lambda: caplog.records, 25, 'the follower notices that nobody answers')
        own_etcd.resume()
        until(own_etcd.is_ready, 10, 'etcd is awake')
        own_etcd.put('/t/a', '1')
        recorder.sees({'/t/a': b'1'}, 'a change after it')
        assert [record.levelname for record in caplog.records] == ['WARNING', 'INFO']


def test_a_short_freeze_loses_nothing(own_etcd: Etcd) -> None:
    with Following(own_etcd.endpoint, '/t/') as recorder:
        recorder.sees({}, 'the beginning')
        own_etcd.pause()
        threading.Timer(0.5, own_etcd.resume).start()
        own_etcd.put('/t/a', '1')  # returns once etcd is awake
        recorder.sees({'/t/a': b'1'}, 'a change made while it was frozen')


def test_stop_does_not_wait(own_etcd: Etcd) -> None:
    def check_stop(state: str, seen: Following) -> None:
        began = time.monotonic()
        seen.follower.stop()
        assert time.monotonic() - began < PATIENCE * 3, state

    Following(own_etcd.endpoint, '/t/').follower.stop()  # never started
    recorder = Following(own_etcd.endpoint, '/t/').__enter__()
    check_stop('before it saw anything', recorder)
    recorder = Following(own_etcd.endpoint, '/t/').__enter__()
    recorder.sees({}, 'the beginning')
    check_stop('watching', recorder)
    recorder = Following(own_etcd.endpoint, '/t/').__enter__()
    recorder.sees({}, 'the beginning')
    own_etcd.pause()
    check_stop('watching a frozen etcd', recorder)
    check_stop('listing a frozen etcd', Following(own_etcd.endpoint, '/t/').__enter__())
    own_etcd.resume()
    own_etcd.kill()
    check_stop('etcd is gone', Following(own_etcd.endpoint, '/t/').__enter__())


# One follower of many prefixes on a real etcd: each callback sees only its prefix.


class SeveralFollowing:
    """A follower of several prefixes that records the states, outages and recoveries."""

    def __init__(self, endpoint: str, prefixes: Sequence[str], resync: float = 60.0) -> None:
        self.lost: list[EcompError] = []
        self.back: list[bool] = []
        self.heard = [Hearing() for _ in prefixes]
        subscriptions = [(prefix, recorder.on_state) for prefix, recorder in zip(prefixes, self.heard, strict=True)]
        callbacks = {'on_lost': self.lost.append, 'on_back': lambda: self.back.append(True)}
        self.follower = Follower(config(endpoint, 2.0), subscriptions, resync, **callbacks)  # type: ignore[arg-type]
        self.follower.start()


@pytest.fixture
def follow(etcd_proxy: Proxy) -> Iterator[Callable[..., SeveralFollowing]]:
    started: list[SeveralFollowing] = []

    def start(*prefixes: str, resync: float = 60.0) -> SeveralFollowing:
        started.append(SeveralFollowing(etcd_proxy.address, prefixes, resync))
        return started[-1]

    yield start
    for following in started:
        following.follower.stop()


def test_each_sees_its_own_and_nothing_else(follow: Callable[..., SeveralFollowing], store: Store, prefix: str) -> None:
    a, b, unwatched = prefix + 'a/1', prefix + 'b/1', prefix + 'c/1'
    store.commit([], [Put(a, '1'), Put(unwatched, '1')])
    first, second, twin, empty = follow(prefix + 'a/', prefix + 'b/', prefix + 'a/', prefix + 'd/').heard
    first.sees({a: b'1'})
    second.sees({})
    store.commit([], [Put(b, '1'), Put(a, '2')])
    first.sees({a: b'2'})
    second.sees({b: b'1'})
    store.commit([], [Delete(b), Put(unwatched, '2')])
    second.sees({})
    twin.sees({a: b'2'})
    store.commit([], [Delete(a)])
    first.sees({})
    twin.sees({})
    assert first.states == twin.states == [{a: b'1'}, {a: b'2'}, {}]
    assert second.states == [{}, {b: b'1'}, {}]
    assert empty.states == [{}]


def test_every_change_of_many_prefixes_between_list_and_watch_is_seen(
    follow: Callable[..., SeveralFollowing], store: Store, prefix: str
) -> None:
    names = [f'{prefix}{number:03d}/' for number in range(50)]
    following = follow(*names, resync=0.2)
    for value in range(10):
        for name in names:
            store.commit([], [Put(f'{name}x', str(value))])
    for name, recorder in zip(names, following.heard, strict=True):
        recorder.sees({f'{name}x': b'9'})
        shown = [int(state[f'{name}x']) for state in recorder.states if state]
        assert shown == sorted(shown)


def test_what_changed_while_etcd_was_away_is_seen_once_it_is_back(
    follow: Callable[..., SeveralFollowing], etcd_proxy: Proxy, store: Store, prefix: str
) -> None:
    a, b = prefix + 'a/1', prefix + 'b/1'
    store.commit([], [Put(a, '1'), Put(b, '1')])
    following = follow(prefix + 'a/', prefix + 'b/')
    first, second = following.heard
    first.sees({a: b'1'})
    second.sees({b: b'1'})
    etcd_proxy.go_away()
    until(lambda: following.lost, 30, 'it is told of the loss')
    store.commit([], [Delete(a), Put(b, '2')])
    etcd_proxy.come_back()
    first.sees({})
    second.sees({b: b'2'})
    assert (len(following.lost), following.back) == (1, [True])


def test_one_prefix_s_history_is_gone(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, 'ecomp.store.watch')
    with Proxy(own_etcd.port) as proxy:
        own_etcd.put('/t/a/1', '1')
        own_etcd.put('/t/b/1', '1')
        following = SeveralFollowing(proxy.address, ['/t/a/', '/t/b/'])
        first, second = following.heard
        second.sees({'/t/b/1': b'1'})
        proxy.go_away()
        own_etcd.put('/t/a/1', '2')
        own_etcd.delete('/t/b/1')
        own_etcd.compact()
        proxy.come_back()
        first.sees({'/t/a/1': b'2'})
        second.sees({})
        own_etcd.put('/t/b/2', '3')
        second.sees({'/t/b/2': b'3'})
        following.follower.stop()


# Rule 10 on the wire: how another etcd is detected; and frames that a real etcd seldom sends.


IDENTITY = 'b8756be5-a30d-4311-920c-0ad996367a8e'
OTHER = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
HERE = cluster.new(IDENTITY, 'now').encode()
KNOWN = KnownCluster(IDENTITY, 1, 10, 2)


class GuardedFollower(Following):
    """A follower of /t/ with a guard; it records the guard's updates and complaints."""

    def __init__(self, endpoint: str, known: KnownCluster = KNOWN) -> None:
        self.learnt: list[KnownCluster] = []
        self.strange: list[str] = []
        self.guard = Guard(known, self.learnt.append)
        self.guard.when_strange(self.strange.append)
        super().__init__(endpoint, '/t/', guard=self.guard)


@pytest.mark.parametrize(
    'frames',
    [
        pytest.param(lambda fake: [fake.reply(created=True, canceled=True, cancel_reason='no')], id='refused'),
        pytest.param(lambda fake: [fake.reply(compact_revision=9)], id='compacted'),
        pytest.param(lambda fake: [fake.reply(created=True), fake.reply(canceled=True)], id='cancelled later'),
        pytest.param(lambda fake: [fake.reply(created=True), None], id='ended'),
        pytest.param(lambda fake: [fake.reply(created=True), grpc.StatusCode.UNAVAILABLE], id='broken'),
        pytest.param(lambda fake: [fake.event(b'/t/a', b'wrong', header=(1, 10, 1))], id='older term'),
        pytest.param(lambda fake: [fake.event(b'/t/a', b'wrong', header=(1, 9, 2))], id='older revision'),
        pytest.param(lambda fake: [fake.event(b'/t/a', b'wrong', header=(2, 11, 2))], id='other cluster'),
    ],
)
def test_a_watch_that_cannot_be_trusted_is_listed_anew(frames: object) -> None:
    with FakeEtcd({b'/cluster': HERE, b'/t/a': b'1'}) as fake:
        script: list[Frame] = frames(fake)  # type: ignore[operator]
        fake.watches.put(script)
        fake.watches.put([fake.reply(created=True), fake.event(b'/t/a', b'2', header=(1, 11, 2))])
        with GuardedFollower(fake.endpoint) as recorder:
            recorder.sees({'/t/a': b'2'})
            assert recorder.states == [{'/t/a': b'1'}, {'/t/a': b'2'}] or recorder.states == [
                {'/t/a': b'1'}, {'/t/a': b'1'}, {'/t/a': b'2'}
            ]
            assert fake.lists == 2
            assert recorder.strange == []


def test_a_watch_knows_no_less_than_the_list_before_it() -> None:
    """Check an etcd that is restored between list and watch, also if less was known before."""
    with FakeEtcd({b'/cluster': HERE, b'/t/a': b'1'}) as fake:
        fake.watches.put([fake.reply(created=True), fake.event(b'/t/a', b'wrong', header=(1, 9, 2))])
        fake.watches.put([fake.reply(created=True), fake.event(b'/t/a', b'2', header=(1, 11, 2))])
        with GuardedFollower(fake.endpoint, KnownCluster(IDENTITY, 1, 5, 2)) as recorder:
            recorder.sees({'/t/a': b'2'})
            assert {'/t/a': b'wrong'} not in recorder.states
            assert fake.lists == 2
            assert recorder.strange == []


def test_what_others_have_been_answered_by_now_does_not_make_a_watch_old() -> None:
    """Check a busy host: another of our calls is answered before a watched change arrives."""

    class Busy(GuardedFollower):
        def on_state(self, state: Mapping[str, Entry]) -> None:
            super().on_state(state)
            self.guard.check(self.guard.known, cluster.Header(1, 20, 2), 'e')

    with FakeEtcd({b'/cluster': HERE, b'/t/a': b'1'}) as fake:
        events = [fake.event(b'/t/a', value, header=(1, 11, 2)) for value in (b'2', b'3')]
        fake.watches.put([fake.reply(created=True), *events])
        with Busy(fake.endpoint) as recorder:
            recorder.sees({'/t/a': b'3'})
            assert recorder.states == [{'/t/a': b'1'}, {'/t/a': b'2'}, {'/t/a': b'3'}]
            assert fake.lists == 1
            assert recorder.strange == []


def test_a_watch_that_is_always_refused_is_tried_ever_more_seldom() -> None:
    with FakeEtcd({b'/cluster': HERE}) as fake:
        for _ in range(100):
            fake.watches.put([fake.reply(created=True, canceled=True, cancel_reason='permission denied')])
        with GuardedFollower(fake.endpoint):
            until(lambda: fake.lists >= 3, 10, 'it lists again')
            before = fake.lists
            threading.Event().wait(4.0)  # a measurement, not a synchronisation
            assert fake.lists - before <= 4


@pytest.mark.parametrize(
    ('header', 'value', 'said'),
    [
        ((1, 9, 2), HERE, 'it is at revision 9, and 10 was seen'),
        ((1, 10, 1), HERE, 'it is at raft term 1, and 2 was seen'),
        ((2, 10, 2), HERE, 'its cluster id is 2, and 1 was known'),
        ((1, 10, 2), cluster.new(OTHER, 'now').encode(), f'its identity is {OTHER}, and {IDENTITY} was known'),
        ((1, 10, 2), None, f'/cluster is not there, and identity {IDENTITY} was known'),
        ((1, 10, 2), b'?', '/cluster cannot be read'),
    ],
)
def test_a_list_of_another_etcd(header: tuple[int, int, int], value: bytes | None, said: str) -> None:
    with FakeEtcd({b'/t/a': b'1', **({b'/cluster': value} if value else {})}, header) as fake:
        with GuardedFollower(fake.endpoint) as recorder:
            until(lambda: recorder.strange, 10, 'it is told')
            with closing(Store(config(fake.endpoint), recorder.guard)) as store:
                for call in (lambda: store.get('/x'), lambda: store.grant(5), lambda: store.keep_alive(1)):
                    with pytest.raises(StrangeEtcd):
                        call()
                with pytest.raises(StrangeEtcd):
                    store.commit([], [Put('/x', 'x')])  # this fake could not answer it
        assert len(recorder.strange) == 1
        assert said in recorder.strange[0]
        assert '--accept-new-etcd' in recorder.strange[0]
        assert recorder.states == []
        assert not any(cluster_noted.revision > 10 or cluster_noted.cluster != 1 for cluster_noted in recorder.learnt)


def test_it_turns_strange_between_two_lists() -> None:
    with FakeEtcd({b'/cluster': HERE, b'/t/a': b'1'}) as fake:
        fake.watches.put([fake.reply(created=True), fake.event(b'/t/a', b'2', header=(1, 12, 3)), None])
        with GuardedFollower(fake.endpoint) as recorder:
            until(lambda: recorder.strange, 10, 'the second list is behind the first')
            assert 'it is at revision 10, and 12 was seen' in recorder.strange[0]
            assert recorder.states == [{'/t/a': b'1'}, {'/t/a': b'2'}]


def test_what_was_compared_is_what_was_known_when_it_was_asked() -> None:
    """Check that answers may arrive out of order: the older one is not suspicious."""
    noted: list[KnownCluster] = []
    guard = Guard(KNOWN, noted.append)
    before = guard.known
    guard.check(before, cluster.Header(1, 20, 2), 'e')
    guard.check(before, cluster.Header(1, 15, 2), 'e')
    assert guard.known == KnownCluster(IDENTITY, 1, 20, 2)
    assert noted == [KnownCluster(IDENTITY, 1, 20, 2)]
    with pytest.raises(StrangeEtcd):
        guard.check(guard.known, cluster.Header(1, 19, 2), 'e')
    with pytest.raises(StrangeEtcd):
        guard.admit()


def test_a_member_that_has_just_stood_for_election_is_no_other_etcd() -> None:
    """Check a watch with a candidate's term while the leader still answers with its own."""
    guard = Guard(KnownCluster(IDENTITY, 1, 10, 2), lambda _: None)
    assert guard.observe(guard.known, cluster.Header(1, 12, 3))
    guard.check(guard.known, cluster.Header(1, 12, 2), 'e')
    assert guard.known == KnownCluster(IDENTITY, 1, 12, 2)
    guard.check(guard.known, cluster.Header(1, 12, 3), 'e')
    with pytest.raises(StrangeEtcd, match='raft term 2, and 3 was seen'):
        guard.check(guard.known, cluster.Header(1, 12, 2), 'e')


# On a real etcd


def test_presence_is_not_published_under_another(own_etcd: Etcd) -> None:
    """Check an etcd with a higher revision and term than the known ones."""
    with (
        closing(Store(config(own_etcd.endpoint), Guard(KnownCluster(IDENTITY, 0, 1, 1), lambda _: None))) as store,
        pytest.raises(StrangeEtcd, match='/cluster is not there'),
    ):
        Presence(store, '/c', {'token': 'mine'}, lambda _: None).start()
    assert own_etcd.get('/c') is None


def test_the_first_writes_who_it_is_and_the_next_takes_it(own_etcd: Etcd) -> None:
    first, second = Guard(KnownCluster(), lambda _: None), Guard(KnownCluster(), lambda _: None)
    for guard, identity in ((first, IDENTITY), (second, OTHER)):
        with closing(Store(config(own_etcd.endpoint), guard)) as store:
            store.adopt(cluster.new(identity, 'now'))
            store.recognise()
    assert own_etcd.get('/cluster') == HERE
    assert first.known.identity == second.known.identity == IDENTITY
    assert second.known.revision == 2


def test_an_answer_lost_while_it_writes_who_it_is(own_etcd: Etcd) -> None:
    with Proxy(own_etcd.port) as proxy:
        guard = Guard(KnownCluster(), lambda _: None)
        with closing(Store(config(proxy.address), guard)) as store:
            assert store.get('/x') is None
            proxy.lose_answer(b'"identity"', lambda: own_etcd.get('/cluster') is not None)
            store.adopt(HERE.decode())
    assert guard.known.identity == IDENTITY


def test_what_names_no_identity_is_not_taken(own_etcd: Etcd) -> None:
    own_etcd.put('/cluster', '{}')
    with (
        closing(Store(config(own_etcd.endpoint), Guard(KnownCluster(), lambda _: None))) as store,
        pytest.raises(EcompError, match='remove that key'),
    ):
        store.adopt(HERE.decode())


# The file that remembers etcd, and an end that is written while etcd becomes strange


def test_an_end_that_was_written_stays_where_etcd_is_found_strange_by_then(
    own_etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the lease is not revoked: that would delete the written record."""
    unguarded_store, guard = Store(config(own_etcd.endpoint)), Guard(KnownCluster(), lambda _: None)
    store, instance, compute = Store(config(own_etcd.endpoint), guard), str(uuid4()), str(uuid4())
    request, record = keys.request(compute, instance), keys.record(compute, instance)
    own_etcd.put(request, '{}')
    entry, ask = unguarded_store.get(request), store._connection.ask
    assert entry is not None

    def ask_then_mark_strange(*words: Any) -> Any:
        answer = ask(*words)
        if request in words[-1]:
            guard._strange = 'it is not the one that this compute knew'
        return answer

    monkeypatch.setattr(store._connection, 'ask', ask_then_mark_strange)
    error = Failure('image', 'no such image', 'nothing is left')
    with pytest.raises(StrangeEtcd):
        write_end(store, Record(instance, compute, ERROR, error=error), [Unchanged(request, entry.revision)], [request])
    assert unguarded_store.get(request) is None
    assert unguarded_store.get(record) is not None


def test_it_is_remembered_soon_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[Path] = []
    real = state.write_durably
    monkeypatch.setattr(state, 'write_durably', lambda path, text: (writes.append(path), real(path, text)))
    memory = KnownEtcd(tmp_path)
    assert memory.load() == KnownCluster()
    with start_and_stop(memory):
        for revision in range(500):
            memory.note(KnownCluster(IDENTITY, 1, revision, 2))
        until(lambda: KnownEtcd(tmp_path).load().revision == 499, 5, 'the last is written without a further change')
        assert len(writes) <= 3
        memory.note(KnownCluster(IDENTITY, 1, 500, 2))
    assert KnownEtcd(tmp_path).load() == KnownCluster(IDENTITY, 1, 500, 2)
    assert [path.name for path in tmp_path.iterdir()] == ['etcd.json']


def test_at_which_revision_it_was_first_seen_is_remembered_and_an_older_acceptance_handed_over(tmp_path: Path) -> None:
    memory = KnownEtcd(tmp_path)
    assert (memory.accepted(), memory.first_seen()) == (0, 0)
    (tmp_path / 'accepted').write_text('345\n')
    assert memory.accepted() == 345
    memory.note_first_seen(350, has_noted_acceptance=False)
    assert (KnownEtcd(tmp_path).accepted(), KnownEtcd(tmp_path).first_seen()) == (345, 350)
    memory.note_first_seen(350, has_noted_acceptance=True)
    assert KnownEtcd(tmp_path).accepted() == 0
    for name, read in (('accepted', memory.accepted), ('first-seen', memory.first_seen)):
        (tmp_path / name).write_text('rubbish')
        with pytest.raises(UsageError, match=f'{name}: .*restore it, or ecompute --accept-new-etcd'):
            read()


def test_a_full_disk_is_said_once_and_no_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = KnownEtcd(tmp_path / 'not' / 'there')
    memory.note(KNOWN)
    with start_and_stop(memory):
        until(lambda: caplog.records, 5, 'it is said')
        memory.note(KnownCluster(IDENTITY, 1, 11, 2))
        (tmp_path / 'not' / 'there').mkdir(parents=True)
        memory.note(KnownCluster(IDENTITY, 1, 12, 2))
        until(lambda: KnownEtcd(tmp_path / 'not' / 'there').load().revision == 12, 5, 'it is written when it can be')
    assert len(caplog.records) == 1


@pytest.mark.parametrize('text', ['', '{}', '[]', 'x', '{"version": 2}', cluster.to_json(KNOWN).replace('10', '"10"')])
def test_a_file_that_is_not_ours_is_no_memory(tmp_path: Path, text: str) -> None:
    (tmp_path / 'etcd.json').write_text(text)
    with pytest.raises(UsageError, match=r'etcd\.json'):
        KnownEtcd(tmp_path).load()
