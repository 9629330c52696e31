"""Find what is known of an instance: its record, or the request its compute has not seen yet; and whose a name is."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ecomp.errors import Conflict, EcompError, NotFound, Unreadable, UsageError
from ecomp.model import keys
from ecomp.model.choose import Offer
from ecomp.model.host import Places, by_instance
from ecomp.model.order import Invalid, Order, Request, name_to_json, parse_request
from ecomp.model.record import ERROR, GONE, Record, from_json, new_record, recorded, refused_record
from ecomp.model.text import PREFIX, is_name, printable, some, uuid_prefix
from ecomp.store.client import Entry, Put, Store, Unchanged
from ecomp.store.sharing import Change, Index, everywhere, holder, listed, near

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ecomp.conf import PlacementConfig
    from ecomp.model.queue import QueueEntry
    from ecomp.placement.client import Placement, Slow

    Backend = Future[tuple[Placement, Offer]]


FRESH = 2.0
"""Seconds between placement's being asked and the attempt's being there, at most: after more it is asked again. So
whoever disables a compute knows after that time of everybody who was told before that there is room on it."""


def ask_placement(config: PlacementConfig, query: str | None, slow: Slow) -> Backend:
    """Placement, and what it offers for a query; the future raises what that raises. `slow` is as Placement has it.

    Query None: nothing is asked yet, and the offer is empty and never fresh.

    Nearly all of what a claim takes is imports and waiting. What this one needs is imported first, and not beside what
    etcd needs: then placement is at it while that is imported.
    """
    from concurrent.futures import Future  # not for commands that ask etcd alone

    from ecomp.placement.allocations import candidates
    from ecomp.placement.client import Placement

    future: Backend = Future()

    def ask() -> None:
        try:
            placement = Placement(config, slow=slow)
            future.set_result((placement, Offer(()) if query is None else candidates(placement, query)))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask, name='candidates', daemon=True).start()
    return future


QUOTED = 5
"""How many instances, or computes, an error names."""


class InstanceEntries(NamedTuple):
    """One instance. `record_entry` is None while no compute has written a record of it.

    `queue_entry` is there while it waits for a compute to take it: then there is nothing else.
    """

    record: Record
    record_entry: Entry | None
    request_entry: Entry | None
    queue_entry: Entry | None = None

    @property
    def request(self) -> Request | None:
        """The request as it stands; None where there is none, or none that can be understood."""
        if self.request_entry is None:
            return None
        request = parse_request(self.record.compute, self.request_entry.key, self.request_entry.value)
        return request if isinstance(request, Request) else None

    @property
    def order(self) -> Order | None:
        """What was asked for, all of it, the record believed first; None where only that is left to say."""
        asked: Request | QueueEntry | Invalid | None = self.request
        if self.queue_entry is not None:
            from ecomp.model.queue import parse_waiting  # as below

            asked = parse_waiting(self.queue_entry.key, self.queue_entry.value)
        if asked is None or isinstance(asked, Invalid):
            return None
        return Order(**asked.parts(**{name: value for name, value in recorded(self.record).items() if value}))

    @property
    def is_destroying(self) -> bool:
        """True once a destroy has been accepted."""
        request = self.request
        return request is not None and request.is_tombstone

    @property
    def name(self) -> str | None:
        """The instance's name; an older ecompute does not write it down."""
        request = self.request
        return self.record.name or (request.name if request else None)

    @property
    def group(self) -> str | None:
        """The name of the instance's group; from its request, where an older ecompute did not write it down."""
        request = self.request
        return self.record.group_name or (request.group_name if request else None)


def resolve(store: Store, word: str, among: Index | None = None) -> str:
    """The uuid of the instance a word means: a uuid, a name or, if nobody is called so, the only uuid that begins so.

    `among`: see find(). Errors: NotFound, UsageError (several begin so), Conflict (the name leads to one that is called
    otherwise).
    """
    if keys.is_uuid(word):
        return word
    if is_name(word) and (entry := store.get(keys.name(word))) is not None:
        _check_called(store, word, instance := holder(entry), among)
        return instance
    beginning = uuid_prefix(word)
    if beginning is None:
        short = f' (of its uuid, {PREFIX} digits at least)' if len(word) < PREFIX else ''
        raise NotFound(f'{word}: no living instance has this name{short}')
    recorded = map(keys.last, store.snapshot(keys.INSTANCES, keys_only=True).entries)
    found = {name for name in recorded if name.startswith(beginning) and keys.is_uuid(name)}
    # Those that no compute has taken or seen yet: what is moved meanwhile is seen twice.
    waiting = store.snapshot(keys.QUEUES, keys_only=True).entries
    found |= {each for each in map(_waiting, waiting) if each and each.startswith(beginning)}
    asked = store.snapshot(keys.HOSTS, keys_only=True).entries
    found |= {keys.last(key) for key in asked if _names_instance(key) and keys.last(key).startswith(beginning)}
    if not found:
        raise NotFound(f'{word}: no living instance has this name, and no uuid begins so')
    if len(found) > 1:
        raise UsageError(f'{word}: {len(found)} instances begin so: {some(sorted(found), QUOTED)}')
    return found.pop()


def _check_called(store: Store, name: str, instance: str, among: Index | None) -> None:
    """Conflict if it is called otherwise: every compute may write every name, and a destroy by it would hit another."""
    try:
        found = find(store, instance, among)
    except Unreadable:
        return
    # Of one that failed, and whose record an older ecompute wrote, no name is known.
    if found is None or found.name == name or (found.name, found.request, found.queue_entry) == (None, None, None):
        return
    called = f'is called {printable(found.name)}' if found.name else 'has no name'
    wrong = f'{keys.name(name)} leads to instance {instance}, which {called}'
    raise Conflict(f'{wrong}: say the uuid of the one that is meant; eschedule audit says more')


def find(store: Store, instance: str, among: Index | None = None) -> InstanceEntries | None:
    """The instance, None if nobody ever heard of it (or a record of it was removed). Unreadable.

    `among`: where instances were a moment ago, for whoever asks for many; what is not there is looked for.
    """
    at = near(store, instance, among)
    if at is None:
        # Before the requests: what is moved meanwhile is found there.
        queue_entry = waiting_at(store, instance)
        if queue_entry is not None:
            return InstanceEntries(read_waiting(queue_entry), None, None, queue_entry)
        at = listed(store, instance)
    if at.record is not None:
        return InstanceEntries(read_record(at.record), at.record, at.request)
    return requested(at)


def waiting_at(store: Store, instance: str) -> Entry | None:
    """The instance's place in a queue; None where it waits in none."""
    mine = [key for key in store.snapshot(keys.QUEUES, keys_only=True).entries if _waiting(key) == instance]
    return next((entry for entry in map(store.get, mine) if entry is not None), None)


def requested(at: Places[Entry]) -> InstanceEntries | None:
    """The instance by its request alone, None if no compute is asked for it."""
    return InstanceEntries(_scheduled(at.request), None, at.request) if at.request is not None else None


def is_known(store: Store, instance: str, among: Index | None = None) -> bool:
    """Whether etcd has anything of the instance, readable or not. `among`: see find()."""
    try:
        return find(store, instance, among) is not None
    except Unreadable:
        return True


def living(store: Store, instance: str, among: Index | None = None) -> InstanceEntries:
    """The instance; `among`: see find(). Errors: NotFound (it is gone or was never there), Unreadable (its record)."""
    found = find(store, instance, among)
    if found is None:
        raise NotFound(f'{instance}: no such instance')
    if found.record.state == GONE:
        raise NotFound(f'{instance}: gone since {found.record.stages.get("gone", "some time")}')
    return found


def all_records(store: Store, with_gone: bool) -> tuple[list[Record], list[EcompError]]:
    """Every instance, by the time of its request, and what is wrong with records that cannot be read.

    Those of which only a request exists are `scheduled`, and those that no compute has taken `queued`.
    """
    # In this order: what is moved on meanwhile is seen twice, and counts where it was seen last.
    queued = {_waiting(key): entry for key, entry in store.snapshot(keys.QUEUES).entries.items() if _waiting(key)}
    records, unreadable = {each: read_waiting(entry) for each, entry in queued.items() if each}, []
    # The value of a request may be large (user-data), and mostly it is not needed.
    asked = [each for each in store.snapshot(keys.HOSTS, keys_only=True).entries.items() if _names_instance(each[0])]
    found = [*asked, *store.snapshot(keys.INSTANCES).entries.items()]
    try:
        there = everywhere(store, found)
    except EcompError as error:  # placement is away
        unreadable.append(EcompError(f'{error}; of what two computes are asked for, the older request is shown'))
        there = by_instance(found)
    for instance, at in there.items():
        try:
            if at.record is not None:
                records[instance] = read_record(at.record)
            elif at.request is not None and (request := store.get(at.request.key)) is not None:
                records[instance] = _scheduled(request)
        except EcompError as error:
            unreadable.append(error)
    shown = [each for each in records.values() if with_gone or each.state != GONE]
    return sorted(shown, key=lambda each: (each.stages.get('requested', ''), each.instance)), unreadable


def read_record(entry: Entry) -> Record:
    """The record in an entry. Unreadable names the key, and the cure.

    Removing it is safe: a compute that has the instance writes down anew what it has.
    """
    try:
        if entry.dropped:
            raise ValueError(f'it has {entry.dropped} bytes: too many')
        compute, instance = keys.recorded(entry.key)
        return from_json(entry.value, instance, compute)
    except ValueError as error:
        raise Unreadable(printable(entry.key, 100), error) from error


def _scheduled(entry: Entry) -> Record:
    compute, instance = entry.key.split('/')[-2:]
    request = parse_request(compute, entry.key, entry.value)
    if isinstance(request, Invalid):
        return replace(refused_record(compute, request._replace(instance=instance), ''), fault=request.reason)
    return new_record(compute, request, '')


def read_waiting(entry: Entry) -> Record:
    """The record to show of what waits in a queue."""
    from ecomp.model.queue import record_of  # what it needs is a twentieth of a claim, which seldom needs it

    return record_of(entry.key, entry.value)


def _waiting(key: str) -> str | None:
    """The instance that waits at a key in the queues; None for any other."""
    place = keys.queued(key)
    return place[1] if place and keys.is_uuid(place[1]) else None


def _names_instance(key: str) -> bool:
    """True for /hosts/<compute>/<instance>; whatever else is there is reported by its compute."""
    return key.count('/') == 3 and keys.is_uuid(keys.last(key))


def take_names(store: Store, names: Mapping[str, str | None]) -> Change:
    """Take the names that are given: {instance: name or None}. Conflict: one is somebody else's."""
    named = {name: instance for instance, name in names.items() if name is not None}
    free = [free_name(store, name, instance) for name, instance in named.items()]
    return free, [Put(keys.name(name), name_to_json(instance)) for name, instance in named.items()]


def free_name(store: Store, name: str, wanted: str) -> Unchanged:
    """The condition that a name is as free as it is now. Conflict if another living one than `wanted` has it."""
    key = keys.name(name)
    entry = store.get(key)
    if entry is None:
        return Unchanged(key, 0)
    # A delivery puts both, so the instance of a name that is there was there before we looked.
    instance = holder(entry)
    found = find(store, instance) if instance != wanted else None
    if found is not None and found.record.state not in (GONE, ERROR):
        cure = 'it is being destroyed: try again then' if found.is_destroying else 'take another, or destroy it first'
        raise Conflict(f'{name}: is the name of instance {instance}: {cure}')
    return Unchanged(key, entry.revision)
