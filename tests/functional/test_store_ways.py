"""The way to etcd where some of its addresses lead nowhere: what answers is reached within the time limit.

By the light way and by etcd3's.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from ecomp.conf import EtcdConfig
from ecomp.placement.client import Placement
from ecomp.store.client import Put, Store, Unchanged
from tests.kit.holes import hole
from tests.kit.servers import Etcd, PlacementServer
from tests.kit.store_client import BY_ETCD3

pytestmark = pytest.mark.fast

OFF = ('127.0.0.2', '127.0.0.3')
NAME = 'localhost'


@pytest.fixture(params=[False, True], ids=['by etcd3', 'light'])
def light(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose first addresses lead nowhere."""

    def getaddrinfo(host: Any, port: Any, *given: Any, **named: Any) -> Any:
        if host not in (NAME, NAME.encode()):
            return real(host, port, *given, **named)
        return [each for address in (*OFF, '127.0.0.1') for each in real(address, port, *given, **named)]

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, 'getaddrinfo', getaddrinfo)


def config(light: bool, *endpoints: str, timeout: float = 5.0) -> EtcdConfig:
    return EtcdConfig(endpoints, timeout=timeout, grpc_options=() if light else BY_ETCD3)


@pytest.mark.usefixtures('names')
def test_a_name_whose_first_addresses_lead_nowhere(etcd: Etcd, prefix: str, light: bool) -> None:
    # gRPC asks no resolver of ours, and takes a list of addresses for a name.
    name = NAME if light else 'ipv4:' + ','.join([f'{each}:{etcd.port}' for each in OFF] + ['127.0.0.1'])
    with hole(etcd.port, *OFF):
        for endpoints in ((f'{name}:{etcd.port}',), (f'{name}:{etcd.port}',) * 3):
            store = Store(config(light, *endpoints))
            try:
                assert store.commit([Unchanged(prefix, 0)], [Put(prefix, 'x')])
                assert store.get(prefix) is not None
            finally:
                store.close()
            prefix += 'x'


@pytest.mark.usefixtures('names')
def test_placement_is_reached_at_the_address_that_answers(placement: PlacementServer) -> None:
    with hole(placement.port, *OFF):
        client = Placement(f'http://{NAME}:{placement.port}')
        try:
            began = time.monotonic()
            assert client.get('/traits')['traits']
            assert time.monotonic() - began < 3
        finally:
            client.close()


def test_two_of_five_members_that_are_off_keep_nobody_from_the_others(etcd: Etcd, prefix: str, light: bool) -> None:
    endpoints = [*(f'{each}:{etcd.port}' for each in OFF), *(etcd.endpoint,) * 3]
    with hole(etcd.port, *OFF):
        store = Store(config(light, *endpoints))
        try:
            assert store.get(prefix) is None
        finally:
            store.close()
        store = Store(config(light, *endpoints))
        try:
            assert store.commit([Unchanged(prefix, 0)], [Put(prefix, 'x')])
        finally:
            store.close()
