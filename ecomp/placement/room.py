"""What providers have, in all that decides whether placement names them.

https://docs.openstack.org/api-ref/placement/#resource-providers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from ecomp.errors import NotFound
from ecomp.model.allocation import Inventory
from ecomp.model.explain import Provider
from ecomp.model.query import Amount, Constraint, Has, words
from ecomp.placement.allocations import rooms
from ecomp.placement.client import WRONG, Placement, text
from ecomp.placement.providers import inventories, listed, matching
from ecomp.placement.traits import AGGREGATES, TRAITS, names

SHARES = 'MISC_SHARES_VIA_AGGREGATE'


class ProviderListing(NamedTuple):
    """A provider as a list names it. `alone`: it has no parent and no children."""

    uuid: str
    name: str
    alone: bool


def everyone(placement: Placement) -> dict[str, ProviderListing]:
    """List every provider: {uuid: ProviderListing}."""
    found = listed(placement, lambda each: (text(each['name']), text(each['root_provider_uuid'])))
    trees = Counter(root for _, root in found.values())
    return {uuid: ProviderListing(uuid, name, trees[root] == 1) for uuid, (name, root) in found.items()}


def with_free(placement: Placement, name: str) -> dict[str, Provider]:
    """Every provider that has any of a class free, and what else is in its tree: one call, however many there are.

    Of each class an inventory has what can be given and what is given, and no limits of one amount; `aggregates` and
    `alone` are not known.
    """
    data = placement.get(f'/allocation_candidates?resources={name}:1')
    try:
        return {text(uuid): _summed_up(uuid, each) for uuid, each in data['provider_summaries'].items()}
    except WRONG as error:
        raise placement.foreign() from error


def holding(placement: Placement, constraint: Constraint) -> frozenset[str]:
    """The providers on which one constraint of a query holds, by itself."""
    if not isinstance(constraint, Amount) and constraint.key == 'root_required':
        constraint = constraint._replace(key='required')
    if isinstance(constraint, Has) and constraint.key == 'in_tree':
        return frozenset(constraint.any_of)
    return matching(placement, words([constraint]))


def look(
    placement: Placement,
    uuid: str,
    alone: bool,
    *,
    traits: bool,
    aggregates: bool,
    used: Mapping[str, int] | None = None,
) -> Provider | None:
    """One provider, with its traits and aggregates if they matter; None if it is not there (any more).

    `used` is how much of it is used, if that is known.
    """
    try:
        have = inventories(placement, uuid, used)
        there = names(placement, uuid, TRAITS) if traits else frozenset()
        near = names(placement, uuid, AGGREGATES) if aggregates else frozenset()
        return Provider(uuid, have, there, near, alone)
    except NotFound:
        return None


def _summed_up(uuid: str, summary: Mapping[str, Any]) -> Provider:
    have = {name: Inventory(each.capacity, used=each.used) for name, each in rooms(summary['resources']).items()}
    if not isinstance(summary['traits'], list):
        raise ValueError('not a list of traits')
    return Provider(uuid, have, frozenset(map(text, summary['traits'])))
