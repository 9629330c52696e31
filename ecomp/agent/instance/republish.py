"""After a new etcd was accepted: what this compute runs is made known to it again, and what ended here stays ended.

What is remembered here is newer than a restored etcd, and for a compute's own records the truth: nobody else writes
them. Only one thing an etcd says counts for more: a tombstone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ecomp.agent.host.memory import Memory, MemoryEntry
from ecomp.agent.instance.records import older_record, revision_of
from ecomp.errors import EcompError, GenerationConflict, UnknownOutcome, Unreachable, Unreadable
from ecomp.model import instance as requests
from ecomp.model import keys
from ecomp.model import record as records
from ecomp.model.allocation import difference
from ecomp.model.instance import Invalid, Request, parse_request
from ecomp.model.queue import QueueEntry, parse_waiting
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, ERROR, GONE, STOPPED, Record
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged
from ecomp.store.sharing import Change, commit_with, given_back, quietly_revoke, recharged, rejoined, write_end

log = logging.getLogger(__name__)

TRIES = 5
"""How often something is tried that loses its race, or whose answer is lost."""

ENDED = frozenset({GONE, ERROR})
ENDED_BEFORE = 'it had ended before etcd forgot that'


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
class End:
    """The instance ended here, whatever etcd says: its request goes, its record says `gone`."""

    record: Record


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


def ended(compute: str, said: EtcdView, now: str) -> End | None:
    """What to do about an instance that ended here in the last day, and is not here; None: nothing. Pure."""
    if not isinstance(said.wish, Request) or said.wish.is_tombstone:
        return None
    if said.record is not None and (said.record.compute != compute or said.record.state in ENDED):
        return None
    record = said.record or records.new_record(compute, said.wish, now)
    return End(replace(record.at(GONE, now, 'gone'), fault=ENDED_BEFORE))


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
    for _ in range(TRIES):
        at = _Place(compute, store, instance)
        last = ended(compute, at.said(), now)
        is_ended = last is None or at.end(last.record)
        if is_ended and all(_end_waiting(compute, store, each.key, now) for each in queued):
            break
    else:
        raise _restless(instance)
    if last is not None or queued:
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
        if write_end(store, last, unchanged, [key, keys.taker(key)]) is not None:
            quietly_revoke(store, before.lease if before is not None else 0)
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
            return commit_with(self.store, [*self._unchanged, *also], list(operations), shared) is not None
        return False

    def end(self, record: Record) -> bool:
        """Write its last record, and remove its request and its address; False as of commit()."""
        with suppress(UnknownOutcome):
            removed = [self.request_key, self.booted_key, *self._moved()]
            return write_end(self.store, record, self._unchanged, removed) is not None
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
        if fault is not None and fault != record.fault:
            log.error('instance %s: %s', record.instance, fault)
            record = replace(record, fault=fault)
    change = given_back(at.store, record.name, record.instance)
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
                theirs, joins = rejoined(at.store, request.group, record.instance, record.compute)
                conditions, changes = [*conditions, *theirs], [*changes, *joins]
        if request is not None and is_new and not queued:
            with suppress(Unreadable):
                # Delivered after what this etcd was restored from, so it is not counted; its end will give it back.
                theirs, counts = recharged(at.store, record.project_id, record.resources)
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
    if step.claim is not None and (fault := _claimed(placement, step.claim)) is not None:
        log.error('instance %s: %s', record.instance, fault)
    return True


def _claimed(placement: Placement, request: Request) -> str | None:
    """Claim what the request asks for if nothing is held; what is wrong with it otherwise, in words."""
    for _ in range(TRIES):
        held = allocations.consumer(placement, request.instance)
        if held.allocations:
            return difference(request.allocations, held.allocations)
        who = request.user_id, request.project_id
        try:
            allocations.claim(placement, request.instance, request.allocations, *who, held.generation)
            return None
        except (GenerationConflict, UnknownOutcome):
            continue
        except Unreachable:
            raise
        except EcompError as error:
            return f'it is here without a claim: {error}'
    raise Unreachable(f'the claim of {request.instance} is changed by somebody else all the time')


def _restless(instance: str) -> Unreachable:
    return Unreachable(f'instance {instance}: its keys are changed by somebody else all the time')
