"""The loop of one compute: plan at every nudge and once a minute, and have tasks carried out side by side.

An event only ever nudges the planner. What is asked of placement once a minute, and little else, is asked in another
thread, for placement may take a minute to say nothing. The threads are the process's, which all of its computes share.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ecomp.agent.instance.instances import Host
from ecomp.agent.instance.plan import Kind
from ecomp.agent.planner import EVERY, Planner, Work
from ecomp.agent.turns import Delays, Threads, Turn
from ecomp.store.client import Entry

log = logging.getLogger(__name__)

PLANNING, HERE, FAR = 'planning', 'looks in turn with plans', 'looks beside plans'


@dataclass(eq=False)
class Daemon:
    """The loop: begin(), run() until stop() is called, then drain().

    `far` is what is asked once a minute beside plans, mostly of placement, by what it is called; first after `first`
    seconds. `on_planned` is called after each plan, in its thread.
    """

    host: Host
    planner: Planner
    far: Mapping[str, Callable[[], None]]
    threads: Threads
    first: float
    on_planned: Callable[[], None]

    def __post_init__(self) -> None:
        self._complaints = self.planner.complaints
        self._here = {'reading records again': self.planner.recheck, 'plugging guests in': self.host.hypervisor.plug_in}
        self._here['looking after the metadata server'] = self.host.look_after
        # The back-off of planning and of the two rounds of looks.
        self._delays = Delays()
        self._turn = Turn(self.threads, self.threads.plans, self._look)
        self._far_turn = Turn(self.threads, self.threads.minutes, partial(self._look_at, FAR, self.far))
        self._next_minute = time.monotonic() + self.first
        # Never changed, only put in place of the one before, and then there is a nudge.
        self._state: Mapping[str, Entry] | None = None
        # False until it is True for good. No lock, for a signal handler sets it.
        self._stopping = False
        self.read_only = False

    def begin(self) -> None:
        """Work, as far as nobody need tend the workers. run() is to follow, unless another one's does for both."""
        self.host.hypervisor.on_change(self.planner.nudge, self.look_soon)
        self.planner.on_nudge = self._turn.at
        self._turn.at()  # for what there was a nudge before

    def run(self, alive: Callable[[], float]) -> None:
        """Work, until stop(). Called by the main thread after begin().

        `alive` is called whenever the loop goes around, and says after how many seconds it has to have done so again.
        """
        while not self._stopping:
            self.host.runner.tend(min(EVERY, alive()))

    def drain(self) -> None:
        """Begin nothing more, and return when what is in work has ended."""
        self._stopping = True
        self._turn.end()
        self._far_turn.end()
        self.planner.stop_builds()
        while self._turn.is_busy or self.planner.in_work():
            self.host.runner.tend(0.2)

    def stop(self) -> None:
        """End soon. Safe in a signal handler."""
        self._stopping = True
        self.host.runner.waker.wake()

    def become_read_only(self, reason: str) -> None:
        """Begin nothing more, before become_writable(): somebody else is this compute now (rule 9). What runs goes on.

        A build stops at its next step and undoes itself: the other one makes it.
        """
        self.read_only = True
        self.planner.stop_builds()
        log.error('%s. From now on this one only watches; what runs goes on', reason)

    def become_writable(self) -> None:
        """Begin again after become_read_only(): this process is the compute once more, and reads its requests anew."""
        self.read_only = False
        self.planner.allow_builds()
        log.warning('the presence key is held by this ecompute again: it builds and destroys again')
        self.planner.nudge('it may write again')

    def on_state(self, state: Mapping[str, Entry]) -> None:
        """Take all requests there are for this compute, and plan. The follower's callback."""
        self._state = state
        self.planner.nudge('its requests were read')

    def look_soon(self, reason: str) -> None:
        """Plan now, and do now what is done once a minute. From any thread."""
        self._next_minute = 0.0
        self.planner.nudge(reason)

    def is_ending(self) -> bool:
        """Return whether nothing more is begun: for good, or until become_writable()."""
        return self._stopping or self.read_only

    def _look(self) -> float:
        """Plan if there is anything to plan from; when (monotonic) to look again if nothing happens. Never raises."""
        if self.is_ending():
            return math.inf
        again = self._complaints.attempt(PLANNING, self._plan)
        if again is None:
            again = self._delays.put_off(PLANNING)
            self._next_minute = min(self._next_minute, again)
        else:
            self._delays.forget(PLANNING)
        return again

    def _plan(self) -> float:
        now, state = time.monotonic(), self._state
        if state is None:
            return now + EVERY  # the first list nudges
        is_minute = now >= self._next_minute
        if is_minute:
            self._next_minute = now + EVERY * random.uniform(0.9, 1.1)
        for work in self.planner.step(state):
            self._begin(work)
        self.on_planned()
        self._complaints.settle(PLANNING)  # before the looks below, which may fail
        if is_minute or self._delays.when(HERE) <= time.monotonic():
            self._look_at(HERE, self._here)
        # One that waits for placement still is the next one, too.
        if is_minute and not self._far_turn.is_busy:
            self._far_turn.at()
        # Whatever is overdue is not to be met a thousand times a second.
        due = self._next_minute, self._delays.when(HERE), *self.planner.due()
        return max(min(due), time.monotonic() + 0.01)

    def _begin(self, work: Work) -> None:
        self.planner.begin(work)
        pool = self.threads.builds if work.task.kind is Kind.BUILD else self.threads.tasks
        try:
            pool.submit(partial(self.planner.carry_out, work))
        except RuntimeError as error:
            self.planner.hand_back(work, f'no thread can be started for it: {error}')

    def _look_at(self, name: str, looks: Mapping[str, Callable[[], None]]) -> float:
        """Take one look after the other: a failed one hinders no other. Return when to look again before the minute."""
        worked = [self._works(doing, look) for doing, look in looks.items()]
        if not all(worked):
            return self._delays.put_off(name)
        self._delays.forget(name)
        return math.inf

    def _works(self, doing: str, look: Callable[[], None]) -> bool:
        def work() -> bool:
            look()
            return True

        # A look that is under way at the end fails because its connections are closed.
        return self.is_ending() or self._complaints.attempt(doing, work, self.is_ending) is not None
