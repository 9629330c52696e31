"""Events: changes of etcd's keys, described in words. Pure.

etcd stores values without times, so an event's time comes from the new value (a stage, a boot), or is unknown. Changes
of progress, claims and audit answers are not events. Events are not trusted: a compute can write anything below its own
uuid, which is the event's `compute`.
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

# Characters of an event's text, which may quote values of any length from etcd.
LONGEST = 500
KINDS = ('instance', 'request', 'queue', 'name', 'compute', 'group', 'quota', 'flavor', 'cluster')

# Returns the display name of a compute, by its uuid.
Host = Callable[[str], str]


class Change(NamedTuple):
    """A change of a key (None: no key); if not `is_known`, etcd has compacted `before`."""

    key: str
    before: bytes | None
    after: bytes | None
    revision: int
    is_known: bool = True


@dataclass(frozen=True)
class Event:
    """One event, at a revision of etcd. `kind` is one of KINDS, `says` is the text.

    `instance` and `compute` are uuids, `name` is the instance's name, `time` is ISO; each is '' if there is none.
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
    """Return the events of the changes of one revision.

    All get the latest time in the new values, or else `seen_at`, when the changes were received ('' for past ones).
    """
    takers = {keys.last(request.key): request.key.split('/')[2] for request in changes if _is_request(request)}
    timed = [entry for change in changes for entry in _TOLD.get(_family(change.key), _nothing)(change, host, takers)]
    times = [time for _, stamps in timed for time in stamps if _is_time(time)]
    when = max(times, default=seen)
    return [
        Event(event.revision, event.kind, event.says[:LONGEST], event.instance, event.name, event.compute, when)
        for event, _ in timed
    ]


def as_object(event: Event) -> dict[str, Any]:
    """Return the event as the JSON object that users see; empty fields are null."""
    names = ('revision', 'time', 'kind', 'instance', 'name', 'compute', 'says')
    return {name: getattr(event, name) or None for name in names}


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
        return  # a record of ecomp 1.0 that moved below its compute
    if change.after is None:
        yield Event(change.revision, 'instance', 'its record is gone', instance, compute=compute or ''), ()
        return
    before, after = (_read(value, instance, compute) for value in (change.before, change.after))
    if after is None:
        yield Event(change.revision, 'instance', 'its record cannot be read', instance, compute=compute or ''), ()
        return
    times = [time for name, time in after.stages.items() if before is None or before.stages.get(name) != time]
    times += [
        time for boot in after.boots if before is None or boot not in before.boots for time in boot.stages.values()
    ]
    for text in _news(before, after, host, change.is_known):
        yield Event(change.revision, 'instance', text, after.instance, after.name or '', after.compute), times


def _read(value: bytes | None, instance: str, compute: str | None) -> Record | None:
    try:
        return from_json(value, instance, compute) if value is not None else None
    except ValueError:
        return None


def _news(before: Record | None, after: Record, host: Host, is_known: bool) -> Iterator[str]:
    """Describe what is new in a record; only its state if the earlier value is unknown."""
    old = before or Record(after.instance, '', QUEUED)
    if after.state != old.state:
        on = f' on {host(after.compute)}' if before is None and after.compute else ''
        yield f'{after.state}{on}' + (f': at stage {after.error.stage}: {after.error.reason}' if after.error else '')
    if not is_known:
        return
    for stage in ('image', 'disk'):
        if stage in after.stages and stage not in old.stages and after.state not in (ACTIVE, ERROR):
            yield f'{after.state}: {stage}'
    boot = after.boot
    if boot is not None and boot.number > 1 and (old.boot is None or old.boot.number < boot.number):
        yield f'boot {boot.number}: {boot.reason}'
    addresses = list(_addresses(old.addresses, after.addresses))
    yield from addresses
    old_stages = old.boot.stages if old.boot and boot and old.boot.number == boot.number else {}
    if boot is not None and boots.ADDRESSED in boot.stages and not (boots.ADDRESSED in old_stages or addresses):
        yield f'has its address {after.address} again'
    if boot is not None and boots.READY in boot.stages and boots.READY not in old_stages:
        yield 'ready'
    if after.cloud_init is not None and after.cloud_init != old.cloud_init:
        yield f'cloud-init failed at stage {after.cloud_init.stage}: {after.cloud_init.reason}'
    if after.power != old.power and phase(after.power) in _MIDWAY:
        yield _MIDWAY[phase(after.power)]
    if after.attempts > old.attempts:
        yield f'attempt {after.attempts} failed'
    if after.fault != old.fault:
        yield f'fault: {after.fault}' if after.fault else f'is over: {old.fault}'


_MIDWAY = {ASKED: 'its guest was asked to turn itself off', OFF: 'is off, and about to be started'}


def _addresses(before: Sequence[Interface], after: Sequence[Interface]) -> Iterator[str]:
    old_addresses = {interface.mac: interface.address for interface in before}
    for interface in after:
        if interface.address is not None and old_addresses.get(interface.mac) != interface.address:
            yield f'address {interface.address} on {interface.network}'


def _request(change: Change, host: Host, _taken: Mapping[str, str]) -> Told:
    compute, instance = change.key.removeprefix(keys.HOSTS).partition('/')[::2]
    if change.after is None:
        return  # the record's events describe the end
    before = parse_request(compute, change.key, change.before) if change.before is not None else None
    after = parse_request(compute, change.key, change.after)
    if isinstance(after, Invalid):
        text = f'its request to {host(compute)} cannot be understood: {after.reason}'
        yield Event(change.revision, 'request', text, instance, after.shares.name or '', compute), ()
        return
    old = before if isinstance(before, Request) else None
    text = _asked(old, after, host(compute)) if change.is_known else ''
    if text:
        times = after.stages.values() if old is None and not after.is_tombstone else ()  # later ones repeat the record
        yield Event(change.revision, 'request', text, after.instance, after.name or '', compute), times


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
            text = f'queue {flavor}: {host(compute)} is taking it'
            yield Event(change.revision, 'queue', text, instance, compute=compute), ()
        return
    flavor, instance = place
    waiting = parse_waiting(change.key, change.after if change.after is not None else change.before or b'')
    name = '' if isinstance(waiting, Invalid) else waiting.name or ''
    compute = taken.get(instance, '')
    times: Iterable[str] = ()
    if change.after is None:
        text = f'queue {flavor}: taken by {host(compute)}' if compute else f'queue {flavor}: left, and nobody has it'
    elif isinstance(waiting, Invalid):
        text = f'queue {flavor}: waits, and nobody takes it: {waiting.reason}'
    else:
        text, times = f'queue {flavor}: waits', waiting.stages.values()
    if change.is_known or change.after is None:
        yield Event(change.revision, 'queue', text, instance, name, compute), times


def _name(change: Change, _host: Host, _taken: Mapping[str, str]) -> Told:
    name, holders = change.key.removeprefix(keys.NAMES), []
    for value in (change.before, change.after):
        try:
            holders.append(named(value) if value is not None else '')
        except ValueError:
            holders.append('?')
    before, after = holders
    if change.is_known and before != after:
        text = 'is called so now' if after else 'gave its name back'
        yield Event(change.revision, 'name', text, after or before, name), ()


def _compute(change: Change, host: Host, _taken: Mapping[str, str]) -> Told:
    compute = keys.last(change.key)
    before, after = (load_if_object(value or b'') for value in (change.before, change.after))
    presence = after or before
    fields = (presence.get(name) for name in ('hostname', 'version', 'since'))
    hostname, version, since = (field if is_text(field) else '' for field in fields)
    label = hostname if isinstance(hostname, str) and hostname else host(compute)
    if change.after is None:
        yield Event(change.revision, 'compute', f'compute {label} went away', compute=compute), ()
    elif change.before is None or before.get('since') != since:
        suffix = f', ecomp {version}' if version else ''
        verb = 'came up' if change.before is None and change.is_known else 'is up'
        yield Event(change.revision, 'compute', f'compute {label} {verb}{suffix}', compute=compute), (str(since),)


def _shared(kind: str, describe: Callable[[str, bytes], str]) -> Callable[[Change, Host, Mapping[str, str]], Told]:
    """Make the function that reports a key that operators write, if its description changed."""

    def say(change: Change, _host: Host, _taken: Mapping[str, str]) -> Told:
        name = change.key.split('/', 2)[2]
        old, new = (_described(describe, name, value) for value in (change.before, change.after))
        if new != old and (change.is_known or new is None):
            text = f'{kind} {name}: {new if new is not None else "removed"}'
            yield Event(change.revision, kind, text), ()

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
