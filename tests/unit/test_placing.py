"""Placing: which candidate is tried, how attempts share places, how claims are split."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ecomp.agent.host.claims import CONFIRMATION_SECONDS, confirm_sightings, find_orphans
from ecomp.cli.create import LARGE_CLUSTER_SIZE, is_large_cluster, remember_cluster_size
from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, NoCapacity, PlacementRefusal, UnknownOutcome, Unreachable
from ecomp.model import keys
from ecomp.model.allocation import Allocations, Room, Rooms, find_compute
from ecomp.model.assign import MIN_SPARE_PLACES, Lot, Planner
from ecomp.model.choose import (
    FIRST,
    PACK,
    RANDOM,
    SPREAD,
    STRATEGIES,
    Candidate,
    Offer,
    Ranking,
    add_usage,
    calculate_free_share,
    choose,
    distribute,
)
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group
from ecomp.placement.allocations import Requester
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import MAX_CONCURRENT_CALLS, MAX_INSTANCES_PER_CALL, Claimer, split_into_blocks
from ecomp.scheduler.placing.session import MAX_PLACES_AHEAD, MAX_REFRESHES, Contention, Scheduler, Session
from ecomp.shared.attempts import count_placements_before_and_after, list_attempted_instances
from ecomp.store.client import Entry, Snapshot, Store

COMPUTES = [f'compute-{n}' for n in range(6)]
ONE = {'VCPU': 1}
SHARED = {'storage': {'DISK_GB': 1}, 'compute-1': {'VCPU': 1}}


candidates = st.lists(
    st.dictionaries(st.sampled_from([*COMPUTES, 'storage']), st.just(ONE), min_size=1, max_size=3), max_size=8
)


@given(candidates, st.sets(st.sampled_from(COMPUTES)), st.sampled_from(STRATEGIES), st.randoms(use_true_random=False))
@example([SHARED], {'compute-1', 'compute-2'}, SPREAD, random.Random(0))
@example([{'compute-1': ONE, 'compute-2': ONE}], {'compute-1', 'compute-2'}, SPREAD, random.Random(0))
@example([{name: ONE} for name in COMPUTES], {'compute-3'}, SPREAD, random.Random(0))
@example([{'compute-1': ONE}], set(), SPREAD, random.Random(0))
def test_each_try_has_exactly_one_living_compute(
    proposed: list[dict[str, dict[str, int]]], alive: set[str], weigh: str, rng: random.Random
) -> None:
    choice = choose(Offer(proposed), alive, weigh, rng)
    for candidate in choice.candidates:
        assert set(candidate.allocations) & alive == {candidate.compute}
    usable = [candidate for candidate in proposed if len(set(candidate) & alive) == 1]
    assert sorted(map(str, usable)) == sorted(str(candidate.allocations) for candidate in choice.candidates)
    # A candidate with two living computes is skipped: the request goes to one of them, and would hold room of the other
    # without using it. All other skipped providers are named, once.
    passed_over = {provider for candidate in proposed if candidate not in usable for provider in candidate}
    assert list(choice.skipped) == sorted(passed_over - alive)


def test_the_first_choice_is_spread() -> None:
    # Taking the first of placement's list put 60 of 60 instances on one of three equal hosts.
    rng = random.Random(1)
    offer = Offer([{name: ONE} for name in COMPUTES])
    firsts = Counter(choose(offer, COMPUTES, SPREAD, rng).candidates[0].compute for _ in range(600))
    assert set(firsts) == set(COMPUTES)
    assert max(firsts.values()) < 200


USED = {'compute-0': 6, 'compute-1': 2, 'compute-2': 0, 'compute-3': 2}
OFFER = Offer([{name: ONE} for name in USED], {name: {'VCPU': Room(10, used)} for name, used in USED.items()})


def rank_computes(weigh: str, seed: int = 0) -> list[str]:
    return [candidate.compute for candidate in choose(OFFER, USED, weigh, random.Random(seed)).candidates]


def test_spread_prefers_the_emptiest_and_pack_the_fullest() -> None:
    assert rank_computes(SPREAD)[0] == rank_computes(PACK)[-1] == 'compute-2'
    assert rank_computes(SPREAD)[-1] == rank_computes(PACK)[0] == 'compute-0'
    # Equal computes come in any order.
    assert {tuple(rank_computes(SPREAD, seed)[1:3]) for seed in range(20)} == {
        ('compute-1', 'compute-3'),
        ('compute-3', 'compute-1'),
    }


def test_random_uses_any_order_and_first_uses_placements() -> None:
    assert {rank_computes(RANDOM, seed)[0] for seed in range(50)} == set(USED)
    assert {tuple(rank_computes(FIRST, seed)) for seed in range(9)} == {tuple(USED)}


def test_share_left_is_that_of_the_scarcest_class() -> None:
    room = {'VCPU': Room(10, 0), 'MEMORY_MB': Room(1000, 500), 'DISK_GB': Room(3, 3)}
    assert calculate_free_share({'VCPU': 1, 'MEMORY_MB': 400}, room) == 0.1
    assert calculate_free_share({'VCPU': 1}, room) == 0.9
    # Unknown class, all of it reserved, or more requested than exists (a shared provider has it): no preference.
    assert (
        calculate_free_share({'IPV4_ADDRESS': 1}, room) == calculate_free_share({'VCPU': 1}, {'VCPU': Room(0, 0)}) == 0
    )
    assert calculate_free_share({'DISK_GB': 1}, room) == 0


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(sizes, st.integers(1, 30), st.sampled_from(STRATEGIES), st.randoms(use_true_random=False))
def test_set_uses_all_the_room(free: list[int], count: int, weigh: str, rng: random.Random) -> None:
    rooms = {f'compute-{number}': {'VCPU': Room(10, 10 - amount)} for number, amount in enumerate(free)}
    offer = Offer([{name: ONE} for name, room in rooms.items() if room['VCPU'].used < 10], rooms)
    tries = choose(offer, rooms, weigh, rng).candidates
    placements = distribute(Ranking(tries), rooms, count, weigh, rng)
    assert len(placements) == min(count, sum(free))
    counts = Counter(candidate.compute for candidate in placements)
    used_after = {name: room['VCPU'].used + counts[name] for name, room in rooms.items()}
    assert max(used_after.values()) <= 10
    if weigh == SPREAD and len(placements) < sum(free):
        # The free room differs by one at most, except on computes that had less from the start.
        used = [used_after[name] for name in counts]
        assert max(used, default=0) - min(used, default=0) <= 1
    if weigh == PACK:
        # All used computes but the last are full.
        assert sum(used_after[name] < 10 for name in counts) <= 1


def distribute_naively(
    candidates: Sequence[Candidate], rooms: Rooms, count: int, weigh: str, group: Group | None
) -> list[Candidate]:
    chosen, room, open_candidates = (
        list[Candidate](),
        {name: dict(each) for name, each in rooms.items()},
        list(candidates),
    )
    while len(chosen) < count and open_candidates:
        members = {f'new {number}': each.compute for number, each in enumerate(chosen)}
        joined = group.with_members(members) if group else None

        def make_key(each: Candidate, joined: Group | None = joined) -> tuple[bool, int, float]:
            offer = choose(Offer([each.allocations], room), COMPUTES, weigh, random.Random(0))
            preference = joined.get_preference(each.compute) if joined else 0
            return not each.is_troubled, preference, offer.candidates[0].weight or 0

        best = max(open_candidates, key=make_key)
        if joined is not None and joined.explain_exclusion(best.compute) or not add_usage(best.allocations, room):
            open_candidates.remove(best)
        else:
            chosen.append(best)
    return chosen


@given(
    st.lists(
        st.tuples(st.sampled_from(COMPUTES), st.sampled_from(['', 'gpu-1', 'gpu-2', 'pool'])), max_size=8, unique=True
    ),
    st.dictionaries(st.sampled_from([*COMPUTES, 'gpu-1', 'pool']), st.integers(0, 4)),
    st.integers(0, 12),
    st.sampled_from([SPREAD, PACK, FIRST]),
    st.one_of(
        st.none(),
        st.builds(
            Group,
            st.just('web'),
            st.sampled_from([AFFINITY, ANTI_AFFINITY]),
            st.booleans(),
            st.dictionaries(st.sampled_from('abc'), st.sampled_from(COMPUTES)),
        ),
    ),
    st.sets(st.sampled_from(COMPUTES)),
    st.randoms(use_true_random=False),
)
def test_a_few_candidates_give_the_choice_of_all(  # noqa: PLR0913
    pairs: set[tuple[str, str]],
    free: dict[str, int],
    count: int,
    weigh: str,
    group: Group | None,
    troubled: set[str],
    rng: random.Random,
) -> None:
    rooms = {name: {'VCPU': Room(4, 4 - amount)} for name, amount in free.items()}
    offer = Offer([{compute: ONE, **({other: ONE} if other else {})} for compute, other in sorted(pairs)], rooms)
    candidates = choose(offer, COMPUTES, weigh, rng, troubled=troubled).candidates
    assert distribute(Ranking(candidates), rooms, count, weigh, rng, group) == distribute_naively(
        candidates, rooms, count, weigh, group
    )


@given(
    sizes,
    st.sets(st.sampled_from(COMPUTES)),
    st.integers(1, 12),
    st.sampled_from(STRATEGIES),
    st.sampled_from([None, AFFINITY, ANTI_AFFINITY]),
    st.sampled_from([None, 0, 3]),
    st.randoms(use_true_random=False),
)
def test_a_troubled_compute_is_used_last_and_never_excluded(  # noqa: PLR0913
    free: list[int],
    troubled: set[str],
    count: int,
    weigh: str,
    policy: str | None,
    ahead: int | None,
    rng: random.Random,
) -> None:
    rooms = {compute: {'VCPU': Room(10, 10 - amount)} for compute, amount in zip(COMPUTES, free, strict=False)}
    group = Group('web', policy, False, {'x': COMPUTES[0]}) if policy else None
    groups = {'web': group} if group else {}
    places = [{compute: ONE} for compute, room in rooms.items() if room['VCPU'].used < 10]
    offers = {'': Offer(places, rooms)}
    lot = Lot('', group.membership if group else None, weigh, tuple(map(str, range(count))), 0)
    planner = Planner(offers, groups, COMPUTES, rng, troubled=troubled)
    tried = [each.compute in troubled for each in planner.list_candidates(lot, group)]
    assert tried == sorted(tried)
    assignment = planner.assign([lot], ahead=ahead)
    used = Counter(each.compute for each in assignment.candidates.values())
    again = Planner(offers, groups, COMPUTES, rng).assign([lot], ahead=ahead)
    assert len(assignment.candidates) == len(again.candidates)
    healthy = {compute: amount for compute, amount in zip(COMPUTES, free, strict=False) if compute not in troubled}
    if ahead is None or group:
        assert sum(used[compute] for compute in healthy) == min(count, sum(healthy.values()))
    elif sum(healthy.values()) >= ahead + count:
        assert troubled.isdisjoint(used)


@given(st.lists(st.integers(1, 5), min_size=4, max_size=4), st.sets(st.sampled_from(COMPUTES)), st.integers(0, 9))
def test_image_counts_only_among_equal_computes(free: list[int], holders: set[str], seed: int) -> None:
    rooms = {compute: {'VCPU': Room(10, 10 - amount)} for compute, amount in zip(COMPUTES, free, strict=False)}
    offers = {'': Offer([{compute: ONE} for compute in rooms], rooms)}
    planner, lot = Planner(offers, {}, COMPUTES, random.Random(seed)), Lot('', None, SPREAD, ('0',), image='i')
    best = [compute for compute in rooms if rooms[compute]['VCPU'].free == max(free[: len(rooms)])]
    assert sorted(planner.list_best(lot)) == sorted(best)
    planner.prefer(lot, holders)
    (chosen,) = planner.assign([lot]).candidates.values()
    assert chosen.compute in (holders.intersection(best) or best)
    assert chosen.has_image == (chosen.compute in holders)


def test_a_shared_disk_limits_a_set() -> None:
    rooms = {'pool': {'DISK_GB': Room(3, 0)}, **{name: {'VCPU': Room(8, 0)} for name in COMPUTES}}
    offer = Offer([{name: ONE, 'pool': {'DISK_GB': 1}} for name in COMPUTES], rooms)
    tries = choose(offer, COMPUTES, SPREAD, random.Random(0)).candidates
    assert len(distribute(Ranking(tries), rooms, 10, SPREAD, random.Random(0))) == 3


# Contention: which place each of many concurrent attempts takes.


def make_contention(*read: tuple[int, int]) -> tuple[Contention, list[str]]:
    """Return a Contention that reads these counts, then repeats the last, and its action log."""
    counts, actions = list(read), list[str]()

    def read_counts() -> tuple[int, int]:
        actions.append('read')
        return counts.pop(0) if len(counts) > 1 else counts[0]

    def ask() -> dict[str, Offer]:
        actions.append('ask')
        return {}

    return Contention(read_counts, ask, random.Random(1)), actions


def count_reads(contention: Contention, spares: Sequence[int]) -> int:
    for number, spare in enumerate(spares):
        if not contention.should_refresh(spare):
            return number
        contention.refresh()
    return len(spares)


def test_single_attempt_never_reads_again() -> None:
    contention, actions = make_contention((0, 0))
    assert contention.is_alone
    assert count_reads(contention, [0]) == 0
    assert actions == ['read']


@pytest.mark.parametrize('read', [(1, 0), (0, 1)])
def test_contention_reads_once_more_if_room_is_scarce(read: tuple[int, int]) -> None:
    contention, actions = make_contention(read)
    assert count_reads(contention, [MIN_SPARE_PLACES]) == 0
    assert count_reads(contention, [MIN_SPARE_PLACES - 1, 0]) == 1
    # It must count the attempts before it asks placement again.
    assert actions == ['read', 'read', 'ask']


def test_without_a_place_it_reads_while_older_attempts_advance() -> None:
    contention, _ = make_contention((30, 0), *[(30 - number, 0) for number in range(20)], (0, 5))
    assert count_reads(contention, [-1] * 100) == 21
    contention, _ = make_contention((1, 0))
    assert count_reads(contention, [-1] * 100) == 1 + MAX_REFRESHES


def test_places_left_to_others_are_limited() -> None:
    contention, _ = make_contention((10 * MAX_PLACES_AHEAD, 0))
    assert contention.ahead == MAX_PLACES_AHEAD
    contention.refresh()
    assert contention.ahead == MAX_PLACES_AHEAD


def test_older_and_newer_instances_are_counted() -> None:
    def entry(name: str, revision: int, instances: list[str] | None) -> Entry:
        value = b'?' if instances is None else json.dumps({'version': 1, 'instances': instances}).encode()
        return Entry(keys.attempt(name), value, revision, lease=1 if name != 'by hand' else 0)

    entries = [
        *(entry('one', 5, ['one']), entry('set', 6, ['a', 'b', 'c']), entry('odd', 7, None)),
        *(entry('me', 8, ['me']), entry('late', 9, ['late', 'x'])),
        *(entry('by hand', 4, ['y']), entry('by hand', 10, ['z'])),
    ]
    assert count_placements_before_and_after(
        Snapshot(10, {f'{item.key} {item.revision}': item for item in entries}), 8
    ) == (5, 1)


# Many concurrent attempts that have got the same answer from placement.


SIZE = {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}
INSTANCES_PER_COMPUTE = 4


def make_offer(computes: int) -> Offer:
    names = [str(uuid.UUID(int=number)) for number in range(computes)]
    rooms = {name: {unit: Room(INSTANCES_PER_COMPUTE * amount, 0) for unit, amount in SIZE.items()} for name in names}
    return Offer([{name: SIZE} for name in names], rooms)


class UnservedSession(Session):
    """A session without servers, whose claims all succeed: no test asks for more than the room."""

    def __init__(self, alive: Collection[str], others: tuple[int, int] = (0, 0), seed: int = 0) -> None:
        """Make a session, where `others` are numbers of instances of older and newer attempts."""
        answer = cast(Placement, None), Offer(())
        scheduler = Scheduler(cast(Store, None), lambda: answer, {}, random.Random(seed), str)
        super().__init__(scheduler, 'attempt', (), Requester('', ''))
        self.alive, self.others, self.answer = list(alive), others, Offer(())

    def read_alive(self) -> list[str]:
        return self.alive

    def read_troubled(self) -> list[str]:
        return []

    def count_in_flight(self) -> tuple[int, int]:
        return self.others

    def read_offers(self, queries: Iterable[str]) -> dict[str, Offer]:
        return dict.fromkeys(queries, self.answer)

    def claim(self, candidates: Mapping[str, Candidate], _: Requester | None = None) -> set[str]:
        return set(candidates)

    def place_lot(self, answer: Offer, weigh: str, count: int = 1) -> list[Candidate]:
        self.answer = answer
        lot = Lot('query', None, weigh, tuple(map(str, range(count))))
        return list(self.place(lambda *_: [lot], {}, {'query': answer}, {}).values())


def place_order(answer: Offer, seed: int, weigh: str, ahead: int, behind: int = 0, count: int = 1) -> list[str]:
    session = UnservedSession(answer.rooms, (ahead, behind), seed)
    return [candidate.compute for candidate in session.place_lot(answer, weigh, count)]


def count_fullest(computes: list[str]) -> int:
    return max(Counter(computes).values())


def test_unaware_attempts_rarely_meet_on_many_equal_computes() -> None:
    """No attempt sees the others' claims, and each knows of only some of the others."""
    answer = make_offer(500)
    computes = [place_order(answer, seed, SPREAD, ahead=seed % 3, behind=1)[0] for seed in range(40)]
    assert count_fullest(computes) <= 3


def test_sets_leave_whole_computes_to_older_attempts() -> None:
    answer = make_offer(500)
    computes = [c for seed in range(8) for c in place_order(answer, seed, SPREAD, ahead=10 * seed, behind=1, count=10)]
    assert count_fullest(computes) == 1


def test_scarce_first_places_are_left_to_older_attempts() -> None:
    answer = make_offer(MIN_SPARE_PLACES // INSTANCES_PER_COMPUTE // 2)
    room = MIN_SPARE_PLACES // 2
    computes = [place_order(answer, seed, SPREAD, ahead=seed, behind=1)[0] for seed in range(room)]
    assert Counter(computes) == dict.fromkeys(
        answer.rooms, INSTANCES_PER_COMPUTE
    )  # every place once, with any shuffling


@pytest.mark.parametrize('weigh', [PACK, FIRST])
def test_packing_attempts_fill_the_same_computes(weigh: str) -> None:
    answer = make_offer(200)
    computes = [place_order(answer, seed, weigh, ahead=seed, behind=1)[0] for seed in range(3 * INSTANCES_PER_COMPUTE)]
    assert Counter(computes) == dict.fromkeys(list(answer.rooms)[:3], INSTANCES_PER_COMPUTE)


def test_single_attempt_spreads_over_all_computes() -> None:
    assert count_fullest(place_order(make_offer(20), 1, SPREAD, ahead=0, count=20)) == 1


def test_lost_place_leaves_the_other_places_of_its_compute() -> None:
    """The GPUs are child providers of the compute, and others win all of them but the last."""
    compute, gpus = str(uuid.uuid4()), [str(uuid.uuid4()) for _ in range(6)]
    free_gpus = set(gpus)

    class RacedSession(UnservedSession):
        def claim(self, candidates: Mapping[str, Candidate], _: Requester | None = None) -> set[str]:
            ((instance, candidate),) = candidates.items()
            (gpu,) = candidate.allocations.keys() - {compute}
            if len(free_gpus) == 1:
                return {instance}
            free_gpus.discard(gpu)
            return set()

        def read_offers(self, queries: Iterable[str]) -> dict[str, Offer]:
            return dict.fromkeys(queries, read_offer())

    def read_offer() -> Offer:
        return Offer([{compute: SIZE, gpu: {'CUSTOM_GPU': 1}} for gpu in sorted(free_gpus)], {})

    (chosen,) = RacedSession([compute]).place_lot(read_offer(), SPREAD)
    assert chosen.allocations.keys() == {compute, *free_gpus}


def test_group_of_one_compute_that_lost_a_race_moves_as_a_whole() -> None:
    answer = make_offer(2)
    full, other = answer.rooms

    class RacedSession(UnservedSession):
        def claim(self, candidates: Mapping[str, Candidate], _: Requester | None = None) -> set[str]:
            """Lose all races but the first for the compute that is chosen first."""
            return {instance for instance, each in candidates.items() if each.compute == other or instance == '0'}

    group = Group('db', AFFINITY)
    lot = Lot('query', group.membership, FIRST, ('0', '1'))
    session = RacedSession(answer.rooms)
    session.answer = answer
    placed = session.place(lambda *_: [lot], {'db': group}, {'query': answer}, {})
    assert {each.compute for each in placed.values()} == {other}
    assert len(placed) == 2


def test_candidate_on_two_computes_is_explained() -> None:
    """Placement proposes this if a compute shares its disk with another through an aggregate."""
    answer = make_offer(2)
    one, other = answer.rooms
    shared = Offer([{one: {'DISK_GB': 1}, other: {'VCPU': 1, 'MEMORY_MB': 128}}], answer.rooms)
    with pytest.raises(
        NoCapacity, match='candidates on two computes, .* Fix: remove the trait MISC_SHARES_VIA_AGGREGATE'
    ):
        place_order(shared, 1, SPREAD, ahead=0)


def test_adopted_claim_never_becomes_movable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that restarts, or whose group changed, may claim on the same compute again."""
    monkeypatch.setattr('ecomp.scheduler.placing.claim.claim', lambda *arguments: arguments[4]())
    claimer = Claimer(
        cast(Placement, None), Requester('', ''), lambda: True, foreign={'running'}
    )  # placement is not asked
    claimer.claim({'running': {'compute': SIZE}, 'new': {'compute': SIZE}})
    assert claimer.movable == {'new'}


# Orphaned claims, and when they have been seen for long enough.


LEASE = 7

names = st.sets(st.sampled_from('abcdefgh'))


@given(names, names, names, names)
def test_orphans_are_claims_without_request_guest_or_attempt(
    held: set[str], requested: set[str], guests: set[str], in_flight: set[str]
) -> None:
    assert find_orphans(held, requested, guests, in_flight) == {
        name for name in held if name not in requested and name not in guests and name not in in_flight
    }


@given(st.lists(st.tuples(st.floats(0, 1000), names), max_size=8))
@example([(100.0, {'a', 'b'})])
@example([(100.0, {'a'}), (100.0 + CONFIRMATION_SECONDS - 0.1, {'a', 'b'}), (100.0 + CONFIRMATION_SECONDS, {'a', 'b'})])
@example([(0.0, {'a'}), (30.0, set()), (CONFIRMATION_SECONDS + 1, {'a'})])
def test_orphan_seen_for_long_enough_is_due(checks: list[tuple[float, set[str]]]) -> None:
    first_seen: dict[str, float] = {}
    expected: dict[str, float] = {}
    for now, orphan_names in sorted(checks, key=lambda look: look[0]):
        expected = {name: expected.get(name, now) for name in orphan_names}
        first_seen, ready = confirm_sightings(first_seen, orphan_names, now)
        assert first_seen == expected
        assert ready == {name for name in orphan_names if now - expected[name] >= CONFIRMATION_SECONDS}


def test_instances_of_living_attempts_are_listed() -> None:
    def entry(name: str, value: bytes) -> tuple[str, Entry]:
        return f'/requests/{name}', Entry(f'/requests/{name}', value, 1, LEASE)

    of_a_set = json.dumps({'instances': ['a', 'b']}).encode()
    values = [('a', of_a_set), ('c', b'\xff'), ('d', b'[]'), ('e', b'{"instances": 5}'), ('f', b''), ('g', b'null')]
    entries = dict(entry(*item) for item in values)
    assert list_attempted_instances(Snapshot(1, entries)) == {*'abcdefg'}
    # An attempt without a lease, written manually, would never expire.
    entries |= {'/requests/h': Entry('/requests/h', of_a_set, 1), '/requests/a': Entry('/requests/a', of_a_set, 2)}
    assert list_attempted_instances(Snapshot(1, entries)) == {*'cdefg'}


# Splitting a set's claims into calls, and the error that is raised if some of the calls fail.


SMALL = {'VCPU': 1, 'MEMORY_MB': 64}
BARRIER_TIMEOUT_SECONDS = 10.0


def make_candidates(*computes: str, shared: str | None = None) -> dict[str, Candidate]:
    disk = {} if shared is None else {shared: {'DISK_GB': 1}}
    return {f'{number}': Candidate(compute, {compute: SMALL, **disk}, None) for number, compute in enumerate(computes)}


@given(st.lists(st.sampled_from('abcdefgh'), min_size=1, max_size=3 * MAX_INSTANCES_PER_CALL))
def test_blocks_are_complete_and_share_no_compute(computes: list[str]) -> None:
    claims = make_candidates(*computes)
    parts = split_into_blocks(claims)
    assert {instance: candidate for part in parts for instance, candidate in part.items()} == claims
    assert sum(map(len, parts)) == len(claims)
    block_computes = [{candidate.compute for candidate in part.values()} for part in parts]
    assert sum(map(len, block_computes)) == len(set(computes))
    for part, block in zip(parts, block_computes, strict=True):
        assert len(part) <= MAX_INSTANCES_PER_CALL or len(block) == 1


@pytest.mark.parametrize(
    ('computes', 'instances_per_compute', 'sizes'),
    [(10, 5, [50]), (10, 10, [50, 50]), (5, 20, [40, 40, 20]), (1, 100, [100])],
)
def test_a_block_is_filled_with_whole_computes(computes: int, instances_per_compute: int, sizes: list[int]) -> None:
    assert [
        len(part) for part in split_into_blocks(make_candidates(*'abcdefghij'[:computes] * instances_per_compute))
    ] == sizes


def test_claims_on_a_shared_disk_are_one_call() -> None:
    assert len(split_into_blocks(make_candidates(*'abcdefghij' * 10, shared='disks'))) == 1


@dataclass
class FailingClaimer(Claimer):
    """A claimer whose calls raise `errors`, by the compute of a call's first instance."""

    errors: Mapping[str, EcompError] = field(default_factory=dict)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(MAX_CONCURRENT_CALLS))
    called_computes: list[str] = field(default_factory=list)

    def claim(self, claims: Mapping[str, Allocations]) -> None:
        """Wait until the concurrent calls have all begun, so that sequential calls would fail."""
        first = next(iter(next(iter(claims.values()))))
        self.called_computes.append(first)
        if len(self.called_computes) <= MAX_CONCURRENT_CALLS:
            self.barrier.wait(BARRIER_TIMEOUT_SECONDS)
        else:
            time.sleep(0.1)
        if first in self.errors:
            raise self.errors[first]


def make_failing_claimer(**errors: EcompError) -> FailingClaimer:
    return FailingClaimer(cast(Placement, None), Requester('', ''), lambda: True, errors=errors)


TWO = make_candidates(*'a' * MAX_INSTANCES_PER_CALL, *'b' * MAX_INSTANCES_PER_CALL)


def test_two_calls_run_concurrently() -> None:
    claimer = make_failing_claimer()
    assert claimer.claim_what_fits(TWO) == TWO.keys()
    assert sorted(claimer.called_computes) == ['a', 'b']


@pytest.mark.parametrize('unknown', ['a', 'b'])
def test_unknown_outcome_precedes_any_other_error(unknown: str) -> None:
    """No claim is released while the outcome of a write is unknown (rule: read-back)."""
    errors: dict[str, EcompError] = {'a': Unreachable('gone'), 'b': Unreachable('gone')}
    errors[unknown] = UnknownOutcome('nobody knows')
    with pytest.raises(UnknownOutcome):
        make_failing_claimer(**errors).claim_what_fits(TWO)


def test_after_an_error_no_further_call_is_begun() -> None:
    claimer = make_failing_claimer(a=Unreachable('gone'), b=Unreachable('gone'))
    with pytest.raises(Unreachable):
        claimer.claim_what_fits(
            make_candidates(*(compute for compute in 'abcdefghij' for _ in range(MAX_INSTANCES_PER_CALL)))
        )
    assert len(claimer.called_computes) < 10


def test_a_refusal_of_one_block_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingClaimer, '_has_providers', lambda *_: True)
    with pytest.raises(PlacementRefusal):
        make_failing_claimer(b=PlacementRefusal('no such class')).claim_what_fits(TWO)


# Allocations: the compute among their providers.


def test_compute_of_is_the_provider_of_vcpus() -> None:
    shared, compute = 'a-shared-disk', 'a-compute'
    assert find_compute({shared: {'DISK_GB': 1}, compute: {'VCPU': 1, 'MEMORY_MB': 1}}) == compute
    assert find_compute({shared: {'DISK_GB': 1}}) == ''
    assert find_compute({}) == ''


# The cluster size that eschedule remembers from its last run.


TWO_MEMBERS = EtcdConfig(('one:2379', 'two:2379'))
OTHER = EtcdConfig(('other:2379',))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache'


def test_large_cluster_is_remembered_per_etcd(home: Path) -> None:
    assert not is_large_cluster(TWO_MEMBERS)
    remember_cluster_size(TWO_MEMBERS, LARGE_CLUSTER_SIZE)
    assert not home.exists()  # small clusters, the usual case, write nothing
    remember_cluster_size(TWO_MEMBERS, LARGE_CLUSTER_SIZE + 1)
    remember_cluster_size(TWO_MEMBERS, LARGE_CLUSTER_SIZE + 1)
    assert is_large_cluster(TWO_MEMBERS)
    assert not is_large_cluster(OTHER)
    remember_cluster_size(OTHER, 5)
    assert is_large_cluster(TWO_MEMBERS)
    remember_cluster_size(TWO_MEMBERS, LARGE_CLUSTER_SIZE)
    assert not is_large_cluster(TWO_MEMBERS)
    assert list((home / 'ecomp').iterdir()) == []


def test_unwritable_cache_is_ignored(home: Path) -> None:
    home.write_text('a file where a directory is to be')
    remember_cluster_size(TWO_MEMBERS, LARGE_CLUSTER_SIZE + 1)
    assert not is_large_cluster(TWO_MEMBERS)
    remember_cluster_size(TWO_MEMBERS, 1)


def test_missing_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_home() -> Path:
        raise RuntimeError('no home')

    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setattr(Path, 'home', raise_no_home)
    remember_cluster_size(TWO_MEMBERS, LARGE_CLUSTER_SIZE + 1)
    assert not is_large_cluster(TWO_MEMBERS)
