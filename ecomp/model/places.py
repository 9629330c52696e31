"""Where an instance is: its request and its record, each below the uuid of a compute. Pure.

More than one compute may have something of one instance: somebody wrote it by hand, or a compute writes what is not its
own. Believed is the compute that is asked for it. Of several it is the one that holds its claim in placement: the uuid
is public before anybody is asked, so the oldest request need not be the right one. Where none or each of them does, or
nobody asked placement, it is the one whose key is the oldest. What ecomp 1.0 may have written, below no compute, counts
only where it can be read: else rubbish there, which anybody may have put long before, would hide the record that a
compute has written.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ecomp.model import keys

Claims = Callable[[str], Container[str]]
"""What says which consumers have a claim on a compute."""
Kind = TypeVar('Kind', bound=keys.StoredValue)


@dataclass
class Places(Generic[Kind]):
    """One instance's requests and records by compute; '' is for a record naming none, or an older unreadable one.

    `claimless` are computes that are asked for it and hold no claim of it, as far as that was looked at.
    """

    requests: dict[str, Kind] = field(default_factory=dict)
    records: dict[str, Kind] = field(default_factory=dict)
    record_keys: dict[str, str] = field(default_factory=dict)
    claimless: set[str] = field(default_factory=set)

    def judge(self, instance: str, claims: Claims) -> None:
        """Where several computes are asked for this, which is the instance, look for the one that holds its claim.

        `claims` is asked about one after the other, the oldest request first; of one compute alone it is not asked.
        """
        if len(self.requests) < 2:
            return
        for compute in sorted(self.requests, key=self._age):
            # What is no uuid is no compute, and a part of a path that somebody else has chosen.
            if keys.is_uuid(compute) and instance in claims(compute):
                return
            self.claimless.add(compute)

    @property
    def compute(self) -> str:
        """The compute whose request and record are believed; '' if there is none."""
        claiming = [each for each in self.requests if each not in self.claimless]
        return min(claiming or self.requests or self.records, key=self._age, default='')

    def _age(self, compute: str) -> tuple[int, str]:
        return (self.requests or self.records)[compute].created, compute

    @property
    def request(self) -> Kind | None:
        """The request of that compute; None if it has none."""
        return self.requests.get(self.compute)

    @property
    def record(self) -> Kind | None:
        """The record of that compute; None while it has written none."""
        return self.records.get(self.compute)

    @property
    def record_key(self) -> str | None:
        """The key of that record; None while there is none."""
        return self.record_keys.get(self.compute)


def by_instance(found: Iterable[tuple[str, Kind]]) -> dict[str, Places[Kind]]:
    """{instance: Places} of the keys below /hosts/ and /instances/ among `found`, pairs of a key and what is at it."""
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
        records = places.setdefault(instance, Places()).records
        named = _compute_in(written.value)
        # Unreadable, it is the instance's record only where nobody has another.
        if (not records) if named is None else (named not in records):
            _add(places, named or '', key, instance, written)
    return places


def _add(places: dict[str, Places[Kind]], compute: str, key: str, instance: str, written: Kind) -> None:
    mine = places.setdefault(instance, Places())
    mine.records[compute], mine.record_keys[compute] = written, key


def _compute_in(value: bytes) -> str | None:
    """The compute that a record names, '' if it names none; None if the record cannot be read."""
    from ecomp.model.record import from_json  # of an older ecompute's alone

    try:
        return from_json(value).compute
    except ValueError:
        return None
