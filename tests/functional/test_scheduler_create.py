"""eschedule's create on real etcd and placement: one instance, with one claim, or nothing, also by two at one uuid."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import ClaimedElsewhere, Conflict, NoCapacity
from ecomp.model import keys
from ecomp.model.allocation import Allocations
from ecomp.model.choose import Offer
from ecomp.model.host import to_json as hostname_to_json
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.placing import claim as claims
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.scheduler.placing.create import create
from ecomp.store.client import Store
from tests.functional.cloud import IMAGE, RESOURCES, SMALL, WHO, Cloud, CountingStore, at_it, new
from tests.kit.servers import PATIENCE, until

pytestmark = pytest.mark.fast

# The plain way


def test_a_request_is_delivered_and_while_it_is_asked_somebody_is_at_it(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order()
    seen: list[bytes | None] = []

    def now() -> str:  # called between the claim and the delivery
        seen.append(cloud.etcd.get(keys.attempt(wanted.instance)))
        return 'now'

    assert cloud.create(wanted, now=now) == DeliveryOutcome(compute)
    assert seen[0] is not None
    assert json.loads(seen[0]) == {'version': 1, 'instances': [wanted.instance], 'query': wanted.query, **WHO}
    cloud.is_whole(compute, wanted)
    request = cloud.delivered(compute, wanted.instance)
    assert (request.image, request.query, request.user_id) == (IMAGE, wanted.query, 'a-user')
    assert request.stages == {'requested': 'today', 'scheduled': 'now'}


def test_a_dead_compute_is_skipped_and_named(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    dead, alive = cloud.compute(alive=False), cloud.compute()
    cloud.etcd.put(keys.hostname(dead), hostname_to_json('hv-dead'))
    wanted = cloud.wanted(alive)
    # Another one's in the same placement is nobody's business here.
    found: list[Allocations] = [{dead: SMALL}, {cloud.compute(alive=False): SMALL}, {alive: SMALL}]
    assert cloud.create(wanted, found=found) == DeliveryOutcome(alive)
    assert [record.message for record in caplog.records] == ['compute hv-dead is not alive: skipped']
    other = cloud.wanted(dead)
    with pytest.raises(NoCapacity, match='none of them is alive'):
        cloud.create(other)
    cloud.has_nothing_of(other, dead)


def test_others_in_the_same_placement_are_no_reason(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    """The nodes of a cloud beside this one are not alive here, and never were."""
    cloud.compute()
    other = cloud.wanted(cloud.compute(alive=False))
    with pytest.raises(NoCapacity, match='none of them is a living compute'):
        cloud.create(other)
    assert caplog.records == []


def test_a_uuid_of_a_large_set_costs_a_few_lists_whatever_the_number_of_computes(cloud: Cloud) -> None:
    """Each of its instances was looked for among all of them: the set was not placed before its lease had ended."""
    compute = cloud.compute(VCPU=50, MEMORY_MB=4096, DISK_GB=50)
    for _ in range(3):
        cloud.compute()
    wanted = replace(cloud.wanted(compute), count=40, minimum=40)
    with closing(CountingStore(EtcdConfig((cloud.etcd.endpoint,)))) as store:
        placed = cloud.create_all(wanted, True, store)
        assert len(placed) == 40
        first, store.asked = store.asked, 0
        again = cloud.create_all(wanted, True, store)
        assert again.keys() == placed.keys()
        assert all(each.again for each in again.values())
    assert first < 30
    assert store.asked < 50


def test_a_refused_claim_is_tried_on_the_next(cloud: Cloud) -> None:
    full, free = cloud.compute(VCPU=1, MEMORY_MB=64, DISK_GB=1), cloud.compute()
    cloud.create(cloud.wanted(full))
    for _ in range(2):
        wanted = cloud.wanted(free)
        # Placement's answer is a moment old: one of the two is full by now.
        assert cloud.create(wanted, found=[{full: SMALL}, {free: SMALL}]) == DeliveryOutcome(free)
        cloud.is_whole(free, wanted)


class Refreshing(Store):
    """A store that knows which leases it granted, and which it refreshed."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(EtcdConfig((cloud.etcd.endpoint,)))
        self.granted: list[int] = []
        self.refreshed: list[int] = []

    def grant(self, seconds: int) -> int:
        self.granted.append(super().grant(seconds))
        return self.granted[-1]

    def keep_alive(self, lease: int) -> int:
        self.refreshed.append(lease)
        return super().keep_alive(lease)


def test_who_is_at_it_for_long_says_so_again_and_where_all_are_taken_leaves_nothing(cloud: Cloud) -> None:
    full, free = cloud.compute(VCPU=1, MEMORY_MB=64, DISK_GB=1), cloud.compute()
    cloud.create(cloud.wanted(full))
    with closing(Refreshing(cloud)) as store:
        # At once: its lease is not refreshed, which would cost an answer.
        cloud.create(cloud.wanted(free), store=store)
        assert store.refreshed == []
        wanted = cloud.wanted(full)
        with pytest.raises(NoCapacity, match='every candidate was taken meanwhile'):
            cloud.create(wanted, store=store, found=[{full: SMALL}])
        cloud.has_nothing_of(wanted)
        assert set(store.refreshed) == {store.granted[-1]}


def test_racing_for_the_last_places_loses_and_leaks_nothing(cloud: Cloud) -> None:
    computes = [cloud.compute(VCPU=2, MEMORY_MB=128, DISK_GB=2) for _ in range(2)]
    found: list[Allocations] = [{compute: SMALL} for compute in computes]
    # Who is beaten asks again, and is to be told of both.
    both = new()
    for compute in computes:
        body = {'aggregates': [both], 'resource_provider_generation': 1}
        cloud.server.call('PUT', f'/resource_providers/{compute}/aggregates', body)

    def one(_: int) -> str | None:
        wanted = cloud.wanted(computes[0])
        wanted = replace(wanted, query=wanted.query.replace(f'in_tree={computes[0]}', f'member_of={both}'))
        try:
            return cloud.create(wanted, found=found).compute
        except NoCapacity:
            cloud.has_nothing_of(wanted)
            return None

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, range(8)))
    assert sorted(filter(None, results)) == sorted(computes * 2)
    for compute in computes:
        assert sorted(cloud.server.consumers(compute)) == sorted(
            map(keys.last, cloud.etcd.keys(keys.request_prefix(compute)))
        )


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interruption_after_the_claim_releases_it(cloud: Cloud, error: type[BaseException]) -> None:
    compute, wanted = cloud.make_order()

    def interrupted() -> str:
        assert cloud.server.allocations(wanted.instance) == {compute: SMALL}
        raise error

    with pytest.raises(error):
        cloud.create(wanted, now=interrupted)
    cloud.has_nothing_of(wanted, compute)


# The same uuid again


def test_a_second_one_takes_over_and_the_first_one_s_late_release_releases_nothing(cloud: Cloud) -> None:
    first, second = cloud.compute(), cloud.compute()
    wanted = cloud.wanted(first)
    lease = cloud.store.grant(60)
    revision = at_it(cloud, wanted, lease)
    claims.Claimer(cloud.placement, 'a-user', 'a-project', lambda: True).claim({wanted.instance: {first: SMALL}})
    held = allocations.consumer(cloud.placement, wanted.instance)
    # The first one freezes here, and the user asks again.
    assert cloud.create(wanted, resume=True) == DeliveryOutcome(first)
    cloud.is_whole(first, wanted)
    assert not claims.abandon(cloud.store, cloud.placement, [wanted.instance], wanted.instance, revision)
    assert not allocations.release_once(cloud.placement, wanted.instance, held)
    cloud.store.revoke(lease)
    cloud.is_whole(first, wanted)
    assert cloud.server.consumers(second) == {}


def test_a_claim_of_another_attempt_is_neither_moved_nor_released(cloud: Cloud) -> None:
    """Rule 13: whoever made the claim may have built the guest there."""
    first, second, silent = cloud.compute(), cloud.compute(), cloud.compute(alive=False)
    for compute in (first, silent):
        wanted = cloud.wanted(second)
        allocations.claim_once(cloud.placement, wanted.instance, {compute: SMALL}, 'a-user', 'a-project')
        with pytest.raises(ClaimedElsewhere, match=f'claimed on {compute}'):
            cloud.create(wanted, resume=True)
        assert cloud.server.allocations(wanted.instance) == {compute: SMALL}
        assert cloud.etcd.get(keys.attempt(wanted.instance)) is None


def test_of_a_set_the_rest_is_placed_where_one_is_claimed_on_a_silent_compute(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    compute, silent = cloud.compute(VCPU=4, MEMORY_MB=512, DISK_GB=10), cloud.compute(alive=False)
    wanted = replace(cloud.wanted(compute), count=3, minimum=2)
    blocked, *others = wanted.instances
    allocations.claim_once(cloud.placement, blocked, {silent: SMALL}, 'a-user', 'a-project')
    placed = cloud.create_all(wanted, resume=True)
    assert list(placed) == others
    assert f'{blocked} is claimed on {silent}, which is silent' in caplog.text
    assert cloud.server.allocations(blocked) == {silent: SMALL}
    whole = replace(cloud.wanted(compute), count=2, minimum=2)
    allocations.claim_once(cloud.placement, next(iter(whole.instances)), {silent: SMALL}, 'a-user', 'a-project')
    with pytest.raises(ClaimedElsewhere):
        cloud.create_all(whole, resume=True)
    assert cloud.server.consumers(compute).keys() == set(others)


def test_the_first_one_does_not_abandon_what_the_second_is_at(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order()
    lease = cloud.store.grant(60)
    revision = at_it(cloud, wanted, lease)
    claims.Claimer(cloud.placement, 'a-user', 'a-project', lambda: True).claim({wanted.instance: {compute: SMALL}})
    abandoned: list[bool] = []

    def meanwhile() -> str:  # the second one has claimed, and not yet delivered
        abandoned.append(claims.abandon(cloud.store, cloud.placement, [wanted.instance], wanted.instance, revision))
        return 'now'

    assert cloud.create(wanted, resume=True, now=meanwhile) == DeliveryOutcome(compute)
    assert abandoned == [False]
    cloud.is_whole(compute, wanted)
    cloud.store.revoke(lease)


def test_the_first_one_wakes_up_before_its_claim_and_takes_nothing_back(cloud: Cloud) -> None:
    slow, quick = cloud.compute(), cloud.compute()
    wanted = cloud.wanted(quick)
    candidates: Future[tuple[Placement, Offer]] = Future()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(create, cloud.store, candidates, wanted, WHO, False, random.Random(), lambda: 'late')
        until(lambda: cloud.etcd.get(keys.attempt(wanted.instance)), 10, 'the first one is at it')
        assert cloud.create(wanted, resume=True) == DeliveryOutcome(quick)
        # Only now the first one hears from placement, and of another compute.
        candidates.set_result((cloud.placement, Offer([{slow: SMALL}], asked=time.monotonic())))
        with pytest.raises(Conflict, match='another eschedule took it over'):
            first.result(PATIENCE * 30)
    cloud.is_whole(quick, wanted)
    assert cloud.server.consumers(slow) == {}


def test_many_at_one_uuid_end_in_one_instance(cloud: Cloud) -> None:
    computes = [cloud.compute() for _ in range(3)]
    wanted = replace(cloud.wanted(computes[0]), query=RESOURCES)

    def one(compute: str) -> str:
        try:
            return cloud.create(wanted, resume=True, found=[{compute: SMALL}]).compute
        except (ClaimedElsewhere, Conflict, NoCapacity):
            return ''

    with ThreadPoolExecutor(6) as pool:
        answers = set(pool.map(one, computes * 2)) - {''}
    assert len(answers) == 1
    cloud.is_whole(answers.pop(), wanted)
    assert sum(len(cloud.server.consumers(compute)) for compute in computes) == 1
