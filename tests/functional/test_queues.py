"""Test how requests enter queues and how computes take them, on real etcd and placement."""

from __future__ import annotations

import pytest

from ecomp.agent.host.claims import CONFIRMATION_SECONDS, ClaimKeeper
from ecomp.errors import Conflict, NoCapacity
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.queue import QueueTaker
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import abandon
from ecomp.scheduler.placing.enqueue import enqueue
from ecomp.shared.attempts import read_pending_instances
from ecomp.store.client import Put, Store, Unchanged
from tests.functional.cloud import OWNER, SMALL, Cloud, interpose
from tests.functional.queueing import assert_taken, assert_waiting, make_entry, make_taker, queue_request
from tests.kit.proxy import Proxy
from tests.kit.store_client import read_entry

# Entering a queue: exactly once, even if a request or an answer is lost.


def test_changed_flavor_is_a_conflict(cloud: Cloud, flavor: Flavor) -> None:
    entry = read_entry(cloud.store, keys.flavor(flavor.name))
    cloud.etcd.put(entry.key, entry.value)
    with pytest.raises(Conflict, match='changed its flavor'):
        enqueue(cloud.store, make_entry(flavor), entry.revision, None, OWNER, resume=False)
    assert cloud.etcd.list_keys(f'{keys.QUEUES}{flavor.name}/') == []


# Which keys protect a claim (rule: orphaned-claim)


def test_taker_key_and_queue_entry_protect_a_claim(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)
    instance, taker_key = place.entry.instance, keys.taker(place.entry.key)
    allocations.replace_allocations(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    lease = cloud.store.grant(60)
    cloud.store.commit([Unchanged(taker_key, 0)], [Put(taker_key, encode(QueueTaker(compute)), lease)])
    assert instance in read_pending_instances(cloud.store)
    assert 'taker' not in read_pending_instances(cloud.store)
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (0.0, CONFIRMATION_SECONDS):
        keeper.reconcile([], now)
    assert cloud.server.read_allocations(instance) == {compute: SMALL}
    # After a cancellation, a live taker releases the claim itself.
    cloud.etcd.delete(place.entry.key)
    for now in (2 * CONFIRMATION_SECONDS, 3 * CONFIRMATION_SECONDS):
        keeper.reconcile([], now)
    assert cloud.server.read_allocations(instance) == {compute: SMALL}
    cloud.store.revoke(lease)
    for now in (4 * CONFIRMATION_SECONDS, 5 * CONFIRMATION_SECONDS):
        keeper.reconcile([], now)
    assert cloud.server.read_allocations(instance) == {}


def test_abandon_keeps_the_claim_of_a_taker_of_the_same_uuid(cloud: Cloud, flavor: Flavor) -> None:
    """An eschedule with --queue overtook one without it, and a compute takes the request now."""
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)
    instance = place.entry.instance
    outcomes: list[bool] = []

    def abandon_now() -> str:  # between claim and move
        outcomes.append(abandon(cloud.store, cloud.placement, [instance], instance, 1))
        return 'now'

    assert make_taker(cloud, compute, now=abandon_now).take(place)
    assert outcomes == [False]
    assert_taken(cloud, compute, place.entry)


# Leaving a queue: taken exactly once, despite lost messages and concurrent changes.


def test_take_without_room_leaves_the_request(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.make_compute(VCPU=1, MEMORY_MB=32, DISK_GB=1), queue_request(cloud, flavor)
    with pytest.raises(NoCapacity):
        make_taker(cloud, compute).take(place)
    assert_waiting(cloud, place.entry)


def test_request_of_a_removed_flavor_is_not_taken(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)
    cloud.etcd.delete(keys.flavor(flavor.name))
    assert not make_taker(cloud, compute).take(place)
    assert_waiting(cloud, place.entry)


@pytest.mark.parametrize('arrives', [True, False])
@pytest.mark.parametrize('which', ['mark', 'move'])
def test_lost_taker_key_or_move_leaves_a_consistent_state(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool, which: str
) -> None:
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)
    key = {'mark': keys.taker(place.entry.key), 'move': keys.request(compute, place.entry.instance)}[which]
    etcd_proxy.lose(key.encode(), (lambda: cloud.etcd.get(key)) if arrives else None)
    assert make_taker(cloud, compute, store=shaky_store).take(place) is arrives
    assert etcd_proxy.has_lost
    if arrives:
        assert_taken(cloud, compute, place.entry)
    else:
        assert_waiting(cloud, place.entry)


def test_request_that_was_removed_manually_is_not_moved(cloud: Cloud, flavor: Flavor) -> None:
    """Its taker key is still there: `eschedule destroy` deletes that, too."""
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)

    def remove() -> str:
        cloud.etcd.delete(place.entry.key)
        return 'now'

    assert not make_taker(cloud, compute, now=remove).take(place)
    assert cloud.etcd.list_keys(keys.request_prefix(compute)) == []
    assert cloud.server.read_allocations(place.entry.instance) == {}


def test_taker_frozen_before_its_claim_claims_nothing(cloud: Cloud, flavor: Flavor) -> None:
    compute, other, place = cloud.make_compute(), cloud.make_compute(), queue_request(cloud, flavor)

    def let_other_take() -> None:
        cloud.etcd.delete(keys.taker(place.entry.key))
        assert make_taker(cloud, other).take(place)

    slow = interpose(Placement(cloud.server.url), 'write', let_other_take)
    assert not make_taker(cloud, compute, placement=slow).take(place)
    assert_taken(cloud, other, place.entry)
