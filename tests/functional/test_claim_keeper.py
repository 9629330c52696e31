"""Rule 4 on real etcd and placement: the computes release what nobody stands behind, and nothing else."""

from __future__ import annotations

import json

import pytest

from ecomp.agent.host.claims import APART, ClaimKeeper
from ecomp.model import keys
from ecomp.placement import allocations
from ecomp.scheduler.placing import claim as claims
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.store.client import Put
from tests.functional.cloud import SMALL, Cloud, at_it, new

pytestmark = pytest.mark.fast


def orphan(cloud: Cloud, compute: str) -> str:
    instance = new()
    allocations.claim_once(cloud.placement, instance, {compute: SMALL}, 'a-user', 'a-project')
    return instance


def test_an_orphan_is_released_after_two_looks_apart(cloud: Cloud) -> None:
    compute = cloud.compute()
    instance = orphan(cloud, compute)
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (1000.0, 1001.0, 1000.0 + APART - 0.1):
        keeper.look([], now)
        assert instance in cloud.server.consumers(compute)
    keeper.look([], 1000.0 + APART)
    assert cloud.server.consumers(compute) == {}
    keeper.look([], 2000.0)


def test_who_stands_behind_a_claim(cloud: Cloud) -> None:
    compute = cloud.compute(VCPU=9, MEMORY_MB=999, DISK_GB=9)
    being_asked, of_a_set, delivered, with_a_guest, queued, nobody_s = (orphan(cloud, compute) for _ in range(6))
    lease = cloud.store.grant(60)
    cloud.store.commit([], [Put(keys.attempt(being_asked), 'unreadable', lease)])
    cloud.store.commit([], [Put(keys.attempt(new()), json.dumps({'instances': [of_a_set]}), lease)])
    cloud.store.commit([], [Put(keys.request(compute, delivered), '{}')])
    cloud.store.commit([], [Put(f'{keys.QUEUES}small/{queued}', '{}')])
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    keeper.look([with_a_guest], 0.0)
    keeper.look([with_a_guest], APART)
    assert cloud.server.consumers(compute).keys() == {being_asked, of_a_set, delivered, with_a_guest, queued}
    # Whoever was at it is gone: from now on it is counted anew.
    cloud.store.revoke(lease)
    keeper.look([with_a_guest], APART + 1)
    assert being_asked in cloud.server.consumers(compute)
    keeper.look([with_a_guest], 2 * APART + 1)
    assert cloud.server.consumers(compute).keys() == {delivered, with_a_guest, queued}
    assert nobody_s not in cloud.server.consumers(compute)


def test_a_killed_eschedule_s_claim_goes_and_its_uuid_can_go_on(cloud: Cloud) -> None:
    compute, wanted = cloud.make_order()
    lease = cloud.store.grant(60)
    at_it(cloud, wanted, lease)
    claims.Claimer(cloud.placement, 'a-user', 'a-project', lambda: True).claim({wanted.instance: {compute: SMALL}})
    keeper = ClaimKeeper(compute, cloud.store, cloud.placement)
    for now in (0.0, APART, 2 * APART):
        keeper.look([], now)
    assert wanted.instance in cloud.server.consumers(compute)  # its lease lives
    cloud.store.revoke(lease)
    keeper.look([], 3 * APART)
    # Between the two looks the user asks again.
    assert cloud.create(wanted, resume=True) == DeliveryOutcome(compute)
    keeper.look([], 4 * APART)
    cloud.is_whole(compute, wanted)


def test_a_claim_on_another_compute_is_not_released(cloud: Cloud) -> None:
    here, there = cloud.compute(), cloud.compute()
    instance = orphan(cloud, here)
    keeper = ClaimKeeper(here, cloud.store, cloud.placement)
    keeper.look([], 0.0)
    held = allocations.consumer(cloud.placement, instance)
    allocations.claim_once(cloud.placement, instance, {there: SMALL}, 'a-user', 'a-project', held.generation)
    keeper.look([], APART)
    keeper.look([], 2 * APART)
    assert cloud.server.allocations(instance) == {there: SMALL}
