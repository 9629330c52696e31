"""Plan where the guests of dead hosts would go, as the scheduler would place them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ecomp.model.assign import Lot, Planner
from ecomp.model.choose import SPREAD, STRATEGIES, Candidate
from ecomp.model.order import InvalidRequest, Request
from ecomp.model.query import list_trees, read_limit


class Evacuee(NamedTuple):
    """A guest on a compute: its request, which is no tombstone."""

    compute: str
    request: Request | InvalidRequest


class Move(NamedTuple):
    """The new place of a guest. If `candidate` is None, `reason` says why; if not `is_known`, there may be a place."""

    guest: Evacuee
    candidate: Candidate | None
    reason: str = ''
    is_known: bool = True


def plan_moves(
    planner: Planner,
    guests: Iterable[Evacuee],
    dead: Collection[str],
    ahead: int | None = None,
) -> list[Move]:
    """Return where each guest would go if these computes, with all guests on them, were dead.

    Of a group that has to be on one compute all guests move, or none. Quotas do not matter: they count a guest wherever
    it is. A query that list_trees() restricts to a dead compute needs no offer. `ahead`: see Planner.assign().
    """
    moves, of_lots, by_instance = list[Move](), dict[Lot, list[str]](), dict[str, Evacuee]()
    for guest in guests:
        request = guest.request
        if isinstance(request, InvalidRequest) or not request.query:
            reason = request.reason if isinstance(request, InvalidRequest) else 'its request has no query'
            moves.append(Move(guest, None, f'not known: {reason}', is_known=False))
        elif refusal := _refuse(planner, request.query, dead):
            moves.append(Move(guest, None, *refusal))
        else:
            by_instance[request.instance] = guest
            # A compute that took a request from a queue did not weigh.
            weigh = request.why.weigh if request.why and request.why.weigh in STRATEGIES else SPREAD
            of_lots.setdefault(Lot(request.query, request.group, weigh, ()), []).append(request.instance)
    lots = list[Lot]()
    for lot, instances in of_lots.items():
        group = planner.get_group(lot.membership, dead) if lot.membership else None
        if group is None or not group.is_undecided:
            lots.append(lot._replace(instances=tuple(instances), minimum=0))
            continue
        members = planner.groups[group.name].members if group.name in planner.groups else {}
        staying = [each for each, compute in members.items() if compute in dead and each not in by_instance]
        if staying:
            reason = f'group {group.name} has to stay together, and its member {staying[0]} does not move'
            moves += [Move(by_instance[each], None, reason) for each in instances]
        else:
            lots.append(lot._replace(instances=tuple(instances)))
    assignment = planner.assign(lots, dead=dead, ahead=ahead)
    for instance in (each for lot in lots for each in lot.instances):
        candidate = assignment.chosen.get(instance)
        moves.append(Move(by_instance[instance], candidate, assignment.missing.get(instance, '')))
    return moves


def _refuse(planner: Planner, query: str, dead: Collection[str]) -> tuple[str, bool] | None:
    """Return why a query cannot be placed at all, and whether that is known; None if it may be."""
    if trees := set(dead).intersection(list_trees(query)):
        return f'its query allows only {min(trees)} (in_tree=, or --on)', True
    if query in planner.refusals:
        return planner.refusals[query], True
    limit = read_limit(query) if 'limit' in query else None
    if limit and len(planner.offers[query].candidates) >= int(limit):
        return f'not known: limit={limit} in its query hides candidates', False
    return None
