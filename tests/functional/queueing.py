"""Queue requests on real etcd and placement, and assert whether they wait or were taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ecomp.agent.instance.instances import ControlPlane
from ecomp.agent.queue import Queues, Taker
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.queue import QueueEntry, WaitingEntry
from ecomp.model.stored import encode
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.enqueue import enqueue
from ecomp.store.client import Store
from tests.functional.cloud import IMAGE, OWNER, SMALL, Cloud, make_uuid
from tests.kit.store_client import read_entry


@pytest.fixture
def flavor(cloud: Cloud) -> Iterator[Flavor]:
    own_flavor = Flavor(f'f{make_uuid()}', SMALL)
    cloud.etcd.put(keys.flavor(own_flavor.name), encode(own_flavor))
    yield own_flavor
    # Also delete flavors whose names begin with this one's.
    for key in (
        *cloud.etcd.list_keys(keys.flavor(own_flavor.name)),
        *cloud.etcd.list_keys(f'{keys.QUEUES}{own_flavor.name}'),
    ):
        cloud.etcd.delete(key)


def make_entry(flavor: Flavor) -> QueueEntry:
    return QueueEntry(make_uuid(), flavor, image=IMAGE, user_id='a-user', project_id='a-project', stages={})


def queue_request(cloud: Cloud, flavor: Flavor) -> WaitingEntry:
    entry = make_entry(flavor)
    revision = read_entry(cloud.store, keys.flavor(flavor.name)).revision
    assert enqueue(cloud.store, entry, revision, None, OWNER, resume=False)
    return WaitingEntry(read_entry(cloud.store, entry.key).revision, entry)


def make_taker(
    cloud: Cloud,
    compute: str,
    store: Store | None = None,
    placement: Placement | None = None,
    now: Callable[[], str] = lambda: 'now',
) -> Taker:
    lease = cloud.store.grant(60)
    control = ControlPlane(compute, store or cloud.store, placement or cloud.placement, now)
    return Taker(control, lambda: lease, Queues(), lambda: True, {}, set)


def assert_taken(cloud: Cloud, compute: str, entry: QueueEntry) -> None:
    instance = entry.instance
    assert cloud.read_request(compute, instance).allocations == {compute: SMALL}
    request_keys = [key for key in cloud.etcd.list_keys(keys.HOSTS) if keys.get_last_part(key) == instance]
    assert request_keys == [keys.request(compute, instance)]
    assert cloud.server.read_allocations(instance) == {compute: SMALL}
    assert [key for key in cloud.etcd.list_keys(keys.QUEUES) if instance in key] == []


def assert_waiting(cloud: Cloud, entry: QueueEntry) -> None:
    assert [key for key in cloud.etcd.list_keys(keys.QUEUES) if entry.instance in key] == [entry.key]
    assert [key for key in cloud.etcd.list_keys(keys.HOSTS) if keys.get_last_part(key) == entry.instance] == []
    assert cloud.server.read_allocations(entry.instance) == {}
    assert cloud.etcd.get(keys.attempt(entry.instance)) is None
