"""Network namespaces, each joined to the machine by one cable, in which packets to a server can be dropped.

Servers that stand on the machine are reached over the cable, at MAINLAND. Nothing else is: there is no default route.
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

_numbers = itertools.count(os.getpid() % 200 * 64)
"""Of the cables: one that is taken, by another test run on this machine, is passed over."""

BOTH, REQUESTS, ANSWERS = 'both', 'requests', 'answers'


class Island:
    """A namespace and its cable. `with` removes both."""

    def __init__(self) -> None:
        taken = {path.name for path in Path('/sys/class/net').iterdir()}
        number = next(each % 16384 for each in _numbers if f'ecf14v{each % 16384}' not in taken)
        self.space = f'ecf14-{number}'
        self._link = f'ecf14v{number}'
        base = f'10.214.{number // 64}.{number % 64 * 4}'.rpartition('.')
        self.gateway, self.address = (f'{base[0]}.{int(base[2]) + each}' for each in (1, 2))

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
        # The interface at this end goes with its other end; a half made one has to be removed by itself.
        for command in (['ip', 'netns', 'delete', self.space], ['ip', 'link', 'delete', self._link]):
            with suppress(EcompError):
                run(command)

    def reach(self, address: str) -> None:
        """Let an address of the machine be reached over the cable."""
        if address != self.gateway:
            run(['ip', '-n', self.space, 'route', 'replace', f'{address}/32', 'via', self.gateway])

    def cut(self, port: int, which: str = BOTH) -> None:
        """Drop what is sent to a server's port, what comes from it, or both."""
        if which != ANSWERS:
            self._rule('OUTPUT', '-p', 'tcp', '--dport', str(port))
        if which != REQUESTS:
            self._rule('INPUT', '-p', 'tcp', '--sport', str(port))

    def lose(self, share: float) -> None:
        """Drop this share of all packets, both ways."""
        for chain in ('OUTPUT', 'INPUT'):
            self._rule(chain, '-m', 'statistic', '--mode', 'random', '--probability', str(share))

    def heal(self) -> None:
        """Let everything through."""
        run(['ip', 'netns', 'exec', self.space, 'iptables', '-w', '-F'])

    def dropped(self) -> int:
        """How many packets have been dropped since the rules were made."""
        lines = run(['ip', 'netns', 'exec', self.space, 'iptables', '-w', '-vnxL']).splitlines()
        return sum(int(line.split()[0]) for line in lines if ' DROP ' in line and not line.startswith('Chain'))

    def _rule(self, chain: str, *match: str) -> None:
        run(['ip', 'netns', 'exec', self.space, 'iptables', '-w', '-A', chain, *match, '-j', 'DROP'])


@contextmanager
def islands(number: int) -> Iterator[list[Island]]:
    """So many islands; the first one's gateway is where servers may stand. Skips where they cannot be made."""
    if os.geteuid() or not (shutil.which('ip') and shutil.which('iptables')):
        pytest.skip('namespaces need root, and the Debian packages iproute2 and iptables')
    with ExitStack() as stack:
        made = [stack.enter_context(Island()) for _ in range(number)]
        for each in made:
            each.reach(made[0].gateway)
        yield made


class EtcdAt(Etcd):
    """An etcd at another address of this machine than localhost."""

    def at(self, address: str) -> Self:
        """Stand there. Before it is started."""
        self.endpoint, self.client = f'{address}:{self.port}', f'http://{address}:{self.port}'
        return self


class PlacementAt(PlacementServer):
    """A placement at another address of this machine than localhost."""

    address = '127.0.0.1'

    def at(self, address: str) -> Self:
        """Stand there. Before it is started."""
        self.address, self.url = address, f'http://{address}:{self.port}'
        return self

    def command(self) -> list[str]:
        """The lab's server, there."""
        return [self.address if word == '127.0.0.1' else word for word in super().command()]


class Islander(Ecompute):
    """An ecompute that runs on an island."""

    island: Island

    def command(self) -> list[str]:
        """In its namespace; `ip netns exec` becomes it."""
        return ['ip', 'netns', 'exec', self.island.space, *super().command()]


class SlowLine:
    """A relay to 127.0.0.1:`port` over which everything takes `delay` seconds, half of it each way.

    Whole chunks are delayed, in order, and the connection itself is not. tc's netem would be nearer to the truth, but
    not every kernel has it.
    """

    def __init__(self, port: int, delay: float) -> None:
        self._target, self._delay = port, delay / 2
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.address = f'127.0.0.1:{self._listener.getsockname()[1]}'
        self._sockets: set[socket.socket] = set()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for each in (self._listener, *list(self._sockets)):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

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
