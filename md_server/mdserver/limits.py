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

log = logging.getLogger('mdserver')

CONNECTIONS = 16  # of one address; with one more the oldest ends
RATE, BURST = 10.0, 20  # requests of one address: a second, and at once; more of them wait
LINES, FIRST_LINES = 1.0, 20  # in the log about one address: a second, and at once; more are left out
HEAD_SECONDS = 10.0  # for a whole request; then its connection ends
LIFE_SECONDS = 60.0  # for a connection in all; then it ends
LOOK_SECONDS = 0.25  # between two looks at whose turn it is
ADDRESSES = 4096  # remembered; with one more those that used nothing lately are forgotten


class FairShares:
    """Limits each address to `rate` a second and `burst` at once. PURE: `now` is in seconds of any monotonic clock.

    The generic cell rate algorithm: https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._step = 1 / rate
        self._tolerance = (burst - 0.5) / rate  # half a step, so that nothing hangs on rounding
        self._used: dict[str, float] = {}  # when what an address has used will have been given back

    def wait(self, address: str, now: float) -> float:
        """Count one of this address; the seconds it has to wait, at most as long as CONNECTIONS of them take."""
        used = max(self._used.get(address, now), now)
        seconds = min(max(0.0, used - now - self._tolerance), CONNECTIONS * self._step)
        self._note(address, now, now + self._tolerance + seconds if seconds else used)
        return seconds

    def allows(self, address: str, now: float) -> bool:
        """Count one of this address, if it need not wait; whether it was counted."""
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
    """The task of a connection that ends with its first answer, and says so in the header."""

    def build_response_header(self) -> bytes:
        self.set_close_on_finish()
        return bytes(super().build_response_header())


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection that is read once Server.admit() says it is its turn."""

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
        """Whether its request took more than HEAD_SECONDS, or all of it more than LIFE_SECONDS, at monotonic `now`."""
        waits = not self.requests and not self.total_outbufs_len
        return now - self.begins > (HEAD_SECONDS if waits else LIFE_SECONDS)


class Server(TcpWSGIServer):  # type: ignore[misc]
    """waitress's server on a listening socket. A client whose address `may_ask` denies gets no answer."""

    channel_class = _Channel

    def __init__(
        self, application: Any, sock: socket.socket, may_ask: Callable[[str], bool], **adjustments: Any
    ) -> None:
        self._may_ask = may_ask
        self._turns = FairShares(RATE, BURST)
        self._ends: list[_Channel] = []
        self._complaints = FairShares(LINES, 1)
        super().__init__(
            application, _sock=sock, bind_socket=False, cleanup_interval=1,
            sockinfo=(sock.family, sock.type, sock.proto, sock.getsockname()), **adjustments,
        )
        self.adj.asyncore_loop_timeout = LOOK_SECONDS  # given as the others it would be made a whole number, 0

    def admit(self, channel: _Channel) -> float:
        """When the connection may be read, on the monotonic clock. The oldest above CONNECTIONS of its address ends."""
        address, now = channel.addr[0], time.monotonic()
        if not self._may_ask(address):
            self._ends.append(channel)
            if self._complaints.allows('', now):
                log.warning('client=%s is no guest here: not answered', address)
            return float('inf')
        theirs = [each for each in self.active_channels.values() if each.addr[0] == address and each not in self._ends]
        if len(theirs) > CONNECTIONS:
            self._ends.append(theirs[0])  # a dict's order is that of time
            if self._complaints.allows(address, now):
                log.warning('client=%s has more than %d connections: the oldest ends', address, CONNECTIONS)
        return now + self._turns.wait(address, now)

    def readable(self) -> bool:
        """End what admit() and maintenance() chose: waitress asks this at each look, when it handles no connection."""
        ends, self._ends = self._ends, []
        for each in ends:
            each.handle_close()
        return bool(super().readable())

    def maintenance(self, now: float) -> None:
        """Choose the connections that are late, once a second, to be ended."""
        super().maintenance(now)
        self._ends += [each for each in self.active_channels.values() if each.is_late(time.monotonic())]
