"""Quotas: the limits of a project, and its usage. Pure.

The key /quotas/<project> has JSON: {"version", "limits": {class or "instances": n}, "used": the same}, in placement's
resource classes. An instance is charged from its request's delivery, queued or not, until that request is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ecomp.model.allocation import LARGEST, MOST, NEEDED, Resources, is_amount, is_class, summed
from ecomp.model.json_object import DIGITS, dump, is_version, load_object
from ecomp.model.order import Request
from ecomp.model.record import ERROR, GONE, Record
from ecomp.model.text import did_you_mean

VERSION = 1
INSTANCES = 'instances'


class Excess(NamedTuple):
    """A limit that the requested amount would exceed."""

    name: str
    limit: int
    used: int
    asked: int

    def __str__(self) -> str:
        return f'{self.name}: limit {self.limit}, used {self.used}, asked {self.asked}'


class Quota(NamedTuple):
    """A project's limits and usage, {class or 'instances': amount}; no limit means unlimited."""

    project: str
    limits: Mapping[str, int] = {}
    used: Mapping[str, int] = {}

    def excess(self, charge: Mapping[str, int]) -> list[Excess]:
        """Return the limits that this charge would exceed; an empty list if it is allowed."""
        excesses = (
            Excess(name, limit, self.used.get(name, 0), charge.get(name, 0)) for name, limit in self.limits.items()
        )
        return [excess for excess in excesses if excess.asked and excess.used + excess.asked > excess.limit]

    def room(self, charge: Mapping[str, int], count: int) -> int:
        """Return how many times `charge` is allowed, at most `count`."""
        return next((number for number in range(count, 0, -1) if not self.excess(times(charge, number))), 0)

    def with_used(self, charge: Mapping[str, int]) -> Quota:
        return self._moved(charge, 1)

    def without_used(self, charge: Mapping[str, int]) -> Quota:
        """Return the quota with `charge` subtracted from its usage; no class falls below 0."""
        return self._moved(charge, -1)

    def _moved(self, charge: Mapping[str, int], sign: int) -> Quota:
        sums = {name: self.used.get(name, 0) + sign * charge.get(name, 0) for name in {*self.used, *charge}}
        limited = {name: min(max(amount, 0), MOST) for name, amount in sums.items()}
        return self._replace(used={name: limited[name] for name in sorted(limited) if limited[name]})


def charge(resources: Resources) -> dict[str, int]:
    """Return what one instance with these resources counts for in a quota."""
    return {**resources, INSTANCES: 1}


class Demand(Protocol):
    """A request, delivered or queued, and what it counts for in a quota."""

    @property
    def instance(self) -> str: ...
    @property
    def project_id(self) -> str: ...
    @property
    def resources(self) -> Resources: ...


def counted(
    project: str, asked: Iterable[Demand], record_of: Callable[[str], Record | None] = lambda _: None
) -> dict[str, int]:
    """Return a project's usage by these requests; of several of one instance the last counts.

    A tombstone without resources, as eschedule wrote it in 2019, counts for what the instance's record has, because
    that is what its end subtracts. It counts for nothing if the record says that the instance has ended or failed.
    `read_record` returns None without a readable record.
    """
    charges: dict[str, dict[str, int]] = {}
    for demand in asked:
        lacks_resources = isinstance(demand, Request) and demand.is_tombstone and not demand.left
        record = record_of(demand.instance) if lacks_resources else None
        if record is not None and (record.error is not None or record.state in (GONE, ERROR)):
            continue
        if (record or demand).project_id == project:
            charges[demand.instance] = charge((record or demand).resources)
    return summed(charges.values())


def times(each: Mapping[str, int], count: int) -> dict[str, int]:
    """Multiply each amount by `count`."""
    return {name: amount * count for name, amount in each.items()}


def refusal(project: str, excess: Sequence[Excess]) -> str:
    """Return one sentence that the quota does not allow this."""
    return f'the quota of project {project} does not allow it: {"; ".join(map(str, excess))}'


def classes(found: Quota) -> list[str]:
    """Return the classes that a quota limits or counts, sorted, `instances` last."""
    return [*sorted({*found.limits, *found.used} - {INSTANCES}), INSTANCES]


def in_words(found: Quota) -> str:
    """Return a quota's limits and usage: `VCPU 3/10, instances 3/5`."""
    limited = [name for name in classes(found) if name in found.limits]
    return ', '.join(f'{name} {found.used.get(name, 0)}/{found.limits[name]}' for name in limited) or 'no limits'


def parse_limits(words: Sequence[str]) -> dict[str, int | None]:
    """Parse arguments like VCPU=10 and DISK_GB=none (no limit); ValueError if one is invalid."""
    limits: dict[str, int | None] = {}
    for word in words:
        name, _, text = word.partition('=')
        if name != INSTANCES and not is_class(name):
            problem = f'{word[:80]!r} is no limit{did_you_mean(name, (*NEEDED, INSTANCES))}'
            raise ValueError(f'{problem}: give VCPU=10, MEMORY_MB=8192, DISK_GB=100 or instances=5')
        if text != 'none' and not (text.isascii() and text.isdecimal() and len(text) < DIGITS and int(text) <= LARGEST):
            raise ValueError(f'{word[:80]!r}: a limit is a whole number from 0 to {LARGEST}, or none')
        if name in limits:
            raise ValueError(f'{name} is given twice')
        limits[name] = None if text == 'none' else int(text)
    return limits


def to_json(quota: Quota) -> str:
    """Return the value of the project's key."""
    return dump({'version': VERSION, 'limits': dict(quota.limits), 'used': dict(quota.used)})


def from_json(project: str, value: bytes) -> Quota:
    """Parse the value of a quota's key; ValueError if malformed or of a newer version."""
    data = load_object(value)
    version = data.get('version')
    if not is_version(version, VERSION):
        raise ValueError(f'a quota of version {version!r:.40}: this ecomp reads up to {VERSION}')
    parts = []
    for part in ('limits', 'used'):
        amounts = data.get(part)
        if not isinstance(amounts, dict) or not all(map(is_amount, amounts.values())):
            raise ValueError(f'not a quota: {part} is no object of amounts')
        parts.append(amounts)
    return Quota(project, *parts)
