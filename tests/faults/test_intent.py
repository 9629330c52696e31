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

from ecomp.agent.images.download import TIMEOUT_SECONDS
from tests.kit.by_hand import make_request, put_claim
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, check_claims_twice, mark_slow_steps, read_guests
from tests.kit.hypervisor import REACTION_SECONDS, Hypervisor
from tests.kit.invariants import check_invariants
from tests.kit.servers import b64, wait_until
from tests.kit.slow_images import SlowImages
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    boot,
    boot_all,
    find_log_lines,
    parse_notice,
    place,
    read_log,
    read_record,
    run_concurrently,
    wait_address,
    wait_log_lines,
    wait_state,
)
from tests.kit.tuned import make_tuned
from tests.kit.use import ResourceUse

# F26, F28: the last request decides, at any moment it may come; missing information destroys nothing.


BUILD_FAILPOINTS = ['remembered', 'reserved', 'seeded', 'confirmed', 'building', 'built', 'active', 'addressed']


@pytest.mark.parametrize('step', mark_slow_steps(BUILD_FAILPOINTS, 'confirmed', 'built', 'addressed'))
def test_destroyed_while_building(cluster: Control, step: str) -> None:
    """F26: a destroy at any step of the build: gone, and nothing is left (fake)."""
    compute = make_tuned(cluster, failpoint=f'{step}:stop:1')
    _, instance = place(cluster)
    compute.wait_frozen_at(step)
    result = cluster.eschedule('destroy', instance)
    assert result.code == 0, result
    compute.resume()
    wait_state(cluster, instance, 'gone')
    assert read_guests(compute) == {}
    # The compute still works.
    wait_address(cluster, place(cluster)[1])
    check_invariants(cluster, compute)


def test_destroyed_before_the_build(cluster: Control, compute: Ecompute) -> None:
    """F26: a destroy before the compute has read the request: gone, and never built (fake)."""
    compute.pause()
    _, instance = place(cluster)
    assert cluster.eschedule('destroy', instance).code == 0
    compute.resume()
    wait_state(cluster, instance, 'gone')
    assert find_log_lines(compute, 'INSTANTIATE', instance) == []


@pytest.mark.usefixtures('compute')
def test_destroyed_uuid_is_not_created_again(cluster: Control, instance: str) -> None:
    """F26: create, destroy, create with one uuid in quick succession: the destroy holds, the others exit 5 (fake)."""
    words = ['--uuid', instance, SMALL_QUERY]
    parse_notice(cluster.eschedule(*words))
    assert cluster.eschedule('destroy', instance).code == 0
    assert_one_line(cluster.eschedule(*words), 5, instance, 'never used twice')
    wait_state(cluster, instance, 'gone')
    assert_one_line(cluster.eschedule(*words), 5, instance, 'never used twice')


def test_eight_instances_replaced_in_their_room(cluster: Control) -> None:
    """F26: eight instances created and soon destroyed, and eight more in their room: only these remain (fake)."""
    compute = cluster.ecompute('VCPU:8,DISK_GB:8,MEMORY_MB:1024')
    first = [parse_notice(item)[1] for item in run_concurrently(cluster, [[SMALL_QUERY]] * 8)]
    for result in run_concurrently(cluster, [['destroy', '--wait', item] for item in first]):
        assert result.code == 0, result
    second = [parse_notice(item)[1] for item in run_concurrently(cluster, [[SMALL_QUERY]] * 8)]
    for instance in second:
        wait_address(cluster, instance)
    assert set(read_guests(compute)) == set(second)
    check_invariants(cluster, compute)


def test_deleted_request_keeps_guest_and_claim(cluster: Control) -> None:
    """F28: the request of a running guest deleted outside ecomp: it stays, logged once; destroy works (fake)."""
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


def test_request_deleted_before_the_build_releases_its_claim(cluster: Control) -> None:
    """F28: a request deleted outside ecomp before it was read: its claim is released after two checks (fake)."""
    compute = make_tuned(cluster)
    compute.pause()
    _, instance = place(cluster)
    cluster.etcd.delete(f'/hosts/{compute.uuid}/{instance}')
    compute.resume()
    wait_address(cluster, place(cluster)[1])

    # A release may lose a race with another change of the provider; a later check repeats it.
    def is_released() -> bool:
        check_claims_twice(cluster, compute, read_guests(compute))
        return cluster.placement.read_allocations(instance) == {}

    wait_until(is_released, 20, 'its claim is released')
    assert instance not in read_guests(compute)
    check_invariants(cluster, compute)


@pytest.mark.parametrize('step', mark_slow_steps(BUILD_FAILPOINTS[:-1], 'confirmed', 'built'))
def test_request_deleted_during_a_build(cluster: Control, step: str) -> None:
    """F28: the request deleted outside ecomp at any step of a build: no claim without a guest, no guest lost (fake)."""
    compute = make_tuned(cluster, failpoint=f'{step}:stop:1')
    _, instance = place(cluster)
    compute.wait_frozen_at(step)
    cluster.etcd.delete(f'/hosts/{compute.uuid}/{instance}')
    compute.resume()
    wait_address(cluster, place(cluster)[1])
    if step in ('remembered', 'reserved', 'seeded', 'confirmed'):
        # The build is recorded on the host before anything is reserved, and undone from that record.
        wait_until(lambda: cluster.placement.read_allocations(instance) == {}, 20, 'its claim is released')
        assert read_record(cluster, instance) is None
    else:
        wait_until(lambda: find_log_lines(compute, instance, 'not managed'), 20, 'it is reported')
        assert read_guests(compute)[instance]['running']
        check_claims_twice(cluster, compute, read_guests(compute))
        assert cluster.placement.read_allocations(instance) != {}
        assert cluster.eschedule('destroy', '--wait', instance).code == 0
    assert instance not in read_guests(compute)
    check_invariants(cluster, compute)


def test_deleted_record_is_rewritten_with_a_fault(cluster: Control) -> None:
    """F28: the record of a running guest deleted outside ecomp: written again, with a fault that reports it (fake)."""
    compute = make_tuned(cluster, numbers={'PLAN_INTERVAL_SECONDS': 0.3})
    _, instance = place(cluster)
    address = wait_address(cluster, instance)
    cluster.etcd.delete(cluster.etcd.find_record_key(instance))
    rewritten = wait_state(cluster, instance, 'active')
    assert 'its record was lost' in rewritten['fault']
    assert len(wait_log_lines(compute, 'INSTANTIATE', instance)) == 1

    def has_address() -> bool:
        return [entry['address'] for entry in (read_record(cluster, instance) or {})['addresses']] == [address]

    wait_until(has_address, 20, 'its address is in the record again')
    # The information how it was built is lost; everything else is as before.
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check_invariants(cluster, compute)


def test_deleted_address_is_read_from_the_record(cluster: Control, compute: Ecompute) -> None:
    """F28: /booted deleted outside ecomp: eschedule prints the record's address, nothing else changes (fake)."""
    _, instance = place(cluster)
    address = wait_address(cluster, instance)
    cluster.etcd.delete(f'/booted/{instance}')
    details = cluster.eschedule('show', '-f', 'json', instance)
    assert json.loads(details.stdout)['addresses'][0]['address'] == address
    assert set(read_guests(compute)) == {instance}
    assert cluster.eschedule('destroy', '--wait', instance).code == 0


# F25, F26, F28, F31 and the bounds on real hosts: foreign objects stay, destroyed instances vanish.


WORKER_FAILPOINTS = ['image-part', 'image-ready', 'disk-created', 'domain-defined', 'domain-started']
FOREIGN_DOMAIN = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
<os><type arch='x86_64'>hvm</type></os></domain>"""


# One at a time: the test is about the race whether the worker learns of the destroy before its next step.
@pytest.mark.parametrize('step', mark_slow_steps(WORKER_FAILPOINTS, 'domain-started'))
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
def test_destroyed_while_its_image_stalls(host: Hypervisor, slow_images: SlowImages) -> None:
    """F26: a destroy while the image's server is silent: it does not wait for the server (libvirt)."""
    instance = host.place(slow_images.make_url(f'idle.raw?{uuid.uuid4()}'))
    host.wait_downloader()
    host.request_destroy(instance)
    other = host.start_instance()  # other instances do not wait for it
    host.wait_state(instance, 'gone', TIMEOUT_SECONDS[1] / 2)
    host.assert_removed(instance)
    assert host.read_record(other)['state'] == 'active'
    assert list((host.state / 'images').glob('*.part')) == []


def test_foreign_domains_are_not_touched(host: Hypervisor) -> None:
    """F25: domains defined outside ecomp with an instance's uuid and name: refused, and not touched (libvirt)."""
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


def test_foreign_volumes_are_not_touched(host: Hypervisor) -> None:
    """F25: a volume with the instance's name, in another pool and in ours: not touched or overwritten (libvirt)."""
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


def test_deleted_request_keeps_domain_disk_and_claim(host: Hypervisor) -> None:
    """F28: the request of a running guest deleted outside ecomp: domain, disk, claim stay, reported (libvirt)."""
    instance = host.start_instance()
    pid = host.find_qemu(instance)
    key = f'/hosts/{host.compute}/{instance}'
    value = host.lab.read_etcd(key)[key]
    delete_key(host, key)
    wait_until(lambda: host.find_log_lines(instance, 'not managed'), REACTION_SECONDS, 'it is reported')
    other = host.start_instance()
    assert len(host.find_log_lines(instance, 'not managed')) == 1
    assert (host.find_qemu(instance), host.get_disk_path(instance).exists()) == (pid, True)
    assert host.read_allocation(instance)
    host.lab.put_key(key, value.decode())  # unchanged: managed again
    host.lab.destroy(instance, other)
    host.assert_removed(instance)


def delete_key(host: Hypervisor, key: str) -> None:
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


def run_guests(host: Hypervisor, count: int) -> None:
    """Create and destroy `count` guests, three at a time."""
    with ThreadPoolExecutor(3) as threads:
        instances = list(threads.map(lambda _: host.start_instance(), range(count)))
    host.lab.destroy(*instances)


def check_flat_usage(host: Hypervisor, warm: int, count: int) -> None:
    """Check that descriptors and threads are equal after `warm` guests and after `count` more.

    The same is true of processes and connections; memory may grow by at most 16 MiB.
    """
    host.restart()
    run_guests(host, warm)
    before = ResourceUse.measure(host.pid)
    workers = host.list_workers()
    for remaining in range(count, 0, -5):
        run_guests(host, min(remaining, 5))
    after = ResourceUse.measure(host.pid)
    assert host.list_workers() == workers
    assert after.processes == before.processes
    assert abs(after.descriptors - before.descriptors) <= 4, (before, after)
    assert abs(after.threads - before.threads) <= 4, (before, after)
    assert abs(after.connections - before.connections) <= 4, (before, after)
    assert after.memory - before.memory <= 16, (before, after)


@pytest.mark.slow
def test_usage_is_flat_over_5_guests(host: Hypervisor) -> None:
    """Bounds: descriptors, threads, processes and memory stay flat over 5 real guests (libvirt)."""
    check_flat_usage(host, 2, 5)


@pytest.mark.slow
def test_usage_is_flat_over_30_guests(host: Hypervisor) -> None:
    """Bounds: descriptors, threads, processes and memory stay flat over 30 real guests (libvirt)."""
    check_flat_usage(host, 10, 30)


@pytest.mark.slow
@pytest.mark.parametrize('limit', ['nofile=64', 'as'])
def test_low_limits_at_run_time_are_enough(host: Hypervisor, limit: str) -> None:
    """F31: 64 descriptors, or 64 MiB more memory than in use, for ecompute and its workers: it works (libvirt)."""
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


# F27: destroyed twice, concurrently, or without ever existing: one release, and every client gets an answer.


def test_destroy_repeated_and_of_an_unknown_uuid(cluster: Control, compute: Ecompute) -> None:
    """F27: the same destroy again, while it is carried out and after; and a destroy of an unknown uuid (fake)."""
    instance = boot(cluster)
    compute.pause()
    assert_one_line(cluster.eschedule('destroy', instance), 0, 'destroy accepted')
    tombstone = cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}')
    assert_one_line(cluster.eschedule('destroy', instance), 0, 'is already being destroyed')
    assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') == tombstone
    compute.resume()
    wait_state(cluster, instance, 'gone')
    assert_one_line(cluster.eschedule('destroy', instance), 4, 'gone since')
    assert_one_line(cluster.eschedule('destroy', UNKNOWN_UUID), 4, UNKNOWN_UUID, 'no such instance')
    assert cluster.eschedule('destroy', instance, instance, UNKNOWN_UUID).code == 4
    assert read_record(cluster, UNKNOWN_UUID) is None
    assert is_destroyed_once(read_log(compute), instance)


@pytest.mark.parametrize('by', [2, 10])
def test_destroyed_by_concurrent_commands(cluster: Control, compute: Ecompute, by: int) -> None:
    """F27: one instance destroyed by 2, and by 10, eschedules concurrently (fake)."""
    instance, other = boot_all(cluster, 2)
    results = run_concurrently(cluster, [['destroy', '--wait', instance]] * by, width=by)
    # A client that comes after its end is answered that it is gone.
    assert set(Counter(item.code for item in results)) <= {0, 4}, results
    accepted = [item for item in results if 'destroy accepted' in item.stderr]
    assert len(accepted) == 1, results
    for result in results:
        assert result.stdout == ''
        assert 'gone' in result.stderr.splitlines()[-1], result
    assert is_destroyed_once(read_log(compute), instance)
    assert read_guests(compute).keys() == {other}
    assert cluster.placement.read_consumers(compute.uuid).keys() == {other}


def test_two_destroys_of_one_request(cluster: Control, compute: Ecompute) -> None:
    """F27: two destroys that read the same request: the second writer sees the first's tombstone (fake)."""
    instance = boot(cluster)
    compute.pause()
    with (
        Eschedule(cluster, 'destroy', instance, failpoint='tombstoned:stop') as first,
        Eschedule(cluster, 'destroy', instance, failpoint='tombstoned:stop') as second,
    ):
        # Only one of them can have written; the other has ended, or it has not read yet and will find the tombstone.
        ended = wait_until(lambda: next((run for run in (first, second) if run.has_ended), None), 30, 'one has ended')
        assert ended is not None
        assert_one_line(ended.wait(), 0, 'is already being destroyed')
        frozen = second if ended is first else first
        frozen.wait_frozen_at('tombstoned')
        compute.resume()
        wait_state(cluster, instance, 'gone')
        frozen.resume()
        assert_one_line(frozen.wait(), 0, 'destroy accepted')
    assert is_destroyed_once(read_log(compute), instance)


def is_destroyed_once(lines: list[str], instance: str) -> bool:
    """Return True if the compute began exactly one destroy of the instance."""
    return sum(f'DESTROY INSTANCE {instance}' in line for line in lines) == 1


# F25: one uuid requested twice, of two computes or of one: at most one guest and one allocation.


ROOM = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}


def test_uuid_requested_of_a_second_compute_is_refused(cluster: Control) -> None:
    """F25: the uuid of a running guest requested of a second compute: refused there, the first untouched (fake)."""
    first, second = cluster.ecompute(), cluster.ecompute()
    _, instance = place(cluster, f'{SMALL_QUERY}&in_tree={first.uuid}')
    address = wait_address(cluster, instance)
    before, claims = read_record(cluster, instance), cluster.placement.read_allocations(instance)
    cluster.etcd.put(f'/hosts/{second.uuid}/{instance}', json.dumps(make_request(second.uuid, instance)))
    wait_until(lambda: cluster.etcd.get(f'/hosts/{second.uuid}/{instance}') is None, 20, 'it is refused')
    assert wait_log_lines(
        second, instance, 'failed at stage scheduled', f' on {first.uuid}, but the request has nothing there'
    )
    # Not even a tombstone there destroys it.
    tombstone = {**make_request(second.uuid, instance), 'allocations': {}, 'image': None}
    cluster.etcd.put(f'/hosts/{second.uuid}/{instance}', json.dumps(tombstone))
    wait_until(lambda: cluster.etcd.get(f'/hosts/{second.uuid}/{instance}') is None, 20, 'it is gone there')
    assert (read_record(cluster, instance), cluster.placement.read_allocations(instance)) == (before, claims)
    assert (set(read_guests(first)), read_guests(second)) == ({instance}, {})
    assert wait_address(cluster, instance) == address
    check_invariants(cluster, first, second)


@pytest.mark.parametrize('holders', ['one', 'both', 'none'])
def test_uuid_requested_of_two_computes_makes_one_guest(cluster: Control, holders: str) -> None:
    """F25: one uuid requested of two computes in one transaction, with any claims: one guest at most (fake)."""
    first, second = cluster.ecompute(), cluster.ecompute()
    instance = str(uuid.uuid4())
    if holders != 'none':
        put_claim(cluster, instance, *([first.uuid] if holders == 'one' else [first.uuid, second.uuid]))
    puts = [
        {
            'requestPut': {
                'key': b64(f'/hosts/{host}/{instance}'),
                'value': b64(json.dumps(make_request(host, instance))),
            }
        }
        for host in (first.uuid, second.uuid)
    ]
    cluster.etcd.call('kv/txn', {'success': puts})

    def is_decided() -> bool:
        request_keys = [key for key in cluster.etcd.list_keys('/hosts/') if key.endswith(instance)]
        status = read_record(cluster, instance) or {}
        return len(request_keys) < 2 and (status.get('state'), len(request_keys)) in (('active', 1), ('error', 0))

    wait_until(is_decided, 20, 'one of them has it, or none')
    state = (read_record(cluster, instance) or {})['state']
    assert len({*read_guests(first), *read_guests(second)}) == (1 if state == 'active' else 0)
    if holders != 'one':
        assert state == 'error'  # no compute holds exactly the requested allocation
    check_invariants(cluster, first, second)


def test_request_put_again_leaves_the_guest_unchanged(cluster: Control, compute: Ecompute) -> None:
    """F25: the same request put again, and one of another size under the same key: the guest is unchanged (fake)."""
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


def test_finished_uuid_is_never_built_again(cluster: Control, compute: Ecompute) -> None:
    """F25: the uuid of a destroyed or failed instance is never built again (fake)."""
    gone = boot(cluster)
    assert cluster.eschedule('destroy', '--wait', gone).code == 0
    failed = str(uuid.uuid4())
    cluster.etcd.put(f'/hosts/{compute.uuid}/{failed}', json.dumps(make_request(compute.uuid, failed)))
    wait_state(cluster, failed, 'error')
    for instance in (gone, failed):
        before = read_record(cluster, instance)
        put_claim(cluster, instance, compute.uuid)
        cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(make_request(compute.uuid, instance)))
        wait_until(lambda instance=instance: find_log_lines(compute, instance, 'never used twice'), 20, 'it is dropped')  # type: ignore[misc]
        wait_until(lambda instance=instance: cluster.placement.read_allocations(instance) == {}, 20, 'released')  # type: ignore[misc]
        assert read_record(cluster, instance) == before
    assert read_guests(compute) == {}
