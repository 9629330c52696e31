"""Take requests from the queues for one compute, without a thread of its own.

A compute takes the oldest request that fits its room and that it may take at this time (ecomp.model.queue), after a
delay that grows with its load, so that emptier computes go first. After lost races it chooses among the next few
requests at random; otherwise every compute with room would race for every request.

To take a request is to put the taker key, claim on the own provider, and move the request to the own /hosts key. The
taker key is on the presence's lease and the move compares it, so a compute that was frozen for longer than its lease
moves nothing. A claim that a dead attempt left on another compute is released by that compute only (rule 13). Offers
knows the queues for all computes of the process; Taker and Puller take for one of them.
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
from ecomp.agent.instance.records import older_record, revision_of
from ecomp.agent.turns import Complaints, Delays, Threads, Turn
from ecomp.errors import (
    ClaimedElsewhere,
    Conflict,
    EcompError,
    NoCapacity,
    NotFound,
    PlacementRefusal,
    UnknownOutcome,
    Unreadable,
)
from ecomp.failpoints import failpoint
from ecomp.model import keys, queue
from ecomp.model.allocation import Inventory, compute_of, summed
from ecomp.model.backoff import Backoff
from ecomp.model.cluster import accepted_in
from ecomp.model.explain import Provider
from ecomp.model.group import LARGEST, Group, Membership, settle
from ecomp.model.host import InPlacement, unproven
from ecomp.model.order import REASON_LIMIT, to_json
from ecomp.model.queue import Backlog, Place, QueueEntry, Takers
from ecomp.model.record import ERROR, GONE, KEPT, Failure, new_record
from ecomp.model.record import to_json as record_to_json
from ecomp.model.status import DISABLED
from ecomp.model.text import some
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import Consumer, claim, consumer, release
from ecomp.placement.client import Placement
from ecomp.placement.providers import look
from ecomp.store import sharing
from ecomp.store.client import Delete, Exists, Put, Unchanged, in_requests, withdraw
from ecomp.store.presence import LATE, SECONDS
from ecomp.store.watch import State

Nudge = Callable[[str], None]

log = logging.getLogger(__name__)

QUOTED = 3
# How long the list of silent computes is cached.
SILENT_FOR_SECONDS = 5.0


class _Offer(NamedTuple):
    """A queued request, when it was heard of (monotonic), and the computes' order to take it."""

    place: Place
    since: float
    order: Mapping[str, int]


class Offers:
    """The queued requests, and when which compute of this process may take them.

    The follower's thread calls the on_… methods. widen() must be called at the times (monotonic) passed to `schedule`.
    All else is thread-safe. Requests found by the first read are open to all, as they were offered before.
    """

    def __init__(self, later: Callable[[float], None]) -> None:
        self._later = later
        self._lock = threading.Lock()
        self._nudges: dict[str, Nudge] = {}
        self._takers: Takers | None = None
        self._open: dict[str, _Offer] = {}
        # Keys that a compute here is trying to take, and those that one failed to take, to be offered to others again.
        self._tried: set[str] = set()
        self._left: set[str] = set()
        # The list of silent computes is found out once for all computes of this process.
        self._presence: State = {}
        self._followed_since, self._asked = math.inf, -math.inf
        self._term = 0
        self._asking = threading.Lock()
        self._silent: list[str] = []
        self.accepted = 0  # the highest revision at which any compute accepted this etcd
        self.began_at = 0  # etcd's revision when this process started
        # Returns etcd's raft term: a new leader gives each lease its whole time again.
        self.term: Callable[[], int] = lambda: 0
        self.backlog: Backlog | None = None  # None before the queues were read

    def add(self, compute: str, nudge: Nudge) -> None:
        """Offer requests to a compute of this process, from now on."""
        with self._lock:
            self._nudges = {**self._nudges, compute: nudge}

    def remove(self, compute: str) -> None:
        """Stop offering requests to a compute."""
        with self._lock:
            self._nudges = {other: nudge for other, nudge in self._nudges.items() if other != compute}

    def on_computes(self, state: State) -> None:
        """Replace the presence keys."""
        if self._takers is None:
            self._followed_since, self._term = time.monotonic(), self.term()
        self._presence = state
        self._takers = queue.takers_of(state, self._takers or Takers())

    def on_accepted(self, state: State) -> None:
        self.accepted = accepted_in(state.values())

    def silent(self, placement: Placement) -> list[str]:
        """List the computes in placement that are not proven to be alive; the list is cached.

        A changed list is logged, because older requests are left alone. Errors of placement pass.
        """
        with self._asking:
            now = time.monotonic()
            if now - self._asked > SILENT_FOR_SECONDS:
                if (term := self.term()) != self._term:
                    self._followed_since, self._term = now, term
                has_lease_ended = now - self._followed_since > SECONDS + LATE
                names = providers.names(placement)
                silent_uuids = unproven(names, self._presence, self.began_at, has_lease_ended)
                shares = providers.shares(placement, silent_uuids) if silent_uuids else {}
                silent = [uuid for uuid in silent_uuids if InPlacement(uuid, uuid, shares.get(uuid, {})).is_ours]
                if silent and silent != self._silent:
                    shown = some(silent, QUOTED)
                    log.info('older queued requests are left alone, for they may run on silent computes: %s', shown)
                self._silent, self._asked = silent, now
            return self._silent

    def on_queues(self, state: State) -> None:
        """Replace the queues, and wake the computes that may take the new requests."""
        previous = self.backlog
        backlog = queue.backlog_of(state, previous or Backlog())
        now, woken = time.monotonic(), list[str]()
        with self._lock:
            nudges = self._nudges
            for key in [key for key, offer in self._open.items() if backlog.places.get(key) is not offer.place]:
                del self._open[key]
            self._tried = {key for key in self._tried if key in backlog.parsed}
            if previous is None or self._takers is None:
                woken += nudges if backlog.places else ()
            elif backlog.has_more:
                for key, place in backlog.places.items():
                    if previous.places.get(key) is not place:
                        woken += self._offer(key, place, now)
            self.backlog = backlog
        old_marks = previous.marks if previous is not None else {}
        woken += (uuid for uuid, marks in backlog.marks.items() if uuid in nudges and marks != old_marks.get(uuid))
        for compute in dict.fromkeys(woken):
            nudges[compute]('something waits')

    def widen(self) -> float:
        """Wake more computes for untaken requests; return when (monotonic) to call this again."""
        now, woken, next_time = time.monotonic(), list[str](), math.inf
        with self._lock:
            nudges = self._nudges
            idle, self._left = self._left, set()
            if self.backlog is not None and any(key in self.backlog.places and key not in self._open for key in idle):
                woken += nudges
            for key, (_, since, order) in list(self._open.items()):
                if queue.takers_allowed(now - since, len(order)) >= len(order):
                    del self._open[key]
                    woken += nudges  # also those whose presence key is missing
                    continue
                woken += (uuid for uuid in nudges if since + queue.opens_after(order.get(uuid, len(order))) <= now)
                next_time = min(next_time, now + queue.WIDER)
        for compute in dict.fromkeys(woken):
            nudges[compute]('more may take what waits')
        return next_time

    def is_open(self, place: Place, compute: str) -> bool:
        """Return whether the compute may take the request now, which no other one here is taking."""
        if place.waiting.key in self._tried:
            return False
        offer = self._open.get(place.waiting.key)
        if offer is None or offer.place is not place:
            return True
        number = offer.order.get(compute, len(offer.order))
        return offer.since + queue.opens_after(number) <= time.monotonic()

    def begin(self, place: Place) -> bool:
        """Begin to take the request, until end_take(); False if another compute here is taking it."""
        with self._lock:
            is_free = place.waiting.key not in self._tried
            self._tried.add(place.waiting.key)
        return is_free

    def end(self, place: Place, taken: bool) -> None:
        """Finish taking the request; offer it to other computes unless it is taken."""
        if taken:
            return
        with self._lock:
            self._tried.discard(place.waiting.key)
            self._left.add(place.waiting.key)
        self._later(0.0)

    def among(self, place: Place) -> int:
        """Return the number of computes that may take the request now, by their hints; at least 1."""
        takers, offer = self._takers, self._open.get(place.waiting.key)
        if offer is not None:
            return queue.takers_allowed(time.monotonic() - offer.since, len(offer.order))
        if takers is None:
            return 1
        return max(takers.with_room(place.waiting.flavor.resources), 1)

    def _offer(self, key: str, place: Place, now: float) -> list[str]:
        assert self._takers is not None
        order = queue.order(place.waiting.instance, place.waiting.flavor.resources, self._takers)
        if len(order) > queue.FIRST:
            self._open[key] = _Offer(place, now, order)
            self._later(now + queue.WIDER)
            return [compute for compute in self._nudges if queue.opens_after(order.get(compute, len(order))) == 0.0]
        return list(self._nudges)


class Taker:
    """Takes requests for one compute, one at a time; get_lease() is that of its presence."""

    def __init__(self, control: ControlPlane, lease: Callable[[], int]) -> None:
        self.compute = control.compute
        self.store = control.store
        self.placement = control.placement
        self.now = control.now
        self.lease = lease

    def take(self, place: Place, marked: int = 0, still_fits: Callable[[], bool] = lambda: True) -> bool:
        """Take the request; False after a lost race or cancellation, or if it does not fit here.

        `taker_revision` is that of our taker key, if an earlier attempt left one; `still_fits` is called once it
        is put. Raises NoCapacity (placement has no room here), PlacementRefusal (it never accepts this claim) and
        ClaimedElsewhere (another compute holds a claim; nothing is claimed here). Other errors but Conflict pass: the
        request stays queued, and a claim that was made is released by release_claim(), or used by the next take.
        """
        waiting = place.waiting
        mark = self._mark(place, marked)
        if mark is None:
            return False
        failpoint('marked')
        moved = False
        try:
            if not still_fits():
                raise Conflict(f'{waiting.instance}: does not fit here any more')
            self._claim(waiting, mark)
            failpoint('taken')
            moved, mark = self._move(place, mark)
        except Conflict as error:
            log.debug('%s', error)
        except EcompError:
            self._give_back_if_possible(waiting.key, mark)
            raise
        if moved:
            failpoint('moved')
            return True
        try:
            self.let_go(waiting.instance)
        finally:
            self._give_back_if_possible(waiting.key, mark)
        return False

    def refuse(self, place: Place, reason: str) -> bool:
        """End a request in error that no compute can take; False if gone, claimed or being taken.

        An instance that ended here before keeps its record, with the reason as its fault; one that lives here is not
        changed. Errors of etcd and placement pass; the call can be repeated.
        """
        waiting, now = place.waiting, self.now()
        if compute_of(consumer(self.placement, waiting.instance).allocations) not in ('', self.compute):
            return False
        key, own = waiting.key, self._own(waiting.instance)
        stored = self.store.read(own)
        record = new_record(self.compute, waiting.request(self.compute, now), now)
        conditions = [Unchanged(key, place.revision), Unchanged(keys.taker(key), 0)]
        conditions += [Unchanged(own_key, revision_of(stored.get(own_key))) for own_key in own]
        if not stored:
            failure = Failure('scheduled', reason, 'nothing was made of it')
            record = replace(record.at(ERROR, now, 'error'), error=failure)
            return sharing.write_end(self.store, record, conditions, [key]) is not None
        operations, shared = list[Put | Delete]([Delete(key)]), sharing.unshared
        old = older_record(stored.get(own[0]), self.compute, waiting.instance)
        if old is not None and old.state in KEPT and own[1] not in stored:  # others keep their name, group and quota
            operations.append(Put(own[0], record_to_json(replace(old, fault=reason)), stored[own[0]].lease))
            shared = partial(sharing.ended, self.store, record.at(GONE, now))
        return sharing.commit_with(self.store, conditions, operations, shared) is not None

    def is_used(self, instance: str) -> bool:
        """Return whether this compute has or had the instance, so that a take must not claim."""
        return bool(self.store.read(self._own(instance)))

    def _own(self, instance: str) -> list[str]:
        return [keys.record(self.compute, instance), keys.request(self.compute, instance)]

    def give_back(self, queue_key: str, mark: int) -> bool:
        """Delete our taker key, so that others may take the request; False if changed or gone."""
        return withdraw(self.store, keys.taker(queue_key), mark)

    def let_go(self, instance: str) -> bool:
        """Release our claim for a request that is not taken; True if it holds no claim now."""

        def wanted(holding: Mapping[str, Consumer]) -> Collection[str]:
            if self.compute not in holding[instance].allocations:
                return holding
            # A new order may use the uuid again, and its attempt then takes over our claim.
            if instance in in_requests(self.store.snapshot(keys.ATTEMPTS)):
                return holding
            return () if self.store.get(keys.request(self.compute, instance)) is None else holding

        return bool(release(self.placement, [instance], wanted, partial(sharing.note_released, self.store))[instance])

    def _mark(self, place: Place, marked: int, is_taken: bool = True) -> int | None:
        """Put our taker key; return its revision, None if the request is gone or has another one.

        With `needs_flavor` also None if the flavor is gone, whose requests no compute takes. Errors of etcd pass.
        """
        queue_key, lease = place.waiting.key, self.lease()
        key = keys.taker(queue_key)
        conditions: list[Unchanged | Exists] = [Unchanged(queue_key, place.revision), Unchanged(key, marked)]
        if is_taken:
            conditions.append(Exists(keys.flavor(place.waiting.flavor.name)))
        try:
            return self.store.commit(conditions, [Put(key, queue.mark_to_json(self.compute), lease)])
        except UnknownOutcome:
            entry = self.store.get(key)
            ours = entry is not None and entry.lease == lease and queue.marked_by(entry.value) == self.compute
            return entry.revision if entry is not None and ours and entry.revision != marked else None

    def _claim(self, waiting: QueueEntry, mark: int) -> None:
        key = keys.taker(waiting.key)

        def check() -> None:
            entry = self.store.get(key)
            if entry is None or entry.revision != mark:
                raise Conflict(f'{waiting.instance}: somebody else is taking it, or it was cancelled')

        new_claims = {waiting.instance: {self.compute: waiting.flavor.resources}}
        above = partial(sharing.highest_released, self.store, new_claims)
        claim(self.placement, new_claims, waiting.user_id, waiting.project_id, check, above)

    def _move(self, place: Place, mark: int) -> tuple[bool, int]:
        """Move the request to our key; return whether it is there, and the taker key's revision.

        Raises Conflict if its group excludes this compute; other errors of etcd pass.
        """
        waiting = place.waiting
        queue_key, instance = waiting.key, waiting.instance
        mark_key, request_key = keys.taker(queue_key), keys.request(self.compute, instance)
        conditions = [
            *(Unchanged(queue_key, place.revision), Unchanged(mark_key, mark)),
            *(Unchanged(keys.record(self.compute, instance), 0), Unchanged(request_key, 0)),
        ]
        request = to_json(waiting.request(self.compute, self.now()))
        operations: list[Put | Delete] = [Delete(queue_key), Delete(mark_key), Put(request_key, request)]
        try:
            written = sharing.commit_with(
                self.store,
                conditions,
                operations,
                lambda: sharing.joined(self.store, waiting.group, {instance: self.compute}),
            )
            return written is not None, mark
        except sharing.Excluded as error:
            raise Conflict(f'{instance}: its group allows it here no more') from error
        except UnknownOutcome:
            # A move in flight could still land after a read; once its taker key has changed it cannot.
            new_revision = self._mark(place, mark, is_taken=False)
            if new_revision is not None:
                return False, new_revision
            if self.give_back(queue_key, mark):
                return False, mark
            return self.store.get(request_key) is not None, mark

    def _give_back_if_possible(self, queue_key: str, mark: int) -> None:
        try:
            self.give_back(queue_key, mark)
        except EcompError as error:
            log.debug('the mark at %s is looked at again, or goes with our lease: %s', queue_key, error)


# While queued requests do not fit, the room is read at this interval. Computes hear of a request at the same moment, so
# their reads are spread.
EVERY = 60.0
SPREAD_OVER = 10.0
# Greatest age of the room at a take; a claim by an older room would only be refused. A claim does not check traits, so
# these are read before each take, except shortly after the room.
BELIEVED = 10.0
JUST_NOW = 1.0
# Time in which etcd shows a race that we lost.
BEHIND = 0.5
# Back-off, first and greatest, for a request whose group excludes this compute, whose flavor is gone, or that another
# compute holds or may run. A thousand computes may read as many groups, and each may soon allow it.
LEFT_ALONE = 5.0
AT_MOST = 30.0


@dataclass(eq=False)
class Puller:
    """Chooses and takes requests for one compute; only on_hosts() is thread-safe.

    `may_take` returns False while nothing may be taken. `registered_inventory` counts as free while the compute has no
    requests, and a claim corrects that; None: read the room first. `list_guests` returns the instances with a domain.

    A request for which another compute holds a claim is left alone, even if that compute is silent (rule 13). So is a
    request older than `first_seen_revision`, at which this compute first saw or accepted etcd, or than any compute's
    acceptance, while a compute is silent: it may have taken the request, and etcd and placement may both have been
    restored to before that.
    """

    taker: Taker
    offers: Offers
    may_take: Callable[[], bool]
    registered: Mapping[str, Inventory] | None
    first_seen: int
    guests: Callable[[], Collection[str]]

    def __post_init__(self) -> None:
        self._compute, self._store, self._placement = self.taker.compute, self.taker.store, self.taker.placement
        self.delays = Delays()
        self._rng = random.Random()
        # Guards the next three between step() and the followers of etcd.
        self._lock = threading.Lock()
        self._changed_here = True
        # The instances of this compute's requests (None: not read yet), and those that we moved there ourselves.
        self._here: set[str] | None = None
        self._moved: set[str] = set()
        # Claims that placement refused: by query, the room at that time and when to try again; and by request.
        self._refused: dict[str, tuple[Provider, float]] = {}
        self._doubted, self._asked_for = Delays(), Delays()
        self._left: dict[str, Backoff] = {}
        self._claimed_elsewhere: set[str] = set()  # instances for which another compute holds a claim
        self._takes: dict[str, bool] = {}
        self._room = Provider(self._compute)
        self._read, self._look_at, self._looked = -math.inf, math.inf, False
        self._among = 1
        # The request to take next, and when (monotonic): emptier computes go first until then.
        self._next_take: tuple[Place, float] | None = None
        self._tidy = True

    def on_hosts(self, state: State) -> bool:
        """Note the requests here; return whether others than our own moves changed the room."""
        requested = {keys.last(key) for key in state}
        with self._lock:
            changed = (requested ^ (self._here or set())) - self._moved
            self._here, self._moved = requested, self._moved - requested
            self._changed_here = self._changed_here or bool(changed)
        return bool(changed)

    def failed(self) -> None:
        """Prepare for a step after one that raised an error, and may have left a claim."""
        self._read, self._tidy, self._next_take = -math.inf, True, None

    def step(self) -> float:
        """Take requests until none fits; return the seconds until the next step if nothing changes.

        Errors of etcd and placement pass; then reset() must be called before the next step.
        """
        while self.may_take():
            now = time.monotonic()
            deferred = self.delays.put_off_now(now)
            self._doubted.put_off_now(now)
            self._refused = {query: refusal for query, refusal in self._refused.items() if refusal[1] > now}
            backlog = self.offers.backlog
            if backlog is None:
                return EVERY  # the first list causes a step; before it, claims of dead attempts are unknown
            places = backlog.places.values()
            # Without what we have just tried, because the followed state may be stale.
            own_takes = [
                (key, *mark)
                for key, mark in backlog.marks.get(self._compute, {}).items()
                if keys.last(key) not in deferred
            ]
            for key, mark, place in own_takes:
                # An earlier take of ours was interrupted, or its request was cancelled.
                self.delays.put_off(keys.last(key), BEHIND)
                if place is None or self._is_held_elsewhere(place) or self._may_run_elsewhere(place):
                    self.taker.give_back(key, mark)
                else:
                    self._take(place, mark, self._is_open)
            if not places:
                self._look_at, self._among, self._next_take = math.inf, 1, None
                return BEHIND if self.delays.put_off_now(now) else EVERY
            if own_takes:
                continue
            if self._next_take is not None:
                place, when = self._next_take
                is_there = backlog.places.get(place.waiting.key) is place
                if is_there and when > now:
                    return when - now
                self._next_take, is_taken = None, False
                if is_there and self.offers.begin(place):  # in the backlog, so without a taker key
                    try:
                        is_taken = self._compete(place, backlog)
                    finally:
                        self.offers.end(place, is_taken)
                # If a thousand computes all waited for the first request, each take would make all of them choose
                # again, so after a lost race the choice widens. A few computes keep to the queue's order.
                self._among = min(queue.widened(self._among, is_taken), self.offers.among(place))
                continue
            chosen = self._next(backlog)
            if chosen is not None:
                allowed, group = self._group(chosen.waiting)
                if self._is_held_elsewhere(chosen):
                    self._leave([chosen], backlog)
                elif self._may_run_elsewhere(chosen):
                    self._leave(filter(self._is_older, places), backlog)
                elif not allowed:
                    self._leave(self._elsewhere(chosen, backlog), backlog)
                else:
                    self._left.pop(chosen.waiting.instance, None)
                    # Emptier computes go first.
                    wait_seconds = queue.patience(self._room, group, self.offers.among(chosen), self._rng)
                    self._next_take = chosen, time.monotonic() + wait_seconds
            else:
                self._among = 1  # once there is room again, start with the oldest request
                next_time = min([self._look_at, *self.delays.put_off_now(now).values()])
                return min(max(next_time - now, 0.01), EVERY)
        return EVERY

    def _next(self, backlog: Backlog) -> Place | None:
        """Choose the request to take next, by the last room read; None if none fits or is open."""
        if not any(self.offers.is_open(other, self._compute) for other in backlog.places.values()):
            return None  # without a call to placement
        if self.registered is not None and self._here == set():
            # Without traits, which are read before a take.
            self._room, self._takes, self._changed_here = Provider(self._compute, self.registered), {}, False
            self._read = time.monotonic()
        elif self._changed_here or self._read == -math.inf:
            self._look(backlog)
        is_known, self.registered = self.registered is None, None
        place = self._chosen(backlog)
        now = time.monotonic()
        if place is None and (not is_known or now >= self._look_at):
            self._look_at = math.inf
            self._look(backlog)
            place = self._chosen(backlog)
        if place is not None:
            self._look_at = math.inf
        elif self._look_at == math.inf:
            interval = BELIEVED if DISABLED in self._room.traits else EVERY  # an operator who enables it waits
            self._look_at = max(now, self._read + interval) + self._rng.uniform(0.0, SPREAD_OVER)
        return place

    def _still_fits(self, place: Place, backlog: Backlog) -> bool:
        """Check that the request still fits, which only the compute with its taker key does."""
        age = time.monotonic() - self._read
        if age > BELIEVED:
            self._look(backlog)
        elif (age > JUST_NOW or not self._looked) and not self._is_open():
            return False
        return queue.fits(place.waiting.flavor, self._room)

    def _is_open(self) -> bool:
        """Read the provider's traits, and return whether it is enabled."""
        traits = providers.names_of(self._placement, self._compute, providers.TRAITS)
        if traits != self._room.traits:
            self._room, self._takes = replace(self._room, traits=traits), {}
        return DISABLED not in traits

    def _chosen(self, backlog: Backlog) -> Place | None:
        self._takes = queue.subscribed(backlog.flavors, self._room, self._takes)
        takes = self._takes | {query: False for query, (provider, _) in self._refused.items() if provider == self._room}
        if not any(takes.values()):
            return None
        deferred = self.delays.put_off_now(time.monotonic())
        open_places = (place for place in backlog.places.values() if self.offers.is_open(place, self._compute))
        return queue.next_of(open_places, takes, deferred, self._among, self._rng)

    def _look(self, backlog: Backlog) -> None:
        """Read this compute's room, after releasing our dead attempts' claims for queued requests."""
        with self._lock:
            self._changed_here = False
        started_at = time.monotonic()  # an answer is as old as its query; a drain relies on that
        try:
            held = allocations.of_provider(self._placement, self._compute)
        except NotFound:  # the periodic check registers the provider again
            held = {}
        if self._tidy:
            # A request with another compute's taker key may be moved, or return to the queue with our claim.
            other_marks = [marks for whose, marks in backlog.marks.items() if whose != self._compute]
            self._tidy = any(keys.last(key) in held for marks in other_marks for key in marks)
            waiting = [place.waiting.instance for place in backlog.places.values()]
            claimed = [instance for instance in waiting if instance in held]
            here = self.guests() if claimed else ()
            for instance in claimed:
                if instance in here:  # the state directory was lost: a new build finds the guest
                    continue
                if self.taker.let_go(instance):
                    log.info('released the claim of %s, which waits in its queue again', instance)
                    held.pop(instance)
                else:
                    self._tidy = True
        used = summed(held.values())
        provider = look(self._placement, self._compute, True, traits=True, aggregates=False, used=used)
        provider = provider or Provider(self._compute)
        if provider != self._room:
            self._room, self._takes = provider, {}
        self._read, self._looked = started_at, True

    def _is_held_elsewhere(self, place: Place) -> bool:
        """Return whether another compute still holds the claim that made a take fail."""
        instance = place.waiting.instance
        if instance not in self._claimed_elsewhere:
            return False  # a take finds out: its claim expects that nothing is held
        holder = compute_of(allocations.consumer(self._placement, instance).allocations)
        if holder in ('', self._compute):
            self._claimed_elsewhere.discard(instance)
        return instance in self._claimed_elsewhere

    def _is_older(self, place: Place) -> bool:
        """Return whether the request is older than our etcd, in which a take may be forgotten."""
        return place.revision <= max(self.first_seen, self.offers.accepted)

    def _may_run_elsewhere(self, place: Place) -> bool:
        """Return whether a silent compute may run it, forgotten by etcd and placement."""
        return self._is_older(place) and bool(self.offers.silent(self._placement))

    def _group(self, waiting: QueueEntry) -> tuple[bool, Group | None]:
        """Return whether its group allows it here, and the group; None: none, or malformed."""
        if waiting.group is None:
            return True, None
        try:
            group, _ = sharing.group(self._store, waiting.group.name)
        except Unreadable as error:  # an audit reports the malformed group; other requests must not wait for it
            log.debug('%s: %s', waiting.instance, error)
            return False, None
        return self._allows(waiting.instance, waiting.group, group), group

    def _allows(self, instance: str, wanted: Membership, theirs: Group | None) -> bool:
        try:
            merged = settle(theirs, wanted)
            return merged.excludes(self._compute) is None and len({*merged.members, instance}) <= LARGEST
        except EcompError as error:  # the group was recreated with another policy, which excludes this request
            log.debug('%s', error)
            return False

    def _elsewhere(self, found: Place, backlog: Backlog) -> list[Place]:
        """Return this request and all others that their groups exclude here."""
        waiting = [(place, place.waiting.group) for place in backlog.places.values() if place.waiting.group is not None]
        groups, unreadable = sharing.groups(self._store, {own.name for _, own in waiting})
        excluded = [
            place
            for place, own in waiting
            if own.name in unreadable or not self._allows(place.waiting.instance, own, groups.get(own.name))
        ]
        return [found, *(place for place in excluded if place is not found)]

    def _compete(self, place: Place, backlog: Backlog) -> bool:
        """Take a request in competition; if its flavor is gone, skip all requests of it."""
        if self._take(place, 0, partial(self._still_fits, place, backlog)):
            return True
        flavor, now = place.waiting.flavor.name, time.monotonic()
        if flavor not in self._asked_for.put_off_now(now):  # rarely, because most takes fail by a race
            self._asked_for.put_off(flavor, LEFT_ALONE)
            if self._store.get(keys.flavor(flavor)) is None:
                skipped = [other for other in backlog.places.values() if other.waiting.flavor.name == flavor]
                self._leave(skipped, backlog)
        return False

    def _take(self, place: Place, mark: int, still_fits: Callable[[], bool]) -> bool:
        """Take the request, or note why that failed; return whether it is ours now."""
        waiting = place.waiting
        instance = waiting.instance
        with self._lock:
            self._moved.add(instance)
        is_taken = False
        try:
            is_taken = self.taker.take(place, mark, lambda: not self.taker.is_used(instance) and still_fits())
        except ClaimedElsewhere as error:
            log.info('%s, and is left alone', error)
            self._leave([place], self.offers.backlog or Backlog())
            self._claimed_elsewhere.add(instance)  # after _skip(): with a taker key the request is not in the backlog
        except NoCapacity as error:
            log.debug('%s: %s', instance, error)
            self._refused[waiting.flavor.query] = self._room, time.monotonic() + EVERY
            self._read = -math.inf
        except PlacementRefusal as error:
            self._on_refusal(place, f'placement refuses its claim: {error}')
        else:
            if not is_taken and self.taker.is_used(instance):
                self._on_refusal(place, 'queued again, and refused: this uuid was used here. Fix: use another uuid')
        finally:
            if instance not in self._left:
                self.delays.put_off(instance, BEHIND)
            if not is_taken:
                with self._lock:
                    self._moved.discard(instance)
        if is_taken:
            self._room = self._room.less([waiting.flavor.resources])
            # Queries that did not fit fit still less; the others are checked again.
            self._takes = {query: False for query, takes in self._takes.items() if not takes}
            log.info('took instance %s from the queue of flavor %s', instance, waiting.flavor.name)
        return is_taken

    def _on_refusal(self, place: Place, reason: str) -> None:
        """Read the room again at a first refusal, and end the request in error at a second one.

        A refusal concerns the request alone, unless placement has lost our provider, which the read finds out.
        """
        instance = place.waiting.instance
        self._read = -math.inf
        if not self._doubted.forget(instance):
            self._doubted.put_off(instance, EVERY)
            return
        if self.taker.refuse(place, reason[:REASON_LIMIT]):
            log.error('instance %s is not taken from its queue: %s', instance, reason[:REASON_LIMIT])

    def _leave(self, places: Iterable[Place], backlog: Backlog) -> None:
        """Defer these requests, for longer each time."""
        queued = {place.waiting.instance for place in backlog.places.values()}
        self._left = {name: delay for name, delay in self._left.items() if name in queued}
        self._claimed_elsewhere &= queued
        for place in places:
            backoff = self._left.setdefault(place.waiting.instance, Backoff(LEFT_ALONE, AT_MOST))
            self.delays.put_off(place.waiting.instance, backoff.next() * self._rng.uniform(0.8, 1.0))


TAKING = 'taking from the queues'


class Queues:
    """Runs the puller of one compute, from start() to stop()."""

    def __init__(self, puller: Puller, complaints: Complaints, threads: Threads) -> None:
        self._puller = puller
        self._complaints = complaints
        self._turn = Turn(threads, threads.queues, self._look)

    def start(self) -> None:
        self._puller.offers.add(self._puller.taker.compute, self.nudge)
        self.nudge('it begins')

    def stop(self) -> None:
        """Stop, and wait for the take in flight. Before this `may_take` must return False."""
        self._puller.offers.remove(self._puller.taker.compute)
        self._turn.end()
        self._turn.wait()

    def nudge(self, reason: str) -> None:
        """Start a step soon. From any thread."""
        log.debug('nudged: %s', reason)
        self._turn.at()

    def on_hosts(self, state: State) -> None:
        """Start a step if the requests of this compute changed its room. From any thread."""
        if self._puller.on_hosts(state):
            self.nudge('it has another room')

    def _look(self) -> float:
        # New requests do not shorten the back-off after a failed step.
        retry_time = self._puller.delays.when(TAKING)
        if time.monotonic() < retry_time < math.inf:
            return retry_time
        wake = self._complaints.attempt(TAKING, self._puller.step)
        if wake is not None:
            self._puller.delays.forget(TAKING)
            return time.monotonic() + wake
        self._puller.failed()
        return self._puller.delays.put_off(TAKING)
