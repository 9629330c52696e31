"""What a provider has of one class: in all, reserved, given and free. Reckoned as placement itself does. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ecomp.model.allocation import LARGEST


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
