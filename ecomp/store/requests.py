"""Who is at which instance: the keys under /requests and /queues, without which a claim needs a request (rule 4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ecomp.errors import UnknownOutcome
from ecomp.model import keys
from ecomp.model.order import announced
from ecomp.store.client import Delete, Entry, Snapshot, Store, Unchanged

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
