"""A small cloud in a world, with the methods that set a scene and add its actors."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ecomp.errors import UnknownOutcome, Unreachable
from ecomp.model import keys
from ecomp.model.allocation import find_compute
from ecomp.model.audit import HostReport, encode_report
from ecomp.model.choose import Offer
from ecomp.model.flavor import parse_flavor
from ecomp.model.group import Group, Membership
from ecomp.model.order import NameOwner, PowerAction, Request, SetOrder
from ecomp.model.queue import QueueEntry, WaitingEntry
from ecomp.model.quota import Quota, sum_charges
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.changes.change import change_power, destroy
from ecomp.scheduler.placing.claim import DeliveryOutcome, abandon, announce
from ecomp.scheduler.placing.create import create
from ecomp.scheduler.placing.enqueue import enqueue
from ecomp.scheduler.placing.session import Scheduler
from ecomp.store.client import Delete, Put
from tests.kit.memory_etcd import Etcd
from tests.kit.memory_placement import PlacementModel, Provider
from tests.model.acting import EXPIRY, MINUTE, Actor, Event
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.invariants import RULES, Invariants
from tests.model.placement_client import ModelPlacement
from tests.model.virtual import NOW
from tests.model.world import World

if TYPE_CHECKING:
    from tests.model.compute import Compute


def answer_audits(world: World, etcd: Etcd, computes: Mapping[str, Compute]) -> None:
    """Have each living compute look at itself, in the step that asks for it."""

    def answer(operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            if not isinstance(operation, Put) or not operation.key.startswith(keys.AUDIT):
                continue
            repairs_on = operation.key.removeprefix(keys.AUDIT).partition('/')[2]
            actor, world.current = world.current, None
            question = etcd.revision
            for each, compute in computes.items():
                if not compute.is_dead and not compute.is_looking and keys.compute(each) in etcd.entries:
                    if repairs_on == each:
                        compute.claim_again()
                    report = encode_report(HostReport(tuple(compute.look()), question))
                    etcd.commit([], [Put(keys.findings(each), report, compute.presence.lease)])
            world.current = actor

    etcd.listeners.append(answer)


QUERY = 'resources=VCPU:1,MEMORY_MB:1,DISK_GB:1'
LARGER_QUERY = 'resources=VCPU:2,MEMORY_MB:1,DISK_GB:1'
SIZE = {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}
IMAGE = 'http://x/i'
FLAVOR = 'small'
ATTEMPT_OWNER = {'host': 'h', 'pid': 1}
ANTI_AFFINITY = Membership('g', 'anti-affinity', True)
AFFINITY = Membership('g', 'affinity', True)


def make_numbered_uuid(number: int) -> str:
    return str(uuid.UUID(int=number << 100, version=4))


A = make_numbered_uuid(1)
B = make_numbered_uuid(2)
C = make_numbered_uuid(6)
U = make_numbered_uuid(3)
V = make_numbered_uuid(4)
W = make_numbered_uuid(5)
S = make_numbered_uuid(9)
NAMES = {A: 'A', B: 'B', C: 'C', U: 'U', V: 'V', W: 'W', S: 'S'} | {
    str(uuid.uuid5(uuid.UUID(S), str(number))): f'S{number}' for number in (1, 2, 3)
}


@dataclass
class Command:
    actor: Actor
    order: SetOrder
    resume: bool


class Cloud:
    def __init__(self, world: World) -> None:
        self.world = world
        world.names |= NAMES
        self.etcd = Etcd(world)
        self.model = PlacementModel(world)
        self.store = ModelStore(self.etcd)
        self.placement = ModelPlacement(self.model, world)
        self.computes: dict[str, Compute] = {}
        # All hosts that run domains, including a copy of a compute.
        self.machines: list[Compute] = []
        self.commands: list[Command] = []
        # True if there is room for everything that is requested, so that no refusal is expected.
        self.has_ample_room = True
        # True if the scene begins with an inconsistency that only an operator repairs.
        self.starts_inconsistent = False
        # True if only an operator can end it, who knows more than the planes: then only the scenario's check counts.
        self.ends_inconsistent = False
        # True if computes, too, may be frozen for longer than their leases.
        self.may_freeze_computes = False
        # True if all quotas are set before anything is delivered.
        self.has_quota_from_start = True
        self.allowed_to_fail: set[str] = set()
        answer_audits(world, self.etcd, self.computes)
        self.invariants = Invariants(self)
        world.invariants.append(self.invariants.check)
        world.events.append(self._list_expiries)
        world.events.append(self._list_minutes)

    def exempt(self, rule: str, reason: str) -> None:
        """Do not check a rule of tests/model/invariants.py that this scenario breaks itself."""
        assert rule in RULES, rule
        self.invariants.exempt[rule] = reason

    # Setting the scene

    def add_host(self, uuid: str, room: int = 4) -> Compute:
        defaults = {'reserved': 0, 'min_unit': 1, 'max_unit': 99, 'step_size': 1, 'allocation_ratio': 1.0}
        sizes = {'VCPU': room, 'MEMORY_MB': 9, 'DISK_GB': 9}
        inventories = {name: {'total': total, **defaults} for name, total in sizes.items()}
        self.model.providers[uuid] = Provider(uuid, 1, inventories)
        compute = self.computes[uuid] = Compute(uuid, self.world, self.etcd, self.placement)
        compute.room = room
        self.machines.append(compute)
        return compute

    def add_hosts(self, *uuids: str, room: int = 4) -> list[Compute]:
        return [self.add_host(compute, room) for compute in uuids]

    def publish_facts(self, compute: str, room: object) -> None:
        """Publish the room of a compute, whether it is correct or not."""
        presence = self.computes[compute].presence
        presence.publish(keys.facts(compute), json.dumps({'version': 1, 'room': room}))
        presence.ensure_published()

    def claim(self, instance: str, compute: str) -> None:
        allocations.replace_allocations(self.placement, instance, {compute: SIZE}, 'u', 'p')

    def set_instance_limit(self, instances: int) -> None:
        self.store.commit([], [Put(keys.quota('p'), encode(Quota('p', {'instances': instances}, {})))])

    def deliver(self, instance: str, compute: str, name: str | None = None, group: Membership | None = None) -> None:
        """Write a request that its compute has not seen yet, with all keys of a delivery."""
        self.claim(instance, compute)
        stages = {'requested': NOW, 'scheduled': NOW}
        request = Request(
            instance,
            {compute: SIZE},
            image=IMAGE,
            user_id='u',
            project_id='p',
            query=QUERY,
            stages=stages,
            name=name,
            group=group,
        )
        puts = [Put(keys.request(compute, instance), encode(request))]
        if name:
            puts.append(Put(keys.name(name), encode(NameOwner(instance))))
        if group:
            with_member = Group(group.name, group.policy or '', bool(group.strict), {instance: compute})
            puts.append(Put(keys.group(group.name), encode(with_member)))
        entry = self.etcd.entries.get(keys.quota('p'))
        if entry is not None:
            limits = json.loads(entry.value)['limits']
            puts.append(Put(keys.quota('p'), encode(Quota('p', limits, sum_charges('p', [request], lambda _: None)))))
        self.store.commit([], puts)

    def set_flavor(self) -> int:
        written = self.store.commit([], [Put(keys.flavor(FLAVOR), encode(parse_flavor(FLAVOR, QUERY)))])
        assert written
        return written

    def enqueue_request(
        self, instance: str, name: str | None = None, group: Membership | None = None, project: str = 'p'
    ) -> WaitingEntry:
        flavor = self.set_flavor()
        queue_entry = self.make_queue_entry(instance, name, group, project)
        enqueue(self.store, queue_entry, flavor, None, ATTEMPT_OWNER, resume=False)
        return WaitingEntry(self.etcd.entries[queue_entry.key].revision, queue_entry)

    def make_queue_entry(
        self, instance: str, name: str | None = None, group: Membership | None = None, project: str = 'p'
    ) -> QueueEntry:
        flavor = parse_flavor(FLAVOR, QUERY)
        return QueueEntry(
            instance,
            flavor,
            image=IMAGE,
            user_id='u',
            project_id=project,
            stages={'requested': NOW},
            name=name,
            group=group,
        )

    # Actors

    def add_actor(self, name: str, work: Callable[[], object], mortal: bool = True, **fields: Any) -> Actor:
        return self.world.add_actor(name, work, mortal, **fields)

    def add_compute_actor(self, compute: str, activity: str, work: Callable[[], object]) -> Actor:
        name = f'{NAMES[compute]}, {activity}' if activity else NAMES[compute]
        return self.add_actor(name, work, process=self.computes[compute].process)

    def add_create(
        self, actor_name: str, instance: str, resume: bool = False, seed: int = 1, **overrides: Any
    ) -> Actor:
        queries_first, large = overrides.pop('asks_first', False), overrides.pop('large', None)
        defaults = {'query': QUERY, 'image': IMAGE, 'user_id': 'u', 'project_id': 'p', 'stages': {'requested': NOW}}
        order = SetOrder(instance, **(defaults | overrides))
        work = partial(self.create, order, resume, seed, queries_first, large)
        actor = self.add_actor(actor_name, work, command='create', subjects=tuple(order.instances))
        self.commands.append(Command(actor, order, resume))
        return actor

    def add_two_creates(self, instance: str) -> None:
        for number in (1, 2):
            self.add_create(f'eschedule {number}', instance, resume=True, seed=number)

    def create(
        self, order: SetOrder, resume: bool, seed: int = 1, asks_first: bool = False, large: int | None = None
    ) -> dict[str, DeliveryOutcome]:
        """Create instances as eschedule does.

        With `asks_first` an actor of its own queries placement before anything else.
        With more than `large` computes a sample of them is queried first.
        """
        store = ModelStore(self.etcd)
        backend: Future[tuple[Placement, Offer]] = Future()
        if large is None:
            backend = cast('Future[tuple[Placement, Offer]]', OfferFuture(self, order.query, asks_first))
        else:
            backend.set_result((cast(Placement, self.placement), Offer(())))
        scheduler = Scheduler(store, backend.result, ATTEMPT_OWNER, random.Random(seed), lambda: NOW)
        return create(scheduler, order, resume, large)

    def add_abandon(self, name: str, instance: str, request: str) -> Actor:
        return self.add_actor(name, lambda: abandon(ModelStore(self.etcd), self.placement, [instance], request, -1))

    def add_destroy(self, name: str, instance: str) -> Actor:
        def claimed_on(instance: str) -> str:
            return find_compute(allocations.read_consumer(self.placement, instance).allocations)

        def work() -> str:
            return destroy(ModelStore(self.etcd), instance, find_claiming_compute=claimed_on)

        return self.add_actor(name, work, command='destroy', subjects=(instance,))

    def add_power(self, name: str, instance: str, action: str) -> Actor:
        order = PowerAction(action, make_numbered_uuid(77 + len(self.world.actors)))
        work = partial(change_power, ModelStore(self.etcd), instance, order)
        return self.add_actor(name, work, command='power', subjects=(instance,), power=order.id)

    def add_enqueue(self, name: str, instance: str, resume: bool = False) -> Actor:
        flavor, queue_entry = self.set_flavor(), self.make_queue_entry(instance)
        work = partial(enqueue, ModelStore(self.etcd), queue_entry, flavor, None, ATTEMPT_OWNER, resume)
        return self.add_actor(name, work, command='queue', subjects=(instance,))

    def add_take(self, compute: str, place: WaitingEntry) -> Actor:
        host = self.computes[compute]
        return self.add_compute_actor(compute, 'taking', lambda: host.taker.take(place))

    def announce_attempt(self, instance: str) -> int:
        lease = self.store.grant(60)
        return announce(self.store, lease, instance, {'version': 1, 'instances': [instance], **ATTEMPT_OWNER}, True)

    # Events

    def _list_expiries(self) -> list[Event]:
        bounds = self.world.bounds
        if not bounds.expiries:
            return []
        leases = sorted({entry.lease for entry in self.etcd.entries.values() if entry.lease})
        if not self.may_freeze_computes:
            leases = [lease for lease in leases if all(host.presence.lease != lease for host in self.computes.values())]
        return [
            (
                f'the lease of {self._find_lease_owner(lease)} ends',
                EXPIRY,
                lambda lease=lease: self.etcd.end_lease(lease),
            )  # type: ignore[misc]
            for lease in leases
        ]

    def _list_minutes(self) -> list[Event]:
        return [('a minute passes', MINUTE, self._pass_minute)] if self.world.bounds.minutes else []

    def _pass_minute(self) -> None:
        self.world.clock += 61.0

    def _find_lease_owner(self, lease: int) -> str:
        for compute in self.computes.values():
            if compute.presence.lease == lease:
                return f'compute {NAMES[compute.uuid]}'
        return f'{self.etcd.leases[lease].owner} ({lease})'

    @property
    def is_unharmed(self) -> bool:
        return not any(step.fate for step in self.world.steps)

    def find_unknown_outcomes(self) -> list[Command]:
        """Return the commands to repeat with --uuid: killed ones, and those with exit code 7."""
        return [
            replace(command, resume=True)
            for command in self.commands
            if command.actor.dead or isinstance(command.actor.outcome, Unreachable | UnknownOutcome)
        ]

    def collect_placements(self) -> Mapping[str, str]:
        """Return the placements that users were told: {instance: compute}."""
        placements: dict[str, str] = {}
        for actor in self.world.actors:
            if actor.command in ('create', 'apply') and isinstance(actor.outcome, dict):
                placements |= {instance: delivery.compute for instance, delivery in actor.outcome.items()}
        return placements


class OfferFuture:
    def __init__(self, cloud: Cloud, query: str, starts_immediately: bool) -> None:
        self._cloud, self._query = cloud, query
        self._asker: Actor | None = None
        self._answer: tuple[Placement, Offer] | None = None
        if starts_immediately:
            parent = cloud.world.current
            name = f'the thread of {parent.name}' if parent is not None else 'a thread'
            self._asker = cloud.add_actor(
                name, lambda: allocations.read_candidates(cloud.placement, query), mortal=False
            )

    def result(self) -> tuple[Placement, Offer]:
        asker = self._asker
        if self._answer is not None:
            return self._answer
        if asker is None:
            self._answer = self._cloud.placement, allocations.read_candidates(self._cloud.placement, self._query)
            return self._answer
        self._cloud.world.wait('what placement offers', lambda: asker.done)
        if isinstance(asker.outcome, BaseException):
            raise asker.outcome
        return self._cloud.placement, cast(Offer, asker.outcome)
