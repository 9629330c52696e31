"""The loops of ecompute, back-off, and the log of failures."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ecomp.errors import EcompError, StrangeEtcd, Unreachable, put_before_fix
from ecomp.model.backoff import Backoff

log = logging.getLogger(__name__)

# Delay before a step is repeated that raised an unexpected error.
RETRY_SECONDS = 1.0
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0

Result = TypeVar('Result')


class Deferrals:
    """The times, on the monotonic clock, until which names are deferred (thread-safe)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deferrals: dict[str, tuple[float, Backoff]] = {}  # when each name is due

    def defer(self, name: str, seconds: float | None = None) -> float:
        """Defer `name`, by default with a back-off that grows each time, and return its due time."""
        with self._lock:
            _, backoff = self._deferrals.get(name) or (0.0, Backoff(FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS))
            if seconds is None:
                seconds = backoff.next() * random.uniform(0.5, 1.0)
            due = time.monotonic() + seconds
            self._deferrals[name] = due, backoff
            return due

    def get_deferred(self, now: float) -> dict[str, float]:
        with self._lock:
            return {name: due for name, (due, _) in self._deferrals.items() if due > now}

    def get_due_time(self, name: str) -> float:
        """Return when (monotonic) `name` is due, or inf if it is not deferred."""
        with self._lock:
            return self._deferrals[name][0] if name in self._deferrals else math.inf

    def cancel(self, name: str) -> bool:
        """Cancel the deferral and the back-off of `name`, and return whether it had one."""
        with self._lock:
            return self._deferrals.pop(name, None) is not None

    def cancel_all_but(self, names: Collection[str]) -> list[str]:
        """Cancel the deferral of every other name, and return the names that had one."""
        with self._lock:
            removed = [name for name in self._deferrals if name not in names]
            for name in removed:
                del self._deferrals[name]
            return removed

    def clear(self) -> None:
        with self._lock:
            self._deferrals.clear()


class _Failure(NamedTuple):
    """A failure: its `subject` is the backend, or else the text of the error."""

    subject: str
    is_backend: bool


class FailureLog:
    """The failures that last, by the activity that failed (thread-safe).

    A failure is logged once and its end once, even if several activities meet it. All failures to reach one backend are
    one failure. Other failures are the same if their texts are.
    """

    def __init__(self) -> None:
        # Called after the end of a failure: activities that wait for the same backend can be retried now.
        self.on_recovery: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._failing: dict[str, list[_Failure]] = {}
        self._recovered_at: dict[_Failure, float] = {}

    def report_failure(self, activity: str, error: EcompError | OSError, started_at: float = math.inf) -> None:
        """Note a failure and log a new one, unless its backend was back after `started_at`."""
        if isinstance(error, StrangeEtcd):
            return  # the guard has logged it, and the activity is not retried
        backend = error.backend if isinstance(error, Unreachable) else ''
        text = str(error)
        if isinstance(error, OSError):  # mostly of the state directory
            text = f'{error.filename or activity}: {error.strerror or error}'
        loss = _Failure(backend or text, bool(backend))
        with self._lock:
            # A worker frozen during an outage finds its connection broken long after the others.
            if loss.is_backend and started_at < self._recovered_at.get(loss, -math.inf):
                return
            is_known = any(loss in losses for losses in self._failing.values())
            # Only a success shows that the backends it failed for before are back, too.
            earlier = [other for other in self._failing.get(activity, []) if other.is_backend and other != loss]
            self._failing[activity] = [*earlier, loss]
        if not is_known:
            clause = f'; trying again until it {"is back" if backend else "works"}'
            log.warning('%s', put_before_fix(text, clause))

    def report_success(self, activity: str) -> bool:
        """End an activity's failures for all activities, and return whether there were any."""
        with self._lock:
            ended = self._failing.pop(activity, [])
            if not ended:
                return False
            # They ended for all activities; one that still fails reports it again.
            rest = {other: [loss for loss in losses if loss not in ended] for other, losses in self._failing.items()}
            self._failing = {other: losses for other, losses in rest.items() if losses}
            self._recovered_at |= dict.fromkeys((loss for loss in ended if loss.is_backend), time.monotonic())
        for loss in ended:
            log.info('%s is back' if loss.is_backend else 'this failure has ended: %s', loss.subject)
        self.on_recovery()
        return True

    def attempt(
        self,
        activity: str,
        work: Callable[[], Result],
        raised: type[EcompError] | tuple[()] = (),
        is_moot: Callable[[], bool] = lambda: False,
    ) -> Result | None:
        """Return the result of `work`, or None after an Exception, which is logged.

        Errors of type `raised` are raised. Others are not logged if is_moot(). A success ends the activity's failures.
        """
        began = time.monotonic()
        try:
            result = work()
        except raised:
            raise
        except (EcompError, OSError) as error:
            if not is_moot():
                self.report_failure(activity, error, began)
        except Exception:
            if not is_moot():
                log.exception('unexpected error while %s; trying again', activity)
        else:
            self.report_success(activity)
            return result
        return None

    def transfer(self, activity: str, other_activity: str) -> None:
        """Forget an activity. Another without failures takes over those of etcd or placement."""
        with self._lock:
            losses = [loss for loss in self._failing.pop(activity, []) if loss.is_backend]
            if losses:
                self._failing.setdefault(other_activity, losses)


class Waker:
    """A pipe by which any thread may wake() the main one, which alone calls the other methods."""

    def __init__(self) -> None:
        # Both ends are closed with this object: a late wake() must not write to another file with the same number.
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self.reader = self._reader.fileno()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer.fileno(), False)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full of unread bytes, which end the wait as well
            os.write(self._writer.fileno(), b'.')

    def wake_on_signals(self) -> None:
        """Let signals end the main thread's wait, until it calls signal.set_wakeup_fd(-1)."""
        # The kernel may deliver a signal to any thread. The poll in the main thread, where alone Python runs handlers,
        # then does not end: the signal would be handled up to a minute later.
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.reader, 4096):
                pass


def run_aside(name: str, function: Callable[[], Result]) -> Future[Result]:
    """Call the function in a new daemon thread, or in this one if none can be started."""
    future: Future[Result] = Future()

    def complete() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=complete, name=name, daemon=True).start()
    except RuntimeError:
        complete()
    return future


class Loop:
    """Calls `step` in a daemon thread of its own when it is due, one call at a time.

    `step` returns when (monotonic) it is due again, or inf. After an Exception it is due in RETRY_SECONDS.
    """

    def __init__(self, name: str, step: Callable[[], float]) -> None:
        self._name, self._step = name, step
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._due, self._is_stopped, self.is_busy = math.inf, False, False

    def schedule(self, moment: float = 0.0) -> None:
        """Call `step` at this time (monotonic) or before, also again if it runs now."""
        with self._condition:
            if moment < self._due and not self._is_stopped:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
                self._due = moment
                self._condition.notify()

    def stop(self) -> None:
        """Start no more calls of `step`, but do not wait for the one in flight."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify()

    def join(self) -> None:
        """Stop, and wait for the call in flight, which must not call this itself."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._wait():
            next_due = time.monotonic() + RETRY_SECONDS
            try:
                next_due = self._step()
            except Exception:
                log.exception('unexpected error in thread %s; trying again', self._name)
            with self._condition:
                self.is_busy = False
                self._due = min(self._due, next_due)

    def _wait(self) -> bool:
        with self._condition:
            while not self._is_stopped and (seconds := self._due - time.monotonic()) > 0:
                self._condition.wait(min(seconds, threading.TIMEOUT_MAX))
            self._due, self.is_busy = math.inf, not self._is_stopped
            return self.is_busy
