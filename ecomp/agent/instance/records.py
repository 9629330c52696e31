"""The records of one compute's instances: read once, written only while their request is unchanged (rule 5).

A record of ecomp 1.0 of a running guest is moved to its new key when it is read, if both keys are unchanged; that of
an instance that is being built or destroyed is moved by its next write.

After etcd was restored they are republished: what this compute remembers is newer than the restored etcd, and nobody
else writes its records. One thing in etcd counts for more: a tombstone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from ecomp.agent.host.state import Memory, MemoryEntry
from ecomp.errors import Denied, EcompError, GenerationConflict, NoSpace, UnknownOutcome, Unreachable, Unreadable
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model import order as requests
from ecomp.model import record as records
from ecomp.model.allocation import compute_of, difference
from ecomp.model.order import Invalid, Request, parse_request, shares
from ecomp.model.queue import QueueEntry, parse_waiting
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, ERROR, GONE, STOPPED, Record, from_json, is_newer, to_json
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.store import sharing
from ecomp.store.client import Delete, Entry, Exists, Put, Store, Unchanged, until_committed
from ecomp.store.sharing import Change, listed

log = logging.getLogger(__name__)


class Superseded(Exception):
    """The request changed while we were at it: plan anew."""


class RecordEntry(NamedTuple):
    """A record as last read or written, None where there is none; the revisions of its key, and of the older one.

    ecomp 1.0 has the records of all computes at keys.old_record(): ours of guests that live move once they are read;
    those being built or destroyed, and what cannot be written then, with their next write.
    """

    record: Record | None = None
    revision: int = 0
    older: int = 0


class Records:
    """The records of one compute's instances, as last read or written.

    Errors of every write: Superseded, Unreachable, UnknownOutcome (the record is read again before the next).
    What lies below another compute is never read: a record is believed of the compute that its key names.
    """

    def __init__(self, compute: str, store: Store, memory: Memory) -> None:
        self._compute = compute
        self._store = store
        self._memory = memory
        self._known: dict[str, RecordEntry] = {}

    def get(self, instance: str) -> Record | None:
        """The record as last read or written; read if we have none. Unreadable, and those of a write."""
        known = self._known.get(instance, RecordEntry())
        if known.record is None:
            known = self._read(instance)
            if known.record is None:
                return None
            self._known[instance] = known
        return known.record

    def known(self, instance: str) -> Record:
        """get() for an instance that has a record as planned; Superseded where it is gone."""
        if (record := self.get(instance)) is None:
            raise Superseded
        return record

    def to_end(self, instance: str) -> Record | None:
        """get() for an instance that is to end: None also for what cannot be understood: the next write replaces it.

        Unreadable for one of a newer version, which may hold more than is known here.
        """
        try:
            return self.get(instance)
        except Unreadable as error:
            own, older = self._places(instance)
            there = self._store.read([own, older])
            if own in there or older in there:
                if any(is_newer(each.value) for each in there.values()):
                    raise
                self._known[instance] = RecordEntry(None, revision_of(there.get(own)), revision_of(there.get(older)))
                log.warning('%s; a destroy of it was accepted, and goes by its request', error)
            return None

    def forget(self, instance: str) -> None:
        """Read the record anew next time."""
        self._known.pop(instance, None)

    def recheck(self, wishes: Mapping[str, Request | Invalid]) -> list[str]:
        """Those whose record is not as we know it any more, for somebody else wrote or removed it: forgotten here.

        What lives, and is as we know it, is remembered, with its wish, if the state directory could not be written.
        """
        asked = {instance: known for instance in wishes if (known := self._known.get(instance)) is not None}
        if not asked:
            return []
        ours = {self._places(instance)[0] for instance in asked}
        listed = self._store.snapshot(
            keys.record(self._compute, ''), keys_only=True, keep=lambda entry: entry if entry.key in ours else None
        )
        changed = []
        for instance, known in asked.items():
            own, older = self._places(instance)
            entry = listed.entries.get(own) if known.revision else self._store.get(older)
            # One that was written while we read is known anew.
            if revision_of(entry) != (known.revision or known.older) and self._known.get(instance) is known:
                changed.append(instance)
        for instance in changed:
            self.forget(instance)
        for instance in asked.keys() - set(changed):
            wish, record = wishes[instance], asked[instance].record
            if not isinstance(wish, Request) or wish.is_tombstone:
                continue
            if record is not None and record.state in (ACTIVE, STOPPED):
                self._memory.put_right(wish, record)
        return changed

    def write(self, record: Record, revision: int, extra: Collection[Put | Delete] = ()) -> Record:
        """Put the record, with `extra` in the same transaction, if the request is the one at `revision`."""
        instance = record.instance
        unchanged, moved = self._as_read(instance)
        operations = [Put(self._places(instance)[0], to_json(record)), *map(Delete, moved), *extra]
        written = self._commit(instance, revision, lambda host: self._store.commit([host, *unchanged], operations))
        self._known[instance] = RecordEntry(record, written)
        if record.state in (ACTIVE, STOPPED, DESTROYING):
            self._memory.remember(None, record)
        return record

    def lost(self, instance: str, revision: int, is_here: bool) -> None:
        """Remove the address at /booted of an instance without a record: its end removes only one its record knows of.

        `is_here`: it may have been built here; else the address is removed only if one is remembered. Where another
        compute is asked for the instance, too, it stays. Of a guest that runs it is written again.
        """
        remembered = self._memory.all().get(instance)
        had = is_here or (remembered is not None and 'addressed' in remembered.record.stages)
        if had and not self._asked_elsewhere(instance):
            booted = Delete(keys.booted(instance))
            self._commit(instance, revision, lambda host: self._store.commit([host], [booted]))

    def end(self, record: Record, revision: int) -> None:
        """Write the last record, on a lease, and delete request, address and name, in one transaction.

        An address is another compute's if this one never wrote one, for somebody may have asked both. What fails leaves
        name, group and quota to another compute that is asked; where none ever ends it there, `audit --fix` frees them.
        """
        instance = record.instance
        unchanged, moved = self._as_read(instance)
        removed = [keys.request(self._compute, instance), *moved]
        if 'addressed' in record.stages:
            removed.append(keys.booted(instance))
        # What another compute is asked for, too, has what it shares there: what fails here lets go of none of it.
        others = self._asked_elsewhere(instance) if record.state == ERROR else []
        # Compared: of two that fail at once each would leave it to the other.
        seen: list[Unchanged | Exists] = [*unchanged, *others]

        def write(host: Unchanged) -> int | None:
            return sharing.write_end(self._store, record, [host, *seen], removed, not others)

        try:
            self._commit(instance, revision, write)
        except NoSpace as error:
            if record.state == ERROR:
                raise
            # A full etcd takes deletes alone, and that is how it gets room again: what its group and its quota count is
            # left to the audit.
            mine, change = sharing.freed(self._store, record.name, instance)
            operations = [*map(Delete, (self._places(instance)[0], *removed)), *change]
            self._commit(instance, revision, lambda host: self._store.commit([host, *seen, *mine], operations))
            log.warning('instance %s: no record of its end is kept: %s', instance, error)
        failpoint('ended')
        self.forget(instance)
        self._memory.ended(instance)

    def drop(self, instance: str, revision: int, kept: str | None) -> None:
        """Delete a request of what is over, and a name that leads to it, unless it is `kept`: what failed has its.

        Of a request that could not be read nobody knew the name, until somebody wrote it anew.
        """
        key = keys.request(self._compute, instance)
        entry = self._store.get(key)
        name = shares(parse_request(self._compute, key, entry.value)).name if entry is not None else None
        unchanged, change = sharing.freed(self._store, name, instance) if name != kept else ([], [])
        operations = [Delete(key), *change]
        self._commit(instance, revision, lambda host: self._store.commit([host, *unchanged], operations))

    def _commit(self, instance: str, revision: int, commit: Callable[[Unchanged], int | None]) -> int:
        """Commit if the request is still the one at `revision`; the new revision, or Superseded."""
        try:
            written = commit(Unchanged(keys.request(self._compute, instance), revision))
        except UnknownOutcome:
            self.forget(instance)  # written or not: read it, and plan anew
            raise
        if written is None:
            self.forget(instance)
            raise Superseded
        return written

    def _places(self, instance: str) -> tuple[str, str]:
        return keys.record(self._compute, instance), keys.old_record(instance)

    def _read(self, instance: str) -> RecordEntry:
        own, older = self._places(instance)
        there = self._store.read([own, older])
        if own not in there:
            record = older_record(there.get(older), self._compute, instance)
            return RecordEntry() if record is None else self._brought(record, there[older])
        try:
            return RecordEntry(from_json(there[own].value, instance, self._compute), there[own].revision)
        except ValueError as error:
            raise Unreadable(own, error) from error

    def _brought(self, record: Record, entry: Entry) -> RecordEntry:
        """The record of ecomp 1.0 in `entry`, as it is, at our place. What has ended ends there, on its lease.

        Until all have moved there are no roles: a compute may not write there with one.
        """
        own, older = self._places(record.instance)
        if record.state in (ACTIVE, STOPPED) and not entry.lease:
            unchanged = [Unchanged(own, 0), Unchanged(older, entry.revision)]
            with suppress(UnknownOutcome, NoSpace, Denied):
                written = self._store.commit(unchanged, [Put(own, to_json(record)), Delete(older)])
                if written is not None:
                    return RecordEntry(record, written)
        return RecordEntry(record, 0, entry.revision)

    def _asked_elsewhere(self, instance: str) -> list[Exists]:
        """That another compute is asked for the instance, too, if one is; what names no compute is none (rule 12).

        One that is there is enough, whatever it says: its compute may write it again and again, and etcd takes no more
        than 128 conditions.
        """
        asked = listed(self._store, instance).requests
        others = sorted(each for each in asked if each != self._compute and keys.is_uuid(each))
        return [Exists(asked[each].key) for each in others[:1]]

    def _as_read(self, instance: str) -> tuple[list[Unchanged], list[str]]:
        """What a write compares of the record as it is known, and its older key, if it is taken from there."""
        known, (own, older) = self._known.get(instance, RecordEntry()), self._places(instance)
        moved = [older] if known.older else []
        return [Unchanged(own, known.revision), *([Unchanged(older, known.older)] if moved else [])], moved


def older_record(entry: Entry | None, compute: str, instance: str) -> Record | None:
    """The record at keys.old_record() if ecomp 1.0 wrote it of this instance of this compute; else None.

    So also for one that cannot be understood: nobody of ours writes there any more, and others may.
    """
    try:
        return from_json(entry.value, instance, compute) if entry is not None else None
    except ValueError:
        return None


def revision_of(entry: Entry | None) -> int:
    """The revision that wrote the entry last; 0 for None."""
    return entry.revision if entry is not None else 0


TRIES = 5
"""How often something is tried that loses its race, or whose answer is lost."""

ENDED = frozenset({GONE, ERROR})
ENDED_BEFORE = 'it had ended before etcd forgot that'
CLAIMED_ELSEWHERE = (
    'instance %s is claimed on compute %s: the guest here is kept, and unmanaged. '
    'Fix: look at both guests, then remove this domain manually'
)


@dataclass(frozen=True)
class EtcdView:
    """What etcd has of one instance; None where it has nothing. `was_destroyed`: so, while it waited in a queue."""

    wish: Request | Invalid | None = None
    record: Record | None = None
    was_destroyed: bool = False


@dataclass(frozen=True)
class Publish:
    """Put the record, and the request if there is one; before that, claim what `claim` asks for if nothing is held."""

    request: Request | None
    record: Record
    claim: Request | None


@dataclass(frozen=True)
class Drop:
    """Nothing of it is here, and etcd asks for nothing."""


def running(compute: str, remembered: MemoryEntry, is_here: bool, said: EtcdView) -> Publish | Drop | None:
    """What to do about an instance that had not ended; `is_here`: its domain or its disk is. None: nothing. Pure."""
    if said.record is not None and (said.record.compute != compute or said.record.state in ENDED):
        return None  # somebody else's business, or its end was written after we remembered
    if isinstance(said.wish, Invalid) or (said.wish is not None and said.wish.is_tombstone):
        return None
    request, record = remembered.request, remembered.record
    if record.state == BUILDING and said.record is not None and said.record.state in (ACTIVE, STOPPED):
        record = said.record  # it came to be so, and that could not be written down here
    if record.state == DESTROYING or (said.was_destroyed and said.wish is None):
        # Its destroy was accepted, here, where it may be half done, or of what waited once more in a restored queue.
        return Publish(replace(request, allocations={}, image=None, left=request.resources), record, None)
    if said.wish is None and not is_here and 'started' in record.stages:
        return Drop()
    asked = request if said.wish is None else None
    if said.wish is not None and request.power not in (None, said.wish.power):
        asked = replace(said.wish, power=request.power)  # else what etcd has of earlier days would be done once more
    return Publish(asked, record, request if is_here else None)


def ended(compute: str, said: EtcdView, now: str) -> Record | None:
    """Make the last record of an instance that ended here in the last day; None: etcd needs none. Pure."""
    if not isinstance(said.wish, Request) or said.wish.is_tombstone:
        return None
    if said.record is not None and (said.record.compute != compute or said.record.state in ENDED):
        return None
    record = said.record or records.new_record(compute, said.wish, now)
    return replace(record.at(GONE, now, 'gone'), fault=ENDED_BEFORE)


def republish(
    compute: str, store: Store, placement: Placement, memory: Memory, here: Collection[str], now: str
) -> None:
    """Tell a new etcd of every instance that this compute remembers. Done again, it changes nothing more.

    `here` are the instances whose domain or disk is on this host.
    Errors: Unreachable and its like, with some of it done.
    """
    published = 0
    queued = _queued(store)
    for instance, remembered in memory.all().items():
        try:
            for _ in range(TRIES):
                at = _Place(compute, store, instance)
                step = running(compute, remembered, instance in here, at.said())
                if isinstance(step, Publish) and (on := _find_other_home(placement, compute, instance)):
                    if instance in here:
                        log.error(CLAIMED_ELSEWHERE, instance, on)
                    step = None
                if not isinstance(step, Publish) or _publish(at, step, placement, queued.get(instance, ())):
                    break
                queued = _queued(store)
            else:
                raise _restless(instance)
        except Unreadable as error:
            log.error('instance %s is not published: %s', instance, error)  # it alone: the others are
            continue
        if isinstance(step, Drop):
            memory.ended(instance)
            log.warning('instance %s ran here and is not here any more: not published', instance)
        published += isinstance(step, Publish)
    for instance in memory.all_ended() - set(here):  # a guest is never taken down for this
        try:
            _stays_ended(compute, store, instance, queued.get(instance, ()), now)
        except Unreadable as error:
            log.error('instance %s had ended: %s', instance, error)
    log.info('published again: %d instances', published)


def _stays_ended(compute: str, store: Store, instance: str, queued: Collection[Entry], now: str) -> None:
    """End it once more where an older etcd asks for it, of this compute or, by its `queued` keys, of any."""

    def attempt() -> bool | None:
        at = _Place(compute, store, instance)
        last = ended(compute, at.said(), now)
        is_ended = last is None or at.end(last)
        is_ended = is_ended and all(_end_waiting(compute, store, each.key, now) for each in queued)
        return last is not None if is_ended else None

    was_asked_for = until_committed(attempt, _restless(instance), TRIES)
    if was_asked_for or queued:
        log.info('instance %s had ended: it is not built again', instance)


def _end_waiting(compute: str, store: Store, key: str, now: str) -> bool:
    """End what waits once more in an etcd of before it was taken, whoever has a mark at it; False: look again."""
    entry = store.get(key)
    waiting = parse_waiting(key, entry.value) if entry is not None else None
    if entry is None or not isinstance(waiting, QueueEntry):
        return True
    last = records.new_record(compute, waiting.request(compute, now), now).at(GONE, now, 'gone')
    last = replace(last, fault=ENDED_BEFORE)
    before = store.get(keys.record(compute, waiting.instance))
    unchanged = [Unchanged(key, entry.revision), Unchanged(keys.record(compute, waiting.instance), revision_of(before))]
    with suppress(UnknownOutcome):
        if sharing.write_end(store, last, unchanged, [key, keys.taker(key)]) is not None:
            sharing.quietly_revoke(store, before.lease if before is not None else 0)
            return True
    return False


class _Place:
    """What etcd holds of one instance, and a commit that holds only while that is so."""

    def __init__(self, compute: str, store: Store, instance: str) -> None:
        self.store = store
        self.compute, self.instance = compute, instance
        self.request_key, self.record_key = keys.request(compute, instance), keys.record(compute, instance)
        self.booted_key, self.older_key = keys.booted(instance), keys.old_record(instance)
        self.waiting_key = keys.record('', instance)
        read = (self.request_key, self.record_key, self.older_key, self.waiting_key)
        self._there = store.read(read)
        self._unchanged = [Unchanged(key, revision_of(self._there.get(key))) for key in read]

    def said(self) -> EtcdView:
        """Unreadable if the record cannot be understood: a newer ecomp's, perhaps."""
        entry = self._there.get(self.record_key)
        try:
            record = records.from_json(entry.value) if entry else self._older()
        except ValueError as error:
            raise Unreadable(self.record_key, error) from error
        host = self._there.get(self.request_key)
        wish = parse_request(self.compute, self.request_key, host.value) if host else None
        return EtcdView(wish, record, self.waiting_key in self._there)

    def commit(
        self, operations: Collection[Put | Delete], also: Collection[Unchanged], shared: Callable[[], Change]
    ) -> bool:
        """False: it is not what it was, or the answer was lost: look again. `shared` is what others change, too."""
        if self.record_key in {each.key for each in operations}:
            operations = [*operations, *map(Delete, self._moved())]
        with suppress(UnknownOutcome):
            return sharing.commit_with(self.store, [*self._unchanged, *also], list(operations), shared) is not None
        return False

    def end(self, record: Record) -> bool:
        """Write its last record, and remove its request and its address; False as of commit()."""
        with suppress(UnknownOutcome):
            removed = [self.request_key, self.booted_key, *self._moved()]
            return sharing.write_end(self.store, record, self._unchanged, removed) is not None
        return False

    def _moved(self) -> list[str]:
        return [self.older_key] if self._older() is not None else []

    def _older(self) -> Record | None:
        return older_record(self._there.get(self.older_key), self.compute, self.instance)


def _queued(store: Store) -> Mapping[str, Sequence[Entry]]:
    """{instance: its entries in the queues}, without their values."""
    found: dict[str, list[Entry]] = {}
    for key, entry in store.snapshot(keys.QUEUES, keys_only=True).entries.items():
        if not key.endswith(keys.TAKER):
            found.setdefault(keys.in_queue(key), []).append(entry)
    return found


def _publish(at: _Place, step: Publish, placement: Placement, queued: Collection[Entry]) -> bool:
    """Write it; False: look again. What a restored etcd has of it `queued` goes: it was taken from there since."""
    record = step.record
    if step.claim is not None:
        fault = _claimed(placement, step.claim)
        if fault and fault != record.fault:
            log.error('instance %s: %s', record.instance, fault)
            record = replace(record, fault=fault)
    change = sharing.given_back(at.store, record.name, record.instance)
    if change is None:
        fault = f'its name {record.name} was another instance\'s when this etcd was accepted'
        if fault not in (record.fault or ''):
            log.error('instance %s: %s', record.instance, fault)
            record = replace(record, fault='; '.join(filter(None, (record.fault, fault))))
    mine, operations = change or ([], [])
    request, is_new = step.request, at.said().wish is None

    def shared() -> Change:
        """What other computes that publish write at this moment, too. What cannot be read the audit tells of."""
        conditions, changes = list[Unchanged](), list[Put | Delete]()
        if request is not None and not request.is_tombstone:
            with suppress(Unreadable):
                theirs, joins = sharing.rejoined(at.store, request.group, record.instance, record.compute)
                conditions, changes = [*conditions, *theirs], [*changes, *joins]
        if request is not None and is_new and not queued:
            with suppress(Unreadable):
                # Delivered after what this etcd was restored from, so it is not counted; its end will give it back.
                theirs, counts = sharing.recharged(at.store, record.project_id, record.resources)
                conditions, changes = [*conditions, *theirs], [*changes, *counts]
        return conditions, changes

    if request is not None:
        operations.append(Put(at.request_key, requests.to_json(request)))
        for entry in queued if is_new else ():
            # The quota counts it by this entry: whoever removes the entry first has given that back.
            mine.append(Unchanged(entry.key, entry.revision))
            operations += [Delete(entry.key), Delete(keys.taker(entry.key))]
    if record != at.said().record:
        operations.append(Put(at.record_key, records.to_json(record)))
        if record.address is not None:
            operations.append(Put(at.booted_key, record.address))
    if not operations and not shared()[1]:
        return True
    if not at.commit(operations, mine, shared):
        return False
    # Who asked for it meanwhile found nothing of it in etcd, and has released what it held.
    if step.claim is not None and (fault := _claimed(placement, step.claim)):
        log.error('instance %s: %s', record.instance, fault)
    return True


def _find_other_home(placement: Placement, compute: str, instance: str) -> str:
    """The other compute that the instance is claimed on, '' for none. It was placed again while this host was off."""
    on = compute_of(allocations.consumer(placement, instance).allocations)
    return on if on != compute else ''


def _claimed(placement: Placement, request: Request) -> str:
    """Claim what the request asks for if nothing is held; what is wrong with it otherwise, in words, '' for nothing."""

    def attempt() -> str:
        held = allocations.consumer(placement, request.instance)
        if held.allocations:
            return difference(request.allocations, held.allocations) or ''
        who = request.user_id, request.project_id
        try:
            allocations.claim_once(placement, request.instance, request.allocations, *who, held.generation)
        except (GenerationConflict, Unreachable):
            raise
        except EcompError as error:
            return f'it is here without a claim: {error}'
        return ''

    lost = Unreachable(f'the claim of {request.instance} is changed by somebody else all the time')
    return until_committed(attempt, lost, TRIES)


def _restless(instance: str) -> Unreachable:
    return Unreachable(f'instance {instance}: its keys are changed by somebody else all the time')
