"""Limits on each client: its connections, requests per second, and time for one request.

waitress only limits all clients together, so one of them could use everything.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer
from waitress.task import WSGITask

log = logging.getLogger('mdserver')

MAX_CONNECTIONS_PER_ADDRESS = 16  # of one address; another one closes the oldest
# Requests of one address: per second, and as a burst. More requests wait: a complete crawl by cloud-init is 30.
REQUESTS_PER_SECOND = 10.0
REQUEST_BURST = 20
# Log lines about one address: per second, and as a burst. More lines are dropped.
LOG_LINES_PER_SECOND = 1.0
LOG_LINE_BURST = 20
REQUEST_TIMEOUT_SECONDS = 10.0  # to receive a request; then its connection is closed
CONNECTION_TIMEOUT_SECONDS = 60.0  # for a connection in total; then it is closed
POLL_SECONDS = 0.25  # between two checks of which connections may be read
MAX_TRACKED_ADDRESSES = 4096  # remembered; another one drops those that are idle


class RateLimiter:
    """A limit of `rate` events per second, and `burst` immediate ones, for each address."""

    # https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm
    def __init__(self, rate: float, burst: int) -> None:
        self._step = 1 / rate
        self._tolerance = (burst - 0.5) / rate  # half a step less, so that rounding has no effect
        self._used_until: dict[str, float] = {}  # until when the counted events of an address use its rate

    def schedule(self, address: str, now: float) -> float:
        """Count one event, and return the seconds that it has to wait."""
        used_until = max(self._used_until.get(address, now), now)
        seconds = min(max(0.0, used_until - now - self._tolerance), MAX_CONNECTIONS_PER_ADDRESS * self._step)
        self._record(address, now, now + self._tolerance + seconds if seconds else used_until)
        return seconds

    def try_acquire(self, address: str, now: float) -> bool:
        """Count one event and return True, or return False uncounted if it would have to wait."""
        used_until = max(self._used_until.get(address, now), now)
        if used_until - now > self._tolerance:
            return False
        self._record(address, now, used_until)
        return True

    def _record(self, address: str, now: float, used_until: float) -> None:
        if len(self._used_until) >= MAX_TRACKED_ADDRESSES:
            self._used_until = {other: until for other, until in self._used_until.items() if until > now}
        self._used_until[address] = used_until + self._step


class _OneRequestTask(WSGITask):  # type: ignore[misc]
    """A task that closes its connection after one answer, and announces this in the header."""

    # An idle connection blocks others.
    def build_response_header(self) -> bytes:
        self.set_close_on_finish()
        return bytes(super().build_response_header())


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection that is not read before the time that Server.admit() returns."""

    task_class = _OneRequestTask

    def __init__(self, server: Server, sock: socket.socket, address: Any, *rest: Any, **options: Any) -> None:
        super().__init__(server, sock, address, *rest, **options)
        self.starts_at = server.admit(self)

    def readable(self) -> bool:
        return self.connected and time.monotonic() >= self.starts_at and super().readable()

    def writable(self) -> bool:
        # Another connection may already have its descriptor number.
        return self.connected and bool(super().writable())

    def is_late(self, now: float) -> bool:
        is_receiving = not self.requests and not self.total_outbufs_len
        return now - self.starts_at > (REQUEST_TIMEOUT_SECONDS if is_receiving else CONNECTION_TIMEOUT_SECONDS)


class Server(TcpWSGIServer):  # type: ignore[misc]
    """waitress's server on a listening socket, which leaves forbidden addresses unanswered."""

    channel_class = _Channel

    def __init__(self, app: Any, sock: socket.socket, is_allowed: Callable[[str], bool], **adjustments: Any) -> None:
        self._is_allowed = is_allowed
        self._request_limiter = RateLimiter(REQUESTS_PER_SECOND, REQUEST_BURST)
        self._to_close: list[_Channel] = []
        self._log_limiter = RateLimiter(LOG_LINES_PER_SECOND, 1)
        info = sock.family, sock.type, sock.proto, sock.getsockname()
        super().__init__(app, _sock=sock, bind_socket=False, cleanup_interval=1, sockinfo=info, **adjustments)
        self.adj.asyncore_loop_timeout = POLL_SECONDS  # as an adjustment it would be truncated to 0

    def admit(self, channel: _Channel) -> float:
        """Return the monotonic time from which the connection may be read, or infinity.

        A connection that is not allowed is marked to be closed. If its address has too many, its oldest one is.
        """
        address, now = channel.addr[0], time.monotonic()
        if not self._is_allowed(address):
            self._to_close.append(channel)
            if self._log_limiter.try_acquire('', now):
                log.warning('client=%s is not a guest of this host: not answered', address)
            return float('inf')
        channels, limit = self.active_channels.values(), MAX_CONNECTIONS_PER_ADDRESS
        peers = [each for each in channels if each.addr[0] == address and each not in self._to_close]
        if len(peers) > limit:
            self._to_close.append(peers[0])  # a dict keeps the order of insertion
            if self._log_limiter.try_acquire(address, now):
                log.warning('client=%s has more than %d connections: closing its oldest', address, limit)
        return now + self._request_limiter.schedule(address, now)

    def readable(self) -> bool:
        """Close the marked connections, and return whether to accept others."""
        to_close, self._to_close = self._to_close, []
        for channel in to_close:  # waitress handles none of them now
            channel.handle_close()
        return bool(super().readable())

    def maintenance(self, now: float) -> None:
        """Mark connections that exceed their time to be closed by readable()."""
        super().maintenance(now)
        self._to_close += [channel for channel in self.active_channels.values() if channel.is_late(time.monotonic())]
