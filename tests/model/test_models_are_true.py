"""Compare etcd and placement in memory with the real ones: equal calls, equal answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from ecomp.conf import EtcdConfig
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Entry, Exists, Fence, Put, Snapshot, Store, Unchanged
from ecomp.store.http2_client import EtcdMember
from tests.kit.in_process import remove_providers, start_placement
from tests.kit.memory_etcd import Etcd as EtcdModel
from tests.kit.memory_etcd import MemoryMember, NoWorld
from tests.kit.memory_placement import PlacementModel
from tests.kit.servers import Etcd
from tests.model import planting
from tests.model.acting import Bounds
from tests.model.alike import Query, format_difference, get_answer, make_random_uuid
from tests.model.etcd import ModelStore
from tests.model.explorer import RecordingChooser
from tests.model.messages import MemberPair
from tests.model.placement_client import ModelPlacement
from tests.model.planting import Plant, always, drop_statement, never, plant_bugs, replace_assignment, replace_condition
from tests.model.world import World

TRAITS = ['COMPUTE_STATUS_DISABLED', 'HW_CPU_X86_AVX', 'CUSTOM_NOBODY_HAS']


@dataclass
class PlacementPair:
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
        """Return a random allocation. Its provider may be missing or lack the capacity."""
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
    if isinstance(answer, dict):
        fields = {name: normalize_answer(part) for name, part in answer.items() if name not in UNREAD_FIELDS}
        if 'capacity' not in fields and {'resources', 'traits'} <= fields.keys():
            return {'resources': fields['resources']}  # a provider summary
        return fields
    if isinstance(answer, list):
        return sorted(map(normalize_answer, answer), key=repr)
    return answer


@dataclass
class StorePair:
    real: Store
    model: ModelStore
    prefix: str
    rng: random.Random
    revisions: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    leases: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    calls: list[str] = field(default_factory=list)

    def pick_key(self) -> str:
        return self.prefix + self.rng.choice(['a', 'a/1', 'ab', 'b', 'c'])

    def step(self) -> None:
        reads = [self.read, self.list_, self.list_, self.count, self.around]
        ask = self.rng.choice([*reads, *[self.commit] * 4, self.grant, self.revoke])
        ask()

    def compare(self, description: str, real: Query, model: Query) -> tuple[object, object]:
        self.calls.append(description)
        answers = get_answer(real, self.real), get_answer(model, self.model)
        if isinstance(answers[0], int) and isinstance(answers[1], int) and description.startswith('commit'):
            self.revisions.append((answers[0], answers[1]))
        meanings = self.normalize(answers[0], 0), self.normalize(answers[1], 1)
        assert meanings[0] == meanings[1], format_difference(self.calls, *meanings)
        return answers

    def normalize(self, answer: object, which: int) -> object:
        if isinstance(answer, Entry):
            revision = [pair[which] for pair in self.revisions].index(answer.revision)
            lease = [pair[which] for pair in self.leases].index(answer.lease)
            return answer.key, answer.value, revision, lease
        if isinstance(answer, list):
            return [self.normalize(item, which) for item in answer]
        if isinstance(answer, Snapshot):
            return [self.normalize(entry, which) for entry in answer.entries.values()]
        return 'a number' if isinstance(answer, int) else answer

    def read(self) -> None:
        key = self.pick_key()
        self.compare(f'get {key}', lambda store: store.get(key), lambda store: store.get(key))

    def list_(self) -> None:
        prefix, keys_only = self.rng.choice([self.prefix, self.prefix + 'a']), self.rng.random() < 0.3

        def ask(store: Store) -> Snapshot:
            return store.snapshot(prefix, keys_only)

        self.compare(f'list {prefix}', ask, ask)

    def around(self) -> None:
        start, limit = self.pick_key() + self.rng.choice(['', '0']), self.rng.randint(1, 6)

        def ask(store: Store) -> list[object]:
            entries, number = store.sample(self.prefix, start, limit)
            return [*entries, str(number)]

        self.compare(f'around {start}, {limit}', ask, ask)

    def count(self) -> None:
        self.calls.append('count')
        real, model = self.real.count(self.prefix), self.model.count(self.prefix)
        assert real == model, format_difference(self.calls, real, model)

    def commit(self) -> None:
        """Commit a random transaction: a condition may fail, a lease may be missing."""
        pairs = [self.make_condition() for _ in range(self.rng.randint(0, 2))]
        operations = [self.make_operation() for _ in range(self.rng.randint(1, 3))]
        description = f'commit if {pairs}: {operations}'
        asks = [
            lambda store, which=which: store.commit(
                [pair[which] for pair in pairs], [pair[which] for pair in operations]
            )
            for which in (0, 1)
        ]
        self.compare(description, *asks)

    def make_condition(self) -> tuple[Unchanged | Exists, Unchanged | Exists]:
        key = self.pick_key()
        if self.rng.random() < 0.2:
            return Exists(key), Exists(key)
        entry = self.model.get(key)
        index = [pair[1] for pair in self.revisions].index(entry.revision if entry else 0)
        real, model = self.revisions[index] if self.rng.random() < 0.8 else self.rng.choice(self.revisions)
        return Unchanged(key, real), Unchanged(key, model)

    def make_operation(self) -> tuple[Put | Delete, Put | Delete]:
        key = self.pick_key()
        if self.rng.random() < 0.3:
            return Delete(key), Delete(key)
        real, model = self.rng.choice([(0, 0), self.rng.choice(self.leases)])
        value = str(self.rng.randint(0, 9))
        return Put(key, value, real), Put(key, value, model)

    def grant(self) -> None:
        self.leases.append((self.real.grant(600), self.model.grant(600)))
        self.calls.append(f'grant: {self.leases[-1]}')

    def revoke(self) -> None:
        leases = self.rng.choice(self.leases[1:] or [(0, 0)])
        if not leases[0]:
            return
        asks = [lambda store, lease=number: store.revoke(lease) for number in leases]
        self.compare(f'revoke {leases}', *asks)
        self.calls.append('keep alive')
        assert self.real.keep_alive(leases[0]) == self.model.keep_alive(leases[1]) == 0


# Calls of each server in every run; those of placement take ten times as long.
CALLS = 1_000
PLACEMENT_CALLS = 300
# Calls of each server with --all.
CALLS_SLOW = 25_000
# Placement's slow run is split: each part starts with an empty placement, because calls of a full one take several
# times as long.
PARTS = 5
# Calls in one sequence, which has its own names.
CALLS_OF_SEQUENCE = 50


@pytest.fixture
def world() -> World:
    return World(Bounds(), RecordingChooser())


def compare_etcd(etcd: Etcd, world: World, steps: int, seed: int) -> None:
    with closing(Store(EtcdConfig((etcd.endpoint,)))) as store:
        for number in range(steps // CALLS_OF_SEQUENCE):
            rng = random.Random(f'{seed} {number}')
            twins = StorePair(store, ModelStore(EtcdModel(world)), f'/twins/{make_random_uuid()}/', rng)
            for _ in range(CALLS_OF_SEQUENCE):
                twins.step()


@pytest.fixture(scope='module')
def quiet_etcd() -> Iterator[Etcd]:
    """An etcd that nobody else writes to, so that each new revision is of this test."""
    with Etcd() as server:
        yield server


def compare_members(etcd: Etcd, steps: int, seed: int) -> None:
    with closing(EtcdMember(EtcdConfig((etcd.endpoint,)), etcd.endpoint)) as member:
        for number in range(steps // CALLS_OF_SEQUENCE):
            rng = random.Random(f'{seed} {number}')
            memory = MemoryMember(EtcdModel(NoWorld()))
            pair = MemberPair(member, memory, f'/{make_random_uuid()[:8]}/'.encode(), rng)
            for _ in range(CALLS_OF_SEQUENCE):
                pair.step()
            pair.compare_watches()


def test_member_in_memory_answers_like_etcd(quiet_etcd: Etcd) -> None:
    compare_members(quiet_etcd, CALLS, 3)


@pytest.mark.slow
def test_member_in_memory_answers_like_etcd_for_long(quiet_etcd: Etcd) -> None:
    compare_members(quiet_etcd, CALLS_SLOW, 2)


def test_etcd_model_answers_like_etcd(etcd: Etcd, world: World) -> None:
    compare_etcd(etcd, world, CALLS, 1)


@pytest.mark.slow
def test_etcd_model_answers_like_etcd_for_long(etcd: Etcd, world: World) -> None:
    compare_etcd(etcd, world, CALLS_SLOW, 2)


def test_fence_refuses_the_same_writes_in_both(etcd: Etcd, world: World) -> None:
    real, model = Store(EtcdConfig((etcd.endpoint,))), ModelStore(EtcdModel(world))
    notices: list[str] = []
    prefix = f'/twins/{make_random_uuid()}/'
    try:
        answers: list[list[object]] = [[], []]
        for store, results in zip((real, model), answers, strict=True):
            written = store.commit([], [Put(f'{prefix}me', 'x')])
            assert written
            store.fence = Fence(Unchanged(f'{prefix}me', written), lambda: notices.append('broken'))
            results.append(get_answer(lambda each: each.commit([], [Put(f'{prefix}a', '1')]) is not None, store))
            results.append(
                get_answer(lambda each: each.commit([Unchanged(f'{prefix}b', 7)], [Put(f'{prefix}a', '2')]), store)
            )
            store.commit([], [Delete(f'{prefix}me')], use_fence=False)
            results.append(get_answer(lambda each: each.commit([], [Put(f'{prefix}a', '3')]), store))
            results.append(store.get(f'{prefix}a').value)  # type: ignore[union-attr]
        assert answers[0] == answers[1] == [True, None, 'Unreachable', b'1']
        assert set(notices) == {'broken'}
    finally:
        real.close()


def compare_placement(client: Placement, world: World, steps: int, seed: int) -> None:
    calls = number = 0
    while calls < steps:
        number += 1
        pair = PlacementPair(client, ModelPlacement(PlacementModel(world), world), random.Random(f'{seed} {number}'))
        for _ in range(CALLS_OF_SEQUENCE // 4):
            pair.step()
        calls += len(pair.calls)


@pytest.fixture
def in_process_placement() -> Iterator[Placement]:
    """The real placement in this process: a separate server would take ten times as long."""
    pytest.importorskip('placement', reason="openstack-placement is not installed: pip install '.[lab]'")
    yield start_placement()
    remove_providers(start_placement())


def test_placement_model_answers_like_placement(in_process_placement: Placement, world: World) -> None:
    compare_placement(in_process_placement, world, PLACEMENT_CALLS, 1)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(2, 2 + PARTS))
def test_placement_model_answers_like_placement_for_long(
    in_process_placement: Placement, world: World, seed: int
) -> None:
    compare_placement(in_process_placement, world, CALLS_SLOW // PARTS, seed)


# Differences that are planted in the models; each must be noticed.

ETCD, PLACEMENT = 'tests.kit.memory_etcd:', 'tests.kit.memory_placement:PlacementModel.'
ETCD_DIFFERENCES = {
    'a key may be written twice': Plant(ETCD + 'Etcd.check_transaction', never('put', 'deleted')),
    'a transaction may be long': Plant(ETCD + 'MAX_TRANSACTION_OPERATIONS', planting.Constant(200)),
    'a lease need not exist': Plant(ETCD + 'Etcd.check_puts', never('leases')),
    'a key that is written as it is loses its lease': Plant(
        ETCD + 'Etcd.resolve', planting.drop_argument('Put', 'lease')
    ),
    'a missing key is unchanged': Plant(
        ETCD + 'Etcd.is_met', planting.replace_return('entry is None or entry.revision == condition.revision')
    ),
    'keys outlive their lease': Plant(ETCD + 'Etcd.end_lease', never('expired')),
    'keys of a lease end in another order': Plant(ETCD + 'Etcd.end_lease', planting.replace_call('sorted', 'expired')),
    'deleting nothing is a change': Plant(ETCD + 'Etcd.write', never('entries')),
    'each write creates its key': Plant(ETCD + 'Etcd.write', replace_assignment('created', 'self.revision')),
    'a limit is ignored': Plant(ETCD + 'MemoryMember._answer_range', replace_assignment('limited', 'selected')),
    'the future can be read': Plant(ETCD + 'MemoryMember._answer_range', never('request', 'etcd')),
    'keys are unsorted': Plant(ETCD + 'MemoryMember._answer_range', drop_statement('sort')),
    'old writes are read': Plant(ETCD + 'MemoryMember._answer_range', replace_assignment('selected', 'matching')),
    'the past is as the present': Plant(ETCD + 'MemoryMember._list_entries', always('revision')),
    'an unknown lease can be revoked': Plant(ETCD + 'MemoryMember._answer_revoke', never('leases')),
    'a watch reports what did not change': Plant(ETCD + 'MemoryMember._record_changes', always('before', 'after')),
}
PLACEMENT_DIFFERENCES = {
    'a generation is not compared': Plant(PLACEMENT + 'begin', never('row', 'generation')),
    'a claim needs no room': Plant(
        PLACEMENT + '_check', replace_condition('inventory is None', 'inventory', 'used_then')
    ),
    'a consumer outlives its allocations': Plant(PLACEMENT + 'finish', never('before')),
    'a claim changes no provider': Plant(PLACEMENT + 'finish', drop_statement('providers', 'generation')),
    'a provider may exist twice': Plant(PLACEMENT + 'write', never('body', 'other')),
    'a provider in use can be deleted': Plant(PLACEMENT + 'write', never('held')),
    'the generation of a provider is not compared': Plant(PLACEMENT + 'write', never('body', 'generation')),
    'more may be reserved than there is': Plant(PLACEMENT + '_set_part', never('fields')),
    'an inventory in use can be removed': Plant(PLACEMENT + '_set_part', never('get_usage')),
    'an unknown trait can be set': Plant(PLACEMENT + '_set_part', never('unknown')),
    'an unknown trait can be required': Plant(PLACEMENT + '_matches_parameter', never('unknown')),
    'a full provider is a candidate': Plant(
        PLACEMENT + '_can_allocate', replace_condition('inventory is None', 'get_usage')
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('difference', ETCD_DIFFERENCES)
def test_planted_difference_from_etcd_is_noticed(quiet_etcd: Etcd, difference: str) -> None:
    with plant_bugs([ETCD_DIFFERENCES[difference]]), pytest.raises(AssertionError):
        compare_members(quiet_etcd, CALLS, 3)


@pytest.mark.slow
@pytest.mark.parametrize('difference', PLACEMENT_DIFFERENCES)
def test_planted_difference_from_placement_is_noticed(
    in_process_placement: Placement, world: World, difference: str
) -> None:
    with plant_bugs([PLACEMENT_DIFFERENCES[difference]]), pytest.raises(AssertionError):
        # At most as many calls as a part of the long run.
        compare_placement(in_process_placement, world, CALLS_SLOW // PARTS, 1)
