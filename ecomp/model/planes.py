"""What placement, etcd and the computes say, side by side, and read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from ecomp.model import keys
from ecomp.model.allocation import Resources
from ecomp.model.digest import Digest
from ecomp.model.group import from_json as group_from_json
from ecomp.model.guest import Guest
from ecomp.model.host import CLOSED, SILENT, by_instance, computes_of
from ecomp.model.order import Invalid, Request, announced, named, parse_request
from ecomp.model.queue import QueueEntry, parse_waiting
from ecomp.model.quota import from_json as quota_from_json
from ecomp.model.record import BUILDING, DESTROYING, ERROR, GONE, SCHEDULED, Record, from_json

Parsed = TypeVar('Parsed')

FAMILIES = (
    *(keys.ATTEMPTS, keys.QUEUES, keys.HOSTS, keys.INSTANCES, keys.BOOTED, keys.NAMES, keys.COMPUTES),
    *(keys.HOSTNAMES, keys.FLAVORS, keys.GROUPS, keys.QUOTAS),
)
"""The prefixes of the keys an audit reads."""


class KeyValue(NamedTuple):
    """One etcd key: its value, the revision that wrote it last, its lease (0: none), the revision that made it."""

    value: bytes
    revision: int
    lease: int = 0
    created: int = 0


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
    etcd: Mapping[str, KeyValue]
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
        self.alive = {keys.last(key) for key, kept in self._under(keys.COMPUTES).items() if kept.lease}
        self.known = computes_of(self._under(keys.COMPUTES), self._under(keys.HOSTNAMES))
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
            if at.record_key is not None:
                self._record_keys[name] = at.record_key
        self.wishes: dict[str, dict[str, Request | Invalid]] = {}
        for key, kept in self._under(keys.HOSTS).items():
            compute, _, name = key.removeprefix(keys.HOSTS).partition('/')
            self.wishes.setdefault(name, {})[compute] = parse_request(compute, key, kept.value)
        # Whose each name is; None where its key says nothing that can be understood.
        self.names: dict[str, str | None] = {}
        for key, kept in self._under(keys.NAMES).items():
            try:
                self.names[key.removeprefix(keys.NAMES)] = named(kept.value)
            except ValueError:
                self.names[key.removeprefix(keys.NAMES)] = None
        self.groups = self._read(group_from_json, keys.GROUPS)
        self.quotas = self._read(quota_from_json, keys.QUOTAS)
        # What waits in which flavor's queue; a mark of its taker says only that somebody is at it.
        self.queued: dict[str, dict[str, QueueEntry | Invalid]] = {}
        self.at_it: set[str] = set()
        for key, kept in self._under(keys.QUEUES).items():
            if not key.endswith(keys.TAKER):
                name = keys.last(key)
                flavor = key.removeprefix(keys.QUEUES).removesuffix(name).rstrip('/')
                self.queued.setdefault(name, {})[flavor] = parse_waiting(key, kept.value)
            if kept.lease or not key.endswith(keys.TAKER):
                self.at_it.add(keys.in_queue(key))
        for key, kept in self._under(keys.ATTEMPTS).items():
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
        found |= {keys.last(key) for key in self._under(keys.BOOTED)}
        found |= {consumer for consumer, held in self.held.items() if not self.computes.isdisjoint(held)}
        return sorted(found)

    def kept(self, key: str) -> KeyValue | None:
        """What is at a key; None if there is no such key."""
        return self.planes.etcd.get(key)

    def record_key(self, instance: str) -> str:
        """The key of the instance's record that is believed (see places)."""
        return self._record_keys.get(instance) or keys.old_record(instance)

    def attempts(self) -> Mapping[str, KeyValue]:
        """The keys by which eschedules say that they are at work on an order."""
        return self._under(keys.ATTEMPTS)

    def marks(self) -> Mapping[str, KeyValue]:
        """The keys by which computes say that they take a waiting request."""
        return {key: kept for key, kept in self._under(keys.QUEUES).items() if key.endswith(keys.TAKER)}

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
        for key, kept in self._under(prefix).items():
            name = key.removeprefix(prefix)
            try:
                found[name] = parse(name, kept.value)
            except ValueError as error:
                found[name] = str(error)
        return found

    def _under(self, prefix: str) -> dict[str, KeyValue]:
        return {key: kept for key, kept in self.planes.etcd.items() if key.startswith(prefix)}


def involved(etcd: Mapping[str, KeyValue]) -> dict[str, dict[str, int]]:
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

