"""Network namespaces in which packets to a server can be dropped.

Each is joined to the machine by one veth pair. Servers that run on the machine are reached over that pair, at the
gateway's address. There is no default route, so nothing else is reachable.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from ecomp.errors import EcompError
from ecomp.lab.machine import run
from tests.kit.commands import Ecompute
from tests.kit.servers import Etcd, PlacementServer

# Numbers for the veth pairs; a number that another test run on this machine uses is skipped.
_numbers = itertools.count(os.getpid() % 200 * 64)

BOTH = 'both'
REQUESTS = 'requests'
ANSWERS = 'answers'


class Island:
    """A namespace and its veth pair; `with` creates and removes both."""

    def __init__(self) -> None:
        interfaces = {path.name for path in Path('/sys/class/net').iterdir()}
        number = next(n % 16384 for n in _numbers if f'ecf14v{n % 16384}' not in interfaces)
        self.space = f'ecf14-{number}'
        self._link = f'ecf14v{number}'
        base = f'10.214.{number // 64}.{number % 64 * 4}'.rpartition('.')
        self.gateway, self.address = (f'{base[0]}.{int(base[2]) + offset}' for offset in (1, 2))

    def __enter__(self) -> Self:
        try:
            run(['ip', 'netns', 'add', self.space])
            run(['ip', '-n', self.space, 'link', 'set', 'lo', 'up'])
            run(['ip', 'link', 'add', self._link, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', self.space])
            run(['ip', 'address', 'add', f'{self.gateway}/30', 'dev', self._link])
            run(['ip', 'link', 'set', self._link, 'up'])
            run(['ip', '-n', self.space, 'address', 'add', f'{self.address}/30', 'dev', 'eth0'])
            run(['ip', '-n', self.space, 'link', 'set', 'eth0', 'up'])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Deleting the namespace removes both ends of the pair; a half-made pair has to be removed by itself.
        for command in (['ip', 'netns', 'delete', self.space], ['ip', 'link', 'delete', self._link]):
            with suppress(EcompError):
                run(command)

    def reach(self, address: str) -> None:
        """Make an address of the machine reachable over the veth pair."""
        if address != self.gateway:
            run(['ip', '-n', self.space, 'route', 'replace', f'{address}/32', 'via', self.gateway])

    def cut(self, port: int, which: str = BOTH) -> None:
        """Drop the packets to a server's port, the packets from it, or both."""
        if which != ANSWERS:
            self._rule('OUTPUT', '-p', 'tcp', '--dport', str(port))
        if which != REQUESTS:
            self._rule('INPUT', '-p', 'tcp', '--sport', str(port))

    def lose(self, share: float) -> None:
        """Drop this share of all packets in both directions."""
        for chain in ('OUTPUT', 'INPUT'):
            self._rule(chain, '-m', 'statistic', '--mode', 'random', '--probability', str(share))

    def heal(self) -> None:
        """Remove all rules, so that every packet passes."""
        run(['ip', 'netns', 'exec', self.space, 'iptables', '-w', '-F'])

    def count_dropped(self) -> int:
        """Count the packets dropped since the rules were made."""
        lines = run(['ip', 'netns', 'exec', self.space, 'iptables', '-w', '-vnxL']).splitlines()
        return sum(int(line.split()[0]) for line in lines if ' DROP ' in line and not line.startswith('Chain'))

    def _rule(self, chain: str, *match: str) -> None:
        run(['ip', 'netns', 'exec', self.space, 'iptables', '-w', '-A', chain, *match, '-j', 'DROP'])


@contextmanager
def make_islands(number: int) -> Iterator[list[Island]]:
    """Yield this many islands; servers may listen at the first one's gateway.

    Skips the test if namespaces cannot be made.
    """
    if os.geteuid() or not (shutil.which('ip') and shutil.which('iptables')):
        pytest.skip('namespaces need root, and the Debian packages iproute2 and iptables')
    with ExitStack() as stack:
        created = [stack.enter_context(Island()) for _ in range(number)]
        for island in created:
            island.reach(created[0].gateway)
        yield created


class EtcdAt(Etcd):
    """An etcd at another address of this machine than localhost."""

    def set_address(self, address: str) -> Self:
        """Set the address; call it before the start."""
        self.endpoint = f'{address}:{self.port}'
        self.client = f'http://{address}:{self.port}'
        return self


class PlacementAt(PlacementServer):
    """A placement at another address of this machine than localhost."""

    address = '127.0.0.1'

    def set_address(self, address: str) -> Self:
        """Set the address; call it before the start."""
        self.address = address
        self.url = f'http://{address}:{self.port}'
        return self

    def command(self) -> list[str]:
        """Return the command of the lab's placement server at this address."""
        return [self.address if word == '127.0.0.1' else word for word in super().command()]


class Islander(Ecompute):
    """An ecompute that runs in an island's namespace."""

    island: Island

    def command(self) -> list[str]:
        """Return the command that runs it in the namespace; `ip netns exec` becomes ecompute."""
        return ['ip', 'netns', 'exec', self.island.space, *super().command()]


class DelayingRelay:
    """A relay to 127.0.0.1:`port` that adds `delay` seconds to each round trip.

    Half of the delay is added in each direction. Whole chunks are delayed, in order, and the connection setup is not.
    tc's netem would be more realistic, but not every kernel has it.
    """

    def __init__(self, port: int, delay: float) -> None:
        self._target = port
        self._delay = delay / 2
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.address = f'127.0.0.1:{self._listener.getsockname()[1]}'
        self._sockets: set[socket.socket] = set()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for connection in (self._listener, *list(self._sockets)):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(('127.0.0.1', self._target))
                self._sockets |= {client, server}
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        line: list[tuple[float, bytes]] = []
        arrived = threading.Condition()

        def deliver() -> None:
            with suppress(OSError):
                while True:
                    with arrived:
                        arrived.wait_for(lambda: line)
                        due, data = line.pop(0)
                    self._ended.wait(max(due - time.monotonic(), 0))
                    if not data:
                        return sink.shutdown(socket.SHUT_WR)
                    sink.sendall(data)
            return None

        threading.Thread(target=deliver, daemon=True).start()
        data = b'.'
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b''
            with arrived:
                line.append((time.monotonic() + self._delay, data))
                arrived.notify()
