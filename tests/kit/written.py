"""A cluster that exists only as keys in etcd: its hosts live by a lease, and nothing runs."""

from __future__ import annotations

import random
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from ecomp.model import keys
from ecomp.model.allocation import Inventory, Provider, sum_resources
from ecomp.model.choose import PlacementReason
from ecomp.model.facts import encode_facts
from ecomp.model.json_object import dump
from ecomp.model.order import Request
from ecomp.model.record import Failure, make_record
from ecomp.model.stack import Place
from ecomp.model.states import ACTIVE, BUILDING, ERROR, STOPPED
from ecomp.model.stored import encode
from ecomp.model.text import format_time
from ecomp.store.client import MAX_TRANSACTION_OPERATIONS, Put, Store

CAPACITY = {'VCPU': 32, 'MEMORY_MB': 65536, 'DISK_GB': 500}
AMOUNTS = ({'VCPU': 1, 'MEMORY_MB': 1024, 'DISK_GB': 10}, {'VCPU': 2, 'MEMORY_MB': 8192, 'DISK_GB': 20})
SINCE = '2026-01-01T08:00:00.000Z'
# When an instance reached each stage, after the request.
STAGE_SECONDS = {'image': 1.1, 'disk': 1.4, 'started': 2.0, 'addressed': 6.2, 'ready': 14.5}
LEASE_SECONDS = 3600
EPOCH = '11111111-2222-4333-8444-555555555555'


class Written(NamedTuple):
    """The computes and instances of a written cluster."""

    computes: Sequence[str]
    instances: Sequence[str]


def make_uuid(kind: str, number: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f'{kind} {number}'))


def make_instance(
    number: int, compute: str, state: str = ACTIVE, error: Failure | None = None, **fields: object
) -> Mapping[str, str]:
    """Return the values of an instance by key."""
    instance, amounts = make_uuid('instance', number), AMOUNTS[number % 3 == 0]
    began = datetime.now(UTC) - timedelta(minutes=10)
    scheduled = format_time(began + timedelta(seconds=0.31))
    order = {'name': f'web-{number}', 'image': 'http://images.example/debian.qcow2', 'project_id': 'shop', **fields}
    request = Request(
        instance,
        allocations={compute: amounts},
        query='resources=' + ','.join(f'{name}:{amount}' for name, amount in amounts.items()),
        stages={'requested': format_time(began), 'scheduled': scheduled},
        why=PlacementReason('spread', 0.87, 9),
        **order,  # type: ignore[arg-type]
    )
    record = make_record(compute, request, scheduled)
    reached = {BUILDING: 2, ERROR: 0}.get(state, len(STAGE_SECONDS))
    record = record.enter_state(state, scheduled)
    for stage, seconds in [*STAGE_SECONDS.items()][:reached]:
        record = record.enter_state(state, format_time(began + timedelta(seconds=seconds)), stage)
    return {
        keys.request(compute, instance): encode(request),
        keys.record(compute, instance): encode(replace(record, error=error)),
    }


def make_host(
    compute: str,
    name: str,
    used: Mapping[str, int] = {},
    traits: Collection[str] = (),
    capacity: Mapping[str, int] = CAPACITY,
) -> Mapping[str, str]:
    """Return the values of a host by key, of which the host name alone has no lease."""
    provider = Provider(compute, {name: Inventory(total) for name, total in capacity.items()}, traits, ())
    presence = {'version': '1.4', 'hostname': name, 'since': SINCE, 'kind': 'kvm', 'queues': True}
    return {
        keys.hostname(compute): dump({'version': 1, 'hostname': name}),
        keys.compute(compute): dump(presence),
        keys.facts(compute): encode_facts(provider, used, ()),
    }


def write_cluster(store: Store, host_count: int, instance_count: int) -> Written:
    """Write hosts, of which few are full and many are not, and instances in stacks of ten."""
    lease, computes = store.grant(LEASE_SECONDS), [make_uuid('compute', number) for number in range(host_count)]
    puts, held = list[Put](), {compute: list[Mapping[str, int]]() for compute in computes}
    rng = random.Random(1)
    weights = [0.2 + rng.random() ** 2 for _ in computes]
    for number, compute in enumerate(rng.choices(computes, weights, k=instance_count)):
        held[compute].append(AMOUNTS[number % 3 == 0])
        place = Place(f'shop{number // 10}', 'web', number % 10 + 1, EPOCH, 1)
        state = STOPPED if number % 17 == 0 else ACTIVE
        puts += [Put(*pair) for pair in make_instance(number, compute, state, stack=place).items()]
    for number, compute in enumerate(computes):
        values = make_host(compute, f'hv{number + 1:04}', sum_resources(held[compute]))
        puts += [Put(key, value, 0 if key.startswith(keys.HOSTNAMES) else lease) for key, value in values.items()]
    for some in split(puts):
        store.commit([], some)
    return Written(computes, [make_uuid('instance', number) for number in range(instance_count)])


def split(puts: Sequence[Put]) -> Iterator[Sequence[Put]]:
    for start in range(0, len(puts), MAX_TRANSACTION_OPERATIONS):
        yield puts[start : start + MAX_TRANSACTION_OPERATIONS]
