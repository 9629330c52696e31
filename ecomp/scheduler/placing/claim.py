"""Claim candidates for instances, and deliver what was claimed.

Rules 1 and 3: an unknown outcome is read back; a claim is released only if it is unchanged and no other attempt for its
instance is in flight. Rule 7: names, group and quota are checked first, and decided in the transaction that delivers.
That compares and deletes the attempt's key, so nothing is delivered twice, or after the attempt is known to be gone.
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
    """The group, without the order's instances, and the quota, as read; None: none."""

    group: Group | None
    quota: Quota | None

    def room(self, resources: Resources, count: int, minimum: int) -> int:
        """Count how many of `count` instances the quota allows; OverQuota below `minimum`."""
        if self.quota is None:
            return count
        allowed = self.quota.room(charge(resources), count)
        if allowed < minimum:
            excess = self.quota.excess(times(charge(resources), minimum))
            raise OverQuota(refusal(self.quota.project, excess))
        return allowed


def terms_of(store: Store, wanted: Order, instances: Collection[str]) -> Terms:
    """Read an order's group and quota. UsageError (no policy), Conflict (another), Unreadable."""
    existing = settled(store, wanted.group)
    return Terms(existing.without(*instances) if existing is not None else None, quota(store, wanted.project_id)[0])


def settled(store: Store, wanted: Membership | None) -> Group | None:
    """Read the group that an order names, or make it if it is missing; errors as read_terms()."""
    if wanted is None:
        return None
    existing = group(store, wanted.name)[0]
    try:
        return settle(existing, wanted)
    except UsageError as error:
        names = map(keys.last, store.snapshot(keys.GROUPS, keys_only=True).entries)
        raise UsageError(f'{error}{did_you_mean(wanted.name, names)}') from error


log = logging.getLogger(__name__)

# Instances claimed by one call: placement handles a call on one processor, in 5 to 9 ms for each instance.
BLOCK = 50
# Concurrent calls for a set: docker.sh's placement has a process for each processor.
AT_ONCE = 2


@dataclass(frozen=True)
class Claimer:
    """Claims for one attempt, while `is_attempt_ours` returns True.

    The generations of its claims exceed `read_highest_released` (0: no other process can have claimed), see
    allocations.claim(). The claims of `movable` instances were made by this attempt, so it may move them to other
    computes; those of `foreign` instances were made by another attempt, and stay so when they are claimed again.
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
        """Claim as many candidates as there is room for; return the instances that now hold theirs.

        Raises UnknownOutcome before any other error, Unreachable, ClaimedElsewhere, Conflict and PlacementRefusal, all
        of them after the calls in flight.
        """
        parts = blocks(wanted)
        if len(parts) == 1:
            return self._claim_what_fits(wanted)
        from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait  # for large sets

        threads = ThreadPoolExecutor(AT_ONCE, 'claim')
        calls = [threads.submit(self._claim_what_fits, part) for part in parts]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        except BaseException:
            # Ctrl-C does not wait for answers: computes release what is claimed after it (rule 4).
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        threads.shutdown(cancel_futures=True)  # calls in flight are waited for
        done = [call for call in calls if not call.cancelled()]
        if errors := [error for call in done if (error := call.exception()) is not None]:
            # An unknown outcome of one block comes first: it forbids any release (rule 1).
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
            # One full compute fails the whole call, and the answer does not say which.
            return set().union(*(self._claim_what_fits(half) for half in halves(wanted)))
        failpoint('claimed-some')
        return set(wanted)

    def claim(self, wanted: Mapping[str, Allocations]) -> None:
        """Claim until each instance holds exactly these allocations; errors as allocations.claim()."""

        def check() -> None:
            self.check(in_short(wanted))

        claim(self.placement, wanted, self.user_id, self.project_id, check, lambda: self.above(wanted), self.movable)
        self.movable.update(wanted.keys() - self.foreign)

    def check(self, instances: str) -> None:
        """Raise Conflict unless the attempt is ours; `instances` names it in the message."""
        if not self.still_ours():
            raise Conflict(f'{instances}: another eschedule took it over, or this one was too slow')

    def _is_there(self, candidate: Candidate) -> bool:
        """False if one of the candidate's providers was removed, by `host forget`, since the offer."""
        return all(providers.name(self.placement, provider) is not None for provider in candidate.allocations)


def blocks(wanted: Mapping[str, Candidate]) -> Sequence[Mapping[str, Candidate]]:
    """Split a claim into parts for concurrent calls; the instances of a compute stay together.

    There is one part if two would share a provider, such as a shared disk: their calls would conflict.
    """
    parts: list[dict[str, Candidate]] = [{}]
    by_compute: dict[str, dict[str, Candidate]] = {}
    for instance, candidate in wanted.items():
        by_compute.setdefault(candidate.compute, {})[instance] = candidate
    for candidates in by_compute.values():
        if parts[-1] and len(parts[-1]) + len(candidates) > BLOCK:
            parts.append({})
        parts[-1].update(candidates)
    sets = [{provider for candidate in part.values() for provider in candidate.allocations} for part in parts]
    return parts if sum(map(len, sets)) == len(set().union(*sets)) else [wanted]


def halves(wanted: Mapping[str, Candidate]) -> tuple[dict[str, Candidate], dict[str, Candidate]]:
    """Split a claim in two, between computes if there are several."""
    by_compute: dict[str, list[str]] = {}
    for instance, candidate in wanted.items():
        by_compute.setdefault(candidate.compute, []).append(instance)
    groups = list(by_compute.values()) if len(by_compute) > 1 else [[instance] for instance in wanted]
    first_half: list[str] = groups[0]
    for batch in groups[1:-1]:
        if len(first_half) + len(batch) <= len(wanted) / 2:
            first_half = first_half + batch
    return (
        {instance: wanted[instance] for instance in wanted if instance in set(first_half)},
        {instance: wanted[instance] for instance in wanted if instance not in set(first_half)},
    )


def abandon(store: Store, placement: Placement, instances: Iterable[str], attempt: str, revision: int) -> bool:
    """Release the instances' claims unless delivered or in use; True if all are released.

    In use: another process has taken over the attempt, whose key had this `revision`, or a compute takes the instance
    from a queue. Both are read after the generations (rule 11): a second eschedule with this uuid writes its attempt
    before it claims, so its attempt is seen here or its claim moves a generation. Raises the errors of etcd and
    placement.
    """

    def wanted(holding: Mapping[str, allocations.Consumer]) -> Collection[str]:
        attempt_entry = store.get(keys.attempt(attempt))
        if attempt_entry is not None and attempt_entry.revision != revision:
            return holding
        taken_now = being_taken(store)
        return [
            instance
            for instance, held in holding.items()
            if instance in taken_now
            or store.read(
                [key(provider, instance) for provider in held.allocations for key in (keys.request, keys.record)]
            )
        ]

    return all(release(placement, instances, wanted, partial(note_released, store)).values())


# Seconds for which a set's user-data stays, for computes that are away: as long as a failed instance's record.
USER_DATA_SECONDS = 7 * 24 * 3600


class DeliveryOutcome(NamedTuple):
    """The compute with the request; `is_repeated`: it was delivered before."""

    compute: str
    again: bool = False


def announce(store: Store, lease: int, attempt: str, value: Mapping[str, object], resume: bool) -> int:
    """Write the attempt's key on `lease`; return its revision.

    With `resume` (the user gave the uuid) an existing attempt is taken over. Raises Conflict if other processes keep
    taking it over, or an older attempt has one of these instances.
    """
    key, text = keys.attempt(attempt), dump(value)
    for _ in range(3):
        previous = store.get(key) if resume else None
        if previous is not None:
            log.warning('%s: another eschedule is or was at it: taking over', attempt)
        try:
            revision = store.commit([Unchanged(key, previous.revision if previous else 0)], [Put(key, text, lease)])
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
    """Raise Conflict if an older attempt by another key has an instance: a set and its member.

    Call it before looking for deliveries: of two attempts each then sees the other's key or its delivery.
    """
    ours = announced(keys.attempt(attempt), dump(value).encode())
    for key, entry in store.snapshot(keys.ATTEMPTS).entries.items():
        is_older = entry.lease and entry.revision < revision and key != keys.attempt(attempt)
        if is_older and ours & announced(key, entry.value):
            raise Conflict(f'{attempt}: an eschedule at {keys.last(key)} is at it: try again when that has ended')


def deliver(
    store: Store,
    deliveries: Sequence[tuple[str, Request]],
    attempt: str,
    revision: int,
    user_data: SharedUserData | None,
    joining: Callable[[], Change],
) -> bool:
    """Deliver all requests in one transaction: True once it is done, False if it is not.

    `revision` is that of our attempt's key. `make_shared_change` returns the change of names, group and quota; it is
    part of the transaction, as is the `user_data` of a set. Raises the errors of `make_shared_change` and of etcd, with
    nothing delivered, and UnknownOutcome if an unknown outcome cannot be read back.
    """
    attempt_key = keys.attempt(attempt)
    conditions = [Unchanged(attempt_key, revision)]
    user_data_puts, granted = put_user_data(store, user_data)
    operations: list[Put | Delete] = [Delete(attempt_key), *user_data_puts]
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
            # All or none: one request stands for all.
            if store.get(keys.request(first, instance)) is not None:
                return True
            from ecomp.model.host import by_instance

            # A record of another compute comes from a delivery by another eschedule with this uuid.
            records = store.read([keys.record(first, instance), keys.old_record(instance)])
            return any(first in places.records for places in by_instance(records.items()).values())
        except EcompError:
            raise UnknownOutcome(f'{error}; whether {attempt} was delivered is not known') from error


def put_user_data(store: Store, data: SharedUserData | None) -> tuple[list[Put], int]:
    """Return the write of user-data and the lease granted for it: 0 if it has one already."""
    if data is None:
        return [], 0
    key = keys.user_data(data.sha256)
    existing = store.snapshot(key, keys_only=True).entries.get(key)
    if existing is not None and existing.lease and store.keep_alive(existing.lease) >= USER_DATA_SECONDS:
        return [Put(key, data.text, existing.lease)], 0
    lease = store.grant(USER_DATA_SECONDS)
    return [Put(key, data.text, lease)], lease
