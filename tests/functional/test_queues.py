"""Test how requests enter queues and how computes take them, on real etcd and placement."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ecomp.agent.host.claims import APART, ClaimKeeper
from ecomp.errors import ClaimedElsewhere, Conflict, EcompError, NoCapacity, UnknownOutcome, Unreachable
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.flavor import to_json as flavor_to_json
from ecomp.model.queue import mark_to_json
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.changing.change import destroy
from ecomp.scheduler.looking.find import find
from ecomp.scheduler.placing.claim import abandon
from ecomp.scheduler.placing.enqueue import enqueue
from ecomp.store.client import Put, Store, Unchanged, at_it
from tests.functional.cloud import SMALL, WHO, Cloud, interpose, new
from tests.functional.queueing import is_taken, put, queued, request, taker, waits
from tests.kit.proxy import Proxy
from tests.kit.store_client import connected, read_entry

# Entering a queue: exactly once, even if a request or an answer is lost.


@pytest.mark.parametrize('arrives', [True, False])
@pytest.mark.parametrize('resume', [True, False])
def test_queued_once_though_the_request_or_its_answer_is_lost(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool, resume: bool
) -> None:
    waiting = request(flavor)
    etcd_proxy.lose(waiting.key.encode(), (lambda: cloud.etcd.get(waiting.key)) if arrives else None)
    if arrives or not resume:
        put(cloud, waiting, resume, shaky_store)
    else:
        with pytest.raises(EcompError, match='not queued'):
            put(cloud, waiting, resume, shaky_store)
        assert put(cloud, waiting, resume=True)
    assert etcd_proxy.has_lost
    waits(cloud, waiting)


@pytest.mark.parametrize('arrives', [True, False])
def test_when_it_stays_unknown_the_same_uuid_goes_on(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool
) -> None:
    waiting = request(flavor)
    applied = (lambda: cloud.etcd.get(waiting.key)) if arrives else None
    etcd_proxy.lose(waiting.key.encode(), applied, and_stay_away=True)
    with pytest.raises(UnknownOutcome, match=f'--uuid {waiting.instance} goes on') as caught:
        put(cloud, waiting, store=shaky_store)
    assert caught.value.exit_code == 7
    assert put(cloud, waiting, resume=True) is not arrives
    waits(cloud, waiting)


def test_of_several_at_one_uuid_one_gets_it(cloud: Cloud, flavor: Flavor) -> None:
    """Check requests into different queues, so that no two of their keys are equal."""
    instance = new()
    flavors = [Flavor(f'{flavor.name}-{number}', SMALL) for number in range(6)]
    for target_flavor in flavors:
        cloud.etcd.put(keys.flavor(target_flavor.name), flavor_to_json(target_flavor))

    def enqueue_to(asked: Flavor) -> str:
        try:
            put(cloud, request(asked, instance, name=f'n-{asked.name[-20:]}'), resume=True)
            return asked.name
        except Conflict:
            return ''

    with ThreadPoolExecutor(6) as threads:
        winners = [winner for winner in threads.map(enqueue_to, flavors) if winner]
    queued_keys = [key for key in cloud.etcd.keys(keys.QUEUES) if instance in key]
    assert len(queued_keys) == 1
    assert queued_keys == [keys.queue(name, instance) for name in winners]
    assert cloud.etcd.get(keys.attempt(instance)) is None


def test_a_name_is_one_waiting_instance_s(cloud: Cloud, flavor: Flavor) -> None:
    name = f'n{new()[:8]}'
    first, second = request(flavor, name=name), request(flavor, name=name)
    assert put(cloud, first)
    with pytest.raises(Conflict, match=f'is the name of instance {first.instance}'):
        put(cloud, second)
    destroy(cloud.store, first.instance)
    assert put(cloud, second)
    destroy(cloud.store, second.instance)
    assert cloud.etcd.get(keys.name(name)) is None


def test_a_uuid_that_an_eschedule_is_at_is_taken_over(cloud: Cloud, flavor: Flavor) -> None:
    waiting = request(flavor)
    cloud.etcd.put(keys.attempt(waiting.instance), '{}')
    put(cloud, waiting)  # deletes the other attempt's key, so the other delivers nothing
    waits(cloud, waiting)
    assert cloud.etcd.get(keys.attempt(waiting.instance)) is None


def test_a_flavor_that_was_changed_since_it_was_read(cloud: Cloud, flavor: Flavor) -> None:
    entry = read_entry(cloud.store, keys.flavor(flavor.name))
    cloud.etcd.put(entry.key, entry.value)
    with pytest.raises(Conflict, match='changed its flavor'):
        enqueue(cloud.store, request(flavor), entry.revision, None, WHO, resume=False)
    assert cloud.etcd.keys(f'{keys.QUEUES}{flavor.name}/') == []


# Which keys protect a claim (rule 4)


def test_a_mark_and_what_waits_stand_behind_a_claim(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    instance, taker_key = place.waiting.instance, keys.taker(place.waiting.key)
    allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    lease = cloud.store.grant(60)
    cloud.store.commit([Unchanged(taker_key, 0)], [Put(taker_key, mark_to_json(compute), lease)])
    assert instance in at_it(cloud.store)
    assert 'taker' not in at_it(cloud.store)
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (0.0, APART):
        keeper.look([], now)
    assert cloud.server.allocations(instance) == {compute: SMALL}
    # After a cancellation, a live taker releases the claim itself.
    cloud.etcd.delete(place.waiting.key)
    for now in (2 * APART, 3 * APART):
        keeper.look([], now)
    assert cloud.server.allocations(instance) == {compute: SMALL}
    cloud.store.revoke(lease)
    for now in (4 * APART, 5 * APART):
        keeper.look([], now)
    assert cloud.server.allocations(instance) == {}


def test_who_undoes_a_claim_leaves_that_of_a_taker_of_the_same_uuid(cloud: Cloud, flavor: Flavor) -> None:
    """Check an eschedule without --queue that one with --queue overtook at the same uuid.

    A compute is taking the queued request at that moment.
    """
    compute, place = cloud.compute(), queued(cloud, flavor)
    instance = place.waiting.instance
    outcomes: list[bool] = []

    def abandon_now() -> str:  # between claim and move
        outcomes.append(abandon(cloud.store, cloud.placement, [instance], instance, 1))
        return 'now'

    assert taker(cloud, compute, now=abandon_now).take(place)
    assert outcomes == [False]
    is_taken(cloud, compute, place.waiting)


def test_who_undoes_a_claim_releases_it_though_its_uuid_waits(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    instance = place.waiting.instance
    allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    assert abandon(cloud.store, cloud.placement, [instance], instance, 1)
    waits(cloud, place.waiting)


# Leaving a queue: taken exactly once, despite lost messages and concurrent changes.


def test_taken_once_and_what_is_delivered_here_is_not_let_go(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    first_taker = taker(cloud, compute)
    assert first_taker.take(place)
    is_taken(cloud, compute, place.waiting)
    assert cloud.delivered(compute, place.waiting.instance).stages == {'requested': 'then', 'scheduled': 'now'}
    assert not taker(cloud, compute).take(place), 'it is there no more'
    assert not first_taker.let_go(place.waiting.instance)
    is_taken(cloud, compute, place.waiting)


def test_no_room(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(VCPU=1, MEMORY_MB=32, DISK_GB=1), queued(cloud, flavor)
    with pytest.raises(NoCapacity):
        taker(cloud, compute).take(place)
    waits(cloud, place.waiting)


def test_nobody_takes_of_a_flavor_that_is_not_there(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    cloud.etcd.delete(keys.flavor(flavor.name))
    assert not taker(cloud, compute).take(place)
    waits(cloud, place.waiting)


@pytest.mark.parametrize('arrives', [True, False])
@pytest.mark.parametrize('which', ['mark', 'move'])
def test_a_mark_or_a_move_that_is_lost_or_its_answer(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool, which: str
) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    key = {'mark': keys.taker(place.waiting.key), 'move': keys.request(compute, place.waiting.instance)}[which]
    etcd_proxy.lose(key.encode(), (lambda: cloud.etcd.get(key)) if arrives else None)
    assert taker(cloud, compute, store=shaky_store).take(place) is arrives
    assert etcd_proxy.has_lost
    if arrives:
        is_taken(cloud, compute, place.waiting)
    else:
        waits(cloud, place.waiting)


@pytest.mark.parametrize('arrives', [True, False])
def test_a_move_that_stays_unknown_goes_on_from_its_mark(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool
) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    request_key, mark_key = keys.request(compute, place.waiting.instance), keys.taker(place.waiting.key)
    arrived = (lambda: cloud.etcd.get(request_key)) if arrives else None
    etcd_proxy.lose(request_key.encode(), arrived, and_stay_away=True)
    with pytest.raises(Unreachable):
        taker(cloud, compute, store=shaky_store).take(place)
    assert cloud.server.allocations(place.waiting.instance) == {compute: SMALL}, 'nothing is released (rule 1)'
    if not arrives:
        assert taker(cloud, compute).take(place, read_entry(cloud.store, mark_key).revision)
    is_taken(cloud, compute, place.waiting)


@pytest.mark.parametrize('arrives', [True, False])
def test_a_claim_that_is_lost_or_its_answer(
    cloud: Cloud, flavor: Flavor, placement_proxy: Proxy, shaky_placement: Placement, arrives: bool
) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    put_it = f'PUT /allocations/{place.waiting.instance}'.encode()
    placement_proxy.lose(put_it, (lambda: cloud.server.allocations(place.waiting.instance)) if arrives else None)
    assert taker(cloud, compute, placement=shaky_placement).take(place)
    assert placement_proxy.has_lost
    is_taken(cloud, compute, place.waiting)


def test_a_claim_that_stays_unknown_is_released_by_its_own_compute_alone(
    cloud: Cloud, flavor: Flavor, placement_proxy: Proxy, shaky_placement: Placement
) -> None:
    compute, other, place = cloud.compute(), cloud.compute(), queued(cloud, flavor)
    put_it = f'PUT /allocations/{place.waiting.instance}'.encode()
    placement_proxy.lose_answer(put_it, lambda: cloud.server.allocations(place.waiting.instance), and_stay_away=True)
    with pytest.raises(UnknownOutcome):
        taker(cloud, compute, placement=shaky_placement).take(place)
    assert cloud.server.allocations(place.waiting.instance) == {compute: SMALL}
    consumer = allocations.consumer(cloud.placement, place.waiting.instance)
    with pytest.raises(ClaimedElsewhere):
        taker(cloud, other).take(place)
    assert cloud.server.allocations(place.waiting.instance) == {compute: SMALL}
    assert cloud.etcd.get(keys.taker(place.waiting.key)) is None
    assert taker(cloud, compute).let_go(place.waiting.instance)
    assert taker(cloud, other).take(place)
    is_released = allocations.release_once(cloud.placement, place.waiting.instance, consumer)
    assert not is_released, 'a late release releases nothing'
    is_taken(cloud, other, place.waiting)


def test_a_taker_that_was_too_slow_moves_and_releases_nothing(cloud: Cloud, flavor: Flavor) -> None:
    compute, other, place = cloud.compute(), cloud.compute(), queued(cloud, flavor)

    def let_other_take() -> str:
        cloud.etcd.delete(keys.taker(place.waiting.key))
        assert taker(cloud, compute).let_go(place.waiting.instance)
        assert taker(cloud, other).take(place)
        return 'now'

    assert not taker(cloud, compute, now=let_other_take).take(place)
    is_taken(cloud, other, place.waiting)


def test_a_taker_that_was_too_slow_claims_nothing(cloud: Cloud, flavor: Flavor) -> None:
    compute, other, place = cloud.compute(), cloud.compute(), queued(cloud, flavor)

    def let_other_take() -> None:
        cloud.etcd.delete(keys.taker(place.waiting.key))
        assert taker(cloud, other).take(place)

    slow = interpose(Placement(cloud.server.url), 'write', let_other_take)
    assert not taker(cloud, compute, placement=slow).take(place)
    is_taken(cloud, other, place.waiting)


class Lossy(Store):
    """A store of the cloud's etcd that loses all moves and collects them in `lost`."""

    def __init__(self, cloud: Cloud) -> None:
        self.__dict__.update(cloud.store.__dict__)
        self.lost: list[tuple[Any, Any]] = []

    def commit(self, conditions: Any, operations: Any, fenced: bool = True) -> int | None:
        if any(operation.key.startswith(keys.HOSTS) for operation in operations):
            self.lost.append((conditions, operations))
            raise UnknownOutcome('lost', 'etcd')
        return super().commit(conditions, operations, fenced)


def test_a_move_that_arrives_late_is_none(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    store = Lossy(cloud)
    assert not taker(cloud, compute, store=store).take(place)
    assert cloud.store.commit(*store.lost[0]) is None
    waits(cloud, place.waiting)


def test_a_mark_that_is_somebody_else_s_by_now_is_enough(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    taker_key = keys.taker(place.waiting.key)

    def replace_taker() -> str:
        cloud.etcd.put(taker_key, mark_to_json(new()))
        return 'now'

    assert not taker(cloud, compute, now=replace_taker).take(place)
    assert cloud.etcd.get(taker_key) is not None, 'a mark of another is not taken away'
    cloud.etcd.delete(taker_key)
    waits(cloud, place.waiting)


def test_cancelled_in_the_middle(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    instance = place.waiting.instance

    def cancel() -> str:
        assert 'taken out of its queue' in destroy(cloud.store, instance)
        return 'now'

    assert not taker(cloud, compute, now=cancel).take(place)
    assert [key for key in cloud.etcd.keys(keys.QUEUES) if instance in key] == []
    assert cloud.server.allocations(instance) == {}
    cancelled = find(cloud.store, instance)
    assert cancelled is not None
    assert (cancelled.record.state, cancelled.record.compute) == ('gone', '')
    with pytest.raises(Conflict, match='never used twice'):
        put(cloud, place.waiting, resume=True)


def test_taken_in_the_middle_of_being_cancelled(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)

    def take_now() -> None:
        assert taker(cloud, compute).take(place)

    with connected(cloud.etcd.endpoint) as store:
        message = destroy(interpose(store, 'grant', take_now), place.waiting.instance)
    assert message.endswith(f'destroy accepted, {compute} carries it out')
    assert cloud.delivered(compute, place.waiting.instance).is_tombstone


class Interrupted(Placement):
    """A placement client that calls `act` just before each release."""

    def __init__(self, url: str, act: Callable[[], object]) -> None:
        super().__init__(url)
        self.act = act

    def write(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        if body is not None and body.get('allocations') == {}:
            self.act()
        super().write(method, path, body)


def test_who_takes_what_a_dead_attempt_claimed_keeps_it(cloud: Cloud, flavor: Flavor) -> None:
    compute, place = cloud.compute(), queued(cloud, flavor)
    allocations.claim_once(cloud.placement, place.waiting.instance, {compute: SMALL}, 'a-user', 'a-project')
    outcomes: list[bool] = []
    slow = Interrupted(cloud.server.url, lambda: outcomes.append(taker(cloud, compute).take(place)))
    assert not taker(cloud, compute, placement=slow).let_go(place.waiting.instance)
    assert outcomes == [True]
    is_taken(cloud, compute, place.waiting)


def test_nobody_else_takes_while_a_taker_gives_up(cloud: Cloud, flavor: Flavor) -> None:
    """Check that the taker key of a lost move stays until its claim is released."""
    compute, other, place = cloud.compute(), cloud.compute(), queued(cloud, flavor)

    outcomes: list[bool] = []
    slow = Interrupted(cloud.server.url, lambda: outcomes.append(taker(cloud, other).take(place)))
    assert not taker(cloud, compute, store=Lossy(cloud), placement=slow).take(place)
    assert outcomes == [False]
    waits(cloud, place.waiting)


def test_several_takers_at_once_take_each_once(cloud: Cloud, flavor: Flavor) -> None:
    computes = [cloud.compute(VCPU=9, MEMORY_MB=9000, DISK_GB=9) for _ in range(4)]
    places = [queued(cloud, flavor) for _ in range(12)]
    with ThreadPoolExecutor(4) as threads:
        takers = [taker(cloud, compute) for compute in computes]
        shares = list(threads.map(lambda each: [place.waiting for place in places if each.take(place)], takers))
    assert sorted(entry.instance for share in shares for entry in share) == sorted(
        entry.waiting.instance for entry in places
    )
    for compute, share in zip(computes, shares, strict=True):
        for entry in share:
            is_taken(cloud, compute, entry)
