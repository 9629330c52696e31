"""Queue requests on real etcd and placement, and assert whether they wait or were taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ecomp.agent.instance.instances import ControlPlane
from ecomp.agent.queue import Taker
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.flavor import to_json as flavor_to_json
from ecomp.model.queue import Place, QueueEntry
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.enqueue import enqueue
from ecomp.store.client import Store
from tests.functional.cloud import IMAGE, SMALL, WHO, Cloud, new
from tests.kit.store_client import read_entry


@pytest.fixture
def flavor(cloud: Cloud) -> Iterator[Flavor]:
    """A flavor of the test's own, and its queue."""
    own_flavor = Flavor(f'f{new()}', SMALL)
    cloud.etcd.put(keys.flavor(own_flavor.name), flavor_to_json(own_flavor))
    yield own_flavor
    # Also delete flavors whose names begin with this one's.
    for key in (*cloud.etcd.keys(keys.flavor(own_flavor.name)), *cloud.etcd.keys(f'{keys.QUEUES}{own_flavor.name}')):
        cloud.etcd.delete(key)


def request(flavor: Flavor, instance: str | None = None, name: str | None = None) -> QueueEntry:
    return QueueEntry(
        instance or new(),
        flavor,
        image=IMAGE,
        user_id='a-user',
        project_id='a-project',
        stages={'requested': 'then'},
        name=name,
    )


def put(cloud: Cloud, waiting: QueueEntry, resume: bool = False, store: Store | None = None) -> bool:
    entry = read_entry(cloud.store, keys.flavor(waiting.flavor.name))
    return enqueue(store or cloud.store, waiting, entry.revision, None, WHO, resume)


def queued(cloud: Cloud, flavor: Flavor) -> Place:
    """Put a request in the queue and return its place."""
    entry = request(flavor)
    assert put(cloud, entry)
    return place(cloud, entry)


def place(cloud: Cloud, waiting: QueueEntry) -> Place:
    return Place(read_entry(cloud.store, waiting.key).revision, waiting)


def taker(
    cloud: Cloud,
    compute: str,
    store: Store | None = None,
    placement: Placement | None = None,
    now: Callable[[], str] = lambda: 'now',
) -> Taker:
    """Return a Taker of the compute, with a new lease."""
    lease = cloud.store.grant(60)
    return Taker(ControlPlane(compute, store or cloud.store, placement or cloud.placement, now), lambda: lease)


def is_taken(cloud: Cloud, compute: str, waiting: QueueEntry) -> None:
    """Assert that only this compute has the instance, with one claim and no queue entry."""
    instance = waiting.instance
    assert cloud.delivered(compute, instance).allocations == {compute: SMALL}
    request_keys = [key for key in cloud.etcd.keys(keys.HOSTS) if keys.last(key) == instance]
    assert request_keys == [keys.request(compute, instance)]
    assert cloud.server.allocations(instance) == {compute: SMALL}
    assert [key for key in cloud.etcd.keys(keys.QUEUES) if instance in key] == []


def waits(cloud: Cloud, waiting: QueueEntry) -> None:
    """Assert that the entry is queued, with no request, claim or attempt."""
    assert [key for key in cloud.etcd.keys(keys.QUEUES) if waiting.instance in key] == [waiting.key]
    assert [key for key in cloud.etcd.keys(keys.HOSTS) if keys.last(key) == waiting.instance] == []
    assert cloud.server.allocations(waiting.instance) == {}
    assert cloud.etcd.get(keys.attempt(waiting.instance)) is None
