"""Test the explanation of a refusal: failed constraints, and the smallest change that fits."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ecomp.errors import PlacementRefusal
from ecomp.model import keys
from ecomp.model.allocation import Allocations
from ecomp.model.choose import Candidate
from ecomp.model.explain import Cure, Provider, apply_cures, explain_uncovered, find_miss, find_smallest_miss
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group
from ecomp.model.host import PresenceFacts
from ecomp.model.query import Amount, UnsupportedQueryError, exclude_disabled, format_query, parse_query
from ecomp.model.status import SHARING_TRAIT
from ecomp.placement import providers
from ecomp.placement.allocations import read_candidates
from ecomp.scheduler.placing import explain
from ecomp.scheduler.placing.explain import MAX_CALLS, ProviderFacts, Refusal, list_reasons
from ecomp.store.client import Store
from tests.kit.in_process import InProcessPlacement, put_with_generation, remove_providers
from tests.kit.servers import Etcd
from tests.kit.store_client import open_store

GUEST_QUERY = 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1'
AVX2 = 'HW_CPU_X86_AVX2'


@dataclass
class ExplainedCluster:
    """Live computes and their providers."""

    etcd: Etcd
    store: Store
    placement: InProcessPlacement

    def make_compute(self, host: str | None, alive: bool = True, parent: str | None = None, **sizes: int) -> str:
        """Make a compute with 4 VCPU, 7800 MB and 25 GB.

        Args:
            host: the host name that it publishes.
            alive: publish its presence.
            parent: its provider's parent.
            sizes: other totals of resource classes; 0 reserves all of a class.
        """
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

    def publish(self, compute: str, host: str | None, **room: list[int]) -> None:
        """Write a live compute's presence key with its hints."""
        hints = {'room': room} if room else {}
        self.etcd.put(keys.compute(compute), json.dumps({'hostname': host, 'token': 'x', **hints}), self.etcd.grant())

    def allocate(self, compute: str, **amounts: int) -> None:
        """Allocate these amounts to another consumer."""
        body = {
            'allocations': {compute: {'resources': amounts}},
            **{'user_id': 'u', 'project_id': 'p', 'consumer_generation': None, 'consumer_type': 'INSTANCE'},
        }
        self.placement.write('PUT', f'/allocations/{uuid.uuid4()}', body)

    def set_traits(self, compute: str, *traits: str) -> None:
        put_with_generation(self.placement, f'/resource_providers/{compute}/traits', traits=list(traits))

    def explain(self, query: str, **about: Any) -> list[str]:
        """Return the reasons of a refusal; `about` holds further fields of it."""
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
        'the closest host is hv3',
        f'Try: request MEMORY_MB:512, remove required={AVX2}, which fits on hv2',
    ]


def test_explanation_without_a_fitting_change(world: ExplainedCluster) -> None:
    world.make_compute('hv1', MEMORY_MB=0)
    assert world.explain(GUEST_QUERY) == [
        'hv1: MEMORY_MB short by 256 (free 0 of 0)',
        'the closest host is hv1',
        'no change of the query fits any host',
    ]


def test_dead_closed_and_nameless_computes_are_explained(world: ExplainedCluster) -> None:
    dead, stopped = world.make_compute('hv8', alive=False), world.make_compute('hv9', alive=False, VCPU=0)
    nameless = world.make_compute(None)
    world.make_compute('hv2', VCPU=0)
    bare = str(uuid.uuid4())
    world.etcd.put(keys.compute(bare), '{"hostname": "hv1"}', world.etcd.grant())
    # A foreign provider in a shared placement.
    foreign = str(uuid.uuid4())
    world.placement.write('POST', '/resource_providers', {'uuid': foreign, 'name': 'nova'})
    lines = world.explain(f'{GUEST_QUERY}&required={SHARING_TRAIT}')
    assert lines[:3] == [
        'hv1: has no resource provider',
        'hv2: is closed: all its VCPU is reserved',
        f'{nameless}: lacks {SHARING_TRAIT}',
    ]
    assert lines[3:5] == sorted([f'{dead}: is not alive', f'{stopped}: is closed: its ecompute was stopped'])
    assert lines[5:] == [
        f'the closest host is {nameless}',
        f'Try: remove required={SHARING_TRAIT}, which fits on {nameless}',
    ]


def test_compute_excluded_by_the_limit_is_explained(world: ExplainedCluster) -> None:
    named_compute, _ = world.make_compute('hv1'), world.make_compute('hv2')
    assert world.explain(f'{GUEST_QUERY}&limit=1', named=[named_compute]) == [
        'hv1: has room now. Try: the same command again',
        'hv2: has room, but limit=1 makes placement offer other computes. Fix: remove limit=1',
    ]
    web = Group('web', ANTI_AFFINITY, True, {'a': named_compute})
    (first, second) = world.explain(f'{GUEST_QUERY}&limit=1', group=web, named=[named_compute])
    assert first == 'hv1: group web has a member there (strict anti-affinity)'
    assert second == 'hv2: has room, but limit=1 makes placement offer other computes. Fix: remove limit=1'


def test_change_that_placement_would_refuse_is_not_suggested(world: ExplainedCluster) -> None:
    # Placement does not check the unknown trait, because the aggregate has no provider.
    world.make_compute('hv1')
    aggregate = str(uuid.uuid4())
    assert world.explain(f'{GUEST_QUERY}&member_of={aggregate}&required=!CUSTOM_NOBODY_KNOWS') == [
        f'hv1: is not in aggregate {aggregate}',
        'the closest host is hv1',
    ]


@pytest.mark.real_servers
def test_granular_nested_and_shared_providers_are_not_explained(world: ExplainedCluster) -> None:
    assert world.explain('resources1=VCPU:1&resources=MEMORY_MB:1,DISK_GB:1') == [
        'what each compute lacks is unknown: the query has granular groups (resources1)'
    ]
    flat, tree, near = world.make_compute('hv1'), world.make_compute('hv2'), world.make_compute('hv3')
    world.make_compute('child', alive=False, parent=tree)
    shares = world.make_compute('storage', alive=False)
    world.set_traits(shares, SHARING_TRAIT)
    for provider in (near, shares):
        put_with_generation(world.placement, f'/resource_providers/{provider}/aggregates', aggregates=[flat])
    lines = world.explain(f'{GUEST_QUERY}&required={AVX2}')
    assert lines[:3] == [
        f'hv1: lacks {AVX2}',
        'hv2: not explained: its resource providers are nested',
        f'hv3: not explained: provider {shares} shares resources with it',
    ]
    assert lines[-2:] == [
        'the closest host is hv1',
        f'Try: remove required={AVX2}, which fits on hv1',
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
        f'hv2: MEMORY_MB short by 128 (free 128 of 128); is not the provider {dead}, which in_tree= names',
        f'hv5: MEMORY_MB short by 28 (free 228 of 228); is not the provider {dead}, which in_tree= names',
        '5 more not shown: each of them is no closer, or not alive',
        'the closest host is hv5',
        f'Try: request MEMORY_MB:228, remove in_tree={dead}, which fits on hv5',
    ]
    monkeypatch.setattr(explain, 'MAX_LISTED_COMPUTES', 7)
    assert len(world.explain(query)) == 9


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
        f'{unknown}: no host has this name or uuid', f'Try: remove --on {unknown}, which fits on hv2'
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
        return [line for line in world.explain(GUEST_QUERY, group=group, taken=placed) if line.startswith('hv')]

    assert explain_hosts(ANTI_AFFINITY)[0] == 'hv1: instance 1 of the set takes hv1 (group web, strict anti-affinity)'
    assert explain_hosts(AFFINITY)[1] == 'hv2: instance 1 of the set takes hv1 (group web, strict affinity)'
    assert explain_hosts(ANTI_AFFINITY, other=first)[0] == 'hv1: group web has a member there (strict anti-affinity)'
    assert explain_hosts(AFFINITY, other=second)[0] == 'hv1: the members of group web are on hv2 (strict affinity)'


@pytest.mark.real_servers
@pytest.mark.parametrize('number', [1, 3, 60])
def test_calls_of_a_refusal_do_not_grow_with_the_computes(world: ExplainedCluster, number: int) -> None:
    for index in range(number):
        world.allocate(world.make_compute(f'hv{index:02}', VCPU=2), VCPU=2)
    world.placement.calls.clear()
    before = world.placement.statements
    lines = world.explain(GUEST_QUERY)
    assert lines[-2:] == ['the closest host is hv00', 'no change of the query alone fits: free 1 VCPU on hv00']
    assert [line for line in lines if 'VCPU short' in line] == [
        f'hv{index:02}: VCPU short by 1 (free 0 of 2)' for index in range(min(number, 10))
    ]
    # In order: the providers, those with free memory, and the limits of the nearest ones.
    limits = ['/inventories'] * min(number, 3)
    assert [call[-12:] for call in world.placement.calls] == ['ce_providers', '=MEMORY_MB:1', *limits]
    # SQL statements: 2 for the list of providers, 9 for the candidates, 6 for each compute's limits.
    assert world.placement.statements - before == 11 + 6 * len(limits)


def test_totals_of_a_full_compute_come_from_its_hint(world: ExplainedCluster) -> None:
    computes = [world.make_compute(f'hv{number}', MEMORY_MB=512) for number in range(1, 5)]
    for number, compute in enumerate(computes, 1):
        world.allocate(compute, VCPU=4, MEMORY_MB=512, DISK_GB=25)
        world.publish(compute, f'hv{number}', VCPU=[4, 25], MEMORY_MB=[512, 0], DISK_GB=[25, 0])
    world.set_traits(computes[1], 'COMPUTE_STATUS_DISABLED')
    # hv3 publishes no hint, and hv4's hint reports more allocated than it has.
    world.publish(computes[2], 'hv3')
    world.publish(computes[3], 'hv4', VCPU=[4, -25], MEMORY_MB=[512, 0], DISK_GB=[25, 0])
    world.placement.calls.clear()
    full = 'VCPU short by 1 (free 0 of 4); MEMORY_MB short by 256 (free 0 of 512); DISK_GB short by 1 (free 0 of 25)'
    lines = world.explain(GUEST_QUERY)
    assert len(world.placement.calls) == 5, world.placement.calls
    assert lines == [
        f'hv1: {full}',
        f'hv2: is disabled (eschedule host enable hv2); {full}',
        '2 more not shown: each of them is no closer, or not alive',
        'the closest host is hv1',
        'no change of the query alone fits: free 1 VCPU and 256 MEMORY_MB and 1 DISK_GB on hv1',
    ]


def test_fitting_change_is_verified_on_one_compute(world: ExplainedCluster) -> None:
    for index in range(60):
        world.make_compute(f'hv{index:02}', VCPU=2)
    world.placement.calls.clear()
    assert world.explain(GUEST_QUERY.replace('VCPU:1', 'VCPU:3'))[-1] == 'Try: request VCPU:2, which fits on hv00'
    assert [call.rpartition('/')[2].partition('?')[0] for call in world.placement.calls] == [
        'resource_providers', 'allocation_candidates', 'inventories', 'inventories', 'allocation_candidates',
    ]  # fmt: skip
    assert 'in_tree=' in world.placement.calls[-1]


def test_max_unit_set_outside_ecomp_is_explained(world: ExplainedCluster) -> None:
    for number in (1, 2):
        compute = world.make_compute(f'hv{number}')
        inventories = {name: {'total': 64} for name in ('VCPU', 'DISK_GB')} | {'MEMORY_MB': {'total': 512}}
        inventories['VCPU']['max_unit'] = 2
        put_with_generation(world.placement, f'/resource_providers/{compute}/inventories', inventories=inventories)
    world.placement.calls.clear()
    lines = world.explain(GUEST_QUERY.replace('VCPU:1', 'VCPU:3'))
    assert lines[:2] == [f'hv{number}: VCPU:3 is above max_unit 2' for number in (1, 2)]
    assert lines[-1] == 'Try: request VCPU:2, which fits on hv1'
    assert len(world.placement.calls) == 5


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
    assert all(case_counts[case] > 1 for case in ('refused', 'fits', 'changed', 'freed', 'beyond', 'found')), (
        case_counts
    )
    assert case_counts['found'] > 5 * case_counts['not found'], case_counts


@pytest.mark.real_servers
@pytest.mark.slow
@pytest.mark.parametrize('first', range(1000, 1200, 10))
def test_explanation_agrees_with_placement_at_length(placement_in_process: InProcessPlacement, first: int) -> None:
    case_counts = run_random_requests(placement_in_process, range(first, first + 10), 50)
    assert all(case_counts[case] > 10 for case in ('refused', 'fits', 'changed')), case_counts


def run_random_requests(placement: InProcessPlacement, seeds: range, requests: int) -> Counter[str]:
    """Run this number of requests on a random cluster for each seed, and count the cases."""
    case_counts: Counter[str] = Counter()
    for seed in seeds:
        case_counts += run_random_cluster(placement, random.Random(seed), requests)
    assert case_counts['requests'] == len(seeds) * requests
    return case_counts


def run_random_cluster(placement: InProcessPlacement, rng: random.Random, count: int) -> Counter[str]:
    """Run `count` random requests on a random cluster, and count the cases that occurred."""
    created = make_cluster(placement, rng)
    listed = providers.list_all(placement)
    assert listed.keys() == set(created)
    provider_facts = (
        providers.read_provider(placement, listed_uuid, listed[listed_uuid].is_alone, traits=True, aggregates=True)
        for listed_uuid in listed
    )
    present = [facts for facts in provider_facts if facts is not None]
    sharing = [provider for provider in present if SHARING_TRAIT in provider.traits]
    case_counts: Counter[str] = Counter()
    while case_counts['requests'] < count:
        query = make_query(rng, present)
        try:
            named = read_candidates(placement, query).candidates
        except PlacementRefusal:
            continue  # the query contradicts itself
        case_counts['requests'] += 1
        case_counts += compare_explanation(placement, query, present, sharing, named)
        case_counts += compare_bulk_facts(placement, query, present, sharing)
    check_single_constraints(placement, make_query(rng, present), present, sharing)
    remove_providers(placement)
    return case_counts


def compare_explanation(
    placement: InProcessPlacement,
    query: str,
    providers: list[Provider],
    sharing: list[Provider],
    named: list[Allocations],
) -> Counter[str]:
    """Compare the explanation of a request with placement's answer."""
    constraints = parse_query(exclude_disabled(query))
    assert set(parse_query(format_query(constraints))) == set(constraints)
    misses = []
    case_counts: Counter[str] = Counter()
    for candidate in providers:
        if explain_uncovered(constraints, candidate, sharing) is not None:
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


def compare_bulk_facts(
    placement: InProcessPlacement, query: str, providers: list[Provider], sharing: list[Provider]
) -> Counter[str]:
    """Check that a few bulk calls yield the same facts as one query for each provider."""
    constraints, before = parse_query(exclude_disabled(query)), len(placement.calls)
    exact = {candidate.uuid: candidate for candidate in providers}
    try:
        facts = ProviderFacts(placement, constraints)
        bulk = facts.find(exact, dict.fromkeys(exact, PresenceFacts()), {})
    except UnsupportedQueryError:
        return Counter({'too much': 1})
    assert len(placement.calls) - before <= MAX_CALLS, placement.calls[before:]
    for bulk_provider in bulk.values():
        own = exact[bulk_provider.uuid]
        assert {name: (room.capacity, room.used) for name, room in bulk_provider.inventories.items()} == {
            name: (room.capacity, room.used) for name, room in own.inventories.items()
        }
        assert set(bulk_provider.traits) == set(own.traits)
        assert (explain_uncovered(constraints, bulk_provider, facts.sharing) is None) == (
            explain_uncovered(constraints, own, sharing) is None
        )
        if explain_uncovered(constraints, own, sharing) is None:
            bulk_miss, exact_miss = find_miss(constraints, bulk_provider), find_miss(constraints, own)
            assert bulk_miss.is_candidate == exact_miss.is_candidate
            # The bulk facts may miss an amount's limit if the compute lacks something else, too.
            missed, lacking = (
                {failure.constraint for failure in provider_miss.failures} for provider_miss in (bulk_miss, exact_miss)
            )
            assert missed <= lacking
    return Counter({'found': len(bulk), 'not found': len(exact) - len(bulk), 'plain': 1})


def check_single_constraints(
    placement: InProcessPlacement, query: str, present: list[Provider], sharing: list[Provider]
) -> None:
    """Check that placement, queried for one constraint, names the providers that satisfy it."""
    constraints = parse_query(exclude_disabled(query))
    for constraint in constraints:
        holding = providers.find_satisfying(placement, constraint)
        for provider in present:
            if explain_uncovered(constraints, provider, sharing) is None:
                failing = {failure.constraint for failure in find_miss(constraints, provider).failures}
                assert (constraint not in failing) == (provider.uuid in holding), (constraint, provider)


def free_amounts(provider: Provider, cures: tuple[Cure, ...]) -> Provider:
    inventories = dict(provider.inventories)
    for cure in cures:
        if cure.amount_to_free and isinstance(cure.constraint, Amount):
            name = cure.constraint.name
            assert inventories[name].used >= cure.amount_to_free
            inventories[name] = inventories[name]._replace(used=inventories[name].used - cure.amount_to_free)
    return replace(provider, inventories=inventories)


def make_cluster(placement: InProcessPlacement, rng: random.Random) -> list[str]:
    """Make two to six providers, sometimes with a nested and a sharing one."""
    created: list[str] = []
    nested, shares = rng.random() < 0.2, rng.random() < 0.3
    for number in range(rng.randint(2, 6)):
        provider = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        # Placement answers HTTP 500 for a sharing provider with a parent.
        parent = created[0] if nested and number in (2, 3) else None
        body = {'uuid': provider, 'name': provider, 'parent_provider_uuid': parent}
        placement.write('POST', '/resource_providers', body)
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
        if shares and number == 1:
            traits.append(SHARING_TRAIT)
        put_with_generation(placement, f'{path}/traits', traits=traits)
        put_with_generation(
            placement, f'{path}/aggregates', aggregates=[name for name in AGGREGATES[:-1] if rng.random() < 0.4]
        )
    return created


def make_inventory(rng: random.Random) -> dict[str, object]:
    """Make the inventory of one class, sometimes with all limits."""
    total = rng.randint(1, 32)
    fields: dict[str, object] = {'total': total, 'allocation_ratio': rng.choice(RATIOS)}
    if rng.random() < 0.2:
        fields['reserved'] = rng.randint(0, total)
    if rng.random() < 0.3:
        fields |= {'min_unit': rng.randint(1, 5), 'max_unit': rng.randint(1, 24), 'step_size': rng.randint(1, 4)}
    return fields


def make_query(rng: random.Random, providers: list[Provider]) -> str:
    """Make a query for up to four classes, sometimes with every other kind of parameter.

    Most amounts are close to the free amount of one provider.
    """
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
