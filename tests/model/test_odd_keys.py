"""Manual writes to etcd, and what operators' commands report and do about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from ecomp.cli.history import in_sentences, why
from ecomp.errors import Conflict, NotFound, StillGoing
from ecomp.model import keys
from ecomp.model.group import Group, Membership
from ecomp.model.group import from_json as group_from_json
from ecomp.model.group import to_json as group_json
from ecomp.model.host import to_json
from ecomp.model.json_object import dump, load_object
from ecomp.model.order import STOP, Power, Request
from ecomp.model.order import to_json as request_json
from ecomp.model.queue import mark_to_json
from ecomp.model.record import ACTIVE, ERROR, GONE, Failure, Record, from_json
from ecomp.model.record import to_json as record_json
from ecomp.placement.client import Placement
from ecomp.scheduler.changing.change import destroy, power
from ecomp.scheduler.changing.wait import Deadline
from ecomp.scheduler.looking.find import find
from ecomp.scheduler.operating.audit import audit, mend
from ecomp.scheduler.operating.decommission import UNSEEN, disable, drained, enable, forget, inhabitants
from ecomp.scheduler.operating.sharing import limit, one_quota
from ecomp.store.client import Delete, Put
from ecomp.store.sharing import highest_released
from tests.model.cloud import FLAVOR, QUERY, SIZE, A, B, Cloud, U, V, W
from tests.model.explorer import quiet_cloud
from tests.model.virtual import NOW

pytestmark = pytest.mark.fast


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with quiet_cloud() as quiet:
        yield quiet


@pytest.mark.parametrize('junk', ['junk', '', f'junk/{U}'])
def test_a_drain_waits_for_no_key_that_names_no_instance(cloud: Cloud, junk: str) -> None:
    cloud.host(A)
    cloud.store.commit([], [Put(keys.request(A, junk), 'x')])
    disable(cloud.placement, A, 'hv1')
    assert inhabitants(cloud.store, cloud.placement, A, 'hv1') == ['hv1: no instances there']
    drained(cloud.store, cloud.placement, A, 'hv1', Deadline(5.0), lambda _: None)


# Presence keys without a lease: they do not prove that a compute is alive (rule 12)


def is_silent(cloud: Cloud) -> None:
    """End the compute's lease, and put its presence key manually without a lease."""
    cloud.etcd.end(cloud.computes[A].presence.lease)
    cloud.computes[A].is_dead = True
    cloud.store.commit([], [Put(keys.compute(A), '{"hostname":"hv1"}'), Put(keys.hostname(A), to_json('hv1'))])


def forgotten(cloud: Cloud) -> list[str]:
    lines: list[str] = []
    forget(cloud.store, cloud.placement, A, 'hv1', lambda: NOW, lines.append, fenced=True)
    return lines


def codes(cloud: Cloud) -> set[str]:
    return {finding.code for finding in audit(cloud.store, cloud.placement).findings}


def mended(cloud: Cloud) -> list[str]:
    """Return the repairs of `audit --fix`, after two checks."""
    reports = [audit(cloud.store, cloud.placement) for _ in range(2)]
    return mend(cloud.store, cloud.placement, *reports)


def test_a_compute_without_a_lease_is_forgotten_with_that_key(cloud: Cloud) -> None:
    cloud.host(A)
    is_silent(cloud)
    assert forgotten(cloud) == [
        'hv1: its resource provider is removed',
        f'{keys.compute(A)}: removed: it was on no lease',
    ]
    assert A not in cloud.model.providers
    assert not {keys.compute(A), keys.hostname(A)} & cloud.etcd.entries.keys()


def test_such_a_key_alone_is_removed_too(cloud: Cloud) -> None:
    """A killed `host forget` of a compute without a name leaves only this key."""
    key = keys.compute(A)
    cloud.store.commit([], [Put(key, '{"hostname":"hv1"}')])
    assert forgotten(cloud) == [f'{key}: removed: it was on no lease']
    assert key not in cloud.etcd.entries
    with pytest.raises(NotFound, match='no such compute'):
        forgotten(cloud)


def test_how_often_what_it_ended_was_claimed_is_noted(cloud: Cloud) -> None:
    """Another `host forget` may be frozen before its release, and the uuid may be used again."""
    host = cloud.host(A)
    cloud.delivered(U, A)
    host.plan(3)
    destroy(cloud.store, U)
    is_silent(cloud)
    forgotten(cloud)
    assert highest_released(cloud.store, [U]) == 1


def test_so_is_one_that_had_a_destroy_to_carry_out_and_has_no_name(cloud: Cloud) -> None:
    host = cloud.host(A)
    cloud.delivered(U, A)
    host.plan(3)
    is_silent(cloud)
    cloud.store.commit([], [Delete(keys.hostname(A))])
    assert destroy(cloud.store, U) == f'{U}: destroy accepted, {A} carries it out when it is back: it is silent now'
    assert len(forgotten(cloud)) == 3
    assert U not in cloud.model.held
    assert not {keys.compute(A), keys.request(A, U)} & cloud.etcd.entries.keys()


def test_one_that_comes_alive_is_not_forgotten(cloud: Cloud) -> None:
    host = cloud.host(A)
    is_silent(cloud)

    def bring_back(_: str) -> None:
        host.look_after_presence()

    with pytest.raises(Conflict, match='came back while it was being forgotten'):
        forget(cloud.store, cloud.placement, A, 'hv1', lambda: NOW, bring_back, fenced=True)
    assert cloud.etcd.entries[keys.compute(A)].lease
    assert keys.hostname(A) in cloud.etcd.entries


def test_what_is_asked_of_such_a_compute_is_said_to_wait(cloud: Cloud) -> None:
    host = cloud.host(A)
    cloud.delivered(U, A)
    host.plan(4)
    is_silent(cloud)
    disable(cloud.placement, A, 'hv1')
    assert enable(cloud.store, cloud.placement, A, 'hv1') == 'hv1: enabled, as soon as its ecompute is started'
    message = power(cloud.store, U, Power(STOP, W)).said
    assert message == f'{U}: stop accepted, {A} carries it out when it is back: it is silent now'


def test_the_name_of_such_a_compute_is_removed_where_nothing_else_is_left(cloud: Cloud) -> None:
    cloud.host(A)
    is_silent(cloud)
    del cloud.model.providers[A]
    assert mended(cloud) == [f'hostname-orphaned {A}: {keys.hostname(A)} is deleted']


# Quotas


def test_what_failed_gives_back_its_share_once_though_its_host_is_forgotten(cloud: Cloud) -> None:
    cloud.hosts(A, B)
    cloud.limited(3)
    cloud.delivered(U, B)
    failed = Record(V, A, ERROR, project_id='p', resources=SIZE, error=Failure('image', '404', 'all'))
    # An eschedule of 2019 requests a destroy in any state.
    destroyed = Request(V, {}, user_id='u', project_id='p')
    puts = [Put(keys.record(A, V), record_json(failed)), Put(keys.request(A, V), request_json(destroyed))]
    cloud.store.commit([], puts)
    is_silent(cloud)
    forgotten(cloud)
    last = from_json(cloud.etcd.entries[keys.record(A, V)].value)
    assert (last.state, last.error, last.fault) == (GONE, failed.error, UNSEEN)
    assert one_quota(cloud.store, 'p').used == {**SIZE, 'instances': 1}


def test_what_a_newer_eschedule_delivered_counts(cloud: Cloud) -> None:
    cloud.host(A)
    cloud.limited(1)
    cloud.delivered(U, A)
    key = keys.request(A, U)
    newer = {**load_object(cloud.etcd.entries[key].value), 'version': 2}
    cloud.store.commit([], [Put(key, dump(newer)), Put(keys.request(A, V), dump({**newer, 'version': 1}))])
    is_silent(cloud)
    assert 'quota-differs' not in codes(cloud)
    assert limit(cloud.store, 'p', ['instances=1']) == 'quota of project p: instances 1/1'
    assert one_quota(cloud.store, 'p').used == {**SIZE, 'instances': 1}


def test_what_waits_and_cannot_be_read_gives_back_what_it_shared(cloud: Cloud) -> None:
    """A newer eschedule may have queued the entry."""
    cloud.limited(5)
    key = cloud.waiting(U, 'web', Membership('g', 'anti-affinity', True)).waiting.key
    newer = {**load_object(cloud.etcd.entries[key].value), 'version': 2}
    cloud.store.commit([], [Put(key, dump(newer))])
    assert codes(cloud) == {'queued-unreadable'}
    assert limit(cloud.store, 'p', ['instances=5']) == 'quota of project p: instances 1/5'
    destroy(cloud.store, U)
    assert not {key, keys.name('web'), keys.group('g')} & cloud.etcd.entries.keys()
    assert one_quota(cloud.store, 'p').used == {}


@pytest.mark.parametrize('project', ['p', None])
def test_a_destroy_of_2019_counts_for_what_its_record_says_until_its_compute_is_back(
    cloud: Cloud, project: str | None
) -> None:
    host = cloud.host(A)
    cloud.limited(5)
    cloud.delivered(U, A)
    host.plan(2)
    owner = {'user_id': 'u', 'project_id': project, 'consumer_generation': None}
    destroyed = dump({'allocations': {}, 'instance': U, 'image': None, **owner})
    cloud.store.commit([], [Put(keys.request(A, U), destroyed)])
    is_silent(cloud)
    assert 'quota-differs' not in codes(cloud)
    assert limit(cloud.store, 'p', ['instances=5']) == 'quota of project p: instances 1/5'
    assert one_quota(cloud.store, 'p').used == {**SIZE, 'instances': 1}
    forgotten(cloud)
    assert one_quota(cloud.store, 'p').used == {}


def test_it_counts_by_the_record_of_the_compute_that_is_asked(cloud: Cloud) -> None:
    """Another compute, which is alive, records that the instance is gone there."""
    cloud.hosts(A, B)
    cloud.limited(5)
    active, gone = Record(U, A, ACTIVE, project_id='p', resources=SIZE), Record(U, B, GONE)
    destroyed = Request(U, {}, user_id='u', project_id='p')
    puts = [Put(keys.record(record.compute, U), record_json(record)) for record in (active, gone)]
    cloud.store.commit([], [*puts, Put(keys.request(A, U), request_json(destroyed))])
    is_silent(cloud)
    limit(cloud.store, 'p', ['instances=5'])
    assert one_quota(cloud.store, 'p').used == {**SIZE, 'instances': 1}
    assert 'quota-differs' not in codes(cloud)


def test_one_of_what_failed_counts_for_nothing(cloud: Cloud) -> None:
    cloud.host(A)
    cloud.limited(3)
    failed = Record(V, A, ERROR, project_id='p', resources=SIZE, error=Failure('image', '404', 'all'))
    destroyed = Request(V, {}, user_id='u', project_id='p')
    puts = [Put(keys.record(A, V), record_json(failed)), Put(keys.request(A, V), request_json(destroyed))]
    cloud.store.commit([], puts)
    assert 'quota-differs' not in codes(cloud)
    limit(cloud.store, 'p', ['instances=3'])
    assert one_quota(cloud.store, 'p').used == {}


def test_a_right_quota_stays_right_where_a_request_has_ended(cloud: Cloud) -> None:
    host = cloud.host(A)
    cloud.limited(5)
    cloud.delivered(U, A)
    host.plan(2)
    request_value = cloud.etcd.entries[keys.request(A, U)].value
    destroy(cloud.store, U)
    host.plan(2)
    is_silent(cloud)
    cloud.store.commit([], [Put(keys.request(A, U), request_value.decode())])
    assert {'quota-differs', 'request-ended'} <= codes(cloud)
    mended(cloud)
    assert keys.request(A, U) not in cloud.etcd.entries
    assert one_quota(cloud.store, 'p').used == {}


def test_a_record_that_cannot_be_read_keeps_its_own_place_in_a_group_alone(cloud: Cloud) -> None:
    host = cloud.host(A)
    cloud.delivered(U, A, None, Membership('g', 'affinity', True))
    host.plan(2)
    wrong_group = Group('g', 'affinity', True, {U: A, V: A, W: A})
    puts = [
        Put(keys.group('g'), group_json(wrong_group)),
        *(Put(keys.record(A, instance), '{"rubbish') for instance in (U, V)),
    ]
    cloud.store.commit([], puts)
    assert f'group-orphaned g: {W} is taken out' in mended(cloud)
    assert group_from_json('g', cloud.etcd.entries[keys.group('g')].value).members == {U: A, V: A}


# Attempt and taker keys without a lease: they belong to no process (rule 12)


def test_a_host_is_drained_and_forgotten_whatever_is_on_no_lease(cloud: Cloud) -> None:
    cloud.host(A)
    cloud.claimed(W, A)
    queue_key = keys.queue('small', V)
    attempt = Put(keys.attempt(W), dump({'version': 1, 'instances': [W]}))
    cloud.store.commit([], [attempt, Put(keys.taker(queue_key), mark_to_json(A))])
    disable(cloud.placement, A, 'hv1')
    with pytest.raises(StillGoing, match='1 instance to go'):
        drained(cloud.store, cloud.placement, A, 'hv1', Deadline(5.0), lambda _: None)
    is_silent(cloud)
    assert f'{W}: its claim is released: no request stands behind it' in forgotten(cloud)
    cloud.host(B)
    disable(cloud.placement, B, 'hv2')
    drained(cloud.store, cloud.placement, B, 'hv2', Deadline(5.0), lambda _: None)


def test_why_what_waits_for_a_flavor_that_is_gone_waits(cloud: Cloud) -> None:
    cloud.host(A)
    cloud.waiting(U, 'web')
    cloud.store.commit([], [Delete(keys.flavor(FLAVOR))])
    record = find(cloud.store, U)
    assert record is not None
    text = in_sentences(why(cloud.store, lambda: cast(Placement, cloud.placement), record))
    assert text.splitlines()[1:] == [
        f'it asked for {QUERY}',
        'its flavor is not there, and nobody takes it: eschedule flavor set it again, or eschedule destroy it',
    ]
