"""Claim candidates for instances, knowing at each step what placement holds.

Rules 1 and 3 of the protocol: an unknown outcome is read back; a claim is released only as it was read, and only
while nobody else is at the same instance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ecomp.errors import (
    Conflict,
    ConsumerConflict,
    GenerationConflict,
    NoCapacity,
    PlacementRefusal,
    UnknownOutcome,
)
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import Allocations
from ecomp.model.choose import Candidate
from ecomp.placement import allocations, providers
from ecomp.placement.claiming import claim, in_short, release
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from ecomp.store.released import note
from ecomp.store.requests import being_taken

log = logging.getLogger(__name__)

BLOCK = 50
"""Instances that one call claims for: placement works at a call with one processor, 5 to 9 ms for each instance."""
AT_ONCE = 2
"""Calls that claim for a set at the same time. docker.sh's placement has a process for each processor."""


@dataclass(frozen=True)
class Claimer:
    """Claims for one attempt. `still_ours` is False once somebody else took it over.

    `above`: the generations that its claims get are higher, see claiming.claim(); 0 where nobody else can have claimed.
    `called` says what a compute is called. `movable` are the instances whose claim the attempt made itself, so that it
    may move it to another compute.
    """

    placement: Placement
    user_id: str
    project_id: str
    still_ours: Callable[[], bool]
    above: Callable[[Collection[str]], int] = lambda _: 0
    called: Callable[[str], str] = str
    movable: set[str] = field(default_factory=set)

    def claim_what_fits(self, wanted: Mapping[str, Candidate]) -> set[str]:
        """Claim for all of them at once or, where placement has no room for one, for as many as it can.

        The instances that hold their candidate now. Errors, none while a call is under way: Unreachable, Conflict,
        PlacementRefusal.
        """
        parts = blocks(wanted)
        if len(parts) == 1:
            return self._claim_what_fits(wanted)
        from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait  # for large sets

        threads = ThreadPoolExecutor(AT_ONCE, 'claim')
        calls = [threads.submit(self._claim_what_fits, each) for each in parts]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        except BaseException:
            # Ctrl-C waits for no answer: what is claimed after it the computes release (rule 4), as of one call.
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        threads.shutdown(cancel_futures=True)  # what was begun is waited for
        done = [call for call in calls if not call.cancelled()]
        if errors := [error for call in done if (error := call.exception()) is not None]:
            # What is not known of one block forbids to release anything (rule 1), whatever else went wrong.
            raise min(errors, key=lambda error: not isinstance(error, UnknownOutcome))
        return set().union(*(call.result() for call in done))

    def _claim_what_fits(self, wanted: Mapping[str, Candidate]) -> set[str]:
        try:
            self.claim({instance: candidate.allocations for instance, candidate in wanted.items()})
        except (NoCapacity, GenerationConflict, PlacementRefusal) as error:
            if len(wanted) == 1:
                ((instance, candidate),) = wanted.items()
                if isinstance(error, ConsumerConflict):
                    why = 'what it holds in placement is changed by somebody else all the time; try again'
                    raise Conflict(f'{instance}: {why}') from error
                if isinstance(error, PlacementRefusal) and self._is_there(candidate):
                    raise
                log.warning('compute %s: %s', self.called(candidate.compute), error)
                return set()
            # One that is full fails the whole, and which it was has no code of its own.
            return set().union(*(self._claim_what_fits(half) for half in halves(wanted)))
        failpoint('claimed-some')
        return set(wanted)

    def claim(self, wanted: Mapping[str, Allocations]) -> None:
        """Each instance holds exactly what is wanted for it when this returns: see claiming.claim()."""

        def check() -> None:
            self.check(in_short(wanted))

        claim(self.placement, wanted, self.user_id, self.project_id, check, lambda: self.above(wanted), self.movable)
        self.movable.update(wanted)

    def check(self, instances: str) -> None:
        """Conflict unless the attempt is ours still; `instances` is what the message says of it."""
        if not self.still_ours():
            raise Conflict(f'{instances}: another eschedule took it over, or this one was too slow')

    def _is_there(self, candidate: Candidate) -> bool:
        """False if one of its providers was removed, by `host forget`, since it was offered."""
        return all(providers.name(self.placement, each) is not None for each in candidate.allocations)


def blocks(wanted: Mapping[str, Candidate]) -> Sequence[Mapping[str, Candidate]]:
    """Parts to be claimed side by side: of at most BLOCK instances, but a compute's stay together.

    One part where two would claim of the same provider, a disk that computes share: the calls would only meet there.
    """
    parts: list[dict[str, Candidate]] = [{}]
    by_compute: dict[str, dict[str, Candidate]] = {}
    for instance, candidate in wanted.items():
        by_compute.setdefault(candidate.compute, {})[instance] = candidate
    for each in by_compute.values():
        if parts[-1] and len(parts[-1]) + len(each) > BLOCK:
            parts.append({})
        parts[-1].update(each)
    named = [{provider for candidate in part.values() for provider in candidate.allocations} for part in parts]
    return parts if sum(map(len, named)) == len(set().union(*named)) else [wanted]


def halves(wanted: Mapping[str, Candidate]) -> tuple[dict[str, Candidate], dict[str, Candidate]]:
    """Two parts of about the same size. A compute's instances stay together, as long as there are other computes."""
    by_compute: dict[str, list[str]] = {}
    for instance, candidate in wanted.items():
        by_compute.setdefault(candidate.compute, []).append(instance)
    groups = list(by_compute.values()) if len(by_compute) > 1 else [[instance] for instance in wanted]
    first: list[str] = groups[0]
    for group in groups[1:-1]:
        if len(first) + len(group) <= len(wanted) / 2:
            first = first + group
    return (
        {instance: wanted[instance] for instance in wanted if instance in set(first)},
        {instance: wanted[instance] for instance in wanted if instance not in set(first)},
    )


def abandon(store: Store, placement: Placement, instances: Iterable[str], attempt: str, revision: int) -> bool:
    """Release what the instances hold, but for those that somebody else is at or that were delivered; True if all.

    Somebody else is another eschedule, or a compute that takes the same uuid out of a queue. `attempt` is the uuid of
    their attempt, `revision` that of its key when it was ours. Who is at them is asked once the generations are read
    (rule 11): a second eschedule of the same uuid writes its attempt first and claims after, so either that is seen
    here, or its claim moves a generation read here before.
    """

    def wanted(holding: Mapping[str, allocations.Consumer]) -> Collection[str]:
        at_it = store.get(keys.attempt(attempt))
        if at_it is not None and at_it.revision != revision:
            return holding
        taken = being_taken(store)
        return [
            instance
            for instance, held in holding.items()
            if instance in taken
            or store.read([key(each, instance) for each in held.allocations for key in (keys.request, keys.record)])
        ]

    return all(release(placement, instances, wanted, partial(note, store)).values())
