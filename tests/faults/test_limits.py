"""F31 and bounds: small limits give one clear line, and usage does not grow with the work.

There is never a busy loop, nor a daemon that no longer responds.
"""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from ecomp.agent import process
from ecomp.agent.planner import MAX_REQUESTS
from ecomp.conf import EtcdConfig
from ecomp.placement.http_client import MAX_IDLE_CONNECTIONS
from ecomp.shared.presence import Presence
from ecomp.store.client import Entry, Store
from ecomp.store.watch import Follower
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import assert_idle, read_guests
from tests.kit.invariants import check_invariants
from tests.kit.servers import SLOWDOWN_FACTOR, b64, wait_until
from tests.kit.sharing import ANTI_AFFINITY, read_members, read_usage
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    boot,
    find_log_lines,
    parse_notice,
    place,
    read_log,
    read_record,
    run_concurrently,
    wait_address,
    wait_state,
)
from tests.kit.tuned import make_tuned
from tests.kit.use import ResourceUse


@pytest.mark.parametrize(
    ('limit', 'says'),
    [
        ('--nofile=8', '8 file descriptors'),
        ('--nofile=64', '64 file descriptors'),
        (f'--as={512 * 2**20}', f'{512 * 2**20} bytes of address space'),
        (f'--as={100 * 2**20}', f'{100 * 2**20} bytes of address space'),
    ],
)
def test_limits_below_the_minimum_are_refused(cluster: Control, limit: str, says: str) -> None:
    """F31: ecompute with 64 descriptors, or 512 MiB: one line names the limit, exit 2 (fake)."""
    compute = make_tuned(cluster, prefix=['prlimit', limit, '--'], start=False)
    began = time.monotonic()
    compute.launch()
    assert compute._process is not None
    assert compute._process.wait(SLOWDOWN_FACTOR * 30) == 2
    assert time.monotonic() - began < SLOWDOWN_FACTOR * 15
    (line,) = read_log(compute)
    assert line.startswith(f'ecompute: this process is limited to {says}, but needs '), line
    assert cluster.placement.read_inventory(compute.uuid) == {}
    assert cluster.etcd.list_keys('/computes/') == []


def test_minimum_limits_are_enough(cluster: Control) -> None:
    """F31: ecompute with its stated minimum works, and is idle afterwards (fake)."""
    words = {'RLIMIT_NOFILE': '--nofile', 'RLIMIT_AS': '--as'}
    minimums = {limit: minimum for limit, minimum, *_ in process.REQUIRED_LIMITS}
    import resource

    prefix = ['prlimit', *(f'{word}={minimums[getattr(resource, name)]}' for name, word in words.items()), '--']
    compute = make_tuned(cluster, 'VCPU:16,DISK_GB:16,MEMORY_MB:4096', prefix=prefix)
    instances = [parse_notice(result)[1] for result in run_concurrently(cluster, [[SMALL_QUERY]] * 12)]
    for instance in instances:
        wait_address(cluster, instance)
    destroyed = cluster.eschedule('destroy', '--wait', *instances)
    assert destroyed.code == 0, destroyed
    with assert_idle(compute.pid):
        time.sleep(3)  # the measuring period
    assert read_log(compute)
    check_invariants(cluster, compute)


def test_exhausted_descriptors_are_survived(cluster: Control) -> None:
    """F31: no free descriptor: ecompute survives idle, and completes all afterwards (fake)."""
    compute = make_tuned(cluster)
    _, before = place(cluster)
    address = wait_address(cluster, before)
    # Open descriptors stay open; no number is free for another one.
    subprocess.run(['prlimit', f'--pid={compute.pid}', '--nofile=3:'], check=True)
    _, instance = place(cluster)
    wait_until(lambda: len(list_problems(compute.log.read_text())) > 1, 30, 'it says so')
    with assert_idle(compute.pid, 0.1):
        time.sleep(3)  # the measuring period
    assert compute.is_running
    subprocess.run(['prlimit', f'--pid={compute.pid}', '--nofile=1024:'], check=True)
    wait_until(
        lambda: (read_record(cluster, instance) or {}).get('state') in ('active', 'error'), 60, 'it has ended one way'
    )
    other = boot(cluster)
    assert wait_address(cluster, before) == address
    assert {before, other} <= set(read_guests(compute))
    compute.restart()
    check_invariants(cluster, compute)


def list_problems(log: str) -> list[str]:
    return ['log', *(line for line in log.splitlines() if ' WARNING ' in line or ' ERROR ' in line)]


def test_threads_survive_unforeseen_exceptions(cluster: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """F31: unforeseen exceptions, such as MemoryError, end no thread of ecompute (fake)."""
    monkeypatch.setattr('ecomp.shared.presence.LEASE_SECONDS', 1)
    key, config = f'/computes/{uuid.uuid4()}', EtcdConfig((cluster.etcd.endpoint,))
    store, states = Store(config), list[Mapping[str, Entry]]()
    failures = [MemoryError('none'), RuntimeError("can't start new thread")]

    def on_state(state: Mapping[str, Entry]) -> None:
        if failures:
            raise failures.pop()
        states.append(state)

    refresh, faults = store.keep_alive, [MemoryError('none'), RuntimeError("can't start new thread")]

    def keep_alive(lease: int) -> int:
        if faults:
            raise faults.pop()
        return refresh(lease)

    monkeypatch.setattr(store, 'keep_alive', keep_alive)
    follower, lost = Follower(config, [('/computes/', on_state)]), list[str]()
    presence = Presence(store, key, {'token': 'mine'}, lost.append)
    try:
        follower.start()
        presence.start()
        wait_until(lambda: states and key in states[-1], 20, 'it follows')
        wait_until(lambda: not faults, 20, 'it was refreshed again')
        cluster.etcd.delete(key)
        wait_until(lambda: cluster.etcd.get(key), 20, 'it is put again')
        assert (failures, lost) == ([], [])
    finally:
        follower.stop()
        presence.stop()
        store.close()


# Resource bounds: ecompute's descriptors, threads and memory do not grow with the work done.


ROOMY = 'VCPU:256,DISK_GB:1000,MEMORY_MB:100000'
BATCH_SIZE = 10


def put_keys(control: Control, puts: dict[str, str | None]) -> None:
    """Put up to 128 keys in one transaction, or delete the keys with the value None."""
    operations = [
        {'requestDeleteRange': {'key': b64(key)}}
        if value is None
        else {'requestPut': {'key': b64(key), 'value': b64(value)}}
        for key, value in puts.items()
    ]
    control.etcd.call('kv/txn', {'success': operations})


def make_request(compute: str, instance: str) -> dict[str, Any]:
    """Build a request as eschedule of 2019 wrote it."""
    allocations = {compute: {'resources': {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}}}
    owner = {'user_id': 'u', 'project_id': 'p', 'consumer_generation': None}
    return {'allocations': allocations, 'instance': instance, 'image': IMAGE, **owner}


def create(control: Control, compute: Ecompute, instances: Sequence[str]) -> None:
    requests = {instance: make_request(compute.uuid, instance) for instance in instances}
    claims = {
        instance: {name: body[name] for name in ('allocations', 'user_id', 'project_id', 'consumer_generation')}
        | {'consumer_type': 'INSTANCE'}
        for instance, body in requests.items()
    }
    control.placement.call('POST', '/allocations', claims)
    put_keys(control, {f'/hosts/{compute.uuid}/{instance}': json.dumps(body) for instance, body in requests.items()})
    booted_keys = {f'/booted/{instance}' for instance in instances}
    wait_until(lambda: booted_keys <= set(control.etcd.list_keys('/booted/')), 60, 'all have their addresses')


def destroy(control: Control, compute: Ecompute, instances: Sequence[str]) -> None:
    ended: dict[str, Any] = {'allocations': {}, 'image': None}
    put_keys(
        control,
        {
            f'/hosts/{compute.uuid}/{name}': json.dumps({**make_request(compute.uuid, name), **ended})
            for name in instances
        },
    )
    wait_until(lambda: control.etcd.list_keys(f'/hosts/{compute.uuid}/') == [], 60, 'all are gone')


def run_cycles(control: Control, compute: Ecompute, count: int) -> Iterator[int]:
    """Create and destroy BATCH_SIZE instances at a time. Yield the total after each round."""
    for total in range(BATCH_SIZE, count + 1, BATCH_SIZE):
        instances = [str(uuid.uuid4()) for _ in range(BATCH_SIZE)]
        create(control, compute, instances)
        destroy(control, compute, instances)
        yield total


def check_flat_usage(control: Control, count: int, warm: int, memory: float) -> None:
    """Check that usage is equal after `warm` and `count` cycles.

    Memory may grow by at most `memory` MiB.
    """
    compute = control.ecompute(ROOMY)
    used = {}
    for total in run_cycles(control, compute, count):
        if total in (warm, count):
            used[total] = ResourceUse.measure(compute.pid)
    before, after = used[warm], used[count]
    # Slack: a thread or a descriptor may appear or vanish between two measurements. The number of connections in the
    # pool depends on how many were in use concurrently, thus on the load of the machine; the pool's size limits it.
    assert abs((after.descriptors - after.connections) - (before.descriptors - before.connections)) <= 4, used
    assert abs(after.threads - before.threads) <= 4, used
    assert after.connections <= MAX_IDLE_CONNECTIONS + 4, used
    assert (before.processes, after.processes) == (0, 0), used
    assert after.memory - before.memory <= memory, used
    assert read_guests(compute) == {}
    assert control.placement.read_consumers(compute.uuid) == {}
    check_invariants(control, compute)


def test_usage_is_flat_over_20_cycles(cluster: Control) -> None:
    """Bounds: descriptors, threads, connections and memory stay flat over 20 cycles (fake)."""
    check_flat_usage(cluster, 20, warm=10, memory=4)


@pytest.mark.slow
def test_usage_is_flat_over_1000_cycles(cluster: Control) -> None:
    """Bounds: descriptors, threads, connections and memory stay flat over 1,000 cycles (fake)."""
    check_flat_usage(cluster, 1000, warm=200, memory=4)


def test_requests_beyond_a_limit_of_50_are_refused(cluster: Control) -> None:
    """Bounds: a compute with a limit of 50 requests refuses further ones (fake)."""
    check_limit(cluster, 50)


@pytest.mark.slow
def test_requests_beyond_ten_thousand_are_refused(cluster: Control) -> None:
    """Bounds: a compute takes 10,000 requests, refuses further ones and keeps running (fake)."""
    assert MAX_REQUESTS == 10_000
    check_limit(cluster, MAX_REQUESTS)


def check_limit(cluster: Control, max_requests: int) -> None:
    compute = make_tuned(cluster, ROOMY, numbers={'planner.MAX_REQUESTS': max_requests})
    _, existing = place(cluster, SMALL_QUERY)
    wait_state(cluster, existing, 'active')
    # Names that are not uuids are a quick way to add requests: they stay, and nothing is built for them.
    names = [f'/hosts/{compute.uuid}/x{number:05}' for number in range(max_requests - 1)]
    for start in range(0, len(names), 128):
        put_keys(cluster, dict.fromkeys(names[start : start + 128], '{}'))
    wait_until(lambda: len(find_log_lines(compute, 'is not a uuid')) == max_requests - 1, 240, 'all are looked at')
    assert cluster.eschedule('quota', 'set', 'q', 'instances=1').code == 0
    shared = ('--name', 'late', '--group', 'g', *ANTI_AFFINITY, '--project', 'q')
    _, late = place(cluster, SMALL_QUERY, *shared)
    failed = wait_state(cluster, late, 'error')
    assert failed['error']['stage'] == 'scheduled'
    assert (read_members(cluster, 'g'), read_usage(cluster, 'q')) == ({}, {})
    assert f'already has {max_requests} instances, the maximum' in failed['error']['reason']
    assert cluster.placement.read_allocations(late) == {}
    # It keeps its instances and can still destroy them.
    assert (read_record(cluster, existing) or {})['state'] == 'active'
    assert cluster.eschedule('destroy', '--wait', existing).code == 0
    for start in range(0, len(names), 128):
        put_keys(cluster, dict.fromkeys(names[start : start + 128]))
    _, again = place(cluster, SMALL_QUERY, *shared)
    wait_state(cluster, again, 'active')
    check_invariants(cluster, compute)
