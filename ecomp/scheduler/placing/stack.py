"""Deliver the changes of one `eschedule apply`: new instances and tombstones, all or none (rule: whole-set).

An instance's uuid is a hash of the stack's epoch and its place, so an apply that was killed is continued by the next
one: it takes over the claims, and delivers what is missing. Two concurrent ones collide at the key of their attempt.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from ecomp.errors import (
    ClaimedElsewhere,
    Conflict,
    EcompError,
    NoCapacity,
    OverQuota,
    TooManyOperations,
    Unreachable,
)
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import sum_allocations, sum_resources
from ecomp.model.apply import StackOrder
from ecomp.model.assign import Lot, Planner
from ecomp.model.choose import Candidate, Offer, PlacementReason
from ecomp.model.group import Group, Membership
from ecomp.model.guest import SharedUserData
from ecomp.model.order import Request
from ecomp.model.quota import describe_excesses, make_charge
from ecomp.model.record import ERROR
from ecomp.model.stack import Place, Stack
from ecomp.model.stored import encode
from ecomp.placement.allocations import Requester, read_candidates
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import read_settled_group
from ecomp.scheduler.placing.session import (
    UNCHANGED,
    DeliveryRefused,
    NoRoom,
    Removal,
    Scheduler,
    Session,
    add_state,
    check_complete,
    check_previous,
    make_removal,
)
from ecomp.scheduler.queries.find import reserve_names
from ecomp.store.client import Entry, Put, Store, Unchanged, list_living
from ecomp.store.sharing import (
    Change,
    Excluded,
    charge_quota,
    commit_with_shared,
    load_quota,
    merge_changes,
    prepare_user_data,
    read_index,
    try_revoke,
)

# Instances of one part of a delivery, if etcd takes only 128 conditions: each needs five at most (record, name, group,
# and two for a replaced one in error), and all together three.
PART_SIZE = 25
# The error of a change that another process's change of the stack came before; a clause says what was changed.
_CHANGED = 'stack {}: another eschedule changed it{}. Try: the same command again'


@dataclass(frozen=True)
class StackChange:
    """What one apply changes. `revision` is that of the stack's key; `is_new`: this process wrote its epoch.

    `order` is None without new instances. `user_data` has what the new instances refer to.
    """

    stack: Stack
    revision: int
    order: StackOrder | None
    removals: Sequence[Removal] = ()
    user_data: Collection[SharedUserData] = ()
    is_new: bool = False

    @property
    def removed_instances(self) -> list[str]:
        return [removal.entries.record.instance for removal in self.removals]


def write_stack(store: Store, stack: Stack, previous_revision: int) -> int:
    """Write the key of a new or stale stack; return its revision, Conflict if another process wrote it."""
    key = keys.stack(stack.name)
    revision = store.commit([Unchanged(key, previous_revision)], [Put(key, encode(stack))])
    if revision is None:
        raise Conflict(_CHANGED.format(stack.name, f'; {UNCHANGED}'))
    failpoint('stack-begun')
    return revision


def remove_instances(store: Store, change: StackChange, removals: Sequence[Removal]) -> StackChange:
    """Write the tombstones of these instances, and that their entries ended; return what else is to be changed.

    On an etcd with the default limit it takes several transactions. Conflict if the stack or an instance has changed.
    """
    try:
        return _remove_part(store, change, removals)
    except TooManyOperations:
        for start in range(0, len(removals), PART_SIZE):
            change = _remove_part(store, change, removals[start : start + PART_SIZE])
        return change


def _remove_part(store: Store, change: StackChange, removals: Sequence[Removal]) -> StackChange:
    """Do what remove_instances() does, in one transaction."""

    def make_change() -> Change:
        return merge_changes(
            _make_stack_change(change, {}, removals), *(make_removal(store, removal) for removal in removals)
        )

    written = commit_with_shared(store, [], [], make_change)
    if written is None:
        raise Conflict(_CHANGED.format(change.stack.name, f'; {UNCHANGED}'))
    failpoint('stack-removed')
    _revoke_records(store, removals)
    remaining = [removal for removal in change.removals if removal not in removals]
    stack = change.stack.with_ended(removal.entry for removal in removals)
    return replace(change, stack=stack, revision=written, removals=remaining)


def _make_stack_change(change: StackChange, computes: Mapping[Place, str], removals: Sequence[Removal]) -> Change:
    """Return the change that notes deliveries and ends in the stack's key."""
    key = keys.stack(change.stack.name)
    ended = [removal.entry for removal in removals if not removal.is_replaced]
    stack = change.stack.with_ended(ended).with_delivered(computes)
    return [Unchanged(key, change.revision)], [Put(key, encode(stack))]


def _revoke_records(store: Store, removals: Sequence[Removal]) -> None:
    """Revoke the leases of the records of instances in error, which were deleted."""
    for removal in removals:
        record_entry = removal.entries.record_entry
        if removal.entries.record.state == ERROR and record_entry is not None:
            try_revoke(store, record_entry.lease)


class MembersRefused(NoCapacity):
    """There is no room for all of `instances`, uuids of one query; `placed` are the places that were found."""

    def __init__(self, message: str, instances: Sequence[str], placed: Sequence[Candidate]) -> None:
        super().__init__(message)
        self.instances = instances
        self.placed = placed


def apply_change(scheduler: Scheduler, change: StackChange) -> dict[str, str]:
    """Place the new instances and destroy the removed ones, all or none; return {new instance: compute}.

    The offer that the scheduler's backend brings is not used.

    Raises:
        MembersRefused, OverQuota: there is no room, or the quota is used up.
        Conflict: a name, a group, another apply, or an instance that changed (ClaimedElsewhere: is claimed).
        PlacementRefusal: placement refuses a query.
        Unreachable: with what was undone. Nothing is released while an outcome is unknown.
    """
    store, order = scheduler.store, change.order
    if order is None:
        remove_instances(store, change, change.removals)
        return {}
    try:
        reserve_names(store, order.instances, change.removed_instances)  # before anything is claimed
    except Unreachable as error:
        raise add_state(error, UNCHANGED) from error
    movable = set(order.instances) if change.is_new else set[str]()
    requester = Requester(order.user_id, order.project_id)
    session = Session(scheduler, order.instance, order.instances, requester, not change.is_new, movable=movable)
    application = _Application(session, _Wanted(store, change, order), change)
    session.describe_done = application.describe_done
    with session.open():
        application.announce()
        claims = application.claim()
        failpoint('stack-claimed')
        return application.deliver(claims, scheduler.now())
    raise AssertionError


def preview_change(
    store: Store, backend: Future[tuple[Placement, Offer]], change: StackChange, rng: random.Random
) -> dict[str, str]:
    """Return {new instance: compute} as apply_change() would place them now; write nothing, and ignore earlier claims.

    Raises MembersRefused, OverQuota, Conflict, UsageError and errors of the backends.
    """
    order = change.order
    assert order is not None  # the caller has new instances
    reserve_names(store, order.instances, change.removed_instances)
    wanted, (placement, _) = _Wanted(store, change, order), backend.result()
    offers = {query: read_candidates(placement, query) for query in wanted.queries}
    assignment = Planner(offers, wanted.groups, list_living(store), rng).assign(wanted.lots)
    if assignment.missing:
        raise wanted.make_refusal(NoRoom(assignment, {}, offers))
    for candidate in assignment.chosen.values():
        check_complete(candidate.allocations)
    wanted.check_quota(assignment.chosen)
    return {instance: candidate.compute for instance, candidate in assignment.chosen.items()}


@dataclass
class _Wanted:
    """The new instances of a change, as lots and groups."""

    store: Store
    change: StackChange
    order: StackOrder

    @cached_property
    def lots(self) -> list[Lot]:
        instances: dict[tuple[str, Membership | None, str], list[str]] = {}
        for instance, desired in self.order.members.items():
            key = (desired.order.query or '', desired.order.group, desired.weigh)
            instances.setdefault(key, []).append(instance)
        return [Lot(*key, tuple(names)) for key, names in instances.items()]

    @property
    def queries(self) -> list[str]:
        return list(dict.fromkeys(lot.query for lot in self.lots))

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups, read once, new ones unwritten, without removed instances and ours. Errors as read_terms()."""
        groups = {}
        for lot in self.lots:
            settled = read_settled_group(self.store, lot.membership)
            if settled is not None:
                groups[settled.name] = settled.without_members(*self.change.removed_instances, *self.order.instances)
        return groups

    def settle(self, membership: Membership | None) -> Membership | None:
        """Return the group of an order with its policy."""
        return None if membership is None else self.groups[membership.name].membership

    def check_quota(self, claims: Mapping[str, Candidate]) -> None:
        """Raise OverQuota if the project may not have all of these."""
        quota = load_quota(self.store, self.order.project_id)[0]
        charge = sum_resources(make_charge(sum_allocations(candidate.allocations)) for candidate in claims.values())
        if quota is not None and (excess := quota.list_excesses(charge)):
            raise OverQuota(describe_excesses(quota.project, excess))

    def make_refusal(self, no_room: NoRoom) -> MembersRefused:
        """Make the refusal, which names the first members without a place, and why."""
        assignment, orders = no_room.assignment, self.order.orders
        reason = next(iter(assignment.missing.values()))
        instances = [each for each in orders if assignment.missing.get(each) == reason]
        members = [place.member for each in instances if (place := orders[each].stack)]
        placed = [*no_room.held.values(), *assignment.chosen.values(), *assignment.insufficient.values()]
        return MembersRefused(f'{", ".join(dict.fromkeys(members))}: {reason}; nothing was created', instances, placed)


@dataclass
class _Application:
    """One run of apply_change(): lots for several queries and groups, and one change of the stack."""

    session: Session
    wanted: _Wanted
    change: StackChange
    delivered_count: int = 0

    def describe_done(self) -> str:
        """Return how many instances exist if a part was delivered, else ''."""
        return (
            f'{self.delivered_count} of {self.wanted.order.count} new instances exist' if self.delivered_count else ''
        )

    def announce(self) -> None:
        """Write the attempt's key; Conflict if another attempt is in flight, or the stack's key has changed."""
        session, name = self.session, self.change.stack.name

        def check(entry: Entry) -> None:
            check_previous(f'stack {name}: another apply', session.scheduler.owner, entry)
            session.movable.clear()  # it may have claimed for the same uuids (rule: claim-stays)

        session.announce(None, check)
        entry = session.store.get(keys.stack(name))
        if entry is None or entry.revision != self.change.revision:
            raise self._make_changed()

    def claim(self) -> dict[str, Candidate]:
        """Claim a place for each instance; MembersRefused names those for which there is none.

        Claims of an attempt that was killed are taken over.
        """
        session = self.session
        session.placement  # noqa: B018  # waits for it
        failpoint('stack-announced')
        held = self._take_over()
        try:
            offers = dict.fromkeys(self.wanted.queries)
            return session.place(lambda *_: self.wanted.lots, self.wanted.groups, offers, held, self.wanted.check_quota)
        except NoCapacity as error:  # the missing room may be a newer attempt's claim for the same instances
            if not session.is_attempt_ours():
                raise self._make_changed() from None
            if isinstance(error, NoRoom):
                raise self.wanted.make_refusal(error) from error
            raise

    def deliver(self, claims: Mapping[str, Candidate], scheduled_at: str) -> dict[str, str]:
        """Deliver the claims, write the tombstones, revoke the lease; return {instance: compute}.

        Raises DeliveryRefused, Conflict (a name).
        """
        self._put_user_data()
        requests = [
            Request(
                allocations=claims[instance].allocations,
                why=PlacementReason(desired.weigh, claims[instance].weight, max(len(self.session.read_alive()), 1)),
                **desired.order.copy_fields(
                    group=self.wanted.settle(desired.order.group),
                    stages={**desired.order.stages, 'scheduled': scheduled_at},
                ),
            )
            for instance, desired in self.wanted.order.members.items()
        ]
        try:
            self._deliver_part(requests, claims, self.change.removals)
        except TooManyOperations:
            self._deliver_in_parts(requests, claims)
        failpoint('stack-delivered')
        _revoke_records(self.session.store, self.change.removals)
        try_revoke(self.session.store, self.session.lease)
        return {instance: candidate.compute for instance, candidate in claims.items()}

    def _deliver_in_parts(self, requests: Sequence[Request], claims: Mapping[str, Candidate]) -> None:
        """Deliver PART_SIZE instances at a time to an etcd with its default limit; the last part ends the attempt."""
        replaced = {removal.entry: removal for removal in self.change.removals if removal.is_replaced}
        others = [removal for removal in self.change.removals if not removal.is_replaced]
        self.change = remove_instances(self.session.store, self.change, others)
        for start in range(0, len(requests), PART_SIZE):
            part = requests[start : start + PART_SIZE]
            entries = [request.stack.entry_name for request in part if request.stack]
            is_last = start + PART_SIZE >= len(requests)
            self._deliver_part(part, claims, [replaced[each] for each in entries if each in replaced], is_last)
            self.delivered_count += len(part)
            failpoint('stack-part')

    def _deliver_part(
        self,
        requests: Sequence[Request],
        claims: Mapping[str, Candidate],
        removals: Sequence[Removal],
        is_last: bool = True,
    ) -> None:
        """Deliver these requests and removals in one transaction, which ends the attempt if it is the last one."""
        store, project = self.session.store, self.wanted.order.project_id
        deliveries = [(claims[request.instance].compute, request) for request in requests]
        computes = {request.stack: compute for compute, request in deliveries if request.stack}
        resources = {request.instance: request.resources for request in requests}

        def make_own_change() -> Change:
            own = _make_stack_change(self.change, computes, removals)
            return merge_changes(charge_quota(store, project, resources), own)

        revision = 0
        with suppress(Excluded):
            revision = self.session.deliver(deliveries, make_own_change, removals, ends_attempt=is_last)
        if not revision:
            raise self._make_changed()
        self.change = replace(self.change, stack=self.change.stack.with_delivered(computes), revision=revision)

    def _put_user_data(self) -> None:
        """Store the user-data that the new instances refer to, each content once."""
        for shared in self.change.user_data:
            puts, lease = prepare_user_data(self.session.store, shared)
            try:
                self.session.store.commit([], puts)
            except EcompError:
                try_revoke(self.session.store, lease)
                raise

    def _take_over(self) -> dict[str, Candidate]:
        """Take over the claims of an earlier attempt; ClaimedElsewhere if one cannot be used."""
        if self.session.movable:  # the stack is new, and no other attempt has had its uuids
            return {}
        self._check_unused()
        held, elsewhere = self.session.take_over(self.wanted.lots, self.wanted.groups, 0)
        if elsewhere:
            raise ClaimedElsewhere(elsewhere, '')
        return held

    def _check_unused(self) -> None:
        """Raise Conflict if a new uuid was delivered before: after a restore of etcd the stack's key may be old."""
        index, key = read_index(self.session.store), keys.stack(self.change.stack.name)
        for instance in self.wanted.order.instances:
            if instance in index.requests or instance in index.records:
                problem = f'{key} is older than its instance {instance}, as after a restore of etcd; {UNCHANGED}'
                again = f'if it refuses again, run `etcdctl del {key}` first, and the command restores the key'
                raise Conflict(f'{problem}. Try: the same command again; {again}')

    def _make_changed(self) -> DeliveryRefused:
        return DeliveryRefused(_CHANGED.format(self.change.stack.name, ''))
