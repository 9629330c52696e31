"""Flavors and quotas, which operators set for everybody.

Flavors are those of schedule.yaml, and those that are kept in etcd. Quotas are counted where requests are delivered and
removed (rule 7), and counted anew here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ecomp.conf import ScheduleConfig
from ecomp.errors import Conflict, EcompError, NotFound, UnknownOutcome, Unreachable, Unreadable, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import missing
from ecomp.model.flavor import Flavor, check_flavor_name, from_json, on_top, parse_flavor, to_json
from ecomp.model.order import parse_request
from ecomp.model.quota import INSTANCES, Demand, Quota, counted, in_words, parse_limits
from ecomp.model.text import did_you_mean, printable
from ecomp.scheduler.looking.find import read_record
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged, until_committed
from ecomp.store.sharing import Index, listed, put_quota, quota

if TYPE_CHECKING:
    from ecomp.model.record import Record
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
            found[keys.last(each.key)] = read_flavor(each), ETCD
        except Unreadable as error:
            unreadable.append(error)
    here = {name: (each, HERE) for name, each in config.flavors.items()}
    return dict(sorted({**found, **here}.items())), unreadable


def put_flavor(store: Store, placement: Placement, name: str, text: str) -> str:
    """Keep a flavor in etcd, in place of one of that name; what was done, in words.

    UsageError, also for classes and traits that placement does not know.
    """
    from ecomp.model.query import Named
    from ecomp.placement.providers import unknown_names

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
    _commit_flavor(store, key, before, Put(key, value), value.encode())
    lacking = ', '.join(missing(flavor.resources))
    more = f'; it asks for no {lacking}, so it needs a query on top that does' if lacking else ''
    more += f'; {strange.yet}: nobody can take it yet' if strange.yet else ''
    return f'flavor {name}: {"changed" if before else "made"}; what is placed already stays as it is{more}'


def delete_flavor(store: Store, name: str) -> str:
    """Remove a flavor from etcd; what was done, in words. NotFound."""
    key = keys.flavor(name)
    before = store.get(key)
    if before is None:
        raise NotFound(f'{printable(name, 100)}: etcd has no such flavor{did_you_mean(name, flavor_names(store))}')
    _commit_flavor(store, key, before, Delete(key), None)
    done = f'flavor {name}: removed; what is placed already stays as it is'
    try:
        there = store.snapshot(keys.queue(name, ''), keys_only=True).entries
    except Unreachable:
        return done
    waiting = sum(keys.queued(each) is not None for each in there)
    left = f'; nobody takes what still waits in its queue ({waiting}): set it again, or destroy those'
    return done + (left if waiting else '')


def no_such_flavor(name: str, known: Iterable[str]) -> NotFound:
    """What is said of a flavor that is not among the `known` ones."""
    return NotFound(f'{printable(name, 100)}: no such flavor{did_you_mean(name, known)}: {LISTED}')


def _of_etcd(store: Store, name: str, here: Iterable[str]) -> Flavor:
    entry = store.get(keys.flavor(name))
    if entry is None:
        raise no_such_flavor(name, [*here, *flavor_names(store)])
    return read_flavor(entry)


def flavor_names(store: Store) -> list[str]:
    """The names of etcd's flavors."""
    return [keys.last(key) for key in store.snapshot(keys.FLAVORS, keys_only=True).entries]


def read_flavor(entry: Entry) -> Flavor:
    """The flavor in an entry. Unreadable."""
    try:
        return from_json(keys.last(entry.key), entry.value)
    except ValueError as error:
        raise Unreadable(entry.key, error) from error


def _commit_flavor(store: Store, key: str, before: Entry | None, change: Put | Delete, wanted: bytes | None) -> None:
    """Carry out one change of one key. Who changes it at the same time has the last word."""
    try:
        if store.commit([Unchanged(key, before.revision if before else 0)], [change]) is not None:
            return
    except UnknownOutcome:
        pass
    now = store.get(key)
    if (now.value if now else None) != wanted:
        raise EcompError(f'{key}: somebody else changed it at this moment, or it was not written: try again')


TRIES = 50
"""Tries to write a quota: each that loses to another write waits up to PAUSE, and counts anew."""
PAUSE = 0.05
"""Seconds between two of them, at most."""


def check_limits(placement: Placement, words: Sequence[str]) -> str:
    """See that placement knows what these words limit; a remark, '' for none. UsageError.

    What is no limit any more is not looked at.
    """
    from ecomp.model.query import Named
    from ecomp.placement.providers import unknown_names

    try:
        classes = {name for name, most in parse_limits(words).items() if most is not None} - {INSTANCES}
    except ValueError as error:
        raise UsageError(f'quota set: {printable(str(error))}') from error
    strange = unknown_names(placement, Named(frozenset(classes), frozenset()), more=(INSTANCES,))
    if strange.never:
        raise UsageError(f'quota set: {strange.never}')
    return strange.yet


def limit(store: Store, project: str, words: Sequence[str]) -> str:
    """Set limits, beside those there are, and count anew what the project has; what was done, in words.

    Errors: UsageError, Conflict (others change it all the time).
    """
    try:
        new = parse_limits(words)
    except ValueError as error:
        raise UsageError(f'quota set: {printable(str(error))}') from error

    def change(now: Quota | None) -> Quota:
        limits = {**(now.limits if now else {}), **new}
        return Quota(project, {name: most for name, most in limits.items() if most is not None})

    found = recount(store, project, change)
    if found is None:
        return f'quota of project {printable(project)}: it has no limits any more'
    over = [name for name, most in found.limits.items() if found.used.get(name, 0) > most]
    more = f'; it has more {" and ".join(over)} than that already, which stays' if over else ''
    return f'quota of project {printable(project)}: {in_words(found)}{more}'


def recount(store: Store, project: str, change: Callable[[Quota | None], Quota]) -> Quota | None:
    """Change a quota, and count what the project has; None once it has no limits, and is gone.

    What is delivered and removed while a quota is there changes it, so what was counted is written only if nothing
    was. While there is none nobody changes it: the first is written twice, and counted once it is there.
    """

    def attempt() -> Quota | None:
        now, unchanged = quota(store, project)
        wanted = change(now)
        new = Quota(project, wanted.limits, _counted(store, project))
        failpoint('quota-counted')
        written: Put | Delete = put_quota(new) if wanted.limits else Delete(keys.quota(project))
        if store.commit([unchanged], [written]) is None:
            return None
        if wanted.limits and now is None:
            failpoint('quota-reckoned')
            return None
        return new

    lost = Conflict(f'quota of project {printable(project)}: changed by somebody else all the time; try again')
    new = until_committed(attempt, lost, TRIES, PAUSE)
    return new if new.limits else None


def _counted(store: Store, project: str) -> dict[str, int]:
    """What a project has, by the requests there are."""
    from ecomp.model.queue import parse_waiting  # a twentieth of a claim, and one with a flavor needs this module

    # Those that wait first: what is moved meanwhile is seen twice, and counts once.
    waiting = store.snapshot(keys.QUEUES).entries
    asked: list[Demand] = [parse_waiting(key, each.value) for key, each in waiting.items()]
    among: dict[str, list[str]] = {}
    for key, each in store.snapshot(keys.HOSTS).entries.items():
        among.setdefault(keys.last(key), []).append(key)
        asked.append(parse_request(key.removeprefix(keys.HOSTS).partition('/')[0], key, each.value))
    return counted(project, asked, partial(_record, store, Index(among)))


def _record(store: Store, among: Index, instance: str) -> Record | None:
    """What the compute that is believed has recorded of it; None for nothing that can be read."""
    try:
        entry = listed(store, instance, among).record
        return read_record(entry) if entry is not None else None
    except Unreadable:
        return None


def one_quota(store: Store, project: str) -> Quota:
    """The project's quota; NotFound if it has no limits."""
    found, _ = quota(store, project)
    if found is None:
        raise NotFound(f'{printable(project, 100)}: no limits are set for this project')
    return found
