"""The page 'real machines', typed on machines that boot with systemd as process 1.

A control host and two hypervisors of Debian 12, then the same of Debian 13. Their guests run under emulation.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.booted import GATEWAY, PAGE, BootedMachine, Lan, explain_missing, read_page_packages, start_lan
from tests.kit.servers import TOP, Server, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BLOCK = re.compile(r'<!-- typed on: (\w+) -->\n```sh\n(.*?)```', re.DOTALL)
HOSTS = {'control': '10.0.0.5', 'hv1': '10.0.0.11', 'hv2': '10.0.0.12'}
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
NOTIFIED = re.compile(r'NOTIFIED TARGET, (\S+), OF INSTANCE (\S+)')
BIN = '/opt/ecomp/bin'
# Seconds that an emulated guest may take on a busy machine.
BOOT_SECONDS = 600
# For bash: print the reply of an address to a GET of a path.
GET_SCRIPT = r"""exec 3<>"/dev/tcp/$1/80"; printf 'GET %s HTTP/1.0\r\n\r\n' "$2" >&3; timeout 5 cat <&3"""
METADATA = '169.254.169.254'


class ImageServer(Server):
    """The image server beside the machines."""

    name = 'images'

    def __init__(self, machines: Lan, directory: Path) -> None:
        super().__init__(directory)
        self._machines = machines
        self.served = directory / 'served'
        self.served.mkdir()
        self.go = directory / 'go'

    def command(self) -> list[str]:
        """Return the command, which runs on the bridge."""
        program = ['-m', 'tests.kit.slow_images', GATEWAY, '80', str(self.served), str(self.go)]
        return self._machines.outer_machine.wrap_command([sys.executable, *program], TOP)

    def is_ready(self) -> bool:
        return 'ready' in self.tail_log()


@dataclass
class Cluster:
    """The machines in the state in which the page leaves them."""

    control: BootedMachine
    hypervisors: dict[str, BootedMachine]
    images: ImageServer

    def eschedule(self, *words: str) -> str:
        """Run eschedule as root on the control host; return its output or raise AssertionError."""
        return self.control.run('env', '-C', '/', f'{BIN}/eschedule', *words)

    def place(self, name: str, host: str, image: str = 'guest.qcow2') -> str:
        """Place a guest with this name on this host; return its uuid."""
        output = self.eschedule(QUERY, f'http://{GATEWAY}/{image}', '--name', name, '--on', host)
        match = NOTIFIED.match(output)
        assert match, output
        return match[2]

    def wait(self, stage: str, *names: str) -> None:
        """Wait until these guests have reached this stage."""
        self.eschedule('wait', *names, '--for', stage, '--timeout', str(BOOT_SECONDS))

    def destroy(self, *names: str) -> None:
        """Destroy these guests; the audit must find nothing."""
        self.eschedule('destroy', '--wait', *names)
        self.eschedule('audit')

    def check_doctor(self) -> None:
        """Check that the doctor finds only what the page announces: an old version of etcd."""
        done = self.control.run_unchecked('env', '-C', '/', f'{BIN}/eschedule', 'doctor')
        assert [line.partition(':')[0] for line in done.stdout.splitlines()] == ['etcd-version'], done
        assert done.returncode == 0, done

    def show_record(self, name: str) -> dict[str, Any]:
        """Return the record of a guest as `show` prints it."""
        return dict(json.loads(self.eschedule('show', name, '-f', 'json')))

    def read_states(self) -> dict[str, str]:
        """Return the state of each host as `hosts` prints it."""
        return {row['host']: row['state'] for row in json.loads(self.eschedule('hosts', '-f', 'json'))}

    def wait_up(self, *hosts: str) -> None:
        """Wait until `hosts` shows these hosts as up."""
        wait_until(lambda: {self.read_states().get(host) for host in hosts} == {'up'}, 60, f'{hosts} are up')

    def is_answering(self, name: str) -> bool:
        """True if a guest answers its hypervisor at the address in its record."""
        guest_record = self.show_record(name)
        address = guest_record['addresses'][0]['address']
        reply = (
            self.hypervisors[guest_record['host']].run_unchecked('bash', '-c', GET_SCRIPT, 'bash', address, '/').stdout
        )
        return 'ecomp-guest' in reply

    def wait_ready_again(self, name: str) -> None:
        """Wait until a guest is ready again, whose host restarted it after a first reboot."""

        def is_ready_again() -> bool:
            last = self.show_record(name)['boots'][-1]
            return last['reason'] == 'host reboot' and 'ready' in last['stages']

        wait_until(is_ready_again, BOOT_SECONDS / 4, f'{name} is ready again')
        guest_record = self.show_record(name)
        assert (guest_record['state'], guest_record['fault'], len(guest_record['boots'])) == ('active', None, 2)
        assert self.is_answering(name)

    def read_console(self, name: str) -> str:
        """Return the console output of a guest."""
        host, _, path = self.show_record(name)['console'].partition(':')
        return self.hypervisors[host].run('cat', path)


def read_unit(booted: BootedMachine, name: str) -> dict[str, str]:
    """Return systemd's properties of a unit."""
    lines = booted.run('systemctl', 'show', name).splitlines()
    return {key: value for key, _, value in (line.partition('=') for line in lines)}


def read_service_pid(booted: BootedMachine, name: str) -> int:
    """Check that a service is ready, enabled and filtered; return its pid."""
    properties = read_unit(booted, f'{name}.service')
    expected = {'Type': 'notify', 'ActiveState': 'active', 'SubState': 'running', 'UnitFileState': 'enabled'}
    assert {key: properties[key] for key in expected} == expected, booted.run('journalctl', '-u', name, '-n', '50')
    assert count_filters(booted, properties['MainPID']) > count_filters(booted, '1'), 'its system calls are filtered'
    return int(properties['MainPID'])


def count_filters(booted: BootedMachine, pid: str) -> int:
    """Return the number of seccomp filters of a process.

    The machine itself is a container, which has some.
    """
    status = booted.run('cat', f'/proc/{pid}/status')
    return int(status.partition('Seccomp_filters:')[2].split()[0])


def read_guest_pids(hypervisor: BootedMachine) -> dict[str, int]:
    """Return the pid of each running guest by uuid."""
    names = hypervisor.run('virsh', '-q', 'list', '--name').split()
    return {name: int(hypervisor.run('cat', f'/run/libvirt/qemu/{name}.pid')) for name in names}


def read_blocks(machine: str) -> list[str]:
    """Return the blocks that the page has typed at this place."""
    return [text for place, text in BLOCK.findall(PAGE.read_text()) if place == machine]


@pytest.fixture(scope='module', params=['bookworm', 'trixie'])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, guest_image: Path
) -> Iterator[Cluster]:
    """Provide all three machines after the page's commands for control host and hypervisors."""
    assert not explain_missing(), explain_missing()
    with ExitStack() as undo:
        machines = undo.enter_context(start_lan(HOSTS))
        images = ImageServer(machines, tmp_path_factory.mktemp('images'))
        (images.served / 'guest.qcow2').write_bytes(guest_image.read_bytes())
        images.go.touch()
        undo.enter_context(images)
        control, *hypervisors = (machines.boot(name, request.param, read_page_packages()) for name in HOSTS)
        *first, last = read_blocks('control')
        for block in first:
            control.type_as_user(block)
        with ThreadPoolExecutor(len(hypervisors)) as threads:
            list(threads.map(set_up, hypervisors))
        control.type_as_user(last)
        yield Cluster(control, {hypervisor.name: hypervisor for hypervisor in hypervisors}, images)


def set_up(hypervisor: BootedMachine) -> None:
    """Type the page's commands for a hypervisor."""
    for block in read_blocks('hypervisor'):
        hypervisor.type_as_user(block)


def test_commands_of_the_page_set_up_the_cluster(cluster: Cluster) -> None:
    """Every service is ready, and a guest on each hypervisor boots with its metadata."""
    read_service_pid(cluster.control, 'ecomp-control')
    for name, machine in cluster.hypervisors.items():
        read_service_pid(machine, 'ecompute')
        properties = read_unit(machine, 'ecompute')
        assert properties['NRestarts'] == '0'
        assert properties['WatchdogUSec'] == '1min'
        assert properties['StatusText'].startswith('qemu guests'), properties['StatusText']
        # Exit 0: the only finding is a warning.
        check_output = machine.run(f'{BIN}/ecompute', '--check', '--config', '/etc/ecomp/compute.yaml')
        assert [line.partition(':')[0] for line in check_output.splitlines()] == ['etcd-version'], check_output
        cluster.place(f'first-{name}', name)
    assert cluster.read_states() == dict.fromkeys(cluster.hypervisors, 'up')
    cluster.check_doctor()
    for name, machine in cluster.hypervisors.items():
        cluster.wait('ready', f'first-{name}')
        guest_record = cluster.show_record(f'first-{name}')
        assert (guest_record['state'], guest_record['host'], guest_record['fault']) == ('active', name, None)
        assert cluster.is_answering(f'first-{name}')
        assert f'ecomp-guest: hostname first-{name}' in cluster.read_console(f'first-{name}')
        assert set(read_guest_pids(machine)) == {guest_record['instance']}
    cluster.destroy(*(f'first-{name}' for name in cluster.hypervisors))
    for machine in (cluster.control, *cluster.hypervisors.values()):
        assert machine.run('systemctl', '--failed', '--plain', '--no-legend') == '', machine.name


def test_guests_survive_a_reboot_of_their_hypervisor(cluster: Cluster) -> None:
    """Running guests start again at their addresses, and ecompute stops before any guest."""
    hypervisor = cluster.hypervisors['hv1']
    running_guest, stopped_guest = (cluster.place(name, 'hv1') for name in ('runs', 'rests'))
    cluster.wait('ready', 'runs', 'rests')
    cluster.eschedule('stop', '--wait', 'rests')
    before, boot = cluster.show_record('runs')['addresses'], hypervisor.boot_id()
    hypervisor.reboot()
    assert hypervisor.boot_id() != boot
    cluster.wait_ready_again('runs')
    assert cluster.show_record('runs')['addresses'] == before
    stopped = cluster.show_record('rests')
    assert (stopped['state'], stopped['fault'], len(stopped['boots'])) == ('stopped', None, 1)
    assert set(read_guest_pids(hypervisor)) == {running_guest}
    assert hypervisor.run('virsh', 'domstate', stopped_guest).strip() == 'shut off'
    read_service_pid(hypervisor, 'ecompute')
    assert read_stop_order(hypervisor) == ['ecompute', 'libvirt-guests', 'libvirtd']
    # The guest was asked to turn itself off, and did.
    assert 'ecomp-guest: power button' in cluster.read_console('runs')
    cluster.eschedule('start', '--wait', 'rests')
    cluster.destroy('runs', 'rests')


def read_stop_order(hypervisor: BootedMachine) -> list[str]:
    """Return these services in the order in which they were stopped at the last shutdown."""
    words = ['journalctl', '-b', '-1', '-o', 'cat', '_PID=1']
    matches = [re.match(r'Stopped (\S+)\.service', line) for line in hypervisor.run(*words).splitlines()]
    names = [match[1] for match in matches if match]
    services = ('ecompute', 'libvirt-guests', 'libvirtd')
    return [name for number, name in enumerate(names) if name in services and name not in names[number + 1 :]]


def test_guests_survive_a_power_loss_of_their_hypervisor(cluster: Cluster) -> None:
    """Guests that ran start again and stopped ones do not, though no service could report."""
    hypervisor = cluster.hypervisors['hv2']
    running_guest, _ = (cluster.place(name, 'hv2') for name in ('cut', 'off'))
    cluster.wait('ready', 'cut', 'off')
    cluster.eschedule('stop', '--wait', 'off')
    hypervisor.kill()
    hypervisor.start()
    cluster.wait_ready_again('cut')
    assert set(read_guest_pids(hypervisor)) == {running_guest}
    assert cluster.show_record('off')['state'] == 'stopped'
    cluster.wait_up('hv2')
    cluster.destroy('cut', 'off')


def test_restart_during_a_build_builds_again(cluster: Cluster) -> None:
    """The build starts again and leaves nothing of the first one."""
    hypervisor = cluster.hypervisors['hv1']
    slow = cluster.images.served / 'slow.qcow2'
    slow.write_bytes((cluster.images.served / 'guest.qcow2').read_bytes())
    cluster.images.go.unlink()
    instance = cluster.place('slow', 'hv1', 'slow.qcow2')
    wait_until(lambda: (cluster.show_record('slow')['progress'] or {}).get('done'), 60, 'half of the image is here')
    pid = read_service_pid(hypervisor, 'ecompute')
    hypervisor.run('systemctl', 'restart', 'ecompute')
    assert read_service_pid(hypervisor, 'ecompute') != pid
    assert cluster.show_record('slow')['state'] == 'building'
    cluster.images.go.touch()
    cluster.wait('ready', 'slow')
    guest_record = cluster.show_record('slow')
    assert (guest_record['state'], guest_record['fault'], len(guest_record['boots'])) == ('active', None, 1)
    assert set(read_guest_pids(hypervisor)) == {instance}
    assert hypervisor.run('sh', '-c', 'ls /var/lib/ecompute/images | grep -v ^base-').split() == [f'{instance}.qcow2']
    sent = [line for line in cluster.images.log.read_text().splitlines() if line.startswith('sent ')]
    assert sum(line.endswith(' slow.qcow2') for line in sent) == 1, 'it was fetched whole once'
    cluster.destroy('slow')


def test_watchdog_restarts_a_frozen_ecompute(cluster: Cluster) -> None:
    """The service starts again and its guest is not affected."""
    hypervisor = cluster.hypervisors['hv1']
    cluster.place('lives', 'hv1')
    cluster.wait('ready', 'lives')
    before, guests, pid = (
        read_unit(hypervisor, 'ecompute'),
        read_guest_pids(hypervisor),
        read_service_pid(hypervisor, 'ecompute'),
    )
    hypervisor.run('kill', '-STOP', str(pid))
    wait_until(
        lambda: read_unit(hypervisor, 'ecompute')['MainPID'] not in ('0', str(pid)), 90, 'another ecompute is started'
    )
    wait_until(lambda: read_unit(hypervisor, 'ecompute')['ActiveState'] == 'active', 60, 'it is ready')
    assert read_service_pid(hypervisor, 'ecompute') != pid
    assert int(read_unit(hypervisor, 'ecompute')['NRestarts']) == int(before['NRestarts']) + 1
    assert 'Watchdog timeout' in hypervisor.run('journalctl', '-b', '-u', 'ecompute', '-o', 'cat')
    assert hypervisor.run_unchecked('test', '-e', f'/proc/{pid}').returncode == 1
    assert read_guest_pids(hypervisor) == guests
    assert cluster.is_answering('lives')
    cluster.wait_up('hv1')
    guest_record = cluster.show_record('lives')
    assert (guest_record['state'], guest_record['fault'], len(guest_record['boots'])) == ('active', None, 1)
    cluster.destroy('lives')


def test_own_metadata_server_runs_without_ecompute(cluster: Cluster) -> None:
    """It serves metadata while ecompute is down; after a shutdown both start again."""
    hypervisor = cluster.hypervisors['hv2']
    for block in read_blocks('metadata'):
        hypervisor.type_as_user(block)
    server = read_service_pid(hypervisor, 'mdserver')
    hypervisor.run('systemctl', 'stop', 'ecompute')
    assert cluster.read_states()['hv2'] == 'closed'
    assert read_service_pid(hypervisor, 'mdserver') == server
    assert METADATA in hypervisor.run('ip', 'address', 'show', 'virbr0')
    assert 'HTTP/1.' in hypervisor.run('bash', '-c', GET_SCRIPT, 'bash', METADATA, '/')
    hypervisor.run('systemctl', 'start', 'ecompute')
    cluster.place('told', 'hv2')
    cluster.wait('ready', 'told')
    assert 'ecomp-guest: hostname told' in cluster.read_console('told')
    hypervisor.run('systemctl', 'restart', 'ecompute')
    assert read_service_pid(hypervisor, 'mdserver') == server
    assert count_servers(hypervisor) == 1
    hypervisor.power_off()
    assert cluster.read_states()['hv2'] == 'closed'
    hypervisor.start()
    cluster.wait_up('hv2')
    cluster.wait_ready_again('told')
    assert cluster.read_console('told').count('ecomp-guest: hostname told') == 2
    read_service_pid(hypervisor, 'mdserver')
    assert count_servers(hypervisor) == 1
    cluster.destroy('told')


def count_servers(hypervisor: BootedMachine) -> int:
    """Return the number of metadata servers that listen."""
    return len(hypervisor.run('ss', '-Hltn', f'src {METADATA}:80').splitlines())


def test_reboot_of_the_control_host_disturbs_no_compute(cluster: Cluster) -> None:
    """The data of etcd and placement is kept, no ecompute ends, and all keep working."""
    pids = {name: read_service_pid(hypervisor, 'ecompute') for name, hypervisor in cluster.hypervisors.items()}
    instance_by_host = {name: cluster.place(f'kept-{name}', name) for name in pids}
    cluster.wait('ready', *(f'kept-{name}' for name in pids))
    boot, guests = (
        cluster.control.boot_id(),
        {name: read_guest_pids(hypervisor) for name, hypervisor in cluster.hypervisors.items()},
    )
    cluster.control.reboot()
    assert cluster.control.boot_id() != boot
    read_service_pid(cluster.control, 'ecomp-control')
    cluster.wait_up(*pids)
    for name, hypervisor in cluster.hypervisors.items():
        assert read_service_pid(hypervisor, 'ecompute') == pids[name]
        assert read_guest_pids(hypervisor) == guests[name]
        assert cluster.is_answering(f'kept-{name}')
        assert cluster.show_record(f'kept-{name}')['instance'] == instance_by_host[name]
        cluster.place(f'new-{name}', name)
    cluster.wait('ready', *(f'new-{name}' for name in pids))
    cluster.check_doctor()
    cluster.destroy(*(f'{age}-{name}' for name in pids for age in ('kept', 'new')))
