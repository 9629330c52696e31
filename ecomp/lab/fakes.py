"""A cluster of fakes for any user: etcd, placement and `ecompute --fake` on 127.0.0.1, without root or libvirt.

Everything is below find_root()/NAME: lab.json, certs/, control/, and a directory for each fake.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ecomp.compute_conf import load_compute, parse_inventory
from ecomp.errors import EcompError, UsageError
from ecomp.files import get_search_path, read_boot_id, write_durably
from ecomp.lab import control, machine, state
from ecomp.lab.control import LOCALHOST, Endpoints, LabServer
from ecomp.lab.hosts import Host, write_once
from ecomp.lab.machine import ServerProcess
from ecomp.lab.network import CONTROL, render_backends

DEFAULT_NAME = 'fake'
DEFAULT_COUNT = 5
DEFAULT_SIZE = 'VCPU:8,MEMORY_MB:16384,DISK_GB:100'
# Seconds until a started guest has its address, and from then until it is ready.
BOOT_SECONDS = 1
PROGRAMS = {'etcd': 'etcd-server', 'stunnel4': 'stunnel4'}
# The packages that --fetch unpacks; stunnel4 needs libwrap0.
PACKAGES = ('etcd-server', 'stunnel4', 'libwrap0')

COMPUTE_YAML = """\
# Written once by elab. After a change: `elab kill {name}`, then `elab up`.
{backends}uuid: {compute}
state: {state}
queues: True
"""

SCHEDULE_YAML = """\
# Written once by elab. With this file, in this directory or with --config, eschedule uses the fakes of {name}.
{backends}\
# Fakes accept the URL of any image, and fetch none.
image: http://images.example/debian-12.qcow2
"""

ReportStep = Callable[[str], AbstractContextManager[None]]


def find_root() -> Path:
    """Return the directory of this user's clusters of fakes (XDG Base Directory Specification)."""
    return Path(os.environ.get('XDG_STATE_HOME') or Path('~/.local/state').expanduser()) / 'elab'


@dataclass
class FakeLab(state.LabRecord):
    """A cluster of fakes: its directory, its ports, the size of a fake, and each process by label."""

    directory: Path
    etcd_port: int
    placement_port: int
    host_count: int
    size: str
    processes: dict[str, ServerProcess] = field(default_factory=dict)

    @property
    def hosts(self) -> list[str]:
        return [f'fake{number}' for number in range(1, self.host_count + 1)]

    @property
    def servers(self) -> list[LabServer]:
        """etcd, placement and stunnel, in the order to start them."""
        data = self.directory / CONTROL
        return control.make_servers(Endpoints(self.etcd_port, self.placement_port, data, certs=self.certs))

    def render_backends(self, certificate: Path) -> str:
        placement = f'https://{LOCALHOST}:{self.placement_port}'
        return render_backends(LOCALHOST, self.etcd_port, placement, f'{certificate}/')

    def save(self) -> None:
        data = {name: value for name, value in asdict(self).items() if name != 'directory'}
        write_durably(self.directory / state.RECORD_NAME, json.dumps({**data, 'boot': read_boot_id()}, indent=1), 0o644)


class FakeHost(Host):
    """A fake: `ecompute --fake` in a directory of its own."""

    lab: FakeLab

    def make_command(self, words: list[str]) -> list[str]:
        return [*words, '--fake', self.lab.size, '--name', self.name, '--boot', str(BOOT_SECONDS)]

    def prepare(self) -> None:
        certificate = self.lab.certs / f'compute-{self.name}'
        self.directory.mkdir(exist_ok=True)
        text = COMPUTE_YAML.format(
            name=self.name,
            backends=self.lab.render_backends(certificate),
            compute=load_compute(certificate / 'compute.yaml').uuid,
            state=self.directory / 'state',
        )
        write_once(self.directory / 'compute.yaml', text)


def find(name: str) -> FakeLab | None:
    """Load a cluster of fakes, None if there is none of this name; EcompError if its lab.json is malformed."""
    directory = find_root() / name
    try:
        data = json.loads((directory / state.RECORD_NAME).read_text(encoding='utf-8'))
        recorded = data.pop('processes') if data.pop('boot') == read_boot_id() else {}
        return FakeLab(directory, processes={label: ServerProcess(**each) for label, each in recorded.items()}, **data)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # the last for a home of another user
        return None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        path = directory / state.RECORD_NAME
        raise EcompError(f'{path} is malformed. Fix: end its processes, and remove {directory}') from error


def list_all() -> list[FakeLab]:
    """Load all clusters of fakes of this user, sorted by name."""
    root = find_root()
    paths = sorted(root.glob(f'*/{state.RECORD_NAME}')) if os.access(root, os.R_OK) else []
    return [lab for path in paths if (lab := find(path.parent.name))]


def list_hosts(lab: FakeLab) -> list[FakeHost]:
    """Return the fakes of a cluster, running or not."""
    return [FakeHost(lab, name) for name in lab.hosts]


def bring_up(name: str, count: int | None, size: str | None, report_step: ReportStep) -> FakeLab:
    """Make the cluster, or start what has ended of it; remove again what could not be made for the first time."""
    parse_inventory(size or DEFAULT_SIZE)
    _require_programs()
    lab = find(name)
    is_new = lab is None
    if lab is None:
        with socket.create_server((LOCALHOST, 0)) as etcd, socket.create_server((LOCALHOST, 0)) as placement:
            etcd_port, placement_port = (each.getsockname()[1] for each in (etcd, placement))  # which nobody uses
        lab = FakeLab(find_root() / name, etcd_port, placement_port, count or DEFAULT_COUNT, size or DEFAULT_SIZE)
    elif size not in (None, lab.size):
        raise UsageError(f'--size: the fakes of {name} have {lab.size}. Fix: `elab down --name {name}` first')
    lab.directory.mkdir(parents=True, exist_ok=True)
    lab.host_count = max(lab.host_count, count or 0)
    lab.save()
    with machine.undo_on_error((lambda: remove(lab)) if is_new else None):
        _start(lab, report_step)
    return lab


def _start(lab: FakeLab, report_step: ReportStep) -> None:
    from ecomp.lab import certs

    hosts = list_hosts(lab)
    with report_step('etcd and placement'):
        (lab.directory / CONTROL).mkdir(exist_ok=True)
        now = datetime.now(UTC).replace(microsecond=0)
        servers, ports = (LOCALHOST, 'localhost'), (lab.etcd_port, lab.placement_port)
        cluster = certs.Cluster(servers, tuple(lab.hosts), (), (state.OPERATOR,), *ports)
        certs.make_certificates(lab.certs, cluster, now, lambda _: None)
        for host in hosts:
            host.prepare()
        write_once(
            lab.directory / 'schedule.yaml',
            SCHEDULE_YAML.format(name=lab.name, backends=lab.render_backends(lab.operator)),
        )
        started = [server for server in lab.servers if not lab.find_running(server.name)]
        for server in started:
            server.start([], lab.record_process)
        for server in started:
            server.wait(lab.processes[server.name])
        certs.enable_roles(lab.certs, now, lambda _: None)
    with report_step('ecompute of ' + ', '.join(lab.hosts)):
        for host in hosts:
            host.start_ecompute()
        for host in hosts:
            host.wait_ecompute()


def remove(lab: FakeLab) -> None:
    """End the fakes, then the servers, and remove the directory."""
    servers = {server.name for server in lab.servers}
    machine.terminate(process for label, process in lab.processes.items() if label not in servers)
    machine.terminate(process for label, process in lab.processes.items() if label in servers)
    state.remove_directory(lab.directory)
    with contextlib.suppress(OSError):  # there are others
        lab.directory.parent.rmdir()


def fetch_programs() -> None:
    """Unpack Debian's packages for this user if etcd or stunnel is missing; EcompError if apt or dpkg fails."""
    use_fetched_programs()
    target = find_root().parent / 'elab-programs'
    if all(shutil.which(program, path=get_search_path()) for program in PROGRAMS):
        return
    target.mkdir(parents=True, exist_ok=True)
    script = 'cd "$0" && apt-get download "$@" && for each in *.deb; do dpkg-deb --extract "$each" .; done; rm *.deb'
    try:
        machine.run(['sh', '-ec', script, str(target), *PACKAGES])
    except EcompError as error:
        cure = 'if it is old, ask for `apt-get update`, which needs root'
        raise EcompError(f"{error}: apt's list of packages may be old. Fix: {cure}") from error


def use_fetched_programs() -> None:
    """Let this process and its children find what fetch_programs() unpacked."""
    target = find_root().parent / 'elab-programs'
    if target.is_dir():
        os.environ['PATH'] = f'{os.environ.get("PATH", os.defpath)}:{target}/usr/bin'
        os.environ['LD_LIBRARY_PATH'] = ':'.join(map(str, target.glob('usr/lib/*-linux-gnu')))


def _require_programs() -> None:
    use_fetched_programs()
    try:
        modules = ['placement', 'waitress', 'cryptography']
        machine.require(PROGRAMS, modules)
    except UsageError as error:
        if os.geteuid() == 0 or 'missing programs' not in str(error):
            raise
        raise UsageError(f'{error}; without root: {shlex.join([*sys.argv, "--fetch"])}') from error
