"""Test that a name belongs to one live instance, and how names and uuids are resolved."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ecomp.errors import Conflict, EcompError, NotFound, UsageError
from ecomp.model import keys
from ecomp.model.order import SetOrder, name_to_json, named
from ecomp.model.record import ACTIVE, DESTROYING, ERROR, GONE, Failure, Record, to_json
from ecomp.scheduler.changing.change import destroy
from ecomp.scheduler.looking.find import find, living, resolve
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.store.client import Put, Store
from ecomp.store.sharing import freed, given_back
from tests.functional.cloud import IMAGE, Cloud, new
from tests.kit.proxy import Proxy
from tests.kit.store_client import read_entry

FAILURE = Failure('image', 'HTTP 404', 'nothing is left')


@pytest.fixture
def name() -> str:
    return f'web-{new()}'


def called(cloud: Cloud, name: str, compute: str | None = None, **given: object) -> SetOrder:
    """Make an order for a small instance with this name."""
    return replace(cloud.wanted(compute or cloud.compute()), name=name, **given)  # type: ignore[arg-type]


def owner(cloud: Cloud, name: str) -> str | None:
    value = cloud.etcd.get(keys.name(name))
    return None if value is None else named(value)


def record(cloud: Cloud, wanted: SetOrder, state: str) -> None:
    """Write a record as the instance's compute does.

    An error record and the name are bound to the same lease.
    """
    compute = wanted.query.rpartition('=')[2]
    base_record = Record(wanted.instance, compute, state, image=IMAGE, query=wanted.query, name=wanted.name)
    if state == ERROR:
        lease = cloud.store.grant(3600)
        conditions, change = freed(cloud.store, wanted.name, wanted.instance, lease)
        put = Put(keys.record(compute, wanted.instance), to_json(replace(base_record, error=FAILURE)), lease)
        assert cloud.store.commit(conditions, [put, *change])
        cloud.etcd.delete(keys.request(compute, wanted.instance))
    else:
        cloud.etcd.put_record(to_json(base_record))


def refusal(cloud: Cloud, wanted: SetOrder, resume: bool = False) -> str:
    """Create the instance, and return the conflict's message, or '' on success."""
    try:
        cloud.create(wanted, resume=resume)
    except Conflict as error:
        return str(error)
    return ''


# Reserving a name with the delivery


def test_it_comes_with_the_request_and_says_so(cloud: Cloud, name: str) -> None:
    compute = cloud.compute()
    ssh_keys, data = ('ssh-ed25519 A me',), b'\x1f\x8b\0\xff'
    order = called(cloud, name, compute, ssh_keys=ssh_keys, user_data=data)
    assert cloud.create(order) == DeliveryOutcome(compute)
    assert json.loads(cloud.etcd.get(keys.name(name)) or b'') == {'version': 1, 'instance': order.instance}
    request = cloud.delivered(compute, order.instance)
    assert (request.name, request.ssh_keys, request.user_data) == (name, ssh_keys, data)
    result = living(cloud.store, order.instance)
    assert (result.name, result.record.name) == (name, name)
    cloud.is_whole(compute, order)


def test_a_name_that_is_somebody_s_is_refused_before_anything_is_claimed(cloud: Cloud, name: str) -> None:
    first, second = called(cloud, name), called(cloud, name)
    cloud.create(first)
    with pytest.raises(Conflict, match=f'{name}: is the name of instance {first.instance}: take another'):
        cloud.create(second)
    cloud.has_nothing_of(second)
    for state in (ACTIVE, DESTROYING):
        record(cloud, first, state)
        with pytest.raises(Conflict, match='is the name of'):
            cloud.create(second)
    destroy(cloud.store, first.instance)
    with pytest.raises(Conflict, match='is being destroyed: try again then'):
        cloud.create(second)
    assert owner(cloud, name) == first.instance


def test_one_that_is_taken_between_the_claim_and_the_delivery(cloud: Cloud, name: str) -> None:
    first, second = called(cloud, name), called(cloud, name)

    def create_second() -> str:
        cloud.create(second)
        return 'now'

    with pytest.raises(Conflict, match=f'is the name of instance {second.instance}'):
        cloud.create(first, now=create_second)
    cloud.has_nothing_of(first)
    assert owner(cloud, name) == second.instance


def test_one_that_becomes_free_between_the_claim_and_the_delivery(cloud: Cloud, name: str) -> None:
    failed, order = called(cloud, name), called(cloud, name)
    cloud.create(failed)
    record(cloud, failed, ERROR)

    def destroy_failed() -> str:
        destroy(cloud.store, failed.instance)
        return 'now'

    cloud.create(order, now=destroy_failed)
    assert owner(cloud, name) == order.instance


@pytest.mark.parametrize('has_name', [True, False])
@pytest.mark.parametrize('arrives', [True, False])
def test_a_delivery_that_is_lost_or_whose_answer_is(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, name: str, arrives: bool, has_name: bool
) -> None:
    compute, order = cloud.make_order()
    order = replace(order, name=name if has_name else None)
    key = keys.request(compute, order.instance)
    find(shaky_store, order.instance)  # opens the connection
    etcd_proxy.lose(b'"consumer_generation"', (lambda: cloud.etcd.get(key)) if arrives else None)
    if arrives:
        assert cloud.create(order, store=shaky_store) == DeliveryOutcome(compute)
        cloud.is_whole(compute, order)
    else:
        with pytest.raises(Conflict, match='not delivered: .*; nothing was placed, and its claim is released'):
            cloud.create(order, store=shaky_store)
        cloud.has_nothing_of(order, compute)
    assert etcd_proxy.has_lost
    assert owner(cloud, name) == (order.instance if arrives and has_name else None)


# Repeated orders with one uuid


@pytest.mark.parametrize('seen', [False, True])
def test_the_same_again_says_so_and_another_is_a_conflict(cloud: Cloud, name: str, seen: bool) -> None:
    compute = cloud.compute()
    order = called(cloud, name, compute, ssh_keys=('ssh-ed25519 A canary',), user_data=b'#! canary')
    cloud.create(order)
    if seen:
        record(cloud, order, ACTIVE)
    before = cloud.etcd.get(keys.request(compute, order.instance))
    assert cloud.create(order, resume=True) == DeliveryOutcome(compute, again=True)
    differences: list[tuple[dict[str, object], str]] = [
        ({'name': None}, f'exists, by the name {name}'),
        ({'name': 'another'}, f'exists, by the name {name}'),
        ({'ssh_keys': None}, 'exists, with other ssh keys'),
        ({'ssh_keys': ()}, 'exists, with other ssh keys'),
        ({'user_data': None}, 'exists, with other user-data'),
        ({'user_data': b'#! canary!'}, 'exists, with other user-data'),
    ]
    for fields, reason in differences:
        with pytest.raises(Conflict, match=reason) as caught:
            cloud.create(replace(order, **fields), resume=True)  # type: ignore[arg-type]
        assert 'canary' not in str(caught.value)
    assert cloud.etcd.get(keys.request(compute, order.instance)) == before
    nameless = cloud.wanted(compute)
    cloud.create(nameless)
    with pytest.raises(Conflict, match='exists, without a name'):
        cloud.create(replace(nameless, name=name), resume=True)


def test_many_at_one_uuid_and_name_end_in_one_instance(cloud: Cloud, name: str) -> None:
    order = called(cloud, name)

    with ThreadPoolExecutor(6) as pool:
        messages = list(pool.map(lambda _: refusal(cloud, order, resume=True), range(6)))
    assert '' in messages
    assert not any('is the name of' in message for message in messages), messages
    cloud.is_whole(order.query.rpartition('=')[2], order)
    assert owner(cloud, name) == order.instance


# Releasing a name


@pytest.mark.parametrize('end', [GONE, ERROR, 'no record'])
def test_the_name_of_one_that_ended_is_free(cloud: Cloud, name: str, end: str) -> None:
    first, second = called(cloud, name), called(cloud, name)
    cloud.create(first)
    if end == 'no record':
        cloud.etcd.delete(keys.request(first.query.rpartition('=')[2], first.instance))
    else:
        record(cloud, first, end)
    cloud.create(second)
    assert owner(cloud, name) == second.instance
    assert read_entry(cloud.store, keys.name(name)).lease == 0
    if end == ERROR:  # destroying the first instance's record keeps the name of the second one
        destroy(cloud.store, first.instance)
        assert owner(cloud, name) == second.instance


def test_a_failed_one_is_found_by_its_name_until_it_is_destroyed(cloud: Cloud, name: str) -> None:
    order = called(cloud, name)
    cloud.create(order)
    record(cloud, order, ERROR)
    assert resolve(cloud.store, name) == order.instance
    destroy(cloud.store, order.instance)
    assert cloud.etcd.get(keys.name(name)) is None
    with pytest.raises(NotFound, match=f'{name}: no living instance has this name'):
        resolve(cloud.store, name)


def test_a_tombstone_has_the_name_for_a_compute_that_saw_nothing_else(cloud: Cloud, name: str) -> None:
    compute = cloud.compute()
    order = called(cloud, name, compute, user_data=b'#!', ssh_keys=('ssh-rsa A',))
    cloud.create(order)
    destroy(cloud.store, order.instance)
    request = cloud.delivered(compute, order.instance)
    assert (request.name, request.user_data, request.ssh_keys) == (name, None, None)


def test_nobody_else_s_name_is_let_go_or_given_back(cloud: Cloud, name: str) -> None:
    order, other = called(cloud, name), new()
    cloud.create(order)
    for instance, is_owner in ((order.instance, True), (other, False)):
        conditions, change = freed(cloud.store, name, instance)
        assert bool(conditions) == bool(change) == is_owner
    assert freed(cloud.store, None, order.instance) == ([], [])
    assert given_back(cloud.store, name, order.instance) == ([], [])
    assert given_back(cloud.store, name, other) is None
    cloud.etcd.put(keys.name(name), 'not JSON')
    assert freed(cloud.store, name, order.instance) == ([], [])
    assert given_back(cloud.store, name, order.instance) is None
    with pytest.raises(EcompError, match=f'/names/{name}: .* etcdctl del /names/{name}'):
        resolve(cloud.store, name)
    cloud.etcd.delete(keys.name(name))
    conditions, change = given_back(cloud.store, name, other) or ([], [])
    assert cloud.store.commit(conditions, change)
    assert owner(cloud, name) == other
    cloud.etcd.delete(keys.name(name))


# Resolving an argument to an instance


def test_a_uuid_s_beginning(cloud: Cloud, name: str) -> None:
    compute, digits = cloud.compute(VCPU=9, MEMORY_MB=9999, DISK_GB=99), new()[:8]
    instances = [f'{digits}-{middle}{new()[18:]}' for middle in ('1111-4111', '1112-4111', '2222-4111')]
    for number, instance in enumerate(instances):
        cloud.create(replace(cloud.wanted(compute, instance), name=name if not number else None))
    # One instance has a record, and the request of another is gone: all three are found.
    for number, state in ((1, ACTIVE), (2, ERROR)):
        record(cloud, cloud.wanted(compute, instances[number]), state)
    for instance, arguments in (
        (instances[0], [name, f'{digits}-1111', f'{digits}1111'.upper(), instances[0]]),
        (instances[1], [f'{digits}-1112', instances[1][:-1]]),
        (instances[2], [f'{digits}-2', f'{digits}2']),
    ):
        for argument in arguments:
            assert resolve(cloud.store, argument) == instance
    with pytest.raises(UsageError) as caught:
        resolve(cloud.store, digits)
    assert str(caught.value) == f'{digits}: 3 instances begin so: {", ".join(instances)}'
    with pytest.raises(UsageError, match=f'{digits}-111: 2 instances begin so: {instances[0]}, {instances[1]}$'):
        resolve(cloud.store, f'{digits}-111')
    with pytest.raises(NotFound, match='no living instance has this name, and no uuid begins so'):
        resolve(cloud.store, f'{digits}-3')
    assert resolve(cloud.store, unknown := new()) == unknown, 'a whole one is not looked up'


def test_a_name_comes_before_a_uuid_that_begins_so(cloud: Cloud) -> None:
    compute, digits = cloud.compute(VCPU=9, MEMORY_MB=9999, DISK_GB=99), new()[:8]
    other, named = replace(cloud.wanted(compute), instance=digits + new()[8:]), called(cloud, digits)
    cloud.create(other)
    assert resolve(cloud.store, digits) == other.instance
    cloud.create(replace(cloud.wanted(compute, named.instance), name=digits))
    assert resolve(cloud.store, digits) == named.instance
    assert resolve(cloud.store, other.instance[:9]) == other.instance


def test_of_many_that_begin_so_a_few_are_named(cloud: Cloud) -> None:
    digits = new()[:8]
    for _ in range(8):
        instance = digits + new()[8:]
        cloud.etcd.put_record(to_json(Record(instance, new(), ACTIVE, image=IMAGE)))
    with pytest.raises(UsageError, match=r'8 instances begin so: \S+, \S+, \S+, \S+, \S+ and 3 more$'):
        resolve(cloud.store, digits)


def test_a_name_of_nothing(cloud: Cloud, name: str) -> None:
    cloud.etcd.put(keys.name(name), name_to_json(instance := new()))
    assert resolve(cloud.store, name) == instance
    with pytest.raises(NotFound, match=f'{instance}: no such instance'):
        living(cloud.store, instance)
    cloud.etcd.delete(keys.name(name))
