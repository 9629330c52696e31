"""Thread pools of a process, jobs scheduled in them, back-off, and the log of failures.

One timer thread serves all jobs. A process of a thousand computes has no more threads than a process of a few.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ecomp.errors import EcompError, StrangeEtcd, Unreachable
from ecomp.model.backoff import Backoff

log = logging.getLogger(__name__)

# Delay before a job is retried that found no thread or raised an unexpected error.
AGAIN = 1.0
# Bounds of the back-off after failures.
FIRST_DELAY = 0.5
LAST_DELAY = 15.0

Result = TypeVar('Result')


class _Delay(NamedTuple):
    until: float
    backoff: Backoff | None


class Delays:
    """The times, on the monotonic clock, until which names are deferred. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._later: dict[str, _Delay] = {}

    def put_off(self, name: str, seconds: float | None = None) -> float:
        """Defer `name`, after a failure (no `seconds`) longer each time; return when it is due."""
        with self._changed:
            backoff = None
            if seconds is None:
                delay = self._later.get(name)
                backoff = (delay.backoff if delay else None) or Backoff(FIRST_DELAY, LAST_DELAY)
                seconds = backoff.next() * random.uniform(0.5, 1.0)
            self._later[name] = _Delay(time.monotonic() + seconds, backoff)
            return self._later[name].until

    def put_off_now(self, now: float) -> dict[str, float]:
        """Return {name: due time} of deferred names; forget due ones that did not fail."""
        with self._changed:
            self._later = {name: delay for name, delay in self._later.items() if delay.backoff or delay.until > now}
            return {name: delay.until for name, delay in self._later.items() if delay.until > now}

    def when(self, name: str) -> float:
        """Return the time until which `name` is, or was, deferred; inf if it has no deferral."""
        with self._changed:
            delay = self._later.get(name)
            return delay.until if delay is not None else math.inf

    def next(self, besides: Collection[str]) -> float:
        """Return the earliest due time of names that are not excluded; inf if there are none."""
        with self._changed:
            due_times = (delay.until for name, delay in self._later.items() if name not in besides)
            return min(due_times, default=math.inf)

    def forget(self, name: str) -> bool:
        """Cancel the deferral and the back-off of `name`; return whether it had one."""
        with self._changed:
            return self._later.pop(name, None) is not None

    def forget_all_but(self, names: Collection[str]) -> list[str]:
        """Cancel the deferral of every other name; return the names that had one."""
        with self._changed:
            removed = [name for name in self._later if name not in names]
            for name in removed:
                del self._later[name]
            return removed

    def clear(self) -> None:
        with self._changed:
            self._later.clear()


class _Loss(NamedTuple):
    about: str
    backend: bool


class Complaints:
    """The failures that last, by the activity that failed. Thread-safe.

    A failure is logged once and its end once, even if several activities meet it. All failures to reach one backend are
    one failure; other failures are the same if their texts are.
    """

    def __init__(self) -> None:
        # Called after the end of a failure: activities that wait for the same backend can be retried now.
        self.on_return: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._open: dict[str, _Loss] = {}
        self._returned: dict[_Loss, float] = {}

    def complain(self, doing: str, error: EcompError, began: float = math.inf) -> None:
        """Log that an activity failed and is retried, unless the failure is known.

        An attempt started (monotonic) before its backend recovered proves no new failure: a worker that was frozen
        during an outage, for example, finds its own connection broken long after the others.
        """
        if isinstance(error, StrangeEtcd):
            return  # the guard has logged it, and the activity is not retried
        backend = error.backend if isinstance(error, Unreachable) else ''
        loss = _Loss(backend or str(error), bool(backend))
        with self._lock:
            if loss.backend and began < self._returned.get(loss, -math.inf):
                return
            is_known = loss in self._open.values()
            self._open[doing] = loss
        if not is_known:
            log.warning('%s; trying again until it %s', error, 'is back' if backend else 'works')

    def settle(self, doing: str) -> bool:
        """Log the end of the failure of an activity; return False if it had not failed."""
        with self._lock:
            loss = self._open.pop(doing, None)
            if loss is None:
                return False
            # The failure ended for all activities; one that still fails reports it again.
            self._open = {other: other_loss for other, other_loss in self._open.items() if other_loss != loss}
            if loss.backend:
                self._returned[loss] = time.monotonic()
        log.info('%s is back' if loss.backend else 'what failed before works again: %s', loss.about)
        self.on_return()
        return True

    def attempt(
        self, doing: str, work: Callable[[], Result], is_moot: Callable[[], bool] = lambda: False
    ) -> Result | None:
        """Return the result of `work`; None after any Exception, which is logged unless moot."""
        began = time.monotonic()
        try:
            result = work()
        except EcompError as error:
            if not is_moot():
                self.complain(doing, error, began)
        except Exception:
            if not is_moot():
                log.exception('unexpected error while %s; trying again', doing)
        else:
            self.settle(doing)
            return result
        return None

    def hand_over(self, doing: str, to: str) -> None:
        """Forget an activity that is not retried; `other_activity` notices its backend's return."""
        with self._lock:
            loss = self._open.pop(doing, None)
            if loss is not None and loss.backend:
                self._open.setdefault(to, loss)


class Waker:
    """A pipe that ends the main thread's wait. Only wake() may be called from other threads."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._on_signals = False
        # Reentrant, because a signal handler may need it while its own thread holds it.
        self._lock = threading.RLock()
        self._closed = False

    def wake(self) -> None:
        """End the wait; no-op after close(), when the descriptor may be another file's."""
        with self._lock, suppress(BlockingIOError):  # the pipe is full of unread bytes, which end the wait as well
            if not self._closed:
                os.write(self._writer, b'.')

    def wake_on_signals(self) -> None:
        """Let signals end the wait. Call it in the main thread."""
        # The kernel may deliver a signal to any thread. The poll in the main thread, where alone Python runs handlers,
        # then does not end: the signal would be handled up to a minute later.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._on_signals = True

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.reader, 4096):
                pass

    def close(self) -> None:
        if self._on_signals:
            signal.set_wakeup_fd(-1)
        with self._lock:
            self._closed = True
            os.close(self.reader)
            os.close(self._writer)


class TurnThreads:
    """A pool of daemon threads: unlike a ThreadPoolExecutor's, they do not delay the exit."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads, self._idle, self._waiting = 0, 0, 0

    def submit(self, work: Callable[[], object]) -> None:
        """Have a thread call `work`; RuntimeError if the pool has none and cannot start one."""
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
        """Let the threads end after the work that was submitted."""
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
            del work  # or the thread keeps its objects alive until the next one comes
            with self._lock:
                self._idle += 1


class Turn:
    """Calls `work` in a thread of `pool`; it returns when it is due again, or inf."""

    def __init__(self, threads: Threads, pool: TurnThreads, work: Callable[[], float]) -> None:
        self._threads, self._pool, self._work = threads, pool, work
        self._when = math.inf
        self._ended = False
        # Whether `work` is running or submitted.
        self.is_busy = False
        # The time of the next timer that is set for this job. Only Threads changes it.
        self.woken_at = math.inf

    def at(self, moment: float = 0.0) -> None:
        """Run the job at this moment (monotonic) or before, again if it runs. From any thread."""
        with self._threads.changed:
            if moment < self._when and not self._ended:
                self._when = moment
                if not self.is_busy:
                    self._plan()

    def end(self) -> None:
        """Start the job no more. A run in flight continues: see is_busy and wait()."""
        with self._threads.changed:
            self._ended, self._when = True, math.inf

    def wait(self) -> None:
        """Wait for the run in flight. Must not be called by the job itself."""
        with self._threads.changed:
            self._threads.changed.wait_for(lambda: not self.is_busy)

    def woken(self, when: float) -> None:
        """Start the job if it is due. The timer thread calls this, holding `Threads.changed`."""
        if when == self.woken_at:
            self.woken_at = math.inf
        if not self.is_busy:
            self._plan()

    def _plan(self) -> None:
        now = time.monotonic()
        if self._when <= now:
            self._when, self.is_busy = math.inf, True
            try:
                self._pool.submit(self._do)
                return
            except RuntimeError as error:
                log.warning('no thread can be started: %s; trying again', error)
                self.is_busy, self._when = False, now + AGAIN
        self._threads.wake(self, self._when)

    def _do(self) -> None:
        next_due = time.monotonic() + AGAIN
        try:
            if not self._ended:
                next_due = self._work()
        finally:
            with self._threads.changed:
                self.is_busy = False
                if self._ended:
                    self._threads.changed.notify_all()
                else:
                    self._when = min(self._when, next_due)
                    self._plan()


class Threads:
    """The thread pools of a process, and the timer thread that starts due jobs."""

    # Most builds may wait for one image's download: neither other tasks nor builds of other images may wait for them.
    BUILDS = 32
    # Size of the pools that many computes use concurrently: their threads wait for the same etcd and placement.
    SHARED = 16

    def __init__(self, computes: int, tasks: int) -> None:
        """Make the pools; those for builds and for tasks have at least `max_tasks` threads."""
        few_threads, shared_threads = min(computes, 4), min(computes, self.SHARED)
        self.plans = TurnThreads('planner', few_threads)
        self.builds = TurnThreads('build', max(tasks, self.BUILDS))
        self.tasks = TurnThreads('task', tasks if computes == 1 else max(tasks, self.SHARED))
        self.minutes = TurnThreads('minute', few_threads)
        self.audits = TurnThreads('audits', few_threads)
        self.queues = TurnThreads('queues', shared_threads)
        self.changed = threading.Condition()
        self._closed = False
        self._heap: list[tuple[float, int, Turn]] = []
        self._number = itertools.count()
        self._timer = threading.Thread(target=self._run, name='turns', daemon=True)

    def wake(self, turn: Turn, when: float) -> None:
        """Set the job's timer to `when`, unless it is earlier; the caller holds `changed`."""
        if when >= turn.woken_at or self._closed:
            return
        turn.woken_at = when
        if not self._timer.is_alive():
            self._timer.start()
        heapq.heappush(self._heap, (when, next(self._number), turn))
        if self._heap[0][2] is turn:
            self.changed.notify_all()

    def close(self) -> None:
        """Start no further jobs, and let the threads end."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        for pool in (self.plans, self.builds, self.tasks, self.minutes, self.audits, self.queues):
            pool.close()

    def _run(self) -> None:
        with self.changed:
            while not self._closed:
                now = time.monotonic()
                while self._heap and self._heap[0][0] <= now:
                    when, _, turn = heapq.heappop(self._heap)
                    turn.woken(when)
                seconds = self._heap[0][0] - now if self._heap else threading.TIMEOUT_MAX
                self.changed.wait(min(seconds, threading.TIMEOUT_MAX))
