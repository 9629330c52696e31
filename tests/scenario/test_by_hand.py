"""Requests from other clients: the format of 2019, and malformed or malicious values."""

from __future__ import annotations

import json
import subprocess
import uuid
from typing import Any

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import allocations, check
from tests.kit.servers import until
from tests.kit.story import IMAGE, NOBODY, addressed, boot, log_of, logged, logs, one_line, place, reached, record

RESOURCES = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
USER = 'c1a0d1e5-0000-4000-8000-00000000000a'
PROJECT = 'c1a0d1e5-0000-4000-8000-00000000000b'


def claimed(compute: str, resources: dict[str, int] | None = None) -> dict[str, Any]:
    """Make the body of a claim in the format of 2019."""
    allocations = {compute: {'resources': resources or RESOURCES}}
    return {'allocations': allocations, 'user_id': USER, 'project_id': PROJECT, 'consumer_generation': None}


def claim(control: Control, compute: str, instance: str, resources: dict[str, int] | None = None) -> dict[str, Any]:
    """Make a claim with the consumer_type that placement requires now; return its body."""
    body = claimed(compute, resources)
    control.placement.call('PUT', f'/allocations/{instance}', {**body, 'consumer_type': 'INSTANCE'})
    return body


def request(compute: str, instance: str, /, **other: Any) -> dict[str, Any]:
    """Make a request in the format of 2019; the claim is not made."""
    return {**claimed(compute), 'instance': instance, 'image': IMAGE, **other}


def write(control: Control, compute: str, instance: str, value: Any) -> None:
    """Write a request key: text as it is, other values as JSON."""
    control.etcd.put(f'/hosts/{compute}/{instance}', value if isinstance(value, str | bytes) else json.dumps(value))


def refused(control: Control, compute: str, instance: str, *words: str) -> dict[str, Any]:
    """Wait for an error record with these words, and check that the request key is gone."""
    failed_record = reached(control, instance, 'error')
    assert (failed_record['compute'], failed_record['error']['stage']) == (compute, 'scheduled')
    for word in words:
        assert word in failed_record['error']['reason'], (word, failed_record['error'])
    assert failed_record['error']['cleaned']
    assert control.etcd.get(f'/hosts/{compute}/{instance}') is None
    return failed_record


def test_a_request_and_a_destroy_of_2019_are_carried_out(cluster: Control, compute: Ecompute, instance: str) -> None:
    message = {**claim(cluster, compute.uuid, instance), 'instance': instance, 'image': IMAGE}

    # With etcd's own client, as a person would write it.
    key = f'/hosts/{compute.uuid}/{instance}'
    subprocess.run(
        ['etcdctl', '--endpoints', cluster.etcd.endpoint, 'put', key, json.dumps(message)],
        check=True,
        capture_output=True,
        env={'ETCDCTL_API': '3', 'PATH': '/usr/bin:/bin:/usr/local/bin'},
    )

    active_record = reached(cluster, instance, 'active')
    assert (active_record['image'], active_record['user_id'], active_record['project_id']) == (IMAGE, USER, PROJECT)
    address = addressed(cluster, instance)
    assert cluster.eschedule(instance).stdout.strip() == address
    check(cluster, compute)

    # placement's answer with `allocations` emptied; consumer_generation and consumer_type stay in it.
    answer = cluster.placement.call('GET', f'/allocations/{instance}')
    assert answer['consumer_generation'] == 1
    write(cluster, compute.uuid, instance, {**answer, 'allocations': {}, 'instance': instance, 'image': None})
    reached(cluster, instance, 'gone')
    check(cluster, compute)
    assert allocations(cluster) == {}


def test_a_request_without_an_allocation_is_not_built(cluster: Control, compute: Ecompute) -> None:
    write(cluster, compute.uuid, NOBODY, request(compute.uuid, NOBODY))
    refused(cluster, compute.uuid, NOBODY, 'placement holds no allocation')
    assert not logged(compute, 'INSTANTIATE')
    check(cluster, compute)
    one_line(cluster.eschedule(NOBODY), 1, NOBODY, 'failed at stage scheduled', 'placement holds no allocation')
    assert 'placement holds no allocation' in cluster.eschedule('show', NOBODY).stdout


def test_a_request_that_is_held_elsewhere_is_not_built(cluster: Control) -> None:
    compute, other = cluster.ecompute(), cluster.ecompute()
    foreign = str(uuid.uuid4())
    claim(cluster, other.uuid, foreign)
    write(cluster, compute.uuid, foreign, request(compute.uuid, foreign))
    refused(cluster, compute.uuid, foreign, f'nothing is held on {compute.uuid}', f'held on {other.uuid}')
    assert cluster.placement.allocations(foreign) == {other.uuid: RESOURCES}
    check(cluster, compute, other, foreign=[foreign])
    cluster.placement.call('DELETE', f'/allocations/{foreign}')


def test_a_request_that_differs_from_its_allocation_is_not_built(cluster: Control, compute: Ecompute) -> None:
    claim(cluster, compute.uuid, NOBODY, {**RESOURCES, 'MEMORY_MB': 64})
    write(cluster, compute.uuid, NOBODY, request(compute.uuid, NOBODY))
    refused(cluster, compute.uuid, NOBODY, 'MEMORY_MB:128', 'MEMORY_MB:64')
    check(cluster, compute)
    assert allocations(cluster) == {}


def test_values_that_are_no_requests(cluster: Control, compute: Ecompute) -> None:
    compute_uuid = compute.uuid
    boot(cluster)
    wrong: list[tuple[Any, list[str]]] = [
        ('{"allocations": ', ['not JSON']),
        ('', ['not JSON']),
        (b'\xff\xfe', ['not text in UTF-8']),
        ('[]', ['expected a JSON object', 'list']),
        ('"text"', ['expected a JSON object']),
        ('{"instance": 1, "instance": 2}', ['twice']),
        ('[' * 50_000, ['nested too deeply']),
        ('{}', ['lacks allocations, instance, image']),
        ({'instance': ..., 'image': IMAGE}, ['lacks allocations']),
        ({'allocations': {}, 'instance': ...}, ['lacks image']),
        ({'instance': NOBODY}, [NOBODY, 'its key says']),
        ({'instance': 17}, ['17', 'its key says']),
        ({'allocations': []}, ['allocations', 'list']),
        ({'allocations': {compute_uuid: {'resources': {}}}}, ['no resources']),
        ({'allocations': {compute_uuid: 3}}, ['no resources']),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': '1'}}}}, ['VCPU', "'1'"]),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': True}}}}, ['VCPU', 'True']),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': 0}}}}, ['VCPU is 0']),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': -1}}}}, ['VCPU is -1']),
        ({'allocations': {compute_uuid: {'resources': {**RESOURCES, 'VCPU': 1.5}}}}, ['VCPU is 1.5']),
        ({'allocations': {compute_uuid: {'resources': {'VCPU': 1, 'MEMORY_MB': 1}}}}, ['no DISK_GB']),
        ({'allocations': {NOBODY: {'resources': RESOURCES}}}, [NOBODY, 'not for this compute']),
        ({'image': None}, ['image', 'None']),
        ({'image': 7}, ['image', '7']),
        ({'image': 'ftp://images.invalid/a.img'}, ['ftp://', 'http://']),
        ({'image': '/etc/passwd'}, ['/etc/passwd', 'http://']),
        ({'image': 'e9bedb97-917a-4f4e-9a69-8ad21840267f'}, ['http://']),
        ({'image': 'http:///nothing'}, ['names no host']),
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
            message = value if ... in value.values() else request(compute_uuid, instance, **value)
            value = {name: instance if field is ... else field for name, field in message.items()}
        expected_words[instance] = words
        write(cluster, compute_uuid, instance, value)
    for instance, words in expected_words.items():
        refused(cluster, compute_uuid, instance, *words)
    check(cluster, compute)

    # Each refusal is logged in one line; a value above the size limit also logs that it is not kept. Other requests are
    # still carried out.
    for instance in expected_words:
        log_lines = logs(compute, instance)
        assert len([line for line in log_lines if 'not kept' not in line]) == 1
        assert len(log_lines) == 1 + ('the limit is' in expected_words[instance])
    place(cluster)
    check(cluster, compute)
    assert cluster.eschedule('list').code == 0


def test_a_class_the_compute_does_not_have(cluster: Control, compute: Ecompute) -> None:
    odd = {**RESOURCES, 'CUSTOM_GOLD': 1}
    write(cluster, compute.uuid, NOBODY, request(compute.uuid, NOBODY, allocations={compute.uuid: {'resources': odd}}))
    refused(cluster, compute.uuid, NOBODY, 'placement holds no allocation')


@pytest.mark.parametrize('name', ['not-a-uuid', NOBODY.upper(), f'deeper/{NOBODY}', ''])
def test_a_key_that_names_no_instance_is_reported_once_and_left(cluster: Control, compute: Ecompute, name: str) -> None:
    key = f'/hosts/{compute.uuid}/{name}'
    cluster.etcd.put(key, json.dumps(request(compute.uuid, NOBODY)))
    until(lambda: logged(compute, key), 20, 'it is reported')
    # Later requests are carried out, which takes the planner round several times.
    for _ in range(2):
        addressed(cluster, place(cluster)[1])
    assert len(logs(compute, key)) == 1
    assert len(log_of(compute)) < 30
    assert cluster.etcd.get(key) is not None
    assert record(cluster, NOBODY) is None
    for command in (['list'], ['list', '-f', 'json']):
        assert cluster.eschedule(*command).code == 0
    cluster.etcd.delete(key)


def test_the_request_of_a_living_guest_becomes_unreadable(cluster: Control, compute: Ecompute) -> None:
    _, instance = place(cluster)
    address = addressed(cluster, instance)
    write(cluster, compute.uuid, instance, '{')
    fault = until(lambda: (record(cluster, instance) or {}).get('fault'), 20, 'its fault is recorded')
    assert 'unreadable' in str(fault)
    addressed(cluster, place(cluster)[1])
    assert len(logs(compute, instance, 'unreadable')) == 1
    assert (record(cluster, instance) or {})['state'] == 'active'
    assert cluster.eschedule(instance).stdout == f'{address}\n'
    # It can still be destroyed.
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    reached(cluster, instance, 'gone')


def test_requests_that_vanish_at_once(cluster: Control, compute: Ecompute) -> None:
    for _ in range(60):
        instance = str(uuid.uuid4())
        write(cluster, compute.uuid, instance, request(compute.uuid, instance))
        cluster.etcd.delete(f'/hosts/{compute.uuid}/{instance}')
    addressed(cluster, place(cluster)[1])
    check(cluster, compute)
    log_of(compute)
    assert compute.stop() == 0  # no task is counted as in work
