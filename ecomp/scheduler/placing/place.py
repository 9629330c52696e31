"""Claim a place for each instance of a set, within the limits of its group and its project's quota, or plan it only.

Of many concurrent commands hardly two claim the same place: the first places are left to those that began earlier.
etcd is asked for the attempts in flight, and placement only after that, so every earlier attempt is counted, or it is
finished and placement does not offer what it holds. An attempt that is counted, and claims before placement answers,
is allowed for twice: one place stays free that could have been used.

In a large cluster Few looks at a few living computes for one plain instance, in place of all: placement's answer
about everybody takes as long as there are computes, and that about one is as short anywhere. A handful of the living
is read, from a random one on, and placement is asked about the one that says it suits best, then about the next ones.
So a hint decides who is asked about, and placement who has room; what no few have is sought among all. Who follows a
gap between two uuids is read more often than others, and is fuller than these, so it is rarely the best of those read
with it.
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

SCARCE = 64
"""With fewer places left behind ours, they may have been taken since placement was asked."""
LOOKS = 8
"""How often placement is asked again while there may be no place left for us and none of those ahead gets on: one that
was killed is ahead for a minute."""
PAUSE = 0.1
"""Seconds before each of these looks, at most, and half of it at least."""
MOST = 300
"""Places that are left to others at most: they are reckoned one by one."""


class Contention:
    """Our place among those who place instances now.

    `read` says how many instances are being placed by those who began before us, and by those who began after us.
    """

    def __init__(self, read: Callable[[], tuple[int, int]], ask: Callable[[], Offer], rng: random.Random) -> None:
        self._read, self._ask, self._rng = read, ask, rng
        self._fresh, self._looks, self._fewest = False, LOOKS, MOST
        ahead, self._behind = read()
        self.ahead = min(ahead, MOST)

    @property
    def is_alone(self) -> bool:
        """Whether nobody else is placing instances."""
        return self.ahead + self._behind == 0

    def look(self) -> Offer:
        """Ask placement for the candidates anew."""
        ahead, self._behind = self._read()
        self.ahead = min(ahead, MOST)
        self._fresh = True
        return self._ask()

    def should_look(self, spare: int) -> bool:
        """Whether to look before claiming, when so many places are left behind those ahead and ours; it may wait."""
        if not self._fresh:  # placement was asked before anybody knew of us
            return spare < SCARCE and not self.is_alone
        if spare >= 0 or not self.ahead:
            return False
        self._looks = LOOKS if self.ahead < self._fewest else self._looks - 1
        self._fewest = min(self.ahead, self._fewest)
        if self._looks:
            time.sleep(self._rng.uniform(PAUSE / 2, PAUSE))
        return self._looks > 0


log = logging.getLogger(__name__)

REFUSALS = 2
"""Refusals of a claim after which a place is left out: full it is not offered, and is it too busy, another one may do.
A compute with providers of its own below it (of GPUs, say) is several places, of which one may be taken while others
are free."""

NAMED = 20
"""Computes that are called by their names in a log, at most."""


@dataclass
class Placer:
    """Claims for one request. What may hold a claim, however this ends, is in `tried`.

    A claim that turns out to be in the wrong place is left until it is moved, or the request has ended: released and
    claimed anew, a late release of somebody else's could meet its generation once more (rule 3).
    `look_again` asks placement once more who could; `line` says who else is at it, see Contention; `is_ours` whether a
    provider that is not `alive` is a compute that is away.
    `of`: how many computes could have taken one, when that was asked first. `blocked` are instances that are not to be
    placed, {instance: compute}: another attempt claimed for them there.
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
        """The candidate that each instance has claimed, in order, with those `placed` before: the minimum at least.

        Errors: NoCapacity (TooFew and OverQuota are such), UsageError, those of the claim.
        """
        wanted, held = self.wanted, dict(placed)
        group, refusals = _with(terms.group, held), Counter[tuple[str, ...]]()
        line = Contention(self.line, self.look_again, self.rng)
        batch: list[Candidate] = []
        while True:
            choice = choose(offer, self.alive, wanted.weigh, self.rng, group)
            if choice.skipped:  # others in the same placement, of a cloud beside this one, are nobody's business here
                choice = choice._replace(skipped=[each for each in choice.skipped if self.is_ours(each)])
            for provider in choice.skipped[:NAMED]:
                log.warning('compute %s is not alive: skipped', self.claimer.called(provider))
            if len(choice.skipped) > NAMED:
                log.warning('%d more computes are not alive: skipped', len(choice.skipped) - NAMED)
            candidates = [each for each in choice.tries if refusals[_providers(each)] < REFUSALS]
            self.of = max(len({each.compute for each in candidates}), self.of, 1)
            most = wanted.count - len(self.blocked)
            lacking = min(goal([*candidates, *held.values()], terms, wanted), most) - len(held)
            if lacking <= 0:
                break
            batch = distribute(candidates, offer.rooms, lacking, wanted.weigh, self.rng, group)
            if not batch or len(held) + len(batch) < wanted.minimum:
                break
            if group is None and not line.is_alone:  # where a group's members may be is not for others' sake
                found = self._behind(line, candidates, offer.rooms, batch)
                if found is None:
                    offer = line.look()
                    continue
                batch = found
            left = [instance for instance in wanted.instances if instance not in held and instance not in self.blocked]
            asked = dict(zip(left, batch, strict=False))
            self.tried += [instance for instance in asked if instance not in self.tried]
            claimed = self.claimer.claim_what_fits(asked)
            held |= {instance: asked[instance] for instance in claimed}
            group = _with(terms.group, held)
            if len(claimed) == len(asked):
                break
            # Somebody was faster there, so what placement said is not so any more.
            refusals.update({_providers(each) for instance, each in asked.items() if instance not in claimed})
            if len(held) < wanted.minimum and _is_undecided(terms.group):
                # All of them share one compute: if not this, then another.
                held, group = {}, terms.group
            offer = line.look()
        if len(held) < wanted.minimum:
            raise self._refusal(offer, choice, terms, [*held.values(), *batch])
        return {instance: held[instance] for instance in wanted.instances if instance in held}

    def take_over(self, left: Mapping[str, Candidate]) -> dict[str, Candidate]:
        """Place these instances where an earlier attempt claimed for them; return those that are placed.

        The claim stays the earlier attempt's: this one neither moves nor releases it (rule 13), for after a restore of
        etcd the instance may be running on it.
        """
        self.tried += [instance for instance in left if instance not in self.tried]
        self.claimer.foreign.update(left.keys() - self.claimer.movable)
        return {instance: left[instance] for instance in self.claimer.claim_what_fits(left)} if left else {}

    def _behind(
        self, line: Contention, candidates: Sequence[Candidate], rooms: Rooms, batch: list[Candidate]
    ) -> list[Candidate] | None:
        """What those who began before us will hardly take, in place of the batch; None: ask placement once more."""
        weigh, lacking = self.wanted.weigh, len(batch)
        # Not shuffled: each reckons what the others take in the same order.
        alike = candidates if weigh == FIRST else sorted(candidates, key=lambda each: (each.compute, _providers(each)))
        places = distribute(alike, rooms, line.ahead + lacking + SCARCE, weigh, self.rng)
        spare = len(places) - line.ahead - lacking
        if line.should_look(spare):
            return None
        if weigh == SPREAD and lacking == 1 and spare >= SCARCE:
            # Shuffled: of many equals others hardly take ours, also those whom we do not know of. Sets would meet on
            # some compute all the same, where placement lets one wait for the other.
            places = distribute(candidates, rooms, line.ahead + 1, weigh, self.rng)
        if spare >= 0:
            return places[line.ahead : line.ahead + lacking]
        return [self.rng.choice(places)] if lacking == 1 else batch

    def room(self, offer: Offer, terms: Terms) -> int:
        """How many of those wanted there is room for."""
        wanted = self.wanted
        choice = choose(offer, self.alive, wanted.weigh, self.rng, terms.group)
        return len(distribute(choice.tries, offer.rooms, wanted.count, wanted.weigh, self.rng, terms.group))

    def _refusal(self, offer: Offer, choice: Choice, terms: Terms, taken: list[Candidate]) -> NoCapacity:
        if self.wanted.count > 1 and taken:
            return too_few(self.wanted, terms.group, taken)
        if self.tried and (terms.group is None or choice.tries):
            return NoCapacity('every candidate was taken meanwhile')
        return NoCapacity(why_none(offer, choice, self.alive, terms.group))


def goal(candidates: Sequence[Candidate], terms: Terms, wanted: SetOrder) -> int:
    """How many to place: as many as the quota allows. OverQuota; UsageError: no guest can be made of the candidates."""
    for candidate in candidates:
        check_complete(candidate.allocations)
    if not candidates:
        return wanted.count
    return terms.room(total(candidates[0].allocations), wanted.count, wanted.minimum)


def too_few(wanted: SetOrder, group: Group | None, taken: Sequence[Candidate]) -> TooFew:
    """The refusal of a set, of which there is room for those `taken` alone."""
    rule = '' if group is None else f' in group {group.name} ({group.rule})'
    least = '' if wanted.minimum == wanted.count else f', and at least {wanted.minimum} are wanted'
    return TooFew(f'there is room for {len(taken)} of {wanted.count}{rule}{least}', taken)


def why_none(offer: Offer, choice: Choice, alive: Collection[str], group: Group | None) -> str:
    """Why there is nothing to try, in one sentence."""
    if group is not None and any(compute in alive for each in offer.candidates for compute in each):
        return f'there is room, but not where group {group.name} allows it ({group.rule})'
    if choice.skipped:
        return 'placement names computes, but none of them is alive'
    if not alive:
        return 'no compute is alive: is ecompute running anywhere?'
    if any(sum(provider in alive for provider in each) > 1 for each in offer.candidates):
        told = 'placement names only places that are parts of two computes, of which one shares with the other'
        return f'{told}, and a guest has one: take the trait {SHARES} off that one'
    if offer.candidates:  # another cloud's nodes, or computes that etcd has forgotten
        return 'placement names providers, and none of them is a living compute'
    return 'placement names no provider with that much free and all that is required'


def _with(group: Group | None, held: Mapping[str, Candidate]) -> Group | None:
    return group and group.with_members({instance: each.compute for instance, each in held.items()})


def _providers(candidate: Candidate) -> tuple[str, ...]:
    return tuple(sorted(candidate.allocations))


def _is_undecided(group: Group | None) -> bool:
    """True for a group that is to share one compute, and has none yet."""
    return group is not None and group.strict and group.policy == AFFINITY and not group.on


def check_complete(allocations: Allocations) -> None:
    """UsageError where these have not all that a guest needs."""
    lacking = missing(total(allocations))
    if lacking:
        raise UsageError(f'the query asks for no {", ".join(lacking)}: a guest needs VCPU, MEMORY_MB and DISK_GB')


@dataclass(frozen=True)
class RankedCompute:
    """A compute that would be tried. `asked` is what one would get there, `rooms` what it has, both by class.

    `weight` is None where there is no reason to prefer any; `instances` is how many would be placed there.
    """

    compute: str
    hostname: str | None
    weight: float | None
    asked: Mapping[str, int]
    rooms: Mapping[str, Room]
    instances: int


def plan(
    store: Store, backend: Future[tuple[Placement, Offer]], wanted: SetOrder, rng: random.Random
) -> list[RankedCompute]:
    """The computes in the order in which they would be tried.

    Errors: NoCapacity (TooFew and OverQuota are such); UsageError (no guest can be made of that), and Conflict of the
    group.
    """
    terms = terms_of(store, wanted, wanted.instances)
    from ecomp.scheduler.looking.hosts import computes  # a claim does without

    known = computes(store)
    there = known.living
    _, offer = backend.result()
    choice = choose(offer, there, wanted.weigh, rng, terms.group)
    choice = choice._replace(skipped=[each for each in choice.skipped if each in known.remembered])
    count = goal(choice.tries, terms, wanted)
    taken = distribute(choice.tries, offer.rooms, count, wanted.weigh, rng, terms.group)
    if not taken:
        raise NoCapacity(why_none(offer, choice, there, terms.group))
    if len(taken) < wanted.minimum:
        raise too_few(wanted, terms.group, taken)
    return [
        RankedCompute(
            *(each.compute, known.host(each.compute), each.weight, each.allocations[each.compute]),
            offer.rooms.get(each.compute, {}),
            sum(other is each for other in taken),
        )
        for each in choice.tries
    ]


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
        from ecomp.model.host import fits, living_in, share_left  # in a large cluster alone

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
