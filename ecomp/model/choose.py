"""The order in which candidates are claimed, and how a set is distributed over them. Pure."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ecomp.model.allocation import MAX_AMOUNT, Allocations, Resources, Room, Rooms
from ecomp.model.group import Group
from ecomp.model.parsers import check, nullable, number, text
from ecomp.model.status import SHARING_TRAIT
from ecomp.model.stored import stored

SPREAD = 'spread'
PACK = 'pack'
RANDOM = 'random'
FIRST = 'first'
# Strategies: the emptiest compute first, the fullest one that has room first, a random one, or placement's own order.
STRATEGIES = (SPREAD, PACK, RANDOM, FIRST)

# The weight of a candidate that has no room left or that the group excludes; below every other weight.
EXCLUDED_WEIGHT = (-math.inf, 0.0)

# Stands for the strategy in PlacementReason if a compute took the request from a queue, so nothing was weighed.
FROM_QUEUE = 'queue'


class Offer(NamedTuple):
    """Placement's answer to a query. It is as of `queried_at` (monotonic seconds) or older."""

    candidates: Sequence[Allocations]
    rooms: Rooms = {}
    queried_at: float = -math.inf


class Candidate(NamedTuple):
    """A candidate on one compute. A larger `weight` is tried earlier; None: not weighed."""

    compute: str
    allocations: Allocations
    weight: float | None


_WEIGHT = check(
    'a number',
    lambda value: type(value) in (int, float) and -MAX_AMOUNT <= value <= MAX_AMOUNT,  # never true for NaN
)


@stored(weigh=text(lambda strategy: strategy[:40]), weight=nullable(_WEIGHT), of=number(1, MAX_AMOUNT))
class PlacementReason(NamedTuple):
    """Why an instance is on its compute: strategy, weight, and number of possible computes."""

    weigh: str
    weight: float | None
    of: int


class Choice(NamedTuple):
    """The candidates to try, in order. `skipped` are the not living providers of those without one living compute."""

    candidates: Sequence[Candidate]
    skipped: Sequence[str]


def choose(
    offer: Offer, living_computes: Iterable[str], strategy: str, rng: random.Random, group: Group | None = None
) -> Choice:
    """Order the candidates on living computes by the group's preference, then by weight.

    Candidates that the group excludes, and those without exactly one living compute, are left out. Equal ones are
    shuffled, so that racing schedulers do not all want the same one; FIRST keeps placement's order.
    """
    living = set(living_computes)
    candidates: list[Candidate] = []
    skipped: set[str] = set()
    for allocations in offer.candidates:
        computes = [provider for provider in allocations if provider in living]
        if len(computes) == 1:
            candidates.append(
                Candidate(computes[0], allocations, _calculate_weight(computes[0], allocations, offer.rooms, strategy))
            )
        else:
            skipped.update(allocations)
    if strategy != FIRST:
        rng.shuffle(candidates)
        candidates.sort(key=lambda each: -(each.weight or 0))
    candidate_computes = {candidate.compute for candidate in candidates}
    skipped -= candidate_computes | living
    if group is not None:
        candidates = [candidate for candidate in candidates if group.explain_exclusion(candidate.compute) is None]
        candidates.sort(key=lambda each: -group.get_preference(each.compute))
    return Choice(candidates, sorted(skipped))


def calculate_free_share(requested: Resources, room: Mapping[str, Room]) -> float:
    """Return the free share, 0 to 1, of the requested class that is scarcest after placing `requested`.

    Rounded to hundredths: nearly equal computes are equal. Only classes with capacity in `room` count; 0 if none does.
    """
    shares = [
        1 - (usage.used + amount) / usage.capacity
        for name, amount in requested.items()
        if (usage := room.get(name)) is not None and usage.capacity
    ]
    return round(max(min(shares, default=0.0), 0.0), 2)


def distribute(
    candidates: Sequence[Candidate],
    rooms: Rooms,
    count: int,
    strategy: str,
    rng: random.Random,
    group: Group | None = None,
) -> list[Candidate]:
    """Return a candidate for each of `count` instances, or for fewer if the room or the group allows no more.

    `candidates` are in the order of choose(). A class or provider that is missing in `rooms` is unlimited. A strict
    affinity group without members gets one compute: the first that has room for all, or else for most.
    """
    if group is None or not group.is_undecided:
        return _distribute(candidates, rooms, count, strategy, rng, group)
    best: list[Candidate] = []
    for compute in dict.fromkeys(candidate.compute for candidate in candidates):
        on_compute = [candidate for candidate in candidates if candidate.compute == compute]
        distributed = _distribute(on_compute, rooms, count, strategy, rng, None)
        if len(distributed) > len(best):
            best = distributed
        if len(distributed) == count:
            break
    return best


def _distribute(
    candidates: Sequence[Candidate], rooms: Rooms, count: int, strategy: str, rng: random.Random, group: Group | None
) -> list[Candidate]:
    """Choose for each instance the best candidate that has room, for fewer if none is left; see distribute()."""
    remaining = {provider: dict(room) for provider, room in rooms.items()}
    counts = Counter(group.member_counts if group is not None else ())
    indices: dict[str, list[int]] = {}
    for index, chosen in enumerate(candidates):
        indices.setdefault(chosen.compute, []).append(index)

    def weigh_candidate(candidate: Candidate) -> tuple[float, float]:
        preference = 0 if group is None else group.preference_sign * counts[candidate.compute]
        return preference, 0.0 if strategy == RANDOM else _calculate_weight(
            candidate.compute, candidate.allocations, remaining, strategy
        ) or 0.0

    weights = [weigh_candidate(contender) for contender in candidates]
    distributed: list[Candidate] = []
    while len(distributed) < count:
        best = max(weights, default=EXCLUDED_WEIGHT)
        if best == EXCLUDED_WEIGHT:
            break
        # Candidates come shuffled, so the first of equals will do. RANDOM chooses again for each instance.
        equals = [index for index, value in enumerate(weights) if value == best] if strategy == RANDOM else []
        index = rng.choice(equals) if equals else weights.index(best)
        chosen = candidates[index]
        if not add_usage(chosen.allocations, remaining):
            weights[index] = EXCLUDED_WEIGHT
            continue
        distributed.append(chosen)
        counts[chosen.compute] += 1
        for other in indices[chosen.compute]:
            weights[other] = (
                EXCLUDED_WEIGHT if weights[other] == EXCLUDED_WEIGHT else weigh_candidate(candidates[other])
            )
        if group is not None and group.strict:
            for other, contender in enumerate(candidates):
                weights[other] = weights[other] if group.can_admit(contender.compute, counts) else EXCLUDED_WEIGHT
    return distributed


def add_usage(allocations: Allocations, rooms: dict[str, dict[str, Room]]) -> bool:
    """Add the allocations to the usage in `rooms`, return True; if one does not fit, add nothing, return False.

    Ignores what has no Room.
    """
    usages = [
        (room, name, amount)
        for provider, resources in allocations.items()
        for name, amount in resources.items()
        if name in (room := rooms.get(provider, {}))
    ]
    if any(room[name].used + amount > room[name].capacity for room, name, amount in usages):
        return False
    for room, name, amount in usages:
        room[name] = Room(room[name].capacity, room[name].used + amount)
    return True


def describe_room(placed_count: int, count: int, group: Group | None) -> str:
    """Return that there is room for only `placed_count` of `count` instances, in a group if there is one."""
    rule = '' if group is None else f' in group {group.name} ({group.rule})'
    return f'there is room for {placed_count} of {count}{rule}'


def explain_no_candidate(offer: Offer, choice: Choice, alive: Collection[str], group: Group | None) -> str:
    """Return why there is no candidate, in one sentence."""
    if group is not None and any(compute in alive for allocations in offer.candidates for compute in allocations):
        return f'there is room, but not where group {group.name} allows it ({group.rule})'
    if choice.skipped:
        return 'placement offers computes, but none of them is alive'
    if not alive:
        return 'no compute is alive. Fix: start ecompute on a host'
    if any(sum(provider in alive for provider in allocations) > 1 for allocations in offer.candidates):
        problem = 'placement offers only candidates on two computes, one of which shares resources with the other'
        cure = f'remove the trait {SHARING_TRAIT} from the compute that shares'
        return f'{problem}, but a guest runs on one compute. Fix: {cure}'
    if offer.candidates:  # of another cloud, or computes that etcd does not know
        return 'placement offers providers, but none of them is a living compute'
    return 'no compute satisfies the whole query'


def _calculate_weight(compute: str, allocations: Allocations, rooms: Rooms, strategy: str) -> float | None:
    """Return the weight by SPREAD or PACK, from 0 to 1 (the best); None for other strategies, which do not weigh."""
    if strategy not in (SPREAD, PACK):
        return None
    free_share = calculate_free_share(allocations[compute], rooms.get(compute, {}))
    return free_share if strategy == SPREAD else 1 - free_share
