"""Remove the records of instances that are over: nothing of these is left but what is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ecomp.errors import EcompError, NotFound, Unreachable
from ecomp.model.record import ERROR, GONE
from ecomp.scheduler.changing.destroy import remove_record
from ecomp.scheduler.looking.find import InstanceEntries, all_records, find
from ecomp.store.client import Store
from ecomp.store.places import index


class Cleared(NamedTuple):
    """The instances whose records were removed, each with its last state; and what could not be removed or read."""

    removed: Mapping[str, str]
    errors: list[EcompError]


def clear(store: Store) -> Cleared:
    """Remove the record of each instance that is gone or in error, unless something is still asked for it.

    Errors: those of etcd. What one of them has alone is among Cleared.errors, and so is what ends it once it began.
    """
    records, errors = all_records(store, with_gone=True)
    among = index(store)
    removed = {}
    for each in records:
        if each.state in (GONE, ERROR):
            try:
                if remove(store, find(store, each.instance, among)):
                    removed[each.instance] = each.state
            except NotFound:
                pass  # somebody else has removed it, or its lease has ended
            except Unreachable as error:  # what is removed by now is said all the same
                errors.append(error)
                break
    return Cleared(removed, errors)


def remove(store: Store, found: InstanceEntries | None) -> bool:
    """Remove the record of an instance if it is over, and nothing is asked for it; whether that is so."""
    if found is None or found.record_entry is None or found.request_entry is not None:
        return False
    if found.record.state not in (GONE, ERROR):
        return False
    # Not by a destroy: what lives by now would be destroyed by that.
    return remove_record(store, found.record_entry.key, found.record_entry.revision, found) is not None
