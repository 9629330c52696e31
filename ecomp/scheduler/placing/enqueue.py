"""Put a request into a flavor's queue, from which a compute takes it, and say why it still waits there.

placement is not asked, and nothing is claimed.
"""

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
    """A place in a queue. `before` is how many of the same flavor wait longer; `taker` the compute that is taking it.

    `lacks` is what each compute that takes from queues lacks, in words; `unknown` why that could not be found out.
    `is_flavorless`: its flavor is not there, and nobody takes it whatever each has. `claimed_on` is the compute that
    holds a claim for it: nobody else takes it.
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
    """Look at the queue, and at the computes that take from it. Errors: those of etcd."""
    flavor = (keys.queued(entry.key) or ('', ''))[0]
    there = store.snapshot(keys.queue(flavor, ''), keys_only=True).entries
    before = sum(each.revision < entry.revision for key, each in there.items() if keys.queued(key) is not None)
    mark = store.get(keys.taker(entry.key))
    taker = marked_by(mark.value) if mark is not None else None
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


FEW = 10
"""Computes that are read to find one that takes from queues, before all are."""


def flavor_of_etcd(config: ScheduleConfig, store: Store, name: str) -> tuple[Flavor, int]:
    """The flavor, from etcd, where the computes see it, and the revision that wrote it. UsageError, NotFound."""
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
    """Whether one of the first few living computes takes from queues: of a thousand not all are read for a yes."""
    read, _ = store.around(keys.COMPUTES, keys.COMPUTES, FEW)
    return any(living_in(each.value).queues for each in read if each.lease)


def enqueue(
    store: Store, waiting: QueueEntry, flavor: int, data: SharedUserData | None, who: Mapping[str, object], resume: bool
) -> bool:
    """Put it in its queue; False if it was asked for before, and nothing is changed.

    `flavor` is the revision of its flavor; `who` (host, pid) says in etcd who is at it; `resume` is True for a uuid
    the user gave, which may have a past.
    Errors: Conflict (the uuid or the name is used otherwise), OverQuota, UsageError, UnknownOutcome, Unreachable.
    """
    theirs = settled(store, waiting.group)
    waiting = replace(waiting, group=theirs.membership if theirs is not None else None)
    done = _enqueued(store, waiting, flavor, data, who, resume)
    failpoint('queued')
    return done


def _enqueued(
    store: Store, waiting: QueueEntry, flavor: int, data: SharedUserData | None, who: Mapping[str, object], resume: bool
) -> bool:
    instance = waiting.instance
    if not resume:
        _allowed(store, waiting)  # said before anything is written
    elif _before(store, waiting):
        return False
    lease = store.grant(keys.ATTEMPT_SECONDS)
    try:
        value = {'version': 1, 'instances': [instance], 'query': waiting.flavor.query, **who}
        revision = announce(store, lease, instance, value, resume)
        # Delivered since we looked? From here on nobody else can: a delivery needs the key we hold now.
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
    """Whether it is queued, by a commit without an answer: first one that is still on its way is made impossible."""
    try:
        withdraw(store, keys.attempt(waiting.instance), revision)
        return _before(store, waiting)
    except Unreachable as error:
        cure = f'the same command with --uuid {waiting.instance} goes on, or says what became of it'
        raise UnknownOutcome(f'{error}; whether it is queued is not known: {cure}', error.backend) from error


def _commit(store: Store, waiting: QueueEntry, flavor: int, data: SharedUserData | None, attempt_revision: int) -> bool:
    """Queue it in one transaction, while our own attempt, of this revision, says that we are at this uuid.

    Its name becomes its own, its group and its quota have it in the same transaction, or nothing does.
    Errors: Conflict (the name is somebody else's by now, the group another), OverQuota.
    """
    instance = waiting.instance
    attempt_key = keys.attempt(instance)
    flavor_key = keys.flavor(waiting.flavor.name)
    conditions = [Unchanged(attempt_key, attempt_revision), Unchanged(waiting.key, 0), Unchanged(flavor_key, flavor)]
    written, granted = put_user_data(store, data)
    operations: list[Put | Delete] = [Put(waiting.key, to_json(waiting)), Delete(attempt_key), *written]

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
    """Nothing where it may wait. Errors: OverQuota; UsageError and Conflict of the group and the name."""
    take_names(store, {waiting.instance: waiting.name})
    terms_of(store, waiting, [waiting.instance]).room(waiting.flavor.resources, 1, 1)


def _before(store: Store, waiting: QueueEntry) -> bool:
    """Whether just this was asked for before, by this uuid; Conflict if something else was."""
    found = find(store, waiting.instance)
    if found is None:
        return False
    check_same(found, waiting)
    return True
