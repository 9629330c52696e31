"""What a compute takes from the queues, step by step, on real etcd and placement: without its thread, or its clock."""

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
ONE = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}
"""A compute with room for one small guest."""


class Compute:
    """One that takes from one flavor's queue, when it is told to."""

    def __init__(self, cloud: Cloud, flavor: Flavor, **totals: int) -> None:
        self.cloud, self.flavor = cloud, flavor
        self.uuid = cloud.compute(**totals)
        lease = cloud.store.grant(60)
        control = ControlPlane(self.uuid, cloud.store, cloud.placement, lambda: '2026-11-21T09:00:00.000Z')
        self.taker = Taker(control, lambda: lease)
        self.offers = Offers(lambda _: None)
        self.puller = Puller(self.taker, self.offers, lambda: True, None, 0, set)

    def put(self, project: str = 'p', group: Membership | None = None) -> str:
        """One more waits, as any client may have put it; the instance."""
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
        """Where it waits."""
        assert self.offers.backlog is not None
        return self.offers.backlog.places[keys.queue(self.flavor.name, instance)]

    def hear(self) -> bool:
        """As its followers would say it: what is asked of it, and what waits. Whether it is worth a step."""
        told = self.puller.on_hosts(self.cloud.store.snapshot(keys.request_prefix(self.uuid)).entries)
        nudged: list[str] = []
        self.offers.add(self.uuid, nudged.append)
        self.offers.on_queues(self.cloud.store.snapshot(f'{keys.QUEUES}{self.flavor.name}/').entries)
        return told or bool(nudged)

    def step(self) -> None:
        """Take what fits, without letting others go first for more than a moment."""
        wake = self.puller.step()
        while self.puller._next_take:
            threading.Event().wait(wake)
            wake = self.puller.step()

    def goes_on(self) -> None:
        """So much later that nothing it has been at is passed over."""
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


# What a dead attempt of its own holds


def test_a_dead_attempt_s_claim_is_released_although_it_heard_of_other_things_first(
    cloud: Cloud, flavor: Flavor
) -> None:
    """Killed with its claim and started again, with other instances here, before its queues are listed."""
    one = Compute(cloud, flavor, **ONE)
    instance = one.put()
    allocations.claim_once(cloud.placement, instance, {one.uuid: SMALL}, 'u', 'p')
    other = keys.request(one.uuid, new())
    cloud.etcd.put(other, '{}')
    assert one.puller.on_hosts(cloud.store.snapshot(keys.request_prefix(one.uuid)).entries)
    one.step()
    cloud.etcd.delete(other)
    one.hear()
    one.step()
    assert (one.taken, one.waiting) == ({instance}, set())


def test_a_dead_attempt_s_claim_is_released_although_another_compute_was_at_it(cloud: Cloud, flavor: Flavor) -> None:
    """That one gave it back before it claimed anything."""
    one = Compute(cloud, flavor, **ONE)
    instance = one.put()
    allocations.claim_once(cloud.placement, instance, {one.uuid: SMALL}, 'u', 'p')
    mark = keys.taker(keys.queue(flavor.name, instance))
    cloud.etcd.put(mark, mark_to_json(new()))
    one.hear()
    one.step()
    assert one.holds == {instance}, 'it is the other one to move'
    cloud.etcd.delete(mark)
    assert one.hear()
    one.puller._look_at = 0.0  # a minute later
    one.step()
    assert (one.taken, one.waiting) == ({instance}, set())


# What placement refuses


def record(cloud: Cloud, instance: str) -> Record:
    value = cloud.etcd.record(instance)
    assert value is not None
    return from_json(value, instance)


def test_one_that_placement_refuses_ends_in_error_and_the_others_are_taken(cloud: Cloud, flavor: Flavor) -> None:
    """Its project's id is too long for placement: no eschedule of ours has put it there."""
    one = Compute(cloud, flavor)
    poison, good = one.put('p' * 300), one.put()
    one.hear()
    one.step()
    assert (one.taken, one.waiting) == ({good}, {poison}), 'it may be that placement lost its provider'
    one.goes_on()
    assert one.waiting == set()
    found = record(cloud, poison)
    assert (found.state, found.compute, found.project_id) == (ERROR, one.uuid, 'p' * 300)
    assert found.error is not None
    assert found.error.stage == 'scheduled'
    assert 'placement refuses its claim' in found.error.reason
    assert one.holds == {good}
    # And its record goes as that of any other that failed.
    assert destroy(cloud.store, poison)
    assert cloud.etcd.record(poison) is None


def test_a_provider_that_placement_lost_is_no_request_s_fault(cloud: Cloud, flavor: Flavor) -> None:
    """It answers 400 to that as well; it has the same room when it is back."""
    one = Compute(cloud, flavor)
    one.goes_on()
    instance = one.put()
    one.hear()
    for path in ('/inventories', ''):
        cloud.server.call('DELETE', f'/resource_providers/{one.uuid}{path}')
    one.puller._on_refusal(one.place(instance), 'no such provider')
    one.goes_on()
    assert one.waiting == {instance}, 'it fits nowhere now'
    cloud.server.call('POST', '/resource_providers', {'uuid': one.uuid, 'name': one.uuid})
    room = {name: {'total': amount} for name, amount in ROOM.items()}
    inventories = {'resource_provider_generation': 0, 'inventories': room}
    cloud.server.call('PUT', f'/resource_providers/{one.uuid}/inventories', inventories)
    one.puller._look_at = 0.0  # a minute later
    one.goes_on()
    assert (one.taken, one.waiting) == ({instance}, set())


def test_a_flavor_that_placement_had_no_room_for_is_tried_again_later(
    cloud: Cloud, flavor: Flavor, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Compute(cloud, flavor)
    instance = one.put()
    one.hear()
    real, refusals = Taker.take, [NoCapacity('just now')]

    def take(taker: Taker, *words: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return real(taker, *words)

    monkeypatch.setattr(Taker, 'take', take)
    one.step()
    one.goes_on()
    assert one.waiting == {instance}, 'nothing has changed since'
    one.puller._refused = {query: (room, 0.0) for query, (room, _) in one.puller._refused.items()}  # a minute later
    one.goes_on()
    assert one.taken == {instance}


@pytest.mark.parametrize(('takers', 'among'), [(1, [1, 1, 1]), (3, [1, 2, 3]), (1000, [1, 2, 4])])
def test_who_finds_that_others_were_faster_chooses_among_more_and_afresh_once_nothing_waits(
    cloud: Cloud, flavor: Flavor, monkeypatch: pytest.MonkeyPatch, takers: int, among: list[int]
) -> None:
    """Of a thousand that all wait for the oldest one, each that is taken would have all of them choose anew."""
    one = Compute(cloud, flavor, VCPU=8, MEMORY_MB=1024, DISK_GB=10)
    chosen: list[tuple[int, Place]] = []
    real = pulling.queue.next_of

    def next_of(places: Any, takes: Any, passed_over: Any, among: int, rng: Any) -> Place | None:
        found: Place | None = real(places, takes, passed_over, among, rng)
        chosen.extend([(among, found)] if found is not None else [])
        return found

    monkeypatch.setattr(pulling.queue, 'next_of', next_of)
    for _ in range(2):
        for _ in range(3):
            one.put()
        one.offers = one.puller.offers = Offers(lambda _: None)  # what waits when a queue is first read is everybody's
        alive = (Entry(keys.compute(each), b'{"queues": true}', 1, 1) for each in (new() for _ in range(takers)))
        one.offers.on_computes({each.key: each for each in alive})
        one.hear()
        for _ in range(3):
            assert one.puller.step() < 3
            assert one.puller._next_take
            cloud.etcd.delete(chosen[-1][1].waiting.key)  # another one takes it first
            one.hear()
        one.step()
        assert one.holds == set()
    assert [each for each, _ in chosen] == among * 2


# Groups


@pytest.fixture
def grouped(cloud: Cloud) -> Iterator[Callable[[str, str], str]]:
    """Make a strict group of this policy with a member on this compute; its name."""
    made: list[str] = []

    def make(policy: str, compute: str) -> str:
        name = f'g{new()[:8]}'
        cloud.etcd.put(keys.group(name), group_to_json(Group(name, policy, True, {new(): compute})))
        made.append(name)
        return name

    yield make
    for name in made:
        cloud.etcd.delete(keys.group(name))


def test_groups_that_allow_nothing_here_are_read_together_and_ever_more_seldom(
    cloud: Cloud, flavor: Flavor, grouped: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand idle computes read forty groups each, one by one, every five seconds."""
    one = Compute(cloud, flavor, VCPU=8, MEMORY_MB=1024, DISK_GB=10)
    groups = [grouped('affinity', new()) for _ in range(20)]
    instances = [one.put(group=Membership(each, 'affinity', True)) for each in groups]
    read: list[str] = []
    get, several = cloud.store.get, cloud.store.read
    monkeypatch.setattr(cloud.store, 'get', lambda key: (read.append(key), get(key))[1])
    monkeypatch.setattr(cloud.store, 'read', lambda wanted: (read.append('several'), several(wanted))[1])
    one.hear()
    pauses = []
    for _ in range(5):
        read.clear()
        began = time.monotonic()
        one.puller.step()
        assert len(read) == 2, read
        left = one.puller.delays.put_off_now(began)
        assert left.keys() == set(instances)
        pauses.append(min(left.values()) - began)
        one.puller.delays.clear()  # a pause later
    for pause, most in zip(pauses, (5, 10, 20, 30, 30), strict=True):
        assert 0.8 * most <= pause <= most + 1
    # The first group whose member has gone lets it in at the next look, and the others wait on.
    cloud.etcd.delete(keys.group(groups[7]))
    one.goes_on()
    assert one.taken == {instances[7]}


def test_one_whose_group_is_full_is_left_alone(cloud: Cloud, flavor: Flavor) -> None:
    one, members = Compute(cloud, flavor), [new() for _ in range(LARGEST)]
    name = f'g{new()}'
    cloud.etcd.put(keys.group(name), group_to_json(Group(name, 'affinity', True, dict.fromkeys(members, one.uuid))))
    instance = one.put(group=Membership(name, 'affinity', True))
    one.hear()
    before = cloud.store.snapshot('/').revision
    one.step()
    assert cloud.store.snapshot('/').revision == before
    assert one.waiting == {instance}
    # One that the group has already waits as any other does.
    joined = Group(name, 'affinity', True, {**dict.fromkeys(members[1:], one.uuid), instance: ''})
    cloud.etcd.put(keys.group(name), group_to_json(joined))
    one.goes_on()
    assert one.taken == {instance}
    cloud.etcd.delete(keys.group(name))


def test_one_whose_group_is_another_by_now_is_left_alone(
    cloud: Cloud, flavor: Flavor, grouped: Callable[[str, str], str]
) -> None:
    """It was marked, claimed and given back twice a second, with a note of an hour each time."""
    one = Compute(cloud, flavor)
    name = grouped('affinity', one.uuid)
    instance = one.put(group=Membership(name, 'anti-affinity', True))
    one.hear()
    before = cloud.store.snapshot('/').revision
    one.step()
    assert cloud.store.snapshot('/').revision == before
    assert one.waiting == {instance}
    cloud.etcd.delete(keys.group(name))
    one.goes_on()
    assert one.taken == {instance}
    cloud.etcd.delete(keys.group(name))


def test_one_that_another_compute_claimed_is_marked_once_and_then_only_looked_at(
    cloud: Cloud, flavor: Flavor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 13: whoever claimed it may run it. A mark for each look would be two writes each, of each compute."""
    one, other = Compute(cloud, flavor), cloud.compute()
    instance, claim = one.put(), one.taker._claim

    def claim_once_the_mark_was_heard_of(waiting: QueueEntry, mark: int) -> None:
        one.hear()
        claim(waiting, mark)

    monkeypatch.setattr(one.taker, '_claim', claim_once_the_mark_was_heard_of)
    allocations.claim_once(cloud.placement, instance, {other: SMALL}, 'u', 'p')
    one.hear()
    one.goes_on()
    before = cloud.store.snapshot('/').revision
    for _ in range(3):
        one.goes_on()
    assert cloud.store.snapshot('/').revision == before
    assert one.waiting == {instance}
    assert cloud.server.allocations(instance) == {other: SMALL}
    assert allocations.release_once(cloud.placement, instance, allocations.consumer(cloud.placement, instance))
    one.goes_on()
    assert one.taken == {instance}


def test_the_claim_of_a_guest_that_is_here_is_not_released(cloud: Cloud, flavor: Flavor) -> None:
    """A compute that lost its state directory finds its own guest's claim for what a restored queue has waiting."""
    one = Compute(cloud, flavor)
    instance = one.put()
    allocations.claim_once(cloud.placement, instance, {one.uuid: SMALL}, 'u', 'p')
    one.hear()
    one.puller.guests = lambda: {instance}
    one.puller._look(one.offers.backlog or Backlog())
    assert cloud.server.allocations(instance) == {one.uuid: SMALL}
    one.puller.guests = set
    one.puller._tidy = True
    one.puller._look(one.offers.backlog or Backlog())
    assert cloud.server.allocations(instance) == {}
