"""Rules about domains, claims, capacity and names that hold at every step of a schedule.

A rule runs only after a step that changed what it reads, so a step that only reads costs a few comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ecomp.model import keys
from ecomp.store.client import Delete, Put

if TYPE_CHECKING:
    from tests.model.cloud import Cloud
    from tests.model.compute import Compute

# An instance has a domain, or a disk, on at most one compute. A compute that is dead for good does not count.
DOMAIN = 'domain'
# A domain has a claim on its compute from before it is defined until after it is undefined. There is no window: a build
# defines the domain after placement confirmed the claim, and a destroy undefines the domain before it releases the
# claim.
CLAIM = 'claim'
# No write raises the usage of a provider above its capacity. The capacity itself may fall below the usage, through
# SIGTERM or a smaller inventory.
CAPACITY = 'capacity'
# A name belongs to one instance: that of the one request or queue entry with this name, from its delivery until the
# transaction that ends it. A tombstone still has its name; an instance in error or gone has none.
NAME = 'name'
RULES = (DOMAIN, CLAIM, CAPACITY, NAME)
NAME_KEYS = (keys.HOSTS, keys.QUEUES, keys.NAMES)


class Invariants:
    """The rules for one cloud. `exempt` has those that its scenario breaks, with the reason."""

    def __init__(self, cloud: Cloud) -> None:
        self.exempt: dict[str, str] = {}
        self._cloud = cloud
        self._checked_writes = -1
        self._guests: Sequence[object] = ()
        self._used: dict[tuple[str, str], int] = {}
        self._names_changed = True
        cloud.etcd.listeners.append(self._note_changes)

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
        if self._names_changed:
            self._names_changed = False
            yield from self._check_names()

    def _note_changes(self, operations: Sequence[Put | Delete]) -> None:
        self._names_changed = self._names_changed or any(
            operation.key.startswith(NAME_KEYS) for operation in operations
        )

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
        for instance, computes in places.items():
            if len(computes) > 1 and DOMAIN not in self.exempt:
                where = ' and '.join(map(self._format_name, computes))
                yield f'{self._format_name(instance)} has a domain or a disk on {where}'

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
            if key.startswith((keys.HOSTS, keys.QUEUES)) and (name := _parse_name(entry.value)):
                holders.setdefault(name, set()).add(keys.get_last_part(key))
        for name, instances in holders.items():
            name_entry = entries.get(keys.name(name))
            holder = json.loads(name_entry.value)['instance'] if name_entry is not None else None
            if instances != {holder}:
                requesters = ' and '.join(sorted(map(self._format_name, instances)))
                holder_name = self._format_name(holder or 'nobody')
                yield f'the name {name} is requested by {requesters}, and held by {holder_name}'

    def _format_name(self, uuid: str) -> str:
        return self._cloud.world.names.get(uuid, uuid)


def _are_identical(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


@lru_cache(maxsize=4096)
def _parse_name(value: bytes) -> str | None:
    """Return the name in a request or a queue entry; None if it has no name or is malformed."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return None
    return parsed.get('name') if isinstance(parsed, dict) else None
