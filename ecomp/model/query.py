"""A placement query: what it asks of one provider, and what is wrong with it as far as can be seen here. Pure.

The parameters of GET /allocation_candidates at microversion 1.39, as placement's own schema has them, read as
placement itself reads them (its lib.py and util.py):
https://docs.openstack.org/api-ref/placement/#allocation-candidates
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import parse_qsl, quote

from ecomp.model.allocation import LARGEST, NEEDED, is_class
from ecomp.model.json_object import DIGITS
from ecomp.model.status import DISABLED
from ecomp.model.text import did_you_mean

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


GROUPED = ('resources', 'required', 'member_of', 'in_tree')
"""The parameters that may have a suffix, which makes a granular group of them."""
OTHERS = ('limit', 'group_policy', 'root_required', 'same_subtree')
ONCE = ('resources', 'in_tree', 'limit', 'group_policy')
"""Of these placement takes the last, where there are two, and says nothing of the others."""
QUOTED = 5
"""How many names a sentence has."""

_SUFFIX = re.compile(f'({"|".join(GROUPED)})([a-zA-Z0-9_-]{{1,64}})?')


class Named(NamedTuple):
    """The resource classes and the traits that a query names."""

    classes: frozenset[str]
    traits: frozenset[str]


def check_query(query: str, needs_resources: bool = True, on: bool = False) -> str:
    """The query as it is; ValueError with the first thing in it that placement would not take, in a line.

    Without `needs_resources`, it is laid on top of a flavor; with `on`, --on says beside it where it is to be. Which
    classes and traits there are only placement knows.
    """
    seen: set[str] = set()
    for key, value in parse_qsl(query, keep_blank_values=True):
        kind = _kind(key)
        if kind is None:
            known = did_you_mean(key, (*GROUPED, *OTHERS))
            raise ValueError(f'{key[:40]!r} is nothing that placement asks for{known}')
        if key in seen and kind in ONCE:
            raise ValueError(f'{key}= is there twice: say all of it in one')
        seen.add(key)
        if kind == 'in_tree' and on:
            raise ValueError(f'--on is said in place of {key}=, not beside it: leave one of them out')
        if kind == 'resources':
            _check_amounts(key, value)
        elif kind == 'limit' and not (value.isascii() and value.isdecimal() and len(value) <= DIGITS and int(value)):
            raise ValueError(f'limit={value[:40]}: a limit is a whole number from 1 on')
        elif kind == 'group_policy' and value not in ('none', 'isolate'):
            raise ValueError(f'group_policy={value[:40]}: it is none or isolate')
    if needs_resources and not any(_kind(key) == 'resources' for key in seen):
        raise ValueError('it asks for no resources: say it like resources=VCPU:1,MEMORY_MB:256,DISK_GB:1')
    return query


def named(query: str) -> Named:
    """What the query names, where check_query() has nothing to say."""
    classes, traits = set(), set()
    for key, value in parse_qsl(query):
        if _kind(key) == 'resources':
            classes |= {part.partition(':')[0] for part in value.split(',')}
        elif _kind(key) in ('required', 'root_required'):
            traits |= {part.strip().lstrip('!') for part in value.removeprefix('in:').split(',')}
    return Named(frozenset(classes), frozenset(traits))


def unknown_words(what: str, strange: frozenset[str], known: frozenset[str]) -> str:
    """Say that placement does not know these, classes or traits, and what was probably meant by each."""
    return f'placement knows no {what} ' + ', '.join(
        each[:80] + did_you_mean(each, known) for each in sorted(strange)[:QUOTED]
    )


def _kind(key: str) -> str | None:
    """The parameter that a key is, with a suffix or without; None if placement has none of that name."""
    if key in OTHERS:
        return key
    found = _SUFFIX.fullmatch(key)
    return found[1] if found else None


def _check_amounts(key: str, value: str) -> None:
    if any(character.isspace() for character in value):
        raise ValueError(f'there is a blank in {key}=: write VCPU:1,MEMORY_MB:256 with none')
    found = set()
    for part in value.split(','):
        name, colon, amount = part.partition(':')
        if not colon:
            raise ValueError(f'{part[:80]!r} is not CLASS:AMOUNT, like VCPU:1')
        if not is_class(name):
            raise ValueError(f'{name[:80]!r} is no resource class{did_you_mean(name, NEEDED)}')
        if not (amount.isascii() and amount.isdecimal()):
            raise ValueError(f'{name}: {amount[:40]!r} is not a whole number from 1 to {LARGEST}')
        if not amount.strip('0') or len(amount) > DIGITS or int(amount) > LARGEST:
            raise ValueError(f'{name}: {amount[:40]} is not from 1 to {LARGEST}')
        if name in found:
            raise ValueError(f'{name} is there twice: say its amount once')
        found.add(name)
