"""The records of one compute's instances: read once, written only while their request is unchanged (rule 5).

One of ecomp 1.0 of a guest that lives is moved to its new place as it is read, as long as both places are unchanged;
what is being built or destroyed moves with its next write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ecomp.agent.host.memory import Memory
from ecomp.errors import Denied, NoSpace, UnknownOutcome, Unreadable
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.instance import Invalid, Request, parse_request, shares
from ecomp.model.record import ACTIVE, DESTROYING, ERROR, STOPPED, Record, from_json, is_newer, to_json
from ecomp.store.client import Delete, Entry, Exists, Put, Store, Unchanged
from ecomp.store.places import listed
from ecomp.store.sharing import freed, write_end

log = logging.getLogger(__name__)


class Superseded(Exception):
    """The request changed while we were at it: plan anew."""


class RecordEntry(NamedTuple):
    """A record as last read or written, None where there is none; the revisions of its key, and of the older one.

    ecomp 1.0 has the records of all computes at keys.old_record(): ours of guests that live move once they are read;
    those being built or destroyed, and what cannot be written then, with their next write.
    """

    record: Record | None = None
    revision: int = 0
    older: int = 0


class Records:
    """The records of one compute's instances, as last read or written.

    Errors of every write: Superseded, Unreachable, UnknownOutcome (the record is read again before the next).
    What lies below another compute is never read: a record is believed of the compute that its key names.
    """

    def __init__(self, compute: str, store: Store, memory: Memory) -> None:
        self._compute = compute
        self._store = store
        self._memory = memory
        self._known: dict[str, RecordEntry] = {}

    def get(self, instance: str) -> Record | None:
        """The record as last read or written; read if we have none. Unreadable, and those of a write."""
        known = self._known.get(instance, RecordEntry())
        if known.record is None:
            known = self._read(instance)
            if known.record is None:
                return None
            self._known[instance] = known
        return known.record

    def known(self, instance: str) -> Record:
        """get() for an instance that has a record as planned; Superseded where it is gone."""
        if (record := self.get(instance)) is None:
            raise Superseded
        return record

    def to_end(self, instance: str) -> Record | None:
        """get() for an instance that is to end: None also for what cannot be understood: the next write replaces it.

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
                self._known[instance] = RecordEntry(None, revision_of(there.get(own)), revision_of(there.get(older)))
                log.warning('%s; a destroy of it was accepted, and goes by its request', error)
            return None

    def forget(self, instance: str) -> None:
        """Read the record anew next time."""
        self._known.pop(instance, None)

    def recheck(self, wishes: Mapping[str, Request | Invalid]) -> list[str]:
        """Those whose record is not as we know it any more, for somebody else wrote or removed it: forgotten here.

        What lives, and is as we know it, is remembered, with its wish, if the state directory could not be written.
        """
        asked = {instance: known for instance in wishes if (known := self._known.get(instance)) is not None}
        if not asked:
            return []
        ours = {self._places(instance)[0] for instance in asked}
        listed = self._store.snapshot(
            keys.record(self._compute, ''), keys_only=True, keep=lambda entry: entry if entry.key in ours else None
        )
        changed = []
        for instance, known in asked.items():
            own, older = self._places(instance)
            entry = listed.entries.get(own) if known.revision else self._store.get(older)
            # One that was written while we read is known anew.
            if revision_of(entry) != (known.revision or known.older) and self._known.get(instance) is known:
                changed.append(instance)
        for instance in changed:
            self.forget(instance)
        for instance in asked.keys() - set(changed):
            wish, record = wishes[instance], asked[instance].record
            if not isinstance(wish, Request) or wish.is_tombstone:
                continue
            if record is not None and record.state in (ACTIVE, STOPPED):
                self._memory.put_right(wish, record)
        return changed

    def write(self, record: Record, revision: int, extra: Collection[Put | Delete] = ()) -> Record:
        """Put the record, with `extra` in the same transaction, if the request is the one at `revision`."""
        put = Put(self._places(record.instance)[0], to_json(record))
        unchanged, moved = self._as_read(record.instance)
        written = self.commit(record.instance, revision, unchanged, [put, *map(Delete, moved), *extra])
        self._known[record.instance] = RecordEntry(record, written)
        if record.state in (ACTIVE, STOPPED, DESTROYING):
            self._memory.remember(None, record)
        return record

    def lost(self, instance: str, revision: int, is_here: bool) -> None:
        """Remove the address at /booted of an instance without a record: its end removes only one its record knows of.

        `is_here`: it may have been built here; else the address is removed only if one is remembered. Where another
        compute is asked for the instance, too, it stays. Of a guest that runs it is written again.
        """
        remembered = self._memory.all().get(instance)
        had = is_here or (remembered is not None and 'addressed' in remembered.record.stages)
        if had and not self._asked_elsewhere(instance):
            self.commit(instance, revision, [], [Delete(keys.booted(instance))])

    def end(self, record: Record, revision: int) -> None:
        """Write the last record, on a lease, and delete request, address and name, in one transaction.

        An address is another compute's if this one never wrote one, for somebody may have asked both. What fails leaves
        name, group and quota to another compute that is asked; where none ever ends it there, `audit --fix` frees them.
        """
        instance = record.instance
        unchanged, moved = self._as_read(instance)
        removed = [keys.request(self._compute, instance), *moved]
        if 'addressed' in record.stages:
            removed.append(keys.booted(instance))
        # What another compute is asked for, too, has what it shares there: what fails here lets go of none of it.
        others = self._asked_elsewhere(instance) if record.state == ERROR else []
        # Compared: of two that fail at once each would leave it to the other.
        conditions: list[Unchanged | Exists] = [*unchanged, *others]
        try:
            self._commit(
                instance, revision, conditions, lambda each: write_end(self._store, record, each, removed, not others)
            )
        except NoSpace as error:
            if record.state == ERROR:
                raise
            # A full etcd takes deletes alone, and that is how it gets room again: what its group and its quota count is
            # left to the audit.
            mine, change = freed(self._store, record.name, instance)
            deletes = [Delete(each) for each in (self._places(instance)[0], *removed)]
            self.commit(instance, revision, [*conditions, *mine], [*deletes, *change])
            log.warning('instance %s: no record of its end is kept: %s', instance, error)
        failpoint('ended')
        self.forget(instance)
        self._memory.ended(instance)

    def drop(self, instance: str, revision: int, kept: str | None) -> None:
        """Delete a request of what is over, and a name that leads to it, unless it is `kept`: what failed has its.

        Of a request that could not be read nobody knew the name, until somebody wrote it anew.
        """
        key = keys.request(self._compute, instance)
        entry = self._store.get(key)
        name = shares(parse_request(self._compute, key, entry.value)).name if entry is not None else None
        unchanged, change = freed(self._store, name, instance) if name != kept else ([], [])
        self.commit(instance, revision, unchanged, [Delete(key), *change])

    def commit(
        self,
        instance: str,
        revision: int,
        conditions: Collection[Unchanged | Exists],
        operations: Sequence[Put | Delete],
    ) -> int:
        """Commit if the request is still the one at `revision`; the new revision, or Superseded."""
        return self._commit(instance, revision, conditions, lambda each: self._store.commit(each, operations))

    def _commit(
        self,
        instance: str,
        revision: int,
        conditions: Collection[Unchanged | Exists],
        commit: Callable[[Sequence[Unchanged | Exists]], int | None],
    ) -> int:
        host = Unchanged(keys.request(self._compute, instance), revision)
        try:
            written = commit([host, *conditions])
        except UnknownOutcome:
            self.forget(instance)  # written or not: read it, and plan anew
            raise
        if written is None:
            self.forget(instance)
            raise Superseded
        return written

    def _places(self, instance: str) -> tuple[str, str]:
        return keys.record(self._compute, instance), keys.old_record(instance)

    def _read(self, instance: str) -> RecordEntry:
        own, older = self._places(instance)
        there = self._store.read([own, older])
        if own not in there:
            record = older_record(there.get(older), self._compute, instance)
            return RecordEntry() if record is None else self._brought(record, there[older])
        try:
            return RecordEntry(from_json(there[own].value, instance, self._compute), there[own].revision)
        except ValueError as error:
            raise Unreadable(own, error) from error

    def _brought(self, record: Record, entry: Entry) -> RecordEntry:
        """The record of ecomp 1.0 in `entry`, as it is, at our place. What has ended ends there, on its lease.

        Until all have moved there are no roles: a compute may not write there with one.
        """
        own, older = self._places(record.instance)
        if record.state in (ACTIVE, STOPPED) and not entry.lease:
            unchanged = [Unchanged(own, 0), Unchanged(older, entry.revision)]
            with suppress(UnknownOutcome, NoSpace, Denied):
                written = self._store.commit(unchanged, [Put(own, to_json(record)), Delete(older)])
                if written is not None:
                    return RecordEntry(record, written)
        return RecordEntry(record, 0, entry.revision)

    def _asked_elsewhere(self, instance: str) -> list[Exists]:
        """That another compute is asked for the instance, too, if one is; what names no compute is none (rule 12).

        One that is there is enough, whatever it says: its compute may write it again and again, and etcd takes no more
        than 128 conditions.
        """
        asked = listed(self._store, instance).requests
        others = sorted(each for each in asked if each != self._compute and keys.is_uuid(each))
        return [Exists(asked[each].key) for each in others[:1]]

    def _as_read(self, instance: str) -> tuple[list[Unchanged], list[str]]:
        """What a write compares of the record as it is known, and its older key, if it is taken from there."""
        known, (own, older) = self._known.get(instance, RecordEntry()), self._places(instance)
        moved = [older] if known.older else []
        return [Unchanged(own, known.revision), *([Unchanged(older, known.older)] if moved else [])], moved


def older_record(entry: Entry | None, compute: str, instance: str) -> Record | None:
    """The record at keys.old_record() if ecomp 1.0 wrote it of this instance of this compute; else None.

    So also for one that cannot be understood: nobody of ours writes there any more, and others may.
    """
    try:
        return from_json(entry.value, instance, compute) if entry is not None else None
    except ValueError:
        return None


def revision_of(entry: Entry | None) -> int:
    """The revision that wrote the entry last; 0 for None."""
    return entry.revision if entry is not None else 0
