"""No command leaves a lease in etcd without a key: thousands of them would fill its memory for a day or a week."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from ecomp.model.order import Request, to_json
from tests.kit.commands import Control
from tests.kit.hands import settled
from tests.kit.invariants import everything
from tests.kit.servers import until
from tests.kit.story import IMAGE, SMALL, addressed, called, place, reached
from tests.scenario.queued import queue

WAIT_SECONDS = 10.0
"""Shorter, times the kit's patience, than the shortest lease of a command: 60 s of an attempt."""


def leases_without_a_key(control: Control) -> set[str]:
    """The leases that etcd holds and that no key is attached to."""
    found = set()
    for lease in control.etcd.call('lease/leases', {}).get('leases', []):
        told = control.etcd.call('lease/timetolive', {'ID': lease['ID'], 'keys': True})
        if int(told.get('TTL', 0)) > 0 and not told.get('keys'):
            found.add(lease['ID'])
    return found


@contextlib.contextmanager
def no_lease_left(control: Control) -> Iterator[None]:
    """What runs in this block leaves no more leases without a key than there were."""
    before = leases_without_a_key(control)
    yield
    until(lambda: leases_without_a_key(control) <= before, WAIT_SECONDS, 'no lease without a key is left')


def fail(control: Control, compute: str, name: str = 'failed') -> str:
    """An instance in error, which holds its name on its record's lease."""
    instance = str(uuid.uuid4())
    control.etcd.put(f'/hosts/{compute}/{instance}', json.dumps({'name': name}))
    reached(control, instance, 'error')
    return instance


@pytest.fixture
def user_data(tmp_path: Path) -> str:
    path = tmp_path / 'user-data'
    path.write_text('#!/bin/sh\n')
    return str(path)


def test_a_create_leaves_no_lease_without_a_key(small: Control, user_data: str) -> None:
    compute, instance = small.ecompute(), str(uuid.uuid4())
    with no_lease_left(small):
        for _ in range(2):
            assert called(small, '--uuid', instance, SMALL).code == 0
        assert called(small, '--count', '2', '--user-data', user_data, SMALL).code == 0
        assert called(small, '--count', '2', '--user-data', user_data, SMALL).code == 3
    settled(small, compute)


@pytest.mark.parametrize('words', [('--flavor', 'small', '--queue', IMAGE), ('--count', '2', SMALL, IMAGE)])
def test_the_same_user_data_stays_on_one_lease(small: Control, user_data: str, words: tuple[str, ...]) -> None:
    small.ecompute('VCPU:8,DISK_GB:10,MEMORY_MB:1024')
    with no_lease_left(small):
        for _ in range(3):
            assert called(small, '--user-data', user_data, *words).code == 0
    assert len(small.etcd.keys('/user-data/')) == 1


def test_user_data_on_a_short_lease_gets_one_of_its_own(small: Control, user_data: str) -> None:
    key = f'/user-data/{sha256(Path(user_data).read_bytes()).hexdigest()}'
    small.etcd.put(key, 'somebody else wrote this', small.etcd.grant(60))
    small.ecompute()
    assert called(small, '--count', '2', '--user-data', user_data, SMALL).code == 0
    told = small.etcd.call('lease/timetolive', {'ID': everything(small)[key].lease})
    assert int(told['TTL']) > 3600


def test_clear_ends_the_leases_of_what_it_removes(small: Control) -> None:
    compute = small.ecompute()
    with no_lease_left(small):
        instances = [place(small, SMALL)[1] for _ in range(2)]
        for each in instances:
            addressed(small, each)
        assert called(small, 'destroy', '--wait', *instances).code == 0
        fail(small, compute.uuid)
        compute.stop()
        assert called(small, 'destroy', queue(small)).code == 0
        assert called(small, 'clear').code == 0
    assert small.etcd.keys('/instances/') == []


def test_a_destroy_of_what_failed_ends_its_lease(small: Control) -> None:
    compute = small.ecompute()
    with no_lease_left(small):
        assert called(small, 'destroy', fail(small, compute.uuid)).code == 0
        # By the tombstone that another client writes: the record says gone, on a lease of its own.
        instance = fail(small, compute.uuid)
        small.etcd.put(f'/hosts/{compute.uuid}/{instance}', to_json(Request(instance, {}, user_id='u', project_id='p')))
        reached(small, instance, 'gone')


def test_an_audit_leaves_no_lease_without_a_key(small: Control) -> None:
    compute = small.ecompute()
    with no_lease_left(small):
        settled(small, compute)


def test_a_host_that_is_forgotten_leaves_no_lease_without_a_key(small: Control) -> None:
    compute = small.ecompute()
    with no_lease_left(small):
        instance = place(small, SMALL)[1]
        addressed(small, instance)
        failed = fail(small, compute.uuid)
        compute.kill()
        small.etcd.call('lease/revoke', {'ID': everything(small)[f'/computes/{compute.uuid}'].lease})
        for each in (instance, failed):
            assert called(small, 'destroy', each).code == 0
        assert called(small, 'host', 'forget', '--fenced', compute.uuid).code == 0
