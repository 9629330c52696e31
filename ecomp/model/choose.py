"""Which candidate to claim first, and which not at all."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ecomp.model.allocation import Allocations


@dataclass(frozen=True)
class Choice:
    """The candidates to try, in order, each with its compute; and the providers passed over."""

    tries: Sequence[tuple[str, Allocations]]
    skipped: Sequence[str]


def choose(candidates: Iterable[Allocations], alive: Iterable[str], rng: random.Random) -> Choice:
    """Candidates whose compute is alive, shuffled: racing schedulers must not all want the same first one.

    A candidate may name several providers (shared storage); its compute is the one in `alive`. One
    without a living compute, or with two, is passed over: nobody would hear the request.
    """
    living = set(alive)
    tries: list[tuple[str, Allocations]] = []
    skipped: set[str] = set()
    for allocations in candidates:
        computes = [provider for provider in allocations if provider in living]
        if len(computes) == 1:
            tries.append((computes[0], allocations))
        else:
            skipped.update(allocations)
    rng.shuffle(tries)
    wanted = {compute for compute, _ in tries}
    return Choice(tries, sorted(skipped - wanted - living))
