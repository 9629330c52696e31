"""Queues: what is put in, and what becomes of it."""

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

# Into queues, on real etcd and placement: put there once, whatever is lost on the way; and who stands behind a claim.
#
# How computes take out of them is in test_out_of_queues.py.


# Into the queue


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
    """Each into another queue, so that no two of the keys are the same."""
    instance = new()
    others = [Flavor(f'{flavor.name}-{number}', SMALL) for number in range(6)]
    for each in others:
        cloud.etcd.put(keys.flavor(each.name), flavor_to_json(each))

    def ask(asked: Flavor) -> str:
        try:
            put(cloud, request(asked, instance, name=f'n-{asked.name[-20:]}'), resume=True)
            return asked.name
        except Conflict:
            return ''

    with ThreadPoolExecutor(6) as threads:
        done = [each for each in threads.map(ask, others) if each]
    there = [key for key in cloud.etcd.keys(keys.QUEUES) if instance in key]
    assert len(there) == 1
    assert there == [keys.queue(name, instance) for name in done]
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
    put(cloud, waiting)  # and the other delivers nothing, for its key is gone
    waits(cloud, waiting)
    assert cloud.etcd.get(keys.attempt(waiting.instance)) is None


def test_a_flavor_that_was_changed_since_it_was_read(cloud: Cloud, flavor: Flavor) -> None:
    entry = read_entry(cloud.store, keys.flavor(flavor.name))
    cloud.etcd.put(entry.key, entry.value)
    with pytest.raises(Conflict, match='changed its flavor'):
        enqueue(cloud.store, request(flavor), entry.revision, None, WHO, resume=False)
    assert cloud.etcd.keys(f'{keys.QUEUES}{flavor.name}/') == []


# Who stands behind a claim (rule 4)


def test_a_mark_and_what_waits_stand_behind_a_claim(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    instance, mark = found.waiting.instance, keys.taker(found.waiting.key)
    allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    lease = cloud.store.grant(60)
    cloud.store.commit([Unchanged(mark, 0)], [Put(mark, mark_to_json(compute), lease)])
    assert instance in at_it(cloud.store)
    assert 'taker' not in at_it(cloud.store)
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (0.0, APART):
        keeper.look([], now)
    assert cloud.server.allocations(instance) == {compute: SMALL}
    # Cancelled: as long as its taker lives, it sees to it itself.
    cloud.etcd.delete(found.waiting.key)
    for now in (2 * APART, 3 * APART):
        keeper.look([], now)
    assert cloud.server.allocations(instance) == {compute: SMALL}
    cloud.store.revoke(lease)
    for now in (4 * APART, 5 * APART):
        keeper.look([], now)
    assert cloud.server.allocations(instance) == {}


def test_who_undoes_a_claim_leaves_that_of_a_taker_of_the_same_uuid(cloud: Cloud, flavor: Flavor) -> None:
    """An eschedule without --queue was overtaken at its uuid by one with it, and a compute is taking what waits."""
    compute, found = cloud.compute(), queued(cloud, flavor)
    instance = found.waiting.instance
    undone: list[bool] = []

    def meanwhile() -> str:  # claimed, and not yet moved
        undone.append(abandon(cloud.store, cloud.placement, [instance], instance, 1))
        return 'now'

    assert taker(cloud, compute, now=meanwhile).take(found)
    assert undone == [False]
    is_taken(cloud, compute, found.waiting)


def test_who_undoes_a_claim_releases_it_though_its_uuid_waits(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    instance = found.waiting.instance
    allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    assert abandon(cloud.store, cloud.placement, [instance], instance, 1)
    waits(cloud, found.waiting)


# Out of queues, on real etcd and placement: taken once, whatever is lost on the way or done meanwhile.


def test_taken_once_and_what_is_delivered_here_is_not_let_go(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    mine = taker(cloud, compute)
    assert mine.take(found)
    is_taken(cloud, compute, found.waiting)
    assert cloud.delivered(compute, found.waiting.instance).stages == {'requested': 'then', 'scheduled': 'now'}
    assert not taker(cloud, compute).take(found), 'it is there no more'
    assert not mine.let_go(found.waiting.instance)
    is_taken(cloud, compute, found.waiting)


def test_no_room(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(VCPU=1, MEMORY_MB=32, DISK_GB=1), queued(cloud, flavor)
    with pytest.raises(NoCapacity):
        taker(cloud, compute).take(found)
    waits(cloud, found.waiting)


def test_nobody_takes_of_a_flavor_that_is_not_there(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    cloud.etcd.delete(keys.flavor(flavor.name))
    assert not taker(cloud, compute).take(found)
    waits(cloud, found.waiting)


@pytest.mark.parametrize('arrives', [True, False])
@pytest.mark.parametrize('which', ['mark', 'move'])
def test_a_mark_or_a_move_that_is_lost_or_its_answer(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool, which: str
) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    key = {'mark': keys.taker(found.waiting.key), 'move': keys.request(compute, found.waiting.instance)}[which]
    etcd_proxy.lose(key.encode(), (lambda: cloud.etcd.get(key)) if arrives else None)
    assert taker(cloud, compute, store=shaky_store).take(found) is arrives
    assert etcd_proxy.has_lost
    if arrives:
        is_taken(cloud, compute, found.waiting)
    else:
        waits(cloud, found.waiting)


@pytest.mark.parametrize('arrives', [True, False])
def test_a_move_that_stays_unknown_goes_on_from_its_mark(
    cloud: Cloud, flavor: Flavor, etcd_proxy: Proxy, shaky_store: Store, arrives: bool
) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    request_key, mark_key = keys.request(compute, found.waiting.instance), keys.taker(found.waiting.key)
    arrived = (lambda: cloud.etcd.get(request_key)) if arrives else None
    etcd_proxy.lose(request_key.encode(), arrived, and_stay_away=True)
    with pytest.raises(Unreachable):
        taker(cloud, compute, store=shaky_store).take(found)
    assert cloud.server.allocations(found.waiting.instance) == {compute: SMALL}, 'nothing is released (rule 1)'
    if not arrives:
        assert taker(cloud, compute).take(found, read_entry(cloud.store, mark_key).revision)
    is_taken(cloud, compute, found.waiting)


@pytest.mark.parametrize('arrives', [True, False])
def test_a_claim_that_is_lost_or_its_answer(
    cloud: Cloud, flavor: Flavor, placement_proxy: Proxy, shaky_placement: Placement, arrives: bool
) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    put_it = f'PUT /allocations/{found.waiting.instance}'.encode()
    placement_proxy.lose(put_it, (lambda: cloud.server.allocations(found.waiting.instance)) if arrives else None)
    assert taker(cloud, compute, placement=shaky_placement).take(found)
    assert placement_proxy.has_lost
    is_taken(cloud, compute, found.waiting)


def test_a_claim_that_stays_unknown_is_released_by_its_own_compute_alone(
    cloud: Cloud, flavor: Flavor, placement_proxy: Proxy, shaky_placement: Placement
) -> None:
    here, there, found = cloud.compute(), cloud.compute(), queued(cloud, flavor)
    put_it = f'PUT /allocations/{found.waiting.instance}'.encode()
    placement_proxy.lose_answer(put_it, lambda: cloud.server.allocations(found.waiting.instance), and_stay_away=True)
    with pytest.raises(UnknownOutcome):
        taker(cloud, here, placement=shaky_placement).take(found)
    assert cloud.server.allocations(found.waiting.instance) == {here: SMALL}
    held = allocations.consumer(cloud.placement, found.waiting.instance)
    with pytest.raises(ClaimedElsewhere):
        taker(cloud, there).take(found)
    assert cloud.server.allocations(found.waiting.instance) == {here: SMALL}
    assert cloud.etcd.get(keys.taker(found.waiting.key)) is None
    assert taker(cloud, here).let_go(found.waiting.instance)
    assert taker(cloud, there).take(found)
    is_released = allocations.release_once(cloud.placement, found.waiting.instance, held)
    assert not is_released, 'a late release releases nothing'
    is_taken(cloud, there, found.waiting)


def test_a_taker_that_was_too_slow_moves_and_releases_nothing(cloud: Cloud, flavor: Flavor) -> None:
    """Frozen right before its move, until its mark is gone and another one has taken the same."""
    here, there, found = cloud.compute(), cloud.compute(), queued(cloud, flavor)

    def meanwhile() -> str:
        cloud.etcd.delete(keys.taker(found.waiting.key))
        assert taker(cloud, here).let_go(found.waiting.instance)
        assert taker(cloud, there).take(found)
        return 'now'

    assert not taker(cloud, here, now=meanwhile).take(found)
    is_taken(cloud, there, found.waiting)


def test_a_taker_that_was_too_slow_claims_nothing(cloud: Cloud, flavor: Flavor) -> None:
    """Frozen between its mark and its claim, until another one has taken the same."""
    here, there, found = cloud.compute(), cloud.compute(), queued(cloud, flavor)

    def meanwhile() -> None:
        cloud.etcd.delete(keys.taker(found.waiting.key))
        assert taker(cloud, there).take(found)

    slow = interpose(Placement(cloud.server.url), 'write', meanwhile)
    assert not taker(cloud, here, placement=slow).take(found)
    is_taken(cloud, there, found.waiting)


class Lossy(Store):
    """The cloud's etcd, which no move arrives at: those that were lost."""

    def __init__(self, cloud: Cloud) -> None:
        self.__dict__.update(cloud.store.__dict__)
        self.lost: list[tuple[Any, Any]] = []

    def commit(self, conditions: Any, operations: Any, fenced: bool = True) -> int | None:
        if any(each.key.startswith(keys.HOSTS) for each in operations):
            self.lost.append((conditions, operations))
            raise UnknownOutcome('lost', 'etcd')
        return super().commit(conditions, operations, fenced)


def test_a_move_that_arrives_late_is_none(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    store = Lossy(cloud)
    assert not taker(cloud, compute, store=store).take(found)
    assert cloud.store.commit(*store.lost[0]) is None
    waits(cloud, found.waiting)


def test_a_mark_that_is_somebody_else_s_by_now_is_enough(cloud: Cloud, flavor: Flavor) -> None:
    """The same, while the other one has marked it and not claimed yet."""
    here, found = cloud.compute(), queued(cloud, flavor)
    mark = keys.taker(found.waiting.key)

    def meanwhile() -> str:
        cloud.etcd.put(mark, mark_to_json(new()))
        return 'now'

    assert not taker(cloud, here, now=meanwhile).take(found)
    assert cloud.etcd.get(mark) is not None, 'a mark of another is not taken away'
    cloud.etcd.delete(mark)
    waits(cloud, found.waiting)


def test_cancelled_in_the_middle(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    instance = found.waiting.instance

    def meanwhile() -> str:
        assert 'taken out of its queue' in destroy(cloud.store, instance)
        return 'now'

    assert not taker(cloud, compute, now=meanwhile).take(found)
    assert [key for key in cloud.etcd.keys(keys.QUEUES) if instance in key] == []
    assert cloud.server.allocations(instance) == {}
    gone = find(cloud.store, instance)
    assert gone is not None
    assert (gone.record.state, gone.record.compute) == ('gone', '')
    with pytest.raises(Conflict, match='never used twice'):
        put(cloud, found.waiting, resume=True)


def test_taken_in_the_middle_of_being_cancelled(cloud: Cloud, flavor: Flavor) -> None:
    """The taker is faster: the same destroy goes on as that of any other instance."""
    compute, found = cloud.compute(), queued(cloud, flavor)

    def meanwhile() -> None:
        assert taker(cloud, compute).take(found)

    with connected(cloud.etcd.endpoint) as store:
        said = destroy(interpose(store, 'grant', meanwhile), found.waiting.instance)
    assert said.endswith(f'destroy accepted, {compute} carries it out')
    assert cloud.delivered(compute, found.waiting.instance).is_tombstone


class Interrupted(Placement):
    """Placement, where somebody else acts just before a release."""

    def __init__(self, url: str, act: Callable[[], object]) -> None:
        super().__init__(url)
        self.act = act

    def write(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        if body is not None and body.get('allocations') == {}:
            self.act()
        super().write(method, path, body)


def test_who_takes_what_a_dead_attempt_claimed_keeps_it(cloud: Cloud, flavor: Flavor) -> None:
    here, found = cloud.compute(), queued(cloud, flavor)
    allocations.claim_once(cloud.placement, found.waiting.instance, {here: SMALL}, 'a-user', 'a-project')
    taken: list[bool] = []
    slow = Interrupted(cloud.server.url, lambda: taken.append(taker(cloud, here).take(found)))
    assert not taker(cloud, here, placement=slow).let_go(found.waiting.instance)
    assert taken == [True]
    is_taken(cloud, here, found.waiting)


def test_nobody_else_takes_while_a_taker_gives_up(cloud: Cloud, flavor: Flavor) -> None:
    """Its move never arrives, and its mark stands until what it claimed is released."""
    here, there, found = cloud.compute(), cloud.compute(), queued(cloud, flavor)

    taken: list[bool] = []
    slow = Interrupted(cloud.server.url, lambda: taken.append(taker(cloud, there).take(found)))
    assert not taker(cloud, here, store=Lossy(cloud), placement=slow).take(found)
    assert taken == [False]
    waits(cloud, found.waiting)


def test_several_takers_at_once_take_each_once(cloud: Cloud, flavor: Flavor) -> None:
    computes = [cloud.compute(VCPU=9, MEMORY_MB=9000, DISK_GB=9) for _ in range(4)]
    found = [queued(cloud, flavor) for _ in range(12)]
    with ThreadPoolExecutor(4) as threads:
        takers = [taker(cloud, compute) for compute in computes]
        taken = list(threads.map(lambda each: [one.waiting for one in found if each.take(one)], takers))
    assert sorted(each.instance for mine in taken for each in mine) == sorted(each.waiting.instance for each in found)
    for compute, mine in zip(computes, taken, strict=True):
        for each in mine:
            is_taken(cloud, compute, each)
