"""What tests read in placement's file is what placement says."""

from __future__ import annotations

import urllib.error
from uuid import uuid4

import pytest

from tests.kit.servers import PlacementServer

WHO = {'project_id': 'p', 'user_id': 'u', 'consumer_type': 'INSTANCE', 'consumer_generation': None}


def test_both_say_the_same(placement: PlacementServer) -> None:
    placement.database.empty()
    first, second = placement.make_provider(VCPU=4, MEMORY_MB=512), placement.make_provider(VCPU=8)
    wanted = {
        str(uuid4()): {first: {'VCPU': 1, 'MEMORY_MB': 128}},
        str(uuid4()): {first: {'VCPU': 2}, second: {'VCPU': 3}},
    }
    for consumer, held in wanted.items():
        body = {**WHO, 'allocations': {provider: {'resources': each} for provider, each in held.items()}}
        placement.call('PUT', f'/allocations/{consumer}', body)
    assert placement.database.allocations() == wanted
    for consumer, held in wanted.items():
        asked = placement.call('GET', f'/allocations/{consumer}')['allocations']
        assert {provider: each['resources'] for provider, each in asked.items()} == held
        assert placement.allocations(consumer) == held
    for provider in (first, second):
        asked = placement.call('GET', f'/resource_providers/{provider}/allocations')['allocations']
        assert {consumer: each['resources'] for consumer, each in asked.items()} == placement.consumers(provider)
        assert placement.consumers(provider)
        said = placement.call('GET', f'/resource_providers/{provider}/inventories')['inventories']
        assert said == placement.inventory(provider)
    placement.database.empty()
    assert placement.call('GET', '/resource_providers') == {'resource_providers': []}


def test_what_is_not_there(placement: PlacementServer) -> None:
    nobody = str(uuid4())
    assert (placement.allocations(nobody), placement.consumers(nobody), placement.inventory(nobody)) == ({}, {}, {})
    with pytest.raises(urllib.error.HTTPError):
        placement.call('GET', f'/resource_providers/{nobody}')
