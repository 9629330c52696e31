"""Deliver requests for a placement query to computes: for one instance, or for a set.

1 announce the attempt, a key below /requests on a lease; 2 query candidates; 3 claim; 4 deliver in one transaction that
also deletes the attempt. After a kill at any step the computes undo what is left (rule 4). Instances of an earlier
attempt with this uuid stay on the compute of their claim.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ecomp.errors import ClaimedElsewhere, Conflict, EcompError, NoCapacity, UnknownOutcome, Unreachable
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import compute_of, total
from ecomp.model.choose import Candidate, Offer, Why
from ecomp.model.group import Group, Membership
from ecomp.model.order import Order, Request, SetOrder, check_order_size, difference, member
from ecomp.model.query import Amount, Unexplained, enabled_only, parse
from ecomp.model.record import ERROR, GONE
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.scheduler.looking.find import FRESH, InstanceEntries, find, take_names
from ecomp.scheduler.placing.claim import Claimer, DeliveryOutcome, Terms, abandon, announce, deliver, terms_of
from ecomp.scheduler.placing.place import Few, Placer
from ecomp.store.client import Store, in_line
from ecomp.store.sharing import Change, Excluded, charged, highest_released, index, joined, quietly_revoke, together

if TYPE_CHECKING:
    from ecomp.model.host import Computes


def _before(store: Store, wanted: SetOrder, resume: bool) -> dict[str, DeliveryOutcome]:
    """Return what was delivered before under this uuid; Conflict if the order was another one."""
    if not resume:  # the uuid was generated here
        return {}
    # All keys are listed once: searching for each instance of a set among thousands of computes takes too long.
    # The queues first: an instance that moves to a compute in between is found there.
    queued = {keys.in_queue(key) for key in store.snapshot(keys.QUEUES, keys_only=True).entries}
    key_index = index(store)

    def is_there(instance: str) -> bool:
        return instance in queued or instance in key_index.requests or instance in key_index.records

    # One uuid cannot be an instance's and a set's.
    other_uuid = wanted.instance if wanted.count > 1 else member(wanted.instance, 1)
    if is_there(other_uuid) and find(store, other_uuid, key_index) is not None:
        raise Conflict(f'{wanted.instance}: is the uuid of {"an instance" if wanted.count > 1 else "a set"}')
    entries = {instance: find(store, instance, key_index) for instance in wanted.instances if is_there(instance)}
    return {
        instance: _delivered(existing, wanted.orders[instance])
        for instance, existing in entries.items()
        if existing is not None
    }


def _delivered(found: InstanceEntries, asked: Order) -> DeliveryOutcome:
    if found.queue_entry is not None:
        raise Conflict(f'{asked.instance}: exists, and waits in a queue')
    check_same(found, asked)
    return DeliveryOutcome(found.record.compute, again=True)


def check_same(found: InstanceEntries, asked: Order) -> None:
    """Raise Conflict unless the instance lives and was ordered in the same way."""
    record, instance = found.record, found.record.instance
    if record.state == GONE:
        raise Conflict(f'{instance}: gone since {record.stages.get("gone")}; a uuid is never used twice')
    if record.state == ERROR:
        raise Conflict(f'{instance}: it failed; destroy it and ask with another uuid')
    if found.is_destroying:
        raise Conflict(f'{instance}: it is being destroyed; a uuid is never used twice')
    existing = found.order
    mismatch = difference(existing or record, asked, recorded=existing is None)
    if mismatch is not None:
        raise Conflict(f'{instance}: exists, {mismatch}')


def earlier_claims(
    placement: Placement, wanted: SetOrder, alive: Collection[str], group: Group | None
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Read the instances' earlier claims: {instance: candidate} of those to take over.

    The second result is {instance: compute} of all other claims: the compute is silent, or excluded by the group or
    query, the amounts differ, or the query cannot be parsed here (rule 13).
    """
    held = {instance: allocations.consumer(placement, instance).allocations for instance in wanted.instances}
    claimed_on = {instance: compute for instance, claim in held.items() if (compute := compute_of(claim))}
    try:
        constraints = parse(enabled_only(wanted.query or '')) if claimed_on else []
    except Unexplained:
        return {}, claimed_on
    amounts = {constraint.name: constraint.amount for constraint in constraints if isinstance(constraint, Amount)}
    others = [constraint for constraint in constraints if not isinstance(constraint, Amount)]
    fitting = set(alive).intersection(*(providers.holding(placement, constraint) for constraint in others))
    usable = {
        instance: Candidate(compute, held[instance], None)
        for instance, compute in claimed_on.items()
        if compute in fitting and total(held[instance]) == amounts
        if group is None or group.excludes(compute) is None
    }
    return usable, {instance: compute for instance, compute in claimed_on.items() if instance not in usable}


log = logging.getLogger(__name__)

# The outcome of a failed request, in messages.
UNCHANGED = 'nothing was changed'
UNDONE = 'nothing was placed, and its claim is released'


def create(
    store: Store,
    backend: Future[tuple[Placement, Offer]],
    wanted: SetOrder,
    who: Mapping[str, object],
    resume: bool,
    rng: random.Random,
    now: Callable[[], str],
    large: int | None = None,
    sized: Callable[[int], None] = lambda _: None,
) -> dict[str, DeliveryOutcome]:
    """Place the instances of an order; return {instance: outcome} of those that are placed.

    `backend` brings placement and the candidates, queried concurrently. In a cluster of more than `sample_above`
    computes a few are tried first (None: never), and `on_cluster_size` is called with the number of computes if it is
    read. `owner` (host, pid) identifies this process in etcd; `resume`: the user gave the uuid, which may be in use.

    Raises NoCapacity (TooFew, OverQuota); PlacementRefusal; UsageError if the set is too large for etcd or the query
    lacks what a guest needs; Conflict or ClaimedElsewhere if the uuid or name is used otherwise or another process took
    over; Unreachable, with what was undone; UnknownOutcome, after which nothing is released.
    """
    check_order_size(wanted)
    try:
        delivered = _before(store, wanted, resume)
        if delivered:
            return delivered
        terms = terms_of(store, wanted, wanted.instances)
        take_names(store, wanted.instances)  # before anything is claimed
        lease = store.grant(keys.ATTEMPT_SECONDS)
    except Unreachable as error:
        raise _with(error, UNCHANGED) from error
    # No other process can have claimed for a uuid that was generated here.
    movable = set[str]() if resume else set(wanted.instances)
    attempt = Attempt(store, backend, wanted, resume, rng, large, sized, lease, movable)
    try:
        delivered = attempt.announce(who)
        if delivered:
            quietly_revoke(store, lease)
            return delivered
        claims = attempt.claim(terms)
        while True:
            failpoint('claimed')
            try:
                return attempt.deliver(claims, now())
            except Excluded as excluded:
                # Others of its group or project were delivered first, so some of our places are not allowed now.
                claims = attempt.claim_again(claims, excluded.kept)
    except UnknownOutcome:
        raise  # nothing is released while it is unknown what was written (rule 1)
    except BaseException as error:
        outcome = attempt.undo()
        if isinstance(error, ClaimedElsewhere):
            raise attempt.refuse(error.on) from error
        if isinstance(error, Unreachable):
            raise _with(error, outcome) from error
        if isinstance(error, _NotDelivered):
            raise Conflict(f'{error}; {outcome}') from error
        if outcome not in (UNCHANGED, UNDONE):
            log.warning('%s', outcome)
        raise


class _NotDelivered(Conflict):
    """The delivery was refused; the caller adds what was undone to the message."""


class Claims(NamedTuple):
    """The claimed candidate of each instance, and the number of computes that could take one."""

    placed: Mapping[str, Candidate]
    terms: Terms
    among: int

    @property
    def membership(self) -> Membership | None:
        return None if self.terms.group is None else self.terms.group.membership


@dataclass
class Attempt:
    """One run of create(), a method for each step; other data is read when it is first needed.

    `resume`, `sample_above`, `on_cluster_size`: see create(). The attempt's key is on `lease`, with `revision` once it
    is written. `attempted` are the instances for which a claim was tried. Of these undo() releases the claims of
    `movable` ones, which this attempt made (it moves no others, rule 13), and of `unclaimed` ones, which had no claim
    when the attempt was announced and no other attempt's since. `placement` is set once `backend` has answered.
    """

    store: Store
    backend: Future[tuple[Placement, Offer]]
    wanted: SetOrder
    resume: bool
    rng: random.Random
    large: int | None
    sized: Callable[[int], None]
    lease: int
    movable: set[str]
    revision: int = 0
    tried: list[str] = field(default_factory=list)
    unclaimed: set[str] = field(default_factory=set)
    placement: Placement = field(init=False)
    _alive: list[str] | None = None
    _known: Computes | None = None
    _placer: Placer | None = None

    # The steps

    def announce(self, who: Mapping[str, object]) -> dict[str, DeliveryOutcome]:
        """Write the attempt's key; return what is delivered already, in which case all is done."""
        value = {'version': 1, 'instances': list(self.wanted.instances), 'query': self.wanted.query, **who}
        self.revision = announce(self.store, self.lease, self.wanted.instance, value, self.resume)
        # Another process may have delivered in between. From here on it cannot: a delivery needs the key we hold.
        return _before(self.store, self.wanted, self.resume)

    def claim(self, terms: Terms) -> Claims:
        """Claim a place for each instance, or for the minimum; errors as those of the placers."""
        if self.large is None:
            self.alive()  # read while placement is queried
        announced = time.monotonic()
        self.placement, offer = self.backend.result()
        failpoint('announced')
        if claims := self._claim_among_few(terms):
            return claims
        placer = self.placer()
        if announced - offer.asked > FRESH:
            offer = self.look_again()  # a drain waits no longer than this for attempts
        if not self.resume:
            return self._claim_among_all(offer, terms, {})
        for is_last_try in (False, False, True):
            placed = self._take_over(placer, terms)
            if len(placed) + placer.room(offer, terms) < self.wanted.minimum:
                offer = self.look_again()  # room may have been released since the query
            try:
                return self._claim_among_all(offer, terms, placed)
            except ClaimedElsewhere as error:
                # An attempt that this one overtook claimed in between, or a compute that publishes what it runs. This
                # attempt may take over such a claim, but does not release it.
                self.unclaimed -= error.on.keys()
                if is_last_try:
                    raise
        raise AssertionError

    def claim_again(self, claims: Claims, kept: Collection[str]) -> Claims:
        """Claim again, with current data, for the instances that may not stay in place."""
        log.debug('%s: others were faster, %d of %d may stay', self.wanted.instance, len(kept), len(claims.placed))
        terms, offer = terms_of(self.store, self.wanted, self.wanted.instances), self.look_again()
        return self._claim_among_all(offer, terms, {instance: claims.placed[instance] for instance in kept})

    def deliver(self, claims: Claims, scheduled: str) -> dict[str, DeliveryOutcome]:
        """Deliver what is claimed, and release claims that are not used. Excluded, Conflict."""
        order, placed = self.wanted, claims.placed
        requests = _requests(order, claims, scheduled)
        deliveries = [(placed[instance].compute, own_request) for instance, own_request in requests.items()]

        def joining() -> Change:
            names = {instance: request.name for instance, request in requests.items()}
            computes = {instance: candidate.compute for instance, candidate in placed.items()}
            resources = {instance: request.resources for instance, request in requests.items()}
            return together(
                take_names(self.store, names),
                joined(self.store, claims.membership, computes),
                charged(self.store, order.project_id, resources),
            )

        if not deliver(self.store, deliveries, order.instance, self.revision, order.shared, joining):
            why = 'the connection broke, this eschedule was too slow, or another one took it over'
            raise _NotDelivered(f'{order.instance}: not delivered: {why}')
        failpoint('delivered')
        unused = self.movable.intersection(self.tried) - placed.keys()
        if unused:  # of a set; computes release what cannot be released here
            log.debug('%s', self._release(unused))
        quietly_revoke(self.store, self.lease)
        return {request.instance: DeliveryOutcome(compute) for compute, request in deliveries}

    def undo(self) -> str:
        """Release the claims and the attempt's key; return a sentence about what is left."""
        outcome = UNCHANGED
        if releasable := (self.movable | self.unclaimed).intersection(self.tried):
            outcome = self._release(releasable)
            failpoint('undone')
        quietly_revoke(self.store, self.lease)
        return outcome

    # Claiming

    def _claim_among_few(self, terms: Terms) -> Claims | None:
        """Claim on a sampled compute; None if all computes have to be considered."""
        if self.large is None or self.resume:
            return None
        placer = Few(self.claimer, self.wanted, self.rng, self.tried)
        placed = placer.place(self.store, terms, self.large)
        return Claims(placed, terms, placer.of) if placed else None

    def _claim_among_all(self, offer: Offer, terms: Terms, placed: Mapping[str, Candidate]) -> Claims:
        placer = self.placer()
        try:
            placed = placer.place(offer, terms, placed)
            return Claims(placed, terms, placer.of)
        except NoCapacity:
            if self.resume:  # the missing room may be a newer attempt's claim for the same instances
                self.claimer.check(self.wanted.instance)
            raise

    def _take_over(self, placer: Placer, terms: Terms) -> Mapping[str, Candidate]:
        """Take over earlier claims, each on its compute; ClaimedElsewhere if too many must stay."""
        claims, placer.blocked = earlier_claims(self.placement, self.wanted, placer.alive, terms.group)
        self.unclaimed |= set(self.wanted.instances) - claims.keys() - placer.blocked.keys()
        placed = placer.take_over(claims)
        placer.blocked |= {instance: claim.compute for instance, claim in claims.items() if instance not in placed}
        if placer.blocked:
            refusal = self.refuse(placer.blocked)
            if self.wanted.count - len(placer.blocked) < self.wanted.minimum:
                raise refusal
            log.warning('%s', refusal)
        return placed

    def refuse(self, on: Mapping[str, str]) -> ClaimedElsewhere:
        """Make the error for {instance: compute} of claims elsewhere, with the remedy."""
        instance, compute = next(iter(on.items()))
        host = self.called(compute)
        which = f'{instance} is' if len(on) == 1 else f'{instance} and {len(on) - 1} more are'
        if compute in self.alive():
            problem = f'{which} claimed on {host} by another attempt'
            cure = f'wait two minutes, in which {host} releases the claim if no request owns it, or use another uuid'
        else:
            from ecomp.model.host import silent_cure

            problem, cure = f'{which} claimed on {host}, which is silent and may be running it', silent_cure(host)
        return ClaimedElsewhere(on, f'{problem}. Fix: {cure}')

    def _release(self, instances: Iterable[str]) -> str:
        """Release the instances' claims; return a sentence about what is left."""
        uuid = self.wanted.instance
        try:
            if abandon(self.store, self.placement, instances, uuid, self.revision):
                return UNDONE
            return f'{uuid}: its claim stays: somebody else is at it, or this eschedule was too slow to release it'
        except EcompError as error:
            log.debug('the claim of %s could not be released: %s', uuid, error)
            return (
                f'{uuid} is not placed: the computes release its claim within minutes, '
                f'or the same command with --uuid {uuid} takes it over'
            )

    # Data for the steps

    @property
    def claimer(self) -> Claimer:
        user, project = self.wanted.user_id, self.wanted.project_id
        return Claimer(self.placement, user, project, self.still_ours, self.released, self.called, self.movable)

    def placer(self) -> Placer:
        if self._placer is None:
            alive, line, is_ours = self.alive(), self.line, self.is_ours
            refresh, claimer = self.look_again, self.claimer
            self._placer = Placer(claimer, refresh, line, alive, is_ours, self.wanted, self.rng, self.tried)
        return self._placer

    def alive(self) -> list[str]:
        """Return the living computes, read once."""
        if self._alive is None:
            presence = self.store.snapshot(keys.COMPUTES, keys_only=True).entries
            self.sized(len(presence))
            self._alive = [keys.last(key) for key, entry in presence.items() if entry.lease]
        return self._alive

    def known(self) -> Computes:
        if self._known is None:
            from ecomp.scheduler.looking.hosts import computes  # only for messages about computes

            self._known = computes(self.store)
        return self._known

    def called(self, compute: str) -> str:
        return self.known().called(compute)

    def is_ours(self, compute: str) -> bool:
        """True for a provider that is a compute of this cluster."""
        return compute in self.known().remembered

    def still_ours(self) -> bool:
        """True unless another process has taken the attempt over; refreshes its lease."""
        self.store.keep_alive(self.lease)  # a long attempt that still asks is alive
        entry = self.store.get(keys.attempt(self.wanted.instance))
        return entry is not None and entry.revision == self.revision

    def look_again(self) -> Offer:
        """Query the candidates again; refreshes the lease."""
        self.store.keep_alive(self.lease)
        return allocations.candidates(self.placement, self.wanted.query or '')

    def released(self, instances: Collection[str]) -> int:
        """Return the highest generation at which a claim of these instances was released."""
        # A uuid that was generated here is new to all others.
        return highest_released(self.store, instances) if self.resume else 0

    def line(self) -> tuple[int, int]:
        """Count the instances that older attempts place, and newer ones."""
        return in_line(self.store.snapshot(keys.ATTEMPTS), self.revision)


def _requests(wanted: SetOrder, claims: Claims, scheduled: str) -> dict[str, Request]:
    """Make each instance's request; `scheduled_at` is an ISO time."""
    decided = {'group': claims.membership, 'stages': {**wanted.stages, 'scheduled': scheduled}}

    def request(instance: str, candidate: Candidate) -> Request:
        why = Why(wanted.weigh, candidate.weight, claims.among)
        return Request(allocations=candidate.allocations, why=why, **wanted.orders[instance].parts(**decided))

    return {instance: request(instance, candidate) for instance, candidate in claims.placed.items()}


def _with(error: Unreachable, state: str) -> Unreachable:
    """Return the same error with the state of the request added to its message."""
    return type(error)(f'{error}; {state}', error.backend)
