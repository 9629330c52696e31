"""Who may take a waiting request at once, and who after a moment."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys, queue
from ecomp.model.host import Left
from ecomp.model.queue import FIRST, WIDER, Takers, opens_after, order, takers_allowed, takers_of
from ecomp.store.client import Entry

ONE = {'VCPU': 1, 'MEMORY_MB': 64}


def computes(number: int) -> list[str]:
    return [f'c{each}' for each in range(number)]


def state(**said: object) -> dict[str, Entry]:
    """What is below /computes/."""
    values = {keys.compute(name): json.dumps(each).encode() for name, each in said.items()}
    return {key: Entry(key, value, 7, 1) for key, value in values.items()}


def alive(*names: str, **room: object) -> Takers:
    """These take from queues; `room` is what some of them hint."""
    hinted = {name: {'queues': True, 'room': each} for name, each in room.items()}
    return takers_of(state(**{name: {'queues': True} for name in names}, **hinted), Takers())


def first(instance: str, takers: Takers) -> set[str]:
    return {compute for compute, number in order(instance, ONE, takers).items() if number < FIRST}


def test_each_request_is_another_few_s_and_none_is_everybody_s() -> None:
    takers = alive(*computes(100))
    chosen = Counter(compute for each in range(1000) for compute in first(f'instance {each}', takers))
    assert chosen.keys() == set(computes(100))
    # 40 on average: some four standard deviations.
    assert 15 < min(chosen.values()) <= max(chosen.values()) < 66
    assert len({frozenset(first(f'instance {each}', takers)) for each in range(100)}) > 95


@given(st.integers(5, 60), st.integers(0, 59), st.uuids())
def test_one_that_dies_moves_no_other(number: int, dead: int, instance: object) -> None:
    """So those who see it alive, and those who do not, mean the same few but for it."""
    there = computes(number)
    before = order(str(instance), ONE, alive(*there))
    gone = there[dead % number]
    after = order(str(instance), ONE, alive(*(each for each in there if each != gone)))
    assert list(after) == [each for each in before if each != gone]


def test_who_has_no_room_is_asked_last_and_who_says_nothing_has_some() -> None:
    full, some = {'VCPU': [4, 10], 'MEMORY_MB': [512, 100]}, {'VCPU': [4, 25], 'MEMORY_MB': [512, 13]}
    takers = alive('unknown', full=full, some=some, none={'VCPU': [4, 100]}, odd='all of it')
    assert [takers.has_room(each, ONE) for each in ('unknown', 'full', 'some', 'none', 'odd')] == [
        *(True, False, True, False, True),
    ]
    for instance in computes(20):
        assert set(list(order(instance, ONE, takers))[-2:]) == {'full', 'none'}


def test_only_the_living_that_take_from_queues_count() -> None:
    there = state(a={'queues': True}, b={'queues': False}, c={}, d=7)
    there['/computes/e'] = Entry('/computes/e', b'not JSON', 7, 1)
    there['/computes/f'] = Entry('/computes/f', b'{"queues": true}', 7)  # on no lease: nobody's life
    takers = takers_of(there, Takers())
    assert takers.points.keys() == {'a'}
    # One comes, one says something else, one goes.
    there |= state(b={'queues': True}, g={'queues': True, 'room': {'VCPU': [1, 0]}})
    del there['/computes/a']
    takers = takers_of(there, takers)
    assert (takers.points.keys(), dict(takers.left)) == ({'b', 'g'}, {'g': {'VCPU': Left(1, 0)}})
    assert takers == takers_of(there, Takers())


def test_what_did_not_change_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there = state(**{name: {'queues': True} for name in computes(50)})
    takers = takers_of(there, Takers())
    read: list[object] = []
    monkeypatch.setattr(queue, 'load_if_object', lambda value: read.append(value) or json.loads(value))
    more = takers_of({**there, **state(c7={'queues': False}, new={'queues': True})}, takers)
    assert len(read) == 2
    assert more.points.keys() == {*computes(50), 'new'} - {'c7'}


def test_circles_grow_until_they_are_all() -> None:
    opened = [opens_after(each) for each in (0, FIRST - 1, FIRST, 2 * FIRST, 4 * FIRST)]
    assert opened == [0, 0, WIDER, 2 * WIDER, 3 * WIDER]
    assert opens_after(999) <= 2.0
    assert opens_after(9_999) <= 3.0
    allowed = [takers_allowed(seconds, 100) for seconds in (0.0, WIDER, 2 * WIDER, 3600.0)]
    assert allowed == [FIRST, 2 * FIRST, 4 * FIRST, 100]
    assert takers_allowed(0.0, 0) == 1


@given(st.integers(1, 5000), st.integers(0, 20))
def test_how_many_may_take_it_and_which_is_one_rule(takers: int, widened: int) -> None:
    seconds = widened * WIDER
    assert sum(opens_after(number) <= seconds for number in range(takers)) == takers_allowed(seconds, takers)


def test_so_many_have_room_and_who_says_nothing_counts() -> None:
    takers = alive('a', 'b', c={'VCPU': [4, 25], 'MEMORY_MB': [512, 13]}, d={'VCPU': [4, 0], 'MEMORY_MB': [512, 100]})
    for _ in range(2):
        assert takers.with_room(ONE) == 3
        assert takers.with_room({**ONE, 'VCPU': 2}) == 2
    assert takers_of(state(a={'queues': True}), takers).with_room(ONE) == 1, 'of others it is another number'
