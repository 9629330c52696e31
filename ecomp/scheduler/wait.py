"""Wait for a stage of an instance, told by etcd as it happens; never longer than asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, NotFound, StillGoing
from ecomp.model import keys
from ecomp.model.record import DESTROYING, ERROR, GONE, STAGES, Record
from ecomp.model.text import printable
from ecomp.scheduler.find import read_record
from ecomp.store.client import Entry
from ecomp.store.watch import Follower

TICK = 1.0
"""Seconds between two updates of the live line; the instance itself is watched, not polled."""


def next_stage(record: Record | None) -> str:
    """What an instance is waiting for now."""
    reached = record.stages if record else {}
    return next((stage for stage in STAGES if stage not in reached), STAGES[-1])


def waits_for(record: Record | None) -> str:
    """What an instance is waiting for now, and how far that is if it is known: `image, 34 of 600 MB`."""
    stage = next_stage(record)
    progress = record.progress if record else None
    return str(progress) if progress is not None and progress.stage == stage else stage


def failure(record: Record) -> str:
    """Why an instance is in error, in one line."""
    if record.error is None:
        return f'{record.instance}: failed'
    error = record.error
    return f'{record.instance}: failed at stage ' + printable(f'{error.stage}: {error.reason} ({error.cleaned})')


def wait_for_stage(
    config: EtcdConfig, instance: str, stage: str, timeout: float, tell: Callable[[str], None]
) -> Record:
    """The record once `stage` is reached. `tell` gets what is being waited for, about once a second.

    Errors: EcompError (failed, exit 1), NotFound (destroyed meanwhile), StillGoing (the time is up).
    """

    def reached(record: Record | None) -> bool:
        if record is None:
            return False
        if record.state == ERROR:
            raise EcompError(failure(record))
        if record.state in (DESTROYING, GONE):
            raise NotFound(f'{instance}: destroyed while waiting for it')
        return stage in record.stages

    record = _wait(config, instance, reached, timeout, tell, waits_for)
    assert record is not None  # reached() is False for None
    return record


def wait_until_gone(config: EtcdConfig, instance: str, timeout: float, tell: Callable[[str], None]) -> None:
    """Return once the instance is gone. StillGoing when the time is up: the destroy goes on."""
    seen = False

    def reached(record: Record | None) -> bool:
        nonlocal seen
        seen = seen or record is not None
        return (record is None and seen) or (record is not None and record.state == GONE)

    _wait(config, instance, reached, timeout, tell, lambda _: 'its compute to destroy it')


def _wait(
    config: EtcdConfig,
    instance: str,
    reached: Callable[[Record | None], bool],
    timeout: float,
    tell: Callable[[str], None],
    what: Callable[[Record | None], str],
) -> Record | None:
    key = keys.instance(instance)
    changed = threading.Condition()
    entries: list[Entry | None] = []

    def on_state(state: Mapping[str, Entry]) -> None:
        with changed:
            entries[:] = [state.get(key)]
            changed.notify()

    follower = Follower(config, key, on_state)
    began = time.monotonic()
    follower.start()
    try:
        while True:
            with changed:
                known = bool(entries)
                entry = entries[0] if entries else None
                record = read_record(entry) if entry else None
                if known and reached(record):
                    return record
                spent = time.monotonic() - began
                # Even a --timeout of nothing looks once.
                limit = timeout if known else max(timeout, config.timeout)
                if spent >= limit:
                    raise StillGoing(
                        f'{instance}: {timeout:g} s are up, still waiting for: {what(record)}; it goes on'
                        + ('' if known else ' (etcd did not answer)')
                    )
                tell(f'waiting for: {what(record)}, {spent:.0f} s')
                changed.wait(min(TICK, limit - spent))
    finally:
        follower.stop()
