"""Test the explanation of a refusal: failed constraints, and the smallest change that fits."""

from __future__ import annotations

import json
import random
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ecomp.errors import PlacementRefusal
from ecomp.model import keys
from ecomp.model.allocation import Allocations, Provider
from ecomp.model.choose import Candidate
from ecomp.model.explain import Cure, apply_cures, explain_uncovered, find_miss, find_smallest_miss
from ecomp.model.facts import encode_facts, parse_facts
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group
from ecomp.model.host import StoredHostname
from ecomp.model.order import Request
from ecomp.model.query import Amount, exclude_disabled, format_query, parse_query
from ecomp.model.status import SHARING_TRAIT
from ecomp.model.stored import encode
from ecomp.placement import providers
from ecomp.placement.allocations import read_candidates
from ecomp.scheduler.placing import explain
from ecomp.scheduler.placing.explain import Refusal, list_reasons
from ecomp.store.client import Store
from tests.kit.in_process import InProcessPlacement, put_with_generation, remove_providers
from tests.kit.servers import Etcd
from tests.kit.store_client import open_store

GUEST_QUERY = 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1'
AVX2 = 'HW_CPU_X86_AVX2'


@dataclass
class ExplainedCluster:
    etcd: Etcd
    store: Store
    placement: InProcessPlacement

    def make_compute(self, host: str | None, alive: bool = True, parent: str | None = None, **sizes: int) -> str:
        """Make a compute, where a size of 0 reserves all of its resource class."""
        compute = str(uuid.uuid5(uuid.NAMESPACE_DNS, f'{host} {len(self.etcd.list_keys(keys.COMPUTES))}'))
        self.placement.write(
            'POST', '/resource_providers', {'uuid': compute, 'name': compute, 'parent_provider_uuid': parent}
        )
        totals = {'VCPU': 4, 'MEMORY_MB': 7800, 'DISK_GB': 25, **sizes}
        inventories = {name: {'total': size or 4, 'reserved': 0 if size else 4} for name, size in totals.items()}
        put_with_generation(self.placement, f'/resource_providers/{compute}/inventories', inventories=inventories)
        if alive:
            self.publish(compute, host)
        return compute

    def publish(self, compute: str, host: str | None) -> None:
        self.etcd.put(keys.compute(compute), json.dumps({'hostname': host, 'token': 'x'}), self.etcd.grant())

    def publish_facts(self) -> None:
        lease = self.etcd.grant()
        for compute in map(keys.get_last_part, self.etcd.list_keys(keys.COMPUTES)):
            provider = providers.read_provider(self.placement, compute, traits=True, aggregates=True)
            if provider is not None:
                used = {name: inventory.used for name, inventory in provider.inventories.items()}
                self.etcd.put(keys.facts(compute), encode_facts(provider, used, ()), lease)

    def allocate(self, compute: str, **amounts: int) -> None:
        body = {
            'allocations': {compute: {'resources': amounts}},
            **{'user_id': 'u', 'project_id': 'p', 'consumer_generation': None, 'consumer_type': 'INSTANCE'},
        }
        self.placement.write('PUT', f'/allocations/{uuid.uuid4()}', body)

    def set_traits(self, compute: str, *traits: str) -> None:
        put_with_generation(self.placement, f'/resource_providers/{compute}/traits', traits=list(traits))

    def explain(self, query: str, are_fresh: bool = True, **about: Any) -> list[str]:
        if are_fresh:
            self.publish_facts()
            self.placement.calls.clear()
        return list_reasons(self.store, self.placement, Refusal(query, **about))


@pytest.fixture
def world(own_etcd: Etcd, placement_in_process: InProcessPlacement) -> Iterator[ExplainedCluster]:
    with open_store(own_etcd.endpoint) as store:
        yield ExplainedCluster(own_etcd, store, placement_in_process)


def test_every_failing_constraint_of_every_compute_is_listed(world: ExplainedCluster) -> None:
    first, second, third = (world.make_compute(f'hv{number}') for number in (1, 2, 3))
    world.allocate(second, MEMORY_MB=7288)
    world.allocate(first, VCPU=4, MEMORY_MB=7000)
    world.set_traits(third, AVX2)
    world.allocate(third, DISK_GB=25)
    assert world.explain(f'resources=VCPU:1,MEMORY_MB:1741,DISK_GB:1&required={AVX2}') == [
        f'hv1: VCPU short by 1 (free 0 of 4); MEMORY_MB short by 941 (free 800 of 7800); lacks {AVX2}',
        f'hv2: MEMORY_MB short by 1229 (free 512 of 7800); lacks {AVX2}',
        'hv3: DISK_GB short by 1 (free 0 of 25)',
        'the host that lacks least is hv3',
        f'Try: request MEMORY_MB:512, remove required={AVX2}, which fits on hv2',
    ]


def test_explanation_without_a_fitting_change(world: ExplainedCluster) -> None:
    world.make_compute('hv1', MEMORY_MB=0)
    assert world.explain(GUEST_QUERY) == [
        'hv1: MEMORY_MB short by 256 (free 0 of 0)',
        'the host that lacks least is hv1',
        'no change of the query fits any host',
    ]


def test_dead_closed_and_nameless_computes_are_explained(world: ExplainedCluster) -> None:
    dead = world.make_compute('hv8', alive=False)
    world.etcd.put(keys.hostname(dead), encode(StoredHostname('hv8')))
    nameless = world.make_compute(None)
    world.make_compute('hv2', VCPU=0)
    bare = str(uuid.uuid4())
    world.etcd.put(keys.compute(bare), '{"hostname": "hv1"}', world.etcd.grant())
    # A foreign provider in a shared placement.
    foreign = str(uuid.uuid4())
    world.placement.write('POST', '/resource_providers', {'uuid': foreign, 'name': 'nova'})
    lines = world.explain(f'{GUEST_QUERY}&required={SHARING_TRAIT}')
    assert lines == [
        'hv1: what it has is unknown: its ecompute has just started, or cannot publish it',
        'hv2: is closed: all its VCPU is reserved',
        f'{nameless}: lacks {SHARING_TRAIT}',
        'hv8: is not alive',
        f'the host that lacks least is {nameless}',
        f'Try: remove required={SHARING_TRAIT}, which fits on {nameless}',
    ]


def test_compute_excluded_by_the_limit_is_explained(world: ExplainedCluster) -> None:
    named_compute, _ = world.make_compute('hv1'), world.make_compute('hv2')
    assert world.explain(f'{GUEST_QUERY}&limit=1', providers=[named_compute]) == [
        'hv1: has room now. Try: the same command again',
        'hv2: has room, but limit=1 makes placement offer other computes. Fix: remove limit=1',
    ]
    web = Group('web', ANTI_AFFINITY, True, {'a': named_compute})
    (first, second) = world.explain(f'{GUEST_QUERY}&limit=1', group=web, providers=[named_compute])
    assert first == 'hv1: group web has a member there (strict anti-affinity)'
    assert second == 'hv2: has room, but limit=1 makes placement offer other computes. Fix: remove limit=1'


def test_change_that_placement_would_refuse_is_not_suggested(world: ExplainedCluster) -> None:
    # Placement does not check the unknown trait, because the aggregate has no provider.
    world.make_compute('hv1')
    aggregate = str(uuid.uuid4())
    assert world.explain(f'{GUEST_QUERY}&member_of={aggregate}&required=!CUSTOM_NOBODY_KNOWS') == [
        f'hv1: is not in aggregate {aggregate}',
        'the host that lacks least is hv1',
    ]


def test_granular_queries_and_shared_classes_are_not_explained(world: ExplainedCluster) -> None:
    assert world.explain('resources1=VCPU:1&resources=MEMORY_MB:1,DISK_GB:1') == [
        'what each compute lacks is unknown: the query has granular groups (resources1)'
    ]
    world.make_compute('hv1')
    near = world.make_compute('hv2')
    put_with_generation(world.placement, f'/resource_providers/{near}/aggregates', aggregates=[near])
    assert world.explain(f'{GUEST_QUERY},VGPU:1') == [
        'hv1: has no VGPU',
        'hv2: not explained: another provider of its aggregates may share VGPU with it',
        'the host that lacks least is hv1',
        'Try: remove VGPU, which fits on hv1',
    ]


def test_nearest_of_many_computes_are_shown(world: ExplainedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, 'MAX_LISTED_COMPUTES', 5)
    monkeypatch.setattr(explain, 'MAX_NEAREST_COMPUTES', 2)
    for number in range(1, 7):
        compute = world.make_compute(f'hv{number}', MEMORY_MB=128 + 100 * (number == 5))
        if number in (2, 5):
            world.set_traits(compute, AVX2)
    dead = world.make_compute('hv9', alive=False)
    query = f'{GUEST_QUERY}&required={AVX2}&root_required={AVX2}&in_tree={dead}'
    assert world.explain(query) == [
        f'hv5: MEMORY_MB short by 28 (free 228 of 228); is not the provider {dead}, which in_tree= names',
        f'hv2: MEMORY_MB short by 128 (free 128 of 128); is not the provider {dead}, which in_tree= names',
        '4 more computes are not shown: none of them lacks less',
        'the host that lacks least is hv5',
        f'Try: request MEMORY_MB:228, remove in_tree={dead}, which fits on hv5',
    ]
    monkeypatch.setattr(explain, 'MAX_LISTED_COMPUTES', 7)
    assert len(world.explain(query)) == 8


def test_refusal_with_on_is_explained_with_the_typed_argument(world: ExplainedCluster) -> None:
    first = world.make_compute('hv1')
    world.make_compute('hv2')
    world.allocate(first, VCPU=4)
    query = f'{GUEST_QUERY}&in_tree={first}'
    assert world.explain(query, on='hv1') == [
        'hv1: VCPU short by 1 (free 0 of 4)',
        'Try: remove --on hv1, which fits on hv2',
    ]
    assert world.explain(query, on=first[:8])[1].startswith(f'Try: remove --on {first[:8]}, ')
    unknown = str(uuid.uuid4())
    assert world.explain(f'{GUEST_QUERY}&in_tree={unknown}', on=unknown) == [
        f'{unknown}: is not alive', f'Try: remove --on {unknown}, which fits on hv2'
    ]  # fmt: skip


def test_disabled_compute_requested_with_on_suggests_enabling_it(world: ExplainedCluster) -> None:
    first = world.make_compute('hv1')
    world.make_compute('hv2')
    world.set_traits(first, 'COMPUTE_STATUS_DISABLED')
    assert world.explain(f'{GUEST_QUERY}&in_tree={first}', on='hv1') == [
        'hv1: is disabled (eschedule host enable hv1)',
        'Try: eschedule host enable hv1, or remove --on hv1, which fits on hv2',
    ]


def test_members_of_the_set_are_distinguished_from_group_members(world: ExplainedCluster) -> None:
    first, second = world.make_compute('hv1'), world.make_compute('hv2', VCPU=1)
    size = {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 1}
    placed = [Candidate(first, {first: size}, None)]

    def explain_hosts(policy: str, **members: str) -> list[str]:
        group = Group('web', policy, True, members)
        return [line for line in world.explain(GUEST_QUERY, group=group, places=placed) if line.startswith('hv')]

    assert explain_hosts(ANTI_AFFINITY)[0] == 'hv1: instance 1 of the set takes hv1 (group web, strict anti-affinity)'
    assert explain_hosts(AFFINITY)[1] == 'hv2: instance 1 of the set takes hv1 (group web, strict affinity)'
    assert explain_hosts(ANTI_AFFINITY, other=first)[0] == 'hv1: group web has a member there (strict anti-affinity)'
    assert explain_hosts(AFFINITY, other=second)[0] == 'hv1: the members of group web are on hv2 (strict affinity)'


@pytest.mark.parametrize('number', [1, 60])
def test_refusal_costs_one_question_however_many_computes_there_are(world: ExplainedCluster, number: int) -> None:
    for index in range(number):
        world.make_compute(f'hv{index:02}', VCPU=2)
    lines = world.explain(GUEST_QUERY.replace('VCPU:1', 'VCPU:3'))
    assert lines[-2:] == ['the host that lacks least is hv00', 'Try: request VCPU:2, which fits on hv00']
    assert [line for line in lines if 'VCPU short' in line] == [
        f'hv{index:02}: VCPU short by 1 (free 2 of 2)' for index in range(min(number, 10))
    ]
    (call,) = world.placement.calls
    assert 'allocation_candidates' in call
    assert 'in_tree=' in call


def test_room_that_placement_refused_is_said_with_its_age(world: ExplainedCluster) -> None:
    compute, disabled = world.make_compute('hv1'), world.make_compute('hv2')
    world.publish_facts()
    world.allocate(compute, VCPU=4)
    world.set_traits(disabled, 'COMPUTE_STATUS_DISABLED')
    world.placement.calls.clear()
    first, second, *_ = world.explain(GUEST_QUERY, are_fresh=False)
    assert re.match(r'hv1: had room \d+ s ago, but placement refused: another request probably took it', first)
    assert second == 'hv2: is disabled (eschedule host enable hv2)'
    assert len(world.placement.calls) == 1


def test_compute_that_was_just_enabled_is_not_said_to_be_disabled(world: ExplainedCluster) -> None:
    compute = world.make_compute('hv1')
    world.set_traits(compute, 'COMPUTE_STATUS_DISABLED')
    world.publish_facts()
    world.set_traits(compute)
    lines = world.explain(GUEST_QUERY.replace('VCPU:1', 'VCPU:9'), are_fresh=False)
    assert lines[0] == 'hv1: VCPU short by 5 (free 4 of 4)'


def test_request_that_is_newer_than_the_facts_counts(world: ExplainedCluster) -> None:
    compute, instance = world.make_compute('hv1'), str(uuid.uuid4())
    world.publish_facts()
    request = Request(instance, {compute: {'VCPU': 4, 'MEMORY_MB': 256, 'DISK_GB': 1}}, image='http://x/i')
    world.etcd.put(keys.request(compute, instance), encode(request))
    world.allocate(compute, VCPU=4)
    assert world.explain(GUEST_QUERY, are_fresh=False)[0] == 'hv1: VCPU short by 1 (free 0 of 4)'


@pytest.mark.parametrize(
    ('value', 'reason'),
    [
        ('x' * 9000, 'it publishes more than 8192 bytes'),
        ('{"room": 7}', 'it publishes malformed facts: room: expected up to 40 resource classes, not 7'),
        ('\x1b[2J', 'it publishes malformed facts: not JSON: Expecting value: line 1 column 1 (char 0)'),
    ],
)
def test_malformed_facts_are_said(world: ExplainedCluster, value: str, reason: str) -> None:
    compute = world.make_compute('hv1')
    world.publish_facts()
    world.etcd.put(keys.facts(compute), value, world.etcd.grant())
    assert world.explain(GUEST_QUERY, are_fresh=False) == [f'hv1: what it has is unknown: {reason}']


def test_max_unit_set_outside_ecomp_is_explained(world: ExplainedCluster) -> None:
    for number in (1, 2):
        compute = world.make_compute(f'hv{number}')
        inventories = {name: {'total': 64} for name in ('VCPU', 'DISK_GB')} | {'MEMORY_MB': {'total': 512}}
        inventories['VCPU']['max_unit'] = 2
        put_with_generation(world.placement, f'/resource_providers/{compute}/inventories', inventories=inventories)
    lines = world.explain(GUEST_QUERY.replace('VCPU:1', 'VCPU:3'))
    assert lines[:2] == [f'hv{number}: VCPU:3 is above max_unit 2' for number in (1, 2)]
    assert lines[-1] == 'Try: request VCPU:2, which fits on hv1'


# Thousands of random requests: the explanation must agree with placement's answers.


CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB', 'VGPU')
TRAITS = ('HW_CPU_X86_AVX2', 'HW_CPU_X86_VMX', 'STORAGE_DISK_SSD', 'COMPUTE_STATUS_DISABLED')
RATIOS = (1.0, 1.0, 1.0, 1.5, 16.0, 0.5, 0.1, 1 / 3, 1.1, 2.7)
# The last one has no member.
AGGREGATES = tuple(str(uuid.UUID(int=number)) for number in range(4))


@pytest.mark.real_servers
def test_explanation_agrees_with_placement(placement_in_process: InProcessPlacement) -> None:
    case_counts = run_random_requests(placement_in_process, range(6), 10)
    # Every case must have occurred.
    assert all(case_counts[case] > 1 for case in ('refused', 'fits', 'changed', 'freed', 'beyond')), case_counts


@pytest.mark.real_servers
@pytest.mark.slow
@pytest.mark.parametrize('first', range(1000, 1200, 10))
def test_explanation_agrees_with_placement_at_length(placement_in_process: InProcessPlacement, first: int) -> None:
    case_counts = run_random_requests(placement_in_process, range(first, first + 10), 50)
    assert all(case_counts[case] > 10 for case in ('refused', 'fits', 'changed')), case_counts


def run_random_requests(placement: InProcessPlacement, seeds: range, requests: int) -> Counter[str]:
    case_counts: Counter[str] = Counter()
    for seed in seeds:
        case_counts += run_random_cluster(placement, random.Random(seed), requests)
    assert case_counts['requests'] == len(seeds) * requests
    return case_counts


def run_random_cluster(placement: InProcessPlacement, rng: random.Random, count: int) -> Counter[str]:
    created = make_cluster(placement, rng)
    read = (providers.read_provider(placement, each, traits=True, aggregates=True) for each in created)
    present = [publish_and_parse(provider) for provider in read if provider is not None]
    case_counts: Counter[str] = Counter()
    while case_counts['requests'] < count:
        query = make_query(rng, present)
        try:
            named = read_candidates(placement, query).candidates
        except PlacementRefusal:
            continue  # the query contradicts itself
        case_counts['requests'] += 1
        case_counts += compare_explanation(placement, query, present, named)
    check_single_constraints(placement, make_query(rng, present), present)
    remove_providers(placement)
    return case_counts


def publish_and_parse(provider: Provider) -> Provider:
    used = {name: inventory.used for name, inventory in provider.inventories.items()}
    return parse_facts(encode_facts(provider, used, ()).encode()).make_provider(provider.uuid)


def compare_explanation(
    placement: InProcessPlacement, query: str, providers: list[Provider], named: list[Allocations]
) -> Counter[str]:
    constraints = parse_query(exclude_disabled(query))
    assert set(parse_query(format_query(constraints))) == set(constraints)
    misses = []
    case_counts: Counter[str] = Counter()
    for candidate in providers:
        if explain_uncovered(constraints, candidate) is not None:
            case_counts['beyond'] += 1
            continue
        misses.append(find_miss(constraints, candidate))
        assert misses[-1].is_candidate == any(candidate.uuid in together for together in named), (
            query,
            candidate,
            misses[-1],
        )
        case_counts['explained'] += 1
        case_counts['fits'] += misses[-1].is_candidate
    if named:
        return case_counts
    case_counts['refused'] += 1
    best = find_smallest_miss(misses)
    if best is None:
        return case_counts
    assert best.cures
    changed_query, provider = (
        apply_cures(constraints, best.cures),
        next(candidate for candidate in providers if candidate.uuid == best.provider),
    )
    if any(cure.amount_to_free for cure in best.cures):
        case_counts['freed'] += 1
        assert find_miss(changed_query, free_amounts(provider, best.cures)).is_candidate, (query, provider, best)
        assert not any(
            candidate_miss.cures and not any(cure.amount_to_free for cure in candidate_miss.cures)
            for candidate_miss in misses
        )
    else:
        case_counts['changed'] += 1
        named = read_candidates(placement, format_query(changed_query)).candidates
        assert any(best.provider in allocations for allocations in named), (query, provider, best)
    return case_counts


def check_single_constraints(placement: InProcessPlacement, query: str, present: list[Provider]) -> None:
    constraints = parse_query(exclude_disabled(query))
    for constraint in constraints:
        holding = providers.find_satisfying(placement, constraint)
        for provider in present:
            if explain_uncovered(constraints, provider) is None:
                failing = {failure.constraint for failure in find_miss(constraints, provider).failures}
                assert (constraint not in failing) == (provider.uuid in holding), (constraint, provider)


def free_amounts(provider: Provider, cures: tuple[Cure, ...]) -> Provider:
    inventories = dict(provider.inventories)
    for cure in cures:
        if cure.amount_to_free and isinstance(cure.constraint, Amount):
            name = cure.constraint.name
            assert inventories[name].used >= cure.amount_to_free
            inventories[name] = inventories[name]._replace(used=inventories[name].used - cure.amount_to_free)
    return provider._replace(inventories=inventories)


def make_cluster(placement: InProcessPlacement, rng: random.Random) -> list[str]:
    created: list[str] = []
    for _ in range(rng.randint(2, 6)):
        provider = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        placement.write('POST', '/resource_providers', {'uuid': provider, 'name': provider})
        created.append(provider)
        path = f'/resource_providers/{provider}'
        inventories = {
            name: make_inventory(rng) for name in CLASSES if rng.random() < (0.3 if name == 'VGPU' else 0.95)
        }
        # Allocate before the final limits are set, so that usage may exceed them.
        put_with_generation(
            placement, f'{path}/inventories', inventories={name: {'total': 1000} for name in inventories}
        )
        full = rng.random() < 0.25
        used = {name: rng.randint(1, 12) for name in inventories if rng.random() < 0.3}
        if full and 'VCPU' in inventories:
            used['VCPU'] = 40
        if used:
            allocation = {provider: {'resources': used}}
            consumer_fields = {
                'user_id': 'u',
                'project_id': 'p',
                'consumer_generation': None,
                'consumer_type': 'INSTANCE',
            }
            placement.write(
                'PUT',
                f'/allocations/{uuid.uuid5(uuid.UUID(provider), "consumer")}',
                {'allocations': allocation, **consumer_fields},
            )
        put_with_generation(placement, f'{path}/inventories', inventories=inventories)
        traits = [name for name in TRAITS if rng.random() < 0.5]
        put_with_generation(placement, f'{path}/traits', traits=traits)
        put_with_generation(
            placement, f'{path}/aggregates', aggregates=[name for name in AGGREGATES[:-1] if rng.random() < 0.4]
        )
    return created


def make_inventory(rng: random.Random) -> dict[str, object]:
    total = rng.randint(1, 32)
    fields: dict[str, object] = {'total': total, 'allocation_ratio': rng.choice(RATIOS)}
    if rng.random() < 0.2:
        fields['reserved'] = rng.randint(0, total)
    if rng.random() < 0.3:
        fields |= {'min_unit': rng.randint(1, 5), 'max_unit': rng.randint(1, 24), 'step_size': rng.randint(1, 4)}
    return fields


def make_query(rng: random.Random, providers: list[Provider]) -> str:
    """Make a query in which most amounts are close to the free amount of one provider."""
    model, large, often, amounts = rng.choice(providers), rng.choice((1, 24)), rng.choice((0.0, 0.1, 0.4)), []
    for name in CLASSES:
        if name == 'VCPU' or rng.random() < 0.5:
            have = model.inventories.get(name)
            near = have.free + rng.randint(-3, 1) if have and rng.random() < 0.6 else 0
            amounts.append(f'{name}:{near if near > 0 else rng.randint(1, large)}')
    rng.shuffle(amounts)
    parts = ['resources=' + rng.choice((',', '%2C')).join(amounts)]
    for key in ('required', 'required', 'root_required'):
        if rng.random() < often:
            names = rng.sample(TRAITS, rng.randint(1, 2))
            if key == 'required' and rng.random() < 0.4:
                parts.append(f'required=in:{",".join(names)}')
            else:
                parts.append(f'{key}=' + ', '.join(rng.choice(('', '!')) + name for name in names))
    for _ in range(2):
        if rng.random() < often:
            names = rng.sample(AGGREGATES, rng.randint(1, 2))
            several = 'in:' if len(names) > 1 else ''
            parts.append(f'member_of={rng.choice(("", "!"))}{several}{",".join(names)}')
    if rng.random() < often:
        parts.append(f'in_tree={rng.choice([*(provider.uuid for provider in providers), AGGREGATES[0]])}')
    if rng.random() < 0.1:
        parts.append('limit=1000')
    rng.shuffle(parts)
    if rng.random() < 0.05:
        parts.insert(0, 'resources=DISK_GB:1')  # the last one of two counts
    return '&'.join(parts)
