"""What the user asked for, one instance or a set, and how it is to be placed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ecomp.errors import UsageError
from ecomp.model.choose import SPREAD
from ecomp.model.guest_data import SharedUserData
from ecomp.model.json_object import dump
from ecomp.model.order import Order

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
        names = {member(self.instance, each): self.name and f'{self.name}-{each}' for each in range(1, self.count + 1)}
        return {each: Order(**self.parts(instance=each, name=name, **shared)) for each, name in names.items()}

    @property
    def instances(self) -> dict[str, str | None]:
        """The name of each instance by its uuid."""
        return {instance: each.name for instance, each in self.orders.items()}

    @cached_property
    def shared(self) -> SharedUserData | None:
        """The user-data of a set, which is in etcd once."""
        return SharedUserData.of(self.user_data) if self.count > 1 and self.user_data is not None else None


def member(whole: str, number: int) -> str:
    """The uuid of an instance of a set, by the set's own and its number, from 1 on."""
    import uuid  # for sets

    return str(uuid.uuid5(uuid.UUID(whole), str(number)))


def check_size(wanted: SetOrder) -> None:
    """UsageError, before anything is claimed, for a set too large for the one transaction that delivers it."""
    keys_each = len(dump(wanted.ssh_keys))
    size = wanted.count * (len(dump([wanted.query, wanted.image])) + keys_each + 1000)
    shared = len(wanted.shared.text) if wanted.shared else 0
    if wanted.count > 1 and size + shared > MOST_BYTES:
        what = f'{wanted.count} instances with {keys_each} bytes of ssh keys each'
        more = f' and {shared} bytes of user-data' if shared else ''
        raise UsageError(f'{what}{more} are more than etcd takes at once: name fewer keys, or ask for fewer instances')
