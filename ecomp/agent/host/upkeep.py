"""Look at this host, publish what two looks find, and repair it.

What is safe is repaired each minute, and leftovers only on request. Questions are keys below /audit/: to look now, to
repair leftovers, or what the host and its guests use.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ecomp.agent.host.claims import CONFIRMATION_SECONDS, ClaimKeeper, confirm_sightings
from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.provider import measure_usage
from ecomp.agent.host.state import Memory
from ecomp.agent.images.cache import list_bad, lock_if_idle
from ecomp.agent.jobs import Loop
from ecomp.errors import BuildFailed, EcompError, NotFound
from ecomp.files import InstanceLocks
from ecomp.model import keys
from ecomp.model.allocation import Resources
from ecomp.model.audit import HostReport, encode_report, find_all
from ecomp.model.finding import Finding, Leftover, Repair
from ecomp.model.guest import Guest, ReservedAddress
from ecomp.model.json_object import dump, load_object_or_empty
from ecomp.model.record import parse_or_none
from ecomp.model.states import ACTIVE, ERROR, GONE, STOPPED
from ecomp.model.usage import HOST
from ecomp.model.world import HostFacts, Planes, ProviderState, World, index_revisions
from ecomp.placement import providers
from ecomp.placement.allocations import correct_claim
from ecomp.placement.client import Placement
from ecomp.shared.attempts import find_needed, read_settled_request
from ecomp.shared.places import has_unfinished_record, read_index
from ecomp.store.client import Entry, Store
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)

# Least time between two looks that must agree before a finding is published.
LOOK_SECONDS = 2.0


def restore_reservations(hypervisor: Hypervisor, memory: Memory, instances: Collection[str] | None = None) -> None:
    """Reserve again what instances lack, or another address, without changing their records."""
    reservations = hypervisor.list_reservations()
    for instance, remembered in memory.get_entries().items():
        if remembered.record.state not in (ACTIVE, STOPPED) or (instances is not None and instance not in instances):
            continue  # its build or destroy changes the reservations
        for nic in remembered.record.addresses:
            if nic.reservation is None or reservations.get(nic.mac) == ReservedAddress(instance, nic.reservation):
                continue
            try:
                ip = hypervisor.reserve_address(instance, nic.mac, nic.network, nic.reservation)
            except BuildFailed as error:
                log.warning('instance %s: DHCP does not reserve %s: %s', instance, nic.reservation, error.reason)
            else:
                text = 'instance %s: the reservation of address %s on network %s was missing; reserved %s'
                log.warning(text, instance, nic.reservation, nic.network, ip)


def find_abandoned_parts(state: Path) -> dict[str, str]:
    """Return {relative path: inode and time of the last write} of *.part files without a writer."""
    marks = {}
    for path in [*state.glob('*.part'), *state.glob('*/*.part')]:
        try:
            with lock_if_idle(path) as is_abandoned:
                status = path.stat()
                if is_abandoned:
                    marks[str(path.relative_to(state))] = f'{status.st_ino}/{status.st_mtime_ns}'
        except OSError:
            continue  # it was just renamed
    return marks


@dataclass(eq=False)
class Upkeep:
    """The checks and repairs of a compute's own host, each minute and when a command asks."""

    compute: str
    store: Store
    placement: Placement
    claims: ClaimKeeper
    list_guests: Callable[[], Mapping[str, Guest]]
    hypervisor: Hypervisor
    data: GuestData
    state: Path
    memory: Memory
    # Gets a key below /findings/ or /usage/, and its value for the presence's lease.
    publish: Callable[[str, str | None], None]
    # Called with an instance before something of it is removed, and with '' before a part file is. It raises an
    # EcompError if etcd is unfamiliar.
    may_remove: Callable[[str], bool]
    # Returns the followed requests of this compute.
    read_requests: Callable[[], Mapping[str, Entry]]
    measure: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._locks = InstanceLocks(self.state)
        # Held during a look, and while claims are checked.
        self.lock = threading.Lock()
        self._questions: Mapping[str, Entry] = {}  # replaced, never changed
        # The keys of questions that are answered, and of those after which one of two looks was made.
        self._answered: set[str] = set()
        self._begun: set[str] = set()
        self._has_published_usage, self._next_look = False, 0.0
        # The claims that were compared last, and the inventory, which is read when the claims were read anew.
        self._consumers: Mapping[str, Resources] | None = None
        self._inventory: Mapping[str, Mapping[str, Any]] | None = None
        self._first_sightings: dict[Hashable, float] = {}
        # What two looks agreed on last.
        self.report = HostReport()
        self._loop = Loop('audits', self._answer_all)
        self.stop = self._loop.join  # the end waits for the answer in flight

    def on_questions(self, state: Mapping[str, Entry]) -> None:
        """Replace the questions, and schedule answers if there are or were any."""
        before, self._questions = self._questions, state
        if state or before:
            self._loop.schedule()

    def step(self) -> None:
        """Look, publish what both this look and an earlier one found, and repair reservations."""
        with self.lock:
            try:
                world, ages = self._look(is_asked=False)
            except EcompError as error:
                self._publish(HostReport(revision=self.report.revision, error=str(error)))
                raise
            self._publish(HostReport(tuple(select_older(ages, LOOK_SECONDS)), self.report.revision))
            for finding in select_older(ages, CONFIRMATION_SECONDS):
                if finding.code == 'reservation-missing':
                    with self._locks.hold(finding.subject, lambda: None):
                        restore_reservations(self.hypervisor, self.memory, {finding.subject})
                elif finding.code == 'reservation-orphaned' and finding.subject not in world.planes.facts.guests:
                    log.warning('%s %s: %s', finding.code, finding.subject, self._repair(finding))

    def _look(self, is_asked: bool) -> tuple[World, dict[Finding, float]]:
        """Measure, read the world, and find what is wrong, with its age in seconds."""
        now = time.monotonic()
        self.measure()
        world = self.read_world(is_asked)
        revisions = index_revisions(world.planes.etcd)
        marks = ((each, tuple(sorted(revisions.get(each.subject, {}).items()))) for each in find_all(world))
        findings: dict[Hashable, Finding] = {mark: mark[0] for mark in marks}
        self._first_sightings, _ = confirm_sightings(self._first_sightings, findings.keys(), now)
        return world, {finding: now - self._first_sightings[sighting] for sighting, finding in findings.items()}

    def _publish(self, report: HostReport) -> None:
        self.report = report
        self.publish(keys.findings(self.compute), encode_report(report))

    def read_world(self, is_asked: bool) -> World:
        """Read this host's guests and files, their keys in etcd, also elsewhere, and its provider."""
        # Placement first: a claim in its answer that was delivered since then has its request's key.
        consumers = None
        with suppress(NotFound):  # eschedule finds that there is no provider
            # For a question, claims and requests are read anew.
            if is_asked:
                self.claims.reconcile(self.hypervisor.list_guests(), time.monotonic())
            # Also if the claims are not current: a step that fails for placement succeeds only once placement answers.
            if self.claims.consumers is not self._consumers:
                self._inventory = providers.read_raw_inventory(self.placement, self.compute)
                self._consumers = self.claims.consumers
            consumers = self._consumers if self.claims.is_current else None
        facts, prefix = self._read_facts(), keys.request_prefix(self.compute)
        etcd = dict(self.read_requests())
        present = facts.list_instances() | (consumers or {}).keys()
        if is_asked or present - set(map(keys.get_last_part, etcd)):
            # Requests move from these two to /hosts.
            pending = {**self.store.snapshot(keys.ATTEMPTS).entries, **self.store.snapshot(keys.QUEUES).entries}
            etcd = {**pending, **self.store.snapshot(prefix).entries}
        records = self.store.snapshot(keys.record(self.compute, '')).entries
        for key, entry in records.items():
            if (record := parse_or_none(entry.value)) is not None and record.state not in (GONE, ERROR):
                present.add(keys.get_last_part(key))
        if strangers := {each for each in present if keys.request(self.compute, each) not in etcd}:
            index = read_index(self.store)
            etcd |= self.store.read(
                [key for each in strangers for found in (index.requests, index.records) for key in found.get(each, ())]
            )
        state = ProviderState(self.compute, self._inventory, consumers)
        return World(Planes({self.compute: state}, {**etcd, **records}, self.compute, facts))

    def _read_facts(self) -> HostFacts:
        return HostFacts(
            guests=self.list_guests(),
            without_base=self.hypervisor.list_missing_bases(),
            metadata=self.data.read_instances(),
            seeds=frozenset(self.hypervisor.list_seeds()),
            reservations=self.hypervisor.list_reservations(),
            parts=find_abandoned_parts(self.state),
            open_dhcp=frozenset(self.hypervisor.list_open_dhcp()),
            bad_bases=frozenset(list_bad(self.state / 'images')),
        )

    def _answer_all(self) -> float:
        """Answer the questions that are due, and return when (monotonic) to look again."""
        questions = self._questions
        self._answered &= questions.keys()
        self._answer_usage({key: entry for key, entry in questions.items() if key.endswith(keys.USAGE_QUESTION)})
        new = {key: entry for key, entry in questions.items() if key not in self._answered}
        parts = {key: key.removeprefix(keys.AUDIT).partition('/')[2] for key in new}  # of all computes, or of one
        looks = {key: entry for key, entry in new.items() if parts[key] in ('', self.compute) and self._is_asked(entry)}
        if looks and time.monotonic() < self._next_look:
            return self._next_look
        try:
            if looks and self.may_remove(''):  # a read-only compute is not asked
                self._answer_looks(looks)
                self._next_look = time.monotonic() + LOOK_SECONDS
                return self._next_look if self._begun else math.inf
        except EcompError as error:
            log.debug('this host does not answer: %s', error)
        except Exception:
            log.exception('unexpected error while this host checks itself')
        self._answered |= looks.keys()
        return math.inf

    def _is_asked(self, question: Entry) -> bool:
        computes = load_object_or_empty(question.value).get('computes')
        return not isinstance(computes, list) or self.compute in computes

    def _answer_usage(self, questions: Mapping[str, Entry]) -> None:
        new, own = [each for key, each in questions.items() if key not in self._answered], self.compute.encode()
        if asked := [each.revision for each in new if not each.value or own in each.value]:
            self._has_published_usage = True
            self.publish(keys.usage(self.compute), dump(self._measure_usage(max(asked))))
        elif self._has_published_usage and not questions:
            self._has_published_usage = False
            self.publish(keys.usage(self.compute), None)
        self._answered |= questions.keys()

    def _answer_looks(self, looks: Mapping[str, Entry]) -> None:
        """Look, and publish the findings, after repairs if asked, at the second look."""
        answered, self._begun = looks.keys() & self._begun, set(looks.keys() - self._begun)
        with self.lock:
            try:
                world, ages = self._look(is_asked=True)
            except EcompError as error:
                answered, self._begun = set(looks), set()
                report = HostReport(error=str(error))
            else:
                if not ages:  # a second look has nothing to confirm
                    answered, self._begun = set(looks), set()
                report = HostReport(tuple(select_older(ages, LOOK_SECONDS)))
                if any(key.endswith(f'/{self.compute}') for key in answered):
                    due = (each for each in report.findings if each.fix)
                    lines = [f'{each.code} {each.subject}: {self._repair(each, ages[each])}' for each in due]
                    report = report._replace(repairs=tuple(lines))
                    for line in lines:
                        log.warning('audit: %s', line)
            self._answered |= answered
            if answered:
                self._publish(report._replace(revision=max(looks[key].revision for key in answered)))

    def _repair(self, finding: Finding, age_seconds: float = math.inf) -> str:
        """Repair a finding, and return what was done, or why nothing was."""
        if age_seconds < CONFIRMATION_SECONDS:
            return f'not repaired: the finding is only {age_seconds:.0f} s old. Try: the same command in a minute'
        try:
            if finding.leftover is not None:
                return self._remove(finding.leftover)
            if finding.repair is Repair.CLAIM:
                read_request = partial(read_settled_request, self.store, self.compute, finding.subject)
                is_claimed = correct_claim(self.placement, finding.subject, read_request)
                return f'claimed again on {self.compute}' if is_claimed else 'not repaired: the claim has changed'
            return 'not released yet: this host releases the claim once the finding is a minute old'
        except (EcompError, OSError) as error:
            return f'not repaired: {error}'

    def _remove(self, leftover: Leftover) -> str:
        kind, name = leftover.kind, leftover.name
        instance = {'disk': name, 'iso': name, 'reservations': name, 'seed': leftover.mark}.get(kind, '')
        if not self.may_remove(instance):
            return 'not removed: this compute is read-only, or its state directory still lists the instance'
        if kind == 'part':
            return self._remove_part(leftover)
        if not keys.is_uuid(instance):
            return 'not removed: its instance is not a valid uuid'
        # A build of this instance waits for the lock, and then recreates the disk.
        with self._locks.hold(instance, lambda: None):
            guest = self.hypervisor.list_guests().get(instance)
            if self._is_needed(instance):
                return 'not removed: its instance is requested or alive'
            if guest is not None and (guest.defined or guest.running):
                return 'not removed: its domain exists'
            if kind == 'reservations':
                self.hypervisor.release_addresses(instance)
            elif kind == 'iso' and instance in self.hypervisor.list_seeds():
                self.hypervisor.delete_seed(instance)
            elif kind == 'seed' and self.data.read_instances().get(name) == instance:
                self.data.remove(instance, [name])
            elif kind == 'disk' and guest is not None:
                if users := self.hypervisor.list_disk_users(instance):
                    return f'not removed: in use by domain {", ".join(sorted(users))}'
                self.hypervisor.delete_disk(instance)
            else:
                return 'already gone'
            return 'removed'

    def _remove_part(self, leftover: Leftover) -> str:
        if find_abandoned_parts(self.state).get(leftover.name) != leftover.mark:
            return 'not removed: the file has changed since it was found, or is gone'
        path = self.state / leftover.name
        with lock_if_idle(path) as is_abandoned:
            if is_abandoned:
                path.unlink(missing_ok=True)
        return 'removed' if is_abandoned else 'not removed: the file is being written'

    def _is_needed(self, instance: str) -> bool:
        """Read whether the instance has a request or attempt, or a record that is not final."""
        if find_needed(self.store, {instance: [self.compute]}):
            return True
        try:
            # On any compute: the leftover here may be the only copy.
            return has_unfinished_record(self.store, instance)
        except ValueError:  # a malformed record counts as needed
            return True

    def _measure_usage(self, revision: int) -> dict[str, object]:
        answer: dict[str, object] = {'version': 1, 'revision': revision}
        try:
            guests = self.hypervisor.read_usage()
            host = {'seconds': time.monotonic(), **measure_usage(self.state)}
        except (EcompError, OSError) as error:
            return {**answer, 'error': str(error)}
        return {**answer, 'used': {HOST: host, **{name: usage._asdict() for name, usage in guests.items()}}}


def select_older(ages: Mapping[Finding, float], min_seconds: float) -> list[Finding]:
    return [finding for finding, age in ages.items() if age >= min_seconds]
