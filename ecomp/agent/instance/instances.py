"""Carry out one task of one instance on libvirt, placement and the record; a guest on, off, and on again.

Every write about an instance is a transaction that compares its /hosts key's revision (rule 5): if the request has
changed in the meantime nothing is written, and the next plan sees the new one. Every step can be repeated. A start or
reboot that has begun is in the record before it is done.
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
    """The request that is refused with what it shares, which may be in a value that was not kept: that is read once."""
    entry = store.get(keys.request(compute, wish.instance)) if wish.shares == Shares() else None
    return wish if entry is None else wish._replace(shares=shares(parse_request(compute, entry.key, entry.value)))


def aside(ask: Callable[[], Consumer]) -> Future[Consumer]:
    """Have this asked by a thread of its own, or by this one where none can be started; the future has its errors."""
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
    """What placement said. Unreachable for whatever else it answers: it is no reason to end a build, and waited for."""
    try:
        return asked.result()
    except Unreachable:
        raise
    except EcompError as error:
        raise Unreachable(str(error)) from error


@dataclass(frozen=True)
class ControlPlane:
    """etcd and placement, as the compute of this uuid has them. `now` gives ISO 8601 times.

    `aside` has placement asked while something else is done.
    """

    compute: str
    store: Store
    placement: Placement
    now: Callable[[], str]
    aside: Callable[[Callable[[], Consumer]], Future[Consumer]] = aside


@dataclass(frozen=True)
class Host:
    """The hypervisor, what carries out jobs on it, and what the metadata server is told of guests.

    `look_after` is called every minute; `serves_metadata` says whether a guest here could ask a metadata server.
    """

    hypervisor: Hypervisor
    runner: Runner
    guest_data: GuestData
    look_after: Callable[[], None] = lambda: None
    serves_metadata: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Shape:
    """What this compute gives every guest. `hostname` is where its console log is.

    `seed` says what is on the NoCloud disk of the guest with a MAC, BuildFailed; None where guests get no such disk.
    """

    virt_type: str
    resize: bool
    networks: tuple[Attachment, ...]
    hostname: str
    seed: Callable[[str], Mapping[str, bytes]] | None = None

    def spec(self, compute: str, request: Request) -> GuestSpec:
        """The guest to make of a request to this compute; its base, its addresses and its seed are not known yet."""
        asked = total(request.allocations)
        return GuestSpec(
            instance=request.instance,
            compute=compute,
            vcpus=asked['VCPU'],
            memory_mb=asked['MEMORY_MB'],
            disk_gb=asked['DISK_GB'] if self.resize else None,
            base=BaseImage('', '', 0),
            virt_type=self.virt_type,
            networks=self.networks,
        )


def with_user_data(store: Store, request: Request) -> Request:
    """The request with the user-data that it shares with the others of its set. BuildFailed where that is gone."""
    if request.user_data_sha256 is None:
        return request
    entry = store.get(keys.user_data(request.user_data_sha256))
    if entry is None:
        raise BuildFailed('scheduled', 'its user-data is not in etcd any more: that of a set is kept for a week')
    try:
        return replace(request, user_data=shared_user_data(entry.value, request.user_data_sha256))
    except ValueError as error:
        raise BuildFailed('scheduled', f'its user-data, {entry.key}: {error}') from error


ATTEMPTS = 3
"""How often something is tried of which a worker dies, or that fails in an unknown way."""


class Shutdowns:
    """Which guests were asked to turn themselves off, and when; the planning thread's.

    Asked `again` seconds later once more, for one that is starting does not listen; no longer than `grace` in all. Not
    written down anywhere: after a restart a guest has all its time once more.
    """

    def __init__(self, grace: float, again: float) -> None:
        self._grace = grace
        self._again = again
        self._asked: dict[str, tuple[float, float]] = {}

    def note_asked(self, instance: str, now: float) -> None:
        """Note that a guest has just been asked. `now` is on the monotonic clock, as all times here."""
        first, _ = self._asked.get(instance, (now, now))
        self._asked[instance] = first, now

    def patience(self, now: float) -> dict[str, Patience]:
        """What is due of each guest that was asked: {instance: Patience}."""
        return {instance: self._due(first, last, now) for instance, (first, last) in self._asked.items()}

    def next(self, after: float) -> list[float]:
        """The times after that moment at which something will be due."""
        times = [when for first, last in self._asked.values() for when in (first + self._grace, last + self._again)]
        return [when for when in times if when > after]

    def keep(self, running: Collection[str]) -> None:
        """Forget all but these, which run still: the others have done what they were asked."""
        self._asked = {instance: times for instance, times in self._asked.items() if instance in running}

    def _due(self, first: float, last: float, now: float) -> Patience:
        if now >= first + self._grace:
            return Patience.NO_MORE
        return Patience.ASK_AGAIN if now >= last + self._again else Patience.WAIT


def _power(request: Request) -> Power:
    assert request.power is not None  # plan() plans nothing of the kind without
    return request.power


RELEASES = 5
"""How often a release is tried at once that loses its race."""


class Instances:
    """The tasks of one compute. Each instance is worked on by one thread at a time; instances run in parallel.

    Errors of every task: Superseded, Unreachable (do it again later).
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
        """Return what is here of each instance; the trouble of those whose metadata is refused says why."""
        found, refusals = dict(self.hypervisor.guests()), self.guest_data.read_refusals()
        for instance, guest in [*found.items()] if refusals else []:
            why = [refusals.pop(mac) for mac in all_macs(instance) if mac in refusals]
            if why and guest.running:
                found[instance] = guest.with_trouble(f'{REFUSED_METADATA}: {why[0]}')
        self.guest_data.forget_refusals(refusals)  # those of nobody here
        return found

    def build(self, request: Request, revision: int, guest: Guest | None) -> None:
        """Make the guest, if placement confirms the request (rule 2)."""
        instance = request.instance
        known = self.records.get(instance)
        if known is not None and known.state in (ACTIVE, STOPPED):
            return  # planned before this was written
        record = known or new_record(self.compute, request, self.now())
        if known is None:
            self.records.lost(instance, revision, is_here=guest is not None)
        before = self.memory.all().get(instance)
        is_begun = known is not None or (before is not None and before.record.state == BUILDING)
        failing = before.failure if before is not None else None
        is_ours = guest is not None and guest.is_built and guest.compute == self.compute
        if guest is not None and (guest.running or (failing is None and (is_ours or not is_begun))):
            # A build of ours is remembered first, so without that this guest is older than what is known; one that runs
            # is done; another that is built may have run. None is built over, or taken down over bookkeeping.
            self._adopt(record, revision, request, guest, lost=known is None, starts=is_begun)
            return
        fail, made = partial(self._fail, request=request), guest is not None
        if failing is not None:
            # It was ending when etcd, or this process, went away. What it has released already is no reason of its own.
            fail(record, revision, failing)
            return
        # Placement takes as long as all that is written before the build: it is asked meanwhile.
        asked = self.aside(partial(allocations.consumer, self.placement, instance))
        if record.state == BUILDING or before is not None:
            asked.result()  # tried before: as long as placement does not answer nothing is done again
        record = record.at(BUILDING, self.now())
        self.memory.remember(request, record)
        failpoint('remembered')
        spec = self.shape.spec(self.compute, request)
        assert request.image is not None  # parse_request() lets no other request with allocations through
        try:
            record = self._reserve(record, spec)
            spec = replace(spec, reserved=tuple(each.expected for each in record.addresses))
            self.guest_data.write(with_user_data(self.store, request), spec.macs, self.memory.all)
            failpoint('seeded')
            if self.shape.seed is not None:
                spec = replace(spec, seed=self.shape.seed(spec.macs[0]))
            differs = difference(request.allocations, answer(asked).allocations)
            if differs:
                raise BuildFailed('scheduled', differs)
            failpoint('confirmed')
            record = self.records.write(record, revision)
            failpoint('building')
            log.info('INSTANTIATE INSTANCE %s WITH IMAGE %s', instance, request.image)
            log.info('ALLOCATIONS ARE %s', to_wire(request.allocations))
            made = True
            for news in self.runner.run(Build(spec, request.image)):
                if isinstance(news, Progress):
                    record = self._noted(replace(record, progress=news), revision)
                elif news != 'started':
                    record = self._noted(record.at(BUILDING, self.now(), news), revision)
        except Cancelled:
            log.info('instance %s: its build was stopped and is undone', instance)
            self._forget(instance)
            raise Superseded from None
        except BuildFailed as error:
            fail(record, revision, Failure(error.stage, error.reason, ''), touched=made)
        except OSError as error:
            fail(record, revision, Failure('image', f'{error.filename}: {error.strerror}', ''), touched=made)
        except (Conflict, UsageError) as error:
            # The build has undone what it made; the rest is somebody else's.
            fail(record, revision, Failure('started', str(error), ''), touched=False)
        except Unreachable:
            raise  # waited for as long as it takes
        except EcompError as error:
            # A dead worker, or a failure nobody has a name for: it may pass, and it may not.
            record = replace(record, attempts=record.attempts + 1)
            if record.attempts < ATTEMPTS:
                self.records.write(record, revision)
                raise EcompError(f'instance {instance}: {error}') from error
            fail(record, revision, Failure('started', f'{error}, {ATTEMPTS} times', ''), touched=made)
        else:
            failpoint('built')
            record = self.records.write(self._up(record), revision)
            self.memory.remember(request, record)
            failpoint('active')
            log.info('instance %s is active', instance)

    def destroy(self, request: Request, revision: int) -> None:
        """Remove the guest and everything of it; its record stays a day as `gone`, whatever it was before."""
        instance = request.instance
        known = self.records.to_end(instance)
        record = known or new_record(self.compute, request, self.now())
        if known is None:
            self.records.lost(instance, revision, is_here=True)
        if record.state not in (DESTROYING, ERROR):  # what failed has nothing left, and its record is on a lease
            with suppress(NoSpace):  # a full etcd takes no record; what is destroyed gives it room
                record = self.records.write(record.at(DESTROYING, self.now()), revision)
            failpoint('destroying')
        log.info('DESTROY INSTANCE %s', instance)
        self._remove(instance, Destroy(instance, self.compute))
        self.records.end(record.at(GONE, self.now(), 'gone'), revision)
        log.info('instance %s is gone', instance)

    def refuse(self, wish: Invalid, revision: int, guest: Guest | None) -> None:
        """A request that cannot be understood ends in error, with the reason; a guest that is there stays."""
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
        self._fail(record, revision, Failure('scheduled', reason, ''))  # and with it a disk without a domain

    def end_without_request(self, instance: str, guest: Guest | None) -> None:
        """A build that was stopped and whose request is gone, by hand: it ends in error and says so.

        A guest that got there is kept, and its record says that it lives. Where etcd has no record of it, only what was
        begun here is taken back: it may have ended long since.
        """
        record, remembered = self.records.get(instance), self.memory.all().get(instance)
        begun = record or (remembered.record if remembered else None)
        if begun is None or begun.state != BUILDING or self.store.get(keys.request(self.compute, instance)) is not None:
            return
        deleted = 'its request was deleted while it was being built'
        if guest is not None and guest.is_built:
            if record is not None:
                self.records.write(replace(self._as_it_is(record, guest), fault=deleted), 0)
        elif record is not None:
            self._fail(record, 0, Failure('scheduled', deleted, ''), touched=guest is not None)
        else:
            self._remove(instance, Destroy(instance, self.compute) if guest is not None else None)
            self.memory.ended(instance)

    def clear(self, instance: str, revision: int, reason: str) -> None:
        """Drop a request that is not to be carried out; what is recorded of the instance stays as it is."""
        record = self.records.get(instance)
        self.records.drop(instance, revision, record.name if record is not None and record.state == ERROR else None)
        log.error('instance %s: request dropped: %s', instance, reason)
        self._release(instance)

    def vanished(self, instance: str, revision: int) -> None:
        """End an instance of whom neither domain nor disk is left, though nobody asked: its claim goes, too."""
        record = self.records.known(instance)
        self._remove(instance, Forget(instance, self.compute))
        self.records.end(replace(record.at(GONE, self.now(), 'gone'), fault=GONE_BOTH), revision)
        log.warning('instance %s is gone: its domain and its disk were removed by somebody else', instance)

    def address(self, instance: str, revision: int, addresses: Mapping[str, Address]) -> None:
        """Write down the addresses a guest has; the first interface's also at /booted, as in 2019."""
        record = self.records.known(instance)
        interfaces = tuple(
            replace(each, address=addresses[each.mac].address, source=addresses[each.mac].source)
            if each.mac in addresses
            else each
            for each in record.addresses
        )
        record = replace(record, addresses=interfaces)
        extra: list[Put | Delete] = []
        first = record.address
        if first is not None:
            record = record.has('addressed', self.now())
            extra.append(Put(keys.booted(instance), first))
        self.records.write(record, revision, extra)
        failpoint('addressed')
        for each in interfaces:
            log.info('instance %s has address %s on %s', instance, each.address or 'none yet', each.network)

    def ready(self, instance: str, revision: int) -> None:
        """Write down that cloud-init has finished in the guest, or what failed in it, and the guest's host keys."""
        known, now = self.records.known(instance), self.now()
        try:
            word = self.guest_data.word(instance)
        except OSError as error:
            raise EcompError(f'{error.filename}: {error.strerror}') from error
        # What it said of itself first counts, whoever speaks in a later boot; and who speaks has an address.
        record = replace(known, host_keys=known.host_keys or word.host_keys, cloud_init=word.failed)
        record = record.has('addressed', now)
        if word.failed is None:
            self.records.write(record.has('ready', now), revision)
            log.info('instance %s is ready', instance)
        else:
            self.records.write(record, revision)
            log.warning(
                'instance %s: its cloud-init failed at stage %s: %s', instance, word.failed.stage, word.failed.reason
            )

    def note_power(self, instance: str, revision: int, guest: Guest | None) -> None:
        """Write down that a guest went off, or came on, and what is wrong with it."""
        record = self.records.write(self._seen(self.records.known(instance), guest, BY_HAND), revision)
        log.info('instance %s is %s%s', instance, record.state, f': {record.fault}' if record.fault else '')

    def resume(self, instance: str, revision: int) -> None:
        """Start a guest that ran when the host went down; if that fails, its record says why."""
        record = self.records.known(instance)
        log.info('START INSTANCE %s: it ran when the host went down', instance)
        # It ran as its record says, and nobody saw it go off. What workers died of before that is not of this start.
        off = record.off(self.now())
        record = replace(off, state=record.state, attempts=record.attempts if off.boots == record.boots else 0)
        self._start(record, revision, record.power, AFTER_HOST, f'{NOT_STARTED} after the host was rebooted')

    def shut_down(self, request: Request, revision: int) -> None:
        """Ask a guest to turn itself off. If that fails it was asked in vain, as one is that does not listen."""
        if self._begin(request, revision, ASKED):
            log.info('SHUT DOWN INSTANCE %s: its %s was asked for', request.instance, _power(request).action)
        try:
            self._run(Shutdown(request.instance, self.compute))
        except Unreachable:
            raise
        except EcompError as error:
            log.warning('instance %s cannot be asked to turn itself off: %s', request.instance, error)

    def switch_off(self, request: Request, revision: int) -> None:
        """End a guest that was asked to turn itself off, and did not. The next plan finds it off."""
        self._begin(request, revision, ASKED)
        log.warning('SWITCH OFF INSTANCE %s: it was asked to turn itself off, and did not', request.instance)
        self._run(SwitchOff(request.instance, self.compute))

    def start(self, request: Request, revision: int) -> None:
        """Start a guest that is off, as was asked; if that fails, its record says why, and it is not tried again."""
        self._begin(request, revision, OFF)
        power = _power(request)
        log.info('START INSTANCE %s: its %s was asked for', request.instance, power.action)
        self._start(self.records.known(request.instance), revision, power.id, power.action, NOT_STARTED)

    def power_done(self, request: Request, revision: int, guest: Guest | None) -> None:
        """Write down that a guest's power is as was asked."""
        power = _power(request)
        record = replace(self._seen(self.records.known(request.instance), guest, power.action), power=power.id)
        self.records.write(record, revision)
        self.memory.remember(request, record)
        log.info('instance %s is %s, as was asked', request.instance, record.state)

    def _adopt(self, record: Record, revision: int, request: Request, guest: Guest, lost: bool, starts: bool) -> None:
        """Write down a guest that is there already; what placement says otherwise is its fault, in words.

        `lost`: its record was. `starts`: if it is off it is still to be started.
        """
        remembered = self.memory.all().get(record.instance)
        if lost and request.power is not None:
            # What was asked of its power may have been done long ago: only our own memory can say that it was not.
            record = replace(record, power=remembered.record.power if remembered else request.power.id)
        held = allocations.consumer(self.placement, request.instance)
        differs = difference(request.allocations, held.allocations)
        spec = self.shape.spec(self.compute, request)
        if not record.addresses:
            plain = tuple(Interface(name, mac) for mac, (_, name) in zip(spec.macs, spec.networks, strict=True))
            record = replace(record, addresses=plain)
            with suppress(BuildFailed):  # it has whatever address it has
                record = self._reserve(record, spec)
        record = replace(record, fault='its record was lost' if lost else record.fault)
        starts = starts and not (guest.running or differs)
        failed = self._start_built(record.at(BUILDING, self.now()), revision) if starts else None
        faults = failed, record.fault, differs
        record = replace(self._up(record), fault='; '.join(filter(None, faults)) or None)
        is_off = not guest.running and (not starts or failed)
        # One that ran when it was last written down is seen to be off, or started after a reboot, by the next plan.
        if is_off and not (remembered is not None and remembered.record.state == ACTIVE):
            record = record.off(self.now())
        self.records.write(record, revision)
        self.memory.remember(request, record)
        log.info('instance %s is %s%s', record.instance, record.state, f': {record.fault}' if record.fault else '')

    def _reserve(self, record: Record, spec: GuestSpec) -> Record:
        """Reserve the guest's addresses where libvirt gives them out; the record with what is expected."""
        interfaces = []
        for mac, (kind, name) in zip(spec.macs, spec.networks, strict=True):
            reserved = self.hypervisor.reserve(record.instance, mac, name) if kind == 'network' else None
            interfaces.append(Interface(name, mac, expected=reserved))
        failpoint('reserved')
        return replace(record, addresses=tuple(interfaces))

    def _up(self, record: Record) -> Record:
        """The record of a guest that runs."""
        console = self.hypervisor.console(record.instance)
        record = replace(record, console=f'{self.shape.hostname}:{console}' if console else None)
        # A guest that runs has its image and its disk, whether or not that could be written when it was so.
        now = self.now()
        return record.at(ACTIVE, now, 'image', 'disk', 'started').on(CREATED, now)

    def _as_it_is(self, record: Record, guest: Guest) -> Record:
        """The record of a whole guest, running or off."""
        return self._up(record) if guest.running else self._up(record).off(self.now())

    def _noted(self, record: Record, revision: int) -> Record:
        """Write down how far a build is. It does not wait for etcd: the next write says it too."""
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
        """End an instance in error: first nothing of it is left, then the record says so.

        Why is remembered before, with the `request` (None: as it was remembered): the record may have to wait.
        """
        self.memory.remember(request, record, failure)
        failpoint('failing')
        self._remove(record.instance, Destroy(record.instance, self.compute) if touched else None)
        cleaned = 'nothing of it is left: no domain, disk or allocation'
        record = replace(record.at(ERROR, self.now(), 'error'), error=replace(failure, cleaned=cleaned), addresses=())
        log.error('instance %s failed at stage %s: %s', record.instance, failure.stage, failure.reason)
        self.records.end(record, revision)

    def _remove(self, instance: str, job: Step | None) -> None:
        """Remove what this host has of an instance, by the job (None: nothing), its data, addresses and claim."""
        if job is not None:
            self._finish(job)
            failpoint('removed')
        self._forget(instance)
        failpoint('unreserved')
        self._release(instance)
        failpoint('released')

    def _forget(self, instance: str) -> None:
        """Take back what was told of the guest: to the metadata server, and to the networks' DHCP."""
        self.guest_data.remove(instance, all_macs(instance))
        failpoint('forgotten')
        self.hypervisor.release(instance)

    def _release(self, instance: str) -> None:
        """Release the instance's claim on this compute. One that is another compute's is not touched."""

        def elsewhere(holding: Mapping[str, allocations.Consumer]) -> Collection[str]:
            return [each for each, held in holding.items() if self.compute not in held.allocations]

        def attempt() -> bool | None:
            return release(self.placement, [instance], elsewhere)[instance] is not False or None

        lost = Unreachable(f'the claim of {instance} is changed by somebody else all the time')
        until_committed(attempt, lost, RELEASES)

    def _begin(self, request: Request, revision: int, phase: str) -> bool:
        """Write down how far it is, True if it was not there yet. Remembered with it is what is asked."""
        record, said = self.records.known(request.instance), _power(request).at(phase)
        begins = record.power != said
        if begins:
            record = record.off(self.now()) if phase == OFF else record
            record = self.records.write(replace(record, power=said, attempts=0), revision)
            self.memory.remember(request, record)
        failpoint('powering')
        return begins

    def _start(self, record: Record, revision: int, power: str | None, why: str, failed: str) -> None:
        reason = self._resume(record, revision)
        if reason is not None:
            record = replace(record.off(self.now()), fault=f'{failed}: {reason}', power=power)
            log.error('instance %s: %s', record.instance, record.fault)
        else:
            runs = Guest(record.instance, self.compute, defined=True, running=True, disk=True)
            record = replace(self._seen(record, runs, why), power=power)
        self.records.write(record, revision)

    def _start_built(self, record: Record, revision: int) -> str | None:
        """Start a guest whose build got as far as its domain; None once it runs, else why it does not, as a fault.

        Nothing of it is removed: it may have run, while nobody could write that down.
        """
        log.info('START INSTANCE %s: its build had got as far as its domain', record.instance)
        reason = self._resume(record, revision)
        return None if reason is None else f'{NOT_STARTED}: {reason}'

    def _resume(self, record: Record, revision: int) -> str | None:
        """Have its domain started; None once it runs, else why it does not. WorkerDied: it is to be tried again."""
        self.guest_data.off(record.instance)  # what it said was said in an earlier boot
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
        """Have a job carried out of which no news is wanted. Errors: what it raised."""
        for _ in self.runner.run(job):
            pass

    def _run(self, job: Step) -> None:
        self._finish(job)
        failpoint('powered')

    def _seen(self, record: Record, guest: Guest | None, why: str) -> Record:
        """The record of a guest as it is now; `why`: what it was started for, if it is on and was off."""
        if guest is not None and guest.running:
            seen = record.on(why, self.now())
        else:
            self.guest_data.off(record.instance)
            seen = record.off(self.now())
        return replace(seen, fault=fault_of(record, guest))
