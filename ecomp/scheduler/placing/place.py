"""Claim places for the instances of an order, within its group and its quota; or plan it.

The first places are left to older attempts, which are read before placement is queried: each is counted, or it is
finished and its places are not offered. One that is counted and still claims before placement answers counts twice, so
one usable place stays free.

In a large cluster SampledPlacer is tried first for one instance without a group: a query about all computes takes time
in proportion to their number. It reads the presence of a few computes, from a random uuid on, and queries placement
about those with the best hints; placement decides who has room. A compute after a large gap between uuids is sampled
more often, but fills up and then ranks below the others of its sample.
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
from ecomp.model.allocation import Allocations, Resources, Room, Rooms, missing, total
from ecomp.model.choose import FIRST, PACK, RANDOM, SPREAD, Candidate, Choice, Offer, choose, distribute
from ecomp.model.group import AFFINITY, Group
from ecomp.model.order import SetOrder
from ecomp.model.query import amounts_alone
from ecomp.placement.allocations import candidates
from ecomp.placement.client import Placement
from ecomp.placement.providers import SHARES
from ecomp.scheduler.placing.claim import Claimer, Terms, terms_of
from ecomp.store.client import Store

# With fewer spare places, ours may have been taken since placement was queried.
SCARCE = 64
# New queries while no attempt ahead finishes: a killed one stays ahead for a minute.
LOOKS = 8
# Seconds before each of these queries: at most this, and half of it at least.
PAUSE = 0.1
# Places that are left to other attempts, at most: they are simulated one by one.
MOST = 300


class Contention:
    """The place of this attempt among those in flight, as `count_in_flight` returns them."""

    def __init__(self, read: Callable[[], tuple[int, int]], ask: Callable[[], Offer], rng: random.Random) -> None:
        self._read = read
        self._ask = ask
        self._rng = rng
        self._fresh = False
        self._looks = LOOKS
        self._fewest = MOST
        ahead, self._behind = read()
        self.ahead = min(ahead, MOST)

    @property
    def is_alone(self) -> bool:
        """True if no other attempt is in flight."""
        return self.ahead + self._behind == 0

    def look(self) -> Offer:
        """Count the attempts again, then return a new offer from placement."""
        ahead, self._behind = self._read()
        self.ahead = min(ahead, MOST)
        self._fresh = True
        return self._ask()

    def should_look(self, spare: int) -> bool:
        """True to refresh the offer if so few places are left behind ours; may sleep first."""
        if not self._fresh:  # placement was queried before this attempt was announced
            return spare < SCARCE and not self.is_alone
        if spare >= 0 or not self.ahead:
            return False
        self._looks = LOOKS if self.ahead < self._fewest else self._looks - 1
        self._fewest = min(self.ahead, self._fewest)
        if self._looks:
            time.sleep(self._rng.uniform(PAUSE / 2, PAUSE))
        return self._looks > 0


log = logging.getLogger(__name__)

# Refused claims after which a place is left out: it is too busy, as a full one is not offered. A compute with child
# providers (GPUs, say) is several places, of which some may be free.
REFUSALS = 2

# Computes that are logged by name, at most.
NAMED = 20


@dataclass
class Placer:
    """Claims places for one attempt. A claim in a wrong place stays until it is moved.

    If it were released and claimed again, a late release by another process could meet its generation once more (rule
    3).

    Attributes:
        refresh_offer: queries placement again.
        count_in_flight: see Contention.
        is_ours: true for a provider that is a compute of this cluster, alive or not.
        attempted: instances that may hold a claim, however the attempt ends.
        candidate_count: computes that could have taken an instance at the first query.
        claimed_elsewhere: {instance: compute} of another attempt's claims; these instances are not placed.
    """

    claimer: Claimer
    look_again: Callable[[], Offer]
    line: Callable[[], tuple[int, int]]
    alive: Collection[str]
    is_ours: Callable[[str], bool]
    wanted: SetOrder
    rng: random.Random
    tried: list[str] = field(default_factory=list)
    of: int = 0
    blocked: dict[str, str] = field(default_factory=dict)

    def place(self, offer: Offer, terms: Terms, placed: Mapping[str, Candidate]) -> dict[str, Candidate]:
        """Claim a candidate for each instance, or for the minimum at least: {instance: candidate}.

        The result contains `placed`. Raises NoCapacity (or TooFew, OverQuota), UsageError if the query lacks what a
        guest needs, and the errors of Claimer.claim_what_fits().
        """
        order, held = self.wanted, dict(placed)
        group, refusals = _with(terms.group, held), Counter[tuple[str, ...]]()
        contention = Contention(self.line, self.look_again, self.rng)
        batch: list[Candidate] = []
        while True:
            choice = choose(offer, self.alive, order.weigh, self.rng, group)
            if choice.skipped:  # providers of another cloud in the same placement are not logged
                choice = choice._replace(skipped=[skipped for skipped in choice.skipped if self.is_ours(skipped)])
            for provider in choice.skipped[:NAMED]:
                log.warning('compute %s is not alive: skipped', self.claimer.called(provider))
            if len(choice.skipped) > NAMED:
                log.warning('%d more computes are not alive: skipped', len(choice.skipped) - NAMED)
            candidates = [candidate for candidate in choice.tries if refusals[_providers(candidate)] < REFUSALS]
            self.of = max(len({candidate.compute for candidate in candidates}), self.of, 1)
            max_count = order.count - len(self.blocked)
            lacking = min(goal([*candidates, *held.values()], terms, order), max_count) - len(held)
            if lacking <= 0:
                break
            batch = distribute(candidates, offer.rooms, lacking, order.weigh, self.rng, group)
            if not batch or len(held) + len(batch) < order.minimum:
                break
            if group is None and not contention.is_alone:  # a group's places are not chosen for other attempts
                chosen = self._behind(contention, candidates, offer.rooms, batch)
                if chosen is None:
                    offer = contention.look()
                    continue
                batch = chosen
            unplaced = [
                instance for instance in order.instances if instance not in held and instance not in self.blocked
            ]
            assigned = dict(zip(unplaced, batch, strict=False))
            self.tried += [instance for instance in assigned if instance not in self.tried]
            claimed = self.claimer.claim_what_fits(assigned)
            held |= {instance: assigned[instance] for instance in claimed}
            group = _with(terms.group, held)
            if len(claimed) == len(assigned):
                break
            # Another attempt was faster there, so the offer is stale.
            refusals.update(
                {_providers(candidate) for instance, candidate in assigned.items() if instance not in claimed}
            )
            if len(held) < order.minimum and _is_undecided(terms.group):
                # All members share one compute: try another one.
                held, group = {}, terms.group
            offer = contention.look()
        if len(held) < order.minimum:
            raise self._refusal(offer, choice, terms, [*held.values(), *batch])
        return {instance: held[instance] for instance in order.instances if instance in held}

    def take_over(self, left: Mapping[str, Candidate]) -> dict[str, Candidate]:
        """Claim where an earlier attempt's claims are; return the candidates that are placed.

        These claims are neither moved nor released (rule 13): after a restore of etcd the instances may run there.
        """
        self.tried += [instance for instance in left if instance not in self.tried]
        self.claimer.foreign.update(left.keys() - self.claimer.movable)
        return {instance: left[instance] for instance in self.claimer.claim_what_fits(left)} if left else {}

    def _behind(
        self, line: Contention, candidates: Sequence[Candidate], rooms: Rooms, batch: list[Candidate]
    ) -> list[Candidate] | None:
        """Choose places that older attempts will hardly take; None if the offer is to be refreshed."""
        weigh, lacking = self.wanted.weigh, len(batch)
        # Not shuffled: every attempt has to simulate the others in the same order.
        ordered = (
            candidates if weigh == FIRST else sorted(candidates, key=lambda each: (each.compute, _providers(each)))
        )
        places = distribute(ordered, rooms, line.ahead + lacking + SCARCE, weigh, self.rng)
        spare = len(places) - line.ahead - lacking
        if line.should_look(spare):
            return None
        if weigh == SPREAD and lacking == 1 and spare >= SCARCE:
            # Shuffled: of many equal places, attempts hardly choose the same, even unannounced ones. Sets would still
            # meet on some compute, where placement serializes them.
            places = distribute(candidates, rooms, line.ahead + 1, weigh, self.rng)
        if spare >= 0:
            return places[line.ahead : line.ahead + lacking]
        return [self.rng.choice(places)] if lacking == 1 else batch

    def room(self, offer: Offer, terms: Terms) -> int:
        """Count the instances of the order for which the offer has room."""
        order = self.wanted
        choice = choose(offer, self.alive, order.weigh, self.rng, terms.group)
        return len(distribute(choice.tries, offer.rooms, order.count, order.weigh, self.rng, terms.group))

    def _refusal(self, offer: Offer, choice: Choice, terms: Terms, taken: list[Candidate]) -> NoCapacity:
        if self.wanted.count > 1 and taken:
            return too_few(self.wanted, terms.group, taken)
        if self.tried and (terms.group is None or choice.tries):
            return NoCapacity('every candidate was taken meanwhile')
        return NoCapacity(why_none(offer, choice, self.alive, terms.group))


def goal(candidates: Sequence[Candidate], terms: Terms, wanted: SetOrder) -> int:
    """Count the instances that the quota allows; OverQuota, or UsageError as check_complete()."""
    for candidate in candidates:
        check_complete(candidate.allocations)
    if not candidates:
        return wanted.count
    return terms.room(total(candidates[0].allocations), wanted.count, wanted.minimum)


def too_few(wanted: SetOrder, group: Group | None, taken: Sequence[Candidate]) -> TooFew:
    """Make the refusal of a set for which there is only room for the instances in `placed`."""
    rule = '' if group is None else f' in group {group.name} ({group.rule})'
    required = '' if wanted.minimum == wanted.count else f', and at least {wanted.minimum} are wanted'
    return TooFew(f'there is room for {len(taken)} of {wanted.count}{rule}{required}', taken)


def why_none(offer: Offer, choice: Choice, alive: Collection[str], group: Group | None) -> str:
    """Return why there is no candidate, in one sentence."""
    if group is not None and any(compute in alive for allocations in offer.candidates for compute in allocations):
        return f'there is room, but not where group {group.name} allows it ({group.rule})'
    if choice.skipped:
        return 'placement names computes, but none of them is alive'
    if not alive:
        return 'no compute is alive: is ecompute running anywhere?'
    if any(sum(provider in alive for provider in allocations) > 1 for allocations in offer.candidates):
        problem = 'placement names only places that are parts of two computes, of which one shares with the other'
        return f'{problem}, and a guest has one: take the trait {SHARES} off that one'
    if offer.candidates:  # of another cloud, or computes that etcd does not know
        return 'placement names providers, and none of them is a living compute'
    return 'placement names no provider with that much free and all that is required'


def _with(group: Group | None, held: Mapping[str, Candidate]) -> Group | None:
    return group and group.with_members({instance: candidate.compute for instance, candidate in held.items()})


def _providers(candidate: Candidate) -> tuple[str, ...]:
    return tuple(sorted(candidate.allocations))


def _is_undecided(group: Group | None) -> bool:
    """True for a strict affinity group without a compute."""
    return group is not None and group.strict and group.policy == AFFINITY and not group.on


def check_complete(allocations: Allocations) -> None:
    """Raise UsageError if these allocations lack what a guest needs."""
    lacking = missing(total(allocations))
    if lacking:
        raise UsageError(f'the query asks for no {", ".join(lacking)}: a guest needs VCPU, MEMORY_MB and DISK_GB')


@dataclass(frozen=True)
class RankedCompute:
    """A compute to try; `weight` None: not weighed. `amounts` and `rooms` are by class."""

    compute: str
    hostname: str | None
    weight: float | None
    asked: Mapping[str, int]
    rooms: Mapping[str, Room]
    instances: int


def plan(
    store: Store, backend: Future[tuple[Placement, Offer]], wanted: SetOrder, rng: random.Random
) -> list[RankedCompute]:
    """Return the computes in the order of trying; errors as Placer.place() and read_terms()."""
    terms = terms_of(store, wanted, wanted.instances)
    from ecomp.scheduler.looking.hosts import computes  # not for a claim

    known_computes = computes(store)
    living = known_computes.living
    _, offer = backend.result()
    choice = choose(offer, living, wanted.weigh, rng, terms.group)
    choice = choice._replace(skipped=[provider for provider in choice.skipped if provider in known_computes.remembered])
    count = goal(choice.tries, terms, wanted)
    placed = distribute(choice.tries, offer.rooms, count, wanted.weigh, rng, terms.group)
    if not placed:
        raise NoCapacity(why_none(offer, choice, living, terms.group))
    if len(placed) < wanted.minimum:
        raise too_few(wanted, terms.group, placed)
    return [
        RankedCompute(
            *(
                candidate.compute,
                known_computes.host(candidate.compute),
                candidate.weight,
                candidate.allocations[candidate.compute],
            ),
            offer.rooms.get(candidate.compute, {}),
            sum(other is candidate for other in placed),
        )
        for candidate in choice.tries
    ]


# Computes whose presence is read, in one round trip.
READ = 16
# Computes of the sample about which placement is queried, at most.
ASKED = 3
# After this many wrong hints (not offered, or taken concurrently) placement is queried about all computes.
VAIN = 2

# Hints are hundredths, rounded up: the free share may be overstated by this much.
ROUNDED = 0.02


@dataclass
class Few:
    """Claims for one instance on a sampled compute; `fitting` have room by their hints."""

    claimer: Claimer
    wanted: SetOrder
    rng: random.Random
    tried: list[str]
    of: int = 0

    def place(self, store: Store, terms: Terms, large: int) -> dict[str, Candidate]:
        """Claim the instance on a sampled compute; {} if placement has to be queried about all.

        Sampling needs one instance without a group, a query of amounts alone and more than `min_cluster_size` computes.
        Raises OverQuota, UsageError, and the errors of etcd, placement and the claim.
        """
        amounts = plain(self.wanted.query or '', self.wanted.count, self.wanted.weigh)
        if amounts is None or terms.group is not None:
            return {}
        start = keys.compute(f'{self.rng.getrandbits(32):08x}')  # the first 8 digits of a uuid
        entries, cluster_size = store.around(keys.COMPUTES, start, READ)
        if cluster_size <= large:
            return {}
        from ecomp.model.host import fits, living_in, share_left  # for large clusters only

        # Another key's name cannot be a provider, and would become a part of the query.
        alive = [entry for entry in entries if entry.lease and keys.is_uuid(keys.last(entry.key))]
        hints = {keys.last(entry.key): living_in(entry.value).room for entry in alive}
        shares = {compute: share_left(hint, amounts) for compute, hint in hints.items() if hint and fits(hint, amounts)}
        self.of = len(shares)
        return self._claim(shares, terms)

    def _claim(self, lefts: Mapping[str, float], terms: Terms) -> dict[str, Candidate]:
        """Try the best sampled computes, and at most MAX_QUERIES of them."""
        weigh = self.wanted.weigh
        ranked = self.rng.sample(sorted(lefts), len(lefts))
        if weigh != RANDOM:
            ranked.sort(key=lambda compute: -_weight(lefts[compute], weigh))
        offered: list[Candidate] = []
        for index, compute in enumerate(ranked[:ASKED]):
            offered += self._offered(compute)
            offered.sort(key=lambda each: -(each.weight or 0))
            # It has less room than its hint: the next compute may be better.
            hinted = [_weight(lefts[other], weigh) for other in ranked[index + 1 : ASKED]]
            is_best = offered and not (hinted and weigh != RANDOM and hinted[0] - ROUNDED > (offered[0].weight or 0))
            if is_best and (claimed := self._claimed(offered.pop(0), terms)):
                return claimed
            if index + 1 - len(offered) >= VAIN:
                break
        return next(filter(None, (self._claimed(candidate, terms) for candidate in offered)), {})

    def _offered(self, compute: str) -> Sequence[Candidate]:
        """Query placement about one compute; empty if it is not offered."""
        offer = candidates(self.claimer.placement, f'{self.wanted.query}&in_tree={compute}')
        return choose(offer, [compute], self.wanted.weigh, self.rng).tries

    def _claimed(self, candidate: Candidate, terms: Terms) -> dict[str, Candidate]:
        goal([candidate], terms, self.wanted)  # OverQuota, UsageError
        instance = self.wanted.instance
        self.tried += [instance] if instance not in self.tried else []
        return dict.fromkeys(self.claimer.claim_what_fits({instance: candidate}), candidate)


def plain(query: str, count: int, weigh: str) -> Resources | None:
    """Return the amounts of a query that sampled computes can answer; None for any other."""
    return amounts_alone(query) if count == 1 and weigh != FIRST else None


def _weight(left: float, weigh: str) -> float:
    return 1 - left if weigh == PACK else left
