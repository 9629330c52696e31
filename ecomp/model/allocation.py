"""Allocations and inventories: how much of what a provider gives to one consumer, and what it has. Pure.

An allocation's shape is placement's: {provider uuid: {'resources': {class: amount}}}
(https://docs.openstack.org/api-ref/placement/#update-allocations). Room is reckoned as placement itself does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ecomp.model.json_object import is_text

LARGEST = 2**31 - 1
"""The largest amount of one class; above it placement refuses (its schema's maximum)."""


class Room(NamedTuple):
    """Of one class of a provider: what can be given in all, and what is given.

    `shut`: all of it is reserved, so what is used says nothing about too much having been given.
    """

    capacity: int
    used: int
    shut: bool = False

    @property
    def free(self) -> int:
        """What can still be given."""
        return max(self.capacity - self.used, 0)

    @property
    def over(self) -> int:
        """How much more is given than there is: the inventory became smaller after it was claimed."""
        return 0 if self.shut else max(self.used - self.capacity, 0)


Rooms = Mapping[str, Mapping[str, Room]]
"""{provider: {class: Room}}"""


class Inventory(NamedTuple):
    """One class of a provider, and how much of it is used."""

    total: int
    reserved: int = 0
    allocation_ratio: float = 1.0
    min_unit: int = 1
    max_unit: int = LARGEST
    step_size: int = 1
    used: int = 0

    @property
    def capacity(self) -> int:
        """What can be given in all."""
        return capacity(self.total, self.allocation_ratio, self.reserved)

    @property
    def is_shut(self) -> bool:
        """True if all of it is reserved: of VCPU, its ecompute stopped in good order."""
        return self.reserved >= self.total

    @property
    def free(self) -> int:
        """What can still be given."""
        return Room(self.capacity, self.used).free

    def nearest(self, amount: int, room: int) -> int | None:
        """The amount nearest to this one that may be asked for if there is so much room; None if none may."""
        least, most = self.min_unit, min(self.max_unit, room)
        below = min(amount, most) // self.step_size * self.step_size
        above = -(-max(amount, least) // self.step_size) * self.step_size
        possible = [each for each in (below, above) if max(least, 1) <= each <= most]
        return min(possible, key=lambda each: abs(each - amount), default=None)


def capacity(total: float, ratio: float = 1.0, reserved: float = 0) -> int:
    """What can be given in all (openstack-placement 16, objects/inventory.py)."""
    return int((total - reserved) * ratio)


MICROVERSION = (1, 39)
"""Of placement's API, asked for with every call: an older placement answers 406 to the first.

1.28 made consumer generations safe, 1.38 made consumer_type required. One is named, for `latest` changed what was asked
for under the code of 2019.
"""

Resources = Mapping[str, int]
Allocations = Mapping[str, Resources]

MIB, GIB = 2**20, 2**30
"""Bytes of one MEMORY_MB, and of one DISK_GB."""

NEEDED = ('VCPU', 'MEMORY_MB', 'DISK_GB')
"""The classes a guest cannot be made without."""


MOST = LARGEST * LARGEST
"""The largest sum of amounts; a larger number is taken for none, for no amounts there are have that sum."""

SENTENCE = 500
"""Characters of a difference; the rest is cut off, for placement may name anything."""

_CLASS = re.compile('[A-Z0-9_]{1,255}')


def is_class(name: str) -> bool:
    """True for what placement takes as the name of a resource class, or of a trait (its schema's pattern)."""
    return _CLASS.fullmatch(name) is not None


def parse_allocations(value: Any) -> dict[str, dict[str, int]]:
    """Placement's shape to {provider: {class: amount}}. ValueError says what is wrong, in plain words."""
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
    """The allocations in placement's shape."""
    return {provider: {'resources': dict(resources)} for provider, resources in allocations.items()}


def is_amount(value: object, most: int = MOST) -> bool:
    """True for a whole number from 0 to `most`. True itself is an int to Python, and would be one VCPU."""
    return type(value) is int and 0 <= value <= most


def total(allocations: Allocations) -> dict[str, int]:
    """What the consumer has in all; several providers may give parts of it, a shared one the disk."""
    return summed(allocations.values())


def summed(each: Iterable[Resources]) -> dict[str, int]:
    """The sum of these amounts, by class."""
    found: dict[str, int] = {}
    for resources in each:
        for name, amount in resources.items():
            found[name] = found.get(name, 0) + amount
    return found


def compute_of(allocations: Allocations) -> str:
    """Return the compute that an instance's allocations are on: the provider that gives the VCPUs; '' without any.

    A sharing provider gives a part (the disk, say) and is no compute.
    """
    return next((provider for provider, resources in allocations.items() if 'VCPU' in resources), '')


def missing(resources: Resources) -> list[str]:
    """The classes a guest needs that are not asked for."""
    return [name for name in NEEDED if name not in resources]


def difference(asked: Allocations, held: Allocations) -> str | None:
    """Where two allocations differ, in one sentence; None when they are the same."""
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
    said = 'the request and placement differ: ' + '; '.join(parts)
    return said if len(said) <= SENTENCE else f'{said[:SENTENCE]}…'


def words(resources: Resources) -> str:
    """The amounts as a query has them: VCPU:1,DISK_GB:1."""
    return ','.join(f'{name}:{amount}' for name, amount in sorted(resources.items()))
