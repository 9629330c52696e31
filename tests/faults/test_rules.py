"""Every write about an instance compares its request's revision (rule: compared-revision).

Each of ecompute's tasks is carried out on a request that was rewritten after it was planned: nothing changes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.images.cache import FakeImages
from ecomp.agent.instance.instances import ControlPlane, GuestTemplate, HostServices, Instances
from ecomp.agent.instance.pool import InlineRunner
from ecomp.agent.instance.records import Superseded
from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.model.guest import DEFAULT_NETWORKS, Address, Guest, make_mac_address
from ecomp.model.order import PowerAction, Request
from ecomp.model.record import Interface, Record
from ecomp.model.states import ACTIVE, BUILDING, STOPPED
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.store.client import Put, Store
from ecomp.virt.fake import FakeHypervisor
from tests.kit.servers import Etcd, PlacementServer

NOW = '2026-11-21T09:00:00.000Z'
SIZE = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}


@dataclass
class World:
    """One requested instance. `planned` is the revision that ecompute has read."""

    instances: Instances
    request: Request
    compute: str
    guest: Guest
    planned: int
    hypervisor: FakeHypervisor


@pytest.fixture
def world(etcd: Etcd, placement: PlacementServer, tmp_path: Path) -> Iterator[World]:
    compute = placement.make_provider(VCPU=4, MEMORY_MB=1024, DISK_GB=10)
    instance = str(uuid.uuid4())
    store, client = Store(EtcdConfig(endpoints=(etcd.endpoint,))), Placement(placement.url)
    hypervisor = FakeHypervisor()
    runner = InlineRunner(hypervisor, FakeImages())
    memory = Memory(tmp_path, compute, lambda: NOW)
    host = HostServices(hypervisor, runner, GuestData(tmp_path / 'metadata'))
    shape = GuestTemplate('qemu', True, DEFAULT_NETWORKS, 'here')
    instances = Instances(ControlPlane(compute, store, client, lambda: NOW), host, shape, memory)
    request = Request(instance, {compute: SIZE}, image='http://h/i', user_id='u', project_id='p')
    allocations.replace_allocations(client, instance, request.allocations, 'u', 'p')
    planned = store.commit([], [Put(keys.request(compute, instance), encode(request))])
    assert planned
    guest = Guest(instance, compute, defined=True, running=True, disk=True)
    yield World(instances, request, compute, guest, planned, hypervisor)
    store.close()
    client.close()


def make_record(world: World, state: str) -> Record:
    name = world.request.instance
    return Record(
        name, world.compute, state, image='http://h/i', addresses=(Interface('default', make_mac_address(name, 0)),)
    )


def read_planes(etcd: Etcd, placement: PlacementServer, world: World) -> list[object]:
    name = world.request.instance
    names = (keys.request(world.compute, name), keys.record(world.compute, name), keys.address(name))
    return [*(etcd.get(key) for key in names), placement.read_allocations(name)]


def add_power_change(world: World, action: str) -> Request:
    return replace(world.request, power=PowerAction(action, str(uuid.uuid4())))


TASKS: dict[str, tuple[str | None, Callable[[World], None]]] = {
    'build': (None, lambda w: w.instances.build(w.request, w.planned, None)),
    'build again': (BUILDING, lambda w: w.instances.build(w.request, w.planned, None)),
    'adopt': (None, lambda w: w.instances.build(w.request, w.planned, w.guest)),
    'destroy': (ACTIVE, lambda w: w.instances.destroy(replace(w.request, allocations={}, image=None), w.planned)),
    'power off': (ACTIVE, lambda w: w.instances.record_power(w.request.instance, w.planned, None)),
    'address': (
        ACTIVE,
        lambda w: w.instances.record_addresses(
            w.request.instance, w.planned, {make_mac_address(w.request.instance, 0): Address('10.0.0.1', 'lease')}
        ),
    ),
    'shut down': (ACTIVE, lambda w: w.instances.shut_down(add_power_change(w, 'stop'), w.planned)),
    'switch off': (ACTIVE, lambda w: w.instances.switch_off(add_power_change(w, 'stop'), w.planned)),
    'start': (STOPPED, lambda w: w.instances.start(add_power_change(w, 'start'), w.planned)),
    'done': (STOPPED, lambda w: w.instances.record_power_done(add_power_change(w, 'stop'), w.planned, None)),
    'clear': (None, lambda w: w.instances.drop_request(w.request.instance, w.planned, 'no reason')),
}


@pytest.mark.parametrize('task', TASKS)
@pytest.mark.parametrize('since', ['rewritten', 'deleted'])
def test_late_write_changes_nothing(
    etcd: Etcd, placement: PlacementServer, world: World, task: str, since: str
) -> None:
    state, carry_out = TASKS[task]
    name = world.request.instance
    if state is not None:
        etcd.put_record(encode(make_record(world, state)))
        assert world.instances.records.get(name) is not None  # loads it into ecompute's records
    # Between the plan and the task.
    if since == 'rewritten':
        etcd.put(keys.request(world.compute, name), encode(replace(world.request, user_id='somebody else')))
    else:
        etcd.delete(keys.request(world.compute, name))
    before = read_planes(etcd, placement, world)
    with pytest.raises(Superseded):
        carry_out(world)
    assert read_planes(etcd, placement, world) == before
    assert world.hypervisor.list_guests() == {}


def test_write_in_time_succeeds(etcd: Etcd, placement: PlacementServer, world: World) -> None:
    # Otherwise the test above could not fail.
    name = world.request.instance
    TASKS['build'][1](world)
    TASKS['address'][1](world)
    host, record_value, booted, claims = read_planes(etcd, placement, world)
    assert host is not None
    assert record_value is not None
    assert (booted, claims) == (b'10.0.0.1', {world.compute: SIZE})
    assert set(world.hypervisor.list_guests()) == {name}
    TASKS['destroy'][1](world)
    host, record_value, booted, claims = read_planes(etcd, placement, world)
    assert (host, booted, claims) == (None, None, {})
    assert b'"gone"' in (record_value or b'')
    assert world.hypervisor.list_guests() == {}
