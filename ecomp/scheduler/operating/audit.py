"""`eschedule audit`: read all planes, compare them, report only what two looks agree on; `--fix` mends what is safe.

Each look asks every compute what it has, by a key on a lease; each answers below a key of its own, on its own lease.

What two audits a minute apart both found is looked at once more right before it is changed, and changed only as it
was read. Never changed are a domain, anything that runs or belongs to others, and anything on a compute that does not
answer.
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
from ecomp.model.audit import Finding, Repair, Revisions, confirmed
from ecomp.model.audit import audit as compare
from ecomp.model.backoff import Backoff
from ecomp.model.group import Group
from ecomp.model.json_object import dump
from ecomp.model.order import Request
from ecomp.model.quota import INSTANCES, Quota
from ecomp.model.record import KEPT
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import release
from ecomp.placement.client import Placement
from ecomp.scheduler.looking.find import find
from ecomp.scheduler.operating.sharing import recount
from ecomp.store.client import AT_ONCE as MOST
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged, at_it, wanted
from ecomp.store.sharing import commit_with, given_back, lives, note_released, put_group, rejoined, unshared

LEASE_SECONDS = 180
"""Seconds for which the question and the answers of an audit that is killed stay in etcd."""
HEARD_SECONDS, ANSWER_SECONDS = 5.0, 120.0
"""Seconds a compute may take to say that it heard, and then to say all: ten thousand domains take libvirt long."""
FIRST_DELAY, LAST_DELAY = 0.01, 0.25
AGAIN_SECONDS = 1.5
"""Seconds between the two looks of one audit."""
SIGHTINGS_SECONDS = keys.ATTEMPT_SECONDS
"""Seconds from one audit of --fix to the other (rule 4): the life of an attempt's lease."""
LOOKS = 4
"""Looks in one audit, at most: two that heard the same computes do."""
AT_ONCE = 8
"""Threads that ask placement about its providers."""
PAGE_DIGITS = 9
"""At most, of a page's number: what has more is no page of a digest."""
LONGEST_PROJECT = 255
"""Characters of a project's id at most: placement takes no more, and not none."""

Tell = Callable[[str], None]


class Report(NamedTuple):
    """What one audit saw: `world` in its last look.

    `revisions` are those of its first and last look at etcd; `stalled` are the computes that said that they heard, and
    gave no answer.
    """

    findings: list[Finding]
    compared: str
    world: planes.World
    revisions: tuple[Revisions, Revisions]
    stalled: frozenset[str]


def audit(
    store: Store, placement: Placement, again: float = AGAIN_SECONDS, stalled: frozenset[str] = frozenset()
) -> Report:
    """One audit. Only if a look finds something it looks again, `again` seconds later: both must have found it.

    `stalled` are computes that heard just now and gave no answer, for which it does not wait as long again.
    """
    first = last = _look(store, placement, stalled)
    found, etcd = compare(first), first.etcd
    for _ in range(LOOKS - 1 if found else 0):
        time.sleep(again)
        stalled |= last.stalled
        before, last = last, _look(store, placement, stalled)
        etcd = _etcd(store)
        revisions = [planes.involved(each) for each in (before.etcd, last.etcd, etcd)]
        found = confirmed(compare(before), compare(last), revisions)
        if before.digests.keys() == last.digests.keys():
            break  # else one of them knew less: what it did not see may be there
    world = planes.World(last)
    consumers = sum(1 for held in world.held.values() if not world.computes.isdisjoint(held))
    living = sum(world.is_living(each) for each in world.records)
    counted = zip((len(last.digests), living, consumers), ('compute', 'living instance', 'allocation'), strict=True)
    computes, instances, claims = (f'{number} {name}' + ('' if number == 1 else 's') for number, name in counted)
    compared = f'{computes}, {instances} and {claims} were compared'
    seen, stalled = (planes.involved(first.etcd), planes.involved(etcd)), stalled | last.stalled
    return Report(found, compared, world, seen, stalled)


@contextmanager
def asking(store: Store) -> Iterator[tuple[str, int]]:
    """A name for an audit and its lease: with the block ends what was asked, and what was answered is removed."""
    lease, name = store.grant(LEASE_SECONDS), str(uuid.uuid4())
    try:
        yield name, lease
    finally:
        with suppress(EcompError):  # then it runs out by itself
            store.revoke(lease)
            left = [key for key in store.snapshot(keys.DIGESTS, keys_only=True).entries if f'/{name}/' in key]
            for first in range(0, len(left), MOST):
                store.commit([], [Delete(key) for key in left[first : first + MOST]])


def answers(
    store: Store, audit: str, computes: set[str], heard: str, answered: str, stalled: Collection[str] = ()
) -> set[str]:
    """Wait for each compute's part `answered`; those that gave it.

    Who does not put part `heard` soon is given up, and so is who was `stalled` before, whatever it puts.
    """
    began, backoff = time.monotonic(), Backoff(FIRST_DELAY, LAST_DELAY)
    while True:
        there = store.snapshot(keys.DIGESTS, keys_only=True).entries
        done = {compute for compute in computes if keys.digest(audit, compute, answered) in there}
        going = {compute for compute in computes.difference(stalled) if keys.digest(audit, compute, heard) in there}
        spent = time.monotonic() - began
        if done >= computes or spent > ANSWER_SECONDS or (spent > HEARD_SECONDS and done >= going):
            return done
        time.sleep(backoff.next())


def _look(store: Store, placement: Placement, stalled: Collection[str]) -> planes.Planes:
    """All planes. etcd first: what changes later is then seen by its revision in the next look."""
    etcd = _etcd(store)
    # Who is alive for ever, by a key without a lease, is not waited for.
    alive = {keys.last(key) for key, kept in etcd.items() if key.startswith(keys.COMPUTES) and kept.lease}
    with ThreadPoolExecutor(AT_ONCE) as threads, asking(store) as (name, lease):
        # First the computes are asked: they work while placement is read.
        value = dump({'version': 1})
        if store.commit([Unchanged(keys.audit(name), 0)], [Put(keys.audit(name), value, lease)]) is None:
            raise EcompError(f'{keys.audit(name)} is there already')
        held = dict(threads.map(lambda each: _provider(placement, *each), providers.names(placement).items()))
        answered = answers(store, name, alive, 'heard', '0', stalled)
        late = alive - answered
        there = store.snapshot(keys.DIGESTS, keys_only=True).entries if late else {}
        stalled_now = frozenset(each for each in late if keys.digest(name, each, 'heard') in there)
        digests: dict[str, planes.Digest] = {}
        mute = dict.fromkeys(late, 'it does not answer: frozen, killed this minute, or too old?')
        for compute in sorted(answered):
            pages = store.snapshot(keys.digest_prefix(name, compute)).entries
            numbered = sorted((int(keys.last(key)), each.value) for key, each in pages.items() if _is_page(key))
            try:
                digests[compute] = planes.from_pages([value for _, value in numbered])
            except ValueError as error:
                mute[compute] = str(error)
    usages = {project: _usage(placement, project) for project in _projects(etcd)}
    states = {each: found for each, found in held.items() if found is not None}
    return planes.Planes(states, etcd, digests, mute, usages, stalled_now)


def _projects(etcd: Mapping[str, Entry]) -> list[str]:
    """The projects that have a quota; what placement would refuse to be asked about is none, whatever its key says."""
    named = (key.removeprefix(keys.QUOTAS) for key in etcd if key.startswith(keys.QUOTAS))
    return [project for project in named if 0 < len(project) <= LONGEST_PROJECT]


def _usage(placement: Placement, project: str) -> dict[str, int]:
    """What placement counts for a project, as a quota counts it."""
    count, used = providers.project_usages(placement, project)
    return {**used, **({INSTANCES: count} if count else {})}


def _etcd(store: Store) -> dict[str, Entry]:
    return {key: entry for family in planes.FAMILIES for key, entry in store.snapshot(family).entries.items()}


def _provider(placement: Placement, provider: str, name: str) -> tuple[str, planes.ProviderState | None]:
    try:
        inventory = providers.inventory(placement, provider)
        return provider, planes.ProviderState(name, inventory, allocations.of_provider(placement, provider))
    except NotFound:
        return provider, None  # removed this moment


def _is_page(key: str) -> bool:
    # A compute may write any key there, and of 5,000 digits Python makes no number.
    number = keys.last(key)
    return number.isascii() and number.isdecimal() and len(number) <= PAGE_DIGITS


MAX_MEMBERS_PER_TRANSACTION = 50
"""Members taken out of a group at once: each is two of the 128 conditions that etcd takes in a transaction."""
NOT_ANY_MORE = 'left alone: it has changed since'


def fix(store: Store, placement: Placement, tell: Tell, apart: float = SIGHTINGS_SECONDS) -> Report:
    """Audit twice, `apart` seconds from each other, mend what both found, and audit again; that report.

    `tell` gets a line for what is waited for and for each repair.
    """
    first = audit(store, placement)
    if not any(each.fix for each in first.findings):
        return first
    tell(f'{len(first.findings)} found; looking again in {apart:g} s, before anything is changed')
    time.sleep(apart)
    second = audit(store, placement, stalled=first.stalled)
    for each in mend(store, placement, first, second):
        tell(each)
    return audit(store, placement, stalled=first.stalled | second.stalled)


def mend(store: Store, placement: Placement, first: Report, second: Report) -> list[str]:
    """Mend what both audits found; a line for each repair, done or not."""
    revisions = [*first.revisions, *second.revisions]
    due = [each for each in confirmed(first.findings, second.findings, revisions) if each.fix]
    due.sort(key=lambda each: each.repair is Repair.RECOUNT)  # once what has ended is gone
    repairs = _Repairs(store, placement, second.world)
    done = [f'{each.code} {each.subject}: {repairs.carry_out(each)}' for each in due if each.leftover is None]
    for compute in sorted({each.compute for each in due if each.leftover is not None}):
        done += _cleared(store, compute, [each for each in due if each.leftover and each.compute == compute])
    return done


@dataclass(frozen=True)
class _Repairs:
    """Repairs of what two audits found, each done only as the second one read it, which is `world`."""

    store: Store
    placement: Placement
    world: planes.World

    def carry_out(self, finding: Finding) -> str:
        """Repair one finding; what became of it, in words."""
        repairs: dict[Repair | None, Callable[[Finding], str]] = {
            **dict.fromkeys((Repair.DELETE, Repair.DELETE_REQUEST, Repair.UNQUEUE), self._delete),
            Repair.PUT_ON_LEASE: self._put_on_lease,
            Repair.RELEASE: lambda orphan: _release(self.store, self.placement, orphan.subject),
            Repair.CLAIM: self._claim,
            Repair.RESTORE_NAME: self._restore_name,
            Repair.JOIN_GROUP: self._join_group,
            Repair.LEAVE_GROUP: self._leave_group,
            Repair.RECOUNT: self._recount,
        }
        try:
            return repairs[finding.repair](finding)
        except (EcompError, ValueError) as error:
            return f'not known to be mended: {error}'

    def _delete(self, finding: Finding) -> str:
        key = finding.keys[0]
        return self._commit(finding, [Delete(key)], f'{key} is deleted')

    def _put_on_lease(self, finding: Finding) -> str:
        key, state = finding.keys[0], self.world.records[finding.subject].state
        lease = self.store.grant(KEPT[state])
        put = Put(key, self.world.planes.etcd[key].value.decode(), lease)
        return self._commit(finding, [put], f'{key} is on a lease', lease=lease)

    def _claim(self, finding: Finding) -> str:
        """What was requested, for an instance that holds nothing: placement was restored, or its claim was deleted."""
        instance, key = finding.subject, keys.request(finding.compute, finding.subject)
        wish = self.world.wishes.get(instance, {}).get(finding.compute)
        # The generation is read before etcd is; a claim that lands beside a destroy all the same is released by rule 4.
        held = allocations.consumer(self.placement, instance)
        entry = self.store.get(key)
        if not isinstance(wish, Request) or wish.is_tombstone or held.allocations:
            return NOT_ANY_MORE
        if entry is None or entry.revision != self.world.revision(key):
            return NOT_ANY_MORE
        who = wish.user_id, wish.project_id
        allocations.claim_once(self.placement, instance, wish.allocations, *who, held.generation)
        return f'claimed again on {", ".join(sorted(wish.allocations))}'

    def _restore_name(self, finding: Finding) -> str:
        """The name its record says, if that is free."""
        found = find(self.store, finding.subject)
        change = given_back(self.store, found.name, finding.subject) if found is not None else None
        if found is None or found.name is None or change is None or not change[1]:
            return NOT_ANY_MORE
        conditions, operations = change
        return self._commit(finding, operations, f'{keys.name(found.name)} is its own again', conditions)

    def _join_group(self, finding: Finding) -> str:
        """Into the group that its request names."""
        wish = self.world.wishes[finding.subject][finding.compute]
        if not isinstance(wish, Request) or wish.group is None:
            return NOT_ANY_MORE
        conditions, operations = rejoined(self.store, wish.group, finding.subject, finding.compute)
        done = f'it is in group {wish.group.name}'
        return self._commit(finding, operations, done, conditions) if operations else NOT_ANY_MORE

    def _leave_group(self, finding: Finding) -> str:
        """Take out whoever has ended or never came: nothing asks for it, and its record says nothing else."""
        found, placing = self.world.groups[finding.subject], at_it(self.store)
        assert isinstance(found, Group)  # else its finding is another one
        out: dict[str, list[Unchanged]] = {}
        for instance, compute in found.members.items():
            may_live = self.world.is_living(instance) or instance in self.world.unreadable
            request = keys.request(compute, instance)
            if not may_live and instance not in placing and self.store.get(request) is None:
                out[instance] = [Unchanged(request, 0), *self._as_read(self.world.record_key(instance))]
            if len(out) == MAX_MEMBERS_PER_TRANSACTION:
                break
        if not out:
            return NOT_ANY_MORE
        conditions = [each for about in out.values() for each in about]
        done = f'{", ".join(out)} is taken out' if len(out) == 1 else f'{len(out)} are taken out'
        return self._commit(finding, [put_group(found.without(*out))], done, conditions)

    def _recount(self, finding: Finding) -> str:
        found = recount(self.store, finding.subject, lambda now: now or Quota(finding.subject))
        return 'counted anew' if found is not None else NOT_ANY_MORE

    def _commit(
        self,
        finding: Finding,
        operations: Sequence[Put | Delete],
        done: str,
        conditions: Sequence[Unchanged] = (),
        lease: int = 0,
    ) -> str:
        """Change etcd if the keys of the finding are as the second audit read them; `done`, or that they are not."""
        as_read = self._as_read(*finding.keys)
        written = commit_with(self.store, [*conditions, *as_read], operations, unshared, lease)
        return done if written is not None else NOT_ANY_MORE

    def _as_read(self, *about: str) -> list[Unchanged]:
        return [Unchanged(key, self.world.revision(key)) for key in about]


def _release(store: Store, placement: Placement, instance: str) -> str:
    on: list[str] = []

    def needed(holding: Mapping[str, allocations.Consumer]) -> Collection[str]:
        on[:] = sorted(holding[instance].allocations)
        return {instance} if lives(store, instance) else wanted(store, {instance: on})

    if not release(placement, [instance], needed, partial(note_released, store))[instance]:
        return NOT_ANY_MORE
    return f'released on {", ".join(on)}' if on else 'is released already'


def _cleared(store: Store, compute: str, findings: list[Finding]) -> list[str]:
    """Have a compute remove leftovers; it looks itself before it does."""
    leftovers = [each.leftover for each in findings if each.leftover is not None]
    try:
        with asking(store) as (name, lease):
            # The same answerer, and the same lease that ends it: a compute that has gone does nothing later.
            key = keys.clearance(name, compute)
            store.commit([Unchanged(key, 0)], [Put(key, planes.clearance_to_json(leftovers), lease)])
            if compute not in answers(store, name, {compute}, 'clearing', 'cleared'):
                return [f'compute {compute}: not known to be mended: it gives no answer']
            entry = store.get(keys.digest(name, compute, 'cleared'))
            lines = planes.cleared_from_json(entry.value) if entry is not None else []
            return [f'compute {compute}: {line}' for line in lines]
    except (EcompError, ValueError) as error:
        return [f'compute {compute}: not known to be mended: {error}']
