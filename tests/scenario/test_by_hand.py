"""Requests from other clients: the format of 2019, and malformed or malicious values."""

from __future__ import annotations

import json
import subprocess
import uuid
from typing import Any

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check_invariants, read_allocations
from tests.kit.servers import wait_until
from tests.kit.story import (
    IMAGE,
    UNKNOWN_UUID,
    assert_one_line,
    boot,
    find_log_lines,
    place,
    read_log,
    read_record,
    wait_address,
    wait_log_lines,
    wait_state,
)

RESOURCES = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
USER = 'c1a0d1e5-0000-4000-8000-00000000000a'
PROJECT = 'c1a0d1e5-0000-4000-8000-00000000000b'


def make_claim_body(compute: str, resources: dict[str, int] | None = None) -> dict[str, Any]:
    """Make the body of a claim in the format of 2019."""
    allocations = {compute: {'resources': resources or RESOURCES}}
    return {'allocations': allocations, 'user_id': USER, 'project_id': PROJECT, 'consumer_generation': None}


def claim(control: Control, compute: str, instance: str, resources: dict[str, int] | None = None) -> dict[str, Any]:
    """Make a claim with the consumer_type that placement requires now; return its body."""
    body = make_claim_body(compute, resources)
    control.placement.call('PUT', f'/allocations/{instance}', {**body, 'consumer_type': 'INSTANCE'})
    return body


def make_request(compute: str, instance: str, /, **other: Any) -> dict[str, Any]:
    """Make a request in the format of 2019; the claim is not made."""
    return {**make_claim_body(compute), 'instance': instance, 'image': IMAGE, **other}


def write_request(control: Control, compute: str, instance: str, value: Any) -> None:
    """Write a request key: text as it is, other values as JSON."""
    control.etcd.put(f'/hosts/{compute}/{instance}', value if isinstance(value, str | bytes) else json.dumps(value))


def expect_refusal(control: Control, compute: str, instance: str, *words: str) -> dict[str, Any]:
    """Wait for an error record with these words, and check that the request key is gone."""
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


def test_request_with_allocation_on_another_compute_is_not_built(cluster: Control) -> None:
    compute, other = cluster.ecompute(), cluster.ecompute()
    foreign = str(uuid.uuid4())
    claim(cluster, other.uuid, foreign)
    write_request(cluster, compute.uuid, foreign, make_request(compute.uuid, foreign))
    expect_refusal(
        cluster,
        compute.uuid,
        foreign,
        f'placement holds nothing on {compute.uuid}',
        f' on {other.uuid}, but the request has nothing there',
    )
    assert cluster.placement.read_allocations(foreign) == {other.uuid: RESOURCES}
    check_invariants(cluster, compute, other, foreign=[foreign])
    cluster.placement.call('DELETE', f'/allocations/{foreign}')


def test_request_that_differs_from_its_allocation_is_not_built(cluster: Control, compute: Ecompute) -> None:
    claim(cluster, compute.uuid, UNKNOWN_UUID, {**RESOURCES, 'MEMORY_MB': 64})
    write_request(cluster, compute.uuid, UNKNOWN_UUID, make_request(compute.uuid, UNKNOWN_UUID))
    expect_refusal(cluster, compute.uuid, UNKNOWN_UUID, 'MEMORY_MB:128', 'MEMORY_MB:64')
    check_invariants(cluster, compute)
    assert read_allocations(cluster) == {}


def test_malformed_requests_are_refused_with_a_reason(cluster: Control, compute: Ecompute) -> None:
    compute_uuid = compute.uuid
    boot(cluster)
    wrong: list[tuple[Any, list[str]]] = [
        ('{"allocations": ', ['not JSON']),
        ('', ['not JSON']),
        (b'\xff\xfe', ['not text in UTF-8']),
        ('[]', ['expected a JSON object', 'list']),
        ('"text"', ['expected a JSON object']),
        ('{"instance": 1, "instance": 2}', ['a duplicate key']),
        ('[' * 50_000, ['nested too deeply']),
        ('{}', ['lacks allocations, instance, image']),
        ({'instance': ..., 'image': IMAGE}, ['lacks allocations']),
        ({'allocations': {}, 'instance': ...}, ['lacks image']),
        ({'instance': UNKNOWN_UUID}, [UNKNOWN_UUID, 'its key has']),
        ({'instance': 17}, ['17', 'its key has']),
        ({'allocations': []}, ['allocations', 'list']),
        ({'allocations': {compute_uuid: {'resources': {}}}}, ['no resources']),
        ({'allocations': {compute_uuid: 3}}, ['no resources']),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': '1'}}}}, ['VCPU', "'1'"]),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': True}}}}, ['VCPU', 'True']),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': 0}}}}, ['VCPU is 0']),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': -1}}}}, ['VCPU is -1']),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': 1.5}}}}, ['VCPU is 1.5']),
        ({'allocations': {compute_uuid: {'resources': {'VCPU': 1, 'MEMORY_MB': 1}}}}, ['lack DISK_GB']),
        ({'allocations': {UNKNOWN_UUID: {'resources': RESOURCES}}}, [UNKNOWN_UUID, 'not for this compute']),
        ({'image': None}, ['image', 'None']),
        ({'image': 7}, ['image', '7']),
        ({'image': 'ftp://images.invalid/a.img'}, ['ftp://', 'http://']),
        ({'image': '/etc/passwd'}, ['/etc/passwd', 'http://']),
        ({'image': 'e9bedb97-917a-4f4e-9a69-8ad21840267f'}, ['http://']),
        ({'image': 'http:///nothing'}, ['must name a host']),
        ({'image': 'http://images.invalid/\n'}, ['control character']),
        ({'version': 2}, ['version 2']),
        ({'version': 'new'}, ["version 'new'"]),
        ({'user_id': 5}, ['user_id']),
        ({'stages': 'now'}, ['stages']),
        ({'allocations': {}}, ['destroy', 'null']),
        ({'query': 'x' * (1024 * 1024)}, ['bytes', 'the limit is']),
    ]
    expected_words: dict[str, list[str]] = {}
    for value, words in wrong:
        instance = str(uuid.uuid4())
        if isinstance(value, dict):
            message = value if ... in value.values() else make_request(compute_uuid, instance, **value)
            value = {name: instance if field is ... else field for name, field in message.items()}
        expected_words[instance] = words
        write_request(cluster, compute_uuid, instance, value)
    for instance, words in expected_words.items():
        expect_refusal(cluster, compute_uuid, instance, *words)
    check_invariants(cluster, compute)

    # Each refusal is logged in one line; a value above the size limit also logs that it is ignored. Other requests are
    # still carried out.
    for instance in expected_words:
        log_lines = wait_log_lines(compute, instance)
        assert len([line for line in log_lines if 'the value of' not in line]) == 1
        assert len(log_lines) == 1 + ('the limit is' in expected_words[instance])
    place(cluster)
    check_invariants(cluster, compute)
    assert cluster.eschedule('list').code == 0


def test_request_with_unknown_resource_class_is_refused(cluster: Control, compute: Ecompute) -> None:
    odd = {**RESOURCES, 'CUSTOM_GOLD': 1}
    write_request(
        cluster,
        compute.uuid,
        UNKNOWN_UUID,
        make_request(compute.uuid, UNKNOWN_UUID, allocations={compute.uuid: {'resources': odd}}),
    )
    expect_refusal(cluster, compute.uuid, UNKNOWN_UUID, 'placement holds no allocation')


@pytest.mark.parametrize('name', ['not-a-uuid', UNKNOWN_UUID.upper(), f'deeper/{UNKNOWN_UUID}', ''])
def test_key_without_instance_uuid_is_logged_once_and_kept(cluster: Control, compute: Ecompute, name: str) -> None:
    key = f'/hosts/{compute.uuid}/{name}'
    cluster.etcd.put(key, json.dumps(make_request(compute.uuid, UNKNOWN_UUID)))
    wait_until(lambda: find_log_lines(compute, key), 20, 'it is reported')
    # Later requests are carried out, which takes the planner round several times.
    for _ in range(2):
        wait_address(cluster, place(cluster)[1])
    assert len(wait_log_lines(compute, key)) == 1
    assert len(read_log(compute)) < 30
    assert cluster.etcd.get(key) is not None
    assert read_record(cluster, UNKNOWN_UUID) is None
    for command in (['list'], ['list', '-f', 'json']):
        assert cluster.eschedule(*command).code == 0
    cluster.etcd.delete(key)


def test_malformed_request_of_a_running_guest_is_a_fault(cluster: Control, compute: Ecompute) -> None:
    _, instance = place(cluster)
    address = wait_address(cluster, instance)
    write_request(cluster, compute.uuid, instance, '{')
    fault = wait_until(lambda: (read_record(cluster, instance) or {}).get('fault'), 20, 'its fault is recorded')
    assert 'its request is malformed' in str(fault)
    wait_address(cluster, place(cluster)[1])
    assert len(wait_log_lines(compute, instance, 'its request became malformed')) == 1
    assert (read_record(cluster, instance) or {})['state'] == 'active'
    assert cluster.eschedule(instance).stdout == f'{address}\n'
    # It can still be destroyed.
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    wait_state(cluster, instance, 'gone')


def test_requests_deleted_immediately_leave_no_work(cluster: Control, compute: Ecompute) -> None:
    for _ in range(60):
        instance = str(uuid.uuid4())
        write_request(cluster, compute.uuid, instance, make_request(compute.uuid, instance))
        cluster.etcd.delete(f'/hosts/{compute.uuid}/{instance}')
    wait_address(cluster, place(cluster)[1])
    check_invariants(cluster, compute)
    read_log(compute)
    assert compute.stop() == 0  # no task is counted as in work
