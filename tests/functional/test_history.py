"""The history of etcd's changes, and the history that the tests' own witness records."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ecomp.errors import Unreachable
from ecomp.model.events import Change
from ecomp.store import by_h2
from ecomp.store import history as room
from ecomp.store.client import Put
from ecomp.store.history import ANSWERS, FULL, History
from ecomp.store.messages import WatchCreate
from tests.kit.commands import Control
from tests.kit.ending import Kept
from tests.kit.history import Change as HistoryChange
from tests.kit.journal import JOURNAL, own
from tests.kit.judging import is_broken
from tests.kit.servers import Etcd, PlacementServer, b64, until
from tests.kit.store_client import config, connected
from tests.kit.story import SMALL, place, reached
from tests.kit.witness import Compacted, Revisions, judged

# The past is read completely or not at all, even if etcd stalls, and with any content.


# The first and last revision of the test's own changes. etcd's first answer has FULL of them. The revision after LAST
# is another change.
FIRST = 2
LAST = FULL + 101
# etcd stalls this long in the middle of an answer.
FROZEN = 2.6


@pytest.fixture(scope='module')
def stalling() -> Iterator[Etcd]:
    """An etcd with many changes, for tests to freeze and resume."""
    with Etcd() as etcd:
        with connected(etcd.endpoint) as store:
            for number in range(FIRST, LAST + 1):
                store.commit([], [Put(f'/names/{number % 50}', 'x' * 200)])
        assert etcd.put('somebody-else', '1') == LAST + 1
        yield etcd


class Reading:
    """A thread that reads a history to its end; a wait for the end has a timeout."""

    def __init__(self, history: History, on_first: Any = None) -> None:
        self.told: list[list[Change]] = []
        self.ended: str | Exception = ''
        self._history, self._on_first = history, on_first
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for changes in self._history:
                self.told.append(changes)
                if len(self.told) == 1 and self._on_first:
                    self._on_first()
            self.ended = 'at the end'
        except Exception as error:
            self.ended = error
        finally:
            self._history.close()

    @property
    def revisions(self) -> list[int]:
        return [changes[0].revision for changes in self.told]

    def end(self, seconds: float = 20.0) -> str | Exception:
        return until(lambda: self.ended, seconds, f'it ends, after {len(self.told)} revisions')


def test_an_etcd_that_stalls_in_the_middle_of_the_past_does_not_end_it(stalling: Etcd) -> None:
    def stall() -> None:
        stalling.pause()
        threading.Timer(FROZEN, stalling.resume).start()

    history = History(config(stalling.endpoint), False, print)
    reading = Reading(history, stall)
    assert reading.end() == 'at the end'
    assert reading.revisions == list(range(FIRST, LAST + 1))
    assert history.upcoming == LAST + 2  # a watch from there repeats no change


def test_an_etcd_that_stays_silent_is_unreachable(stalling: Etcd) -> None:
    reading = Reading(History(config(stalling.endpoint, timeout=1.0), False, print), stalling.pause)
    try:
        outcome = reading.end()
    finally:
        stalling.resume()
    # On a busy machine the whole answer may have been sent before etcd was frozen.
    assert isinstance(outcome, Unreachable) or len(reading.told) == LAST + 1 - FIRST, outcome
    assert reading.revisions == list(range(FIRST, FIRST + len(reading.told)))
    until(stalling.is_ready, 10, 'etcd is awake')


def test_what_was_not_handed_on_is_upcoming(stalling: Etcd) -> None:
    history = History(config(stalling.endpoint), False, print)
    past = iter(history)
    try:
        assert history.upcoming == 1
        assert [next(past)[0].revision for _ in range(3)] == [FIRST, FIRST + 1, FIRST + 2]
        assert history.upcoming == FIRST + 3
    finally:
        past.close()  # type: ignore[attr-defined]
        history.close()


@pytest.mark.parametrize('first', [LAST - FULL + 1, LAST + 1], ids=['as many as an answer has', 'none'])
def test_the_past_ends_where_the_last_answer_says_not_that_it_is_the_last(stalling: Etcd, first: int) -> None:
    history = History(config(stalling.endpoint), False, print, first)
    reading = Reading(history)
    assert reading.end() == 'at the end'
    assert reading.revisions == list(range(first, LAST + 1))
    assert history.upcoming == LAST + 2


@pytest.mark.parametrize('answers', [ANSWERS, 3 * ANSWERS])
def test_a_key_that_was_changed_is_waited_for(stalling: Etcd, monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    """An etcd 3.4.23 may report that all changes were sent while it still reads the first ones."""
    monkeypatch.setattr(room, 'SPACED', 0.0)

    class Late:
        """A watch that reports `answers` times that all was sent, before its first change."""

        def __init__(self, watch: Any) -> None:
            self._watch, self.cancel = watch, watch.cancel

        def __iter__(self) -> Iterator[Any]:
            remaining = answers
            for reply in self._watch:
                nothing = {'events': [], 'created': False, 'canceled': False, 'compact_revision': 0, 'fragment': False}
                for _ in range(remaining if reply.events else 0):
                    yield SimpleNamespace(header=reply.header, **nothing)
                remaining = 0 if reply.events else remaining
                yield reply

    with connected(stalling.endpoint) as store:
        assert [store.has_changed('/', first) for first in (1, LAST, LAST + 1, LAST + 2)] == [True, True, False, False]
    history = History(config(stalling.endpoint), False, print)
    watch = history._store.watch
    history._store.watch = lambda *how: Late(watch(*how))  # type: ignore[method-assign]
    reading = Reading(history)
    assert reading.end() == 'at the end'
    assert reading.revisions == list(range(FIRST, LAST + 1))


def test_what_is_longer_than_any_answer_is_told_in_whole_revisions(own_etcd: Etcd) -> None:
    """All changes take 72 MiB with their previous values.

    A revision of three keys comes in several pieces.
    """
    large, three = 'x' * 1_400_000, [Put(f'/names/{item}', item * 450_000) for item in 'abc']
    with connected(own_etcd.endpoint) as store:
        for _ in range(23):
            store.commit([], [Put('/names/large', large)])
        store.commit([], three)
        store.commit([], three)
        for _ in range(3):
            store.commit([], [Put('/names/large', large)])
    assert 51 * len(large) + 9 * 450_000 > by_h2.LONGEST
    history = History(config(own_etcd.endpoint), False, print)
    streams = counted(history)
    reading = Reading(history)
    assert reading.end(30) == 'at the end'
    assert reading.revisions == list(range(2, 30))
    assert [[item.key for item in changes] for changes in reading.told] == [
        *[['/names/large']] * 23,
        *[['/names/a', '/names/b', '/names/c']] * 2,
        *[['/names/large']] * 3,
    ]
    sizes = [(len(item.before or b''), len(item.after or b'')) for changes in reading.told for item in changes]
    big, small = len(large), 450_000
    assert sizes == [(0, big), *[(big, big)] * 22, *[(0, small)] * 3, *[(small, small)] * 3, *[(big, big)] * 3]
    assert len(streams) == 1


def counted(history: History) -> Sequence[int]:
    """Record the revisions from which the history requests a stream; fail after ten streams."""
    revisions: list[int] = []
    watch = history._store.watch

    def watches(wanted: Sequence[WatchCreate], *rest: Any) -> Any:
        revisions.append(wanted[0].revision)
        assert len(revisions) < 10, 'it asks for ever'
        return watch(wanted, *rest)

    history._store.watch = watches  # type: ignore[method-assign]
    return revisions


@pytest.fixture
def unheard(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make each stream break before it brings a change: answers longer than 1000 bytes fail.

    A test may undo it.
    """
    monkeypatch.setattr(by_h2, 'LONGEST', 1000)
    return monkeypatch


@pytest.mark.usefixtures('unheard')
def test_a_stream_that_begins_and_brings_nothing_is_a_failure(stalling: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, 'TRIES', 2)
    history = History(config(stalling.endpoint), False, print)
    streams = counted(history)
    reading = Reading(history)
    outcome = reading.end()
    assert isinstance(outcome, Unreachable), outcome
    assert 'RESOURCE_EXHAUSTED' in str(outcome)
    assert (reading.told, list(streams)) == ([], [1, 1, 1])


def test_who_follows_hears_of_such_a_stream_once(stalling: Etcd, unheard: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    history = History(config(stalling.endpoint), True, messages.append)
    streams = counted(history)
    reading = Reading(history)
    until(lambda: len(streams) > 3, 10, 'it is asked again')
    assert [message for message in messages if 'RESOURCE_EXHAUSTED' in message] == messages
    assert len(messages) == 1
    unheard.undo()
    until(lambda: len(reading.told) == LAST - FIRST + 1, 20, 'and hears all once it can')
    assert not reading.ended


@pytest.mark.parametrize('follow', [False, True])
def test_no_end_of_the_thread_that_hears_goes_unnoticed(stalling: Etcd, follow: bool) -> None:
    class Junk:
        """A watch that fails with a bug of ours."""

        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError('a fault')

        def cancel(self) -> None:
            """Do nothing."""

    history = History(config(stalling.endpoint), follow, print)
    history._store.watch = lambda *_: Junk()  # type: ignore[method-assign]
    outcome = Reading(history).end(5)
    assert isinstance(outcome, RuntimeError), outcome


# The judge of the tests reads what the servers hold: etcd change by change, placement from its database.


@pytest.fixture
def journal() -> Iterator[None]:
    JOURNAL.begin()
    yield
    JOURNAL.end()


def test_each_change_since_the_beginning_is_read_once(own_etcd: Etcd) -> None:
    own_etcd.put('/earlier', 'here')
    revisions = Revisions(own_etcd.ask)
    revisions.begin()
    assert revisions.before == {'/earlier': Kept(b'here', 0)}
    assert (revisions.read_on(), revisions.changes) == (2, [])

    lease = int(own_etcd.call('lease/grant', {'TTL': 60})['ID'])
    own_etcd.call('kv/put', {'key': b64('/mark'), 'value': b64('x'), 'lease': lease})
    puts = [{'requestPut': {'key': b64(key), 'value': b64('1')}} for key in ('/a', '/b')]
    own_etcd.call('kv/txn', {'success': puts})
    assert revisions.read_on() == 4
    own_etcd.delete('/earlier')
    own_etcd.call('lease/revoke', {'ID': lease})
    assert revisions.read_on() == 6
    assert revisions.changes == [
        HistoryChange(3, '/mark', Kept(b'x', lease)),
        *(HistoryChange(4, key, Kept(b'1', 0)) for key in ('/a', '/b')),
        HistoryChange(5, '/earlier', None),
        HistoryChange(6, '/mark', None),
    ]


def test_what_etcd_has_forgotten_is_said(own_etcd: Etcd) -> None:
    revisions = Revisions(own_etcd.ask)
    revisions.begin()
    for _ in range(3):
        own_etcd.put('/a', 'x')
    own_etcd.compact()
    with pytest.raises(Compacted, match='before revision 4'):
        revisions.read_on()


def test_claims_are_what_placement_says(own_placement: PlacementServer) -> None:
    database = own_placement.database
    provider, idle = own_placement.make_provider(VCPU=4, DISK_GB=9), own_placement.make_provider(VCPU=2)
    assert (database.allocations(), database.capacities()) == ({}, {})
    consumer = str(uuid.uuid4())
    body = {
        'allocations': {provider: {'resources': {'VCPU': 3, 'DISK_GB': 1}}},
        'project_id': 'p',
        'user_id': 'u',
        'consumer_generation': None,
        'consumer_type': 'INSTANCE',
    }
    own_placement.call('PUT', f'/allocations/{consumer}', body)
    claims = {consumer: {provider: own_placement.allocations(consumer)[provider]}}
    assert claims == {consumer: {provider: {'VCPU': 3, 'DISK_GB': 1}}}
    assert (database.allocations(), database.capacities()) == (claims, {provider: {'VCPU': 4, 'DISK_GB': 9}})
    assert idle not in database.capacities()

    # An inventory that is reduced afterwards may be smaller than its claims.
    with contextlib.closing(sqlite3.connect(database.path)) as connection, connection:
        connection.execute("UPDATE inventories SET total = 1, updated_at = '2999-01-01' WHERE total = 4")
    assert (database.allocations(), database.capacities()) == (claims, {provider: {'DISK_GB': 9}})


@pytest.mark.usefixtures('journal')  # before the cluster
@pytest.mark.unaudited('its record is made wrong')
def test_a_test_is_judged_by_what_it_left(cluster: Control) -> None:
    compute = cluster.ecompute()
    _, instance = place(cluster)
    reached(cluster, instance, 'active')
    judged(cluster.watched)
    assert not is_broken(cluster.watched)
    # Write past the journal, as another process would.
    key, value = cluster.etcd.record_key(instance), cluster.etcd.record(instance)
    assert value is not None
    with connected(cluster.etcd.endpoint) as store:
        store.commit([], [Put(key, value.decode().replace('"active"', '"building"'))])
    with pytest.raises(AssertionError, match=f'{instance}: active, then building'):
        judged(cluster.watched)
    assert is_broken(cluster.watched)
    assert [item.words for item in JOURNAL.asks] == [(SMALL,)]
    assert [item.uuid for item in JOURNAL.computes] == [compute.uuid]
    assert JOURNAL.leave(cluster.watched)  # or it would be judged once more when it ends


@pytest.mark.usefixtures('journal')
def test_what_a_test_writes_itself_is_its_own(own_etcd: Etcd, own_placement: PlacementServer) -> None:
    own_etcd.put('/hosts/compute/first', '{}')
    own_etcd.delete('/queues/flavor/second/taker')
    own_etcd.get('/instances/nobody')
    third = {'requestPut': {'key': b64('/names/third'), 'value': b64('{}')}}
    own_etcd.call('kv/txn', {'success': [third]})
    own_placement.allocations(str(uuid.uuid4()))
    provider = own_placement.make_provider(VCPU=1)
    assert JOURNAL.by_hand == {'first', 'second', 'third', provider}


@pytest.mark.usefixtures('journal')
def test_the_words_of_an_eschedule_are_written_down_without_its_configuration() -> None:
    words = own(['sh', '-c', 'exec', 'python', '-m', 'ecomp.schedule', '--config', '/x/schedule.yaml', 'list'])
    assert words is not None
    JOURNAL.ended(words, 0, ('out', ''), 0.0, 7)
    assert [(ask.words, ask.code, ask.stdout, ask.pid) for ask in JOURNAL.asks] == [(('list',), 0, 'out', 7)]
    assert own(['python', '-m', 'ecomp.compute']) is None
