"""Claim for instances, and release, knowing at each step what placement holds (rules 1, 3 and 11)."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping

from ecomp.errors import ClaimedElsewhere, ConsumerConflict, EcompError, GenerationConflict, UnknownOutcome, Unreachable
from ecomp.model.allocation import Allocations, compute_of, difference
from ecomp.placement import allocations
from ecomp.placement.allocations import Consumer
from ecomp.placement.client import Placement

log = logging.getLogger(__name__)

TRIES = 4
"""nova's number for provider conflicts; placement itself has tried ten times before it answers 409."""
EMPTY_SECONDS = 3.0
"""How long a consumer has to hold nothing, and have a generation all the same, to be taken for one that was left so.

Placement makes a consumer in a transaction of its own, before its allocations; killed between the two it leaves one
that nobody sees, and whose generation is 0. Sooner it may be the consumer of a claim that is being made this moment:
that one, refused, would take the consumer away, whatever it holds by then.
"""
EMPTY_PAUSE = 0.25
"""Seconds between two looks at such a consumer."""
TOGETHER = 20
"""Consumers that are read, asked about and released together, at most: so little time passes between the two."""


def claim(
    placement: Placement,
    wanted: Mapping[str, Allocations],
    user_id: str,
    project_id: str,
    check: Callable[[], None],
    above: Callable[[], int] = lambda: 0,
    movable: Container[str] = (),
) -> None:
    """Claim until each instance holds exactly what is wanted for it, with a generation higher than `above` returns.

    An earlier claim for an instance is replaced with the generation it has, so that a late release by its owner gets a
    409. It is never released first: placement forgets a consumer with its last allocation and counts from 1 again, so
    a late release could meet its own number once more. On another compute an earlier claim is replaced only if its
    instance is in `movable`: the attempt made that claim itself. Whoever made any other claim may have built the guest
    there, and that compute's silence does not prove that it did not (rule 13).

    Args:
        check: raises Conflict once the instances do not belong to this attempt any more.
        above: returns, after each claim, the highest generation at which anybody released a claim of these instances;
            0 where nobody else can have claimed.

    Raises:
        ClaimedElsewhere: another attempt's claim is on another compute; nothing is claimed.
        NoCapacity, Unreachable, Conflict: as allocations.claim() and `check` raise them.
        GenerationConflict: after several tries. A ConsumerConflict of a set may be about one instance whose consumer
            was left empty; claimed by itself, that instance can be claimed.
    """
    generations: dict[str, int | None] = dict.fromkeys(wanted)
    empty_since, left = math.inf, TRIES
    while True:
        error: EcompError
        try:
            _write(placement, wanted, user_id, project_id, generations)
        except (UnknownOutcome, GenerationConflict) as caught:
            error, left = caught, left - 1
        else:
            moved = {instance: (now or 0) + 1 for instance, now in generations.items()}
            if min(moved.values()) > above():
                return
            generations = dict(moved)
            continue
        if not left and isinstance(error, GenerationConflict):
            raise error
        log.debug('claim for %s: %s', in_short(wanted), error)
        try:
            held = {instance: allocations.consumer(placement, instance) for instance in wanted}
        except Unreachable as unread:
            if isinstance(error, GenerationConflict):
                raise
            raise UnknownOutcome(f'{unread}; whether {in_short(wanted)} holds its claim is not known') from unread
        # Asked after the generation was read: whoever takes our place after this look claims after it, too,
        # and one of the two claims finds that the generation has moved.
        check()
        on = {instance: compute_of(each.allocations) for instance, each in held.items() if instance not in movable}
        if elsewhere := {each: on[each] for each in on if on[each] not in ('', compute_of(wanted[each]))}:
            raise ClaimedElsewhere(elsewhere)
        found = {instance: each.generation for instance, each in held.items()}
        if isinstance(error, UnknownOutcome):
            ours = all(_is_ours(held[each], wanted[each], sent) for each, sent in generations.items())
            if ours and min(each.generation or 0 for each in held.values()) > above():
                return
            if not left:
                raise error
        if isinstance(error, ConsumerConflict) and found == generations and None in found.values():
            # Nobody changed it, and yet it is not as it looks: one of them was left empty.
            if len(wanted) > 1:
                raise error
            empty_since = min(empty_since, time.monotonic())
            if time.monotonic() - empty_since < EMPTY_SECONDS:
                left += 1
                time.sleep(EMPTY_PAUSE)
            else:
                generations = dict.fromkeys(wanted, 0)
            continue
        generations = found
        time.sleep(random.uniform(0, 0.1 * left))


def release(
    placement: Placement,
    consumers: Iterable[str],
    wanted: Callable[[Mapping[str, Consumer]], Collection[str]],
    note: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> dict[str, bool | None]:
    """Release what these consumers hold: True for each that holds nothing now, None for those that are wanted.

    False for one that somebody changed meanwhile. This is the order of reading before anything is given away (rule 11):
    the generations first, then `wanted` asks etcd who stands behind these consumers, then they are released with the
    generations read. Whoever comes to stand behind one after that look claims after it, too, and moves its generation.
    `note` writes down the generations of those that are released next (ecomp.store.sharing), so that nobody else's
    claim ever gets these numbers again; it is left out where nobody claims again.
    """
    named, done = list(consumers), dict[str, bool | None]()
    for first in range(0, len(named), TOGETHER):
        held = {each: allocations.consumer(placement, each) for each in named[first : first + TOGETHER]}
        holding = {each: found for each, found in held.items() if found.allocations}
        kept = wanted(holding) if holding else ()
        going = {each: found for each, found in holding.items() if each not in kept}
        note({each: found.generation for each, found in going.items() if found.generation is not None})
        for each, found in held.items():
            done[each] = None if each in kept else allocations.release(placement, each, found)
    return done


def in_short(wanted: Mapping[str, object]) -> str:
    """The instances of a claim in one line: the first, and how many there are in all."""
    first = next(iter(wanted))
    return first if len(wanted) == 1 else f'{first} (of {len(wanted)})'


def _is_ours(held: Consumer, wanted: Allocations, sent: int | None) -> bool:
    """Whether what is held is what we claimed with the generation `sent`, though no answer came.

    Not known where that was None: somebody may have claimed the same, and until the generation has moved once more
    their late release takes it away.
    """
    moved = sent is not None and held.generation == sent + 1
    return moved and difference(wanted, held.allocations) is None


def _write(
    placement: Placement,
    wanted: Mapping[str, Allocations],
    user_id: str,
    project_id: str,
    generations: Mapping[str, int | None],
) -> None:
    if len(wanted) > 1:
        return allocations.claim_set(placement, wanted, user_id, project_id, generations)
    ((instance, each),) = wanted.items()
    return allocations.claim(placement, instance, each, user_id, project_id, generations[instance])
