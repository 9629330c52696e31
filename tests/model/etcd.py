"""The product's store with its calls replaced, over an etcd in memory; a call is one atomic step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from ecomp.errors import EcompError, NoSpace, Unreachable
from ecomp.store.client import Delete, Entry, Exists, Fence, Put, Snapshot, Store, Unchanged
from ecomp.store.messages import CallFailure, is_full, suggest_remedy
from tests.kit.memory_etcd import Etcd
from tests.model.acting import Call
from tests.model.world import World

FENCE_RENEWAL_SECONDS = 1.0


Value = TypeVar('Value')


def translate_refusal(function: Callable[[], Value]) -> Value:
    """Call a function, and convert its CallFailure as Connection.translate_error() does."""
    try:
        return function()
    except CallFailure as error:
        if is_full(error):
            raise NoSpace('etcd is full', 'etcd') from None
        raise EcompError(f'etcd refuses: {error.details}{suggest_remedy(error)}') from None


class ModelStore(Store):
    """The connection of one process: the product's store with all its calls replaced."""

    def __init__(self, etcd: Etcd) -> None:
        self.endpoints = 'memory'
        self.fence: Fence | None = None
        self._etcd = etcd
        self._world = cast(World, etcd.world)

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
                written = translate_refusal(lambda: self._etcd.commit(compared, operations))
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

        return self._world.call(
            Call('etcd', ('grant', seconds)), lambda: translate_refusal(lambda: self._etcd.grant(seconds, name, lease))
        )

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
