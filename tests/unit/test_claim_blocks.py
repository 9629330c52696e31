"""How a set's claims are split among calls, and what is said when some of these fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.errors import EcompError, PlacementRefusal, UnknownOutcome, Unreachable
from ecomp.model.allocation import Allocations
from ecomp.model.choose import Candidate
from ecomp.scheduler.placing.claim import AT_ONCE, BLOCK, Claimer, blocks

SMALL = {'VCPU': 1, 'MEMORY_MB': 64}
SECONDS = 10.0


def wanted(*computes: str, shared: str | None = None) -> dict[str, Candidate]:
    """An instance on each of these; `shared` provides the disk of all."""
    disk = {} if shared is None else {shared: {'DISK_GB': 1}}
    return {f'{number}': Candidate(each, {each: SMALL, **disk}, None) for number, each in enumerate(computes)}


@given(st.lists(st.sampled_from('abcdefgh'), min_size=1, max_size=3 * BLOCK))
def test_blocks_are_all_of_it_and_no_two_have_a_compute(computes: list[str]) -> None:
    asked = wanted(*computes)
    parts = blocks(asked)
    assert {instance: each for part in parts for instance, each in part.items()} == asked
    assert sum(map(len, parts)) == len(asked)
    named = [{each.compute for each in part.values()} for part in parts]
    assert sum(map(len, named)) == len(set(computes))
    for part, of in zip(parts, named, strict=True):
        assert len(part) <= BLOCK or len(of) == 1


@pytest.mark.parametrize(
    ('computes', 'each', 'sizes'), [(10, 5, [50]), (10, 10, [50, 50]), (5, 20, [40, 40, 20]), (1, 100, [100])]
)
def test_a_block_is_filled_with_whole_computes(computes: int, each: int, sizes: list[int]) -> None:
    assert [len(part) for part in blocks(wanted(*'abcdefghij'[:computes] * each))] == sizes


def test_who_shares_a_disk_is_claimed_for_in_one_call() -> None:
    assert len(blocks(wanted(*'abcdefghij' * 10, shared='disks'))) == 1


@dataclass(frozen=True)
class Failing(Claimer):
    """Claims that meet errors: `errors` by the compute of the call's first instance. `asked` has those computes."""

    errors: Mapping[str, EcompError] = field(default_factory=dict)
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(AT_ONCE))
    asked: list[str] = field(default_factory=list)

    def claim(self, wanted: Mapping[str, Allocations]) -> None:
        """Not before so many calls have come that none of them waits for another."""
        first = next(iter(next(iter(wanted.values()))))
        self.asked.append(first)
        if len(self.asked) <= AT_ONCE:
            self.together.wait(SECONDS)
        else:
            time.sleep(0.1)
        if first in self.errors:
            raise self.errors[first]


def failing(**errors: EcompError) -> Failing:
    return Failing(None, '', '', lambda: True, errors=errors)  # type: ignore[arg-type]  # placement is not asked


TWO = wanted(*'a' * BLOCK, *'b' * BLOCK)


def test_two_calls_are_under_way_at_once_and_all_is_claimed() -> None:
    claimer = failing()
    assert claimer.claim_what_fits(TWO) == TWO.keys()
    assert sorted(claimer.asked) == ['a', 'b']


@pytest.mark.parametrize('unknown', ['a', 'b'])
def test_what_is_not_known_counts_more_than_any_other_error(unknown: str) -> None:
    """Rule 1: nothing is released while it is not known what was written."""
    errors: dict[str, EcompError] = {'a': Unreachable('gone'), 'b': Unreachable('gone')}
    errors[unknown] = UnknownOutcome('nobody knows')
    with pytest.raises(UnknownOutcome):
        failing(**errors).claim_what_fits(TWO)


def test_after_an_error_no_further_call_is_begun() -> None:
    claimer = failing(a=Unreachable('gone'), b=Unreachable('gone'))
    with pytest.raises(Unreachable):
        claimer.claim_what_fits(wanted(*(each for each in 'abcdefghij' for _ in range(BLOCK))))
    assert len(claimer.asked) < 10


def test_a_refusal_of_one_block_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, '_is_there', lambda *_: True)
    with pytest.raises(PlacementRefusal):
        failing(b=PlacementRefusal('no such class')).claim_what_fits(TWO)
