"""Traits and aggregates: which are ecomp's, which disable a provider. Pure, fast to import.

Placement leaves out a provider with COMPUTE_STATUS_DISABLED if the query forbids this trait. An ecompute sets it when
it stops in good order and removes it at its next start, unless an operator's own trait is also set.
"""

from __future__ import annotations

from collections.abc import Set

DISABLED = 'COMPUTE_STATUS_DISABLED'
DISABLED_BY_OPERATOR = 'CUSTOM_ECOMP_DISABLED'
# Prefix of every trait that is not in os-traits.
CUSTOM_PREFIX = 'CUSTOM_'
# Of a provider that supplies resources to the others of its aggregates.
SHARING_TRAIT = 'MISC_SHARES_VIA_AGGREGATE'
# Of a compute that an adoption disabled, and enables again at its end.
ADOPTING = 'CUSTOM_ECOMP_ADOPTING'
STATUS_TRAITS = frozenset({DISABLED, DISABLED_BY_OPERATOR, ADOPTING})

Names = frozenset[str]


def merge_names(current: Set[str], desired: Set[str], managed: Set[str]) -> Names:
    """Return the `desired` names, and those `current` names that are not `managed`."""
    return frozenset((current - (managed - desired)) | desired)


def find_managed_names(current: Set[str], desired: Set[str], managed: Set[str]) -> Names:
    """Return the `desired` names that are `managed`, or not yet in `current`."""
    return frozenset(desired & (managed | (desired - current)))


def apply_disable(traits: Set[str]) -> Names:
    return frozenset(traits | STATUS_TRAITS) - {ADOPTING}


def apply_enable(traits: Set[str], is_alive: bool) -> Names:
    """Return the traits after `host enable`, where DISABLED stays until the compute is alive."""
    return frozenset(traits - (STATUS_TRAITS if is_alive else {DISABLED_BY_OPERATOR, ADOPTING}))


def apply_adoption(traits: Set[str]) -> Names:
    """Return the traits during an adoption, with ADOPTING if it disabled the compute."""
    return frozenset(traits if DISABLED_BY_OPERATOR in traits else traits | STATUS_TRAITS)


def end_adoption(traits: Set[str], is_alive: bool) -> Names:
    return apply_enable(traits, is_alive) if ADOPTING in traits else frozenset(traits)


def apply_start(traits: Set[str]) -> Names:
    """Return the traits after a start: without DISABLED, unless an operator disabled it."""
    return frozenset(traits if DISABLED_BY_OPERATOR in traits else traits - {DISABLED})


def apply_stop(traits: Set[str]) -> Names:
    return frozenset(traits | {DISABLED})
