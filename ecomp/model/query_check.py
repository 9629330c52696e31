"""What is wrong with a placement query, as far as it can be seen without asking placement. Pure.

The parameters of GET /allocation_candidates at microversion 1.39, as placement's own schema has them:
https://docs.openstack.org/api-ref/placement/#allocation-candidates
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl

from ecomp.model.allocation import LARGEST, NEEDED, is_class
from ecomp.model.json_object import DIGITS
from ecomp.model.text import did_you_mean

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
