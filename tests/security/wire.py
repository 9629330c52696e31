"""Servers that answer HTTP with arbitrary bytes, each on its own port."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import closing

from tests.kit.listening import ThreadedServer

MakePieces = Callable[[], Iterable[bytes]]


def make_response(body: bytes, status: str = '200 OK', *headers: str) -> bytes:
    lines = [f'HTTP/1.1 {status}', 'content-type: application/json', f'content-length: {len(body)}', *headers]
    return '\r\n'.join(lines).encode() + b'\r\n\r\n' + body


def make_json_response(value: object) -> bytes:
    return make_response(json.dumps(value).encode())


class WireServer(ThreadedServer):
    """Answers each request with the pieces of `answer`; an empty piece is a short pause."""

    def __init__(self, answer: MakePieces) -> None:
        self.answer = answer
        self.request_count = 0
        self._open = True
        super().__init__()
        self.url = f'http://{self.address}'

    def close(self) -> None:
        self._open = False
        super().close()

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        while self._open and self._read(connection):
            self.request_count += 1
            for piece in self.answer():
                if not self._open:
                    return
                if piece:
                    connection.sendall(piece)
                else:
                    time.sleep(0.05)

    def _read(self, connection: socket.socket) -> bool:
        data = b''
        while b'\r\n\r\n' not in data:
            chunk = connection.recv(65536)
            if not chunk:
                return False
            data += chunk
        head, _, body = data.partition(b'\r\n\r\n')
        lengths = [line.split(b':')[1] for line in head.lower().split(b'\r\n') if line.startswith(b'content-length')]
        length = int(lengths[0]) if lengths else 0
        while len(body) < length:
            body += connection.recv(65536)
        return True


def start_wire_server(answer: MakePieces) -> closing[WireServer]:
    return closing(WireServer(answer))
