"""Accept a stop, a start or a reboot: the request's key is rewritten with it, and its compute carries it out."""

from __future__ import annotations

from typing import NamedTuple

from ecomp.errors import Conflict
from ecomp.failpoints import failpoint
from ecomp.model.json_object import dump, load_object
from ecomp.model.order import START, STOP, Invalid, Power, Request, action_id, parse_request
from ecomp.model.record import ACTIVE, ERROR, STOPPED
from ecomp.scheduler.changing.accept import until_accepted
from ecomp.scheduler.looking.find import InstanceEntries, living
from ecomp.store.client import Entry, Put, Store, Unchanged, is_alive
from ecomp.store.places import Index

WHY_NOT = {
    'queued': 'waits for a compute to take it',
    'scheduled': 'is not built yet: wait for it',
    'building': 'is being built: wait for it',
    'destroying': 'is being destroyed',
    ERROR: 'is in error, and nothing of it is left: destroy removes its record',
}


class Acceptance(NamedTuple):
    """What came of asking for a power change. `said` is a sentence; `power` is what to wait for, None for nothing.

    `before` are the ids that the record may still have of what came before.
    """

    said: str
    power: Power | None = None
    before: frozenset[str] = frozenset()


def power(store: Store, instance: str, wanted: Power, among: Index | None = None) -> Acceptance:
    """Write the power change into the request; where it is done or asked already, change nothing and say so.

    `among`: see find(). Errors: NotFound; Conflict of one that is neither active nor stopped.
    """

    def look_and_write(_: bool) -> Acceptance | None:
        found = living(store, instance, among)
        entry, request = _request(found)
        answer = _already(store, found, request, wanted)
        if answer is not None:
            return answer
        accepted = _accepted(store, found, wanted)  # before the commit: after it nothing may fail
        if store.commit([Unchanged(entry.key, entry.revision)], [_rewritten(found, entry, wanted)]) is None:
            return None
        failpoint('power-asked')
        return accepted

    return until_accepted(instance, wanted.action, 'show says what it is', look_and_write)


def _request(found: InstanceEntries) -> tuple[Entry, Request]:
    """The instance's request, of one that has a power that can be switched."""
    record, entry = found.record, found.request_entry
    if record.state not in (ACTIVE, STOPPED):
        raise Conflict(f'{record.instance}: {WHY_NOT.get(record.state, f"is {record.state}")}')
    if entry is None:
        raise Conflict(f'{record.instance}: nobody asks for it: its request was removed, and it is left alone')
    request = parse_request(record.compute, entry.key, entry.value)
    if isinstance(request, Invalid):
        raise Conflict(f'{record.instance}: its request cannot be understood: {request.reason}')
    if request.is_tombstone:
        raise Conflict(f'{record.instance}: {WHY_NOT["destroying"]}')
    return entry, request


def _already(store: Store, found: InstanceEntries, request: Request, wanted: Power) -> Acceptance | None:
    record, last = found.record, request.power
    if last is not None and last.id == wanted.id:
        return _accepted(store, found, wanted)  # by a commit whose answer was lost
    if last is not None and not last.is_done(record.power):
        said = f'{record.instance}: {wanted.action} was asked for before, {record.compute} is at it'
        return Acceptance(said, last, _before(found)) if last.action == wanted.action else None
    if (wanted.action, record.state) in ((STOP, STOPPED), (START, ACTIVE)):
        return Acceptance(f'{record.instance}: is {record.state} already')
    return None


def _rewritten(found: InstanceEntries, entry: Entry, wanted: Power) -> Put:
    """The request with this in it, and all else as it was, whoever wrote it."""
    value = dump({**load_object(entry.value), 'power': wanted._asdict()})
    still = parse_request(found.record.compute, entry.key, value.encode())
    if isinstance(still, Invalid):
        raise Conflict(f'{found.record.instance}: its request takes no more: {still.reason}')
    return Put(entry.key, value)


def _accepted(store: Store, found: InstanceEntries, wanted: Power) -> Acceptance:
    instance, compute = found.record.instance, found.record.compute
    said = f'{instance}: {wanted.action} accepted, {compute} carries it out'
    if not is_alive(store, compute):
        said += ' when it is back: it is silent now'
    return Acceptance(said, wanted, _before(found))


def _before(found: InstanceEntries) -> frozenset[str]:
    entry, record = found.request_entry, found.record
    request = parse_request(record.compute, entry.key, entry.value) if entry else None
    asked = request.power.id if isinstance(request, Request) and request.power else ''
    return frozenset({action_id(record.power), asked})
