"""Whether the same was asked for before, by the same uuid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecomp.errors import Conflict
from ecomp.model import keys
from ecomp.model.order import Order, SetOrder, difference, member
from ecomp.model.record import ERROR, GONE
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.scheduler.looking.find import InstanceEntries


def before(store: Store, wanted: SetOrder) -> dict[str, DeliveryOutcome]:
    """What was delivered of this before, by the same uuid; Conflict if it is not the same that was asked for."""
    from ecomp.scheduler.looking.find import find  # for a uuid that the user gave
    from ecomp.store.places import index

    # All names once: to look for each of a set among thousands of computes takes longer than the set has.
    # What is moved from a queue to a compute meanwhile is found there.
    waiting = {keys.in_queue(key) for key in store.snapshot(keys.QUEUES, keys_only=True).entries}
    among = index(store)

    def is_there(instance: str) -> bool:
        return instance in waiting or instance in among.requests or instance in among.records

    # An instance's uuid is no set's, and the other way round.
    other = wanted.instance if wanted.count > 1 else member(wanted.instance, 1)
    if is_there(other) and find(store, other, among) is not None:
        raise Conflict(f'{wanted.instance}: is the uuid of {"an instance" if wanted.count > 1 else "a set"}')
    found = {instance: find(store, instance, among) for instance in wanted.instances if is_there(instance)}
    return {instance: _delivered(each, wanted.orders[instance]) for instance, each in found.items() if each is not None}


def _delivered(found: InstanceEntries, asked: Order) -> DeliveryOutcome:
    if found.queue_entry is not None:
        raise Conflict(f'{asked.instance}: exists, and waits in a queue')
    check_same(found, asked)
    return DeliveryOutcome(found.record.compute, again=True)


def check_same(found: InstanceEntries, asked: Order) -> None:
    """Conflict unless the instance lives, and was asked for just so."""
    record, instance = found.record, found.record.instance
    if record.state == GONE:
        raise Conflict(f'{instance}: gone since {record.stages.get("gone")}; a uuid is never used twice')
    if record.state == ERROR:
        raise Conflict(f'{instance}: it failed; destroy it and ask with another uuid')
    if found.is_destroying:
        raise Conflict(f'{instance}: it is being destroyed; a uuid is never used twice')
    there = found.order
    other = difference(there or record, asked, recorded=there is None)
    if other is not None:
        raise Conflict(f'{instance}: exists, {other}')
