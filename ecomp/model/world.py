"""Snapshots of etcd and placement, parsed: of the cluster, or of one host's part. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from ecomp.model import host, keys, status
from ecomp.model.allocation import Inventory, Resources
from ecomp.model.group import Group
from ecomp.model.guest import Guest, ReservedAddress
from ecomp.model.order import InvalidRequest, NameOwner, Request, parse_attempt_instances, parse_request
from ecomp.model.queue import QueueEntry, parse_queue_entry
from ecomp.model.quota import Quota
from ecomp.model.record import BEGUN, Record, from_json
from ecomp.model.stack import Stack
from ecomp.model.states import BUILDING, DESTROYING, ERROR, GONE, SCHEDULED
from ecomp.model.stored import decode
from ecomp.model.trouble import parse_trouble

Parsed = TypeVar('Parsed')

AUDITED_PREFIXES = (
    *(keys.ATTEMPTS, keys.QUEUES, keys.HOSTS, keys.INSTANCES, keys.BOOTED, keys.NAMES, keys.COMPUTES),
    # After the requests, which are never delivered before the key of their stack exists.
    *(keys.TROUBLES, keys.HOSTNAMES, keys.FLAVORS, keys.GROUPS, keys.QUOTAS, keys.STACKS),
)


class ProviderState(NamedTuple):
    name: str
    inventory: Mapping[str, Mapping[str, Any]] | None = None  # as in placement's answer; None if not read
    allocations: Mapping[str, Resources] | None = None  # by consumer; None if not read


@dataclass(frozen=True)
class HostFacts:
    guests: Mapping[str, Guest] = field(default_factory=dict)  # domains and disks with our owner mark, by instance
    without_base: Mapping[str, str] = field(default_factory=dict)  # the path of the missing base volume, by instance
    metadata: Mapping[str, str] = field(default_factory=dict)  # {MAC: instance} of the metadata server's files
    seeds: frozenset[str] = frozenset()  # the instances with a NoCloud disk
    reservations: Mapping[str, ReservedAddress] = field(default_factory=dict)  # of DHCP, by MAC
    # {file that no process writes: a mark that changes when it is written}
    parts: Mapping[str, str] = field(default_factory=dict)
    open_dhcp: frozenset[str] = frozenset()  # the networks whose DHCP serves any MAC
    bad_bases: frozenset[str] = frozenset()  # the SHA-256s of base volumes whose content has changed

    def list_instances(self) -> set[str]:
        """Return the instances that have anything on this host."""
        reserved = {each.instance for each in self.reservations.values()}
        return {*self.guests, *self.metadata.values(), *self.seeds, *reserved}


class Planes(NamedTuple):
    """What was read of placement and etcd, and what the host has that checks itself.

    If `compute` checks itself, `etcd` has its own keys and those of other computes about what it has, and `providers`
    has its own provider. Otherwise an audit reads the complete etcd, and the allocations of providers without a living
    compute. Other commands read only the keys and providers that they need.
    """

    providers: Mapping[str, ProviderState]
    etcd: Mapping[str, keys.StoredValue]
    compute: str = ''
    facts: HostFacts = HostFacts()
    mute_reasons: Mapping[str, str] = {}  # why nothing is known of living computes
    usages: Mapping[str, Mapping[str, int]] = {}  # placement's usage by project, as a quota counts it

    def list_consumers(self, compute: str) -> Collection[str]:
        """Return the consumers of a provider, or () if its allocations were not read."""
        provider = self.providers.get(compute)
        return () if provider is None or provider.allocations is None else provider.allocations


class Inhabitants(NamedTuple):
    living: set[str]  # they live or are requested there, also by a malformed request
    destroyed: set[str]  # they have an accepted destroy there
    stray: set[str]  # not carried out: the instance is gone or on another compute, or the name is not a uuid

    @property
    def present(self) -> set[str]:
        return self.living | self.destroyed


class World:
    """The planes, parsed and indexed by instance, compute or name."""

    def __init__(self, planes: Planes, claims: host.ConsumerLookup | None = None) -> None:
        """Parse the planes, and let `claims` decide which of several computes is trusted."""
        self.planes = planes
        self._families: dict[str, dict[str, keys.StoredValue]] = {}
        for key, entry in planes.etcd.items():
            self._families.setdefault(key[: key.find('/', 1) + 1], {})[key] = entry
        self.named_computes = host.parse_computes(self.select_prefix(keys.COMPUTES), self.select_prefix(keys.HOSTNAMES))
        self.living_computes = set(self.named_computes.living)
        # The trusted record of each instance, or the error of a malformed one.
        self.records: dict[str, Record] = {}
        self.records_at: dict[str, dict[str, Record]] = {}
        self.malformed_records: dict[str, str] = {}
        # {instance: {compute: state}}: records of other than the trusted computes, if they say that the instance lives,
        # or if the trusted compute has none.
        self.contradicting_states: dict[str, dict[str, str]] = {}
        self._record_keys: dict[str, str] = {}
        for name, entries in host.group_by_instance(planes.etcd.items()).items():
            entries.mark_claimless(name, claims or planes.list_consumers)
            self._index_records(name, entries)
        # {instance: {compute: request}}, and below {compute: {instance: request}}.
        self.requests_by_compute: dict[str, dict[str, Request | InvalidRequest]] = {}
        self.requests_at: dict[str, dict[str, Request | InvalidRequest]] = {}
        for key, entry in self.select_prefix(keys.HOSTS).items():
            compute, _, name = key.removeprefix(keys.HOSTS).partition('/')
            parsed = self.requests_at.setdefault(compute, {})[name] = parse_request(compute, key, entry.value)
            self.requests_by_compute.setdefault(name, {})[compute] = parsed
        # The owner of each name; None if the value is malformed.
        self.name_owners: dict[str, str | None] = {}
        for name, owner in self._parse_values(NameOwner, keys.NAMES).items():
            self.name_owners[name] = None if isinstance(owner, str) else owner.instance
        # By name. A malformed value is a text, its error.
        self.groups = self._parse_values(Group, keys.GROUPS, 'name')
        self.quotas = self._parse_values(Quota, keys.QUOTAS, 'project')
        self.stacks = self._parse_values(Stack, keys.STACKS, 'name')
        # {instance: {flavor: request}}. A taker key only says that a compute is taking the request.
        self.queue_entries: dict[str, dict[str, QueueEntry | InvalidRequest]] = {}
        # A key without a lease has no owner.
        attempts = [(key, entry.value) for key, entry in self.select_prefix(keys.ATTEMPTS).items() if entry.lease]
        self.attempted = set[str]().union(*(parse_attempt_instances(key, value) for key, value in attempts))
        # Those with an attempt, and those that wait in a queue or are being taken from one.
        self.in_flight = set(self.attempted)
        self._index_queues()
        # They have a presence on a lease, a provider named by their uuid, a request or a trusted record.
        self.computes = self.living_computes | {name for name, each in planes.providers.items() if each.name == name}
        # A request that was removed from its queue before a compute took it has a record without compute.
        self.computes |= self.records_at.keys() - {''}
        self.computes |= self.requests_at.keys()

    def _index_records(self, instance: str, entries: host.EntriesByCompute[keys.StoredValue]) -> None:
        for compute, key in entries.record_keys.items():
            try:
                record = from_json(entries.records[compute].value, instance, keys.parse_record_key(key)[0])
            except ValueError as error:
                if compute == entries.compute:
                    self.malformed_records[instance] = str(error)
                continue
            if compute == entries.compute:
                self.records[instance] = self.records_at.setdefault(compute, {})[instance] = record
            elif record.state not in (GONE, ERROR) or entries.record is None:
                self.contradicting_states.setdefault(instance, {})[compute] = record.state
        self._record_keys[instance] = entries.record_key or keys.record(entries.compute, instance)

    def _index_queues(self) -> None:
        for key, entry in self.select_prefix(keys.QUEUES).items():
            if not key.endswith(keys.TAKER):
                name = keys.get_last_part(key)
                flavor = key.removeprefix(keys.QUEUES).removesuffix(name).rstrip('/')
                self.queue_entries.setdefault(name, {})[flavor] = parse_queue_entry(key, entry.value)
            if entry.lease or not key.endswith(keys.TAKER):
                self.in_flight.add(keys.get_queued_instance(key))

    @cached_property
    def metadata(self) -> Mapping[str, Collection[str]]:
        """The MACs of the metadata files of each instance."""
        return _regroup((name, mac, mac) for mac, name in self.planes.facts.metadata.items())

    @cached_property
    def reservations(self) -> Mapping[str, Mapping[str, str]]:
        """The DHCP reservations, {instance: {MAC: address}}."""
        return _regroup((each.instance, mac, each.address) for mac, each in self.planes.facts.reservations.items())

    @cached_property
    def allocations(self) -> Mapping[str, Mapping[str, Resources]]:
        """The allocations that were read, {consumer: {provider: amounts}}."""
        by_provider = ((name, state.allocations or {}) for name, state in self.planes.providers.items())
        return _regroup((consumer, name, claims[consumer]) for name, claims in by_provider for consumer in claims)

    @cached_property
    def judged(self) -> list[str]:
        """The instances in any plane, sorted, without those in flight or with a malformed value."""
        # Not those that are only in a queue, an attempt, a name or a group.
        instances = {*self.requests_by_compute, *self.records, *self.planes.facts.list_instances()}
        instances |= {keys.get_last_part(key) for key in self.select_prefix(keys.BOOTED)}
        instances |= {name for name, providers in self.allocations.items() if not self.computes.isdisjoint(providers)}
        return sorted(filter(self._is_judged, instances - self.in_flight))

    def _is_judged(self, instance: str) -> bool:
        requests = self.requests_by_compute.get(instance, {}).values()
        return instance not in self.malformed_records and not any(isinstance(each, InvalidRequest) for each in requests)

    @cached_property
    def settled(self) -> list[Record]:
        """The records of the `judged` instances that live and are not being built or destroyed."""
        living = filter(self.is_living, self.judged)
        return [self.records[instance] for instance in living if not self.is_in_work(instance)]

    @cached_property
    def visible_providers(self) -> dict[str, ProviderState]:
        """The providers whose claims are compared: the host's own, or those of no living compute."""
        own, providers = self.planes.compute, self.planes.providers
        visible = {own} if own else providers.keys() - self.living_computes
        return {name: each for name, each in providers.items() if name in visible and each.allocations is not None}

    def list_live_requests(self, instance: str) -> dict[str, Request]:
        """Return {compute: request} of the valid requests that are no tombstones."""
        requests = self.requests_by_compute.get(instance, {})
        return {name: each for name, each in requests.items() if isinstance(each, Request) and not each.is_tombstone}

    def get_value(self, key: str) -> keys.StoredValue | None:
        return self.planes.etcd.get(key)

    def get_record_key(self, instance: str) -> str:
        return self._record_keys.get(instance) or keys.record('', instance)

    def list_request_keys(self, instance: str) -> tuple[str, ...]:
        return tuple(keys.request(compute, instance) for compute in sorted(self.requests_by_compute.get(instance, {})))

    def list_instance_keys(self, instance: str) -> tuple[str, ...]:
        """Return the keys of the instance's record, whether or not it exists, and of its requests."""
        return self.get_record_key(instance), *self.list_request_keys(instance)

    def get_revision(self, key: str) -> int:
        return entry.revision if (entry := self.get_value(key)) is not None else 0

    def list_names(self, instance: str) -> set[str]:
        """Return the names in an instance's requests and queues or, if there are none, its record."""
        requests = self.requests_by_compute.get(instance, {}).values()
        record = self.records.get(instance)
        entries = self.queue_entries.get(instance, {}).values()
        labels = {entry.name for entry in (*requests, *entries) if not isinstance(entry, InvalidRequest)}
        labels -= {None}
        return {name for name in labels or {record.name if record else None} if name}

    def format_instance(self, instance: str) -> str:
        """Return the name of an instance, or its uuid if it has no name."""
        known = [self.records.get(instance), *self.requests_by_compute.get(instance, {}).values()]
        names = (each.name for each in known if each is not None and not isinstance(each, InvalidRequest))
        return next(filter(None, names), instance)

    def find_inhabitants(self, compute: str) -> Inhabitants:
        """Classify the instances with a request or record on a compute, which may be absent."""
        requests, records = self.requests_at.get(compute, {}), self.records_at.get(compute, {})
        tombstones = {name for name, each in requests.items() if isinstance(each, Request) and each.is_tombstone}
        there = {name for name, record in records.items() if record.state != GONE}
        stray = {name for name in requests if not keys.is_uuid(name) or (name in self.records and name not in there)}
        recorded = {name for name, record in records.items() if record.state in host.LIVE_STATES}
        # A record is in state destroying only after a tombstone was delivered.
        destroying = {name for name, record in records.items() if record.state == DESTROYING}
        living = (requests.keys() - tombstones - stray) | (recorded - requests.keys())
        return Inhabitants(living, (tombstones - stray) | destroying, stray)

    def is_living(self, instance: str) -> bool:
        return instance in self.records and self.records[instance].state not in (GONE, ERROR)

    def is_in_work(self, instance: str) -> bool:
        """Return whether an instance is being built, rebuilt or destroyed."""
        record, requests = self.records.get(instance), self.requests_by_compute.get(instance, {}).values()
        if any(isinstance(parsed, Request) and parsed.is_tombstone for parsed in requests):
            return record is None or record.state not in (GONE, ERROR)
        is_rebuilding = record is not None and (record.rebuilt or '').endswith(BEGUN)
        return is_rebuilding or (record is not None and record.state in (SCHEDULED, BUILDING, DESTROYING))

    def is_switching(self, instance: str) -> bool:
        """Return whether a recorded instance has not completed a requested power action."""
        record, requests = self.records.get(instance), self.requests_by_compute.get(instance, {}).values()
        actions = [parsed.power for parsed in requests if isinstance(parsed, Request) and parsed.power]
        return record is not None and any(not power.is_done(record.power) for power in actions)

    @cached_property
    def absent_computes(self) -> dict[str, str]:
        """{compute: CLOSED or SILENT} of the computes without a presence that were not forgotten."""
        living = {each.compute for each in self.records.values() if self.is_living(each.instance)}
        # Only records of finished instances remain of a compute that was forgotten.
        forgotten = self.records_at.keys() - living - self.requests_at.keys() - self.planes.providers.keys()
        return {each: self._get_absent_state(each) for each in sorted(self.computes - self.living_computes - forgotten)}

    def _get_absent_state(self, compute: str) -> str:
        provider = self.planes.providers.get(compute)
        vcpu = (provider.inventory or {}).get('VCPU') if provider else None
        return host.get_absent_state({'VCPU': Inventory(vcpu.get('total', 0), vcpu.get('reserved', 0))} if vcpu else {})

    def _parse_values(self, kind: type[Parsed], prefix: str, *name_fields: str) -> dict[str, Parsed | str]:
        """Return the values below a prefix by name, with its error in place of a malformed one."""
        values: dict[str, Parsed | str] = {}
        for key, entry in self.select_prefix(prefix).items():
            name = key.removeprefix(prefix)
            try:
                values[name] = decode(kind, entry.value, **dict.fromkeys(name_fields, name))
            except ValueError as error:
                values[name] = str(error)
        return values

    def select_prefix(self, prefix: str) -> Mapping[str, keys.StoredValue]:
        """Return the keys below one of the AUDITED_PREFIXES, with their values."""
        return self._families.get(prefix, {})


def _regroup(rows: Iterable[tuple[str, str, Parsed]]) -> dict[str, dict[str, Parsed]]:
    grouped: dict[str, dict[str, Parsed]] = {}
    for name, key, value in rows:
        grouped.setdefault(name, {})[key] = value
    return grouped


def list_hosts(world: World, providers: Mapping[str, host.ProviderSummary]) -> list[host.Host]:
    """List, by host name, the computes that live, are in use, or have a provider of ours."""
    uuids = {*world.living_computes, *world.requests_at}
    uuids |= {each.compute for each in world.records.values() if each.state in host.LIVE_STATES}
    uuids |= {uuid for uuid, each in providers.items() if host.is_ours(uuid, each.name, each.rooms)}
    listed = [_make_host(compute, world, providers.get(compute)) for compute in uuids if keys.is_uuid(compute)]
    return sorted(listed, key=lambda each: (each.hostname is None, each.hostname or '', each.compute))


def _make_host(compute: str, world: World, provider: host.ProviderSummary | None) -> host.Host:
    rooms = provider.rooms if provider else {}
    traits = provider.status_traits if provider else frozenset()
    disabled, trouble = status.DISABLED_BY_OPERATOR in traits, None
    if compute in world.living_computes:
        # ecompute sets this trait itself when it stops, so it disables only a living compute.
        disabled = disabled or status.DISABLED in traits
        entry = world.get_value(keys.troubles(compute))
        state = host.DISABLED if disabled else host.UP
        trouble = parse_trouble(entry.value) if entry and entry.lease else None
    else:
        state = host.get_absent_state(rooms)
        if state == host.SILENT and compute not in world.requests_at and compute not in world.records_at:
            state = host.ORPHANED
    instances = tuple(sorted(world.find_inhabitants(compute).present))
    facts = world.named_computes.living.get(compute, host.PresenceFacts())
    hostname = world.named_computes.find_hostname(compute)
    return host.Host(compute, hostname, state, instances, rooms, disabled, facts, trouble=trouble)


def index_revisions(etcd: Mapping[str, keys.StoredValue]) -> dict[str, dict[str, int]]:
    """Return {subject: {key: revision}}, where the subject is an instance, compute or project."""
    revisions: dict[str, dict[str, int]] = {}
    for key, entry in etcd.items():
        # If the last part of a key is another name, such as a group's, the key is about that name.
        subjects = {keys.get_queued_instance(key) if key.startswith(keys.QUEUES) else keys.get_last_part(key)}
        if key.startswith(keys.ATTEMPTS):
            subjects = parse_attempt_instances(key, entry.value)
        elif key.startswith(keys.QUOTAS):
            subjects = {key.removeprefix(keys.QUOTAS)}
        for subject in subjects:
            # The same lease means the same process, however often the hint in its presence changes.
            revisions.setdefault(subject, {})[key] = entry.lease if key.startswith(keys.COMPUTES) else entry.revision
    return revisions
