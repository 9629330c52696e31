"""F34: values of the previous version are read; values of the next version are refused and kept."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from ecomp.model.record import from_json
from tests.kit.by_hand import ROOM, claim
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import guests
from tests.kit.invariants import check
from tests.kit.servers import until
from tests.kit.sharing import APART, members, used
from tests.kit.story import IMAGE, SMALL, addressed, boot, logged, logs, one_line, place, reached, record
from tests.kit.tuned import tuned


def of_2019(compute: str, instance: str, image: str | None = IMAGE) -> dict[str, Any]:
    """Make a request as eschedule of 2019 wrote it: its claim's body and two fields.

    Without an image it is a destroy.
    """
    return {
        'allocations': {compute: {'resources': ROOM}} if image else {},
        'user_id': '3f0a7b59-6b93-4ca7-8d47-4ac21e5e8d1c',
        'project_id': 'b1e5ae4a-9f6f-4c0c-9f92-bb3b5d8e9a11',
        'consumer_generation': None,
        'instance': instance,
        'image': image,
    }


def test_requests_of_2019(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F34: a request and a destroy as eschedule of 2019 wrote them are carried out (fake)."""
    key = f'/hosts/{compute.uuid}/{instance}'
    claim(cluster, instance, compute.uuid)
    cluster.etcd.put(key, json.dumps(of_2019(compute.uuid, instance)))
    address = addressed(cluster, instance)  # in /booted, as plain text, where clients of 2019 read it
    assert cluster.eschedule(instance).stdout == f'{address}\n'
    check(cluster, compute)
    cluster.etcd.put(key, json.dumps(of_2019(compute.uuid, instance, None)))
    until(lambda: cluster.etcd.get(key) is None, 20, 'it is destroyed')
    assert cluster.etcd.get(f'/booted/{instance}') is None


def test_a_request_of_the_next_version(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F34: a request of a newer version fails with an error that names both versions; nothing is built (fake)."""
    claim(cluster, instance, compute.uuid)
    body = {**of_2019(compute.uuid, instance), 'version': 2, 'volumes': [{'size': 1}]}
    cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(body))
    error = reached(cluster, instance, 'error')['error']
    assert 'version 2 of the request is not known here: this ecompute takes 1' in error['reason']
    assert logged(compute, 'INSTANTIATE', instance) == []


def test_what_a_request_of_the_next_version_shared(cluster: Control, compute: Ecompute) -> None:
    """F34: a refused request of a newer version leaves its group and quota, and its name is free (fake)."""
    assert cluster.eschedule('quota', 'set', 'q', 'instances=1').code == 0
    words = (SMALL, '--name', 'web', '--group', 'g', *APART, '--project', 'q')
    compute.pause()  # so that it does not take the request before that is rewritten
    _, instance = place(cluster, *words)
    key = f'/hosts/{compute.uuid}/{instance}'
    cluster.etcd.put(key, json.dumps({**json.loads(cluster.etcd.get(key) or b''), 'version': 2}))
    compute.resume()
    failed = reached(cluster, instance, 'error')
    assert (failed['name'], failed['project_id']) == ('web', 'q')
    assert (members(cluster, 'g'), used(cluster, 'q')) == ({}, {})
    _, repeated = place(cluster, *words)
    reached(cluster, repeated, 'active')


def test_a_running_guest_s_request_of_the_next_version(cluster: Control, compute: Ecompute) -> None:
    """F34: the request of a running guest rewritten by a newer eschedule: it stays, with a fault (fake)."""
    instance = boot(cluster)
    key = f'/hosts/{compute.uuid}/{instance}'
    original = cluster.etcd.get(key)
    assert original is not None
    newer = json.dumps({**json.loads(original), 'version': 2, 'power': 'off'})
    cluster.etcd.put(key, newer)
    until(lambda: (record(cluster, instance) or {})['fault'], 20, 'a fault says so')
    status = record(cluster, instance) or {}
    assert 'version 2' in status['fault']
    assert (status['state'], set(guests(compute))) == ('active', {instance})
    assert cluster.etcd.get(key) == newer.encode()
    # A destroy by this version's eschedule can be parsed and is carried out.
    assert cluster.eschedule('destroy', '--wait', instance).code == 0


@pytest.mark.parametrize('version', [2, 99])
def test_a_record_of_the_next_version(cluster: Control, version: int) -> None:
    """F34: a record of a newer version is refused, reported as such by eschedule, and left unchanged (fake)."""
    compute = tuned(cluster, numbers={'EVERY': 0.3})
    instance = boot(cluster)
    key = f'/instances/{compute.uuid}/{instance}'
    original = cluster.etcd.get(key)
    assert original is not None
    newer = json.dumps({**json.loads(original), 'version': version, 'state': 'migrating', 'volumes': []})
    compute.stop()
    cluster.etcd.put(key, newer)
    compute.start()
    until(lambda: logged(compute, key, f'version {version}', 'install a newer one'), 20, 'it is refused')
    assert logged(compute, ' ERROR ', instance) == []
    one_line(cluster.eschedule('show', instance), 1, key, f'version {version}', 'install a newer one')
    one_line(cluster.eschedule('destroy', instance), 1, key, f'version {version}')
    one_line(cluster.eschedule('list'), 1, key, f'version {version}')
    _, other = place(cluster)  # other instances are not affected
    addressed(cluster, other)
    assert len(logs(compute, key, 'trying again')) == 1
    assert cluster.etcd.get(key) == newer.encode()
    assert set(guests(compute)) == {instance, other}
    assert guests(compute)[instance]['running']
    # The newer ecompute has returned and written a record that this version can parse.
    cluster.etcd.put(key, original)
    until(lambda: cluster.eschedule('show', instance).code == 0, 20, 'it is read again')
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute)


def test_fields_nobody_knows(cluster: Control) -> None:
    """F34: values of the same version with additional fields are read, and the fields are ignored (fake)."""
    compute = tuned(cluster, numbers={'EVERY': 0.3})
    instance = str(uuid.uuid4())
    claim(cluster, instance, compute.uuid)
    body = {**of_2019(compute.uuid, instance), 'version': 1, 'volume': 'v', 'zone': {'policy': 'spread'}}
    request_key, record_key = f'/hosts/{compute.uuid}/{instance}', f'/instances/{compute.uuid}/{instance}'
    cluster.etcd.put(request_key, json.dumps(body))
    address = addressed(cluster, instance)
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
    assert (record(cluster, instance) or {})['state'] == 'active'
    assert set(guests(compute)) == {instance, other}
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute)


def test_a_record_at_the_place_of_1_0(cluster: Control, compute: Ecompute) -> None:
    """F34: the record of a running guest moves to this version's key once its compute runs this version (fake)."""
    instance = boot(cluster)
    compute.stop()
    current_key, old_key = f'/instances/{compute.uuid}/{instance}', f'/instances/{instance}'
    value = cluster.etcd.get(current_key)
    assert value is not None
    cluster.etcd.put(old_key, value)
    cluster.etcd.delete(current_key)
    compute.start()
    until(lambda: cluster.etcd.get(old_key) is None, 20, 'nothing lies at the place of 1.0')
    assert cluster.etcd.get(current_key) == value
    assert len(logs(compute, 'INSTANTIATE', instance)) == 1


def test_a_state_directory_of_another_version(cluster: Control, compute: Ecompute) -> None:
    """F34: state of another version in the state directory is kept and logged; ecompute keeps working (fake)."""
    instance = boot(cluster)
    path = compute.directory / 'state' / 'instances' / f'{instance}.json'
    newer = json.dumps({**json.loads(path.read_text()), 'version': 2})
    compute.stop()
    path.write_text(newer)
    compute.start()
    assert logs(compute, str(path), 'version 2')
    assert path.read_text() == newer
    assert addressed(cluster, instance)
    addressed(cluster, place(cluster)[1])


def test_an_address_without_a_record(cluster: Control) -> None:
    """F34: an address in /booted without a record is not an instance: any compute may write there (fake)."""
    instance = str(uuid.uuid4())
    cluster.etcd.put(f'/booted/{instance}', '192.168.122.17')
    one_line(cluster.eschedule(instance), 4, f'{instance}: no such instance')
    cluster.etcd.delete(f'/booted/{instance}')
