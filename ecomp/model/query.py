"""A placement query: its constraints, and errors that can be found without placement. Pure.

The parameters are those of GET /allocation_candidates at microversion 1.39, parsed as placement does (its schema,
lib.py and util.py): https://docs.openstack.org/api-ref/placement/#allocation-candidates
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote_plus

from ecomp.model.allocation import MAX_AMOUNT, REQUIRED_CLASSES, is_class
from ecomp.model.json_object import MAX_DIGITS
from ecomp.model.keys import is_uuid
from ecomp.model.status import DISABLED
from ecomp.model.text import format_suggestion

# parse_query() leaves out `limit`, because it does not decide whether there is a candidate.
PARSED_PARAMETERS = ('resources', 'required', 'root_required', 'member_of', 'in_tree', 'limit')


class UnsupportedQueryError(ValueError):
    """The query cannot be parsed here, for a reason that is worded as the end of a sentence."""


class Amount(NamedTuple):
    """Requires an amount of a resource class."""

    name: str
    amount: int

    def __str__(self) -> str:
        return f'{self.name}:{self.amount}'


class Requirement(NamedTuple):
    """Requires at least one of these traits, aggregates (`member_of`) or trees (`in_tree`)."""

    key: str
    any_of: tuple[str, ...]
    argument: str = ''  # where it comes from, if not from a query: --on hv1

    def __str__(self) -> str:
        return f'{self.key}={"in:" if len(self.any_of) > 1 else ""}{",".join(self.any_of)}'


class Exclusion(NamedTuple):
    """Forbids a trait, or membership of an aggregate."""

    key: str
    name: str

    def __str__(self) -> str:
        return f'{self.key}=!{self.name}'


Constraint = Amount | Requirement | Exclusion

# The constraint that exclude_disabled() adds.
NOT_DISABLED = Exclusion('root_required', DISABLED)


def parse_query(query: str) -> tuple[Constraint, ...]:
    """Return the constraints of a query, each once, in the order of PARSED_PARAMETERS.

    Raises:
        UnsupportedQueryError: it is malformed, lacks resources, or has another parameter (granular groups).
    """
    values: dict[str, list[str]] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in PARSED_PARAMETERS:
            raise UnsupportedQueryError(f'the query has granular groups ({key})')
        values.setdefault(key, []).append(value)
    constraints: list[Constraint] = []
    # Amounts need only be integers, and names are not checked.
    try:
        # Placement uses the last of several `resources` and `in_tree` parameters.
        constraints += _parse_amounts(values['resources'][-1])
        for key in ('required', 'root_required'):
            for value in values.get(key, []):
                constraints += _parse_traits(key, value)
        for value in values.get('member_of', []):
            constraints += _parse_aggregates(value)
        constraints += [Requirement('in_tree', (value.strip(),)) for value in values.get('in_tree', [])[-1:]]
    except (KeyError, ValueError) as error:
        raise UnsupportedQueryError('the query does not have the syntax of placement') from error
    return tuple(dict.fromkeys(constraints))


def parse_plain_amounts(query: str) -> dict[str, int] | None:
    """Return {class: amount} of a query that has only amounts, else None."""
    if not query.startswith('resources=') or '&' in query or ';' in query:
        return None
    try:
        return read_amounts(query)
    except UnsupportedQueryError:
        return None


def read_amounts(query: str) -> dict[str, int]:
    """Return {class: amount} of a query without groups, or raise UnsupportedQueryError."""
    return {each.name: each.amount for each in parse_query(query) if isinstance(each, Amount)}


def replace_amounts(query: str, amounts: Mapping[str, int]) -> str:
    """Return the query with amounts replaced or added, or raise UnsupportedQueryError."""
    new = ','.join(f'{name}:{amount}' for name, amount in {**read_amounts(query), **amounts}.items())
    return '&'.join([f'resources={new}', *(part for part in query.split('&') if not part.startswith('resources='))])


def split_query(query: str) -> dict[str, str]:
    """Return {class or parameter: text} of a query, each name with the suffix of its group."""
    parts: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key.startswith('resources'):
            amounts = (part.partition(':') for part in value.split(','))
            parts |= {name + key.removeprefix('resources'): amount for name, _, amount in amounts}
        else:
            parts[key] = f'{parts[key]}&{value}' if key in parts else value
    return parts


def read_limit(query: str) -> str | None:
    return dict(parse_qsl(query, keep_blank_values=True)).get('limit')


def list_trees(query: str) -> set[str]:
    """Return the uuids or names of providers in in_tree=, in any group."""
    if 'in_tree' not in query:
        return set()
    return {value.strip() for key, value in parse_qsl(query) if _find_parameter(key) == 'in_tree'}


def resolve_trees(query: str, resolve: Callable[[str], str]) -> str:
    """Replace each host name in in_tree= by its uuid, which is all that placement accepts."""

    def replace_name(match: re.Match[str]) -> str:
        name = unquote_plus(match[2]).strip()
        return match[0] if is_uuid(name) or not name else match[1] + resolve(name)

    return re.sub(r'((?<![^&])in_tree[^=&]*=)([^&]*)', replace_name, query)


def restrict_to_compute(query: str, compute: str) -> str:
    """Add in_tree= to a query without it, so that placement proposes only this compute."""
    # Without resources= placement refuses in_tree=, so then each granular group is restricted.
    groups = [key.removeprefix('resources') for key, _ in parse_qsl(query) if key.startswith('resources')]
    return '&'.join([query, *(f'in_tree{suffix}={compute}' for suffix in ([''] if '' in groups else groups))])


def split_restriction(query: str) -> tuple[str, str]:
    """Return the query before restrict_to_compute(), and the compute, or '' if it added none."""
    rest = '&'.join(part for part in query.split('&') if not part.startswith('in_tree'))
    compute = min(list_trees(query), default='')
    return (rest, compute) if compute and restrict_to_compute(rest, compute) == query else (query, '')


def exclude_disabled(query: str) -> str:
    """Add NOT_DISABLED, unless the query names DISABLED or its root_required is not extendable."""
    pairs = parse_qsl(query, keep_blank_values=True)
    trait_values = [value for key, value in pairs if key.startswith(('required', 'root_required'))]
    if any(DISABLED in split_traits(value) for value in trait_values):
        return query
    roots = [value for key, value in pairs if key == 'root_required']
    if not roots:
        return f'{query}&{NOT_DISABLED}'
    if len(roots) > 1 or not roots[0].strip() or roots[0].startswith('in:'):
        return query
    parts = query.split('&')
    return '&'.join(f'{part},!{DISABLED}' if _parse_key(part) == 'root_required' else part for part in parts)


def split_traits(value: str) -> tuple[str, ...]:
    return tuple(name.strip().lstrip('!') for name in value.removeprefix('in:').split(','))


def format_query(constraints: Iterable[Constraint]) -> str:
    """Return the query with exactly these constraints, percent-encoded."""
    amounts, roots, rest = [], [], []
    for constraint in constraints:
        if isinstance(constraint, Amount):
            amounts.append(str(constraint))
        elif constraint.key == 'root_required':  # placement takes this parameter only once
            roots.append(str(constraint).removeprefix('root_required='))
        else:
            rest.append(str(constraint))
    merged = {'resources': amounts, 'root_required': roots}
    merged_parts = [f'{key}={",".join(texts)}' for key, texts in merged.items() if texts]
    return '&'.join(quote(part, safe='=:,!') for part in [*merged_parts, *rest])


def _parse_key(part: str) -> str:
    return next((key for key, _ in parse_qsl(part, keep_blank_values=True)), '')


def _parse_amounts(value: str) -> Iterator[Constraint]:
    pairs = (part.split(':') for part in value.split(','))
    return (Amount(name, amount) for name, amount in {name: int(amount) for name, amount in pairs}.items())


def _parse_traits(key: str, value: str) -> Iterator[Constraint]:
    if value.startswith('in:'):
        yield Requirement(key, _sort_unique(name.strip() for name in value.removeprefix('in:').split(',')))
        return
    for name in (part.strip() for part in value.split(',')):
        yield Exclusion(key, name.lstrip('!')) if name.startswith('!') else Requirement(key, (name,))


def _parse_aggregates(value: str) -> Iterator[Constraint]:
    if value.startswith('!'):
        yield from (Exclusion('member_of', name) for name in _sort_unique(value[1:].removeprefix('in:').split(',')))
    else:
        yield Requirement('member_of', _sort_unique(value.removeprefix('in:').split(',')))


def _sort_unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


# Parameters that form a granular group if they have a suffix.
GROUPABLE_PARAMETERS = ('resources', 'required', 'member_of', 'in_tree')
OTHER_PARAMETERS = ('limit', 'group_policy', 'root_required', 'same_subtree')
# Of several of these, placement uses the last without an error.
LAST_WINS_PARAMETERS = ('resources', 'in_tree', 'limit', 'group_policy')
MAX_QUOTED_NAMES = 5

_PARAMETER_PATTERN = f'({"|".join(GROUPABLE_PARAMETERS)})([a-zA-Z0-9_-]{{1,64}})?'


class QueryNames(NamedTuple):
    classes: frozenset[str]
    traits: frozenset[str]


def check_query(query: str, needs_resources: bool = True, has_on_option: bool = False) -> str:
    """Return the query, or raise ValueError for an error that shows without asking placement.

    A query that is added to a flavor needs no resources=. `has_on_option` forbids in_tree=.
    """
    # Not checked: whether a class exists, and values of required, root_required, member_of, in_tree and same_subtree.
    present: set[str] = set()
    for key, value in parse_qsl(query, keep_blank_values=True):
        kind = _find_parameter(key)
        if kind is None:
            suggestion = format_suggestion(key, (*GROUPABLE_PARAMETERS, *OTHER_PARAMETERS))
            raise ValueError(f'placement has no parameter {key[:40]!r}{suggestion}')
        if key in present and kind in LAST_WINS_PARAMETERS:
            raise ValueError(f'{key}= is given more than once. Fix: give all of it in one {key}=')
        present.add(key)
        if kind == 'in_tree' and has_on_option:
            raise ValueError(f'--on cannot be combined with {key}=. Fix: give one of them')
        if check_value := _VALUE_CHECKS.get(kind):
            check_value(key, value)
    if needs_resources and not any(_find_parameter(key) == 'resources' for key in present):
        raise ValueError('resources= is missing. Fix: add resources=VCPU:1,MEMORY_MB:256,DISK_GB:1')
    return query


def parse_names(query: str) -> QueryNames:
    """Return the classes and traits in a valid query, including forbidden traits."""
    classes, traits = set(), set()
    for key, value in parse_qsl(query):
        if _find_parameter(key) == 'resources':
            classes |= {part.partition(':')[0] for part in value.split(',')}
        elif _find_parameter(key) in ('required', 'root_required'):
            traits |= {part.strip().lstrip('!') for part in value.removeprefix('in:').split(',')}
    return QueryNames(frozenset(classes), frozenset(traits))


def describe_unknown_names(kind: str, unknown_names: frozenset[str], known_names: frozenset[str]) -> str:
    shown = sorted(unknown_names)[:MAX_QUOTED_NAMES]
    return f'placement knows no {kind} ' + ', '.join(name[:80] + format_suggestion(name, known_names) for name in shown)


def _find_parameter(key: str) -> str | None:
    """Return a parameter without the suffix of its group, or None if placement lacks it."""
    if key in OTHER_PARAMETERS:
        return key
    match = re.fullmatch(_PARAMETER_PATTERN, key)
    return match[1] if match else None


def _check_limit(key: str, value: str) -> None:
    if not (value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS and int(value)):
        raise ValueError(f'{key}={value[:40]}: a limit is a whole number of at least 1')


def _check_group_policy(key: str, value: str) -> None:
    if value not in ('none', 'isolate'):
        raise ValueError(f'{key}={value[:40]}: must be none or isolate')


def _check_amounts(key: str, value: str) -> None:
    if any(character.isspace() for character in value):
        raise ValueError(f'{key}= contains a blank. Fix: write it like VCPU:1,MEMORY_MB:256')
    class_names = set()
    for part in value.split(','):
        name, colon, amount = part.partition(':')
        if not colon:
            raise ValueError(f'{part[:80]!r} is not CLASS:AMOUNT, like VCPU:1')
        if not is_class(name):
            raise ValueError(f'{name[:80]!r} is not a valid resource class{format_suggestion(name, REQUIRED_CLASSES)}')
        if not (amount.isascii() and amount.isdecimal()):
            raise ValueError(f'{name}: {amount[:40]!r} is not a whole number from 1 to {MAX_AMOUNT}')
        if not amount.strip('0') or len(amount) > MAX_DIGITS or int(amount) > MAX_AMOUNT:
            raise ValueError(f'{name}: {amount[:40]} is not from 1 to {MAX_AMOUNT}')
        if name in class_names:
            raise ValueError(f'{name} is given more than once')
        class_names.add(name)


_VALUE_CHECKS = {'resources': _check_amounts, 'limit': _check_limit, 'group_policy': _check_group_policy}
