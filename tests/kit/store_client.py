"""A store that is closed after use, by the way that is usual or by etcd3's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ecomp.conf import EtcdConfig
from ecomp.store.client import Store

BY_ETCD3 = (('grpc.enable_http_proxy', 0),)
"""What gRPC is told has it asked, and changes nothing."""


def config(endpoint: str, timeout: float = 5.0, light: bool = True) -> EtcdConfig:
    return EtcdConfig(endpoints=(endpoint,), timeout=timeout, grpc_options=() if light else BY_ETCD3)


@pytest.fixture(autouse=True, params=[True, False], ids=['light', 'by etcd3'])
def each_way_to_etcd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test of a module that imports this once by each way: what goes by config() and does not name one."""
    monkeypatch.setattr(config, '__defaults__', (5.0, request.param))


@contextmanager
def connected(endpoint: str, timeout: float = 5.0, light: bool = True) -> Iterator[Store]:
    """A store; whatever becomes of etcd meanwhile, the other way never takes over."""
    store = Store(config(endpoint, timeout, light))
    try:
        yield store
        assert store._connection._light is light, 'the other way took over'
    finally:
        store.close()
