"""Disable, enable and drain a compute, which destroys nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ecomp.errors import EcompError, NotFound, StillGoing, Unreachable
from ecomp.failpoints import failpoint
from ecomp.model import keys, status
from ecomp.model.order import DRAIN, STOP, PowerAction, Request
from ecomp.model.record import is_stopped_by_drain, plan_drain
from ecomp.model.states import SCHEDULED
from ecomp.model.text import replace_uuids
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.scheduler.queries.hosts import read_world
from ecomp.shared.attempts import MAX_OFFER_AGE_SECONDS, is_alive
from ecomp.shared.places import read_index
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.scheduler.changes.wait import Deadline

# Seconds between two reads while waiting: placement cannot be watched.
POLL_SECONDS = 1.0


def disable(placement: Placement, compute: str, display_name: str) -> str:
    """Disable a compute by a trait, and return a sentence."""
    require_provider(placement, compute, display_name)
    providers.create_missing_traits(placement, status.STATUS_TRAITS)
    changed = providers.change_names(placement, compute, providers.TRAITS, status.apply_disable)
    failpoint('host-disabled')
    if not changed:
        return f'{display_name}: is already disabled'
    return f'{display_name}: disabled: no new instances are placed there; those that run there continue'


def enable(store: Store, placement: Placement, compute: str, display_name: str) -> str:
    """Enable a compute, at its start if it is not alive now, and return a sentence."""
    require_provider(placement, compute, display_name)
    alive = is_alive(store, compute)
    changed = providers.change_names(placement, compute, providers.TRAITS, lambda old: status.apply_enable(old, alive))
    failpoint('host-enabled')
    if not changed:
        return f'{display_name}: is already enabled' + ('' if alive else ', but its ecompute is not alive')
    return f'{display_name}: enabled' + ('' if alive else '; instances are placed there once its ecompute is started')


def list_inhabitants(store: Store, placement: Placement, compute: str, display_name: str) -> list[str]:
    """Return a line with the number of instances on or claimed on a compute, and one for each."""
    # First: later deliveries are then seen as requests.
    consumers = allocations.read_provider_allocations(placement, compute)
    world = read_world(store)
    instances = sorted(world.find_inhabitants(compute).present | consumers.keys())
    lines = [f'{display_name}: {_format_count(len(instances))} there']
    for instance in instances:
        record = world.records.get(instance)
        adopted = ' (adopted: it cannot be moved)' if record is not None and record.is_adopted else ''
        lines.append(f'{world.format_instance(instance)}: {record.state if record is not None else SCHEDULED}{adopted}')
    return lines


def change_guests(
    store: Store, compute: str, action: str, changed_guests: set[str], report: Callable[[str], None]
) -> Collection[str]:
    """Stop the guests of a compute for a drain, or start those that a drain stopped.

    This adds to `changed_guests`, and stops none of these again. It returns the guests that are not off yet, or whose
    start was refused.
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
    """Wait until a disabled compute has no request and no claim, and no attempt may choose it.

    With `stop_guests`, the guests it returns count instead of requests and claims. StillGoing is raised at `deadline`.
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
        current = frozenset(key for key, entry in attempts.items() if entry.lease)
        queues = store.snapshot(keys.QUEUES, keys_only=True).entries.items()
        taker_keys = frozenset((key, each.revision) for key, each in queues if each.lease and key.endswith(keys.TAKER))
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


def require_provider(placement: Placement, compute: str, display_name: str) -> None:
    """Raise NotFound unless placement has the compute's provider and ecompute made it."""
    name = providers.read_provider_name(placement, compute)
    if name != compute:
        raise make_not_found(display_name, name)


def make_not_found(display_name: str, provider_name: str | None = None) -> NotFound:
    why = f': placement has a provider with this uuid, {provider_name}, but no ecompute created this provider'
    return NotFound(f'{display_name}: no host has this name or uuid{why if provider_name is not None else ""}')


def _format_count(number: int) -> str:
    return f'{number or "no"} instance{"" if number == 1 else "s"}'
