"""What placement, etcd and the computes say, side by side, and read; a compute's digest, as it is in etcd. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ecomp.model import keys
from ecomp.model.allocation import Resources
from ecomp.model.group import from_json as group_from_json
from ecomp.model.guest import Guest
from ecomp.model.host import CLOSED, SILENT, by_instance, computes_of
from ecomp.model.json_object import dump, is_version, load, load_object
from ecomp.model.order import Invalid, Request, announced, named, parse_request
from ecomp.model.queue import QueueEntry, parse_waiting
from ecomp.model.quota import from_json as quota_from_json
from ecomp.model.record import BUILDING, DESTROYING, ERROR, GONE, SCHEDULED, Record, from_json
from ecomp.model.text import printable

Parsed = TypeVar('Parsed')

FAMILIES = (
    *(keys.ATTEMPTS, keys.QUEUES, keys.HOSTS, keys.INSTANCES, keys.BOOTED, keys.NAMES, keys.COMPUTES),
    *(keys.HOSTNAMES, keys.FLAVORS, keys.GROUPS, keys.QUOTAS),
)
"""The prefixes of the keys an audit reads."""


class ProviderState(NamedTuple):
    """One resource provider. `inventory` is placement's {class: {'total', 'allocation_ratio', …}}."""

    name: str
    inventory: Mapping[str, Mapping[str, Any]] = {}
    held: Mapping[str, Resources] = {}


class Planes(NamedTuple):
    """What an audit read: providers, keys of etcd and digests of computes, each by name.

    `mute` has the reason for each living compute that gave no digest; `usages` what placement counts for each project
    that has a quota, as a quota counts it. `stalled` are those of the mute that said that they heard, and no more.
    """

    providers: Mapping[str, ProviderState]
    etcd: Mapping[str, keys.StoredValue]
    digests: Mapping[str, Digest]
    mute: Mapping[str, str] = {}
    usages: Mapping[str, Mapping[str, int]] = {}
    stalled: frozenset[str] = frozenset()

    def claims(self, compute: str) -> Container[str]:
        """The consumers that have a claim on a compute."""
        provider = self.providers.get(compute)
        return () if provider is None else provider.held


class World:
    """The planes, parsed and indexed by instance."""

    def __init__(self, planes: Planes) -> None:
        self.planes = planes
        self.alive = {keys.last(key) for key, kept in self.under(keys.COMPUTES).items() if kept.lease}
        self.known = computes_of(self.under(keys.COMPUTES), self.under(keys.HOSTNAMES))
        self.records: dict[str, Record] = {}
        self.unreadable: dict[str, str] = {}
        # What computes other than the believed one say, by the state of their records: that it lives, or that there
        # was such an instance before.
        self.contradicting: dict[str, dict[str, str]] = {}
        self._record_keys: dict[str, str] = {}
        for name, at in by_instance(planes.etcd.items()).items():
            at.judge(name, planes.claims)
            for compute, key in at.record_keys.items():
                try:
                    record = from_json(planes.etcd[key].value, name, keys.recorded(key)[0])
                except ValueError as error:
                    if compute == at.compute:
                        self.unreadable[name] = str(error)
                    continue
                if compute == at.compute:
                    self.records[name] = record
                elif record.state not in (GONE, ERROR) or at.record is None:
                    self.contradicting.setdefault(name, {})[compute] = record.state
            self._record_keys[name] = at.record_key or keys.record(at.compute, name)
        self.wishes: dict[str, dict[str, Request | Invalid]] = {}
        for key, kept in self.under(keys.HOSTS).items():
            compute, _, name = key.removeprefix(keys.HOSTS).partition('/')
            self.wishes.setdefault(name, {})[compute] = parse_request(compute, key, kept.value)
        # Whose each name is; None where its key says nothing that can be understood.
        self.names: dict[str, str | None] = {}
        for key, kept in self.under(keys.NAMES).items():
            try:
                self.names[key.removeprefix(keys.NAMES)] = named(kept.value)
            except ValueError:
                self.names[key.removeprefix(keys.NAMES)] = None
        self.groups = self._read(group_from_json, keys.GROUPS)
        self.quotas = self._read(quota_from_json, keys.QUOTAS)
        # What waits in which flavor's queue; a mark of its taker says only that somebody is at it.
        self.queued: dict[str, dict[str, QueueEntry | Invalid]] = {}
        self.at_it: set[str] = set()
        for key, kept in self.under(keys.QUEUES).items():
            if not key.endswith(keys.TAKER):
                name = keys.last(key)
                flavor = key.removeprefix(keys.QUEUES).removesuffix(name).rstrip('/')
                self.queued.setdefault(name, {})[flavor] = parse_waiting(key, kept.value)
            if kept.lease or not key.endswith(keys.TAKER):
                self.at_it.add(keys.in_queue(key))
        for key, kept in self.under(keys.ATTEMPTS).items():
            if kept.lease:
                self.at_it |= announced(key, kept.value)
        self.computes = self.alive | {name for name, each in planes.providers.items() if each.name == name}
        # What was gone before a compute took it has none.
        self.computes |= {each.compute for each in self.records.values()} - {''}
        self.computes |= {compute for asked in self.wishes.values() for compute in asked}
        self.guests: dict[str, dict[str, Guest]] = {}
        self.metadata: dict[str, dict[str, list[str]]] = {}
        self.seeds: dict[str, set[str]] = {}
        self.reserved: dict[str, dict[str, dict[str, str]]] = {}
        for compute, digest in planes.digests.items():
            for name, guest in digest.guests.items():
                self.guests.setdefault(name, {})[compute] = guest
            for mac, name in digest.metadata.items():
                self.metadata.setdefault(name, {}).setdefault(compute, []).append(mac)
            for name in digest.seeds:
                self.seeds.setdefault(name, set()).add(compute)
            for mac, text in digest.reservations.items():
                name, _, address = text.partition(' ')
                self.reserved.setdefault(name, {}).setdefault(compute, {})[mac] = address
        self.held: dict[str, dict[str, Resources]] = {}
        for provider, each in planes.providers.items():
            for consumer, resources in each.held.items():
                self.held.setdefault(consumer, {})[provider] = resources

    def instances(self) -> list[str]:
        """Every instance that any plane names, sorted. A consumer that holds nothing of a compute is none of ours."""
        found = {*self.wishes, *self.records, *self.unreadable, *self.guests}
        found |= {*self.metadata, *self.seeds, *self.reserved}
        found |= {keys.last(key) for key in self.under(keys.BOOTED)}
        found |= {consumer for consumer, held in self.held.items() if not self.computes.isdisjoint(held)}
        return sorted(found)

    def kept(self, key: str) -> keys.StoredValue | None:
        """What is at a key; None if there is no such key."""
        return self.planes.etcd.get(key)

    def record_key(self, instance: str) -> str:
        """The key of the instance's record that is believed (see Places), and of one that nobody has written yet."""
        return self._record_keys.get(instance) or keys.old_record(instance)

    def request_keys(self, instance: str) -> tuple[str, ...]:
        """The keys by which computes are asked for an instance."""
        return tuple(keys.request(compute, instance) for compute in sorted(self.wishes.get(instance, {})))

    def keys_of(self, instance: str) -> tuple[str, ...]:
        """The keys that say what an instance is: its record's, there or not, and its requests'."""
        return self.record_key(instance), *self.request_keys(instance)

    def revision(self, key: str) -> int:
        """The revision of a key, 0 for one that is not there."""
        kept = self.kept(key)
        return kept.revision if kept is not None else 0

    def called(self, instance: str) -> set[str]:
        """The names its record and its requests give an instance; a record of an older ecompute has none."""
        wishes = self.wishes.get(instance, {}).values()
        record = self.records.get(instance)
        waits = self.queued.get(instance, {}).values()
        said = {each.name for each in (*wishes, *waits) if not isinstance(each, Invalid)}
        said.add(record.name if record else None)
        return {name for name in said if name}

    def unserved(self) -> str | None:
        """That what is queued waits for nobody, in one line; None where that is not so."""
        return self.known.unserved([min(self.called(each), default=each) for each in sorted(self.queued)])

    def is_living(self, instance: str) -> bool:
        """True when the instance has a record that says neither gone nor error."""
        return instance in self.records and self.records[instance].state not in (GONE, ERROR)

    def is_in_work(self, instance: str) -> bool:
        """True while its record or its request says that it is being built or destroyed."""
        record, wishes = self.records.get(instance), self.wishes.get(instance, {}).values()
        if any(isinstance(wish, Request) and wish.is_tombstone for wish in wishes):
            return record is None or record.state not in (GONE, ERROR)
        return record is not None and record.state in (SCHEDULED, BUILDING, DESTROYING)

    def is_switching(self, instance: str) -> bool:
        """True while a request asks for a stop, start or reboot that its record does not say is done."""
        record, wishes = self.records.get(instance), self.wishes.get(instance, {}).values()
        asked = [wish.power for wish in wishes if isinstance(wish, Request) and wish.power]
        return record is not None and any(not power.is_done(record.power) for power in asked)

    def away(self) -> dict[str, str]:
        """The computes without a presence, CLOSED or SILENT: what they have cannot be compared.

        One of which only records of what has ended are left, they are kept for a while, was forgotten.
        """
        ended = {each.compute for each in self.records.values()}
        living = {each.compute for each in self.records.values() if self.is_living(each.instance)}
        asked = {compute for asked in self.wishes.values() for compute in asked}
        forgotten = ended - living - asked - self.planes.providers.keys()
        return {each: self._state(each) for each in sorted(self.computes - self.alive - forgotten)}

    def _state(self, compute: str) -> str:
        provider = self.planes.providers.get(compute)
        vcpu = provider.inventory.get('VCPU') if provider else None
        return CLOSED if vcpu and vcpu.get('reserved', 0) >= vcpu.get('total', 0) else SILENT

    def _read(self, parse: Callable[[str, bytes], Parsed], prefix: str) -> dict[str, Parsed | str]:
        """{name: what `parse` makes of its key, or the reason why it cannot} of the keys `prefix` + name."""
        found: dict[str, Parsed | str] = {}
        for key, kept in self.under(prefix).items():
            name = key.removeprefix(prefix)
            try:
                found[name] = parse(name, kept.value)
            except ValueError as error:
                found[name] = str(error)
        return found

    def under(self, prefix: str) -> dict[str, keys.StoredValue]:
        """The keys below a prefix."""
        return {key: kept for key, kept in self.planes.etcd.items() if key.startswith(prefix)}


def involved(etcd: Mapping[str, keys.StoredValue]) -> dict[str, dict[str, int]]:
    """{instance, compute or project: {key: revision}} of the keys that are about each.

    Of a compute's life it is the lease: on the same one the same process lives, whatever it says of the room it has.
    """
    found: dict[str, dict[str, int]] = {}
    for key, kept in etcd.items():
        about: Iterable[str] = {keys.in_queue(key) if key.startswith(keys.QUEUES) else keys.last(key)}
        if key.startswith(keys.ATTEMPTS):
            about = announced(key, kept.value)
        elif key.startswith(keys.QUOTAS):
            about = {key.removeprefix(keys.QUOTAS)}
        for subject in about:
            found.setdefault(subject, {})[key] = kept.lease if key.startswith(keys.COMPUTES) else kept.revision
    return found


VERSION = 1
PAGE_BYTES = 400 * 1024
"""Bytes of a page after which the next one begins: one entry more must fit into the 1.5 MiB that etcd takes."""
REASON = 500
"""Characters of a compute's reason why it gives no digest; the rest is cut off."""

_DICTS = {
    **{'without_base': 'without_base', 'metadata': 'seeds', 'seeds': 'isos'},
    **{name: name for name in ('reservations', 'parts', 'open_dhcp', 'bad_bases')},
}
"""What is a dictionary of a digest: {field: its name in JSON}, where ecomp 1.0 called the metadata seeds."""


@dataclass(frozen=True)
class Digest:
    """What one compute has. `guests` are the domains and disks with our mark, by instance.

    `without_base` is {instance: path of its missing base volume}; `metadata` {MAC: instance} of the metadata server's
    files; `seeds` the instances with a NoCloud disk; `reservations` {MAC: 'instance address'} of DHCP. `parts` is {file
    that no process writes: a mark that changes if it is written again}; `open_dhcp` the networks whose DHCP answers any
    MAC; `bad_bases` the SHA-256s of base volumes whose content has changed.
    """

    guests: Mapping[str, Guest] = field(default_factory=dict)
    without_base: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, str] = field(default_factory=dict)
    reservations: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    open_dhcp: Mapping[str, str] = field(default_factory=dict)
    bad_bases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Leftover:
    """What a compute is asked to remove.

    `kind` is an instance's 'disk', its NoCloud disk ('iso') or its 'reservations', the metadata of a MAC ('seed'), or a
    'part'. `mark` is what the digest said of metadata or a part: the instance, the mark; what differs since is kept.
    """

    kind: str
    name: str
    mark: str = ''


def to_pages(digest: Digest) -> list[str]:
    """What one compute says is there, for an audit: its answer at /digests/<compute>/<audit>/<page>.

    JSON, versioned, in pages that each fit an etcd value. Page 0 is written last and says how many there are:
    {"version", "pages", "error", "guests": [{"instance", "compute", "defined", "running", "disk"}], "without_base":
    {instance: path}, "seeds": {mac: instance}, "isos": {instance: ""}, "reservations": {mac: "instance address"},
    "parts": {name: mark}, "open_dhcp": {network: ""}, "bad_bases": {sha256: ""}}.
    """
    pages: list[dict[str, Any]] = []
    size = PAGE_BYTES
    for name, key, value, length in _entries(digest):
        if size + length > PAGE_BYTES:
            pages.append({'version': VERSION, 'guests': [], **{each: {} for each in _DICTS.values()}})
            size = 0
        size += length
        if name == 'guests':
            pages[-1][name].append(value)
        else:
            pages[-1][name][key] = value
    pages = pages or [{'version': VERSION}]
    pages[0]['pages'] = len(pages)
    return [dump(each) for each in pages]


def failed(reason: str) -> str:
    """The value of page 0 of a compute that gives no digest, for this reason."""
    return dump({'version': VERSION, 'pages': 1, 'error': reason})


def from_pages(values: Sequence[bytes]) -> Digest:
    """The digest in these values, page 0 first. ValueError for a missing or wrong page, or for a compute's reason."""
    pages = [load_object(each) for each in values]
    if not pages:
        raise ValueError('no page is there')
    for each in pages:
        _check_version(each, 'digest')
    if pages[0].get('error'):
        raise ValueError(printable(str(pages[0]['error']))[:REASON])
    if pages[0].get('pages') != len(pages):
        raise ValueError(f'{len(pages)} of its {printable(str(pages[0].get("pages")), 20)} pages are there')
    try:
        guests = [_guest(**each) for page in pages for each in page.get('guests', [])]
        merged = {
            name: {key: _text(value) for page in pages for key, value in page.get(each, {}).items()}
            for name, each in _DICTS.items()
        }
        return Digest({each.instance: each for each in guests}, **merged)
    except (TypeError, AttributeError) as error:
        raise ValueError(f'not a digest: {printable(str(error))[:REASON]}') from error


def clearance_to_json(leftovers: Sequence[Leftover]) -> str:
    """The value of /audit/<audit>/<compute>: what that compute is asked to remove."""
    return dump({'version': VERSION, 'leftovers': [vars(each) for each in leftovers]})


def clearance_from_json(value: bytes) -> list[Leftover]:
    """The leftovers in such a value. ValueError if it cannot be understood."""
    data = load_object(value)
    _check_version(data, 'clearance')
    try:
        return [Leftover(*(_text(each[name]) for name in ('kind', 'name', 'mark'))) for each in data['leftovers']]
    except (TypeError, KeyError) as error:
        raise ValueError(f'not a clearance: {printable(str(error))[:REASON]}') from error


def cleared_from_json(value: bytes) -> list[str]:
    """The lines in which a compute says what it removed. ValueError for a value without them."""
    lines = load(value)
    if not isinstance(lines, list) or not all(isinstance(each, str) for each in lines):
        raise ValueError('it does not say what it removed')
    return lines


def _check_version(data: Mapping[str, Any], what: str) -> None:
    version = data.get('version')
    if not is_version(version, VERSION):
        raise ValueError(f'a {what} of version {version!r:.40}: this ecomp reads {VERSION}')


def _guest(instance: Any, compute: Any, defined: Any, running: Any, disk: Any) -> Guest:
    """The Guest in these values. TypeError if one of them is of another type."""
    if not all(isinstance(each, bool) for each in (defined, running, disk)):
        raise TypeError('whether a guest is defined, runs and has a disk is true or false')
    return Guest(_text(instance), None if compute is None else _text(compute), defined, running, disk)


def _text(value: Any) -> str:
    """The value, which is text. TypeError if it is not."""
    if not isinstance(value, str):
        raise TypeError(f'expected text, not {type(value).__name__}')
    return value


def _entries(digest: Digest) -> Iterator[tuple[str, str, Any, int]]:
    for guest in digest.guests.values():
        said = {name: getattr(guest, name) for name in ('instance', 'compute', 'defined', 'running', 'disk')}
        yield 'guests', '', said, len(dump(said)) + 2
    for name, each in _DICTS.items():
        for key, value in getattr(digest, name).items():
            yield each, key, value, len(dump({key: value})) + 2
