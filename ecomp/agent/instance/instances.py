"""Carry out the tasks of a compute's instances on libvirt, placement and etcd.

Every write about an instance compares the revision of its request (rule 5): if the request has changed, nothing is
written and the next plan sees the new one. Every task can be repeated. A start or reboot is recorded before it is done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.instance.build import Build, Cancelled, Destroy, Forget, Resume, Shutdown, Step, SwitchOff, WorkerDied
from ecomp.agent.instance.plan import GONE_BOTH, Patience, fault_of
from ecomp.agent.instance.pool import Runner
from ecomp.agent.instance.records import Records, Superseded
from ecomp.errors import BuildFailed, Conflict, EcompError, NoSpace, Unreachable, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import difference, to_wire, total
from ecomp.model.boots import AFTER_HOST, BY_HAND, CREATED
from ecomp.model.guest import (
    REFUSED_METADATA,
    Address,
    Attachment,
    BaseImage,
    Guest,
    GuestSpec,
    all_macs,
    shared_user_data,
)
from ecomp.model.order import ASKED, NOT_STARTED, OFF, Invalid, Power, Request, Shares, parse_request, shares
from ecomp.model.record import (
    ACTIVE,
    BUILDING,
    DESTROYING,
    ERROR,
    GONE,
    STOPPED,
    Failure,
    Interface,
    Progress,
    Record,
    new_record,
    refused_record,
)
from ecomp.model.text import printable
from ecomp.placement import allocations
from ecomp.placement.allocations import Consumer, release
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Put, Store, until_committed
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)


def with_shares(store: Store, compute: str, wish: Invalid) -> Invalid:
    """Return a malformed request with its name, group and quota, read from etcd if needed."""
    entry = store.get(keys.request(compute, wish.instance)) if wish.shares == Shares() else None
    return wish if entry is None else wish._replace(shares=shares(parse_request(compute, entry.key, entry.value)))


def aside(ask: Callable[[], Consumer]) -> Future[Consumer]:
    """Query placement in a new thread, or in this one if none can be started."""
    future: Future[Consumer] = Future()

    def tell() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=tell, name='confirm', daemon=True).start()
    except RuntimeError:
        tell()
    return future


def answer(asked: Future[Consumer]) -> Consumer:
    """Return placement's answer; an EcompError becomes Unreachable: the build is retried."""
    try:
        return asked.result()
    except Unreachable:
        raise
    except EcompError as error:
        raise Unreachable(str(error)) from error


@dataclass(frozen=True)
class ControlPlane:
    """etcd and placement, as one compute uses them; `now` returns ISO 8601 times."""

    compute: str
    store: Store
    placement: Placement
    now: Callable[[], str]
    aside: Callable[[Callable[[], Consumer]], Future[Consumer]] = aside


@dataclass(frozen=True)
class Host:
    """A host's hypervisor, workers and metadata; `ensure_metadata_server` runs every minute."""

    hypervisor: Hypervisor
    runner: Runner
    guest_data: GuestData
    look_after: Callable[[], None] = lambda: None
    serves_metadata: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Shape:
    """The properties that all guests of this compute share.

    `hostname` is the host in a console's address. `make_seed` returns the files of the NoCloud disk of the guest with
    this MAC, or raises BuildFailed; it is None if guests get no such disk.
    """

    virt_type: str
    resize: bool
    networks: tuple[Attachment, ...]
    hostname: str
    seed: Callable[[str], Mapping[str, bytes]] | None = None

    def spec(self, compute: str, request: Request) -> GuestSpec:
        """Return the guest to build for a request, without base, reserved addresses and seed."""
        amounts = total(request.allocations)
        return GuestSpec(
            instance=request.instance,
            compute=compute,
            vcpus=amounts['VCPU'],
            memory_mb=amounts['MEMORY_MB'],
            disk_gb=amounts['DISK_GB'] if self.resize else None,
            base=BaseImage('', '', 0),
            virt_type=self.virt_type,
            networks=self.networks,
        )


def with_user_data(store: Store, request: Request) -> Request:
    """Return the request with the user-data of its set; BuildFailed if gone or malformed."""
    if request.user_data_sha256 is None:
        return request
    entry = store.get(keys.user_data(request.user_data_sha256))
    if entry is None:
        raise BuildFailed('scheduled', 'its user-data is not in etcd any more: that of a set is kept for a week')
    try:
        return replace(request, user_data=shared_user_data(entry.value, request.user_data_sha256))
    except ValueError as error:
        raise BuildFailed('scheduled', f'its user-data, {entry.key}: {error}') from error


# Attempts at a build that fails in an unknown way, and at a build or start during which a worker dies.
ATTEMPTS = 3


class Shutdowns:
    """The guests that were asked to shut down, and when; used by the planning thread only.

    A guest is asked again every `retry_seconds`, because one that is booting ignores the request, and switched off
    after `grace_seconds`. All times are monotonic and not stored: after a restart of ecompute the grace period begins
    again.
    """

    def __init__(self, grace: float, again: float) -> None:
        self._grace = grace
        self._again = again
        self._asked: dict[str, tuple[float, float]] = {}

    def note_asked(self, instance: str, now: float) -> None:
        """Note that a guest was asked at `now`, for the first time or again."""
        first_time, _ = self._asked.get(instance, (now, now))
        self._asked[instance] = first_time, now

    def patience(self, now: float) -> dict[str, Patience]:
        """Return the action that is due for each guest that was asked."""
        return {instance: self._due(first, last, now) for instance, (first, last) in self._asked.items()}

    def next(self, after: float) -> list[float]:
        """Return the times after `after` at which another action becomes due."""
        times = [when for first, last in self._asked.values() for when in (first + self._grace, last + self._again)]
        return [when for when in times if when > after]

    def keep(self, running: Collection[str]) -> None:
        """Forget the guests that are not running: they have shut down."""
        self._asked = {instance: times for instance, times in self._asked.items() if instance in running}

    def _due(self, first: float, last: float, now: float) -> Patience:
        if now >= first + self._grace:
            return Patience.NO_MORE
        return Patience.ASK_AGAIN if now >= last + self._again else Patience.WAIT


def _power(request: Request) -> Power:
    assert request.power is not None  # plan() makes power tasks only of requests with `power`
    return request.power


# Tries to release a claim that other processes change concurrently.
RELEASES = 5


class Instances:
    """The tasks of one compute.

    One thread at a time works on an instance; instances are worked on in parallel. Every task may raise Superseded (the
    request has changed: plan again), or EcompError or OSError (retry it later).
    """

    def __init__(self, control: ControlPlane, host: Host, shape: Shape, memory: Memory) -> None:
        self.compute = control.compute
        self.store = control.store
        self.placement = control.placement
        self.now = control.now
        self.aside = control.aside
        self.runner = host.runner
        self.hypervisor = host.hypervisor
        self.guest_data = host.guest_data
        self.shape = shape
        self.memory = memory
        self.records = Records(control.compute, control.store, memory)

    def guests(self) -> Mapping[str, Guest]:
        """Return the guests by instance, with the trouble of those that are refused metadata."""
        guests, refusals = dict(self.hypervisor.guests()), self.guest_data.read_refusals()
        for instance, guest in [*guests.items()] if refusals else []:
            reasons = [refusals.pop(mac) for mac in all_macs(instance) if mac in refusals]
            if reasons and guest.running:
                guests[instance] = guest.with_trouble(f'{REFUSED_METADATA}: {reasons[0]}')
        self.guest_data.forget_refusals(refusals)  # the remaining ones are of no guest here
        return guests

    def build(self, request: Request, revision: int, guest: Guest | None) -> None:
        """Build the guest, once placement confirms its claim (rule 2).

        A guest that may have run is adopted. Unreachable is retried without limit, an unknown failure, raised as
        EcompError, up to MAX_ATTEMPTS in all; any other failure ends the instance in error.
        """
        instance = request.instance
        stored = self.records.get(instance)
        if stored is not None and stored.state in (ACTIVE, STOPPED):
            return  # planned before the record was written
        record = stored or new_record(self.compute, request, self.now())
        if stored is None:
            self.records.lost(instance, revision, is_here=guest is not None)
        remembered = self.memory.all().get(instance)
        is_begun = stored is not None or (remembered is not None and remembered.record.state == BUILDING)
        pending_failure = remembered.failure if remembered is not None else None
        is_ours = guest is not None and guest.is_built and guest.compute == self.compute
        if guest is not None and (guest.running or (pending_failure is None and (is_ours or not is_begun))):
            # Adopt a guest that runs or may have run: built with our mark, or of no build that was begun here (a build
            # is remembered first). No guest is rebuilt or removed because records are missing.
            self._adopt(record, revision, request, guest, lost=stored is None, starts=is_begun)
            return
        fail, must_remove = partial(self._fail, request=request), guest is not None
        if pending_failure is not None:
            # Keep the failure with which it was being ended: what is missing since then is a consequence.
            fail(record, revision, pending_failure)
            return
        # Placement takes as long as all writes before the build, so query it concurrently.
        confirmation = self.aside(partial(allocations.consumer, self.placement, instance))
        if record.state == BUILDING or remembered is not None:
            confirmation.result()  # a retry: repeat nothing until placement answers
        record = record.at(BUILDING, self.now())
        self.memory.remember(request, record)
        failpoint('remembered')
        spec = self.shape.spec(self.compute, request)
        assert request.image is not None  # parse_request() rejects allocations without an image
        try:
            record = self._reserve(record, spec)
            spec = replace(spec, reserved=tuple(interface.expected for interface in record.addresses))
            self.guest_data.write(with_user_data(self.store, request), spec.macs, self.memory.all)
            failpoint('seeded')
            if self.shape.seed is not None:
                spec = replace(spec, seed=self.shape.seed(spec.macs[0]))
            claim_fault = difference(request.allocations, answer(confirmation).allocations)
            if claim_fault:
                raise BuildFailed('scheduled', claim_fault)
            failpoint('confirmed')
            record = self.records.write(record, revision)
            failpoint('building')
            log.info('INSTANTIATE INSTANCE %s WITH IMAGE %s', instance, request.image)
            log.info('ALLOCATIONS ARE %s', to_wire(request.allocations))
            must_remove = True
            for event in self.runner.run(Build(spec, request.image)):
                if isinstance(event, Progress):
                    record = self._noted(replace(record, progress=event), revision)
                elif event != 'started':
                    record = self._noted(record.at(BUILDING, self.now(), event), revision)
        except Cancelled:
            log.info('instance %s: its build was stopped and is undone', instance)
            self._forget(instance)
            raise Superseded from None
        except BuildFailed as error:
            fail(record, revision, Failure(error.stage, error.reason, ''), touched=must_remove)
        except OSError as error:
            fail(record, revision, Failure('image', f'{error.filename}: {error.strerror}', ''), touched=must_remove)
        except (Conflict, UsageError) as error:
            # The build has undone its steps; the rest is not ecomp's.
            fail(record, revision, Failure('started', str(error), ''), touched=False)
        except Unreachable:
            raise  # retried without limit
        except EcompError as error:
            # A dead worker or an unknown failure may be temporary.
            record = replace(record, attempts=record.attempts + 1)
            if record.attempts < ATTEMPTS:
                self.records.write(record, revision)
                raise EcompError(f'instance {instance}: {error}') from error
            fail(record, revision, Failure('started', f'{error}, {ATTEMPTS} times', ''), touched=must_remove)
        else:
            failpoint('built')
            record = self.records.write(self._up(record), revision)
            self.memory.remember(request, record)
            failpoint('active')
            log.info('instance %s is active', instance)

    def destroy(self, request: Request, revision: int) -> None:
        """Remove the guest and all that belongs to it; its record stays for a day as `gone`."""
        instance = request.instance
        stored = self.records.to_end(instance)
        record = stored or new_record(self.compute, request, self.now())
        if stored is None:
            self.records.lost(instance, revision, is_here=True)
        if record.state not in (DESTROYING, ERROR):  # a failed instance has nothing left, and its record is on a lease
            with suppress(NoSpace):  # a full etcd refuses the record; the destroy makes room
                record = self.records.write(record.at(DESTROYING, self.now()), revision)
            failpoint('destroying')
        log.info('DESTROY INSTANCE %s', instance)
        self._remove(instance, Destroy(instance, self.compute))
        self.records.end(record.at(GONE, self.now(), 'gone'), revision)
        log.info('instance %s is gone', instance)

    def refuse(self, wish: Invalid, revision: int, guest: Guest | None) -> None:
        """End a malformed request in error, unless that would remove a guest.

        The reason becomes the fault of an active, stopped or destroying instance. A key without a uuid is only logged.
        """
        instance, reason = wish.instance, wish.reason
        if not keys.is_uuid(instance):
            name = printable(keys.request(self.compute, instance), 200)
            log.error('%s: %s; it stays there until somebody removes it', name, reason)
            return
        record = self.records.get(instance)
        if record is not None and record.state == BUILDING and guest is not None and guest.is_built:
            record = self._as_it_is(record, guest)
        if record is not None and record.state in (ACTIVE, STOPPED, DESTROYING):
            log.error('instance %s: its request became unreadable and is ignored: %s', instance, reason)
            fault = f'its request is unreadable: {reason}'
            if record.fault != fault:
                self.records.write(replace(record, fault=fault), revision)
            return
        if guest is not None and (record is None or guest.is_built):
            log.error('instance %s: its request is unreadable and its guest is kept: %s', instance, reason)
            return
        if record is None:
            self.records.lost(instance, revision, is_here=False)
        record = record or refused_record(self.compute, with_shares(self.store, self.compute, wish), self.now())
        self._fail(record, revision, Failure('scheduled', reason, ''))  # also removes a disk without a domain

    def end_without_request(self, instance: str, guest: Guest | None) -> None:
        """End a cancelled build whose request was deleted; a built guest is kept, with a fault.

        Without a record in etcd the instance may have ended long ago, so only what was begun here is removed.
        """
        record, remembered = self.records.get(instance), self.memory.all().get(instance)
        last = record or (remembered.record if remembered else None)
        if last is None or last.state != BUILDING or self.store.get(keys.request(self.compute, instance)) is not None:
            return
        reason = 'its request was deleted while it was being built'
        if guest is not None and guest.is_built:
            if record is not None:
                self.records.write(replace(self._as_it_is(record, guest), fault=reason), 0)
        elif record is not None:
            self._fail(record, 0, Failure('scheduled', reason, ''), touched=guest is not None)
        else:
            self._remove(instance, Destroy(instance, self.compute) if guest is not None else None)
            self.memory.ended(instance)

    def clear(self, instance: str, revision: int, reason: str) -> None:
        """Drop a request that is not to be carried out, and its claim; the record is kept."""
        record = self.records.get(instance)
        self.records.drop(instance, revision, record.name if record is not None and record.state == ERROR else None)
        log.error('instance %s: request dropped: %s', instance, reason)
        self._release(instance)

    def vanished(self, instance: str, revision: int) -> None:
        """End an instance whose domain and disk were removed outside ecomp; release its claim."""
        record = self.records.known(instance)
        self._remove(instance, Forget(instance, self.compute))
        self.records.end(replace(record.at(GONE, self.now(), 'gone'), fault=GONE_BOTH), revision)
        log.warning('instance %s is gone: its domain and its disk were removed by somebody else', instance)

    def address(self, instance: str, revision: int, addresses: Mapping[str, Address]) -> None:
        """Record the guest's addresses; the first interface's also at /booted, as in 2019."""
        record = self.records.known(instance)
        interfaces = tuple(
            replace(interface, address=addresses[interface.mac].address, source=addresses[interface.mac].source)
            if interface.mac in addresses
            else interface
            for interface in record.addresses
        )
        record = replace(record, addresses=interfaces)
        operations: list[Put | Delete] = []
        first_address = record.address
        if first_address is not None:
            record = record.has('addressed', self.now())
            operations.append(Put(keys.booted(instance), first_address))
        self.records.write(record, revision, operations)
        failpoint('addressed')
        for interface in interfaces:
            log.info('instance %s has address %s on %s', instance, interface.address or 'none yet', interface.network)

    def ready(self, instance: str, revision: int) -> None:
        """Record that cloud-init has finished or failed, and the host keys that the guest reported."""
        previous, now = self.records.known(instance), self.now()
        try:
            report = self.guest_data.word(instance)
        except OSError as error:
            raise EcompError(f'{error.filename}: {error.strerror}') from error
        # Host keys that were reported first count, whatever a later boot reports. A guest that reports has an address.
        record = replace(previous, host_keys=previous.host_keys or report.host_keys, cloud_init=report.failed)
        record = record.has('addressed', now)
        if report.failed is None:
            self.records.write(record.has('ready', now), revision)
            log.info('instance %s is ready', instance)
        else:
            self.records.write(record, revision)
            log.warning(
                'instance %s: its cloud-init failed at stage %s: %s',
                instance,
                report.failed.stage,
                report.failed.reason,
            )

    def note_power(self, instance: str, revision: int, guest: Guest | None) -> None:
        """Record that a guest went off or came on, and what is wrong with it."""
        record = self.records.write(self._seen(self.records.known(instance), guest, BY_HAND), revision)
        log.info('instance %s is %s%s', instance, record.state, f': {record.fault}' if record.fault else '')

    def resume(self, instance: str, revision: int) -> None:
        """Start a guest that ran when the host went down; a failure becomes its fault."""
        record = self.records.known(instance)
        log.info('START INSTANCE %s: it ran when the host went down', instance)
        # Its stop was not recorded. Attempts counted before that stop belong to an earlier start.
        stopped = record.off(self.now())
        record = replace(stopped, state=record.state, attempts=record.attempts if stopped.boots == record.boots else 0)
        self._start(record, revision, record.power, AFTER_HOST, f'{NOT_STARTED} after the host was rebooted')

    def shut_down(self, request: Request, revision: int) -> None:
        """Ask a guest to shut down; a failure is logged, as if the guest had ignored the request."""
        if self._begin(request, revision, ASKED):
            log.info('SHUT DOWN INSTANCE %s: its %s was asked for', request.instance, _power(request).action)
        try:
            self._run(Shutdown(request.instance, self.compute))
        except Unreachable:
            raise
        except EcompError as error:
            log.warning('instance %s cannot be asked to turn itself off: %s', request.instance, error)

    def switch_off(self, request: Request, revision: int) -> None:
        """Switch off a guest that did not shut down when asked; the next plan finds it off."""
        self._begin(request, revision, ASKED)
        log.warning('SWITCH OFF INSTANCE %s: it was asked to turn itself off, and did not', request.instance)
        self._run(SwitchOff(request.instance, self.compute))

    def start(self, request: Request, revision: int) -> None:
        """Start a stopped guest as requested; a failure becomes its fault and is not retried."""
        self._begin(request, revision, OFF)
        power = _power(request)
        log.info('START INSTANCE %s: its %s was asked for', request.instance, power.action)
        self._start(self.records.known(request.instance), revision, power.id, power.action, NOT_STARTED)

    def power_done(self, request: Request, revision: int, guest: Guest | None) -> None:
        power = _power(request)
        record = replace(self._seen(self.records.known(request.instance), guest, power.action), power=power.id)
        self.records.write(record, revision)
        self.memory.remember(request, record)
        log.info('instance %s is %s, as was asked', request.instance, record.state)

    def _adopt(self, record: Record, revision: int, request: Request, guest: Guest, lost: bool, starts: bool) -> None:
        """Record a guest that exists already; a difference from its claim becomes its fault."""
        remembered = self.memory.all().get(record.instance)
        if lost and request.power is not None:
            # The power action may have been done long ago: only our own memory can tell that it was not.
            record = replace(record, power=remembered.record.power if remembered else request.power.id)
        consumer = allocations.consumer(self.placement, request.instance)
        claim_fault = difference(request.allocations, consumer.allocations)
        spec = self.shape.spec(self.compute, request)
        if not record.addresses:
            interfaces = tuple(Interface(name, mac) for mac, (_, name) in zip(spec.macs, spec.networks, strict=True))
            record = replace(record, addresses=interfaces)
            with suppress(BuildFailed):  # the guest keeps the address that it has
                record = self._reserve(record, spec)
        record = replace(record, fault='its record was lost' if lost else record.fault)
        starts = starts and not (guest.running or claim_fault)
        start_fault = self._start_built(record.at(BUILDING, self.now()), revision) if starts else None
        faults = start_fault, record.fault, claim_fault
        record = replace(self._up(record), fault='; '.join(filter(None, faults)) or None)
        is_off = not guest.running and (not starts or start_fault)
        # If it ran when last remembered, the next plan sees that it is off, or starts it after a reboot.
        if is_off and not (remembered is not None and remembered.record.state == ACTIVE):
            record = record.off(self.now())
        self.records.write(record, revision)
        self.memory.remember(request, record)
        log.info('instance %s is %s%s', record.instance, record.state, f': {record.fault}' if record.fault else '')

    def _reserve(self, record: Record, spec: GuestSpec) -> Record:
        """Reserve the guest's DHCP addresses on libvirt's networks; return the record with them."""
        interfaces = []
        for mac, (kind, name) in zip(spec.macs, spec.networks, strict=True):
            reserved = self.hypervisor.reserve(record.instance, mac, name) if kind == 'network' else None
            interfaces.append(Interface(name, mac, expected=reserved))
        failpoint('reserved')
        return replace(record, addresses=tuple(interfaces))

    def _up(self, record: Record) -> Record:
        console = self.hypervisor.console(record.instance)
        record = replace(record, console=f'{self.shape.hostname}:{console}' if console else None)
        # A running guest has its image and its disk, even if those stages could not be recorded in time.
        now = self.now()
        return record.at(ACTIVE, now, 'image', 'disk', 'started').on(CREATED, now)

    def _as_it_is(self, record: Record, guest: Guest) -> Record:
        return self._up(record) if guest.running else self._up(record).off(self.now())

    def _noted(self, record: Record, revision: int) -> Record:
        """Record how far a build is; if etcd is unreachable, the next write includes it."""
        try:
            return self.records.write(record, revision)
        except Superseded:
            self.runner.cancel(record.instance)
        except Unreachable as error:
            log.debug('how far %s is is written later: %s', record.instance, error)
        return record

    def _fail(
        self, record: Record, revision: int, failure: Failure, touched: bool = True, request: Request | None = None
    ) -> None:
        """End an instance in error: remove what is left of it, then record that.

        The failure is remembered first, with `request` (None: the remembered one), because the record may have to wait.
        With `remove_guest` False domain and disk are not touched.
        """
        self.memory.remember(request, record, failure)
        failpoint('failing')
        self._remove(record.instance, Destroy(record.instance, self.compute) if touched else None)
        cleaned = 'nothing of it is left: no domain, disk or allocation'
        record = replace(record.at(ERROR, self.now(), 'error'), error=replace(failure, cleaned=cleaned), addresses=())
        log.error('instance %s failed at stage %s: %s', record.instance, failure.stage, failure.reason)
        self.records.end(record, revision)

    def _remove(self, instance: str, job: Step | None) -> None:
        """Run `job`, unless None, and remove an instance's data, address reservations and claim."""
        if job is not None:
            self._finish(job)
            failpoint('removed')
        self._forget(instance)
        failpoint('unreserved')
        self._release(instance)
        failpoint('released')

    def _forget(self, instance: str) -> None:
        """Remove the guest's data for the metadata server and its DHCP reservations."""
        self.guest_data.remove(instance, all_macs(instance))
        failpoint('forgotten')
        self.hypervisor.release(instance)

    def _release(self, instance: str) -> None:
        """Release the instance's claim, unless it is on another compute."""

        def elsewhere(holding: Mapping[str, allocations.Consumer]) -> Collection[str]:
            return [consumer for consumer, held in holding.items() if self.compute not in held.allocations]

        def attempt() -> bool | None:
            return release(self.placement, [instance], elsewhere)[instance] is not False or None

        conflict = Unreachable(f'the claim of {instance} is changed by somebody else all the time')
        until_committed(attempt, conflict, RELEASES)

    def _begin(self, request: Request, revision: int, phase: str) -> bool:
        """Record and remember the phase of a power action; return False if it was recorded."""
        record, power = self.records.known(request.instance), _power(request).at(phase)
        is_new = record.power != power
        if is_new:
            record = record.off(self.now()) if phase == OFF else record
            record = self.records.write(replace(record, power=power, attempts=0), revision)
            self.memory.remember(request, record)
        failpoint('powering')
        return is_new

    def _start(self, record: Record, revision: int, power: str | None, why: str, failed: str) -> None:
        reason = self._resume(record, revision)
        if reason is not None:
            record = replace(record.off(self.now()), fault=f'{failed}: {reason}', power=power)
            log.error('instance %s: %s', record.instance, record.fault)
        else:
            guest = Guest(record.instance, self.compute, defined=True, running=True, disk=True)
            record = replace(self._seen(record, guest, why), power=power)
        self.records.write(record, revision)

    def _start_built(self, record: Record, revision: int) -> str | None:
        """Start a guest whose build had defined its domain; return its fault, or None once it runs.

        Nothing is removed on failure: the guest may have run while etcd could not be written.
        """
        log.info('START INSTANCE %s: its build had got as far as its domain', record.instance)
        reason = self._resume(record, revision)
        return None if reason is None else f'{NOT_STARTED}: {reason}'

    def _resume(self, record: Record, revision: int) -> str | None:
        """Start the domain; return None or why it failed. Raises WorkerDied to have it retried."""
        self.guest_data.off(record.instance)  # its ready report is from an earlier boot
        try:
            self._run(Resume(record.instance, self.compute))
        except Unreachable:
            raise
        except EcompError as error:
            record = replace(record, attempts=record.attempts + 1)
            if isinstance(error, WorkerDied) and record.attempts < ATTEMPTS:
                self.records.write(record, revision)
                raise
            return str(error.reason if isinstance(error, BuildFailed) else error)
        return None

    def _finish(self, job: Step) -> None:
        for _ in self.runner.run(job):
            pass

    def _run(self, job: Step) -> None:
        self._finish(job)
        failpoint('powered')

    def _seen(self, record: Record, guest: Guest | None, why: str) -> Record:
        """Return the record of a guest as observed; `boot_reason` counts if it is on and was off."""
        if guest is not None and guest.running:
            observed = record.on(why, self.now())
        else:
            self.guest_data.off(record.instance)
            observed = record.off(self.now())
        return replace(observed, fault=fault_of(record, guest))
