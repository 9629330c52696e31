"""What placement, etcd and the computes say, side by side, and read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from ecomp.model import keys
from ecomp.model.allocation import Resources
from ecomp.model.digest import Digest
from ecomp.model.group import from_json as group_from_json
from ecomp.model.guest import Guest
from ecomp.model.instance import Invalid, Request, announced, named, parse_request
from ecomp.model.places import by_instance
from ecomp.model.queue import Waiting, parse_waiting
from ecomp.model.quota import from_json as quota_from_json
from ecomp.model.record import BUILDING, DESTROYING, ERROR, GONE, SCHEDULED, Record, from_json

Parsed = TypeVar('Parsed')

FAMILIES = (
    *(keys.REQUESTS, keys.QUEUES, keys.HOSTS, keys.INSTANCES, keys.BOOTED, keys.NAMES, keys.COMPUTES),
    *(keys.FLAVORS, keys.GROUPS, keys.QUOTAS),
)
"""The keys an audit reads."""


class Kept(NamedTuple):
    """One etcd key: its value, the revision that wrote it last, its lease (0: none), the revision that made it."""

    value: bytes
    revision: int
    lease: int = 0
    created: int = 0


class Provider(NamedTuple):
    """One resource provider. `inventory` is placement's {class: {'total', 'allocation_ratio', …}}."""

    name: str
    inventory: Mapping[str, Mapping[str, Any]] = {}
    held: Mapping[str, Resources] = {}


class Planes(NamedTuple):
    """All of it, as it was read. `mute` are living computes that gave no digest, and why.

    `usages` is what placement counts for each project that has a quota, as a quota counts it.
    """

    providers: Mapping[str, Provider]
    etcd: Mapping[str, Kept]
    digests: Mapping[str, Digest]
    mute: Mapping[str, str] = {}
    usages: Mapping[str, Mapping[str, int]] = {}


class World:
    """The planes, understood: what each of them says of an instance."""

    def __init__(self, planes: Planes) -> None:
        self.planes = planes
        self.alive = {keys.last(key) for key, kept in self._under(keys.COMPUTES).items() if kept.lease}
        self.records: dict[str, Record] = {}
        self.unreadable: dict[str, str] = {}
        # What computes other than the believed one say, by the state of their records: that it lives, or that there
        # was such an instance before.
        self.contradicting: dict[str, dict[str, str]] = {}
        self._record_keys: dict[str, str] = {}
        for name, at in by_instance(planes.etcd.items()).items():
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
        # The reason where a key cannot be understood.
        self.groups = {
            name: _read(group_from_json, name, kept) for name, kept in self._named(keys.GROUPS).items()
        }
        self.quotas = {
            name: _read(quota_from_json, name, kept) for name, kept in self._named(keys.QUOTAS).items()
        }
        # What waits in which flavor's queue; a mark of its taker says only that somebody is at it.
        self.queued: dict[str, dict[str, Waiting | Invalid]] = {}
        self.at_it: set[str] = set()
        for key, kept in self._under(keys.QUEUES).items():
            if not key.endswith(keys.TAKER):
                name = keys.last(key)
                flavor = key.removeprefix(keys.QUEUES).removesuffix(name).rstrip('/')
                self.queued.setdefault(name, {})[flavor] = parse_waiting(key, kept.value)
            if kept.lease or not key.endswith(keys.TAKER):
                self.at_it.add(keys.in_queue(key))
        for key, kept in self._under(keys.REQUESTS).items():
            if kept.lease:
                self.at_it |= announced(key, kept.value)
        self.computes = self.alive | {name for name, each in planes.providers.items() if each.name == name}
        # What was gone before a compute took it has none.
        self.computes |= {each.compute for each in self.records.values()} - {''}
        self.computes |= {compute for asked in self.wishes.values() for compute in asked}
        self.guests: dict[str, dict[str, Guest]] = {}
        self.seeds: dict[str, dict[str, list[str]]] = {}
        for compute, digest in planes.digests.items():
            for name, guest in digest.guests.items():
                self.guests.setdefault(name, {})[compute] = guest
            for mac, name in digest.seeds.items():
                self.seeds.setdefault(name, {}).setdefault(compute, []).append(mac)
        self.isos: dict[str, set[str]] = {}
        for compute, digest in planes.digests.items():
            for name in digest.isos:
                self.isos.setdefault(name, set()).add(compute)
        self.reserved: dict[str, dict[str, dict[str, str]]] = {}
        for compute, digest in planes.digests.items():
            for mac, text in digest.reservations.items():
                name, _, address = text.partition(' ')
                self.reserved.setdefault(name, {}).setdefault(compute, {})[mac] = address
        self.held: dict[str, dict[str, Resources]] = {}
        for provider, each in planes.providers.items():
            for consumer, resources in each.held.items():
                self.held.setdefault(consumer, {})[provider] = resources

    def instances(self) -> list[str]:
        """Every instance any plane speaks of. What holds nothing of a compute of ours is somebody else's."""
        found = {*self.wishes, *self.records, *self.unreadable, *self.guests}
        found |= {*self.seeds, *self.isos, *self.reserved}
        found |= {keys.last(key) for key in self._under(keys.BOOTED)}
        found |= {consumer for consumer, held in self.held.items() if not self.computes.isdisjoint(held)}
        return sorted(found)

    def kept(self, key: str) -> Kept | None:
        """A key, None if it is not there."""
        return self.planes.etcd.get(key)

    def record_key(self, instance: str) -> str:
        """The key of the record that is believed."""
        return self._record_keys.get(instance) or keys.old_record(instance)

    def attempts(self) -> Mapping[str, Kept]:
        """The keys that say an eschedule is at it."""
        return self._under(keys.REQUESTS)

    def marks(self) -> Mapping[str, Kept]:
        """The keys that say which compute is taking a request that waits."""
        return {key: kept for key, kept in self._under(keys.QUEUES).items() if key.endswith(keys.TAKER)}

    def called(self, instance: str) -> set[str]:
        """What its record and its requests call an instance; an older ecompute writes down no name."""
        wishes = self.wishes.get(instance, {}).values()
        record = self.records.get(instance)
        waits = self.queued.get(instance, {}).values()
        said = {each.name for each in (*wishes, *waits) if not isinstance(each, Invalid)}
        said.add(record.name if record else None)
        return {name for name in said if name}

    def is_living(self, instance: str) -> bool:
        """True when it has a record and has not ended."""
        return instance in self.records and self.records[instance].state not in (GONE, ERROR)

    def is_in_work(self, instance: str) -> bool:
        """True while what is there of it is about to change, by what its record and its request say."""
        record, wishes = self.records.get(instance), self.wishes.get(instance, {}).values()
        if any(isinstance(wish, Request) and wish.is_tombstone for wish in wishes):
            return record is None or record.state not in (GONE, ERROR)
        return record is not None and record.state in (SCHEDULED, BUILDING, DESTROYING)

    def is_switching(self, instance: str) -> bool:
        """True while a stop, start or reboot of it was asked for and is not carried out."""
        record, wishes = self.records.get(instance), self.wishes.get(instance, {}).values()
        asked = [wish.power for wish in wishes if isinstance(wish, Request) and wish.power]
        return record is not None and any(not power.is_done(record.power) for power in asked)

    def silent(self) -> list[str]:
        """The computes there are that do not say they are alive: what they have cannot be compared."""
        return sorted(self.computes - self.alive)

    def _named(self, prefix: str) -> dict[str, Kept]:
        return {key.removeprefix(prefix): kept for key, kept in self._under(prefix).items()}

    def _under(self, prefix: str) -> dict[str, Kept]:
        return {key: kept for key, kept in self.planes.etcd.items() if key.startswith(prefix)}


def _read(parse: Callable[[str, bytes], Parsed], name: str, kept: Kept) -> Parsed | str:
    try:
        return parse(name, kept.value)
    except ValueError as error:
        return str(error)


def involved(etcd: Mapping[str, Kept]) -> dict[str, dict[str, int]]:
    """Of each instance and compute, the keys that are about it, with their revisions."""
    found: dict[str, dict[str, int]] = {}
    for key, kept in etcd.items():
        about: Iterable[str] = {keys.in_queue(key) if key.startswith(keys.QUEUES) else keys.last(key)}
        if key.startswith(keys.REQUESTS):
            about = announced(key, kept.value)
        elif key.startswith(keys.QUOTAS):
            about = {key.removeprefix(keys.QUOTAS)}
        for subject in about:
            found.setdefault(subject, {})[key] = kept.revision
    return found

