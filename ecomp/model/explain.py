"""Why a provider cannot give what a query asks for, and what would change that. Pure.

Placement's own rules (openstack-placement 16, objects/research_context.py) for providers that stand alone: neither
nested nor near one that shares. An amount has room if used + amount <= (total - reserved) * allocation_ratio; it has to
be from min_unit to max_unit, and a multiple of step_size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ecomp.model.allocation import NEEDED, Inventory, Resources, summed
from ecomp.model.group import Group
from ecomp.model.query import Amount, Constraint, Has, HasNot
from ecomp.model.status import DISABLED

ORDINALS = ('first', 'second', 'third')


@dataclass(frozen=True)
class Provider:
    """A resource provider. `alone`: it has no parent and no children. `taken_count`: of a set, counted as used."""

    uuid: str
    inventories: Mapping[str, Inventory] = field(default_factory=dict)
    traits: Collection[str] = ()
    aggregates: Collection[str] = ()
    alone: bool = True
    taken_count: int = 0

    @property
    def is_closed(self) -> bool:
        """True if all its VCPU is reserved: its ecompute stopped in good order."""
        return 'VCPU' in self.inventories and self.inventories['VCPU'].is_shut

    def less(self, given: Sequence[Resources]) -> Provider:
        """The provider with these amounts used as well."""
        more = summed(given)
        now = {name: each._replace(used=each.used + more.get(name, 0)) for name, each in self.inventories.items()}
        return replace(self, inventories=now, taken_count=len(given))

    def what(self, key: str) -> Collection[str]:
        """The provider's aggregates, tree or traits, as the parameter `key` of a query is about."""
        return {'member_of': self.aggregates, 'in_tree': (self.uuid,)}.get(key, self.traits)


@dataclass(frozen=True)
class GroupConstraint:
    """The constraint to be in this group; placement knows nothing of it, so it is no part of a query."""

    group: str

    def __str__(self) -> str:
        return f'--group {self.group}'


@dataclass(frozen=True)
class Cure:
    """What makes a constraint hold: to ask for `instead` (None: to drop it), once `freed` of its class is free."""

    constraint: Constraint | GroupConstraint
    instead: Constraint | None
    freed: int = 0


@dataclass(frozen=True)
class UnmetConstraint:
    """A constraint that fails; `shortage` is from 0, almost met, to 1; `cure` None means that nothing helps."""

    constraint: Constraint | GroupConstraint
    why: str
    shortage: float
    cure: Cure | None

    @property
    def is_disabled(self) -> bool:
        """True if it fails because the provider is disabled, which no change of the query helps."""
        return _is_enabled(self.constraint)


@dataclass(frozen=True)
class Miss:
    """A provider and the constraints that fail on it; without any it can give what is asked for."""

    provider: str
    failures: tuple[UnmetConstraint, ...]

    @property
    def fits(self) -> bool:
        """True if placement would name the provider as a candidate."""
        return not self.failures

    @property
    def is_disabled(self) -> bool:
        """True if the provider is disabled, and lacks nothing else."""
        return bool(self.failures) and all(each.is_disabled for each in self.failures)

    @property
    def cures(self) -> tuple[Cure, ...] | None:
        """The cures of all failures; None if one has no cure."""
        found = tuple(each.cure for each in self.failures if each.cure is not None)
        return found if len(found) == len(self.failures) else None


def unexplained(query: Iterable[Constraint], provider: Provider, sharing: Iterable[Provider]) -> str | None:
    """Why these rules do not cover a provider, as the end of a sentence; None if they do.

    `sharing` are the providers with the trait MISC_SHARES_VIA_AGGREGATE.
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
    """The constraints of a query that fail on a provider, for which unexplained() is None."""
    # A guest cannot be made without these: the class that is left out is never the last one.
    may_drop = any(isinstance(each, Amount) and each.name in NEEDED for each in query)
    found = (_failure(each, provider, may_drop) for each in query)
    failures = (each for each in found if each is not None)
    return Miss(provider.uuid, tuple(sorted(failures, key=lambda each: not each.is_disabled)))


def apart(found: Miss, group: Group | None, taken: Sequence[str] = (), called: Callable[[str], str] = str) -> Miss:
    """The miss with a failure added if the instance's group excludes this provider; None means no group.

    `taken` are the computes that the others of its set take, in order: with these its group has members, too. `called`
    says what a compute is called.
    """
    if group is None:
        return found
    why = group.excludes(found.provider, called)
    if why is None and taken:
        others = group.with_members({str(number): compute for number, compute in enumerate(taken)})
        if others.excludes(found.provider) is not None:
            number = taken.index(found.provider) if found.provider in taken else 0
            which = ORDINALS[number] if number < len(ORDINALS) else f'no. {number + 1}'
            why = f"the set's {which} takes {called(taken[number])} (group {group.name}, {group.rule})"
    if why is None:
        return found
    constraint = GroupConstraint(group.name)
    return Miss(found.provider, (*found.failures, UnmetConstraint(constraint, why, 1.0, Cure(constraint, None))))


def nearest(misses: Iterable[Miss]) -> list[Miss]:
    """The misses sorted by how many constraints fail, then by how much they fall short, the least first."""
    return sorted(misses, key=lambda each: (len(each.failures), sum(failure.shortage for failure in each.failures)))


def smallest(misses: Iterable[Miss]) -> Miss | None:
    """The miss that the smallest change cures: one that changes the query alone before one that must free something."""
    curable = [each for each in nearest(misses) if each.cures]
    by_query = (each for each in curable if not any(cure.freed for cure in each.cures or ()))
    return next(by_query, next(iter(curable), None))


def changed(query: Iterable[Constraint], cures: Iterable[Cure]) -> tuple[Constraint, ...]:
    """The query with the constraints that have a cure replaced, or dropped, by it."""
    instead: dict[Constraint | GroupConstraint, Constraint | None] = {each.constraint: each.instead for each in cures}
    now = (instead.get(each, each) for each in query)
    return tuple(each for each in now if each is not None)


def in_words(cures: Sequence[Cure], host: str) -> str:
    """The cures as one instruction: free 1 VCPU on hv2, ask for DISK_GB:10, without required=CUSTOM_FAST."""
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


def _name(constraint: Constraint | GroupConstraint) -> str:
    if isinstance(constraint, Has) and constraint.typed:
        return constraint.typed
    return constraint.name if isinstance(constraint, Amount) else str(constraint)


def _failure(constraint: Constraint, provider: Provider, may_drop: bool) -> UnmetConstraint | None:
    if isinstance(constraint, Amount):
        return _short(constraint, provider.inventories.get(constraint.name), may_drop, provider.taken_count)
    there = provider.what(constraint.key)
    if isinstance(constraint, HasNot):
        holds = constraint.name not in there
    else:
        holds = any(name in there for name in constraint.any_of)
    if holds:
        return None
    # Asked without it, a query is sent with it all the same.
    cure = None if _is_enabled(constraint) else Cure(constraint, None)
    return UnmetConstraint(constraint, _lack(constraint), 1.0, cure)


def _is_enabled(constraint: Constraint | GroupConstraint) -> bool:
    """Whether it is the constraint that fails on a disabled compute."""
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


def _short(asked: Amount, have: Inventory | None, may_drop: bool, taken_count: int) -> UnmetConstraint | None:
    name, amount = asked.name, asked.amount
    without = Cure(asked, None) if may_drop and name not in NEEDED else None
    if have is None:
        return UnmetConstraint(asked, f'has no {name}', 1.0, without)
    why = []
    if have.used + amount > have.capacity:
        there = f'free {have.free} of {have.capacity}'
        if have.used > have.capacity:
            there = f'used {have.used} of {have.capacity}'
        short = f'short by {have.used + amount - have.capacity}'
        why.append(f'{name} is {short}' if taken_count else f'{name} {short} ({there})')
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
    return UnmetConstraint(asked, '; '.join(why), shortage, _cure(asked, have, possible, without))


def _cure(asked: Amount, have: Inventory, possible: int | None, without: Cure | None) -> Cure | None:
    if possible is not None:
        return Cure(asked, Amount(asked.name, possible))
    if without is not None:
        return without
    emptied = have.nearest(asked.amount, have.capacity)
    if emptied is None:
        return None
    return Cure(asked, Amount(asked.name, emptied), have.used + emptied - have.capacity)
