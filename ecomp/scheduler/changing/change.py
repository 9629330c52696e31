"""Change an instance that is there: destroy it, stop, start or reboot it, or remove the record of what is over.

The request's key is rewritten, as a tombstone or with the power asked for, and its compute carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple, TypeVar

from ecomp.errors import Conflict, EcompError, NotFound, UnknownOutcome, Unreachable, Unreadable
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.group import Membership
from ecomp.model.json_object import dump, load_object
from ecomp.model.order import SIZE_LIMIT, START, STOP, Invalid, Power, Request, action_id, parse_request, to_json
from ecomp.model.record import ACTIVE, ERROR, GONE, KEPT, STOPPED, Record, is_newer, timestamp
from ecomp.scheduler.looking.find import InstanceEntries, all_records, find, living, read_waiting, requested, waiting_at
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged, is_alive
from ecomp.store.sharing import Index, commit_with, ended, find_places, freed, group, index, quietly_revoke, write_end

TRIES = 5
"""Tries to write, each after a fresh look; who loses more of these races says so."""

Answer = TypeVar('Answer')


def until_accepted(instance: str, change: str, cure: str, look_and_write: Callable[[bool], Answer | None]) -> Answer:
    """The first answer of `look_and_write` that is not None: that is for what has changed since it looked.

    It is told whether an earlier write had no answer: then its look says what became of that. `change` is what is asked
    for (a destroy, say), `cure` what one does who is not told whether it is accepted.
    Errors: Conflict (somebody else changes the instance all the time), UnknownOutcome, Unreachable, those of the look.
    """
    is_unknown = False
    for _ in range(TRIES):
        try:
            answer = look_and_write(is_unknown)
        except UnknownOutcome:
            is_unknown = True
        except Unreachable as error:
            if not is_unknown:
                said = f'{error}; the {change} of {instance} is not accepted'
                raise type(error)(said, error.backend) from error
            unknown = f'whether the {change} of {instance} is accepted is not known: {cure}'
            raise UnknownOutcome(f'{error}; {unknown}', error.backend) from error
        else:
            if answer is not None:
                return answer
    raise Conflict(f'{instance}: changed by somebody else all the time; try again')


TOMBSTONE_SECONDS = 30 * 24 * 3600
"""How long it is remembered that what waits was destroyed, where a compute that is silent may run it."""


def destroy(
    store: Store, instance: str, among: Index | None = None, claimed_on: Callable[[str], str] = lambda _: ''
) -> str:
    """Accept the destroy; what was done, in one sentence. NotFound if it is gone or unknown. `among`: see find().

    `claimed_on` asks placement for the compute that holds the instance's claim, '' for none: what waits in a queue and
    is claimed may run there, if etcd was restored to before it was taken.

    An instance in error has nothing left but its record, which is removed here. Asked again while it is
    being destroyed: says so and changes nothing. Of one whose record cannot be read its request says enough: Unreadable
    only where no compute is asked for it, and for a record of a newer version.
    """

    def look_and_write(is_unknown: bool) -> str | None:
        try:
            found = _living(store, instance, among)
        except NotFound:
            if not is_unknown:
                raise
            return f'{instance}: gone'
        if found.is_destroying:
            return f'{instance}: is being destroyed on {found.record.compute} already'
        commit, done = _transaction(store, found, claimed_on)
        if commit() is None:
            return None
        if found.queue_entry is None:
            failpoint('tombstoned')
        else:
            failpoint('unqueued')
        return done

    return until_accepted(instance, 'destroy', 'the same command again says so', look_and_write)


def _living(store: Store, instance: str, among: Index | None) -> InstanceEntries:
    try:
        found = find(store, instance, among)
        if found is not None and found.record.state in (GONE, ERROR) and found.request_entry is None:
            # Another client may have queued a uuid that was used before.
            entry = waiting_at(store, instance)
            if entry is not None:
                return found._replace(record=read_waiting(entry), queue_entry=entry)
        return found if found is not None and found.record.state != GONE else living(store, instance, among)
    except Unreadable:
        at = find_places(store, instance)
        found = requested(at)
        # What a newer ecomp wrote may name more than a destroy by this one removes.
        if found is None or (at.record is not None and is_newer(at.record.value)):
            raise
        return found


def _transaction(
    store: Store, found: InstanceEntries, claimed_on: Callable[[str], str]
) -> tuple[Callable[[], int | None], str]:
    """What commits it, None where something has changed since; and what is done then, in one sentence."""
    if found.queue_entry is not None:
        return _out_of_queue(store, found, found.queue_entry, claimed_on)
    record, compute = found.record, found.record.compute
    request_key, entry = keys.request(compute, record.instance), found.record_entry
    record_key = entry.key if entry else keys.record(compute, record.instance)
    record_revision = entry.revision if entry else 0
    if record.state == ERROR and found.request_entry is None:
        done = f'{record.instance}: its record is removed; nothing else was left of it'
        return partial(remove_record, store, record_key, record_revision, found), done
    request = found.request
    bare = Request(
        record.instance,
        {},
        user_id=record.user_id,
        project_id=record.project_id,
        # A compute that has not seen the request yet is to free all of it the same.
        name=found.name,
        group=request.group if request else _group_of(store, record),
        left=request.resources if request else record.resources,
    )
    stages = {name: time for name, time in record.stages.items() if time}
    tombstone = to_json(replace(bare, query=record.query, stages=stages))
    if len(tombstone) > SIZE_LIMIT:  # a text that is escaped here may have been a third as long
        tombstone = to_json(bare)
    unchanged = [Unchanged(request_key, found.request_entry.revision if found.request_entry else 0)]
    if found.request_entry is None:
        # Or an instance that ended since its record was read is destroyed a second time: its request is gone, too.
        unchanged.append(Unchanged(record_key, record_revision))
    done = f'{record.instance}: destroy accepted, {compute} carries it out'
    if not is_alive(store, compute):
        done += ' when it is back: it is silent now'
    return partial(store.commit, unchanged, [Put(request_key, tombstone)]), done


def remove_record(store: Store, key: str, revision: int, found: InstanceEntries) -> int | None:
    """Remove the record at `key` of an instance that is over, and its lease, and free its name.

    None, and nothing is removed, where the record's revision is another one, or somebody asks for the instance again.
    """
    record = found.record
    conditions = [Unchanged(key, revision), Unchanged(keys.request(record.compute, record.instance), 0)]
    written = commit_with(store, conditions, [Delete(key)], partial(freed, store, found.name, record.instance))
    if written is not None and found.record_entry is not None:
        quietly_revoke(store, found.record_entry.lease)
    return written


def _group_of(store: Store, record: Record) -> Membership | None:
    """The group of one whose request is gone, or cannot be understood; None where there is nothing to leave."""
    try:
        theirs = group(store, record.group.name)[0] if record.group else None
    except Unreadable:
        return None  # the audit tells of it
    return theirs.membership if theirs is not None else None


def _out_of_queue(
    store: Store, found: InstanceEntries, entry: Entry, claimed_on: Callable[[str], str]
) -> tuple[Callable[[], int | None], str]:
    """Remove a request that waits, whoever is taking it. A record is left of it: a uuid is never used twice.

    That record is a tombstone: a compute that took the instance before etcd was restored carries it out (republish).
    """
    gone, instance = found.record.at(GONE, timestamp(datetime.now(UTC)), 'gone'), found.record.instance
    unchanged = [Unchanged(entry.key, entry.revision)]
    removed = [entry.key, keys.taker(entry.key)]
    own = keys.record('', instance)
    done, seconds = f'{instance}: taken out of its queue', TOMBSTONE_SECONDS
    try:
        compute = claimed_on(instance)
    except EcompError as error:
        done += f'; whether a compute holds a claim for it, and may run it, is not known: {error}'
    else:
        if compute:
            back = '' if is_alive(store, compute) else ' when it is back: it is silent now'
            done += f'; {compute} holds a claim for it, and releases that or destroys it{back}'
        else:
            done, seconds = f'{done}, nothing of it was begun', KEPT[GONE]
    if found.record_entry is not None or store.get(own) is not None:
        return partial(commit_with, store, unchanged, [*map(Delete, removed)], partial(ended, store, gone)), done
    return partial(write_end, store, gone, [*unchanged, Unchanged(own, 0)], removed, seconds=seconds), done


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
    request = found.request
    return frozenset({action_id(found.record.power), request.power.id if request and request.power else ''})


class Cleared(NamedTuple):
    """The instances whose records were removed, each with its last state; and what could not be removed or read."""

    removed: Mapping[str, str]
    errors: list[EcompError]


def clear(store: Store) -> Cleared:
    """Remove the record of each instance that is gone or in error, unless something is still asked for it.

    Errors: those of etcd. What one of them has alone is among Cleared.errors, and so is what ends it once it began.
    """
    records, errors = all_records(store, with_gone=True)
    among = index(store)
    removed = {}
    for each in records:
        if each.state in (GONE, ERROR):
            try:
                if remove(store, find(store, each.instance, among)):
                    removed[each.instance] = each.state
            except NotFound:
                pass  # somebody else has removed it, or its lease has ended
            except Unreachable as error:  # what is removed by now is said all the same
                errors.append(error)
                break
    return Cleared(removed, errors)


def remove(store: Store, found: InstanceEntries | None) -> bool:
    """Remove the record of an instance if it is over, and nothing is asked for it; whether that is so."""
    if found is None or found.record_entry is None or found.request_entry is not None:
        return False
    if found.record.state not in (GONE, ERROR):
        return False
    # Not by a destroy: what lives by now would be destroyed by that.
    return remove_record(store, found.record_entry.key, found.record_entry.revision, found) is not None
