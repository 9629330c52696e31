"""Resource providers: names, inventories and usages; their traits and aggregates; which traits and classes there are.

A provider is a compute, under the compute's uuid, or something that is part of one or shared by several.
https://docs.openstack.org/api-ref/placement/#resource-providers, #resource-provider-traits,
#resource-provider-aggregates, #resource-classes and #traits
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

from ecomp.errors import Conflict, GenerationConflict, NoCapacity, NotFound, PlacementRefusal, UnknownOutcome
from ecomp.model.allocation import Inventory, Room
from ecomp.model.json_object import is_text
from ecomp.model.query import Amount, Constraint, Has, Named, unknown_words, words
from ecomp.model.status import CUSTOM
from ecomp.placement.client import WRONG, Placement, number, text, whole

if TYPE_CHECKING:
    from ecomp.model.explain import Provider

TRIES = 60
"""A claim on the provider moves its generation too: of 30 races with 30 claims a second on it, the longest took 15,
and more than 20 on a machine so busy that an answer takes longer than the time between two claims."""
PAUSE = 0.05
"""Seconds at most between two of them. Two that write without a pause can meet each time, and one always loses."""

Each = TypeVar('Each')


def rooms(resources: Mapping[str, Mapping[str, object]]) -> dict[str, Room]:
    """What a provider's summary says of each class. One of WRONG if it is none."""
    return {name: Room(whole(each['capacity']), whole(each['used'])) for name, each in resources.items()}


def ensure(placement: Placement, provider: str) -> bool:
    """See that the provider, which mostly is not, is there; True if it had to be made."""
    try:
        placement.write('POST', '/resource_providers', {'uuid': provider, 'name': provider})
    except Conflict:
        # It is there, by a lost answer of an earlier try, or it is somebody else's provider of that name: look.
        placement.get(f'/resource_providers/{provider}')
        return False
    return True


def generation(placement: Placement, provider: str) -> int:
    """What counts the changes of the provider: of its inventory, its traits and aggregates, and claims on it.

    A DELETE of a claim is not counted (openstack-placement 16); `PUT {}` is.
    """
    return placement.take(f'/resource_providers/{provider}', lambda data: whole(data['generation']))


def listed(placement: Placement, part: Callable[[Mapping[str, Any]], Each], query: str = '') -> dict[str, Each]:
    """What `part` takes of each provider's answer, by uuid, of those for which all of the query holds.

    One call, which takes as long as there are many. PlacementRefusal: placement does not know a trait of the query.
    """
    path = '/resource_providers' + (query and f'?{query}')
    return placement.take(path, lambda data: {text(each['uuid']): part(each) for each in data['resource_providers']})


def generations(placement: Placement) -> dict[str, int]:
    """The generation of every provider, by its uuid."""
    return listed(placement, lambda each: whole(each['generation']))


def set_inventory(
    placement: Placement,
    provider: str,
    inventory: Mapping[str, Mapping[str, float]],
    known: int | None = None,
    unless: Callable[[], bool] = lambda: False,
) -> int | None:
    """Set the whole inventory: {class: {'total', 'reserved', 'allocation_ratio'}}, whatever it was before.

    The provider's generation then; `known` is what it is before, None: not known. None, and nothing is done, if
    `unless` says so once that is read: whoever has it say so writes after that, and this is refused.
    Errors: GenerationConflict after several lost races, Conflict if a class in use would vanish.
    """

    def write() -> int | None:
        nonlocal known
        found, known = known if known is not None else generation(placement, provider), None
        if unless():
            return None
        body = {'resource_provider_generation': found, 'inventories': {k: dict(v) for k, v in inventory.items()}}
        placement.write('PUT', f'/resource_providers/{provider}/inventories', body)
        return found + 1

    return raced(write)


def raced(write: Callable[[], Each]) -> Each:
    """What `write` returns, which reads and writes once and is called again, after a random moment, if it lost a race.

    GenerationConflict after several.
    """
    for _ in range(TRIES - 1):
        try:
            return write()
        except GenerationConflict:
            time.sleep(random.uniform(0, PAUSE))
    return write()


def inventory(placement: Placement, provider: str) -> dict[str, dict[str, Any]]:
    """The inventory as placement has it: {class: {'total', 'reserved', 'allocation_ratio', …}}, all of them numbers."""
    path = f'/resource_providers/{provider}/inventories'
    return placement.take(path, lambda data: {text(k): _checked(v) for k, v in data['inventories'].items()})


def inventories(placement: Placement, provider: str, used: Mapping[str, int] | None = None) -> dict[str, Inventory]:
    """What the provider has of each class, and how much of it is `used`: None, if that is not known, is asked."""
    have = inventory(placement, provider)
    used = usages(placement, provider) if used is None else used
    parts = [each for each in Inventory._fields if each != 'used']
    try:
        return {
            name: Inventory(**{part: each[part] for part in parts}, used=used.get(name, 0))
            for name, each in have.items()
        }
    except KeyError as error:
        raise placement.foreign() from error


def is_as(placement: Placement, provider: str, wanted: Mapping[str, Mapping[str, float]]) -> bool | None:
    """Whether placement has exactly this inventory of the provider; None if it has no such provider."""
    try:
        there = inventory(placement, provider)
    except NotFound:
        return None
    if there.keys() != wanted.keys():
        return False
    # Not every database keeps all digits of a ratio.
    pairs = ((there[name].get(part), value) for name, each in wanted.items() for part, value in each.items())
    return all(have is not None and math.isclose(have, value, rel_tol=1e-6) for have, value in pairs)


def usages(placement: Placement, provider: str) -> dict[str, int]:
    """How much of each class is used."""
    path = f'/resource_providers/{provider}/usages'
    return placement.take(path, lambda data: {text(k): whole(v) for k, v in data['usages'].items()})


def project_usages(placement: Placement, project: str) -> tuple[int, dict[str, int]]:
    """How many instances a project has, and how much of each class they hold.

    https://docs.openstack.org/api-ref/placement/#list-usages
    """
    data = placement.get(f'/usages?project_id={quote(project, safe="")}')
    count, used = 0, Counter[str]()
    try:
        # An eschedule of 2019 told no type.
        for amounts in (data['usages'].get(kind, {}) for kind in ('INSTANCE', 'unknown')):
            each = {text(name): whole(amount) for name, amount in amounts.items()}
            count += each.pop('consumer_count', 0)
            used.update(each)
    except WRONG as error:
        raise placement.foreign() from error
    return count, {name: amount for name, amount in used.items() if amount}


def matching(placement: Placement, query: str) -> frozenset[str]:
    """The providers for which all of the query holds. PlacementRefusal: placement does not know a trait of it."""
    return frozenset(listed(placement, lambda _: None, query))


def names(placement: Placement) -> dict[str, str]:
    """Every provider's name, by its uuid: also of those that are nobody's compute."""
    return listed(placement, lambda each: text(each['name']))


def name(placement: Placement, provider: str) -> str | None:
    """A provider's name, None if there is no such provider."""
    try:
        return placement.take(f'/resource_providers/{provider}', lambda data: text(data['name']))
    except NotFound:
        return None


def shares(placement: Placement, wanted: Collection[str]) -> dict[str, dict[str, Room]]:
    """What each wanted provider can give and has given, by class; those that are not there (any more) are left out.

    Most come with one request, which names every provider with a VCPU free; each of the others takes two.
    """
    roomy = placement.take(
        '/allocation_candidates?resources=VCPU:1',
        lambda data: {each: rooms(summary['resources']) for each, summary in data['provider_summaries'].items()},
    )
    found = {}
    for provider in wanted:
        with suppress(NotFound):
            found[provider] = roomy[provider] if provider in roomy else _shares(placement, provider)
    return found


def delete(placement: Placement, provider: str) -> bool:
    """Remove a provider that nobody holds anything of; False if it was not there. Conflict if it is in use."""
    path = f'/resource_providers/{provider}'
    for _ in range(2):
        try:
            placement.write('DELETE', path, None)
        except NotFound:
            return False
        except NoCapacity as error:
            raise Conflict(str(error)) from error  # a 409 about its children
        except UnknownOutcome:
            if name(placement, provider) is not None:
                continue
        return True
    raise UnknownOutcome(f'{placement.name}: whether provider {provider} is removed is not known', placement.name)


def _shares(placement: Placement, provider: str) -> dict[str, Room]:
    # Only VCPU is reserved whole to say something: that its ecompute stopped in good order.
    return {
        name: Room(each.capacity, each.used, name == 'VCPU' and each.is_shut)
        for name, each in inventories(placement, provider).items()
    }


def _checked(each: Mapping[str, Any]) -> dict[str, Any]:
    """One class of an inventory, with whole numbers and a ratio. One of WRONG if it is none."""
    for name, value in each.items():
        number(value) if name == 'allocation_ratio' else whole(value)
    if each.get('step_size', 1) < 1:
        raise ValueError('nothing is a multiple of less than 1')
    return dict(each)


TRAITS, AGGREGATES = 'traits', 'aggregates'

Names = frozenset[str]


def names_of(placement: Placement, provider: str, kind: str) -> Names:
    """The provider's TRAITS or AGGREGATES. NotFound if there is no such provider."""
    return _read(placement, provider, kind)[0]


def change_names(placement: Placement, provider: str, kind: str, to: Callable[[Names], Names]) -> bool:
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
    path, counter = f'/resource_providers/{provider}/{kind}', 'resource_provider_generation'
    return placement.take(path, lambda data: (_names(placement, data, kind), whole(data[counter])))


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
    traits = _names(placement, placement.get('/traits'), TRAITS) if wanted.traits else frozenset()
    kinds = ('resource class', wanted.classes, classes), ('trait', wanted.traits, traits)
    parts: list[list[str]] = [[], []]
    for what, names_of, known in kinds:
        strange = names_of - known
        custom = frozenset(each for each in strange if each.startswith(CUSTOM))
        for part, each in zip(parts, (strange - custom, custom), strict=True):
            part += [unknown_words(what, each, known.union(more))] if each else []
    return Unknown(*map('; '.join, parts))


def _classes(placement: Placement) -> frozenset[str]:
    found = 'resource_classes'
    return placement.take(f'/{found}', lambda data: frozenset(text(each['name']) for each in data[found]))


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
    from ecomp.model.explain import Provider  # a claim does without

    try:
        have = inventories(placement, uuid, used)
        there = names_of(placement, uuid, TRAITS) if traits else frozenset()
        near = names_of(placement, uuid, AGGREGATES) if aggregates else frozenset()
        return Provider(uuid, have, there, near, alone)
    except NotFound:
        return None


def _summed_up(uuid: str, summary: Mapping[str, Any]) -> Provider:
    from ecomp.model.explain import Provider  # as above

    have = {name: Inventory(each.capacity, used=each.used) for name, each in rooms(summary['resources']).items()}
    if not isinstance(summary['traits'], list):
        raise ValueError('not a list of traits')
    return Provider(uuid, have, frozenset(map(text, summary['traits'])))
