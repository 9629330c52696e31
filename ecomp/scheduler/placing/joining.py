"""What new instances share with others: names, a group, a quota.

Looked at before a place is sought for them, and decided once more in the transaction that delivers them (rule 7).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ecomp.errors import Conflict, OverQuota, UsageError
from ecomp.model import keys
from ecomp.model.allocation import Resources
from ecomp.model.group import Group, Membership, settle
from ecomp.model.instance import name_to_json
from ecomp.model.near import did_you_mean
from ecomp.model.quota import Quota, charge, refusal, times
from ecomp.model.stages import ERROR, GONE
from ecomp.store.client import Delete, Put, Store, Unchanged
from ecomp.store.sharing import Change, group, holder, quota


class Terms(NamedTuple):
    """The group without those who are about to join it, and the quota, as they were a moment ago; None: none."""

    group: Group | None
    quota: Quota | None

    def room(self, resources: Resources, count: int, minimum: int) -> int:
        """How many the quota allows of so many, and at least the minimum; OverQuota."""
        if self.quota is None:
            return count
        found = self.quota.room(charge(resources), count)
        if found < minimum:
            excess = self.quota.excess(times(charge(resources), minimum))
            raise OverQuota(refusal(self.quota.project, excess))
        return found


def terms_of(store: Store, wanted: Membership | None, project: str, instances: Collection[str]) -> Terms:
    """Read the group and the quota that these instances will be counted in.

    Errors: UsageError, Conflict (the group has another policy).
    """
    theirs = settled(store, wanted)
    return Terms(theirs.without(*instances) if theirs is not None else None, quota(store, project)[0])


def settled(store: Store, wanted: Membership | None) -> Group | None:
    """Read the group that an order names, None for none. Errors: UsageError, Conflict (it is another)."""
    if wanted is None:
        return None
    there = group(store, wanted.name)[0]
    try:
        return settle(there, wanted)
    except UsageError as error:
        known = map(keys.last, store.snapshot(keys.GROUPS, keys_only=True).entries)
        raise UsageError(f'{error}{did_you_mean(wanted.name, known)}') from error


def take_names(store: Store, names: Mapping[str, str | None]) -> Change:
    """Take the names that are given: {instance: name or None}. Conflict: one is somebody else's."""
    named = {name: instance for instance, name in names.items() if name is not None}
    free = [free_name(store, name, instance) for name, instance in named.items()]
    return free, [Put(keys.name(name), name_to_json(instance)) for name, instance in named.items()]


def together(*changes: Change) -> Change:
    """Join several changes of a transaction into one."""
    conditions: list[Unchanged] = []
    operations: list[Put | Delete] = []
    for unchanged, change in changes:
        conditions += unchanged
        operations += change
    return conditions, operations


def free_name(store: Store, name: str, wanted: str) -> Unchanged:
    """The condition that a name is as free as it is now. Conflict if another living one than `wanted` has it."""
    key = keys.name(name)
    entry = store.get(key)
    if entry is None:
        return Unchanged(key, 0)
    # A delivery puts both, so the instance of a name that is there was there before we looked.
    instance = holder(entry)
    from ecomp.scheduler.looking.find import find  # for a name that somebody has

    found = find(store, instance) if instance != wanted else None
    if found is not None and found.record.state not in (GONE, ERROR):
        cure = 'it is being destroyed: try again then' if found.is_destroying else 'take another, or destroy it first'
        raise Conflict(f'{name}: is the name of instance {instance}: {cure}')
    return Unchanged(key, entry.revision)
