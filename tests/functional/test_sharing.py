"""Test the shared keys of an instance when it ends: its group, its quota and its leases."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import Denied, EcompError, NoSpace, UnknownOutcome, Unreachable, Unreadable
from ecomp.model import keys
from ecomp.model.group import Group, Membership
from ecomp.model.group import to_json as group_to_json
from ecomp.model.guest import SharedUserData
from ecomp.model.order import Request
from ecomp.model.quota import Quota
from ecomp.model.quota import from_json as quota_from_json
from ecomp.model.quota import to_json as quota_to_json
from ecomp.model.record import ACTIVE, GONE, Record
from ecomp.scheduler.placing.claim import deliver
from ecomp.store.client import Entry, Store
from ecomp.store.sharing import Change, Excluded, ended, group, quota, rejoined, write_end
from tests.functional.cloud import IMAGE, SMALL, Cloud, new

GROUP = keys.group('web')
QUOTA = keys.quota('shop')


class Away(Store):
    """A store whose etcd is unreachable whenever it reads one key."""

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
        new(), new(), ACTIVE, image=IMAGE, resources=SMALL, project_id='shop', group=Membership('web')
    )
    cloud.etcd.put(
        GROUP,
        group_to_json(
            Group('web', 'affinity', True, {instance_record.instance: instance_record.compute, new(): new()})
        ),
    )
    used = {'instances': 2, **{name: 2 * amount for name, amount in SMALL.items()}}
    cloud.etcd.put(QUOTA, quota_to_json(Quota('shop', {'instances': 5}, used)))
    return instance_record


def test_what_ends_leaves_its_group_and_its_quota(cloud: Cloud, member: Record) -> None:
    conditions, operations = ended(cloud.store, member)
    assert {condition.key for condition in conditions} == {GROUP, QUOTA}
    assert cloud.store.commit(conditions, operations) is not None
    web, _ = group(cloud.store, 'web')
    assert web is not None
    assert len(web.members) == 1
    assert member.instance not in web.members
    shop, _ = quota(cloud.store, 'shop')
    assert shop is not None
    assert shop.used == {'instances': 1, **SMALL}


@pytest.mark.parametrize('key', [GROUP, QUOTA])
def test_nothing_ends_while_what_it_shares_cannot_be_asked_for(cloud: Cloud, member: Record, key: str) -> None:
    """Check that no end is written that would leave the instance counted for ever."""
    with closing(Away(cloud.etcd.endpoint, key)) as store, pytest.raises(Unreachable, match='away'):
        ended(store, member)


@pytest.mark.parametrize('key', [GROUP, QUOTA])
def test_what_ends_leaves_alone_what_cannot_be_read(cloud: Cloud, member: Record, key: str) -> None:
    cloud.etcd.put(key, 'rubbish')
    conditions, operations = ended(cloud.store, member)
    assert {condition.key for condition in conditions} == {GROUP, QUOTA} - {key}
    assert cloud.store.commit(conditions, operations) is not None
    assert cloud.etcd.get(key) == b'rubbish'
    if key == GROUP:
        assert quota_from_json('shop', cloud.etcd.get(QUOTA) or b'').used == {'instances': 1, **SMALL}
    else:
        assert member.instance not in json.loads(cloud.etcd.get(GROUP) or b'')['members']


def test_who_asks_for_what_cannot_be_read_is_told_the_key_and_the_cure(cloud: Cloud) -> None:
    for key, read in ((GROUP, lambda: group(cloud.store, 'web')), (QUOTA, lambda: quota(cloud.store, 'shop'))):
        cloud.etcd.put(key, '{"version": 99}')
        with pytest.raises(Unreadable, match=f'^{key}: .*; unless a newer ecomp wrote it: etcdctl del {key}$'):
            read()


def test_the_living_are_members_whatever_the_group_says_by_now(cloud: Cloud, member: Record) -> None:
    membership = Membership('web', 'affinity', True)
    assert rejoined(cloud.store, membership, member.instance, member.compute) == ([], [])
    cloud.etcd.delete(GROUP)
    conditions, operations = rejoined(cloud.store, membership, member.instance, member.compute)
    assert cloud.store.commit(conditions, operations) is not None
    web, _ = group(cloud.store, 'web')
    assert web == Group('web', 'affinity', True, {member.instance: member.compute})


def leases(cloud: Cloud) -> set[str]:
    return {lease['ID'] for lease in cloud.etcd.call('lease/leases', {}).get('leases', [])}


LEFT = [(Denied, 0), (EcompError, 0), (Unreachable, 0), (UnknownOutcome, 1), (NoSpace, 1)]


@pytest.mark.parametrize(('error', 'left'), LEFT)
def test_an_end_that_is_not_written_leaves_no_lease(
    cloud: Cloud, member: Record, monkeypatch: pytest.MonkeyPatch, error: type[EcompError], left: int
) -> None:
    """Check that a lease is kept only if the end may have been written with its record on it."""

    def fail(*_: object) -> int:
        raise error('etcd says no')

    before = leases(cloud)
    with closing(Store(EtcdConfig((cloud.etcd.endpoint,)))) as store:
        monkeypatch.setattr(store, 'commit', fail)
        for _ in range(3):
            with pytest.raises(error):
                write_end(store, replace(member, state=GONE), [], [])
    assert len(leases(cloud) - before) == 3 * left


def test_a_delivery_that_is_refused_leaves_no_lease_of_its_user_data(cloud: Cloud) -> None:
    request = Request(new(), {}, image=IMAGE)
    data = SharedUserData.of(request.instance.encode())

    def refuse() -> Change:
        raise Excluded(())

    before = leases(cloud)
    assert not deliver(cloud.store, [(new(), request)], new(), 7, data, lambda: ([], []))
    with pytest.raises(Excluded):
        deliver(cloud.store, [(new(), request)], new(), 7, data, refuse)
    assert leases(cloud) <= before
