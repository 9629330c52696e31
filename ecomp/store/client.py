"""Reads, transactions and leases on etcd, with one answer for each way they can end; who is alive, and who is at what.

Every call has a time limit and asks for a member that has a leader: without, a member cut off from the others answers
for ever.

Guard is rule 10: nothing is taken from, or written to, an etcd that is not the one we knew. All connections of a
process to one etcd share it. Every linearizable reply is compared with what had been seen before its request was
sent; a strange one raises StrangeEtcd, and so does every call from then on.
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
    """What is known of etcd. `on_change` hears of everything new that is to be remembered, and must be quick."""

    def __init__(self, known: KnownCluster, on_change: Callable[[KnownCluster], None]) -> None:
        self._lock = threading.Lock()
        self._known = known
        self._on_change = on_change
        self._strange = ''
        self._when_strange: list[Callable[[str], None]] = []

    @property
    def known(self) -> KnownCluster:
        """What has been seen so far: take it before a request is sent, and look at the reply with it."""
        return self._known

    def when_strange(self, tell: Callable[[str], None]) -> None:
        """Have tell(why), too, called once it is strange, from any thread; now if it is already."""
        with self._lock:
            self._when_strange.append(tell)
            strange = self._strange
        if strange:
            tell(strange)

    def admit(self) -> None:
        """Raise StrangeEtcd if it is known to be strange."""
        if self._strange:
            raise StrangeEtcd(self._strange)

    def check(self, before: KnownCluster, header: Header, where: str) -> None:
        """Look at a linearizable reply; StrangeEtcd if it is none of the etcd we knew."""
        self.admit()
        reason = cluster.unfamiliar(before, header)
        if reason is not None:
            self._refuse(where, reason)
        with self._lock:
            self._learn(self._known.with_header(header))

    def observe(self, before: KnownCluster, header: Header) -> bool:
        """Look at any other reply; False if it is older than `before`: of a member that lags, or worse."""
        if cluster.unfamiliar(before, header) is not None:
            return False
        # Its term is that member's own: of one that has just stood for election it is higher than the leader's, who
        # answers on for a moment, and is no other etcd for that.
        with self._lock:
            self._learn(self._known.with_header(replace(header, term=0)))
        return True

    def recognise(self, value: bytes | None, where: str) -> None:
        """Look at what /cluster of the etcd at `where` has, None for no such key; StrangeEtcd if it is not ours."""
        reason = cluster.unlike(self._known, value)
        if reason is not None:
            self._refuse(where, reason)

    def adopt(self, value: bytes, where: str) -> None:
        """With nothing remembered, know the etcd at `where` by what its /cluster has.

        Raises EcompError if no identity can be read there.
        """
        try:
            identity = cluster.identity(value)
        except ValueError as error:
            raise EcompError(f'{keys.CLUSTER} in etcd at {where}: {error}: remove that key') from error
        with self._lock:
            known = self._known
            self._learn(KnownCluster(identity, known.cluster, known.revision, known.term))

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
            first, self._strange = not self._strange, self._strange or text
            told = list(self._when_strange) if first else []
        for tell in told:
            tell(text)
        raise StrangeEtcd(text)


Result = TypeVar('Result')


def is_alive(store: Store, compute: str) -> bool:
    """Whether a compute is alive now."""
    return silence(store, compute) is None


def silence(store: Store, compute: str) -> Unchanged | None:
    """The condition that a compute stays silent; None for one that is alive.

    Its revision is that of the key on no lease that is there, 0 where there is none.
    """
    entry = store.get(keys.compute(compute))
    if entry is not None and entry.lease:
        return None
    return Unchanged(keys.compute(compute), entry.revision if entry is not None else 0)


READ_BACKS = 3
"""Tries to withdraw an attempt: where an answer is lost, the next one says what became of it."""


def at_it(store: Store) -> set[str]:
    """The instances that a living eschedule is at, or that wait to be taken, or that a compute is taking."""
    # In this order: what is delivered into a queue meanwhile is seen twice rather than not at all.
    placing = in_requests(store.snapshot(keys.ATTEMPTS))
    queues = store.snapshot(keys.QUEUES, keys_only=True).entries
    return placing | {keys.in_queue(key) for key, each in queues.items() if each.lease or not key.endswith(keys.TAKER)}


def wanted(store: Store, holding: Mapping[str, Iterable[str]], waiting: bool = True) -> set[str]:
    """Which of these instances somebody stands behind: {instance: the computes whose request keys count}.

    Requests move from /requests and /queues to /hosts: read the other way round, one that moves is in neither.
    `waiting` False: one that waits in a queue does not count, for the compute that would take it is dead.
    """
    there = at_it(store) if waiting else in_requests(store.snapshot(keys.ATTEMPTS))
    return {
        instance
        for instance, computes in holding.items()
        if instance in there or any(store.get(keys.request(compute, instance)) is not None for compute in computes)
    }


def in_requests(snapshot: Snapshot) -> set[str]:
    """The instances that living eschedules are at. A key on no lease is nobody's: somebody has put it by hand."""
    there = ((key, entry.value) for key, entry in snapshot.entries.items() if entry.lease)
    return {instance for key, value in there for instance in announced(key, value)}


def being_taken(store: Store) -> set[str]:
    """The waiting instances that a compute has marked: one that marks it after this claims after this, too."""
    waiting = store.snapshot(keys.QUEUES, keys_only=True).entries
    return {keys.in_queue(key) for key, each in waiting.items() if each.lease and key.endswith(keys.TAKER)}


def in_line(snapshot: Snapshot, revision: int) -> tuple[int, int]:
    """How many instances attempts older than `revision` place, and newer ones; what is on no lease is nobody's."""

    def instances(entries: Iterable[Entry]) -> int:
        # A set's key is named by the set's own uuid.
        return sum(len(announced(each.key, each.value) - {keys.last(each.key)}) or 1 for each in entries)

    entries = snapshot.entries.values()
    return (
        instances(each for each in entries if each.lease and each.revision < revision),
        instances(each for each in entries if each.lease and each.revision > revision),
    )


def withdraw(store: Store, key: str, revision: int) -> bool:
    """Delete our attempt's key if it is still of this revision; False if it is gone or somebody else's.

    While it is there nothing that needs it has been done; but a transaction still on its way could land after a mere
    look, and cannot without it. UnknownOutcome.
    """
    for left in reversed(range(READ_BACKS)):
        try:
            return store.commit([Unchanged(key, revision)], [Delete(key)]) is not None
        except UnknownOutcome:
            if not left:
                raise
    return False


if TYPE_CHECKING:
    from ecomp.model.host import Claims
    from ecomp.store.by_h2 import Watch

RENEWED = 1.0
"""Seconds in which a fence that did not hold has to be a new one."""

AT_ONCE = 128
"""Operations in a transaction, at most: etcd's own --max-txn-ops."""


@dataclass(frozen=True)
class Entry:
    """One key: its value, the revision that wrote it last, its lease (0: none), and the revision that made it.

    `dropped` is how many bytes the value has that a follower does not keep: `value` is empty then.
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
    """A condition: the key is there, whatever it says."""

    key: str


class Put(NamedTuple):
    """An operation: the key gets this value, on a lease if one is given."""

    key: str
    value: str
    lease: int = 0


class Delete(NamedTuple):
    """An operation: the key goes."""

    key: str


class Fence(NamedTuple):
    """What every commit of a store compares besides: that its owner is who it says it is (rule 9).

    `broken` is told, from any thread, that a commit was refused for it, and must be quick. Where there is one,
    `deletes` is compared instead by commits of deletes alone: a full etcd takes nothing else, so no new key of its own.
    """

    condition: Unchanged
    broken: Callable[[], None]
    deletes: Unchanged | None = None

    def of(self, operations: Sequence[Put | Delete]) -> Unchanged:
        """The condition that a commit of these operations compares."""
        if self.deletes is not None and all(isinstance(each, Delete) for each in operations):
            return self.deletes
        return self.condition


class Store:
    """One process's etcd. Made after a fork or spawn, never carried over one.

    Errors: Unreachable when nothing was changed (NoSpace is such; StrangeEtcd, with a guard, may come of the answer to
    a write), UnknownOutcome when a transaction was sent and no answer came, or one that does not tell (read back before
    anything else), EcompError when etcd answered and refused.
    """

    claims: Claims | None = None  # asked where several computes are asked for one instance; None: the oldest counts

    def __init__(self, config: EtcdConfig, guard: Guard | None = None) -> None:
        self._connection = Connection(config)
        self.where = self._connection.where
        self._guard = guard
        self.fence: Fence | None = None

    def beside(self) -> Store:
        """Another one over the same connection, with a fence of its own. Whoever has both closes one."""
        other = copy(self)
        other.fence = None
        return other

    def get(self, key: str) -> Entry | None:
        """The key's entry, None if it is not there."""
        reply = self._read(Range(_bytes(key)), about=(key,))
        return entry_of(reply.kvs[0]) if reply.kvs else None

    def read(self, wanted: Sequence[str]) -> dict[str, Entry]:
        """Those of these keys that are there, all at one revision; fewer at once where their values are too large."""
        found: dict[str, Entry] = {}
        first, count, revision = 0, AT_ONCE, 0
        while first < len(wanted):
            ranges = [Range(_bytes(key), revision=revision) for key in wanted[first : first + count]]
            try:
                reply = self._read(Transaction(success=ranges))
            except TooLong:
                if len(ranges) == 1:
                    raise
                count = len(ranges) // 2
                continue
            entries = [entry_of(kv) for each in reply.responses for kv in each.response_range.kvs]
            found |= {each.key: each for each in entries}
            first, revision = first + count, revision or reply.header.revision
        return found

    def snapshot(
        self, prefix: str, keys_only: bool = False, keep: Callable[[Entry], Entry | None] = lambda entry: entry
    ) -> Snapshot:
        """Everything under a prefix, in pages, all at one revision. `keep` says what of each, page by page."""
        start = _bytes(prefix)
        end = after(start)
        entries: dict[str, Entry] = {}
        revision = 0
        for reply in pages(lambda each: self._read(each, about=(prefix,)), start, end, keys_only):
            revision = revision or reply.header.revision
            for kv in reply.kvs:
                kept = keep(entry_of(kv))
                if kept is not None:
                    entries[kept.key] = kept
        return Snapshot(revision, entries)

    def around(self, prefix: str, start: str, limit: int) -> tuple[list[Entry], int]:
        """At most so many keys under a prefix, from `start` on and then from the first, and how many there are in all.

        One transaction, however many there are.
        """
        begin, middle = _bytes(prefix), _bytes(start)
        ranges = [Range(middle, after(begin), limit), Range(begin, middle, limit)]
        reply = self._read(Transaction(success=ranges), about=(prefix,))
        found = [each.response_range for each in reply.responses]
        entries = [entry_of(kv) for each in found for kv in each.kvs]
        return entries[:limit], sum(int(each.count) for each in found)

    def version(self) -> str:
        """What the member that answers calls its version, as `3.4.23`.

        https://etcd.io/docs/v3.4/dev-guide/api_reference_v3/ (Maintenance.Status; not asked for a user's rights)
        """
        return str(self._read(Status(), linearizable=False).version)

    def count(self, prefix: str) -> int:
        """How many keys there are under a prefix."""
        key = _bytes(prefix)
        return int(self._read(Range(key, after(key), count_only=True), about=(prefix,)).count)

    def has_changed(self, prefix: str, since: int) -> bool:
        """Whether a key that is there under a prefix was changed at this revision or later."""
        key = _bytes(prefix)
        asked = Range(key, after(key), limit=1, keys_only=True, since=since)
        return bool(self._read(asked, about=(prefix,)).kvs)

    def revision(self) -> int:
        """The revision that etcd is at."""
        reply = self._read(Range(_bytes(keys.CLUSTER), count_only=True), about=(keys.CLUSTER,))
        return int(reply.header.revision)

    def commit(
        self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete], fenced: bool = True
    ) -> int | None:
        """All operations if all conditions hold: the new revision; else None, and nothing is changed.

        Raises UnknownOutcome when no answer came, and Unreachable when the store's fence does not hold, nor a new one
        within a moment.
        https://etcd.io/docs/v3.4/learning/api/#transaction
        """
        until = 0.0
        while True:
            fence = self.fence if fenced else None
            held = fence.of(operations) if fence else None
            request = Transaction(
                compare=[_compare(each) for each in (*conditions, *([held] if held else []))],
                success=[_operation(each) for each in operations],
                failure=[Range(_bytes(held.key), keys_only=True)] if held else [],
            )
            try:
                reply = self._write(request, [each.key for each in operations])
            except NoSpace as error:
                if self._may_be_written([*conditions, *([held] if held else [])], operations):
                    raise UnknownOutcome(f'{error}; whether this was written before that is not known') from error
                raise
            if reply.succeeded:
                return int(reply.header.revision)
            found = reply.responses[0].response_range.kvs if held else []
            if fence is None or held is None or (found[0].mod_revision if found else 0) == held.revision:
                return None
            fence.broken()
            until = until or time.monotonic() + RENEWED
            # After an outage longer than the lease everybody is here, while the key is put again.
            while self.fence is fence and time.monotonic() < until:
                time.sleep(RENEWED / 100)
            if time.monotonic() >= until:
                raise Unreachable(f'{held.key} is not as we put it: nothing is written before it is')

    def _may_be_written(self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete]) -> bool:
        """Whether what etcd has no space for may be there. False where nothing is compared that would tell.

        etcd looks twice whether it has space: before it passes a write on, and when that is its turn. Then it writes,
        and says all the same that it has none: so to all that are under way while it becomes full.
        https://github.com/etcd-io/etcd/issues/16659
        """
        # Of the others one may not hold for another reason, and etcd has not looked at them if it was full before.
        telling = [each for each in conditions if any(_ends(each, operation) for operation in operations)]
        if not telling:
            return False
        try:
            compare = [_compare(each) for each in telling]
            about = [each.key for each in telling]
            return not self._read(Transaction(compare=compare), about=about).succeeded
        except EcompError:
            return True

    def grant(self, seconds: int) -> int:
        """A new lease. One nobody uses ends by itself, so an unknown outcome harms nobody."""
        if self._guard is not None:
            self._guard.admit()
        return int(self._read(Grant(seconds)).ID)

    def keep_alive(self, lease: int) -> int:
        """Refresh a lease; the seconds it now has, 0 when it is gone."""
        if self._guard is not None:
            self._guard.admit()
        reply = self._read(KeepAlive(lease), linearizable=False)
        return max(int(reply.TTL), 0) if reply is not None else 0  # `etcd grpc-proxy` says -1 of one that is gone

    def revoke(self, lease: int) -> None:
        """End a lease and every key on it. One that is gone already is fine."""
        try:
            self._connection.ask_once(Revoke(lease))
        except CallFailure as error:
            if error.code != NOT_FOUND:
                raise self._connection.translated(error, Unreachable) from error

    def recognise(self) -> None:
        """With a guard, see that this is the etcd we knew; StrangeEtcd if not."""
        if self._guard is not None:
            entry = self.get(keys.CLUSTER)
            self._guard.recognise(entry.value if entry else None, self.where)

    def adopt(self, new: str) -> None:
        """With a guard that remembers nothing, take this etcd for the one we know; EcompError for one without a name.

        `new` is put into /cluster if there is nothing.
        """
        while (entry := self.get(keys.CLUSTER)) is None:
            try:
                self.commit([Unchanged(keys.CLUSTER, 0)], [Put(keys.CLUSTER, new)])
            except UnknownOutcome:
                continue  # the next look says what became of it
        if self._guard is not None:
            self._guard.adopt(entry.value, self.where)

    def watch(self, wanted: Sequence[WatchCreate], seconds: float, asking: float | None = None) -> Watch:
        """What answers these on one stream, for so many seconds at most. Nobody else is answered while it is read.

        Where nothing comes for `asking` seconds etcd is asked how far it has told (WatchProgress), again and again.
        """
        found: Watch = self._connection.client.watch(wanted, seconds, asking)
        return found

    def move_on(self) -> None:
        """Use a new connection, to the next endpoint, in place of the present one."""
        self._connection.move_on()

    def close(self) -> None:
        """Let the connection go."""
        self._connection.close()

    def _read(self, request: Request, linearizable: bool = True, about: Sequence[str] = ()) -> Any:
        """Ask until one endpoint answers, within the time limit; it may be sent again. `about`: which keys."""
        return self._ask(request, Unreachable, linearizable, about)

    def _write(self, request: Request, about: Sequence[str]) -> Any:
        """The same, but nothing is sent a second time that may have arrived."""
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
    """Return the first answer of `attempt` that is not None: it looks, decides and writes, and None is a lost race.

    It is called again as well where placement tells of the lost race (GenerationConflict), and where a write had no
    answer: its next look says what became of that. Up to `pause` seconds pass before, by chance: of two that write
    without one, one can lose each time.

    Raises:
        UnknownOutcome: the last of so many tries had no answer.
        EcompError: `lost` after so many tries, and whatever else `attempt` raises.
    """
    import random  # here: most commands write nothing that others change

    for left in reversed(range(tries)):
        try:
            if (answer := attempt()) is not None:
                return answer
        except GenerationConflict:
            pass
        except UnknownOutcome:
            if not left:
                raise
        if pause and left:
            time.sleep(random.uniform(0, pause))
    raise lost


def header_of(reply: Any) -> Header:
    """The header of a reply, as a value."""
    return Header(int(reply.header.cluster_id), int(reply.header.revision), int(reply.header.raft_term))


def after(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin so. b'\0', which means all keys from it on, where it is all 0xff."""
    kept = prefix.rstrip(b'\xff')
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b'\0'


def _bytes(key: str) -> bytes:
    """A part of a key may come from JSON, which knows halves of surrogate pairs; to etcd it is bytes."""
    return key.encode(errors='surrogatepass')


def entry_of(kv: Any) -> Entry:
    """A key as etcd tells of it, as a value."""
    return Entry(kv.key.decode(errors='replace'), kv.value, kv.mod_revision, kv.lease, 0, kv.create_revision)


def _compare(condition: Unchanged | Exists) -> Comparison:
    key = _bytes(condition.key)
    return Comparison(key, GREATER, 0) if isinstance(condition, Exists) else Comparison(key, EQUAL, condition.revision)


def _ends(condition: Unchanged | Exists, operation: Put | Delete) -> bool:
    """Whether the condition, which held, does not any more once the operation is done."""
    if condition.key != operation.key:
        return False
    if isinstance(operation, Put):
        return isinstance(condition, Unchanged)
    return isinstance(condition, Exists) or condition.revision > 0


def _operation(operation: Put | Delete) -> Write | Removal:
    key = _bytes(operation.key)
    return Write(key, operation.value.encode(), operation.lease) if isinstance(operation, Put) else Removal(key)
