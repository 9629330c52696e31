"""Traits and aggregates of a provider, read, changed and written back; which traits and classes placement knows.

https://docs.openstack.org/api-ref/placement/#resource-provider-traits, #resource-provider-aggregates,
#resource-classes and #traits
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ecomp.errors import PlacementRefusal
from ecomp.model.json_object import is_text
from ecomp.model.query import Named, unknown_words
from ecomp.model.status import CUSTOM
from ecomp.placement.client import WRONG, Placement, text, whole
from ecomp.placement.providers import matching, raced

TRAITS, AGGREGATES = 'traits', 'aggregates'

Names = frozenset[str]


def names(placement: Placement, provider: str, kind: str) -> Names:
    """The provider's TRAITS or AGGREGATES. NotFound if there is no such provider."""
    return _read(placement, provider, kind)[0]


def change(placement: Placement, provider: str, kind: str, to: Callable[[Names], Names]) -> bool:
    """Make the provider's TRAITS or AGGREGATES what `to` makes of them; False if they are so already.

    `to` is asked again whenever somebody else changed the provider meanwhile; nothing is written that it has not seen.
    Errors: NotFound, PlacementRefusal (a trait placement does not know), GenerationConflict after many lost races.
    """

    def write() -> bool:
        there, generation = _read(placement, provider, kind)
        wanted = to(there)
        if wanted == there:
            return False
        body = {'resource_provider_generation': generation, kind: sorted(wanted)}
        placement.write('PUT', f'/resource_providers/{provider}/{kind}', body)
        return True

    return raced(write)


def make_known(placement: Placement, wanted: Collection[str]) -> Names:
    """Create the CUSTOM_ traits among these that placement lacks; return those it still does not know."""
    if not wanted:
        return frozenset()
    missing = frozenset(wanted) - _known(placement, wanted)
    for name in sorted(missing):
        if name.startswith(CUSTOM):
            placement.write('PUT', f'/traits/{name}', None)  # made by somebody else meanwhile: as good
    return _not_to_be_made(missing)


def unknown(placement: Placement, wanted: Collection[str]) -> Names:
    """Those among these traits, of which there must be one, that placement neither knows nor would create."""
    return _not_to_be_made(frozenset(wanted) - _known(placement, wanted))


def having(placement: Placement, trait: str) -> Names:
    """The providers that have a trait; none if placement does not even know it."""
    try:
        return matching(placement, f'required={trait}')
    except PlacementRefusal:
        return frozenset()


def _not_to_be_made(missing: Names) -> Names:
    return frozenset(name for name in missing if not name.startswith(CUSTOM))


def _known(placement: Placement, wanted: Collection[str]) -> Names:
    return _names(placement, placement.get(f'/traits?name=in:{",".join(sorted(wanted))}'), TRAITS)


def _read(placement: Placement, provider: str, kind: str) -> tuple[Names, int]:
    data = placement.get(f'/resource_providers/{provider}/{kind}')
    try:
        return _names(placement, data, kind), whole(data.get('resource_provider_generation'))
    except ValueError as error:
        raise placement.foreign() from error


def _names(placement: Placement, data: dict[str, Any], kind: str) -> Names:
    found = data.get(kind)
    if not isinstance(found, list) or not all(map(is_text, found)):
        raise placement.foreign()
    return frozenset(found)


class Unknown(NamedTuple):
    """What placement does not know, a sentence of each kind, '' for nothing.

    `never` are names it will not know either; `yet` are CUSTOM_… ones, which come with a compute that has them.
    """

    never: str
    yet: str


def unknown_names(placement: Placement, wanted: Named, more: Collection[str] = ()) -> Unknown:
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
