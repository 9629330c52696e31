"""Who takes which place when many are at it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from ecomp.model import keys
from ecomp.model.choose import Offer
from ecomp.scheduler.placing.place import LOOKS, MOST, SCARCE, Contention
from ecomp.store.client import Entry, Snapshot, in_line


def line(*read: tuple[int, int]) -> tuple[Contention, list[str]]:
    """A line whose reads are these, the last of them again and again; and what it does, in order."""
    left, done = list(read), list[str]()

    def reading() -> tuple[int, int]:
        done.append('read')
        return left.pop(0) if len(left) > 1 else left[0]

    def ask() -> Offer:
        done.append('ask')
        return Offer([])

    return Contention(reading, ask, random.Random(1)), done


def looks(where: Contention, spares: Sequence[int]) -> int:
    """How often it looks, with so much to spare each time."""
    for number, spare in enumerate(spares):
        if not where.should_look(spare):
            return number
        where.look()
    return len(spares)


def test_alone_it_never_looks() -> None:
    where, done = line((0, 0))
    assert where.is_alone
    assert looks(where, [0]) == 0
    assert done == ['read']


@pytest.mark.parametrize('read', [(1, 0), (0, 1)])
def test_with_others_it_looks_once_where_room_is_scarce(read: tuple[int, int]) -> None:
    where, done = line(read)
    assert looks(where, [SCARCE]) == 0
    assert looks(where, [SCARCE - 1, 0]) == 1
    # The order is what it rests on.
    assert done == ['read', 'read', 'ask']


def test_without_a_place_it_looks_as_long_as_those_ahead_get_on() -> None:
    where, _ = line((30, 0), *[(30 - number, 0) for number in range(20)], (0, 5))
    assert looks(where, [-1] * 100) == 21
    where, _ = line((1, 0))
    assert looks(where, [-1] * 100) == 1 + LOOKS


def test_what_is_left_to_others_has_a_limit() -> None:
    where, _ = line((10 * MOST, 0))
    assert where.ahead == MOST
    where.look()
    assert where.ahead == MOST


def test_the_instances_before_and_behind() -> None:
    def entry(name: str, revision: int, instances: list[str] | None) -> Entry:
        value = b'?' if instances is None else json.dumps({'version': 1, 'instances': instances}).encode()
        return Entry(keys.attempt(name), value, revision, lease=1 if name != 'by hand' else 0)

    found = [
        *(entry('one', 5, ['one']), entry('set', 6, ['a', 'b', 'c']), entry('odd', 7, None)),
        *(entry('me', 8, ['me']), entry('late', 9, ['late', 'x'])),
        *(entry('by hand', 4, ['y']), entry('by hand', 10, ['z'])),
    ]
    assert in_line(Snapshot(10, {f'{each.key} {each.revision}': each for each in found}), 8) == (5, 1)
