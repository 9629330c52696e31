"""A placement in memory: a request yields a JSON object, or a status with a reason.

Providers have no trees. tests/model/test_models_are_true.py compares it with the real one. Its oddities are kept: a
consumer is a row that is created in a transaction before that of its allocations; its generation starts again after
its last allocation is deleted; an undo deletes the row by its id, whatever allocations it has acquired since.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import os_resource_classes
import os_traits

from tests.kit.memory_etcd import Surroundings

Json = dict[str, Any]
# The allocations of a consumer: {provider: {class: amount}}.
Allocations = dict[str, dict[str, int]]
CONCURRENT, IN_USE, DUPLICATE = (
    *('placement.concurrent_update', 'placement.resource_provider.inuse', 'placement.duplicate_name'),
)
MAX_INT = 2147483647


class Refused(Exception):
    def __init__(self, status: int, detail: str, code: str = 'placement.undefined_code') -> None:
        super().__init__(detail)
        self.answer = status, {'errors': [{'status': status, 'code': code, 'detail': detail}]}


@dataclass
class Row:
    id: int
    user: str
    project: str
    generation: int = 0


@dataclass
class Provider:
    name: str
    generation: int = 0
    inventories: dict[str, Json] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()
    aggregates: frozenset[str] = frozenset()


@dataclass
class StartedWrite:
    """A write of allocations after its first transactions: the rows it read and created."""

    bodies: Mapping[str, Json]
    rows: dict[str, tuple[int, int]]
    created: list[str]


class PlacementModel:
    def __init__(self, world: Surroundings) -> None:
        self.providers: dict[str, Provider] = {}
        self.rows: dict[str, Row] = {}
        self.held: dict[str, Allocations] = {}
        self.custom: set[str] = set()
        self._ids = itertools.count(1)
        self.writes = 0
        self._fingerprint: tuple[int, int] = (-1, 0)
        world.state_parts.append(self.make_fingerprint)

    def empty(self) -> None:
        for contents in (self.providers, self.rows, self.held, self.custom):
            contents.clear()  # type: ignore[attr-defined]
        self.writes += 1

    def get_usage(self, provider: str, name: str) -> int:
        # This includes allocations whose consumer was deleted.
        return sum(held.get(provider, {}).get(name, 0) for held in self.held.values())

    def get_capacity(self, provider: str, name: str) -> int:
        inventory = self.providers[provider].inventories.get(name)
        return (
            0
            if inventory is None
            else int((inventory['total'] - inventory['reserved']) * inventory['allocation_ratio'])
        )

    # Allocations

    def creates_consumer(self, bodies: Mapping[str, Json]) -> bool:
        return any(name not in self.rows and body['consumer_generation'] is None for name, body in bodies.items())

    def begin(self, bodies: Mapping[str, Json]) -> StartedWrite:
        started = StartedWrite(bodies, {}, [])
        for body in bodies.values():
            if any(not 1 <= len(body.get(name_of_id, '')) <= 255 for name_of_id in ('user_id', 'project_id')):
                raise Refused(400, 'JSON does not validate: a user or project id is of 1 to 255 characters')
        try:
            for name, body in bodies.items():
                row = self.rows.get(name)
                generation = body['consumer_generation']
                if (row.generation if row else None) != generation:
                    expected = row.generation if row else 'null'
                    detail = f'consumer generation conflict - expected {expected} but got {generation}'
                    raise Refused(409, detail, CONCURRENT)
                if row is None:
                    row = self.rows[name] = Row(next(self._ids), body['user_id'], body['project_id'])
                    started.created.append(name)
                    self.writes += 1
                started.rows[name] = row.id, row.generation
        except Refused:
            self._delete_created(started)
            raise
        return started

    def finish(self, started: StartedWrite) -> None:
        for body in started.bodies.values():
            for provider in body['allocations']:
                if provider not in self.providers:
                    # The consumers that were created stay, as in the real placement.
                    raise Refused(400, f"Allocation for resource provider '{provider}' that does not exist.")
        try:
            requested = {name: _parse_allocations(body) for name, body in started.bodies.items()}
            self._check(requested)
            for name, (number, generation) in started.rows.items():
                row = self.rows.get(name)
                if not requested[name] and not self.held.get(name):
                    continue
                if row is None or (row.id, row.generation) != (number, generation):
                    raise Refused(409, 'Inventory and/or allocations changed while attempting to allocate', CONCURRENT)
        except Refused:
            self._delete_created(started)
            raise
        self.writes += 1
        for provider in {other for name, held in requested.items() for other in held or self.held.get(name, {})}:
            self.providers[provider].generation += 1
        for name, body in started.bodies.items():
            before = self.held.pop(name, {})
            if requested[name]:
                self.held[name] = requested[name]
                row = self.rows[name]
                row.generation, row.user, row.project = row.generation + 1, body['user_id'], body['project_id']
            elif before:
                del self.rows[name]

    def _check(self, requested: Mapping[str, Allocations]) -> None:
        after = {**self.held, **requested}
        for name in {provider for held in requested.values() for provider in held}:
            for kind in {kind for held in requested.values() for kind in held.get(name, {})}:
                inventory = self.providers[name].inventories.get(kind)
                used, capacity = self.get_usage(name, kind), self.get_capacity(name, kind)
                used_then = sum(held.get(name, {}).get(kind, 0) for held in after.values())
                if inventory is None or (used_then > capacity and used_then > used):
                    raise Refused(409, f'Unable to allocate inventory: no {kind} on {name} for so much')
                amounts = [held.get(name, {}).get(kind, 0) for held in requested.values()]
                if not all(_is_valid_amount(inventory, amount) for amount in amounts if amount):
                    raise Refused(409, f'Unable to allocate inventory: so much {kind} is not given on {name}')

    def _delete_created(self, started: StartedWrite) -> None:
        for name in started.created:
            row = self.rows.get(name)
            if row is not None and row.id == started.rows[name][0]:
                del self.rows[name]
                self.writes += 1

    # Requests

    def get(self, path: str) -> Json:
        resource, _, query = path.partition('?')
        parts = resource.strip('/').split('/')
        parameters = parse_qsl(query, keep_blank_values=True)
        if parts[0] == 'allocations':
            return self._show_consumer(parts[1])
        if parts[0] == 'allocation_candidates':
            return self._list_candidates(parameters)
        if parts[0] == 'usages':
            return self._sum_project_usage(dict(parameters)['project_id'])
        if parts[0] == 'resource_classes':
            return {'resource_classes': [{'name': name} for name in os_resource_classes.STANDARDS]}
        if parts[0] == 'traits':
            names = dict(parameters).get('name')
            traits = names.removeprefix('in:').split(',') if names else sorted(_STANDARD_TRAITS | self.custom)
            return {'traits': [trait for trait in traits if self._is_known(trait)]}
        if len(parts) == 1:
            providers = [name for name in self.providers if self._matches(name, parameters)]
            return {'resource_providers': [self._summarize_provider(name) for name in providers]}
        provider = self._get_provider(parts[1])
        generation = {'resource_provider_generation': provider.generation}
        if len(parts) == 2:
            return self._summarize_provider(parts[1])
        if parts[2] == 'inventories':
            return {'inventories': {name: dict(fields) for name, fields in provider.inventories.items()}, **generation}
        if parts[2] == 'usages':
            return {'usages': {name: self.get_usage(parts[1], name) for name in provider.inventories}, **generation}
        if parts[2] == 'allocations':
            held = {
                name: {'resources': dict(allocated[parts[1]]), 'consumer_generation': self.rows[name].generation}
                for name, allocated in self.held.items()
                if parts[1] in allocated and name in self.rows
            }
            return {'allocations': held, **generation}
        return {parts[2]: sorted(getattr(provider, parts[2])), **generation}

    def write(self, method: str, path: str, body: Json | None) -> None:
        parts = path.strip('/').split('/')
        if parts[0] == 'traits':
            self.custom.add(parts[1])
            self.writes += 1
            return
        if method == 'POST':
            assert body is not None
            if body['uuid'] in self.providers or body['name'] in {other.name for other in self.providers.values()}:
                raise Refused(409, f'Conflicting resource provider {body["name"]} already exists.', DUPLICATE)
            self.providers[body['uuid']] = Provider(body['name'])
            self.writes += 1
            return
        provider = self._get_provider(parts[1])
        if method == 'DELETE' and len(parts) > 2:
            self._set_part(parts[1], parts[2], {})
            provider.generation += 1
        elif method == 'DELETE':
            if any(parts[1] in held for held in self.held.values()):
                raise Refused(409, f'Unable to delete resource provider {parts[1]}: it has allocations', IN_USE)
            del self.providers[parts[1]]
        else:
            assert body is not None
            if body['resource_provider_generation'] != provider.generation:
                raise Refused(409, 'resource provider generation conflict', CONCURRENT)
            before = provider.traits
            self._set_part(parts[1], parts[2], body[parts[2]])
            provider.generation += parts[2] != 'traits' or provider.traits != before
        self.writes += 1

    def _set_part(self, name: str, part: str, value: Any) -> None:
        provider = self.providers[name]
        if part == 'inventories':
            new = {kind: {**_INVENTORY_DEFAULTS, **fields} for kind, fields in value.items()}
            if any(fields['reserved'] > fields['total'] for fields in new.values()):
                raise Refused(400, 'Unable to update inventory: reserved is more than there is')
            if any(self.get_usage(name, kind) for kind in provider.inventories.keys() - new.keys()):
                raise Refused(409, 'update conflict: Inventory is in use', 'placement.inventory.inuse')
            provider.inventories = new
            return
        unknown = [trait for trait in value if part == 'traits' and not self._is_known(trait)]
        if unknown:
            raise Refused(400, f'No such trait {", ".join(unknown)}')
        setattr(provider, part, frozenset(value))

    def _get_provider(self, name: str) -> Provider:
        if name not in self.providers:
            raise Refused(404, f'No resource provider with uuid {name} found')
        return self.providers[name]

    def _show_consumer(self, name: str) -> Json:
        held, row = self.held.get(name), self.rows.get(name)
        if not held or row is None:
            return {'allocations': {}}
        allocations = {
            provider: {'resources': dict(resources), 'generation': self.providers[provider].generation}
            for provider, resources in held.items()
        }
        owner = {'project_id': row.project, 'user_id': row.user, 'consumer_type': 'INSTANCE'}
        return {'allocations': allocations, 'consumer_generation': row.generation, **owner}

    def _list_candidates(self, parameters: list[tuple[str, str]]) -> Json:
        # Without trees, the groups of a granular request are on the same provider.
        parameters = [(re.sub(r'_?\d+$', '', key), value) for key, value in parameters]
        roots = [(key, value) for key, value in parameters if key == 'root_required']
        if roots and not any(self._matches(name, roots) for name in self.providers):
            return {'allocation_requests': [], 'provider_summaries': {}}  # before it looks at the rest
        resources: dict[str, int] = {}
        for tree in [value for key, value in parameters if key == 'in_tree' and not _UUID.fullmatch(value)]:
            detail = f"Expected 'in_tree' parameter to be a format of uuid. Got: {tree}"
            raise Refused(400, f'Invalid query string parameters: {detail}')
        for value in [value for key, value in parameters if key == 'resources']:
            for kind, amount in _parse_amounts(value).items():
                if kind not in os_resource_classes.STANDARDS:
                    raise Refused(400, f'Invalid resource class in resources parameter: No such resource class {kind}.')
                resources[kind] = resources.get(kind, 0) + amount
        providers = [
            name for name in self.providers if self._matches(name, parameters) and self._has_room(name, resources)
        ]
        limit = int(dict(parameters).get('limit', 0)) or None
        requests = [
            {'allocations': {name: {'resources': resources}}, 'mappings': {'': [name]}} for name in providers[:limit]
        ]
        return {
            'allocation_requests': requests,
            'provider_summaries': {
                name: {
                    'resources': {
                        kind: {'capacity': self.get_capacity(name, kind), 'used': self.get_usage(name, kind)}
                        for kind in self.providers[name].inventories
                    },
                    'traits': sorted(self.providers[name].traits),
                }
                for name in providers[:limit]
            },
        }

    def _sum_project_usage(self, project: str) -> Json:
        total: dict[str, int] = {}
        for name, held in self.held.items():
            if name in self.rows and self.rows[name].project == project:
                total['consumer_count'] = total.get('consumer_count', 0) + 1
                for resources in held.values():
                    for kind, amount in resources.items():
                        total[kind] = total.get(kind, 0) + amount
        return {'usages': {'INSTANCE': total} if total else {}}

    def _summarize_provider(self, name: str) -> Json:
        provider = self.providers[name]
        tree = {'root_provider_uuid': name, 'parent_provider_uuid': None}
        return {'uuid': name, 'name': provider.name, 'generation': provider.generation, **tree}

    def _matches(self, name: str, parameters: list[tuple[str, str]]) -> bool:
        results = [
            self._matches_parameter(name, key, value) for key, value in parameters
        ]  # no short cut: each parameter may be refused
        return all(results)

    def _matches_parameter(self, name: str, key: str, value: str) -> bool:
        provider = self.providers[name]
        if key == 'resources':
            return all(self._can_allocate(name, kind, amount) for kind, amount in _parse_amounts(value).items())
        if key in ('required', 'root_required'):
            traits = value.removeprefix('in:').split(',')
            unknown = [trait for trait in traits if not self._is_known(trait.lstrip('!'))]
            if unknown:
                raise Refused(400, f'No such trait(s): {", ".join(unknown)}.')
            if value.startswith('in:'):
                return not provider.traits.isdisjoint(traits)
            return all((trait.lstrip('!') in provider.traits) == (trait[0] != '!') for trait in traits)
        if key == 'member_of':
            aggregates = set(value.lstrip('!').removeprefix('in:').split(','))
            return provider.aggregates.isdisjoint(aggregates) == value.startswith('!')
        return {'in_tree': name, 'uuid': name, 'name': provider.name}.get(key, value) == value

    def _has_room(self, name: str, resources: Mapping[str, int]) -> bool:
        """Return whether a provider has all of these, which may be the sums of several groups."""
        return all(
            self.get_usage(name, kind) + amount <= self.get_capacity(name, kind)
            and amount <= self.providers[name].inventories[kind]['max_unit']
            for kind, amount in resources.items()
        )

    def _can_allocate(self, name: str, kind: str, amount: int) -> bool:
        inventory = self.providers[name].inventories.get(kind)
        if inventory is None or self.get_usage(name, kind) + amount > self.get_capacity(name, kind):
            return False
        return _is_valid_amount(inventory, amount)

    def _is_known(self, trait: str) -> bool:
        return trait in self.custom or trait in _STANDARD_TRAITS

    def make_fingerprint(self) -> int:
        if self._fingerprint[0] != self.writes:
            rows = sorted((name, row.generation, row.user, row.project) for name, row in self.rows.items())
            self._fingerprint = (
                self.writes,
                hash(repr((rows, sorted(self.held.items()), sorted(self.providers.items())))),
            )
        return self._fingerprint[1]


def answer_request(model: PlacementModel, method: str, path: str, body: Json | None) -> tuple[int, Json | None]:
    try:
        if path == '/':
            return 200, {'versions': [{'id': 'v1.0', 'max_version': '1.39', 'min_version': '1.0'}]}
        if method == 'GET':
            return 200, model.get(path)
        if not path.startswith('/allocations'):
            model.write(method, path, body)
            return 200, {'resource_provider_generation': 0}
        consumer = path.rsplit('/', 1)[-1]
        if method == 'DELETE':
            # Only tests do this; ecomp releases a claim as it was read.
            before = model.get(path)
            if not before['allocations']:
                raise Refused(404, f'No allocations for consumer {consumer}')
            body = {**before, 'allocations': {}}
        bodies = body if method == 'POST' else {consumer: body}
        model.finish(model.begin(bodies))  # type: ignore[arg-type]
        return 204, None
    except Refused as refusal:
        return refusal.answer


_UUID = re.compile('[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}', re.IGNORECASE)
_INVENTORY_DEFAULTS = {'reserved': 0, 'min_unit': 1, 'max_unit': MAX_INT, 'step_size': 1, 'allocation_ratio': 1.0}
_STANDARD_TRAITS = frozenset(os_traits.get_traits())


def _is_valid_amount(inventory: Json, amount: int) -> bool:
    return inventory['min_unit'] <= amount <= inventory['max_unit'] and not amount % inventory['step_size']


def _parse_allocations(body: Json) -> Allocations:
    return {provider: dict(allocation['resources']) for provider, allocation in body['allocations'].items()}


def _parse_amounts(value: str) -> dict[str, int]:
    return {name: int(amount) for name, _, amount in (pair.partition(':') for pair in value.split(','))}
