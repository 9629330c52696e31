"""Test a compute's traits, aggregates and ratios: its own are updated, foreign ones stay."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.host.claims import MAX_SKIPPED_CHECKS
from ecomp.agent.host.provider import PlacementInventory, Registration, add_ratios
from ecomp.errors import NotFound, PlacementRefusal, UsageError
from ecomp.model.status import DISABLED, DISABLED_BY_OPERATOR
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.placement.providers import AGGREGATES, TRAITS
from tests.functional.placement_client import claim, make_uuid, open_client
from tests.kit.servers import PlacementServer

AVX2 = 'HW_CPU_X86_AVX2'
SSD = 'STORAGE_DISK_SSD'
RACK = 'CUSTOM_RACK_7'
FAST = 'CUSTOM_FAST'
TOTALS = {name: {'total': 16, 'reserved': 0} for name in ('VCPU', 'MEMORY_MB', 'DISK_GB')}
INVENTORY = add_ratios(TOTALS, {})

MakeRegistration = Callable[..., Registration]


@pytest.fixture
def compute() -> str:
    return make_uuid()


@pytest.fixture
def make_registration(client: Placement, compute: str, tmp_path: Path) -> MakeRegistration:
    def make_one(
        *configured: str,
        detected: tuple[str, ...] = (),
        aggregates: tuple[str, ...] = (),
        inventory: PlacementInventory = INVENTORY,
    ) -> Registration:
        return Registration(client, compute, inventory, detected, configured, aggregates, tmp_path)

    return make_one


def read_names(client: Placement, compute: str, kind: str = TRAITS) -> set[str]:
    return set(providers.read_names(client, compute, kind))


def add_foreign_names(client: Placement, compute: str, *names: str, kind: str = TRAITS) -> None:
    if kind == TRAITS:
        providers.create_missing_traits(client, names)
    providers.change_names(client, compute, kind, lambda there: there | set(names))


def is_closing() -> bool:
    return False


def test_registration_adds_and_removes_only_its_own_names(
    client: Placement, compute: str, make_registration: MakeRegistration
) -> None:
    own_aggregate, foreign_aggregate = make_uuid(), make_uuid()
    make_registration(SSD, RACK, detected=(AVX2,), aggregates=(own_aggregate,)).register()
    add_foreign_names(client, compute, FAST)
    add_foreign_names(client, compute, foreign_aggregate, kind=AGGREGATES)
    assert read_names(client, compute) == {SSD, RACK, AVX2, FAST}
    assert read_names(client, compute, AGGREGATES) == {own_aggregate, foreign_aggregate}
    make_registration(SSD, detected=()).register()
    assert read_names(client, compute) == {SSD, FAST}
    assert read_names(client, compute, AGGREGATES) == {foreign_aggregate}
    # A trait that existed before it was configured is not removed with the configuration.
    make_registration(SSD, FAST).register()
    make_registration().register()
    assert read_names(client, compute) == {FAST}


def test_unchanged_registration_writes_nothing(
    client: Placement, compute: str, make_registration: MakeRegistration
) -> None:
    def read_generation() -> int:
        return int(client.get(f'/resource_providers/{compute}')['generation'])

    make_registration(SSD, aggregates=(make_uuid(),)).register()
    aggregates = json.loads(json.dumps(client.get(f'/resource_providers/{compute}/aggregates')['aggregates']))
    repeated = make_registration(SSD, aggregates=tuple(aggregates))
    before = read_generation()
    repeated.register()
    assert read_generation() == before
    repeated.ensure_registered(is_closing)
    assert read_generation() == before


def test_registration_calls_of_a_new_an_unchanged_and_a_closed_provider(
    client: Placement, compute: str, make_registration: MakeRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the number of calls, because a thousand computes may start concurrently."""
    calls: list[str] = []

    def count_calls(name: str) -> None:
        real = getattr(client, name)

        def call(*args: Any) -> Any:
            verb, path = args[:2] if name == 'write' else ('GET', args[0])
            calls.append(f'{verb} {path.removeprefix(f"/resource_providers/{compute}")}')
            return real(*args)

        monkeypatch.setattr(client, name, call)

    count_calls('get')
    count_calls('write')
    registration = make_registration()
    registration.register()
    initial, calls[:] = list(calls), []
    registration.ensure_registered(is_closing, providers.read_generation(client, compute))
    read = ['GET /inventories', 'GET /traits', 'GET /aggregates']
    assert calls == ['GET '], 'what it publishes is known since its start'
    assert registration.created_generation == providers.read_generation(client, compute)
    calls.clear()
    assert initial == ['GET /inventories', 'POST /resource_providers', 'PUT /inventories', *read]
    repeated = make_registration()
    repeated.register()
    unchanged, calls[:] = list(calls), []
    assert unchanged == [*read, 'GET /usages', 'GET /traits']
    repeated.close()
    closed, calls[:] = list(calls), []
    assert closed == ['GET ', 'PUT /inventories', 'GET /traits', 'PUT /traits']
    make_registration().register()
    changed = [*read, 'GET /usages', 'GET /traits', 'PUT /traits', 'GET ', 'PUT /inventories', *read]
    assert calls == changed


def test_unchanged_provider_is_reread_after_several_checks(
    client: Placement, compute: str, make_registration: MakeRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_registration().register()
    registration = make_registration()
    registration.register()  # writes nothing, so the registration does not know the generation
    comparisons: list[str] = []
    real = providers.has_inventory

    def has_inventory(*args: Any) -> bool:
        comparisons.append('looked')
        return real(*args)

    monkeypatch.setattr(providers, 'has_inventory', has_inventory)
    for _ in range(1 + MAX_SKIPPED_CHECKS):
        registration.ensure_registered(is_closing, providers.read_generation(client, compute))
    assert len(comparisons) == 1
    registration.ensure_registered(is_closing, providers.read_generation(client, compute))
    assert len(comparisons) == 2, 'a database that was restored may have counted up to it again'
    add_foreign_names(client, compute, FAST)
    registration.ensure_registered(is_closing, providers.read_generation(client, compute))
    assert len(comparisons) == 3
    registration.ensure_registered(is_closing)
    assert len(comparisons) == 4, 'where it is not known'
    client.write('DELETE', f'/resource_providers/{compute}', None)
    registration.ensure_registered(is_closing)
    assert providers.read_generation(client, compute) > 0


def test_allocation_ratios_apply_to_claims(
    client: Placement, compute: str, make_registration: MakeRegistration
) -> None:
    make_registration(inventory=add_ratios(TOTALS, {'VCPU': 1.3, 'DISK_GB': 2})).register()
    inventory = providers.read_raw_inventory(client, compute)
    assert {name: amounts['allocation_ratio'] for name, amounts in inventory.items()} == {
        'VCPU': 1.3,
        'MEMORY_MB': 1.0,
        'DISK_GB': 2.0,
    }
    claim(client, make_uuid(), compute, VCPU=16, MEMORY_MB=1, DISK_GB=20)
    claim(client, make_uuid(), compute, VCPU=4, MEMORY_MB=1, DISK_GB=12)
    make_registration(inventory=add_ratios(TOTALS, {'VCPU': 2, 'DISK_GB': 2})).register()
    assert providers.read_raw_inventory(client, compute)['VCPU']['allocation_ratio'] == 2


def test_provider_changed_outside_ecomp_is_repaired(
    client: Placement, compute: str, make_registration: MakeRegistration
) -> None:
    group, stranger = make_uuid(), make_uuid()
    provider = make_registration(SSD, RACK, aggregates=(group,), inventory=add_ratios(TOTALS, {'VCPU': 4}))
    provider.register()
    for spoil in (
        lambda: providers.change_names(client, compute, TRAITS, lambda _: frozenset({FAST, SSD})),
        lambda: providers.change_names(client, compute, AGGREGATES, lambda _: frozenset({stranger})),
        lambda: providers.set_inventory(client, compute, TOTALS),
        lambda: providers.change_names(client, compute, TRAITS, lambda there: there | {DISABLED}),
    ):
        add_foreign_names(client, compute, FAST)
        spoil()
        provider.ensure_registered(lambda: True)
        assert (
            read_names(client, compute) != {SSD, RACK, FAST}
            or read_names(client, compute, AGGREGATES) == {stranger}
            or (providers.read_raw_inventory(client, compute)['VCPU']['allocation_ratio'] == 1)
        ), 'one that is closing leaves it'
        provider.ensure_registered(is_closing)
        assert read_names(client, compute) == {SSD, RACK, FAST}
        assert group in read_names(client, compute, AGGREGATES)
        assert providers.read_raw_inventory(client, compute)['VCPU']['allocation_ratio'] == 4
    providers.delete_provider(client, compute)
    provider.ensure_registered(is_closing)
    assert read_names(client, compute) == {SSD, RACK}
    assert read_names(client, compute, AGGREGATES) == {group}


def test_closed_opened_and_disabled_provider(
    client: Placement, compute: str, make_registration: MakeRegistration
) -> None:
    def is_candidate() -> bool:
        return bool(allocations.read_candidates(client, f'resources=VCPU:1&in_tree={compute}').candidates)

    provider = make_registration(RACK)
    provider.register()
    assert is_candidate()
    provider.close()
    assert not is_candidate()
    assert read_names(client, compute) == {RACK, DISABLED}
    assert providers.read_raw_inventory(client, compute)['VCPU']['reserved'] == 16
    make_registration(RACK).register()
    assert is_candidate()
    add_foreign_names(client, compute, DISABLED, DISABLED_BY_OPERATOR)
    assert not is_candidate()
    assert allocations.read_candidates(client, f'resources=VCPU:1&in_tree={compute}&required={DISABLED}').candidates
    provider.ensure_registered(is_closing)
    provider.close()
    provider = make_registration(RACK)
    provider.register()
    assert read_names(client, compute) == {RACK, DISABLED, DISABLED_BY_OPERATOR}
    assert not is_candidate()
    providers.change_names(client, compute, TRAITS, lambda there: there - {DISABLED_BY_OPERATOR})
    provider.ensure_registered(is_closing)
    assert is_candidate()


@pytest.mark.parametrize(
    'query',
    [
        'resources=VCPU:1&root_required=CUSTOM_RACK_7',
        'resources=VCPU:1&root_required=!CUSTOM_FAST&required=CUSTOM_RACK_7',
        'resources1=VCPU:1&resources2=DISK_GB:1&group_policy=none',
        'resources1=VCPU:1&required1=CUSTOM_RACK_7&root_required=CUSTOM_RACK_7',
    ],
)
def test_disabled_compute_is_excluded_from_every_query_form(
    client: Placement, compute: str, make_registration: MakeRegistration, query: str
) -> None:
    providers.create_missing_traits(client, [FAST])
    tree = 'in_tree1' if 'resources1' in query else 'in_tree'
    query = f'{query}&{tree}={compute}'
    make_registration(RACK).register()
    assert allocations.read_candidates(client, query).candidates
    add_foreign_names(client, compute, DISABLED)
    assert allocations.read_candidates(client, query).candidates == []


AVX = 'HW_CPU_X86_AVX'
VMX = 'HW_CPU_X86_VMX'


@pytest.mark.parametrize('value', ['', f'in:{AVX},{VMX}', f'{AVX}&root_required={VMX}'])
def test_bad_root_required_is_refused_with_placement_s_message(client: Placement, value: str) -> None:
    query = f'resources=VCPU:1&root_required={value}'
    with pytest.raises(PlacementRefusal) as direct:
        client.get(f'/allocation_candidates?{query}')
    with pytest.raises(PlacementRefusal) as through_client:
        allocations.read_candidates(client, query)
    assert str(through_client.value) == str(direct.value)
    assert 'comply' not in str(direct.value)


def test_unknown_names_are_refused_with_suggestions(client: Placement) -> None:
    with pytest.raises(PlacementRefusal) as refused:
        allocations.read_candidates(client, f'resources=VCPUS:1&root_required={AVX}0&required=!CUSTOM_NO_SUCH')
    assert str(refused.value) == (
        'placement knows no resource class VCPUS (did you mean VCPU?); placement knows no trait '
        f'{AVX}0 (did you mean {AVX}?); placement knows no trait CUSTOM_NO_SUCH'
    )


def test_unknown_trait_is_skipped_if_detected_refused_if_configured(
    client: Placement, compute: str, make_registration: MakeRegistration
) -> None:
    """Check a trait that is newer than placement's os-traits."""
    make_registration(SSD, detected=(AVX2, 'HW_CPU_X86_NEWER')).register()
    assert read_names(client, compute) == {SSD, AVX2}
    with pytest.raises(UsageError, match='traits: placement at .* does not know HW_CPU_X86_NEWER, because'):
        make_registration(SSD, 'HW_CPU_X86_NEWER').register()


def test_registration_succeeds_during_concurrent_trait_changes(
    client: Placement, compute: str, make_registration: MakeRegistration, placement: PlacementServer
) -> None:
    make_registration().register()
    stop = threading.Event()

    def toggle_trait() -> int:
        changes = 0
        with open_client(placement.url) as own_client:
            while not stop.wait(0.02):
                changes += providers.change_names(own_client, compute, TRAITS, lambda there: there ^ {AVX2})
        return changes

    with ThreadPoolExecutor(1) as pool:
        meddler = pool.submit(toggle_trait)
        try:
            for number in range(4):
                make_registration(RACK, *([SSD] if number % 2 else []), aggregates=(compute,)).register()
                assert read_names(client, compute) - {AVX2} == ({RACK, SSD} if number % 2 else {RACK})
        finally:
            stop.set()
    assert meddler.result() > 0
    assert read_names(client, compute, AGGREGATES) == {compute}


def test_unknown_provider_and_unused_trait(client: Placement) -> None:
    with pytest.raises(NotFound):
        providers.read_names(client, make_uuid(), TRAITS)
    assert providers.find_with_trait(client, 'CUSTOM_NOBODY_HAS_MADE_THIS') == frozenset()


@pytest.mark.parametrize(
    ('text', 'why'), [('{', 'not JSON'), ('[]', 'expected a JSON object'), ('{"version": 2}', 'version 2')]
)
def test_malformed_state_file_is_refused(
    make_registration: MakeRegistration, tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / 'provider.json').write_text(text)
    with pytest.raises(UsageError, match=f'provider.json: is malformed: {why}'):
        make_registration()


def test_state_of_another_uuid_is_ignored(
    client: Placement, make_registration: MakeRegistration, tmp_path: Path
) -> None:
    make_registration(RACK).register()
    other = make_uuid()
    providers.ensure_provider(client, other)
    add_foreign_names(client, other, RACK)
    Registration(client, other, INVENTORY, (), (), (), tmp_path).register()
    assert read_names(client, other) == {RACK}, 'it is not by the other one that we put it there'
