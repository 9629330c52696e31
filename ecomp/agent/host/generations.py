"""Whether anything of this compute changed at placement since it was looked at: one question in place of several.

placement counts in a provider's generation what becomes of its inventory, traits and aggregates, and each claim on it.
A DELETE of a consumer it does not count; so what follows from an unchanged one holds also if something was let go.
"""

from __future__ import annotations

import threading
import time

from ecomp.errors import NotFound
from ecomp.placement import providers
from ecomp.placement.client import Placement

KEPT = 20.0
"""Seconds for which what placement said of all providers is believed by those of many computes."""
BELIEVED = 10
"""Looks for which an unchanged one is believed, at most: a database that was restored may count up to it again."""


class Generations:
    """What is said of the computes of a process: of one alone, or of all that there are in one call."""

    def __init__(self, placement: Placement, several: bool) -> None:
        self._placement, self._several = placement, several
        self._lock = threading.Lock()
        self._said: dict[str, int] = {}
        self._until = 0.0

    def of(self, compute: str) -> int | None:
        """The generation of a compute's provider, at most KEPT s old; None: there is none."""
        if not self._several:
            try:
                return providers.generation(self._placement, compute)
            except NotFound:
                return None
        with self._lock:  # while placement is asked, too: the others want the same answer, and not a thousand questions
            began = time.monotonic()
            if began >= self._until:
                self._said = providers.generations(self._placement)
                self._until = began + KEPT
            return self._said.get(compute)


class Settled:
    """At which generation all was found as it should be, and how often that was believed."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._left = 0

    def at(self, generation: int | None) -> bool:
        """Whether it is still as it was found, by this generation; asked a few times, then not believed any more."""
        if generation is None or generation != self._generation or not self._left:
            return False
        self._left -= 1
        return True

    def note(self, generation: int | None) -> None:
        """All was found as it should be after this generation was read; None: it was not."""
        self._generation, self._left = generation, BELIEVED
