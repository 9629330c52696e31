"""Placement in this process, for tests of thousands of requests.

Its own state is global to the process, so there is one instance.
"""

from __future__ import annotations

import json
import pickle
from functools import cache
from typing import Any

from ecomp.placement.client import Placement
from ecomp.placement.http_client import HEADERS, Answer, quote_path
from tests.kit.memory_etcd import NoWorld
from tests.kit.memory_placement import PlacementModel, answer_request


class InProcessPlacement(Placement):
    def __init__(self, application: Any) -> None:
        super().__init__('http://in-process')
        self._application = application
        self.calls: list[str] = []
        # Number of SQL statements executed.
        self.statements = 0
        # The connection to the database in memory.
        self.database: Any = None

    def save(self) -> bytes:
        """Return the contents of the database, for restore()."""
        return bytes(self.database.serialize())

    def restore(self, contents: bytes) -> None:
        self.database.deserialize(contents)

    def _send(self, method: str, path: str, body: dict[str, Any] | None, *_: object) -> Answer:
        path = quote_path(path)
        self.calls.append(f'{method} {path}')
        answer = self._answer(method, path, body)
        if answer.status_code in (200, 201, 204):
            return answer
        raise self._make_error(answer, AssertionError)  # type: ignore[arg-type]

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> Answer:
        import webob

        request = webob.Request.blank(path, method=method, headers={**HEADERS, 'x-auth-token': 'admin'})
        if body is not None:
            request.content_type, request.body = 'application/json', json.dumps(body).encode()
        reply = request.get_response(self._application)
        return Answer(reply.status_int, reply.body, {name.lower(): value for name, value in reply.headers.items()})


class InMemoryPlacement(InProcessPlacement):
    def __init__(self) -> None:
        super().__init__(None)
        self._model = PlacementModel(NoWorld())

    def save(self) -> bytes:
        return pickle.dumps(self._model)

    def restore(self, contents: bytes) -> None:
        self._model = pickle.loads(contents)

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> Answer:
        status, answer = answer_request(self._model, method, path, json.loads(json.dumps(body)))
        return Answer(status, json.dumps(answer).encode(), {'content-type': 'application/json'})


@cache
def start_placement() -> InProcessPlacement:
    from oslo_config import cfg
    from placement import conf, db_api, deploy
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    settings = cfg.ConfigOpts()
    conf.register_opts(settings)
    settings.set_default('connection', 'sqlite://', group='placement_database')
    # With sqlite:// each connection is a database of its own. One reopened after the default hour would have no tables.
    settings.set_default('connection_recycle_time', -1, group='placement_database')
    settings.set_default('sync_on_startup', True, group='placement_database')
    settings.set_default('auth_strategy', 'noauth2', group='api')
    settings([], project='placement', default_config_files=[])
    connections: list[Any] = []

    # Both listen on all engines of this process; there is one. https://docs.sqlalchemy.org/en/20/core/events.html
    @event.listens_for(Engine, 'connect')
    def keep_connection(connection: Any, _: object) -> None:
        connections.append(connection)

    db_api.configure(settings)
    client = InProcessPlacement(deploy.loadapp(settings))
    (client.database,) = connections

    @event.listens_for(Engine, 'before_cursor_execute')
    def count_statement(*_: object) -> None:
        client.statements += 1

    return client


def remove_providers(client: Placement) -> None:
    providers = client.get('/resource_providers')['resource_providers']
    for provider in providers:
        for consumer in client.get(f'/resource_providers/{provider["uuid"]}/allocations')['allocations']:
            client.write('DELETE', f'/allocations/{consumer}', None)
    for provider in sorted(providers, key=lambda each: each['parent_provider_uuid'] is None):
        client.write('DELETE', f'/resource_providers/{provider["uuid"]}', None)


def put_with_generation(client: Placement, path: str, **fields: object) -> None:
    generation = client.get('/'.join(path.split('/')[:3]))['generation']
    client.write('PUT', path, {'resource_provider_generation': generation, **fields})
