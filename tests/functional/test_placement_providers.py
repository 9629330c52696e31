"""Providers listed, reckoned up and removed, on a real placement."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ecomp.errors import Conflict, UnknownOutcome
from ecomp.model.allocation import Room
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.placement.providers import AGGREGATES, TRAITS, change_names
from tests.functional.placement_client import claim, connected, new
from tests.kit.proxy import Proxy
from tests.kit.servers import PlacementServer

ROOM = {'MEMORY_MB': {'total': 512}, 'DISK_GB': {'total': 10}}


def test_names(client: Placement, placement: PlacementServer) -> None:
    ours, others = placement.make_provider(VCPU=1), new()
    placement.call('POST', '/resource_providers', {'uuid': others, 'name': f'nova-{others}'})
    names = providers.names(client)
    assert (names[ours], names[others]) == (ours, f'nova-{others}')
    assert providers.name(client, others) == f'nova-{others}'
    assert providers.name(client, new()) is None


def test_shares_of_a_free_a_full_a_closed_and_a_bare_provider(client: Placement, placement: PlacementServer) -> None:
    free, full, closed = (placement.make_provider(VCPU=2, MEMORY_MB=512, DISK_GB=10) for _ in range(3))
    claim(client, new(), free)
    claim(client, new(), full, VCPU=2, MEMORY_MB=64)
    claim(client, new(), closed)
    providers.set_inventory(
        client,
        closed,
        {
            'VCPU': {'total': 2, 'reserved': 2},
            'MEMORY_MB': {'total': 32, 'reserved': 0, 'allocation_ratio': 1.5},  # 64 are used
            'DISK_GB': {'total': 10, 'reserved': 10},
        },
    )
    bare = new()
    providers.ensure(client, bare)
    assert providers.shares(client, [free, full, closed, bare, new()]) == {
        free: {'VCPU': Room(2, 1), 'MEMORY_MB': Room(512, 64), 'DISK_GB': Room(10, 1)},
        full: {'VCPU': Room(2, 2), 'MEMORY_MB': Room(512, 64), 'DISK_GB': Room(10, 0)},
        closed: {'VCPU': Room(0, 1, shut=True), 'MEMORY_MB': Room(48, 64), 'DISK_GB': Room(0, 1)},
        bare: {},
    }


def test_what_both_ways_of_asking_say_is_the_same(client: Placement, placement: PlacementServer) -> None:
    # A provider with room is in the one answer; without, it is asked for itself. Ratio and reserved count in both.
    provider = placement.make_provider(VCPU=2)
    roomy = {
        'VCPU': {'total': 4, 'reserved': 1, 'allocation_ratio': 1.5},
        'MEMORY_MB': {'total': 99, 'reserved': 10, 'allocation_ratio': 1.3},
    }
    providers.set_inventory(client, provider, roomy)
    before = providers.shares(client, [provider])[provider]
    assert before == {'VCPU': Room(4, 0), 'MEMORY_MB': Room(115, 0)}
    claim(client, new(), provider, VCPU=4)
    assert providers.shares(client, [provider])[provider] == {**before, 'VCPU': Room(4, 4)}


def test_a_provider_is_removed_once(client: Placement, placement: PlacementServer) -> None:
    provider = placement.make_provider(VCPU=2)
    assert providers.delete(client, provider)
    assert providers.name(client, provider) is None
    assert not providers.delete(client, provider)


def test_a_provider_in_use_or_with_children_stays(client: Placement, placement: PlacementServer) -> None:
    used, parent, child = placement.make_provider(VCPU=2), placement.make_provider(VCPU=2), new()
    claim(client, new(), used, VCPU=1)
    placement.call('POST', '/resource_providers', {'uuid': child, 'name': child, 'parent_provider_uuid': parent})
    for provider in (used, parent):
        with pytest.raises(Conflict, match=provider):
            providers.delete(client, provider)
        assert providers.name(client, provider) == provider


def test_a_lost_answer_is_read_back(placement: PlacementServer) -> None:
    provider = placement.make_provider(VCPU=2)

    def gone() -> bool:
        return placement.inventory(provider) == {}

    with Proxy(placement.port) as proxy, connected(f'http://{proxy.address}') as client:
        proxy.lose_answer(b'DELETE', gone)
        assert providers.delete(client, provider)
        assert proxy.has_lost


def test_a_lost_request_is_asked_again_and_if_lost_again_said(placement: PlacementServer) -> None:
    provider = placement.make_provider(VCPU=2)
    with Proxy(placement.port) as proxy, connected(f'http://{proxy.address}') as client:
        proxy.lose_request(b'DELETE')
        proxy.lose_request(b'DELETE')
        with pytest.raises(UnknownOutcome, match=provider):
            providers.delete(client, provider)
        assert providers.name(client, provider) == provider
        proxy.lose_request(b'DELETE')
        assert providers.delete(client, provider)
    assert placement.inventory(provider) == {}


def test_what_a_generation_counts(client: Placement, placement: PlacementServer) -> None:
    """All that makes a look at a provider worth while; but no DELETE of a consumer, as 2019's eschedule had it."""
    provider, other = (placement.make_provider(VCPU=4, MEMORY_MB=512, DISK_GB=10) for _ in range(2))
    one, two, three = new(), new(), new()
    counted: dict[str, bool] = {}

    def does(what: str, do: Callable[[], object]) -> None:
        before = providers.generation(client, provider)
        do()
        counted[what] = providers.generation(client, provider) != before
        assert providers.generations(client)[provider] == providers.generation(client, provider)

    does('claim', lambda: claim(client, one, provider))
    does('another', lambda: claim(client, two, provider))
    does('moved here', lambda: (claim(client, three, other), claim(client, three, provider, 1)))
    does('inventory', lambda: providers.set_inventory(client, provider, {'VCPU': {'total': 8}} | ROOM))
    does('traits', lambda: change_names(client, provider, TRAITS, lambda _: frozenset({'COMPUTE_NODE'})))
    does('aggregates', lambda: change_names(client, provider, AGGREGATES, lambda _: frozenset({new()})))
    does('nothing', lambda: providers.inventories(client, provider))
    does('released', lambda: allocations.release(client, [one], lambda _: (), lambda *_: None))
    does('deleted', lambda: placement.call('DELETE', f'/allocations/{two}'))
    counts = {'claim', 'another', 'moved here', 'inventory', 'traits', 'aggregates', 'released'}
    assert {what for what, is_counted in counted.items() if is_counted} >= counts
    assert not counted['nothing']
