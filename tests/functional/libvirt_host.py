"""A hypervisor host of a test's own: a network and a mount namespace with virtlogd, libvirtd and a `default` network.

The daemons write below one temporary directory: nothing of the machine's own libvirt is changed. Their socket is a file
there, so a test talks to them from outside the namespaces. Guests have no way out: the network namespace has no uplink.
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

from tests.kit.servers import TOP, until

# Our directories by those of libvirt they are bound over, and what libvirtd expects in them.
BOUND = {
    'run': '/run/libvirt',
    'lib': '/var/lib/libvirt',
    'etc': '/etc/libvirt',
    'cache': '/var/cache/libvirt',
    'log': '/var/log/libvirt',
}
EXPECTED = ('lib/images', 'lib/dnsmasq', 'lib/boot', 'cache/qemu', 'log/qemu', 'run/qemu', 'lib/qemu')
NEEDED = ('ip', 'unshare', 'nsenter', 'virtlogd', 'libvirtd', 'dnsmasq', 'ebtables', 'qemu-img', 'qemu-system-x86_64')
NETWORK = """<network><name>default</name><forward mode='open'/><bridge name='virbr0' stp='off'/>
<ip address='10.77.0.1' netmask='255.255.255.0'><dhcp><range start='10.77.0.10' end='10.77.0.99'/></dhcp></ip>
</network>"""

# Guests are emulated. A /dev/kvm that QEMU's user cannot open makes libvirt probe QEMU anew, for seconds, each time it
# is asked anything; a plain file in its place is not taken for one (but could not be moved into a guest's own /dev).
# A mount namespace lives as long as its processes: the daemons, started from the shell that made it.
DAEMONS = """
mount --make-rprivate /
root=$1; shift
for pair; do mkdir -p "${pair#*=}"; mount --bind "$root/${pair%%=*}" "${pair#*=}"; done
[ ! -e /dev/kvm ] || mount --bind "$root/no-kvm" /dev/kvm
virtlogd -d --pid-file "$root/virtlogd.pid"
libvirtd -d --pid-file "$root/libvirtd.pid"
"""


def missing() -> str | None:
    """What keeps a LibvirtHost from being made on this machine, in words; None if nothing does."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
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

    def pid(self, daemon: str = 'libvirtd') -> int:
        return int((self.root / f'{daemon}.pid').read_text())

    def inside(
        self, command: list[str], env: Mapping[str, str] | None = None, check: bool = True, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host's namespaces and return its output."""
        # virtlogd outlives a killed libvirtd, and is in the same namespaces.
        entered = ['nsenter', '-t', str(self.pid('virtlogd')), '-m', '-n', *command]
        return subprocess.run(entered, check=check, capture_output=True, text=True, timeout=120, env=env, input=input)

    def call(self, module: str, function: str, instance: str) -> None:
        """Call a function of a module of tests in the host's namespaces, with the state directory and an instance."""
        script = f'import {module} as test; test.{function}{(str(self.root / "state"), instance)}'
        path = os.pathsep.join([str(TOP), *sys.path])
        done = self.inside([sys.executable, '-c', script], env={**os.environ, 'PYTHONPATH': path}, check=False)
        assert done.returncode == 0, done.stderr

    def start_libvirtd(self) -> None:
        self.inside(['libvirtd', '-d', '--pid-file', str(self.root / 'libvirtd.pid')])

    def kill_libvirtd(self) -> None:
        """kill -9, and wait until the process is gone."""
        pid = self.pid()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not running(pid), 60, 'libvirtd gone')


def running(pid: int) -> bool:
    try:
        return '\nState:\tZ' not in Path(f'/proc/{pid}/status').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def libvirt_host() -> Iterator[LibvirtHost]:
    """Make a host, and remove all of it at the end: guests, daemons, namespace, files."""
    with ExitStack() as undo:
        root = Path(tempfile.mkdtemp(prefix='evt-'))
        undo.callback(shutil.rmtree, root)
        root.chmod(0o711)
        namespace = root.name.replace('_', '')
        for name in (*BOUND, *EXPECTED):
            (root / name).mkdir(exist_ok=True)
        (root / 'no-kvm').touch(0o600)
        # A directory that is soon full, the same inside and outside.
        (root / 'small').mkdir()
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(root / 'small')], check=True)
        undo.callback(subprocess.run, ['umount', str(root / 'small')], check=True)
        shutil.rmtree(root / 'etc')
        shutil.copytree('/etc/libvirt', root / 'etc')
        (root / 'etc/qemu.conf').write_text('namespaces = []\n')
        # The network is this host's own, not a copy of what the machine may autostart.
        shutil.rmtree(root / 'etc/qemu/networks', ignore_errors=True)
        shutil.chown(root / 'lib/qemu', 'libvirt-qemu')
        subprocess.run(['ip', 'netns', 'add', namespace], check=True)
        undo.callback(subprocess.run, ['ip', 'netns', 'del', namespace], check=True)
        undo.callback(end_processes, namespace)
        subprocess.run(['ip', '-n', namespace, 'link', 'set', 'lo', 'up'], check=True)
        pairs = [f'{name}={target}' for name, target in BOUND.items()]
        shell = ['unshare', '-m', 'sh', '-e', '-c', DAEMONS, 'daemons', str(root), *pairs]
        subprocess.run(['ip', 'netns', 'exec', namespace, *shell], check=True, timeout=60)
        host = LibvirtHost(namespace, root)
        until((root / 'run/libvirt-sock').exists, 60, 'the socket of libvirtd')
        (root / 'network.xml').write_text(NETWORK)
        host.inside(['virsh', '-q', 'net-define', str(root / 'network.xml')])
        yield host


def end_processes(namespace: str) -> None:
    """End all that still runs in the namespace (guests, dnsmasq, the daemons) and wait until nothing does."""

    def left() -> list[int]:
        listed = subprocess.run(['ip', 'netns', 'pids', namespace], check=True, capture_output=True, text=True)
        return [pid for pid in map(int, listed.stdout.split()) if running(pid)]

    def kill_all() -> bool:
        for pid in left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left()

    until(kill_all, 60, f'processes of {namespace} gone')
