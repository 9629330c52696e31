"""Where an instance is: its request and its record, each below the uuid of a compute. Pure.

More than one compute may have something of one instance: somebody wrote it by hand, or a compute writes what is not its
own. Believed is the compute that is asked for it; of several the one whose key is the oldest, for whoever wants to be
taken for it comes later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ecomp.model import keys
from ecomp.model.record import from_json


class Written(Protocol):
    """What is at a key: its value, and the revision that made the key."""

    @property
    def value(self) -> bytes:
        """The bytes."""

    @property
    def created(self) -> int:
        """The revision."""


Kind = TypeVar('Kind', bound=Written)


@dataclass
class Places(Generic[Kind]):
    """One instance's requests and records by compute; '' has the record of none, and one that cannot be read."""

    requests: dict[str, Kind] = field(default_factory=dict)
    records: dict[str, Kind] = field(default_factory=dict)
    record_keys: dict[str, str] = field(default_factory=dict)

    @property
    def compute(self) -> str:
        """The compute that is believed."""
        among = self.requests or self.records
        return min(among, key=lambda each: (among[each].created, each), default='')

    @property
    def request(self) -> Kind | None:
        """The request there; None where that compute is not asked for it."""
        return self.requests.get(self.compute)

    @property
    def record(self) -> Kind | None:
        """The record there; None while that compute has written none."""
        return self.records.get(self.compute)

    @property
    def record_key(self) -> str | None:
        """The key of that record."""
        return self.record_keys.get(self.compute)


def by_instance(found: Iterable[tuple[str, Kind]]) -> dict[str, Places[Kind]]:
    """Of keys and what is at them, those below /hosts and /instances, by instance."""
    places: dict[str, Places[Kind]] = {}
    older = []
    for key, written in found:
        if key.startswith(keys.HOSTS):
            compute, _, instance = key.removeprefix(keys.HOSTS).partition('/')
            places.setdefault(instance, Places()).requests[compute] = written
        elif key.startswith(keys.INSTANCES):
            place, instance = keys.recorded(key)
            if place is None:
                older.append((key, instance, written))
            else:
                _add(places, place, key, instance, written)
    for key, instance, written in older:
        compute = _compute_in(written.value)
        if instance not in places or compute not in places[instance].records:
            _add(places, compute, key, instance, written)
    return places


def _add(places: dict[str, Places[Kind]], compute: str, key: str, instance: str, written: Kind) -> None:
    mine = places.setdefault(instance, Places())
    mine.records[compute], mine.record_keys[compute] = written, key


def _compute_in(value: bytes) -> str:
    try:
        return from_json(value).compute
    except ValueError:
        return ''
