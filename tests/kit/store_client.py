"""A store that is closed after use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ecomp.conf import EtcdConfig
from ecomp.store.client import Store


def config(endpoint: str, timeout: float = 5.0) -> EtcdConfig:
    return EtcdConfig(endpoints=(endpoint,), timeout=timeout)


@contextmanager
def connected(endpoint: str, timeout: float = 5.0) -> Iterator[Store]:
    store = Store(config(endpoint, timeout))
    try:
        yield store
    finally:
        store.close()
