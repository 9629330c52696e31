"""Make and run a compute's presence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ecomp.store.client import Store
from ecomp.store.presence import Presence


def presence(store: Store, key: str, token: str, lost: list[str] | None = None) -> Presence:
    facts = {'hostname': f'host-of-{token}', 'since': 'today', 'token': token}
    return Presence(store, key, facts, (lost if lost is not None else []).append)


@contextmanager
def start_and_stop(made: Any) -> Iterator[Any]:
    """Start a service that has its own thread, and stop it at the end."""
    made.start()
    try:
        yield made
    finally:
        made.stop()
