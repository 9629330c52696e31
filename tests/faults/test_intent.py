"""F25 to F28, F31: the last request decides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid

import pytest

from tests.kit.by_hand import make_request
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import check_claims_twice, mark_slow_steps, read_guests
from tests.kit.hypervisor import Hypervisor
from tests.kit.invariants import check_invariants
from tests.kit.servers import wait_until
from tests.kit.story import (
    boot,
    find_log_lines,
    place,
    read_record,
    wait_address,
    wait_log_lines,
)
from tests.kit.tuned import make_tuned

# F26, F28: the last request decides, at any moment it may come; missing information destroys nothing.


def test_deleted_request_keeps_guest_and_claim(cluster: Control) -> None:
    """F28: a running guest's request is deleted: it stays, logged once, destroy works (fake)."""
    compute = make_tuned(cluster, numbers={'PLAN_INTERVAL_SECONDS': 0.3})
    instance = boot(cluster)
    allocation = cluster.placement.read_allocations(instance)
    cluster.etcd.delete(f'/hosts/{compute.uuid}/{instance}')
    wait_until(lambda: find_log_lines(compute, instance, 'not managed'), 20, 'it is reported')
    check_claims_twice(cluster, compute, guests=[instance])
    compute.restart()
    wait_until(
        lambda: len(find_log_lines(compute, instance, 'not managed')) == 2, 20, 'once in each life of the process'
    )
    other = boot(cluster)
    assert len(wait_log_lines(compute, instance, 'not managed', number=2)) == 2
    assert set(read_guests(compute)) == {instance, other}
    assert read_guests(compute)[instance]['running']
    assert cluster.placement.read_allocations(instance) == allocation
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check_invariants(cluster, compute)


# F25, F26, F28, F31 and the bounds on real hosts: foreign objects stay, destroyed instances vanish.


WORKER_FAILPOINTS = ['image-part', 'image-ready', 'disk-created', 'domain-defined', 'domain-started']
FOREIGN_DOMAIN = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
<os><type arch='x86_64'>hvm</type></os></domain>"""


# One at a time: the test is about the race whether the worker learns of the destroy before its next step.
@pytest.mark.parametrize('step', mark_slow_steps(WORKER_FAILPOINTS))
def test_destroyed_during_a_worker_step(host: Hypervisor, step: str) -> None:
    """F26: a destroy at any step of the worker: gone, and nothing is left (libvirt)."""
    host.restart(f'{step}:stop:1')
    instance = host.place(f'{host.lab.make_url("idle.raw")}?{uuid.uuid4()}')
    frozen = host.wait_frozen_at(step)
    host.request_destroy(instance)
    os.kill(frozen, signal.SIGCONT)
    host.wait_state(instance, 'gone')
    host.assert_removed(instance)
    assert host.fired_failpoints == [step]
    host.start_instance()


@pytest.mark.slow
def test_foreign_domains_are_not_touched(host: Hypervisor) -> None:
    """F25: domains outside ecomp with an instance's uuid and name: not touched (libvirt)."""
    same_uuid, other, same_name = (str(uuid.uuid4()) for _ in range(3))
    foreign = {'foreign': same_uuid, same_name: other}
    try:
        for name, domain_uuid in foreign.items():
            definition = host.directory / 'foreign.xml'
            definition.write_text(FOREIGN_DOMAIN.format(name=name, uuid=domain_uuid))
            host.virsh('define', str(definition))
        before = [host.virsh('dumpxml', name) for name in foreign]
        for instance in (same_uuid, same_name):
            host.place('idle.raw', '--uuid', instance)
        for instance in (same_uuid, same_name):
            failed = host.wait_state(instance, 'error')
            assert failed['error']['stage'] == 'started'
            assert 'not created by ecompute: it is left as it is' in failed['error']['reason']
            assert host.read_allocation(instance) == {}
            assert not host.get_disk_path(instance).exists()
        # Builds that fail earlier, and builds that are destroyed, end as they would without these domains.
        missing, stalled = str(uuid.uuid4()), str(uuid.uuid4())
        for name in (missing, stalled):
            foreign |= {f'{name}-x': name}
            definition.write_text(FOREIGN_DOMAIN.format(name=f'{name}-x', uuid=name))
            host.virsh('define', str(definition))
        before = [host.virsh('dumpxml', name) for name in foreign]
        host.place('missing.raw', '--uuid', missing)
        failed = host.wait_state(missing, 'error')
        assert (failed['error']['stage'], 'HTTP 404' in failed['error']['reason']) == ('image', True)
        host.restart('disk-created:stop:1')
        host.place('idle.raw', '--uuid', stalled)
        frozen = host.wait_frozen_at('disk-created')
        host.request_destroy(stalled)
        os.kill(frozen, signal.SIGCONT)
        host.wait_state(stalled, 'gone')
        for name in (missing, stalled):
            assert host.read_allocation(name) == {}
            assert not host.get_disk_path(name).exists()
        assert [host.virsh('dumpxml', name) for name in foreign] == before
        # They are not touched when they run and the instances are destroyed, either.
        host.virsh('start', same_name)
        host.lab.destroy(same_uuid, same_name)
        assert host.virsh('domstate', same_name).strip() == 'running'
        host.virsh('destroy', same_name)
    finally:
        for name in set(foreign) & set(host.lab.list_domains(host.name)):
            host.virsh('undefine', name)


@pytest.mark.slow
def test_foreign_volumes_are_not_touched(host: Hypervisor) -> None:
    """F25: a volume with the instance's name, in any pool: not touched or overwritten (libvirt)."""
    instance = str(uuid.uuid4())
    elsewhere = host.directory / 'lib/images' / f'{instance}.qcow2'
    elsewhere.write_bytes(b"somebody else's")
    host.place('idle.raw', '--uuid', instance)
    host.wait_state(instance, 'active')
    host.lab.destroy(instance)
    assert elsewhere.read_bytes() == b"somebody else's"
    elsewhere.unlink()
    # In ecomp's own pool, under a name that only ecomp gives: older than etcd's data, kept until it is destroyed.
    planted = str(uuid.uuid4())
    host.get_disk_path(planted).write_bytes(b'of an instance that etcd has forgotten')
    host.place('idle.raw', '--uuid', planted)
    host.wait_state(planted, 'stopped', fault='its domain is gone, its disk is there')
    assert host.get_disk_path(planted).read_bytes() == b'of an instance that etcd has forgotten'
    host.lab.destroy(planted)
    host.assert_removed(planted)


@pytest.mark.slow
@pytest.mark.parametrize('limit', ['nofile=64', 'as'])
def test_low_limits_at_run_time_are_enough(host: Hypervisor, limit: str) -> None:
    """F31: 64 descriptors, or 64 MiB of memory to spare: ecompute works (libvirt)."""
    host.restart()
    host.start_instance()
    for pid in (host.pid, *host.list_workers()):
        option = limit
        if limit == 'as':
            with open(f'/proc/{pid}/statm') as file:
                used_bytes = int(file.read().split()[0]) * os.sysconf('SC_PAGE_SIZE')
            option = f'as={used_bytes + 64 * 2**20}'
        subprocess.run(['prlimit', f'--pid={pid}', f'--{option}'], check=True)
    for instance in [host.place() for _ in range(3)]:
        host.wait_state(instance, 'active')


# F25: one uuid requested twice, of two computes or of one: at most one guest and one allocation.


def test_request_put_again_leaves_the_guest_unchanged(cluster: Control, compute: Ecompute) -> None:
    """F25: a request put again, and one of another size: the guest is unchanged (fake)."""
    instance = boot(cluster)
    key = f'/hosts/{compute.uuid}/{instance}'
    original, before = cluster.etcd.get(key), read_record(cluster, instance)
    assert original is not None
    for value in (original, json.dumps(make_request(compute.uuid, instance, VCPU=4)), original):
        cluster.etcd.put(key, value)
        _, other = place(cluster)  # its end proves that the request before it has been read
        wait_address(cluster, other)
        assert cluster.eschedule('destroy', '--wait', other).code == 0
        assert (read_record(cluster, instance), set(read_guests(compute))) == (before, {instance})
    assert len(wait_log_lines(compute, 'INSTANTIATE', instance)) == 1
