"""Requests from other clients, in the format of 2019.

Malformed and malicious values are in tests/faults/test_hostile.py and tests/unit/test_record.py.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check_invariants, read_allocations
from tests.kit.story import (
    IMAGE,
    UNKNOWN_UUID,
    assert_one_line,
    find_log_lines,
    wait_address,
    wait_state,
)

RESOURCES = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
USER = 'c1a0d1e5-0000-4000-8000-00000000000a'
PROJECT = 'c1a0d1e5-0000-4000-8000-00000000000b'


def make_claim_body(compute: str, resources: dict[str, int] | None = None) -> dict[str, Any]:
    allocations = {compute: {'resources': resources or RESOURCES}}
    return {'allocations': allocations, 'user_id': USER, 'project_id': PROJECT, 'consumer_generation': None}


def claim(control: Control, compute: str, instance: str, resources: dict[str, int] | None = None) -> dict[str, Any]:
    body = make_claim_body(compute, resources)
    control.placement.call('PUT', f'/allocations/{instance}', {**body, 'consumer_type': 'INSTANCE'})
    return body


def make_request(compute: str, instance: str, /, **other: Any) -> dict[str, Any]:
    return {**make_claim_body(compute), 'instance': instance, 'image': IMAGE, **other}


def write_request(control: Control, compute: str, instance: str, value: Any) -> None:
    control.etcd.put(f'/hosts/{compute}/{instance}', value if isinstance(value, str | bytes) else json.dumps(value))


def expect_refusal(control: Control, compute: str, instance: str, *words: str) -> dict[str, Any]:
    failed_record = wait_state(control, instance, 'error')
    assert (failed_record['compute'], failed_record['error']['stage']) == (compute, 'scheduled')
    for word in words:
        assert word in failed_record['error']['reason'], (word, failed_record['error'])
    assert failed_record['error']['cleaned']
    assert control.etcd.get(f'/hosts/{compute}/{instance}') is None
    return failed_record


def test_request_and_tombstone_of_2019_are_carried_out(cluster: Control, compute: Ecompute, instance: str) -> None:
    message = {**claim(cluster, compute.uuid, instance), 'instance': instance, 'image': IMAGE}

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
    address = wait_address(cluster, instance)
    assert cluster.eschedule(instance).stdout.strip() == address
    check_invariants(cluster, compute)

    # placement's answer with `allocations` emptied; consumer_generation and consumer_type stay in it.
    answer = cluster.placement.call('GET', f'/allocations/{instance}')
    assert answer['consumer_generation'] == 1
    write_request(cluster, compute.uuid, instance, {**answer, 'allocations': {}, 'instance': instance, 'image': None})
    wait_state(cluster, instance, 'gone')
    check_invariants(cluster, compute)
    assert read_allocations(cluster) == {}


def test_request_without_an_allocation_is_not_built(cluster: Control, compute: Ecompute) -> None:
    write_request(cluster, compute.uuid, UNKNOWN_UUID, make_request(compute.uuid, UNKNOWN_UUID))
    expect_refusal(cluster, compute.uuid, UNKNOWN_UUID, 'placement holds no allocation')
    assert not find_log_lines(compute, 'INSTANTIATE')
    check_invariants(cluster, compute)
    assert_one_line(
        cluster.eschedule(UNKNOWN_UUID), 1, UNKNOWN_UUID, 'failed at stage scheduled', 'placement holds no allocation'
    )
    assert 'placement holds no allocation' in cluster.eschedule('show', UNKNOWN_UUID).stdout
