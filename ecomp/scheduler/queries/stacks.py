"""Read a stack: its key, and the instances that were delivered for it."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from ecomp.errors import Conflict, NotFound
from ecomp.model import keys
from ecomp.model.allocation import find_compute
from ecomp.model.apply import Current
from ecomp.model.host import Computes, describe_silent_fix, list_unproven
from ecomp.model.order import Request, parse_request
from ecomp.model.stack import MAX_FLOOR, Place, Stack, restore_stack
from ecomp.model.states import ERROR, GONE
from ecomp.model.stored import decode, decode_at, encode
from ecomp.placement import providers
from ecomp.placement.allocations import read_consumers, read_provider_allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.queries.find import InstanceEntries, find, from_places
from ecomp.shared.attempts import find_needed
from ecomp.shared.names import Change, merge_changes, parse_name_owner
from ecomp.shared.places import find_by_listing, read_index, resolve_places
from ecomp.shared.presence import are_presences_proven
from ecomp.store.client import Entry, Put, Store, Unchanged


class StackState(NamedTuple):
    stack: Stack | None
    revision: int
    # {entry name: its last instance} of those that are not gone.
    entries: Mapping[str, InstanceEntries]
    # {name: living instance that has it}, of the names that were asked for.
    owners: Mapping[str, str]
    # Whether the requests show more than the key, which is missing, or was restored from before a delivery.
    is_stale: bool = False

    @property
    def current(self) -> dict[str, Current]:
        return {name: Current(entries.record, entries.request) for name, entries in self.entries.items()}


def read_stack(store: Store, name: str, instance_names: Collection[str] = ()) -> StackState:
    """Read a stack, its instances, and which living instances have these names."""
    stack, revision, is_stale = load_stack(store, name)
    known = stack or Stack(name, '')
    instances = known.list_instances()
    instance_keys = [
        make_key(known.entries[entry].compute, instance)
        for entry, instance in instances.items()
        for make_key in (keys.request, keys.record)
    ]
    name_keys = [keys.name(each) for each in instance_names]
    read = store.read([*instance_keys, *name_keys])
    living = [entry for entry in instances if not known.entries[entry].is_ended]
    entries = _find_instances(store, instances, living, read)
    own = {current.record.instance: current for current in entries.values()}
    owners: dict[str, str] = {}
    for key in name_keys:
        owner = parse_name_owner(read[key]) if key in read else ''
        current = own.get(owner) or (find(store, owner) if owner else None)
        if current is None or current.record.state in (GONE, ERROR):
            continue
        owners[keys.get_last_part(key)] = owner
        if stack is not None and owner not in own and (adopted := _adopt(stack, current, entries)):
            stack, is_stale = adopted, True
    return StackState(stack, revision, entries, owners, is_stale)


def _find_instances(
    store: Store, instances: Mapping[str, str], living: Collection[str], entries_by_key: Mapping[str, Entry]
) -> dict[str, InstanceEntries]:
    own = [(key, entry) for key, entry in entries_by_key.items() if not key.startswith(keys.NAMES)]
    found, key_index = resolve_places(store, own), None
    entries: dict[str, InstanceEntries] = {}
    for name, instance in instances.items():
        if instance not in found and name in living:
            key_index = key_index or read_index(store)  # one listing for all that were cleared
            found[instance] = find_by_listing(store, instance, key_index)
        current = from_places(found[instance]) if instance in found else None
        if current is not None and current.record.state != GONE:
            entries[name] = current
    return entries


def _adopt(stack: Stack, current: InstanceEntries, entries: dict[str, InstanceEntries]) -> Stack | None:
    """Add an instance to `entries` if it is the stack's, and return the stack if it gets newer."""
    place = current.request.stack if current.request else None
    # Not to an entry with an instance: any compute may write a name and its own requests (rule: shown-not-acted-on).
    if place is None or place.entry_name in entries:
        return None
    if (place.name, place.epoch, place.instance) != (stack.name, stack.epoch, current.record.instance):
        return None
    previous = stack.entries.get(place.entry_name)
    is_newer = previous is None or previous.incarnation < place.incarnation
    if is_newer or current.is_destroying:  # otherwise a former instance
        entries[place.entry_name] = current
    # etcd was restored to before its delivery; its compute has written its request and name again.
    return stack.with_delivered({place: current.record.compute}) if is_newer else None


def find_silent_computes(
    store: Store, placement: Placement, state: StackState, entry_names: Collection[str]
) -> dict[str, str]:
    """Return {entry name: silent compute} of instances that were delivered or claimed there."""
    living = {keys.get_last_part(key) for key, entry in store.snapshot(keys.COMPUTES).entries.items() if entry.lease}
    instances = {name: state.entries[name].record.instance for name in entry_names}
    claims = read_consumers(placement, set(instances.values()))
    silent = dict[str, str]()
    for name, instance in instances.items():
        # A failed instance is cleaned up, so only its claim counts.
        is_failed = state.entries[name].record.state == ERROR
        delivered = [state.stack.entries[name].compute] if state.stack is not None and not is_failed else []
        for compute in (*delivered, find_compute(claims[instance].allocations)):
            if compute and compute not in living:
                silent[name] = compute
    return silent


class LoadedStack(NamedTuple):
    """A stack, None if etcd has no trace of it, and the revision of its key, 0 without one."""

    stack: Stack | None
    revision: int
    # Whether the requests show the stack, and its key is missing or has no entries, as after a refused apply.
    is_restored: bool


def read_key(store: Store, name: str) -> tuple[Stack | None, int]:
    """Return the value and revision of a stack's key, or None and 0 without one."""
    entry = store.get(keys.stack(name))
    return (None, 0) if entry is None else (decode_at(entry.key, Stack, entry.value, name=name), entry.revision)


def load_stack(store: Store, name: str) -> LoadedStack:
    """Read a stack from its key or, without entries there, from the requests."""
    (stack, revision), restored = read_key(store, name), None
    if stack is None or not stack.entries:
        restored = restore_stack(name, list_places(store, name), random.randrange(2**16, MAX_FLOOR))
    return LoadedStack(restored or stack, revision, restored is not None)


def require_known_claims(store: Store, placement: Placement, name: str, computes: Computes) -> None:
    """Raise Conflict if a compute that is not proven alive has a claim without a request."""
    is_proven = are_presences_proven(store)
    names = providers.read_provider_names(placement)
    for compute in sorted(list_unproven(names, store.snapshot(keys.COMPUTES).entries, sys.maxsize, is_proven)):
        with suppress(NotFound):
            # After a restore of etcd the claim may be that of an instance of the stack, and the compute may run it.
            allocations = read_provider_allocations(placement, compute)
            # A provider that others share, of disks for example, is no compute.
            held = {consumer: [compute] for consumer, resources in allocations.items() if 'VCPU' in resources}
            if unknown := sorted(held.keys() - find_needed(store, held)):
                host = computes.format_name(compute)
                problem = f'stack {name}: {host} has the claim of {unknown[0]}, which etcd does not know'
                doubt = 'after a restore of etcd it may run instances of the stack; nothing was changed'
                raise Conflict(f'{problem}: {doubt}. Fix: {describe_silent_fix(host, "")}')


def list_places(store: Store, name: str) -> dict[Place, str]:
    """Read all requests, and return {place: compute} of those of this stack."""
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


def find_next_place(store: Store, request: Request, compute: str) -> Place | None:
    """Return the place of a replacement in the instance's stack, if any, or raise Conflict."""
    place = request.stack
    stack = load_stack(store, place.name)[0] if place else None
    if place is None or stack is None or (place.epoch, place.instance) != (stack.epoch, request.instance):
        return None
    known = stack.entries.get(place.entry_name)
    if known is None or known[:2] != (place.incarnation, compute):
        # The request is the compute's word, the stack's key is not.
        raise _make_mismatch(place)
    return place._replace(incarnation=max(place.incarnation, stack.floor) + 1)


def make_move(store: Store, computes: Mapping[Place, str], silent: Unchanged) -> Change:
    """Return the change that notes an evacuation in stacks, if the compute stays `silent`."""
    changes: list[Change] = [([silent], [])]
    for name in sorted({place.name for place in computes}):
        stack, revision, _ = load_stack(store, name)
        places = {place: compute for place, compute in computes.items() if place.name == name}
        for place in places:
            last = stack.entries.get(place.entry_name) if stack else None
            is_late = last is not None and last.incarnation >= place.incarnation
            if stack is None or stack.epoch != place.epoch or is_late:
                raise _make_mismatch(place)
        if stack is not None:
            delivered = encode(stack.with_delivered(places))
            changes.append(([Unchanged(keys.stack(name), revision)], [Put(keys.stack(name), delivered)]))
    return merge_changes(*changes)


def _make_mismatch(place: Place) -> Conflict:
    return Conflict(f'stack {place.name} has another instance of {place.entry_name}. Try: eschedule check')


def make_end(store: Store, place: Place | None, instance: str) -> Change:
    """Return the change that notes an instance's end in its stack, empty if it is not there."""
    stored = store.get(keys.stack(place.name)) if place else None
    # A compute may write the place of another instance (rule: shown-not-acted-on).
    if place is None or stored is None or place.instance != instance:
        return [], []
    with suppress(ValueError):  # the audit reports a malformed key
        stack = decode(Stack, stored.value, name=place.name)
        entry = stack.entries.get(place.entry_name)
        if entry is not None and (stack.epoch, entry[::2]) == (place.epoch, (place.incarnation, False)):
            ended = encode(stack.with_ended([place.entry_name]))
            return [Unchanged(stored.key, stored.revision)], [Put(stored.key, ended)]
    return [], []
