"""A hypervisor host in its own namespaces, with virtlogd, libvirtd and a `default` network.

The daemons write below one temporary directory, so the machine's own libvirt is not changed. Their socket is a file
there, so a test connects from outside the namespaces. The network namespace has no uplink: guests reach nothing else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.kit.capabilities import keep_capabilities, provide_capabilities
from tests.kit.lab import make_lab_name
from tests.kit.qemu_starts import note_qemu_starts
from tests.kit.servers import TOP, wait_until

# Our directories, and the directories of libvirt over which they are bind-mounted.
BIND_MOUNTS = {
    'run': '/run/libvirt',
    'lib': '/var/lib/libvirt',
    'etc': '/etc/libvirt',
    'cache': '/var/cache/libvirt',
    'log': '/var/log/libvirt',
}
# Subdirectories that libvirtd expects.
EXPECTED_DIRECTORIES = ('lib/images', 'lib/dnsmasq', 'lib/boot', 'cache/qemu', 'log/qemu', 'run/qemu', 'lib/qemu')
REQUIRED_PROGRAMS = (
    'ip',
    'unshare',
    'nsenter',
    'virtlogd',
    'libvirtd',
    'dnsmasq',
    'ebtables',
    'qemu-img',
    'qemu-system-x86_64',
)
NETWORK_XML = """<network><name>default</name><forward mode='open'/><bridge name='virbr0' stp='off'/>
<ip address='10.77.0.1' netmask='255.255.255.0'><dhcp><range start='10.77.0.10' end='10.77.0.99'/></dhcp></ip>
</network>"""

# Guests are emulated. If QEMU's user cannot open /dev/kvm, libvirt probes QEMU again on each call, for seconds. A
# regular file in its place avoids this (but cannot be moved into a guest's own /dev, so qemu.conf disables namespaces).
# The mount namespace lives as long as its processes: the daemons that this shell starts.
DAEMON_SCRIPT = """
mount --make-rprivate /
root=$1; shift
for pair; do mkdir -p "${pair#*=}"; mount --bind "$root/${pair%%=*}" "${pair#*=}"; done
[ ! -e /dev/kvm ] || mount --bind "$root/no-kvm" /dev/kvm
virtlogd -d --pid-file "$root/virtlogd.pid"
libvirtd -d --pid-file "$root/libvirtd.pid"
"""


def describe_missing() -> str | None:
    absent = [name for name in REQUIRED_PROGRAMS if shutil.which(name) is None]
    if absent:
        return 'not installed: ' + ', '.join(absent)
    return None if os.geteuid() == 0 else 'namespaces and libvirtd need root'


@dataclass(frozen=True)
class LibvirtHost:
    namespace: str
    root: Path

    @property
    def uri(self) -> str:
        return f'qemu+unix:///system?socket={self.root}/run/libvirt-sock'

    def read_pid(self, daemon: str = 'libvirtd') -> int:
        return int((self.root / f'{daemon}.pid').read_text())

    def run_inside(
        self,
        command: list[str],
        env: Mapping[str, str] | None = None,
        check: bool = True,
        input: str | None = None,
        timeout: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        # virtlogd survives a killed libvirtd, and is in the same namespaces.
        nsenter = ['nsenter', '-t', str(self.read_pid('virtlogd')), '-m', '-n', *command]
        return subprocess.run(
            nsenter, check=check, capture_output=True, text=True, timeout=timeout, env=env, input=input
        )

    def call_function(self, module: str, function: str, instance: str, timeout: float = 120.0) -> None:
        script = f'import {module} as test; test.{function}{(str(self.root / "state"), instance)}'
        path = os.pathsep.join([str(TOP), *sys.path])
        environment = {**os.environ, 'PYTHONPATH': path}
        result = self.run_inside([sys.executable, '-c', script], environment, check=False, timeout=timeout)
        assert result.returncode == 0, result.stderr

    def start_libvirtd(self) -> None:
        self.run_inside(['libvirtd', '-d', '--pid-file', str(self.root / 'libvirtd.pid')])

    def kill_libvirtd(self) -> None:
        pid = self.read_pid()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), 60, 'libvirtd gone')


def is_running(pid: int) -> bool:
    try:
        return '\nState:\tZ' not in Path(f'/proc/{pid}/status').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def start_libvirt_host() -> Iterator[LibvirtHost]:
    with ExitStack() as undo:
        root = Path(tempfile.mkdtemp(prefix='evt-'))
        undo.callback(shutil.rmtree, root)
        root.chmod(0o711)
        namespace = make_lab_name(root.name.replace('_', ''))
        for name in (*BIND_MOUNTS, *EXPECTED_DIRECTORIES):
            (root / name).mkdir(exist_ok=True)
        provide_capabilities(root / 'cache', 'host')
        (root / 'no-kvm').touch(0o600)
        # A small file system that a test can fill, mounted inside and outside the namespaces.
        (root / 'small').mkdir()
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(root / 'small')], check=True)
        undo.callback(subprocess.run, ['umount', str(root / 'small')], check=True)
        shutil.rmtree(root / 'etc')
        shutil.copytree('/etc/libvirt', root / 'etc')
        (root / 'etc/qemu.conf').write_text('namespaces = []\n')
        # Define the network ourselves; do not autostart a copy of the machine's networks.
        shutil.rmtree(root / 'etc/qemu/networks', ignore_errors=True)
        shutil.chown(root / 'lib/qemu', 'libvirt-qemu')
        subprocess.run(['ip', 'netns', 'add', namespace], check=True)
        undo.callback(subprocess.run, ['ip', 'netns', 'del', namespace], check=True)
        undo.callback(kill_processes, namespace)
        subprocess.run(['ip', '-n', namespace, 'link', 'set', 'lo', 'up'], check=True)
        pairs = [f'{name}={target}' for name, target in BIND_MOUNTS.items()]
        shell = ['unshare', '-m', 'sh', '-e', '-c', DAEMON_SCRIPT, 'daemons', str(root), *pairs]
        subprocess.run(['ip', 'netns', 'exec', namespace, *shell], check=True, timeout=60)
        host = LibvirtHost(namespace, root)
        wait_until((root / 'run/libvirt-sock').exists, 60, 'the socket of libvirtd')
        (root / 'network.xml').write_text(NETWORK_XML)
        host.run_inside(['virsh', '-q', 'net-define', str(root / 'network.xml')])
        yield host
        keep_capabilities(root / 'cache', 'host')
        note_qemu_starts(root)


def kill_processes(namespace: str) -> None:
    """Kill the guests, dnsmasq and daemons in the namespace, and wait until they are gone."""

    def list_pids() -> list[int]:
        result = subprocess.run(['ip', 'netns', 'pids', namespace], check=True, capture_output=True, text=True)
        return [pid for pid in map(int, result.stdout.split()) if is_running(pid)]

    def kill_all() -> bool:
        for pid in list_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not list_pids()

    wait_until(kill_all, 60, f'processes of {namespace} gone')
