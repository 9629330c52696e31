"""Whose a provider's traits and aggregates are, and what says that it is disabled. Pure, and light to import.

COMPUTE_STATUS_DISABLED has placement leave a provider out of what it offers, if the query forbids it. An ecompute that
is stopped in good order sets it, and its next start takes it off, unless an operator's own trait stands beside it.
"""

from __future__ import annotations

from collections.abc import Set

DISABLED = 'COMPUTE_STATUS_DISABLED'
BY_OPERATOR = 'CUSTOM_ECOMP_DISABLED'
CUSTOM = 'CUSTOM_'
"""How every trait begins that os-traits does not have."""
STATUS = frozenset({DISABLED, BY_OPERATOR})

Names = frozenset[str]


def changed(there: Set[str], wanted: Set[str], ours: Set[str]) -> Names:
    """The names a provider should have: the `wanted` ones, and of those `there` all that are not `ours`."""
    return frozenset((there - (ours - wanted)) | wanted)


def ours_then(there: Set[str], wanted: Set[str], ours: Set[str]) -> Names:
    """The names that are ours after changed(): the `wanted` ones, without those that others had put there before."""
    return frozenset(wanted & (ours | (wanted - there)))


def disabled(there: Set[str]) -> Names:
    """The traits of a compute once an operator has disabled it."""
    return frozenset(there | STATUS)


def enabled(there: Set[str], alive: bool) -> Names:
    """The traits of a compute once an operator has enabled it; one not `alive` stays disabled until its next start."""
    return frozenset(there - (STATUS if alive else {BY_OPERATOR}))


def opened(there: Set[str]) -> Names:
    """The traits of a compute once it has started."""
    return frozenset(there if BY_OPERATOR in there else there - {DISABLED})


def stopped(there: Set[str]) -> Names:
    """The traits of a compute once it was stopped."""
    return frozenset(there | {DISABLED})
