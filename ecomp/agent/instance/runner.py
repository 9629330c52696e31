"""Where jobs are carried out: in worker processes (pool.py), or in the thread that asks (inline.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ecomp.agent.instance.build import Job, News
from ecomp.errors import EcompError


class WorkerDied(EcompError):
    """The job's worker process ended in the middle of it."""


class Runner(Protocol):
    """Where jobs are carried out."""

    def run(self, job: Job) -> Iterator[News]:
        """Carry the job out; yields each stage reached and its progress, ends when it is done, raises what it raised.

        How far it is may be left out where the next news is there already.
        """

    def cancel(self, instance: str | None) -> None:
        """Let a build of this instance stop at its next step and undo itself; None: every one from now on."""

    def allow(self) -> None:
        """Make builds again after cancel(None)."""

    def tend(self, timeout: float) -> None:
        """Look after the workers, for `timeout` seconds at most or until wake(). The main thread's work."""

    def wake(self) -> None:
        """End a tend() at once. Safe in a signal handler."""

    def wake_on_signals(self) -> None:
        """From now on a signal ends a tend() at once. The main thread's work."""

    def stop(self) -> None:
        """End the workers when their jobs are done."""


def finish(runner: Runner, job: Job) -> None:
    """Have a job carried out of which no news is wanted. Errors: what it raised."""
    for _ in runner.run(job):
        pass
