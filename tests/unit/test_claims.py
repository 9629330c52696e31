"""Which claims nobody stands behind, and when they have been seen for long enough."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.host.claims import APART, due, orphans
from ecomp.store.client import Entry, Snapshot, in_requests

LEASE = 7

names = st.sets(st.sampled_from('abcdefgh'))


@given(names, names, names, names)
def test_an_orphan_is_held_and_nothing_else(
    held: set[str], wished: set[str], guests: set[str], at_it: set[str]
) -> None:
    assert orphans(held, wished, guests, at_it) == {
        name for name in held if name not in wished and name not in guests and name not in at_it
    }


def test_nothing_is_due_at_first_sight() -> None:
    seen, ready = due({}, {'a', 'b'}, 100.0)
    assert seen == {'a': 100.0, 'b': 100.0}
    assert ready == set()


def test_what_is_seen_twice_apart_is_due() -> None:
    seen, _ = due({}, {'a'}, 100.0)
    seen, ready = due(seen, {'a', 'b'}, 100.0 + APART - 0.1)
    assert ready == set()
    seen, ready = due(seen, {'a', 'b'}, 100.0 + APART)
    assert ready == {'a'}
    assert seen == {'a': 100.0, 'b': 100.0 + APART - 0.1}


def test_what_was_not_there_in_between_is_new() -> None:
    seen, _ = due({}, {'a'}, 0.0)
    seen, _ = due(seen, set(), 30.0)
    assert seen == {}
    _, ready = due(seen, {'a'}, APART + 1)
    assert ready == set()


@given(st.lists(st.tuples(st.floats(0, 1000), names), max_size=8))
def test_nothing_is_due_before_its_time(looks: list[tuple[float, set[str]]]) -> None:
    seen: dict[str, float] = {}
    since: dict[str, float] = {}
    for now, found in sorted(looks, key=lambda look: look[0]):
        since = {name: since.get(name, now) for name in found}
        seen, ready = due(seen, found, now)
        assert ready == {name for name in found if now - since[name] >= APART}


def test_whom_living_eschedules_are_at() -> None:
    def entry(name: str, value: bytes) -> tuple[str, Entry]:
        return f'/requests/{name}', Entry(f'/requests/{name}', value, 1, LEASE)

    of_a_set = json.dumps({'instances': ['a', 'b']}).encode()
    values = [('a', of_a_set), ('c', b'\xff'), ('d', b'[]'), ('e', b'{"instances": 5}'), ('f', b''), ('g', b'null')]
    entries = dict(entry(*each) for each in values)
    assert in_requests(Snapshot(1, entries)) == {*'abcdefg'}
    # Put by hand, it would never end.
    entries |= {'/requests/h': Entry('/requests/h', of_a_set, 1), '/requests/a': Entry('/requests/a', of_a_set, 2)}
    assert in_requests(Snapshot(1, entries)) == {*'cdefg'}
