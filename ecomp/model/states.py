"""The states of an instance, and the stages of its build. Pure, fast to import."""

from __future__ import annotations

QUEUED = 'queued'
SCHEDULED = 'scheduled'
BUILDING = 'building'
ACTIVE = 'active'
STOPPED = 'stopped'
DESTROYING = 'destroying'
GONE = 'gone'
ERROR = 'error'
# States in records; a queued instance has none.
STATES = frozenset({SCHEDULED, BUILDING, ACTIVE, STOPPED, DESTROYING, GONE, ERROR})
# The state to show of an instance that a silent host reported as alive.
UNKNOWN = 'unknown'
# The states that `--state` accepts.
SHOWN_STATES = frozenset({QUEUED, UNKNOWN, *STATES})

STAGES = ('requested', 'scheduled', 'image', 'disk', 'started', 'addressed', 'ready')

# Seconds that a record is kept, on a lease, after entering a final state.
RETENTION_SECONDS = {GONE: 24 * 3600, ERROR: 7 * 24 * 3600}
