"""One plain instance in a large cluster: a few living computes are looked at in place of all.

Placement's answer about everybody takes as long as there are computes; that about one is as short anywhere. So a
handful of the living is read, from a random one on, and placement asked about the one that says it suits best, and then
about the next ones if it is not as it said. A hint decides who is asked about, and placement who has room: who is
disabled, or was full all the time, is not offered. What no few have is sought among all.

Who follows a gap between two uuids is read more often than others, and is then fuller than these, so it is not the best
of those that are read with it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ecomp.model import keys
from ecomp.model.allocation import Resources
from ecomp.model.choose import FIRST, PACK, RANDOM, Candidate, choose
from ecomp.model.host import fits, living_in, share_left
from ecomp.model.order import SetOrder
from ecomp.model.query import amounts_alone
from ecomp.placement.allocations import candidates
from ecomp.scheduler.placing.claim import Claimer, Terms
from ecomp.scheduler.placing.place import goal
from ecomp.store.client import Store

log = logging.getLogger(__name__)

READ = 16
"""Computes whose presence is read."""
ASKED = 3
"""Of these placement is asked about, at most."""
VAIN = 2
"""So many that are not offered, or taken meanwhile, and all are asked about: what is said is not so here."""

ROUNDED = 0.02
"""What a hint may say too much: it is in hundredths, rounded up."""


@dataclass
class Few:
    """Claims for one request. What may hold a claim, however this ends, is in `tried`.

    `of`: how many might have taken it, by what they say.
    """

    claimer: Claimer
    wanted: SetOrder
    rng: random.Random
    tried: list[str]
    of: int = 0

    def place(self, store: Store, terms: Terms, large: int) -> dict[str, Candidate]:
        """The candidate that the instance has claimed; nothing where all are to be asked about.

        That is so of `large` computes and fewer, too.

        Errors: OverQuota, UsageError, those of placement, etcd and the claim.
        """
        asked = plain(self.wanted.query or '', self.wanted.count, self.wanted.weigh)
        if asked is None or terms.group is not None:
            return {}
        start = keys.compute(f'{self.rng.getrandbits(32):08x}')  # as uuids begin
        entries, number = store.around(keys.COMPUTES, start, READ)
        if number <= large:
            return {}
        # What is called otherwise is no provider of placement's, and would be a part of the question.
        alive = [each for each in entries if each.lease and keys.is_uuid(keys.last(each.key))]
        hinted = {keys.last(each.key): living_in(each.value).room for each in alive}
        lefts = {compute: share_left(hint, asked) for compute, hint in hinted.items() if hint and fits(hint, asked)}
        self.of = len(lefts)
        return self._claim(lefts, terms)

    def _claim(self, lefts: Mapping[str, float], terms: Terms) -> dict[str, Candidate]:
        """Claim on the best of these, as far as the first ones are asked about."""
        weigh = self.wanted.weigh
        order = self.rng.sample(sorted(lefts), len(lefts))
        if weigh != RANDOM:
            order.sort(key=lambda compute: -_weight(lefts[compute], weigh))
        known: list[Candidate] = []
        for number, compute in enumerate(order[:ASKED]):
            known += self._offered(compute)
            known.sort(key=lambda each: -(each.weight or 0))
            # Not as empty as it said: the next one may be better.
            hoped = [_weight(lefts[each], weigh) for each in order[number + 1 : ASKED]]
            is_best = known and not (hoped and weigh != RANDOM and hoped[0] - ROUNDED > (known[0].weight or 0))
            if is_best and (claimed := self._claimed(known.pop(0), terms)):
                return claimed
            if number + 1 - len(known) >= VAIN:
                break
        return next(filter(None, (self._claimed(each, terms) for each in known)), {})

    def _offered(self, compute: str) -> Sequence[Candidate]:
        """The compute, if placement offers it."""
        offer = candidates(self.claimer.placement, f'{self.wanted.query}&in_tree={compute}')
        return choose(offer, [compute], self.wanted.weigh, self.rng).tries

    def _claimed(self, candidate: Candidate, terms: Terms) -> dict[str, Candidate]:
        goal([candidate], terms, self.wanted)  # OverQuota, UsageError
        instance = self.wanted.instance
        self.tried += [instance] if instance not in self.tried else []
        return dict.fromkeys(self.claimer.claim_what_fits({instance: candidate}), candidate)


def plain(query: str, count: int, weigh: str) -> Resources | None:
    """The amounts that are asked for where a few computes may answer it; None where all have to be asked about."""
    return amounts_alone(query) if count == 1 and weigh != FIRST else None


def _weight(left: float, weigh: str) -> float:
    return 1 - left if weigh == PACK else left
