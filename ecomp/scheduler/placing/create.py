"""Deliver requests for a placement query to computes: for one instance, or for a set.

1 put the attempt, below /requests, on a lease; 2 ask for candidates; 3 claim; 4 deliver in one transaction that also
drops the attempt. After a kill at any step, what is left has a date and is undone by the computes (rule 4). Each
instance of an earlier attempt of the same uuid stays on the compute that its claim is on.
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
    """What was delivered of this before, by the same uuid; Conflict if it is not the same that was asked for."""
    if not resume:  # a uuid that was made here
        return {}
    # All names once: to look for each of a set among thousands of computes takes longer than the set has.
    # What is moved from a queue to a compute meanwhile is found there.
    waiting = {keys.in_queue(key) for key in store.snapshot(keys.QUEUES, keys_only=True).entries}
    among = index(store)

    def is_there(instance: str) -> bool:
        return instance in waiting or instance in among.requests or instance in among.records

    # An instance's uuid is no set's, and the other way round.
    other = wanted.instance if wanted.count > 1 else member(wanted.instance, 1)
    if is_there(other) and find(store, other, among) is not None:
        raise Conflict(f'{wanted.instance}: is the uuid of {"an instance" if wanted.count > 1 else "a set"}')
    found = {instance: find(store, instance, among) for instance in wanted.instances if is_there(instance)}
    return {instance: _delivered(each, wanted.orders[instance]) for instance, each in found.items() if each is not None}


def _delivered(found: InstanceEntries, asked: Order) -> DeliveryOutcome:
    if found.queue_entry is not None:
        raise Conflict(f'{asked.instance}: exists, and waits in a queue')
    check_same(found, asked)
    return DeliveryOutcome(found.record.compute, again=True)


def check_same(found: InstanceEntries, asked: Order) -> None:
    """Conflict unless the instance lives, and was asked for just so."""
    record, instance = found.record, found.record.instance
    if record.state == GONE:
        raise Conflict(f'{instance}: gone since {record.stages.get("gone")}; a uuid is never used twice')
    if record.state == ERROR:
        raise Conflict(f'{instance}: it failed; destroy it and ask with another uuid')
    if found.is_destroying:
        raise Conflict(f'{instance}: it is being destroyed; a uuid is never used twice')
    there = found.order
    other = difference(there or record, asked, recorded=there is None)
    if other is not None:
        raise Conflict(f'{instance}: exists, {other}')


def earlier_claims(
    placement: Placement, wanted: SetOrder, alive: Collection[str], group: Group | None
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Read what the instances hold, and find which claims can be taken over as they are (rule 13).

    Returns:
        {instance: its claim}, and {instance: compute} of those whose claim stays as it is: the compute is silent or not
        for this group, or the claim is for something else, or the query cannot be taken apart here.
    """
    held = {instance: allocations.consumer(placement, instance).allocations for instance in wanted.instances}
    on = {instance: compute for instance, there in held.items() if (compute := compute_of(there))}
    try:
        asked = parse(enabled_only(wanted.query or '')) if on else []
    except Unexplained:
        return {}, on
    amounts = {each.name: each.amount for each in asked if isinstance(each, Amount)}
    rest = [each for each in asked if not isinstance(each, Amount)]
    fitting = set(alive).intersection(*(providers.holding(placement, each) for each in rest))
    found = {
        instance: Candidate(compute, held[instance], None)
        for instance, compute in on.items()
        if compute in fitting and total(held[instance]) == amounts
        if group is None or group.excludes(compute) is None
    }
    return found, {instance: compute for instance, compute in on.items() if instance not in found}


log = logging.getLogger(__name__)

UNCHANGED, UNDONE = 'nothing was changed', 'nothing was placed, and its claim is released'
"""What is left of a request that did not get through."""


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
    """Place the instances; those that are placed, in order.

    `backend` brings placement and the candidates, asked for while etcd is being asked; but where there are more than
    `large` computes a few of these are asked about first. None: that is not expected, and not looked at. `who` (host,
    pid) says in etcd who is at it; `resume` is True for a uuid the user gave, which may have a past. `sized` is told
    how many computes there are, where that was seen.
    Errors: NoCapacity, PlacementRefusal, UsageError (the set is too large for etcd), Conflict (the uuid or the name is
    used otherwise), Unreachable.
    """
    check_order_size(wanted)
    try:
        there = _before(store, wanted, resume)
        if there:
            return there
        terms = terms_of(store, wanted, wanted.instances)
        take_names(store, wanted.instances)  # said before anything is claimed for one of them
        lease = store.grant(keys.ATTEMPT_SECONDS)
    except Unreachable as error:
        raise _with(error, UNCHANGED) from error
    # Nobody else can have claimed for a uuid that was made here.
    movable = set[str]() if resume else set(wanted.instances)
    attempt = Attempt(store, backend, wanted, resume, rng, large, sized, lease, movable)
    try:
        there = attempt.announce(who)
        if there:
            quietly_revoke(store, lease)
            return there
        claims = attempt.claim(terms)
        while True:
            failpoint('claimed')
            try:
                return attempt.deliver(claims, now())
            except Excluded as lost:
                # Of its group or its project others were delivered first, and what we hold may not be where it is.
                claims = attempt.claim_again(claims, lost.kept)
    except UnknownOutcome:
        raise  # nothing is released while it is not known what was written (rule 1)
    except BaseException as error:
        left = attempt.undo()
        if isinstance(error, ClaimedElsewhere):
            raise attempt.refuse(error.on) from error
        if isinstance(error, Unreachable):
            raise _with(error, left) from error
        if isinstance(error, _NotDelivered):
            raise Conflict(f'{error}; {left}') from error
        if left not in (UNCHANGED, UNDONE):
            log.warning('%s', left)
        raise


class _NotDelivered(Conflict):
    """The transaction that delivers was refused; what is left is added once it is undone."""


class Claims(NamedTuple):
    """`placed` is the candidate that each instance has claimed, in order, with the group and quota of `terms`.

    `among` is how many computes could have taken one.
    """

    placed: Mapping[str, Candidate]
    terms: Terms
    among: int

    @property
    def membership(self) -> Membership | None:
        """The group that they join."""
        return None if self.terms.group is None else self.terms.group.membership


@dataclass
class Attempt:
    """One eschedule at work on an order, a step a method. What else the steps need is read once, when it is needed.

    `resume`, `large` and `sized`: see create(). Its key in /requests is on the `lease`, and of `revision` once it is
    put. `tried` are the instances that this attempt tried to claim for; `movable` those whose claim it made itself:
    it moves no other (rule 13). It releases these, and what may be its own: nobody held a claim for the instances in
    `unclaimed` when it had announced itself, and it has seen none of another for them since. `placement` is there once
    it has answered: nothing is claimed or released before.
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
        """Say that we are at it; what somebody else has delivered of it meanwhile, and then there is no more to do."""
        value = {'version': 1, 'instances': list(self.wanted.instances), 'query': self.wanted.query, **who}
        self.revision = announce(self.store, self.lease, self.wanted.instance, value, self.resume)
        # Delivered since we looked? From here on nobody else can: a delivery needs the key we hold now.
        return _before(self.store, self.wanted, self.resume)

    def claim(self, terms: Terms) -> Claims:
        """Claim a place for each instance, for the minimum at least. Errors: those of Placer and of Few."""
        if self.large is None:
            self.alive()  # read while placement is being asked
        announced = time.monotonic()
        self.placement, offer = self.backend.result()
        failpoint('announced')
        if claims := self._claim_among_few(terms):
            return claims
        placer = self.placer()
        if announced - offer.asked > FRESH:
            offer = self.look_again()  # who waits for a compute to be drained waits no longer than that for us
        if not self.resume:
            return self._claim_among_all(offer, terms, {})
        for last in (False, False, True):
            placed = self._take_over(placer, terms)
            if len(placed) + placer.room(offer, terms) < self.wanted.minimum:
                offer = self.look_again()  # it may have been released since placement was asked, and be free by now
            try:
                return self._claim_among_all(offer, terms, placed)
            except ClaimedElsewhere as error:
                # Claimed in between by an attempt that this one overtook, or by a compute that publishes again what it
                # runs. Such a claim may be taken over, but this attempt does not release it.
                self.unclaimed -= error.on.keys()
                if last:
                    raise
        raise AssertionError

    def claim_again(self, claims: Claims, kept: Collection[str]) -> Claims:
        """Claim anew, as things are by now, for all but those of the instances that may stay where they are."""
        log.debug('%s: others were faster, %d of %d may stay', self.wanted.instance, len(kept), len(claims.placed))
        terms, offer = terms_of(self.store, self.wanted, self.wanted.instances), self.look_again()
        return self._claim_among_all(offer, terms, {instance: claims.placed[instance] for instance in kept})

    def deliver(self, claims: Claims, scheduled: str) -> dict[str, DeliveryOutcome]:
        """Deliver what is claimed, and release what was claimed beside it. Errors: Excluded, Conflict."""
        wanted, placed = self.wanted, claims.placed
        requests = _requests(wanted, claims, scheduled)
        deliveries = [(placed[instance].compute, each) for instance, each in requests.items()]

        def joining() -> Change:
            names = {instance: each.name for instance, each in requests.items()}
            computes = {instance: candidate.compute for instance, candidate in placed.items()}
            resources = {instance: each.resources for instance, each in requests.items()}
            return together(
                take_names(self.store, names),
                joined(self.store, claims.membership, computes),
                charged(self.store, wanted.project_id, resources),
            )

        if not deliver(self.store, deliveries, wanted.instance, self.revision, wanted.shared, joining):
            why = 'the connection broke, this eschedule was too slow, or another one took it over'
            raise _NotDelivered(f'{wanted.instance}: not delivered: {why}')
        failpoint('delivered')
        spare = self.movable.intersection(self.tried) - placed.keys()
        if spare:  # of a set: what cannot be released here the computes release
            log.debug('%s', self._release(spare))
        quietly_revoke(self.store, self.lease)
        return {request.instance: DeliveryOutcome(compute) for compute, request in deliveries}

    def undo(self) -> str:
        """Release what is claimed, and the key; what is left of it all, in one sentence."""
        left = UNCHANGED
        if mine := (self.movable | self.unclaimed).intersection(self.tried):
            left = self._release(mine)
            failpoint('undone')
        quietly_revoke(self.store, self.lease)
        return left

    # Claiming

    def _claim_among_few(self, terms: Terms) -> Claims | None:
        """Claim on one of a few computes; None where all are to be asked about."""
        if self.large is None or self.resume:
            return None
        few = Few(self.claimer, self.wanted, self.rng, self.tried)
        placed = few.place(self.store, terms, self.large)
        return Claims(placed, terms, few.of) if placed else None

    def _claim_among_all(self, offer: Offer, terms: Terms, placed: Mapping[str, Candidate]) -> Claims:
        placer = self.placer()
        try:
            placed = placer.place(offer, terms, placed)
            return Claims(placed, terms, placer.of)
        except NoCapacity:
            if self.resume:  # the room that is missing may be what another one has claimed for the same instances
                self.claimer.check(self.wanted.instance)
            raise

    def _take_over(self, placer: Placer, terms: Terms) -> Mapping[str, Candidate]:
        """Take over the claims that earlier attempts of this uuid left, each on its compute.

        Raises:
            ClaimedElsewhere: too many of the instances are claimed where they cannot be placed now.
        """
        found, placer.blocked = earlier_claims(self.placement, self.wanted, placer.alive, terms.group)
        self.unclaimed |= set(self.wanted.instances) - found.keys() - placer.blocked.keys()
        placed = placer.take_over(found)
        placer.blocked |= {instance: each.compute for instance, each in found.items() if instance not in placed}
        if placer.blocked:
            refusal = self.refuse(placer.blocked)
            if self.wanted.count - len(placer.blocked) < self.wanted.minimum:
                raise refusal
            log.warning('%s', refusal)
        return placed

    def refuse(self, on: Mapping[str, str]) -> ClaimedElsewhere:
        """Say where these instances are claimed, and what to do: {instance: compute}."""
        instance, compute = next(iter(on.items()))
        host = self.called(compute)
        which = f'{instance} is' if len(on) == 1 else f'{instance} and {len(on) - 1} more are'
        if compute in self.alive():
            told = f'{which} claimed on {host} by another attempt'
            cure = f'wait two minutes, in which {host} releases the claim if no request owns it, or use another uuid'
        else:
            from ecomp.model.host import silent_cure

            told, cure = f'{which} claimed on {host}, which is silent and may be running it', silent_cure(host)
        return ClaimedElsewhere(on, f'{told}. Fix: {cure}')

    def _release(self, instances: Iterable[str]) -> str:
        """Release what the instances hold; what is left of it, in one sentence."""
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

    # What the steps need

    @property
    def claimer(self) -> Claimer:
        """What claims for these instances, as long as the attempt is ours."""
        user, project = self.wanted.user_id, self.wanted.project_id
        return Claimer(self.placement, user, project, self.still_ours, self.released, self.called, self.movable)

    def placer(self) -> Placer:
        """What seeks places among all computes."""
        if self._placer is None:
            alive, line, is_ours = self.alive(), self.line, self.is_ours
            again, claimer = self.look_again, self.claimer
            self._placer = Placer(claimer, again, line, alive, is_ours, self.wanted, self.rng, self.tried)
        return self._placer

    def alive(self) -> list[str]:
        """The computes that live."""
        if self._alive is None:
            found = self.store.snapshot(keys.COMPUTES, keys_only=True).entries
            self.sized(len(found))
            self._alive = [keys.last(key) for key, entry in found.items() if entry.lease]
        return self._alive

    def known(self) -> Computes:
        """What the computes are called."""
        if self._known is None:
            from ecomp.scheduler.looking.hosts import computes  # for what is said of a few

            self._known = computes(self.store)
        return self._known

    def called(self, compute: str) -> str:
        """What a compute is called."""
        return self.known().called(compute)

    def is_ours(self, compute: str) -> bool:
        """Whether a provider that placement names is a compute of this cluster's."""
        return compute in self.known().remembered

    def still_ours(self) -> bool:
        """Whether nobody else has taken the attempt over; asking keeps it."""
        self.store.keep_alive(self.lease)  # whoever is at it for long is alive, or would not ask
        at_it = self.store.get(keys.attempt(self.wanted.instance))
        return at_it is not None and at_it.revision == self.revision

    def look_again(self) -> Offer:
        """The candidates, as they are by now."""
        self.store.keep_alive(self.lease)
        return allocations.candidates(self.placement, self.wanted.query or '')

    def released(self, instances: Collection[str]) -> int:
        """The highest generation at which anybody released what one of them held."""
        # Nobody has heard of a uuid that was made here.
        return highest_released(self.store, instances) if self.resume else 0

    def line(self) -> tuple[int, int]:
        """How many instances are being placed by those who began before us, and after us."""
        return in_line(self.store.snapshot(keys.ATTEMPTS), self.revision)


def _requests(wanted: SetOrder, claims: Claims, scheduled: str) -> dict[str, Request]:
    """What each instance's compute is asked for, as of the time it was `scheduled`."""
    decided = {'group': claims.membership, 'stages': {**wanted.stages, 'scheduled': scheduled}}

    def request(instance: str, candidate: Candidate) -> Request:
        why = Why(wanted.weigh, candidate.weight, claims.among)
        return Request(allocations=candidate.allocations, why=why, **wanted.orders[instance].parts(**decided))

    return {instance: request(instance, candidate) for instance, candidate in claims.placed.items()}


def _with(error: Unreachable, state: str) -> Unreachable:
    """The same error, that also says what state the request is in."""
    return type(error)(f'{error}; {state}', error.backend)
