"""Candidates, claims and releases. A consumer is an instance, under the same uuid.

https://docs.openstack.org/api-ref/placement/#allocation-candidates and #allocations
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ecomp.errors import GenerationConflict, PlacementRefusal
from ecomp.model.allocation import Allocations, parse_allocations, to_wire
from ecomp.model.choose import Offer, Room
from ecomp.model.query import enabled_only
from ecomp.placement.answers import WRONG, text, whole
from ecomp.placement.client import Placement

CONSUMER_TYPE = 'INSTANCE'
TOGETHER = 20
"""Consumers that are read, asked about and released together, at most: so little time passes between the two."""


@dataclass(frozen=True)
class Consumer:
    """What placement says of one consumer. No allocations: placement does not know it (generation None)."""

    allocations: Allocations = field(default_factory=dict)
    generation: int | None = None
    user_id: str = ''
    project_id: str = ''


def candidates(placement: Placement, query: str) -> Offer:
    """Who could give what the query asks for, and is not disabled.

    The query is handed on as it is, but for that. PlacementRefusal with placement's words if it is malformed.
    """
    if any(character < ' ' or character == '\x7f' for character in query):
        raise PlacementRefusal('the query has a control character in it')
    asked = time.monotonic()
    # What follows a # is not sent: half of the query would be silently gone.
    data = placement.get('/allocation_candidates?' + enabled_only(query).replace('#', '%23'))
    try:
        found = [parse_allocations(each['allocations']) for each in data['allocation_requests']]
        summaries = data['provider_summaries'].items()
        return Offer(found, {provider: _rooms(summary['resources']) for provider, summary in summaries}, asked)
    except WRONG as error:
        raise placement.foreign() from error


def _rooms(resources: Mapping[str, Mapping[str, object]]) -> dict[str, Room]:
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


def release_unless(
    placement: Placement,
    consumers: Iterable[str],
    wanted: Callable[[Mapping[str, Consumer]], Collection[str]],
    note: Callable[[Mapping[str, int]], None],
) -> dict[str, bool]:
    """Release what these consumers hold, but for those that are wanted: {consumer: it holds nothing any more}.

    This is the order of reading before anything is given away (rule 11): the generations first, then `wanted` asks
    etcd who stands behind these consumers, then they are released with the generations read. Whoever comes to stand
    behind one after that look claims after it, too, and moves its generation. `note` writes down the generations of
    those that are released next (ecomp.store.released): nobody else's claim ever gets these numbers again.
    """
    named, done = list(consumers), dict[str, bool]()
    for first in range(0, len(named), TOGETHER):
        held = {each: consumer(placement, each) for each in named[first : first + TOGETHER]}
        holding = {each: found for each, found in held.items() if found.allocations}
        kept = wanted(holding) if holding else ()
        going = {each: found for each, found in holding.items() if each not in kept}
        note({each: found.generation for each, found in going.items() if found.generation is not None})
        for each in held:
            done[each] = each not in holding or (each in going and release(placement, each, going[each]))
    return done


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
