"""`eschedule audit --fix`: what two audits a minute apart both found, and what is safe to mend, is mended.

Everything is looked at once more right before it is touched, and touched only as it was read. Never a domain, nothing
that runs, nothing of somebody else's, nothing on a compute that does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.digest import clearance_to_json, cleared_from_json
from ecomp.model.findings import Finding, confirmed
from ecomp.model.group import from_json as group_from_json
from ecomp.model.instance import Request, named, parse_request
from ecomp.model.places import by_instance
from ecomp.model.planes import KeyValue
from ecomp.model.quota import Quota
from ecomp.model.record import ERROR, GONE, KEPT, from_json
from ecomp.placement import allocations
from ecomp.placement.claiming import release
from ecomp.placement.client import Placement
from ecomp.scheduler.looking.find import find
from ecomp.scheduler.operating.audit import SIGHTINGS_SECONDS, Report, Tell, answers, asking, audit
from ecomp.scheduler.operating.quotas import recount
from ecomp.store.alive import silence
from ecomp.store.client import Delete, Put, Store, Unchanged
from ecomp.store.places import lives
from ecomp.store.released import note
from ecomp.store.requests import at_it, wanted
from ecomp.store.sharing import commit_with, given_back, put_group, rejoined, unshared

AT_ONCE = 50
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
    due.sort(key=lambda each: each.code == 'quota-differs')  # counted once what has ended is gone
    done = []
    for each in due:
        if each.leftover is None:
            done.append(f'{each.code} {each.subject}: {_mended(store, placement, each, second.etcd)}')
    for compute in sorted({each.compute for each in due if each.leftover is not None}):
        done += _cleared(store, compute, [each for each in due if each.leftover and each.compute == compute])
    return done


def _mended(store: Store, placement: Placement, finding: Finding, etcd: dict[str, KeyValue]) -> str:
    subject = finding.subject
    repairs: dict[str, Callable[[], str]] = {
        'allocation-orphaned': lambda: _release(store, placement, subject),
        'allocation-missing': lambda: _claim_again(store, placement, finding, etcd),
        'name-missing': lambda: _name_back(store, subject, etcd),
        'name-orphaned': lambda: _name_away(store, subject, etcd),
        'hostname-orphaned': lambda: _hostname_away(store, subject, etcd),
        'group-missing': lambda: _group_back(store, finding, etcd),
        'group-orphaned': lambda: _group_away(store, subject, etcd),
        'quota-differs': lambda: _count_anew(store, subject),
    }
    try:
        return repairs.get(finding.code, lambda: _write(store, finding, etcd))()
    except (EcompError, ValueError) as error:
        return f'not known to be mended: {error}'


def _release(store: Store, placement: Placement, instance: str) -> str:
    on: list[str] = []

    def needed(holding: Mapping[str, allocations.Consumer]) -> Collection[str]:
        on[:] = sorted(holding[instance].allocations)
        return {instance} if lives(store, instance) else wanted(store, {instance: on})

    if not release(placement, [instance], needed, partial(note, store))[instance]:
        return NOT_ANY_MORE
    return f'released on {", ".join(on)}' if on else 'is released already'


def _claim_again(store: Store, placement: Placement, finding: Finding, etcd: dict[str, KeyValue]) -> str:
    """What was requested, for an instance that holds nothing: placement was restored, or somebody deleted its claim."""
    key, instance = keys.request(finding.compute, finding.subject), finding.subject
    request = parse_request(finding.compute, key, etcd[key].value) if key in etcd else None
    # The generation is read before etcd is; a claim that lands beside a destroy all the same is released by rule 4.
    held = allocations.consumer(placement, instance)
    entry = store.get(key)
    if not isinstance(request, Request) or request.is_tombstone or held.allocations or entry is None:
        return NOT_ANY_MORE
    if entry.revision != etcd[key].revision:
        return NOT_ANY_MORE
    allocations.claim(placement, instance, request.allocations, request.user_id, request.project_id, held.generation)
    return f'claimed again on {", ".join(sorted(request.allocations))}'


def _write(store: Store, finding: Finding, etcd: dict[str, KeyValue]) -> str:
    """Change one key, if it and the record are still as the second audit read them."""
    record, lease = _record_key(store, etcd, finding.subject), 0
    if finding.code == 'record-unleased':
        if record not in etcd or (state := from_json(etcd[record].value).state) not in KEPT:
            return NOT_ANY_MORE
        value = etcd[record].value
        lease = store.grant(KEPT[state])
        operation: Put | Delete = Put(record, value.decode(), lease)
        done = f'{record} is on a lease'
    elif finding.code == 'queued-doubled':
        (waiting,) = (key for key in etcd if key.startswith(keys.QUEUES) and keys.last(key) == finding.subject)
        operation = Delete(waiting)
        done = f'{waiting} is deleted'
    else:
        request = keys.request(finding.compute, finding.subject)
        operation = Delete(keys.booted(finding.subject) if finding.code == 'booted-orphaned' else request)
        done = f'{operation.key} is deleted'
    wished = [key for key in etcd if key.startswith(keys.HOSTS) and keys.last(key) == finding.subject]
    about = dict.fromkeys((operation.key, record, *wished))
    return done if commit_with(store, _as_read(etcd, *about), [operation], unshared, lease) else NOT_ANY_MORE


def _name_back(store: Store, instance: str, etcd: dict[str, KeyValue]) -> str:
    """The name its record says, if that is free and the instance is as the second audit read it."""
    found = find(store, instance)
    change = given_back(store, found.name, instance) if found is not None else None
    if found is None or found.name is None or change is None:
        return NOT_ANY_MORE
    conditions, operations = change
    about = [_record_key(store, etcd, instance), keys.request(found.record.compute, instance)]
    conditions = [*conditions, *_as_read(etcd, *about)]
    done = f'{keys.name(found.name)} is its own again'
    return done if operations and store.commit(conditions, operations) is not None else NOT_ANY_MORE


def _name_away(store: Store, name: str, etcd: dict[str, KeyValue]) -> str:
    """Delete a name nobody living has. What makes its instance live moves that one's record, or the name itself."""
    key = keys.name(name)
    conditions = _as_read(etcd, key, _record_key(store, etcd, named(etcd[key].value)))
    return f'{key} is deleted' if store.commit(conditions, [Delete(key)]) is not None else NOT_ANY_MORE


def _hostname_away(store: Store, compute: str, etcd: dict[str, KeyValue]) -> str:
    """Delete the name of a compute, unless that lives by now: it is known to placement first."""
    key, silent = keys.hostname(compute), silence(store, compute)
    done = silent is not None and store.commit([*_as_read(etcd, key), silent], [Delete(key)]) is not None
    return f'{key} is deleted' if done else NOT_ANY_MORE


def _group_back(store: Store, finding: Finding, etcd: dict[str, KeyValue]) -> str:
    """Into the group its request names, if that and the record are as the second audit read them."""
    instance, key = finding.subject, keys.request(finding.compute, finding.subject)
    request = parse_request(finding.compute, key, etcd[key].value) if key in etcd else None
    if not isinstance(request, Request) or request.group is None:
        return NOT_ANY_MORE
    conditions, operations = rejoined(store, request.group, instance, finding.compute)
    conditions = [*conditions, *_as_read(etcd, key, _record_key(store, etcd, instance))]
    done = f'it is in group {request.group.name}'
    return done if operations and store.commit(conditions, operations) is not None else NOT_ANY_MORE


def _group_away(store: Store, name: str, etcd: dict[str, KeyValue]) -> str:
    """Take out whoever has ended or never came: nothing asks for it, and its record is as the second audit read it."""
    key = keys.group(name)
    found = group_from_json(name, etcd[key].value)
    placing = at_it(store)
    out: dict[str, list[Unchanged]] = {}
    for instance, compute in found.members.items():
        record_key = _record_key(store, etcd, instance)
        record = etcd.get(record_key)
        is_living = record is not None and _may_live(record)
        if not is_living and instance not in placing and store.get(keys.request(compute, instance)) is None:
            unasked = Unchanged(keys.request(compute, instance), 0)
            out[instance] = [unasked, *_as_read(etcd, record_key)]
        if len(out) == AT_ONCE:
            break
    conditions = [*_as_read(etcd, key), *(each for about in out.values() for each in about)]
    if not out or store.commit(conditions, [put_group(found.without(*out))]) is None:
        return NOT_ANY_MORE
    return f'{", ".join(out)} is taken out' if len(out) == 1 else f'{len(out)} are taken out'


def _may_live(record: KeyValue) -> bool:
    try:
        return from_json(record.value).state not in (GONE, ERROR)
    except ValueError:
        return True


def _count_anew(store: Store, project: str) -> str:
    found = recount(store, project, lambda now: now or Quota(project))
    return 'counted anew' if found is not None else NOT_ANY_MORE


def _record_key(store: Store, etcd: dict[str, KeyValue], instance: str) -> str:
    """The key of the record that is believed, and of one that nobody has written yet."""
    at = by_instance((key, each) for key, each in etcd.items() if keys.last(key) == instance).get(instance)
    if at is not None and store.claims is not None:
        at.judge(instance, store.claims)  # the audit asked a moment ago
    return (at and (at.record_key or keys.record(at.compute, instance))) or keys.old_record(instance)


def _as_read(etcd: dict[str, KeyValue], *about: str) -> list[Unchanged]:
    return [Unchanged(key, etcd[key].revision if key in etcd else 0) for key in about]


def _cleared(store: Store, compute: str, findings: list[Finding]) -> list[str]:
    """Have a compute remove leftovers; it looks itself before it does."""
    leftovers = [each.leftover for each in findings if each.leftover is not None]
    try:
        with asking(store) as (name, lease):
            # The same answerer, and the same lease that ends it: a compute that has gone does nothing later.
            key = keys.clearance(name, compute)
            store.commit([Unchanged(key, 0)], [Put(key, clearance_to_json(leftovers), lease)])
            if compute not in answers(store, name, {compute}, 'clearing', 'cleared'):
                return [f'compute {compute}: not known to be mended: it gives no answer']
            entry = store.get(keys.digest(name, compute, 'cleared'))
            lines = cleared_from_json(entry.value) if entry is not None else []
            return [f'compute {compute}: {line}' for line in lines]
    except (EcompError, ValueError) as error:
        return [f'compute {compute}: not known to be mended: {error}']
