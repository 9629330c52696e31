"""An instance is requested of two computes, among other manual writes: the claim decides."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from ecomp.agent.instance import records
from ecomp.errors import Conflict, Unreachable
from ecomp.model import keys
from ecomp.model.group import Membership
from ecomp.model.host import EntriesByCompute
from ecomp.model.json_object import dump
from ecomp.model.order import Request, SetOrder
from ecomp.model.quota import Quota
from ecomp.model.record import Record
from ecomp.model.states import ACTIVE, ERROR
from ecomp.model.stored import decode, encode
from ecomp.placement.allocations import read_provider_allocations
from ecomp.scheduler.operations.audit import CHANGED_SINCE, audit, repair_findings
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.scheduler.queries.find import list_records
from ecomp.store.client import Entry, Put, Store
from tests.kit.removal import clear
from tests.model.cloud import IMAGE, QUERY, SIZE, A, B, Cloud, S, U, V, W
from tests.model.explorer import open_quiet_cloud
from tests.model.virtual import NOW

pytestmark = pytest.mark.fast


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with open_quiet_cloud() as quiet:
        quiet.store.claims = lambda compute: read_provider_allocations(quiet.placement, compute)
        for host in quiet.add_hosts(A, B):
            host.start()
        yield quiet


def put_request(cloud: Cloud, compute: str, instance: str, membership: Membership | None = None) -> None:
    """Put a request manually, as a compromised compute could below its own uuid."""
    fields = {'user_id': 'u', 'project_id': 'p', 'query': QUERY, 'stages': {'requested': NOW}, 'group': membership}
    request = Request(instance, {compute: SIZE}, image=IMAGE, name='web' if membership else None, **fields)  # type: ignore[arg-type]
    cloud.store.commit([], [Put(keys.request(compute, instance), encode(request))])


def put_record(cloud: Cloud, instance: str, state: str) -> None:
    record = Record(instance, A, state, resources=SIZE, user_id='u', project_id='p', stages={'requested': NOW})
    cloud.store.commit([], [Put(keys.record(A, instance), encode(record))])


def raise_unreachable(_: str) -> list[str]:
    raise Unreachable('placement cannot be reached', 'placement')


def read_quota_usage(cloud: Cloud) -> Mapping[str, int]:
    return decode(Quota, cloud.etcd.entries[keys.quota('p')].value, project='p').used


def test_fix_uses_the_record_that_the_audit_trusts(cloud: Cloud) -> None:
    put_request(cloud, B, U)
    cloud.deliver(U, A)
    put_record(cloud, U, ERROR)
    first, second = audit(cloud.store, cloud.placement, is_now=True), audit(cloud.store, cloud.placement, is_now=True)
    assert {'request-ended', 'unleased'} <= {finding.code for finding in first.findings}
    # Findings that a repair of this run has changed are left to the next audit.
    repairs = repair_findings(cloud.store, cloud.placement, first, second)
    assert f'request-ended {U}: {keys.request(A, U)} is deleted' in repairs
    assert f'unleased {U}: {CHANGED_SINCE}' in repairs


def test_list_without_placement_shows_the_older_request(cloud: Cloud) -> None:
    put_request(cloud, B, V)
    cloud.deliver(V, A)
    cloud.deliver(W, B)
    assert {record.instance: record.compute for record in list_records(cloud.store, False)[0]} == {V: A, W: B}
    cloud.store.claims = raise_unreachable
    listed, errors = list_records(cloud.store, False)
    assert {record.instance: record.compute for record in listed} == {V: B, W: B}
    message = 'placement cannot be reached; of two requests for one instance, the older one is shown'
    assert [str(error) for error in errors] == [message]


def test_2019_destroy_on_a_second_compute_keeps_the_quota(cloud: Cloud) -> None:
    cloud.set_instance_limit(5)
    cloud.deliver(U, A)
    put_record(cloud, U, ACTIVE)
    before = read_quota_usage(cloud)
    tombstone = Request(U, {}, user_id='u', project_id='p')
    cloud.store.commit([], [Put(keys.request(B, U), encode(tombstone))])
    assert [
        finding.code for finding in audit(cloud.store, cloud.placement, is_now=True).findings if 'quota' in finding.code
    ] == []
    set_limits(cloud.store, 'p', ['instances=9'])
    assert read_quota_usage(cloud) == before


def test_attempt_without_a_lease_does_not_block_a_create(cloud: Cloud) -> None:
    cloud.store.commit([], [Put(keys.attempt(S), dump({'version': 1, 'instances': [U]}))])
    set_order = SetOrder(U, query=QUERY, image=IMAGE, user_id='u', project_id='p', stages={'requested': NOW})
    assert cloud.create(set_order, True)
    cloud.store.commit([], [Put(keys.attempt(S), dump({'version': 1, 'instances': [V]}), cloud.store.grant(60))])
    with pytest.raises(Conflict, match='Fix: repeat the command when the older request has been placed or refused'):
        cloud.create(replace(set_order, instance=V), True)


def test_later_of_two_failures_releases_everything_shared(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.set_instance_limit(5)
    group = Membership('g', 'affinity', True)
    cloud.deliver(U, A, 'web', group)
    put_request(cloud, B, U, group)
    cloud.model.held.pop(U)  # deleted manually: neither request is confirmed
    first, second = cloud.computes[A], cloud.computes[B]
    original, concurrent = records.find_by_listing, [second.repeat(2, second.plan)]

    def list_and_interleave(*arguments: object) -> object:
        places = original(*arguments)  # type: ignore[arg-type]
        if concurrent:
            concurrent.pop()()
        return places

    monkeypatch.setattr(records, 'find_by_listing', list_and_interleave)
    first.repeat(3, first.plan)()
    second.repeat(3, second.plan)()
    assert not concurrent
    assert (read_quota_usage(cloud), keys.group('g') in cloud.etcd.entries) == ({}, False)
    assert cloud.etcd.entries[keys.name('web')].lease


def test_request_key_without_a_compute_is_ignored(cloud: Cloud) -> None:
    """Such a key is not queried in placement, and a failure leaves nothing to it."""
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, 'web')
    for junk in ('nobody', f'{B}?', '..'):
        cloud.store.commit([], [Put(keys.request(junk, U), '{}')])
    queried: list[str] = []
    cloud.store.claims = lambda compute: queried.append(compute) or read_provider_allocations(cloud.placement, compute)
    assert [record.instance for record in list_records(cloud.store, False)[0]] == [U]
    assert set(queried) <= {A}
    cloud.model.held.pop(U)
    cloud.computes[A].repeat(3, cloud.computes[A].plan)()
    assert read_quota_usage(cloud) == {}
    assert cloud.etcd.entries[keys.name('web')].lease


def test_rewritten_request_of_another_compute_does_not_stop_a_failure(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A compute's role lets it write any key below its own uuid. The instance of another compute must still end.
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, 'web')
    put_request(cloud, B, U)
    cloud.model.held.pop(U)
    original = records.find_by_listing

    def list_and_rewrite(store: Store, instance: str) -> EntriesByCompute[Entry]:
        places = original(store, instance)
        put_request(cloud, B, U)
        return places

    monkeypatch.setattr(records, 'find_by_listing', list_and_rewrite)
    cloud.computes[A].repeat(3, cloud.computes[A].plan)()
    assert keys.request(A, U) not in cloud.etcd.entries
    assert keys.record(A, U) in cloud.etcd.entries
    monkeypatch.undo()
    cloud.computes[B].repeat(3, cloud.computes[B].plan)()
    assert read_quota_usage(cloud) == {}


def test_failure_ends_with_more_requests_than_conditions(cloud: Cloud) -> None:
    # A transaction of etcd takes at most 128 conditions.
    cloud.deliver(U, A, 'web')
    for number in range(130):
        cloud.store.commit([], [Put(keys.request(str(uuid.UUID(int=number + 1)), U), '{}')])
    cloud.model.held.pop(U)
    cloud.computes[A].repeat(3, cloud.computes[A].plan)()
    assert keys.request(A, U) not in cloud.etcd.entries


def test_taker_keeps_a_claim_that_an_eschedule_took_over(cloud: Cloud) -> None:
    cloud.claim(U, A)
    lease = cloud.store.grant(60)
    cloud.store.commit([], [Put(keys.attempt(U), dump({'version': 1, 'instances': [U]}), lease)])
    assert not cloud.computes[A].taker.release_claim(U)
    assert U in cloud.model.held
    cloud.store.revoke(lease)
    assert cloud.computes[A].taker.release_claim(U)
    assert U not in cloud.model.held


def test_interrupted_clear_reports_its_error_and_removed_records(cloud: Cloud) -> None:
    for instance in (U, V):
        put_record(cloud, instance, ERROR)
    put_request(cloud, A, V)
    put_request(cloud, B, V)
    cloud.store.claims = raise_unreachable
    result = clear(cloud.store)
    assert (result.removed, 'placement cannot be reached' in str(result.errors[-1])) == ({U: ERROR}, True)


def test_claim_moved_since_the_audit_does_not_abort_fix(cloud: Cloud) -> None:
    """The claim then confirms another record, whose instance has not ended."""
    put_request(cloud, B, U)
    cloud.deliver(U, A)
    put_record(cloud, U, ERROR)
    living = Record(U, B, ACTIVE, resources=SIZE, user_id='u', project_id='p', stages={'requested': NOW})
    cloud.store.commit([], [Put(keys.record(B, U), encode(living))])
    first, second = audit(cloud.store, cloud.placement, is_now=True), audit(cloud.store, cloud.placement, is_now=True)
    cloud.store.claims = lambda compute: [U] if compute == B else []
    assert f'unleased {U}: {CHANGED_SINCE}' in repair_findings(cloud.store, cloud.placement, first, second)


def test_fix_of_a_changed_record_leaves_no_lease(cloud: Cloud) -> None:
    put_record(cloud, U, ERROR)
    first, second = audit(cloud.store, cloud.placement, is_now=True), audit(cloud.store, cloud.placement, is_now=True)
    put_record(cloud, U, ERROR)
    before = set(cloud.etcd.leases)
    assert f'unleased {U}: {CHANGED_SINCE}' in repair_findings(cloud.store, cloud.placement, first, second)
    assert set(cloud.etcd.leases) == before


def test_malformed_request_after_the_end_keeps_the_guest(cloud: Cloud) -> None:
    # The guest was brought back by virsh define, or with a restored host.
    # Only a tombstone destroys (rule: tombstone-only).
    host = cloud.computes[A]
    cloud.deliver(U, A)
    host.repeat(3, host.plan)()
    assert host.hypervisor.list_guests()[U].running
    put_record(cloud, U, ERROR)
    host.restart()
    cloud.store.commit([], [Put(keys.request(A, U), '{')])
    host.repeat(3, host.plan)()
    assert host.hypervisor.list_guests()[U].running


def test_name_of_a_malformed_request_is_released_with_it(cloud: Cloud) -> None:
    """A malformed request was refused and is repaired too late: a uuid is never used twice."""
    host = cloud.computes[A]
    cloud.deliver(U, A, 'web')
    key = keys.request(A, U)
    valid = cloud.etcd.entries[key].value.decode()
    cloud.store.commit([], [Put(key, '{')])
    host.repeat(3, host.plan)()
    assert (key in cloud.etcd.entries, keys.name('web') in cloud.etcd.entries) == (False, True)
    cloud.store.commit([], [Put(key, valid)])
    host.repeat(3, host.plan)()
    assert (key in cloud.etcd.entries, keys.name('web') in cloud.etcd.entries) == (False, False)
    # The name of a failed instance stays as long as its record, so that `show NAME` finds it.
    cloud.deliver(V, A, 'db')
    valid = cloud.etcd.entries[keys.request(A, V)].value.decode()
    cloud.model.held.pop(V)
    host.repeat(3, host.plan)()
    cloud.store.commit([], [Put(keys.request(A, V), valid)])
    host.repeat(3, host.plan)()
    assert cloud.etcd.entries[keys.name('db')].lease
    assert keys.request(A, V) not in cloud.etcd.entries
