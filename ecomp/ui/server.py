"""The web server of `eschedule ui`: a page, its events, and details of an instance, for whoever has the token."""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from waitress.server import create_server

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError
from ecomp.model.host import SILENT
from ecomp.model.json_object import dump
from ecomp.model.text import format_time, make_printable
from ecomp.scheduler.queries.computes import read_last_seen
from ecomp.store.client import Entry, Store
from ecomp.store.history import History
from ecomp.store.watch import Follower
from ecomp.ui.picture import PREFIXES, Picture, Tables, find_changes

# Each open page holds a thread, and there are four for requests that end at once.
MAX_PAGES = 8
# A body is refused: waitress would store it before it asks for the token.
LIMITS = {'threads': MAX_PAGES + 4, 'channel_request_lookahead': 1, 'max_request_body_size': 1}
# Seconds between two changes, and between two signs of life, that a page gets.
CHANGE_INTERVAL_SECONDS = 0.2
BEAT_INTERVAL_SECONDS = 5.0
# Seconds after which the thread of a page that was closed is free again.
POLL_SECONDS = 1.0
# Revisions before the start whose events are shown.
PAST_REVISIONS = 500
# Only the page's own script and style have the nonce. No other page may show it, and no cache keeps it.
HEADERS = (
    "Content-Security-Policy: default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    *('Referrer-Policy: no-referrer', 'X-Frame-Options: DENY', 'X-Content-Type-Options: nosniff'),
    'Cache-Control: no-store',
)


class Watcher:
    """A thread that follows etcd, and keeps the newest tables."""

    def __init__(self, config: EtcdConfig, command_prefix: str) -> None:
        self._config, self._store, self._picture, self._prefix = config, Store(config), Picture(), command_prefix
        self._tables, self._states = Tables(), dict[str, Mapping[str, Entry]]()
        self._last_seen, self._outage = dict[str, str](), ('', '')  # the latter: why etcd is away, and since when
        self._wakeup, self._publication = threading.Event(), threading.Condition()
        subscriptions = [(prefix, partial(self._on_state, prefix)) for prefix in PREFIXES]
        self._follower = Follower(config, subscriptions, on_lost=self._on_lost, on_back=self._on_lost)
        self._follower.start()
        self.thread = threading.Thread(target=self._run, name='picture', daemon=True)
        self.thread.start()

    def close(self) -> None:
        self._follower.stop()

    def wait(self, tables: Tables) -> Tables:
        """Return the current tables, once they are not `tables`, or after POLL_SECONDS."""
        with self._publication:
            self._publication.wait_for(lambda: self._tables is not tables, POLL_SECONDS)
            return self._tables

    def _on_state(self, prefix: str, state: Mapping[str, Entry]) -> None:
        self._states[prefix] = state
        self._wakeup.set()

    def _on_lost(self, error: EcompError | None = None, began: float = 0.0) -> None:
        """Note that etcd is away since the monotonic time `began`, or without an error, is back."""
        since = datetime.now(UTC) - timedelta(seconds=time.monotonic() - began)
        self._outage = (make_printable(str(error)), format_time(since)) if error else ('', '')
        self._wakeup.set()

    def _run(self) -> None:
        """Publish the tables after each change, and once with the past events."""
        newest = 0
        while True:
            self._wakeup.wait()
            self._wakeup.clear()
            if len(states := dict(self._states)) == len(PREFIXES):
                now = format_time(datetime.now(UTC))
                self._picture.update(states, now)
                self._update_last_seen(now if newest else '')
            elif not self._outage[0]:
                continue
            self._publish()
            if not newest and (until := self._picture.newest_revision):
                history = History(self._config, False, lambda _: None, max(until - PAST_REVISIONS, 1))
                with suppress(EcompError), closing(history):
                    self._picture.add_events([each for some in history for each in some if each.revision <= until], '')
                    newest = until  # else the next change has it tried again
                self._publish()
            time.sleep(CHANGE_INTERVAL_SECONDS)

    def _publish(self) -> None:
        etcd = {'': (self._store.endpoints, *self._outage, self._prefix)}
        with self._publication:
            self._tables = {**self._picture.tables, 'seen': self._last_seen, 'etcd': etcd}
            self._publication.notify_all()

    def _update_last_seen(self, noticed_at: str) -> None:
        last_seen, hosts = self._last_seen, self._picture.tables['hosts']
        silent = {compute for compute, row in hosts.items() if row[1] == SILENT}
        if new := silent - last_seen.keys() if noticed_at else silent:  # leases end half a minute after a sign of life
            last_seen = last_seen | dict.fromkeys(new, noticed_at) | read_last_seen(self._store, new)
        self._last_seen = {compute: last_seen[compute] for compute in silent}


class App:
    """The WSGI application (PEP 3333), which refuses each request that is not of its own page."""

    def __init__(self, watcher: Watcher, url: str, describe: Callable[[str], object]) -> None:
        self._watcher, self._describe, nonce = watcher, describe, secrets.token_urlsafe()
        _, _, self._host, self._token, _ = url.split('/')
        page = Path(__file__).with_name('page.html').read_text(encoding='utf-8')
        self._page = page.replace('NONCE', nonce).encode()
        self._headers = [tuple(header.format(nonce).split(': ', 1)) for header in HEADERS]
        self._pages = set[object]()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        token, _, path = environ['PATH_INFO'][1:].partition('/')
        status, kind = self._refuse(environ, token, path), 'text/plain'
        body: Iterable[bytes] = [f'{status}\n'.encode()]
        if not status:
            status, kind, body = '200 OK', 'text/html', [self._page]
            if path == 'events':
                kind, body = 'text/event-stream', self._iterate_events(environ['waitress.client_disconnected'])
            elif path:
                kind, body = 'application/json', [dump(self._describe(path.removeprefix('instance/'))).encode()]
        start_response(status, [('Content-Type', f'{kind}; charset=utf-8'), *self._headers])
        return body

    def _refuse(self, environ: Mapping[str, Any], token: str, path: str) -> str:
        """Return the status and the reason why a request is refused, or ''."""
        if environ['REQUEST_METHOD'] != 'GET':
            return '405 the page is read-only. Fix: send GET'
        # A malicious web page can point its own host name here, and is then of the same origin (DNS rebinding).
        if environ.get('HTTP_HOST') != self._host:
            return f'421 this host name is not accepted. Fix: open http://{self._host}/'
        if environ.get('HTTP_ORIGIN') not in (None, f'http://{self._host}'):
            return '403 requests of other web pages are refused. Fix: open the page itself'
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return '403 this address has a wrong token. Fix: open the address that `eschedule ui` has printed'
        if not re.fullmatch('(events|instance/[0-9a-f-]{36})?', path):
            return '404 there is no such page. Fix: open the address that `eschedule ui` has printed'
        if len(self._pages) >= MAX_PAGES and 'instance' not in path:
            return f'503 {MAX_PAGES} pages are open. Fix: close one of them, and reload this one'
        return ''

    def _iterate_events(self, is_disconnected: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the server-sent events of a page, signs of life and changes, until it is closed."""
        page, beat_at, sent = object(), 0.0, Tables()
        self._pages.add(page)
        try:
            while self._watcher.thread.is_alive() and not is_disconnected():
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_INTERVAL_SECONDS
                    yield f'event: beat\ndata: {dump(format_time(datetime.now(UTC)))}\n\n'.encode()
                tables = self._watcher.wait(sent)
                if changes := find_changes(sent, tables):
                    kind, data = 'change' if sent else 'all', dump(changes, separators=(',', ':'))
                    yield f'event: {kind}\ndata: {data}\n\n'.encode()
                sent = tables
        finally:
            self._pages.discard(page)


@contextmanager
def serve(config: EtcdConfig, port: int, command_prefix: str, describe: Callable[[str], object]) -> Iterator[str]:
    """Serve the page during the block, and yield its URL, or raise EcompError if `port` is busy."""
    try:
        sock = socket.create_server(('127.0.0.1', port))
    except (OSError, OverflowError) as error:
        problem = f'cannot listen on port {port}: {getattr(error, "strerror", error)}'
        raise EcompError(f'{problem}. Fix: give another --port, or leave it out') from error
    # Browsers leave :80 out of their requests.
    url = f'http://127.0.0.1:{sock.getsockname()[1]}'.removesuffix(':80') + f'/{secrets.token_urlsafe(24)}/'
    with closing(Watcher(config, command_prefix)) as watcher:
        server = create_server(App(watcher, url, describe), sockets=[sock], ident=None, **LIMITS)
        threading.Thread(target=server.run, name='page', daemon=True).start()
        yield url
        with server.trigger.lock:  # or the thread that runs it closes the pipe before it is written to
            server.trigger.thunks.append(server.close)
            server.trigger.pull_trigger()
