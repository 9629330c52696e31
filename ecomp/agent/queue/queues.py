"""Taking work from the flavors' queues: no scheduler says who takes what, each compute takes what it has room for.

What is done at each nudge is ecomp.agent.queue.pulling's; the threads are the process's.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping

from ecomp.agent.complaints import Complaints
from ecomp.agent.instance.instances import ControlPlane
from ecomp.agent.queue.offers import Offers
from ecomp.agent.queue.pulling import Puller
from ecomp.agent.queue.taking import Taker
from ecomp.agent.turns import Threads, Turn
from ecomp.errors import EcompError
from ecomp.model.inventory import Inventory
from ecomp.store.presence import Presence
from ecomp.store.watch import State

log = logging.getLogger(__name__)

TAKING = 'taking from the queues'


class Queues:
    """Takes for one compute, from start() to stop(). The last four arguments: see Puller."""

    def __init__(
        self,
        control: ControlPlane,
        presence: Presence,
        complaints: Complaints,
        *,
        offers: Offers,
        may_take: Callable[[], bool],
        registered: Mapping[str, Inventory],
        threads: Threads,
        first_seen: int,
        guests: Callable[[], Collection[str]],
    ) -> None:
        self._compute = control.compute
        self._complaints = complaints
        self._offers = offers
        self._may_take = may_take
        self._stopped = threading.Event()
        taker = Taker(control, lambda: presence.lease)
        self._puller = Puller(control, taker, offers, self._may_go_on, registered, first_seen, guests)
        self._agenda = self._puller.agenda
        self._turn = Turn(threads.turns, threads.queues, self._look)

    def start(self) -> None:
        """Begin to take."""
        self._offers.add(self._compute, self.nudge)
        self.nudge('it begins')

    def stop(self) -> None:
        """Take nothing more, and return when what is being taken is taken or given back."""
        self._offers.remove(self._compute)
        self._stopped.set()
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

    def _may_go_on(self) -> bool:
        return self._may_take() and not self._stopped.is_set()

    def _look(self) -> float:
        began = time.monotonic()
        # What failed waits out its delay, however often something comes into a queue meanwhile.
        again = self._agenda.when(TAKING)
        if began < again < math.inf:
            return again
        try:
            wake = self._puller.step()
            self._agenda.forget(TAKING)
            self._complaints.settle(TAKING)
            return time.monotonic() + wake
        except EcompError as error:
            self._complaints.complain(TAKING, error, began)
        except Exception:
            log.exception('unexpected error while taking from the queues; trying again')
        self._puller.failed()
        self._agenda.put_off(TAKING)
        return self._agenda.when(TAKING)
