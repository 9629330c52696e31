"""A client of etcd: reads, transactions, leases and watches."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ecomp import errors
from ecomp.conf import EtcdConfig
from ecomp.metrics import TALLY
from ecomp.model import cluster, keys
from ecomp.model.cluster import Header, KnownCluster
from ecomp.model.json_object import WRITTEN_AT, WRITTEN_BY
from ecomp.model.stored import decode
from ecomp.model.text import format_time
from ecomp.store import messages
from ecomp.store.connection import AnswerTooLong, Connection, read_pages
from ecomp.store.messages import Delete, Exists, Put, Touch, Unchanged, encode_key

if TYPE_CHECKING:
    from ecomp.model.host import ConsumerLookup
    from ecomp.store.http2_client import WatchStream

# What others import from here, as the messages are this package's own.
__all__ = ['Delete', 'Exists', 'Put', 'Touch', 'Unchanged']
Result = TypeVar('Result')
Conditions = Sequence[Unchanged | Exists]
Writes = Sequence[Put | Delete]
# Seconds that a commit waits for a new fence after its fence did not hold.
FENCE_RENEWAL_SECONDS = 1.0
# Seconds between two looks for the new fence.
FENCE_POLL_SECONDS = 0.01
# Tries to read, and to fence, a transaction whose answer was lost.
MAX_SETTLE_TRIES = 3
# Maximum number of operations in a transaction: etcd's own --max-txn-ops.
MAX_TRANSACTION_OPERATIONS = 128


class Guard:
    """Refuses an etcd that is not the one this process knew (rule: familiar-etcd).

    Connections share it. A linearizable reply is compared with the state known before its request. After a refusal
    accept_reply() and raise_if_refused() always raise StrangeEtcd. `on_change` gets each new state with an identity.
    It is called from any thread and must be quick.
    """

    def __init__(self, known_cluster: KnownCluster, on_change: Callable[[KnownCluster], None]) -> None:
        self._lock = threading.Lock()
        # The state seen so far. Read it before sending a request; check the reply against it.
        self.known_cluster = known_cluster
        self._on_change = on_change
        self._refusal = ''
        self._refusal_listeners: list[Callable[[str], None]] = []

    def add_refusal_listener(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once etcd is refused, from any thread, or now if it already is."""
        with self._lock:
            self._refusal_listeners.append(callback)
            strange = self._refusal
        if strange:
            callback(strange)

    def raise_if_refused(self) -> None:
        if self._refusal:
            raise errors.StrangeEtcd(self._refusal)

    def accept_reply(self, cluster_before: KnownCluster, header: Header, endpoints: str) -> None:
        """Learn from a linearizable reply, or raise StrangeEtcd if another etcd sent it."""
        self.raise_if_refused()
        reason = cluster.explain_header_mismatch(cluster_before, header)
        if reason is not None:
            self._refuse(endpoints, reason)
        with self._lock:
            self._learn(self.known_cluster.with_header(header))

    def observe(self, cluster_before: KnownCluster, header: Header) -> bool:
        """Learn from a reply, or return False if it is of another etcd or older than known."""
        if cluster.explain_header_mismatch(cluster_before, header) is not None:
            return False
        # The term is the member's own: after standing for election it may be above the leader's, in the same etcd.
        with self._lock:
            self._learn(self.known_cluster.with_header(header._replace(term=0)))
        return True

    def require_identity(self, value: bytes | None, endpoints: str) -> None:
        """Raise StrangeEtcd unless `value`, which /cluster has, is the known identity."""
        reason = cluster.explain_identity_mismatch(self.known_cluster, value)
        if reason is not None:
            self._refuse(endpoints, reason)

    def adopt(self, value: bytes, endpoints: str) -> None:
        """Trust the identity in a value of /cluster from now on, or raise EcompError if malformed."""
        try:
            identity = decode(cluster.ClusterIdentity, value).identity
        except ValueError as error:
            malformed = f'etcd at {endpoints}: {keys.CLUSTER} is malformed: {error}'
            raise errors.EcompError(f'{malformed}. Fix: etcdctl del {keys.CLUSTER}') from error
        with self._lock:
            current = self.known_cluster
            # It knows nothing older than now of this etcd.
            self._learn(current._replace(identity=identity, first_seen_revision=current.revision))

    def _learn(self, new_cluster: KnownCluster) -> None:
        if new_cluster != self.known_cluster:
            self.known_cluster = new_cluster
            if new_cluster.identity:
                self._on_change(new_cluster)

    def _refuse(self, endpoints: str, reason: str) -> None:
        text = (
            f'etcd at {endpoints} is not the one that this compute used before: {reason}. It was wiped, restored or '
            'replaced, or `etcd:` names another etcd. This compute builds, destroys and publishes nothing. '
            'Fix: correct `etcd:`, or accept this etcd with `ecompute --accept-new-etcd`'
        )
        with self._lock:
            is_first, self._refusal = not self._refusal, self._refusal or text
            listeners = list(self._refusal_listeners) if is_first else []
        for callback in listeners:
            callback(text)
        raise errors.StrangeEtcd(text)


def describe_user() -> str:
    return f'{os.environ.get("USER") or os.getuid()}@{socket.gethostname()}'


@dataclass(frozen=True)
class Entry:
    """A key, which was last written at `revision`.

    `dropped_bytes` is the size of a value that a follower does not keep, or 0. `value` is then empty.
    """

    key: str
    value: bytes
    revision: int
    lease: int = 0  # 0 for none
    dropped_bytes: int = 0
    create_revision: int = field(default=0, compare=False)


class Snapshot(NamedTuple):
    revision: int
    entries: Mapping[str, Entry] = {}


class Fence(NamedTuple):
    """A condition of each commit: the store's owner still holds its key (rule: single-owner).

    `on_broken` is called, from any thread, when a commit fails because the fence does not hold. It must be quick.
    """

    condition: Unchanged
    on_broken: Callable[[], None]
    delete_condition: Unchanged | None = None

    def select_condition(self, operations: Writes) -> Unchanged:
        """Return `delete_condition`, if any, for a commit that only deletes, else `condition`."""
        # A full etcd accepts deletes, but no put of the key.
        if self.delete_condition is not None and all(isinstance(operation, Delete) for operation in operations):
            return self.delete_condition
        return self.condition


class Settlement(NamedTuple):
    """How a commit finds out what became of its transaction, if the answer is lost.

    `fence` changes a key that the transaction compares at a revision above 0, so it can no longer be committed.
    Without a fence, a transaction that may still be committed counts as refused. The caller then reads again, and
    compares the same keys, so that one of its two transactions is refused.
    `find_commit` is asked about a transaction whose writes were replaced or removed, or that was refused. From its keys
    as they are now it returns the revision of the commit, or None.
    `doubt` says, in an error, what is unknown, unless the caller says it.
    """

    fence: Delete | Touch | None = None
    find_commit: Callable[[Mapping[str, Entry]], int | None] = lambda _: None
    doubt: str = ''


class Evidence(NamedTuple):
    """What the keys of a transaction prove, read after it was sent.

    `revision` committed it, or is 0 if that is not proved. `is_refuted`: it had not been committed when the keys were
    read. `can_land`: it may be committed later. `has_changed`: a condition that it would make false is false.
    """

    revision: int
    is_refuted: bool
    can_land: bool
    has_changed: bool


def find_evidence(conditions: Conditions, operations: Writes, entries: Mapping[str, Entry]) -> Evidence:
    """Return what the keys of a transaction, all read at one revision, prove about it."""
    revisions = {key: entry.revision for key, entry in entries.items()}

    def is_met(condition: Unchanged | Exists) -> bool:
        revision = revisions.get(condition.key, 0)
        return revision > 0 if isinstance(condition, Exists) else revision == condition.revision

    puts = [operation for operation in operations if isinstance(operation, Put)]
    own = [each for each in conditions if _is_invalidated_by(each, operations)]
    # A missing key may have existed, and be missing again. A revision never returns.
    lasting = [each for each in conditions if isinstance(each, Unchanged) and each.revision]
    # A transaction writes at one revision, above all it compared. An equal value may be older, or another process's.
    revision = max((revisions.get(put.key, 0) for put in puts), default=0)
    is_committed = (
        bool(own or any(put.lease for put in puts))  # without either, the value may always have been there
        and all(_is_written(put, entries.get(put.key), revision) for put in puts)
        and all(each.revision < revision for each in lasting)
        and not any(0 < revisions.get(each.key, 0) <= revision for each in operations if isinstance(each, Delete))
    )
    return Evidence(
        revision if is_committed else 0,
        is_refuted=any(map(is_met, set(own) & set(lasting))),
        can_land=all(map(is_met, lasting)),
        has_changed=not all(map(is_met, own)),
    )


class Store:
    """One process's client of etcd, to be created after a fork, and never carried over one.

    Each call has the config's timeout. A read is repeated at other endpoints, a transaction only if it did not arrive.

    Raises:
        Unreachable: nothing was changed. NoSpace is one of these errors.
        UnknownOutcome: a transaction's answer was lost or inconclusive. Read back before anything else.
        StrangeEtcd: this is another etcd, perhaps after a write that was carried out.
        Denied: a role of etcd forbids the call.
    """

    # Consulted if several computes have a request for one instance; None: the oldest request counts.
    claims: ConsumerLookup | None = None

    def __init__(self, config: EtcdConfig, guard: Guard | None = None) -> None:
        self._config = config
        self._connection = Connection(config)
        self.endpoints = self._connection.endpoints
        self._guard = guard
        self.fence: Fence | None = None

    @cached_property
    def writer(self) -> str:
        """Who writes: the name in our certificate, else user@host."""
        from ecomp.tls import decode_certificate

        subject = decode_certificate(self._config.cert_cert).get('subject', ()) if self._config.cert_cert else ()
        names = dict(pair for part in subject for pair in part)
        return str(names.get('commonName') or describe_user())

    def make_stamp(self) -> dict[str, str]:
        """Return the fields that tell when and by whom a user's command wrote a value."""
        return {WRITTEN_AT: format_time(datetime.now(UTC)), WRITTEN_BY: self.writer}

    def get(self, key: str) -> Entry | None:
        reply = self._read(messages.Range(encode_key(key)), about=(key,))
        return parse_entry(reply.kvs[0]) if reply.kvs else None

    def read(self, all_keys: Sequence[str]) -> dict[str, Entry]:
        """Return {key: Entry} of those keys that exist, all read at one revision."""
        entries_by_key: dict[str, Entry] = {}
        start, count, revision = 0, MAX_TRANSACTION_OPERATIONS, 0
        while start < len(all_keys):
            ranges = [messages.Range(encode_key(key), revision=revision) for key in all_keys[start : start + count]]
            try:
                reply = self._read(messages.Transaction(success=ranges))
            except AnswerTooLong:
                if len(ranges) == 1:
                    raise
                count = len(ranges) // 2
                continue
            entries = [parse_entry(kv) for response in reply.responses for kv in response.response_range.kvs]
            entries_by_key |= {entry.key: entry for entry in entries}
            start, revision = start + count, revision or reply.header.revision
        return entries_by_key

    def snapshot(
        self, prefix: str, keys_only: bool = False, transform: Callable[[Entry], Entry | None] = lambda entry: entry
    ) -> Snapshot:
        """Read a prefix at one revision, keeping what `transform` returns unless that is None."""
        start = encode_key(prefix)
        end = get_prefix_range_end(start)
        entries: dict[str, Entry] = {}
        revision = 0
        for reply in read_pages(lambda each: self._read(each, about=(prefix,)), start, end, keys_only):
            revision = revision or reply.header.revision
            for kv in reply.kvs:
                transformed = transform(parse_entry(kv))
                if transformed is not None:
                    entries[transformed.key] = transformed
        return Snapshot(revision, entries)

    def sample(self, prefix: str, start: str, limit: int) -> tuple[list[Entry], int]:
        """Sample `limit` entries of a prefix from `start` on, wrapping around, and count its keys."""
        begin, middle = encode_key(prefix), encode_key(start)
        ranges = [messages.Range(middle, get_prefix_range_end(begin), limit), messages.Range(begin, middle, limit)]
        reply = self._read(messages.Transaction(success=ranges), about=(prefix,))
        results = [response.response_range for response in reply.responses]
        entries = [parse_entry(kv) for result in results for kv in result.kvs]
        return entries[:limit], sum(int(result.count) for result in results)

    def read_version(self) -> str:
        # https://etcd.io/docs/v3.4/dev-guide/api_reference_v3/ (Maintenance.Status), which needs no role
        return str(self._read(messages.Status(), linearizable=False).version)

    def count(self, prefix: str) -> int:
        key = encode_key(prefix)
        return int(self._read(messages.Range(key, get_prefix_range_end(key), count_only=True), about=(prefix,)).count)

    def has_changed(self, prefix: str, revision: int) -> bool:
        """Return whether an existing key of a prefix was written at `revision` or later."""
        key = encode_key(prefix)
        request = messages.Range(key, get_prefix_range_end(key), limit=1, keys_only=True, min_mod_revision=revision)
        return bool(self._read(request, about=(prefix,)).kvs)

    def read_revision(self) -> int:
        reply = self._read(messages.Range(encode_key(keys.CLUSTER), count_only=True), about=(keys.CLUSTER,))
        return int(reply.header.revision)

    def commit(
        self, conditions: Conditions, operations: Writes, settlement: Settlement | None = None, use_fence: bool = True
    ) -> int | None:
        """Carry out all operations if all conditions hold, and return the new revision, else None.

        If the fence does not hold, its on_broken() is called, and the transaction is repeated with the next fence.
        After a lost answer the keys are read, see find_evidence(), and `settlement` decides what they do not prove.
        https://etcd.io/docs/v3.4/learning/api/#transaction

        Raises:
            Unreachable: the fence does not hold, and there is no new one within FENCE_RENEWAL_SECONDS.
            UnknownOutcome: it remains unknown what became of the transaction.
        """
        deadline = 0.0
        while True:
            fence = self.fence if use_fence else None
            fencing = [fence.select_condition(operations)] if fence else []
            compared = [*conditions, *fencing]
            reads = [messages.Range(encode_key(condition.key), keys_only=True) for condition in fencing]
            request = messages.Transaction(compared, operations, reads)
            try:
                send = self._write if operations else self._read
                reply = send(request, about=[operation.key for operation in operations])
            except (errors.UnknownOutcome, errors.NoSpace) as error:
                return self._settle(conditions, compared, operations, settlement, error)
            if reply.succeeded:
                return int(reply.header.revision)
            fence_revisions = [kv.mod_revision for each in reply.responses for kv in each.response_range.kvs]
            if fence is None or (fence_revisions or [0]) == [fencing[0].revision]:
                return None
            deadline = deadline or time.monotonic() + FENCE_RENEWAL_SECONDS
            self._await_fence(fence, fencing[0].key, deadline)

    def _await_fence(self, broken_fence: Fence, key: str, deadline: float) -> None:
        broken_fence.on_broken()
        # After an outage longer than the lease, all commits wait here until the key is put again.
        while self.fence is broken_fence and time.monotonic() < deadline:
            time.sleep(FENCE_POLL_SECONDS)
        if time.monotonic() >= deadline:
            raise errors.Unreachable(f'{key} expired or was changed: nothing is written until ecompute restores it')

    def _settle(
        self,
        conditions: Conditions,
        compared: Conditions,
        operations: Writes,
        settlement: Settlement | None,
        error: errors.UnknownOutcome | errors.NoSpace,
    ) -> int | None:
        """Find out what became of a transaction without an answer, or refused by a full etcd."""
        # etcd checks its space before it proposes a write and when it applies it. The second time it reports NoSpace
        # and writes nevertheless, as for all writes in flight then. https://github.com/etcd-io/etcd/issues/16659
        doubt = settlement.doubt if settlement else f'{operations[0].key} was changed'
        clause = f'; it is unknown whether {doubt}' if doubt else ''
        unknown = errors.UnknownOutcome(errors.put_before_fix(str(error), clause), error.backend)
        for _ in range(MAX_SETTLE_TRIES):
            try:
                entries = self.read(list({each.key: None for each in (*compared, *operations)}))
            except errors.EcompError as failure:
                raise unknown from failure
            evidence = find_evidence(compared, operations, entries)
            if evidence.revision:
                return evidence.revision
            if isinstance(error, errors.NoSpace) and (evidence.is_refuted or not evidence.has_changed):
                raise error  # it was not committed nevertheless
            if evidence.is_refuted and not evidence.can_land:
                # What the caller compares may still hold: then only the store's fence was replaced or has expired.
                is_allowed = find_evidence(conditions, operations, entries).can_land
                return self.commit(conditions, operations, settlement) if is_allowed else None
            if settlement is None:
                break
            fence = settlement.fence
            if fence is None or not evidence.can_land or isinstance(error, errors.NoSpace):
                return settlement.find_commit(entries)
            # This condition never comes true again, once the fence has changed the key.
            lasting = [each for each in conditions if isinstance(each, Unchanged) and each.revision]
            condition = next((each for each in lasting if each.key == fence.key), None)
            if condition is None:
                break
            if self._fence_off(condition, fence, operations):
                return None
        raise unknown from error

    def _fence_off(self, condition: Unchanged, fence: Delete | Touch, operations: Writes) -> bool:
        """Write `fence`, and return whether this proves that `operations` failed and always will."""
        # Without an answer to this, too, the next read shows whether the key has changed.
        with suppress(errors.EcompError):
            request = messages.Transaction([condition], [fence])
            is_done = self._write(request, [fence.key]).succeeded
            return is_done and any(operation.key == fence.key for operation in operations)  # it would have changed it
        return False

    def grant(self, seconds: int) -> int:
        # An unused lease expires, so a lost answer does no harm.
        return int(self._read(messages.Grant(seconds)).ID)

    def keep_alive(self, lease: int) -> int:
        """Refresh a lease, and return its remaining seconds, or 0 if it has expired."""
        if self._guard is not None:
            self._guard.raise_if_refused()
        reply = self._read(messages.KeepAlive(lease), linearizable=False)
        return max(int(reply.TTL), 0) if reply is not None else 0  # `etcd grpc-proxy` reports -1 for an expired lease

    def read_lease_age(self, lease: int) -> int | None:
        """Return the seconds since a lease was granted, renewed or reset, or None if it is gone."""
        reply = self._read(messages.TimeToLive(lease), linearizable=False)
        return int(reply.grantedTTL - reply.TTL) if reply.TTL > 0 else None

    def revoke(self, lease: int) -> None:
        """Revoke a lease and delete its keys, or do nothing if it has expired.

        After Unreachable the lease may have been revoked.
        """
        try:
            self._read(messages.Revoke(lease), linearizable=False)
        except errors.EcompError as error:
            if getattr(error.__cause__, 'code', '') != messages.NOT_FOUND:
                raise

    def require_identity(self) -> None:
        """If there is a guard, read /cluster, and raise StrangeEtcd if it is not the known one."""
        if self._guard is not None:
            entry = self.get(keys.CLUSTER)
            self._guard.require_identity(entry.value if entry else None, self.endpoints)

    def adopt(self, new_value: str) -> None:
        """Write `new_value` to /cluster unless it exists, and let the guard adopt its value."""
        while (entry := self.get(keys.CLUSTER)) is None:
            self.commit([Unchanged(keys.CLUSTER, 0)], [Put(keys.CLUSTER, new_value)], Settlement())
        if self._guard is not None:
            self._guard.adopt(entry.value, self.endpoints)

    def watch(
        self, requests: Sequence[messages.WatchCreate], duration_seconds: float, progress_seconds: float | None = None
    ) -> WatchStream:
        """Return the answers: iterating over them sends the watches, and may raise CallFailure."""
        stream: WatchStream = self._connection.client.watch(requests, duration_seconds, progress_seconds)
        return stream

    def reconnect(self) -> None:
        self._connection.reconnect()

    def close(self) -> None:
        self._connection.close()

    def _read(self, request: messages.Request, linearizable: bool = True, about: Sequence[str] = ()) -> Any:
        return self._ask(request, False, linearizable, about)

    def _write(self, request: messages.Request, about: Sequence[str]) -> Any:
        return self._ask(request, True, True, about)

    def _ask(self, request: messages.Request, is_write: bool, linearizable: bool, about: Sequence[str]) -> Any:
        no_answer_error = errors.UnknownOutcome if is_write else errors.Unreachable
        guard = self._guard if linearizable else None
        if guard is not None:
            guard.raise_if_refused()
            before = guard.known_cluster
        with TALLY.measure('etcd'):
            reply = self._connection.ask(request, no_answer_error, about)
        if guard is not None:
            guard.accept_reply(before, parse_header(reply), self.endpoints)
        return reply


def retry_until_committed(
    attempt: Callable[[], Result | None], lost_error: errors.EcompError, max_tries: int, max_pause_seconds: float = 0
) -> Result:
    """Call `attempt`, which reads, decides and writes, until it wins its race.

    None, or a GenerationConflict of placement, means that it lost. `lost_error` is raised after `max_tries`. After an
    UnknownOutcome the next try reads what was written, so only the last one raises it.
    """
    import random  # imported here: most commands write nothing that others change

    for remaining_tries in reversed(range(max_tries)):
        try:
            if (result := attempt()) is not None:
                return result
        except errors.GenerationConflict:
            pass
        except errors.UnknownOutcome:
            if not remaining_tries:
                raise
        if max_pause_seconds and remaining_tries:
            time.sleep(random.uniform(0, max_pause_seconds))  # else one of two writers could always lose
    raise lost_error


def parse_header(reply: Any) -> Header:
    return Header(int(reply.header.cluster_id), int(reply.header.revision), int(reply.header.raft_term))


def get_prefix_range_end(prefix: bytes) -> bytes:
    """Return the end of a prefix's range of keys, a zero byte if it has no end."""
    stem = prefix.rstrip(b'\xff')
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b'\0'


def parse_entry(kv: Any) -> Entry:
    return Entry(kv.key.decode(errors='replace'), kv.value, kv.mod_revision, kv.lease, 0, kv.create_revision)


def _is_written(put: Put, entry: Entry | None, revision: int) -> bool:
    return entry is not None and (entry.revision, entry.value, entry.lease) == (revision, put.value.encode(), put.lease)


def _is_invalidated_by(condition: Unchanged | Exists, operations: Writes) -> bool:
    kinds = {type(operation) for operation in operations if operation.key == condition.key}
    if isinstance(condition, Exists):
        return Delete in kinds
    return Put in kinds or (Delete in kinds and condition.revision > 0)
