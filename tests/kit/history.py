"""Judges answers of commands and changes of etcd by ecomp's promises. Pure.

A History holds values: each eschedule that ran, with its arguments and its answer; etcd at the beginning and every
change since; placement's allocations at the end. judge() lists the violations, one line each. None of ecomp's reading
code is used: its mistakes must not hide themselves. Subjects that the test wrote itself (`manual_subjects`: instances,
names, groups, projects, computes) are not judged. The rules for the end are in tests/kit/ending.py.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.kit.course import HistoryReplay, Lifecycle, parse_object
from tests.kit.ending import TERMINAL_STATES, Allocations, StoredValue, find_contradictions

NOTIFIED_PATTERN = re.compile(r'^NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})$', re.M)
# A row of apply's table: the uuid of the compute, if it is shown, and that of the instance.
APPLIED_PATTERN = re.compile(
    r'^\S+ +(?:create|replace) +\S+ +\S+ +\S+(?: \(([0-9a-f-]{36})\))? +([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}) ',
    re.M,
)
QUEUED_PATTERN = re.compile(r'^QUEUED INSTANCE ([0-9a-f-]{36})$', re.M)
CANARY_PATTERN = re.compile(r'\bcanary-([0-9a-f]{8})\b')
ACCEPTED_PATTERN = re.compile(r'^eschedule: ([0-9a-f-]{36}): (?:destroy accepted|is already being destroyed)', re.M)
GONE_PATTERN = re.compile(r'^eschedule: ([0-9a-f-]{36}): (?:gone$|removed from its queue|its record is removed)', re.M)
# Exit codes that mean that nothing was placed.
REFUSED_CODES = {2, 3, 5}
# Exit codes after which the outcome is known: it was reported, or nothing was placed.
CERTAIN_CODES = {0, *REFUSED_CODES}


class CommandRun(NamedTuple):
    """One run of eschedule: its arguments, exit code and output.

    Attributes:
        code: negative if a signal ended it, None if it never ended.
        began: start, in seconds of a monotonic clock.
        ended: end, on the same clock.
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
        """True if the arguments request instances."""
        if self.is_apply:
            return '--dry-run' not in self.arguments
        is_query = any('resources' in word and '=' in word for word in self.arguments)
        return (is_query or self.get_option('--flavor') is not None) and not {'plan', 'flavor', 'doctor'} & set(
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
        """The requested instances, if --uuid gives their uuids."""
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
        entries = json.loads(self.stdout).get('instances', []) if self.code == 0 else []
        return {entry['instance']: entry['compute'] for entry in entries if entry['action'] in ('create', 'replace')}

    @property
    def canary_prefixes(self) -> set[str]:
        """The uuid prefixes of the canaries it reported."""
        return set(CANARY_PATTERN.findall(self.stdout + self.stderr)) if '--canary' in self.arguments else set()


class Change(NamedTuple):
    """The value of one key from a revision on; None if the key was removed."""

    revision: int
    key: str
    stored: StoredValue | None


@dataclass(frozen=True)
class History:
    """The input of judge().

    Attributes:
        changes: the changes of etcd, in its order.
        allocations: placement's allocations at the end.
        capacity: placement's capacities at the end.
        away: computes that do not work at the end; their requests may wait.
        manual_subjects: subjects that the test wrote itself.
        foreign: consumers and instances with an allocation or a record outside ecomp.
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
    """Return the violations in a history; none if all promises are kept."""
    course = HistoryReplay(history)
    etcd = course.replay()
    excepted = {*history.manual_subjects, *history.foreign}
    contradictions = find_contradictions(etcd, history.allocations, history.capacity, excepted, history.away)
    return Verdict(
        [*course.violations, *_check_answers(history, course)],
        [*_check_outcomes(history, course), *_check_leftovers(history, etcd), *contradictions],
    )


def _check_answers(history: History, course: HistoryReplay) -> Iterator[str]:
    """Check that what commands reported is what happened."""
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
    canary_prefixes = {prefix for run in history.runs for prefix in run.canary_prefixes}
    reported |= {instance for instance in course.lifecycles if instance[:8] in canary_prefixes}
    uncertain = [run for run in history.runs if run.is_create and run.code not in CERTAIN_CODES]
    unknown: dict[int, list[str]] = {}
    for instance, life in course.lifecycles.items():
        revisions = [
            *(delivery.revision for delivery in life.deliveries if delivery.by_eschedule),
            *life.queued_revisions,
        ]
        if instance in reported or instance in history.manual_subjects or not revisions:
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
    """Check that each acknowledged instance is final, or waits for a compute that is away."""
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
    """Check that an eschedule that exited normally left no attempt's key behind."""
    codes: dict[int, set[int | None]] = {}
    for run in history.runs:
        codes.setdefault(run.pid, set()).add(run.code)
    for key, stored in etcd.items():
        pid = parse_object(stored).get('pid') if key.startswith('/requests/') else None
        if pid in codes and codes[pid] <= CERTAIN_CODES and key.split('/')[2] not in history.manual_subjects:
            yield f'{key}: is left by an eschedule that ended with {codes[pid]}'
