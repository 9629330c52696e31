"""The records of a compute's instances, and how they are republished to a restored etcd."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ecomp.agent.host.state import Memory, MemoryEntry
from ecomp.errors import EcompError, GenerationConflict, NoSpace, UnknownOutcome, Unreachable, Unreadable
from ecomp.failpoints import failpoint
from ecomp.metrics import TALLY
from ecomp.model import keys, states
from ecomp.model import record as records
from ecomp.model.allocation import describe_difference, find_compute
from ecomp.model.order import InvalidRequest, Request, get_holdings, parse_request
from ecomp.model.queue import QueueEntry, parse_queue_entry
from ecomp.model.record import Record, from_json
from ecomp.model.states import ACTIVE, BUILDING, DESTROYING, ERROR, GONE, STOPPED
from ecomp.model.stored import encode, is_newer
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.shared import ends, names
from ecomp.shared.names import Change
from ecomp.shared.places import find_by_listing
from ecomp.store.client import Delete, Entry, Exists, Put, Settlement, Store, Unchanged, retry_until_committed

log = logging.getLogger(__name__)


class Superseded(Exception):
    """The request changed during the task: plan again."""


class RecordEntry(NamedTuple):
    """A cached record (None: none, or malformed), and the revision of its key (0: absent)."""

    record: Record | None = None
    revision: int = 0


class Records:
    """The records of one compute's instances, as last read or written.

    A record is written only while its request is unchanged (rule: compared-revision). Every write may raise Superseded
    or Unreachable, after which the record is read again. To read a malformed record raises Unreadable.
    """

    def __init__(self, compute: str, store: Store, memory: Memory) -> None:
        self._compute, self._store, self._memory = compute, store, memory
        self._cache: dict[str, RecordEntry] = {}

    def get(self, instance: str) -> Record | None:
        """Return the record from the cache or etcd, None without one, or raise Unreadable."""
        cached = self._cache.get(instance, RecordEntry())
        if cached.record is None:
            cached = self._read(instance)
            if cached.record is not None:
                self._cache[instance] = cached
        return cached.record

    def require(self, instance: str) -> Record:
        """Return the instance's record, or raise Superseded if there is none, or Unreadable."""
        if (record := self.get(instance)) is None:
            raise Superseded
        return record

    def get_to_end(self, instance: str) -> Record | None:
        """Return the record, or None also for a malformed one, which the end then overwrites."""
        try:
            return self.get(instance)
        except Unreadable as error:
            if (stored := self._store.get(self._get_key(instance))) is not None:
                if is_newer(Record, stored.value):
                    raise
                self._cache[instance] = RecordEntry(None, stored.revision)
                log.warning('instance %s is destroyed although its record is malformed: %s', instance, error)
            return None

    def forget(self, instance: str) -> None:
        self._cache.pop(instance, None)

    def recheck(self, parsed_requests: Mapping[str, Request | InvalidRequest]) -> list[str]:
        """Forget and return the cached instances whose records other processes changed."""
        to_check = {name: cached for name in parsed_requests if (cached := self._cache.get(name)) is not None}
        if not to_check:
            return []
        prefix, own = self._get_key(''), set(map(self._get_key, to_check))
        entries = self._store.snapshot(prefix, True, lambda entry: entry if entry.key in own else None).entries
        # The cache has a new entry if the record was written during the snapshot.
        same = [(name, cached) for name, cached in to_check.items() if self._cache.get(name) is cached]
        changed = [name for name, cached in same if get_revision(entries.get(self._get_key(name))) != cached.revision]
        for instance in changed:
            self.forget(instance)
        # The others are saved in the state directory if they could not be saved there before.
        for instance in to_check.keys() - set(changed):
            parsed, record = parsed_requests[instance], to_check[instance].record
            if not isinstance(parsed, Request) or parsed.is_tombstone:
                continue
            if record is not None and record.state in (ACTIVE, STOPPED):
                self._memory.repair(parsed, record)
        return changed

    def write(
        self,
        record: Record,
        revision: int,
        extra: Collection[Put | Delete] = (),
        make_change: Callable[[], Change] = names.make_empty_change,
    ) -> Record:
        """Put the record, with `extra` in one transaction, while the request is at `revision`.

        `make_change` is for shared keys that are written with it. A `revision` of 0 means that there is no request.
        """
        instance = record.instance
        unchanged = self._make_condition(instance)
        operations = [Put(unchanged.key, encode(record)), *extra]
        commit = partial(names.commit_with_shared, self._store, operations=operations, make_change=make_change)
        written = self._commit(instance, revision, lambda host: commit([host, unchanged]))
        observe_stages(self._cache.get(instance, RecordEntry()).record, record)
        self._cache[instance] = RecordEntry(record, written)
        if record.state in (ACTIVE, STOPPED, DESTROYING):
            self._memory.remember(None, record)
        return record

    def require_revision(self, instance: str, revision: int) -> None:
        """Raise Superseded unless the request is at `revision` now."""
        self._commit(instance, revision, lambda host: self._store.commit([host], []))

    def remove_stale_address(self, instance: str, revision: int, is_here: bool) -> None:
        """Delete the address at /booted that an instance without a record may have left."""
        # The end of an instance without a record does not delete it. Unless `is_here`, it was not built here, so
        # only an address that this compute remembers is deleted. The address of a running guest is written again later.
        remembered = self._memory.get_entries().get(instance)
        may_have_address = is_here or (remembered is not None and 'addressed' in remembered.record.stages)
        if may_have_address and not self._find_other_request(instance):
            booted = Delete(keys.address(instance))
            self._commit(instance, revision, lambda host: self._store.commit([host], [booted]))

    def end(self, record: Record, revision: int) -> None:
        """Write the last record, and release the instance's keys, in one transaction.

        The record is on a lease, to which the name of an instance in error moves. If another compute has a request for
        such an instance, name, group and quota stay for that request.
        """
        instance = record.instance
        removed = [keys.request(self._compute, instance)]
        if 'addressed' in record.stages:
            removed.append(keys.address(instance))
        # Another compute that has a request for it uses what it shares, so a failure here releases none of that.
        other_requests = self._find_other_request(instance) if record.state == ERROR else []
        # As a condition, or two computes that fail concurrently would each leave it to the other.
        conditions: list[Unchanged | Exists] = [self._make_condition(instance), *other_requests]

        def write(host: Unchanged) -> int | None:
            return ends.write_final_record(self._store, record, [host, *conditions], removed, not other_requests)

        try:
            self._commit(instance, revision, write)
        except NoSpace as error:
            if record.state == ERROR:
                raise
            # A full etcd takes deletes only, which make room. Group and quota are left to the audit.
            name_conditions, change = names.release_name(self._store, record.name, instance)
            conditions += name_conditions
            operations = [*map(Delete, (self._get_key(instance), *removed)), *change]
            self._commit(instance, revision, lambda host: self._store.commit([host, *conditions], operations))
            log.warning('instance %s has finished, but without a record of its end: %s', instance, error)
        failpoint('ended')
        self.forget(instance)
        self._memory.record_end(instance)

    def drop_request(self, instance: str, revision: int, kept_name: str | None) -> None:
        """Delete an ended instance's request, and the name in it unless it is `kept_name`."""
        key = keys.request(self._compute, instance)
        entry = self._store.get(key)
        name = get_holdings(parse_request(self._compute, key, entry.value)).name if entry is not None else None
        # A failed instance keeps its name. A malformed request may have got a name when it was rewritten.
        unchanged, change = names.release_name(self._store, name, instance) if name != kept_name else ([], [])
        operations = [Delete(key), *change]
        # The record may have been removed, and its uuid used again: then this is another instance's request.
        conditions = [*unchanged, self._make_condition(instance)]
        self._commit(instance, revision, lambda host: self._store.commit([host, *conditions], operations))

    def _commit(self, instance: str, revision: int, commit: Callable[[Unchanged], int | None]) -> int:
        """Return the revision of a commit while the request is at `revision`, or raise Superseded."""
        try:
            written = commit(Unchanged(keys.request(self._compute, instance), revision))
        except UnknownOutcome:
            self.forget(instance)  # it may have been written: read it again
            raise
        if written is None:
            self.forget(instance)
            raise Superseded
        return written

    def _get_key(self, instance: str) -> str:
        return keys.record(self._compute, instance)

    def _read(self, instance: str) -> RecordEntry:
        # Never below another compute: a record is trusted only for the compute that its key names.
        key = self._get_key(instance)
        if (entry := self._store.get(key)) is None:
            return RecordEntry()
        try:
            return RecordEntry(from_json(entry.value, instance, self._compute), entry.revision)
        except ValueError as error:
            raise Unreadable(key, error) from error

    def _find_other_request(self, instance: str) -> list[Exists]:
        # One key, with any value, is enough (rule: limited-trust): it may be rewritten, and etcd takes 128 conditions.
        all_requests = find_by_listing(self._store, instance).requests
        others = sorted(compute for compute in all_requests if compute != self._compute and keys.is_uuid(compute))
        return [Exists(all_requests[compute].key) for compute in others[:1]]

    def _make_condition(self, instance: str) -> Unchanged:
        return Unchanged(self._get_key(instance), self._cache.get(instance, RecordEntry()).revision)


def observe_stages(previous: Record | None, record: Record) -> None:
    """Count the times from stage to stage, for the stages that `previous` does not have."""
    times = [(stage, record.stages[stage]) for stage in states.STAGES if stage in record.stages]
    for (_, begin), (stage, end) in pairwise(times):
        if previous is not None and stage not in previous.stages:
            with suppress(ValueError, TypeError):  # an eschedule wrote the first times, or another program
                duration = datetime.fromisoformat(end) - datetime.fromisoformat(begin)
                TALLY.observe('ecomp_stage_duration_seconds', stage, duration.total_seconds())


def get_revision(entry: Entry | None) -> int:
    return entry.revision if entry is not None else 0


# Tries of a write that loses its race.
MAX_TRIES = 5

END_STATES = frozenset({GONE, ERROR})
ENDED_BEFORE_FAULT = 'it had finished before etcd was restored'
CLAIMED_ELSEWHERE = (
    'instance %s is claimed on compute %s, but has a guest here, too: this guest is kept, but not managed. '
    'Fix: compare both guests, then remove the domain on this host manually'
)


@dataclass(frozen=True)
class EtcdView:
    """etcd's data of an instance, and whether it was destroyed while it waited in a queue."""

    request: Request | InvalidRequest | None = None
    record: Record | None = None
    was_destroyed: bool = False

    def is_finished(self, compute: str) -> bool:
        """Return whether the record is an instance's last one, or another compute's."""
        # An end in etcd was written after what is remembered.
        return self.record is not None and (self.record.compute != compute or self.record.state in END_STATES)


@dataclass(frozen=True)
class Publish:
    """The decision to claim for `claim`, if any, then to write the record and `request`, if any."""

    request: Request | None
    record: Record
    claim: Request | None


@dataclass(frozen=True)
class Drop:
    """The decision to forget an instance: nothing of it is here, and etcd has no request."""


def decide_republish(compute: str, remembered: MemoryEntry, is_here: bool, view: EtcdView) -> Publish | Drop | None:
    """Decide what of a remembered instance an older etcd lacks: Publish, Drop or None (nothing)."""
    present = view.request
    if view.is_finished(compute) or isinstance(present, InvalidRequest) or (present and present.is_tombstone):
        return None
    request, record = remembered.request, remembered.record
    if record.state == BUILDING and view.record is not None and view.record.state in (ACTIVE, STOPPED):
        record = view.record  # it reached that state, which could not be remembered here
    if record.state == DESTROYING or (view.was_destroyed and present is None):
        # Its destroy was accepted: here, where it may be half done, or when it waited again in a restored queue.
        request = replace(request, name=record.name, former_resources=request.resources)
        return Publish(replace(request, allocations={}, image=None), record, None)
    if present is None and not is_here and 'started' in record.stages:  # neither its domain nor its disk is left
        return Drop()
    parsed = request if present is None else None
    if present is not None and present.change_number < request.change_number:
        # It was changed after the backup of this etcd, in which it may have been stopped or started since.
        parsed = replace(request, power=request.power or present.power)
    elif present is not None and present.rebuild < request.rebuild and not record.has_rebuilt(request.rebuild):
        parsed = replace(present, rebuild=request.rebuild, image=request.image)  # its disk may be removed already
    elif present is not None and request.power not in (None, present.power):
        parsed = replace(present, power=request.power)  # otherwise an older power action would be repeated
    record = records.copy_changes(record, parsed or present or request)
    return Publish(parsed, record, request if is_here else None)


def make_end_record(compute: str, etcd_view: EtcdView, now: str) -> Record | None:
    """Make the last record of an instance that ended here, if etcd has its request but no end."""
    if not isinstance(etcd_view.request, Request) or etcd_view.request.is_tombstone or etcd_view.is_finished(compute):
        return None
    record = etcd_view.record or records.make_record(compute, etcd_view.request, now)
    record = records.copy_holdings(record, etcd_view.request)
    return replace(record.enter_state(GONE, now, 'gone'), fault=ENDED_BEFORE_FAULT)


def republish(
    compute: str, store: Store, placement: Placement, memory: Memory, local_instances: Collection[str], now: str
) -> None:
    """Write all remembered instances to a new etcd, and end those again that had ended.

    `local_instances` have a domain or a disk on this host. An instance is skipped if its record is unreadable, or if it
    is claimed on another compute. After an error, which may leave a part written, the call can be repeated.
    """
    # This compute's memory is newer than a restored etcd, and no other process writes its records.
    published, queued = 0, _list_queued(store)
    for instance, remembered in memory.get_entries().items():
        try:
            for _ in range(MAX_TRIES):
                state = _EtcdState(compute, store, instance)
                step = decide_republish(compute, remembered, instance in local_instances, state.view)
                if not isinstance(step, Publish):
                    break
                claimed_on = find_compute(allocations.read_consumer(placement, instance).allocations)
                if remembered.request.is_adopted and not claimed_on:
                    step = None  # its mark goes, as it is neither claimed nor requested
                    break
                if claimed_on not in ('', compute):
                    if instance in local_instances:
                        log.error(CLAIMED_ELSEWHERE, instance, claimed_on)
                    step = None
                    break
                if _publish(state, step, placement, queued.get(instance, ())):
                    break
                queued = _list_queued(store)
            else:
                raise _make_conflict_error(instance)
        except Unreadable as error:
            log.error('instance %s is not written to etcd again: %s', instance, error)  # the others are published
            continue
        if isinstance(step, Drop):
            memory.record_end(instance)
            log.warning('instance %s is not written to etcd again: it ran here, but no longer exists', instance)
        published += isinstance(step, Publish)
    for instance in memory.get_ended() - set(local_instances):  # a guest that is here is kept
        try:
            _end_again(compute, store, instance, queued.get(instance, ()), now)
        except Unreadable as error:
            log.error('instance %s had finished, but this cannot be recorded in etcd again: %s', instance, error)
    log.info('instances written to etcd again: %d', published)


def _end_again(compute: str, store: Store, instance: str, queued: Collection[Entry], now: str) -> None:
    """End an instance again that a restored etcd has as requested or queued."""

    def attempt() -> bool | None:
        state = _EtcdState(compute, store, instance)
        last_record = make_end_record(compute, state.view, now)
        removed = [state.request_key, state.booted_key]
        is_ended = last_record is None or bool(ends.write_final_record(store, last_record, state.unchanged, removed))
        is_ended = is_ended and all(_end_queued(compute, store, entry.key, now) for entry in queued)
        return last_record is not None if is_ended else None  # None: a conflict

    was_asked_for = retry_until_committed(attempt, _make_conflict_error(instance), MAX_TRIES)
    if was_asked_for or queued:
        log.info('instance %s had finished: it is not built again', instance)


def _end_queued(compute: str, store: Store, key: str, now: str) -> bool:
    """End an instance that an older etcd queues, and return False on a conflict."""
    entry = store.get(key)
    waiting = parse_queue_entry(key, entry.value) if entry is not None else None
    if entry is None or not isinstance(waiting, QueueEntry):
        return True
    last_record = records.make_record(compute, waiting.make_request(compute, now), now).enter_state(GONE, now, 'gone')
    last_record = replace(last_record, fault=ENDED_BEFORE_FAULT)
    old_entry = store.get(record_key := keys.record(compute, waiting.instance))
    unchanged = [Unchanged(key, entry.revision), Unchanged(record_key, get_revision(old_entry))]
    if ends.write_final_record(store, last_record, unchanged, [key, keys.taker(key)]) is None:
        return False
    names.try_revoke(store, old_entry.lease if old_entry is not None else 0)
    return True


class _EtcdState:
    """The keys of one instance as read, and the conditions under which they are still the same."""

    def __init__(self, compute: str, store: Store, instance: str) -> None:
        self.store = store
        self.request_key, self.record_key = keys.request(compute, instance), keys.record(compute, instance)
        self.booted_key, waiting_key = keys.address(instance), keys.record('', instance)
        entries = store.read(read := (self.request_key, self.record_key, waiting_key))
        self.unchanged = [Unchanged(key, get_revision(entries.get(key))) for key in read]
        record_entry, request_entry = entries.get(self.record_key), entries.get(self.request_key)
        try:
            record = records.from_json(record_entry.value) if record_entry else None
        except ValueError as error:
            raise Unreadable(self.record_key, error) from error
        request = parse_request(compute, self.request_key, request_entry.value) if request_entry else None
        self.view = EtcdView(request, record, waiting_key in entries)


def _list_queued(store: Store) -> Mapping[str, Sequence[Entry]]:
    entries: dict[str, list[Entry]] = {}
    for key, entry in store.snapshot(keys.QUEUES, keys_only=True).entries.items():
        if not key.endswith(keys.TAKER):
            entries.setdefault(keys.get_queued_instance(key), []).append(entry)
    return entries


def _publish(state: _EtcdState, step: Publish, placement: Placement, queued: Collection[Entry]) -> bool:
    """Carry out `step`, and return False if it lost a race and must be repeated."""
    record = step.record
    if step.claim is not None:
        fault = _ensure_claim(placement, step.claim)
        if fault and fault != record.fault:
            log.error('instance %s: %s', record.instance, fault)
            record = replace(record, fault=fault)
    change = names.restore_name(state.store, record.name, record.instance)
    if change is None:
        # Not a fault of the record, which would stay after `check --fix` has restored the name.
        log.error('instance %s: its name %s now belongs to another instance', record.instance, record.name)
    name_conditions, operations = change or ([], [])
    request, present = step.request, state.view.request
    is_new = present is None
    if isinstance(present, Request) and present.name != record.name:
        # The name that it had at the time of the backup.
        old_conditions, deletes = names.release_name(state.store, present.name, record.instance)
        name_conditions, operations = [*name_conditions, *old_conditions], [*operations, *deletes]
    make_shared = partial(_restore_shared, state.store, record, request, present, is_uncharged=is_new and not queued)
    if request is not None:
        operations.append(Put(state.request_key, encode(request)))
        for entry in queued if is_new else ():
            # The quota charge belongs to this entry: a process that removed it first has subtracted it.
            name_conditions.append(Unchanged(entry.key, entry.revision))
            operations += [Delete(entry.key), Delete(keys.taker(entry.key))]
    if record != state.view.record:
        operations.append(Put(state.record_key, encode(record)))
        if record.address is not None:
            operations.append(Put(state.booted_key, record.address))
    if not operations and not make_shared()[1]:
        return True
    conditions = [*state.unchanged, *name_conditions]
    if names.commit_with_shared(state.store, conditions, operations, make_shared, settlement=Settlement()) is None:
        return False
    # An attempt that found nothing of the instance in etcd may have released its claim: check it again.
    if step.claim is not None and (fault := _ensure_claim(placement, step.claim)):
        log.error('instance %s: %s', record.instance, fault)
    return True


def _restore_shared(
    store: Store, record: Record, request: Request | None, present: Request | InvalidRequest | None, is_uncharged: bool
) -> Change:
    """Return the changes that restore group and quota, unless they are malformed."""
    changes: list[Change] = []
    if request is not None and not request.is_tombstone:
        with suppress(Unreadable):
            changes.append(names.rejoin_group(store, request.group, record.instance, record.compute))
    with suppress(Unreadable):
        if request is not None and is_uncharged:
            # It was delivered after the backup of this etcd, so the quota lacks it; its end will subtract it.
            changes.append(names.recharge_quota(store, record.project_id, request.resources))
        elif request is not None and isinstance(present, Request):
            sizes = present.resources, request.resources
            changes.append(names.change_charge(store, record.project_id, *sizes, has_limit=False))
    return [each for unchanged, _ in changes for each in unchanged], [each for _, writes in changes for each in writes]


def _ensure_claim(placement: Placement, request: Request) -> str:
    """Claim for a request whose instance holds nothing, and return the fault to record, or ''."""

    def attempt() -> str:
        held = allocations.read_consumer(placement, request.instance)
        if held.allocations:
            return describe_difference(request.allocations, held.allocations) or ''
        owner = request.user_id, request.project_id
        try:
            allocations.replace_allocations(placement, request.instance, request.allocations, *owner, held.generation)
        except (GenerationConflict, Unreachable):
            raise
        except EcompError as error:
            return f'its guest is on this host, but placement has no claim for it: {error}'
        return ''

    conflict = Unreachable(f'instance {request.instance}: its claim changed concurrently in each of {MAX_TRIES} tries')
    return retry_until_committed(attempt, conflict, MAX_TRIES)


def _make_conflict_error(instance: str) -> Unreachable:
    return Unreachable(f'instance {instance}: its keys changed concurrently in each of {MAX_TRIES} tries')
