"""Which candidate to claim first, and which not at all. Pure."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ecomp.model.allocation import LARGEST, Allocations, Resources, Room, Rooms, is_amount
from ecomp.model.group import AFFINITY, Group

SPREAD, PACK, RANDOM, FIRST = 'spread', 'pack', 'random', 'first'
WEIGHS = (SPREAD, PACK, RANDOM, FIRST)
"""Ways to order candidates: the emptiest first, the fullest that has room first, by chance, or as placement does."""

GONE = (-math.inf, 0.0)
"""Weighs less than any: what has no room any more, or is not for this group."""

QUEUE = 'queue'
"""Written in place of a way where no order was made: a compute took the request from a queue."""


class Offer(NamedTuple):
    """Placement's answer to a query: the candidates, and the room of the providers in them.

    `asked` is when placement was asked, in seconds of this process's monotonic clock: nothing in the answer is newer.
    """

    candidates: Sequence[Allocations]
    rooms: Rooms = {}
    asked: float = -math.inf


class Candidate(NamedTuple):
    """A candidate on one compute. The one with the largest `weight` is tried first; None: it was not weighed."""

    compute: str
    allocations: Allocations
    weight: float | None


class Why(NamedTuple):
    """Why an instance is on its compute: how candidates were weighed, its own weight, and of how many it is."""

    weigh: str
    weight: float | None
    of: int


def why_from(data: Any) -> Why | None:
    """The Why in a request or a record, {"weigh", "weight", "of"}; None for other data, as nothing depends on it."""
    if not isinstance(data, dict):
        return None
    weigh, weight, of = (data.get(name) for name in Why._fields)
    if not isinstance(weigh, str) or not is_amount(of, LARGEST) or not of:
        return None
    # Of NaN neither holds.
    if weight is not None and (type(weight) not in (int, float) or not -LARGEST <= weight <= LARGEST):
        return None
    return Why(weigh[:40], weight, int(of))


class Choice(NamedTuple):
    """The candidates in the order they are tried, and the providers of those that are not."""

    tries: Sequence[Candidate]
    skipped: Sequence[str]


def choose(offer: Offer, alive: Iterable[str], weigh: str, rng: random.Random, group: Group | None = None) -> Choice:
    """The candidates whose compute is in `alive` and allowed by the group: those it prefers first, then the heaviest.

    Equal ones are shuffled, for racing schedulers must not all want the same one. A candidate may name several
    providers (shared storage). One with no compute in `alive`, or with two, is left out: no compute would get the
    request.
    """
    living = set(alive)
    tries: list[Candidate] = []
    skipped: set[str] = set()
    for allocations in offer.candidates:
        computes = [provider for provider in allocations if provider in living]
        if len(computes) == 1:
            tries.append(Candidate(computes[0], allocations, _weight(computes[0], allocations, offer.rooms, weigh)))
        else:
            skipped.update(allocations)
    if weigh != FIRST:
        rng.shuffle(tries)
        tries.sort(key=lambda each: -(each.weight or 0))
    wanted = {each.compute for each in tries}
    skipped -= wanted | living
    if group is not None:
        tries = [each for each in tries if group.excludes(each.compute) is None]
        tries.sort(key=lambda each: -group.preference(each.compute))
    return Choice(tries, sorted(skipped))


def share_left(asked: Resources, room: Mapping[str, Room]) -> float:
    """The share from 0 to 1 that is free on a compute once it gives what is `asked`, of the class with least.

    Rounded to hundredths, so that computes that differ by less are equal.
    """
    known = [(room[name], amount) for name, amount in asked.items() if name in room and room[name].capacity]
    shares = [1 - (each.used + amount) / each.capacity for each, amount in known]
    return round(max(min(shares, default=0.0), 0.0), 2)


def distribute(
    tries: Sequence[Candidate], rooms: Rooms, count: int, weigh: str, rng: random.Random, group: Group | None = None
) -> list[Candidate]:
    """The candidates that `count` instances take one after the other, fewer where room or the group ends.

    `tries` is in choose()'s order. A class or provider that `rooms` does not have is no limit.
    """
    if group is None or not group.strict or group.policy != AFFINITY or group.on:
        return _distribute(tries, rooms, count, weigh, rng, group)
    # All of them share one compute, which nobody has chosen yet: the first that has room for all, or else for most.
    best: list[Candidate] = []
    for compute in dict.fromkeys(each.compute for each in tries):
        there = [each for each in tries if each.compute == compute]
        found = _distribute(there, rooms, count, weigh, rng, None)
        if len(found) > len(best):
            best = found
        if len(found) == count:
            break
    return best


def _distribute(
    tries: Sequence[Candidate], rooms: Rooms, count: int, weigh: str, rng: random.Random, group: Group | None
) -> list[Candidate]:
    now = {provider: dict(room) for provider, room in rooms.items()}
    on = Counter(group.on if group is not None else ())
    at: dict[str, list[int]] = {}
    for number, candidate in enumerate(tries):
        at.setdefault(candidate.compute, []).append(number)

    def weight(each: Candidate) -> tuple[float, float]:
        preferred = 0 if group is None else group.sign * on[each.compute]
        return preferred, 0.0 if weigh == RANDOM else _weight(each.compute, each.allocations, now, weigh) or 0.0

    weights = [weight(each) for each in tries]
    taken: list[Candidate] = []
    while len(taken) < count:
        best = max(weights, default=GONE)
        if best == GONE:
            break
        # The first of equals, for they come shuffled.
        equals = [number for number, each in enumerate(weights) if each == best] if weigh == RANDOM else []
        number = rng.choice(equals) if equals else weights.index(best)
        candidate = tries[number]
        if not _take(candidate.allocations, now):
            weights[number] = GONE
            continue
        taken.append(candidate)
        on[candidate.compute] += 1
        for other in at[candidate.compute]:
            weights[other] = GONE if weights[other] == GONE else weight(tries[other])
        if group is not None and group.strict:
            for other, each in enumerate(tries):
                weights[other] = weights[other] if group.admits(each.compute, on) else GONE
    return taken


def _take(allocations: Allocations, rooms: dict[str, dict[str, Room]]) -> bool:
    """Count the allocations as used in `rooms`; False, and nothing counted, if they do not fit."""
    wanted = [
        (room, name, amount)
        for provider, asked in allocations.items()
        for name, amount in asked.items()
        if name in (room := rooms.get(provider, {}))
    ]
    if any(room[name].used + amount > room[name].capacity for room, name, amount in wanted):
        return False
    for room, name, amount in wanted:
        room[name] = Room(room[name].capacity, room[name].used + amount)
    return True


def _weight(compute: str, allocations: Allocations, rooms: Rooms, weigh: str) -> float | None:
    left = share_left(allocations[compute], rooms.get(compute, {}))
    return {SPREAD: left, PACK: 1 - left}.get(weigh)
