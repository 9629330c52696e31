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
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

from ecomp.errors import EcompError, NotFound, UsageError
from ecomp.files import boot_id, part_of, write_durably
from ecomp.lab import machine
from ecomp.lab.machine import Process
from ecomp.lab.network import CONTROL, Layout, choose_network, host_names, routed_networks

VERSION = 2
ROOT = Path('/var/lib/elab')
OPERATOR = 'lab'
RECORD = 'lab.json'
PREPARED = r'hv[0-9]+|control|certs|images|schedule\.yaml'
"""What somebody may have put into a lab's directory before it is made: elab makes what is missing of it."""
MOUNTINFO = Path('/proc/self/mountinfo')


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
        write_durably(self.directory / RECORD, json.dumps(data, indent=1), 0o644)


def load(name: str, root: Path = ROOT) -> Lab:
    """The lab of that name. NotFound if there is none, EcompError if its lab.json is none that this elab can read."""
    directory = root / name
    path = directory / RECORD
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

    None means as many hosts as it has, 3 for a new one. UsageError for a new one where something is that
    is of no lab: remove() would take that with it.
    """
    with contextlib.suppress(NotFound):
        lab = load(name)
        lab.count = max(lab.count, count or 0)
        lab.save()
        return lab
    directory = ROOT / name
    # A write of lab.json that was killed leaves its part. What is put there for a lab, and not behind a link, is taken.
    taken_over = re.compile(re.escape(part_of(Path(RECORD)).name) + ('' if directory.is_symlink() else f'|{PREPARED}'))
    if not all(taken_over.fullmatch(each.name) for each in directory.glob('*')):
        why = f'{directory} is not empty, and elab down would remove all that is in it'
        raise UsageError(f'{why}: move that away, or make {directory} a link to an empty directory')
    with locked(ROOT):  # two labs that choose at once must not choose the same
        routes = json.loads(machine.run(['ip', '-json', '-4', 'route', 'show', 'table', 'all']) or '[]')
        taken = routed_networks(routes) + [lab.layout.network for lab in all_labs()]
        lab = Lab(directory, Layout(name, choose_network(taken)), count or 3)
        lab.save()
    return lab


def check_removable(directory: Path) -> None:
    """EcompError if something is mounted below a lab's directory: it is not the lab's, and remove() would empty it.

    What the lab itself mounts is in namespaces of its own, and not seen from here. proc_pid_mountinfo(5)
    """
    if not _is_a_lab_s(directory):
        return
    top = directory.resolve()
    for line in MOUNTINFO.read_text(encoding='utf-8', errors='surrogateescape').splitlines():
        # A blank, a tab, a newline and a backslash are written as octal numbers.
        where = Path(re.sub(r'\\([0-7]{3})', lambda found: chr(int(found[1], 8)), line.split(' ')[4]))
        if top in where.parents:
            raise _not_whole(directory, f'{where} is a mount')


def remove(directory: Path) -> None:
    """Remove a lab's directory, and the link if it is behind one. EcompError.

    lab.json goes last: as long as there is something of a lab behind a link, that says whose it is.
    """
    try:
        if _is_a_lab_s(directory):
            there = directory.resolve()
            for each in there.iterdir():
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each)
                elif each.name != RECORD:
                    each.unlink()
            (there / RECORD).unlink(missing_ok=True)
            there.rmdir()
        if directory.is_symlink():
            directory.unlink()
    except OSError as error:
        raise _not_whole(directory, f'{error.filename}: {error.strerror}') from error


def _is_a_lab_s(directory: Path) -> bool:
    # A lab may be on another disk, behind a link; what never was one is somebody's.
    return not directory.is_symlink() or (directory / RECORD).exists()


def _not_whole(directory: Path, why: str) -> EcompError:
    return EcompError(
        f'{directory} cannot be removed whole ({why}): unmount what is mounted there, and say elab down again'
    )


def find_lab_here() -> str:
    """Find the name of the lab of the working directory, or of the `elab shell` that this runs in; else `lab`."""
    places = [os.environ.get('ECOMP_CONFIG', '/')]
    with contextlib.suppress(OSError):  # the working directory may be removed
        places.insert(0, os.getcwd())
    for place in map(os.path.realpath, places):
        for directory in ROOT.glob('*'):
            if directory.resolve() in (Path(place), *Path(place).parents):
                return directory.name
    return 'lab'


def all_labs(root: Path = ROOT) -> list[Lab]:
    """Every lab on this machine that load() can read; one of another version that is up is seen by its routes."""
    found = []
    for path in sorted(root.glob(f'*/{RECORD}')):
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
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    return False
