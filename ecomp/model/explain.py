"""Explain why a provider does not satisfy a query, and which change would help. Pure.

It implements placement's rules (openstack-placement 16, objects/research_context.py) for standalone providers: neither
nested nor in an aggregate with a sharing one. An amount fits if used + amount <= (total - reserved) *
allocation_ratio; it must be from min_unit to max_unit, and a multiple of step_size.
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
    """A resource provider; `is_standalone` without parent and children."""

    uuid: str
    inventories: Mapping[str, Inventory] = field(default_factory=dict)
    traits: Collection[str] = ()
    aggregates: Collection[str] = ()
    alone: bool = True
    taken_count: int = 0

    @property
    def is_closed(self) -> bool:
        """True if all its VCPU is reserved, because its ecompute stopped cleanly."""
        return 'VCPU' in self.inventories and self.inventories['VCPU'].is_shut

    def less(self, given: Sequence[Resources]) -> Provider:
        """Return the provider with the usage of other instances of the same set added."""
        sums = summed(given)
        increased = {
            name: inventory._replace(used=inventory.used + sums.get(name, 0))
            for name, inventory in self.inventories.items()
        }
        return replace(self, inventories=increased, taken_count=len(given))

    def what(self, key: str) -> Collection[str]:
        """Return the aggregates, tree or traits that the query parameter `key` is about."""
        return {'member_of': self.aggregates, 'in_tree': (self.uuid,)}.get(key, self.traits)


@dataclass(frozen=True)
class GroupConstraint:
    """The constraint to be in a group. No query contains it: placement does not know groups."""

    group: str

    def __str__(self) -> str:
        return f'--group {self.group}'


@dataclass(frozen=True)
class Cure:
    """Request `replacement` (None: drop it) for a constraint once `amount_to_free` is free."""

    constraint: Constraint | GroupConstraint
    instead: Constraint | None
    freed: int = 0


@dataclass(frozen=True)
class UnmetConstraint:
    """A constraint that fails; `shortage` is 0 (almost met) to 1, `cure` None if nothing helps."""

    constraint: Constraint | GroupConstraint
    why: str
    shortage: float
    cure: Cure | None

    @property
    def is_disabled(self) -> bool:
        """True if it fails because the provider is disabled, which no change of the query can fix."""
        return _is_enabled(self.constraint)


@dataclass(frozen=True)
class Miss:
    """A provider and the constraints that fail on it; without failures it satisfies the query."""

    provider: str
    failures: tuple[UnmetConstraint, ...]

    @property
    def fits(self) -> bool:
        """True if placement would name the provider as a candidate."""
        return not self.failures

    @property
    def is_disabled(self) -> bool:
        """True if the only failure is that the provider is disabled."""
        return bool(self.failures) and all(failure.is_disabled for failure in self.failures)

    @property
    def cures(self) -> tuple[Cure, ...] | None:
        """The cures of all failures, or None if one of them has no cure."""
        cures = tuple(failure.cure for failure in self.failures if failure.cure is not None)
        return cures if len(cures) == len(self.failures) else None


def unexplained(query: Iterable[Constraint], provider: Provider, sharing: Iterable[Provider]) -> str | None:
    """Say, as the end of a sentence, why this module does not cover a provider, or None.

    `sharing_providers` have the trait MISC_SHARES_VIA_AGGREGATE.
    """
    if not provider.alone:
        return 'its resource providers are nested'
    classes = {constraint.name for constraint in query if isinstance(constraint, Amount)}
    for other in sharing:
        if other.uuid == provider.uuid:
            return 'it shares with others'
        common_aggregates = set(other.aggregates) & set(provider.aggregates)
        if common_aggregates and classes & other.inventories.keys():
            return f'provider {other.uuid} shares with it'
    return None


def miss(query: Sequence[Constraint], provider: Provider) -> Miss:
    """Find the constraints that fail on a provider for which explain_uncovered() is None."""
    # Required classes are never dropped, so a query that has one still has resources after another class is dropped.
    can_drop = any(isinstance(constraint, Amount) and constraint.name in NEEDED for constraint in query)
    results = (_failure(constraint, provider, can_drop) for constraint in query)
    failures = (failure for failure in results if failure is not None)
    return Miss(provider.uuid, tuple(sorted(failures, key=lambda each: not each.is_disabled)))


def apart(found: Miss, group: Group | None, taken: Sequence[str] = (), called: Callable[[str], str] = str) -> Miss:
    """Return the miss, with a failure added if the group (None: no group) bars the provider.

    `taken_computes` are those that the other instances of its set take, in order; they count as members of the group.
    """
    if group is None:
        return found
    reason = group.excludes(found.provider, called)
    if reason is None and taken:
        others = group.with_members({str(number): compute for number, compute in enumerate(taken)})
        if others.excludes(found.provider) is not None:
            index = taken.index(found.provider) if found.provider in taken else 0
            ordinal = ORDINALS[index] if index < len(ORDINALS) else f'no. {index + 1}'
            reason = f"the set's {ordinal} takes {called(taken[index])} (group {group.name}, {group.rule})"
    if reason is None:
        return found
    constraint = GroupConstraint(group.name)
    return Miss(found.provider, (*found.failures, UnmetConstraint(constraint, reason, 1.0, Cure(constraint, None))))


def nearest(misses: Iterable[Miss]) -> list[Miss]:
    """Sort the misses by number of failures, then by total shortage, the smallest first."""
    return sorted(misses, key=lambda each: (len(each.failures), sum(failure.shortage for failure in each.failures)))


def smallest(misses: Iterable[Miss]) -> Miss | None:
    """Find the miss with the smallest cure, or None; cures that free nothing come first."""
    curable = [candidate for candidate in nearest(misses) if candidate.cures]
    by_query = (candidate for candidate in curable if not any(cure.freed for cure in candidate.cures or ()))
    return next(by_query, next(iter(curable), None))


def changed(query: Iterable[Constraint], cures: Iterable[Cure]) -> tuple[Constraint, ...]:
    """Return the query with the constraints that have a cure replaced or dropped."""
    replacements: dict[Constraint | GroupConstraint, Constraint | None] = {
        cure.constraint: cure.instead for cure in cures
    }
    replaced = (replacements.get(constraint, constraint) for constraint in query)
    return tuple(remaining for remaining in replaced if remaining is not None)


def in_words(cures: Sequence[Cure], host: str) -> str:
    """Format the cures: free 1 VCPU on hv2, ask for DISK_GB:10, without required=CUSTOM_FAST."""
    amounts_to_free = [f'{cure.freed} {_name(cure.constraint)}' for cure in cures if cure.freed]
    replacements = [str(cure.instead) for cure in cures if cure.instead not in (None, cure.constraint)]
    dropped = [_name(cure.constraint) for cure in cures if cure.instead is None]
    parts = []
    if amounts_to_free:
        parts.append(f'free {" and ".join(amounts_to_free)} on {host}')
    if replacements:
        parts.append(f'ask for {" and ".join(replacements)}')
    if dropped:
        parts.append(f'{"" if replacements else "ask "}without {" and ".join(dropped)}')
    return ', '.join(parts)


def _name(constraint: Constraint | GroupConstraint) -> str:
    if isinstance(constraint, Has) and constraint.typed:
        return constraint.typed
    return constraint.name if isinstance(constraint, Amount) else str(constraint)


def _failure(constraint: Constraint, provider: Provider, may_drop: bool) -> UnmetConstraint | None:
    if isinstance(constraint, Amount):
        return _short(constraint, provider.inventories.get(constraint.name), may_drop, provider.taken_count)
    names = provider.what(constraint.key)
    if isinstance(constraint, HasNot):
        is_met = constraint.name not in names
    else:
        is_met = any(name in names for name in constraint.any_of)
    if is_met:
        return None
    # Dropping it cannot help: enabled_only() adds it to each query that is sent.
    cure = None if _is_enabled(constraint) else Cure(constraint, None)
    return UnmetConstraint(constraint, _lack(constraint), 1.0, cure)


def _is_enabled(constraint: Constraint | GroupConstraint) -> bool:
    """Return True for the constraint that forbids the trait of disabled computes."""
    return isinstance(constraint, HasNot) and constraint.name == DISABLED


def _lack(constraint: Has | HasNot) -> str:
    if _is_enabled(constraint):
        return 'is disabled'
    if isinstance(constraint, HasNot):
        return f'{"is in aggregate" if constraint.key == "member_of" else "has"} {constraint.name}'
    names = ', '.join(constraint.any_of)
    has_several = len(constraint.any_of) > 1
    if constraint.key == 'in_tree':
        return f'is not provider {names}'
    if constraint.key == 'member_of':
        return f'is in none of the aggregates {names}' if has_several else f'is not in aggregate {names}'
    return f'lacks each of {names}' if has_several else f'lacks {names}'


def _short(asked: Amount, have: Inventory | None, may_drop: bool, taken_count: int) -> UnmetConstraint | None:
    name, amount = asked.name, asked.amount
    drop_cure = Cure(asked, None) if may_drop and name not in NEEDED else None
    if have is None:
        return UnmetConstraint(asked, f'has no {name}', 1.0, drop_cure)
    reasons = []
    if have.used + amount > have.capacity:
        usage = f'free {have.free} of {have.capacity}'
        if have.used > have.capacity:
            usage = f'used {have.used} of {have.capacity}'
        lacking = f'short by {have.used + amount - have.capacity}'
        reasons.append(f'{name} is {lacking}' if taken_count else f'{name} {lacking} ({usage})')
    if amount > have.max_unit:
        reasons.append(f'{name}:{amount} is more than one may have (max_unit {have.max_unit})')
    if amount < have.min_unit:
        reasons.append(f'{name}:{amount} is less than one has to have (min_unit {have.min_unit})')
    if amount % have.step_size:
        reasons.append(f'{name}:{amount} is not a multiple of {have.step_size} (step_size)')
    if not reasons:
        return None
    possible = have.nearest(amount, have.free)
    shortage = 1.0 if possible is None else min(abs(amount - possible) / amount, 1.0)
    return UnmetConstraint(asked, '; '.join(reasons), shortage, _cure(asked, have, possible, drop_cure))


def _cure(asked: Amount, have: Inventory, possible: int | None, without: Cure | None) -> Cure | None:
    if possible is not None:
        return Cure(asked, Amount(asked.name, possible))
    if without is not None:
        return without
    amount_if_empty = have.nearest(asked.amount, have.capacity)
    if amount_if_empty is None:
        return None
    return Cure(asked, Amount(asked.name, amount_if_empty), have.used + amount_if_empty - have.capacity)
