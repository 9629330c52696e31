"""Candidates, claims and releases. A consumer is an instance, under the same uuid.

claim() and release() know at each step what placement holds (rules 1, 3 and 11); claim_once() and release_once() are
single calls. https://docs.openstack.org/api-ref/placement/#allocation-candidates and #allocations
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
    """A consumer in placement; one that holds nothing is unknown there (generation None)."""

    allocations: Allocations = {}
    generation: int | None = None
    user_id: str = ''
    project_id: str = ''


def candidates(placement: Placement, query: str) -> Offer:
    """Return the candidates for a query, without disabled providers.

    Raises PlacementRefusal if the query is malformed, or names a class or trait that placement does not know.
    """
    if any(character < ' ' or character == '\x7f' for character in query):
        raise PlacementRefusal('the query has a control character in it')
    start = time.monotonic()
    # The part after a # would not be sent: half of the query would be silently lost.
    try:
        data = placement.get('/allocation_candidates?' + enabled_only(query).replace('#', '%23'))
    except PlacementRefusal as error:
        unknown = '; '.join(filter(None, unknown_names(placement, named(query))))
        raise PlacementRefusal(unknown or str(error)) from error
    try:
        offers = [parse_allocations(request['allocations']) for request in data['allocation_requests']]
        summaries = data['provider_summaries'].items()
        return Offer(offers, {provider: rooms(summary['resources']) for provider, summary in summaries}, start)
    except WRONG as error:
        raise placement.foreign() from error


def consumer(placement: Placement, instance: str) -> Consumer:
    """Return what an instance holds; placement answers 200 for an unknown consumer, too."""
    data = placement.get(f'/allocations/{instance}')
    try:
        parsed = parse_allocations(data['allocations'])
        if not parsed:
            return Consumer()
        owner = (text(data.get(key, '')) for key in ('user_id', 'project_id'))
        return Consumer(parsed, whole(data['consumer_generation']), *owner)
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
    """Claim for an instance, all or nothing; with generation None it must hold nothing yet.

    Raises NoCapacity (another claim was faster), GenerationConflict (the instance holds something else, or too many
    claims compete for the provider) or UnknownOutcome.
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
    """Claim for several instances, all or nothing, at a third of the cost; see claim_once()."""
    # By provider: placement locks their rows in this order. Two sets that lock them crosswise are a deadlock to
    # PostgreSQL, which ends one of them with an HTTP 500.
    ordered = sorted(wanted.items(), key=lambda each: sorted(each[1]))
    bodies = {name: _body(held, user_id, project_id, generations.get(name)) for name, held in ordered}
    placement.write('POST', '/allocations', bodies)


def release_once(placement: Placement, instance: str, held: Consumer) -> bool:
    """Release what an instance holds if it is still as read; return False if it was changed.

    This is a PUT of {} with the generation, never a DELETE, which would also remove a claim made since.
    """
    if not held.allocations:
        return True
    try:
        claim_once(placement, instance, {}, held.user_id, held.project_id, held.generation)
    except GenerationConflict:
        return False
    return True


def of_provider(placement: Placement, provider: str) -> dict[str, Mapping[str, int]]:
    """Return what each consumer holds of one provider: {consumer: {class: amount}}."""
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

# nova's number for provider conflicts; placement itself tries ten times before it answers 409.
TRIES = 4
# Seconds that a consumer must have a generation and hold nothing to count as left behind. Placement creates a consumer
# in a transaction of its own, before its allocations; if it is killed between the two, an invisible consumer of
# generation 0 remains. Sooner, it may be that of a claim in flight: if that claim is refused, placement deletes the
# consumer, with whatever it then holds.
EMPTY_SECONDS = 3.0
# Seconds between two reads of such a consumer.
EMPTY_PAUSE = 0.25
# Maximum consumers that are read, checked and released together, so that little time passes in between.
TOGETHER = 20


def claim(
    placement: Placement,
    wanted: Mapping[str, Allocations],
    user_id: str,
    project_id: str,
    check: Callable[[], None],
    above: Callable[[], int] = lambda: 0,
    movable: Container[str] = (),
) -> None:
    """Claim until each instance holds what is requested, with a new enough generation.

    `check` raises Conflict once the instances no longer belong to this attempt. `read_min_generation` returns, after
    each claim, the highest generation at which a claim of these instances was released (0 if no other attempt can have
    claimed): the new generation must be above it.

    An earlier claim for an instance is replaced under its generation, so a late release by its owner gets a 409. It is
    never released first: placement forgets a consumer with its last allocation and counts from 1 again, so a late
    release could meet its own number once more. On another compute an earlier claim is replaced only if its instance is
    in `movable_instances`: this attempt made that claim itself. The owner of any other claim may have built the guest
    there, and a silent compute does not prove that it did not (rule 13).

    Raises:
        ClaimedElsewhere: another attempt's claim is on another compute; nothing is claimed.
        NoCapacity, Unreachable, Conflict: from claim_once() and `check`.
        GenerationConflict: after several tries. A ConsumerConflict of a set may be about one instance whose consumer
            was left empty; alone, that instance can be claimed.
    """
    generations: dict[str, int | None] = dict.fromkeys(wanted)
    empty_since, remaining_tries = math.inf, TRIES
    while True:
        error: EcompError
        try:
            _write(placement, wanted, user_id, project_id, generations)
        except (UnknownOutcome, GenerationConflict) as caught:
            error, remaining_tries = caught, remaining_tries - 1
        else:
            new_generations = {instance: (generation or 0) + 1 for instance, generation in generations.items()}
            if min(new_generations.values()) > above():
                return
            generations = dict(new_generations)
            continue
        if not remaining_tries and isinstance(error, GenerationConflict):
            raise error
        log.debug('claim for %s: %s', in_short(wanted), error)
        try:
            consumers = {instance: consumer(placement, instance) for instance in wanted}
        except Unreachable as failure:
            if isinstance(error, GenerationConflict):
                raise
            raise UnknownOutcome(f'{failure}; whether {in_short(wanted)} holds its claim is not known') from failure
        # Checked after the generation was read: an attempt that takes our place after this check also claims after it,
        # and one of the two claims finds that the generation has changed.
        check()
        places = {
            instance: compute_of(held.allocations) for instance, held in consumers.items() if instance not in movable
        }
        if elsewhere := {name: places[name] for name in places if places[name] not in ('', compute_of(wanted[name]))}:
            raise ClaimedElsewhere(elsewhere)
        current = {instance: held.generation for instance, held in consumers.items()}
        if isinstance(error, UnknownOutcome):
            are_ours = all(_is_ours(consumers[name], wanted[name], sent) for name, sent in generations.items())
            if are_ours and min(held.generation or 0 for held in consumers.values()) > above():
                return
            if not remaining_tries:
                raise error
        if isinstance(error, ConsumerConflict) and current == generations and None in current.values():
            # The consumers are unchanged, and still one of them is not as it looks: it was left empty.
            if len(wanted) > 1:
                raise error
            empty_since = min(empty_since, time.monotonic())
            if time.monotonic() - empty_since < EMPTY_SECONDS:
                remaining_tries += 1
                time.sleep(EMPTY_PAUSE)
            else:
                generations = dict.fromkeys(wanted, 0)
            continue
        generations = current
        time.sleep(random.uniform(0, 0.1 * remaining_tries))


def release(
    placement: Placement,
    consumers: Iterable[str],
    wanted: Callable[[Mapping[str, Consumer]], Collection[str]],
    note: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> dict[str, bool | None]:
    """Release what consumers hold; return True for each that holds nothing now.

    None stands for one that is wanted, False for one that was changed concurrently. The order closes the race with new
    claims (rule 11): the generations are read first; then `find_wanted` reads from etcd which consumers are wanted;
    then the others are released under the generations read. A process that wants one after that check also claims after
    it, which changes its generation. `note_generations` records the generations to be released (see
    ecomp.store.sharing), so that no other claim gets these numbers again; omit it if nobody claims again.
    """
    names = list(consumers)
    results = dict[str, bool | None]()
    for start in range(0, len(names), TOGETHER):
        batch = {name: consumer(placement, name) for name in names[start : start + TOGETHER]}
        holding = {name: held for name, held in batch.items() if held.allocations}
        excluded = wanted(holding) if holding else ()
        released = {name: held for name, held in holding.items() if name not in excluded}
        note({name: held.generation for name, held in released.items() if held.generation is not None})
        for name, held in batch.items():
            results[name] = None if name in excluded else release_once(placement, name, held)
    return results


def in_short(wanted: Mapping[str, object]) -> str:
    """Summarize the instances of a claim: the first, and their number."""
    first = next(iter(wanted))
    return first if len(wanted) == 1 else f'{first} (of {len(wanted)})'


def _is_ours(held: Consumer, wanted: Allocations, sent: int | None) -> bool:
    """Return whether a consumer holds what we claimed with `sent_generation`, unanswered.

    False if that was None: another attempt may have claimed the same, and its late release would delete the claim until
    the generation has changed once more.
    """
    is_next = sent is not None and held.generation == sent + 1
    return is_next and difference(wanted, held.allocations) is None


def _write(
    placement: Placement,
    wanted: Mapping[str, Allocations],
    user_id: str,
    project_id: str,
    generations: Mapping[str, int | None],
) -> None:
    if len(wanted) > 1:
        return claim_set_once(placement, wanted, user_id, project_id, generations)
    ((instance, allocations),) = wanted.items()
    return claim_once(placement, instance, allocations, user_id, project_id, generations[instance])
