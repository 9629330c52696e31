"""Test step by step how a compute takes requests from queues, without its thread and clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ecomp.agent.instance.instances import ControlPlane
from ecomp.agent.queue import Queues, Taker
from ecomp.errors import NoCapacity
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.group import MAX_MEMBERS, Group, Membership
from ecomp.model.queue import QueueEntry, QueueTaker, WaitingEntry
from ecomp.model.record import Record, from_json
from ecomp.model.states import ERROR
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.scheduler.changes.change import destroy
from tests.functional.cloud import IMAGE, SMALL, Cloud, make_uuid

pytestmark = pytest.mark.fast

COMPUTE_TOTALS = {'VCPU': 2, 'MEMORY_MB': 512, 'DISK_GB': 10}
# The room of one small instance.
SINGLE_TOTALS = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}


class QueueCompute:
    """A compute that takes from one flavor's queue when the test steps it."""

    def __init__(self, cloud: Cloud, flavor: Flavor, **totals: int) -> None:
        self.cloud = cloud
        self.flavor = flavor
        self.uuid = cloud.make_compute(**totals)
        lease = cloud.store.grant(60)
        control = ControlPlane(self.uuid, cloud.store, cloud.placement, lambda: '2026-11-21T09:00:00.000Z')
        self.queues = Queues()
        self.taker = Taker(control, lambda: lease, self.queues, lambda: True, {}, set)

    def enqueue(self, project: str = 'p', group: Membership | None = None) -> str:
        waiting = QueueEntry(
            make_uuid(),
            self.flavor,
            image=IMAGE,
            group=group,
            user_id='u',
            project_id=project,
            stages={'requested': '2026-11-21T08:00:00.000Z'},
        )
        self.cloud.etcd.put(waiting.key, encode(waiting))
        return waiting.instance

    def get_place(self, instance: str) -> WaitingEntry:
        assert self.queues.backlog is not None
        return self.queues.backlog.entries[keys.queue(self.flavor.name, instance)]

    def read_changes(self) -> bool:
        has_changed = self.taker.on_hosts(self.cloud.store.snapshot(keys.request_prefix(self.uuid)).entries)
        has_new = self.queues.on_queues(self.cloud.store.snapshot(f'{keys.QUEUES}{self.flavor.name}/').entries)
        return has_new or has_changed

    def step(self) -> None:
        while self.taker.take_next():
            pass

    def step_later(self) -> None:
        self.taker.deferrals.clear()
        self.read_changes()
        self.step()

    @property
    def claimed_instances(self) -> set[str]:
        return set(self.cloud.server.read_consumers(self.uuid))

    @property
    def waiting_instances(self) -> set[str]:
        return {keys.get_queued_instance(key) for key in self.cloud.etcd.list_keys(f'{keys.QUEUES}{self.flavor.name}/')}

    @property
    def taken_instances(self) -> set[str]:
        return {keys.get_last_part(key) for key in self.cloud.etcd.list_keys(keys.request_prefix(self.uuid))}


# Claims of the compute's own dead attempt


def test_dead_attempt_s_claim_is_released_after_other_changes(cloud: Cloud, flavor: Flavor) -> None:
    """Check a restarted compute that reads others' requests before its queues."""
    compute = QueueCompute(cloud, flavor, **SINGLE_TOTALS)
    instance = compute.enqueue()
    allocations.replace_allocations(cloud.placement, instance, {compute.uuid: SMALL}, 'u', 'p')
    other_request = keys.request(compute.uuid, make_uuid())
    cloud.etcd.put(other_request, '{}')
    assert compute.taker.on_hosts(cloud.store.snapshot(keys.request_prefix(compute.uuid)).entries)
    compute.step()
    cloud.etcd.delete(other_request)
    compute.read_changes()
    compute.step()
    assert (compute.taken_instances, compute.waiting_instances) == ({instance}, set())


def test_dead_attempt_s_claim_is_released_after_another_taker(cloud: Cloud, flavor: Flavor) -> None:
    compute = QueueCompute(cloud, flavor, **SINGLE_TOTALS)
    instance = compute.enqueue()
    allocations.replace_allocations(cloud.placement, instance, {compute.uuid: SMALL}, 'u', 'p')
    mark = keys.taker(keys.queue(flavor.name, instance))
    cloud.etcd.put(mark, encode(QueueTaker(make_uuid())))
    compute.read_changes()
    compute.step()
    assert compute.claimed_instances == {instance}, 'it is the other one to move'
    cloud.etcd.delete(mark)
    assert compute.read_changes()
    compute.taker._next_room_read = 0.0  # a minute later
    compute.step()
    assert (compute.taken_instances, compute.waiting_instances) == ({instance}, set())


def test_compute_that_cannot_build_gives_back_what_its_dead_attempt_was_taking(cloud: Cloud, flavor: Flavor) -> None:
    compute = QueueCompute(cloud, flavor, **SINGLE_TOTALS)
    instance = compute.enqueue()
    allocations.replace_allocations(cloud.placement, instance, {compute.uuid: SMALL}, 'u', 'p')
    mark = keys.taker(keys.queue(flavor.name, instance))
    cloud.etcd.put(mark, encode(QueueTaker(compute.uuid)))
    compute.taker.can_build = lambda: False
    compute.step_later()
    assert (compute.claimed_instances, compute.taken_instances, cloud.etcd.get(mark)) == (set(), set(), None)
    compute.taker.can_build = lambda: True
    compute.step_later()
    assert (compute.taken_instances, compute.waiting_instances) == ({instance}, set())


# Refusals by placement


def read_record(cloud: Cloud, instance: str) -> Record:
    value = cloud.etcd.read_record(instance)
    assert value is not None
    return from_json(value, instance)


def test_request_that_placement_refuses_fails_alone(cloud: Cloud, flavor: Flavor) -> None:
    """Check a project id that is too long for placement, which no eschedule would have queued."""
    compute = QueueCompute(cloud, flavor)
    poison, good = compute.enqueue('p' * 300), compute.enqueue()
    compute.read_changes()
    compute.step()
    assert (compute.taken_instances, compute.waiting_instances) == ({good}, {poison}), (
        'it may be that placement lost its provider'
    )
    compute.step_later()
    assert compute.waiting_instances == set()
    failed = read_record(cloud, poison)
    assert (failed.state, failed.compute, failed.project_id) == (ERROR, compute.uuid, 'p' * 300)
    assert failed.error is not None
    assert failed.error.stage == 'scheduled'
    assert 'placement refuses its claim' in failed.error.reason
    assert compute.claimed_instances == {good}
    # Its record is removed like that of any other failed instance.
    assert destroy(cloud.store, poison)
    assert cloud.etcd.read_record(poison) is None


def test_lost_provider_does_not_fail_the_request(cloud: Cloud, flavor: Flavor) -> None:
    """Check that HTTP 400 for a missing provider keeps the request until the provider is back."""
    compute = QueueCompute(cloud, flavor)
    compute.step_later()
    instance = compute.enqueue()
    compute.read_changes()
    for path in ('/inventories', ''):
        cloud.server.call('DELETE', f'/resource_providers/{compute.uuid}{path}')
    compute.taker._on_refusal(compute.get_place(instance), 'no such provider')
    compute.step_later()
    assert compute.waiting_instances == {instance}, 'it fits nowhere now'
    cloud.server.call('POST', '/resource_providers', {'uuid': compute.uuid, 'name': compute.uuid})
    room = {name: {'total': amount} for name, amount in COMPUTE_TOTALS.items()}
    inventories = {'resource_provider_generation': 0, 'inventories': room}
    cloud.server.call('PUT', f'/resource_providers/{compute.uuid}/inventories', inventories)
    compute.taker._next_room_read = 0.0  # a minute later
    compute.step_later()
    assert (compute.taken_instances, compute.waiting_instances) == ({instance}, set())


def test_flavor_without_room_is_retried_later(cloud: Cloud, flavor: Flavor, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = QueueCompute(cloud, flavor)
    instance = compute.enqueue()
    compute.read_changes()
    real, refusals = Taker.take, [NoCapacity('just now')]

    def take(taker: Taker, *args: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return real(taker, *args)

    monkeypatch.setattr(Taker, 'take', take)
    compute.step()
    assert compute.waiting_instances == {instance}
    assert compute.taker.deferrals.get_deferred(time.monotonic()).keys() == {instance, flavor.name}
    compute.step_later()
    assert compute.taken_instances == {instance}


# Groups


@pytest.fixture
def make_group(cloud: Cloud) -> Iterator[Callable[[str, str], str]]:
    names: list[str] = []

    def make(policy: str, compute: str) -> str:
        name = f'g{make_uuid()[:8]}'
        cloud.etcd.put(keys.group(name), encode(Group(name, policy, True, {make_uuid(): compute})))
        names.append(name)
        return name

    yield make
    for name in names:
        cloud.etcd.delete(keys.group(name))


def test_blocked_groups_are_read_together_with_growing_pauses(
    cloud: Cloud, flavor: Flavor, make_group: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the load: a thousand idle computes once read forty groups each, every five seconds."""
    compute = QueueCompute(cloud, flavor, VCPU=8, MEMORY_MB=1024, DISK_GB=10)
    groups = [make_group('affinity', make_uuid()) for _ in range(20)]
    instances = [compute.enqueue(group=Membership(name, 'affinity', True)) for name in groups]
    read: list[str] = []
    get, read_many = cloud.store.get, cloud.store.read
    monkeypatch.setattr(cloud.store, 'get', lambda key: (read.append(key), get(key))[1])
    monkeypatch.setattr(cloud.store, 'read', lambda wanted: (read.append('several'), read_many(wanted))[1])
    compute.read_changes()
    pauses = []
    for _ in range(5):
        read.clear()
        began = time.monotonic()
        compute.step()
        assert len(read) == 1, read
        due_times = compute.taker.deferrals.get_deferred(began)
        assert due_times.keys() == set(instances)
        pauses.append(min(due_times.values()) - began)
        deferred = compute.taker.deferrals
        deferred._deferrals = {name: (0.0, backoff) for name, (_, backoff) in deferred._deferrals.items()}
    assert pauses[4] > 4 * pauses[0]
    # A group whose member is gone admits its instance at the next step; the others keep waiting.
    cloud.etcd.delete(keys.group(groups[7]))
    compute.step_later()
    assert compute.taken_instances == {instances[7]}


@pytest.mark.parametrize(('policy', 'member_count'), [('affinity', MAX_MEMBERS), ('anti-affinity', 1)])
def test_request_of_a_full_or_changed_group_is_not_touched(
    cloud: Cloud, flavor: Flavor, policy: str, member_count: int
) -> None:
    """Check that it is not marked, claimed and released twice a second, with a note each time."""
    compute, members = QueueCompute(cloud, flavor), [make_uuid() for _ in range(member_count)]
    name = f'g{make_uuid()}'
    cloud.etcd.put(keys.group(name), encode(Group(name, 'affinity', True, dict.fromkeys(members, compute.uuid))))
    instance = compute.enqueue(group=Membership(name, policy, True))
    compute.read_changes()
    before = cloud.store.snapshot('/').revision
    compute.step()
    assert cloud.store.snapshot('/').revision == before
    assert compute.waiting_instances == {instance}
    if member_count < MAX_MEMBERS:
        cloud.etcd.delete(keys.group(name))
    else:  # An instance that is already a member is taken like any other.
        joined = Group(name, policy, True, {**dict.fromkeys(members[1:], compute.uuid), instance: ''})
        cloud.etcd.put(keys.group(name), encode(joined))
    compute.step_later()
    assert compute.taken_instances == {instance}
    cloud.etcd.delete(keys.group(name))


def test_foreign_claim_is_marked_once_and_then_only_read(
    cloud: Cloud, flavor: Flavor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim's compute may run the instance (rule: claim-stays), and a mark costs two writes."""
    compute, other = QueueCompute(cloud, flavor), cloud.make_compute()
    instance, claim = compute.enqueue(), compute.taker._claim

    def claim_after_reading_the_mark(waiting: QueueEntry, mark: int) -> None:
        compute.read_changes()
        claim(waiting, mark)

    monkeypatch.setattr(compute.taker, '_claim', claim_after_reading_the_mark)
    allocations.replace_allocations(cloud.placement, instance, {other: SMALL}, 'u', 'p')
    compute.read_changes()
    compute.step_later()
    before = cloud.store.snapshot('/').revision
    for _ in range(3):
        compute.step_later()
    assert cloud.store.snapshot('/').revision == before
    assert compute.waiting_instances == {instance}
    assert cloud.server.read_allocations(instance) == {other: SMALL}
    assert allocations.release_once(cloud.placement, instance, allocations.read_consumer(cloud.placement, instance))
    compute.step_later()
    assert compute.taken_instances == {instance}


def test_claim_of_a_running_guest_is_not_released(cloud: Cloud, flavor: Flavor) -> None:
    """Check a compute that lost its state directory while a restored queue names its own guest."""
    compute = QueueCompute(cloud, flavor)
    instance = compute.enqueue()
    allocations.replace_allocations(cloud.placement, instance, {compute.uuid: SMALL}, 'u', 'p')
    compute.read_changes()
    assert compute.queues.backlog is not None
    compute.taker.list_guests = lambda: {instance}
    compute.taker._read_room(compute.queues.backlog)
    assert cloud.server.read_allocations(instance) == {compute.uuid: SMALL}
    compute.taker.list_guests = set
    compute.taker._read_room(compute.queues.backlog)
    assert cloud.server.read_allocations(instance) == {}
