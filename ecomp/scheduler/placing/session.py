"""One attempt to place instances, from its announcement to its delivery or its undoing.

The attempt is a key below /requests on a lease. A delivery deletes it, or compares it. After a kill the computes undo
the rest (rule: orphaned-claim). What an earlier attempt claimed stays where it is (rule: claim-stays).
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ecomp.errors import (
    ClaimedElsewhere,
    Conflict,
    EcompError,
    NoCapacity,
    UnknownOutcome,
    Unreachable,
    UsageError,
    put_before_fix,
)
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import find_compute, list_missing_classes, sum_allocations
from ecomp.model.assign import MIN_SPARE_PLACES, Assignment, Lot, Planner
from ecomp.model.choose import PACK, SPREAD, Candidate, Offer
from ecomp.model.group import Group, Membership
from ecomp.model.json_object import load_object_or_empty
from ecomp.model.order import Request
from ecomp.model.query import Amount, UnsupportedQueryError, exclude_disabled, parse_query
from ecomp.model.states import ERROR
from ecomp.model.user_data import SharedUserData
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import Requester
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import Claimer, abandon, announce, reserve_names
from ecomp.shared.attempts import count_placements_before_and_after, list_leased
from ecomp.shared.ends import deliver
from ecomp.shared.names import Change, join_group, merge_changes, release_name, try_revoke
from ecomp.shared.notes import read_highest_released
from ecomp.store.client import Delete, Entry, Store, Unchanged

if TYPE_CHECKING:
    from ecomp.model.host import Computes
    from ecomp.scheduler.queries.find import InstanceEntries

log = logging.getLogger(__name__)

# The outcome of a failed request, in messages.
UNCHANGED = 'nothing was changed'
UNDONE = 'nothing was placed, and the claim in placement is released'

# New queries while no attempt ahead finishes: a killed one stays ahead for a minute.
MAX_REFRESHES = 8
# Seconds before each of these queries: at most this, and half of it at least.
MAX_PAUSE_SECONDS = 0.1
# Places that are left to other attempts, at most: they are simulated one by one.
MAX_PLACES_AHEAD = 300
# Refused claims after which a place is left out: it is too busy, as a full one is not offered. A compute with child
# providers (GPUs, say) is several places, of which some may be free.
MAX_REFUSALS = 2
# In a larger cluster no facts are read to prefer computes that have the image.
MAX_CLUSTER_FOR_IMAGES = 256
# Computes that are logged by name, at most.
MAX_LOGGED_COMPUTES = 20

# {query: placement's answer}
Offers = Mapping[str, Offer]


class DeliveryRefused(Conflict):
    """A refused delivery, to whose message Session.open() adds what was undone."""


class NoRoom(NoCapacity):
    """There is no room by these offers: `places` are those that are claimed or were found."""

    def __init__(self, assignment: Assignment, claims: Mapping[str, Candidate], offers: Offers) -> None:
        super().__init__(next(iter(assignment.reasons.values()), ''))
        self.assignment = assignment
        self.offers = offers
        self.places = [*claims.values(), *assignment.candidates.values(), *assignment.insufficient.values()]


class OldInstance(NamedTuple):
    """An instance to destroy, for its entry in the stack."""

    entry: str
    entries: InstanceEntries
    # Whether a new instance is delivered for the entry.
    is_replaced: bool
    # The new instance if the old one is evacuated.
    replaced_by: str | None = None


class Scheduler(NamedTuple):
    store: Store
    # Waits for placement and its first answer, the same at each call.
    backend: Callable[[], tuple[Placement, Offer]]
    # Our host, pid and time.
    owner: Mapping[str, object]
    rng: random.Random
    # Returns an ISO time.
    now: Callable[[], str]


class Contention:
    """Counts the instances of older attempts in flight, `ahead`, and those of newer ones."""

    def __init__(
        self, count_in_flight: Callable[[], tuple[int, int]], query_placement: Callable[[], Offers], rng: random.Random
    ) -> None:
        self._count_in_flight = count_in_flight
        self._query_placement = query_placement
        self._rng = rng
        self._is_fresh = False
        self._refreshes_left = MAX_REFRESHES
        self._fewest_ahead = MAX_PLACES_AHEAD
        instances_ahead, self._instances_behind = count_in_flight()
        self.ahead = min(instances_ahead, MAX_PLACES_AHEAD)

    @property
    def is_alone(self) -> bool:
        return self.ahead + self._instances_behind == 0

    def refresh(self) -> Offers:
        """Count the attempts again, then return new answers of placement."""
        ahead, self._instances_behind = self._count_in_flight()
        self.ahead = min(ahead, MAX_PLACES_AHEAD)
        self._is_fresh = True
        return self._query_placement()

    def should_refresh(self, spare_places: int) -> bool:
        """Return whether to call refresh(), after a pause in which older attempts can finish.

        `spare_places` remain after ours, or are negative if there are too few.
        """
        if not self._is_fresh:  # placement was queried before this attempt was announced
            return spare_places < MIN_SPARE_PLACES and not self.is_alone
        if spare_places >= 0 or not self.ahead:
            return False
        # Until MAX_REFRESHES calls in a row have found no fewer ahead.
        self._refreshes_left = MAX_REFRESHES if self.ahead < self._fewest_ahead else self._refreshes_left - 1
        self._fewest_ahead = min(self.ahead, self._fewest_ahead)
        if self._refreshes_left:
            time.sleep(self._rng.uniform(MAX_PAUSE_SECONDS / 2, MAX_PAUSE_SECONDS))
        return self._refreshes_left > 0


def require_complete(candidates: Iterable[Candidate]) -> None:
    """Raise UsageError if one of these lacks what a guest needs."""
    for candidate in candidates:
        if lacking := list_missing_classes(sum_allocations(candidate.allocations)):
            raise UsageError(f'the query lacks {", ".join(lacking)}, which every guest needs')


@dataclass(eq=False, repr=False)
class Session:
    """One attempt, whose key is on `lease`, with `revision` once it is written."""

    scheduler: Scheduler
    uuid: str
    instances: Collection[str]
    requester: Requester
    # Whether another attempt may have had these uuids.
    resume: bool = True
    # Ends the cure for a claim of another attempt.
    alternative: str = ''
    on_cluster_size: Callable[[int], None] = lambda _: None
    # Called once the claims are released after an error: says what is done or left nevertheless, '' for nothing.
    after_undo: Callable[[], str] = lambda: ''
    lease: int = 0
    revision: int = 0
    # Instances whose claims no other attempt made: undo() releases the claims (rule: claim-stays).
    movable: set[str] = field(default_factory=set)
    # Instances whose claims another attempt made: they never become movable.
    foreign: set[str] = field(default_factory=set)
    # Instances that had no claim after the announcement, and none of another attempt since. undo() releases theirs.
    unclaimed: set[str] = field(default_factory=set)
    attempted: list[str] = field(default_factory=list)  # instances that a claim was tried for
    _alive: list[str] | None = None
    _troubled: list[str] | None = None

    @property
    def store(self) -> Store:
        return self.scheduler.store

    @property
    def placement(self) -> Placement:
        return self.scheduler.backend()[0]

    @property
    def condition(self) -> Unchanged:
        return Unchanged(keys.attempt(self.uuid), self.revision)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Grant the lease, and undo the attempt after each error of the block except UnknownOutcome."""
        with add_unchanged():
            self.lease = self.store.grant(keys.ATTEMPT_SECONDS)
        try:
            yield
        except UnknownOutcome:
            # Nothing is released then (rule: read-back).
            raise
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
        """Release the claims, revoke the lease, and return UNCHANGED, UNDONE or what is left."""
        outcome = UNCHANGED
        if releasable := (self.movable | self.unclaimed).intersection(self.attempted):
            outcome = self.release(releasable)
            failpoint('undone')
        try_revoke(self.store, self.lease)
        return self.after_undo() or outcome

    def announce(self, query: str | None, require_ended: Callable[[Entry], object] | None = None) -> None:
        """Write the attempt's key, as claim.announce() does."""
        value = {'version': 1, 'instances': list(self.instances), 'query': query, **self.scheduler.owner}
        takes_over, check = self.resume or require_ended is not None, require_ended or (lambda _: None)
        self.revision = announce(self.store, self.lease, self.uuid, value, takes_over, check)

    def take_over(
        self, lots: Sequence[Lot], groups: Mapping[str, Group], max_elsewhere: int
    ) -> tuple[dict[str, Candidate], dict[str, str]]:
        """Take over earlier attempts' claims, and return these and {instance: compute} of others.

        Raises:
            ClaimedElsewhere: more than `max_elsewhere` earlier claims cannot be taken over. Nothing is claimed then.
        """
        # The others stay (rule: claim-stays): after a restore of etcd the instances may run there.
        earlier, elsewhere = dict[str, Candidate](), dict[str, str]()
        for lot in lots:
            group = groups.get(lot.membership.name) if lot.membership else None
            usable, others = read_earlier_claims(self.placement, lot.instances, lot.query, self.read_alive(), group)
            earlier |= usable
            elsewhere |= others
        if len(elsewhere) > max_elsewhere:
            raise ClaimedElsewhere(elsewhere, '')
        self.unclaimed |= {each for lot in lots for each in lot.instances} - earlier.keys() - elsewhere.keys()
        self.foreign.update(earlier.keys() - self.movable)
        claimed = self.claim(earlier)
        held = {instance: candidate for instance, candidate in earlier.items() if instance in claimed}
        return held, elsewhere | {each: earlier[each].compute for each in earlier.keys() - claimed}

    def place(
        self,
        list_lots: Callable[[Planner, Mapping[str, Candidate]], Sequence[Lot]],
        groups: Mapping[str, Group],
        offers: Mapping[str, Offer | None],
        claims: Mapping[str, Candidate],
        check: Callable[[Mapping[str, Candidate]], None] = lambda _: None,
    ) -> dict[str, Candidate]:
        """Claim a candidate for each instance, or for each lot's minimum, and return all.

        `list_lots` returns the lots, after each answer of placement. `groups` are without our instances. `offers` has
        placement's answer to each query, or None to query it after the attempts are counted. `check` raises an error if
        these candidates must not be claimed. The first places are left to older attempts in flight.

        Raises:
            NoRoom: a lot has fewer places than its minimum. Claims made until then stay.
        """
        claims, refusals = dict(claims), Counter[frozenset[str]]()
        contention = Contention(self.count_in_flight, lambda: self.read_offers(offers), self.scheduler.rng)
        current: Offers = {query: offer or self.read_offer(query) for query, offer in offers.items()}
        while True:
            planner = self.make_planner(_drop_refused_places(current, refusals), groups)
            lots = list_lots(planner, claims)
            self._prefer_images(planner, lots)
            # The places of an attempt that has claimed since it was counted are no longer offered. As many others are
            # left to it, so usable places stay free.
            assignment = planner.assign(lots, claims, ahead=None if contention.is_alone else contention.ahead)
            self._log_skipped(planner.skipped)
            if contention.should_refresh(assignment.spare):
                current = contention.refresh()
                continue
            if any(lot.is_short({**claims, **assignment.candidates}) for lot in lots):
                raise NoRoom(assignment, claims, current)
            require_complete(assignment.candidates.values())
            check({**claims, **assignment.candidates})
            claimed = self.claim(assignment.candidates)
            claims |= {instance: assignment.candidates[instance] for instance in claimed}
            refused = assignment.candidates.keys() - claimed
            if not refused:
                return claims
            # Another attempt was faster there, so the offer is stale.
            refusals.update({frozenset(assignment.candidates[instance].allocations) for instance in refused})
            # All members of a group that is undecided share one compute: try another one.
            given_up = {each for lot in lots if lot.is_short(claims) for each in _list_united(lot, groups)}
            claims = {each: candidate for each, candidate in claims.items() if each not in given_up}
            current = contention.refresh()

    def _prefer_images(self, planner: Planner, lots: Sequence[Lot]) -> None:
        if len(self.read_alive()) > MAX_CLUSTER_FOR_IMAGES:
            return
        equal = {lot: planner.list_best(lot) for lot in lots if lot.image and lot.weigh in (SPREAD, PACK)}
        if not any(len(computes) > 1 for computes in equal.values()):
            return
        from ecomp.model.facts import parse_facts  # not for most commands
        from ecomp.model.image import hash_image

        entries = self.store.read(sorted({keys.facts(each) for computes in equal.values() for each in computes}))
        facts = {keys.get_last_part(key): parse_facts(entry.value) for key, entry in entries.items() if entry.lease}
        for lot, computes in equal.items():
            image_hash = hash_image(lot.image)
            planner.prefer(lot, [each for each in computes if each in facts and facts[each].has_image(image_hash)])

    def make_planner(self, offers: Offers, groups: Mapping[str, Group]) -> Planner:
        return Planner(offers, groups, self.read_alive(), self.scheduler.rng, troubled=self.read_troubled())

    def claim(self, candidates: Mapping[str, Candidate], requester: Requester | None = None) -> set[str]:
        self.attempted += [instance for instance in candidates if instance not in self.attempted]
        if not candidates:
            return set()
        return self.make_claimer(requester or self.requester).claim_what_fits(candidates)

    def require_ours(self) -> None:
        self.make_claimer(self.requester).require_ours(self.uuid)

    def make_claimer(self, requester: Requester) -> Claimer:
        calls = (self.is_attempt_ours, self.read_highest_released, self.get_display_name)
        return Claimer(self.placement, requester, *calls, self.movable, self.foreign)

    def deliver(
        self,
        deliveries: Sequence[tuple[str, Request]],
        make_own_change: Callable[[], Change],
        removals: Sequence[OldInstance] = (),
        user_data: SharedUserData | None = None,
        ends_attempt: bool = True,
        old_records: Mapping[str, Entry] = {},
    ) -> int:
        """Deliver (compute, request) pairs, and destroy what they replace, in one transaction.

        The result is the revision, or 0 if the attempt or a key that it compares has changed.

        Raises:
            Excluded: others of a group or of the project were delivered first.
        """
        removed = [removal.entries.record.instance for removal in removals]

        def make_shared_change() -> Change:
            places: dict[Membership, dict[str, str]] = {}
            for compute, request in deliveries:
                if request.group is not None:
                    places.setdefault(request.group, {})[request.instance] = compute
            # An evacuation looks for deliveries of its uuids before it announces them, so a create may have come since.
            unused = [Unchanged(keys.request(compute, new.instance), 0) for compute, new in deliveries if new.replaces]
            return merge_changes(
                (unused, []),
                reserve_names(self.store, {request.instance: request.name for _, request in deliveries}, removed),
                *(join_group(self.store, group, members, removed) for group, members in places.items()),
                *(make_removal(self.store, removal) for removal in removals),
                make_own_change(),
            )

        return deliver(self.store, deliveries, self.condition, user_data, make_shared_change, ends_attempt, old_records)

    def finish(self, instances: Collection[str]) -> None:
        """Release what was claimed for others than these delivered instances, and revoke the lease."""
        unused = self.movable.intersection(self.attempted).difference(instances)
        if unused:  # of a set; computes release what cannot be released here
            log.debug('%s', self.release(unused))
        try_revoke(self.store, self.lease)

    def release(self, instances: Iterable[str]) -> str:
        """Release the instances' claims, and return UNDONE or a sentence about what is left."""
        try:
            if abandon(self.store, self.placement, instances, self.uuid, self.revision):
                return UNDONE
            return f'{self.uuid}: its claim stays: another eschedule is placing it, or this one was too slow'
        except EcompError as error:
            log.debug('the claim of %s could not be released: %s', self.uuid, error)
            problem = f'{self.uuid} is not placed: the computes release its claim within minutes'
            return f'{problem}. Try: the same command with --uuid {self.uuid}, which takes the claim over'

    def make_refusal(self, claimed_on: Mapping[str, str]) -> ClaimedElsewhere:
        """Make the error, with its cure, for {instance: compute} of claims elsewhere."""
        instance, compute = next(iter(claimed_on.items()))
        host = self.get_display_name(compute)
        which = f'{instance} is' if len(claimed_on) == 1 else f'{instance} and {len(claimed_on) - 1} more are'
        if compute in self.read_alive():
            problem = f'{which} claimed on {host} by another process'
            cure = f'wait two minutes ({host} then has released the claim if no request owns it){self.alternative}'
        else:
            from ecomp.model.host import describe_silent_fix

            problem = f'{which} claimed on {host}, which is silent and may be running it'
            cure = describe_silent_fix(host, self.alternative)
        return ClaimedElsewhere(claimed_on, f'{problem}. Fix: {cure}')

    def read_alive(self) -> list[str]:
        """Return the living computes, which are read and counted (on_cluster_size) once."""
        if self._alive is None:
            presence = self.store.snapshot(keys.COMPUTES, keys_only=True).entries
            self.on_cluster_size(len(presence))
            self._alive = [keys.get_last_part(key) for key, entry in presence.items() if entry.lease]
        return self._alive

    def read_troubled(self) -> list[str]:
        """Return the computes that report why they cannot build, which are read once."""
        if self._troubled is None:
            self._troubled = list_leased(self.store, keys.TROUBLES)
        return self._troubled

    @cached_property
    def computes(self) -> Computes:
        from ecomp.scheduler.queries.computes import read_computes

        return read_computes(self.store)

    def get_display_name(self, compute: str) -> str:
        return self.computes.format_name(compute)

    def is_attempt_ours(self) -> bool:
        """Refresh the lease, and return whether the attempt's key is still as we wrote it."""
        self.store.keep_alive(self.lease)  # a long attempt that still asks is alive
        entry = self.store.get(keys.attempt(self.uuid))
        return entry is not None and entry.revision == self.revision

    def read_offers(self, queries: Iterable[str]) -> dict[str, Offer]:
        """Refresh the lease, whose expiry is not noticed here, and query the candidates."""
        self.store.keep_alive(self.lease)
        return {query: self.read_offer(query) for query in queries}

    def read_offer(self, query: str) -> Offer:
        return allocations.read_candidates(self.placement, query)

    def read_highest_released(self, instances: Collection[str]) -> int:
        # A uuid that was generated here is new to all others.
        return read_highest_released(self.store, instances) if self.resume else 0

    def count_in_flight(self) -> tuple[int, int]:
        """Count the instances of older attempts in flight, and those of newer ones."""
        return count_placements_before_and_after(self.store.snapshot(keys.ATTEMPTS), self.revision)

    def _log_skipped(self, skipped: Collection[str]) -> None:
        # Providers of another cloud in the same placement are not logged.
        ours = sorted(provider for provider in skipped if provider in self.computes.stored_hostnames)
        for provider in ours[:MAX_LOGGED_COMPUTES]:
            log.warning('compute %s is not alive: skipped', self.get_display_name(provider))
        if len(ours) > MAX_LOGGED_COMPUTES:
            log.warning('%d more computes are not alive: skipped', len(ours) - MAX_LOGGED_COMPUTES)


def read_earlier_claims(
    placement: Placement, instances: Collection[str], query: str, alive: Collection[str], group: Group | None
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the claims to take over, and {instance: compute} of the claims that must stay."""
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


def _list_united(lot: Lot, groups: Mapping[str, Group]) -> Sequence[str]:
    group = groups.get(lot.membership.name) if lot.membership else None
    return lot.instances if group is not None and group.is_undecided else ()


def make_removal(store: Store, removal: OldInstance) -> Change:
    """Return the change that destroys an instance, or removes the record of one in error."""
    from ecomp.scheduler.changes.change import make_tombstone  # not for a create

    entries = removal.entries
    record, entry = entries.record, entries.record_entry
    if record.state != ERROR or entries.request_entry is not None or entry is None:
        conditions, tombstone = make_tombstone(store, entries, removal.replaced_by)
        return conditions, [tombstone]
    unchanged = [Unchanged(entry.key, entry.revision), Unchanged(keys.request(record.compute, record.instance), 0)]
    # A replacement takes the name over.
    name = ([], []) if removal.is_replaced else release_name(store, record.name, record.instance)
    return merge_changes((unchanged, [Delete(entry.key)]), name)


def require_ended(other: str, owner: Mapping[str, object], entry: Entry, outcome: str = UNCHANGED) -> None:
    """Raise Conflict unless the process that wrote `entry` ran on this host and has ended."""
    facts = load_object_or_empty(entry.value)
    host, pid = str(facts.get('host'))[:80], facts.get('pid')
    if host == owner['host'] and type(pid) is int and pid > 0:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        except (PermissionError, OverflowError):
            pass
    cure = f'repeat the command when it has finished, or {keys.ATTEMPT_SECONDS} s after it was killed'
    raise Conflict(f'{other} is running, as process {pid!r:.20} on {host}; {outcome}. Fix: {cure}')


def add_state(error: Unreachable, state: str) -> Unreachable:
    """Return an error of the same type with the state of the request added to its message."""
    return type(error)(put_before_fix(str(error), f'; {state}'), error.backend)


@contextmanager
def add_unchanged() -> Iterator[None]:
    """Add `nothing was changed` to the message of an Unreachable that the block raises."""
    try:
        yield
    except Unreachable as error:
        raise add_state(error, UNCHANGED) from error


def _drop_refused_places(offers: Offers, refusals: Mapping[frozenset[str], int]) -> Offers:
    left_out = {place for place, count in refusals.items() if count >= MAX_REFUSALS}
    if not left_out:
        return offers
    return {
        query: offer._replace(candidates=[each for each in offer.candidates if frozenset(each) not in left_out])
        for query, offer in offers.items()
    }
