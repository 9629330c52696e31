"""Read what a plan of moves needs: the guests of computes, their groups, and placement's answers to their queries."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from ecomp.errors import PlacementRefusal, Unreadable
from ecomp.model import keys
from ecomp.model.choose import Offer
from ecomp.model.moves import Guest, MovePlanner
from ecomp.model.order import InvalidRequest, parse_request
from ecomp.model.query import list_trees
from ecomp.placement.allocations import read_candidates
from ecomp.placement.client import Placement
from ecomp.store.client import Entry, Store
from ecomp.store.sharing import load_groups


def read_moves(
    store: Store, placement: Placement, alive: Collection[str], computes: Sequence[str] | None = None
) -> tuple[Mapping[str, Sequence[Guest]], MovePlanner]:
    """Read the guests of these computes (None: of all), by compute, and make the planner for all of them.

    Placement is asked once for each query. Guests in error or gone have no request. Raises Unreadable for a malformed
    group, and errors of the backends.
    """
    guests: dict[str, list[Guest]] = {}

    def collect(entry: Entry) -> None:  # returns None, so no entry is kept
        compute, _, instance = entry.key.removeprefix(keys.HOSTS).partition('/')
        if keys.is_uuid(instance):
            request = parse_request(compute, entry.key, entry.value, entry.dropped)
            if isinstance(request, InvalidRequest) or not request.is_tombstone:
                guests.setdefault(compute, []).append(Guest(compute, request))

    for prefix in [keys.HOSTS] if computes is None else map(keys.request_prefix, computes):
        store.snapshot(prefix, transform=collect)
    valid = [
        (compute, guest.request) for compute, of_compute in guests.items() for guest in of_compute
        if not isinstance(guest.request, InvalidRequest)
    ]  # fmt: skip
    groups, malformed = load_groups(store, {request.group.name for _, request in valid if request.group})
    if malformed:
        raise Unreadable(keys.group(min(malformed)), ValueError('it is not a valid group'))
    offers, refusals = dict[str, Offer](), dict[str, str]()
    for query in {request.query: None for compute, request in valid if compute not in list_trees(request.query or '')}:
        try:
            offers |= {query: read_candidates(placement, query)} if query else {}
        except PlacementRefusal as error:
            refusals[query or ''] = str(error)
    # The same random choices each time, so that an unchanged cluster gives the same plan.
    return guests, MovePlanner(offers, refusals, groups, alive, random.Random(0))
