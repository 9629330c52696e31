"""Names, groups and quotas, which instances share (rule: change-with-delivery).

A failed instance keeps its name, on its record's lease, until another one takes it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ecomp.errors import Conflict, EcompError, NoSpace, OverQuota, StrangeEtcd, UnknownOutcome, Unreadable
from ecomp.model import keys
from ecomp.model.allocation import Resources, sum_resources
from ecomp.model.group import MAX_MEMBERS, Group, Membership, filter_admitted, resolve_group
from ecomp.model.order import NameOwner
from ecomp.model.quota import Quota, describe_excesses, make_charge
from ecomp.model.stored import decode, decode_at, encode
from ecomp.store.client import MAX_TRANSACTION_OPERATIONS, Delete, Entry, Exists, Put, Settlement, Store, Unchanged

Shared = TypeVar('Shared')
Load = Callable[[Store, str], tuple[Shared | None, object]]

# The conditions and operations on shared keys in one transaction.
Change = tuple[list[Unchanged], list[Put | Delete]]

# Tries of a transaction; each one that fails means that another succeeded.
MAX_TRIES = 100
MAX_PAUSE_SECONDS = 0.05


class Excluded(Exception):
    """A group's rule or a quota now excludes all instances but `admitted`."""

    def __init__(self, admitted: Collection[str]) -> None:
        super().__init__()
        self.admitted = admitted


def parse_name_owner(entry: Entry) -> str:
    """Return the instance that owns a name, or raise Unreadable."""
    return decode_at(entry.key, NameOwner, entry.value).instance


def release_name(store: Store, name: str | None, instance: str, record_lease: int = 0) -> Change:
    """Return the change that deletes a name if the instance owns it, or moves it to a lease."""
    entry = store.get(keys.name(name)) if name else None
    if entry is None or not _is_owned_by(entry, instance):
        return [], []
    operation: Put | Delete = Put(entry.key, entry.value.decode(), record_lease) if record_lease else Delete(entry.key)
    return [Unchanged(entry.key, entry.revision)], [operation]


def restore_name(store: Store, name: str | None, instance: str) -> Change | None:
    """Return the change that restores an instance's name, or None if another living one has it."""
    entry = store.get(keys.name(name)) if name else None
    if name is None or (entry is not None and not entry.lease and _is_owned_by(entry, instance)):
        return [], []
    if entry is not None and not entry.lease:
        return None
    key = keys.name(name)
    # A name on a failed instance's lease is taken over.
    return [Unchanged(key, entry.revision if entry else 0)], [Put(key, encode(NameOwner(instance)))]


def load_group(store: Store, name: str) -> tuple[Group | None, Unchanged]:
    """Return a group or None, and the condition that it is unchanged, or raise Unreadable."""
    return _read(store, keys.group(name), Group, name=name)


def load_groups(store: Store, names: Iterable[str]) -> tuple[dict[str, Group], set[str]]:
    """Return the groups that exist, by name, and the names of malformed ones."""
    groups_by_name: dict[str, Group] = {}
    unreadable = set[str]()
    group_keys = sorted(map(keys.group, names))
    for start in range(0, len(group_keys), MAX_TRANSACTION_OPERATIONS):  # each value may be as large as etcd allows
        for key, entry in store.read(group_keys[start : start + MAX_TRANSACTION_OPERATIONS]).items():
            name = key.removeprefix(keys.GROUPS)
            try:
                groups_by_name[name] = decode(Group, entry.value, name=name)
            except ValueError:
                unreadable.add(name)
    return groups_by_name, unreadable


def load_quota(store: Store, project: str) -> tuple[Quota | None, Unchanged]:
    """Return a quota or None, and the condition that it is unchanged, or raise Unreadable."""
    return _read(store, keys.quota(project), Quota, project=project)


def load_all(store: Store, prefix: str, load: Load[Shared]) -> tuple[list[Shared], list[EcompError]]:
    """Return all groups, quotas or stacks, sorted by name, and an error for each malformed one."""
    values: list[Shared] = []
    errors: list[EcompError] = []
    for key in sorted(store.snapshot(prefix, keys_only=True).entries):
        try:
            value, _ = load(store, key.removeprefix(prefix))
            values += [value] if value is not None else []
        except Unreadable as error:
            errors.append(error)
    return values, errors


def join_group(
    store: Store, membership: Membership | None, places: Mapping[str, str], replaced: Collection[str] = ()
) -> Change:
    """Return the change that adds instances, {instance: compute or ''}, to their group.

    Raises:
        Excluded: the group's rule forbids some of them.
        Conflict: the group would have too many members.
    """
    if membership is None:
        return [], []
    existing, unchanged = load_group(store, membership.name)
    settled = resolve_group(existing, membership).without_members(*replaced)
    admitted = filter_admitted(settled, places)
    if len(admitted) < len(places):
        raise Excluded(admitted)
    extended = settled.with_members(places)
    if len(extended.members) > MAX_MEMBERS:
        limit = f'has {len(settled.members)} members, and the limit is {MAX_MEMBERS}'
        raise Conflict(f'group {membership.name}: {limit}. Fix: use another group')
    return [unchanged], [make_group_operation(extended)]


def charge_quota(store: Store, project: str, resources: Mapping[str, Resources]) -> Change:
    """Return the change that charges the quota for {instance: resources}, or raise Excluded."""
    current, unchanged = load_quota(store, project)
    if current is None:
        return [unchanged], []  # a quota that is set concurrently counts all requests itself
    charges = {instance: make_charge(amounts) for instance, amounts in resources.items()}
    admitted: list[str] = []
    for instance in charges:
        if current.list_excesses(sum_resources(charges[name] for name in (*admitted, instance))):
            raise Excluded(admitted)
        admitted.append(instance)
    return [unchanged], [make_quota_put(current.add_used(sum_resources(charges.values())))]


def recharge_quota(store: Store, project: str, resources: Resources) -> Change:
    """Return the change that charges the quota for a living instance, even above its limits."""
    current, unchanged = load_quota(store, project)
    return [unchanged], [] if current is None else [make_quota_put(current.add_used(make_charge(resources)))]


def change_charge(store: Store, project: str, before: Resources, after: Resources, *, has_limit: bool = True) -> Change:
    """Return the change that charges `after` in place of `before`, or raise OverQuota."""
    current, unchanged = load_quota(store, project)
    growth = {name: after.get(name, 0) - before.get(name, 0) for name in {*before, *after}}
    if current is None or not any(growth.values()):
        return [unchanged], []
    excesses = current.list_excesses({name: amount for name, amount in growth.items() if amount > 0})
    if excesses and has_limit:  # without: a guest that has it already
        raise OverQuota(describe_excesses(project, excesses))
    return [unchanged], [make_quota_put(current.add_used(growth))]


def merge_changes(*changes: Change) -> Change:
    conditions = [each for compared, _ in changes for each in compared]
    return conditions, [each for _, operations in changes for each in operations]


def make_quota_put(new_quota: Quota, **stamp: str) -> Put:
    return Put(keys.quota(new_quota.project), encode(new_quota, **stamp))


def make_empty_change() -> Change:
    return [], []


def rejoin_group(store: Store, membership: Membership | None, instance: str, compute: str) -> Change:
    """Return the change that makes an instance a group's member, even if a rule forbids it."""
    if membership is None:
        return [], []
    existing, unchanged = load_group(store, membership.name)
    if existing is not None and existing.members.get(instance) == compute:
        return [], []
    target = existing or Group(membership.name, membership.policy or '', bool(membership.strict))
    return [unchanged], [make_group_operation(target.with_members({instance: compute}))]


def commit_with_shared(
    store: Store,
    conditions: Sequence[Unchanged | Exists],
    operations: Sequence[Put | Delete],
    make_change: Callable[[], Change],
    lease: int = 0,
    settlement: Settlement | None = None,
) -> int | None:
    """Commit `operations` together with a change of keys that other processes write, too.

    After each lost race `make_change` makes that change again. The result is the revision, or None if one of
    `conditions` does not hold, or after MAX_TRIES. `lease` is revoked if certainly nothing was written.
    """
    if lease and settlement is not None:
        settlement = settlement._replace(find_commit=partial(_find_on_lease, lease, settlement))
    try:
        shared_conditions, shared_operations = make_change()
        for _ in range(MAX_TRIES):
            written = store.commit([*conditions, *shared_conditions], [*operations, *shared_operations], settlement)
            if written is not None:
                return written
            previous = shared_conditions
            shared_conditions, shared_operations = make_change()
            if shared_conditions == previous:
                break
            time.sleep(random.uniform(0, MAX_PAUSE_SECONDS))
    except Exception as error:
        # After these errors the transaction may have been committed: etcd may be found strange by its answer.
        if not isinstance(error, UnknownOutcome | NoSpace | StrangeEtcd):
            try_revoke(store, lease)
        raise
    try_revoke(store, lease)
    return None


def _find_on_lease(lease: int, settlement: Settlement, entries: Mapping[str, Entry]) -> int | None:
    # A shared key that has changed since hides a commit, but no other transaction writes on its lease.
    revisions = [each.revision for each in entries.values() if each.lease == lease]
    return min(revisions) if revisions else settlement.find_commit(entries)


def make_group_operation(new_group: Group) -> Put | Delete:
    """Return the write of a group's key, or its deletion if it has no members."""
    key = keys.group(new_group.name)
    return Put(key, encode(new_group)) if new_group.members else Delete(key)


def _read(store: Store, key: str, kind: type[Shared], **key_fields: str) -> tuple[Shared | None, Unchanged]:
    entry = store.get(key)
    if entry is None:
        return None, Unchanged(key, 0)
    return decode_at(key, kind, entry.value, **key_fields), Unchanged(key, entry.revision)


def _is_owned_by(name_entry: Entry, instance: str) -> bool:
    try:
        return decode(NameOwner, name_entry.value).instance == instance
    except ValueError:
        return False


def try_revoke(store: Store, lease: int) -> None:
    """Revoke a lease, unless it is 0, and ignore errors, because it expires anyway."""
    if lease:
        with suppress(EcompError):  # then it expires
            store.revoke(lease)
