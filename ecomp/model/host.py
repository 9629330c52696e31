"""Computes, their free room, and which of them has an instance. Pure.

A compute is shown and typed by its host's name. Its presence contains the name; the key /hostnames/<compute>, JSON
{"version", "hostname"}, keeps it until the compute is forgotten.

A presence may contain the hint {"room": {"VCPU": [capacity, free percent], …}}, with the capacity as placement
calculates it. The percentage is rounded up, so free room is never published as 0. It is negative if more is allocated
than the capacity, which may be 0. A closed or read-only compute publishes no hint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ecomp.model import keys, status
from ecomp.model.allocation import LARGEST, MOST, Resources, Room, capacity, is_amount, is_class, summed
from ecomp.model.json_object import dump, load_if_object
from ecomp.model.order import Invalid, Request
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, GONE, SCHEDULED, STOPPED, Record, from_json
from ecomp.model.text import printable, renamed, some


class Pick(NamedTuple):
    """A filter for records. A field that is None accepts all; `name` may contain * and ?."""

    states: Collection[str] | None = None
    compute: str | None = None
    project: str | None = None
    group: str | None = None
    name: str | None = None

    def of(self, records: Iterable[Record]) -> list[Record]:
        """Return the records that pass the filter, in their order."""
        return [record for record in records if self._means(record)]

    def _means(self, record: Record) -> bool:
        return (
            (self.states is None or record.state in self.states)
            and self.compute in (None, record.compute)
            and self.project in (None, record.project_id)
            and self.group in (None, record.group_name)
            and (self.name is None or fnmatchcase(record.name or '', self.name))
        )


# Returns the consumers that hold a claim on the compute with this uuid.
Claims = Callable[[str], Container[str]]
Kind = TypeVar('Kind', bound=keys.StoredValue)


@dataclass
class Places(Generic[Kind]):
    """The requests and records of one instance by compute, and the compute that is trusted.

    Several computes may have keys of one instance: a request was written manually, or a compute writes keys that are
    not its own. Trusted is the compute that is asked for the instance. Of several, it is the one that holds the claim
    in placement, because the uuid is public before delivery and the oldest request need not be the right one. If none
    or all of them hold a claim, or placement was not queried, it is the one with the oldest key. `request`, `record`
    and `record_key` are its own, None if it has none.

    `claimless` are computes that are asked for the instance and were found to hold no claim. In `records`, '' is for a
    record that names no compute, or a malformed one of ecomp 1.0.
    """

    requests: dict[str, Kind] = field(default_factory=dict)
    records: dict[str, Kind] = field(default_factory=dict)
    record_keys: dict[str, str] = field(default_factory=dict)
    claimless: set[str] = field(default_factory=set)

    def judge(self, instance: str, claims: Claims) -> None:
        """Query computes, oldest request first, until one holds the claim; fill `claimless`."""
        if len(self.requests) < 2:
            return
        for compute in sorted(self.requests, key=self._age):
            # A name that is not a uuid is not a compute: it is text from a key, and would become part of a URL path.
            if keys.is_uuid(compute) and instance in claims(compute):
                return
            self.claimless.add(compute)

    @property
    def compute(self) -> str:
        """The trusted compute; '' without a request and without a record that names one."""
        claimants = [compute for compute in self.requests if compute not in self.claimless]
        return min(claimants or self.requests or self.records, key=self._age, default='')

    def _age(self, compute: str) -> tuple[int, str]:
        return (self.requests or self.records)[compute].created, compute

    @property
    def request(self) -> Kind | None:
        return self.requests.get(self.compute)

    @property
    def record(self) -> Kind | None:
        return self.records.get(self.compute)

    @property
    def record_key(self) -> str | None:
        return self.record_keys.get(self.compute)


def by_instance(found: Iterable[tuple[str, Kind]]) -> dict[str, Places[Kind]]:
    """Return {instance: requests and records} from pairs of a key and its stored value.

    Other keys are ignored. A malformed record of ecomp 1.0, whose key names no compute, counts only if the instance has
    no other: otherwise an invalid value written there would hide the record of a compute.
    """
    by_uuid: dict[str, Places[Kind]] = {}
    old_records = []
    for key, written in found:
        if key.startswith(keys.HOSTS):
            compute, _, instance = key.removeprefix(keys.HOSTS).partition('/')
            by_uuid.setdefault(instance, Places()).requests[compute] = written
        elif key.startswith(keys.INSTANCES):
            recorded_compute, instance = keys.recorded(key)
            if recorded_compute is None:
                old_records.append((key, instance, written))
            else:
                _add(by_uuid, recorded_compute, key, instance, written)
    for key, instance, written in old_records:
        records = by_uuid.setdefault(instance, Places()).records
        named_compute = _compute_in(written.value)
        if (not records) if named_compute is None else (named_compute not in records):
            _add(by_uuid, named_compute or '', key, instance, written)
    return by_uuid


def _add(places: dict[str, Places[Kind]], compute: str, key: str, instance: str, written: Kind) -> None:
    entries = places.setdefault(instance, Places())
    entries.records[compute] = written
    entries.record_keys[compute] = key


def _compute_in(value: bytes) -> str | None:
    """Return the compute that a record names: '' for none, None for a malformed record."""
    try:
        return from_json(value).compute
    except ValueError:
        return None


# A room hint with more resource classes than this is ignored.
CLASSES = 40


class Left(NamedTuple):
    """One class of a hint: capacity, and how many percent are free (negative: over-allocated)."""

    capacity: int
    hundredths: int

    @property
    def most(self) -> int:
        """The largest amount that may be free."""
        return self.capacity * self.hundredths // 100


Hint = Mapping[str, Left]  # by resource class


def room_hint(inventory: Mapping[str, Mapping[str, float]], given: Iterable[Resources]) -> dict[str, list[int]]:
    """Return the hint to publish for an inventory: {class: [capacity, free percent]}."""
    used = summed(given)
    hint = {}
    for name, entry in sorted(inventory.items()):
        total = capacity(entry['total'], entry.get('allocation_ratio', 1.0), entry.get('reserved', 0))
        free = total - used.get(name, 0)
        # Negating before and after the floor division rounds up.
        hint[name] = [total, -(-100 * free // total) if free > 0 else max(100 * free // max(total, 1), -LARGEST)]
    return hint


def parse_room_hint(value: Any) -> Hint | None:
    """Parse the hint in a presence; None if it is malformed."""
    if not isinstance(value, dict) or not 0 < len(value) <= CLASSES:
        return None
    hint = {}
    for name, pair in value.items():
        if not isinstance(pair, list) or len(pair) != 2 or not is_class(name):
            return None
        class_capacity, free_percent = pair
        if not is_amount(class_capacity, MOST) or type(free_percent) is not int or not -LARGEST <= free_percent <= 100:
            return None
        hint[name] = Left(class_capacity, free_percent)
    return hint


def fits(hint: Hint, asked: Resources) -> bool:
    """Return whether there may be room for these resources; an absent class has none."""
    return all(name in hint and amount <= hint[name].most for name, amount in asked.items())


def share_left(hint: Hint, asked: Resources) -> float:
    """Return the share (0 to 1) of the scarcest class that is free after placing `resources`.

    Rounded to hundredths. Classes that the hint lacks or whose capacity is 0 are ignored; 0 if no class is left.
    """
    hinted = [(hint[name], amount) for name, amount in asked.items() if name in hint and hint[name].capacity]
    shares = [class_hint.hundredths / 100 - amount / class_hint.capacity for class_hint, amount in hinted]
    return round(max(min(shares, default=0.0), 0.0), 2)


VERSION = 1
# A version or kind is cut off after this many characters.
LONGEST = 64

_SAID_VERSION = re.compile('[0-9A-Za-z.+!-]*')
_HOSTNAME = re.compile('[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}')


class Living(NamedTuple):
    """The content of a living compute's presence; absent or malformed fields are None.

    `kind` is kvm, qemu or fake. `queues`: it takes requests from queues. ecomp 1.0 writes neither `queues` nor `room`.
    """

    hostname: str | None = None
    version: str | None = None
    kind: str | None = None
    queues: bool | None = None
    room: Hint | None = None


class Naming(Protocol):
    """The names of computes alone, for code that runs even if etcd could not be read."""

    def host(self, compute: str) -> str | None: ...
    def called(self, compute: str) -> str: ...


@dataclass(frozen=True)
class Computes:
    """All computes with a presence (`living`) or a stored host name in etcd."""

    living: Mapping[str, Living] = field(default_factory=dict)
    remembered: Mapping[str, str] = field(default_factory=dict)

    def host(self, compute: str) -> str | None:
        """Return the compute's host name, or None if it never published one."""
        return self._hosts.get(compute)

    def called(self, compute: str) -> str:
        """Return the host name, with ` (uuid)` behind it if not unique; the uuid if there is none."""
        host = self.host(compute)
        if host is None:
            return compute
        return host if compute in self._alone else f'{host} ({compute})'

    def named(self, host: str) -> list[str]:
        """Return the computes with this host name, sorted, also those that are away.

        A single living one is not preferred, because a compute may publish the name of one that is away.
        """
        return self._by_host.get(host, [])

    @property
    def takers(self) -> list[str]:
        """The living computes that take requests from queues, sorted."""
        return sorted(compute for compute, presence in self.living.items() if presence.queues)

    @property
    def no_taker(self) -> str | None:
        """One sentence that no compute takes from queues, or that it is unknown; None if one does."""
        if self.takers:
            return None
        unknown = sorted(self.called(compute) for compute, presence in self.living.items() if presence.queues is None)
        if unknown:
            uncertainty = f'of {some(unknown, 1)}, of an older version, it is not known'
            return f'no compute says that it takes from queues; {uncertainty}'
        return 'no compute takes from queues: `queues: True` in the compute.yaml of one has it do so'

    def unserved(self, waiting: Sequence[str]) -> str | None:
        """Return one line that no compute takes these waiting requests, or None if one may."""
        if not waiting or self.no_taker is None or any(presence.queues is None for presence in self.living.values()):
            return None
        return printable(f'{some(waiting, 1)} wait{"s" if len(waiting) == 1 else ""} in a queue, and {self.no_taker}')

    def translated(self, text: str) -> str:
        """Return the text with uuids of computes replaced by names, except in paths of keys."""
        return renamed(text, self.names)

    @cached_property
    def names(self) -> dict[str, str]:
        """{uuid: display name} of the computes that have a host name."""
        return {compute: self.called(compute) for compute in self._hosts}

    @cached_property
    def _hosts(self) -> dict[str, str]:
        published = {compute: facts.hostname for compute, facts in self.living.items() if facts.hostname is not None}
        return {**self.remembered, **published}

    @cached_property
    def _alone(self) -> frozenset[str]:
        """The computes whose host name no other compute has."""
        groups = map(self.named, self._by_host)
        return frozenset(computes[0] for computes in groups if len(computes) == 1)

    @cached_property
    def _by_host(self) -> dict[str, list[str]]:
        by_hostname: dict[str, list[str]] = {}
        for compute, host in sorted(self._hosts.items()):
            by_hostname.setdefault(host, []).append(compute)
        return by_hostname


# No names known: every compute is shown by its uuid. Code that has not read etcd passes this as a ComputeNames only: as
# Computes it would claim that no compute takes from queues, which is not known.
NOBODY = Computes()


def is_hostname(text: object) -> bool:
    """Return whether a value may be shown and typed as a host name: safe text, and not a uuid."""
    if not isinstance(text, str) or not _HOSTNAME.fullmatch(text):
        return False
    if len(text.replace('-', '')) != 32:
        return True
    import uuid  # imported here because it is slow to load

    try:
        uuid.UUID(text)
    except ValueError:
        return True
    return False


def to_json(hostname: str) -> str:
    """Return the value of a key below /hostnames/."""
    return dump({'version': VERSION, 'hostname': hostname})


def hostname_in(value: bytes) -> str | None:
    """Parse the host name in a value below /hostnames/ or in a presence; None if not valid."""
    return _hostname(load_if_object(value))


def computes_of(lives: Mapping[str, keys.StoredValue], names: Mapping[str, keys.StoredValue]) -> Computes:
    """Parse the keys below /computes/, ignoring those without a lease, and below /hostnames/."""
    by_uuid = {keys.last(key): hostname_in(stored.value) for key, stored in names.items()}
    return Computes(
        {keys.last(key): living_in(stored.value) for key, stored in lives.items() if stored.lease},
        {compute: hostname for compute, hostname in by_uuid.items() if hostname is not None and keys.is_uuid(compute)},
    )


def silent_cure(host: str) -> str:
    """Return the remedies for a silent compute that holds a claim, in the order to try them."""
    argument = host.rpartition('(')[2].rstrip(')')
    return (
        f'wait; or bring {host} back (after a restore of etcd: `ecompute --accept-new-etcd` there); or use another '
        f'uuid; or, if the machine is off for good, `eschedule host forget {argument} --fenced`'
    )


def unproven(
    providers: Mapping[str, str], presence: Mapping[str, keys.StoredValue], began_at: int, has_lease_ended: bool
) -> list[str]:
    """Return the computes in `providers` ({uuid: name}) not proven alive in this etcd.

    A presence is no proof: a restored etcd has it again, with a full lease. It is one if it was written after
    `start_revision`, etcd's revision when this process started, or once all leases of that time have expired. Providers
    that are not named by their uuid are left out.
    """
    alive = {
        keys.last(key)
        for key, stored in presence.items()
        if stored.lease and (has_lease_ended or stored.revision > began_at)
    }
    return sorted(uuid for uuid, name in providers.items() if uuid == name and uuid not in alive)


def living_in(value: bytes) -> Living:
    """Parse a presence. An absent or malformed field is None."""
    data = load_if_object(value)
    version, kind = (_short(data.get(name)) for name in ('version', 'kind'))
    # Doctor prints the version inside a command for the user to copy, so only harmless characters are accepted.
    if version is not None and not _SAID_VERSION.fullmatch(version):
        version = None
    queues = data.get('queues')
    takes_queued = queues if isinstance(queues, bool) else None
    return Living(_hostname(data), version, kind, takes_queued, parse_room_hint(data.get('room')))


def _hostname(said: Mapping[str, Any]) -> str | None:
    name = said.get('hostname')
    return name if isinstance(name, str) and is_hostname(name) else None


def _short(text: object) -> str | None:
    return text[:LONGEST] if isinstance(text, str) and text else None


UP = 'up'
DISABLED = 'disabled'
CLOSED = 'closed'
SILENT = 'silent'
ORPHANED = 'orphaned'

# States of an instance that exists and that nothing asked to destroy.
LIVING = (SCHEDULED, BUILDING, ACTIVE, STOPPED)

# Instances that a refusal or a finding names at most; it counts the others.
QUOTED = 3


@dataclass(frozen=True)
class InPlacement:
    """A resource provider. `status_traits` are its traits that mark it as disabled."""

    uuid: str
    name: str
    shares: Mapping[str, Room] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()

    @property
    def is_ours(self) -> bool:
        """True if named by its uuid, with VCPU or (as ecompute registers it) without inventory.

        Others are not shown or removed: nova names its computes by host name, and a storage pool has no VCPU.
        """
        return self.name == self.uuid and (not self.shares or 'VCPU' in self.shares)


@dataclass(frozen=True)
class InEtcd:
    """etcd's state: computes, requests by compute and instance, records by instance.

    `malformed_records` has instances; `invalid_names` has, by compute, names of requests that are not uuids.
    """

    computes: Computes = NOBODY
    requests: Mapping[str, Mapping[str, Request | Invalid]] = field(default_factory=dict)
    records: Mapping[str, Record] = field(default_factory=dict)
    unreadable: Collection[str] = ()
    junk: Mapping[str, Collection[str]] = field(default_factory=dict)

    def called(self, instance: str) -> str:
        """Return an instance's name from its record, else from a request; its uuid without one."""
        record = self.records.get(instance)
        requests = (wish.get(instance) for wish in self.requests.values())
        names = [record.name if record else None, *(wish.name for wish in requests if isinstance(wish, Request))]
        return next(filter(None, names), None) or instance

    @property
    def alive(self) -> Collection[str]:
        return self.computes.living


@dataclass(frozen=True)
class Host:
    """One line of `eschedule hosts`. If disabled, nothing is placed there until it is enabled."""

    compute: str
    hostname: str | None
    state: str
    instances: int
    resources: Mapping[str, Room]
    disabled: bool = False
    said: Living = Living()


@dataclass(frozen=True)
class Leftovers:
    """The remains of a compute on which no instance lives.

    `destroyed` are the instances whose destroy was accepted; `orphans` the consumers without request or record;
    `stray_requests` are of instances that are gone or on another compute, or have a name that is not a uuid.
    """

    ended: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()


def hosts(etcd: InEtcd, providers: Mapping[str, InPlacement]) -> list[Host]:
    """Return all computes in etcd or placement by host name and uuid; nameless ones come last."""
    uuids = {*etcd.alive, *etcd.requests, *etcd.junk}
    uuids |= {record.compute for record in etcd.records.values() if record.state in LIVING}
    uuids |= {provider.uuid for provider in providers.values() if provider.is_ours}
    listed = [_host(compute, etcd, providers.get(compute)) for compute in uuids if keys.is_uuid(compute)]
    return sorted(listed, key=lambda each: (each.hostname is None, each.hostname or '', each.compute))


def living(compute: str, etcd: InEtcd) -> set[str]:
    """Return the instances that live on a compute or are requested there, without tombstones."""
    requests = etcd.requests.get(compute, {})
    requested = {
        name
        for name, request in requests.items()
        if not _is_tombstone(request) and not _is_stray(compute, etcd.records.get(name))
    }
    recorded = {name for name, record in etcd.records.items() if record.compute == compute and record.state in LIVING}
    return requested | (recorded - requests.keys())


def there(compute: str, etcd: InEtcd) -> set[str]:
    """Return the instances that live, are requested or are being destroyed on a compute."""
    remains = leftovers(compute, etcd, ())
    return living(compute, etcd) | set(remains.ended)


def refusal(compute: str, etcd: InEtcd, held: Collection[str], at_it: Collection[str]) -> str | None:
    """Return one sentence why a compute must not be forgotten, or None if it may be.

    `consumers` have allocations there; `in_flight` are the instances with an attempt in flight.
    """
    if compute in etcd.alive:
        host = etcd.computes.host(compute)
        return f'it is alive{f" on {host}" if host else ""}: stop its ecompute first'
    live_instances = sorted(living(compute, etcd))
    if live_instances:
        return f'{_some(live_instances, etcd)} still there: destroy what is not wanted any more, then forget the host'
    attempted = sorted(set(held) & set(at_it))
    if attempted:
        retry = f'try again when it has ended (a dead one: in {keys.ATTEMPT_SECONDS} s)'
        return f'an eschedule is at work on {_some(attempted, etcd)} there: {retry}'
    unreadable = sorted({*etcd.requests.get(compute, {}), *held} & set(etcd.unreadable))
    if unreadable:
        return f'what is recorded of {_some(unreadable, etcd)} there cannot be read: see eschedule list'
    for consumer in sorted(held):
        others = [other for other in _homes(consumer, etcd) if other != compute]
        if others:
            where = f'{etcd.called(consumer)} of compute {etcd.computes.called(others[0])}'
            return f'instance {where} holds a part of it: destroy it first'
    return None


def leftovers(compute: str, etcd: InEtcd, held: Collection[str]) -> Leftovers:
    """Return what to remove with a compute that may be forgotten; `consumers` have allocations."""
    requests = etcd.requests.get(compute, {})
    stray = {name for name in requests if _is_stray(compute, etcd.records.get(name))}
    # A record is in state destroying only after a tombstone was delivered.
    destroying = {
        name for name, record in etcd.records.items() if record.compute == compute and record.state == DESTROYING
    }
    ended = ({name for name, request in requests.items() if _is_tombstone(request)} - stray) | destroying
    return Leftovers(
        ended=tuple(sorted(ended)),
        stray=tuple(sorted({*stray, *etcd.junk.get(compute, ())})),
        orphans=tuple(sorted(set(held) - ended)),
    )


def _host(compute: str, etcd: InEtcd, provider: InPlacement | None) -> Host:
    shares = provider.shares if provider else {}
    has_requests = bool(etcd.requests.get(compute) or etcd.junk.get(compute))
    traits = provider.traits if provider else frozenset()
    disabled = status.BY_OPERATOR in traits
    if compute in etcd.alive:
        disabled = disabled or status.DISABLED in traits
        state = DISABLED if disabled else UP
    elif 'VCPU' in shares and shares['VCPU'].shut:
        state = CLOSED
    elif has_requests or any(record.compute == compute for record in etcd.records.values()):
        state = SILENT
    else:
        state = ORPHANED
    instance_count = len(living(compute, etcd))
    facts = etcd.computes.living.get(compute, Living())
    return Host(compute, etcd.computes.host(compute), state, instance_count, shares, disabled, facts)


def _is_tombstone(wish: Request | Invalid) -> bool:
    return isinstance(wish, Request) and wish.is_tombstone


def _is_stray(compute: str, record: Record | None) -> bool:
    """True if the compute would drop the request: the instance is gone or elsewhere."""
    return record is not None and (record.compute != compute or record.state == GONE)


def _homes(instance: str, etcd: InEtcd) -> Iterator[str]:
    yield from (compute for compute, requests in etcd.requests.items() if instance in requests)
    record = etcd.records.get(instance)
    if record is not None and record.state in (*LIVING, DESTROYING):
        yield record.compute


def _some(instances: list[str], etcd: InEtcd) -> str:
    text = some(list(map(etcd.called, instances)), QUOTED)
    return f'instance{"s" if len(instances) > 1 else ""} {text}'


Each = TypeVar('Each', bound=keys.StoredValue)


def changed_hosts(
    before: Mapping[str, Each], state: Mapping[str, Each], parts: Mapping[str, Mapping[str, Each]]
) -> dict[str, dict[str, Each]]:
    """Return the current requests of the computes whose requests differ from `previous`.

    `previous_by_compute` has the previous ones (absent: none). Of maybe ten thousand keys, only changed ones are
    grouped.
    """
    changed: dict[str, dict[str, Each]] = {}

    def part(key: str) -> dict[str, Each]:
        compute = key.removeprefix(keys.HOSTS).partition('/')[0]
        if compute not in changed:
            changed[compute] = dict(parts.get(compute, {}))
        return changed[compute]

    removed_count = len(before) - len(state)
    for key, entry in state.items():
        old_entry = before.get(key)
        if old_entry is entry:
            continue
        if old_entry is None:
            removed_count += 1
        elif keys.version(old_entry) == keys.version(entry):
            continue
        part(key)[key] = entry
    if removed_count:
        for key in before.keys() - state.keys():
            del part(key)[key]
    return changed
