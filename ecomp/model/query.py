"""A placement query, taken apart into what it asks of one provider. Pure.

The parameters of GET /allocation_candidates at microversion 1.39, read as placement itself reads them (its lib.py and
util.py): https://docs.openstack.org/api-ref/placement/#allocation-candidates
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import parse_qsl, quote

from ecomp.model.status import DISABLED

READ = ('resources', 'required', 'root_required', 'member_of', 'in_tree', 'limit')


class Unexplained(ValueError):
    """The query asks for what these rules do not cover; str() says why, as the end of a sentence."""


class Amount(NamedTuple):
    """An amount of a resource class."""

    name: str
    amount: int

    def __str__(self) -> str:
        return f'{self.name}:{self.amount}'


class Has(NamedTuple):
    """At least one of these traits (`required`, `root_required`), aggregates (`member_of`) or trees (`in_tree`).

    `typed` is what stands for it in what the user typed, where that was no query: `--on hv1`.
    """

    key: str
    any_of: tuple[str, ...]
    typed: str = ''

    def __str__(self) -> str:
        return f'{self.key}={"in:" if len(self.any_of) > 1 else ""}{",".join(self.any_of)}'


class HasNot(NamedTuple):
    """Not this trait, or not in this aggregate."""

    key: str
    name: str

    def __str__(self) -> str:
        return f'{self.key}=!{self.name}'


Constraint = Amount | Has | HasNot

ENABLED = HasNot('root_required', DISABLED)
"""What enabled_only() adds to a query: not on a compute that is disabled."""


def parse(query: str) -> tuple[Constraint, ...]:
    """The constraints in the query, each once, in its order. Unexplained for one with granular groups.

    `limit` is none of them: it changes how many candidates are named, and not whether there is one.
    """
    given: dict[str, list[str]] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in READ:
            raise Unexplained(f'it has granular groups ({key})')
        given.setdefault(key, []).append(value)
    found: list[Constraint] = []
    try:
        # Of what is said twice the last counts, with these two parameters.
        found += _amounts(given['resources'][-1])
        for value in given.get('required', []):
            found += _traits('required', value)
        for value in given.get('root_required', []):
            found += _traits('root_required', value)
        for value in given.get('member_of', []):
            found += _aggregates(value)
        found += [Has('in_tree', (value.strip(),)) for value in given.get('in_tree', [])[-1:]]
    except (KeyError, ValueError) as error:
        raise Unexplained('it is not as placement writes one') from error
    return tuple(dict.fromkeys(found))


def amounts_alone(query: str) -> dict[str, int] | None:
    """The amounts of a query that asks for these and nothing else, {class: amount}; None for any other."""
    if not query.startswith('resources=') or '&' in query or ';' in query:
        return None
    try:
        return {each.name: each.amount for each in parse(query) if isinstance(each, Amount)}
    except Unexplained:
        return None


def limit(query: str) -> str | None:
    """How many candidates the query has placement name at most, as it is written; None where it does not say."""
    return dict(parse_qsl(query, keep_blank_values=True)).get('limit')


def on_one(query: str, compute: str) -> str:
    """The query for one compute alone, of one that names none.

    One that asks in granular groups alone is for it in each of them: without resources of its own there is nobody whom
    in_tree= could be about, and placement refuses it.
    """
    groups = [key.removeprefix('resources') for key, _ in parse_qsl(query) if key.startswith('resources')]
    return '&'.join([query, *(f'in_tree{each}={compute}' for each in ([''] if '' in groups else groups))])


def enabled_only(query: str) -> str:
    """The query with ENABLED added, unless it names that trait itself; also with granular groups, of whose root it is.

    A query that placement will refuse stays as it is.
    """
    pairs = parse_qsl(query, keep_blank_values=True)
    about = [value for key, value in pairs if key.startswith(('required', 'root_required'))]
    if any(DISABLED in names(value) for value in about):
        return query
    roots = [value for key, value in pairs if key == 'root_required']
    if not roots:
        return f'{query}&{ENABLED}'
    if len(roots) > 1 or not roots[0].strip() or roots[0].startswith('in:'):
        return query
    parts = query.split('&')
    return '&'.join(f'{part},!{DISABLED}' if _key(part) == 'root_required' else part for part in parts)


def names(value: str) -> tuple[str, ...]:
    """The traits in one value of `required` or `root_required`."""
    return tuple(each.strip().lstrip('!') for each in value.removeprefix('in:').split(','))


def words(constraints: Iterable[Constraint]) -> str:
    """The query that asks for these constraints and nothing else."""
    amounts, roots, rest = [], [], []
    for each in constraints:
        if isinstance(each, Amount):
            amounts.append(str(each))
        elif each.key == 'root_required':  # may be said only once
            roots.append(str(each).removeprefix('root_required='))
        else:
            rest.append(str(each))
    merged = {'resources': amounts, 'root_required': roots}
    together = [f'{key}={",".join(found)}' for key, found in merged.items() if found]
    return '&'.join(quote(part, safe='=:,!') for part in [*together, *rest])


def _key(part: str) -> str:
    return next((key for key, _ in parse_qsl(part, keep_blank_values=True)), '')


def _amounts(value: str) -> Iterator[Constraint]:
    found: dict[str, int] = {}
    for part in value.split(','):
        name, amount = part.split(':')
        found[name] = int(amount)
    return (Amount(name, amount) for name, amount in found.items())


def _traits(key: str, value: str) -> Iterator[Constraint]:
    if value.startswith('in:'):
        yield Has(key, _sorted(name.strip() for name in value.removeprefix('in:').split(',')))
        return
    for name in (each.strip() for each in value.split(',')):
        yield HasNot(key, name.lstrip('!')) if name.startswith('!') else Has(key, (name,))


def _aggregates(value: str) -> Iterator[Constraint]:
    if value.startswith('!'):
        yield from (HasNot('member_of', name) for name in _sorted(value[1:].removeprefix('in:').split(',')))
    else:
        yield Has('member_of', _sorted(value.removeprefix('in:').split(',')))


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))
