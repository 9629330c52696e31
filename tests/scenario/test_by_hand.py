"""Requests from other clients, in the format of 2019.

Malformed and malicious values are in tests/faults/test_hostile.py and tests/unit/test_record.py.
"""

from __future__ import annotations

import json
import subprocess

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check_invariants, read_allocations
from tests.kit.story import (
    IMAGE,
    wait_address,
    wait_log_lines,
    wait_state,
)

RESOURCES = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
USER = 'c1a0d1e5-0000-4000-8000-00000000000a'
PROJECT = 'c1a0d1e5-0000-4000-8000-00000000000b'


def test_request_and_tombstone_of_2019_are_carried_out(cluster: Control, compute: Ecompute, instance: str) -> None:
    owner = {'user_id': USER, 'project_id': PROJECT, 'consumer_generation': None}
    body = {'allocations': {compute.uuid: {'resources': RESOURCES}}, **owner}
    cluster.placement.call('PUT', f'/allocations/{instance}', {**body, 'consumer_type': 'INSTANCE'})
    message = {**body, 'instance': instance, 'image': IMAGE}

    # With etcd's own client, as a person would write it.
    key = f'/hosts/{compute.uuid}/{instance}'
    subprocess.run(
        ['etcdctl', '--endpoints', cluster.etcd.endpoint, 'put', key, json.dumps(message)],
        check=True,
        capture_output=True,
        env={'ETCDCTL_API': '3', 'PATH': '/usr/bin:/bin:/usr/local/bin'},
    )

    active_record = wait_state(cluster, instance, 'active')
    assert (active_record['image'], active_record['user_id'], active_record['project_id']) == (IMAGE, USER, PROJECT)
    wire = f"{{'{compute.uuid}': {{'resources': {RESOURCES}}}}}"
    assert wait_log_lines(compute, f'ALLOCATIONS ARE {wire}')
    address = wait_address(cluster, instance)
    assert cluster.eschedule(instance).stdout.strip() == address
    check_invariants(cluster, compute)

    # placement's answer with `allocations` emptied; consumer_generation and consumer_type stay in it.
    answer = cluster.placement.call('GET', f'/allocations/{instance}')
    assert answer['consumer_generation'] == 1
    cluster.etcd.put(key, json.dumps({**answer, 'allocations': {}, 'instance': instance, 'image': None}))
    wait_state(cluster, instance, 'gone')
    check_invariants(cluster, compute)
    assert read_allocations(cluster) == {}
