"""Audit etcd, placement and computes: report what two reads find, and repair it for --fix.

A key on a lease asks every compute for a digest. A repair needs the same finding in two audits a minute apart, and
unchanged keys. Domains, running instances, foreign data and silent computes are never changed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ecomp.errors import EcompError, NotFound
from ecomp.model import keys, planes
from ecomp.model.allocation import Allocations
from ecomp.model.audit import Finding, Repair, Revisions, confirm_findings, list_orphaned_entries
from ecomp.model.audit import audit as compare
from ecomp.model.backoff import Backoff
from ecomp.model.group import Group
from ecomp.model.json_object import dump, load
from ecomp.model.level import ERROR, count_findings, get_level
from ecomp.model.order import Request
from ecomp.model.quota import INSTANCES, Quota
from ecomp.model.record import RETENTION_SECONDS
from ecomp.model.stack import Stack
from ecomp.model.stored import encode
from ecomp.model.text import make_printable
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import release
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.sharing import recount_quota
from ecomp.scheduler.queries.find import find
from ecomp.scheduler.queries.stacks import load_stack
from ecomp.store.client import MAX_TRANSACTION_OPERATIONS as MOST
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged, find_needed, read_pending_instances
from ecomp.store.sharing import (
    commit_with_shared,
    has_unfinished_record,
    make_empty_change,
    make_group_operation,
    note_released,
    rejoin_group,
    restore_name,
)

# Seconds for which the keys of a killed audit, questions and answers, stay in etcd.
LEASE_SECONDS = 180
# Seconds in which a compute has to acknowledge an audit, and then to answer: libvirt needs long for 10,000 domains.
HEARD_TIMEOUT_SECONDS = 5.0
ANSWER_TIMEOUT_SECONDS = 120.0
MIN_POLL_SECONDS = 0.01
MAX_POLL_SECONDS = 0.25
# Seconds between two reads of one audit.
READ_INTERVAL_SECONDS = 1.5
# Seconds between the two audits of --fix (rule: orphaned-claim): the life of an attempt's lease.
AUDIT_INTERVAL_SECONDS = keys.ATTEMPT_SECONDS
# Reads in one audit, at most. Two are enough if the same computes answered.
MAX_READS = 4
PLACEMENT_THREADS = 8
# Digits of a page number in a digest, at most; a key with more is no page.
MAX_PAGE_DIGITS = 9
# Characters of a project id, at most: placement refuses longer ones, and empty ones.
MAX_PROJECT_CHARACTERS = 255

Notify = Callable[[str], None]


class Report(NamedTuple):
    """The result of an audit, its last read (`world`), and the revisions of its first and last reads of etcd.

    `stalled` are the computes that acknowledged a read and did not answer, here or in the last audit.
    """

    findings: list[Finding]
    summary: str
    world: planes.AuditIndex
    revisions: tuple[Revisions, Revisions]
    stalled: frozenset[str]


def audit(
    store: Store,
    placement: Placement,
    interval_seconds: float = READ_INTERVAL_SECONDS,
    stalled: frozenset[str] = frozenset(),
) -> Report:
    """Audit once: if the first read has findings, read again and report those that the last two reads confirm.

    It reads at intervals until two successive reads have digests of the same computes, MAX_READS times at most. For
    `stalled`, computes of the last report, it waits HEARD_TIMEOUT_SECONDS. Raises the errors of etcd and placement.
    """
    first = last = _read_planes(store, placement, stalled)
    findings, etcd = compare(first), first.etcd
    for _ in range(MAX_READS - 1 if findings else 0):
        time.sleep(interval_seconds)
        stalled |= last.stalled
        previous, last = last, _read_planes(store, placement, stalled)
        etcd = _read_etcd(store)
        revisions = [planes.index_revisions(entries) for entries in (previous.etcd, last.etcd, etcd)]
        findings = confirm_findings(compare(previous), compare(last), revisions)
        if previous.digests.keys() == last.digests.keys():
            break  # otherwise one of the two reads lacks what a compute has
    world = planes.AuditIndex(last)
    consumers = sum(1 for held in world.allocations.values() if not world.computes.isdisjoint(held))
    living = sum(world.is_living(instance) for instance in world.records)
    counted = zip((len(last.digests), living, consumers), ('compute', 'living instance', 'allocation'), strict=True)
    computes, instances, claims = (f'{number} {name}' + ('' if number == 1 else 's') for number, name in counted)
    compared = f'{computes}, {instances} and {claims} were compared'
    revisions_read, stalled = (planes.index_revisions(first.etcd), planes.index_revisions(etcd)), stalled | last.stalled
    return Report(findings, compared, world, revisions_read, stalled)


@contextmanager
def open_audit_session(store: Store) -> Iterator[tuple[str, int]]:
    """Yield a new audit's name and lease; at the end, even after an error, revoke the lease and delete the answers.

    An EcompError of this cleanup is ignored: what remains expires.
    """
    lease, name = store.grant(LEASE_SECONDS), str(uuid.uuid4())
    try:
        yield name, lease
    finally:
        with suppress(EcompError):  # the lease then expires
            store.revoke(lease)
            answer_keys = [key for key in store.snapshot(keys.DIGESTS, keys_only=True).entries if f'/{name}/' in key]
            for first in range(0, len(answer_keys), MOST):
                store.commit([], [Delete(key) for key in answer_keys[first : first + MOST]])


def wait_for_answers(
    store: Store, audit_name: str, computes: set[str], heard_part: str, answer_part: str, stalled: Collection[str] = ()
) -> set[str]:
    """Wait until each compute has written its `answer_part`, ANSWER_TIMEOUT_SECONDS at most; return those that did.

    A compute in `stalled`, or without its `heard_part`, is given up after HEARD_TIMEOUT_SECONDS.
    """
    began, backoff = time.monotonic(), Backoff(MIN_POLL_SECONDS, MAX_POLL_SECONDS)
    while True:
        parts = store.snapshot(keys.DIGESTS, keys_only=True).entries
        done = {compute for compute in computes if keys.digest(audit_name, compute, answer_part) in parts}
        going = {
            compute for compute in computes.difference(stalled) if keys.digest(audit_name, compute, heard_part) in parts
        }
        elapsed = time.monotonic() - began
        if done >= computes or elapsed > ANSWER_TIMEOUT_SECONDS or (elapsed > HEARD_TIMEOUT_SECONDS and done >= going):
            return done
        time.sleep(backoff.next())


def _read_planes(store: Store, placement: Placement, stalled: Collection[str]) -> planes.Planes:
    """Read all planes, etcd first: the revisions of the next read then show later changes.

    It asks living computes for digests; those without a valid one are in `mute_reasons`. Raises the backends' errors.
    """
    etcd = _read_etcd(store)
    # A presence key without a lease proves no life: its compute is not waited for.
    alive = {keys.get_last_part(key) for key, entry in etcd.items() if key.startswith(keys.COMPUTES) and entry.lease}
    with ThreadPoolExecutor(PLACEMENT_THREADS) as threads, open_audit_session(store) as (name, lease):
        # The computes first: they prepare their digests while placement is read.
        value = dump({'version': 1})
        if store.commit([Unchanged(keys.audit(name), 0)], [Put(keys.audit(name), value, lease)]) is None:
            raise EcompError(f'{keys.audit(name)}: key exists already')
        held = dict(
            threads.map(lambda each: _read_provider(placement, *each), providers.read_provider_names(placement).items())
        )
        answered = wait_for_answers(store, name, alive, 'heard', '0', stalled)
        late = alive - answered
        parts = store.snapshot(keys.DIGESTS, keys_only=True).entries if late else {}
        stalled_now = frozenset(
            late_compute for late_compute in late if keys.digest(name, late_compute, 'heard') in parts
        )
        digests: dict[str, planes.Digest] = {}
        mute = dict.fromkeys(
            late, 'it does not answer: its ecompute is frozen, was killed in the last minute, or is too old'
        )
        for compute in sorted(answered):
            pages = store.snapshot(keys.digest_prefix(name, compute)).entries
            numbered = sorted(
                (int(keys.get_last_part(key)), page.value) for key, page in pages.items() if _is_page_key(key)
            )
            try:
                digests[compute] = planes.from_pages([value for _, value in numbered])
            except ValueError as error:
                mute[compute] = str(error)
    projects = [key.removeprefix(keys.QUOTAS) for key in etcd if key.startswith(keys.QUOTAS)]
    usages = {each: _read_usage(placement, each) for each in projects if 0 < len(each) <= MAX_PROJECT_CHARACTERS}
    states = {provider: state for provider, state in held.items() if state is not None}
    return planes.Planes(states, etcd, digests, mute, usages, stalled_now)


def _read_usage(placement: Placement, project: str) -> dict[str, int]:
    """Read what placement counts for a project: {class or 'instances': amount}, without zeros."""
    count, used = providers.read_project_usages(placement, project)
    return {**used, **({INSTANCES: count} if count else {})}


def _read_etcd(store: Store) -> dict[str, Entry]:
    """Read all audited prefixes: {key: entry}."""
    return {key: entry for family in planes.AUDITED_PREFIXES for key, entry in store.snapshot(family).entries.items()}


def _read_provider(placement: Placement, provider: str, name: str) -> tuple[str, planes.ProviderState | None]:
    """Return the provider and its state: None if it was removed since the list was read."""
    try:
        inventory = providers.read_raw_inventory(placement, provider)
        return provider, planes.ProviderState(
            name, inventory, allocations.read_provider_allocations(placement, provider)
        )
    except NotFound:
        return provider, None  # removed since the list was read


def _is_page_key(key: str) -> bool:
    """Return True if the key ends in a number of 1 to MAX_PAGE_DIGITS digits."""
    # A compute may write any key there, and int() refuses 5,000 digits.
    number = keys.get_last_part(key)
    return number.isascii() and number.isdecimal() and len(number) <= MAX_PAGE_DIGITS


# Each member takes two of the 128 conditions that etcd allows in a transaction.
MAX_MEMBERS_PER_TRANSACTION = 50
CHANGED_SINCE = 'not repaired: it has changed since the audit'


def fix(store: Store, placement: Placement, notify: Notify, interval_seconds: float = AUDIT_INTERVAL_SECONDS) -> Report:
    """Audit twice, `interval_seconds` apart, repair what both found, audit again and return the last report.

    `notify` gets each line of progress. If the first audit has no repairable finding, its report is returned.
    """
    first = audit(store, placement)
    if not any(finding.fix for finding in first.findings):
        return first
    count = count_findings([finding.code for finding in first.findings if get_level(finding.code) == ERROR])
    notify(f'{count}; the audit is repeated in {interval_seconds:g} s, before anything is changed')
    time.sleep(interval_seconds)
    second = audit(store, placement, stalled=first.stalled)
    for line in repair_findings(store, placement, first, second):
        notify(line)
    return audit(store, placement, stalled=first.stalled | second.stalled)


def repair_findings(store: Store, placement: Placement, first: Report, second: Report) -> list[str]:
    """Repair what both audits found with unchanged keys; return lines about repairs, errors and leftovers."""
    revisions = [*first.revisions, *second.revisions]
    due = [finding for finding in confirm_findings(first.findings, second.findings, revisions) if finding.fix]
    due.sort(key=lambda each: each.repair is Repair.RECOUNT)  # after the repairs that change the usage
    repairs = _Repairs(store, placement, second.world)
    done = [
        f'{finding.code} {finding.subject}: {repairs.carry_out(finding)}' for finding in due if finding.leftover is None
    ]
    for compute in sorted({finding.compute for finding in due if finding.leftover is not None}):
        done += _clear_leftovers(
            store, compute, [finding for finding in due if finding.leftover and finding.compute == compute]
        )
    # Each is one line: names in keys, and answers of computes, may contain line breaks.
    return [make_printable(line) for line in done]


@dataclass(frozen=True)
class _Repairs:
    """Repairs by finding. `world` is the second audit's last read, with which _commit() compares the finding's keys."""

    store: Store
    placement: Placement
    world: planes.AuditIndex

    def carry_out(self, finding: Finding) -> str:
        """Repair one finding; return a sentence about the result, also for an error."""
        repairs: dict[Repair | None, Callable[[Finding], str]] = {
            **dict.fromkeys((Repair.DELETE, Repair.DELETE_REQUEST, Repair.UNQUEUE), self._delete),
            Repair.PUT_ON_LEASE: self._put_on_lease,
            Repair.RELEASE: lambda orphan: _release_orphan(self.store, self.placement, orphan.subject),
            Repair.CLAIM: self._claim,
            Repair.RESTORE_NAME: self._restore_name,
            Repair.JOIN_GROUP: self._join_group,
            Repair.LEAVE_GROUP: self._remove_from_group,
            Repair.RECOUNT: self._recount,
            Repair.END_ENTRIES: self._end_entries,
            Repair.RESTORE_STACK: self._restore_stack,
        }
        try:
            return repairs[finding.repair](finding)
        except (EcompError, ValueError) as error:
            return f'it is unknown whether the repair was made: {error}'

    def _delete(self, finding: Finding) -> str:
        """Delete the first of the finding's keys; return a sentence, CHANGED_SINCE if it is not done."""
        key = finding.keys[0]
        return self._commit(finding, [Delete(key)], f'{key} is deleted')

    def _put_on_lease(self, finding: Finding) -> str:
        """Write the record again on a new lease of its state's retention; return a sentence or CHANGED_SINCE."""
        key, state = finding.keys[0], self.world.records[finding.subject].state
        lease = self.store.grant(RETENTION_SECONDS[state])
        put = Put(key, self.world.planes.etcd[key].value.decode(), lease)
        return self._commit(finding, [put], f'{key} is on a lease', lease=lease)

    def _claim(self, finding: Finding) -> str:
        """Claim what a valid, unchanged request names; CHANGED_SINCE without one, for a tombstone or with a claim."""
        instance, key = finding.subject, keys.request(finding.compute, finding.subject)
        parsed = self.world.requests_by_compute.get(instance, {}).get(finding.compute)
        # The generation is read before etcd. A claim that lands beside a destroy is an orphan.
        held = allocations.read_consumer(self.placement, instance)
        entry = self.store.get(key)
        if not isinstance(parsed, Request) or parsed.is_tombstone or held.allocations:
            return CHANGED_SINCE
        if entry is None or entry.revision != self.world.get_revision(key):
            return CHANGED_SINCE
        owner = parsed.user_id, parsed.project_id
        allocations.replace_allocations(self.placement, instance, parsed.allocations, *owner, held.generation)
        return f'claimed again on {", ".join(sorted(parsed.allocations))}'

    def _restore_name(self, finding: Finding) -> str:
        """Write the key of the instance's name; CHANGED_SINCE without a name, or if any living instance holds it."""
        entries = find(self.store, finding.subject)
        name = entries.record.name if entries is not None else None
        change = restore_name(self.store, name, finding.subject)
        if name is None or change is None or not change[1]:
            return CHANGED_SINCE
        conditions, operations = change
        return self._commit(finding, operations, f'{keys.name(name)} is restored', conditions)

    def _join_group(self, finding: Finding) -> str:
        """Add the instance to its request's group; CHANGED_SINCE if it names none, or the instance is a member."""
        parsed = self.world.requests_by_compute[finding.subject][finding.compute]
        if not isinstance(parsed, Request) or parsed.group is None:
            return CHANGED_SINCE
        conditions, operations = rejoin_group(self.store, parsed.group, finding.subject, finding.compute)
        done = f'the instance is in group {parsed.group.name}'
        return self._commit(finding, operations, done, conditions) if operations else CHANGED_SINCE

    def _remove_from_group(self, finding: Finding) -> str:
        """Remove members without request, attempt, living or malformed record, MAX_MEMBERS_PER_TRANSACTION at most."""
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
            return CHANGED_SINCE
        conditions = [condition for unchanged in leaving.values() for condition in unchanged]
        done = f'{", ".join(leaving)} is removed' if len(leaving) == 1 else f'{len(leaving)} members are removed'
        return self._commit(finding, [make_group_operation(current_group.without_members(*leaving))], done, conditions)

    def _recount(self, finding: Finding) -> str:
        """Count the usage of a project's quota again; CHANGED_SINCE if it has no limits."""
        counted = recount_quota(self.store, finding.subject, lambda now: now or Quota(finding.subject))
        return 'recounted' if counted is not None else CHANGED_SINCE

    def _end_entries(self, finding: Finding) -> str:
        """Mark the entries of a stack whose instances are gone as ended, MAX_MEMBERS_PER_TRANSACTION at most."""
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
        return self._commit(finding, [put], done, self._make_conditions(*unchanged))

    def _restore_stack(self, finding: Finding) -> str:
        """Write the key of a stack as its requests show it; CHANGED_SINCE without any, or if the key has entries."""
        stack, _, is_restored = load_stack(self.store, finding.subject)
        if stack is None or not is_restored:
            return CHANGED_SINCE
        return self._commit(finding, [Put(finding.keys[0], encode(stack))], f'{finding.keys[0]} is restored')

    def _commit(
        self,
        finding: Finding,
        operations: Sequence[Put | Delete],
        message: str,
        conditions: Sequence[Unchanged] = (),
        lease: int = 0,
    ) -> str:
        """Change etcd and return `message`; if a key or condition changed, revoke `lease`, return CHANGED_SINCE."""
        as_read = self._make_conditions(*finding.keys)
        written = commit_with_shared(self.store, [*conditions, *as_read], operations, make_empty_change, lease)
        return message if written is not None else CHANGED_SINCE

    def _make_conditions(self, *etcd_keys: str) -> list[Unchanged]:
        """Return the conditions that these keys are as in `world`, or still missing."""
        return [Unchanged(key, self.world.get_revision(key)) for key in etcd_keys]


def _release_orphan(store: Store, placement: Placement, instance: str) -> str:
    """Release and note a consumer's claims; CHANGED_SINCE if changed, or with a request, attempt or living record."""
    computes: list[str] = []

    def find_kept(holding: Mapping[str, Allocations]) -> Collection[str]:
        computes[:] = sorted(holding[instance])
        return holding if has_unfinished_record(store, instance) else find_needed(store, holding)

    if not release(placement, [instance], find_kept, partial(note_released, store))[instance]:
        return CHANGED_SINCE
    return f'released on {", ".join(computes)}' if computes else 'is already released'


def _clear_leftovers(store: Store, compute: str, findings: list[Finding]) -> list[str]:
    """Have a compute check and remove leftovers; return its line for each, or one line for an error or no answer."""
    leftovers = [finding.leftover for finding in findings if finding.leftover is not None]
    try:
        with open_audit_session(store) as (name, lease):
            # The key is on the audit's lease: a compute that answers late does nothing.
            key = keys.clearance(name, compute)
            store.commit([Unchanged(key, 0)], [Put(key, encode(planes.Clearance(leftovers)), lease)])
            if compute not in wait_for_answers(store, name, {compute}, 'clearing', 'cleared'):
                return [
                    f'compute {compute}: it is unknown whether the repair was made, because the compute does not answer'
                ]
            entry = store.get(keys.digest(name, compute, 'cleared'))
            lines = planes.parse_answer(load(entry.value)) if entry is not None else []
            return [f'compute {compute}: {line}' for line in lines]
    except (EcompError, ValueError) as error:
        return [f'compute {compute}: it is unknown whether the repair was made: {error}']
