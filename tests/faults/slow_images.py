"""A web server whose files come by half: `python -m tests.faults.slow_images ADDRESS PORT DIRECTORY GO`.

The second half is sent once the file GO is there.
"""

from __future__ import annotations

import http.server
import sys
import time
from contextlib import suppress
from pathlib import Path

LONGEST = 120.0


def serve(address: str, port: int, directory: Path, go: Path) -> None:
    """Until it is killed."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = (directory / Path(self.path.partition('?')[0]).name).read_bytes()
            self.send_response(200)
            self.send_header('content-length', str(len(content)))
            self.end_headers()
            half = len(content) // 2
            with suppress(ConnectionError):  # its client was killed
                self.wfile.write(content[:half])
                deadline = time.monotonic() + LONGEST
                while not go.exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
                self.wfile.write(content[half:])

    server = http.server.ThreadingHTTPServer((address, port), Handler)
    print('ready', flush=True)
    server.serve_forever()


if __name__ == '__main__':
    serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
