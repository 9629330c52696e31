"""Audit etcd and placement, collect what hosts found themselves, and repair for --fix.

A key on a lease asks hosts to look now, or one to repair. A repair needs the same finding in two audits a minute apart,
and unchanged keys. It never rests on a host's report. Domains, running instances and foreign data are not changed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from ecomp.errors import EcompError, NotFound
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import Allocations
from ecomp.model.audit import HostReport, confirm_findings, find_all, find_mute, list_orphaned_entries, parse_report
from ecomp.model.backoff import Backoff
from ecomp.model.finding import ERROR, Finding, Repair, count_findings
from ecomp.model.group import Group
from ecomp.model.json_object import dump, load_object_or_empty
from ecomp.model.order import Request
from ecomp.model.quota import INSTANCES, Quota
from ecomp.model.record import UNSEEN_END_FAULT, copy_holdings, make_record
from ecomp.model.stack import Stack
from ecomp.model.states import GONE, RETENTION_SECONDS
from ecomp.model.stored import encode
from ecomp.model.text import make_printable
from ecomp.model.world import AUDITED_PREFIXES, Planes, ProviderState, World, index_revisions
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.sharing import recount_quota
from ecomp.scheduler.queries.find import find
from ecomp.scheduler.queries.stacks import load_stack
from ecomp.shared.attempts import NOT_QUEUED, find_needed, is_alive, read_pending_instances, read_settled_request
from ecomp.shared.ends import write_final_record
from ecomp.shared.names import (
    commit_with_shared,
    make_empty_change,
    make_group_operation,
    rejoin_group,
    restore_name,
    try_revoke,
)
from ecomp.shared.notes import note_released
from ecomp.store.client import MAX_TRANSACTION_OPERATIONS, Delete, Entry, Put, Store, Unchanged

# Seconds for which the questions of a killed eschedule stay in etcd.
LEASE_SECONDS = 180
# Seconds in which a host has to answer, and to repair: some remove many disks.
ANSWER_TIMEOUT_SECONDS = 10.0
REPAIR_TIMEOUT_SECONDS = 120.0
MIN_POLL_SECONDS = 0.01
MAX_POLL_SECONDS = 0.25
# Seconds between two reads of one audit.
READ_INTERVAL_SECONDS = 1.5
PLACEMENT_THREADS = 8
# Characters of a project id, at most: placement refuses longer ones, and empty ones.
MAX_PROJECT_CHARACTERS = 255


class Report(NamedTuple):
    """The result of an audit: its own findings, those of hosts, and its last read (`world`)."""

    own_findings: list[Finding]
    host_findings: list[Finding]
    summary: str
    world: World
    # The first and the last read of etcd.
    reads: tuple[Mapping[str, Entry], ...] = ()
    # Lines on what hosts left out of their reports.
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        return [*self.own_findings, *self.host_findings]


def audit(
    store: Store, placement: Placement, interval_seconds: float = READ_INTERVAL_SECONDS, is_now: bool = False
) -> Report:
    """Report what two reads in a row find, mute computes, and what the hosts found themselves.

    If `is_now`, hosts are asked to look at themselves. Otherwise their reports are up to two minutes old.
    """
    began = time.monotonic()
    with ask(store, *([''] if is_now else [])) as revisions:
        first_etcd = etcd = _read_etcd(store)
        first = last = _read_world(etcd, placement)
        findings = find_all(first)
        questions = dict.fromkeys(first.living_computes if is_now else (), revisions.get('', 0))
        wait_for_answers(store, keys.FINDINGS, questions, ANSWER_TIMEOUT_SECONDS)
        reports = _read_reports(store, first, revisions.get('', 0))
        if findings or first.planes.mute_reasons:
            time.sleep(max(0.0, began + interval_seconds - time.monotonic()))
        if findings:
            last = _read_world(_read_etcd(store), placement)
            etcd = _read_etcd(store)
            indexes = [index_revisions(entries) for entries in (first_etcd, last.planes.etcd, etcd)]
            findings = confirm_findings(findings, find_all(last), indexes)
        if findings or first.planes.mute_reasons:
            reports = _read_reports(store, last, revisions.get('', 0))
    findings += find_mute(last)
    as_of = 'now' if is_now else 'at most two minutes ago'
    counted = ((len(reports), 'compute'), (sum(map(last.is_living, last.records)), 'living instance'))
    compared = ' and '.join(f'{number} {name}{"" if number == 1 else "s"}' for number, name in counted)
    summary = f'{compared} were compared, as of {as_of}'
    full = {last.named_computes.format_name(compute): each.omitted for compute, each in reports.items() if each.omitted}
    notes = [f'compute {name} has {count} more findings than its report has room for' for name, count in full.items()]
    from_hosts = [finding for _, each in sorted(reports.items()) for finding in each.findings]
    return Report(findings, from_hosts, summary, last, (first_etcd, etcd), tuple(notes))


@contextmanager
def ask(
    store: Store, *parts: str, computes: Collection[str] | None = None, value: str | None = None
) -> Iterator[Mapping[str, int]]:
    """Keep questions to the computes in etcd for the block, and yield {part of a key: revision}.

    The part '' asks `computes`, or all for None, to look at themselves. `value` replaces the usual value of the keys.
    """
    if value is None:
        value = dump({'version': 1, **({} if computes is None else {'computes': list(computes)})})
    lease, prefix = store.grant(LEASE_SECONDS) if parts else 0, keys.audit(str(uuid.uuid4()))
    try:
        revisions = dict[str, int]()
        for start in range(0, len(parts), MAX_TRANSACTION_OPERATIONS):
            some = parts[start : start + MAX_TRANSACTION_OPERATIONS]
            written = store.commit([], [Put(prefix + part, value, lease) for part in some])
            revisions |= dict.fromkeys(some, written or 0)
        yield revisions
    finally:
        try_revoke(store, lease)


def wait_for_answers(store: Store, prefix: str, questions: Mapping[str, int], timeout_seconds: float) -> set[str]:
    """Wait for the answers of computes below `prefix`, and return those that have answered."""
    began, backoff = time.monotonic(), Backoff(MIN_POLL_SECONDS, MAX_POLL_SECONDS)
    answered, seen = set[str](), dict[str, int]()
    while len(answered) < len(questions) and time.monotonic() - began <= timeout_seconds:
        written = {key: each.revision for key, each in store.snapshot(prefix, keys_only=True).entries.items()}
        # Values are read only once they have changed: a thousand reports may be large.
        waiting = {prefix + compute for compute, asked in questions.items() if written.get(prefix + compute, 0) > asked}
        changed = [key for key in sorted(waiting) if seen.get(key) != written[key]]
        seen |= {key: written[key] for key in changed}
        for key, entry in store.read(changed).items() if changed else ():
            compute = keys.get_last_part(key)
            revision = load_object_or_empty(entry.value).get('revision')
            if isinstance(revision, int) and revision >= questions[compute]:
                answered.add(compute)
        if len(answered) < len(questions):
            time.sleep(backoff.next())
    return answered


def _read_reports(store: Store, world: World, revision: int) -> dict[str, HostReport]:
    """Read the reports that answer this question, and note in the world why others have none."""
    stored, reports, mute = store.snapshot(keys.FINDINGS).entries, dict[str, HostReport](), dict[str, str]()
    for compute in sorted(world.living_computes):
        entry = stored.get(keys.findings(compute))
        try:
            report = parse_report(compute, entry.value) if entry is not None and entry.lease else None
        except ValueError as error:
            mute[compute] = f'its report is malformed: {error}'
            continue
        if report is None or report.revision < revision:
            why = 'is frozen, was just killed' if revision else 'was just started'
            mute[compute] = f'it has not published what it found: its ecompute {why}, or is too old'
        elif report.error:
            mute[compute] = report.error
        else:
            reports[compute] = report
    world.planes = world.planes._replace(mute_reasons=mute)
    return reports


def _read_world(etcd: Mapping[str, Entry], placement: Placement) -> World:
    # Placement is read after etcd: the revisions of the next read then show later changes.
    # A presence key without a lease proves no life.
    alive = {keys.get_last_part(key) for key, entry in etcd.items() if key.startswith(keys.COMPUTES) and entry.lease}
    names = providers.read_provider_names(placement)
    to_read = sorted(names.keys() - alive)
    with ThreadPoolExecutor(PLACEMENT_THREADS) as threads:
        states_read = threads.map(lambda provider: read_provider(placement, provider, names[provider]), to_read)
        read = dict(zip(to_read, states_read, strict=True))
    states = {name: ProviderState(called) for name, called in names.items() if read.get(name, ()) is not None}
    states |= {provider: state for provider, state in read.items() if state is not None}
    projects = [key.removeprefix(keys.QUOTAS) for key in etcd if key.startswith(keys.QUOTAS)]
    usages = {each: _read_usage(placement, each) for each in projects if 0 < len(each) <= MAX_PROJECT_CHARACTERS}

    @cache
    def read_consumers(compute: str) -> Collection[str]:
        # The claims of a living compute are read only to decide which of several computes is trusted.
        state = states.get(compute)
        if state is not None and state.allocations is None:
            state = read_provider(placement, compute, state.name)
        return state.allocations or () if state is not None else ()

    return World(Planes(states, etcd, usages=usages), read_consumers)


def _read_usage(placement: Placement, project: str) -> dict[str, int]:
    count, used = providers.read_project_usages(placement, project)
    return {**used, **({INSTANCES: count} if count else {})}


def _read_etcd(store: Store) -> dict[str, Entry]:
    return {key: entry for family in AUDITED_PREFIXES for key, entry in store.snapshot(family).entries.items()}


def read_provider(placement: Placement, provider: str, name: str) -> ProviderState | None:
    """Read a provider of this name, or return None if it was removed in the meantime."""
    try:
        inventory = providers.read_raw_inventory(placement, provider)
        return ProviderState(name, inventory, allocations.read_provider_allocations(placement, provider))
    except NotFound:
        return None


# Each member takes two of the 128 conditions that etcd allows in a transaction.
MAX_MEMBERS_PER_TRANSACTION = 50
CHANGED_SINCE = 'not repaired: what was found has changed since the check'


class StaleFindingError(Exception):
    """What a finding is about has changed since it was read, so it is not repaired."""


def fix(
    store: Store, placement: Placement, notify: Callable[[str], None], interval_seconds: float = keys.ATTEMPT_SECONDS
) -> Report:
    """Audit twice, repair what both audits found, audit again, and return the last report.

    Hosts repair what they found themselves. If the first audit has no repairable finding, its report is returned.
    """
    first = audit(store, placement, is_now=True)
    if not any(finding.fix for finding in first.findings):
        return first
    count = count_findings([finding for finding in first.findings if finding.level == ERROR])
    notify(f'{count}; the check is repeated in {interval_seconds:g} s, before anything is changed')
    # By default, the life of an attempt's lease (rule: orphaned-claim).
    time.sleep(interval_seconds)
    second = audit(store, placement, is_now=True)
    due = {finding.compute for finding in {*first.host_findings} & {*second.host_findings} if finding.fix}
    for line in [*repair_findings(store, placement, first, second), *repair_hosts(store, due)]:
        notify(line)
    return audit(store, placement, is_now=True)


def repair_findings(store: Store, placement: Placement, first: Report, second: Report) -> list[str]:
    """Repair what both audits found themselves with unchanged keys, and return a line for each."""
    revisions = list(map(index_revisions, (*first.reads, *second.reads)))
    due = [each for each in confirm_findings(first.own_findings, second.own_findings, revisions) if each.fix]
    due.sort(key=lambda each: each.repair is Repair.RECOUNT)  # after the repairs that change the usage
    repairs = Repairs(store, placement, second.world)
    # Each is one line: names in keys may contain line breaks.
    return [make_printable(f'{each.code} {each.subject}: {repairs.carry_out(each)}') for each in due]


def repair_hosts(store: Store, computes: Collection[str]) -> list[str]:
    """Have each host repair what it has found for a minute, and return lines on the results."""
    lines = []
    with ask(store, *(f'/{compute}' for compute in sorted(computes))) as revisions:
        questions = {part.removeprefix('/'): revision for part, revision in revisions.items()}
        answered = wait_for_answers(store, keys.FINDINGS, questions, REPAIR_TIMEOUT_SECONDS)
        entries = store.read([keys.findings(compute) for compute in sorted(answered)])
    for compute in sorted(computes):
        try:
            repairs = parse_report(compute, entries[keys.findings(compute)].value).repairs
            lines += [f'compute {compute}: {line}' for line in repairs]
        except (KeyError, ValueError):
            lines.append(f'compute {compute}: it is unknown whether it was repaired, because it does not answer')
    return lines


@dataclass(frozen=True)
class Repairs:
    """Repairs findings, and raises StaleFindingError if their keys are not as in `world`."""

    store: Store
    placement: Placement
    world: World
    # The ISO time at which a destroy is completed.
    now: str = ''

    def carry_out(self, finding: Finding) -> str:
        """Repair one finding, and return a sentence about the repair or the error."""
        try:
            return self.repair(finding)
        except StaleFindingError:
            return CHANGED_SINCE
        except (EcompError, ValueError) as error:
            return f'it is unknown whether the repair was made: {error}'

    def repair(self, finding: Finding) -> str:
        """Repair one finding and return a sentence, or raise StaleFindingError if it has changed."""
        repairs: dict[Repair | None, Callable[[Finding], str]] = {
            **dict.fromkeys((Repair.DELETE, Repair.DELETE_REQUEST, Repair.UNQUEUE), self._delete),
            Repair.PUT_ON_LEASE: self._put_on_lease,
            Repair.CLAIM: self._claim,
            Repair.RESTORE_NAME: self._restore_name,
            Repair.JOIN_GROUP: self._join_group,
            Repair.LEAVE_GROUP: self._remove_from_group,
            Repair.RECOUNT: self._recount,
            Repair.END_ENTRIES: self._end_entries,
            Repair.RESTORE_STACK: self._restore_stack,
            Repair.RELEASE: self._release,
        }
        return repairs[finding.repair](finding)

    def _delete(self, finding: Finding) -> str:
        key = finding.keys[0]
        return self._commit(finding, [Delete(key)], f'{key} is deleted')

    def _put_on_lease(self, finding: Finding) -> str:
        key, state = finding.keys[0], self.world.records[finding.subject].state
        lease = self.store.grant(RETENTION_SECONDS[state])
        put = Put(key, self.world.planes.etcd[key].value.decode(), lease)
        return self._commit(finding, [put], f'{key} is on a lease', lease=lease)

    def _claim(self, finding: Finding) -> str:
        read_request = partial(read_settled_request, self.store, finding.compute, finding.subject)
        if not allocations.correct_claim(self.placement, finding.subject, read_request):
            raise StaleFindingError
        return f'claimed again on {finding.compute}'

    def _release(self, finding: Finding) -> str:
        """Release a claim on a silent compute, and complete the destroy that the keys show, if any."""
        instance, compute = finding.subject, finding.compute

        def find_kept(holding: Mapping[str, Allocations]) -> Collection[str]:
            # A silent compute claims nothing, and a claim elsewhere moves the generation that was read.
            if compute not in holding[instance]:
                return holding
            # A tombstone keeps no claim. One that waits keeps none either: only this compute would have taken it here.
            owners = () if finding.keys else (keys.request,)
            if is_alive(self.store, compute) or find_needed(self.store, holding, '', NOT_QUEUED, None, owners):
                raise StaleFindingError
            return ()

        # Noted even if destroyed: for a late concurrent forget its record may be cleared and its uuid used again.
        released = allocations.release(self.placement, [instance], find_kept, partial(note_released, self.store))
        if released[instance] is False:
            raise StaleFindingError
        if not finding.keys:
            return 'released'
        failpoint('host-released')
        record, request = self.world.records.get(instance), self.world.requests_at.get(compute, {}).get(instance)
        tombstone = request if isinstance(request, Request) else None
        if tombstone is not None:
            record = copy_holdings(record or make_record(compute, tombstone, self.now), tombstone)
        assert record is not None  # otherwise no destroy is accepted
        # An error stays: it shows that the quota's share was released before (ecomp.shared.ends).
        replaced_by = tombstone.replaced_by if tombstone is not None else None
        last = replace(record.enter_state(GONE, self.now, 'gone'), fault=UNSEEN_END_FAULT, replaced_by=replaced_by)
        removed = [keys.request(compute, instance), keys.address(instance)]
        if write_final_record(self.store, last, self._make_conditions(*finding.keys), removed) is None:
            raise StaleFindingError
        return 'the destroy is completed'

    def _restore_name(self, finding: Finding) -> str:
        entries = find(self.store, finding.subject)
        name = entries.name if entries is not None else None
        change = restore_name(self.store, name, finding.subject)
        if name is None or change is None or not change[1]:
            raise StaleFindingError
        conditions, operations = change
        return self._commit(finding, operations, f'{keys.name(name)} is restored', *conditions)

    def _join_group(self, finding: Finding) -> str:
        parsed = self.world.requests_by_compute[finding.subject][finding.compute]
        if not isinstance(parsed, Request) or parsed.group is None:
            raise StaleFindingError
        conditions, operations = rejoin_group(self.store, parsed.group, finding.subject, finding.compute)
        if not operations:
            raise StaleFindingError
        return self._commit(finding, operations, f'the instance is in group {parsed.group.name}', *conditions)

    def _remove_from_group(self, finding: Finding) -> str:
        current_group, placing = self.world.groups[finding.subject], read_pending_instances(self.store)
        assert isinstance(current_group, Group)  # otherwise it is another finding
        leaving: dict[str, list[Unchanged]] = {}
        for instance, compute in current_group.members.items():
            may_live = self.world.is_living(instance) or instance in self.world.malformed_records
            request = keys.request(compute, instance)
            if not may_live and instance not in placing and self.store.get(request) is None:
                leaving[instance] = [Unchanged(request, 0), *self._make_conditions(self.world.get_record_key(instance))]
            if len(leaving) == MAX_MEMBERS_PER_TRANSACTION:
                break
        if not leaving:
            raise StaleFindingError
        conditions = [condition for unchanged in leaving.values() for condition in unchanged]
        done = f'{", ".join(leaving)} is removed' if len(leaving) == 1 else f'{len(leaving)} members are removed'
        return self._commit(finding, [make_group_operation(current_group.without_members(*leaving))], done, *conditions)

    def _recount(self, finding: Finding) -> str:
        if recount_quota(self.store, finding.subject, lambda now: now or Quota(finding.subject)) is None:
            raise StaleFindingError
        return 'recounted'

    def _end_entries(self, finding: Finding) -> str:
        stack = self.world.stacks[finding.subject]
        assert isinstance(stack, Stack)  # otherwise it is another finding
        ended = list_orphaned_entries(self.world, stack)[:MAX_MEMBERS_PER_TRANSACTION]
        instances = stack.list_instances()
        # An apply in flight may deliver a new instance for an entry.
        unchanged = [keys.attempt(stack.attempt)]
        for name in ended:
            request = keys.request(stack.entries[name].compute, instances[name])
            unchanged += [request, self.world.get_record_key(instances[name])]
        put = Put(finding.keys[0], encode(stack.with_ended(ended)))
        done = f'{len(ended)} entries are marked as ended' if len(ended) > 1 else f'{ended[0]} is marked as ended'
        return self._commit(finding, [put], done, *self._make_conditions(*unchanged))

    def _restore_stack(self, finding: Finding) -> str:
        stack, _, is_restored = load_stack(self.store, finding.subject)
        if stack is None or not is_restored:
            raise StaleFindingError
        return self._commit(finding, [Put(finding.keys[0], encode(stack))], f'{finding.keys[0]} is restored')

    def _commit(
        self, finding: Finding, operations: Sequence[Put | Delete], message: str, *conditions: Unchanged, lease: int = 0
    ) -> str:
        """Commit, or raise StaleFindingError and revoke `lease`, which the puts are already on."""
        as_read = self._make_conditions(*finding.keys)
        if commit_with_shared(self.store, [*conditions, *as_read], operations, make_empty_change, lease) is None:
            raise StaleFindingError
        return message

    def _make_conditions(self, *etcd_keys: str) -> list[Unchanged]:
        return [Unchanged(key, self.world.get_revision(key)) for key in etcd_keys]
