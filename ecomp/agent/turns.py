"""What is done again and again for many, each when something happened or its time has come, and never twice at once.

One thread keeps the time of all, and what is done is done in a few threads of its kind, which all share: a process of a
thousand computes has no more of them than one of a few.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds until what could not be begun, or failed unexpectedly, is tried again."""


class TurnThreads:
    """At most `most` threads, made when they are needed, that do what is handed in. Nobody waits for their end.

    Python's own (ThreadPoolExecutor) is waited for when the process ends, and one of these may wait for placement then.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads, self._idle, self._waiting = 0, 0, 0

    def submit(self, work: Callable[[], object]) -> None:
        """Have this done. RuntimeError: there is no thread, and none can be started; then it is not done."""
        with self._lock:
            if self._idle <= self._waiting and self._threads < self._most:
                thread = threading.Thread(target=self._run, name=f'{self._name}_{self._threads}', daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not self._threads:
                        raise
                else:
                    self._threads, self._idle = self._threads + 1, self._idle + 1
            self._waiting += 1
            self._work.put(work)

    def close(self) -> None:
        """Have the threads end when what was handed in is done."""
        with self._lock:
            for _ in range(self._threads):
                self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            with self._lock:
                self._idle, self._waiting = self._idle - 1, self._waiting - 1
            try:
                work()
            except Exception:
                log.exception('unexpected error in thread %s', threading.current_thread().name)
            del work  # and with it whatever it is about, which may be long gone when the next comes
            with self._lock:
                self._idle += 1


class Turns:
    """The thread that begins each turn when it is time. Ends with close()."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._closed = False
        self._heap: list[tuple[float, int, Turn]] = []
        self._number = itertools.count()
        self._thread: threading.Thread | None = None

    def wake(self, turn: Turn, when: float) -> None:
        """Have the turn told at this moment (monotonic), unless it will be before. With `changed` held."""
        if when >= turn.woken_at or self._closed:
            return
        turn.woken_at = when
        if self._thread is None:
            thread = threading.Thread(target=self._run, name='turns', daemon=True)
            thread.start()
            self._thread = thread
        heapq.heappush(self._heap, (when, next(self._number), turn))
        if self._heap[0][2] is turn:
            self.changed.notify_all()

    def close(self) -> None:
        """Begin nothing any more."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def _run(self) -> None:
        with self.changed:
            while not self._closed:
                now = time.monotonic()
                while self._heap and self._heap[0][0] <= now:
                    when, _, turn = heapq.heappop(self._heap)
                    turn.woken(when)
                left = self._heap[0][0] - now if self._heap else threading.TIMEOUT_MAX
                self.changed.wait(min(left, threading.TIMEOUT_MAX))


class Turn:
    """`work`, done in a thread of `pool`; it returns when (monotonic; inf: not by itself) it is to be done again."""

    def __init__(self, turns: Turns, pool: TurnThreads, work: Callable[[], float]) -> None:
        self._turns, self._pool, self._work = turns, pool, work
        self._when = math.inf
        self._busy, self._ended = False, False
        self.woken_at = math.inf
        """When the turns' thread will tell it next: Turns' own."""

    def at(self, moment: float = 0.0) -> None:
        """Have it done at this moment at the latest; while it is being done: once more. From any thread."""
        with self._turns.changed:
            if moment < self._when and not self._ended:
                self._when = moment
                if not self._busy:
                    self._plan()

    def end(self) -> None:
        """Begin it no more. What is under way goes on: see is_busy and wait()."""
        with self._turns.changed:
            self._ended, self._when = True, math.inf

    @property
    def is_busy(self) -> bool:
        """Whether it is being done, or about to be."""
        return self._busy

    def wait(self) -> None:
        """Return when it is not being done any more. Not for its own thread."""
        with self._turns.changed:
            self._turns.changed.wait_for(lambda: not self._busy)

    def woken(self, when: float) -> None:
        """It is this moment now, for which wake() asked. With the turns' `changed` held."""
        if when == self.woken_at:
            self.woken_at = math.inf
        if not self._busy:
            self._plan()

    def _plan(self) -> None:
        now = time.monotonic()
        if self._when <= now:
            self._when, self._busy = math.inf, True
            try:
                self._pool.submit(self._do)
                return
            except RuntimeError as error:
                log.warning('no thread can be started: %s; trying again', error)
                self._busy, self._when = False, now + AGAIN
        self._turns.wake(self, self._when)

    def _do(self) -> None:
        again = time.monotonic() + AGAIN
        try:
            if not self._ended:
                again = self._work()
        finally:
            with self._turns.changed:
                self._busy = False
                if self._ended:
                    self._turns.changed.notify_all()
                else:
                    self._when = min(self._when, again)
                    self._plan()


class Threads:
    """The threads that the computes of a process share. `tasks`: how many are carried out at once, beside builds."""

    BUILDS = 32
    """Builds that are begun, most of which may wait for one image: nothing else is to wait for them, nor the builds
    of other images for a few."""
    SHARED = 16
    """Those of a kind that many computes need at once at most: what they wait for is etcd and placement, which all of
    them have in common."""

    def __init__(self, computes: int, tasks: int) -> None:
        few, many = min(computes, 4), min(computes, self.SHARED)
        self.turns = Turns()
        self.plans = TurnThreads('planner', few)
        self.builds = TurnThreads('build', max(tasks, self.BUILDS))
        self.tasks = TurnThreads('task', tasks if computes == 1 else max(tasks, self.SHARED))
        self.minutes = TurnThreads('minute', few)
        self.audits = TurnThreads('audits', few)
        self.queues = TurnThreads('queues', many)

    def close(self) -> None:
        """Let them end."""
        self.turns.close()
        for each in (self.plans, self.builds, self.tasks, self.minutes, self.audits, self.queues):
            each.close()
