"""Disable and enable a compute, wait until it is drained, and forget one that is dead for good.

Draining destroys nothing: whoever owns the instances does that.

Forgetting removes the provider and what was left of instances that were to be destroyed. All is read first, and
nothing is removed while anything lives there. Then the claims are released, then the keys deleted, each instance in
one transaction that also compares that the compute is still silent, and the provider last: after a kill at any step
the same command continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ecomp.errors import Conflict, EcompError, NotFound, StillGoing
from ecomp.failpoints import failpoint
from ecomp.model import keys, status
from ecomp.model.host import QUOTED, InPlacement, Leftovers, leftovers, refusal, there
from ecomp.model.order import Request
from ecomp.model.record import GONE, SCHEDULED, Record, new_record
from ecomp.model.text import some
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import release
from ecomp.placement.client import Placement
from ecomp.scheduler.looking.find import FRESH
from ecomp.scheduler.looking.hosts import Survey, look
from ecomp.store.client import Delete, Store, Unchanged, in_requests, is_alive, silence, until_committed, wanted
from ecomp.store.sharing import note_released, write_end

if TYPE_CHECKING:
    from ecomp.scheduler.changing.wait import Deadline

EVERY = 1.0
"""Seconds between two looks at what lives there: placement has nothing that could be watched."""


def disable(placement: Placement, compute: str, called: str) -> str:
    """Have nothing new placed on a compute; what was done, in one line. NotFound if it is none of ours.

    `called` is what a person calls it, as below.
    """
    _check(placement, compute, called)
    providers.make_known(placement, status.STATUS)
    done = providers.change_names(placement, compute, providers.TRAITS, status.disabled)
    failpoint('host-disabled')
    if not done:
        return f'{called}: is disabled already'
    return f'{called}: disabled: nothing new is placed there, and what lives there goes on'


def enable(store: Store, placement: Placement, compute: str, called: str) -> str:
    """Have it placed on again; what was done, in one line. NotFound if it is none of ours."""
    _check(placement, compute, called)
    alive = is_alive(store, compute)
    done = providers.change_names(placement, compute, providers.TRAITS, lambda names: status.enabled(names, alive))
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


TRIES = 5
"""Looks at it all; where something is changed after each of them, that is said."""

UNSEEN = 'its host was forgotten: nobody saw its guest end'
"""The fault of an instance that ends like this: on a host that was only cut off, its domain still runs."""


@dataclass(frozen=True)
class _Both:
    """Both planes as read: the provider (None: placement has none), its consumers if it is ours, and etcd.

    `is_awaited`: placement knows the compute, and a request waits in a queue. After a restore of both, the compute may
    run what waits.
    """

    provider: InPlacement | None
    held: Mapping[str, object]
    seen: Survey
    at_it: frozenset[str]
    is_awaited: bool


class _Changed(Exception):
    """Somebody changed what was read: read again."""


def forget(
    store: Store,
    placement: Placement,
    compute: str,
    called: str,
    now: Callable[[], str],
    tell: Callable[[str], None],
    fenced: bool = False,
) -> None:
    """Remove a compute from both planes, and its host's name. `tell` gets a sentence for each thing removed.

    Args:
        called: what a person calls the compute.
        fenced: the operator says that the machine is off for good, so that no guest runs there any more. Without that
            nothing is forgotten that holds a claim, or while a request waits in a queue: an instance could be placed
            again while it runs (rule 13; after a restore of etcd and placement no claim says so).

    Raises:
        NotFound: it is no compute of ours.
        Conflict: it is alive, something lives there, it holds claims and is not fenced, or it came back meanwhile.
    """
    removal = _Removal(store, placement, compute, called, now, tell)

    def attempt() -> _Both | None:
        planes = _read(store, placement, compute)
        left = _allowed(compute, called, planes, silence(store, compute), fenced)
        try:
            removal.remove(planes.seen, left)
        except _Changed:
            return None
        return planes

    lost = Conflict(f'compute {called}: changed by somebody else all the time; try again')
    planes = until_committed(attempt, lost, TRIES)
    failpoint('host-emptied')
    if planes.provider is not None and planes.provider.is_ours:
        try:
            providers.delete(placement, compute)
        except Conflict as error:
            raise Conflict(f'compute {called}: its resource provider stays: {error}') from error
        tell(f'{called}: its resource provider is removed')
    failpoint('host-unregistered')
    # Last: until then it can be called by its name.
    silent, name = silence(store, compute), store.get(keys.hostname(compute))
    last = [each.key for each in (silent, name) if each is not None and each.revision]
    if silent is not None and last and store.commit([silent], list(map(Delete, last))) is not None:
        if silent.revision:
            tell(f'{silent.key}: removed: it was on no lease')
        if name is not None and planes.provider is None:
            tell(f'{called}: its name is forgotten')
    # Between the last look and the removal it may have started, and it registers only then.
    if is_alive(store, compute):
        raise Conflict(f'compute {called} came back while it was being forgotten: restart its ecompute')


def _read(store: Store, placement: Placement, compute: str) -> _Both:
    # placement first: what is claimed since cannot be in it, and what was delivered since has its key by then. Then who
    # is at what, and /hosts last: requests move there.
    provider, held = None, {}
    name = providers.name(placement, compute)
    if name is not None:
        provider = InPlacement(compute, name, providers.shares(placement, [compute]).get(compute, {}))
        if provider.is_ours:
            held = allocations.of_provider(placement, compute)
    placing = frozenset(in_requests(store.snapshot(keys.ATTEMPTS)))
    is_awaited = name is not None and bool(store.snapshot(keys.QUEUES, keys_only=True).entries)
    return _Both(provider, held, look(store), placing, is_awaited)


def _allowed(compute: str, called: str, planes: _Both, silent: Unchanged | None, fenced: bool) -> Leftovers:
    """What is left to be removed. Conflict, NotFound. `silent`: see silence(); with a revision there is that key."""
    reason = refusal(compute, planes.seen.etcd, planes.held, planes.at_it)
    if reason is not None:
        raise Conflict(f'compute {called} is not forgotten: {reason}')
    if (planes.held or planes.is_awaited) and not fenced:
        named = some(list(map(planes.seen.etcd.called, sorted(planes.held))), QUOTED)
        waits = 'after a restore it may run what waits in a queue'
        may_run = f'it holds claims and may run {named}' if named else waits
        cure = f'bring it back or, if the machine is off for good, `eschedule host forget {called} --fenced`'
        raise Conflict(f'compute {called} is not forgotten: {may_run}. Fix: {cure}')
    left = leftovers(compute, planes.seen.etcd, planes.held)
    provider = planes.provider
    is_remembered = compute in planes.seen.etcd.computes.remembered
    has_key = silent is not None and silent.revision > 0
    if left == Leftovers() and provider is None and not is_remembered and not has_key:
        raise NotFound(f'{called}: no such compute')
    if left == Leftovers() and provider is not None and not provider.is_ours and not is_remembered:
        why = f'placement has such a provider, {provider.name}, but no ecompute made it'
        raise NotFound(f'{called}: no such compute: {why}')
    return left


@dataclass(frozen=True)
class _Removal:
    """The removal of what is left of a compute, as it was read; see forget()."""

    store: Store
    placement: Placement
    compute: str
    called: str
    now: Callable[[], str]
    tell: Callable[[str], None]

    def remove(self, seen: Survey, left: Leftovers) -> None:
        """Remove it all. _Changed: something is not as it was read, and all before it is removed."""
        silent = silence(self.store, self.compute)
        if silent is None:
            raise _Changed

        def as_read(name: str) -> list[Unchanged]:
            read = keys.request(self.compute, name), keys.record(self.compute, name), keys.old_record(name)
            return [silent, *(Unchanged(key, seen.entries[key].revision if key in seen.entries else 0) for key in read)]

        for instance in left.ended:
            self._end(instance, seen, as_read(instance))
        for name in left.stray:
            self._remove_stray(name, as_read(name))
        for consumer in left.orphans:
            self._release(consumer)
            self.tell(f'{consumer}: its claim is released: no request stands behind it')

    def _end(self, instance: str, seen: Survey, as_read: Sequence[Unchanged]) -> None:
        """Carry out the destroy of an instance that was here."""
        self._release(instance, its_end=True)
        failpoint('host-released')
        record = _ended(self.compute, seen, instance, self.now())
        removed = [keys.request(self.compute, instance), keys.booted(instance)]
        if keys.record(self.compute, instance) not in seen.entries:
            removed.append(keys.old_record(instance))
        if write_end(self.store, record, as_read, removed) is None:
            raise _Changed
        done = 'its claim and its keys are removed, its record says gone'
        self.tell(f'{instance}: its destroy had been accepted: {done}')

    def _remove_stray(self, name: str, as_read: Sequence[Unchanged]) -> None:
        """Remove a request that is none. Conflict: its key is no text."""
        key = keys.request(self.compute, name)
        if self.store.commit(as_read, [Delete(key)]) is None:
            # Bytes that are no text are read as this character, by which the key is not found again.
            if '\ufffd' in name and self.store.get(key) is None:
                raise Conflict(_no_text(self.compute, self.called))
            raise _Changed
        self.tell(f'{key}: removed: no compute would have carried it out')

    def _release(self, consumer: str, its_end: bool = False) -> None:
        """Release what a consumer holds, if it holds anything here. `its_end`: its request here is a destroy.

        Nobody claims on a silent compute, and whoever claims elsewhere for this consumer moves the generation read.
        """

        def needed(holding: Mapping[str, allocations.Consumer]) -> Collection[str]:
            on = holding[consumer].allocations
            if self.compute not in on:
                return holding
            # What it claimed for a request that waits in a queue, nobody but itself would have taken there.
            behind = {consumer: () if its_end else on}
            if is_alive(self.store, self.compute) or wanted(self.store, behind, False):
                raise _Changed
            return ()

        # Also of one that ends: two may forget at once, and once its record is cleared its uuid may be used again.
        if release(self.placement, [consumer], needed, partial(note_released, self.store))[consumer] is False:
            raise _Changed


def _no_text(compute: str, called: str) -> str:
    prefix = keys.request_prefix(compute)
    return (
        f'compute {called} is not forgotten: a key below {prefix} is no text, so etcdctl has to remove it: '
        f'`etcdctl get --keys-only --prefix {prefix} | cat -v` shows it'
    )


def _ended(compute: str, seen: Survey, instance: str, now: str) -> Record:
    record, wish = seen.etcd.records.get(instance), seen.etcd.requests.get(compute, {}).get(instance)
    if record is None:
        if not isinstance(wish, Request):
            raise EcompError(f'{instance}: neither a record nor a request')  # leftovers() names no such
        record = new_record(compute, wish, now)
    # An error stays: by it is known that its share of a quota was given back (ecomp.store.sharing).
    return replace(record.at(GONE, now, 'gone'), fault=UNSEEN)
