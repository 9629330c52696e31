"""The control plane's servers: how each is started, and how it is asked whether it is ready.

A lab has etcd and placement in its own namespace, with a server for images and DHCP for the LAN beside them
(`lab_servers`). With certificates (ecomp.lab.certs) etcd takes nobody without one, and stunnel stands before placement.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ecomp.errors import EcompError
from ecomp.lab import machine
from ecomp.lab.machine import Process, Remember
from ecomp.lab.network import ETCD_PORT, PLACEMENT_PORT, Layout

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

    def start(self, prefix: list[str], remember: Remember = machine.in_memory) -> Process:
        """Run `prefix` and the command as one once `remember` has returned, without waiting until it is ready."""
        for path, text in self.files.items():
            path.write_text(text, encoding='utf-8', errors='surrogateescape')
        command = [*prefix, *self.command]
        directory = self.log.parent
        return machine.start(self.what, command, self.log, directory, self.env, remember=remember, umask=0o077)

    def wait(self, process: Process, stopped: threading.Event | None = None) -> None:
        """Wait until the server is ready or `stopped` is set. EcompError if it ends or START_SECONDS are over."""

        def done() -> bool:
            return (stopped is not None and stopped.is_set()) or self.ready(process)

        try:
            machine.wait_for(self.what, done, process, self.log, START_SECONDS)
        except EcompError:
            if stopped is None or not stopped.is_set():  # whoever stops us may have ended the server, too
                raise


def etcd(data: Path, addresses: list[str], port: int, certs: Path | None = None) -> LabServer:
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
    urls = ','.join(f'{_scheme(certs)}://{bracketed(address)}:{port}' for address in addresses)
    # A single member talks to no other: any free port of the loopback does for its peers.
    peers = f'http://{LOCALHOST}:0'
    command = ['etcd', '--name', 'lab', '--data-dir', str(data / 'etcd')]
    command += ['--listen-client-urls', urls, '--advertise-client-urls', urls]
    command += ['--listen-peer-urls', peers, '--initial-advertise-peer-urls', peers]
    command += ['--initial-cluster', f'lab={peers}']
    command += ['--auto-compaction-mode=periodic', '--auto-compaction-retention=1h']
    command += ['--enable-grpc-gateway=false', f'--host-whitelist={",".join(names(addresses))}', f'--cors={NO_PAGE}']
    if certs is not None:
        command += [f'--cert-file={certs}/server.crt', f'--key-file={certs}/server.key']
        command += ['--client-cert-auth', f'--trusted-ca-file={certs}/ca.crt']
    begun = data / 'etcd.begun'
    # Not at any start: what was written just before the last end could be lost by it.
    command += ['--force-new-cluster'] if begun.exists() else []
    where = f'{_scheme(certs)}://{bracketed(addresses[0])}:{port}'

    def ready(_: Process) -> bool:
        if not etcd_healthy(where, certs):
            return False
        begun.unlink(missing_ok=True)
        return True

    files = {} if (data / 'etcd/member').exists() else {begun: ''}
    return LabServer('etcd', command, data / 'etcd.log', ready, files=files)


def placement(data: Path, address: str, port: int) -> LabServer:
    """Placement over SQLite in the directory `data`, without TLS: whoever reaches it is its administrator."""
    command = [sys.executable, '-m', 'ecomp.lab.placement_server', address, str(port)]
    where = f'http://{address}:{port}'
    env = placement_environment(data)
    return LabServer('placement', command, data / 'placement.log', lambda _: placement_answers(where), env)


def placement_behind(data: Path, address: str, port: int, certs: Path) -> list[LabServer]:
    """Placement on a socket in `data`, and stunnel before it, which lets clients with a certificate through to it.

    Placement answers those of them that send the word in `certs`/token. https://www.stunnel.org/static/stunnel.html
    """
    settings, text = data / 'stunnel.conf', STUNNEL.format(where=f'{address}:{port}', socket=SOCKET, certs=certs)
    command = [sys.executable, '-m', 'ecomp.lab.placement_server', SOCKET, str(certs / 'token')]
    where = f'https://{bracketed(address)}:{port}'
    log, env = data / 'placement.log', placement_environment(data)
    return [
        LabServer('placement', command, log, lambda process: _takes(f'/proc/{process.pid}/cwd/{SOCKET}'), env),
        LabServer(
            'stunnel', ['stunnel4', str(settings)], data / 'stunnel.log', lambda _: placement_answers(where, certs),
            files={settings: text},
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
        etcd(data, [own, LOCALHOST], ETCD_PORT, certs / 'etcd'),
        *placement_behind(data, own, PLACEMENT_PORT, certs / 'placement'),
        LabServer('images', web, data / 'images.log', lambda _: answers(layout.images)),
        LabServer('dhcp', dhcp, data / 'dhcp.log', _listens_for_dhcp),
    ]


def etcd_healthy(where: str, certs: Path | None = None) -> bool:
    """Whether etcd at this URL says that it is healthy: it has a leader and takes writes."""
    try:
        return bool(json.loads(_ask(f'{where}/health', certs=certs)).get('health') in ('true', True))
    except (OSError, ValueError):
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
    try:
        _ask(url, headers, certs)
    except OSError:
        return False
    return True


def names(addresses: Iterable[str]) -> list[str]:
    """The names and addresses by which clients rightly call a server that listens on these addresses."""
    return ['localhost', LOCALHOST, *(each for each in addresses if each != LOCALHOST)]


def bracketed(address: str) -> str:
    """An address or name as it is written before a colon and a port: IPv6 in brackets."""
    return f'[{address}]' if ':' in address else address


def _scheme(certs: Path | None) -> str:
    return 'http' if certs is None else 'https'


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
    try:
        sockets = Path(f'/proc/{process.pid}/net/udp').read_text(encoding='ascii')
    except OSError:
        return False
    return any(line.split()[1].endswith(':0043') for line in sockets.splitlines()[1:])
