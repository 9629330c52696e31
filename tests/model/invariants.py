"""Rules about domains, claims, capacity and names that hold at every step of a schedule.

A rule runs only after a step that changed what it reads, so a step that only reads costs a few comparisons.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ecomp.model import keys
from ecomp.model.json_object import load_object_or_empty
from ecomp.model.stack import Place, Stack
from ecomp.model.stored import decode, nested
from ecomp.store.client import Delete, Entry, Put
from tests.model.foreign import find_unreserved

if TYPE_CHECKING:
    from tests.model.cloud import Cloud
    from tests.model.compute import Compute

# An instance has a domain, or a disk, on at most one compute. A compute that is dead for good does not count.
DOMAIN = 'domain'
# A domain has a claim on its compute from before it is defined until after it is undefined. There is no window: a build
# defines the domain after placement confirmed the claim, and a destroy undefines the domain before it releases the
# claim. The claim covers what runs, and so does the charge of the project.
CLAIM = 'claim'
# No write raises the usage of a provider above its capacity. The capacity itself may fall below the usage, through
# SIGTERM or a smaller inventory.
CAPACITY = 'capacity'
# A name belongs to one instance: that of the one request or queue entry with this name, from its delivery until the
# transaction that ends it. A tombstone still has its name, unless it was replaced in its stack, or evacuated; an
# instance in error or gone has none.
NAME = 'name'
# An entry of a stack has at most one living instance: the one that the stack's key names, if there is that key.
ENTRY = 'entry'
# An instance of a stack is delivered once. A request that is changed, or replaced by a tombstone, is no delivery.
DELIVERY = 'delivery'
# All new instances of an apply are delivered in the one transaction that ends its attempt.
WHOLE = 'whole'
# What a running domain of others uses is claimed or reserved while its compute is enabled, and nothing but its mark and
# its power changes.
FOREIGN = 'foreign'
RULES = (DOMAIN, CLAIM, CAPACITY, NAME, ENTRY, DELIVERY, WHOLE, FOREIGN)
NAME_KEYS = (keys.HOSTS, keys.QUEUES, keys.NAMES, keys.QUOTAS)
STACK_KEYS = (keys.HOSTS, keys.STACKS)


class Invariants:
    """The rules for one cloud. `exempt` has those that its scenario breaks, with the reason."""

    def __init__(self, cloud: Cloud) -> None:
        self.exempt: dict[str, str] = {}
        self._cloud = cloud
        self._checked_writes = -1
        self._guests: Sequence[object] = ()
        self._used: dict[tuple[str, str], int] = {}
        self._names_changed = True
        self._stacks_changed = True
        # Of stacks: the requests that exist, the instances delivered so far, and the instances of attempts by key.
        self._requested: set[str] = set()
        self._delivered: set[str] = set()
        self._attempted: dict[str, set[str]] = {}
        self._wrong_deliveries: list[str] = []
        cloud.etcd.listeners.append(self._note_changes)
        cloud.world.state_parts.append(lambda: tuple(sorted(self._delivered)))

    def check(self) -> Iterator[str]:
        cloud = self._cloud
        machines = [machine for machine in cloud.machines if not machine.is_dead]
        guests = [machine.hypervisor.snapshot() for machine in machines]
        is_placement_changed = cloud.model.writes != self._checked_writes
        if is_placement_changed or not _are_identical(guests, self._guests):
            self._guests = guests
            yield from self._check_domains(machines)
        if is_placement_changed:
            self._checked_writes = cloud.model.writes
            yield from self._check_capacity()
            yield from find_unreserved(cloud) if FOREIGN not in self.exempt else ()
        for machine in machines:
            yield from machine.hypervisor.touched
        if self._names_changed:
            self._names_changed = False
            yield from self._check_names()
            yield from self._check_charge(machines) if CLAIM not in self.exempt else ()
        if self._stacks_changed:
            self._stacks_changed = False
            yield from self._check_entries()
        yield from self._wrong_deliveries
        self._wrong_deliveries.clear()

    def _note_changes(self, operations: Sequence[Put | Delete]) -> None:
        changed = [operation.key for operation in operations]
        self._names_changed = self._names_changed or any(key.startswith(NAME_KEYS) for key in changed)
        self._stacks_changed = self._stacks_changed or any(key.startswith(STACK_KEYS) for key in changed)
        delivered, ended = set[str](), set[str]()
        for operation in operations:
            if isinstance(operation, Delete):
                self._requested.discard(operation.key)
                ended |= self._attempted.pop(operation.key, set())
            elif operation.key.startswith(keys.ATTEMPTS):
                self._attempted[operation.key] = set(json.loads(operation.value)['instances'])
            elif operation.key.startswith(keys.HOSTS):
                request = _parse(operation.value.encode())
                is_delivery = request.place is not None and not request.is_tombstone
                if is_delivery and operation.key not in self._requested:
                    delivered.add(keys.get_last_part(operation.key))
                self._requested |= {operation.key} if is_delivery else set()
        if DELIVERY not in self.exempt:
            self._wrong_deliveries += [
                f'{self._format_name(instance)} is delivered twice' for instance in sorted(delivered & self._delivered)
            ]
        if WHOLE not in self.exempt and delivered and delivered != ended:
            names = ' and '.join(sorted(map(self._format_name, delivered)))
            others = ' and '.join(sorted(map(self._format_name, ended))) or 'nothing'
            self._wrong_deliveries.append(f'{names} is delivered by an apply of {others}')
        self._delivered |= delivered

    def _check_domains(self, machines: Sequence[Compute]) -> Iterator[str]:
        places: dict[str, list[str]] = {}
        for machine in machines:
            for instance, guest in machine.hypervisor.snapshot().items():
                if guest.defined or guest.disk:
                    places.setdefault(instance, []).append(machine.uuid)
                claim = self._cloud.model.held.get(instance, {})
                if guest.defined and machine.uuid not in claim and CLAIM not in self.exempt:
                    format_name = self._format_name
                    yield f'{format_name(instance)} is a domain on {format_name(machine.uuid)} without a claim there'
                size = {name: guest.size.get(name, 0) for name in claim.get(machine.uuid, ())}
                if guest.running and not Counter(size) <= Counter(claim.get(machine.uuid)) and CLAIM not in self.exempt:
                    yield f'{self._format_name(instance)} runs with {size}, and claims {claim[machine.uuid]}'
        for instance, computes in places.items():
            if len(computes) > 1 and DOMAIN not in self.exempt:
                where = ' and '.join(map(self._format_name, computes))
                yield f'{self._format_name(instance)} has a domain or a disk on {where}'

    def _check_charge(self, machines: Sequence[Compute]) -> Iterator[str]:
        entries, in_use = self._cloud.etcd.entries, Counter[str]()
        for machine in machines:
            for instance, guest in machine.hypervisor.snapshot().items():
                request = entries.get(keys.request(machine.uuid, instance))
                held = list_resources(request.value).get(machine.uuid) if request and guest.running else None
                # Of guests that were resized: some scenarios restore or forge the quota of others.
                in_use += Counter({name: guest.size[name] for name in (held if guest.next_size else None) or ()})
        quota = entries.get(keys.quota('p'))
        used = load_object_or_empty(quota.value).get('used', in_use) if quota is not None else in_use
        if not in_use <= Counter(used):
            yield f'{dict(in_use)} is in use, and the quota counts {used}'

    def _check_capacity(self) -> Iterator[str]:
        model, before = self._cloud.model, self._used
        self._used = {
            (provider, kind): model.get_usage(provider, kind)
            for provider, model_provider in model.providers.items()
            for kind in model_provider.inventories
        }
        for (provider, kind), used in self._used.items():
            is_over = used > model.get_capacity(provider, kind) and used > before.get((provider, kind), 0)
            if is_over and CAPACITY not in self.exempt:
                yield f'a write raises {kind} of {self._format_name(provider)} above its capacity'

    def _check_names(self) -> Iterator[str]:
        if NAME in self.exempt:
            return
        entries = self._cloud.etcd.entries
        holders: dict[str, set[str]] = {}
        for key, entry in entries.items():
            if key.startswith((keys.HOSTS, keys.QUEUES)):
                request = _parse(entry.value)
                if request.name and not self._is_replaced(key, request):
                    holders.setdefault(request.name, set()).add(keys.get_last_part(key))
        for name, instances in holders.items():
            name_entry = entries.get(keys.name(name))
            holder = json.loads(name_entry.value)['instance'] if name_entry is not None else None
            if instances != {holder}:
                requesters = ' and '.join(sorted(map(self._format_name, instances)))
                holder_name = self._format_name(holder or 'nobody')
                yield f'the name {name} is requested by {requesters}, and held by {holder_name}'

    def _is_replaced(self, key: str, request: _Request) -> bool:
        """True for a tombstone of an instance that was evacuated, or whose stack has a newer one."""
        if request.is_tombstone and request.is_evacuated:
            return True
        if not request.is_tombstone or request.place is None:
            return False
        return self._find_named(request.place) not in (key, None)

    def _find_named(self, place: Place) -> str | None:
        """Return the key of the request that the stack's key names for this entry."""
        entry = self._cloud.etcd.entries.get(keys.stack(place.name))
        return _list_request_keys(place.name, entry.value).get(place.entry_name) if entry is not None else None

    def _check_entries(self) -> Iterator[str]:
        if ENTRY in self.exempt:
            return
        entries = self._cloud.etcd.entries
        living: dict[tuple[str, str], list[str]] = {}
        for key, entry in entries.items():
            request = _parse(entry.value)
            if is_living_request(entry) and request.place is not None:
                living.setdefault((request.place.name, request.place.entry_name), []).append(key)
                if keys.stack(request.place.name) in entries and self._find_named(request.place) != key:
                    instance = self._format_name(keys.get_last_part(key))
                    yield f'the key of stack {request.place.name} does not name {instance}'
        for (name, entry_name), requests in living.items():
            if len(requests) > 1:
                instances = ' and '.join(self._format_name(keys.get_last_part(key)) for key in requests)
                yield f'entry {entry_name} of stack {name} has the living instances {instances}'

    def _format_name(self, uuid: str) -> str:
        return self._cloud.world.names.get(uuid, uuid)


def _are_identical(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class _Request(NamedTuple):
    name: str | None
    place: Place | None
    is_tombstone: bool
    is_evacuated: bool


@lru_cache(maxsize=4096)
def _parse(value: bytes) -> _Request:
    # A malformed value counts as one without any of these fields.
    parsed = load_object_or_empty(value)
    state = parsed.get('allocations') == {}, bool(parsed.get('replaced_by'))
    try:
        return _Request(parsed.get('name'), nested(Place)(parsed.get('stack')), *state)
    except ValueError:
        return _Request(parsed.get('name'), None, *state)


@lru_cache(maxsize=4096)
def list_resources(value: bytes) -> Mapping[str, Mapping[str, int]]:
    allocations = load_object_or_empty(value).get('allocations')
    return {each: held['resources'] for each, held in allocations.items()} if isinstance(allocations, dict) else {}


def is_living_request(entry: Entry) -> bool:
    return entry.key.startswith(keys.HOSTS) and not _parse(entry.value).is_tombstone


@lru_cache(maxsize=4096)
def _list_request_keys(name: str, value: bytes) -> Mapping[str, str]:
    """Return {entry: key of its request} of a stack's key."""
    stack = decode(Stack, value, name=name)
    instances = stack.list_instances()
    return {each: keys.request(entry.compute, instances[each]) for each, entry in stack.entries.items()}
