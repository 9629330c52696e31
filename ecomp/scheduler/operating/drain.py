"""Disable and enable a compute, and see it emptied: by whoever has its instances destroyed, never by this."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ecomp.errors import NotFound, StillGoing
from ecomp.failpoints import failpoint
from ecomp.model import keys, status
from ecomp.model.host import there
from ecomp.model.record import SCHEDULED
from ecomp.placement import allocations, providers, traits
from ecomp.placement.client import Placement
from ecomp.scheduler.looking.find import FRESH
from ecomp.scheduler.looking.hosts import look
from ecomp.store.alive import is_alive
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.scheduler.changing.wait import Deadline

EVERY = 1.0
"""Seconds between two looks at what lives there: placement has nothing that could be watched."""


def disable(placement: Placement, compute: str, called: str) -> str:
    """Have nothing new placed on a compute; what was done, in one line. NotFound if it is none of ours.

    `called` is what a person calls it, as below.
    """
    _check(placement, compute, called)
    traits.make_known(placement, status.STATUS)
    done = traits.change(placement, compute, traits.TRAITS, status.disabled)
    failpoint('host-disabled')
    if not done:
        return f'{called}: is disabled already'
    return f'{called}: disabled: nothing new is placed there, and what lives there goes on'


def enable(store: Store, placement: Placement, compute: str, called: str) -> str:
    """Have it placed on again; what was done, in one line. NotFound if it is none of ours."""
    _check(placement, compute, called)
    alive = is_alive(store, compute)
    done = traits.change(placement, compute, traits.TRAITS, lambda names: status.enabled(names, alive))
    failpoint('host-enabled')
    if not done:
        return f'{called}: is enabled already' + ('' if alive else ', but not up')
    return f'{called}: enabled' + ('' if alive else ', as soon as its ecompute is started')


def inhabitants(store: Store, placement: Placement, compute: str, called: str) -> list[str]:
    """What lives on a compute, or holds something of it: a line with how many, and one for each."""
    held = allocations.of_provider(placement, compute)  # first: what was delivered since has its request by then
    etcd = look(store).etcd
    found = sorted(there(compute, etcd) | held.keys())
    lines = [f'{called}: {_count(len(found))} there']
    for instance in found:
        record = etcd.records.get(instance)
        lines.append(f'{etcd.called(instance)}: {record.state if record is not None else SCHEDULED}')
    return lines


def drained(
    store: Store, placement: Placement, compute: str, called: str, deadline: Deadline, tell: Callable[[str], None]
) -> None:
    """Return once nothing lives on a disabled compute, holds anything of it, or is on its way there.

    `tell` gets what is waited for, about once a second. StillGoing when the time is up: it stays disabled.
    """
    # Whoever asked placement before it was disabled may still claim there and deliver; those that ask now hear of it.
    # Of the former those that have announced themselves are seen, and all have within FRESH: by a key at /requests, or
    # by a mark in a queue, whose taker goes by what it has just read of its compute for a second at most.
    began = time.monotonic()
    placing, taking, all_announced = frozenset[str](), frozenset[tuple[str, int]](), False
    while True:
        late = time.monotonic() - began > FRESH
        # Before what is there: what they deliver meanwhile is then seen.
        attempts = store.snapshot(keys.ATTEMPTS, keys_only=True).entries
        # What is on no lease is nobody's, and nothing ends it.
        now, marks = frozenset(key for key, entry in attempts.items() if entry.lease), _marks(store)
        placing, taking = (placing & now, taking & marks) if all_announced else (now, marks)
        all_announced = late
        prefix = keys.request_prefix(compute)
        named = {key.removeprefix(prefix) for key in store.snapshot(prefix, keys_only=True).entries}
        # A key that names no instance no compute ever removes.
        left = set(filter(keys.is_uuid, named)) | allocations.of_provider(placement, compute).keys()
        if all_announced and not (left or placing or taking):
            return
        what = f'{_count(len(left))} to go' if left else 'requests under way, which may be for it'
        if deadline.spent >= deadline.seconds:
            raise StillGoing(f'{called}: {deadline.seconds:g} s are up, still waiting for: {what}; it stays disabled')
        tell(f'waiting for: {what}, {deadline.spent:.0f} s')
        time.sleep(max(min(EVERY, deadline.seconds - deadline.spent), 0))


def _marks(store: Store) -> frozenset[tuple[str, int]]:
    """The marks that computes have on requests in queues now, and their revisions."""
    waiting = store.snapshot(keys.QUEUES, keys_only=True).entries
    marks = ((key, each.revision) for key, each in waiting.items() if each.lease and key.endswith(keys.TAKER))
    return frozenset(marks)


def _check(placement: Placement, compute: str, called: str) -> None:
    name = providers.name(placement, compute)
    if name is None:
        raise NotFound(f'{called}: no such compute')
    if name != compute:
        raise NotFound(f'{called}: no such compute: placement has such a provider, {name}, but no ecompute made it')


def _count(number: int) -> str:
    return f'{number or "no"} instance{"" if number == 1 else "s"}'
