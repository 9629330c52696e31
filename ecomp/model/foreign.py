"""Guests on a host that ecomp did not create, as the host publishes them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ecomp.model.allocation import MAX_SUM, REQUIRED_CLASSES, Resources
from ecomp.model.guest import Guest
from ecomp.model.parsers import FLAG, TEXT, UUID, dict_of, list_of, number, one_of, text
from ecomp.model.stored import COMPACT, decode, encode, nested, sparse, stored
from ecomp.model.text import make_printable

# A value is not parsed above this size; a host with more guests leaves some out.
MAX_FOREIGN_BYTES = 256 * 1024

_SHORT = text(lambda value: make_printable(value, 200))


@stored(
    instance=UUID,
    name=_SHORT,
    is_running=FLAG,
    is_transient=sparse(FLAG),
    size=dict_of(number(0, MAX_SUM), one_of(REQUIRED_CLASSES)),
    disks=sparse(list_of(_SHORT)),
    adopted_by=sparse(TEXT),
)
class ForeignGuest(NamedTuple):
    """A domain without our owner mark."""

    instance: str
    name: str
    is_running: bool
    is_transient: bool = False
    size: Resources = {}  # VCPU, MEMORY_MB and, for disks on the file system of our pool, DISK_GB
    disks: tuple[str, ...] = ()
    adopted_by: str = ''  # the compute in its adoption mark, '' for none
    interfaces: tuple[tuple[str, str], ...] = ()  # networks and MACs; not published
    has_console: bool = False  # not published

    @property
    def state(self) -> str:
        return ('running' if self.is_running else 'off') + (', transient' if self.is_transient else '')

    def as_guest(self) -> Guest:
        """Return it as an adopted guest, without DISK_GB, because its disks are not ecomp's."""
        size = {name: amount for name, amount in self.size.items() if name != 'DISK_GB'}
        state = self.instance, self.adopted_by, not self.is_transient, self.is_running, True
        return Guest(*state, size=size, is_adopted=True)


@stored(1, 'list of foreign guests', COMPACT, guests=list_of(nested(ForeignGuest)), left_out=sparse(list_of(UUID)),
        omitted=sparse(number(0, MAX_SUM)))  # fmt: skip
class HostForeign(NamedTuple):
    guests: tuple[ForeignGuest, ...] = ()
    left_out: tuple[str, ...] = ()  # what they use is not reserved, because an adoption in flight names them
    omitted: int = 0  # the number of guests that had no room in the value


def encode_foreign(guests: Mapping[str, ForeignGuest], left_out: Collection[str]) -> str | None:
    """Return the value to publish, with as many guests as fit, or None if there are none."""
    # Those that can be adopted first, so that each is listed once the others are adopted.
    ordered = sorted(guests.values(), key=lambda each: (bool(each.adopted_by), each.name, each.instance))
    value, count = None, len(ordered)
    while count and (value is None or len(value) > MAX_FOREIGN_BYTES):
        value = encode(HostForeign(tuple(ordered[:count]), tuple(sorted(left_out)), len(ordered) - count))
        count = count * 3 // 4
    return value


def parse_foreign(value: bytes) -> HostForeign:
    if len(value) > MAX_FOREIGN_BYTES:
        raise ValueError(f'it has more than {MAX_FOREIGN_BYTES} bytes')
    return decode(HostForeign, value)
