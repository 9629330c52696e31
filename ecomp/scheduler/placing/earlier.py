"""What an earlier eschedule of the same uuid claimed and left: it may be all the room there is."""

from __future__ import annotations

from collections.abc import Collection

from ecomp.model.allocation import Allocations, total
from ecomp.model.choose import Candidate
from ecomp.model.group import Group
from ecomp.model.query import Amount, Unexplained, enabled_only, parse
from ecomp.model.set_order import SetOrder
from ecomp.placement import allocations, room
from ecomp.placement.client import Placement


def left_behind(
    placement: Placement, wanted: SetOrder, alive: Collection[str], group: Group | None
) -> dict[str, Candidate]:
    """What the instances hold, where that is on a living compute and just what the query asks for.

    Placement does not offer it: it is taken. What is held for another query, or for one that cannot be taken apart
    here, is not in it. Errors: those of placement.
    """
    held = {instance: allocations.consumer(placement, instance).allocations for instance in wanted.instances}
    if not any(held.values()):
        return {}
    try:
        asked = parse(enabled_only(wanted.query or ''))
    except Unexplained:
        return {}
    amounts = {each.name: each.amount for each in asked if isinstance(each, Amount)}
    rest = [each for each in asked if not isinstance(each, Amount)]
    fitting = set(alive).intersection(*(room.holding(placement, each) for each in rest))
    found = {}
    for instance, there in held.items():
        compute = _compute(there, alive)
        if compute in fitting and total(there) == amounts and (group is None or group.excludes(compute) is None):
            found[instance] = Candidate(compute, there, None)
    return found


def _compute(held: Allocations, alive: Collection[str]) -> str:
    """The one compute that an allocation is on; '' where there is none that lives, or more than one."""
    computes = [provider for provider in held if provider in alive]
    return computes[0] if len(computes) == 1 else ''
