"""Destroy, stop, start or reboot instances by rewriting their requests, and remove records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple, TypeVar

from ecomp.errors import Conflict, EcompError, NotFound, UnknownOutcome, Unreachable, Unreadable, put_before_fix
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.group import Membership
from ecomp.model.guest import UNDEFINED
from ecomp.model.json_object import dump, load_object
from ecomp.model.order import (
    MAX_REQUEST_BYTES,
    START,
    STOP,
    InvalidRequest,
    PowerAction,
    Request,
    parse_action_id,
    parse_request,
)
from ecomp.model.record import Record
from ecomp.model.states import ACTIVE, ERROR, GONE, RETENTION_SECONDS, STOPPED
from ecomp.model.stored import encode, is_newer, to_dict
from ecomp.model.text import format_time
from ecomp.scheduler.queries.find import (
    InstanceEntries,
    find,
    find_living,
    find_queue_entry,
    from_request,
    read_queued_record,
)
from ecomp.scheduler.queries.stacks import make_end
from ecomp.shared.attempts import is_alive
from ecomp.shared.ends import release_shared_keys, write_final_record
from ecomp.shared.names import Change, commit_with_shared, load_group, merge_changes, release_name, try_revoke
from ecomp.shared.places import KeyIndex, find_by_listing
from ecomp.store.client import Delete, Entry, Put, Settlement, Store, Touch, Unchanged

# Tries to write a change, each after a new read; then other processes change the instance too often: Conflict.
MAX_TRIES = 5

RECORD_REMOVED = 'its record is removed; nothing else remains'

Answer = TypeVar('Answer')
# What was read of each write that may have been done, and whose effect was replaced or removed since. Its append() is
# a Settlement's find_commit: it returns None, so that the caller reads again.
Doubts = list[Mapping[str, Entry]]


def retry_until_accepted(instance: str, change: str, cure: str, try_once: Callable[[Doubts], Answer | None]) -> Answer:
    """Repeat `try_once` while it returns None (stale reads), or raise Conflict after MAX_TRIES.

    An Unreachable becomes UnknownOutcome if an earlier write may have been done.
    """
    doubts: Doubts = []
    for _ in range(MAX_TRIES):
        try:
            answer = try_once(doubts)
        except Unreachable as error:
            if doubts or isinstance(error, UnknownOutcome):
                doubt = f'; it is unknown whether the {change} of {instance} is accepted. Try: {cure}'
                raise UnknownOutcome(put_before_fix(str(error), doubt), error.backend) from error
            message = put_before_fix(str(error), f'; the {change} of {instance} is not accepted')
            raise type(error)(message, error.backend) from error
        if answer is not None:
            return answer
    raise Conflict(f'{instance}: other processes keep changing it. Try: the same command again')


# Seconds for which the record of an instance that was destroyed in its queue is kept if a silent compute may run it.
DESTROYED_RECORD_SECONDS = 30 * 24 * 3600


def destroy(
    store: Store,
    instance: str,
    key_index: KeyIndex | None = None,
    find_claiming_compute: Callable[[str], str] = lambda _: '',
    releases: bool = False,
) -> str:
    """Accept the destroy of an instance, or raise Conflict if protected, and return a sentence.

    Its compute carries it out later. Here, a queued instance leaves its queue, and an error record that has no request
    is removed. With `releases`, accept the release of an adopted instance instead. `find_claiming_compute` returns the
    compute that claims a queued instance, or ''.

    Raises:
        NotFound: the instance is gone or unknown, and no lost answer of this call may have destroyed it.
    """

    def read_and_write(doubts: Doubts) -> str | None:
        try:
            entries = _find_destroyable(store, instance, key_index)
        except NotFound:
            if not doubts:
                raise
            return f'{instance}: gone'
        if entries.is_destroying:
            new = entries.request.replaced_by if entries.request else None
            successor = f'; it was evacuated, and instance {new} replaces it' if new else ''
            return f'{instance}: is already being destroyed on {entries.record.compute}{successor}'
        _require_kind(entries.record, releases)
        if not releases and entries.request is not None:
            require_unprotected(entries.request)
        commit, message = _prepare_destroy(store, entries, find_claiming_compute, doubts)
        if commit() is None:
            return None
        if entries.queue_entry is None:
            failpoint('tombstoned')
        else:
            failpoint('unqueued')
        return message

    return retry_until_accepted(instance, 'destroy', 'the same command again', read_and_write)


def _require_kind(record: Record, releases: bool) -> None:
    """Raise Conflict for a destroy of an adopted instance, or a release of another one."""
    if record.is_adopted and not releases and record.state != ERROR:
        cure = f'eschedule release {record.instance}, then virsh undefine on its host'
        raise Conflict(f'{record.instance}: is adopted, so ecomp does not delete its domain. Fix: {cure}')
    if releases and not record.is_adopted:
        cure = f'eschedule destroy {record.instance}, which deletes it with its disk'
        raise Conflict(f'{record.instance}: was not adopted, but created by ecomp. Try: {cure}')


def require_unprotected(request: Request) -> None:
    """Raise Conflict if the request, which the caller compares, protects the instance."""
    if request.is_protected:
        instance = request.instance
        raise Conflict(f'{instance}: is protected, and is kept. Fix: eschedule unprotect {instance}')


def _find_destroyable(store: Store, instance: str, key_index: KeyIndex | None) -> InstanceEntries:
    """Find a uuid that is not gone, even with a bad record, or raise NotFound or Unreadable."""
    try:
        entries = find(store, instance, key_index)
        if entries is not None and entries.record.state in (GONE, ERROR) and entries.request_entry is None:
            # Another client may have queued a uuid that was used before.
            queue_entry = find_queue_entry(store, instance)
            if queue_entry is not None:
                return entries._replace(record=read_queued_record(queue_entry), queue_entry=queue_entry)
        return (
            entries if entries is not None and entries.record.state != GONE else find_living(store, instance, key_index)
        )
    except Unreadable:
        places = find_by_listing(store, instance)
        entries = from_request(places)
        # A record of a newer ecomp may name resources that a destroy by this version does not remove.
        if entries is None or (places.record is not None and is_newer(Record, places.record.value)):
            raise
        return entries


def _prepare_destroy(
    store: Store, entries: InstanceEntries, find_claiming_compute: Callable[[str], str], doubts: Doubts
) -> tuple[Callable[[], int | None], str]:
    """Return a function that commits the destroy, or returns None if outdated, and a sentence."""
    if entries.queue_entry is not None:
        return _prepare_dequeue(store, entries, entries.queue_entry, find_claiming_compute, doubts)
    record, compute = entries.record, entries.record.compute
    if record.state == ERROR and entries.request_entry is None:
        message = f'{record.instance}: {RECORD_REMOVED}'
        record_key = entries.record_entry.key if entries.record_entry else keys.record(compute, record.instance)
        revision = entries.record_entry.revision if entries.record_entry else 0
        return partial(remove_record, store, record_key, revision, entries), message
    conditions, tombstone = make_tombstone(store, entries)
    place = entries.request.stack if entries.request else record.stack
    stack_conditions, stack_puts = make_end(store, place, record.instance)
    message = describe_acceptance(store, record, 'release' if record.is_adopted else 'destroy')
    compared = entries.request_entry or entries.record_entry
    settlement = Settlement(Touch(compared.key) if compared else None, doubts.append)
    return partial(store.commit, [*conditions, *stack_conditions], [tombstone, *stack_puts], settlement), message


def make_tombstone(store: Store, entries: InstanceEntries, successor: str | None = None) -> tuple[list[Unchanged], Put]:
    """Return a destroy's conditions (request or, without one, record unchanged) and its write."""
    record, entry = entries.record, entries.record_entry
    request_key = keys.request(record.compute, record.instance)
    request = entries.request
    # A compute that has not seen the request yet releases what all of these fields hold.
    fields = record.copy_recorded_fields(
        image=None,
        stages={name: time for name, time in record.stages.items() if time},
        group=request.group if request else _read_membership(store, record),
        name=entries.name,
        stack=request.stack if request else record.stack,
        replaces=None,
        replaced_by=successor,
    )
    destroy = Request(allocations={}, former_resources=request.resources if request else record.resources, **fields)
    tombstone = encode(destroy, **store.make_stamp())
    if len(tombstone) > MAX_REQUEST_BYTES:  # dump() escapes text, which makes it up to three times as long
        tombstone = encode(replace(destroy, query=None, stages={}))
    conditions = [Unchanged(request_key, entries.request_entry.revision if entries.request_entry else 0)]
    if entries.request_entry is None:
        # Otherwise an instance that ended since its record was read, and has no request either, is destroyed again.
        record_key = entry.key if entry else keys.record(record.compute, record.instance)
        conditions.append(Unchanged(record_key, entry.revision if entry else 0))
    return conditions, Put(request_key, tombstone)


def remove_record(store: Store, key: str, revision: int, entries: InstanceEntries) -> int | None:
    """Delete a record, its lease and its name, or return None if it was changed or requested.

    The caller has checked that the instance has finished.
    """
    record = entries.record
    conditions = [Unchanged(key, revision), Unchanged(keys.request(record.compute, record.instance), 0)]

    def make_change() -> Change:
        release = release_name(store, record.name, record.instance)
        return merge_changes(release, make_end(store, record.stack, record.instance))

    settlement = Settlement(Touch(key), lambda current: None if key in current else revision)
    written = commit_with_shared(store, conditions, [Delete(key)], make_change, settlement=settlement)
    if written is not None and entries.record_entry is not None:
        try_revoke(store, entries.record_entry.lease)
    return written


def _read_membership(store: Store, record: Record) -> Membership | None:
    try:
        current_group = load_group(store, record.group.name)[0] if record.group else None
    except Unreadable:
        return None  # the audit reports it
    return current_group.membership if current_group is not None else None


def _prepare_dequeue(
    store: Store, entries: InstanceEntries, entry: Entry, find_claiming_compute: Callable[[str], str], doubts: Doubts
) -> tuple[Callable[[], int | None], str]:
    """Return a function that ends a queued request, even one being taken, and a sentence."""
    gone, instance = entries.record.enter_state(GONE, format_time(datetime.now(UTC)), 'gone'), entries.record.instance
    conditions, removed = [Unchanged(entry.key, entry.revision)], [entry.key, keys.taker(entry.key)]
    record_key = keys.record('', instance)
    message, seconds = f'{instance}: removed from its queue', DESTROYED_RECORD_SECONDS
    try:
        compute = find_claiming_compute(instance)
    except EcompError as error:
        message += f'; it is unknown whether a compute holds a claim for it and may run it: {error}'
    else:
        if compute:
            # After a restore of etcd this compute may be running it.
            message += f'; {compute} holds a claim for it, and releases the claim, or destroys the instance if it runs'
            message += f' there{describe_delay(store, compute)}'
        else:
            message, seconds = f'{message}; nothing was started', RETENTION_SECONDS[GONE]
    if entries.record_entry is not None or store.get(record_key) is not None:
        release, settlement = partial(release_shared_keys, store, gone), Settlement(Touch(entry.key), doubts.append)
        deletes = [*map(Delete, removed)]
        return partial(commit_with_shared, store, conditions, deletes, release, settlement=settlement), message
    # A compute that took the instance before a restore of etcd finds this record, and destroys the guest.
    conditions.append(Unchanged(record_key, 0))
    return partial(write_final_record, store, gone, conditions, removed, lease_seconds=seconds), message


POWER_REFUSALS = {
    'queued': 'is queued: no compute has taken it yet',
    'scheduled': 'is not built yet. Fix: wait until it is active',
    'building': 'is being built. Fix: wait until it is active',
    'destroying': 'is being destroyed',
    ERROR: 'is in error, and only its record remains. Fix: remove the record with `eschedule destroy`',
}


class Acceptance(NamedTuple):
    """The answer to a power change, and the `power` that callers wait for, if there is one."""

    message: str
    power: PowerAction | None = None
    # Until that is carried out, the record may have one of these action ids.
    previous_ids: frozenset[str] = frozenset()


def change_power(store: Store, instance: str, power: PowerAction, key_index: KeyIndex | None = None) -> Acceptance:
    """Write a power change into the request, in place of a pending other one.

    Nothing is written if the same action is pending, or has no effect. A user's action always replaces that of a drain.
    """

    def read_and_write(doubts: Doubts) -> Acceptance | None:
        entries = find_living(store, instance, key_index)
        entry, request = require_changeable_request(entries)
        if entries.record.is_adopted and entries.record.fault == UNDEFINED and power.action != START:
            cure = 'make it persistent on its host, with virsh dumpxml and virsh define'
            raise Conflict(f'{instance}: its domain is transient: once it is off, it is gone. Fix: {cure}')
        earlier = _match_earlier_change(store, entries, request, power)
        if earlier is not None:
            return earlier
        accepted = _make_acceptance(store, entries, power)  # before the commit: nothing may fail after it
        put = merge_into_request(entries, entry, {'power': to_dict(power), **store.make_stamp()})
        settlement = Settlement(Touch(entry.key), doubts.append)
        if store.commit([Unchanged(entry.key, entry.revision)], [put], settlement) is None:
            return None
        failpoint('power-asked')
        return accepted

    return retry_until_accepted(instance, power.action, f'eschedule show {instance}', read_and_write)


def require_changeable_request(entries: InstanceEntries) -> tuple[Entry, Request]:
    record, entry = entries.record, entries.request_entry
    if record.state not in (ACTIVE, STOPPED):
        raise Conflict(f'{record.instance}: {POWER_REFUSALS.get(record.state, f"is {record.state}")}')
    if entry is None:
        raise Conflict(f'{record.instance}: its request was removed, so {record.compute} does not change the guest')
    request = parse_request(record.compute, entry.key, entry.value)
    if isinstance(request, InvalidRequest):
        raise Conflict(f'{record.instance}: its request is malformed: {request.reason}')
    if request.is_tombstone:
        raise Conflict(f'{record.instance}: {POWER_REFUSALS["destroying"]}')
    return entry, request


def _match_earlier_change(
    store: Store, entries: InstanceEntries, request: Request, power_change: PowerAction
) -> Acceptance | None:
    """Return the answer if an earlier change makes a write needless, else None."""
    record, previous = entries.record, request.power
    if previous is not None and previous.id == power_change.id:
        return _make_acceptance(store, entries, power_change)  # committed by an earlier try whose answer was lost
    if previous is not None and previous.reason and not power_change.reason:
        return None  # also the same action: what a user asks for is not reverted by `host enable --start`
    if previous is not None and not previous.is_done(record.power):
        if previous.action != power_change.action:
            return None
        message = f'{record.instance}: {power_change.action} was requested before; {record.compute} is carrying it out'
        return Acceptance(message, previous, list_previous_ids(entries.record, entries.request))
    if (power_change.action, record.state) in ((STOP, STOPPED), (START, ACTIVE)):
        return Acceptance(f'{record.instance}: is already {record.state}')
    return None


def merge_into_request(entries: InstanceEntries, entry: Entry, change: Mapping[str, object]) -> Put:
    value = dump({**load_object(entry.value), **change})
    parsed = parse_request(entries.record.compute, entry.key, value.encode())
    if isinstance(parsed, InvalidRequest):
        raise Conflict(f'{entries.record.instance}: its request is invalid with this change: {parsed.reason}')
    return Put(entry.key, value)


def _make_acceptance(store: Store, entries: InstanceEntries, power_change: PowerAction) -> Acceptance:
    message = describe_acceptance(store, entries.record, power_change.action)
    return Acceptance(message, power_change, list_previous_ids(entries.record, entries.request))


def describe_acceptance(store: Store, record: Record, change: str) -> str:
    delay = describe_delay(store, record.compute)
    return f'{record.instance}: {change} accepted; {record.compute} carries it out{delay}'


def describe_delay(store: Store, compute: str) -> str:
    return '' if is_alive(store, compute) else ' once this compute is no longer silent'


def list_previous_ids(record: Record, request: Request | None) -> frozenset[str]:
    return frozenset({parse_action_id(record.power), request.power.id if request and request.power else ''})


def remove_finished(store: Store, instance: str, key_index: KeyIndex | None = None) -> str:
    """Remove the record of an instance that is gone or in error, or raise Conflict."""
    # No destroy: that would destroy an instance that was created under this uuid since it was read.
    with suppress(NotFound):  # it was removed concurrently, or its lease expired
        entries = find(store, instance, key_index)
        if entries is not None and (
            entries.record_entry is None
            or entries.request_entry is not None
            or entries.record.state not in (GONE, ERROR)
            or remove_record(store, entries.record_entry.key, entries.record_entry.revision, entries) is None
        ):
            cure = f'Try: eschedule show {instance}'
            raise Conflict(f'{instance}: was requested again since it ended, so its record is kept. {cure}')
    return f'{instance}: {RECORD_REMOVED}'
