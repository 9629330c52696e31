"""The hosts of a lab: their directories, libvirtd, network and ecompute."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import sys
import uuid
from pathlib import Path

from ecomp.compute_conf import load_compute
from ecomp.conf import load_schedule
from ecomp.errors import EcompError, Unreachable
from ecomp.files import write_durably
from ecomp.lab import machine
from ecomp.lab.network import divide_resources, reduce_inventory, render_network_xml
from ecomp.lab.state import AnyLab, Lab
from ecomp.model.allocation import GIB, MIB
from ecomp.model.keys import COMPUTES
from ecomp.model.user_data import parse_public_key
from ecomp.store.client import Store

START_SECONDS = 90.0  # for libvirtd and for ecompute to become ready; then EcompError
END_SECONDS = 30.0  # for an ecompute to end after SIGTERM; then it is killed
LIBVIRT_SECONDS = 10.0  # for each answer of libvirtd; then it counts as frozen
ETCD_SECONDS = 5.0  # for each answer of etcd; then ecompute counts as absent
# QEMU's user and group in Debian's and Ubuntu's libvirt.
QEMU_USER = 'libvirt-qemu'

COMPUTE_YAML = """\
# Written once by elab. After a change, restart the host's ecompute: end it, and run `elab up`.
{backends}uuid: {compute}
state: {state}
# This host's share of the machine.
inventory:
  VCPU: {VCPU}
  MEMORY_MB: {MEMORY_MB}
  DISK_GB: {DISK_GB}
virt_type: auto
"""

QUEUES_YAML = """\
# Only this host of the lab takes requests from the flavors' queues; eschedule places instances on all hosts.
queues: True
"""
QUEUES_HOST = 'hv1'

MDSERVER_CONF = """\
# Written once by elab, for the guests of this host.
[mdserver]
user-data = user-data

[public-keys]
{keys}
"""

USER_DATA = """\
#!/bin/sh
echo "this guest's user-data ran"
"""
# Namespaces confine the lab's guests; AppArmor's profiles do not know its private directories.
QEMU_CONF = """\
security_driver = "none"
"""


class Host:
    """The ecompute of one host of a lab, or of one fake."""

    def __init__(self, lab: AnyLab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.directory = lab.directory / name
        self._certificate = lab.certs / f'compute-{name}'
        self._label, self.log = f'{name} ecompute', self.directory / 'ecompute.log'
        self._previous_revision = 0

    @property
    def address(self) -> str:
        return self.lab.address

    def share_uuid(self) -> None:
        """Copy a lab host's uuid to the file beside its certificate, or a fake's from that file."""

    def make_command(self, words: list[str]) -> list[str]:
        return [*self.lab.make_command_prefix(self.name), *words]

    def start_ecompute(self) -> None:
        """Start ecompute unless it runs, and do not wait until it is ready."""
        if not self.lab.find_running(self._label):
            # A killed ecompute's presence stays until its lease expires; it does not show that this one is ready.
            self._previous_revision = self._read_presence_revision()
            config = str(self.directory / 'compute.yaml')
            command = self.make_command([sys.executable, '-m', 'ecomp.compute', '--config', config])
            machine.start(self._label, command, self.log, record_process=self.lab.record_process)

    def wait_ecompute(self) -> None:
        process = self.lab.processes[self._label]
        machine.wait_for(self._label, self.is_ecompute_ready, process, self.log, START_SECONDS)

    def is_ecompute_ready(self) -> bool:
        """Return True if ecompute runs and has written its presence since start_ecompute()."""
        is_running = self.lab.find_running(self._label) is not None
        return is_running and self._read_presence_revision() > self._previous_revision

    def describe_state(self, etcd_answers: bool) -> str:
        if not etcd_answers and self.lab.find_running(self._label):
            return 'unknown: ecompute runs, but etcd does not answer'
        return 'ready' if self.is_ecompute_ready() else f'down: ecompute (see {self.log})'

    def _read_presence_revision(self) -> int:
        """Read the revision of the presence, or return 0 if it or etcd is absent."""
        compute, entry = self.read_uuid(), None
        with contextlib.suppress(Unreachable):
            entry = self._store.get(COMPUTES + compute) if compute is not None else None
        return entry.revision if entry else 0

    @functools.cached_property
    def _store(self) -> Store:
        return Store(load_schedule(self.lab.operator / 'schedule.yaml').etcd._replace(timeout=ETCD_SECONDS))

    def read_uuid(self) -> str | None:
        """Read the uuid of the host's ecompute, or return None if there is no valid one yet."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return str(uuid.UUID((self.directory / 'state/uuid').read_text(encoding='ascii').strip()))
        return None


class LabHost(Host):
    """A host of a lab, whose prepare(), start_… and wait_… make only what is missing."""

    lab: Lab

    @property
    def address(self) -> str:
        return str(self.lab.layout.get_address(self.name))

    def prepare(self) -> None:
        """Make the missing namespace, directories and configuration, and copy libvirt's filters."""
        if machine.ensure_host(self.lab.layout, self.name):
            # The domains in libvirt's runtime state were in a namespace that is gone, for instance after a reboot.
            shutil.rmtree(self.directory / 'run', ignore_errors=True)
        for name, target in machine.MOUNTS.items():
            private = self.directory / name
            private.mkdir(mode=0o755, parents=True, exist_ok=True)
            # A mount needs a target; without the packages' own files even the directory may be missing.
            Path(target).mkdir(parents=True, exist_ok=True)
        for name in ('images', 'dnsmasq', 'qemu', 'boot'):
            (self.directory / 'lib' / name).mkdir(exist_ok=True)
        with contextlib.suppress(LookupError):  # no such user where QEMU runs as root
            shutil.chown(self.directory / 'lib' / 'qemu', QEMU_USER, QEMU_USER)
        self._prepare_kvm()
        etc = self.directory / 'etc'
        # Of the machine's settings copy only the filters: its networks, hooks and passwords are not the lab's.
        if Path('/etc/libvirt/nwfilter').is_dir():
            shutil.copytree('/etc/libvirt/nwfilter', etc / 'nwfilter', dirs_exist_ok=True)
        write_once(etc / 'qemu.conf', QEMU_CONF)
        write_once(self.directory / 'compute.yaml', self._render_compute_yaml())
        write_once(self.directory / 'user-data', USER_DATA)
        write_once(self.directory / 'mdserver.conf', render_mdserver_conf())

    def _prepare_kvm(self) -> None:
        """Make a /dev/kvm that the host's QEMU can open, unless all users may open the machine's."""
        # Without udev the device belongs to root, and in a container its group is a number of the outer machine.
        # libvirtd can open it as root, QEMU cannot, and libvirt takes the difference for a change: it probes QEMU again
        # for every guest, which takes seconds, on a busy machine a minute.
        node = self.directory / 'dev/kvm'
        node.parent.mkdir(mode=0o700, exist_ok=True)  # only for the host: no user of the machine needs it
        with contextlib.suppress(FileNotFoundError, PermissionError):  # no KVM; devices may not be made here
            device = os.stat('/dev/kvm')
            if device.st_mode & 0o006 != 0o006 and not node.exists():
                os.mknod(node, stat.S_IFCHR, device.st_rdev)
                os.chmod(node, 0o666)  # systemd's own rule

    def share_uuid(self) -> None:
        # The role of the certificate in etcd is for the uuid beside it.
        own = load_compute(self.directory / 'compute.yaml').uuid
        target = self._certificate / 'compute.yaml'
        if load_compute(target).uuid != own:
            lines = [line for line in target.read_text(encoding='utf-8').splitlines() if not line.startswith('uuid:')]
            write_durably(target, '\n'.join([*lines, f'uuid: {own}\n']), 0o644)

    def start_libvirt(self) -> None:
        for daemon in ('virtlogd', 'libvirtd'):
            label = f'{self.name} {daemon}'
            if not self.lab.find_running(label):
                # The path of the package; the default is on another, shared file system.
                command = self.make_command([daemon, '--pid-file', f'/run/libvirt/{daemon}.pid'])
                log = self.directory / f'{daemon}.log'
                machine.start(label, command, log, record_process=self.lab.record_process)

    def wait_libvirt(self) -> None:
        """Wait until libvirtd answers, and define and start the network `default`."""
        label, log = f'{self.name} libvirtd', self.directory / 'libvirtd.log'
        machine.wait_for(label, self.is_libvirt_ready, self.lab.processes[label], log, START_SECONDS)
        definition = self.directory / 'network.xml'
        if not (self.directory / 'etc/qemu/networks/autostart/default.xml').is_symlink():
            # Always the same uuid: libvirt accepts another definition of a name only with the first one's.
            network_uuid = uuid.uuid5(uuid.NAMESPACE_URL, f'elab:{self.lab.layout.name}:{self.name}')
            xml = render_network_xml(self.lab.layout.get_guest_network(self.name), str(network_uuid))
            definition.write_text(xml, encoding='utf-8')
            self._run_virsh('net-define', str(definition))
            self._run_virsh('net-autostart', 'default')
        if not self.is_network_active():
            self._run_virsh('net-start', 'default')

    def is_libvirt_ready(self) -> bool:
        # virsh waits and retries for a missing socket; checking the file is cheap.
        if (self.directory / 'run/libvirt-sock').exists():
            with contextlib.suppress(EcompError):
                self.count_guests()
                return True
        return False

    def is_network_active(self) -> bool:
        return machine.has_interface(self.lab.layout, self.name, 'virbr0')

    def count_guests(self) -> int:
        return len(self._run_virsh('list', '--name', timeout_seconds=LIBVIRT_SECONDS).split())

    def describe_state(self, etcd_answers: bool) -> str:
        if not machine.has_interface(self.lab.layout, self.name):
            return 'down: no namespace'
        if (libvirtd := self.lab.find_running(f'{self.name} libvirtd')) is None:
            return f'down: libvirtd (see {self.directory}/libvirtd.log)'
        if not self.is_libvirt_ready():
            return f'no answer: libvirtd (pid {libvirtd.pid}, see {self.directory}/libvirtd.log)'
        if not self.is_network_active():
            return 'down: network default'
        if (ecompute := super().describe_state(etcd_answers)) != 'ready':
            return ecompute
        count, network = self.count_guests(), self.lab.layout.get_guest_network(self.name)
        return f'ready: {count} guest{"" if count == 1 else "s"}, network {network}'

    def _run_virsh(self, *words: str, timeout_seconds: float = START_SECONDS) -> str:
        command = self.make_command(['virsh', '-q', '-c', 'qemu:///system', *words])
        return machine.run(command, timeout_seconds=timeout_seconds)

    def reduce_share(self) -> bool:
        """Reduce the inventory to the current share, and on a change end ecompute and return True."""
        path = self.directory / 'compute.yaml'
        old_text = path.read_text(encoding='utf-8')
        if (new_text := reduce_inventory(old_text, self._calculate_share())) == old_text:
            return False
        write_durably(path, new_text, 0o644)
        process = self.lab.find_running(self._label)
        machine.terminate([process] if process else [], END_SECONDS)
        return True

    def _calculate_share(self) -> dict[str, int]:
        memory_mb = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // MIB
        free_gb = shutil.disk_usage(self.lab.directory).free // GIB
        return divide_resources(os.cpu_count() or 1, memory_mb, free_gb, self.lab.host_count)

    def _render_compute_yaml(self) -> str:
        text = COMPUTE_YAML.format(
            backends=self.lab.render_backends(self._certificate),
            compute=self.read_uuid() or uuid.uuid4(),
            state=self.directory / 'state',
            **self._calculate_share(),
        )
        return text + QUEUES_YAML if self.name == QUEUES_HOST else text


def write_once(path: Path, text: str) -> None:
    if not path.exists():
        write_durably(path, text, 0o644)


def render_mdserver_conf() -> str:
    """Render mdserver.conf with the first usable ssh key of sudo's caller or of this user."""
    homes = [Path.home()]
    if caller := os.environ.get('SUDO_USER'):
        with contextlib.suppress(RuntimeError):  # the user was removed
            homes.insert(0, Path(f'~{caller}').expanduser())
    for path in (path for home in homes for path in sorted(home.glob('.ssh/*.pub'))):
        # *.pub also matches unreadable files and keys in PuTTY's format.
        with contextlib.suppress(OSError, ValueError):
            key = parse_public_key(path.read_text(encoding='utf-8').partition('\n')[0].split())
            if '-cert-v' not in key.split()[0]:  # a client presents a certificate; authorized_keys lists none
                return MDSERVER_CONF.format(keys=f'default = {key}')
    return MDSERVER_CONF.format(keys='# default = ssh-ed25519 AAAA... me@here')
