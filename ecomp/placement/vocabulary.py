"""Which resource classes and traits placement knows.

https://docs.openstack.org/api-ref/placement/#resource-classes and #traits
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ecomp.model.query import Named, unknown_words
from ecomp.model.status import CUSTOM
from ecomp.placement.client import WRONG, Placement, text


class Unknown(NamedTuple):
    """What placement does not know, a sentence of each kind, '' for nothing.

    `never` are names it will not know either; `yet` are CUSTOM_… ones, which come with a compute that has them.
    """

    never: str
    yet: str


def unknown(placement: Placement, wanted: Named, more: Collection[str] = ()) -> Unknown:
    """What placement does not know of these names, with what was probably meant by each: `more` may have been, too."""
    classes = _classes(placement) if wanted.classes else frozenset()
    traits = _traits(placement) if wanted.traits else frozenset()
    kinds = ('resource class', wanted.classes, classes), ('trait', wanted.traits, traits)
    parts: list[list[str]] = [[], []]
    for what, names, known in kinds:
        strange = names - known
        custom = frozenset(each for each in strange if each.startswith(CUSTOM))
        for part, each in zip(parts, (strange - custom, custom), strict=True):
            part += [unknown_words(what, each, known.union(more))] if each else []
    return Unknown(*map('; '.join, parts))


def _classes(placement: Placement) -> frozenset[str]:
    data = placement.get('/resource_classes')
    try:
        return frozenset(text(each['name']) for each in data['resource_classes'])
    except WRONG as error:
        raise placement.foreign() from error


def _traits(placement: Placement) -> frozenset[str]:
    data = placement.get('/traits')
    try:
        return frozenset(text(each) for each in data['traits'])
    except WRONG as error:
        raise placement.foreign() from error
