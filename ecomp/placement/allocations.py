"""Candidates, claims and releases. A consumer is an instance, under the same uuid.

https://docs.openstack.org/api-ref/placement/#allocation-candidates and #allocations
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ecomp.errors import GenerationConflict, PlacementRefusal
from ecomp.model.allocation import Allocations, parse_allocations, to_wire
from ecomp.placement.client import Placement

CONSUMER_TYPE = 'INSTANCE'


@dataclass(frozen=True)
class Consumer:
    """What placement says of one consumer. No allocations: placement does not know it (generation None)."""

    allocations: Allocations = field(default_factory=dict)
    generation: int | None = None
    user_id: str = ''
    project_id: str = ''


def candidates(placement: Placement, query: str) -> list[Allocations]:
    """Who could give what the query asks for: one {provider: {class: amount}} a possibility.

    The query is handed on as it is. PlacementRefusal with placement's words if it is malformed.
    """
    if any(character < ' ' or character == '\x7f' for character in query):
        raise PlacementRefusal('the query has a control character in it')
    # What follows a # is not sent: half of the query would be silently gone.
    data = placement.get('/allocation_candidates?' + query.replace('#', '%23'))
    try:
        return [parse_allocations(each['allocations']) for each in data['allocation_requests']]
    except (KeyError, TypeError, ValueError) as error:
        raise placement.foreign() from error


def consumer(placement: Placement, instance: str) -> Consumer:
    """What an instance holds. A consumer placement does not know answers 200 and holds nothing."""
    data = placement.get(f'/allocations/{instance}')
    try:
        held = data['allocations']
        if not held:
            return Consumer()
        return Consumer(
            parse_allocations(held), data['consumer_generation'], data.get('user_id', ''), data.get('project_id', '')
        )
    except (KeyError, TypeError, ValueError) as error:
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
    _put(placement, instance, allocations, user_id, project_id, generation)


def release(placement: Placement, instance: str, held: Consumer) -> bool:
    """Release what an instance holds, if it is still as read; False if somebody changed it since.

    A PUT of {} with the generation, never a DELETE: that would also remove what somebody else just claimed.
    """
    if not held.allocations:
        return True
    try:
        _put(placement, instance, {}, held.user_id, held.project_id, held.generation)
    except GenerationConflict:
        return False
    return True


def of_provider(placement: Placement, provider: str) -> dict[str, Mapping[str, int]]:
    """What each consumer holds of one provider: {consumer: {class: amount}}."""
    data = placement.get(f'/resource_providers/{provider}/allocations')
    try:
        return {name: dict(each['resources']) for name, each in data['allocations'].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise placement.foreign() from error


def _put(
    placement: Placement, instance: str, allocations: Allocations, user_id: str, project_id: str, generation: int | None
) -> None:
    body = {
        'allocations': to_wire(allocations),
        'user_id': user_id,
        'project_id': project_id,
        'consumer_generation': generation,
        'consumer_type': CONSUMER_TYPE,
    }
    placement.write('PUT', f'/allocations/{instance}', body)
