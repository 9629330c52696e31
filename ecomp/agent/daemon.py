"""The daemon: the threads in which one compute follows what is asked for, plans, and carries the plan out.

Three kinds of threads: the caller's (the main thread) tends the workers; one plans, at every nudge and once a minute;
a few carry out tasks, one an instance at a time. An event only ever nudges the planner.
"""

from __future__ import annotations

import logging
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
        every_minute: Callable[[], None],
        threads: int,
    ) -> None:
        self._hypervisor = hypervisor
        self._runner = runner
        self._claims = claims
        self._complaints = complaints
        self._every_minute = every_minute
        self._planner = Planner(compute, instances, hypervisor, runner, memory, complaints, self.nudge)
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
        self._look_delay = 0.0

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
        """Begin nothing more, for good: somebody else is this compute now (rule 9). What runs goes on."""
        self.read_only = True
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

    def _plan_for_ever(self) -> None:
        next_minute = time.monotonic()
        planner = self._planner
        while not self._stopping and not self.read_only:
            with self._changed:
                poll = [time.monotonic() + POLL] if planner.awaits_addresses else []
                wake = min([next_minute, *planner.due(), *poll])
                if not self._nudged:
                    self._changed.wait(max(wake - time.monotonic(), 0.01))
                look, self._nudged, self._look = self._look, False, False
                state = self._state
            if self._stopping or self.read_only or state is None:
                next_minute = time.monotonic() + POLL  # the first list nudges; until then there is nothing to plan
                continue
            doing, began = 'planning', time.monotonic()
            try:
                minute = look or time.monotonic() >= next_minute
                if minute:
                    next_minute = time.monotonic() + EVERY * random.uniform(0.9, 1.1)
                for work in planner.step(state):
                    planner.begin(work)
                    threads = self._builds if work.task.kind is Kind.BUILD else self._others
                    threads.submit(planner.carry_out, work)
                planner.settled(doing)
                if minute and not self._look_around():
                    self._look_delay = min(max(self._look_delay * 2, FIRST_DELAY), LAST_DELAY)
                    next_minute = time.monotonic() + self._look_delay * random.uniform(0.5, 1.0)
                elif minute:
                    self._look_delay = 0.0
                continue
            except EcompError as error:
                self._complaints.complain(doing, error, began)
            except Exception:
                log.exception('planning failed in a way nobody thought of; trying again')
            next_minute = min(next_minute, time.monotonic() + LAST_DELAY * random.uniform(0.5, 1.0))

    def _look_around(self) -> bool:
        """What is done once a minute; what fails of it hinders nothing else. True if all of it worked."""
        looks: dict[str, Callable[[], None]] = {
            LOOKING: lambda: self._claims.look(self._planner.guests, time.monotonic()),
            'reading records again': self._planner.recheck,
            'looking after the metadata server': self._every_minute,
        }
        worked = True
        for doing, look in looks.items():
            began = time.monotonic()
            try:
                look()
                self._planner.settled(doing)
            except EcompError as error:
                worked = False
                self._complaints.complain(doing, error, began)
        return worked
