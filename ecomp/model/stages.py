"""The states and the stages of an instance, by their names: what they are is told in ecomp.model.record. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

QUEUED, SCHEDULED, BUILDING, ACTIVE, STOPPED = 'queued', 'scheduled', 'building', 'active', 'stopped'
DESTROYING, GONE, ERROR = 'destroying', 'gone', 'error'
# No record says queued: what waits for a compute has none.
STATES = frozenset({SCHEDULED, BUILDING, ACTIVE, STOPPED, DESTROYING, GONE, ERROR})

STAGES = ('requested', 'scheduled', 'image', 'disk', 'started', 'addressed', 'ready')

KEPT = {GONE: 24 * 3600, ERROR: 7 * 24 * 3600}
"""Seconds a record stays after its end, on a lease."""

BOOTS = 5
"""Boots a record has, at most: the last ones."""


def timestamp(now: datetime) -> str:
    """ISO 8601, UTC, milliseconds."""
    return now.astimezone(UTC).isoformat(timespec='milliseconds').replace('+00:00', 'Z')
