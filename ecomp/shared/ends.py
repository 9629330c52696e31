"""What an instance leaves when it ends, and the user-data that instances share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ecomp.errors import Unreadable
from ecomp.model import keys
from ecomp.model.json_object import load_object_or_empty
from ecomp.model.order import Request
from ecomp.model.quota import make_charge
from ecomp.model.states import ERROR, GONE, RETENTION_SECONDS
from ecomp.model.stored import encode
from ecomp.model.user_data import SharedUserData
from ecomp.shared import names
from ecomp.store.client import Delete, Entry, Exists, Put, Settlement, Store, Touch, Unchanged

if TYPE_CHECKING:
    from ecomp.model.record import Record

# Seconds for which a set's user-data stays once no compute refreshes it: for hosts that are away.
USER_DATA_SECONDS = 30 * 24 * 3600


def write_final_record(
    store: Store,
    record: Record,
    conditions: Sequence[Unchanged | Exists],
    removed_keys: Sequence[str],
    release_shared: bool = True,
    lease_seconds: int | None = None,
) -> int | None:
    """Commit a final record and what it releases, or return None if a condition does not hold."""
    key = keys.record(record.compute, record.instance)
    # Before its end, only the record of an instance in the state error is on a lease.
    error_record = store.get(key) if record.state == GONE and record.error is not None else None
    lease = store.grant(lease_seconds or RETENTION_SECONDS[record.state])
    put = Put(key, encode(record), lease)
    name_lease = lease if record.state == ERROR else 0
    make_change = partial(release_shared_keys, store, record, name_lease) if release_shared else names.make_empty_change
    settlement = Settlement(Touch(removed_keys[0]))  # `conditions` compare this key, so it settles a lost answer
    operations: list[Put | Delete] = [put, *map(Delete, removed_keys)]
    written = names.commit_with_shared(store, conditions, operations, make_change, lease, settlement)
    if written is not None and error_record is not None:
        names.try_revoke(store, error_record.lease)
    return written


def prepare_user_data(store: Store, user_data: SharedUserData | None) -> tuple[list[Put], int]:
    """Return the write of user-data, and the lease if a new one was granted for it, else 0."""
    if user_data is None:
        return [], 0
    key = keys.user_data(user_data.sha256)
    existing = _refresh_user_data(store, key)[1]
    lease = 0 if existing else store.grant(USER_DATA_SECONDS)
    return [Put(key, user_data.text, existing or lease)], lease


def keep_user_data(store: Store, sha256: str, contents: Iterable[bytes]) -> None:
    """Renew the lease of user-data or, if it expired, write the data again from `contents`."""
    condition, existing = _refresh_user_data(store, keys.user_data(sha256))
    copies = map(SharedUserData.from_bytes, () if existing else contents)
    copy = next((copy for copy in copies if copy.sha256 == sha256), None)
    if copy is None:
        return
    lease, revision = store.grant(USER_DATA_SECONDS), None
    try:
        revision = store.commit([condition], [Put(condition.key, copy.text, lease)])
    finally:
        if revision is None:  # another compute was faster, or our role does not allow it
            names.try_revoke(store, lease)


def _refresh_user_data(store: Store, key: str) -> tuple[Unchanged, int]:
    entry = store.snapshot(key, keys_only=True).entries.get(key)
    if entry is None:
        return Unchanged(key, 0), 0
    is_kept = entry.lease and store.keep_alive(entry.lease) >= USER_DATA_SECONDS
    return Unchanged(key, entry.revision), entry.lease if is_kept else 0


def release_shared_keys(store: Store, record: Record, record_lease: int = 0) -> names.Change:
    """Return the change that releases an instance's name, group slot and quota charge."""
    conditions, operations = names.release_name(store, record.name, record.instance, record_lease)
    with suppress(Unreadable):
        # A malformed group or quota is left as it is, so that the end need not wait for a repair.
        members_group, unchanged = names.load_group(store, record.group.name) if record.group else (None, None)
        if members_group is not None and unchanged is not None and record.instance in members_group.members:
            conditions.append(unchanged)
            operations.append(names.make_group_operation(members_group.without_members(record.instance)))
    with suppress(Unreadable):
        current, unchanged = names.load_quota(store, record.project_id)
        conditions.append(unchanged)  # a quota that is set concurrently counts all requests itself
        # The charge of an evacuated instance is its replacement's now. A failed one released its charge when it failed.
        is_released = record.replaced_by is not None or (record.state == GONE and record.error is not None)
        if current is not None and not is_released:
            operations.append(names.make_quota_put(current.add_used(make_charge(record.resources), -1)))
    return conditions, operations


def find_delivery(compute: str, request: Request, entries: Mapping[str, Entry]) -> int | None:
    """Return the revision of the request if delivered, else of its record, or None."""
    entry = entries.get(keys.request(compute, request.instance))
    if entry is not None:
        # A create with the uuid that an evacuation chose is another instance.
        is_ours = load_object_or_empty(entry.value).get('replaces') == request.replaces
        return entry.revision if is_ours else None
    record = entries.get(keys.record(compute, request.instance))
    return record.revision if record is not None else None


def deliver(  # noqa: PLR0913
    store: Store,
    deliveries: Sequence[tuple[str, Request]],
    attempt: Unchanged,
    user_data: SharedUserData | None,
    make_shared_change: Callable[[], names.Change],
    ends_attempt: bool = True,
    old_records: Mapping[str, Entry] = {},
) -> int:
    """Deliver (compute, request) pairs, at least one, in one transaction.

    It includes `make_shared_change` (names, group, quota) and a set's `user_data`. It deletes `old_records`, which are
    by instance, and with `ends_attempt` the attempt's key. After an error nothing is delivered, unless the outcome is
    unknown. The result is 0 if the attempt's key has changed, another record exists, or shared keys keep changing.
    """
    # Nothing is delivered twice, or after the attempt is known to be gone.
    conditions = [attempt]
    user_data_puts, granted = prepare_user_data(store, user_data)
    operations: list[Put | Delete] = [*([Delete(attempt.key)] if ends_attempt else []), *user_data_puts]
    for compute, request in deliveries:
        old = old_records.get(request.instance)
        conditions.append(Unchanged(keys.record(compute, request.instance), old.revision if old else 0))
        operations += [Delete(old.key)] if old else []
        stamp = store.make_stamp() if request.is_adopted else {}  # others have the time of their request
        operations.append(Put(keys.request(compute, request.instance), encode(request, **stamp)))
    doubt = f'{keys.get_queued_instance(attempt.key)} was delivered'
    # All or none are delivered, so one of the requests stands for all.
    settlement = Settlement(Delete(attempt.key), partial(find_delivery, *deliveries[0]), doubt)
    return names.commit_with_shared(store, conditions, operations, make_shared_change, granted, settlement) or 0
