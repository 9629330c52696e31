"""One instance that two computes are asked for, and what else somebody wrote: the claim says whose it is."""

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
    with quiet_cloud() as made:
        made.store.claims = lambda compute: of_provider(made.placement, compute)
        for each in made.hosts(A, B):
            each.start()
        yield made


def asked_of(cloud: Cloud, compute: str, instance: str, shared: Membership | None = None) -> None:
    """Put a request by hand, as a compute that was taken over would below its own uuid."""
    said = {'user_id': 'u', 'project_id': 'p', 'query': QUERY, 'stages': {'requested': NOW}, 'group': shared}
    request = Request(instance, {compute: SIZE}, image=IMAGE, name='web' if shared else None, **said)  # type: ignore[arg-type]
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
    assert {'request-ended', 'record-unleased'} <= {each.code for each in first.findings}
    # What one repair changes, the others leave to the next audit.
    done = mend(cloud.store, cloud.placement, first, second)
    assert f'request-ended {U}: {keys.request(A, U)} is deleted' in done
    assert f'record-unleased {U}: {NOT_ANY_MORE}' in done


def test_a_list_without_placement_goes_by_the_older_request_and_says_so(cloud: Cloud) -> None:
    asked_of(cloud, B, V)
    cloud.delivered(V, A)
    cloud.delivered(W, B)
    assert {each.instance: each.compute for each in all_records(cloud.store, False)[0]} == {V: A, W: B}
    cloud.store.claims = away
    found, wrong = all_records(cloud.store, False)
    assert {each.instance: each.compute for each in found} == {V: B, W: B}
    said = 'placement cannot be reached; of what two computes are asked for, the older request is shown'
    assert [str(each) for each in wrong] == [said]


def test_a_destroy_of_2019_at_a_second_compute_counts_as_the_audit_says(cloud: Cloud) -> None:
    cloud.limited(5)
    cloud.delivered(U, A)
    recorded(cloud, U, ACTIVE)
    before = used(cloud)
    tombstone = Request(U, {}, user_id='u', project_id='p')
    cloud.store.commit([], [Put(keys.request(B, U), request_json(tombstone))])
    assert [each.code for each in audit(cloud.store, cloud.placement).findings if 'quota' in each.code] == []
    limit(cloud.store, 'p', ['instances=9'])
    assert used(cloud) == before


def test_an_attempt_on_no_lease_is_nobody_s(cloud: Cloud) -> None:
    cloud.store.commit([], [Put(keys.attempt(S), dump({'version': 1, 'instances': [U]}))])
    wanted = SetOrder(U, query=QUERY, image=IMAGE, user_id='u', project_id='p', stages={'requested': NOW})
    assert cloud.create(wanted, True)
    cloud.store.commit([], [Put(keys.attempt(S), dump({'version': 1, 'instances': [V]}), cloud.store.grant(60))])
    with pytest.raises(Conflict, match='try again when that has ended'):
        cloud.create(replace(wanted, instance=V), True)


def test_of_two_that_fail_at_once_the_later_one_lets_go_of_all(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.limited(5)
    group = Membership('g', 'affinity', True)
    cloud.delivered(U, A, 'web', group)
    asked_of(cloud, B, U, group)
    cloud.model.held.pop(U)  # deleted by hand: neither is confirmed
    one, two = cloud.computes[A], cloud.computes[B]
    listed, meanwhile = records.listed, [two.rounds(2, two.plan)]

    def looked(*asked: object) -> object:
        found = listed(*asked)  # type: ignore[arg-type]
        if meanwhile:
            meanwhile.pop()()
        return found

    monkeypatch.setattr(records, 'listed', looked)
    one.rounds(3, one.plan)()
    two.rounds(3, two.plan)()
    assert not meanwhile
    assert (used(cloud), keys.group('g') in cloud.etcd.entries) == ({}, False)
    assert cloud.etcd.entries[keys.name('web')].lease


def test_a_key_that_names_no_compute_is_nobody_s(cloud: Cloud) -> None:
    """Neither is placement asked about it, nor does what fails leave anything to it."""
    cloud.limited(5)
    cloud.delivered(U, A, 'web')
    for junk in ('nobody', f'{B}?', '..'):
        cloud.store.commit([], [Put(keys.request(junk, U), '{}')])
    asked: list[str] = []
    cloud.store.claims = lambda compute: asked.append(compute) or of_provider(cloud.placement, compute)
    assert [each.instance for each in all_records(cloud.store, False)[0]] == [U]
    assert set(asked) <= {A}
    cloud.model.held.pop(U)
    cloud.computes[A].rounds(3, cloud.computes[A].plan)()
    assert used(cloud) == {}
    assert cloud.etcd.entries[keys.name('web')].lease


def test_a_request_that_another_compute_writes_again_and_again_keeps_nothing_from_failing(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its role lets it write below its own uuid whatever it likes: what another one has is to end all the same."""
    cloud.limited(5)
    cloud.delivered(U, A, 'web')
    asked_of(cloud, B, U)
    cloud.model.held.pop(U)
    listed = records.listed

    def looked(store: Store, instance: str) -> Places[Entry]:
        found = listed(store, instance)
        asked_of(cloud, B, U)
        return found

    monkeypatch.setattr(records, 'listed', looked)
    cloud.computes[A].rounds(3, cloud.computes[A].plan)()
    assert keys.request(A, U) not in cloud.etcd.entries
    assert keys.record(A, U) in cloud.etcd.entries
    monkeypatch.undo()
    cloud.computes[B].rounds(3, cloud.computes[B].plan)()
    assert used(cloud) == {}


def test_as_many_as_may_be_asked_for_it_it_fails(cloud: Cloud) -> None:
    """etcd takes no more than 128 conditions."""
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
    for each in (U, V):
        recorded(cloud, each, ERROR)
    asked_of(cloud, A, V)
    asked_of(cloud, B, V)
    cloud.store.claims = away
    done = clear(cloud.store)
    assert (done.removed, 'placement cannot be reached' in str(done.errors[-1])) == ({U: ERROR}, True)


def test_a_claim_that_moved_since_the_audit_ends_no_fix(cloud: Cloud) -> None:
    """What is believed by then is another record, which is no ended one's."""
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
    """It was brought back: by virsh define, or with a restored host. Only a tombstone destroys (rule 6)."""
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
    """It was refused unread, and is put right too late: a uuid is never used twice."""
    host = cloud.computes[A]
    cloud.delivered(U, A, 'web')
    key = keys.request(A, U)
    right = cloud.etcd.entries[key].value.decode()
    cloud.store.commit([], [Put(key, '{')])
    host.rounds(3, host.plan)()
    assert (key in cloud.etcd.entries, keys.name('web') in cloud.etcd.entries) == (False, True)
    cloud.store.commit([], [Put(key, right)])
    host.rounds(3, host.plan)()
    assert (key in cloud.etcd.entries, keys.name('web') in cloud.etcd.entries) == (False, False)
    # The name of what failed leads to it as long as its record is there.
    cloud.delivered(V, A, 'db')
    right = cloud.etcd.entries[keys.request(A, V)].value.decode()
    cloud.model.held.pop(V)
    host.rounds(3, host.plan)()
    cloud.store.commit([], [Put(keys.request(A, V), right)])
    host.rounds(3, host.plan)()
    assert cloud.etcd.entries[keys.name('db')].lease
    assert keys.request(A, V) not in cloud.etcd.entries
