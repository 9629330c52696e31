"""Deliver the new instances and tombstones of one `eschedule apply` (rule: whole-set).

An instance's uuid is a hash of the stack's epoch and its place. So the next apply continues one that was killed: it
takes over the claims, and delivers what is missing. Two concurrent ones collide at their attempt's key.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from ecomp.errors import ClaimedElsewhere, Conflict, EcompError, NoCapacity, OverQuota
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import sum_allocations, sum_resources
from ecomp.model.apply import StackOrder
from ecomp.model.assign import Lot, Planner
from ecomp.model.choose import Candidate
from ecomp.model.group import Group, Membership
from ecomp.model.order import Order, Request, make_request
from ecomp.model.quota import describe_excesses, make_charge
from ecomp.model.stack import Place, Stack
from ecomp.model.states import ERROR
from ecomp.model.stored import encode
from ecomp.model.user_data import SharedUserData
from ecomp.placement.allocations import Requester, read_candidates
from ecomp.scheduler.placing.claim import read_settled_group, reserve_names
from ecomp.scheduler.placing.offer import Backend
from ecomp.scheduler.placing.session import (
    UNCHANGED,
    DeliveryRefused,
    NoRoom,
    OldInstance,
    Scheduler,
    Session,
    add_unchanged,
    make_removal,
    require_complete,
    require_ended,
)
from ecomp.shared.attempts import list_leased
from ecomp.shared.ends import prepare_user_data
from ecomp.shared.names import Change, Excluded, charge_quota, commit_with_shared, load_quota, merge_changes, try_revoke
from ecomp.shared.places import read_index
from ecomp.store.client import MAX_TRANSACTION_OPERATIONS, Entry, Put, Store, Unchanged

# The error of a change that another process's change of the stack came before; a clause says what was changed.
_RACE_LOST = 'stack {}: another eschedule changed it{}. Try: the same command again'


@dataclass(frozen=True)
class StackChange:
    stack: Stack
    # That of the stack's key.
    revision: int
    # None without new instances.
    order: StackOrder | None
    removals: Sequence[OldInstance] = ()
    # What the new instances refer to.
    user_data: Collection[SharedUserData] = ()
    # Whether this process wrote the stack's epoch.
    is_new: bool = False

    @property
    def removed_instances(self) -> list[str]:
        return [removal.entries.record.instance for removal in self.removals]


def write_stack(store: Store, stack: Stack, previous_revision: int) -> int:
    """Write the key of a new or stale stack and return its revision, or raise Conflict."""
    key = keys.stack(stack.name)
    revision = store.commit([Unchanged(key, previous_revision)], [Put(key, encode(stack, **store.make_stamp()))])
    if revision is None:
        raise Conflict(_RACE_LOST.format(stack.name, f'; {UNCHANGED}'))
    failpoint('stack-begun')
    return revision


def require_transaction_size(store: Store, stack_name: str, orders: Collection[Order], removed_count: int) -> None:
    """Raise TooManyOperations if etcd refuses a trial with as many conditions as are needed."""
    groups = {order.group.name for order in orders if order.group is not None}
    # Conditions: the attempt, the stack and the quota, a record and a name each, the groups, and what is removed.
    count = 3 + 2 * len(orders) + len(groups) + removed_count if orders else 0
    if count > MAX_TRANSACTION_OPERATIONS:
        # etcd counts the conditions before it compares anything.
        store.commit([Unchanged(keys.stack(stack_name), 0)] * count, [])


def remove_instances(store: Store, change: StackChange) -> None:
    """Write the tombstones of the removed instances in one transaction."""

    def make_change() -> Change:
        removals = (make_removal(store, removal) for removal in change.removals)
        return merge_changes(_make_stack_change(store, change, {}), *removals)

    if commit_with_shared(store, [], [], make_change) is None:
        raise Conflict(_RACE_LOST.format(change.stack.name, f'; {UNCHANGED}'))
    failpoint('stack-removed')
    _revoke_leases_of_error_records(store, change.removals)


def _make_stack_change(store: Store, change: StackChange, computes: Mapping[Place, str]) -> Change:
    key = keys.stack(change.stack.name)
    ended = [removal.entry for removal in change.removals if not removal.is_replaced]
    stack = change.stack.with_ended(ended).with_delivered(computes)
    return [Unchanged(key, change.revision)], [Put(key, encode(stack, **store.make_stamp()))]


def _revoke_leases_of_error_records(store: Store, removals: Sequence[OldInstance]) -> None:
    for removal in removals:
        record_entry = removal.entries.record_entry
        if removal.entries.record.state == ERROR and record_entry is not None:
            try_revoke(store, record_entry.lease)


class MembersRefused(NoCapacity):
    """There is no room for all of `instances`, only for the `places` that were found."""

    def __init__(self, message: str, instances: Sequence[str], places: Sequence[Candidate]) -> None:
        super().__init__(message)
        self.instances = instances
        self.places = places


def apply_change(scheduler: Scheduler, change: StackChange) -> dict[str, str]:
    """Place the new instances and destroy the removed ones, and return {new instance: compute}.

    Raises:
        MembersRefused, OverQuota: there is no room, or the quota is used up.
        Conflict: a name is taken, a group has another rule, another apply is in flight, or an instance has changed.
        ClaimedElsewhere: another attempt's claims cannot be taken over.
    """
    store, order = scheduler.store, change.order
    if order is None:
        remove_instances(store, change)
        return {}
    with add_unchanged():
        reserve_names(store, order.instances, change.removed_instances)  # before anything is claimed
    movable = set(order.instances) if change.is_new else set[str]()
    requester = Requester(order.user_id, order.project_id)
    session = Session(scheduler, order.instance, order.instances, requester, not change.is_new, movable=movable)
    application = _Application(session, _Target(store, change, order), change)
    with session.open():
        application.announce()
        claims = application.claim()
        failpoint('stack-claimed')
        return application.deliver(claims, scheduler.now())
    raise AssertionError


def preview_change(store: Store, backend: Backend, change: StackChange, rng: random.Random) -> dict[str, str]:
    """Return {new instance: compute} as apply_change() would place them without earlier claims."""
    order = change.order
    assert order is not None  # the caller has new instances
    reserve_names(store, order.instances, change.removed_instances)
    target, (placement, _) = _Target(store, change, order), backend.result()
    offers = {query: read_candidates(placement, query) for query in target.queries}
    living, troubled = list_leased(store, keys.COMPUTES), list_leased(store, keys.TROUBLES)
    assignment = Planner(offers, target.groups, living, rng, troubled=troubled).assign(target.lots)
    if assignment.reasons:
        raise target.make_refusal(NoRoom(assignment, {}, offers))
    require_complete(assignment.candidates.values())
    target.require_quota(assignment.candidates)
    return {instance: candidate.compute for instance, candidate in assignment.candidates.items()}


@dataclass
class _Target:
    """The new instances of a change, as lots and groups."""

    store: Store
    change: StackChange
    order: StackOrder

    @cached_property
    def lots(self) -> list[Lot]:
        of_lots: dict[Lot, list[str]] = {}
        for instance, (order, weigh, *_) in self.order.members.items():
            lot = Lot(order.query or '', order.group, weigh, (), image=order.image or '')
            of_lots.setdefault(lot, []).append(instance)
        return [lot._replace(instances=tuple(instances)) for lot, instances in of_lots.items()]

    @property
    def queries(self) -> list[str]:
        return list(dict.fromkeys(lot.query for lot in self.lots))

    @cached_property
    def groups(self) -> dict[str, Group]:
        """{name: group} of the lots, without the removed and the new instances."""
        groups = {}
        for lot in self.lots:
            settled = read_settled_group(self.store, lot.membership)
            if settled is not None:
                groups[settled.name] = settled.without_members(*self.change.removed_instances, *self.order.instances)
        return groups

    def get_settled(self, membership: Membership | None) -> Membership | None:
        return None if membership is None else self.groups[membership.name].membership

    def require_quota(self, claims: Mapping[str, Candidate]) -> None:
        quota = load_quota(self.store, self.order.project_id)[0]
        charge = sum_resources(make_charge(sum_allocations(candidate.allocations)) for candidate in claims.values())
        if quota is not None and (excess := quota.list_excesses(charge)):
            raise OverQuota(describe_excesses(quota.project, excess))

    def make_refusal(self, no_room: NoRoom) -> MembersRefused:
        assignment, orders = no_room.assignment, self.order.orders
        reason = next(iter(assignment.reasons.values()))
        instances = [each for each in orders if assignment.reasons.get(each) == reason]
        members = [place.member for each in instances if (place := orders[each].stack)]
        message = f'{", ".join(dict.fromkeys(members))}: {reason}; nothing was created'
        return MembersRefused(message, instances, no_room.places)


@dataclass
class _Application:
    session: Session
    target: _Target
    change: StackChange

    def announce(self) -> None:
        session, name = self.session, self.change.stack.name

        def check(entry: Entry) -> None:
            require_ended(f'stack {name}: another apply', session.scheduler.owner, entry)
            session.movable.clear()  # it may have claimed for the same uuids (rule: claim-stays)

        session.announce(None, check)
        entry = session.store.get(keys.stack(name))
        if entry is None or entry.revision != self.change.revision:
            raise self._make_race_error()

    def claim(self) -> dict[str, Candidate]:
        session = self.session
        session.placement  # noqa: B018  # waits for it
        failpoint('stack-announced')
        held = self._take_over()
        try:
            target, offers = self.target, dict.fromkeys(self.target.queries)
            return session.place(lambda *_: target.lots, target.groups, offers, held, target.require_quota)
        except NoCapacity as error:  # the missing room may be a newer attempt's claim for the same instances
            if not session.is_attempt_ours():
                raise self._make_race_error() from None
            if isinstance(error, NoRoom):
                raise self.target.make_refusal(error) from error
            raise

    def deliver(self, claims: Mapping[str, Candidate], scheduled_at: str) -> dict[str, str]:
        self._put_user_data()
        store, order, deliveries = self.session.store, self.target.order, list[tuple[str, Request]]()
        living_count = max(len(self.session.read_alive()), 1)
        for instance, desired in order.members.items():
            candidate, stages = claims[instance], {**desired.order.stages, 'scheduled': scheduled_at}
            group = self.target.get_settled(desired.order.group)
            request = make_request(desired.order, candidate, desired.weigh, living_count, group=group, stages=stages)
            deliveries.append((candidate.compute, request))
        computes = {request.stack: compute for compute, request in deliveries if request.stack}
        resources = {request.instance: request.resources for _, request in deliveries}

        def make_own_change() -> Change:
            charge = charge_quota(store, order.project_id, resources)
            return merge_changes(charge, _make_stack_change(store, self.change, computes))

        revision = 0
        with suppress(Excluded):
            revision = self.session.deliver(deliveries, make_own_change, self.change.removals)
        if not revision:
            raise self._make_race_error()
        failpoint('stack-delivered')
        _revoke_leases_of_error_records(store, self.change.removals)
        try_revoke(store, self.session.lease)
        return {instance: candidate.compute for instance, candidate in claims.items()}

    def _put_user_data(self) -> None:
        for shared in self.change.user_data:
            puts, lease = prepare_user_data(self.session.store, shared)
            try:
                self.session.store.commit([], puts)
            except EcompError:
                try_revoke(self.session.store, lease)
                raise

    def _take_over(self) -> dict[str, Candidate]:
        if self.session.movable:  # the stack is new, and no other attempt has had its uuids
            return {}
        self._require_unused()
        held, elsewhere = self.session.take_over(self.target.lots, self.target.groups, 0)
        if elsewhere:
            raise ClaimedElsewhere(elsewhere, '')
        return held

    def _require_unused(self) -> None:
        index, key = read_index(self.session.store), keys.stack(self.change.stack.name)
        for instance in self.target.order.instances:
            if instance in index.requests or instance in index.records:
                problem = f'{key} is older than its instance {instance}, as after a restore of etcd; {UNCHANGED}'
                again = f'if it refuses again, run `etcdctl del {key}` first, and the command restores the key'
                raise Conflict(f'{problem}. Try: the same command again; {again}')

    def _make_race_error(self) -> DeliveryRefused:
        return DeliveryRefused(_RACE_LOST.format(self.change.stack.name, ''))
