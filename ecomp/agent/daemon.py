"""The daemon: the threads in which one compute follows what is asked for, plans, and carries the plan out.

The caller's (the main thread) tends the workers; one plans, at every nudge and once a minute; a few carry out tasks,
one an instance at a time; and what is asked of placement once a minute is asked in one of its own, for it may take a
minute to say nothing. An event only ever nudges the planner.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ecomp.agent.claims import ClaimKeeper
from ecomp.agent.complaints import Complaints
from ecomp.agent.instances import Instances
from ecomp.agent.memory import Memory
from ecomp.agent.plan import Kind
from ecomp.agent.planner import FIRST_DELAY, LAST_DELAY, LOOKING, Planner
from ecomp.agent.pool import Runner
from ecomp.agent.rounds import Round
from ecomp.errors import EcompError
from ecomp.store.client import Entry
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between two plans when nothing happens."""
POLL = 2.0
"""Seconds between two looks for addresses while one is pending and no lease was announced: a bridge has none."""
BUILDS = 32
"""Builds that are begun, most of which may wait for one image. A thread each, made when it is needed."""
PLANNING = 'planning'


class Daemon:
    """The loop of one compute: run() until stop() is called, then drain()."""

    def __init__(
        self,
        compute: str,
        instances: Instances,
        hypervisor: Hypervisor,
        runner: Runner,
        claims: ClaimKeeper,
        memory: Memory,
        complaints: Complaints,
        watch_over: Callable[[], None],
        keep_registered: Callable[[], None],
        threads: int,
    ) -> None:
        self._hypervisor = hypervisor
        self._runner = runner
        self._claims = claims
        self._complaints = complaints
        self._planner = Planner(compute, instances, hypervisor, runner, memory, complaints, self.nudge)
        near = {'reading records again': self._planner.recheck, 'looking after the metadata server': watch_over}
        far = {LOOKING: self._look_at_claims, 'looking at the provider': keep_registered}
        told = (complaints, self._planner.settled, self._is_ending)
        self._near, self._far = Round(near, *told), Round(far, *told)
        self._far_runs = threading.Lock()
        self._next_minute = 0.0
        # Builds wait for images; nothing else is to wait for builds, nor those of other images for a few.
        self._builds = ThreadPoolExecutor(max(threads, BUILDS), thread_name_prefix='build')
        self._others = ThreadPoolExecutor(threads, thread_name_prefix='task')
        self._thread = threading.Thread(target=self._plan_for_ever, name='planner', daemon=True)
        self._changed = threading.Condition()
        self._nudged = True
        self._look = False
        self._stopping = False
        self.read_only = False
        self._state: Mapping[str, Entry] | None = None

    def begin(self) -> None:
        """Work, as far as nobody need tend the workers. run() is to follow, unless another one's does for both."""
        self._hypervisor.on_change(self.nudge, self.look_soon)
        self._thread.start()

    def run(self) -> None:
        """Work, until stop(). Called by the main thread after begin()."""
        while not self._stopping:
            self._runner.tend(EVERY)

    def wake_on_signals(self) -> None:
        """From now on a signal ends the wait in run() at once. The main thread's work."""
        self._runner.wake_on_signals()

    def drain(self) -> None:
        """Begin nothing more, and return when what is in work has ended."""
        self._stopping = True
        self.nudge('stop')
        self._planner.stop_builds()
        while self._thread.is_alive() or not self._planner.is_idle:
            self._runner.tend(0.2)
        self._builds.shutdown()
        self._others.shutdown()

    def stop(self) -> None:
        """End soon. Safe in a signal handler."""
        self._stopping = True
        self._runner.wake()

    def become_read_only(self, reason: str) -> None:
        """Begin nothing more, for good: somebody else is this compute now (rule 9). What runs goes on.

        A build stops at its next step and undoes itself: the other one makes it.
        """
        self.read_only = True
        self._planner.stop_builds()
        log.error('%s. From now on this one only watches; what runs goes on', reason)

    def on_state(self, state: Mapping[str, Entry]) -> None:
        """What is asked of this compute, whole: the follower's callback."""
        with self._changed:
            self._state = state
            self._nudged = True
            self._changed.notify()

    def nudge(self, reason: str) -> None:
        """Plan soon: something may have changed. From any thread."""
        log.debug('nudged: %s', reason)
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def look_soon(self, reason: str) -> None:
        """The same, and do what is done once a minute."""
        with self._changed:
            self._look = True
        self.nudge(reason)

    def works_again(self) -> None:
        """What failed may work now: nothing waits out its delay. From any thread."""
        self._planner.works_again()

    def _is_ending(self) -> bool:
        return self._stopping or self.read_only

    def _plan_for_ever(self) -> None:
        worked = True
        while not self._is_ending():
            began = time.monotonic()
            try:
                state, look = self._wait(worked)
                if state is None or self._is_ending():
                    continue
                began = time.monotonic()
                self._plan(state, look)
                worked = True
                continue
            except EcompError as error:
                self._complaints.complain(PLANNING, error, began)
            except Exception:
                log.exception('unexpected error while planning; trying again')
                time.sleep(FIRST_DELAY)  # whatever it is, it is not to be met a thousand times a second
            worked = False
            self._next_minute = min(self._next_minute, time.monotonic() + LAST_DELAY * random.uniform(0.5, 1.0))

    def _wait(self, worked: bool) -> tuple[Mapping[str, Entry] | None, bool]:
        """Until there may be something to plan: what is asked, None before the first list; and see look_soon()."""
        with self._changed:
            now = time.monotonic()
            times = [self._next_minute, *self._planner.due(), *([now + POLL] if self._planner.awaits_addresses else [])]
            if self._state is None:
                times = [now + EVERY]  # the first list nudges
            elif worked:
                times += [self._near.again, self._far.again]
            if not self._nudged:
                self._changed.wait(max(min(times) - now, 0.01))
            look, self._nudged, self._look = self._look, False, False
            return self._state, look

    def _plan(self, state: Mapping[str, Entry], look: bool) -> None:
        minute = look or time.monotonic() >= self._next_minute
        if minute:
            self._next_minute = time.monotonic() + EVERY * random.uniform(0.9, 1.1)
        for work in self._planner.step(state):
            self._planner.begin(work)
            threads = self._builds if work.task.kind is Kind.BUILD else self._others
            try:
                threads.submit(self._planner.carry_out, work)
            except RuntimeError as error:  # it waits for one of those there are, and there may be none
                self._planner.hand_back(work, f'no thread can be started for it: {error}')
        self._planner.settled(PLANNING)
        if minute or time.monotonic() >= self._near.again:
            self._near.run()
        # One that waits for placement still is the next one, too.
        if (minute or time.monotonic() >= self._far.again) and self._far_runs.acquire(blocking=False):
            try:
                threading.Thread(target=self._run_far, name='minute', daemon=True).start()
            except RuntimeError as error:
                self._far_runs.release()
                raise EcompError(f'no thread can be started to ask placement: {error}') from error

    def _run_far(self) -> None:
        self._far.again = math.inf
        try:
            self._far.run()
        finally:
            self._far_runs.release()
        if self._far.again < math.inf:
            self.nudge('what is asked of placement failed')  # so that it is tried again in time

    def _look_at_claims(self) -> None:
        self._claims.look(self._hypervisor.guests(), time.monotonic())
