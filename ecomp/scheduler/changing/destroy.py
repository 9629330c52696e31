"""Accept a destroy: the request's key is rewritten as a tombstone, which its compute carries out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from ecomp.errors import EcompError, NotFound, Unreadable
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.group import Membership
from ecomp.model.order import SIZE_LIMIT, Request, to_json
from ecomp.model.record import ERROR, GONE, KEPT, Record, is_newer, timestamp
from ecomp.scheduler.changing.accept import until_accepted
from ecomp.scheduler.looking.find import InstanceEntries, find, living, read_waiting, requested, waiting_at
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged, is_alive
from ecomp.store.places import Index, places
from ecomp.store.sharing import commit_with, ended, freed, group, quietly_revoke, write_end

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
        at = places(store, instance)
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
