"""The record of a lab on disk, by which all of it can be found and removed after a crash.

Everything is written to lab.json before it is made, and a process before it runs its program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, ClassVar

from ecomp.errors import EcompError, NotFound, UsageError
from ecomp.files import get_part_path, read_boot_id, write_durably
from ecomp.lab import control, machine, network
from ecomp.lab.control import LOCALHOST, Endpoints, LabServer
from ecomp.lab.machine import ServerProcess

FORMAT_VERSION = 2
ROOT = Path('/var/lib/elab')
OPERATOR = 'lab'
RECORD_NAME = 'lab.json'
# Names that may exist in a lab's directory before the lab does: elab makes what is missing.
PREPARED_NAMES = r'hv[0-9]+|control|certs|images|schedule\.yaml'
MOUNTINFO = Path('/proc/self/mountinfo')

SCHEDULE_YAML = """\
# Written once by elab. With this file, in this directory or with --config, eschedule uses the lab {name}.
{backends}\
# The image that `elab guest {directory}/images/guest.qcow2` makes. The lab's hosts cannot fetch images from elsewhere.
image: {images}guest.qcow2
# ssh cannot find the lab's hosts.
reach: {reach}
"""

FAKES_SCHEDULE_YAML = """\
# Written once by elab. With this file, in this directory or with --config, eschedule uses the fakes of {name}.
{backends}\
# Fakes accept the URL of any image, and fetch none.
image: http://images.example/debian-12.qcow2
"""


@dataclass(kw_only=True)
class LabRecord:
    """What a lab and a cluster of fakes have in common."""

    directory: Path
    host_count: int
    processes: dict[str, ServerProcess] = field(default_factory=dict)
    # The names of the hosts are this and a number.
    host_prefix: ClassVar[str]
    address: str = field(default=LOCALHOST, init=False)
    etcd_port: int
    placement_port: int

    @property
    def placement(self) -> str:
        return f'https://{self.address}:{self.placement_port}'

    def render_backends(self, certificate: Path) -> str:
        return network.render_backends(self.address, self.etcd_port, self.placement, f'{certificate}/')

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def hosts(self) -> list[str]:
        return [f'{self.host_prefix}{number}' for number in range(1, self.host_count + 1)]

    @property
    def certs(self) -> Path:
        return self.directory / 'certs'

    @property
    def operator(self) -> Path:
        """The directory of the certificate and token of this machine's eschedule."""
        return self.certs / f'operator-{OPERATOR}'

    def find_running(self, label: str) -> ServerProcess | None:
        process = self.processes.get(label)
        return process if process is not None and machine.is_alive(process) else None

    def record_process(self, label: str, process: ServerProcess) -> None:
        """Record that `label` is this process, here and in lab.json."""
        self.processes[label] = process
        self.save()

    def make_command_prefix(self, _place: str) -> list[str]:
        """Make the words before a command that run it in a host or `control`."""
        return []

    @abstractmethod
    def save(self) -> None:
        """Write lab.json atomically and durably."""


@dataclass(kw_only=True)
class Lab(LabRecord):
    layout: network.Layout
    host_prefix = 'hv'
    etcd_port: int = network.ETCD_PORT
    placement_port: int = network.PLACEMENT_PORT

    def __post_init__(self) -> None:
        self.address = str(self.layout.control)

    @property
    def servers(self) -> list[LabServer]:
        place = self.directory / network.CONTROL
        return control.make_lab_servers(self.layout, place, self.directory / 'images', self.certs)

    def make_command_prefix(self, place: str) -> list[str]:
        prefix = ['ip', 'netns', 'exec', self.layout.get_namespace(place)]
        if place == network.CONTROL:
            return prefix
        directory = str(self.directory / place)
        return [*prefix, 'unshare', '--mount', '--uts', 'sh', '-c', machine.ENTER_SCRIPT, place, directory]

    def render_schedule_yaml(self) -> str:
        sudo = ['sudo'] if 'SUDO_UID' in os.environ else []
        words = [*sudo, sys.executable, '-P', '-m', 'ecomp.lab.elab', 'exec', '--name', self.name]
        return SCHEDULE_YAML.format(
            name=self.name,
            backends=self.render_backends(self.operator),
            directory=self.directory,
            images=self.layout.images,
            reach=json.dumps(f'{shlex.join(words)} {{host}}'),
        )

    def save(self) -> None:
        # Our tests and benchmarks, too, find the lab's addresses here.
        data = {
            'version': FORMAT_VERSION,
            'network': str(self.layout.network),
            'hosts': self.host_count,
            'etcd': f'{self.address}:{self.etcd_port}',
            'placement': self.placement,
            'images': self.layout.images,
            'link': self.layout.link,
            'boot': read_boot_id(),
            'processes': {label: asdict(process) for label, process in self.processes.items()},
        }
        write_durably(self.directory / RECORD_NAME, json.dumps(data, indent=1), 0o644)


@dataclass(kw_only=True)
class FakeLab(LabRecord):
    size: str
    host_prefix = 'fake'

    @property
    def servers(self) -> list[LabServer]:
        data = self.directory / network.CONTROL
        return control.make_servers(Endpoints(self.etcd_port, self.placement_port, data, certs=self.certs))

    def render_schedule_yaml(self) -> str:
        return FAKES_SCHEDULE_YAML.format(name=self.name, backends=self.render_backends(self.operator))

    def save(self) -> None:
        data = {name: value for name, value in asdict(self).items() if name not in ('directory', 'address')}
        write_durably(self.directory / RECORD_NAME, json.dumps({**data, 'boot': read_boot_id()}, indent=1), 0o644)


AnyLab = Lab | FakeLab


def read_processes(record: dict[str, Any]) -> dict[str, ServerProcess]:
    """Return the processes in a parsed lab.json, {} after a reboot."""
    # Start times count from the boot: after a reboot they are meaningless.
    recorded = record['processes'] if record['boot'] == read_boot_id() else {}
    return {label: ServerProcess(**process) for label, process in recorded.items()}


def load(name: str, root: Path = ROOT) -> Lab:
    """Load a lab, or raise NotFound, or EcompError if its lab.json is malformed or unsupported."""
    directory = root / name
    path = directory / RECORD_NAME
    try:
        data = json.loads(path.read_text(encoding='utf-8'))
        if (version := data['version']) != FORMAT_VERSION:
            problem = f'{path} has format version {version}, but this elab supports only version {FORMAT_VERSION}'
            raise EcompError(f'{problem}. Fix: `elab down --name {name}`, then `elab up --name {name}`')
        layout, host_count = network.Layout(name, IPv4Network(data['network'])), int(data['hosts'])
        return Lab(directory=directory, layout=layout, host_count=host_count, processes=read_processes(data))
    except FileNotFoundError as error:
        names = [lab.layout.name for lab in list_labs(root)]
        hint = f' (existing labs: {", ".join(names)})' if names else ''
        raise NotFound(f'lab {name!r} does not exist{hint}. Try: elab up --name {name}') from error
    except OSError as error:
        raise EcompError(f'{path}: {error.strerror}') from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EcompError(f'{path} is malformed. Fix: remove the lab with `elab down --name {name}`') from error


def load_or_create(name: str, host_count: int | None) -> Lab:
    """Load the lab or choose its network, and save lab.json with at least `host_count` hosts.

    The caller holds the lab's lock. None means the current number, or 3 for a new lab. UsageError is raised for a
    directory that contains other files.
    """
    with contextlib.suppress(NotFound):
        lab = load(name)
        lab.host_count = max(lab.host_count, host_count or 0)
        lab.save()
        return lab
    directory = ROOT / name
    # A killed write of lab.json leaves its temporary file. Files prepared for a lab are not accepted behind a link.
    part = re.escape(get_part_path(Path(RECORD_NAME)).name)
    allowed = re.compile(part if directory.is_symlink() else f'{part}|{PREPARED_NAMES}')
    # remove_directory() would delete all other files.
    if not all(allowed.fullmatch(path.name) for path in directory.glob('*')):
        problem = f'{directory} is not empty, but `elab down` would remove its content'
        raise UsageError(f'{problem}. Fix: move the content away, or make {directory} a link to an empty directory')
    with machine.hold_lock(ROOT):  # two labs created concurrently must not choose the same network
        routes = json.loads(machine.run(['ip', '-json', '-4', 'route', 'show', 'table', 'all']) or '[]')
        used_networks = network.parse_routed_networks(routes) + [lab.layout.network for lab in list_labs()]
        layout = network.Layout(name, network.choose_network(used_networks))
        lab = Lab(directory=directory, layout=layout, host_count=host_count or 3)
        lab.save()
    return lab


def unmount_all(directory: Path) -> list[Path]:
    """Unmount everything below a lab's directory, and return the mount points."""
    # Removing the directory would delete the files there. The lab's own mounts are in its namespaces, invisible here.
    if not _belongs_to_lab(directory):
        return []
    top = directory.resolve()
    mount_points: list[Path] = []
    for line in MOUNTINFO.read_text(encoding='utf-8', errors='surrogateescape').splitlines():
        # A space, tab, newline or backslash is an octal escape: proc_pid_mountinfo(5).
        mount_point = Path(re.sub(r'\\([0-7]{3})', lambda match: chr(int(match[1], 8)), line.split(' ')[4]))
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
    """Remove a lab's directory, or a link to it, but keep a target that has no lab.json."""
    try:
        if _belongs_to_lab(directory):
            target = directory.resolve()
            for path in target.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != RECORD_NAME:
                    path.unlink()
            # This is last, so that a repetition still removes a link's target.
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
    """Return the name of the lab that contains the working directory, or else $ECOMP_CONFIG."""
    places = [os.environ.get('ECOMP_CONFIG', '/')]
    with contextlib.suppress(OSError):  # the working directory may have been removed
        places.insert(0, os.getcwd())
    for place in map(os.path.realpath, places):
        for directory in (path for root in roots if os.access(root, os.R_OK) for path in root.glob('*')):
            if directory.resolve() in (Path(place), *Path(place).parents):
                return directory.name
    return None


def list_labs(root: Path = ROOT) -> list[Lab]:
    """Load every lab that load() accepts, sorted by name."""
    labs = []
    for path in sorted(root.glob(f'*/{RECORD_NAME}')):
        with contextlib.suppress(EcompError):
            labs.append(load(path.parent.name, root))
    return labs
