"""How much of the server one client may have: its connections, its requests a second, its time for one request.

waitress has limits for all clients together, so one of them could have it all. Here each connection is for one request,
for a connection that waits for the next one is a connection nobody else has; and what one address asks too fast waits,
rather than be refused: a crawl of everything there is, as cloud-init does it, is 30 requests.
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

LOG = logging.getLogger('mdserver')

CONNECTIONS = 16  # of one address; the oldest goes
RATE, BURST = 10.0, 20  # requests of one address: a second, and at once
LINES, FIRST_LINES = 1.0, 20  # in the log about one address: a second, and at once
HEAD_SECONDS = 10.0  # for a whole request
LIFE_SECONDS = 60.0  # for a connection in all
LOOK_SECONDS = 0.25  # between two looks at whose turn it is
ADDRESSES = 4096  # remembered at most


class Shares:
    """So many a second for each address, and so many at once. PURE: `now` is in seconds of any clock that goes on.

    The generic cell rate algorithm: https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._step = 1 / rate
        self._tolerance = (burst - 0.5) / rate  # half a step, so that nothing hangs on rounding
        self._used: dict[str, float] = {}  # when what an address has used will have been given back

    def wait(self, address: str, now: float) -> float:
        """Take one; the seconds until its turn, at most those of CONNECTIONS before it."""
        used = max(self._used.get(address, now), now)
        seconds = min(max(0.0, used - now - self._tolerance), CONNECTIONS * self._step)
        self._note(address, now, now + self._tolerance + seconds if seconds else used)
        return seconds

    def allows(self, address: str, now: float) -> bool:
        """Take one, if it is the turn of this address."""
        used = max(self._used.get(address, now), now)
        if used - now > self._tolerance:
            return False
        self._note(address, now, used)
        return True

    def _note(self, address: str, now: float, used: float) -> None:
        if len(self._used) >= ADDRESSES:
            self._used = {each: when for each, when in self._used.items() if when > now}
        self._used[address] = used + self._step


class _OneRequest(WSGITask):  # type: ignore[misc]
    """An answer that says that it was the last."""

    def build_response_header(self) -> bytes:
        self.set_close_on_finish()
        return bytes(super().build_response_header())


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection that is read when it is its turn."""

    task_class = _OneRequest

    def __init__(self, server: Server, sock: socket.socket, address: Any, *rest: Any, **options: Any) -> None:
        super().__init__(server, sock, address, *rest, **options)
        self.begins = server.admit(self)

    def readable(self) -> bool:
        return self.connected and time.monotonic() >= self.begins and super().readable()

    def writable(self) -> bool:
        # Its number may be another's by now.
        return self.connected and bool(super().writable())

    def is_late(self, now: float) -> bool:
        """Whether its request should be here by now, or all of it be over."""
        waits = not self.requests and not self.total_outbufs_len
        return now - self.begins > (HEAD_SECONDS if waits else LIFE_SECONDS)


class Server(TcpWSGIServer):  # type: ignore[misc]
    """waitress's, on a socket that listens. `may_ask` says of an address whether it is heard at all."""

    channel_class = _Channel

    def __init__(
        self, application: Any, sock: socket.socket, may_ask: Callable[[str], bool], **adjustments: Any
    ) -> None:
        self._may_ask = may_ask
        self._turns = Shares(RATE, BURST)
        self._ends: list[_Channel] = []
        self._complaints = Shares(LINES, 1)
        super().__init__(
            application, _sock=sock, bind_socket=False, cleanup_interval=1,
            sockinfo=(sock.family, sock.type, sock.proto, sock.getsockname()), **adjustments,
        )
        self.adj.asyncore_loop_timeout = LOOK_SECONDS  # given as the others it would be made a whole number, 0

    def admit(self, channel: _Channel) -> float:
        """When, on the monotonic clock, it may be read. What is one too many ends before the next look."""
        address, now = channel.addr[0], time.monotonic()
        if not self._may_ask(address):
            self._ends.append(channel)
            if self._complaints.allows('', now):
                LOG.warning('client=%s is no guest here: not answered', address)
            return float('inf')
        theirs = [each for each in self.active_channels.values() if each.addr[0] == address and each not in self._ends]
        if len(theirs) > CONNECTIONS:
            self._ends.append(theirs[0])  # a dict's order is that of time
            if self._complaints.allows(address, now):
                LOG.warning('client=%s has more than %d connections: the oldest ends', address, CONNECTIONS)
        return now + self._turns.wait(address, now)

    def readable(self) -> bool:
        """Asked at each look: what is to end ends here, where nobody is in the middle of handling it."""
        ends, self._ends = self._ends, []
        for each in ends:
            each.handle_close()
        return bool(super().readable())

    def maintenance(self, now: float) -> None:
        """Once a second: who is late ends."""
        super().maintenance(now)
        self._ends += [each for each in self.active_channels.values() if each.is_late(time.monotonic())]
