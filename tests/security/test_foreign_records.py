"""A record is believed only of the compute that placement names: a compute that is taken over ends no other's guest."""

from __future__ import annotations

import json
import uuid
from functools import partial

import pytest

from tests.kit.commands import Control
from tests.kit.hands import guests
from tests.kit.invariants import check
from tests.kit.servers import until
from tests.kit.story import SMALL, addressed, logs, place, reached, record
from tests.kit.tuned import Tuned, tuned

STATES = ('active', 'stopped', 'building', 'destroying', 'error', 'gone')


def forge(cluster: Control, instance: str, state: str) -> None:
    """As whoever may write to etcd does: the instance is another compute's, and its address another one's."""
    value = {**(record(cluster, instance) or {}), 'compute': str(uuid.uuid4()), 'state': state}
    cluster.etcd.put(f'/instances/{instance}', json.dumps(value))
    cluster.etcd.put(f'/booted/{instance}', '10.66.66.66')


def is_ours(cluster: Control, compute: Tuned, instance: str) -> bool:
    found = record(cluster, instance) or {}
    return found.get('compute') == compute.uuid and found.get('state') == 'active'


@pytest.mark.parametrize('down', [False, True])
def test_a_guest_stays_whose_record_is_forged(cluster: Control, down: bool) -> None:
    """Within a minute the victim's own compute dropped its request and gave its claim away (ENEMY 2)."""
    compute = tuned(cluster, 'VCPU:8,DISK_GB:10,MEMORY_MB:1024', numbers={'EVERY': 1})
    instances = [place(cluster, SMALL, '--name', f'n{number}')[1] for number, _ in enumerate(STATES)]
    before = {each: (addressed(cluster, each), cluster.placement.allocations(each)) for each in instances}
    running = guests(compute)
    if down:
        compute.stop()
    for instance, state in zip(instances, STATES, strict=True):
        forge(cluster, instance, state)
    if down:
        compute.start()
    for instance, (address, held) in before.items():
        until(partial(is_ours, cluster, compute, instance), 30, f'the record of {instance} is ours again')
        logs(compute, instance, 'written again')
        assert addressed(cluster, instance) == address
        assert cluster.placement.allocations(instance) == held
        assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') is not None
    assert guests(compute) == running
    for instance in instances:
        assert cluster.eschedule('destroy', '--wait', instance).code == 0
        reached(cluster, instance, 'gone')
    check(cluster, compute)


def move(cluster: Control, instance: str, to: str) -> None:
    """Its claim is another compute's from now on, as an operator moves it."""
    held = cluster.placement.call('GET', f'/allocations/{instance}')
    (of,) = held['allocations'].values()
    body = {**held, 'allocations': {to: {'resources': of['resources']}}}
    cluster.placement.call('PUT', f'/allocations/{instance}', body)


def test_one_whose_claim_is_elsewhere_is_not_ours_to_have(cluster: Control) -> None:
    """Placement is the truth: there the request is dropped, as before."""
    compute, other = (tuned(cluster, numbers={'EVERY': 1}) for _ in range(2))
    _, instance = place(cluster, f'{SMALL}&in_tree={compute.uuid}')
    addressed(cluster, instance)
    request, value = f'/hosts/{compute.uuid}/{instance}', record(cluster, instance) or {}
    asked = cluster.etcd.get(request)
    assert asked is not None
    move(cluster, instance, other.uuid)
    cluster.etcd.put(f'/instances/{instance}', json.dumps({**value, 'compute': other.uuid}))
    logs(compute, instance, 'request dropped')
    assert set(cluster.placement.allocations(instance)) == {other.uuid}
    assert guests(compute)
    # As it was, it is managed again.
    move(cluster, instance, compute.uuid)
    cluster.etcd.put(f'/instances/{instance}', json.dumps(value))
    cluster.etcd.put(request, asked)
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute, other)
