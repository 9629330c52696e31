"""Into queues, on real etcd and placement: put there once, whatever is lost on the way; and who stands behind a claim.

How computes take out of them is in test_out_of_queues.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ecomp.agent.host.claims import APART, ClaimKeeper
from ecomp.errors import Conflict, EcompError, UnknownOutcome
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.flavor import to_json as flavor_to_json
from ecomp.model.queue import mark_to_json
from ecomp.placement import allocations
from ecomp.scheduler.changing.change import destroy
from ecomp.scheduler.placing.claim import abandon
from ecomp.scheduler.placing.enqueue import enqueue
from ecomp.store.client import Put, Store, Unchanged, at_it
from tests.functional.cloud import SMALL, WHO, Cloud, new
from tests.functional.queueing import is_taken, put, queued, request, taker, waits
from tests.kit.proxy import Proxy
from tests.kit.store_client import read_entry

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
