"""Events: changes of etcd's keys, described in words. Pure.

etcd stores no times, so the time of an event is from the new value: a stage, a boot or `written_at`. The writer (`by`)
is what the client calls itself. Events are not trusted, because a compute can write anything below its own uuid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from ecomp.model import boots, keys
from ecomp.model.allocation import format_resources
from ecomp.model.boots import Boot
from ecomp.model.facts import parse_facts
from ecomp.model.flavor import Flavor
from ecomp.model.group import Group
from ecomp.model.json_object import WRITTEN_AT, WRITTEN_BY, is_utf8_text, load_object_or_empty
from ecomp.model.order import (
    DRAIN,
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
from ecomp.model.record import Interface, Record, parse_or_none
from ecomp.model.stack import Stack
from ecomp.model.states import ACTIVE, ERROR, QUEUED, STAGES
from ecomp.model.status import DISABLED_BY_OPERATOR
from ecomp.model.stored import decode, decode_lenient
from ecomp.model.text import format_time, join_some, make_printable

# Characters of an event's text, which may quote values of any length from etcd.
MAX_TEXT_CHARACTERS = 500
MAX_QUOTED_ENTRIES = 10
# Characters of the name of a writer, or of the file of a stack.
MAX_NAME_CHARACTERS = 80
KINDS = ('instance', 'request', 'queue', 'name', 'compute', 'group', 'quota', 'flavor', 'stack', 'cluster')

Parsed = TypeVar('Parsed')
# Returns the display name of a compute, by its uuid.
NameCompute = Callable[[str], str]


class Change(NamedTuple):
    key: str
    before: bytes | None  # None without a key, or if it is not known
    after: bytes | None  # None without a key
    revision: int
    is_known: bool = True  # False if etcd has compacted the earlier value


@dataclass(frozen=True)
class Event:
    """An event, in which uuids, the instance's name, ISO time and writer are '' if unknown."""

    revision: int
    kind: str  # one of KINDS
    says: str  # its text
    instance: str = ''
    name: str = ''
    compute: str = ''
    time: str = ''
    by: str = ''


# The requests that are new in a revision, each with its compute.
Deliveries = Sequence[tuple[str, Request | InvalidRequest]]
# Each event with the times, in ISO 8601, that are new in the changed value.
DatedEvents = Iterator[tuple[Event, Iterable[str]]]
Describer = Callable[[Change, NameCompute, Deliveries], DatedEvents]


def make_events(changes: Sequence[Change], name_compute: NameCompute) -> list[Event]:
    """Return the events of one revision, which share the latest of its times and its writer."""
    deliveries, stamps = _list_deliveries(changes), [_read_new_stamp(change) for change in changes]
    describers = ((each, _DESCRIBERS.get(_get_prefix(each.key))) for each in changes)
    events = [pair for each, describe in describers if describe for pair in describe(each, name_compute, deliveries)]
    times = filter(_is_iso_time, [*(time for _, new in events for time in new), *(time for time, _ in stamps)])
    time, by = max(times, default=''), max((by for _, by in stamps), default='')
    return [replace(event, says=event.says[:MAX_TEXT_CHARACTERS], time=time, by=by) for event, _ in events]


def _describe_replacement(old: Record | Request | None, deliveries: Deliveries) -> str:
    for _, new in deliveries:
        if isinstance(new, Request) and old and old.stack and new.stack and new.stack[:3] == old.stack[:3]:
            return f'replaced by a new one ({_format_arrow(old.instance, new.instance)})'
    return ''


def _format_arrow(old: str, new: str) -> str:
    return f'{old[:8]} → {new[:8]}'


def _list_deliveries(changes: Sequence[Change]) -> Deliveries:
    # Requests that had no value before, or a compacted one.
    new = {each.key: each.after for each in changes if each.key.startswith(keys.HOSTS) and each.before is None}
    computes = {key: key.split('/')[2] for key in new}
    return [(computes[key], parse_request(computes[key], key, value or b'')) for key, value in new.items()]


def _read_new_stamp(change: Change) -> tuple[str, str]:
    before, after = (load_object_or_empty(value or b'') for value in (change.before, change.after))
    time, by = after.get(WRITTEN_AT), after.get(WRITTEN_BY)
    if time in (None, before.get(WRITTEN_AT)) or not change.key.startswith(_STAMPED) or not change.is_known:
        return '', ''
    return str(time), make_printable(by, MAX_NAME_CHARACTERS) if isinstance(by, str) else ''


def event_to_dict(event: Event) -> dict[str, Any]:
    """Return the fields in the order of the JSON output, with None for an empty one."""
    names = ('revision', 'time', 'kind', 'instance', 'name', 'compute', 'says', 'by')
    return {name: getattr(event, name) or None for name in names}


def _get_prefix(key: str) -> str:
    return '/'.join(key.split('/')[:2]) + '/' if key.count('/') > 1 else key


def _is_iso_time(text: str) -> bool:
    try:
        return format_time(datetime.fromisoformat(text)) == text
    except (ValueError, OverflowError):
        return False


def _describe_record(change: Change, name_compute: NameCompute, deliveries: Deliveries) -> DatedEvents:
    compute, instance = keys.parse_record_key(change.key)
    before, after = (parse_or_none(value, instance, compute) for value in (change.before, change.after))
    if change.after is None:
        text = _describe_replacement(before, deliveries) or 'record deleted'
        yield Event(change.revision, 'instance', text, instance, compute=compute), ()
        return
    if after is None:
        yield Event(change.revision, 'instance', 'record is malformed', instance, compute=compute), ()
        return
    times = list[str]()
    if before is not None:  # a compute may write a record again, with the times of long ago
        # The times of the first two are those of the request: a record repeats them.
        times += [at for name, at in after.stages.items() if name not in STAGES[:2] and before.stages.get(name) != at]
        times += after.last_boot.stages.values() if after.last_boot and after.last_boot != before.last_boot else ()
    for text in _describe_changes(before, after, name_compute, change.is_known):
        yield Event(change.revision, 'instance', text, after.instance, after.name or '', after.compute), times


def _describe_changes(before: Record | None, after: Record, name_compute: NameCompute, is_known: bool) -> Iterator[str]:
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


def _describe_request(change: Change, name_compute: NameCompute, deliveries: Deliveries) -> DatedEvents:
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
    text = _describe_request_change(old, after, name_compute(compute), deliveries) if change.is_known else ''
    if text:
        stages = after.stages.values() if old is None and not after.is_tombstone else ()  # later ones repeat the record
        yield Event(change.revision, 'request', text, after.instance, after.name or '', compute), stages


def _describe_request_change(before: Request | None, after: Request, host: str, deliveries: Deliveries) -> str:
    if after.is_tombstone:
        if before is not None and before.is_tombstone:
            return ''
        if after.replaced_by:
            return f'evacuated from {host} ({_format_arrow(after.instance, after.replaced_by)})'
        return _describe_replacement(after, deliveries) or f'{"release" if after.is_adopted else "destroy"} accepted'
    if before is None and after.is_adopted:
        return f'adopted on {host}'
    if before is None:
        return f'request accepted, for {host}' + (f', in place of {after.replaces[:8]}' if after.replaces else '')
    if after.resize and after.resize != before.resize:
        return f'resize accepted: {format_resources(after.resize.resources)}'
    if after.rebuild != before.rebuild:
        return 'rebuild accepted'
    if after.name != before.name:
        return f'renamed to {after.name}'
    if after.is_protected != before.is_protected:
        return 'protected' if after.is_protected else 'not protected any more'
    if after.power is None or after.power == before.power:
        return ''
    return f'{after.power.action} accepted' + (f', to drain {host}' if after.power.reason == DRAIN else '')


def _describe_queue(change: Change, name_compute: NameCompute, deliveries: Deliveries) -> DatedEvents:
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
    compute = next((compute for compute, each in deliveries if each.instance == instance), '')
    times: Iterable[str] = ()
    if change.after is None:
        text = f'queue {flavor}: taken by {name_compute(compute)}' if compute else f'queue {flavor}: removed, not taken'
    elif isinstance(waiting, InvalidRequest):
        text = f'queue {flavor}: waits, but no compute takes it: {waiting.reason}'
    else:
        text, times = f'queue {flavor}: waits', waiting.stages.values()
    if change.is_known or change.after is None:
        yield Event(change.revision, 'queue', text, instance, name, compute), times


def _describe_name(change: Change, _name_compute: NameCompute, _deliveries: Deliveries) -> DatedEvents:
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


def _describe_compute(change: Change, name_compute: NameCompute, _deliveries: Deliveries) -> DatedEvents:
    compute = keys.get_last_part(change.key)
    before, after = (load_object_or_empty(value or b'') for value in (change.before, change.after))
    presence = after or before
    fields = (presence.get(name) for name in ('hostname', 'version', 'since'))
    hostname, version, since = (str(field) if is_utf8_text(field) else '' for field in fields)
    label = hostname or name_compute(compute)
    if change.after is None:
        yield Event(change.revision, 'compute', f'compute {label} stopped, or lost its lease', compute=compute), ()
    elif change.before is None or before.get('since') != since:
        # Not the time of this event: the process may have begun long ago, and lost its lease in the meantime.
        suffix = (f', ecomp {version}' if version else '') + (f', running since {since}' if since else '')
        verb = 'came up' if change.before is None and change.is_known else 'is up'
        yield Event(change.revision, 'compute', f'compute {label} {verb}{suffix}', compute=compute), ()


def _describe_operator_act(change: Change, name_compute: NameCompute, _deliveries: Deliveries) -> DatedEvents:
    compute, text = keys.get_last_part(change.key), ''
    # The name of a forgotten compute is only here.
    hostname = load_object_or_empty(change.before or b'').get('hostname')
    if change.key.startswith(keys.HOSTNAMES):
        text = 'forgotten' if change.after is None else ''
    elif change.key.startswith(keys.ACCEPTED):
        text = 'accepted the new etcd' if change.after is not None else ''
    elif change.after is not None and change.is_known:
        before, after = (DISABLED_BY_OPERATOR in parse_facts(value or b'').traits for value in change[1:3])
        # The first facts since its start tell no act: it may have been disabled long ago.
        verb = 'is disabled' if change.before is None else 'disabled'
        text = '' if before == after else verb if after else 'enabled'
    if text:
        label = hostname if is_utf8_text(hostname) else name_compute(compute)
        yield Event(change.revision, 'compute', f'compute {label} {text}', compute=compute), ()


def _make_describer(kind: str, describe: Callable[[str, bytes], str]) -> Describer:
    """Make a function that yields an event of `kind` if the text of `describe` changed."""

    def describe_change(change: Change, _name_compute: NameCompute, _deliveries: Deliveries) -> DatedEvents:
        name = change.key.split('/', 2)[2]
        old, new = (_describe_value(describe, name, value) for value in (change.before, change.after))
        if new != old and (change.is_known or new is None):
            text = f'{kind} {name}: {new if new is not None else "removed"}'
            yield Event(change.revision, kind, text), ()

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


def _describe_stack(change: Change, _name_compute: NameCompute, _deliveries: Deliveries) -> DatedEvents:
    name = change.key.removeprefix(keys.STACKS)
    values = (change.before, change.after)
    before, after = (_describe_value(lambda _, value: decode(Stack, value, name=name), name, each) for each in values)
    # Only an apply stamps the value. A destroy and an evacuation change it, too.
    origin = after.applied_from if isinstance(after, Stack) and any(_read_new_stamp(change)) else ''
    file = make_printable(origin.partition(':')[2].rpartition('/')[2], MAX_NAME_CHARACTERS)
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
        yield Event(change.revision, 'stack', f'stack {name}: ' + (f'applied {file}: ' if file else '') + text), ()


def _describe_cluster(change: Change, _name_compute: NameCompute, _deliveries: Deliveries) -> DatedEvents:
    since = load_object_or_empty(change.after or b'').get('since')
    yield Event(change.revision, 'cluster', 'identity of this etcd written'), (str(since),) if change.is_known else ()


# What commands of users write, and stamp.
_STAMPED = (keys.HOSTS, keys.STACKS, keys.FLAVORS, keys.QUOTAS)
# Progress, claims and audit answers give no events.
_DESCRIBERS: Mapping[str, Describer] = {
    keys.INSTANCES: _describe_record,
    keys.HOSTS: _describe_request,
    keys.QUEUES: _describe_queue,
    keys.NAMES: _describe_name,
    keys.COMPUTES: _describe_compute,
    **dict.fromkeys((keys.FACTS, keys.HOSTNAMES, keys.ACCEPTED), _describe_operator_act),
    keys.GROUPS: _make_describer('group', lambda name, value: decode(Group, value, name=name).rule),
    keys.QUOTAS: _make_describer('quota', _describe_limits),
    keys.FLAVORS: _make_describer('flavor', lambda name, value: decode(Flavor, value, name=name).query),
    keys.STACKS: _describe_stack,
    keys.CLUSTER: _describe_cluster,
}
