"""What happened, in words: one change of etcd's keys, before and after, as events. Pure.

etcd keeps what its keys held, and not when: an event's time is what the new values say of it (a stage, a boot), else it
is not known. What changes without news for anybody (progress, claims, answers to audits) is no event.
An event is what was written, and nobody is believed by it: a compute writes what it likes below its own uuid, which is
the event's `compute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from ecomp.model import boots, keys
from ecomp.model.flavor import from_json as flavor_from_json
from ecomp.model.group import from_json as group_from_json
from ecomp.model.json_object import is_text, load_if_object
from ecomp.model.order import ASKED, OFF, Invalid, Request, named, parse_request, phase
from ecomp.model.queue import marked_by, parse_waiting
from ecomp.model.quota import from_json as quota_from_json
from ecomp.model.record import ACTIVE, ERROR, QUEUED, Interface, Record, from_json

LONGEST = 500
"""Characters of an event's words: some are quoted from etcd."""
KINDS = ('instance', 'request', 'queue', 'name', 'compute', 'group', 'quota', 'flavor', 'cluster')
"""What an event is about."""

Host = Callable[[str], str]
"""What a compute is called, by its uuid."""


class Change(NamedTuple):
    """One key at one revision: its value `before` and `after`, None where it was not there.

    `is_known` False: etcd has forgotten what it was before.
    """

    key: str
    before: bytes | None
    after: bytes | None
    revision: int
    is_known: bool = True


@dataclass(frozen=True)
class Event:
    """One thing that happened, at one of etcd's revisions: `says` in words, of one of KINDS.

    `time` is ISO, '' where nobody wrote it down. Of an instance `instance` is its uuid and `name` its name, '' for
    none; `compute` is a uuid, '' where there is none to it.
    """

    revision: int
    kind: str
    says: str
    instance: str = ''
    name: str = ''
    compute: str = ''
    time: str = ''


Told = Iterator[tuple[Event, Iterable[str]]]


def told(changes: Sequence[Change], host: Host, seen: str = '') -> list[Event]:
    """The events of one revision: what its changes say. `seen` is when that was heard, '' for long after it."""
    taken = {keys.last(each.key): each.key.split('/')[2] for each in changes if _is_request(each)}
    found = [each for change in changes for each in _TOLD.get(_family(change.key), _nothing)(change, host, taken)]
    times = [time for _, said in found for time in said if _is_time(time)]
    when = max(times, default=seen)
    return [
        Event(each.revision, each.kind, each.says[:LONGEST], each.instance, each.name, each.compute, when)
        for each, _ in found
    ]


def as_object(event: Event) -> dict[str, Any]:
    """The event as the JSON object that users see: what is not known is null."""
    order = ('revision', 'time', 'kind', 'instance', 'name', 'compute', 'says')
    return {name: getattr(event, name) or None for name in order}


def _family(key: str) -> str:
    return '/'.join(key.split('/')[:2]) + '/' if key.count('/') > 1 else key


def _is_request(change: Change) -> bool:
    return change.key.startswith(keys.HOSTS) and change.before is None and change.key.count('/') == 3


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None and len(text) == len('2026-01-31T12:00:00.000Z')
    except ValueError:
        return False


def _nothing(_change: Change, _host: Host, _taken: Mapping[str, str]) -> Told:
    return iter(())


def _record(change: Change, host: Host, _taken: Mapping[str, str]) -> Told:
    compute, instance = keys.recorded(change.key)
    if change.after is None and compute is None:
        return  # ecomp 1.0's: it moved below its compute
    if change.after is None:
        yield Event(change.revision, 'instance', 'its record is gone', instance, compute=compute or ''), ()
        return
    before, after = (_read(value, instance, compute) for value in (change.before, change.after))
    if after is None:
        yield Event(change.revision, 'instance', 'its record cannot be read', instance, compute=compute or ''), ()
        return
    new = [time for name, time in after.stages.items() if before is None or before.stages.get(name) != time]
    new += [time for each in after.boots if before is None or each not in before.boots for time in each.stages.values()]
    for says in _news(before, after, host, change.is_known):
        yield Event(change.revision, 'instance', says, after.instance, after.name or '', after.compute), new


def _read(value: bytes | None, instance: str, compute: str | None) -> Record | None:
    try:
        return from_json(value, instance, compute) if value is not None else None
    except ValueError:
        return None


def _news(before: Record | None, after: Record, host: Host, is_known: bool) -> Iterator[str]:
    """What a record says that it did not say before. Of one whose past is forgotten: what it is."""
    was = before or Record(after.instance, '', QUEUED)
    if after.state != was.state:
        on = f' on {host(after.compute)}' if before is None and after.compute else ''
        yield f'{after.state}{on}' + (f': at stage {after.error.stage}: {after.error.reason}' if after.error else '')
    if not is_known:
        return
    for stage in ('image', 'disk'):
        if stage in after.stages and stage not in was.stages and after.state not in (ACTIVE, ERROR):
            yield f'{after.state}: {stage}'
    begun = after.boot
    if begun is not None and begun.number > 1 and (was.boot is None or was.boot.number < begun.number):
        yield f'boot {begun.number}: {begun.reason}'
    addresses = list(_addresses(was.addresses, after.addresses))
    yield from addresses
    earlier = was.boot.stages if was.boot and begun and was.boot.number == begun.number else {}
    if begun is not None and boots.ADDRESSED in begun.stages and not (boots.ADDRESSED in earlier or addresses):
        yield f'has its address {after.address} again'
    if begun is not None and boots.READY in begun.stages and boots.READY not in earlier:
        yield 'ready'
    if after.cloud_init is not None and after.cloud_init != was.cloud_init:
        yield f'cloud-init failed at stage {after.cloud_init.stage}: {after.cloud_init.reason}'
    if after.power != was.power and phase(after.power) in _MIDWAY:
        yield _MIDWAY[phase(after.power)]
    if after.attempts > was.attempts:
        yield f'attempt {after.attempts} failed'
    if after.fault != was.fault:
        yield f'fault: {after.fault}' if after.fault else f'is over: {was.fault}'


_MIDWAY = {ASKED: 'its guest was asked to turn itself off', OFF: 'is off, and about to be started'}


def _addresses(before: Sequence[Interface], after: Sequence[Interface]) -> Iterator[str]:
    known = {each.mac: each.address for each in before}
    for each in after:
        if each.address is not None and known.get(each.mac) != each.address:
            yield f'address {each.address} on {each.network}'


def _request(change: Change, host: Host, _taken: Mapping[str, str]) -> Told:
    compute, instance = change.key.removeprefix(keys.HOSTS).partition('/')[::2]
    if change.after is None:
        return  # its record says what became of it
    before = parse_request(compute, change.key, change.before) if change.before is not None else None
    after = parse_request(compute, change.key, change.after)
    if isinstance(after, Invalid):
        says = f'its request to {host(compute)} cannot be understood: {after.reason}'
        yield Event(change.revision, 'request', says, instance, after.shares.name or '', compute), ()
        return
    was = before if isinstance(before, Request) else None
    says = _asked(was, after, host(compute)) if change.is_known else ''
    if says:
        new = after.stages.values() if was is None and not after.is_tombstone else ()  # later it repeats the record's
        yield Event(change.revision, 'request', says, after.instance, after.name or '', compute), new


def _asked(was: Request | None, after: Request, host: str) -> str:
    if after.is_tombstone:
        return '' if was is not None and was.is_tombstone else 'destroy accepted'
    if was is None:
        return f'request accepted, for {host}'
    return f'{after.power.action} accepted' if after.power is not None and after.power != was.power else ''


def _queue(change: Change, host: Host, taken: Mapping[str, str]) -> Told:
    place = keys.queued(change.key)
    if place is None:
        flavor, instance = change.key.removeprefix(keys.QUEUES).split('/', 1)[0], keys.in_queue(change.key)
        compute = marked_by(change.after) if change.after is not None else None
        if compute and change.key.endswith(keys.TAKER) and change.before is None:
            says = f'queue {flavor}: {host(compute)} is taking it'
            yield Event(change.revision, 'queue', says, instance, compute=compute), ()
        return
    flavor, instance = place
    waiting = parse_waiting(change.key, change.after if change.after is not None else change.before or b'')
    name = '' if isinstance(waiting, Invalid) else waiting.name or ''
    compute = taken.get(instance, '')
    new: Iterable[str] = ()
    if change.after is None:
        says = f'queue {flavor}: taken by {host(compute)}' if compute else f'queue {flavor}: left, and nobody has it'
    elif isinstance(waiting, Invalid):
        says = f'queue {flavor}: waits, and nobody takes it: {waiting.reason}'
    else:
        says, new = f'queue {flavor}: waits', waiting.stages.values()
    if change.is_known or change.after is None:
        yield Event(change.revision, 'queue', says, instance, name, compute), new


def _name(change: Change, _host: Host, _taken: Mapping[str, str]) -> Told:
    name, holders = change.key.removeprefix(keys.NAMES), []
    for value in (change.before, change.after):
        try:
            holders.append(named(value) if value is not None else '')
        except ValueError:
            holders.append('?')
    before, after = holders
    if change.is_known and before != after:
        says = 'is called so now' if after else 'gave its name back'
        yield Event(change.revision, 'name', says, after or before, name), ()


def _compute(change: Change, host: Host, _taken: Mapping[str, str]) -> Told:
    compute = keys.last(change.key)
    before, after = (load_if_object(value or b'') for value in (change.before, change.after))
    told = after or before
    said = (told.get(name) for name in ('hostname', 'version', 'since'))
    hostname, version, since = (each if is_text(each) else '' for each in said)
    called = hostname if isinstance(hostname, str) and hostname else host(compute)
    if change.after is None:
        yield Event(change.revision, 'compute', f'compute {called} went away', compute=compute), ()
    elif change.before is None or before.get('since') != since:
        which = f', ecomp {version}' if version else ''
        words = 'came up' if change.before is None and change.is_known else 'is up'
        yield Event(change.revision, 'compute', f'compute {called} {words}{which}', compute=compute), (str(since),)


def _shared(kind: str, describe: Callable[[str, bytes], str]) -> Callable[[Change, Host, Mapping[str, str]], Told]:
    """What is told of what operators set: when what is described of it is another."""

    def say(change: Change, _host: Host, _taken: Mapping[str, str]) -> Told:
        name = change.key.split('/', 2)[2]
        was, now = (_described(describe, name, value) for value in (change.before, change.after))
        if now != was and (change.is_known or now is None):
            says = f'{kind} {name}: {now if now is not None else "removed"}'
            yield Event(change.revision, kind, says), ()

    return say


def _described(describe: Callable[[str, bytes], str], name: str, value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return describe(name, value)
    except ValueError as error:
        return f'cannot be understood: {error}'


def _limits(project: str, value: bytes) -> str:
    return ', '.join(f'{name} {limit}' for name, limit in quota_from_json(project, value).limits.items()) or 'no limits'


def _cluster(change: Change, _host: Host, _taken: Mapping[str, str]) -> Told:
    yield Event(change.revision, 'cluster', 'this etcd got its identity'), ()


_TOLD: Mapping[str, Callable[[Change, Host, Mapping[str, str]], Told]] = {
    keys.INSTANCES: _record,
    keys.HOSTS: _request,
    keys.QUEUES: _queue,
    keys.NAMES: _name,
    keys.COMPUTES: _compute,
    keys.GROUPS: _shared('group', lambda name, value: group_from_json(name, value).rule),
    keys.QUOTAS: _shared('quota', _limits),
    keys.FLAVORS: _shared('flavor', lambda name, value: flavor_from_json(name, value).query),
    keys.CLUSTER: _cluster,
}
