"""An instance that fails ends with why it failed, whatever its compute meets on the way; in steps, without threads."""

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
    """No disk can be made; `why` is what that fails with."""

    why: EcompError = BuildFailed('disk', FULL)

    def create_disk(self, spec: GuestSpec) -> None:  # noqa: ARG002
        raise self.why


def started_again(one: Toy, cloud: Cloud, state: Path) -> Planner:
    """Another planner of the same compute, that knows what the state directory says."""
    memory, host = Memory(state, one.compute, lambda: NOW), one.host
    control = ControlPlane(one.compute, cloud.store, cloud.placement, lambda: NOW)
    instances = Instances(control, host, one.instances.shape, memory)
    return Planner(instances, Complaints())


@pytest.mark.parametrize('away', [Unreachable('etcd is away', 'etcd'), NoSpace('etcd is full')])
@pytest.mark.parametrize('restarts', [False, True])
def test_what_was_released_on_the_way_is_no_reason(
    cloud: Cloud, tmp_path: Path, away: Unreachable, restarts: bool
) -> None:
    """Its claim goes before its record says so; looked at once more, it would be refused for having none."""
    with toy(cloud, tmp_path, Full()) as one:
        instance = one.place()

        def end(*_: object) -> None:
            raise away

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Records, 'end', end)
            assert one.step() == [f'build {instance}']
        assert one.record(instance).state == BUILDING
        assert cloud.server.allocations(instance) == {}
        if restarts:
            one.planner = started_again(one, cloud, tmp_path)
        one.planner.works_again()
        assert one.step() == [f'build {instance}']
        _, why = one.read_failure(instance)
        assert (why.stage, why.reason) == ('disk', FULL)
        assert cloud.store.get(keys.request(one.compute, instance)) is None
        assert Memory(tmp_path, one.compute, lambda: NOW).all() == {}


def test_a_request_that_is_deleted_while_nobody_is_at_its_build_is_ended(cloud: Cloud, tmp_path: Path) -> None:
    hypervisor = Full()
    hypervisor.why = EcompError('its worker was killed')
    with toy(cloud, tmp_path, hypervisor) as one:
        instances = [one.place() for _ in range(2)]
        assert len(one.step()) == 2
        assert all(one.record(each).state == BUILDING for each in instances)
        assert len(hypervisor.reservations()) == 2
        for each in instances:
            cloud.store.commit([], [Delete(keys.request(one.compute, each))])
        planner = started_again(one, cloud, tmp_path)
        planner.recheck()
        assert len(hypervisor.reservations()) == 2, 'it has not read yet what is asked for'
        planner.step({})
        # One whose guest is there is kept, and holds up no other; of a mere disk nothing is.
        kept, disk = one.memory.all()
        hypervisor._guests[kept] = Guest(kept, one.compute, True, True, True)
        hypervisor._guests[disk] = Guest(disk, None, False, False, True)
        planner.recheck()
        assert [each.instance for each in hypervisor.reservations().values()] == [kept]
        assert list(hypervisor._guests) == [kept]
        one.instances.records.forget(kept)
        lives, deleted = one.record(kept), 'its request was deleted while it was being built'
        assert (lives.state, lives.fault) == (ACTIVE, deleted)
        assert cloud.server.allocations(kept) != {}
        assert one.read_failure(disk)[1].reason == deleted
        assert cloud.server.allocations(disk) == {}
        assert cloud.store.get(keys.request(one.compute, disk)) is None


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
    """A quota of so many instances, of which this is used before; how many are counted now."""
    key = keys.quota(project)
    assert cloud.store.get(key) is None, 'no other test of this etcd has one'
    cloud.store.commit([], [Put(key, quota_to_json(Quota(project, {'instances': count}, before or {})))])

    def used() -> int:
        return quota_from_json(project, read_entry(cloud.store, key).value).used.get('instances', 0)

    try:
        yield used
    finally:
        cloud.store.commit([], [Delete(key)])


def named(cloud: Cloud, compute: str, name: str) -> str:
    """A small guest delivered to the compute, with a name and in a group of its own."""
    wanted = replace(cloud.wanted(compute), name=name, group=Membership(name, 'affinity', True))
    cloud.create(wanted)
    return wanted.instance


def test_what_is_refused_because_it_was_not_kept_keeps_nothing_of_what_it_shares(one: Toy, cloud: Cloud) -> None:
    """What a follower has no room for is refused, and was delivered as all others: with a name, a group, a quota."""
    with limited(cloud, 'a-project', 5) as used:
        instance = named(cloud, one.compute, 'unkept')
        assert used() == 1
        key = keys.request(one.compute, instance)
        entry = read_entry(cloud.store, key)
        (work,) = one.planner.step({key: replace(entry, value=b'', dropped=len(entry.value))})
        one.planner.begin(work)
        one.planner.carry_out(work)
        failed, why = one.read_failure(instance)
        assert 'too much' in why.reason
        assert (failed.name, failed.project_id) == ('unkept', 'a-project')
        assert used() == 0
        assert cloud.store.get(keys.group('unkept')) is None
        lease = read_entry(cloud.store, keys.name('unkept')).lease
        assert lease, 'it is found by its name as long as its record is there, and not for ever'


def test_what_a_restored_etcd_does_not_know_is_counted_again(one: Toy, cloud: Cloud) -> None:
    """Once, however often it is published, and given back at its end; so is what is being destroyed."""
    with limited(cloud, 'a-project', 1) as used:
        before = read_entry(cloud.store, keys.quota('a-project'))
        instance = named(cloud, one.compute, 'later')
        one.step()
        assert one.record(instance).state == ACTIVE
        places = one.list_keys(instance)
        restored = [Put(before.key, before.value.decode()), *map(Delete, (*places, keys.name('later')))]
        cloud.store.commit([], [*restored, Delete(keys.group('later'))])
        assert used() == 0
        for _ in range(2):
            one.republish(one.hypervisor.guests().keys())
            assert used() == 1
        with pytest.raises(OverQuota):
            cloud.create(cloud.wanted(one.compute))
        # What was in a queue when the snapshot was made counted there already, and is there no more.
        queued = keys.queue('small', instance)
        cloud.store.commit([], [*map(Delete, places[:2]), Put(queued, '{}'), Put(keys.taker(queued), '{}')])
        one.republish(one.hypervisor.guests().keys())
        assert used() == 1
        assert cloud.etcd.keys(queued) == []
        assert cloud.store.get(places[0]) is not None
        one.destroy(instance)
        one.instances.records.forget(instance)
        one.settle()
        assert used() == 0


@pytest.mark.parametrize('shares', [True, False])
def test_what_leaves_its_queue_while_it_is_published_is_counted(one: Toy, cloud: Cloud, shares: bool) -> None:
    with limited(cloud, 'a-project', 5) as used:
        instance = named(cloud, one.compute, 'waits') if shares else one.place()
        one.step()
        places = one.list_keys(instance)
        request = cloud.delivered(one.compute, instance)
        # The etcd of before it was taken: its place in the queue holds its name, group and quota.
        waiting = QueueEntry(flavor=Flavor('small', request.resources), **request.parts())
        cloud.store.commit([], [*map(Delete, places), Put(waiting.key, waiting_to_json(waiting))])
        (place,) = backlog_of(cloud.store.snapshot(keys.QUEUES).entries, Backlog()).places.values()
        other = Taker(ControlPlane(new(), cloud.store, cloud.placement, lambda: NOW), lambda: 0)

        def refuse() -> None:
            # In an etcd and a placement of before it was taken nobody holds a claim for it.
            held = allocations.consumer(cloud.placement, instance)
            assert allocations.release_once(cloud.placement, instance, held)
            assert other.refuse(place, 'it asks for too much')
            assert used() == 0

        interpose(cloud.store, 'commit', refuse, lambda _, operations: places[0] in {each.key for each in operations})
        one.republish(one.hypervisor.guests().keys())
        assert used() == 1
        assert cloud.store.get(places[0]) is not None
        assert (cloud.store.get(keys.group('waits')) is not None) == shares
        assert (cloud.store.get(keys.name('waits')) is not None) == shares
        cloud.store.commit([], [*map(Delete, (*places, keys.name('waits'), keys.group('waits')))])


def test_many_that_accept_a_new_etcd_at_once_all_get_through(
    one: Toy, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All write the one quota of their project: each was lost to the others after five tries."""
    with limited(cloud, 'a-project', 5) as used:
        instance = named(cloud, one.compute, 'among-many')
        one.step()
        places = one.list_keys(instance)
        cloud.store.commit([], [*map(Delete, (*places, keys.name('among-many'), keys.group('among-many')))])
        key, commit, others = keys.quota('a-project'), cloud.store.commit, list(range(20))

        def late(conditions: Any, operations: Any) -> int | None:
            if others and any(each.key == key for each in operations):
                others.pop()
                commit([], [Put(key, read_entry(cloud.store, key).value.decode())])  # another one was faster
            return commit(conditions, operations)

        monkeypatch.setattr(cloud.store, 'commit', late)
        one.republish(one.hypervisor.guests().keys())
        monkeypatch.undo()
        assert others == []
        assert cloud.store.get(places[0]) is not None
        assert used() == 2, 'the one of before the loss was never given back'
        cloud.store.commit([], [*map(Delete, (*places, keys.name('among-many'), keys.group('among-many')))])


def test_what_failed_gives_its_share_of_a_quota_back_once(cloud: Cloud, tmp_path: Path) -> None:
    """A destroy of it that comes without asking, as 2019's did, is carried out, and counts nothing."""
    with toy(cloud, tmp_path, Full()) as one:
        instance = one.place()
        with limited(cloud, 'a-project', 5, {'instances': 2, 'VCPU': 2}) as used:
            one.step()
            assert one.record(instance).state == ERROR
            assert used() == 1
            one.destroy(instance)
            assert one.step() == [f'destroy {instance}']
            one.instances.records.forget(instance)
            assert one.record(instance).state == GONE
            assert used() == 1


@pytest.mark.parametrize('how', ['adopted', 'built again', 'refused', 'at once'])
def test_where_the_record_was_lost_no_address_is_left(one: Toy, cloud: Cloud, how: str) -> None:
    """What becomes of an instance before its address is written anew ends without it, too."""
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
    """Somebody asked two computes for one instance, and etcd lost the record of one: the address may be the other's."""
    instance, other = one.build(), cloud.compute(VCPU=1)
    there = read_entry(cloud.store, keys.request(one.compute, instance))
    asked = [Put(keys.request(other, instance), there.value.decode()), Put(keys.booted(instance), '10.9.9.9')]
    cloud.store.commit([], [Delete(keys.record(one.compute, instance)), *asked])
    one.instances.records.forget(instance)
    one.hypervisor.destroy(instance, one.compute)
    one.hypervisor.delete_disk(instance)
    one.planner.works_again()
    assert [each.partition(' ')[0] for each in one.step()] == ['build']
    assert read_entry(cloud.store, keys.booted(instance)).value == b'10.9.9.9'


def test_what_ended_by_our_memory_and_is_here_is_not_taken_down(one: Toy, cloud: Cloud) -> None:
    """A restored etcd asks for it, and so does its guest: its end was of an earlier life."""
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
    waiting = QueueEntry(flavor=Flavor('small', request.resources), **request.parts())
    cloud.store.commit([], [Put(waiting.key, waiting_to_json(waiting))])
    one.republish(())
    assert cloud.store.get(waiting.key) is None
    assert cloud.store.keep_alive(before.lease) == 0
    assert cloud.store.keep_alive(read_entry(cloud.store, keys.record(one.compute, instance)).lease) > 0


@pytest.mark.parametrize('state', [ACTIVE, BUILDING, DESTROYING])
def test_republish_writes_nothing_of_what_another_compute_claims(
    one: Toy, cloud: Cloud, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """Its host was off and forgotten, and another compute has it; a build that had begun is not here."""
    instance = one.place()
    one.step()
    request, record = cloud.delivered(one.compute, instance), one.record(instance)
    stages = {} if state == BUILDING else record.stages
    one.memory.remember(request, replace(record, state=state, stages=stages))
    places = one.list_keys(instance)
    cloud.store.commit([], [*map(Delete, places)])
    other = cloud.compute(VCPU=10, MEMORY_MB=1024, DISK_GB=10)
    held = allocations.consumer(cloud.placement, instance)
    there = {other: request.allocations[one.compute]}
    allocations.claim_once(cloud.placement, instance, there, 'a-user', 'a-project', held.generation)
    here = () if state == BUILDING else (instance,)
    one.republish(here)
    assert cloud.store.read(places) == {}
    assert ('the guest here is kept, and unmanaged. Fix: ' in caplog.text) == bool(here)
