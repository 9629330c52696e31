"""A guest on, off, and on again: each step carried out and written down so that it can be done again.

What is to be done is plan's business. A start or reboot that has begun is in the record before it is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.instance.build import Job, Resume, Shutdown, SwitchOff, WorkerDied
from ecomp.agent.instance.plan import Patience, fault_of
from ecomp.agent.instance.pool import Runner, finish
from ecomp.agent.instance.records import Records
from ecomp.errors import BuildFailed, EcompError, Unreachable
from ecomp.failpoints import failpoint
from ecomp.model.boots import AFTER_HOST, BY_HAND
from ecomp.model.guest import Guest
from ecomp.model.order import ASKED, NOT_STARTED, OFF, Power, Request
from ecomp.model.record import Record

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often something is tried of which a worker dies, or that fails in an unknown way."""


@dataclass(eq=False)
class Switch:
    """The power of one compute's guests. One thread an instance. Errors of every task: Superseded, Unreachable."""

    compute: str
    records: Records
    runner: Runner
    memory: Memory
    guest_data: GuestData
    now: Callable[[], str]

    def note(self, instance: str, revision: int, guest: Guest | None) -> None:
        """Write down that a guest went off, or came on, and what is wrong with it."""
        record = self.records.write(self._seen(self.records.known(instance), guest, BY_HAND), revision)
        log.info('instance %s is %s%s', instance, record.state, f': {record.fault}' if record.fault else '')

    def resume(self, instance: str, revision: int) -> None:
        """Start a guest that ran when the host went down; if that fails, its record says why."""
        record = self.records.known(instance)
        log.info('START INSTANCE %s: it ran when the host went down', instance)
        # It ran as its record says, and nobody saw it go off. What workers died of before that is not of this start.
        off = record.off(self.now())
        record = replace(off, state=record.state, attempts=record.attempts if off.boots == record.boots else 0)
        self._start(record, revision, record.power, AFTER_HOST, f'{NOT_STARTED} after the host was rebooted')

    def shut_down(self, request: Request, revision: int) -> None:
        """Ask a guest to turn itself off. If that fails it was asked in vain, as one is that does not listen."""
        if self._begin(request, revision, ASKED):
            log.info('SHUT DOWN INSTANCE %s: its %s was asked for', request.instance, _power(request).action)
        try:
            self._run(Shutdown(request.instance, self.compute))
        except Unreachable:
            raise
        except EcompError as error:
            log.warning('instance %s cannot be asked to turn itself off: %s', request.instance, error)

    def switch_off(self, request: Request, revision: int) -> None:
        """End a guest that was asked to turn itself off, and did not. The next plan finds it off."""
        self._begin(request, revision, ASKED)
        log.warning('SWITCH OFF INSTANCE %s: it was asked to turn itself off, and did not', request.instance)
        self._run(SwitchOff(request.instance, self.compute))

    def start(self, request: Request, revision: int) -> None:
        """Start a guest that is off, as was asked; if that fails, its record says why, and it is not tried again."""
        self._begin(request, revision, OFF)
        power = _power(request)
        log.info('START INSTANCE %s: its %s was asked for', request.instance, power.action)
        self._start(self.records.known(request.instance), revision, power.id, power.action, NOT_STARTED)

    def done(self, request: Request, revision: int, guest: Guest | None) -> None:
        """Write down that a guest's power is as was asked."""
        power = _power(request)
        record = replace(self._seen(self.records.known(request.instance), guest, power.action), power=power.id)
        self.records.write(record, revision)
        self.memory.remember(request, record)
        log.info('instance %s is %s, as was asked', request.instance, record.state)

    def _begin(self, request: Request, revision: int, phase: str) -> bool:
        """Write down how far it is, True if it was not there yet. Remembered with it is what is asked."""
        record, said = self.records.known(request.instance), _power(request).at(phase)
        begins = record.power != said
        if begins:
            record = record.off(self.now()) if phase == OFF else record
            record = self.records.write(replace(record, power=said, attempts=0), revision)
            self.memory.remember(request, record)
        failpoint('powering')
        return begins

    def _start(self, record: Record, revision: int, power: str | None, why: str, failed: str) -> None:
        reason = self._resume(record, revision)
        if reason is not None:
            record = replace(record.off(self.now()), fault=f'{failed}: {reason}', power=power)
            log.error('instance %s: %s', record.instance, record.fault)
        else:
            runs = Guest(record.instance, self.compute, defined=True, running=True, disk=True)
            record = replace(self._seen(record, runs, why), power=power)
        self.records.write(record, revision)

    def start_built(self, record: Record, revision: int) -> str | None:
        """Start a guest whose build got as far as its domain; None once it runs, else why it does not, as a fault.

        Nothing of it is removed: it may have run, while nobody could write that down.
        """
        log.info('START INSTANCE %s: its build had got as far as its domain', record.instance)
        reason = self._resume(record, revision)
        return None if reason is None else f'{NOT_STARTED}: {reason}'

    def _resume(self, record: Record, revision: int) -> str | None:
        """Have its domain started; None once it runs, else why it does not. WorkerDied: it is to be tried again."""
        self.guest_data.off(record.instance)  # what it said was said in an earlier boot
        try:
            self._run(Resume(record.instance, self.compute))
        except Unreachable:
            raise
        except EcompError as error:
            record = replace(record, attempts=record.attempts + 1)
            if isinstance(error, WorkerDied) and record.attempts < ATTEMPTS:
                self.records.write(record, revision)
                raise
            return str(error.reason if isinstance(error, BuildFailed) else error)
        return None

    def _run(self, job: Job) -> None:
        finish(self.runner, job)
        failpoint('powered')

    def _seen(self, record: Record, guest: Guest | None, why: str) -> Record:
        """The record of a guest as it is now; `why`: what it was started for, if it is on and was off."""
        if guest is not None and guest.running:
            seen = record.on(why, self.now())
        else:
            self.guest_data.off(record.instance)
            seen = record.off(self.now())
        return replace(seen, fault=fault_of(record, guest))


class Shutdowns:
    """Which guests were asked to turn themselves off, and when; the planning thread's.

    Asked `again` seconds later once more, for one that is starting does not listen; no longer than `grace` in all. Not
    written down anywhere: after a restart a guest has all its time once more.
    """

    def __init__(self, grace: float, again: float) -> None:
        self._grace = grace
        self._again = again
        self._asked: dict[str, tuple[float, float]] = {}

    def note_asked(self, instance: str, now: float) -> None:
        """Note that a guest has just been asked. `now` is on the monotonic clock, as all times here."""
        first, _ = self._asked.get(instance, (now, now))
        self._asked[instance] = first, now

    def patience(self, now: float) -> dict[str, Patience]:
        """What is due of each guest that was asked: {instance: Patience}."""
        return {instance: self._due(first, last, now) for instance, (first, last) in self._asked.items()}

    def next(self, after: float) -> list[float]:
        """The times after that moment at which something will be due."""
        times = [when for first, last in self._asked.values() for when in (first + self._grace, last + self._again)]
        return [when for when in times if when > after]

    def keep(self, running: Collection[str]) -> None:
        """Forget all but these, which run still: the others have done what they were asked."""
        self._asked = {instance: times for instance, times in self._asked.items() if instance in running}

    def _due(self, first: float, last: float, now: float) -> Patience:
        if now >= first + self._grace:
            return Patience.NO_MORE
        return Patience.ASK_AGAIN if now >= last + self._again else Patience.WAIT


def _power(request: Request) -> Power:
    assert request.power is not None  # plan() plans nothing of the kind without
    return request.power
