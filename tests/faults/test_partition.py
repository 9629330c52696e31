"""F14: ecompute cut off from etcd or placement in one or both directions, and slow lines.

The ecomputes run in network namespaces, in which iptables drops packets.
A relay makes the delay, because not every kernel that runs these tests has tc's netem.
"""

from __future__ import annotations

import itertools
import operator
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
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import assert_idle, check_settled, count_losses, read_guests
from tests.kit.lab import make_lab_name
from tests.kit.servers import Etcd, PlacementServer, wait_until
from tests.kit.story import (
    REACTION_SECONDS,
    SMALL_QUERY,
    place,
    read_log,
    require_record,
    wait_address,
    wait_state,
)

# Numbers for the veth pairs; a number that another test run on this machine uses is skipped.
_numbers = itertools.count(os.getpid() % 200 * 64)

BOTH = 'both'
REQUESTS = 'requests'
ANSWERS = 'answers'


class Island:
    def __init__(self) -> None:
        interfaces = {path.name for path in Path('/sys/class/net').iterdir()}
        number = next(n % 16384 for n in _numbers if f'ecf14v{n % 16384}' not in interfaces)
        self.space = make_lab_name(f'island{number}-')
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
        if address != self.gateway:
            run(['ip', '-n', self.space, 'route', 'replace', f'{address}/32', 'via', self.gateway])

    def cut(self, port: int, which: str = BOTH) -> None:
        """Drop the packets to a server's port, the packets from it, or both."""
        if which != ANSWERS:
            self._rule('OUTPUT', '-p', 'tcp', '--dport', str(port))
        if which != REQUESTS:
            self._rule('INPUT', '-p', 'tcp', '--sport', str(port))

    def lose(self, share: float) -> None:
        for chain in ('OUTPUT', 'INPUT'):
            self._rule(chain, '-m', 'statistic', '--mode', 'random', '--probability', str(share))

    def heal(self) -> None:
        run(['ip', 'netns', 'exec', self.space, 'iptables', '-w', '-F'])

    def count_dropped(self) -> int:
        lines = run(['ip', 'netns', 'exec', self.space, 'iptables', '-w', '-vnxL']).splitlines()
        return sum(int(line.split()[0]) for line in lines if ' DROP ' in line and not line.startswith('Chain'))

    def _rule(self, chain: str, *match: str) -> None:
        run(['ip', 'netns', 'exec', self.space, 'iptables', '-w', '-A', chain, *match, '-j', 'DROP'])


@contextmanager
def make_islands(number: int) -> Iterator[list[Island]]:
    """Yield this many islands. Servers may listen at the first one's gateway."""
    if os.geteuid() or not (shutil.which('ip') and shutil.which('iptables')):
        pytest.skip('namespaces need root, and the Debian packages iproute2 and iptables')
    with ExitStack() as stack:
        created = [stack.enter_context(Island()) for _ in range(number)]
        for island in created:
            island.reach(created[0].gateway)
        yield created


class EtcdAt(Etcd):
    def set_address(self, address: str) -> Self:
        self.endpoint = f'{address}:{self.port}'
        self.client = f'http://{address}:{self.port}'
        return self


class PlacementAt(PlacementServer):
    address = '127.0.0.1'

    def set_address(self, address: str) -> Self:
        self.address = address
        self.url = f'http://{address}:{self.port}'
        return self

    def command(self) -> list[str]:
        return [self.address if word == '127.0.0.1' else word for word in super().command()]


class Islander(Ecompute):
    island: Island

    def command(self) -> list[str]:
        # `ip netns exec` becomes ecompute.
        return ['ip', 'netns', 'exec', self.island.space, *super().command()]


class DelayingRelay:
    """A relay to 127.0.0.1:`port` that adds `delay` seconds to each round trip.

    Whole chunks are delayed, in order, and the connection setup is not.
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


DETECTION_SECONDS = 45.0


@contextmanager
def start_archipelago(directory: Path, number: int) -> Iterator[tuple[Control, list[Island], list[Islander]]]:
    with ExitStack() as stack:
        islands_made = stack.enter_context(make_islands(number))
        mainland = islands_made[0].gateway
        etcd = stack.enter_context(EtcdAt(directory / 'etcd').set_address(mainland))
        placement = stack.enter_context(PlacementAt(directory / 'placement').set_address(mainland))
        control = Control(etcd, placement, directory, is_mortal=True)
        stack.callback(control.close)
        computes = []
        for number_, island in enumerate(islands_made):
            compute = Islander(etcd.endpoint, placement.url, directory=directory / f'compute-{number_}')
            compute.island = island
            control.at_exit.callback(compute.close)
            computes.append(compute.launch())
        for compute in computes:
            compute.wait_ready()
        yield control, islands_made, computes


def place_on(control: Control, compute: Ecompute) -> str:
    return place(control, f'{SMALL_QUERY}&in_tree={compute.uuid}')[1]


def count_losses_when_back(compute: Ecompute, server: str) -> int:
    wait_until(lambda: operator.eq(*count_losses(compute, '')), REACTION_SECONDS, 'whatever it missed is back')
    return count_losses(compute, server)[0]


QUICK_CUTS = [('etcd', BOTH), ('etcd', REQUESTS), ('etcd', ANSWERS), ('placement', BOTH)]
ALL_CUTS = [(server, which) for server in ('etcd', 'placement') for which in (BOTH, REQUESTS, ANSWERS)]


@pytest.mark.parametrize(
    ('cuts', 'seconds'),
    [(QUICK_CUTS, 0.0), pytest.param(ALL_CUTS, 65.0, marks=pytest.mark.slow)],
    ids=['quick', 'whole'],
)
def test_partitioned_computes_converge(tmp_path: Path, cuts: list[tuple[str, str]], seconds: float) -> None:
    """F14: ecompute cut off from etcd or placement: guests run, it converges (fake)."""
    with start_archipelago(tmp_path, len(cuts)) as (control, islands_made, computes):
        surviving = [place_on(control, compute) for compute in computes]
        doomed = [place_on(control, compute) for compute in computes]
        for instance in (*surviving, *doomed):
            wait_address(control, instance)
        if not seconds:
            # Its kept-alive connections end, so that placement's loss is noticed in 3 s instead of 30.
            control.placement.restart()
        before = []
        ports = {'etcd': control.etcd.port, 'placement': control.placement.port}
        for compute, island, (server, which) in zip(computes, islands_made, cuts, strict=True):
            # Of this server, and just before it is cut off: a busy compute may notice placement's restart late.
            before.append(count_losses_when_back(compute, server))
            island.cut(ports[server], which)
        began = time.monotonic()
        # The computes still count as alive; those cut off from etcd read these requests when it is back.
        created = [place_on(control, compute) for compute in computes]
        for instance in doomed:
            assert control.eschedule('destroy', instance).code == 0
        for compute, island, (server, which), count in zip(computes, islands_made, cuts, before, strict=True):
            wait_until(
                lambda: count_losses(compute, server)[0] > count,  # noqa: B023
                DETECTION_SECONDS,
                f'{server}, {which}: it is noticed',
            )
            assert island.count_dropped() > 0
        with ExitStack() as all_idle:
            for compute in computes:
                all_idle.enter_context(assert_idle(compute.pid))
            wait_until(lambda: time.monotonic() - began > seconds, seconds + 1, 'the partition lasts')
        for compute, (server, _), stayed, pending in zip(computes, cuts, surviving, created, strict=True):
            assert read_guests(compute)[stayed]['running']
            assert pending not in read_guests(compute), f'{server}: not built while nobody confirms it'
            status = require_record(control, stayed)
            assert status['state'] == 'active'
        for island in islands_made:
            island.heal()
        for destroyed, late in zip(doomed, created, strict=True):
            wait_until(lambda: control.etcd.get(f'/booted/{late}'), 60, f'{late} has an address')  # noqa: B023
            wait_state(control, destroyed, 'gone')
        for compute, (server, _), stayed, late, count in zip(computes, cuts, surviving, created, before, strict=True):
            wait_until(lambda: count_losses(compute, server)[1] > count, 70, 'the return is logged')  # noqa: B023
            # Each loss is logged once, and ends. An etcd that was just reached again may be slow once more.
            losses, returns = count_losses(compute, server)
            assert losses == returns <= count + 2, '\n'.join(read_log(compute))
            assert read_guests(compute).keys() == {stayed, late}
            wait_until(lambda: control.etcd.get(f'/computes/{compute.uuid}'), 20, 'it is alive')  # noqa: B023
        check_settled(control, *computes)


def create_and_destroy(control: Control, compute: Ecompute, rounds: int) -> None:
    surviving = place_on(control, compute)
    for _ in range(rounds):
        instance = place_on(control, compute)
        wait_address(control, instance)
        assert control.eschedule('destroy', '--wait', instance).code == 0
    wait_address(control, surviving)
    assert read_guests(compute).keys() == {surviving}


@pytest.mark.slow
def test_lossy_line(tmp_path: Path) -> None:
    """F14: 5 % of the packets to the control plane are lost, both ways: it works (fake)."""
    with start_archipelago(tmp_path, 1) as (control, (island,), (compute,)):
        island.lose(0.05)
        create_and_destroy(control, compute, 4)
        assert island.count_dropped() > 0
        island.heal()
        check_settled(control, compute)
        assert compute.stop() == 0


@pytest.mark.parametrize('delay', [0.1, pytest.param(0.5, marks=pytest.mark.slow)])
def test_slow_line(cluster: Control, tmp_path: Path, delay: float) -> None:
    """F14: a delay of 100 ms, and 500 ms, to the control plane: it works (fake)."""
    with DelayingRelay(cluster.etcd.port, delay) as etcd, DelayingRelay(cluster.placement.port, delay) as placement:
        compute = Ecompute(cluster.etcd.endpoint, f'http://{placement.address}', directory=tmp_path / 'compute')
        set_etcd_address(compute, etcd.address)
        with compute:
            create_and_destroy(cluster, compute, 1)
            check_settled(cluster, compute)
            assert count_losses(compute, '') == (0, 0)
            assert compute.stop() == 0


def set_etcd_address(compute: Ecompute, address: str) -> None:
    # The test still queries etcd itself for readiness.
    text = compute.config.read_text()
    compute.config.write_text(text.replace(compute._etcd, address))
