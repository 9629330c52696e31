"""Candidates, claims and releases of instances, each of which is a consumer under the same uuid.

claim() and release() implement the rules read-back, release-by-generation and order-of-reading.
https://docs.openstack.org/api-ref/placement/#allocation-candidates and #allocations
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ecomp import errors
from ecomp.model.allocation import Allocations, describe_difference, find_compute, parse_allocations, to_wire
from ecomp.model.choose import Offer
from ecomp.model.order import Request
from ecomp.model.query import exclude_disabled, parse_names
from ecomp.placement.client import Placement, check_integer, check_text
from ecomp.placement.providers import find_unknown_names, parse_rooms

CONSUMER_TYPE = 'INSTANCE'
# From so many instances on their claims are read concurrently: a read takes 4 ms, most of them in placement.
MIN_CONCURRENT_READS = 20
MAX_CONCURRENT_READS = 4
log = logging.getLogger(__name__)
# nova's number for provider conflicts; placement itself tries ten times before it answers 409.
MAX_TRIES = 4
# Seconds after which a consumer with a generation that holds nothing counts as left behind. Placement creates it in a
# transaction before its allocations, and if it is killed in between, an invisible consumer of generation 0 remains.
# Sooner, a claim may be in flight: if that is refused, placement deletes the consumer, with anything it then holds.
EMPTY_CONSUMER_SECONDS = 3.0
EMPTY_CONSUMER_PAUSE_SECONDS = 0.25
# Maximum consumers that are read, checked and released together, so that little time passes in between.
MAX_RELEASE_BATCH = 20


class Requester(NamedTuple):
    """The user and the project of a consumer, as placement records them."""

    user_id: str
    project_id: str


class Consumer(NamedTuple):
    """A consumer in placement, whose generation is None if it holds nothing."""

    allocations: Allocations = {}
    generation: int | None = None
    user_id: str = ''
    project_id: str = ''


def read_candidates(placement: Placement, query: str) -> Offer:
    """Return the candidates for a query, which is the text after the `?`.

    Disabled providers are left out, unless the query names their trait.

    Raises:
        PlacementRefusal: the query is invalid, or names a class or trait that placement does not know.
    """
    if any(character < ' ' or character == '\x7f' for character in query):
        raise errors.PlacementRefusal('the query contains a control character')
    start = time.monotonic()
    # The part after a # would not be sent: half of the query would be silently lost.
    path = '/allocation_candidates?' + exclude_disabled(query).replace('#', '%23')

    def parse(data: dict[str, Any]) -> Offer:
        offers = [parse_allocations(request['allocations']) for request in data['allocation_requests']]
        summaries = data['provider_summaries'].items()
        return Offer(offers, {provider: parse_rooms(summary['resources']) for provider, summary in summaries}, start)

    try:
        return placement.get_parsed(path, parse)
    except errors.PlacementRefusal as error:
        unknown = '; '.join(filter(None, find_unknown_names(placement, parse_names(query))))
        raise errors.PlacementRefusal(unknown or str(error)) from error


def read_consumer(placement: Placement, instance: str) -> Consumer:
    """Return what an instance holds, or Consumer() if it holds nothing."""

    def parse(data: dict[str, Any]) -> Consumer:
        parsed = parse_allocations(data['allocations'])
        owner = (check_text(data.get(key, '')) for key in ('user_id', 'project_id'))
        return Consumer(parsed, check_integer(data['consumer_generation']), *owner) if parsed else Consumer()

    return placement.get_parsed(f'/allocations/{instance}', parse)


def read_consumers(placement: Placement, instances: Collection[str]) -> dict[str, Consumer]:
    if len(instances) < MIN_CONCURRENT_READS:
        return {instance: read_consumer(placement, instance) for instance in instances}
    from concurrent.futures import ThreadPoolExecutor  # for large sets

    with ThreadPoolExecutor(MAX_CONCURRENT_READS, 'claims') as threads:
        return dict(zip(instances, threads.map(partial(read_consumer, placement), instances), strict=True))


def replace_allocations(
    placement: Placement, instance: str, new: Allocations, user_id: str, project_id: str, generation: int | None = None
) -> None:
    """Replace what an instance holds with `new`, in one call, all or nothing.

    {} releases everything. `generation` is the consumer's as it was read. None: the instance must hold nothing.

    Raises:
        NoCapacity: another claim was faster.
        GenerationConflict: the consumer has changed, or many claims compete for a provider.
    """
    placement.write('PUT', f'/allocations/{instance}', _make_body(new, user_id, project_id, generation))


def correct_claim(placement: Placement, instance: str, read_request: Callable[[], Request | None]) -> bool:
    """Make an instance's claim equal to its request, and return whether the claim was changed.

    A missing claim is made. Without a request, or if the claim is at other providers, nothing is changed.

    Raises:
        NoCapacity: there is no room for that.
        GenerationConflict: the claim has changed in between.
    """
    held = read_consumer(placement, instance)  # the generation before etcd
    request = read_request()
    if request is None or held.allocations == request.allocations:
        return False
    if held.allocations and held.allocations.keys() != request.allocations.keys():
        return False
    # If this claim lands during a destroy, it is an orphan.
    owner = held.user_id or request.user_id, held.project_id or request.project_id
    replace_allocations(placement, instance, request.allocations, *owner, held.generation)
    return True


def replace_set_allocations(
    placement: Placement, targets: Mapping[str, Allocations], owner: Requester, generations: Mapping[str, int | None]
) -> None:
    """Replace what several instances hold with `targets`, in one call, all or nothing."""
    # By provider: placement locks their rows in this order. Two sets that lock them crosswise are a deadlock to
    # PostgreSQL, which ends one of them with an HTTP 500.
    ordered = sorted(targets.items(), key=lambda each: sorted(each[1]))
    bodies = {name: _make_body(held, *owner, generations.get(name)) for name, held in ordered}
    placement.write('POST', '/allocations', bodies)


def release_once(placement: Placement, instance: str, consumer: Consumer) -> bool:
    """Release what `consumer` holds, if anything, or return False if it has changed since."""
    if not consumer.allocations:
        return True
    try:
        # A PUT of {} with the generation: a DELETE would also remove a newer claim.
        replace_allocations(placement, instance, {}, consumer.user_id, consumer.project_id, consumer.generation)
    except errors.GenerationConflict:
        return False
    return True


def read_provider_allocations(placement: Placement, provider: str) -> dict[str, Mapping[str, int]]:
    path = f'/resource_providers/{provider}/allocations'
    return placement.get_parsed(path, lambda data: dict(parse_allocations(data['allocations'])))


def _make_body(allocations: Allocations, user_id: str, project_id: str, generation: int | None) -> dict[str, Any]:
    wire, owner = to_wire(allocations), {'user_id': user_id, 'project_id': project_id}
    return {'allocations': wire, **owner, 'consumer_generation': generation, 'consumer_type': CONSUMER_TYPE}


def claim(
    placement: Placement,
    targets: Mapping[str, Allocations],
    requester: Requester,
    check: Callable[[], None],
    read_min_generation: Callable[[], int] = lambda: 0,
    movable_instances: Container[str] = (),
) -> None:
    """Claim `targets`, by instance, until each claim has a new enough generation.

    An earlier claim on the same compute is replaced. On another compute, only claims of `movable_instances` are
    replaced, which this attempt made (rule: claim-stays).

    `check` is called after a conflict or a lost answer. It raises Conflict once the instances no longer belong to this
    attempt. `read_min_generation` is called after each claim. It returns the highest generation at which a claim of
    these instances was released, or 0 if no other attempt can have claimed. The claim is repeated until its generation
    is higher. If `read_min_generation` raises, the claim stays.

    Raises:
        ClaimedElsewhere: another attempt's claim is on another compute. Nothing is claimed.
        NoCapacity: another claim was faster.
        GenerationConflict: MAX_TRIES were not enough.
        ConsumerConflict: the same, or the consumer of one of a set may have been left empty. Alone it can be claimed.
        UnknownOutcome: the last of MAX_TRIES had no answer, or one had none and the consumers cannot be read.
    """
    progress = _ClaimProgress(placement, targets, requester)
    while True:
        error = progress.try_write()
        if error is None:
            if progress.lowest_generation > read_min_generation():
                return
            continue
        if not progress.remaining_tries and isinstance(error, errors.GenerationConflict):
            raise error
        log.debug('claim for %s: %s', summarize_instances(targets), error)
        consumers = progress.read_consumers(error)
        # Checked after the generation was read: an attempt that takes our place after this check also claims after it,
        # and one of the two claims finds that the generation has changed.
        check()
        elsewhere = _find_elsewhere(consumers, targets, movable_instances)
        if elsewhere:
            raise errors.ClaimedElsewhere(elsewhere)
        if isinstance(error, errors.UnknownOutcome):
            if progress.is_written(consumers) and progress.lowest_generation + 1 > read_min_generation():
                return
            if not progress.remaining_tries:
                raise error
        progress.prepare_next(consumers, error)


class _ClaimProgress:
    """The state of a claim between its tries."""

    def __init__(self, placement: Placement, targets: Mapping[str, Allocations], requester: Requester) -> None:
        self._placement, self._targets, self._requester = placement, targets, requester
        self._generations: dict[str, int | None] = dict.fromkeys(targets)
        self._empty_since = math.inf
        self.remaining_tries = MAX_TRIES

    @property
    def lowest_generation(self) -> int:
        return min(generation or 0 for generation in self._generations.values())

    def try_write(self) -> errors.UnknownOutcome | errors.GenerationConflict | None:
        try:
            if len(self._targets) > 1:
                replace_set_allocations(self._placement, self._targets, self._requester, self._generations)
            else:
                ((instance, allocations),) = self._targets.items()
                generation = self._generations[instance]
                replace_allocations(self._placement, instance, allocations, *self._requester, generation)
        except (errors.UnknownOutcome, errors.GenerationConflict) as error:
            self.remaining_tries -= 1
            return error
        self._generations = {instance: (held or 0) + 1 for instance, held in self._generations.items()}
        return None

    def read_consumers(self, error: Exception) -> dict[str, Consumer]:
        """Read the consumers, or raise UnknownOutcome if that fails and `error` was no conflict."""
        try:
            return {instance: read_consumer(self._placement, instance) for instance in self._targets}
        except errors.Unreachable as failure:
            if isinstance(error, errors.GenerationConflict):
                raise
            doubt = f'; it is unknown whether {summarize_instances(self._targets)} holds its claim'
            raise errors.UnknownOutcome(errors.put_before_fix(str(failure), doubt)) from failure

    def is_written(self, consumers: Mapping[str, Consumer]) -> bool:
        sent = self._generations
        return all(_is_own_claim(consumers[name], self._targets[name], sent[name]) for name in sent)

    def prepare_next(self, consumers: Mapping[str, Consumer], error: Exception) -> None:
        """Choose the next generations and wait, or raise `error` for a set with an empty consumer."""
        current = {instance: held.generation for instance, held in consumers.items()}
        if isinstance(error, errors.ConsumerConflict) and current == self._generations and None in current.values():
            # The consumers are unchanged, and still one of them is not as it looks: it was left empty.
            if len(self._targets) > 1:
                raise error
            self._empty_since = min(self._empty_since, time.monotonic())
            if time.monotonic() - self._empty_since < EMPTY_CONSUMER_SECONDS:
                self.remaining_tries += 1
                time.sleep(EMPTY_CONSUMER_PAUSE_SECONDS)
            else:
                self._generations = dict.fromkeys(self._targets, 0)
            return
        # An earlier claim is replaced under its generation, so a late release by its owner gets a 409.
        self._generations = current
        time.sleep(random.uniform(0, 0.1 * self.remaining_tries))


def _find_elsewhere(
    consumers: Mapping[str, Consumer], targets: Mapping[str, Allocations], movable: Container[str]
) -> dict[str, str]:
    places = {name: find_compute(held.allocations) for name, held in consumers.items() if name not in movable}
    return {name: place for name, place in places.items() if place not in ('', find_compute(targets[name]))}


def release(
    placement: Placement,
    consumers: Iterable[str],
    find_kept: Callable[[Mapping[str, Allocations]], Collection[str]],
    note_generations: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> dict[str, bool | None]:
    """Release what consumers hold, except those that `find_kept` returns.

    `find_kept` gets what the consumers hold, after their generations were read. `note_generations` then gets the
    generations of the others, so that no claim uses them again (see ecomp.shared.notes). It is needed only if a process
    may claim again. The first error is raised, and leaves some of the consumers released.

    Returns:
        {consumer: True if it holds nothing now, None if it was kept, False if it has changed}.
    """
    names = list(consumers)
    results = dict[str, bool | None]()
    for start in range(0, len(names), MAX_RELEASE_BATCH):
        batch = {name: read_consumer(placement, name) for name in names[start : start + MAX_RELEASE_BATCH]}
        holding = {name: held for name, held in batch.items() if held.allocations}
        # After the generations are read (rule: order-of-reading): a process that wants a consumer after this read of
        # etcd also claims after it, which changes the consumer's generation.
        excluded = find_kept({name: held.allocations for name, held in holding.items()}) if holding else ()
        released = {name: held for name, held in holding.items() if name not in excluded}
        note_generations({name: held.generation for name, held in released.items() if held.generation is not None})
        for name, held in batch.items():
            results[name] = None if name in excluded else release_once(placement, name, held)
    return results


def summarize_instances(instances: Mapping[str, object]) -> str:
    """Return the only instance, or the first one with ` (of N)`."""
    first = next(iter(instances))
    return first if len(instances) == 1 else f'{first} (of {len(instances)})'


def _is_own_claim(consumer: Consumer, target: Allocations, sent_generation: int | None) -> bool:
    # None: another attempt may have made the same claim, and release it late. Repeating ours changes the generation.
    is_next = sent_generation is not None and consumer.generation == sent_generation + 1
    return is_next and describe_difference(target, consumer.allocations) is None
