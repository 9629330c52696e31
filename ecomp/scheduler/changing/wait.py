"""Wait for a stage of an instance, told by etcd as it happens; never longer than asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ecomp.conf import EtcdConfig
from ecomp.errors import Conflict, EcompError, NotFound, StillGoing, Unreadable
from ecomp.model import boots
from ecomp.model.power import ASKED, OFF, STOP, Power, action_id, phase
from ecomp.model.record import ACTIVE, DESTROYING, ERROR, GONE, STAGES, STOPPED, Record
from ecomp.model.text import printable
from ecomp.model.waits import failure, not_ready, waits_for
from ecomp.scheduler.looking.find import read_record
from ecomp.store.client import Entry

if TYPE_CHECKING:
    from ecomp.model.places import Claims
    from ecomp.scheduler.changing.power import Acceptance
    from ecomp.store.places import Index

TICK = 1.0
"""Seconds between two updates of the live line; the instance itself is watched, not polled."""


class Deadline:
    """When waiting ends, for all that is waited for one after the other: `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds that have passed."""
        return time.monotonic() - self._began


def wait_for_stage(wait: Wait, stage: str, asked: Power | None = None) -> Record:
    """The record once `stage` is reached.

    The stages of a boot are those of the one that goes on or, of a guest that is off, of the next; with an `asked`
    start or reboot that is not carried out, of the one that it brings.

    Errors: EcompError (it failed, or its cloud-init did; exit 1), NotFound (destroyed meanwhile), StillGoing (the time
    is up).
    """
    first: Record | None = None
    instance = wait.instance

    def reached(record: Record | None) -> bool:
        nonlocal first
        if record is None:
            if first is not None:
                raise NotFound(f'{instance}: its record was removed while waiting for it')
            return False
        first = first or record
        if record.state == ERROR:
            raise EcompError(failure(record))
        if record.state in (DESTROYING, GONE):
            raise NotFound(f'{instance}: destroyed while waiting for it')
        if is_before_boot(stage, first, record, asked):
            return False
        if stage == STAGES[-1] and record.cloud_init is not None:
            raise EcompError(not_ready(instance, record.cloud_init))
        return stage in record.reached

    def what(record: Record | None) -> str:
        on_its_way = first is not None and record is not None and is_pending(asked, first, record)
        return _power_waits_for(record) if on_its_way else waits_for(record)

    def forget() -> None:
        nonlocal first
        first = None

    record = wait.until(reached, what, forget=forget)
    assert record is not None  # reached() is False for None
    return record


def is_before_boot(stage: str, first: Record, now: Record, asked: Power | None) -> bool:
    """Whether a stage's time is that of an earlier boot than the one that is waited for. Pure.

    `first` is the record as it was when waiting began; see wait_for_stage().
    """
    if stage not in boots.STAGES or now.boot is None:
        return False
    return is_pending(asked, first, now) or (first.state == STOPPED and first.boot == now.boot)


def is_pending(asked: Power | None, first: Record, now: Record) -> bool:
    """Whether the start or reboot that was `asked` is still to be carried out; one in its place brings its own."""
    if asked is None or asked.action == STOP or asked.is_done(now.power):
        return False
    return action_id(now.power) in (asked.id, action_id(first.power))


def wait_until_gone(wait: Wait) -> None:
    """Return once the instance is gone. StillGoing when the time is up: the destroy goes on."""

    def read(entry: Entry) -> Record:
        try:
            return read_record(entry)
        except Unreadable:  # its compute writes another one when it is gone
            return Record(wait.instance, '', DESTROYING)

    def reached(record: Record | None) -> bool:
        return record is not None and record.state == GONE

    wait.until(reached, lambda _: 'its compute to destroy it', read, ends=True)


def wait_for_power(wait: Wait, accepted: Acceptance) -> Record:
    """The record once an accepted stop, start or reboot is carried out.

    Errors: EcompError (it was to run, and does not), Conflict (another one came in its place), NotFound (destroyed
    meanwhile), StillGoing (the time is up).
    """
    instance, power = wait.instance, accepted.power
    assert power is not None  # else there is nothing to wait for

    def reached(record: Record | None) -> bool:
        if record is None or record.state in (DESTROYING, GONE):
            raise NotFound(f'{instance}: destroyed while waiting for it')
        if action_id(record.power) not in (power.id, *accepted.before):
            raise Conflict(f'{instance}: somebody has asked for something else meanwhile')
        if not power.is_done(record.power):
            return False
        if power.action != STOP and record.state != ACTIVE:
            raise EcompError(printable(f'{instance}: {record.fault or "it was started, and is off again"}'))
        return True

    record = wait.until(reached, _power_waits_for)
    assert record is not None  # reached() is False for None
    return record


def _power_waits_for(record: Record | None) -> str:
    how_far = phase(record.power if record else None)
    return {ASKED: 'the guest to turn itself off', OFF: 'its domain to start'}.get(how_far, 'its compute to take it')


@dataclass(frozen=True)
class Wait:
    """Waiting for one instance, and who is told of it: `tell` about once a second, of what is being waited for.

    `seen` gets each record that is read, `late` the last one, where there is one, when the time is up.
    `among`: see find(); `claims`: see Store.
    """

    config: EtcdConfig
    instance: str
    deadline: Deadline
    tell: Callable[[str], None]
    among: Index | None = None
    seen: Callable[[Record], None] = lambda _: None
    late: Callable[[Record], None] = lambda _: None
    claims: Claims | None = None

    def until(
        self,
        reached: Callable[[Record | None], bool],
        what: Callable[[Record | None], str],
        read: Callable[[Entry], Record] = read_record,
        ends: bool = False,
        forget: Callable[[], None] = lambda: None,
    ) -> Record | None:
        """The record that has reached it; `what` says of one that has not what it waits for.

        `ends`: an instance found nowhere counts as gone; `forget` is called where the records so far turn out to be of
        a compute that is not believed. Errors: StillGoing (the time is up), those of `reached`.
        """
        from ecomp.scheduler.changing.whereabouts import Whereabouts  # for those who wait

        deadline, known = self.deadline, False
        with Whereabouts(self.config, self.instance, self.among, self.claims) as at:

            def waited(record: Record | None) -> str:
                return at.in_queue if at.is_queued else what(record)

            def is_believed() -> bool:
                nonlocal known
                believed = at.is_believed()
                known = believed is not None
                if believed is False:
                    forget()
                return bool(believed)

            # With nothing left of the time, each is looked at once.
            first_look = deadline.spent + self.config.timeout
            while True:
                known, entry = at.look()
                record = read(entry) if entry else None
                if record is not None:
                    self.seen(record)
                try:
                    if known and (reached(record) or (ends and at.is_nowhere)) and is_believed():
                        return record
                except EcompError:
                    if is_believed():
                        raise
                spent = deadline.spent
                limit = deadline.seconds if known else max(deadline.seconds, first_look)
                if spent >= limit:
                    if record is not None:
                        self.late(record)
                    how_far = f'still waiting for: {waited(record)}' if known else f'and {at.silent} did not answer'
                    raise StillGoing(f'{self.instance}: {deadline.seconds:g} s are up, {how_far}; it goes on')
                self.tell(f'waiting for: {waited(record) if known else f"{at.silent} to answer"}, {spent:.0f} s')
                at.wait(min(TICK, limit - spent))
