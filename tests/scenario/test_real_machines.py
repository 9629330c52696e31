"""The page 'real machines', typed on machines that boot with systemd as process 1.

A control host and two hypervisors of Debian 12, then the same of Debian 13. Their guests run under emulation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.booted import BootedMachine
from tests.kit.servers import wait_until
from tests.scenario.page_cluster import (
    METADATA,
    Cluster,
    boot_cluster,
    read_blocks,
    read_guest_pids,
    read_service_pid,
    read_unit,
    serves_metadata,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HOSTS = {'control': '10.0.0.5', 'hv1': '10.0.0.11', 'hv2': '10.0.0.12'}


@pytest.fixture(scope='module', params=['bookworm', 'trixie'])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, guest_image: Path
) -> Iterator[Cluster]:
    """Provide all three machines after the page's commands for control host and hypervisors."""
    images = {'guest.qcow2': guest_image}
    with boot_cluster(HOSTS, request.param, tmp_path_factory.mktemp('images'), images) as booted:
        *first, last = read_blocks('control')
        for block in first:
            booted.control.type_as_user(block)
        with ThreadPoolExecutor(len(booted.hypervisors)) as threads:
            list(threads.map(set_up, booted.hypervisors.values()))
        booted.control.type_as_user(last)
        yield booted


def set_up(hypervisor: BootedMachine) -> None:
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
        check_output = machine.run(f'{cluster.bin}/ecompute', '--check', '--config', '/etc/ecomp/compute.yaml')
        assert [line.partition(':')[0] for line in check_output.splitlines()] == ['etcd-version'], check_output
        cluster.place(f'first-{name}', name)
    assert cluster.read_states() == dict.fromkeys(cluster.hypervisors, 'up')
    cluster.check_cluster()
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
    assert (stopped['state'], stopped['fault'], stopped['boots'][-1]['number']) == ('stopped', None, 1)
    assert set(read_guest_pids(hypervisor)) == {running_guest}
    assert hypervisor.run('virsh', 'domstate', stopped_guest).strip() == 'shut off'
    read_service_pid(hypervisor, 'ecompute')
    assert read_stop_order(hypervisor) == ['ecompute', 'libvirt-guests', 'libvirtd']
    # The guest was asked to turn itself off, and did.
    assert 'ecomp-guest: power button' in cluster.read_console('runs')
    cluster.eschedule('start', '--wait', 'rests')
    cluster.destroy('runs', 'rests')


def read_stop_order(hypervisor: BootedMachine) -> list[str]:
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
    assert (guest_record['state'], guest_record['fault'], guest_record['boots'][-1]['number']) == ('active', None, 1)
    assert set(read_guest_pids(hypervisor)) == {instance}
    assert hypervisor.run('sh', '-c', 'ls /var/lib/ecompute/images | grep -v ^base-').split() == [f'{instance}.qcow2']
    sent = [line for line in cluster.images.log.read_text().splitlines() if line.startswith('sent ')]
    assert sum(line.endswith(' slow.qcow2') for line in sent) == 1, 'it was fetched whole once'
    cluster.destroy('slow')


def test_watchdog_restarts_a_frozen_ecompute(cluster: Cluster) -> None:
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
    assert (guest_record['state'], guest_record['fault'], guest_record['boots'][-1]['number']) == ('active', None, 1)
    cluster.destroy('lives')


def test_own_metadata_server_runs_without_ecompute(cluster: Cluster) -> None:
    """It serves metadata while ecompute is down, and after a shutdown both start again."""
    hypervisor = cluster.hypervisors['hv2']
    for block in read_blocks('metadata'):
        hypervisor.type_as_user(block)
    server = read_service_pid(hypervisor, 'mdserver')
    hypervisor.run('systemctl', 'stop', 'ecompute')
    assert cluster.read_states()['hv2'] == 'closed'
    assert read_service_pid(hypervisor, 'mdserver') == server
    assert METADATA in hypervisor.run('ip', 'address', 'show', 'virbr0')
    assert serves_metadata(hypervisor)
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
    cluster.check_cluster()
    cluster.destroy(*(f'{age}-{name}' for name in pids for age in ('kept', 'new')))
