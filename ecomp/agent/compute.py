"""One compute: its parts, started and stopped in the order of their needs, and its loop.

The loop plans at every wake-up and every minute; events only wake it. Periodic checks that need placement run in
another thread, because placement may take a minute to time out.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import time
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from ecomp.agent.host import provider
from ecomp.agent.host.claims import ClaimKeeper, Generations
from ecomp.agent.host.digest import Answerer
from ecomp.agent.host.metadata import GuestData, keep_served, nocloud
from ecomp.agent.host.provider import Inventory, Registration, check_names, registered
from ecomp.agent.host.state import Identity, Memory
from ecomp.agent.images.cache import CacheLimits, FakeImages, Scrubber
from ecomp.agent.images.connections import reach_of
from ecomp.agent.instance.instances import ControlPlane, Host, Instances, Shape
from ecomp.agent.instance.plan import Kind
from ecomp.agent.instance.pool import Inline, Workers, WorkerSettings
from ecomp.agent.instance.records import republish
from ecomp.agent.planner import EVERY, LOOKING, Planner, Work
from ecomp.agent.queue import Offers, Puller, Queues, Taker
from ecomp.agent.turns import Complaints, Delays, Threads, Turn
from ecomp.compute_conf import ComputeConfig
from ecomp.errors import BuildFailed, Conflict, Denied, EcompError
from ecomp.failpoints import failpoint
from ecomp.files import boot_id
from ecomp.model import host, keys
from ecomp.model.allocation import GIB
from ecomp.model.guest import ReservedAddress
from ecomp.model.host import hostname_in, is_hostname, to_json
from ecomp.model.record import ACTIVE, BUILDING, ERROR, GONE, STOPPED, from_json, timestamp
from ecomp.placement.client import Placement
from ecomp.store.client import Entry, Guard, Put, Store, Unchanged, is_alive
from ecomp.store.presence import Lease, Presence, hashed
from ecomp.store.watch import State as Entries
from ecomp.version import read_version
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)


def note_ends(compute: str, store: Store, memory: Memory, here: Collection[str]) -> None:
    """Remember instances as ended that have no request, guest or living record here.

    An end is written to etcd before the state directory. A kill in between, or a full disk, leaves an entry that would
    reserve the instance's address at every start. Call it only with a familiar etcd, whose errors pass.
    """
    requested = {keys.last(key) for key in store.snapshot(keys.request_prefix(compute), keys_only=True).entries}
    remembered = memory.all()
    for instance in remembered.keys() - requested - set(here):
        # Read after the requests: an end changes both in one transaction, so a living instance has one of the two.
        record_keys = keys.record(compute, instance), keys.old_record(instance)
        records, entry = store.read(record_keys).values(), remembered[instance]
        if not records and entry.record.state == BUILDING and entry.failure is None:
            continue  # killed before the first record of its build: the planner releases what is reserved for it
        if all(_has_ended(compute, record) for record in records):
            memory.ended(instance)
            log.info('instance %s had ended, and this compute had not written that down', instance)


def reserve_again(hypervisor: Hypervisor, memory: Memory) -> None:
    """Restore DHCP reservations removed outside ecomp; log BuildFailed, pass other errors."""
    reservations = hypervisor.reservations()
    for instance, remembered in memory.all().items():
        if remembered.record.state not in (ACTIVE, STOPPED):
            continue  # its build or destroy changes the reservations
        for nic in remembered.record.addresses:
            if nic.expected is None or reservations.get(nic.mac) == ReservedAddress(instance, nic.expected):
                continue
            try:
                ip = hypervisor.reserve(instance, nic.mac, nic.network, nic.expected)
            except BuildFailed as error:
                log.warning('instance %s: %s cannot be reserved again: %s', instance, nic.expected, error.reason)
            else:
                log.warning('instance %s: %s was not reserved on %s, %s is', instance, nic.expected, nic.network, ip)


def _has_ended(compute: str, entry: Entry) -> bool:
    try:
        record = from_json(entry.value)
    except ValueError:
        return False  # malformed, or of a newer ecomp
    return record.state in (GONE, ERROR) or record.compute != compute


# Worker processes without `workers:` in compute.yaml: one a processor, but no more than these.
MOST_WORKERS = 8

# Takes the computes that have guests on this host; raises Conflict if this compute must not start beside them.
Admit = Callable[[Set[str]], None]


def pretended(config: ComputeConfig, at_exit: ExitStack, admit: Admit) -> Host:
    """Make a host without libvirt (--fake), whose jobs run in the caller's thread."""
    from ecomp.virt.fake import FakeHypervisor

    hypervisor = FakeHypervisor(config.state)
    hypervisor.prepare()
    hypervisor.virt_type(config.virt_type)
    admit({guest.compute for guest in hypervisor.guests().values() if guest.compute})
    runner = Inline(hypervisor, FakeImages())
    at_exit.callback(runner.stop)
    return Host(hypervisor, runner, GuestData(config.state / 'metadata'))


def real(config: ComputeConfig, at_exit: ExitStack, admit: Admit) -> Host:
    """Open this machine as a host; change nothing before `admit` returns.

    Errors of `admit` and of the hypervisor pass; EcompError if no metadata server starts.
    """
    from ecomp.virt.libvirt_host import Libvirt

    libvirt = Libvirt(config.state, config.networks, control=reach_of(config).control)
    at_exit.callback(libvirt.close)
    libvirt.check()
    libvirt.virt_type(config.virt_type)
    admit(libvirt.computes())
    libvirt.prepare()
    # After the networks were started: the server listens on an address of their bridge.
    ensure_metadata_served = keep_served(libvirt, config.state, config.directory, config.metadata == 'network', at_exit)
    # No instance gets a larger disk than the whole, so a larger image is useless here.
    disk_bytes = (config.inventory or {}).get('DISK_GB', 0) * GIB or provider.look(config.state, []).disk
    limits = CacheLimits(_image_cache(config) * GIB, disk_bytes)
    settings = WorkerSettings(
        config.state, config.images, os.getpid(), limits, libvirt.filters, reach_of(config), config.hold_addresses
    )
    pool = Workers(workers(config), settings)
    at_exit.callback(pool.stop)
    scrubber = Scrubber(config.state / 'images')
    at_exit.callback(scrubber.stop)
    scrubber.start()
    data = GuestData(config.state / 'metadata')
    return Host(libvirt, pool, data, ensure_metadata_served, lambda: libvirt.bridge_name() is not None)


def inventory_of(config: ComputeConfig, fake: bool, hypervisor: Hypervisor) -> Inventory:
    """Return the inventory to register; UsageError for a ratio of a class that it lacks."""
    measured = {}
    if not fake:
        measured = provider.inventory(provider.look(config.state, list(hypervisor.guests())), _image_cache(config))
    # Classes that `inventory:` does not name have the measured amounts.
    return provider.with_ratios({**measured, **provider.given(config.inventory or {})}, config.allocation_ratios)


def traits_of(hypervisor: Hypervisor, virt_type: str) -> frozenset[str]:
    """Return the traits of the guests' processor; empty if the hypervisor reports no features."""
    features = hypervisor.cpu_features(virt_type)
    if not features:
        return frozenset()
    from ecomp.model.traits import cpu_traits

    return cpu_traits(features)


def workers(config: ComputeConfig) -> int:
    return config.workers or min(os.cpu_count() or 1, MOST_WORKERS)


def _image_cache(config: ComputeConfig) -> int:
    return config.image_cache or provider.default_cache(config.state)


PLANNING = 'planning'
HERE = 'looks in turn with plans'
FAR = 'looks beside plans'
FOLLOWING = 'following etcd'
# Minutes between checks of the key with this host's name.
NAMED = 10


@dataclass(eq=False)
class Daemon:
    """The planning loop: begin(), run() until stop() is called, then drain().

    `remote_checks` are the periodic checks that run beside plans, by activity, mostly queries to placement. The first
    periodic checks run after `first_check_seconds`. `on_planned` is called after each plan, in the planning thread.
    """

    host: Host
    planner: Planner
    far: Mapping[str, Callable[[], None]]
    threads: Threads
    first: float
    on_planned: Callable[[], None]

    def __post_init__(self) -> None:
        self._complaints = self.planner.complaints
        self._here = {'reading records again': self.planner.recheck, 'plugging guests in': self.host.hypervisor.plug_in}
        self._here['looking after the metadata server'] = self.host.look_after
        # The back-off of planning and of the two groups of checks.
        self._delays = Delays()
        self._turn = Turn(self.threads, self.threads.plans, self._look)
        self._far_turn = Turn(self.threads, self.threads.minutes, partial(self._look_at, FAR, self.far))
        self._next_minute = time.monotonic() + self.first
        # Replaced, never changed; the planner is woken after that. None: not read yet.
        self._state: Mapping[str, Entry] | None = None
        # Set once, and without a lock, because a signal handler sets it.
        self._stopping = False
        self.read_only = False

    def begin(self) -> None:
        """Start planning; the run() of one loop tends the workers of the whole process."""
        self.host.hypervisor.on_change(self.planner.nudge, self.look_soon)
        self.planner.on_nudge = self._turn.at
        self._turn.at()  # for wake-ups before this

    def run(self, alive: Callable[[], float]) -> None:
        """Tend the workers until stop(); notify_alive() returns the seconds until its next call."""
        while not self._stopping:
            self.host.runner.tend(min(EVERY, alive()))

    def drain(self) -> None:
        """Start nothing more, stop builds, and wait for the tasks in flight."""
        self._stopping = True
        self._turn.end()
        self._far_turn.end()
        self.planner.stop_builds()
        while self._turn.is_busy or self.planner.in_work():
            self.host.runner.tend(0.2)

    def stop(self) -> None:
        """End run() soon. Safe in a signal handler."""
        self._stopping = True
        self.host.runner.waker.wake()

    def become_read_only(self, reason: str) -> None:
        """Start no tasks until become_writable(), because this process may not write (rule 9).

        Builds in flight stop at their next step and undo themselves. Guests keep running.
        """
        self.read_only = True
        self.planner.stop_builds()
        log.error('%s. From now on this one only watches; what runs goes on', reason)

    def become_writable(self) -> None:
        """Resume after become_read_only(), because this process is the compute again."""
        self.read_only = False
        self.planner.allow_builds()
        log.warning('the presence key is held by this ecompute again: it builds and destroys again')
        self.planner.nudge('it may write again')

    def on_state(self, state: Mapping[str, Entry]) -> None:
        """Replace this compute's requests, and plan. The follower's callback."""
        self._state = state
        self.planner.nudge('its requests were read')

    def look_soon(self, reason: str) -> None:
        """Plan and make the periodic checks now. From any thread."""
        self._next_minute = 0.0
        self.planner.nudge(reason)

    def is_ending(self) -> bool:
        """Return whether no more tasks are started: for good, or until become_writable()."""
        return self._stopping or self.read_only

    def _look(self) -> float:
        """Plan, unless ending; return when (monotonic) to plan again; log errors."""
        if self.is_ending():
            return math.inf
        next_time = self._complaints.attempt(PLANNING, self._plan)
        if next_time is None:
            next_time = self._delays.put_off(PLANNING)
            self._next_minute = min(self._next_minute, next_time)
        else:
            self._delays.forget(PLANNING)
        return next_time

    def _plan(self) -> float:
        now, state = time.monotonic(), self._state
        if state is None:
            return now + EVERY  # the first list wakes the planner
        is_minute = now >= self._next_minute
        if is_minute:
            self._next_minute = now + EVERY * random.uniform(0.9, 1.1)
        for work in self.planner.step(state):
            self._begin(work)
        self.on_planned()
        self._complaints.settle(PLANNING)  # before the checks below, which may fail
        if is_minute or self._delays.when(HERE) <= time.monotonic():
            self._look_at(HERE, self._here)
        # Checks that still wait for placement are not started twice.
        if is_minute and not self._far_turn.is_busy:
            self._far_turn.at()
        # A pause, so that something overdue does not make this loop spin.
        due_times = self._next_minute, self._delays.when(HERE), *self.planner.due()
        return max(min(due_times), time.monotonic() + 0.01)

    def _begin(self, work: Work) -> None:
        self.planner.begin(work)
        pool = self.threads.builds if work.task.kind is Kind.BUILD else self.threads.tasks
        try:
            pool.submit(partial(self.planner.carry_out, work))
        except RuntimeError as error:
            self.planner.hand_back(work, f'no thread can be started for it: {error}')

    def _look_at(self, name: str, looks: Mapping[str, Callable[[], None]]) -> float:
        """Run all checks; return when (monotonic) to retry failed ones, or inf."""
        results = [self._works(doing, look) for doing, look in looks.items()]
        if not all(results):
            return self._delays.put_off(name)
        self._delays.forget(name)
        return math.inf

    def _works(self, doing: str, look: Callable[[], None]) -> bool:
        def work() -> bool:
            look()
            return True

        # A check in flight at the end fails because its connections are closed.
        return self.is_ending() or self._complaints.attempt(doing, work, self.is_ending) is not None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The parts and settings of a process that all its computes share.

    Attributes:
        accepts_new_etcd: republish the instances to an etcd that may be another one (--accept-new-etcd).
        is_familiar_etcd: etcd is the remembered one; if not, the compute is read-only from the start (rule 10).
        accepted_revision: the revision of that acceptance, to be written to etcd; 0: none, or written already.
        first_seen_revision: see Puller.
        spread_seconds: time over which the computes, which all start together, send their first queries to placement.
        audits: an etcd connection without a guard, for answers to audits.
        checks_names: each compute must check that placement knows the configured traits and classes.
    """

    fake: bool
    accept: bool
    familiar: bool
    accepted: int
    first_seen: int
    guard: Guard
    placement: Placement
    spread: float
    threads: Threads
    lease: Lease
    offers: Offers
    generations: Generations
    audits: Store
    checks_names: bool


class Compute:
    """One compute: register(), start() and, even after their errors, stop(), one at a time.

    From start() on the threads that follow etcd for this compute call the on_… methods.
    """

    def __init__(
        self, config: ComputeConfig, state: Identity, store: Store, environment: Environment, at_exit: ExitStack
    ) -> None:
        self.uuid = state.compute_uuid(config.uuid)
        log.info('compute %s, state in %s, ecomp %s', self.uuid, config.state, read_version())
        self._config = config
        self._state = state
        self._token = state.token()
        self._store = store
        self._environment = environment
        self._control = ControlPlane(self.uuid, store, environment.placement, now)
        self._complaints = Complaints()
        self._at_exit = at_exit
        self._asked: Entries = {}
        self._generation: int | None = None
        self._named_until = 0.0
        self._hostname = socket.gethostname()
        self.has_noted_acceptance = False
        facts = {'version': read_version(), 'hostname': self._hostname, 'since': now(), 'token': self._token}
        facts |= {'boot': boot_id(), 'pid': str(os.getpid())}  # to tell two processes with the same token apart
        key = keys.compute(self.uuid)
        self._presence = Presence(store, key, facts, self._become_read_only, environment.lease, self._become_writable)

    def register(self) -> None:
        """Check that this compute may run here, register it in placement, and make its parts.

        Raises Conflict if another ecompute is this compute, or if a compute that is not alive has guests here;
        UsageError for a wrong configuration. Errors of etcd, placement and the hypervisor pass.
        """
        config, fake, familiar = self._config, self._environment.fake, self._environment.familiar
        placement = self._environment.placement
        # First, because another ecompute may be this compute, and must not be disturbed.
        if familiar:
            self._presence.check()
        self.host = (pretended if fake else real)(config, self._at_exit, self._admit)
        hypervisor = self.host.hypervisor
        virt_type = hypervisor.virt_type(config.virt_type)
        self._inventory = inventory_of(config, fake, hypervisor)
        self._guests = 'pretended' if fake else virt_type
        self._presence.say(kind='fake' if fake else virt_type, queues=config.queues)
        self._provider = Registration(
            placement,
            self.uuid,
            self._inventory,
            found=traits_of(hypervisor, virt_type),
            configured=config.traits,
            aggregates=config.aggregates,
            state=config.state,
        )
        if familiar:
            if self._environment.checks_names:
                check_names(placement, config.traits, config.inventory or ())
            # Before placement knows the uuid, and after the last refusal: the next start is this compute, too.
            self._state.keep()
        self._memory = memory = Memory(config.state, self.uuid, now)
        if familiar:
            # First, because republished instances claim on the provider.
            self._provider.register()
            self.has_noted_acceptance = self._note_acceptance()
            if self._environment.accept:
                republish(self.uuid, self._store, placement, memory, set(hypervisor.guests()), now())
                failpoint('republished')
            # After that: etcd's records correct the memory, and the memory corrects DHCP.
            note_ends(self.uuid, self._store, memory, set(hypervisor.guests()))
            reserve_again(hypervisor, memory)
        read_seed = nocloud(config, self.host.serves_metadata)
        shape = Shape(virt_type, config.resize, config.networks, self._hostname, read_seed)
        instances = Instances(self._control, self.host, shape, memory)
        self._planner = Planner(instances, self._complaints)
        self._claims = ClaimKeeper(self.uuid, self._store, placement, config.queues)
        self._claims.settled.note(self._provider.new_at)
        remote_checks = {'writing down its host name': self._keep_hostname, LOOKING: self._look_at_claims}
        remote_checks |= {'looking at the provider': self._keep_registered}
        delay = random.uniform(0.0, self._environment.spread)
        threads = self._environment.threads
        self.daemon = Daemon(self.host, self._planner, remote_checks, threads, first=delay, on_planned=self._say_room)
        self.queues = None
        if config.queues and familiar:
            taker = Taker(self._control, lambda: self._presence.lease)
            inventory, first_seen = registered(self._inventory), self._environment.first_seen
            puller = Puller(taker, self._environment.offers, self._may_take, inventory, first_seen, hypervisor.guests)
            self.queues = Queues(puller, self._complaints, threads)
        token, audits = hashed(self._token), self._environment.audits
        self.answerer = Answerer(
            self.uuid, token, audits, hypervisor, self.host.guest_data, config.state, self._may_remove, threads
        )

    def start(self) -> None:
        """Begin to take requests; Conflict if another ecompute is this compute; etcd's errors pass."""
        familiar, at_exit = self._environment.familiar, self._at_exit
        if not self._environment.fake:  # fake guests have no cloud-init, and a watch costs a thread for each compute
            at_exit.callback(self.host.guest_data.on_ready(self._planner.nudge))
        # Before any request can arrive: nothing is started for an unfamiliar etcd.
        self._environment.guard.when_strange(self._become_read_only)
        # Before the presence key, which makes audits expect an answer; also if the compute is read-only.
        self.answerer.start()
        at_exit.callback(self.answerer.stop)
        # Before any other write, because every write compares the presence key (rule 9).
        if familiar:
            self._presence.start()
            failpoint('published')
            at_exit.callback(self._presence.stop)
            # Users may name an alive compute by its host name. If the write fails, the periodic check logs why.
            with suppress(EcompError):
                self._keep_hostname()
        # The end runs these in reverse: stop planning, take no more requests, close the provider, wait for the tasks in
        # flight; only then remove the presence key.
        at_exit.callback(self.daemon.drain)
        at_exit.callback(self._close_provider)
        if self.queues is not None:
            at_exit.callback(self.queues.stop)
            self.queues.start()
        at_exit.callback(self.daemon.stop)
        self.daemon.begin()

    def stop(self) -> None:
        """Stop all parts in reverse order, and wait for them. Guests keep running."""
        self._at_exit.close()

    def __str__(self) -> str:
        amounts = (f'{name} {parts["total"]} ({parts["reserved"]} reserved)' for name, parts in self._inventory.items())
        return f'{self._guests} guests with {", ".join(amounts)}'

    def on_requests(self, state: Entries) -> None:
        """Pass all requests of this compute to its parts."""
        self._asked = state
        self.daemon.on_state(state)
        if self.queues is not None:
            self.queues.on_hosts(state)

    def on_computes(self, state: Entries) -> None:
        self._presence.on_computes(state)

    def on_lost(self, error: EcompError) -> None:
        self._complaints.complain(FOLLOWING, error)

    def on_back(self) -> None:
        """Retry what failed, because etcd can be followed again."""
        self._presence.look()
        self._complaints.settle(FOLLOWING)
        if self.queues is not None:
            self.queues.nudge('etcd is back')

    def _note_acceptance(self) -> bool:
        """Write the revision of the acceptance; return False if a role of ecomp 1.1 denies that.

        If this start accepts an etcd, Denied is raised instead. Other errors of etcd pass.
        """
        try:
            if self._environment.accepted:
                self._store.commit([], [Put(keys.accepted(self.uuid), str(self._environment.accepted))])
        except Denied as error:
            if self._environment.accept:
                raise
            log.error('%s', error)
            return False
        return True

    def _become_read_only(self, reason: str) -> None:
        self.daemon.become_read_only(reason)

    def _become_writable(self) -> None:
        self.daemon.become_writable()
        if self.queues is not None:
            self.queues.nudge('it may write again')

    def _admit(self, here: Set[str]) -> None:
        """Raise Conflict if guests of a compute that is not alive are here (rule 9)."""
        for other in sorted(here - {self.uuid}) if self._environment.familiar else ():
            if not is_alive(self._store, other):
                raise Conflict(
                    f'guests of compute {other} are on this host, and this is compute {self.uuid}: '
                    f'put `uuid: {other}` into compute.yaml to go on as that one, or remove its domains'
                )

    def _look_at_claims(self) -> None:
        self._generation = None
        self._generation = self._environment.generations.of(self.uuid)
        requests = {keys.last(key) for key in self._asked}
        self._claims.look(self.host.hypervisor.guests(), time.monotonic(), self._generation, requests)

    def _keep_registered(self) -> None:
        # With the generation that the check of claims has read.
        self._provider.keep(lambda: not self._may_take(), self._generation)

    def _keep_hostname(self) -> None:
        """Keep the key with this host's name, by which users may name the compute while it is down."""
        if time.monotonic() < self._named_until:
            return
        key = keys.hostname(self.uuid)
        entry = self._store.get(key)
        if is_hostname(self._hostname) and (entry is None or hostname_in(entry.value) != self._hostname):
            condition = Unchanged(key, entry.revision if entry else 0)
            # If another process was faster, the next check reads its value.
            self._store.commit([condition], [Put(key, to_json(self._hostname))])
        self._named_until = time.monotonic() + NAMED * EVERY

    def _say_room(self) -> None:
        """Publish the room hint with the presence; None if room is unknown or nothing is taken."""
        held = self._planner.given
        is_known = held is not None and not self._provider.is_disabled and self._may_take()
        self._presence.say(room=host.room_hint(self._inventory, [held]) if is_known and held is not None else None)

    def _may_take(self) -> bool:
        return not self.daemon.is_ending()

    def _may_remove(self, instance: str) -> bool:
        self._store.recognise()  # raises StrangeEtcd
        return not self.daemon.read_only and instance not in self._memory.all()

    def _close_provider(self) -> None:
        if self.daemon.read_only:
            return  # the provider belongs to another ecompute now
        failpoint('closing')
        try:
            self._provider.close()
            log.info('reserved all VCPU: nothing is scheduled here until the next start')
        except EcompError as error:
            log.warning('could not reserve VCPU, so requests may still be written for this compute: %s', error)


def now() -> str:
    """Return the current time, ISO 8601."""
    return timestamp(datetime.now(UTC))
