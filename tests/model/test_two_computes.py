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
from ecomp.model.host import Places
from ecomp.model.json_object import dump
from ecomp.model.order import Request, SetOrder
from ecomp.model.order import to_json as request_json
from ecomp.model.quota import from_json as quota_from_json
from ecomp.model.record import ACTIVE, ERROR, Record
from ecomp.model.record import to_json as record_json
from ecomp.placement.allocations import of_provider
from ecomp.scheduler.changing.change import clear
from ecomp.scheduler.looking.find import all_records
from ecomp.scheduler.operating.audit import NOT_ANY_MORE, audit, mend
from ecomp.scheduler.operating.sharing import limit
from ecomp.store.client import Entry, Put, Store
from tests.model.cloud import IMAGE, QUERY, SIZE, A, B, Cloud, S, U, V, W
from tests.model.explorer import quiet_cloud
from tests.model.virtual import NOW

pytestmark = pytest.mark.fast


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with quiet_cloud() as quiet:
        quiet.store.claims = lambda compute: of_provider(quiet.placement, compute)
        for host in quiet.hosts(A, B):
            host.start()
        yield quiet


def asked_of(cloud: Cloud, compute: str, instance: str, shared: Membership | None = None) -> None:
    """Put a request manually, as a compromised compute could below its own uuid."""
    fields = {'user_id': 'u', 'project_id': 'p', 'query': QUERY, 'stages': {'requested': NOW}, 'group': shared}
    request = Request(instance, {compute: SIZE}, image=IMAGE, name='web' if shared else None, **fields)  # type: ignore[arg-type]
    cloud.store.commit([], [Put(keys.request(compute, instance), request_json(request))])


def recorded(cloud: Cloud, instance: str, state: str) -> None:
    record = Record(instance, A, state, resources=SIZE, user_id='u', project_id='p', stages={'requested': NOW})
    cloud.store.commit([], [Put(keys.record(A, instance), record_json(record))])


def away(_: str) -> list[str]:
    raise Unreachable('placement cannot be reached', 'placement')


def used(cloud: Cloud) -> Mapping[str, int]:
    return quota_from_json('p', cloud.etcd.entries[keys.quota('p')].value).used


def test_a_fix_goes_by_the_record_that_the_audit_believes(cloud: Cloud) -> None:
    asked_of(cloud, B, U)
    cloud.delivered(U, A)
    recorded(cloud, U, ERROR)
    first, second = audit(cloud.store, cloud.placement), audit(cloud.store, cloud.placement)
    assert {'request-ended', 'record-unleased'} <= {finding.code for finding in first.findings}
    # Findings that a repair of this run has changed are left to the next audit.
    repairs = mend(cloud.store, cloud.placement, first, second)
    assert f'request-ended {U}: {keys.request(A, U)} is deleted' in repairs
    assert f'record-unleased {U}: {NOT_ANY_MORE}' in repairs


def test_a_list_without_placement_goes_by_the_older_request_and_says_so(cloud: Cloud) -> None:
    asked_of(cloud, B, V)
    cloud.delivered(V, A)
    cloud.delivered(W, B)
    assert {record.instance: record.compute for record in all_records(cloud.store, False)[0]} == {V: A, W: B}
    cloud.store.claims = away
    listed, errors = all_records(cloud.store, False)
    assert {record.instance: record.compute for record in listed} == {V: B, W: B}
    message = 'placement cannot be reached; of what two computes are asked for, the older request is shown'
    assert [str(error) for error in errors] == [message]


def test_a_destroy_of_2019_at_a_second_compute_counts_as_the_audit_says(cloud: Cloud) -> None:
    cloud.limited(5)
    cloud.delivered(U, A)
    recorded(cloud, U, ACTIVE)
    before = used(cloud)
    tombstone = Request(U, {}, user_id='u', project_id='p')
    cloud.store.commit([], [Put(keys.request(B, U), request_json(tombstone))])
    assert [finding.code for finding in audit(cloud.store, cloud.placement).findings if 'quota' in finding.code] == []
    limit(cloud.store, 'p', ['instances=9'])
    assert used(cloud) == before


def test_an_attempt_on_no_lease_is_nobody_s(cloud: Cloud) -> None:
    cloud.store.commit([], [Put(keys.attempt(S), dump({'version': 1, 'instances': [U]}))])
    set_order = SetOrder(U, query=QUERY, image=IMAGE, user_id='u', project_id='p', stages={'requested': NOW})
    assert cloud.create(set_order, True)
    cloud.store.commit([], [Put(keys.attempt(S), dump({'version': 1, 'instances': [V]}), cloud.store.grant(60))])
    with pytest.raises(Conflict, match='try again when that has ended'):
        cloud.create(replace(set_order, instance=V), True)


def test_of_two_that_fail_at_once_the_later_one_lets_go_of_all(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.limited(5)
    group = Membership('g', 'affinity', True)
    cloud.delivered(U, A, 'web', group)
    asked_of(cloud, B, U, group)
    cloud.model.held.pop(U)  # deleted manually: neither request is confirmed
    first, second = cloud.computes[A], cloud.computes[B]
    original, concurrent = records.listed, [second.rounds(2, second.plan)]

    def list_and_interleave(*asked: object) -> object:
        places = original(*asked)  # type: ignore[arg-type]
        if concurrent:
            concurrent.pop()()
        return places

    monkeypatch.setattr(records, 'listed', list_and_interleave)
    first.rounds(3, first.plan)()
    second.rounds(3, second.plan)()
    assert not concurrent
    assert (used(cloud), keys.group('g') in cloud.etcd.entries) == ({}, False)
    assert cloud.etcd.entries[keys.name('web')].lease


def test_a_key_that_names_no_compute_is_nobody_s(cloud: Cloud) -> None:
    """Such a key is not queried in placement, and a failure leaves nothing to it."""
    cloud.limited(5)
    cloud.delivered(U, A, 'web')
    for junk in ('nobody', f'{B}?', '..'):
        cloud.store.commit([], [Put(keys.request(junk, U), '{}')])
    queried: list[str] = []
    cloud.store.claims = lambda compute: queried.append(compute) or of_provider(cloud.placement, compute)
    assert [record.instance for record in all_records(cloud.store, False)[0]] == [U]
    assert set(queried) <= {A}
    cloud.model.held.pop(U)
    cloud.computes[A].rounds(3, cloud.computes[A].plan)()
    assert used(cloud) == {}
    assert cloud.etcd.entries[keys.name('web')].lease


def test_a_request_that_another_compute_writes_again_and_again_keeps_nothing_from_failing(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compute's role lets it write any key below its own uuid.

    The instance of another compute must still end.
    """
    cloud.limited(5)
    cloud.delivered(U, A, 'web')
    asked_of(cloud, B, U)
    cloud.model.held.pop(U)
    original = records.listed

    def list_and_rewrite(store: Store, instance: str) -> Places[Entry]:
        places = original(store, instance)
        asked_of(cloud, B, U)
        return places

    monkeypatch.setattr(records, 'listed', list_and_rewrite)
    cloud.computes[A].rounds(3, cloud.computes[A].plan)()
    assert keys.request(A, U) not in cloud.etcd.entries
    assert keys.record(A, U) in cloud.etcd.entries
    monkeypatch.undo()
    cloud.computes[B].rounds(3, cloud.computes[B].plan)()
    assert used(cloud) == {}


def test_as_many_as_may_be_asked_for_it_it_fails(cloud: Cloud) -> None:
    """A transaction of etcd takes at most 128 conditions."""
    cloud.delivered(U, A, 'web')
    for number in range(130):
        cloud.store.commit([], [Put(keys.request(str(uuid.UUID(int=number + 1)), U), '{}')])
    cloud.model.held.pop(U)
    cloud.computes[A].rounds(3, cloud.computes[A].plan)()
    assert keys.request(A, U) not in cloud.etcd.entries


def test_a_taker_that_gives_up_leaves_what_an_eschedule_has_taken_over(cloud: Cloud) -> None:
    cloud.claimed(U, A)
    lease = cloud.store.grant(60)
    cloud.store.commit([], [Put(keys.attempt(U), dump({'version': 1, 'instances': [U]}), lease)])
    assert not cloud.computes[A].taker.let_go(U)
    assert U in cloud.model.held
    cloud.store.revoke(lease)
    assert cloud.computes[A].taker.let_go(U)
    assert U not in cloud.model.held


def test_what_ends_a_clearing_is_said_beside_what_was_removed(cloud: Cloud) -> None:
    for instance in (U, V):
        recorded(cloud, instance, ERROR)
    asked_of(cloud, A, V)
    asked_of(cloud, B, V)
    cloud.store.claims = away
    result = clear(cloud.store)
    assert (result.removed, 'placement cannot be reached' in str(result.errors[-1])) == ({U: ERROR}, True)


def test_a_claim_that_moved_since_the_audit_ends_no_fix(cloud: Cloud) -> None:
    """The claim then confirms another record, whose instance has not ended."""
    asked_of(cloud, B, U)
    cloud.delivered(U, A)
    recorded(cloud, U, ERROR)
    living = Record(U, B, ACTIVE, resources=SIZE, user_id='u', project_id='p', stages={'requested': NOW})
    cloud.store.commit([], [Put(keys.record(B, U), record_json(living))])
    first, second = audit(cloud.store, cloud.placement), audit(cloud.store, cloud.placement)
    cloud.store.claims = lambda compute: [U] if compute == B else []
    assert f'record-unleased {U}: {NOT_ANY_MORE}' in mend(cloud.store, cloud.placement, first, second)


def test_a_fix_of_what_has_changed_leaves_no_lease(cloud: Cloud) -> None:
    recorded(cloud, U, ERROR)
    first, second = audit(cloud.store, cloud.placement), audit(cloud.store, cloud.placement)
    recorded(cloud, U, ERROR)
    before = set(cloud.etcd.leases)
    assert f'record-unleased {U}: {NOT_ANY_MORE}' in mend(cloud.store, cloud.placement, first, second)
    assert set(cloud.etcd.leases) == before


def test_a_guest_stays_whose_request_became_unreadable_after_it_had_ended(cloud: Cloud) -> None:
    """The guest was brought back by virsh define, or with a restored host.

    Only a tombstone destroys (rule 6).
    """
    host = cloud.computes[A]
    cloud.delivered(U, A)
    host.rounds(3, host.plan)()
    assert host.hypervisor.guests()[U].running
    recorded(cloud, U, ERROR)
    host.restart()
    cloud.store.commit([], [Put(keys.request(A, U), '{')])
    host.rounds(3, host.plan)()
    assert host.hypervisor.guests()[U].running


def test_a_name_that_nobody_could_read_goes_with_the_request_that_says_it(cloud: Cloud) -> None:
    """A malformed request was refused and is repaired too late: a uuid is never used twice."""
    host = cloud.computes[A]
    cloud.delivered(U, A, 'web')
    key = keys.request(A, U)
    valid = cloud.etcd.entries[key].value.decode()
    cloud.store.commit([], [Put(key, '{')])
    host.rounds(3, host.plan)()
    assert (key in cloud.etcd.entries, keys.name('web') in cloud.etcd.entries) == (False, True)
    cloud.store.commit([], [Put(key, valid)])
    host.rounds(3, host.plan)()
    assert (key in cloud.etcd.entries, keys.name('web') in cloud.etcd.entries) == (False, False)
    # The name of a failed instance stays as long as its record, so that `show NAME` finds it.
    cloud.delivered(V, A, 'db')
    valid = cloud.etcd.entries[keys.request(A, V)].value.decode()
    cloud.model.held.pop(V)
    host.rounds(3, host.plan)()
    cloud.store.commit([], [Put(keys.request(A, V), valid)])
    host.rounds(3, host.plan)()
    assert cloud.etcd.entries[keys.name('db')].lease
    assert keys.request(A, V) not in cloud.etcd.entries
