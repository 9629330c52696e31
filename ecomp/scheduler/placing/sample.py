"""Claim for one instance on a sampled compute of a large cluster."""

from __future__ import annotations

from dataclasses import dataclass

from ecomp.model import keys
from ecomp.model.allocation import Resources, sum_allocations
from ecomp.model.choose import FIRST, PACK, RANDOM, Candidate, calculate_free_share, choose
from ecomp.model.order import SetOrder
from ecomp.model.query import exclude_disabled, parse_plain_amounts, parse_query
from ecomp.scheduler.placing.claim import Terms
from ecomp.scheduler.placing.session import Session, require_complete

# Computes whose facts are read, in one round trip.
SAMPLE_SIZE = 16
# Computes of the sample about which placement is queried, before it is queried about all.
MAX_QUERIES = 2


@dataclass(eq=False, repr=False)
class SampledPlacer:
    session: Session
    order: SetOrder
    # The number of sampled computes that have room by their facts.
    fitting: int = 0

    def place(self, terms: Terms, min_cluster_size: int) -> dict[str, Candidate]:
        """Claim the instance on a sampled compute, or return {} if that is not possible."""
        amounts = get_sampleable_amounts(self.order.query or '', self.order.count, self.order.weigh)
        if amounts is None or terms.group is not None:
            return {}
        # A compute after a large gap between uuids is sampled more often, but fills up and then ranks low.
        start = keys.facts(f'{self.session.scheduler.rng.getrandbits(32):08x}')  # the first 8 digits of a uuid
        # A query about all computes takes time in proportion to their number, so the best of a few are queried.
        entries, cluster_size = self.session.store.sample(keys.FACTS, start, SAMPLE_SIZE)
        if cluster_size <= min_cluster_size:
            return {}
        from ecomp.model.explain import find_miss
        from ecomp.model.facts import parse_facts

        facts = {keys.get_last_part(entry.key): parse_facts(entry.value) for entry in entries if entry.lease}
        # If all that are sampled report a trouble, the query about all computes finds one that does not.
        usable = facts.keys() - set(self.session.read_troubled())
        constraints = parse_query(exclude_disabled(self.order.query or ''))
        free_shares = {
            compute: calculate_free_share(amounts, each.rooms)
            for compute, each in facts.items()
            # Another key's name cannot be a provider, and would become a part of the query.
            if keys.is_uuid(compute)
            if compute in usable and find_miss(constraints, each.make_provider(compute)).is_candidate
        }
        self.fitting = len(free_shares)
        ranked = self.session.scheduler.rng.sample(sorted(free_shares), len(free_shares))
        if self.order.weigh != RANDOM:
            ranked.sort(key=lambda compute: free_shares[compute], reverse=self.order.weigh != PACK)
        return next(filter(None, (self._claim(compute, terms) for compute in ranked[:MAX_QUERIES])), {})

    def _claim(self, compute: str, terms: Terms) -> dict[str, Candidate]:
        offer = self.session.read_offer(f'{self.order.query}&in_tree={compute}')
        for candidate in choose(offer, [compute], self.order.weigh, self.session.scheduler.rng).candidates:
            require_complete([candidate])
            terms.count_allowed(sum_allocations(candidate.allocations), 1, 1)
            if self.session.claim({self.order.instance: candidate}):
                return {self.order.instance: candidate}
        return {}


def get_sampleable_amounts(query: str, count: int, weigh: str) -> Resources | None:
    """Return the query's {class: amount}, or None if the order cannot be sampled."""
    return parse_plain_amounts(query) if count == 1 and weigh != FIRST else None
