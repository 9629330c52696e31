"""What the user asked for, one instance or a set, and whether the same was asked for before."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ecomp.errors import Conflict, UsageError
from ecomp.model.allocation import Allocations
from ecomp.model.choose import SPREAD, Why
from ecomp.model.group import Membership
from ecomp.model.guest_data import SharedUserData
from ecomp.model.instance import Request
from ecomp.model.json_object import dump
from ecomp.model.record import ERROR, GONE
from ecomp.scheduler.find import Found, find
from ecomp.store.client import Store

MOST_BYTES = 1_400_000
"""Of all requests of a set together: etcd takes 1.5 MiB in a transaction (its --max-request-bytes)."""


@dataclass(frozen=True)
class Wanted:
    """What the user asked for. `ssh_keys` and `user_data` None: those of the compute's mdserver.conf.

    `instance` is the instance's uuid or, where the `count` is more than one, that of the set. At least `minimum` of
    them are placed, or none.
    """

    instance: str
    query: str
    image: str
    user_id: str
    project_id: str
    requested: str
    name: str | None = None
    ssh_keys: tuple[str, ...] | None = field(default=None, repr=False)
    user_data: bytes | None = field(default=None, repr=False)
    weigh: str = SPREAD
    count: int = 1
    minimum: int = 1
    group: Membership | None = None

    @cached_property
    def instances(self) -> dict[str, str | None]:
        """The name of each instance by its uuid, in order. Those of a set follow from its own, so it can be resumed."""
        if self.count == 1:
            return {self.instance: self.name}
        return {
            _member(self.instance, number): f'{self.name}-{number}' if self.name else None
            for number in range(1, self.count + 1)
        }

    @cached_property
    def shared(self) -> SharedUserData | None:
        """The user-data of a set, which is in etcd once."""
        return SharedUserData.of(self.user_data) if self.count > 1 and self.user_data is not None else None


def _member(whole: str, number: int) -> str:
    """The uuid of an instance of a set."""
    return str(uuid.uuid5(uuid.UUID(whole), str(number)))


@dataclass(frozen=True)
class Delivered:
    """The compute that got the request. `again`: it had been delivered before, and nothing was changed."""

    compute: str
    again: bool = False


def check_size(wanted: Wanted) -> None:
    """Said before anything is claimed: the delivery is one transaction."""
    keys_each = len(dump(wanted.ssh_keys))
    size = wanted.count * (len(dump([wanted.query, wanted.image])) + keys_each + 1000)
    shared = len(wanted.shared.text) if wanted.shared else 0
    if wanted.count > 1 and size + shared > MOST_BYTES:
        what = f'{wanted.count} instances with {keys_each} bytes of ssh keys each'
        more = f' and {shared} bytes of user-data' if shared else ''
        raise UsageError(f'{what}{more} are more than etcd takes at once: name fewer keys, or ask for fewer instances')


def request_of(
    wanted: Wanted,
    instance: str,
    allocations: Allocations,
    scheduled: str,
    group: Membership | None = None,
    why: Why | None = None,
) -> Request:
    """The request of one of the instances. `group` is its group as that turned out to be, `why` why it is there."""
    return Request(
        instance=instance,
        allocations=allocations,
        image=wanted.image,
        user_id=wanted.user_id,
        project_id=wanted.project_id,
        query=wanted.query,
        stages={'requested': wanted.requested, 'scheduled': scheduled},
        name=wanted.instances[instance],
        ssh_keys=wanted.ssh_keys,
        user_data=None if wanted.shared else wanted.user_data,
        user_data_sha256=wanted.shared.sha256 if wanted.shared else None,
        count=wanted.count,
        group=group,
        why=why,
    )


def before(store: Store, wanted: Wanted) -> dict[str, Delivered]:
    """What was delivered of this before, by the same uuid; Conflict if it is not the same that was asked for."""
    # An instance's uuid is no set's, and the other way round.
    other = wanted.instance if wanted.count > 1 else _member(wanted.instance, 1)
    if find(store, other) is not None:
        raise Conflict(f'{wanted.instance}: is the uuid of {"an instance" if wanted.count > 1 else "a set"}')
    found = {instance: find(store, instance) for instance in wanted.instances}
    return {instance: _same(each, wanted, instance) for instance, each in found.items() if each is not None}


def _same(found: Found, wanted: Wanted, instance: str) -> Delivered:
    """An instance of this uuid exists: nothing is changed if it is the same one, Conflict if not."""
    if found.queue_entry is not None:
        raise Conflict(f'{instance}: exists, and waits in a queue')
    group = wanted.group.name if wanted.group else None
    check_same(found, Asked(wanted.query, wanted.image, wanted.instances[instance], wanted.project_id, group))
    request = found.request
    if request is not None:
        same = request_of(wanted, instance, request.allocations, '')
        if request.count != wanted.count:
            raise Conflict(f'{instance}: exists, one of {request.count} that were asked for at once')
        if (request.user_data, request.user_data_sha256) != (same.user_data, same.user_data_sha256):
            raise Conflict(f'{instance}: exists, with other user-data')
        if request.ssh_keys != wanted.ssh_keys:
            raise Conflict(f'{instance}: exists, with other ssh keys')
    return Delivered(found.record.compute, again=True)


class Asked(NamedTuple):
    """What is asked for by a uuid, as far as it is known of every instance, however it came to be."""

    query: str
    image: str
    name: str | None
    project_id: str
    group: str | None


def check_same(found: Found, asked: Asked) -> None:
    """Conflict unless the instance lives, and was asked for just so."""
    record, instance = found.record, found.record.instance
    if record.state == GONE:
        raise Conflict(f'{instance}: gone since {record.stages.get("gone")}; a uuid is never used twice')
    if record.state == ERROR:
        raise Conflict(f'{instance}: it failed; destroy it and ask with another uuid')
    if found.is_destroying:
        raise Conflict(f'{instance}: it is being destroyed; a uuid is never used twice')
    if (record.query, record.image) != (asked.query, asked.image):
        raise Conflict(f'{instance}: exists, asked for by {record.query!r} with image {record.image}')
    if found.name != asked.name:
        raise Conflict(f'{instance}: exists, {f"by the name {found.name}" if found.name else "without a name"}')
    if record.project_id not in ('', asked.project_id):  # an older ecompute writes none
        raise Conflict(f'{instance}: exists, of project {record.project_id}')
    if found.group != asked.group:
        raise Conflict(f'{instance}: exists, {f"in group {found.group}" if found.group else "in no group"}')
