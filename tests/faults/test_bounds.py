"""Resource bounds: ecompute's descriptors, threads and memory do not grow with the work done.

A compute also refuses requests beyond its maximum number.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ecomp.agent.planner import MAX_REQUESTS
from ecomp.placement.http_client import MAX_IDLE_CONNECTIONS
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import read_guests
from tests.kit.invariants import check_invariants
from tests.kit.servers import b64, wait_until
from tests.kit.sharing import ANTI_AFFINITY, read_members, read_usage
from tests.kit.story import IMAGE, SMALL_QUERY, find_log_lines, place, read_record, wait_state
from tests.kit.tuned import make_tuned
from tests.kit.use import ResourceUse

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
    """Claim and request all instances in one step, and wait until their addresses are known."""
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
    """Request the destruction of all instances in one step, and wait until no request is left."""
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
    """Create and destroy BATCH_SIZE instances at a time; yield the total after each round."""
    for total in range(BATCH_SIZE, count + 1, BATCH_SIZE):
        instances = [str(uuid.uuid4()) for _ in range(BATCH_SIZE)]
        create(control, compute, instances)
        destroy(control, compute, instances)
        yield total


def check_flat_usage(control: Control, count: int, warm: int, memory: float) -> None:
    """Check that descriptors and threads are equal after `warm` and `count` cycles.

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
    """Bounds: a compute with a limit of 50 requests refuses further ones and keeps running (fake)."""
    check_limit(cluster, 50)


@pytest.mark.slow
def test_requests_beyond_ten_thousand_are_refused(cluster: Control) -> None:
    """Bounds: a compute takes 10,000 requests, refuses further ones and keeps running (fake)."""
    assert MAX_REQUESTS == 10_000
    check_limit(cluster, MAX_REQUESTS)


def check_limit(cluster: Control, max_requests: int) -> None:
    """Check that a compute with `max_requests` requests refuses one more."""
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
