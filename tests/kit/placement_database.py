"""Direct access to the SQLite file of a test's placement: a request would take about 10 ms.

functional/test_placement.py checks that both return the same.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tables that are the same in an empty database, and cached by its server.
CONSTANT_TABLES = {'alembic_version', 'consumer_types', 'resource_classes', 'traits'}
INVENTORY_COLUMNS = 'total', 'reserved', 'min_unit', 'max_unit', 'step_size', 'allocation_ratio'
SELECT_ALLOCATIONS = """SELECT consumer_id, resource_providers.uuid, resource_classes.name, used FROM allocations
JOIN resource_providers ON resource_providers.id = resource_provider_id
JOIN resource_classes ON resource_classes.id = resource_class_id"""
SELECT_INVENTORY = f"""SELECT resource_classes.name, {', '.join(INVENTORY_COLUMNS)} FROM inventories
JOIN resource_providers ON resource_providers.id = resource_provider_id
JOIN resource_classes ON resource_classes.id = resource_class_id WHERE resource_providers.uuid = ?"""

SELECT_CAPACITIES = """SELECT resource_providers.uuid, resource_classes.name, CAST(total * allocation_ratio AS INTEGER)
FROM inventories JOIN resource_providers ON resource_providers.id = resource_provider_id
JOIN resource_classes ON resource_classes.id = resource_class_id
WHERE COALESCE(inventories.updated_at, inventories.created_at) < (
    SELECT MAX(allocations.created_at) FROM allocations
    WHERE allocations.resource_provider_id = inventories.resource_provider_id
)"""

# An empty database made by a server of this process: copying it saves most of the next start.
_EMPTY_DATABASE: list[bytes] = []


@dataclass(frozen=True)
class PlacementDatabase:
    """One file. Its server may be writing it, or may have been killed."""

    path: Path

    @contextlib.contextmanager
    def prepare_start(self) -> Iterator[None]:
        """Start the server inside this context, without requests that change anything."""
        fresh = not self.path.exists()
        if fresh and _EMPTY_DATABASE:
            self.path.write_bytes(_EMPTY_DATABASE[0])
        yield
        if fresh and not _EMPTY_DATABASE and self.path.exists():
            _EMPTY_DATABASE.append(self.path.read_bytes())

    def empty(self) -> None:
        with self._open() as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for table in {name for (name,) in rows} - CONSTANT_TABLES:
                database.execute(f'DELETE FROM {table}')

    def read_allocations(self) -> dict[str, dict[str, dict[str, int]]]:
        return self._read_allocations(SELECT_ALLOCATIONS)

    def read_allocations_of(self, consumer: str) -> dict[str, dict[str, int]]:
        return self._read_allocations(f'{SELECT_ALLOCATIONS} WHERE consumer_id = ?', consumer).get(consumer, {})

    def read_consumers(self, provider: str) -> dict[str, dict[str, int]]:
        allocations = self._read_allocations(f'{SELECT_ALLOCATIONS} WHERE resource_providers.uuid = ?', provider)
        return {consumer: by_provider[provider] for consumer, by_provider in allocations.items()}

    def read_inventory(self, provider: str) -> dict[str, dict[str, Any]]:
        """Return {class: {'total', 'reserved', 'min_unit', …}}, or {}."""
        with self._open() as database:
            rows = database.execute(SELECT_INVENTORY, (provider,)).fetchall()
        return {name: dict(zip(INVENTORY_COLUMNS, amounts, strict=True)) for name, *amounts in rows}

    def read_capacities(self) -> dict[str, dict[str, int]]:
        """Return {provider: {class: amount}} of inventories claimed from since their last change.

        An inventory that was reduced later may be smaller than its allocations, and is left out.
        """
        with self._open() as database:
            rows = database.execute(SELECT_CAPACITIES).fetchall()
        capacities: dict[str, dict[str, int]] = {}
        for provider, name, capacity in rows:
            capacities.setdefault(provider, {})[name] = capacity
        return capacities

    def _read_allocations(self, query: str, *parameters: str) -> dict[str, dict[str, dict[str, int]]]:
        with self._open() as database:
            rows = database.execute(query, parameters).fetchall()
        allocations: dict[str, dict[str, dict[str, int]]] = {}
        for consumer, provider, name, used in rows:
            allocations.setdefault(consumer, {}).setdefault(provider, {})[name] = used
        return allocations

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as database, database:
            yield database
