"""A compute as both planes tell of it, the room it says it has left, and where an instance is. Pure.

A compute is called by its host's name wherever people read or type. It says that name while it is alive, and the key
/hostnames/<compute> keeps it, as JSON {"version", "hostname"}, until the compute is forgotten.

Beside its presence it says {"room": {"VCPU": [capacity, hundredths of it that are left], …}}, a hint, placement stays
the truth: capacity as placement reckons it, hundredths rounded up, so what is free is never said to be none; below
zero where more is given than there is, also of a capacity of 0. A compute that is closed or read-only says no room.

More than one compute may have something of one instance: somebody wrote it by hand, or a compute writes what is not
its own. Believed is the compute that is asked for it. Of several it is the one that holds its claim in placement: the
uuid is public before anybody is asked, so the oldest request need not be the right one. Where none or each of them
does, or nobody asked placement, it is the one whose key is the oldest. What ecomp 1.0 may have written, below no
compute, counts only where it can be read: else rubbish there, which anybody may have put long before, would hide the
record that a compute has written.
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
    """What an instance has to be, to be shown; None where it does not matter.

    `states` are those it may be in, `name` is a pattern in which * stands for any text and ? for any character.
    """

    states: Collection[str] | None = None
    compute: str | None = None
    project: str | None = None
    group: str | None = None
    name: str | None = None

    def of(self, records: Iterable[Record]) -> list[Record]:
        """Those that are meant, in their order."""
        return [each for each in records if self._means(each)]

    def _means(self, record: Record) -> bool:
        return (
            (self.states is None or record.state in self.states)
            and self.compute in (None, record.compute)
            and self.project in (None, record.project_id)
            and self.group in (None, record.group_name)
            and (self.name is None or fnmatchcase(record.name or '', self.name))
        )


Claims = Callable[[str], Container[str]]
"""What says which consumers have a claim on a compute."""
Kind = TypeVar('Kind', bound=keys.StoredValue)


@dataclass
class Places(Generic[Kind]):
    """One instance's requests and records by compute; '' is for a record naming none, or an older unreadable one.

    `claimless` are computes that are asked for it and hold no claim of it, as far as that was looked at.
    """

    requests: dict[str, Kind] = field(default_factory=dict)
    records: dict[str, Kind] = field(default_factory=dict)
    record_keys: dict[str, str] = field(default_factory=dict)
    claimless: set[str] = field(default_factory=set)

    def judge(self, instance: str, claims: Claims) -> None:
        """Where several computes are asked for this, which is the instance, look for the one that holds its claim.

        `claims` is asked about one after the other, the oldest request first; of one compute alone it is not asked.
        """
        if len(self.requests) < 2:
            return
        for compute in sorted(self.requests, key=self._age):
            # What is no uuid is no compute, and a part of a path that somebody else has chosen.
            if keys.is_uuid(compute) and instance in claims(compute):
                return
            self.claimless.add(compute)

    @property
    def compute(self) -> str:
        """The compute whose request and record are believed; '' if there is none."""
        claiming = [each for each in self.requests if each not in self.claimless]
        return min(claiming or self.requests or self.records, key=self._age, default='')

    def _age(self, compute: str) -> tuple[int, str]:
        return (self.requests or self.records)[compute].created, compute

    @property
    def request(self) -> Kind | None:
        """The request of that compute; None if it has none."""
        return self.requests.get(self.compute)

    @property
    def record(self) -> Kind | None:
        """The record of that compute; None while it has written none."""
        return self.records.get(self.compute)

    @property
    def record_key(self) -> str | None:
        """The key of that record; None while there is none."""
        return self.record_keys.get(self.compute)


def by_instance(found: Iterable[tuple[str, Kind]]) -> dict[str, Places[Kind]]:
    """{instance: Places} of the keys below /hosts/ and /instances/ among `found`, pairs of a key and what is at it."""
    places: dict[str, Places[Kind]] = {}
    older = []
    for key, written in found:
        if key.startswith(keys.HOSTS):
            compute, _, instance = key.removeprefix(keys.HOSTS).partition('/')
            places.setdefault(instance, Places()).requests[compute] = written
        elif key.startswith(keys.INSTANCES):
            place, instance = keys.recorded(key)
            if place is None:
                older.append((key, instance, written))
            else:
                _add(places, place, key, instance, written)
    for key, instance, written in older:
        records = places.setdefault(instance, Places()).records
        named = _compute_in(written.value)
        # Unreadable, it is the instance's record only where nobody has another.
        if (not records) if named is None else (named not in records):
            _add(places, named or '', key, instance, written)
    return places


def _add(places: dict[str, Places[Kind]], compute: str, key: str, instance: str, written: Kind) -> None:
    mine = places.setdefault(instance, Places())
    mine.records[compute], mine.record_keys[compute] = written, key


def _compute_in(value: bytes) -> str | None:
    """The compute that a record names, '' if it names none; None if the record cannot be read."""
    try:
        return from_json(value).compute
    except ValueError:
        return None


CLASSES = 40
"""Resource classes of one compute, at most: one that names more is not believed."""


class Left(NamedTuple):
    """Of one class: what can be given in all, and how many hundredths of that are left."""

    capacity: int
    hundredths: int

    @property
    def most(self) -> int:
        """So much is left at most."""
        return self.capacity * self.hundredths // 100


Hint = Mapping[str, Left]
"""{class: Left}"""


def room_hint(inventory: Mapping[str, Mapping[str, float]], given: Iterable[Resources]) -> dict[str, list[int]]:
    """What a compute says that has this inventory, of which so much is `given`: {class: [capacity, hundredths]}."""
    used = summed(given)
    found = {}
    for name, each in sorted(inventory.items()):
        there = capacity(each['total'], each.get('allocation_ratio', 1.0), each.get('reserved', 0))
        left = there - used.get(name, 0)
        # Rounded up: minus, divided down, minus.
        found[name] = [there, -(-100 * left // there) if left > 0 else max(100 * left // max(there, 1), -LARGEST)]
    return found


def parse_room_hint(value: Any) -> Hint | None:
    """The hint in what a compute says; None for what is none."""
    if not isinstance(value, dict) or not 0 < len(value) <= CLASSES:
        return None
    found = {}
    for name, each in value.items():
        if not isinstance(each, list) or len(each) != 2 or not is_class(name):
            return None
        there, hundredths = each
        if not is_amount(there, MOST) or type(hundredths) is not int or not -LARGEST <= hundredths <= 100:
            return None
        found[name] = Left(there, hundredths)
    return found


def fits(hint: Hint, asked: Resources) -> bool:
    """Whether there may be room for what is asked."""
    return all(name in hint and amount <= hint[name].most for name, amount in asked.items())


def share_left(hint: Hint, asked: Resources) -> float:
    """The share from 0 to 1 that is left once it gives what is asked, of the class with least: as choose.share_left().

    A class it does not have is no limit.
    """
    known = [(hint[name], amount) for name, amount in asked.items() if name in hint and hint[name].capacity]
    shares = [each.hundredths / 100 - amount / each.capacity for each, amount in known]
    return round(max(min(shares, default=0.0), 0.0), 2)


VERSION = 1
LONGEST = 64
"""Characters that are shown of a version or a kind."""

_SAID_VERSION = re.compile('[0-9A-Za-z.+!-]*')
_HOSTNAME = re.compile('[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}')


class Living(NamedTuple):
    """What a living compute says of itself; None: it does not say it, as ecomp 1.0 does not say the last two.

    `kind` is what its guests are: kvm, qemu or fake. `queues`: it takes requests out of queues. `room` is a hint.
    """

    hostname: str | None = None
    version: str | None = None
    kind: str | None = None
    queues: bool | None = None
    room: Hint | None = None


class Naming(Protocol):
    """What computes are called, and nothing else of them: it may be that etcd could not be asked for more."""

    def host(self, compute: str) -> str | None: ...
    def called(self, compute: str) -> str: ...


@dataclass(frozen=True)
class Computes:
    """All computes of which etcd knows a name or a life; `remembered` has the host names of those that may be away."""

    living: Mapping[str, Living] = field(default_factory=dict)
    remembered: Mapping[str, str] = field(default_factory=dict)

    def host(self, compute: str) -> str | None:
        """The name of the compute's host; None if it never said one."""
        return self._hosts.get(compute)

    def called(self, compute: str) -> str:
        """What it is called in a sentence: its host's name, with the uuid where that name is not its alone."""
        host = self.host(compute)
        if host is None:
            return compute
        return host if compute in self._alone else f'{host} ({compute})'

    def named(self, host: str) -> list[str]:
        """The computes whose host has this name, alive or not, sorted.

        The only one that is alive is not meant for that: each says its own name, also that of one that is away.
        """
        return self._by_host.get(host, [])

    @property
    def takers(self) -> list[str]:
        """The living computes that take requests out of queues, sorted."""
        return sorted(compute for compute, said in self.living.items() if said.queues)

    @property
    def no_taker(self) -> str | None:
        """That none of them takes from queues, in one sentence; None if one does. An ecompute of 1.0 does not say."""
        if self.takers:
            return None
        unsaid = sorted(self.called(compute) for compute, said in self.living.items() if said.queues is None)
        if unsaid:
            older = f'of {some(unsaid, 1)}, of an older version, it is not known'
            return f'no compute says that it takes from queues; {older}'
        return 'no compute takes from queues: `queues: True` in the compute.yaml of one has it do so'

    def unserved(self, waiting: Sequence[str]) -> str | None:
        """That those `waiting` in queues wait for nobody, in one line; None where that is not so, or not known."""
        if not waiting or self.no_taker is None or any(said.queues is None for said in self.living.values()):
            return None
        return printable(f'{some(waiting, 1)} wait{"s" if len(waiting) == 1 else ""} in a queue, and {self.no_taker}')

    def translated(self, text: str) -> str:
        """The text with what a compute is called in place of its uuid; a key's path stays as it is."""
        return renamed(text, self.names)

    @cached_property
    def names(self) -> dict[str, str]:
        """{uuid: what it is called} of all that have a host's name."""
        return {compute: self.called(compute) for compute in self._hosts}

    @cached_property
    def _hosts(self) -> dict[str, str]:
        said = {compute: each.hostname for compute, each in self.living.items() if each.hostname is not None}
        return {**self.remembered, **said}

    @cached_property
    def _alone(self) -> frozenset[str]:
        """Those who are meant by their host's name, and nobody else is."""
        meant = map(self.named, self._by_host)
        return frozenset(each[0] for each in meant if len(each) == 1)

    @cached_property
    def _by_host(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for compute, host in sorted(self._hosts.items()):
            found.setdefault(host, []).append(compute)
        return found


NOBODY = Computes()
"""No compute is known by name: each is called by its uuid.

Who has not read etcd passes it as a Naming: what else it would say, as that nobody takes from queues, is not known.
"""


def is_hostname(text: object) -> bool:
    """True for what may be shown and typed as a host's name: it is not a uuid, and has no blank in it."""
    if not isinstance(text, str) or not _HOSTNAME.fullmatch(text):
        return False
    if len(text.replace('-', '')) != 32:
        return True
    import uuid  # here, because it takes its time

    try:
        uuid.UUID(text)
    except ValueError:
        return True
    return False


def to_json(hostname: str) -> str:
    """The value of a compute's key below /hostnames/."""
    return dump({'version': VERSION, 'hostname': hostname})


def hostname_in(value: bytes) -> str | None:
    """The host name that such a value, or that of a compute's presence, says; None if it says none."""
    return _hostname(load_if_object(value))


def computes_of(lives: Mapping[str, keys.StoredValue], names: Mapping[str, keys.StoredValue]) -> Computes:
    """The computes in what is below /computes/, where a life is on a lease, and in what is below /hostnames/."""
    named = {keys.last(key): hostname_in(each.value) for key, each in names.items()}
    return Computes(
        {keys.last(key): living_in(each.value) for key, each in lives.items() if each.lease},
        {compute: name for compute, name in named.items() if name is not None and keys.is_uuid(compute)},
    )


def silent_cure(host: str) -> str:
    """Say what can be done where a silent compute holds a claim, in the order in which to try it.

    `host` is what the compute is called, `NAME (UUID)` where two have that name: then the command has its uuid.
    """
    word = host.rpartition('(')[2].rstrip(')')
    return (
        f'wait; or bring {host} back (after a restore of etcd: `ecompute --accept-new-etcd` there); or use another '
        f'uuid; or, if the machine is off for good, `eschedule host forget {word} --fenced`'
    )


def unproven(
    providers: Mapping[str, str], presence: Mapping[str, keys.StoredValue], began_at: int, has_lease_ended: bool
) -> list[str]:
    """List the computes of placement, {uuid: name}, of which nothing proves that they live in this etcd.

    A key on a lease does not: in a restored etcd it is back, with a full lease. It proves it once it was written after
    `began_at`, etcd's revision when this process began, or once every lease of then has ended.
    """
    alive = {
        keys.last(key) for key, each in presence.items() if each.lease and (has_lease_ended or each.revision > began_at)
    }
    return sorted(uuid for uuid, name in providers.items() if uuid == name and uuid not in alive)


def living_in(value: bytes) -> Living:
    """What a living compute's own key says of it: whatever makes no sense is not said."""
    said = load_if_object(value)
    version, kind = (_short(said.get(name)) for name in ('version', 'kind'))
    if version is not None and not _SAID_VERSION.fullmatch(version):  # doctor says it where a command is to be copied
        version = None
    queues = said.get('queues')
    taking = queues if isinstance(queues, bool) else None
    return Living(_hostname(said), version, kind, taking, parse_room_hint(said.get('room')))


def _hostname(said: Mapping[str, Any]) -> str | None:
    name = said.get('hostname')
    return name if isinstance(name, str) and is_hostname(name) else None


def _short(text: object) -> str | None:
    return text[:LONGEST] if isinstance(text, str) and text else None


UP, DISABLED, CLOSED, SILENT, ORPHANED = 'up', 'disabled', 'closed', 'silent', 'orphaned'

LIVING = (SCHEDULED, BUILDING, ACTIVE, STOPPED)
"""States of an instance that has not ended and that nobody asked to destroy."""

QUOTED = 3
"""How many instances a refusal or a finding names at most; it says how many more there are."""


@dataclass(frozen=True)
class InPlacement:
    """A resource provider. `traits` are those of its traits that say that it is disabled."""

    uuid: str
    name: str
    shares: Mapping[str, Room] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()

    @property
    def is_ours(self) -> bool:
        """True for a provider named by its uuid that has VCPU, or no inventory yet, as an ecompute registers it.

        Others are not ours to show or remove: nova names its computes by host name, a storage pool has no VCPU.
        """
        return self.name == self.uuid and (not self.shares or 'VCPU' in self.shares)


@dataclass(frozen=True)
class InEtcd:
    """What etcd says: who lives and what each is called, requests by compute and instance, records by instance.

    `unreadable` are the instances whose record cannot be read; `junk` has, by compute, the names of requests that are
    no uuids.
    """

    computes: Computes = NOBODY
    requests: Mapping[str, Mapping[str, Request | Invalid]] = field(default_factory=dict)
    records: Mapping[str, Record] = field(default_factory=dict)
    unreadable: Collection[str] = ()
    junk: Mapping[str, Collection[str]] = field(default_factory=dict)

    def called(self, instance: str) -> str:
        """What people call an instance: its name, or else its uuid."""
        record = self.records.get(instance)
        wishes = (each.get(instance) for each in self.requests.values())
        names = [record.name if record else None, *(each.name for each in wishes if isinstance(each, Request))]
        return next(filter(None, names), None) or instance

    @property
    def alive(self) -> Collection[str]:
        """The computes that are alive."""
        return self.computes.living


@dataclass(frozen=True)
class Host:
    """One line of `eschedule hosts`. `disabled` means that nothing is placed there until an operator enables it.

    `said` is what it says of itself while it is alive.
    """

    compute: str
    hostname: str | None
    state: str
    instances: int
    resources: Mapping[str, Room]
    disabled: bool = False
    said: Living = Living()


@dataclass(frozen=True)
class Leftovers:
    """What is left of a compute on which no instance lives.

    `ended` are the instances whose destroy was accepted; `stray` the names of requests that no compute would carry out,
    for their instance is gone, another compute's or none; `orphans` the consumers without request or record.
    """

    ended: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()


def hosts(etcd: InEtcd, providers: Mapping[str, InPlacement]) -> list[Host]:
    """Every compute that etcd or placement knows, sorted by host name and uuid; those without a name are last."""
    known = {*etcd.alive, *etcd.requests, *etcd.junk}
    known |= {record.compute for record in etcd.records.values() if record.state in LIVING}
    known |= {provider.uuid for provider in providers.values() if provider.is_ours}
    found = [_host(compute, etcd, providers.get(compute)) for compute in known if keys.is_uuid(compute)]
    return sorted(found, key=lambda each: (each.hostname is None, each.hostname or '', each.compute))


def living(compute: str, etcd: InEtcd) -> set[str]:
    """The instances that live on a compute, or are requested of it."""
    requests = etcd.requests.get(compute, {})
    wanted = {
        name
        for name, wish in requests.items()
        if not _is_tombstone(wish) and not _is_stray(compute, etcd.records.get(name))
    }
    recorded = {name for name, record in etcd.records.items() if record.compute == compute and record.state in LIVING}
    return wanted | (recorded - requests.keys())


def there(compute: str, etcd: InEtcd) -> set[str]:
    """The instances that live on a compute, and those it is destroying."""
    left = leftovers(compute, etcd, ())
    return living(compute, etcd) | set(left.ended)


def refusal(compute: str, etcd: InEtcd, held: Collection[str], at_it: Collection[str]) -> str | None:
    """Why a compute must not be forgotten, in one sentence; None if it may be.

    `held` are the consumers with allocations there; `at_it` the instances that an eschedule is at work on now.
    """
    if compute in etcd.alive:
        host = etcd.computes.host(compute)
        return f'it is alive{f" on {host}" if host else ""}: stop its ecompute first'
    there = sorted(living(compute, etcd))
    if there:
        return f'{_some(there, etcd)} still there: destroy what is not wanted any more, then forget the host'
    claiming = sorted(set(held) & set(at_it))
    if claiming:
        again = f'try again when it has ended (a dead one: in {keys.ATTEMPT_SECONDS} s)'
        return f'an eschedule is at work on {_some(claiming, etcd)} there: {again}'
    unreadable = sorted({*etcd.requests.get(compute, {}), *held} & set(etcd.unreadable))
    if unreadable:
        return f'what is recorded of {_some(unreadable, etcd)} there cannot be read: see eschedule list'
    for name in sorted(held):
        others = [other for other in _homes(name, etcd) if other != compute]
        if others:
            of = f'{etcd.called(name)} of compute {etcd.computes.called(others[0])}'
            return f'instance {of} holds a part of it: destroy it first'
    return None


def leftovers(compute: str, etcd: InEtcd, held: Collection[str]) -> Leftovers:
    """What is to be removed with a compute for which refusal() is None; `held` as there."""
    requests = etcd.requests.get(compute, {})
    stray = {name for name in requests if _is_stray(compute, etcd.records.get(name))}
    # A record only says destroying once a tombstone was there.
    destroying = {
        name for name, record in etcd.records.items() if record.compute == compute and record.state == DESTROYING
    }
    ended = ({name for name, wish in requests.items() if _is_tombstone(wish)} - stray) | destroying
    return Leftovers(
        ended=tuple(sorted(ended)),
        stray=tuple(sorted({*stray, *etcd.junk.get(compute, ())})),
        orphans=tuple(sorted(set(held) - ended)),
    )


def _host(compute: str, etcd: InEtcd, provider: InPlacement | None) -> Host:
    shares = provider.shares if provider else {}
    named = bool(etcd.requests.get(compute) or etcd.junk.get(compute))
    traits = provider.traits if provider else frozenset()
    disabled = status.BY_OPERATOR in traits
    if compute in etcd.alive:
        disabled = disabled or status.DISABLED in traits
        state = DISABLED if disabled else UP
    elif 'VCPU' in shares and shares['VCPU'].shut:
        state = CLOSED
    elif named or any(record.compute == compute for record in etcd.records.values()):
        state = SILENT
    else:
        state = ORPHANED
    there, said = len(living(compute, etcd)), etcd.computes.living.get(compute, Living())
    return Host(compute, etcd.computes.host(compute), state, there, shares, disabled, said)


def _is_tombstone(wish: Request | Invalid) -> bool:
    return isinstance(wish, Request) and wish.is_tombstone


def _is_stray(compute: str, record: Record | None) -> bool:
    """True for a request that its compute would drop: its instance is gone, or another compute's by its record."""
    return record is not None and (record.compute != compute or record.state == GONE)


def _homes(instance: str, etcd: InEtcd) -> Iterator[str]:
    yield from (compute for compute, requests in etcd.requests.items() if instance in requests)
    record = etcd.records.get(instance)
    if record is not None and record.state in (*LIVING, DESTROYING):
        yield record.compute


def _some(instances: list[str], etcd: InEtcd) -> str:
    named = some(list(map(etcd.called, instances)), QUOTED)
    return f'instance{"s" if len(instances) > 1 else ""} {named}'


Each = TypeVar('Each', bound=keys.StoredValue)


def changed_hosts(
    before: Mapping[str, Each], state: Mapping[str, Each], parts: Mapping[str, Mapping[str, Each]]
) -> dict[str, dict[str, Each]]:
    """{compute: all that is below /hosts/<compute>/} of those of which anything is otherwise than `before`.

    `parts` is what each has `before` (none: nothing): of ten thousand keys only those that changed are sorted.
    """
    changed: dict[str, dict[str, Each]] = {}

    def part(key: str) -> dict[str, Each]:
        compute = key.removeprefix(keys.HOSTS).partition('/')[0]
        if compute not in changed:
            changed[compute] = dict(parts.get(compute, {}))
        return changed[compute]

    removed = len(before) - len(state)
    for key, entry in state.items():
        known = before.get(key)
        if known is entry:
            continue
        if known is None:
            removed += 1
        elif keys.version(known) == keys.version(entry):
            continue
        part(key)[key] = entry
    if removed:
        for key in before.keys() - state.keys():
            del part(key)[key]
    return changed
