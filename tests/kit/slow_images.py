"""A web server that sends only half of each file at first.

Usage: `python -m tests.kit.slow_images ADDRESS PORT DIRECTORY GO`. It sends the second half once the file GO exists,
and prints `sent CLIENT NAME` for each file sent completely.
"""

from __future__ import annotations

import http.server
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ecomp.lab import state
from tests.kit.lab import Lab
from tests.kit.servers import Server, free_port

# Seconds until the rest is sent anyway, in case the test was killed: longer than any test waits.
MAX_WAIT_SECONDS = 900.0
CHUNK = 2**20


def serve(address: str, port: int, directory: Path, go: Path) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = directory / Path(self.path.partition('?')[0]).name
            if not path.is_file():
                self.send_error(404)
                return
            status = path.stat()
            etag = f'"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"'
            if self.headers.get('if-none-match') == etag:
                self.send_response(304)
                self.end_headers()
                return
            self.send_response(200)
            self.send_header('content-length', str(status.st_size))
            self.send_header('etag', etag)
            self.end_headers()
            with suppress(ConnectionError), path.open('rb') as file:  # its client was killed
                self.copy(file, status.st_size // 2)
                deadline = time.monotonic() + MAX_WAIT_SECONDS
                while not go.exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
                self.copy(file, status.st_size)
                print(f'sent {self.client_address[0]} {self.path.strip("/")}', flush=True)

        def copy(self, file: BinaryIO, size: int) -> None:
            while size and (chunk := file.read(min(size, CHUNK))):
                self.wfile.write(chunk)
                size -= len(chunk)

    server = http.server.ThreadingHTTPServer((address, port), Handler)
    print('ready', flush=True)
    server.serve_forever()


class SlowImages(Server):
    name = 'slow-images'

    def __init__(self, lab: Lab, directory: Path) -> None:
        super().__init__(directory)
        loaded = state.load(lab.name)
        self._prefix = loaded.make_command_prefix('control')
        self._address = loaded.address, str(free_port())
        self._images = lab.directory / 'images'
        self._go = directory / 'go'

    def command(self) -> list[str]:
        program = [sys.executable, '-m', 'tests.kit.slow_images', *self._address, str(self._images), str(self._go)]
        return [*self._prefix, *program]

    def is_ready(self) -> bool:
        return 'ready' in self.tail_log()

    def make_url(self, name: str) -> str:
        return f'http://{":".join(self._address)}/{name}'

    def release(self) -> None:
        self._go.touch()

    def list_recipients(self) -> list[str]:
        return [line.split()[1] for line in self.log.read_text().splitlines() if line.startswith('sent ')]


if __name__ == '__main__':
    serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
