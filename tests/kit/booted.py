"""Machines that boot: systemd is their process 1, by systemd-nspawn, and a bridge joins them.

All of it is inside a machine of a test's own (see machine.py), with its network, mounts and processes: its bridge is
10.0.0.1, its uplink is theirs, and whatever ends the test ends them. A machine's file system is a layer of its own over
a root that is made once for each release of Debian.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit import machine
from tests.kit.kept import kept
from tests.kit.machine import Machine
from tests.kit.servers import until
from tests.kit.tree import copy_tree

NEEDED = {
    'systemd-nspawn': 'systemd-container',
    'mmdebstrap': 'mmdebstrap',
    'iptables': 'iptables',
    'ssh-keygen': 'openssh-client',
}
"""Commands, and the Debian packages they are in, beside machine.NEEDED."""
GATEWAY = '10.0.0.1'
"""The bridge's own address: what a test serves there, the machines reach."""
USER = 'ann'
"""Who types on them, with sudo."""
CLONE = Path('/home') / USER / 'ecomp'
BOOT_SECONDS = 60.0
"""Until systemd has done all that a boot is."""
END_SECONDS = 90.0
"""Of a shutdown, in which guests are asked to turn themselves off."""
REBOOTS = 133
"""systemd-nspawn's exit code where what it ran wants to boot again. systemd-nspawn(1) on --keep-unit"""

# A machine somebody is given: Debian's smallest, with systemd, a way in, and sudo.
INCLUDE = (
    *('systemd-sysv', 'dbus', 'sudo', 'openssh-server', 'openssh-client'),
    *('iproute2', 'procps', 'netbase', 'ca-certificates'),
)
# What a page has installed on it is there as packages, so that a root that was kept for a year needs no mirror.
SETUP = f"""
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
apt-get update
apt-get install -y --download-only -o APT::Sandbox::User=root "$@"
useradd -m -s /bin/bash {USER}
echo '{USER} ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/{USER}
rm -f /etc/resolv.conf
: >/etc/machine-id
systemctl -q enable systemd-networkd systemd-networkd-wait-online
systemctl -q mask apt-daily.timer apt-daily-upgrade.timer
"""
VERSION = 1
"""Of what is made here, for the name it is kept under."""
# Where the machine's packages come through a proxy of its own, its authority and where pip looks are needed.
PASSED_ON = ('/etc/ssl/certs/ca-certificates.crt', '/etc/pip.conf')
FILES = {
    # Whoever types answers yes.
    'etc/apt/apt.conf.d/99answers': 'APT::Get::Assume-Yes "true";\n',
    'etc/resolv.conf': 'nameserver 10.0.2.3\n',
}
NETWORK = """\
[Match]
Name=host0

[Network]
Address={address}/24
Gateway={gateway}
LinkLocalAddressing=no
"""
# cgroup2 alone: machines of a systemd that knows nothing else boot, too.
INSIDE = f"""
set -eu
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir /sys/fs/cgroup/$1
ip link add br0 type bridge
ip address add {GATEWAY}/24 dev br0
ip link set br0 up
echo 1 >/proc/sys/net/ipv4/ip_forward
iptables -t nat -A POSTROUTING -s {GATEWAY}/24 -o tap0 -j MASQUERADE
"""
BOOT = """
set -eu
cgroup=/sys/fs/cgroup/$1; shift
mkdir -p "$cgroup"
echo 0 >"$cgroup/cgroup.procs"
exec "$@"
"""
CLEAN = ['env', '-i', 'LC_ALL=C.UTF-8', 'HOME=/root', 'PATH=/usr/sbin:/usr/bin:/sbin:/bin']


@dataclass
class Booted:
    """A machine that has booted. `directory` has its layer of the file system, and its console's log."""

    name: str
    address: str
    directory: Path
    command: Sequence[str]
    _nspawn: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.directory / 'console.log'

    @property
    def first(self) -> int:
        """The pid, seen from here, of its process 1; 0 while there is none. It is another one after a reboot."""
        nspawn = _children(self._nspawn.pid) if self._nspawn else []
        return next((pid for parent in nspawn for pid in _children(parent) if _innermost(pid) == 1), 0)

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` there, as root."""
        return ['nsenter', '-t', str(self.first), '-m', '-u', '-i', '-n', '-p', '-C', '--', *CLEAN, *command]

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command there, as root, to its end, however it ends."""
        inside = self.inside(command)
        return subprocess.run(inside, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def run(self, *command: str) -> str:
        """What a command prints that root runs there; AssertionError with all it said if it fails."""
        return self._succeeded(self.ask(*command), ' '.join(command))

    def type(self, text: str) -> str:
        """Have USER type this into a shell in the clone; what it prints. AssertionError where a command fails."""
        script = f'cd {CLONE}\nset -eo pipefail\n{text}'
        return self._succeeded(self.ask('runuser', '-l', USER, '-c', script), text)

    def _succeeded(self, done: subprocess.CompletedProcess[str], what: str) -> str:
        said = f'{done.stdout[-3000:]}{done.stderr[-3000:]}'
        assert done.returncode == 0, f'{self.name}: {done.returncode} of\n{what}\n{said}'
        return done.stdout

    def boot_id(self) -> str:
        return self.run('cat', '/proc/sys/kernel/random/boot_id').strip()

    def wait_booted(self) -> None:
        """Until systemd has done all that a boot is; services that fail are left to the test."""

        def is_up() -> bool:
            assert self._nspawn
            assert self._nspawn.poll() is None, f'{self.name} ended:\n{self.log.read_text(errors="replace")[-3000:]}'
            said = self.ask('systemctl', 'is-system-running').stdout.strip() if self.first else ''
            return said in ('running', 'degraded')

        until(is_up, BOOT_SECONDS, f'{self.name} has booted')

    def start(self) -> None:
        with self.log.open('ab') as log:
            tied = ['setpriv', '--pdeathsig', 'KILL', '--']
            self._nspawn = subprocess.Popen([*tied, *self.command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.wait_booted()

    def reboot(self) -> None:
        assert self._shut_down('reboot') == REBOOTS
        self.start()

    def power_off(self) -> None:
        assert self._shut_down('poweroff') == 0

    def _shut_down(self, how: str) -> int:
        """systemd-nspawn's exit code."""
        nspawn = self._nspawn
        assert nspawn
        self.ask('systemctl', '--no-block', how)
        until(lambda: nspawn.poll() is not None, END_SECONDS, f'{self.name} has shut down')
        return nspawn.wait()

    def end(self) -> None:
        nspawn = self._nspawn
        if nspawn is None or nspawn.poll() is not None:
            return
        if first := self.first:
            os.kill(first, signal.SIGKILL)
        try:
            # systemd-nspawn ends with what it runs.
            nspawn.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            nspawn.kill()
            nspawn.wait()


@dataclass
class Lan:
    """What joins the machines; `outside` is the machine that all of them are inside of."""

    outside: Machine
    directory: Path
    cgroup: str
    hosts: Mapping[str, str]
    machines: list[Booted] = field(default_factory=list)

    def boot(self, name: str, release: str, packages: Sequence[str]) -> Booted:
        """Boot a new machine of this name, of this release of Debian; `packages` it can install without a mirror."""
        own = self.directory / name
        root = own / 'root'
        for each in ('upper', 'work', 'root'):
            (own / each).mkdir(parents=True)
        lower = debian(release, packages)
        layers = f'lowerdir={lower},upperdir={own}/upper,workdir={own}/work'
        mounted = self.outside.run(['mount', '-t', 'overlay', '-o', layers, name, str(root)])
        assert mounted.returncode == 0, f'mount of {layers}: {mounted.stderr}'
        # Its mounts are seen from here through its first process.
        self._furnish(Path(f'/proc/{self.outside.pid}/root', *root.parts[1:]), name)
        # What pip has fetched and built once, for all of them: libvirt's bindings above all.
        pip = lower.parent / 'pip'
        pip.mkdir(exist_ok=True)
        spawn = [
            'systemd-nspawn', '--quiet', '--boot', f'--directory={root}', f'--machine={name}',
            '--register=no', '--keep-unit', '--settings=no', '--link-journal=no', '--resolv-conf=off', '--timezone=off',
            '--private-network', '--network-bridge=br0', f'--bind={pip}:/root/.cache/pip', '--console=pipe',
            'systemd.show_status=1',
        ]  # fmt: skip
        inside = self.outside.inside(['bash', '-c', BOOT, 'bash', f'{self.cgroup}/{name}', *spawn])
        booted = Booted(name, self.hosts[name], own, inside)
        self.machines.append(booted)
        booted.start()
        return booted

    def _furnish(self, root: Path, name: str) -> None:
        hosts = ''.join(f'{address} {each}\n' for each, address in self.hosts.items())
        files = {
            **FILES,
            'etc/hostname': f'{name}\n',
            'etc/hosts': f'127.0.0.1 localhost\n{hosts}',
            'etc/systemd/network/10-host0.network': NETWORK.format(address=self.hosts[name], gateway=GATEWAY),
            'root/.ssh/authorized_keys': (self.directory / 'key.pub').read_text(),
            'root/.ssh/id_ed25519': (self.directory / 'key').read_text(),
            'root/.ssh/config': 'StrictHostKeyChecking accept-new\n',
        }
        (root / 'root/.ssh').mkdir(mode=0o700, exist_ok=True)
        (root / 'root/.cache/pip').mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            (root / path).write_text(text)
        (root / 'root/.ssh/id_ed25519').chmod(0o600)
        for passed in map(Path, PASSED_ON):
            if passed.exists():
                shutil.copyfile(passed, root / passed.relative_to('/'))
        clone = root / CLONE.relative_to('/')
        copy_tree(clone)
        owner = clone.parent.stat()
        for each in (clone, *clone.rglob('*')):
            os.chown(each, owner.st_uid, owner.st_gid, follow_symlinks=False)


def lacking() -> str:
    """What keeps machines from booting here, in words; '' if nothing does."""
    return machine.lacking() or machine.not_installed(NEEDED)


@contextmanager
def lan(hosts: Mapping[str, str]) -> Iterator[Lan]:
    """A bridge for machines of these names and addresses (of 10.0.0.0/24); none of them is left afterwards."""
    with ExitStack() as undo:
        # Gigabytes, which memory is too dear for; and QEMU, which is not root, has to find its way there.
        directory = Path(tempfile.mkdtemp(prefix='ecomp-booted-', dir='/var/tmp'))
        undo.callback(shutil.rmtree, directory)
        directory.chmod(0o755)
        subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', str(directory / 'key')], check=True)
        undo.callback(_remove_cgroups, directory.name)
        outside = undo.enter_context(machine.machine())
        made = Lan(outside, directory, directory.name, hosts)
        done = outside.run(['bash', '-c', INSIDE, 'bash', directory.name])
        assert done.returncode == 0, done.stderr
        try:
            yield made
        finally:
            for each in made.machines:
                each.end()


def debian(release: str, packages: Sequence[str]) -> Path:
    """The root of a machine with this release of Debian, kept; nobody writes there."""
    recipe = [
        '--mode=root',
        '--variant=minbase',
        f'--include={",".join(INCLUDE)}',
        *(f'--dpkgopt=path-exclude=/usr/share/{part}/*' for part in ('doc', 'man', 'locale')),
        '--dpkgopt=force-unsafe-io',
        release,
    ]
    wanted = sorted(packages)

    def make(work: Path) -> Path:
        tree = work / 'tree'
        for command in (
            ['mmdebstrap', '--quiet', *recipe, str(tree)],
            ['env', '-i', 'PATH=/usr/sbin:/usr/bin:/sbin:/bin', 'chroot', str(tree), 'sh', '-c', SETUP, 'sh', *wanted],
        ):
            made = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            assert made.returncode == 0, f'{command[0]} cannot make {release}: {made.stderr[-3000:]}'
        tree.chmod(0o755)
        return tree

    return kept(f'machine-{release}', (VERSION, recipe, SETUP, wanted), make)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f'/proc/{pid}/task').glob('*/children'):
        try:
            found += map(int, task.read_text().split())
        except OSError:  # it has ended
            continue
    return found


def _innermost(pid: int) -> int:
    """The pid that a process has in its own namespace of them; 0 if it has ended. proc(5)"""
    try:
        lines = Path(f'/proc/{pid}/status').read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[-1]) for line in lines if line.startswith('NSpid:')), 0)


def _remove_cgroups(name: str) -> None:
    mounts = [line.split() for line in Path('/proc/self/mounts').read_text().splitlines()]
    found = [Path(where, name) for _, where, kind, *_ in mounts if kind == 'cgroup2']

    def removed() -> bool:
        try:
            for top in filter(Path.exists, found):
                for path in sorted([top, *top.rglob('*/')], reverse=True):
                    path.rmdir()
        except OSError:
            return False
        return True

    until(removed, 10, f'the cgroup {name} is empty')
