"""What a compute publishes of itself: its room, limits, traits, aggregates and images. Pure.

The room is the capacity of its provider, and what its own requests use. Placement may know of more, such as a claim
that is not delivered yet. So facts explain, and only placement decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ecomp.model.allocation import MAX_AMOUNT, MAX_SUM, Inventory, Provider, Resources, Room, is_class, sum_resources
from ecomp.model.order import InvalidRequest, Request
from ecomp.model.parsers import check, dict_of, list_of, number
from ecomp.model.stored import decode, encode, sparse, stored

MAX_FACTS_BYTES = 8192
# Facts name no more images: others may be cached, too.
MAX_CACHED_IMAGES = 100

_CLASS = check('a resource class', is_class)
# `hosts` has a column for each class of any compute.
_ROOM = check('up to 40 resource classes', lambda value: isinstance(value, dict) and len(value) <= 40)
_AMOUNTS = dict_of(list_of(number(0, MAX_SUM), lengths=(2,)), _CLASS)
# Not list_of(TEXT): a thousand computes publish a hundred thousand names.
_TEXTS = check('a list of texts', lambda value: isinstance(value, list) and all(type(each) is str for each in value))
_NAMES = sparse(lambda value: tuple(_TEXTS(value)))


@stored(
    *(1, 'facts', (',', ':')),
    room=lambda value: _AMOUNTS(_ROOM(value)),
    limits=sparse(dict_of(list_of(number(1, MAX_AMOUNT), lengths=(3,)), _CLASS)),
    traits=_NAMES,
    aggregates=_NAMES,
    images=_NAMES,
)
class Facts(NamedTuple):
    room: Mapping[str, tuple[int, int]] = {}  # {class: (capacity, used)}
    # {class: (min_unit, max_unit, step_size)}, if these are not the usual ones.
    limits: Mapping[str, tuple[int, int, int]] = {}
    traits: tuple[str, ...] = ()
    aggregates: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    problem: str = ''  # why nothing is known, '' if something is

    @property
    def rooms(self) -> dict[str, Room]:
        return {name: Room(total, used, name == 'VCPU' and not total) for name, (total, used) in self.room.items()}

    def replace_usage(self, usage: Resources) -> Facts:
        """Return the facts with this usage, 0 of each class that it lacks."""
        return self._replace(room={name: (capacity, usage.get(name, 0)) for name, (capacity, _) in self.room.items()})

    def has_image(self, image_hash: str) -> bool | None:
        """Return whether the compute has this image in its cache, or None if that is unknown."""
        if image_hash in self.images:
            return True
        return None if self.problem or len(self.images) >= MAX_CACHED_IMAGES else False

    def make_provider(self, compute: str, others: Iterable[Resources] = ()) -> Provider:
        """Return the provider, with the amounts of `others` of the same set added to its usage."""
        limits = {name: dict(zip(_LIMITS, each, strict=True)) for name, each in self.limits.items()}
        by_class = {key: Inventory(total, used=used, **limits.get(key, {})) for key, (total, used) in self.room.items()}
        return Provider(compute, by_class, self.traits, self.aggregates).with_usage(list(others))


_LIMITS = ('min_unit', 'max_unit', 'step_size')
NO_FACTS = Facts(problem='what it has is unknown: its ecompute has just started, or cannot publish it')


def sum_usage(compute: str, requests: Iterable[Request | InvalidRequest]) -> dict[str, int]:
    """Return what the valid requests of a compute hold there, including those to destroy."""
    # A destroyed instance holds its resources until it is gone.
    valid = (each for each in requests if isinstance(each, Request))
    return sum_resources(each.allocations.get(compute, each.former_resources) for each in valid)


def encode_facts(provider: Provider, usage: Resources, images: Collection[str]) -> str:
    """Return the facts to publish, with `usage` instead of that in the provider's inventories."""
    usual = tuple(Inventory(0)[Inventory._fields.index(name)] for name in _LIMITS)
    inventories = sorted(provider.inventories.items())
    limits = {name: tuple(getattr(each, part) for part in _LIMITS) for name, each in inventories}
    unusual = {name: each for name, each in limits.items() if each != usual}
    room = {name: (max(each.capacity, 0), usage.get(name, 0)) for name, each in inventories}
    traits, aggregates, names = (tuple(sorted(each)) for each in (provider.traits, provider.aggregates, images))
    return encode(Facts(room, unusual, traits, aggregates, names))


def parse_facts(value: bytes) -> Facts:
    """Parse published facts, or return only why they are malformed or too long, in `problem`."""
    if len(value) > MAX_FACTS_BYTES:
        return Facts(problem=f'what it has is unknown: it publishes more than {MAX_FACTS_BYTES} bytes')
    try:
        return decode(Facts, value)
    except ValueError as error:
        return Facts(problem=f'what it has is unknown: it publishes malformed facts: {error}')
