"""A web server of images that does everything wrong."""

from __future__ import annotations

import gzip
import http.server
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Handler(http.server.BaseHTTPRequestHandler):
    """Each path is one way to answer; the server remembers what it was asked, and which image bodies it sent."""

    server: Web

    def do_GET(self) -> None:
        assert '#' not in self.path, self.path
        path = self.path.partition('?')[0].strip('/')
        self.server.asked.append(path)
        answer: Callable[[], None] = getattr(self, f'answer_{path.replace("/", "_")}', self.answer_missing)
        with suppress(BrokenPipeError, ConnectionResetError):  # the client had enough
            answer()

    def do_HEAD(self) -> None:
        """Answer as to a GET, without the body; or as `refuses_head` does."""
        if self.server.refuses_head is not None:
            self.server.refuses_head(self)
            return
        path = self.path.partition('?')[0].strip('/')
        self.server.heads.append(path)
        answer: Callable[[], None] = getattr(self, f'answer_{path}', self.answer_missing)
        answer()

    def say(self, body: bytes, length: int | None = None, status: int = 200, **headers: str) -> None:
        """An answer with a content-length, true or not."""
        self.begin(status, content_length=str(len(body) if length is None else length), **headers)
        if self.command != 'HEAD':
            self.wfile.write(body)

    def begin(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()

    def redirect(self, where: str, status: int = 302) -> None:
        self.say(b'', status=status, location=where)

    def answer_good(self) -> None:
        """The image, or that it is not modified, for whoever says which he has."""
        self._send(self.path.strip('/'), self.server.says)

    def answer_SHA256SUMS(self) -> None:
        if self.server.sums is None:
            self.say(b'no such list', status=404)
        else:
            self.say(self.server.sums)

    def answer_changing(self) -> None:
        """Another image from the middle on, of the same length; from then on that is what the server has."""
        old, half = self.server.image, len(self.server.image) // 2
        if self.server.asked.count('changing') == 1:
            self.server.image = old[:512] + bytes([old[512] ^ 1]) * (len(old) - 512)
            # First, for whoever has the last byte asks at once what the server has now.
            says, self.server.says = self.server.says, {name: f'{value}+' for name, value in self.server.says.items()}
            self.say(old[:half] + self.server.image[half:], **says)
        else:
            self.answer_good()

    def answer_without_length(self) -> None:
        self.begin()
        self.wfile.write(self.server.image)

    def answer_slowly(self) -> None:
        self.server.may_go_on.wait(20)
        self.say(self.server.image)

    def answer_cut_without_length(self) -> None:
        self.begin()
        self.wfile.write(self.server.image[: len(self.server.image) // 2])

    def answer_reset(self) -> None:
        self.say(self.server.image[:70_000], length=len(self.server.image))
        self.connection.setsockopt(1, 13, b'\1\0\0\0\0\0\0\0')  # SO_LINGER 0: the close is a reset
        self.connection.close()

    def answer_no_number(self) -> None:
        self.begin(content_length='many')
        self.wfile.write(self.server.image)

    def answer_drip(self) -> None:
        self.begin()
        while not self.server.may_go_on.wait(0.05):
            self.wfile.write(b'x')
            self.wfile.flush()

    def answer_half(self) -> None:
        self.begin(content_length=str(len(self.server.image)))
        half = len(self.server.image) // 2
        self.wfile.write(self.server.image[:half])
        self.wfile.flush()
        self.server.may_go_on.wait(20)
        self.wfile.write(self.server.image[half:])

    def answer_mirrored(self) -> None:
        """To another mirror each time."""
        self.server.mirrors += 1
        self.redirect(f'/mirror{self.server.mirrors % 2}?signed={self.server.mirrors}')

    def answer_farm(self) -> None:
        """One of three servers behind one name, each with an ETag of its own; `says` is what they have in common."""
        if self.command != 'HEAD':
            self.server.mirrors += 1
            self.server.sent.append('farm')
        self.say(self.server.image, **{'etag': f'"{self.server.mirrors % 3}"', **self.server.says})

    def answer_now(self) -> None:
        """The image, with another date each time."""
        self.server.mirrors += 1
        self.say(self.server.image, last_modified=str(self.server.mirrors))

    def answer_signed(self) -> None:
        """To a place that is named for one request."""
        self.server.mirrors += 1
        self.redirect(f'/once?signed={self.server.mirrors}')

    def answer_once(self) -> None:
        if self.path in self.server.sent:
            self.say(b'the signature has expired', status=403)
        else:
            self.server.sent.append(self.path)
            self.say(self.server.image, **self.server.says)

    def _mirror(self, number: int) -> None:
        """The image, under an ETag of this mirror's own."""
        says = {name: f'"{value} of {number}"' if name == 'etag' else value for name, value in self.server.says.items()}
        self._send(self.path.partition('?')[0].strip('/'), says)

    def _send(self, name: str, says: dict[str, str]) -> None:
        if self.server.compares and 'etag' in says and self.headers.get('if-none-match') == says['etag']:
            self.begin(304)
            return
        if self.command != 'HEAD':
            self.server.sent.append(name)
        self.say(self.server.image, **says)

    def answer_more_in_chunks(self) -> None:
        """More, in chunks, than the length that is said besides."""
        self.protocol_version = 'HTTP/1.1'
        self.close_connection = True
        self.begin(content_length='10', transfer_encoding='chunked')
        for first in range(0, len(self.server.image), 65536):
            chunk = self.server.image[first : first + 65536]
            self.wfile.write(b'%x\r\n%b\r\n' % (len(chunk), chunk))
        self.wfile.write(b'0\r\n\r\n')

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class Web(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, image: bytes) -> None:
        super().__init__(('127.0.0.1', 0), Handler)
        self.image = image
        self.asked: list[str] = []
        self.sent: list[str] = []
        self.says: dict[str, str] = {}
        """Headers beside a good image: its etag, its last-modified."""
        self.compares = True
        self.refuses_head: Callable[[Handler], None] | None = lambda handler: handler.send_error(501)
        self.heads: list[str] = []
        """What it was asked by HEAD, where it refuses none."""
        self.sums: bytes | None = None
        self.mirrors = 0
        """How often it was asked which mirror to go to."""
        self.may_go_on = threading.Event()
        self.url = f'http://127.0.0.1:{self.server_address[1]}/'

    def handle_error(self, request: object, client_address: object) -> None:
        """Quiet: clients that hang up are what is tested."""

    def server_bind(self) -> None:
        """Without http.server's look for the machine's own name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = 'localhost', self.server_address[1]


ANSWERS: dict[str, Callable[[Handler], object]] = {
    'missing': lambda handler: handler.say(b'<html>no such page</html>', status=404),
    'broken_SHA256SUMS': lambda handler: handler.answer_error(),
    'dripping_SHA256SUMS': lambda handler: handler.answer_drip(),
    'dripping_good': lambda handler: handler.answer_good(),
    'broken_good': lambda handler: handler.answer_good(),
    'cut': lambda handler: handler.say(handler.server.image[:-1000], length=len(handler.server.image)),
    'too_much': lambda handler: handler.say(handler.server.image, length=len(handler.server.image) // 2),
    'silence': lambda handler: handler.server.may_go_on.wait(20),
    'no_http': lambda handler: handler.wfile.write(b'SSH-2.0-OpenSSH\r\n'),
    'page': lambda handler: handler.say(b'<html><body>Please log in</body></html>', content_type='text/html'),
    'nothing': lambda handler: handler.say(b''),
    'error': lambda handler: handler.say(b'broken', status=500),
    'unpacked_by_nobody': lambda handler: handler.say(gzip.compress(handler.server.image), content_encoding='gzip'),
    'loop': lambda handler: handler.redirect('/loop'),
    'moved': lambda handler: handler.redirect('good', status=301),
    'moved_twice': lambda handler: handler.redirect(f'{handler.server.url}moved', status=307),
    'mirror0': lambda handler: handler._mirror(0),
    'mirror1': lambda handler: handler._mirror(1),
    'to_a_file': lambda handler: handler.redirect('file:///etc/hostname'),
    'to_another_scheme': lambda handler: handler.redirect('ftp://127.0.0.1/x'),
    'to_nowhere': lambda handler: handler.redirect('http://[::1/'),
}
"""The answers of one line, by their paths."""
for _name, _answer in ANSWERS.items():
    setattr(Handler, f'answer_{_name}', _answer)


@contextmanager
def serving(image: bytes) -> Iterator[Web]:
    server = Web(image)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.may_go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
