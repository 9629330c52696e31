"""Taking work from the flavors' queues: no scheduler says who takes what, each compute takes what it has room for.

One thread. What it does at each nudge is ecomp.agent.pulling's.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from functools import partial

from ecomp.agent.complaints import Complaints
from ecomp.agent.pulling import EVERY, Puller
from ecomp.agent.taking import Taker
from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.backoff import Backoff
from ecomp.model.pull import Backlog, backlog_of
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from ecomp.store.presence import Presence
from ecomp.store.shared_follower import Part
from ecomp.store.watch import Follower, State

log = logging.getLogger(__name__)

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
        self._complaints = complaints
        self._read_backlog = read
        self._rng = random.Random()
        self._follower = follow(keys.QUEUES, self._on_queues, partial(complaints.complain, FOLLOWING), self._on_back)
        self._changed = threading.Condition()
        self._nudged = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name='queues', daemon=True)
        taker = Taker(compute, store, placement, lambda: presence.lease, now)
        self._may_take = may_take
        self._puller = Puller(compute, store, placement, taker, self._may_go_on, self._stopped.wait)

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
        if self._puller.on_hosts(state):
            self._nudge()

    def _on_queues(self, state: State) -> None:
        if self._puller.on_backlog(self._read_backlog(state)):
            self._nudge()

    def _may_go_on(self) -> bool:
        return self._may_take() and not self._stopped.is_set()

    def _on_back(self) -> None:
        self._complaints.settle(FOLLOWING)
        self._nudge()

    def _nudge(self) -> None:
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def _run(self) -> None:
        wake, backoff = EVERY, Backoff(FIRST_DELAY, LAST_DELAY)
        while not self._stopped.is_set():
            with self._changed:
                if not self._nudged:
                    self._changed.wait(wake)
                self._nudged = False
            began = time.monotonic()
            try:
                wake = self._puller.step()
                backoff.reset()
                self._complaints.settle(TAKING)
                continue
            except EcompError as error:
                self._complaints.complain(TAKING, error, began)
            except Exception:
                log.exception('unexpected error while taking from the queues; trying again')
            self._puller.failed()
            self._stopped.wait(backoff.next() * self._rng.uniform(0.5, 1.0))
            wake = 0.0
