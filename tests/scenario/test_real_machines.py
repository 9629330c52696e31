"""The page 'real machines', typed on machines that boot: systemd as process 1, units as they are printed, reboots.

A control host and two hypervisors of Debian 12, then the same of Debian 13. Guests run under emulation in them.
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

from tests.kit.booted import GATEWAY, Booted, Lan, lacking, lan
from tests.kit.servers import TOP, Server, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PAGE = TOP / 'docs/howto/real-machines.md'
BLOCK = re.compile(r'<!-- typed on: (\w+) -->\n```sh\n(.*?)```', re.DOTALL)
HOSTS = {'control': '10.0.0.5', 'hv1': '10.0.0.11', 'hv2': '10.0.0.12'}
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
NOTIFIED = re.compile(r'NOTIFIED TARGET, (\S+), OF INSTANCE (\S+)')
BIN = '/opt/ecomp/bin'
BOOT = 600
"""Seconds an emulated guest may take while the machine is busy with others."""
GET = r'''exec 3<>"/dev/tcp/$1/80"; printf 'GET %s HTTP/1.0\r\n\r\n' "$2" >&3; timeout 5 cat <&3'''
"""For bash: what an address answers at a path."""
METADATA = '169.254.169.254'


class Images(Server):
    """The web server of images beside the machines."""

    name = 'images'

    def __init__(self, machines: Lan, directory: Path) -> None:
        super().__init__(directory)
        self._machines = machines
        self.served = directory / 'served'
        self.served.mkdir()
        self.go = directory / 'go'

    def command(self) -> list[str]:
        """On the bridge."""
        program = ['-m', 'tests.kit.slow_images', GATEWAY, '80', str(self.served), str(self.go)]
        return self._machines.outside.inside([sys.executable, *program], TOP)

    def is_ready(self) -> bool:
        """It says so."""
        return 'ready' in self.last_words()


@dataclass
class Cluster:
    """The machines as the page left them."""

    control: Booted
    hypervisors: dict[str, Booted]
    images: Images

    def eschedule(self, *words: str) -> str:
        """What root's eschedule prints on the control host; AssertionError with all it said if it fails."""
        return self.control.run('env', '-C', '/', f'{BIN}/eschedule', *words)

    def place(self, name: str, host: str, image: str = 'guest.qcow2') -> str:
        """Have a guest of this name made on this host; its uuid."""
        said = self.eschedule(QUERY, f'http://{GATEWAY}/{image}', '--name', name, '--on', host)
        found = NOTIFIED.match(said)
        assert found, said
        return found[2]

    def wait(self, stage: str, *names: str) -> None:
        """Until these have come to this stage."""
        self.eschedule('wait', *names, '--for', stage, '--timeout', str(BOOT))

    def destroy(self, *names: str) -> None:
        """Destroy these; all agree in the end."""
        self.eschedule('destroy', '--wait', *names)
        self.eschedule('audit')

    def look(self) -> None:
        """The doctor finds what the page says: that Debian's etcd is an old one."""
        done = self.control.ask('env', '-C', '/', f'{BIN}/eschedule', 'doctor')
        assert [line.partition(':')[0] for line in done.stdout.splitlines()] == ['etcd-version'], done

    def record(self, name: str) -> dict[str, Any]:
        """What `show` says of it."""
        return dict(json.loads(self.eschedule('show', name, '-f', 'json')))

    def states(self) -> dict[str, str]:
        """What `hosts` says of each."""
        return {each['host']: each['state'] for each in json.loads(self.eschedule('hosts', '-f', 'json'))}

    def wait_up(self, *hosts: str) -> None:
        """Until `hosts` says of these that they are up."""
        until(lambda: {self.states().get(each) for each in hosts} == {'up'}, 60, f'{hosts} are up')

    def answers(self, name: str) -> bool:
        """Whether a guest answers its hypervisor at the address that its record has."""
        found = self.record(name)
        address = found['addresses'][0]['address']
        said = self.hypervisors[found['host']].ask('bash', '-c', GET, 'bash', address, '/').stdout
        return 'ecomp-guest' in said

    def wait_ready_again(self, name: str) -> None:
        """Until a guest is ready that its host started because it ran when that went down; the first time."""

        def again() -> bool:
            last = self.record(name)['boots'][-1]
            return last['reason'] == 'host reboot' and 'ready' in last['stages']

        until(again, BOOT / 4, f'{name} is ready again')
        found = self.record(name)
        assert (found['state'], found['fault'], len(found['boots'])) == ('active', None, 2)
        assert self.answers(name)

    def console(self, name: str) -> str:
        """What a guest printed on its console."""
        host, _, path = self.record(name)['console'].partition(':')
        return self.hypervisors[host].run('cat', path)


def unit(booted: Booted, name: str) -> dict[str, str]:
    """What systemd says of a unit there, property by property."""
    lines = booted.run('systemctl', 'show', name).splitlines()
    return {key: value for key, _, value in (line.partition('=') for line in lines)}


def running(booted: Booted, name: str) -> int:
    """The pid of the service of this name, which says that it is ready, and comes at each boot."""
    found = unit(booted, f'{name}.service')
    expected = {'Type': 'notify', 'ActiveState': 'active', 'SubState': 'running', 'UnitFileState': 'enabled'}
    assert {key: found[key] for key in expected} == expected, booted.run('journalctl', '-u', name, '-n', '50')
    assert filters(booted, found['MainPID']) > filters(booted, '1'), 'its system calls are filtered'
    return int(found['MainPID'])


def filters(booted: Booted, pid: str) -> int:
    """How many seccomp filters a process has; the machine itself is a container, which has some."""
    status = booted.run('cat', f'/proc/{pid}/status')
    return int(status.partition('Seccomp_filters:')[2].split()[0])


def qemus(hypervisor: Booted) -> dict[str, int]:
    """The pid of each guest that runs there, by uuid."""
    names = hypervisor.run('virsh', '-q', 'list', '--name').split()
    return {name: int(hypervisor.run('cat', f'/run/libvirt/qemu/{name}.pid')) for name in names}


def blocks(where: str) -> list[str]:
    """What the page has typed there."""
    return [text for place, text in BLOCK.findall(PAGE.read_text()) if place == where]


def packages() -> list[str]:
    """What the page has apt-get install, wherever."""
    lines = PAGE.read_text().replace('\\\n', ' ').splitlines()
    return [word for line in lines for word in line.partition('sudo apt-get install ')[2].split()]


@pytest.fixture(scope='module', params=['bookworm', 'trixie'])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, guest_image: Path
) -> Iterator[Cluster]:
    """All three, with what the page has typed on them but for the metadata server of its own."""
    assert not lacking(), lacking()
    with ExitStack() as undo:
        machines = undo.enter_context(lan(HOSTS))
        images = Images(machines, tmp_path_factory.mktemp('images'))
        (images.served / 'guest.qcow2').write_bytes(guest_image.read_bytes())
        images.go.touch()
        undo.enter_context(images)
        control, *others = (machines.boot(name, request.param, packages()) for name in HOSTS)
        *first, last = blocks('control')
        for block in first:
            control.type(block)
        with ThreadPoolExecutor(len(others)) as threads:
            list(threads.map(set_up, others))
        control.type(last)
        yield Cluster(control, {each.name: each for each in others}, images)


def set_up(hypervisor: Booted) -> None:
    """Type what the page has for a hypervisor."""
    for block in blocks('hypervisor'):
        hypervisor.type(block)


def test_it_is_set_up_as_the_page_says(cluster: Cluster) -> None:
    """Every service is ready, and a guest of each hypervisor tells of itself."""
    running(cluster.control, 'ecomp-control')
    for name, each in cluster.hypervisors.items():
        running(each, 'ecompute')
        found = unit(each, 'ecompute')
        assert found['NRestarts'] == '0'
        assert found['WatchdogUSec'] == '1min'
        assert found['StatusText'].startswith('qemu guests'), found['StatusText']
        said = each.ask(f'{BIN}/ecompute', '--check', '--config', '/etc/ecomp/compute.yaml').stdout
        assert [line.partition(':')[0] for line in said.splitlines()] == ['etcd-version'], said
        cluster.place(f'first-{name}', name)
    assert cluster.states() == dict.fromkeys(cluster.hypervisors, 'up')
    cluster.look()
    for name, each in cluster.hypervisors.items():
        cluster.wait('ready', f'first-{name}')
        found_record = cluster.record(f'first-{name}')
        assert (found_record['state'], found_record['host'], found_record['fault']) == ('active', name, None)
        assert cluster.answers(f'first-{name}')
        assert f'ecomp-guest: hostname first-{name}' in cluster.console(f'first-{name}')
        assert set(qemus(each)) == {found_record['instance']}
    cluster.destroy(*(f'first-{name}' for name in cluster.hypervisors))
    for each in (cluster.control, *cluster.hypervisors.values()):
        assert each.run('systemctl', '--failed', '--plain', '--no-legend') == '', each.name


def test_a_hypervisor_is_rebooted(cluster: Cluster) -> None:
    """What ran runs again, at its address; what was stopped stays so; and ecompute ended before any guest."""
    hypervisor = cluster.hypervisors['hv1']
    ran, rests = (cluster.place(name, 'hv1') for name in ('runs', 'rests'))
    cluster.wait('ready', 'runs', 'rests')
    cluster.eschedule('stop', '--wait', 'rests')
    before, boot = cluster.record('runs')['addresses'], hypervisor.boot_id()
    hypervisor.reboot()
    assert hypervisor.boot_id() != boot
    cluster.wait_ready_again('runs')
    assert cluster.record('runs')['addresses'] == before
    stopped = cluster.record('rests')
    assert (stopped['state'], stopped['fault'], len(stopped['boots'])) == ('stopped', None, 1)
    assert set(qemus(hypervisor)) == {ran}
    assert hypervisor.run('virsh', 'domstate', rests).strip() == 'shut off'
    running(hypervisor, 'ecompute')
    assert ended(hypervisor) == ['ecompute', 'libvirt-guests', 'libvirtd']
    # It was asked to turn itself off, and did.
    assert 'ecomp-guest: power button' in cluster.console('runs')
    cluster.eschedule('start', '--wait', 'rests')
    cluster.destroy('runs', 'rests')


def ended(hypervisor: Booted) -> list[str]:
    """In which order these services were stopped when the machine went down last."""
    words = ['journalctl', '-b', '-1', '-o', 'cat', '_PID=1']
    stopped = [re.match(r'Stopped (\S+)\.service', line) for line in hypervisor.run(*words).splitlines()]
    named = [found[1] for found in stopped if found]
    wanted = ('ecompute', 'libvirt-guests', 'libvirtd')
    return [name for number, name in enumerate(named) if name in wanted and name not in named[number + 1 :]]


def test_a_hypervisor_loses_its_power(cluster: Cluster) -> None:
    """Nobody could say that anything ends; and yet what ran runs again, and what was stopped does not."""
    hypervisor = cluster.hypervisors['hv2']
    ran, _ = (cluster.place(name, 'hv2') for name in ('cut', 'off'))
    cluster.wait('ready', 'cut', 'off')
    cluster.eschedule('stop', '--wait', 'off')
    hypervisor.end()
    hypervisor.start()
    cluster.wait_ready_again('cut')
    assert set(qemus(hypervisor)) == {ran}
    assert cluster.record('off')['state'] == 'stopped'
    cluster.wait_up('hv2')
    cluster.destroy('cut', 'off')


def test_restarted_in_the_middle_of_a_build(cluster: Cluster) -> None:
    """The build is made anew, and nothing of the first one is left."""
    hypervisor = cluster.hypervisors['hv1']
    slow = cluster.images.served / 'slow.qcow2'
    slow.write_bytes((cluster.images.served / 'guest.qcow2').read_bytes())
    cluster.images.go.unlink()
    instance = cluster.place('slow', 'hv1', 'slow.qcow2')
    until(lambda: (cluster.record('slow')['progress'] or {}).get('done'), 60, 'half of the image is here')
    pid = running(hypervisor, 'ecompute')
    hypervisor.run('systemctl', 'restart', 'ecompute')
    assert running(hypervisor, 'ecompute') != pid
    assert cluster.record('slow')['state'] == 'building'
    cluster.images.go.touch()
    cluster.wait('ready', 'slow')
    found = cluster.record('slow')
    assert (found['state'], found['fault'], len(found['boots'])) == ('active', None, 1)
    assert set(qemus(hypervisor)) == {instance}
    assert hypervisor.run('sh', '-c', 'ls /var/lib/ecompute/images | grep -v ^base-').split() == [f'{instance}.qcow2']
    sent = [line for line in cluster.images.log.read_text().splitlines() if line.startswith('sent ')]
    assert sum(line.endswith(' slow.qcow2') for line in sent) == 1, 'it was fetched whole once'
    cluster.destroy('slow')


def test_a_frozen_ecompute_is_ended_by_its_watchdog(cluster: Cluster) -> None:
    """And started again; its guest notices nothing."""
    hypervisor = cluster.hypervisors['hv1']
    cluster.place('lives', 'hv1')
    cluster.wait('ready', 'lives')
    before, guests, pid = unit(hypervisor, 'ecompute'), qemus(hypervisor), running(hypervisor, 'ecompute')
    hypervisor.run('kill', '-STOP', str(pid))
    until(lambda: unit(hypervisor, 'ecompute')['MainPID'] not in ('0', str(pid)), 90, 'another ecompute is started')
    until(lambda: unit(hypervisor, 'ecompute')['ActiveState'] == 'active', 60, 'it is ready')
    assert running(hypervisor, 'ecompute') != pid
    assert int(unit(hypervisor, 'ecompute')['NRestarts']) == int(before['NRestarts']) + 1
    assert 'Watchdog timeout' in hypervisor.run('journalctl', '-b', '-u', 'ecompute', '-o', 'cat')
    assert hypervisor.ask('test', '-e', f'/proc/{pid}').returncode == 1
    assert qemus(hypervisor) == guests
    assert cluster.answers('lives')
    cluster.wait_up('hv1')
    found = cluster.record('lives')
    assert (found['state'], found['fault'], len(found['boots'])) == ('active', None, 1)
    cluster.destroy('lives')


def test_a_metadata_server_of_its_own_goes_on(cluster: Cluster) -> None:
    """While ecompute is away guests are told, and after a shutdown both are there again."""
    hypervisor = cluster.hypervisors['hv2']
    for block in blocks('metadata'):
        hypervisor.type(block)
    server = running(hypervisor, 'mdserver')
    hypervisor.run('systemctl', 'stop', 'ecompute')
    assert cluster.states()['hv2'] == 'closed'
    assert running(hypervisor, 'mdserver') == server
    assert METADATA in hypervisor.run('ip', 'address', 'show', 'virbr0')
    assert 'HTTP/1.' in hypervisor.run('bash', '-c', GET, 'bash', METADATA, '/')
    hypervisor.run('systemctl', 'start', 'ecompute')
    cluster.place('told', 'hv2')
    cluster.wait('ready', 'told')
    assert 'ecomp-guest: hostname told' in cluster.console('told')
    hypervisor.run('systemctl', 'restart', 'ecompute')
    assert running(hypervisor, 'mdserver') == server
    assert servers(hypervisor) == 1
    hypervisor.power_off()
    assert cluster.states()['hv2'] == 'closed'
    hypervisor.start()
    cluster.wait_up('hv2')
    cluster.wait_ready_again('told')
    assert cluster.console('told').count('ecomp-guest: hostname told') == 2
    running(hypervisor, 'mdserver')
    assert servers(hypervisor) == 1
    cluster.destroy('told')


def servers(hypervisor: Booted) -> int:
    """How many metadata servers listen there."""
    return len(hypervisor.run('ss', '-Hltn', f'src {METADATA}:80').splitlines())


def test_the_control_host_is_rebooted(cluster: Cluster) -> None:
    """etcd and placement come back with all they knew; no ecompute ended, and each goes on."""
    pids = {name: running(each, 'ecompute') for name, each in cluster.hypervisors.items()}
    kept = {name: cluster.place(f'kept-{name}', name) for name in pids}
    cluster.wait('ready', *(f'kept-{name}' for name in pids))
    boot, guests = cluster.control.boot_id(), {name: qemus(each) for name, each in cluster.hypervisors.items()}
    cluster.control.reboot()
    assert cluster.control.boot_id() != boot
    running(cluster.control, 'ecomp-control')
    cluster.wait_up(*pids)
    for name, each in cluster.hypervisors.items():
        assert running(each, 'ecompute') == pids[name]
        assert qemus(each) == guests[name]
        assert cluster.answers(f'kept-{name}')
        assert cluster.record(f'kept-{name}')['instance'] == kept[name]
        cluster.place(f'new-{name}', name)
    cluster.wait('ready', *(f'new-{name}' for name in pids))
    cluster.look()
    cluster.destroy(*(f'{age}-{name}' for name in pids for age in ('kept', 'new')))
