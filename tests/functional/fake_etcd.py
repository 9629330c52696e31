"""An etcd that answers with canned frames.

It sends what a real one sends only in a race, a partition or a bug.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from ecomp.store.roles import etcdrpc  # this module makes protobuf load it

# A reply of a watch, an error that ends the stream, or None to end it normally.
Frame = etcdrpc.WatchResponse | grpc.StatusCode | None


@dataclass
class FakeEtcd(etcdrpc.KVServicer, etcdrpc.WatchServicer):
    """An etcd that answers ranges with `values`, and each watch with the next of `watches`.

    If `watches` is empty, a watch is created and stays silent. `list_count` counts the ranges of more than one key.
    """

    values: dict[bytes, bytes] = field(default_factory=dict)
    header: tuple[int, int, int] = (1, 10, 2)
    list_count: int = 0

    def __post_init__(self) -> None:
        self.watches: queue.SimpleQueue[list[Frame]] = queue.SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(8))
        etcdrpc.add_KVServicer_to_server(self, self._server)
        etcdrpc.add_WatchServicer_to_server(self, self._server)
        self.endpoint = f'127.0.0.1:{self._server.add_insecure_port("127.0.0.1:0")}'

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def make_frame(self, **fields: Any) -> etcdrpc.WatchResponse:
        """Return a watch frame with the current header."""
        return etcdrpc.WatchResponse(header=_make_header(*fields.pop('header', self.header)), watch_id=0, **fields)

    def make_put_frame(self, key: bytes, value: bytes, **fields: Any) -> etcdrpc.WatchResponse:
        frame = self.make_frame(**fields)
        event = frame.events.add()
        event.kv.key, event.kv.value, event.kv.mod_revision = key, value, frame.header.revision
        return frame

    def Range(self, request: Any, _: Any) -> Any:  # noqa: N802
        """Return the requested values; the requested revision is ignored."""
        end = request.range_end or request.key + b'\0'
        self.list_count += bool(request.range_end)
        reply = etcdrpc.RangeResponse(header=_make_header(*self.header))
        for key, value in sorted(self.values.items()):
            if request.key <= key < end:
                reply.kvs.add(key=key, value=value, mod_revision=self.header[1], create_revision=1, version=1)
        return reply

    def Watch(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """Send the next scripted frames, then stay silent."""
        next(requests)
        try:
            script = self.watches.get_nowait()
        except queue.Empty:
            script = [self.make_frame(created=True)]
        for frame in script:
            if frame is None:
                return
            if isinstance(frame, grpc.StatusCode):
                context.abort(frame, 'as scripted')
            yield frame
        for _ in requests:
            pass


def _make_header(cluster: int, revision: int, term: int) -> Any:
    return etcdrpc.ResponseHeader(cluster_id=cluster, member_id=7, revision=revision, raft_term=term)
