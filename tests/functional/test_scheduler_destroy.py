"""eschedule's destroy, and what it finds: on real etcd and placement, also when an answer is lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import NotFound
from ecomp.model import keys
from ecomp.model import order as requests
from ecomp.model.group import Group, Membership
from ecomp.model.group import to_json as group_to_json
from ecomp.model.order import Request, Shares
from ecomp.model.record import ACTIVE, ERROR, GONE, Failure, Record, new_record, to_json
from ecomp.scheduler.changing.change import clear, destroy
from ecomp.scheduler.looking.find import find, living
from ecomp.store.client import Delete, Put, Snapshot, Store
from ecomp.store.sharing import index
from tests.functional.cloud import IMAGE, SMALL, Cloud, CountingStore, interpose, new
from tests.kit.proxy import Proxy
from tests.kit.servers import Etcd
from tests.kit.store_client import read_entry

pytestmark = pytest.mark.fast

# Destroy, find


def test_a_destroy_is_a_tombstone(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order()
    cloud.create(wanted)
    assert destroy(cloud.store, wanted.instance) == f'{wanted.instance}: destroy accepted, {compute} carries it out'
    value = json.loads(cloud.etcd.get(keys.request(compute, wanted.instance)) or b'')
    assert (value['allocations'], value['image'], value['instance']) == ({}, None, wanted.instance)
    assert cloud.delivered(compute, wanted.instance).is_tombstone
    # The allocation is the compute's to release, when the guest is gone.
    assert cloud.server.allocations(wanted.instance) == {compute: SMALL}
    before = cloud.store.get(keys.request(compute, wanted.instance))
    assert 'being destroyed' in destroy(cloud.store, wanted.instance)
    assert cloud.store.get(keys.request(compute, wanted.instance)) == before
    assert living(cloud.store, wanted.instance).is_destroying


def test_a_destroy_by_two_is_one(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order()
    cloud.create(wanted)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: destroy(cloud.store, wanted.instance), range(4)))
    assert sum('accepted' in answer for answer in answers) == 1
    assert sum('already' in answer for answer in answers) == 3


@pytest.mark.parametrize('has_request', [True, False])
@pytest.mark.parametrize('call', ['read', 'commit'])
def test_what_ends_while_it_is_looked_at_is_not_destroyed_again(cloud: Cloud, call: str, has_request: bool) -> None:
    compute, instance = cloud.compute(), new()
    cloud.etcd.put_record(to_json(Record(instance, compute, ACTIVE, image=IMAGE)))
    if has_request:
        cloud.etcd.put(keys.request(compute, instance), json.dumps({'instance': instance}))
    request, gone = keys.request(compute, instance), Record(instance, compute, GONE, stages={'gone': 'just now'})

    def end() -> None:  # as by its compute
        cloud.store.commit([], [Delete(request), Put(keys.record(compute, instance), to_json(gone))])

    store = Store(EtcdConfig((cloud.etcd.endpoint,)))
    store = interpose(store, call, end, lambda what, *_: call == 'commit' or request in what)
    with pytest.raises(NotFound, match='gone since just now'):
        destroy(store, instance)
    assert cloud.etcd.get(keys.request(compute, instance)) is None


def test_a_destroy_waits_for_a_compute_that_is_silent(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order()
    cloud.create(wanted)
    cloud.etcd.delete(keys.compute(compute))
    assert destroy(cloud.store, wanted.instance).endswith('when it is back: it is silent now')
    assert cloud.delivered(compute, wanted.instance).is_tombstone


@pytest.mark.parametrize('state', [GONE, ERROR])
def test_what_lives_again_is_neither_cleared_nor_destroyed(cloud: Cloud, state: str) -> None:
    instance, compute = new(), new()
    record = Record(instance, compute, state, image=IMAGE, error=Failure('image', 'HTTP 404', 'nothing is left'))
    cloud.etcd.put_record(to_json(record))
    # Cleared by somebody, and asked for anew.
    alive = [Put(keys.record(compute, instance), to_json(replace(record, state=ACTIVE, error=None)))]
    alive.append(Put(keys.request(compute, instance), json.dumps({'instance': instance})))
    store = Store(EtcdConfig((cloud.etcd.endpoint,)))
    cleared = clear(interpose(store, 'commit', lambda: cloud.store.commit([], alive)))
    assert instance not in cleared.removed
    # Other tests leave records in this etcd that nobody can read: clear says so of each.
    assert not [error for error in cleared.errors if instance in str(error)]
    found = find(cloud.store, instance)
    assert found is not None
    assert (found.record.state, found.is_destroying) == (ACTIVE, False)


class ListingStore(Store):
    """A store that counts its lists."""

    lists = 0

    def snapshot(self, *given: Any, **named: Any) -> Snapshot:
        self.lists += 1
        return super().snapshot(*given, **named)


@pytest.mark.parametrize('there', [1, 20])
def test_clear_lists_once_however_many_there_are(own_etcd: Etcd, there: int) -> None:
    compute, store = new(), ListingStore(EtcdConfig((own_etcd.endpoint,)))
    # On a compute that is not alive, and taken out of a queue.
    for state, where in ((GONE, compute), (ERROR, compute), (GONE, '')) * there:
        own_etcd.put(keys.record(where, instance := new()), to_json(Record(instance, where, state, image=IMAGE)))
    assert len(clear(store).removed) == 3 * there
    # What waits, is requested and has a record; and where each is of the latter two.
    assert store.lists == 3 + 2
    store.close()


def test_a_destroy_of_one_that_its_compute_will_refuse_says_what_it_shared(cloud: Cloud) -> None:
    """A newer eschedule delivered it. Its compute sees the tombstone alone."""
    compute, instance = new(), new()
    name, group = f'n{instance}', Group(f'g{instance}', 'anti-affinity', False, {instance: compute})
    membership = Membership(group.name, group.policy, group.strict)
    newer = Request(
        instance,
        {compute: SMALL},
        image=IMAGE,
        user_id='a-user',
        project_id='a-project',
        query='query',
        stages={},
        name=name,
        group=membership,
    )
    key = keys.request(compute, instance)
    cloud.etcd.put(key, json.dumps({**json.loads(requests.to_json(newer)), 'version': 99}))
    cloud.etcd.put(keys.group(group.name), group_to_json(group))
    destroy(cloud.store, instance)
    tombstone = requests.parse_request(compute, key, read_entry(cloud.store, key).value)
    assert isinstance(tombstone, Request)
    assert tombstone.is_tombstone
    assert requests.shares(tombstone) == Shares(name, group.name, 'a-project', SMALL)


def test_a_destroy_without_its_request_is_asked_for_anew(cloud: Cloud) -> None:
    # The key was removed by hand: the domain is kept, and only this takes it down.
    instance, compute = new(), new()
    cloud.etcd.put_record(to_json(Record(instance, compute, ACTIVE, image=IMAGE, query='resources=…')))
    destroy(cloud.store, instance)
    assert cloud.delivered(compute, instance).is_tombstone


@pytest.mark.parametrize('arrives', [True, False])
def test_a_destroy_that_is_lost_or_whose_answer_is(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, arrives: bool
) -> None:
    compute, wanted = cloud.make_order()
    cloud.create(wanted)
    living(shaky_store, wanted.instance)  # it is connected
    # The tombstone, and not the reads before it, holds the query with the image beside it null.
    applied = (lambda: cloud.delivered(compute, wanted.instance).is_tombstone) if arrives else None
    etcd_proxy.lose(b'"allocations": {}', applied)
    answer = destroy(shaky_store, wanted.instance)
    assert etcd_proxy.has_lost
    assert ('already' in answer) is arrives
    assert cloud.delivered(compute, wanted.instance).is_tombstone


def test_what_is_known_of_an_instance(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order()
    assert find(cloud.store, wanted.instance) is None
    cloud.create(wanted)
    found = find(cloud.store, wanted.instance)
    assert found is not None
    assert found.record_entry is None
    assert (found.record.state, found.record.compute, found.record.resources) == ('scheduled', compute, SMALL)
    cloud.etcd.put_record(to_json(replace(found.record, state=ACTIVE)))
    found = find(cloud.store, wanted.instance)
    assert found is not None
    assert found.record.state == ACTIVE
    assert found.request_entry is not None
    assert not found.is_destroying


def test_with_an_index_one_of_many_is_found_by_one_question(own_etcd: Etcd) -> None:
    """Without it each costs a question for every 64 computes."""
    with closing(CountingStore(EtcdConfig((own_etcd.endpoint,)))) as store:
        lease = own_etcd.grant()
        computes = [new() for _ in range(200)]
        for compute in computes:
            own_etcd.put(keys.compute(compute), '{"token": "x"}', lease)
        there = [new() for _ in range(3)]
        for instance in there:
            request = Request(instance, {computes[7]: SMALL}, image=IMAGE, user_id='u', project_id='p', stages={})
            own_etcd.put(keys.request(computes[7], instance), requests.to_json(request))
        among = index(store)
        for instance in there:
            before = store.asked
            found = find(store, instance, among)
            assert found is not None
            assert found.record.compute == computes[7]
            assert store.asked == before + 1
            assert found == find(store, instance)
        # Its compute has taken it since, and written a record; then the request is gone.
        record = new_record(computes[7], found.request or request, 'now').at(ACTIVE, 'now', 'started')
        own_etcd.put(keys.record(computes[7], there[0]), to_json(replace(record, instance=there[0])))
        for _ in range(2):
            found = find(store, there[0], among)
            assert found is not None
            assert found.record.state == ACTIVE
            own_etcd.delete(keys.request(computes[7], there[0]))
        # It is gone where it was; and another one has come since.
        own_etcd.delete(keys.request(computes[7], there[1]))
        assert find(store, there[1], among) is None
        late = new()
        own_etcd.put(keys.request(computes[9], late), requests.to_json(replace(request, instance=late)))
        found = find(store, late, among)
        assert found is not None
        assert found.record.compute == computes[9]
        assert destroy(store, late, among) == f'{late}: destroy accepted, {computes[9]} carries it out'


def test_the_names_of_records_are_listed_once_for_those_that_no_compute_is_asked_for(own_etcd: Etcd) -> None:
    """A record is four times as long as its name, and etcd reads it all the same; two lists are twice as many names."""
    with closing(CountingStore(EtcdConfig((own_etcd.endpoint,)))) as store:
        lease = own_etcd.grant()
        computes = [new() for _ in range(3)]
        for compute in computes[:2]:
            own_etcd.put(keys.compute(compute), '{"token": "x"}', lease)
        asked, *ended = (new() for _ in range(3))
        request = Request(asked, {computes[0]: SMALL}, image=IMAGE, user_id='u', project_id='p', stages={})
        own_etcd.put(keys.request(computes[0], asked), requests.to_json(request))
        own_etcd.put(keys.record(computes[0], asked), to_json(Record(asked, computes[0], ACTIVE, image=IMAGE)))
        # The computes of these are not alive; what one of 1.0 wrote is below none.
        own_etcd.put(keys.record(computes[2], ended[0]), to_json(Record(ended[0], computes[2], GONE, image=IMAGE)))
        own_etcd.put(keys.old_record(ended[1]), to_json(Record(ended[1], computes[2], ERROR, image=IMAGE)))
        # Somebody else's word of one that is asked for elsewhere counts neither way.
        own_etcd.put(keys.record(computes[2], asked), to_json(Record(asked, computes[2], GONE, image=IMAGE)))
        among = index(store)
        assert store.asked == 1
        found = find(store, asked, among)
        assert found is not None
        assert (found.record.compute, found.record.state) == (computes[0], ACTIVE)
        assert store.asked == 2
        for instance, state, questions in ((ended[0], GONE, 2), (ended[1], ERROR, 1)):
            before = store.asked
            found = find(store, instance, among)
            assert found is not None
            assert (found.record.compute, found.record.state) == (computes[2], state)
            assert store.asked == before + questions
            assert found == find(store, instance)
