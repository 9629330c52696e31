"""Make the plan of a soak from one seed: all operations and faults with their times. Pure."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Too small for a kernel: for the disk that boots nothing.
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
GUEST_QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
# Seconds between the end of one fault and the next at the same target.
SETTLE_SECONDS = 6.0


@dataclass(frozen=True)
class Size:
    """The size of a soak.

    Operations and faults begin within `seconds`; no fault lasts longer than `longest` seconds. `patient`: every client
    asks again after a lost answer, so that computes have no claims to release, which takes two checks a minute apart.
    """

    seconds: float
    operations: int
    clients: int
    fakes: int
    hosts: int
    fault_every: float
    longest: float
    guests: bool = False
    patient: bool = False


@dataclass(frozen=True)
class Operation:
    """One eschedule command about the create with number `of`.

    `compute` is the only compute it may be placed on. `trouble` is `kill:AFTER`, `freeze:AFTER:SECONDS`, `at:FAILPOINT`
    (killed) or `stop:FAILPOINT:SECONDS` (frozen).
    """

    number: int
    client: int
    at: float
    kind: str
    uuid: str | None = None
    of: int | None = None
    compute: str | None = None
    image: str = 'idle'
    query: str = QUERY
    trouble: str = ''
    wait: str = ''
    proxied: bool = False
    again: bool = False


@dataclass(frozen=True)
class Fault:
    """One fault.

    `pick` chooses among targets that exist only during the run; `place` is a failpoint.
    """

    number: int
    at: float
    kind: str
    target: str
    seconds: float
    pick: int = 0
    place: str = ''


@dataclass(frozen=True)
class Plan:
    """A whole soak; the same seed and size give the same plan."""

    seed: int
    size: Size
    operations: tuple[Operation, ...]
    faults: tuple[Fault, ...]


CREATE_PLACES = ('announced', 'claimed', 'claimed', 'delivered')
FAKE_PLACES = (
    *('registered', 'published', 'remembered', 'reserved', 'seeded', 'confirmed', 'building', 'built', 'active'),
    *('addressed', 'destroying', 'removed', 'forgotten', 'unreserved', 'released', 'ended'),
    *('image-ready', 'disk-created', 'domain-started', 'domain-undefined'),
)
HOST_PLACES = (
    *('building', 'reserved', 'built', 'destroying', 'forgotten', 'released', 'image-part', 'image-ready'),
    *('disk-created', 'domain-defined', 'domain-started', 'domain-destroyed', 'domain-undefined', 'disk-deleted'),
)

DESTROY_PLACES = {
    *('destroying', 'removed', 'forgotten', 'unreserved', 'released'),
    *('domain-destroyed', 'domain-undefined', 'disk-deleted'),
}

FAKE_FAULTS = ('fake-kill', 'fake-freeze', 'fake-term', 'fake-failpoint', 'fake-failpoint')
HOST_FAULTS = (
    *('host-kill', 'host-freeze', 'host-term', 'host-failpoint', 'worker-kill'),
    *('libvirtd-kill', 'libvirtd-freeze', 'qemu-kill', 'partition'),
)
CONTROL_FAULTS = (
    *('etcd-kill', 'etcd-freeze', 'etcd-compact', 'placement-kill', 'placement-freeze'),
    *('cut', 'etcd-answer-lost', 'placement-answer-lost'),
)
INSTANT_FAULTS = {'etcd-compact', 'worker-kill', 'qemu-kill', 'etcd-answer-lost', 'placement-answer-lost'}


def make_plan(seed: int, size: Size) -> Plan:
    """Make the plan of a seed."""
    rng = random.Random(seed)
    faults = list(_make_faults(rng, size))
    aimed = list(_make_aimed_operations(rng, size, faults))[: size.operations // 2]
    operations = _make_operations(rng, size, size.operations - len(aimed))
    numbered = {op.number: replace(op, number=number) for number, op in enumerate(aimed, len(operations))}
    operations += [replace(op, of=op.of and numbered[op.of].number) for op in numbered.values()]
    return Plan(seed, size, tuple(sorted(operations, key=lambda each: (each.at, each.number))), tuple(faults))


def _make_aimed_operations(rng: random.Random, size: Size, faults: Sequence[Fault]) -> Iterator[Operation]:
    """Yield a create on the compute of each fault, at its beginning, and often a destroy of it.

    Without them most faults would hit an idle compute.
    """
    number = 1
    for fault in faults:
        if fault.kind in CONTROL_FAULTS:
            continue
        # A failpoint's process has to be running again first.
        begins_at = fault.at + (rng.uniform(0.5, 2) if fault.place else rng.uniform(-0.7, 0.3))
        common: dict[str, Any] = {'uuid': _make_uuid(rng), 'again': True}
        client = rng.randrange(size.clients)
        yield Operation(number, client, max(begins_at, 0.0), 'create', compute=fault.target, **common)
        # The real hosts are small, so instances there are destroyed again.
        if rng.random() < 0.6 or fault.place in DESTROY_PLACES or fault.kind in HOST_FAULTS:
            after = begins_at + rng.uniform(0.6, 3)
            yield Operation(number + 1, _choose_other_client(rng, size, client), after, 'destroy', of=number, **common)
        number += 2


def _make_operations(rng: random.Random, size: Size, count: int) -> list[Operation]:
    times = sorted(rng.uniform(0, size.seconds) for _ in range(count))
    operations: list[Operation] = []
    living: list[Operation] = []
    destroyed: list[Operation] = []
    while len(operations) < count:
        number, at = len(operations), times[len(operations)]
        # A second client that uses the same uuid concurrently is the next operation.
        previous = operations[-1] if operations else None
        twin_probability = 0.7 if previous is not None and previous.trouble.startswith('stop') else 0.12
        if previous is not None and previous.kind == 'create' and previous.uuid and rng.random() < twin_probability:
            query = previous.query if rng.random() < 0.8 else previous.query.replace('DISK_GB:1', 'DISK_GB:2')
            delay = rng.uniform(0.3, 1.0) if previous.trouble.startswith('stop') else rng.uniform(0, 0.1)
            twin = Operation(
                number,
                _choose_other_client(rng, size, previous.client),
                previous.at + delay,
                'create',
                uuid=previous.uuid,
                of=previous.number,
                compute=previous.compute,
                image=previous.image,
                query=query,
                again=True,
            )
            operations.append(twin)
        elif len(living) < 5 or rng.random() < 0.58:
            create = _make_create(rng, size, number, at)
            operations.append(create)
            living.append(create)
        else:
            operations.append(_make_destroy(rng, size, number, at, living, destroyed))
    return operations


def _make_create(rng: random.Random, size: Size, number: int, at: float) -> Operation:
    host = f'hv{rng.randrange(size.hosts) + 1}' if size.hosts and rng.random() < 0.15 else None
    image = 'missing' if rng.random() < (0.1 if host else 0.03) else 'idle'
    if size.guests and host and image == 'idle' and rng.random() < 0.1:
        image = 'guest'
    trouble = ''
    if rng.random() < 0.25:
        trouble = rng.choice(
            [
                f'kill:{rng.uniform(0.15, 0.7):.2f}',
                f'kill:{rng.uniform(0.15, 0.7):.2f}',
                f'freeze:{rng.uniform(0.15, 0.6):.2f}:{rng.uniform(1, size.longest):.1f}',
                f'at:{rng.choice(CREATE_PLACES)}',
                f'at:{rng.choice(CREATE_PLACES)}',
                f'stop:{rng.choice(CREATE_PLACES)}:{rng.uniform(1, min(size.longest, 8.0)):.1f}',
                f'stop:{rng.choice(CREATE_PLACES)}:{rng.uniform(1, min(size.longest, 8.0)):.1f}',
            ]
        )
    named = rng.random() < 0.5 or trouble.startswith('stop') or (size.patient and trouble != '')
    return Operation(
        number,
        rng.randrange(size.clients),
        at,
        'create',
        uuid=_make_uuid(rng) if named else None,
        compute=host,
        image=image,
        query=GUEST_QUERY if image == 'guest' else QUERY,
        trouble=trouble,
        wait='--wait=started' if not trouble and rng.random() < 0.1 else '',
        proxied=rng.random() < 0.3,
        again=size.patient or rng.random() < 0.5,
    )


def _make_destroy(
    rng: random.Random, size: Size, number: int, at: float, living: list[Operation], destroyed: list[Operation]
) -> Operation:
    client, chance, trouble = rng.randrange(size.clients), rng.random(), ''
    if rng.random() < 0.2:
        trouble = rng.choice([f'kill:{rng.uniform(0.15, 0.5):.2f}', 'at:tombstoned'])
    wait = '--wait' if not trouble and rng.random() < 0.2 else ''
    proxied = rng.random() < 0.3
    if chance < 0.08:
        return Operation(number, client, at, 'destroy', uuid=_make_uuid(rng), proxied=proxied)
    if chance < 0.18 and destroyed:
        target = rng.choice(destroyed)
    elif chance < 0.4 and living[-1].uuid:
        # The destroy comes during the build, or before any process knows of the instance.
        target = living.pop()
        at = max(at, target.at + rng.uniform(0.2, 1.2))
        destroyed.append(target)
    else:
        # The real hosts are small, so their guests are destroyed sooner.
        weights = [4 if create.compute else 1 for create in living]
        target = living.pop(rng.choices(range(len(living)), weights)[0])
        destroyed.append(target)
    return Operation(
        number,
        client,
        at,
        'destroy',
        uuid=target.uuid,
        of=target.number,
        trouble=trouble,
        wait=wait,
        proxied=proxied,
        again=True,
    )


def _make_faults(rng: random.Random, size: Size) -> Iterator[Fault]:
    kinds = [*CONTROL_FAULTS, *(FAKE_FAULTS if size.fakes else ()), *(HOST_FAULTS if size.hosts else ())]
    deck: list[str] = []
    busy: dict[str, float] = {}
    at, number = size.fault_every, 0
    while at < size.seconds:
        if not deck:
            deck = rng.sample(kinds, len(kinds))
        for kind in list(deck):
            target = _choose_target(rng, size, kind)
            seconds = 0.0 if kind in INSTANT_FAULTS else _choose_seconds(rng, size, kind)
            if busy.get(target, 0.0) <= at:
                deck.remove(kind)
                busy[target] = at + seconds + SETTLE_SECONDS
                places = FAKE_PLACES if kind == 'fake-failpoint' else HOST_PLACES
                place = rng.choice(places) if kind.endswith('-failpoint') else ''
                yield Fault(number, at, kind, target, round(seconds, 2), rng.randrange(1000), place)
                number += 1
                break
        at += size.fault_every * rng.uniform(0.5, 1.5)


def _choose_seconds(rng: random.Random, size: Size, kind: str) -> float:
    if kind.endswith('-failpoint'):
        return 20.0  # at most: it ends when the place is reached
    if rng.random() < 0.15:
        return rng.uniform(0.5, size.longest)
    return rng.uniform(0.3, min(4.0, size.longest))


def _choose_target(rng: random.Random, size: Size, kind: str) -> str:
    if kind in FAKE_FAULTS:
        return f'fake{rng.randrange(size.fakes) + 1}'
    if kind in HOST_FAULTS:
        return f'hv{rng.randrange(size.hosts) + 1}'
    return kind.split('-')[0] if kind.endswith(('-kill', '-freeze', '-compact')) else 'proxy'


def _choose_other_client(rng: random.Random, size: Size, client: int) -> int:
    return (client + 1 + rng.randrange(max(size.clients - 1, 1))) % size.clients


def _make_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
