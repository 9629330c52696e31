"""A compute of the model: the product's planner, tasks, claim keeper and queue taker.

These are the product's own classes. Guests, disk and threads are fake: a thread is a method here.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ecomp.agent.compute import note_ends, reserve_again
from ecomp.agent.host.claims import ClaimKeeper
from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.images.cache import FakeImages
from ecomp.agent.instance.instances import ControlPlane, Host, Instances, Shape
from ecomp.agent.instance.pool import Inline
from ecomp.agent.instance.records import republish
from ecomp.agent.planner import Planner
from ecomp.agent.queue import Offers, Puller, Taker
from ecomp.agent.turns import Complaints
from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.guest import DEFAULT_NETWORKS, Address, Guest, GuestSpec
from ecomp.model.planes import Digest
from ecomp.placement.allocations import Consumer
from ecomp.store.presence import SECONDS, Lease, Presence
from ecomp.virt.fake import FakeHypervisor
from tests.model.acting import Call
from tests.model.directory import Disk
from tests.model.etcd import Etcd, ModelStore
from tests.model.placement_client import ModelPlacement
from tests.model.virtual import NOW
from tests.model.world import World


class Guests(FakeHypervisor):
    """The product's fake hypervisor. An actor may be killed before each change."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        # Guests whose addresses libvirt cannot report.
        self.unheard: set[str] = set()
        # Guests that have run, and whose disk was created again afterwards.
        self.remade: set[str] = set()
        self._ran: set[str] = set()
        world.prints.append(lambda: (tuple(self.guests().items()), tuple(self.reservations().items())))

    def snapshot(self) -> Mapping[str, Guest]:
        """Return the guests: the same object until something changes."""
        return self._guests

    def create_disk(self, spec: GuestSpec) -> None:
        self._before('makes the disk', spec.instance)
        if spec.instance in self._ran:
            self.remade.add(spec.instance)
        super().create_disk(spec)

    def start(self, spec: GuestSpec) -> None:
        self._before('starts the domain', spec.instance)
        super().start(spec)
        self._ran.add(spec.instance)

    def destroy(self, instance: str, compute: str) -> None:
        self._before('destroys the domain', instance)
        super().destroy(instance, compute)

    def delete_disk(self, instance: str) -> None:
        self._before('deletes the disk', instance)
        super().delete_disk(instance)
        self._ran.discard(instance)

    def addresses(self, instance: str) -> Mapping[str, Address]:
        if instance in self.unheard:
            raise EcompError(f'libvirt: no addresses of {instance}')
        return super().addresses(instance)

    def lose_power(self, compute: str) -> None:
        for instance in self.guests():
            self.switch_off(instance, compute)

    def _before(self, what: str, instance: str) -> None:
        self._world.call(Call('libvirt', (what, instance), writes=True), lambda: None)


def answered(ask: Callable[[], Consumer]) -> Future[Consumer]:
    """Query placement immediately and return a completed future.

    A thread could not query earlier, so this is the oldest answer that the product may trust.
    """
    future: Future[Consumer] = Future()
    try:
        future.set_result(ask())
    except EcompError as error:
        future.set_exception(error)
    return future


class Kept(Lease):
    """The product's lease without a thread: each caller renews it."""

    def _begin(self) -> threading.Thread:
        return threading.Thread()


class Works(Inline):
    """A pool that runs each job in its caller, without the pipe that wakes a main thread."""

    def __init__(self, hypervisor: FakeHypervisor) -> None:
        self._hypervisor = hypervisor
        self._images = FakeImages()
        self._cancelled: set[str | None] = set()


class Compute:
    """One host. `is_dead`: it never comes back, and nothing waits for it."""

    def __init__(self, uuid: str, world: World, etcd: Etcd, placement: ModelPlacement, since: str = NOW) -> None:
        self.uuid, self.since = uuid, since
        self.world, self.etcd, self.placement = world, etcd, placement
        self.hypervisor = Guests(world)
        self.disk = Disk(world, uuid)
        self.disk.files['boot_id'] = 'first'
        self.is_dead = False
        self.now = NOW
        # True if it is started with --accept-new-etcd.
        self.republishes = False
        self.takes = True
        # True if it has found another process that uses its uuid.
        self.is_read_only = False
        # The number of tasks for which no thread can ever be started.
        self.threads_lacking = 0
        # etcd's revision when this compute first saw or accepted it.
        self.first_seen = self.etcd.revision
        self.process: object = None
        self.start()

    def start(self, republishes: bool = False) -> None:
        """Start a process that knows only what is on its host."""
        state = self.disk.at('state')
        self.store = ModelStore(self.etcd)
        identity = {'hostname': 'h', 'token': 'token of ' + self.uuid, 'since': self.since}
        value = {**identity, 'queues': True}
        self.lease = Kept(self.store, SECONDS)
        self.presence = Presence(self.store, keys.compute(self.uuid), value, self._is_somebody_else_s, self.lease)
        memory = Memory(state, self.uuid, lambda: self.now, self.disk.at('boot_id'))
        if republishes:
            self.first_seen = self.etcd.revision
            republish(self.uuid, self.store, self.placement, memory, set(self.hypervisor.guests()), self.now)
        note_ends(self.uuid, self.store, memory, set(self.hypervisor.guests()))
        reserve_again(self.hypervisor, memory)
        runner = Works(self.hypervisor)
        shape = Shape('qemu', True, DEFAULT_NETWORKS, 'h')
        self.guest_data = GuestData(state / 'metadata')
        control = ControlPlane(self.uuid, self.store, self.placement, lambda: self.now, answered)
        host = Host(self.hypervisor, runner, self.guest_data)
        self.instances = Instances(control, host, shape, memory)
        self.planner = Planner(self.instances, Complaints())
        self.keeper = ClaimKeeper(self.uuid, self.store, self.placement, self.takes)
        taker = Taker(control, lambda: self.presence.lease)
        self.offers = Offers(lambda _: None)
        guests = self.hypervisor.guests
        self.puller = Puller(taker, self.offers, lambda: not self.is_dead, None, self.first_seen, guests)
        self.offers.began_at = self.etcd.revision
        self.puller._rng = random.Random(self.uuid)
        self.memory, self.taker = memory, taker
        self.presence._publish()
        self.lease.join(self.presence)
        self.process = object()

    def restart(self) -> None:
        self.etcd.end(self.presence.lease)
        self.start(self.republishes)

    def look_after_presence(self) -> None:
        """Renew the lease, and write the presence key again if it was changed."""
        self.lease.round()

    def _is_somebody_else_s(self, _: str) -> None:
        self.is_read_only = True

    def plan(self, times: int = 1) -> int:
        """List, plan and run tasks `times` times; return the number of tasks."""
        return sum(self._plan() for _ in range(times))

    def _plan(self) -> int:
        if self.is_read_only:
            return 0
        state = self.store.snapshot(keys.request_prefix(self.uuid)).entries
        tasks = self.planner.step(state)
        for task in tasks:
            self.planner.begin(task)
        missing = min(self.threads_lacking, len(tasks))
        self.threads_lacking -= missing
        for task in tasks[:missing]:
            self.planner.hand_back(task, 'no thread')
        for task in tasks[missing:]:
            self.planner.carry_out(task)
        return len(tasks)

    def keep_claims(self) -> None:
        self.keeper.look(self.hypervisor.guests(), self.world.read_clock())

    def hear_hosts(self) -> bool:
        return self.puller.on_hosts(self.store.snapshot(keys.request_prefix(self.uuid)).entries)

    def hear_queues(self) -> bool:
        before = self.offers.backlog
        self.offers.on_queues(self.store.snapshot(keys.QUEUES).entries)
        backlog = self.offers.backlog
        assert backlog is not None
        return before is None or backlog.has_more or self.uuid in backlog.marks

    def hear_computes(self) -> None:
        state = self.store.snapshot(keys.COMPUTES).entries
        self.offers.on_computes(state)
        self.presence.on_computes(state)

    @property
    def knows_of_waiting(self) -> bool:
        return self.offers.backlog is not None and bool(self.offers.backlog.places)

    def pull(self) -> None:
        """Take the requests that fit and are due, and wait briefly for others to become due."""
        # The followed presence keys are always current here, so that following them needs no step of its own.
        self.offers.on_computes(
            {key: entry for key, entry in self.etcd.entries.items() if key.startswith(keys.COMPUTES)}
        )
        try:
            wake = self.puller.step()
            while self.puller._next_take and not self.is_dead:
                self.world.sleep(wake)
                wake = self.puller.step()
        except EcompError:
            self.puller.failed()
            raise

    def take(self, times: int = 1) -> None:
        """Read the queues, take the requests that fit, and build them."""
        for _ in range(times):
            self.do(self.hear_queues, self.hear_hosts, self.pull, self.plan)

    def digest(self) -> Digest:
        reserved = {
            mac: f'{reservation.instance} {reservation.address}'
            for mac, reservation in self.hypervisor.reservations().items()
        }
        isos = dict.fromkeys(self.hypervisor.seeds(), '')
        return Digest(self.hypervisor.guests(), {}, self.guest_data.all(), isos, reserved)

    def do(self, *work: Callable[[], Any]) -> list[EcompError]:
        """Run each function, and return the errors; the caller retries later."""
        errors = []
        for function in work:
            try:
                function()
            except EcompError as error:
                errors.append(error)
        return errors

    def rounds(self, number: int, *work: Callable[[], Any]) -> Callable[[], None]:
        """Return an actor's work that runs these functions `number` times."""

        def run() -> None:
            for _ in range(number):
                self.do(*work)

        return run

    def remembered(self) -> Mapping[str, object]:
        return self.memory.all()
