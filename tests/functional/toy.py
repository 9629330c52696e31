"""A compute in this process without threads, on real etcd and placement with fake guests."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.images.cache import FakeImages
from ecomp.agent.instance.instances import ControlPlane, GuestTemplate, HostServices, Instances
from ecomp.agent.instance.pool import InlineRunner
from ecomp.agent.instance.records import republish
from ecomp.agent.jobs import FailureLog
from ecomp.agent.planner import Planner, Work
from ecomp.model import keys
from ecomp.model.guest import DEFAULT_NETWORKS, Attachment
from ecomp.model.order import Request
from ecomp.model.record import Failure, Record
from ecomp.model.states import ERROR
from ecomp.model.stored import encode
from ecomp.store.client import Put
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud

NOW = '2026-11-21T09:00:00.000Z'


@dataclass
class ToyCompute:
    """A compute whose planning steps the test makes one by one."""

    cloud: Cloud
    compute: str
    hypervisor: FakeHypervisor
    host: HostServices
    state: Path
    networks: tuple[Attachment, ...] = DEFAULT_NETWORKS

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.memory = Memory(self.state, self.compute, lambda: NOW)
        shape = GuestTemplate('qemu', True, self.networks, 'here')
        control = ControlPlane(self.compute, self.cloud.store, self.cloud.placement, lambda: NOW)
        self.instances = Instances(control, self.host, shape, self.memory)
        self.complaints = FailureLog()
        self.planner = Planner(self.instances, self.complaints)

    def reboot(self) -> None:
        for instance in self.hypervisor.list_guests():
            self.hypervisor.switch_off(instance, self.compute)
        (self.state / 'boot').write_text('an earlier one\n')
        self.restart()

    def place(self) -> str:
        order = self.cloud.make_order_on(self.compute)
        self.cloud.create(order)
        return order.instance

    def build(self) -> str:
        instance = self.place()
        self.settle()
        return instance

    def settle(self) -> None:
        while self.step():
            pass

    def destroy(self, instance: str) -> None:
        """Write a tombstone without any check, like eschedule of 2019."""
        tombstone = Request(instance, {}, image=None, user_id='a-user', project_id='a-project')
        self.cloud.store.commit([], [Put(keys.request(self.compute, instance), encode(tombstone))])

    def list_keys(self, instance: str) -> tuple[str, str, str]:
        return keys.request(self.compute, instance), keys.record(self.compute, instance), keys.address(instance)

    def republish(self, here: Collection[str]) -> None:
        republish(self.compute, self.cloud.store, self.cloud.placement, self.memory, here, NOW)

    def read_failure(self, instance: str) -> tuple[Record, Failure]:
        self.instances.records.forget(instance)
        record = self.read_record(instance)
        assert record.error is not None
        assert record.state == ERROR
        return record, record.error

    def plan(self) -> list[Work]:
        return self.planner.step(self.cloud.store.snapshot(keys.request_prefix(self.compute)).entries)

    def step(self) -> list[str]:
        done = []
        for work in self.plan():
            self.planner.begin(work)
            self.planner.carry_out(work)
            done.append(f'{work.task.kind.value} {work.task.instance}')
        return done

    def read_record(self, instance: str) -> Record:
        record = self.instances.records.get(instance)
        assert record is not None
        return record


@contextmanager
def make_toy_compute(
    cloud: Cloud,
    state: Path,
    hypervisor: FakeHypervisor | None = None,
    networks: tuple[Attachment, ...] = DEFAULT_NETWORKS,
) -> Iterator[ToyCompute]:
    compute = cloud.make_compute(VCPU=10, MEMORY_MB=1024, DISK_GB=10)
    hypervisor = hypervisor or FakeHypervisor()
    runner = InlineRunner(hypervisor, FakeImages())
    host = HostServices(hypervisor, runner, GuestData(state / 'metadata'))
    yield ToyCompute(cloud, compute, hypervisor, host, state, networks)
