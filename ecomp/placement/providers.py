"""A compute's resource provider: named by its uuid, its inventory, its usages.

https://docs.openstack.org/api-ref/placement/#resource-providers
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from ecomp.errors import Conflict, GenerationConflict, NoCapacity, NotFound, UnknownOutcome
from ecomp.model.allocation import Inventory, Room
from ecomp.placement.allocations import rooms
from ecomp.placement.client import MOST, WRONG, Placement, number, text, whole

TRIES = 60
"""A claim on the provider moves its generation too: of 30 races with 30 claims a second on it, the longest took 15,
and more than 20 on a machine so busy that an answer takes longer than the time between two claims."""
PAUSE = 0.05
"""Seconds at most between two of them. Two that write without a pause can meet each time, and one always loses."""

Each = TypeVar('Each')


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
    found: int = _part(placement, f'/resource_providers/{provider}', 'generation', int)
    if abs(found) > MOST:
        raise placement.foreign()
    return found


def listed(placement: Placement, part: Callable[[Mapping[str, Any]], Each], query: str = '') -> dict[str, Each]:
    """What `part` takes of each provider's answer, by uuid, of those for which all of the query holds.

    One call, which takes as long as there are many. PlacementRefusal: placement does not know a trait of the query.
    """
    data = placement.get('/resource_providers' + (query and f'?{query}'))
    try:
        return {text(each['uuid']): part(each) for each in data['resource_providers']}
    except WRONG as error:
        raise placement.foreign() from error


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
    found: dict[str, Any] = _part(placement, f'/resource_providers/{provider}/inventories', 'inventories', dict)
    try:
        return {text(name): _checked(each) for name, each in found.items()}
    except WRONG as error:
        raise placement.foreign() from error


def inventories(
    placement: Placement, provider: str, used: Mapping[str, int] | None = None
) -> dict[str, Inventory]:
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
    found: dict[str, int] = _part(placement, f'/resource_providers/{provider}/usages', 'usages', dict)
    try:
        return {text(name): whole(amount) for name, amount in found.items()}
    except WRONG as error:
        raise placement.foreign() from error


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
        return text(placement.get(f'/resource_providers/{provider}').get('name'))
    except NotFound:
        return None
    except ValueError as error:
        raise placement.foreign() from error


def shares(placement: Placement, wanted: Collection[str]) -> dict[str, dict[str, Room]]:
    """What each wanted provider can give and has given, by class; those that are not there (any more) are left out.

    Most come with one request, which names every provider with a VCPU free; each of the others takes two.
    """
    data = placement.get('/allocation_candidates?resources=VCPU:1')
    try:
        roomy = {each: rooms(summary['resources']) for each, summary in data['provider_summaries'].items()}
        found = {}
        for provider in wanted:
            try:
                found[provider] = roomy[provider] if provider in roomy else _shares(placement, provider)
            except NotFound:
                continue
        return found
    except WRONG as error:
        raise placement.foreign() from error


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


def _part(placement: Placement, path: str, name: str, kind: type) -> Any:
    """One part of an answer; Unreachable if it is none of placement's."""
    found = placement.get(path).get(name)
    if type(found) is not kind:  # True is an int to Python
        raise placement.foreign()
    return found


def _checked(each: Mapping[str, Any]) -> dict[str, Any]:
    """One class of an inventory, with whole numbers and a ratio. One of WRONG if it is none."""
    for name, value in each.items():
        number(value) if name == 'allocation_ratio' else whole(value)
    if each.get('step_size', 1) < 1:
        raise ValueError('nothing is a multiple of less than 1')
    return dict(each)
