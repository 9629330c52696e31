"""A test's placement by its SQLite file: a question to its server costs it some ten milliseconds, and tests ask often.

What a test wants to know of the server itself, it asks the server. functional/test_placement.py holds that
both say the same.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT_TABLES = {'alembic_version', 'consumer_types', 'resource_classes', 'traits'}
"""What is the same in an empty one, and remembered by its server."""
INVENTORY = 'total', 'reserved', 'min_unit', 'max_unit', 'step_size', 'allocation_ratio'
HELD = """SELECT consumer_id, resource_providers.uuid, resource_classes.name, used FROM allocations
JOIN resource_providers ON resource_providers.id = resource_provider_id
JOIN resource_classes ON resource_classes.id = resource_class_id"""
HAS = f"""SELECT resource_classes.name, {', '.join(INVENTORY)} FROM inventories
JOIN resource_providers ON resource_providers.id = resource_provider_id
JOIN resource_classes ON resource_classes.id = resource_class_id WHERE resource_providers.uuid = ?"""

CAPACITIES = """SELECT resource_providers.uuid, resource_classes.name, CAST(total * allocation_ratio AS INTEGER)
FROM inventories JOIN resource_providers ON resource_providers.id = resource_provider_id
JOIN resource_classes ON resource_classes.id = resource_class_id
WHERE COALESCE(inventories.updated_at, inventories.created_at) < (
    SELECT MAX(allocations.created_at) FROM allocations
    WHERE allocations.resource_provider_id = inventories.resource_provider_id
)"""

_SCHEMA: list[bytes] = []
"""An empty one, as a server of this process made it: the next need not make it anew, which is most of its start."""


@dataclass(frozen=True)
class PlacementDatabase:
    """One file, which its server may be writing at the same time, or may have left when it was killed."""

    path: Path

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Inside, its server is started, and asked nothing that changes anything."""
        fresh = not self.path.exists()
        if fresh and _SCHEMA:
            self.path.write_bytes(_SCHEMA[0])
        yield
        if fresh and not _SCHEMA and self.path.exists():
            _SCHEMA.append(self.path.read_bytes())

    def empty(self) -> None:
        with self._opened() as database:
            named = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for table in {name for (name,) in named} - KEPT_TABLES:
                database.execute(f'DELETE FROM {table}')

    def allocations(self) -> dict[str, dict[str, dict[str, int]]]:
        """All that is held: {consumer: {provider: {class: amount}}}."""
        return self._held(HELD)

    def allocations_of(self, consumer: str) -> dict[str, dict[str, int]]:
        return self._held(f'{HELD} WHERE consumer_id = ?', consumer).get(consumer, {})

    def consumers(self, provider: str) -> dict[str, dict[str, int]]:
        """Who holds what of a provider: {consumer: {class: amount}}."""
        held = self._held(f'{HELD} WHERE resource_providers.uuid = ?', provider)
        return {consumer: each[provider] for consumer, each in held.items()}

    def inventory(self, provider: str) -> dict[str, dict[str, Any]]:
        """A provider's inventory, {} if there is none: {class: {'total', 'reserved', 'min_unit', …}}."""
        with self._opened() as database:
            rows = database.execute(HAS, (provider,)).fetchall()
        return {name: dict(zip(INVENTORY, amounts, strict=True)) for name, *amounts in rows}

    def capacities(self) -> dict[str, dict[str, int]]:
        """What of each class the providers have that something was claimed of since: {provider: {class: amount}}.

        What has been made smaller since may be less than what is claimed, and is left out.
        """
        with self._opened() as database:
            rows = database.execute(CAPACITIES).fetchall()
        found: dict[str, dict[str, int]] = {}
        for provider, name, most in rows:
            found.setdefault(provider, {})[name] = most
        return found

    def _held(self, question: str, *about: str) -> dict[str, dict[str, dict[str, int]]]:
        with self._opened() as database:
            rows = database.execute(question, about).fetchall()
        found: dict[str, dict[str, dict[str, int]]] = {}
        for consumer, provider, name, used in rows:
            found.setdefault(consumer, {}).setdefault(provider, {})[name] = used
        return found

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as database, database:
            yield database
