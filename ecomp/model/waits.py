"""What an instance waits for, and why it failed, in its user's words. Pure."""

from __future__ import annotations

from ecomp.model.guest import GuestFailure
from ecomp.model.record import QUEUED, STAGES, STOPPED, Record
from ecomp.model.text import printable

WAITS_FOR = {
    'requested': 'its compute to take it',
    'scheduled': 'its compute to take it',
    'image': 'its image',
    'disk': 'its disk',
    'started': 'its domain to start',
    'addressed': 'DHCP lease',
    'ready': 'cloud-init to finish',
}
"""What an instance that is on its way to a stage waits for, in its user's words."""
IN_QUEUE = 'a compute to take it'
"""What one in a queue waits for."""


def waits_for(record: Record | None) -> str:
    """What an instance is waiting for now, and how far that is if it is known: `image, 34 of 600 MB`."""
    if record is not None and record.state == QUEUED:
        return f'{IN_QUEUE}: {record.fault}' if record.fault else IN_QUEUE
    if record is not None and record.state == STOPPED:
        return 'somebody to start it: it is stopped'
    reached = record.reached if record else {}
    stage = next((stage for stage in STAGES if stage not in reached), STAGES[-1])
    progress = record.progress if record else None
    what = str(progress) if progress is not None and progress.stage == stage else WAITS_FOR[stage]
    return f'{what} ({printable(record.fault)})' if record is not None and record.fault else what


def failure(record: Record) -> str:
    """Why an instance is in error, in one line."""
    if record.error is None:
        return f'{record.instance}: failed'
    error = record.error
    return f'{record.instance}: failed at stage ' + printable(f'{error.stage}: {error.reason} ({error.cleaned})')


def not_ready(instance: str, failed: GuestFailure) -> str:
    """Why a guest will never be ready, in one line: cloud-init's own words."""
    return printable(f'{instance}: cloud-init failed at stage {failed.stage}: {failed.reason}') + '; the guest goes on'
