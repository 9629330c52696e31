"""Make and run a compute's presence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ecomp.shared.presence import Presence
from ecomp.store.client import Store


def make_presence(store: Store, key: str, token: str, losses: list[str] | None = None) -> Presence:
    facts = {'hostname': f'host-of-{token}', 'since': 'today', 'token': token}
    return Presence(store, key, facts, (losses if losses is not None else []).append)


@contextmanager
def start_and_stop(service: Any) -> Iterator[Any]:
    service.start()
    try:
        yield service
    finally:
        service.stop()
