"""A consistent cluster as an audit reads it, in memory, for a test to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ecomp.model import keys, record, states
from ecomp.model.audit import find_all
from ecomp.model.finding import Finding
from ecomp.model.flavor import Flavor
from ecomp.model.group import ANTI_AFFINITY, Group, Membership
from ecomp.model.guest import Guest, ReservedAddress, make_mac_address
from ecomp.model.order import NameOwner, Request
from ecomp.model.queue import QueueEntry
from ecomp.model.record import Failure, Interface, Record
from ecomp.model.stack import Place, Stack
from ecomp.model.stored import encode
from ecomp.model.world import HostFacts, Planes, ProviderState, World
from ecomp.store.client import Entry

# Computes: two are up, AWAY_COMPUTE is not.
ONE, TWO, AWAY_COMPUTE = (f'{digit * 8}-0000-4000-8000-000000000000' for digit in 'abc')
# Instances: ACTIVE and OFF on ONE, ELSEWHERE on AWAY_COMPUTE, GONE and FAILED are finished, UNKNOWN is in no plane.
ACTIVE, OFF, GONE, FAILED, ELSEWHERE, UNKNOWN = (f'{digit * 8}-0000-4000-8000-000000000000' for digit in '123456')
SIZE = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}
TOTALS = {'VCPU': 2, 'MEMORY_MB': 128, 'DISK_GB': 2}
IMAGE = 'http://images.example/i.qcow2'
LEASE = 7
STACK = Stack('shop', 'eeeeeeee-0000-4000-8000-000000000000')
FIRST, REPLACEMENT = STACK.make_place('web/1', 1), STACK.make_place('web/1', 2)


@dataclass
class WorldBuilder:
    """Contents of etcd, placement and hosts, which a test changes and then audits."""

    etcd: dict[str, Entry] = field(default_factory=dict)
    inventories: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    allocations: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    facts: dict[str, HostFacts] = field(default_factory=dict)
    mute: dict[str, str] = field(default_factory=dict)
    usages: dict[str, dict[str, int]] = field(default_factory=dict)

    def put(self, key: str, value: str, lease: int = 0) -> None:
        self.etcd[key] = Entry(key, value.encode(), len(self.etcd) + 1, lease)

    def put_request(self, compute: str, instance: str, tombstone: bool = False, name: str | None = None) -> None:
        allocations, image = ({}, None) if tombstone else ({compute: SIZE}, IMAGE)
        self.put(keys.request(compute, instance), encode(Request(instance, allocations, image=image, name=name)))

    def put_record(
        self,
        instance: str,
        state: str,
        compute: str = ONE,
        lease: int = 0,
        address: str | None = None,
        name: str | None = None,
    ) -> None:
        interface = Interface('default', make_mac_address(instance, 0), address, 'lease' if address else None, address)
        error = Failure('image', 'it is no image', 'all') if state == states.ERROR else None
        instance_record = Record(
            instance, compute, state, image=IMAGE, resources=SIZE, addresses=(interface,), error=error, name=name
        )
        self.put(keys.record(compute, instance), encode(instance_record), lease)

    def put_replacement(self, instance: str, replaced: str, project_id: str = '') -> None:
        request = Request(instance, {ONE: SIZE}, image=IMAGE, project_id=project_id, replaces=replaced)
        name = record.from_json(self.etcd[keys.record(ONE, instance)].value).name
        self.put(keys.request(ONE, instance), encode(replace(request, name=name)))

    def put_tombstone(self, compute: str, instance: str, replaced_by: str, project_id: str = '') -> None:
        former = Request(instance, {}, image=None, project_id=project_id, former_resources=SIZE)
        self.put(keys.request(compute, instance), encode(replace(former, replaced_by=replaced_by)))

    def put_queued(self, instance: str, name: str | None = None, flavor: str = 'small') -> None:
        waiting = QueueEntry(instance, Flavor(flavor, SIZE), image=IMAGE, user_id='u', project_id='p', name=name)
        self.put(waiting.key, encode(waiting))
        self.put(keys.flavor('small'), '{}')

    def put_name(self, name: str, instance: str, lease: int = 0) -> None:
        self.put(keys.name(name), encode(NameOwner(instance)), lease)

    def put_group(self, name: str, policy: str, members: dict[str, str]) -> None:
        self.put(keys.group(name), encode(Group(name, policy, True, members)))

    def put_grouped_request(self, instance: str, name: str) -> None:
        request = Request(instance, {ONE: SIZE}, image=IMAGE, name='web1', group=Membership(name, ANTI_AFFINITY, True))
        self.put(keys.request(ONE, instance), encode(request))

    def put_stacked_request(self, compute: str, place: Place, instance: str | None = None) -> str:
        """Put an active instance of a stack everywhere but in the key of the stack."""
        instance = instance or place.instance
        self.add_instance(compute, instance)
        request = Request(instance, {compute: SIZE}, image=IMAGE, stack=place)
        self.put(keys.request(compute, instance), encode(request))
        return instance

    def put_stack(self, stack: Stack) -> None:
        self.put(keys.stack(stack.name), encode(stack))

    def put_presence(self, compute: str, lease: int = LEASE) -> None:
        self.put(keys.compute(compute), '{"token": "x"}', lease)

    def add_provider(self, compute: str, totals: Mapping[str, int], name: str | None = None) -> None:
        self.names[compute] = name or compute
        self.inventories[compute] = {
            resource_class: {'total': total, 'allocation_ratio': 1.0} for resource_class, total in totals.items()
        }
        self.allocations.setdefault(compute, {})

    def add_guest(self, host: str, instance: str, running: bool = True, **other: Any) -> None:
        guest = replace(Guest(instance, host, True, running, True), **other)
        before = self.facts[host]
        self.facts[host] = replace(before, guests={**before.guests, instance: guest})

    def remove_guest(self, compute: str, instance: str) -> None:
        before = self.facts[compute]
        self.facts[compute] = replace(before, guests={k: v for k, v in before.guests.items() if k != instance})

    def add_metadata(self, compute: str, instance: str) -> None:
        before = self.facts[compute]
        metadata = {**before.metadata, make_mac_address(instance, 0): instance}
        self.facts[compute] = replace(before, metadata=metadata)

    def add_iso(self, compute: str, instance: str) -> None:
        before = self.facts[compute]
        self.facts[compute] = replace(before, seeds=before.seeds | {instance})

    def add_reservation(self, compute: str, instance: str, address: str) -> None:
        before = self.facts[compute]
        reservations = {**before.reservations, make_mac_address(instance, 0): ReservedAddress(instance, address)}
        self.facts[compute] = replace(before, reservations=reservations)

    def add_instance(self, compute: str, instance: str, state: str = states.ACTIVE, name: str | None = None) -> None:
        self.put_request(compute, instance, name=name)
        self.put_record(instance, state, compute, address='10.0.0.1', name=name)
        if name:
            self.put_name(name, instance)
        self.put(keys.address(instance), '10.0.0.1')
        self.allocations[compute][instance] = dict(SIZE)
        if compute in self.facts:
            self.add_guest(compute, instance, running=state == states.ACTIVE)
            self.add_metadata(compute, instance)
            self.add_iso(compute, instance)
            self.add_reservation(compute, instance, '10.0.0.1')

    def build_planes(self) -> Planes:
        """Return what eschedule reads: of the living computes no claims."""
        states = {compute: ProviderState(name) for compute, name in self.names.items()}
        states |= {name: self._build_state(name) for name in states if not self.is_alive(name)}
        return Planes(states, self.etcd, mute_reasons=self.mute, usages=self.usages)

    def build_host(self, compute: str) -> Planes:
        """Return what a host reads: its own keys, and those of other hosts about what it has."""
        facts, state = self.facts[compute], self._build_state(compute)
        present = facts.list_instances() | (state.allocations or {}).keys()
        present |= {key.split('/')[-1] for key in self.etcd if key.startswith(keys.record(compute, ''))}
        etcd = {
            key: entry
            for key, entry in self.etcd.items()
            if key.startswith((keys.ATTEMPTS, keys.QUEUES))
            or (key.startswith((keys.HOSTS, keys.INSTANCES)) and (compute in key or key.split('/')[-1] in present))
        }
        return Planes({compute: state}, etcd, compute, facts)

    def is_alive(self, compute: str) -> bool:
        return bool((entry := self.etcd.get(keys.compute(compute))) and entry.lease)

    def _build_state(self, compute: str) -> ProviderState:
        if compute not in self.names:
            return ProviderState(compute)
        return ProviderState(self.names[compute], self.inventories[compute], self.allocations[compute])

    def audit(self) -> list[Finding]:
        planes = [self.build_planes(), *(self.build_host(compute) for compute in self.facts if self.is_alive(compute))]
        return [finding for each in planes for finding in find_all(World(each))]

    def audit_codes(self) -> list[str]:
        return [finding.code for finding in self.audit()]


@pytest.fixture
def world() -> WorldBuilder:
    """A cluster without a finding."""
    builder = WorldBuilder()
    for compute in (ONE, TWO, AWAY_COMPUTE):
        builder.add_provider(compute, TOTALS)
        if compute != AWAY_COMPUTE:
            builder.put_presence(compute)
            builder.facts[compute] = HostFacts()
    builder.add_instance(ONE, ACTIVE, name='web1')
    builder.add_instance(ONE, OFF, states.STOPPED)
    builder.add_instance(AWAY_COMPUTE, ELSEWHERE)
    builder.inventories[AWAY_COMPUTE]['VCPU']['reserved'] = TOTALS['VCPU']
    builder.put_record(GONE, states.GONE, lease=LEASE)
    builder.put_record(FAILED, states.ERROR, lease=LEASE, name='failed')
    builder.put_name('failed', FAILED, LEASE)
    return builder
