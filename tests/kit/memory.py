"""etcd and placement in memory, behind the product's own clients and the kit's servers.

Inside patch_clients() a store or a placement client of such a server has no connection: its requests are answered in
this process. Everything above the connection is the product's.
"""

from __future__ import annotations

import base64
import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ecomp.conf import EtcdConfig
from ecomp.errors import Unreachable
from ecomp.placement.http_client import Answer, Connections
from ecomp.store import http2_client
from ecomp.store.messages import Delete, Grant, Put, Range, Request, Revoke, Transaction
from tests.kit.memory_etcd import Etcd as EtcdContents
from tests.kit.memory_etcd import MemoryMember, NoWorld, decode_key
from tests.kit.memory_placement import Json, PlacementModel, answer_request
from tests.kit.servers import Etcd, PlacementServer

_NUMBERS = itertools.count(1)
_MEMBERS: dict[str, MemoryMember] = {}
_PLACEMENTS: dict[str, MemoryPlacement] = {}


class MemoryEtcd(Etcd):
    """An etcd in memory with the kit's calls of a real one. It cannot be stopped."""

    def __init__(self) -> None:
        self.port = 0
        self.endpoint = f'memory-{next(_NUMBERS)}:1'
        self.client = f'http://{self.endpoint}'
        self.member = _MEMBERS[self.endpoint] = MemoryMember(EtcdContents(NoWorld()))

    def call(self, path: str, body: Mapping[str, Any], _timeout: float = 10.0) -> dict[str, Any]:
        if path == 'lease/leases':
            return {'leases': [{'ID': str(lease)} for lease in self.member.etcd.leases]}
        answer = self.member.call(_parse_gateway_call(path, body))
        if path == 'kv/range':
            kvs = [{'key': _encode(kv.key), 'value': _encode(kv.value), **_make_revisions(kv)} for kv in answer.kvs]
            return {'header': _make_header(answer), 'kvs': kvs, 'count': str(answer.count)}
        return {'header': _make_header(answer), **({'ID': str(answer.ID)} if path == 'lease/grant' else {})}


class MemoryPlacement(PlacementServer):
    """A placement in memory with the kit's calls of a real one. It cannot be stopped."""

    def __init__(self) -> None:
        self.url = f'http://memory-{next(_NUMBERS)}:1'
        self.model = PlacementModel(NoWorld())
        self._lock = threading.Lock()
        _PLACEMENTS[self.url] = self

    def answer(self, method: str, path: str, body: Json | None) -> Answer:
        with self._lock:
            status, answer = answer_request(self.model, method, path, body)
        content = b'' if answer is None else json.dumps(answer).encode()
        return Answer(status, content, {'content-type': 'application/json'})

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = self.answer(method, path, None if body is None else dict(body))
        assert answer.status_code < 400, answer
        return dict(json.loads(answer.content or b'{}'))

    def read_allocations(self, consumer: str) -> dict[str, dict[str, int]]:
        return dict(self.model.held.get(consumer, {}))

    def read_consumers(self, provider: str) -> dict[str, dict[str, int]]:
        return {name: held[provider] for name, held in self.model.held.items() if provider in held}

    def read_inventory(self, provider: str) -> dict[str, dict[str, Any]]:
        return dict(self.model.providers[provider].inventories)


@contextmanager
def patch_clients() -> Iterator[None]:
    """Let the product's clients of memory endpoints answer in this process."""
    open_member, send = http2_client.EtcdMember, Connections.send

    def open_memory(config: EtcdConfig, endpoint: str) -> Any:
        return _MEMBERS.get(endpoint) or open_member(config, endpoint)

    def send_to_memory(
        self: Connections, method: str, path: str, body: Json | None, no_answer_error: type[Unreachable]
    ) -> Answer:
        server = _PLACEMENTS.get(self.endpoint)
        if server is None:
            return send(self, method, path, body, no_answer_error)
        return server.answer(method, path, json.loads(json.dumps(body, allow_nan=False)))

    with (
        mock.patch.object(http2_client, 'EtcdMember', open_memory),
        mock.patch.object(Connections, 'send', send_to_memory),
        mock.patch.dict(_MEMBERS),
        mock.patch.dict(_PLACEMENTS),
    ):
        yield


def _parse_gateway_call(path: str, body: Mapping[str, Any]) -> Request:
    key, end = (base64.b64decode(body.get(name, '')) for name in ('key', 'range_end'))
    if path == 'kv/range':
        return Range(key, end, keys_only=bool(body.get('keys_only')))
    if path == 'kv/put':
        value = base64.b64decode(body['value'])
        return Transaction(success=[Put(decode_key(key), decode_key(value), int(body.get('lease', 0)))])
    if path == 'kv/deleterange':
        assert not end, 'a range is deleted key by key'
        return Transaction(success=[Delete(decode_key(key))])
    if path == 'lease/grant':
        return Grant(int(body['TTL']))
    assert path in ('lease/revoke', 'kv/lease/revoke'), f'the etcd in memory does not answer {path}'
    return Revoke(int(body['ID']))


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _make_header(answer: Any) -> dict[str, str]:
    return {'revision': str(answer.header.revision), 'cluster_id': str(answer.header.cluster_id)}


def _make_revisions(kv: Any) -> dict[str, str]:
    return {'mod_revision': str(kv.mod_revision), 'create_revision': str(kv.create_revision), 'lease': str(kv.lease)}
