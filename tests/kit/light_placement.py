"""The placement in memory as a process, at a twentieth of the cost of a real one.

Before it answers a change, it writes its contents to the file where a real one has its database. So it can be killed,
frozen, copied and started again. `python -m tests.kit.light_placement ADDRESS PORT FILE` serves it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.memory_etcd import NoWorld
from tests.kit.memory_placement import PlacementModel, answer_request
from tests.kit.placement_database import INVENTORY_COLUMNS, PlacementDatabase
from tests.kit.servers import PlacementServer, make_environment

# Empties the server; a real placement does not know it.
EMPTY = '/empty'


class LightPlacement(PlacementServer):
    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(directory)
        self.database = LightDatabase(self.database.path, self)

    def command(self) -> list[str]:
        return [sys.executable, '-m', 'tests.kit.light_placement', '127.0.0.1', str(self.port), str(self.database.path)]

    def environment(self) -> dict[str, str]:
        return make_environment()


@dataclass(frozen=True)
class LightDatabase(PlacementDatabase):
    server: PlacementServer

    @contextlib.contextmanager
    def prepare_start(self) -> Iterator[None]:
        yield

    def empty(self) -> None:
        self.server.call('DELETE', EMPTY)

    def read_allocations(self) -> dict[str, dict[str, dict[str, int]]]:
        return _read(self.path)[0].held

    def read_allocations_of(self, consumer: str) -> dict[str, dict[str, int]]:
        return self.read_allocations().get(consumer, {})

    def read_consumers(self, provider: str) -> dict[str, dict[str, int]]:
        return {name: held[provider] for name, held in self.read_allocations().items() if provider in held}

    def read_inventory(self, provider: str) -> dict[str, dict[str, Any]]:
        found = _read(self.path)[0].providers.get(provider)
        inventories = found.inventories if found else {}
        return {name: {column: fields[column] for column in INVENTORY_COLUMNS} for name, fields in inventories.items()}

    def read_capacities(self) -> dict[str, dict[str, int]]:
        model, claimed = _read(self.path)
        return {
            name: {kind: model.get_capacity(name, kind) for kind in model.providers[name].inventories}
            for name in claimed
        }


# A placement, and its providers that have been claimed from since their inventory last changed.
Contents = tuple[PlacementModel, set[str]]


def _read(path: Path) -> Contents:
    with contextlib.suppress(FileNotFoundError):
        return pickle.loads(path.read_bytes())  # type: ignore[no-any-return]
    return PlacementModel(NoWorld()), set()


def _answer(contents: Contents, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    model, claimed = contents
    if path == EMPTY:
        model.empty()
        claimed.clear()
        return 200, {}
    status, answer = answer_request(model, method, path, body)
    kind, provider, part = [*path.split('/'), '', ''][1:4]
    if kind == 'resource_providers' and status < 300 and (method == 'DELETE' or part == 'inventories'):
        claimed.discard(provider)
    if kind == 'allocations' and method != 'GET' and status < 300:
        bodies = (body or {}).values() if method == 'POST' else [body or {}]
        claimed.update(provider for each in bodies for provider in each.get('allocations', {}))
    return status, answer


def main(address: str, port: int, path: Path) -> None:
    import waitress

    contents = _read(path)

    def save() -> None:
        path.with_suffix('.new').write_bytes(pickle.dumps(contents))
        path.with_suffix('.new').rename(path)

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        length, writes = int(environ.get('CONTENT_LENGTH') or 0), contents[0].writes
        body = json.loads(environ['wsgi.input'].read(length)) if length else None
        status, answer = _answer(contents, environ['REQUEST_METHOD'], environ['REQUEST_URI'], body)
        if contents[0].writes != writes:
            save()
        content = b'' if answer is None else json.dumps(answer).encode()
        headers = [('content-type', 'application/json'), ('content-length', str(len(content)))]
        start_response(f'{status} of placement', headers)
        return [content]

    save()
    waitress.serve(application, host=address, port=port, threads=1, ident='placement', connection_limit=2000)


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
