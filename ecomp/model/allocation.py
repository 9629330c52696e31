"""Allocations and inventories, with capacities computed as placement computes them. Pure.

On the wire an allocation has placement's shape: {provider uuid: {'resources': {class: amount}}}
(https://docs.openstack.org/api-ref/placement/#update-allocations).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ecomp.model.parsers import NONEMPTY, OBJECT, dict_of, number

# The maximum amount of one class in placement's schema; placement refuses a larger one.
MAX_AMOUNT = 2**31 - 1


class Room(NamedTuple):
    """The capacity of a class and its usage, which is larger if the inventory has shrunk."""

    capacity: int
    used: int
    is_fully_reserved: bool = False

    @property
    def free(self) -> int:
        return max(self.capacity - self.used, 0)

    @property
    def over(self) -> int:
        """The usage above the capacity, or 0 while the class is fully reserved."""
        return 0 if self.is_fully_reserved else max(self.used - self.capacity, 0)


# {provider: {class: Room}}
Rooms = Mapping[str, Mapping[str, Room]]


class Inventory(NamedTuple):
    """Placement's inventory of one resource class of a provider, and the amount that is used."""

    total: int
    reserved: int = 0
    allocation_ratio: float = 1.0
    min_unit: int = 1
    max_unit: int = MAX_AMOUNT
    step_size: int = 1
    used: int = 0

    @property
    def capacity(self) -> int:
        return calculate_capacity(self.total, self.allocation_ratio, self.reserved)

    @property
    def is_fully_reserved(self) -> bool:
        return self.reserved >= self.total

    @property
    def free(self) -> int:
        return Room(self.capacity, self.used).free

    def find_nearest_amount(self, amount: int, room: int) -> int | None:
        """Return the amount nearest to `amount` that the units and `room` allow, or None."""
        minimum, maximum = self.min_unit, min(self.max_unit, room)
        below = min(amount, maximum) // self.step_size * self.step_size
        above = -(-max(amount, minimum) // self.step_size) * self.step_size
        possible = [candidate for candidate in (below, above) if max(minimum, 1) <= candidate <= maximum]
        return min(possible, key=lambda each: abs(each - amount), default=None)


def calculate_capacity(total: float, ratio: float = 1.0, reserved: float = 0) -> int:
    """Return (total - reserved) * ratio, truncated as by placement 16 (objects/inventory.py)."""
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

REQUIRED_CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB')

# A larger number is not accepted as a sum of amounts, because no real amounts add up to it.
MAX_SUM = MAX_AMOUNT * MAX_AMOUNT

# Characters; a longer difference is cut off, because placement may hold names of any length.
MAX_DIFFERENCE_CHARACTERS = 500

_CLASS = re.compile('[A-Z0-9_]{1,255}')


def is_class(name: str) -> bool:
    """Return whether placement's schema accepts the name of a class or trait."""
    return _CLASS.fullmatch(name) is not None


parse_resources: Callable[[Any], dict[str, int]] = dict_of(number(1, MAX_AMOUNT))


def _parse_nonempty_resources(entry: Any) -> dict[str, int]:
    resources = parse_resources(OBJECT(entry).get('resources'))
    if not resources:
        raise ValueError('has no resources')
    return resources


# Converts placement's shape to {provider: {class: amount}}; class names are not checked.
parse_allocations: Callable[[Any], dict[str, dict[str, int]]] = dict_of(_parse_nonempty_resources, NONEMPTY)


def to_wire(allocations: Allocations) -> dict[str, dict[str, dict[str, int]]]:
    return {provider: {'resources': dict(resources)} for provider, resources in allocations.items()}


def sum_allocations(allocations: Allocations) -> dict[str, int]:
    return sum_resources(allocations.values())


def sum_resources(parts: Iterable[Resources]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for resources in parts:
        for name, amount in resources.items():
            sums[name] = sums.get(name, 0) + amount
    return sums


def find_compute(allocations: Allocations) -> str:
    """Return the first provider that supplies VCPU, which is the compute, or ''."""
    return next((provider for provider, resources in allocations.items() if 'VCPU' in resources), '')


def list_missing_classes(resources: Container[str]) -> list[str]:
    """Return which of VCPU, MEMORY_MB and DISK_GB are missing."""
    return [name for name in REQUIRED_CLASSES if name not in resources]


def describe_difference(request: Allocations, claim: Allocations) -> str | None:
    """Describe how two allocations differ, or return None if they are equal."""
    if {p: dict(r) for p, r in request.items()} == {p: dict(r) for p, r in claim.items()}:
        return None
    if not claim:
        return 'placement holds no allocation for it'
    parts = []
    for name in sorted({*request, *claim}):
        amounts = format_resources(claim.get(name, {}))
        if name not in claim:
            parts += [f'placement holds nothing on {name}']
        elif name not in request:
            parts += [f'placement holds {amounts} on {name}, but the request has nothing there']
        elif dict(request[name]) != dict(claim[name]):
            parts += [f'placement holds {amounts} on {name}, but the request has {format_resources(request[name])}']
    sentence = 'the request and placement differ: ' + '; '.join(parts)
    return sentence if len(sentence) <= MAX_DIFFERENCE_CHARACTERS else f'{sentence[:MAX_DIFFERENCE_CHARACTERS]}…'


def format_resources(resources: Resources) -> str:
    """Format the amounts as in a query, sorted by class: DISK_GB:1,VCPU:1."""
    return ','.join(f'{name}:{amount}' for name, amount in sorted(resources.items()))


class Provider(NamedTuple):
    """A resource provider, with `taken_count` other instances of a set in its usage."""

    uuid: str
    inventories: Mapping[str, Inventory] = {}
    traits: Collection[str] = ()
    aggregates: Collection[str] = ()
    taken_count: int = 0

    @property
    def is_closed(self) -> bool:
        """True if all its VCPU is reserved, because its ecompute stopped cleanly."""
        return 'VCPU' in self.inventories and self.inventories['VCPU'].is_fully_reserved

    def with_usage(self, amounts: Sequence[Resources]) -> Provider:
        """Add these instances of the set to the usage, and make their number `taken_count`."""
        sums = sum_resources(amounts)
        increased = {name: each._replace(used=each.used + sums.get(name, 0)) for name, each in self.inventories.items()}
        return self._replace(inventories=increased, taken_count=len(amounts))

    def get_names(self, key: str) -> Collection[str]:
        """Return what `key` of a query looks at: the aggregates, its own uuid, or else traits."""
        return {'member_of': self.aggregates, 'in_tree': (self.uuid,)}.get(key, self.traits)
