"""Why there is no room, and what would be."""

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
from ecomp.model.explain import Cure, Provider, changed, miss, smallest, unexplained
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group
from ecomp.model.host import Living
from ecomp.model.query import Amount, Unexplained, enabled_only, parse, words
from ecomp.placement import providers
from ecomp.placement.allocations import candidates
from ecomp.placement.providers import SHARES
from ecomp.scheduler.placing import explain
from ecomp.scheduler.placing.explain import CALLS, Facts, Refusal, reasons
from ecomp.store.client import Store
from tests.kit.in_process import InProcess, empty, put
from tests.kit.servers import Etcd
from tests.kit.store_client import connected

# What eschedule says of a request that found no room: host by host, with the nearest miss and the smallest change.


GUEST = 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1'
AVX2 = 'HW_CPU_X86_AVX2'


@dataclass
class World:
    """Computes that say they are alive, and their providers."""

    etcd: Etcd
    store: Store
    placement: InProcess

    def compute(self, host: str | None, alive: bool = True, parent: str | None = None, **sizes: int) -> str:
        """A compute with 4 VCPU, 7800 MB and 25 GB; `sizes` say otherwise, and 0 that all of a class is reserved."""
        compute = str(uuid.uuid5(uuid.NAMESPACE_DNS, f'{host} {len(self.etcd.keys(keys.COMPUTES))}'))
        self.placement.write(
            'POST', '/resource_providers', {'uuid': compute, 'name': compute, 'parent_provider_uuid': parent}
        )
        totals = {'VCPU': 4, 'MEMORY_MB': 7800, 'DISK_GB': 25, **sizes}
        inventories = {name: {'total': size or 4, 'reserved': 0 if size else 4} for name, size in totals.items()}
        put(self.placement, f'/resource_providers/{compute}/inventories', inventories=inventories)
        if alive:
            self.says(compute, host)
        return compute

    def says(self, compute: str, host: str | None, **room: list[int]) -> None:
        """What a living compute puts, with the room that it says it has."""
        more = {'room': room} if room else {}
        self.etcd.put(keys.compute(compute), json.dumps({'hostname': host, 'token': 'x', **more}), self.etcd.grant())

    def uses(self, compute: str, **amounts: int) -> None:
        """Somebody holds so much there."""
        body = {
            'allocations': {compute: {'resources': amounts}},
            **{'user_id': 'u', 'project_id': 'p', 'consumer_generation': None, 'consumer_type': 'INSTANCE'},
        }
        self.placement.write('PUT', f'/allocations/{uuid.uuid4()}', body)

    def has(self, compute: str, *traits: str) -> None:
        """Give it traits."""
        put(self.placement, f'/resource_providers/{compute}/traits', traits=list(traits))

    def why(self, query: str, **about: Any) -> list[str]:
        """The reasons; `about` is what else is known of the refusal."""
        return reasons(self.store, self.placement, Refusal(query, **about))


@pytest.fixture
def world(own_etcd: Etcd, in_process: InProcess) -> Iterator[World]:
    with connected(own_etcd.endpoint) as store:
        yield World(own_etcd, store, in_process)


def test_every_failing_constraint_of_every_compute(world: World) -> None:
    one, two, three = (world.compute(f'hv{number}') for number in (1, 2, 3))
    world.uses(two, MEMORY_MB=7288)
    world.uses(one, VCPU=4, MEMORY_MB=7000)
    world.has(three, AVX2)
    world.uses(three, DISK_GB=25)
    assert world.why(f'resources=VCPU:1,MEMORY_MB:1741,DISK_GB:1&required={AVX2}') == [
        f'hv1: VCPU short by 1 (free 0 of 4); MEMORY_MB short by 941 (free 800 of 7800); lacks {AVX2}',
        f'hv2: MEMORY_MB short by 1229 (free 512 of 7800); lacks {AVX2}',
        'hv3: DISK_GB short by 1 (free 0 of 25)',
        'the nearest miss is hv3',
        f'the smallest change that fits: ask for MEMORY_MB:512, without required={AVX2} (on hv2)',
    ]


def test_where_nothing_helps_that_is_said(world: World) -> None:
    world.compute('hv1', MEMORY_MB=0)
    assert world.why(GUEST) == [
        'hv1: MEMORY_MB short by 256 (free 0 of 0)',
        'the nearest miss is hv1',
        'no change of the query fits any of them',
    ]


def test_computes_that_are_dead_closed_or_without_a_name(world: World) -> None:
    dead, stopped = world.compute('hv8', alive=False), world.compute('hv9', alive=False, VCPU=0)
    nameless = world.compute(None)
    world.compute('hv2', VCPU=0)
    bare = str(uuid.uuid4())
    world.etcd.put(keys.compute(bare), '{"hostname": "hv1"}', world.etcd.grant())
    # Somebody else's, in a placement that is shared.
    others = str(uuid.uuid4())
    world.placement.write('POST', '/resource_providers', {'uuid': others, 'name': 'nova'})
    found = world.why(f'{GUEST}&required={SHARES}')
    assert found[:3] == [
        'hv1: has no resource provider',
        'hv2: is closed: all its VCPU is reserved',
        f'{nameless}: lacks {SHARES}',
    ]
    assert found[3:5] == sorted([f'{dead}: is not alive', f'{stopped}: is closed: its ecompute was stopped'])
    assert found[5:] == [
        f'the nearest miss is {nameless}',
        f'the smallest change that fits: ask without required={SHARES} (on {nameless})',
    ]


def test_what_has_room_by_now(world: World) -> None:
    world.compute('hv1')
    world.compute('hv2', MEMORY_MB=128)
    assert world.why(GUEST) == [
        'hv1: has room by now: ask again',
        'hv2: MEMORY_MB short by 128 (free 128 of 128)',
    ]


def test_what_a_limit_leaves_out_is_not_to_be_asked_for_again(world: World) -> None:
    one, _ = world.compute('hv1'), world.compute('hv2')
    assert world.why(f'{GUEST}&limit=1', named=[one]) == [
        'hv1: has room by now: ask again',
        'hv2: has room, but limit=1 has placement name fewer computes: ask without it',
    ]
    web = Group('web', ANTI_AFFINITY, True, {'a': one})
    (first, second) = world.why(f'{GUEST}&limit=1', group=web, named=[one])
    assert first == 'hv1: group web has a member there (strict anti-affinity)'
    assert second == 'hv2: has room, but limit=1 has placement name fewer computes: ask without it'


def test_a_change_that_placement_would_not_take_is_not_named(world: World) -> None:
    # With no provider in the aggregate placement does not come to look at the trait, which it does not know.
    world.compute('hv1')
    aggregate = str(uuid.uuid4())
    assert world.why(f'{GUEST}&member_of={aggregate}&required=!CUSTOM_NOBODY_KNOWS') == [
        f'hv1: is not in aggregate {aggregate}',
        'the nearest miss is hv1',
    ]


def test_granular_nested_and_sharing_are_said_not_to_be_explained(world: World) -> None:
    assert world.why('resources1=VCPU:1&resources=MEMORY_MB:1,DISK_GB:1') == [
        'what each compute lacks is not explained for this query: it has granular groups (resources1)'
    ]
    flat, tree, near = world.compute('hv1'), world.compute('hv2'), world.compute('hv3')
    world.compute('child', alive=False, parent=tree)
    shares = world.compute('storage', alive=False)
    world.has(shares, SHARES)
    for each in (near, shares):
        put(world.placement, f'/resource_providers/{each}/aggregates', aggregates=[flat])
    found = world.why(f'{GUEST}&required={AVX2}')
    assert found[:3] == [
        f'hv1: lacks {AVX2}',
        'hv2: not explained: its resource providers are nested',
        f'hv3: not explained: provider {shares} shares with it',
    ]
    assert found[-2:] == [
        'the nearest miss is hv1',
        f'the smallest change that fits: ask without required={AVX2} (on hv1)',
    ]


def test_one_that_shares_is_named_for_what_another_has(world: World) -> None:
    near, shares = world.compute('hv1', VCPU=1), world.compute('hv2')
    world.has(near, AVX2)
    world.has(shares, SHARES)
    for each in (near, shares):
        put(world.placement, f'/resource_providers/{each}/aggregates', aggregates=[near])
    query = f'{GUEST.replace("VCPU:1", "VCPU:2")}&root_required={AVX2}'
    assert [shares] in [list(each) for each in candidates(world.placement, query).candidates]
    assert world.why(query) == [
        f'hv1: not explained: provider {shares} shares with it',
        'hv2: not explained: it shares with others',
    ]


def test_of_very_many_the_nearest_are_shown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, 'MOST', 5)
    monkeypatch.setattr(explain, 'SHOWN', 2)
    for number in range(1, 7):
        compute = world.compute(f'hv{number}', MEMORY_MB=128 + 100 * (number == 5))
        if number in (2, 5):
            world.has(compute, AVX2)
    dead = world.compute('hv9', alive=False)
    query = f'{GUEST}&required={AVX2}&root_required={AVX2}&in_tree={dead}'
    assert world.why(query) == [
        f'hv2: MEMORY_MB short by 128 (free 128 of 128); is not provider {dead}',
        f'hv5: MEMORY_MB short by 28 (free 228 of 228); is not provider {dead}',
        '5 more are not shown: no nearer, or not alive',
        'the nearest miss is hv5',
        f'the smallest change that fits: ask for MEMORY_MB:228, without in_tree={dead} (on hv5)',
    ]
    monkeypatch.setattr(explain, 'MOST', 7)
    assert len(world.why(query)) == 9


def test_what_was_asked_on_one_compute_is_told_of_that_and_with_the_words_that_were_typed(world: World) -> None:
    first = world.compute('hv1')
    world.compute('hv2')
    world.uses(first, VCPU=4)
    query = f'{GUEST}&in_tree={first}'
    assert world.why(query, on='hv1') == [
        'hv1: VCPU short by 1 (free 0 of 4)',
        'the smallest change that fits: ask without --on hv1 (on hv2)',
    ]
    assert world.why(query, on=first[:8])[1].startswith(f'the smallest change that fits: ask without --on {first[:8]} ')
    nobody = str(uuid.uuid4())
    assert world.why(f'{GUEST}&in_tree={nobody}', on=nobody) == [
        f'{nobody}: there is no such compute', f'the smallest change that fits: ask without --on {nobody} (on hv2)'
    ]  # fmt: skip


def test_a_disabled_one_that_was_asked_for_is_to_be_enabled(world: World) -> None:
    first = world.compute('hv1')
    world.compute('hv2')
    world.has(first, 'COMPUTE_STATUS_DISABLED')
    assert world.why(f'{GUEST}&in_tree={first}', on='hv1') == [
        'hv1: is disabled (eschedule host enable hv1)',
        'the smallest change that fits: eschedule host enable hv1, or ask without --on hv1 (on hv2)',
    ]


def test_the_others_of_a_set_are_called_so_and_no_members_of_its_group(world: World) -> None:
    first, second = world.compute('hv1'), world.compute('hv2', VCPU=1)
    size = {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 1}
    taken = [Candidate(first, {first: size}, None)]

    def why(policy: str, **members: str) -> list[str]:
        group = Group('web', policy, True, members)
        return [each for each in world.why(GUEST, group=group, taken=taken) if each.startswith('hv')]

    assert why(ANTI_AFFINITY)[0] == "hv1: the set's first takes hv1 (group web, strict anti-affinity)"
    assert why(AFFINITY)[1] == "hv2: the set's first takes hv1 (group web, strict affinity)"
    assert why(ANTI_AFFINITY, other=first)[0] == 'hv1: group web has a member there (strict anti-affinity)'
    assert why(AFFINITY, other=second)[0] == 'hv1: group web is on hv2 (strict affinity)'


@pytest.mark.parametrize('number', [1, 3, 60])
def test_the_calls_that_a_refusal_takes_do_not_grow_with_the_computes(world: World, number: int) -> None:
    for each in range(number):
        world.uses(world.compute(f'hv{each:02}', VCPU=2), VCPU=2)
    world.placement.calls.clear()
    before = world.placement.statements
    said = world.why(GUEST)
    assert said[-2:] == ['the nearest miss is hv00', 'no change of the query alone fits: free 1 VCPU on hv00']
    assert [each for each in said if 'VCPU short' in each] == [
        f'hv{each:02}: VCPU short by 1 (free 0 of 2)' for each in range(min(number, 10))
    ]
    # Who is there, who has memory free, and with what is left the limits of the nearest.
    limits = ['/inventories'] * min(number, 3)
    assert [each[-12:] for each in world.placement.calls] == ['ce_providers', '=MEMORY_MB:1', *limits]
    # The list of providers takes 2 SQL statements, the candidates 9, and limits 6 each.
    assert world.placement.statements - before == 11 + 6 * len(limits)


def test_what_is_full_of_everything_is_as_large_as_it_says(world: World) -> None:
    computes = [world.compute(f'hv{number}', MEMORY_MB=512) for number in range(1, 5)]
    for number, compute in enumerate(computes, 1):
        world.uses(compute, VCPU=4, MEMORY_MB=512, DISK_GB=25)
        world.says(compute, f'hv{number}', VCPU=[4, 25], MEMORY_MB=[512, 0], DISK_GB=[25, 0])
    world.has(computes[1], 'COMPUTE_STATUS_DISABLED')
    # Of this one nothing is said, and of this one it is not true that no more is given than there is.
    world.says(computes[2], 'hv3')
    world.says(computes[3], 'hv4', VCPU=[4, -25], MEMORY_MB=[512, 0], DISK_GB=[25, 0])
    world.placement.calls.clear()
    full = 'VCPU short by 1 (free 0 of 4); MEMORY_MB short by 256 (free 0 of 512); DISK_GB short by 1 (free 0 of 25)'
    said = world.why(GUEST)
    assert len(world.placement.calls) == 5, world.placement.calls
    assert said == [
        f'hv1: {full}',
        f'hv2: is disabled (eschedule host enable hv2); {full}',
        '2 more are not shown: no nearer, or not alive',
        'the nearest miss is hv1',
        'no change of the query alone fits: free 1 VCPU and 256 MEMORY_MB and 1 DISK_GB on hv1',
    ]


def test_a_change_that_fits_is_asked_about_on_one_compute(world: World) -> None:
    for each in range(60):
        world.compute(f'hv{each:02}', VCPU=2)
    world.placement.calls.clear()
    assert world.why(GUEST.replace('VCPU:1', 'VCPU:3'))[-1] == 'the smallest change that fits: ask for VCPU:2 (on hv00)'
    assert [each.rpartition('/')[2].partition('?')[0] for each in world.placement.calls] == [
        'resource_providers', 'allocation_candidates', 'inventories', 'inventories', 'allocation_candidates',
    ]  # fmt: skip
    assert 'in_tree=' in world.placement.calls[-1]


def test_a_limit_that_somebody_set_is_said(world: World) -> None:
    for number in (1, 2):
        compute = world.compute(f'hv{number}')
        inventories = {name: {'total': 64} for name in ('VCPU', 'DISK_GB')} | {'MEMORY_MB': {'total': 512}}
        inventories['VCPU']['max_unit'] = 2
        put(world.placement, f'/resource_providers/{compute}/inventories', inventories=inventories)
    world.placement.calls.clear()
    said = world.why(GUEST.replace('VCPU:1', 'VCPU:3'))
    assert said[:2] == [f'hv{number}: VCPU:3 is more than one may have (max_unit 2)' for number in (1, 2)]
    assert said[-1] == 'the smallest change that fits: ask for VCPU:2 (on hv1)'
    assert len(world.placement.calls) == 5


# What is said of a request that finds no room is what placement itself would say: thousands of random requests.


CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB', 'VGPU')
TRAITS = ('HW_CPU_X86_AVX2', 'HW_CPU_X86_VMX', 'STORAGE_DISK_SSD', 'COMPUTE_STATUS_DISABLED')
RATIOS = (1.0, 1.0, 1.0, 1.5, 16.0, 0.5, 0.1, 1 / 3, 1.1, 2.7)
AGGREGATES = tuple(str(uuid.UUID(int=number)) for number in range(4))
"""Nobody is in the last one."""


def test_what_is_said_is_what_placement_does(in_process: InProcess) -> None:
    seen = ask(in_process, range(6), 10)
    # None of the cases is one that never came up.
    assert all(seen[each] > 1 for each in ('refused', 'fits', 'changed', 'freed', 'beyond', 'found')), seen
    assert seen['found'] > 5 * seen['not found'], seen


@pytest.mark.slow
@pytest.mark.parametrize('first', range(1000, 1200, 10))
def test_what_is_said_is_what_placement_does_at_length(in_process: InProcess, first: int) -> None:
    seen = ask(in_process, range(first, first + 10), 50)
    assert all(seen[each] > 10 for each in ('refused', 'fits', 'changed')), seen


def ask(placement: InProcess, seeds: range, requests: int) -> Counter[str]:
    """A random cluster for each seed, and so many requests of each."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += cluster_and_requests(placement, random.Random(seed), requests)
    assert seen['requests'] == len(seeds) * requests
    return seen


def cluster_and_requests(placement: InProcess, rng: random.Random, count: int) -> Counter[str]:
    """Ask a random cluster so many random requests; what came up, and how often."""
    made = make_cluster(placement, rng)
    listed = providers.everyone(placement)
    assert listed.keys() == set(made)
    found = (providers.look(placement, each, listed[each].alone, traits=True, aggregates=True) for each in listed)
    known = [each for each in found if each is not None]
    sharing = [each for each in known if providers.SHARES in each.traits]
    seen: Counter[str] = Counter()
    while seen['requests'] < count:
        query = make_query(rng, known)
        try:
            named = candidates(placement, query).candidates
        except PlacementRefusal:
            continue  # it contradicts itself
        seen['requests'] += 1
        seen += judged(placement, query, known, sharing, named)
        seen += in_few_calls(placement, query, known, sharing)
    holds_by_itself(placement, make_query(rng, known), known, sharing)
    empty(placement)
    return seen


def judged(
    placement: InProcess, query: str, providers: list[Provider], sharing: list[Provider], named: list[Allocations]
) -> Counter[str]:
    """Compare what is said of a request with what placement answered."""
    asked = parse(enabled_only(query))
    assert set(parse(words(asked))) == set(asked)
    misses = []
    seen: Counter[str] = Counter()
    for each in providers:
        if unexplained(asked, each, sharing) is not None:
            seen['beyond'] += 1
            continue
        misses.append(miss(asked, each))
        assert misses[-1].fits == any(each.uuid in together for together in named), (query, each, misses[-1])
        seen['explained'] += 1
        seen['fits'] += misses[-1].fits
    if named:
        return seen
    seen['refused'] += 1
    best = smallest(misses)
    if best is None:
        return seen
    assert best.cures
    now, provider = changed(asked, best.cures), next(each for each in providers if each.uuid == best.provider)
    if any(cure.freed for cure in best.cures):
        seen['freed'] += 1
        assert miss(now, freed(provider, best.cures)).fits, (query, provider, best)
        assert not any(each.cures and not any(cure.freed for cure in each.cures) for each in misses)
    else:
        seen['changed'] += 1
        named = candidates(placement, words(now)).candidates
        assert any(best.provider in each for each in named), (query, provider, best)
    return seen


def in_few_calls(placement: InProcess, query: str, providers: list[Provider], sharing: list[Provider]) -> Counter[str]:
    """What a few calls tell of the providers is what each of them says by itself."""
    asked, before = parse(enabled_only(query)), len(placement.calls)
    exact = {each.uuid: each for each in providers}
    try:
        facts = Facts(placement, asked)
        found = facts.find(exact, dict.fromkeys(exact, Living()), {})
    except Unexplained:
        return Counter({'too much': 1})
    assert len(placement.calls) - before <= CALLS, placement.calls[before:]
    for each in found.values():
        own = exact[each.uuid]
        assert {name: (have.capacity, have.used) for name, have in each.inventories.items()} == {
            name: (have.capacity, have.used) for name, have in own.inventories.items()
        }
        assert set(each.traits) == set(own.traits)
        assert (unexplained(asked, each, facts.sharing) is None) == (unexplained(asked, own, sharing) is None)
        if unexplained(asked, own, sharing) is None:
            says, said = miss(asked, each), miss(asked, own)
            assert says.fits == said.fits
            # But for a limit of one amount, beside something else that it lacks.
            missed, lacking = ({failure.constraint for failure in each.failures} for each in (says, said))
            assert missed <= lacking
    return Counter({'found': len(found), 'not found': len(exact) - len(found), 'plain': 1})


def holds_by_itself(placement: InProcess, query: str, known: list[Provider], sharing: list[Provider]) -> None:
    """Asked for each constraint alone, placement names those providers on which that one does not fail."""
    asked = parse(enabled_only(query))
    for constraint in asked:
        holding = providers.holding(placement, constraint)
        for each in known:
            if unexplained(asked, each, sharing) is None:
                failing = {failure.constraint for failure in miss(asked, each).failures}
                assert (constraint not in failing) == (each.uuid in holding), (constraint, each)


def freed(provider: Provider, cures: tuple[Cure, ...]) -> Provider:
    """The provider with so much less used."""
    less = dict(provider.inventories)
    for each in cures:
        if each.freed and isinstance(each.constraint, Amount):
            name = each.constraint.name
            assert less[name].used >= each.freed
            less[name] = less[name]._replace(used=less[name].used - each.freed)
    return replace(provider, inventories=less)


def make_cluster(placement: InProcess, rng: random.Random) -> list[str]:
    """Two to six providers; now and then a nested one, and one that shares."""
    made: list[str] = []
    nested, shares = rng.random() < 0.2, rng.random() < 0.3
    for number in range(rng.randint(2, 6)):
        provider = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        # One that shares and has a parent is more than placement itself can take: HTTP 500.
        parent = made[0] if nested and number in (2, 3) else None
        body = {'uuid': provider, 'name': provider, 'parent_provider_uuid': parent}
        placement.write('POST', '/resource_providers', body)
        made.append(provider)
        path = f'/resource_providers/{provider}'
        inventories = {name: inventory(rng) for name in CLASSES if rng.random() < (0.3 if name == 'VGPU' else 0.95)}
        # Used before the limits are as they will be: they are not always kept to.
        put(placement, f'{path}/inventories', inventories={name: {'total': 1000} for name in inventories})
        full = rng.random() < 0.25
        used = {name: rng.randint(1, 12) for name in inventories if rng.random() < 0.3}
        if full and 'VCPU' in inventories:
            used['VCPU'] = 40
        if used:
            held = {provider: {'resources': used}}
            who = {'user_id': 'u', 'project_id': 'p', 'consumer_generation': None, 'consumer_type': 'INSTANCE'}
            placement.write('PUT', f'/allocations/{consumer_of(provider)}', {'allocations': held, **who})
        put(placement, f'{path}/inventories', inventories=inventories)
        traits = [name for name in TRAITS if rng.random() < 0.5]
        if shares and number == 1:
            traits.append(providers.SHARES)
        put(placement, f'{path}/traits', traits=traits)
        put(placement, f'{path}/aggregates', aggregates=[name for name in AGGREGATES[:-1] if rng.random() < 0.4])
    return made


def inventory(rng: random.Random) -> dict[str, object]:
    """A class of a provider: mostly plain, at times with every limit there is."""
    total = rng.randint(1, 32)
    made: dict[str, object] = {'total': total, 'allocation_ratio': rng.choice(RATIOS)}
    if rng.random() < 0.2:
        made['reserved'] = rng.randint(0, total)
    if rng.random() < 0.3:
        made |= {'min_unit': rng.randint(1, 5), 'max_unit': rng.randint(1, 24), 'step_size': rng.randint(1, 4)}
    return made


def make_query(rng: random.Random, providers: list[Provider]) -> str:
    """Up to four classes, most of them about as much as somebody has, and at times everything else a query may have."""
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
        parts.append(f'in_tree={rng.choice([*(each.uuid for each in providers), AGGREGATES[0]])}')
    if rng.random() < 0.1:
        parts.append('limit=1000')
    rng.shuffle(parts)
    if rng.random() < 0.05:
        parts.insert(0, 'resources=DISK_GB:1')  # of two, the last counts
    return '&'.join(parts)


def consumer_of(provider: str) -> str:
    """The one that uses it."""
    return str(uuid.uuid5(uuid.UUID(provider), 'consumer'))
