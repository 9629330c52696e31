"""Resource bounds: ecompute's descriptors, threads and memory do not grow with the work done.

A compute also refuses requests beyond its maximum number.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ecomp.agent.planner import MOST
from ecomp.placement.by_http import POOL
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import guests
from tests.kit.invariants import check
from tests.kit.servers import b64, until
from tests.kit.sharing import APART, members, used
from tests.kit.story import IMAGE, SMALL, logged, place, reached, record
from tests.kit.tuned import tuned
from tests.kit.use import Use

ROOMY = 'VCPU:256,DISK_GB:1000,MEMORY_MB:100000'
AT_ONCE = 25


def transact(control: Control, puts: dict[str, str | None]) -> None:
    """Put up to 128 keys in one transaction, or delete the keys with the value None."""
    operations = [
        {'requestDeleteRange': {'key': b64(key)}}
        if value is None
        else {'requestPut': {'key': b64(key), 'value': b64(value)}}
        for key, value in puts.items()
    ]
    control.etcd.call('kv/txn', {'success': operations})


def request(compute: str, instance: str) -> dict[str, Any]:
    """Build a request as eschedule of 2019 wrote it."""
    allocations = {compute: {'resources': {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}}}
    owner = {'user_id': 'u', 'project_id': 'p', 'consumer_generation': None}
    return {'allocations': allocations, 'instance': instance, 'image': IMAGE, **owner}


def create(control: Control, compute: Ecompute, instances: Sequence[str]) -> None:
    """Claim and request all instances in one step, and wait until their addresses are known."""
    requests = {instance: request(compute.uuid, instance) for instance in instances}
    claims = {
        instance: {name: body[name] for name in ('allocations', 'user_id', 'project_id', 'consumer_generation')}
        | {'consumer_type': 'INSTANCE'}
        for instance, body in requests.items()
    }
    control.placement.call('POST', '/allocations', claims)
    transact(control, {f'/hosts/{compute.uuid}/{instance}': json.dumps(body) for instance, body in requests.items()})
    booted_keys = {f'/booted/{instance}' for instance in instances}
    until(lambda: booted_keys <= set(control.etcd.keys('/booted/')), 60, 'all have their addresses')


def destroy(control: Control, compute: Ecompute, instances: Sequence[str]) -> None:
    """Request the destruction of all instances in one step, and wait until no request is left."""
    ended: dict[str, Any] = {'allocations': {}, 'image': None}
    transact(
        control,
        {f'/hosts/{compute.uuid}/{name}': json.dumps({**request(compute.uuid, name), **ended}) for name in instances},
    )
    until(lambda: control.etcd.keys(f'/hosts/{compute.uuid}/') == [], 60, 'all are gone')


def cycles(control: Control, compute: Ecompute, count: int) -> Iterator[int]:
    """Create and destroy BATCH_SIZE instances at a time; yield the total after each round."""
    for total in range(AT_ONCE, count + 1, AT_ONCE):
        instances = [str(uuid.uuid4()) for _ in range(AT_ONCE)]
        create(control, compute, instances)
        destroy(control, compute, instances)
        yield total


def flat(control: Control, count: int, warm: int, memory: float) -> None:
    """Check that descriptors and threads are equal after `warm` and `count` cycles.

    Memory may grow by at most `memory` MiB.
    """
    compute = control.ecompute(ROOMY)
    used = {}
    for total in cycles(control, compute, count):
        if total in (warm, count):
            used[total] = Use.of(compute.pid)
    before, after = used[warm], used[count]
    # Slack: a thread or a descriptor may appear or vanish between two measurements. The number of connections in the
    # pool depends on how many were in use concurrently, thus on the load of the machine; the pool's size limits it.
    assert abs((after.descriptors - after.connections) - (before.descriptors - before.connections)) <= 4, used
    assert abs(after.threads - before.threads) <= 4, used
    assert after.connections <= POOL + 4, used
    assert (before.processes, after.processes) == (0, 0), used
    assert after.memory - before.memory <= memory, used
    assert guests(compute) == {}
    assert control.placement.consumers(compute.uuid) == {}
    check(control, compute)


def test_50_cycles(cluster: Control) -> None:
    """Bounds: descriptors, threads, connections and memory stay flat over 50 cycles (fake)."""
    flat(cluster, 50, warm=25, memory=4)


@pytest.mark.slow
def test_1000_cycles(cluster: Control) -> None:
    """Bounds: descriptors, threads, connections and memory stay flat over 1,000 cycles (fake)."""
    flat(cluster, 1000, warm=200, memory=4)


def test_no_more_than_its_limit(cluster: Control) -> None:
    """Bounds: a compute with a limit of 50 requests refuses further ones and keeps running (fake)."""
    exceeded(cluster, 50)


@pytest.mark.slow
def test_no_more_than_ten_thousand(cluster: Control) -> None:
    """Bounds: a compute takes 10,000 requests, refuses further ones and keeps running (fake)."""
    assert MOST == 10_000
    exceeded(cluster, MOST)


def exceeded(cluster: Control, most: int) -> None:
    """Check that a compute with `max_requests` requests refuses one more."""
    compute = tuned(cluster, ROOMY, numbers={'planner.MOST': most})
    _, existing = place(cluster, SMALL)
    reached(cluster, existing, 'active')
    # Names that are not uuids are a quick way to add requests: they stay, and nothing is built for them.
    names = [f'/hosts/{compute.uuid}/x{number:05}' for number in range(most - 1)]
    for start in range(0, len(names), 128):
        transact(cluster, dict.fromkeys(names[start : start + 128], '{}'))
    until(lambda: len(logged(compute, 'is not a uuid')) == most - 1, 240, 'all are looked at')
    assert cluster.eschedule('quota', 'set', 'q', 'instances=1').code == 0
    shared = ('--name', 'late', '--group', 'g', *APART, '--project', 'q')
    _, late = place(cluster, SMALL, *shared)
    failed = reached(cluster, late, 'error')
    assert failed['error']['stage'] == 'scheduled'
    assert (members(cluster, 'g'), used(cluster, 'q')) == ({}, {})
    assert f'has {most} instances, and takes no more' in failed['error']['reason']
    assert cluster.placement.allocations(late) == {}
    # It keeps its instances and can still destroy them.
    assert (record(cluster, existing) or {})['state'] == 'active'
    assert cluster.eschedule('destroy', '--wait', existing).code == 0
    for start in range(0, len(names), 128):
        transact(cluster, dict.fromkeys(names[start : start + 128]))
    _, again = place(cluster, SMALL, *shared)
    reached(cluster, again, 'active')
    check(cluster, compute)
