"""Claims that moved, are kept, or were released."""

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

# Claims are moved, and not given away from under somebody: generations that begin anew, and who reads what first.
#
# Each of these orders lost a claim, or made a uuid unusable, in 1.0.0.


ROOM_FOR_ONE = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}


class Between(Placement):
    """Placement, where something happens once before a request is sent, or in place of it (`lost`)."""

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
    """Placement makes the consumer, and then finds that there is no such provider."""
    with pytest.raises(PlacementRefusal):
        allocations.claim_once(cloud.placement, instance, {new(): SMALL}, 'a-user', 'a-project')


def make_placing_store(cloud: Cloud, do: Callable[[], object]) -> Store:
    """Make a store where this happens once, before it is read who is placing."""
    store = Store(EtcdConfig((cloud.etcd.endpoint,)))
    return interpose(store, 'snapshot', do, lambda prefix, *_: prefix == keys.ATTEMPTS)


def deliver_meanwhile(cloud: Cloud, compute: str, wanted: SetOrder) -> Store:
    """Claim as its eschedule does, which does the last of it at that store: the attempt goes, the request is there."""
    lease = cloud.store.grant(60)
    at_it(cloud, wanted, lease)
    allocations.claim_once(cloud.placement, wanted.instance, {compute: SMALL}, 'a-user', 'a-project')
    who = {'user_id': 'a-user', 'project_id': 'a-project', 'query': 'query', 'stages': {'requested': 'now'}}
    request = Request(wanted.instance, {compute: SMALL}, image='image', **who)

    def deliver() -> None:
        cloud.store.commit([], [Put(keys.request(compute, wanted.instance), to_json(request))])
        cloud.store.revoke(lease)

    return make_placing_store(cloud, deliver)


def test_a_uuid_whose_consumer_was_left_empty_is_placed_all_the_same(cloud: Cloud) -> None:
    """A1"""
    compute, wanted = cloud.make_order()
    left_empty(cloud, wanted.instance)
    assert cloud.create(wanted, resume=True) == DeliveryOutcome(compute)
    cloud.is_whole(compute, wanted)


def test_a_set_with_one_that_was_left_empty_is_claimed(cloud: Cloud) -> None:
    """A1"""
    compute = cloud.compute(VCPU=3, MEMORY_MB=512, DISK_GB=10)
    instances = [new() for _ in range(3)]
    left_empty(cloud, instances[1])
    claimer = cloud.claimer()
    assert claimer.claim_what_fits({each: cloud.candidate(compute) for each in instances}) == set(instances)
    assert cloud.server.consumers(compute).keys() == set(instances)


def test_one_that_is_changed_all_the_time_is_not_said_to_find_no_room(cloud: Cloud, between: Between) -> None:
    """A1"""
    compute, instance = cloud.compute(), new()

    def meddle() -> None:
        held = allocations.consumer(cloud.placement, instance)
        allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project', held.generation)
        between.then('PUT', f'/allocations/{instance}', meddle)

    meddle()
    with pytest.raises(Exception, match='changed by somebody else all the time') as refused:
        cloud.claimer(between).claim_what_fits({instance: cloud.candidate(compute)})
    assert not isinstance(refused.value, NoCapacity)
    assert getattr(refused.value, 'exit_code', None) == 5


def test_a_candidate_that_was_forgotten_meanwhile_is_passed_over(cloud: Cloud) -> None:
    there, gone = cloud.compute(), new()
    cloud.etcd.put(keys.compute(gone), '{"token": "x"}')
    for instance, compute in ((new(), gone), (new(), there)):
        claimed = cloud.claimer().claim_what_fits({instance: cloud.candidate(compute)})
        assert claimed == ({instance} if compute == there else set())


@pytest.mark.parametrize('third', [False, True])
def test_a_late_release_of_the_first_one_meets_another_generation(cloud: Cloud, third: bool) -> None:
    """A2: all the room there is, is what the first one claimed and left; and a third one may release it between."""
    compute, wanted = cloud.make_order(**ROOM_FOR_ONE)
    allocations.claim_once(cloud.placement, wanted.instance, {compute: SMALL}, 'a-user', 'a-project')
    held = allocations.consumer(cloud.placement, wanted.instance)
    assert allocations.candidates(cloud.placement, wanted.query).candidates == []
    if third:
        assert abandon(cloud.store, cloud.placement, [wanted.instance], wanted.instance, -1)
    assert cloud.create(wanted, resume=True) == DeliveryOutcome(compute)
    assert not allocations.release_once(cloud.placement, wanted.instance, held)
    cloud.is_whole(compute, wanted)


@pytest.mark.parametrize('query', [RESOURCES.replace('64', '32'), f'{RESOURCES}&required=HW_CPU_X86_AVX2'])
def test_what_was_claimed_for_another_query_is_not_taken_for_this_one_s(cloud: Cloud, query: str) -> None:
    compute = cloud.compute(**ROOM_FOR_ONE)
    wanted = cloud.wanted(compute, resources=query)
    allocations.claim_once(cloud.placement, wanted.instance, {compute: SMALL}, 'a-user', 'a-project')
    with pytest.raises(ClaimedElsewhere):
        cloud.create(wanted, resume=True)
    # The compute that it is on releases it, if nobody stands behind it.
    assert cloud.server.allocations(wanted.instance) == {compute: SMALL}
    assert cloud.etcd.get(keys.attempt(wanted.instance)) is None


def test_a_lost_claim_beside_an_equal_one_moves_it(cloud: Cloud, between: Between) -> None:
    """A3"""
    compute, instance = cloud.compute(), new()
    allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    held = allocations.consumer(cloud.placement, instance)
    between.then('PUT', f'/allocations/{instance}', lost=True)
    claim(between, {instance: {compute: SMALL}}, 'a-user', 'a-project', lambda: None)
    assert not allocations.release_once(cloud.placement, instance, held)
    assert cloud.server.consumers(compute).keys() == {instance}


def test_no_room_beside_another_eschedule_of_the_same_uuid_is_not_called_so(cloud: Cloud) -> None:
    """A19: the room that is missing is what the other one has just claimed"""
    compute, wanted = cloud.make_order(**ROOM_FOR_ONE)
    key, text = keys.attempt(wanted.instance), json.dumps({'version': 1, 'instances': [wanted.instance]})

    def other() -> None:
        ours = read_entry(cloud.store, key)
        assert cloud.store.commit([Unchanged(key, ours.revision)], [Put(key, text, ours.lease)])
        allocations.claim_once(cloud.placement, wanted.instance, {compute: SMALL}, 'a-user', 'a-project')

    with pytest.raises(Conflict, match='another eschedule took it over'):
        cloud.create(wanted, resume=True, store=make_placing_store(cloud, other))
    assert cloud.server.consumers(compute).keys() == {wanted.instance}


def test_what_an_earlier_one_releases_once_placement_was_asked_is_room(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order(**ROOM_FOR_ONE)
    allocations.claim_once(cloud.placement, wanted.instance, {compute: SMALL}, 'a-user', 'a-project')
    offer = allocations.candidates(cloud.placement, wanted.query)
    assert offer.candidates == []
    held = allocations.consumer(cloud.placement, wanted.instance)
    assert allocations.release_once(cloud.placement, wanted.instance, held)
    assert cloud.create(wanted, resume=True, offer=offer) == DeliveryOutcome(compute)
    cloud.is_whole(compute, wanted)


@pytest.mark.parametrize('count', [1, 2])
def test_a_release_that_is_sent_late_meets_no_claim_made_since(cloud: Cloud, count: int) -> None:
    """A20: whoever read the number stood still while the claim was released, and made anew by somebody else"""
    compute = cloud.compute(VCPU=9, MEMORY_MB=900, DISK_GB=9)
    instances = [new() for _ in range(count)]

    def claim_all() -> dict[str, allocations.Consumer]:
        wanted = {each: {compute: SMALL} for each in instances}
        claim(cloud.placement, wanted, 'u', 'p', lambda: None, partial(highest_released, cloud.store, instances))
        return {each: allocations.consumer(cloud.placement, each) for each in instances}

    reads = [claim_all()]
    for _ in range(3):
        assert abandon(cloud.store, cloud.placement, instances, instances[0], -1)
        reads.append(claim_all())
        for read in reads[:-1]:
            assert [allocations.release_once(cloud.placement, *each) for each in read.items()] == [False] * count
        assert cloud.server.consumers(compute).keys() == set(instances)
    assert {read[each].generation for read in reads for each in instances} == {1, 2, 3, 4}


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
    compute, asked = cloud.compute(VCPU=50, MEMORY_MB=5000, DISK_GB=50), list[int]()
    instances = [new() for _ in range(2 * allocations.TOGETHER + 1)]
    claimed = {each: {compute: SMALL} for each in instances}
    allocations.claim_set_once(cloud.placement, claimed, 'a-user', 'a-project', {})
    kept = instances[0]

    def wanted(holding: Mapping[str, allocations.Consumer]) -> set[str]:
        asked.append(len(holding))
        return {kept} & holding.keys()

    done = allocations.release(cloud.placement, [*instances, new()], wanted, partial(note_released, cloud.store))
    assert asked == [allocations.TOGETHER, allocations.TOGETHER, 1]
    assert [each for each, gone in done.items() if not gone] == [kept]
    assert cloud.server.consumers(compute).keys() == {kept}


def test_the_claim_keeper_leaves_what_was_taken_over_while_it_looked(cloud: Cloud, between: Between) -> None:
    """A4"""
    compute, wanted = cloud.make_order()
    allocations.claim_once(cloud.placement, wanted.instance, {compute: SMALL}, 'a-user', 'a-project')
    keeper = ClaimKeeper(compute, cloud.store, between)
    keeper.look([], 0.0)
    between.then('GET', f'/allocations/{wanted.instance}', lambda: cloud.create(wanted, resume=True))
    keeper.look([], APART)
    cloud.is_whole(compute, wanted)


def test_who_asked_before_it_was_disabled_asks_again(cloud: Cloud) -> None:
    """A6: asked, and frozen until the compute is said to be empty"""
    compute, wanted = cloud.make_order()
    offer = allocations.candidates(cloud.placement, wanted.query)
    disable(cloud.placement, compute, compute)
    drained(cloud.store, cloud.placement, compute, compute, Deadline(60), lambda _: None)
    with pytest.raises(NoCapacity):
        cloud.create(wanted, offer=offer)
    cloud.has_nothing_of(wanted, compute)


def test_a_drain_waits_for_who_has_just_asked(cloud: Cloud) -> None:
    """A6: asked, and announced after the drain looked first"""
    compute, wanted = cloud.make_order()
    offer = allocations.candidates(cloud.placement, wanted.query)
    disable(cloud.placement, compute, compute)
    waited: list[str] = []

    def tell(what: str) -> None:
        if not waited:
            assert time.monotonic() - offer.asked < FRESH
            assert cloud.create(wanted, offer=offer) == DeliveryOutcome(compute)
        waited.append(what)
        if 'to go' in what:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        drained(cloud.store, cloud.placement, compute, compute, Deadline(60), tell)


def test_a_drain_waits_for_who_has_just_marked_a_waiting_request(cloud: Cloud) -> None:
    """A6: one that had looked at its compute just before, and does not ask of its traits once more"""
    compute = cloud.compute()
    mark = keys.taker(keys.queue('small', new()))
    disable(cloud.placement, compute, compute)
    began = time.monotonic()
    waited: list[str] = []

    def tell(what: str) -> None:
        waited.append(what)
        if len(waited) == 1:
            cloud.store.commit([], [Put(mark, mark_to_json(compute), cloud.store.grant(60))])
            assert time.monotonic() - began < FRESH
        # Its claim takes as long as placement does.
        if time.monotonic() - began > 2 * FRESH:
            cloud.store.commit([], [Delete(mark)])

    drained(cloud.store, cloud.placement, compute, compute, Deadline(60), tell)
    assert cloud.store.get(mark) is None


def test_forget_leaves_what_is_delivered_while_it_looks(cloud: Cloud) -> None:
    """A7"""
    compute, wanted = cloud.make_order(alive=False)
    store = deliver_meanwhile(cloud, compute, wanted)
    with pytest.raises(Exception, match=f'compute {compute} is not forgotten') as refused:
        forget(store, cloud.placement, compute, compute, lambda: 'now', lambda _: None, fenced=True)
    assert not isinstance(refused.value, NotFound)
    assert cloud.server.consumers(compute).keys() == {wanted.instance}


def test_a_dead_taker_is_forgotten_with_its_claim_for_what_still_waits(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order(alive=False)
    cloud.etcd.put(f'{keys.QUEUES}small/{wanted.instance}', '{}')
    allocations.claim_once(cloud.placement, wanted.instance, {compute: SMALL}, 'a-user', 'a-project')
    with pytest.raises(Conflict, match='--fenced'):
        forget(cloud.store, cloud.placement, compute, compute, lambda: 'now', lambda _: None)
    forget(cloud.store, cloud.placement, compute, compute, lambda: 'now', lambda _: None, fenced=True)
    assert cloud.server.allocations(wanted.instance) == {}
    assert cloud.etcd.get(f'{keys.QUEUES}small/{wanted.instance}') is not None


def test_a_repair_leaves_what_is_delivered_while_it_looks(cloud: Cloud) -> None:
    """A8"""
    compute, wanted = cloud.make_order()
    store = deliver_meanwhile(cloud, compute, wanted)
    assert 'it has changed' in repaired(store, cloud.placement, wanted.instance)
    assert cloud.server.consumers(compute).keys() == {wanted.instance}


# Rule 4 on real etcd and placement: the computes release what nobody stands behind, and nothing else.


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
    being_asked, of_a_set, delivered, with_a_guest, queued, nobody_s = (orphan(cloud, compute) for _ in range(6))
    lease = cloud.store.grant(60)
    cloud.store.commit([], [Put(keys.attempt(being_asked), 'unreadable', lease)])
    cloud.store.commit([], [Put(keys.attempt(new()), json.dumps({'instances': [of_a_set]}), lease)])
    cloud.store.commit([], [Put(keys.request(compute, delivered), '{}')])
    cloud.store.commit([], [Put(f'{keys.QUEUES}small/{queued}', '{}')])
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    keeper.look([with_a_guest], 0.0)
    keeper.look([with_a_guest], APART)
    assert cloud.server.consumers(compute).keys() == {being_asked, of_a_set, delivered, with_a_guest, queued}
    # Whoever was at it is gone: from now on it is counted anew.
    cloud.store.revoke(lease)
    keeper.look([with_a_guest], APART + 1)
    assert being_asked in cloud.server.consumers(compute)
    keeper.look([with_a_guest], 2 * APART + 1)
    assert cloud.server.consumers(compute).keys() == {delivered, with_a_guest, queued}
    assert nobody_s not in cloud.server.consumers(compute)


@pytest.mark.fast
def test_a_killed_eschedule_s_claim_goes_and_its_uuid_can_go_on(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order()
    lease = cloud.store.grant(60)
    at_it(cloud, wanted, lease)
    claims.Claimer(cloud.placement, 'a-user', 'a-project', lambda: True).claim({wanted.instance: {compute: SMALL}})
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (0.0, APART, 2 * APART):
        keeper.look([], now)
    assert wanted.instance in cloud.server.consumers(compute)  # its lease lives
    cloud.store.revoke(lease)
    keeper.look([], 3 * APART)
    # Between the two looks the user asks again.
    assert cloud.create(wanted, resume=True) == DeliveryOutcome(compute)
    keeper.look([], 4 * APART)
    cloud.is_whole(compute, wanted)


@pytest.mark.fast
def test_a_claim_on_another_compute_is_not_released(cloud: Cloud) -> None:
    here, there = cloud.compute(), cloud.compute()
    instance = orphan(cloud, here)
    keeper = ClaimKeeper(here, cloud.store, cloud.placement)
    keeper.look([], 0.0)
    held = allocations.consumer(cloud.placement, instance)
    allocations.claim_once(cloud.placement, instance, {there: SMALL}, 'a-user', 'a-project', held.generation)
    keeper.look([], APART)
    keeper.look([], 2 * APART)
    assert cloud.server.allocations(instance) == {there: SMALL}


# What is noted of a claim before it is released.


class Lossy(Store):
    """An etcd whose first `times` answers are lost."""

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
    one, other, third, fourth = (digits + new()[2:] for digits in ('00', '00', '00', 'f0'))
    assert highest_released(cloud.store, [one]) == 0
    note_released(cloud.store, {one: 4, other: 2, fourth: 3})
    note_released(cloud.store, {one: 3})
    note_released(cloud.store, {})
    asked = ([one], [other], [third], [fourth], [other, third], [third, fourth], [fourth, one], [])
    assert [highest_released(cloud.store, each) for each in asked] == [4, 2, 0, 3, 2, 3, 4, 0]
    found = cloud.store.snapshot(keys.RELEASED).entries
    assert [each.key for each in found.values() if one in each.key] == []
    for each in found.values():
        assert sharing.NOTE_SECONDS - 60 < cloud.store.keep_alive(each.lease) <= sharing.NOTE_SECONDS


@pytest.fixture
def no_garbage(junk: str) -> Iterator[None]:
    """What other tests left is not collected just where a deep value has no room for it: pytest takes that for ours."""
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
    """A compute was at one request for minutes, and at no other one of its queues."""
    compute, instance = cloud.compute(), new()
    cloud.etcd.put(keys.released(instance, 1), released_to_json({instance: number}))
    above = partial(highest_released, cloud.store, [instance])
    claim(cloud.placement, {instance: {compute: SMALL}}, 'u', 'p', lambda: None, above)
    assert allocations.consumer(cloud.placement, instance).generation == sharing.MAX_NOTED + 1 == 51


@pytest.mark.fast
def test_as_much_as_somebody_wrote_is_not_held_at_once(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """150 MB there took a compute from 106 to 269 MiB."""
    instance, real = new(), cloud.store.snapshot
    note_released(cloud.store, {instance: 4})
    held: list[Snapshot] = []
    monkeypatch.setattr(cloud.store, 'snapshot', lambda *words, **more: held.append(real(*words, **more)) or held[-1])
    assert highest_released(cloud.store, [instance]) == highest_released(cloud.store, [instance, new()]) == 4
    assert [len(each.entries) for each in held] == [0, 0]


@pytest.mark.fast
def test_an_answer_that_is_lost_is_asked_for_again(cloud: Cloud, lossy: Lossy) -> None:
    instance = new()
    lossy.times = sharing.NOTE_TRIES - 1
    note_released(lossy, {instance: 3})
    assert highest_released(cloud.store, [instance]) == 3
    lossy.times = sharing.NOTE_TRIES
    with pytest.raises(UnknownOutcome):
        note_released(lossy, {instance: 4})
