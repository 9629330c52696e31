"""Flavors and quotas, which operators set for all users (rule: change-with-delivery)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ecomp.errors import Conflict, EcompError, NotFound, Unreachable, Unreadable, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import list_missing_classes
from ecomp.model.flavor import Flavor, check_flavor_name, parse_flavor
from ecomp.model.order import parse_request
from ecomp.model.quota import INSTANCES, Demand, Quota, format_quota, parse_limits, sum_charges
from ecomp.model.record import Record
from ecomp.model.stored import decode_at, encode
from ecomp.model.text import format_suggestion, make_printable
from ecomp.scheduler.queries.find import read_record
from ecomp.shared.names import load_quota, make_quota_put
from ecomp.shared.places import KeyIndex, find_by_listing
from ecomp.store.client import Delete, Entry, Put, Settlement, Store, Unchanged, retry_until_committed

if TYPE_CHECKING:
    from ecomp.placement.client import Placement


def load_flavor(store: Store, name: str) -> tuple[Flavor, int]:
    entry = store.get(keys.flavor(check_flavor_name(name)))
    if entry is None:
        raise make_no_such_flavor(name, list_flavor_names(store))
    return read_flavor(entry), entry.revision


def list_flavors(store: Store) -> tuple[dict[str, Flavor], list[EcompError]]:
    flavors, errors = dict[str, Flavor](), list[EcompError]()
    for entry in store.snapshot(keys.FLAVORS).entries.values():
        try:
            flavors[keys.get_last_part(entry.key)] = read_flavor(entry)
        except Unreadable as error:
            errors.append(error)
    return dict(sorted(flavors.items())), errors


def put_flavor(store: Store, placement: Placement, name: str, text: str) -> str:
    """Create or replace a flavor, or raise UsageError if it is invalid, and return a sentence."""
    from ecomp.model.query import QueryNames
    from ecomp.placement.providers import find_unknown_names

    try:
        flavor = parse_flavor(name, text)
    except ValueError as error:
        raise UsageError(f'flavor {make_printable(name, 100)}: {error}') from error
    named = QueryNames(frozenset(flavor.resources), frozenset({*flavor.required, *flavor.forbidden}))
    unknown = find_unknown_names(placement, named)
    if unknown.standard:
        raise UsageError(f'flavor {name}: {unknown.standard}')
    key, value = keys.flavor(name), encode(flavor, **store.make_stamp())
    previous = store.get(key)
    _commit_flavor(store, key, previous, Put(key, value), flavor)
    lacking = ', '.join(list_missing_classes(flavor.resources))
    remark = f'; it lacks {lacking}, which each request has to add in a query' if lacking else ''
    remark += f'; {unknown.custom}: no compute can run its instances yet' if unknown.custom else ''
    return f'flavor {name}: {"changed" if previous else "created"}; existing instances stay as they are{remark}'


def delete_flavor(store: Store, name: str) -> str:
    key = keys.flavor(name)
    previous = store.get(key)
    if previous is None:
        suggestion = format_suggestion(name, list_flavor_names(store))
        raise NotFound(f'{make_printable(name, 100)}: etcd has no such flavor{suggestion}')
    _commit_flavor(store, key, previous, Delete(key), None)
    message = f'flavor {name}: removed; existing instances stay as they are'
    try:
        queue_keys = store.snapshot(keys.queue(name, ''), keys_only=True).entries
    except Unreachable:
        return message
    waiting = sum(keys.parse_queue_key(queue_key) is not None for queue_key in queue_keys)
    stuck = f'no compute takes the {waiting} request{"" if waiting == 1 else "s"} in its queue'
    return message + (f'; {stuck}. Fix: set the flavor again, or destroy the waiting instances' if waiting else '')


def make_no_such_flavor(name: str, names: Iterable[str]) -> NotFound:
    problem = f'{make_printable(name, 100)}: no such flavor{format_suggestion(name, names)}'
    return NotFound(f'{problem}. Try: eschedule flavor')


def list_flavor_names(store: Store) -> list[str]:
    return [keys.get_last_part(key) for key in store.snapshot(keys.FLAVORS, keys_only=True).entries]


def read_flavor(entry: Entry) -> Flavor:
    return decode_at(entry.key, Flavor, entry.value, name=keys.get_last_part(entry.key))


def _commit_flavor(store: Store, key: str, previous: Entry | None, change: Put | Delete, new: Flavor | None) -> None:
    if store.commit([Unchanged(key, previous.revision if previous else 0)], [change], Settlement()) is not None:
        return
    current = store.get(key)
    if (read_flavor(current) if current else None) != new:
        raise EcompError(f'{key}: another process changed it, or it was not written. Try: the same command again')


# Tries to write a quota. After each that loses to another write the usage is counted again.
MAX_TRIES = 50
# Seconds between two tries, at most.
MAX_PAUSE_SECONDS = 0.05


def describe_new_classes(placement: Placement, arguments: Sequence[str]) -> str:
    """Return a remark on CUSTOM_ classes that placement lacks, or raise UsageError for others."""
    from ecomp.model.query import QueryNames
    from ecomp.placement.providers import find_unknown_names

    try:
        classes = {name for name, maximum in parse_limits(arguments).items() if maximum is not None} - {INSTANCES}
    except ValueError as error:
        raise UsageError(f'quota set: {make_printable(str(error))}') from error
    unknown = find_unknown_names(placement, QueryNames(frozenset(classes), frozenset()), more_suggestions=(INSTANCES,))
    if unknown.standard:
        raise UsageError(f'quota set: {unknown.standard}')
    return unknown.custom


def set_limits(store: Store, project: str, arguments: Sequence[str]) -> str:
    """Set limits (VCPU=10, VCPU=none removes it), recount the usage, and return a sentence."""
    try:
        new_limits = parse_limits(arguments)
    except ValueError as error:
        raise UsageError(f'quota set: {make_printable(str(error))}') from error

    def merge_limits(current: Quota | None) -> Quota:
        limits = {**(current.limits if current else {}), **new_limits}
        return Quota(project, {name: maximum for name, maximum in limits.items() if maximum is not None})

    changed = recount_quota(store, project, merge_limits)
    if changed is None:
        return f'quota of project {make_printable(project)}: the project no longer has limits'
    exceeded = [name for name, maximum in changed.limits.items() if changed.used.get(name, 0) > maximum]
    more = f'; its usage of {" and ".join(exceeded)} exceeds the limit; existing instances stay as they are'
    return f'quota of project {make_printable(project)}: {format_quota(changed)}{more if exceeded else ""}'


def recount_quota(store: Store, project: str, change: Callable[[Quota | None], Quota]) -> Quota | None:
    """Write a project's quota with the limits of `change` and a new count of its usage.

    `change` gets the current quota or None, perhaps again. Without limits the quota is deleted: the result is None.
    """

    def try_once() -> Quota | None:
        now, unchanged = load_quota(store, project)
        target = change(now)
        new = Quota(project, target.limits, _count_usage(store, project))
        failpoint('quota-counted')
        # This is the time of new limits: counting the usage again is no event.
        put = make_quota_put(new, **store.make_stamp())
        operation: Put | Delete = put if target.limits else Delete(put.key)
        # Deliveries and removals change an existing quota, so the count is valid if the quota is unchanged since. They
        # do not create a missing one, so a new quota is written twice.
        if store.commit([unchanged], [operation], Settlement()) is None:
            return None
        if target.limits and now is None:
            failpoint('quota-reckoned')
            return None
        return new

    problem = f'quota of project {make_printable(project)}: other processes keep changing it'
    lost = Conflict(f'{problem}. Try: the same command again')
    new = retry_until_committed(try_once, lost, MAX_TRIES, MAX_PAUSE_SECONDS)
    return new if new.limits else None


def _count_usage(store: Store, project: str) -> dict[str, int]:
    from ecomp.model.queue import parse_queue_entry  # 5 % of a claim's time, and some claims import this module

    # Queues first: an instance that moves in between is then read twice, and counted once.
    waiting = store.snapshot(keys.QUEUES).entries
    demands: list[Demand] = [parse_queue_entry(key, entry.value) for key, entry in waiting.items()]
    request_keys: dict[str, list[str]] = {}
    for key, entry in store.snapshot(keys.HOSTS).entries.items():
        request_keys.setdefault(keys.get_last_part(key), []).append(key)
        demands.append(parse_request(key.removeprefix(keys.HOSTS).partition('/')[0], key, entry.value))
    return sum_charges(project, demands, partial(_read_record, store, KeyIndex(request_keys)))


def _read_record(store: Store, key_index: KeyIndex, instance: str) -> Record | None:
    try:
        entry = find_by_listing(store, instance, key_index).record
        return read_record(entry) if entry is not None else None
    except Unreadable:
        return None


def require_quota(store: Store, project: str) -> Quota:
    current, _ = load_quota(store, project)
    if current is None:
        raise NotFound(f'{make_printable(project, 100)}: no limits are set for this project')
    return current
