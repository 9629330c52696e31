"""Loops, back-off, logging of failures, and what ends a wait."""

from __future__ import annotations

import logging
import math
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecomp.agent.jobs import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, Deferrals, FailureLog, Loop, Waker
from ecomp.errors import EcompError, Unreachable
from ecomp.model.backoff import Backoff
from tests.kit.servers import wait_until


class Work:
    """A step that counts its runs, and blocks while `released` is not set."""

    def __init__(self, next_time: float = math.inf) -> None:
        self.begun = threading.Event()
        self.released = threading.Event()
        self.runs = 0
        self.next_time = next_time
        self.released.set()

    def __call__(self) -> float:
        self.begun.set()
        self.released.wait(20)
        self.runs += 1
        return self.next_time


@pytest.fixture
def make_loop() -> Iterator[Callable[[Callable[[], float]], Loop]]:
    loops = list[Loop]()

    def make(step: Callable[[], float]) -> Loop:
        loops.append(Loop('looping', step))
        return loops[-1]

    yield make
    for loop in loops:
        loop.stop()


MakeLoop = Callable[[Callable[[], float]], Loop]


def test_schedule_during_a_step_causes_one_more_step(make_loop: MakeLoop) -> None:
    work = Work()
    loop = make_loop(work)
    work.released.clear()
    loop.schedule()
    assert work.begun.wait(20)
    for _ in range(5):
        loop.schedule()
    assert loop.is_busy
    work.released.set()
    wait_until(lambda: work.runs == 2 and not loop.is_busy, 20, 'it was done twice')
    loop.stop()
    loop.join()
    assert work.runs == 2


def test_earliest_scheduled_time_counts(make_loop: MakeLoop) -> None:
    work = Work()
    loop = make_loop(work)
    loop.schedule(time.monotonic() + 3600)
    loop.schedule(time.monotonic() + 0.05)
    loop.schedule(time.monotonic() + 7200)
    assert work.begun.wait(20)
    work.next_time = time.monotonic() + 0.05
    loop.schedule()
    wait_until(lambda: work.runs >= 3, 20, 'it says itself when it is to be done again')


def test_stopped_loop_begins_no_step_and_one_in_flight_is_awaited(make_loop: MakeLoop) -> None:
    work = Work()
    loop = make_loop(work)
    work.released.clear()
    loop.schedule()
    assert work.begun.wait(20)
    loop.schedule()
    loop.stop()
    loop.schedule()
    threading.Timer(0.05, work.released.set).start()
    loop.join()
    assert work.runs == 1
    assert not loop.is_busy


def test_unexpected_error_causes_another_step(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr('ecomp.agent.jobs.RETRY_SECONDS', 0.01)
    failures, done = [MemoryError('none')], threading.Event()

    def work() -> float:
        if failures:
            raise failures.pop()
        done.set()
        return math.inf

    make_loop(work).schedule()
    assert done.wait(20)
    assert 'unexpected error in thread looping' in caplog.text


def test_failed_thread_start_is_raised_and_can_be_repeated(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = threading.Thread.start, [1]

    def start(thread: threading.Thread) -> None:
        if thread.name == 'looping' and refusals.pop():
            refusals.append(0)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, 'start', start)
    work = Work()
    loop = make_loop(work)
    with pytest.raises(RuntimeError):
        loop.schedule()
    loop.schedule()
    wait_until(lambda: work.runs == 1, 20, 'it is done')


# Back-off, with a fake clock


class Clock:
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


def test_delay_doubles_per_failure_and_resets_on_success(clock: Clock) -> None:
    delays, waits = Deferrals(), []
    for _ in range(8):
        due = delays.defer('a')
        assert due == delays.get_due_time('a')
        waits.append(due - clock.now)
        clock.now = due
    assert waits == [0.5, 1, 2, 4, 8, MAX_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS]
    assert delays.cancel('a')
    assert not delays.cancel('a')
    delays.defer('a')
    assert delays.get_due_time('a') - clock.now == FIRST_BACKOFF_SECONDS


def test_delays_of_other_keys_are_cancelled() -> None:
    delays = Deferrals()
    for name in 'abc':
        delays.defer(name)
    assert delays.cancel_all_but({'b', 'c'}) == ['a']
    assert delays.get_due_time('b') < math.inf


def test_concurrent_threads_lose_no_delay() -> None:
    delays = Deferrals()

    def work(number: int) -> None:
        for turn in range(200):
            name = f'{number} {turn}'
            delays.defer(name)
            assert name in delays.get_deferred(-math.inf)
            assert delays.cancel(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert delays.get_deferred(-math.inf) == {}


# A loss is logged once, and so is its return, for all activities and at any time


LIBVIRT = Unreachable('libvirt is gone while building', 'libvirt')


@pytest.fixture
def info_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_backend_loss_and_return_are_logged_once(info_log: pytest.LogCaptureFixture) -> None:
    """Every failure for lack of the backend is one loss, which the first success ends for all."""
    complaints = FailureLog()
    complaints.report_failure('one', LIBVIRT)
    complaints.report_failure('two', Unreachable('libvirt does not answer', 'libvirt'))
    assert info_log.messages == ['libvirt is gone while building; trying again until it is back']
    assert complaints.report_success('two')
    assert not complaints.report_success('one')
    assert info_log.messages[1:] == ['libvirt is back']


def test_token_file_failure_is_a_separate_loss(info_log: pytest.LogCaptureFixture) -> None:
    """The log must not call placement unreachable when it is the token file that is wrong."""
    complaints = FailureLog()
    complaints.report_failure('one', Unreachable('no connection', 'placement'))
    complaints.report_failure(
        'one', Unreachable('token_file /t: must contain one token, without spaces', 'placement (token_file /t)')
    )
    complaints.report_failure(
        'two', Unreachable('token_file /t: must contain one token, without spaces', 'placement (token_file /t)')
    )
    assert info_log.messages[1:] == [
        'token_file /t: must contain one token, without spaces; trying again until it is back'
    ]
    complaints.report_success('one')
    assert info_log.messages[2:] == ['placement is back', 'placement (token_file /t) is back']


def test_success_ends_the_earlier_losses_of_an_activity(info_log: pytest.LogCaptureFixture) -> None:
    """Another activity still has the earlier loss: the next one would otherwise not be logged."""
    complaints = FailureLog()
    for activity in ('one', 'two'):
        complaints.report_failure(activity, Unreachable('no connection', 'placement'))
    complaints.report_failure('one', Unreachable('no token', 'placement (token_file /t)'))
    complaints.report_success('one')
    info_log.clear()
    complaints.report_failure('one', Unreachable('no connection', 'placement'))
    assert info_log.messages == ['no connection; trying again until it is back']


def test_failure_begun_before_the_return_is_no_new_loss(info_log: pytest.LogCaptureFixture) -> None:
    """A worker frozen during the outage finds its connection broken: only later starts count."""
    complaints, began = FailureLog(), time.monotonic()
    complaints.report_failure('one', LIBVIRT, began)
    assert complaints.report_success('one')
    info_log.clear()
    complaints.report_failure('frozen', LIBVIRT, began)
    assert not complaints.report_success('frozen')
    assert info_log.messages == []
    complaints.report_failure('frozen', LIBVIRT, time.monotonic())
    assert len(info_log.messages) == 1


def test_other_failure_is_logged_once_per_text(info_log: pytest.LogCaptureFixture) -> None:
    complaints = FailureLog()
    for text in ('no', 'no', 'never'):
        complaints.report_failure('one', EcompError(text), time.monotonic())
    assert info_log.messages == ['no; trying again until it works', 'never; trying again until it works']
    assert complaints.report_success('one')
    assert info_log.messages[-1] == 'this failure has ended: never'


def test_attempt_logs_failure_and_return(info_log: pytest.LogCaptureFixture) -> None:
    """A failure that is no longer relevant is not logged: its connection was closed on purpose."""
    complaints, returns = FailureLog(), list[str]()
    complaints.on_recovery = lambda: returns.append(info_log.messages[-1])

    def fails(error: Exception) -> float:
        raise error

    assert complaints.attempt('one', lambda: fails(LIBVIRT), is_moot=lambda: True) is None
    assert complaints.attempt('one', lambda: fails(MemoryError('none')), is_moot=lambda: True) is None
    assert info_log.messages == []
    assert complaints.attempt('looking', lambda: fails(LIBVIRT)) is None
    assert complaints.attempt('looking', lambda: 5.0) == 5.0
    assert info_log.messages[1:] == returns == ['libvirt is back']
    assert complaints.attempt('looking', lambda: fails(MemoryError('none'))) is None
    assert info_log.messages[2:] == ['unexpected error while looking; trying again']
    assert complaints.attempt('looking', lambda: 6.0) == 6.0
    assert len(returns) == 1
    assert complaints.attempt('looking', lambda: fails(OSError(24, 'Too many open files'))) is None
    assert info_log.messages[3:] == ['looking: Too many open files; trying again until it works']


def test_loss_is_handed_over_to_another_activity(info_log: pytest.LogCaptureFixture) -> None:
    complaints = FailureLog()
    complaints.report_failure('one', LIBVIRT)
    complaints.transfer('one', 'looking')
    assert not complaints.report_success('one')
    assert complaints.report_success('looking')
    assert info_log.messages[-1] == 'libvirt is back'


# Waking: before, during and after a wait, and from a signal handler


@pytest.fixture
def sigusr1_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def is_woken(waker: Waker) -> bool:
    return bool(select.select([waker.reader], [], [], 0)[0])


def test_wake_and_clear() -> None:
    waker = Waker()
    assert not is_woken(waker)
    for _ in range(100_000):  # more than the pipe holds
        waker.wake()
    assert is_woken(waker)
    waker.clear()
    assert not is_woken(waker)


def test_wake_after_signals_are_detached_writes_to_no_other_file(tmp_path: Path) -> None:
    """A signal handler may wake a process that is ending."""
    waker = Waker()
    waker.wake_on_signals()
    signal.set_wakeup_fd(-1)
    with (tmp_path / 'other').open('w+') as other:  # gets the lowest free descriptor
        waker.wake()
        assert other.read() == ''
    assert is_woken(waker)


@pytest.mark.usefixtures('sigusr1_handler')
def test_signal_handler_may_wake() -> None:
    waker = Waker()
    signal.signal(signal.SIGUSR1, lambda *_: waker.wake())
    signal.raise_signal(signal.SIGUSR1)
    assert is_woken(waker)


# Delays between retries.


def test_backoff_doubles_up_to_its_limit_and_resets() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next() == 0.5
