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
from functools import partial

from ecomp.agent.agenda import Agenda
from ecomp.agent.instance.instances import Host
from ecomp.agent.instance.plan import Kind
from ecomp.agent.planner import Planner
from ecomp.agent.turns import Threads, Turn
from ecomp.errors import EcompError
from ecomp.store.client import Entry

log = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between two plans when nothing happens."""
POLL = 2.0
"""Seconds between two looks for addresses while one is pending and no lease was announced: a bridge has none."""
POLLS = 30
"""After POLL * POLLS seconds without an address the pause is 1/POLLS of the time waited, EVERY at most: some never have
one."""
PLANNING, HERE, FAR = 'planning', 'looks in turn with plans', 'looks beside plans'


class Daemon:
    """The loop: begin(), run() until stop() is called, then drain().

    `far` is what is asked once a minute beside plans, mostly of placement, by what it is called; first after `first`
    seconds. `on_planned` is called after each plan, in its thread.
    """

    def __init__(
        self,
        host: Host,
        planner: Planner,
        far: Mapping[str, Callable[[], None]],
        threads: Threads,
        *,
        first: float,
        on_planned: Callable[[], None],
    ) -> None:
        self._hypervisor = host.hypervisor
        self._runner = host.runner
        self._planner = planner
        self._agenda = planner.agenda
        self._complaints = planner.complaints
        self._here = {'reading records again': planner.recheck, 'plugging guests in': host.hypervisor.plug_in}
        self._here['looking after the metadata server'] = host.look_after
        self._far = far
        self._on_planned = on_planned
        # Of planning and the two rounds of looks: which has failed, and whether the far one is under way.
        self._rounds: Agenda[str] = Agenda()
        self._threads = threads
        self._turn = Turn(threads.turns, threads.plans, self._look)
        self._next_minute = time.monotonic() + first
        # Never changed, only put in place of the one before, and then there is a nudge.
        self._state: Mapping[str, Entry] | None = None
        # False until it is True for good. No lock, for a signal handler sets it.
        self._stopping = False
        self.read_only = False

    def begin(self) -> None:
        """Work, as far as nobody need tend the workers. run() is to follow, unless another one's does for both."""
        self._hypervisor.on_change(self._agenda.nudge, self._agenda.look_soon)
        self._agenda.on_nudge = self._turn.at
        self._turn.at()  # for what there was a nudge before

    def run(self, alive: Callable[[], float]) -> None:
        """Work, until stop(). Called by the main thread after begin().

        `alive` is called whenever the loop goes around, and says after how many seconds it has to have done so again.
        """
        while not self._stopping:
            self._runner.tend(min(EVERY, alive()))

    def drain(self) -> None:
        """Begin nothing more, and return when what is in work has ended."""
        self._stopping = True
        self._turn.end()
        self._planner.stop_builds()
        while self._turn.is_busy or self._agenda.in_work():
            self._runner.tend(0.2)

    def stop(self) -> None:
        """End soon. Safe in a signal handler."""
        self._stopping = True
        self._runner.wake()

    def become_read_only(self, reason: str) -> None:
        """Begin nothing more, before become_writable(): somebody else is this compute now (rule 9). What runs goes on.

        A build stops at its next step and undoes itself: the other one makes it.
        """
        self.read_only = True
        self._planner.stop_builds()
        log.error('%s. From now on this one only watches; what runs goes on', reason)

    def become_writable(self) -> None:
        """Begin again after become_read_only(): this process is the compute once more, and reads its requests anew."""
        self.read_only = False
        self._planner.allow_builds()
        log.warning('the presence key is held by this ecompute again: it builds and destroys again')
        self._agenda.nudge('it may write again')

    def on_state(self, state: Mapping[str, Entry]) -> None:
        """Take all requests there are for this compute, and plan. The follower's callback."""
        self._state = state
        self._agenda.nudge('its requests were read')

    def _is_ending(self) -> bool:
        return self._stopping or self.read_only

    def _look(self) -> float:
        """Plan if there is anything to plan from; when (monotonic) to look again if nothing happens. Never raises."""
        if self._is_ending():
            return math.inf
        began = time.monotonic()
        try:
            minute = self._agenda.take_minute()
            if self._state is not None:
                self._plan(self._state, minute or began >= self._next_minute)
            self._rounds.forget(PLANNING)
            return self._next()
        except EcompError as error:
            self._complaints.complain(PLANNING, error, began)
        except Exception:
            log.exception('unexpected error while planning; trying again')
        self._rounds.put_off(PLANNING)
        self._next_minute = min(self._next_minute, self._rounds.when(PLANNING))
        return self._rounds.when(PLANNING)

    def _next(self) -> float:
        """When, on the monotonic clock, there is something to plan even if nothing happens."""
        now = time.monotonic()
        if self._state is None:
            return now + EVERY  # the first list nudges
        without, since = self._planner.without_addresses
        poll = [now + poll_after(now - since)] if without else []
        # Whatever is overdue is not to be met a thousand times a second.
        return max(min([self._next_minute, self._rounds.next(), *self._planner.due(), *poll]), now + 0.01)

    def _plan(self, state: Mapping[str, Entry], minute: bool) -> None:
        if minute:
            self._next_minute = time.monotonic() + EVERY * random.uniform(0.9, 1.1)
        for work in self._planner.step(state):
            self._agenda.begin(work.instance, work)
            pool = self._threads.builds if work.task.kind is Kind.BUILD else self._threads.tasks
            try:
                pool.submit(partial(self._planner.carry_out, work))
            except RuntimeError as error:
                self._planner.hand_back(work, f'no thread can be started for it: {error}')
        self._on_planned()
        self._planner.settled(PLANNING)
        now = time.monotonic()
        if minute or self._rounds.when(HERE) <= now:
            self._run_round(HERE, self._here)
        # One that waits for placement still is the next one, too.
        if (minute or self._rounds.when(FAR) <= now) and not self._rounds.in_work():
            self._rounds.begin(FAR, FAR)
            try:
                self._threads.minutes.submit(self._run_far)
            except RuntimeError as error:
                self._rounds.end(FAR)
                raise EcompError(f'no thread can be started to ask placement: {error}') from error

    def _run_far(self) -> None:
        worked = self._run_round(FAR, self._far)
        self._rounds.end(FAR)
        if not worked:
            self._agenda.nudge('what is asked of placement failed')  # so that it is tried again in time

    def _run_round(self, name: str, looks: Mapping[str, Callable[[], None]]) -> bool:
        """One look after the other: what fails of them hinders nothing else. Never raises."""
        worked = [self._works(doing, look) for doing, look in looks.items()]
        if all(worked):
            self._rounds.forget(name)
        else:
            self._rounds.put_off(name)
        return all(worked)

    def _works(self, doing: str, look: Callable[[], None]) -> bool:
        if self._is_ending():
            return True
        began = time.monotonic()
        try:
            look()
            self._planner.settled(doing)
            return True
        except EcompError as error:
            if not self._is_ending():
                self._complaints.complain(doing, error, began)
        except Exception:
            if not self._is_ending():  # else what it speaks with is closed under it
                log.exception('unexpected error while %s; trying again', doing)
        return False


def poll_after(waited: float) -> float:
    """Seconds until the next look for addresses that the same guests have been without for so many seconds."""
    return min(max(POLL, waited / POLLS), EVERY)
