"""The computes, read from etcd and placement together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.host import Host, InEtcd, InPlacement, hosts
from ecomp.model.instance import Invalid, Request, load_object, parse_request
from ecomp.model.record import Record
from ecomp.placement import providers
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
    return hosts(seen.etcd, {uuid: InPlacement(uuid, names[uuid], each) for uuid, each in shares.items()}), seen.errors


def look(store: Store) -> Seen:
    """What etcd says of computes and instances."""
    # Requests before records: what ends meanwhile is then seen twice rather than not at all.
    alive = {keys.last(key): _hostname(entry) for key, entry in store.snapshot(keys.COMPUTES).entries.items()}
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
    for key, entry in recorded.items():
        try:
            records[keys.last(key)] = read_record(entry)
        except EcompError as error:
            errors[keys.last(key)] = error
    etcd = InEtcd(alive, requests, records, frozenset(errors), junk)
    return Seen(etcd, {**requested, **recorded}, tuple(errors.values()))


def _hostname(entry: Entry) -> str | None:
    try:
        name = load_object(entry.value).get('hostname')
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None
