"""Judges answers of commands and changes of etcd by ecomp's promises. Pure.

None of ecomp's reading code is used: its mistakes must not hide themselves.
The rules for the end are in tests/kit/ending.py.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.kit.ending import TERMINAL_STATES, Allocations, StoredValue, find_contradictions

if TYPE_CHECKING:
    from tests.kit.history import Change, History

FIRST_STATES = {'scheduled', 'building', 'destroying', 'gone', 'error'}
# The states that may follow each state, besides itself.
NEXT_STATES = {
    'scheduled': {'building', 'active', 'stopped', 'error', 'destroying', 'gone'},
    'building': {'active', 'stopped', 'error', 'destroying', 'gone'},
    'active': {'stopped', 'destroying', 'gone'},
    'stopped': {'active', 'destroying', 'gone'},
    'destroying': {'gone'},
    'gone': set(),
    'error': set(),
}


class Delivery(NamedTuple):
    """A request written to a compute. `by_eschedule`: its transaction deleted the attempt's key."""

    revision: int
    compute: str
    by_eschedule: bool


@dataclass
class Lifecycle:
    """The lifecycle of one instance.

    `state` is that of its last record, even after that record was removed.
    `failure_count` is how often it changed to error. `tombstone_revision` is 0 without a tombstone.
    """

    deliveries: list[Delivery] = field(default_factory=list)
    queued_revisions: list[int] = field(default_factory=list)
    state: str | None = None
    failure_count: int = 0
    tombstone_revision: int = 0
    # True if it existed when the history began.
    existed_before: bool = False
    # True if it is a guest that ecomp did not create. Released, it may be adopted again.
    is_adopted: bool = False


class HistoryReplay:
    def __init__(self, history: History) -> None:
        self.violations: list[str] = []
        self.lifecycles: dict[str, Lifecycle] = {}
        self._history = history
        self._etcd: dict[str, StoredValue] = {}
        self._hosts: dict[str, dict[str, dict[str, Any]]] = {}
        self._queues: dict[str, dict[str, dict[str, Any]]] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._record_keys: dict[str, str] = {}

    def replay(self) -> Mapping[str, StoredValue]:
        for key, stored in self._history.before.items():
            self._apply_change(key, stored)
        for name in {*self._hosts, *self._queues, *self._records}:
            life = self._get_lifecycle(name)
            life.existed_before, life.state = True, self._records.get(name, {}).get('state')
            life.tombstone_revision = int(
                any(not request.get('allocations') for request in self._hosts.get(name, {}).values())
            )
        for revision, changes in groupby(self._history.changes, lambda each: each.revision):
            self._check_revision(revision, list(changes))
        return self._etcd

    def get_record(self, instance: str) -> dict[str, Any] | None:
        return self._records.get(instance)

    def is_waiting(self, instance: str) -> bool:
        computes = self._hosts.get(instance, {})
        return instance in self._queues or any(compute in self._history.away for compute in computes)

    def _get_lifecycle(self, instance: str) -> Lifecycle:
        return self.lifecycles.setdefault(instance, Lifecycle())

    def _report(self, revision: int, text: str, *subjects: str) -> None:
        line = f'{", ".join(subjects)}: {text}, at revision {revision}'
        if not set(subjects) & set(self._history.manual_subjects) and line not in self.violations[-4:]:
            self.violations.append(line)

    def _apply_change(self, key: str, stored: StoredValue | None) -> None:
        if stored is None:
            self._etcd.pop(key, None)
        else:
            self._etcd[key] = stored
        requests_by_family = {'hosts': self._hosts, 'queues': self._queues}
        match key.split('/')[1:]:
            case ['hosts' | 'queues' as family, place, instance]:
                by_place = requests_by_family[family].setdefault(instance, {})
                by_place.pop(place, None)
                if stored is not None:
                    by_place[place] = parse_object(stored)
                elif not by_place:
                    del requests_by_family[family][instance]
            case ['instances', _, instance]:
                if stored is not None:
                    self._records[instance], self._record_keys[instance] = parse_object(stored), key
                elif self._record_keys.get(instance) == key:
                    del self._records[instance], self._record_keys[instance]

    def _check_revision(self, revision: int, changes: Sequence[Change]) -> None:
        removed = {change.key for change in changes if change.stored is None}
        by_eschedule = any(key.startswith('/requests/') for key in removed)
        before = {change.key: self._etcd.get(change.key) for change in changes}
        for change in changes:
            self._apply_change(change.key, change.stored)
        for key, stored in ((change.key, change.stored) for change in changes):
            previous = before[key]
            match key.split('/')[1:]:
                case ['hosts', compute, instance]:
                    self._check_request(revision, compute, instance, previous, stored, by_eschedule)
                case ['queues', _, instance]:
                    if stored is not None and previous is None:
                        self._get_lifecycle(instance).queued_revisions.append(revision)
                    self._check_single_place(revision, instance)
                    self._check_name(revision, instance, parse_object(stored))
                case ['instances', compute, instance]:
                    if stored is not None and compute != (parse_object(stored).get('compute') or 'none'):
                        self._report(revision, f'is recorded below {compute} by another compute', instance)
                    tombstone = any(path.endswith(f'/{instance}') for path in removed if path.startswith('/hosts/'))
                    self._check_record(revision, instance, previous, stored, tombstone)
                case ['names', name]:
                    holder = str(parse_object(previous).get('instance'))
                    new_holder = str(parse_object(stored).get('instance'))
                    # A replacement takes the name over in the revision that asks for the end of its predecessor.
                    is_replaced = any(
                        change.key.startswith('/hosts/') and change.key.endswith(holder) for change in changes
                    )
                    if holder != new_holder and not is_replaced and (holder in self._hosts or holder in self._queues):
                        self._report(revision, f'the name {name} is taken from it, which lives', holder, name)
                case ['requests', instance] | ['queues', _, instance, 'taker']:
                    if stored is not None and not stored.lease:
                        self._report(revision, 'is on no lease', instance)

    def _check_single_place(self, revision: int, instance: str) -> None:
        computes, queues = self._hosts.get(instance, {}), self._queues.get(instance, {})
        if len(computes) > 1:
            self._report(revision, f'is requested of {len(computes)} computes at once', instance)
        if len(queues) > 1 or (queues and computes):
            self._report(revision, f'waits in {len(queues)} queues, and is requested of {len(computes)}', instance)

    def _check_name(self, revision: int, instance: str, request: Mapping[str, Any]) -> None:
        name = request.get('name')
        if name and parse_object(self._etcd.get(f'/names/{name}')).get('instance') != instance:
            self._report(revision, f'is delivered as {name}, which is not its name', instance, str(name))

    def _check_request(
        self,
        revision: int,
        compute: str,
        instance: str,
        previous: StoredValue | None,
        stored: StoredValue | None,
        by_eschedule: bool,
    ) -> None:
        life, record, request = self._get_lifecycle(instance), self._records.get(instance), parse_object(stored)
        self._check_single_place(revision, instance)
        if stored is None:
            state = record.get('state') if record and record.get('compute') == compute else None
            if state is not None and state not in TERMINAL_STATES:
                self._report(revision, f'its request went while it was {state}', instance)
            if record is None and life.state not in TERMINAL_STATES and parse_object(previous).get('allocations'):
                self._report(revision, 'its request went, and no record says what became of it', instance)
        elif not request.get('allocations'):
            life.tombstone_revision = life.tombstone_revision or revision
        elif request.get('adopted') and life.state == 'gone':
            life = self.lifecycles[instance] = Lifecycle(is_adopted=True)
            life.deliveries.append(Delivery(revision, compute, by_eschedule))
        elif life.tombstone_revision:
            self._report(revision, 'is asked for again after its destroy was accepted', instance)
        elif previous is None:
            life.is_adopted = bool(request.get('adopted'))
            life.deliveries.append(Delivery(revision, compute, by_eschedule))
            self._check_name(revision, instance, request)

    def _check_record(
        self,
        revision: int,
        instance: str,
        previous: StoredValue | None,
        stored: StoredValue | None,
        request_removed: bool,
    ) -> None:
        """Check a record. `request_removed`: the same transaction removed its request."""
        life, earlier_record = self._get_lifecycle(instance), parse_object(previous)
        if stored is None:
            if earlier_record.get('state') not in TERMINAL_STATES and not (request_removed and life.tombstone_revision):
                self._report(revision, f'its record went while it was {earlier_record.get("state")}', instance)
            elif earlier_record.get('state') not in TERMINAL_STATES:
                life.state = 'gone'  # a full etcd refuses the final record
            return
        record = parse_object(stored)
        state, compute = str(record.get('state')), str(record.get('compute'))
        if previous is not None and state != life.state and state not in NEXT_STATES.get(str(life.state), set()):
            self._report(revision, f'{life.state}, then {state}', instance)
        is_found_disk = state == 'stopped' and record.get('fault')  # a disk of this name existed before the request
        is_found = is_found_disk or life.is_adopted
        if previous is None and (life.state == 'gone' or not (state in FIRST_STATES or is_found)):
            self._report(revision, f'{life.state or "nothing"}, then {state}', instance)
        error = record.get('error')
        if state == 'error' and not (isinstance(error, dict) and error.get('reason')):
            self._report(revision, 'is in error without a reason', instance)
        if state not in TERMINAL_STATES and compute not in self._hosts.get(instance, {}):
            self._report(revision, f'is {state} on a compute that is not asked for it', instance)
        if life.tombstone_revision and state not in ('destroying', 'gone') and state != life.state:
            self._report(revision, f'is {state} after its destroy was accepted', instance)
        life.failure_count += state == 'error' and life.state != 'error'
        life.state = state


def parse_object(stored: StoredValue | None) -> dict[str, Any]:
    try:
        value = json.loads(stored.value) if stored is not None else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


NOTIFIED_PATTERN = re.compile(r'^NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})$', re.M)
# A row of apply's table: the uuid of the compute, if it is shown, and that of the instance.
APPLIED_PATTERN = re.compile(
    r'^\S+ +(?:create|replace) +\S+ +\S+ +\S+(?: \(([0-9a-f-]{36})\))? +([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}) ',
    re.M,
)
QUEUED_PATTERN = re.compile(r'^QUEUED INSTANCE ([0-9a-f-]{36})$', re.M)
ACCEPTED_PATTERN = re.compile(r'^eschedule: ([0-9a-f-]{36}): (?:destroy accepted|is already being destroyed)', re.M)
GONE_PATTERN = re.compile(r'^eschedule: ([0-9a-f-]{36}): (?:gone$|removed from its queue|its record is removed)', re.M)
# Exit codes that mean that nothing was placed.
REFUSED_CODES = {2, 3, 5}
# Exit codes after which the outcome is known: it was reported, or nothing was placed.
CERTAIN_CODES = {0, *REFUSED_CODES}


class CommandRun(NamedTuple):
    """One run of eschedule. `code` is negative after a signal, and None if it never ended.

    `began` and `ended` are seconds of a monotonic clock.
    """

    arguments: tuple[str, ...]
    code: int | None
    stdout: str
    stderr: str
    began: float = 0.0
    ended: float = 0.0
    pid: int = 0

    def __str__(self) -> str:
        return f'eschedule {" ".join(self.arguments)[:200]} (exit {self.code}, {self.ended - self.began:.1f} s)'

    @property
    def is_apply(self) -> bool:
        return 'apply' in self.arguments

    @property
    def is_create(self) -> bool:
        if self.is_apply:
            return '--dry-run' not in self.arguments
        is_query = any('resources' in word and '=' in word for word in self.arguments)
        return (is_query or self.get_option('--flavor') is not None) and not {'--dry-run', 'flavor'} & set(
            self.arguments
        )

    def get_option(self, option: str) -> str | None:
        for word, next_word in zip(self.arguments, (*self.arguments[1:], ''), strict=True):
            if word == option:
                return next_word
            if word.startswith(f'{option}='):
                return word.partition('=')[2]
        return None

    @property
    def requested_instances(self) -> set[str]:
        uuid_text = self.get_option('--uuid')
        try:
            base, count = uuid.UUID(uuid_text or ''), int(self.get_option('--count') or 1)
        except ValueError:
            return set()
        return {str(base)} if count == 1 else {str(uuid.uuid5(base, str(number))) for number in range(1, count + 1)}

    @property
    def placed_instances(self) -> dict[str, str]:
        """The instances reported as placed: {instance: compute}, with '' for a queue."""
        if not self.is_create:
            return {}
        if self.is_apply:
            return self._applied_instances
        placed = {instance: compute for compute, instance in NOTIFIED_PATTERN.findall(self.stdout)}
        placed |= dict.fromkeys(QUEUED_PATTERN.findall(self.stdout), '')
        if self.stdout.startswith('['):
            entries = json.loads(self.stdout) if self.stdout.rstrip().endswith(']') else []
            placed |= {entry['instance']: entry.get('compute', '') for entry in entries}
        return placed

    @property
    def _applied_instances(self) -> dict[str, str]:
        if not self.stdout.startswith('{'):
            return {instance: compute for compute, instance in APPLIED_PATTERN.findall(self.stdout)}
        # With 5 something differs, and the rest was done unless a name is taken.
        entries = json.loads(self.stdout).get('instances', []) if self.code in (0, 5) else []
        if any(entry['action'] == 'taken' for entry in entries):
            return {}
        return {entry['instance']: entry['compute'] for entry in entries if entry['action'] in ('create', 'replace')}


class Change(NamedTuple):
    """The value of one key from a revision on, or None if the key was removed."""

    revision: int
    key: str
    stored: StoredValue | None


@dataclass(frozen=True)
class History:
    """The input of judge(). Allocations and capacities are those at the end.

    `away` are computes that do not work at the end: their requests may wait.
    `manual_subjects` are subjects that the test wrote itself, which are not judged.
    `foreign` are consumers and instances with an allocation or a record outside ecomp.
    """

    runs: Sequence[CommandRun] = ()
    before: Mapping[str, StoredValue] = field(default_factory=dict)
    changes: Sequence[Change] = ()
    allocations: Allocations = field(default_factory=dict)
    capacity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    away: Collection[str] = ()
    manual_subjects: Collection[str] = ()
    foreign: Collection[str] = ()


class Verdict(NamedTuple):
    """The violations: permanent ones, and those that finishing the work may remove."""

    permanent: list[str]
    pending: list[str]


def judge(history: History) -> Verdict:
    course = HistoryReplay(history)
    etcd = course.replay()
    excepted = {*history.manual_subjects, *history.foreign}
    contradictions = find_contradictions(etcd, history.allocations, history.capacity, excepted, history.away)
    return Verdict(
        [*course.violations, *_check_answers(history, course)],
        [*_check_outcomes(history, course), *_check_leftovers(history, etcd), *contradictions],
    )


def _check_answers(history: History, course: HistoryReplay) -> Iterator[str]:
    runs_by_uuid: dict[str, list[CommandRun]] = {}
    for run in history.runs:
        for instance, compute in run.placed_instances.items():
            life = course.lifecycles.get(instance, Lifecycle())
            if instance in history.manual_subjects or life.existed_before:
                continue
            if not life.deliveries and not life.queued_revisions:
                yield f'{instance}: was never delivered: {run}'
            elif compute and compute not in {delivery.compute for delivery in life.deliveries}:
                yield f'{instance}: was delivered to {life.deliveries}: {run}'
        for instance in run.requested_instances if run.is_create else ():
            runs_by_uuid.setdefault(instance, []).append(run)
    for instance, life in course.lifecycles.items():
        if instance not in history.manual_subjects and len(life.deliveries) > 1 + life.failure_count:
            yield f'{instance}: was delivered {len(life.deliveries)} times: {life.deliveries}'
    placed_new: dict[str, list[CommandRun]] = {}
    for run in history.runs:
        for instance in run.placed_instances:
            if f'{instance} was requested before' not in run.stderr:
                placed_new.setdefault(instance, []).append(run)
    for instance, runs in placed_new.items():
        if len(runs) > 1 + course.lifecycles.get(instance, Lifecycle()).failure_count:
            yield f'{instance}: was placed, say {len(runs)}, and none of them that it was there before: {runs[1]}'
    reported = {instance for run in history.runs for instance in run.placed_instances}
    uncertain = [run for run in history.runs if run.is_create and run.code not in CERTAIN_CODES]
    unknown: dict[int, list[str]] = {}
    for instance, life in course.lifecycles.items():
        revisions = [
            *(delivery.revision for delivery in life.deliveries if delivery.by_eschedule),
            *life.queued_revisions,
        ]
        if instance in reported or instance in history.manual_subjects or not revisions or life.is_adopted:
            continue
        runs = runs_by_uuid.get(instance, [])
        if runs and all(run.code in REFUSED_CODES for run in runs):
            yield f'{instance}: was refused and delivered: {runs[0]}'
        elif not runs:
            unknown.setdefault(revisions[0], []).append(instance)
    unsure = [run for run in uncertain if not run.requested_instances and not run.placed_instances]
    if len(unknown) > len(unsure):
        yield f'{len(unknown)} deliveries of which nobody was told, and {len(unsure)} asks without an answer: {unknown}'


def _check_outcomes(history: History, course: HistoryReplay) -> Iterator[str]:
    for run in history.runs:
        for instance in set(run.placed_instances) - set(history.manual_subjects):
            life = course.lifecycles.get(instance, Lifecycle())
            if life.state not in ('active', 'stopped', *TERMINAL_STATES) and not course.is_waiting(instance):
                yield f'{instance}: is {life.state or "not begun"} at the end: {run}'
        destroyed = (
            {*ACCEPTED_PATTERN.findall(run.stderr), *GONE_PATTERN.findall(run.stderr)}
            if 'destroy' in run.arguments
            else ()
        )
        for instance in set(destroyed) - set(history.manual_subjects):
            life = course.lifecycles.get(instance, Lifecycle())
            is_waiting = instance not in GONE_PATTERN.findall(run.stderr) and course.is_waiting(instance)
            record = course.get_record(instance)
            if not is_waiting and (record is not None or life.state not in TERMINAL_STATES) and life.state != 'gone':
                yield f'{instance}: is {life.state} at the end: {run}'


def _check_leftovers(history: History, etcd: Mapping[str, StoredValue]) -> Iterator[str]:
    codes: dict[int, set[int | None]] = {}
    for run in history.runs:
        codes.setdefault(run.pid, set()).add(run.code)
    for key, stored in etcd.items():
        pid = parse_object(stored).get('pid') if key.startswith('/requests/') else None
        if pid in codes and codes[pid] <= CERTAIN_CODES and key.split('/')[2] not in history.manual_subjects:
            yield f'{key}: is left by an eschedule that ended with {codes[pid]}'
