"""Events: changes of etcd's keys, described in words. Pure.

etcd stores values without times, so an event's time is from the new value (a stage, a boot, `written_at`); without one
it is unknown. Progress, claims and audit answers give no events. Events are not trusted: a compute can write anything
below its own uuid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from ecomp.model import boots, keys
from ecomp.model.boots import Boot
from ecomp.model.flavor import Flavor
from ecomp.model.group import Group
from ecomp.model.json_object import WRITTEN_AT, is_utf8_text, load_object_or_empty
from ecomp.model.order import (
    SHUT_OFF,
    SHUTDOWN_REQUESTED,
    InvalidRequest,
    NameOwner,
    Request,
    parse_phase,
    parse_request,
)
from ecomp.model.queue import QueueTaker, parse_queue_entry
from ecomp.model.quota import Quota
from ecomp.model.record import ACTIVE, ERROR, QUEUED, STAGES, Interface, Record, format_time, parse_or_none
from ecomp.model.stack import Stack
from ecomp.model.stored import decode, decode_lenient
from ecomp.model.text import join_some

# Characters of an event's text, which may quote values of any length from etcd.
MAX_TEXT_CHARACTERS = 500
MAX_QUOTED_ENTRIES = 10
KINDS = ('instance', 'request', 'queue', 'name', 'compute', 'group', 'quota', 'flavor', 'stack', 'cluster')

Parsed = TypeVar('Parsed')
# Returns the display name of a compute, by its uuid.
NameCompute = Callable[[str], str]


class Change(NamedTuple):
    """A change of a key (value None: no key); if not `is_known`, `before` is None because etcd has compacted it."""

    key: str
    before: bytes | None
    after: bytes | None
    revision: int
    is_known: bool = True


@dataclass(frozen=True)
class Event:
    """An event of one of KINDS; `says` is the text. Uuids, the instance's name and the ISO time are '' if unknown."""

    revision: int
    kind: str
    says: str
    instance: str = ''
    name: str = ''
    compute: str = ''
    time: str = ''


# Each event with the times, in ISO 8601, that are new in the changed value.
DatedEvents = Iterator[tuple[Event, Iterable[str]]]


def make_events(changes: Sequence[Change], name_compute: NameCompute) -> list[Event]:
    """Return a revision's events, texts cut off, with the latest time in its new values."""
    # The keys of requests that had no value before, or a compacted one.
    request_keys = [each.key for each in changes if each.key.startswith(keys.HOSTS) and each.before is None]
    takers = {keys.get_last_part(key): key.split('/')[2] for key in request_keys if key.count('/') == 3}
    described = [
        (event, list(filter(_is_time, stamps)))
        for change in changes
        if (describe := _DESCRIBERS.get(_get_family(change.key)))
        for event, stamps in describe(change, name_compute, takers)
    ]
    time = max((time for _, times in described for time in times), default='')
    return [replace(event, says=event.says[:MAX_TEXT_CHARACTERS], time=time) for event, _ in described]


def event_to_dict(event: Event) -> dict[str, Any]:
    """Return the event as the JSON object that users see; empty fields are null."""
    names = ('revision', 'time', 'kind', 'instance', 'name', 'compute', 'says')
    return {name: getattr(event, name) or None for name in names}


def _get_family(key: str) -> str:
    return '/'.join(key.split('/')[:2]) + '/' if key.count('/') > 1 else key


def _is_time(text: str) -> bool:
    try:
        return format_time(datetime.fromisoformat(text)) == text
    except (ValueError, OverflowError):
        return False


def _read_new_time(change: Change) -> tuple[str, ...]:
    before, after = (load_object_or_empty(value or b'').get(WRITTEN_AT) for value in (change.before, change.after))
    return (after,) if isinstance(after, str) and after != before else ()


def _describe_record(change: Change, name_compute: NameCompute, _takers: Mapping[str, str]) -> DatedEvents:
    compute, instance = keys.parse_record_key(change.key)
    if change.after is None:
        yield Event(change.revision, 'instance', 'record deleted', instance, compute=compute), ()
        return
    before, after = (parse_or_none(value, instance, compute) for value in (change.before, change.after))
    if after is None:
        yield Event(change.revision, 'instance', 'record is malformed', instance, compute=compute), ()
        return
    times = list[str]()
    if before is not None:  # a compute may write a record again, with the times of long ago
        # The times of the first two are those of the request: a record repeats them.
        times += [
            time for name, time in after.stages.items() if name not in STAGES[:2] and before.stages.get(name) != time
        ]
        times += after.last_boot.stages.values() if after.last_boot and after.last_boot != before.last_boot else ()
    for text in _describe_record_changes(before, after, name_compute, change.is_known):
        yield Event(change.revision, 'instance', text, after.instance, after.name or '', after.compute), times


def _describe_record_changes(
    before: Record | None, after: Record, name_compute: NameCompute, is_known: bool
) -> Iterator[str]:
    """Describe what is new in a record; only its state if the earlier value is unknown."""
    old = before or Record(after.instance, '', QUEUED)
    if after.state != old.state:
        on = f' on {name_compute(after.compute)}' if before is None and after.compute else ''
        yield f'{after.state}{on}' + (f': at stage {after.error.stage}: {after.error.reason}' if after.error else '')
    if not is_known:
        return
    stages = [stage for stage in ('image', 'disk') if stage in after.stages.keys() - old.stages.keys()]
    yield from (f'{after.state}: {stage}' for stage in stages if after.state not in (ACTIVE, ERROR))
    yield from _describe_boot(old, after)
    if after.cloud_init is not None and after.cloud_init != old.cloud_init:
        yield f'cloud-init failed at stage {after.cloud_init.stage}: {after.cloud_init.reason}'
    if after.power != old.power:
        yield from _POWER_PHASES.get(parse_phase(after.power), ())
    if after.attempts > old.attempts:
        yield f'attempt {after.attempts} failed'
    if after.fault != old.fault:
        yield f'fault: {after.fault}' if after.fault else f'fault cleared: {old.fault}'


def _describe_boot(old: Record, after: Record) -> Iterator[str]:
    boot, last = after.last_boot, old.last_boot or Boot(1, '')
    if boot is not None and boot.number > last.number:
        yield f'boot {boot.number}: {boot.reason}'
    addresses = list(_describe_addresses(old.addresses, after.addresses))
    yield from addresses
    if boot is None:
        return
    new_stages = boot.stages.keys() - (last.stages.keys() if boot.number == last.number else ())
    if boots.ADDRESSED in new_stages and not addresses:
        yield f'has its address {after.address} again'
    if boots.READY in new_stages:
        yield 'ready'


_POWER_PHASES = {SHUTDOWN_REQUESTED: ['guest shutdown requested'], SHUT_OFF: ['guest is off, and will be started']}


def _describe_addresses(before: Sequence[Interface], after: Sequence[Interface]) -> Iterator[str]:
    old_addresses = {interface.mac: interface.address for interface in before}
    for interface in after:
        if interface.address is not None and old_addresses.get(interface.mac) != interface.address:
            yield f'address {interface.address} on {interface.network}'


def _describe_request(change: Change, name_compute: NameCompute, _takers: Mapping[str, str]) -> DatedEvents:
    compute, instance = change.key.removeprefix(keys.HOSTS).partition('/')[::2]
    if change.after is None:
        return  # the record's events describe the end
    before = parse_request(compute, change.key, change.before) if change.before is not None else None
    after = parse_request(compute, change.key, change.after)
    if isinstance(after, InvalidRequest):
        text = f'request to {name_compute(compute)} is malformed: {after.reason}'
        yield Event(change.revision, 'request', text, instance, after.holdings.name or '', compute), ()
        return
    old = before if isinstance(before, Request) else None
    text = _describe_request_change(old, after, name_compute(compute)) if change.is_known else ''
    if text:
        stages = after.stages.values() if old is None and not after.is_tombstone else ()  # later ones repeat the record
        times = (*stages, *_read_new_time(change))
        yield Event(change.revision, 'request', text, after.instance, after.name or '', compute), times


def _describe_request_change(before: Request | None, after: Request, compute_name: str) -> str:
    if after.is_tombstone:
        return '' if before is not None and before.is_tombstone else 'destroy accepted'
    if before is None:
        return f'request accepted, for {compute_name}'
    return f'{after.power.action} accepted' if after.power is not None and after.power != before.power else ''


def _describe_queue(change: Change, name_compute: NameCompute, takers: Mapping[str, str]) -> DatedEvents:
    """`takers` is {instance: compute} of the requests that the same revision delivered to computes."""
    place = keys.parse_queue_key(change.key)
    if place is None:
        flavor, instance = change.key.removeprefix(keys.QUEUES).split('/', 1)[0], keys.get_queued_instance(change.key)
        compute = decode_lenient(QueueTaker, change.after).compute if change.after is not None else None
        if compute and change.key.endswith(keys.TAKER) and change.before is None:
            text = f'queue {flavor}: {name_compute(compute)} is taking it'
            yield Event(change.revision, 'queue', text, instance, compute=compute), ()
        return
    flavor, instance = place
    waiting = parse_queue_entry(change.key, change.after if change.after is not None else change.before or b'')
    name = '' if isinstance(waiting, InvalidRequest) else waiting.name or ''
    compute = takers.get(instance, '')
    times: Iterable[str] = ()
    if change.after is None:
        text = f'queue {flavor}: taken by {name_compute(compute)}' if compute else f'queue {flavor}: removed, not taken'
    elif isinstance(waiting, InvalidRequest):
        text = f'queue {flavor}: waits, but no compute takes it: {waiting.reason}'
    else:
        text, times = f'queue {flavor}: waits', waiting.stages.values()
    if change.is_known or change.after is None:
        yield Event(change.revision, 'queue', text, instance, name, compute), times


def _describe_name(change: Change, _name_compute: NameCompute, _takers: Mapping[str, str]) -> DatedEvents:
    name, holders = change.key.removeprefix(keys.NAMES), []
    for value in (change.before, change.after):
        try:
            holders.append(decode(NameOwner, value).instance if value is not None else '')
        except ValueError:
            holders.append('?')
    before, after = holders
    if change.is_known and before != after:
        text = 'name taken' if after else 'name released'
        yield Event(change.revision, 'name', text, after or before, name), ()


def _describe_compute(change: Change, name_compute: NameCompute, _takers: Mapping[str, str]) -> DatedEvents:
    compute = keys.get_last_part(change.key)
    before, after = (load_object_or_empty(value or b'') for value in (change.before, change.after))
    presence = after or before
    fields = (presence.get(name) for name in ('hostname', 'version', 'since'))
    hostname, version, since = (str(field) if is_utf8_text(field) else '' for field in fields)
    label = hostname or name_compute(compute)
    if change.after is None:
        yield Event(change.revision, 'compute', f'compute {label} went away', compute=compute), ()
    elif change.before is None or before.get('since') != since:
        # Not the time of this event: the process may have begun long ago, and lost its lease in the meantime.
        suffix = (f', ecomp {version}' if version else '') + (f', running since {since}' if since else '')
        verb = 'came up' if change.before is None and change.is_known else 'is up'
        yield Event(change.revision, 'compute', f'compute {label} {verb}{suffix}', compute=compute), ()


def _make_describer(
    kind: str, describe: Callable[[str, bytes], str]
) -> Callable[[Change, NameCompute, Mapping[str, str]], DatedEvents]:
    """Make a function that yields events of `kind` if describe()'s text changed; if not `is_known`, only a removal."""

    def describe_change(change: Change, _name_compute: NameCompute, _takers: Mapping[str, str]) -> DatedEvents:
        name = change.key.split('/', 2)[2]
        old, new = (_describe_value(describe, name, value) for value in (change.before, change.after))
        if new != old and (change.is_known or new is None):
            text = f'{kind} {name}: {new if new is not None else "removed"}'
            yield Event(change.revision, kind, text), _read_new_time(change)

    return describe_change


def _describe_value(describe: Callable[[str, bytes], Parsed], name: str, value: bytes | None) -> Parsed | str | None:
    if value is None:
        return None
    try:
        return describe(name, value)
    except ValueError as error:
        return f'malformed: {error}'


def _describe_limits(project: str, value: bytes) -> str:
    limits = decode(Quota, value, project=project).limits
    return ', '.join(f'{name} {limit}' for name, limit in limits.items()) or 'no limits'


def _describe_stack(change: Change, _name_compute: NameCompute, _takers: Mapping[str, str]) -> DatedEvents:
    name = change.key.removeprefix(keys.STACKS)
    before, after = (
        _describe_value(lambda name, value: decode(Stack, value, name=name), name, each)
        for each in (change.before, change.after)
    )
    texts = []
    if after is None:
        texts = ['removed']
    elif isinstance(after, str):
        texts = [after]
    elif isinstance(before, Stack):
        changed = {entry: value for entry, value in after.entries.items() if value != before.entries.get(entry)}
        for verb, is_ended in (('delivered', False), ('ended', True)):
            names = [entry for entry, value in changed.items() if value.is_ended is is_ended]
            texts += [f'{join_some(names, MAX_QUOTED_ENTRIES)} {verb}'] if names else []
    elif change.is_known:
        texts = ['restored from its requests' if after.floor else 'created']
    for text in texts:
        yield Event(change.revision, 'stack', f'stack {name}: {text}'), ()


def _describe_cluster(change: Change, _name_compute: NameCompute, _takers: Mapping[str, str]) -> DatedEvents:
    since = load_object_or_empty(change.after or b'').get('since')
    yield Event(change.revision, 'cluster', 'this etcd got its identity'), (str(since),) if change.is_known else ()


_DESCRIBERS: Mapping[str, Callable[[Change, NameCompute, Mapping[str, str]], DatedEvents]] = {
    keys.INSTANCES: _describe_record,
    keys.HOSTS: _describe_request,
    keys.QUEUES: _describe_queue,
    keys.NAMES: _describe_name,
    keys.COMPUTES: _describe_compute,
    keys.GROUPS: _make_describer('group', lambda name, value: decode(Group, value, name=name).rule),
    keys.QUOTAS: _make_describer('quota', _describe_limits),
    keys.FLAVORS: _make_describer('flavor', lambda name, value: decode(Flavor, value, name=name).query),
    keys.STACKS: _describe_stack,
    keys.CLUSTER: _describe_cluster,
}
