"""Make instances hold exactly what is wanted for them, knowing at each step what placement holds (rules 1 and 3)."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping

from ecomp.errors import GenerationConflict, UnknownOutcome, Unreachable
from ecomp.model.allocation import Allocations, difference
from ecomp.placement import allocations as ledger
from ecomp.placement.client import Placement

log = logging.getLogger(__name__)

TRIES = 4
"""nova's number for provider conflicts; placement itself has tried ten times before it answers 409."""


def claim(
    placement: Placement,
    wanted: Mapping[str, Allocations],
    user_id: str,
    project_id: str,
    check: Callable[[], None],
) -> None:
    """Each instance holds exactly what is wanted for it when this returns.

    What somebody before us claimed for it is taken over with the current generation, which makes that one's late
    release a 409; a later one's is not: `check` raises Conflict once the instance is not ours any more.
    Errors: NoCapacity, Unreachable, Conflict, GenerationConflict after several tries.
    """
    generations: dict[str, int | None] = dict.fromkeys(wanted)
    for left in reversed(range(TRIES)):
        try:
            return _write(placement, wanted, user_id, project_id, generations)
        except UnknownOutcome as error:
            unknown = error
        except GenerationConflict as error:
            if not left:
                raise
            log.debug('claim for %s: %s', in_short(wanted), error)
            unknown = None
        try:
            held = {instance: ledger.consumer(placement, instance) for instance in wanted}
        except Unreachable as error:
            if unknown is None:
                raise
            raise UnknownOutcome(f'{error}; whether {in_short(wanted)} holds its claim is not known') from error
        # Only a claim whose answer was lost may be taken for ours as it stands. One found after a 409 is
        # somebody's: moving it by its generation is what makes their late release fail.
        if unknown is not None and all(
            difference(each, held[instance].allocations) is None for instance, each in wanted.items()
        ):
            return None
        if unknown is not None and not left:
            raise unknown
        # Asked after the generation was read: whoever takes our place after this look claims after it, too,
        # and one of the two claims finds that the generation has moved.
        check()
        generations = {instance: each.generation for instance, each in held.items()}
        time.sleep(random.uniform(0, 0.1 * (TRIES - left)))
    return None


def in_short(wanted: Mapping[str, object]) -> str:
    """Whom it is about, fit for one line."""
    first = next(iter(wanted))
    return first if len(wanted) == 1 else f'{first} (of {len(wanted)})'


def _write(
    placement: Placement,
    wanted: Mapping[str, Allocations],
    user_id: str,
    project_id: str,
    generations: Mapping[str, int | None],
) -> None:
    if len(wanted) > 1:
        return ledger.claim_set(placement, wanted, user_id, project_id, generations)
    ((instance, allocations),) = wanted.items()
    return ledger.claim(placement, instance, allocations, user_id, project_id, generations[instance])
