"""Scheduled jobs, back-off, logging of failures, and what ends a wait."""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ecomp.agent.turns import FIRST_DELAY, LAST_DELAY, Complaints, Delays, Threads, Turn, TurnThreads, Waker
from ecomp.errors import EcompError, Unreachable
from ecomp.model.backoff import Backoff
from tests.kit.servers import until

# Scheduled jobs, run by few threads.


@pytest.fixture
def threads() -> Iterator[Threads]:
    pools = Threads(1000, 6)
    yield pools
    pools.close()


class Work:
    """A job that counts its runs, and blocks while `released` is not set."""

    def __init__(self, again: float = math.inf) -> None:
        self.begun = threading.Event()
        self.goes_on = threading.Event()
        self.times = 0
        self.again = again
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
    for other in others:
        Turn(threads, threads.plans, other).at()
    until(lambda: all(other.times == 1 for other in others), 20, 'all others were done')
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
    pools = Threads(1000, 6)
    assert threading.active_count() == before
    pools.close()


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
    """The caller reports the refusal and submits again, perhaps another task."""
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
    pool.submit(lambda: done.append('accepted'))  # a later submission waits for the existing thread
    pool.submit(last.set)
    held.goes_on.set()
    assert last.wait(20)
    assert done == ['accepted']
    pool.close()


# Back-off, with a fake clock


class Clock:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr(time, 'monotonic', fake_clock)
    monkeypatch.setattr('random.uniform', lambda _, high: high)
    return fake_clock


def test_what_fails_waits_longer_each_time_and_anew_once_it_worked(clock: Clock) -> None:
    delays, waits = Delays(), []
    for _ in range(8):
        due = delays.put_off('a')
        assert due == delays.when('a')
        waits.append(due - clock.now)
        clock.now = due
    assert waits == [0.5, 1, 2, 4, 8, LAST_DELAY, LAST_DELAY, LAST_DELAY]
    assert delays.forget('a')
    assert not delays.forget('a')
    delays.put_off('a')
    assert delays.when('a') - clock.now == FIRST_DELAY


def test_what_did_not_fail_is_forgotten_when_its_time_has_come(clock: Clock) -> None:
    delays = Delays()
    delays.put_off('race', 0.5)
    delays.put_off('failed')
    assert delays.put_off_now(clock.now) == {'race': 100.5, 'failed': 100.5}
    clock.now += 0.5
    assert delays.put_off_now(clock.now) == {}
    assert (delays.when('race'), delays.when('failed')) == (math.inf, 100.5)


def test_the_next_is_nothing_that_is_left_out(clock: Clock) -> None:
    delays = Delays()
    assert delays.next(()) == math.inf
    delays.put_off('a', 1)
    delays.put_off('b', 2)
    assert delays.next(()) == clock.now + 1
    assert delays.next({'a'}) == clock.now + 2


def test_what_nobody_wants_any_more_is_forgotten() -> None:
    delays = Delays()
    for name in 'abc':
        delays.put_off(name)
    assert delays.forget_all_but({'b', 'c'}) == ['a']
    assert delays.when('b') < math.inf


def test_from_many_threads_nothing_is_lost() -> None:
    delays = Delays()

    def work(number: int) -> None:
        for turn in range(200):
            name = f'{number} {turn}'
            delays.put_off(name)
            assert name in delays.put_off_now(-math.inf)
            assert delays.forget(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert delays.next(()) == math.inf


def test_what_is_cleared_waits_for_nothing_any_more() -> None:
    delays = Delays()
    delays.put_off('x', 3600)
    delays.clear()
    assert delays.when('x') == math.inf


# A loss is logged once, and so is its return, for all activities and at any time


LIBVIRT = Unreachable('libvirt is gone while building', 'libvirt')


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, from level INFO."""
    caplog.set_level(logging.INFO)
    return caplog


def test_a_backend_is_lost_once_and_back_once_for_all(said: pytest.LogCaptureFixture) -> None:
    """Every failure for lack of the backend is one loss; the first success ends it for all."""
    complaints = Complaints()
    complaints.complain('one', LIBVIRT)
    complaints.complain('two', Unreachable('libvirt does not answer', 'libvirt'))
    assert said.messages == ['libvirt is gone while building; trying again until it is back']
    assert complaints.settle('two')
    assert not complaints.settle('one')
    assert said.messages[1:] == ['libvirt is back']


def test_a_file_of_ours_is_another_loss_than_the_backend_it_is_for(said: pytest.LogCaptureFixture) -> None:
    """The log must not call placement unreachable when it is the token file that is wrong."""
    complaints = Complaints()
    complaints.complain('one', Unreachable('no connection', 'placement'))
    complaints.complain('one', Unreachable('token_file /t: must hold one word', 'placement (token_file /t)'))
    complaints.complain('two', Unreachable('token_file /t: must hold one word', 'placement (token_file /t)'))
    assert said.messages[1:] == ['token_file /t: must hold one word; trying again until it is back']
    complaints.settle('one')
    assert said.messages[2:] == ['placement (token_file /t) is back']


def test_what_began_before_the_return_proves_no_new_loss(said: pytest.LogCaptureFixture) -> None:
    """A worker frozen during the outage finds its connection broken; only later starts count."""
    complaints, began = Complaints(), time.monotonic()
    complaints.complain('one', LIBVIRT, began)
    assert complaints.settle('one')
    said.clear()
    complaints.complain('frozen', LIBVIRT, began)
    assert not complaints.settle('frozen')
    assert said.messages == []
    complaints.complain('frozen', LIBVIRT, time.monotonic())
    assert len(said.messages) == 1


def test_another_backend_is_another_loss(said: pytest.LogCaptureFixture) -> None:
    """The return of libvirt does not affect placement."""
    complaints, began = Complaints(), time.monotonic()
    complaints.complain('one', LIBVIRT, began)
    complaints.settle('one')
    complaints.complain('two', Unreachable('placement cannot be reached', 'placement'), began)
    assert said.messages[-1] == 'placement cannot be reached; trying again until it is back'


def test_what_is_no_backend_is_said_once_for_its_text(said: pytest.LogCaptureFixture) -> None:
    """The same failure is not logged again; another one is."""
    complaints = Complaints()
    for text in ('no', 'no', 'never'):
        complaints.complain('one', EcompError(text), time.monotonic())
    assert said.messages == ['no; trying again until it works', 'never; trying again until it works']
    assert complaints.settle('one')
    assert said.messages[-1] == 'what failed before works again: never'


def test_what_is_attempted_says_whether_it_works(said: pytest.LogCaptureFixture) -> None:
    """A failure that is no longer relevant is not logged: its connection was closed on purpose."""
    complaints, returns = Complaints(), list[str]()
    complaints.on_return = lambda: returns.append(said.messages[-1])

    def fails(error: Exception) -> float:
        raise error

    assert complaints.attempt('one', lambda: fails(LIBVIRT), lambda: True) is None
    assert complaints.attempt('one', lambda: fails(MemoryError('none')), lambda: True) is None
    assert said.messages == []
    assert complaints.attempt('looking', lambda: fails(LIBVIRT)) is None
    assert complaints.attempt('looking', lambda: 5.0) == 5.0
    assert said.messages[1:] == returns == ['libvirt is back']
    assert complaints.attempt('looking', lambda: fails(MemoryError('none'))) is None
    assert said.messages[2:] == ['unexpected error while looking; trying again']
    assert complaints.attempt('looking', lambda: 6.0) == 6.0
    assert len(returns) == 1


def test_handed_over_to_what_needs_the_same(said: pytest.LogCaptureFixture) -> None:
    """A finished activity passes its loss to another, which reports the backend's return."""
    complaints = Complaints()
    complaints.complain('one', LIBVIRT)
    complaints.hand_over('one', 'looking')
    assert not complaints.settle('one')
    assert complaints.settle('looking')
    assert said.messages[-1] == 'libvirt is back'


# Waking: before, during and after a wait, from a signal handler, and too late


@pytest.fixture
def handled() -> Iterator[None]:
    """Restore the handler of SIGUSR1 after the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def is_woken(waker: Waker) -> bool:
    return bool(select.select([waker.reader], [], [], 0)[0])


def test_woken_and_cleared() -> None:
    waker = Waker()
    assert not is_woken(waker)
    for _ in range(100_000):  # more than the pipe holds
        waker.wake()
    assert is_woken(waker)
    waker.clear()
    assert not is_woken(waker)
    waker.close()


@pytest.mark.usefixtures('handled')
def test_a_signal_at_any_moment_of_its_end_is_none_of_its_business() -> None:
    """A second SIGTERM may come after the pipe was closed and its numbers were reused."""
    waker = Waker()
    signal.signal(signal.SIGUSR1, lambda *_: waker.wake())
    signal.raise_signal(signal.SIGUSR1)
    assert is_woken(waker)
    waker.close()
    signal.raise_signal(signal.SIGUSR1)
    reader, writer = os.pipe()  # with the descriptor numbers that the waker had
    signal.raise_signal(signal.SIGUSR1)
    assert select.select([reader], [], [], 0)[0] == []
    os.close(reader)
    os.close(writer)


@pytest.mark.usefixtures('handled')
def test_a_handler_may_wake_while_its_own_thread_does() -> None:
    waker = Waker()
    signal.signal(signal.SIGUSR1, lambda *_: waker.wake())
    with waker._lock:
        signal.raise_signal(signal.SIGUSR1)
    assert is_woken(waker)
    waker.close()


# Delays between retries.


def test_it_doubles_up_to_its_last_and_begins_anew() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next() == 0.5
