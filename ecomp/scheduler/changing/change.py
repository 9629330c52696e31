"""Destroy, stop, start or reboot instances by rewriting their requests; remove records."""

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

# Tries to write a change, each after a new read; then other processes change the instance too often: Conflict.
TRIES = 5

Answer = TypeVar('Answer')


def until_accepted(instance: str, change: str, cure: str, look_and_write: Callable[[bool], Answer | None]) -> Answer:
    """Call `read_and_write` until it returns a result; None means that its reads were stale.

    Its argument is True once an earlier write had no answer: it then reads whether that write was carried out. Raises
    Conflict after MAX_TRIES, Unreachable if nothing was written, UnknownOutcome (with `cure`, the advice) if an earlier
    write had no answer and etcd is now unreachable, and all other errors of `read_and_write`.
    """
    is_unknown = False
    for _ in range(TRIES):
        try:
            answer = look_and_write(is_unknown)
        except UnknownOutcome:
            is_unknown = True
        except Unreachable as error:
            if not is_unknown:
                message = f'{error}; the {change} of {instance} is not accepted'
                raise type(error)(message, error.backend) from error
            doubt = f'whether the {change} of {instance} is accepted is not known: {cure}'
            raise UnknownOutcome(f'{error}; {doubt}', error.backend) from error
        else:
            if answer is not None:
                return answer
    raise Conflict(f'{instance}: changed by somebody else all the time; try again')


# Seconds for which the record of an instance that was destroyed in its queue is kept if a silent compute may run it.
TOMBSTONE_SECONDS = 30 * 24 * 3600


def destroy(
    store: Store, instance: str, among: Index | None = None, claimed_on: Callable[[str], str] = lambda _: ''
) -> str:
    """Accept the destroy of an instance; return a sentence that says what was done.

    An instance in error has only its record left, which is removed. `key_index`: see find(). `find_claiming_compute`
    asks placement which compute holds the instance's claim ('': none): after a restore of etcd that compute may run
    what waits in a queue. Raises NotFound if the instance is gone or unknown; Unreadable if its record is malformed and
    no compute has a request for it, or the record is of a newer version; and the errors of retry_until_accepted().
    """

    def look_and_write(is_unknown: bool) -> str | None:
        try:
            entries = _living(store, instance, among)
        except NotFound:
            if not is_unknown:
                raise
            return f'{instance}: gone'
        if entries.is_destroying:
            return f'{instance}: is being destroyed on {entries.record.compute} already'
        commit, message = _transaction(store, entries, claimed_on)
        if commit() is None:
            return None
        if entries.queue_entry is None:
            failpoint('tombstoned')
        else:
            failpoint('unqueued')
        return message

    return until_accepted(instance, 'destroy', 'the same command again says so', look_and_write)


def _living(store: Store, instance: str, among: Index | None) -> InstanceEntries:
    try:
        entries = find(store, instance, among)
        if entries is not None and entries.record.state in (GONE, ERROR) and entries.request_entry is None:
            # Another client may have queued a uuid that was used before.
            queue_entry = waiting_at(store, instance)
            if queue_entry is not None:
                return entries._replace(record=read_waiting(queue_entry), queue_entry=queue_entry)
        return entries if entries is not None and entries.record.state != GONE else living(store, instance, among)
    except Unreadable:
        places = find_places(store, instance)
        entries = requested(places)
        # A record of a newer ecomp may name resources that a destroy by this version does not remove.
        if entries is None or (places.record is not None and is_newer(places.record.value)):
            raise
        return entries


def _transaction(
    store: Store, found: InstanceEntries, claimed_on: Callable[[str], str]
) -> tuple[Callable[[], int | None], str]:
    """Prepare a destroy: a function to commit it (None: stale), and the sentence to report."""
    if found.queue_entry is not None:
        return _out_of_queue(store, found, found.queue_entry, claimed_on)
    record, compute = found.record, found.record.compute
    request_key, entry = keys.request(compute, record.instance), found.record_entry
    record_key = entry.key if entry else keys.record(compute, record.instance)
    record_revision = entry.revision if entry else 0
    if record.state == ERROR and found.request_entry is None:
        message = f'{record.instance}: its record is removed; nothing else was left of it'
        return partial(remove_record, store, record_key, record_revision, found), message
    request = found.request
    bare = Request(
        record.instance,
        {},
        user_id=record.user_id,
        project_id=record.project_id,
        # A compute that has not seen the request yet releases all of this, too.
        name=found.name,
        group=request.group if request else _group_of(store, record),
        left=request.resources if request else record.resources,
    )
    stages = {name: time for name, time in record.stages.items() if time}
    tombstone = to_json(replace(bare, query=record.query, stages=stages))
    if len(tombstone) > SIZE_LIMIT:  # dump() escapes text, which makes it up to three times as long
        tombstone = to_json(bare)
    unchanged = [Unchanged(request_key, found.request_entry.revision if found.request_entry else 0)]
    if found.request_entry is None:
        # Otherwise an instance that ended since its record was read, and has no request either, is destroyed again.
        unchanged.append(Unchanged(record_key, record_revision))
    message = f'{record.instance}: destroy accepted, {compute} carries it out'
    if not is_alive(store, compute):
        message += ' when it is back: it is silent now'
    return partial(store.commit, unchanged, [Put(request_key, tombstone)]), message


def remove_record(store: Store, key: str, revision: int, found: InstanceEntries) -> int | None:
    """Delete a finished instance's record at `key`, revoke its lease and release its name.

    Returns the new revision, or None (no change) if the record has another revision or a request exists.
    """
    record = found.record
    conditions = [Unchanged(key, revision), Unchanged(keys.request(record.compute, record.instance), 0)]
    written = commit_with(store, conditions, [Delete(key)], partial(freed, store, found.name, record.instance))
    if written is not None and found.record_entry is not None:
        quietly_revoke(store, found.record_entry.lease)
    return written


def _group_of(store: Store, record: Record) -> Membership | None:
    """Read a record's group; None if there is no group to leave, or its key is malformed."""
    try:
        current_group = group(store, record.group.name)[0] if record.group else None
    except Unreadable:
        return None  # the audit reports it
    return current_group.membership if current_group is not None else None


def _out_of_queue(
    store: Store, found: InstanceEntries, entry: Entry, claimed_on: Callable[[str], str]
) -> tuple[Callable[[], int | None], str]:
    """Prepare to remove a request from its queue, even if a compute is taking it.

    A record remains, as a uuid is never used twice. A compute that took the instance before a restore of etcd finds the
    record when it publishes, and carries the destroy out.
    """
    gone, instance = found.record.at(GONE, timestamp(datetime.now(UTC)), 'gone'), found.record.instance
    conditions = [Unchanged(entry.key, entry.revision)]
    removed = [entry.key, keys.taker(entry.key)]
    record_key = keys.record('', instance)
    message, seconds = f'{instance}: taken out of its queue', TOMBSTONE_SECONDS
    try:
        compute = claimed_on(instance)
    except EcompError as error:
        message += f'; whether a compute holds a claim for it, and may run it, is not known: {error}'
    else:
        if compute:
            back = '' if is_alive(store, compute) else ' when it is back: it is silent now'
            message += f'; {compute} holds a claim for it, and releases that or destroys it{back}'
        else:
            message, seconds = f'{message}, nothing of it was begun', KEPT[GONE]
    if found.record_entry is not None or store.get(record_key) is not None:
        return partial(commit_with, store, conditions, [*map(Delete, removed)], partial(ended, store, gone)), message
    return partial(write_end, store, gone, [*conditions, Unchanged(record_key, 0)], removed, seconds=seconds), message


WHY_NOT = {
    'queued': 'waits for a compute to take it',
    'scheduled': 'is not built yet: wait for it',
    'building': 'is being built: wait for it',
    'destroying': 'is being destroyed',
    ERROR: 'is in error, and nothing of it is left: destroy removes its record',
}


class Acceptance(NamedTuple):
    """The answer to a power change; `power` is None if there is nothing to wait for.

    `previous_ids` are the ids that the record's `power` may still have from earlier changes.
    """

    said: str
    power: Power | None = None
    before: frozenset[str] = frozenset()


def power(store: Store, instance: str, wanted: Power, among: Index | None = None) -> Acceptance:
    """Write a power change into the request; change nothing if it is done or requested already.

    `key_index`: see find(). Raises NotFound, Unreadable (the record); Conflict if the instance is neither active nor
    stopped, has no valid request or is being destroyed; and the errors of retry_until_accepted().
    """

    def look_and_write(_: bool) -> Acceptance | None:
        entries = living(store, instance, among)
        entry, request = _request(entries)
        earlier = _already(store, entries, request, wanted)
        if earlier is not None:
            return earlier
        accepted = _accepted(store, entries, wanted)  # before the commit: nothing may fail after it
        if store.commit([Unchanged(entry.key, entry.revision)], [_rewritten(entries, entry, wanted)]) is None:
            return None
        failpoint('power-asked')
        return accepted

    return until_accepted(instance, wanted.action, 'show says what it is', look_and_write)


def _request(found: InstanceEntries) -> tuple[Entry, Request]:
    """Read the request of an instance; Conflict unless its power can be changed."""
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
    record, previous = found.record, request.power
    if previous is not None and previous.id == wanted.id:
        return _accepted(store, found, wanted)  # committed by an earlier try whose answer was lost
    if previous is not None and not previous.is_done(record.power):
        message = f'{record.instance}: {wanted.action} was asked for before, {record.compute} is at it'
        return Acceptance(message, previous, _before(found)) if previous.action == wanted.action else None
    if (wanted.action, record.state) in ((STOP, STOPPED), (START, ACTIVE)):
        return Acceptance(f'{record.instance}: is {record.state} already')
    return None


def _rewritten(found: InstanceEntries, entry: Entry, wanted: Power) -> Put:
    """Return the request with the power change added; Conflict if that would be invalid."""
    value = dump({**load_object(entry.value), 'power': wanted._asdict()})
    parsed = parse_request(found.record.compute, entry.key, value.encode())
    if isinstance(parsed, Invalid):
        raise Conflict(f'{found.record.instance}: its request takes no more: {parsed.reason}')
    return Put(entry.key, value)


def _accepted(store: Store, found: InstanceEntries, wanted: Power) -> Acceptance:
    instance, compute = found.record.instance, found.record.compute
    message = f'{instance}: {wanted.action} accepted, {compute} carries it out'
    if not is_alive(store, compute):
        message += ' when it is back: it is silent now'
    return Acceptance(message, wanted, _before(found))


def _before(found: InstanceEntries) -> frozenset[str]:
    request = found.request
    return frozenset({action_id(found.record.power), request.power.id if request and request.power else ''})


class Cleared(NamedTuple):
    """The last state of each instance whose record was removed, and the errors that occurred."""

    removed: Mapping[str, str]
    errors: list[EcompError]


def clear(store: Store) -> Cleared:
    """Remove the records of all instances that are gone or in error and have no request.

    Malformed records, and an Unreachable that ends the removal, are in the result. Raises Unreachable before the first
    removal, and Unreadable if a record becomes malformed later.
    """
    records, errors = all_records(store, with_gone=True)
    key_index = index(store)
    removed = {}
    for record in records:
        if record.state in (GONE, ERROR):
            try:
                if remove(store, find(store, record.instance, key_index)):
                    removed[record.instance] = record.state
            except NotFound:
                pass  # it was removed concurrently, or its lease expired
            except Unreachable as error:  # the caller still reports what was removed before
                errors.append(error)
                break
    return Cleared(removed, errors)


def remove(store: Store, found: InstanceEntries | None) -> bool:
    """Remove a finished instance's record; return False if it has a request or has changed."""
    if found is None or found.record_entry is None or found.request_entry is not None:
        return False
    if found.record.state not in (GONE, ERROR):
        return False
    # No destroy: that would destroy an instance that was created under this uuid since it was read.
    return remove_record(store, found.record_entry.key, found.record_entry.revision, found) is not None
