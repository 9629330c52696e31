"""What is done once a minute, and again soon while it fails."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping

from ecomp.agent.complaints import Complaints
from ecomp.errors import EcompError
from ecomp.model.backoff import Backoff

log = logging.getLogger(__name__)

AGAIN = 0.5, 15.0
"""Seconds before what failed is tried again: the first time, and at most."""


class Round:
    """Some looks, one after the other: what fails of them hinders nothing else.

    `settled` is told of each that works; `is_ending` says that nothing more is to be begun, and what fails no matter.
    run() is one thread's at a time.
    """

    def __init__(
        self,
        looks: Mapping[str, Callable[[], None]],
        complaints: Complaints,
        settled: Callable[[str], None],
        is_ending: Callable[[], bool],
    ) -> None:
        self.again = math.inf
        """When, on the monotonic clock, what failed is to be tried again; never, if nothing did."""
        self._looks = looks
        self._complaints = complaints
        self._settled = settled
        self._is_ending = is_ending
        self._backoff = Backoff(*AGAIN)

    def run(self) -> None:
        """One round. Never raises."""
        worked = [self._works(doing, look) for doing, look in self._looks.items()]
        if all(worked):
            self.again = math.inf
            self._backoff.reset()
        else:
            self.again = time.monotonic() + self._backoff.next() * random.uniform(0.5, 1.0)

    def _works(self, doing: str, look: Callable[[], None]) -> bool:
        if self._is_ending():
            return True
        began = time.monotonic()
        try:
            look()
            self._settled(doing)
            return True
        except EcompError as error:
            if not self._is_ending():
                self._complaints.complain(doing, error, began)
        except Exception:
            if not self._is_ending():  # else what it speaks with is closed under it
                log.exception('unexpected error while %s; trying again', doing)
        return False
