"""Test the placement client on a real placement: claims, providers, connections, database."""

from __future__ import annotations

import random
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from uuid import uuid4

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
from ecomp.model.allocation import Room
from ecomp.placement import allocations, by_http, providers
from ecomp.placement.client import Placement
from ecomp.placement.providers import AGGREGATES, TRAITS, change_names
from tests.functional.placement_client import PROJECT, SMALL, USER, claim, connected, new
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.listening import Listening
from tests.kit.proxy import Proxy
from tests.kit.servers import PATIENCE, PlacementServer, free_port, until


@pytest.fixture
def provider(placement: PlacementServer) -> str:
    return placement.make_provider(VCPU=2, MEMORY_MB=512, DISK_GB=10)


# Providers


@pytest.mark.fast
def test_a_provider_is_made_once(client: Placement, placement: PlacementServer) -> None:
    compute = new()
    assert providers.ensure(client, compute)
    assert not providers.ensure(client, compute)
    answer = placement.call('GET', f'/resource_providers/{compute}')
    assert answer['name'] == compute


@pytest.mark.fast
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
    inventory = providers.inventory(client, compute)
    assert {name: (amounts['total'], amounts['reserved']) for name, amounts in inventory.items()} == {
        'VCPU': (4, 4),
        'MEMORY_MB': (9, 0),
    }
    assert placement.inventory(compute).keys() == inventory.keys()


@pytest.mark.fast
def test_a_class_in_use_cannot_vanish(client: Placement, provider: str) -> None:
    claim(client, new(), provider)
    with pytest.raises(Conflict, match='in use') as caught:
        providers.set_inventory(client, provider, {'VCPU': {'total': 2, 'reserved': 0}})
    assert not isinstance(caught.value, GenerationConflict)


@pytest.mark.fast
def test_an_inventory_is_set_while_others_claim(client: Placement, placement: PlacementServer) -> None:
    provider = placement.make_provider(VCPU=1000, MEMORY_MB=100_000, DISK_GB=1000)
    stop = threading.Event()
    claimed: list[str] = []

    def claims() -> None:
        with connected(placement.url) as own_client:
            while not stop.wait(random.uniform(0, 0.1)):
                instance = new()
                claim(own_client, instance, provider)
                claimed.append(instance)

    with ThreadPoolExecutor(1) as pool:
        claimer = pool.submit(claims)
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
    assert placement.inventory(provider)['VCPU']['total'] == total
    assert placement.consumers(provider).keys() == set(claimed)
    assert len(claimed) >= 3


# Errors by code


@pytest.mark.fast
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
    # No part of these may be dropped silently.
    'resources=VCPU:1#x&required=MISC_SHARES_VIA_AGGREGATE',
    'resources=VCPU:1\n&x=1',
]


@pytest.mark.fast
@pytest.mark.parametrize('query', MALFORMED)
def test_a_malformed_query_is_refused_in_placement_s_words(client: Placement, query: str) -> None:
    with pytest.raises(PlacementRefusal) as caught:
        allocations.candidates(client, query)
    assert str(caught.value)
    assert '\n' not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.fast
@pytest.mark.parametrize(
    'query', ['resources=VCPU:1#x', 'resources=é:1', '', 'resources=VCPU:1 &x', 'a\r\nb: c', '\x00']
)
def test_no_query_is_more_than_a_query(client: Placement, query: str) -> None:
    message = ''
    try:
        allocations.candidates(client, query)
    except EcompError as error:
        message = str(error)
    assert '\n' not in message


# Candidates


@pytest.mark.fast
def test_candidates(client: Placement, provider: str) -> None:
    query = f'resources=VCPU:1,DISK_GB:2&in_tree={provider}'
    assert allocations.candidates(client, query).candidates == [{provider: {'VCPU': 1, 'DISK_GB': 2}}]
    assert allocations.candidates(client, query + '&required=MISC_SHARES_VIA_AGGREGATE').candidates == []
    assert allocations.candidates(client, f'resources=VCPU:3&in_tree={provider}').candidates == []


@pytest.mark.fast
def test_a_reserved_provider_is_no_candidate(client: Placement, provider: str) -> None:
    inventory = {name: {'total': total, 'reserved': 0} for name, total in (('VCPU', 2), ('MEMORY_MB', 512))}
    providers.set_inventory(client, provider, {**inventory, 'VCPU': {'total': 2, 'reserved': 2}})
    assert allocations.candidates(client, f'resources=VCPU:1&in_tree={provider}').candidates == []
    assert len(allocations.candidates(client, f'resources=MEMORY_MB:1&in_tree={provider}').candidates) == 1


# Claims


@pytest.mark.fast
def test_a_claim_is_whole_or_not_at_all(client: Placement, placement: PlacementServer, provider: str) -> None:
    other = placement.make_provider(DISK_GB=1)
    with pytest.raises(NoCapacity):
        allocations.claim_once(client, new(), {provider: {'VCPU': 1}, other: {'DISK_GB': 2}}, USER, PROJECT)
    assert placement.consumers(provider) == placement.consumers(other) == {}
    instance = new()
    allocations.claim_once(client, instance, {provider: {'VCPU': 1}, other: {'DISK_GB': 1}}, USER, PROJECT)
    consumer = allocations.consumer(client, instance)
    assert consumer.allocations == {provider: {'VCPU': 1}, other: {'DISK_GB': 1}}
    assert (consumer.user_id, consumer.project_id) == (USER, PROJECT)


@pytest.mark.fast
def test_a_second_claim_without_the_generation_is_refused(client: Placement, provider: str) -> None:
    instance = new()
    claim(client, instance, provider)
    with pytest.raises(GenerationConflict):
        claim(client, instance, provider)
    assert allocations.of_provider(client, provider) == {instance: SMALL}


@pytest.mark.fast
def test_a_consumer_nobody_knows_holds_nothing(client: Placement) -> None:
    assert allocations.consumer(client, new()) == allocations.Consumer()
    assert allocations.release_once(client, new(), allocations.Consumer())


@pytest.mark.fast
def test_taking_over_moves_the_claim_and_makes_the_late_release_fail(
    client: Placement, placement: PlacementServer, provider: str
) -> None:
    target = placement.make_provider(VCPU=1, MEMORY_MB=64, DISK_GB=1)
    instance = new()
    claim(client, instance, provider)
    before = allocations.consumer(client, instance)
    claim(client, instance, target, before.generation)
    assert placement.allocations(instance) == {target: SMALL}
    assert not allocations.release_once(client, instance, before)
    assert placement.allocations(instance) == {target: SMALL}
    assert allocations.release_once(client, instance, allocations.consumer(client, instance))
    assert placement.allocations(instance) == {}
    assert placement.consumers(target) == {}


@pytest.mark.fast
def test_what_each_consumer_holds_of_a_provider(client: Placement, provider: str) -> None:
    assert allocations.of_provider(client, provider) == {}
    assert providers.usages(client, provider) == {'VCPU': 0, 'MEMORY_MB': 0, 'DISK_GB': 0}
    first, second = new(), new()
    claim(client, first, provider)
    assert providers.usages(client, provider) == SMALL
    claim(client, second, provider, VCPU=1)
    assert allocations.of_provider(client, provider) == {first: SMALL, second: {'VCPU': 1}}
    with pytest.raises(NotFound):
        allocations.of_provider(client, new())


# Lost requests and answers


@pytest.mark.fast
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
        # A read is idempotent, so it is sent again.
        proxy.lose_request(b'GET /resource_providers')
        assert client.get(f'/resource_providers/{provider}')['uuid'] == provider


@pytest.mark.fast
def test_a_closed_port_is_unreachable() -> None:
    url = f'http://127.0.0.1:{free_port()}'
    with connected(url) as client:
        for call in (lambda: client.get('/'), lambda: client.write('PUT', '/x', {})):
            with pytest.raises(Unreachable, match=f'{url} cannot be reached: no connection') as caught:
                call()
            assert not isinstance(caught.value, UnknownOutcome)  # nothing was ever sent


@pytest.mark.fast
def test_a_name_without_an_address_is_unreachable() -> None:
    with connected('http://no-such-host.invalid:8080') as client, pytest.raises(Unreachable, match='no connection'):
        client.write('PUT', '/x', {})


@pytest.mark.fast
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


@pytest.mark.fast
def test_who_waits_for_a_slow_answer_is_told_so(placement: PlacementServer) -> None:
    delays: list[tuple[str, float]] = []

    def tell(name: str, seconds: float) -> None:
        delays.append((name, seconds))

    with FaultyPlacement(placement.port) as faulty:
        faulty.fail('slow', seconds=1.0)
        Placement(faulty.url, slow=(0.05, tell)).get('/resource_providers')
        assert delays == [(f'placement at {faulty.url}', 0.05)]
        faulty.heal()
        Placement(faulty.url, slow=(60.0, tell)).get('/resource_providers')
    assert len(delays) == 1


# Listing, summing up and removing providers.


ROOM = {'MEMORY_MB': {'total': 512}, 'DISK_GB': {'total': 10}}


def test_names(client: Placement, placement: PlacementServer) -> None:
    own, foreign = placement.make_provider(VCPU=1), new()
    placement.call('POST', '/resource_providers', {'uuid': foreign, 'name': f'nova-{foreign}'})
    names = providers.names(client)
    assert (names[own], names[foreign]) == (own, f'nova-{foreign}')
    assert providers.name(client, foreign) == f'nova-{foreign}'
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
    # A provider with room is part of the bulk answer; a full one is queried separately. Both apply the allocation
    # ratio and the reserved amount.
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
    """Check all changes that ecompute must notice; the DELETE of a consumer is not one of them."""
    provider, other = (placement.make_provider(VCPU=4, MEMORY_MB=512, DISK_GB=10) for _ in range(2))
    first, second, third = new(), new(), new()
    counted: dict[str, bool] = {}

    def does(what: str, do: Callable[[], object]) -> None:
        before = providers.generation(client, provider)
        do()
        counted[what] = providers.generation(client, provider) != before
        assert providers.generations(client)[provider] == providers.generation(client, provider)

    does('claim', lambda: claim(client, first, provider))
    does('another', lambda: claim(client, second, provider))
    does('moved here', lambda: (claim(client, third, other), claim(client, third, provider, 1)))
    does('inventory', lambda: providers.set_inventory(client, provider, {'VCPU': {'total': 8}} | ROOM))
    does('traits', lambda: change_names(client, provider, TRAITS, lambda _: frozenset({'COMPUTE_NODE'})))
    does('aggregates', lambda: change_names(client, provider, AGGREGATES, lambda _: frozenset({new()})))
    does('nothing', lambda: providers.inventories(client, provider))
    does('released', lambda: allocations.release(client, [first], lambda _: (), lambda *_: None))
    does('deleted', lambda: placement.call('DELETE', f'/allocations/{second}'))
    counts = {'claim', 'another', 'moved here', 'inventory', 'traits', 'aggregates', 'released'}
    assert {change for change, is_counted in counted.items() if is_counted} >= counts
    assert not counted['nothing']


# Kept-alive connections that a middlebox has dropped silently.


AT_ONCE = 3
BODY = b'{"traits": []}'
ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n' % len(BODY) + BODY


class Forgetful(Listening):
    """A server that stops answering on connections it has forgotten, and leaves them open."""

    def __init__(self) -> None:
        self.together: threading.Barrier | None = None
        self._forgotten = 0
        super().__init__()
        self.url = f'http://{self.address}'

    def forget(self) -> None:
        """Forget all connections that are open now."""
        self.together = None
        self._forgotten = self.made

    def serve(self, connection: socket.socket, number: int) -> None:
        heard = b''
        while data := connection.recv(65536):
            heard += data
            if heard.endswith(b'\r\n\r\n') and number > self._forgotten:
                heard = b''
                if self.together is not None:
                    self.together.wait(20)
                connection.sendall(ANSWER)


@pytest.fixture
def server() -> Iterator[Forgetful]:
    with closing(Forgetful()) as forgetful:
        yield forgetful


@pytest.mark.fast
def test_those_that_were_forgotten_on_the_way_cost_one_time_limit(server: Forgetful) -> None:
    server.together = threading.Barrier(AT_ONCE)
    with closing(Placement(server.url, (3.0, 1.0))) as client:
        threads = [threading.Thread(target=client.get, args=('/traits',)) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.made == AT_ONCE
        server.forget()
        with pytest.raises(Unreachable, match='gave no answer in 1 s'):
            client.get('/traits')
        assert client.get('/traits') == {'traits': []}
        assert server.made == AT_ONCE + 1


@pytest.mark.fast
def test_one_is_not_kept_until_somebody_forgets_it(server: Forgetful, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Placement(server.url)) as client:
        for _ in range(3):
            client.get('/traits')
        assert server.made == 1
        monkeypatch.setattr(by_http, 'KEPT', 0.01)
        time.sleep(0.02)
        client.get('/traits')
        assert server.made == 2


# Tests that read placement's database file see the same as its API.


WHO = {'project_id': 'p', 'user_id': 'u', 'consumer_type': 'INSTANCE', 'consumer_generation': None}


def test_both_say_the_same(placement: PlacementServer) -> None:
    placement.database.empty()
    first, second = placement.make_provider(VCPU=4, MEMORY_MB=512), placement.make_provider(VCPU=8)
    expected = {
        str(uuid4()): {first: {'VCPU': 1, 'MEMORY_MB': 128}},
        str(uuid4()): {first: {'VCPU': 2}, second: {'VCPU': 3}},
    }
    for consumer, allocation in expected.items():
        body = {**WHO, 'allocations': {provider: {'resources': amounts} for provider, amounts in allocation.items()}}
        placement.call('PUT', f'/allocations/{consumer}', body)
    assert placement.database.allocations() == expected
    for consumer, allocation in expected.items():
        answer = placement.call('GET', f'/allocations/{consumer}')['allocations']
        assert {provider: amounts['resources'] for provider, amounts in answer.items()} == allocation
        assert placement.allocations(consumer) == allocation
    for provider in (first, second):
        answer = placement.call('GET', f'/resource_providers/{provider}/allocations')['allocations']
        assert {consumer: amounts['resources'] for consumer, amounts in answer.items()} == placement.consumers(provider)
        assert placement.consumers(provider)
        inventory = placement.call('GET', f'/resource_providers/{provider}/inventories')['inventories']
        assert inventory == placement.inventory(provider)
    placement.database.empty()
    assert placement.call('GET', '/resource_providers') == {'resource_providers': []}


def test_what_is_not_there(placement: PlacementServer) -> None:
    unknown = str(uuid4())
    assert (placement.allocations(unknown), placement.consumers(unknown), placement.inventory(unknown)) == ({}, {}, {})
    with pytest.raises(urllib.error.HTTPError):
        placement.call('GET', f'/resource_providers/{unknown}')
