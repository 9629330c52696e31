"""The record of a lab on disk, by which all of it can be found and removed after a crash.

Everything is written to lab.json before it is made, and a process before it runs its program.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

from ecomp.errors import EcompError, NotFound, UsageError
from ecomp.files import get_part_path, read_boot_id, write_durably
from ecomp.lab import machine
from ecomp.lab.machine import ServerProcess
from ecomp.lab.network import CONTROL, Layout, choose_network, list_host_names, parse_routed_networks

FORMAT_VERSION = 2
ROOT = Path('/var/lib/elab')
OPERATOR = 'lab'
RECORD_NAME = 'lab.json'
# Names that may exist in a lab's directory before the lab does: elab makes what is missing.
PREPARED_NAMES = r'hv[0-9]+|control|certs|images|schedule\.yaml'
MOUNTINFO = Path('/proc/self/mountinfo')


class LabRecord:
    """What a lab and a cluster of fakes have in common: a directory, and each server's last process by label."""

    directory: Path
    host_count: int
    processes: dict[str, ServerProcess]

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    @abstractmethod
    def hosts(self) -> list[str]: ...

    @property
    def places(self) -> list[str]:
        return [CONTROL, *self.hosts]

    @property
    def certs(self) -> Path:
        return self.directory / 'certs'

    @property
    def operator(self) -> Path:
        """The directory of the certificate and token of this machine's eschedule."""
        return self.certs / f'operator-{OPERATOR}'

    def find_running(self, label: str) -> ServerProcess | None:
        """Find the running process started as `label`; None if it has ended or was never started."""
        process = self.processes.get(label)
        return process if process is not None and machine.is_alive(process) else None

    def record_process(self, label: str, process: ServerProcess) -> None:
        """Record that `label` is this process, here and in lab.json. Raises OSError."""
        self.processes[label] = process
        self.save()

    @abstractmethod
    def save(self) -> None:
        """Write lab.json atomically and durably. Raises OSError."""


@dataclass
class Lab(LabRecord):
    """A lab: its directory, its number of hosts, and each server's last process by label."""

    directory: Path
    layout: Layout
    host_count: int
    processes: dict[str, ServerProcess] = field(default_factory=dict)

    @property
    def hosts(self) -> list[str]:
        return list_host_names(self.host_count)

    def save(self) -> None:
        layout = self.layout
        data = {
            'version': FORMAT_VERSION,
            'name': layout.name,
            'network': str(layout.network),
            'hosts': self.host_count,
            'etcd': layout.etcd,
            'placement': layout.placement,
            'images': layout.images,
            'addresses': {CONTROL: str(layout.control), **{host: str(layout.get_address(host)) for host in self.hosts}},
            'guests': {host: str(layout.get_guest_network(host)) for host in self.hosts},
            'namespaces': [layout.get_namespace(place) for place in self.places],
            'link': layout.link,
            'boot': read_boot_id(),
            'processes': {label: asdict(process) for label, process in self.processes.items()},
        }
        write_durably(self.directory / RECORD_NAME, json.dumps(data, indent=1), 0o644)


def load(name: str, root: Path = ROOT) -> Lab:
    """Load the lab; after a reboot it has no processes. NotFound without lab.json, EcompError if that is unusable."""
    directory = root / name
    path = directory / RECORD_NAME
    try:
        data = json.loads(path.read_text(encoding='utf-8'))
        version = data['version']
        if version != FORMAT_VERSION:
            raise EcompError(
                f'{path} has format version {version}, but this elab supports only version {FORMAT_VERSION}. '
                f'Fix: `elab down --name {name}`, then `elab up --name {name}`'
            )
        # Start times count from the boot: after a reboot they are meaningless.
        recorded = data['processes'] if data['boot'] == read_boot_id() else {}
        processes = {label: ServerProcess(**process) for label, process in recorded.items()}
        return Lab(directory, Layout(name, IPv4Network(data['network'])), int(data['hosts']), processes)
    except FileNotFoundError as error:
        names = [lab.layout.name for lab in list_labs(root)]
        hint = f' (existing labs: {", ".join(names)})' if names else ''
        raise NotFound(f'lab {name!r} does not exist{hint}. Try: elab up --name {name}') from error
    except OSError as error:
        raise EcompError(f'{path}: {error.strerror}') from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EcompError(f'{path} is malformed. Fix: remove the lab with `elab down --name {name}`') from error


def load_or_create(name: str, host_count: int | None) -> Lab:
    """Load the lab or choose its network, and save lab.json with at least `host_count` hosts; make nothing else.

    The caller holds the lab's lock. None means the current number, 3 for a new lab. Raises UsageError if a new lab's
    directory has foreign files, which remove_directory() would delete.
    """
    with contextlib.suppress(NotFound):
        lab = load(name)
        lab.host_count = max(lab.host_count, host_count or 0)
        lab.save()
        return lab
    directory = ROOT / name
    # A killed write of lab.json leaves its temporary file. Files prepared for a lab are not accepted behind a link.
    allowed = re.compile(
        re.escape(get_part_path(Path(RECORD_NAME)).name) + ('' if directory.is_symlink() else f'|{PREPARED_NAMES}')
    )
    if not all(allowed.fullmatch(path.name) for path in directory.glob('*')):
        problem = f'{directory} is not empty, but `elab down` would remove its content'
        raise UsageError(f'{problem}. Fix: move the content away, or make {directory} a link to an empty directory')
    with hold_lock(ROOT):  # two labs created concurrently must not choose the same network
        routes = json.loads(machine.run(['ip', '-json', '-4', 'route', 'show', 'table', 'all']) or '[]')
        used_networks = parse_routed_networks(routes) + [lab.layout.network for lab in list_labs()]
        lab = Lab(directory, Layout(name, choose_network(used_networks)), host_count or 3)
        lab.save()
    return lab


def unmount_all(directory: Path) -> list[Path]:
    """Unmount everything below a lab's directory, whose removal would delete the files there; return the mount points.

    No-op for a symbolic link whose target has no lab.json. The lab's own mounts are in its namespaces, invisible here.
    """
    if not _belongs_to_lab(directory):
        return []
    top = directory.resolve()
    mount_points: list[Path] = []
    for line in MOUNTINFO.read_text(encoding='utf-8', errors='surrogateescape').splitlines():
        # A space, tab, newline or backslash is an octal escape: proc_pid_mountinfo(5).
        mount_point = Path(re.sub(r'\\([0-7]{3})', lambda found: chr(int(found[1], 8)), line.split(' ')[4]))
        if top in mount_point.parents:
            # The last one mounted may lie on another.
            mount_points.insert(0, mount_point)
    for mount_point in mount_points:
        try:
            # Lazily: a shell whose working directory is there would prevent it.
            machine.run(['umount', '--lazy', str(mount_point)])
        except EcompError as error:
            raise _make_removal_error(directory, f'{mount_point} is a mount: {error}') from error
    return mount_points


def remove_directory(directory: Path) -> None:
    """Remove a lab's directory; for a link, remove the link, and its target only if that has a lab.json.

    lab.json is removed last, so that a repetition still removes a link's target. Raises EcompError, also if missing.
    """
    try:
        if _belongs_to_lab(directory):
            target = directory.resolve()
            for path in target.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != RECORD_NAME:
                    path.unlink()
            (target / RECORD_NAME).unlink(missing_ok=True)
            target.rmdir()
        if directory.is_symlink():
            directory.unlink()
    except OSError as error:
        raise _make_removal_error(directory, f'{error.filename}: {error.strerror}') from error


def _belongs_to_lab(directory: Path) -> bool:
    return not directory.is_symlink() or (directory / RECORD_NAME).exists()


def _make_removal_error(directory: Path, reason: str) -> EcompError:
    fix = 'unmount what is mounted below that directory, and run `elab down` again'
    return EcompError(f'{directory} cannot be removed completely: {reason}. Fix: {fix}')


def find_lab_name(roots: Sequence[Path]) -> str | None:
    """Return the name of the lab that contains the working directory, or else $ECOMP_CONFIG; None if none does."""
    places = [os.environ.get('ECOMP_CONFIG', '/')]
    with contextlib.suppress(OSError):  # the working directory may have been removed
        places.insert(0, os.getcwd())
    for place in map(os.path.realpath, places):
        for directory in (path for root in roots if os.access(root, os.R_OK) for path in root.glob('*')):
            if directory.resolve() in (Path(place), *Path(place).parents):
                return directory.name
    return None


def list_labs(root: Path = ROOT) -> list[Lab]:
    """Load every lab that load() accepts, sorted by name; leave out the others."""
    labs = []
    for path in sorted(root.glob(f'*/{RECORD_NAME}')):
        with contextlib.suppress(EcompError):
            labs.append(load(path.parent.name, root))
    return labs


@contextlib.contextmanager
def hold_lock(directory: Path, on_busy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lock a directory, made if missing; if another process has the lock, call `on_busy` and wait without a limit.

    Not reentrant. The kernel releases the lock when the process ends, even by a kill. OSError for a bad directory.
    """
    directory = directory.resolve()  # for a dangling link its target is made
    while True:
        # It may have been removed before mkdir checked it. A path that is not a directory fails in os.open().
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
                on_busy()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The previous holder may have removed the directory: then this lock protects nothing.
            if _is_same_file(descriptor, directory):
                yield
                return
        finally:
            os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    return False
