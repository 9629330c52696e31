"""Calls of etcd over gRPC, in the JSON of its gateway, which the etcd of elab lacks."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

# etcd3's generated code loads in protobuf 4 and later only with this implementation, chosen before its import.
os.environ['PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION'] = 'python'
os.environ.setdefault('GRPC_VERBOSITY', 'NONE')

import grpc
from etcd3 import etcdrpc
from google.protobuf import json_format

CALLS_BY_PATH: dict[str, tuple[Callable[[grpc.Channel], Any], str, Any]] = {
    'kv/range': (etcdrpc.KVStub, 'Range', etcdrpc.RangeRequest),
    'kv/put': (etcdrpc.KVStub, 'Put', etcdrpc.PutRequest),
    'kv/compaction': (etcdrpc.KVStub, 'Compact', etcdrpc.CompactionRequest),
    'watch': (etcdrpc.WatchStub, 'Watch', etcdrpc.WatchRequest),
}


class Reply:
    """The answer of one call of the etcd at host:port, to be read and closed.

    The messages of a stream are one line of JSON each. `certs` has a client's certificate.
    """

    def __init__(
        self, endpoint: str, path: str, body: Mapping[str, Any], timeout: float = 30.0, certs: Path | None = None
    ) -> None:
        stub, method, kind = CALLS_BY_PATH[path]
        request = json_format.ParseDict(dict(body), kind())
        self._closed = threading.Event()
        # A proxy configured in the environment cannot reach a lab.
        options = [('grpc.enable_http_proxy', 0)]
        if certs is None:
            self._channel = grpc.insecure_channel(endpoint, options)
        else:
            files = [(certs / name).read_bytes() for name in ('ca.crt', 'client.key', 'client.crt')]
            self._channel = grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(*files), options)
        call = getattr(stub(self._channel), method)
        try:
            self._replies = call(self._send_request(request), timeout=timeout) if path == 'watch' else None
            self._reply = None if path == 'watch' else call(request, timeout=timeout)
        except grpc.RpcError as error:
            self.close()
            raise OSError(f'etcd at {endpoint}: {error}') from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> bytes:
        return json.dumps(_to_dict(self._reply)).encode()

    def readline(self) -> bytes:
        assert self._replies is not None
        try:
            return json.dumps({'result': _to_dict(next(self._replies))}).encode()
        except grpc.RpcError as error:
            raise OSError(f'the watch ended: {error}') from error

    def close(self) -> None:
        self._closed.set()
        self._channel.close()

    def _send_request(self, request: Any) -> Iterator[Any]:
        yield request
        # etcd ends a watch when its client closes its side of the stream.
        self._closed.wait()


def _to_dict(message: Any) -> dict[str, Any]:
    value: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return value
