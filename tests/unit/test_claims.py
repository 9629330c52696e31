"""Which claims nobody stands behind, and when they have been seen for long enough."""

from __future__ import annotations

import json

from hypothesis import example, given
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


@given(st.lists(st.tuples(st.floats(0, 1000), names), max_size=8))
@example([(100.0, {'a', 'b'})])
@example([(100.0, {'a'}), (100.0 + APART - 0.1, {'a', 'b'}), (100.0 + APART, {'a', 'b'})])
@example([(0.0, {'a'}), (30.0, set()), (APART + 1, {'a'})])
def test_what_is_seen_at_each_look_is_due_when_its_time_has_come(looks: list[tuple[float, set[str]]]) -> None:
    seen: dict[str, float] = {}
    since: dict[str, float] = {}
    for now, found in sorted(looks, key=lambda look: look[0]):
        since = {name: since.get(name, now) for name in found}
        seen, ready = due(seen, found, now)
        assert seen == since
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
