"""Put a request into a flavor's queue, without placement, and explain why it still waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ecomp.errors import Conflict, EcompError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import find_compute
from ecomp.model.group import Group
from ecomp.model.host import Computes, PresenceFacts
from ecomp.model.query import UnsupportedQueryError
from ecomp.model.queue import QueueEntry, QueueTaker
from ecomp.model.stored import decode_lenient, encode
from ecomp.model.user_data import SharedUserData
from ecomp.placement.allocations import read_consumer
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import announce, read_settled_group, read_terms, reserve_names
from ecomp.scheduler.placing.create import require_matching
from ecomp.scheduler.placing.explain import find_shortfalls
from ecomp.scheduler.queries.find import find
from ecomp.shared.ends import prepare_user_data
from ecomp.shared.names import Change, Excluded, charge_quota, commit_with_shared, join_group, merge_changes, try_revoke
from ecomp.store.client import Delete, Entry, Put, Settlement, Store, Unchanged


@dataclass(frozen=True)
class QueuePosition:
    flavor: str
    # The number of older requests of its flavor.
    before: int
    # The compute that is taking it.
    taker: str | None
    # {compute: what it lacks, or that it has room} of those that take from queues, {} if that is unknown.
    lacks: Mapping[str, str]
    unknown_reason: str | None = None
    # Whether its flavor is missing: then no compute takes it.
    is_flavorless: bool = False
    # Only this compute takes the request, because it holds the claim.
    claimed_on: str | None = None


def read_queue_position(
    store: Store, placement: Placement, entry: Entry, query: str | None, known_computes: Computes, group: Group | None
) -> QueuePosition:
    """Read the position of a queued request, and why it waits."""
    flavor = (keys.parse_queue_key(entry.key) or ('', ''))[0]
    entries = store.snapshot(keys.queue(flavor, ''), keys_only=True).entries
    older = [key for key, other in entries.items() if other.revision < entry.revision]
    before = sum(keys.parse_queue_key(key) is not None for key in older)
    taker_entry = store.get(keys.taker(entry.key))
    taker = decode_lenient(QueueTaker, taker_entry.value).compute if taker_entry is not None else None
    if store.get(keys.flavor(flavor)) is None:
        return QueuePosition(flavor, before, taker, {}, is_flavorless=True)
    try:
        claimed_on = find_compute(read_consumer(placement, keys.get_last_part(entry.key)).allocations) or None
        if claimed_on is not None:
            return QueuePosition(flavor, before, taker, {}, claimed_on=claimed_on)
        lacks = find_shortfalls(store, placement, query or '', known_computes, group)
    except (EcompError, UnsupportedQueryError) as error:
        return QueuePosition(flavor, before, taker, {}, str(error))
    return QueuePosition(flavor, before, taker, lacks)


# Computes that are read to find one that takes from queues, before all are read.
TAKER_SAMPLE_SIZE = 10


def has_taker(store: Store) -> bool:
    """Return whether one of the first TAKER_SAMPLE_SIZE computes lives and takes from queues."""
    entries, _ = store.sample(keys.COMPUTES, keys.COMPUTES, TAKER_SAMPLE_SIZE)
    return any(decode_lenient(PresenceFacts, entry.value).queues for entry in entries if entry.lease)


def enqueue(
    store: Store,
    queue_entry: QueueEntry,
    flavor_revision: int,
    user_data: SharedUserData | None,
    owner: Mapping[str, object],
    resume: bool,
) -> bool:
    """Put a request into its queue, or return False if the instance was requested before.

    Without `resume` an earlier request is looked for only after a failed try.

    Raises:
        Conflict: the uuid was requested differently, its name is taken, or other processes changed its keys.
    """
    current_group = read_settled_group(store, queue_entry.group)
    queue_entry = replace(queue_entry, group=current_group.membership if current_group is not None else None)
    instance = queue_entry.instance
    if not resume:
        _require_allowed(store, queue_entry)  # before anything is written
    elif _confirm_enqueued(store, queue_entry):
        return False
    lease = store.grant(keys.ATTEMPT_SECONDS)
    try:
        value = {'version': 1, 'instances': [instance], 'query': queue_entry.flavor.query, **owner}
        revision = announce(store, lease, instance, value, resume)
        # Another process may have delivered in between. From here on it cannot: a delivery needs the key we hold.
        if resume and _confirm_enqueued(store, queue_entry):
            return False
        # A taker may have moved it, and a user destroyed it, before a lost answer was settled.
        if _commit(store, queue_entry, flavor_revision, user_data, revision) or _confirm_enqueued(store, queue_entry):
            failpoint('queued')
            return True
        if resume:
            why = 'another process changed its flavor or its name, or took over this uuid, or the connection broke'
            raise Conflict(f'{instance}: not queued: {why}. Try: the same command again')
    finally:
        try_revoke(store, lease)
    return enqueue(store, queue_entry, flavor_revision, user_data, owner, resume=True)


def _commit(
    store: Store, entry: QueueEntry, flavor_revision: int, user_data: SharedUserData | None, attempt_revision: int
) -> bool:
    instance, attempt, flavor = entry.instance, keys.attempt(entry.instance), keys.flavor(entry.flavor.name)
    conditions = [Unchanged(attempt, attempt_revision), Unchanged(entry.key, 0), Unchanged(flavor, flavor_revision)]
    user_data_puts, granted = prepare_user_data(store, user_data)
    operations: list[Put | Delete] = [Put(entry.key, encode(entry)), Delete(attempt), *user_data_puts]

    def make_shared_change() -> Change:
        return merge_changes(
            reserve_names(store, {instance: entry.name}),
            join_group(store, entry.group, {instance: ''}),
            charge_quota(store, entry.project_id, {instance: entry.flavor.resources}),
        )

    settlement = Settlement(Delete(attempt), doubt=f'{instance} is queued')
    try:
        written = commit_with_shared(store, conditions, operations, make_shared_change, granted, settlement)
    except Excluded:
        # After a lost answer, the request itself may be what its quota and its group have no room beside.
        if _confirm_enqueued(store, entry):
            return True
        _require_allowed(store, entry)
        raise Conflict(f'{instance}: other processes keep changing its quota. Try: the same command again') from None
    return written is not None


def _require_allowed(store: Store, queue_entry: QueueEntry) -> None:
    reserve_names(store, {queue_entry.instance: queue_entry.name})
    read_terms(store, queue_entry, [queue_entry.instance]).count_allowed(queue_entry.flavor.resources, 1, 1)


def _confirm_enqueued(store: Store, queue_entry: QueueEntry) -> bool:
    entries = find(store, queue_entry.instance)
    if entries is None:
        return False
    require_matching(entries, queue_entry)
    return True
