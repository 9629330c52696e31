"""A name is one living instance's, on real etcd and placement: whoever races for it, however it is said."""

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
    """A small guest of this name."""
    return replace(cloud.wanted(compute or cloud.compute()), name=name, **given)  # type: ignore[arg-type]


def owner(cloud: Cloud, name: str) -> str | None:
    value = cloud.etcd.get(keys.name(name))
    return None if value is None else named(value)


def record(cloud: Cloud, wanted: SetOrder, state: str) -> None:
    """As its compute would write it; one that failed with its name on the same lease."""
    compute = wanted.query.rpartition('=')[2]
    made = Record(wanted.instance, compute, state, image=IMAGE, query=wanted.query, name=wanted.name)
    if state == ERROR:
        lease = cloud.store.grant(3600)
        mine, change = freed(cloud.store, wanted.name, wanted.instance, lease)
        put = Put(keys.record(compute, wanted.instance), to_json(replace(made, error=FAILURE)), lease)
        assert cloud.store.commit(mine, [put, *change])
        cloud.etcd.delete(keys.request(compute, wanted.instance))
    else:
        cloud.etcd.put_record(to_json(made))


def refusal(cloud: Cloud, wanted: SetOrder, resume: bool = False) -> str:
    """Why it is not made; '' if it is."""
    try:
        cloud.create(wanted, resume=resume)
    except Conflict as error:
        return str(error)
    return ''


# Given with the delivery


def test_it_comes_with_the_request_and_says_so(cloud: Cloud, name: str) -> None:
    compute = cloud.compute()
    keys_given, data = ('ssh-ed25519 A me',), b'\x1f\x8b\0\xff'
    wanted = called(cloud, name, compute, ssh_keys=keys_given, user_data=data)
    assert cloud.create(wanted) == DeliveryOutcome(compute)
    assert json.loads(cloud.etcd.get(keys.name(name)) or b'') == {'version': 1, 'instance': wanted.instance}
    request = cloud.delivered(compute, wanted.instance)
    assert (request.name, request.ssh_keys, request.user_data) == (name, keys_given, data)
    found = living(cloud.store, wanted.instance)
    assert (found.name, found.record.name) == (name, name)
    cloud.is_whole(compute, wanted)


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

    def meanwhile() -> str:
        cloud.create(second)
        return 'now'

    with pytest.raises(Conflict, match=f'is the name of instance {second.instance}'):
        cloud.create(first, now=meanwhile)
    cloud.has_nothing_of(first)
    assert owner(cloud, name) == second.instance


def test_one_that_becomes_free_between_the_claim_and_the_delivery(cloud: Cloud, name: str) -> None:
    failed, wanted = called(cloud, name), called(cloud, name)
    cloud.create(failed)
    record(cloud, failed, ERROR)

    def meanwhile() -> str:
        destroy(cloud.store, failed.instance)
        return 'now'

    cloud.create(wanted, now=meanwhile)
    assert owner(cloud, name) == wanted.instance


@pytest.mark.parametrize('has_name', [True, False])
@pytest.mark.parametrize('arrives', [True, False])
def test_a_delivery_that_is_lost_or_whose_answer_is(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, name: str, arrives: bool, has_name: bool
) -> None:
    compute, wanted = cloud.make_order()
    wanted = replace(wanted, name=name if has_name else None)
    key = keys.request(compute, wanted.instance)
    find(shaky_store, wanted.instance)  # it is connected
    etcd_proxy.lose(b'"consumer_generation"', (lambda: cloud.etcd.get(key)) if arrives else None)
    if arrives:
        assert cloud.create(wanted, store=shaky_store) == DeliveryOutcome(compute)
        cloud.is_whole(compute, wanted)
    else:
        with pytest.raises(Conflict, match='not delivered: .*; nothing was placed, and its claim is released'):
            cloud.create(wanted, store=shaky_store)
        cloud.has_nothing_of(wanted, compute)
    assert etcd_proxy.has_lost
    assert owner(cloud, name) == (wanted.instance if arrives and has_name else None)


# The same uuid again


@pytest.mark.parametrize('seen', [False, True])
def test_the_same_again_says_so_and_another_is_a_conflict(cloud: Cloud, name: str, seen: bool) -> None:
    compute = cloud.compute()
    wanted = called(cloud, name, compute, ssh_keys=('ssh-ed25519 A canary',), user_data=b'#! canary')
    cloud.create(wanted)
    if seen:
        record(cloud, wanted, ACTIVE)
    before = cloud.etcd.get(keys.request(compute, wanted.instance))
    assert cloud.create(wanted, resume=True) == DeliveryOutcome(compute, again=True)
    others: list[tuple[dict[str, object], str]] = [
        ({'name': None}, f'exists, by the name {name}'),
        ({'name': 'another'}, f'exists, by the name {name}'),
        ({'ssh_keys': None}, 'exists, with other ssh keys'),
        ({'ssh_keys': ()}, 'exists, with other ssh keys'),
        ({'user_data': None}, 'exists, with other user-data'),
        ({'user_data': b'#! canary!'}, 'exists, with other user-data'),
    ]
    for changed, reason in others:
        with pytest.raises(Conflict, match=reason) as caught:
            cloud.create(replace(wanted, **changed), resume=True)  # type: ignore[arg-type]
        assert 'canary' not in str(caught.value)
    assert cloud.etcd.get(keys.request(compute, wanted.instance)) == before
    nameless = cloud.wanted(compute)
    cloud.create(nameless)
    with pytest.raises(Conflict, match='exists, without a name'):
        cloud.create(replace(nameless, name=name), resume=True)


def test_many_at_one_uuid_and_name_end_in_one_instance(cloud: Cloud, name: str) -> None:
    wanted = called(cloud, name)

    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda _: refusal(cloud, wanted, resume=True), range(6)))
    assert '' in said
    assert not any('is the name of' in each for each in said), said
    cloud.is_whole(wanted.query.rpartition('=')[2], wanted)
    assert owner(cloud, name) == wanted.instance


# Free again


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
    if end == ERROR:  # the record of the first one goes, and the name of the second one stays
        destroy(cloud.store, first.instance)
        assert owner(cloud, name) == second.instance


def test_a_failed_one_is_found_by_its_name_until_it_is_destroyed(cloud: Cloud, name: str) -> None:
    wanted = called(cloud, name)
    cloud.create(wanted)
    record(cloud, wanted, ERROR)
    assert resolve(cloud.store, name) == wanted.instance
    destroy(cloud.store, wanted.instance)
    assert cloud.etcd.get(keys.name(name)) is None
    with pytest.raises(NotFound, match=f'{name}: no living instance has this name'):
        resolve(cloud.store, name)


def test_a_tombstone_has_the_name_for_a_compute_that_saw_nothing_else(cloud: Cloud, name: str) -> None:
    compute = cloud.compute()
    wanted = called(cloud, name, compute, user_data=b'#!', ssh_keys=('ssh-rsa A',))
    cloud.create(wanted)
    destroy(cloud.store, wanted.instance)
    request = cloud.delivered(compute, wanted.instance)
    assert (request.name, request.user_data, request.ssh_keys) == (name, None, None)


def test_nobody_else_s_name_is_let_go_or_given_back(cloud: Cloud, name: str) -> None:
    wanted, other = called(cloud, name), new()
    cloud.create(wanted)
    for instance, mine in ((wanted.instance, True), (other, False)):
        conditions, change = freed(cloud.store, name, instance)
        assert bool(conditions) == bool(change) == mine
    assert freed(cloud.store, None, wanted.instance) == ([], [])
    assert given_back(cloud.store, name, wanted.instance) == ([], [])
    assert given_back(cloud.store, name, other) is None
    cloud.etcd.put(keys.name(name), 'not JSON')
    assert freed(cloud.store, name, wanted.instance) == ([], [])
    assert given_back(cloud.store, name, wanted.instance) is None
    with pytest.raises(EcompError, match=f'/names/{name}: .* etcdctl del /names/{name}'):
        resolve(cloud.store, name)
    cloud.etcd.delete(keys.name(name))
    conditions, change = given_back(cloud.store, name, other) or ([], [])
    assert cloud.store.commit(conditions, change)
    assert owner(cloud, name) == other
    cloud.etcd.delete(keys.name(name))


# Every way to say which


def test_a_uuid_s_beginning(cloud: Cloud, name: str) -> None:
    compute, digits = cloud.compute(VCPU=9, MEMORY_MB=9999, DISK_GB=99), new()[:8]
    instances = [f'{digits}-{middle}{new()[18:]}' for middle in ('1111-4111', '1112-4111', '2222-4111')]
    for number, instance in enumerate(instances):
        cloud.create(replace(cloud.wanted(compute, instance), name=name if not number else None))
    # One has a record and one's request is gone: all three are found all the same.
    for number, state in ((1, ACTIVE), (2, ERROR)):
        record(cloud, cloud.wanted(compute, instances[number]), state)
    for instance, ways in (
        (instances[0], [name, f'{digits}-1111', f'{digits}1111'.upper(), instances[0]]),
        (instances[1], [f'{digits}-1112', instances[1][:-1]]),
        (instances[2], [f'{digits}-2', f'{digits}2']),
    ):
        for word in ways:
            assert resolve(cloud.store, word) == instance
    with pytest.raises(UsageError) as caught:
        resolve(cloud.store, digits)
    assert str(caught.value) == f'{digits}: 3 instances begin so: {", ".join(instances)}'
    with pytest.raises(UsageError, match=f'{digits}-111: 2 instances begin so: {instances[0]}, {instances[1]}$'):
        resolve(cloud.store, f'{digits}-111')
    with pytest.raises(NotFound, match='no living instance has this name, and no uuid begins so'):
        resolve(cloud.store, f'{digits}-3')
    assert resolve(cloud.store, nobody := new()) == nobody, 'a whole one is not looked up'


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
