"""What waits in the queues, as the computes of a process see it, and which of them is to look at what, and when."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ecomp.model import queue
from ecomp.model.cluster import accepted_in
from ecomp.model.host import InPlacement, unproven
from ecomp.model.queue import Backlog, Place, Takers, backlog_of, order, takers_of
from ecomp.model.text import some
from ecomp.placement import providers
from ecomp.placement.client import Placement
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
        self._takers = takers_of(state, self._takers or Takers())

    def on_accepted(self, state: State) -> None:
        """Take the revisions at which computes accepted this etcd."""
        self.accepted = accepted_in(state.values())

    def silent(self, placement: Placement) -> list[str]:
        """List the computes that placement knows and that are not proven to live: see computes.unproven().

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
        backlog = backlog_of(state, before or Backlog())
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
                if queue.among(now - since, len(numbers)) >= len(numbers):
                    del self._open[key]
                    told += nudges  # also those that nobody sees alive
                    continue
                told += (each for each in nudges if since + queue.opens(numbers.get(each, len(numbers))) <= now)
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
        return offer.since + queue.opens(number) <= time.monotonic()

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
            return queue.among(time.monotonic() - offer.since, len(offer.order))
        if takers is None:
            return 1
        return max(takers.with_room(place.waiting.flavor.resources), 1)

    def _offer(self, key: str, place: Place, now: float) -> list[str]:
        assert self._takers is not None
        numbers = order(place.waiting.instance, place.waiting.flavor.resources, self._takers)
        if len(numbers) > queue.FIRST:
            self._open[key] = _Offer(place, now, numbers)
            self._later(now + queue.WIDER)
            return [each for each in self._nudges if queue.opens(numbers.get(each, len(numbers))) == 0.0]
        return list(self._nudges)
