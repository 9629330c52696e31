"""Check why a compute cannot build, each minute and after a failed build, and publish it."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ecomp.agent.jobs import Loop
from ecomp.errors import EcompError, Unreachable, split_fix
from ecomp.model.record import Failure
from ecomp.model.trouble import HOST_STAGES, BuildFailure, find_build_trouble
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)

CHECK_INTERVAL_SECONDS = 60.0
# Seconds for which the hypervisor has to fail: a restart of libvirtd takes less.
CONFIRMATION_SECONDS = 10.0
# The last failed builds that are remembered.
MAX_FAILURES = 64


class Troubles:
    """The reasons why one compute cannot build, for `publish` at each change (thread-safe)."""

    def __init__(self, hypervisor: Hypervisor, publish: Callable[[Sequence[str]], None]) -> None:
        self._hypervisor, self._publish = hypervisor, publish
        self._lock = threading.Lock()
        self._failures = deque[BuildFailure](maxlen=MAX_FAILURES)
        # What the hypervisor found, and since when (monotonic) it fails; None: it answers.
        self._troubles: list[str] = []
        self._failing_since: float | None = None
        self.reasons: Sequence[str] = ()
        loop = Loop('troubles', self.check)
        self.check_soon, self.stop = loop.schedule, loop.stop

    def can_build(self) -> bool:
        return not self.reasons

    def note_build(self, image: str, failure: Failure | None) -> None:
        """Note a failed build or, with None, a success, which ends the trouble of failed builds."""
        with self._lock:
            if failure is None:
                self._failures.clear()
            elif failure.stage in HOST_STAGES or failure.is_host_fault:
                self._failures.append(BuildFailure(time.monotonic(), image, failure.stage))
            self._update()
        if failure is not None:
            self.check_soon()

    def check(self) -> float:
        """Check for troubles, and return when (monotonic) to check again."""
        found, now = list[str](), time.monotonic()
        try:
            found, failing_since = self._hypervisor.find_troubles(), None
        except EcompError as error:
            failing_since = now if self._failing_since is None else self._failing_since
            if time.monotonic() - failing_since < CONFIRMATION_SECONDS:  # the question itself may take long
                found = self._troubles
            else:
                found = ['libvirt does not answer' if isinstance(error, Unreachable) else split_fix(str(error))[0]]
        with self._lock:
            self._troubles, self._failing_since = found, failing_since
            self._update()
        interval = CHECK_INTERVAL_SECONDS * random.uniform(0.9, 1.1)
        return time.monotonic() + (interval if failing_since is None else CONFIRMATION_SECONDS)

    def _update(self) -> None:
        # The caller holds the lock, so that the last reasons are published last.
        failed_builds = find_build_trouble(self._failures, time.monotonic())
        reasons = [*self._troubles, *([failed_builds] if failed_builds else [])]
        if reasons != list(self.reasons):
            self.reasons = reasons
            if reasons:
                log.warning('this compute cannot build, so new instances go to others first: %s', '; '.join(reasons))
            else:
                log.info('this compute can build again')
            self._publish(reasons)
