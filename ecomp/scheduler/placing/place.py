"""Claim places for the instances of an order, within its group and its quota; or plan it.

The first places are left to older attempts in flight, which are counted before placement is queried. The places of a
finished attempt are not offered, nor those of an attempt that has claimed since it was counted: usable places then
stay free.

In a large cluster SampledPlacer places one instance without a group, if it can: a query about all computes takes time
in proportion to their number. It reads a few presences from a random uuid on, and queries placement about the best
hints. A compute after a large gap between uuids is sampled more often, but fills up and then ranks low.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ecomp.errors import NoCapacity, TooFew, UsageError
from ecomp.model import keys
from ecomp.model.allocation import Allocations, Resources, Room, Rooms, list_missing_classes, sum_allocations
from ecomp.model.choose import (
    FIRST,
    PACK,
    RANDOM,
    SPREAD,
    Candidate,
    Choice,
    Offer,
    choose,
    describe_room,
    distribute,
    explain_no_candidate,
)
from ecomp.model.group import Group
from ecomp.model.host import PresenceFacts
from ecomp.model.order import SetOrder
from ecomp.model.query import parse_plain_amounts
from ecomp.model.stored import decode_lenient
from ecomp.placement.allocations import read_candidates
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import Claimer, Terms, read_terms
from ecomp.store.client import Store

# With fewer spare places, ours may have been taken since placement was queried.
MIN_SPARE_PLACES = 64
# New queries while no attempt ahead finishes: a killed one stays ahead for a minute.
MAX_REFRESHES = 8
# Seconds before each of these queries: at most this, and half of it at least.
MAX_PAUSE_SECONDS = 0.1
# Places that are left to other attempts, at most: they are simulated one by one.
MAX_PLACES_AHEAD = 300


class Contention:
    """The place of this attempt: `ahead` is the number of older attempts' instances, at most MAX_PLACES_AHEAD."""

    def __init__(
        self, count_in_flight: Callable[[], tuple[int, int]], query_placement: Callable[[], Offer], rng: random.Random
    ) -> None:
        """Count the instances of older and of newer attempts in flight; refresh() queries placement."""
        self._count_in_flight = count_in_flight
        self._query_placement = query_placement
        self._rng = rng
        self._is_fresh = False
        self._refreshes_left = MAX_REFRESHES
        self._fewest_ahead = MAX_PLACES_AHEAD
        instances_ahead, self._instances_behind = count_in_flight()
        self.ahead = min(instances_ahead, MAX_PLACES_AHEAD)

    @property
    def is_alone(self) -> bool:
        """True if no other attempt was in flight at the last count."""
        return self.ahead + self._instances_behind == 0

    def refresh(self) -> Offer:
        """Count the attempts again, then return a new offer from placement."""
        ahead, self._instances_behind = self._count_in_flight()
        self.ahead = min(ahead, MAX_PLACES_AHEAD)
        self._is_fresh = True
        return self._query_placement()

    def should_refresh(self, spare_places: int) -> bool:
        """Return whether to call refresh(), with `spare_places` left behind ours (< 0: too few). May sleep.

        Before the first refresh: if others are in flight and fewer than MIN_SPARE_PLACES are left. Later: if too few
        are left and some are ahead, after a pause, until MAX_REFRESHES calls in a row found no fewer ahead.
        """
        if not self._is_fresh:  # placement was queried before this attempt was announced
            return spare_places < MIN_SPARE_PLACES and not self.is_alone
        if spare_places >= 0 or not self.ahead:
            return False
        self._refreshes_left = MAX_REFRESHES if self.ahead < self._fewest_ahead else self._refreshes_left - 1
        self._fewest_ahead = min(self.ahead, self._fewest_ahead)
        if self._refreshes_left:
            time.sleep(self._rng.uniform(MAX_PAUSE_SECONDS / 2, MAX_PAUSE_SECONDS))
        return self._refreshes_left > 0


log = logging.getLogger(__name__)

# Refused claims after which a place is left out: it is too busy, as a full one is not offered. A compute with child
# providers (GPUs, say) is several places, of which some may be free.
MAX_REFUSALS = 2

# Computes that are logged by name, at most.
MAX_LOGGED_COMPUTES = 20


@dataclass
class Placer:
    """Claims places for one attempt.

    A claim in a wrong place stays until it is moved (rule: release-by-generation).
    `refresh_offer` queries placement again; `count_in_flight`: see Contention. `is_ours` recognizes a compute of this
    cluster, alive or not. `attempted` instances may hold a claim, however the attempt ends. `candidate_count` is the
    most computes, in any query, that could have taken an instance: 0 before place(), then at least 1. The instances of
    `claimed_elsewhere`, {instance: compute} of another attempt's claims, are not placed.
    """

    claimer: Claimer
    refresh_offer: Callable[[], Offer]
    count_in_flight: Callable[[], tuple[int, int]]
    alive: Collection[str]
    is_ours: Callable[[str], bool]
    order: SetOrder
    rng: random.Random
    attempted: list[str] = field(default_factory=list)
    candidate_count: int = 0
    claimed_elsewhere: dict[str, str] = field(default_factory=dict)

    def place(self, offer: Offer, terms: Terms, placed: Mapping[str, Candidate]) -> dict[str, Candidate]:
        """Claim a candidate for each instance, or for the minimum at least: {instance: candidate}.

        It contains `placed`, unless a strict affinity group without other members needs another compute. After a lost
        race placement is queried again. Raises NoCapacity (TooFew, OverQuota), UsageError (the query lacks what a guest
        needs), and as Claimer.claim_what_fits(); claims made until then stay.
        """
        order, held = self.order, dict(placed)
        group, refusals = _add_members(terms.group, held), Counter[tuple[str, ...]]()
        contention = Contention(self.count_in_flight, self.refresh_offer, self.rng)
        batch: list[Candidate] = []
        while True:
            choice = choose(offer, self.alive, order.weigh, self.rng, group)
            if choice.skipped:  # providers of another cloud in the same placement are not logged
                choice = choice._replace(skipped=[skipped for skipped in choice.skipped if self.is_ours(skipped)])
            for provider in choice.skipped[:MAX_LOGGED_COMPUTES]:
                log.warning('compute %s is not alive: skipped', self.claimer.get_display_name(provider))
            if len(choice.skipped) > MAX_LOGGED_COMPUTES:
                log.warning('%d more not alive: skipped', len(choice.skipped) - MAX_LOGGED_COMPUTES)
            candidates = [
                candidate for candidate in choice.candidates if refusals[_list_providers(candidate)] < MAX_REFUSALS
            ]
            self.candidate_count = max(len({candidate.compute for candidate in candidates}), self.candidate_count, 1)
            max_count = order.count - len(self.claimed_elsewhere)
            lacking = min(count_to_place([*candidates, *held.values()], terms, order), max_count) - len(held)
            if lacking <= 0:
                break
            batch = distribute(candidates, offer.rooms, lacking, order.weigh, self.rng, group)
            if not batch or len(held) + len(batch) < order.minimum:
                break
            if group is None and not contention.is_alone:  # a group's places are not chosen for other attempts
                chosen = self._choose_behind(contention, candidates, offer.rooms, batch)
                if chosen is None:
                    offer = contention.refresh()
                    continue
                batch = chosen
            unplaced = [
                instance
                for instance in order.instances
                if instance not in held and instance not in self.claimed_elsewhere
            ]
            assigned = dict(zip(unplaced, batch, strict=False))
            self.attempted += [instance for instance in assigned if instance not in self.attempted]
            claimed = self.claimer.claim_what_fits(assigned)
            held |= {instance: assigned[instance] for instance in claimed}
            group = _add_members(terms.group, held)
            if len(claimed) == len(assigned):
                break
            # Another attempt was faster there, so the offer is stale.
            refusals.update(
                {_list_providers(candidate) for instance, candidate in assigned.items() if instance not in claimed}
            )
            if len(held) < order.minimum and terms.group is not None and terms.group.is_undecided:
                # All members share one compute: try another one.
                held, group = {}, terms.group
            offer = contention.refresh()
        if len(held) < order.minimum:
            raise self._make_refusal(offer, choice, terms, [*held.values(), *batch])
        return {instance: held[instance] for instance in order.instances if instance in held}

    def take_over(self, earlier_claims: Mapping[str, Candidate]) -> dict[str, Candidate]:
        """Claim where an earlier attempt's claims are; return those placed. Raises what Claimer.claim_what_fits() does.

        They stay (rule: claim-stays): after a restore of etcd the instances may run there.
        """
        self.attempted += [instance for instance in earlier_claims if instance not in self.attempted]
        self.claimer.foreign.update(earlier_claims.keys() - self.claimer.movable)
        if not earlier_claims:
            return {}
        return {instance: earlier_claims[instance] for instance in self.claimer.claim_what_fits(earlier_claims)}

    def _choose_behind(
        self, contention: Contention, candidates: Sequence[Candidate], rooms: Rooms, batch: list[Candidate]
    ) -> list[Candidate] | None:
        """Choose places behind those left to older attempts; None if the offer is to be refreshed first. May sleep.

        If it is not and places are too few, return a random place for one instance, and `batch` for several.
        """
        weigh, lacking = self.order.weigh, len(batch)
        # Not shuffled: every attempt has to simulate the others in the same order.
        ordered = (
            candidates if weigh == FIRST else sorted(candidates, key=lambda each: (each.compute, _list_providers(each)))
        )
        places = distribute(ordered, rooms, contention.ahead + lacking + MIN_SPARE_PLACES, weigh, self.rng)
        spare = len(places) - contention.ahead - lacking
        if contention.should_refresh(spare):
            return None
        if weigh == SPREAD and lacking == 1 and spare >= MIN_SPARE_PLACES:
            # Shuffled: of many equal places, attempts hardly choose the same, even unannounced ones. Sets would still
            # meet on some compute, where placement serializes them.
            places = distribute(candidates, rooms, contention.ahead + 1, weigh, self.rng)
        if spare >= 0:
            return places[contention.ahead : contention.ahead + lacking]
        return [self.rng.choice(places)] if lacking == 1 else batch

    def count_room(self, offer: Offer, terms: Terms) -> int:
        """Count the instances of the order for which the offer and the group have room."""
        order = self.order
        choice = choose(offer, self.alive, order.weigh, self.rng, terms.group)
        return len(distribute(choice.candidates, offer.rooms, order.count, order.weigh, self.rng, terms.group))

    def _make_refusal(self, offer: Offer, choice: Choice, terms: Terms, placed: list[Candidate]) -> NoCapacity:
        """Make the error: TooFew for a set with some in `placed`, otherwise NoCapacity."""
        if self.order.count > 1 and placed:
            return make_too_few(self.order, terms.group, placed)
        if self.attempted and (terms.group is None or choice.candidates):
            return NoCapacity('other attempts took every candidate first')
        return NoCapacity(explain_no_candidate(offer, choice, self.alive, terms.group))


def count_to_place(candidates: Sequence[Candidate], terms: Terms, order: SetOrder) -> int:
    """Count what the quota allows, at most order.count; without candidates, order.count. OverQuota, UsageError."""
    for candidate in candidates:
        check_complete(candidate.allocations)
    if not candidates:
        return order.count
    return terms.count_allowed(sum_allocations(candidates[0].allocations), order.count, order.minimum)


def make_too_few(order: SetOrder, group: Group | None, placed: Sequence[Candidate]) -> TooFew:
    """Make the refusal of a set for which there is only room for the instances in `placed`."""
    required = '' if order.minimum == order.count else f', and at least {order.minimum} are required'
    return TooFew(describe_room(len(placed), order.count, group) + required, placed)


def _add_members(group: Group | None, held: Mapping[str, Candidate]) -> Group | None:
    """Return the group with the held instances as members, too; None without a group."""
    return group and group.with_members({instance: candidate.compute for instance, candidate in held.items()})


def _list_providers(candidate: Candidate) -> tuple[str, ...]:
    return tuple(sorted(candidate.allocations))


def check_complete(allocations: Allocations) -> None:
    """Raise UsageError if these allocations lack what a guest needs."""
    lacking = list_missing_classes(sum_allocations(allocations))
    if lacking:
        raise UsageError(f'the query lacks {", ".join(lacking)}, which every guest needs')


@dataclass(frozen=True)
class RankedCompute:
    """A compute to try, its `rooms`, `weight` (None: not weighed), an instance's `amounts` on it, how many go there."""

    compute: str
    hostname: str | None
    weight: float | None
    amounts: Mapping[str, int]
    rooms: Mapping[str, Room]
    instance_count: int


def plan(
    store: Store, backend: Future[tuple[Placement, Offer]], order: SetOrder, rng: random.Random
) -> list[RankedCompute]:
    """Return the candidates in the order of trying, without a claim; a compute may occur twice.

    Raises NoCapacity or TooFew, and the errors of count_to_place(), read_terms(), `backend` and etcd.
    """
    terms = read_terms(store, order, order.instances)
    from ecomp.scheduler.queries.hosts import read_computes  # not for a claim

    known_computes = read_computes(store)
    living = known_computes.living
    _, offer = backend.result()
    choice = choose(offer, living, order.weigh, rng, terms.group)
    choice = choice._replace(
        skipped=[provider for provider in choice.skipped if provider in known_computes.stored_hostnames]
    )
    count = count_to_place(choice.candidates, terms, order)
    placed = distribute(choice.candidates, offer.rooms, count, order.weigh, rng, terms.group)
    if not placed:
        raise NoCapacity(explain_no_candidate(offer, choice, living, terms.group))
    if len(placed) < order.minimum:
        raise make_too_few(order, terms.group, placed)
    return [
        RankedCompute(
            *(
                candidate.compute,
                known_computes.find_hostname(candidate.compute),
                candidate.weight,
                candidate.allocations[candidate.compute],
            ),
            offer.rooms.get(candidate.compute, {}),
            sum(other is candidate for other in placed),
        )
        for candidate in choice.candidates
    ]


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

    claimer: Claimer
    order: SetOrder
    rng: random.Random
    attempted: list[str]
    fitting: int = 0

    def place(self, store: Store, terms: Terms, min_cluster_size: int) -> dict[str, Candidate]:
        """Claim the instance on a sampled compute; {} if placement has to be queried about all.

        Sampling needs one instance without a group, a query of amounts alone, not FIRST, and more than
        `min_cluster_size` computes. Raises OverQuota, UsageError, and the errors of etcd, placement and the claim.
        """
        amounts = get_sampleable_amounts(self.order.query or '', self.order.count, self.order.weigh)
        if amounts is None or terms.group is not None:
            return {}
        start = keys.compute(f'{self.rng.getrandbits(32):08x}')  # the first 8 digits of a uuid
        entries, cluster_size = store.sample(keys.COMPUTES, start, SAMPLE_SIZE)
        if cluster_size <= min_cluster_size:
            return {}
        from ecomp.model.host import estimate_free_share, has_room  # for large clusters only

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
        ranked = self.rng.sample(sorted(free_shares), len(free_shares))
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
        offer = read_candidates(self.claimer.placement, f'{self.order.query}&in_tree={compute}')
        return choose(offer, [compute], self.order.weigh, self.rng).candidates

    def _claim_candidate(self, candidate: Candidate, terms: Terms) -> dict[str, Candidate]:
        """Claim: {instance: candidate}, or {} without room. OverQuota, UsageError, or errors as claim_what_fits()."""
        count_to_place([candidate], terms, self.order)  # OverQuota, UsageError
        instance = self.order.instance
        self.attempted += [instance] if instance not in self.attempted else []
        return dict.fromkeys(self.claimer.claim_what_fits({instance: candidate}), candidate)


def get_sampleable_amounts(query: str, count: int, weigh: str) -> Resources | None:
    """Return the query's {class: amount}; None if it has anything else, for several instances, and for FIRST."""
    return parse_plain_amounts(query) if count == 1 and weigh != FIRST else None


def _compute_weight(free_share: float, weigh: str) -> float:
    """Return the weight of a free share, 0 to 1: for PACK the used share, otherwise the free one."""
    return 1 - free_share if weigh == PACK else free_share
