"""One compute: its parts, and its loop, which plans at every wake-up and every minute."""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from ecomp.agent.host import provider
from ecomp.agent.host.claims import ClaimKeeper, confirm_sightings
from ecomp.agent.host.metadata import GuestData, make_seed, serve_metadata
from ecomp.agent.host.provider import PlacementInventory, Registration, parse_inventory, require_names
from ecomp.agent.host.state import Identity, Memory
from ecomp.agent.host.troubles import Troubles
from ecomp.agent.host.upkeep import Upkeep, restore_reservations
from ecomp.agent.images.cache import CacheLimits, FakeImages, Scrubber, list_image_hashes
from ecomp.agent.images.sources import make_egress_policy
from ecomp.agent.instance.build import MAX_CONCURRENT_STOPS
from ecomp.agent.instance.instances import ControlPlane, GuestTemplate, HostServices, Instances
from ecomp.agent.instance.pool import InlineRunner, Workers, WorkerSettings
from ecomp.agent.instance.records import republish
from ecomp.agent.jobs import Deferrals, FailureLog, Loop
from ecomp.agent.planner import CHECKING_CLAIMS, PLAN_INTERVAL_SECONDS, Planner, Work
from ecomp.agent.queue import Queues, TakeLoop, Taker
from ecomp.compute_conf import ComputeConfig
from ecomp.errors import Conflict, EcompError, NotFound
from ecomp.failpoints import failpoint
from ecomp.files import read_boot_id
from ecomp.model import keys
from ecomp.model.allocation import GIB
from ecomp.model.facts import encode_facts
from ecomp.model.foreign import ForeignGuest, encode_foreign
from ecomp.model.guest import list_macs
from ecomp.model.host import StoredHostname, is_hostname
from ecomp.model.order import Request, parse_attempt_instances, parse_request
from ecomp.model.record import Record, parse_or_none
from ecomp.model.states import BUILDING, ERROR, GONE
from ecomp.model.status import DISABLED
from ecomp.model.stored import decode_lenient, encode
from ecomp.model.text import format_time
from ecomp.model.trouble import encode_trouble
from ecomp.placement import providers
from ecomp.placement.client import Placement
from ecomp.shared.attempts import is_alive
from ecomp.shared.ends import keep_user_data
from ecomp.shared.presence import Presence
from ecomp.store.client import Entry, Guard, Put, Store, Unchanged
from ecomp.store.watch import State as Entries
from ecomp.version import read_version
from ecomp.virt import Hypervisor

if TYPE_CHECKING:
    from ecomp.virt.fake import Fake

log = logging.getLogger(__name__)


def record_missed_ends(compute: str, store: Store, memory: Memory, guests: Collection[str]) -> None:
    """Save in `memory` the end of each instance without a request, guest or living record."""
    requests, remembered = store.snapshot(keys.request_prefix(compute), keys_only=True).entries, memory.get_entries()
    # An end is written to etcd first, so a kill in between, or a full disk, leaves an entry that reserves its address.
    for instance in remembered.keys() - {*map(keys.get_last_part, requests), *guests}:
        # Read after the requests: an end changes both in one transaction, so a living instance has one of the two.
        stored, entry = store.get(keys.record(compute, instance)), remembered[instance]
        if stored is None and entry.record.state == BUILDING and entry.failure is None:
            continue  # killed before the first record of its build: the planner releases what is reserved for it
        # A malformed record, or one of a newer ecomp, does not show an end; one that names another compute does.
        record = parse_or_none(stored.value) if stored is not None else None
        if stored is None or (record and (record.state in (GONE, ERROR) or record.compute != compute)):
            memory.record_end(instance)
            log.info('instance %s had finished, which the state directory did not record: recorded it there', instance)


# Worker processes without `workers:` in compute.yaml: one a processor, but no more than these.
MAX_DEFAULT_WORKERS = 8

# Most builds may wait for one image's download: neither other tasks nor builds of other images may wait for them.
MIN_BUILD_THREADS = 32

# Takes the computes that have guests on this host; raises Conflict if this compute must not start beside them.
Admit = Callable[[Set[str]], None]


def make_fake_host(fake: Fake, config: ComputeConfig, admit: Admit) -> HostServices:
    """Make the host of `--fake`, which calls `admit`, and runs jobs in the caller's thread."""
    from ecomp.virt.fake import FakeHypervisor

    data = GuestData(config.state / 'metadata')
    # The report is empty: the guest has no host keys.
    hypervisor = FakeHypervisor(config.state, fake.boot_seconds, lambda guest: data.get_report_path(guest).touch())
    hypervisor.prepare()
    hypervisor.choose_virt_type(config.virt_type)
    admit({each.compute for each in hypervisor.list_guests().values() if each.compute and not each.is_adopted})
    images = FakeImages()
    return HostServices(hypervisor, InlineRunner(hypervisor, images), data, list_image_hashes=images.list_image_hashes)


def make_libvirt_host(config: ComputeConfig, at_exit: ExitStack, admit: Admit) -> HostServices:
    """Open libvirt, call `admit`, then start networks, metadata server, scrubber and workers."""
    from ecomp.virt.libvirt_host import Libvirt

    libvirt = Libvirt(config.state, config.networks, control_endpoints=make_egress_policy(config).control_endpoints)
    at_exit.callback(libvirt.close)
    libvirt.check()
    libvirt.choose_virt_type(config.virt_type)
    # Nothing is changed before this returns. All that is started after it ends by `at_exit`, except the networks.
    admit(libvirt.list_computes())
    libvirt.prepare()
    # After the networks were started: the server listens on an address of their bridge.
    ensure_served = serve_metadata(libvirt, config.state, config.directory, config.metadata == 'network', at_exit)
    # No instance gets a larger disk than the whole, so a larger image is useless here.
    disk_bytes = (config.inventory or {}).get('DISK_GB', 0) * GIB or provider.measure_machine(config.state, []).disk
    limits = CacheLimits(_get_image_cache_gib(config) * GIB, disk_bytes)
    pool = Workers(choose_worker_count(config), WorkerSettings(config, os.getpid(), limits, libvirt.has_filters))
    at_exit.callback(pool.stop)
    scrubber = Scrubber(config.state / 'images')
    at_exit.callback(scrubber.stop)
    scrubber.start()
    data, list_hashes = GuestData(config.state / 'metadata'), partial(list_image_hashes, config.state / 'images')
    return HostServices(libvirt, pool, data, ensure_served, lambda: libvirt.find_bridge() is not None, list_hashes)


def detect_traits(hypervisor: Hypervisor, virt_type: str) -> frozenset[str]:
    features = hypervisor.read_cpu_features(virt_type)
    if not features:
        return frozenset()
    from ecomp.model.traits import list_cpu_traits

    return list_cpu_traits(features)


def choose_worker_count(config: ComputeConfig) -> int:
    return config.workers or min(os.cpu_count() or 1, MAX_DEFAULT_WORKERS)


def _get_image_cache_gib(config: ComputeConfig) -> int:
    return config.image_cache or provider.choose_cache_gib(config.state)


PLANNING = 'planning'
LOCAL_CHECKS = 'checks between plans'
REMOTE_CHECKS = 'checks beside plans'
FOLLOWING = 'following etcd'
HOSTNAME_CHECK_MINUTES = 10
# Seconds until user-data is refreshed again, at most. Each compute varies them, so that not all do it at one time.
USER_DATA_CHECK_SECONDS = 24 * 3600


@dataclass(eq=False)
class PlanningLoop:
    """Plans for one compute from begin() to drain(), and tends its workers in run()."""

    host: HostServices
    planner: Planner
    # {activity: check}. They run in another thread than plans, because placement may take a minute to time out.
    remote_checks: Mapping[str, Callable[[], None]]
    # The tasks that run at a time, builds aside.
    max_tasks: int
    on_planned: Callable[[], None]
    # Called when a plan fails or a network changes.
    check_troubles: Callable[[], None]

    def __post_init__(self) -> None:
        self._failures = self.planner.failures
        self._local_checks = {
            'rereading records': self.planner.recheck,
            'reconnecting the interfaces of guests': self.host.hypervisor.replug_interfaces,
            'restoring the filters of guests': self.host.hypervisor.restore_filters,
            'removing the autostart of guests': self.host.hypervisor.disable_autostart,
            'checking the metadata server': self.host.ensure_metadata_server,
        }
        # The back-off of planning and of the two groups of checks.
        self._deferrals = Deferrals()
        self._plans = Loop('planner', self._run_plan)
        self._remote = Loop('checks', partial(self._run_checks, REMOTE_CHECKS, self.remote_checks))
        self._next_check = 0.0
        # Replaced, never changed; the planner is woken after that. None: not read yet.
        self._state: Mapping[str, Entry] | None = None
        # Set once, and without a lock, because a signal handler sets it.
        self._is_stopping = False
        self.read_only = False

    def begin(self) -> None:
        """Watch the hypervisor for changes, and schedule a plan now and at each wake-up."""
        self.host.hypervisor.watch_changes(self.planner.wake_up, self.request_checks)
        self.planner.on_wake_up = self._plans.schedule
        self._plans.schedule()  # for wake-ups before this

    def run(self, notify_alive: Callable[[], float]) -> None:
        """Tend the workers in this thread until stop(), and call notify_alive() before each wait."""
        while not self._is_stopping:
            self.host.runner.tend(min(PLAN_INTERVAL_SECONDS, notify_alive()))

    def drain(self) -> None:
        """Start nothing more, stop builds, and tend the workers until no plan or task is in flight."""
        self._is_stopping = True
        self._plans.stop()
        self._remote.stop()
        self.planner.stop_builds()
        while self._plans.is_busy or self.planner.get_in_flight():
            self.host.runner.tend(0.2)

    def stop(self) -> None:
        """Let run() return soon, and start no more tasks, also from a signal handler."""
        self._is_stopping = True
        self.host.runner.waker.wake()

    def become_read_only(self, reason: str) -> None:
        """Start no tasks until become_writable(), and undo builds in flight (rule: single-owner)."""
        self.read_only = True
        self.planner.stop_builds()
        log.error('this compute is read-only from now on: its guests run, but it changes nothing: %s', reason)

    def become_writable(self) -> None:
        self.read_only = False
        self.planner.allow_builds()
        log.warning('this compute is no longer read-only: its presence is in etcd again')
        self.planner.wake_up('this compute may write again')

    def on_state(self, state: Mapping[str, Entry]) -> None:
        self._state = state
        self.planner.wake_up('requests were read')

    def request_checks(self, reason: str) -> None:
        """Schedule a plan, the periodic checks and a check for troubles now, from any thread."""
        self._next_check = 0.0
        self.check_troubles()
        self.planner.wake_up(reason)

    def is_ending(self) -> bool:
        """Return whether this compute stops or is read-only."""
        return self._is_stopping or self.read_only

    def _run_plan(self) -> float:
        """Plan, and return when (monotonic) to do so again: after a back-off if it failed."""
        if self.is_ending():
            return math.inf
        next_time = self._failures.attempt(PLANNING, self._plan)
        if next_time is None:
            next_time = self._deferrals.defer(PLANNING)
            self._next_check = min(self._next_check, next_time)
            self.check_troubles()
        else:
            self._deferrals.cancel(PLANNING)
        return next_time

    def _plan(self) -> float:
        """Start due tasks and checks, and return when (monotonic) to plan again, or raise."""
        now, state = time.monotonic(), self._state
        if state is None:
            return now + PLAN_INTERVAL_SECONDS  # the first list wakes the planner
        is_minute = now >= self._next_check
        if is_minute:
            self._next_check = now + PLAN_INTERVAL_SECONDS * random.uniform(0.9, 1.1)
        self._start_tasks(self.planner.step(state))
        self.on_planned()
        self._failures.report_success(PLANNING)  # before the checks below, which may fail
        if is_minute or self._deferrals.get_due_time(LOCAL_CHECKS) <= time.monotonic():
            self._run_checks(LOCAL_CHECKS, self._local_checks)
        # Checks that still wait for placement are not started twice.
        if is_minute and not self._remote.is_busy:
            self._remote.schedule()
        # A pause, so that something overdue does not make this loop spin.
        due_times = self._next_check, self._deferrals.get_due_time(LOCAL_CHECKS), *self.planner.list_due_times()
        return max(min(due_times), time.monotonic() + 0.01)

    def _start_tasks(self, due: Sequence[Work]) -> None:
        """Start threads for due work up to the limits, and leave the rest to the next plan."""
        running = Counter(work.task.kind.is_build for work in self.planner.get_in_flight().values())
        # New tasks first, then by the end of their back-off, or tasks that fail again and again would keep others out.
        retry_times = self.planner.deferrals.get_deferred(-math.inf)
        for work in sorted(due, key=lambda work: (retry_times.get(work.instance, 0.0), work.revision)):
            is_build = work.task.kind.is_build
            limit = max(self.max_tasks, MIN_BUILD_THREADS) if is_build else self.max_tasks
            # The end of a task plans the others again.
            if running[is_build] < limit and not self.is_ending():
                running[is_build] += 1
                self.planner.begin(work)
                try:
                    threading.Thread(target=self.planner.carry_out, args=(work,), name='task', daemon=True).start()
                except RuntimeError as error:
                    self.planner.hand_back(work, f'no thread can be started for a task: {error}')

    def _run_checks(self, name: str, checks: Mapping[str, Callable[[], None]]) -> float:
        """Run checks, {activity: check}, and return when to retry `name`, infinity if all succeeded."""
        results = [self._run_check(doing, look) for doing, look in checks.items()]
        if not all(results):
            return self._deferrals.defer(name)
        self._deferrals.cancel(name)
        return math.inf

    def _run_check(self, activity: str, check: Callable[[], None]) -> bool:
        def work() -> bool:
            check()
            return True

        # A check in flight at the end fails because its connections are closed.
        return self.is_ending() or self._failures.attempt(activity, work, is_moot=self.is_ending) is not None


@dataclass(eq=False, kw_only=True)
class Compute:
    """One compute: call register(), start() and, also after errors, stop().

    With `accepts_new_etcd` it republishes its instances to an etcd that may be another one. Unless `is_familiar_etcd`,
    it is read-only from the start (rule: familiar-etcd).
    """

    config: ComputeConfig
    identity: Identity
    store: Store
    guard: Guard
    placement: Placement
    queues: Queues
    fake: Fake | None
    accepts_new_etcd: bool
    is_familiar_etcd: bool

    def __post_init__(self) -> None:
        self.uuid = self.identity.choose_uuid(self.config.uuid)
        log.info('compute %s, state in %s, ecomp %s', self.uuid, self.config.state, read_version())
        token = self.identity.choose_token()
        self._control = ControlPlane(self.uuid, self.store, self.placement, now)
        self._failures = FailureLog()
        self._at_exit = ExitStack()
        self._requests: Entries = {}
        self._generation: int | None = None
        self._unknown_since: dict[str, float] = {}
        self._has_facts = False
        self._hostname_valid_until = self._user_data_valid_until = 0.0
        self._hostname = (self.fake and self.fake.hostname) or socket.gethostname()
        facts = {'version': read_version(), 'hostname': self._hostname, 'since': now(), 'token': token}
        facts |= {'boot': read_boot_id(), 'pid': str(os.getpid())}  # to tell two processes with the same token apart
        key = keys.compute(self.uuid)
        # The daemon is made later, and before the presence is started.
        self._presence = Presence(
            self.store, key, facts, lambda reason: self.daemon.become_read_only(reason), self._become_writable
        )
        self.on_computes = self._presence.on_computes

    def register(self) -> None:
        """Make this compute's parts and, if etcd is familiar, check and register the compute."""
        config, fake, familiar, placement = self.config, self.fake, self.is_familiar_etcd, self.placement
        # First, because another ecompute may be this compute, and must not be disturbed.
        if familiar:
            self._presence.check()
        if fake is not None:
            self.host = make_fake_host(fake, config, self._admit)
        else:
            self.host = make_libvirt_host(config, self._at_exit, self._admit)
        hypervisor = self.host.hypervisor
        virt_type = hypervisor.choose_virt_type(config.virt_type)
        foreign = hypervisor.list_foreign()
        self._adoptees = {name for name, guest in foreign.items() if guest.adopted_by == self.uuid}
        self._inventory = self._measure_inventory(foreign, self._adoptees)
        self._guest_type = 'fake' if fake else virt_type
        self._presence.add_fields(kind=self._guest_type, queues=config.queues)
        detected_traits, inventory = detect_traits(hypervisor, virt_type), self._inventory
        self._provider = Registration(
            placement, self.uuid, inventory, detected_traits, config.traits, config.aggregates, config.state
        )
        if familiar:
            require_names(placement, config.traits, config.inventory or ())
            # Before placement knows the uuid, and after the last refusal: the next start is this compute, too.
            self.identity.save()
        self._memory = Memory(config.state, self.uuid, now)
        if familiar:
            self._provider.register()  # before republished instances claim on the provider
            self._correct_memory()
        self._make_parts(virt_type)

    def _correct_memory(self) -> None:
        """Republish after --accept-new-etcd, then note missed ends and restore DHCP reservations."""
        store, hypervisor = self.store, self.host.hypervisor
        if self.accepts_new_etcd:
            store.commit([], [Put(keys.acceptance(self.uuid), str(self.queues.first_seen_revision))])
            republish(self.uuid, store, self.placement, self._memory, set(hypervisor.list_guests()), now())
            failpoint('republished')
        record_missed_ends(self.uuid, store, self._memory, set(hypervisor.list_guests()))
        restore_reservations(hypervisor, self._memory)

    def _make_parts(self, virt_type: str) -> None:
        config, hypervisor = self.config, self.host.hypervisor
        make = None if config.metadata == 'network' else self._make_seed
        shape = GuestTemplate(virt_type, config.resize, config.networks, self._hostname, make)
        instances = Instances(self._control, self.host, shape, self._memory)
        self._planner = Planner(instances, self._failures)
        self._claims = ClaimKeeper(self.uuid, self.store, self.placement, config.queues)
        self._claims.last_good_check.record(self._provider.created_generation)
        remote_checks = {
            'writing the host name to etcd': self._publish_hostname,
            CHECKING_CLAIMS: self._reconcile_claims,
            'checking the provider': self._ensure_registered,
            'keeping the user-data of sets in etcd': self._keep_user_data,
            'looking at this host': self._look,
        }
        self.troubles = troubles = Troubles(hypervisor, self._publish_troubles)
        instances.on_build_end, instances.on_release = troubles.note_build, self._measure_again
        max_tasks = 2 * choose_worker_count(config) + (2 if self.fake else MAX_CONCURRENT_STOPS)
        parts = self.host, self._planner, remote_checks
        self.daemon = PlanningLoop(*parts, max_tasks, self._publish_facts, troubles.check_soon)
        self._taking = None
        if config.queues and self.is_familiar_etcd:
            lease, may_take = lambda: self._presence.lease, lambda: not self.daemon.is_ending()
            inventory, guests = parse_inventory(self._inventory), hypervisor.list_guests
            taker = Taker(self._control, lease, self.queues, may_take, inventory, guests, troubles.can_build)
            self._taking = TakeLoop(taker, self._failures)
        self.upkeep = Upkeep(
            *(self.uuid, self.store, self.placement, self._claims, instances.list_guests),
            *(hypervisor, self.host.guest_data, config.state, self._memory),
            publish=partial(self._presence.publish, is_urgent=True),
            measure=self._measure,
            may_remove=self._can_remove,
            read_requests=lambda: self._requests,
        )

    def start(self) -> None:
        """If etcd is familiar, publish the presence key, and begin to plan and take requests."""
        familiar, at_exit = self.is_familiar_etcd, self._at_exit
        if self.fake is None:  # the fake hypervisor notifies
            at_exit.callback(self.host.guest_data.watch_reports(self._planner.wake_up))
        # Before any request can arrive: nothing is started for an unfamiliar etcd.
        self.guard.add_refusal_listener(self.daemon.become_read_only)
        at_exit.callback(self.upkeep.stop)
        # Before any other write, because every write compares the presence key (rule: single-owner).
        if familiar:
            at_exit.callback(self._presence.stop)
            self._presence.start()
            failpoint('published')
            # Users may name an alive compute by its host name. If the write fails, the periodic check logs why.
            with suppress(EcompError):
                self._publish_hostname()
        # The end runs these in reverse: stop planning, take no more requests, close the provider, wait for the tasks in
        # flight; only then remove the presence key.
        at_exit.callback(self.daemon.drain)
        at_exit.callback(self._close_provider)
        if self._taking is not None:
            at_exit.callback(self._taking.stop)
            self._taking.wake_up('this compute started')
        at_exit.callback(self.troubles.stop)
        self.troubles.check_soon()
        at_exit.callback(self.daemon.stop)
        self.daemon.begin()

    def stop(self) -> None:
        self._at_exit.close()

    def __str__(self) -> str:
        """Return the guests' type and the inventory, such as `kvm guests with VCPU 8 (0 reserved)`."""
        amounts = (f'{name} {parts["total"]} ({parts["reserved"]} reserved)' for name, parts in self._inventory.items())
        return f'{self._guest_type} guests with {", ".join(amounts)}'

    def list_records(self) -> dict[str, Record | None]:
        """Return {instance: record or, before one is written, None}, from any thread."""
        requests = dict.fromkeys(filter(keys.is_uuid, map(keys.get_last_part, self._requests)))
        return {**requests, **{name: entry.record for name, entry in self._memory.get_entries().items()}}

    def on_requests(self, state: Entries) -> None:
        self._requests = state
        self.daemon.on_state(state)
        if self._taking is not None:
            self._taking.on_hosts(state)

    def on_lost(self, error: EcompError, began: float) -> None:
        self._failures.report_failure(FOLLOWING, error, began)

    def on_back(self) -> None:
        """End the failure of on_lost(), and check the presence and the queues soon."""
        self._presence.schedule_check()
        self._failures.report_success(FOLLOWING)
        self.wake_taker('etcd is back')

    def wake_taker(self, reason: str) -> None:
        if self._taking is not None:
            self._taking.wake_up(reason)

    def _become_writable(self) -> None:
        self.daemon.become_writable()
        self.wake_taker('this compute may write again')

    def _admit(self, guest_computes: Set[str]) -> None:
        """Raise Conflict if a compute other than this one has guests here and is not alive."""
        for other in sorted(guest_computes - {self.uuid}) if self.is_familiar_etcd else ():
            if not is_alive(self.store, other):  # rule: single-owner
                raise Conflict(
                    f'guests of compute {other} are on this host, but this is compute {self.uuid}. '
                    f'Fix: set `uuid: {other}` in compute.yaml to continue as compute {other}, or remove those guests'
                )

    def _reconcile_claims(self) -> None:
        """Reconcile claims, and unmark adopted guests that have neither request nor claim."""
        self._generation, self._claims.is_current = None, False
        with suppress(NotFound):
            self._generation = providers.read_generation(self.placement, self.uuid)
        requests = {keys.get_last_part(key) for key in self._requests}
        guests = self.host.hypervisor.list_guests()
        with self.upkeep.lock:
            self._claims.reconcile(guests, time.monotonic(), self._generation, requests, self._planner.targets)
            consumers = self._claims.consumers if self._claims.is_current else None
        # Its host was forgotten, or a restored etcd does not know it.
        adopted = {name for name, guest in guests.items() if guest.is_adopted and guest.compute == self.uuid}
        unknown = adopted - requests - consumers.keys() if consumers is not None else ()
        self._unknown_since, confirmed = confirm_sightings(self._unknown_since, unknown, time.monotonic())
        for instance in confirmed:
            self.host.hypervisor.set_adoption(instance, None)
            log.warning('instance %s has no request or claim: removed the adoption mark of its domain', instance)

    def _measure_inventory(self, foreign: Mapping[str, ForeignGuest], adoptees: Set[str]) -> PlacementInventory:
        """Return the inventory, which reserves what guests outside ecomp use, `adoptees` aside."""
        config, measured = self.config, dict[str, dict[str, int]]()
        if self.fake is None:
            disks = [disk for name in adoptees for disk in foreign[name].disks]
            guests = {*self.host.hypervisor.list_guests(), *adoptees}
            others = (each for name, each in foreign.items() if name not in adoptees and each.is_running)
            vcpus = sum(each.size['VCPU'] for each in others)
            machine = provider.measure_machine(config.state, guests, disks)
            measured = provider.make_inventory(machine, _get_image_cache_gib(config), vcpus)
        inventory = {**measured, **provider.make_fixed_inventory(config.inventory or {})}
        return provider.add_ratios(inventory, config.allocation_ratios)

    def _measure(self) -> None:
        """Reserve what guests outside ecomp use, and publish these guests."""
        foreign = self.host.hypervisor.list_foreign()
        adoptees = {name for name, guest in foreign.items() if guest.adopted_by == self.uuid}
        if foreign:
            adoptees |= {name for name in foreign if self._is_adopting(name)}
            entry = self.store.get(keys.adoption(self.uuid))
            attempted = parse_attempt_instances(entry.key, entry.value) if entry is not None and entry.lease else None
            # Not before the adoption has disabled this compute: else somebody gets what these guests use.
            if attempted and DISABLED in providers.read_names(self.placement, self.uuid, providers.TRAITS):
                adoptees |= foreign.keys() & attempted
        measured, is_exact = self._measure_inventory(foreign, adoptees), adoptees != self._adoptees
        inventory = provider.settle_reserved(self._inventory, measured, is_exact)
        self._provider.update_inventory(inventory, self.daemon.is_ending)
        self._inventory, self._adoptees = inventory, adoptees
        # An adoption waits for this: only now there is room for the guests that are left out.
        named = [name for name in adoptees if foreign[name].adopted_by != self.uuid]
        self._presence.publish(keys.foreign(self.uuid), encode_foreign(foreign, named), is_urgent=True)

    def _measure_again(self) -> None:
        with self.upkeep.lock:
            self._measure()

    def _is_adopting(self, instance: str) -> bool:
        entry = self._requests.get(key := keys.request(self.uuid, instance))
        request = parse_request(self.uuid, key, entry.value, entry.dropped_bytes) if entry is not None else None
        return isinstance(request, Request) and request.is_adopted and not request.is_tombstone

    def _look(self) -> None:
        guests = self.host.hypervisor.list_guests()
        if self._memory.get_entries().keys() - {*map(keys.get_last_part, self._requests), *guests}:
            record_missed_ends(self.uuid, self.store, self._memory, guests)
        self.upkeep.step()

    def _ensure_registered(self) -> None:
        before = self._provider.provider
        with self.upkeep.lock:
            self._provider.ensure_registered(self.daemon.is_ending, self._generation)
        if self._provider.provider != before:
            self._planner.wake_up('its provider has changed')  # a plan publishes it

    def _publish_hostname(self) -> None:
        """Write this host's name to etcd once in HOSTNAME_CHECK_MINUTES, for when it is down."""
        if time.monotonic() < self._hostname_valid_until:
            return
        key = keys.hostname(self.uuid)
        entry = self.store.get(key)
        if is_hostname(self._hostname):
            leases = decode_lenient(StoredHostname, entry.value).leases if entry else ()
            with suppress(EcompError):  # a full etcd grants none
                leases = self._presence.ensure_life_leases(leases)
            value = encode(StoredHostname(self._hostname, leases))
            if entry is None or entry.value != value.encode():
                # If another process was faster, the next check reads its value.
                self.store.commit([Unchanged(key, entry.revision if entry else 0)], [Put(key, value)])
        self._hostname_valid_until = time.monotonic() + HOSTNAME_CHECK_MINUTES * PLAN_INTERVAL_SECONDS

    def _keep_user_data(self) -> None:
        """Refresh the user-data of our instances in etcd, once in USER_DATA_CHECK_SECONDS."""
        if time.monotonic() < self._user_data_valid_until:
            return
        macs_by_hash: dict[str, list[str]] = {}
        for key, entry in self._requests.items():
            request = parse_request(self.uuid, key, entry.value, entry.dropped_bytes)
            if isinstance(request, Request) and request.user_data_sha256 is not None:
                macs_by_hash.setdefault(request.user_data_sha256, []).extend(list_macs(request.instance))
        for sha256, macs in macs_by_hash.items():
            keep_user_data(self.store, sha256, filter(None, map(self.host.guest_data.read_user_data, macs)))
        self._user_data_valid_until = time.monotonic() + USER_DATA_CHECK_SECONDS * random.uniform(0.5, 1.0)

    def _publish_facts(self) -> None:
        provider, held = self._provider.provider, self._planner.usage
        if provider is not None and held is not None:
            facts = encode_facts(provider, held, self.host.list_image_hashes())
            self._presence.publish(keys.facts(self.uuid), facts, is_urgent=not self._has_facts)
            self._has_facts = True

    def _publish_troubles(self, reasons: Sequence[str]) -> None:
        self._presence.publish(keys.troubles(self.uuid), encode_trouble(reasons), is_urgent=True)
        if not reasons:
            self.wake_taker('this compute can build again')

    def _can_remove(self, instance: str) -> bool:
        """Return whether the instance is not in memory and we may write, or raise StrangeEtcd."""
        self.store.require_identity()
        return not self.daemon.read_only and instance not in self._memory.get_entries()

    def _make_seed(self, mac: str) -> Mapping[str, bytes]:
        directory, is_served = self.config.state / 'metadata', self.host.can_serve_metadata()
        return make_seed(directory, self.config.directory, mac, phones_home=is_served)

    def _close_provider(self) -> None:
        if self.daemon.read_only:
            return  # the provider belongs to another ecompute now
        failpoint('closing')
        try:
            self._provider.close()
            log.info('reserved all VCPU in placement: no instances are placed here until ecompute starts again')
        except EcompError as error:
            log.warning('instances may still be placed here, because VCPU cannot be reserved: %s', error)


def now() -> str:
    return format_time(datetime.now(UTC))
