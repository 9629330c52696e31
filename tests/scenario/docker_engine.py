"""A Docker Engine for the tests, and images for it without a registry.

dockerd runs in its own network, mount and process namespaces. Its rules, bridges and published ports stay apart from
the machine's, and ending one process ends every container, shim and mount. slirp4netns, in user space, lets builds
reach PyPI. Commands run with `Engine.wrap_command` reach the published ports.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.kept import cache_file
from tests.kit.servers import wait_until

# Required commands, and the Debian packages that contain them.
REQUIRED_COMMANDS = {
    'dockerd': 'docker.io',
    'docker': 'docker.io',
    'containerd': 'containerd',
    'iptables': 'iptables',
    'ip': 'iproute2',
    'unshare': 'util-linux',
    'nsenter': 'util-linux',
    'setpriv': 'util-linux',
    'mmdebstrap': 'mmdebstrap',
    'slirp4netns': 'slirp4netns',
}

# dockerd would use the machine's containerd if it found its socket, so it gets its own /run. The metadata address must
# not be reachable outside of a lab, so it is blackholed. dockerd then replaces the shell as process 1 of its namespace.
NAMESPACE_SCRIPT = """
set -eu
root=$1; shift
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
ip link set lo up
ip route add blackhole 169.254.0.0/16
exec dockerd --host "unix://$root/docker.sock" --data-root "$root/data" --exec-root "$root/exec" \
    --pidfile "$root/docker.pid" --cgroup-parent "$1" --exec-opt native.cgroupdriver=cgroupfs --dns 10.0.2.3
"""

PACKAGES = ('python3', 'python3-venv', 'ca-certificates', 'etcd-server', 'etcd-client', 'postgresql')
# Installing PostgreSQL would create a cluster; the entry point below creates it in its own directory instead.
NO_CLUSTER_HOOK = (
    'mkdir -p "$1/etc/postgresql-common" && '
    'echo "create_main_cluster = false" >"$1/etc/postgresql-common/createcluster.conf"'
)
# BASE has Python and etcd. POSTGRES keeps those parts of the official image's contract that docker.sh relies on.
BASE = 'ecomp-test/base:1'
POSTGRES = 'ecomp-test/postgres:1'

POSTGRES_ENTRY = """#!/bin/sh
set -eu
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
data=/var/lib/postgresql/data
if [ "$(id -u)" = 0 ]; then
    mkdir -p "$data" /run/postgresql
    chown postgres: "$data" /run/postgresql
    chmod 700 "$data"
    exec setpriv --reuid postgres --regid postgres --init-groups "$0"
fi
if [ ! -s "$data/PG_VERSION" ]; then
    echo "$POSTGRES_PASSWORD" >/tmp/password
    initdb -D "$data" -U "$POSTGRES_USER" --pwfile /tmp/password --auth-host scram-sha-256 --auth-local trust
    echo 'host all all all scram-sha-256' >>"$data/pg_hba.conf"
    pg_ctl -D "$data" -w -o '-c listen_addresses=' start
    createdb -U "$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl -D "$data" -w -m fast stop
fi
exec postgres -D "$data" -c listen_addresses='*'
"""
POSTGRES_DOCKERFILE = f"""FROM {BASE}
COPY entry /usr/local/bin/entry
STOPSIGNAL SIGINT
ENTRYPOINT ["entry"]
"""


def find_missing_requirement() -> str | None:
    if os.geteuid() != 0:
        return 'namespaces and dockerd need root'
    packages = sorted({package for command, package in REQUIRED_COMMANDS.items() if shutil.which(command) is None})
    if packages:
        return 'not installed: ' + ', '.join(packages)
    return None if Path('/dev/net/tun').exists() else 'there is no /dev/net/tun, which slirp4netns needs'


@dataclass
class Engine:
    """A machine on which dockerd runs: namespaces with its data.

    `pid` is dockerd as the test's machine sees it. If `unshare` is killed, all processes of the machine end.
    """

    root: Path
    undo: ExitStack
    pid: int = field(init=False)
    unshare: subprocess.Popen[bytes] = field(init=False)

    @property
    def host(self) -> str:
        return f'unix://{self.root}/docker.sock'

    def boot(self) -> None:
        """Start dockerd with its data, in new namespaces, and wait until it answers."""
        log = self.undo.enter_context((self.root / 'log').open('a'))
        # With pdeathsig and kill-child everything ends with the test, even after kill -9.
        die_with_parent = ['setpriv', '--pdeathsig', 'KILL', '--']
        namespaces = ['unshare', '--net', '--mount', '--ipc', '--pid', '--fork', '--kill-child', '--']
        shell = ['bash', '-c', NAMESPACE_SCRIPT, 'bash', str(self.root), f'/{self.root.name}']
        self.unshare = unshare = subprocess.Popen([*die_with_parent, *namespaces, *shell], stdout=log, stderr=log)
        self.undo.callback(_kill, unshare)

        def read_first_pid() -> str:
            return Path(f'/proc/{unshare.pid}/task/{unshare.pid}/children').read_text().strip()

        wait_until(read_first_pid, 60, 'the namespaces')
        self.pid = int(read_first_pid())
        self.undo.callback(_stop_dockerd, unshare, self.pid)
        uplink = ['slirp4netns', '--configure', '--mtu=65520', '--disable-host-loopback', str(self.pid), 'tap0']
        self.undo.callback(_kill, subprocess.Popen([*die_with_parent, *uplink], stdout=log, stderr=log))

        def is_answering() -> bool:
            assert unshare.poll() is None, f'dockerd ended:\n{(self.root / "log").read_text()[-2000:]}'
            command = ['docker', '--host', self.host, 'version']
            return subprocess.run(command, check=False, capture_output=True).returncode == 0

        wait_until(is_answering, 60, f'dockerd answers on {self.host}')

    def cut_power(self) -> None:
        """Kill dockerd and all containers: rules, bridges and /run are lost, and the data stays."""
        _kill(self.unshare)
        wait_until(lambda: not Path(f'/proc/{self.pid}').exists(), 20, 'the end of dockerd')
        self.undo.close()
        shutil.rmtree(self.root / 'exec')
        (self.root / 'docker.pid').unlink()

    def wrap_command(self, command: Sequence[str]) -> list[str]:
        return ['nsenter', f'--net=/proc/{self.pid}/ns/net', '--', *command]

    def run_docker(self, *arguments: str) -> str:
        command = ['docker', '--host', self.host, *arguments]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()

    def read_major_version(self) -> int:
        return int(self.run_docker('version', '--format', '{{.Server.Version}}').partition('.')[0])


@contextmanager
def start_engine() -> Iterator[Engine]:
    """Yield an Engine with the images BASE and POSTGRES, and remove all of it afterwards."""
    base = get_base_archive()
    with ExitStack() as undo:
        # pytest's temporary directory would be too long: the path of a socket has at most 107 characters.
        root = Path(tempfile.mkdtemp(prefix='ecomp-docker-'))
        undo.callback(shutil.rmtree, root)
        undo.callback(_remove_cgroups, f'/{root.name}')
        started = Engine(root, undo.enter_context(ExitStack()))
        started.boot()
        started.run_docker('import', str(base), BASE)
        context = root / 'postgres'
        context.mkdir()
        (context / 'Dockerfile').write_text(POSTGRES_DOCKERFILE)
        (context / 'entry').write_text(POSTGRES_ENTRY)
        (context / 'entry').chmod(0o755)
        started.run_docker('build', '--quiet', '--tag', POSTGRES, str(context))
        yield started


def get_base_archive() -> Path:
    """Return a tar of the base image's files, which takes half a minute and 450 MB to make."""
    release = platform.freedesktop_os_release()
    components = 'main' if release['ID'] == 'debian' else 'main,universe'
    recipe = [
        '--variant=minbase',
        f'--include={",".join(PACKAGES)}',
        f'--components={components}',
        f'--essential-hook={NO_CLUSTER_HOOK}',
        '--aptopt=Apt::Install-Recommends "false"',
        *(f'--dpkgopt=path-exclude=/usr/share/{part}/*' for part in ('doc', 'man', 'locale')),
        release['VERSION_CODENAME'],
    ]

    def make(work: Path) -> Path:
        archive = work / 'base.tar'
        command = ['mmdebstrap', '--quiet', *recipe, str(archive)]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        assert result.returncode == 0, f'mmdebstrap cannot make the base image: {result.stderr[-2000:]}'
        return archive

    return cache_file('docker-base.tar', recipe, make)


def _stop_dockerd(unshare: subprocess.Popen[bytes], dockerd: int) -> None:
    """Stop dockerd, which as process 1 of its namespace takes everything along."""
    if unshare.poll() is None:
        os.kill(dockerd, signal.SIGTERM)
        try:
            unshare.wait(20)
        except subprocess.TimeoutExpired:
            os.kill(dockerd, signal.SIGKILL)
            unshare.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _remove_cgroups(name: str) -> None:
    top = Path('/sys/fs/cgroup')
    for parent in (top / name.lstrip('/'), *top.glob(f'*{name}')):
        for path in sorted([parent, *parent.rglob('*/')], reverse=True) if parent.is_dir() else ():
            path.rmdir()
