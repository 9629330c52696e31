"""Claim a candidate for an instance, knowing at each step what placement holds.

Rules 1 and 3 of the protocol: an unknown outcome is read back; a claim is released only as it was read, and only
while nobody else is at the same instance.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from ecomp.errors import Conflict, GenerationConflict, UnknownOutcome, Unreachable
from ecomp.model import keys
from ecomp.model.allocation import Allocations, difference
from ecomp.placement import allocations as ledger
from ecomp.placement.client import Placement
from ecomp.store.client import Store

log = logging.getLogger(__name__)

TRIES = 4
"""nova's number for provider conflicts; placement itself has tried ten times before it answers 409."""


def claim(
    placement: Placement,
    instance: str,
    wanted: Allocations,
    user_id: str,
    project_id: str,
    still_ours: Callable[[], bool],
) -> None:
    """The instance holds exactly `wanted` when this returns.

    What an earlier eschedule of the same uuid claimed is taken over with the current generation, which makes
    that one's late release a 409; a later one's is not, for then `still_ours` (nobody took our request key) is False.
    Errors: NoCapacity, Unreachable, Conflict, GenerationConflict after several tries.
    """
    generation: int | None = None
    for left in reversed(range(TRIES)):
        try:
            return ledger.claim(placement, instance, wanted, user_id, project_id, generation)
        except UnknownOutcome as error:
            unknown = error
        except GenerationConflict as error:
            if not left:
                raise
            log.debug('claim for %s: %s', instance, error)
            unknown = None
        try:
            held = ledger.consumer(placement, instance)
        except Unreachable as error:
            if unknown is None:
                raise
            raise UnknownOutcome(f'{error}; whether {instance} holds its claim is not known') from error
        # Only a claim whose answer was lost may be taken for ours as it stands. One found after a 409 is
        # somebody's: moving it by its generation is what makes their late release fail.
        if unknown is not None and difference(wanted, held.allocations) is None:
            return None
        if unknown is not None and not left:
            raise unknown
        # Asked after the generation was read: whoever takes our request key after this look claims after it, too, and
        # one of the two claims finds that the generation has moved.
        if not still_ours():
            raise Conflict(f'{instance}: another eschedule took it over, or this one was too slow')
        generation = held.generation
        time.sleep(random.uniform(0, 0.1 * (TRIES - left)))
    return None


def abandon(store: Store, placement: Placement, instance: str, request_revision: int) -> bool:
    """Release what the instance holds, unless somebody else is at it or it was delivered; True if released.

    The order closes the race with a second eschedule of the same uuid: it writes /requests first and claims
    after, so either its key is seen here, or its claim moves the generation read here before.
    """
    held = ledger.consumer(placement, instance)
    if not held.allocations:
        return True
    at_it = store.get(keys.request(instance))
    if at_it is not None and at_it.revision != request_revision:
        return False
    if store.get(keys.instance(instance)) is not None:
        return False
    compute_keys = [keys.host(provider, instance) for provider in held.allocations]
    if any(store.get(key) is not None for key in compute_keys):
        return False
    return ledger.release(placement, instance, held)
