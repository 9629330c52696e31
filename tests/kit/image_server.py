"""A web server of images that misbehaves in every way."""

from __future__ import annotations

import gzip
import http.server
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Handler(http.server.BaseHTTPRequestHandler):
    server: ImageServer

    def do_GET(self) -> None:
        assert '#' not in self.path, self.path
        path = self.path.partition('?')[0].strip('/')
        self.server.requests.append(path)
        answer: Callable[[], None] = getattr(self, f'answer_{path.replace("/", "_")}', self.answer_missing)
        with suppress(BrokenPipeError, ConnectionResetError):  # the client disconnected
            answer()

    def send_body(self, body: bytes, length: int | None = None, status: int = 200, **headers: str) -> None:
        """Send a response with a content-length, which may be wrong."""
        self.send_head(status, content_length=str(len(body) if length is None else length), **headers)
        self.wfile.write(body)

    def send_head(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()

    def redirect(self, location: str, status: int = 302) -> None:
        self.send_body(b'', status=status, location=location)

    def answer_good(self) -> None:
        self._send_image(self.path.strip('/'), self.server.headers)

    def answer_SHA256SUMS(self) -> None:  # noqa: N802
        if self.server.sums is None:
            self.send_body(b'no such list', status=404)
        else:
            self.send_body(self.server.sums)

    def answer_changing(self) -> None:
        """Send an image that is replaced halfway by another one of the same length."""
        old, half = self.server.image, len(self.server.image) // 2
        if self.server.requests.count('changing') == 1:
            self.server.image = old[:512] + bytes([old[512] ^ 1]) * (len(old) - 512)
            # Change them before the response: a client with the last byte immediately requests the new headers.
            says, self.server.headers = (
                self.server.headers,
                {name: f'{value}+' for name, value in self.server.headers.items()},
            )
            self.send_body(old[:half] + self.server.image[half:], **says)
        else:
            self.answer_good()

    def answer_without_length(self) -> None:
        self.send_head()
        self.wfile.write(self.server.image)

    def answer_slowly(self) -> None:
        self.server.may_go_on.wait(20)
        self.send_body(self.server.image)

    def answer_cut_without_length(self) -> None:
        self.send_head()
        self.wfile.write(self.server.image[: len(self.server.image) // 2])

    def answer_reset(self) -> None:
        self.send_body(self.server.image[:70_000], length=len(self.server.image))
        self.connection.setsockopt(1, 13, b'\1\0\0\0\0\0\0\0')  # SO_LINGER 0: the close is a reset
        self.connection.close()

    def answer_no_number(self) -> None:
        self.send_head(content_length='many')
        self.wfile.write(self.server.image)

    def answer_drip(self) -> None:
        self.send_head()
        while not self.server.may_go_on.wait(0.05):
            self.wfile.write(b'x')
            self.wfile.flush()

    def answer_half(self) -> None:
        self.send_head(content_length=str(len(self.server.image)))
        half = len(self.server.image) // 2
        self.wfile.write(self.server.image[:half])
        self.wfile.flush()
        self.server.may_go_on.wait(20)
        self.wfile.write(self.server.image[half:])

    def answer_mirrored(self) -> None:
        self.server.redirect_count += 1
        self.redirect(f'/mirror{self.server.redirect_count % 2}?signed={self.server.redirect_count}')

    def answer_farm(self) -> None:
        """Answer as one of three servers with their own ETags. `headers` are common to them."""
        self.server.redirect_count += 1
        self.server.sent_bodies.append('farm')
        self.send_body(self.server.image, **{'etag': f'"{self.server.redirect_count % 3}"', **self.server.headers})

    def answer_now(self) -> None:
        self.server.redirect_count += 1
        self.send_body(self.server.image, last_modified=str(self.server.redirect_count))

    def answer_signed(self) -> None:
        self.server.redirect_count += 1
        self.redirect(f'/once?signed={self.server.redirect_count}')

    def answer_once(self) -> None:
        if self.path in self.server.sent_bodies:
            self.send_body(b'the signature has expired', status=403)
        else:
            self.server.sent_bodies.append(self.path)
            self.send_body(self.server.image, **self.server.headers)

    def send_mirrored(self, number: int) -> None:
        says = {
            name: f'"{value} of {number}"' if name == 'etag' else value for name, value in self.server.headers.items()
        }
        self._send_image(self.path.partition('?')[0].strip('/'), says)

    def _send_image(self, name: str, image_headers: dict[str, str]) -> None:
        if (
            self.server.compares
            and 'etag' in image_headers
            and self.headers.get('if-none-match') == image_headers['etag']
        ):
            self.send_head(304)
            return
        self.server.sent_bodies.append(name)
        self.send_body(self.server.image, **image_headers)

    def answer_more_in_chunks(self) -> None:
        """Send more, in chunks, than the content-length that is sent as well."""
        self.protocol_version = 'HTTP/1.1'
        self.close_connection = True
        self.send_head(content_length='10', transfer_encoding='chunked')
        for first in range(0, len(self.server.image), 65536):
            chunk = self.server.image[first : first + 65536]
            self.wfile.write(b'%x\r\n%b\r\n' % (len(chunk), chunk))
        self.wfile.write(b'0\r\n\r\n')

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class ImageServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, image: bytes) -> None:
        super().__init__(('127.0.0.1', 0), Handler)
        self.image = image
        self.requests: list[str] = []
        self.sent_bodies: list[str] = []
        # The headers of a good image: its etag and last-modified.
        self.headers: dict[str, str] = {}
        self.compares = True
        self.sums: bytes | None = None
        # Number of redirects to a mirror.
        self.redirect_count = 0
        self.may_go_on = threading.Event()
        self.url = f'http://127.0.0.1:{self.server_address[1]}/'

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: the tests let clients disconnect."""

    def server_bind(self) -> None:
        # Without http.server's lookup of the host name.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = 'localhost', self.server_address[1]


# The one-line answers by path.
ANSWERS_BY_PATH: dict[str, Callable[[Handler], object]] = {
    'missing': lambda handler: handler.send_body(b'<html>no such page</html>', status=404),
    'broken_SHA256SUMS': lambda handler: handler.answer_error(),
    'dripping_SHA256SUMS': lambda handler: handler.answer_drip(),
    'dripping_good': lambda handler: handler.answer_good(),
    'broken_good': lambda handler: handler.answer_good(),
    'cut': lambda handler: handler.send_body(handler.server.image[:-1000], length=len(handler.server.image)),
    'too_much': lambda handler: handler.send_body(handler.server.image, length=len(handler.server.image) // 2),
    'silence': lambda handler: handler.server.may_go_on.wait(20),
    'no_http': lambda handler: handler.wfile.write(b'SSH-2.0-OpenSSH\r\n'),
    'page': lambda handler: handler.send_body(b'<html><body>Please log in</body></html>', content_type='text/html'),
    'nothing': lambda handler: handler.send_body(b''),
    'error': lambda handler: handler.send_body(b'broken', status=500),
    'unpacked_by_nobody': lambda handler: handler.send_body(
        gzip.compress(handler.server.image), content_encoding='gzip'
    ),
    'loop': lambda handler: handler.redirect('/loop'),
    'moved': lambda handler: handler.redirect('good', status=301),
    'moved_twice': lambda handler: handler.redirect(f'{handler.server.url}moved', status=307),
    'mirror0': lambda handler: handler.send_mirrored(0),
    'mirror1': lambda handler: handler.send_mirrored(1),
    'to_a_file': lambda handler: handler.redirect('file:///etc/hostname'),
    'to_another_scheme': lambda handler: handler.redirect('ftp://127.0.0.1/x'),
    'to_nowhere': lambda handler: handler.redirect('http://[::1/'),
}
for _name, _answer in ANSWERS_BY_PATH.items():
    setattr(Handler, f'answer_{_name}', _answer)


@contextmanager
def serve_images(image: bytes) -> Iterator[ImageServer]:
    server = ImageServer(image)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.may_go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
