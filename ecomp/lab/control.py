"""The control plane's servers: how each is started and checked.

A lab has etcd, placement, an image server and DHCP in a namespace (`make_lab_servers`); `elab control` runs etcd and
placement in the foreground. With certificates (ecomp.lab.certs) etcd and the stunnel before placement require one of
each client. On localhost they are optional, on other addresses not.
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

START_SECONDS = 60.0  # for a server to become ready; then EcompError
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
# An origin that no web page has, since browsers refuse port 1. An empty list would allow all origins.
NO_PAGE = 'http://localhost:1'


@dataclass(frozen=True)
class LabServer:
    """A server of the control plane, named `name` in messages; `is_ready` checks it.

    `files` are the settings that start() writes before it runs the command.
    """

    what: str
    command: list[str]
    log: Path
    ready: Callable[[Process], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)

    def start(self, prefix: list[str], remember: Remember | None = None) -> Process:
        """Start `prefix` and the command after `record_process`, without waiting; raise EcompError."""
        for path, text in self.files.items():
            path.write_text(text, encoding='utf-8', errors='surrogateescape')
        command = [*prefix, *self.command]
        return machine.start(self.what, command, self.log, self.env, remember=remember, umask=0o077)

    def wait(self, process: Process, stopped: threading.Event | None = None) -> None:
        """Wait for readiness or `stopped`; raise EcompError at its end or after START_SECONDS."""
        stops = stopped or threading.Event()
        try:
            machine.wait_for(self.what, lambda: stops.is_set() or self.ready(process), process, self.log, START_SECONDS)
        except EcompError:
            if not stops.is_set():  # the signal that stops us may have ended the server too
                raise


def etcd_server(data: Path, addresses: list[str], port: int, certs: Path | None = None) -> LabServer:
    """Make an etcd of one member that compacts revisions after an hour.

    `certs` has its certificate and the authority of its clients; None means any client, in plain text.

    A malicious web page cannot use gRPC, so without the JSON gateway it reaches only /health, /metrics and /version;
    the host whitelist (against DNS rebinding) and the CORS origin keep the answers from it.

    An etcd that ends in the first milliseconds of its first start has recorded that it began, but not its membership,
    and would wait for a leader forever. So a file beside its data exists until it has been healthy once, and while it
    exists etcd starts with --force-new-cluster. https://etcd.io/docs/v3.4/op-guide/configuration/
    """
    urls = [f'{"http" if certs is None else "https"}://{bracketed(address)}:{port}' for address in addresses]
    # A single member has no peers: any free port of the loopback will do.
    peer_url = f'http://{LOCALHOST}:0'
    command = ['etcd', '--name', 'lab', '--data-dir', str(data / 'etcd')]
    command += ['--listen-client-urls', ','.join(urls), '--advertise-client-urls', ','.join(urls)]
    command += ['--listen-peer-urls', peer_url, '--initial-advertise-peer-urls', peer_url]
    command += ['--initial-cluster', f'lab={peer_url}']
    command += ['--auto-compaction-mode=periodic', '--auto-compaction-retention=1h']
    # The legitimate host names of a server that listens on these addresses.
    names = ['localhost', LOCALHOST, *(host for host in addresses if host != LOCALHOST)]
    command += ['--enable-grpc-gateway=false', f'--host-whitelist={",".join(names)}', f'--cors={NO_PAGE}']
    if certs is not None:
        command += [f'--cert-file={certs}/server.crt', f'--key-file={certs}/server.key']
        command += ['--client-cert-auth', f'--trusted-ca-file={certs}/ca.crt']
    begun_marker = data / 'etcd.begun'
    # Not at every start: it could lose what was written just before the last end.
    command += ['--force-new-cluster'] if begun_marker.exists() else []

    def is_healthy(_: Process) -> bool:
        if not etcd_healthy(urls[0], certs):
            return False
        begun_marker.unlink(missing_ok=True)
        return True

    files = {} if (data / 'etcd/member').exists() else {begun_marker: ''}
    return LabServer('etcd', command, data / 'etcd.log', is_healthy, files=files)


def placement(data: Path, address: str, port: int, certs: Path | None) -> list[LabServer]:
    """Make placement over SQLite in the directory `data`; without `certs` any client is admin.

    With `certs` it listens on a socket in `data`, behind a stunnel that requires a client certificate, and accepts the
    token in `certs`/token. https://www.stunnel.org/static/stunnel.html
    """
    command, listen_address = [sys.executable, '-m', 'ecomp.lab.placement_server'], f'{bracketed(address)}:{port}'
    log, env = data / 'placement.log', placement_environment(data)
    if certs is None:
        command += [address, str(port)]
        return [LabServer('placement', command, log, lambda _: placement_answers(f'http://{listen_address}'), env)]
    command += [SOCKET, str(certs / 'token')]
    files = {data / 'stunnel.conf': STUNNEL.format(where=f'{address}:{port}', socket=SOCKET, certs=certs)}
    stunnel = ['stunnel4', str(data / 'stunnel.conf')]
    return [
        LabServer('placement', command, log, lambda process: _takes(f'/proc/{process.pid}/cwd/{SOCKET}'), env),
        LabServer(
            'stunnel', stunnel, data / 'stunnel.log', lambda _: placement_answers(f'https://{listen_address}', certs),
            files=files,
        ),
    ]


def placement_environment(data: Path) -> dict[str, str]:
    """Make placement's whole configuration; with noauth2 the token `admin` is administrator."""
    return {
        'OS_PLACEMENT_CONFIG_DIR': str(data),  # the machine's own in /etc must not be read
        'OS_PLACEMENT_DATABASE__CONNECTION': f'sqlite:///{data}/placement.sqlite',
        'OS_PLACEMENT_DATABASE__SYNC_ON_STARTUP': 'True',
        'OS_API__AUTH_STRATEGY': 'noauth2',
    }


def lab_servers(layout: Layout, data: Path, images: Path, certs: Path) -> list[LabServer]:
    """Make the servers of a lab's control namespace, in the order to start them."""
    address = str(layout.control)
    web = [sys.executable, '-m', 'http.server', '--bind', address, '--directory', str(images), '80']
    dhcp = ['dnsmasq', '--keep-in-foreground', '--conf-file=/dev/null', '--pid-file=', '--port=0']
    dhcp += ['--interface=br0', '--bind-interfaces', '--dhcp-authoritative']
    dhcp += [f'--dhcp-range={layout.lan[100]},{layout.lan[250]},{layout.lan.netmask},12h']
    # No router and no DNS: a guest's route and metadata are only on the network of its host.
    dhcp += ['--dhcp-option=3', '--dhcp-option=6', f'--dhcp-leasefile={data}/dhcp.leases']
    return [
        etcd_server(data, [address, LOCALHOST], ETCD_PORT, certs / 'etcd'),
        *placement(data, address, PLACEMENT_PORT, certs / 'placement'),
        LabServer('images', web, data / 'images.log', lambda _: answers(layout.images)),
        LabServer('dhcp', dhcp, data / 'dhcp.log', _listens_for_dhcp),
    ]


def etcd_healthy(where: str, certs: Path | None = None) -> bool:
    """True if the etcd at this URL has a leader and accepts writes."""
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads(_ask(f'{where}/health', certs=certs)).get('health') in ('true', True))
    return False


def placement_answers(where: str, certs: Path | None = None) -> bool:
    """True if the placement at this URL answers a query that needs its database."""
    token = 'admin' if certs is None else (certs / 'token').read_text(encoding='ascii').strip()
    return answers(f'{where}/resource_providers', {'x-auth-token': token}, certs)


def _takes(path: str) -> bool:
    """True if a process listens on the Unix socket at `path`, of at most 107 bytes (unix(7))."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        return True
    return False


def answers(url: str, headers: Mapping[str, str] | None = None, certs: Path | None = None) -> bool:
    """True if a GET of this URL succeeds."""
    with contextlib.suppress(OSError):
        _ask(url, headers, certs)
        return True
    return False


def _ask(url: str, headers: Mapping[str, str] | None = None, certs: Path | None = None) -> bytes:
    # A proxy of the machine's environment cannot reach the lab. HTTP errors are OSErrors too.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if certs is not None:
        context = ssl.create_default_context(cafile=str(certs / 'ca.crt'))
        context.check_hostname = False  # the URL has its address, the certificate may have a name
        context.load_cert_chain(certs / 'server.crt', certs / 'server.key')
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    with opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=5) as response:
        return bytes(response.read())


def _listens_for_dhcp(process: Process) -> bool:
    # dnsmasq answers only by giving a lease; the kernel shows whether port 67 (0x43) is bound.
    with contextlib.suppress(OSError):
        sockets = Path(f'/proc/{process.pid}/net/udp').read_text(encoding='ascii')
        return any(line.split()[1].endswith(':0043') for line in sockets.splitlines()[1:])
    return False


# The files of `elab certs` that the servers read, by directory.
FILES = {'etcd': ('ca.crt', 'server.crt', 'server.key'), 'placement': ('ca.crt', 'server.crt', 'server.key', 'token')}


@dataclass(frozen=True)
class Endpoints:
    """The addresses and data directory of etcd and placement; `bind` is a local address.

    `certs` is the directory of `elab certs`; after add_default_certs() None means no certificates.
    """

    etcd_port: int
    placement_port: int
    data: Path
    bind: str = LOCALHOST
    certs: Path | None = None


def run(asked: Endpoints, service: Service, say: Callable[[str], None], ready: Callable[[str], None]) -> None:
    """Run etcd and placement until SIGINT or SIGTERM; their data stays.

    `on_ready` is called once both are usable, with the scheme of placement's URL, `http` or `https`. Raises UsageError
    for a used port, a foreign address, and missing programs, directories or certificates, and EcompError if a server
    ends.
    """
    for backend, port in (('etcd', asked.etcd_port), ('placement', asked.placement_port)):
        _check_free(backend, asked.bind, port)
    is_secure = asked.certs is not None
    programs = {**machine.CONTROL_PROGRAMS, **(machine.SECURE_PROGRAMS if is_secure else {})}
    machine.require(programs, ['placement', 'waitress', *(['cryptography'] if is_secure else [])])
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
            started_at = time.monotonic()
            # They end with this process, even if it is killed and cannot end them.
            process = server.start(['setpriv', '--pdeathsig', 'TERM', '--'])
            running.append((server, process))
            server.wait(process, stopped)
            if stopped.is_set():
                return
            say(f'{server.what} is ready ({time.monotonic() - started_at:.1f} s)')
        ready('https' if is_secure else 'http')
        service.ready(f'etcd and placement answer at {asked.bind}')
        if not is_secure:
            say('without certificates every user of this machine can write to both. Fix: elab control --certs certs')
        say(f'data is in {asked.data.resolve()}; Ctrl-C ends both')
        certificate_time = _written(asked)
        while not stopped.wait(0.5):
            service.alive()
            for server, process in running:
                if not machine.alive(process):
                    raise EcompError(f'{server.what} ended: {machine.last_line(server.log)} (see {server.log})')
                # etcd reads its certificate for each connection, stunnel on SIGHUP.
                if server.what == 'stunnel' and (new_time := _written(asked)) != certificate_time:
                    certificate_time = new_time
                    os.kill(process.pid, signal.SIGHUP)
        service.stopping('etcd and placement come to an end')


def words(asked: Endpoints) -> list[str]:
    """Make the arguments of an `elab` that runs these servers from any directory."""
    arguments = ['control', '--bind', asked.bind, '--data', str(asked.data.absolute())]
    arguments += ['--etcd-port', str(asked.etcd_port), '--placement-port', str(asked.placement_port)]
    return arguments if asked.certs is None else [*arguments, '--certs', str(asked.certs.absolute())]


def check_service(asked: Endpoints, program: Path) -> None:
    """Raise UsageError if a service without root's capabilities could not use these paths."""
    fix = 'install in /opt/ecomp, and say --data /var/lib/ecomp'
    # An installation may refer to another user's clone (pip install -e) or Python.
    paths = {str(program): program, f"elab's code in {systemd.PACKAGE}": systemd.PACKAGE}
    paths |= {f'its Python {sys.executable}': Path(sys.executable), f'--data {asked.data}': asked.data}
    if asked.certs is not None:
        paths[f'--certs {asked.certs}'] = asked.certs
        fix += ' --certs /var/lib/ecomp/certs'
    for name, path in paths.items():
        if (place := systemd.in_root_s_way(path)) is not None:
            why = f"{name} is in {place}, which is another user's or closed to root, and the service has no right there"
            raise UsageError(f'--unit: {why}: {fix} (docs/howto/real-machines.md)')


def _servers(asked: Endpoints, data: Path) -> list[LabServer]:
    etcd, stunnel = (None if asked.certs is None else asked.certs.resolve() / name for name in ('etcd', 'placement'))
    return [
        etcd_server(data, [asked.bind], asked.etcd_port, etcd),
        *placement(data, asked.bind, asked.placement_port, stunnel),
    ]


def _written(asked: Endpoints) -> float:
    """Read when placement's certificate was written, in seconds since the epoch, else 0."""
    with contextlib.suppress(FileNotFoundError):
        return 0.0 if asked.certs is None else (asked.certs / 'placement/server.crt').stat().st_mtime
    return 0.0


def _make_certificates(directory: Path, asked: Endpoints, say: Callable[[str], None]) -> None:
    """Make missing certificates; raise UsageError if one of CERTIFICATE_FILES is unreadable."""
    from ecomp.lab import certs

    if not (directory / 'placement/server.crt').exists():
        servers = ('localhost', LOCALHOST) if asked.bind == LOCALHOST else (asked.bind,)
        cluster = certs.Cluster(servers, (), (), (), asked.etcd_port, asked.placement_port)
        certs.make(directory, cluster, datetime.now(UTC).replace(microsecond=0), say)
        command = f'elab certs {directory}'
        if (asked.etcd_port, asked.placement_port) != (ETCD_PORT, PLACEMENT_PORT):
            command += f' --etcd-port {asked.etcd_port} --placement-port {asked.placement_port}'
        say(f'for those who ask: {command} --compute HOST... --scheduler NAME... --operator NAME...')
    for subdirectory, names in FILES.items():
        for name in names:
            if not os.access(directory / subdirectory / name, os.R_OK):
                raise UsageError(f'{directory}/{subdirectory}/{name} cannot be read: elab certs makes it')


def with_certs(asked: Endpoints) -> Endpoints:
    """Add ./certs if other machines reach `bind`; raise UsageError if `bind` is not usable."""
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
