"""The shared keys of an instance: its group, quota and leases, and the user-data of its set."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.host.metadata import GuestData
from ecomp.conf import EtcdConfig
from ecomp.errors import Denied, EcompError, NoSpace, UnknownOutcome, Unreachable, Unreadable
from ecomp.model import keys
from ecomp.model.group import Group, Membership
from ecomp.model.order import Request
from ecomp.model.quota import Quota
from ecomp.model.record import Record
from ecomp.model.states import ACTIVE, GONE
from ecomp.model.stored import decode, encode
from ecomp.model.user_data import SharedUserData
from ecomp.scheduler.operations.sharing import delete_flavor, put_flavor, set_limits
from ecomp.shared.ends import USER_DATA_SECONDS, deliver, keep_user_data, release_shared_keys, write_final_record
from ecomp.shared.names import Change, Excluded, load_group, load_quota, rejoin_group
from ecomp.store.client import Entry, Put, Store, Unchanged
from tests.functional.cloud import IMAGE, SMALL, Cloud, make_uuid

GROUP_KEY = keys.group('web')
QUOTA_KEY = keys.quota('shop')


class UnreachableStore(Store):
    def __init__(self, endpoint: str, key: str) -> None:
        super().__init__(EtcdConfig((endpoint,)))
        self._key = key

    def get(self, key: str) -> Entry | None:
        if key == self._key:
            raise Unreachable('etcd: away')
        return super().get(key)


@pytest.fixture
def member(cloud: Cloud) -> Record:
    """Provide one of two instances in a group and in a project with a quota."""
    instance_record = Record(
        make_uuid(), make_uuid(), ACTIVE, image=IMAGE, resources=SMALL, project_id='shop', group=Membership('web')
    )
    cloud.etcd.put(
        GROUP_KEY,
        encode(
            Group(
                'web', 'affinity', True, {instance_record.instance: instance_record.compute, make_uuid(): make_uuid()}
            )
        ),
    )
    used = {'instances': 2, **{name: 2 * amount for name, amount in SMALL.items()}}
    cloud.etcd.put(QUOTA_KEY, encode(Quota('shop', {'instances': 5}, used)))
    return instance_record


@pytest.mark.parametrize('key', [GROUP_KEY, QUOTA_KEY])
def test_end_fails_while_a_shared_key_is_unreachable(cloud: Cloud, member: Record, key: str) -> None:
    """Check that no end is written that would leave the instance counted for ever."""
    with closing(UnreachableStore(cloud.etcd.endpoint, key)) as store, pytest.raises(Unreachable, match='away'):
        release_shared_keys(store, member)


@pytest.mark.parametrize('key', [GROUP_KEY, QUOTA_KEY])
def test_end_keeps_a_malformed_shared_key(cloud: Cloud, member: Record, key: str) -> None:
    cloud.etcd.put(key, 'rubbish')
    conditions, operations = release_shared_keys(cloud.store, member)
    assert {condition.key for condition in conditions} == {GROUP_KEY, QUOTA_KEY} - {key}
    assert cloud.store.commit(conditions, operations) is not None
    assert cloud.etcd.get(key) == b'rubbish'
    if key == GROUP_KEY:
        assert decode(Quota, cloud.etcd.get(QUOTA_KEY) or b'', project='shop').used == {'instances': 1, **SMALL}
    else:
        assert member.instance not in json.loads(cloud.etcd.get(GROUP_KEY) or b'')['members']


def test_error_of_a_malformed_key_names_the_key_and_the_fix(cloud: Cloud) -> None:
    for key, read in (
        (GROUP_KEY, lambda: load_group(cloud.store, 'web')),
        (QUOTA_KEY, lambda: load_quota(cloud.store, 'shop')),
    ):
        cloud.etcd.put(key, '{"version": 99}')
        with pytest.raises(Unreadable, match=f'^{key}: .*. Fix: if no newer ecomp wrote it, `etcdctl del {key}`$'):
            read()


def test_live_instance_rejoins_a_deleted_group(cloud: Cloud, member: Record) -> None:
    membership = Membership('web', 'affinity', True)
    assert rejoin_group(cloud.store, membership, member.instance, member.compute) == ([], [])
    cloud.etcd.delete(GROUP_KEY)
    conditions, operations = rejoin_group(cloud.store, membership, member.instance, member.compute)
    assert cloud.store.commit(conditions, operations) is not None
    web, _ = load_group(cloud.store, 'web')
    assert web == Group('web', 'affinity', True, {member.instance: member.compute})


def list_leases(cloud: Cloud) -> set[str]:
    return {lease['ID'] for lease in cloud.etcd.call('lease/leases', {}).get('leases', [])}


LEASES_BY_ERROR = [(Denied, 0), (EcompError, 0), (Unreachable, 0), (UnknownOutcome, 1), (NoSpace, 1)]


@pytest.mark.parametrize(('error', 'left'), LEASES_BY_ERROR)
def test_failed_end_leaves_no_lease(
    cloud: Cloud, member: Record, monkeypatch: pytest.MonkeyPatch, error: type[EcompError], left: int
) -> None:
    """Check that a lease is kept only if the end may have been written with its record on it."""

    def fail(*_: object) -> int:
        raise error('etcd says no')

    before = list_leases(cloud)
    with closing(Store(EtcdConfig((cloud.etcd.endpoint,)))) as store:
        monkeypatch.setattr(store, 'commit', fail)
        for _ in range(3):
            with pytest.raises(error):
                write_final_record(store, replace(member, state=GONE), [], [keys.address(member.instance)])
    assert len(list_leases(cloud) - before) == 3 * left


def test_refused_delivery_leaves_no_user_data_lease(cloud: Cloud) -> None:
    request = Request(make_uuid(), {}, image=IMAGE)
    data = SharedUserData.from_bytes(request.instance.encode())

    def refuse() -> Change:
        raise Excluded(())

    before = list_leases(cloud)
    attempt = Unchanged(keys.attempt(make_uuid()), 7)
    assert not deliver(cloud.store, [(make_uuid(), request)], attempt, data, lambda: ([], []))
    with pytest.raises(Excluded):
        deliver(cloud.store, [(make_uuid(), request)], attempt, data, refuse)
    assert list_leases(cloud) <= before


@pytest.mark.parametrize('is_same', [True, False])
def test_flavor_that_is_set_twice_concurrently_must_be_the_same(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    name, commit = f'flavor{make_uuid()}', cloud.store.commit

    def commit_second(*change: Any) -> int | None:
        monkeypatch.setattr(cloud.store, 'commit', commit)
        put_flavor(cloud.store, cloud.placement, name, 'resources=VCPU:1' if is_same else 'resources=VCPU:2')
        return commit(*change)

    monkeypatch.setattr(cloud.store, 'commit', commit_second)
    if is_same:  # the values differ in the times at which they were written
        assert put_flavor(cloud.store, cloud.placement, name, 'resources=VCPU:1').startswith(f'flavor {name}: created')
    else:
        with pytest.raises(EcompError, match='another process changed it'):
            put_flavor(cloud.store, cloud.placement, name, 'resources=VCPU:1')
    assert delete_flavor(cloud.store, name).startswith(f'flavor {name}: removed')


def test_setting_a_limit_keeps_the_other_limits(cloud: Cloud) -> None:
    project = f'p{make_uuid()}'
    set_limits(cloud.store, project, ['VCPU=3', 'instances=5'])
    assert set_limits(cloud.store, project, ['VCPU=4']).endswith(': VCPU 0/4, instances 0/5')
    assert set_limits(cloud.store, project, ['VCPU=none']).endswith(': instances 0/5')


# How long the user-data of sets stays in etcd: refreshed, and put again by a compute that has it.


MAC = '52:54:00:00:00:01'


@pytest.fixture
def content() -> bytes:
    return f'#!/bin/sh\necho {make_uuid()}\n'.encode()


def read_user_data(cloud: Cloud, content: bytes) -> Entry | None:
    return cloud.store.get(keys.user_data(SharedUserData.from_bytes(content).sha256))


def keep(cloud: Cloud, content: bytes, *contents: bytes) -> None:
    keep_user_data(cloud.store, SharedUserData.from_bytes(content).sha256, contents)


def put(cloud: Cloud, content: bytes, seconds: int) -> int:
    shared, lease = SharedUserData.from_bytes(content), cloud.store.grant(seconds)
    cloud.store.commit([], [Put(keys.user_data(shared.sha256), shared.text, lease)])
    return lease


def test_missing_user_data_is_put_again(cloud: Cloud, content: bytes) -> None:
    keep(cloud, content, b'another', content)
    entry = read_user_data(cloud, content)
    assert entry is not None
    assert entry.value.decode() == SharedUserData.from_bytes(content).text
    assert USER_DATA_SECONDS - 60 < cloud.store.keep_alive(entry.lease) <= USER_DATA_SECONDS


def test_only_the_content_with_its_hash_is_put(cloud: Cloud, content: bytes) -> None:
    leases = list_leases(cloud)
    keep(cloud, content, b'another')
    keep(cloud, content)
    assert read_user_data(cloud, content) is None
    assert list_leases(cloud) == leases


def test_lease_of_present_user_data_is_refreshed_and_nothing_is_written(cloud: Cloud, content: bytes) -> None:
    put(cloud, content, USER_DATA_SECONDS)
    before, leases = read_user_data(cloud, content), list_leases(cloud)
    keep(cloud, content, content)
    assert read_user_data(cloud, content) == before
    assert list_leases(cloud) == leases


def test_user_data_on_a_lease_of_a_week_is_moved_to_a_longer_one(cloud: Cloud, content: bytes) -> None:
    """Any compute may write it so, and one without the user-data refreshes the week."""
    week = put(cloud, content, 7 * 24 * 3600)
    keep(cloud, content)
    entry = read_user_data(cloud, content)
    assert entry is not None
    assert entry.lease == week
    keep(cloud, content, content)
    entry = read_user_data(cloud, content)
    assert entry is not None
    assert entry.lease != week
    assert cloud.store.keep_alive(entry.lease) > USER_DATA_SECONDS - 60


def test_user_data_that_another_compute_put_first_stays(cloud: Cloud, content: bytes) -> None:
    def put_concurrently() -> bytes:
        put(cloud, content, USER_DATA_SECONDS)
        return content

    leases = list_leases(cloud)
    keep_user_data(cloud.store, SharedUserData.from_bytes(content).sha256, (put_concurrently() for _ in range(1)))
    entry = read_user_data(cloud, content)
    assert entry is not None
    assert {int(lease) for lease in list_leases(cloud) - leases} == {entry.lease}, 'our lease is revoked'


@pytest.mark.parametrize('user_data', [b'#!/bin/sh\n', b'\x1f\x8b\x08\xff\xfe'])
def test_compute_finds_what_it_gave_to_a_guest(tmp_path: Path, user_data: bytes) -> None:
    data = GuestData(tmp_path)
    assert data.read_user_data(MAC) is None
    data.write(Request(make_uuid(), {}, user_data=user_data), [MAC])
    assert data.read_user_data(MAC) == user_data
    data.write(Request(make_uuid(), {}), [MAC])
    assert data.read_user_data(MAC) is None, 'its guest has that of mdserver.conf'
    (tmp_path / f'{MAC}.json').write_text(json.dumps([1]))
    assert data.read_user_data(MAC) is None
