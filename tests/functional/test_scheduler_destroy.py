"""Test destroy, stop, start and reboot as eschedule requests them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import Conflict, EcompError, NotFound, StillGoing
from ecomp.model import keys
from ecomp.model import order as requests
from ecomp.model.group import Group, Membership
from ecomp.model.order import (
    REBOOT,
    SHUT_OFF,
    SHUTDOWN_REQUESTED,
    START,
    STOP,
    Holdings,
    NameOwner,
    PowerAction,
    Request,
)
from ecomp.model.record import Failure, Record, make_record
from ecomp.model.states import ACTIVE, ERROR, GONE, STOPPED
from ecomp.model.stored import encode
from ecomp.model.text import format_time
from ecomp.scheduler.changes.change import Acceptance, change_power, destroy
from ecomp.scheduler.changes.wait import Deadline, Wait, wait_for_power
from ecomp.scheduler.queries.find import find, find_living, resolve
from ecomp.shared.places import KeyIndex, read_index
from ecomp.store.client import Delete, Put, Snapshot, Store, describe_user
from tests.functional.cloud import IMAGE, SMALL, Cloud, CountingStore, interpose, make_uuid
from tests.kit.removal import clear
from tests.kit.servers import SLOWDOWN_FACTOR, Etcd, wait_until
from tests.kit.store_client import read_entry


@pytest.mark.fast
def test_destroy_writes_a_tombstone(cloud: Cloud) -> None:
    compute, order = cloud.make_order()
    cloud.create(order)
    assert destroy(cloud.store, order.instance) == f'{order.instance}: destroy accepted; {compute} carries it out'
    value = json.loads(cloud.etcd.get(keys.request(compute, order.instance)) or b'')
    assert (value['allocations'], value['image'], value['instance']) == ({}, None, order.instance)
    assert cloud.read_request(compute, order.instance).is_tombstone
    # The compute releases the allocation after it has removed the guest.
    assert cloud.server.read_allocations(order.instance) == {compute: SMALL}
    before = cloud.store.get(keys.request(compute, order.instance))
    assert 'being destroyed' in destroy(cloud.store, order.instance)
    assert cloud.store.get(keys.request(compute, order.instance)) == before
    assert find_living(cloud.store, order.instance).is_destroying


@pytest.mark.fast
@pytest.mark.parametrize('has_request', [True, False])
@pytest.mark.parametrize('call', ['read', 'commit'])
def test_instance_that_ends_during_destroy_is_not_destroyed_again(cloud: Cloud, call: str, has_request: bool) -> None:
    compute, instance = cloud.make_compute(), make_uuid()
    cloud.etcd.put_record(encode(Record(instance, compute, ACTIVE, image=IMAGE)))
    if has_request:
        cloud.etcd.put(keys.request(compute, instance), json.dumps({'instance': instance}))
    request, gone = keys.request(compute, instance), Record(instance, compute, GONE, stages={'gone': 'just now'})

    def end_instance() -> None:  # as its compute does
        cloud.store.commit([], [Delete(request), Put(keys.record(compute, instance), encode(gone))])

    store = Store(EtcdConfig((cloud.etcd.endpoint,)))
    store = interpose(store, call, end_instance, lambda what, *_: call == 'commit' or request in what)
    with pytest.raises(NotFound, match='has been gone since just now'):
        destroy(store, instance)
    assert cloud.etcd.get(keys.request(compute, instance)) is None


@pytest.mark.fast
def test_destroy_waits_for_a_silent_compute(cloud: Cloud) -> None:
    compute, order = cloud.make_order()
    cloud.create(order)
    cloud.etcd.delete(keys.compute(compute))
    assert destroy(cloud.store, order.instance).endswith('once this compute is no longer silent')
    assert cloud.read_request(compute, order.instance).is_tombstone


@pytest.mark.fast
@pytest.mark.parametrize('state', [GONE, ERROR])
def test_clear_keeps_an_instance_that_was_created_again(cloud: Cloud, state: str) -> None:
    instance, compute = make_uuid(), make_uuid()
    record = Record(instance, compute, state, image=IMAGE, error=Failure('image', 'HTTP 404', 'nothing is left'))
    cloud.etcd.put_record(encode(record))
    # Another client cleared the record and created the instance again.
    alive = [Put(keys.record(compute, instance), encode(replace(record, state=ACTIVE, error=None)))]
    alive.append(Put(keys.request(compute, instance), json.dumps({'instance': instance})))
    store = Store(EtcdConfig((cloud.etcd.endpoint,)))
    cleared = clear(interpose(store, 'commit', lambda: cloud.store.commit([], alive)))
    assert instance not in cleared.removed
    # Other tests leave malformed records in this etcd, and clear reports each of them.
    assert not [error for error in cleared.errors if instance in str(error)]
    instance_state = find(cloud.store, instance)
    assert instance_state is not None
    assert (instance_state.record.state, instance_state.is_destroying) == (ACTIVE, False)


class ListCountingStore(Store):
    lists = 0

    def snapshot(self, *args: Any, **named: Any) -> Snapshot:
        self.lists += 1
        return super().snapshot(*args, **named)


@pytest.mark.fast
@pytest.mark.parametrize('there', [1, 20])
def test_clear_takes_a_constant_number_of_range_reads(own_etcd: Etcd, there: int) -> None:
    compute, store = make_uuid(), ListCountingStore(EtcdConfig((own_etcd.endpoint,)))
    # Records of a compute that is not alive, and of requests that were removed from a queue.
    for state, host in ((GONE, compute), (ERROR, compute), (GONE, '')) * there:
        own_etcd.put(keys.record(host, instance := make_uuid()), encode(Record(instance, host, state, image=IMAGE)))
    assert len(clear(store).removed) == 3 * there
    # Queue entries, requests and records, and the locations of requests and of records.
    assert store.lists == 3 + 2
    store.close()


@pytest.mark.fast
def test_tombstone_of_a_newer_request_names_its_shared_keys(cloud: Cloud) -> None:
    """Check a request that the compute cannot read: it sees only the tombstone."""
    compute, instance = make_uuid(), make_uuid()
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
    cloud.etcd.put(key, json.dumps({**json.loads(encode(newer)), 'version': 99}))
    cloud.etcd.put(keys.group(group.name), encode(group))
    destroy(cloud.store, instance)
    tombstone = requests.parse_request(compute, key, read_entry(cloud.store, key).value)
    assert isinstance(tombstone, Request)
    assert tombstone.is_tombstone
    assert requests.get_holdings(tombstone) == Holdings(name, group.name, 'a-project', SMALL)


@pytest.mark.fast
def test_destroy_without_a_request_writes_a_tombstone(cloud: Cloud) -> None:
    # The request was removed manually: the domain is kept until a tombstone destroys it.
    instance, compute = make_uuid(), make_uuid()
    cloud.etcd.put_record(encode(Record(instance, compute, ACTIVE, image=IMAGE, query='resources=…')))
    destroy(cloud.store, instance)
    assert cloud.read_request(compute, instance).is_tombstone


@pytest.mark.fast
def test_find_with_an_index_takes_one_call(own_etcd: Etcd) -> None:
    """Check the cost: without an index, a lookup takes one call for every 64 computes."""
    with closing(CountingStore(EtcdConfig((own_etcd.endpoint,)))) as store:
        lease = own_etcd.grant()
        computes = [make_uuid() for _ in range(200)]
        for compute in computes:
            own_etcd.put(keys.compute(compute), '{"token": "x"}', lease)
        instances = [make_uuid() for _ in range(3)]
        for instance in instances:
            request = Request(instance, {computes[7]: SMALL}, image=IMAGE, user_id='u', project_id='p', stages={})
            own_etcd.put(keys.request(computes[7], instance), encode(request))
        located = read_index(store)
        for instance in instances:
            before = store.request_count
            result = find(store, instance, located)
            assert result is not None
            assert result.record.compute == computes[7]
            assert store.request_count == before + 1
            assert result == find(store, instance)
        # After the index was read, the compute writes a record; then the request is deleted.
        record = make_record(computes[7], result.request or request, 'now').enter_state(ACTIVE, 'now', 'started')
        own_etcd.put(keys.record(computes[7], instances[0]), encode(replace(record, instance=instances[0])))
        for _ in range(2):
            result = find(store, instances[0], located)
            assert result is not None
            assert result.record.state == ACTIVE
            own_etcd.delete(keys.request(computes[7], instances[0]))
        # After the index was read, one instance is deleted and another one is added.
        own_etcd.delete(keys.request(computes[7], instances[1]))
        assert find(store, instances[1], located) is None
        late = make_uuid()
        own_etcd.put(keys.request(computes[9], late), encode(replace(request, instance=late)))
        result = find(store, late, located)
        assert result is not None
        assert result.record.compute == computes[9]
        assert destroy(store, late, located) == f'{late}: destroy accepted; {computes[9]} carries it out'


@pytest.mark.fast
@pytest.mark.parametrize(('compute_count', 'max_calls'), [(10, 6), (1000, 8)])
def test_destroy_by_name_searches_once(own_etcd: Etcd, compute_count: int, max_calls: int) -> None:
    with closing(CountingStore(EtcdConfig((own_etcd.endpoint,)))) as store:
        lease, instance = own_etcd.grant(), make_uuid()
        computes = [make_uuid() for _ in range(compute_count)]
        for start in range(0, compute_count, 100):
            store.commit([], [Put(keys.compute(each), '{}', lease) for each in computes[start : start + 100]])
        request = Request(
            instance, {computes[7]: SMALL}, image=IMAGE, user_id='u', project_id='p', stages={}, name='web'
        )
        own_etcd.put(keys.request(computes[7], instance), encode(request))
        own_etcd.put(keys.name('web'), encode(NameOwner(instance)))
        before, key_index = store.request_count, KeyIndex({})
        assert resolve(store, 'web', key_index) == instance
        assert destroy(store, instance, key_index) == f'{instance}: destroy accepted; {computes[7]} carries it out'
        assert store.request_count - before <= max_calls


@pytest.mark.fast
def test_instance_that_leaves_its_queue_between_two_listings_is_found_with_its_request(cloud: Cloud) -> None:
    """Otherwise its destroy was refused: a record without a request was expected to have none."""
    compute, order = cloud.make_order()
    key_index = read_index(cloud.store)  # before the requests are there; the records are listed later
    cloud.create(order)
    cloud.etcd.put_record(encode(Record(order.instance, compute, ACTIVE, image=IMAGE)))
    entries = find(cloud.store, order.instance, key_index)
    assert entries is not None
    assert (entries.record.state, entries.request_entry is not None) == (ACTIVE, True)
    assert 'destroy accepted' in destroy(cloud.store, order.instance, key_index)


@pytest.mark.fast
def test_index_reads_record_names_only_when_needed(own_etcd: Etcd) -> None:
    """A record is four times as long as its key, and etcd reads both even to list keys."""
    with closing(CountingStore(EtcdConfig((own_etcd.endpoint,)))) as store:
        lease = own_etcd.grant()
        computes = [make_uuid() for _ in range(3)]
        for compute in computes[:2]:
            own_etcd.put(keys.compute(compute), '{"token": "x"}', lease)
        requested, *ended = (make_uuid() for _ in range(3))
        request = Request(requested, {computes[0]: SMALL}, image=IMAGE, user_id='u', project_id='p', stages={})
        own_etcd.put(keys.request(computes[0], requested), encode(request))
        own_etcd.put(keys.record(computes[0], requested), encode(Record(requested, computes[0], ACTIVE, image=IMAGE)))
        # The computes of these are not alive.
        own_etcd.put(keys.record(computes[2], ended[0]), encode(Record(ended[0], computes[2], GONE, image=IMAGE)))
        own_etcd.put(keys.record(computes[2], ended[1]), encode(Record(ended[1], computes[2], ERROR, image=IMAGE)))
        # A record of another compute is ignored if the instance has a request elsewhere.
        own_etcd.put(keys.record(computes[2], requested), encode(Record(requested, computes[2], GONE, image=IMAGE)))
        located = read_index(store)
        assert store.request_count == 1
        result = find(store, requested, located)
        assert result is not None
        assert (result.record.compute, result.record.state) == (computes[0], ACTIVE)
        assert store.request_count == 2
        for instance, state, questions in ((ended[0], GONE, 2), (ended[1], ERROR, 1)):
            before = store.request_count
            result = find(store, instance, located)
            assert result is not None
            assert (result.record.compute, result.record.state) == (computes[2], state)
            assert store.request_count == before + questions
            assert result == find(store, instance)


# stop, start and reboot: the written request and the refusals, also with lost answers.


def create_instance(cloud: Cloud, state: str = ACTIVE, power_id: str | None = None) -> tuple[str, str]:
    compute, order = cloud.make_order()
    cloud.create(order)
    write_record(cloud, compute, order.instance, state, power_id)
    return compute, order.instance


def write_record(
    cloud: Cloud, compute: str, instance: str, state: str, power_id: str | None, fault: str | None = None
) -> None:
    record = Record(instance, compute, state, image=IMAGE, fault=fault, power=power_id)
    cloud.etcd.put_record(encode(record))


def test_power_action_is_added_to_the_request(cloud: Cloud) -> None:
    compute, instance = create_instance(cloud)
    before = {
        **json.loads(cloud.etcd.get(keys.request(compute, instance)) or b''),
        'later': {'names': ['web1', 1.5, None]},
    }
    cloud.etcd.put(keys.request(compute, instance), json.dumps(before))  # a field of a newer eschedule is kept
    stop = PowerAction(STOP, make_uuid())
    accepted = change_power(cloud.store, instance, stop)
    assert accepted.message == f'{instance}: stop accepted; {compute} carries it out'
    assert accepted.power == stop
    after = json.loads(cloud.etcd.get(keys.request(compute, instance)) or b'')
    written_at, by = after.pop('written_at'), after.pop('by')
    assert by == describe_user()
    assert format_time(datetime.fromisoformat(written_at)) == written_at
    assert after == {**before, 'power': {'action': 'stop', 'id': stop.id}}
    assert list(after)[:-1] == list(before)
    assert cloud.read_request(compute, instance).power == stop
    cloud.etcd.delete(keys.compute(compute))
    assert change_power(cloud.store, instance, PowerAction(REBOOT, make_uuid())).message.endswith(
        'once this compute is no longer silent'
    )


def test_repeated_power_action_changes_nothing(cloud: Cloud) -> None:
    compute, instance = create_instance(cloud)
    stop, second_stop = PowerAction(STOP, make_uuid()), PowerAction(STOP, make_uuid())
    change_power(cloud.store, instance, stop)
    before = cloud.etcd.get(keys.request(compute, instance))
    repeated = change_power(cloud.store, instance, second_stop)
    assert repeated.message == f'{instance}: stop was requested before; {compute} is carrying it out'
    assert repeated.power == stop, 'that one is to be waited for'
    write_record(cloud, compute, instance, STOPPED, stop.id)
    assert change_power(cloud.store, instance, second_stop) == Acceptance(f'{instance}: is already stopped')
    assert cloud.etcd.get(keys.request(compute, instance)) == before
    # A reboot is carried out in any state.
    assert change_power(cloud.store, instance, PowerAction(REBOOT, make_uuid())).power is not None


def test_power_action_is_refused(cloud: Cloud) -> None:
    stop = PowerAction(STOP, make_uuid())
    with pytest.raises(NotFound, match='no such instance'):
        change_power(cloud.store, make_uuid(), stop)
    for state, reason in (('building', 'is being built. Fix: wait'), ('error', 'is in error'), ('scheduled', 'wait')):
        _, instance = create_instance(cloud, state)
        with pytest.raises(Conflict, match=reason):
            change_power(cloud.store, instance, stop)
    compute, instance = create_instance(cloud)
    cloud.etcd.put(keys.request(compute, instance), 'nonsense')
    with pytest.raises(Conflict, match='its request is malformed: not JSON'):
        change_power(cloud.store, instance, stop)
    cloud.etcd.delete(keys.request(compute, instance))
    with pytest.raises(Conflict, match='its request was removed'):
        change_power(cloud.store, instance, stop)
    _, instance = create_instance(cloud)
    destroy(cloud.store, instance)
    with pytest.raises(Conflict, match='is being destroyed'):
        change_power(cloud.store, instance, stop)


# Waiting for a power action


def test_wait_reports_the_steps_of_a_reboot(cloud: Cloud) -> None:
    messages: list[str] = []
    power_id, reboot = make_uuid(), PowerAction(REBOOT, make_uuid())
    compute, instance = create_instance(cloud, power_id=power_id)
    accepted = change_power(cloud.store, instance, reboot)
    config = EtcdConfig((cloud.etcd.endpoint,))

    def is_waiting_for(event: str) -> bool:
        return any(f'waiting for {event}' in message for message in messages)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_power, Wait(config, instance, Deadline(60), messages.append), accepted)
        wait_until(lambda: is_waiting_for('its compute to accept the request'), 10, 'nobody is at it')
        write_record(cloud, compute, instance, ACTIVE, reboot.format_phase(SHUTDOWN_REQUESTED))
        wait_until(lambda: is_waiting_for('the guest to shut down'), 10, 'it is asked')
        write_record(cloud, compute, instance, STOPPED, reboot.format_phase(SHUT_OFF))
        wait_until(lambda: is_waiting_for('its domain to start'), 10, 'it is off')
        write_record(cloud, compute, instance, ACTIVE, reboot.id)
        assert waiting.result(SLOWDOWN_FACTOR * 20).state == ACTIVE


def test_wait_for_a_failed_power_action_ends(cloud: Cloud) -> None:
    start = PowerAction(START, make_uuid())
    compute, instance = create_instance(cloud, STOPPED)
    accepted, config = change_power(cloud.store, instance, start), EtcdConfig((cloud.etcd.endpoint,))

    def wait(seconds: float = 20) -> Record:
        return wait_for_power(Wait(config, instance, Deadline(seconds), lambda _: None), accepted)

    with pytest.raises(StillGoing, match=r'continues\), still waiting for its compute to accept the request$'):
        wait(0.1)
    write_record(cloud, compute, instance, STOPPED, start.id, 'it could not be started: no room')
    with pytest.raises(EcompError, match='it could not be started: no room') as caught:
        wait()
    assert caught.value.exit_code == 1
    write_record(cloud, compute, instance, STOPPED, start.id)
    with pytest.raises(EcompError, match='it was started and is off again'):
        wait()
    write_record(cloud, compute, instance, STOPPED, make_uuid())
    with pytest.raises(Conflict, match='another power change was requested'):
        wait()
    write_record(cloud, compute, instance, GONE, start.id)
    with pytest.raises(NotFound, match='destroyed during the wait'):
        wait()
