"""What a lab has made, on disk, so that all of it can be found and removed after any crash.

Everything is written to lab.json before it is made, a process when it has a pid and before it runs its program; and
whatever runs is in one of the lab's namespaces, whose names follow from the lab's, so that even a pid nobody wrote down
is found.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

from ecomp.errors import EcompError, NotFound
from ecomp.files import boot_id, write_durably
from ecomp.lab import machine
from ecomp.lab.machine import Process
from ecomp.lab.network import CONTROL, Layout, choose_network, host_names, routed_networks

VERSION = 2
ROOT = Path('/var/lib/elab')
OPERATOR = 'lab'


@dataclass
class Lab:
    """One lab: its `directory`, how many hosts it has, and the process last started for each of its servers."""

    directory: Path
    layout: Layout
    count: int
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def certs(self) -> Path:
        """The directory `elab certs` makes: for etcd, placement, each host's ecompute and this machine's eschedule."""
        return self.directory / 'certs'

    @property
    def operator(self) -> Path:
        """The directory with the certificate and the token of eschedule on this machine."""
        return self.certs / f'operator-{OPERATOR}'

    @property
    def hosts(self) -> list[str]:
        return host_names(self.count)

    @property
    def places(self) -> list[str]:
        return [CONTROL, *self.hosts]

    def running(self, what: str) -> Process | None:
        """The process started as `what`; None if it has ended, or none was."""
        process = self.processes.get(what)
        return process if process is not None and machine.alive(process) else None

    def remember(self, what: str, process: Process) -> None:
        """Write down in lab.json that `what` is this process now."""
        self.processes[what] = process
        self.save()

    def save(self) -> None:
        """Write lab.json, whole or not at all."""
        layout = self.layout
        data = {
            'version': VERSION,
            'name': layout.name,
            'network': str(layout.network),
            'hosts': self.count,
            'etcd': layout.etcd,
            'placement': layout.placement,
            'images': layout.images,
            'addresses': {CONTROL: str(layout.control), **{host: str(layout.address(host)) for host in self.hosts}},
            'guests': {host: str(layout.guests(host)) for host in self.hosts},
            'namespaces': [layout.namespace(place) for place in self.places],
            'link': layout.link,
            'boot': boot_id(),
            'processes': {what: asdict(process) for what, process in self.processes.items()},
        }
        write_durably(self.directory / 'lab.json', json.dumps(data, indent=1), 0o644)


def load(name: str, root: Path = ROOT) -> Lab:
    """The lab of that name. NotFound if there is none, EcompError if its lab.json is none that this elab can read."""
    directory = root / name
    path = directory / 'lab.json'
    try:
        data = json.loads(path.read_text(encoding='utf-8'))
        version = data['version']
        if version != VERSION:
            raise EcompError(
                f'{path} is of version {version}, and this elab knows {VERSION}: elab down --name {name}, then elab up'
            )
        # Start times count from the boot: after another one they say nothing.
        recorded = data['processes'] if data['boot'] == boot_id() else {}
        processes = {what: Process(**process) for what, process in recorded.items()}
        return Lab(directory, Layout(name, IPv4Network(data['network'])), int(data['hosts']), processes)
    except FileNotFoundError as error:
        there = [each.layout.name for each in all_labs(root)]
        more = f' (there is {", ".join(there)})' if there else ''
        raise NotFound(f'there is no lab {name!r}{more}: elab up --name {name} makes one') from error
    except OSError as error:
        raise EcompError(f'{path}: {error.strerror}') from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EcompError(f'{path} is not what elab wrote: elab down --name {name} removes the lab') from error


def load_or_create(name: str, count: int | None) -> Lab:
    """The lab of that name with at least `count` hosts, written to lab.json; nothing else of it is made.

    None means as many hosts as it has, 3 for a new one.
    """
    with contextlib.suppress(NotFound):
        lab = load(name)
        lab.count = max(lab.count, count or 0)
        lab.save()
        return lab
    with locked(ROOT):  # two labs that choose at once must not choose the same
        routes = json.loads(machine.run(['ip', '-json', '-4', 'route', 'show', 'table', 'all']) or '[]')
        taken = routed_networks(routes) + [lab.layout.network for lab in all_labs()]
        lab = Lab(ROOT / name, Layout(name, choose_network(taken)), count or 3)
        lab.save()
    return lab


def all_labs(root: Path = ROOT) -> list[Lab]:
    """Every lab on this machine that load() can read; one of another version that is up is seen by its routes."""
    found = []
    for path in sorted(root.glob('*/lab.json')):
        with contextlib.suppress(EcompError):
            found.append(load(path.parent.name, root))
    return found


@contextlib.contextmanager
def locked(directory: Path, busy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock on a directory, made if missing; `busy` is called once if another process holds it.

    The kernel lets the lock go with the process, however that ends.
    """
    directory = directory.resolve()  # of a link to nothing, what it names is made
    while True:
        # Raised of a directory that is removed before mkdir looks at it; what is none cannot be opened as one.
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Whoever had the lock before may have removed the directory: then this is the lock of nothing.
            if _is_at(descriptor, directory):
                yield
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
