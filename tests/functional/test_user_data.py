"""How long the user-data of sets stays in etcd: refreshed, and put again by a compute that has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ecomp.agent.host.metadata import GuestData
from ecomp.model import keys
from ecomp.model.guest import SharedUserData
from ecomp.model.order import Request
from ecomp.store.client import Entry, Put
from ecomp.store.sharing import USER_DATA_SECONDS, keep_user_data
from tests.functional.cloud import Cloud, make_uuid

MAC = '52:54:00:00:00:01'


@pytest.fixture
def content() -> bytes:
    return f'#!/bin/sh\necho {make_uuid()}\n'.encode()


def read_user_data(cloud: Cloud, content: bytes) -> Entry | None:
    return cloud.store.get(keys.user_data(SharedUserData.from_bytes(content).sha256))


def list_leases(cloud: Cloud) -> set[str]:
    return {lease['ID'] for lease in cloud.etcd.call('lease/leases', {}).get('leases', ())}


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
    """As ecomp 1.1 put it; a compute that does not have it keeps the week refreshed."""
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
