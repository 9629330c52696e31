"""etcd in memory, behind the product's own store; a call is one atomic step.

test_models_are_true.py compares it with a real etcd.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from ecomp.errors import EcompError, NoSpace, Unreachable
from ecomp.model import keys
from ecomp.store.client import Delete, Entry, Exists, Fence, Put, Snapshot, Store, Unchanged
from tests.model.acting import Call
from tests.model.world import World

# The maximum number of operations, and of conditions, in one transaction.
MAX_TRANSACTION_OPERATIONS = 128
FENCE_RENEWAL_SECONDS = 1.0


@dataclass
class Lease:
    """One lease with the name of the actor that owns it; '' if the scene granted it."""

    owner: str
    seconds: int


class Etcd:
    """The contents of etcd, with a fingerprint that distinguishes two states.

    Two states differ if a key was written by another actor or at another step of that actor. The order of writes by
    different actors does not count, except for requests and queues, whose order has a meaning, and for quotas, which
    two actors may change concurrently.
    """

    def __init__(self, world: World) -> None:
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
        self._check_room()
        self.leases[lease] = Lease(owner, seconds)
        return lease

    def end_lease(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            expired = [key for key, entry in self.entries.items() if entry.lease == lease]
            if expired:
                self._write([Delete(key) for key in expired])

    def commit(self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete]) -> int | None:
        """Write the operations and return the new revision, or None if a condition does not hold."""
        if len(conditions) > MAX_TRANSACTION_OPERATIONS or len(operations) > MAX_TRANSACTION_OPERATIONS:
            raise EcompError('etcd refuses: too many operations in txn request')
        put = [operation.key for operation in operations if isinstance(operation, Put)]
        deleted = {operation.key for operation in operations if isinstance(operation, Delete)}
        if len(set(put)) < len(put) or not deleted.isdisjoint(put):
            raise EcompError('etcd refuses: duplicate key given in txn request')
        if put:
            self._check_room()  # etcd reports this before it compares anything
        if not all(map(self.is_met, conditions)):
            return None
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self.leases:
                expired = (
                    'the lease expired (this process may have been suspended), and nothing was written. '
                    'Try: the same command again'
                )
                raise EcompError(f'etcd refuses: requested lease not found: {expired}')
        return self._write(operations)

    def _check_room(self) -> None:
        if self.is_full:
            raise NoSpace('etcd is full', 'etcd')

    def is_met(self, condition: Unchanged | Exists) -> bool:
        entry = self.entries.get(condition.key)
        if isinstance(condition, Exists):
            return entry is not None
        return (entry.revision if entry is not None else 0) == condition.revision

    def make_fingerprint(self, answer: object) -> Hashable:
        """Return the fingerprint of an answer: who wrote its entries, as described for the class."""
        if isinstance(answer, Entry):
            return answer.key, answer.value, self.writer_marks[answer.revision], answer.lease
        if isinstance(answer, Snapshot):
            return tuple(map(self.make_fingerprint, answer.entries.values()))
        return self.writer_marks.get(answer, 0) if isinstance(answer, int) else repr(answer)

    def _write(self, operations: Sequence[Put | Delete]) -> int:
        if not any(isinstance(operation, Put) or operation.key in self.entries for operation in operations):
            return self.revision  # nothing was deleted, and etcd makes no new revision for that
        self.revision += 1
        mark = self.writer_marks[self.revision] = self.world.get_writer_mark()
        for operation in operations:
            before = self.entries.pop(operation.key, None)
            self._fingerprint ^= hash(self.make_fingerprint(before)) if before else 0
            if isinstance(operation, Put):
                created = before.created if before else self.revision
                new = Entry(operation.key, operation.value.encode(), self.revision, operation.lease, created=created)
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


class ModelStore(Store):
    """The connection of one process: the product's store with all its calls replaced."""

    def __init__(self, etcd: Etcd) -> None:
        self.endpoints = 'memory'
        self.fence: Fence | None = None
        self._etcd = etcd
        self._world = etcd.world

    def get(self, key: str) -> Entry | None:
        return self._world.call(
            Call('etcd', ('get', key)), lambda: self._etcd.entries.get(key), self._etcd.make_fingerprint
        )

    def snapshot(
        self, prefix: str, keys_only: bool = False, transform: Callable[[Entry], Entry | None] = lambda entry: entry
    ) -> Snapshot:
        def read() -> Snapshot:
            entries = self._etcd.entries
            matching = {key: entries[key] for key in sorted(entries) if key.startswith(prefix)}
            if keys_only:
                matching = {key: replace(entry, value=b'') for key, entry in matching.items()}
            transformed = {key: new for key, entry in matching.items() if (new := transform(entry)) is not None}
            return Snapshot(self._etcd.revision, transformed)

        return self._world.call(Call('etcd', ('list', prefix)), read, self._etcd.make_fingerprint)

    def read(self, requested_keys: Sequence[str]) -> dict[str, Entry]:
        def select() -> dict[str, Entry]:
            return {key: self._etcd.entries[key] for key in requested_keys if key in self._etcd.entries}

        def shape(entries: dict[str, Entry]) -> Hashable:
            return tuple(map(self._etcd.make_fingerprint, entries.values()))

        return self._world.call(Call('etcd', ('read', tuple(requested_keys))), select, shape)

    def sample(self, prefix: str, start: str, limit: int) -> tuple[list[Entry], int]:
        def select() -> tuple[list[Entry], int]:
            names = sorted(key for key in self._etcd.entries if key.startswith(prefix))
            order = sorted(names, key=lambda key: key < start)
            return [self._etcd.entries[key] for key in order[:limit]], len(names)

        def shape(answer: tuple[list[Entry], int]) -> Hashable:
            return tuple(map(self._etcd.make_fingerprint, answer[0])), answer[1]

        return self._world.call(Call('etcd', ('around', prefix, start, limit)), select, shape)

    def count(self, prefix: str) -> int:
        entries = self._etcd.entries
        return self._world.call(Call('etcd', ('count', prefix)), lambda: sum(key.startswith(prefix) for key in entries))

    def commit(
        self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete], use_fence: bool = True
    ) -> int | None:
        while True:
            fence = self.fence if use_fence else None
            held = fence.select_condition(operations) if fence else None
            compared = [*conditions, *([held] if held else [])]
            marks = tuple((condition.key, self._get_writer_mark(condition)) for condition in compared)
            call = Call('etcd', ('commit', marks, tuple(operations)), writes=True)

            def write(compared: Sequence[Unchanged | Exists] = compared, held: Unchanged | None = held) -> int | None:
                written = self._etcd.commit(compared, operations)
                is_ours = held is None or self._etcd.is_met(held)
                return written if written is not None else None if is_ours else -1

            written = self._world.call(call, write, self._etcd.make_fingerprint)
            if written != -1:
                return written
            assert fence is not None
            assert held is not None
            fence.on_broken()
            self._world.sleep(FENCE_RENEWAL_SECONDS)
            if self.fence is fence:
                raise Unreachable(f'{held.key} expired or was changed: nothing is written until ecompute restores it')

    def grant(self, seconds: int) -> int:
        actor, name = self._world.current, 'the scene'
        if actor is not None:
            actor.leases += 1
            # The id must not depend on what other actors do.
            lease, name = 100_000 * (self._world.actors.index(actor) + 1) + actor.leases, actor.name
        else:
            self._etcd.scene_leases += 1
            lease = self._etcd.scene_leases

        return self._world.call(Call('etcd', ('grant', seconds)), lambda: self._etcd.grant(seconds, name, lease))

    def keep_alive(self, lease: int) -> int:
        def keep() -> int:
            return self._etcd.leases[lease].seconds if lease in self._etcd.leases else 0

        return self._world.call(Call('etcd', ('keep', lease)), keep, repr)

    def revoke(self, lease: int) -> None:
        """Revoke a lease; one that has already expired is not an error, as in Store."""
        self._world.call(Call('etcd', ('revoke', lease)), lambda: self._etcd.end_lease(lease))

    def check_identity(self) -> None:
        """Do nothing: this is always the known etcd."""

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _get_writer_mark(self, condition: Unchanged | Exists) -> int:
        return -1 if isinstance(condition, Exists) else self._etcd.writer_marks.get(condition.revision, -2)
