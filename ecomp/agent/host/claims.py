"""Release claims on this compute without request, attempt or guest (rule 4).

A provider's generation changes with its inventory, traits, aggregates and each claim on it, but not when a consumer is
deleted. A conclusion from an unchanged generation therefore also holds after a release.
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

# How long the computes of one process share an answer of placement about all providers.
KEPT = 20.0
# Checks skipped in a row because of an unchanged generation: a restored database may count up to it again.
BELIEVED = 10


class Generations:
    """Reads providers' generations; with `reads_all` those of all providers in one call."""

    def __init__(self, placement: Placement, several: bool) -> None:
        self._placement, self._several = placement, several
        self._lock = threading.Lock()
        self._said: dict[str, int] = {}
        self._until = 0.0

    def of(self, compute: str) -> int | None:
        """Return the generation of a compute's provider, or None if there is no such provider."""
        if not self._several:
            try:
                return providers.generation(self._placement, compute)
            except NotFound:
                return None
        with self._lock:  # held during the call to placement: all other computes wait for the same answer
            started_at = time.monotonic()
            if started_at >= self._until:
                self._said = providers.generations(self._placement)
                self._until = started_at + KEPT
            return self._said.get(compute)


class Settled:
    """The generation of the last check without differences, and the checks that it may replace."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._left = 0

    def at(self, generation: int | None) -> bool:
        """Return whether an unchanged generation replaces a check, which counts as skipped then."""
        if generation is None or generation != self._generation or not self._left:
            return False
        self._left -= 1
        return True

    def note(self, generation: int | None) -> None:
        """Note the generation before a check without differences; None: there were differences."""
        self._generation, self._left = generation, BELIEVED


log = logging.getLogger(__name__)

# Least time between the first and the confirming sighting, on this compute's monotonic clock.
APART = keys.ATTEMPT_SECONDS


def orphans(
    held: Collection[str], wished: Collection[str], guests: Collection[str], at_it: Collection[str]
) -> set[str]:
    """Return the consumers that have no request, no attempt and no guest. Pure.

    A guest whose request key is missing keeps its claim, because it still uses the resources.
    """
    return set(held) - set(wished) - set(guests) - set(at_it)


def due(seen: Mapping[str, float], found: Collection[str], now: float) -> tuple[dict[str, float], set[str]]:
    """Return the first sightings, and the names first seen CONFIRMATION_SECONDS ago. Pure."""
    first_sightings = {consumer: seen.get(consumer, now) for consumer in found}
    return first_sightings, {consumer for consumer, seen_at in first_sightings.items() if now - seen_at >= APART}


class ClaimKeeper:
    """Releases orphaned claims; without `takes_from_queues` those for queued requests, too."""

    def __init__(self, compute: str, store: Store, placement: Placement, takes: bool = True) -> None:
        self._compute = compute
        self._takes = takes
        self._store = store
        self._placement = placement
        self._seen: dict[str, float] = {}
        # The generation at which this compute had no orphaned claim.
        self.settled = Settled()
        self._held: Collection[str] = ()

    def look(
        self, guests: Collection[str], now: float, generation: int | None = None, asked: Collection[str] = ()
    ) -> None:
        """Release confirmed orphans; errors of placement and etcd pass.

        The check is skipped if the provider's `generation` (read before; None: not known) is unchanged and each
        consumer of the last check has a guest or is among `requests`, the instances of the followed requests.
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
        # Placement was read first: its answer has no later claim, and a claim in it that was delivered since then has
        # its request key. Etcd is queried, because the followed state may be stale.
        requested = [keys.last(key) for key in self._store.snapshot(keys.request_prefix(self._compute), True).entries]
        in_flight = at_it(self._store) if self._takes else in_requests(self._store.snapshot(keys.ATTEMPTS))
        self._seen, confirmed = due(self._seen, orphans(held, requested, guests, in_flight), now)
        note = partial(note_released, self._store)
        for consumer, released in release(self._placement, confirmed, self._wanted, note).items():
            if released:
                log.warning('released the claim of %s: no request stands behind it', consumer)
            self._seen.pop(consumer, None)

    def _wanted(self, holding: Mapping[str, allocations.Consumer]) -> set[str]:
        elsewhere = {consumer for consumer, held in holding.items() if self._compute not in held.allocations}
        computes_of = {consumer: held.allocations for consumer, held in holding.items()}
        return elsewhere | wanted(self._store, computes_of, waiting=self._takes)
