"""A compute as both planes tell of it: its keys in etcd, its provider in placement. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ecomp.model import keys, status
from ecomp.model.allocation import Room
from ecomp.model.computes import NOBODY, Computes, Living
from ecomp.model.order import Invalid, Request
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, GONE, SCHEDULED, STOPPED, Record
from ecomp.model.text import some

UP, DISABLED, CLOSED, SILENT, ORPHANED = 'up', 'disabled', 'closed', 'silent', 'orphaned'

LIVING = (SCHEDULED, BUILDING, ACTIVE, STOPPED)
"""States of an instance that has not ended and that nobody asked to destroy."""

QUOTED = 3
"""How many instances a refusal names at most; it says how many more there are."""


@dataclass(frozen=True)
class InPlacement:
    """A resource provider. `traits` are those of its traits that say that it is disabled."""

    uuid: str
    name: str
    shares: Mapping[str, Room] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()

    @property
    def is_ours(self) -> bool:
        """True for a provider named by its uuid that has VCPU, or no inventory yet, as an ecompute registers it.

        Others are not ours to show or remove: nova names its computes by host name, a storage pool has no VCPU.
        """
        return self.name == self.uuid and (not self.shares or 'VCPU' in self.shares)


@dataclass(frozen=True)
class InEtcd:
    """What etcd says: who lives and what each is called, requests by compute and instance, records by instance.

    `unreadable` are the instances whose record cannot be read; `junk` has, by compute, the names of requests that are
    no uuids.
    """

    computes: Computes = NOBODY
    requests: Mapping[str, Mapping[str, Request | Invalid]] = field(default_factory=dict)
    records: Mapping[str, Record] = field(default_factory=dict)
    unreadable: Collection[str] = ()
    junk: Mapping[str, Collection[str]] = field(default_factory=dict)

    def called(self, instance: str) -> str:
        """What people call an instance: its name, or else its uuid."""
        record = self.records.get(instance)
        wishes = (each.get(instance) for each in self.requests.values())
        names = [record.name if record else None, *(each.name for each in wishes if isinstance(each, Request))]
        return next(filter(None, names), None) or instance

    @property
    def alive(self) -> Collection[str]:
        """The computes that are alive."""
        return self.computes.living


@dataclass(frozen=True)
class Host:
    """One line of `eschedule hosts`. `disabled` means that nothing is placed there until an operator enables it.

    `said` is what it says of itself while it is alive.
    """

    compute: str
    hostname: str | None
    state: str
    instances: int
    resources: Mapping[str, Room]
    disabled: bool = False
    said: Living = Living()


@dataclass(frozen=True)
class Leftovers:
    """What is left of a compute on which no instance lives.

    `ended` are the instances whose destroy was accepted; `stray` the names of requests that no compute would carry out,
    for their instance is gone, another compute's or none; `orphans` the consumers without request or record.
    """

    ended: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()


def hosts(etcd: InEtcd, providers: Mapping[str, InPlacement]) -> list[Host]:
    """Every compute that etcd or placement knows, sorted by host name and uuid; those without a name are last."""
    known = {*etcd.alive, *etcd.requests, *etcd.junk}
    known |= {record.compute for record in etcd.records.values() if record.state in LIVING}
    known |= {provider.uuid for provider in providers.values() if provider.is_ours}
    found = [_host(compute, etcd, providers.get(compute)) for compute in known if keys.is_uuid(compute)]
    return sorted(found, key=lambda each: (each.hostname is None, each.hostname or '', each.compute))


def living(compute: str, etcd: InEtcd) -> set[str]:
    """The instances that live on a compute, or are requested of it."""
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
    """The instances that live on a compute, and those it is destroying."""
    left = leftovers(compute, etcd, ())
    return living(compute, etcd) | set(left.ended)


def refusal(compute: str, etcd: InEtcd, held: Collection[str], at_it: Collection[str]) -> str | None:
    """Why a compute must not be forgotten, in one sentence; None if it may be.

    `held` are the consumers with allocations there; `at_it` the instances that an eschedule is at work on now.
    """
    if compute in etcd.alive:
        host = etcd.computes.host(compute)
        return f'it is alive{f" on {host}" if host else ""}: stop its ecompute first'
    there = sorted(living(compute, etcd))
    if there:
        return f'{_some(there, etcd)} still there: destroy what is not wanted any more, then forget the host'
    claiming = sorted(set(held) & set(at_it))
    if claiming:
        again = f'try again when it has ended (a dead one: in {keys.ATTEMPT_SECONDS} s)'
        return f'an eschedule is at work on {_some(claiming, etcd)} there: {again}'
    unreadable = sorted({*etcd.requests.get(compute, {}), *held} & set(etcd.unreadable))
    if unreadable:
        return f'what is recorded of {_some(unreadable, etcd)} there cannot be read: see eschedule list'
    for name in sorted(held):
        others = [other for other in _homes(name, etcd) if other != compute]
        if others:
            of = f'{etcd.called(name)} of compute {etcd.computes.called(others[0])}'
            return f'instance {of} holds a part of it: destroy it first'
    return None


def leftovers(compute: str, etcd: InEtcd, held: Collection[str]) -> Leftovers:
    """What is to be removed with a compute for which refusal() is None; `held` as there."""
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
    there, said = len(living(compute, etcd)), etcd.computes.living.get(compute, Living())
    return Host(compute, etcd.computes.host(compute), state, there, shares, disabled, said)


def _is_tombstone(wish: Request | Invalid) -> bool:
    return isinstance(wish, Request) and wish.is_tombstone


def _is_stray(compute: str, record: Record | None) -> bool:
    """True for a request that its compute would drop: its instance is gone, or another compute's by its record."""
    return record is not None and (record.compute != compute or record.state == GONE)


def _homes(instance: str, etcd: InEtcd) -> Iterator[str]:
    yield from (compute for compute, requests in etcd.requests.items() if instance in requests)
    record = etcd.records.get(instance)
    if record is not None and record.state in (*LIVING, DESTROYING):
        yield record.compute


def _some(instances: list[str], etcd: InEtcd) -> str:
    named = some(list(map(etcd.called, instances)), QUOTED)
    return f'instance{"s" if len(instances) > 1 else ""} {named}'
