"""Test how requests enter queues and how computes take them, on real etcd and placement."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ecomp.agent.host.claims import CONFIRMATION_SECONDS, ClaimKeeper
from ecomp.errors import ClaimedElsewhere, Conflict, EcompError, NoCapacity, UnknownOutcome, Unreachable
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.queue import QueueTaker
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.placing.claim import abandon
from ecomp.scheduler.placing.enqueue import enqueue
from ecomp.shared.attempts import read_pending_instances
from ecomp.store.client import Put, Store, Unchanged
from tests.functional.cloud import OWNER, SMALL, Cloud, interpose, make_uuid
from tests.functional.queueing import assert_taken, assert_waiting, make_entry, make_taker, put_in_queue, queue_request
from tests.kit.proxy import Proxy
from tests.kit.store_client import read_entry

# Entering a queue: exactly once, even if a request or an answer is lost.


@pytest.mark.parametrize('arrives', [True, False])
@pytest.mark.parametrize('resume', [True, False])
def test_request_is_queued_once_despite_a_lost_message(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool, resume: bool
) -> None:
    waiting = make_entry(flavor)
    etcd_proxy.lose(waiting.key.encode(), (lambda: cloud.etcd.get(waiting.key)) if arrives else None)
    if arrives or not resume:
        put_in_queue(cloud, waiting, resume, shaky_store)
    else:
        with pytest.raises(EcompError, match='not queued'):
            put_in_queue(cloud, waiting, resume, shaky_store)
        assert put_in_queue(cloud, waiting, resume=True)
    assert etcd_proxy.has_lost
    assert_waiting(cloud, waiting)


@pytest.mark.parametrize('arrives', [True, False])
def test_unknown_outcome_is_resumed_with_the_same_uuid(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool
) -> None:
    waiting = make_entry(flavor)
    applied = (lambda: cloud.etcd.get(waiting.key)) if arrives else None
    etcd_proxy.lose(waiting.key.encode(), applied, stay_away=True)
    with pytest.raises(UnknownOutcome, match=f'it is unknown whether {waiting.instance} is queued') as caught:
        put_in_queue(cloud, waiting, store=shaky_store)
    assert caught.value.exit_code == 7
    assert put_in_queue(cloud, waiting, resume=True) is not arrives
    assert_waiting(cloud, waiting)


def test_concurrent_requests_of_one_uuid_queue_it_once(cloud: Cloud, flavor: Flavor) -> None:
    """Check requests into different queues, so that no two of their keys are equal."""
    instance = make_uuid()
    flavors = [Flavor(f'{flavor.name}-{number}', SMALL) for number in range(6)]
    for target_flavor in flavors:
        cloud.etcd.put(keys.flavor(target_flavor.name), encode(target_flavor))

    def enqueue_to(target: Flavor) -> str:
        try:
            put_in_queue(cloud, make_entry(target, instance, name=f'n-{target.name[-20:]}'), resume=True)
            return target.name
        except Conflict:
            return ''

    with ThreadPoolExecutor(6) as threads:
        winners = [winner for winner in threads.map(enqueue_to, flavors) if winner]
    queued_keys = [key for key in cloud.etcd.list_keys(keys.QUEUES) if instance in key]
    assert len(queued_keys) == 1
    assert queued_keys == [keys.queue(name, instance) for name in winners]
    assert cloud.etcd.get(keys.attempt(instance)) is None


def test_name_belongs_to_one_waiting_instance(cloud: Cloud, flavor: Flavor) -> None:
    name = f'n{make_uuid()[:8]}'
    first, second = make_entry(flavor, name=name), make_entry(flavor, name=name)
    assert put_in_queue(cloud, first)
    with pytest.raises(Conflict, match=f'name taken by instance {first.instance}'):
        put_in_queue(cloud, second)
    destroy(cloud.store, first.instance)
    assert put_in_queue(cloud, second)
    destroy(cloud.store, second.instance)
    assert cloud.etcd.get(keys.name(name)) is None


def test_attempt_of_the_same_uuid_is_taken_over(cloud: Cloud, flavor: Flavor) -> None:
    waiting = make_entry(flavor)
    cloud.etcd.put(keys.attempt(waiting.instance), '{}')
    put_in_queue(cloud, waiting)  # deletes the other attempt's key, so the other delivers nothing
    assert_waiting(cloud, waiting)
    assert cloud.etcd.get(keys.attempt(waiting.instance)) is None


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
        keeper.check_claims([], now)
    assert cloud.server.read_allocations(instance) == {compute: SMALL}
    # After a cancellation, a live taker releases the claim itself.
    cloud.etcd.delete(place.entry.key)
    for now in (2 * CONFIRMATION_SECONDS, 3 * CONFIRMATION_SECONDS):
        keeper.check_claims([], now)
    assert cloud.server.read_allocations(instance) == {compute: SMALL}
    cloud.store.revoke(lease)
    for now in (4 * CONFIRMATION_SECONDS, 5 * CONFIRMATION_SECONDS):
        keeper.check_claims([], now)
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


def test_abandon_releases_the_claim_of_a_waiting_uuid(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)
    instance = place.entry.instance
    allocations.replace_allocations(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    assert abandon(cloud.store, cloud.placement, [instance], instance, 1)
    assert_waiting(cloud, place.entry)


# Leaving a queue: taken exactly once, despite lost messages and concurrent changes.


def test_delivered_request_is_not_released(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)
    first_taker = make_taker(cloud, compute)
    assert first_taker.take(place)
    assert_taken(cloud, compute, place.entry)
    assert cloud.read_request(compute, place.entry.instance).stages == {'requested': 'then', 'scheduled': 'now'}
    assert not make_taker(cloud, compute).take(place), 'it is there no more'
    assert not first_taker.release_claim(place.entry.instance)
    assert_taken(cloud, compute, place.entry)


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


@pytest.mark.parametrize('arrives', [True, False])
def test_move_with_unknown_outcome_is_found_by_its_taker_key(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool
) -> None:
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)
    request_key = keys.request(compute, place.entry.instance)
    arrived = (lambda: cloud.etcd.get(request_key)) if arrives else None
    etcd_proxy.lose(request_key.encode(), arrived, stay_away=True)
    with pytest.raises(Unreachable):
        make_taker(cloud, compute, store=shaky_store).take(place)
    assert cloud.server.read_allocations(place.entry.instance) == {compute: SMALL}, 'released (rule: read-back)'
    taker = make_taker(cloud, compute)
    for _ in range(0 if arrives else 2):  # it removes the taker key, and takes the request again
        taker.queues.on_queues(cloud.store.snapshot(f'{keys.QUEUES}{flavor.name}/').entries)
        taker.deferrals.clear()
        while taker.take_next():
            pass
    assert_taken(cloud, compute, place.entry)


def test_request_that_was_removed_manually_is_not_moved(cloud: Cloud, flavor: Flavor) -> None:
    """Its taker key is still there: `eschedule destroy` deletes that, too."""
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)

    def remove() -> str:
        cloud.etcd.delete(place.entry.key)
        return 'now'

    assert not make_taker(cloud, compute, now=remove).take(place)
    assert cloud.etcd.list_keys(keys.request_prefix(compute)) == []
    assert cloud.server.read_allocations(place.entry.instance) == {}


@pytest.mark.parametrize('arrives', [True, False])
def test_claim_is_made_despite_a_lost_message(
    cloud: Cloud, flavor: Flavor, placement_proxy: Proxy, shaky_placement: Placement, arrives: bool
) -> None:
    compute, place = cloud.make_compute(), queue_request(cloud, flavor)
    put_it = f'PUT /allocations/{place.entry.instance}'.encode()
    placement_proxy.lose(put_it, (lambda: cloud.server.read_allocations(place.entry.instance)) if arrives else None)
    assert make_taker(cloud, compute, placement=shaky_placement).take(place)
    assert placement_proxy.has_lost
    assert_taken(cloud, compute, place.entry)


def test_claim_with_unknown_outcome_is_released_by_its_compute_only(
    cloud: Cloud, flavor: Flavor, placement_proxy: Proxy, shaky_placement: Placement
) -> None:
    compute, other, place = cloud.make_compute(), cloud.make_compute(), queue_request(cloud, flavor)
    put_it = f'PUT /allocations/{place.entry.instance}'.encode()
    placement_proxy.lose_answer(put_it, lambda: cloud.server.read_allocations(place.entry.instance), stay_away=True)
    with pytest.raises(UnknownOutcome):
        make_taker(cloud, compute, placement=shaky_placement).take(place)
    assert cloud.server.read_allocations(place.entry.instance) == {compute: SMALL}
    consumer = allocations.read_consumer(cloud.placement, place.entry.instance)
    with pytest.raises(ClaimedElsewhere):
        make_taker(cloud, other).take(place)
    assert cloud.server.read_allocations(place.entry.instance) == {compute: SMALL}
    assert cloud.etcd.get(keys.taker(place.entry.key)) is None
    assert make_taker(cloud, compute).release_claim(place.entry.instance)
    assert make_taker(cloud, other).take(place)
    is_released = allocations.release_once(cloud.placement, place.entry.instance, consumer)
    assert not is_released, 'a late release releases nothing'
    assert_taken(cloud, other, place.entry)


def test_taker_frozen_before_its_claim_claims_nothing(cloud: Cloud, flavor: Flavor) -> None:
    compute, other, place = cloud.make_compute(), cloud.make_compute(), queue_request(cloud, flavor)

    def let_other_take() -> None:
        cloud.etcd.delete(keys.taker(place.entry.key))
        assert make_taker(cloud, other).take(place)

    slow = interpose(Placement(cloud.server.url), 'write', let_other_take)
    assert not make_taker(cloud, compute, placement=slow).take(place)
    assert_taken(cloud, other, place.entry)
