"""Flavors: those of schedule.yaml, and those that operators keep in etcd for everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ecomp.conf import ScheduleConfig
from ecomp.errors import EcompError, NotFound, UnknownOutcome, Unreachable, Unreadable, UsageError
from ecomp.model import keys
from ecomp.model.allocation import missing
from ecomp.model.flavor import Flavor, check_flavor_name, from_json, on_top, parse_flavor, to_json
from ecomp.model.text import did_you_mean, printable
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged

if TYPE_CHECKING:
    from ecomp.placement.client import Placement

HERE, ETCD = 'schedule.yaml', 'etcd'
LISTED = 'eschedule flavor list shows all'


def with_flavor(config: ScheduleConfig, etcd: Callable[[], Store], name: str, query: str) -> str:
    """The query with a flavor below it: schedule.yaml's of that name, or else etcd's. NotFound, UsageError.

    `etcd` connects to it, which is done for no flavor of schedule.yaml.
    """
    try:
        flavor = config.flavors.get(check_flavor_name(name)) or _of_etcd(etcd(), name, config.flavors)
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


def put(store: Store, placement: Placement, name: str, text: str) -> str:
    """Keep a flavor in etcd, in place of one of that name; what was done, in words.

    UsageError, also for classes and traits that placement does not know.
    """
    from ecomp.model.query import Named
    from ecomp.placement.traits import unknown_names

    try:
        flavor = parse_flavor(name, text)
    except ValueError as error:
        raise UsageError(f'flavor {printable(name, 100)}: {error}') from error
    named = Named(frozenset(flavor.resources), frozenset({*flavor.required, *flavor.forbidden}))
    strange = unknown_names(placement, named)
    if strange.never:
        raise UsageError(f'flavor {name}: {strange.never}')
    key, value = keys.flavor(name), to_json(flavor)
    before = store.get(key)
    _commit(store, key, before, Put(key, value), value.encode())
    lacking = ', '.join(missing(flavor.resources))
    more = f'; it asks for no {lacking}, so it needs a query on top that does' if lacking else ''
    more += f'; {strange.yet}: nobody can take it yet' if strange.yet else ''
    return f'flavor {name}: {"changed" if before else "made"}; what is placed already stays as it is{more}'


def delete(store: Store, name: str) -> str:
    """Remove a flavor from etcd; what was done, in words. NotFound."""
    key = keys.flavor(name)
    before = store.get(key)
    if before is None:
        raise NotFound(f'{printable(name, 100)}: etcd has no such flavor{did_you_mean(name, names(store))}')
    _commit(store, key, before, Delete(key), None)
    done = f'flavor {name}: removed; what is placed already stays as it is'
    try:
        there = store.snapshot(keys.queue(name, ''), keys_only=True).entries
    except Unreachable:
        return done
    waiting = sum(keys.queued(each) is not None for each in there)
    left = f'; nobody takes what still waits in its queue ({waiting}): set it again, or destroy those'
    return done + (left if waiting else '')


def no_such(name: str, known: Iterable[str]) -> NotFound:
    """What is said of a flavor that is not among the `known` ones."""
    return NotFound(f'{printable(name, 100)}: no such flavor{did_you_mean(name, known)}: {LISTED}')


def _of_etcd(store: Store, name: str, here: Iterable[str]) -> Flavor:
    entry = store.get(keys.flavor(name))
    if entry is None:
        raise no_such(name, [*here, *names(store)])
    return read(entry)


def names(store: Store) -> list[str]:
    """The names of etcd's flavors."""
    return [keys.last(key) for key in store.snapshot(keys.FLAVORS, keys_only=True).entries]


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
