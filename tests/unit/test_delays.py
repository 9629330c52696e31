"""What is tried again later, by a clock of the test's own."""

from __future__ import annotations

import math
import threading
import time

import pytest

from ecomp.agent.turns import FIRST_DELAY, LAST_DELAY, Delays


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


def test_what_fails_waits_longer_each_time_and_anew_once_it_worked(clock: Clock) -> None:
    delays, waits = Delays(), []
    for _ in range(8):
        again = delays.put_off('a')
        assert again == delays.when('a')
        waits.append(again - clock.now)
        clock.now = again
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
    for each in 'abc':
        delays.put_off(each)
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
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert delays.next(()) == math.inf


def test_what_is_cleared_waits_for_nothing_any_more() -> None:
    delays = Delays()
    delays.put_off('x', 3600)
    delays.clear()
    assert delays.when('x') == math.inf
