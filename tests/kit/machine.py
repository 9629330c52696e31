"""A private machine for a test: namespaces, and access to package mirrors.

Its network, processes, mounts and writes to apt's directories end with it.
slirp4netns, in user space, is its uplink. With `root` its file system is that directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.servers import wait_until

# Required commands and their Debian packages.
REQUIRED_PACKAGES = {
    'ip': 'iproute2',
    'unshare': 'util-linux',
    'nsenter': 'util-linux',
    'setpriv': 'util-linux',
    'slirp4netns': 'slirp4netns',
}

# The metadata address must not be reachable outside of a lab. The root is a mount that is pivoted into, for two
# reasons: ip(8) fails with `Peer netns reference is invalid` where mounts are shared, and `ip netns exec` fails where /
# is not a mount point.
SETUP_SCRIPT = """
set -eu
root=$1 own=$2
mount --make-rprivate /
if [ "$root" != / ]; then
    mkdir "$own/root"
    mount --bind "$root" "$own/root"
    mount --rbind /dev "$own/root/dev"
    mount -t proc proc "$own/root/proc"
    mkdir -p "$own/root/old"
    cd "$own/root"
    pivot_root . old
    umount -l /old
else
    mount -t proc proc /proc
    umount -l /sys
fi
# What /sys/class/net shows is the network of whoever mounted it.
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mkdir -p /run/lock /run/own/upper /run/own/scratch /var/lib/elab
if [ "$root" = / ]; then
    for each in lib cache; do
        mkdir /run/own/upper/$each /run/own/scratch/$each
        overlay=upperdir=/run/own/upper/$each,workdir=/run/own/scratch/$each
        # Where there is no overlay file system, apt's lists and packages are the machine's own.
        mount -t overlay -o "lowerdir=/var/$each/apt,$overlay" overlay /var/$each/apt || :
    done
    # Whoever removes an empty directory unmounts what lies on it elsewhere: the last lab outside of here does.
    touch "/var/lib/elab/.${own##*/}"
    mount -t tmpfs tmpfs /var/lib/elab
fi
ip link set lo up
ip route add blackhole 169.254.0.0/16
echo 'nameserver 10.0.2.3' >/run/own/resolv.conf
mount --bind /run/own/resolv.conf /etc/resolv.conf
touch /run/own/ready
# Process 1 has to reap whoever is left to it, which bash does: libvirt takes a QEMU that nobody reaps for a living one.
while :; do sleep 3600 & wait $!; done
"""


@dataclass(frozen=True)
class Machine:
    """A running machine. `pid` is its process 1 as seen from this process."""

    pid: int

    def wrap_command(self, command: Sequence[str], cwd: Path = Path('/')) -> list[str]:
        return ['nsenter', '-t', str(self.pid), '-n', '-m', '-p', '--', 'env', '-C', str(cwd), *command]

    def run(self, command: Sequence[str], cwd: Path = Path('/')) -> subprocess.CompletedProcess[str]:
        inside = self.wrap_command(command, cwd)
        return subprocess.run(inside, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def explain_missing_packages(required: Mapping[str, str]) -> str:
    packages = sorted({package for command, package in required.items() if shutil.which(command) is None})
    return 'not installed: ' + ', '.join(packages) if packages else ''


def explain_missing() -> str:
    if os.geteuid() != 0:
        return 'namespaces need root'
    if reason := explain_missing_packages(REQUIRED_PACKAGES):
        return reason
    return '' if Path('/dev/net/tun').exists() else 'there is no /dev/net/tun, which slirp4netns needs'


@contextmanager
def start_machine(root: Path = Path('/')) -> Iterator[Machine]:
    """Start a machine, and remove it afterwards, except for what was written to files."""
    with ExitStack() as undo:
        work = Path(tempfile.mkdtemp(prefix='ecomp-machine-'))
        undo.callback(shutil.rmtree, work)
        undo.callback(Path(f'/var/lib/elab/.{work.name}').unlink, missing_ok=True)
        log = undo.enter_context((work / 'log').open('w+'))
        # With pdeathsig and kill-child everything ends with the test, even after kill -9.
        tied = ['setpriv', '--pdeathsig', 'KILL', '--']
        namespaces = ['unshare', '--net', '--mount', '--ipc', '--pid', '--fork', '--kill-child', '--']
        shell = ['bash', '-c', SETUP_SCRIPT, 'bash', str(root), str(work)]
        process = subprocess.Popen([*tied, *namespaces, *shell], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        undo.callback(_kill, process)

        def find_init() -> int:
            assert process.poll() is None, f'it ended:\n{(work / "log").read_text()[-2000:]}'
            return int(Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().strip() or 0)

        started = Machine(wait_until(find_init, 30, 'its first process runs'))

        def is_ready() -> bool:
            return bool(find_init()) and Path(f'/proc/{started.pid}/root/run/own/ready').exists()

        wait_until(is_ready, 30, 'it is set up')
        uplink = ['slirp4netns', '--configure', '--mtu=65520', '--disable-host-loopback', str(started.pid), 'tap0']
        undo.callback(_kill, subprocess.Popen([*tied, *uplink], stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        wait_until(lambda: 'tap0' in started.run(['ip', '-o', 'link']).stdout, 30, 'it has an uplink')
        yield started


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
