"""The state that an audit reads from placement, etcd and computes; digests as JSON. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from ecomp.model import keys
from ecomp.model.allocation import MAX_AMOUNT, Resources
from ecomp.model.group import Group
from ecomp.model.guest import Guest
from ecomp.model.host import CLOSED, SILENT, group_by_instance, parse_computes
from ecomp.model.json_object import dump
from ecomp.model.order import InvalidRequest, NameOwner, Request, parse_attempt_instances, parse_request
from ecomp.model.parsers import OBJECT, TEXT, check, dict_of, format_reason, list_of, number
from ecomp.model.queue import QueueEntry, parse_queue_entry
from ecomp.model.quota import Quota
from ecomp.model.record import BUILDING, DESTROYING, ERROR, GONE, SCHEDULED, Record, from_json
from ecomp.model.stack import Stack
from ecomp.model.stored import decode, nested, optional, stored, to_dict

Parsed = TypeVar('Parsed')

AUDITED_PREFIXES = (
    *(keys.ATTEMPTS, keys.QUEUES, keys.HOSTS, keys.INSTANCES, keys.BOOTED, keys.NAMES, keys.COMPUTES),
    # After the requests, which are never delivered before the key of their stack exists.
    *(keys.TROUBLES, keys.HOSTNAMES, keys.FLAVORS, keys.GROUPS, keys.QUOTAS, keys.STACKS),
)


class ProviderState(NamedTuple):
    """A resource provider: inventory as in placement's answer, and allocations by consumer."""

    name: str
    inventory: Mapping[str, Mapping[str, Any]] = {}
    allocations: Mapping[str, Resources] = {}


class Planes(NamedTuple):
    """The state that an audit read: providers, keys of etcd, and digests of computes.

    `mute_reasons` says for each living compute without digest why; `stalled` are those of them that acknowledged the
    audit. `usages` has placement's usage, as a quota counts it, for each project with a quota.
    """

    providers: Mapping[str, ProviderState]
    etcd: Mapping[str, keys.StoredValue]
    digests: Mapping[str, Digest]
    mute_reasons: Mapping[str, str] = {}
    usages: Mapping[str, Mapping[str, int]] = {}
    stalled: frozenset[str] = frozenset()

    def list_consumers(self, compute: str) -> Container[str]:
        """Return the consumers with allocations on a provider; () if it is unknown."""
        provider = self.providers.get(compute)
        return () if provider is None else provider.allocations


class AuditIndex:
    """The planes, parsed and indexed by instance; malformed values are kept as such.

    By instance: `records` (the trusted one) or `malformed_records` (error), `requests_by_compute` {compute: request},
    `guests` {compute: guest}, `metadata` {compute: MACs}, `seeds` (computes), `reservations` {compute: {MAC: address}},
    `allocations` {provider: resources}. `groups`, `quotas` and `stacks` by name have the error, a text, for a malformed
    value.
    `in_flight` are instances that wait in a queue or, by a key on a lease, are being taken or have an attempt.
    `computes` have a presence on a lease, a provider named by its uuid, a request or a trusted record.
    """

    def __init__(self, planes: Planes) -> None:
        self.planes = planes
        self.living_computes = {
            keys.get_last_part(key) for key, entry in self.select_prefix(keys.COMPUTES).items() if entry.lease
        }
        self.named_computes = parse_computes(self.select_prefix(keys.COMPUTES), self.select_prefix(keys.HOSTNAMES))
        self.records: dict[str, Record] = {}
        self.malformed_records: dict[str, str] = {}
        # {instance: {compute: state}}: records of other than the trusted computes, if they say that the instance lives,
        # or if the trusted compute has none.
        self.contradicting_states: dict[str, dict[str, str]] = {}
        self._record_keys: dict[str, str] = {}
        for name, entries in group_by_instance(planes.etcd.items()).items():
            entries.mark_claimless(name, planes.list_consumers)
            for compute, key in entries.record_keys.items():
                try:
                    record = from_json(planes.etcd[key].value, name, keys.parse_record_key(key)[0])
                except ValueError as error:
                    if compute == entries.compute:
                        self.malformed_records[name] = str(error)
                    continue
                if compute == entries.compute:
                    self.records[name] = record
                elif record.state not in (GONE, ERROR) or entries.record is None:
                    self.contradicting_states.setdefault(name, {})[compute] = record.state
            self._record_keys[name] = entries.record_key or keys.record(entries.compute, name)
        self.requests_by_compute: dict[str, dict[str, Request | InvalidRequest]] = {}
        for key, entry in self.select_prefix(keys.HOSTS).items():
            compute, _, name = key.removeprefix(keys.HOSTS).partition('/')
            self.requests_by_compute.setdefault(name, {})[compute] = parse_request(compute, key, entry.value)
        # The owner of each name; None if the value is malformed.
        self.name_owners: dict[str, str | None] = {}
        for name, owner in self._parse_values(NameOwner, keys.NAMES).items():
            self.name_owners[name] = None if isinstance(owner, str) else owner.instance
        self.groups = self._parse_values(Group, keys.GROUPS, 'name')
        self.quotas = self._parse_values(Quota, keys.QUOTAS, 'project')
        self.stacks = self._parse_values(Stack, keys.STACKS, 'name')
        # {instance: {flavor: request}}. A taker key only says that a compute is taking the request.
        self.queue_entries: dict[str, dict[str, QueueEntry | InvalidRequest]] = {}
        self.in_flight: set[str] = set()
        for key, entry in self.select_prefix(keys.QUEUES).items():
            if not key.endswith(keys.TAKER):
                name = keys.get_last_part(key)
                flavor = key.removeprefix(keys.QUEUES).removesuffix(name).rstrip('/')
                self.queue_entries.setdefault(name, {})[flavor] = parse_queue_entry(key, entry.value)
            if entry.lease or not key.endswith(keys.TAKER):
                self.in_flight.add(keys.get_queued_instance(key))
        for key, entry in self.select_prefix(keys.ATTEMPTS).items():
            if entry.lease:
                self.in_flight |= parse_attempt_instances(key, entry.value)
        self.computes = self.living_computes | {name for name, each in planes.providers.items() if each.name == name}
        # A request that was removed from its queue before a compute took it has a record without compute.
        self.computes |= {each.compute for each in self.records.values()} - {''}
        self.computes |= {compute for by_compute in self.requests_by_compute.values() for compute in by_compute}
        self.guests: dict[str, dict[str, Guest]] = {}
        self.metadata: dict[str, dict[str, list[str]]] = {}
        self.seeds: dict[str, set[str]] = {}
        self.reservations: dict[str, dict[str, dict[str, str]]] = {}
        for compute, digest in planes.digests.items():
            for name, guest in digest.guests.items():
                self.guests.setdefault(name, {})[compute] = guest
            for mac, name in digest.metadata.items():
                self.metadata.setdefault(name, {}).setdefault(compute, []).append(mac)
            for name in digest.seeds:
                self.seeds.setdefault(name, set()).add(compute)
            for mac, reservation in digest.reservations.items():
                name, _, address = reservation.partition(' ')
                self.reservations.setdefault(name, {}).setdefault(compute, {})[mac] = address
        self.allocations: dict[str, dict[str, Resources]] = {}
        for provider, each in planes.providers.items():
            for consumer, resources in each.allocations.items():
                self.allocations.setdefault(consumer, {})[provider] = resources

    def list_instances(self) -> list[str]:
        """Return the instances in any plane, and the consumers with a claim on a compute, sorted.

        Those only in a queue, or only in an attempt, a name or a group, are left out.
        """
        instances = {*self.requests_by_compute, *self.records, *self.malformed_records, *self.guests}
        instances |= {*self.metadata, *self.seeds, *self.reservations}
        instances |= {keys.get_last_part(key) for key in self.select_prefix(keys.BOOTED)}
        instances |= {
            consumer for consumer, providers in self.allocations.items() if not self.computes.isdisjoint(providers)
        }
        return sorted(instances)

    def get_value(self, key: str) -> keys.StoredValue | None:
        return self.planes.etcd.get(key)

    def get_record_key(self, instance: str) -> str:
        """Return the key that the trusted record has or would have."""
        return self._record_keys.get(instance) or keys.record('', instance)

    def list_request_keys(self, instance: str) -> tuple[str, ...]:
        """Return the keys of all requests for an instance, also if several computes are asked."""
        return tuple(keys.request(compute, instance) for compute in sorted(self.requests_by_compute.get(instance, {})))

    def list_instance_keys(self, instance: str) -> tuple[str, ...]:
        """Return the keys of the instance's record, whether or not it exists, and of its requests."""
        return self.get_record_key(instance), *self.list_request_keys(instance)

    def get_revision(self, key: str) -> int:
        """Return the revision of a key, or 0 if it does not exist."""
        entry = self.get_value(key)
        return entry.revision if entry is not None else 0

    def list_names(self, instance: str) -> set[str]:
        """Return the names in the record, requests and queues."""
        requests = self.requests_by_compute.get(instance, {}).values()
        record = self.records.get(instance)
        entries = self.queue_entries.get(instance, {}).values()
        labels = {entry.name for entry in (*requests, *entries) if not isinstance(entry, InvalidRequest)}
        labels.add(record.name if record else None)
        return {name for name in labels if name}

    def describe_unserved(self) -> str | None:
        """Return one line that no compute takes what is queued; None if one may or nothing waits."""
        return self.named_computes.describe_unserved(
            [min(self.list_names(each), default=each) for each in sorted(self.queue_entries)]
        )

    def is_living(self, instance: str) -> bool:
        """Return whether the record is well-formed and in a state other than gone and error."""
        return instance in self.records and self.records[instance].state not in (GONE, ERROR)

    def is_in_work(self, instance: str) -> bool:
        """Return whether it is being built or destroyed; a tombstone means so unless the record is gone or in error."""
        record, requests = self.records.get(instance), self.requests_by_compute.get(instance, {}).values()
        if any(isinstance(parsed, Request) and parsed.is_tombstone for parsed in requests):
            return record is None or record.state not in (GONE, ERROR)
        return record is not None and record.state in (SCHEDULED, BUILDING, DESTROYING)

    def is_switching(self, instance: str) -> bool:
        """Return whether the instance has a record in which a requested power action is not completed."""
        record, requests = self.records.get(instance), self.requests_by_compute.get(instance, {}).values()
        actions = [parsed.power for parsed in requests if isinstance(parsed, Request) and parsed.power]
        return record is not None and any(not power.is_done(record.power) for power in actions)

    def list_absent_computes(self) -> dict[str, str]:
        """Return {compute: CLOSED or SILENT} of the computes without presence, which cannot be audited.

        A compute of which only records of ended instances remain was forgotten and is left out.
        """
        ended = {each.compute for each in self.records.values()}
        living = {each.compute for each in self.records.values() if self.is_living(each.instance)}
        requested = {compute for requested in self.requests_by_compute.values() for compute in requested}
        forgotten = ended - living - requested - self.planes.providers.keys()
        return {each: self._get_absent_state(each) for each in sorted(self.computes - self.living_computes - forgotten)}

    def _get_absent_state(self, compute: str) -> str:
        """Return CLOSED if all VCPU of the compute's provider is reserved, else SILENT."""
        provider = self.planes.providers.get(compute)
        vcpu = provider.inventory.get('VCPU') if provider else None
        return CLOSED if vcpu and vcpu.get('reserved', 0) >= vcpu.get('total', 0) else SILENT

    def _parse_values(self, kind: type[Parsed], prefix: str, *name_fields: str) -> dict[str, Parsed | str]:
        """Return {name: parsed value, or the reason why it is malformed} of keys below a prefix."""
        values: dict[str, Parsed | str] = {}
        for key, entry in self.select_prefix(prefix).items():
            name = key.removeprefix(prefix)
            try:
                values[name] = decode(kind, entry.value, **dict.fromkeys(name_fields, name))
            except ValueError as error:
                values[name] = str(error)
        return values

    def select_prefix(self, prefix: str) -> dict[str, keys.StoredValue]:
        """Return the keys below a prefix, with their values."""
        return {key: entry for key, entry in self.planes.etcd.items() if key.startswith(prefix)}


def index_revisions(etcd: Mapping[str, keys.StoredValue]) -> dict[str, dict[str, int]]:
    """Return {instance, compute or project: {key: revision}} of the keys about each.

    If the last part of a key is another name, such as a group's, the key is about that name. A presence has its lease
    instead of its revision: the same lease means the same process, however often its hint changes.
    """
    revisions: dict[str, dict[str, int]] = {}
    for key, entry in etcd.items():
        subjects: Iterable[str] = {
            keys.get_queued_instance(key) if key.startswith(keys.QUEUES) else keys.get_last_part(key)
        }
        if key.startswith(keys.ATTEMPTS):
            subjects = parse_attempt_instances(key, entry.value)
        elif key.startswith(keys.QUOTAS):
            subjects = {key.removeprefix(keys.QUOTAS)}
        for subject in subjects:
            revisions.setdefault(subject, {})[key] = entry.lease if key.startswith(keys.COMPUTES) else entry.revision
    return revisions


# The next page begins after so many bytes: one more entry must fit into the 1.5 MiB that etcd takes.
PAGE_BYTES = 400 * 1024

# {dictionary field of a digest: its name in JSON}
_JSON_NAMES = {
    **{'without_base': 'without_base', 'metadata': 'seeds', 'seeds': 'isos'},
    **{name: name for name in ('reservations', 'parts', 'open_dhcp', 'bad_bases')},
}


@dataclass(frozen=True)
class Digest:
    """Everything that one compute has. `guests` are domains and disks with our owner mark.

    `guests` is by instance. `without_base` is {instance: path of its missing base volume}; `metadata` {MAC: instance}
    of the metadata server's files; `seeds` the instances with a NoCloud disk; `reservations` {MAC: 'instance address'}
    of DHCP; `parts` {file that no process writes: a mark that changes when it is written}; `open_dhcp` the networks
    whose DHCP serves any MAC; `bad_bases` the SHA-256s of base volumes whose content has changed.
    """

    guests: Mapping[str, Guest] = field(default_factory=dict)
    without_base: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, str] = field(default_factory=dict)
    reservations: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    open_dhcp: Mapping[str, str] = field(default_factory=dict)
    bad_bases: Mapping[str, str] = field(default_factory=dict)


_SIZE = dict_of(check('a whole number', lambda value: isinstance(value, int)))


def _parse_condition(data: Any) -> dict[str, Any]:
    condition = OBJECT(data)
    return {'trouble': TEXT(condition.get('trouble', '')), 'size': _SIZE(condition.get('size', {}))}


@stored(
    *(1, 'digest'),
    pages=optional(number(1, MAX_AMOUNT)),
    error=optional(TEXT),
    guests=optional(lambda data: {guest.instance: guest for guest in list_of(nested(Guest))(data)}),
    # The oldest supported release refuses unknown fields of a guest, so its condition is not among these.
    conditions=optional(dict_of(_parse_condition)),
    **{name: optional(dict_of(TEXT), name=json_name) for name, json_name in _JSON_NAMES.items()},
)
@dataclass(frozen=True)
class Page(Digest):
    """A page of a digest, of which the first has the number of pages."""

    pages: int = 0
    error: str = ''
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@stored(kind=TEXT, name=TEXT, mark=TEXT)
@dataclass(frozen=True)
class Leftover:
    """Something that a compute is asked to remove.

    `kind` is `disk`, `iso` (NoCloud disk) or `reservations` of an instance, `seed` (metadata of a MAC) or `part`.
    `mark` is the digest's value for metadata (the instance) or a part; the compute keeps what has another value now.
    """

    kind: str
    name: str
    mark: str = ''


@stored(1, 'clearance', leftovers=list_of(nested(Leftover)))
class Clearance(NamedTuple):
    """The value of /audit/<audit>/<compute>."""

    leftovers: Sequence[Leftover]


# A compute's answer to a clearance is a list with a line about each leftover.
parse_answer = list_of(TEXT)


def to_pages(digest: Digest) -> list[str]:
    """Return the values of a digest's pages, /digests/<compute>/<audit>/<page>.

    Each page fits into an etcd value. The caller must write page 0, with the number of pages, last.
    """
    pages: list[dict[str, Any]] = []
    size = PAGE_BYTES
    for name, key, value, length in _list_entries(digest):
        if size + length > PAGE_BYTES:
            pages.append({'version': 1, 'guests': [], **{json_name: {} for json_name in _JSON_NAMES.values()}})
            size = 0
        size += length
        if name == 'guests':
            pages[-1][name].append(value)
        else:
            pages[-1].setdefault(name, {})[key] = value
    pages = pages or [{'version': 1}]
    pages[0]['pages'] = len(pages)
    return [dump(page) for page in pages]


def make_error_page(reason: str) -> str:
    """Return the value of page 0 of a compute that gives no digest."""
    return dump({'version': 1, 'pages': 1, 'error': reason})


def from_pages(values: Sequence[bytes]) -> Digest:
    """Parse a digest from its pages in order; ValueError if malformed, incomplete or an error (page 0's text)."""
    pages = [decode(Page, page_value) for page_value in values]
    if not pages:
        raise ValueError('its answer has no pages')
    if pages[0].error:
        raise ValueError(format_reason(pages[0].error))
    if pages[0].pages != len(pages):
        raise ValueError(f'its answer has {len(pages)} of {pages[0].pages} announced pages')
    merged = {
        name: {key: value for page in pages for key, value in getattr(page, name).items()}
        for name in ('guests', 'conditions', *_JSON_NAMES)
    }
    conditions = merged.pop('conditions')
    guests = {name: replace(guest, **conditions.get(name, {})) for name, guest in merged.pop('guests').items()}
    return Digest(guests, **merged)


def _list_entries(digest: Digest) -> Iterator[tuple[str, str, Any, int]]:
    """Yield (name in JSON, key, value, length in JSON) of each entry; of guests the key is ''."""
    for guest in digest.guests.values():
        values = to_dict(guest)
        yield 'guests', '', values, len(dump(values)) + 2
        if guest.trouble or guest.size:
            condition = {'trouble': guest.trouble, 'size': dict(guest.size)}
            yield 'conditions', guest.instance, condition, len(dump({guest.instance: condition})) + 2
    for name, json_name in _JSON_NAMES.items():
        for key, value in getattr(digest, name).items():
            yield json_name, key, value, len(dump({key: value})) + 2
