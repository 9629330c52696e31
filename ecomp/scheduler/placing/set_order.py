"""What the user asked for, one instance or a set, and whether the same was asked for before."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ecomp.errors import Conflict, UsageError
from ecomp.model import keys
from ecomp.model.choose import SPREAD
from ecomp.model.guest_data import SharedUserData
from ecomp.model.json_object import dump
from ecomp.model.order import Order, difference
from ecomp.model.stages import ERROR, GONE
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.scheduler.looking.find import InstanceEntries

MOST_BYTES = 1_400_000
"""Of all requests of a set together: etcd takes 1.5 MiB in a transaction (its --max-request-bytes)."""


@dataclass(frozen=True)
class SetOrder(Order):
    """An order of one instance or of a set, and how it is to be placed: `weigh` says which computes are tried first.

    `instance` and `name` are the instance's or, where the `count` is more than one, those of the set. At least
    `minimum` of them are placed, or none.
    """

    weigh: str = field(default=SPREAD, kw_only=True)
    minimum: int = field(default=1, kw_only=True)

    @cached_property
    def orders(self) -> dict[str, Order]:
        """The order of each instance by its uuid. Those of a set follow from its own, so it can be resumed."""
        if self.count == 1:
            return {self.instance: Order(**self.parts())}
        shared = {} if self.shared is None else {'user_data': None, 'user_data_sha256': self.shared.sha256}
        names = {_member(self.instance, each): self.name and f'{self.name}-{each}' for each in range(1, self.count + 1)}
        return {each: Order(**self.parts(instance=each, name=name, **shared)) for each, name in names.items()}

    @property
    def instances(self) -> dict[str, str | None]:
        """The name of each instance by its uuid."""
        return {instance: each.name for instance, each in self.orders.items()}

    @cached_property
    def shared(self) -> SharedUserData | None:
        """The user-data of a set, which is in etcd once."""
        return SharedUserData.of(self.user_data) if self.count > 1 and self.user_data is not None else None


def _member(whole: str, number: int) -> str:
    """The uuid of an instance of a set."""
    import uuid  # for sets

    return str(uuid.uuid5(uuid.UUID(whole), str(number)))


class DeliveryOutcome(NamedTuple):
    """The compute that got the request. `again`: it had been delivered before, and nothing was changed."""

    compute: str
    again: bool = False


def check_size(wanted: SetOrder) -> None:
    """UsageError, before anything is claimed, for a set too large for the one transaction that delivers it."""
    keys_each = len(dump(wanted.ssh_keys))
    size = wanted.count * (len(dump([wanted.query, wanted.image])) + keys_each + 1000)
    shared = len(wanted.shared.text) if wanted.shared else 0
    if wanted.count > 1 and size + shared > MOST_BYTES:
        what = f'{wanted.count} instances with {keys_each} bytes of ssh keys each'
        more = f' and {shared} bytes of user-data' if shared else ''
        raise UsageError(f'{what}{more} are more than etcd takes at once: name fewer keys, or ask for fewer instances')


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
    other = wanted.instance if wanted.count > 1 else _member(wanted.instance, 1)
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
