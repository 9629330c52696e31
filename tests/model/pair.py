"""Random calls, made both to a real placement and to the model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from ecomp.placement.client import Placement
from tests.model.alike import format_difference, get_answer, make_random_uuid
from tests.model.placement_client import ModelPlacement

TRAITS = ['COMPUTE_STATUS_DISABLED', 'HW_CPU_X86_AVX', 'CUSTOM_NOBODY_HAS']


@dataclass
class PlacementPair:
    """A real placement and the model, which get the same calls."""

    real: Placement
    model: ModelPlacement
    rng: random.Random
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.providers = [make_random_uuid() for _ in range(2)]
        self.consumers = [make_random_uuid() for _ in range(3)]
        self.projects = [make_random_uuid() for _ in range(2)]
        self.aggregates = [make_random_uuid() for _ in range(2)]
        for provider in self.providers:
            self.write('POST', '/resource_providers', {'uuid': provider, 'name': provider})
            self.write('PUT', f'/resource_providers/{provider}/inventories', self.make_inventory(provider))

    def step(self) -> None:
        """Make one call to both; after a write also compare what both hold."""
        writes = [*[self.claim] * 4, self.claim_set, self.release, self.change, self.change]
        if self.rng.random() < 0.4:
            self.read(self.rng.choice(self.list_paths()))
            return
        self.rng.choice(writes)()
        for consumer in self.consumers:
            self.read(f'/allocations/{consumer}')
        for provider in self.providers:
            self.read(f'/resource_providers/{provider}/usages')

    def list_paths(self) -> list[str]:
        provider_paths = [
            f'/resource_providers/{provider}{part}'
            for provider in self.providers
            for part in ('', '/inventories', '/usages', '/allocations', '/traits', '/aggregates')
        ]
        trait = self.rng.choice(TRAITS)
        tree, aggregate = self.rng.choice(self.providers), self.rng.choice(self.aggregates)
        queries = [
            *(f'required={trait}', f'required=!{trait}', f'member_of={aggregate}', f'member_of=!{aggregate}'),
            *(f'required=in:{trait},HW_CPU_X86_SSE', f'member_of=in:{aggregate},{make_random_uuid()}', ''),
        ]
        extra = self.rng.choice([*queries, f'root_required=!{trait}'])
        query = f'resources=VCPU:{self.rng.randint(1, 3)},DISK_GB:1&in_tree={tree}&{extra}'.rstrip('&')
        return [
            *provider_paths,
            *(f'/resource_providers?in_tree={tree}&{self.rng.choice(queries)}'.rstrip('&') for _ in range(3)),
            f'/resource_providers?in_tree={tree}&resources=VCPU:{self.rng.randint(1, 4)}',
            *[f'/allocation_candidates?{query}'] * 4,
            f'/allocation_candidates?{query}&resources1=VCPU:1',
            f'/allocation_candidates?{query}&resources_1=VCPU:1&resources_2=VCPU:1&group_policy=none&in_tree_2={tree}',
            f'/allocation_candidates?resources=NO_SUCH_CLASS:1&root_required=!{trait}',
            *('/allocation_candidates?resources=NO_SUCH_CLASS:1', '/allocation_candidates?resources=VCPU:1&in_tree=x'),
            f'/usages?project_id={self.rng.choice(self.projects)}',
            *('/traits', f'/traits?name=in:{",".join(TRAITS)}'),
            '/resource_classes',
        ]

    def make_allocation(self, empty_share: float = 0.1) -> dict[str, Any]:
        """Return a random allocation; its provider may be missing or lack the capacity."""
        provider = self.rng.choice([*self.providers * 4, make_random_uuid()])
        sizes = {'VCPU': self.rng.randint(1, 3), **({'DISK_GB': 1} if self.rng.random() < 0.5 else {})}
        generation = self.rng.choice([None, None, 0, 1, 2])
        allocations = (
            {} if generation is not None and self.rng.random() < empty_share else {provider: {'resources': sizes}}
        )
        return {
            'allocations': allocations,
            'user_id': 'u',
            'project_id': self.rng.choice(self.projects),
            'consumer_generation': generation,
            'consumer_type': 'INSTANCE',
        }

    def claim(self) -> None:
        consumer, body = self.rng.choice(self.consumers), self.make_allocation()
        if self.rng.random() < 0.6 and body['allocations']:
            body['consumer_generation'] = self.read_generation(consumer)
        self.write('PUT', f'/allocations/{consumer}', body)

    def claim_set(self) -> None:
        bodies = {}
        for consumer in self.rng.sample(self.consumers, self.rng.randint(2, 3)):
            bodies[consumer] = self.make_allocation()
            if self.rng.random() < 0.9 and bodies[consumer]['allocations']:
                bodies[consumer]['consumer_generation'] = self.read_generation(consumer)
        self.write('POST', '/allocations', bodies)

    def release(self) -> None:
        consumer = self.rng.choice(self.consumers)
        generation = self.read_generation(consumer)
        if generation is not None:
            body = {**self.make_allocation(), 'allocations': {}, 'consumer_generation': generation}
            self.write('PUT', f'/allocations/{consumer}', body)

    def change(self) -> None:
        """Change the inventory, traits or aggregates of a provider, or delete and recreate it."""
        provider = self.rng.choice(self.providers)
        part = self.rng.choice(['inventories', 'inventories', 'no inventories', 'traits', 'aggregates', 'delete'])
        path = f'/resource_providers/{provider}'
        if part == 'delete':
            self.write('DELETE', path, None)
            self.write('POST', '/resource_providers', {'uuid': provider, 'name': provider})
            return
        if part == 'no inventories':
            self.write('DELETE', f'{path}/inventories', None)
            return
        body = {
            'inventories': lambda: self.make_inventory(provider),
            'traits': lambda: self.make_name_list(provider, 'traits', TRAITS),
            'aggregates': lambda: self.make_name_list(provider, 'aggregates', self.aggregates),
        }[part]()
        self.write('PUT', f'{path}/{part}', body)

    def make_inventory(self, provider: str) -> dict[str, Any]:
        total = self.rng.randint(2, 5)
        vcpu = {'total': total, 'reserved': self.rng.choice([0, 0, 0, 1, total, total + 1])}
        disk = {'total': 2, 'allocation_ratio': 1.5}
        disks: list[dict[str, Any]] = [{}, {'DISK_GB': disk}, {'DISK_GB': {'total': 4}}]
        disk_inventory = self.rng.choice(disks)
        inventories: dict[str, Any] = {'VCPU': vcpu, **disk_inventory}
        return {**self.make_generation(provider), 'inventories': inventories}

    def make_name_list(self, provider: str, part: str, choices: list[str]) -> dict[str, Any]:
        return {**self.make_generation(provider), part: [value for value in choices if self.rng.random() < 0.4]}

    def make_generation(self, provider: str) -> dict[str, int]:
        """Return the provider's generation, sometimes a wrong one."""
        summary = get_answer(lambda real: real.get(f'/resource_providers/{provider}'), self.real)
        generation = summary['generation'] if isinstance(summary, dict) else 0
        return {'resource_provider_generation': generation + (self.rng.random() < 0.1)}

    def read_generation(self, consumer: str) -> int | None:
        return self.real.get(f'/allocations/{consumer}').get('consumer_generation')

    def read(self, path: str) -> None:
        self.calls.append(f'GET {path}')
        real, model = (
            normalize_answer(get_answer(lambda each: each.get(path), client)) for client in (self.real, self.model)
        )
        assert real == model, format_difference(self.calls, real, model)

    def write(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        self.calls.append(f'{method} {path} {body}')
        real, model = (
            get_answer(lambda each: each.write(method, path, body), client) for client in (self.real, self.model)
        )
        assert real == model, format_difference(self.calls, real, model)
        self.calls[-1] += f': {real or "done"}'


# Fields that the product never reads.
UNREAD_FIELDS = {'links', 'mappings', 'consumer_type'}


def normalize_answer(answer: object) -> object:
    """Return the part of an answer that the product reads, in a canonical order."""
    if isinstance(answer, dict):
        fields = {name: normalize_answer(part) for name, part in answer.items() if name not in UNREAD_FIELDS}
        if 'capacity' not in fields and {'resources', 'traits'} <= fields.keys():
            return {'resources': fields['resources']}  # a provider summary
        return fields
    if isinstance(answer, list):
        return sorted(map(normalize_answer, answer), key=repr)
    return answer
