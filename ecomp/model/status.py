"""Traits and aggregates: which are ecomp's, which disable a provider. Pure, fast to import.

Placement leaves out a provider with COMPUTE_STATUS_DISABLED if the query forbids this trait. An ecompute sets it when
it stops in good order and removes it at its next start, unless an operator's own trait is also set.
"""

from __future__ import annotations

from collections.abc import Set

DISABLED = 'COMPUTE_STATUS_DISABLED'
BY_OPERATOR = 'CUSTOM_ECOMP_DISABLED'
# Prefix of every trait that is not in os-traits.
CUSTOM = 'CUSTOM_'
STATUS = frozenset({DISABLED, BY_OPERATOR})

Names = frozenset[str]


def changed(there: Set[str], wanted: Set[str], ours: Set[str]) -> Names:
    """Return `desired`, and those names of `current` that are not `managed`."""
    return frozenset((there - (ours - wanted)) | wanted)


def ours_then(there: Set[str], wanted: Set[str], ours: Set[str]) -> Names:
    """Return the managed names after merge_names(): `desired`, without those others had set."""
    return frozenset(wanted & (ours | (wanted - there)))


def disabled(there: Set[str]) -> Names:
    """Return the traits after `host disable`."""
    return frozenset(there | STATUS)


def enabled(there: Set[str], alive: bool) -> Names:
    """Return the traits after `host enable`; if not alive, disabled until the compute starts."""
    return frozenset(there - (STATUS if alive else {BY_OPERATOR}))


def opened(there: Set[str]) -> Names:
    """Return the traits after a compute started."""
    return frozenset(there if BY_OPERATOR in there else there - {DISABLED})


def stopped(there: Set[str]) -> Names:
    """Return the traits after a compute stopped in good order."""
    return frozenset(there | {DISABLED})
