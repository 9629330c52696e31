"""The order in which candidates are claimed, and how a set is distributed over them. Pure."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ecomp.model.allocation import MAX_AMOUNT, Allocations, Resources, Room, Rooms
from ecomp.model.group import Group
from ecomp.model.parsers import FLAG, check, nullable, number, text
from ecomp.model.status import SHARING_TRAIT
from ecomp.model.stored import sparse, stored

SPREAD = 'spread'
PACK = 'pack'
RANDOM = 'random'
FIRST = 'first'
# Strategies: the emptiest compute first, the fullest one that has room first, a random one, or placement's own order.
STRATEGIES = (SPREAD, PACK, RANDOM, FIRST)

# Stands for the strategy in PlacementReason if a compute took the request from a queue, so nothing was weighed.
FROM_QUEUE = 'queue'


class Offer(NamedTuple):
    """Placement's answer to a query, as of `queried_at` (monotonic seconds) or older."""

    candidates: Sequence[Allocations]
    rooms: Rooms = {}
    queried_at: float = -math.inf


class Candidate(NamedTuple):
    compute: str
    allocations: Allocations
    weight: float | None  # the largest is tried first; None: not weighed
    is_troubled: bool = False  # its compute reports a trouble, so it is tried after all others
    has_image: bool = False  # its compute has the image in its cache, so it is preferred to equal ones

    @property
    def quality(self) -> tuple[bool, float]:
        return self.is_troubled, -(self.weight or 0)


# Never true for NaN.
_WEIGHT = check('a number', lambda value: type(value) in (int, float) and -MAX_AMOUNT <= value <= MAX_AMOUNT)


@stored(
    weigh=text(lambda strategy: strategy[:40]),
    weight=nullable(_WEIGHT),
    of=number(1, MAX_AMOUNT),
    troubled=sparse(FLAG),
    has_image=sparse(FLAG),
)
class PlacementReason(NamedTuple):
    weigh: str
    weight: float | None
    of: int  # the number of possible computes
    troubled: bool = False  # the compute had a trouble
    has_image: bool = False  # it was preferred to equal ones because it had the image


class Choice(NamedTuple):
    candidates: Sequence[Candidate]
    skipped: Sequence[str]  # providers that are not alive, of candidates without exactly one living compute


def choose(
    offer: Offer, living_computes: Iterable[str], strategy: str, rng: random.Random, troubled: Collection[str] = ()
) -> Choice:
    """Sort the candidates on exactly one living compute: `troubled` ones last, then by weight."""
    living = set(living_computes)
    candidates: list[Candidate] = []
    skipped: set[str] = set()
    for allocations in offer.candidates:
        computes = [provider for provider in allocations if provider in living]
        if len(computes) == 1:
            candidate = Candidate(computes[0], allocations, None, computes[0] in troubled)
            candidates.append(candidate._replace(weight=_calculate_weight(candidate, offer.rooms, strategy)))
        else:
            skipped.update(allocations)
    if strategy != FIRST:
        # Equal ones are shuffled, so that racing schedulers do not all want the same one.
        rng.shuffle(candidates)
        candidates.sort(key=lambda each: -(each.weight or 0))
    skipped -= living
    candidates.sort(key=lambda each: each.is_troubled)
    return Choice(candidates, sorted(skipped))


def calculate_free_share(amounts: Resources, room: Mapping[str, Room]) -> float:
    """Return the smallest free share of a class, 0.00 to 1.00, after `amounts` are placed."""
    usages = [(room[name], amount) for name, amount in amounts.items() if name in room]
    shares = [1 - (usage.used + amount) / usage.capacity for usage, amount in usages if usage.capacity]
    return round(max(min(shares, default=0.0), 0.0), 2)  # nearly equal computes are equal


class Ranking:
    """Candidates in the order of choose(), the best first."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.positions: dict[str, list[int]] = {}
        for position, candidate in enumerate(candidates):
            self.positions.setdefault(candidate.compute, []).append(position)

    def restrict(self, compute: str) -> Ranking:
        return Ranking([self.candidates[position] for position in self.positions.get(compute, ())])


def distribute(  # noqa: PLR0913
    ranking: Ranking,
    rooms: Rooms,
    count: int,
    strategy: str,
    rng: random.Random,
    group: Group | None = None,
    dead: Collection[str] = (),
    stale_computes: Iterable[str] = (),
) -> list[Candidate]:
    """Choose the best candidates that have room, one an instance, for up to `count` instances.

    A class or provider that `rooms` lacks is unlimited. The room of `stale_computes` has changed since the ranking.
    """
    changed, chosen = dict[str, dict[str, Room]](), list[Candidate]()
    counts = Counter(group.member_counts if group is not None else ())

    def make_entry(position: int) -> _Entry:
        candidate = ranking.candidates[position]
        preference = 0 if group is None else group.preference_sign * counts[candidate.compute]
        room = {candidate.compute: changed.get(candidate.compute) or rooms.get(candidate.compute, {})}
        weight = -rng.random() if strategy == RANDOM else _calculate_weight(candidate, room, strategy) or 0.0
        return candidate.is_troubled, -preference, -weight, position

    heap = _CandidateHeap(ranking, strategy, make_entry, {*stale_computes, *counts})
    while len(chosen) < count and (candidate := heap.pop()) is not None:
        compute, allocations = candidate.compute, candidate.allocations
        if any(each in dead for each in allocations) or (group is not None and not group.can_admit(compute, counts)):
            continue
        changed |= {provider: dict(rooms.get(provider, {})) for provider in allocations.keys() - changed}
        if add_usage(allocations, changed):
            chosen.append(candidate)
            counts[compute] += 1
            heap.rerank(compute)
    return chosen


# What is smaller for a better candidate, whose position is last.
_Entry = tuple[bool, int, float, int]


class _CandidateHeap:
    """The candidates of a ranking, the best first. On `stale` computes make_entry() weighs them."""

    def __init__(self, ranking: Ranking, strategy: str, make_entry: Callable[[int], _Entry], stale: set[str]) -> None:
        self._ranking, self._strategy, self._make_entry, self._stale = ranking, strategy, make_entry, stale
        positions = (position for each in stale for position in ranking.positions.get(each, ()))
        self._entries = [make_entry(position) for position in positions]
        heapify(self._entries)
        self._next = 0

    def pop(self) -> Candidate | None:
        candidates, entries = self._ranking.candidates, self._entries
        while self._next < len(candidates) and candidates[self._next].compute in self._stale:
            self._next += 1
        if self._next == len(candidates) or (entries and entries[0] < self._make_next_entry()):
            return candidates[heappop(entries)[-1]] if entries else None
        self._next += 1
        return candidates[self._next - 1]

    def _make_next_entry(self) -> _Entry:
        candidate, count = self._ranking.candidates[self._next], len(self._ranking.candidates)
        # RANDOM: the ranking is shuffled, and chosen ones take part again.
        weight = self._next / count if self._strategy == RANDOM else -(candidate.weight or 0.0)
        return candidate.is_troubled, 0, weight, self._next

    def rerank(self, compute: str) -> None:
        candidates, positions = self._ranking.candidates, self._ranking.positions[compute]
        self._stale.add(compute)
        if len(positions) > 1:  # its other candidates have another weight now
            self._entries = [each for each in self._entries if candidates[each[-1]].compute != compute]
            heapify(self._entries)
        for position in positions:
            heappush(self._entries, self._make_entry(position))


def add_usage(allocations: Allocations, rooms: dict[str, dict[str, Room]]) -> bool:
    """Add the allocations to the usage in `rooms`, or only return False if one does not fit."""
    parts = [(rooms.get(provider, {}), resources) for provider, resources in allocations.items()]
    usages = [(room, name, resources[name]) for room, resources in parts for name in resources if name in room]
    if any(room[name].used + amount > room[name].capacity for room, name, amount in usages):
        return False
    for room, name, amount in usages:
        room[name] = Room(room[name].capacity, room[name].used + amount)
    return True


def describe_room(placed_count: int, count: int, group: Group | None) -> str:
    rule = '' if group is None else f' in group {group.name} ({group.rule})'
    return f'there is room for {placed_count} of {count}{rule}'


def explain_no_candidate(offer: Offer, skipped: Collection[str], alive: Collection[str], group: Group | None) -> str:
    if group is not None and any(compute in alive for allocations in offer.candidates for compute in allocations):
        return f'there is room, but not where group {group.name} allows it ({group.rule})'
    if skipped:
        return 'placement offers computes, but none of them is alive'
    if not alive:
        return 'no compute is alive. Fix: start ecompute on a host'
    if any(sum(provider in alive for provider in allocations) > 1 for allocations in offer.candidates):
        problem = 'placement offers only candidates on two computes, one of which shares resources with the other'
        cure = f'remove the trait {SHARING_TRAIT} from the compute that shares'
        return f'{problem}, but a guest runs on one compute. Fix: {cure}'
    if offer.candidates:  # of another cloud, or computes that etcd does not know
        return 'placement offers only resource providers that etcd does not know as computes'
    return 'no compute satisfies the whole query'


def _calculate_weight(candidate: Candidate, rooms: Rooms, strategy: str) -> float | None:
    if strategy not in (SPREAD, PACK):
        return None
    free_share = calculate_free_share(candidate.allocations[candidate.compute], rooms.get(candidate.compute, {}))
    return free_share if strategy == SPREAD else 1 - free_share
