"""Resource bounds: what ecompute has open and in memory does not grow with what it has done; what it takes ends."""

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
    """Put (or with None delete) up to 128 keys in one transaction."""
    operations = [
        {'requestDeleteRange': {'key': b64(key)}}
        if value is None
        else {'requestPut': {'key': b64(key), 'value': b64(value)}}
        for key, value in puts.items()
    ]
    control.etcd.call('kv/txn', {'success': operations})


def request(compute: str, instance: str) -> dict[str, Any]:
    """A request as 2019's eschedule would have written it."""
    allocations = {compute: {'resources': {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}}}
    owner = {'user_id': 'u', 'project_id': 'p', 'consumer_generation': None}
    return {'allocations': allocations, 'instance': instance, 'image': IMAGE, **owner}


def create(control: Control, compute: Ecompute, instances: Sequence[str]) -> None:
    """Claim and request all of them at once, and wait until their addresses are known."""
    asked = {instance: request(compute.uuid, instance) for instance in instances}
    claims = {
        instance: {name: each[name] for name in ('allocations', 'user_id', 'project_id', 'consumer_generation')}
        | {'consumer_type': 'INSTANCE'}
        for instance, each in asked.items()
    }
    control.placement.call('POST', '/allocations', claims)
    transact(control, {f'/hosts/{compute.uuid}/{instance}': json.dumps(each) for instance, each in asked.items()})
    wanted = {f'/booted/{instance}' for instance in instances}
    until(lambda: wanted <= set(control.etcd.keys('/booted/')), 60, 'all have their addresses')


def destroy(control: Control, compute: Ecompute, instances: Sequence[str]) -> None:
    """Ask for the end of all of them at once, and wait until nothing asks for them any more."""
    gone: dict[str, Any] = {'allocations': {}, 'image': None}
    transact(
        control,
        {f'/hosts/{compute.uuid}/{each}': json.dumps({**request(compute.uuid, each), **gone}) for each in instances},
    )
    until(lambda: control.etcd.keys(f'/hosts/{compute.uuid}/') == [], 60, 'all are gone')


def cycles(control: Control, compute: Ecompute, count: int) -> Iterator[int]:
    """Create and destroy AT_ONCE at a time; yields how many there have been after each round."""
    for done in range(AT_ONCE, count + 1, AT_ONCE):
        instances = [str(uuid.uuid4()) for _ in range(AT_ONCE)]
        create(control, compute, instances)
        destroy(control, compute, instances)
        yield done


def flat(control: Control, count: int, warm: int, memory: float) -> None:
    """What is open is the same after `warm` cycles and after `count`, and memory grows by less than `memory` MiB."""
    compute = control.ecompute(ROOMY)
    used = {}
    for done in cycles(control, compute, count):
        if done in (warm, count):
            used[done] = Use.of(compute.pid)
    before, after = used[warm], used[count]
    # Slack: a thread or a descriptor may come or go between two looks. How many of its connections the pool
    # has come to need depends on how many were in use at once, by the load of the machine: that is bounded.
    assert abs((after.descriptors - after.connections) - (before.descriptors - before.connections)) <= 4, used
    assert abs(after.threads - before.threads) <= 4, used
    assert after.connections <= POOL + 4, used
    assert (before.processes, after.processes) == (0, 0), used
    assert after.memory - before.memory <= memory, used
    assert guests(compute) == {}
    assert control.placement.consumers(compute.uuid) == {}
    check(control, compute)


def test_50_cycles(cluster: Control) -> None:
    """Bounds: descriptors, threads, connections and memory are flat over 50 create-destroy cycles (fake)"""
    flat(cluster, 50, warm=25, memory=4)


@pytest.mark.slow
def test_1000_cycles(cluster: Control) -> None:
    """Bounds: descriptors, threads, connections and memory are flat over 1,000 create-destroy cycles (fake)"""
    flat(cluster, 1000, warm=200, memory=4)


def test_no_more_than_its_limit(cluster: Control) -> None:
    """Bounds: a compute with a limit of 50 requests refuses what exceeds it with the reason, and lives on (fake)"""
    exceeded(cluster, 50)


@pytest.mark.slow
def test_no_more_than_ten_thousand(cluster: Control) -> None:
    """Bounds: a compute takes 10,000 requests; what exceeds is refused with the reason, and it lives on (fake)"""
    assert MOST == 10_000
    exceeded(cluster, MOST)


def exceeded(cluster: Control, most: int) -> None:
    """One request more than `most`."""
    compute = tuned(cluster, ROOMY, numbers={'planner.MOST': most})
    _, good = place(cluster, SMALL)
    reached(cluster, good, 'active')
    # As many as are wanted, and quickly there: names that are no uuid stay, and nothing is made of them.
    names = [f'/hosts/{compute.uuid}/x{number:05}' for number in range(most - 1)]
    for start in range(0, len(names), 128):
        transact(cluster, dict.fromkeys(names[start : start + 128], '{}'))
    until(lambda: len(logged(compute, 'is not a uuid')) == most - 1, 240, 'all are looked at')
    assert cluster.eschedule('quota', 'set', 'q', 'instances=1').code == 0
    shared = ('--name', 'late', '--group', 'g', *APART, '--project', 'q')
    _, late = place(cluster, SMALL, *shared)
    found = reached(cluster, late, 'error')
    assert found['error']['stage'] == 'scheduled'
    assert (members(cluster, 'g'), used(cluster, 'q')) == ({}, {})
    assert f'has {most} instances, and takes no more' in found['error']['reason']
    assert cluster.placement.allocations(late) == {}
    # What it had it keeps, and can still destroy.
    assert (record(cluster, good) or {})['state'] == 'active'
    assert cluster.eschedule('destroy', '--wait', good).code == 0
    for start in range(0, len(names), 128):
        transact(cluster, dict.fromkeys(names[start : start + 128]))
    _, again = place(cluster, SMALL, *shared)
    reached(cluster, again, 'active')
    check(cluster, compute)
