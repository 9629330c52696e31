"""A web server whose files come by half: `python -m tests.faults.slow_images ADDRESS PORT DIRECTORY GO`.

The second half is sent once the file GO is there. Each file that was sent whole is a line `sent CLIENT NAME`.
"""

from __future__ import annotations

import http.server
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LONGEST = 120.0
CHUNK = 2**20


def serve(address: str, port: int, directory: Path, go: Path) -> None:
    """Until it is killed."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = directory / Path(self.path.partition('?')[0]).name
            if not path.is_file():
                self.send_error(404)
                return
            found = path.stat()
            etag = f'"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"'
            if self.headers.get('if-none-match') == etag:
                self.send_response(304)
                self.end_headers()
                return
            self.send_response(200)
            self.send_header('content-length', str(found.st_size))
            self.send_header('etag', etag)
            self.end_headers()
            with suppress(ConnectionError), path.open('rb') as file:  # its client was killed
                self.copy(file, found.st_size // 2)
                deadline = time.monotonic() + LONGEST
                while not go.exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
                self.copy(file, found.st_size)
                print(f'sent {self.client_address[0]} {self.path.strip("/")}', flush=True)

        def copy(self, file: BinaryIO, size: int) -> None:
            """So much of the file, or what is left."""
            while size and (chunk := file.read(min(size, CHUNK))):
                self.wfile.write(chunk)
                size -= len(chunk)

    server = http.server.ThreadingHTTPServer((address, port), Handler)
    print('ready', flush=True)
    server.serve_forever()


if __name__ == '__main__':
    serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
