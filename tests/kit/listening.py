"""A server in this process at a port of 127.0.0.1, with a thread for each connection."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class ThreadedServer:
    def __init__(self) -> None:
        self.connection_count = 0
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.address = f'127.0.0.1:{self._listener.getsockname()[1]}'
        threading.Thread(target=self._accept, daemon=True).start()

    def serve(self, connection: socket.socket, number: int) -> None:
        """Answer on the `number`th connection. An OSError ends it, too."""
        raise NotImplementedError

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connection_count += 1
                threading.Thread(target=self._serve, args=(connection, self.connection_count), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, suppress(OSError):
            self.serve(connection, number)


class CannedServer(ThreadedServer):
    """An HTTP server with canned answers, the last one repeated."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.requests: list[str] = []
        super().__init__()
        self.url = f'http://{self.address}'

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        with connection.makefile('rb') as stream:
            while line := stream.readline():
                length = 0
                while (field := stream.readline().lower()).strip():
                    if field.startswith(b'content-length:'):
                        length = int(field.partition(b':')[2])
                stream.read(length)
                self.requests.append(' '.join(line.decode().split()[:2]))
                connection.sendall(self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])


def make_answer(status: int, kind: str, body: bytes, *fields: str) -> bytes:
    head = [f'HTTP/1.1 {status} x', f'content-type: {kind}', f'content-length: {len(body)}', *fields]
    return '\r\n'.join(head).encode() + b'\r\n\r\n' + body
