"""What `eschedule destroy --state gone,error` does, without a command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ecomp.errors import Conflict, EcompError, Unreachable
from ecomp.model.states import ERROR, GONE
from ecomp.scheduler.changes.change import remove_finished
from ecomp.scheduler.queries.find import list_records
from ecomp.shared.places import read_index
from ecomp.store.client import Store


class ClearResult(NamedTuple):
    removed: Mapping[str, str]
    errors: list[EcompError]


def clear(store: Store) -> ClearResult:
    records, errors = list_records(store, with_gone=True)
    key_index, removed = read_index(store), dict[str, str]()
    for record in records:
        if record.state in (GONE, ERROR):
            try:
                remove_finished(store, record.instance, key_index)
                removed[record.instance] = record.state
            except Conflict:
                pass
            except Unreachable as error:  # what was removed before counts
                errors.append(error)
                break
    return ClearResult(removed, errors)
