"""etcd in memory, behind the product's own store: keys, revisions, leases, transactions; one atomic step a call.

Held against the real one by test_models_are_true.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from ecomp.errors import EcompError, NoSpace, Unreachable
from ecomp.model import keys
from ecomp.store.client import Delete, Entry, Exists, Fence, Put, Snapshot, Store, Unchanged
from tests.model.acting import Call
from tests.model.world import World

MOST = 128
"""Operations, and conditions, of one transaction."""
RENEWED = 1.0


@dataclass
class Lease:
    """One lease, and whose it is: the actor's name, '' for whoever set the scene."""

    owner: str
    seconds: int


class Etcd:
    """What is in it. `print` tells two states apart.

    What is told apart is who wrote what at which of its steps, and not in which order others wrote: but for requests
    and queues, whose order means something, and quotas, which two may change at once.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, Lease] = {}
        self.granted = 0
        self.marks: dict[int, int] = {0: 0, 1: 1}
        self.order = 0
        self.is_full = False
        """Whether it takes deletes alone."""
        self.listeners: list[Callable[[Sequence[Put | Delete]], None]] = []
        """Who hears of each write, at once."""
        self._print = 0
        world.prints.append(lambda: (self._print, self.order, tuple(sorted(self.leases))))

    def grant(self, seconds: int, owner: str, lease: int) -> int:
        self._has_room()
        self.leases[lease] = Lease(owner, seconds)
        return lease

    def end(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            gone = [key for key, entry in self.entries.items() if entry.lease == lease]
            if gone:
                self._write([Delete(key) for key in gone])

    def commit(self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete]) -> int | None:
        """The new revision if all conditions hold."""
        if len(conditions) > MOST or len(operations) > MOST:
            raise EcompError('etcd refuses: too many operations in txn request')
        put = [each.key for each in operations if isinstance(each, Put)]
        deleted = {each.key for each in operations if isinstance(each, Delete)}
        if len(set(put)) < len(put) or not deleted.isdisjoint(put):
            raise EcompError('etcd refuses: duplicate key given in txn request')
        if put:
            self._has_room()  # said before anything is compared
        if not all(map(self.holds, conditions)):
            return None
        for each in operations:
            if isinstance(each, Put) and each.lease and each.lease not in self.leases:
                raise EcompError('etcd refuses: requested lease not found: this is not written. Try: the same command')
        return self._write(operations)

    def _has_room(self) -> None:
        if self.is_full:
            raise NoSpace('etcd is full', 'etcd')

    def holds(self, condition: Unchanged | Exists) -> bool:
        entry = self.entries.get(condition.key)
        if isinstance(condition, Exists):
            return entry is not None
        return (entry.revision if entry is not None else 0) == condition.revision

    def shape(self, found: object) -> Hashable:
        """What tells an answer from others: as above, who wrote what is there."""
        if isinstance(found, Entry):
            return found.key, found.value, self.marks[found.revision], found.lease
        if isinstance(found, Snapshot):
            return tuple(map(self.shape, found.entries.values()))
        return self.marks.get(found, 0) if isinstance(found, int) else repr(found)

    def _write(self, operations: Sequence[Put | Delete]) -> int:
        if not any(isinstance(each, Put) or each.key in self.entries for each in operations):
            return self.revision  # nothing was there to be deleted: as etcd does it, that is no new revision
        self.revision += 1
        mark = self.marks[self.revision] = self.world.mark()
        for each in operations:
            before = self.entries.pop(each.key, None)
            self._print ^= hash(self.shape(before)) if before else 0
            if isinstance(each, Put):
                created = before.created if before else self.revision
                new = Entry(each.key, each.value.encode(), self.revision, each.lease, created=created)
                self.entries[each.key] = new
                self._print ^= hash(self.shape(new))
        put = [each.key for each in operations if isinstance(each, Put)]
        if any(each.startswith((keys.ATTEMPTS, keys.QUEUES)) and not each.endswith(keys.TAKER) for each in put):
            self.order = hash((self.order, mark))
        if any(each.startswith(keys.QUOTAS) for each in put):
            self.order = hash((self.order, mark, self._print))
        written = self.revision
        for listener in self.listeners:
            listener(operations)
        return written


class ModelStore(Store):
    """One process's connection: the product's store, but for all that it sends. `fence` is as there."""

    def __init__(self, etcd: Etcd) -> None:
        self.where = 'memory'
        self.fence: Fence | None = None
        self._etcd = etcd
        self._world = etcd.world

    def get(self, key: str) -> Entry | None:
        return self._world.call(Call('etcd', ('get', key)), lambda: self._etcd.entries.get(key), self._etcd.shape)

    def snapshot(
        self, prefix: str, keys_only: bool = False, keep: Callable[[Entry], Entry | None] = lambda entry: entry
    ) -> Snapshot:
        def read() -> Snapshot:
            there = self._etcd.entries
            found = {key: there[key] for key in sorted(there) if key.startswith(prefix)}
            if keys_only:
                found = {key: replace(each, value=b'') for key, each in found.items()}
            kept = {key: entry for key, each in found.items() if (entry := keep(each)) is not None}
            return Snapshot(self._etcd.revision, kept)

        return self._world.call(Call('etcd', ('list', prefix)), read, self._etcd.shape)

    def read(self, wanted: Sequence[str]) -> dict[str, Entry]:
        def look() -> dict[str, Entry]:
            return {key: self._etcd.entries[key] for key in wanted if key in self._etcd.entries}

        def shape(found: dict[str, Entry]) -> Hashable:
            return tuple(map(self._etcd.shape, found.values()))

        return self._world.call(Call('etcd', ('read', tuple(wanted))), look, shape)

    def around(self, prefix: str, start: str, limit: int) -> tuple[list[Entry], int]:
        def look() -> tuple[list[Entry], int]:
            there = sorted(key for key in self._etcd.entries if key.startswith(prefix))
            order = sorted(there, key=lambda key: key < start)
            return [self._etcd.entries[key] for key in order[:limit]], len(there)

        def shape(found: tuple[list[Entry], int]) -> Hashable:
            return tuple(map(self._etcd.shape, found[0])), found[1]

        return self._world.call(Call('etcd', ('around', prefix, start, limit)), look, shape)

    def count(self, prefix: str) -> int:
        there = self._etcd.entries
        return self._world.call(Call('etcd', ('count', prefix)), lambda: sum(key.startswith(prefix) for key in there))

    def commit(
        self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete], fenced: bool = True
    ) -> int | None:
        while True:
            fence = self.fence if fenced else None
            held = fence.of(operations) if fence else None
            compared = [*conditions, *([held] if held else [])]
            marks = tuple((each.key, self._mark(each)) for each in compared)
            call = Call('etcd', ('commit', marks, tuple(operations)), writes=True)

            def write(
                compared: Sequence[Unchanged | Exists] = compared, held: Unchanged | None = held
            ) -> int | None:
                written = self._etcd.commit(compared, operations)
                is_ours = held is None or self._etcd.holds(held)
                return written if written is not None else None if is_ours else -1

            written = self._world.call(call, write, self._etcd.shape)
            if written != -1:
                return written
            assert fence is not None
            assert held is not None
            fence.broken()
            self._world.sleep(RENEWED)
            if self.fence is fence:
                raise Unreachable(f'{held.key} is not as we put it: nothing is written before it is')

    def grant(self, seconds: int) -> int:
        actor, name = self._world.now, 'the scene'
        if actor is not None:
            actor.leases += 1
            # The same whatever others do.
            lease, name = 100_000 * (self._world.actors.index(actor) + 1) + actor.leases, actor.name
        else:
            self._etcd.granted += 1
            lease = self._etcd.granted

        return self._world.call(Call('etcd', ('grant', seconds)), lambda: self._etcd.grant(seconds, name, lease))

    def keep_alive(self, lease: int) -> int:
        def keep() -> int:
            return self._etcd.leases[lease].seconds if lease in self._etcd.leases else 0

        return self._world.call(Call('etcd', ('keep', lease)), keep, repr)

    def revoke(self, lease: int) -> None:
        """See Store: one that is gone already is fine."""
        self._world.call(Call('etcd', ('revoke', lease)), lambda: self._etcd.end(lease))

    def recognise(self) -> None:
        """It is the etcd we knew."""

    def close(self) -> None:
        """Nothing is open."""

    def _mark(self, condition: Unchanged | Exists) -> int:
        return -1 if isinstance(condition, Exists) else self._etcd.marks.get(condition.revision, -2)
