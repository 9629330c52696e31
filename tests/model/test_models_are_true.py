"""etcd and placement in memory, held against the real ones: the same calls, by chance, and the same answers.

A number is told in both worlds by what it was the answer to: revisions and leases of two etcds differ, and mean the
same.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Entry, Exists, Fence, Put, Snapshot, Store, Unchanged
from tests.kit.in_process import start
from tests.kit.servers import Etcd
from tests.model.etcd import Etcd as EtcdModel
from tests.model.etcd import ModelStore
from tests.model.explorer import Follow
from tests.model.placement import ModelPlacement, PlacementModel
from tests.model.world import Bounds, World

STEPS, MANY = 1_000, 25_000
"""On each of the two, always and with --all."""
LENGTH = 50
"""Calls of one sequence, with names of its own."""

Ask = Callable[[Any], object]


@pytest.fixture
def world() -> World:
    return World(Bounds(), Follow())


def fresh() -> str:
    """A uuid of nobody's."""
    return str(uuid.uuid4())


def answer(ask: Ask, of: object) -> object:
    """What it says, or which error."""
    try:
        return ask(of)
    except EcompError as error:
        return type(error).__name__


def differ(calls: Sequence[str], real: object, model: object) -> str:
    """The sequence, and where it ends differently."""
    return '\n'.join([*calls, f'really: {real}', f'model:  {model}'])


# etcd


@dataclass
class Twins:
    """A real store and the model's, and what numbers of the one are in the other: a call is made of (real, model)."""

    real: Store
    model: ModelStore
    prefix: str
    rng: random.Random
    revisions: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    leases: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    calls: list[str] = field(default_factory=list)

    def key(self) -> str:
        """One of few, two of which begin alike."""
        return self.prefix + self.rng.choice(['a', 'a/1', 'ab', 'b', 'c'])

    def step(self) -> None:
        """One call to both."""
        ask = self.rng.choice([self.read, self.list_, self.list_, self.count, *[self.commit] * 4, self.grant, self.end])
        ask()

    def same(self, what: str, real: Ask, model: Ask) -> tuple[object, object]:
        """Ask both; AssertionError where the answers do not mean the same."""
        self.calls.append(what)
        both = answer(real, self.real), answer(model, self.model)
        if isinstance(both[0], int) and isinstance(both[1], int) and what.startswith('commit'):
            self.revisions.append((both[0], both[1]))
        meant = self.meaning(both[0], 0), self.meaning(both[1], 1)
        assert meant[0] == meant[1], differ(self.calls, *meant)
        return both

    def meaning(self, found: object, which: int) -> object:
        """The answer, with numbers that are the same in both."""
        if isinstance(found, Entry):
            revision = [each[which] for each in self.revisions].index(found.revision)
            lease = [each[which] for each in self.leases].index(found.lease)
            return found.key, found.value, revision, lease
        if isinstance(found, Snapshot):
            return [self.meaning(each, which) for each in found.entries.values()]
        return 'a number' if isinstance(found, int) else found

    def read(self) -> None:
        """One key."""
        key = self.key()
        self.same(f'get {key}', lambda store: store.get(key), lambda store: store.get(key))

    def list_(self) -> None:
        """A prefix, now or at a revision."""
        prefix, keys_only = self.rng.choice([self.prefix, self.prefix + 'a']), self.rng.random() < 0.3
        at = self.rng.choice([(0, 0), (0, 0), self.rng.choice(self.revisions)])
        what = f'list {prefix} at {at}'
        asks = [lambda store, at=each: store.snapshot(prefix, keys_only, at) for each in at]
        self.same(what, *asks)

    def count(self) -> None:
        """How many there are."""
        self.calls.append('count')
        real, model = self.real.count(self.prefix), self.model.count(self.prefix)
        assert real == model, differ(self.calls, real, model)

    def commit(self) -> None:
        """A transaction, of which a condition may not hold, a lease be gone, or a key be there twice."""
        pairs = [self.condition() for _ in range(self.rng.randint(0, 2))]
        operations = [self.operation() for _ in range(self.rng.randint(1, 3))]
        what = f'commit if {pairs}: {operations}'
        asks = [
            lambda store, which=which: store.commit(
                [each[which] for each in pairs], [each[which] for each in operations]
            )
            for which in (0, 1)
        ]
        self.same(what, *asks)

    def condition(self) -> tuple[Unchanged | Exists, Unchanged | Exists]:
        """Mostly one that holds."""
        key = self.key()
        if self.rng.random() < 0.2:
            return Exists(key), Exists(key)
        entry = self.model.get(key)
        now = [each[1] for each in self.revisions].index(entry.revision if entry else 0)
        real, model = self.revisions[now] if self.rng.random() < 0.8 else self.rng.choice(self.revisions)
        return Unchanged(key, real), Unchanged(key, model)

    def operation(self) -> tuple[Put | Delete, Put | Delete]:
        """A put, on a lease perhaps, or a delete."""
        key = self.key()
        if self.rng.random() < 0.3:
            return Delete(key), Delete(key)
        real, model = self.rng.choice([(0, 0), self.rng.choice(self.leases)])
        value = str(self.rng.randint(0, 9))
        return Put(key, value, real), Put(key, value, model)

    def grant(self) -> None:
        """A lease."""
        self.leases.append((self.real.grant(600), self.model.grant(600)))
        self.calls.append(f'grant: {self.leases[-1]}')

    def end(self) -> None:
        """One of the leases ends; one that has ended is fine, and is not kept."""
        both = self.rng.choice(self.leases[1:] or [(0, 0)])
        if not both[0]:
            return
        asks = [lambda store, lease=each: store.revoke(lease) for each in both]
        self.same(f'revoke {both}', *asks)
        self.calls.append('keep alive')
        assert self.real.keep_alive(both[0]) == self.model.keep_alive(both[1]) == 0


def run_etcd(etcd: Etcd, world: World, steps: int, seed: int) -> None:
    """So many calls."""
    store = Store(EtcdConfig((etcd.endpoint,)))
    try:
        for number in range(steps // LENGTH):
            rng = random.Random(f'{seed} {number}')
            twins = Twins(store, ModelStore(EtcdModel(world)), f'/twins/{fresh()}/', rng)
            for _ in range(LENGTH):
                twins.step()
    finally:
        store.close()


def test_etcd_answers_as_the_model(etcd: Etcd, world: World) -> None:
    run_etcd(etcd, world, STEPS, 1)


@pytest.mark.slow
def test_etcd_answers_as_the_model_for_long(etcd: Etcd, world: World) -> None:
    run_etcd(etcd, world, MANY, 2)


def test_a_fence_holds_in_both(etcd: Etcd, world: World) -> None:
    real, model = Store(EtcdConfig((etcd.endpoint,))), ModelStore(EtcdModel(world))
    told: list[str] = []
    prefix = f'/twins/{fresh()}/'
    try:
        answers: list[list[object]] = [[], []]
        for store, said in zip((real, model), answers, strict=True):
            written = store.commit([], [Put(f'{prefix}me', 'x')])
            assert written
            store.fence = Fence(Unchanged(f'{prefix}me', written), lambda: told.append('broken'))
            said.append(answer(lambda each: each.commit([], [Put(f'{prefix}a', '1')]) is not None, store))
            said.append(answer(lambda each: each.commit([Unchanged(f'{prefix}b', 7)], [Put(f'{prefix}a', '2')]), store))
            store.commit([], [Delete(f'{prefix}me')], fenced=False)
            said.append(answer(lambda each: each.commit([], [Put(f'{prefix}a', '3')]), store))
            said.append(store.get(f'{prefix}a').value)  # type: ignore[union-attr]
        assert answers[0] == answers[1] == [True, None, 'Unreachable', b'1']
        assert set(told) == {'broken'}
    finally:
        real.close()


# placement


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
        """What may be read."""
        of_one = [
            f'/resource_providers/{each}{part}'
            for each in self.providers
            for part in ('', '/inventories', '/usages', '/allocations', '/traits', '/aggregates')
        ]
        trait = self.rng.choice(['COMPUTE_STATUS_DISABLED', 'HW_CPU_X86_AVX', 'CUSTOM_NOBODY_HAS'])
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
            '/traits?name=in:COMPUTE_STATUS_DISABLED,HW_CPU_X86_AVX,CUSTOM_NOBODY_HAS',
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
        """One, mostly with the generation that is right."""
        consumer, body = self.rng.choice(self.consumers), self.body()
        if self.rng.random() < 0.6 and body['allocations']:
            body['consumer_generation'] = self.generation(consumer)
        self.write('PUT', f'/allocations/{consumer}', body)

    def claim_set(self) -> None:
        """Two or three at once."""
        bodies = {}
        for consumer in self.rng.sample(self.consumers, self.rng.randint(2, 3)):
            bodies[consumer] = self.body()
            if self.rng.random() < 0.9 and bodies[consumer]['allocations']:
                bodies[consumer]['consumer_generation'] = self.generation(consumer)
        self.write('POST', '/allocations', bodies)

    def release(self) -> None:
        """What one holds."""
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
            'traits': lambda: self.named(provider, 'traits', ['COMPUTE_STATUS_DISABLED', 'HW_CPU_X86_AVX', 'CUSTOM_NO']),
            'aggregates': lambda: self.named(provider, 'aggregates', self.aggregates),
        }[part]()
        self.write('PUT', f'{path}/{part}', body)

    def inventory(self, provider: str) -> dict[str, Any]:
        """With all its parts, or some."""
        total = self.rng.randint(2, 5)
        vcpu = {'total': total, 'reserved': self.rng.choice([0, 0, 0, 1, total, total + 1])}
        more = self.rng.choice([{}, {'DISK_GB': {'total': 2, 'allocation_ratio': 1.5}}, {'DISK_GB': {'total': 4}}])
        return {**self.known(provider), 'inventories': {'VCPU': vcpu, **more}}

    def named(self, provider: str, part: str, of: list[str]) -> dict[str, Any]:
        """Some traits or aggregates."""
        return {**self.known(provider), part: [each for each in of if self.rng.random() < 0.4]}

    def known(self, provider: str) -> dict[str, int]:
        """The provider's generation, or a wrong one."""
        found = answer(lambda real: real.get(f'/resource_providers/{provider}'), self.real)
        generation = found['generation'] if isinstance(found, dict) else 0
        return {'resource_provider_generation': generation + (self.rng.random() < 0.1)}

    def generation(self, consumer: str) -> int | None:
        """The consumer's, as placement tells it."""
        return self.real.get(f'/allocations/{consumer}').get('consumer_generation')

    def read(self, path: str) -> None:
        """The same answer."""
        self.calls.append(f'GET {path}')
        real, model = (plain(answer(lambda each: each.get(path), of)) for of in (self.real, self.model))
        assert real == model, differ(self.calls, real, model)

    def write(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        """The same outcome."""
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


def run_placement(client: Placement, world: World, steps: int, seed: int) -> None:
    """So many calls."""
    calls = number = 0
    while calls < steps:
        number += 1
        pair = Pair(client, ModelPlacement(PlacementModel(world), world), random.Random(f'{seed} {number}'))
        for _ in range(LENGTH // 4):
            pair.step()
        calls += len(pair.calls)


@pytest.fixture(scope='module')
def in_process() -> Placement:
    """The real one, in this process: a server of its own would take ten times as long."""
    pytest.importorskip('placement', reason="openstack-placement is not installed: pip install '.[lab]'")
    return start()


def test_placement_answers_as_the_model(in_process: Placement, world: World) -> None:
    run_placement(in_process, world, STEPS, 1)


@pytest.mark.slow
def test_placement_answers_as_the_model_for_long(in_process: Placement, world: World) -> None:
    run_placement(in_process, world, MANY, 2)
