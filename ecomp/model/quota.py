"""Quotas: the limits of a project, and its usage. Pure.

The JSON at /quotas/<project> also has "written_at", the ISO time of `quota set`, until the next change of the usage.
An instance is charged from its request's delivery, queued or not, until that request is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ecomp.model.allocation import MAX_AMOUNT, MAX_SUM, REQUIRED_CLASSES, Resources, is_class, sum_resources
from ecomp.model.json_object import MAX_DIGITS
from ecomp.model.order import Request
from ecomp.model.parsers import dict_of, number
from ecomp.model.states import ERROR, GONE
from ecomp.model.stored import stored
from ecomp.model.text import format_suggestion

if TYPE_CHECKING:
    from ecomp.model.record import Record

INSTANCES = 'instances'
AMOUNTS = dict_of(number(0, MAX_SUM))


class ExceededLimit(NamedTuple):
    """A limit that another `amount` would exceed."""

    name: str
    limit: int
    used: int
    amount: int

    def __str__(self) -> str:
        return f'{self.name}: limit {self.limit}, used {self.used}, requested {self.amount}'


@stored(1, 'quota', limits=AMOUNTS, used=AMOUNTS)
class Quota(NamedTuple):
    """A project's limits and usage, {class or 'instances': amount}, unlimited without a limit."""

    project: str
    limits: Mapping[str, int] = {}
    used: Mapping[str, int] = {}

    def list_excesses(self, charge: Mapping[str, int]) -> list[ExceededLimit]:
        limits, used = self.limits.items(), self.used
        excesses = (ExceededLimit(name, limit, used.get(name, 0), charge.get(name, 0)) for name, limit in limits)
        return [excess for excess in excesses if excess.amount and excess.used + excess.amount > excess.limit]

    def count_allowed(self, charge: Mapping[str, int], count: int) -> int:
        """Return how many of `count` instances, each with this charge, the limits allow."""
        numbers = range(count, 0, -1)
        return next((each for each in numbers if not self.list_excesses(multiply_amounts(charge, each))), 0)

    def add_used(self, charge: Mapping[str, int], sign: int = 1) -> Quota:
        """Return the quota after adding `sign` times `charge`, each amount kept from 0 to MAX_SUM."""
        sums = {name: self.used.get(name, 0) + sign * charge.get(name, 0) for name in {*self.used, *charge}}
        limited = {name: min(max(amount, 0), MAX_SUM) for name, amount in sums.items()}
        return self._replace(used={name: limited[name] for name in sorted(limited) if limited[name]})


def make_charge(resources: Resources) -> dict[str, int]:
    return {**resources, INSTANCES: 1}


class Demand(Protocol):
    """What sum_charges() reads of a request, which may be queued, delivered or malformed."""

    @property
    def instance(self) -> str: ...
    @property
    def project_id(self) -> str: ...
    @property
    def resources(self) -> Resources: ...


def sum_charges(project: str, demands: Iterable[Demand], read_record: Callable[[str], Record | None]) -> dict[str, int]:
    """Sum what the requests of a project charge, the last one of each instance.

    Only a tombstone without resources calls `read_record`, and charges what its record has.
    """
    charges: dict[str, dict[str, int]] = {}
    for demand in demands:
        if isinstance(demand, Request) and demand.is_tombstone and demand.replaced_by:
            continue  # evacuated: its charge has moved to its replacement
        # A tombstone without resources, as eschedule wrote it in 2019, counts for what the record has, because its end
        # subtracts that: nothing if the record is gone or failed.
        lacks_resources = isinstance(demand, Request) and demand.is_tombstone and not demand.former_resources
        record = read_record(demand.instance) if lacks_resources else None
        if record is not None and (record.error is not None or record.state in (GONE, ERROR)):
            continue
        if (record or demand).project_id == project:
            charges[demand.instance] = make_charge((record or demand).resources)
    return sum_resources(charges.values())


def multiply_amounts(amounts: Mapping[str, int], count: int) -> dict[str, int]:
    return {name: amount * count for name, amount in amounts.items()}


def describe_excesses(project: str, excesses: Sequence[ExceededLimit]) -> str:
    return f'the quota of project {project} does not allow this request: {"; ".join(map(str, excesses))}'


def list_classes(quota: Quota) -> list[str]:
    """Return the classes that a quota limits or counts, sorted, and `instances` as the last one."""
    return [*sorted({*quota.limits, *quota.used} - {INSTANCES}), INSTANCES]


def format_quota(quota: Quota) -> str:
    """Return the limits with their usage, `VCPU 3/10, instances 3/5`, or `no limits`."""
    limited = [name for name in list_classes(quota) if name in quota.limits]
    return ', '.join(f'{name} {quota.used.get(name, 0)}/{quota.limits[name]}' for name in limited) or 'no limits'


def parse_limits(arguments: Sequence[str]) -> dict[str, int | None]:
    """Parse limits like VCPU=10 and DISK_GB=none (no limit), or raise ValueError."""
    limits: dict[str, int | None] = {}
    for word in arguments:
        name, _, text = word.partition('=')
        if name != INSTANCES and not is_class(name):
            problem = f'{word[:80]!r} is not a valid limit{format_suggestion(name, (*REQUIRED_CLASSES, INSTANCES))}'
            raise ValueError(f'{problem}. Fix: give VCPU=10, MEMORY_MB=8192, DISK_GB=100 or instances=5')
        is_amount = text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS and int(text) <= MAX_AMOUNT
        if text != 'none' and not is_amount:
            raise ValueError(f'{word[:80]!r}: a limit is a whole number from 0 to {MAX_AMOUNT}, or none')
        if name in limits:
            raise ValueError(f'{name} is given more than once')
        limits[name] = None if text == 'none' else int(text)
    return limits
