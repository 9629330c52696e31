"""An HTTP/2 proxy for a real etcd that resets streams: calls are done, but not answered."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any, NamedTuple, Self

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamEnded
from h2.exceptions import H2Error

from tests.kit.listening import ThreadedServer

ANSWER_HEADERS = [(':status', '200'), ('content-type', 'application/grpc')]
# The timeout of a call to etcd.
TIMEOUT_SECONDS = 10.0
# Bytes before a gRPC message: a flag and the length.
PREFIX_BYTES = 5


class Reset(NamedTuple):
    """Reset the stream of the next call that contains `pattern`, once the call is carried out.

    `sends_answer`: first send the message of the answer, without the status that would end the stream.
    """

    pattern: bytes
    code: ErrorCodes
    sends_answer: bool


class ResettingProxy(ThreadedServer):
    """Passes calls on to the etcd at `endpoint`; `calls` are their paths and messages."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint)
        self._resets: list[Reset] = []
        self.calls: list[tuple[str, bytes]] = []
        super().__init__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._channel.close()

    def reset(self, pattern: bytes, code: ErrorCodes, sends_answer: bool = False) -> None:
        self._resets.append(Reset(pattern, code, sends_answer))

    def count(self, pattern: bytes) -> int:
        return sum(pattern in message for _, message in self.calls)

    @property
    def has_reset(self) -> bool:
        return not self._resets

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        http = H2Connection(H2Configuration(client_side=False, header_encoding='utf-8'))
        http.initiate_connection()
        paths: dict[int, str] = {}
        bodies: dict[int, bytes] = {}
        with suppress(H2Error):
            connection.sendall(http.data_to_send())
            while data := connection.recv(65536):
                for event in http.receive_data(data):
                    if isinstance(event, RequestReceived):
                        paths[event.stream_id] = str(dict(event.headers)[':path'])
                        bodies[event.stream_id] = b''
                    elif isinstance(event, DataReceived):
                        bodies[event.stream_id] += event.data
                        http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, StreamEnded):
                        self._pass_on(
                            http, event.stream_id, paths[event.stream_id], bodies[event.stream_id][PREFIX_BYTES:]
                        )
                connection.sendall(http.data_to_send())

    def _pass_on(self, http: H2Connection, stream: int, path: str, message: bytes) -> None:
        self.calls.append((path, message))
        reset = next((candidate for candidate in self._resets if candidate.pattern in message), None)
        status, details = 0, ''
        answer = b''
        try:
            answer = self._call_etcd(path, message)
        except grpc.RpcError as error:
            status, details = error.code().value[0], error.details()
        if reset is None or reset.sends_answer:
            http.send_headers(stream, ANSWER_HEADERS)
            if not status:
                http.send_data(stream, b'\0' + len(answer).to_bytes(4, 'big') + answer)
        if reset is None:
            http.send_headers(stream, [('grpc-status', str(status)), ('grpc-message', details)], end_stream=True)
        else:
            self._resets.remove(reset)
            http.reset_stream(stream, reset.code)

    def _call_etcd(self, path: str, message: bytes) -> Any:
        if path.endswith('LeaseKeepAlive'):
            return next(self._channel.stream_stream(path)(iter([message]), timeout=TIMEOUT_SECONDS))
        return self._channel.unary_unary(path)(message, timeout=TIMEOUT_SECONDS)
