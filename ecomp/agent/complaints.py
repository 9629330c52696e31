"""Each loss is logged once and each return once, in however many places it is met.

What fails for want of a backend is one loss with all else that does; anything else is one for its text.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import NamedTuple

from ecomp.errors import EcompError, StrangeEtcd, Unreachable

log = logging.getLogger(__name__)


class _Loss(NamedTuple):
    about: str
    backend: bool


class Complaints:
    """What is failing now, by what was being done: each is logged once, not at every try. From any thread."""

    def __init__(self) -> None:
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
        """This works; True if it did not before, so that whatever waits for the same may be tried at once."""
        with self._lock:
            loss = self._open.pop(doing, None)
            if loss is None:
                return False
            # One that is back is back for all; who finds otherwise complains anew.
            self._open = {other: each for other, each in self._open.items() if each != loss}
            if loss.backend:
                self._returned[loss] = time.monotonic()
        log.info('%s is back' if loss.backend else 'what failed before works again: %s', loss.about)
        return True

    def hand_over(self, doing: str, to: str) -> None:
        """This will not be tried any more: another thing that is, and needs the same, says when it works."""
        with self._lock:
            loss = self._open.pop(doing, None)
            if loss is not None and loss.backend:
                self._open.setdefault(to, loss)
