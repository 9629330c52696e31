"""Which candidate is tried: only those whose compute is alive, in no fixed order."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from ecomp.model.allocation import Room
from ecomp.model.choose import FIRST, PACK, RANDOM, SPREAD, WEIGHS, Offer, choose, distribute, share_left

COMPUTES = [f'compute-{n}' for n in range(6)]
ONE = {'VCPU': 1}
SHARED = {'storage': {'DISK_GB': 1}, 'compute-1': {'VCPU': 1}}


candidates = st.lists(
    st.dictionaries(st.sampled_from([*COMPUTES, 'storage']), st.just(ONE), min_size=1, max_size=3), max_size=8
)


@given(candidates, st.sets(st.sampled_from(COMPUTES)), st.sampled_from(WEIGHS), st.randoms(use_true_random=False))
@example([SHARED], {'compute-1', 'compute-2'}, SPREAD, random.Random(0))
@example([{'compute-1': ONE, 'compute-2': ONE}], {'compute-1', 'compute-2'}, SPREAD, random.Random(0))
@example([{name: ONE} for name in COMPUTES], {'compute-3'}, SPREAD, random.Random(0))
@example([{'compute-1': ONE}], set(), SPREAD, random.Random(0))
def test_each_try_has_exactly_one_living_compute(
    found: list[dict[str, dict[str, int]]], alive: set[str], weigh: str, rng: random.Random
) -> None:
    choice = choose(Offer(found), alive, weigh, rng)
    for compute, allocations, _ in choice.tries:
        assert set(allocations) & alive == {compute}
    usable = [each for each in found if len(set(each) & alive) == 1]
    assert sorted(map(str, usable)) == sorted(str(each.allocations) for each in choice.tries)
    # A candidate with two living computes is passed over: the request goes to one of them, and would hold the other's
    # for nothing. All others that are passed over are named, once.
    passed_over = {provider for each in found if each not in usable for provider in each}
    assert list(choice.skipped) == sorted(passed_over - alive)


def test_the_first_choice_is_spread() -> None:
    # The first of placement's list put 60 of 60 on one of three equal hosts.
    rng = random.Random(1)
    offer = Offer([{name: ONE} for name in COMPUTES])
    firsts = Counter(choose(offer, COMPUTES, SPREAD, rng).tries[0].compute for _ in range(600))
    assert set(firsts) == set(COMPUTES)
    assert max(firsts.values()) < 200


def test_the_same_randomness_chooses_the_same() -> None:
    def tries(seed: int) -> list[str]:
        offer = Offer([{name: ONE} for name in COMPUTES])
        return [each.compute for each in choose(offer, COMPUTES, SPREAD, random.Random(seed)).tries]

    assert tries(7) == tries(7)
    assert {tuple(tries(seed)) for seed in range(9)} > {tuple(tries(7))}


USED = {'compute-0': 6, 'compute-1': 2, 'compute-2': 0, 'compute-3': 2}
OFFER = Offer([{name: ONE} for name in USED], {name: {'VCPU': Room(10, used)} for name, used in USED.items()})


def order(weigh: str, seed: int = 0) -> list[str]:
    return [each.compute for each in choose(OFFER, USED, weigh, random.Random(seed)).tries]


def test_the_emptiest_or_the_fullest_comes_first() -> None:
    assert order(SPREAD)[0] == order(PACK)[-1] == 'compute-2'
    assert order(SPREAD)[-1] == order(PACK)[0] == 'compute-0'
    # Equals come in any order.
    assert {tuple(order(SPREAD, seed)[1:3]) for seed in range(20)} == {
        ('compute-1', 'compute-3'),
        ('compute-3', 'compute-1'),
    }


def test_in_any_order_or_in_placement_s() -> None:
    assert {order(RANDOM, seed)[0] for seed in range(50)} == set(USED)
    assert {tuple(order(FIRST, seed)) for seed in range(9)} == {tuple(USED)}


def test_what_is_scarcest_counts() -> None:
    room = {'VCPU': Room(10, 0), 'MEMORY_MB': Room(1000, 500), 'DISK_GB': Room(3, 3)}
    assert share_left({'VCPU': 1, 'MEMORY_MB': 400}, room) == 0.1
    assert share_left({'VCPU': 1}, room) == 0.9
    # Nothing known of it, all of it reserved, or more asked than there is (a shared provider gives it): no preference.
    assert share_left({'IPV4_ADDRESS': 1}, room) == share_left({'VCPU': 1}, {'VCPU': Room(0, 0)}) == 0
    assert share_left({'DISK_GB': 1}, room) == 0


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(sizes, st.integers(1, 30), st.sampled_from(WEIGHS), st.randoms(use_true_random=False))
def test_a_set_takes_what_room_there_is(free: list[int], count: int, weigh: str, rng: random.Random) -> None:
    rooms = {f'compute-{number}': {'VCPU': Room(10, 10 - each)} for number, each in enumerate(free)}
    offer = Offer([{name: ONE} for name, room in rooms.items() if room['VCPU'].used < 10], rooms)
    tries = choose(offer, rooms, weigh, rng).tries
    taken = distribute(tries, rooms, count, weigh, rng)
    assert len(taken) == min(count, sum(free))
    per = Counter(each.compute for each in taken)
    then = {name: room['VCPU'].used + per[name] for name, room in rooms.items()}
    assert max(then.values()) <= 10
    if weigh == SPREAD and len(taken) < sum(free):
        # What is left differs by one at most, but for those that had less from the start.
        used = [then[name] for name in per]
        assert max(used, default=0) - min(used, default=0) <= 1
    if weigh == PACK:
        # All that were begun are full but for the last.
        assert sum(then[name] < 10 for name in per) <= 1


def test_a_shared_disk_limits_a_set() -> None:
    rooms = {'pool': {'DISK_GB': Room(3, 0)}, **{name: {'VCPU': Room(8, 0)} for name in COMPUTES}}
    offer = Offer([{name: ONE, 'pool': {'DISK_GB': 1}} for name in COMPUTES], rooms)
    tries = choose(offer, COMPUTES, SPREAD, random.Random(0)).tries
    assert len(distribute(tries, rooms, 10, SPREAD, random.Random(0))) == 3
