"""Take requests from the flavors' queues for one compute, without a thread of its own.

The compute knows from placement what it has left, and looks again whenever that changes. It takes the oldest request
that fits and that it may take at this time (ecomp.model.queue), after a delay that grows with its own load, in
which emptier computes go first. Where others are faster it takes one of the next few requests: otherwise every
compute with room would race for every single request.

To take a request is to mark it, claim it against ourselves and move it to our own /hosts key. The mark is on our
lease, and the move compares it: a compute that was frozen for longer than its lease moves nothing. A claim that a
dead attempt left on another compute is released by that compute, and by no other (rule 13).

Offers knows what waits, for all computes of the process; Taker and Puller take for one of them. They share a module of
more than 700 lines because they are one protocol: a take that fails tells the other computes by Offers that they may.
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
"""How many silent computes a log line names at most."""
SILENT_FOR_SECONDS = 5.0
"""How long it is not asked again which computes are silent."""


class _Offer(NamedTuple):
    """A place that was heard of at `since` (monotonic), and in which order computes may take it."""

    place: Place
    since: float
    order: Mapping[str, int]


class Offers:
    """What waits in the queues, and which compute of this process may take it when.

    The on_… are a follower's thread's; widen() is called at the moments that `later` is told, all else by any thread.
    What is in the queues when they are first read is everybody's: others have been asked for it before.
    """

    def __init__(self, later: Callable[[float], None]) -> None:
        self._later = later
        self._lock = threading.Lock()
        self._nudges: dict[str, Nudge] = {}
        self._takers: Takers | None = None
        self._open: dict[str, _Offer] = {}
        # What a compute here is trying to take; and what one tried in vain, so that others are told of it again.
        self._tried: set[str] = set()
        self._left: set[str] = set()
        # All computes of this process ask which others are silent: it is found out once for all of them.
        self._presence: State = {}
        self._followed_since, self._asked = math.inf, -math.inf
        self._term = 0
        self._asking = threading.Lock()
        self._silent: list[str] = []
        self.accepted = 0
        """The highest revision at which any compute accepted this etcd."""
        self.began_at = 0
        """Etcd's revision when this process began."""
        self.term: Callable[[], int] = lambda: 0
        """Return etcd's raft term: a new leader gives each lease its whole time again."""
        self.backlog: Backlog | None = None
        """None before the queues were read."""

    def add(self, compute: str, nudge: Nudge) -> None:
        """A compute of this process takes part."""
        with self._lock:
            self._nudges = {**self._nudges, compute: nudge}

    def remove(self, compute: str) -> None:
        """It does not any more."""
        with self._lock:
            self._nudges = {each: nudge for each, nudge in self._nudges.items() if each != compute}

    def on_computes(self, state: State) -> None:
        """Take all computes that are alive."""
        if self._takers is None:
            self._followed_since, self._term = time.monotonic(), self.term()
        self._presence = state
        self._takers = queue.takers_of(state, self._takers or Takers())

    def on_accepted(self, state: State) -> None:
        """Take the revisions at which computes accepted this etcd."""
        self.accepted = accepted_in(state.values())

    def silent(self, placement: Placement) -> list[str]:
        """List the computes that placement knows and that are not proven to live: see unproven().

        That requests are left alone because of them is logged whenever there are others.

        Errors: those of placement.
        """
        with self._asking:
            now = time.monotonic()
            if now - self._asked > SILENT_FOR_SECONDS:
                if (term := self.term()) != self._term:
                    self._followed_since, self._term = now, term
                has_lease_ended = now - self._followed_since > SECONDS + LATE
                names = providers.names(placement)
                found = unproven(names, self._presence, self.began_at, has_lease_ended)
                shares = providers.shares(placement, found) if found else {}
                silent = [each for each in found if InPlacement(each, each, shares.get(each, {})).is_ours]
                if silent and silent != self._silent:
                    named = some(silent, QUOTED)
                    log.info('older queued requests are left alone, for they may run on silent computes: %s', named)
                self._silent, self._asked = silent, now
            return self._silent

    def on_queues(self, state: State) -> None:
        """Take all that waits, and tell those that may take what is new."""
        before = self.backlog
        backlog = queue.backlog_of(state, before or Backlog())
        now, told = time.monotonic(), list[str]()
        with self._lock:
            nudges = self._nudges
            for key in [key for key, each in self._open.items() if backlog.places.get(key) is not each.place]:
                del self._open[key]
            self._tried = {key for key in self._tried if key in backlog.parsed}
            if before is None or self._takers is None:
                told += nudges if backlog.places else ()
            elif backlog.has_more:
                for key, place in backlog.places.items():
                    if before.places.get(key) is not place:
                        told += self._offer(key, place, now)
            self.backlog = backlog
        known = before.marks if before is not None else {}
        told += (each for each, marks in backlog.marks.items() if each in nudges and marks != known.get(each))
        for compute in dict.fromkeys(told):
            nudges[compute]('something waits')

    def widen(self) -> float:
        """Tell those that may take by now what nobody took; when (monotonic) this is worth while again."""
        now, told, again = time.monotonic(), list[str](), math.inf
        with self._lock:
            nudges = self._nudges
            left, self._left = self._left, set()
            if self.backlog is not None and any(key in self.backlog.places and key not in self._open for key in left):
                told += nudges
            for key, (_, since, numbers) in list(self._open.items()):
                if queue.takers_allowed(now - since, len(numbers)) >= len(numbers):
                    del self._open[key]
                    told += nudges  # also those that nobody sees alive
                    continue
                told += (each for each in nudges if since + queue.opens_after(numbers.get(each, len(numbers))) <= now)
                again = min(again, now + queue.WIDER)
        for compute in dict.fromkeys(told):
            nudges[compute]('more may take what waits')
        return again

    def is_open(self, place: Place, compute: str) -> bool:
        """Whether this compute may take it by now, and no other one of this process is at it."""
        if place.waiting.key in self._tried:
            return False
        offer = self._open.get(place.waiting.key)
        if offer is None or offer.place is not place:
            return True
        number = offer.order.get(compute, len(offer.order))
        return offer.since + queue.opens_after(number) <= time.monotonic()

    def begin(self, place: Place) -> bool:
        """Try to take it, until end(); False: another compute here is at it."""
        with self._lock:
            is_free = place.waiting.key not in self._tried
            self._tried.add(place.waiting.key)
        return is_free

    def end(self, place: Place, taken: bool) -> None:
        """It is `taken`, and gone as soon as etcd says so; or it is left to the others."""
        if taken:
            return
        with self._lock:
            self._tried.discard(place.waiting.key)
            self._left.add(place.waiting.key)
        self._later(0.0)

    def among(self, place: Place) -> int:
        """How many computes may take it by now."""
        takers, offer = self._takers, self._open.get(place.waiting.key)
        if offer is not None:
            return queue.takers_allowed(time.monotonic() - offer.since, len(offer.order))
        if takers is None:
            return 1
        return max(takers.with_room(place.waiting.flavor.resources), 1)

    def _offer(self, key: str, place: Place, now: float) -> list[str]:
        assert self._takers is not None
        numbers = queue.order(place.waiting.instance, place.waiting.flavor.resources, self._takers)
        if len(numbers) > queue.FIRST:
            self._open[key] = _Offer(place, now, numbers)
            self._later(now + queue.WIDER)
            return [each for each in self._nudges if queue.opens_after(numbers.get(each, len(numbers))) == 0.0]
        return list(self._nudges)


class Taker:
    """Takes for one compute, one request at a time. `lease` is the lease that says that the compute is alive."""

    def __init__(self, control: ControlPlane, lease: Callable[[], int]) -> None:
        self.compute = control.compute
        self.store = control.store
        self.placement = control.placement
        self.now = control.now
        self.lease = lease

    def take(self, place: Place, marked: int = 0, still_fits: Callable[[], bool] = lambda: True) -> bool:
        """Take it; False if somebody else was faster, or it was cancelled: nothing of it is left here then.

        `marked` is the revision of our own mark, if an earlier attempt left one; `still_fits` is asked once there is a
        mark. Errors: NoCapacity (placement has no room here), PlacementRefusal (it takes no such claim), Unreachable,
        Conflict, GenerationConflict: it waits again, and what may be claimed for it is released by let_go(), or used by
        this compute's next take; ClaimedElsewhere: another compute holds a claim for it, and nothing is claimed here.
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
        """End one in error that no compute can take, with the reason; False if somebody is at it, or it is not there.

        The record of one that ended here before says the reason as its fault; what lives here stays as it is.
        Where another compute holds a claim for it nothing is done. Errors: Unreachable and its like; asked again it is
        done, or found done.
        """
        waiting, now = place.waiting, self.now()
        if compute_of(consumer(self.placement, waiting.instance).allocations) not in ('', self.compute):
            return False
        key, own = waiting.key, self._own(waiting.instance)
        there = self.store.read(own)
        record = new_record(self.compute, waiting.request(self.compute, now), now)
        conditions = [Unchanged(key, place.revision), Unchanged(keys.taker(key), 0)]
        conditions += [Unchanged(each, revision_of(there.get(each))) for each in own]
        if not there:
            failure = Failure('scheduled', reason, 'nothing was made of it')
            record = replace(record.at(ERROR, now, 'error'), error=failure)
            return sharing.write_end(self.store, record, conditions, [key]) is not None
        operations, shared = list[Put | Delete]([Delete(key)]), sharing.unshared
        past = older_record(there.get(own[0]), self.compute, waiting.instance)
        if past is not None and past.state in KEPT and own[1] not in there:  # what lives keeps what it shares
            operations.append(Put(own[0], record_to_json(replace(past, fault=reason)), there[own[0]].lease))
            shared = partial(sharing.ended, self.store, record.at(GONE, now))
        return sharing.commit_with(self.store, conditions, operations, shared) is not None

    def is_used(self, instance: str) -> bool:
        """Whether this compute has or had the instance: no take of it can succeed, and a claim would change its own."""
        return bool(self.store.read(self._own(instance)))

    def _own(self, instance: str) -> list[str]:
        return [keys.record(self.compute, instance), keys.request(self.compute, instance)]

    def give_back(self, queue_key: str, mark: int) -> bool:
        """Take our mark away, so that others may take the request; False if it was not there any more as it was."""
        return withdraw(self.store, keys.taker(queue_key), mark)

    def let_go(self, instance: str) -> bool:
        """Release what this compute holds for a request that it does not take after all; True if nothing is held."""

        def wanted(holding: Mapping[str, Consumer]) -> Collection[str]:
            if self.compute not in holding[instance].allocations:
                return holding
            # Its uuid may have been asked for again meanwhile: whoever is at it holds what it has taken over from us.
            if instance in in_requests(self.store.snapshot(keys.ATTEMPTS)):
                return holding
            return () if self.store.get(keys.request(self.compute, instance)) is None else holding

        return bool(release(self.placement, [instance], wanted, partial(sharing.note_released, self.store))[instance])

    def _mark(self, place: Place, marked: int, is_taken: bool = True) -> int | None:
        """Put our mark; its revision, None if the request is not there any more or somebody else has marked it.

        `is_taken` False: not to take it.
        """
        queue_key, lease = place.waiting.key, self.lease()
        key = keys.taker(queue_key)
        conditions: list[Unchanged | Exists] = [Unchanged(queue_key, place.revision), Unchanged(key, marked)]
        if is_taken:  # of a flavor that is not there nobody takes
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

        wanted = {waiting.instance: {self.compute: waiting.flavor.resources}}
        above = partial(sharing.highest_released, self.store, wanted)
        claim(self.placement, wanted, waiting.user_id, waiting.project_id, check, above)

    def _move(self, place: Place, mark: int) -> tuple[bool, int]:
        """Deliver it to ourselves, once: True when it is, False when it is known that it is not; and our mark then."""
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
            # A move that is still on its way could land after a mere look: without its mark as it was it cannot.
            again = self._mark(place, mark, is_taken=False)
            if again is not None:
                return False, again
            if self.give_back(queue_key, mark):
                return False, mark
            return self.store.get(request_key) is not None, mark

    def _give_back_if_possible(self, queue_key: str, mark: int) -> None:
        try:
            self.give_back(queue_key, mark)
        except EcompError as error:
            log.debug('the mark at %s is looked at again, or goes with our lease: %s', queue_key, error)


EVERY, SPREAD_OVER = 60.0, 10.0
"""Seconds between two looks at what this compute has left, while requests wait that do not fit; and over how many those
of many computes are spread, which all hear of a request at once."""
BELIEVED = 10.0
"""Seconds for which placement's last answer about inventory and usages is good enough to take by: where it is too old,
the claim is refused. Traits refuse no claim, so they are read before each take."""
JUST_NOW = 1.0
"""Seconds after a look at all of it for which traits are not read again, as before the first take of many."""
BEHIND = 0.5
"""Seconds in which a race that we lost has to be seen in etcd."""
LEFT_ALONE, AT_MOST = 5.0, 30.0
"""Seconds for which a request is left alone whose group does not allow it here, whose flavor is gone, or that another
compute holds or may run: at first, and at most, where that stays so. A thousand computes may ask for as many groups,
and each may allow it soon."""


@dataclass(eq=False)
class Puller:
    """What waits, what is left here, and what was tried. step() is one thread's; on_hosts() is any thread's.

    What it is at nobody else is to be tried for a moment: that is put off in `delays`. `may_take` is False while it is
    to take nothing. `registered` is what placement was told that this compute has: as long as nothing is asked of it,
    all of that is believed to be free, and a claim says if it is not. None: it looks first. `guests` lists the
    instances that have a domain here.

    A request that another compute holds a claim for is left alone, however silent that compute is (rule 13). So is one
    that is older than `first_seen`, etcd's revision when this compute first saw or accepted it, or than what any other
    compute accepted, while one of the others is silent: that one may have taken it, and etcd and placement may both
    have been restored to before that.
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
        # Between those who follow etcd and step().
        self._lock = threading.Lock()
        self._changed_here = True
        # What is asked of this compute, and what of that we have moved there ourselves.
        self._here: set[str] | None = None
        self._moved: set[str] = set()
        # What placement said no to: of a flavor, with so much left here, and until when; of one request, until when.
        self._refused: dict[str, tuple[Provider, float]] = {}
        self._doubted, self._asked_for = Delays(), Delays()
        self._left: dict[str, Backoff] = {}
        self._claimed_elsewhere: set[str] = set()  # the instances that another compute holds a claim for
        self._takes: dict[str, bool] = {}
        self._room = Provider(self._compute)
        self._read, self._look_at, self._looked = -math.inf, math.inf, False
        self._among = 1
        # What it is about to take, and when: emptier computes go first until then.
        self._next_take: tuple[Place, float] | None = None
        self._tidy = True

    def on_hosts(self, state: State) -> bool:
        """What is asked of this compute, whole: what comes and goes there changes what it has left.

        True if that is worth a step.
        """
        here = {keys.last(key) for key in state}
        with self._lock:
            foreign = (here ^ (self._here or set())) - self._moved
            self._here, self._moved = here, self._moved - here
            self._changed_here = self._changed_here or bool(foreign)
        return bool(foreign)

    def failed(self) -> None:
        """A step raised something: what was claimed before that may be held still."""
        self._read, self._tidy, self._next_take = -math.inf, True, None

    def step(self) -> float:
        """Take until nothing fits any more; seconds until it is worth another look if nothing changes.

        Errors: those of etcd and placement; then failed() is to be said before the next step.
        """
        while self.may_take():
            now = time.monotonic()
            passed_over = self.delays.put_off_now(now)
            self._doubted.put_off_now(now)
            self._refused = {query: each for query, each in self._refused.items() if each[1] > now}
            backlog = self.offers.backlog
            if backlog is None:
                return EVERY  # the first list is worth a step: before it nothing is known of what a dead attempt holds
            places = backlog.places.values()
            # What we have just been at is left out: the state may be behind.
            ours = [
                (key, *mark)
                for key, mark in backlog.marks.get(self._compute, {}).items()
                if keys.last(key) not in passed_over
            ]
            for key, mark, place in ours:
                # An earlier attempt of ours ended in the middle, or what we were at was cancelled.
                self.delays.put_off(keys.last(key), BEHIND)
                if place is None or self._is_held_elsewhere(place) or self._may_run_elsewhere(place):
                    self.taker.give_back(key, mark)
                else:
                    self._take(place, mark, self._is_open)
            if not places:
                self._look_at, self._among, self._next_take = math.inf, 1, None
                return BEHIND if self.delays.put_off_now(now) else EVERY
            if ours:
                continue
            if self._next_take is not None:
                place, when = self._next_take
                is_there = backlog.places.get(place.waiting.key) is place
                if is_there and when > now:
                    return when - now
                self._next_take, taken = None, False
                if is_there and self.offers.begin(place):  # and nobody else has marked it
                    try:
                        taken = self._compete(place, backlog)
                    finally:
                        self.offers.end(place, taken)
                # Who was let go first may have it: if a thousand then waited for the next one in the queue, all of them
                # would choose anew whenever one is taken. A few computes keep to the queue's order.
                self._among = min(queue.widened(self._among, taken), self.offers.among(place))
                continue
            found = self._next(backlog)
            if found is not None:
                allowed, theirs = self._group(found.waiting)
                if self._is_held_elsewhere(found):
                    self._leave([found], backlog)
                elif self._may_run_elsewhere(found):
                    self._leave(filter(self._is_older, places), backlog)
                elif not allowed:
                    self._leave(self._elsewhere(found, backlog), backlog)
                else:
                    self._left.pop(found.waiting.instance, None)
                    # The others go first for as long as our load says.
                    wait = queue.patience(self._room, theirs, self.offers.among(found), self._rng)
                    self._next_take = found, time.monotonic() + wait
            else:
                self._among = 1  # once there is room again the oldest one is first
                again = min([self._look_at, *self.delays.put_off_now(now).values()])
                return min(max(again - now, 0.01), EVERY)
        return EVERY

    def _next(self, backlog: Backlog) -> Place | None:
        """What to take, by what this compute had left when it looked last."""
        if not any(self.offers.is_open(each, self._compute) for each in backlog.places.values()):
            return None  # nothing is asked of placement for it
        if self.registered is not None and self._here == set():
            # Of traits nothing is known, but these are asked for when something is taken.
            self._room, self._takes, self._changed_here = Provider(self._compute, self.registered), {}, False
            self._read = time.monotonic()
        elif self._changed_here or self._read == -math.inf:
            self._look(backlog)
        is_known, self.registered = self.registered is None, None
        found = self._chosen(backlog)
        now = time.monotonic()
        if found is None and (not is_known or now >= self._look_at):
            self._look_at = math.inf
            self._look(backlog)
            found = self._chosen(backlog)
        if found is not None:
            self._look_at = math.inf
        elif self._look_at == math.inf:
            every = BELIEVED if DISABLED in self._room.traits else EVERY  # who enables it waits for it
            self._look_at = max(now, self._read + every) + self._rng.uniform(0.0, SPREAD_OVER)
        return found

    def _still_fits(self, place: Place, backlog: Backlog) -> bool:
        """Whether what was chosen fits indeed: asked by the one that has its mark, or all would look."""
        age = time.monotonic() - self._read
        if age > BELIEVED:
            self._look(backlog)
        elif (age > JUST_NOW or not self._looked) and not self._is_open():
            return False
        return queue.fits(place.waiting.flavor, self._room)

    def _is_open(self) -> bool:
        """Whether this compute is not disabled, by its traits as they are now, which are remembered."""
        there = providers.names_of(self._placement, self._compute, providers.TRAITS)
        if there != self._room.traits:
            self._room, self._takes = replace(self._room, traits=there), {}
        return DISABLED not in there

    def _chosen(self, backlog: Backlog) -> Place | None:
        self._takes = queue.subscribed(backlog.flavors, self._room, self._takes)
        takes = self._takes | {query: False for query, (then, _) in self._refused.items() if then == self._room}
        if not any(takes.values()):
            return None
        passed_over = self.delays.put_off_now(time.monotonic())
        ours = (each for each in backlog.places.values() if self.offers.is_open(each, self._compute))
        return queue.next_of(ours, takes, passed_over, self._among, self._rng)

    def _look(self, backlog: Backlog) -> None:
        """Read what this compute has left, without what a dead attempt of ours holds for a request that waits."""
        with self._lock:
            self._changed_here = False
        began = time.monotonic()  # a slow placement's answer is as old as that: a drain waits no longer for who has it
        try:
            held = allocations.of_provider(self._placement, self._compute)
        except NotFound:  # it is registered anew within the minute
            held = {}
        if self._tidy:
            # One that another is at is that one's to move; it may also give it back as it is.
            theirs = [marks for whose, marks in backlog.marks.items() if whose != self._compute]
            self._tidy = any(keys.last(key) in held for marks in theirs for key in marks)
            waiting = [each.waiting.instance for each in backlog.places.values()]
            claimed = [instance for instance in waiting if instance in held]
            here = self.guests() if claimed else ()
            for instance in claimed:
                if instance in here:  # its state directory was lost: building it once more finds the guest
                    continue
                if self.taker.let_go(instance):
                    log.info('released the claim of %s, which waits in its queue again', instance)
                    held.pop(instance)
                else:
                    self._tidy = True
        used = summed(held.values())
        found = look(self._placement, self._compute, True, traits=True, aggregates=False, used=used)
        found = found or Provider(self._compute)
        if found != self._room:
            self._room, self._takes = found, {}
        self._read, self._looked = began, True

    def _is_held_elsewhere(self, place: Place) -> bool:
        """Return whether another compute still holds the claim because of which a take failed."""
        instance = place.waiting.instance
        if instance not in self._claimed_elsewhere:
            return False  # the take finds it out: it claims as if nothing was held
        on = compute_of(allocations.consumer(self._placement, instance).allocations)
        if on in ('', self._compute):
            self._claimed_elsewhere.discard(instance)
        return instance in self._claimed_elsewhere

    def _is_older(self, place: Place) -> bool:
        """Return whether it waited before this compute knew this etcd, so that what became of it may be forgotten."""
        return place.revision <= max(self.first_seen, self.offers.accepted)

    def _may_run_elsewhere(self, place: Place) -> bool:
        """Return whether a silent compute may run it, though neither etcd nor placement knows of that any more."""
        return self._is_older(place) and bool(self.offers.silent(self._placement))

    def _group(self, waiting: QueueEntry) -> tuple[bool, Group | None]:
        """Whether its group allows it here, and the group as it is now."""
        if waiting.group is None:
            return True, None
        try:
            theirs, _ = sharing.group(self._store, waiting.group.name)
        except Unreadable as error:  # as the audit says; others are not to wait for it
            log.debug('%s: %s', waiting.instance, error)
            return False, None
        return self._allows(waiting.instance, waiting.group, theirs), theirs

    def _allows(self, instance: str, wanted: Membership, theirs: Group | None) -> bool:
        try:
            found = settle(theirs, wanted)
            return found.excludes(self._compute) is None and len({*found.members, instance}) <= LARGEST
        except EcompError as error:  # it was made anew, with another rule: nobody is let in who says otherwise
            log.debug('%s', error)
            return False

    def _elsewhere(self, found: Place, backlog: Backlog) -> list[Place]:
        """What waits, beside this one, and its group does not allow here: all of these groups are read at once."""
        waiting = [(each, each.waiting.group) for each in backlog.places.values() if each.waiting.group is not None]
        there, unreadable = sharing.groups(self._store, {theirs.name for _, theirs in waiting})
        shut = [
            each
            for each, theirs in waiting
            if theirs.name in unreadable or not self._allows(each.waiting.instance, theirs, there.get(theirs.name))
        ]
        return [found, *(each for each in shut if each is not found)]

    def _compete(self, place: Place, backlog: Backlog) -> bool:
        """Take what others may be after, too; where its flavor is gone all of that is left alone."""
        if self._take(place, 0, partial(self._still_fits, place, backlog)):
            return True
        flavor, now = place.waiting.flavor.name, time.monotonic()
        if flavor not in self._asked_for.put_off_now(now):  # mostly it was a race
            self._asked_for.put_off(flavor, LEFT_ALONE)
            if self._store.get(keys.flavor(flavor)) is None:
                gone = [each for each in backlog.places.values() if each.waiting.flavor.name == flavor]
                self._leave(gone, backlog)
        return False

    def _take(self, place: Place, mark: int, still_fits: Callable[[], bool]) -> bool:
        """Take it; whether it is ours now."""
        waiting = place.waiting
        instance = waiting.instance
        with self._lock:
            self._moved.add(instance)
        taken = False
        try:
            taken = self.taker.take(place, mark, lambda: not self.taker.is_used(instance) and still_fits())
        except ClaimedElsewhere as error:
            log.info('%s, and is left alone', error)
            self._leave([place], self.offers.backlog or Backlog())
            self._claimed_elsewhere.add(instance)  # after that: while it is marked it is not in the backlog
        except NoCapacity as error:
            log.debug('%s: %s', instance, error)
            self._refused[waiting.flavor.query] = self._room, time.monotonic() + EVERY
            self._read = -math.inf
        except PlacementRefusal as error:
            self._on_refusal(place, f'placement refuses its claim: {error}')
        else:
            if not taken and self.taker.is_used(instance):
                self._on_refusal(place, 'queued again, and refused: this uuid was used here. Fix: use another uuid')
        finally:
            if instance not in self._left:
                self.delays.put_off(instance, BEHIND)
            if not taken:
                with self._lock:
                    self._moved.discard(instance)
        if taken:
            self._room = self._room.less([waiting.flavor.resources])
            # What did not fit fits still less; the others are looked at again.
            self._takes = {query: False for query, takes in self._takes.items() if not takes}
            log.info('took instance %s from the queue of flavor %s', instance, waiting.flavor.name)
        return taken

    def _on_refusal(self, place: Place, reason: str) -> None:
        """No take succeeds: it is of that request alone, unless placement has lost our provider.

        So it is looked for before the request is tried once more, and ended the second time.
        """
        instance = place.waiting.instance
        self._read = -math.inf
        if not self._doubted.forget(instance):
            self._doubted.put_off(instance, EVERY)
            return
        if self.taker.refuse(place, reason[:REASON_LIMIT]):
            log.error('instance %s is not taken from its queue: %s', instance, reason[:REASON_LIMIT])

    def _leave(self, places: Iterable[Place], backlog: Backlog) -> None:
        """Leave these alone for a while, and for longer each time."""
        waiting = {each.waiting.instance for each in backlog.places.values()}
        self._left = {name: each for name, each in self._left.items() if name in waiting}
        self._claimed_elsewhere &= waiting
        for each in places:
            backoff = self._left.setdefault(each.waiting.instance, Backoff(LEFT_ALONE, AT_MOST))
            self.delays.put_off(each.waiting.instance, backoff.next() * self._rng.uniform(0.8, 1.0))


TAKING = 'taking from the queues'


class Queues:
    """Runs the puller of one compute, from start() to stop()."""

    def __init__(self, puller: Puller, complaints: Complaints, threads: Threads) -> None:
        self._puller = puller
        self._complaints = complaints
        self._turn = Turn(threads, threads.queues, self._look)

    def start(self) -> None:
        """Begin to take."""
        self._puller.offers.add(self._puller.taker.compute, self.nudge)
        self.nudge('it begins')

    def stop(self) -> None:
        """Return when what is being taken is taken or given back. Before this, `may_take` has to be False."""
        self._puller.offers.remove(self._puller.taker.compute)
        self._turn.end()
        self._turn.wait()

    def nudge(self, reason: str) -> None:
        """Look soon at what could be taken. From any thread."""
        log.debug('nudged: %s', reason)
        self._turn.at()

    def on_hosts(self, state: State) -> None:
        """What is asked of this compute, whole: what comes and goes there changes what it has left. From any thread."""
        if self._puller.on_hosts(state):
            self.nudge('it has another room')

    def _look(self) -> float:
        # What failed waits out its delay, however often something comes into a queue meanwhile.
        again = self._puller.delays.when(TAKING)
        if time.monotonic() < again < math.inf:
            return again
        wake = self._complaints.attempt(TAKING, self._puller.step)
        if wake is not None:
            self._puller.delays.forget(TAKING)
            return time.monotonic() + wake
        self._puller.failed()
        return self._puller.delays.put_off(TAKING)
