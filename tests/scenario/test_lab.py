"""The stories on real hypervisors: three hosts, what is placed on them and ends there, and every plane looked at.

What guests that really boot are told, and at which addresses they answer, is in test_lab_guests.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.kit.commands import write_config
from tests.kit.lab import NOTIFIED, Lab, running
from tests.kit.servers import until

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
"""Too small for the guest's kernel: for disks that boot nothing."""


@pytest.mark.slow
@pytest.mark.parametrize('image', ['idle.raw', 'guest.qcow2'])
def test_three_apart_and_three_together(lab: Lab, image: str) -> None:
    """Sets of real guests: one on each of three hosts, and all on one of them; those that boot get their addresses."""
    boots = image == 'guest.qcow2'
    for name, policy, hosts in (('web', 'anti-affinity', 3), ('db', 'affinity', 1)):
        group = ('--count', '3', '--group', name, '--policy', policy)
        done = lab.eschedule(QUERY, lab.url(image), *group, '--wait' if boots else '--wait=started')
        placed = NOTIFIED.findall(done.stdout)
        assert (done.code, len(placed)) == (0, 3), done
        addresses = done.stdout.splitlines()[3:]
        assert [lab.addressed(instance) for _, instance in placed if boots] == addresses
        assert len({compute for compute, _ in placed}) == hosts
        for compute, instance in placed:
            assert lab.domains(lab.host_of(compute))[instance] == 'running'
        shown = json.loads(lab.eschedule('group', 'show', name, '-f', 'json').stdout)
        assert {each['instance']: each['compute'] for each in shown['members']} == {
            instance: compute for compute, instance in placed
        }
    refused = lab.eschedule(QUERY, lab.url(image), '--group', 'web')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert refused.stderr.count('group web has a member there (strict anti-affinity)') == 3


def test_what_fits_runs_and_the_rest_is_refused(lab: Lab) -> None:
    """Story 2: ten at once, then more at once than still fit.

    Their disk boots nothing: a dozen kernels unpacking themselves under emulation would take minutes of two cores.
    """
    room = sum(
        each['total'] - each['reserved']
        for host in lab.hosts
        for name, each in lab.placement(f'/resource_providers/{lab.compute(host)}/inventories')['inventories'].items()
        if name == 'VCPU'
    )

    def at_once(count: int) -> list[str]:
        with ThreadPoolExecutor(count) as pool:
            ended = list(pool.map(lambda _: lab.eschedule(SMALL, lab.url('idle.raw')), range(count)))
        refused = [each for each in ended if each.code == 3]
        assert all(each.stdout == 'NO ALLOCATIONS LEFT\n' for each in refused)
        placed = [NOTIFIED.match(each.stdout) for each in ended if each.code == 0]
        assert len(placed) + len(refused) == count, ended
        return [found[2] for found in placed if found]

    first = at_once(10)
    assert len(first) == 10
    second = at_once(room - 10 + 10)
    assert len(second) == room - 10
    for instance in [*first, *second]:
        until(partial(_active, lab, instance), 120, f'{instance} is active')
    assert {name for host in lab.hosts for name in lab.domains(host)} == {*first, *second}
    used = sum(
        lab.placement(f'/resource_providers/{lab.compute(host)}/usages')['usages']['VCPU'] for host in lab.hosts
    )
    assert used == room
    lab.check()


@pytest.mark.slow
def test_destroy_of_one_whose_allocation_is_gone_already(lab: Lab) -> None:
    """Story 4: the domain goes all the same."""
    host, instance = lab.place(SMALL, lab.url('idle.raw'), '--wait=started')
    held = lab.placement(f'/allocations/{instance}')
    body = {
        'allocations': {},
        'consumer_generation': held['consumer_generation'],
        'project_id': held['project_id'],
        'user_id': held['user_id'],
        'consumer_type': 'INSTANCE',
    }
    lab.put_claim(instance, body)
    lab.destroy(instance)
    assert instance not in lab.domains(host)


ASKED = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize('number', [*ASKED, signal.SIGKILL])
def test_a_restart_harms_nobody_and_misses_nothing(lab: Lab, number: int) -> None:
    """Story 5: closed while it is down; then opened, and what was written meanwhile is carried out."""
    host, running_guest = lab.place(SMALL, lab.url('idle.raw'), '--wait=started')
    compute = lab.compute(host)
    _, to_go = lab.place(f'{SMALL}&in_tree={compute}', lab.url('idle.raw'), '--wait=started')
    before = lab.virsh(host, 'domid', running_guest)
    lab.stop_ecompute(host, number)

    inventory = lab.placement(f'/resource_providers/{compute}/inventories')['inventories']['VCPU']
    if number != signal.SIGKILL:
        assert inventory['reserved'] == inventory['total']
        refused = lab.eschedule(f'{SMALL}&in_tree={compute}', lab.url('idle.raw'))
        assert refused.code == 3
        assert refused.stdout == 'NO ALLOCATIONS LEFT\n'
    assert lab.eschedule('destroy', to_go).code == 0
    written = _written_by_2019(lab, host) if number == signal.SIGKILL else None

    lab.start_ecomputes()
    inventory = lab.placement(f'/resource_providers/{compute}/inventories')['inventories']['VCPU']
    assert inventory['reserved'] == 0
    until(lambda: _state(lab, to_go) == 'gone', 60, 'the destroy written meanwhile is carried out')
    if written:
        until(lambda: _state(lab, written) == 'active', 60, 'the request written meanwhile is carried out')
    assert lab.virsh(host, 'domid', running_guest) == before
    lab.check()


def test_the_workers_of_a_killed_ecompute_die_with_it(lab: Lab) -> None:
    pid = lab.ecompute_pid('hv1')
    children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
    assert children
    lab.stop_ecompute('hv1', signal.SIGKILL)
    until(lambda: not any(running(int(child)) for child in children), 10, 'workers and metadata server end')


def test_a_bridge_that_is_not_there_is_named_at_the_start(lab: Lab) -> None:
    config = lab.directory / 'nobridge.yaml'
    nobridge = {'networks': [{'network': 'default'}, {'bridge': 'nobr0'}], 'state': str(lab.directory / 'nobridge')}
    write_config(config, lab.facts['etcd'], lab.facts['placement'], lab.operator, **nobridge)
    inside = [sys.executable, '-m', 'ecomp.lab.elab', 'exec', '--name', lab.name, 'hv1']
    command = [*inside, sys.executable, '-m', 'ecomp.compute', '--config', str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith('ecompute: this host has no bridge nobr0')


def test_no_configuration_at_all(tmp_path: Path) -> None:
    """Story 6: the defaults point at localhost. On a localhost of our own, for the ports are the fixed ones."""
    space = f't{os.getpid()}'
    inside = ['ip', 'netns', 'exec', space, sys.executable, '-m']
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        with (tmp_path / f'{words[0]}.log').open('wb') as log:
            started.append(subprocess.Popen([*inside, *words], cwd=tmp_path, stdout=log, stderr=log))

    def says(module: str, words: str) -> bool:
        return words in (tmp_path / f'{module}.log').read_text()

    subprocess.run(['ip', 'netns', 'add', space], check=True)
    try:
        subprocess.run(['ip', '-n', space, 'link', 'set', 'lo', 'up'], check=True)
        start('ecomp.lab.elab', 'control')
        until(lambda: says('ecomp.lab.elab', 'placement http://localhost:8080'), 60, 'etcd and placement are ready')
        start('ecomp.compute', '--fake', 'VCPU:1,DISK_GB:1,MEMORY_MB:64')
        until(lambda: says('ecomp.compute', ' ready: '), 30, 'ecompute is ready')
        eschedule = [*inside, 'ecomp.schedule', SMALL, '--wait']
        placed = subprocess.run(eschedule, cwd=tmp_path, capture_output=True, text=True)
        assert placed.returncode == 0, placed
        assert NOTIFIED.match(placed.stdout), placed
    finally:
        codes = []
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
            codes.append(process.wait(30))
        subprocess.run(['ip', 'netns', 'delete', space], check=True)
    assert codes == [0, 0], [path.read_text() for path in tmp_path.glob('*.log')]


def test_a_build_that_fails_leaves_nothing(lab: Lab) -> None:
    """Story 9: no such image, not a disk, disk full."""
    (lab.directory / 'images/page.qcow2').write_text('<!DOCTYPE html><title>not a disk</title>')
    pid = lab.ecompute_pid('hv3')
    images = lab.state('hv3') / 'images'
    # The workers' own view of the directory is full; nothing else is disturbed.
    mount = ['nsenter', '-t', str(pid), '-m']
    subprocess.run([*mount, 'mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(images)], check=True)
    (lab.directory / 'images/large.qcow2').write_bytes((lab.directory / 'images/guest.qcow2').read_bytes())
    cases = {
        'missing.qcow2': ('hv1', 'image', 'HTTP 404'),
        'page.qcow2': ('hv2', 'image', 'not a disk image'),
        'large.qcow2': ('hv3', 'image', 'No space left'),
    }
    try:
        for name, (host, stage, reason) in cases.items():
            query = f'{SMALL}&in_tree={lab.compute(host)}'
            done = lab.eschedule(query, lab.url(name), '--wait=started')
            instance = NOTIFIED.match(done.stdout)[2]  # type: ignore[index]
            assert done.code == 1
            assert f'failed at stage {stage}' in done.stderr
            asked = lab.eschedule(instance)
            assert asked.code == 1
            assert reason in asked.stderr
            assert asked.stdout == ''
            assert lab.placement(f'/allocations/{instance}')['allocations'] == {}
            assert not lab.etcd(f'/hosts/{lab.compute(host)}/{instance}')
            assert instance not in lab.domains(host)
            assert instance not in lab.disks(host)
            lab.check()
            assert lab.eschedule('destroy', instance).code == 0
            assert lab.record(instance) is None
            assert lab.eschedule(instance).code == 4
    finally:
        subprocess.run([*mount, 'umount', str(images)], check=True)
    _, instance = lab.place(f'{SMALL}&in_tree={lab.compute("hv3")}', lab.url('large.qcow2'), '--wait=started')
    assert _state(lab, instance) == 'active'


def test_a_request_placement_does_not_confirm_is_not_built(lab: Lab) -> None:
    """Story 10, on a real hypervisor: nothing of it is ever made."""
    compute, instance = lab.compute('hv1'), str(uuid.uuid4())
    allocations = {compute: {'resources': {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}}}
    value = {'allocations': allocations, 'instance': instance, 'image': lab.url('idle.raw')}
    lab.put(f'/hosts/{compute}/{instance}', json.dumps(value))
    until(lambda: _state(lab, instance) == 'error', 30, 'it is refused')
    asked = lab.eschedule(instance)
    assert asked.code == 1
    assert 'placement holds no allocation for it' in asked.stderr
    assert instance not in lab.domains('hv1')


def _active(lab: Lab, instance: str) -> bool:
    return _state(lab, instance) == 'active'


def _state(lab: Lab, instance: str) -> str:
    """Its record's, asked of etcd: a command for each look would take more processor than what is waited for."""
    return str(json.loads(lab.record(instance) or b'{}').get('state', ''))


def _written_by_2019(lab: Lab, host: str) -> str:
    """A claim and a request as another client makes them, while ecompute is down."""
    compute, instance = lab.compute(host), str(uuid.uuid4())
    allocations = {compute: {'resources': {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}}}
    claim = {'allocations': allocations, 'user_id': 'somebody', 'project_id': 'theirs', 'consumer_generation': None}
    body = {**claim, 'consumer_type': 'INSTANCE'}
    lab.put_claim(instance, body)
    value = {**claim, 'instance': instance, 'image': lab.url('idle.raw')}
    lab.put(f'/hosts/{compute}/{instance}', json.dumps(value))
    return instance
