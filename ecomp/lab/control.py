"""The control plane's servers: how each is started, and how it is asked whether it is ready.

A lab has etcd and placement in its own namespace, with a server for images and DHCP for the LAN beside them
(`lab_servers`). With certificates (ecomp.lab.certs) etcd takes nobody without one, and stunnel stands before placement.

`elab control` runs etcd and placement in the foreground, for as long as it runs and no longer. On localhost they take
whoever asks; on an address that others reach only those who have a certificate.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

from ecomp import systemd
from ecomp.errors import EcompError, UsageError
from ecomp.lab import machine
from ecomp.lab.machine import Process, Remember
from ecomp.lab.network import ETCD_PORT, PLACEMENT_PORT, Layout, bracketed
from ecomp.systemd import Service

START_SECONDS = 60.0  # that a server has until it can be used; then EcompError
LOCALHOST = '127.0.0.1'
SOCKET = 'placement.socket'
STUNNEL = """\
; Written by elab at each start, and read where the socket is: its whole path could be longer than 107 bytes.
foreground = yes
pid =
debug = warning
[placement]
accept = {where}
connect = /proc/self/cwd/{socket}
cert = {certs}/server.crt
key = {certs}/server.key
CAfile = {certs}/ca.crt
verifyChain = yes
requireCert = yes
sslVersionMin = TLSv1.2
; Seconds for a handshake, and until who says nothing is let go.
TIMEOUTbusy = 10
TIMEOUTidle = 600
"""
NO_PAGE = 'http://localhost:1'
"""An origin that no page has, for browsers connect to no port 1. etcd takes an empty list for everybody."""


@dataclass(frozen=True)
class LabServer:
    """A server of the control plane. `what` names it for people; `ready` asks it whether it can be used.

    `files` are the settings that start() writes before it runs the command.
    """

    what: str
    command: list[str]
    log: Path
    ready: Callable[[Process], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)

    def start(self, prefix: list[str], remember: Remember | None = None) -> Process:
        """Run `prefix` and the command as one once `remember` has returned, without waiting until it is ready."""
        for path, text in self.files.items():
            path.write_text(text, encoding='utf-8', errors='surrogateescape')
        command = [*prefix, *self.command]
        return machine.start(self.what, command, self.log, self.env, remember=remember, umask=0o077)

    def wait(self, process: Process, stopped: threading.Event | None = None) -> None:
        """Wait until the server is ready or `stopped` is set. EcompError if it ends or START_SECONDS are over."""
        ends = stopped or threading.Event()
        try:
            machine.wait_for(self.what, lambda: ends.is_set() or self.ready(process), process, self.log, START_SECONDS)
        except EcompError:
            if not ends.is_set():  # whoever stops us may have ended the server, too
                raise


def etcd_server(data: Path, addresses: list[str], port: int, certs: Path | None = None) -> LabServer:
    """An etcd of one member that listens for clients on these addresses, and compacts revisions after an hour.

    `certs` has its certificate, and the authority that its clients' are signed by; None: it takes any client, in clear
    text.
    A page in somebody's browser speaks no gRPC, so without the JSON gateway it can ask for /health, /metrics and
    /version alone: by none of another's names (DNS rebinding), and no other origin may read the answers.
    One that ends in the first milliseconds of its first start has written that it has begun, and not that it is a
    member: it would wait for a leader for ever. So there is a file beside its data until it has been healthy once, and
    while there is, etcd is told that it is the only member.
    https://etcd.io/docs/v3.4/op-guide/configuration/
    """
    urls = [f'{"http" if certs is None else "https"}://{bracketed(address)}:{port}' for address in addresses]
    # A single member talks to no other: any free port of the loopback does for its peers.
    peers = f'http://{LOCALHOST}:0'
    command = ['etcd', '--name', 'lab', '--data-dir', str(data / 'etcd')]
    command += ['--listen-client-urls', ','.join(urls), '--advertise-client-urls', ','.join(urls)]
    command += ['--listen-peer-urls', peers, '--initial-advertise-peer-urls', peers]
    command += ['--initial-cluster', f'lab={peers}']
    command += ['--auto-compaction-mode=periodic', '--auto-compaction-retention=1h']
    # The names and addresses by which clients rightly call a server that listens on these addresses.
    names = ['localhost', LOCALHOST, *(each for each in addresses if each != LOCALHOST)]
    command += ['--enable-grpc-gateway=false', f'--host-whitelist={",".join(names)}', f'--cors={NO_PAGE}']
    if certs is not None:
        command += [f'--cert-file={certs}/server.crt', f'--key-file={certs}/server.key']
        command += ['--client-cert-auth', f'--trusted-ca-file={certs}/ca.crt']
    begun = data / 'etcd.begun'
    # Not at any start: what was written just before the last end could be lost by it.
    command += ['--force-new-cluster'] if begun.exists() else []

    def ready(_: Process) -> bool:
        if not etcd_healthy(urls[0], certs):
            return False
        begun.unlink(missing_ok=True)
        return True

    files = {} if (data / 'etcd/member').exists() else {begun: ''}
    return LabServer('etcd', command, data / 'etcd.log', ready, files=files)


def placement(data: Path, address: str, port: int, certs: Path | None) -> list[LabServer]:
    """Placement over SQLite in the directory `data`; without `certs` whoever reaches it is its administrator.

    With them it is on a socket in `data`, and stunnel before it, which lets clients with a certificate through to it.
    Placement answers those of them that send the word in `certs`/token. https://www.stunnel.org/static/stunnel.html
    """
    command, where = [sys.executable, '-m', 'ecomp.lab.placement_server'], f'{bracketed(address)}:{port}'
    log, env = data / 'placement.log', placement_environment(data)
    if certs is None:
        command += [address, str(port)]
        return [LabServer('placement', command, log, lambda _: placement_answers(f'http://{where}'), env)]
    command += [SOCKET, str(certs / 'token')]
    files = {data / 'stunnel.conf': STUNNEL.format(where=f'{address}:{port}', socket=SOCKET, certs=certs)}
    stunnel = ['stunnel4', str(data / 'stunnel.conf')]
    return [
        LabServer('placement', command, log, lambda process: _takes(f'/proc/{process.pid}/cwd/{SOCKET}'), env),
        LabServer(
            'stunnel', stunnel, data / 'stunnel.log', lambda _: placement_answers(f'https://{where}', certs),
            files=files,
        ),
    ]


def placement_environment(data: Path) -> dict[str, str]:
    """Placement's whole configuration. With noauth2 any client that sends the token `admin` is the administrator."""
    return {
        'OS_PLACEMENT_CONFIG_DIR': str(data),  # so that one of the machine's own in /etc is not read
        'OS_PLACEMENT_DATABASE__CONNECTION': f'sqlite:///{data}/placement.sqlite',
        'OS_PLACEMENT_DATABASE__SYNC_ON_STARTUP': 'True',
        'OS_API__AUTH_STRATEGY': 'noauth2',
    }


def lab_servers(layout: Layout, data: Path, images: Path, certs: Path) -> list[LabServer]:
    """The servers of a lab's control namespace in the order they are started; `elab certs` made `certs`."""
    own = str(layout.control)
    web = [sys.executable, '-m', 'http.server', '--bind', own, '--directory', str(images), '80']
    dhcp = ['dnsmasq', '--keep-in-foreground', '--conf-file=/dev/null', '--pid-file=', '--port=0']
    dhcp += ['--interface=br0', '--bind-interfaces', '--dhcp-authoritative']
    dhcp += [f'--dhcp-range={layout.lan[100]},{layout.lan[250]},{layout.lan.netmask},12h']
    # No router and no DNS: a guest's way out and its metadata are on the network it shares with its host alone.
    dhcp += ['--dhcp-option=3', '--dhcp-option=6', f'--dhcp-leasefile={data}/dhcp.leases']
    return [
        etcd_server(data, [own, LOCALHOST], ETCD_PORT, certs / 'etcd'),
        *placement(data, own, PLACEMENT_PORT, certs / 'placement'),
        LabServer('images', web, data / 'images.log', lambda _: answers(layout.images)),
        LabServer('dhcp', dhcp, data / 'dhcp.log', _listens_for_dhcp),
    ]


def etcd_healthy(where: str, certs: Path | None = None) -> bool:
    """Whether etcd at this URL says that it is healthy: it has a leader and takes writes."""
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads(_ask(f'{where}/health', certs=certs)).get('health') in ('true', True))
    return False


def placement_answers(where: str, certs: Path | None = None) -> bool:
    """Whether placement at this URL answers a question that needs its database."""
    token = 'admin' if certs is None else (certs / 'token').read_text(encoding='ascii').strip()
    return answers(f'{where}/resource_providers', {'x-auth-token': token}, certs)


def _takes(path: str) -> bool:
    """Whether a process listens on the socket at this path, of at most 107 bytes. unix(7)"""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
        asked.connect(path)
        return True
    return False


def answers(url: str, headers: Mapping[str, str] | None = None, certs: Path | None = None) -> bool:
    """Whether a GET of this URL succeeds."""
    with contextlib.suppress(OSError):
        _ask(url, headers, certs)
        return True
    return False


def _ask(url: str, headers: Mapping[str, str] | None = None, certs: Path | None = None) -> bytes:
    # A proxy of the machine's environment knows nothing of the lab. Errors of HTTP are OSErrors too.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if certs is not None:
        context = ssl.create_default_context(cafile=str(certs / 'ca.crt'))
        context.check_hostname = False  # asked by its address, whatever name it is made out to
        context.load_cert_chain(certs / 'server.crt', certs / 'server.key')
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    with opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=5) as answer:
        return bytes(answer.read())


def _listens_for_dhcp(process: Process) -> bool:
    # dnsmasq can be asked nothing without taking a lease; the kernel knows whether its port 67 (0x43) is bound.
    with contextlib.suppress(OSError):
        sockets = Path(f'/proc/{process.pid}/net/udp').read_text(encoding='ascii')
        return any(line.split()[1].endswith(':0043') for line in sockets.splitlines()[1:])
    return False


FILES = {'etcd': ('ca.crt', 'server.crt', 'server.key'), 'placement': ('ca.crt', 'server.crt', 'server.key', 'token')}
"""The files of `elab certs` that the servers read, by directory."""


@dataclass(frozen=True)
class Endpoints:
    """Where etcd and placement listen, and where their data is; `bind` is an address of this machine.

    `certs` is the directory that `elab certs` makes; None means no certificates, once with_certs() has looked.
    """

    etcd_port: int
    placement_port: int
    data: Path
    bind: str = LOCALHOST
    certs: Path | None = None


def run(asked: Endpoints, service: Service, say: Callable[[str], None], ready: Callable[[str], None]) -> None:
    """Run etcd and placement until SIGINT or SIGTERM; EcompError if one of them ends by itself.

    Their data stays. `ready` is called once both can be used, with the scheme of placement's URL, `http` or `https`.
    UsageError for a port that is taken, an address that is none of this machine's, and certificates that are missing.
    """
    for what, port in (('etcd', asked.etcd_port), ('placement', asked.placement_port)):
        _check_free(what, asked.bind, port)
    secure = asked.certs is not None
    programs = {**machine.CONTROL_PROGRAMS, **(machine.SECURE_PROGRAMS if secure else {})}
    machine.require(programs, ['placement', 'waitress', *(['cryptography'] if secure else [])])
    try:
        asked.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f'--data {asked.data}: {error.strerror}') from error
    if asked.certs is not None:
        _make_certificates(asked.certs, asked, say)
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    with ExitStack() as at_exit:
        for number in (signal.SIGINT, signal.SIGTERM):
            at_exit.callback(signal.signal, number, signal.signal(number, stop))
        running: list[tuple[LabServer, Process]] = []
        at_exit.callback(lambda: machine.end(process for _, process in running))
        for server in _servers(asked, asked.data.resolve()):
            began = time.monotonic()
            # They end with this process, also when it is killed and can end nothing itself.
            process = server.start(['setpriv', '--pdeathsig', 'TERM', '--'])
            running.append((server, process))
            server.wait(process, stopped)
            if stopped.is_set():
                return
            say(f'{server.what} is ready ({time.monotonic() - began:.1f} s)')
        ready('https' if secure else 'http')
        service.ready(f'etcd and placement answer at {asked.bind}')
        if not secure:
            say('without certificates every user of this machine can write to both. Fix: elab control --certs certs')
        say(f'data is in {asked.data.resolve()}; Ctrl-C ends both')
        written = _written(asked)
        while not stopped.wait(0.5):
            service.alive()
            for server, process in running:
                if not machine.alive(process):
                    raise EcompError(f'{server.what} ended: {machine.last_line(server.log)} (see {server.log})')
                # etcd reads its certificate for each connection, stunnel when it is told.
                if server.what == 'stunnel' and (now := _written(asked)) != written:
                    written = now
                    os.kill(process.pid, signal.SIGHUP)
        service.stopping('etcd and placement come to an end')


def words(asked: Endpoints) -> list[str]:
    """What `elab` is told so that it runs these from any directory."""
    told = ['control', '--bind', asked.bind, '--data', str(asked.data.absolute())]
    told += ['--etcd-port', str(asked.etcd_port), '--placement-port', str(asked.placement_port)]
    return told if asked.certs is None else [*told, '--certs', str(asked.certs.absolute())]


def check_service(asked: Endpoints, program: Path) -> None:
    """UsageError if a service that is root without root's rights could not run `program`, or write where it is told."""
    cure = 'install in /opt/ecomp, and say --data /var/lib/ecomp'
    # An installation may lead to somebody's clone (pip install -e), or to a Python of their own.
    used = {str(program): program, f"elab's code in {systemd.PACKAGE}": systemd.PACKAGE}
    used |= {f'its Python {sys.executable}': Path(sys.executable), f'--data {asked.data}': asked.data}
    if asked.certs is not None:
        used[f'--certs {asked.certs}'] = asked.certs
        cure += ' --certs /var/lib/ecomp/certs'
    for what, path in used.items():
        if (place := systemd.in_root_s_way(path)) is not None:
            why = f"{what} is in {place}, which is another user's or closed to root, and the service has no right there"
            raise UsageError(f'--unit: {why}: {cure} (docs/howto/real-machines.md)')


def _servers(asked: Endpoints, data: Path) -> list[LabServer]:
    etcd, behind = (None if asked.certs is None else asked.certs.resolve() / each for each in ('etcd', 'placement'))
    return [
        etcd_server(data, [asked.bind], asked.etcd_port, etcd),
        *placement(data, asked.bind, asked.placement_port, behind),
    ]


def _written(asked: Endpoints) -> float:
    """When placement's certificate was written, in seconds since the epoch; 0 without one, and while it is replaced."""
    with contextlib.suppress(FileNotFoundError):
        return 0.0 if asked.certs is None else (asked.certs / 'placement/server.crt').stat().st_mtime
    return 0.0


def _make_certificates(directory: Path, asked: Endpoints, say: Callable[[str], None]) -> None:
    """Make certificates for etcd and placement if there are none; UsageError if one of FILES cannot be read."""
    from ecomp.lab import certs

    if not (directory / 'placement/server.crt').exists():
        servers = ('localhost', LOCALHOST) if asked.bind == LOCALHOST else (asked.bind,)
        cluster = certs.Cluster(servers, (), (), (), asked.etcd_port, asked.placement_port)
        certs.make(directory, cluster, datetime.now(UTC).replace(microsecond=0), say)
        words = f'elab certs {directory}'
        if (asked.etcd_port, asked.placement_port) != (ETCD_PORT, PLACEMENT_PORT):
            words += f' --etcd-port {asked.etcd_port} --placement-port {asked.placement_port}'
        say(f'for those who ask: {words} --compute HOST... --scheduler NAME... --operator NAME...')
    for place, names in FILES.items():
        for name in names:
            if not os.access(directory / place / name, os.R_OK):
                raise UsageError(f'{directory}/{place}/{name} cannot be read: elab certs makes it')


def with_certs(asked: Endpoints) -> Endpoints:
    """The same with ./certs where other machines reach `bind`. UsageError for what is no address to listen at."""
    try:
        address = ip_address(asked.bind)
    except ValueError as error:
        raise _no_address(asked.bind) from error
    if '%' in asked.bind:
        raise UsageError(f'--bind {asked.bind}: an address with a % cannot be certified: say another of this machine')
    if address.is_unspecified:
        raise UsageError(f'--bind {asked.bind}: say which address of this machine, so that its name can be certified')
    return asked if address.is_loopback or asked.certs is not None else replace(asked, certs=Path('certs'))


def _no_address(bind: str) -> UsageError:
    return UsageError(f'--bind {bind}: must be an address of this machine: ip address lists them')


def _check_free(what: str, bind: str, port: int) -> None:
    option, family = f'--{what}-port', socket.AF_INET6 if ':' in bind else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise _no_address(bind) from error
            reason = f'port {port} for {what} cannot be had ({error.strerror}): say another with {option}'
            raise UsageError(reason) from error
