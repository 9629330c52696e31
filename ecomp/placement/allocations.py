"""Candidates, claims and releases. A consumer is an instance, under the same uuid.

https://docs.openstack.org/api-ref/placement/#allocation-candidates and #allocations
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ecomp.errors import GenerationConflict, PlacementRefusal
from ecomp.model.allocation import Allocations, Room, parse_allocations, to_wire
from ecomp.model.choose import Offer
from ecomp.model.query import enabled_only, named
from ecomp.placement.client import WRONG, Placement, text, whole

CONSUMER_TYPE = 'INSTANCE'


class Consumer(NamedTuple):
    """What placement says of one consumer. No allocations: placement does not know it (generation None)."""

    allocations: Allocations = {}
    generation: int | None = None
    user_id: str = ''
    project_id: str = ''


def candidates(placement: Placement, query: str) -> Offer:
    """Who could give what the query asks for, and is not disabled.

    The query is handed on as it is, but for that. PlacementRefusal if it is malformed, with placement's words, or names
    what placement does not know, with ours.
    """
    if any(character < ' ' or character == '\x7f' for character in query):
        raise PlacementRefusal('the query has a control character in it')
    asked = time.monotonic()
    # What follows a # is not sent: half of the query would be silently gone.
    try:
        data = placement.get('/allocation_candidates?' + enabled_only(query).replace('#', '%23'))
    except PlacementRefusal as error:
        from ecomp.placement.traits import unknown_names

        strange = '; '.join(filter(None, unknown_names(placement, named(query))))
        raise PlacementRefusal(strange or str(error)) from error
    try:
        found = [parse_allocations(each['allocations']) for each in data['allocation_requests']]
        summaries = data['provider_summaries'].items()
        return Offer(found, {provider: rooms(summary['resources']) for provider, summary in summaries}, asked)
    except WRONG as error:
        raise placement.foreign() from error


def rooms(resources: Mapping[str, Mapping[str, object]]) -> dict[str, Room]:
    """What a provider's summary says of each class. One of WRONG if it is none."""
    return {name: Room(whole(each['capacity']), whole(each['used'])) for name, each in resources.items()}


def consumer(placement: Placement, instance: str) -> Consumer:
    """What an instance holds. A consumer placement does not know answers 200 and holds nothing."""
    data = placement.get(f'/allocations/{instance}')
    try:
        held = parse_allocations(data['allocations'])
        if not held:
            return Consumer()
        owner = (text(data.get(each, '')) for each in ('user_id', 'project_id'))
        return Consumer(held, whole(data['consumer_generation']), *owner)
    except WRONG as error:
        raise placement.foreign() from error


def claim(
    placement: Placement,
    instance: str,
    allocations: Allocations,
    user_id: str,
    project_id: str,
    generation: int | None = None,
) -> None:
    """Claim for an instance: all of it or nothing. Generation None: it must hold nothing yet.

    Errors: NoCapacity (somebody was faster), GenerationConflict (the instance holds something already, or
    too many claim there at once), UnknownOutcome.
    """
    _put(placement, instance, _body(allocations, user_id, project_id, generation))


def claim_set(
    placement: Placement,
    wanted: Mapping[str, Allocations],
    user_id: str,
    project_id: str,
    generations: Mapping[str, int | None],
) -> None:
    """Claim for each of these instances: all of it for all of them, or nothing. Errors as of claim(), of any of them.

    Placement's POST costs a third of as many PUTs.
    """
    # By provider: placement locks their rows in this order, and two sets that lock them crosswise are a deadlock to
    # PostgreSQL, which ends one of them with an HTTP 500.
    ordered = sorted(wanted.items(), key=lambda each: sorted(each[1]))
    bodies = {name: _body(each, user_id, project_id, generations.get(name)) for name, each in ordered}
    placement.write('POST', '/allocations', bodies)


def release(placement: Placement, instance: str, held: Consumer) -> bool:
    """Release what an instance holds, if it is still as read; False if somebody changed it since.

    A PUT of {} with the generation, never a DELETE: that would also remove what somebody else just claimed.
    """
    if not held.allocations:
        return True
    try:
        _put(placement, instance, _body({}, held.user_id, held.project_id, held.generation))
    except GenerationConflict:
        return False
    return True


def of_provider(placement: Placement, provider: str) -> dict[str, Mapping[str, int]]:
    """What each consumer holds of one provider: {consumer: {class: amount}}."""
    data = placement.get(f'/resource_providers/{provider}/allocations')
    try:
        return dict(parse_allocations(data['allocations']))
    except WRONG as error:
        raise placement.foreign() from error


def _put(placement: Placement, instance: str, body: dict[str, Any]) -> None:
    placement.write('PUT', f'/allocations/{instance}', body)


def _body(allocations: Allocations, user_id: str, project_id: str, generation: int | None) -> dict[str, Any]:
    return {
        'allocations': to_wire(allocations),
        'user_id': user_id,
        'project_id': project_id,
        'consumer_generation': generation,
        'consumer_type': CONSUMER_TYPE,
    }
