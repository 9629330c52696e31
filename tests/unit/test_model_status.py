"""Whose a trait is, and what says that a compute is disabled."""

from __future__ import annotations

import os_traits
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import status
from ecomp.model.status import DISABLED, STATUS, changed, ours_then

NAMES = st.frozensets(st.sampled_from('ABCDEF'))


def test_the_name_is_that_of_os_traits() -> None:
    assert os_traits.COMPUTE_STATUS_DISABLED == DISABLED


@given(NAMES, NAMES, NAMES)
def test_what_is_wanted_is_there_and_what_is_others_stays(
    theirs: frozenset[str], before: frozenset[str], now: frozenset[str]
) -> None:
    """Somebody has some there; we come with `before`, and then with `now`; and go with nothing."""
    ours = ours_then(theirs, before, frozenset())
    assert not ours & theirs
    there = changed(theirs, before, ours)
    assert there == theirs | before
    later = ours_then(there, now, ours)
    there = changed(there, now, ours | later)
    assert there == theirs | now
    assert changed(there, frozenset(), later) == theirs


@given(NAMES, NAMES, NAMES)
def test_killed_before_or_after_the_write_nothing_of_ours_is_forgotten(
    theirs: frozenset[str], before: frozenset[str], now: frozenset[str]
) -> None:
    """What is written down before the write is the old and the new: the next start takes it from there."""
    ours = ours_then(theirs, before, frozenset())
    noted = ours | ours_then(theirs | before, now, ours)
    for there in (theirs | before, theirs | now):
        assert changed(there, now, noted) == theirs | now
        assert changed(there, frozenset(), noted) == theirs


def test_disabled_and_enabled() -> None:
    assert status.disabled({'A'}) == {'A', *STATUS}
    assert status.enabled({'A', *STATUS}, alive=True) == {'A'}
    assert status.enabled({'A', *STATUS}, alive=False) == {'A', DISABLED}
    assert status.enabled({'A', DISABLED}, alive=True) == {'A'}


def test_a_stop_and_a_start() -> None:
    assert status.stopped({'A'}) == {'A', DISABLED}
    assert status.opened({'A', DISABLED}) == {'A'}
    assert status.opened(status.stopped({'A', *STATUS})) == {'A', *STATUS}, 'an operator disabled it'
