"""What would be chosen, and why, without claiming it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from ecomp.errors import NoCapacity
from ecomp.model.choose import Offer, Room, choose
from ecomp.model.group import Membership
from ecomp.placement.client import Placement
from ecomp.scheduler.hosts import alive
from ecomp.scheduler.joining import settled
from ecomp.scheduler.place import why_none
from ecomp.store.client import Store


@dataclass(frozen=True)
class Ranked:
    """A compute that would be tried. `asked` is what it would give, `rooms` what it has, both by class.

    `weight` is None where there is no reason to prefer any.
    """

    compute: str
    hostname: str | None
    weight: float | None
    asked: Mapping[str, int]
    rooms: Mapping[str, Room]


def plan(
    store: Store,
    backend: Future[tuple[Placement, Offer]],
    weigh: str,
    wanted: Membership | None,
    rng: random.Random,
) -> list[Ranked]:
    """The computes in the order in which they would be tried. Errors: NoCapacity; UsageError, Conflict of the group."""
    group = settled(store, wanted)
    there = alive(store)
    _, offer = backend.result()
    choice = choose(offer, there, weigh, rng, group)
    if not choice.tries:
        raise NoCapacity(why_none(offer, choice, there, group))
    return [
        Ranked(compute, there[compute], weight, allocations[compute], offer.rooms.get(compute, {}))
        for compute, allocations, weight in choice.tries
    ]
