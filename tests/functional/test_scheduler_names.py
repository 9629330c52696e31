"""Test that a name belongs to one live instance, and how names and uuids are resolved."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ecomp.errors import Conflict, EcompError, NotFound, UsageError
from ecomp.model import keys
from ecomp.model.order import NameOwner, SetOrder
from ecomp.model.record import Failure, Record
from ecomp.model.states import ACTIVE, DESTROYING, ERROR, GONE
from ecomp.model.stored import decode, encode
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.scheduler.queries.find import find, find_living, resolve
from ecomp.shared.names import release_name, restore_name
from ecomp.store.client import Put, Store
from tests.functional.cloud import IMAGE, Cloud, make_uuid
from tests.kit.proxy import Proxy
from tests.kit.store_client import read_entry

FAILURE = Failure('image', 'HTTP 404', 'nothing is left')


@pytest.fixture
def name() -> str:
    return f'web-{make_uuid()}'


def make_named_order(cloud: Cloud, name: str, compute: str | None = None, **changes: object) -> SetOrder:
    return replace(cloud.make_order_on(compute or cloud.make_compute()), name=name, **changes)  # type: ignore[arg-type]


def read_owner(cloud: Cloud, name: str) -> str | None:
    value = cloud.etcd.get(keys.name(name))
    return None if value is None else decode(NameOwner, value).instance


def write_record(cloud: Cloud, order: SetOrder, state: str) -> None:
    """Write a record as its compute does: an error record and the name share a lease."""
    compute = order.query.rpartition('=')[2]
    base_record = Record(order.instance, compute, state, image=IMAGE, query=order.query, name=order.name)
    if state == ERROR:
        lease = cloud.store.grant(3600)
        conditions, change = release_name(cloud.store, order.name, order.instance, lease)
        put = Put(keys.record(compute, order.instance), encode(replace(base_record, error=FAILURE)), lease)
        assert cloud.store.commit(conditions, [put, *change])
        cloud.etcd.delete(keys.request(compute, order.instance))
    else:
        cloud.etcd.put_record(encode(base_record))


# Reserving a name with the delivery


def test_delivery_reserves_the_name(cloud: Cloud, name: str) -> None:
    compute = cloud.make_compute()
    ssh_keys, data = ('ssh-ed25519 A me',), b'\x1f\x8b\0\xff'
    order = make_named_order(cloud, name, compute, ssh_keys=ssh_keys, user_data=data)
    assert cloud.create(order) == DeliveryOutcome(compute)
    assert json.loads(cloud.etcd.get(keys.name(name)) or b'') == {'version': 1, 'instance': order.instance}
    request = cloud.read_request(compute, order.instance)
    assert (request.name, request.ssh_keys, request.user_data) == (name, ssh_keys, data)
    result = find_living(cloud.store, order.instance)
    assert result.record.name == name
    cloud.assert_placed(compute, order)


def test_name_in_use_is_refused_before_the_claim(cloud: Cloud, name: str) -> None:
    first, second = make_named_order(cloud, name), make_named_order(cloud, name)
    cloud.create(first)
    with pytest.raises(Conflict, match=f'{name}: this name belongs to instance {first.instance}. Fix: choose another'):
        cloud.create(second)
    cloud.assert_not_placed(second)
    for state in (ACTIVE, DESTROYING):
        write_record(cloud, first, state)
        with pytest.raises(Conflict, match='this name belongs to instance'):
            cloud.create(second)
    destroy(cloud.store, first.instance)
    with pytest.raises(Conflict, match='which is being destroyed. Fix: wait until it is gone'):
        cloud.create(second)
    assert read_owner(cloud, name) == first.instance


def test_name_released_between_claim_and_delivery_is_reserved(cloud: Cloud, name: str) -> None:
    failed, order = make_named_order(cloud, name), make_named_order(cloud, name)
    cloud.create(failed)
    write_record(cloud, failed, ERROR)

    def destroy_failed() -> str:
        destroy(cloud.store, failed.instance)
        return 'now'

    cloud.create(order, now=destroy_failed)
    assert read_owner(cloud, name) == order.instance


@pytest.mark.parametrize('has_name', [True, False])
@pytest.mark.parametrize('arrives', [True, False])
def test_lost_delivery_keeps_name_and_claim_consistent(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, name: str, arrives: bool, has_name: bool
) -> None:
    compute, order = cloud.make_order()
    order = replace(order, name=name if has_name else None)
    key = keys.request(compute, order.instance)
    find(shaky_store, order.instance)  # opens the connection
    etcd_proxy.lose(b'"consumer_generation"', (lambda: cloud.etcd.get(key)) if arrives else None)
    if arrives:
        assert cloud.create(order, store=shaky_store) == DeliveryOutcome(compute)
        cloud.assert_placed(compute, order)
    else:
        with pytest.raises(Conflict, match='not delivered: .*; nothing was placed, and the claim in placement is rel'):
            cloud.create(order, store=shaky_store)
        cloud.assert_not_placed(order, compute)
    assert etcd_proxy.has_lost
    assert read_owner(cloud, name) == (order.instance if arrives and has_name else None)


# Repeated orders with one uuid


@pytest.mark.parametrize('seen', [False, True])
def test_repeated_order_succeeds_and_a_different_one_is_a_conflict(cloud: Cloud, name: str, seen: bool) -> None:
    compute = cloud.make_compute()
    order = make_named_order(cloud, name, compute, ssh_keys=('ssh-ed25519 A canary',), user_data=b'#! canary')
    cloud.create(order)
    if seen:
        write_record(cloud, order, ACTIVE)
    before = cloud.etcd.get(keys.request(compute, order.instance))
    assert cloud.create(order, resume=True) == DeliveryOutcome(compute, is_repeated=True)
    differences: list[tuple[dict[str, object], str]] = [
        ({'name': None}, f'exists, but was requested with the name {name}'),
        ({'name': 'another'}, f'exists, but was requested with the name {name}'),
        ({'ssh_keys': None}, 'exists, but was requested with other ssh keys'),
        ({'ssh_keys': ()}, 'exists, but was requested with other ssh keys'),
        ({'user_data': None}, 'exists, but was requested with other user-data'),
        ({'user_data': b'#! canary!'}, 'exists, but was requested with other user-data'),
    ]
    for fields, reason in differences:
        with pytest.raises(Conflict, match=reason) as caught:
            cloud.create(replace(order, **fields), resume=True)  # type: ignore[arg-type]
        assert 'canary' not in str(caught.value)
    assert cloud.etcd.get(keys.request(compute, order.instance)) == before
    nameless = cloud.make_order_on(compute)
    cloud.create(nameless)
    with pytest.raises(Conflict, match='exists, but was requested without a name'):
        cloud.create(replace(nameless, name=name), resume=True)


# Releasing a name


@pytest.mark.parametrize('end', [GONE, ERROR, 'no record'])
def test_name_of_an_ended_instance_is_free(cloud: Cloud, name: str, end: str) -> None:
    first, second = make_named_order(cloud, name), make_named_order(cloud, name)
    cloud.create(first)
    if end == 'no record':
        cloud.etcd.delete(keys.request(first.query.rpartition('=')[2], first.instance))
    else:
        write_record(cloud, first, end)
    cloud.create(second)
    assert read_owner(cloud, name) == second.instance
    assert read_entry(cloud.store, keys.name(name)).lease == 0
    if end == ERROR:  # destroying the first instance's record keeps the name of the second one
        destroy(cloud.store, first.instance)
        assert read_owner(cloud, name) == second.instance


def test_failed_instance_is_found_by_name_until_it_is_destroyed(cloud: Cloud, name: str) -> None:
    order = make_named_order(cloud, name)
    cloud.create(order)
    write_record(cloud, order, ERROR)
    assert resolve(cloud.store, name) == order.instance
    destroy(cloud.store, order.instance)
    assert cloud.etcd.get(keys.name(name)) is None
    with pytest.raises(NotFound, match=f'{name}: no living instance has this name'):
        resolve(cloud.store, name)


def test_foreign_name_is_neither_released_nor_restored(cloud: Cloud, name: str) -> None:
    order, other = make_named_order(cloud, name), make_uuid()
    cloud.create(order)
    for instance, is_owner in ((order.instance, True), (other, False)):
        conditions, change = release_name(cloud.store, name, instance)
        assert bool(conditions) == bool(change) == is_owner
    assert release_name(cloud.store, None, order.instance) == ([], [])
    assert restore_name(cloud.store, name, order.instance) == ([], [])
    assert restore_name(cloud.store, name, other) is None
    cloud.etcd.put(keys.name(name), 'not JSON')
    assert release_name(cloud.store, name, order.instance) == ([], [])
    assert restore_name(cloud.store, name, order.instance) is None
    with pytest.raises(EcompError, match=f'/names/{name}: .* `etcdctl del /names/{name}`'):
        resolve(cloud.store, name)
    cloud.etcd.delete(keys.name(name))
    conditions, change = restore_name(cloud.store, name, other) or ([], [])
    assert cloud.store.commit(conditions, change)
    assert read_owner(cloud, name) == other
    cloud.etcd.delete(keys.name(name))


# Resolving an argument to an instance


def test_beginning_of_a_uuid_is_resolved(cloud: Cloud, name: str) -> None:
    compute, digits = cloud.make_compute(VCPU=9, MEMORY_MB=9999, DISK_GB=99), make_uuid()[:8]
    instances = [f'{digits}-{middle}{make_uuid()[18:]}' for middle in ('1111-4111', '1112-4111', '2222-4111')]
    for number, instance in enumerate(instances):
        cloud.create(replace(cloud.make_order_on(compute, instance), name=name if not number else None))
    # One instance has a record, and the request of another is gone: all three are found.
    for number, state in ((1, ACTIVE), (2, ERROR)):
        write_record(cloud, cloud.make_order_on(compute, instances[number]), state)
    for instance, arguments in (
        (instances[0], [name, f'{digits}-1111', f'{digits}1111'.upper(), instances[0]]),
        (instances[1], [f'{digits}-1112', instances[1][:-1]]),
        (instances[2], [f'{digits}-2', f'{digits}2']),
    ):
        for argument in arguments:
            assert resolve(cloud.store, argument) == instance
    with pytest.raises(UsageError) as caught:
        resolve(cloud.store, digits)
    listed = f'3 uuids of instances begin with it: {", ".join(instances)}'
    assert str(caught.value) == f'{digits}: {listed}. Fix: give more digits'
    listed = f'2 uuids of instances begin with it: {instances[0]}, {instances[1]}'
    with pytest.raises(UsageError, match=f'{digits}-111: {listed}. Fix: give more digits$'):
        resolve(cloud.store, f'{digits}-111')
    with pytest.raises(NotFound, match='no living instance has this name, and no uuid begins with it'):
        resolve(cloud.store, f'{digits}-3')
    assert resolve(cloud.store, unknown := make_uuid()) == unknown, 'a whole one is not looked up'


def test_name_takes_precedence_over_the_beginning_of_a_uuid(cloud: Cloud) -> None:
    compute, digits = cloud.make_compute(VCPU=9, MEMORY_MB=9999, DISK_GB=99), make_uuid()[:8]
    other, named = (
        replace(cloud.make_order_on(compute), instance=digits + make_uuid()[8:]),
        make_named_order(cloud, digits),
    )
    cloud.create(other)
    assert resolve(cloud.store, digits) == other.instance
    cloud.create(replace(cloud.make_order_on(compute, named.instance), name=digits))
    assert resolve(cloud.store, digits) == named.instance
    assert resolve(cloud.store, other.instance[:9]) == other.instance


def test_number_of_named_ambiguous_instances_is_limited(cloud: Cloud) -> None:
    digits = make_uuid()[:8]
    for _ in range(8):
        instance = digits + make_uuid()[8:]
        cloud.etcd.put_record(encode(Record(instance, make_uuid(), ACTIVE, image=IMAGE)))
    with pytest.raises(
        UsageError, match=r'8 uuids of instances begin with it: \S+, \S+, \S+, \S+, \S+ and 3 more\. Fix: '
    ):
        resolve(cloud.store, digits)


def test_name_of_a_missing_instance_is_resolved_but_not_live(cloud: Cloud, name: str) -> None:
    cloud.etcd.put(keys.name(name), encode(NameOwner(instance := make_uuid())))
    assert resolve(cloud.store, name) == instance
    with pytest.raises(NotFound, match=f'{instance}: no such instance'):
        find_living(cloud.store, instance)
    cloud.etcd.delete(keys.name(name))
