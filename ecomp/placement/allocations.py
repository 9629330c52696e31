"""Candidates, claims and releases. A consumer is an instance, under the same uuid.

claim() and release() know at each step what placement holds (rules 1, 3 and 11); claim_once() and release_once() are
one call. https://docs.openstack.org/api-ref/placement/#allocation-candidates and #allocations
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any, NamedTuple

from ecomp.errors import (
    ClaimedElsewhere,
    ConsumerConflict,
    EcompError,
    GenerationConflict,
    PlacementRefusal,
    UnknownOutcome,
    Unreachable,
)
from ecomp.model.allocation import Allocations, compute_of, difference, parse_allocations, to_wire
from ecomp.model.choose import Offer
from ecomp.model.query import enabled_only, named
from ecomp.placement.client import WRONG, Placement, text, whole
from ecomp.placement.providers import rooms, unknown_names

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
        strange = '; '.join(filter(None, unknown_names(placement, named(query))))
        raise PlacementRefusal(strange or str(error)) from error
    try:
        found = [parse_allocations(each['allocations']) for each in data['allocation_requests']]
        summaries = data['provider_summaries'].items()
        return Offer(found, {provider: rooms(summary['resources']) for provider, summary in summaries}, asked)
    except WRONG as error:
        raise placement.foreign() from error


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


def claim_once(
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
    body = _body(allocations, user_id, project_id, generation)
    placement.write('PUT', f'/allocations/{instance}', body)


def claim_set_once(
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


def release_once(placement: Placement, instance: str, held: Consumer) -> bool:
    """Release what an instance holds, if it is still as read; False if somebody changed it since.

    A PUT of {} with the generation, never a DELETE: that would also remove what somebody else just claimed.
    """
    if not held.allocations:
        return True
    try:
        claim_once(placement, instance, {}, held.user_id, held.project_id, held.generation)
    except GenerationConflict:
        return False
    return True


def of_provider(placement: Placement, provider: str) -> dict[str, Mapping[str, int]]:
    """What each consumer holds of one provider: {consumer: {class: amount}}."""
    path = f'/resource_providers/{provider}/allocations'
    return placement.take(path, lambda data: dict(parse_allocations(data['allocations'])))


def _body(allocations: Allocations, user_id: str, project_id: str, generation: int | None) -> dict[str, Any]:
    return {
        'allocations': to_wire(allocations),
        'user_id': user_id,
        'project_id': project_id,
        'consumer_generation': generation,
        'consumer_type': CONSUMER_TYPE,
    }


log = logging.getLogger(__name__)

TRIES = 4
"""nova's number for provider conflicts; placement itself has tried ten times before it answers 409."""
EMPTY_SECONDS = 3.0
"""How long a consumer has to hold nothing, and have a generation all the same, to be taken for one that was left so.

Placement makes a consumer in a transaction of its own, before its allocations; killed between the two it leaves one
that nobody sees, and whose generation is 0. Sooner it may be the consumer of a claim that is being made this moment:
that one, refused, would take the consumer away, whatever it holds by then.
"""
EMPTY_PAUSE = 0.25
"""Seconds between two looks at such a consumer."""
TOGETHER = 20
"""Consumers that are read, asked about and released together, at most: so little time passes between the two."""


def claim(
    placement: Placement,
    wanted: Mapping[str, Allocations],
    user_id: str,
    project_id: str,
    check: Callable[[], None],
    above: Callable[[], int] = lambda: 0,
    movable: Container[str] = (),
) -> None:
    """Claim until each instance holds exactly what is wanted for it, with a generation higher than `above` returns.

    An earlier claim for an instance is replaced with the generation it has, so that a late release by its owner gets a
    409. It is never released first: placement forgets a consumer with its last allocation and counts from 1 again, so
    a late release could meet its own number once more. On another compute an earlier claim is replaced only if its
    instance is in `movable`: the attempt made that claim itself. Whoever made any other claim may have built the guest
    there, and that compute's silence does not prove that it did not (rule 13).

    Args:
        check: raises Conflict once the instances do not belong to this attempt any more.
        above: returns, after each claim, the highest generation at which anybody released a claim of these instances;
            0 where nobody else can have claimed.

    Raises:
        ClaimedElsewhere: another attempt's claim is on another compute; nothing is claimed.
        NoCapacity, Unreachable, Conflict: as allocations.claim_once() and `check` raise them.
        GenerationConflict: after several tries. A ConsumerConflict of a set may be about one instance whose consumer
            was left empty; claimed by itself, that instance can be claimed.
    """
    generations: dict[str, int | None] = dict.fromkeys(wanted)
    empty_since, left = math.inf, TRIES
    while True:
        error: EcompError
        try:
            _write(placement, wanted, user_id, project_id, generations)
        except (UnknownOutcome, GenerationConflict) as caught:
            error, left = caught, left - 1
        else:
            moved = {instance: (now or 0) + 1 for instance, now in generations.items()}
            if min(moved.values()) > above():
                return
            generations = dict(moved)
            continue
        if not left and isinstance(error, GenerationConflict):
            raise error
        log.debug('claim for %s: %s', in_short(wanted), error)
        try:
            held = {instance: consumer(placement, instance) for instance in wanted}
        except Unreachable as unread:
            if isinstance(error, GenerationConflict):
                raise
            raise UnknownOutcome(f'{unread}; whether {in_short(wanted)} holds its claim is not known') from unread
        # Asked after the generation was read: whoever takes our place after this look claims after it, too,
        # and one of the two claims finds that the generation has moved.
        check()
        on = {instance: compute_of(each.allocations) for instance, each in held.items() if instance not in movable}
        if elsewhere := {each: on[each] for each in on if on[each] not in ('', compute_of(wanted[each]))}:
            raise ClaimedElsewhere(elsewhere)
        found = {instance: each.generation for instance, each in held.items()}
        if isinstance(error, UnknownOutcome):
            ours = all(_is_ours(held[each], wanted[each], sent) for each, sent in generations.items())
            if ours and min(each.generation or 0 for each in held.values()) > above():
                return
            if not left:
                raise error
        if isinstance(error, ConsumerConflict) and found == generations and None in found.values():
            # Nobody changed it, and yet it is not as it looks: one of them was left empty.
            if len(wanted) > 1:
                raise error
            empty_since = min(empty_since, time.monotonic())
            if time.monotonic() - empty_since < EMPTY_SECONDS:
                left += 1
                time.sleep(EMPTY_PAUSE)
            else:
                generations = dict.fromkeys(wanted, 0)
            continue
        generations = found
        time.sleep(random.uniform(0, 0.1 * left))


def release(
    placement: Placement,
    consumers: Iterable[str],
    wanted: Callable[[Mapping[str, Consumer]], Collection[str]],
    note: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> dict[str, bool | None]:
    """Release what these consumers hold: True for each that holds nothing now, None for those that are wanted.

    False for one that somebody changed meanwhile. This is the order of reading before anything is given away (rule 11):
    the generations first, then `wanted` asks etcd who stands behind these consumers, then they are released with the
    generations read. Whoever comes to stand behind one after that look claims after it, too, and moves its generation.
    `note` writes down the generations of those that are released next (ecomp.store.sharing), so that nobody else's
    claim ever gets these numbers again; it is left out where nobody claims again.
    """
    named, done = list(consumers), dict[str, bool | None]()
    for first in range(0, len(named), TOGETHER):
        held = {each: consumer(placement, each) for each in named[first : first + TOGETHER]}
        holding = {each: found for each, found in held.items() if found.allocations}
        kept = wanted(holding) if holding else ()
        going = {each: found for each, found in holding.items() if each not in kept}
        note({each: found.generation for each, found in going.items() if found.generation is not None})
        for each, found in held.items():
            done[each] = None if each in kept else release_once(placement, each, found)
    return done


def in_short(wanted: Mapping[str, object]) -> str:
    """The instances of a claim in one line: the first, and how many there are in all."""
    first = next(iter(wanted))
    return first if len(wanted) == 1 else f'{first} (of {len(wanted)})'


def _is_ours(held: Consumer, wanted: Allocations, sent: int | None) -> bool:
    """Whether what is held is what we claimed with the generation `sent`, though no answer came.

    Not known where that was None: somebody may have claimed the same, and until the generation has moved once more
    their late release takes it away.
    """
    moved = sent is not None and held.generation == sent + 1
    return moved and difference(wanted, held.allocations) is None


def _write(
    placement: Placement,
    wanted: Mapping[str, Allocations],
    user_id: str,
    project_id: str,
    generations: Mapping[str, int | None],
) -> None:
    if len(wanted) > 1:
        return claim_set_once(placement, wanted, user_id, project_id, generations)
    ((instance, each),) = wanted.items()
    return claim_once(placement, instance, each, user_id, project_id, generations[instance])
