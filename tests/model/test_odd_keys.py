"""Manual writes to etcd, and what operators' commands report and do about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from ecomp.cli.history import explain_placement, format_explanation
from ecomp.errors import Conflict, NotFound, StillGoing
from ecomp.model import keys
from ecomp.model.group import Group, Membership
from ecomp.model.host import StoredHostname
from ecomp.model.json_object import dump, load_object
from ecomp.model.order import STOP, PowerAction, Request
from ecomp.model.queue import QueueTaker
from ecomp.model.record import UNSEEN_END_FAULT, Failure, Record, from_json
from ecomp.model.states import ACTIVE, ERROR, GONE
from ecomp.model.stored import decode, encode
from ecomp.placement.client import Placement
from ecomp.scheduler.changes.change import change_power, destroy
from ecomp.scheduler.changes.wait import Deadline
from ecomp.scheduler.operations.audit import audit, repair_findings
from ecomp.scheduler.operations.decommission import disable, enable, list_inhabitants, wait_until_drained
from ecomp.scheduler.operations.forget import forget
from ecomp.scheduler.operations.sharing import require_quota, set_limits
from ecomp.scheduler.queries.find import find
from ecomp.shared.notes import read_highest_released
from ecomp.store.client import Delete, Put
from tests.model.cloud import FLAVOR, QUERY, SIZE, A, B, Cloud, U, V, W
from tests.model.explorer import open_quiet_cloud
from tests.model.virtual import NOW

pytestmark = pytest.mark.fast


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with open_quiet_cloud() as quiet:
        yield quiet


@pytest.mark.parametrize('junk', ['junk', '', f'junk/{U}'])
def test_drain_ignores_a_key_without_an_instance(cloud: Cloud, junk: str) -> None:
    cloud.add_host(A)
    cloud.store.commit([], [Put(keys.request(A, junk), 'x')])
    disable(cloud.placement, A, 'hv1')
    assert list_inhabitants(cloud.store, cloud.placement, A, 'hv1') == ['hv1: no instances there']
    wait_until_drained(cloud.store, cloud.placement, A, 'hv1', Deadline(5.0), lambda _: None)


# Presence keys without a lease: they do not prove that a compute is alive (rule: limited-trust)


def silence_compute(cloud: Cloud) -> None:
    cloud.etcd.end_lease(cloud.computes[A].presence.lease)
    cloud.computes[A].is_dead = True
    cloud.store.commit(
        [], [Put(keys.compute(A), '{"hostname":"hv1"}'), Put(keys.hostname(A), encode(StoredHostname('hv1')))]
    )


def forget_compute(cloud: Cloud) -> list[str]:
    lines: list[str] = []
    forget(cloud.store, cloud.placement, A, 'hv1', lambda: NOW, lines.append, fenced=True)
    return lines


def list_finding_codes(cloud: Cloud) -> set[str]:
    return {finding.code for finding in audit(cloud.store, cloud.placement, is_now=True).findings}


def run_fix(cloud: Cloud) -> list[str]:
    reports = [audit(cloud.store, cloud.placement, is_now=True) for _ in range(2)]
    return repair_findings(cloud.store, cloud.placement, *reports)


def test_repairs_are_one_line_each(cloud: Cloud) -> None:
    """The answer of a compute, and the name in a key that it may write, are foreign text."""
    cloud.add_host(A)
    key = keys.quota('shop\nhv1: all is well')
    cloud.store.commit([], [Put(key, '{"version": 1, "limits": {"VCPU": 4}, "used": {"VCPU": 1}}')])
    lines = run_fix(cloud)
    assert [line.partition(': ')[0] for line in lines] == ['quota-differs shop\\nhv1']
    assert not any('\n' in line for line in lines)


def test_forget_removes_a_presence_key_without_a_lease(cloud: Cloud) -> None:
    cloud.add_host(A)
    silence_compute(cloud)
    assert forget_compute(cloud) == [
        'hv1: its resource provider is removed',
        f'{keys.compute(A)}: removed: it had no lease',
    ]
    assert A not in cloud.model.providers
    assert not {keys.compute(A), keys.hostname(A)} & cloud.etcd.entries.keys()


def test_forget_removes_a_lone_presence_key(cloud: Cloud) -> None:
    """A killed `host forget` of a compute without a name leaves only this key."""
    key = keys.compute(A)
    cloud.store.commit([], [Put(key, '{"hostname":"hv1"}')])
    assert forget_compute(cloud) == [f'{key}: removed: it had no lease']
    assert key not in cloud.etcd.entries
    with pytest.raises(NotFound, match='no host has this name or uuid'):
        forget_compute(cloud)


def test_forget_notes_the_released_generation(cloud: Cloud) -> None:
    """Another `host forget` may be frozen before its release, and the uuid may be used again."""
    host = cloud.add_host(A)
    cloud.deliver(U, A)
    host.plan(3)
    destroy(cloud.store, U)
    silence_compute(cloud)
    forget_compute(cloud)
    assert read_highest_released(cloud.store, [U]) == 1


def test_forget_carries_out_a_destroy_of_a_nameless_compute(cloud: Cloud) -> None:
    host = cloud.add_host(A)
    cloud.deliver(U, A)
    host.plan(3)
    silence_compute(cloud)
    cloud.store.commit([], [Delete(keys.hostname(A))])
    assert destroy(cloud.store, U) == f'{U}: destroy accepted; {A} carries it out once this compute is no longer silent'
    assert len(forget_compute(cloud)) == 3
    assert U not in cloud.model.held
    assert not {keys.compute(A), keys.request(A, U)} & cloud.etcd.entries.keys()


def test_forget_refuses_a_compute_that_comes_back(cloud: Cloud) -> None:
    host = cloud.add_host(A)
    silence_compute(cloud)

    def bring_back(_: str) -> None:
        host.keep_presence()

    with pytest.raises(Conflict, match='was started while it was being forgotten'):
        forget(cloud.store, cloud.placement, A, 'hv1', lambda: NOW, bring_back, fenced=True)
    assert cloud.etcd.entries[keys.compute(A)].lease
    assert keys.hostname(A) in cloud.etcd.entries


def test_commands_report_that_a_silent_compute_acts_later(cloud: Cloud) -> None:
    host = cloud.add_host(A)
    cloud.deliver(U, A)
    host.plan(4)
    silence_compute(cloud)
    disable(cloud.placement, A, 'hv1')
    assert (
        enable(cloud.store, cloud.placement, A, 'hv1')
        == 'hv1: enabled; instances are placed there once its ecompute is started'
    )
    message = change_power(cloud.store, U, PowerAction(STOP, W)).message
    assert message == f'{U}: stop accepted; {A} carries it out once this compute is no longer silent'


def test_fix_removes_the_hostname_of_an_unregistered_compute(cloud: Cloud) -> None:
    cloud.add_host(A)
    silence_compute(cloud)
    del cloud.model.providers[A]
    assert run_fix(cloud) == [f'hostname-orphaned {A}: {keys.hostname(A)} is deleted']


# Quotas


def test_forget_releases_a_failed_share_only_once(cloud: Cloud) -> None:
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(3)
    cloud.deliver(U, B)
    failed = Record(V, A, ERROR, project_id='p', resources=SIZE, error=Failure('image', '404', 'all'))
    # An eschedule of 2019 requests a destroy in any state.
    destroyed = Request(V, {}, user_id='u', project_id='p')
    puts = [Put(keys.record(A, V), encode(failed)), Put(keys.request(A, V), encode(destroyed))]
    cloud.store.commit([], puts)
    silence_compute(cloud)
    forget_compute(cloud)
    last = from_json(cloud.etcd.entries[keys.record(A, V)].value)
    assert (last.state, last.error, last.fault) == (GONE, failed.error, UNSEEN_END_FAULT)
    assert require_quota(cloud.store, 'p').used == {**SIZE, 'instances': 1}


def test_quota_counts_a_request_of_a_newer_version(cloud: Cloud) -> None:
    cloud.add_host(A)
    cloud.set_instance_limit(1)
    cloud.deliver(U, A)
    key = keys.request(A, U)
    newer = {**load_object(cloud.etcd.entries[key].value), 'version': 2}
    cloud.store.commit([], [Put(key, dump(newer)), Put(keys.request(A, V), dump({**newer, 'version': 1}))])
    silence_compute(cloud)
    assert 'quota-differs' not in list_finding_codes(cloud)
    assert set_limits(cloud.store, 'p', ['instances=1']) == 'quota of project p: instances 1/1'
    assert require_quota(cloud.store, 'p').used == {**SIZE, 'instances': 1}


def test_destroy_of_a_malformed_queue_entry_releases_what_it_shared(cloud: Cloud) -> None:
    """A newer eschedule may have queued the entry."""
    cloud.set_instance_limit(5)
    key = cloud.enqueue_request(U, 'web', Membership('g', 'anti-affinity', True)).entry.key
    newer = {**load_object(cloud.etcd.entries[key].value), 'version': 2}
    cloud.store.commit([], [Put(key, dump(newer))])
    assert list_finding_codes(cloud) == {'malformed'}
    assert set_limits(cloud.store, 'p', ['instances=5']) == 'quota of project p: instances 1/5'
    destroy(cloud.store, U)
    assert not {key, keys.name('web'), keys.group('g')} & cloud.etcd.entries.keys()
    assert require_quota(cloud.store, 'p').used == {}


@pytest.mark.parametrize('project', ['p', None])
def test_2019_destroy_counts_by_its_record_until_the_compute_is_back(cloud: Cloud, project: str | None) -> None:
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A)
    host.plan(2)
    owner = {'user_id': 'u', 'project_id': project, 'consumer_generation': None}
    destroyed = dump({'allocations': {}, 'instance': U, 'image': None, **owner})
    cloud.store.commit([], [Put(keys.request(A, U), destroyed)])
    silence_compute(cloud)
    assert 'quota-differs' not in list_finding_codes(cloud)
    assert set_limits(cloud.store, 'p', ['instances=5']) == 'quota of project p: instances 1/5'
    assert require_quota(cloud.store, 'p').used == {**SIZE, 'instances': 1}
    forget_compute(cloud)
    assert require_quota(cloud.store, 'p').used == {}


def test_2019_destroy_counts_by_the_record_of_its_compute(cloud: Cloud) -> None:
    """Another compute, which is alive, records that the instance is gone there."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(5)
    active, gone = Record(U, A, ACTIVE, project_id='p', resources=SIZE), Record(U, B, GONE)
    destroyed = Request(U, {}, user_id='u', project_id='p')
    puts = [Put(keys.record(record.compute, U), encode(record)) for record in (active, gone)]
    cloud.store.commit([], [*puts, Put(keys.request(A, U), encode(destroyed))])
    silence_compute(cloud)
    set_limits(cloud.store, 'p', ['instances=5'])
    assert require_quota(cloud.store, 'p').used == {**SIZE, 'instances': 1}
    assert 'quota-differs' not in list_finding_codes(cloud)


def test_2019_destroy_of_a_failed_instance_counts_nothing(cloud: Cloud) -> None:
    cloud.add_host(A)
    cloud.set_instance_limit(3)
    failed = Record(V, A, ERROR, project_id='p', resources=SIZE, error=Failure('image', '404', 'all'))
    destroyed = Request(V, {}, user_id='u', project_id='p')
    puts = [Put(keys.record(A, V), encode(failed)), Put(keys.request(A, V), encode(destroyed))]
    cloud.store.commit([], puts)
    assert 'quota-differs' not in list_finding_codes(cloud)
    set_limits(cloud.store, 'p', ['instances=3'])
    assert require_quota(cloud.store, 'p').used == {}


def test_fix_of_an_ended_request_corrects_the_quota(cloud: Cloud) -> None:
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A)
    host.plan(2)
    request_value = cloud.etcd.entries[keys.request(A, U)].value
    destroy(cloud.store, U)
    host.plan(2)
    silence_compute(cloud)
    cloud.store.commit([], [Put(keys.request(A, U), request_value.decode())])
    assert {'quota-differs', 'request-ended'} <= list_finding_codes(cloud)
    run_fix(cloud)
    assert keys.request(A, U) not in cloud.etcd.entries
    assert require_quota(cloud.store, 'p').used == {}


def test_malformed_record_keeps_only_its_own_group_member(cloud: Cloud) -> None:
    host = cloud.add_host(A)
    cloud.deliver(U, A, None, Membership('g', 'affinity', True))
    host.plan(2)
    wrong_group = Group('g', 'affinity', True, {U: A, V: A, W: A})
    puts = [
        Put(keys.group('g'), encode(wrong_group)),
        *(Put(keys.record(A, instance), '{"rubbish') for instance in (U, V)),
    ]
    cloud.store.commit([], puts)
    assert f'group-orphaned g: {W} is removed' in run_fix(cloud)
    assert decode(Group, cloud.etcd.entries[keys.group('g')].value, name='g').members == {U: A, V: A}


# Attempt and taker keys without a lease: they belong to no process (rule: limited-trust)


def test_drain_and_forget_ignore_keys_without_a_lease(cloud: Cloud) -> None:
    cloud.add_host(A)
    cloud.claim(W, A)
    queue_key = keys.queue('small', V)
    attempt = Put(keys.attempt(W), dump({'version': 1, 'instances': [W]}))
    cloud.store.commit([], [attempt, Put(keys.taker(queue_key), encode(QueueTaker(A)))])
    disable(cloud.placement, A, 'hv1')
    with pytest.raises(StillGoing, match='1 instance to leave'):
        wait_until_drained(cloud.store, cloud.placement, A, 'hv1', Deadline(5.0), lambda _: None)
    silence_compute(cloud)
    assert f'{W}: its claim is released: no request owns it' in forget_compute(cloud)
    cloud.add_host(B)
    disable(cloud.placement, B, 'hv2')
    wait_until_drained(cloud.store, cloud.placement, B, 'hv2', Deadline(5.0), lambda _: None)


def test_why_explains_a_queue_entry_of_a_deleted_flavor(cloud: Cloud) -> None:
    cloud.add_host(A)
    cloud.enqueue_request(U, 'web')
    cloud.store.commit([], [Delete(keys.flavor(FLAVOR))])
    record = find(cloud.store, U)
    assert record is not None
    text = format_explanation(explain_placement(cloud.store, lambda: cast(Placement, cloud.placement), record))
    assert text.splitlines()[1:] == [
        f'it requested {QUERY}',
        f'flavor {FLAVOR} does not exist, so no compute takes the request. '
        'Fix: create the flavor again with `eschedule flavor set`, or destroy the instance',
    ]
