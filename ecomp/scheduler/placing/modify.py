"""Change an instance that stays where it is, by rewriting its request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from ecomp.failpoints import failpoint
from ecomp.model.order import Request
from ecomp.scheduler.changes.change import (
    Doubts,
    merge_into_request,
    parse_changeable_request,
    retry_until_accepted,
)
from ecomp.scheduler.placing.claim import reserve_names
from ecomp.scheduler.queries.find import find_living
from ecomp.shared.names import Change, merge_changes, release_name
from ecomp.shared.places import KeyIndex
from ecomp.store.client import Settlement, Store, Touch, Unchanged

# The fields of the request to write, and the change of other keys that goes with them.
Rewriting = tuple[Mapping[str, object], Change]


def protect(store: Store, instance: str, is_protected: bool, key_index: KeyIndex | None = None) -> str:
    """Protect an instance from its removal, or end that, and return a sentence about it."""

    def make(request: Request) -> Rewriting | None:
        return None if request.is_protected == is_protected else ({'protected': is_protected}, ([], []))

    is_new = _rewrite(store, instance, make, key_index)
    return f'{instance}: is {"" if is_protected else "not "}protected{" now" if is_new else ""}'


def rename(store: Store, instance: str, name: str) -> str:
    """Give an instance another name, and return a sentence about it.

    Raises:
        Conflict: another instance has the name, or as in _rewrite().
    """

    def make(request: Request) -> Rewriting | None:
        if request.name == name:
            return None
        new, old = reserve_names(store, {instance: name}), release_name(store, request.name, instance)
        return {'name': name}, merge_changes(new, old)

    return f'{instance}: is called {name}{" now" if _rewrite(store, instance, make) else ""}'


def _rewrite(
    store: Store, instance: str, make: Callable[[Request], Rewriting | None], key_index: KeyIndex | None = None
) -> bool:
    """Write what `make` returns for the current request, or return False if that is None.

    Raises:
        Conflict: the instance is neither active nor stopped, is being destroyed, or keeps changing.
    """

    def read_and_write(doubts: Doubts) -> bool | None:
        entries = find_living(store, instance, key_index)
        entry, request = parse_changeable_request(entries)
        if (made := make(request)) is None:
            return False
        fields, (conditions, operations) = made
        number = request.make_change_number(datetime.now(UTC).timestamp())
        put = merge_into_request(entries, entry, {**fields, 'changed': number, **store.make_stamp()})
        settlement = Settlement(Touch(entry.key), doubts.append)
        written = store.commit([Unchanged(entry.key, entry.revision), *conditions], [put, *operations], settlement)
        failpoint('changed')
        return None if written is None else True

    return retry_until_accepted(instance, 'change', 'the same command again', read_and_write)
