"""Which computes may take a waiting request at once, and which only after a moment: growing circles. Pure.

All computes that take from queues are put in an order that is another one for each request (rendezvous hashing: each
reckons it for itself, and one that comes or goes moves no others). The first few may take it at once, twice as many a
moment later, and so on until it is all of them: nothing waits for long for those that are dead, full or mistaken. It is
a hint and no lock: two that see different computes alive may both go for a request, and one mark of theirs holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ecomp.model import hints, keys
from ecomp.model.allocation import Resources
from ecomp.model.json_object import load_if_object

FIRST = 4
"""Computes that may take a request as soon as they hear of it."""
WIDER = 0.25
"""Seconds after which twice as many may: of a thousand the last after 2 s, of ten thousand after 3."""
ODD, WORD = 0x9E3779B97F4A7C15, 2**64 - 1
"""A multiplier that mixes, and all bits of a score."""


@dataclass(frozen=True)
class Takers:
    """The living computes that take from queues: the point of each, and what it hinted that it has left, if it did.

    `said`: the values that this was made from, by key. How many have room is reckoned once for each amount, for each
    compute of a process asks for that whenever it chooses something.
    """

    points: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, hints.Hint] = field(default_factory=dict)
    said: Mapping[str, keys.StoredValue] = field(default_factory=dict, repr=False)
    _with_room: dict[tuple[tuple[str, int], ...], int] = field(default_factory=dict, repr=False, compare=False)

    def with_room(self, resources: Resources) -> int:
        """How many have room for so much, or hinted nothing."""
        asked = tuple(sorted(resources.items()))
        if asked not in self._with_room:
            full = sum(not hints.fits(each, resources) for each in self.left.values())
            self._with_room[asked] = len(self.points) - full
        return self._with_room[asked]

    def has_room(self, compute: str, resources: Resources) -> bool:
        """Whether it hinted that it has so much left; True where it hinted nothing."""
        hint = self.left.get(compute)
        return hint is None or hints.fits(hint, resources)


def takers_of(state: Mapping[str, keys.StoredValue], before: Takers) -> Takers:
    """The takers in what is below /computes/. Only values that changed since `before` are read."""
    points, left = dict(before.points), dict(before.left)
    gone = before.said.keys() - state.keys()
    touched = [key for key, each in state.items() if before.said.get(key) is not each]
    for key in (*gone, *touched):
        points.pop(keys.last(key), None)
        left.pop(keys.last(key), None)
    for key in touched:
        compute, said = keys.last(key), load_if_object(state[key].value)
        if said.get('queues') is True and state[key].lease:
            points[compute] = before.points.get(compute) or point(compute)
            hinted = hints.read(said.get('room'))
            if hinted is not None:
                left[compute] = hinted
    return Takers(points, left, dict(state))


def order(instance: str, resources: Resources, takers: Takers) -> dict[str, int]:
    """{compute: its place in the order in which they may take this request}, from 0; those without room are last."""
    at, full = point(instance), set[str]()
    if takers.left:
        full = {compute for compute in takers.left if not takers.has_room(compute, resources)}
    scored = sorted(
        (compute in full, ((at ^ each) * ODD & WORD), compute) for compute, each in takers.points.items()
    )
    return {compute: number for number, (*_, compute) in enumerate(scored)}


def opens(number: int) -> float:
    """Seconds after a request was heard of from which the compute with this place in the order may take it."""
    return WIDER * (number // FIRST).bit_length()


def among(seconds: float, takers: int) -> int:
    """How many of so many takers may take a request that was heard of so many seconds ago."""
    widened = min(int(seconds / WIDER + 1e-6), 64)
    return max(min(FIRST << widened, takers), 1)


def point(name: str) -> int:
    """Where a uuid lies: 64 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors='surrogatepass'), digest_size=8).digest())
