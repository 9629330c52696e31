"""Whose a provider's traits and aggregates are, and what says that it is disabled. Pure, and light to import.

COMPUTE_STATUS_DISABLED has placement leave a provider out of what it offers, if the query forbids it. An ecompute that
is stopped in good order sets it, and its next start takes it off, unless an operator's own trait stands beside it.
"""

from __future__ import annotations

from collections.abc import Set

DISABLED = 'COMPUTE_STATUS_DISABLED'
BY_OPERATOR = 'CUSTOM_ECOMP_DISABLED'
CUSTOM = 'CUSTOM_'
"""How the traits begin that are not os-traits'."""
STATUS = frozenset({DISABLED, BY_OPERATOR})

Names = frozenset[str]


def changed(there: Set[str], wanted: Set[str], ours: Set[str]) -> Names:
    """What is to be there: all that is wanted, and nothing that was `ours` and is not; somebody else's stays."""
    return frozenset((there - (ours - wanted)) | wanted)


def ours_then(there: Set[str], wanted: Set[str], ours: Set[str]) -> Names:
    """What of it all is ours from then on: what was there before we wanted it is somebody else's."""
    return frozenset(wanted & (ours | (wanted - there)))


def disabled(there: Set[str]) -> Names:
    """The traits of a compute that an operator disables."""
    return frozenset(there | STATUS)


def enabled(there: Set[str], alive: bool) -> Names:
    """The traits of a compute that an operator enables; one that is stopped stays so until its start."""
    return frozenset(there - (STATUS if alive else {BY_OPERATOR}))


def opened(there: Set[str]) -> Names:
    """The traits of a compute that runs."""
    return frozenset(there if BY_OPERATOR in there else there - {DISABLED})


def stopped(there: Set[str]) -> Names:
    """The traits of a compute that was stopped."""
    return frozenset(there | {DISABLED})
