"""The placement client against a real placement: as it answers, refuses, is frozen, and is gone."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ecomp.errors import (
    Conflict,
    EcompError,
    GenerationConflict,
    NoCapacity,
    NotFound,
    PlacementRefusal,
    UnknownOutcome,
    Unreachable,
)
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from tests.functional.placement_client import PROJECT, SMALL, USER, claim, connected, new
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.proxy import Proxy
from tests.kit.servers import PATIENCE, PlacementServer, free_port, until

pytestmark = pytest.mark.fast


@pytest.fixture
def provider(placement: PlacementServer) -> str:
    return placement.make_provider(VCPU=2, MEMORY_MB=512, DISK_GB=10)


# Providers


def test_a_provider_is_made_once(client: Placement, placement: PlacementServer) -> None:
    compute = new()
    assert providers.ensure(client, compute)
    assert not providers.ensure(client, compute)
    found = placement.call('GET', f'/resource_providers/{compute}')
    assert found['name'] == compute


def test_an_inventory_is_set_whole_whatever_it_was(client: Placement, placement: PlacementServer) -> None:
    compute = new()
    before = {'VCPU': {'total': 4, 'reserved': 0}, 'DISK_GB': {'total': 1, 'reserved': 1}}
    after = {'VCPU': {'total': 4, 'reserved': 4}, 'MEMORY_MB': {'total': 9, 'reserved': 0}}
    assert not providers.is_as(client, compute, before)
    providers.ensure(client, compute)
    assert not providers.is_as(client, compute, before)
    providers.set_inventory(client, compute, before)
    assert providers.is_as(client, compute, before)
    assert not providers.is_as(client, compute, after)
    providers.set_inventory(client, compute, after)
    assert providers.is_as(client, compute, after)
    found = providers.inventory(client, compute)
    assert {name: (each['total'], each['reserved']) for name, each in found.items()} == {
        'VCPU': (4, 4),
        'MEMORY_MB': (9, 0),
    }
    assert placement.inventory(compute).keys() == found.keys()


def test_a_class_in_use_cannot_vanish(client: Placement, provider: str) -> None:
    claim(client, new(), provider)
    with pytest.raises(Conflict, match='in use') as caught:
        providers.set_inventory(client, provider, {'VCPU': {'total': 2, 'reserved': 0}})
    assert not isinstance(caught.value, GenerationConflict)


def test_an_inventory_is_set_while_others_claim(client: Placement, placement: PlacementServer) -> None:
    provider = placement.make_provider(VCPU=1000, MEMORY_MB=100_000, DISK_GB=1000)
    stop = threading.Event()
    claimed: list[str] = []

    def claims() -> None:
        with connected(placement.url) as mine:
            while not stop.wait(random.uniform(0, 0.1)):
                instance = new()
                claim(mine, instance, provider)
                claimed.append(instance)

    with ThreadPoolExecutor(1) as pool:
        claimer = pool.submit(claims)
        try:
            others = {'MEMORY_MB': {'total': 100_000, 'reserved': 0}, 'DISK_GB': {'total': 1000, 'reserved': 0}}
            # As often as it takes until the other one, who may be slow to begin, was in between some times.
            for total in range(1000, 3000):
                providers.set_inventory(client, provider, {'VCPU': {'total': total, 'reserved': 0}, **others})
                if total >= 1009 and (len(claimed) >= 3 or claimer.done()):
                    break
        finally:
            stop.set()
        claimer.result()
    assert placement.inventory(provider)['VCPU']['total'] == total
    assert placement.consumers(provider).keys() == set(claimed)
    assert len(claimed) >= 3


# Errors by code


def test_errors_by_their_code(client: Placement, placement: PlacementServer, provider: str) -> None:
    with pytest.raises(NotFound):
        client.get(f'/resource_providers/{new()}')
    with pytest.raises(Conflict) as caught:
        client.write('POST', '/resource_providers', {'uuid': new(), 'name': provider})
    assert type(caught.value) is Conflict
    body = {'resource_provider_generation': 99, 'inventories': {}}
    with pytest.raises(GenerationConflict):
        client.write('PUT', f'/resource_providers/{provider}/inventories', body)
    with pytest.raises(NoCapacity, match='Unable to allocate inventory'):
        claim(client, new(), provider, VCPU=3)
    with pytest.raises(PlacementRefusal):
        claim(client, new(), new())  # an unknown provider is a 400
    with pytest.raises(PlacementRefusal):
        client.write('PUT', f'/allocations/{new()}', {'allocations': 7})
    assert placement.consumers(provider) == {}


MALFORMED = [
    'resources=VCPU',
    'resources=VCPU:x',
    'resources=VCPU:-1',
    'resources=VCPU:0',
    'resources=NO_SUCH_CLASS:1',
    'resources=VCPU:1&required=NO_SUCH_TRAIT',
    'resources=VCPU:1&nonsense=1',
    'resource=VCPU:1',
    'resources=',
    'resources=VCPU:1&limit=x',
    'resources=VCPU:1&in_tree=x',
    'resources=VCPU:1&member_of=x',
    # No part of it is silently dropped.
    'resources=VCPU:1#x&required=MISC_SHARES_VIA_AGGREGATE',
    'resources=VCPU:1\n&x=1',
]


@pytest.mark.parametrize('query', MALFORMED)
def test_a_malformed_query_is_refused_in_placement_s_words(client: Placement, query: str) -> None:
    with pytest.raises(PlacementRefusal) as caught:
        allocations.candidates(client, query)
    assert str(caught.value)
    assert '\n' not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    'query', ['resources=VCPU:1#x', 'resources=é:1', '', 'resources=VCPU:1 &x', 'a\r\nb: c', '\x00']
)
def test_no_query_is_more_than_a_query(client: Placement, query: str) -> None:
    said = ''
    try:
        allocations.candidates(client, query)
    except EcompError as error:
        said = str(error)
    assert '\n' not in said


# Candidates


def test_candidates(client: Placement, provider: str) -> None:
    asked = f'resources=VCPU:1,DISK_GB:2&in_tree={provider}'
    assert allocations.candidates(client, asked).candidates == [{provider: {'VCPU': 1, 'DISK_GB': 2}}]
    assert allocations.candidates(client, asked + '&required=MISC_SHARES_VIA_AGGREGATE').candidates == []
    assert allocations.candidates(client, f'resources=VCPU:3&in_tree={provider}').candidates == []


def test_a_reserved_provider_is_no_candidate(client: Placement, provider: str) -> None:
    inventory = {name: {'total': total, 'reserved': 0} for name, total in (('VCPU', 2), ('MEMORY_MB', 512))}
    providers.set_inventory(client, provider, {**inventory, 'VCPU': {'total': 2, 'reserved': 2}})
    assert allocations.candidates(client, f'resources=VCPU:1&in_tree={provider}').candidates == []
    assert len(allocations.candidates(client, f'resources=MEMORY_MB:1&in_tree={provider}').candidates) == 1


# Claims


def test_a_claim_is_whole_or_not_at_all(client: Placement, placement: PlacementServer, provider: str) -> None:
    other = placement.make_provider(DISK_GB=1)
    with pytest.raises(NoCapacity):
        allocations.claim_once(client, new(), {provider: {'VCPU': 1}, other: {'DISK_GB': 2}}, USER, PROJECT)
    assert placement.consumers(provider) == placement.consumers(other) == {}
    instance = new()
    allocations.claim_once(client, instance, {provider: {'VCPU': 1}, other: {'DISK_GB': 1}}, USER, PROJECT)
    held = allocations.consumer(client, instance)
    assert held.allocations == {provider: {'VCPU': 1}, other: {'DISK_GB': 1}}
    assert (held.user_id, held.project_id) == (USER, PROJECT)


def test_a_second_claim_without_the_generation_is_refused(client: Placement, provider: str) -> None:
    instance = new()
    claim(client, instance, provider)
    with pytest.raises(GenerationConflict):
        claim(client, instance, provider)
    assert allocations.of_provider(client, provider) == {instance: SMALL}


def test_a_consumer_nobody_knows_holds_nothing(client: Placement) -> None:
    assert allocations.consumer(client, new()) == allocations.Consumer()
    assert allocations.release_once(client, new(), allocations.Consumer())


def test_taking_over_moves_the_claim_and_makes_the_late_release_fail(
    client: Placement, placement: PlacementServer, provider: str
) -> None:
    there = placement.make_provider(VCPU=1, MEMORY_MB=64, DISK_GB=1)
    instance = new()
    claim(client, instance, provider)
    before = allocations.consumer(client, instance)
    claim(client, instance, there, before.generation)
    assert placement.allocations(instance) == {there: SMALL}
    assert not allocations.release_once(client, instance, before)
    assert placement.allocations(instance) == {there: SMALL}
    assert allocations.release_once(client, instance, allocations.consumer(client, instance))
    assert placement.allocations(instance) == {}
    assert placement.consumers(there) == {}


def test_what_each_consumer_holds_of_a_provider(client: Placement, provider: str) -> None:
    assert allocations.of_provider(client, provider) == {}
    assert providers.usages(client, provider) == {'VCPU': 0, 'MEMORY_MB': 0, 'DISK_GB': 0}
    one, two = new(), new()
    claim(client, one, provider)
    assert providers.usages(client, provider) == SMALL
    claim(client, two, provider, VCPU=1)
    assert allocations.of_provider(client, provider) == {one: SMALL, two: {'VCPU': 1}}
    with pytest.raises(NotFound):
        allocations.of_provider(client, new())


# Lost on the way


@pytest.mark.parametrize('arrives', [True, False])
def test_a_claim_that_is_lost_or_its_answer_is_an_unknown_outcome(
    placement: PlacementServer, provider: str, arrives: bool
) -> None:
    instance = new()
    with Proxy(placement.port) as proxy, connected(f'http://{proxy.address}') as client:
        client.get(f'/resource_providers/{provider}')
        applied = (lambda: placement.allocations(instance)) if arrives else None
        proxy.lose(f'PUT /allocations/{instance}'.encode(), applied)
        with pytest.raises(UnknownOutcome, match='connection broke'):
            claim(client, instance, provider)
        assert placement.allocations(instance) == ({provider: SMALL} if arrives else {})
        # A question may be asked twice, and is.
        proxy.lose_request(b'GET /resource_providers')
        assert client.get(f'/resource_providers/{provider}')['uuid'] == provider


def test_a_closed_port_is_unreachable() -> None:
    url = f'http://127.0.0.1:{free_port()}'
    with connected(url) as client:
        for call in (lambda: client.get('/'), lambda: client.write('PUT', '/x', {})):
            with pytest.raises(Unreachable, match=f'{url} cannot be reached: no connection') as caught:
                call()
            assert not isinstance(caught.value, UnknownOutcome)  # nothing was ever sent


def test_a_name_without_an_address_is_unreachable() -> None:
    with connected('http://no-such-host.invalid:8080') as client, pytest.raises(Unreachable, match='no connection'):
        client.write('PUT', '/x', {})


def test_a_frozen_placement_keeps_nobody_for_ever(own_placement: PlacementServer) -> None:
    with connected(own_placement.url, (1.0, 0.3)) as client:
        own_placement.pause()
        began = time.monotonic()
        with pytest.raises(UnknownOutcome, match=r'no answer in 0\.3 s'):
            client.write('PUT', f'/allocations/{new()}', {})
        assert time.monotonic() - began < PATIENCE * 1.5
        with pytest.raises(Unreachable, match=r'no answer in 0\.3 s') as caught:
            client.get('/resource_providers')
        assert not isinstance(caught.value, UnknownOutcome)
        own_placement.resume()
        until(own_placement.is_ready, 10, 'placement is awake')
        assert client.get('/resource_providers') == {'resource_providers': []}


def test_who_waits_for_a_slow_answer_is_told_so(placement: PlacementServer) -> None:
    said: list[tuple[str, float]] = []

    def tell(name: str, seconds: float) -> None:
        said.append((name, seconds))

    with FaultyPlacement(placement.port) as faulty:
        faulty.fail('slow', seconds=1.0)
        Placement(faulty.url, slow=(0.05, tell)).get('/resource_providers')
        assert said == [(f'placement at {faulty.url}', 0.05)]
        faulty.heal()
        Placement(faulty.url, slow=(60.0, tell)).get('/resource_providers')
    assert len(said) == 1
