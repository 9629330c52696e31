"""F34: what was written by the version before is read; what the version after has written is refused and kept."""

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
    """What the 2019 eschedule wrote: its claim's body, and two fields. Without an image: its destroy."""
    return {
        'allocations': {compute: {'resources': ROOM}} if image else {},
        'user_id': '3f0a7b59-6b93-4ca7-8d47-4ac21e5e8d1c',
        'project_id': 'b1e5ae4a-9f6f-4c0c-9f92-bb3b5d8e9a11',
        'consumer_generation': None,
        'instance': instance,
        'image': image,
    }


def test_requests_of_2019(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F34: a request and a destroy as the 2019 eschedule wrote them are carried out (fake)"""
    key = f'/hosts/{compute.uuid}/{instance}'
    claim(cluster, instance, compute.uuid)
    cluster.etcd.put(key, json.dumps(of_2019(compute.uuid, instance)))
    address = addressed(cluster, instance)  # at /booted, as plain text, where 2019's looked for it
    assert cluster.eschedule(instance).stdout == f'{address}\n'
    check(cluster, compute)
    cluster.etcd.put(key, json.dumps(of_2019(compute.uuid, instance, None)))
    until(lambda: cluster.etcd.get(key) is None, 20, 'it is destroyed')
    assert cluster.etcd.get(f'/booted/{instance}') is None


def test_a_request_of_the_next_version(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F34: a request of a newer version ends in error that names both versions; nothing of it is made (fake)"""
    claim(cluster, instance, compute.uuid)
    body = {**of_2019(compute.uuid, instance), 'version': 2, 'volumes': [{'size': 1}]}
    cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(body))
    error = reached(cluster, instance, 'error')['error']
    assert 'version 2 of the request is not known here: this ecompute takes 1' in error['reason']
    assert logged(compute, 'INSTANTIATE', instance) == []


def test_what_a_request_of_the_next_version_shared(cluster: Control, compute: Ecompute) -> None:
    """F34: a request of a newer version that is refused leaves its group and its quota, and its name is free (fake)"""
    assert cluster.eschedule('quota', 'set', 'q', 'instances=1').code == 0
    words = (SMALL, '--name', 'web', '--group', 'g', *APART, '--project', 'q')
    compute.pause()  # it is not to take it before it is rewritten
    _, instance = place(cluster, *words)
    key = f'/hosts/{compute.uuid}/{instance}'
    cluster.etcd.put(key, json.dumps({**json.loads(cluster.etcd.get(key) or b''), 'version': 2}))
    compute.resume()
    found = reached(cluster, instance, 'error')
    assert (found['name'], found['project_id']) == ('web', 'q')
    assert (members(cluster, 'g'), used(cluster, 'q')) == ({}, {})
    _, again = place(cluster, *words)
    reached(cluster, again, 'active')


def test_a_running_guest_s_request_of_the_next_version(cluster: Control, compute: Ecompute) -> None:
    """F34: the request of a running guest rewritten by a newer eschedule: it stays, and a fault says why (fake)"""
    instance = boot(cluster)
    key = f'/hosts/{compute.uuid}/{instance}'
    ours = cluster.etcd.get(key)
    assert ours is not None
    newer = json.dumps({**json.loads(ours), 'version': 2, 'power': 'off'})
    cluster.etcd.put(key, newer)
    until(lambda: (record(cluster, instance) or {})['fault'], 20, 'a fault says so')
    found = record(cluster, instance) or {}
    assert 'version 2' in found['fault']
    assert (found['state'], set(guests(compute))) == ('active', {instance})
    assert cluster.etcd.get(key) == newer.encode()
    # A destroy by this version's eschedule is understood, and carried out.
    assert cluster.eschedule('destroy', '--wait', instance).code == 0


@pytest.mark.parametrize('version', [2, 99])
def test_a_record_of_the_next_version(cluster: Control, version: int) -> None:
    """F34: a record of a newer version is refused by name, shown as that by eschedule, and left as it is (fake)"""
    compute = tuned(cluster, numbers={'EVERY': 0.3})
    instance = boot(cluster)
    key = f'/instances/{compute.uuid}/{instance}'
    ours = cluster.etcd.get(key)
    assert ours is not None
    newer = json.dumps({**json.loads(ours), 'version': version, 'state': 'migrating', 'volumes': []})
    compute.stop()
    cluster.etcd.put(key, newer)
    compute.start()
    until(lambda: logged(compute, key, f'version {version}', 'install a newer one'), 20, 'it is refused')
    assert logged(compute, ' ERROR ', instance) == []
    one_line(cluster.eschedule('show', instance), 1, key, f'version {version}', 'install a newer one')
    one_line(cluster.eschedule('destroy', instance), 1, key, f'version {version}')
    one_line(cluster.eschedule('list'), 1, key, f'version {version}')
    _, other = place(cluster)  # nobody else is hindered
    addressed(cluster, other)
    assert len(logs(compute, key, 'trying again')) == 1
    assert cluster.etcd.get(key) == newer.encode()
    assert set(guests(compute)) == {instance, other}
    assert guests(compute)[instance]['running']
    # The newer ecompute is back, and has written what this version reads.
    cluster.etcd.put(key, ours)
    until(lambda: cluster.eschedule('show', instance).code == 0, 20, 'it is read again')
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute)


def test_fields_nobody_knows(cluster: Control) -> None:
    """F34: a neighbour of the same version with fields more: all is read, the fields are passed over (fake)"""
    compute = tuned(cluster, numbers={'EVERY': 0.3})
    instance = str(uuid.uuid4())
    claim(cluster, instance, compute.uuid)
    body = {**of_2019(compute.uuid, instance), 'version': 1, 'volume': 'v', 'zone': {'policy': 'spread'}}
    request_key, record_key = f'/hosts/{compute.uuid}/{instance}', f'/instances/{compute.uuid}/{instance}'
    cluster.etcd.put(request_key, json.dumps(body))
    address = addressed(cluster, instance)
    assert cluster.etcd.get(request_key) == json.dumps(body).encode()  # eschedule's own, which nobody rewrites
    ours = json.loads(cluster.etcd.get(record_key) or b'')
    more = {**ours, 'ready': True, 'addresses': [{**each, 'family': 4} for each in ours['addresses']]}
    assert from_json(json.dumps(more).encode()) == from_json(json.dumps(ours).encode())
    cluster.etcd.put(record_key, json.dumps(more))
    for words in (['show', instance], ['list'], [instance]):
        assert cluster.eschedule(*words).code == 0
    assert cluster.eschedule(instance).stdout == f'{address}\n'
    # ecompute takes it for its own again: it is neither in its way, nor destroyed for it.
    other = boot(cluster)
    assert (record(cluster, instance) or {})['state'] == 'active'
    assert set(guests(compute)) == {instance, other}
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute)


def test_a_record_at_the_place_of_1_0(cluster: Control, compute: Ecompute) -> None:
    """F34: the record of a guest that runs on lies where this version has it once its compute is of this one (fake)"""
    instance = boot(cluster)
    compute.stop()
    own, older = f'/instances/{compute.uuid}/{instance}', f'/instances/{instance}'
    value = cluster.etcd.get(own)
    assert value is not None
    cluster.etcd.put(older, value)
    cluster.etcd.delete(own)
    compute.start()
    until(lambda: cluster.etcd.get(older) is None, 20, 'nothing lies at the place of 1.0')
    assert cluster.etcd.get(own) == value
    assert len(logs(compute, 'INSTANTIATE', instance)) == 1


def test_a_state_directory_of_another_version(cluster: Control, compute: Ecompute) -> None:
    """F34: what another version remembers in the state directory is left alone and named; ecompute works on (fake)"""
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
    """F34: 2019 wrote no records: an address at /booted alone, where every compute may write, is no instance (fake)"""
    instance = str(uuid.uuid4())
    cluster.etcd.put(f'/booted/{instance}', '192.168.122.17')
    one_line(cluster.eschedule(instance), 4, f'{instance}: no such instance')
    cluster.etcd.delete(f'/booted/{instance}')
