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


def test_silence_alone_is_no_quiet() -> None:
    assert heard(BEGUN, *[answer()] * (ANSWERS - 1)) == (False, False)
    assert heard(BEGUN, *[answer()] * ANSWERS) == (False, True)


def test_what_was_asked_of_a_frozen_etcd_is_answered_at_once_and_counts_once() -> None:
    assert heard(BEGUN, *[answer()] * 50, apart=0.001) == (False, False)


def test_who_is_behind_is_not_believed() -> None:
    assert heard(BEGUN, *[answer(NOW - 1)] * 50) == (False, False)


def test_a_change_begins_the_quiet_anew() -> None:
    before = [answer()] * (ANSWERS - 1)
    assert heard(BEGUN, *before, changes(2, FULL), *before) == (False, False)
    assert heard(BEGUN, *before, changes(2, FULL), *before, answer()) == (False, True)


def test_it_is_not_quiet_before_the_change_that_is_known() -> None:
    assert heard(BEGUN, *[answer()] * 50, known=True) == (False, False)
    assert heard(BEGUN, changes(2, FULL), *[answer()] * ANSWERS, known=True) == (False, True)
