"""Explain why a provider does not satisfy a query, and which change would help. Pure.

It implements placement's rules (openstack-placement 16, objects/research_context.py) for standalone providers, which
are neither nested nor in an aggregate with a sharing one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ecomp.model.allocation import REQUIRED_CLASSES, Inventory, Provider
from ecomp.model.group import Group
from ecomp.model.query import Amount, Constraint, Exclusion, Requirement
from ecomp.model.status import DISABLED


@dataclass(frozen=True)
class GroupConstraint:
    """The constraint to be in a group, in no query because placement does not know groups."""

    group: str

    def __str__(self) -> str:
        return f'--group {self.group}'


@dataclass(frozen=True)
class Cure:
    constraint: Constraint | GroupConstraint
    replacement: Constraint | None  # None: drop the constraint
    amount_to_free: int = 0  # of the class, before the replacement is used


@dataclass(frozen=True)
class UnmetConstraint:
    constraint: Constraint | GroupConstraint
    reason: str
    shortage: float  # from 0 (almost met) to 1
    cure: Cure | None  # None if nothing helps

    @property
    def is_disabled(self) -> bool:
        return _requires_enabled(self.constraint)


@dataclass(frozen=True)
class Miss:
    """A provider and the constraints that fail on it, none if it satisfies the query."""

    provider: str
    failures: tuple[UnmetConstraint, ...]

    @property
    def is_candidate(self) -> bool:
        return not self.failures

    @property
    def is_disabled(self) -> bool:
        """True if only this fails: the provider is disabled."""
        return bool(self.failures) and all(failure.is_disabled for failure in self.failures)

    @property
    def cures(self) -> tuple[Cure, ...] | None:
        """The cures of all failures, or None if one of them has no cure."""
        cures = tuple(failure.cure for failure in self.failures if failure.cure is not None)
        return cures if len(cures) == len(self.failures) else None


def explain_uncovered(query: Iterable[Constraint], provider: Provider) -> str | None:
    """Return that another provider may supply a class, so it is not explained, or None."""
    names = [each.name for each in query if isinstance(each, Amount) and each.name not in provider.inventories]
    if names and provider.aggregates:
        return f'not explained: another provider of its aggregates may share {", ".join(names)} with it'
    return None


def find_miss(query: Sequence[Constraint], provider: Provider) -> Miss:
    """Find the query's constraints that fail on a provider, and sort the one on DISABLED first."""
    # Required classes are never dropped, so a query that has one keeps resources when another class is dropped.
    can_drop = any(isinstance(constraint, Amount) and constraint.name in REQUIRED_CLASSES for constraint in query)
    results = (_find_unmet(constraint, provider, can_drop) for constraint in query)
    failures = (failure for failure in results if failure is not None)
    return Miss(provider.uuid, tuple(sorted(failures, key=lambda each: not each.is_disabled)))


def add_group_failure(
    miss: Miss, group: Group | None, taken_computes: Sequence[str] = (), name_compute: Callable[[str], str] = str
) -> Miss:
    """Return `miss`, with one more failure if the group, `taken_computes` in it, excludes it."""
    if group is None:
        return miss
    reason = group.explain_exclusion(miss.provider, name_compute)
    if reason is None and taken_computes:
        others = group.with_members({str(number): compute for number, compute in enumerate(taken_computes)})
        if others.explain_exclusion(miss.provider) is not None:
            index = taken_computes.index(miss.provider) if miss.provider in taken_computes else 0
            host = name_compute(taken_computes[index])
            reason = f'instance {index + 1} of the set takes {host} (group {group.name}, {group.rule})'
    if reason is None:
        return miss
    constraint = GroupConstraint(group.name)
    failure = UnmetConstraint(constraint, reason, 1.0, Cure(constraint, None))
    return Miss(miss.provider, (*miss.failures, failure))


def sort_misses(misses: Iterable[Miss]) -> list[Miss]:
    return sorted(misses, key=lambda each: (len(each.failures), sum(failure.shortage for failure in each.failures)))


def find_smallest_miss(misses: Iterable[Miss]) -> Miss | None:
    """Return the smallest miss that cures can mend, preferably without freeing, or None."""
    curable = [candidate for candidate in sort_misses(misses) if candidate.cures]
    by_query = (candidate for candidate in curable if not any(cure.amount_to_free for cure in candidate.cures or ()))
    return next(by_query, next(iter(curable), None))


def apply_cures(query: Iterable[Constraint], cures: Iterable[Cure]) -> tuple[Constraint, ...]:
    """Return the query, in which each constraint that has a cure is replaced or dropped."""
    replacements = {cure.constraint: cure.replacement for cure in cures}
    replaced = (replacements.get(constraint, constraint) for constraint in query)
    return tuple(remaining for remaining in replaced if remaining is not None)


def format_cures(cures: Sequence[Cure], host: str) -> str:
    """Format the cures: free 1 VCPU on hv2, request DISK_GB:10, remove required=CUSTOM_FAST."""
    amounts = [f'{cure.amount_to_free} {_format_constraint(cure.constraint)}' for cure in cures if cure.amount_to_free]
    replacements = [str(cure.replacement) for cure in cures if cure.replacement not in (None, cure.constraint)]
    dropped = [_format_constraint(cure.constraint) for cure in cures if cure.replacement is None]
    parts = [f'free {" and ".join(amounts)} on {host}'] if amounts else []
    parts += [f'request {" and ".join(replacements)}'] if replacements else []
    parts += [f'remove {" and ".join(dropped)}'] if dropped else []
    return ', '.join(parts)


def _format_constraint(constraint: Constraint | GroupConstraint) -> str:
    if isinstance(constraint, Requirement) and constraint.argument:
        return constraint.argument
    return constraint.name if isinstance(constraint, Amount) else str(constraint)


def _find_unmet(constraint: Constraint, provider: Provider, can_drop: bool) -> UnmetConstraint | None:
    if isinstance(constraint, Amount):
        return _find_unmet_amount(constraint, provider.inventories.get(constraint.name), can_drop, provider.taken_count)
    names = provider.get_names(constraint.key)
    if isinstance(constraint, Exclusion):
        is_met = constraint.name not in names
    else:
        is_met = any(name in names for name in constraint.any_of)
    if is_met:
        return None
    # Dropping it cannot help: exclude_disabled() adds it to each query that is sent.
    cure = None if _requires_enabled(constraint) else Cure(constraint, None)
    return UnmetConstraint(constraint, _describe_lack(constraint), 1.0, cure)


def _requires_enabled(constraint: Constraint | GroupConstraint) -> bool:
    return isinstance(constraint, Exclusion) and constraint.name == DISABLED


def _describe_lack(constraint: Requirement | Exclusion) -> str:
    if _requires_enabled(constraint):
        return 'is disabled'
    if isinstance(constraint, Exclusion):
        return f'{"is in aggregate" if constraint.key == "member_of" else "has"} {constraint.name}'
    names = ', '.join(constraint.any_of)
    has_several = len(constraint.any_of) > 1
    if constraint.key == 'in_tree':
        return f'is not the provider {names}, which in_tree= names'
    if constraint.key == 'member_of':
        return f'is in none of the aggregates {names}' if has_several else f'is not in aggregate {names}'
    return f'has none of {names}' if has_several else f'lacks {names}'


def _find_unmet_amount(
    constraint: Amount, inventory: Inventory | None, can_drop: bool, taken_count: int
) -> UnmetConstraint | None:
    name, amount = constraint.name, constraint.amount
    drop_cure = Cure(constraint, None) if can_drop and name not in REQUIRED_CLASSES else None
    if inventory is None:
        return UnmetConstraint(constraint, f'has no {name}', 1.0, drop_cure)
    # In placement an amount fits if used + amount <= (total - reserved) * allocation_ratio.
    reasons = []
    if inventory.used + amount > inventory.capacity:
        lacking = f'short by {inventory.used + amount - inventory.capacity}'
        usage = f'used {inventory.used}' if inventory.used > inventory.capacity else f'free {inventory.free}'
        reasons.append(f'{name} is {lacking}' if taken_count else f'{name} {lacking} ({usage} of {inventory.capacity})')
    if amount > inventory.max_unit:
        reasons.append(f'{name}:{amount} is above max_unit {inventory.max_unit}')
    if amount < inventory.min_unit:
        reasons.append(f'{name}:{amount} is below min_unit {inventory.min_unit}')
    if amount % inventory.step_size:
        reasons.append(f'{name}:{amount} is not a multiple of step_size {inventory.step_size}')
    if not reasons:
        return None
    possible = inventory.find_nearest_amount(amount, inventory.free)
    shortage = 1.0 if possible is None else min(abs(amount - possible) / amount, 1.0)
    cure = _find_cure(constraint, inventory, possible, drop_cure)
    return UnmetConstraint(constraint, '; '.join(reasons), shortage, cure)


def _find_cure(constraint: Amount, inventory: Inventory, possible: int | None, drop_cure: Cure | None) -> Cure | None:
    if possible is not None:
        return Cure(constraint, Amount(constraint.name, possible))
    if drop_cure is not None:
        return drop_cure
    if_empty = inventory.find_nearest_amount(constraint.amount, inventory.capacity)
    if if_empty is None:
        return None
    return Cure(constraint, Amount(constraint.name, if_empty), inventory.used + if_empty - inventory.capacity)
