"""Deliver requests for a placement query to computes: for one instance, or for a set.

1 announce the attempt, a key below /requests on a lease; 2 query; 3 claim; 4 deliver in a transaction that deletes the
attempt. After a kill the computes undo the rest (rule: orphaned-claim). What an earlier attempt claimed stays there.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ecomp.errors import ClaimedElsewhere, Conflict, EcompError, NoCapacity, UnknownOutcome, Unreachable, put_before_fix
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import find_compute, sum_allocations
from ecomp.model.choose import Candidate, Offer, PlacementReason
from ecomp.model.group import Group, Membership
from ecomp.model.order import Order, Request, SetOrder, check_order_size, describe_difference, make_member_uuid
from ecomp.model.query import Amount, UnsupportedQueryError, exclude_disabled, parse_query
from ecomp.model.record import ERROR, GONE
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import Claimer, DeliveryOutcome, Terms, abandon, announce, deliver, read_terms
from ecomp.scheduler.placing.place import Placer, SampledPlacer
from ecomp.scheduler.queries.find import MAX_OFFER_AGE_SECONDS, InstanceEntries, find, reserve_names
from ecomp.store.client import Store, Unchanged, count_placements_before_and_after
from ecomp.store.sharing import (
    Change,
    Excluded,
    charge_quota,
    join_group,
    merge_changes,
    read_highest_released,
    read_index,
    try_revoke,
)

if TYPE_CHECKING:
    from ecomp.model.host import Computes


def _find_delivered(store: Store, order: SetOrder, resume: bool) -> dict[str, DeliveryOutcome]:
    """Return {instance: outcome} of deliveries under this uuid; {} without `resume`.

    Conflict if it is a set's uuid instead of an instance's or vice versa, an instance is queued, or as check_same().
    """
    if not resume:  # the uuid was generated here
        return {}
    # All keys are listed once: searching for each instance of a set among thousands of computes takes too long.
    # The queues first: an instance that moves to a compute in between is found there.
    queued = {keys.get_queued_instance(key) for key in store.snapshot(keys.QUEUES, keys_only=True).entries}
    key_index = read_index(store)

    def is_listed(instance: str) -> bool:
        return instance in queued or instance in key_index.requests or instance in key_index.records

    # One uuid cannot be an instance's and a set's.
    other_uuid = order.instance if order.count > 1 else make_member_uuid(order.instance, 1)
    if is_listed(other_uuid) and find(store, other_uuid, key_index) is not None:
        raise Conflict(f'{order.instance}: is the uuid of {"an instance" if order.count > 1 else "a set"}')
    entries = {instance: find(store, instance, key_index) for instance in order.instances if is_listed(instance)}
    return {
        instance: _check_delivered(existing, order.orders[instance])
        for instance, existing in entries.items()
        if existing is not None
    }


def _check_delivered(entries: InstanceEntries, order: Order) -> DeliveryOutcome:
    """Return the earlier delivery; Conflict if the instance is queued, or as check_same()."""
    if entries.queue_entry is not None:
        raise Conflict(f'{order.instance}: exists, and waits in a queue. Fix: use another uuid')
    check_same(entries, order)
    return DeliveryOutcome(entries.record.compute, is_repeated=True)


REUSED_UUID = 'a uuid is never used twice. Fix: use another uuid'


def check_same(entries: InstanceEntries, order: Order) -> None:
    """Raise Conflict unless the instance lives (not gone, failed or being destroyed) and was ordered alike."""
    record, instance = entries.record, entries.record.instance
    if record.state == GONE:
        raise Conflict(f'{instance}: has been gone since {record.stages.get("gone")}: {REUSED_UUID}')
    if record.state == ERROR:
        raise Conflict(f'{instance}: is in error. Fix: destroy the instance, then use another uuid')
    if entries.is_destroying:
        raise Conflict(f'{instance}: is being destroyed: {REUSED_UUID}')
    existing = entries.order
    mismatch = describe_difference(existing or record, order, is_recorded=existing is None)
    if mismatch is not None:
        raise Conflict(f'{instance}: exists, but was requested {mismatch}')


def read_earlier_claims(
    placement: Placement, instances: Collection[str], query: str, alive: Collection[str], group: Group | None
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Read earlier claims: {instance: candidate} of those to take over, {instance: compute} of all others.

    Others: on a silent compute or one that group or query exclude, with other amounts, or if the query is unparsable.
    """
    held = allocations.read_consumers(placement, instances)
    claimed_on = {each: compute for each, consumer in held.items() if (compute := find_compute(consumer.allocations))}
    try:
        constraints = parse_query(exclude_disabled(query)) if claimed_on else []
    except UnsupportedQueryError:
        return {}, claimed_on
    amounts = {constraint.name: constraint.amount for constraint in constraints if isinstance(constraint, Amount)}
    others = [constraint for constraint in constraints if not isinstance(constraint, Amount)]
    fitting = set(alive).intersection(*(providers.find_satisfying(placement, constraint) for constraint in others))
    usable = {
        instance: Candidate(compute, held[instance].allocations, None)
        for instance, compute in claimed_on.items()
        if compute in fitting and sum_allocations(held[instance].allocations) == amounts
        if group is None or group.explain_exclusion(compute) is None
    }
    return usable, {instance: compute for instance, compute in claimed_on.items() if instance not in usable}


log = logging.getLogger(__name__)

# The outcome of a failed request, in messages.
UNCHANGED = 'nothing was changed'
UNDONE = 'nothing was placed, and the claim is released'


def create(  # noqa: PLR0913
    store: Store,
    backend: Future[tuple[Placement, Offer]],
    order: SetOrder,
    owner: Mapping[str, object],
    resume: bool,
    rng: random.Random,
    now: Callable[[], str],
    sample_above: int | None = None,
    on_cluster_size: Callable[[int], None] = lambda _: None,
) -> dict[str, DeliveryOutcome]:
    """Place the instances of an order; return {instance: outcome} of those that are placed.

    `backend` brings placement and the candidates. In a cluster of more than `sample_above` computes a few are tried
    first (None: never). `on_cluster_size` gets the number of all if they are read. `owner`: our host, pid and time.
    With `resume` (the user gave the uuid) earlier deliveries are returned, if any, and no more placed. `now`: ISO time.

    Raises NoCapacity (TooFew, OverQuota), PlacementRefusal, UsageError (set too large for etcd, query lacks what a
    guest needs), Conflict or ClaimedElsewhere (uuid or name used otherwise, taken over), Unreachable, with what was
    undone. Nothing is released while an outcome is unknown.
    """
    check_order_size(order)
    try:
        delivered = _find_delivered(store, order, resume)
        if delivered:
            return delivered
        terms = read_terms(store, order, order.instances)
        reserve_names(store, order.instances)  # before anything is claimed
        lease = store.grant(keys.ATTEMPT_SECONDS)
    except Unreachable as error:
        raise add_state(error, UNCHANGED) from error
    # No other process can have claimed for a uuid that was generated here.
    movable = set[str]() if resume else set(order.instances)
    attempt = Attempt(store, backend, order, resume, rng, sample_above, on_cluster_size, lease, movable)
    with attempt.undo_on_error():
        delivered = attempt.announce(owner)
        if delivered:
            try_revoke(store, lease)
            return delivered
        claims = attempt.claim(terms)
        while True:
            failpoint('claimed')
            try:
                return attempt.deliver(claims, now())
            except Excluded as excluded:
                # Others of its group or project were delivered first, so some of our places are not allowed now.
                claims = attempt.claim_again(claims, excluded.admitted)
    raise AssertionError


class DeliveryRefused(Conflict):
    """The delivery was refused; undo_on_error() adds what was undone to the message."""


class ClaimedSet(NamedTuple):
    """The claimed candidate of each instance, and the most computes that could have taken one."""

    candidates: Mapping[str, Candidate]
    terms: Terms
    candidate_count: int

    @property
    def membership(self) -> Membership | None:
        return None if self.terms.group is None else self.terms.group.membership


@dataclass
class Attempt:
    """One run of create(), a method for each step; other data is read when it is first needed.

    Its key is on `lease`, with `revision` once it is written; see create() for arguments. undo() releases the claims of
    `attempted` instances that are `movable`, because no other attempt made their claims (rule: claim-stays), or
    `unclaimed` (no claim after the announcement, and none of another attempt since). claim() sets `placement`.
    """

    store: Store
    backend: Future[tuple[Placement, Offer]]
    order: SetOrder
    resume: bool
    rng: random.Random
    sample_above: int | None
    on_cluster_size: Callable[[int], None]
    lease: int
    movable: set[str]
    revision: int = 0
    attempted: list[str] = field(default_factory=list)
    unclaimed: set[str] = field(default_factory=set)
    placement: Placement = field(init=False)
    # Ends the cure for a claim of another attempt.
    alternative: str = ', or use another uuid'
    _alive: list[str] | None = None

    @property
    def condition(self) -> Unchanged:
        """The condition that the attempt's key is still ours."""
        return Unchanged(keys.attempt(self.order.instance), self.revision)

    def announce(self, owner: Mapping[str, object]) -> dict[str, DeliveryOutcome]:
        """Write the attempt's key; return what was delivered before ({}: nothing). Conflict if a uuid is in use."""
        value = {'version': 1, 'instances': list(self.order.instances), 'query': self.order.query, **owner}
        self.revision = announce(self.store, self.lease, self.order.instance, value, self.resume)
        # Another process may have delivered in between. From here on it cannot: a delivery needs the key we hold.
        return _find_delivered(self.store, self.order, self.resume)

    def claim(self, terms: Terms) -> ClaimedSet:
        """Claim a place for each instance, or for the minimum; errors as those of the placers.

        ClaimedElsewhere if too many of a resumed order must stay elsewhere, or others claim them in three tries.
        """
        if self.sample_above is None:
            self.read_alive()  # read while placement is queried
        announced = time.monotonic()
        self.placement, offer = self.backend.result()
        failpoint('announced')
        if claims := self._claim_sampled(terms):
            return claims
        placer = self.placer
        if announced - offer.queried_at > MAX_OFFER_AGE_SECONDS:
            offer = self.refresh_offer()  # a drain waits no longer than this for attempts
        if not self.resume:
            return self._claim_offered(offer, terms, {})
        for is_last_try in (False, False, True):
            placed = self._take_over(placer, terms)
            if len(placed) + placer.count_room(offer, terms) < self.order.minimum:
                offer = self.refresh_offer()  # room may have been released since the query
            try:
                return self._claim_offered(offer, terms, placed)
            except ClaimedElsewhere as error:
                # An overtaken attempt or a publishing compute claimed in between: take that over, never release it.
                self.unclaimed -= error.computes.keys()
                if is_last_try:
                    raise
        raise AssertionError

    def claim_again(self, claims: ClaimedSet, kept_instances: Collection[str]) -> ClaimedSet:
        """Claim again, with current data, for all but `kept_instances`; errors as Placer.place() and read_terms()."""
        log.debug(
            '%s: other attempts were faster: %d of %d claims are kept',
            self.order.instance,
            len(kept_instances),
            len(claims.candidates),
        )
        terms, offer = read_terms(self.store, self.order, self.order.instances), self.refresh_offer()
        return self._claim_offered(offer, terms, {instance: claims.candidates[instance] for instance in kept_instances})

    def deliver(self, claims: ClaimedSet, scheduled_at: str) -> dict[str, DeliveryOutcome]:
        """Deliver `claims`, release our other ones, revoke the lease; return {instance: outcome}. `scheduled_at`: ISO.

        Raises Excluded (group, quota), DeliveryRefused (not our attempt now), Conflict (a name).
        """
        order, placed = self.order, claims.candidates
        requests = _make_requests(order, claims, scheduled_at)
        deliveries = [(placed[instance].compute, own_request) for instance, own_request in requests.items()]

        def make_shared_change() -> Change:
            names = {instance: request.name for instance, request in requests.items()}
            computes = {instance: candidate.compute for instance, candidate in placed.items()}
            resources = {instance: request.resources for instance, request in requests.items()}
            return merge_changes(
                reserve_names(self.store, names),
                join_group(self.store, claims.membership, computes),
                charge_quota(self.store, order.project_id, resources),
            )

        if not deliver(self.store, deliveries, self.condition, order.shared_user_data, make_shared_change):
            why = 'the connection broke, this eschedule was too slow, or another one took over this uuid'
            raise DeliveryRefused(f'{order.instance}: not delivered: {why}')
        failpoint('delivered')
        unused = self.movable.intersection(self.attempted) - placed.keys()
        if unused:  # of a set; computes release what cannot be released here
            log.debug('%s', self._release(unused))
        try_revoke(self.store, self.lease)
        return {request.instance: DeliveryOutcome(compute) for compute, request in deliveries}

    @contextmanager
    def undo_on_error(self) -> Iterator[None]:
        """Undo the attempt if the block raises, and raise the error with what was undone."""
        try:
            yield
        except UnknownOutcome:
            raise  # nothing is released while it is unknown what was written (rule: read-back)
        except BaseException as error:
            outcome = self.undo()
            if isinstance(error, ClaimedElsewhere):
                raise self.make_refusal(error.computes) from error
            if isinstance(error, Unreachable):
                raise add_state(error, outcome) from error
            if isinstance(error, DeliveryRefused):
                raise Conflict(put_before_fix(str(error), f'; {outcome}')) from error
            if outcome not in (UNCHANGED, UNDONE):
                log.warning('%s', outcome)
            raise

    def undo(self) -> str:
        """Release the claims, revoke the lease; return UNCHANGED, UNDONE, or what is left, also after an error."""
        outcome = UNCHANGED
        if releasable := (self.movable | self.unclaimed).intersection(self.attempted):
            outcome = self._release(releasable)
            failpoint('undone')
        try_revoke(self.store, self.lease)
        return outcome

    def _claim_sampled(self, terms: Terms) -> ClaimedSet | None:
        """Claim on a sampled compute; None if sampling is off, the attempt resumes, or no sampled compute will do."""
        if self.sample_above is None or self.resume:
            return None
        placer = SampledPlacer(self.claimer, self.order, self.rng, self.attempted)
        placed = placer.place(self.store, terms, self.sample_above)
        return ClaimedSet(placed, terms, placer.fitting) if placed else None

    def _claim_offered(self, offer: Offer, terms: Terms, placed: Mapping[str, Candidate]) -> ClaimedSet:
        """Claim as Placer.place() does with this offer; Conflict instead of NoCapacity if a newer attempt took over."""
        placer = self.placer
        try:
            placed = placer.place(offer, terms, placed)
            return ClaimedSet(placed, terms, placer.candidate_count)
        except NoCapacity:
            if self.resume:  # the missing room may be a newer attempt's claim for the same instances
                self.claimer.check(self.order.instance)
            raise

    def _take_over(self, placer: Placer, terms: Terms) -> Mapping[str, Candidate]:
        """Take over earlier claims; log those that must stay, or raise ClaimedElsewhere if they are too many."""
        claims, placer.claimed_elsewhere = read_earlier_claims(
            self.placement, self.order.instances, self.order.query or '', placer.alive, terms.group
        )
        self.unclaimed |= set(self.order.instances) - claims.keys() - placer.claimed_elsewhere.keys()
        placed = placer.take_over(claims)
        placer.claimed_elsewhere |= {
            instance: claim.compute for instance, claim in claims.items() if instance not in placed
        }
        if placer.claimed_elsewhere:
            refusal = self.make_refusal(placer.claimed_elsewhere)
            if self.order.count - len(placer.claimed_elsewhere) < self.order.minimum:
                raise refusal
            log.warning('%s', refusal)
        return placed

    def make_refusal(self, claimed_on: Mapping[str, str]) -> ClaimedElsewhere:
        """Make the error, with its cure, for {instance: compute} of claims elsewhere; reads the computes from etcd."""
        instance, compute = next(iter(claimed_on.items()))
        host = self.get_display_name(compute)
        which = f'{instance} is' if len(claimed_on) == 1 else f'{instance} and {len(claimed_on) - 1} more are'
        if compute in self.read_alive():
            problem = f'{which} claimed on {host} by another attempt'
            cure = f'wait two minutes ({host} then has released the claim if no request owns it){self.alternative}'
        else:
            from ecomp.model.host import describe_silent_fix

            problem = f'{which} claimed on {host}, which is silent and may be running it'
            cure = describe_silent_fix(host, self.alternative)
        return ClaimedElsewhere(claimed_on, f'{problem}. Fix: {cure}')

    def _release(self, instances: Iterable[str]) -> str:
        """Release the instances' claims; return UNDONE, or a sentence about leftovers or the error."""
        uuid = self.order.instance
        try:
            if abandon(self.store, self.placement, instances, uuid, self.revision):
                return UNDONE
            return f'{uuid}: its claim stays: another attempt is in flight, or this eschedule was too slow'
        except EcompError as error:
            log.debug('the claim of %s could not be released: %s', uuid, error)
            return (
                f'{uuid} is not placed: the computes release its claim within minutes. '
                f'Try: the same command with --uuid {uuid}, which takes the claim over'
            )

    @property
    def claimer(self) -> Claimer:
        """A new Claimer for this attempt's user and project."""
        user, project = self.order.user_id, self.order.project_id
        return Claimer(
            self.placement,
            user,
            project,
            self.is_attempt_ours,
            self.read_highest_released,
            self.get_display_name,
            self.movable,
        )

    @cached_property
    def placer(self) -> Placer:
        """The Placer of this attempt; its first use reads the living computes."""
        alive, line, is_ours = self.read_alive(), self.count_in_flight, self.is_ours
        refresh, claimer = self.refresh_offer, self.claimer
        return Placer(claimer, refresh, line, alive, is_ours, self.order, self.rng, self.attempted)

    def read_alive(self) -> list[str]:
        """Return the living computes, read once; on_cluster_size() gets the number of keys then."""
        if self._alive is None:
            presence = self.store.snapshot(keys.COMPUTES, keys_only=True).entries
            self.on_cluster_size(len(presence))
            self._alive = [keys.get_last_part(key) for key, entry in presence.items() if entry.lease]
        return self._alive

    @cached_property
    def computes(self) -> Computes:
        """All computes with their host names, read from etcd at first use."""
        from ecomp.scheduler.queries.hosts import read_computes  # only for messages about computes

        return read_computes(self.store)

    def get_display_name(self, compute: str) -> str:
        """Return a compute's host name (see Computes.format_name()); the first call reads etcd."""
        return self.computes.format_name(compute)

    def is_ours(self, compute: str) -> bool:
        """Return True for a provider that is a compute of this cluster, alive or not."""
        return compute in self.computes.stored_hostnames

    def is_attempt_ours(self) -> bool:
        """Refresh the lease, read the key; return False if the key is gone or another process took it over."""
        self.store.keep_alive(self.lease)  # a long attempt that still asks is alive
        entry = self.store.get(keys.attempt(self.order.instance))
        return entry is not None and entry.revision == self.revision

    def refresh_offer(self) -> Offer:
        """Refresh the lease, and query the candidates again."""
        self.store.keep_alive(self.lease)
        return allocations.read_candidates(self.placement, self.order.query or '')

    def read_highest_released(self, instances: Collection[str]) -> int:
        """Return the highest generation at which a claim of these was released; 0 if none, or if not resuming."""
        # A uuid that was generated here is new to all others.
        return read_highest_released(self.store, instances) if self.resume else 0

    def count_in_flight(self) -> tuple[int, int]:
        """Count the instances that older attempts place, and those of newer attempts."""
        return count_placements_before_and_after(self.store.snapshot(keys.ATTEMPTS), self.revision)


def _make_requests(order: SetOrder, claims: ClaimedSet, scheduled_at: str) -> dict[str, Request]:
    """Make each instance's request; `scheduled_at` is an ISO time."""
    decided = {'group': claims.membership, 'stages': {**order.stages, 'scheduled': scheduled_at}}

    def make_request(instance: str, candidate: Candidate) -> Request:
        why = PlacementReason(order.weigh, candidate.weight, claims.candidate_count)
        return Request(allocations=candidate.allocations, why=why, **order.orders[instance].copy_fields(**decided))

    return {instance: make_request(instance, candidate) for instance, candidate in claims.candidates.items()}


def add_state(error: Unreachable, state: str) -> Unreachable:
    """Return an error of the same type with the state of the request added to its message."""
    return type(error)(put_before_fix(str(error), f'; {state}'), error.backend)
