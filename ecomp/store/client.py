"""etcd reads, transactions, leases and watches; which computes and attempts are alive.

Every call has a timeout and requires a member with a leader: one that is cut off would answer with stale data for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, GenerationConflict, NoSpace, StrangeEtcd, UnknownOutcome, Unreachable
from ecomp.model import cluster, keys
from ecomp.model.cluster import Header, KnownCluster
from ecomp.model.order import announced
from ecomp.store.connection import Connection, TooLong, pages
from ecomp.store.messages import (
    EQUAL,
    GREATER,
    NOT_FOUND,
    CallFailure,
    Comparison,
    Grant,
    KeepAlive,
    Range,
    Removal,
    Request,
    Revoke,
    Status,
    Transaction,
    WatchCreate,
    Write,
)


class Guard:
    """Refuses an etcd that is not the one this process knew (rule 10); connections share it.

    A linearizable reply is compared with the state known before its request was sent. The first foreign one raises
    StrangeEtcd, and so does every later call. `on_change` gets each new state to remember, and must be quick.
    """

    def __init__(self, known: KnownCluster, on_change: Callable[[KnownCluster], None]) -> None:
        self._lock = threading.Lock()
        self._known = known
        self._on_change = on_change
        self._strange = ''
        self._when_strange: list[Callable[[str], None]] = []

    @property
    def known(self) -> KnownCluster:
        """The state seen so far. Read it before sending a request; check the reply against it."""
        return self._known

    def when_strange(self, tell: Callable[[str], None]) -> None:
        """Call `callback(reason)` when etcd is refused, or now if it already is; from any thread."""
        with self._lock:
            self._when_strange.append(tell)
            strange = self._strange
        if strange:
            tell(strange)

    def admit(self) -> None:
        """Raise StrangeEtcd if this etcd was refused before."""
        if self._strange:
            raise StrangeEtcd(self._strange)

    def check(self, before: KnownCluster, header: Header, where: str) -> None:
        """Check a linearizable reply; raise StrangeEtcd if it or an earlier one is foreign."""
        self.admit()
        reason = cluster.unfamiliar(before, header)
        if reason is not None:
            self._refuse(where, reason)
        with self._lock:
            self._learn(self._known.with_header(header))

    def observe(self, before: KnownCluster, header: Header) -> bool:
        """Check any other reply; return False if it is foreign or older than `cluster_before`."""
        if cluster.unfamiliar(before, header) is not None:
            return False
        # The term is ignored: it is the member's own. A member that has just stood for election has a higher term than
        # the leader, which goes on answering for a moment and is still the same etcd.
        with self._lock:
            self._learn(self._known.with_header(replace(header, term=0)))
        return True

    def recognise(self, value: bytes | None, where: str) -> None:
        """Raise StrangeEtcd unless `value`, that of /cluster or None, holds the identity we know."""
        reason = cluster.unlike(self._known, value)
        if reason is not None:
            self._refuse(where, reason)

    def adopt(self, value: bytes, where: str) -> None:
        """Remember the identity in the value of /cluster; raise EcompError if it holds none."""
        try:
            identity = cluster.identity(value)
        except ValueError as error:
            raise EcompError(f'{keys.CLUSTER} in etcd at {where}: {error}: remove that key') from error
        with self._lock:
            current = self._known
            self._learn(KnownCluster(identity, current.cluster, current.revision, current.term))

    def _learn(self, known: KnownCluster) -> None:
        if known != self._known:
            self._known = known
            if known.identity:
                self._on_change(known)

    def _refuse(self, where: str, reason: str) -> None:
        text = (
            f'etcd at {where} is not the one this compute knew: {reason}. Was it wiped or restored, or is `etcd:` '
            'another one? Nothing is built, destroyed or published; if it is to be used: ecompute --accept-new-etcd'
        )
        with self._lock:
            is_first, self._strange = not self._strange, self._strange or text
            listeners = list(self._when_strange) if is_first else []
        for callback in listeners:
            callback(text)
        raise StrangeEtcd(text)


Result = TypeVar('Result')


def is_alive(store: Store, compute: str) -> bool:
    return silence(store, compute) is None


def silence(store: Store, compute: str) -> Unchanged | None:
    """Return the condition that a compute stays silent, or None if the compute is alive.

    Its revision is that of a presence key without a lease, or 0 if there is no key.
    """
    entry = store.get(keys.compute(compute))
    if entry is not None and entry.lease:
        return None
    return Unchanged(keys.compute(compute), entry.revision if entry is not None else 0)


# Tries to delete an attempt: if an answer is lost, the next try finds out what happened.
READ_BACKS = 3


def at_it(store: Store) -> set[str]:
    """Return the instances that are in an attempt in flight or queued, taken ones included."""
    # Attempts before queues: an order that is delivered to a queue in between is seen twice rather than missed.
    placing = in_requests(store.snapshot(keys.ATTEMPTS))
    queues = store.snapshot(keys.QUEUES, keys_only=True).entries
    return placing | {
        keys.in_queue(key) for key, entry in queues.items() if entry.lease or not key.endswith(keys.TAKER)
    }


def wanted(store: Store, holding: Mapping[str, Iterable[str]], waiting: bool = True) -> set[str]:
    """Return those instances that have an attempt in flight, a queued request or a request key.

    `computes_by_instance` names the computes whose request keys count. Requests move from /requests and /queues to
    /hosts, so those are read first: otherwise one that moves in between would be missed. `include_queued` is False if
    the compute that would take queued requests is dead.
    """
    pending = at_it(store) if waiting else in_requests(store.snapshot(keys.ATTEMPTS))
    return {
        instance
        for instance, computes in holding.items()
        if instance in pending or any(store.get(keys.request(compute, instance)) is not None for compute in computes)
    }


def in_requests(snapshot: Snapshot) -> set[str]:
    """Return the instances of attempts; ignore keys without a lease, which ecomp did not write."""
    attempts = ((key, entry.value) for key, entry in snapshot.entries.items() if entry.lease)
    return {instance for key, value in attempts for instance in announced(key, value)}


def being_taken(store: Store) -> set[str]:
    """Return the queued instances that have a taker key; one taken later is also claimed later."""
    entries = store.snapshot(keys.QUEUES, keys_only=True).entries
    return {keys.in_queue(key) for key, entry in entries.items() if entry.lease and key.endswith(keys.TAKER)}


def in_line(snapshot: Snapshot, revision: int) -> tuple[int, int]:
    """Count the instances of leased attempts older than `revision`, and of newer ones."""

    def count_instances(entries: Iterable[Entry]) -> int:
        # The key of a set ends in the uuid of the set, which is no instance.
        return sum(len(announced(entry.key, entry.value) - {keys.last(entry.key)}) or 1 for entry in entries)

    entries = snapshot.entries.values()
    return (
        count_instances(entry for entry in entries if entry.lease and entry.revision < revision),
        count_instances(entry for entry in entries if entry.lease and entry.revision > revision),
    )


def withdraw(store: Store, key: str, revision: int) -> bool:
    """Delete an attempt's key; return False if it is gone or no longer has this revision.

    No delivery, which requires the key, succeeds after that; it could after a mere read. Raises UnknownOutcome if no
    try had an answer.
    """
    for remaining_tries in reversed(range(READ_BACKS)):
        try:
            return store.commit([Unchanged(key, revision)], [Delete(key)]) is not None
        except UnknownOutcome:
            if not remaining_tries:
                raise
    return False


if TYPE_CHECKING:
    from ecomp.model.host import Claims
    from ecomp.store.by_h2 import Watch

# Seconds that a commit waits for a new fence after its fence did not hold.
RENEWED = 1.0

# Maximum number of operations in a transaction: etcd's own --max-txn-ops.
AT_ONCE = 128


@dataclass(frozen=True)
class Entry:
    """One key.

    `revision` wrote it last, `created` created it; `lease` is 0 for none. `dropped` is the size in bytes of a value
    that a follower does not keep: `value` is empty then.
    """

    key: str
    value: bytes
    revision: int
    lease: int = 0
    dropped: int = 0
    created: int = field(default=0, compare=False)


class Snapshot(NamedTuple):
    """All keys under a prefix at one revision."""

    revision: int
    entries: Mapping[str, Entry] = {}


class Unchanged(NamedTuple):
    """A condition: the key was last written at this revision (0: it does not exist)."""

    key: str
    revision: int


class Exists(NamedTuple):
    """A condition: the key exists, with any value."""

    key: str


class Put(NamedTuple):
    """An operation: write the value to the key, bound to the lease unless that is 0."""

    key: str
    value: str
    lease: int = 0


class Delete(NamedTuple):
    """An operation: delete the key."""

    key: str


class Fence(NamedTuple):
    """A condition that a store adds to each commit: its owner still holds its key (rule 9).

    `on_broken` is called, from any thread, when a commit is refused for it, and must be quick. Commits that only delete
    compare `delete_condition` instead, if there is one: a full etcd accepts nothing else, so its owner cannot put the
    key.
    """

    condition: Unchanged
    broken: Callable[[], None]
    deletes: Unchanged | None = None

    def of(self, operations: Sequence[Put | Delete]) -> Unchanged:
        if self.deletes is not None and all(isinstance(operation, Delete) for operation in operations):
            return self.deletes
        return self.condition


class Store:
    """One process's client of etcd. Create it after a fork or spawn, never carry it over one.

    Raises:
        Unreachable: nothing was changed. NoSpace is one; StrangeEtcd may be raised after a write that was carried out.
        UnknownOutcome: a transaction was sent, and its answer was lost or inconclusive: read back before anything else.
        EcompError: etcd refused; Denied if one of its roles does.
    """

    # Consulted if several computes have a request for one instance; None: the oldest request counts.
    claims: Claims | None = None

    def __init__(self, config: EtcdConfig, guard: Guard | None = None) -> None:
        self._connection = Connection(config)
        self.where = self._connection.where
        self._guard = guard
        self.fence: Fence | None = None

    def beside(self) -> Store:
        """Return another store over the same connection, without a fence. Close only one of them."""
        other = copy(self)
        other.fence = None
        return other

    def get(self, key: str) -> Entry | None:
        """Return the key's entry, or None if the key does not exist."""
        reply = self._read(Range(_bytes(key)), about=(key,))
        return entry_of(reply.kvs[0]) if reply.kvs else None

    def read(self, wanted: Sequence[str]) -> dict[str, Entry]:
        """Return the entries of the keys that exist, all at one revision.

        A transaction reads 128 keys, or fewer if their values are too large for one answer.
        """
        entries_by_key: dict[str, Entry] = {}
        start, count, revision = 0, AT_ONCE, 0
        while start < len(wanted):
            ranges = [Range(_bytes(key), revision=revision) for key in wanted[start : start + count]]
            try:
                reply = self._read(Transaction(success=ranges))
            except TooLong:
                if len(ranges) == 1:
                    raise
                count = len(ranges) // 2
                continue
            entries = [entry_of(kv) for response in reply.responses for kv in response.response_range.kvs]
            entries_by_key |= {entry.key: entry for entry in entries}
            start, revision = start + count, revision or reply.header.revision
        return entries_by_key

    def snapshot(
        self, prefix: str, keys_only: bool = False, keep: Callable[[Entry], Entry | None] = lambda entry: entry
    ) -> Snapshot:
        """Read all keys under a prefix, in pages, at one revision.

        `transform` maps each entry, page by page, to the one to keep, or to None to leave it out.
        """
        start = _bytes(prefix)
        end = after(start)
        entries: dict[str, Entry] = {}
        revision = 0
        for reply in pages(lambda each: self._read(each, about=(prefix,)), start, end, keys_only):
            revision = revision or reply.header.revision
            for kv in reply.kvs:
                transformed = keep(entry_of(kv))
                if transformed is not None:
                    entries[transformed.key] = transformed
        return Snapshot(revision, entries)

    def around(self, prefix: str, start: str, limit: int) -> tuple[list[Entry], int]:
        """Read up to `limit` keys of a prefix from `start` on, wrapping around, and count all."""
        # One transaction at any number of keys.
        begin, middle = _bytes(prefix), _bytes(start)
        ranges = [Range(middle, after(begin), limit), Range(begin, middle, limit)]
        reply = self._read(Transaction(success=ranges), about=(prefix,))
        results = [response.response_range for response in reply.responses]
        entries = [entry_of(kv) for result in results for kv in result.kvs]
        return entries[:limit], sum(int(result.count) for result in results)

    def version(self) -> str:
        """Return the version of the member that answers, such as `3.4.23`; it needs no role.

        https://etcd.io/docs/v3.4/dev-guide/api_reference_v3/ (Maintenance.Status)
        """
        return str(self._read(Status(), linearizable=False).version)

    def count(self, prefix: str) -> int:
        key = _bytes(prefix)
        return int(self._read(Range(key, after(key), count_only=True), about=(prefix,)).count)

    def has_changed(self, prefix: str, since: int) -> bool:
        """Return whether an existing key under a prefix was written since `since_revision`."""
        key = _bytes(prefix)
        request = Range(key, after(key), limit=1, keys_only=True, since=since)
        return bool(self._read(request, about=(prefix,)).kvs)

    def revision(self) -> int:
        reply = self._read(Range(_bytes(keys.CLUSTER), count_only=True), about=(keys.CLUSTER,))
        return int(reply.header.revision)

    def commit(
        self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete], fenced: bool = True
    ) -> int | None:
        """Carry out all operations if all conditions hold; return the new revision, else None.

        Raises UnknownOutcome if no answer came, or if etcd was full and may have committed all the same; Unreachable
        also if the fence does not hold and is not replaced in time. https://etcd.io/docs/v3.4/learning/api/#transaction
        """
        deadline = 0.0
        while True:
            fence = self.fence if fenced else None
            fencing = fence.of(operations) if fence else None
            request = Transaction(
                compare=[_compare(condition) for condition in (*conditions, *([fencing] if fencing else []))],
                success=[_operation(operation) for operation in operations],
                failure=[Range(_bytes(fencing.key), keys_only=True)] if fencing else [],
            )
            try:
                reply = self._write(request, [operation.key for operation in operations])
            except NoSpace as error:
                if self._may_be_written([*conditions, *([fencing] if fencing else [])], operations):
                    raise UnknownOutcome(f'{error}; whether this was written before that is not known') from error
                raise
            if reply.succeeded:
                return int(reply.header.revision)
            kvs = reply.responses[0].response_range.kvs if fencing else []
            if fence is None or fencing is None or (kvs[0].mod_revision if kvs else 0) == fencing.revision:
                return None
            fence.broken()
            deadline = deadline or time.monotonic() + RENEWED
            # After an outage longer than the lease, all commits wait here until the key is put again.
            while self.fence is fence and time.monotonic() < deadline:
                time.sleep(RENEWED / 100)
            if time.monotonic() >= deadline:
                raise Unreachable(f'{fencing.key} is not as we put it: nothing is written before it is')

    def _may_be_written(self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete]) -> bool:
        """Return whether a write that etcd refused for lack of space may have been committed.

        etcd checks its space before it proposes a write and again when it applies it. In the second case it reports an
        error and writes nevertheless: all writes in flight while it becomes full.
        https://github.com/etcd-io/etcd/issues/16659
        Only a condition that the operations make false can tell. Without one the answer is False; if etcd cannot be
        read, True.
        """
        # Any other may be false for another reason: a full etcd refuses before it compares.
        invalidated = [condition for condition in conditions if any(_ends(condition, change) for change in operations)]
        if not invalidated:
            return False
        try:
            compare = [_compare(condition) for condition in invalidated]
            about = [condition.key for condition in invalidated]
            return not self._read(Transaction(compare=compare), about=about).succeeded
        except EcompError:
            return True

    def grant(self, seconds: int) -> int:
        """Return a new lease. An unused one expires, so a lost answer does no harm."""
        if self._guard is not None:
            self._guard.admit()
        return int(self._read(Grant(seconds)).ID)

    def keep_alive(self, lease: int) -> int:
        """Refresh a lease; return its remaining seconds, or 0 if it has expired."""
        if self._guard is not None:
            self._guard.admit()
        reply = self._read(KeepAlive(lease), linearizable=False)
        return max(int(reply.TTL), 0) if reply is not None else 0  # `etcd grpc-proxy` reports -1 for an expired lease

    def revoke(self, lease: int) -> None:
        """Revoke a lease and delete its keys; no-op if it has expired."""
        try:
            self._connection.ask_once(Revoke(lease))
        except CallFailure as error:
            if error.code != NOT_FOUND:
                raise self._connection.translated(error, Unreachable) from error

    def recognise(self) -> None:
        """With a guard, check that this is the etcd that is known; raise StrangeEtcd if not."""
        if self._guard is not None:
            entry = self.get(keys.CLUSTER)
            self._guard.recognise(entry.value if entry else None, self.where)

    def adopt(self, new: str) -> None:
        """With a guard that knows no etcd, remember this one; raise EcompError for no identity.

        `new_value` is written to /cluster if that key does not exist.
        """
        while (entry := self.get(keys.CLUSTER)) is None:
            try:
                self.commit([Unchanged(keys.CLUSTER, 0)], [Put(keys.CLUSTER, new)])
            except UnknownOutcome:
                continue  # the next read shows whether it was written
        if self._guard is not None:
            self._guard.adopt(entry.value, self.where)

    def watch(self, wanted: Sequence[WatchCreate], seconds: float, asking: float | None = None) -> Watch:
        """Return the answers to these watches on one stream, for at most `duration_seconds`.

        While it is read the connection serves no other call. After each `progress_seconds` of silence, unless None,
        etcd is asked for its progress (WatchProgress).
        """
        stream: Watch = self._connection.client.watch(wanted, seconds, asking)
        return stream

    def move_on(self) -> None:
        """Replace the connection with a new one, to the next endpoint."""
        self._connection.move_on()

    def close(self) -> None:
        self._connection.close()

    def _read(self, request: Request, linearizable: bool = True, about: Sequence[str] = ()) -> Any:
        """Send a request, again if necessary, until an endpoint answers; `about` names its keys."""
        return self._ask(request, Unreachable, linearizable, about)

    def _write(self, request: Request, about: Sequence[str]) -> Any:
        """Send a request that is not repeated once it may have arrived."""
        if self._guard is not None:
            self._guard.admit()
        return self._ask(request, UnknownOutcome, True, about)

    def _ask(self, request: Request, unanswered: type[Unreachable], linearizable: bool, about: Sequence[str]) -> Any:
        before = self._guard.known if self._guard is not None else None
        reply = self._connection.ask(lambda member, limit: member.call(request, limit), unanswered, about)
        if self._guard is not None and before is not None and linearizable:
            self._guard.check(before, header_of(reply), self.where)
        return reply


def until_committed(attempt: Callable[[], Result | None], lost: EcompError, tries: int, pause: float = 0) -> Result:
    """Call `attempt`, which reads, decides and writes, until it wins; None is a lost race.

    So is a GenerationConflict of placement; after an UnknownOutcome the next read shows what was written. A random
    pause of up to `max_pause_seconds` precedes each repetition: without it, one of two writers can lose each time.

    Raises:
        UnknownOutcome: the last of `max_tries` tries had no answer.
        EcompError: `lost_error` after `max_tries` tries; any other error of `attempt`.
    """
    import random  # imported here: most commands write nothing that others change

    for remaining_tries in reversed(range(tries)):
        try:
            if (result := attempt()) is not None:
                return result
        except GenerationConflict:
            pass
        except UnknownOutcome:
            if not remaining_tries:
                raise
        if pause and remaining_tries:
            time.sleep(random.uniform(0, pause))
    raise lost


def header_of(reply: Any) -> Header:
    return Header(int(reply.header.cluster_id), int(reply.header.revision), int(reply.header.raft_term))


def after(prefix: bytes) -> bytes:
    """Return the end of a prefix's range of keys; a zero byte (no end) if it is all 0xff."""
    stem = prefix.rstrip(b'\xff')
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b'\0'


def _bytes(key: str) -> bytes:
    """Encode a key; a part of it may come from JSON, which allows lone surrogates."""
    return key.encode(errors='surrogatepass')


def entry_of(kv: Any) -> Entry:
    return Entry(kv.key.decode(errors='replace'), kv.value, kv.mod_revision, kv.lease, 0, kv.create_revision)


def _compare(condition: Unchanged | Exists) -> Comparison:
    key = _bytes(condition.key)
    return Comparison(key, GREATER, 0) if isinstance(condition, Exists) else Comparison(key, EQUAL, condition.revision)


def _ends(condition: Unchanged | Exists, operation: Put | Delete) -> bool:
    """Return whether the operation makes a condition false that holds."""
    if condition.key != operation.key:
        return False
    if isinstance(operation, Put):
        return isinstance(condition, Unchanged)
    return isinstance(condition, Exists) or condition.revision > 0


def _operation(operation: Put | Delete) -> Write | Removal:
    key = _bytes(operation.key)
    return Write(key, operation.value.encode(), operation.lease) if isinstance(operation, Put) else Removal(key)
