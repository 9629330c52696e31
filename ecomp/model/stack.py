"""Stacks: the instances of one file, their uuids, and the key /stacks/<name>. Pure.

The first apply writes a random epoch, and an instance's uuid is a hash of it. `incarnation` counts the instances that
were delivered for an entry. A replacement gets the next number, so no uuid is used twice. Entries are never deleted.
`compute` is where the last one was delivered. It is ended once a user has destroyed it. New instances get incarnations
above `floor`, which is 0 until a lost key is restored. `applied_from` is `user@host:file` of the file that last changed
the stack, and `written_at` is when.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from ecomp.model import keys
from ecomp.model.parsers import FLAG, TEXT, UUID, check, dict_of, number, text
from ecomp.model.stored import COMPACT, in_key, lenient, nested, sparse, stored

# Instances of a stack: their delivery is one transaction of less than 1.4 MB.
MAX_STACK_SIZE = 300
MAX_INCARNATION = 2**31
MAX_FLOOR = 2**30
_STACK_NAME = '[a-z0-9]{1,30}'
_MEMBER_NAME = '[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?'
_ENTRY_NAME = f'{_MEMBER_NAME}/[1-9][0-9]{{0,2}}'


def check_stack_name(text: str) -> str:
    if not re.fullmatch(_STACK_NAME, text):
        reason = 'so that instances of two stacks never have the same name by accident'
        raise ValueError(f'{text[:80]!r} is not a valid stack name: 1 to 30 lower-case letters and digits, {reason}')
    return text


def check_member_name(text: str) -> str:
    if not re.fullmatch(_MEMBER_NAME, text):
        raise ValueError(f'{text[:80]!r} is not a valid member name: lower-case letters, digits and -, no - at an end')
    return text


_INCARNATION = number(1, MAX_INCARNATION)
_PARSERS = {'name': text(check_stack_name), 'member': text(check_member_name), 'number': number(1, MAX_STACK_SIZE)}


@stored(**_PARSERS, epoch=UUID, incarnation=_INCARNATION)
class Place(NamedTuple):
    """Where an instance is in its stack, as its request says."""

    name: str
    member: str
    number: int  # from 1 on, also without a count
    epoch: str
    incarnation: int

    @property
    def entry_name(self) -> str:
        return f'{self.member}/{self.number}'

    @property
    def instance(self) -> str:
        return keys.derive_uuid(self.epoch, f'{self.entry_name}/{self.incarnation}')


@stored(incarnation=_INCARNATION, compute=UUID, is_ended=sparse(FLAG, name='ended'))
class StackEntry(NamedTuple):
    """The last delivered instance of an entry, as the module describes."""

    incarnation: int
    compute: str
    is_ended: bool = False


@stored(
    *(1, 'stack', COMPACT),
    name=in_key(check_stack_name),
    epoch=UUID,
    floor=sparse(number(1, MAX_FLOOR)),
    applied_from=sparse(TEXT),
    entries=dict_of(nested(StackEntry), check('a member, / and a number', partial(re.fullmatch, _ENTRY_NAME))),
    written_at=lenient(TEXT, is_sparse=True),
)
class Stack(NamedTuple):
    """A stack as its key holds it, with entries by "<member>/<number>"."""

    name: str
    epoch: str
    entries: Mapping[str, StackEntry] = {}
    floor: int = 0
    applied_from: str = ''
    # The stamp of the last apply, which a destroy and an evacuation keep.
    written_at: str = ''

    @property
    def attempt(self) -> str:
        """The uuid of the attempt of each apply, at whose key two concurrent ones collide."""
        return keys.derive_uuid(self.epoch, 'apply')

    def make_place(self, entry_name: str, incarnation: int | None = None) -> Place:
        """Return the place of this incarnation of an entry, or of the next one."""
        member, _, number = entry_name.rpartition('/')
        previous = max(self.entries.get(entry_name, StackEntry(0, '')).incarnation, self.floor)
        return Place(self.name, member, int(number), self.epoch, incarnation or previous + 1)

    def list_instances(self) -> dict[str, str]:
        """Return {entry: uuid} of the last delivered instances, which may be gone."""
        return {name: self.make_place(name, entry.incarnation).instance for name, entry in self.entries.items()}

    def with_delivered(self, computes: Mapping[Place, str]) -> Stack:
        """Return the stack with a new or replaced entry for each of these delivered places."""
        delivered = {place.entry_name: StackEntry(place.incarnation, compute) for place, compute in computes.items()}
        return self._replace(entries={**self.entries, **delivered})

    def with_ended(self, entry_names: Iterable[str]) -> Stack:
        """Return the stack after the instances of these entries were destroyed on purpose."""
        ended = {name: self.entries[name]._replace(is_ended=True) for name in entry_names}
        return self._replace(entries={**self.entries, **ended})


def restore_stack(name: str, places: Mapping[Place, str], floor: int) -> Stack | None:
    """Return a stack whose key was lost, from {place: compute} of its requests, or None."""
    # The incarnations of instances that are gone are unknown, so `floor` is a random number up to MAX_FLOOR. Of
    # different epochs that of the most requests counts: the others are not of this stack.
    by_epoch: dict[str, Stack] = {}
    for place, compute in sorted(places.items()):  # a higher incarnation replaces a lower one
        stack = by_epoch.get(place.epoch, Stack(name, place.epoch, floor=floor))
        by_epoch[place.epoch] = stack.with_delivered({place: compute})
    return max(by_epoch.values(), key=lambda stack: (len(stack.entries), stack.epoch), default=None)
