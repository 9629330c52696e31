"""Queues on real etcd and placement: put there once, taken once, whatever is lost on the way or done meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ecomp.agent.host.claims import APART, ClaimKeeper
from ecomp.agent.instance.surroundings import ControlPlane
from ecomp.agent.queue.taking import Taker
from ecomp.errors import Conflict, EcompError, NoCapacity, UnknownOutcome, Unreachable
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.flavor import to_json as flavor_to_json
from ecomp.model.pull import Place
from ecomp.model.queue import QueueEntry, mark_to_json
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.changing.destroy import destroy
from ecomp.scheduler.looking.find import find
from ecomp.scheduler.placing.claim import abandon
from ecomp.scheduler.placing.enqueue import enqueue
from ecomp.store.client import Put, Store, Unchanged
from ecomp.store.requests import at_it
from tests.functional.cloud import IMAGE, SMALL, WHO, Cloud, new
from tests.kit.proxy import Proxy


@pytest.fixture
def flavor(cloud: Cloud) -> Iterator[Flavor]:
    """A flavor of the test's own, and its queue."""
    made = Flavor(f'f{new()}', SMALL)
    cloud.etcd.put(keys.flavor(made.name), flavor_to_json(made))
    yield made
    # And those that a test named after it.
    for key in (*cloud.etcd.keys(keys.flavor(made.name)), *cloud.etcd.keys(f'{keys.QUEUES}{made.name}')):
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
    entry = cloud.store.get(keys.flavor(waiting.flavor.name))
    assert entry is not None
    return enqueue(store or cloud.store, waiting, entry.revision, None, WHO, resume)


def queued(cloud: Cloud, flavor: Flavor) -> Place:
    """One in the queue."""
    waiting = request(flavor)
    assert put(cloud, waiting)
    return place(cloud, waiting)


def place(cloud: Cloud, waiting: QueueEntry) -> Place:
    entry = cloud.store.get(waiting.key)
    assert entry is not None
    return Place(entry.revision, waiting)


def taker(
    cloud: Cloud,
    compute: str,
    store: Store | None = None,
    placement: Placement | None = None,
    now: Callable[[], str] = lambda: 'now',
) -> Taker:
    """Takes for a compute, on a lease of its own."""
    lease = cloud.store.grant(60)
    return Taker(ControlPlane(compute, store or cloud.store, placement or cloud.placement, now), lambda: lease)


def is_taken(cloud: Cloud, compute: str, waiting: QueueEntry) -> None:
    """It is this compute's, once, and nothing of it is in the queue."""
    instance = waiting.instance
    assert cloud.delivered(compute, instance).allocations == {compute: SMALL}
    there = [key for key in cloud.etcd.keys(keys.HOSTS) if keys.last(key) == instance]
    assert there == [keys.request(compute, instance)]
    assert cloud.server.allocations(instance) == {compute: SMALL}
    assert [key for key in cloud.etcd.keys(keys.QUEUES) if instance in key] == []


def waits(cloud: Cloud, waiting: QueueEntry) -> None:
    """It is in its queue, nobody is at it, and nothing is held for it."""
    assert [key for key in cloud.etcd.keys(keys.QUEUES) if waiting.instance in key] == [waiting.key]
    assert [key for key in cloud.etcd.keys(keys.HOSTS) if keys.last(key) == waiting.instance] == []
    assert cloud.server.allocations(waiting.instance) == {}
    assert cloud.etcd.get(keys.attempt(waiting.instance)) is None


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
    entry = cloud.store.get(keys.flavor(flavor.name))
    assert entry is not None
    cloud.etcd.put(entry.key, entry.value)
    with pytest.raises(Conflict, match='changed its flavor'):
        enqueue(cloud.store, request(flavor), entry.revision, None, WHO, resume=False)
    assert cloud.etcd.keys(f'{keys.QUEUES}{flavor.name}/') == []


# Out of it


def test_taken(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    assert taker(cloud, compute).take(found)
    is_taken(cloud, compute, found.waiting)
    assert cloud.delivered(compute, found.waiting.instance).stages == {'requested': 'then', 'scheduled': 'now'}
    assert not taker(cloud, compute).take(found), 'it is there no more'
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
        mark = cloud.store.get(mark_key)
        assert mark is not None
        assert taker(cloud, compute).take(found, mark.revision)
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


def test_a_claim_that_stays_unknown_is_moved_by_the_next_taker(
    cloud: Cloud, flavor: Flavor, placement_proxy: Proxy, shaky_placement: Placement
) -> None:
    here, there, found = cloud.compute(), cloud.compute(), queued(cloud, flavor)
    put_it = f'PUT /allocations/{found.waiting.instance}'.encode()
    placement_proxy.lose_answer(put_it, lambda: cloud.server.allocations(found.waiting.instance), and_stay_away=True)
    with pytest.raises(UnknownOutcome):
        taker(cloud, here, placement=shaky_placement).take(found)
    assert cloud.server.allocations(found.waiting.instance) == {here: SMALL}
    held = allocations.consumer(cloud.placement, found.waiting.instance)
    assert taker(cloud, there).take(found)
    assert not allocations.release(cloud.placement, found.waiting.instance, held), 'a late release releases nothing'
    assert not taker(cloud, here).let_go(found.waiting.instance)
    is_taken(cloud, there, found.waiting)


def test_a_taker_that_was_too_slow_moves_and_releases_nothing(cloud: Cloud, flavor: Flavor) -> None:
    """Frozen right before its move, until its mark is gone and another one has taken the same."""
    here, there, found = cloud.compute(), cloud.compute(), queued(cloud, flavor)

    def meanwhile() -> str:
        cloud.etcd.delete(keys.taker(found.waiting.key))
        assert taker(cloud, there).take(found)
        return 'now'

    assert not taker(cloud, here, now=meanwhile).take(found)
    is_taken(cloud, there, found.waiting)


def test_a_taker_that_was_too_slow_claims_nothing(cloud: Cloud, flavor: Flavor) -> None:
    """Frozen between its mark and its claim, until another one has taken the same."""
    here, there, found = cloud.compute(), cloud.compute(), queued(cloud, flavor)

    class Slow(Placement):
        slept = False

        def write(self, method: str, path: str, body: dict[str, Any] | None) -> None:
            if not self.slept:
                self.slept = True
                cloud.etcd.delete(keys.taker(found.waiting.key))
                assert taker(cloud, there).take(found)
            super().write(method, path, body)

    assert not taker(cloud, here, placement=Slow(cloud.server.url)).take(found)
    is_taken(cloud, there, found.waiting)


def test_a_move_that_arrives_late_is_none(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    request_key = keys.request(compute, found.waiting.instance)
    late: list[tuple[Any, ...]] = []

    class Late(Store):
        def __init__(self) -> None:
            self.__dict__.update(cloud.store.__dict__)

        def commit(self, conditions: Any, operations: Any, fenced: bool = True) -> int | None:
            if any(each.key == request_key for each in operations):
                late.append((conditions, operations))
                raise UnknownOutcome('no answer')
            return super().commit(conditions, operations, fenced)

    assert not taker(cloud, compute, store=Late()).take(found)
    assert cloud.store.commit(*late[0]) is None
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

    class Slow(Store):
        def __init__(self) -> None:
            self.__dict__.update(cloud.store.__dict__)
            self.first = True

        def grant(self, seconds: int) -> int:
            if self.first:
                self.first = False
                assert taker(cloud, compute).take(found)
            return super().grant(seconds)

    assert destroy(Slow(), found.waiting.instance).endswith(f'destroy accepted, {compute} carries it out')
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
    here, there, found = cloud.compute(), cloud.compute(), queued(cloud, flavor)
    allocations.claim(cloud.placement, found.waiting.instance, {here: SMALL}, 'a-user', 'a-project')
    taken: list[bool] = []
    slow = Interrupted(cloud.server.url, lambda: taken.append(taker(cloud, there).take(found)))
    assert not taker(cloud, here, placement=slow).let_go(found.waiting.instance)
    assert taken == [True]
    is_taken(cloud, there, found.waiting)


def test_nobody_else_takes_while_a_taker_gives_up(cloud: Cloud, flavor: Flavor) -> None:
    """Its move never arrives, and its mark stands until what it claimed is released."""
    here, there, found = cloud.compute(), cloud.compute(), queued(cloud, flavor)

    class Lossy(Store):
        def __init__(self) -> None:
            self.__dict__.update(cloud.store.__dict__)

        def commit(self, conditions: Any, operations: Any, fenced: bool = True) -> int | None:
            if any(each.key.startswith(keys.HOSTS) for each in operations):
                raise UnknownOutcome('lost', 'etcd')
            return super().commit(conditions, operations, fenced)

    taken: list[bool] = []
    slow = Interrupted(cloud.server.url, lambda: taken.append(taker(cloud, there).take(found)))
    assert not taker(cloud, here, store=Lossy(), placement=slow).take(found)
    assert taken == [False]
    waits(cloud, found.waiting)


def test_what_is_delivered_here_is_not_let_go(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    mine = taker(cloud, compute)
    assert mine.take(found)
    assert not mine.let_go(found.waiting.instance)
    is_taken(cloud, compute, found.waiting)


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


# Who stands behind a claim (rule 4)


def test_a_mark_and_what_waits_stand_behind_a_claim(cloud: Cloud, flavor: Flavor) -> None:
    compute, found = cloud.compute(), queued(cloud, flavor)
    instance, mark = found.waiting.instance, keys.taker(found.waiting.key)
    allocations.claim(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
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
    allocations.claim(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    assert abandon(cloud.store, cloud.placement, [instance], instance, 1)
    waits(cloud, found.waiting)
