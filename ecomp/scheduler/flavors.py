"""Flavors: those of schedule.yaml, and those that operators keep in etcd for everybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecomp.conf import ScheduleConfig
from ecomp.errors import EcompError, NotFound, UnknownOutcome, Unreachable, Unreadable, UsageError
from ecomp.model import keys
from ecomp.model.flavor import Flavor, check_flavor_name, from_json, on_top, parse_flavor, to_dict, to_json
from ecomp.model.json_object import dump
from ecomp.model.text import printable
from ecomp.scheduler.show import table
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged

HERE, ETCD = 'schedule.yaml', 'etcd'


def with_flavor(config: ScheduleConfig, name: str, query: str) -> str:
    """The query with a flavor below it: schedule.yaml's of that name, or else etcd's. NotFound, UsageError."""
    try:
        flavor = config.flavors.get(check_flavor_name(name)) or _of_etcd(config, name)
        return on_top(flavor, query)
    except ValueError as error:
        raise UsageError(str(error)) from error


def all_flavors(config: ScheduleConfig, store: Store) -> tuple[dict[str, tuple[Flavor, str]], list[EcompError]]:
    """Every flavor by its name, and where it is; and what is wrong with those that cannot be read.

    schedule.yaml's come before etcd's of the same name.
    """
    found: dict[str, tuple[Flavor, str]] = {}
    unreadable: list[EcompError] = []
    for each in store.snapshot(keys.FLAVORS).entries.values():
        try:
            found[keys.last(each.key)] = read(each), ETCD
        except Unreadable as error:
            unreadable.append(error)
    here = {name: (each, HERE) for name, each in config.flavors.items()}
    return dict(sorted({**found, **here}.items())), unreadable


def put(store: Store, name: str, text: str) -> str:
    """Keep a flavor in etcd, in place of one of that name; what was done, in words. UsageError."""
    try:
        flavor = parse_flavor(name, text)
    except ValueError as error:
        raise UsageError(f'flavor {printable(name, 100)}: {error}') from error
    key, value = keys.flavor(name), to_json(flavor)
    before = store.get(key)
    _commit(store, key, before, Put(key, value), value.encode())
    return f'flavor {name}: {"changed" if before else "made"}; what is placed already stays as it is'


def delete(store: Store, name: str) -> str:
    """Remove a flavor from etcd; what was done, in words. NotFound."""
    key = keys.flavor(name)
    before = store.get(key)
    if before is None:
        raise NotFound(f'{printable(name, 100)}: etcd has no such flavor')
    _commit(store, key, before, Delete(key), None)
    done = f'flavor {name}: removed; what is placed already stays as it is'
    try:
        there = store.snapshot(keys.queue(name, ''), keys_only=True).entries
    except Unreachable:
        return done
    waiting = sum(keys.queued(each) is not None for each in there)
    left = f'; nobody takes what still waits in its queue ({waiting}): set it again, or destroy those'
    return done + (left if waiting else '')


def as_flavors(flavors: Mapping[str, tuple[Flavor, str]], form: str) -> str:
    """What users read: a table with one line each, or a JSON array."""
    if form == 'json':
        return dump([{**to_dict(each), 'source': source} for each, source in flavors.values()], indent=2)
    rows: list[Sequence[str]] = [('FLAVOR', 'RESOURCES', 'TRAITS', 'IN')]
    for name, (each, source) in flavors.items():
        asked = ','.join(f'{part}:{amount}' for part, amount in each.resources.items())
        rows.append((name, asked, each.traits or '-', source))
    return table(rows)


def _of_etcd(config: ScheduleConfig, name: str) -> Flavor:
    store = Store(config.etcd)
    try:
        entry = store.get(keys.flavor(name))
    finally:
        store.close()
    if entry is None:
        raise NotFound(f'{name}: no such flavor: eschedule flavor list shows all')
    return read(entry)


def read(entry: Entry) -> Flavor:
    """The flavor in an entry. Unreadable."""
    try:
        return from_json(keys.last(entry.key), entry.value)
    except ValueError as error:
        raise Unreadable(entry.key, error) from error


def _commit(store: Store, key: str, before: Entry | None, change: Put | Delete, wanted: bytes | None) -> None:
    """Carry out one change of one key. Who changes it at the same time has the last word."""
    try:
        if store.commit([Unchanged(key, before.revision if before else 0)], [change]) is not None:
            return
    except UnknownOutcome:
        pass
    now = store.get(key)
    if (now.value if now else None) != wanted:
        raise EcompError(f'{key}: somebody else changed it at this moment, or it was not written: try again')
