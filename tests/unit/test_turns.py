"""Turns: what is done when it is nudged or its time has come, one at a time, in a few threads that many share."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator

import pytest

from ecomp.agent.turns import Threads, Turn, TurnThreads
from tests.kit.servers import until


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads(1000, 6)
    yield made
    made.close()


class Work:
    """Counts, and holds whoever does it until it is told to go on."""

    def __init__(self, again: float = math.inf) -> None:
        self.begun, self.goes_on, self.times, self.again = threading.Event(), threading.Event(), 0, again
        self.goes_on.set()

    def __call__(self) -> float:
        self.begun.set()
        self.goes_on.wait(20)
        self.times += 1
        return self.again


def test_a_nudge_while_it_is_done_has_it_done_once_more(threads: Threads) -> None:
    work = Work()
    turn = Turn(threads, threads.plans, work)
    work.goes_on.clear()
    turn.at()
    assert work.begun.wait(20)
    for _ in range(5):
        turn.at()
    work.goes_on.set()
    until(lambda: work.times == 2 and not turn.is_busy, 20, 'it was done twice')
    turn.wait()
    assert work.times == 2


def test_its_time_comes_without_a_nudge_and_the_sooner_one_counts(threads: Threads) -> None:
    work = Work()
    turn = Turn(threads, threads.plans, work)
    turn.at(time.monotonic() + 3600)
    turn.at(time.monotonic() + 0.05)
    turn.at(time.monotonic() + 7200)
    assert work.begun.wait(20)
    work.again = time.monotonic() + 0.05
    turn.at()
    until(lambda: work.times >= 3, 20, 'it says itself when it is to be done again')


def test_what_is_ended_is_not_begun_and_what_is_under_way_is_waited_for(threads: Threads) -> None:
    work = Work()
    turn = Turn(threads, threads.plans, work)
    work.goes_on.clear()
    turn.at()
    assert work.begun.wait(20)
    turn.at()
    turn.end()
    turn.at()
    threading.Timer(0.05, work.goes_on.set).start()
    turn.wait()
    assert work.times == 1
    assert not turn.is_busy


def test_what_fails_in_a_way_nobody_thought_of_is_done_again(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr('ecomp.agent.turns.AGAIN', 0.01)
    failures, done = [MemoryError('none')], threading.Event()

    def work() -> float:
        if failures:
            raise failures.pop()
        done.set()
        return math.inf

    Turn(threads, threads.plans, work).at()
    assert done.wait(20)
    assert 'unexpected error in thread planner_0' in caplog.text


def test_one_that_hangs_holds_up_no_other(threads: Threads) -> None:
    hangs, others = Work(), [Work() for _ in range(200)]
    hangs.goes_on.clear()
    Turn(threads, threads.plans, hangs).at()
    for each in others:
        Turn(threads, threads.plans, each).at()
    until(lambda: all(each.times == 1 for each in others), 20, 'all others were done')
    hangs.goes_on.set()


def test_of_a_thousand_that_are_nudged_all_the_time_there_are_few_threads() -> None:
    pool, names, lock = TurnThreads('few', 4), set[str](), threading.Lock()

    def work() -> None:
        with lock:
            names.add(threading.current_thread().name)

    for _ in range(1000):
        pool.submit(work)
    last = threading.Event()
    pool.submit(last.set)
    assert last.wait(20)
    assert names <= {f'few_{number}' for number in range(4)}
    pool.close()


def test_no_thread_is_made_before_there_is_work() -> None:
    before = threading.active_count()
    made = Threads(1000, 6)
    assert threading.active_count() == before
    made.close()


def test_a_thread_that_cannot_be_started_is_tried_again(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr('ecomp.agent.turns.AGAIN', 0.01)
    caplog.set_level(logging.WARNING)
    real, refusals = threading.Thread.start, [1, 2]

    def start(thread: threading.Thread) -> None:
        if refusals and thread.name.startswith('planner'):
            refusals.pop()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, 'start', start)
    work = Work()
    Turn(threads, threads.plans, work).at()
    until(lambda: work.times == 1, 20, 'it is done in the end, and once')
    assert caplog.text.count('no thread can be started') == 2


def test_what_is_refused_for_want_of_a_thread_is_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever handed it in says so, and has it done again: it may be another task by then."""
    real, lacks, pool, done = threading.Thread.start, [1], TurnThreads('few', 2), list[str]()

    def start(thread: threading.Thread) -> None:
        if lacks and thread.name.startswith('few'):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, 'start', start)
    with pytest.raises(RuntimeError):
        pool.submit(lambda: done.append('refused'))
    lacks.clear()
    held, last = Work(), threading.Event()
    held.goes_on.clear()
    pool.submit(held)
    assert held.begun.wait(20)
    lacks.append(1)
    pool.submit(lambda: done.append('accepted'))  # there is a thread: what comes later waits for that one
    pool.submit(last.set)
    held.goes_on.set()
    assert last.wait(20)
    assert done == ['accepted']
    pool.close()
