"""`elab control`: etcd and placement in the foreground, for as long as it runs and no longer.

On localhost they take whoever asks; on an address that others reach only those who have a certificate.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

from ecomp import systemd
from ecomp.errors import EcompError, UsageError
from ecomp.lab import control, machine
from ecomp.lab.control import LOCALHOST, LabServer
from ecomp.lab.machine import Process
from ecomp.lab.network import ETCD_PORT, PLACEMENT_PORT
from ecomp.systemd import Service

FILES = {'etcd': ('ca.crt', 'server.crt', 'server.key'), 'placement': ('ca.crt', 'server.crt', 'server.key', 'token')}
"""The files of `elab certs` that the servers read, by directory."""


@dataclass(frozen=True)
class Endpoints:
    """Where etcd and placement listen, and where their data is; `bind` is an address of this machine.

    `certs` is the directory that `elab certs` makes; None means no certificates on a loopback address, else ./certs.
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
    asked = _with_certs(asked)
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
    """What `elab` is told so that it runs these from any directory. UsageError for what is no address to listen at."""
    asked = _with_certs(asked)
    told = ['control', '--bind', asked.bind, '--data', str(asked.data.absolute())]
    told += ['--etcd-port', str(asked.etcd_port), '--placement-port', str(asked.placement_port)]
    return told if asked.certs is None else [*told, '--certs', str(asked.certs.absolute())]


def check_service(asked: Endpoints, program: Path) -> None:
    """UsageError if a service that is root without root's rights could not run `program`, or write where it is told."""
    asked = _with_certs(asked)
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
    if asked.certs is None:
        etcd = control.etcd(data, [asked.bind], asked.etcd_port)
        return [etcd, control.placement(data, asked.bind, asked.placement_port)]
    certs = asked.certs.resolve()
    behind = control.placement_behind(data, asked.bind, asked.placement_port, certs / 'placement')
    return [control.etcd(data, [asked.bind], asked.etcd_port, certs / 'etcd'), *behind]


def _written(asked: Endpoints) -> float:
    """When placement's certificate was written, in seconds since the epoch; 0 without one, and while it is replaced."""
    try:
        return 0.0 if asked.certs is None else (asked.certs / 'placement/server.crt').stat().st_mtime
    except FileNotFoundError:
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


def _with_certs(asked: Endpoints) -> Endpoints:
    """The same with `certs` set where other machines reach `bind`. UsageError for what is no address to listen at."""
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
