"""One hypervisor host of a lab: its private directories, its virtlogd and libvirtd, its network, its ecompute."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import sys
import uuid
from pathlib import Path

from ecomp.conf import EtcdConfig, load_compute
from ecomp.errors import EcompError, Unreachable
from ecomp.lab import machine, namespaces
from ecomp.lab.network import network_xml, share
from ecomp.lab.state import Lab
from ecomp.model.keys import COMPUTES
from ecomp.store.client import Store

START_SECONDS = 90.0
ETCD_SECONDS = 5.0
MIB = 1024**2
GIB = 1024**3

# The group and user QEMU runs as, in Debian's and Ubuntu's libvirt.
QEMU_USER = 'libvirt-qemu'

COMPUTE_YAML = """\
# Written once by elab; change it as you like and start the host's ecompute again (elab up does, when it has ended).
etcd:
  host: {etcd_host}
  port: {etcd_port}
  ca_cert: {own}/ca.crt
  cert_cert: {own}/client.crt
  cert_key: {own}/client.key
placement:
  endpoint: {placement}
  ca_cert: {own}/ca.crt
  cert_cert: {own}/client.crt
  cert_key: {own}/client.key
  token_file: {own}/token
uuid: {compute}
state: {state}
# This host's share of the machine.
inventory:
  VCPU: {VCPU}
  MEMORY_MB: {MEMORY_MB}
  DISK_GB: {DISK_GB}
virt_type: auto
"""

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

# The lab confines its guests by namespaces; AppArmor's profiles do not know its private directories.
QEMU_CONF = """\
security_driver = "none"
"""


class Host:
    """A host of a lab. Each method makes what is missing; done already is success. EcompError."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.directory = lab.directory / name
        self.log = self.directory / 'ecompute.log'
        self._older = 0

    def command(self, words: list[str]) -> list[str]:
        """These words as a command inside the host."""
        return [*namespaces.inside(self.lab.layout, self.lab.directory, self.name), *words]

    def prepare(self) -> None:
        """Its namespace, and its files: libvirt's private directories, compute.yaml and mdserver.conf (once)."""
        if namespaces.ensure_host(self.lab.layout, self.name):
            # What libvirt believes to be running was in a namespace that is gone, with a boot of the machine for one.
            shutil.rmtree(self.directory / 'run', ignore_errors=True)
        for name, target in namespaces.MOUNTS.items():
            private = self.directory / name
            private.mkdir(mode=0o755, parents=True, exist_ok=True)
            # A mount needs something to be over; without the packages' own files even the directory may be missing.
            Path(target).mkdir(parents=True, exist_ok=True)
        for name in ('images', 'dnsmasq', 'qemu', 'boot'):
            (self.directory / 'lib' / name).mkdir(exist_ok=True)
        with contextlib.suppress(LookupError):  # where QEMU runs as root there is no such user
            shutil.chown(self.directory / 'lib' / 'qemu', QEMU_USER, QEMU_USER)
        self._prepare_kvm()
        etc = self.directory / 'etc'
        # Of the machine's settings only the filters: its networks, hooks and passwords are not the lab's.
        if Path('/etc/libvirt/nwfilter').is_dir():
            shutil.copytree('/etc/libvirt/nwfilter', etc / 'nwfilter', dirs_exist_ok=True)
        _write_once(etc / 'qemu.conf', QEMU_CONF)
        _write_once(self.directory / 'compute.yaml', self._compute_yaml())
        _write_once(self.directory / 'user-data', USER_DATA)
        _write_once(self.directory / 'mdserver.conf', MDSERVER_CONF.format(keys=_public_keys()))

    def _prepare_kvm(self) -> None:
        """A /dev/kvm that QEMU may open, where the machine's own is not everybody's.

        Where nobody ran udev it is root's, and in a container its group is a number of the machine around it. libvirtd,
        root, can open that, QEMU cannot, and libvirt takes the difference for a change: it probes QEMU anew for every
        guest, which takes seconds, on a busy machine a minute. The machine's own device is left as it is.
        """
        node = self.directory / 'dev/kvm'
        node.parent.mkdir(mode=0o700, exist_ok=True)  # for the host alone: whoever is on the machine has no use for it
        with contextlib.suppress(FileNotFoundError, PermissionError):  # no KVM; nobody may make devices
            device = os.stat('/dev/kvm')
            if device.st_mode & 0o006 != 0o006 and not node.exists():
                os.mknod(node, stat.S_IFCHR, device.st_rdev)
                os.chmod(node, 0o666)  # systemd's own rule

    def takes_role(self) -> bool:
        """Have its certificate's role be that of the compute its compute.yaml names now; False where that names none.

        As what an earlier elab wrote does, whose ecomputes may run, too.
        """
        own = load_compute(self.directory / 'compute.yaml').uuid
        told = self._certificate / 'compute.yaml'
        if own is not None and load_compute(told).uuid != own:
            lines = [line for line in told.read_text(encoding='utf-8').splitlines() if not line.startswith('uuid:')]
            _write(told, '\n'.join([*lines, f'uuid: {own}\n']))
        return own is not None

    def start_libvirt(self) -> None:
        """virtlogd and libvirtd, started; not waited for."""
        for daemon in ('virtlogd', 'libvirtd'):
            what = f'{self.name} {daemon}'
            if not self.lab.running(what):
                # Where the package puts it; its own default is on another file system, and shared.
                command = self.command([daemon, '--pid-file', f'/run/libvirt/{daemon}.pid'])
                self.lab.remember(what, machine.start(what, command, self.directory / f'{daemon}.log', self.directory))

    def wait_libvirt(self) -> None:
        """Until libvirtd answers; then its network runs."""
        process = self.lab.processes[f'{self.name} libvirtd']
        machine.wait_for(
            f'{self.name} libvirtd', self.libvirt_answers, process, self.directory / 'libvirtd.log', START_SECONDS
        )
        definition = self.directory / 'network.xml'
        if not (self.directory / 'etc/qemu/networks/autostart/default.xml').is_symlink():
            # The same uuid every time: libvirt takes a second definition of a name only under the first one's.
            own = uuid.uuid5(uuid.NAMESPACE_URL, f'elab:{self.lab.layout.name}:{self.name}')
            definition.write_text(network_xml(self.lab.layout.guests(self.name), str(own)), encoding='utf-8')
            self._virsh('net-define', str(definition))
            self._virsh('net-autostart', 'default')
        if not self.network_runs():
            self._virsh('net-start', 'default')

    def libvirt_answers(self) -> bool:
        """Whether libvirtd answers a question about its domains."""
        # virsh waits and retries by itself for a socket that is not there; the file costs nothing to look at.
        if not (self.directory / 'run/libvirt-sock').exists():
            return False
        try:
            self._virsh('list', '--name')
        except EcompError:
            return False
        return True

    def network_runs(self) -> bool:
        """Whether the bridge of the network `default` is there."""
        return namespaces.has_interface(self.lab.layout, self.name, 'virbr0')

    def guests(self) -> int:
        """How many domains run."""
        return len(self._virsh('list', '--name').split())

    def start_ecompute(self) -> None:
        """ecompute, started; not waited for."""
        what = f'{self.name} ecompute'
        if not self.lab.running(what):
            # The key of one that was killed stays until its lease ends, and says nothing about this one.
            self._older = self._presence()
            words = [sys.executable, '-m', 'ecomp.compute', '--config', str(self.directory / 'compute.yaml')]
            command = self.command(words)
            self.lab.remember(what, machine.start(what, command, self.log, self.directory))

    def wait_ecompute(self) -> None:
        """Until it says in etcd that it is there."""
        process = self.lab.processes[f'{self.name} ecompute']
        machine.wait_for(f'{self.name} ecompute', self.ecompute_answers, process, self.log, START_SECONDS)

    def ecompute_answers(self) -> bool:
        """Whether it runs, and has said so in etcd since it was started."""
        return self.lab.running(f'{self.name} ecompute') is not None and self._presence() > self._older

    def _presence(self) -> int:
        """The revision that wrote its key in etcd; 0: no key, or no answer."""
        compute = self.compute()
        if compute is None:
            return 0
        try:
            entry = self._store.get(COMPUTES + compute)
        except Unreachable:
            return 0
        return entry.revision if entry else 0

    @functools.cached_property
    def _store(self) -> Store:
        own = self.lab.operator
        files = own / 'ca.crt', own / 'client.key', own / 'client.crt'
        return Store(EtcdConfig((self.lab.layout.etcd,), *files, timeout=ETCD_SECONDS))

    def compute(self) -> str | None:
        """The uuid of its ecompute; None before its first start."""
        try:
            return str(uuid.UUID((self.directory / 'state/uuid').read_text(encoding='ascii').strip()))
        except (FileNotFoundError, ValueError):
            return None

    @property
    def _certificate(self) -> Path:
        return self.lab.certs / f'compute-{self.name}'

    def _virsh(self, *words: str) -> str:
        return machine.run(self.command(['virsh', '-q', '-c', 'qemu:///system', *words]))

    def _compute_yaml(self) -> str:
        layout = self.lab.layout
        etcd_host, _, etcd_port = layout.etcd.partition(':')
        part = share(
            os.cpu_count() or 1,
            os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // MIB,
            shutil.disk_usage(self.lab.directory).free // GIB,
            self.lab.count,
        )
        return COMPUTE_YAML.format(
            etcd_host=etcd_host,
            etcd_port=etcd_port,
            placement=layout.placement,
            own=self._certificate,
            compute=self.compute() or uuid.uuid4(),
            state=self.directory / 'state',
            **part,
        )


def _write_once(path: Path, text: str) -> None:
    if not path.exists():
        _write(path, text)


def _write(path: Path, text: str) -> None:
    new = path.with_name(f'{path.name}.new')
    new.write_text(text, encoding='utf-8')
    new.rename(path)  # killed before this, the next up writes it; half a file would stay


def _public_keys() -> str:
    """The keys of whoever called, through sudo or not, as lines of mdserver.conf."""
    homes = [Path.home()]
    if caller := os.environ.get('SUDO_USER'):
        with contextlib.suppress(RuntimeError):  # no such user any more
            homes.insert(0, Path(f'~{caller}').expanduser())
    for home in homes:
        keys = [path for path in sorted(home.glob('.ssh/*.pub')) if len(path.read_text(encoding='utf-8').split()) > 1]
        if keys:
            return f'default = {keys[0].read_text(encoding="utf-8").splitlines()[0].strip()}'
    return '# default = ssh-ed25519 AAAA... me@here'
