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
from ecomp.placement.allocations import Requester
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import Claimer, DeliveryOutcome
from ecomp.scheduler.placing.create import create
from ecomp.scheduler.placing.session import Scheduler
from ecomp.store.client import Put, Store, Unchanged
from tests.kit.servers import Etcd, PlacementServer

IMAGE = 'http://images.example/i.qcow2'
SMALL = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}
RESOURCES = 'resources=VCPU:1,MEMORY_MB:64,DISK_GB:1'
# The owner of an attempt.
OWNER = {'host': 'here', 'pid': 1}


@dataclass
class Cloud:
    etcd: Etcd
    server: PlacementServer
    store: Store
    placement: Placement

    def make_compute(self, alive: bool = True, **totals: int) -> str:
        compute = self.server.make_provider(**(totals or {'VCPU': 2, 'MEMORY_MB': 512, 'DISK_GB': 10}))
        if alive:
            self.etcd.put(keys.compute(compute), '{"token": "x"}', self.etcd.grant())
        return compute

    def make_order_on(self, compute: str, instance: str | None = None, resources: str = RESOURCES) -> SetOrder:
        return SetOrder(
            instance or make_uuid(),
            query=f'{resources}&in_tree={compute}',
            image=IMAGE,
            user_id='a-user',
            project_id='a-project',
            stages={'requested': 'today'},
        )

    def make_order(self, alive: bool = True, **totals: int) -> tuple[str, SetOrder]:
        compute = self.make_compute(alive, **totals)
        return compute, self.make_order_on(compute)

    def create(  # noqa: PLR0913
        self,
        order: SetOrder,
        resume: bool = False,
        store: Store | None = None,
        placement: Placement | None = None,
        now: Callable[[], str] = lambda: 'now',
        candidates: list[Allocations] | None = None,
        offer: Offer | None = None,
    ) -> DeliveryOutcome:
        placement = placement or self.placement
        backend: Future[tuple[Placement, Offer]] = Future()
        try:
            if candidates is not None:
                offer = Offer(candidates, queried_at=time.monotonic())
            offer = offer or allocations.read_candidates(placement, order.query)
            backend.set_result((placement, offer))
        except EcompError as error:
            backend.set_exception(error)
        scheduler = Scheduler(store or self.store, backend.result, OWNER, random.Random(), now)
        (outcome,) = create(scheduler, order, resume).values()
        return outcome

    def create_all(
        self, order: SetOrder, resume: bool = False, store: Store | None = None
    ) -> Mapping[str, DeliveryOutcome]:
        answer = self.placement, allocations.read_candidates(self.placement, order.query or '')
        scheduler = Scheduler(store or self.store, lambda: answer, OWNER, random.Random(), lambda: 'now')
        return create(scheduler, order, resume)

    def make_claimer(self, placement: Placement | None = None) -> Claimer:
        """Return a Claimer whose attempt is never taken over."""
        return Claimer(placement or self.placement, Requester('a-user', 'a-project'), lambda: True)

    def make_candidate(self, compute: str) -> Candidate:
        return Candidate(compute, {compute: SMALL}, None)

    def read_request(self, compute: str, instance: str) -> Request:
        value = self.etcd.get(keys.request(compute, instance))
        assert value is not None
        request = parse_request(compute, keys.request(compute, instance), value)
        assert isinstance(request, Request)
        return request

    def assert_placed(self, compute: str, order: SetOrder) -> None:
        assert self.read_request(compute, order.instance).allocations == {compute: SMALL}
        assert self.server.read_allocations(order.instance) == {compute: SMALL}
        assert self.etcd.get(keys.attempt(order.instance)) is None

    def assert_not_placed(self, order: SetOrder, *computes: str) -> None:
        assert self.server.read_allocations(order.instance) == {}
        assert self.etcd.get(keys.attempt(order.instance)) is None
        assert [key for key in self.etcd.list_keys(keys.HOSTS) if keys.get_last_part(key) == order.instance] == []
        for compute in computes:
            assert order.instance not in self.server.read_consumers(compute)


class CountingStore(Store):
    request_count = 0

    def _ask(self, *args: Any) -> Any:
        self.request_count += 1
        return super()._ask(*args)


def interpose(
    target: Any, method: str, action: Callable[[], object], matches: Callable[..., bool] = lambda *_: True
) -> Any:
    """Replace a method so that `action` runs once, just before the first call that matches."""
    real, pending = getattr(target, method), [action]

    def intercept(*args: Any, **kwargs: Any) -> Any:
        if pending and matches(*args):
            pending.pop()()
        return real(*args, **kwargs)

    setattr(target, method, intercept)
    return target


def make_uuid() -> str:
    return str(uuid.uuid4())


def start_attempt(cloud: Cloud, order: SetOrder, lease: int) -> int:
    """Write the key of an attempt, as eschedule does first."""
    value = json.dumps({'version': 1, 'instances': [order.instance]})
    revision = cloud.store.commit(
        [Unchanged(keys.attempt(order.instance), 0)], [Put(keys.attempt(order.instance), value, lease)]
    )
    assert revision
    return revision
