"""Claims that move, stay or are released."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from ecomp.agent.host.claims import CONFIRMATION_SECONDS, ClaimKeeper
from ecomp.conf import EtcdConfig
from ecomp.errors import ClaimedElsewhere, Conflict, NoCapacity, PlacementRefusal, UnknownOutcome
from ecomp.model import keys
from ecomp.model.order import Request
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.placement.allocations import Requester, claim
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.decommission import disable
from ecomp.scheduler.operations.forget import forget
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.shared import notes
from ecomp.shared.attempts import MAX_OFFER_AGE_SECONDS
from ecomp.shared.notes import note_released, read_highest_released, released_to_json
from ecomp.store.client import Put, Snapshot, Store, Unchanged
from tests.functional.cloud import RESOURCES, SMALL, Cloud, interpose, make_uuid
from tests.kit.store_client import read_entry

# A claim is moved to its new owner, never released under it: races of reads, and generations that start again at 1.
#
# ecomp 1.0.0 lost a claim, or made a uuid unusable, in each of these sequences.


ROOM_FOR_ONE = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}


class InterceptedPlacement(Placement):
    """A placement client that runs `action` before one request, or loses that request (`lost`)."""

    intercepted: tuple[str, str] | None = None
    lost = False

    def intercept(
        self, method: str, path: str, action: Callable[[], object] = lambda: None, lost: bool = False
    ) -> None:
        self.intercepted, self.action, self.lost = (method, path), action, lost

    def _send(self, method: str, path: str, body: dict[str, Any] | None, no_answer_error: Any) -> Any:
        if (method, path) == self.intercepted:
            self.intercepted = None
            self.action()
            if self.lost:
                raise UnknownOutcome('lost', 'placement')
        return super()._send(method, path, body, no_answer_error)


@pytest.fixture
def intercepted_placement(cloud: Cloud) -> InterceptedPlacement:
    return InterceptedPlacement(cloud.server.url)


def create_empty_consumer(cloud: Cloud, instance: str) -> None:
    """Create a consumer, as placement does before it finds that the provider is missing."""
    with pytest.raises(PlacementRefusal):
        allocations.replace_allocations(cloud.placement, instance, {make_uuid(): SMALL}, 'a-user', 'a-project')


def make_placing_store(cloud: Cloud, action: Callable[[], object]) -> Store:
    store = Store(EtcdConfig((cloud.etcd.endpoint,)))
    return interpose(store, 'snapshot', action, lambda prefix, *_: prefix == keys.ATTEMPTS)


def test_set_with_empty_consumer_is_claimed(cloud: Cloud) -> None:
    compute = cloud.make_compute(VCPU=3, MEMORY_MB=512, DISK_GB=10)
    instances = [make_uuid() for _ in range(3)]
    create_empty_consumer(cloud, instances[1])
    claimer = cloud.make_claimer()
    assert claimer.claim_what_fits({instance: cloud.make_candidate(compute) for instance in instances}) == set(
        instances
    )
    assert cloud.server.read_consumers(compute).keys() == set(instances)


def test_constantly_changed_consumer_is_not_reported_as_no_capacity(
    cloud: Cloud, intercepted_placement: InterceptedPlacement
) -> None:
    compute, instance = cloud.make_compute(), make_uuid()

    def meddle() -> None:
        consumer = allocations.read_consumer(cloud.placement, instance)
        allocations.replace_allocations(
            cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project', consumer.generation
        )
        intercepted_placement.intercept('PUT', f'/allocations/{instance}', meddle)

    meddle()
    with pytest.raises(Exception, match='other processes keep changing its claim in placement') as caught:
        cloud.make_claimer(intercepted_placement).claim_what_fits({instance: cloud.make_candidate(compute)})
    assert not isinstance(caught.value, NoCapacity)
    assert getattr(caught.value, 'exit_code', None) == 5


def test_forgotten_candidate_is_skipped(cloud: Cloud) -> None:
    existing, gone = cloud.make_compute(), make_uuid()
    cloud.etcd.put(keys.compute(gone), '{"token": "x"}')
    for instance, compute in ((make_uuid(), gone), (make_uuid(), existing)):
        claimed = cloud.make_claimer().claim_what_fits({instance: cloud.make_candidate(compute)})
        assert claimed == ({instance} if compute == existing else set())


@pytest.mark.parametrize('query', [RESOURCES.replace('64', '32'), f'{RESOURCES}&required=HW_CPU_X86_AVX2'])
def test_claim_of_another_query_is_not_taken_over(cloud: Cloud, query: str) -> None:
    compute = cloud.make_compute(**ROOM_FOR_ONE)
    order = cloud.make_order_on(compute, resources=query)
    allocations.replace_allocations(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')
    with pytest.raises(ClaimedElsewhere):
        cloud.create(order, resume=True)
    # The claim's compute releases it if no request or attempt owns it.
    assert cloud.server.read_allocations(order.instance) == {compute: SMALL}
    assert cloud.etcd.get(keys.attempt(order.instance)) is None


def test_no_room_due_to_a_takeover_is_reported_as_conflict(cloud: Cloud) -> None:
    """The missing room is what the other eschedule has just claimed."""
    compute, order = cloud.make_order(**ROOM_FOR_ONE)
    key, text = keys.attempt(order.instance), json.dumps({'version': 1, 'instances': [order.instance]})

    def take_over() -> None:
        attempt = read_entry(cloud.store, key)
        assert cloud.store.commit([Unchanged(key, attempt.revision)], [Put(key, text, attempt.lease)])
        allocations.replace_allocations(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')

    with pytest.raises(Conflict, match='another eschedule took over this uuid'):
        cloud.create(order, resume=True, store=make_placing_store(cloud, take_over))
    assert cloud.server.read_consumers(compute).keys() == {order.instance}


def test_room_released_after_the_offer_is_used(cloud: Cloud) -> None:
    compute, order = cloud.make_order(**ROOM_FOR_ONE)
    allocations.replace_allocations(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')
    offer = allocations.read_candidates(cloud.placement, order.query)
    assert offer.candidates == []
    consumer = allocations.read_consumer(cloud.placement, order.instance)
    assert allocations.release_once(cloud.placement, order.instance, consumer)
    assert cloud.create(order, resume=True, offer=offer) == DeliveryOutcome(compute)
    cloud.assert_placed(compute, order)


def test_many_claims_are_released_in_portions(cloud: Cloud) -> None:
    compute, portions = cloud.make_compute(VCPU=50, MEMORY_MB=5000, DISK_GB=50), list[int]()
    instances = [make_uuid() for _ in range(2 * allocations.MAX_RELEASE_BATCH + 1)]
    requested = {instance: {compute: SMALL} for instance in instances}
    requester = allocations.Requester('a-user', 'a-project')
    allocations.replace_set_allocations(cloud.placement, requested, requester, {})
    kept_instance = instances[0]

    def keep_one(holding: Mapping[str, allocations.Consumer]) -> set[str]:
        portions.append(len(holding))
        return {kept_instance} & holding.keys()

    released = allocations.release(
        cloud.placement, [*instances, make_uuid()], keep_one, partial(note_released, cloud.store)
    )
    assert portions == [allocations.MAX_RELEASE_BATCH, allocations.MAX_RELEASE_BATCH, 1]
    assert [instance for instance, is_released in released.items() if not is_released] == [kept_instance]
    assert cloud.server.read_consumers(compute).keys() == {kept_instance}


def test_attempt_with_an_old_offer_queries_placement_again(cloud: Cloud) -> None:
    """A drain has not waited for such an attempt."""
    compute, order = cloud.make_order()
    offer = allocations.read_candidates(cloud.placement, order.query)
    disable(cloud.placement, compute, compute)
    with pytest.raises(NoCapacity):
        cloud.create(order, offer=offer._replace(queried_at=offer.queried_at - MAX_OFFER_AGE_SECONDS))
    cloud.assert_not_placed(order, compute)


def test_forget_releases_claim_of_dead_taker_but_keeps_queue_entry(cloud: Cloud) -> None:
    compute, order = cloud.make_order(alive=False)
    cloud.etcd.put(f'{keys.QUEUES}small/{order.instance}', '{}')
    allocations.replace_allocations(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')
    with pytest.raises(Conflict, match='--fenced'):
        forget(cloud.store, cloud.placement, compute, compute, lambda: 'now', lambda _: None)
    forget(cloud.store, cloud.placement, compute, compute, lambda: 'now', lambda _: None, fenced=True)
    assert cloud.server.read_allocations(order.instance) == {}
    assert cloud.etcd.get(f'{keys.QUEUES}small/{order.instance}') is not None


# On real etcd and placement: computes release claims without an owner, and no others (rule: orphaned-claim).


def create_orphan(cloud: Cloud, compute: str) -> str:
    instance = make_uuid()
    allocations.replace_allocations(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    return instance


@pytest.mark.fast
def test_orphan_is_released_after_two_spaced_checks(cloud: Cloud) -> None:
    compute = cloud.make_compute()
    instance = create_orphan(cloud, compute)
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (1000.0, 1001.0, 1000.0 + CONFIRMATION_SECONDS - 0.1):
        keeper.reconcile([], now)
        assert instance in cloud.server.read_consumers(compute)
    keeper.reconcile([], 1000.0 + CONFIRMATION_SECONDS)
    assert cloud.server.read_consumers(compute) == {}
    keeper.reconcile([], 2000.0)


@pytest.mark.fast
def test_request_that_placement_refuses_keeps_no_orphan(cloud: Cloud) -> None:
    compute = cloud.make_compute(VCPU=9, MEMORY_MB=999, DISK_GB=9)
    _, requested = (create_orphan(cloud, compute) for _ in range(2))
    amounts = {**SMALL, 'CUSTOM_UNKNOWN': 1}
    request = Request(requested, {compute: amounts}, image='http://images.invalid/a.img')
    cloud.store.commit([], [Put(keys.request(compute, requested), encode(request))])
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (0.0, CONFIRMATION_SECONDS):
        keeper.reconcile([], now, targets={requested: amounts})
    assert cloud.server.read_consumers(compute).keys() == {requested}


@pytest.mark.fast
def test_claims_with_an_owner_are_kept(cloud: Cloud) -> None:
    compute = cloud.make_compute(VCPU=9, MEMORY_MB=999, DISK_GB=9)
    attempted, in_set, delivered, with_guest, queued, unowned = (create_orphan(cloud, compute) for _ in range(6))
    lease = cloud.store.grant(60)
    cloud.store.commit([], [Put(keys.attempt(attempted), 'unreadable', lease)])
    cloud.store.commit([], [Put(keys.attempt(make_uuid()), json.dumps({'instances': [in_set]}), lease)])
    cloud.store.commit([], [Put(keys.request(compute, delivered), '{}')])
    cloud.store.commit([], [Put(f'{keys.QUEUES}small/{queued}', '{}')])
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    keeper.reconcile([with_guest], 0.0)
    keeper.reconcile([with_guest], CONFIRMATION_SECONDS)
    assert cloud.server.read_consumers(compute).keys() == {attempted, in_set, delivered, with_guest, queued}
    # The attempt has expired: its claim needs two checks from now on.
    cloud.store.revoke(lease)
    keeper.reconcile([with_guest], CONFIRMATION_SECONDS + 1)
    assert attempted in cloud.server.read_consumers(compute)
    keeper.reconcile([with_guest], 2 * CONFIRMATION_SECONDS + 1)
    assert cloud.server.read_consumers(compute).keys() == {delivered, with_guest, queued}
    assert unowned not in cloud.server.read_consumers(compute)


# The generation that is noted before a claim is released.


@pytest.mark.fast
def test_highest_released_generation_is_noted_for_an_hour(cloud: Cloud) -> None:
    first, second, third, fourth = (digits + make_uuid()[2:] for digits in ('00', '00', '00', 'f0'))
    assert read_highest_released(cloud.store, [first]) == 0
    note_released(cloud.store, {first: 4, second: 2, fourth: 3})
    note_released(cloud.store, {first: 3})
    note_released(cloud.store, {})
    queries = ([first], [second], [third], [fourth], [second, third], [third, fourth], [fourth, first], [])
    assert [read_highest_released(cloud.store, instances) for instances in queries] == [4, 2, 0, 3, 2, 3, 4, 0]
    entries = cloud.store.snapshot(keys.RELEASED).entries
    assert [instances.key for instances in entries.values() if first in instances.key] == []
    for instances in entries.values():
        assert notes.NOTE_SECONDS - 60 < cloud.store.keep_alive(instances.lease) <= notes.NOTE_SECONDS


@pytest.fixture
def no_garbage_collection(junk: str) -> Iterator[None]:
    if len(junk) > 1000:
        gc.disable()  # another test's garbage fails to be collected on a used-up stack
    yield
    gc.enable()


@pytest.mark.fast
@pytest.mark.usefixtures('no_garbage_collection')
@pytest.mark.parametrize(
    'junk', ['', 'seven', '7', '[]', '{}', '[' * 9999, '{"generations": 7}', '{"generations": {"%s": %s}}']
)
@pytest.mark.parametrize('number', ['"7"', '-1', '0', 'true', '7.0', '1' + 5000 * '0', 'null', '1e999', '{}'])
def test_malformed_notes_are_ignored(cloud: Cloud, junk: str, number: str) -> None:
    instance = make_uuid()
    cloud.etcd.put(keys.released_claims(instance, 1), junk % (instance, number) if '%' in junk else junk)
    assert (
        read_highest_released(cloud.store, [instance])
        == read_highest_released(cloud.store, [instance, make_uuid()])
        == 0
    )
    note_released(cloud.store, {instance: 2})
    assert read_highest_released(cloud.store, [instance]) == 2


@pytest.mark.fast
@pytest.mark.parametrize('number', [51, 1000, 10**100])
def test_large_noted_generation_is_limited(cloud: Cloud, number: int) -> None:
    """Each generation up to the noted one costs a call: one request could take minutes."""
    compute, instance = cloud.make_compute(), make_uuid()
    cloud.etcd.put(keys.released_claims(instance, 1), released_to_json({instance: number}))
    above = partial(read_highest_released, cloud.store, [instance])
    claim(cloud.placement, {instance: {compute: SMALL}}, Requester('u', 'p'), lambda: None, above)
    assert allocations.read_consumer(cloud.placement, instance).generation == notes.MAX_NOTED_GENERATION + 1 == 51


@pytest.mark.fast
def test_notes_are_not_held_in_memory(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of 150 MB raised a compute's memory from 106 to 269 MiB."""
    instance, real = make_uuid(), cloud.store.snapshot
    note_released(cloud.store, {instance: 4})
    reads: list[Snapshot] = []
    monkeypatch.setattr(cloud.store, 'snapshot', lambda *words, **more: reads.append(real(*words, **more)) or reads[-1])
    assert (
        read_highest_released(cloud.store, [instance])
        == read_highest_released(cloud.store, [instance, make_uuid()])
        == 4
    )
    assert [len(snapshot.entries) for snapshot in reads] == [0, 0]
