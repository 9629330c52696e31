"""Quotas: set by operators, counted where requests are delivered and removed (rule 7), and counted anew here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ecomp.errors import Conflict, NotFound, UnknownOutcome, Unreadable, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.order import parse_request
from ecomp.model.queue import parse_waiting
from ecomp.model.quota import INSTANCES, Demand, Quota, counted, counts, in_words, is_mute, parse_limits
from ecomp.model.text import printable
from ecomp.scheduler.looking.find import read_record
from ecomp.store.client import Delete, Put, Store
from ecomp.store.sharing import Index, listed, put_quota, quota

if TYPE_CHECKING:
    from ecomp.model.record import Record
    from ecomp.placement.client import Placement

TRIES = 50
"""Tries to write a quota: each that loses to another write waits up to PAUSE, and counts anew."""
PAUSE = 0.05
"""Seconds between two of them, at most."""


def check_limits(placement: Placement, words: Sequence[str]) -> str:
    """See that placement knows what these words limit; a remark, '' for none. UsageError.

    What is no limit any more is not looked at.
    """
    from ecomp.model.query import Named
    from ecomp.placement.traits import unknown_names

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
    for _ in range(TRIES):
        now, unchanged = quota(store, project)
        wanted = change(now)
        new = Quota(project, wanted.limits, _counted(store, project))
        failpoint('quota-counted')
        written: Put | Delete = put_quota(new) if wanted.limits else Delete(keys.quota(project))
        try:
            revision = store.commit([unchanged], [written])
        except UnknownOutcome:
            continue  # done once more it is no other
        if revision is None:
            time.sleep(random.uniform(0, PAUSE))
            continue
        if not wanted.limits:
            return None
        if now is not None:
            return new
        failpoint('quota-reckoned')
    raise Conflict(f'quota of project {printable(project)}: changed by somebody else all the time; try again')


def _counted(store: Store, project: str) -> dict[str, int]:
    """What a project has, by the requests there are."""
    # Those that wait first: what is moved meanwhile is seen twice, and counts once.
    waiting = store.snapshot(keys.QUEUES).entries
    asked: list[Demand] = [parse_waiting(key, each.value) for key, each in waiting.items()]
    requests, among = store.snapshot(keys.HOSTS).entries, dict[str, list[str]]()
    for key in requests:
        among.setdefault(keys.last(key), []).append(key)
    for key, entry in requests.items():
        compute = key.removeprefix(keys.HOSTS).partition('/')[0]
        wish = parse_request(compute, key, entry.value)
        asked += counts(wish, _record(store, Index(among), wish.instance) if is_mute(wish) else None)
    return counted(project, asked)


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
