"""The Debian packages are built, checked, installed, upgraded, removed and purged.

The commands are those of the pages 'install' and 'real machines'. A guest runs from the first start to the last.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import ecomp
from tests.kit.booted import CLONE_PATH, BootedMachine
from tests.kit.servers import TOP, wait_until
from tests.scenario.debian_image import get_debian_image
from tests.scenario.page_cluster import (
    Cluster,
    boot_cluster,
    read_blocks,
    read_guest_pids,
    read_service_pid,
    serves_metadata,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PAGE = TOP / 'docs/howto/install.md'
REMOVAL_PAGE = TOP / 'docs/howto/keep-running.md'
HOSTS = {'control': '10.0.0.5', 'hv1': '10.0.0.11'}
NAMES = ('ecomp-client', 'ecomp-compute')
SERVICES = ('ecompute', 'mdserver')
LATER_VERSION = '99.0'
QUERY = 'resources=VCPU:1,DISK_GB:3,MEMORY_MB:512'
# What guests need, as the page says.
KEPT_FILES = {
    '/var/lib/ecompute',
    *(f'{directory}/ecompute.xml' for directory in ('/etc/libvirt/storage', '/run/libvirt/storage')),
    '/etc/libvirt/storage/autostart/ecompute.xml',
    *(f'/etc/libvirt/nwfilter/ecompute-guest-{kind}-3.xml' for kind in ('address', 'mac')),
}
# root's key pair is the same on all machines.
SSH_KEY_OPTIONS = ('--ssh-key', '/root/.ssh/authorized_keys')
# Note the version that is installed when ecompute has stopped.
DROP_IN_DIRECTORY = '/etc/systemd/system/ecompute.service.d'
DROP_IN = """[Service]
ExecStopPost=+sh -c 'ecompute --version >/srv/stopped'
"""


@pytest.fixture(scope='module', params=['bookworm', 'trixie'])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, guest_image: Path
) -> Iterator[Cluster]:
    """Provide a control host after the page's commands, and a machine with certificates only."""
    images = {'guest.qcow2': guest_image, 'debian.qcow2': get_debian_image()}
    with boot_cluster(HOSTS, request.param, tmp_path_factory.mktemp('images'), images) as booted:
        *first, last = read_blocks('control')
        for block in first:
            # There is no second hypervisor.
            booted.control.type_as_user(re.sub('.* root@hv2:.*', '', block))
        booted.control.type_as_user(last)
        booted.bin = '/usr/bin'
        yield booted


@pytest.fixture(scope='module')
def new_files(cluster: Cluster) -> set[str]:
    """Build the packages in the control host's clone, and return the files that this adds."""
    before = list_clone(cluster.control)
    cluster.control.run('apt-get', 'update')
    type_blocks(cluster.control, 'builder')
    return list_clone(cluster.control) - before


def list_clone(machine: BootedMachine) -> set[str]:
    return set(machine.run('find', str(CLONE_PATH), '-type', 'f', '-printf', '%P\n').split())


def type_blocks(machine: BootedMachine, place: str) -> None:
    for block in read_blocks(place, PAGE):
        machine.type_as_user(block)


def copy_packages(cluster: Cluster) -> None:
    dist = f'{CLONE_PATH}/packaging/dist'
    cluster.hypervisors['hv1'].run('mkdir', '-p', dist)
    cluster.control.run('sh', '-c', f'scp {dist}/*.deb root@hv1:{dist}')


def read_states(machine: BootedMachine) -> dict[str, tuple[str, ...]]:
    show = ('systemctl', 'show', '--value', '-p', 'ActiveState', '-p', 'UnitFileState')
    return {name: tuple(machine.run(*show, name).split()) for name in SERVICES}


def check_versions(cluster: Cluster, version: str) -> None:
    assert cluster.eschedule('--version').strip() == f'eschedule {version}'
    for name in SERVICES:
        assert cluster.hypervisors['hv1'].run(name, '--version').strip() == f'{name} {version}'


def find_files(machine: BootedMachine) -> set[str]:
    pattern = '.*/_?\\(ecomp\\|eschedule\\|mdserver\\)[^/]*'
    return set(machine.run('find', '/etc', '/usr', '/var', '/run', '-xdev', '-regex', pattern, '-prune').split())


def read_guest_boot_id(cluster: Cluster, name: str) -> str:
    return cluster.eschedule('ssh', name, '--', 'cat /proc/sys/kernel/random/boot_id').strip()


def test_build_adds_only_the_packages_to_the_clone(new_files: set[str]) -> None:
    assert [Path(path).name.partition('_')[0] for path in sorted(new_files)] == list(NAMES)
    assert {str(Path(path).parent) for path in new_files} == {'packaging/dist'}


def test_lintian_finds_nothing(cluster: Cluster, new_files: set[str]) -> None:
    cluster.control.run('apt-get', 'install', '--no-install-recommends', 'lintian')
    assert cluster.control.type_as_user(f'lintian --fail-on error,warning {shlex.join(new_files)}') == ''


def test_packages_are_installed_upgraded_removed_and_purged(cluster: Cluster, new_files: set[str]) -> None:
    assert new_files
    control, hypervisor = cluster.control, cluster.hypervisors['hv1']
    files_before = {machine.name: find_files(machine) for machine in (control, hypervisor)}

    type_blocks(control, 'client')
    copy_packages(cluster)
    install, start = read_blocks('hypervisor', PAGE)
    hypervisor.type_as_user(install)

    check_versions(cluster, ecomp.__version__)
    assert read_states(hypervisor) == dict.fromkeys(SERVICES, ('inactive', 'disabled'))
    hypervisor.run('systemd-analyze', 'verify', *(f'{name}.service' for name in SERVICES))
    assert hypervisor.run('getent', 'passwd', '65520').startswith('_mdserver:')
    completion = 'source /usr/share/bash-completion/completions/eschedule; complete -p eschedule'
    assert control.run('bash', '-c', completion).strip() == 'complete -F _eschedule eschedule'

    hypervisor.type_as_user(start)
    type_blocks(hypervisor, 'metadata')

    pids = {name: read_service_pid(hypervisor, name) for name in SERVICES}
    cluster.wait_up('hv1')
    cluster.check_cluster()
    instance = cluster.place('kept', 'hv1', 'debian.qcow2', *SSH_KEY_OPTIONS, query=QUERY)
    cluster.wait('ready', 'kept')
    guests, boot_id = read_guest_pids(hypervisor), read_guest_boot_id(cluster, 'kept')
    assert set(guests) == {instance}

    build_later_packages(control)
    copy_packages(cluster)
    hypervisor.run('mkdir', DROP_IN_DIRECTORY)
    Path(f'/proc/{hypervisor.init_pid}/root{DROP_IN_DIRECTORY}/test.conf').write_text(DROP_IN)
    hypervisor.run('systemctl', 'daemon-reload')
    type_blocks(control, 'client')
    hypervisor.type_as_user(install)

    check_versions(cluster, LATER_VERSION)
    # A running ecompute would start workers of the new version.
    assert hypervisor.run('cat', '/srv/stopped') == f'ecompute {ecomp.__version__}\n'
    assert all(read_service_pid(hypervisor, name) != pid for name, pid in pids.items())
    cluster.wait_up('hv1')
    cluster.check_cluster()
    assert serves_metadata(hypervisor)
    assert (read_guest_pids(hypervisor), read_guest_boot_id(cluster, 'kept')) == (guests, boot_id)
    cluster.place('new', 'hv1')
    cluster.wait('ready', 'new')
    assert cluster.is_answering('new')
    cluster.destroy('new')

    configuration = hypervisor.run('ls', '/etc/ecomp')
    hypervisor.run('apt-get', 'remove', 'ecomp-compute')

    wait_until(lambda: hypervisor.run_unchecked('pgrep', '-f', 'ecomp-compute').returncode == 1, 30, 'all have ended')
    assert hypervisor.run('ls', '/etc/ecomp') == configuration
    assert hypervisor.run_unchecked('ls', '/usr/lib/ecomp-compute').stdout == ''
    assert cluster.read_states() == {'hv1': 'closed'}
    # As the page warns.
    assert 'Remv libvirt-daemon-system ' in hypervisor.run('apt-get', '-s', 'autoremove')
    assert (read_guest_pids(hypervisor), read_guest_boot_id(cluster, 'kept')) == (guests, boot_id)

    hypervisor.run('rm', '-r', DROP_IN_DIRECTORY)
    hypervisor.run('apt-get', 'purge', 'ecomp-compute')

    assert find_files(hypervisor) - files_before['hv1'] == KEPT_FILES
    assert (read_guest_pids(hypervisor), read_guest_boot_id(cluster, 'kept')) == (guests, boot_id)

    hypervisor.type_as_user(install)
    hypervisor.type_as_user(start)

    cluster.wait_up('hv1')
    assert (read_guest_pids(hypervisor), read_guest_boot_id(cluster, 'kept')) == (guests, boot_id)
    cluster.destroy('kept')
    assert read_guest_pids(hypervisor) == {}

    hypervisor.run('systemctl', 'disable', '--now', *SERVICES)
    cluster.eschedule('host', 'forget', 'hv1')
    for command in re.findall(r'virsh (?:pool|nwfilter)-[^;\n]+', REMOVAL_PAGE.read_text()):
        hypervisor.run(*command.split())
    hypervisor.run('apt-get', 'purge', 'ecomp-compute')
    hypervisor.run('rm', '-r', '/var/lib/ecompute', '/etc/ecomp')

    assert find_files(hypervisor) == set()
    assert cluster.read_states() == {}

    control.run('apt-get', 'purge', 'ecomp-client')

    assert find_files(control) == files_before['control']


def build_later_packages(machine: BootedMachine) -> None:
    modules = 'ecomp/__init__.py md_server/mdserver/__init__.py'
    machine.type_as_user(f'sed -i "s/^__version__ = .*/__version__ = \'{LATER_VERSION}\'/" {modules}')
    type_blocks(machine, 'builder')
