"""Stores that are closed after use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from ecomp.conf import EtcdConfig
from ecomp.store.client import Entry, Store


def make_config(endpoint: str, timeout: float = 5.0) -> EtcdConfig:
    return EtcdConfig(endpoints=(endpoint,), timeout=timeout)


@contextmanager
def open_store(endpoint: str, timeout: float = 5.0) -> Iterator[Store]:
    with closing(Store(make_config(endpoint, timeout))) as store:
        yield store


def read_entry(store: Store, key: str) -> Entry:
    entry = store.get(key)
    assert entry is not None, key
    return entry
