"""A compute in this process without threads: its steps one by one, on real etcd and placement, pretended guests."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.images.cache import FakeImages
from ecomp.agent.instance.instances import ControlPlane, Host, Instances, Shape
from ecomp.agent.instance.pool import Inline
from ecomp.agent.instance.records import republish
from ecomp.agent.planner import Planner, Work
from ecomp.agent.turns import Complaints
from ecomp.model import keys
from ecomp.model.guest import DEFAULT_NETWORKS, Attachment
from ecomp.model.order import Request, to_json
from ecomp.model.record import ERROR, Failure, Record
from ecomp.store.client import Put
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud

NOW = '2026-11-21T09:00:00.000Z'


@dataclass
class Toy:
    """One compute."""

    cloud: Cloud
    compute: str
    hypervisor: FakeHypervisor
    host: Host
    state: Path
    networks: tuple[Attachment, ...] = DEFAULT_NETWORKS

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Its process ends, and begins anew with what its host has."""
        self.memory = Memory(self.state, self.compute, lambda: NOW)
        shape = Shape('qemu', True, self.networks, 'here')
        control = ControlPlane(self.compute, self.cloud.store, self.cloud.placement, lambda: NOW)
        self.instances, self.complaints = Instances(control, self.host, shape, self.memory), Complaints()
        self.planner = Planner(self.instances, self.complaints)

    def reboot(self) -> None:
        """Its machine is booted again, with all guests off, and it begins anew."""
        for each in self.hypervisor.guests():
            self.hypervisor.switch_off(each, self.compute)
        (self.state / 'boot').write_text('an earlier one\n')
        self.restart()

    def place(self) -> str:
        """A small guest delivered to it; the instance."""
        wanted = self.cloud.wanted(self.compute)
        self.cloud.create(wanted)
        return wanted.instance

    def build(self) -> str:
        """Place a small guest, and step until it has all that it is to have; the instance."""
        instance = self.place()
        self.settle()
        return instance

    def settle(self) -> None:
        """Step until there is nothing to do."""
        while self.step():
            pass

    def destroy(self, instance: str) -> None:
        """Write a tombstone without asking, as 2019's eschedule did."""
        tombstone = Request(instance, {}, image=None, user_id='a-user', project_id='a-project')
        self.cloud.store.commit([], [Put(keys.request(self.compute, instance), to_json(tombstone))])

    def list_keys(self, instance: str) -> tuple[str, str, str]:
        """List the keys of its request, its record and its address."""
        return keys.request(self.compute, instance), keys.record(self.compute, instance), keys.booted(instance)

    def republish(self, here: Collection[str]) -> None:
        """Write to an etcd that was restored what it remembers, with these guests here."""
        republish(self.compute, self.cloud.store, self.cloud.placement, self.memory, here, NOW)

    def read_failure(self, instance: str) -> tuple[Record, Failure]:
        """Read the record of one that failed anew; the record, and why."""
        self.instances.records.forget(instance)
        record = self.record(instance)
        assert record.error is not None
        assert record.state == ERROR
        return record, record.error

    def planned(self) -> list[Work]:
        """What is to be done now."""
        return self.planner.step(self.cloud.store.snapshot(keys.request_prefix(self.compute)).entries)

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
        found = self.instances.records.get(instance)
        assert found is not None
        return found


@contextmanager
def toy(
    cloud: Cloud,
    state: Path,
    hypervisor: FakeHypervisor | None = None,
    networks: tuple[Attachment, ...] = DEFAULT_NETWORKS,
) -> Iterator[Toy]:
    """A compute with room for ten small guests."""
    compute = cloud.compute(VCPU=10, MEMORY_MB=1024, DISK_GB=10)
    hypervisor = hypervisor or FakeHypervisor()
    runner = Inline(hypervisor, FakeImages())
    host = Host(hypervisor, runner, GuestData(state / 'metadata'))
    made = Toy(cloud, compute, hypervisor, host, state, networks)
    try:
        yield made
    finally:
        runner.stop()
