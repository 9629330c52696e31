"""The records of one compute's instances: read once, written only while their request is unchanged (rule 5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

from ecomp.agent.memory import Memory
from ecomp.errors import EcompError, NoSpace, UnknownOutcome, Unreadable
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.record import ACTIVE, DESTROYING, ERROR, KEPT, STOPPED, Record, from_json, is_newer, to_json
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged
from ecomp.store.names import Change, freed
from ecomp.store.sharing import commit_with, ended, nothing

log = logging.getLogger(__name__)


class Superseded(Exception):
    """The request changed while we were at it: plan anew."""


class Found(NamedTuple):
    """A record as last read or written, None where there is none; the revisions of its key, and of the older one.

    ecomp 1.0 has the records of all computes at keys.old_record(): ours among them move with their next write.
    """

    record: Record | None = None
    revision: int = 0
    older: int = 0


class Records:
    """Errors of every write: Superseded, Unreachable, UnknownOutcome (read again before the next).

    What lies below another compute is never read: a record is believed of the compute that its key names.
    """

    def __init__(self, compute: str, store: Store, memory: Memory) -> None:
        self._compute = compute
        self._store = store
        self._memory = memory
        self._known: dict[str, Found] = {}

    def get(self, instance: str) -> Record | None:
        """The record as last read or written; read if we have none. Unreadable."""
        known = self._known.get(instance, Found())
        if known.record is None:
            known = self._read(instance)
            if known.record is None:
                return None
            self._known[instance] = known
        return known.record

    def to_end(self, instance: str) -> Record | None:
        """The same for what is to end; None also for one that cannot be understood, which the next write replaces.

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
                self._known[instance] = Found(None, _revision(there.get(own)), _revision(there.get(older)))
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
            own, older = self._places(instance)
            entry = self._store.get(own if known is None or known.revision else older)
            if known is not None and _revision(entry) != (known.revision or known.older):
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
        put = Put(self._places(record.instance)[0], to_json(record), lease)
        unchanged, moved = self._as_read(record.instance)
        written = self.commit(record.instance, revision, unchanged, [put, *moved, *extra], shared)
        self._known[record.instance] = Found(record, written)
        if record.state in (ACTIVE, STOPPED, DESTROYING):
            self._memory.remember(None, record)
        return record

    def end(self, record: Record, revision: int, address: bool = False) -> None:
        """The last record, on a lease, and no request, no address and no name any more, in one transaction.

        By its name an instance in error is found as long as its record is there. An address is another compute's if
        this one never wrote one, for somebody may have asked both; `address`: it may have, and that is not known.
        """
        instance, failed = record.instance, record.state == ERROR
        extra = [Delete(keys.host(self._compute, instance))]
        if address or 'addressed' in record.stages:
            extra.append(Delete(keys.booted(instance)))
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
            unchanged, moved = self._as_read(instance)
            mine, change = freed(self._store, record.name, instance)
            delete = Delete(self._places(instance)[0])
            self.commit(instance, revision, [*unchanged, *mine], [delete, *moved, *extra, *change])
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

    def _places(self, instance: str) -> tuple[str, str]:
        return keys.record(self._compute, instance), keys.old_record(instance)

    def _read(self, instance: str) -> Found:
        own, older = self._places(instance)
        there = self._store.read([own, older])
        if own not in there:
            record = older_record(there.get(older), self._compute, instance)
            return Found() if record is None else Found(record, 0, there[older].revision)
        try:
            return Found(from_json(there[own].value, instance, self._compute), there[own].revision)
        except ValueError as error:
            raise Unreadable(own, error) from error

    def _as_read(self, instance: str) -> tuple[list[Unchanged], list[Put | Delete]]:
        """What a write compares of the record as it is known, and what takes it from its older key."""
        known, (own, older) = self._known.get(instance, Found()), self._places(instance)
        moved: list[Put | Delete] = [Delete(older)] if known.older else []
        return [Unchanged(own, known.revision), *([Unchanged(older, known.older)] if moved else [])], moved


def older_record(entry: Entry | None, compute: str, instance: str) -> Record | None:
    """The record at keys.old_record() if ecomp 1.0 wrote it of this instance of this compute; else None.

    So also for one that cannot be understood: nobody of ours writes there any more, and others may.
    """
    try:
        return from_json(entry.value, instance, compute) if entry is not None else None
    except ValueError:
        return None


def _revision(entry: Entry | None) -> int:
    return entry.revision if entry is not None else 0
