"""What would be chosen, and why, without claiming it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from ecomp.errors import NoCapacity
from ecomp.model.choose import Offer, choose, distribute
from ecomp.model.inventory import Room
from ecomp.model.set_order import SetOrder
from ecomp.placement.client import Placement
from ecomp.scheduler.looking.hosts import computes
from ecomp.scheduler.placing.joining import terms_of
from ecomp.scheduler.placing.place import goal, too_few, why_none
from ecomp.store.client import Store


@dataclass(frozen=True)
class RankedCompute:
    """A compute that would be tried. `asked` is what one would get there, `rooms` what it has, both by class.

    `weight` is None where there is no reason to prefer any; `instances` is how many would be placed there.
    """

    compute: str
    hostname: str | None
    weight: float | None
    asked: Mapping[str, int]
    rooms: Mapping[str, Room]
    instances: int


def plan(
    store: Store, backend: Future[tuple[Placement, Offer]], wanted: SetOrder, rng: random.Random
) -> list[RankedCompute]:
    """The computes in the order in which they would be tried.

    Errors: NoCapacity (TooFew and OverQuota are such); UsageError (no guest can be made of that), and Conflict of the
    group.
    """
    terms = terms_of(store, wanted.group, wanted.project_id, wanted.instances)
    known = computes(store)
    there = known.living
    _, offer = backend.result()
    choice = choose(offer, there, wanted.weigh, rng, terms.group)
    choice = choice._replace(skipped=[each for each in choice.skipped if each in known.remembered])
    count = goal(choice.tries, terms, wanted)
    taken = distribute(choice.tries, offer.rooms, count, wanted.weigh, rng, terms.group)
    if not taken:
        raise NoCapacity(why_none(offer, choice, there, terms.group))
    if len(taken) < wanted.minimum:
        raise too_few(wanted, terms.group, taken)
    return [
        RankedCompute(
            *(each.compute, known.host(each.compute), each.weight, each.allocations[each.compute]),
            offer.rooms.get(each.compute, {}),
            sum(other is each for other in taken),
        )
        for each in choice.tries
    ]
