"""F25 to F28, F31: the last request decides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from ecomp.agent.images.download import TIMEOUT
from tests.kit.by_hand import claim, request
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, guests, look_twice, some
from tests.kit.hypervisor import SOON, Hypervisor
from tests.kit.invariants import check
from tests.kit.servers import b64, until
from tests.kit.slow_images import SlowImages
from tests.kit.story import (
    NOBODY,
    SMALL,
    addressed,
    at_once,
    boot,
    boot_all,
    log_of,
    logged,
    logs,
    notified,
    one_line,
    place,
    reached,
    record,
)
from tests.kit.tuned import tuned
from tests.kit.use import Use

# F26, F28: the last request decides, at any moment it may come; missing information destroys nothing.


BUILD_FAILPOINTS = ['remembered', 'reserved', 'seeded', 'confirmed', 'building', 'built', 'active', 'addressed']


@pytest.mark.parametrize('step', some(BUILD_FAILPOINTS, 'confirmed', 'built', 'addressed'))
def test_destroyed_while_building(cluster: Control, step: str) -> None:
    """F26: a destroy at any step of the build: gone, and nothing is left (fake)."""
    compute = tuned(cluster, failpoint=f'{step}:stop:1')
    _, instance = place(cluster)
    compute.stopped_at(step)
    result = cluster.eschedule('destroy', instance)
    assert result.code == 0, result
    compute.resume()
    reached(cluster, instance, 'gone')
    assert guests(compute) == {}
    # The compute still works.
    addressed(cluster, place(cluster)[1])
    check(cluster, compute)


def test_destroyed_before_it_was_begun(cluster: Control, compute: Ecompute) -> None:
    """F26: a destroy before the compute has read the request: gone, and never built (fake)."""
    compute.pause()
    _, instance = place(cluster)
    assert cluster.eschedule('destroy', instance).code == 0
    compute.resume()
    reached(cluster, instance, 'gone')
    assert logged(compute, 'INSTANTIATE', instance) == []


@pytest.mark.usefixtures('compute')
def test_destroyed_and_asked_for_again(cluster: Control, instance: str) -> None:
    """F26: create, destroy, create with one uuid in quick succession: the destroy holds, the others exit 5 (fake)."""
    words = ['--uuid', instance, SMALL]
    notified(cluster.eschedule(*words))
    assert cluster.eschedule('destroy', instance).code == 0
    one_line(cluster.eschedule(*words), 5, instance, 'never used twice')
    reached(cluster, instance, 'gone')
    one_line(cluster.eschedule(*words), 5, instance, 'never used twice')


def test_create_and_destroy_in_quick_succession(cluster: Control) -> None:
    """F26: eight instances created and soon destroyed, and eight more in their room: only these remain (fake)."""
    compute = cluster.ecompute('VCPU:8,DISK_GB:8,MEMORY_MB:1024')
    first = [notified(item)[1] for item in at_once(cluster, [[SMALL]] * 8)]
    for result in at_once(cluster, [['destroy', '--wait', item] for item in first]):
        assert result.code == 0, result
    second = [notified(item)[1] for item in at_once(cluster, [[SMALL]] * 8)]
    for instance in second:
        addressed(cluster, instance)
    assert set(guests(compute)) == set(second)
    check(cluster, compute)


def test_a_request_removed_by_hand(cluster: Control) -> None:
    """F28: the request of a running guest deleted outside ecomp: it stays, logged once; destroy works (fake)."""
    compute = tuned(cluster, numbers={'EVERY': 0.3})
    instance = boot(cluster)
    allocation = cluster.placement.allocations(instance)
    cluster.etcd.delete(f'/hosts/{compute.uuid}/{instance}')
    until(lambda: logged(compute, instance, 'unmanaged'), 20, 'it is reported')
    look_twice(cluster, compute, guests=[instance])
    compute.restart()
    until(lambda: len(logged(compute, instance, 'unmanaged')) == 2, 20, 'once in each life of the process')
    other = boot(cluster)
    assert len(logs(compute, instance, 'unmanaged', number=2)) == 2
    assert set(guests(compute)) == {instance, other}
    assert guests(compute)[instance]['running']
    assert cluster.placement.allocations(instance) == allocation
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute)


def test_a_request_removed_before_it_was_begun(cluster: Control) -> None:
    """F28: a request deleted outside ecomp before it was read: its claim is released after two checks (fake)."""
    compute = tuned(cluster)
    compute.pause()
    _, instance = place(cluster)
    cluster.etcd.delete(f'/hosts/{compute.uuid}/{instance}')
    compute.resume()
    addressed(cluster, place(cluster)[1])

    # A release may lose a race with another change of the provider; a later check repeats it.
    def is_released() -> bool:
        look_twice(cluster, compute, guests(compute))
        return cluster.placement.allocations(instance) == {}

    until(is_released, 20, 'its claim is released')
    assert instance not in guests(compute)
    check(cluster, compute)


@pytest.mark.parametrize('step', some(BUILD_FAILPOINTS[:-1], 'confirmed', 'built'))
def test_a_request_removed_while_building(cluster: Control, step: str) -> None:
    """F28: the request deleted outside ecomp at any step of a build: no claim without a guest, no guest lost (fake)."""
    compute = tuned(cluster, failpoint=f'{step}:stop:1')
    _, instance = place(cluster)
    compute.stopped_at(step)
    cluster.etcd.delete(f'/hosts/{compute.uuid}/{instance}')
    compute.resume()
    addressed(cluster, place(cluster)[1])
    if step in ('remembered', 'reserved', 'seeded', 'confirmed'):
        # The build is recorded on the host before anything is reserved, and undone from that record.
        until(lambda: cluster.placement.allocations(instance) == {}, 20, 'its claim is released')
        assert record(cluster, instance) is None
    else:
        until(lambda: logged(compute, instance, 'unmanaged'), 20, 'it is reported')
        assert guests(compute)[instance]['running']
        look_twice(cluster, compute, guests(compute))
        assert cluster.placement.allocations(instance) != {}
        assert cluster.eschedule('destroy', '--wait', instance).code == 0
    assert instance not in guests(compute)
    check(cluster, compute)


def test_a_record_removed_by_hand(cluster: Control) -> None:
    """F28: the record of a running guest deleted outside ecomp: written again, with a fault that reports it (fake)."""
    compute = tuned(cluster, numbers={'EVERY': 0.3})
    _, instance = place(cluster)
    address = addressed(cluster, instance)
    cluster.etcd.delete(cluster.etcd.record_key(instance))
    rewritten = reached(cluster, instance, 'active')
    assert 'its record was lost' in rewritten['fault']
    assert len(logs(compute, 'INSTANTIATE', instance)) == 1

    def has_address() -> bool:
        return [entry['address'] for entry in (record(cluster, instance) or {})['addresses']] == [address]

    until(has_address, 20, 'its address is in the record again')
    # The information how it was built is lost; everything else is as before.
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute)


def test_an_address_removed_by_hand(cluster: Control, compute: Ecompute) -> None:
    """F28: /booted deleted outside ecomp: eschedule prints the record's address, nothing else changes (fake)."""
    _, instance = place(cluster)
    address = addressed(cluster, instance)
    cluster.etcd.delete(f'/booted/{instance}')
    details = cluster.eschedule('show', '-f', 'json', instance)
    assert json.loads(details.stdout)['addresses'][0]['address'] == address
    assert set(guests(compute)) == {instance}
    assert cluster.eschedule('destroy', '--wait', instance).code == 0


# F25, F26, F28, F31 and the bounds on real hosts: foreign objects stay, destroyed instances vanish.


WORKER_FAILPOINTS = ['image-part', 'image-ready', 'disk-created', 'domain-defined', 'domain-started']
FOREIGN = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
<os><type arch='x86_64'>hvm</type></os></domain>"""


# One at a time: the test is about the race whether the worker learns of the destroy before its next step.
@pytest.mark.parametrize('step', some(WORKER_FAILPOINTS, 'domain-started'))
def test_destroyed_at_a_step_of_the_worker(host: Hypervisor, step: str) -> None:
    """F26: a destroy at any step of the worker: gone, and nothing is left (libvirt)."""
    host.restart(f'{step}:stop:1')
    instance = host.place(f'{host.lab.url("idle.raw")}?{uuid.uuid4()}')
    frozen = host.frozen_at(step)
    host.ask_destroy(instance)
    os.kill(frozen, signal.SIGCONT)
    host.reached(instance, 'gone')
    host.nothing_of(instance)
    assert host.fired == [step]
    host.running()


@pytest.mark.slow
def test_destroyed_while_its_image_stalls(host: Hypervisor, slow_images: SlowImages) -> None:
    """F26: a destroy while the image's server is silent: it does not wait for the server (libvirt)."""
    instance = host.place(slow_images.url(f'idle.raw?{uuid.uuid4()}'))
    host.downloader()
    host.ask_destroy(instance)
    other = host.running()  # other instances do not wait for it
    host.reached(instance, 'gone', TIMEOUT[1] / 2)
    host.nothing_of(instance)
    assert host.record(other)['state'] == 'active'
    assert list((host.state / 'images').glob('*.part')) == []


def test_foreign_domains(host: Hypervisor) -> None:
    """F25: domains defined outside ecomp with an instance's uuid and name: refused, and not touched (libvirt)."""
    same_uuid, other, same_name = (str(uuid.uuid4()) for _ in range(3))
    foreign = {'foreign': same_uuid, same_name: other}
    try:
        for name, domain_uuid in foreign.items():
            definition = host.directory / 'foreign.xml'
            definition.write_text(FOREIGN.format(name=name, uuid=domain_uuid))
            host.virsh('define', str(definition))
        before = [host.virsh('dumpxml', name) for name in foreign]
        for instance in (same_uuid, same_name):
            host.place('idle.raw', '--uuid', instance)
        for instance in (same_uuid, same_name):
            failed = host.reached(instance, 'error')
            assert failed['error']['stage'] == 'started'
            assert 'not made by ecompute: not touched' in failed['error']['reason']
            assert host.held(instance) == {}
            assert not host.disk(instance).exists()
        # Builds that fail earlier, and builds that are destroyed, end as they would without these domains.
        missing, stalled = str(uuid.uuid4()), str(uuid.uuid4())
        for name in (missing, stalled):
            foreign |= {f'{name}-x': name}
            definition.write_text(FOREIGN.format(name=f'{name}-x', uuid=name))
            host.virsh('define', str(definition))
        before = [host.virsh('dumpxml', name) for name in foreign]
        host.place('missing.raw', '--uuid', missing)
        failed = host.reached(missing, 'error')
        assert (failed['error']['stage'], 'HTTP 404' in failed['error']['reason']) == ('image', True)
        host.restart('disk-created:stop:1')
        host.place('idle.raw', '--uuid', stalled)
        frozen = host.frozen_at('disk-created')
        host.ask_destroy(stalled)
        os.kill(frozen, signal.SIGCONT)
        host.reached(stalled, 'gone')
        for name in (missing, stalled):
            assert host.held(name) == {}
            assert not host.disk(name).exists()
        assert [host.virsh('dumpxml', name) for name in foreign] == before
        # They are not touched when they run and the instances are destroyed, either.
        host.virsh('start', same_name)
        host.lab.destroy(same_uuid, same_name)
        assert host.virsh('domstate', same_name).strip() == 'running'
        host.virsh('destroy', same_name)
    finally:
        for name in set(foreign) & set(host.lab.domains(host.name)):
            host.virsh('undefine', name)


def test_a_foreign_volume(host: Hypervisor) -> None:
    """F25: a volume with the instance's name, in another pool and in ours: not touched or overwritten (libvirt)."""
    instance = str(uuid.uuid4())
    elsewhere = host.directory / 'lib/images' / f'{instance}.qcow2'
    elsewhere.write_bytes(b"somebody else's")
    host.place('idle.raw', '--uuid', instance)
    host.reached(instance, 'active')
    host.lab.destroy(instance)
    assert elsewhere.read_bytes() == b"somebody else's"
    elsewhere.unlink()
    # In ecomp's own pool, under a name that only ecomp gives: older than etcd's data, kept until it is destroyed.
    planted = str(uuid.uuid4())
    host.disk(planted).write_bytes(b'of an instance that etcd has forgotten')
    host.place('idle.raw', '--uuid', planted)
    host.reached(planted, 'stopped', fault='its domain is gone, its disk is there')
    assert host.disk(planted).read_bytes() == b'of an instance that etcd has forgotten'
    host.lab.destroy(planted)
    host.nothing_of(planted)


def test_a_request_removed_by_hand_with_a_guest(host: Hypervisor) -> None:
    """F28: the request of a running guest deleted outside ecomp: domain, disk, claim stay, reported (libvirt)."""
    instance = host.running()
    pid = host.qemu(instance)
    key = f'/hosts/{host.compute}/{instance}'
    value = host.lab.etcd(key)[key]
    delete(host, key)
    until(lambda: host.lines(instance, 'unmanaged'), SOON, 'it is reported')
    other = host.running()
    assert len(host.lines(instance, 'unmanaged')) == 1
    assert (host.qemu(instance), host.disk(instance).exists()) == (pid, True)
    assert host.held(instance)
    host.lab.put(key, value.decode())  # unchanged: managed again
    host.lab.destroy(instance, other)
    host.nothing_of(instance)


def delete(host: Hypervisor, key: str) -> None:
    """Delete an etcd key, as an operator would."""
    certificates = host.lab.operator
    certs = [f'--cacert={certificates}/ca.crt', f'--cert={certificates}/client.crt', f'--key={certificates}/client.key']
    process = subprocess.run(
        ['etcdctl', f'--endpoints=https://{host.lab.facts["etcd"]}', *certs, 'del', key],
        env={**os.environ, 'ETCDCTL_API': '3'},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.strip() == '1', process


def round_of(host: Hypervisor, count: int) -> None:
    """Create and destroy `count` guests, three at a time."""
    with ThreadPoolExecutor(3) as threads:
        instances = list(threads.map(lambda _: host.running(), range(count)))
    host.lab.destroy(*instances)


def flat(host: Hypervisor, warm: int, count: int) -> None:
    """Check that descriptors and threads are equal after `warm` guests and after `count` more.

    The same is true of processes and connections; memory may grow by at most 16 MiB.
    """
    host.restart()
    round_of(host, warm)
    before = Use.of(host.pid)
    workers = host.workers()
    for remaining in range(count, 0, -5):
        round_of(host, min(remaining, 5))
    after = Use.of(host.pid)
    assert host.workers() == workers
    assert after.processes == before.processes
    assert abs(after.descriptors - before.descriptors) <= 4, (before, after)
    assert abs(after.threads - before.threads) <= 4, (before, after)
    assert abs(after.connections - before.connections) <= 4, (before, after)
    assert after.memory - before.memory <= 16, (before, after)


@pytest.mark.slow
def test_5_guests(host: Hypervisor) -> None:
    """Bounds: descriptors, threads, processes and memory stay flat over 5 real guests (libvirt)."""
    flat(host, 2, 5)


@pytest.mark.slow
def test_30_guests(host: Hypervisor) -> None:
    """Bounds: descriptors, threads, processes and memory stay flat over 30 real guests (libvirt)."""
    flat(host, 10, 30)


@pytest.mark.slow
@pytest.mark.parametrize('limit', ['nofile=64', 'as'])
def test_limits(host: Hypervisor, limit: str) -> None:
    """F31: 64 descriptors, or 64 MiB more memory than in use, for ecompute and its workers: it works (libvirt)."""
    host.restart()
    host.running()
    for pid in (host.pid, *host.workers()):
        option = limit
        if limit == 'as':
            with open(f'/proc/{pid}/statm') as file:
                used_bytes = int(file.read().split()[0]) * os.sysconf('SC_PAGE_SIZE')
            option = f'as={used_bytes + 64 * 2**20}'
        subprocess.run(['prlimit', f'--pid={pid}', f'--{option}'], check=True)
    for instance in [host.place() for _ in range(3)]:
        host.reached(instance, 'active')


# F27: destroyed twice, concurrently, or without ever existing: one release, and every client gets an answer.


def test_destroyed_again_and_destroy_of_nobody(cluster: Control, compute: Ecompute) -> None:
    """F27: the same destroy again, while it is carried out and after; and a destroy of an unknown uuid (fake)."""
    instance = boot(cluster)
    compute.pause()
    one_line(cluster.eschedule('destroy', instance), 0, 'destroy accepted')
    tombstone = cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}')
    one_line(cluster.eschedule('destroy', instance), 0, 'is being destroyed', 'already')
    assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') == tombstone
    compute.resume()
    reached(cluster, instance, 'gone')
    one_line(cluster.eschedule('destroy', instance), 4, 'gone since')
    one_line(cluster.eschedule('destroy', NOBODY), 4, NOBODY, 'no such instance')
    assert cluster.eschedule('destroy', instance, instance, NOBODY).code == 4
    assert record(cluster, NOBODY) is None
    assert one_destroy(log_of(compute), instance)


@pytest.mark.parametrize('by', [2, 10])
def test_destroyed_by_several_at_once(cluster: Control, compute: Ecompute, by: int) -> None:
    """F27: one instance destroyed by 2, and by 10, eschedules concurrently (fake)."""
    instance, other = boot_all(cluster, 2)
    results = at_once(cluster, [['destroy', '--wait', instance]] * by, width=by)
    # A client that comes after its end is answered that it is gone.
    assert set(Counter(item.code for item in results)) <= {0, 4}, results
    accepted = [item for item in results if 'destroy accepted' in item.stderr]
    assert len(accepted) == 1, results
    for result in results:
        assert result.stdout == ''
        assert 'gone' in result.stderr.splitlines()[-1], result
    assert one_destroy(log_of(compute), instance)
    assert guests(compute).keys() == {other}
    assert cluster.placement.consumers(compute.uuid).keys() == {other}


def test_two_destroys_of_one_record(cluster: Control, compute: Ecompute) -> None:
    """F27: two destroys that read the same request: the second writer sees the first's tombstone (fake)."""
    instance = boot(cluster)
    compute.pause()
    with (
        Eschedule(cluster, 'destroy', instance, failpoint='tombstoned:stop') as first,
        Eschedule(cluster, 'destroy', instance, failpoint='tombstoned:stop') as second,
    ):
        # Only one of them can have written; the other has ended, or it has not read yet and will find the tombstone.
        ended = until(lambda: next((run for run in (first, second) if run.has_ended), None), 30, 'one has ended')
        assert ended is not None
        one_line(ended.end(), 0, 'is being destroyed', 'already')
        frozen = second if ended is first else first
        frozen.stopped_at('tombstoned')
        compute.resume()
        reached(cluster, instance, 'gone')
        frozen.go_on()
        one_line(frozen.end(), 0, 'destroy accepted')
    assert one_destroy(log_of(compute), instance)


def one_destroy(lines: list[str], instance: str) -> bool:
    """Return True if the compute began exactly one destroy of the instance."""
    return sum(f'DESTROY INSTANCE {instance}' in line for line in lines) == 1


# F25: one uuid requested twice, of two computes or of one: at most one guest and one allocation.


ROOM = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}


def test_asked_of_another_compute(cluster: Control) -> None:
    """F25: the uuid of a running guest requested of a second compute: refused there, the first untouched (fake)."""
    first, second = cluster.ecompute(), cluster.ecompute()
    _, instance = place(cluster, f'{SMALL}&in_tree={first.uuid}')
    address = addressed(cluster, instance)
    before, claims = record(cluster, instance), cluster.placement.allocations(instance)
    cluster.etcd.put(f'/hosts/{second.uuid}/{instance}', json.dumps(request(second.uuid, instance)))
    until(lambda: cluster.etcd.get(f'/hosts/{second.uuid}/{instance}') is None, 20, 'it is refused')
    assert logs(second, instance, 'failed at stage scheduled', f'held on {first.uuid}')
    # Not even a tombstone there destroys it.
    tombstone = {**request(second.uuid, instance), 'allocations': {}, 'image': None}
    cluster.etcd.put(f'/hosts/{second.uuid}/{instance}', json.dumps(tombstone))
    until(lambda: cluster.etcd.get(f'/hosts/{second.uuid}/{instance}') is None, 20, 'it is gone there')
    assert (record(cluster, instance), cluster.placement.allocations(instance)) == (before, claims)
    assert (set(guests(first)), guests(second)) == ({instance}, {})
    assert addressed(cluster, instance) == address
    check(cluster, first, second)


@pytest.mark.parametrize('holders', ['one', 'both', 'none'])
def test_asked_of_two_at_once(cluster: Control, holders: str) -> None:
    """F25: one uuid requested of two computes in one transaction, with any claims: one guest at most (fake)."""
    first, second = cluster.ecompute(), cluster.ecompute()
    instance = str(uuid.uuid4())
    if holders != 'none':
        claim(cluster, instance, *([first.uuid] if holders == 'one' else [first.uuid, second.uuid]))
    puts = [
        {'requestPut': {'key': b64(f'/hosts/{host}/{instance}'), 'value': b64(json.dumps(request(host, instance)))}}
        for host in (first.uuid, second.uuid)
    ]
    cluster.etcd.call('kv/txn', {'success': puts})

    def is_decided() -> bool:
        request_keys = [key for key in cluster.etcd.keys('/hosts/') if key.endswith(instance)]
        status = record(cluster, instance) or {}
        return len(request_keys) < 2 and (status.get('state'), len(request_keys)) in (('active', 1), ('error', 0))

    until(is_decided, 20, 'one of them has it, or none')
    state = (record(cluster, instance) or {})['state']
    assert len({*guests(first), *guests(second)}) == (1 if state == 'active' else 0)
    if holders != 'one':
        assert state == 'error'  # no compute holds exactly the requested allocation
    check(cluster, first, second)


def test_asked_of_one_twice(cluster: Control, compute: Ecompute) -> None:
    """F25: the same request put again, and one of another size under the same key: the guest is unchanged (fake)."""
    instance = boot(cluster)
    key = f'/hosts/{compute.uuid}/{instance}'
    original, before = cluster.etcd.get(key), record(cluster, instance)
    assert original is not None
    for value in (original, json.dumps(request(compute.uuid, instance, VCPU=4)), original):
        cluster.etcd.put(key, value)
        _, other = place(cluster)  # its end proves that the request before it has been read
        addressed(cluster, other)
        assert cluster.eschedule('destroy', '--wait', other).code == 0
        assert (record(cluster, instance), set(guests(compute))) == (before, {instance})
    assert len(logs(compute, 'INSTANTIATE', instance)) == 1


def test_asked_again_after_its_end(cluster: Control, compute: Ecompute) -> None:
    """F25: the uuid of a destroyed or failed instance is never built again (fake)."""
    gone = boot(cluster)
    assert cluster.eschedule('destroy', '--wait', gone).code == 0
    failed = str(uuid.uuid4())
    cluster.etcd.put(f'/hosts/{compute.uuid}/{failed}', json.dumps(request(compute.uuid, failed)))
    reached(cluster, failed, 'error')
    for instance in (gone, failed):
        before = record(cluster, instance)
        claim(cluster, instance, compute.uuid)
        cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(request(compute.uuid, instance)))
        until(lambda instance=instance: logged(compute, instance, 'never used twice'), 20, 'it is dropped')  # type: ignore[misc]
        until(lambda instance=instance: cluster.placement.allocations(instance) == {}, 20, 'released')  # type: ignore[misc]
        assert record(cluster, instance) == before
    assert guests(compute) == {}
