"""Release a claim on this compute that no request owns, after two periodic checks (rule 4).

A half-made request is never finished here: whoever made the claim is dead, or it would have a key.

A provider's generation changes with its inventory, its traits, its aggregates and each claim on it, but not when a
consumer is deleted. What follows from an unchanged generation therefore also holds after a release.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from functools import partial

from ecomp.errors import NotFound
from ecomp.model import keys
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import release
from ecomp.placement.client import Placement
from ecomp.store.client import Store, at_it, in_requests, wanted
from ecomp.store.sharing import note_released

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


log = logging.getLogger(__name__)

APART = keys.ATTEMPT_SECONDS
"""Seconds between the two looks, on our own clock."""


def orphans(
    held: Collection[str], wished: Collection[str], guests: Collection[str], at_it: Collection[str]
) -> set[str]:
    """The consumers that no request, no attempt and no guest accounts for. Pure.

    A guest stands behind its claim even when its request key is missing: it is kept, and uses what it uses.
    """
    return set(held) - set(wished) - set(guests) - set(at_it)


def due(seen: Mapping[str, float], found: Collection[str], now: float) -> tuple[dict[str, float], set[str]]:
    """(first sightings from now on, what was first seen APART ago or before). Pure; `now` is monotonic."""
    first = {consumer: seen.get(consumer, now) for consumer in found}
    return first, {consumer for consumer, when in first.items() if now - when >= APART}


class ClaimKeeper:
    """Releases claims on this compute that nobody stands behind, once they were seen so for long enough (rule 4).

    `takes` False: it takes nothing from queues, so what an attempt of its own claimed for what waits goes, too.
    """

    def __init__(self, compute: str, store: Store, placement: Placement, takes: bool = True) -> None:
        self._compute = compute
        self._takes = takes
        self._store = store
        self._placement = placement
        self._seen: dict[str, float] = {}
        self.settled = Settled()
        """Since when all claims on this compute, or none at all, are accounted for."""
        self._held: Collection[str] = ()

    def look(
        self, guests: Collection[str], now: float, generation: int | None = None, asked: Collection[str] = ()
    ) -> None:
        """Look once, and release what is due. Errors: Unreachable and its like; the next look does it then.

        `generation` is the provider's, read before (None: not known), and `asked` what is asked of this compute by what
        it follows. Where nothing was claimed since a look, and somebody stands behind all of it, nothing else is asked.
        """
        if not orphans(self._held, asked, guests, ()) and self.settled.at(generation):
            return
        self.settled.note(None)
        self._held = held = allocations.of_provider(self._placement, self._compute)
        if not orphans(held, asked, guests, ()):
            self.settled.note(generation)
        if not held:
            self._seen = {}
            return
        # placement was read first: a claim made since cannot be in it, and one that was delivered
        # meanwhile has its key by now. etcd is asked itself, for a followed state may be behind.
        wished = [keys.last(key) for key in self._store.snapshot(keys.request_prefix(self._compute), True).entries]
        placing = at_it(self._store) if self._takes else in_requests(self._store.snapshot(keys.ATTEMPTS))
        self._seen, ready = due(self._seen, orphans(held, wished, guests, placing), now)
        noting = partial(note_released, self._store)
        for consumer, released in release(self._placement, ready, self._wanted, noting).items():
            if released:
                log.warning('released the claim of %s: no request stands behind it', consumer)
            self._seen.pop(consumer, None)

    def _wanted(self, holding: Mapping[str, allocations.Consumer]) -> set[str]:
        elsewhere = {consumer for consumer, held in holding.items() if self._compute not in held.allocations}
        on = {consumer: held.allocations for consumer, held in holding.items()}
        return elsewhere | wanted(self._store, on, waiting=self._takes)
