"""F34: values of the previous version are read; values of the next version are refused and kept."""

from __future__ import annotations

import json
import uuid
from typing import Any

from ecomp.model.record import from_json
from tests.kit.by_hand import RESOURCES, put_claim
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import read_guests
from tests.kit.invariants import check_invariants
from tests.kit.servers import wait_until
from tests.kit.sharing import ANTI_AFFINITY, read_members, read_usage
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    assert_one_line,
    boot,
    find_log_lines,
    place,
    read_record,
    wait_address,
    wait_log_lines,
    wait_state,
)
from tests.kit.tuned import make_tuned


def make_2019_request(compute: str, instance: str, image: str | None = IMAGE) -> dict[str, Any]:
    """Make a request as eschedule of 2019 wrote it: its claim's body and two fields.

    Without an image it is a destroy.
    """
    return {
        'allocations': {compute: {'resources': RESOURCES}} if image else {},
        'user_id': '3f0a7b59-6b93-4ca7-8d47-4ac21e5e8d1c',
        'project_id': 'b1e5ae4a-9f6f-4c0c-9f92-bb3b5d8e9a11',
        'consumer_generation': None,
        'instance': instance,
        'image': image,
    }


def test_newer_request_is_refused(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F34: a request of a newer version fails with an error that names both versions; nothing is built (fake)."""
    put_claim(cluster, instance, compute.uuid)
    body = {**make_2019_request(compute.uuid, instance), 'version': 2, 'volumes': [{'size': 1}]}
    cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(body))
    error = wait_state(cluster, instance, 'error')['error']
    assert 'format version 2 of the request is not supported: this ecomp reads versions up to 1;' in error['reason']
    assert find_log_lines(compute, 'INSTANTIATE', instance) == []


def test_refused_newer_request_frees_group_quota_and_name(cluster: Control, compute: Ecompute) -> None:
    """F34: a refused request of a newer version leaves its group and quota, and its name is free (fake)."""
    assert cluster.eschedule('quota', 'set', 'q', 'instances=1').code == 0
    words = (SMALL_QUERY, '--name', 'web', '--group', 'g', *ANTI_AFFINITY, '--project', 'q')
    compute.pause()  # so that it does not take the request before that is rewritten
    _, instance = place(cluster, *words)
    key = f'/hosts/{compute.uuid}/{instance}'
    cluster.etcd.put(key, json.dumps({**json.loads(cluster.etcd.get(key) or b''), 'version': 2}))
    compute.resume()
    failed = wait_state(cluster, instance, 'error')
    assert (failed['name'], failed['project_id']) == ('web', 'q')
    assert (read_members(cluster, 'g'), read_usage(cluster, 'q')) == ({}, {})
    _, repeated = place(cluster, *words)
    wait_state(cluster, repeated, 'active')


def test_newer_request_of_a_running_guest_is_a_fault(cluster: Control, compute: Ecompute) -> None:
    """F34: the request of a running guest rewritten by a newer eschedule: it stays, with a fault (fake)."""
    instance = boot(cluster)
    key = f'/hosts/{compute.uuid}/{instance}'
    original = cluster.etcd.get(key)
    assert original is not None
    newer = json.dumps({**json.loads(original), 'version': 2, 'power': 'off'})
    cluster.etcd.put(key, newer)
    wait_until(lambda: (read_record(cluster, instance) or {})['fault'], 20, 'a fault says so')
    status = read_record(cluster, instance) or {}
    assert 'version 2' in status['fault']
    assert (status['state'], set(read_guests(compute))) == ('active', {instance})
    assert cluster.etcd.get(key) == newer.encode()
    # A destroy by this version's eschedule can be parsed and is carried out.
    assert cluster.eschedule('destroy', '--wait', instance).code == 0


def test_unknown_fields_are_ignored(cluster: Control) -> None:
    """F34: values of the same version with additional fields are read, and the fields are ignored (fake)."""
    compute = make_tuned(cluster, numbers={'PLAN_INTERVAL_SECONDS': 0.3})
    instance = str(uuid.uuid4())
    put_claim(cluster, instance, compute.uuid)
    body = {**make_2019_request(compute.uuid, instance), 'version': 1, 'volume': 'v', 'zone': {'policy': 'spread'}}
    request_key, record_key = f'/hosts/{compute.uuid}/{instance}', f'/instances/{compute.uuid}/{instance}'
    cluster.etcd.put(request_key, json.dumps(body))
    address = wait_address(cluster, instance)
    # eschedule's own value, which ecompute does not rewrite
    assert cluster.etcd.get(request_key) == json.dumps(body).encode()
    original = json.loads(cluster.etcd.get(record_key) or b'')
    extended = {**original, 'ready': True, 'addresses': [{**entry, 'family': 4} for entry in original['addresses']]}
    assert from_json(json.dumps(extended).encode()) == from_json(json.dumps(original).encode())
    cluster.etcd.put(record_key, json.dumps(extended))
    for words in (['show', instance], ['list'], [instance]):
        assert cluster.eschedule(*words).code == 0
    assert cluster.eschedule(instance).stdout == f'{address}\n'
    # ecompute still manages it: it neither stands in its way nor is destroyed.
    other = boot(cluster)
    assert (read_record(cluster, instance) or {})['state'] == 'active'
    assert set(read_guests(compute)) == {instance, other}
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check_invariants(cluster, compute)


def test_newer_state_file_is_kept(cluster: Control, compute: Ecompute) -> None:
    """F34: state of another version in the state directory is kept and logged; ecompute keeps working (fake)."""
    instance = boot(cluster)
    path = compute.directory / 'state' / 'instances' / f'{instance}.json'
    newer = json.dumps({**json.loads(path.read_text()), 'version': 2})
    compute.stop()
    path.write_text(newer)
    compute.start()
    assert wait_log_lines(compute, str(path), 'version 2')
    assert path.read_text() == newer
    assert wait_address(cluster, instance)
    wait_address(cluster, place(cluster)[1])


def test_address_without_a_record_is_not_an_instance(cluster: Control) -> None:
    """F34: an address in /booted without a record is not an instance: any compute may write there (fake)."""
    instance = str(uuid.uuid4())
    cluster.etcd.put(f'/booted/{instance}', '192.168.122.17')
    assert_one_line(cluster.eschedule(instance), 4, f'{instance}: no such instance')
    cluster.etcd.delete(f'/booted/{instance}')
