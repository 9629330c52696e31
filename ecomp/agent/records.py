"""The records of one compute's instances: read once, written only while their request is unchanged (rule 5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress

from ecomp.agent.memory import Memory
from ecomp.errors import EcompError, NoSpace, UnknownOutcome, Unreadable
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.record import ACTIVE, DESTROYING, ERROR, KEPT, STOPPED, Record, from_json, is_newer, to_json
from ecomp.store.client import Delete, Put, Store, Unchanged
from ecomp.store.names import Change, freed
from ecomp.store.sharing import commit_with, ended, nothing

log = logging.getLogger(__name__)


class Superseded(Exception):
    """The request changed while we were at it: plan anew."""


class Records:
    """Errors of every write: Superseded, Unreachable, UnknownOutcome (read again before the next)."""

    def __init__(self, compute: str, store: Store, memory: Memory) -> None:
        self._compute = compute
        self._store = store
        self._memory = memory
        self._known: dict[str, tuple[Record | None, int]] = {}

    def get(self, instance: str) -> Record | None:
        """The record as last read or written; read if we have none. Unreadable."""
        record, _ = self._known.get(instance, (None, 0))
        if record is None:
            entry = self._store.get(keys.instance(instance))
            if entry is None:
                return None
            try:
                record = from_json(entry.value, instance)
            except ValueError as error:
                raise Unreadable(entry.key, error) from error
            self._known[instance] = record, entry.revision
        return record

    def to_end(self, instance: str) -> Record | None:
        """The same for what is to end; None also for one that cannot be understood, which the next write replaces.

        Unreadable for one of a newer version, which may hold more than is known here.
        """
        try:
            return self.get(instance)
        except Unreadable as error:
            entry = self._store.get(keys.instance(instance))
            if entry is not None:
                if is_newer(entry.value):
                    raise
                self._known[instance] = None, entry.revision
                log.warning('%s; a destroy of it was accepted, and goes by its request', error)
            return None

    def forget(self, instance: str) -> None:
        """Read the record anew next time."""
        self._known.pop(instance, None)

    def recheck(self, instances: Collection[str]) -> list[str]:
        """Those whose record is not as we know it any more, for somebody else wrote or removed it: forgotten here."""
        changed = []
        for instance in instances:
            known = self._known.get(instance)
            entry = self._store.get(keys.instance(instance))
            if known is not None and (entry is None or entry.revision != known[1]):
                self.forget(instance)
                changed.append(instance)
        return changed

    def write(
        self,
        record: Record,
        revision: int,
        extra: Collection[Put | Delete] = (),
        lease: int = 0,
        shared: Callable[[], Change] = nothing,
    ) -> Record:
        """Put the record, with `extra` in the same transaction, if the request is the one at `revision`.

        `shared` says what else is changed of what others change, too.
        """
        key, value = keys.instance(record.instance), to_json(record)
        _, before = self._known.get(record.instance, (None, 0))
        put = Put(key, value, lease)
        written = self.commit(record.instance, revision, [Unchanged(key, before)], [put, *extra], shared)
        self._known[record.instance] = record, written
        if record.state in (ACTIVE, STOPPED, DESTROYING):
            self._memory.remember(None, record)
        return record

    def end(self, record: Record, revision: int) -> None:
        """The last record, on a lease, and no request, no address and no name any more, in one transaction.

        By its name an instance in error is found as long as its record is there.
        """
        instance, failed = record.instance, record.state == ERROR
        extra = [Delete(keys.host(self._compute, instance)), Delete(keys.booted(instance))]
        try:
            lease = self._store.grant(KEPT[record.state])
            self.write(record, revision, extra, lease, lambda: ended(self._store, record, lease if failed else 0))
        except Superseded:
            with suppress(EcompError):  # it ends by itself, in a day or a week
                self._store.revoke(lease)
            raise
        except NoSpace as error:
            if failed:
                raise
            # A full etcd takes deletes alone, and that is how it gets room again: what its group and its quota count is
            # left to the audit.
            key = keys.instance(instance)
            _, before = self._known.get(instance, (None, 0))
            mine, change = freed(self._store, record.name, instance)
            self.commit(instance, revision, [Unchanged(key, before), *mine], [Delete(key), *extra, *change])
            log.warning('instance %s: no record of its end is kept: %s', instance, error)
        failpoint('ended')
        self.forget(instance)
        self._memory.ended(instance)

    def commit(
        self,
        instance: str,
        revision: int,
        conditions: Collection[Unchanged],
        operations: Collection[Put | Delete],
        shared: Callable[[], Change] = nothing,
    ) -> int:
        """Commit if the request is still the one at `revision`; the new revision, or Superseded."""
        host = Unchanged(keys.host(self._compute, instance), revision)
        try:
            written = commit_with(self._store, [host, *conditions], list(operations), shared)
        except UnknownOutcome:
            self.forget(instance)  # written or not: read it, and plan anew
            raise
        if written is None:
            self.forget(instance)
            raise Superseded
        return written
