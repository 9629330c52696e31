"""Disable, enable and drain a compute, which destroys nothing, and forget one that is gone for good.

Forgetting reads both planes and refuses while an instance lives there. It releases claims, deletes keys (each
transaction compares that the compute is silent), the provider, and the host name: after a kill the command continues.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ecomp.errors import Conflict, EcompError, NotFound, StillGoing, Unreachable
from ecomp.failpoints import failpoint
from ecomp.model import keys, status
from ecomp.model.allocation import Allocations
from ecomp.model.forget import find_obstacle
from ecomp.model.host import MAX_QUOTED_INSTANCES, is_ours
from ecomp.model.order import DRAIN, STOP, PowerAction, Request
from ecomp.model.record import GONE, SCHEDULED, UNSEEN_END_FAULT, Record, is_stopped_by_drain, make_record, plan_drain
from ecomp.model.text import join_some, replace_uuids
from ecomp.model.world import Planes, ProviderState, World
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import release
from ecomp.placement.client import Placement
from ecomp.scheduler.queries.find import MAX_OFFER_AGE_SECONDS
from ecomp.scheduler.queries.hosts import read_world
from ecomp.store.client import (
    NOT_QUEUED,
    Delete,
    Store,
    Unchanged,
    find_needed,
    is_alive,
    read_silence_condition,
    retry_until_committed,
)
from ecomp.store.sharing import note_released, read_index, write_final_record

if TYPE_CHECKING:
    from ecomp.scheduler.changes.wait import Deadline

# Seconds between two reads while waiting: placement cannot be watched.
POLL_SECONDS = 1.0


def disable(placement: Placement, compute: str, display_name: str) -> str:
    """Disable a compute by a trait, made if missing; return a sentence. NotFound unless ecompute made its provider."""
    check_provider(placement, compute, display_name)
    providers.create_missing_traits(placement, status.STATUS_TRAITS)
    changed = providers.change_names(placement, compute, providers.TRAITS, status.apply_disable)
    failpoint('host-disabled')
    if not changed:
        return f'{display_name}: is already disabled'
    return f'{display_name}: disabled: no new instances are placed there; those that run there continue'


def enable(store: Store, placement: Placement, compute: str, display_name: str) -> str:
    """Allow placement on a compute, after its next start if not alive; return a sentence. NotFound as disable()."""
    check_provider(placement, compute, display_name)
    alive = is_alive(store, compute)
    changed = providers.change_names(
        placement, compute, providers.TRAITS, lambda names: status.apply_enable(names, alive)
    )
    failpoint('host-enabled')
    if not changed:
        return f'{display_name}: is already enabled' + ('' if alive else ', but not alive')
    return f'{display_name}: enabled' + ('' if alive else '; instances are placed there once its ecompute is started')


def list_inhabitants(store: Store, placement: Placement, compute: str, display_name: str) -> list[str]:
    """Return lines on the instances on a compute or with a claim there: their number, then each. Raises NotFound."""
    # First: later deliveries are then seen as requests.
    consumers = allocations.read_provider_allocations(placement, compute)
    world = read_world(store)
    instances = sorted(world.find_inhabitants(compute).present | consumers.keys())
    lines = [f'{display_name}: {_format_count(len(instances))} there']
    for instance in instances:
        record = world.records.get(instance)
        lines.append(f'{world.format_instance(instance)}: {record.state if record is not None else SCHEDULED}')
    return lines


def change_guests(
    store: Store, compute: str, action: str, changed_guests: set[str], report: Callable[[str], None]
) -> Collection[str]:
    """STOP the guests of a compute for a drain, or START those that a drain stopped.

    Adds to `changed_guests`, and stops none of these again. Returns those not off yet, or whose START was refused.
    """
    from ecomp.scheduler.changes.change import change_power

    world = read_world(store)
    requests = world.requests_at.get(compute, {})
    powers = {name: request.power for name, request in requests.items() if isinstance(request, Request)}
    present = world.find_inhabitants(compute).present
    records = {instance: world.records.get(instance) for instance in sorted(present)}
    to_stop, to_await = plan_drain(records, powers, changed_guests)
    to_start = [instance for instance in records if is_stopped_by_drain(records[instance], powers.get(instance))]
    to_change = to_stop if action == STOP else to_start
    key_index = read_index(store) if to_change else None
    for instance in to_change:
        change = PowerAction(action, keys.make_uuid(os.urandom(16)), DRAIN if action == STOP else '')
        try:
            sentence = change_power(store, instance, change, key_index).message
            changed_guests.add(instance)
        except Unreachable:
            raise
        except EcompError as error:  # it has ended since, or its request is malformed
            sentence = str(error)
        report(replace_uuids(sentence, {instance: world.format_instance(instance)}))
    return [*to_change, *to_await] if action == STOP else set(to_change) - changed_guests


def wait_until_drained(  # noqa: PLR0913
    store: Store,
    placement: Placement,
    compute: str,
    display_name: str,
    deadline: Deadline,
    report: Callable[[str], None],
    stop_guests: Callable[[], Collection[str]] | None = None,
) -> None:
    """Return once a compute, which the caller has disabled, has no request or claim, and earlier attempts are finished.

    With `stop_guests`, instead once this returns no instance that is not off. It takes at least MAX_OFFER_AGE_SECONDS.
    `report` is called each second. StillGoing at the deadline, NotFound.
    """
    # An attempt that queried placement before may still claim here; within MAX_OFFER_AGE_SECONDS it has a key below
    # /requests. The compute trusts its traits for up to a second, and may take from a queue: then it has a taker key.
    began = time.monotonic()
    end = 'leave' if stop_guests is None else 'stop'
    placing, taking, all_announced = frozenset[str](), frozenset[tuple[str, int]](), False
    while True:
        is_late = time.monotonic() - began > MAX_OFFER_AGE_SECONDS
        # Attempts before requests: what they deliver in between is then seen.
        attempts = store.snapshot(keys.ATTEMPTS, keys_only=True).entries
        # An attempt's key without a lease has no owner, and would stay.
        current, taker_keys = frozenset(key for key, entry in attempts.items() if entry.lease), _read_taker_keys(store)
        placing, taking = (placing & current, taking & taker_keys) if all_announced else (current, taker_keys)
        all_announced = is_late
        prefix = keys.request_prefix(compute)
        requested = {key.removeprefix(prefix) for key in store.snapshot(prefix, keys_only=True).entries}
        # No compute removes a key that does not name an instance.
        remaining: Collection[str] = (
            set(filter(keys.is_uuid, requested)) | allocations.read_provider_allocations(placement, compute).keys()
            if stop_guests is None
            else stop_guests()
        )
        if all_announced and not (remaining or placing or taking):
            return
        rest = f'{_format_count(len(remaining))} to {end}' if remaining else 'requests that may still be placed there'
        if deadline.elapsed >= deadline.seconds:
            problem = f'{display_name}: timed out after {deadline.seconds:g} s, still waiting for {rest}'
            raise StillGoing(f'{problem}; the host stays disabled')
        report(f'waiting for {rest}, {deadline.elapsed:.0f} s')
        time.sleep(max(min(POLL_SECONDS, deadline.seconds - deadline.elapsed), 0))


def _read_taker_keys(store: Store) -> frozenset[tuple[str, int]]:
    """Read the taker keys in the queues and their revisions; keys without a lease do not count."""
    waiting = store.snapshot(keys.QUEUES, keys_only=True).entries
    taker_keys = ((key, entry.revision) for key, entry in waiting.items() if entry.lease and key.endswith(keys.TAKER))
    return frozenset(taker_keys)


def check_provider(placement: Placement, compute: str, display_name: str) -> None:
    """Raise NotFound unless placement has the compute's provider and ecompute made it."""
    name = providers.read_provider_name(placement, compute)
    if name != compute:
        raise _make_not_found(display_name, name)


def _make_not_found(display_name: str, provider_name: str | None = None) -> NotFound:
    """Make the error for a uuid without a compute of ours; `provider_name` is that of a foreign provider."""
    why = f': placement has a provider with this uuid, {provider_name}, but no ecompute created this provider'
    return NotFound(f'{display_name}: no host has this name or uuid{why if provider_name is not None else ""}')


def _format_count(number: int) -> str:
    """Format the number of instances; 0 is `no instances`."""
    return f'{number or "no"} instance{"" if number == 1 else "s"}'


# Tries to forget a compute, each after a new read of both planes.
MAX_TRIES = 5


class _StaleReadError(Exception):
    """A key or claim has changed since it was read: read again."""


def forget(  # noqa: PLR0913
    store: Store,
    placement: Placement,
    compute: str,
    display_name: str,
    now: Callable[[], str],
    report: Callable[[str], None],
    fenced: bool = False,
) -> None:
    """Remove a compute from placement and etcd; `report` gets a sentence for each removal.

    `now` returns the time in ISO form. Raises NotFound (no compute of ours), and Conflict if it is alive or came back,
    an instance lives there, its provider stays, or keys keep changing. `fenced`: the operator confirms that the machine
    is off for good. Otherwise Conflict for a compute with claims, or known to placement while any request is queued,
    too: it may run these instances (rule: claim-stays), also if a restore of both planes lost the claim.
    """
    removal = _Removal(store, placement, compute, display_name, now, report)

    def try_once() -> World | None:
        world = _read_planes(store, placement, compute)
        _check_allowed(compute, display_name, world, fenced)
        try:
            removal.remove(world)
        except _StaleReadError:
            return None
        return world

    lost = Conflict(f'compute {display_name}: other processes keep changing it. Try: the same command again')
    provider = retry_until_committed(try_once, lost, MAX_TRIES).planes.providers.get(compute)
    failpoint('host-emptied')
    if provider is not None and provider.allocations is not None:
        try:
            providers.delete_provider(placement, compute)
        except Conflict as error:
            raise Conflict(f'compute {display_name}: its resource provider stays: {error}') from error
        report(f'{display_name}: its resource provider is removed')
    failpoint('host-unregistered')
    # The name last: until then the command can be repeated with it.
    silent, name = read_silence_condition(store, compute), store.get(keys.hostname(compute))
    last_keys = [entry.key for entry in (silent, name) if entry is not None and entry.revision]
    if silent is not None and last_keys and store.commit([silent], list(map(Delete, last_keys))) is not None:
        if silent.revision:
            report(f'{silent.key}: removed: it had no lease')
        if name is not None and provider is None:
            report(f'{display_name}: its host name is removed')
    # The compute may have started after the last read; it registers its provider at its start only.
    if is_alive(store, compute):
        raise Conflict(f'compute {display_name} was started while it was being forgotten. Fix: restart its ecompute')


def _read_planes(store: Store, placement: Placement, compute: str) -> World:
    """Read placement and etcd about the compute; consumers only of a provider that is ours."""
    # Placement first: a claim that is delivered later has its key in etcd by then. /hosts last: requests move there.
    states: dict[str, ProviderState] = {}
    if (name := providers.read_provider_name(placement, compute)) is not None:
        rooms = providers.read_rooms(placement, [compute]).get(compute, {})
        held = allocations.read_provider_allocations(placement, compute) if is_ours(compute, name, rooms) else None
        states[compute] = ProviderState(name, allocations=held)
    pending = {**store.snapshot(keys.ATTEMPTS).entries, **store.snapshot(keys.QUEUES, keys_only=True).entries}
    return read_world(store, Planes(states, pending))


def _check_allowed(compute: str, display_name: str, world: World, fenced: bool) -> None:
    """Raise Conflict if the compute must not be forgotten, NotFound if there is no such compute of ours."""
    reason = find_obstacle(world, compute)
    if reason is not None:
        raise Conflict(f'compute {display_name} is not forgotten: {reason}')
    consumers, provider = world.planes.list_consumers(compute), world.planes.providers.get(compute)
    # After a restore of both planes, a compute may run a queued request without a claim.
    may_run_queued = provider is not None and bool(world.select_prefix(keys.QUEUES))
    if (consumers or may_run_queued) and not fenced:
        named = join_some(list(map(world.format_instance, sorted(consumers))), MAX_QUOTED_INSTANCES)
        waits = 'it may run queued requests'
        may_run = f'it holds claims and may run {named}' if named else waits
        start = 'start ecompute on its host (after a restore of etcd: `ecompute --accept-new-etcd`)'
        cure = f'{start}; if the machine never comes back: `eschedule host forget {display_name} --fenced`'
        raise Conflict(f'compute {display_name} is not forgotten: {may_run}. Fix: {cure}')
    there = world.find_inhabitants(compute)
    if consumers or there.destroyed or there.stray or compute in world.named_computes.stored_hostnames:
        return
    if provider is None and world.get_value(keys.compute(compute)) is None:
        raise _make_not_found(display_name)
    if provider is not None and provider.allocations is None:
        raise _make_not_found(display_name, provider.name)


@dataclass(frozen=True)
class _Removal:
    """The removal of a compute's leftovers; see forget()."""

    store: Store
    placement: Placement
    compute: str
    display_name: str
    now: Callable[[], str]
    report: Callable[[str], None]

    def remove(self, world: World) -> None:
        """Remove and report leftovers; _StaleReadError if the compute is alive, and errors of the methods below."""
        silent = read_silence_condition(self.store, self.compute)
        if silent is None:
            raise _StaleReadError

        def make_conditions(name: str) -> list[Unchanged]:
            paths = keys.request(self.compute, name), keys.record(self.compute, name)
            return [
                silent,
                *(Unchanged(key, world.get_revision(key)) for key in paths),
            ]

        there = world.find_inhabitants(self.compute)
        for instance in sorted(there.destroyed):
            self._complete_destroy(instance, world, make_conditions(instance))
        for name in sorted(there.stray):
            self._remove_stray(name, make_conditions(name))
        for consumer in sorted(set(world.planes.list_consumers(self.compute)) - there.destroyed):
            self._release(consumer)
            self.report(f'{consumer}: its claim is released: no request owns it')

    def _complete_destroy(self, instance: str, world: World, conditions: Sequence[Unchanged]) -> None:
        """Release the claim, write the final record and delete the keys of an accepted destroy, or _StaleReadError."""
        self._release(instance, is_destroyed=True)
        failpoint('host-released')
        record = _make_end_record(self.compute, world, instance, self.now())
        removed = [keys.request(self.compute, instance), keys.address(instance)]
        if write_final_record(self.store, record, conditions, removed) is None:
            raise _StaleReadError
        done = 'its claim and its keys are removed, and its state is gone'
        self.report(f'{instance}: its accepted destroy is completed: {done}')

    def _remove_stray(self, name: str, conditions: Sequence[Unchanged]) -> None:
        """Delete a request that no compute carries out; _StaleReadError, or Conflict if its key is undecodable."""
        key = keys.request(self.compute, name)
        if self.store.commit(conditions, [Delete(key)]) is None:
            # Undecodable bytes of a key are read as this character, with which the key cannot be found again.
            if '\ufffd' in name and self.store.get(key) is None:
                prefix = keys.request_prefix(self.compute)
                raise Conflict(
                    f'compute {self.display_name} is not forgotten: a key below {prefix} is not UTF-8 (`etcdctl get '
                    f'--keys-only --prefix {prefix} | cat -v` shows the key). Fix: remove the key with etcdctl'
                )
            raise _StaleReadError
        self.report(f'{key}: removed: no compute carries out this request')

    def _release(self, consumer: str, is_destroyed: bool = False) -> None:
        """Release and note a consumer's claim, if on this compute; _StaleReadError if in use, or the compute is alive.

        `is_destroyed`: its request here is a tombstone, which keeps no claim. A silent compute claims nothing, and a
        claim elsewhere moves the generation that was read.
        """

        def find_kept(holding: Mapping[str, Allocations]) -> Collection[str]:
            if self.compute not in holding[consumer]:
                return holding
            made = () if is_destroyed else (keys.request,)
            # Only this compute would have taken a queued request here, so one that waits does not keep its claim.
            if is_alive(self.store, self.compute) or find_needed(self.store, holding, '', NOT_QUEUED, None, made):
                raise _StaleReadError
            return ()

        # Noted even if destroyed: for a late concurrent forget its record may be cleared and its uuid used again.
        if release(self.placement, [consumer], find_kept, partial(note_released, self.store))[consumer] is False:
            raise _StaleReadError


def _make_end_record(compute: str, world: World, instance: str, now: str) -> Record:
    """Make the final record of a destroy that ends at `now` (ISO); EcompError with neither record nor valid request."""
    record, request = world.records.get(instance), world.requests_at.get(compute, {}).get(instance)
    if record is None:
        if not isinstance(request, Request):
            # World.find_inhabitants() has no such instance.
            raise EcompError(f'{instance}: has neither a record nor a request')
        record = make_record(compute, request, now)
    replaced_by = request.replaced_by if isinstance(request, Request) else None
    # An error stays: it shows that the quota's share was released before (ecomp.store.sharing).
    return replace(record.enter_state(GONE, now, 'gone'), fault=UNSEEN_END_FAULT, replaced_by=replaced_by)
