"""Builds wait for their claim, and a failed instance ends with its own reason."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.compute import record_missed_ends
from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.instance.instances import ControlPlane, Instances
from ecomp.agent.instance.records import Records
from ecomp.agent.jobs import FailureLog, run_aside
from ecomp.agent.planner import Planner
from ecomp.errors import BuildFailed, EcompError, NoSpace, NotFound, Unreachable
from ecomp.files import write_durably
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.foreign import ForeignGuest
from ecomp.model.group import Membership
from ecomp.model.guest import Attachment, Guest, GuestSpec, list_macs, make_mac_address
from ecomp.model.order import Request
from ecomp.model.queue import Backlog, QueueEntry, update_backlog
from ecomp.model.quota import Quota
from ecomp.model.states import ACTIVE, BUILDING, DESTROYING
from ecomp.model.stored import decode, encode
from ecomp.placement import allocations
from ecomp.placement.allocations import Consumer
from ecomp.store.client import Delete, Put
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import SMALL, Cloud, interpose, make_uuid
from tests.functional.guest import SAME_MAC_INSTANCES
from tests.functional.queueing import make_taker
from tests.functional.toy import NOW, ToyCompute, make_toy_compute
from tests.kit.store_client import read_entry

pytestmark = pytest.mark.fast
FULL = 'the file system of the images is full'


class FullHypervisor(FakeHypervisor):
    error: EcompError = BuildFailed('disk', FULL)

    def create_disk(self, spec: GuestSpec) -> None:  # noqa: ARG002
        raise self.error


def restart_planner(one: ToyCompute, cloud: Cloud, state: Path) -> Planner:
    memory, host = Memory(state, one.compute, lambda: NOW), one.host
    control = ControlPlane(one.compute, cloud.store, cloud.placement, lambda: NOW)
    instances = Instances(control, host, one.instances.template, memory)
    return Planner(instances, FailureLog())


@pytest.mark.parametrize('away', [Unreachable('etcd is away', 'etcd'), NoSpace('etcd is full')])
@pytest.mark.parametrize('restarts', [False, True])
def test_failure_keeps_its_reason_after_the_claim_is_released(
    cloud: Cloud, tmp_path: Path, away: Unreachable, restarts: bool
) -> None:
    """The claim is released before the record is written: a retry must not report it missing."""
    with make_toy_compute(cloud, tmp_path, FullHypervisor()) as one:
        instance = one.place()

        def fail_to_end(*_: object) -> None:
            raise away

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Records, 'end', fail_to_end)
            assert one.step() == [f'build {instance}']
        assert one.read_record(instance).state == BUILDING
        assert cloud.server.read_allocations(instance) == {}
        if restarts:
            one.planner = restart_planner(one, cloud, tmp_path)
        one.planner.retry_now()
        assert one.step() == [f'build {instance}']
        _, failure = one.read_failure(instance)
        assert (failure.stage, failure.reason) == ('disk', FULL)
        assert cloud.store.get(keys.request(one.compute, instance)) is None
        assert Memory(tmp_path, one.compute, lambda: NOW).get_entries() == {}


def test_deferred_build_ends_after_its_request_is_deleted(cloud: Cloud, tmp_path: Path) -> None:
    hypervisor = FullHypervisor()
    hypervisor.error = EcompError('its worker was killed')
    with make_toy_compute(cloud, tmp_path, hypervisor) as one:
        instances = [one.place() for _ in range(2)]
        assert len(one.step()) == 2
        assert all(one.read_record(item).state == BUILDING for item in instances)
        assert len(hypervisor.list_reservations()) == 2
        for item in instances:
            cloud.store.commit([], [Delete(keys.request(one.compute, item))])
        planner = restart_planner(one, cloud, tmp_path)
        planner.recheck()
        assert len(hypervisor.list_reservations()) == 2, 'it has not read yet what is asked for'
        planner.step({})
        # An instance with a guest is kept, and does not block the others. One with only a disk ends.
        kept_instance, disk_only = one.memory.get_entries()
        hypervisor._guests[kept_instance] = Guest(kept_instance, one.compute, True, True, True)
        hypervisor._guests[disk_only] = Guest(disk_only, None, False, False, True)
        planner.recheck()
        assert [item.instance for item in hypervisor.list_reservations().values()] == [kept_instance]
        assert list(hypervisor._guests) == [kept_instance]
        one.instances.records.forget(kept_instance)
        record, reason = one.read_record(kept_instance), 'its request was deleted during its build'
        assert (record.state, record.fault) == (ACTIVE, reason)
        assert cloud.server.read_allocations(kept_instance) != {}
        assert one.read_failure(disk_only)[1].reason == reason
        assert cloud.server.read_allocations(disk_only) == {}
        assert cloud.store.get(keys.request(one.compute, disk_only)) is None


def test_deferred_build_with_a_request_is_kept(cloud: Cloud, tmp_path: Path) -> None:
    hypervisor = FullHypervisor()
    hypervisor.error = EcompError('its worker was killed')
    with make_toy_compute(cloud, tmp_path, hypervisor) as one:
        instance = one.place()
        one.step()
        one.planner.recheck()
        assert one.read_record(instance).state == BUILDING
        assert len(hypervisor.list_reservations()) == 1


@contextmanager
def set_quota(
    cloud: Cloud, project: str, count: int, used: Mapping[str, int] | None = None
) -> Iterator[Callable[[], int]]:
    """Set a quota of `count` instances, and yield a function that reads its current usage."""
    key = keys.quota(project)
    assert cloud.store.get(key) is None, 'no other test of this etcd has one'
    cloud.store.commit([], [Put(key, encode(Quota(project, {'instances': count}, used or {})))])

    def read_used() -> int:
        return decode(Quota, read_entry(cloud.store, key).value, project=project).used.get('instances', 0)

    try:
        yield read_used
    finally:
        cloud.store.commit([], [Delete(key)])


def deliver_named(cloud: Cloud, compute: str, name: str) -> str:
    order = replace(cloud.make_order_on(compute), name=name, group=Membership(name, 'affinity', True))
    cloud.create(order)
    return order.instance


def test_dropped_request_releases_name_group_and_quota(toy_compute: ToyCompute, cloud: Cloud) -> None:
    """A follower drops a too large value, here of a request with a name, group and quota."""
    with set_quota(cloud, 'a-project', 5) as read_used:
        instance = deliver_named(cloud, toy_compute.compute, 'unkept')
        assert read_used() == 1
        key = keys.request(toy_compute.compute, instance)
        entry = read_entry(cloud.store, key)
        (work,) = toy_compute.planner.step({key: replace(entry, value=b'', dropped_bytes=len(entry.value))})
        toy_compute.planner.begin(work)
        toy_compute.planner.carry_out(work)
        record, failure = toy_compute.read_failure(instance)
        assert 'too many together with the other requests' in failure.reason
        assert (record.name, record.project_id) == ('unkept', 'a-project')
        assert read_used() == 0
        assert cloud.store.get(keys.group('unkept')) is None
        lease = read_entry(cloud.store, keys.name('unkept')).lease
        assert lease, 'it is found by its name as long as its record is there, and not for ever'


@pytest.mark.parametrize('shares', [True, False])
def test_instance_refused_from_its_queue_during_republish_is_counted(
    toy_compute: ToyCompute, cloud: Cloud, shares: bool
) -> None:
    with set_quota(cloud, 'a-project', 5) as read_used:
        instance = deliver_named(cloud, toy_compute.compute, 'waits') if shares else toy_compute.place()
        toy_compute.step()
        places = toy_compute.list_keys(instance)
        request = cloud.read_request(toy_compute.compute, instance)
        # An etcd from before it was taken: its queue entry holds its name, group and quota.
        entry = QueueEntry(flavor=Flavor('small', request.resources), **request.copy_fields())
        cloud.store.commit([], [*map(Delete, places), Put(entry.key, encode(entry))])
        (place,) = update_backlog(cloud.store.snapshot(keys.QUEUES).entries, Backlog()).entries.values()
        other_taker = make_taker(cloud, make_uuid(), now=lambda: NOW)

        def refuse() -> None:
            # In a placement from before it was taken, the instance has no claim.
            consumer = allocations.read_consumer(cloud.placement, instance)
            assert allocations.release_once(cloud.placement, instance, consumer)
            assert other_taker.refuse(place, 'it asks for too much')
            assert read_used() == 0

        interpose(cloud.store, 'commit', refuse, lambda *words: places[0] in {put.key for put in words[1]})
        toy_compute.republish(toy_compute.hypervisor.list_guests().keys())
        assert read_used() == 1
        assert cloud.store.get(places[0]) is not None
        assert (cloud.store.get(keys.group('waits')) is not None) == shares
        assert (cloud.store.get(keys.name('waits')) is not None) == shares
        cloud.store.commit([], [*map(Delete, (*places, keys.name('waits'), keys.group('waits')))])


def test_republish_retries_until_concurrent_quota_writes_end(
    toy_compute: ToyCompute, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All write the same quota, and one writer may lose more than five times in a row."""
    with set_quota(cloud, 'a-project', 5) as read_used:
        instance = deliver_named(cloud, toy_compute.compute, 'among-many')
        toy_compute.step()
        places = toy_compute.list_keys(instance)
        cloud.store.commit([], [*map(Delete, (*places, keys.name('among-many'), keys.group('among-many')))])
        key, commit, others = keys.quota('a-project'), cloud.store.commit, list(range(20))

        def commit_late(conditions: Any, operations: Any, *settlement: Any) -> int | None:
            if others and any(put.key == key for put in operations):
                others.pop()
                commit([], [Put(key, read_entry(cloud.store, key).value.decode())])  # another compute writes first
            return commit(conditions, operations, *settlement)

        monkeypatch.setattr(cloud.store, 'commit', commit_late)
        toy_compute.republish(toy_compute.hypervisor.list_guests().keys())
        monkeypatch.undo()
        assert others == []
        assert cloud.store.get(places[0]) is not None
        assert read_used() == 2, 'the one of before the loss was never given back'
        cloud.store.commit([], [*map(Delete, (*places, keys.name('among-many'), keys.group('among-many')))])


def test_address_of_another_compute_stays_after_a_record_was_lost(toy_compute: ToyCompute, cloud: Cloud) -> None:
    """Two computes have requests for one instance, and the address may be the other's."""
    instance, other = toy_compute.build(), cloud.make_compute(VCPU=1)
    request = read_entry(cloud.store, keys.request(toy_compute.compute, instance))
    operations = [Put(keys.request(other, instance), request.value.decode()), Put(keys.address(instance), '10.9.9.9')]
    cloud.store.commit([], [Delete(keys.record(toy_compute.compute, instance)), *operations])
    toy_compute.instances.records.forget(instance)
    toy_compute.hypervisor.destroy(instance, toy_compute.compute)
    toy_compute.hypervisor.delete_disk(instance)
    toy_compute.planner.retry_now()
    assert [line.partition(' ')[0] for line in toy_compute.step()] == ['build']
    assert read_entry(cloud.store, keys.address(instance)).value == b'10.9.9.9'


def test_released_guest_is_measured_between_its_mark_and_its_claim(toy_compute: ToyCompute, cloud: Cloud) -> None:
    """What it uses is reserved without its mark, and has to be before its claim is released."""
    instance = toy_compute.place()
    request = replace(cloud.read_request(toy_compute.compute, instance), image=None, is_adopted=True)
    cloud.store.commit([], [Put(keys.request(toy_compute.compute, instance), encode(request))])
    toy_compute.hypervisor._save_foreign(ForeignGuest(instance, 'old', True))
    toy_compute.settle()
    assert toy_compute.hypervisor.list_guests()[instance].is_adopted
    seen = []

    def on_release() -> None:
        claim = allocations.read_consumer(cloud.placement, instance).allocations
        seen.append((toy_compute.hypervisor.list_foreign()[instance].adopted_by, claim == request.allocations))

    toy_compute.instances.on_release = on_release
    toy_compute.destroy(instance)
    assert toy_compute.step() == [f'destroy {instance}']
    assert (seen, allocations.read_consumer(cloud.placement, instance).allocations) == ([('', True)], {})
    assert toy_compute.hypervisor.list_foreign()[instance].is_running


def test_ended_instance_that_is_queued_again_ends_with_one_lease(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance = toy_compute.place()
    toy_compute.step()
    request = cloud.read_request(toy_compute.compute, instance)
    toy_compute.destroy(instance)
    toy_compute.instances.records.forget(instance)
    toy_compute.step()
    before = read_entry(cloud.store, keys.record(toy_compute.compute, instance))
    entry = QueueEntry(flavor=Flavor('small', request.resources), **request.copy_fields())
    cloud.store.commit([], [Put(entry.key, encode(entry))])
    toy_compute.republish(())
    assert cloud.store.get(entry.key) is None
    assert cloud.store.keep_alive(before.lease) == 0
    assert cloud.store.keep_alive(read_entry(cloud.store, keys.record(toy_compute.compute, instance)).lease) > 0


@pytest.mark.parametrize('state', [ACTIVE, BUILDING, DESTROYING])
def test_republish_skips_instance_claimed_by_another_compute(
    toy_compute: ToyCompute, cloud: Cloud, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """The host was off and forgotten, and another compute has the instance."""
    instance = toy_compute.place()
    toy_compute.step()
    request, record = cloud.read_request(toy_compute.compute, instance), toy_compute.read_record(instance)
    stages = {} if state == BUILDING else record.stages  # a begun build has no guest here
    toy_compute.memory.remember(request, replace(record, state=state, stages=stages))
    places = toy_compute.list_keys(instance)
    cloud.store.commit([], [*map(Delete, places)])
    other = cloud.make_compute(VCPU=10, MEMORY_MB=1024, DISK_GB=10)
    consumer = allocations.read_consumer(cloud.placement, instance)
    moved = {other: request.allocations[toy_compute.compute]}
    allocations.replace_allocations(cloud.placement, instance, moved, 'a-user', 'a-project', consumer.generation)
    guests = () if state == BUILDING else (instance,)
    toy_compute.republish(guests)
    assert cloud.store.read(places) == {}
    assert ('this guest is kept, but not managed. Fix: ' in caplog.text) == bool(guests)


# A build waits until placement confirms its claim (rule: confirmed-claim).


@pytest.mark.parametrize('says', [Unreachable('placement is away', 'placement'), EcompError('too old'), NotFound('no')])
def test_build_waits_until_placement_confirms_its_claim(
    toy_compute: ToyCompute, cloud: Cloud, says: EcompError
) -> None:
    """It writes nothing to etcd and repeats no step, and only a different claim ends it."""
    instance = toy_compute.place()

    def raise_error(*_: object) -> Consumer:
        raise says

    revision = cloud.store.snapshot('/').revision
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, 'read_consumer', raise_error)
        assert toy_compute.step() == [f'build {instance}']
        remembered = toy_compute.memory.get_entries()[instance].record
        assert (remembered.state, remembered.attempts) == (BUILDING, 0)
        patch.setattr(toy_compute.hypervisor, 'reserve_address', None)
        for _ in range(4):
            toy_compute.planner.retry_now()
            assert toy_compute.step() == [f'build {instance}']
        assert cloud.store.snapshot('/').revision == revision
        assert toy_compute.instances.records.get(instance) is None
        assert toy_compute.hypervisor.list_guests() == {}
    toy_compute.planner.retry_now()
    toy_compute.step()
    assert toy_compute.read_record(instance).state == ACTIVE


@pytest.mark.parametrize('restarts', [False, True])
def test_unconfirmed_build_is_undone_when_its_request_is_deleted(
    toy_compute: ToyCompute, cloud: Cloud, tmp_path: Path, restarts: bool
) -> None:
    """The request is deleted manually while placement is unreachable or the compute is down."""
    instance = toy_compute.place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, 'read_consumer', lambda *_: (_ for _ in ()).throw(Unreachable('placement is away')))
        toy_compute.step()
    assert [reservation.instance for reservation in toy_compute.hypervisor.list_reservations().values()] == [instance]
    cloud.store.commit([], [Delete(keys.request(toy_compute.compute, instance))])
    if restarts:
        toy_compute.restart()
        record_missed_ends(
            toy_compute.compute, cloud.store, toy_compute.memory, toy_compute.hypervisor.list_guests().keys()
        )
    toy_compute.step()
    toy_compute.planner.recheck()
    assert toy_compute.hypervisor.list_reservations() == {}
    assert list((tmp_path / 'metadata').glob('*')) == []
    assert cloud.server.read_allocations(instance) == {}
    assert toy_compute.memory.get_entries() == {}
    toy_compute.instances.records.forget(instance)
    assert toy_compute.instances.records.get(instance) is None


@pytest.mark.parametrize('restarts', [False, True])
def test_instance_forgotten_while_its_host_was_down_stays_gone(
    toy_compute: ToyCompute, cloud: Cloud, restarts: bool
) -> None:
    """Its host died during the build, and then `host forget` and `clear` removed all of it."""
    instance = toy_compute.place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_compute.host.runner, 'run', lambda _: (_ for _ in ()).throw(Unreachable('its host died')))
        toy_compute.step()
    assert toy_compute.read_record(instance).state == BUILDING
    key = keys.record(toy_compute.compute, instance)
    # As `host forget` and `clear` do.
    allocations.release_once(cloud.placement, instance, allocations.read_consumer(cloud.placement, instance))
    cloud.store.commit([], [Delete(key), Delete(keys.request(toy_compute.compute, instance))])
    if restarts:
        toy_compute.restart()
        record_missed_ends(
            toy_compute.compute, cloud.store, toy_compute.memory, toy_compute.hypervisor.list_guests().keys()
        )
    toy_compute.step()
    for _ in range(3):
        toy_compute.planner.recheck()
    assert cloud.store.get(key) is None
    assert toy_compute.memory.get_entries() == {}
    assert toy_compute.hypervisor.list_reservations() == {}


@pytest.mark.parametrize(('is_elsewhere', 'size'), [(True, SMALL), (False, {**SMALL, 'VCPU': 2})])
def test_request_whose_claim_is_elsewhere_or_differs_is_not_built(
    toy_compute: ToyCompute, cloud: Cloud, is_elsewhere: bool, size: dict[str, int]
) -> None:
    """Only the request is here, as a client of 2019 may write it."""
    instance, other = toy_compute.place(), cloud.make_compute()
    client, claimed = cloud.placement, {other if is_elsewhere else toy_compute.compute: size}
    generation = allocations.read_consumer(client, instance).generation
    allocations.replace_allocations(client, instance, claimed, 'a-user', 'a-project', generation)
    toy_compute.step()
    assert toy_compute.read_failure(instance)[1].stage == 'scheduled'
    assert toy_compute.hypervisor.list_guests() == {}
    assert cloud.server.read_allocations(instance) == ({other: SMALL} if is_elsewhere else {})


def test_placement_is_queried_while_an_address_is_reserved(toy_compute: ToyCompute) -> None:
    """The query of placement blocks until the reservation has begun."""
    instance = toy_compute.place()
    reserving, consumer, reserve = threading.Event(), allocations.read_consumer, toy_compute.hypervisor.reserve_address

    def query_claim(*args: object) -> Consumer:
        assert reserving.wait(20)
        return consumer(*args)  # type: ignore[arg-type]

    def reserve_address(*args: object) -> str | None:
        reserving.set()
        return reserve(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, 'read_consumer', query_claim)
        patch.setattr(toy_compute.hypervisor, 'reserve_address', reserve_address)
        toy_compute.step()
    assert toy_compute.read_record(instance).state == ACTIVE


def test_query_runs_in_the_caller_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', fail_to_start)
    consumer = Consumer({}, 7)

    def fail_to_query() -> Consumer:
        raise Unreachable('placement is away')

    assert run_aside('aside', lambda: consumer).result(0) == consumer
    with pytest.raises(Unreachable, match='is away'):
        run_aside('aside', fail_to_query).result(0)


# Two instances on one host with the same MAC: the second one is refused.


FIRST, SECOND = SAME_MAC_INSTANCES
MAC = make_mac_address(FIRST, 0)


def read_owners(directory: Path) -> dict[str, str]:
    return {path.stem: json.loads(path.read_text())['instance'] for path in directory.glob('*.json')}


@pytest.mark.parametrize('kind', ['network', 'bridge'])
def test_second_instance_fails_and_the_first_is_kept(cloud: Cloud, tmp_path: Path, kind: str) -> None:
    """On a bridge the metadata file names the MAC's owner: there is no reservation."""
    with make_toy_compute(cloud, tmp_path, networks=(Attachment(kind, 'some'),)) as compute:
        for instance in SAME_MAC_INSTANCES:
            compute.cloud.create(cloud.make_order_on(compute.compute, instance))
            compute.step()
        assert compute.read_record(FIRST).state == ACTIVE
        reserved = compute.hypervisor.list_reservations()
        assert {reservation.instance for reservation in reserved.values()} == ({FIRST} if kind == 'network' else set())
        assert read_owners(tmp_path / 'metadata') == {MAC: FIRST}
        failure = compute.read_failure(SECOND)[1]
        reason = f'its MAC {MAC} is also that of instance {FIRST} on this host'
        reason += '. Fix: create the instance with another uuid, which gives another MAC'
        assert (failure.stage, failure.reason) == ('scheduled', reason)
        assert compute.hypervisor.list_guests().keys() == {FIRST}


def test_metadata_file_is_removed_only_for_its_instance(tmp_path: Path) -> None:
    data = GuestData(tmp_path)
    data.write(Request(FIRST, {}), [MAC])
    data.remove(SECOND, list_macs(SECOND))
    assert read_owners(tmp_path) == {MAC: FIRST}
    # A file of an instance that is no longer on this host does not block others.
    data.write(Request(SECOND, {}), [MAC], lambda: {SECOND})
    assert read_owners(tmp_path) == {MAC: SECOND}
    (tmp_path / f'{MAC}.json').write_text('{')
    data.write(Request(SECOND, {}), [MAC], lambda: SAME_MAC_INSTANCES)
    data.remove(SECOND, list_macs(SECOND))
    assert read_owners(tmp_path) == {}


def test_metadata_write_does_not_wait_for_another_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance with the same MAC is refused before the file exists."""
    data, results, other_mac = GuestData(tmp_path), list[str](), make_mac_address(SECOND, 1)

    def write_second() -> None:
        data.write(Request(SECOND, {}), [other_mac], lambda: SAME_MAC_INSTANCES)
        results.append(read_owners(tmp_path)[other_mac])
        try:
            data.write(Request(SECOND, {}), [MAC], lambda: SAME_MAC_INSTANCES)
        except BuildFailed as error:
            results.append(error.reason)
        data.remove(SECOND, list_macs(SECOND))
        results.append(str(read_owners(tmp_path)))

    thread, began = threading.Thread(target=write_second, daemon=True), threading.Lock()

    def write_slowly(path: Path, text: str) -> None:
        if began.acquire(blocking=False):
            thread.start()
            thread.join(30)
        write_durably(path, text)

    monkeypatch.setattr('ecomp.agent.host.metadata.write_durably', write_slowly)
    data.write(Request(FIRST, {}), [MAC], lambda: SAME_MAC_INSTANCES)
    refused = (
        f'its MAC {MAC} is also that of instance {FIRST} on this host. '
        'Fix: create the instance with another uuid, which gives another MAC'
    )
    assert results == [SECOND, refused, '{}']
    assert read_owners(tmp_path) == {MAC: FIRST}
