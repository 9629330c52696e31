"""Forget a compute that is dead for good: its provider, and what was left of instances that were to be destroyed.

All is read first, and nothing is removed while anything lives there. Then the claims go, then the keys, each instance
in one transaction that also compares that the compute is still silent, and the provider last: killed at any step, the
same command again goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ecomp.errors import Conflict, EcompError, NotFound, UnknownOutcome
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.host import InPlacement, Leftovers, leftovers, refusal
from ecomp.model.instance import Request
from ecomp.model.record import GONE, KEPT, Record, new_record, to_json
from ecomp.placement import allocations as ledger
from ecomp.placement import providers
from ecomp.placement.client import Placement
from ecomp.scheduler.hosts import Seen, look
from ecomp.store.client import Delete, Put, Store, Unchanged
from ecomp.store.names import Change
from ecomp.store.released import note
from ecomp.store.requests import in_requests, wanted
from ecomp.store.sharing import commit_with, ended, nothing

TRIES = 5

UNSEEN = 'its host was forgotten: nobody saw its guest end'
"""The fault of an instance that ends like this: on a host that was only cut off, its domain still runs."""


@dataclass(frozen=True)
class _Both:
    """Both planes as read: the provider (None: placement has none), its consumers if it is ours, and etcd."""

    provider: InPlacement | None
    held: Mapping[str, object]
    seen: Seen
    at_it: frozenset[str]


class _Changed(Exception):
    """Somebody changed what was read: read again."""


def forget(
    store: Store, placement: Placement, compute: str, now: Callable[[], str], tell: Callable[[str], None]
) -> None:
    """Remove a compute from both planes. `tell` gets a sentence for each thing removed.

    Errors: NotFound (no compute of ours), Conflict (it is alive, something lives there, or it came back meanwhile).
    """
    for _ in range(TRIES):
        planes = _read(store, placement, compute)
        left = _allowed(compute, planes)
        try:
            _remove(store, placement, compute, planes.seen, left, now, tell)
            break
        except (_Changed, UnknownOutcome):
            continue  # the next look says what became of it
    else:
        raise Conflict(f'compute {compute}: changed by somebody else all the time; try again')
    failpoint('host-emptied')
    if planes.provider is not None and planes.provider.is_ours:
        try:
            providers.delete(placement, compute)
        except Conflict as error:
            raise Conflict(f'compute {compute}: its resource provider stays: {error}') from error
        tell(f'{compute}: its resource provider is removed')
    # Between the last look and the removal it may have started, and it registers only then.
    if store.get(keys.compute(compute)) is not None:
        raise Conflict(f'compute {compute} came back while it was being forgotten: restart its ecompute')


def _read(store: Store, placement: Placement, compute: str) -> _Both:
    # placement first: what is claimed since cannot be in it, and what was delivered since has its key by then. Then who
    # is at what, and /hosts last: requests move there.
    provider, held = None, {}
    name = providers.name(placement, compute)
    if name is not None:
        provider = InPlacement(compute, name, providers.shares(placement, [compute]).get(compute, {}))
        if provider.is_ours:
            held = ledger.of_provider(placement, compute)
    placing = frozenset(in_requests(store.snapshot(keys.REQUESTS)))
    return _Both(provider, held, look(store), placing)


def _allowed(compute: str, planes: _Both) -> Leftovers:
    reason = refusal(compute, planes.seen.etcd, planes.held, planes.at_it)
    if reason is not None:
        raise Conflict(f'compute {compute} is not forgotten: {reason}')
    left = leftovers(compute, planes.seen.etcd, planes.held)
    provider = planes.provider
    if left == Leftovers() and provider is None:
        raise NotFound(f'{compute}: no such compute')
    if left == Leftovers() and provider is not None and not provider.is_ours:
        why = f'placement has such a provider, {provider.name}, but no ecompute made it'
        raise NotFound(f'{compute}: no such compute: {why}')
    return left


def _remove(
    store: Store,
    placement: Placement,
    compute: str,
    seen: Seen,
    left: Leftovers,
    now: Callable[[], str],
    tell: Callable[[str], None],
) -> None:
    silent = Unchanged(keys.compute(compute), 0)

    def commit(instance: str, operations: list[Put | Delete], shared: Callable[[], Change] = nothing) -> None:
        written = keys.host(compute, instance), keys.record(compute, instance), keys.old_record(instance)
        unchanged = [Unchanged(key, seen.entries[key].revision if key in seen.entries else 0) for key in written]
        if commit_with(store, [silent, *unchanged], operations, shared) is None:
            raise _Changed

    for instance in left.ended:
        _release(store, placement, compute, instance, its_end=True)
        failpoint('host-released')
        record = _ended(compute, seen, instance, now())
        put = Put(keys.record(compute, instance), to_json(record), store.grant(KEPT[GONE]))
        removed: list[Put | Delete] = [put, Delete(keys.host(compute, instance)), Delete(keys.booted(instance))]
        if put.key not in seen.entries:
            removed.append(Delete(keys.old_record(instance)))
        commit(instance, removed, partial(ended, store, record))
        tell(f'{instance}: its destroy had been accepted: its claim and its keys are removed, its record says gone')
    for name in left.stray:
        commit(name, [Delete(keys.host(compute, name))])
        tell(f'{keys.host(compute, name)}: removed: no compute would have carried it out')
    for consumer in left.orphans:
        _release(store, placement, compute, consumer)
        tell(f'{consumer}: its claim is released: no request stands behind it')


def _release(store: Store, placement: Placement, compute: str, consumer: str, its_end: bool = False) -> None:
    """Release what a consumer holds, if it holds anything here. `its_end`: its request here is a destroy.

    Nobody claims on a silent compute, and whoever claims elsewhere for this consumer moves the generation read.
    """

    def needed(holding: Mapping[str, ledger.Consumer]) -> Collection[str]:
        on = holding[consumer].allocations
        if compute not in on:
            return holding
        # What it claimed for a request that waits in a queue, nobody but itself would have taken there.
        if store.get(keys.compute(compute)) is not None or wanted(store, {consumer: () if its_end else on}, False):
            raise _Changed
        return ()

    # A uuid is never used twice: nobody claims again for one that has ended.
    noting = (lambda _: None) if its_end else partial(note, store)
    if not ledger.release_unless(placement, [consumer], needed, noting)[consumer]:
        held = ledger.consumer(placement, consumer)
        if compute in held.allocations:
            raise _Changed


def _ended(compute: str, seen: Seen, instance: str, now: str) -> Record:
    record, wish = seen.etcd.records.get(instance), seen.etcd.requests.get(compute, {}).get(instance)
    if record is None:
        if not isinstance(wish, Request):
            raise EcompError(f'{instance}: neither a record nor a request')  # leftovers() names no such
        record = new_record(compute, wish, now)
    return replace(record.at(GONE, now, 'gone'), error=None, fault=UNSEEN)
