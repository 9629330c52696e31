"""Carry out the tasks of a compute's instances on libvirt, placement and etcd.

Every write about an instance compares the revision of its request (rule: compared-revision). Every task can be
repeated. A start or reboot is recorded before it is done. The module has more than 700 lines because the tasks share
private steps, and so are methods of one class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.instance import build as steps
from ecomp.agent.instance.build import Build, Cancelled, Destroy, Resize, Resume, Shutdown, Step, SwitchOff
from ecomp.agent.instance.plan import DOMAIN_AND_DISK_GONE, RESIZE_FAILED, UNMARKED, Kind, find_fault
from ecomp.agent.instance.pool import Runner
from ecomp.agent.instance.records import Records, Superseded
from ecomp.agent.jobs import run_aside
from ecomp.errors import BuildFailed, Conflict, EcompError, NoSpace, Unreachable, Unreadable, UsageError
from ecomp.failpoints import failpoint
from ecomp.metrics import TALLY
from ecomp.model import guest as model
from ecomp.model import keys, order
from ecomp.model import record as records
from ecomp.model.allocation import Allocations, describe_difference, to_wire
from ecomp.model.boots import CREATED, HOST_REBOOT, MANUAL
from ecomp.model.guest import UNDEFINED, Address, Attachment, BaseImage, Guest, GuestSpec, list_macs
from ecomp.model.json_object import dump, load_object
from ecomp.model.order import InvalidRequest, PowerAction, Request, get_holdings, parse_request
from ecomp.model.record import UNSEEN_END_FAULT, Failure, Interface, Record, copy_changes, copy_holdings, make_record
from ecomp.model.states import ACTIVE, BUILDING, DESTROYING, ERROR, GONE, STOPPED
from ecomp.model.text import make_printable
from ecomp.model.user_data import parse_shared_user_data
from ecomp.placement import allocations
from ecomp.placement.allocations import Consumer, release
from ecomp.placement.client import Placement
from ecomp.shared.attempts import read_settled_request
from ecomp.shared.names import change_charge
from ecomp.store.client import Delete, Put, Store, retry_until_committed
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)


def wait_for_answer(future: Future[Consumer]) -> Consumer:
    """Return placement's answer, and raise each EcompError as Unreachable."""
    try:
        return future.result()
    except Unreachable:
        raise
    except EcompError as error:  # the build is retried
        raise Unreachable(str(error)) from error


@dataclass(frozen=True)
class ControlPlane:
    """etcd and placement as one compute uses them, and a clock that returns ISO 8601 times."""

    compute: str
    store: Store
    placement: Placement
    now: Callable[[], str]
    query_aside: Callable[[Callable[[], Consumer]], Future[Consumer]] = lambda query: run_aside('confirm', query)


@dataclass(frozen=True)
class HostServices:
    hypervisor: Hypervisor
    runner: Runner
    guest_data: GuestData
    # Runs every minute.
    ensure_metadata_server: Callable[[], None] = lambda: None
    can_serve_metadata: Callable[[], bool] = lambda: False
    list_image_hashes: Callable[[], Collection[str]] = tuple


@dataclass(frozen=True)
class GuestTemplate:
    """The properties that all guests of this compute share."""

    virt_type: str
    # Without it a disk is as large as its image.
    resize: bool
    networks: tuple[Attachment, ...]
    # For a console's address.
    hostname: str
    # Returns the files of the NoCloud disk of the guest with this MAC. None: guests get no such disk.
    make_seed: Callable[[str], Mapping[str, bytes]] | None = None

    def make_spec(self, compute: str, request: Request) -> GuestSpec:
        """Return the guest to build for a request, without base, reserved addresses and seed."""
        amounts = request.guest_size
        return GuestSpec(
            instance=request.instance,
            compute=compute,
            vcpus=amounts['VCPU'],
            memory_mb=amounts['MEMORY_MB'],
            disk_gb=amounts['DISK_GB'] if self.resize else None,
            base=BaseImage('', '', 0),
            virt_type=self.virt_type,
            networks=self.networks,
            rebuilt=request.rebuild,
        )


def load_user_data(store: Store, request: Request) -> Request:
    """Return the request with user-data that is kept in etcd, or raise BuildFailed."""
    if request.user_data_sha256 is None:
        return request
    entry = store.get(keys.user_data(request.user_data_sha256))
    if entry is None:
        kept = 'etcd, which keeps the user-data of a set or of a queued request for 30 days after the request'
        raise BuildFailed('scheduled', f'its user-data is no longer in {kept}')
    try:
        return replace(request, user_data=parse_shared_user_data(entry.value, request.user_data_sha256))
    except ValueError as error:
        raise BuildFailed('scheduled', f'its user-data at {entry.key} is malformed: {error}') from error


# Attempts at a build that fails in an unknown way, and at a build or start during which a worker dies.
MAX_ATTEMPTS = 3


@dataclass
class Shutdowns:
    """When guests were asked to shut down (monotonic), for the planning thread only."""

    # The time until a guest is switched off. It begins again after a restart of ecompute.
    grace_seconds: float
    # The time until a guest is asked again, because one that boots ignores the request.
    retry_seconds: float
    # When each guest was asked first and last.
    request_times: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note_request(self, instance: str, now: float) -> None:
        self.request_times[instance] = self.request_times.get(instance, (now,))[0], now

    def find_actions(self, now: float) -> dict[str, Kind | None]:
        """Return the task that is now due for each guest that was asked, or None."""

        def decide(first: float, last: float) -> Kind | None:
            if now >= first + self.grace_seconds:
                return Kind.SWITCH_OFF
            return Kind.SHUTDOWN if now >= last + self.retry_seconds else None

        return {instance: decide(*times) for instance, times in self.request_times.items()}

    def find_times(self, after: float) -> list[float]:
        """Return the times after `after` at which another action becomes due."""
        times = [(first + self.grace_seconds, last + self.retry_seconds) for first, last in self.request_times.values()]
        return [when for pair in times for when in pair if when > after]

    def forget_all_but(self, running: Collection[str]) -> None:
        self.request_times = {each: times for each, times in self.request_times.items() if each in running}


def _get_power(request: Request) -> PowerAction:
    assert request.power is not None  # plan() makes power tasks only of requests with `power`
    return request.power


@dataclass
class _Attempt:
    """A build in progress: the last record, and whether a failure has to remove the guest."""

    request: Request
    revision: int
    record: Record
    must_remove: bool


# Tries to release a claim that other processes change concurrently.
MAX_RELEASE_TRIES = 5


class Instances:
    """The tasks for one compute's instances, where one thread at a time works on an instance.

    A task that raises Superseded has to be planned again, because the request has changed. A task that raises an
    EcompError or an OSError has to be retried later.
    """

    def __init__(self, control: ControlPlane, host: HostServices, template: GuestTemplate, memory: Memory) -> None:
        self.compute, self.store, self.placement = control.compute, control.store, control.placement
        self.now, self.query_aside = control.now, control.query_aside
        self.runner, self.hypervisor, self.guest_data = host.runner, host.hypervisor, host.guest_data
        self.template, self.memory = template, memory
        self.records = Records(control.compute, control.store, memory)
        # Called with the image when a build ends, with None for a success.
        self.on_build_end: Callable[[str, Failure | None], None] = lambda _image, _failure: None
        # Called before the claim of an adopted guest goes: from then on what the guest uses is reserved.
        self.on_release: Callable[[], None] = lambda: None

    def list_guests(self) -> Mapping[str, Guest]:
        """List the guests, add troubles for refused metadata, and delete refusals of other MACs."""
        guests, refusals = dict(self.hypervisor.list_guests()), self.guest_data.read_refusals()
        for instance, guest in [*guests.items()] if refusals else []:
            reasons = [refusals.pop(mac) for mac in list_macs(instance) if mac in refusals]
            if reasons and guest.running:
                guests[instance] = guest.with_trouble(model.GuestTrouble(model.REFUSED_METADATA, f': {reasons[0]}'))
        self.guest_data.remove_refusals(refusals)  # the remaining ones are of no guest here
        return guests

    def build(self, request: Request, revision: int, guest: Guest | None) -> None:
        """Build the guest once placement confirms its claim (rule: confirmed-claim).

        A guest that may have run is adopted instead. The instance ends in error after a failure with a known cause, or
        after MAX_ATTEMPTS other failures. Unreachable is not counted. A cancelled build raises Superseded.
        """
        instance = request.instance
        stored = self.records.get(instance)
        if stored is not None and stored.state in (ACTIVE, STOPPED):
            return  # planned before the record was written
        record = stored or make_record(self.compute, request, self.now())
        if stored is None:
            self.records.remove_stale_address(instance, revision, is_here=guest is not None)
        remembered = self.memory.get_entries().get(instance)
        is_build_begun = stored is not None or (remembered is not None and remembered.record.state == BUILDING)
        pending_failure = remembered.failure if remembered is not None else None
        if guest is not None and self._may_have_run(guest, is_build_begun, pending_failure):
            # No guest is rebuilt or removed because records are missing.
            self._adopt(record, revision, request, guest, has_lost_record=stored is None, start_if_off=is_build_begun)
            return
        if pending_failure is not None:
            # Keep the failure with which it was being ended: what is missing since then is a consequence.
            self._fail(record, revision, pending_failure, request=request)
            return
        # Placement takes as long as all writes before the build, so query it concurrently.
        confirmation = self.query_aside(partial(allocations.read_consumer, self.placement, instance))
        if record.state == BUILDING or remembered is not None:
            confirmation.result()  # a retry: repeat nothing until placement answers
        attempt = _Attempt(request, revision, record.enter_state(BUILDING, self.now()), must_remove=guest is not None)
        self.memory.remember(request, attempt.record)
        failpoint('remembered')
        try:
            self._carry_out(attempt, confirmation)
        except Cancelled:
            log.info('instance %s: its build was cancelled and undone', instance)
            self._release_host_data(instance)
            raise Superseded from None
        except (EcompError, OSError) as error:
            failure = self._find_failure(attempt, error)
            self._fail(attempt.record, revision, failure, attempt.must_remove, request)
        else:
            self._record_built(attempt)

    def _may_have_run(self, guest: Guest, is_build_begun: bool, pending_failure: Failure | None) -> bool:
        """Return False if the guest is off, and was left by an unfinished or failed build of ours."""
        # Built with our mark, or of no build that was begun here (a build is remembered first).
        is_ours = guest.is_built and guest.compute == self.compute
        return guest.running or (pending_failure is None and (is_ours or not is_build_begun))

    def rebuild(self, request: Request, revision: int, guest: Guest | None) -> None:
        """Build a guest in place of the one that is there, unless that was done.

        The instance keeps its claim, its name and its addresses. After a failure it has a fault, and its guest is as it
        was or, if its disk was removed before, off. A cancelled rebuild raises Superseded.
        """
        stored, begun = self.records.require(request.instance), f'{request.rebuild}{records.BEGUN}'
        is_defined = guest is not None and guest.rebuilt >= request.rebuild
        if is_defined and stored.rebuilt != begun:  # an older etcd, restored, lacks its end (rule: tombstone-only)
            older = replace(stored.mark_off(self.now()), image=request.image, host_keys=())
            ended = self._make_observed_record(older, guest, MANUAL)
        else:
            record = stored if stored.rebuilt == begun else replace(stored, rebuilt=begun, host_keys=(), attempts=0)
            self.memory.remember(request, record)
            attempt = _Attempt(request, revision, self.records.write(record, revision), must_remove=False)
            failpoint('rebuilding')
            ended = self._replace_guest(attempt, is_defined, stored.host_keys)
        record = replace(ended, rebuilt=str(request.rebuild))
        self.memory.remember(request, record)  # first: after a restore of etcd only this memory tells how far it is
        self.records.write(record, revision)
        log.info('instance %s is %s%s', record.instance, record.state, f': {record.fault}' if record.fault else '')

    def _replace_guest(self, attempt: _Attempt, is_defined: bool, host_keys: tuple[str, ...]) -> Record:
        instance, image = attempt.request.instance, attempt.request.image
        try:
            if is_defined:  # the process was killed before it recorded the end
                self._run_step(Resume(instance, self.compute))
            else:
                confirmation = self.query_aside(partial(allocations.read_consumer, self.placement, instance))
                self._carry_out(attempt, confirmation, is_rebuild=True)
        except Cancelled:
            raise Superseded from None
        except (EcompError, OSError) as error:
            failure = self._find_failure(attempt, error)
            record = self._make_observed_record(attempt.record, self.hypervisor.list_guests().get(instance), MANUAL)
            record = replace(record, fault=f'{order.REBUILD_FAILED}: {failure.reason}')
            is_kept = failure.stage in ('scheduled', 'image')  # what it had before is not removed
            return replace(record, host_keys=host_keys) if is_kept else replace(record, image=image)
        record = attempt.record.mark_off(self.now()).mark_running(Kind.REBUILD.value, self.now())
        return replace(self._mark_active(record), fault=None, image=image)

    def _carry_out(self, attempt: _Attempt, confirmation: Future[Consumer], is_rebuild: bool = False) -> None:
        request, revision = attempt.request, attempt.revision
        assert request.image is not None  # parse_request() rejects allocations without an image
        spec = self.template.make_spec(self.compute, request)
        attempt.record = record = self._reserve_addresses(attempt.record, spec)
        spec = replace(spec, reserved_addresses=tuple(interface.reservation for interface in record.addresses))
        self.guest_data.write(load_user_data(self.store, request), spec.macs, self.memory.get_entries)
        failpoint('seeded')
        if self.template.make_seed is not None:
            spec = replace(spec, seed=self.template.make_seed(spec.macs[0]))
        if claim_fault := describe_difference(request.allocations, wait_for_answer(confirmation).allocations):
            raise BuildFailed('scheduled', claim_fault)
        failpoint('confirmed')
        self.records.write(record, revision)
        failpoint('building')
        log.info('INSTANTIATE INSTANCE %s WITH IMAGE %s', request.instance, request.image)
        log.info('ALLOCATIONS ARE %s', to_wire(request.allocations))
        attempt.must_remove = True
        for event in self.runner.run(Build(spec, request.image, is_rebuild=is_rebuild)):
            if isinstance(event, records.Progress):
                attempt.record = self._record_progress(replace(attempt.record, progress=event), revision)
            elif event != 'started':
                reached = attempt.record.enter_state(attempt.record.state, self.now(), event)
                if event == 'disk':  # a guest before a rebuild is off, and may have reported
                    self.guest_data.remove_report(request.instance)
                    reached = replace(reached.mark_off(self.now()), state=reached.state)
                attempt.record = self._record_progress(reached, revision)

    def _record_built(self, attempt: _Attempt) -> None:
        request = attempt.request
        failpoint('built')
        record = self.records.write(self._mark_active(attempt.record), attempt.revision)
        self.memory.remember(request, record)
        TALLY.add('ecomp_builds_total')
        self.on_build_end(request.image or '', None)
        failpoint('active')
        log.info('instance %s is active', request.instance)

    def _find_failure(self, attempt: _Attempt, error: EcompError | OSError) -> Failure:
        """Return why an attempt has failed, or raise the error if another one may succeed."""
        if isinstance(error, Unreachable):
            raise error  # retried without limit
        if isinstance(error, BuildFailed):
            return Failure(error.stage, error.reason, '', error.is_host_fault)
        if isinstance(error, OSError):
            return Failure('image', f'{error.filename}: {error.strerror}', '', is_host_fault=True)
        if isinstance(error, Conflict | UsageError):
            # The build has undone its steps; the rest is not ecomp's.
            attempt.must_remove = False
            return Failure('started', str(error), '')
        record = attempt.record = replace(attempt.record, attempts=attempt.record.attempts + 1)
        if record.attempts < MAX_ATTEMPTS:
            self.records.write(record, attempt.revision)
            raise EcompError(f'instance {record.instance}: {error}') from error
        return Failure('started', f'{MAX_ATTEMPTS} attempts failed; the last one: {error}', '')

    def adopt(self, request: Request, revision: int) -> None:
        """Adopt a domain, or end in error if it is gone or its claim differs from the request."""
        instance, record = request.instance, make_record(self.compute, request, self.now())
        guest = self.hypervisor.list_foreign(instance).get(instance)
        claimed = allocations.read_consumer(self.placement, instance).allocations
        problem = 'its domain is gone' if guest is None else describe_difference(request.allocations, claimed)
        if guest is None or problem:
            self._fail(record, revision, Failure('scheduled', problem or '', ''), remove_guest=False)
            return
        self.hypervisor.set_adoption(instance, self.compute)
        failpoint('adopted')
        record = replace(record, addresses=tuple(Interface(*each) for each in guest.interfaces))
        # Its image and its disk are wherever its owner put them.
        record = record.enter_state(ACTIVE, self.now(), 'image', 'disk', 'started').mark_running(MANUAL, self.now())
        record = record if guest.is_running else record.mark_off(self.now())
        console = f'{self.template.hostname}:' if guest.has_console else None
        record = replace(record, console=console, fault=UNDEFINED if guest.is_transient else None)
        # First: another etcd knows the guest only by this memory.
        self.memory.remember(request, record)
        self.records.write(record, revision)
        log.info('instance %s is adopted, and %s', instance, record.state)

    def destroy(self, request: Request, revision: int) -> None:
        """Remove the guest, or release an adopted one, and keep its record for a day as `gone`."""
        instance = request.instance
        stored = self.records.get_to_end(instance)
        record = stored or make_record(self.compute, request, self.now())
        record = replace(copy_holdings(record, request), replaced_by=request.replaced_by)
        if stored is None:
            self.records.remove_stale_address(instance, revision, is_here=True)
        if record.state not in (DESTROYING, ERROR):  # a failed instance has nothing left, and its record is on a lease
            with suppress(NoSpace):  # a full etcd refuses the record; the destroy makes room
                record = self.records.write(record.enter_state(DESTROYING, self.now()), revision)
            failpoint('destroying')
        log.info('%s INSTANCE %s', 'RELEASE' if record.is_adopted else 'DESTROY', instance)
        self._remove(instance, None if record.is_adopted else Destroy(instance, self.compute))
        self.records.end(record.enter_state(GONE, self.now(), 'gone'), revision)
        log.info('instance %s is gone', instance)

    def find_forgotten(self, instances: Collection[str]) -> dict[str, Request]:
        """Return the last request of each instance whose destroy `host forget` has completed."""
        forgotten = {}
        for instance, entry in self.memory.get_entries().items():
            with suppress(Unreadable):
                record = self.records.get(instance) if instance in instances else None
                # The record, which is kept for a day, says so (rule: tombstone-only).
                if record is not None and (record.state, record.fault) == (GONE, UNSEEN_END_FAULT):
                    forgotten[instance] = entry.request
        return forgotten

    def destroy_forgotten(self, instance: str) -> None:
        """Remove a guest and all that belongs to it on this host, but keep its final record."""
        log.info('DESTROY INSTANCE %s: its destroy was accepted before this host was forgotten', instance)
        self._remove(instance, Destroy(instance, self.compute))
        self.records.forget(instance)
        self.memory.record_end(instance)

    def refuse(self, parsed: InvalidRequest, revision: int, guest: Guest | None) -> None:
        """End a malformed request in error, unless that would remove a guest."""
        instance, reason = parsed.instance, parsed.reason
        if not keys.is_uuid(instance):
            name = make_printable(keys.request(self.compute, instance), 200)
            log.error('%s: %s. Fix: remove this key with etcdctl', name, reason)
            return
        record = self.records.get(instance)
        if record is not None and record.state == BUILDING and guest is not None and guest.is_built:
            record = self._mark_active_or_stopped(record, guest)
        if record is not None and record.state in (ACTIVE, STOPPED, DESTROYING):
            log.error('instance %s: its request became malformed, so it is ignored: %s', instance, reason)
            fault = f'its request is malformed: {reason}'
            if record.fault != fault:
                self.records.write(replace(record, fault=fault), revision)
            return
        if guest is not None and (record is None or guest.is_built):
            log.error('instance %s: its request is malformed, but its guest is kept: %s', instance, reason)
            return
        if record is None:
            self.records.remove_stale_address(instance, revision, is_here=False)
            # The holdings are read from etcd if they are empty, and stay empty if the key is gone.
            key, has_holdings = keys.request(self.compute, instance), parsed.holdings != order.Holdings()
            if not has_holdings and (entry := self.store.get(key)) is not None:
                parsed = parsed._replace(holdings=get_holdings(parse_request(self.compute, entry.key, entry.value)))
            record = records.make_refused_record(self.compute, parsed, self.now())
        self._fail(record, revision, Failure('scheduled', reason, ''))  # also removes a disk without a domain

    def end_without_request(self, instance: str, guest: Guest | None) -> None:
        """End a build whose request was deleted, but keep a built guest, with a fault."""
        record, remembered = self.records.get(instance), self.memory.get_entries().get(instance)
        last = record or (remembered.record if remembered else None)
        if last is None or last.state != BUILDING or self.store.get(keys.request(self.compute, instance)) is not None:
            return
        reason = 'its request was deleted during its build'
        if guest is not None and guest.is_built:
            if record is not None:
                self.records.write(replace(self._mark_active_or_stopped(record, guest), fault=reason), 0)
        elif record is not None:
            self._fail(record, 0, Failure('scheduled', reason, ''), remove_guest=guest is not None)
        else:  # it may have ended long ago: nothing is written to etcd
            self._remove(instance, Destroy(instance, self.compute) if guest is not None else None)
            self.memory.record_end(instance)

    def drop_request(self, instance: str, revision: int, reason: str) -> None:
        """Delete a request that is not carried out, with its claim and, unless it failed, its name."""
        record = self.records.get(instance)
        kept_name = record.name if record is not None and record.state == ERROR else None
        self.records.drop_request(instance, revision, kept_name)
        log.error('instance %s: its request was deleted without being carried out: %s', instance, reason)
        self._release_claim(instance)

    def end_vanished(self, request: Request, revision: int) -> None:
        """End an instance as `gone` whose domain and disk were removed outside ecomp."""
        instance = request.instance
        record = copy_holdings(self.records.require(instance), request)
        self._remove(instance, None if record.is_adopted else steps.RemoveLeftovers(instance, self.compute))
        fault = UNMARKED if record.is_adopted else DOMAIN_AND_DISK_GONE
        self.records.end(replace(record.enter_state(GONE, self.now(), 'gone'), fault=fault), revision)
        log.warning('instance %s is gone, outside ecomp: %s', instance, fault)

    def record_addresses(self, instance: str, revision: int, addresses: Mapping[str, Address]) -> None:
        """Record these addresses by MAC, and write that of the first interface at /booted."""
        record = self.records.require(instance)
        pairs = [(each, addresses.get(each.mac)) for each in record.addresses]
        interfaces = tuple(old._replace(address=new.address, source=new.source) if new else old for old, new in pairs)
        record, operations = replace(record, addresses=interfaces), list[Put | Delete]()
        if (first_address := record.address) is not None:
            record = record.mark_stage('addressed', self.now())
            operations.append(Put(keys.address(instance), first_address))
        self.records.write(record, revision, operations)
        failpoint('addressed')
        for interface in interfaces:
            log.info('instance %s has address %s on %s', instance, interface.address or '(none yet)', interface.network)

    def record_ready(self, instance: str, revision: int) -> None:
        """Record the guest's host keys, and that it is ready or how its cloud-init failed."""
        previous, now = self.records.require(instance), self.now()
        report = self.guest_data.read_report(instance)
        failure = report.failure
        # Host keys that were reported first count, whatever a later boot reports. A guest that reports has an address.
        record = replace(previous, host_keys=previous.host_keys or report.host_keys, cloud_init=failure)
        record = record.mark_stage('addressed', now)
        if failure is None:
            self.records.write(record.mark_stage('ready', now), revision)
            log.info('instance %s is ready', instance)
        else:
            self.records.write(record, revision)
            log.warning('instance %s: its cloud-init failed at stage %s: %s', instance, failure.stage, failure.reason)

    def resize(self, request: Request, revision: int, guest: Guest | None) -> None:
        """Define the domain for the requested size, and let its disk grow, or record why not."""
        record, fault, change = self.records.require(request.instance), None, request.resize
        if record.resize is not None and guest is not None and guest.runs_with(record.resize.resources):
            record = replace(record, resources=record.resize.resources)  # it has started with the change before this
        try:
            self._run_step(Resize(request.instance, self.compute, self.template.make_spec(self.compute, request)))
        except Unreachable:
            raise
        except EcompError as error:
            fault = f'{RESIZE_FAILED}: {error.reason if isinstance(error, BuildFailed) else error}'
            change = change and change._replace(resources={})  # not again, and it is unknown what its domain has now
            log.error('instance %s: %s', request.instance, fault)
        kept = None if (record.fault or '').startswith(RESIZE_FAILED) else record.fault
        record = self.records.write(replace(record, resize=change, fault=fault or kept), revision)
        self.memory.remember(request, record)

    def end_resize(self, request: Request, revision: int) -> None:
        """Set record, request, quota and claim to the new size, with which the guest has started."""
        assert request.resize is not None
        instance, size = request.instance, request.resize.resources
        key = keys.request(self.compute, instance)
        entry = self.store.get(key)
        if entry is None or entry.revision != revision:
            raise Superseded
        request, before = replace(request, allocations=request.allocate(size), resize=None), request.resources
        value = dump({**load_object(entry.value), 'allocations': to_wire(request.allocations), 'resize': None})
        record = replace(self.records.require(instance), resources=size, resize=None)
        charge = partial(change_charge, self.store, request.project_id, before, size)
        self.memory.remember(request, self.records.write(record, revision, [Put(key, value)], charge))
        failpoint('resized')
        log.info('instance %s has its new size', instance)
        read_request = partial(read_settled_request, self.store, self.compute, instance)
        with suppress(EcompError):  # then the check of claims does it
            allocations.correct_claim(self.placement, instance, read_request)

    def record_changes(self, request: Request, revision: int) -> None:
        record = self.records.write(copy_changes(self.records.require(request.instance), request), revision)
        self.memory.remember(request, record)

    def record_power(self, instance: str, revision: int, guest: Guest | None) -> None:
        record = self._make_observed_record(self.records.require(instance), guest, MANUAL)
        self.records.write(record, revision)
        log.info('instance %s is %s%s', instance, record.state, f': {record.fault}' if record.fault else '')

    def start_after_reboot(self, instance: str, revision: int) -> None:
        """Start a guest that ran when the host went down, and record a failure as its fault."""
        record = self.records.require(instance)
        log.info('START INSTANCE %s: it ran when the host went down', instance)
        # Its stop was not recorded. Attempts counted before that stop belong to an earlier start.
        stopped = record.mark_off(self.now())
        attempts = record.attempts if stopped.last_boot == record.last_boot else 0
        record = replace(stopped, state=record.state, attempts=attempts)
        self._start(record, revision, record.power, HOST_REBOOT, f'{order.START_FAILED} after the host was rebooted')

    def shut_down(self, request: Request, revision: int) -> None:
        """Record SHUTDOWN_REQUESTED, then ask the guest to shut down, and only log a refusal."""
        if self._record_phase(request, revision, order.SHUTDOWN_REQUESTED):
            log.info('SHUT DOWN INSTANCE %s: its %s was requested', request.instance, _get_power(request).action)
        try:
            self._run_power_step(Shutdown(request.instance, self.compute))
        except Unreachable:
            raise
        except EcompError as error:
            log.warning('instance %s: its guest cannot be asked to shut down: %s', request.instance, error)

    def switch_off(self, request: Request, revision: int) -> None:
        self._record_phase(request, revision, order.SHUTDOWN_REQUESTED)
        log.warning('SWITCH OFF INSTANCE %s: its guest did not shut down in time', request.instance)
        self._run_power_step(SwitchOff(request.instance, self.compute))

    def start(self, request: Request, revision: int) -> None:
        self._record_phase(request, revision, order.SHUT_OFF)
        power = _get_power(request)
        log.info('START INSTANCE %s: its %s was requested', request.instance, power.action)
        self._start(self.records.require(request.instance), revision, power.id, power.action, order.START_FAILED)

    def record_power_done(self, request: Request, revision: int, guest: Guest | None) -> None:
        """Record the guest's state and its power action's id, so that the action is not repeated."""
        power = _get_power(request)
        observed = self._make_observed_record(self.records.require(request.instance), guest, power.action)
        record = self.records.write(replace(observed, power=power.id), revision)
        self.memory.remember(request, record)
        log.info('instance %s is %s, as requested', request.instance, record.state)

    def _adopt(
        self, record: Record, revision: int, request: Request, guest: Guest, has_lost_record: bool, start_if_off: bool
    ) -> None:
        """Record and remember a guest that exists, with faults for a lost record and a wrong claim."""
        remembered = self.memory.get_entries().get(record.instance)
        if has_lost_record and request.power is not None:
            # The power action may have been done long ago: only our own memory can tell that it was not.
            record = replace(record, power=remembered.record.power if remembered else request.power.id)
        if has_lost_record and remembered:
            record = replace(record, rebuilt=remembered.record.rebuilt)  # likewise
        consumer = allocations.read_consumer(self.placement, request.instance)
        claim_fault = describe_difference(request.allocations, consumer.allocations)
        spec = self.template.make_spec(self.compute, request)
        if not record.addresses:
            interfaces = tuple(Interface(name, mac) for mac, (_, name) in zip(spec.macs, spec.networks, strict=True))
            record = replace(record, addresses=interfaces)
            with suppress(BuildFailed):  # the guest keeps the address that it has
                record = self._reserve_addresses(record, spec)
        record = replace(record, fault='its record was lost' if has_lost_record else record.fault)
        is_off, faults = not guest.running, [record.fault, claim_fault]
        if is_off and start_if_off and not claim_fault:
            log.info('START INSTANCE %s: its build was interrupted after it had defined the domain', record.instance)
            reason = self._resume(record.enter_state(BUILDING, self.now()), revision)
            is_off = reason is not None
            faults = [f'{order.START_FAILED}: {reason}' if is_off else None, *faults]
        record = replace(self._mark_active(record), fault='; '.join(filter(None, faults)) or None)
        # If it ran when last remembered, the next plan sees that it is off, or starts it after a reboot.
        if is_off and not (remembered is not None and remembered.record.state == ACTIVE):
            record = record.mark_off(self.now())
        self.records.write(record, revision)
        self.memory.remember(request, record)
        log.info('instance %s is %s%s', record.instance, record.state, f': {record.fault}' if record.fault else '')

    def _reserve_addresses(self, record: Record, spec: GuestSpec) -> Record:
        interfaces, earlier = [], {interface.mac: interface for interface in record.addresses}
        for mac, (kind, name) in zip(spec.macs, spec.networks, strict=True):
            reserved = self.hypervisor.reserve_address(record.instance, mac, name) if kind == 'network' else None
            interfaces.append(earlier.get(mac, Interface(name, mac))._replace(network=name, reservation=reserved))
        failpoint('reserved')
        return replace(record, addresses=tuple(interfaces))

    def _mark_active(self, record: Record) -> Record:
        console = self.hypervisor.get_console_path(record.instance)
        record = replace(record, console=f'{self.template.hostname}:{console}' if console else None)
        # A running guest has its image and its disk, even if those stages could not be recorded in time.
        now = self.now()
        return record.enter_state(ACTIVE, now, 'image', 'disk', 'started').mark_running(CREATED, now)

    def _mark_active_or_stopped(self, record: Record, guest: Guest) -> Record:
        record = self._mark_active(record)
        return record if guest.running else record.mark_off(self.now())

    def _record_progress(self, record: Record, revision: int) -> Record:
        """Write the record and return it, but cancel the build if its request has changed."""
        try:
            return self.records.write(record, revision)
        except Superseded:
            self.runner.cancel(record.instance)
        except Unreachable as error:
            log.debug('instance %s: its progress is written later: %s', record.instance, error)
        return record

    def _fail(
        self, record: Record, revision: int, failure: Failure, remove_guest: bool = True, request: Request | None = None
    ) -> None:
        """End an instance in error: remember the failure, remove its leftovers, then record that."""
        if request is not None and request.image is not None:
            self.on_build_end(request.image, failure)  # before its user sees the failure, and tries again
        self.memory.remember(request, record, failure)
        failpoint('failing')
        self._remove(record.instance, Destroy(record.instance, self.compute) if remove_guest else None)
        failure = replace(failure, cleaned='nothing remains: no domain, disk or allocation')
        record = replace(record.enter_state(ERROR, self.now(), 'error'), error=failure, addresses=())
        log.error('instance %s failed at stage %s: %s', record.instance, failure.stage, failure.reason)
        self.records.end(record, revision)
        TALLY.add('ecomp_build_failures_total', failure.stage)

    def _remove(self, instance: str, job: Step | None) -> None:
        """Run the job, or unmark an adopted domain, then release addresses, files and claim."""
        domain = self.hypervisor.list_foreign(instance).get(instance)
        if domain is not None and (job is None or domain.adopted_by):
            self.hypervisor.set_adoption(instance, None)
            self.on_release()  # also if its mark went in an earlier try
        elif job is not None:
            self._run_step(job)
            failpoint('removed')
        self._release_host_data(instance)
        failpoint('unreserved')
        self._release_claim(instance)
        failpoint('released')

    def _release_host_data(self, instance: str) -> None:
        self.guest_data.remove(instance, list_macs(instance))
        failpoint('forgotten')
        self.hypervisor.release_addresses(instance)

    def _release_claim(self, instance: str) -> None:
        def find_claims_elsewhere(holding: Mapping[str, Allocations]) -> Collection[str]:
            return [consumer for consumer, held in holding.items() if self.compute not in held]

        def attempt() -> bool | None:
            return release(self.placement, [instance], find_claims_elsewhere)[instance] is not False or None

        reason = f'its claim in placement changed concurrently in each of {MAX_RELEASE_TRIES} tries'
        retry_until_committed(attempt, Unreachable(f'instance {instance}: {reason}'), MAX_RELEASE_TRIES)

    def _record_phase(self, request: Request, revision: int, phase: str) -> bool:
        """Record the phase of a power action, and return False if it was recorded before."""
        record, power = self.records.require(request.instance), _get_power(request).format_phase(phase)
        is_new = record.power != power
        if is_new:
            record = record.mark_off(self.now()) if phase == order.SHUT_OFF else record
            record = self.records.write(replace(record, power=power, attempts=0), revision)
            self.memory.remember(request, record)
        failpoint('powering')
        return is_new

    def _start(self, record: Record, revision: int, power: str | None, boot_reason: str, fault_prefix: str) -> None:
        reason = self._resume(record, revision)
        if reason is not None:
            record = replace(record.mark_off(self.now()), fault=f'{fault_prefix}: {reason}', power=power)
            log.error('instance %s: %s', record.instance, record.fault)
        else:
            guest = Guest(record.instance, self.compute, defined=True, running=True, disk=True)
            record = replace(self._make_observed_record(record, guest, boot_reason), power=power)
        self.records.write(record, revision)

    def _resume(self, record: Record, revision: int) -> str | None:
        """Start the domain, and return why that failed, or None, for the caller to record.

        Superseded, Unreachable and, before MAX_ATTEMPTS, WorkerDied are raised: then the task is to be repeated.
        """
        # If this host was silent since the plan, another one may have the instance: no start without a look at etcd.
        self.records.require_revision(record.instance, revision)
        self.guest_data.remove_report(record.instance)
        try:
            self._run_power_step(Resume(record.instance, self.compute))
        except Unreachable:
            raise
        except EcompError as error:
            record = replace(record, attempts=record.attempts + 1)
            if isinstance(error, steps.WorkerDied) and record.attempts < MAX_ATTEMPTS:
                self.records.write(record, revision)
                raise
            return str(error.reason if isinstance(error, BuildFailed) else error)
        return None

    def _run_step(self, job: Step) -> None:
        for _ in self.runner.run(job):
            pass

    def _run_power_step(self, job: Step) -> None:
        self._run_step(job)
        failpoint('powered')

    def _make_observed_record(self, record: Record, guest: Guest | None, boot_reason: str) -> Record:
        """Return the record as active or stopped, with fault, and remove a stopped guest's report."""
        if guest is not None and guest.running:
            observed = record.mark_running(boot_reason, self.now())
        else:
            self.guest_data.remove_report(record.instance)
            observed = record.mark_off(self.now())
        return replace(observed, fault=find_fault(record, guest))
