"""Computes, their free room, and which of them has an instance. Pure.

A compute is shown and typed by its host's name, which is in its presence and, until it is forgotten, in the key
/hostnames/<compute>.

Its `leases` are two leases without keys; their ages show when the host was last alive. ecompute renews the first one
every 10 s, and never the second one, the anchor. etcd resets both when it starts, is restored or elects a leader: then
their ages are equal, and show no time until the first one is renewed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, TypeVar

from ecomp.errors import Problem
from ecomp.model import keys, status
from ecomp.model.allocation import (
    Inventory,
    Room,
)
from ecomp.model.order import InvalidRequest, Request
from ecomp.model.parsers import FLAG, NONEMPTY, check, list_of, number, text
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, GONE, SCHEDULED, STOPPED, Record, format_time
from ecomp.model.stored import decode_lenient, lenient, stored
from ecomp.model.text import join_some, make_printable, replace_uuids
from ecomp.model.trouble import Trouble

# Returns the consumers that hold a claim on the compute with this uuid.
ConsumerLookup = Callable[[str], Container[str]]
Kind = TypeVar('Kind', bound=keys.StoredValue)


@dataclass
class EntriesByCompute(Generic[Kind]):
    """The requests and records of one instance by compute, and the compute that is trusted.

    Several computes may have keys of one instance: a request was written manually, or a compute writes keys that are
    not its own. Trusted is the compute of the oldest request that is not `claimless`, or of the oldest if all are. Age
    alone does not suffice: the uuid is public before delivery, so the oldest request may be a false one. Without a
    request, the compute with the oldest record is trusted. `request`, `record` and `record_key` are its own, or None.

    `claimless` are computes that mark_claimless() found without the claim. In `records`, '' is for a record whose key
    names no compute.
    """

    requests: dict[str, Kind] = field(default_factory=dict)
    records: dict[str, Kind] = field(default_factory=dict)
    record_keys: dict[str, str] = field(default_factory=dict)
    claimless: set[str] = field(default_factory=set)

    def mark_claimless(self, instance: str, consumer_lookup: ConsumerLookup) -> None:
        """Query computes, oldest request first, until one has the claim, and fill `claimless`.

        No-op for fewer than two requests. A compute that is not a uuid is claimless. Raises `consumer_lookup`'s errors.
        """
        if len(self.requests) < 2:
            return
        for compute in sorted(self.requests, key=self._make_age_key):
            # Other text from a key is not a compute, and would become part of a URL path.
            if keys.is_uuid(compute) and instance in consumer_lookup(compute):
                return
            self.claimless.add(compute)

    @property
    def compute(self) -> str:
        """The trusted compute; '' without a request and without a record that names one."""
        claimants = [compute for compute in self.requests if compute not in self.claimless]
        return min(claimants or self.requests or self.records, key=self._make_age_key, default='')

    def _make_age_key(self, compute: str) -> tuple[int, str]:
        """Return (creation revision, compute) of its request or, without any requests, its record."""
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


def group_by_instance(stored: Iterable[tuple[str, Kind]]) -> dict[str, EntriesByCompute[Kind]]:
    """Return {instance: requests and records} from pairs of a key and its stored value; other keys are ignored.

    Uuids are not checked.
    """
    by_uuid: dict[str, EntriesByCompute[Kind]] = {}
    for key, written in stored:
        if key.startswith(keys.HOSTS):
            compute, _, instance = key.removeprefix(keys.HOSTS).partition('/')
            by_uuid.setdefault(instance, EntriesByCompute()).requests[compute] = written
        elif key.startswith(keys.INSTANCES):
            compute, instance = keys.parse_record_key(key)
            entries = by_uuid.setdefault(instance, EntriesByCompute())
            entries.records[compute], entries.record_keys[compute] = written, key
    return by_uuid


# A version or kind is cut off after this many characters.
MAX_SHOWN_CHARACTERS = 64

_VERSION_PATTERN = re.compile('[0-9A-Za-z.+!-]*')
_HOSTNAME_PATTERN = re.compile('[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}')


def is_hostname(text: object) -> bool:
    """Return whether a value is 1 to 253 of A-Z, a-z, 0-9, ., _ and -, not first . or -; no uuid, even undashed."""
    if not isinstance(text, str) or not _HOSTNAME_PATTERN.fullmatch(text):
        return False
    if len(text.replace('-', '')) != 32:
        return True
    import uuid  # imported here because it is slow to load

    try:
        uuid.UUID(text)
    except ValueError:
        return True
    return False


_HOSTNAME = lenient(check('a host name', is_hostname))
_SHOWN_TEXT = text(lambda shown: NONEMPTY(shown)[:MAX_SHOWN_CHARACTERS])
# Doctor prints the version in a command for the user to copy, so only harmless characters are accepted.
_VERSION = check('a version', _VERSION_PATTERN.fullmatch)
_LEASES = list_of(number(0, 2**63 - 1), lengths=(2,))


@stored(
    hostname=_HOSTNAME,
    version=lenient(lambda version: _VERSION(_SHOWN_TEXT(version))),
    kind=lenient(_SHOWN_TEXT),
    queues=lenient(FLAG),
)
class PresenceFacts(NamedTuple):
    """The content of a presence; absent or malformed fields are None.

    `kind` is kvm, qemu or fake. `queues`: it takes requests from queues.
    """

    hostname: str | None = None
    version: str | None = None
    kind: str | None = None
    queues: bool | None = None


@stored(1, 'host name', hostname=_HOSTNAME, leases=lenient(_LEASES, is_sparse=True))
class StoredHostname(NamedTuple):
    """The value of a key below /hostnames/; None and () for what is malformed."""

    hostname: str | None = None
    leases: tuple[int, ...] = ()


class ComputeNames(Protocol):
    """The names of computes alone, for code that runs even if etcd could not be read."""

    def find_hostname(self, compute: str) -> str | None: ...
    def format_name(self, compute: str) -> str: ...


@dataclass(frozen=True)
class Computes:
    """All computes with a presence (`living`) or a stored host name in etcd."""

    living: Mapping[str, PresenceFacts] = field(default_factory=dict)
    stored_hostnames: Mapping[str, str] = field(default_factory=dict)

    def find_hostname(self, compute: str) -> str | None:
        """Return the compute's host name, or None if none is known."""
        return self._hostnames.get(compute)

    def format_name(self, compute: str) -> str:
        """Return the host name, with ` (uuid)` behind it if not unique; the uuid if there is none."""
        host = self.find_hostname(compute)
        if host is None:
            return compute
        return host if len(self.find_by_hostname(host)) == 1 else f'{host} ({compute})'

    def find_by_hostname(self, hostname: str) -> list[str]:
        """Return the computes with this host name, alive or not, sorted; [] if none.

        A single living one is not preferred, because a compute may publish the name of a silent one.
        """
        return self._by_hostname.get(hostname, [])

    @property
    def takers(self) -> list[str]:
        """The living computes that take requests from queues, sorted."""
        return sorted(compute for compute, presence in self.living.items() if presence.queues)

    @property
    def no_taker_reason(self) -> Problem | None:
        """Why no compute takes queued requests, or that this is unknown; None if one takes them."""
        if self.takers:
            return None
        unknown = sorted(
            self.format_name(compute) for compute, presence in self.living.items() if presence.queues is None
        )
        if unknown:
            older = f'the ecompute of {join_some(unknown, 1)} is too old to report it'
            return Problem(f'no compute reports that it takes queued requests, but {older}')
        cure = 'set `queues: True` in the compute.yaml of a host, and restart its ecompute'
        return Problem('no compute takes queued requests', cure)

    def describe_unserved(self, names: Sequence[str]) -> Problem | None:
        """Return that no compute takes these requests, naming the first; None without `names`, or if one may."""
        reason = self.no_taker_reason
        if not names or reason is None or any(presence.queues is None for presence in self.living.values()):
            return None
        waiting = make_printable(f'{join_some(names, 1)} wait{"s" if len(names) == 1 else ""} in a queue')
        return reason._replace(what=f'{waiting}, but {reason.what}')

    def replace_uuids(self, text: str) -> str:
        """Return the text with uuids of computes replaced by names, except in paths of keys."""
        return replace_uuids(text, self.display_names)

    @cached_property
    def display_names(self) -> dict[str, str]:
        """{uuid: display name} of the computes that have a host name."""
        return {compute: self.format_name(compute) for compute in self._hostnames}

    @cached_property
    def _hostnames(self) -> dict[str, str]:
        """{compute: host name}; a living compute's own overrides the stored one."""
        published = {compute: facts.hostname for compute, facts in self.living.items() if facts.hostname is not None}
        return {**self.stored_hostnames, **published}

    @cached_property
    def _by_hostname(self) -> dict[str, list[str]]:
        """The computes of each host name, alive or not, sorted."""
        by_hostname: dict[str, list[str]] = {}
        for compute, host in sorted(self._hostnames.items()):
            by_hostname.setdefault(host, []).append(compute)
        return by_hostname


# No names known: every compute is shown by its uuid. For code that has not read etcd it is a ComputeNames only, because
# as Computes it would claim that no compute takes from queues.
NO_COMPUTES = Computes()


# Seconds by which the anchor's age has to exceed the other lease's, because etcd spreads the reset of more than 1,000
# leases, by a second for each 750 (lessor.Promote).
LIFE_MARGIN_SECONDS = 60


def find_last_seen(ages: Sequence[int | None], now: datetime) -> str | None:
    """Return the ISO time of a silent host's last sign of life, from the ages of its leases; None if unknown."""
    age, anchor_age = ages
    # A leader that has just been elected may report a negative age.
    if age is None or age < 0 or anchor_age is None or anchor_age - age < LIFE_MARGIN_SECONDS:
        return None
    return format_time((now - timedelta(seconds=age)).replace(microsecond=0))


def describe_silence(last_seen: str | None, today: str) -> str:
    """Return `silent since 16:35:54`, with the date if it is not `today`; `silent` if the ISO time is None."""
    since = f' since {last_seen[:10]} {last_seen[11:19]}'.replace(f' {today} ', ' ') if last_seen else ''
    return SILENT + since


def parse_computes(presences: Mapping[str, keys.StoredValue], hostnames: Mapping[str, keys.StoredValue]) -> Computes:
    """Parse the keys below /computes/, ignoring those without a lease, and below /hostnames/.

    A host name that is malformed, or not stored for a uuid, is left out; uuids of presences are not checked.
    """
    by_uuid = {
        keys.get_last_part(key): decode_lenient(StoredHostname, each.value).hostname for key, each in hostnames.items()
    }
    living = {key: each.value for key, each in presences.items() if each.lease}
    return Computes(
        {keys.get_last_part(key): decode_lenient(PresenceFacts, value) for key, value in living.items()},
        {compute: hostname for compute, hostname in by_uuid.items() if hostname is not None and keys.is_uuid(compute)},
    )


def describe_silent_fix(host: str, alternative: str = ', or use another uuid') -> str:
    """Return the remedies for a silent compute with a claim, in order; `host` is from Computes.format_name()."""
    argument = host.rpartition('(')[2].rstrip(')')  # the uuid of `name (uuid)`
    return (
        f'wait, or start ecompute on {host} (after a restore of etcd: `ecompute --accept-new-etcd`){alternative}; '
        f'if the machine never comes back: `eschedule host forget {argument} --fenced`'
    )


def list_unproven(
    providers: Mapping[str, str],
    presences: Mapping[str, keys.StoredValue],
    start_revision: int,
    have_leases_expired: bool,
) -> list[str]:
    """Return sorted uuids of `providers` {uuid: name} that are named by their uuid and not proven alive in this etcd.

    A restored etcd has old presences again, with full leases. So a presence is proof only if it was written after
    `start_revision`, etcd's revision when this process started, or if all leases of that time have expired.
    """
    alive = {
        keys.get_last_part(key)
        for key, stored in presences.items()
        if stored.lease and (have_leases_expired or stored.revision > start_revision)
    }
    return sorted(uuid for uuid, name in providers.items() if uuid == name and uuid not in alive)


UP = 'up'
DISABLED = 'disabled'
CLOSED = 'closed'
SILENT = 'silent'
ORPHANED = 'orphaned'

# States of an instance that exists and that nothing asked to destroy.
LIVE_STATES = (SCHEDULED, BUILDING, ACTIVE, STOPPED)

# Instances that a refusal or a finding names at most; it counts the others.
MAX_QUOTED_INSTANCES = 3


@dataclass(frozen=True)
class ProviderSummary:
    """A resource provider. `status_traits` are its traits that mark it as disabled."""

    uuid: str
    name: str
    rooms: Mapping[str, Room] = field(default_factory=dict)
    status_traits: frozenset[str] = frozenset()

    @property
    def is_ours(self) -> bool:
        """True if named by its uuid, with VCPU or (as ecompute registers it) without inventory.

        Others are not shown or removed: nova names its computes by host name, a storage pool has no VCPU.
        """
        return self.name == self.uuid and (not self.rooms or 'VCPU' in self.rooms)


@dataclass(frozen=True)
class EtcdState:
    """etcd's state. `malformed_records` are instances; `invalid_names` are, by compute, names that are not uuids."""

    computes: Computes = NO_COMPUTES
    requests: Mapping[str, Mapping[str, Request | InvalidRequest]] = field(default_factory=dict)
    records: Mapping[str, Record] = field(default_factory=dict)
    malformed_records: Collection[str] = ()
    invalid_names: Mapping[str, Collection[str]] = field(default_factory=dict)
    troubles: Mapping[str, Trouble] = field(default_factory=dict)

    def format_instance(self, instance: str) -> str:
        """Return an instance's name from its record, else from a request; its uuid without one."""
        record = self.records.get(instance)
        requests = (parsed.get(instance) for parsed in self.requests.values())
        names = [record.name if record else None, *(parsed.name for parsed in requests if isinstance(parsed, Request))]
        return next(filter(None, names), None) or instance

    @property
    def living_computes(self) -> Collection[str]:
        return self.computes.living


@dataclass(frozen=True)
class Host:
    """A line of `eschedule hosts`. `state` is UP to ORPHANED; `instances` are those of list_present().

    `last_seen` is None unless the host is silent and its last sign of life is known.
    """

    compute: str
    hostname: str | None
    state: str
    instances: Collection[str]
    rooms: Mapping[str, Room]
    is_disabled: bool = False
    facts: PresenceFacts = PresenceFacts()
    last_seen: str | None = None
    trouble: Trouble | None = None


@dataclass(frozen=True)
class Leftovers:
    """The remains of a compute on which no instance lives.

    `destroyed` are instances whose destroy was accepted, `orphans` the other consumers with allocations there, and
    `stray_requests` of instances that are gone or on another compute, or with a name that is not a uuid.
    """

    destroyed: tuple[str, ...] = ()
    stray_requests: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()


def list_hosts(etcd: EtcdState, providers: Mapping[str, ProviderSummary]) -> list[Host]:
    """Return the computes that live, have requests or live instances, or are providers of ours, if they are uuids.

    Sorted by host name and uuid; nameless ones come last.
    """
    uuids = {*etcd.living_computes, *etcd.requests, *etcd.invalid_names}
    uuids |= {record.compute for record in etcd.records.values() if record.state in LIVE_STATES}
    uuids |= {provider.uuid for provider in providers.values() if provider.is_ours}
    listed = [_make_host(compute, etcd, providers.get(compute)) for compute in uuids if keys.is_uuid(compute)]
    return sorted(listed, key=lambda each: (each.hostname is None, each.hostname or '', each.compute))


def list_living(compute: str, etcd: EtcdState) -> set[str]:
    """Return the instances that live on a compute or are requested there, also by a malformed request.

    Instances with a tombstone there, and requests of instances that are gone or on another compute, are left out.
    """
    requests = etcd.requests.get(compute, {})
    requested = {
        name
        for name, request in requests.items()
        if not _is_tombstone(request) and not _is_stray(compute, etcd.records.get(name))
    }
    recorded = {
        name for name, record in etcd.records.items() if record.compute == compute and record.state in LIVE_STATES
    }
    return requested | (recorded - requests.keys())


def list_present(compute: str, etcd: EtcdState) -> set[str]:
    """Return the instances that live, are requested or are being destroyed on a compute."""
    remains = find_leftovers(compute, etcd, ())
    return list_living(compute, etcd) | set(remains.destroyed)


def find_forget_obstacle(
    compute: str, etcd: EtcdState, consumers: Collection[str], in_flight: Collection[str]
) -> str | None:
    """Return why a compute must not be forgotten, and the cure; None if it may be. `consumers` have claims there."""
    if compute in etcd.living_computes:
        host = etcd.computes.find_hostname(compute)
        return f'it is alive{f" on {host}" if host else ""}. Fix: stop its ecompute'
    live_instances = sorted(list_living(compute, etcd))
    if live_instances:
        named = _format_instances(live_instances, etcd)
        return f'it still has {named}. Fix: destroy all instances there, and repeat the command'
    attempted = sorted(set(consumers) & set(in_flight))
    if attempted:
        retry = (
            f'repeat the command when the attempt has finished, or {keys.ATTEMPT_SECONDS} s after its eschedule died'
        )
        return f'an attempt to place {_format_instances(attempted, etcd)} there is still running. Fix: {retry}'
    unreadable = sorted({*etcd.requests.get(compute, {}), *consumers} & set(etcd.malformed_records))
    if unreadable:
        have = 'have malformed records' if len(unreadable) > 1 else 'has a malformed record'
        return f'{_format_instances(unreadable, etcd)} {have}. Try: eschedule list'
    for consumer in sorted(consumers):
        others = [other for other in _list_homes(consumer, etcd) if other != compute]
        if others:
            home = f'{etcd.format_instance(consumer)} belongs to compute {etcd.computes.format_name(others[0])}'
            return f'instance {home}, but has a claim on this compute. Fix: destroy that instance'
    return None


def find_leftovers(compute: str, etcd: EtcdState, consumers: Collection[str]) -> Leftovers:
    """Return what to remove with a compute that may be forgotten; `consumers` have allocations there."""
    requests = etcd.requests.get(compute, {})
    stray = {name for name in requests if _is_stray(compute, etcd.records.get(name))}
    # A record is in state destroying only after a tombstone was delivered.
    destroying = {
        name for name, record in etcd.records.items() if record.compute == compute and record.state == DESTROYING
    }
    ended = ({name for name, request in requests.items() if _is_tombstone(request)} - stray) | destroying
    return Leftovers(
        destroyed=tuple(sorted(ended)),
        stray_requests=tuple(sorted({*stray, *etcd.invalid_names.get(compute, ())})),
        orphans=tuple(sorted(set(consumers) - ended)),
    )


def _make_host(compute: str, etcd: EtcdState, provider: ProviderSummary | None) -> Host:
    """Return a compute's line of `eschedule hosts`; the trait that ecompute sets itself disables only a living one."""
    shares = provider.rooms if provider else {}
    has_requests = bool(etcd.requests.get(compute) or etcd.invalid_names.get(compute))
    traits = provider.status_traits if provider else frozenset()
    disabled = status.DISABLED_BY_OPERATOR in traits
    trouble = None
    if compute in etcd.living_computes:
        disabled = disabled or status.DISABLED in traits
        state, trouble = DISABLED if disabled else UP, etcd.troubles.get(compute)
    else:
        state = get_absent_state(shares)
        if state == SILENT and not has_requests and all(each.compute != compute for each in etcd.records.values()):
            state = ORPHANED
    instances = tuple(sorted(list_present(compute, etcd)))
    facts = etcd.computes.living.get(compute, PresenceFacts())
    hostname = etcd.computes.find_hostname(compute)
    return Host(compute, hostname, state, instances, shares, disabled, facts, trouble=trouble)


def get_absent_state(rooms: Mapping[str, Room | Inventory]) -> str:
    """Return CLOSED or SILENT for a compute without presence: a clean stop reserves all VCPU of its provider."""
    return CLOSED if 'VCPU' in rooms and rooms['VCPU'].is_fully_reserved else SILENT


def _is_tombstone(request: Request | InvalidRequest) -> bool:
    """Return True for a valid request to destroy; False for a malformed request."""
    return isinstance(request, Request) and request.is_tombstone


def _is_stray(compute: str, record: Record | None) -> bool:
    """Return True if the compute would drop the request: the instance is gone or elsewhere."""
    return record is not None and (record.compute != compute or record.state == GONE)


def _list_homes(instance: str, etcd: EtcdState) -> Iterator[str]:
    """Yield each compute with a request or tombstone, then that of a live or destroying record, maybe again."""
    yield from (compute for compute, requests in etcd.requests.items() if instance in requests)
    record = etcd.records.get(instance)
    if record is not None and record.state in (*LIVE_STATES, DESTROYING):
        yield record.compute


def _format_instances(instances: list[str], etcd: EtcdState) -> str:
    """Return `instance a` or `instances a, b`; MAX_QUOTED_INSTANCES are named, others counted."""
    text = join_some(list(map(etcd.format_instance, instances)), MAX_QUOTED_INSTANCES)
    return f'instance{"s" if len(instances) > 1 else ""} {text}'
