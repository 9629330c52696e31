"""What is in work and put off, by a clock of the test's own."""

from __future__ import annotations

import math
import threading
import time

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


# Dirty


def test_a_nudge_is_told_to_whoever_looks(clock: Clock) -> None:
    agenda, nudges = Agenda[str](), list[float]()
    agenda.nudge('nobody looks yet')
    agenda.on_nudge = lambda: nudges.append(clock.now)
    agenda.nudge('one')
    agenda.hurry('two')
    assert nudges == [100.0] * 2


def test_what_is_done_once_a_minute_is_asked_for_once() -> None:
    agenda = Agenda[str]()
    agenda.look_soon('a network was started')
    agenda.nudge('and something else')
    assert agenda.take_minute()
    assert not agenda.take_minute()


def test_who_hurries_waits_for_nothing_any_more() -> None:
    agenda = Agenda[str]()
    agenda.put_off('x', 3600)
    agenda.hurry('stop')
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
