"""Resource providers, with their inventories, usages, traits and aggregates.

A provider is a compute, under the compute's uuid, or something that is part of one or shared by several.
https://docs.openstack.org/api-ref/placement/#resource-providers, #resource-classes and #traits
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from ecomp.errors import Conflict, GenerationConflict, NoCapacity, NotFound, PlacementRefusal, UnknownOutcome
from ecomp.model.allocation import Inventory, Provider, Room
from ecomp.model.query import Amount, Constraint, QueryNames, Requirement, describe_unknown_names, format_query
from ecomp.model.status import CUSTOM_PREFIX
from ecomp.placement.client import PARSE_ERRORS, Placement, check_integer, check_number, check_text

# A claim on a provider changes its generation, too: of 30 races with 30 claims a second the longest took 15 tries, and
# more than 20 on a machine so busy that an answer takes longer than the time between two claims.
MAX_TRIES = 60
# Maximum seconds between two tries. Of two writers without a pause one may lose every time.
MAX_PAUSE_SECONDS = 0.05
Parsed = TypeVar('Parsed')
TRAITS = 'traits'
AGGREGATES = 'aggregates'
Names = frozenset[str]


def parse_rooms(resources: Mapping[str, Mapping[str, object]]) -> dict[str, Room]:
    return {name: Room(check_integer(row['capacity']), check_integer(row['used'])) for name, row in resources.items()}


def ensure_provider(placement: Placement, provider: str) -> bool:
    """Create the provider, named by its uuid, or return False if it exists.

    Raises:
        NotFound: another provider has this name.
    """
    try:
        placement.write('POST', '/resource_providers', {'uuid': provider, 'name': provider})
    except Conflict:
        # Either a lost answer of an earlier try created it, or another provider has the name: read it.
        placement.get(f'/resource_providers/{provider}')
        return False
    return True


def read_generation(placement: Placement, provider: str) -> int:
    """Return the counter of changes to a provider's inventory, traits, aggregates and claims."""
    # A DELETE of a claim is not counted (openstack-placement 16), but a PUT of {} is.
    return placement.get_parsed(f'/resource_providers/{provider}', lambda data: check_integer(data['generation']))


def list_providers(placement: Placement, parse: Callable[[Any], Parsed], query: str = '') -> dict[str, Parsed]:
    """Return {uuid: `parse` of its row} of the providers that match a query."""
    key = 'resource_providers'
    path = f'/{key}' + (query and f'?{query}')
    return placement.get_parsed(path, lambda data: {check_text(row['uuid']): parse(row) for row in data[key]})


def set_inventory(
    placement: Placement,
    provider: str,
    inventory: Mapping[str, Mapping[str, float]],
    known_generation: int | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> int | None:
    """Replace a provider's inventory, and return the provider's new generation.

    The inventory is {class: {'total', 'reserved', 'allocation_ratio'}}. The generation is read if `known_generation` is
    None or out of date. If `is_cancelled` returns True, nothing is written, and None is returned.

    Raises:
        GenerationConflict: MAX_TRIES writes have lost a race.
        Conflict: a class in use would be removed.
    """

    def write() -> int | None:
        nonlocal known_generation
        current = known_generation if known_generation is not None else read_generation(placement, provider)
        known_generation = None
        # A process that cancels later also writes the inventory later. If it still writes first, this write is refused,
        # and `is_cancelled` is called again.
        if is_cancelled():
            return None
        body = {'resource_provider_generation': current, 'inventories': {k: dict(v) for k, v in inventory.items()}}
        placement.write('PUT', f'/resource_providers/{provider}/inventories', body)
        return current + 1

    return retry_lost_races(write)


def retry_lost_races(write: Callable[[], Parsed]) -> Parsed:
    """Call `write` until it raises no GenerationConflict, at most MAX_TRIES times."""
    for _ in range(MAX_TRIES - 1):
        try:
            return write()
        except GenerationConflict:
            time.sleep(random.uniform(0, MAX_PAUSE_SECONDS))
    return write()


def read_raw_inventory(placement: Placement, provider: str) -> dict[str, dict[str, Any]]:
    """Return the inventory as in placement: {class: {'total', 'reserved', …}}, all numbers."""
    path, key = f'/resource_providers/{provider}/inventories', 'inventories'
    return placement.get_parsed(path, lambda data: {check_text(k): _check_inventory(v) for k, v in data[key].items()})


def read_inventory(placement: Placement, provider: str, used: Mapping[str, int] | None = None) -> dict[str, Inventory]:
    """Return the inventory, with usages from `used`, or from placement if that is None."""
    amounts_by_class = read_raw_inventory(placement, provider)
    used = read_usages(placement, provider) if used is None else used
    field_names = [field for field in Inventory._fields if field != 'used']
    try:
        return {
            name: Inventory(**{part: fields[part] for part in field_names}, used=used.get(name, 0))
            for name, fields in amounts_by_class.items()
        }
    except KeyError as error:
        raise placement.make_foreign_error() from error


def has_inventory(inventories: Mapping[str, Inventory], target: Mapping[str, Mapping[str, float]]) -> bool:
    """Return whether the classes are those of `target`, and each field in `target` is equal."""
    if inventories.keys() != target.keys():
        return False
    # Not every database keeps all digits of a ratio.
    pairs = ((getattr(inventories[name], part), value) for name in target for part, value in target[name].items())
    return all(math.isclose(held, value, rel_tol=1e-6) for held, value in pairs)


def read_usages(placement: Placement, provider: str) -> dict[str, int]:
    path = f'/resource_providers/{provider}/usages'
    return placement.get_parsed(path, lambda data: {check_text(k): check_integer(v) for k, v in data['usages'].items()})


def read_project_usages(placement: Placement, project: str) -> tuple[int, dict[str, int]]:
    """Return how many instances a project has, and the amount of each class that they hold."""
    # https://docs.openstack.org/api-ref/placement/#list-usages
    data = placement.get(f'/usages?project_id={quote(project, safe="")}')
    count, used = 0, Counter[str]()
    try:
        # An eschedule of 2019 set no consumer type.
        for amounts in (data['usages'].get(kind, {}) for kind in ('INSTANCE', 'unknown')):
            of_type = {check_text(name): check_integer(amount) for name, amount in amounts.items()}
            count += of_type.pop('consumer_count', 0)
            used.update(of_type)
    except PARSE_ERRORS as error:
        raise placement.make_foreign_error() from error
    return count, {name: amount for name, amount in used.items() if amount}


def find_matching(placement: Placement, query: str) -> frozenset[str]:
    """Return the providers that match a query, or all providers for ''."""
    return frozenset(list_providers(placement, lambda _: None, query))


def read_provider_names(placement: Placement) -> dict[str, str]:
    return list_providers(placement, lambda each: check_text(each['name']))


def read_provider_name(placement: Placement, provider: str) -> str | None:
    try:
        return placement.get_parsed(f'/resource_providers/{provider}', lambda data: check_text(data['name']))
    except NotFound:
        return None


def read_rooms(placement: Placement, provider_uuids: Collection[str]) -> dict[str, dict[str, Room]]:
    """Return the rooms of those providers that exist, as {provider: {class: Room}}."""
    # This is one call. A provider without a free VCPU is missing in its answer, and takes two more.
    roomy = placement.get_parsed(
        '/allocation_candidates?resources=VCPU:1',
        lambda data: {uuid: parse_rooms(summary['resources']) for uuid, summary in data['provider_summaries'].items()},
    )
    results = {}
    for provider in provider_uuids:
        with suppress(NotFound):
            results[provider] = roomy[provider] if provider in roomy else _read_rooms(placement, provider)
    return results


def delete_provider(placement: Placement, provider: str) -> bool:
    """Delete an unused provider, or return False if it does not exist.

    Raises:
        Conflict: it is in use, or has children.
        UnknownOutcome: two tries had no answer, and it still exists.
    """
    path = f'/resource_providers/{provider}'
    for _ in range(2):
        try:
            placement.write('DELETE', path, None)
        except NotFound:
            return False
        except NoCapacity as error:
            raise Conflict(str(error)) from error  # a 409 about its children
        except UnknownOutcome:
            if read_provider_name(placement, provider) is not None:
                continue
        return True
    raise UnknownOutcome(f'{placement.name}: it is unknown whether provider {provider} is deleted', placement.name)


def _read_rooms(placement: Placement, provider: str) -> dict[str, Room]:
    # Only VCPU is reserved completely as a sign: its ecompute was stopped in order.
    return {
        name: Room(held.capacity, held.used, name == 'VCPU' and held.is_fully_reserved)
        for name, held in read_inventory(placement, provider).items()
    }


def _check_inventory(fields: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in fields.items():
        check_number(value) if name == 'allocation_ratio' else check_integer(value)
    if fields.get('step_size', 1) < 1:
        raise ValueError('step_size is less than 1')
    return dict(fields)


def read_names(placement: Placement, provider: str, kind: str) -> Names:
    """Return the set of the provider's names of a kind, TRAITS or AGGREGATES."""
    return _read_names(placement, provider, kind)[0]


def change_names(placement: Placement, provider: str, kind: str, update: Callable[[Names], Names]) -> bool:
    """Replace a provider's TRAITS or AGGREGATES with `update(current)`, if that differs.

    `update` is called again after each lost race. The result is False if nothing was to change.
    """

    def write() -> bool:
        current, generation = _read_names(placement, provider, kind)
        updated = update(current)
        if updated == current:
            return False
        body = {'resource_provider_generation': generation, kind: sorted(updated)}
        placement.write('PUT', f'/resource_providers/{provider}/{kind}', body)
        return True

    return retry_lost_races(write)


def create_missing_traits(placement: Placement, traits: Collection[str]) -> Names:
    """Create the CUSTOM_ traits that placement lacks, and return the other unknown ones."""
    if not traits:
        return frozenset()
    missing = _find_missing_traits(placement, traits)
    creatable = frozenset(name for name in missing if name.startswith(CUSTOM_PREFIX))
    for name in sorted(creatable):
        placement.write('PUT', f'/traits/{name}', None)  # no error if it was created concurrently
    return missing - creatable


def find_unknown_traits(placement: Placement, traits: Collection[str]) -> Names:
    """Return which of `traits`, one or more, placement neither knows nor could create."""
    missing = _find_missing_traits(placement, traits)
    return frozenset(name for name in missing if not name.startswith(CUSTOM_PREFIX))


def find_with_trait(placement: Placement, trait: str) -> Names:
    """Return the providers with a trait, or none if placement does not know the trait."""
    try:
        return find_matching(placement, f'required={trait}')
    except PlacementRefusal:
        return frozenset()


def _find_missing_traits(placement: Placement, traits: Collection[str]) -> Names:
    return frozenset(traits) - _read_traits(placement, f'/traits?name=in:{",".join(sorted(traits))}')


def _read_traits(placement: Placement, path: str = '/traits') -> Names:
    return placement.get_parsed(path, lambda data: _parse_names(data, TRAITS))


def _read_names(placement: Placement, provider: str, kind: str) -> tuple[Names, int]:
    path, counter = f'/resource_providers/{provider}/{kind}', 'resource_provider_generation'
    return placement.get_parsed(path, lambda data: (_parse_names(data, kind), check_integer(data[counter])))


def _parse_names(data: dict[str, Any], kind: str) -> Names:
    if not isinstance(data[kind], list):
        raise ValueError('not a list')
    return frozenset(map(check_text, data[kind]))


class UnknownNames(NamedTuple):
    """A sentence each about unknown standard and custom (CUSTOM_…) names, '' if there are none."""

    standard: str
    custom: str


def find_unknown_names(
    placement: Placement, query_names: QueryNames, more_suggestions: Collection[str] = ()
) -> UnknownNames:
    """Describe the classes and traits of a query that placement does not know."""
    key = 'resource_classes'
    classes = frozenset[str]()
    if query_names.classes:
        classes = placement.get_parsed(f'/{key}', lambda data: frozenset(check_text(row['name']) for row in data[key]))
    traits = _read_traits(placement) if query_names.traits else frozenset()
    kinds = ('resource class', query_names.classes, classes), ('trait', query_names.traits, traits)
    parts: list[list[str]] = [[], []]
    for label, used_names, valid in kinds:
        strange = used_names - valid
        custom = frozenset(word for word in strange if word.startswith(CUSTOM_PREFIX))
        for part, group in zip(parts, (strange - custom, custom), strict=True):
            part += [describe_unknown_names(label, group, valid.union(more_suggestions))] if group else []
    return UnknownNames(*map('; '.join, parts))


def find_satisfying(placement: Placement, constraint: Constraint) -> frozenset[str]:
    """Return the providers that meet a constraint, or the uuids in an in_tree=, unchecked."""
    if not isinstance(constraint, Amount) and constraint.key == 'root_required':
        constraint = constraint._replace(key='required')
    if isinstance(constraint, Requirement) and constraint.key == 'in_tree':
        return frozenset(constraint.any_of)
    return find_matching(placement, format_query([constraint]))


def read_provider(
    placement: Placement, uuid: str, *, traits: bool, aggregates: bool, used: Mapping[str, int] | None = None
) -> Provider | None:
    try:
        inventory_by_class = read_inventory(placement, uuid, used)
        trait_names = read_names(placement, uuid, TRAITS) if traits else frozenset()
        aggregate_uuids = read_names(placement, uuid, AGGREGATES) if aggregates else frozenset()
        return Provider(uuid, inventory_by_class, trait_names, aggregate_uuids)
    except NotFound:
        return None
