"""A failed instance ends with its own reason, even if something else fails on the way.

The tests run a compute in steps, without threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.host.state import Memory
from ecomp.agent.instance.instances import ControlPlane, Instances
from ecomp.agent.instance.records import Records
from ecomp.agent.planner import Planner
from ecomp.agent.queue import Taker
from ecomp.agent.turns import Complaints
from ecomp.errors import BuildFailed, EcompError, NoSpace, OverQuota, Unreachable
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.group import Membership
from ecomp.model.guest import Guest, GuestSpec
from ecomp.model.queue import Backlog, QueueEntry, backlog_of
from ecomp.model.queue import to_json as waiting_to_json
from ecomp.model.quota import Quota
from ecomp.model.quota import from_json as quota_from_json
from ecomp.model.quota import to_json as quota_to_json
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, ERROR, GONE
from ecomp.placement import allocations
from ecomp.store.client import Delete, Put
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud, interpose, new
from tests.functional.toy import NOW, Toy, toy
from tests.kit.store_client import read_entry

pytestmark = pytest.mark.fast
FULL = 'the file system of the images is full'


class Full(FakeHypervisor):
    """A fake hypervisor that can make no disk, and raises `error`."""

    why: EcompError = BuildFailed('disk', FULL)

    def create_disk(self, spec: GuestSpec) -> None:  # noqa: ARG002
        raise self.why


def started_again(one: Toy, cloud: Cloud, state: Path) -> Planner:
    """Return a new planner of the same compute, with the memory of the state directory."""
    memory, host = Memory(state, one.compute, lambda: NOW), one.host
    control = ControlPlane(one.compute, cloud.store, cloud.placement, lambda: NOW)
    instances = Instances(control, host, one.instances.shape, memory)
    return Planner(instances, Complaints())


@pytest.mark.parametrize('away', [Unreachable('etcd is away', 'etcd'), NoSpace('etcd is full')])
@pytest.mark.parametrize('restarts', [False, True])
def test_what_was_released_on_the_way_is_no_reason(
    cloud: Cloud, tmp_path: Path, away: Unreachable, restarts: bool
) -> None:
    """The claim is released before the record is written.

    A second attempt must not report the missing claim.
    """
    with toy(cloud, tmp_path, Full()) as one:
        instance = one.place()

        def fail_to_end(*_: object) -> None:
            raise away

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Records, 'end', fail_to_end)
            assert one.step() == [f'build {instance}']
        assert one.record(instance).state == BUILDING
        assert cloud.server.allocations(instance) == {}
        if restarts:
            one.planner = started_again(one, cloud, tmp_path)
        one.planner.works_again()
        assert one.step() == [f'build {instance}']
        _, failure = one.read_failure(instance)
        assert (failure.stage, failure.reason) == ('disk', FULL)
        assert cloud.store.get(keys.request(one.compute, instance)) is None
        assert Memory(tmp_path, one.compute, lambda: NOW).all() == {}


def test_a_request_that_is_deleted_while_nobody_is_at_its_build_is_ended(cloud: Cloud, tmp_path: Path) -> None:
    hypervisor = Full()
    hypervisor.why = EcompError('its worker was killed')
    with toy(cloud, tmp_path, hypervisor) as one:
        instances = [one.place() for _ in range(2)]
        assert len(one.step()) == 2
        assert all(one.record(item).state == BUILDING for item in instances)
        assert len(hypervisor.reservations()) == 2
        for item in instances:
            cloud.store.commit([], [Delete(keys.request(one.compute, item))])
        planner = started_again(one, cloud, tmp_path)
        planner.recheck()
        assert len(hypervisor.reservations()) == 2, 'it has not read yet what is asked for'
        planner.step({})
        # An instance with a guest is kept, and does not block the others. One with only a disk ends.
        kept_instance, disk_only = one.memory.all()
        hypervisor._guests[kept_instance] = Guest(kept_instance, one.compute, True, True, True)
        hypervisor._guests[disk_only] = Guest(disk_only, None, False, False, True)
        planner.recheck()
        assert [item.instance for item in hypervisor.reservations().values()] == [kept_instance]
        assert list(hypervisor._guests) == [kept_instance]
        one.instances.records.forget(kept_instance)
        record, reason = one.record(kept_instance), 'its request was deleted while it was being built'
        assert (record.state, record.fault) == (ACTIVE, reason)
        assert cloud.server.allocations(kept_instance) != {}
        assert one.read_failure(disk_only)[1].reason == reason
        assert cloud.server.allocations(disk_only) == {}
        assert cloud.store.get(keys.request(one.compute, disk_only)) is None


def test_a_build_that_is_put_off_is_not_taken_for_one(cloud: Cloud, tmp_path: Path) -> None:
    hypervisor = Full()
    hypervisor.why = EcompError('its worker was killed')
    with toy(cloud, tmp_path, hypervisor) as one:
        instance = one.place()
        one.step()
        one.planner.recheck()
        assert one.record(instance).state == BUILDING
        assert len(hypervisor.reservations()) == 1


@contextmanager
def limited(
    cloud: Cloud, project: str, count: int, before: Mapping[str, int] | None = None
) -> Iterator[Callable[[], int]]:
    """Set a quota of `count` instances with this usage.

    Yields a function that reads the current usage.
    """
    key = keys.quota(project)
    assert cloud.store.get(key) is None, 'no other test of this etcd has one'
    cloud.store.commit([], [Put(key, quota_to_json(Quota(project, {'instances': count}, before or {})))])

    def read_used() -> int:
        return quota_from_json(project, read_entry(cloud.store, key).value).used.get('instances', 0)

    try:
        yield read_used
    finally:
        cloud.store.commit([], [Delete(key)])


def named(cloud: Cloud, compute: str, name: str) -> str:
    """Deliver a small guest with a name and in a new group to the compute; return its instance."""
    order = replace(cloud.wanted(compute), name=name, group=Membership(name, 'affinity', True))
    cloud.create(order)
    return order.instance


def test_what_is_refused_because_it_was_not_kept_keeps_nothing_of_what_it_shares(one: Toy, cloud: Cloud) -> None:
    """A follower drops a too large value.

    The request had been delivered with a name, a group and a quota.
    """
    with limited(cloud, 'a-project', 5) as read_used:
        instance = named(cloud, one.compute, 'unkept')
        assert read_used() == 1
        key = keys.request(one.compute, instance)
        entry = read_entry(cloud.store, key)
        (work,) = one.planner.step({key: replace(entry, value=b'', dropped=len(entry.value))})
        one.planner.begin(work)
        one.planner.carry_out(work)
        record, failure = one.read_failure(instance)
        assert 'too much' in failure.reason
        assert (record.name, record.project_id) == ('unkept', 'a-project')
        assert read_used() == 0
        assert cloud.store.get(keys.group('unkept')) is None
        lease = read_entry(cloud.store, keys.name('unkept')).lease
        assert lease, 'it is found by its name as long as its record is there, and not for ever'


def test_what_a_restored_etcd_does_not_know_is_counted_again(one: Toy, cloud: Cloud) -> None:
    """It counts once, however often it is republished, and is released when it is destroyed."""
    with limited(cloud, 'a-project', 1) as read_used:
        quota = read_entry(cloud.store, keys.quota('a-project'))
        instance = named(cloud, one.compute, 'later')
        one.step()
        assert one.record(instance).state == ACTIVE
        places = one.list_keys(instance)
        restored = [Put(quota.key, quota.value.decode()), *map(Delete, (*places, keys.name('later')))]
        cloud.store.commit([], [*restored, Delete(keys.group('later'))])
        assert read_used() == 0
        for _ in range(2):
            one.republish(one.hypervisor.guests().keys())
            assert read_used() == 1
        with pytest.raises(OverQuota):
            cloud.create(cloud.wanted(one.compute))
        # An instance that was queued in the snapshot is counted already; republishing removes its queue entry.
        queued = keys.queue('small', instance)
        cloud.store.commit([], [*map(Delete, places[:2]), Put(queued, '{}'), Put(keys.taker(queued), '{}')])
        one.republish(one.hypervisor.guests().keys())
        assert read_used() == 1
        assert cloud.etcd.keys(queued) == []
        assert cloud.store.get(places[0]) is not None
        one.destroy(instance)
        one.instances.records.forget(instance)
        one.settle()
        assert read_used() == 0


@pytest.mark.parametrize('shares', [True, False])
def test_what_leaves_its_queue_while_it_is_published_is_counted(one: Toy, cloud: Cloud, shares: bool) -> None:
    with limited(cloud, 'a-project', 5) as read_used:
        instance = named(cloud, one.compute, 'waits') if shares else one.place()
        one.step()
        places = one.list_keys(instance)
        request = cloud.delivered(one.compute, instance)
        # An etcd from before it was taken: its queue entry holds its name, group and quota.
        entry = QueueEntry(flavor=Flavor('small', request.resources), **request.parts())
        cloud.store.commit([], [*map(Delete, places), Put(entry.key, waiting_to_json(entry))])
        (place,) = backlog_of(cloud.store.snapshot(keys.QUEUES).entries, Backlog()).places.values()
        other_taker = Taker(ControlPlane(new(), cloud.store, cloud.placement, lambda: NOW), lambda: 0)

        def refuse() -> None:
            # In a placement from before it was taken, the instance has no claim.
            consumer = allocations.consumer(cloud.placement, instance)
            assert allocations.release_once(cloud.placement, instance, consumer)
            assert other_taker.refuse(place, 'it asks for too much')
            assert read_used() == 0

        interpose(cloud.store, 'commit', refuse, lambda _, operations: places[0] in {put.key for put in operations})
        one.republish(one.hypervisor.guests().keys())
        assert read_used() == 1
        assert cloud.store.get(places[0]) is not None
        assert (cloud.store.get(keys.group('waits')) is not None) == shares
        assert (cloud.store.get(keys.name('waits')) is not None) == shares
        cloud.store.commit([], [*map(Delete, (*places, keys.name('waits'), keys.group('waits')))])


def test_many_that_accept_a_new_etcd_at_once_all_get_through(
    one: Toy, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All write the same quota, and one writer may lose more than five times in a row."""
    with limited(cloud, 'a-project', 5) as read_used:
        instance = named(cloud, one.compute, 'among-many')
        one.step()
        places = one.list_keys(instance)
        cloud.store.commit([], [*map(Delete, (*places, keys.name('among-many'), keys.group('among-many')))])
        key, commit, others = keys.quota('a-project'), cloud.store.commit, list(range(20))

        def commit_late(conditions: Any, operations: Any) -> int | None:
            if others and any(put.key == key for put in operations):
                others.pop()
                commit([], [Put(key, read_entry(cloud.store, key).value.decode())])  # another compute writes first
            return commit(conditions, operations)

        monkeypatch.setattr(cloud.store, 'commit', commit_late)
        one.republish(one.hypervisor.guests().keys())
        monkeypatch.undo()
        assert others == []
        assert cloud.store.get(places[0]) is not None
        assert read_used() == 2, 'the one of before the loss was never given back'
        cloud.store.commit([], [*map(Delete, (*places, keys.name('among-many'), keys.group('among-many')))])


def test_what_failed_gives_its_share_of_a_quota_back_once(cloud: Cloud, tmp_path: Path) -> None:
    """An unchecked destroy, as eschedule sent in 2019, is carried out and does not count."""
    with toy(cloud, tmp_path, Full()) as one:
        instance = one.place()
        with limited(cloud, 'a-project', 5, {'instances': 2, 'VCPU': 2}) as read_used:
            one.step()
            assert one.record(instance).state == ERROR
            assert read_used() == 1
            one.destroy(instance)
            assert one.step() == [f'destroy {instance}']
            one.instances.records.forget(instance)
            assert one.record(instance).state == GONE
            assert read_used() == 1


@pytest.mark.parametrize('how', ['adopted', 'built again', 'refused', 'at once'])
def test_where_the_record_was_lost_no_address_is_left(one: Toy, cloud: Cloud, how: str) -> None:
    """An instance that ends before its address is written again leaves no address either."""
    instance = one.build()
    request, booted = keys.request(one.compute, instance), keys.booted(instance)
    assert cloud.store.get(booted) is not None
    cloud.store.commit([], [Delete(keys.record(one.compute, instance))])
    one.instances.records.forget(instance)
    if how in ('built again', 'refused'):
        one.hypervisor.destroy(instance, one.compute)
        one.hypervisor.delete_disk(instance)
    if how == 'refused':
        cloud.store.commit([], [Put(request, '{"version": 99}')])
    if how != 'at once':
        one.step()
    if how != 'refused':
        one.destroy(instance)
    one.settle()
    assert cloud.store.get(request) is None
    assert cloud.store.get(booted) is None
    assert cloud.server.allocations(instance) == {}


def test_where_the_record_was_lost_the_address_of_another_compute_stays(one: Toy, cloud: Cloud) -> None:
    """Two computes have requests for one instance, and one record is lost.

    The address may be the other's.
    """
    instance, other = one.build(), cloud.compute(VCPU=1)
    request = read_entry(cloud.store, keys.request(one.compute, instance))
    operations = [Put(keys.request(other, instance), request.value.decode()), Put(keys.booted(instance), '10.9.9.9')]
    cloud.store.commit([], [Delete(keys.record(one.compute, instance)), *operations])
    one.instances.records.forget(instance)
    one.hypervisor.destroy(instance, one.compute)
    one.hypervisor.delete_disk(instance)
    one.planner.works_again()
    assert [line.partition(' ')[0] for line in one.step()] == ['build']
    assert read_entry(cloud.store, keys.booted(instance)).value == b'10.9.9.9'


def test_what_ended_by_our_memory_and_is_here_is_not_taken_down(one: Toy, cloud: Cloud) -> None:
    """The remembered end is outdated: a restored etcd has the request, and the guest runs."""
    instance = one.build()
    one.memory.ended(instance)
    before = cloud.etcd.get(keys.request(one.compute, instance))
    one.republish({instance})
    assert cloud.etcd.get(keys.request(one.compute, instance)) == before
    one.republish(())
    assert cloud.etcd.get(keys.request(one.compute, instance)) is None


def test_what_had_ended_and_waits_again_ends_on_one_lease(one: Toy, cloud: Cloud) -> None:
    instance = one.place()
    one.step()
    request = cloud.delivered(one.compute, instance)
    one.destroy(instance)
    one.instances.records.forget(instance)
    one.step()
    before = read_entry(cloud.store, keys.record(one.compute, instance))
    entry = QueueEntry(flavor=Flavor('small', request.resources), **request.parts())
    cloud.store.commit([], [Put(entry.key, waiting_to_json(entry))])
    one.republish(())
    assert cloud.store.get(entry.key) is None
    assert cloud.store.keep_alive(before.lease) == 0
    assert cloud.store.keep_alive(read_entry(cloud.store, keys.record(one.compute, instance)).lease) > 0


@pytest.mark.parametrize('state', [ACTIVE, BUILDING, DESTROYING])
def test_republish_writes_nothing_of_what_another_compute_claims(
    one: Toy, cloud: Cloud, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """The host was off and forgotten, and another compute has the instance.

    A begun build has no guest here.
    """
    instance = one.place()
    one.step()
    request, record = cloud.delivered(one.compute, instance), one.record(instance)
    stages = {} if state == BUILDING else record.stages
    one.memory.remember(request, replace(record, state=state, stages=stages))
    places = one.list_keys(instance)
    cloud.store.commit([], [*map(Delete, places)])
    other = cloud.compute(VCPU=10, MEMORY_MB=1024, DISK_GB=10)
    consumer = allocations.consumer(cloud.placement, instance)
    moved = {other: request.allocations[one.compute]}
    allocations.claim_once(cloud.placement, instance, moved, 'a-user', 'a-project', consumer.generation)
    guests = () if state == BUILDING else (instance,)
    one.republish(guests)
    assert cloud.store.read(places) == {}
    assert ('the guest here is kept, and unmanaged. Fix: ' in caplog.text) == bool(guests)
