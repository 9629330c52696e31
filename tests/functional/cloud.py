"""A cloud without hypervisors: etcd, placement and a scheduler's clients of them.

The computes are presence keys and resource providers. No ecompute runs for them, so requests stay as delivered.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.allocation import Allocations
from ecomp.model.choose import Candidate, Offer
from ecomp.model.order import Request, SetOrder, parse_request
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import Claimer, DeliveryOutcome
from ecomp.scheduler.placing.create import create
from ecomp.store.client import Put, Store, Unchanged
from tests.kit.servers import Etcd, PlacementServer

IMAGE = 'http://images.example/i.qcow2'
SMALL = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}
RESOURCES = 'resources=VCPU:1,MEMORY_MB:64,DISK_GB:1'
# The owner of an attempt.
WHO = {'host': 'here', 'pid': 1}


@dataclass
class Cloud:
    """etcd and placement with live computes, and a scheduler's clients of them."""

    etcd: Etcd
    server: PlacementServer
    store: Store
    placement: Placement

    def compute(self, alive: bool = True, **totals: int) -> str:
        """Create a compute with room for two small guests, or with `totals`; live if `alive`."""
        compute = self.server.make_provider(**(totals or {'VCPU': 2, 'MEMORY_MB': 512, 'DISK_GB': 10}))
        if alive:
            self.etcd.put(keys.compute(compute), '{"token": "x"}', self.etcd.grant())
        return compute

    def wanted(self, compute: str, instance: str | None = None, resources: str = RESOURCES) -> SetOrder:
        """Return an order for one small guest on that compute."""
        return SetOrder(
            instance or new(),
            query=f'{resources}&in_tree={compute}',
            image=IMAGE,
            user_id='a-user',
            project_id='a-project',
            stages={'requested': 'today'},
        )

    def make_order(self, alive: bool = True, **totals: int) -> tuple[str, SetOrder]:
        """Create a compute and return it with an order for one small guest on it."""
        compute = self.compute(alive, **totals)
        return compute, self.wanted(compute)

    def create(
        self,
        wanted: SetOrder,
        resume: bool = False,
        store: Store | None = None,
        placement: Placement | None = None,
        now: Callable[[], str] = lambda: 'now',
        found: list[Allocations] | None = None,
        offer: Offer | None = None,
    ) -> DeliveryOutcome:
        """Place the order, with the given offer or candidates or else placement's current ones."""
        placement = placement or self.placement
        backend: Future[tuple[Placement, Offer]] = Future()
        try:
            if found is not None:
                offer = Offer(found, asked=time.monotonic())
            offer = offer or allocations.candidates(placement, wanted.query)
            backend.set_result((placement, offer))
        except EcompError as error:
            backend.set_exception(error)
        (outcome,) = create(store or self.store, backend, wanted, WHO, resume, random.Random(), now).values()
        return outcome

    def create_all(
        self, wanted: SetOrder, resume: bool = False, store: Store | None = None
    ) -> Mapping[str, DeliveryOutcome]:
        backend: Future[tuple[Placement, Offer]] = Future()
        backend.set_result((self.placement, allocations.candidates(self.placement, wanted.query or '')))
        return create(store or self.store, backend, wanted, WHO, resume, random.Random(), lambda: 'now')

    def claimer(self, placement: Placement | None = None) -> Claimer:
        """Return a Claimer whose attempt is never taken over."""
        return Claimer(placement or self.placement, 'a-user', 'a-project', lambda: True)

    def candidate(self, compute: str) -> Candidate:
        """Return a candidate for one small guest on the compute."""
        return Candidate(compute, {compute: SMALL}, None)

    def delivered(self, compute: str, instance: str) -> Request:
        value = self.etcd.get(keys.request(compute, instance))
        assert value is not None
        request = parse_request(compute, keys.request(compute, instance), value)
        assert isinstance(request, Request)
        return request

    def is_whole(self, compute: str, wanted: SetOrder) -> None:
        """Assert that the instance is delivered to and claimed on this compute.

        No attempt may be in flight for it.
        """
        assert self.delivered(compute, wanted.instance).allocations == {compute: SMALL}
        assert self.server.allocations(wanted.instance) == {compute: SMALL}
        assert self.etcd.get(keys.attempt(wanted.instance)) is None

    def has_nothing_of(self, wanted: SetOrder, *computes: str) -> None:
        """Assert that the order has no claim, no attempt and no delivery."""
        assert self.server.allocations(wanted.instance) == {}
        assert self.etcd.get(keys.attempt(wanted.instance)) is None
        assert [key for key in self.etcd.keys(keys.HOSTS) if keys.last(key) == wanted.instance] == []
        for compute in computes:
            assert wanted.instance not in self.server.consumers(compute)


class CountingStore(Store):
    """A store that counts its requests to etcd."""

    asked = 0

    def _ask(self, *given: Any) -> Any:
        self.asked += 1
        return super()._ask(*given)


def interpose(made: Any, call: str, do: Callable[[], object], matches: Callable[..., bool] = lambda *_: True) -> Any:
    """Replace a method so that `action` runs once, just before the first call that matches.

    Returns:
        The same object.
    """
    real, pending = getattr(made, call), [do]

    def called(*given: Any, **named: Any) -> Any:
        if pending and matches(*given):
            pending.pop()()
        return real(*given, **named)

    setattr(made, call, called)
    return made


def new() -> str:
    return str(uuid.uuid4())


def at_it(cloud: Cloud, wanted: SetOrder, lease: int) -> int:
    """Write the key of an attempt, as eschedule does first; return its revision."""
    value = json.dumps({'version': 1, 'instances': [wanted.instance]})
    revision = cloud.store.commit(
        [Unchanged(keys.attempt(wanted.instance), 0)], [Put(keys.attempt(wanted.instance), value, lease)]
    )
    assert revision
    return revision
