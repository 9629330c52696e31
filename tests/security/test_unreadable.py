"""A record that nobody can read: its instance is shown as such, hinders no other, and can be destroyed all the same."""

from __future__ import annotations

import json
import socket
import uuid
from typing import Any

import pytest

from ecomp.model.order import SIZE_LIMIT, Invalid, parse_request
from tests.kit.by_hand import claim, request
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import guests
from tests.kit.invariants import check
from tests.kit.servers import until
from tests.kit.story import IMAGE, SMALL, addressed, called, logged, logs, one_line, place, reached, record

DEEP = '[' * 100_000
INFINITE = '{"version": 1, "why": {"weigh": "spread", "weight": Infinity, "of": 3}}'
DAMAGED = ['', 'null', DEEP, INFINITE, '{"version": "new"}']
GROUP = ['--group', 'web', '--policy', 'anti-affinity', '--soft']


@pytest.fixture
def compute(cluster: Control) -> Ecompute:
    return cluster.ecompute('VCPU:16,DISK_GB:100,MEMORY_MB:8192')


def put(cluster: Control, compute: Ecompute, instance: str, value: str) -> None:
    cluster.etcd.put(f'/instances/{compute.uuid}/{instance}', value)


def test_a_weight_that_is_no_number_ends_in_error(cluster: Control, compute: Ecompute) -> None:
    """As it was done (ENEMY 6): built, it could be neither shown nor destroyed, and ran for ever."""
    instance = str(uuid.uuid4())
    claim(cluster, instance, compute.uuid)
    why = {'weigh': 'spread', 'weight': 'HERE', 'of': 3}
    value = json.dumps({**request(compute.uuid, instance), 'why': why}).replace('"HERE"', '1e999')
    cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', value)
    found = reached(cluster, instance, 'error')
    assert '1e999 is too large a number' in found['error']['reason']
    for words in (['show'], ['why'], ['show', '-f', 'json'], ['timeline']):
        assert called(cluster, *words, instance).code == 0
    assert called(cluster, 'list').code == 0
    assert called(cluster, 'destroy', '--wait', instance).code == 0
    assert guests(compute) == {}
    check(cluster, compute)


def test_a_destroy_goes_by_the_request(cluster: Control, compute: Ecompute) -> None:
    """Whatever the record says: the request's key names the compute and the instance."""
    damaged = {}
    for number, value in enumerate(DAMAGED):
        _, instance = place(cluster, SMALL, '--name', f'n{number}', *GROUP)
        addressed(cluster, instance)
        damaged[instance] = value
    _, good = place(cluster)
    addressed(cluster, good)
    compute.stop()
    for instance, value in damaged.items():
        put(cluster, compute, instance, value)
    compute.start()
    for instance in damaged:
        logs(compute, f'/instances/{compute.uuid}/{instance}', 'trying again')
        one_line(called(cluster, 'show', instance), 1, f'/instances/{compute.uuid}/{instance}')
    # What is wrong with each in one line, and the others.
    both = called(cluster, 'show', *damaged, good)
    assert (both.code, len(both.stderr.splitlines())) == (1, len(damaged))
    assert good in both.stdout
    listed = called(cluster, 'list')
    assert (listed.code, len(listed.stderr.splitlines()), len(listed.stdout.splitlines())) == (1, len(damaged), 2)
    assert set(guests(compute)) == {*damaged, good}
    for number, instance in enumerate(damaged):
        # By its uuid or, for that stands in etcd on its own, by its name.
        done = called(cluster, 'destroy', '--wait', *(('--timeout', '60', instance) if number else (f'n{number}',)))
        assert done.code == 0, done
        word = instance if number else f'n{number}'
        assert done.stderr.splitlines() == [
            f'eschedule: {word}: destroy accepted, {socket.gethostname()} carries it out', f'eschedule: {word}: gone'
        ]
        assert (record(cluster, instance) or {})['state'] == 'gone'
        assert called(cluster, 'destroy', instance).code == 4
    assert set(guests(compute)) == {good}
    assert cluster.etcd.keys('/names/') == cluster.etcd.keys('/groups/') == []
    check(cluster, compute)


def test_it_is_asked_for_once(cluster: Control, compute: Ecompute) -> None:
    _, instance = place(cluster)
    addressed(cluster, instance)
    compute.stop()
    put(cluster, compute, instance, 'null')
    assert 'destroy accepted' in called(cluster, 'destroy', instance).stderr
    before = cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}')
    assert 'is being destroyed' in called(cluster, 'destroy', instance).stderr
    assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') == before
    compute.start()
    until(lambda: cluster.etcd.record(instance) != b'null', 20, 'it is carried out')
    reached(cluster, instance, 'gone')
    assert len(logged(compute, f'/instances/{compute.uuid}/{instance}')) == 1
    check(cluster, compute)


def test_without_a_request_there_is_nothing_to_go_by(cluster: Control, compute: Ecompute) -> None:
    instance = str(uuid.uuid4())
    put(cluster, compute, instance, 'null')
    for words in (['destroy', instance], ['destroy', '--wait', instance], ['show', instance], [instance]):
        one_line(called(cluster, *words), 1, f'etcdctl del /instances/{compute.uuid}/{instance}')
    cluster.etcd.delete(cluster.etcd.record_key(instance))
    check(cluster, compute)


@pytest.mark.parametrize('whose', ['ours', 'theirs'])
def test_what_a_newer_ecomp_wrote_is_not_overwritten(cluster: Control, compute: Ecompute, whose: str) -> None:
    instance, other = str(uuid.uuid4()), str(uuid.uuid4())
    newer = json.dumps({'version': 2, 'compute': compute.uuid if whose == 'ours' else other, 'instance': instance})
    put(cluster, compute, instance, newer)
    tombstone = {'allocations': {}, 'instance': instance, 'image': None, 'user_id': 'u', 'project_id': 'p'}
    cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(tombstone))
    logs(compute, f'/instances/{compute.uuid}/{instance}', 'version 2', 'trying again')
    _, good = place(cluster)
    addressed(cluster, good)
    assert cluster.etcd.record(instance) == newer.encode()
    assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') is not None
    for key in (f'/hosts/{compute.uuid}/{instance}', f'/instances/{compute.uuid}/{instance}'):
        cluster.etcd.delete(key)
    check(cluster, compute)


def test_a_destroy_of_what_is_written_three_times_as_long_is_understood(cluster: Control, compute: Ecompute) -> None:
    """Its query is that of a foreign client, in UTF-8: with it the tombstone would be refused for its size."""
    instance = str(uuid.uuid4())
    claim(cluster, instance, compute.uuid)
    value: dict[str, Any] = {**request(compute.uuid, instance), 'image': IMAGE, 'query': 'é' * 150_000}
    cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(value, ensure_ascii=False))
    addressed(cluster, instance)
    compute.stop()
    assert called(cluster, 'destroy', instance).code == 0
    key = f'/hosts/{compute.uuid}/{instance}'
    tombstone = cluster.etcd.get(key) or b''
    assert len(tombstone) < SIZE_LIMIT
    assert not isinstance(parse_request(compute.uuid, key, tombstone), Invalid)
    compute.start()
    until(lambda: guests(compute) == {}, 20, 'it is gone')
    reached(cluster, instance, 'gone')
    check(cluster, compute)
