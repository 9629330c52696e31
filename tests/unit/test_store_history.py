"""When the past has been told: by what etcd says of it, as the etcds do that look first and those that do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ecomp.store.history import ANSWERS, ASKING, FULL, _Past

NOW = 5000


def answer(header: int = NOW, **fields: Any) -> Any:
    """An answer to WatchProgress, unless something else is given."""
    nothing = {'events': [], 'created': False, 'canceled': False, 'fragment': False}
    return SimpleNamespace(header=SimpleNamespace(revision=header), **(nothing | fields))


def changes(first: int, count: int, header: int = NOW, fragment: bool = False) -> Any:
    events = [SimpleNamespace(kv=SimpleNamespace(mod_revision=each)) for each in range(first, first + count)]
    return answer(header, events=events, fragment=fragment)


BEGUN = answer(created=True)


def heard(*replies: Any, known: bool = False, apart: float = ASKING) -> tuple[bool, bool]:
    """Whether the past is told after these, and whether it is quiet."""
    past = _Past(NOW, known)
    for number, reply in enumerate(replies):
        past.hear(reply, 100 + number * apart)
    return past.is_told, past.is_quiet


@pytest.mark.parametrize(
    ('replies', 'is_told'),
    [
        ([BEGUN], False),
        ([BEGUN, answer()], False),
        ([BEGUN, changes(2, 10)], False),
        ([BEGUN, changes(2, 10), answer()], True),
        ([BEGUN, changes(2, 10), answer(NOW - 1)], False),
        ([BEGUN, changes(2, 10, NOW - 1), answer()], False),
        ([BEGUN, answer(), changes(2, 10)], False),
        ([BEGUN, changes(2, FULL), answer()], False),
        ([BEGUN, changes(2, FULL - 1), answer()], True),
        ([BEGUN, changes(2, FULL), answer(), changes(FULL + 2, 1), answer()], True),
        # In pieces, of which the second begins within a revision.
        ([BEGUN, changes(2, 600, fragment=True), changes(601, 401), answer()], False),
        ([BEGUN, changes(2, 600, fragment=True), changes(601, 400), answer()], True),
        ([BEGUN, changes(2, 600, fragment=True), answer()], False),
    ],
)
def test_it_is_told_where_the_changes_and_the_answer_both_say_so(replies: list[Any], is_told: bool) -> None:
    assert heard(*replies)[0] is is_told


BEFORE = [answer()] * (ANSWERS - 1)


@pytest.mark.parametrize(
    ('replies', 'how', 'is_quiet'),
    [
        (BEFORE, {}, False),
        ([*BEFORE, answer()], {}, True),
        ([answer()] * 50, {'apart': 0.001}, False),  # of a frozen etcd: answered at once, and counts once
        ([answer(NOW - 1)] * 50, {}, False),
        # A change begins the quiet anew; it is not quiet before the change that is known.
        ([*BEFORE, changes(2, FULL), *BEFORE], {}, False),
        ([*BEFORE, changes(2, FULL), *BEFORE, answer()], {}, True),
        ([answer()] * 50, {'known': True}, False),
        ([changes(2, FULL), *BEFORE, answer()], {'known': True}, True),
    ],
)
def test_silence_alone_is_no_quiet(replies: list[Any], how: dict[str, Any], is_quiet: bool) -> None:
    assert heard(BEGUN, *replies, **how) == (False, is_quiet)
