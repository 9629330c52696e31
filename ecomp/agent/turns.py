"""The threads that the computes of a process share, the turns scheduled in them, back-off, and the log of failures.

One thread keeps the time of all turns. A few threads of each kind do the work of all computes, so a process of a
thousand computes has no more threads than one of a few.
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

AGAIN = 1.0
"""Seconds until what could not be begun, or failed unexpectedly, is tried again."""
FIRST_DELAY, LAST_DELAY = 0.5, 15.0
"""Seconds before what failed is tried again: the first time, and at most."""

Result = TypeVar('Result')


class _Delay(NamedTuple):
    until: float
    backoff: Backoff | None


class Delays:
    """Back-off: when each name is tried again, on the monotonic clock. From any thread."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._later: dict[str, _Delay] = {}

    def put_off(self, name: str, seconds: float | None = None) -> float:
        """Defer `name` by so many seconds; return when it is due. None: it failed, and waits longer each time."""
        with self._changed:
            backoff = None
            if seconds is None:
                known = self._later.get(name)
                backoff = (known.backoff if known else None) or Backoff(FIRST_DELAY, LAST_DELAY)
                seconds = backoff.next() * random.uniform(0.5, 1.0)
            self._later[name] = _Delay(time.monotonic() + seconds, backoff)
            return self._later[name].until

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

    def next(self, besides: Collection[str]) -> float:
        """Return when the first deferred name that is none of these is due; inf if there is none."""
        with self._changed:
            times = (each.until for name, each in self._later.items() if name not in besides)
            return min(times, default=math.inf)

    def forget(self, name: str) -> bool:
        """Put `name` off no longer; return whether it was put off."""
        with self._changed:
            return self._later.pop(name, None) is not None

    def forget_all_but(self, names: Collection[str]) -> list[str]:
        """Cancel the deferral of every name that is not among these; return the names."""
        with self._changed:
            gone = [each for each in self._later if each not in names]
            for each in gone:
                del self._later[each]
            return gone

    def clear(self) -> None:
        """Cancel every deferral: what failed may work now."""
        with self._changed:
            self._later.clear()


class _Loss(NamedTuple):
    about: str
    backend: bool


class Complaints:
    """What is failing now, by what was being done. From any thread.

    Each loss is logged once and each return once, in however many places it is met. What fails for want of a backend is
    one loss with all else that does; anything else is one for its text.
    """

    def __init__(self) -> None:
        self.on_return: Callable[[], None] = lambda: None
        """Called after something works that failed before: what waits for the same may be tried at once."""
        self._lock = threading.Lock()
        self._open: dict[str, _Loss] = {}
        self._returned: dict[_Loss, float] = {}

    def complain(self, doing: str, error: EcompError, began: float = math.inf) -> None:
        """This failed, and is tried again. What `began` (monotonic) before its backend's return proves no new loss.

        A worker frozen throughout an outage, say, meets its own broken connection long after everybody else.
        """
        if isinstance(error, StrangeEtcd):
            return  # its guard has said so, and it is not tried again
        backend = error.backend if isinstance(error, Unreachable) else ''
        loss = _Loss(backend or str(error), bool(backend))
        with self._lock:
            if loss.backend and began < self._returned.get(loss, -math.inf):
                return
            known = loss in self._open.values()
            self._open[doing] = loss
        if not known:
            log.warning('%s; trying again until it %s', error, 'is back' if backend else 'works')

    def settle(self, doing: str) -> bool:
        """Note that this works; return whether it failed before."""
        with self._lock:
            loss = self._open.pop(doing, None)
            if loss is None:
                return False
            # One that is back is back for all; who finds otherwise complains anew.
            self._open = {other: each for other, each in self._open.items() if each != loss}
            if loss.backend:
                self._returned[loss] = time.monotonic()
        log.info('%s is back' if loss.backend else 'what failed before works again: %s', loss.about)
        self.on_return()
        return True

    def attempt(
        self, doing: str, work: Callable[[], Result], is_moot: Callable[[], bool] = lambda: False
    ) -> Result | None:
        """Do `work` and return its result; log a failure, unless it is moot by then, and return None: try it again."""
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
        """This will not be tried any more: another thing that is, and needs the same, says when it works."""
        with self._lock:
            loss = self._open.pop(doing, None)
            if loss is not None and loss.backend:
                self._open.setdefault(to, loss)


class Waker:
    """A pipe that ends the main thread's wait. wake() is any thread's, all else the main thread's."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._on_signals = False
        # One that a signal handler may take while its own thread has it.
        self._lock = threading.RLock()
        self._closed = False

    def wake(self) -> None:
        """End the wait. Nothing once it is closed: by then its number may be another file's."""
        with self._lock, suppress(BlockingIOError):  # full of wakes nobody has read yet: that will do
            if not self._closed:
                os.write(self._writer, b'.')

    def wake_on_signals(self) -> None:
        """From now on a signal ends the wait. The main thread's work."""
        # The kernel may give a signal to any thread, and then the poll in the main thread, where alone Python's
        # handlers run, does not end: the signal would be heard up to a minute later.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._on_signals = True

    def clear(self) -> None:
        """Forget the wakes so far."""
        with suppress(BlockingIOError):
            while os.read(self.reader, 4096):
                pass

    def close(self) -> None:
        """Let the pipe go."""
        if self._on_signals:
            signal.set_wakeup_fd(-1)
        with self._lock:
            self._closed = True
            os.close(self.reader)
            os.close(self._writer)


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


class Turn:
    """`work`, done in a thread of `pool`; it returns when (monotonic; inf: not by itself) it is to be done again."""

    def __init__(self, threads: Threads, pool: TurnThreads, work: Callable[[], float]) -> None:
        self._threads, self._pool, self._work = threads, pool, work
        self._when = math.inf
        self._ended = False
        self.is_busy = False
        """Whether it is being done, or about to be."""
        self.woken_at = math.inf
        """When it will be told next: Threads' own."""

    def at(self, moment: float = 0.0) -> None:
        """Have it done at this moment at the latest; while it is being done: once more. From any thread."""
        with self._threads.changed:
            if moment < self._when and not self._ended:
                self._when = moment
                if not self.is_busy:
                    self._plan()

    def end(self) -> None:
        """Begin it no more. What is under way goes on: see is_busy and wait()."""
        with self._threads.changed:
            self._ended, self._when = True, math.inf

    def wait(self) -> None:
        """Return when it is not being done any more. Not for its own thread."""
        with self._threads.changed:
            self._threads.changed.wait_for(lambda: not self.is_busy)

    def woken(self, when: float) -> None:
        """It is this moment now, for which wake() asked. With the threads' `changed` held."""
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
        again = time.monotonic() + AGAIN
        try:
            if not self._ended:
                again = self._work()
        finally:
            with self._threads.changed:
                self.is_busy = False
                if self._ended:
                    self._threads.changed.notify_all()
                else:
                    self._when = min(self._when, again)
                    self._plan()


class Threads:
    """The threads that the computes of a process share, and the thread that begins each turn when it is due.

    `tasks`: how many are carried out at once, beside builds.
    """

    BUILDS = 32
    """Builds that are begun, most of which may wait for one image: nothing else is to wait for them, nor the builds
    of other images for a few."""
    SHARED = 16
    """Those of a kind that many computes need at once at most: what they wait for is etcd and placement, which all of
    them have in common."""

    def __init__(self, computes: int, tasks: int) -> None:
        few, many = min(computes, 4), min(computes, self.SHARED)
        self.plans = TurnThreads('planner', few)
        self.builds = TurnThreads('build', max(tasks, self.BUILDS))
        self.tasks = TurnThreads('task', tasks if computes == 1 else max(tasks, self.SHARED))
        self.minutes = TurnThreads('minute', few)
        self.audits = TurnThreads('audits', few)
        self.queues = TurnThreads('queues', many)
        self.changed = threading.Condition()
        self._closed = False
        self._heap: list[tuple[float, int, Turn]] = []
        self._number = itertools.count()
        self._timer = threading.Thread(target=self._run, name='turns', daemon=True)

    def wake(self, turn: Turn, when: float) -> None:
        """Have the turn told at this moment (monotonic), unless it will be before. With `changed` held."""
        if when >= turn.woken_at or self._closed:
            return
        turn.woken_at = when
        if not self._timer.is_alive():
            self._timer.start()
        heapq.heappush(self._heap, (when, next(self._number), turn))
        if self._heap[0][2] is turn:
            self.changed.notify_all()

    def close(self) -> None:
        """Begin no further turn, and let the threads end."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        for each in (self.plans, self.builds, self.tasks, self.minutes, self.audits, self.queues):
            each.close()

    def _run(self) -> None:
        with self.changed:
            while not self._closed:
                now = time.monotonic()
                while self._heap and self._heap[0][0] <= now:
                    when, _, turn = heapq.heappop(self._heap)
                    turn.woken(when)
                left = self._heap[0][0] - now if self._heap else threading.TIMEOUT_MAX
                self.changed.wait(min(left, threading.TIMEOUT_MAX))
