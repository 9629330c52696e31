"""The control plane's servers: how each is started and checked.

With certificates (ecomp.lab.certs), etcd and the stunnel before placement require a certificate of each client.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import signal
import socket
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from ecomp import systemd
from ecomp.errors import EcompError, UsageError
from ecomp.lab import machine
from ecomp.lab.machine import RecordProcess, ServerProcess
from ecomp.lab.network import ETCD_PORT, PLACEMENT_PORT, Layout, bracket_address
from ecomp.systemd import Service

START_SECONDS = 60.0  # for a server to become ready; then EcompError
LOCALHOST = '127.0.0.1'
SOCKET = 'placement.socket'
STUNNEL = """\
; Written by elab at each start. The path of the socket is relative to the working directory, because the absolute path
; may exceed 107 bytes.
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
; Seconds for a handshake, and until an idle connection is closed.
TIMEOUTbusy = 10
TIMEOUTidle = 600
"""
# An origin that no web page has, since browsers refuse port 1. An empty list would allow all origins.
UNREACHABLE_ORIGIN = 'http://localhost:1'


@dataclass(frozen=True)
class LabServer:
    """A server of the control plane: how it is started and checked."""

    name: str
    command: list[str]
    log: Path
    is_ready: Callable[[ServerProcess], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)

    def describe_state(self, process: ServerProcess | None) -> str:
        if process is None:
            return 'down'
        return 'ready' if self.is_ready(process) else f'no answer (pid {process.pid})'

    def start(self, prefix: list[str], record_process: RecordProcess | None = None) -> ServerProcess:
        """Write the server's files, and start its command with `prefix` before it."""
        for path, text in self.files.items():
            path.write_text(text, encoding='utf-8', errors='surrogateescape')
        command = [*prefix, *self.command]
        return machine.start(self.name, command, self.log, self.env, record_process=record_process, umask=0o077)

    def wait(self, child: ServerProcess, signals: Sequence[int] = ()) -> None:
        """Wait for the server or an item in `signals`, or raise EcompError after START_SECONDS."""
        try:
            machine.wait_for(self.name, lambda: bool(signals) or self.is_ready(child), child, self.log, START_SECONDS)
        except EcompError:
            if not signals:  # the signal that stops us may have ended the server too
                raise


def make_etcd_server(data: Path, addresses: list[str], port: int, certs: Path | None = None) -> LabServer:
    """Describe an etcd of one member, which compacts revisions after an hour.

    `certs` has the server's certificate and the authority of its clients. None means any client, in plain text.
    """
    # https://etcd.io/docs/v3.4/op-guide/configuration/
    urls = [f'{"http" if certs is None else "https"}://{bracket_address(address)}:{port}' for address in addresses]
    # A single member has no peers: any free port of the loopback will do.
    peer_url = f'http://{LOCALHOST}:0'
    command = ['etcd', '--name', 'lab', '--data-dir', str(data / 'etcd')]
    command += ['--listen-client-urls', ','.join(urls), '--advertise-client-urls', ','.join(urls)]
    command += ['--listen-peer-urls', peer_url, '--initial-advertise-peer-urls', peer_url]
    command += ['--initial-cluster', f'lab={peer_url}']
    command += ['--auto-compaction-mode=periodic', '--auto-compaction-retention=1h', '--max-txn-ops=2048']
    # The legitimate host names of a server that listens on these addresses.
    names = ['localhost', LOCALHOST, *(host for host in addresses if host != LOCALHOST)]
    # A malicious web page cannot use gRPC, so without the JSON gateway it reaches only /health, /metrics and /version.
    # The host whitelist (against DNS rebinding) and the CORS origin keep the answers from it.
    command += ['--enable-grpc-gateway=false', f'--host-whitelist={",".join(names)}', f'--cors={UNREACHABLE_ORIGIN}']
    if certs is not None:
        command += [f'--cert-file={certs}/server.crt', f'--key-file={certs}/server.key']
        command += ['--client-cert-auth', f'--trusted-ca-file={certs}/ca.crt']
    # An etcd that ends in the first milliseconds of its first start may lack its membership, and would wait for a
    # leader forever. So start() makes this file for an etcd without data, and confirm_health() deletes it.
    begun_marker = data / 'etcd.begun'
    # Not at every start: it could lose what was written just before the last end.
    command += ['--force-new-cluster'] if begun_marker.exists() else []

    def confirm_health(_: ServerProcess) -> bool:
        if not is_etcd_healthy(urls[0], certs):
            return False
        begun_marker.unlink(missing_ok=True)
        return True

    files = {} if (data / 'etcd/member').exists() else {begun_marker: ''}
    return LabServer('etcd', command, data / 'etcd.log', confirm_health, files=files)


def make_placement_servers(data: Path, address: str, port: int, certs: Path | None) -> list[LabServer]:
    """Describe placement over SQLite in `data`, as servers in the order to start them.

    With `certs` placement accepts the token in `certs`/token, behind a stunnel that requires a client certificate.
    Without `certs` it accepts the token `admin`. https://www.stunnel.org/static/stunnel.html
    """
    command, listen_address = [sys.executable, '-m', 'ecomp.lab.placement_server'], f'{bracket_address(address)}:{port}'
    log, env = data / 'placement.log', make_placement_environment(data)
    if certs is None:
        command += [address, str(port)]
        return [LabServer('placement', command, log, lambda _: is_placement_ready(f'http://{listen_address}'), env)]
    command += [SOCKET, str(certs / 'token')]
    conf, url = data / 'stunnel.conf', f'https://{listen_address}'
    files = {conf: STUNNEL.format(where=f'{address}:{port}', socket=SOCKET, certs=certs)}

    def is_listening(process: ServerProcess) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f'/proc/{process.pid}/cwd/{SOCKET}')
            return True
        return False

    def is_ready(_: ServerProcess) -> bool:
        return is_placement_ready(url, certs)

    placement = LabServer('placement', command, log, is_listening, env)
    stunnel = LabServer('stunnel', ['stunnel4', str(conf)], data / 'stunnel.log', is_ready, files=files)
    return [placement, stunnel]


def make_placement_environment(data: Path) -> dict[str, str]:
    return {
        'OS_PLACEMENT_CONFIG_DIR': str(data),  # the machine's own in /etc must not be read
        'OS_PLACEMENT_DATABASE__CONNECTION': f'sqlite:///{data}/placement.sqlite',
        'OS_PLACEMENT_DATABASE__SYNC_ON_STARTUP': 'True',
        'OS_API__AUTH_STRATEGY': 'noauth2',  # the token `admin` is administrator
    }


@dataclass(frozen=True)
class Endpoints:
    """Where etcd and placement listen, and where they have their data and certificates."""

    etcd_port: int
    placement_port: int
    data: Path
    bind: str = LOCALHOST
    certs: Path | None = None


def make_servers(endpoints: Endpoints, *more_addresses: str) -> list[LabServer]:
    """Describe etcd, which also listens on `more_addresses`, and placement."""
    etcd, placement = (endpoints.certs and endpoints.certs / name for name in ('etcd', 'placement'))
    return [
        make_etcd_server(endpoints.data, [endpoints.bind, *more_addresses], endpoints.etcd_port, etcd),
        *make_placement_servers(endpoints.data, endpoints.bind, endpoints.placement_port, placement),
    ]


def make_lab_servers(layout: Layout, data: Path, images: Path, certs: Path) -> list[LabServer]:
    address = str(layout.control)
    web = [sys.executable, '-m', 'http.server', '--bind', address, '--directory', str(images), '80']
    dhcp = ['dnsmasq', '--keep-in-foreground', '--conf-file=/dev/null', '--pid-file=', '--port=0']
    dhcp += ['--interface=br0', '--bind-interfaces', '--dhcp-authoritative']
    dhcp += [f'--dhcp-range={layout.lan[100]},{layout.lan[250]},{layout.lan.netmask},12h']
    # No router and no DNS: a guest's route and metadata are only on the network of its host.
    dhcp += ['--dhcp-option=3', '--dhcp-option=6', f'--dhcp-leasefile={data}/dhcp.leases']
    return [
        *make_servers(Endpoints(ETCD_PORT, PLACEMENT_PORT, data, address, certs), LOCALHOST),
        LabServer('images', web, data / 'images.log', lambda _: is_url_available(layout.images)),
        LabServer('dhcp', dhcp, data / 'dhcp.log', _is_dhcp_ready),
    ]


def is_etcd_healthy(url: str, certs: Path | None = None) -> bool:
    """Return True if the etcd at this URL has a leader and accepts writes."""
    with contextlib.suppress(ValueError):
        return bool(json.loads(_fetch(f'{url}/health', certs=certs) or b'{}').get('health') in ('true', True))
    return False


def is_placement_ready(url: str, certs: Path | None = None) -> bool:
    """Return True if the placement at this URL answers a query that needs its database."""
    token = 'admin' if certs is None else (certs / 'token').read_text(encoding='ascii').strip()
    return is_url_available(f'{url}/resource_providers', {'x-auth-token': token}, certs)


def is_url_available(url: str, headers: Mapping[str, str] | None = None, certs: Path | None = None) -> bool:
    """Return True if a GET of this URL succeeds, and is never silent for 5 s."""
    return _fetch(url, headers, certs) is not None


def _fetch(url: str, headers: Mapping[str, str] | None = None, certs: Path | None = None) -> bytes | None:
    """Return the body of a URL, or None if it cannot be fetched."""
    # A proxy of the machine's environment cannot reach the lab.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if certs is not None:
            context = ssl.create_default_context(cafile=str(certs / 'ca.crt'))
            context.check_hostname = False  # the URL has its address, the certificate may have a name
            context.load_cert_chain(certs / 'server.crt', certs / 'server.key')
            handlers.append(urllib.request.HTTPSHandler(context=context))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=5) as response:
            return bytes(response.read())
    except (OSError, http.client.HTTPException):  # HTTP errors are OSErrors, too
        return None


def _is_dhcp_ready(process: ServerProcess) -> bool:
    # dnsmasq answers only by giving a lease; the kernel shows whether port 67 (0x43) is bound.
    with contextlib.suppress(OSError):
        sockets = Path(f'/proc/{process.pid}/net/udp').read_text(encoding='ascii')
        return any(line.split()[1].endswith(':0043') for line in sockets.splitlines()[1:])
    return False


# The files of `elab certs` that the servers read.
CERTIFICATE_FILES = [
    f'{place}/{name}' for place in ('etcd', 'placement') for name in ('ca.crt', 'server.crt', 'server.key')
]
CERTIFICATE_FILES += ['placement/token']
Running = list[tuple[LabServer, ServerProcess]]


def run_control(endpoints: Endpoints, service: Service, say: Callable[[str], None], notify: Callable[[], None]) -> None:
    """Run etcd and placement until SIGINT or SIGTERM, and call `notify` once both answer."""
    _prepare_files(endpoints, say)
    is_secure, data = endpoints.certs is not None, endpoints.data.resolve()
    # Not a threading.Event: a handler that interrupts its wait() may wait forever for the lock that wait() holds.
    signals: list[int] = []
    with ExitStack() as at_exit:
        for number in (signal.SIGINT, signal.SIGTERM):
            at_exit.callback(signal.signal, number, signal.signal(number, lambda received, _: signals.append(received)))
        running: Running = []
        at_exit.callback(lambda: machine.terminate(process for _, process in running))
        for server in make_servers(replace(endpoints, data=data, certs=endpoints.certs and endpoints.certs.resolve())):
            started_at = time.monotonic()
            # They end with this process, even if it is killed and cannot end them.
            process = server.start(['setpriv', '--pdeathsig', 'TERM', '--'])
            running.append((server, process))
            server.wait(process, signals)
            if signals:
                return
            say(f'{server.name} is ready ({time.monotonic() - started_at:.1f} s)')
        notify()
        service.notify_ready(f'etcd and placement answer at {endpoints.bind}')
        if not is_secure:
            problem = 'without certificates, every user of this machine can write to etcd and placement'
            say(f'{problem}. Fix: elab control --certs certs')
        say(f'the data is in {data}; Ctrl-C stops both servers')
        _watch(running, endpoints, service, signals)
        service.notify_stopping('etcd and placement are stopping')


def _prepare_files(endpoints: Endpoints, say: Callable[[str], None]) -> None:
    """Make the data and certificates. Raise UsageError for a taken port or missing program."""
    for backend, port in (('etcd', endpoints.etcd_port), ('placement', endpoints.placement_port)):
        _require_free_port(backend, endpoints.bind, port)
    programs, modules = machine.CONTROL_PROGRAMS, ['placement', 'waitress']
    if endpoints.certs is not None:
        programs, modules = {**programs, **machine.SECURE_PROGRAMS}, [*modules, 'cryptography']
    machine.require(programs, modules)
    try:
        endpoints.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f'--data {endpoints.data}: {error.strerror}') from error
    if endpoints.certs is not None:
        _ensure_certificates(endpoints.certs, endpoints, say)


def _watch(running: Running, endpoints: Endpoints, service: Service, signals: Sequence[int]) -> None:
    """Wait for a signal, have stunnel reread new certificates, and raise if a server ends."""
    certificate_time = _read_certificate_time(endpoints)
    while not signals:
        time.sleep(0.5)
        service.notify_alive()
        for server, process in running:
            if not machine.is_alive(process):
                raise EcompError(f'{server.name} ended: {machine.read_last_line(server.log)} (see {server.log})')
            # etcd reads its certificate for each connection, stunnel on SIGHUP.
            if server.name == 'stunnel' and (new_time := _read_certificate_time(endpoints)) != certificate_time:
                certificate_time = new_time
                os.kill(process.pid, signal.SIGHUP)


def make_arguments(endpoints: Endpoints) -> list[str]:
    """Make the arguments of an `elab` that runs these servers from any directory."""
    arguments = ['control', '--bind', endpoints.bind, '--data', str(endpoints.data.absolute())]
    arguments += ['--etcd-port', str(endpoints.etcd_port), '--placement-port', str(endpoints.placement_port)]
    return arguments if endpoints.certs is None else [*arguments, '--certs', str(endpoints.certs.absolute())]


def require_access(endpoints: Endpoints, program: Path) -> None:
    """Raise UsageError unless root without capabilities can use all files of the service."""
    fix = 'install ecomp in /opt/ecomp, and use --data /var/lib/ecomp'
    # An installation may refer to another user's clone (pip install -e) or Python.
    paths = {str(program): program, f"elab's code in {systemd.PACKAGE}": systemd.PACKAGE}
    paths |= {f'its Python {sys.executable}': Path(sys.executable), f'--data {endpoints.data}': endpoints.data}
    if endpoints.certs is not None:
        paths[f'--certs {endpoints.certs}'] = endpoints.certs
        fix += ' --certs /var/lib/ecomp/certs'
    for name, path in paths.items():
        if (place := systemd.find_unsafe_directory(path)) is not None:
            problem = f'the service cannot use {name}: {place} belongs to another user or is not accessible to root'
            raise UsageError(f'--unit: {problem}. Fix: {fix}, as docs/howto/real-machines.md describes')


def _read_certificate_time(endpoints: Endpoints) -> float:
    with contextlib.suppress(FileNotFoundError):
        return 0.0 if endpoints.certs is None else (endpoints.certs / 'placement/server.crt').stat().st_mtime
    return 0.0


def _ensure_certificates(directory: Path, endpoints: Endpoints, say: Callable[[str], None]) -> None:
    from ecomp.lab import certs

    if not (directory / 'placement/server.crt').exists():
        servers = ('localhost', LOCALHOST) if endpoints.bind == LOCALHOST else (endpoints.bind,)
        cluster = certs.Cluster(servers, (), (), (), endpoints.etcd_port, endpoints.placement_port)
        certs.make_certificates(directory, cluster, datetime.now(UTC).replace(microsecond=0), say)
        command = f'elab certs {directory}'
        if (endpoints.etcd_port, endpoints.placement_port) != (ETCD_PORT, PLACEMENT_PORT):
            command += f' --etcd-port {endpoints.etcd_port} --placement-port {endpoints.placement_port}'
        say(f'to make certificates for clients: {command} --compute HOST... --scheduler NAME... --operator NAME...')
    for name in CERTIFICATE_FILES:
        if not os.access(directory / name, os.R_OK):
            raise UsageError(f'{directory}/{name} cannot be read. Try: elab certs {directory}')


def add_default_certs(endpoints: Endpoints) -> Endpoints:
    """Default `certs` to ./certs unless `bind` is loopback, or raise UsageError for `bind`."""
    try:
        address = ip_address(endpoints.bind)
    except ValueError as error:
        raise _make_address_error(endpoints.bind) from error
    if '%' in endpoints.bind:
        fix = 'use another address of this machine'
        raise UsageError(f'--bind {endpoints.bind}: a certificate cannot contain an address with a %. Fix: {fix}')
    if address.is_unspecified:
        problem = 'no certificate can be made for this address. Fix: use an address of this machine'
        raise UsageError(f'--bind {endpoints.bind}: {problem}')
    return endpoints if address.is_loopback or endpoints.certs is not None else replace(endpoints, certs=Path('certs'))


def _make_address_error(bind: str) -> UsageError:
    return UsageError(f'--bind {bind}: must be an address of this machine. Try: ip address')


def _require_free_port(backend: str, bind: str, port: int) -> None:
    option, family = f'--{backend}-port', socket.AF_INET6 if ':' in bind else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise _make_address_error(bind) from error
            raise UsageError(f'{option} {port}: {error.strerror}. Fix: use another port') from error
