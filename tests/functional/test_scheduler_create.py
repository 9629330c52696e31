"""Test create with all computes as candidates, and with a sample of a large cluster."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import ClaimedElsewhere, NoCapacity
from ecomp.model import keys
from ecomp.model.allocation import Allocations
from ecomp.model.choose import FIRST, PACK, RANDOM, SPREAD, Offer
from ecomp.model.host import StoredHostname
from ecomp.model.image import hash_image
from ecomp.model.order import Request, SetOrder, parse_request
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.placement.allocations import read_candidates
from ecomp.placement.client import Placement
from ecomp.scheduler.placing import create as attempts
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.scheduler.placing.create import create
from ecomp.scheduler.placing.sample import MAX_QUERIES, get_sampleable_amounts
from ecomp.scheduler.placing.session import MAX_LOGGED_COMPUTES, Scheduler
from ecomp.store.client import Store
from tests.functional.cloud import IMAGE, OWNER, RESOURCES, SMALL, Cloud, CountingStore, make_uuid
from tests.kit.in_process import InProcessPlacement, put_with_generation
from tests.kit.servers import Etcd


@pytest.mark.fast
def test_create_announces_its_attempt_and_delivers(cloud: Cloud) -> None:
    compute, order = cloud.make_order()
    attempt_values: list[bytes | None] = []

    def record_attempt() -> str:  # called between the claim and the delivery
        attempt_values.append(cloud.etcd.get(keys.attempt(order.instance)))
        return 'now'

    assert cloud.create(order, now=record_attempt) == DeliveryOutcome(compute)
    assert attempt_values[0] is not None
    assert json.loads(attempt_values[0]) == {'version': 1, 'instances': [order.instance], 'query': order.query, **OWNER}
    cloud.assert_placed(compute, order)
    request = cloud.read_request(compute, order.instance)
    assert (request.image, request.query, request.user_id) == (IMAGE, order.query, 'a-user')
    assert request.stages == {'requested': 'today', 'scheduled': 'now'}


@pytest.mark.fast
def test_dead_compute_is_skipped_and_named(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    dead, alive = cloud.make_compute(alive=False), cloud.make_compute()
    cloud.etcd.put(keys.hostname(dead), encode(StoredHostname('hv-dead')))
    order = cloud.make_order_on(alive)
    # A provider outside ecomp in the same placement is ignored.
    candidate_list: list[Allocations] = [{dead: SMALL}, {cloud.make_compute(alive=False): SMALL}, {alive: SMALL}]
    assert cloud.create(order, candidates=candidate_list) == DeliveryOutcome(alive)
    assert [record.message for record in caplog.records] == ['compute hv-dead is not alive: skipped']
    dead_order = cloud.make_order_on(dead)
    with pytest.raises(NoCapacity, match='none of them is alive'):
        cloud.create(dead_order)
    cloud.assert_not_placed(dead_order, dead)


@pytest.mark.fast
def test_foreign_providers_are_not_named_as_dead(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    """Check the nodes of another cloud in the same placement, which were never alive here."""
    cloud.make_compute()
    order = cloud.make_order_on(cloud.make_compute(alive=False))
    with pytest.raises(NoCapacity, match='etcd does not know as computes'):
        cloud.create(order)
    assert caplog.records == []


@pytest.mark.fast
def test_resuming_a_large_set_takes_few_etcd_calls(cloud: Cloud) -> None:
    """Check that lookups at each compute do not outlast the attempt's lease."""
    compute = cloud.make_compute(VCPU=50, MEMORY_MB=4096, DISK_GB=50)
    for _ in range(3):
        cloud.make_compute()
    order = replace(cloud.make_order_on(compute), count=40, minimum=40)
    with closing(CountingStore(EtcdConfig((cloud.etcd.endpoint,)))) as store:
        placed = cloud.create_all(order, True, store)
        assert len(placed) == 40
        first_calls, store.request_count = store.request_count, 0
        repeated = cloud.create_all(order, True, store)
        assert repeated.keys() == placed.keys()
        assert all(outcome.is_repeated for outcome in repeated.values())
    assert first_calls < 30
    assert store.request_count < 50


@pytest.mark.fast
def test_refused_claim_is_retried_on_the_next_candidate(cloud: Cloud) -> None:
    full, free = cloud.make_compute(VCPU=1, MEMORY_MB=64, DISK_GB=1), cloud.make_compute()
    cloud.create(cloud.make_order_on(full))
    for _ in range(2):
        order = cloud.make_order_on(free)
        # The list of candidates is stale: one of the two computes is full.
        assert cloud.create(order, candidates=[{full: SMALL}, {free: SMALL}]) == DeliveryOutcome(free)
        cloud.assert_placed(free, order)


class LeaseRecordingStore(Store):
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
def test_long_attempt_refreshes_its_lease_and_failed_one_cleans_up(cloud: Cloud) -> None:
    full, free = cloud.make_compute(VCPU=1, MEMORY_MB=64, DISK_GB=1), cloud.make_compute()
    cloud.create(cloud.make_order_on(full))
    with closing(LeaseRecordingStore(cloud)) as store:
        # A short attempt does not refresh its lease, which would cost a call.
        cloud.create(cloud.make_order_on(free), store=store)
        assert store.refreshed == []
        order = cloud.make_order_on(full)
        with pytest.raises(NoCapacity, match='other requests took all the room first'):
            cloud.create(order, store=store, candidates=[{full: SMALL}])
        cloud.assert_not_placed(order)
        assert set(store.refreshed) == {store.granted[-1]}


@pytest.mark.fast
@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit, ValueError])
def test_interruption_after_the_claim_releases_it(cloud: Cloud, error: type[BaseException]) -> None:
    compute, order = cloud.make_order()

    def interrupt() -> str:
        assert cloud.server.read_allocations(order.instance) == {compute: SMALL}
        raise error

    with pytest.raises(error):
        cloud.create(order, now=interrupt)
    cloud.assert_not_placed(order, compute)


# Repeated and concurrent attempts with one uuid


@pytest.mark.fast
def test_set_is_placed_without_an_instance_claimed_on_a_silent_compute(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    compute, silent = cloud.make_compute(VCPU=4, MEMORY_MB=512, DISK_GB=10), cloud.make_compute(alive=False)
    order = replace(cloud.make_order_on(compute), count=3, minimum=2)
    blocked, *remaining = order.instances
    allocations.replace_allocations(cloud.placement, blocked, {silent: SMALL}, 'a-user', 'a-project')
    placed = cloud.create_all(order, resume=True)
    assert list(placed) == remaining
    assert f'{blocked} is claimed on {silent}, which is silent' in caplog.text
    assert cloud.server.read_allocations(blocked) == {silent: SMALL}
    complete_order = replace(cloud.make_order_on(compute), count=2, minimum=2)
    allocations.replace_allocations(
        cloud.placement, next(iter(complete_order.instances)), {silent: SMALL}, 'a-user', 'a-project'
    )
    with pytest.raises(ClaimedElsewhere):
        cloud.create_all(complete_order, resume=True)
    assert cloud.server.read_consumers(compute).keys() == set(remaining)


# In a large cluster, create queries placement about sampled computes: which ones, how often, and by wrong facts.


TOTALS = {'VCPU': 4, 'MEMORY_MB': 256, 'DISK_GB': 4}
# The number of SQL statements of placement 16.0.0 with SQLite for a query about one compute and a claim.
STATEMENTS_WITH_SAMPLE = 37
# The same for a query about all computes and a claim.
STATEMENTS_WITH_ALL = 36


@dataclass
class SampledCluster:
    """A cluster of keys and providers with four places each, and what the computes publish."""

    etcd: Etcd
    store: CountingStore
    placement: InProcessPlacement

    def make_compute(self, used: int = 0, hint: int | None = None) -> str:
        """Make a compute with `used` places taken, and publish that `hint` are, if it is given."""
        compute = str(uuid.uuid4())
        self.placement.write('POST', '/resource_providers', {'uuid': compute, 'name': compute})
        inventories = {name: {'total': total} for name, total in TOTALS.items()}
        put_with_generation(self.placement, f'/resource_providers/{compute}/inventories', inventories=inventories)
        for _ in range(used):
            body = {'allocations': {compute: {'resources': SMALL}}, 'user_id': 'u', 'project_id': 'p'}
            consumer_fields = {'consumer_generation': None, 'consumer_type': 'INSTANCE'}
            self.placement.write('PUT', f'/allocations/{uuid.uuid4()}', {**body, **consumer_fields})
        self.publish(compute, hint)
        return compute

    def publish(self, compute: str, used: int | None) -> None:
        lease = self.etcd.grant()
        self.etcd.put(keys.compute(compute), '{"token": "x"}', lease)
        room = {name: [total, (used or 0) * total // 4] for name, total in TOTALS.items()}
        self.etcd.put(keys.facts(compute), '' if used is None else json.dumps({'room': room}), lease)

    def create(self, large: int | None = 0, weigh: str = SPREAD, **changes: Any) -> str:
        """Place an instance, and leave its calls in `placement.calls` and `statements`."""
        order = SetOrder(
            make_uuid(), query=RESOURCES, image=IMAGE, user_id='u', project_id='p', stages={'requested': 'x'}
        )
        order = replace(order, weigh=weigh, **changes)
        backend: Future[tuple[Placement, Offer]] = Future()
        self.placement.calls.clear()
        self.store.request_count, before = 0, self.placement.statements
        backend.set_result(
            (self.placement, Offer(()) if large is not None else read_candidates(self.placement, RESOURCES))
        )
        scheduler = Scheduler(self.store, backend.result, OWNER, random.Random(1), lambda: 'now')
        delivered = create(scheduler, order, False, large)
        (compute,) = (outcome.compute for outcome in delivered.values())
        self.statements = self.placement.statements - before
        value = self.etcd.get(keys.request(compute, order.instance))
        request = parse_request(compute, keys.request(compute, order.instance), value or b'')
        assert isinstance(request, Request)
        assert request.allocations == {compute: SMALL}
        assert request.why is not None
        self.sample_size = request.why.of
        return compute

    @property
    def queries(self) -> list[str]:
        queries = []
        for call in self.placement.calls:
            subject = call.rpartition('in_tree=')[2].partition('&')[0] if 'in_tree=' in call else 'all'
            queries.append('claim' if call.startswith('PUT /allocations') else subject)
        return queries


@pytest.fixture
def cluster(own_etcd: Etcd, placement_in_process: InProcessPlacement) -> Iterator[SampledCluster]:
    with closing(CountingStore(EtcdConfig((own_etcd.endpoint,)))) as store:
        yield SampledCluster(own_etcd, store, placement_in_process)


def test_create_takes_one_query_and_one_claim(cluster: SampledCluster) -> None:
    best = cluster.make_compute(hint=0)
    for _ in range(9):
        cluster.make_compute(used=1, hint=1)
    assert cluster.create() == best
    assert cluster.queries == [best, 'claim']
    etcd_calls = cluster.store.request_count
    assert cluster.sample_size == 10
    # In order: quota, lease, attempt, troubles, sample, quota again, delivery, end of the lease.
    assert etcd_calls == 8
    assert cluster.create(large=None) != ''
    assert cluster.queries == ['all', 'claim']
    # Without sampling, the names of all computes are read, the other attempts, and which equal ones have the image.
    assert cluster.store.request_count == etcd_calls + 2


@pytest.mark.real_servers
@pytest.mark.parametrize('computes', [10, 40])
def test_sql_statements_do_not_grow_with_the_computes(
    cluster: SampledCluster, computes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, 'MAX_OFFER_AGE_SECONDS', 60.0)  # a slow machine would query placement again
    for _ in range(computes):
        cluster.make_compute(hint=0)
    cluster.publish(cluster.create(), 1)  # placement caches the user, the project and the trait names from now on
    compute = cluster.create()  # one of the sample: not all of 40 computes are sampled
    assert cluster.queries == [compute, 'claim']
    assert cluster.statements == STATEMENTS_WITH_SAMPLE
    assert cluster.create(large=None) != ''
    assert cluster.statements == STATEMENTS_WITH_ALL


def test_compute_that_has_the_image_is_preferred_to_equal_ones(cluster: SampledCluster) -> None:
    computes = [cluster.make_compute(used=1, hint=1) for _ in range(6)]
    room = {name: [total, total // 4] for name, total in TOTALS.items()}
    facts = json.dumps({'room': room, 'images': [hash_image(IMAGE)]})
    cluster.etcd.put(keys.facts(computes[3]), facts, cluster.etcd.grant())
    assert cluster.create(large=None) == computes[3]
    assert cluster.create(large=None, weigh=RANDOM) in computes
    emptier = cluster.make_compute(hint=0)
    assert cluster.create(large=None) == emptier


def test_small_cluster_is_queried_as_a_whole(cluster: SampledCluster) -> None:
    for _ in range(3):
        cluster.make_compute(hint=0)
    cluster.create(large=3)
    assert cluster.queries == ['all', 'claim']


@pytest.mark.parametrize(('weigh', 'number'), [(SPREAD, 0), (PACK, 3)])
def test_best_sampled_compute_depends_on_the_weighing(cluster: SampledCluster, weigh: str, number: int) -> None:
    computes = [cluster.make_compute(used=used, hint=used) for used in range(5)]
    assert cluster.create(weigh=weigh) == computes[number]
    assert cluster.queries == [computes[number], 'claim']
    assert cluster.sample_size == 4  # the fifth is full


def test_random_weighing_queries_any_compute(cluster: SampledCluster) -> None:
    computes = {cluster.make_compute(hint=used) for used in range(4)}
    assert cluster.create(weigh=RANDOM) in computes
    assert len(cluster.queries) == 2


def test_compute_that_is_full_in_spite_of_its_facts_is_passed_over(cluster: SampledCluster) -> None:
    stale, better = cluster.make_compute(used=4, hint=0), cluster.make_compute(used=2, hint=2)
    assert cluster.create() == better
    assert cluster.queries == [stale, better, 'claim']


def test_wrong_facts_lead_to_a_query_about_all_computes(cluster: SampledCluster) -> None:
    for _ in range(5):
        cluster.make_compute(used=4, hint=0)
    room = cluster.make_compute(used=3, hint=4)
    assert cluster.create() == room
    assert cluster.queries[MAX_QUERIES:] == ['all', 'claim']
    assert 'all' not in cluster.queries[:MAX_QUERIES]


def test_refusal_is_preceded_by_a_query_about_all_computes(cluster: SampledCluster) -> None:
    for _ in range(5):
        cluster.make_compute(used=4, hint=0)
    with pytest.raises(NoCapacity, match='no compute satisfies the whole query'):
        cluster.create()
    assert len(cluster.queries) == MAX_QUERIES + 1
    assert cluster.queries[-1] == 'all'
    assert not cluster.etcd.list_keys(keys.ATTEMPTS)


def test_disabled_compute_is_not_offered_despite_its_facts(cluster: SampledCluster) -> None:
    disabled, other = cluster.make_compute(hint=0), cluster.make_compute(used=1, hint=1)
    put_with_generation(cluster.placement, f'/resource_providers/{disabled}/traits', traits=['COMPUTE_STATUS_DISABLED'])
    assert cluster.create() == other
    assert cluster.queries == [disabled, other, 'claim']


@pytest.mark.parametrize('value', ['{"room": 7}', 'rubbish', '{"room": {"VCPU": [1e400, 5]}}'])
def test_compute_with_malformed_facts_is_found_by_the_full_query(cluster: SampledCluster, value: str) -> None:
    compute = cluster.make_compute()
    cluster.etcd.put(keys.facts(compute), value, cluster.etcd.grant())
    assert cluster.create() == compute
    assert cluster.queries == ['all', 'claim']


def test_presence_key_without_a_lease_is_ignored(cluster: SampledCluster) -> None:
    dead, alive = cluster.make_compute(hint=0), cluster.make_compute(used=1, hint=1)
    cluster.etcd.put(keys.facts(dead), json.dumps({'room': {name: [total, 0] for name, total in TOTALS.items()}}))
    assert cluster.create() == alive


def test_samples_from_all_positions_reach_every_compute(cluster: SampledCluster) -> None:
    computes = sorted(cluster.make_compute(hint=0) for _ in range(40))
    sampled = set()
    for start in ('0' * 8, computes[20], 'f' * 8):
        entries, number = cluster.store.sample(keys.COMPUTES, keys.compute(start), 16)
        assert number == 40
        assert len(entries) == 16
        sampled |= {keys.get_last_part(entry.key) for entry in entries}
    assert len(sampled) == 32
    wrapped, _ = cluster.store.sample(keys.COMPUTES, keys.compute(computes[39]), 100)
    assert [keys.get_last_part(entry.key) for entry in wrapped] == [computes[39], *computes[:39]]


@pytest.mark.parametrize(('query', 'asked'), [
    (RESOURCES, SMALL),
    ('resources=VCPU:1%2CMEMORY_MB:2', {'VCPU': 1, 'MEMORY_MB': 2}),
    *((f'{RESOURCES}&{more}', None) for more in ('required=HW_CPU_X86_AVX2', 'member_of=x', 'in_tree=x', 'limit=1')),
    *((f'{RESOURCES}&{more}', None) for more in ('resources1=VCPU:1', 'root_required=X', 'resources=VCPU:1')),
    ('required=X&resources=VCPU:1', None),
    ('resources=VCPU', None),
    ('', None),
])  # fmt: skip
def test_only_plain_amounts_are_sampled(query: str, asked: object) -> None:
    assert get_sampleable_amounts(query, 1, SPREAD) == asked
    assert get_sampleable_amounts(query, 2, SPREAD) is None
    assert get_sampleable_amounts(query, 1, FIRST) is None


def test_number_of_queried_computes_is_limited(cluster: SampledCluster) -> None:
    for number in range(4):
        cluster.make_compute(used=4, hint=number % 3)
    room = cluster.make_compute(used=3, hint=4)
    assert cluster.create() == room
    assert len(cluster.queries) == MAX_QUERIES + 2


def test_troubled_compute_is_not_sampled_and_gets_what_no_other_has_room_for(cluster: SampledCluster) -> None:
    troubled = [cluster.make_compute(hint=0) for _ in range(5)]
    healthy = cluster.make_compute(used=3, hint=3)
    for compute in troubled:
        cluster.etcd.put(keys.troubles(compute), 'x', cluster.etcd.grant())
    assert cluster.create() == healthy
    assert cluster.queries == [healthy, 'claim']
    cluster.publish(healthy, 4)
    assert cluster.create() in troubled
    assert cluster.queries == ['all', 'claim']
    # A key that would not expire is no trouble.
    cluster.etcd.put(keys.troubles(troubled[0]), 'x')
    assert cluster.create() == troubled[0]


def test_number_of_named_dead_computes_is_limited(cluster: SampledCluster, caplog: pytest.LogCaptureFixture) -> None:
    alive = cluster.make_compute()
    for _ in range(MAX_LOGGED_COMPUTES + 3):
        cluster.etcd.delete(keys.compute(dead := cluster.make_compute()))
        cluster.etcd.put(keys.hostname(dead), encode(StoredHostname(f'hv-{dead[:8]}')))
    assert cluster.create(large=None) == alive
    messages = [record.message for record in caplog.records if 'not alive' in record.message]
    assert len(messages) == MAX_LOGGED_COMPUTES + 1
    assert messages[-1] == '3 more computes are not alive: skipped'
    # Three calls more than with live computes only: the computes, and two pages of host names.
    assert cluster.store.request_count == 12


def test_facts_of_an_invalid_uuid_are_not_queried(cluster: SampledCluster) -> None:
    """Check that such keys, which make an invalid or a longer query, cannot make creates fail."""
    cluster.make_compute(used=1, hint=1)
    facts = json.dumps({'room': {name: [total, 0] for name, total in TOTALS.items()}})
    for name in ('test', 'x&required=HW_CPU_X86_AVX2', str(uuid.uuid4()).upper()):
        cluster.etcd.put(keys.facts(name), facts, cluster.etcd.grant())
    compute = cluster.create()
    assert cluster.queries == [compute, 'claim']
