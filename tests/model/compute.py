"""A compute of the model: the product's planner, tasks, claim keeper and queue taker.

Guests, disk and threads are fake: a thread is a method here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ecomp.agent.compute import record_missed_ends
from ecomp.agent.host.claims import ClaimKeeper
from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.host.upkeep import Upkeep, restore_reservations
from ecomp.agent.images.cache import FakeImages
from ecomp.agent.instance.instances import ControlPlane, GuestTemplate, HostServices, Instances
from ecomp.agent.instance.pool import InlineRunner
from ecomp.agent.instance.records import republish
from ecomp.agent.jobs import FailureLog
from ecomp.agent.planner import Planner
from ecomp.agent.queue import Queues, Taker
from ecomp.errors import EcompError, NotFound
from ecomp.model import keys
from ecomp.model.audit import find_all
from ecomp.model.finding import Finding, Repair
from ecomp.model.foreign import ForeignGuest
from ecomp.model.guest import DEFAULT_NETWORKS, Address, Guest, GuestSpec
from ecomp.model.record import from_json
from ecomp.model.states import ACTIVE, STOPPED
from ecomp.placement.allocations import Consumer, read_provider_allocations
from ecomp.shared.presence import Presence
from ecomp.store.client import Delete, Entry, Put
from ecomp.virt.fake import FakeHypervisor
from tests.kit.memory_etcd import Etcd
from tests.model.acting import Call
from tests.model.directory import Disk
from tests.model.etcd import ModelStore
from tests.model.foreign import Looking
from tests.model.placement_client import ModelPlacement
from tests.model.virtual import NOW
from tests.model.world import World


class ModelHypervisor(FakeHypervisor):
    """The product's fake hypervisor. An actor may be killed before each change."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        # Guests whose addresses libvirt cannot report.
        self.without_addresses: set[str] = set()
        # Guests that have run, and whose disk was created again afterwards, except by a newer rebuild.
        self.recreated: set[str] = set()
        # The number of the rebuild that a guest has run with, or whose end is recorded.
        self.rebuilt: dict[str, int] = {}
        # The errors with which actions fail once.
        self.errors: dict[str, EcompError] = {}
        # What was done with domains that are not ours.
        self.touched: list[str] = []
        world.state_parts.append(self.summarize)

    def summarize(self) -> tuple[object, ...]:
        foreign = ((name, each.is_running, each.adopted_by) for name, each in self._foreign.items())
        sizes = (f'{guest.size} {guest.next_size}' for guest in self._guests.values())
        rebuilt = *self.list_reservations().items(), '', *self.rebuilt.items(), '', *self.errors
        return *self._guests.items(), *sizes, '', *foreign, '', *rebuilt

    def set_foreign(self, *guests: ForeignGuest) -> None:
        self._foreign = {guest.instance: guest for guest in guests}

    def set_adoption(self, instance: str, compute: str | None) -> None:
        self._world.call(Call('libvirt', ('marks' if compute else 'unmarks', instance), writes=True), lambda: None)
        super().set_adoption(instance, compute)

    def snapshot(self) -> Mapping[str, Guest]:
        """Return the guests: the same object until something changes."""
        return self._guests

    def create_disk(self, spec: GuestSpec) -> None:
        self._step_before('makes the disk', spec.instance)
        if spec.rebuilt <= self.rebuilt.get(spec.instance, -1):
            self.recreated.add(spec.instance)
        super().create_disk(spec)

    def start(self, spec: GuestSpec) -> None:
        if self._get_guest(spec.instance).defined:
            self._step_before('undefines the domain', spec.instance)
            super().destroy(spec.instance, spec.compute)
        self._step_before('starts the domain', spec.instance)
        super().start(spec)
        self.rebuilt[spec.instance] = spec.rebuilt

    def resize(self, spec: GuestSpec) -> None:
        self._step_before('defines another size:', spec.instance)
        super().resize(spec)

    def destroy(self, instance: str, compute: str) -> None:
        self._step_before('destroys the domain', instance)
        super().destroy(instance, compute)
        self.rebuilt.pop(instance, None)

    def delete_disk(self, instance: str) -> None:
        self._step_before('deletes the disk', instance)
        if instance not in self._guests:
            self.rebuilt.pop(instance, None)
        super().delete_disk(instance)

    def reserve_address(self, instance: str, mac: str, network: str, preferred: str | None = None) -> str | None:
        self._begin('reserves an address for', instance)
        return super().reserve_address(instance, mac, network, preferred)

    def find_addresses(self, instance: str) -> Mapping[str, Address]:
        if instance in self.without_addresses:
            raise EcompError(f'libvirt: no addresses of {instance}')
        return super().find_addresses(instance)

    def lose_power(self, compute: str) -> None:
        for instance in self.list_guests():
            self.switch_off(instance, compute)

    def _begin(self, action: str, instance: str) -> None:
        if instance in self._foreign:
            self.touched.append(f'it {action} {self._world.names[instance]}, which is not ours')
        if action in self.errors:
            raise self.errors.pop(action)

    def _step_before(self, action: str, instance: str) -> None:
        self._begin(action, instance)
        self._world.call(Call('libvirt', (action, instance), writes=True), lambda: None)


def complete_query(query: Callable[[], Consumer]) -> Future[Consumer]:
    # A thread could not query earlier, so this is the oldest answer that the product may trust.
    future: Future[Consumer] = Future()
    try:
        future.set_result(query())
    except EcompError as error:
        future.set_exception(error)
    return future


class UnthreadedPresence(Presence):
    def _start_thread(self) -> None:
        pass


class ModelUpkeep(Upkeep):
    def __post_init__(self) -> None:
        self._consumers = self._inventory = None


class InlinePool(InlineRunner):
    def __init__(self, hypervisor: FakeHypervisor) -> None:
        self._hypervisor = hypervisor
        self._images = FakeImages()
        self._cancelled: set[str | None] = set()


class Compute:
    """One host. `is_dead`: it never comes back, and nothing waits for it."""

    def __init__(self, uuid: str, world: World, etcd: Etcd, placement: ModelPlacement, since: str = NOW) -> None:
        self.uuid, self.since = uuid, since
        self.world, self.etcd, self.placement = world, etcd, placement
        self.hypervisor = ModelHypervisor(world)
        self.disk = Disk(world, uuid)
        self.disk.files['boot_id'] = 'first'
        self.is_dead = False
        self.now = NOW
        # True if it is started with --accept-new-etcd.
        self.republishes = False
        self.takes_from_queues = True
        # True if it has found another process that uses its uuid.
        self.is_read_only = False
        # The number of tasks for which no thread can ever be started.
        self.missing_threads = 0
        # etcd's revision when this compute first saw or accepted it.
        self.first_seen = self.etcd.revision
        self.process: object = None
        # The VCPU of its provider.
        self.room = 4
        # The requests that it has seen last.
        self.requests: Mapping[str, Entry] = {}
        self.looking: Looking | None = None
        etcd.listeners.append(self._note_rebuilds)
        self.start()

    def set_foreign(self, *guests: ForeignGuest) -> None:
        self.hypervisor.set_foreign(*guests)
        self.looking = Looking(self)
        self.looking.register()
        self.looking.measure()

    @property
    def is_looking(self) -> bool:
        """True while a look waits for a call: another one would wait for its end."""
        return self.looking is not None and self.looking.lock.locked()

    def measure(self) -> None:
        if self.looking is not None:
            self.looking.measure()

    def start(self, republishes: bool = False) -> None:
        """Start a process that knows only what is on its host."""
        state = self.disk.make_path('state')
        self.store = ModelStore(self.etcd)
        identity = {'hostname': 'h', 'token': 'token of ' + self.uuid, 'since': self.since}
        value = {**identity, 'queues': True}
        self.presence = UnthreadedPresence(self.store, keys.compute(self.uuid), value, self._set_read_only)
        memory = Memory(state, self.uuid, lambda: self.now, self.disk.make_path('boot_id'))
        if republishes:
            self.first_seen = self.etcd.revision
            republish(self.uuid, self.store, self.placement, memory, set(self.hypervisor.list_guests()), self.now)
        record_missed_ends(self.uuid, self.store, memory, set(self.hypervisor.list_guests()))
        restore_reservations(self.hypervisor, memory)
        runner = InlinePool(self.hypervisor)
        shape = GuestTemplate('qemu', True, DEFAULT_NETWORKS, 'h')
        self.guest_data = GuestData(state / 'metadata')
        control = ControlPlane(self.uuid, self.store, self.placement, lambda: self.now, complete_query)
        host = HostServices(self.hypervisor, runner, self.guest_data)
        self.instances = Instances(control, host, shape, memory)
        self.planner = Planner(self.instances, FailureLog())
        self.keeper = ClaimKeeper(self.uuid, self.store, self.placement, self.takes_from_queues)
        read_requests = lambda: self.store.snapshot(keys.request_prefix(self.uuid)).entries  # noqa: E731
        self.upkeep = ModelUpkeep(  # type: ignore[arg-type]
            *(self.uuid, self.store, self.placement, self.keeper, self.instances.list_guests),
            *(self.hypervisor, self.guest_data, state, memory),
            *(lambda _key, _value: None, lambda _: True, read_requests),
        )
        self.queues = Queues(self.etcd.revision, self.first_seen)
        lease, may_take = lambda: self.presence.lease, lambda: not self.is_dead
        self.taker = Taker(control, lease, self.queues, may_take, {}, self.hypervisor.list_guests)
        self.taker._rng = random.Random(self.uuid)
        self.memory, self.requests = memory, {}
        if self.looking is not None:
            self.looking = Looking(self)
            self.looking.register()
        self.instances.on_release = self.measure
        self.presence._put_key()
        self.process = object()

    def _note_rebuilds(self, operations: Sequence[Put | Delete]) -> None:
        for each in operations:
            if isinstance(each, Put) and each.key.startswith(keys.record(self.uuid, '')) and '"rebuilt"' in each.value:
                record, rebuilt = from_json(each.value.encode()), self.hypervisor.rebuilt
                if record.state in (ACTIVE, STOPPED) and (record.rebuilt or '').isdecimal():
                    rebuilt[record.instance] = max(int(record.rebuilt or 0), rebuilt.get(record.instance, 0))

    def restart(self) -> None:
        self.etcd.end_lease(self.presence.lease)
        self.start(self.republishes)

    def keep_presence(self) -> None:
        self.presence.renew_and_check()

    def _set_read_only(self, _: str) -> None:
        self.is_read_only = True

    def plan(self, times: int = 1) -> int:
        """List, plan and run tasks `times` times. Return the number of tasks."""
        return sum(self._plan() for _ in range(times))

    def _plan(self) -> int:
        if self.is_read_only:
            return 0
        state = self.requests = self.store.snapshot(keys.request_prefix(self.uuid)).entries
        tasks = self.planner.step(state)
        for task in tasks:
            self.planner.begin(task)
        missing = min(self.missing_threads, len(tasks))
        self.missing_threads -= missing
        for task in tasks[:missing]:
            self.planner.hand_back(task, 'no thread')
        for task in tasks[missing:]:
            self.planner.carry_out(task)
        return len(tasks)

    def reconcile(self) -> None:
        if self.looking is not None:
            self.looking.reconcile()
        else:
            guests, targets = self.hypervisor.list_guests(), self.planner.targets
            self.keeper.reconcile(guests, self.world.read_clock(), targets=targets)

    def read_requests(self) -> bool:
        return self.taker.on_hosts(self.store.snapshot(keys.request_prefix(self.uuid)).entries)

    def read_queues(self) -> bool:
        return self.queues.on_queues(self.store.snapshot(keys.QUEUES).entries)

    def read_presence(self) -> None:
        state = self.store.snapshot(keys.COMPUTES).entries
        self.queues.on_computes(state)
        self.presence.on_computes(state)

    @property
    def has_queued(self) -> bool:
        return self.queues.backlog is not None and bool(self.queues.backlog.entries)

    def pull(self) -> None:
        # The followed presence keys are always current here, so that following them needs no step of its own.
        self.queues.on_computes({key: each for key, each in self.etcd.entries.items() if key.startswith(keys.COMPUTES)})
        try:
            while self.taker.take_next():
                pass
        except EcompError:
            self.taker.mark_room_stale()
            raise

    def take_and_build(self, times: int = 1) -> None:
        for _ in range(times):
            self.run_all(self.read_queues, self.read_requests, self.pull, self.plan)

    def _read_claims(self) -> None:
        self.keeper.consumers = read_provider_allocations(self.placement, self.uuid)
        self.keeper.is_current = True

    def look(self) -> list[Finding]:
        self.measure()
        with suppress(NotFound):
            self._read_claims()
        return find_all(self.upkeep.read_world(is_asked=False))

    def claim_again(self) -> None:
        """Claim again what living instances lack, as `check --fix` asks for."""
        self._read_claims()
        world = self.upkeep.read_world(is_asked=False)
        for finding in find_all(world):
            if finding.repair is Repair.CLAIM:
                self.upkeep._repair(finding)

    def run_all(self, *functions: Callable[[], Any]) -> list[EcompError]:
        errors = []
        for function in functions:
            try:
                function()
            except EcompError as error:
                errors.append(error)
        return errors

    def repeat(self, number: int, *functions: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(number):
                self.run_all(*functions)

        return run

    def list_remembered(self) -> Mapping[str, object]:
        return self.memory.get_entries()
