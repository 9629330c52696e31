"""Plan where the guests of dead hosts would go, as the scheduler would place them. Pure.

The plans for a thousand hosts share placement's answers: a plan keeps only the room that its own guests take. It looks
at as many computes as it has guests, the best ones, and at those that it has used: no others can be chosen.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from ecomp.model.allocation import Room, sum_allocations
from ecomp.model.choose import (
    SPREAD,
    STRATEGIES,
    Candidate,
    Choice,
    Offer,
    add_usage,
    choose,
    describe_room,
    distribute,
    explain_no_candidate,
)
from ecomp.model.group import AFFINITY, Group, Membership
from ecomp.model.order import InvalidRequest, Request
from ecomp.model.query import list_trees, read_limit


class Guest(NamedTuple):
    """A guest on a compute: its request, which is no tombstone."""

    compute: str
    request: Request | InvalidRequest


class Move(NamedTuple):
    """The new place of a guest. If `candidate` is None, `reason` says why; if not `is_known`, there may be a place."""

    guest: Guest
    candidate: Candidate | None
    reason: str = ''
    is_known: bool = True


class Lot(NamedTuple):
    """What instances that are placed together have in common; `instances` are those of a stack."""

    query: str
    membership: Membership | None
    weigh: str
    instances: tuple[str, ...] = ()


# The candidates of a query by compute, the best compute first; each with its position among all of them.
_Ranking = Mapping[str, Sequence[tuple[int, Candidate]]]
_Lots = dict[Lot, list[Guest]]


@dataclass
class MovePlanner:
    """Chooses new places by placement's answers. A query is in `offers` or, with placement's reason, in `refusals`.

    Queries that list_trees() restricts to the guest's own compute may be in neither. `groups` have all their members.
    """

    offers: Mapping[str, Offer]
    refusals: Mapping[str, str]
    groups: Mapping[str, Group]
    alive: Collection[str]
    rng: random.Random
    _rankings: dict[tuple[str, str], _Ranking] = field(default_factory=dict)

    def plan_moves(self, guests: Iterable[Guest], dead: Collection[str]) -> list[Move]:
        """Return where each guest would go if these computes, with all guests on them, were dead.

        The choice is greedy: those in groups first, then larger ones. Of a group that has to be on one compute all
        guests move, or none. Quotas do not matter: they count a guest wherever it is.
        """
        plan, moves, lots, units = _Plan(self, frozenset(dead)), list[Move](), _Lots(), dict[str | Lot, _Lots]()
        for guest in guests:
            request = guest.request
            if isinstance(request, InvalidRequest) or not request.query:
                reason = request.reason if isinstance(request, InvalidRequest) else 'its request has no query'
                moves.append(Move(guest, None, f'not known: {reason}', is_known=False))
            else:
                # A compute that took a request from a queue did not weigh.
                weigh = request.why.weigh if request.why and request.why.weigh in STRATEGIES else SPREAD
                lots.setdefault(Lot(request.query, request.group, weigh), []).append(guest)
        for lot in sorted(lots, key=self._make_sort_key):
            group = plan.get_group(lot)
            if refusal := self._refuse(lot, plan.dead):
                moves += [Move(guest, None, *refusal) for guest in lots[lot]]
            else:
                units.setdefault(group.name if group and group.is_undecided else lot, {})[lot] = lots[lot]
        return [*moves, *(move for unit in units.values() for move in plan.place(unit))]

    def rank(self, lot: Lot) -> _Ranking:
        """Return the candidates for a lot without its group, as they are now; made once for all plans."""
        key = lot.query, lot.weigh
        if key not in self._rankings:
            ranking: dict[str, list[tuple[int, Candidate]]] = {}
            ordered = choose(self.offers[lot.query], self.alive, lot.weigh, self.rng).candidates
            for position, candidate in enumerate(ordered):
                ranking.setdefault(candidate.compute, []).append((position, candidate))
            self._rankings[key] = ranking
        return self._rankings[key]

    @cached_property
    def rooms(self) -> Mapping[str, Mapping[str, Room]]:
        """The room of each provider in any answer."""
        return {provider: room for offer in self.offers.values() for provider, room in offer.rooms.items()}

    def _refuse(self, lot: Lot, dead: frozenset[str]) -> tuple[str, bool] | None:
        """Return why the lot cannot be placed at all, and whether that is known; None if it may be."""
        if trees := dead.intersection(list_trees(lot.query)):
            return f'its query allows only {min(trees)} (in_tree=, or --on)', True
        if lot.query in self.refusals:
            return self.refusals[lot.query], True
        limit = read_limit(lot.query) if 'limit' in lot.query else None
        if limit and len(self.offers[lot.query].candidates) >= int(limit):
            return f'not known: limit={limit} in its query hides candidates', False
        return None

    def _make_sort_key(self, lot: Lot) -> tuple[bool, bool, list[int]]:
        """Return the key of a greedy choice: groups of one compute first, then other groups, then large amounts."""
        offer = self.offers.get(lot.query)
        amounts = sum_allocations(offer.candidates[0]).values() if offer and offer.candidates else ()
        group = lot.membership
        return group is None, group is None or group.policy != AFFINITY, sorted(-amount for amount in amounts)


@dataclass(frozen=True)
class _Plan:
    """The plan for some dead computes: the room and the groups that it has changed."""

    planner: MovePlanner
    dead: frozenset[str]
    used: dict[str, dict[str, Room]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)

    def get_group(self, lot: Lot) -> Group | None:
        """Return the group of a lot without its dead members."""
        if lot.membership is None:
            return None
        name, policy, strict = lot.membership
        if name not in self.groups:
            group = self.planner.groups.get(name, Group(name, policy or '', bool(strict)))
            living = {each: compute for each, compute in group.members.items() if compute not in self.dead}
            self.groups[name] = replace(group, members=living)
        return self.groups[name]

    def place(self, lots: _Lots) -> list[Move]:
        """Place as many guests of one lot as possible; of several, which need one compute, all guests or none."""
        first, guests = next(iter(lots)), [guest for members in lots.values() for guest in members]
        group, reason, best, best_used = self.get_group(first), '', list[tuple[Guest, Candidate]](), self.used
        is_united = group is not None and group.is_undecided
        if is_united and (reason := self._find_obstacle(guests, first)):
            return [Move(guest, None, reason) for guest in guests]
        for computes in self._list_choices(first, group, len(guests)):
            pairs, used = list[tuple[Guest, Candidate]](), dict(self.used)
            for lot, members in lots.items():
                candidates = self._list_candidates(lot, computes)
                providers = (provider for candidate in candidates for provider in candidate.allocations)
                rooms = {each: used.get(each) or self.planner.rooms.get(each, {}) for each in providers}
                strategy, rng = lot.weigh, self.planner.rng
                batch = distribute(candidates, rooms, len(members), strategy, rng, None if is_united else group)
                for candidate in batch:
                    used |= {each: dict(used.get(each) or rooms[each]) for each in candidate.allocations}
                    add_usage(candidate.allocations, used)
                pairs += zip(members, batch, strict=False)
            if len(pairs) > len(best):
                best, best_used = pairs, used
            if len(best) == len(guests):
                break
        else:
            reason = self._explain(first, group, len(best), len(guests))
            if is_united:
                return [Move(guest, None, reason) for guest in guests]
        self.used.update(best_used)
        if group is not None:
            places = {guest.request.instance: candidate.compute for guest, candidate in best}
            self.groups[group.name] = group.with_members(places)
        return [*(Move(*pair) for pair in best), *(Move(guest, None, reason) for guest in guests[len(best) :])]

    def _find_obstacle(self, guests: Sequence[Guest], lot: Lot) -> str:
        """Return why these guests of a group of one compute cannot leave: a member stays. '' if none does."""
        name = lot.membership.name if lot.membership else ''
        members = self.planner.groups[name].members if name in self.planner.groups else {}
        moved = {guest.request.instance for guest in guests}
        staying = [each for each, compute in members.items() if compute in self.dead and each not in moved]
        return f'group {name} has to stay together, and its member {staying[0]} does not move' if staying else ''

    def _list_choices(self, lot: Lot, group: Group | None, count: int) -> Iterator[Collection[str]]:
        """Yield sets of computes to try: each alone if all guests need the same one; else the best, and then all.

        All are needed only if some share the room of a provider, and for the last choice of a soft group.
        """
        ranking = self.planner.rank(lot)
        if group is not None and group.is_undecided:
            yield from ({compute} for compute in ranking)
            return
        members = group.member_counts if group is not None else {}
        others = (each for each in ranking if each not in self.used and each not in members and each not in self.dead)
        best = {*self.used, *islice(others, count)}
        if group is not None and group.policy == AFFINITY:
            best |= members.keys()
        for computes in (best, ranking.keys()):
            yield {each for each in computes if group is None or group.can_admit(each, members)}

    def _list_candidates(self, lot: Lot, computes: Collection[str]) -> list[Candidate]:
        """Return the candidates for a lot on these computes, in the order of rank()."""
        ranking = self.planner.rank(lot)
        pairs = [pair for compute in computes for pair in ranking.get(compute, ())]
        living = [pair for pair in pairs if self.dead.isdisjoint(pair[1].allocations)]
        return [candidate for _, candidate in sorted(living, key=lambda pair: pair[0])]

    def _explain(self, lot: Lot, group: Group | None, placed_count: int, count: int) -> str:
        """Return why only `placed_count` of `count` guests have a place, in the words of a refusal."""
        if placed_count:
            return describe_room(placed_count, count, group)
        ranking = self.planner.rank(lot)
        admitted = [each for each in ranking if group is None or group.can_admit(each, group.member_counts)]
        if self._list_candidates(lot, admitted):
            return 'other guests took every candidate first'
        living = set(self.planner.alive) - self.dead
        offer = self.planner.offers[lot.query]
        offer = offer._replace(candidates=[each for each in offer.candidates if self.dead.isdisjoint(each)])
        skipped = [provider for each in offer.candidates for provider in each if living.isdisjoint(each)]
        return explain_no_candidate(offer, Choice((), skipped), living, group)
