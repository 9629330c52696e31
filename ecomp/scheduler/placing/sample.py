"""Claim for one instance on a sampled compute of a large cluster.

A query about all computes takes time in proportion to their number. This reads a few presences from a random uuid on,
and queries placement about the best hints. A compute after a large gap between uuids is sampled more often, but fills
up and then ranks low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ecomp.model import keys
from ecomp.model.allocation import Resources, sum_allocations
from ecomp.model.choose import FIRST, PACK, RANDOM, Candidate, choose
from ecomp.model.order import SetOrder
from ecomp.model.query import parse_plain_amounts
from ecomp.model.stored import decode_lenient
from ecomp.scheduler.placing.claim import Terms
from ecomp.scheduler.placing.session import Session, check_complete

# Computes whose presence is read, in one round trip.
SAMPLE_SIZE = 16
# Computes of the sample about which placement is queried, at most.
MAX_QUERIES = 3
# After this many wrong hints (not offered, or taken concurrently) placement is queried about all computes.
MAX_STALE_HINTS = 2

# Hints are hundredths, rounded up: the free share may be overstated by this much.
HINT_ERROR = 0.02


@dataclass
class SampledPlacer:
    """Claims for one instance on a sampled compute; `fitting` counts the sampled ones with room by their hints."""

    session: Session
    order: SetOrder
    fitting: int = 0

    def place(self, terms: Terms, min_cluster_size: int) -> dict[str, Candidate]:
        """Claim the instance on a sampled compute; {} if placement has to be queried about all.

        Sampling needs one instance without a group, a query of amounts alone, not FIRST, and more than
        `min_cluster_size` computes. Raises OverQuota, UsageError, and the errors of etcd, placement and the claim.
        """
        amounts = get_sampleable_amounts(self.order.query or '', self.order.count, self.order.weigh)
        if amounts is None or terms.group is not None:
            return {}
        start = keys.compute(f'{self.session.scheduler.rng.getrandbits(32):08x}')  # the first 8 digits of a uuid
        entries, cluster_size = self.session.store.sample(keys.COMPUTES, start, SAMPLE_SIZE)
        if cluster_size <= min_cluster_size:
            return {}
        from ecomp.model.host import PresenceFacts, estimate_free_share, has_room  # for large clusters only

        # Another key's name cannot be a provider, and would become a part of the query.
        alive = [entry for entry in entries if entry.lease and keys.is_uuid(keys.get_last_part(entry.key))]
        hints = {keys.get_last_part(entry.key): decode_lenient(PresenceFacts, entry.value).room for entry in alive}
        shares = {
            compute: estimate_free_share(hint, amounts)
            for compute, hint in hints.items()
            if hint and has_room(hint, amounts)
        }
        self.fitting = len(shares)
        return self._claim_best(shares, terms)

    def _claim_best(self, free_shares: Mapping[str, float], terms: Terms) -> dict[str, Candidate]:
        """Claim on the best sampled compute; return {instance: candidate}, or {} if on none.

        It queries MAX_QUERIES computes at most. After MAX_STALE_HINTS wrong hints it only tries those offered so far.
        """
        weigh = self.order.weigh
        ranked = self.session.scheduler.rng.sample(sorted(free_shares), len(free_shares))
        if weigh != RANDOM:
            ranked.sort(key=lambda compute: -_compute_weight(free_shares[compute], weigh))
        offered: list[Candidate] = []
        for index, compute in enumerate(ranked[:MAX_QUERIES]):
            offered += self._query_compute(compute)
            offered.sort(key=lambda each: -(each.weight or 0))
            # It has less room than its hint: the next compute may be better.
            hinted = [_compute_weight(free_shares[other], weigh) for other in ranked[index + 1 : MAX_QUERIES]]
            is_best = offered and not (hinted and weigh != RANDOM and hinted[0] - HINT_ERROR > (offered[0].weight or 0))
            if is_best and (claimed := self._claim_candidate(offered.pop(0), terms)):
                return claimed
            if index + 1 - len(offered) >= MAX_STALE_HINTS:
                break
        return next(filter(None, (self._claim_candidate(candidate, terms) for candidate in offered)), {})

    def _query_compute(self, compute: str) -> Sequence[Candidate]:
        """Query placement about one compute; empty if it is not offered."""
        offer = self.session.read_offer(f'{self.order.query}&in_tree={compute}')
        return choose(offer, [compute], self.order.weigh, self.session.scheduler.rng).candidates

    def _claim_candidate(self, candidate: Candidate, terms: Terms) -> dict[str, Candidate]:
        """Claim: {instance: candidate}, or {} without room. OverQuota, UsageError, or errors as claim_what_fits()."""
        check_complete(candidate.allocations)
        terms.count_allowed(sum_allocations(candidate.allocations), 1, 1)
        return dict.fromkeys(self.session.claim({self.order.instance: candidate}), candidate)


def get_sampleable_amounts(query: str, count: int, weigh: str) -> Resources | None:
    """Return the query's {class: amount}; None if it has anything else, for several instances, and for FIRST."""
    return parse_plain_amounts(query) if count == 1 and weigh != FIRST else None


def _compute_weight(free_share: float, weigh: str) -> float:
    """Return the weight of a free share, 0 to 1: for PACK the used share, otherwise the free one."""
    return 1 - free_share if weigh == PACK else free_share
