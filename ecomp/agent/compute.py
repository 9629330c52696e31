"""One compute: its parts, each begun after those it needs and ended before them, and its loop.

A host is opened by a function that registers with `at_exit` how each part ends, beside the line that begins it.

The loop plans at every nudge and once a minute, and has tasks carried out side by side. An event only ever nudges the
planner. What is asked of placement once a minute, and little else, is asked in another thread, for placement may take a
minute to say nothing. The threads are the process's, which all of its computes share.
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

from ecomp import __version__
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
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)


def note_ends(compute: str, store: Store, memory: Memory, here: Collection[str]) -> None:
    """Remember as ended what nobody asks for, of which nothing is `here` and whose record says no other.

    An end's last transaction comes before the state directory: killed in between, or with a full disk, the directory
    says that it lives. Believed, its address would be reserved again at every start, and nobody could mend it.
    Only with the etcd that we know. Errors: those of etcd.
    """
    asked = {keys.last(key) for key in store.snapshot(keys.request_prefix(compute), keys_only=True).entries}
    remembered = memory.all()
    for instance in remembered.keys() - asked - set(here):
        # Read after the requests were: its end takes both in one transaction, so what lives has one of them.
        places = keys.record(compute, instance), keys.old_record(instance)
        there, known = store.read(places).values(), remembered[instance]
        if not there and known.record.state == BUILDING and known.failure is None:
            continue  # begun, and killed before its record said so: the planner takes back what is reserved for it
        if all(_has_ended(compute, each) for each in there):
            memory.ended(instance)
            log.info('instance %s had ended, and this compute had not written that down', instance)


def reserve_again(hypervisor: Hypervisor, memory: Memory) -> None:
    """Reserve what was removed by hand, or with a network that was defined anew. Errors: those of the hypervisor."""
    there = hypervisor.reservations()
    for instance, remembered in memory.all().items():
        if remembered.record.state not in (ACTIVE, STOPPED):
            continue  # its build, or its destroy, sees to it
        for each in remembered.record.addresses:
            if each.expected is None or there.get(each.mac) == ReservedAddress(instance, each.expected):
                continue
            try:
                got = hypervisor.reserve(instance, each.mac, each.network, each.expected)
            except BuildFailed as error:
                log.warning('instance %s: %s cannot be reserved again: %s', instance, each.expected, error.reason)
            else:
                log.warning('instance %s: %s was not reserved on %s, %s is', instance, each.expected, each.network, got)


def _has_ended(compute: str, entry: Entry) -> bool:
    try:
        record = from_json(entry.value)
    except ValueError:
        return False  # a newer ecomp's, perhaps
    return record.state in (GONE, ERROR) or record.compute != compute


MOST_WORKERS = 8
"""Worker processes at most, one a processor, where compute.yaml has no `workers:`."""

Admit = Callable[[Set[str]], None]
"""Told the computes whose guests are here, it raises where this one must not begin beside them."""


def pretended(config: ComputeConfig, at_exit: ExitStack, admit: Admit) -> Host:
    """A host for `ecompute --fake`: no libvirt, and a job runs in the thread that asks for it."""
    from ecomp.virt.fake import FakeHypervisor

    hypervisor = FakeHypervisor(config.state)
    hypervisor.prepare()
    hypervisor.virt_type(config.virt_type)
    admit({each.compute for each in hypervisor.guests().values() if each.compute})
    runner = Inline(hypervisor, FakeImages())
    at_exit.callback(runner.stop)
    return Host(hypervisor, runner, GuestData(config.state / 'metadata'))


def real(config: ComputeConfig, at_exit: ExitStack, admit: Admit) -> Host:
    """This machine, of which nothing is changed before `admit` has let this compute begin.

    Errors: those of the hypervisor, and EcompError where no metadata server comes up.
    """
    from ecomp.virt.libvirt_host import Libvirt

    libvirt = Libvirt(config.state, config.networks, control=reach_of(config).control)
    at_exit.callback(libvirt.close)
    libvirt.check()
    libvirt.virt_type(config.virt_type)
    admit(libvirt.computes())
    libvirt.prepare()
    # After the networks are there: the server listens on an address of their bridge.
    look_after = keep_served(libvirt, config.state, config.directory, config.metadata == 'network', at_exit)
    # No instance is given more than what there is in all, so no image above that is of use here.
    disk = (config.inventory or {}).get('DISK_GB', 0) * GIB or provider.look(config.state, []).disk
    limits = CacheLimits(_image_cache(config) * GIB, disk)
    settings = WorkerSettings(
        config.state, config.images, os.getpid(), limits, libvirt.filters, reach_of(config), config.hold_addresses
    )
    pool = Workers(workers(config), settings)
    at_exit.callback(pool.stop)
    scrubber = Scrubber(config.state / 'images')
    at_exit.callback(scrubber.stop)
    scrubber.start()
    data = GuestData(config.state / 'metadata')
    return Host(libvirt, pool, data, look_after, lambda: libvirt.bridge_name() is not None)


def inventory_of(config: ComputeConfig, fake: bool, hypervisor: Hypervisor) -> Inventory:
    """What placement is told that there is here. UsageError for an allocation ratio of what there is not."""
    found = {}
    if not fake:
        found = provider.inventory(provider.look(config.state, list(hypervisor.guests())), _image_cache(config))
    # What `inventory:` does not name keeps the machine's own truth.
    return provider.with_ratios({**found, **provider.given(config.inventory or {})}, config.allocation_ratios)


def traits_of(hypervisor: Hypervisor, virt_type: str) -> frozenset[str]:
    """The traits of what this host's guests run on."""
    features = hypervisor.cpu_features(virt_type)
    if not features:
        return frozenset()
    from ecomp.model.traits import cpu_traits

    return cpu_traits(features)


def workers(config: ComputeConfig) -> int:
    """How many worker processes there are."""
    return config.workers or min(os.cpu_count() or 1, MOST_WORKERS)


def _image_cache(config: ComputeConfig) -> int:
    return config.image_cache or provider.default_cache(config.state)


PLANNING, HERE, FAR = 'planning', 'looks in turn with plans', 'looks beside plans'
FOLLOWING = 'following etcd'
NAMED = 10
"""Minutes between two looks at the key of its host's name."""


@dataclass(eq=False)
class Daemon:
    """The loop: begin(), run() until stop() is called, then drain().

    `far` is what is asked once a minute beside plans, mostly of placement, by what it is called; first after `first`
    seconds. `on_planned` is called after each plan, in its thread.
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
        # The back-off of planning and of the two rounds of looks.
        self._delays = Delays()
        self._turn = Turn(self.threads, self.threads.plans, self._look)
        self._far_turn = Turn(self.threads, self.threads.minutes, partial(self._look_at, FAR, self.far))
        self._next_minute = time.monotonic() + self.first
        # Never changed, only put in place of the one before, and then there is a nudge.
        self._state: Mapping[str, Entry] | None = None
        # False until it is True for good. No lock, for a signal handler sets it.
        self._stopping = False
        self.read_only = False

    def begin(self) -> None:
        """Work, as far as nobody need tend the workers. run() is to follow, unless another one's does for both."""
        self.host.hypervisor.on_change(self.planner.nudge, self.look_soon)
        self.planner.on_nudge = self._turn.at
        self._turn.at()  # for what there was a nudge before

    def run(self, alive: Callable[[], float]) -> None:
        """Work, until stop(). Called by the main thread after begin().

        `alive` is called whenever the loop goes around, and says after how many seconds it has to have done so again.
        """
        while not self._stopping:
            self.host.runner.tend(min(EVERY, alive()))

    def drain(self) -> None:
        """Begin nothing more, and return when what is in work has ended."""
        self._stopping = True
        self._turn.end()
        self._far_turn.end()
        self.planner.stop_builds()
        while self._turn.is_busy or self.planner.in_work():
            self.host.runner.tend(0.2)

    def stop(self) -> None:
        """End soon. Safe in a signal handler."""
        self._stopping = True
        self.host.runner.waker.wake()

    def become_read_only(self, reason: str) -> None:
        """Begin nothing more, before become_writable(): somebody else is this compute now (rule 9). What runs goes on.

        A build stops at its next step and undoes itself: the other one makes it.
        """
        self.read_only = True
        self.planner.stop_builds()
        log.error('%s. From now on this one only watches; what runs goes on', reason)

    def become_writable(self) -> None:
        """Begin again after become_read_only(): this process is the compute once more, and reads its requests anew."""
        self.read_only = False
        self.planner.allow_builds()
        log.warning('the presence key is held by this ecompute again: it builds and destroys again')
        self.planner.nudge('it may write again')

    def on_state(self, state: Mapping[str, Entry]) -> None:
        """Take all requests there are for this compute, and plan. The follower's callback."""
        self._state = state
        self.planner.nudge('its requests were read')

    def look_soon(self, reason: str) -> None:
        """Plan now, and do now what is done once a minute. From any thread."""
        self._next_minute = 0.0
        self.planner.nudge(reason)

    def is_ending(self) -> bool:
        """Return whether nothing more is begun: for good, or until become_writable()."""
        return self._stopping or self.read_only

    def _look(self) -> float:
        """Plan if there is anything to plan from; when (monotonic) to look again if nothing happens. Never raises."""
        if self.is_ending():
            return math.inf
        again = self._complaints.attempt(PLANNING, self._plan)
        if again is None:
            again = self._delays.put_off(PLANNING)
            self._next_minute = min(self._next_minute, again)
        else:
            self._delays.forget(PLANNING)
        return again

    def _plan(self) -> float:
        now, state = time.monotonic(), self._state
        if state is None:
            return now + EVERY  # the first list nudges
        is_minute = now >= self._next_minute
        if is_minute:
            self._next_minute = now + EVERY * random.uniform(0.9, 1.1)
        for work in self.planner.step(state):
            self._begin(work)
        self.on_planned()
        self._complaints.settle(PLANNING)  # before the looks below, which may fail
        if is_minute or self._delays.when(HERE) <= time.monotonic():
            self._look_at(HERE, self._here)
        # One that waits for placement still is the next one, too.
        if is_minute and not self._far_turn.is_busy:
            self._far_turn.at()
        # Whatever is overdue is not to be met a thousand times a second.
        due = self._next_minute, self._delays.when(HERE), *self.planner.due()
        return max(min(due), time.monotonic() + 0.01)

    def _begin(self, work: Work) -> None:
        self.planner.begin(work)
        pool = self.threads.builds if work.task.kind is Kind.BUILD else self.threads.tasks
        try:
            pool.submit(partial(self.planner.carry_out, work))
        except RuntimeError as error:
            self.planner.hand_back(work, f'no thread can be started for it: {error}')

    def _look_at(self, name: str, looks: Mapping[str, Callable[[], None]]) -> float:
        """Take one look after the other: a failed one hinders no other. Return when to look again before the minute."""
        worked = [self._works(doing, look) for doing, look in looks.items()]
        if not all(worked):
            return self._delays.put_off(name)
        self._delays.forget(name)
        return math.inf

    def _works(self, doing: str, look: Callable[[], None]) -> bool:
        def work() -> bool:
            look()
            return True

        # A look that is under way at the end fails because its connections are closed.
        return self.is_ending() or self._complaints.attempt(doing, work, self.is_ending) is not None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a compute finds in its process.

    `fake`: its guests are pretended; `accept`: etcd is to be told what lives here; `familiar`: etcd is the one that was
    known. Where it is not, the compute is read-only from its beginning (rule 10). `accepted` is the revision at which
    this compute accepted it, to be written to etcd (0: it is there already, or none); `first_seen`: see Puller. Over
    `spread` seconds the computes of a process begin to ask placement, for they all hear of their requests at once. They
    share the `threads`, the `lease` on which they are alive, the `offers` of the queues, what is said of `generations`,
    and `audits`, an etcd connection for answers. `checks_names`: it sees whether placement knows the configured traits
    and classes, which is not known yet.
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
    """The parts: register(), start() and, whatever became of these, stop(). Any thread's, one after the other.

    What is asked of it is followed by whoever made it, from start() on: the on_… are the followers' threads'. `at_exit`
    ends what it was made from.
    """

    def __init__(
        self, config: ComputeConfig, state: Identity, store: Store, environment: Environment, at_exit: ExitStack
    ) -> None:
        self.uuid = state.compute_uuid(config.uuid)
        log.info('compute %s, state in %s, ecomp %s', self.uuid, config.state, __version__)
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
        who = {'version': __version__, 'hostname': self._hostname, 'since': now(), 'token': self._token}
        who |= {'boot': boot_id(), 'pid': str(os.getpid())}  # what two with the same token differ in
        key = keys.compute(self.uuid)
        self._presence = Presence(store, key, who, self._become_read_only, environment.lease, self._become_writable)

    def register(self) -> None:
        """See that this compute may be one here, and that placement knows it; and make all that start() begins.

        Errors: Conflict where another ecompute is this compute, or has guests here; those of etcd, of placement and of
        the hypervisor.
        """
        config, fake, familiar = self._config, self._environment.fake, self._environment.familiar
        placement = self._environment.placement
        # First, for nothing of a host is touched that a living ecompute looks after.
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
            # Before placement hears of it, and not before nothing refuses it any more: the next start is this compute.
            self._state.keep()
        self._memory = memory = Memory(config.state, self.uuid, now)
        if familiar:
            # First, for what is told to etcd anew is claimed on it.
            self._provider.register()
            self.has_noted_acceptance = self._note_acceptance()
            if self._environment.accept:
                republish(self.uuid, self._store, placement, memory, set(hypervisor.guests()), now())
                failpoint('republished')
            # After that: with etcd's word on what lives the memory is put right, and DHCP after the memory.
            note_ends(self.uuid, self._store, memory, set(hypervisor.guests()))
            reserve_again(hypervisor, memory)
        seed = nocloud(config, self.host.serves_metadata)
        shape = Shape(virt_type, config.resize, config.networks, self._hostname, seed)
        instances = Instances(self._control, self.host, shape, memory)
        self._planner = Planner(instances, self._complaints)
        self._claims = ClaimKeeper(self.uuid, self._store, placement, config.queues)
        self._claims.settled.note(self._provider.new_at)
        far = {'writing down its host name': self._keep_hostname, LOOKING: self._look_at_claims}
        far |= {'looking at the provider': self._keep_registered}
        first = random.uniform(0.0, self._environment.spread)
        threads = self._environment.threads
        self.daemon = Daemon(self.host, self._planner, far, threads, first=first, on_planned=self._say_room)
        self.queues = None
        if config.queues and familiar:
            taker = Taker(self._control, lambda: self._presence.lease)
            has, first_seen = registered(self._inventory), self._environment.first_seen
            puller = Puller(taker, self._environment.offers, self._may_take, has, first_seen, hypervisor.guests)
            self.queues = Queues(puller, self._complaints, threads)
        token, audits = hashed(self._token), self._environment.audits
        self.answerer = Answerer(
            self.uuid, token, audits, hypervisor, self.host.guest_data, config.state, self._may_remove, threads
        )

    def start(self) -> None:
        """Begin to take requests. Errors: Conflict where another ecompute is this compute by now; those of etcd."""
        familiar, at_exit = self._environment.familiar, self._at_exit
        if not self._environment.fake:  # a pretended guest has no cloud-init, and fakes are many
            at_exit.callback(self.host.guest_data.on_ready(self._planner.nudge))
        # Before anything can be asked: in another etcd nothing is begun.
        self._environment.guard.when_strange(self._become_read_only)
        # Before it is seen alive, for then it is asked; and also where it is read-only.
        self.answerer.start()
        at_exit.callback(self.answerer.stop)
        # Before it writes anything: every write compares the key that this puts (rule 9).
        if familiar:
            self._presence.start()
            failpoint('published')
            at_exit.callback(self._presence.stop)
            # Whoever sees it alive may call it so; where that cannot be written, the looks of every minute say why.
            with suppress(EcompError):
                self._keep_hostname()
        # At the end, the last of these first: nothing is taken any more, nothing more is scheduled here, what is in
        # work ends; and until then it is alive.
        at_exit.callback(self.daemon.drain)
        at_exit.callback(self._close_provider)
        if self.queues is not None:
            at_exit.callback(self.queues.stop)
            self.queues.start()
        at_exit.callback(self.daemon.stop)
        self.daemon.begin()

    def stop(self) -> None:
        """End what was begun, in reverse, and wait for it. The guests go on."""
        self._at_exit.close()

    def __str__(self) -> str:
        have = (f'{name} {each["total"]} ({each["reserved"]} reserved)' for name, each in self._inventory.items())
        return f'{self._guests} guests with {", ".join(have)}'

    def on_requests(self, state: Entries) -> None:
        """Hand on all requests there are for this compute."""
        self._asked = state
        self.daemon.on_state(state)
        if self.queues is not None:
            self.queues.on_hosts(state)

    def on_computes(self, state: Entries) -> None:
        """See whether it is still there among those that are alive."""
        self._presence.on_computes(state)

    def on_lost(self, error: EcompError) -> None:
        """Note that etcd cannot be followed."""
        self._complaints.complain(FOLLOWING, error)

    def on_back(self) -> None:
        """Note that etcd can be followed again: what failed is tried at once."""
        self._presence.look()
        self._complaints.settle(FOLLOWING)
        if self.queues is not None:
            self.queues.nudge('etcd is back')

    def _note_acceptance(self) -> bool:
        """Write at which revision this compute accepted etcd, for computes that do not know it; False: not allowed.

        A role of ecomp 1.1 does not allow that, which is an error only while it accepts.
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
        """Conflict if guests of another compute are here that nobody looks after (rule 9)."""
        for other in sorted(here - {self.uuid}) if self._environment.familiar else ():
            if not is_alive(self._store, other):
                raise Conflict(
                    f'guests of compute {other} are on this host, and this is compute {self.uuid}: '
                    f'put `uuid: {other}` into compute.yaml to go on as that one, or remove its domains'
                )

    def _look_at_claims(self) -> None:
        self._generation = None
        self._generation = self._environment.generations.of(self.uuid)
        asked = {keys.last(key) for key in self._asked}
        self._claims.look(self.host.hypervisor.guests(), time.monotonic(), self._generation, asked)

    def _keep_registered(self) -> None:
        # By the answer that the look at claims got.
        self._provider.keep(lambda: not self._may_take(), self._generation)

    def _keep_hostname(self) -> None:
        """See that this compute can be called by its host's name also while it is away; now and then, once it is so."""
        if time.monotonic() < self._named_until:
            return
        key = keys.hostname(self.uuid)
        there = self._store.get(key)
        if is_hostname(self._hostname) and (there is None or hostname_in(there.value) != self._hostname):
            condition = Unchanged(key, there.revision if there else 0)
            # Where somebody was faster, the next look says with what.
            self._store.commit([condition], [Put(key, to_json(self._hostname))])
        self._named_until = time.monotonic() + NAMED * EVERY

    def _say_room(self) -> None:
        """Say what is left here, as far as this compute knows: a hint for who seeks a place, see ecomp.model.host."""
        given = self._planner.given
        known = given is not None and not self._provider.is_disabled and self._may_take()
        self._presence.say(room=host.room_hint(self._inventory, [given]) if known and given is not None else None)

    def _may_take(self) -> bool:
        return not self.daemon.is_ending()

    def _may_remove(self, instance: str) -> bool:
        self._store.recognise()  # raises where nothing is to be believed
        return not self.daemon.read_only and instance not in self._memory.all()

    def _close_provider(self) -> None:
        if self.daemon.read_only:
            return  # it is somebody else's provider now
        failpoint('closing')
        try:
            self._provider.close()
            log.info('reserved all VCPU: nothing is scheduled here until the next start')
        except EcompError as error:
            log.warning('could not reserve VCPU, so requests may still be written for this compute: %s', error)


def now() -> str:
    """The time of day, ISO 8601."""
    return timestamp(datetime.now(UTC))
