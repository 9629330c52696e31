"""What the providers have, for whoever is refused: in a few calls to placement, however many computes there are.

Placement says of all that have any of a class free what they have, in one answer. What is full of all that a guest
needs is in none: of a compute that is alive its hint says how large it is, and the rest is read one by one as far as
calls are left. With those that are left in the end the limits of one amount are read of the nearest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ecomp.errors import NotFound
from ecomp.model.allocation import Resources
from ecomp.model.computes import Living
from ecomp.model.explain import Provider, miss, nearest, unexplained
from ecomp.model.hints import Hint
from ecomp.model.inventory import Inventory
from ecomp.model.query import ENABLED, Amount, Constraint, Has, Unexplained, words
from ecomp.model.status import DISABLED
from ecomp.placement import room, traits
from ecomp.placement.allocations import candidates
from ecomp.placement.client import Placement
from ecomp.placement.providers import inventory, matching
from ecomp.placement.traits import AGGREGATES

CALLS = 5
"""Calls to placement for all that is said of a refusal. With the question that found no room that is six."""

ADVICE = 1
"""The last of them: whether the smallest change fits."""

LIMITS = ('min_unit', 'max_unit', 'step_size')
"""Of what one may ask for: in no answer about several providers."""

FIRST = ('MEMORY_MB', 'DISK_GB', 'VCPU')
"""What is asked about, the likeliest to be free first; then what else the query asks for."""


class Facts:
    """What placement has of the providers, as far as `calls` go; `asked` is what a query asks of one.

    `named` are the providers that placement offered for it a moment ago.
    """

    def __init__(
        self, placement: Placement, asked: Sequence[Constraint], named: Collection[str] = (), calls: int = CALLS
    ) -> None:
        self._placement, self._asked, self._named = placement, asked, named
        self._left = calls - 1
        self.listed = room.everyone(placement)
        self.sharing: list[Provider] = []
        self._seen: dict[str, Provider] = {}
        self._none_of: set[str] = set()
        """The classes of which every provider that is not in _seen has nothing free."""
        self._near: dict[str, frozenset[str]] = {}
        """The providers in each aggregate that matters."""
        self._amounts = [each for each in asked if isinstance(each, Amount)]
        self._others = [each for each in asked if not isinstance(each, Amount)]
        self._traits = {each for each in self._others if each.key in ('required', 'root_required')}
        self._each = 3 if self._traits else 2
        """Calls for one that is read by itself."""

    def find(
        self,
        wanted: Iterable[str],
        living: Mapping[str, Living],
        given: Mapping[str, Sequence[Resources]],
    ) -> dict[str, Provider]:
        """Those of the wanted of which it can be found out, the more important first; what is `given` counts as used.

        Errors: those of placement; Unexplained.
        """
        there = [uuid for uuid in wanted if uuid in self.listed]
        hints = {uuid: each.room for uuid, each in living.items()}
        about = [each for each in self._others if each.key == 'member_of']
        self._look_into(name for each in about for name in (each.any_of if isinstance(each, Has) else [each.name]))
        self._look_for_free(there, hints)
        found = {uuid: self._whole(self._seen[uuid]) for uuid in there if uuid in self._seen}
        found |= self._full([uuid for uuid in there if uuid not in found], hints, found)
        found |= self._read([uuid for uuid in there if uuid not in found], found)
        found = {uuid: found[uuid].less(given.get(uuid, ())) for uuid in there if uuid in found}
        return self._limited(self._undoubted(found, living), living)

    def offers(self, query: Sequence[Constraint], provider: str) -> bool:
        """Whether placement would give on a provider what a changed query asks for; False where no call is left."""
        if not self._left:
            return False
        self._left -= 1
        others = [each for each in query if isinstance(each, Amount) or each.key != 'in_tree']
        named = candidates(self._placement, words([*others, Has('in_tree', (provider,))])).candidates
        return any(provider in each for each in named)

    def _look_into(self, aggregates: Iterable[str]) -> None:
        """Who is in these aggregates."""
        for name in dict.fromkeys(aggregates):
            if name not in self._near:
                self._spend(1)
                self._near[name] = room.holding(self._placement, Has('member_of', (name,)))

    def _look_for_free(self, there: Collection[str], hints: Mapping[str, Hint | None]) -> None:
        classes = list(dict.fromkeys([*FIRST, *(each.name for each in self._amounts)]))
        sharing: frozenset[str] | None = None
        while classes and self._left > self._kept(map(self._whole, self._seen.values())):
            unseen = [uuid for uuid in there if uuid not in self._seen]
            if not unseen or len(unseen) * self._each <= self._left - ADVICE - (sharing is None):
                break  # so few are read one by one

            def having(name: str, unseen: Sequence[str] = unseen) -> int:
                return sum(_may_have(hints.get(uuid), name) for uuid in unseen)

            name = max(classes, key=having)
            classes.remove(name)
            self._left -= 1
            # A moment has passed: what has been seen counts as it was.
            self._seen = {**room.with_free(self._placement, name), **self._seen}
            self._none_of.add(name)
            sharing = self._sharing(hints) if sharing is None else sharing
        sharing = self._sharing(hints) if sharing is None else sharing
        self._look_at_sharing(sharing | {uuid for uuid, each in self._seen.items() if room.SHARES in each.traits})

    def _sharing(self, hints: Mapping[str, Hint | None]) -> frozenset[str]:
        """Those of which nothing is known yet that share with others: what hints is a compute, and none of these."""
        if not self._left or all(uuid in self._seen or hints.get(uuid) for uuid in self.listed):
            return frozenset()
        self._left -= 1
        return matching(self._placement, f'required={room.SHARES}')

    def _look_at_sharing(self, uuids: Iterable[str]) -> None:
        for uuid in sorted(uuids):
            found = self._seen.get(uuid)
            if found is None:
                self._spend(2)
                found = room.look(self._placement, uuid, True, traits=False, aggregates=False)
            if found is not None:
                self._spend(1)
                near = traits.names(self._placement, uuid, AGGREGATES)
                self._look_into(sorted(near))
                self.sharing.append(replace(found, aggregates=near))

    def _spend(self, calls: int) -> None:
        if self._left < calls:
            raise Unexplained('more aggregates matter than are looked into at once')
        self._left -= calls

    def _full(
        self, unseen: Iterable[str], hints: Mapping[str, Hint | None], found: Mapping[str, Provider]
    ) -> dict[str, Provider]:
        """The unseen that are full, with what they say they have in all: free is nothing of what was asked about."""
        if self._traits - {ENABLED}:
            return {}  # of which they say nothing
        full = {
            uuid: self._whole(Provider(uuid, {
                name: Inventory(each.capacity, used=each.capacity) for name, each in hint.items()
            }))
            for uuid in unseen if (hint := hints.get(uuid)) is not None and self._is_full(hint)
        }  # fmt: skip
        if full and self._traits and self._left > self._kept([*found.values(), *full.values()]):
            self._left -= 1
            disabled = traits.having(self._placement, DISABLED)
            full |= {uuid: replace(full[uuid], traits=[DISABLED]) for uuid in disabled.intersection(full)}
        return full

    def _is_full(self, hint: Hint) -> bool:
        """Whether nothing is free of each class that is asked for and, so far as is known, no more given than is."""
        about = [(each.name, hint[each.name].hundredths) for each in self._amounts if each.name in hint]
        return all(left == 0 or (left > 0 and name in self._none_of) for name, left in about)

    def _read(self, unseen: Iterable[str], found: Mapping[str, Provider]) -> dict[str, Provider]:
        """Those that are read one by one, as many as there are calls for."""
        unseen, more = list(unseen), dict[str, Provider]()
        spare = self._left - self._kept(found.values()) if unseen else 0
        for uuid in unseen:
            if spare < self._each:
                break
            spare, self._left = spare - self._each, self._left - self._each
            each = room.look(self._placement, uuid, True, traits=bool(self._traits), aggregates=False)
            more |= {uuid: self._whole(each)} if each is not None else {}
        return more

    def _whole(self, provider: Provider) -> Provider:
        """The provider with what else is known of it."""
        near = frozenset(name for name, there in self._near.items() if provider.uuid in there)
        listed = self.listed.get(provider.uuid)
        return replace(provider, aggregates=near, alone=listed is None or listed.alone)

    def _kept(self, found: Iterable[Provider]) -> int:
        """Calls that are kept for offers(): 0 where something is found, and no change of the query alone fits it."""
        some = False
        for each in found:
            some, cures = True, miss(self._asked, each).cures
            if cures and not any(cure.freed for cure in cures):
                return ADVICE
        return 0 if some else ADVICE

    def _undoubted(self, found: dict[str, Provider], living: Collection[str]) -> dict[str, Provider]:
        """The same, with the limits of those that have room, as it looks, and that placement does not offer.

        A person may have set them. One for which no call is left is left out.
        """

        def doubted() -> list[str]:
            rest = [each for uuid, each in found.items() if uuid in living and uuid not in self._named]
            rest = [each for each in rest if not each.is_closed and not unexplained(self._asked, each, self.sharing)]
            return [each.uuid for each in rest if miss(self._asked, each).fits]

        if len(doubted()) > self._left - ADVICE and self._left:
            self._left -= 1
            offer = candidates(self._placement, words(self._asked))
            self._named = {*self._named, *(uuid for each in offer.candidates for uuid in each)}
        for uuid in doubted():
            each = found.pop(uuid)
            if self._left > ADVICE:
                found[uuid] = self._with_limits(each)
        return found

    def _limited(self, found: dict[str, Provider], living: Collection[str]) -> dict[str, Provider]:
        """The same, with the limits of the nearest of them, as far as calls are left."""
        unread = (each for uuid, each in found.items() if uuid in living and uuid in self._seen)
        spare = self._left - self._kept(found.values())
        for each in nearest(miss(self._asked, each) for each in unread)[: max(spare, 0)] if spare else ():
            found[each.provider] = self._with_limits(found[each.provider])
        return found

    def _with_limits(self, provider: Provider) -> Provider:
        self._left -= 1
        self._seen.pop(provider.uuid, None)
        with suppress(NotFound):
            have = inventory(self._placement, provider.uuid)
            limits = {
                name: there._replace(**{part: have[name][part] for part in LIMITS if part in have.get(name, {})})
                for name, there in provider.inventories.items()
            }
            return replace(provider, inventories=limits)
        return provider


def _may_have(hint: Hint | None, name: str) -> bool:
    return hint is None or (name in hint and hint[name].hundredths > 0)
