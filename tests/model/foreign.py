"""Domains of others on a model's host, which the product measures, publishes and adopts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Set
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import ecomp.agent.compute
from ecomp.agent.host.provider import PlacementInventory, Registration
from ecomp.agent.jobs import FailureLog
from ecomp.model import status
from ecomp.model.allocation import sum_resources
from ecomp.model.foreign import ForeignGuest

if TYPE_CHECKING:
    from tests.model.cloud import Cloud
    from tests.model.compute import Compute


class Looking(ecomp.agent.compute.Compute):
    """The product's compute, of which only looks at domains of others and claims are used."""

    def __init__(self, host: Compute) -> None:
        self.uuid, self.store, self.placement = host.uuid, host.store, host.placement
        self.host = cast(Any, SimpleNamespace(hypervisor=host.hypervisor))
        self.daemon = cast(Any, SimpleNamespace(is_ending=lambda: False))
        self.lock = threading.Lock()
        self.upkeep = cast(Any, SimpleNamespace(lock=self.lock))
        self._claims, self._presence, self._failures = host.keeper, host.presence, FailureLog()
        self._generation, self._unknown_since = None, {}
        self._machine, self._requests, self._planner = host, {}, host.planner
        foreign = host.hypervisor.list_foreign()
        self._adoptees = {name for name, guest in foreign.items() if guest.adopted_by == self.uuid}
        self._inventory = self._measure_inventory(foreign, self._adoptees)
        self._provider = Registration(
            host.placement, self.uuid, self._inventory, (), (), (), host.disk.make_path('state')
        )

    def register(self) -> None:
        self._provider.register()

    def measure(self) -> None:
        self._requests = self._machine.requests
        self._measure_again()
        self._presence.ensure_published()

    def reconcile(self) -> None:
        self._requests, self._planner = self._machine.requests, self._machine.planner
        self._reconcile_claims()

    def _measure_inventory(self, foreign: Mapping[str, ForeignGuest], left_out: Set[str]) -> PlacementInventory:
        sizes = (each.size for name, each in foreign.items() if name not in left_out and each.is_running)
        used, totals = sum_resources(sizes), {'VCPU': self._machine.room, 'MEMORY_MB': 9, 'DISK_GB': 9}
        return {
            name: {'total': total, 'reserved': used.get(name, 0), 'allocation_ratio': 1.0}
            for name, total in totals.items()
        }


def find_unreserved(cloud: Cloud) -> Iterator[str]:
    """Yield the enabled computes with a guest of others that is not claimed or reserved."""
    for compute in cloud.computes.values():
        provider = cloud.model.providers.get(compute.uuid)
        if compute.is_dead or provider is None or status.DISABLED in provider.traits:
            continue
        running = {name: each for name, each in compute.hypervisor.list_foreign().items() if each.is_running}
        unclaimed = [name for name in running if compute.uuid not in cloud.model.held.get(name, {})]
        used = sum_resources(running[name].size for name in unclaimed)
        if any(amount > provider.inventories[name]['reserved'] for name, amount in used.items()):
            names = ' and '.join(cloud.world.names[name] for name in unclaimed)
            yield f'what {names} uses is neither claimed nor reserved on {cloud.world.names[compute.uuid]}'
