"""The control plane's servers: how each is started, and how it is asked whether it is ready.

`elab control` runs etcd and placement on localhost, in the foreground. A lab has them in its own namespace, with a
server for images and DHCP for the LAN beside them (`lab_servers`).
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ecomp.errors import EcompError, UsageError
from ecomp.lab import machine
from ecomp.lab.machine import Process
from ecomp.lab.network import ETCD_PORT, PLACEMENT_PORT, Layout

START_SECONDS = 60.0
LOCALHOST = '127.0.0.1'
NO_PAGE = 'http://localhost:1'
"""An origin that no page has, for browsers connect to no port 1. etcd takes an empty list for everybody."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Server:
    """One server: its command, where it logs, and `ready`, which asks the server itself."""

    what: str
    command: list[str]
    log: Path
    ready: Callable[[Process], bool]
    env: Mapping[str, str] = field(default_factory=dict)

    def start(self, prefix: list[str]) -> Process:
        """Start it by `prefix + command`; it is not ready yet."""
        return machine.start(self.what, [*prefix, *self.command], self.log, self.log.parent, self.env)

    def wait(self, process: Process, stopped: threading.Event | None = None) -> None:
        """Until it is ready or `stopped` is set; EcompError if it does not come up."""

        def done() -> bool:
            return (stopped is not None and stopped.is_set()) or self.ready(process)

        machine.wait_for(self.what, done, process, self.log, START_SECONDS)


def etcd(data: Path, addresses: list[str], port: int) -> Server:
    """A member of its own, listening for clients on these addresses. Old revisions are compacted after an hour.

    A page in somebody's browser speaks no gRPC, so without the JSON gateway it can ask for /health, /metrics and
    /version alone: by none of another's names (DNS rebinding), and no other origin may read the answers.
    https://etcd.io/docs/v3.4/op-guide/configuration/
    """
    urls = ','.join(f'http://{address}:{port}' for address in addresses)
    # A single member talks to no other: any free port of the loopback does for its peers.
    peers = f'http://{LOCALHOST}:0'
    command = ['etcd', '--name', 'lab', '--data-dir', str(data / 'etcd')]
    command += ['--listen-client-urls', urls, '--advertise-client-urls', urls]
    command += ['--listen-peer-urls', peers, '--initial-advertise-peer-urls', peers]
    command += ['--initial-cluster', f'lab={peers}']
    command += ['--auto-compaction-mode=periodic', '--auto-compaction-retention=1h']
    command += ['--enable-grpc-gateway=false', f'--host-whitelist={",".join(names(addresses))}', f'--cors={NO_PAGE}']
    where = f'{addresses[0]}:{port}'
    return Server('etcd', command, data / 'etcd.log', lambda _: etcd_healthy(where))


def placement(data: Path, address: str, port: int) -> Server:
    """Placement over SQLite in `data`, on one thread."""
    command = [sys.executable, '-m', 'ecomp.lab.placement_server', address, str(port)]
    where = f'http://{address}:{port}'
    env = placement_environment(data)
    return Server('placement', command, data / 'placement.log', lambda _: placement_answers(where), env)


def placement_environment(data: Path) -> dict[str, str]:
    """placement's whole configuration. noauth2: the token `admin` is the administrator, and anybody may say it."""
    return {
        'OS_PLACEMENT_CONFIG_DIR': str(data),  # so that one of the machine's own in /etc is not read
        'OS_PLACEMENT_DATABASE__CONNECTION': f'sqlite:///{data}/placement.sqlite',
        'OS_PLACEMENT_DATABASE__SYNC_ON_STARTUP': 'True',
        'OS_API__AUTH_STRATEGY': 'noauth2',
    }


def lab_servers(layout: Layout, data: Path, images: Path) -> list[Server]:
    """What runs in a lab's control namespace, in the order of starting."""
    own = str(layout.control)
    web = [sys.executable, '-m', 'http.server', '--bind', own, '--directory', str(images), '80']
    dhcp = ['dnsmasq', '--keep-in-foreground', '--conf-file=/dev/null', '--pid-file=', '--port=0']
    dhcp += ['--interface=br0', '--bind-interfaces', '--dhcp-authoritative']
    dhcp += [f'--dhcp-range={layout.lan[100]},{layout.lan[250]},{layout.lan.netmask},12h']
    # No router and no DNS: a guest's way out and its metadata are on the network it shares with its host alone.
    dhcp += ['--dhcp-option=3', '--dhcp-option=6', f'--dhcp-leasefile={data}/dhcp.leases']
    return [
        etcd(data, [own, LOCALHOST], ETCD_PORT),
        placement(data, own, PLACEMENT_PORT),
        Server('images', web, data / 'images.log', lambda _: answers(layout.images)),
        Server('dhcp', dhcp, data / 'dhcp.log', _listens_for_dhcp),
    ]


def etcd_healthy(where: str) -> bool:
    """Whether etcd at host:port says it is healthy: it has a leader and writes get through."""
    try:
        return bool(json.loads(_ask(f'http://{where}/health')).get('health') in ('true', True))
    except (OSError, ValueError):
        return False


def placement_answers(where: str) -> bool:
    """Whether placement at this URL answers a question that needs its database."""
    return answers(f'{where}/resource_providers', {'x-auth-token': 'admin'})


def answers(url: str, headers: Mapping[str, str] | None = None) -> bool:
    """Whether a GET of this URL succeeds."""
    try:
        _ask(url, headers)
    except OSError:
        return False
    return True


def names(addresses: Iterable[str]) -> list[str]:
    """By what a server that listens there is called by whoever means it."""
    return ['localhost', LOCALHOST, *(each for each in addresses if each != LOCALHOST)]


def _ask(url: str, headers: Mapping[str, str] | None = None) -> bytes:
    # A proxy of the machine's environment knows nothing of the lab. Errors of HTTP are OSErrors too.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=5) as answer:
        return bytes(answer.read())


def _listens_for_dhcp(process: Process) -> bool:
    # dnsmasq can be asked nothing without taking a lease; the kernel knows whether its port 67 (0x43) is bound.
    try:
        sockets = Path(f'/proc/{process.pid}/net/udp').read_text(encoding='ascii')
    except OSError:
        return False
    return any(line.split()[1].endswith(':0043') for line in sockets.splitlines()[1:])


def run_control(etcd_port: int, placement_port: int, data: Path, say: Say, ready: Callable[[], None]) -> None:
    """etcd and placement on localhost until SIGINT or SIGTERM ends them, or one ends by itself (EcompError).

    What they know stays in `data`. `ready` is called once both are. UsageError for a port that is taken.
    """
    machine.require(machine.CONTROL_PROGRAMS, ['placement', 'waitress'])
    for what, option, port in (('etcd', '--etcd-port', etcd_port), ('placement', '--placement-port', placement_port)):
        _check_free(what, option, port)
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f'--data {data}: {error.strerror}') from error
    data = data.resolve()
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    with ExitStack() as at_exit:
        for number in (signal.SIGINT, signal.SIGTERM):
            at_exit.callback(signal.signal, number, signal.signal(number, stop))
        running: list[tuple[Server, Process]] = []
        at_exit.callback(lambda: machine.end(process for _, process in running))
        for server in (etcd(data, [LOCALHOST], etcd_port), placement(data, LOCALHOST, placement_port)):
            began = time.monotonic()
            # They end with this process, also when it is killed and can end nothing itself.
            process = server.start(['setpriv', '--pdeathsig', 'TERM', '--'])
            running.append((server, process))
            server.wait(process, stopped)
            if stopped.is_set():
                return
            say(f'{server.what} is ready ({time.monotonic() - began:.1f} s)')
        ready()
        say(f'data is in {data}; Ctrl-C ends both')
        while not stopped.wait(0.5):
            for server, process in running:
                if not machine.alive(process):
                    raise EcompError(f'{server.what} ended: {machine.last_line(server.log)} (see {server.log})')


def _check_free(what: str, option: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except OSError as error:
            reason = f'port {port} for {what} cannot be had ({error.strerror}): say another with {option}'
            raise UsageError(reason) from error
        except OverflowError as error:
            raise UsageError(f'{option} {port}: a port is 1 to 65535') from error
