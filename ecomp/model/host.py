"""Computes: their names, signs of life, and which one is trusted to have an instance. Pure.

The name of a compute's host is in its presence and, until it is forgotten, in the key /hostnames/<compute>.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from ecomp.errors import Problem
from ecomp.model import keys
from ecomp.model.allocation import Inventory, Room
from ecomp.model.parsers import FLAG, NONEMPTY, check, list_of, number, text
from ecomp.model.states import ACTIVE, BUILDING, SCHEDULED, STOPPED
from ecomp.model.stored import decode_lenient, lenient, stored
from ecomp.model.text import format_time, join_some, make_printable, replace_uuids
from ecomp.model.trouble import Trouble

# Returns the consumers that hold a claim on the compute with this uuid.
ConsumerLookup = Callable[[str], Container[str]]
Kind = TypeVar('Kind', bound=keys.StoredValue)


# Several computes may have keys of one instance: written manually, or by a compute that writes keys of others.
@dataclass
class EntriesByCompute(Generic[Kind]):
    """The requests and records of one instance by compute, and the compute that is trusted.

    The trusted compute has the oldest request that is not `claimless`, or the oldest request if all are. Without a
    request, it has the oldest record. `request`, `record` and `record_key` are those of the trusted compute.
    """

    requests: dict[str, Kind] = field(default_factory=dict)
    records: dict[str, Kind] = field(default_factory=dict)  # with '' for a record whose key names no compute
    record_keys: dict[str, str] = field(default_factory=dict)
    claimless: set[str] = field(default_factory=set)  # found by mark_claimless() without the claim

    def mark_claimless(self, instance: str, consumer_lookup: ConsumerLookup) -> None:
        """Look for the claim on each requested compute in turn, and note those without it."""
        if len(self.requests) < 2:
            return
        for compute in sorted(self.requests, key=self._make_age_key):
            # Other text from a key is not a compute, and would become part of a URL path.
            if keys.is_uuid(compute) and instance in consumer_lookup(compute):
                return
            self.claimless.add(compute)

    @property
    def compute(self) -> str:
        """The trusted compute, or '' if neither a request nor a record names one."""
        # Age alone does not suffice: the uuid is public before delivery, so the oldest request may be a false one.
        claimants = [compute for compute in self.requests if compute not in self.claimless]
        return min(claimants or self.requests or self.records, key=self._make_age_key, default='')

    def _make_age_key(self, compute: str) -> tuple[int, str]:
        return (self.requests or self.records)[compute].create_revision, compute

    @property
    def request(self) -> Kind | None:
        return self.requests.get(self.compute)

    @property
    def record(self) -> Kind | None:
        return self.records.get(self.compute)

    @property
    def record_key(self) -> str | None:
        return self.record_keys.get(self.compute)


def group_by_instance(pairs: Iterable[tuple[str, Kind]]) -> dict[str, EntriesByCompute[Kind]]:
    """Group the requests and records among these keys by instance."""
    by_uuid: dict[str, EntriesByCompute[Kind]] = {}
    for key, value in pairs:
        if key.startswith(keys.HOSTS):
            compute, _, instance = key.removeprefix(keys.HOSTS).partition('/')
            by_uuid.setdefault(instance, EntriesByCompute()).requests[compute] = value
        elif key.startswith(keys.INSTANCES):
            compute, instance = keys.parse_record_key(key)
            entries = by_uuid.setdefault(instance, EntriesByCompute())
            entries.records[compute], entries.record_keys[compute] = value, key
    return by_uuid


# A version or kind is cut off after this many characters.
MAX_SHOWN_CHARACTERS = 64

_VERSION_PATTERN = '[0-9A-Za-z.+!-]*'
_HOSTNAME_PATTERN = '[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}'


def is_hostname(text: object) -> bool:
    """Return whether a value is a valid host name, and not a uuid with or without dashes."""
    if not isinstance(text, str) or not re.fullmatch(_HOSTNAME_PATTERN, text):
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
_SHORT = text(lambda raw: NONEMPTY(raw)[:MAX_SHOWN_CHARACTERS])
# Doctor prints the version in a command for the user to copy, so only harmless characters are accepted.
_VERSION = check('a version', partial(re.fullmatch, _VERSION_PATTERN))
_LEASES = list_of(number(0, 2**63 - 1), lengths=(2,))


@stored(
    hostname=_HOSTNAME, version=lenient(lambda raw: _VERSION(_SHORT(raw))), kind=lenient(_SHORT), queues=lenient(FLAG)
)
class PresenceFacts(NamedTuple):
    """The content of a presence, with None for absent or malformed fields."""

    hostname: str | None = None
    version: str | None = None
    kind: str | None = None  # kvm, qemu or fake
    queues: bool | None = None  # True if it takes requests from queues


@stored(1, 'host name', hostname=_HOSTNAME, leases=lenient(_LEASES, is_sparse=True))
class StoredHostname(NamedTuple):
    """The value of a key below /hostnames/, with defaults for malformed fields."""

    hostname: str | None = None
    leases: tuple[int, ...] = ()


class ComputeNames(Protocol):
    """The names of computes, for code that runs even if etcd could not be read."""

    def find_hostname(self, compute: str) -> str | None: ...
    def format_name(self, compute: str) -> str: ...


@dataclass(frozen=True)
class Computes:
    """All computes with a presence (`living`) or a stored host name in etcd."""

    living: Mapping[str, PresenceFacts] = field(default_factory=dict)
    stored_hostnames: Mapping[str, str] = field(default_factory=dict)

    def find_hostname(self, compute: str) -> str | None:
        return self._hostnames.get(compute)

    def format_name(self, compute: str) -> str:
        """Return the host name, with ` (uuid)` if it is not unique, or the uuid if it is unknown."""
        host = self.find_hostname(compute)
        if host is None:
            return compute
        return host if len(self.find_by_hostname(host)) == 1 else f'{host} ({compute})'

    def find_by_hostname(self, hostname: str) -> list[str]:
        # A single living one is not preferred: a compute may publish the name of a silent one.
        return self._by_hostname.get(hostname, [])

    @property
    def takers(self) -> list[str]:
        return sorted(compute for compute, presence in self.living.items() if presence.queues)

    @property
    def no_taker_reason(self) -> Problem | None:
        """The problem that no living compute has `queues: True`, or None if one has."""
        if self.takers:
            return None
        cure = 'set `queues: True` in the compute.yaml of a host, and restart its ecompute'
        return Problem('no compute takes queued requests', cure)

    def describe_unserved(self, names: Sequence[str]) -> Problem | None:
        """Return the problem that no compute takes these queued instances, or None if one does."""
        reason = self.no_taker_reason
        if not names or reason is None:
            return None
        waiting = make_printable(f'{join_some(names, 1)} wait{"s" if len(names) == 1 else ""} in a queue')
        return reason._replace(what=f'{waiting}, but {reason.what}')

    def replace_uuids(self, text: str) -> str:
        return replace_uuids(text, self.display_names)

    @cached_property
    def display_names(self) -> dict[str, str]:
        return {compute: self.format_name(compute) for compute in self._hostnames}

    @cached_property
    def _hostnames(self) -> dict[str, str]:
        published = {compute: facts.hostname for compute, facts in self.living.items() if facts.hostname is not None}
        return {**self.stored_hostnames, **published}

    @cached_property
    def _by_hostname(self) -> dict[str, list[str]]:
        by_hostname: dict[str, list[str]] = {}
        for compute, host in sorted(self._hostnames.items()):
            by_hostname.setdefault(host, []).append(compute)
        return by_hostname


# No names known: every compute is shown by its uuid. For code that has not read etcd it is a ComputeNames only, because
# as Computes it would claim that no compute takes from queues.
NO_COMPUTES = Computes()


# The `leases` of a compute are two leases without keys, whose ages show when the host was last alive. ecompute renews
# the first one every 10 s, and never the second one, the anchor. etcd resets both when it starts, is restored or elects
# a leader. Then their ages are equal, and show no time until the first one is renewed.
#
# Seconds by which the anchor's age has to exceed the other lease's, because etcd spreads the reset of more than 1,000
# leases, by a second for each 750 (lessor.Promote).
LIFE_MARGIN_SECONDS = 60


def find_last_seen(ages: Sequence[int | None], now: datetime) -> str | None:
    """Return when a host was last alive, by the ages of its life lease and its anchor, or None."""
    age, anchor_age = ages
    # A leader that has just been elected may report a negative age.
    if age is None or age < 0 or anchor_age is None or anchor_age - age < LIFE_MARGIN_SECONDS:
        return None
    return format_time((now - timedelta(seconds=age)).replace(microsecond=0))


def describe_silence(last_seen: str | None, today: str) -> str:
    """Return `silent since 16:35:54`, with the date unless it is `today`, or only `silent`."""
    since = f' since {last_seen[:10]} {last_seen[11:19]}'.replace(f' {today} ', ' ') if last_seen else ''
    return SILENT + since


def parse_computes(presences: Mapping[str, keys.StoredValue], hostnames: Mapping[str, keys.StoredValue]) -> Computes:
    """Parse the presences that have a lease, and the valid host names."""
    by_uuid = {
        keys.get_last_part(key): decode_lenient(StoredHostname, each.value).hostname for key, each in hostnames.items()
    }
    living = {key: each.value for key, each in presences.items() if each.lease}
    return Computes(
        {keys.get_last_part(key): decode_lenient(PresenceFacts, value) for key, value in living.items()},
        {compute: hostname for compute, hostname in by_uuid.items() if hostname is not None and keys.is_uuid(compute)},
    )


def describe_silent_fix(host: str, alternative: str = ', or use another uuid') -> str:
    """Return the fix for a silent compute with claims, named as Computes.format_name() does."""
    argument = host.rpartition('(')[2].rstrip(')')  # the uuid of `name (uuid)`
    start = f'wait, or start ecompute on {host} (after a restore of etcd: `ecompute --accept-new-etcd`){alternative}'
    return f'{start}; if the machine never comes back: `eschedule host forget {argument} --fenced`'


def list_unproven(
    providers: Mapping[str, str],
    presences: Mapping[str, keys.StoredValue],
    start_revision: int,
    have_leases_expired: bool,
) -> list[str]:
    """List the computes among `providers`, {uuid: name}, that are not proven alive in this etcd."""
    # A restored etcd has old presences again, with full leases. So a presence is proof only if it was written after
    # `start_revision`, etcd's revision when this process started, or if all leases of that time have expired.
    last_unproven = -1 if have_leases_expired else start_revision
    proven = [key for key, entry in presences.items() if entry.lease and entry.revision > last_unproven]
    alive = set(map(keys.get_last_part, proven))
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


class ProviderSummary(NamedTuple):
    name: str
    rooms: Mapping[str, Room] = {}
    status_traits: frozenset[str] = frozenset()  # those of STATUS_TRAITS that it has


def is_ours(uuid: str, name: str, classes: Collection[str]) -> bool:
    """Return whether a provider is a compute that an ecompute registered."""
    # nova names its computes by host name, a storage pool has no VCPU, and ecompute registers without inventory.
    return name == uuid and (not classes or 'VCPU' in classes)


class Host(NamedTuple):
    """A line of `eschedule hosts`."""

    compute: str
    hostname: str | None
    state: str  # UP to ORPHANED
    instances: Collection[str]  # those present there, see Inhabitants
    rooms: Mapping[str, Room]
    is_disabled: bool = False
    facts: PresenceFacts = PresenceFacts()
    last_seen: str | None = None  # None unless it is silent and its last sign of life is known
    trouble: Trouble | None = None


def get_absent_state(rooms: Mapping[str, Room | Inventory]) -> str:
    """Return CLOSED if all VCPU is reserved, as by a clean stop of the compute, else SILENT."""
    return CLOSED if 'VCPU' in rooms and rooms['VCPU'].is_fully_reserved else SILENT
