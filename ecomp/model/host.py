"""A compute as both planes tell of it: its keys in etcd, its provider in placement. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ecomp.model import keys, status
from ecomp.model.instance import Invalid, Request
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, GONE, SCHEDULED, STOPPED, Record

UP, DISABLED, CLOSED, SILENT, ORPHANED = 'up', 'disabled', 'closed', 'silent', 'orphaned'

LIVING = (SCHEDULED, BUILDING, ACTIVE, STOPPED)
"""States of an instance that is there, or on its way, and that nobody asked to destroy."""

QUOTED = 3
"""How many instances a refusal names."""


@dataclass(frozen=True)
class Share:
    """One class of a provider. `capacity` is what can be given in all: (total - reserved) * allocation_ratio.

    `shut`: all of it is reserved, so what is used says nothing about too much having been given.
    """

    capacity: int
    used: int
    shut: bool = False

    @property
    def free(self) -> int:
        """What can still be given."""
        return max(self.capacity - self.used, 0)

    @property
    def over(self) -> int:
        """How much more is given than there is: the inventory became smaller after it was claimed."""
        return 0 if self.shut else max(self.used - self.capacity, 0)


@dataclass(frozen=True)
class InPlacement:
    """A resource provider of placement's. `traits` are those that say that it is disabled."""

    uuid: str
    name: str
    shares: Mapping[str, Share] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()

    @property
    def is_ours(self) -> bool:
        """True for what an ecompute registers: named by its uuid, and with VCPU (or nothing at all yet).

        A placement may be shared: nova names its computes by host name, and a storage pool has no VCPU. Those are
        not ours to show or to remove.
        """
        return self.name == self.uuid and (not self.shares or 'VCPU' in self.shares)


@dataclass(frozen=True)
class InEtcd:
    """What etcd says: who is alive, with its host name; the requests by compute and instance; records by instance.

    `unreadable` are the instances whose record cannot be read. Names that are no uuid are no instances: they are in
    `junk`, by compute.
    """

    alive: Mapping[str, str | None] = field(default_factory=dict)
    requests: Mapping[str, Mapping[str, Request | Invalid]] = field(default_factory=dict)
    records: Mapping[str, Record] = field(default_factory=dict)
    unreadable: Collection[str] = ()
    junk: Mapping[str, Collection[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """One line of `eschedule hosts`. `disabled`: nothing is placed there until an operator enables it, up or not."""

    compute: str
    hostname: str | None
    state: str
    instances: int
    resources: Mapping[str, Share]
    disabled: bool = False


@dataclass(frozen=True)
class Leftovers:
    """What is left of a compute that nothing lives on.

    `ended`: instances whose destroy was accepted; `stray`: names of requests that nobody would carry out (their
    instance is gone or another compute's, or they name none); `orphans`: consumers nobody stands behind.
    """

    ended: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()


def hosts(etcd: InEtcd, providers: Mapping[str, InPlacement]) -> list[Host]:
    """Every compute that either plane knows, by host name and uuid; those without a name last."""
    known = {*etcd.alive, *etcd.requests, *etcd.junk}
    known |= {record.compute for record in etcd.records.values() if record.state in LIVING}
    known |= {provider.uuid for provider in providers.values() if provider.is_ours}
    found = [_host(compute, etcd, providers.get(compute)) for compute in known if keys.is_uuid(compute)]
    return sorted(found, key=lambda each: (each.hostname is None, each.hostname or '', each.compute))


def living(compute: str, etcd: InEtcd) -> set[str]:
    """The instances that live on a compute, or are on their way there."""
    requests = etcd.requests.get(compute, {})
    wanted = {
        name
        for name, wish in requests.items()
        if not _is_tombstone(wish) and not _is_stray(compute, etcd.records.get(name))
    }
    recorded = {
        name for name, record in etcd.records.items() if record.compute == compute and record.state in LIVING
    }
    return wanted | (recorded - requests.keys())


def there(compute: str, etcd: InEtcd) -> set[str]:
    """The instances that live on a compute, and those it has not destroyed yet."""
    left = leftovers(compute, etcd, ())
    return living(compute, etcd) | set(left.ended)


def refusal(compute: str, etcd: InEtcd, held: Collection[str], at_it: Collection[str]) -> str | None:
    """Why a compute must not be forgotten, in one sentence; None if it may be.

    `held` are the consumers placement counts there; `at_it` the instances living eschedules are at.
    """
    if compute in etcd.alive:
        where = f' on {etcd.alive[compute]}' if etcd.alive[compute] else ''
        return f'it is alive{where}: stop its ecompute first'
    there = sorted(living(compute, etcd))
    if there:
        return f'{_some(there)} still there: destroy what is not wanted any more, then forget the host'
    claiming = sorted(set(held) & set(at_it))
    if claiming:
        return f'an eschedule is at work on {_some(claiming)} there: try again when it has ended (a dead one: in 60 s)'
    unreadable = sorted({*etcd.requests.get(compute, {}), *held} & set(etcd.unreadable))
    if unreadable:
        return f'what is recorded of {_some(unreadable)} there cannot be read: see eschedule list'
    for name in sorted(held):
        others = [other for other in _homes(name, etcd) if other != compute]
        if others:
            return f'instance {name} of compute {others[0]} holds a part of it: destroy it first'
    return None


def leftovers(compute: str, etcd: InEtcd, held: Collection[str]) -> Leftovers:
    """What is to be removed with a compute that refusal() has nothing against."""
    requests = etcd.requests.get(compute, {})
    stray = {name for name in requests if _is_stray(compute, etcd.records.get(name))}
    # A record only says destroying once a tombstone was there.
    destroying = {
        name for name, record in etcd.records.items() if record.compute == compute and record.state == DESTROYING
    }
    ended = ({name for name, wish in requests.items() if _is_tombstone(wish)} - stray) | destroying
    return Leftovers(
        ended=tuple(sorted(ended)),
        stray=tuple(sorted({*stray, *etcd.junk.get(compute, ())})),
        orphans=tuple(sorted(set(held) - ended)),
    )


def _host(compute: str, etcd: InEtcd, provider: InPlacement | None) -> Host:
    shares = provider.shares if provider else {}
    named = bool(etcd.requests.get(compute) or etcd.junk.get(compute))
    traits = provider.traits if provider else frozenset()
    disabled = status.BY_OPERATOR in traits
    if compute in etcd.alive:
        disabled = disabled or status.DISABLED in traits
        state = DISABLED if disabled else UP
    elif 'VCPU' in shares and shares['VCPU'].shut:
        state = CLOSED
    elif named or any(record.compute == compute for record in etcd.records.values()):
        state = SILENT
    else:
        state = ORPHANED
    return Host(compute, etcd.alive.get(compute), state, len(living(compute, etcd)), shares, disabled)


def _is_tombstone(wish: Request | Invalid) -> bool:
    return isinstance(wish, Request) and wish.is_tombstone


def _is_stray(compute: str, record: Record | None) -> bool:
    """True for a request whose compute would drop it as it is."""
    return record is not None and (record.compute != compute or record.state == GONE)


def _homes(instance: str, etcd: InEtcd) -> Iterator[str]:
    yield from (compute for compute, requests in etcd.requests.items() if instance in requests)
    record = etcd.records.get(instance)
    if record is not None and record.state in (*LIVING, DESTROYING):
        yield record.compute


def _some(instances: list[str]) -> str:
    more = f' and {len(instances) - QUOTED} more' if len(instances) > QUOTED else ''
    return f'instance{"s" if len(instances) > 1 else ""} {", ".join(instances[:QUOTED])}{more}'
