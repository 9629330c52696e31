"""Taking work from the flavors' queues: no scheduler says who takes what, each compute takes what it has room for.

One thread. What it does at each nudge is ecomp.agent.queue.pulling's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ecomp.agent.complaints import Complaints
from ecomp.agent.instance.surroundings import ControlPlane
from ecomp.agent.queue.pulling import EVERY, Puller
from ecomp.agent.queue.taking import Taker
from ecomp.errors import EcompError
from ecomp.model.pull import Backlog
from ecomp.store.presence import Presence
from ecomp.store.watch import State

log = logging.getLogger(__name__)

TAKING = 'taking from the queues'


class Queues:
    """The thread of one compute, from start() to stop(). `may_take` is False while it is to take nothing."""

    def __init__(
        self, control: ControlPlane, presence: Presence, complaints: Complaints, may_take: Callable[[], bool]
    ) -> None:
        self._complaints = complaints
        self._may_take = may_take
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name='queues', daemon=True)
        taker = Taker(control, lambda: presence.lease)
        self._puller = Puller(control, taker, self._may_go_on, self._stopped.wait)
        self._agenda = self._puller.agenda

    def start(self) -> None:
        """Begin to take."""
        self._thread.start()

    def stop(self) -> None:
        """Take nothing more, and return when what is being taken is taken or given back."""
        self._stopped.set()
        self._agenda.hurry('stop')
        if self._thread.is_alive():
            self._thread.join()

    def nudge(self, reason: str) -> None:
        """Look soon at what could be taken. From any thread."""
        self._agenda.nudge(reason)

    def on_hosts(self, state: State) -> None:
        """What is asked of this compute, whole: what comes and goes there changes what it has left. From any thread."""
        if self._puller.on_hosts(state):
            self.nudge('it has another room')

    def on_backlog(self, backlog: Backlog) -> None:
        """What waits in the queues. From any thread."""
        if self._puller.on_backlog(backlog):
            self.nudge('something waits')

    def _may_go_on(self) -> bool:
        return self._may_take() and not self._stopped.is_set()

    def _run(self) -> None:
        wake = EVERY
        while not self._stopped.is_set():
            # What failed waits out its delay, however often something comes into a queue meanwhile.
            self._agenda.wait(time.monotonic() + wake, after=TAKING)
            began = time.monotonic()
            try:
                wake = self._puller.step()
                self._agenda.forget(TAKING)
                self._complaints.settle(TAKING)
                continue
            except EcompError as error:
                self._complaints.complain(TAKING, error, began)
            except Exception:
                log.exception('unexpected error while taking from the queues; trying again')
            self._puller.failed()
            self._agenda.put_off(TAKING)
            wake = 0.0
