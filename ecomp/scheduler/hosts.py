"""The computes, read from etcd and placement together."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, NotFound, UsageError
from ecomp.model import keys, status
from ecomp.model.host import Host, InEtcd, InPlacement, hosts
from ecomp.model.instance import Invalid, Request, parse_request
from ecomp.model.json_object import load_object
from ecomp.model.places import by_instance
from ecomp.model.record import Record
from ecomp.model.text import printable
from ecomp.placement import providers, traits
from ecomp.placement.client import Placement
from ecomp.scheduler.find import read_record
from ecomp.store.client import Entry, Store


@dataclass(frozen=True)
class Seen:
    """What etcd says, the requests and records it says it with, by key, and what is wrong with those unreadable."""

    etcd: InEtcd
    entries: Mapping[str, Entry]
    errors: tuple[EcompError, ...]


def all_hosts(store: Store, placement: Placement) -> tuple[list[Host], tuple[EcompError, ...]]:
    """Every compute, and what is wrong with records that cannot be read (their instances are not counted)."""
    seen = look(store)
    names = providers.names(placement)
    known = {*seen.etcd.alive, *seen.etcd.requests, *(uuid for uuid, name in names.items() if uuid == name)}
    shares = providers.shares(placement, known & names.keys())
    having = {trait: traits.having(placement, trait) for trait in status.STATUS}
    found = {
        uuid: InPlacement(uuid, names[uuid], each, frozenset(trait for trait in having if uuid in having[trait]))
        for uuid, each in shares.items()
    }
    return hosts(seen.etcd, found), seen.errors


def only_on(etcd: EtcdConfig, query: str, word: str) -> str:
    """The query, for the one compute that is meant. Errors: as of compute_of()."""
    store = Store(etcd)
    try:
        return f'{query}&in_tree={compute_of(store, word)}'
    finally:
        store.close()


def compute_of(store: Store, word: str) -> str:
    """The compute that is meant: by its uuid, or by its host name while it is up.

    Errors: NotFound, UsageError (several have that name).
    """
    try:
        return str(uuid.UUID(word))
    except ValueError:
        pass
    found = sorted(compute for compute, name in alive(store).items() if name == word)
    if not found:
        raise NotFound(f'{printable(word, 100)}: no compute of this host name is up: eschedule hosts shows all')
    if len(found) > 1:
        raise UsageError(f'{word} is the host name of {len(found)} computes, give the uuid: {", ".join(found)}')
    return found[0]


def alive(store: Store) -> dict[str, str | None]:
    """The computes that are alive, each with its host name if it says one. Who is, says so on a lease."""
    found = store.snapshot(keys.COMPUTES).entries
    return {keys.last(key): _hostname(entry) for key, entry in found.items() if entry.lease}


def look(store: Store) -> Seen:
    """What etcd says of computes and instances."""
    # Requests before records: what ends meanwhile is then seen twice rather than not at all.
    there = alive(store)
    requested, recorded = store.snapshot(keys.HOSTS).entries, store.snapshot(keys.INSTANCES).entries
    requests: dict[str, dict[str, Request | Invalid]] = {}
    junk: dict[str, list[str]] = {}
    for key, entry in requested.items():
        compute, _, name = key.removeprefix(keys.HOSTS).partition('/')
        if keys.is_uuid(name):
            requests.setdefault(compute, {})[name] = parse_request(compute, key, entry.value)
        else:
            junk.setdefault(compute, []).append(name)
    records: dict[str, Record] = {}
    errors: dict[str, EcompError] = {}
    for instance, at in by_instance({**requested, **recorded}.items()).items():
        try:
            if at.record is not None:
                records[instance] = read_record(at.record)
        except EcompError as error:
            errors[instance] = error
    etcd = InEtcd(there, requests, records, frozenset(errors), junk)
    return Seen(etcd, {**requested, **recorded}, tuple(errors.values()))


def _hostname(entry: Entry) -> str | None:
    try:
        name = load_object(entry.value).get('hostname')
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None
