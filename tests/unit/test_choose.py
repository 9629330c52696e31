"""Which candidate is tried: only those whose compute is alive, in no fixed order."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.choose import choose

COMPUTES = [f'compute-{n}' for n in range(6)]
ONE = {'VCPU': 1}

candidates = st.lists(
    st.dictionaries(st.sampled_from([*COMPUTES, 'storage']), st.just(ONE), min_size=1, max_size=3), max_size=8
)


@given(candidates, st.sets(st.sampled_from(COMPUTES)), st.randoms(use_true_random=False))
def test_each_try_has_exactly_one_living_compute(
    found: list[dict[str, dict[str, int]]], alive: set[str], rng: random.Random
) -> None:
    choice = choose(found, alive, rng)
    for compute, allocations in choice.tries:
        assert set(allocations) & alive == {compute}
    usable = [each for each in found if len(set(each) & alive) == 1]
    assert sorted(map(str, usable)) == sorted(str(allocations) for _, allocations in choice.tries)
    # Who is passed over is named, once, and is nobody who is tried or alive.
    assert list(choice.skipped) == sorted(set(choice.skipped))
    assert not set(choice.skipped) & (alive | {compute for compute, _ in choice.tries})


def test_a_sharing_provider_is_not_taken_for_the_compute() -> None:
    shared = {'storage': {'DISK_GB': 1}, 'compute-1': {'VCPU': 1}}
    choice = choose([shared], ['compute-1', 'compute-2'], random.Random(0))
    assert list(choice.tries) == [('compute-1', shared)]
    assert list(choice.skipped) == []


def test_two_computes_in_one_candidate_are_passed_over() -> None:
    # The request goes to one of them, and would hold the other's for nothing.
    assert choose([{'compute-1': ONE, 'compute-2': ONE}], ['compute-1', 'compute-2'], random.Random(0)).tries == []


def test_dead_computes_are_named() -> None:
    choice = choose([{name: ONE} for name in COMPUTES], ['compute-3'], random.Random(0))
    assert [compute for compute, _ in choice.tries] == ['compute-3']
    assert list(choice.skipped) == [name for name in COMPUTES if name != 'compute-3']


def test_nobody_alive() -> None:
    choice = choose([{'compute-1': ONE}], [], random.Random(0))
    assert list(choice.tries) == []
    assert list(choice.skipped) == ['compute-1']


def test_the_first_choice_is_spread() -> None:
    # The first of placement's list put 60 of 60 on one of three equal hosts.
    rng = random.Random(1)
    firsts = Counter(choose([{name: ONE} for name in COMPUTES], COMPUTES, rng).tries[0][0] for _ in range(600))
    assert set(firsts) == set(COMPUTES)
    assert max(firsts.values()) < 200


def test_the_same_randomness_chooses_the_same() -> None:
    def tries(seed: int) -> list[str]:
        return [
            compute for compute, _ in choose([{name: ONE} for name in COMPUTES], COMPUTES, random.Random(seed)).tries
        ]

    assert tries(7) == tries(7)
    assert {tuple(tries(seed)) for seed in range(9)} > {tuple(tries(7))}
