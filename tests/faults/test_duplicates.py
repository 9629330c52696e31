"""F25: one uuid asked for twice, of two computes or of one: at most one guest, and one allocation."""

from __future__ import annotations

import json
import uuid

import pytest

from tests.kit.by_hand import claim, request
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import guests
from tests.kit.invariants import check
from tests.kit.servers import b64, until
from tests.kit.story import SMALL, addressed, boot, logged, logs, place, reached, record

ROOM = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}


def test_asked_of_another_compute(cluster: Control) -> None:
    """F25: the uuid of a running guest, asked for on a second compute: refused there, the first untouched (fake)"""
    first, second = cluster.ecompute(), cluster.ecompute()
    _, instance = place(cluster, f'{SMALL}&in_tree={first.uuid}')
    address = addressed(cluster, instance)
    before, held = record(cluster, instance), cluster.placement.allocations(instance)
    cluster.etcd.put(f'/hosts/{second.uuid}/{instance}', json.dumps(request(second.uuid, instance)))
    until(lambda: cluster.etcd.get(f'/hosts/{second.uuid}/{instance}') is None, 20, 'it is refused')
    assert logs(second, instance, 'failed at stage scheduled', f'held on {first.uuid}')
    # Not even its tombstone there destroys it.
    gone = {**request(second.uuid, instance), 'allocations': {}, 'image': None}
    cluster.etcd.put(f'/hosts/{second.uuid}/{instance}', json.dumps(gone))
    until(lambda: cluster.etcd.get(f'/hosts/{second.uuid}/{instance}') is None, 20, 'it is gone there')
    assert (record(cluster, instance), cluster.placement.allocations(instance)) == (before, held)
    assert (set(guests(first)), guests(second)) == ({instance}, {})
    assert addressed(cluster, instance) == address
    check(cluster, first, second)


@pytest.mark.parametrize('holders', ['one', 'both', 'none'])
def test_asked_of_two_at_once(cluster: Control, holders: str) -> None:
    """F25: one uuid asked of two computes in one transaction, whoever holds the claim: one guest at most (fake)"""
    first, second = cluster.ecompute(), cluster.ecompute()
    instance = str(uuid.uuid4())
    if holders != 'none':
        claim(cluster, instance, *([first.uuid] if holders == 'one' else [first.uuid, second.uuid]))
    puts = [
        {'requestPut': {'key': b64(f'/hosts/{each}/{instance}'), 'value': b64(json.dumps(request(each, instance)))}}
        for each in (first.uuid, second.uuid)
    ]
    cluster.etcd.call('kv/txn', {'success': puts})

    def decided() -> bool:
        left = [each for each in cluster.etcd.keys('/hosts/') if each.endswith(instance)]
        found = record(cluster, instance) or {}
        return len(left) < 2 and (found.get('state'), len(left)) in (('active', 1), ('error', 0))

    until(decided, 20, 'one of them has it, or none')
    state = (record(cluster, instance) or {})['state']
    assert len({*guests(first), *guests(second)}) == (1 if state == 'active' else 0)
    if holders != 'one':
        assert state == 'error'  # neither holds exactly what it was asked for
    check(cluster, first, second)


def test_asked_of_one_twice(cluster: Control, compute: Ecompute) -> None:
    """F25: the same request put again, and one of another size under the same key: the guest stays as it is (fake)"""
    instance = boot(cluster)
    key = f'/hosts/{compute.uuid}/{instance}'
    original, before = cluster.etcd.get(key), record(cluster, instance)
    assert original is not None
    for value in (original, json.dumps(request(compute.uuid, instance, VCPU=4)), original):
        cluster.etcd.put(key, value)
        _, other = place(cluster)  # its end says that the one before it has been looked at
        addressed(cluster, other)
        assert cluster.eschedule('destroy', '--wait', other).code == 0
        assert (record(cluster, instance), set(guests(compute))) == (before, {instance})
    assert len(logs(compute, 'INSTANTIATE', instance)) == 1


def test_asked_again_after_its_end(cluster: Control, compute: Ecompute) -> None:
    """F25: a uuid that is gone, or that failed, is never made again, whoever asks for it (fake)"""
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
