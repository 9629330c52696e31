"""What is worth a look, what is in work and what is tried again later.

The shape is that of client-go's workqueue: dirty, processing, delayed (util/workqueue/queue.go). A look is at
everything here, so it is one thing that is dirty: a turn of whoever looks (ecomp.agent.turns).
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ecomp.model.backoff import Backoff

log = logging.getLogger(__name__)

FIRST_DELAY, LAST_DELAY = 0.5, 15.0
"""Seconds before what failed is tried again: the first time, and at most."""

Work = TypeVar('Work')


class _Delay(NamedTuple):
    until: float
    backoff: Backoff | None


class Agenda(Generic[Work]):
    """What is in work and put off, each by a name: an instance's, or a minute's look's. From any thread.

    `Work` is what is known of something in work. All times are on the monotonic clock.
    """

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self.on_nudge: Callable[[], None] = lambda: None
        """Called after each nudge, in whatever thread that is."""
        self._minute = False
        self._in_work: dict[str, Work] = {}
        self._taken: set[str] = set()
        self._later: dict[str, _Delay] = {}

    # Dirty

    def nudge(self, reason: str) -> None:
        """Have a look taken: something may have changed."""
        log.debug('nudged: %s', reason)
        self.on_nudge()

    def look_soon(self, reason: str) -> None:
        """Have a look taken, and what is done once a minute done now."""
        with self._changed:
            self._minute = True
        self.nudge(reason)

    def take_minute(self) -> bool:
        """Whether what is done once a minute is worth while now, by what somebody said since the last time."""
        with self._changed:
            minute, self._minute = self._minute, False
            return minute

    # In work

    def begin(self, name: str, work: Work) -> None:
        """Note that `name` is in work, until end() or hand_back()."""
        with self._changed:
            self._in_work[name] = work

    def take(self, name: str, work: Work) -> bool:
        """Somebody is at it now; False if it was handed back before: then nothing is to be done."""
        with self._changed:
            if self._in_work.get(name) is not work:
                return False
            self._taken.add(name)
            return True

    def hand_back(self, name: str, work: Work) -> bool:
        """It is not in work any more, for nobody may ever take it; False if somebody has."""
        with self._changed:
            if self._in_work.get(name) is not work or name in self._taken:
                return False
            del self._in_work[name]
            return True

    def end(self, name: str) -> None:
        """It is not in work any more."""
        with self._changed:
            self._taken.discard(name)
            del self._in_work[name]

    def in_work(self) -> dict[str, Work]:
        """What is in work now, by name."""
        with self._changed:
            return dict(self._in_work)

    # Later

    def put_off(self, name: str, seconds: float | None = None) -> None:
        """It is not tried before so many seconds have passed. None: it failed, and waits longer each time."""
        with self._changed:
            backoff = None
            if seconds is None:
                known = self._later.get(name)
                backoff = (known.backoff if known else None) or Backoff(FIRST_DELAY, LAST_DELAY)
                seconds = backoff.next() * random.uniform(0.5, 1.0)
            self._later[name] = _Delay(time.monotonic() + seconds, backoff)

    def put_off_now(self, now: float) -> dict[str, float]:
        """What is not to be tried yet, and until when. What did not fail is forgotten when its time has come."""
        with self._changed:
            self._later = {name: each for name, each in self._later.items() if each.backoff or each.until > now}
            return {name: each.until for name, each in self._later.items() if each.until > now}

    def when(self, name: str) -> float:
        """The time from which `name` is to be tried again; inf if it is not put off."""
        with self._changed:
            delay = self._later.get(name)
            return delay.until if delay is not None else math.inf

    def next(self) -> float:
        """When the next thing that was put off, and is not in work, is to be tried; inf if there is none."""
        with self._changed:
            times = (each.until for name, each in self._later.items() if name not in self._in_work)
            return min(times, default=math.inf)

    def forget(self, name: str) -> bool:
        """Put `name` off no longer; return whether it was put off."""
        with self._changed:
            return self._later.pop(name, None) is not None

    def forget_all_but(self, names: set[str]) -> list[str]:
        """Put off no longer what is neither among these nor in work; return what of that was put off."""
        with self._changed:
            gone = [each for each in self._later if each not in names and each not in self._in_work]
            for each in gone:
                del self._later[each]
            return gone

    def hurry(self, reason: str) -> None:
        """Put nothing off any longer, and have a look taken: what failed may work now."""
        with self._changed:
            self._later.clear()
        self.nudge(reason)
