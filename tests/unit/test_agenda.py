"""What is dirty, in work and put off, by a clock of the test's own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest

from ecomp.agent.agenda import FIRST_DELAY, LAST_DELAY, Agenda


class Clock:
    """Monotonic seconds, which pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, 'monotonic', made)
    monkeypatch.setattr('random.uniform', lambda _, high: high)
    return made


def waiting(agenda: Agenda[str], until: float, after: str = '') -> Callable[[], bool]:
    """Waits in a thread; what tells how that ended, once it has."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(agenda.wait(until, after)), daemon=True)
    thread.start()

    def ended() -> bool:
        thread.join(20)
        (minute,) = found
        return minute

    return ended


# Dirty


def test_a_nudge_before_the_wait_ends_it_and_counts_once(clock: Clock) -> None:
    agenda = Agenda[str]()
    agenda.nudge('one')
    agenda.nudge('two')
    assert not agenda.wait(math.inf)
    assert not agenda.wait(clock.now), 'and what is left is the time'


def test_a_nudge_ends_a_wait() -> None:
    agenda = Agenda[str]()
    ended = waiting(agenda, time.monotonic() + 3600)
    agenda.nudge('something happened')
    assert not ended()


def test_what_is_done_once_a_minute_is_asked_for_once(clock: Clock) -> None:
    agenda = Agenda[str]()
    agenda.look_soon('a network was started')
    agenda.nudge('and something else')
    assert agenda.wait(math.inf)
    assert not agenda.wait(clock.now)


def test_what_failed_is_waited_for_however_often_there_is_a_nudge(clock: Clock) -> None:
    agenda = Agenda[str]()
    agenda.put_off('x')
    agenda.nudge('too early')
    ended = waiting(agenda, clock.now, after='x')
    clock.now += FIRST_DELAY
    agenda.nudge('by now')
    assert not ended()


def test_who_hurries_ends_that_wait() -> None:
    agenda = Agenda[str]()
    agenda.put_off('x', 3600)
    ended = waiting(agenda, 0.0, after='x')
    agenda.hurry('stop')
    assert not ended()
    assert agenda.when('x') == math.inf


# In work


def test_what_is_in_work_is_taken_and_ends() -> None:
    agenda = Agenda[str]()
    agenda.begin('a', 'build')
    assert agenda.in_work() == {'a': 'build'}
    assert agenda.take('a', agenda.in_work()['a'])
    assert not agenda.hand_back('a', 'build'), 'somebody is at it'
    agenda.end('a')
    assert agenda.in_work() == {}


def test_what_was_handed_back_is_taken_by_nobody() -> None:
    agenda = Agenda[list[int]]()
    first, second = [1], [1]
    agenda.begin('a', first)
    assert agenda.hand_back('a', first)
    assert not agenda.hand_back('a', first)
    assert not agenda.take('a', first)
    agenda.begin('a', second)
    assert not agenda.take('a', first), 'it is another one by now, though it looks the same'
    assert agenda.take('a', second)


# Later


def test_what_fails_waits_longer_each_time_and_anew_once_it_worked(clock: Clock) -> None:
    agenda = Agenda[str]()
    delays = []
    for _ in range(8):
        agenda.put_off('a')
        delays.append(agenda.when('a') - clock.now)
        clock.now = agenda.when('a')
    assert delays == [0.5, 1, 2, 4, 8, LAST_DELAY, LAST_DELAY, LAST_DELAY]
    assert agenda.forget('a')
    assert not agenda.forget('a')
    agenda.put_off('a')
    assert agenda.when('a') - clock.now == FIRST_DELAY


def test_what_did_not_fail_is_forgotten_when_its_time_has_come(clock: Clock) -> None:
    agenda = Agenda[str]()
    agenda.put_off('race', 0.5)
    agenda.put_off('failed')
    assert agenda.put_off_now(clock.now) == {'race': 100.5, 'failed': 100.5}
    clock.now += 0.5
    assert agenda.put_off_now(clock.now) == {}
    assert (agenda.when('race'), agenda.when('failed')) == (math.inf, 100.5)


def test_the_next_is_nothing_that_is_in_work(clock: Clock) -> None:
    agenda = Agenda[str]()
    assert agenda.next() == math.inf
    agenda.put_off('a', 1)
    agenda.put_off('b', 2)
    assert agenda.next() == clock.now + 1
    agenda.begin('a', 'again')
    assert agenda.next() == clock.now + 2


def test_what_nobody_wants_any_more_is_forgotten_unless_it_is_in_work() -> None:
    agenda = Agenda[str]()
    for each in 'abc':
        agenda.put_off(each)
    agenda.begin('b', 'still')
    assert agenda.forget_all_but({'c'}) == ['a']
    assert agenda.when('b') < math.inf


def test_from_many_threads_nothing_is_lost() -> None:
    agenda = Agenda[int]()

    def work(number: int) -> None:
        for turn in range(200):
            name = f'{number} {turn}'
            agenda.begin(name, turn)
            assert agenda.take(name, agenda.in_work()[name])
            agenda.put_off(name)
            agenda.nudge(name)
            assert agenda.forget(name)
            agenda.end(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (agenda.in_work(), agenda.next()) == ({}, math.inf)
