"""Claim candidates for instances, and deliver what was claimed.

Rules 1 and 3 of the protocol: an unknown outcome is read back; a claim is released only as it was read, and only
while no other attempt is in flight for the same instance.

What instances share with others (names, a group, a quota) is checked before a place is sought, and decided in the
transaction that delivers (rule 7). Whoever holds the attempt may deliver: the transaction compares the attempt's key
and drops it. So nothing is delivered twice, nor after the attempt is known to be gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ecomp.errors import (
    Conflict,
    ConsumerConflict,
    EcompError,
    GenerationConflict,
    NoCapacity,
    OverQuota,
    PlacementRefusal,
    UnknownOutcome,
    UsageError,
)
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import Allocations, Resources
from ecomp.model.choose import Candidate
from ecomp.model.group import Group, Membership, settle
from ecomp.model.guest import SharedUserData
from ecomp.model.json_object import dump
from ecomp.model.order import Order, Request, announced, to_json
from ecomp.model.quota import Quota, charge, refusal, times
from ecomp.model.text import did_you_mean
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import claim, in_short, release
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Put, Store, Unchanged, being_taken, withdraw
from ecomp.store.sharing import Change, commit_with, group, note_released, quota


class Terms(NamedTuple):
    """The group without those who are about to join it, and the quota, as they were a moment ago; None: none."""

    group: Group | None
    quota: Quota | None

    def room(self, resources: Resources, count: int, minimum: int) -> int:
        """How many the quota allows of so many, and at least the minimum; OverQuota."""
        if self.quota is None:
            return count
        found = self.quota.room(charge(resources), count)
        if found < minimum:
            excess = self.quota.excess(times(charge(resources), minimum))
            raise OverQuota(refusal(self.quota.project, excess))
        return found


def terms_of(store: Store, wanted: Order, instances: Collection[str]) -> Terms:
    """Read the group and the quota that these instances of an order will be counted in.

    Errors: UsageError, Conflict (the group has another policy).
    """
    theirs = settled(store, wanted.group)
    return Terms(theirs.without(*instances) if theirs is not None else None, quota(store, wanted.project_id)[0])


def settled(store: Store, wanted: Membership | None) -> Group | None:
    """Read the group that an order names, None for none. Errors: UsageError, Conflict (it is another)."""
    if wanted is None:
        return None
    there = group(store, wanted.name)[0]
    try:
        return settle(there, wanted)
    except UsageError as error:
        known = map(keys.last, store.snapshot(keys.GROUPS, keys_only=True).entries)
        raise UsageError(f'{error}{did_you_mean(wanted.name, known)}') from error


log = logging.getLogger(__name__)

BLOCK = 50
"""Instances that one call claims for: placement works at a call with one processor, 5 to 9 ms for each instance."""
AT_ONCE = 2
"""Calls that claim for a set at the same time. docker.sh's placement has a process for each processor."""


@dataclass(frozen=True)
class Claimer:
    """Claims for one attempt. `still_ours` is False once somebody else took it over.

    `above`: the generations that its claims get are higher, see allocations.claim(); 0 where nobody else can have
    claimed.
    `called` says what a compute is called. `movable` are the instances whose claim the attempt made itself, so that it
    may move it to another compute. `foreign` are those whose claim another attempt made: claiming on that claim once
    more does not make them movable.
    """

    placement: Placement
    user_id: str
    project_id: str
    still_ours: Callable[[], bool]
    above: Callable[[Collection[str]], int] = lambda _: 0
    called: Callable[[str], str] = str
    movable: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)

    def claim_what_fits(self, wanted: Mapping[str, Candidate]) -> set[str]:
        """Claim for all of them at once or, where placement has no room for one, for as many as it can.

        The instances that hold their candidate now. Errors, none while a call is under way: Unreachable, Conflict,
        PlacementRefusal.
        """
        parts = blocks(wanted)
        if len(parts) == 1:
            return self._claim_what_fits(wanted)
        from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait  # for large sets

        threads = ThreadPoolExecutor(AT_ONCE, 'claim')
        calls = [threads.submit(self._claim_what_fits, each) for each in parts]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        except BaseException:
            # Ctrl-C waits for no answer: what is claimed after it the computes release (rule 4), as of one call.
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        threads.shutdown(cancel_futures=True)  # what was begun is waited for
        done = [call for call in calls if not call.cancelled()]
        if errors := [error for call in done if (error := call.exception()) is not None]:
            # What is not known of one block forbids to release anything (rule 1), whatever else went wrong.
            raise min(errors, key=lambda error: not isinstance(error, UnknownOutcome))
        return set().union(*(call.result() for call in done))

    def _claim_what_fits(self, wanted: Mapping[str, Candidate]) -> set[str]:
        try:
            self.claim({instance: candidate.allocations for instance, candidate in wanted.items()})
        except (NoCapacity, GenerationConflict, PlacementRefusal) as error:
            if len(wanted) == 1:
                ((instance, candidate),) = wanted.items()
                if isinstance(error, ConsumerConflict):
                    why = 'what it holds in placement is changed by somebody else all the time; try again'
                    raise Conflict(f'{instance}: {why}') from error
                if isinstance(error, PlacementRefusal) and self._is_there(candidate):
                    raise
                log.warning('compute %s: %s', self.called(candidate.compute), error)
                return set()
            # One that is full fails the whole, and which it was has no code of its own.
            return set().union(*(self._claim_what_fits(half) for half in halves(wanted)))
        failpoint('claimed-some')
        return set(wanted)

    def claim(self, wanted: Mapping[str, Allocations]) -> None:
        """Each instance holds exactly what is wanted for it when this returns: see allocations.claim()."""

        def check() -> None:
            self.check(in_short(wanted))

        claim(self.placement, wanted, self.user_id, self.project_id, check, lambda: self.above(wanted), self.movable)
        self.movable.update(wanted.keys() - self.foreign)

    def check(self, instances: str) -> None:
        """Conflict unless the attempt is ours still; `instances` is what the message says of it."""
        if not self.still_ours():
            raise Conflict(f'{instances}: another eschedule took it over, or this one was too slow')

    def _is_there(self, candidate: Candidate) -> bool:
        """False if one of its providers was removed, by `host forget`, since it was offered."""
        return all(providers.name(self.placement, each) is not None for each in candidate.allocations)


def blocks(wanted: Mapping[str, Candidate]) -> Sequence[Mapping[str, Candidate]]:
    """Parts to be claimed side by side: of at most BLOCK instances, but a compute's stay together.

    One part where two would claim of the same provider, a disk that computes share: the calls would only meet there.
    """
    parts: list[dict[str, Candidate]] = [{}]
    by_compute: dict[str, dict[str, Candidate]] = {}
    for instance, candidate in wanted.items():
        by_compute.setdefault(candidate.compute, {})[instance] = candidate
    for each in by_compute.values():
        if parts[-1] and len(parts[-1]) + len(each) > BLOCK:
            parts.append({})
        parts[-1].update(each)
    named = [{provider for candidate in part.values() for provider in candidate.allocations} for part in parts]
    return parts if sum(map(len, named)) == len(set().union(*named)) else [wanted]


def halves(wanted: Mapping[str, Candidate]) -> tuple[dict[str, Candidate], dict[str, Candidate]]:
    """Two parts of about the same size. A compute's instances stay together, as long as there are other computes."""
    by_compute: dict[str, list[str]] = {}
    for instance, candidate in wanted.items():
        by_compute.setdefault(candidate.compute, []).append(instance)
    groups = list(by_compute.values()) if len(by_compute) > 1 else [[instance] for instance in wanted]
    first: list[str] = groups[0]
    for batch in groups[1:-1]:
        if len(first) + len(batch) <= len(wanted) / 2:
            first = first + batch
    return (
        {instance: wanted[instance] for instance in wanted if instance in set(first)},
        {instance: wanted[instance] for instance in wanted if instance not in set(first)},
    )


def abandon(store: Store, placement: Placement, instances: Iterable[str], attempt: str, revision: int) -> bool:
    """Release what the instances hold, but for those that somebody else is at or that were delivered; True if all.

    Somebody else is another eschedule, or a compute that takes the same uuid out of a queue. `attempt` is the uuid of
    their attempt, `revision` that of its key when it was ours. Who is at them is asked once the generations are read
    (rule 11): a second eschedule of the same uuid writes its attempt first and claims after, so either that is seen
    here, or its claim moves a generation read here before.
    """

    def wanted(holding: Mapping[str, allocations.Consumer]) -> Collection[str]:
        at_it = store.get(keys.attempt(attempt))
        if at_it is not None and at_it.revision != revision:
            return holding
        taken = being_taken(store)
        return [
            instance
            for instance, held in holding.items()
            if instance in taken
            or store.read([key(each, instance) for each in held.allocations for key in (keys.request, keys.record)])
        ]

    return all(release(placement, instances, wanted, partial(note_released, store)).values())


USER_DATA_SECONDS = 7 * 24 * 3600
"""Seconds for which a set's user-data stays, for computes that are away: as long as the record of what failed."""


class DeliveryOutcome(NamedTuple):
    """The compute that got the request. `again`: it had been delivered before, and nothing was changed."""

    compute: str
    again: bool = False


def announce(store: Store, lease: int, attempt: str, value: Mapping[str, object], resume: bool) -> int:
    """Put the attempt; its revision. One that is there is taken over only if `resume`: the user gave the uuid."""
    key, text = keys.attempt(attempt), dump(value)
    for _ in range(3):
        before = store.get(key) if resume else None
        if before is not None:
            log.warning('%s: another eschedule is or was at it: taking over', attempt)
        try:
            revision = store.commit([Unchanged(key, before.revision if before else 0)], [Put(key, text, lease)])
        except UnknownOutcome:
            written = store.get(key)
            revision = written.revision if written and written.lease == lease else None
        if revision:
            if resume:
                _check_alone(store, attempt, value, revision)
            return revision
        resume = True
    raise Conflict(f'{attempt}: other eschedules are at this uuid all the time')


def _check_alone(store: Store, attempt: str, value: Mapping[str, object], revision: int) -> None:
    """Conflict if one that was here before is at some of these instances by another key: a set, or one of a set.

    Asked before it is looked what was delivered: of two each sees the other's key, or what it has delivered.
    """
    mine = announced(keys.attempt(attempt), dump(value).encode())
    for key, entry in store.snapshot(keys.ATTEMPTS).entries.items():
        is_older = entry.lease and entry.revision < revision and key != keys.attempt(attempt)
        if is_older and mine & announced(key, entry.value):
            raise Conflict(f'{attempt}: an eschedule at {keys.last(key)} is at it: try again when that has ended')


def deliver(
    store: Store,
    deliveries: Sequence[tuple[str, Request]],
    attempt: str,
    revision: int,
    user_data: SharedUserData | None,
    joining: Callable[[], Change],
) -> bool:
    """Deliver each request to its compute, in one transaction: True once all have them, False if certainly none has.

    `attempt` is the uuid of our attempt, `revision` that of its key. What `joining` says of names, group and quota is
    in the same transaction. `user_data` is what they refer to.
    Errors: those of `joining`, and then none has been delivered.
    """
    attempt_key = keys.attempt(attempt)
    conditions = [Unchanged(attempt_key, revision)]
    written, granted = put_user_data(store, user_data)
    operations: list[Put | Delete] = [Delete(attempt_key), *written]
    for compute, request in deliveries:
        conditions.append(Unchanged(keys.record(compute, request.instance), 0))
        operations.append(Put(keys.request(compute, request.instance), to_json(request)))
    try:
        return commit_with(store, conditions, operations, joining, granted) is not None
    except UnknownOutcome as error:
        first, instance = deliveries[0][0], deliveries[0][1].instance
        try:
            if withdraw(store, attempt_key, revision):
                return False
            # All or none: what became of one became of each.
            if store.get(keys.request(first, instance)) is not None:
                return True
            from ecomp.model.host import by_instance

            # The record of another compute is of what another eschedule of this uuid delivered.
            there = store.read([keys.record(first, instance), keys.old_record(instance)])
            return any(first in each.records for each in by_instance(there.items()).values())
        except EcompError:
            raise UnknownOutcome(f'{error}; whether {attempt} was delivered is not known') from error


def put_user_data(store: Store, data: SharedUserData | None) -> tuple[list[Put], int]:
    """The write of user-data that requests refer to, and the lease granted for it: 0 if the content has one already."""
    if data is None:
        return [], 0
    key = keys.user_data(data.sha256)
    there = store.snapshot(key, keys_only=True).entries.get(key)
    if there is not None and there.lease and store.keep_alive(there.lease) >= USER_DATA_SECONDS:
        return [Put(key, data.text, there.lease)], 0
    lease = store.grant(USER_DATA_SECONDS)
    return [Put(key, data.text, lease)], lease
