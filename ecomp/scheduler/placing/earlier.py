"""The claims that earlier attempts of the same uuid left: each instance stays on the compute that its claim is on."""

from __future__ import annotations

from collections.abc import Collection

from ecomp.model.allocation import compute_of, total
from ecomp.model.choose import Candidate
from ecomp.model.group import Group
from ecomp.model.query import Amount, Unexplained, enabled_only, parse
from ecomp.model.set_order import SetOrder
from ecomp.placement import allocations, room
from ecomp.placement.client import Placement


def earlier_claims(
    placement: Placement, wanted: SetOrder, alive: Collection[str], group: Group | None
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Read what the instances hold, and find which claims can be taken over as they are (rule 13).

    Returns:
        {instance: its claim}, and {instance: compute} of those whose claim stays as it is: the compute is silent or not
        for this group, or the claim is for something else, or the query cannot be taken apart here.
    """
    held = {instance: allocations.consumer(placement, instance).allocations for instance in wanted.instances}
    on = {instance: compute for instance, there in held.items() if (compute := compute_of(there))}
    try:
        asked = parse(enabled_only(wanted.query or '')) if on else []
    except Unexplained:
        return {}, on
    amounts = {each.name: each.amount for each in asked if isinstance(each, Amount)}
    rest = [each for each in asked if not isinstance(each, Amount)]
    fitting = set(alive).intersection(*(room.holding(placement, each) for each in rest))
    found = {
        instance: Candidate(compute, held[instance], None)
        for instance, compute in on.items()
        if compute in fitting and total(held[instance]) == amounts
        if group is None or group.excludes(compute) is None
    }
    return found, {instance: compute for instance, compute in on.items() if instance not in found}
