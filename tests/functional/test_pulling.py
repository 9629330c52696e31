"""Test step by step how a compute takes requests from queues, without its thread and clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ecomp.agent import queue as pulling
from ecomp.agent.instance.instances import ControlPlane
from ecomp.agent.queue import Offers, Puller, Taker
from ecomp.errors import NoCapacity
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.group import LARGEST, Group, Membership
from ecomp.model.group import to_json as group_to_json
from ecomp.model.queue import Backlog, Place, QueueEntry, mark_to_json, to_json
from ecomp.model.record import ERROR, Record, from_json
from ecomp.placement import allocations
from ecomp.scheduler.changing.change import destroy
from ecomp.store.client import Entry
from tests.functional.cloud import IMAGE, SMALL, Cloud, new

pytestmark = pytest.mark.fast

ROOM = {'VCPU': 2, 'MEMORY_MB': 512, 'DISK_GB': 10}
# The room of one small instance.
ONE = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}


class Compute:
    """A compute that takes from one flavor's queue when the test steps it."""

    def __init__(self, cloud: Cloud, flavor: Flavor, **totals: int) -> None:
        self.cloud = cloud
        self.flavor = flavor
        self.uuid = cloud.compute(**totals)
        lease = cloud.store.grant(60)
        control = ControlPlane(self.uuid, cloud.store, cloud.placement, lambda: '2026-11-21T09:00:00.000Z')
        self.taker = Taker(control, lambda: lease)
        self.offers = Offers(lambda _: None)
        self.puller = Puller(self.taker, self.offers, lambda: True, None, 0, set)

    def put(self, project: str = 'p', group: Membership | None = None) -> str:
        """Queue one more instance, as any client may have written it, and return its uuid."""
        waiting = QueueEntry(
            new(),
            self.flavor,
            image=IMAGE,
            group=group,
            user_id='u',
            project_id=project,
            stages={'requested': '2026-11-21T08:00:00.000Z'},
        )
        self.cloud.etcd.put(waiting.key, to_json(waiting))
        return waiting.instance

    def place(self, instance: str) -> Place:
        """Return the place of an instance in the queue."""
        assert self.offers.backlog is not None
        return self.offers.backlog.places[keys.queue(self.flavor.name, instance)]

    def hear(self) -> bool:
        """Process the current requests and queue entries, and return whether a step is due."""
        has_changed = self.puller.on_hosts(self.cloud.store.snapshot(keys.request_prefix(self.uuid)).entries)
        wake_ups: list[str] = []
        self.offers.add(self.uuid, wake_ups.append)
        self.offers.on_queues(self.cloud.store.snapshot(f'{keys.QUEUES}{self.flavor.name}/').entries)
        return has_changed or bool(wake_ups)

    def step(self) -> None:
        """Take what fits, and give way to other computes only for a moment."""
        wake = self.puller.step()
        while self.puller._next_take:
            threading.Event().wait(wake)
            wake = self.puller.step()

    def goes_on(self) -> None:
        """Step as if all back-offs had elapsed."""
        self.puller.delays.clear()
        self.hear()
        self.step()

    @property
    def holds(self) -> set[str]:
        return set(self.cloud.server.consumers(self.uuid))

    @property
    def waiting(self) -> set[str]:
        return {keys.in_queue(key) for key in self.cloud.etcd.keys(f'{keys.QUEUES}{self.flavor.name}/')}

    @property
    def taken(self) -> set[str]:
        return {keys.last(key) for key in self.cloud.etcd.keys(keys.request_prefix(self.uuid))}


# Claims of the compute's own dead attempt


def test_a_dead_attempt_s_claim_is_released_although_it_heard_of_other_things_first(
    cloud: Cloud, flavor: Flavor
) -> None:
    """Check a restarted compute that reads others' requests before its queues."""
    compute = Compute(cloud, flavor, **ONE)
    instance = compute.put()
    allocations.claim_once(cloud.placement, instance, {compute.uuid: SMALL}, 'u', 'p')
    other_request = keys.request(compute.uuid, new())
    cloud.etcd.put(other_request, '{}')
    assert compute.puller.on_hosts(cloud.store.snapshot(keys.request_prefix(compute.uuid)).entries)
    compute.step()
    cloud.etcd.delete(other_request)
    compute.hear()
    compute.step()
    assert (compute.taken, compute.waiting) == ({instance}, set())


def test_a_dead_attempt_s_claim_is_released_although_another_compute_was_at_it(cloud: Cloud, flavor: Flavor) -> None:
    compute = Compute(cloud, flavor, **ONE)
    instance = compute.put()
    allocations.claim_once(cloud.placement, instance, {compute.uuid: SMALL}, 'u', 'p')
    mark = keys.taker(keys.queue(flavor.name, instance))
    cloud.etcd.put(mark, mark_to_json(new()))
    compute.hear()
    compute.step()
    assert compute.holds == {instance}, 'it is the other one to move'
    cloud.etcd.delete(mark)
    assert compute.hear()
    compute.puller._look_at = 0.0  # a minute later
    compute.step()
    assert (compute.taken, compute.waiting) == ({instance}, set())


# Refusals by placement


def record(cloud: Cloud, instance: str) -> Record:
    value = cloud.etcd.record(instance)
    assert value is not None
    return from_json(value, instance)


def test_one_that_placement_refuses_ends_in_error_and_the_others_are_taken(cloud: Cloud, flavor: Flavor) -> None:
    """Check a project id that is too long for placement, which no eschedule would have queued."""
    compute = Compute(cloud, flavor)
    poison, good = compute.put('p' * 300), compute.put()
    compute.hear()
    compute.step()
    assert (compute.taken, compute.waiting) == ({good}, {poison}), 'it may be that placement lost its provider'
    compute.goes_on()
    assert compute.waiting == set()
    failed = record(cloud, poison)
    assert (failed.state, failed.compute, failed.project_id) == (ERROR, compute.uuid, 'p' * 300)
    assert failed.error is not None
    assert failed.error.stage == 'scheduled'
    assert 'placement refuses its claim' in failed.error.reason
    assert compute.holds == {good}
    # Its record is removed like that of any other failed instance.
    assert destroy(cloud.store, poison)
    assert cloud.etcd.record(poison) is None


def test_a_provider_that_placement_lost_is_no_request_s_fault(cloud: Cloud, flavor: Flavor) -> None:
    """Check that HTTP 400 for a missing provider keeps the request until the provider is back."""
    compute = Compute(cloud, flavor)
    compute.goes_on()
    instance = compute.put()
    compute.hear()
    for path in ('/inventories', ''):
        cloud.server.call('DELETE', f'/resource_providers/{compute.uuid}{path}')
    compute.puller._on_refusal(compute.place(instance), 'no such provider')
    compute.goes_on()
    assert compute.waiting == {instance}, 'it fits nowhere now'
    cloud.server.call('POST', '/resource_providers', {'uuid': compute.uuid, 'name': compute.uuid})
    room = {name: {'total': amount} for name, amount in ROOM.items()}
    inventories = {'resource_provider_generation': 0, 'inventories': room}
    cloud.server.call('PUT', f'/resource_providers/{compute.uuid}/inventories', inventories)
    compute.puller._look_at = 0.0  # a minute later
    compute.goes_on()
    assert (compute.taken, compute.waiting) == ({instance}, set())


def test_a_flavor_that_placement_had_no_room_for_is_tried_again_later(
    cloud: Cloud, flavor: Flavor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Compute(cloud, flavor)
    instance = compute.put()
    compute.hear()
    real, refusals = Taker.take, [NoCapacity('just now')]

    def take(taker: Taker, *words: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return real(taker, *words)

    monkeypatch.setattr(Taker, 'take', take)
    compute.step()
    compute.goes_on()
    assert compute.waiting == {instance}, 'nothing has changed since'
    # A minute later.
    compute.puller._refused = {query: (room, 0.0) for query, (room, _) in compute.puller._refused.items()}
    compute.goes_on()
    assert compute.taken == {instance}


@pytest.mark.parametrize(('takers', 'among'), [(1, [1, 1, 1]), (3, [1, 2, 3]), (1000, [1, 2, 4])])
def test_who_finds_that_others_were_faster_chooses_among_more_and_afresh_once_nothing_waits(
    cloud: Cloud, flavor: Flavor, monkeypatch: pytest.MonkeyPatch, takers: int, among: list[int]
) -> None:
    """Check that losers of a race do not all try the same next request.

    Otherwise a thousand computes would all wait for the oldest request, and choose again whenever one is taken.
    """
    compute = Compute(cloud, flavor, VCPU=8, MEMORY_MB=1024, DISK_GB=10)
    chosen: list[tuple[int, Place]] = []
    real = pulling.queue.next_of

    def next_of(places: Any, takes: Any, passed_over: Any, among: int, rng: Any) -> Place | None:
        choice: Place | None = real(places, takes, passed_over, among, rng)
        chosen.extend([(among, choice)] if choice is not None else [])
        return choice

    monkeypatch.setattr(pulling.queue, 'next_of', next_of)
    for _ in range(2):
        for _ in range(3):
            compute.put()
        # Requests that wait when a queue is first read are open to all computes.
        compute.offers = compute.puller.offers = Offers(lambda _: None)
        alive = (Entry(keys.compute(uuid), b'{"queues": true}', 1, 1) for uuid in (new() for _ in range(takers)))
        compute.offers.on_computes({entry.key: entry for entry in alive})
        compute.hear()
        for _ in range(3):
            assert compute.puller.step() < 3
            assert compute.puller._next_take
            cloud.etcd.delete(chosen[-1][1].waiting.key)  # another compute takes it first
            compute.hear()
        compute.step()
        assert compute.holds == set()
    assert [candidate_count for candidate_count, _ in chosen] == among * 2


# Groups


@pytest.fixture
def grouped(cloud: Cloud) -> Iterator[Callable[[str, str], str]]:
    """Provide a function that makes a strict group with a member on a compute.

    The function returns the group's name.
    """
    names: list[str] = []

    def make(policy: str, compute: str) -> str:
        name = f'g{new()[:8]}'
        cloud.etcd.put(keys.group(name), group_to_json(Group(name, policy, True, {new(): compute})))
        names.append(name)
        return name

    yield make
    for name in names:
        cloud.etcd.delete(keys.group(name))


def test_groups_that_allow_nothing_here_are_read_together_and_ever_more_seldom(
    cloud: Cloud, flavor: Flavor, grouped: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the load: a thousand idle computes once read forty groups each, every five seconds."""
    compute = Compute(cloud, flavor, VCPU=8, MEMORY_MB=1024, DISK_GB=10)
    groups = [grouped('affinity', new()) for _ in range(20)]
    instances = [compute.put(group=Membership(name, 'affinity', True)) for name in groups]
    read: list[str] = []
    get, read_many = cloud.store.get, cloud.store.read
    monkeypatch.setattr(cloud.store, 'get', lambda key: (read.append(key), get(key))[1])
    monkeypatch.setattr(cloud.store, 'read', lambda wanted: (read.append('several'), read_many(wanted))[1])
    compute.hear()
    pauses = []
    for _ in range(5):
        read.clear()
        began = time.monotonic()
        compute.puller.step()
        assert len(read) == 2, read
        deferred = compute.puller.delays.put_off_now(began)
        assert deferred.keys() == set(instances)
        pauses.append(min(deferred.values()) - began)
        compute.puller.delays.clear()  # the pause has elapsed
    for pause, longest in zip(pauses, (5, 10, 20, 30, 30), strict=True):
        assert 0.8 * longest <= pause <= longest + 1
    # A group whose member is gone admits its instance at the next step; the others keep waiting.
    cloud.etcd.delete(keys.group(groups[7]))
    compute.goes_on()
    assert compute.taken == {instances[7]}


def test_one_whose_group_is_full_is_left_alone(cloud: Cloud, flavor: Flavor) -> None:
    compute, members = Compute(cloud, flavor), [new() for _ in range(LARGEST)]
    name = f'g{new()}'
    cloud.etcd.put(keys.group(name), group_to_json(Group(name, 'affinity', True, dict.fromkeys(members, compute.uuid))))
    instance = compute.put(group=Membership(name, 'affinity', True))
    compute.hear()
    before = cloud.store.snapshot('/').revision
    compute.step()
    assert cloud.store.snapshot('/').revision == before
    assert compute.waiting == {instance}
    # An instance that is already a member is taken like any other.
    joined = Group(name, 'affinity', True, {**dict.fromkeys(members[1:], compute.uuid), instance: ''})
    cloud.etcd.put(keys.group(name), group_to_json(joined))
    compute.goes_on()
    assert compute.taken == {instance}
    cloud.etcd.delete(keys.group(name))


def test_one_whose_group_is_another_by_now_is_left_alone(
    cloud: Cloud, flavor: Flavor, grouped: Callable[[str, str], str]
) -> None:
    """Check that it is not marked, claimed and released twice a second, with a note each time."""
    compute = Compute(cloud, flavor)
    name = grouped('affinity', compute.uuid)
    instance = compute.put(group=Membership(name, 'anti-affinity', True))
    compute.hear()
    before = cloud.store.snapshot('/').revision
    compute.step()
    assert cloud.store.snapshot('/').revision == before
    assert compute.waiting == {instance}
    cloud.etcd.delete(keys.group(name))
    compute.goes_on()
    assert compute.taken == {instance}
    cloud.etcd.delete(keys.group(name))


def test_one_that_another_compute_claimed_is_marked_once_and_then_only_looked_at(
    cloud: Cloud, flavor: Flavor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check rule 13: the claim's compute may run the instance. Each mark would cost two writes."""
    compute, other = Compute(cloud, flavor), cloud.compute()
    instance, claim = compute.put(), compute.taker._claim

    def claim_after_reading_the_mark(waiting: QueueEntry, mark: int) -> None:
        compute.hear()
        claim(waiting, mark)

    monkeypatch.setattr(compute.taker, '_claim', claim_after_reading_the_mark)
    allocations.claim_once(cloud.placement, instance, {other: SMALL}, 'u', 'p')
    compute.hear()
    compute.goes_on()
    before = cloud.store.snapshot('/').revision
    for _ in range(3):
        compute.goes_on()
    assert cloud.store.snapshot('/').revision == before
    assert compute.waiting == {instance}
    assert cloud.server.allocations(instance) == {other: SMALL}
    assert allocations.release_once(cloud.placement, instance, allocations.consumer(cloud.placement, instance))
    compute.goes_on()
    assert compute.taken == {instance}


def test_the_claim_of_a_guest_that_is_here_is_not_released(cloud: Cloud, flavor: Flavor) -> None:
    """Check a compute that lost its state directory while a restored queue names its own guest."""
    compute = Compute(cloud, flavor)
    instance = compute.put()
    allocations.claim_once(cloud.placement, instance, {compute.uuid: SMALL}, 'u', 'p')
    compute.hear()
    compute.puller.guests = lambda: {instance}
    compute.puller._look(compute.offers.backlog or Backlog())
    assert cloud.server.allocations(instance) == {compute.uuid: SMALL}
    compute.puller.guests = set
    compute.puller._tidy = True
    compute.puller._look(compute.offers.backlog or Backlog())
    assert cloud.server.allocations(instance) == {}
