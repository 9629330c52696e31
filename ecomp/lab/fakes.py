"""A cluster of fakes on 127.0.0.1, which any user can have without root or libvirt.

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
from pathlib import Path

from ecomp.compute_conf import load_compute, parse_inventory
from ecomp.errors import EcompError, UsageError
from ecomp.files import get_search_path
from ecomp.lab import machine, state
from ecomp.lab.control import LOCALHOST
from ecomp.lab.hosts import Host, write_once
from ecomp.lab.state import FakeLab

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


def find_root() -> Path:
    """Return the directory of this user's clusters of fakes (XDG Base Directory Specification)."""
    return Path(os.environ.get('XDG_STATE_HOME') or Path('~/.local/state').expanduser()) / 'elab'


class FakeHost(Host):
    """A fake: `ecompute --fake` in a directory of its own."""

    lab: FakeLab

    def make_command(self, words: list[str]) -> list[str]:
        return [*words, '--fake', self.lab.size, '--name', self.name, '--boot', str(BOOT_SECONDS)]

    def share_uuid(self) -> None:
        self.directory.mkdir(exist_ok=True)
        text = COMPUTE_YAML.format(
            name=self.name,
            backends=self.lab.render_backends(self._certificate),
            compute=load_compute(self._certificate / 'compute.yaml').uuid,
            state=self.directory / 'state',
        )
        write_once(self.directory / 'compute.yaml', text)


def find(name: str) -> FakeLab | None:
    """Load a cluster of fakes, None if it does not exist, or raise EcompError."""
    directory = find_root() / name
    try:
        data = json.loads((directory / state.RECORD_NAME).read_text(encoding='utf-8'))
        processes = state.read_processes(data)
        del data['boot'], data['processes']
        return FakeLab(directory=directory, processes=processes, **data)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # the last for a home of another user
        return None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        path = directory / state.RECORD_NAME
        raise EcompError(f'{path} is malformed. Fix: end its processes, and remove {directory}') from error


def list_all() -> list[FakeLab]:
    root = find_root()
    paths = sorted(root.glob(f'*/{state.RECORD_NAME}')) if os.access(root, os.R_OK) else []
    return [lab for path in paths if (lab := find(path.parent.name))]


def load_or_create(name: str, count: int | None, size: str | None) -> tuple[FakeLab, bool]:
    """Load or create a cluster of at least `count` fakes, and return it and if it is new."""
    parse_inventory(size or DEFAULT_SIZE)
    _require_programs()
    lab = find(name)
    is_new = lab is None
    if lab is None:
        with socket.create_server((LOCALHOST, 0)) as etcd, socket.create_server((LOCALHOST, 0)) as placement:
            free_ports = {'etcd_port': etcd.getsockname()[1], 'placement_port': placement.getsockname()[1]}
        size = size or DEFAULT_SIZE
        lab = FakeLab(directory=find_root() / name, host_count=count or DEFAULT_COUNT, size=size, **free_ports)
    elif size not in (None, lab.size):
        raise UsageError(f'--size: the fakes of {name} have {lab.size}. Fix: `elab down --name {name}` first')
    lab.directory.mkdir(parents=True, exist_ok=True)
    lab.host_count = max(lab.host_count, count or 0)
    lab.save()
    return lab, is_new


def remove(lab: FakeLab) -> None:
    """End the hosts and then the servers, and remove the directory."""
    servers = {server.name for server in lab.servers}
    machine.terminate(process for label, process in lab.processes.items() if label not in servers)
    machine.terminate(process for label, process in lab.processes.items() if label in servers)
    state.remove_directory(lab.directory)
    with contextlib.suppress(OSError):  # there are others
        lab.directory.parent.rmdir()


def fetch_programs() -> None:
    """Unpack Debian's packages for this user if etcd or stunnel is missing."""
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
        machine.require(PROGRAMS, ['placement', 'waitress', 'cryptography'])
    except UsageError as error:
        if os.geteuid() == 0 or 'missing programs' not in str(error):
            raise
        raise UsageError(f'{error}; without root: {shlex.join([*sys.argv, "--fetch"])}') from error
