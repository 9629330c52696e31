"""Flavors: named placement queries. Pure.

A flavor is written as a query with only resources and traits: 'resources=VCPU:1,MEMORY_MB:256&required=T,!FORBIDDEN'.
The JSON at /flavors/<flavor> also has "written_at", an ISO time, for `events`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from ecomp.model.allocation import MAX_AMOUNT, Resources, is_class
from ecomp.model.json_object import MAX_DIGITS
from ecomp.model.parsers import dict_of, list_of, number, text
from ecomp.model.stored import optional, stored
from ecomp.model.text import check_plain_name

check_flavor_name = partial(check_plain_name, kind='flavor')


def _check_class_name(kind: str, text: str) -> str:
    if not is_class(text):
        raise ValueError(f'{text[:80]!r} is not a valid {kind}: a name has only A-Z, 0-9 and _')
    return text


_TRAITS = optional(list_of(text(partial(_check_class_name, 'trait'))))


@stored(
    *(1, 'flavor'),
    name=check_flavor_name,
    resources=dict_of(number(1, MAX_AMOUNT), partial(_check_class_name, 'resource class')),
    required=_TRAITS,
    forbidden=_TRAITS,
)
@dataclass(frozen=True)
class Flavor:
    """Amounts of resource classes, and the traits that a compute must have or must not have."""

    name: str
    resources: Resources
    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.resources:
            raise ValueError('resources= is missing. Fix: add resources=VCPU:1,MEMORY_MB:256,DISK_GB:1')
        if contradictory := sorted({*self.required} & {*self.forbidden}):
            raise ValueError(f'{", ".join(contradictory)}: both required and forbidden')

    @property
    def traits(self) -> str:
        """The traits as `required=` has them: T,!FORBIDDEN."""
        return ','.join([*self.required, *(f'!{trait}' for trait in self.forbidden)])

    @cached_property
    def query(self) -> str:
        return merge_query(self, '')


def parse_flavor(name: str, text: str) -> Flavor:
    """Parse a flavor that is written as a query, or raise ValueError."""
    check_flavor_name(name)
    resources: dict[str, int] = {}
    required, forbidden = list[str](), list[str]()
    for part in filter(None, text.split('&')):
        key, _, value = part.partition('=')
        if key == 'resources':
            for resource_class, amount in _parse_amounts(value).items():
                resources[resource_class] = _parse_amount(resource_class, amount)
        elif key == 'required' and not value.startswith('in:'):
            for trait in value.split(','):
                names = forbidden if trait.startswith('!') else required
                names.append(_check_class_name('trait', trait.removeprefix('!')))
        else:
            raise ValueError(f'{part[:80]!r}: a flavor accepts only resources=… and required=…')
    return Flavor(name, resources, tuple(dict.fromkeys(required)), tuple(dict.fromkeys(forbidden)))


def merge_query(flavor: Flavor, query: str) -> str:
    """Return the flavor's query plus `query`, whose amounts win and are not checked."""
    amounts = {name: str(amount) for name, amount in flavor.resources.items()}
    rest = []
    for part in filter(None, query.split('&')):
        if part.startswith('resources='):
            amounts |= _parse_amounts(part.removeprefix('resources='))
        else:
            rest.append(part)
    resources = ','.join(f'{name}:{amount}' for name, amount in amounts.items())
    return '&'.join([f'resources={resources}', *([f'required={flavor.traits}'] if flavor.traits else []), *rest])


def _parse_amounts(value: str) -> dict[str, str]:
    amounts = {}
    for part in value.split(','):
        name, colon, amount = part.partition(':')
        if not colon:
            raise ValueError(f'{part[:80]!r} is not CLASS:AMOUNT')
        amounts[_check_class_name('resource class', name)] = amount
    return amounts


def _parse_amount(name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > MAX_DIGITS or not 0 < int(text) <= MAX_AMOUNT:
        raise ValueError(f'{name}: {text[:40]!r} is not a whole number from 1 to {MAX_AMOUNT}')
    return int(text)
