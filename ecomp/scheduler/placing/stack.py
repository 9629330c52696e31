"""Deliver the changes of one `eschedule apply`: new instances and tombstones, all or none (rule: whole-set).

An instance's uuid is a hash of the stack's epoch and its place, so an apply that was killed is continued by the next
one: it takes over the claims, and delivers what is missing. Two concurrent ones collide at the key of their attempt.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

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
from ecomp.model.allocation import Allocations, Room, sum_allocations, sum_resources
from ecomp.model.apply import StackOrder
from ecomp.model.choose import Candidate, Offer, PlacementReason, add_usage, choose, distribute
from ecomp.model.group import AFFINITY, Group, Membership
from ecomp.model.guest import SharedUserData
from ecomp.model.json_object import load_object_or_empty
from ecomp.model.moves import Lot
from ecomp.model.order import Request
from ecomp.model.quota import describe_excesses, make_charge
from ecomp.model.record import ERROR
from ecomp.model.stack import Place, Stack, to_json
from ecomp.placement.allocations import read_candidates
from ecomp.placement.client import Placement
from ecomp.scheduler.changes.change import make_tombstone
from ecomp.scheduler.placing.claim import announce, deliver, read_settled_group
from ecomp.scheduler.placing.create import UNCHANGED, Attempt, DeliveryRefused, add_state, read_earlier_claims
from ecomp.scheduler.placing.place import MAX_REFUSALS, check_complete
from ecomp.scheduler.queries.find import InstanceEntries, reserve_names
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged
from ecomp.store.sharing import (
    Change,
    Excluded,
    charge_quota,
    commit_with_shared,
    join_group,
    load_quota,
    merge_changes,
    prepare_user_data,
    read_index,
    release_name,
    try_revoke,
)

# Instances of one part of a delivery, if etcd takes only 128 conditions: each needs five at most (record, name, group,
# and two for a replaced one in error), and all together three.
PART_SIZE = 25
# The error of a change that another process's change of the stack came before; a clause says what was changed.
_CHANGED = 'stack {}: another eschedule changed it{}. Try: the same command again'


class Removal(NamedTuple):
    """An instance to destroy, for its entry in the stack; `is_replaced` if a new one is delivered for the entry.

    `replaced_by` is the new instance if the old one is evacuated.
    """

    entry: str
    entries: InstanceEntries
    is_replaced: bool
    replaced_by: str | None = None


class NoRoom(NoCapacity):
    """There is no room for all of `instances`, uuids of one query; `placed` are the places that were found."""

    def __init__(self, message: str, instances: Sequence[str], placed: Sequence[Candidate]) -> None:
        super().__init__(message)
        self.instances = instances
        self.placed = placed


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
    revision = store.commit([Unchanged(key, previous_revision)], [Put(key, to_json(stack))])
    if revision is None:
        raise Conflict(_CHANGED.format(stack.name, f'; {UNCHANGED}'))
    failpoint('stack-begun')
    return revision


def check_previous(other: str, owner: Mapping[str, object], entry: Entry, outcome: str = UNCHANGED) -> None:
    """Raise Conflict, with our `outcome`, unless the process of the `other` attempt ran here and has ended."""
    facts = load_object_or_empty(entry.value)
    host, pid = str(facts.get('host'))[:80], facts.get('pid')
    if host == owner['host'] and type(pid) is int and pid > 0:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        except (PermissionError, OverflowError):
            pass
    raise Conflict(
        f'{other} is in flight, process {pid!r:.20} on {host}; {outcome}. Fix: repeat '
        f'the command when it has finished, or {keys.ATTEMPT_SECONDS} s after it was killed'
    )


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
            _make_stack_change(change, {}, removals), *(_make_removal(store, removal) for removal in removals)
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
    return [Unchanged(key, change.revision)], [Put(key, to_json(stack))]


def _make_removal(store: Store, removal: Removal) -> Change:
    """Return the change that destroys an instance, or removes the record of one in error."""
    entries = removal.entries
    record, entry = entries.record, entries.record_entry
    if record.state != ERROR or entries.request_entry is not None or entry is None:
        conditions, tombstone = make_tombstone(store, entries, removal.replaced_by)
        return conditions, [tombstone]
    unchanged = [Unchanged(entry.key, entry.revision), Unchanged(keys.request(record.compute, record.instance), 0)]
    # A replacement takes the name over.
    name = ([], []) if removal.is_replaced else release_name(store, entries.name, record.instance)
    return merge_changes((unchanged, [Delete(entry.key)]), name)


def deliver_with_removals(
    store: Store,
    deliveries: Sequence[tuple[str, Request]],
    attempt: Unchanged,
    removals: Sequence[Removal],
    make_own_change: Callable[[], Change],
    ends_attempt: bool,
) -> int:
    """Deliver (compute, request) pairs, and destroy the removed instances, in one transaction; see deliver().

    Names and group slots move from replaced instances to new ones. `make_own_change` adds quota and stack.
    Also returns 0 if others of a group or of the project came first.
    """
    removed = [removal.entries.record.instance for removal in removals]

    def make_shared_change() -> Change:
        places: dict[Membership, dict[str, str]] = {}
        for compute, request in deliveries:
            if request.group is not None:
                places.setdefault(request.group, {})[request.instance] = compute
        # An evacuation looks for deliveries of its uuids before it announces them, so a create may have come since.
        unused = [Unchanged(keys.request(compute, each.instance), 0) for compute, each in deliveries if each.replaces]
        return merge_changes(
            (unused, []),
            reserve_names(store, {request.instance: request.name for _, request in deliveries}, removed),
            *(join_group(store, group, members, removed) for group, members in places.items()),
            *(_make_removal(store, removal) for removal in removals),
            make_own_change(),
        )

    with suppress(Excluded):
        return deliver(store, deliveries, attempt, None, make_shared_change, ends_attempt=ends_attempt)
    return 0


def _revoke_records(store: Store, removals: Sequence[Removal]) -> None:
    """Revoke the leases of the records of instances in error, which were deleted."""
    for removal in removals:
        record_entry = removal.entries.record_entry
        if removal.entries.record.state == ERROR and record_entry is not None:
            try_revoke(store, record_entry.lease)


def apply_change(
    store: Store,
    backend: Future[tuple[Placement, Offer]],
    change: StackChange,
    owner: Mapping[str, object],
    rng: random.Random,
    now: Callable[[], str],
) -> dict[str, str]:
    """Place the new instances and destroy the removed ones, all or none; return {new instance: compute}.

    `backend` brings placement; its offer is not used. `now`: see create().

    Raises NoRoom, OverQuota, Conflict (a name, a group, another apply, or an instance that changed), ClaimedElsewhere,
    PlacementRefusal, Unreachable, with what was undone. Nothing is released while an outcome is unknown.
    """
    if change.order is None:
        remove_instances(store, change, change.removals)
        return {}
    try:
        reserve_names(store, change.order.instances, change.removed_instances)  # before anything is claimed
        lease = store.grant(keys.ATTEMPT_SECONDS)
    except Unreachable as error:
        raise add_state(error, UNCHANGED) from error
    movable = set(change.order.instances) if change.is_new else set[str]()
    attempt = StackAttempt(
        store, backend, change.order, not change.is_new, rng, None, lambda _: None, lease, movable, change=change
    )
    with attempt.undo_on_error():
        attempt.announce_alone(owner)
        claims = attempt.claim_all()
        failpoint('stack-claimed')
        return attempt.deliver_all(claims, now())
    raise AssertionError


def preview_change(
    store: Store, backend: Future[tuple[Placement, Offer]], change: StackChange, rng: random.Random
) -> dict[str, str]:
    """Return {new instance: compute} as apply_change() would place them now; write nothing, and ignore earlier claims.

    Raises NoRoom, OverQuota, Conflict, UsageError and errors of the backends.
    """
    assert change.order is not None  # the caller has new instances
    reserve_names(store, change.order.instances, change.removed_instances)
    attempt = StackAttempt(store, backend, change.order, False, rng, None, lambda _: None, 0, set(), change=change)
    attempt.placement, _ = backend.result()
    chosen = attempt.choose_all({}, Counter())
    return {instance: candidate.compute for instance, candidate in chosen.items()}


def distribute_lots(
    lots: Sequence[Lot],
    offers: Mapping[str, Offer],
    groups: Mapping[str, Group],
    alive: Collection[str],
    held: Collection[str],
    rng: random.Random,
) -> tuple[dict[str, Candidate], Lot | None]:
    """Choose a candidate for each instance that is not `held`, over one table of room; return also a lot that fails.

    Larger amounts are placed first, because small ones fit into the gaps. `groups` have the held members already.
    """
    rooms: dict[str, dict[str, Room]] = {}
    for offer in offers.values():
        for provider, room in offer.rooms.items():
            rooms.setdefault(provider, {}).update(room)
    chosen: dict[str, Candidate] = {}
    groups = dict(groups)

    def measure(lot: Lot) -> list[int]:
        candidates = offers[lot.query].candidates
        return sorted((-amount for amount in sum_allocations(candidates[0]).values()) if candidates else ())

    for lot in sorted(lots, key=lambda lot: (lot.membership is None, measure(lot))):
        unplaced = [instance for instance in lot.instances if instance not in held]
        group = groups.get(lot.membership.name) if lot.membership else None
        candidates = choose(offers[lot.query], alive, lot.weigh, rng, group).candidates
        if group is not None and group.is_undecided:
            ours = [other for other in lots if other.membership and other.membership.name == group.name]
            fitting = [each for each in candidates if _has_room_for_all(each.compute, ours, offers, rooms)]
            candidates = fitting or candidates
        batch = distribute(candidates, rooms, len(unplaced), lot.weigh, rng, group)
        chosen |= dict(zip(unplaced, batch, strict=False))
        if len(batch) < len(unplaced):
            return chosen, lot
        for candidate in batch:
            add_usage(candidate.allocations, rooms)
        if group is not None:
            groups[group.name] = group.with_members({each: chosen[each].compute for each in unplaced})
    return chosen, None


def _has_room_for_all(
    compute: str, lots: Sequence[Lot], offers: Mapping[str, Offer], rooms: Mapping[str, Mapping[str, Room]]
) -> bool:
    """Return True if the compute has room for all instances of these lots, each with its first candidate there."""
    usages: list[Allocations] = []
    for lot in lots:
        first = next((each for each in offers[lot.query].candidates if compute in each), None)
        if first is None:
            return False
        usages += [first] * len(lot.instances)
    remaining = {provider: dict(rooms.get(provider, {})) for usage in usages for provider in usage}
    return all(add_usage(usage, remaining) for usage in usages)


@dataclass
class StackAttempt(Attempt):
    """The attempt of one apply: it claims for several queries and groups, and delivers one change of the stack."""

    change: StackChange = field(kw_only=True)
    delivered_count: int = 0
    alternative: str = ''  # the uuid follows from the stack

    def undo(self) -> str:
        """Undo as Attempt does; if a part was delivered, return how many instances exist."""
        outcome = super().undo()
        return f'{self.delivered_count} of {self.order.count} new instances exist' if self.delivered_count else outcome

    @property
    def stack_order(self) -> StackOrder:
        assert self.change.order is not None  # apply_change() makes no attempt without one
        return self.change.order

    def announce_alone(self, owner: Mapping[str, object]) -> None:
        """Write the attempt's key; Conflict if another attempt is in flight, or the stack's key has changed."""
        value = {'version': 1, 'instances': list(self.order.instances), 'query': None, **owner}

        def check(entry: Entry) -> None:
            check_previous(f'stack {self.change.stack.name}: another apply', owner, entry)
            self.movable.clear()  # it may have claimed for the same uuids (rule: claim-stays)

        self.revision = announce(self.store, self.lease, self.order.instance, value, True, check)
        entry = self.store.get(keys.stack(self.change.stack.name))
        if entry is None or entry.revision != self.change.revision:
            raise DeliveryRefused(_CHANGED.format(self.change.stack.name, ''))

    def claim_all(self) -> dict[str, Candidate]:
        """Claim a place for each instance; NoRoom names those for which there is none.

        Claims of an attempt that was killed are taken over. A lost race is repeated with new answers of placement.
        """
        order = self.stack_order
        self.placement, _ = self.backend.result()
        failpoint('stack-announced')
        held = self._take_over_all()
        refusals = Counter[frozenset[str]]()
        while True:
            try:
                chosen = self.choose_all(held, refusals)
            except NoCapacity:  # the missing room may be a newer attempt's claim for the same instances
                if self.is_attempt_ours():
                    raise
                raise DeliveryRefused(_CHANGED.format(self.change.stack.name, '')) from None
            self.attempted += [instance for instance in chosen if instance not in self.attempted]
            claimed = self.claimer.claim_what_fits(chosen) if chosen else set()
            held |= {instance: chosen[instance] for instance in claimed}
            if len(held) == order.count:
                return held
            refusals.update({frozenset(chosen[instance].allocations) for instance in chosen.keys() - claimed})
            self.store.keep_alive(self.lease)
            for lot in self.lots:  # a new group of one compute has to try another one with all its members
                if self._is_undecided(lot) and not set(lot.instances) <= held.keys():
                    held = {each: candidate for each, candidate in held.items() if each not in lot.instances}

    def choose_all(self, held: Mapping[str, Candidate], refusals: Mapping[frozenset[str], int]) -> dict[str, Candidate]:
        """Query placement, and choose a candidate for each instance that is not held; NoRoom, OverQuota."""
        offers = {lot.query: self._read_offer(lot.query, refusals) for lot in self.lots}
        places = {instance: candidate.compute for instance, candidate in held.items()}
        joined = {name: group.with_members(self._list_members(name, places)) for name, group in self.groups.items()}
        chosen, unplaced = distribute_lots(self.lots, offers, joined, self.read_alive(), held, self.rng)
        if unplaced is not None:
            raise self._make_no_room(unplaced, chosen, [*held.values(), *chosen.values()])
        for candidate in chosen.values():
            check_complete(candidate.allocations)
        self._check_quota({**held, **chosen})
        return chosen

    def _read_offer(self, query: str, refusals: Mapping[frozenset[str], int]) -> Offer:
        """Query placement; leave out the candidates that it refused MAX_REFUSALS times when they were claimed."""
        offer = read_candidates(self.placement, query)
        usable = [each for each in offer.candidates if refusals.get(frozenset(each), 0) < MAX_REFUSALS]
        return offer._replace(candidates=usable)

    def deliver_all(self, claims: Mapping[str, Candidate], scheduled_at: str) -> dict[str, str]:
        """Deliver the claims, write the tombstones, revoke the lease; return {instance: compute}.

        Raises DeliveryRefused, Conflict (a name).
        """
        self._put_user_data()
        requests = [
            Request(
                allocations=claims[instance].allocations,
                why=PlacementReason(desired.weigh, claims[instance].weight, max(len(self.read_alive()), 1)),
                **desired.order.copy_fields(
                    group=self._settle(desired.order.group), stages={**desired.order.stages, 'scheduled': scheduled_at}
                ),
            )
            for instance, desired in self.stack_order.members.items()
        ]
        try:
            self._deliver_part(requests, claims, self.change.removals)
        except TooManyOperations:
            self._deliver_in_parts(requests, claims)
        failpoint('stack-delivered')
        _revoke_records(self.store, self.change.removals)
        try_revoke(self.store, self.lease)
        return {instance: candidate.compute for instance, candidate in claims.items()}

    def _deliver_in_parts(self, requests: Sequence[Request], claims: Mapping[str, Candidate]) -> None:
        """Deliver PART_SIZE instances at a time to an etcd with its default limit; the last part ends the attempt."""
        replaced = {removal.entry: removal for removal in self.change.removals if removal.is_replaced}
        others = [removal for removal in self.change.removals if not removal.is_replaced]
        self.change = remove_instances(self.store, self.change, others)
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
        deliveries = [(claims[request.instance].compute, request) for request in requests]
        computes = {request.stack: compute for compute, request in deliveries if request.stack}

        def make_own_change() -> Change:
            resources = {request.instance: request.resources for request in requests}
            return merge_changes(
                charge_quota(self.store, self.order.project_id, resources),
                _make_stack_change(self.change, computes, removals),
            )

        revision = deliver_with_removals(self.store, deliveries, self.condition, removals, make_own_change, is_last)
        if not revision:
            raise DeliveryRefused(_CHANGED.format(self.change.stack.name, ''))
        self.change = replace(self.change, stack=self.change.stack.with_delivered(computes), revision=revision)

    def _put_user_data(self) -> None:
        """Store the user-data that the new instances refer to, each content once."""
        for shared in self.change.user_data:
            puts, lease = prepare_user_data(self.store, shared)
            try:
                self.store.commit([], puts)
            except EcompError:
                try_revoke(self.store, lease)
                raise

    @cached_property
    def lots(self) -> list[Lot]:
        """The lots of the order, those with a group of one compute first."""
        instances: dict[tuple[str, Membership | None, str], list[str]] = {}
        for instance, desired in self.stack_order.members.items():
            key = (desired.order.query or '', desired.order.group, desired.weigh)
            instances.setdefault(key, []).append(instance)
        lots = [Lot(*key, tuple(names)) for key, names in instances.items()]
        return sorted(lots, key=lambda lot: lot.membership is None or lot.membership.policy != AFFINITY)

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups, read once, new ones unwritten, without removed instances and ours. Errors as read_terms()."""
        groups = {}
        for lot in self.lots:
            settled = read_settled_group(self.store, lot.membership)
            if settled is not None:
                groups[settled.name] = settled.without_members(*self.change.removed_instances, *self.order.instances)
        return groups

    def _settle(self, membership: Membership | None) -> Membership | None:
        """Return the group of an order with its policy."""
        return None if membership is None else self.groups[membership.name].membership

    def _list_members(self, group: str, places: Mapping[str, str]) -> dict[str, str]:
        """Return those of `places` {instance: compute} that are of this group."""
        orders = self.stack_order.orders
        return {each: compute for each, compute in places.items() if orders[each].group_name == group}

    def _is_undecided(self, lot: Lot) -> bool:
        """Return True for a strict affinity group without members, and so without a compute."""
        group = self.groups.get(lot.membership.name) if lot.membership else None
        return group is not None and group.is_undecided

    def _take_over_all(self) -> dict[str, Candidate]:
        """Take over the claims of an earlier attempt; ClaimedElsewhere if one cannot be used."""
        if self.movable:  # the stack is new, and no other attempt has had its uuids
            return {}
        self._check_unused()
        earlier: dict[str, Candidate] = {}
        elsewhere: dict[str, str] = {}
        for lot in self.lots:
            group = self.groups.get(lot.membership.name) if lot.membership else None
            usable, others = read_earlier_claims(self.placement, lot.instances, lot.query, self.read_alive(), group)
            earlier |= usable
            elsewhere |= others
        if elsewhere:
            raise ClaimedElsewhere(elsewhere, '')
        self.unclaimed = set(self.order.instances) - earlier.keys()
        held = self.placer.take_over(earlier)
        if len(held) < len(earlier):
            raise ClaimedElsewhere({each: earlier[each].compute for each in earlier.keys() - held.keys()}, '')
        return held

    def _check_unused(self) -> None:
        """Raise Conflict if a new uuid was delivered before: after a restore of etcd the stack's key may be old."""
        index, key = read_index(self.store), keys.stack(self.change.stack.name)
        for instance in self.order.instances:
            if instance in index.requests or instance in index.records:
                problem = f'{key} is older than its instance {instance}, as after a restore of etcd; {UNCHANGED}'
                again = f'if it refuses again, run `etcdctl del {key}` first, and the command restores the key'
                raise Conflict(f'{problem}. Try: the same command again; {again}')

    def _check_quota(self, claims: Mapping[str, Candidate]) -> None:
        """Raise OverQuota if the project may not have all of these."""
        quota = load_quota(self.store, self.order.project_id)[0]
        charge = sum_resources(make_charge(sum_allocations(candidate.allocations)) for candidate in claims.values())
        if quota is not None and (excess := quota.list_excesses(charge)):
            raise OverQuota(describe_excesses(quota.project, excess))

    def _make_no_room(self, lot: Lot, chosen: Mapping[str, Candidate], placed: Sequence[Candidate]) -> NoRoom:
        """Make the refusal, which names the member and how many of it have a place."""
        orders = [self.stack_order.orders[instance] for instance in lot.instances]
        members = list(dict.fromkeys(order.stack.member for order in orders if order.stack))
        fitting = sum(instance in chosen for instance in lot.instances)
        room = f'there is room for {fitting} of {len(orders)}' if fitting else 'no compute has room for it'
        return NoRoom(f'{", ".join(members)}: {room}; nothing was created', lot.instances, placed)
