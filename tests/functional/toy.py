"""A compute in this process without threads: its steps one by one, on real etcd and placement, pretended guests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ecomp.agent.complaints import Complaints
from ecomp.agent.instances import Instances, Shape
from ecomp.agent.memory import Memory
from ecomp.agent.metadata import GuestData
from ecomp.agent.planner import Planner
from ecomp.agent.pool import Inline, Pretended
from ecomp.agent.tasks import Work
from ecomp.model import keys
from ecomp.model.network import DEFAULT_NETWORKS
from ecomp.model.record import Record
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud

NOW = '2026-11-21T09:00:00.000Z'


@dataclass
class Toy:
    """One compute. `nudges` are the reasons why it was worth another step."""

    cloud: Cloud
    compute: str
    hypervisor: FakeHypervisor
    runner: Inline
    instances: Instances
    planner: Planner
    memory: Memory
    complaints: Complaints
    nudges: list[str] = field(default_factory=list)

    def place(self) -> str:
        """A small guest delivered to it; the instance."""
        wanted = self.cloud.wanted(self.compute)
        self.cloud.create(wanted)
        return wanted.instance

    def planned(self) -> list[Work]:
        """What is to be done now."""
        return self.planner.step(self.cloud.store.snapshot(keys.host_prefix(self.compute)).entries)

    def step(self) -> list[str]:
        """Plan, and do all of it: what was done to which instance."""
        done = []
        for work in self.planned():
            self.planner.begin(work)
            self.planner.carry_out(work)
            done.append(f'{work.task.kind.value} {work.task.instance}')
        return done

    def record(self, instance: str) -> Record:
        """As it knows it."""
        found = self.instances.record(instance)
        assert found is not None
        return found


@contextmanager
def toy(cloud: Cloud, state: Path, hypervisor: FakeHypervisor | None = None) -> Iterator[Toy]:
    """A compute with room for ten small guests."""
    compute = cloud.compute(VCPU=10, MEMORY_MB=1024, DISK_GB=10)
    hypervisor = hypervisor or FakeHypervisor()
    runner = Inline(hypervisor, Pretended())
    memory, data = Memory(state, compute, lambda: NOW), GuestData(state / 'metadata')
    shape = Shape('qemu', True, DEFAULT_NETWORKS, 'here')
    instances = Instances(compute, cloud.store, cloud.placement, runner, hypervisor, data, shape, memory, lambda: NOW)
    nudges: list[str] = []
    complaints = Complaints()
    planner = Planner(compute, instances, hypervisor, runner, memory, complaints, nudges.append)
    try:
        yield Toy(cloud, compute, hypervisor, runner, instances, planner, memory, complaints, nudges)
    finally:
        runner.stop()
