"""The past is told whole or not at all, however etcd stalls: by each way to etcd."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ecomp.errors import Unreachable
from ecomp.model.events import Change
from ecomp.store import history as room
from ecomp.store.client import Put
from ecomp.store.history import ANSWERS, FULL, History
from tests.kit.servers import Etcd, until
from tests.kit.store_client import config, connected
from tests.kit.store_client import each_way_to_etcd as each_way_to_etcd

FIRST, LAST = 2, FULL + 101
"""The revisions that are ours, of which one answer of etcd's has the first FULL. One more is another's."""
FROZEN = 2.6
"""Seconds for which etcd stalls in the middle of an answer."""


@pytest.fixture(scope='module')
def stalling() -> Iterator[Etcd]:
    """An etcd with a past, to be frozen and woken."""
    with Etcd() as etcd:
        with connected(etcd.endpoint) as store:
            for number in range(FIRST, LAST + 1):
                store.commit([], [Put(f'/names/{number % 50}', 'x' * 200)])
        assert etcd.put('somebody-else', '1') == LAST + 1
        yield etcd


class Reading:
    """A thread that reads a history to its end; whoever waits for that has a limit."""

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
    assert history.upcoming == LAST + 2  # what is watched from there on begins behind all that was told


def test_an_etcd_that_stays_silent_is_unreachable(stalling: Etcd) -> None:
    reading = Reading(History(config(stalling.endpoint, timeout=1.0), False, print), stalling.pause)
    try:
        assert isinstance(reading.end(), Unreachable)
    finally:
        stalling.resume()
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
def test_a_key_that_was_changed_is_waited_for(
    stalling: Etcd, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    """Of an etcd that looks long for the first changes, and says meanwhile that it has told all, as 3.4.23 does."""
    monkeypatch.setattr(room, 'SPACED', 0.0)

    class Late:
        """A watch that says so many times that all was told before it tells anything."""

        def __init__(self, watch: Any) -> None:
            self._watch, self.cancel = watch, watch.cancel

        def __iter__(self) -> Iterator[Any]:
            left = answers
            for reply in self._watch:
                nothing = {'events': [], 'created': False, 'canceled': False, 'compact_revision': 0, 'fragment': False}
                for _ in range(left if reply.events else 0):
                    yield SimpleNamespace(header=reply.header, **nothing)
                left = 0 if reply.events else left
                yield reply

    with connected(stalling.endpoint) as store:
        assert [store.has_changed('/', each) for each in (1, LAST, LAST + 1, LAST + 2)] == [True, True, False, False]
    history = History(config(stalling.endpoint), False, print)
    watch = history._store.watch
    history._store.watch = lambda *how: Late(watch(*how))  # type: ignore[method-assign]
    reading = Reading(history)
    assert reading.end() == 'at the end'
    assert reading.revisions == list(range(FIRST, LAST + 1))


@pytest.mark.parametrize('follow', [False, True])
def test_no_end_of_the_thread_that_hears_goes_unnoticed(stalling: Etcd, follow: bool) -> None:
    class Junk:
        """A watch that has a fault of ours."""

        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError('a fault')

        def cancel(self) -> None:
            """Nothing is there to end."""

    history = History(config(stalling.endpoint), follow, print)
    history._store.watch = lambda *_: Junk()  # type: ignore[method-assign]
    ended = Reading(history).end(5)
    assert isinstance(ended, RuntimeError), ended
