"""Announce an attempt, check its terms, claim candidates for it, and release the claims.

Names, group and quota are checked first and decided in the delivering transaction (rules: read-back,
release-by-generation, change-with-delivery).
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
    GenerationConflict,
    NoCapacity,
    OverQuota,
    PlacementRefusal,
    UnknownOutcome,
    UsageError,
    put_before_fix,
)
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import Allocations, Resources
from ecomp.model.choose import Candidate
from ecomp.model.group import Group, Membership, resolve_group
from ecomp.model.json_object import dump
from ecomp.model.order import NameOwner, Order, parse_attempt_instances
from ecomp.model.quota import Quota, describe_excesses, make_charge, multiply_amounts
from ecomp.model.states import ERROR, GONE
from ecomp.model.stored import encode
from ecomp.model.text import format_suggestion
from ecomp.placement import providers
from ecomp.placement.allocations import Requester, claim, release, summarize_instances
from ecomp.placement.client import Placement
from ecomp.shared.attempts import TAKEN, find_needed
from ecomp.shared.names import Change, load_group, load_quota, parse_name_owner
from ecomp.shared.notes import note_released
from ecomp.store.client import Entry, Put, Settlement, Store, Unchanged


class Terms(NamedTuple):
    """The group of an order without its instances, and the quota of its project, as read."""

    group: Group | None
    quota: Quota | None

    @property
    def groups(self) -> dict[str, Group]:
        return {} if self.group is None else {self.group.name: self.group}

    def count_allowed(self, resources: Resources, count: int, minimum: int) -> int:
        """Count how many of `count` instances the quota allows, or raise OverQuota below `minimum`."""
        if self.quota is None:
            return count
        allowed = self.quota.count_allowed(make_charge(resources), count)
        if allowed < minimum:
            excess = self.quota.list_excesses(multiply_amounts(make_charge(resources), minimum))
            raise OverQuota(describe_excesses(self.quota.project, excess))
        return allowed


def read_terms(store: Store, order: Order, instances: Collection[str]) -> Terms:
    group, (quota, _) = read_settled_group(store, order.group), load_quota(store, order.project_id)
    return Terms(group.without_members(*instances) if group is not None else None, quota)


def read_settled_group(store: Store, membership: Membership | None) -> Group | None:
    """Read the group that an order names, or make it without writing it, or raise UsageError."""
    if membership is None:
        return None
    existing = load_group(store, membership.name)[0]
    try:
        return resolve_group(existing, membership)
    except UsageError as error:
        names = map(keys.get_last_part, store.snapshot(keys.GROUPS, keys_only=True).entries)
        raise UsageError(put_before_fix(str(error), format_suggestion(membership.name, names))) from error


log = logging.getLogger(__name__)

# Instances claimed by one call: placement handles a call on one processor, in 5 to 9 ms for each instance.
MAX_INSTANCES_PER_CALL = 50
# Concurrent calls for a set: docker.sh's placement has a process for each processor.
MAX_CONCURRENT_CALLS = 2


@dataclass(eq=False, repr=False)
class Claimer:
    placement: Placement
    requester: Requester
    # Must return True before a call is repeated.
    is_attempt_ours: Callable[[], bool]
    # Generations of the claims exceed what this returns: see allocations.claim().
    read_highest_released: Callable[[Collection[str]], int] = lambda _: 0
    get_display_name: Callable[[str], str] = str
    # Instances whose claims this attempt made, and may move.
    movable: set[str] = field(default_factory=set)
    # Instances whose claims another attempt made: they never become movable.
    foreign: set[str] = field(default_factory=set)

    def claim_what_fits(self, candidates: Mapping[str, Candidate]) -> set[str]:
        """Claim the candidates for which there is room, and return the instances with a claim.

        Raises Conflict for a claim that others keep changing, PlacementRefusal if its providers exist.
        """
        parts = split_into_blocks(candidates)
        if len(parts) == 1:
            return self._claim_part(candidates)
        from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait  # for large sets

        threads = ThreadPoolExecutor(MAX_CONCURRENT_CALLS, 'claim')
        calls = [threads.submit(self._claim_part, part) for part in parts]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        except BaseException:
            # Ctrl-C does not wait for answers: computes release what is claimed after it (rule: orphaned-claim).
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        threads.shutdown(cancel_futures=True)  # calls in flight are waited for
        done = [call for call in calls if not call.cancelled()]
        if errors := [error for call in done if (error := call.exception()) is not None]:
            # An unknown outcome of one block comes first: it forbids any release (rule: read-back).
            raise min(errors, key=lambda error: not isinstance(error, UnknownOutcome))
        return set().union(*(call.result() for call in done))

    def _claim_part(self, candidates: Mapping[str, Candidate]) -> set[str]:
        """Claim in one call, else in halves, or raise Conflict or PlacementRefusal for an instance."""
        try:
            self.claim({instance: candidate.allocations for instance, candidate in candidates.items()})
        except (NoCapacity, GenerationConflict, PlacementRefusal) as error:
            if len(candidates) == 1:
                ((instance, candidate),) = candidates.items()
                if isinstance(error, ConsumerConflict):
                    why = 'other processes keep changing its claim in placement. Try: the same command again'
                    raise Conflict(f'{instance}: {why}') from error
                if isinstance(error, PlacementRefusal) and self._has_providers(candidate):
                    raise
                log.warning('compute %s: %s', self.get_display_name(candidate.compute), error)
                return set()
            # One full compute fails the whole call, and the answer does not say which.
            return set().union(*(self._claim_part(half) for half in split_in_half(candidates)))
        failpoint('claimed-some')
        return set(candidates)

    def claim(self, claims: Mapping[str, Allocations]) -> None:
        """Claim exactly these allocations, and make all instances but `foreign` ones `movable`."""
        movable_before = frozenset(self.movable)

        def read_min_generation() -> int:
            # The claims are made: they are ours to release, also if this read fails.
            self.movable.update(claims.keys() - self.foreign)
            return self.read_highest_released(claims)

        def check() -> None:
            self.require_ours(summarize_instances(claims))

        claim(self.placement, claims, self.requester, check, read_min_generation, movable_before)

    def require_ours(self, instances: str) -> None:
        if not self.is_attempt_ours():
            raise Conflict(f'{instances}: another eschedule took over this uuid, or this eschedule was too slow')

    def _has_providers(self, candidate: Candidate) -> bool:
        return all(providers.read_provider_name(self.placement, each) is not None for each in candidate.allocations)


def split_into_blocks(candidates: Mapping[str, Candidate]) -> Sequence[Mapping[str, Candidate]]:
    """Split a claim into blocks for concurrent calls, or not if blocks would share a provider."""
    parts: list[dict[str, Candidate]] = [{}]
    by_compute: dict[str, dict[str, Candidate]] = {}
    for instance, candidate in candidates.items():
        by_compute.setdefault(candidate.compute, {})[instance] = candidate
    for batch in by_compute.values():
        if parts[-1] and len(parts[-1]) + len(batch) > MAX_INSTANCES_PER_CALL:
            parts.append({})
        parts[-1].update(batch)
    # Two calls that share a provider would conflict.
    sets = [{provider for candidate in part.values() for provider in candidate.allocations} for part in parts]
    return parts if sum(map(len, sets)) == len(set().union(*sets)) else [candidates]


def split_in_half(candidates: Mapping[str, Candidate]) -> tuple[dict[str, Candidate], dict[str, Candidate]]:
    """Split a claim for two or more instances in two, between computes if there are several."""
    by_compute: dict[str, list[str]] = {}
    for instance, candidate in candidates.items():
        by_compute.setdefault(candidate.compute, []).append(instance)
    groups = list(by_compute.values()) if len(by_compute) > 1 else [[instance] for instance in candidates]
    first_half: list[str] = groups[0]
    for batch in groups[1:-1]:
        if len(first_half) + len(batch) <= len(candidates) / 2:
            first_half = first_half + batch
    halves: tuple[dict[str, Candidate], dict[str, Candidate]] = ({}, {})
    for instance, candidate in candidates.items():
        halves[instance not in first_half][instance] = candidate
    return halves


def abandon(store: Store, placement: Placement, instances: Iterable[str], attempt: str, revision: int) -> bool:
    """Release the claims of unused instances, and return whether all claims are released.

    An instance is used if it is delivered, if another process took over the attempt, or if a compute takes it from a
    queue.
    """
    own, made = Unchanged(keys.attempt(attempt), revision), (keys.request, keys.record)

    def find_kept(holding: Mapping[str, Allocations]) -> Collection[str]:
        return find_needed(store, holding, '', TAKEN, own, made)

    # The keys are read after the generations (rule: order-of-reading): we see the key of a second eschedule, or its
    # claim has changed a generation and our release fails.
    return all(release(placement, instances, find_kept, partial(note_released, store)).values())


class DeliveryOutcome(NamedTuple):
    """The compute that has the request, and whether it was delivered before."""

    compute: str
    is_repeated: bool = False


def announce(
    store: Store,
    lease: int,
    attempt: str,
    value: Mapping[str, object],
    resume: bool,
    require_ended: Callable[[Entry], object] = lambda _: None,
) -> int:
    """Write the attempt's key on `lease`, and return its revision.

    With `resume`, or from the second of three tries on, an existing attempt is taken over.
    """
    key, text = keys.attempt(attempt), dump(value)
    for _ in range(3):
        previous = store.get(key) if resume else None
        if previous is not None:
            require_ended(previous)
            log.warning('%s: another eschedule with this uuid has not finished: continuing in its place', attempt)
        condition = Unchanged(key, previous.revision if previous else 0)
        revision = store.commit([condition], [Put(key, text, lease)], Settlement())
        if revision:
            if resume:
                _require_oldest(store, attempt, value, revision)
            return revision
        resume = True
    raise Conflict(f'{attempt}: other eschedules keep taking over this uuid. Try: the same command again')


def _require_oldest(store: Store, attempt: str, value: Mapping[str, object], revision: int) -> None:
    # A set and its member may have the same instance. Deliveries are looked for after this: of two attempts each then
    # sees the other's key or its delivery.
    ours = parse_attempt_instances(keys.attempt(attempt), dump(value).encode())
    for key, entry in store.snapshot(keys.ATTEMPTS).entries.items():
        is_older = entry.lease and entry.revision < revision and key != keys.attempt(attempt)
        if is_older and ours & parse_attempt_instances(key, entry.value):
            problem = f'the older request {keys.get_last_part(key)} for this instance is still being placed'
            cure = 'repeat the command when the older request has been placed or refused'
            raise Conflict(f'{attempt}: {problem}. Fix: {cure}')


def reserve_names(store: Store, names: Mapping[str, str | None], old_instances: Collection[str] = ()) -> Change:
    """Return the change that gives names, or raise Conflict if another living instance has one."""
    named = {name: instance for instance, name in names.items() if name is not None}
    entries = store.read([keys.name(name) for name in named]) if named else {}
    conditions = [
        require_free_name(store, name, entries.get(keys.name(name)), {instance, *old_instances})
        for name, instance in named.items()
    ]
    return conditions, [Put(keys.name(name), encode(NameOwner(instance))) for name, instance in named.items()]


def require_free_name(store: Store, name: str, entry: Entry | None, owners: Collection[str]) -> Unchanged:
    """Return the condition to take a name, or raise Conflict if another living instance has it."""
    if entry is None:
        return Unchanged(keys.name(name), 0)
    from ecomp.scheduler.queries.find import find  # most names are free

    # A delivery writes the name and the instance in one transaction, so the name's instance exists before this read.
    owner = parse_name_owner(entry)
    current = find(store, owner) if owner not in owners else None
    if current is not None and current.record.state not in (GONE, ERROR):
        cure = 'wait until it is gone' if current.is_destroying else 'choose another name, or destroy the instance'
        state = ', which is being destroyed' if current.is_destroying else ''
        raise Conflict(f'{name}: this name belongs to instance {owner}{state}. Fix: {cure}')
    return Unchanged(entry.key, entry.revision)
