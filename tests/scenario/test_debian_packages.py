"""The Debian packages: built by their command, checked by lintian, and installed on a machine that boots."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import ecomp
from tests.kit.booted import BootedMachine, explain_missing, read_page_packages, start_lan
from tests.kit.machine import explain_missing_packages
from tests.kit.servers import wait_until
from tests.kit.tree import copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

REQUIRED_PACKAGES = {'dh': 'debhelper', 'dpkg-buildpackage': 'dpkg-dev', 'lintian': 'lintian'}
NAMES = ('ecomp-client', 'ecomp-compute')
SERVICES = ('ecompute', 'mdserver')
LATER_VERSION = '99.0'
# Instead of ecompute, which ends if there is no etcd, its environment. Once that has stopped, the version that is
# installed at this time is noted.
DROP_IN = """[Service]
Type=exec
ExecStart=
ExecStart=/usr/lib/ecomp-compute/bin/python3 -I -c 'import signal; signal.pause()'
ExecStopPost=sh -c 'ecompute --version >/srv/stopped'
"""


def build_packages(clone: Path, directory: Path) -> list[Path]:
    """Build the packages of a clone with the command for users; return their paths, in the order of NAMES."""
    build = subprocess.run([clone / 'packaging/build', directory], capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr[-5000:]
    paths = sorted(directory.iterdir())
    assert build.stdout == ''.join(f'{path}\n' for path in paths)
    assert [path.name.partition('_')[0] for path in paths] == list(NAMES)
    return paths


@pytest.fixture(scope='module')
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a clone in which packages can be built."""
    assert not (reason := explain_missing_packages(REQUIRED_PACKAGES)), reason
    directory = tmp_path_factory.mktemp('debian') / 'clone'
    copy_tree(directory)
    return directory


@pytest.fixture(scope='module')
def packages(clone: Path) -> list[Path]:
    """Provide the packages of this version."""
    return build_packages(clone, clone.parent / 'packages')


@pytest.fixture(scope='module')
def later_packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Provide the packages of a later version."""
    clone = tmp_path_factory.mktemp('later') / 'clone'
    copy_tree(clone)
    for module in (clone / 'ecomp/__init__.py', clone / 'md_server/mdserver/__init__.py'):
        module.write_text(re.sub("(?<=__version__ = ').*(?=')", LATER_VERSION, module.read_text()))
    return build_packages(clone, clone.parent / 'packages')


def test_build_leaves_no_files_in_the_clone(clone: Path, packages: list[Path]) -> None:
    assert packages
    fresh = clone.parent / 'fresh'
    copy_tree(fresh)
    assert {path.relative_to(clone) for path in clone.rglob('*')} == {
        path.relative_to(fresh) for path in fresh.rglob('*')
    }


def test_lintian_finds_nothing(packages: list[Path]) -> None:
    done = subprocess.run(['lintian', '--fail-on', 'error,warning', *packages], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ''), done.stderr


@pytest.fixture
def machine() -> Iterator[BootedMachine]:
    """Provide a machine with the Debian for which the packages are built, and without what they need."""
    assert not (reason := explain_missing()), reason
    release = re.search('(?m)^VERSION_CODENAME=(.*)', Path('/etc/os-release').read_text())
    assert release
    with start_lan({'hv1': '10.0.0.11'}) as machines:
        yield machines.boot('hv1', release[1], read_page_packages())


def copy_packages(machine: BootedMachine, packages: list[Path]) -> list[str]:
    """Copy packages to a machine; return their paths there."""
    for path in packages:
        shutil.copy(path, Path(f'/proc/{machine.init_pid}/root/srv'))
    return [f'/srv/{path.name}' for path in packages]


def read_versions(machine: BootedMachine) -> dict[str, str]:
    """Return the version that each command prints."""
    return dict(
        machine.run(command, '--version').strip().split(' ', 1) for command in ('eschedule', 'ecompute', 'mdserver')
    )


def read_states(machine: BootedMachine) -> dict[str, tuple[str, str]]:
    """Return systemd's ActiveState and UnitFileState of each service."""
    show = ('systemctl', 'show', '--value', '-p', 'ActiveState', '-p', 'UnitFileState')
    return {name: tuple(machine.run(*show, name).split()) for name in SERVICES}


def find_files(machine: BootedMachine) -> set[str]:
    """Find all files with names like those in the packages, outside of the clone."""
    pattern = '.*/_?\\(ecomp\\|eschedule\\|mdserver\\)[^/]*'
    return set(machine.run('find', '/etc', '/usr', '/var', '/run', '-xdev', '-regex', pattern).split())


def test_packages_are_installed_upgraded_removed_and_purged(
    machine: BootedMachine, packages: list[Path], later_packages: list[Path]
) -> None:
    machine.run('apt-get', 'install', *copy_packages(machine, packages))

    versions = dict.fromkeys(('eschedule', 'ecompute', 'mdserver'), ecomp.__version__)
    assert read_versions(machine) == versions
    assert read_states(machine) == dict.fromkeys(SERVICES, ('inactive', 'disabled'))
    machine.run('systemd-analyze', 'verify', *(f'{name}.service' for name in SERVICES))
    # It finds libvirt and its own bindings to it, and misses only the control host.
    check = machine.run_unchecked('ecompute', '--check')
    checks = {line.partition(':')[0] for line in check.stdout.splitlines()}
    assert (check.returncode, checks >= {'etcd', 'placement'}, 'libvirt' in checks) == (7, True, False), check
    assert machine.run('ls', '-A', '/etc/ecomp') == ''
    assert machine.run('getent', 'passwd', '65520').startswith('_mdserver:')
    completion = 'source /usr/share/bash-completion/completions/eschedule; complete -p eschedule'
    assert machine.run('bash', '-c', completion).strip() == 'complete -F _eschedule eschedule'

    drop_in = '/etc/systemd/system/ecompute.service.d/test.conf'
    root = Path(f'/proc/{machine.init_pid}/root')
    (root / drop_in[1:]).parent.mkdir()
    (root / drop_in[1:]).write_text(DROP_IN)
    (root / 'etc/ecomp/compute.yaml').write_text('etcd: {host: localhost}\n')
    machine.run('systemctl', 'enable', '--now', 'ecompute')
    pid = machine.run('systemctl', 'show', '--value', '-p', 'MainPID', 'ecompute')

    machine.run('dpkg', '-i', *copy_packages(machine, later_packages))

    assert read_versions(machine) == dict.fromkeys(versions, LATER_VERSION)
    assert read_states(machine) == {'ecompute': ('active', 'enabled'), 'mdserver': ('inactive', 'disabled')}
    assert machine.run('systemctl', 'show', '--value', '-p', 'MainPID', 'ecompute') != pid
    # A running ecompute would start workers of the new version.
    assert machine.run('cat', '/srv/stopped') == f'ecompute {ecomp.__version__}\n'

    machine.run('dpkg', '-r', *NAMES)

    wait_until(lambda: machine.run_unchecked('pgrep', '-f', 'ecomp-compute').returncode == 1, 30, 'ecompute has ended')
    assert machine.run('ls', '/etc/ecomp') == 'compute.yaml\n'
    assert machine.run_unchecked('ls', '-d', '/usr/lib/ecomp-client', '/usr/lib/ecomp-compute').stdout == ''

    machine.run('dpkg', '-P', *NAMES)

    assert find_files(machine) == {'/etc/ecomp', '/etc/systemd/system/ecompute.service.d'}
