"""A stock cloud image boots with a key, a name and an address, and Debian 13 runs the tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from ecomp.errors import EcompError
from tests.kit.commands import Result
from tests.kit.kept import cache_file
from tests.kit.lab import Lab, make_lab_name
from tests.kit.machine import Machine, explain_missing, start_machine
from tests.kit.servers import make_environment, wait_until
from tests.kit.tree import copy_tree
from tests.scenario.debian_image import get_debian_image

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(os.geteuid() != 0, reason='hypervisors in namespaces need root'),
]

# A stock cloud image with systemd, sshd and cloud-init. It gets its metadata in either way: from the network or from a
# disk.


QUERY = 'resources=VCPU:1,DISK_GB:3,MEMORY_MB:512'
# Seconds that an emulated Debian may take until cloud-init has finished, with another one beside it.
READY_SECONDS = 1200
# The host whose guests get their metadata in this way.
HOST_BY_WAY = {'network': 'hv1', 'iso': 'hv2'}
# Additional lines of that host's compute.yaml. A current Debian configures a second interface only from a disk.
EXTRA_CONFIG = {'network': '', 'iso': 'bridge: br0\n'}
SCRIPT = """\
#!/bin/sh
echo "$(id -un) on $(hostname)" >/var/tmp/ran
"""
# The EC2 paths, read with cloud-init's own code as a guest does that does not know NoCloud.
READ_EC2_PATHS = """\
import json
from cloudinit.sources.helpers import ec2
where = ('2009-04-04', 'http://169.254.169.254')
print(json.dumps([ec2.get_instance_metadata(*where), ec2.get_instance_userdata(*where).decode()]))
"""


@dataclass
class Guest:
    """A ready guest: `private` opens it, and `done` is the result of the command that made it."""

    lab: Lab
    host: str
    name: str
    private: Path
    done: Result

    @property
    def instance(self) -> str:
        return re.findall(r'OF INSTANCE (\S+)', self.done.stdout)[0]

    def ssh(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the guest by `eschedule ssh`, which checks the reported host key."""
        schedule = self.lab.directory / 'schedule.yaml'
        home = {'HOME': str(self.private.parent), 'SSH_AUTH_SOCK': ''}
        return subprocess.run(
            [sys.executable, '-m', 'ecomp.schedule', '--config', schedule, 'ssh', self.name, '-i', self.private, '--',
             command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
            env=make_environment() | home,
        )  # fmt: skip

    def make_ssh_command(self, command: str) -> list[str]:
        address = self.lab.eschedule(self.name).stdout.strip()
        timeouts = ('BatchMode=yes', 'ConnectTimeout=5', 'ServerAliveInterval=5')
        options = (*timeouts, 'StrictHostKeyChecking=no', 'UserKnownHostsFile=/dev/null', 'LogLevel=ERROR')
        words = [word for option in options for word in ('-o', option)]
        return ['ssh', '-i', str(self.private), *words, f'debian@{address}', command]

    def run_checked(self, command: str) -> str:
        done = self.ssh(command)
        assert done.returncode == 0, done
        return done.stdout.strip()


@pytest.fixture(scope='module')
def guests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Guest]]:
    """Provide one guest for each way of metadata, booted side by side."""
    work = tmp_path_factory.mktemp('cloud')
    with closing(Lab(make_lab_name('cloud'), len(HOST_BY_WAY))) as lab:
        shutil.copyfile(get_debian_image(), lab.directory / 'images/debian.qcow2')
        for way, host in HOST_BY_WAY.items():
            lab.stop_ecompute(host)
            with (lab.directory / host / 'compute.yaml').open('a') as config:
                config.write(f'metadata: {way}\n{EXTRA_CONFIG[way]}')
        lab.start_ecomputes()

        def boot(way: str) -> Guest:
            private, script = work / way, work / f'{way}.sh'
            subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', private], check=True, timeout=60)
            script.write_text(SCRIPT)
            compute = lab.read_compute(HOST_BY_WAY[way])
            done = lab.eschedule(
                f'{QUERY}&in_tree={compute}', lab.make_url('debian.qcow2'), '--name', f'by-{way}',
                '--ssh-key', f'{private}.pub', '--user-data', str(script),
                '--wait=ready', '--timeout', str(READY_SECONDS),
                timeout=READY_SECONDS + 60,
            )  # fmt: skip
            return Guest(lab, HOST_BY_WAY[way], f'by-{way}', private, done)

        with ThreadPoolExecutor() as pool:
            yield dict(zip(HOST_BY_WAY, pool.map(boot, HOST_BY_WAY), strict=True))


@pytest.mark.parametrize('way', HOST_BY_WAY)
def test_stock_cloud_image_boots_with_its_metadata(guests: Mapping[str, Guest], way: str) -> None:
    """Check ssh with the key, name, user-data, size of the root file system and readiness."""
    guest = guests[way]
    assert guest.done.code == 0, guest.done
    record = json.loads(guest.lab.eschedule('show', guest.name, '-f', 'json').stdout)
    assert (record['state'], record['stages']['ready'] > record['stages']['addressed']) == ('active', True)
    commands = (
        *('hostname', 'cat /var/tmp/ran', 'df --output=size -B1 / | tail -n 1', 'cloud-init status'),
        *('cloud-init query subplatform', 'cloud-init query instance_id'),
    )
    hostname, script_output, size, status, source, instance = guest.run_checked('; '.join(commands)).splitlines()
    assert (hostname, script_output, instance) == (guest.name, f'root on {guest.name}', guest.instance)
    assert 2.7 * 2**30 < int(size) < 3 * 2**30
    assert status == 'status: done'
    assert source.startswith({'network': 'seed-dir (dmi,http://169.254.169.254/', 'iso': 'config-disk (/dev/vdb)'}[way])


def test_second_interface_is_up_and_default_route_uses_the_first(guests: Mapping[str, Guest]) -> None:
    guest = guests['iso']
    command = 'ip -j route show default; ip -j link; ip -j -4 address show scope global'
    routes, links, addresses = map(json.loads, guest.run_checked(command).splitlines())
    macs = {link['ifname']: link['address'] for link in links}
    record = json.loads(guest.lab.eschedule('show', guest.name, '-f', 'json').stdout)
    first, second = (interface['mac'] for interface in record['addresses'])
    addresses_by_mac = {
        macs[entry['ifname']]: [address['local'] for address in entry['addr_info']] for entry in addresses
    }
    assert addresses_by_mac[first] == [guest.lab.eschedule(guest.name).stdout.strip()]
    assert len(addresses_by_mac[second]) == 1
    # A network need not have a default route.
    assert {(macs[route['dev']], route['metric']) for route in routes} <= {(first, 100), (second, 200)}
    assert (first, 100) in {(macs[route['dev']], route['metric']) for route in routes}


def test_key_of_another_guest_is_refused(guests: Mapping[str, Guest]) -> None:
    network, iso = guests['network'], guests['iso']
    stranger = Guest(iso.lab, iso.host, iso.name, network.private, iso.done)
    refused = stranger.ssh('true')
    assert refused.returncode == 255, refused
    assert 'Permission denied' in refused.stderr


def test_guest_processor_supports_x86_64_v2_and_v3(guests: Mapping[str, Guest]) -> None:
    """EL 9 needs x86-64-v2 and EL 10 x86-64-v3: their kernels panic on less."""
    levels = guests['iso'].run_checked('/lib64/ld-linux-x86-64.so.2 --help')
    for level in ('v2', 'v3'):
        assert re.search(rf'^ *x86-64-{level} \(supported', levels, re.MULTILINE), levels


def test_cloud_init_reads_the_ec2_paths(guests: Mapping[str, Guest]) -> None:
    guest = guests['network']
    public = guest.private.with_suffix('.pub').read_text().strip()
    metadata, user_data = json.loads(guest.run_checked(f"python3 -c '{READ_EC2_PATHS.replace(chr(39), chr(34))}'"))
    address = guest.lab.eschedule(guest.name).stdout.strip()
    names = {'hostname': guest.name, 'local-hostname': guest.name}
    keys = {'public-keys': {'default': public}}
    assert metadata == {'instance-id': guest.instance, 'local-ipv4': address, **names, **keys}
    assert user_data == SCRIPT


def test_host_keys_are_reported_and_cloud_init_logs_no_warning(guests: Mapping[str, Guest]) -> None:
    for guest in guests.values():
        record = json.loads(guest.lab.eschedule('show', guest.name, '-f', 'json').stdout)
        host_keys = guest.run_checked('cat /etc/ssh/ssh_host_*_key.pub').splitlines()
        assert record['host_keys'] == [' '.join(line.split()[:2]) for line in host_keys]
        warnings = guest.ssh('sudo grep -E "WARN.*(phone|vendor|host_.*key)" /var/log/cloud-init.log')
        assert (warnings.returncode, warnings.stdout) == (1, '')
        assert 'Cloud-init v. ' in guest.lab.eschedule('log', guest.name).stdout


def test_ssh_refuses_a_changed_host_key(guests: Mapping[str, Guest]) -> None:
    """Another machine is simulated at the guest's address, and then the original one again."""
    guest = guests['iso']
    key = '/etc/ssh/ssh_host_ed25519_key'
    change = f'sudo mv {key} /root/own && sudo ssh-keygen -q -t ed25519 -N "" -f {key} && sudo systemctl restart ssh'
    assert guest.run_checked('hostname') == guest.name
    guest.run_checked(f"sudo sh -c '{change.replace('sudo ', '')}'")
    refused = guest.ssh('true')
    assert refused.returncode == 255
    assert 'Host key verification failed' in refused.stderr
    restore = f'mv /root/own {key} && systemctl restart ssh'
    guest.lab.run_on(guest.host, *guest.make_ssh_command(f"sudo sh -c '{restore}'"))
    assert guest.run_checked('hostname') == guest.name


def test_reboot_keeps_the_address_and_is_no_first_boot(guests: Mapping[str, Guest]) -> None:
    """cloud-init runs the user-data of an instance once, and the host keys stay."""
    guest = guests['network']
    guest.run_checked('sudo rm /var/tmp/ran')
    before = guest.lab.eschedule(guest.name).stdout, guest.run_checked('cat /etc/ssh/ssh_host_ed25519_key.pub')
    boot = guest.run_checked('cat /proc/sys/kernel/random/boot_id')
    assert guest.lab.eschedule('reboot', guest.name).code == 0
    ready = ('wait', guest.name, '--for', 'ready', '--timeout', str(READY_SECONDS))
    assert guest.lab.eschedule(*ready, timeout=READY_SECONDS + 60).code == 0
    assert guest.run_checked('cat /proc/sys/kernel/random/boot_id') != boot
    assert (
        guest.lab.eschedule(guest.name).stdout,
        guest.run_checked('cat /etc/ssh/ssh_host_ed25519_key.pub'),
    ) == before
    assert guest.run_checked('cloud-init status --wait').endswith('status: done')
    assert guest.ssh('test -e /var/tmp/ran').returncode == 1


def test_reboot_without_ecompute_is_no_first_boot(guests: Mapping[str, Guest]) -> None:
    """Without the metadata server cloud-init must not make new host keys."""
    guest = guests['network']
    keys, boot = (
        guest.run_checked('cat /etc/ssh/ssh_host_*_key.pub'),
        guest.run_checked('cat /proc/sys/kernel/random/boot_id'),
    )
    lab = guest.lab
    lab.stop_ecompute(guest.host)
    guest.ssh('sudo reboot')

    def has_rebooted() -> bool:
        try:
            boot_id = lab.run_on(guest.host, *guest.make_ssh_command('cat /proc/sys/kernel/random/boot_id')).strip()
        except EcompError:
            return False  # its sshd does not run now
        return boot_id not in ('', boot)

    wait_until(has_rebooted, READY_SECONDS, 'it has booted again')
    # Wait until cloud-init has finished: until then it might still make new host keys.
    output = lab.run_on(guest.host, *guest.make_ssh_command('cloud-init status --wait >/dev/null; hostname'))
    assert output.strip() == guest.name
    assert lab.run_on(guest.host, *guest.make_ssh_command('cat /etc/ssh/ssh_host_*_key.pub')).strip() == keys
    lab.start_ecomputes()
    wait_until(lambda: guest.ssh('true').returncode == 0, 60, 'it is entered as before')


def test_destroyed_guests_leave_nothing(guests: Mapping[str, Guest]) -> None:
    lab = guests['iso'].lab
    lab.destroy(*(guest.name for guest in guests.values()))
    lab.check()


# Debian 13 with its Python 3.13, libvirt 11.3, QEMU 10.0 and etcd 3.5: the quickstart, and the tests of two parts.
#
# A minimal system made from Debian's packages, on a machine of its own, with a copy of this tree as a clone has it.


CLONE = Path('/clone')
RECIPE = ['--variant=minbase', '--include=git,python3,python3-venv,ca-certificates,iproute2,procps', 'trixie']
CERTIFICATES = Path('/etc/ssl/certs/ca-certificates.crt')
PIP = [path for path in (Path('/etc/pip.conf'),) if path.exists()]


@pytest.fixture(scope='module')
def trixie(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Provide Debian 13 with this tree at CLONE and without the packages that it needs."""
    if reason := explain_missing():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp('trixie') / 'root'
    root.mkdir(mode=0o755)
    try:
        subprocess.run(
            ['tar', '-xf', str(cache_file('debian-13.tar', RECIPE, _make_root_archive)), '-C', str(root)], check=True
        )
        # If the packages come through a proxy, its certificate authority and pip's settings are needed.
        shutil.copyfile(CERTIFICATES, root / CERTIFICATES.relative_to('/'))
        for path in PIP:
            shutil.copyfile(path, root / path.relative_to('/'))
        copy_tree(root / CLONE.relative_to('/'))
        with start_machine(root) as started:
            for words in (['init', '--quiet'], ['add', '--all']):
                run(started, 'git', *words)
            yield started
    finally:
        shutil.rmtree(root.parent, ignore_errors=True)


def _make_root_archive(work: Path) -> Path:
    archive = work / 'root.tar'
    result = subprocess.run(
        ['mmdebstrap', '--quiet', *RECIPE, str(archive)], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, f'mmdebstrap cannot make Debian 13: {result.stderr[-2000:]}'
    return archive


def run(trixie: Machine, *command: str) -> str:
    pip_variables = [f'{name}={value}' for name, value in os.environ.items() if name.startswith('PIP_')]
    clean = ['env', '-i', 'HOME=/root', 'LC_ALL=C.UTF-8', 'PATH=/usr/sbin:/usr/bin:/sbin:/bin', *pip_variables]
    done = trixie.run([*clean, *command], CLONE)
    print(done.stdout)
    assert done.returncode == 0, f'{command}: {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-4000:]}'
    return done.stdout


def test_quickstart_and_its_commands(trixie: Machine) -> None:
    output = run(trixie, './quickstart.sh')
    assert 'NOTIFIED TARGET' in output
    assert 'This took ' in output
    commands = [line.strip() for line in output.partition('Try next')[2].splitlines() if line.startswith('  ')]
    assert len(commands) == 3
    ends = ['elab status', 'eschedule destroy --every --yes --wait', 'eschedule check 2>&1']
    said = run(trixie, 'bash', '-ec', '\n'.join([*commands, *ends]))
    assert (said.count('NOTIFIED TARGET'), said.count(' ready')) == (1, 8)
    assert 'shop-web-3  create' in said
    assert '3 computes and 0 living instances' in said
    faked = run(trixie, './quickstart.sh', '--fake')
    assert 'Hosts and guests were fake: nothing booted' in faked
    run(trixie, './quickstart.sh', 'down')
    assert trixie.run(['ls', '/var/lib/elab']).stdout == ''


@pytest.mark.parametrize('part', ['unit', 'functional'])
def test_parts_pass_on_debian_13(trixie: Machine, part: str) -> None:
    output = run(trixie, 'tests/run', part)
    assert ' passed' in output
