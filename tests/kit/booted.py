"""Machines that boot systemd as process 1 under systemd-nspawn, joined by a bridge.

They run inside a private outer machine (see machine.py), and the bridge is 10.0.0.1.
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
from tests.kit.kept import cache_file
from tests.kit.machine import Machine
from tests.kit.servers import TOP, wait_until
from tests.kit.tree import copy_tree

# Required commands and their Debian packages, in addition to machine.REQUIRED_PACKAGES.
REQUIRED_PACKAGES = {
    'systemd-nspawn': 'systemd-container',
    'mmdebstrap': 'mmdebstrap',
    'iptables': 'iptables',
    'ssh-keygen': 'openssh-client',
}
PAGE = TOP / 'docs/howto/real-machines.md'
# The bridge's own address: the machines reach what a test serves there.
GATEWAY = '10.0.0.1'
# The account that types commands on the machines; it may use sudo.
USER = 'ann'
CLONE_PATH = Path('/home') / USER / 'ecomp'
# The time systemd takes to boot.
BOOT_SECONDS = 60.0
# The time of a shutdown, which includes asking guests to power off.
SHUTDOWN_SECONDS = 90.0
# systemd-nspawn's exit code when the container wants to reboot. See --keep-unit in systemd-nspawn(1).
REBOOT_EXIT_CODE = 133

# A minimal Debian with systemd, ssh and sudo.
BASE_PACKAGES = (
    *('systemd-sysv', 'dbus', 'sudo', 'openssh-server', 'openssh-client'),
    *('iproute2', 'procps', 'netbase', 'ca-certificates'),
)
# Packages that a documentation page installs are downloaded in advance, so that an old cached root needs no mirror.
SETUP_SCRIPT = f"""
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
# Version of the recipe below, part of the name in the cache.
RECIPE_VERSION = 1
# Needed where the machine's packages come through a private proxy: its certificate authority, and pip's index.
COPIED_FILES = ('/etc/ssl/certs/ca-certificates.crt', '/etc/pip.conf')
FILES = {
    # apt answers yes to itself.
    'etc/apt/apt.conf.d/99answers': 'APT::Get::Assume-Yes "true";\n',
    'etc/resolv.conf': 'nameserver 10.0.2.3\n',
}
NETWORK_UNIT = """\
[Match]
Name=host0

[Network]
Address={address}/24
Gateway={gateway}
LinkLocalAddressing=no
"""
# Only cgroup2, so that releases whose systemd knows nothing else boot, too.
OUTER_SCRIPT = f"""
set -eu
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir /sys/fs/cgroup/$1
ip link add br0 type bridge
ip address add {GATEWAY}/24 dev br0
ip link set br0 up
echo 1 >/proc/sys/net/ipv4/ip_forward
iptables -t nat -A POSTROUTING -s {GATEWAY}/24 -o tap0 -j MASQUERADE
"""
BOOT_SCRIPT = """
set -eu
cgroup=/sys/fs/cgroup/$1; shift
mkdir -p "$cgroup"
echo 0 >"$cgroup/cgroup.procs"
exec "$@"
"""
CLEAN_ENVIRONMENT = ['env', '-i', 'LC_ALL=C.UTF-8', 'HOME=/root', 'PATH=/usr/sbin:/usr/bin:/sbin:/bin']


@dataclass
class BootedMachine:
    """A machine that has booted. `directory` holds its file system layer and its console log."""

    name: str
    address: str
    directory: Path
    command: Sequence[str]
    _nspawn: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.directory / 'console.log'

    @property
    def init_pid(self) -> int:
        """The pid of the machine's process 1 as seen from this process, or 0 (changes at a reboot)."""
        nspawn = _list_children(self._nspawn.pid) if self._nspawn else []
        return next((pid for parent in nspawn for pid in _list_children(parent) if _find_inner_pid(pid) == 1), 0)

    def wrap_command(self, command: Sequence[str]) -> list[str]:
        return [
            'nsenter',
            '-t',
            str(self.init_pid),
            '-m',
            '-u',
            '-i',
            '-n',
            '-p',
            '-C',
            '--',
            *CLEAN_ENVIRONMENT,
            *command,
        ]

    def run_unchecked(self, *command: str) -> subprocess.CompletedProcess[str]:
        inside = self.wrap_command(command)
        return subprocess.run(inside, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def run(self, *command: str) -> str:
        return self._check_output(self.run_unchecked(*command), ' '.join(command))

    def type_as_user(self, text: str) -> str:
        script = f'cd {CLONE_PATH}\nset -eo pipefail\n{text}'
        return self._check_output(self.run_unchecked('runuser', '-l', USER, '-c', script), text)

    def _check_output(self, result: subprocess.CompletedProcess[str], command: str) -> str:
        output = f'{result.stdout[-3000:]}{result.stderr[-3000:]}'
        assert result.returncode == 0, f'{self.name}: {result.returncode} of\n{command}\n{output}'
        return result.stdout

    def boot_id(self) -> str:
        return self.run('cat', '/proc/sys/kernel/random/boot_id').strip()

    def wait_booted(self) -> None:
        """Wait until systemd has finished booting. Failed services are left to the test."""

        def is_up() -> bool:
            assert self._nspawn
            assert self._nspawn.poll() is None, f'{self.name} ended:\n{self.log.read_text(errors="replace")[-3000:]}'
            system_state = self.run_unchecked('systemctl', 'is-system-running').stdout.strip() if self.init_pid else ''
            return system_state in ('running', 'degraded')

        wait_until(is_up, BOOT_SECONDS, f'{self.name} has booted')

    def start(self) -> None:
        with self.log.open('ab') as log:
            tied = ['setpriv', '--pdeathsig', 'KILL', '--']
            self._nspawn = subprocess.Popen([*tied, *self.command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.wait_booted()

    def reboot(self) -> None:
        assert self._shut_down('reboot') == REBOOT_EXIT_CODE
        self.start()

    def power_off(self) -> None:
        assert self._shut_down('poweroff') == 0

    def _shut_down(self, verb: str) -> int:
        nspawn = self._nspawn
        assert nspawn
        self.run_unchecked('systemctl', '--no-block', verb)
        wait_until(lambda: nspawn.poll() is not None, SHUTDOWN_SECONDS, f'{self.name} has shut down')
        return nspawn.wait()

    def kill(self) -> None:
        nspawn = self._nspawn
        if nspawn is None or nspawn.poll() is not None:
            return
        if init_pid := self.init_pid:
            os.kill(init_pid, signal.SIGKILL)
        try:
            # systemd-nspawn ends when its process 1 does.
            nspawn.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            nspawn.kill()
            nspawn.wait()


@dataclass
class Lan:
    outer_machine: Machine
    directory: Path
    cgroup: str
    hosts: Mapping[str, str]
    machines: list[BootedMachine] = field(default_factory=list)

    def boot(self, name: str, release: str, packages: Sequence[str]) -> BootedMachine:
        """Boot a new machine that can install `packages` without a mirror."""
        machine_directory = self.directory / name
        root = machine_directory / 'root'
        for part in ('upper', 'work', 'root'):
            (machine_directory / part).mkdir(parents=True)
        lower = make_debian_root(release, packages)
        layers = f'lowerdir={lower},upperdir={machine_directory}/upper,workdir={machine_directory}/work'
        mount = self.outer_machine.run(['mount', '-t', 'overlay', '-o', layers, name, str(root)])
        assert mount.returncode == 0, f'mount of {layers}: {mount.stderr}'
        # Reach its mounts through its first process.
        self._write_files(Path(f'/proc/{self.outer_machine.pid}/root', *root.parts[1:]), name)
        # pip's cache is shared by all machines, mainly for libvirt's bindings, which are built from source.
        pip = lower.parent / 'pip'
        pip.mkdir(exist_ok=True)
        spawn = [
            'systemd-nspawn', '--quiet', '--boot', f'--directory={root}', f'--machine={name}',
            '--register=no', '--keep-unit', '--settings=no', '--link-journal=no', '--resolv-conf=off', '--timezone=off',
            '--private-network', '--network-bridge=br0', f'--bind={pip}:/root/.cache/pip', '--console=pipe',
            'systemd.show_status=1',
        ]  # fmt: skip
        inside = self.outer_machine.wrap_command(['bash', '-c', BOOT_SCRIPT, 'bash', f'{self.cgroup}/{name}', *spawn])
        booted = BootedMachine(name, self.hosts[name], machine_directory, inside)
        self.machines.append(booted)
        booted.start()
        return booted

    def _write_files(self, root: Path, name: str) -> None:
        hosts = ''.join(f'{address} {host}\n' for host, address in self.hosts.items())
        files = {
            **FILES,
            'etc/hostname': f'{name}\n',
            'etc/hosts': f'127.0.0.1 localhost\n{hosts}',
            'etc/systemd/network/10-host0.network': NETWORK_UNIT.format(address=self.hosts[name], gateway=GATEWAY),
            'root/.ssh/authorized_keys': (self.directory / 'key.pub').read_text(),
            'root/.ssh/id_ed25519': (self.directory / 'key').read_text(),
            'root/.ssh/config': 'StrictHostKeyChecking accept-new\n',
        }
        (root / 'root/.ssh').mkdir(mode=0o700, exist_ok=True)
        (root / 'root/.cache/pip').mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            (root / path).write_text(text)
        (root / 'root/.ssh/id_ed25519').chmod(0o600)
        for source in map(Path, COPIED_FILES):
            if source.exists():
                shutil.copyfile(source, root / source.relative_to('/'))
        clone = root / CLONE_PATH.relative_to('/')
        copy_tree(clone)
        owner = clone.parent.stat()
        for entry in (clone, *clone.rglob('*')):
            os.chown(entry, owner.st_uid, owner.st_gid, follow_symlinks=False)


def read_page_packages() -> list[str]:
    lines = PAGE.read_text().replace('\\\n', ' ').splitlines()
    return [word for line in lines for word in line.partition('sudo apt-get install ')[2].split()]


def explain_missing() -> str:
    return machine.explain_missing() or machine.explain_missing_packages(REQUIRED_PACKAGES)


@contextmanager
def start_lan(hosts: Mapping[str, str]) -> Iterator[Lan]:
    """Start a bridge for machines of these names and addresses (of 10.0.0.0/24)."""
    with ExitStack() as undo:
        # Not /tmp: these are gigabytes, too much for memory. And QEMU, which does not run as root, must be able to
        # enter it.
        directory = Path(tempfile.mkdtemp(prefix='ecomp-booted-', dir='/var/tmp'))
        undo.callback(shutil.rmtree, directory)
        directory.chmod(0o755)
        subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', str(directory / 'key')], check=True)
        undo.callback(_remove_cgroups, directory.name)
        outside = undo.enter_context(machine.start_machine())
        network = Lan(outside, directory, directory.name, hosts)
        setup = outside.run(['bash', '-c', OUTER_SCRIPT, 'bash', directory.name])
        assert setup.returncode == 0, setup.stderr
        try:
            yield network
        finally:
            for booted in network.machines:
                booted.kill()


def make_debian_root(release: str, packages: Sequence[str]) -> Path:
    recipe = [
        '--mode=root',
        '--variant=minbase',
        f'--include={",".join(BASE_PACKAGES)}',
        *(f'--dpkgopt=path-exclude=/usr/share/{part}/*' for part in ('doc', 'man', 'locale')),
        '--dpkgopt=force-unsafe-io',
        release,
    ]
    names = sorted(packages)

    def make(work: Path) -> Path:
        tree = work / 'tree'
        for command in (
            ['mmdebstrap', '--quiet', *recipe, str(tree)],
            [
                'env',
                '-i',
                'PATH=/usr/sbin:/usr/bin:/sbin:/bin',
                'chroot',
                str(tree),
                'sh',
                '-c',
                SETUP_SCRIPT,
                'sh',
                *names,
            ],
        ):
            completed = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            assert completed.returncode == 0, f'{command[0]} cannot make {release}: {completed.stderr[-3000:]}'
        tree.chmod(0o755)
        return tree

    return cache_file(f'machine-{release}', (RECIPE_VERSION, recipe, SETUP_SCRIPT, names), make)


def _list_children(pid: int) -> list[int]:
    pids: list[int] = []
    for task in Path(f'/proc/{pid}/task').glob('*/children'):
        try:
            pids += map(int, task.read_text().split())
        except OSError:  # it has ended
            continue
    return pids


def _find_inner_pid(pid: int) -> int:
    # See proc(5).
    try:
        lines = Path(f'/proc/{pid}/status').read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[-1]) for line in lines if line.startswith('NSpid:')), 0)


def _remove_cgroups(name: str) -> None:
    mounts = [line.split() for line in Path('/proc/self/mounts').read_text().splitlines()]
    cgroups = [Path(mount_point, name) for _, mount_point, kind, *_ in mounts if kind == 'cgroup2']

    def removed() -> bool:
        try:
            for top in filter(Path.exists, cgroups):
                for path in sorted([top, *top.rglob('*/')], reverse=True):
                    path.rmdir()
        except OSError:
            return False
        return True

    wait_until(removed, 10, f'the cgroup {name} is empty')
