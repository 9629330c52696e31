"""Release claims on this compute that nobody needs, and correct others (rule: orphaned-claim)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from ecomp.errors import EcompError, Unreachable
from ecomp.metrics import TALLY
from ecomp.model import keys
from ecomp.model.allocation import Allocations, Resources
from ecomp.placement import allocations
from ecomp.placement.allocations import release
from ecomp.placement.client import Placement
from ecomp.shared.attempts import NOT_QUEUED, QUEUED, find_needed, read_pending_instances, read_settled_request
from ecomp.shared.notes import note_released
from ecomp.store.client import Store

# Checks skipped in a row because of an unchanged generation: a restored database may count up to it again.
MAX_SKIPPED_CHECKS = 10


# A provider's generation changes with its inventory, traits, aggregates and each claim on it, but not when a consumer
# is deleted. A conclusion from an unchanged generation therefore also holds after a release.
class LastGoodCheck:
    """The generation at the last check without differences, and how many skips it allows."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._skips = 0

    def use_skip(self, generation: int | None) -> bool:
        """Return True and use up a skip, if any is left and `generation` is the recorded one."""
        if generation is None or generation != self._generation or not self._skips:
            return False
        self._skips -= 1
        return True

    def record(self, generation: int | None) -> None:
        """Note the generation before a check without differences, or None after any other check."""
        self._generation, self._skips = generation, MAX_SKIPPED_CHECKS


log = logging.getLogger(__name__)

Item = TypeVar('Item', bound=Hashable)

# Least time between the first and the confirming sighting, on this compute's monotonic clock.
CONFIRMATION_SECONDS = keys.ATTEMPT_SECONDS


def find_orphans(
    consumers: Collection[str], requests: Collection[str], guests: Collection[str], in_flight: Collection[str]
) -> set[str]:
    # A guest without a request still uses the resources.
    return set(consumers) - set(requests) - set(guests) - set(in_flight)


def find_differing(claims: Mapping[str, Resources], targets: Mapping[str, Resources]) -> set[str]:
    """Return the instances that have a claim, but of other amounts than their target."""
    return {instance for instance, amounts in targets.items() if claims.get(instance, amounts) != amounts}


def confirm_sightings(
    previous_sightings: Mapping[Item, float], sighted: Collection[Item], now: float
) -> tuple[dict[Item, float], set[Item]]:
    """Return when each item was first sighted, and those sighted for CONFIRMATION_SECONDS."""
    first = {each: previous_sightings.get(each, now) for each in sighted}
    return first, {each for each, seen_at in first.items() if now - seen_at >= CONFIRMATION_SECONDS}


class ClaimKeeper:
    """Releases orphaned claims on one compute, and sets others to what their requests name."""

    def __init__(self, compute: str, store: Store, placement: Placement, takes_from_queues: bool = True) -> None:
        self._compute = compute
        # Only a compute that takes from queues keeps the claims of queued requests.
        self._queued = QUEUED if takes_from_queues else NOT_QUEUED
        self._store, self._placement = store, placement
        self._first_sightings: dict[str, float] = {}
        self._first_differences: dict[str, float] = {}
        # The generation at which this compute had no orphaned claim.
        self.last_good_check = LastGoodCheck()
        # What consumers held of the provider when it was read last, without what was released since; None before. It
        # `is_current` if it still was so at the last check.
        self.consumers: Mapping[str, Resources] | None = None
        self.is_current = False

    def reconcile(
        self,
        guests: Collection[str],
        now: float,
        generation: int | None = None,
        requests: Collection[str] = (),
        targets: Mapping[str, Resources] = MappingProxyType({}),
    ) -> None:
        """Release the claims of orphans first seen CONFIRMATION_SECONDS or more before `now`.

        A claim that differs for so long from its amounts in `targets`, those of its request, is set to them.
        The check is skipped, at most MAX_SKIPPED_CHECKS times in a row, if `generation` is unchanged and each consumer
        of the last check has a guest or a request in `requests`, and holds its amounts in `targets`.
        """
        previous = self.consumers or {}
        is_good = not find_orphans(previous, requests, guests, ()) and not find_differing(previous, targets)
        if is_good and self.last_good_check.use_skip(generation):
            self.is_current = self.consumers is not None
            return
        self.last_good_check.record(None)
        self.consumers = consumers = allocations.read_provider_allocations(self._placement, self._compute)
        self.is_current = True
        differing = find_differing(consumers, targets)
        self._first_differences, confirmed = confirm_sightings(self._first_differences, differing, now)
        for instance in confirmed:
            self._correct(instance)
        if not find_orphans(consumers, requests, guests, ()) and not differing:
            self.last_good_check.record(generation)
        if not consumers:
            self._first_sightings = {}
            return
        # Placement was read first: its answer has no later claim, and a claim in it that was delivered since then has
        # its request key. Etcd is queried, because the followed state may be stale.
        requests = self._store.snapshot(keys.request_prefix(self._compute), keys_only=True).entries
        in_flight = read_pending_instances(self._store, self._queued)
        orphans = find_orphans(consumers, {*map(keys.get_last_part, requests)}, guests, in_flight)
        self._first_sightings, confirmed = confirm_sightings(self._first_sightings, orphans, now)
        note = partial(note_released, self._store)
        for consumer, released in release(self._placement, confirmed, self._find_needed, note).items():
            if released:
                consumers.pop(consumer, None)
                TALLY.add('ecomp_claims_released_total')
                log.warning('released the claim of instance %s in placement: etcd has no request for it', consumer)
            self._first_sightings.pop(consumer, None)

    def _correct(self, instance: str) -> None:
        try:
            wanted = partial(read_settled_request, self._store, self._compute, instance)
            if allocations.correct_claim(self._placement, instance, wanted):
                log.warning('changed the claim of instance %s in placement to the amounts of its request', instance)
        except Unreachable:
            raise
        except EcompError as error:  # no room, or amounts that placement refuses
            log.info('the claim of instance %s in placement differs from its request, and stays: %s', instance, error)

    def _find_needed(self, holding: Mapping[str, Allocations]) -> set[str]:
        return find_needed(self._store, holding, self._compute, self._queued)
