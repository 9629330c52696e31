"""etcd in memory: a request of ecomp.store.messages yields the answer, in one atomic step.

tests/model/test_models_are_true.py compares it with a real etcd.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from ecomp.model import keys
from ecomp.store.client import Delete, Entry, Exists, Put, Snapshot, Touch, Unchanged
from ecomp.store.messages import (
    DEADLINE_EXCEEDED,
    EVENT_DELETE,
    INVALID_ARGUMENT,
    NOT_FOUND,
    RESOURCE_EXHAUSTED,
    TOO_MANY_OPERATIONS,
    UNAVAILABLE,
    CallFailure,
    Grant,
    KeepAlive,
    Range,
    Request,
    Revoke,
    Status,
    TimeToLive,
    Transaction,
    WatchCreate,
)

# The maximum number of operations, and of conditions, in one transaction.
MAX_TRANSACTION_OPERATIONS = 128
VERSION = '3.4.23'
CLUSTER_ID = 1
RAFT_TERM = 2
LAST_KEY = b'\0'


class Surroundings(Protocol):
    """What the contents of a server need to know of the model checker's world."""

    state_parts: list[Callable[[], Hashable]]

    def get_writer_mark(self) -> int: ...


class NoWorld:
    def __init__(self) -> None:
        self.state_parts: list[Callable[[], Hashable]] = []

    def get_writer_mark(self) -> int:
        return 0


@dataclass
class Lease:
    """One lease with the name of the actor that owns it, or '' if the scene granted it."""

    owner: str
    seconds: int
    renewed_at: float = field(default_factory=time.monotonic)


class Etcd:
    """The contents of etcd, with a fingerprint that distinguishes two states.

    Two states differ if a key was written by another actor or at another step of that actor.
    The order of writes by different actors counts only for requests and queues, where it has a meaning, and for quotas,
    which two actors may change concurrently.
    """

    def __init__(self, world: Surroundings) -> None:
        self.world = world
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, Lease] = {}
        self.scene_leases = 0
        self.writer_marks: dict[int, int] = {0: 0, 1: 1}
        self.order_fingerprint = 0
        # True if it accepts only deletes.
        self.is_full = False
        # Functions that are called with each write, in the same step.
        self.listeners: list[Callable[[Sequence[Put | Delete]], None]] = []
        self._fingerprint = 0
        world.state_parts.append(lambda: (self._fingerprint, self.order_fingerprint, tuple(sorted(self.leases))))

    def grant(self, seconds: int, owner: str, lease: int) -> int:
        self.check_room()
        self.leases[lease] = Lease(owner, seconds)
        return lease

    def end_lease(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            expired = [key for key, entry in self.entries.items() if entry.lease == lease]
            if expired:
                self.write([Delete(key) for key in sorted(expired, key=encode_key)])

    def commit(self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete]) -> int | None:
        """Write the operations. Return the new revision, or None if a condition does not hold."""
        self.check_transaction(len(conditions), operations)
        if not all(map(self.is_met, conditions)):
            return None
        self.check_puts(operations)
        return self.write(operations)

    def check_transaction(self, number_of_conditions: int, operations: Sequence[Put | Touch | Delete | Range]) -> None:
        # etcd refuses these before it compares anything.
        if max(number_of_conditions, len(operations)) > MAX_TRANSACTION_OPERATIONS:
            raise CallFailure(INVALID_ARGUMENT, TOO_MANY_OPERATIONS)
        put = [operation.key for operation in operations if isinstance(operation, Put | Touch)]
        deleted = {operation.key for operation in operations if isinstance(operation, Delete)}
        if len(set(put)) < len(put) or not deleted.isdisjoint(put):
            raise CallFailure(INVALID_ARGUMENT, 'etcdserver: duplicate key given in txn request')
        if put:
            self.check_room()

    def check_puts(self, operations: Sequence[Put | Touch | Delete | Range]) -> None:
        for operation in operations:
            if isinstance(operation, Touch) and operation.key not in self.entries:
                raise CallFailure(INVALID_ARGUMENT, 'etcdserver: key not found')
            if isinstance(operation, Put) and operation.lease and operation.lease not in self.leases:
                raise CallFailure(NOT_FOUND, 'etcdserver: requested lease not found')

    def check_room(self) -> None:
        if self.is_full:
            raise CallFailure(RESOURCE_EXHAUSTED, 'etcdserver: mvcc: database space exceeded')

    def is_met(self, condition: Unchanged | Exists) -> bool:
        entry = self.entries.get(condition.key)
        if isinstance(condition, Exists):
            return entry is not None
        return (entry.revision if entry is not None else 0) == condition.revision

    def make_fingerprint(self, answer: object) -> Hashable:
        if isinstance(answer, Entry):
            return answer.key, answer.value, self.writer_marks[answer.revision], answer.lease
        if isinstance(answer, Snapshot):
            return tuple(map(self.make_fingerprint, answer.entries.values()))
        return self.writer_marks.get(answer, 0) if isinstance(answer, int) else repr(answer)

    def write(self, changes: Sequence[Put | Touch | Delete]) -> int:
        operations = [self.resolve(change) if isinstance(change, Touch) else change for change in changes]
        if not any(isinstance(operation, Put) or operation.key in self.entries for operation in operations):
            return self.revision  # nothing was deleted, and etcd makes no new revision for that
        self.revision += 1
        mark = self.writer_marks[self.revision] = self.world.get_writer_mark()
        for operation in operations:
            before = self.entries.pop(operation.key, None)
            self._fingerprint ^= hash(self.make_fingerprint(before)) if before else 0
            if isinstance(operation, Put):
                created = before.create_revision if before else self.revision
                value = operation.value.encode(errors='surrogateescape')
                new = Entry(operation.key, value, self.revision, operation.lease, create_revision=created)
                self.entries[operation.key] = new
                self._fingerprint ^= hash(self.make_fingerprint(new))
        put = [operation.key for operation in operations if isinstance(operation, Put)]
        if any(key.startswith((keys.ATTEMPTS, keys.QUEUES)) and not key.endswith(keys.TAKER) for key in put):
            self.order_fingerprint = hash((self.order_fingerprint, mark))
        if any(key.startswith(keys.QUOTAS) for key in put):
            self.order_fingerprint = hash((self.order_fingerprint, mark, self._fingerprint))
        written = self.revision
        for listener in self.listeners:
            listener(operations)
        return written

    def resolve(self, touch: Touch) -> Put:
        entry = self.entries[touch.key]
        return Put(touch.key, entry.value.decode(errors='surrogateescape'), entry.lease)


class MemoryMember:
    """Answers requests as ecomp's client of one member does. Threads may share it.

    Keys are bytes outside and text inside. Leases end by the monotonic clock.
    """

    def __init__(self, etcd: Etcd, keeps_history: bool = True) -> None:
        self.etcd = etcd
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self._leases = itertools.count(1)
        # Each change: its revision and key, and the entry after and before it, None without the key.
        self._changes: list[tuple[int, str, Entry | None, Entry | None]] = []
        self._last: dict[str, Entry | None] = {}
        self._keeps_history = keeps_history
        self._answers: dict[type, Callable[[Any], SimpleNamespace]] = {
            Range: self._answer_range,
            Transaction: self._answer_transaction,
            Grant: self._answer_grant,
            KeepAlive: self._answer_keep_alive,
            Revoke: self._answer_revoke,
            TimeToLive: self._answer_time_to_live,
            Status: lambda _: SimpleNamespace(version=VERSION),
        }
        if keeps_history:
            etcd.listeners.append(self._record_changes)

    def call(self, request: Request, _timeout_seconds: float = 0.0) -> Any:
        with self._lock:
            for lease, granted in list(self.etcd.leases.items()):
                if time.monotonic() > granted.renewed_at + granted.seconds:
                    self.etcd.end_lease(lease)
            answer = self.answer(request)
            self.changed.notify_all()
        return answer

    def answer(self, request: Request) -> Any:
        answer = self._answers[type(request)](request)
        answer.header = self.make_header(getattr(answer, 'revision', self.etcd.revision))
        return answer

    def watch(
        self, requests: Sequence[WatchCreate], duration_seconds: float, _progress: float | None = None
    ) -> MemoryWatch:
        return MemoryWatch(self, requests, duration_seconds)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def make_header(self, revision: int) -> SimpleNamespace:
        return SimpleNamespace(cluster_id=CLUSTER_ID, member_id=1, revision=revision, raft_term=RAFT_TERM)

    def list_events(self, request: WatchCreate, first_revision: int) -> list[SimpleNamespace]:
        watched = Range(request.key, request.end)
        return [
            _make_event(key, revision, *values)
            for revision, key, *values in self._changes
            if revision >= first_revision and _is_in_range(key, watched)
        ]

    def _record_changes(self, operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            key = operation.key
            before, after = self._last.get(key), self.etcd.entries.get(key)
            if before is not None or after is not None:
                self._changes.append((self.etcd.revision, key, after, before))
                self._last[key] = after

    def _answer_range(self, request: Range) -> SimpleNamespace:
        if request.revision > self.etcd.revision:
            raise CallFailure('OUT_OF_RANGE', 'etcdserver: mvcc: required revision is a future revision')
        if not request.end and not request.revision:
            entry = self.etcd.entries.get(decode_key(request.key))
            matching = [entry] if entry else []
        else:
            matching = [entry for entry in self._list_entries(request.revision) if _is_in_range(entry.key, request)]
            matching.sort(key=lambda entry: encode_key(entry.key))
        selected = [entry for entry in matching if entry.revision >= request.min_mod_revision]
        limited = selected[: request.limit or None]
        kvs = [] if request.count_only else [_make_kv(entry, request.keys_only) for entry in limited]
        return SimpleNamespace(
            kvs=kvs, more=len(limited) < len(selected) and not request.count_only, count=len(matching)
        )

    def _list_entries(self, revision: int) -> list[Entry]:
        if not revision or not self._keeps_history:
            return list(self.etcd.entries.values())
        then = {key: after for at, key, after, _ in self._changes if at <= revision}
        return [entry for entry in then.values() if entry is not None]

    def _answer_transaction(self, request: Transaction) -> SimpleNamespace:
        self.etcd.check_transaction(len(request.compare), request.success)
        self.etcd.check_transaction(0, request.failure)
        succeeded = all(map(self.etcd.is_met, request.compare))
        operations = request.success if succeeded else request.failure
        self.etcd.check_puts(operations)
        responses = [
            SimpleNamespace(
                response_range=self._answer_range(each) if isinstance(each, Range) else SimpleNamespace(kvs=[])
            )
            for each in operations
        ]
        # A listener may write, too, after that.
        written = self.etcd.write([each for each in operations if not isinstance(each, Range)])
        return SimpleNamespace(succeeded=succeeded, responses=responses, revision=written)

    def _answer_grant(self, request: Grant) -> SimpleNamespace:
        return SimpleNamespace(ID=self.etcd.grant(request.seconds, '', next(self._leases)), TTL=request.seconds)

    def _answer_keep_alive(self, request: KeepAlive) -> SimpleNamespace:
        lease = self.etcd.leases.get(request.lease)
        if lease is not None:
            lease.renewed_at = time.monotonic()
        return SimpleNamespace(ID=request.lease, TTL=lease.seconds if lease is not None else 0)

    def _answer_revoke(self, request: Revoke) -> SimpleNamespace:
        if request.lease not in self.etcd.leases:
            raise CallFailure(NOT_FOUND, 'etcdserver: requested lease not found')
        self.etcd.end_lease(request.lease)
        return SimpleNamespace()

    def _answer_time_to_live(self, request: TimeToLive) -> SimpleNamespace:
        lease = self.etcd.leases.get(request.lease)
        if lease is None:
            return SimpleNamespace(TTL=-1, grantedTTL=0)
        remaining = lease.renewed_at + lease.seconds - time.monotonic()
        return SimpleNamespace(TTL=int(remaining), grantedTTL=lease.seconds)


class MemoryWatch:
    def __init__(self, member: MemoryMember, requests: Sequence[WatchCreate], duration_seconds: float) -> None:
        self._member, self._requests = member, requests
        self._deadline = time.monotonic() + duration_seconds
        self._cancelled = False

    def cancel(self) -> None:
        with self._member.changed:
            self._cancelled = True
            self._member.changed.notify_all()

    def __iter__(self) -> Iterator[SimpleNamespace]:
        next_revisions = [request.revision or self._member.etcd.revision + 1 for request in self._requests]
        for number in range(len(self._requests)):
            yield self._make_answer(number, created=True)
        while True:
            with self._member.changed:
                found = [
                    (number, events)
                    for number, request in enumerate(self._requests)
                    if (events := self._member.list_events(request, next_revisions[number]))
                ]
                if self._cancelled:
                    raise CallFailure(UNAVAILABLE, 'Socket closed')
                if time.monotonic() >= self._deadline:
                    raise CallFailure(DEADLINE_EXCEEDED, 'no answer in time')
                if not found:
                    self._member.changed.wait(min(self._deadline - time.monotonic(), 1.0))
            for number, events in found:
                next_revisions[number] = events[-1].kv.mod_revision + 1
                yield self._make_answer(number, events)

    def _make_answer(self, number: int, events: Sequence[object] = (), created: bool = False) -> SimpleNamespace:
        ends = {'canceled': False, 'compact_revision': 0, 'cancel_reason': '', 'fragment': False}
        header = self._member.make_header(self._member.etcd.revision)
        return SimpleNamespace(header=header, watch_id=number, created=created, events=events, **ends)


def encode_key(key: str) -> bytes:
    return key.encode(errors='surrogateescape')


def decode_key(key: bytes) -> str:
    return key.decode(errors='surrogateescape')


def _is_in_range(key: str, request: Range) -> bool:
    name = encode_key(key)
    if not request.end:
        return name == request.key
    return request.key <= name and (request.end == LAST_KEY or name < request.end)


def _make_kv(entry: Entry, without_value: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        key=encode_key(entry.key),
        value=b'' if without_value else entry.value,
        create_revision=entry.create_revision,
        mod_revision=entry.revision,
        lease=entry.lease,
    )


def _make_event(key: str, revision: int, entry: Entry | None, before: Entry | None) -> SimpleNamespace:
    kv = _make_kv(entry or Entry(key, b'', revision), False)
    return SimpleNamespace(
        type=0 if entry else EVENT_DELETE, kv=kv, prev_kv=_make_kv(before or Entry('', b'', 0), False)
    )
