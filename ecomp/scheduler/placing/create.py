"""Deliver requests for a placement query to computes: for one instance, or for a set."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ecomp.errors import ClaimedElsewhere, Conflict, NoCapacity, TooFew
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import Room, sum_allocations
from ecomp.model.assign import Lot, Planner
from ecomp.model.choose import Candidate, Offer, choose, describe_room, explain_no_candidate
from ecomp.model.group import Membership
from ecomp.model.order import Order, SetOrder, describe_difference, make_member_uuid, make_request, refuse_big_order
from ecomp.model.states import ERROR, GONE
from ecomp.placement.allocations import Requester
from ecomp.scheduler.placing.claim import DeliveryOutcome, Terms, read_terms, reserve_names
from ecomp.scheduler.placing.offer import Backend
from ecomp.scheduler.placing.sample import SampledPlacer
from ecomp.scheduler.placing.session import DeliveryRefused, NoRoom, Scheduler, Session, add_unchanged, require_complete
from ecomp.shared.attempts import MAX_OFFER_AGE_SECONDS, list_leased
from ecomp.shared.names import Excluded, charge_quota, try_revoke
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.model.host import Computes
    from ecomp.scheduler.queries.find import InstanceEntries

log = logging.getLogger(__name__)


def _find_deliveries(store: Store, order: SetOrder, resume: bool) -> dict[str, DeliveryOutcome]:
    """Return {instance: outcome} if `resume` and delivered before, else {}, or raise Conflict."""
    if not resume:  # the uuid was generated here
        return {}
    # All keys are listed once: searching for each instance of a set among thousands of computes takes too long.
    # The queues first: an instance that moves to a compute in between is found there.
    queued = {keys.get_queued_instance(key) for key in store.snapshot(keys.QUEUES, keys_only=True).entries}

    from ecomp.scheduler.queries.find import find
    from ecomp.shared.places import read_index

    key_index = read_index(store)

    def is_listed(instance: str) -> bool:
        return instance in queued or instance in key_index.requests or instance in key_index.records

    # One uuid cannot be an instance's and a set's.
    other_uuid = order.instance if order.count > 1 else make_member_uuid(order.instance, 1)
    if is_listed(other_uuid) and find(store, other_uuid, key_index) is not None:
        owner = 'an instance' if order.count > 1 else 'a set'
        raise Conflict(f'{order.instance}: is the uuid of {owner}. Fix: use another uuid')
    entries = {instance: find(store, instance, key_index) for instance in order.instances if is_listed(instance)}
    return {uuid: _confirm_delivered(each, order.orders[uuid]) for uuid, each in entries.items() if each is not None}


def _confirm_delivered(entries: InstanceEntries, order: Order) -> DeliveryOutcome:
    """Return the outcome of an earlier delivery, or raise Conflict if it is another order's."""
    if entries.queue_entry is not None:
        raise Conflict(f'{order.instance}: exists, and waits in a queue. Fix: use another uuid')
    require_matching(entries, order)
    return DeliveryOutcome(entries.record.compute, is_repeated=True)


REUSED_UUID = 'a uuid is never used twice. Fix: use another uuid'


def require_matching(entries: InstanceEntries, order: Order) -> None:
    """Raise Conflict unless the instance lives and was ordered alike."""
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
        raise Conflict(f'{instance}: exists, but was requested {mismatch}. Fix: use another uuid')


def create(
    scheduler: Scheduler,
    order: SetOrder,
    resume: bool,
    sample_above: int | None = None,
    on_cluster_size: Callable[[int], None] = lambda _: None,
) -> dict[str, DeliveryOutcome]:
    """Place the instances of an order, and return {instance: outcome} of those that are placed.

    With `resume` (the user gave the uuid) earlier deliveries are returned, if any, and no more placed. In a cluster of
    more than `sample_above` computes a few are tried first. Nothing is released while an outcome is unknown.

    Raises:
        NoCapacity: there is no room (TooFew: for a part of a set), or the quota is used up (OverQuota).
        UsageError: the set is too large for etcd, the query lacks what a guest needs, or placement refuses it.
        Conflict: the uuid or the name is used otherwise, or the attempt was taken over.
        ClaimedElsewhere: another attempt's claims cannot be taken over.
    """
    refuse_big_order(order)
    store, user = scheduler.store, Requester(order.user_id, order.project_id)
    with add_unchanged():
        delivered = _find_deliveries(store, order, resume)
        if delivered:
            return delivered
        terms = read_terms(store, order, order.instances)
        reserve_names(store, order.instances)  # before anything is claimed
    # No other process can have claimed for a uuid that was generated here.
    movable = set[str]() if resume else set(order.instances)
    cure = ', or use another uuid'
    session = Session(scheduler, order.instance, order.instances, user, resume, cure, on_cluster_size, movable=movable)
    creation = _Creation(session, order)
    with session.open():
        delivered = creation.announce()
        if delivered:
            try_revoke(store, session.lease)
            return delivered
        claims = creation.claim(terms, sample_above)
        while True:
            failpoint('claimed')
            try:
                return creation.deliver(claims, scheduler.now())
            except Excluded as excluded:
                # Others of its group or project were delivered first, so some of our places are not allowed now.
                claims = creation.claim_again(claims, excluded.admitted)
    raise AssertionError


class ClaimedSet(NamedTuple):
    """The claimed candidate of each instance, and the most computes that could have taken one."""

    candidates: Mapping[str, Candidate]
    terms: Terms
    candidate_count: int

    @property
    def membership(self) -> Membership | None:
        return None if self.terms.group is None else self.terms.group.membership


@dataclass(eq=False, repr=False)
class _Creation:
    session: Session
    order: SetOrder
    # The most computes, in any query, that could have taken an instance.
    candidate_count: int = 1
    # {instance: compute} of another attempt's claims: these instances are not placed.
    claimed_elsewhere: Mapping[str, str] = field(default_factory=dict)

    def announce(self) -> dict[str, DeliveryOutcome]:
        """Announce the attempt, and return the outcomes if another process has just delivered."""
        self.session.announce(self.order.query)
        # Another process may have delivered in between. From here on it cannot: a delivery needs the key we hold.
        return _find_deliveries(self.session.store, self.order, self.session.resume)

    def claim(self, terms: Terms, sample_above: int | None) -> ClaimedSet:
        session, order, resume = self.session, self.order, self.session.resume
        session.read_troubled()  # read while placement is queried
        if sample_above is None:
            session.read_alive()
        announced = time.monotonic()
        _, offer = session.scheduler.backend()
        failpoint('announced')
        if sample_above is not None and not resume:
            sampled = SampledPlacer(session, order)
            if placed := sampled.place(terms, sample_above):
                return ClaimedSet(placed, terms, sampled.fitting)
        if announced - offer.queried_at > MAX_OFFER_AGE_SECONDS:
            offer = self._refresh()  # a drain waits no longer than this for attempts
        if not resume:
            return self._place(offer, terms, {})
        for is_last_try in (False, False, True):
            placed = self._take_over(terms)
            planner = session.make_planner({order.query or '': offer}, terms.groups)
            room = planner.assign([make_lot(order, terms)._replace(minimum=0)]).candidates
            if len(placed) + len(room) < order.minimum:
                offer = self._refresh()  # room may have been released since the query
            try:
                return self._place(offer, terms, placed)
            except ClaimedElsewhere as error:
                # An overtaken attempt or a publishing compute claimed in between: take that over, never release it.
                session.unclaimed -= error.computes.keys()
                if is_last_try:
                    raise
        raise AssertionError

    def claim_again(self, claims: ClaimedSet, kept_instances: Collection[str]) -> ClaimedSet:
        kept, claimed = len(kept_instances), len(claims.candidates)
        log.debug('%s: other attempts were faster: %d of %d claims are kept', self.order.instance, kept, claimed)
        terms, offer = read_terms(self.session.store, self.order, self.order.instances), self._refresh()
        return self._place(offer, terms, {instance: claims.candidates[instance] for instance in kept_instances})

    def deliver(self, claims: ClaimedSet, scheduled_at: str) -> dict[str, DeliveryOutcome]:
        order, store, placed = self.order, self.session.store, claims.candidates
        decided = {'group': claims.membership, 'stages': {**order.stages, 'scheduled': scheduled_at}}
        orders, weigh, count = order.orders, order.weigh, claims.candidate_count
        requests = {uuid: make_request(orders[uuid], each, weigh, count, **decided) for uuid, each in placed.items()}
        deliveries = [(placed[instance].compute, request) for instance, request in requests.items()]
        resources = {instance: request.resources for instance, request in requests.items()}
        charge = partial(charge_quota, store, order.project_id, resources)
        if not self.session.deliver(deliveries, charge, user_data=order.shared_user_data):
            why = 'the connection broke, this eschedule was too slow, or another one took over this uuid'
            raise DeliveryRefused(f'{order.instance}: its request was not delivered: {why}')
        failpoint('delivered')
        self.session.finish(placed)
        return {request.instance: DeliveryOutcome(compute) for compute, request in deliveries}

    def _place(self, offer: Offer, terms: Terms, claims: Mapping[str, Candidate]) -> ClaimedSet:
        order = self.order

        def list_lots(planner: Planner, claims: Mapping[str, Candidate]) -> Sequence[Lot]:
            members = {instance: candidate.compute for instance, candidate in claims.items()}
            group = terms.group.with_members(members) if terms.group is not None else None
            candidates = planner.list_candidates(make_lot(order, terms), group)
            self.candidate_count = max(len({each.compute for each in candidates}), self.candidate_count)
            allowed = count_to_place([*candidates, *claims.values()], terms, order)
            count = min(allowed, order.count - len(self.claimed_elsewhere))
            others = [each for each in order.instances if each not in claims and each not in self.claimed_elsewhere]
            return [make_lot(order, terms, [*claims, *others[: max(count - len(claims), 0)]])]

        try:
            placed = self.session.place(list_lots, terms.groups, {order.query or '': offer}, claims)
        except NoCapacity as error:
            if self.session.resume:  # the missing room may be a newer attempt's claim for the same instances
                self.session.require_ours()
            if isinstance(error, NoRoom):
                is_raced = bool(self.session.attempted)
                raise make_refusal(order, terms, error, lambda: self.session.computes, is_raced) from error
            raise
        in_order = {instance: placed[instance] for instance in order.instances if instance in placed}
        return ClaimedSet(in_order, terms, self.candidate_count)

    def _take_over(self, terms: Terms) -> dict[str, Candidate]:
        spare, lot = self.order.count - self.order.minimum, make_lot(self.order, terms)
        held, self.claimed_elsewhere = self.session.take_over([lot], terms.groups, spare)
        if self.claimed_elsewhere:
            refusal = self.session.make_refusal(self.claimed_elsewhere)
            if len(self.claimed_elsewhere) > spare:
                raise refusal
            log.warning('%s', refusal)
        return held

    def _refresh(self) -> Offer:
        return self.session.read_offers([self.order.query or ''])[self.order.query or '']


def make_lot(order: SetOrder, terms: Terms, instances: Sequence[str] | None = None) -> Lot:
    membership = terms.group.membership if terms.group is not None else None
    names = order.instances if instances is None else instances
    return Lot(order.query or '', membership, order.weigh, tuple(names), order.minimum, order.image or '')


def count_to_place(candidates: Sequence[Candidate], terms: Terms, order: SetOrder) -> int:
    """Count the instances that the quota allows, or all if no candidate shows their size."""
    require_complete(candidates)
    if not candidates:
        return order.count
    return terms.count_allowed(sum_allocations(candidates[0].allocations), order.count, order.minimum)


def make_refusal(
    order: SetOrder, terms: Terms, no_room: NoRoom, get_computes: Callable[[], Computes], is_raced: bool = False
) -> NoCapacity:
    """Make the error, which is TooFew for a set with some places and NoCapacity otherwise."""
    if order.count > 1 and (places := no_room.places):
        required = '' if order.minimum == order.count else f', and at least {order.minimum} are required'
        return TooFew(describe_room(len(places), order.count, terms.group) + required, places)
    ((offer,), computes) = no_room.offers.values(), get_computes()
    candidates, skipped = choose(offer, computes.living, order.weigh, random.Random(0))
    # Another cloud may use this placement.
    ours, group = [each for each in skipped if each in computes.stored_hostnames], terms.group
    if is_raced and (group is None or any(group.explain_exclusion(each.compute) is None for each in candidates)):
        return NoCapacity('other requests took all the room first')
    return NoCapacity(explain_no_candidate(offer, ours, computes.living, group))


class RankedCompute(NamedTuple):
    """A compute to try, with its `rooms`, and the `amounts` of one instance on it."""

    compute: str
    hostname: str | None
    weight: float | None
    amounts: Mapping[str, int]
    rooms: Mapping[str, Room]
    instance_count: int


def plan(store: Store, backend: Backend, order: SetOrder, rng: random.Random) -> list[RankedCompute]:
    """Return the candidates of an order in the order of trying, without claiming any.

    A compute occurs once for each of its candidates. Raises what create() raises before it claims.
    """
    terms = read_terms(store, order, order.instances)
    from ecomp.scheduler.queries.computes import read_computes

    computes = read_computes(store)
    _, offer = backend.result()
    troubled = list_leased(store, keys.TROUBLES)
    planner = Planner({order.query or '': offer}, terms.groups, computes.living, rng, troubled=troubled)
    candidates = planner.list_candidates(make_lot(order, terms), terms.group)
    lot = make_lot(order, terms, list(order.instances)[: count_to_place(candidates, terms, order)])
    assignment = planner.assign([lot])
    if lot.is_short(assignment.candidates):
        raise make_refusal(order, terms, NoRoom(assignment, {}, planner.offers), lambda: computes)
    return [
        RankedCompute(
            candidate.compute,
            computes.find_hostname(candidate.compute),
            candidate.weight,
            candidate.allocations[candidate.compute],
            offer.rooms.get(candidate.compute, {}),
            sum(each is candidate for each in assignment.candidates.values()),
        )
        for candidate in candidates
    ]
