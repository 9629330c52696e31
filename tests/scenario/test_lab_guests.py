"""The stories of small guests that really boot: what they are told, by which way, at which address, and what fails."""

from __future__ import annotations

import json
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ecomp.agent.host.metadata import USER
from ecomp.model.guest import network_config
from tests.kit.lab import BOOT, Lab, answers, running
from tests.kit.lab_fixtures import KEY
from tests.kit.servers import until

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
OTHER_KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB other@lab'
SCRIPT = '#!/bin/sh\n# canary\necho "ecomp-guest: ran on $(hostname)"\n'


def test_a_guest_boots_with_its_identity_and_address_and_goes(lab: Lab) -> None:
    """Stories 1 and 4: a guest with all it needs from mdserver.conf, and one beside it that was given its own."""
    host, instance = lab.place(QUERY, lab.url('guest.qcow2'), '--wait=ready')
    named = given_its_own(lab, host)
    address = lab.addressed(instance)
    assert answers(address)

    told = lab.told(host, instance)
    assert told['phoned'] == [f'http://169.254.169.254/phone-home/{instance}/']
    # Told by who is nobody, and cannot open what it serves.
    children = psutil.Process(lab.ecompute_pid(host)).children()
    assert [set(each.uids()) for each in children if 'mdserver.server' in each.cmdline()] == [{int(USER)}]
    its_own = lab.told(host, named)
    assert (its_own['instance-id'], its_own['hostname'], its_own['key']) == ([named], ['web1'], [OTHER_KEY])
    assert its_own['user-data'] == SCRIPT.splitlines()
    assert any('"local-hostname": "web1"' in line for line in its_own['seed'])
    until(lambda: 'ecomp-guest: ran on web1' in lab.console(host, named), BOOT, 'its user-data was run')
    assert lab.eschedule('web1').stdout == f'{lab.addressed(named)}\n'
    assert 'canary' not in lab.log(host)
    lab.destroy('web1')
    assert not lab.etcd('/names/')

    assert told['hostname'] == [f'vm-{instance[:8]}']
    assert told['instance-id'] == [instance]
    assert KEY in told['key']
    assert any('#!/bin/sh' in line for line in told['user-data'])
    assert told['disk'] == [str(2**30)]
    assert f'eth0 {address}' in told['address']

    assert lab.domains(host)[instance] == 'running'
    compute = lab.compute(host)
    held = lab.placement(f'/allocations/{instance}')['allocations']
    assert held[compute]['resources'] == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 256}
    assert lab.etcd(f'/booted/{instance}') == {f'/booted/{instance}': address.encode()}
    assert list(lab.etcd(f'/hosts/{compute}/')) == [f'/hosts/{compute}/{instance}']
    record = json.loads(lab.eschedule('show', instance, '-f', 'json').stdout)
    assert record['state'] == 'active'
    assert list(record['stages'])
    stages = ['requested', 'scheduled', 'image', 'disk', 'started', 'addressed', 'ready']
    assert sorted(record['stages'], key=record['stages'].__getitem__) == stages
    assert f'INSTANTIATE INSTANCE {instance} WITH IMAGE {lab.url("guest.qcow2")}' in lab.log(host)
    lab.check()

    # It listens to its power button, and comes back where it was.
    assert lab.eschedule('stop', '--wait', instance).code == 0
    assert lab.virsh(host, 'domstate', '--reason', instance).strip() == 'shut off (shutdown)'
    lab.check()
    assert lab.eschedule('start', '--wait', instance).code == 0
    until(lambda: answers(address), 60, f'{address} answers again')
    assert lab.placement(f'/allocations/{instance}')['allocations'] == held
    lab.check()

    # Each boot gets its address and says that it is ready, and who waits after a reboot waits for that one.
    assert lab.eschedule('reboot', instance).code == 0
    assert lab.eschedule('wait', instance, '--for', 'ready', timeout=300).stdout == f'{address}\n'
    boots = json.loads(lab.eschedule('show', instance, '-f', 'json').stdout)['boots']
    assert [each['reason'] for each in boots] == ['created', 'start', 'reboot']
    times = [each['stages'] for each in boots]
    assert list(times[2]) == ['started', 'addressed', 'ready']
    assert times[1]['stopped'] < times[2]['started'] < times[2]['addressed'] < times[2]['ready']
    lab.check()

    assert lab.eschedule('destroy', '--wait', instance).code == 0
    assert instance not in lab.domains(host)
    assert instance not in lab.disks(host)
    assert lab.placement(f'/allocations/{instance}')['allocations'] == {}
    assert not lab.etcd(f'/hosts/{compute}/')
    assert not lab.etcd('/booted/')
    again = lab.eschedule('destroy', instance)
    assert again.code == 4
    assert 'gone since 20' in again.stderr


def given_its_own(lab: Lab, host: str) -> str:
    """A guest on this host with a name, a key and user-data of its own."""
    (lab.directory / 'key.pub').write_text(OTHER_KEY + '\n')
    (lab.directory / 'user-data').write_text(SCRIPT)
    given = ['--name', 'web1', '--ssh-key', str(lab.directory / 'key.pub')]
    given += ['--user-data', str(lab.directory / 'user-data')]
    return lab.place(f'{QUERY}&in_tree={lab.compute(host)}', lab.url('guest.qcow2'), *given)[1]


def test_what_fails_in_a_guest_is_said_and_the_guest_goes_on(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / 'breaks.sh'
    script.write_text('#!/bin/sh\necho "ecomp-guest: broke"\nexit 3\n')
    options = ('--name', 'breaks', '--user-data', str(script), '--wait=ready')
    done = lab.eschedule(QUERY, lab.url('guest.qcow2'), *options)
    why = 'cloud-init failed at stage modules-final: user-data ended with 3; the guest goes on'
    assert (done.code, why in done.stderr) == (1, True), done
    record = _record(lab, 'breaks')
    assert (record['state'], 'ready' in record['stages']) == ('active', False)
    assert record['cloud_init'] == {'stage': 'modules-final', 'reason': 'user-data ended with 3'}
    assert lab.eschedule('wait', 'breaks', '--for', 'ready').code == 1
    assert answers(lab.addressed('breaks'))
    assert 'ecomp-guest: broke' in lab.eschedule('log', 'breaks').stdout.splitlines()
    assert lab.eschedule('log', 'breaks', '-n', '1').stdout.startswith('ecomp-guest: phoned ')
    # The small guest has neither keys nor an sshd.
    refused = lab.eschedule('ssh', 'breaks')
    assert (refused.code, 'unverified' in refused.stderr) == (1, True)
    lab.destroy('breaks')


@pytest.mark.parametrize('again', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_address_is_known_before_the_boot_and_stays(lab: Lab, again: bool) -> None:
    """`again`: a guest's reboot, and a new libvirtd and ecompute before it: the same, metadata is served as before."""
    host, instance = lab.place(QUERY, lab.url('guest.qcow2'), '--wait=started')
    (interface,) = _record(lab, instance)['addresses']
    address = interface['expected']
    assert address
    if interface['address'] is None:  # it boots for seconds
        asked = lab.eschedule(instance)
        assert (asked.code, asked.stdout) in ((6, ''), (0, f'{address}\n'))
        assert lab.eschedule('show', instance).stdout.count(address) == 1
    assert lab.addressed(instance) == address
    assert lab.eschedule('wait', '--for', 'ready', instance).code == 0
    until(lambda: 'ecomp-guest: phoned' in lab.console(host, instance), 10, 'it has said so')
    before = lab.told(host, instance)
    assert _record(lab, instance)['addresses'] == [{**interface, 'address': address, 'source': 'lease'}]
    assert _record(lab, instance)['console'] == f'{host}:{lab.state(host)}/console/{instance}.log'

    assert f'eth0 {address}' in before['address']
    if not again:
        return
    processes = json.loads((lab.directory / 'lab.json').read_text())['processes']
    libvirtd = int(processes[f'{host} libvirtd']['pid'])
    os.kill(libvirtd, signal.SIGTERM)
    until(lambda: not running(libvirtd), 30, 'libvirtd ends')
    lab.stop_ecompute(host, signal.SIGKILL)
    lab.start_ecomputes()
    lab.virsh(host, 'reset', instance)
    until(lambda: lab.console(host, instance).count('ecomp-guest: phoned') == 2, BOOT, 'it boots again')
    assert lab.told(host, instance) == {name: 2 * values for name, values in before.items()}
    assert lab.etcd(f'/booted/{instance}') == {f'/booted/{instance}': address.encode()}


@pytest.mark.slow
def test_own_size_bridge_and_fixed_uuid(lab: Lab) -> None:
    """Story 6."""
    host, own = 'hv2', str(uuid.uuid4())
    config = lab.directory / host / 'compute.yaml'
    before = config.read_text()
    lab.stop_ecompute(host)
    config.write_text(yaml.safe_dump({**yaml.safe_load(before), 'resize': False, 'bridge': 'br0', 'uuid': own}))
    try:
        lab.start_ecomputes()
        assert lab.compute(host) == own
        placed, instance = lab.place(f'{QUERY}&in_tree={own}', lab.url('guest.qcow2'))
        assert placed == host
        lab.addressed(instance)
        told = lab.told(host, instance)
        assert int(told['disk'][0]) < 2**30
        macs = [each['mac'] for each in _record(lab, instance)['addresses']]
        assert json.loads('\n'.join(told['network-config'])) == network_config(macs)
        interfaces = {line.split()[0]: line.split()[1] for line in told['address']}
        assert set(interfaces) == {'eth0', 'eth1'}
        record = json.loads(lab.eschedule('show', instance, '-f', 'json').stdout)
        assert record['addresses'][0]['address'] == interfaces['eth0']
        assert [each['network'] for each in record['addresses']] == ['default', 'br0']
        until(lambda: answers(interfaces['eth1']), 30, 'the bridged interface answers')
        assert record['addresses'][1]['expected'] is None, 'the LAN has a DHCP server of its own'
        lab.inside(host, 'busybox', 'ping', '-c', '1', interfaces['eth1'])
        until(lambda: _record(lab, instance)['addresses'][1]['address'], 30, 'the bridged address is found')
        mac = record['addresses'][1]['mac']
        shown = lab.eschedule('show', instance).stdout
        assert f'interface 1  {interfaces["eth1"]} ({mac} on br0, by arp)' in shown
        assert lab.addressed(instance) == interfaces['eth0']
        lab.destroy(instance)
    finally:
        lab.stop_ecompute(host)
        config.write_text(before)
        (lab.state(host) / 'uuid').unlink()
        lab.start_ecomputes()


@pytest.mark.slow
def test_guests_that_are_told_by_a_disk(lab: Lab) -> None:
    """Each by its own, with what the network would have told it; the disk comes and goes with the guest."""
    host = 'hv3'
    with lab.configured(host, metadata='iso') as there:
        instance = lab.place(f'{QUERY}&{there}', lab.url('guest.qcow2'), '--wait=ready')[1]
        named = given_its_own(lab, host)
        until(lambda: 'ecomp-guest: phoned' in lab.console(host, instance), 10, 'it has said so')
        told = lab.told(host, instance)
        assert (told['instance-id'], told['hostname'], told['key']) == ([instance], [f'vm-{instance[:8]}'], [KEY])
        assert any('#!/bin/sh' in line for line in told['user-data'])
        assert told['phoned'] == [f'http://169.254.169.254/phone-home/{instance}/']
        assert 'network-config' not in told
        assert not any('dsmode' in line for line in told['seed'])
        lab.addressed(named)
        its_own = lab.told(host, named)
        assert (its_own['instance-id'], its_own['hostname'], its_own['key']) == ([named], ['web1'], [OTHER_KEY])
        assert its_own['user-data'] == SCRIPT.splitlines()
        until(lambda: 'ecomp-guest: ran on web1' in lab.console(host, named), BOOT, 'its user-data was run')
        assert 'canary' not in lab.log(host)
        assert lab.seeds(host) == {instance, named}
        serials = [each.get('name') for each in lab.domain(host, instance).iterfind('sysinfo/system/entry')]
        assert serials == ['uuid'], 'it is not told to ask the network'
        lab.check()
    # What runs keeps its disk, whatever compute.yaml says by now.
    assert lab.eschedule('stop', '--wait', instance).code == 0
    assert lab.eschedule('start', '--wait', instance).code == 0
    until(lambda: lab.console(host, instance).count('ecomp-guest: phoned') == 2, BOOT, 'it boots again')
    assert lab.told(host, instance) == {name: 2 * values for name, values in told.items()} | {'power': ['button']}
    lab.check()
    lab.destroy(named)
    assert lab.seeds(host) == {instance}
    lab.destroy(instance)
    assert lab.seeds(host) == set()


@pytest.mark.slow
def test_a_guest_that_cannot_reach_the_metadata_address(lab: Lab) -> None:
    """On a LAN's bridges alone: a disk tells it all, its two interfaces among it, and it is not asked to phone home."""
    host = 'hv3'
    lab.inside(host, 'ip', 'link', 'add', 'br1', 'type', 'bridge')
    lab.inside(host, 'ip', 'link', 'set', 'br1', 'up')
    try:
        with lab.configured(host, metadata='iso', networks=[{'bridge': 'br0'}, {'bridge': 'br1'}]) as there:
            instance = lab.place(f'{QUERY}&{there}', lab.url('guest.qcow2'), '--name', 'lan1', '--wait=started')[1]
            told = lab.told(host, instance)
            assert (told['instance-id'], told['hostname'], told['key']) == ([instance], ['lan1'], [KEY])
            macs = [each['mac'] for each in _record(lab, instance)['addresses']]
            assert len(macs) == 2
            assert json.loads('\n'.join(told['network-config'])) == network_config(macs)
            until(lambda: 'user-data ran' in lab.console(host, instance), BOOT, 'its user-data was run')
            assert 'phone' not in lab.console(host, instance)
            lab.destroy(instance)
            assert lab.seeds(host) == set()
    finally:
        lab.inside(host, 'ip', 'link', 'del', 'br1')


def _record(lab: Lab, instance: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lab.eschedule('show', instance, '-f', 'json').stdout)
    return found
