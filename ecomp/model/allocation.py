"""Allocations: which provider gives how much of what to one consumer.

The shape is placement's: {provider uuid: {'resources': {class: amount}}}
(https://docs.openstack.org/api-ref/placement/#update-allocations).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ecomp.model.json_object import is_text

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

LARGEST = 2**31 - 1
"""The largest amount of one class; above it placement refuses (its schema's maximum)."""

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
