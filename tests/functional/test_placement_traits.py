"""Test a compute's traits, aggregates and ratios: its own are updated, foreign ones stay."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.host.claims import BELIEVED, Generations
from ecomp.agent.host.provider import Inventory, Registration, with_ratios
from ecomp.errors import NotFound, PlacementRefusal, UsageError
from ecomp.model.status import BY_OPERATOR, DISABLED
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.placement.providers import AGGREGATES, TRAITS
from tests.functional.placement_client import claim, connected, new
from tests.kit.servers import PlacementServer

AVX2 = 'HW_CPU_X86_AVX2'
SSD = 'STORAGE_DISK_SSD'
RACK = 'CUSTOM_RACK_7'
FAST = 'CUSTOM_FAST'
TOTALS = {name: {'total': 16, 'reserved': 0} for name in ('VCPU', 'MEMORY_MB', 'DISK_GB')}
INVENTORY = with_ratios(TOTALS, {})

Make = Callable[..., Registration]


@pytest.fixture
def compute() -> str:
    return new()


@pytest.fixture
def make(client: Placement, compute: str, tmp_path: Path) -> Make:
    """Provide a function that makes the registration of one start of the compute.

    All starts use the same state directory.
    """

    def make_one(
        *configured: str,
        found: tuple[str, ...] = (),
        aggregates: tuple[str, ...] = (),
        inventory: Inventory = INVENTORY,
    ) -> Registration:
        return Registration(client, compute, inventory, found, configured, aggregates, tmp_path)

    return make_one


def has(client: Placement, compute: str, kind: str = TRAITS) -> set[str]:
    return set(providers.names_of(client, compute, kind))


def by_hand(client: Placement, compute: str, *names: str, kind: str = TRAITS) -> None:
    """Add traits or aggregates outside ecompute."""
    if kind == TRAITS:
        providers.make_known(client, names)
    providers.change_names(client, compute, kind, lambda there: there | set(names))


def open_() -> bool:
    return False


def test_what_is_configured_and_found_is_there_and_goes_again(client: Placement, compute: str, make: Make) -> None:
    own_aggregate, foreign_aggregate = new(), new()
    make(SSD, RACK, found=(AVX2,), aggregates=(own_aggregate,)).register()
    by_hand(client, compute, FAST)
    by_hand(client, compute, foreign_aggregate, kind=AGGREGATES)
    assert has(client, compute) == {SSD, RACK, AVX2, FAST}
    assert has(client, compute, AGGREGATES) == {own_aggregate, foreign_aggregate}
    make(SSD, found=()).register()
    assert has(client, compute) == {SSD, FAST}
    assert has(client, compute, AGGREGATES) == {foreign_aggregate}
    # A trait that existed before it was configured is not removed with the configuration.
    make(SSD, FAST).register()
    make().register()
    assert has(client, compute) == {FAST}


def test_registering_again_what_is_as_it_should_be_writes_nothing(client: Placement, compute: str, make: Make) -> None:
    def read_generation() -> int:
        return int(client.get(f'/resource_providers/{compute}')['generation'])

    make(SSD, aggregates=(new(),)).register()
    aggregates = json.loads(json.dumps(client.get(f'/resource_providers/{compute}/aggregates')['aggregates']))
    repeated = make(SSD, aggregates=tuple(aggregates))
    before = read_generation()
    repeated.register()
    assert read_generation() == before
    repeated.keep(open_)
    assert read_generation() == before


def test_what_a_registration_asks(client: Placement, compute: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the number of calls, because a thousand computes may start concurrently."""
    calls: list[str] = []

    def counted(name: str) -> None:
        real = getattr(client, name)

        def call(*words: Any) -> Any:
            verb, path = words[:2] if name == 'write' else ('GET', words[0])
            calls.append(f'{verb} {path.removeprefix(f"/resource_providers/{compute}")}')
            return real(*words)

        monkeypatch.setattr(client, name, call)

    counted('get')
    counted('write')
    registration = make()
    registration.register()
    initial, calls[:] = list(calls), []
    registration.keep(open_, Generations(client, several=False).of(compute))
    assert calls == ['GET ']
    assert registration.new_at == providers.generation(client, compute)
    calls.clear()
    assert initial == ['GET /inventories', 'POST /resource_providers', 'PUT /inventories']
    repeated = make()
    repeated.register()
    unchanged, calls[:] = list(calls), []
    assert unchanged == ['GET /inventories', 'GET /usages', 'GET /traits']
    repeated.close()
    closed, calls[:] = list(calls), []
    assert closed == ['GET ', 'PUT /inventories', 'GET /traits', 'PUT /traits']
    make().register()
    changed = ['GET /inventories', 'GET /usages', 'GET /traits', 'PUT /traits', 'GET ', 'PUT /inventories']
    assert calls == changed


def test_an_unchanged_provider_is_one_question_a_few_times(
    client: Placement, compute: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().register()
    registration = make()
    registration.register()  # writes nothing, so the registration does not know the generation
    comparisons: list[str] = []
    real = providers.is_as

    def is_as(*words: Any) -> bool | None:
        comparisons.append('looked')
        return real(*words)

    monkeypatch.setattr(providers, 'is_as', is_as)
    generations = Generations(client, several=False)
    for _ in range(1 + BELIEVED):
        registration.keep(open_, generations.of(compute))
    assert len(comparisons) == 1
    registration.keep(open_, generations.of(compute))
    assert len(comparisons) == 2, 'a database that was restored may have counted up to it again'
    by_hand(client, compute, FAST)
    registration.keep(open_, generations.of(compute))
    assert len(comparisons) == 3
    registration.keep(open_)
    assert len(comparisons) == 4, 'where it is not known'
    client.write('DELETE', f'/resource_providers/{compute}', None)
    generation = generations.of(compute)
    assert generation is None
    registration.keep(open_, generation)
    assert generations.of(compute) is not None


def test_of_many_there_is_one_question_for_all(client: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = [new() for _ in range(5)]
    for provider in uuids:
        providers.ensure(client, provider)
    shared, single = Generations(client, several=True), Generations(client, several=False)
    paths: list[str] = []
    real = client.get

    def get(path: str) -> Any:
        paths.append(path)
        return real(path)

    monkeypatch.setattr(client, 'get', get)
    assert [shared.of(provider) for provider in uuids] == [0] * 5
    assert shared.of(new()) is None
    assert paths == ['/resource_providers']
    assert [single.of(provider) for provider in uuids] == [0] * 5
    assert single.of(new()) is None


def test_ratios(client: Placement, compute: str, make: Make) -> None:
    make(inventory=with_ratios(TOTALS, {'VCPU': 1.3, 'DISK_GB': 2})).register()
    inventory = providers.inventory(client, compute)
    assert {name: amounts['allocation_ratio'] for name, amounts in inventory.items()} == {
        'VCPU': 1.3,
        'MEMORY_MB': 1.0,
        'DISK_GB': 2.0,
    }
    claim(client, new(), compute, VCPU=16, MEMORY_MB=1, DISK_GB=20)
    claim(client, new(), compute, VCPU=4, MEMORY_MB=1, DISK_GB=12)
    make(inventory=with_ratios(TOTALS, {'VCPU': 2, 'DISK_GB': 2})).register()
    assert providers.inventory(client, compute)['VCPU']['allocation_ratio'] == 2


def test_what_was_changed_by_hand_or_restored_is_put_right(client: Placement, compute: str, make: Make) -> None:
    group, stranger = new(), new()
    provider = make(SSD, RACK, aggregates=(group,), inventory=with_ratios(TOTALS, {'VCPU': 4}))
    provider.register()
    for spoil in (
        lambda: providers.change_names(client, compute, TRAITS, lambda _: frozenset({FAST, SSD})),
        lambda: providers.change_names(client, compute, AGGREGATES, lambda _: frozenset({stranger})),
        lambda: providers.set_inventory(client, compute, TOTALS),
        lambda: providers.change_names(client, compute, TRAITS, lambda there: there | {DISABLED}),
    ):
        by_hand(client, compute, FAST)
        spoil()
        provider.keep(lambda: True)
        assert has(client, compute) != {SSD, RACK, FAST} or has(client, compute, AGGREGATES) == {stranger} or (
            providers.inventory(client, compute)['VCPU']['allocation_ratio'] == 1
        ), 'one that is closing leaves it'
        provider.keep(open_)
        assert has(client, compute) == {SSD, RACK, FAST}
        assert group in has(client, compute, AGGREGATES)
        assert providers.inventory(client, compute)['VCPU']['allocation_ratio'] == 4
    providers.delete(client, compute)
    provider.keep(open_)
    assert has(client, compute) == {SSD, RACK}
    assert has(client, compute, AGGREGATES) == {group}


def test_closed_and_opened_and_disabled(client: Placement, compute: str, make: Make) -> None:
    def offered() -> bool:
        return bool(allocations.candidates(client, f'resources=VCPU:1&in_tree={compute}').candidates)

    provider = make(RACK)
    provider.register()
    assert offered()
    provider.close()
    assert not offered()
    assert has(client, compute) == {RACK, DISABLED}
    assert providers.inventory(client, compute)['VCPU']['reserved'] == 16
    make(RACK).register()
    assert offered()
    by_hand(client, compute, DISABLED, BY_OPERATOR)
    assert not offered()
    assert allocations.candidates(client, f'resources=VCPU:1&in_tree={compute}&required={DISABLED}').candidates
    provider.keep(open_)
    provider.close()
    provider = make(RACK)
    provider.register()
    assert has(client, compute) == {RACK, DISABLED, BY_OPERATOR}
    assert not offered()
    providers.change_names(client, compute, TRAITS, lambda there: there - {BY_OPERATOR})
    provider.keep(open_)
    assert offered()


@pytest.mark.parametrize(
    'query',
    [
        'resources=VCPU:1&root_required=CUSTOM_RACK_7',
        'resources=VCPU:1&root_required=!CUSTOM_FAST&required=CUSTOM_RACK_7',
        'resources1=VCPU:1&resources2=DISK_GB:1&group_policy=none',
        'resources1=VCPU:1&required1=CUSTOM_RACK_7&root_required=CUSTOM_RACK_7',
    ],
)
def test_whatever_the_query_is_a_disabled_one_is_left_out(
    client: Placement, compute: str, make: Make, query: str
) -> None:
    providers.make_known(client, [FAST])
    tree = 'in_tree1' if 'resources1' in query else 'in_tree'
    query = f'{query}&{tree}={compute}'
    make(RACK).register()
    assert allocations.candidates(client, query).candidates
    by_hand(client, compute, DISABLED)
    assert allocations.candidates(client, query).candidates == []


AVX = 'HW_CPU_X86_AVX'
VMX = 'HW_CPU_X86_VMX'


@pytest.mark.parametrize('value', ['', f'in:{AVX},{VMX}', f'{AVX}&root_required={VMX}'])
def test_a_bad_root_required_is_refused_in_placement_s_words(client: Placement, value: str) -> None:
    query = f'resources=VCPU:1&root_required={value}'
    with pytest.raises(PlacementRefusal) as direct:
        client.get(f'/allocation_candidates?{query}')
    with pytest.raises(PlacementRefusal) as through_client:
        allocations.candidates(client, query)
    assert str(through_client.value) == str(direct.value)
    assert 'comply' not in str(direct.value)


def test_what_placement_does_not_know_is_said_with_what_was_meant(client: Placement) -> None:
    with pytest.raises(PlacementRefusal) as refused:
        allocations.candidates(client, f'resources=VCPUS:1&root_required={AVX}0&required=!CUSTOM_NO_SUCH')
    assert str(refused.value) == (
        'placement knows no resource class VCPUS (did you mean VCPU?); placement knows no trait '
        f'{AVX}0 (did you mean {AVX}?); placement knows no trait CUSTOM_NO_SUCH'
    )


def test_a_trait_this_placement_does_not_know(client: Placement, compute: str, make: Make) -> None:
    """Check a trait that is newer than placement's os-traits."""
    make(SSD, found=(AVX2, 'HW_CPU_X86_NEWER')).register()
    assert has(client, compute) == {SSD, AVX2}
    with pytest.raises(UsageError, match='traits: HW_CPU_X86_NEWER: placement at .* does not know it'):
        make(SSD, 'HW_CPU_X86_NEWER').register()


def test_others_change_the_provider_all_the_time(
    client: Placement, compute: str, make: Make, placement: PlacementServer
) -> None:
    make().register()
    stop = threading.Event()

    def meddle() -> int:
        changes = 0
        with connected(placement.url) as own_client:
            while not stop.wait(0.02):
                changes += providers.change_names(own_client, compute, TRAITS, lambda there: there ^ {AVX2})
        return changes

    with ThreadPoolExecutor(1) as pool:
        meddler = pool.submit(meddle)
        try:
            for number in range(4):
                make(RACK, *([SSD] if number % 2 else []), aggregates=(compute,)).register()
                assert has(client, compute) - {AVX2} == ({RACK, SSD} if number % 2 else {RACK})
        finally:
            stop.set()
    assert meddler.result() > 0
    assert has(client, compute, AGGREGATES) == {compute}


def test_no_such_provider(client: Placement) -> None:
    with pytest.raises(NotFound):
        providers.names_of(client, new(), TRAITS)
    assert providers.having(client, 'CUSTOM_NOBODY_HAS_MADE_THIS') == frozenset()


@pytest.mark.parametrize(
    ('text', 'why'), [('{', 'not JSON'), ('[]', 'expected a JSON object'), ('{"version": 2}', 'version 2')]
)
def test_what_it_remembers_cannot_be_read(make: Make, tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / 'provider.json').write_text(text)
    with pytest.raises(UsageError, match=f'provider.json: cannot be understood .{why}'):
        make()


def test_another_uuid_in_the_same_state(client: Placement, make: Make, tmp_path: Path) -> None:
    make(RACK).register()
    other = new()
    providers.ensure(client, other)
    by_hand(client, other, RACK)
    Registration(client, other, INVENTORY, (), (), (), tmp_path).register()
    assert has(client, other) == {RACK}, 'it is not by the other one that we put it there'
