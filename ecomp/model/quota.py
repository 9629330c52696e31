"""Quotas: how much a project may have, and how much it has. Pure.

The key /quotas/<project> holds JSON: {"version", "limits": {class or "instances": n}, "used": the same}. Both are
amounts of placement's resource classes. What is used counts from the delivery of a request (one that waits in a queue
has been delivered) to the transaction that removes it.
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
    """A limit that `asked` more would exceed."""

    name: str
    limit: int
    used: int
    asked: int

    def __str__(self) -> str:
        """`VCPU: limit 10, used 9, asked 2`."""
        return f'{self.name}: limit {self.limit}, used {self.used}, asked {self.asked}'


class Quota(NamedTuple):
    """The limits of a project and what it has, {class or 'instances': amount}; a class without a limit is unlimited."""

    project: str
    limits: Mapping[str, int] = {}
    used: Mapping[str, int] = {}

    def excess(self, charge: Mapping[str, int]) -> list[Excess]:
        """The limits that `charge` more would exceed; empty if it is allowed."""
        found = (
            Excess(name, limit, self.used.get(name, 0), charge.get(name, 0)) for name, limit in self.limits.items()
        )
        return [each for each in found if each.asked and each.used + each.asked > each.limit]

    def room(self, charge: Mapping[str, int], count: int) -> int:
        """How many times `charge` is allowed, `count` at most."""
        return next((number for number in range(count, 0, -1) if not self.excess(times(charge, number))), 0)

    def with_used(self, charge: Mapping[str, int]) -> Quota:
        """The quota with `charge` more in use."""
        return self._moved(charge, 1)

    def without_used(self, charge: Mapping[str, int]) -> Quota:
        """The quota with `charge` less in use, of no class below 0."""
        return self._moved(charge, -1)

    def _moved(self, charge: Mapping[str, int], sign: int) -> Quota:
        sums = {name: self.used.get(name, 0) + sign * charge.get(name, 0) for name in {*self.used, *charge}}
        now = {name: min(max(each, 0), MOST) for name, each in sums.items()}
        return self._replace(used={name: now[name] for name in sorted(now) if now[name]})


def charge(resources: Resources) -> dict[str, int]:
    """What one instance of these resources counts for in a quota."""
    return {**resources, INSTANCES: 1}


class Demand(Protocol):
    """A request, delivered or waiting, and what it counts for."""

    @property
    def instance(self) -> str: ...
    @property
    def project_id(self) -> str: ...
    @property
    def resources(self) -> Resources: ...


def counted(
    project: str, asked: Iterable[Demand], record_of: Callable[[str], Record | None] = lambda _: None
) -> dict[str, int]:
    """What a project has by these requests, waiting or delivered; of several of one instance the last counts.

    A tombstone that does not say what its instance had, as an eschedule of 2019 puts it, counts for what the instance's
    record says, as its end will give it back. `record_of` reads that; None for nothing that can be read.
    """
    charges: dict[str, dict[str, int]] = {}
    for wish in asked:
        is_mute = isinstance(wish, Request) and wish.is_tombstone and not wish.left
        record = record_of(wish.instance) if is_mute else None
        if record is not None and (record.error is not None or record.state in (GONE, ERROR)):
            continue
        if (record or wish).project_id == project:
            charges[wish.instance] = charge((record or wish).resources)
    return summed(charges.values())


def times(each: Mapping[str, int], count: int) -> dict[str, int]:
    """Each amount, `count` times."""
    return {name: amount * count for name, amount in each.items()}


def refusal(project: str, excess: Sequence[Excess]) -> str:
    """Why the project may not have more, in one sentence."""
    return f'the quota of project {project} does not allow it: {"; ".join(map(str, excess))}'


def classes(found: Quota) -> list[str]:
    """The classes that a quota limits or counts, sorted, `instances` last."""
    return [*sorted({*found.limits, *found.used} - {INSTANCES}), INSTANCES]


def in_words(found: Quota) -> str:
    """A quota's limits and how much of each is used: `VCPU 3/10, instances 3/5`."""
    limited = [name for name in classes(found) if name in found.limits]
    return ', '.join(f'{name} {found.used.get(name, 0)}/{found.limits[name]}' for name in limited) or 'no limits'


def parse_limits(words: Sequence[str]) -> dict[str, int | None]:
    """{class: limit} of words like VCPU=10, instances=3 and DISK_GB=none; None means no limit. ValueError."""
    found: dict[str, int | None] = {}
    for word in words:
        name, _, text = word.partition('=')
        if name != INSTANCES and not is_class(name):
            told = f'{word[:80]!r} is no limit{did_you_mean(name, (*NEEDED, INSTANCES))}'
            raise ValueError(f'{told}: give VCPU=10, MEMORY_MB=8192, DISK_GB=100 or instances=5')
        if text != 'none' and not (text.isascii() and text.isdecimal() and len(text) < DIGITS and int(text) <= LARGEST):
            raise ValueError(f'{word[:80]!r}: a limit is a whole number from 0 to {LARGEST}, or none')
        if name in found:
            raise ValueError(f'{name} is given twice')
        found[name] = None if text == 'none' else int(text)
    return found


def to_json(quota: Quota) -> str:
    """The value of the project's key."""
    return dump({'version': VERSION, 'limits': dict(quota.limits), 'used': dict(quota.used)})


def from_json(project: str, value: bytes) -> Quota:
    """The quota that a key holds. ValueError if it is none, or of a newer version."""
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
