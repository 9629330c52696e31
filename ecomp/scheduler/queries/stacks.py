"""Read a stack: its key, and the instances that were delivered for it."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from ecomp.errors import Conflict, Unreadable
from ecomp.model import keys
from ecomp.model.apply import Existing
from ecomp.model.order import Request, parse_request
from ecomp.model.record import ERROR, GONE
from ecomp.model.stack import MAX_FLOOR, Place, Stack, from_json, restore_stack, to_json
from ecomp.scheduler.queries.find import InstanceEntries, find, from_places
from ecomp.store.client import Entry, Put, Store, Unchanged
from ecomp.store.sharing import Change, find_by_listing, parse_name_holder, read_index, resolve_places


class StackState(NamedTuple):
    """A stack as etcd has it; `revision` is that of its key, 0 if the key is missing.

    `is_stale`: the requests show more than the key, which is missing, or was restored from before a delivery.
    `entries` is {entry name: its last instance} of those that are not gone. `owners` is {name: living instance that
    has it}, of the names that were asked for.
    """

    stack: Stack | None
    revision: int
    entries: Mapping[str, InstanceEntries]
    owners: Mapping[str, str]
    is_stale: bool = False

    @property
    def existing(self) -> dict[str, Existing]:
        return {name: Existing(entries.record, entries.request) for name, entries in self.entries.items()}


def read_stack(store: Store, name: str, instance_names: Collection[str] = ()) -> StackState:
    """Read a stack, its instances and the owners of these names; Unreadable if its key or a record is malformed.

    All is read with the key and one batch, unless an instance is not where it was delivered.
    """
    stack, revision = load_stack(store, name)
    instances = stack.list_instances() if stack else {}
    places = {instance: stack.entries[entry] for entry, instance in instances.items()} if stack else {}
    instance_keys = [
        key(place.compute, instance) for instance, place in places.items() for key in (keys.request, keys.record)
    ]
    name_keys = [keys.name(each) for each in instance_names]
    read = store.read([*instance_keys, *name_keys])
    found = resolve_places(store, [(key, entry) for key, entry in read.items() if not key.startswith(keys.NAMES)])
    key_index = None
    entries: dict[str, InstanceEntries] = {}
    for entry, instance in instances.items():
        located = found.get(instance)
        if located is None:
            if places[instance].is_ended:
                continue
            key_index = key_index or read_index(store)  # one listing for all that were cleared
            located = find_by_listing(store, instance, key_index)
        current = from_places(located)
        if current is not None and current.record.state != GONE:
            entries[entry] = current
    is_stale = stack is not None and not revision
    own = {current.record.instance: current for current in entries.values()}
    owners: dict[str, str] = {}
    for key in name_keys:
        if key in read:
            owner = parse_name_holder(read[key])
            current = own.get(owner) or find(store, owner)
            if current is not None and current.record.state not in (GONE, ERROR):
                owners[keys.get_last_part(key)] = owner
                request = None if owner in own else current.request
                place = request.stack if request else None
                if stack is not None and place is not None and _is_newer(stack, place, owner):
                    stack = stack.with_delivered({place: current.record.compute})
                    entries[place.entry_name], is_stale = current, True
    return StackState(stack, revision, entries, owners, is_stale)


def _is_newer(stack: Stack, place: Place, instance: str) -> bool:
    """Return True for an instance of the stack that its key lacks: etcd was restored to before its delivery.

    Its compute has written its request and its name again.
    """
    is_ours = (place.name, place.epoch, place.instance) == (stack.name, stack.epoch, instance)
    previous = stack.entries.get(place.entry_name)
    return is_ours and (previous is None or previous.incarnation < place.incarnation)


def load_stack(store: Store, name: str) -> tuple[Stack | None, int]:
    """Return a stack and the revision of its key; without the key, the stack that the requests show, or None, and 0."""
    entry = store.get(keys.stack(name))
    if entry is None:
        return restore_stack(name, list_places(store, name), random.randrange(2**16, MAX_FLOOR)), 0
    try:
        return from_json(name, entry.value), entry.revision
    except ValueError as error:
        raise Unreadable(entry.key, error) from error


def list_places(store: Store, name: str) -> dict[Place, str]:
    """Read all requests; return {place: compute} of those of this stack."""
    places: dict[Place, str] = {}

    def collect(entry: Entry) -> None:  # returns None, so no entry is kept
        if b'"stack"' not in entry.value or entry.key.count('/') != 3:
            return
        compute = entry.key.split('/')[2]
        request = parse_request(compute, entry.key, entry.value)
        place = request.stack if isinstance(request, Request) else None
        # The instance's uuid is a hash of its place; another one is not of this stack, whatever it says.
        if place is not None and place.name == name and place.instance == request.instance:
            places[place] = compute

    store.snapshot(keys.HOSTS, transform=collect)
    return places


def find_next_place(store: Store, request: Request) -> Place | None:
    """Return the place of an evacuated instance's replacement; None if its stack does not have the instance."""
    place = request.stack
    stack = load_stack(store, place.name)[0] if place else None
    if place is None or stack is None or (place.epoch, place.instance) != (stack.epoch, request.instance):
        return None
    return place._replace(incarnation=max(place.incarnation, stack.floor) + 1)


def make_move(store: Store, place: Place | None, compute: str, silent: Unchanged) -> Change:
    """Return the change that notes an evacuation in a stack's key, if any, while the old compute is silent.

    Conflict if the stack has another instance there.
    """
    if place is None:
        return [silent], []
    stack, revision = load_stack(store, place.name)
    last = stack.entries.get(place.entry_name) if stack else None
    if stack is None or stack.epoch != place.epoch or (last is not None and last.incarnation >= place.incarnation):
        raise Conflict(f'stack {place.name} has another instance of {place.entry_name}. Try: eschedule audit')
    delivered = to_json(stack.with_delivered({place: compute}))
    return [silent, Unchanged(keys.stack(place.name), revision)], [Put(keys.stack(place.name), delivered)]


def make_end(store: Store, place: Place | None) -> Change:
    """Return the change that notes the end of an instance in its stack's key; empty if the key does not have it."""
    stored = store.get(keys.stack(place.name)) if place else None
    if place is None or stored is None:
        return [], []
    with suppress(ValueError):  # the audit reports a malformed key
        stack = from_json(place.name, stored.value)
        entry = stack.entries.get(place.entry_name)
        if entry is not None and (stack.epoch, entry[::2]) == (place.epoch, (place.incarnation, False)):
            ended = to_json(stack.with_ended([place.entry_name]))
            return [Unchanged(stored.key, stored.revision)], [Put(stored.key, ended)]
    return [], []
