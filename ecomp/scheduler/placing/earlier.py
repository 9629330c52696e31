"""The claims that earlier attempts of the same uuid left: each instance stays on the compute that its claim is on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ecomp.model.allocation import compute_of, total
from ecomp.model.choose import Candidate
from ecomp.model.group import Group
from ecomp.model.query import Amount, Unexplained, enabled_only, parse
from ecomp.model.set_order import SetOrder
from ecomp.placement import allocations, room
from ecomp.placement.client import Placement


def earlier_claims(
    placement: Placement,
    wanted: SetOrder,
    offered: Sequence[Candidate],
    alive: Collection[str],
    group: Group | None,
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Read what the instances hold, and find what each can be placed by without leaving its compute (rule 13).

    Args:
        offered: what placement offers on living computes that the group allows. A claim that is just what the query
            asks for is not among it, for its room is taken.

    Returns:
        {instance: what to claim on its compute}, and {instance: compute} of those that cannot be placed there now:
        the compute is silent, or has no room for what is wanted beside the claim.
    """
    held = {instance: allocations.consumer(placement, instance).allocations for instance in wanted.instances}
    held = {instance: there for instance, there in held.items() if compute_of(there)}
    if not held:
        return {}, {}
    fitting, amounts = set(alive), {}
    try:
        asked = parse(enabled_only(wanted.query or ''))
    except Unexplained:  # then a claim is taken over only where placement offers as much once more
        fitting = set()
    else:
        amounts = {each.name: each.amount for each in asked if isinstance(each, Amount)}
        rest = [each for each in asked if not isinstance(each, Amount)]
        fitting = fitting.intersection(*(room.holding(placement, each) for each in rest))
    found: dict[str, Candidate] = {}
    blocked: dict[str, str] = {}
    for instance, there in held.items():
        compute = compute_of(there)
        other = next((each for each in offered if each.compute == compute), None)
        if compute in fitting and total(there) == amounts and (group is None or group.excludes(compute) is None):
            found[instance] = Candidate(compute, there, None)
        elif other is not None:
            found[instance] = other
        else:
            blocked[instance] = compute
    return found, blocked
