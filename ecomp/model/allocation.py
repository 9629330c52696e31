"""Allocations and inventories, with capacities computed as placement computes them. Pure.

On the wire an allocation has placement's shape: {provider uuid: {'resources': {class: amount}}}
(https://docs.openstack.org/api-ref/placement/#update-allocations).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ecomp.model.json_object import is_text

# The maximum amount of one class in placement's schema; placement refuses a larger one.
LARGEST = 2**31 - 1


class Room(NamedTuple):
    """Capacity and usage of a resource class; usage may exceed it if `is_fully_reserved`."""

    capacity: int
    used: int
    shut: bool = False

    @property
    def free(self) -> int:
        """The amount that can still be allocated."""
        return max(self.capacity - self.used, 0)

    @property
    def over(self) -> int:
        """The amount used beyond the capacity, as after the inventory shrank; 0 if all is reserved."""
        return 0 if self.shut else max(self.used - self.capacity, 0)


# {provider: {class: Room}}
Rooms = Mapping[str, Mapping[str, Room]]


class Inventory(NamedTuple):
    """Placement's inventory of one resource class of a provider, and the amount that is used."""

    total: int
    reserved: int = 0
    allocation_ratio: float = 1.0
    min_unit: int = 1
    max_unit: int = LARGEST
    step_size: int = 1
    used: int = 0

    @property
    def capacity(self) -> int:
        return capacity(self.total, self.allocation_ratio, self.reserved)

    @property
    def is_shut(self) -> bool:
        """True if all of it is reserved. An ecompute that stops cleanly reserves all its VCPU."""
        return self.reserved >= self.total

    @property
    def free(self) -> int:
        return Room(self.capacity, self.used).free

    def nearest(self, amount: int, room: int) -> int | None:
        """Return the valid amount nearest to `amount` that fits into `room`, or None."""
        minimum, maximum = self.min_unit, min(self.max_unit, room)
        below = min(amount, maximum) // self.step_size * self.step_size
        above = -(-max(amount, minimum) // self.step_size) * self.step_size
        possible = [candidate for candidate in (below, above) if max(minimum, 1) <= candidate <= maximum]
        return min(possible, key=lambda each: abs(each - amount), default=None)


def capacity(total: float, ratio: float = 1.0, reserved: float = 0) -> int:
    """Return the amount that can be allocated (openstack-placement 16, objects/inventory.py)."""
    return int((total - reserved) * ratio)


# The microversion of placement's API that every call requests; an older placement answers 406 to the first call.
# 1.28 made consumer generations safe, 1.38 made consumer_type required. It is pinned because `latest` once changed the
# meaning of requests under unchanged code (2019).
MICROVERSION = (1, 39)

Resources = Mapping[str, int]
Allocations = Mapping[str, Resources]

# Bytes of one MEMORY_MB, and of one DISK_GB.
MIB = 2**20
GIB = 2**30

NEEDED = ('VCPU', 'MEMORY_MB', 'DISK_GB')


# A larger number is not accepted as a sum of amounts, because no real amounts add up to it.
MOST = LARGEST * LARGEST

# Characters; a longer difference is cut off, because placement may hold names of any length.
SENTENCE = 500

_CLASS = re.compile('[A-Z0-9_]{1,255}')


def is_class(name: str) -> bool:
    """Return True if placement's schema accepts the name for a resource class, or for a trait."""
    return _CLASS.fullmatch(name) is not None


def parse_allocations(value: Any) -> dict[str, dict[str, int]]:
    """Convert placement's shape to {provider: {class: amount}}; raise ValueError if malformed."""
    if not isinstance(value, dict):
        raise ValueError(f'allocations: expected an object, not {type(value).__name__}')
    parsed: dict[str, dict[str, int]] = {}
    for provider, entry in value.items():
        resources = entry.get('resources') if isinstance(entry, dict) else None
        if not isinstance(resources, dict) or not resources or not is_text(provider):
            raise ValueError(f'allocations: {provider!r} has no resources')
        for name, amount in resources.items():
            if not is_amount(amount, LARGEST) or not amount:
                raise ValueError(f'allocations: {name} is {amount!r}, not a whole number from 1 to {LARGEST}')
        parsed[provider] = dict(resources)
    return parsed


def to_wire(allocations: Allocations) -> dict[str, dict[str, dict[str, int]]]:
    """Return the allocations in placement's shape."""
    return {provider: {'resources': dict(resources)} for provider, resources in allocations.items()}


def is_amount(value: object, most: int = MOST) -> bool:
    """Return True for an int from 0 to `maximum`; not for a bool, or true would be one VCPU."""
    return type(value) is int and 0 <= value <= most


def total(allocations: Allocations) -> dict[str, int]:
    """Return the sum over all providers, by class; a shared provider may supply the disk."""
    return summed(allocations.values())


def summed(each: Iterable[Resources]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for resources in each:
        for name, amount in resources.items():
            sums[name] = sums.get(name, 0) + amount
    return sums


def compute_of(allocations: Allocations) -> str:
    """Return the compute: the provider of the VCPUs, not of a shared disk; '' if there is none."""
    return next((provider for provider, resources in allocations.items() if 'VCPU' in resources), '')


def missing(resources: Resources) -> list[str]:
    """Return the classes that a guest needs and that `resources` lacks."""
    return [name for name in NEEDED if name not in resources]


def difference(asked: Allocations, held: Allocations) -> str | None:
    """Describe in one sentence how two allocations differ; return None if they are equal."""
    if {p: dict(r) for p, r in asked.items()} == {p: dict(r) for p, r in held.items()}:
        return None
    if not held:
        return 'placement holds no allocation for it'
    parts = []
    for provider in sorted({*asked, *held}):
        if provider not in held:
            parts.append(f'nothing is held on {provider}')
        elif provider not in asked:
            parts.append(f'{words(held[provider])} held on {provider} was not requested')
        elif dict(asked[provider]) != dict(held[provider]):
            parts.append(f'requested {words(asked[provider])}, held {words(held[provider])} on {provider}')
    sentence = 'the request and placement differ: ' + '; '.join(parts)
    return sentence if len(sentence) <= SENTENCE else f'{sentence[:SENTENCE]}…'


def words(resources: Resources) -> str:
    """Format the amounts as in a query, sorted by class: DISK_GB:1,VCPU:1."""
    return ','.join(f'{name}:{amount}' for name, amount in sorted(resources.items()))
