"""Assign instances to computes: one lot or many, with their groups and earlier claims. Pure."""

from __future__ import annotations

import random
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ecomp.model.allocation import Resources, Room, sum_allocations
from ecomp.model.choose import (
    FIRST,
    SPREAD,
    Candidate,
    Offer,
    Ranking,
    add_usage,
    choose,
    describe_room,
    distribute,
    explain_no_candidate,
)
from ecomp.model.group import AFFINITY, Group, Membership

# Computes of which it matters whether they have an image, at most.
MAX_EQUAL_COMPUTES = 16
# With fewer spare places, ours may have been taken since placement was queried.
MIN_SPARE_PLACES = 64


class Lot(NamedTuple):
    """Instances that are placed alike."""

    query: str
    membership: Membership | None
    weigh: str
    instances: tuple[str, ...]
    minimum: int | None = None  # at least so many are placed, or none; None: all
    image: str = ''

    @property
    def required_count(self) -> int:
        return len(self.instances) if self.minimum is None else self.minimum

    def is_short(self, places: Collection[str]) -> bool:
        return sum(instance in places for instance in self.instances) < self.required_count


class Assignment(NamedTuple):
    """The new places, and the instances that have none."""

    candidates: Mapping[str, Candidate]
    reasons: Mapping[str, str]  # why an instance has no place, in the words of a refusal
    insufficient: Mapping[str, Candidate]  # the places of lots below their minimum
    # The least number of places left behind those of a lot and of older attempts; below 0 too few.
    spare: int


@dataclass(eq=False, repr=False)
class Planner:
    """Assigns instances by placement's answers."""

    offers: Mapping[str, Offer]  # placement's answers, by query
    groups: Mapping[str, Group]  # with all their members but those to be assigned
    alive: Collection[str]
    rng: random.Random
    # Placement's reason for each query that it refused. These have no offer.
    refusals: Mapping[str, str] = field(default_factory=dict)
    troubled: Collection[str] = ()  # they report that they cannot build, and are used only where no other has room
    # The providers that placement offers and that are not alive.
    skipped: set[str] = field(default_factory=set)
    _rankings: dict[tuple[str, str, str], Ranking] = field(default_factory=dict)

    def assign(
        self,
        lots: Sequence[Lot],
        claims: Mapping[str, Candidate] = {},
        dead: Collection[str] = (),
        ahead: int | None = None,
    ) -> Assignment:
        """Assign the instances that have no claim, as if the computes in `dead` were dead.

        Placement's answers already count the claims. A lot without a group leaves `ahead` places to the instances of
        older attempts. `ahead` is None if no other attempt is in flight.
        """
        plan = _Plan(self, frozenset(dead), claims, ahead)
        for lot in lots:
            if lot.membership is not None:
                joined = plan.get_group(lot) or self.get_group(lot.membership, dead)
                members = {each: claims[each].compute for each in lot.instances if each in claims}
                plan.groups[joined.name] = joined.with_members(members)
        units: dict[str | Lot, list[Lot]] = {}
        # Greedy: groups of one compute first, then other groups, then large amounts, for small ones fit into the gaps.
        for lot in sorted(lots, key=self._make_sort_key):
            group = plan.get_group(lot)
            units.setdefault(group.name if group and group.is_undecided else lot, []).append(lot)
        for unit in units.values():
            plan.place(unit)
        return Assignment(plan.candidates, plan.reasons, plan.insufficient, plan.spare)

    def rank(self, lot: Lot) -> Ranking:
        """Rank the candidates for a lot, regardless of its group, or return the earlier ranking."""
        key = lot.query, lot.weigh, lot.image
        if key not in self._rankings:
            choice = choose(self.offers[lot.query], self.alive, lot.weigh, self.rng, troubled=self.troubled)
            self._rankings[key] = Ranking(choice.candidates)
            self.skipped.update(choice.skipped)
        return self._rankings[key]

    def list_best(self, lot: Lot) -> list[str]:
        """Return the computes, at most MAX_EQUAL_COMPUTES, that are as good as the best one."""
        best = self.rank(lot).candidates[:MAX_EQUAL_COMPUTES]
        return list(dict.fromkeys(each.compute for each in best if each.quality == best[0].quality))

    def prefer(self, lot: Lot, computes: Collection[str]) -> None:
        """Rank these computes, which have the lot's image, before others that are as good."""
        candidates = [each._replace(has_image=each.compute in computes) for each in self.rank(lot).candidates]
        candidates.sort(key=lambda each: (each.quality, not each.has_image))
        self._rankings[lot.query, lot.weigh, lot.image] = Ranking(candidates)

    def list_candidates(self, lot: Lot, group: Group | None) -> list[Candidate]:
        """Return the candidates that the group admits: healthy ones first, then by its policy."""
        candidates = self.rank(lot).candidates
        if group is None:
            return list(candidates)
        admitted = [each for each in candidates if group.can_admit(each.compute, group.member_counts)]
        return sorted(admitted, key=lambda each: (each.is_troubled, -group.get_preference(each.compute)))

    def get_group(self, membership: Membership, dead: Collection[str] = ()) -> Group:
        """Return a group without its members on dead computes, or a new one if it does not exist."""
        name, policy, strict = membership
        group = self.groups.get(name, Group(name, policy or '', bool(strict)))
        living = {instance: compute for instance, compute in group.members.items() if compute not in dead}
        return replace(group, members=living)

    @cached_property
    def rooms(self) -> dict[str, dict[str, Room]]:
        rooms: dict[str, dict[str, Room]] = {}
        for offer in self.offers.values():
            for provider, room in offer.rooms.items():
                rooms.setdefault(provider, {}).update(room)
        return rooms

    def _make_sort_key(self, lot: Lot) -> tuple[bool, bool, list[int]]:
        candidates = self.offers[lot.query].candidates
        amounts: Resources = sum_allocations(candidates[0]) if candidates else {}
        group = self.get_group(lot.membership) if lot.membership is not None else None
        needs_one_compute = group is not None and group.strict and group.policy == AFFINITY
        return group is None, not needs_one_compute, sorted(-amount for amount in amounts.values())


@dataclass(eq=False, repr=False)
class _Plan:
    """One assignment: what it has chosen, and the room and the groups that it has changed."""

    planner: Planner
    dead: frozenset[str]
    claims: Mapping[str, Candidate]
    ahead: int | None
    candidates: dict[str, Candidate] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    insufficient: dict[str, Candidate] = field(default_factory=dict)
    spare: int = MIN_SPARE_PLACES
    # Only the room that its own instances take, so the plans for a thousand hosts share placement's answers.
    own_rooms: dict[str, dict[str, Room]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)

    def get_group(self, lot: Lot) -> Group | None:
        return self.groups.get(lot.membership.name) if lot.membership is not None else None

    def place(self, lots: Sequence[Lot]) -> None:
        """Place the lots, an undecided group's on one compute, or none if too few fit."""
        names = {lot: self._list_unclaimed(lot) for lot in lots}
        group, count = self.get_group(lots[0]), sum(map(len, names.values()))
        required = sum(lot.required_count - len(lot.instances) for lot in lots) + count
        best, best_used = dict[str, Candidate](), self.own_rooms
        is_united = group is not None and group.is_undecided
        for compute in self.planner.rank(lots[0]).positions if is_united and count else [''] * bool(count):
            chosen, used = self._choose(names, compute, group)
            if len(chosen) > len(best):
                best, best_used = chosen, used
            if len(best) == count:
                break
        if len(best) < count:
            reason = self._explain(lots[0], group, len(best), count)
            if len(best) < required:
                self.insufficient |= best
                best, best_used = {}, self.own_rooms
            self.reasons |= {each: reason for of_lot in names.values() for each in of_lot if each not in best}
        self.candidates |= best
        self.own_rooms.update(best_used)
        if group is not None:
            self.groups[group.name] = group.with_members({each: best[each].compute for each in best})

    def _list_unclaimed(self, lot: Lot) -> list[str]:
        return [each for each in lot.instances if each not in self.claims]

    def _choose(
        self, names: Mapping[Lot, Sequence[str]], compute: str, group: Group | None
    ) -> tuple[dict[str, Candidate], dict[str, dict[str, Room]]]:
        """Choose candidates, on `compute` unless it is '', and return the rooms after that, too."""
        chosen, used = dict[str, Candidate](), dict(self.own_rooms)
        rooms = ChainMap(used, self.planner.rooms)
        for lot, instances in names.items():
            ranking = self.planner.rank(lot).restrict(compute) if compute else self.planner.rank(lot)
            batch = self._distribute(lot, ranking, rooms, len(instances), group)
            for candidate in batch:
                used |= {each: dict(rooms.get(each, {})) for each in candidate.allocations}
                add_usage(candidate.allocations, used)
            chosen |= zip(instances, batch, strict=False)
        return chosen, used

    def _distribute(
        self, lot: Lot, ranking: Ranking, rooms: ChainMap[str, dict[str, Room]], count: int, group: Group | None
    ) -> list[Candidate]:
        weigh, ahead, rng = lot.weigh, self.ahead, self.planner.rng

        def choose_places(ranking: Ranking, count: int) -> list[Candidate]:
            return distribute(ranking, rooms, count, weigh, rng, group, self.dead, rooms.maps[0])

        if ahead is None or group is not None:  # a group's places are not chosen for other attempts
            return choose_places(ranking, count)
        # Not shuffled: every attempt has to simulate the others in the same order.
        fixed = sorted(ranking.candidates, key=lambda each: (*each.quality, each.compute, sorted(each.allocations)))
        places = choose_places(ranking if weigh == FIRST else Ranking(fixed), ahead + count + MIN_SPARE_PLACES)
        spare = len(places) - ahead - count
        self.spare = min(self.spare, spare)
        if weigh == SPREAD and count == 1 and spare >= MIN_SPARE_PLACES:
            # Shuffled: of many equal places, attempts hardly choose the same, even unannounced ones. Sets would still
            # meet on some compute, where placement serializes them.
            places = choose_places(ranking, ahead + 1)
        if spare >= 0:
            return places[ahead : ahead + count]
        if count == 1:
            healthy = [place for place in places if not place.is_troubled]
            return [rng.choice(healthy or places)] if places else []
        return choose_places(ranking, count)

    def _explain(self, lot: Lot, group: Group | None, placed_count: int, count: int) -> str:
        if placed_count:
            return describe_room(placed_count, count, group)
        if any(self.dead.isdisjoint(each.allocations) for each in self.planner.list_candidates(lot, group)):
            return 'other guests took all the room first'
        living = set(self.planner.alive) - self.dead
        offer = self.planner.offers[lot.query]
        offer = offer._replace(candidates=[each for each in offer.candidates if self.dead.isdisjoint(each)])
        skipped = [provider for each in offer.candidates for provider in each if living.isdisjoint(each)]
        return explain_no_candidate(offer, skipped, living, group)
