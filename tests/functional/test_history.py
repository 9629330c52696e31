"""The history of etcd's changes, and the history that the tests' own witness records."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ecomp.errors import Unreachable
from ecomp.model.events import Change
from ecomp.store import history as room
from ecomp.store import http2_client
from ecomp.store.client import Put
from ecomp.store.history import MAX_ANSWER_REVISIONS, REQUIRED_PROGRESS_ANSWERS, History
from ecomp.store.messages import WatchCreate
from tests.kit.commands import Control
from tests.kit.journal import JOURNAL, parse_eschedule_arguments
from tests.kit.judging import is_broken
from tests.kit.servers import Etcd, PlacementServer, b64, wait_until
from tests.kit.store_client import make_config, open_store
from tests.kit.story import SMALL_QUERY, place, wait_state
from tests.kit.witness import require_clean

# The past is read completely or not at all, even if etcd stalls, and with any content.


# The first and last revision of the test's own changes. etcd's first answer has FULL of them. The revision after LAST
# is another change.
FIRST_REVISION = 2
LAST_REVISION = MAX_ANSWER_REVISIONS + 101
# etcd stalls this long in the middle of an answer.
STALL_SECONDS = 2.6


@pytest.fixture(scope='module')
def frozen_etcd() -> Iterator[Etcd]:
    with Etcd() as etcd:
        with open_store(etcd.endpoint) as store:
            for number in range(FIRST_REVISION, LAST_REVISION + 1):
                store.commit([], [Put(f'/names/{number % 50}', 'x' * 200)])
        assert etcd.put('somebody-else', '1') == LAST_REVISION + 1
        yield etcd


class ReaderThread:
    def __init__(self, history: History, on_first: Any = None) -> None:
        self.changes_by_revision: list[list[Change]] = []
        self.outcome: str | Exception = ''
        self._history, self._on_first = history, on_first
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for changes in self._history:
                self.changes_by_revision.append(changes)
                if len(self.changes_by_revision) == 1 and self._on_first:
                    self._on_first()
            self.outcome = 'at the end'
        except Exception as error:
            self.outcome = error
        finally:
            self._history.close()

    @property
    def revisions(self) -> list[int]:
        return [changes[0].revision for changes in self.changes_by_revision]

    def wait_for_end(self, seconds: float = 20.0) -> str | Exception:
        return wait_until(lambda: self.outcome, seconds, f'it ends, after {len(self.changes_by_revision)} revisions')


def test_history_continues_after_etcd_stalls(frozen_etcd: Etcd) -> None:
    def stall() -> None:
        frozen_etcd.pause()
        threading.Timer(STALL_SECONDS, frozen_etcd.resume).start()

    history = History(make_config(frozen_etcd.endpoint), False, print)
    reading = ReaderThread(history, stall)
    assert reading.wait_for_end() == 'at the end'
    assert reading.revisions == list(range(FIRST_REVISION, LAST_REVISION + 1))
    assert history.next_revision == LAST_REVISION + 2  # a watch from there repeats no change


def test_silent_etcd_is_unreachable(frozen_etcd: Etcd) -> None:
    reading = ReaderThread(History(make_config(frozen_etcd.endpoint, timeout=1.0), False, print), frozen_etcd.pause)
    try:
        outcome = reading.wait_for_end()
    finally:
        frozen_etcd.resume()
    # On a busy machine the whole answer may have been sent before etcd was frozen.
    assert isinstance(outcome, Unreachable) or len(reading.changes_by_revision) == LAST_REVISION + 1 - FIRST_REVISION, (
        outcome
    )
    assert reading.revisions == list(range(FIRST_REVISION, FIRST_REVISION + len(reading.changes_by_revision)))
    wait_until(frozen_etcd.is_ready, 10, 'etcd is awake')


@pytest.mark.parametrize(
    'first', [LAST_REVISION - MAX_ANSWER_REVISIONS + 1, LAST_REVISION + 1], ids=['as many as an answer has', 'none']
)
def test_past_may_end_with_a_full_or_an_empty_answer(frozen_etcd: Etcd, first: int) -> None:
    history = History(make_config(frozen_etcd.endpoint), False, print, first)
    reading = ReaderThread(history)
    assert reading.wait_for_end() == 'at the end'
    assert reading.revisions == list(range(first, LAST_REVISION + 1))
    assert history.next_revision == LAST_REVISION + 2


@pytest.mark.parametrize('answers', [REQUIRED_PROGRESS_ANSWERS, 3 * REQUIRED_PROGRESS_ANSWERS])
def test_history_waits_for_changes_after_an_early_progress_report(
    frozen_etcd: Etcd, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    """An etcd 3.4.23 may report that all changes were sent while it still reads the first ones."""
    monkeypatch.setattr(room, 'MIN_PROGRESS_SPACING_SECONDS', 0.0)

    class EarlyProgressWatch:
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

    with open_store(frozen_etcd.endpoint) as store:
        assert [
            store.has_changed('/', first) for first in (1, LAST_REVISION, LAST_REVISION + 1, LAST_REVISION + 2)
        ] == [True, True, False, False]
    history = History(make_config(frozen_etcd.endpoint), False, print)
    watch = history._store.watch
    history._store.watch = lambda *how: EarlyProgressWatch(watch(*how))  # type: ignore[method-assign]
    reading = ReaderThread(history)
    assert reading.wait_for_end() == 'at the end'
    assert reading.revisions == list(range(FIRST_REVISION, LAST_REVISION + 1))


def test_changes_longer_than_an_answer_are_read_in_whole_revisions(own_etcd: Etcd) -> None:
    """All changes take 72 MiB, and a revision of three keys comes in several pieces."""
    large, three = 'x' * 1_400_000, [Put(f'/names/{item}', item * 450_000) for item in 'abc']
    with open_store(own_etcd.endpoint) as store:
        for _ in range(23):
            store.commit([], [Put('/names/large', large)])
        store.commit([], three)
        store.commit([], three)
        for _ in range(3):
            store.commit([], [Put('/names/large', large)])
    assert 51 * len(large) + 9 * 450_000 > http2_client.MAX_ANSWER_BYTES
    history = History(make_config(own_etcd.endpoint), False, print)
    streams = record_streams(history)
    reading = ReaderThread(history)
    assert reading.wait_for_end(30) == 'at the end'
    assert reading.revisions == list(range(2, 30))
    assert [[item.key for item in changes] for changes in reading.changes_by_revision] == [
        *[['/names/large']] * 23,
        *[['/names/a', '/names/b', '/names/c']] * 2,
        *[['/names/large']] * 3,
    ]
    sizes = [
        (len(item.before or b''), len(item.after or b'')) for changes in reading.changes_by_revision for item in changes
    ]
    big, small = len(large), 450_000
    assert sizes == [(0, big), *[(big, big)] * 22, *[(0, small)] * 3, *[(small, small)] * 3, *[(big, big)] * 3]
    assert len(streams) == 1


def record_streams(history: History) -> Sequence[int]:
    revisions: list[int] = []
    watch = history._store.watch

    def watch_once(creates: Sequence[WatchCreate], *rest: Any) -> Any:
        revisions.append(creates[0].revision)
        assert len(revisions) < 10, 'it asks for ever'
        return watch(creates, *rest)

    history._store.watch = watch_once  # type: ignore[method-assign]
    return revisions


@pytest.fixture
def breaking_streams(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make each stream break before its first change, by a limit of 1000 bytes an answer."""
    monkeypatch.setattr(http2_client, 'MAX_ANSWER_BYTES', 1000)
    return monkeypatch


@pytest.mark.usefixtures('breaking_streams')
def test_stream_without_changes_counts_as_failure(frozen_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, 'MAX_TRIES', 2)
    history = History(make_config(frozen_etcd.endpoint), False, print)
    streams = record_streams(history)
    reading = ReaderThread(history)
    outcome = reading.wait_for_end()
    assert isinstance(outcome, Unreachable), outcome
    assert 'RESOURCE_EXHAUSTED' in str(outcome)
    assert (reading.changes_by_revision, list(streams)) == ([], [1, 1, 1])


def test_follower_reports_a_broken_stream_once(frozen_etcd: Etcd, breaking_streams: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    history = History(make_config(frozen_etcd.endpoint), True, messages.append)
    streams = record_streams(history)
    reading = ReaderThread(history)
    wait_until(lambda: len(streams) > 3, 10, 'it is asked again')
    assert [message for message in messages if 'RESOURCE_EXHAUSTED' in message] == messages
    assert len(messages) == 1
    breaking_streams.undo()
    wait_until(
        lambda: len(reading.changes_by_revision) == LAST_REVISION - FIRST_REVISION + 1, 20, 'and hears all once it can'
    )
    assert not reading.outcome


@pytest.mark.parametrize('follow', [False, True])
def test_unexpected_error_of_the_watch_ends_the_history(frozen_etcd: Etcd, follow: bool) -> None:
    class BrokenWatch:
        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError('a fault')

        def cancel(self) -> None:
            """Do nothing."""

    history = History(make_config(frozen_etcd.endpoint), follow, print)
    history._store.watch = lambda *_: BrokenWatch()  # type: ignore[method-assign]
    outcome = ReaderThread(history).wait_for_end(5)
    assert isinstance(outcome, RuntimeError), outcome


# The judge of the tests reads what the servers hold: etcd change by change, placement from its database.


@pytest.fixture
def recording_journal() -> Iterator[None]:
    JOURNAL.begin()
    yield
    JOURNAL.end()


@pytest.mark.usefixtures('recording_journal')  # before the cluster
@pytest.mark.unaudited('its record is made wrong')
def test_judge_checks_the_final_state_of_a_test(cluster: Control) -> None:
    compute = cluster.ecompute()
    _, instance = place(cluster)
    wait_state(cluster, instance, 'active')
    require_clean(cluster.witness)
    assert not is_broken(cluster.witness)
    # Write past the journal, as another process would.
    key, value = cluster.etcd.find_record_key(instance), cluster.etcd.read_record(instance)
    assert value is not None
    with open_store(cluster.etcd.endpoint) as store:
        store.commit([], [Put(key, value.decode().replace('"active"', '"building"'))])
    with pytest.raises(AssertionError, match=f'{instance}: active, then building'):
        require_clean(cluster.witness)
    assert is_broken(cluster.witness)
    assert [item.arguments for item in JOURNAL.runs] == [(SMALL_QUERY,)]
    assert [item.uuid for item in JOURNAL.computes] == [compute.uuid]
    assert JOURNAL.remove_witness(cluster.witness)  # or it would be judged once more when it ends


@pytest.mark.usefixtures('recording_journal')
def test_journal_records_what_a_test_writes_itself(own_etcd: Etcd, own_placement: PlacementServer) -> None:
    own_etcd.put('/hosts/compute/first', '{}')
    own_etcd.delete('/queues/flavor/second/taker')
    own_etcd.get('/instances/nobody')
    third = {'requestPut': {'key': b64('/names/third'), 'value': b64('{}')}}
    own_etcd.call('kv/txn', {'success': [third]})
    own_placement.read_allocations(str(uuid.uuid4()))
    provider = own_placement.make_provider(VCPU=1)
    assert JOURNAL.manual_subjects == {'first', 'second', 'third', provider}


@pytest.mark.usefixtures('recording_journal')
def test_journal_records_eschedule_arguments_without_config() -> None:
    words = parse_eschedule_arguments(
        ['sh', '-c', 'exec', 'python', '-m', 'ecomp.schedule', '--config', '/x/schedule.yaml', 'list']
    )
    assert words is not None
    JOURNAL.add_run(words, 0, ('out', ''), 0.0, 7)
    assert [(ask.arguments, ask.code, ask.stdout, ask.pid) for ask in JOURNAL.runs] == [(('list',), 0, 'out', 7)]
    assert parse_eschedule_arguments(['python', '-m', 'ecomp.compute']) is None
