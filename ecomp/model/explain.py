"""Why a provider cannot give what a query asks for, and what would change that. Pure.

Placement's own rules (openstack-placement 16, objects/research_context.py) for providers that stand alone: neither
nested nor near one that shares. An amount has room if used + amount <= (total - reserved) * allocation_ratio; it has to
be from min_unit to max_unit, and a multiple of step_size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ecomp.model.allocation import LARGEST, NEEDED, Resources
from ecomp.model.group import Group
from ecomp.model.query import Amount, Constraint, Has, HasNot
from ecomp.model.status import DISABLED


@dataclass(frozen=True)
class Inventory:
    """One class of a provider, and how much of it is used."""

    total: int
    reserved: int = 0
    allocation_ratio: float = 1.0
    min_unit: int = 1
    max_unit: int = LARGEST
    step_size: int = 1
    used: int = 0

    @property
    def capacity(self) -> int:
        """What can be given in all."""
        return int((self.total - self.reserved) * self.allocation_ratio)

    @property
    def free(self) -> int:
        """What can still be given."""
        return max(self.capacity - self.used, 0)

    def nearest(self, amount: int, room: int) -> int | None:
        """The amount nearest to this one that may be asked for if there is so much room; None if none may."""
        least, most = self.min_unit, min(self.max_unit, room)
        below = min(amount, most) // self.step_size * self.step_size
        above = -(-max(amount, least) // self.step_size) * self.step_size
        possible = [each for each in (below, above) if max(least, 1) <= each <= most]
        return min(possible, key=lambda each: abs(each - amount), default=None)


@dataclass(frozen=True)
class Provider:
    """A resource provider. `alone`: it has no parent and no children."""

    uuid: str
    inventories: Mapping[str, Inventory] = field(default_factory=dict)
    traits: Collection[str] = ()
    aggregates: Collection[str] = ()
    alone: bool = True

    @property
    def is_closed(self) -> bool:
        """True if all its VCPU is reserved: its ecompute stopped in good order."""
        have = self.inventories.get('VCPU')
        return have is not None and have.reserved >= have.total

    def less(self, given: Iterable[Resources]) -> Provider:
        """The provider, with this given away, too."""
        now = dict(self.inventories)
        for resources in given:
            for name, amount in resources.items():
                if name in now:
                    now[name] = replace(now[name], used=now[name].used + amount)
        return replace(self, inventories=now)

    def what(self, key: str) -> Collection[str]:
        """What it has of that which a parameter of a query is about."""
        return {'member_of': self.aggregates, 'in_tree': (self.uuid,)}.get(key, self.traits)


@dataclass(frozen=True)
class In:
    """In this group: ours, not placement's, and so no part of a query."""

    group: str

    def __str__(self) -> str:
        return f'--group {self.group}'


@dataclass(frozen=True)
class Cure:
    """What makes one constraint hold: `instead` in its place (None: without it), and to free so much first."""

    constraint: Constraint | In
    instead: Constraint | None
    freed: int = 0


@dataclass(frozen=True)
class Failure:
    """A constraint that does not hold; `shortage` is from 0 (all but fulfilled) to 1; `cure` None: there is none."""

    constraint: Constraint | In
    why: str
    shortage: float
    cure: Cure | None

    @property
    def is_disabled(self) -> bool:
        """True if it is that the provider is disabled, which no change of the query helps."""
        return _is_enabled(self.constraint)


@dataclass(frozen=True)
class Miss:
    """A provider with every constraint that does not hold there; none: it can give what is asked for."""

    provider: str
    failures: tuple[Failure, ...]

    @property
    def fits(self) -> bool:
        """True if placement would name it."""
        return not self.failures

    @property
    def cures(self) -> tuple[Cure, ...] | None:
        """What would have to be changed, all of it; None if no change helps."""
        found = tuple(each.cure for each in self.failures if each.cure is not None)
        return found if len(found) == len(self.failures) else None


def unexplained(query: Iterable[Constraint], provider: Provider, sharing: Iterable[Provider]) -> str | None:
    """Why a provider is beyond these rules, as the end of a sentence; None if it is not.

    `sharing` are those with the trait MISC_SHARES_VIA_AGGREGATE.
    """
    if not provider.alone:
        return 'its resource providers are nested'
    asked = {each.name for each in query if isinstance(each, Amount)}
    for each in sharing:
        if each.uuid == provider.uuid:
            return 'it shares with others'
        near = set(each.aggregates) & set(provider.aggregates)
        if near and asked & each.inventories.keys():
            return f'provider {each.uuid} shares with it'
    return None


def miss(query: Sequence[Constraint], provider: Provider) -> Miss:
    """Every constraint that fails on a provider which unexplained() has nothing against."""
    # A guest cannot be made without these: the class that is left out is never the last one.
    may_drop = any(isinstance(each, Amount) and each.name in NEEDED for each in query)
    found = (_failure(each, provider, may_drop) for each in query)
    failures = (each for each in found if each is not None)
    return Miss(provider.uuid, tuple(sorted(failures, key=lambda each: not each.is_disabled)))


def apart(found: Miss, group: Group | None) -> Miss:
    """The same, with what the group of the instance says of this provider."""
    why = None if group is None else group.excludes(found.provider)
    if group is None or why is None:
        return found
    constraint = In(group.name)
    return Miss(found.provider, (*found.failures, Failure(constraint, why, 1.0, Cure(constraint, None))))


def nearest(misses: Iterable[Miss]) -> list[Miss]:
    """Those with the fewest failing constraints first, and of these the ones that fall short by least."""
    return sorted(misses, key=lambda each: (len(each.failures), sum(failure.shortage for failure in each.failures)))


def smallest(misses: Iterable[Miss]) -> Miss | None:
    """The one that the smallest change makes fit: one of the query alone before one that has to free something."""
    curable = [each for each in nearest(misses) if each.cures]
    by_query = (each for each in curable if not any(cure.freed for cure in each.cures or ()))
    return next(by_query, next(iter(curable), None))


def changed(query: Iterable[Constraint], cures: Iterable[Cure]) -> tuple[Constraint, ...]:
    """The query with these changes made."""
    instead: dict[Constraint | In, Constraint | None] = {each.constraint: each.instead for each in cures}
    now = (instead.get(each, each) for each in query)
    return tuple(each for each in now if each is not None)


def in_words(cures: Sequence[Cure], host: str) -> str:
    """What is to be done, in one sentence: free 1 VCPU on hv2, ask for DISK_GB:10, without required=CUSTOM_FAST."""
    freed = [f'{each.freed} {_name(each.constraint)}' for each in cures if each.freed]
    asked = [str(each.instead) for each in cures if each.instead not in (None, each.constraint)]
    without = [_name(each.constraint) for each in cures if each.instead is None]
    parts = []
    if freed:
        parts.append(f'free {" and ".join(freed)} on {host}')
    if asked:
        parts.append(f'ask for {" and ".join(asked)}')
    if without:
        parts.append(f'{"" if asked else "ask "}without {" and ".join(without)}')
    return ', '.join(parts)


def _name(constraint: Constraint | In) -> str:
    return constraint.name if isinstance(constraint, Amount) else str(constraint)


def _failure(constraint: Constraint, provider: Provider, may_drop: bool) -> Failure | None:
    if isinstance(constraint, Amount):
        return _short(constraint, provider.inventories.get(constraint.name), may_drop)
    there = provider.what(constraint.key)
    if isinstance(constraint, HasNot):
        holds = constraint.name not in there
    else:
        holds = any(name in there for name in constraint.any_of)
    if holds:
        return None
    # Asked without it, a query is sent with it all the same.
    cure = None if _is_enabled(constraint) else Cure(constraint, None)
    return Failure(constraint, _lack(constraint), 1.0, cure)


def _is_enabled(constraint: Constraint | In) -> bool:
    """Whether it is what a disabled compute fails."""
    return isinstance(constraint, HasNot) and constraint.name == DISABLED


def _lack(constraint: Has | HasNot) -> str:
    if _is_enabled(constraint):
        return 'is disabled'
    if isinstance(constraint, HasNot):
        return f'{"is in aggregate" if constraint.key == "member_of" else "has"} {constraint.name}'
    names = ', '.join(constraint.any_of)
    several = len(constraint.any_of) > 1
    if constraint.key == 'in_tree':
        return f'is not provider {names}'
    if constraint.key == 'member_of':
        return f'is in none of the aggregates {names}' if several else f'is not in aggregate {names}'
    return f'lacks each of {names}' if several else f'lacks {names}'


def _short(asked: Amount, have: Inventory | None, may_drop: bool) -> Failure | None:
    name, amount = asked.name, asked.amount
    without = Cure(asked, None) if may_drop and name not in NEEDED else None
    if have is None:
        return Failure(asked, f'has no {name}', 1.0, without)
    why = []
    if have.used + amount > have.capacity:
        there = f'free {have.free} of {have.capacity}'
        if have.used > have.capacity:
            there = f'used {have.used} of {have.capacity}'
        why.append(f'{name} short by {have.used + amount - have.capacity} ({there})')
    if amount > have.max_unit:
        why.append(f'{name}:{amount} is more than one may have (max_unit {have.max_unit})')
    if amount < have.min_unit:
        why.append(f'{name}:{amount} is less than one has to have (min_unit {have.min_unit})')
    if amount % have.step_size:
        why.append(f'{name}:{amount} is not a multiple of {have.step_size} (step_size)')
    if not why:
        return None
    possible = have.nearest(amount, have.free)
    shortage = 1.0 if possible is None else min(abs(amount - possible) / amount, 1.0)
    return Failure(asked, '; '.join(why), shortage, _cure(asked, have, possible, without))


def _cure(asked: Amount, have: Inventory, possible: int | None, without: Cure | None) -> Cure | None:
    if possible is not None:
        return Cure(asked, Amount(asked.name, possible))
    if without is not None:
        return without
    emptied = have.nearest(asked.amount, have.capacity)
    if emptied is None:
        return None
    return Cure(asked, Amount(asked.name, emptied), have.used + emptied - have.capacity)
