"""Test the placement client on a real placement: claims, providers, connections, database."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from uuid import uuid4

import pytest

from ecomp.errors import (
    Conflict,
    GenerationConflict,
    NoCapacity,
    NotFound,
    PlacementRefusal,
    UnknownOutcome,
    Unreachable,
)
from ecomp.model.allocation import Room
from ecomp.placement import allocations, http_client, providers
from ecomp.placement.client import Placement
from ecomp.placement.providers import AGGREGATES, TRAITS, change_names
from tests.functional.placement_client import PROJECT, SMALL, USER, claim, make_uuid, open_client
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.listening import ThreadedServer
from tests.kit.proxy import Proxy
from tests.kit.servers import SLOWDOWN_FACTOR, PlacementServer, free_port, wait_until


@pytest.fixture
def provider(placement: PlacementServer) -> str:
    return placement.make_provider(VCPU=2, MEMORY_MB=512, DISK_GB=10)


# Providers


def test_set_inventory_replaces_the_whole_inventory(client: Placement, placement: PlacementServer) -> None:
    compute = make_uuid()
    before = {'VCPU': {'total': 4, 'reserved': 0}, 'DISK_GB': {'total': 1, 'reserved': 1}}
    after = {'VCPU': {'total': 4, 'reserved': 4}, 'MEMORY_MB': {'total': 9, 'reserved': 0}}
    providers.ensure_provider(client, compute)
    assert not providers.has_inventory(providers.read_inventory(client, compute, {}), before)
    providers.set_inventory(client, compute, before)
    assert providers.has_inventory(providers.read_inventory(client, compute, {}), before)
    assert not providers.has_inventory(providers.read_inventory(client, compute, {}), after)
    providers.set_inventory(client, compute, after)
    current = providers.read_inventory(client, compute, {})
    assert providers.has_inventory(current, after)
    assert not providers.has_inventory(current, {'VCPU': after['VCPU']}), 'a class too many'
    inventory = providers.read_raw_inventory(client, compute)
    assert {name: (amounts['total'], amounts['reserved']) for name, amounts in inventory.items()} == {
        'VCPU': (4, 4),
        'MEMORY_MB': (9, 0),
    }
    assert placement.read_inventory(compute).keys() == inventory.keys()


def test_set_inventory_cannot_remove_a_class_in_use(client: Placement, provider: str) -> None:
    claim(client, make_uuid(), provider)
    with pytest.raises(Conflict, match='in use') as caught:
        providers.set_inventory(client, provider, {'VCPU': {'total': 2, 'reserved': 0}})
    assert not isinstance(caught.value, GenerationConflict)


def test_set_inventory_succeeds_during_concurrent_claims(client: Placement, placement: PlacementServer) -> None:
    provider = placement.make_provider(VCPU=1000, MEMORY_MB=100_000, DISK_GB=1000)
    stop = threading.Event()
    claimed: list[str] = []

    def claim_repeatedly() -> None:
        with open_client(placement.url) as own_client:
            while not stop.wait(random.uniform(0, 0.1)):
                instance = make_uuid()
                claim(own_client, instance, provider)
                claimed.append(instance)

    with ThreadPoolExecutor(1) as pool:
        claimer = pool.submit(claim_repeatedly)
        try:
            other_classes = {'MEMORY_MB': {'total': 100_000, 'reserved': 0}, 'DISK_GB': {'total': 1000, 'reserved': 0}}
            # Repeat until several claims were interleaved: the claiming thread may start late.
            for total in range(1000, 3000):
                providers.set_inventory(client, provider, {'VCPU': {'total': total, 'reserved': 0}, **other_classes})
                if total >= 1009 and (len(claimed) >= 3 or claimer.done()):
                    break
        finally:
            stop.set()
        claimer.result()
    assert placement.read_inventory(provider)['VCPU']['total'] == total
    assert placement.read_consumers(provider).keys() == set(claimed)
    assert len(claimed) >= 3


# Errors by code


def test_each_error_code_raises_its_exception(client: Placement, placement: PlacementServer, provider: str) -> None:
    with pytest.raises(NotFound):
        client.get(f'/resource_providers/{make_uuid()}')
    with pytest.raises(Conflict) as caught:
        client.write('POST', '/resource_providers', {'uuid': make_uuid(), 'name': provider})
    assert type(caught.value) is Conflict
    body = {'resource_provider_generation': 99, 'inventories': {}}
    with pytest.raises(GenerationConflict):
        client.write('PUT', f'/resource_providers/{provider}/inventories', body)
    with pytest.raises(NoCapacity, match='Unable to allocate inventory'):
        claim(client, make_uuid(), provider, VCPU=3)
    with pytest.raises(PlacementRefusal):
        claim(client, make_uuid(), make_uuid())  # an unknown provider is a 400
    with pytest.raises(PlacementRefusal):
        client.write('PUT', f'/allocations/{make_uuid()}', {'allocations': 7})
    assert placement.read_consumers(provider) == {}


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
    # No part of these may be dropped silently.
    'resources=VCPU:1#x&required=MISC_SHARES_VIA_AGGREGATE',
    'resources=VCPU:1\n&x=1',
    'resources=é:1',
]


@pytest.mark.parametrize('query', MALFORMED)
@pytest.mark.usefixtures('provider')  # a placement without any looks at half of the query
def test_malformed_query_is_refused_with_placement_s_message(client: Placement, query: str) -> None:
    with pytest.raises(PlacementRefusal) as caught:
        allocations.read_candidates(client, query)
    assert str(caught.value)
    assert '\n' not in str(caught.value)
    assert caught.value.exit_code == 2


# Candidates


def test_candidates_match_resources_and_traits(client: Placement, provider: str) -> None:
    query = f'resources=VCPU:1,DISK_GB:2&in_tree={provider}'
    assert allocations.read_candidates(client, query).candidates == [{provider: {'VCPU': 1, 'DISK_GB': 2}}]
    assert allocations.read_candidates(client, query + '&required=MISC_SHARES_VIA_AGGREGATE').candidates == []
    assert allocations.read_candidates(client, f'resources=VCPU:3&in_tree={provider}').candidates == []


# Claims


def test_claim_over_two_providers_is_all_or_nothing(
    client: Placement, placement: PlacementServer, provider: str
) -> None:
    other = placement.make_provider(DISK_GB=1)
    with pytest.raises(NoCapacity):
        allocations.replace_allocations(
            client, make_uuid(), {provider: {'VCPU': 1}, other: {'DISK_GB': 2}}, USER, PROJECT
        )
    assert placement.read_consumers(provider) == placement.read_consumers(other) == {}
    instance = make_uuid()
    allocations.replace_allocations(client, instance, {provider: {'VCPU': 1}, other: {'DISK_GB': 1}}, USER, PROJECT)
    consumer = allocations.read_consumer(client, instance)
    assert consumer.allocations == {provider: {'VCPU': 1}, other: {'DISK_GB': 1}}
    assert (consumer.user_id, consumer.project_id) == (USER, PROJECT)


def test_unknown_consumer_holds_nothing(client: Placement) -> None:
    assert allocations.read_consumer(client, make_uuid()) == allocations.Consumer()
    assert allocations.release_once(client, make_uuid(), allocations.Consumer())


def test_moved_claim_is_not_freed_by_a_stale_release(
    client: Placement, placement: PlacementServer, provider: str
) -> None:
    target = placement.make_provider(VCPU=1, MEMORY_MB=64, DISK_GB=1)
    instance = make_uuid()
    claim(client, instance, provider)
    before = allocations.read_consumer(client, instance)
    claim(client, instance, target, before.generation)
    assert placement.read_allocations(instance) == {target: SMALL}
    assert not allocations.release_once(client, instance, before)
    assert placement.read_allocations(instance) == {target: SMALL}
    assert allocations.release_once(client, instance, allocations.read_consumer(client, instance))
    assert placement.read_allocations(instance) == {}
    assert placement.read_consumers(target) == {}


def test_provider_lists_the_allocation_of_each_consumer(client: Placement, provider: str) -> None:
    assert allocations.read_provider_allocations(client, provider) == {}
    assert providers.read_usages(client, provider) == {'VCPU': 0, 'MEMORY_MB': 0, 'DISK_GB': 0}
    first, second = make_uuid(), make_uuid()
    claim(client, first, provider)
    assert providers.read_usages(client, provider) == SMALL
    claim(client, second, provider, VCPU=1)
    assert allocations.read_provider_allocations(client, provider) == {first: SMALL, second: {'VCPU': 1}}
    with pytest.raises(NotFound):
        allocations.read_provider_allocations(client, make_uuid())


# Lost requests and answers


@pytest.mark.parametrize('arrives', [True, False])
def test_claim_lost_in_transit_raises_unknown_outcome(placement: PlacementServer, provider: str, arrives: bool) -> None:
    instance = make_uuid()
    with Proxy(placement.port) as proxy, open_client(f'http://{proxy.address}') as client:
        client.get(f'/resource_providers/{provider}')
        applied = (lambda: placement.read_allocations(instance)) if arrives else None
        proxy.lose(f'PUT /allocations/{instance}'.encode(), applied)
        with pytest.raises(UnknownOutcome, match='connection broke'):
            claim(client, instance, provider)
        assert placement.read_allocations(instance) == ({provider: SMALL} if arrives else {})
        # A read is idempotent, so it is sent again.
        proxy.lose_request(b'GET /resource_providers')
        assert client.get(f'/resource_providers/{provider}')['uuid'] == provider


def test_closed_port_is_unreachable() -> None:
    url = f'http://127.0.0.1:{free_port()}'
    with open_client(url) as client:
        for call in (lambda: client.get('/'), lambda: client.write('PUT', '/x', {})):
            with pytest.raises(Unreachable, match=f'{url} cannot be reached: no connection') as caught:
                call()
            assert not isinstance(caught.value, UnknownOutcome)  # nothing was ever sent


def test_host_name_without_an_address_is_unreachable() -> None:
    with open_client('http://no-such-host.invalid:8080') as client, pytest.raises(Unreachable, match='no connection'):
        client.write('PUT', '/x', {})


def test_frozen_placement_times_out(own_placement: PlacementServer) -> None:
    with open_client(own_placement.url, (1.0, 0.3)) as client:
        own_placement.pause()
        began = time.monotonic()
        with pytest.raises(UnknownOutcome, match=r'no answer within 0\.3 s'):
            client.write('PUT', f'/allocations/{make_uuid()}', {})
        assert time.monotonic() - began < SLOWDOWN_FACTOR * 1.5
        with pytest.raises(Unreachable, match=r'no answer within 0\.3 s') as caught:
            client.get('/resource_providers')
        assert not isinstance(caught.value, UnknownOutcome)
        own_placement.resume()
        wait_until(own_placement.is_ready, 10, 'placement is awake')
        assert client.get('/resource_providers') == {'resource_providers': []}


def test_slow_answer_calls_the_slow_callback_once(placement: PlacementServer) -> None:
    delays: list[tuple[str, float]] = []

    def record_delay(name: str, seconds: float) -> None:
        delays.append((name, seconds))

    with FaultyPlacement(placement.port) as faulty:
        faulty.fail('slow', seconds=1.0)
        Placement(faulty.url, slow=(0.05, record_delay)).get('/resource_providers')
        assert delays == [(f'placement at {faulty.url}', 0.05)]
        faulty.heal()
        Placement(faulty.url, slow=(60.0, record_delay)).get('/resource_providers')
    assert len(delays) == 1


# Listing, summing up and removing providers.


ROOM = {'MEMORY_MB': {'total': 512}, 'DISK_GB': {'total': 10}}


def test_shares_of_free_full_closed_and_empty_providers(client: Placement, placement: PlacementServer) -> None:
    free, full, closed = (placement.make_provider(VCPU=2, MEMORY_MB=512, DISK_GB=10) for _ in range(3))
    claim(client, make_uuid(), free)
    claim(client, make_uuid(), full, VCPU=2, MEMORY_MB=64)
    claim(client, make_uuid(), closed)
    providers.set_inventory(
        client,
        closed,
        {
            'VCPU': {'total': 2, 'reserved': 2},
            'MEMORY_MB': {'total': 32, 'reserved': 0, 'allocation_ratio': 1.5},  # 64 are used
            'DISK_GB': {'total': 10, 'reserved': 10},
        },
    )
    bare = make_uuid()
    providers.ensure_provider(client, bare)
    assert providers.read_rooms(client, [free, full, closed, bare, make_uuid()]) == {
        free: {'VCPU': Room(2, 1), 'MEMORY_MB': Room(512, 64), 'DISK_GB': Room(10, 1)},
        full: {'VCPU': Room(2, 2), 'MEMORY_MB': Room(512, 64), 'DISK_GB': Room(10, 0)},
        closed: {'VCPU': Room(0, 1, is_fully_reserved=True), 'MEMORY_MB': Room(48, 64), 'DISK_GB': Room(0, 1)},
        bare: {},
    }


def test_shares_are_equal_in_bulk_and_single_queries(client: Placement, placement: PlacementServer) -> None:
    # A provider with room is part of the bulk answer; a full one is queried separately. Both apply the allocation
    # ratio and the reserved amount.
    provider = placement.make_provider(VCPU=2)
    roomy = {
        'VCPU': {'total': 4, 'reserved': 1, 'allocation_ratio': 1.5},
        'MEMORY_MB': {'total': 99, 'reserved': 10, 'allocation_ratio': 1.3},
    }
    providers.set_inventory(client, provider, roomy)
    before = providers.read_rooms(client, [provider])[provider]
    assert before == {'VCPU': Room(4, 0), 'MEMORY_MB': Room(115, 0)}
    claim(client, make_uuid(), provider, VCPU=4)
    assert providers.read_rooms(client, [provider])[provider] == {**before, 'VCPU': Room(4, 4)}


def test_delete_removes_a_provider_once(client: Placement, placement: PlacementServer) -> None:
    provider = placement.make_provider(VCPU=2)
    assert providers.delete_provider(client, provider)
    assert providers.read_provider_name(client, provider) is None
    assert not providers.delete_provider(client, provider)


def test_provider_in_use_or_with_children_is_not_deleted(client: Placement, placement: PlacementServer) -> None:
    used, parent, child = placement.make_provider(VCPU=2), placement.make_provider(VCPU=2), make_uuid()
    claim(client, make_uuid(), used, VCPU=1)
    placement.call('POST', '/resource_providers', {'uuid': child, 'name': child, 'parent_provider_uuid': parent})
    for provider in (used, parent):
        with pytest.raises(Conflict, match=provider):
            providers.delete_provider(client, provider)
        assert providers.read_provider_name(client, provider) == provider


def test_delete_with_a_lost_answer_is_verified(placement: PlacementServer) -> None:
    provider = placement.make_provider(VCPU=2)

    def is_deleted() -> bool:
        return placement.read_inventory(provider) == {}

    with Proxy(placement.port) as proxy, open_client(f'http://{proxy.address}') as client:
        proxy.lose_answer(b'DELETE', is_deleted)
        assert providers.delete_provider(client, provider)
        assert proxy.has_lost


def test_delete_lost_twice_raises_unknown_outcome(placement: PlacementServer) -> None:
    provider = placement.make_provider(VCPU=2)
    with Proxy(placement.port) as proxy, open_client(f'http://{proxy.address}') as client:
        proxy.lose_request(b'DELETE')
        proxy.lose_request(b'DELETE')
        with pytest.raises(UnknownOutcome, match=provider):
            providers.delete_provider(client, provider)
        assert providers.read_provider_name(client, provider) == provider
        proxy.lose_request(b'DELETE')
        assert providers.delete_provider(client, provider)
    assert placement.read_inventory(provider) == {}


def test_generation_counts_every_relevant_change(client: Placement, placement: PlacementServer) -> None:
    """The DELETE of a consumer is no change that ecompute must notice."""
    provider, other = (placement.make_provider(VCPU=4, MEMORY_MB=512, DISK_GB=10) for _ in range(2))
    first, second, third = make_uuid(), make_uuid(), make_uuid()
    counted: dict[str, bool] = {}

    def record_change(change_name: str, act: Callable[[], object]) -> None:
        before = providers.read_generation(client, provider)
        act()
        counted[change_name] = providers.read_generation(client, provider) != before

    record_change('claim', lambda: claim(client, first, provider))
    record_change('another', lambda: claim(client, second, provider))
    record_change('moved here', lambda: (claim(client, third, other), claim(client, third, provider, 1)))
    record_change('inventory', lambda: providers.set_inventory(client, provider, {'VCPU': {'total': 8}} | ROOM))
    record_change('traits', lambda: change_names(client, provider, TRAITS, lambda _: frozenset({'COMPUTE_NODE'})))
    record_change('aggregates', lambda: change_names(client, provider, AGGREGATES, lambda _: frozenset({make_uuid()})))
    record_change('nothing', lambda: providers.read_inventory(client, provider))
    record_change('released', lambda: allocations.release(client, [first], lambda _: (), lambda *_: None))
    record_change('deleted', lambda: placement.call('DELETE', f'/allocations/{second}'))
    counts = {'claim', 'another', 'moved here', 'inventory', 'traits', 'aggregates', 'released'}
    assert {change for change, is_counted in counted.items() if is_counted} >= counts
    assert not counted['nothing']


# Kept-alive connections that a middlebox has dropped silently.


CONCURRENT_REQUESTS = 3
BODY = b'{"traits": []}'
ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n' % len(BODY) + BODY


class ForgetfulServer(ThreadedServer):
    """A server that stops answering on connections it has forgotten, and leaves them open."""

    def __init__(self) -> None:
        self.barrier: threading.Barrier | None = None
        self._forgotten = 0
        super().__init__()
        self.url = f'http://{self.address}'

    def forget_connections(self) -> None:
        self.barrier = None
        self._forgotten = self.connection_count

    def serve(self, connection: socket.socket, number: int) -> None:
        heard = b''
        while data := connection.recv(65536):
            heard += data
            if heard.endswith(b'\r\n\r\n') and number > self._forgotten:
                heard = b''
                if self.barrier is not None:
                    self.barrier.wait(20)
                connection.sendall(ANSWER)


@pytest.fixture
def server() -> Iterator[ForgetfulServer]:
    with closing(ForgetfulServer()) as forgetful:
        yield forgetful


def test_forgotten_connections_cost_one_timeout_in_all(server: ForgetfulServer) -> None:
    server.barrier = threading.Barrier(CONCURRENT_REQUESTS)
    with closing(Placement(server.url, (3.0, 1.0))) as client:
        threads = [threading.Thread(target=client.get, args=('/traits',)) for _ in range(CONCURRENT_REQUESTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.connection_count == CONCURRENT_REQUESTS
        server.forget_connections()
        with pytest.raises(Unreachable, match='gave no answer within 1 s'):
            client.get('/traits')
        assert client.get('/traits') == {'traits': []}
        assert server.connection_count == CONCURRENT_REQUESTS + 1


def test_idle_connection_is_replaced_after_its_maximum_age(
    server: ForgetfulServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Placement(server.url)) as client:
        for _ in range(3):
            client.get('/traits')
        assert server.connection_count == 1
        monkeypatch.setattr(http_client, 'MAX_IDLE_SECONDS', 0.01)
        time.sleep(0.02)
        client.get('/traits')
        assert server.connection_count == 2


# Tests that read placement's database file see the same as its API.


CONSUMER = {'project_id': 'p', 'user_id': 'u', 'consumer_type': 'INSTANCE', 'consumer_generation': None}


def test_database_and_api_report_the_same(each_placement: PlacementServer) -> None:
    each_placement.database.empty()
    first, second = each_placement.make_provider(VCPU=4, MEMORY_MB=512), each_placement.make_provider(VCPU=8)
    expected = {
        str(uuid4()): {first: {'VCPU': 1, 'MEMORY_MB': 128}},
        str(uuid4()): {first: {'VCPU': 2}, second: {'VCPU': 3}},
    }
    for consumer, allocation in expected.items():
        body = {
            **CONSUMER,
            'allocations': {provider: {'resources': amounts} for provider, amounts in allocation.items()},
        }
        each_placement.call('PUT', f'/allocations/{consumer}', body)
    assert each_placement.database.read_allocations() == expected
    for consumer, allocation in expected.items():
        answer = each_placement.call('GET', f'/allocations/{consumer}')['allocations']
        assert {provider: amounts['resources'] for provider, amounts in answer.items()} == allocation
        assert each_placement.read_allocations(consumer) == allocation
    for provider in (first, second):
        consumers = each_placement.read_consumers(provider)
        answer = each_placement.call('GET', f'/resource_providers/{provider}/allocations')['allocations']
        assert {consumer: amounts['resources'] for consumer, amounts in answer.items()} == consumers != {}
        inventory = each_placement.call('GET', f'/resource_providers/{provider}/inventories')['inventories']
        assert inventory == each_placement.read_inventory(provider)
    each_placement.database.empty()
    assert each_placement.call('GET', '/resource_providers') == {'resource_providers': []}
