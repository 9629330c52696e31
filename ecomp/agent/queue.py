"""Take requests from the queues for one compute, without a thread of its own.

A compute takes the oldest request that fits its room and that it may take (ecomp.model.queue). Before that it waits,
longer the fuller it is, so that emptier computes go first. After a lost race it takes a random one of the next few, or
all computes would race for each. It puts the taker key, claims on its provider, and moves the request to its /hosts
key. The taker key is on the presence's lease and the move compares that key, so a compute frozen for longer than its
lease moves nothing. Only its own compute releases the claim of a dead attempt (rule: claim-stays).
Offers knows the queues for all computes of the process; Taker and Puller take for one of them. They share a module of
more than 700 lines because they are one protocol: after a failed take Offers offers the request to other computes.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ecomp.agent.instance.instances import ControlPlane
from ecomp.agent.instance.records import get_revision
from ecomp.agent.jobs import Deferrals, FailureLog, ScheduledJob, Threads
from ecomp.errors import (
    ClaimedElsewhere,
    Conflict,
    EcompError,
    NoCapacity,
    NotFound,
    PlacementRefusal,
    Unreadable,
)
from ecomp.failpoints import failpoint
from ecomp.model import keys, queue
from ecomp.model.allocation import Allocations, Inventory, find_compute, sum_resources
from ecomp.model.backoff import Backoff
from ecomp.model.cluster import find_accepted_revision
from ecomp.model.explain import Provider
from ecomp.model.group import MAX_MEMBERS, Group, Membership, resolve_group
from ecomp.model.host import ProviderSummary, list_unproven
from ecomp.model.parsers import MAX_REASON_CHARACTERS
from ecomp.model.queue import Backlog, QueueEntry, QueueTaker, Takers, WaitingEntry
from ecomp.model.record import ERROR, GONE, RETENTION_SECONDS, Failure, make_record, parse_or_none
from ecomp.model.status import DISABLED
from ecomp.model.stored import encode
from ecomp.model.text import join_some
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import Requester, claim, read_consumer, release
from ecomp.placement.client import Placement
from ecomp.placement.providers import read_provider
from ecomp.store import sharing
from ecomp.store.client import NOT_QUEUED, Delete, Exists, Put, Settlement, Unchanged, find_needed
from ecomp.store.presence import LEASE_SECONDS, MAX_EXPIRY_DELAY_SECONDS
from ecomp.store.watch import State

WakeUp = Callable[[str], None]

log = logging.getLogger(__name__)

MAX_NAMED_COMPUTES = 3
SILENT_CACHE_SECONDS = 5.0


class _Offer(NamedTuple):
    """A queued request, when this process first saw it (monotonic), and the rank of each compute to take it."""

    place: WaitingEntry
    heard_at: float
    order: Mapping[str, int]


class Offers:
    """The queued requests, and when which compute of this process may take them.

    The follower's thread calls the on_… methods. wake_more() must be called at the times (monotonic) passed to
    `schedule`. All else is thread-safe. Requests found by the first read are open to all, as they were offered before.
    """

    def __init__(self, schedule: Callable[[float], None]) -> None:
        self._schedule = schedule
        self._lock = threading.Lock()
        self._wake_ups: dict[str, WakeUp] = {}
        self._takers: Takers | None = None
        self._offers: dict[str, _Offer] = {}
        # Keys that a compute here is trying to take, and those that one failed to take, to be offered to others again.
        self._in_flight: set[str] = set()
        self._given_up: set[str] = set()
        # The list of silent computes is found out once for all computes of this process.
        self._presence: State = {}
        self._followed_since, self._silent_read_at = math.inf, -math.inf
        self._term = 0
        self._silent_lock = threading.Lock()
        self._silent: list[str] = []
        self.accepted_revision = 0  # the highest revision at which any compute accepted this etcd
        self.start_revision = 0  # etcd's revision when this process started
        # Returns etcd's raft term: a new leader gives each lease its whole time again.
        self.term: Callable[[], int] = lambda: 0
        self.backlog: Backlog | None = None  # None before the queues were read

    def add(self, compute: str, wake_up: WakeUp) -> None:
        """Offer requests to a compute of this process from now on, by calls of wake_up(reason)."""
        with self._lock:
            self._wake_ups = {**self._wake_ups, compute: wake_up}

    def remove(self, compute: str) -> None:
        """Stop offering requests to a compute."""
        with self._lock:
            self._wake_ups = {other: nudge for other, nudge in self._wake_ups.items() if other != compute}

    def on_computes(self, state: State) -> None:
        """Replace the presence keys."""
        if self._takers is None:
            self._followed_since, self._term = time.monotonic(), self.term()
        self._presence = state
        self._takers = queue.update_takers(state, self._takers or Takers())

    def on_accepted(self, state: State) -> None:
        """Note the highest revision at which any compute accepted this etcd."""
        self.accepted_revision = find_accepted_revision(state.values())

    def find_silent(self, placement: Placement) -> list[str]:
        """Return computes not proven alive, cached SILENT_CACHE_SECONDS; log a new list. Raises placement's errors."""
        with self._silent_lock:
            now = time.monotonic()
            if now - self._silent_read_at > SILENT_CACHE_SECONDS:
                if (read_term := self.term()) != self._term:
                    self._followed_since, self._term = now, read_term
                has_lease_ended = now - self._followed_since > LEASE_SECONDS + MAX_EXPIRY_DELAY_SECONDS
                names = providers.read_provider_names(placement)
                silent_uuids = list_unproven(names, self._presence, self.start_revision, has_lease_ended)
                shares = providers.read_rooms(placement, silent_uuids) if silent_uuids else {}
                silent = [uuid for uuid in silent_uuids if ProviderSummary(uuid, uuid, shares.get(uuid, {})).is_ours]
                if silent and silent != self._silent:
                    shown = join_some(silent, MAX_NAMED_COMPUTES)
                    log.info('older queued requests are not taken: their guests may run on silent computes: %s', shown)
                self._silent, self._silent_read_at = silent, now
            return self._silent

    def on_queues(self, state: State) -> None:
        """Replace the queues; wake computes that may take the new requests, or whose own taker keys changed."""
        previous = self.backlog
        backlog = queue.update_backlog(state, previous or Backlog())
        now, woken = time.monotonic(), list[str]()
        with self._lock:
            nudges = self._wake_ups
            for key in [key for key, offer in self._offers.items() if backlog.entries.get(key) is not offer.place]:
                del self._offers[key]
            self._in_flight = {key for key in self._in_flight if key in backlog.parsed_entries}
            if previous is None or self._takers is None:
                woken += nudges if backlog.entries else ()
            elif backlog.has_new:
                for key, place in backlog.entries.items():
                    if previous.entries.get(key) is not place:
                        woken += self._add_offer(key, place, now)
            self.backlog = backlog
        old_marks = previous.taken if previous is not None else {}
        woken += (uuid for uuid, marks in backlog.taken.items() if uuid in nudges and marks != old_marks.get(uuid))
        for compute in dict.fromkeys(woken):
            nudges[compute]('requests are queued')

    def wake_more(self) -> float:
        """Wake more computes for untaken requests; return when (monotonic) to call this again, or inf."""
        now, woken, next_time = time.monotonic(), list[str](), math.inf
        with self._lock:
            nudges = self._wake_ups
            idle, self._given_up = self._given_up, set()
            if self.backlog is not None and any(
                key in self.backlog.entries and key not in self._offers for key in idle
            ):
                woken += nudges
            for key, (_, since, order) in list(self._offers.items()):
                if queue.count_allowed_takers(now - since, len(order)) >= len(order):
                    del self._offers[key]
                    woken += nudges  # also those whose presence key is missing
                    continue
                woken += (
                    uuid for uuid in nudges if since + queue.get_opening_seconds(order.get(uuid, len(order))) <= now
                )
                next_time = min(next_time, now + queue.WIDEN_SECONDS)
        for compute in dict.fromkeys(woken):
            nudges[compute]('more computes may take the queued requests')
        return next_time

    def is_open(self, place: WaitingEntry, compute: str) -> bool:
        """Return whether the compute may take the request now; False while one here takes it, True without an offer."""
        if place.entry.key in self._in_flight:
            return False
        offer = self._offers.get(place.entry.key)
        if offer is None or offer.place is not place:
            return True
        number = offer.order.get(compute, len(offer.order))
        return offer.heard_at + queue.get_opening_seconds(number) <= time.monotonic()

    def begin_take(self, place: WaitingEntry) -> bool:
        """Begin to take the request, until end_take(); False if another compute here is taking it."""
        with self._lock:
            is_free = place.entry.key not in self._in_flight
            self._in_flight.add(place.entry.key)
        return is_free

    def end_take(self, place: WaitingEntry, is_taken: bool) -> None:
        """Offer the request to others unless taken; a taken one stays in flight until it leaves the queues."""
        if is_taken:
            return
        with self._lock:
            self._in_flight.discard(place.entry.key)
            self._given_up.add(place.entry.key)
        self._schedule(0.0)

    def count_allowed(self, place: WaitingEntry) -> int:
        """Return how many computes of the cluster may take the request now, at least 1.

        While a new one is offered to ever more, these count; else all.
        """
        takers, offer = self._takers, self._offers.get(place.entry.key)
        if offer is not None:
            return queue.count_allowed_takers(time.monotonic() - offer.heard_at, len(offer.order))
        if takers is None:
            return 1
        return max(takers.count_with_room(place.entry.flavor.resources), 1)

    def _add_offer(self, key: str, place: WaitingEntry, now: float) -> list[str]:
        """Return the computes here that may take a new request now; offer it to more later. The caller holds _lock."""
        assert self._takers is not None
        order = queue.rank_takers(place.entry.instance, self._takers)
        if len(order) > queue.INITIAL_TAKERS:
            self._offers[key] = _Offer(place, now, order)
            self._schedule(now + queue.WIDEN_SECONDS)
            return [
                compute
                for compute in self._wake_ups
                if queue.get_opening_seconds(order.get(compute, len(order))) == 0.0
            ]
        return list(self._wake_ups)


class Taker:
    """Takes requests for one compute, one at a time; get_lease() returns the lease of the compute's presence."""

    def __init__(self, control: ControlPlane, get_lease: Callable[[], int]) -> None:
        self.compute = control.compute
        self.store = control.store
        self.placement = control.placement
        self.now = control.now
        self.lease = get_lease

    def take(self, place: WaitingEntry, taker_revision: int = 0, still_fits: Callable[[], bool] = lambda: True) -> bool:
        """Take the request; False after a lost race or cancellation, or if still_fits(), group or flavor forbid it.

        `taker_revision` is that of our taker key, if an earlier attempt left one, else 0. still_fits() is called once
        our taker key is put. Raises NoCapacity (placement has no room here), PlacementRefusal (placement never accepts
        this claim) and ClaimedElsewhere (another compute holds a claim; nothing is claimed here). Other errors of etcd
        and placement are raised; then release_claim() or the next take handles a claim that was made.
        """
        waiting = place.entry
        mark = self._put_taker_key(place, taker_revision)
        if mark is None:
            return False
        failpoint('marked')
        moved = False
        try:
            if not still_fits():
                raise Conflict(f'{waiting.instance}: its request no longer fits on this compute')
            self._claim(waiting, mark)
            failpoint('taken')
            moved = self._move(place, mark)
        except Conflict as error:
            log.debug('%s', error)
        except EcompError:
            self._try_delete_taker_key(waiting.key, mark)
            raise
        if moved:
            failpoint('moved')
            return True
        try:
            self.release_claim(waiting.instance)
        finally:
            self._try_delete_taker_key(waiting.key, mark)
        return False

    def refuse(self, place: WaitingEntry, reason: str) -> bool:
        """End in error a request that no compute can take; False if it is gone, being taken or claimed elsewhere.

        The request is deleted. An instance that ended here before keeps its record, with the reason as its fault; the
        record of one that lives here is not changed. Errors of etcd and placement are raised; the call can be repeated.
        """
        waiting, now = place.entry, self.now()
        if find_compute(read_consumer(self.placement, waiting.instance).allocations) not in ('', self.compute):
            return False
        key, own = waiting.key, self._list_own_keys(waiting.instance)
        stored = self.store.read(own)
        record = make_record(self.compute, waiting.make_request(self.compute, now), now)
        conditions = [Unchanged(key, place.revision), Unchanged(keys.taker(key), 0)]
        conditions += [Unchanged(own_key, get_revision(stored.get(own_key))) for own_key in own]
        if not stored:
            failure = Failure('scheduled', reason, 'nothing remains')
            record = replace(record.enter_state(ERROR, now, 'error'), error=failure)
            return sharing.write_final_record(self.store, record, conditions, [key]) is not None
        operations, shared = list[Put | Delete]([Delete(key)]), sharing.make_empty_change
        old = parse_or_none(stored[own[0]].value, waiting.instance, self.compute) if own[0] in stored else None
        # Others keep their name, group and quota.
        if old is not None and old.state in RETENTION_SECONDS and own[1] not in stored:
            operations.append(Put(own[0], encode(replace(old, fault=reason)), stored[own[0]].lease))
            shared = partial(sharing.release_shared_keys, self.store, record.enter_state(GONE, now))
        return sharing.commit_with_shared(self.store, conditions, operations, shared) is not None

    def is_used(self, instance: str) -> bool:
        """Read whether etcd has a record or request of the instance on this compute: then a take must not claim."""
        return bool(self.store.read(self._list_own_keys(instance)))

    def _list_own_keys(self, instance: str) -> list[str]:
        """Return the keys of this compute's record and request of the instance, in this order."""
        return [keys.record(self.compute, instance), keys.request(self.compute, instance)]

    def delete_taker_key(self, queue_key: str, taker_revision: int) -> None:
        """Delete our taker key, unless it was changed, so that others may take the request."""
        key = keys.taker(queue_key)
        self.store.commit([Unchanged(key, taker_revision)], [Delete(key)], Settlement(Delete(key)))

    def release_claim(self, instance: str) -> bool:
        """Release and note our claim for a request that is not taken; return True if the instance now has no claim.

        False, with nothing released, if the claim is on another compute, an attempt for the instance is in flight, its
        request is here, or the claim was changed concurrently. Errors of etcd and placement are raised.
        """

        def select_kept(holding: Mapping[str, Allocations]) -> Collection[str]:
            # A new order may use the uuid again, and its attempt then takes over our claim.
            return find_needed(self.store, holding, self.compute, NOT_QUEUED)

        return bool(
            release(self.placement, [instance], select_kept, partial(sharing.note_released, self.store))[instance]
        )

    def _put_taker_key(self, place: WaitingEntry, taker_revision: int) -> int | None:
        """Put our taker key; return its revision, or None if the request or its taker key has changed.

        Also None if the request's flavor was deleted. Errors of etcd are raised.
        """
        key, flavor = keys.taker(place.entry.key), Exists(keys.flavor(place.entry.flavor.name))
        unchanged = Unchanged(place.entry.key, place.revision), Unchanged(key, taker_revision)
        put = Put(key, encode(QueueTaker(self.compute)), self.lease())
        return self.store.commit([*unchanged, flavor], [put], Settlement())

    def _claim(self, waiting: QueueEntry, taker_revision: int) -> None:
        """Claim the request's resources on this compute; Conflict if our taker key has changed, or from claim()."""
        key = keys.taker(waiting.key)

        def check() -> None:
            entry = self.store.get(key)
            if entry is None or entry.revision != taker_revision:
                raise Conflict(f'{waiting.instance}: another compute is taking its request, or it was cancelled')

        new_claims = {waiting.instance: {self.compute: waiting.flavor.resources}}
        above = partial(sharing.read_highest_released, self.store, new_claims)
        requester = Requester(waiting.user_id, waiting.project_id)
        claim(self.placement, new_claims, requester, check, above)

    def _move(self, place: WaitingEntry, taker_revision: int) -> bool:
        """Move the request to our /hosts key; return whether it was moved.

        Raises Conflict if its group excludes this compute. Errors of etcd are raised.
        """
        waiting = place.entry
        queue_key, instance = waiting.key, waiting.instance
        mark_key, request_key = keys.taker(queue_key), keys.request(self.compute, instance)
        conditions = [
            *(Unchanged(queue_key, place.revision), Unchanged(mark_key, taker_revision)),
            *(Unchanged(keys.record(self.compute, instance), 0), Unchanged(request_key, 0)),
        ]
        request = waiting.make_request(self.compute, self.now())
        operations: list[Put | Delete] = [Delete(queue_key), Delete(mark_key), Put(request_key, encode(request))]
        settlement = Settlement(Delete(mark_key), partial(sharing.find_delivery, self.compute, request))
        try:
            written = sharing.commit_with_shared(
                self.store,
                conditions,
                operations,
                lambda: sharing.join_group(self.store, waiting.group, {instance: self.compute}),
                settlement=settlement,
            )
        except sharing.Excluded as error:
            raise Conflict(f'{instance}: its group no longer allows this compute') from error
        return written is not None

    def _try_delete_taker_key(self, queue_key: str, taker_revision: int) -> None:
        """Delete our taker key if it is unchanged; an EcompError is ignored."""
        try:
            self.delete_taker_key(queue_key, taker_revision)
        except EcompError as error:
            log.debug('the taker key of %s is checked again later, or removed with its lease: %s', queue_key, error)


# While queued requests do not fit, the room is read at this interval, spread as all computes hear of them together.
ROOM_INTERVAL_SECONDS = 60.0
ROOM_SPREAD_SECONDS = 10.0
# Greatest age of the room at a take; a claim by an older room would only be refused. A claim does not check traits, so
# these are read before each take, except shortly after the room.
MAX_ROOM_AGE_SECONDS = 10.0
TRAITS_CACHE_SECONDS = 1.0
# Time in which etcd shows a race that we lost.
ETCD_LAG_SECONDS = 0.5
# Back-off, first and greatest, for a request whose group excludes this compute, whose flavor is gone, or that another
# compute holds or may run. A thousand computes may read as many groups, and each may soon allow it.
FIRST_SKIP_SECONDS = 5.0
MAX_SKIP_SECONDS = 30.0


@dataclass(eq=False)
class Puller:
    """Chooses and takes requests for one compute; only on_hosts() is thread-safe.

    `may_take` returns False while nothing may be taken. `registered_inventory`, if not None, is the free room at first,
    if the compute has no requests; otherwise the room is read. `list_guests` returns the instances with a domain or
    disk. A request is left alone while another compute holds a claim for it, even a silent one (rule: claim-stays).
    While any compute is silent, a request is also left alone if it is not newer than the newest acceptance of etcd, or
    than `first_seen_revision` (when this compute first saw or accepted etcd): a silent compute may have taken it before
    a restore.
    """

    taker: Taker
    offers: Offers
    may_take: Callable[[], bool]
    registered_inventory: Mapping[str, Inventory] | None
    first_seen_revision: int
    list_guests: Callable[[], Collection[str]]

    def __post_init__(self) -> None:
        self._compute, self._store, self._placement = self.taker.compute, self.taker.store, self.taker.placement
        self.deferrals = Deferrals()
        self._rng = random.Random()
        # Guards the next three between step() and the followers of etcd.
        self._lock = threading.Lock()
        self._is_room_stale = True
        # The instances of this compute's requests (None: not read yet), and those that we moved there ourselves.
        self._requested: set[str] | None = None
        self._own_moves: set[str] = set()
        # Claims that placement refused: by query, the room at that time and when to try again; and by request.
        self._refusals: dict[str, tuple[Provider, float]] = {}
        self._doubts, self._flavor_checks = Deferrals(), Deferrals()
        self._skips: dict[str, Backoff] = {}
        self._claimed_elsewhere: set[str] = set()  # instances for which another compute holds a claim
        self._fits_by_query: dict[str, bool] = {}
        self._room = Provider(self._compute)
        self._room_read_at, self._next_room_read, self._has_read_traits = -math.inf, math.inf, False
        self._choice_size = 1
        # The request to take next, and when (monotonic): emptier computes go first until then.
        self._next_take: tuple[WaitingEntry, float] | None = None
        self._needs_cleanup = True

    def on_hosts(self, state: State) -> bool:
        """Note this compute's requests; if any came or went that we did not move, the room is stale: return True."""
        requested = {keys.get_last_part(key) for key in state}
        with self._lock:
            changed = (requested ^ (self._requested or set())) - self._own_moves
            self._requested, self._own_moves = requested, self._own_moves - requested
            self._is_room_stale = self._is_room_stale or bool(changed)
        return bool(changed)

    def reset(self) -> None:
        """Have the next step read the room and release dead attempts' claims. Call this after a step that raised."""
        self._room_read_at, self._needs_cleanup, self._next_take = -math.inf, True, None

    def step(self) -> float:
        """Take what can be taken now; return the seconds, ROOM_INTERVAL_SECONDS at most, until the next step.

        Errors of etcd and placement are raised; then reset() must be called before the next step.
        """
        while self.may_take():
            now = time.monotonic()
            deferred = self.deferrals.get_deferred(now)
            self._doubts.get_deferred(now)
            self._refusals = {query: refusal for query, refusal in self._refusals.items() if refusal[1] > now}
            backlog = self.offers.backlog
            if backlog is None:
                # The first list causes a step; before it, claims of dead attempts are unknown.
                return ROOM_INTERVAL_SECONDS
            places = backlog.entries.values()
            # Without what we have just tried, because the followed state may be stale.
            own_takes = [
                (key, *mark)
                for key, mark in backlog.taken.get(self._compute, {}).items()
                if keys.get_last_part(key) not in deferred
            ]
            for key, mark, place in own_takes:
                # An earlier take of ours was interrupted, or its request was cancelled.
                self.deferrals.defer(keys.get_last_part(key), ETCD_LAG_SECONDS)
                if place is None or self._is_held_elsewhere(place) or self._may_run_elsewhere(place):
                    self.taker.delete_taker_key(key, mark)
                else:
                    self._take(place, mark, self._is_enabled)
            if not places:
                self._next_room_read, self._choice_size, self._next_take = math.inf, 1, None
                return ETCD_LAG_SECONDS if self.deferrals.get_deferred(now) else ROOM_INTERVAL_SECONDS
            if own_takes:
                continue
            if self._next_take is not None:
                place, when = self._next_take
                is_there = backlog.entries.get(place.entry.key) is place
                if is_there and when > now:
                    return when - now
                self._next_take, is_taken = None, False
                if is_there and self.offers.begin_take(place):  # in the backlog, so without a taker key
                    try:
                        is_taken = self._take_if_fits(place, backlog)
                    finally:
                        self.offers.end_take(place, is_taken)
                # If a thousand computes all waited for the first request, each take would make all of them choose
                # again, so after a lost race the choice widens. A few computes keep to the queue's order.
                self._choice_size = min(
                    queue.adjust_limit(self._choice_size, is_taken), self.offers.count_allowed(place)
                )
                continue
            chosen = self._choose_next(backlog)
            if chosen is not None:
                allowed, group = self._check_group(chosen.entry)
                if self._is_held_elsewhere(chosen):
                    self._skip([chosen], backlog)
                elif self._may_run_elsewhere(chosen):
                    self._skip(filter(self._is_older, places), backlog)
                elif not allowed:
                    self._skip(self._find_excluded(chosen, backlog), backlog)
                else:
                    self._skips.pop(chosen.entry.instance, None)
                    # Emptier computes go first.
                    wait_seconds = queue.choose_delay(self._room, group, self.offers.count_allowed(chosen), self._rng)
                    self._next_take = chosen, time.monotonic() + wait_seconds
            else:
                self._choice_size = 1  # once there is room again, start with the oldest request
                next_time = min([self._next_room_read, *self.deferrals.get_deferred(now).values()])
                return min(max(next_time - now, 0.01), ROOM_INTERVAL_SECONDS)
        return ROOM_INTERVAL_SECONDS

    def _choose_next(self, backlog: Backlog) -> WaitingEntry | None:
        """Choose the next request, or None. If any is open, read the room if stale or, at intervals, if none fits."""
        if not any(self.offers.is_open(other, self._compute) for other in backlog.entries.values()):
            return None  # without a call to placement
        if self.registered_inventory is not None and self._requested == set():
            # Without traits, which are read before a take.
            self._room = Provider(self._compute, self.registered_inventory)
            self._fits_by_query, self._is_room_stale = {}, False
            self._room_read_at = time.monotonic()
        elif self._is_room_stale or self._room_read_at == -math.inf:
            self._read_room(backlog)
        is_known, self.registered_inventory = self.registered_inventory is None, None
        place = self._choose_place(backlog)
        now = time.monotonic()
        if place is None and (not is_known or now >= self._next_room_read):
            self._next_room_read = math.inf
            self._read_room(backlog)
            place = self._choose_place(backlog)
        if place is not None:
            self._next_room_read = math.inf
        elif self._next_room_read == math.inf:
            # Shorter if the compute is disabled, because an operator who enables it waits.
            interval = MAX_ROOM_AGE_SECONDS if DISABLED in self._room.traits else ROOM_INTERVAL_SECONDS
            self._next_room_read = max(now, self._room_read_at + interval) + self._rng.uniform(0.0, ROOM_SPREAD_SECONDS)
        return place

    def _check_fit(self, place: WaitingEntry, backlog: Backlog) -> bool:
        """Return whether the request still fits here; first read the room if it is old, or the traits if they are."""
        age = time.monotonic() - self._room_read_at
        if age > MAX_ROOM_AGE_SECONDS:
            self._read_room(backlog)
        elif (age > TRAITS_CACHE_SECONDS or not self._has_read_traits) and not self._is_enabled():
            return False
        return queue.can_take(place.entry.flavor, self._room)

    def _is_enabled(self) -> bool:
        """Read the provider's traits into the last room; return whether the provider is enabled."""
        traits = providers.read_names(self._placement, self._compute, providers.TRAITS)
        if traits != self._room.traits:
            self._room, self._fits_by_query = replace(self._room, traits=traits), {}
        return DISABLED not in traits

    def _choose_place(self, backlog: Backlog) -> WaitingEntry | None:
        """Return a random one of the first `_choice_size` requests that are open and fit, not deferred or refused."""
        self._fits_by_query = queue.check_flavors(backlog.flavors, self._room, self._fits_by_query)
        takes = self._fits_by_query | {
            query: False for query, (provider, _) in self._refusals.items() if provider == self._room
        }
        if not any(takes.values()):
            return None
        deferred = self.deferrals.get_deferred(time.monotonic())
        open_places = (place for place in backlog.entries.values() if self.offers.is_open(place, self._compute))
        return queue.choose_next(open_places, takes, deferred, self._choice_size, self._rng)

    def _read_room(self, backlog: Backlog) -> None:
        """Read this compute's room; after a start or reset() release this compute's claims for queued requests.

        Dead attempts left these. A read that cannot release one leaves it to the next read. Without a provider there is
        no room. Errors of etcd and placement are raised.
        """
        with self._lock:
            self._is_room_stale = False
        started_at = time.monotonic()  # an answer is as old as its query; a drain relies on that
        try:
            held = allocations.read_provider_allocations(self._placement, self._compute)
        except NotFound:  # the periodic check registers the provider again
            held = {}
        if self._needs_cleanup:
            # A request with another compute's taker key may be moved, or return to the queue with our claim.
            other_marks = [marks for whose, marks in backlog.taken.items() if whose != self._compute]
            self._needs_cleanup = any(keys.get_last_part(key) in held for marks in other_marks for key in marks)
            waiting = [place.entry.instance for place in backlog.entries.values()]
            claimed = [instance for instance in waiting if instance in held]
            here = self.list_guests() if claimed else ()
            for instance in claimed:
                if instance in here:  # the state directory was lost: a new build finds the guest
                    continue
                if self.taker.release_claim(instance):
                    log.info('released the claim of %s: the instance is still queued', instance)
                    held.pop(instance)
                else:
                    self._needs_cleanup = True
        used = sum_resources(held.values())
        provider = read_provider(self._placement, self._compute, traits=True, aggregates=False, used=used)
        provider = provider or Provider(self._compute)
        if provider != self._room:
            self._room, self._fits_by_query = provider, {}
        self._room_read_at, self._has_read_traits = started_at, True

    def _is_held_elsewhere(self, place: WaitingEntry) -> bool:
        """Return whether another compute still holds a claim that made a take fail. Read placement only if one did."""
        instance = place.entry.instance
        if instance not in self._claimed_elsewhere:
            return False  # a take finds out: its claim expects that nothing is held
        holder = find_compute(allocations.read_consumer(self._placement, instance).allocations)
        if holder in ('', self._compute):
            self._claimed_elsewhere.discard(instance)
        return instance in self._claimed_elsewhere

    def _is_older(self, place: WaitingEntry) -> bool:
        """Return whether the request is no newer than `first_seen_revision` or the newest acceptance, see the class."""
        return place.revision <= max(self.first_seen_revision, self.offers.accepted_revision)

    def _may_run_elsewhere(self, place: WaitingEntry) -> bool:
        """Return whether the request _is_older(), and a silent compute may run it. Raises errors of placement."""
        return self._is_older(place) and bool(self.offers.find_silent(self._placement))

    def _check_group(self, waiting: QueueEntry) -> tuple[bool, Group | None]:
        """Read the request's group; return whether the group allows the request here, and the group.

        (True, None) without a group, (False, None) if it is malformed; None also for a group that does not exist yet.
        """
        if waiting.group is None:
            return True, None
        try:
            group, _ = sharing.load_group(self._store, waiting.group.name)
        except Unreadable as error:  # an audit reports the malformed group; other requests must not wait for it
            log.debug('%s: %s', waiting.instance, error)
            return False, None
        return self._is_allowed(waiting.instance, waiting.group, group), group

    def _is_allowed(self, instance: str, membership: Membership, group: Group | None) -> bool:
        """Return False if the group (None: not existing yet) excludes this compute, is full or has another policy."""
        try:
            merged = resolve_group(group, membership)
            return merged.explain_exclusion(self._compute) is None and len({*merged.members, instance}) <= MAX_MEMBERS
        except EcompError as error:  # the group was recreated with another policy, which excludes this request
            log.debug('%s', error)
            return False

    def _find_excluded(self, chosen: WaitingEntry, backlog: Backlog) -> list[WaitingEntry]:
        """Read the queued requests' groups; return `chosen`, and others whose group is malformed or excludes them."""
        waiting = [(place, place.entry.group) for place in backlog.entries.values() if place.entry.group is not None]
        groups, unreadable = sharing.load_groups(self._store, {own.name for _, own in waiting})
        excluded = [
            place
            for place, own in waiting
            if own.name in unreadable or not self._is_allowed(place.entry.instance, own, groups.get(own.name))
        ]
        return [chosen, *(place for place in excluded if place is not chosen)]

    def _take_if_fits(self, place: WaitingEntry, backlog: Backlog) -> bool:
        """Take the request if it still fits; return whether it was taken. Defer all requests of a removed flavor."""
        if self._take(place, 0, partial(self._check_fit, place, backlog)):
            return True
        flavor, now = place.entry.flavor.name, time.monotonic()
        if flavor not in self._flavor_checks.get_deferred(now):  # rarely, because most takes fail by a race
            self._flavor_checks.defer(flavor, FIRST_SKIP_SECONDS)
            if self._store.get(keys.flavor(flavor)) is None:
                skipped = [other for other in backlog.entries.values() if other.entry.flavor.name == flavor]
                self._skip(skipped, backlog)
        return False

    def _take(self, place: WaitingEntry, taker_revision: int, still_fits: Callable[[], bool]) -> bool:
        """Take the request, or note why that failed; return whether it is ours now.

        NoCapacity and ClaimedElsewhere are noted; PlacementRefusal and a used uuid go to _on_refusal(). Other errors of
        etcd and placement are raised. In any case the request is deferred.
        """
        waiting = place.entry
        instance = waiting.instance
        with self._lock:
            self._own_moves.add(instance)
        is_taken = False
        try:
            is_taken = self.taker.take(place, taker_revision, lambda: not self.taker.is_used(instance) and still_fits())
        except ClaimedElsewhere as error:
            log.info('a queued request is not taken: %s', error)
            self._skip([place], self.offers.backlog or Backlog())
            self._claimed_elsewhere.add(instance)  # after _skip(): with a taker key the request is not in the backlog
        except NoCapacity as error:
            log.debug('%s: %s', instance, error)
            self._refusals[waiting.flavor.query] = self._room, time.monotonic() + ROOM_INTERVAL_SECONDS
            self._room_read_at = -math.inf
        except PlacementRefusal as error:
            self._on_refusal(place, f'placement refuses its claim: {error}')
        else:
            if not is_taken and self.taker.is_used(instance):
                self._on_refusal(place, 'this uuid was used on this compute before. Fix: use another uuid')
        finally:
            if instance not in self._skips:
                self.deferrals.defer(instance, ETCD_LAG_SECONDS)
            if not is_taken:
                with self._lock:
                    self._own_moves.discard(instance)
        if is_taken:
            self._room = self._room.with_usage([waiting.flavor.resources])
            # Queries that did not fit fit still less; the others are checked again.
            self._fits_by_query = {query: False for query, takes in self._fits_by_query.items() if not takes}
            log.info('took instance %s from the queue of flavor %s', instance, waiting.flavor.name)
        return is_taken

    def _on_refusal(self, place: WaitingEntry, reason: str) -> None:
        """Have the room read again; at a second refusal within ROOM_INTERVAL_SECONDS end the request in error.

        A refusal concerns the request alone, unless placement has lost our provider, which the read finds out.
        """
        instance = place.entry.instance
        self._room_read_at = -math.inf
        if not self._doubts.cancel(instance):
            self._doubts.defer(instance, ROOM_INTERVAL_SECONDS)
            return
        if self.taker.refuse(place, reason[:MAX_REASON_CHARACTERS]):
            log.error('instance %s is not taken from its queue: %s', instance, reason[:MAX_REASON_CHARACTERS])

    def _skip(self, places: Iterable[WaitingEntry], backlog: Backlog) -> None:
        """Defer `places` by a back-off up to MAX_SKIP_SECONDS; forget what is noted of requests not in the backlog."""
        queued = {place.entry.instance for place in backlog.entries.values()}
        self._skips = {name: delay for name, delay in self._skips.items() if name in queued}
        self._claimed_elsewhere &= queued
        for place in places:
            backoff = self._skips.setdefault(place.entry.instance, Backoff(FIRST_SKIP_SECONDS, MAX_SKIP_SECONDS))
            self.deferrals.defer(place.entry.instance, backoff.next() * self._rng.uniform(0.8, 1.0))


TAKING = 'taking requests from the queues'


class PullLoop:
    """Runs the puller of one compute, from start() to stop()."""

    def __init__(self, puller: Puller, failures: FailureLog, threads: Threads) -> None:
        self._puller = puller
        self._failures = failures
        self._job = ScheduledJob(threads, threads.queues, self._run_step)

    def start(self) -> None:
        """Have the queues' requests offered to this compute, and start a step soon."""
        self._puller.offers.add(self._puller.taker.compute, self.wake_up)
        self.wake_up('this compute started')

    def stop(self) -> None:
        """Stop, and wait for the take in flight. Before this `may_take` must return False."""
        self._puller.offers.remove(self._puller.taker.compute)
        self._job.cancel()
        self._job.wait()

    def wake_up(self, reason: str) -> None:
        """Start a step soon. From any thread."""
        log.debug('woken: %s', reason)
        self._job.schedule()

    def on_hosts(self, state: State) -> None:
        """Pass this compute's requests to the puller; start a step if others changed them. From any thread."""
        if self._puller.on_hosts(state):
            self.wake_up('the room of this compute changed')

    def _run_step(self) -> float:
        """Run a step unless backing off; return when the next is due. A failure is reported, and starts a back-off."""
        # New requests do not shorten the back-off after a failed step.
        retry_time = self._puller.deferrals.get_due_time(TAKING)
        if time.monotonic() < retry_time < math.inf:
            return retry_time
        wake = self._failures.attempt(TAKING, self._puller.step)
        if wake is not None:
            self._puller.deferrals.cancel(TAKING)
            return time.monotonic() + wake
        self._puller.reset()
        return self._puller.deferrals.defer(TAKING)
