"""Calls of placement by chance, made of the real one and of the model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from ecomp.placement.client import Placement
from tests.model.alike import answer, differ, fresh
from tests.model.placement_client import ModelPlacement

TRAITS = ['COMPUTE_STATUS_DISABLED', 'HW_CPU_X86_AVX', 'CUSTOM_NOBODY_HAS']


@dataclass
class Pair:
    """A real placement and the model's, asked the same."""

    real: Placement
    model: ModelPlacement
    rng: random.Random
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.providers = [fresh() for _ in range(2)]
        self.consumers = [fresh() for _ in range(3)]
        self.projects = [fresh() for _ in range(2)]
        self.aggregates = [fresh() for _ in range(2)]
        for each in self.providers:
            self.write('POST', '/resource_providers', {'uuid': each, 'name': each})
            self.write('PUT', f'/resource_providers/{each}/inventories', self.inventory(each))

    def step(self) -> None:
        """One call to both, and what stands in them after one that writes."""
        writes = [*[self.claim] * 4, self.claim_set, self.release, self.change]
        if self.rng.random() < 0.4:
            self.read(self.rng.choice(self.paths()))
            return
        self.rng.choice(writes)()
        for each in self.consumers:
            self.read(f'/allocations/{each}')
        for each in self.providers:
            self.read(f'/resource_providers/{each}/usages')

    def paths(self) -> list[str]:
        of_one = [
            f'/resource_providers/{each}{part}'
            for each in self.providers
            for part in ('', '/inventories', '/usages', '/allocations', '/traits', '/aggregates')
        ]
        trait = self.rng.choice(TRAITS)
        tree, near = self.rng.choice(self.providers), self.rng.choice(self.aggregates)
        queries = [
            *(f'required={trait}', f'required=!{trait}', f'member_of={near}', f'member_of=!{near}'),
            *(f'required=in:{trait},HW_CPU_X86_SSE', f'member_of=in:{near},{fresh()}', ''),
        ]
        also = self.rng.choice([*queries, f'root_required=!{trait}'])
        asked = f'resources=VCPU:{self.rng.randint(1, 3)},DISK_GB:1&in_tree={tree}&{also}'.rstrip('&')
        return [
            *of_one,
            *(f'/resource_providers?in_tree={tree}&{self.rng.choice(queries)}'.rstrip('&') for _ in range(3)),
            *[f'/allocation_candidates?{asked}'] * 4,
            f'/usages?project_id={self.rng.choice(self.projects)}',
            f'/traits?name=in:{",".join(TRAITS)}',
        ]

    def body(self, empty: float = 0.1) -> dict[str, Any]:
        """What a consumer is to hold; its provider may not be there, or not have so much."""
        provider = self.rng.choice([*self.providers * 4, fresh()])
        sizes = {'VCPU': self.rng.randint(1, 3), **({'DISK_GB': 1} if self.rng.random() < 0.5 else {})}
        generation = self.rng.choice([None, None, 0, 1, 2])
        held = {} if generation is not None and self.rng.random() < empty else {provider: {'resources': sizes}}
        return {
            'allocations': held,
            'user_id': 'u',
            'project_id': self.rng.choice(self.projects),
            'consumer_generation': generation,
            'consumer_type': 'INSTANCE',
        }

    def claim(self) -> None:
        consumer, body = self.rng.choice(self.consumers), self.body()
        if self.rng.random() < 0.6 and body['allocations']:
            body['consumer_generation'] = self.generation(consumer)
        self.write('PUT', f'/allocations/{consumer}', body)

    def claim_set(self) -> None:
        bodies = {}
        for consumer in self.rng.sample(self.consumers, self.rng.randint(2, 3)):
            bodies[consumer] = self.body()
            if self.rng.random() < 0.9 and bodies[consumer]['allocations']:
                bodies[consumer]['consumer_generation'] = self.generation(consumer)
        self.write('POST', '/allocations', bodies)

    def release(self) -> None:
        consumer = self.rng.choice(self.consumers)
        generation = self.generation(consumer)
        if generation is not None:
            body = {**self.body(), 'allocations': {}, 'consumer_generation': generation}
            self.write('PUT', f'/allocations/{consumer}', body)

    def change(self) -> None:
        """A provider: its inventory, traits or aggregates; or it goes, and comes back."""
        provider = self.rng.choice(self.providers)
        part = self.rng.choice(['inventories', 'traits', 'aggregates', 'delete'])
        path = f'/resource_providers/{provider}'
        if part == 'delete':
            self.write('DELETE', path, None)
            self.write('POST', '/resource_providers', {'uuid': provider, 'name': provider})
            return
        body = {
            'inventories': lambda: self.inventory(provider),
            'traits': lambda: self.named(provider, 'traits', TRAITS),
            'aggregates': lambda: self.named(provider, 'aggregates', self.aggregates),
        }[part]()
        self.write('PUT', f'{path}/{part}', body)

    def inventory(self, provider: str) -> dict[str, Any]:
        total = self.rng.randint(2, 5)
        vcpu = {'total': total, 'reserved': self.rng.choice([0, 0, 0, 1, total, total + 1])}
        disk = {'total': 2, 'allocation_ratio': 1.5}
        disks: list[dict[str, Any]] = [{}, {'DISK_GB': disk}, {'DISK_GB': {'total': 4}}]
        more = self.rng.choice(disks)
        inventories: dict[str, Any] = {'VCPU': vcpu, **more}
        return {**self.known(provider), 'inventories': inventories}

    def named(self, provider: str, part: str, of: list[str]) -> dict[str, Any]:
        return {**self.known(provider), part: [each for each in of if self.rng.random() < 0.4]}

    def known(self, provider: str) -> dict[str, int]:
        """The provider's generation, or a wrong one."""
        found = answer(lambda real: real.get(f'/resource_providers/{provider}'), self.real)
        generation = found['generation'] if isinstance(found, dict) else 0
        return {'resource_provider_generation': generation + (self.rng.random() < 0.1)}

    def generation(self, consumer: str) -> int | None:
        return self.real.get(f'/allocations/{consumer}').get('consumer_generation')

    def read(self, path: str) -> None:
        self.calls.append(f'GET {path}')
        real, model = (plain(answer(lambda each: each.get(path), of)) for of in (self.real, self.model))
        assert real == model, differ(self.calls, real, model)

    def write(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        self.calls.append(f'{method} {path} {body}')
        real, model = (answer(lambda each: each.write(method, path, body), of) for of in (self.real, self.model))
        assert real == model, differ(self.calls, real, model)
        self.calls[-1] += f': {real or "done"}'


DROPPED = {'links', 'mappings', 'consumer_type'}
"""What the product never looks at."""


def plain(found: object) -> object:
    """An answer as far as the product looks at it, in an order of its own."""
    if isinstance(found, dict):
        kept = {name: plain(each) for name, each in found.items() if name not in DROPPED}
        if 'capacity' not in kept and {'resources', 'traits'} <= kept.keys():
            return {'resources': kept['resources']}  # of a summary
        return kept
    if isinstance(found, list):
        return sorted(map(plain, found), key=repr)
    return found
