"""Claims that move, stay or are released."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from ecomp.agent.host.claims import APART, ClaimKeeper
from ecomp.conf import EtcdConfig
from ecomp.errors import ClaimedElsewhere, Conflict, NoCapacity, NotFound, PlacementRefusal, UnknownOutcome, Unreachable
from ecomp.model import keys
from ecomp.model.order import Request, SetOrder, to_json
from ecomp.model.queue import mark_to_json
from ecomp.placement import allocations
from ecomp.placement.allocations import claim
from ecomp.placement.client import Placement
from ecomp.scheduler.changing.wait import Deadline
from ecomp.scheduler.looking.find import FRESH
from ecomp.scheduler.operating.audit import _release as repaired
from ecomp.scheduler.operating.decommission import disable, drained, forget
from ecomp.scheduler.placing import claim as claims
from ecomp.scheduler.placing.claim import DeliveryOutcome, abandon
from ecomp.store import sharing
from ecomp.store.client import Delete, Exists, Put, Snapshot, Store, Unchanged
from ecomp.store.sharing import highest_released, note_released, released_to_json
from tests.functional.cloud import RESOURCES, SMALL, Cloud, at_it, interpose, new
from tests.kit.store_client import read_entry

# A claim is moved to its new owner, never released under it: races of reads, and generations that start again at 1.
#
# ecomp 1.0.0 lost a claim, or made a uuid unusable, in each of these sequences.


ROOM_FOR_ONE = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}


class Between(Placement):
    """A placement client that runs `action` before one request, or loses that request (`lost`)."""

    at: tuple[str, str] | None = None
    lost = False

    def then(self, method: str, path: str, do: Callable[[], object] = lambda: None, lost: bool = False) -> None:
        self.at, self.do, self.lost = (method, path), do, lost

    def _send(self, method: str, path: str, body: dict[str, Any] | None, unanswered: Any) -> Any:
        if (method, path) == self.at:
            self.at = None
            self.do()
            if self.lost:
                raise UnknownOutcome('lost', 'placement')
        return super()._send(method, path, body, unanswered)


@pytest.fixture
def between(cloud: Cloud) -> Between:
    return Between(cloud.server.url)


def left_empty(cloud: Cloud, instance: str) -> None:
    """Create a consumer without allocations.

    Placement creates it before it finds that the provider does not exist.
    """
    with pytest.raises(PlacementRefusal):
        allocations.claim_once(cloud.placement, instance, {new(): SMALL}, 'a-user', 'a-project')


def make_placing_store(cloud: Cloud, do: Callable[[], object]) -> Store:
    """Make a store that runs `action` once, just before it reads the attempts."""
    store = Store(EtcdConfig((cloud.etcd.endpoint,)))
    return interpose(store, 'snapshot', do, lambda prefix, *_: prefix == keys.ATTEMPTS)


def deliver_meanwhile(cloud: Cloud, compute: str, wanted: SetOrder) -> Store:
    """Claim as the owner of an attempt; deliver when the returned store reads the attempts.

    The delivery deletes the attempt and writes the request.
    """
    lease = cloud.store.grant(60)
    at_it(cloud, wanted, lease)
    allocations.claim_once(cloud.placement, wanted.instance, {compute: SMALL}, 'a-user', 'a-project')
    fields = {'user_id': 'a-user', 'project_id': 'a-project', 'query': 'query', 'stages': {'requested': 'now'}}
    request = Request(wanted.instance, {compute: SMALL}, image='image', **fields)

    def deliver() -> None:
        cloud.store.commit([], [Put(keys.request(compute, wanted.instance), to_json(request))])
        cloud.store.revoke(lease)

    return make_placing_store(cloud, deliver)


def test_a_uuid_whose_consumer_was_left_empty_is_placed_all_the_same(cloud: Cloud) -> None:
    compute, order = cloud.make_order()
    left_empty(cloud, order.instance)
    assert cloud.create(order, resume=True) == DeliveryOutcome(compute)
    cloud.is_whole(compute, order)


def test_a_set_with_one_that_was_left_empty_is_claimed(cloud: Cloud) -> None:
    compute = cloud.compute(VCPU=3, MEMORY_MB=512, DISK_GB=10)
    instances = [new() for _ in range(3)]
    left_empty(cloud, instances[1])
    claimer = cloud.claimer()
    assert claimer.claim_what_fits({instance: cloud.candidate(compute) for instance in instances}) == set(instances)
    assert cloud.server.consumers(compute).keys() == set(instances)


def test_one_that_is_changed_all_the_time_is_not_said_to_find_no_room(cloud: Cloud, between: Between) -> None:
    compute, instance = cloud.compute(), new()

    def meddle() -> None:
        consumer = allocations.consumer(cloud.placement, instance)
        allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project', consumer.generation)
        between.then('PUT', f'/allocations/{instance}', meddle)

    meddle()
    with pytest.raises(Exception, match='changed by somebody else all the time') as caught:
        cloud.claimer(between).claim_what_fits({instance: cloud.candidate(compute)})
    assert not isinstance(caught.value, NoCapacity)
    assert getattr(caught.value, 'exit_code', None) == 5


def test_a_candidate_that_was_forgotten_meanwhile_is_passed_over(cloud: Cloud) -> None:
    existing, gone = cloud.compute(), new()
    cloud.etcd.put(keys.compute(gone), '{"token": "x"}')
    for instance, compute in ((new(), gone), (new(), existing)):
        claimed = cloud.claimer().claim_what_fits({instance: cloud.candidate(compute)})
        assert claimed == ({instance} if compute == existing else set())


@pytest.mark.parametrize('third', [False, True])
def test_a_late_release_of_the_first_one_meets_another_generation(cloud: Cloud, third: bool) -> None:
    """The first attempt's claim takes all room.

    With `third`, another process releases it first.
    """
    compute, order = cloud.make_order(**ROOM_FOR_ONE)
    allocations.claim_once(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')
    consumer = allocations.consumer(cloud.placement, order.instance)
    assert allocations.candidates(cloud.placement, order.query).candidates == []
    if third:
        assert abandon(cloud.store, cloud.placement, [order.instance], order.instance, -1)
    assert cloud.create(order, resume=True) == DeliveryOutcome(compute)
    assert not allocations.release_once(cloud.placement, order.instance, consumer)
    cloud.is_whole(compute, order)


@pytest.mark.parametrize('query', [RESOURCES.replace('64', '32'), f'{RESOURCES}&required=HW_CPU_X86_AVX2'])
def test_what_was_claimed_for_another_query_is_not_taken_for_this_one_s(cloud: Cloud, query: str) -> None:
    compute = cloud.compute(**ROOM_FOR_ONE)
    order = cloud.wanted(compute, resources=query)
    allocations.claim_once(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')
    with pytest.raises(ClaimedElsewhere):
        cloud.create(order, resume=True)
    # The claim's compute releases it if no request or attempt owns it.
    assert cloud.server.allocations(order.instance) == {compute: SMALL}
    assert cloud.etcd.get(keys.attempt(order.instance)) is None


def test_a_lost_claim_beside_an_equal_one_moves_it(cloud: Cloud, between: Between) -> None:
    compute, instance = cloud.compute(), new()
    allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    consumer = allocations.consumer(cloud.placement, instance)
    between.then('PUT', f'/allocations/{instance}', lost=True)
    claim(between, {instance: {compute: SMALL}}, 'a-user', 'a-project', lambda: None)
    assert not allocations.release_once(cloud.placement, instance, consumer)
    assert cloud.server.consumers(compute).keys() == {instance}


def test_no_room_beside_another_eschedule_of_the_same_uuid_is_not_called_so(cloud: Cloud) -> None:
    """The missing room is what the other eschedule has just claimed."""
    compute, order = cloud.make_order(**ROOM_FOR_ONE)
    key, text = keys.attempt(order.instance), json.dumps({'version': 1, 'instances': [order.instance]})

    def take_over() -> None:
        attempt = read_entry(cloud.store, key)
        assert cloud.store.commit([Unchanged(key, attempt.revision)], [Put(key, text, attempt.lease)])
        allocations.claim_once(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')

    with pytest.raises(Conflict, match='another eschedule took it over'):
        cloud.create(order, resume=True, store=make_placing_store(cloud, take_over))
    assert cloud.server.consumers(compute).keys() == {order.instance}


def test_what_an_earlier_one_releases_once_placement_was_asked_is_room(cloud: Cloud) -> None:
    compute, order = cloud.make_order(**ROOM_FOR_ONE)
    allocations.claim_once(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')
    offer = allocations.candidates(cloud.placement, order.query)
    assert offer.candidates == []
    consumer = allocations.consumer(cloud.placement, order.instance)
    assert allocations.release_once(cloud.placement, order.instance, consumer)
    assert cloud.create(order, resume=True, offer=offer) == DeliveryOutcome(compute)
    cloud.is_whole(compute, order)


@pytest.mark.parametrize('count', [1, 2])
def test_a_release_that_is_sent_late_meets_no_claim_made_since(cloud: Cloud, count: int) -> None:
    """A process reads the generation and stalls. Others release the claim and claim again."""
    compute = cloud.compute(VCPU=9, MEMORY_MB=900, DISK_GB=9)
    instances = [new() for _ in range(count)]

    def claim_all() -> dict[str, allocations.Consumer]:
        requested = {instance: {compute: SMALL} for instance in instances}
        claim(cloud.placement, requested, 'u', 'p', lambda: None, partial(highest_released, cloud.store, instances))
        return {instance: allocations.consumer(cloud.placement, instance) for instance in instances}

    reads = [claim_all()]
    for _ in range(3):
        assert abandon(cloud.store, cloud.placement, instances, instances[0], -1)
        reads.append(claim_all())
        for read in reads[:-1]:
            assert [allocations.release_once(cloud.placement, *pair) for pair in read.items()] == [False] * count
        assert cloud.server.consumers(compute).keys() == set(instances)
    assert {read[instance].generation for read in reads for instance in instances} == {1, 2, 3, 4}


def test_what_is_not_noted_is_not_released(cloud: Cloud) -> None:
    compute, instance = cloud.compute(), new()
    allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')

    def note(generations: Mapping[str, int]) -> None:
        assert generations == {instance: 1}
        raise Unreachable('etcd cannot be reached', 'etcd')

    with pytest.raises(Unreachable):
        allocations.release(cloud.placement, [instance], lambda _: (), note)
    assert cloud.server.consumers(compute).keys() == {instance}


def test_many_are_released_in_portions(cloud: Cloud) -> None:
    compute, portions = cloud.compute(VCPU=50, MEMORY_MB=5000, DISK_GB=50), list[int]()
    instances = [new() for _ in range(2 * allocations.TOGETHER + 1)]
    requested = {instance: {compute: SMALL} for instance in instances}
    allocations.claim_set_once(cloud.placement, requested, 'a-user', 'a-project', {})
    kept_instance = instances[0]

    def keep_one(holding: Mapping[str, allocations.Consumer]) -> set[str]:
        portions.append(len(holding))
        return {kept_instance} & holding.keys()

    released = allocations.release(cloud.placement, [*instances, new()], keep_one, partial(note_released, cloud.store))
    assert portions == [allocations.TOGETHER, allocations.TOGETHER, 1]
    assert [instance for instance, is_released in released.items() if not is_released] == [kept_instance]
    assert cloud.server.consumers(compute).keys() == {kept_instance}


def test_the_claim_keeper_leaves_what_was_taken_over_while_it_looked(cloud: Cloud, between: Between) -> None:
    compute, order = cloud.make_order()
    allocations.claim_once(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')
    keeper = ClaimKeeper(compute, cloud.store, between)
    keeper.look([], 0.0)
    between.then('GET', f'/allocations/{order.instance}', lambda: cloud.create(order, resume=True))
    keeper.look([], APART)
    cloud.is_whole(compute, order)


def test_who_asked_before_it_was_disabled_asks_again(cloud: Cloud) -> None:
    """An old offer must not claim on a compute that the drain reports as empty."""
    compute, order = cloud.make_order()
    offer = allocations.candidates(cloud.placement, order.query)
    disable(cloud.placement, compute, compute)
    drained(cloud.store, cloud.placement, compute, compute, Deadline(60), lambda _: None)
    with pytest.raises(NoCapacity):
        cloud.create(order, offer=offer)
    cloud.has_nothing_of(order, compute)


def test_a_drain_waits_for_who_has_just_asked(cloud: Cloud) -> None:
    """The attempt has an older offer, and starts after the drain's first check."""
    compute, order = cloud.make_order()
    offer = allocations.candidates(cloud.placement, order.query)
    disable(cloud.placement, compute, compute)
    messages: list[str] = []

    def tell(what: str) -> None:
        if not messages:
            assert time.monotonic() - offer.asked < FRESH
            assert cloud.create(order, offer=offer) == DeliveryOutcome(compute)
        messages.append(what)
        if 'to go' in what:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        drained(cloud.store, cloud.placement, compute, compute, Deadline(60), tell)


def test_a_drain_waits_for_who_has_just_marked_a_waiting_request(cloud: Cloud) -> None:
    """The taker checked its compute's traits just before, and does not check them again."""
    compute = cloud.compute()
    taker_key = keys.taker(keys.queue('small', new()))
    disable(cloud.placement, compute, compute)
    started_at = time.monotonic()
    messages: list[str] = []

    def tell(what: str) -> None:
        messages.append(what)
        if len(messages) == 1:
            cloud.store.commit([], [Put(taker_key, mark_to_json(compute), cloud.store.grant(60))])
            assert time.monotonic() - started_at < FRESH
        # The taker's claim takes as long as placement needs.
        if time.monotonic() - started_at > 2 * FRESH:
            cloud.store.commit([], [Delete(taker_key)])

    drained(cloud.store, cloud.placement, compute, compute, Deadline(60), tell)
    assert cloud.store.get(taker_key) is None


def test_forget_leaves_what_is_delivered_while_it_looks(cloud: Cloud) -> None:
    compute, order = cloud.make_order(alive=False)
    store = deliver_meanwhile(cloud, compute, order)
    with pytest.raises(Exception, match=f'compute {compute} is not forgotten') as caught:
        forget(store, cloud.placement, compute, compute, lambda: 'now', lambda _: None, fenced=True)
    assert not isinstance(caught.value, NotFound)
    assert cloud.server.consumers(compute).keys() == {order.instance}


def test_a_dead_taker_is_forgotten_with_its_claim_for_what_still_waits(cloud: Cloud) -> None:
    compute, order = cloud.make_order(alive=False)
    cloud.etcd.put(f'{keys.QUEUES}small/{order.instance}', '{}')
    allocations.claim_once(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')
    with pytest.raises(Conflict, match='--fenced'):
        forget(cloud.store, cloud.placement, compute, compute, lambda: 'now', lambda _: None)
    forget(cloud.store, cloud.placement, compute, compute, lambda: 'now', lambda _: None, fenced=True)
    assert cloud.server.allocations(order.instance) == {}
    assert cloud.etcd.get(f'{keys.QUEUES}small/{order.instance}') is not None


def test_a_repair_leaves_what_is_delivered_while_it_looks(cloud: Cloud) -> None:
    compute, order = cloud.make_order()
    store = deliver_meanwhile(cloud, compute, order)
    assert 'it has changed' in repaired(store, cloud.placement, order.instance)
    assert cloud.server.consumers(compute).keys() == {order.instance}


# Rule 4 on real etcd and placement: computes release claims without an owner, and no others.


def orphan(cloud: Cloud, compute: str) -> str:
    instance = new()
    allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    return instance


@pytest.mark.fast
def test_an_orphan_is_released_after_two_looks_apart(cloud: Cloud) -> None:
    compute = cloud.compute()
    instance = orphan(cloud, compute)
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (1000.0, 1001.0, 1000.0 + APART - 0.1):
        keeper.look([], now)
        assert instance in cloud.server.consumers(compute)
    keeper.look([], 1000.0 + APART)
    assert cloud.server.consumers(compute) == {}
    keeper.look([], 2000.0)


@pytest.mark.fast
def test_who_stands_behind_a_claim(cloud: Cloud) -> None:
    compute = cloud.compute(VCPU=9, MEMORY_MB=999, DISK_GB=9)
    attempted, in_set, delivered, with_guest, queued, unowned = (orphan(cloud, compute) for _ in range(6))
    lease = cloud.store.grant(60)
    cloud.store.commit([], [Put(keys.attempt(attempted), 'unreadable', lease)])
    cloud.store.commit([], [Put(keys.attempt(new()), json.dumps({'instances': [in_set]}), lease)])
    cloud.store.commit([], [Put(keys.request(compute, delivered), '{}')])
    cloud.store.commit([], [Put(f'{keys.QUEUES}small/{queued}', '{}')])
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    keeper.look([with_guest], 0.0)
    keeper.look([with_guest], APART)
    assert cloud.server.consumers(compute).keys() == {attempted, in_set, delivered, with_guest, queued}
    # The attempt has expired: its claim needs two checks from now on.
    cloud.store.revoke(lease)
    keeper.look([with_guest], APART + 1)
    assert attempted in cloud.server.consumers(compute)
    keeper.look([with_guest], 2 * APART + 1)
    assert cloud.server.consumers(compute).keys() == {delivered, with_guest, queued}
    assert unowned not in cloud.server.consumers(compute)


@pytest.mark.fast
def test_a_killed_eschedule_s_claim_goes_and_its_uuid_can_go_on(cloud: Cloud) -> None:
    compute, order = cloud.make_order()
    lease = cloud.store.grant(60)
    at_it(cloud, order, lease)
    claims.Claimer(cloud.placement, 'a-user', 'a-project', lambda: True).claim({order.instance: {compute: SMALL}})
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (0.0, APART, 2 * APART):
        keeper.look([], now)
    assert order.instance in cloud.server.consumers(compute)  # the attempt's lease has not expired
    cloud.store.revoke(lease)
    keeper.look([], 3 * APART)
    # Between the two checks the user resumes the order.
    assert cloud.create(order, resume=True) == DeliveryOutcome(compute)
    keeper.look([], 4 * APART)
    cloud.is_whole(compute, order)


@pytest.mark.fast
def test_a_claim_on_another_compute_is_not_released(cloud: Cloud) -> None:
    compute, other = cloud.compute(), cloud.compute()
    instance = orphan(cloud, compute)
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    keeper.look([], 0.0)
    consumer = allocations.consumer(cloud.placement, instance)
    allocations.claim_once(cloud.placement, instance, {other: SMALL}, 'a-user', 'a-project', consumer.generation)
    keeper.look([], APART)
    keeper.look([], 2 * APART)
    assert cloud.server.allocations(instance) == {other: SMALL}


# The generation that is noted before a claim is released.


class Lossy(Store):
    """A store that loses the answers to its first `times` commits."""

    times = 0

    def commit(
        self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete], fenced: bool = True
    ) -> int | None:
        written = super().commit(conditions, operations, fenced)
        self.times -= 1
        if self.times >= 0:
            raise UnknownOutcome('no answer', 'etcd')
        return written


@pytest.fixture
def lossy(cloud: Cloud) -> Iterator[Lossy]:
    with closing(Lossy(EtcdConfig((cloud.etcd.endpoint,)))) as store:
        yield store


@pytest.mark.fast
def test_the_highest_number_stays_for_an_hour(cloud: Cloud) -> None:
    first, second, third, fourth = (digits + new()[2:] for digits in ('00', '00', '00', 'f0'))
    assert highest_released(cloud.store, [first]) == 0
    note_released(cloud.store, {first: 4, second: 2, fourth: 3})
    note_released(cloud.store, {first: 3})
    note_released(cloud.store, {})
    queries = ([first], [second], [third], [fourth], [second, third], [third, fourth], [fourth, first], [])
    assert [highest_released(cloud.store, instances) for instances in queries] == [4, 2, 0, 3, 2, 3, 4, 0]
    notes = cloud.store.snapshot(keys.RELEASED).entries
    assert [instances.key for instances in notes.values() if first in instances.key] == []
    for instances in notes.values():
        assert sharing.NOTE_SECONDS - 60 < cloud.store.keep_alive(instances.lease) <= sharing.NOTE_SECONDS


@pytest.fixture
def no_garbage(junk: str) -> Iterator[None]:
    """Collect no garbage while a deeply nested value uses up the stack.

    Other tests' garbage would fail to be collected there, and pytest would blame this test.
    """
    if len(junk) > 1000:
        gc.disable()
    yield
    gc.enable()


@pytest.mark.fast
@pytest.mark.usefixtures('no_garbage')
@pytest.mark.parametrize(
    'junk', ['', 'seven', '7', '[]', '{}', '[' * 9999, '{"generations": 7}', '{"generations": {"%s": %s}}']
)
@pytest.mark.parametrize('number', ['"7"', '-1', '0', 'true', '7.0', '1' + 5000 * '0', 'null', '1e999', '{}'])
def test_what_nobody_of_ours_wrote_is_nothing(cloud: Cloud, junk: str, number: str) -> None:
    instance = new()
    cloud.etcd.put(keys.released(instance, 1), junk % (instance, number) if '%' in junk else junk)
    assert highest_released(cloud.store, [instance]) == highest_released(cloud.store, [instance, new()]) == 0
    note_released(cloud.store, {instance: 2})
    assert highest_released(cloud.store, [instance]) == 2


@pytest.mark.fast
@pytest.mark.parametrize('number', [51, 1000, 10**100])
def test_a_number_that_somebody_wrote_costs_no_call_for_each_below_it(cloud: Cloud, number: int) -> None:
    """Each generation up to the noted one costs a call: one request could take minutes."""
    compute, instance = cloud.compute(), new()
    cloud.etcd.put(keys.released(instance, 1), released_to_json({instance: number}))
    above = partial(highest_released, cloud.store, [instance])
    claim(cloud.placement, {instance: {compute: SMALL}}, 'u', 'p', lambda: None, above)
    assert allocations.consumer(cloud.placement, instance).generation == sharing.MAX_NOTED + 1 == 51


@pytest.mark.fast
def test_as_much_as_somebody_wrote_is_not_held_at_once(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of 150 MB raised a compute's memory from 106 to 269 MiB."""
    instance, real = new(), cloud.store.snapshot
    note_released(cloud.store, {instance: 4})
    reads: list[Snapshot] = []
    monkeypatch.setattr(cloud.store, 'snapshot', lambda *words, **more: reads.append(real(*words, **more)) or reads[-1])
    assert highest_released(cloud.store, [instance]) == highest_released(cloud.store, [instance, new()]) == 4
    assert [len(snapshot.entries) for snapshot in reads] == [0, 0]


@pytest.mark.fast
def test_an_answer_that_is_lost_is_asked_for_again(cloud: Cloud, lossy: Lossy) -> None:
    instance = new()
    lossy.times = sharing.NOTE_TRIES - 1
    note_released(lossy, {instance: 3})
    assert highest_released(cloud.store, [instance]) == 3
    lossy.times = sharing.NOTE_TRIES
    with pytest.raises(UnknownOutcome):
        note_released(lossy, {instance: 4})
