"""What a living compute says of the room it has left, beside its presence: a hint, placement stays the truth. Pure.

{"room": {"VCPU": [capacity, hundredths of it that are left], …}}: capacity as placement reckons it, hundredths rounded
up, so what is free is never said to be none; below zero where more is given than there is, also of a capacity of 0. A
compute that is closed or read-only says no room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ecomp.model.allocation import LARGEST, MOST, Resources, capacity, is_amount, is_class, summed

CLASSES = 40
"""Resource classes of one compute, at most: one that names more is not believed."""


class Left(NamedTuple):
    """Of one class: what can be given in all, and how many hundredths of that are left."""

    capacity: int
    hundredths: int

    @property
    def most(self) -> int:
        """So much is left at most."""
        return self.capacity * self.hundredths // 100


Hint = Mapping[str, Left]
"""{class: Left}"""


def said(inventory: Mapping[str, Mapping[str, float]], given: Iterable[Resources]) -> dict[str, list[int]]:
    """What a compute says that has this inventory, of which so much is `given`: {class: [capacity, hundredths]}."""
    used = summed(given)
    found = {}
    for name, each in sorted(inventory.items()):
        there = capacity(each['total'], each.get('allocation_ratio', 1.0), each.get('reserved', 0))
        left = there - used.get(name, 0)
        # Rounded up: minus, divided down, minus.
        found[name] = [there, -(-100 * left // there) if left > 0 else max(100 * left // max(there, 1), -LARGEST)]
    return found


def read(value: Any) -> Hint | None:
    """The hint in what a compute says; None for what is none."""
    if not isinstance(value, dict) or not 0 < len(value) <= CLASSES:
        return None
    found = {}
    for name, each in value.items():
        if not isinstance(each, list) or len(each) != 2 or not is_class(name):
            return None
        there, hundredths = each
        if not is_amount(there, MOST) or type(hundredths) is not int or not -LARGEST <= hundredths <= 100:
            return None
        found[name] = Left(there, hundredths)
    return found


def fits(hint: Hint, asked: Resources) -> bool:
    """Whether there may be room for what is asked."""
    return all(name in hint and amount <= hint[name].most for name, amount in asked.items())


def share_left(hint: Hint, asked: Resources) -> float:
    """The share from 0 to 1 that is left once it gives what is asked, of the class with least: as choose.share_left().

    A class it does not have is no limit.
    """
    known = [(hint[name], amount) for name, amount in asked.items() if name in hint and hint[name].capacity]
    shares = [each.hundredths / 100 - amount / each.capacity for each, amount in known]
    return round(max(min(shares, default=0.0), 0.0), 2)
