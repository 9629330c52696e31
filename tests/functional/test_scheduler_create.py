"""Test create with all computes as candidates, and with a sample of a large cluster."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import ClaimedElsewhere, Conflict, NoCapacity, OverQuota
from ecomp.model import keys
from ecomp.model.allocation import Allocations
from ecomp.model.choose import FIRST, PACK, RANDOM, SPREAD, Offer
from ecomp.model.host import to_json as hostname_to_json
from ecomp.model.order import Request, SetOrder, parse_request
from ecomp.model.quota import Quota
from ecomp.model.quota import to_json as quota_json
from ecomp.placement import allocations
from ecomp.placement.allocations import candidates
from ecomp.placement.client import Placement
from ecomp.scheduler.placing import claim as claims
from ecomp.scheduler.placing import create as attempts
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.scheduler.placing.create import create
from ecomp.scheduler.placing.place import ASKED, NAMED, VAIN, plain
from ecomp.store.client import Put, Store
from tests.functional.cloud import IMAGE, RESOURCES, SMALL, WHO, Cloud, CountingStore, at_it, new
from tests.kit.in_process import InProcess, put
from tests.kit.servers import PATIENCE, Etcd, until

# create on real etcd and placement makes one instance with one claim, or nothing, even for concurrent attempts.


@pytest.mark.fast
def test_a_request_is_delivered_and_while_it_is_asked_somebody_is_at_it(cloud: Cloud) -> None:
    compute, order = cloud.make_order()
    attempt_values: list[bytes | None] = []

    def record_attempt() -> str:  # called between the claim and the delivery
        attempt_values.append(cloud.etcd.get(keys.attempt(order.instance)))
        return 'now'

    assert cloud.create(order, now=record_attempt) == DeliveryOutcome(compute)
    assert attempt_values[0] is not None
    assert json.loads(attempt_values[0]) == {'version': 1, 'instances': [order.instance], 'query': order.query, **WHO}
    cloud.is_whole(compute, order)
    request = cloud.delivered(compute, order.instance)
    assert (request.image, request.query, request.user_id) == (IMAGE, order.query, 'a-user')
    assert request.stages == {'requested': 'today', 'scheduled': 'now'}


@pytest.mark.fast
def test_a_dead_compute_is_skipped_and_named(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    dead, alive = cloud.compute(alive=False), cloud.compute()
    cloud.etcd.put(keys.hostname(dead), hostname_to_json('hv-dead'))
    order = cloud.wanted(alive)
    # A provider outside ecomp in the same placement is ignored.
    candidate_list: list[Allocations] = [{dead: SMALL}, {cloud.compute(alive=False): SMALL}, {alive: SMALL}]
    assert cloud.create(order, found=candidate_list) == DeliveryOutcome(alive)
    assert [record.message for record in caplog.records] == ['compute hv-dead is not alive: skipped']
    dead_order = cloud.wanted(dead)
    with pytest.raises(NoCapacity, match='none of them is alive'):
        cloud.create(dead_order)
    cloud.has_nothing_of(dead_order, dead)


@pytest.mark.fast
def test_others_in_the_same_placement_are_no_reason(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    """Check the nodes of another cloud in the same placement, which were never alive here."""
    cloud.compute()
    order = cloud.wanted(cloud.compute(alive=False))
    with pytest.raises(NoCapacity, match='none of them is a living compute'):
        cloud.create(order)
    assert caplog.records == []


@pytest.mark.fast
def test_a_uuid_of_a_large_set_costs_a_few_lists_whatever_the_number_of_computes(cloud: Cloud) -> None:
    """Check that lookups at each compute do not outlast the attempt's lease."""
    compute = cloud.compute(VCPU=50, MEMORY_MB=4096, DISK_GB=50)
    for _ in range(3):
        cloud.compute()
    order = replace(cloud.wanted(compute), count=40, minimum=40)
    with closing(CountingStore(EtcdConfig((cloud.etcd.endpoint,)))) as store:
        placed = cloud.create_all(order, True, store)
        assert len(placed) == 40
        first_calls, store.asked = store.asked, 0
        repeated = cloud.create_all(order, True, store)
        assert repeated.keys() == placed.keys()
        assert all(outcome.again for outcome in repeated.values())
    assert first_calls < 30
    assert store.asked < 50


@pytest.mark.fast
def test_a_refused_claim_is_tried_on_the_next(cloud: Cloud) -> None:
    full, free = cloud.compute(VCPU=1, MEMORY_MB=64, DISK_GB=1), cloud.compute()
    cloud.create(cloud.wanted(full))
    for _ in range(2):
        order = cloud.wanted(free)
        # The list of candidates is stale: one of the two computes is full.
        assert cloud.create(order, found=[{full: SMALL}, {free: SMALL}]) == DeliveryOutcome(free)
        cloud.is_whole(free, order)


class Refreshing(Store):
    """A store that records which leases it granted and refreshed."""

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


@pytest.mark.fast
def test_who_is_at_it_for_long_says_so_again_and_where_all_are_taken_leaves_nothing(cloud: Cloud) -> None:
    full, free = cloud.compute(VCPU=1, MEMORY_MB=64, DISK_GB=1), cloud.compute()
    cloud.create(cloud.wanted(full))
    with closing(Refreshing(cloud)) as store:
        # A short attempt does not refresh its lease, which would cost a call.
        cloud.create(cloud.wanted(free), store=store)
        assert store.refreshed == []
        order = cloud.wanted(full)
        with pytest.raises(NoCapacity, match='every candidate was taken meanwhile'):
            cloud.create(order, store=store, found=[{full: SMALL}])
        cloud.has_nothing_of(order)
        assert set(store.refreshed) == {store.granted[-1]}


@pytest.mark.fast
def test_racing_for_the_last_places_loses_and_leaks_nothing(cloud: Cloud) -> None:
    computes = [cloud.compute(VCPU=2, MEMORY_MB=128, DISK_GB=2) for _ in range(2)]
    candidate_list: list[Allocations] = [{compute: SMALL} for compute in computes]
    # The losers query placement again; the aggregate limits the answer to these two computes.
    aggregate = new()
    for compute in computes:
        body = {'aggregates': [aggregate], 'resource_provider_generation': 1}
        cloud.server.call('PUT', f'/resource_providers/{compute}/aggregates', body)

    def create_one(_: int) -> str | None:
        order = cloud.wanted(computes[0])
        order = replace(order, query=order.query.replace(f'in_tree={computes[0]}', f'member_of={aggregate}'))
        try:
            return cloud.create(order, found=candidate_list).compute
        except NoCapacity:
            cloud.has_nothing_of(order)
            return None

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(create_one, range(8)))
    assert sorted(filter(None, results)) == sorted(computes * 2)
    for compute in computes:
        assert sorted(cloud.server.consumers(compute)) == sorted(
            map(keys.last, cloud.etcd.keys(keys.request_prefix(compute)))
        )


@pytest.mark.fast
@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interruption_after_the_claim_releases_it(cloud: Cloud, error: type[BaseException]) -> None:
    compute, order = cloud.make_order()

    def interrupt() -> str:
        assert cloud.server.allocations(order.instance) == {compute: SMALL}
        raise error

    with pytest.raises(error):
        cloud.create(order, now=interrupt)
    cloud.has_nothing_of(order, compute)


# Repeated and concurrent attempts with one uuid


@pytest.mark.fast
def test_a_second_one_takes_over_and_the_first_one_s_late_release_releases_nothing(cloud: Cloud) -> None:
    first, second = cloud.compute(), cloud.compute()
    order = cloud.wanted(first)
    lease = cloud.store.grant(60)
    revision = at_it(cloud, order, lease)
    claims.Claimer(cloud.placement, 'a-user', 'a-project', lambda: True).claim({order.instance: {first: SMALL}})
    consumer = allocations.consumer(cloud.placement, order.instance)
    # The first attempt freezes here, and the user repeats the command.
    assert cloud.create(order, resume=True) == DeliveryOutcome(first)
    cloud.is_whole(first, order)
    assert not claims.abandon(cloud.store, cloud.placement, [order.instance], order.instance, revision)
    assert not allocations.release_once(cloud.placement, order.instance, consumer)
    cloud.store.revoke(lease)
    cloud.is_whole(first, order)
    assert cloud.server.consumers(second) == {}


@pytest.mark.fast
def test_a_claim_of_another_attempt_is_neither_moved_nor_released(cloud: Cloud) -> None:
    """Check rule 13: the compute of the claim may have built the instance."""
    first, second, silent = cloud.compute(), cloud.compute(), cloud.compute(alive=False)
    for compute in (first, silent):
        order = cloud.wanted(second)
        allocations.claim_once(cloud.placement, order.instance, {compute: SMALL}, 'a-user', 'a-project')
        with pytest.raises(ClaimedElsewhere, match=f'claimed on {compute}'):
            cloud.create(order, resume=True)
        assert cloud.server.allocations(order.instance) == {compute: SMALL}
        assert cloud.etcd.get(keys.attempt(order.instance)) is None


@pytest.mark.fast
def test_of_a_set_the_rest_is_placed_where_one_is_claimed_on_a_silent_compute(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    compute, silent = cloud.compute(VCPU=4, MEMORY_MB=512, DISK_GB=10), cloud.compute(alive=False)
    order = replace(cloud.wanted(compute), count=3, minimum=2)
    blocked, *remaining = order.instances
    allocations.claim_once(cloud.placement, blocked, {silent: SMALL}, 'a-user', 'a-project')
    placed = cloud.create_all(order, resume=True)
    assert list(placed) == remaining
    assert f'{blocked} is claimed on {silent}, which is silent' in caplog.text
    assert cloud.server.allocations(blocked) == {silent: SMALL}
    complete_order = replace(cloud.wanted(compute), count=2, minimum=2)
    allocations.claim_once(
        cloud.placement, next(iter(complete_order.instances)), {silent: SMALL}, 'a-user', 'a-project'
    )
    with pytest.raises(ClaimedElsewhere):
        cloud.create_all(complete_order, resume=True)
    assert cloud.server.consumers(compute).keys() == set(remaining)


@pytest.mark.fast
def test_the_first_one_does_not_abandon_what_the_second_is_at(cloud: Cloud) -> None:
    compute, order = cloud.make_order()
    lease = cloud.store.grant(60)
    revision = at_it(cloud, order, lease)
    claims.Claimer(cloud.placement, 'a-user', 'a-project', lambda: True).claim({order.instance: {compute: SMALL}})
    abandoned: list[bool] = []

    def abandon_first() -> str:  # between the second attempt's claim and its delivery
        abandoned.append(claims.abandon(cloud.store, cloud.placement, [order.instance], order.instance, revision))
        return 'now'

    assert cloud.create(order, resume=True, now=abandon_first) == DeliveryOutcome(compute)
    assert abandoned == [False]
    cloud.is_whole(compute, order)
    cloud.store.revoke(lease)


@pytest.mark.fast
def test_the_first_one_wakes_up_before_its_claim_and_takes_nothing_back(cloud: Cloud) -> None:
    slow, quick = cloud.compute(), cloud.compute()
    order = cloud.wanted(quick)
    candidates: Future[tuple[Placement, Offer]] = Future()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(create, cloud.store, candidates, order, WHO, False, random.Random(), lambda: 'late')
        until(lambda: cloud.etcd.get(keys.attempt(order.instance)), 10, 'the first one is at it')
        assert cloud.create(order, resume=True) == DeliveryOutcome(quick)
        # Only now the first attempt gets placement's answer, which names another compute.
        candidates.set_result((cloud.placement, Offer([{slow: SMALL}], asked=time.monotonic())))
        with pytest.raises(Conflict, match='another eschedule took it over'):
            first.result(PATIENCE * 30)
    cloud.is_whole(quick, order)
    assert cloud.server.consumers(slow) == {}


@pytest.mark.fast
def test_many_at_one_uuid_end_in_one_instance(cloud: Cloud) -> None:
    computes = [cloud.compute() for _ in range(3)]
    order = replace(cloud.wanted(computes[0]), query=RESOURCES)

    def create_on(compute: str) -> str:
        try:
            return cloud.create(order, resume=True, found=[{compute: SMALL}]).compute
        except (ClaimedElsewhere, Conflict, NoCapacity):
            return ''

    with ThreadPoolExecutor(6) as pool:
        answers = set(pool.map(create_on, computes * 2)) - {''}
    assert len(answers) == 1
    cloud.is_whole(answers.pop(), order)
    assert sum(len(cloud.server.consumers(compute)) for compute in computes) == 1


# In a large cluster, create queries placement about sampled computes: which ones, how often, and with wrong hints.


TOTALS = {'VCPU': 4, 'MEMORY_MB': 256, 'DISK_GB': 4}
# The number of SQL statements of placement 16.0.0 with SQLite for a query about one compute and a claim.
ONE_IN_SQL = 37
# The same for a query about all computes and a claim.
ALL_IN_SQL = 36


@dataclass
class Cluster:
    """A cluster of keys and providers with four places each, and with published hints."""

    etcd: Etcd
    store: CountingStore
    placement: InProcess

    def compute(self, used: int = 0, said: int | None = None) -> str:
        """Make a compute with `used` places taken, and publish `hint` if it is given."""
        compute = str(uuid.uuid4())
        self.placement.write('POST', '/resource_providers', {'uuid': compute, 'name': compute})
        inventories = {name: {'total': total} for name, total in TOTALS.items()}
        put(self.placement, f'/resource_providers/{compute}/inventories', inventories=inventories)
        for _ in range(used):
            body = {'allocations': {compute: {'resources': SMALL}}, 'user_id': 'u', 'project_id': 'p'}
            consumer_fields = {'consumer_generation': None, 'consumer_type': 'INSTANCE'}
            self.placement.write('PUT', f'/allocations/{uuid.uuid4()}', {**body, **consumer_fields})
        self.says(compute, said)
        return compute

    def says(self, compute: str, said: int | None) -> None:
        """Publish a hint that this number of places is used."""
        room = {} if said is None else {'room': {name: [total, 100 - 25 * said] for name, total in TOTALS.items()}}
        self.etcd.put(keys.compute(compute), json.dumps({'token': 'x', **room}), self.etcd.grant())

    def create(self, large: int | None = 0, weigh: str = SPREAD, **what: Any) -> str:
        """Place an instance, and return its compute.

        The calls are in `placement.calls`, `statements` and `store.asked` afterwards.
        """
        order = SetOrder(new(), query=RESOURCES, image=IMAGE, user_id='u', project_id='p', stages={'requested': 'x'})
        order = replace(order, weigh=weigh, **what)
        backend: Future[tuple[Placement, Offer]] = Future()
        self.placement.calls.clear()
        self.store.asked, before = 0, self.placement.statements
        backend.set_result((self.placement, Offer(()) if large is not None else candidates(self.placement, RESOURCES)))
        delivered = create(self.store, backend, order, WHO, False, random.Random(1), lambda: 'now', large)
        (compute,) = (outcome.compute for outcome in delivered.values())
        self.statements = self.placement.statements - before
        value = self.etcd.get(keys.request(compute, order.instance))
        request = parse_request(compute, keys.request(compute, order.instance), value or b'')
        assert isinstance(request, Request)
        assert request.allocations == {compute: SMALL}
        assert request.why is not None
        self.of = request.why.of
        return compute

    @property
    def asked(self) -> list[str]:
        """Return the calls to placement: the uuid of a queried compute, `all` or `claim`."""
        queries = []
        for call in self.placement.calls:
            subject = call.rpartition('in_tree=')[2].partition('&')[0] if 'in_tree=' in call else 'all'
            queries.append('claim' if call.startswith('PUT /allocations') else subject)
        return queries


@pytest.fixture
def cluster(own_etcd: Etcd, in_process: InProcess) -> Iterator[Cluster]:
    with closing(CountingStore(EtcdConfig((own_etcd.endpoint,)))) as store:
        yield Cluster(own_etcd, store, in_process)


def test_one_question_about_one_compute_and_one_claim_however_many_there_are(cluster: Cluster) -> None:
    best = cluster.compute(said=0)
    for _ in range(9):
        cluster.compute(used=1, said=1)
    assert cluster.create() == best
    assert cluster.asked == [best, 'claim']
    etcd_calls = cluster.store.asked
    assert cluster.of == 10
    # In order: quota, lease, attempt, sample, quota again, delivery.
    assert etcd_calls == 6
    assert cluster.create(large=None) != ''
    assert cluster.asked == ['all', 'claim']
    # Without sampling, the names of all computes are read, and the other attempts.
    assert cluster.store.asked == etcd_calls + 1


@pytest.mark.parametrize('computes', [10, 40])
def test_the_sql_that_one_takes_does_not_grow_with_the_computes(
    cluster: Cluster, computes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, 'FRESH', 60.0)  # a slow machine would query placement again
    for _ in range(computes):
        cluster.compute(said=0)
    cluster.says(cluster.create(), 1)  # placement caches the user, the project and the trait names from now on
    compute = cluster.create()  # one of the sample: not all of 40 computes are sampled
    assert cluster.asked == [compute, 'claim']
    assert cluster.statements == ONE_IN_SQL
    assert cluster.create(large=None) != ''
    assert cluster.statements == ALL_IN_SQL


def test_a_small_cluster_is_asked_about_as_a_whole(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.compute(said=0)
    cluster.create(large=3)
    assert cluster.asked == ['all', 'claim']


@pytest.mark.parametrize(('weigh', 'number'), [(SPREAD, 0), (PACK, 3)])
def test_the_one_that_is_asked_about_is_the_best_for_how_it_is_to_be_weighed(
    cluster: Cluster, weigh: str, number: int
) -> None:
    computes = [cluster.compute(used=used, said=used) for used in range(5)]
    assert cluster.create(weigh=weigh) == computes[number]
    assert cluster.asked == [computes[number], 'claim']
    assert cluster.of == 4  # the fifth is full


def test_by_chance_any_of_them_is_asked_about(cluster: Cluster) -> None:
    computes = {cluster.compute(said=used) for used in range(4)}
    assert cluster.create(weigh=RANDOM) in computes
    assert len(cluster.asked) == 2


@pytest.mark.parametrize('computes', [[(3, 0), (1, 1), (2, 2)], [(4, 0), (2, 2)]], ids=['not as empty', 'full'])
def test_one_that_is_not_as_it_said_gives_way_to_the_next(cluster: Cluster, computes: list[tuple[int, int]]) -> None:
    stale, better, *_ = [cluster.compute(used=used, said=hint) for used, hint in computes]
    assert cluster.create() == better
    assert cluster.asked == [stale, better, 'claim']


def test_where_hints_lie_all_are_asked_about(cluster: Cluster) -> None:
    for _ in range(5):
        cluster.compute(used=4, said=0)
    room = cluster.compute(used=3, said=4)
    assert cluster.create() == room
    assert cluster.asked[VAIN:] == ['all', 'claim']
    assert 'all' not in cluster.asked[:VAIN]


def test_before_a_refusal_all_are_asked_about(cluster: Cluster) -> None:
    for _ in range(5):
        cluster.compute(used=4, said=0)
    with pytest.raises(NoCapacity, match='placement names no provider'):
        cluster.create()
    assert len(cluster.asked) == VAIN + 1
    assert cluster.asked[-1] == 'all'
    assert not cluster.etcd.keys(keys.ATTEMPTS)


def test_a_disabled_one_is_not_offered_however_empty_it_says_it_is(cluster: Cluster) -> None:
    disabled, other = cluster.compute(said=0), cluster.compute(used=1, said=1)
    put(cluster.placement, f'/resource_providers/{disabled}/traits', traits=['COMPUTE_STATUS_DISABLED'])
    assert cluster.create() == other
    assert cluster.asked == [disabled, other, 'claim']


@pytest.mark.parametrize('value', ['{"room": 7}', 'rubbish', '{"room": {"VCPU": [1e400, 5]}}'])
def test_what_says_nothing_that_can_be_understood_is_found_among_all(cluster: Cluster, value: str) -> None:
    compute = cluster.compute()
    cluster.etcd.put(keys.compute(compute), value, cluster.etcd.grant())
    assert cluster.create() == compute
    assert cluster.asked == ['all', 'claim']


def test_a_key_without_a_lease_is_nobody_s_life(cluster: Cluster) -> None:
    dead, alive = cluster.compute(said=0), cluster.compute(used=1, said=1)
    room = json.dumps({'room': {name: [total, 100] for name, total in TOTALS.items()}})
    cluster.etcd.put(keys.compute(dead), room)
    assert cluster.create() == alive


def test_a_quota_holds_and_leaves_nothing(cluster: Cluster) -> None:
    compute = cluster.compute(said=0)
    cluster.store.commit([], [Put(keys.quota('p'), quota_json(Quota('p', {'instances': 1}, {'instances': 1})))])
    with pytest.raises(OverQuota):
        cluster.create()
    assert cluster.placement.get(f'/resource_providers/{compute}/usages')['usages']['VCPU'] == 0
    assert not cluster.etcd.keys(keys.ATTEMPTS)


def test_every_compute_is_reached_from_some_beginning(cluster: Cluster) -> None:
    computes = sorted(cluster.compute(said=0) for _ in range(40))
    sampled = set()
    for start in ('0' * 8, computes[20], 'f' * 8):
        entries, number = cluster.store.around(keys.COMPUTES, keys.compute(start), 16)
        assert number == 40
        assert len(entries) == 16
        sampled |= {keys.last(entry.key) for entry in entries}
    assert len(sampled) == 32
    wrapped, _ = cluster.store.around(keys.COMPUTES, keys.compute(computes[39]), 100)
    assert [keys.last(entry.key) for entry in wrapped] == [computes[39], *computes[:39]]


@pytest.mark.parametrize(('query', 'asked'), [
    (RESOURCES, SMALL),
    ('resources=VCPU:1%2CMEMORY_MB:2', {'VCPU': 1, 'MEMORY_MB': 2}),
    *((f'{RESOURCES}&{more}', None) for more in ('required=HW_CPU_X86_AVX2', 'member_of=x', 'in_tree=x', 'limit=1')),
    *((f'{RESOURCES}&{more}', None) for more in ('resources1=VCPU:1', 'root_required=X', 'resources=VCPU:1')),
    ('required=X&resources=VCPU:1', None),
    ('resources=VCPU', None),
    ('', None),
])  # fmt: skip
def test_only_amounts_alone_are_asked_of_a_few(query: str, asked: object) -> None:
    assert plain(query, 1, SPREAD) == asked
    assert plain(query, 2, SPREAD) is None
    assert plain(query, 1, FIRST) is None


def test_so_many_are_asked_about_at_most(cluster: Cluster) -> None:
    for number in range(4):
        cluster.compute(used=3, said=number % 3)
    cluster.create()
    assert len(cluster.asked) == ASKED + 1


def test_of_many_that_are_not_alive_a_few_are_named_and_their_names_are_read_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    alive = cluster.compute()
    for _ in range(NAMED + 3):
        cluster.etcd.delete(keys.compute(dead := cluster.compute()))
        cluster.etcd.put(keys.hostname(dead), hostname_to_json(f'hv-{dead[:8]}'))
    assert cluster.create(large=None) == alive
    messages = [record.message for record in caplog.records if 'not alive' in record.message]
    assert len(messages) == NAMED + 1
    assert messages[-1] == '3 more computes are not alive: skipped'
    # Three calls more than with live computes only: the computes, and two pages of host names.
    assert cluster.store.asked == 10


def test_what_is_rounded_is_not_taken_for_another(cluster: Cluster) -> None:
    for _ in range(5):
        compute = cluster.compute(used=1)
        room = {'VCPU': [4, 76], 'MEMORY_MB': [256, 76], 'DISK_GB': [4, 76]}
        cluster.etcd.put(keys.compute(compute), json.dumps({'room': room}), cluster.etcd.grant())
    cluster.create()
    assert len(cluster.asked) == 2


def test_a_key_that_is_no_compute_s_is_asked_about_of_nobody(cluster: Cluster) -> None:
    """Check that such keys, which make an invalid or a longer query, cannot make creates fail."""
    cluster.compute(used=1, said=1)
    room = {name: [total, 100] for name, total in TOTALS.items()}
    for name in ('test', 'x&required=HW_CPU_X86_AVX2', str(uuid.uuid4()).upper()):
        cluster.etcd.put(keys.compute(name), json.dumps({'token': 'x', 'room': room}), cluster.etcd.grant())
    compute = cluster.create()
    assert cluster.asked == [compute, 'claim']
