"""Put a request into a flavor's queue, without placement, and explain why it still waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ecomp.conf import ScheduleConfig
from ecomp.errors import Conflict, EcompError, UnknownOutcome, Unreachable, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import compute_of, missing
from ecomp.model.flavor import Flavor, check_flavor_name
from ecomp.model.group import Group
from ecomp.model.guest import SharedUserData
from ecomp.model.host import Computes, living_in
from ecomp.model.query import Unexplained
from ecomp.model.queue import QueueEntry, marked_by, to_json
from ecomp.placement.allocations import consumer
from ecomp.placement.client import Placement
from ecomp.scheduler.looking.find import find, take_names
from ecomp.scheduler.operating.sharing import flavor_names, no_such_flavor, read_flavor
from ecomp.scheduler.placing.claim import announce, put_user_data, settled, terms_of
from ecomp.scheduler.placing.create import check_same
from ecomp.scheduler.placing.explain import lacking
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged, withdraw
from ecomp.store.sharing import Change, Excluded, charged, commit_with, joined, quietly_revoke, together


@dataclass(frozen=True)
class Waiting:
    """The state of a queued request; `before` counts the older ones of its flavor.

    `lacks` is {compute: what it lacks} of those that take from queues; `unknown_reason` is why that is not known.
    Without its flavor (`is_flavorless`) no compute takes the request, and with a claim only `claimed_on`, the claim's
    compute.
    """

    flavor: str
    before: int
    taker: str | None
    lacks: Mapping[str, str]
    unknown: str | None = None
    is_flavorless: bool = False
    claimed_on: str | None = None


def waiting(
    store: Store, placement: Placement, entry: Entry, query: str | None, known: Computes, group: Group | None
) -> Waiting:
    """Read the queue and the computes that take from it. Raises the errors of etcd only."""
    flavor = (keys.queued(entry.key) or ('', ''))[0]
    entries = store.snapshot(keys.queue(flavor, ''), keys_only=True).entries
    before = sum(other.revision < entry.revision for key, other in entries.items() if keys.queued(key) is not None)
    taker_entry = store.get(keys.taker(entry.key))
    taker = marked_by(taker_entry.value) if taker_entry is not None else None
    if store.get(keys.flavor(flavor)) is None:
        return Waiting(flavor, before, taker, {}, is_flavorless=True)
    try:
        claimed_on = compute_of(consumer(placement, keys.last(entry.key)).allocations) or None
        if claimed_on is not None:
            return Waiting(flavor, before, taker, {}, claimed_on=claimed_on)
        lacks = lacking(placement, query or '', known, known.takers, group) if known.takers else {}
    except (EcompError, Unexplained) as error:
        return Waiting(flavor, before, taker, {}, str(error))
    return Waiting(flavor, before, taker, lacks)


# Computes that are read to find one that takes from queues, before all are read.
FEW = 10


def flavor_of_etcd(config: ScheduleConfig, store: Store, name: str) -> tuple[Flavor, int]:
    """Read a flavor and its revision from etcd, where the computes see it.

    Raises NotFound; UsageError if its name is invalid, it is in schedule.yaml only, or lacks what a guest needs;
    Unreadable.
    """
    try:
        entry = store.get(keys.flavor(check_flavor_name(name)))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if entry is None and name in config.flavors:
        cure = f"eschedule flavor set {name} '{config.flavors[name].query}'"
        raise UsageError(f'flavor {name} is in schedule.yaml alone, where no compute sees it: {cure}')
    if entry is None:
        raise no_such_flavor(name, flavor_names(store))
    flavor = read_flavor(entry)
    lacking = missing(flavor.resources)
    if lacking:
        raise UsageError(f'flavor {name} asks for no {", ".join(lacking)}: a guest needs VCPU, MEMORY_MB and DISK_GB')
    return flavor, entry.revision


def has_taker(store: Store) -> bool:
    """True if one of the first TAKER_SAMPLE_SIZE computes is alive and takes from queues."""
    entries, _ = store.around(keys.COMPUTES, keys.COMPUTES, FEW)
    return any(living_in(entry.value).queues for entry in entries if entry.lease)


def enqueue(
    store: Store, waiting: QueueEntry, flavor: int, data: SharedUserData | None, who: Mapping[str, object], resume: bool
) -> bool:
    """Put a request into its queue; False if the same was requested before.

    `owner` and `resume`: see create(). Raises Conflict if the uuid or name is used otherwise, the group differs or
    another process interferes; OverQuota, UsageError, UnknownOutcome, Unreachable.
    """
    current_group = settled(store, waiting.group)
    waiting = replace(waiting, group=current_group.membership if current_group is not None else None)
    is_new = _enqueued(store, waiting, flavor, data, who, resume)
    failpoint('queued')
    return is_new


def _enqueued(
    store: Store, waiting: QueueEntry, flavor: int, data: SharedUserData | None, who: Mapping[str, object], resume: bool
) -> bool:
    instance = waiting.instance
    if not resume:
        _allowed(store, waiting)  # before anything is written
    elif _before(store, waiting):
        return False
    lease = store.grant(keys.ATTEMPT_SECONDS)
    try:
        value = {'version': 1, 'instances': [instance], 'query': waiting.flavor.query, **who}
        revision = announce(store, lease, instance, value, resume)
        # Another process may have delivered in between. From here on it cannot: a delivery needs the key we hold.
        if resume and _before(store, waiting):
            return False
        try:
            if _commit(store, waiting, flavor, data, revision):
                return True
        except UnknownOutcome as error:
            if _read_back(store, waiting, revision):
                return True
            if resume:
                raise Conflict(f'{instance}: not queued, and nothing is changed: {error}; try again') from error
        else:
            why = 'somebody else changed its flavor or its name, or took it over'
            raise Conflict(f'{instance}: not queued: {why}; try again')
    finally:
        quietly_revoke(store, lease)
    return _enqueued(store, waiting, flavor, data, who, resume=True)


def _read_back(store: Store, waiting: QueueEntry, revision: int) -> bool:
    """Return whether a commit without an answer queued the request; it cannot land after this."""
    try:
        withdraw(store, keys.attempt(waiting.instance), revision)
        return _before(store, waiting)
    except Unreachable as error:
        cure = f'the same command with --uuid {waiting.instance} goes on, or says what became of it'
        raise UnknownOutcome(f'{error}; whether it is queued is not known: {cure}', error.backend) from error


def _commit(store: Store, waiting: QueueEntry, flavor: int, data: SharedUserData | None, attempt_revision: int) -> bool:
    """Queue the request, with its name, group and quota, while our attempt has this revision.

    False if the attempt, the flavor or the queue has changed. Raises Conflict (name, group or quota), OverQuota.
    """
    instance = waiting.instance
    attempt_key = keys.attempt(instance)
    flavor_key = keys.flavor(waiting.flavor.name)
    conditions = [Unchanged(attempt_key, attempt_revision), Unchanged(waiting.key, 0), Unchanged(flavor_key, flavor)]
    user_data_puts, granted = put_user_data(store, data)
    operations: list[Put | Delete] = [Put(waiting.key, to_json(waiting)), Delete(attempt_key), *user_data_puts]

    def joining() -> Change:
        return together(
            take_names(store, {instance: waiting.name}),
            joined(store, waiting.group, {instance: ''}),
            charged(store, waiting.project_id, {instance: waiting.flavor.resources}),
        )

    try:
        return commit_with(store, conditions, operations, joining, granted) is not None
    except Excluded:
        _allowed(store, waiting)
        raise Conflict(f'{instance}: its quota is changed by somebody else all the time; try again') from None


def _allowed(store: Store, waiting: QueueEntry) -> None:
    """Raise Conflict (name, group), OverQuota or UsageError if the request must not be queued."""
    take_names(store, {waiting.instance: waiting.name})
    terms_of(store, waiting, [waiting.instance]).room(waiting.flavor.resources, 1, 1)


def _before(store: Store, waiting: QueueEntry) -> bool:
    """True if the same request was made before; Conflict if the uuid is used otherwise."""
    entries = find(store, waiting.instance)
    if entries is None:
        return False
    check_same(entries, waiting)
    return True
