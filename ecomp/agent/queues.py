"""Taking work from the flavors' queues: no scheduler says who takes what, each compute takes what it has room for.

One thread. It knows what the compute has left from placement, and looks again whenever that changes; it takes the
oldest request that fits, after it let the others go first for a moment that grows with its own load. Where others are
faster it takes one of the next few: else all computes that have room would race for every single request.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from ecomp.agent.complaints import Complaints
from ecomp.agent.taking import Taker
from ecomp.errors import EcompError, NoCapacity, PlacementRefusal, Unreadable
from ecomp.model import keys
from ecomp.model.explain import Provider
from ecomp.model.group import Group
from ecomp.model.pull import Backlog, Place, backlog_of, fits, next_of, patience, subscribed, widened
from ecomp.model.queue import Waiting
from ecomp.model.status import DISABLED
from ecomp.placement import allocations as ledger
from ecomp.placement import traits
from ecomp.placement.client import Placement
from ecomp.placement.room import look
from ecomp.store.client import Store
from ecomp.store.presence import Presence
from ecomp.store.shared_follower import Part
from ecomp.store.sharing import group
from ecomp.store.watch import Follower, State

log = logging.getLogger(__name__)

EVERY, SPREAD_OVER = 60.0, 10.0
"""Seconds between two looks at what this compute has left, while requests wait that do not fit; and over how many those
of many computes are spread, which all hear of a request at once."""
BELIEVED = 10.0
"""Seconds for which something is taken by what placement said last of inventory and usages: a claim is held to those.
Of traits it knows nothing: they are asked for whenever something is taken."""
BEHIND = 0.5
"""Seconds in which a race that we lost has to be seen in etcd."""
LEFT_ALONE = 5.0
"""Seconds for which a request is left alone whose group does not allow it here, or whose flavor is gone."""
FIRST_DELAY, LAST_DELAY = 0.5, 15.0
TAKING, FOLLOWING = 'taking from the queues', 'following the queues'


class Reader:
    """Reads what etcd has in the queues, once for all the computes of a process that follow it together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: State = {}
        self._backlog = Backlog()

    def read(self, state: State) -> Backlog:
        """What it says. From any thread."""
        with self._lock:
            if state is not self._state:
                self._state, self._backlog = state, backlog_of(state, self._backlog)
            return self._backlog


class Queues:
    """The thread of one compute, from start() to stop().

    `follow` makes what follows a prefix (see shared_follower.following()), `read` is a Reader's; `may_take` is False
    while it is to take nothing.
    """

    def __init__(
        self,
        compute: str,
        store: Store,
        placement: Placement,
        presence: Presence,
        complaints: Complaints,
        follow: Callable[..., Follower | Part],
        read: Callable[[State], Backlog],
        may_take: Callable[[], bool],
        now: Callable[[], str],
    ) -> None:
        self._compute = compute
        self._store = store
        self._placement = placement
        self._complaints = complaints
        self._read_backlog = read
        self._may_take = may_take
        self._taker = Taker(compute, store, placement, lambda: presence.lease, now)
        self._rng = random.Random()
        self._among, self._computes = 1, 1
        self._follower = follow(keys.QUEUES, self._on_queues, partial(complaints.complain, FOLLOWING), self._on_back)
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name='queues', daemon=True)
        self._nudged = False
        self._backlog: Backlog | None = None
        self._passed_over: dict[str, float] = {}
        self._asked_for: dict[str, float] = {}
        self._refused: dict[str, Provider] = {}
        self._takes: dict[str, bool] = {}
        # What is asked of this compute, and what of that we have moved there ourselves.
        self._here: set[str] = set()
        self._moved: set[str] = set()
        self._room = Provider(compute)
        self._read, self._look_at = -math.inf, math.inf
        self._changed_here = True
        self._tidy = True

    def start(self) -> None:
        """Begin to take."""
        self._follower.start()
        self._thread.start()

    def stop(self) -> None:
        """Take nothing more, and return when what is being taken is taken or given back."""
        self._stopped.set()
        self._nudge()
        if self._thread.is_alive():
            self._thread.join()
        self._follower.stop()

    def on_hosts(self, state: State) -> None:
        """What is asked of this compute, whole: what comes and goes there changes what it has left. From any thread."""
        here = {keys.last(key) for key in state}
        with self._changed:
            foreign = (here ^ self._here) - self._moved
            self._here, self._moved = here, self._moved - here
            if foreign:
                self._changed_here = self._nudged = True
                self._changed.notify()

    def _on_queues(self, state: State) -> None:
        backlog = self._read_backlog(state)
        with self._changed:
            # What others take is nothing to think about anew: of a thousand computes each would, at every step.
            if self._backlog is None or backlog.has_more or self._compute in backlog.marks:
                self._nudged = True
                self._changed.notify()
            self._backlog = backlog

    def _on_back(self) -> None:
        self._complaints.settle(FOLLOWING)
        self._nudge()

    def _nudge(self) -> None:
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def _run(self) -> None:
        wake, delay = EVERY, 0.0
        while not self._stopped.is_set():
            with self._changed:
                if not self._nudged:
                    self._changed.wait(wake)
                self._nudged = False
            began = time.monotonic()
            try:
                wake, delay = self._take_what_fits(), 0.0
                self._complaints.settle(TAKING)
                continue
            except EcompError as error:
                self._complaints.complain(TAKING, error, began)
            except Exception:
                log.exception('taking from the queues failed in a way nobody thought of; trying again')
            # What was claimed before it failed may be held still.
            self._read, self._tidy = -math.inf, True
            delay = min(max(delay * 2, FIRST_DELAY), LAST_DELAY)
            self._stopped.wait(delay * self._rng.uniform(0.5, 1.0))
            wake = 0.0

    def _take_what_fits(self) -> float:
        """Take until nothing fits any more; seconds until it is worth another look if nothing changes."""
        while self._may_take() and not self._stopped.is_set():
            now = time.monotonic()
            self._passed_over = {name: until for name, until in self._passed_over.items() if until > now}
            with self._changed:
                backlog = self._backlog or Backlog()
            places = backlog.places.values()
            # What we have just been at is left out: the state may be behind.
            ours = [
                (key, *mark)
                for key, mark in backlog.marks.get(self._compute, {}).items()
                if keys.last(key) not in self._passed_over
            ]
            for key, mark, place in ours:
                # An earlier attempt of ours ended in the middle, or what we were at was cancelled.
                self._pass_over(keys.last(key))
                if place is None:
                    self._taker.give_back(key, mark)
                else:
                    self._take(place, mark, self._is_open)
            if self._read == -math.inf:
                self._look(backlog)  # before anything waits: then all would look at once
            if not places:
                self._look_at = math.inf
                return BEHIND if self._passed_over else EVERY
            if ours:
                continue
            found = self._next(backlog)
            if found is not None:
                allowed, theirs = self._group(found.waiting)
                if not allowed:
                    self._leave(each for each in places if each.waiting.group == found.waiting.group)
                elif self._let_others_go_first(found, theirs):
                    self._among = widened(self._among, self._compete(found, backlog))
            else:
                return max(min([self._look_at, *self._passed_over.values()]) - now, 0.01)
        return EVERY

    def _next(self, backlog: Backlog) -> Place | None:
        """What to take, by what this compute had left when it looked last."""
        if self._changed_here:
            self._look(backlog)
        found = self._chosen(backlog)
        now = time.monotonic()
        if found is None and now >= self._look_at:
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
        if time.monotonic() - self._read > BELIEVED:
            self._look(backlog)
        elif not self._is_open():
            return False
        return fits(place.waiting.flavor, self._room)

    def _is_open(self) -> bool:
        """Whether this compute is not disabled, by its traits as they are now, which are remembered."""
        there = traits.names(self._placement, self._compute, traits.TRAITS)
        if there != self._room.traits:
            self._room, self._takes = replace(self._room, traits=there), {}
        return DISABLED not in there

    def _chosen(self, backlog: Backlog) -> Place | None:
        refused = {query: False for query, then in self._refused.items() if then == self._room}
        self._takes = subscribed(backlog.flavors, self._room, self._takes) | refused
        return next_of(backlog.places.values(), self._takes, self._passed_over, self._among, self._rng)

    def _look(self, backlog: Backlog) -> None:
        """Read what this compute has left, without what a dead attempt of ours holds for a request that waits."""
        with self._changed:
            self._changed_here = False
        if self._tidy:
            held = ledger.of_provider(self._placement, self._compute)
            for each in backlog.places.values():
                instance = each.waiting.instance
                if instance in held and self._taker.let_go(instance):
                    log.info('released the claim of %s, which waits in its queue again', instance)
            self._tidy = False
        found = look(self._placement, self._compute, True, traits=True, aggregates=False) or Provider(self._compute)
        if found != self._room:
            self._room, self._takes = found, {}
        self._computes = self._store.count(keys.COMPUTES)
        self._read = time.monotonic()

    def _group(self, waiting: Waiting) -> tuple[bool, Group | None]:
        """Whether its group allows it here, and the group as it is now."""
        if waiting.group is None:
            return True, None
        try:
            theirs, _ = group(self._store, waiting.group.name)
        except Unreadable as error:  # as the audit says; others are not to wait for it
            log.debug('%s: %s', waiting.instance, error)
            return False, None
        return theirs is None or theirs.excludes(self._compute) is None, theirs

    def _let_others_go_first(self, place: Place, theirs: Group | None) -> bool:
        """Wait for as long as our load says; whether it is still there then, and nobody is at it."""
        if self._stopped.wait(patience(self._room, theirs, self._computes, self._rng)):
            return False
        with self._changed:
            backlog = self._backlog or Backlog()
        return backlog.places.get(place.waiting.key) == place

    def _compete(self, place: Place, backlog: Backlog) -> bool:
        """Take what others may be after, too; where its flavor is gone all of that is left alone."""
        if self._take(place, 0, partial(self._still_fits, place, backlog)):
            return True
        flavor, now = place.waiting.flavor.name, time.monotonic()
        if now - self._asked_for.get(flavor, -math.inf) > LEFT_ALONE:  # mostly it was a race
            self._asked_for = {name: when for name, when in self._asked_for.items() if now - when <= LEFT_ALONE}
            self._asked_for[flavor] = now
            if self._store.get(keys.flavor(flavor)) is None:
                self._leave(each for each in backlog.places.values() if each.waiting.flavor.name == flavor)
        return False

    def _take(self, place: Place, mark: int, still_fits: Callable[[], bool]) -> bool:
        """Take it; whether it is ours now."""
        waiting = place.waiting
        instance = waiting.instance
        with self._changed:
            self._moved.add(instance)
        taken = False
        try:
            taken = self._taker.take(place, mark, still_fits)
        except (NoCapacity, PlacementRefusal) as error:
            log.debug('%s: %s', instance, error)
            self._refused[waiting.flavor.query] = self._room
            self._read = -math.inf
        finally:
            self._pass_over(instance)
            if not taken:
                with self._changed:
                    self._moved.discard(instance)
        if taken:
            self._room = self._room.less([waiting.flavor.resources])
            # What did not fit fits still less; the others are looked at again.
            self._takes = {query: False for query, takes in self._takes.items() if not takes}
            log.info('took instance %s from the queue of flavor %s', instance, waiting.flavor.name)
        return taken

    def _leave(self, places: Iterable[Place]) -> None:
        for each in places:
            self._pass_over(each.waiting.instance, LEFT_ALONE)

    def _pass_over(self, instance: str, seconds: float = BEHIND) -> None:
        self._passed_over[instance] = time.monotonic() + seconds
