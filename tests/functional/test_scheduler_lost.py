"""Test create with lost requests and answers: nothing may be lost, leaked or made twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ecomp.errors import Conflict, UnknownOutcome
from ecomp.model import keys
from ecomp.model.allocation import Allocations
from ecomp.model.record import GONE, make_record, to_json
from ecomp.model.stack import Stack
from ecomp.model.stack import to_json as stack_to_json
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.scheduler.placing.stack import write_stack
from ecomp.store.client import Store
from tests.functional.cloud import SMALL, Cloud, make_uuid
from tests.kit.proxy import Proxy

# Messages to etcd


@pytest.mark.parametrize('applied', [True, False])
def test_unknown_delivery_keeps_its_claim_and_is_resumed(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, applied: bool
) -> None:
    compute, order = cloud.make_order()
    request_key = keys.request(compute, order.instance)
    arrived = (lambda: cloud.etcd.get(request_key)) if applied else None
    etcd_proxy.lose(request_key.encode(), arrived, stay_away=True)
    with pytest.raises(UnknownOutcome, match=order.instance) as caught:
        cloud.create(order, store=shaky_store)
    assert caught.value.exit_code == 7
    assert cloud.server.read_allocations(order.instance) == {compute: SMALL}
    assert (cloud.etcd.get(request_key) is not None) is applied
    assert cloud.create(order, resume=True) == DeliveryOutcome(compute, is_repeated=applied)
    cloud.assert_placed(compute, order)


def test_another_attempt_s_delivery_is_not_taken_for_the_lost_one(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store
) -> None:
    compute, other, instance = cloud.make_compute(), cloud.make_compute(), make_uuid()

    def deliver_elsewhere() -> str:
        # The first attempt is so slow that its compute has released its claim.
        assert allocations.release_once(cloud.placement, instance, allocations.read_consumer(cloud.placement, instance))
        assert cloud.create(cloud.make_order_on(other, instance), resume=True) == DeliveryOutcome(other)
        record = make_record(other, cloud.read_request(other, instance), 'now')
        cloud.etcd.put_record(to_json(record))
        return 'now'

    etcd_proxy.lose_request(keys.request(compute, instance).encode())
    with pytest.raises(Conflict, match='not delivered'):
        cloud.create(cloud.make_order_on(compute, instance), store=shaky_store, now=deliver_elsewhere)
    assert etcd_proxy.has_lost
    cloud.assert_placed(other, cloud.make_order_on(other, instance))
    assert cloud.etcd.get(keys.request(compute, instance)) is None


def test_lost_delivery_of_what_has_ended_since_is_reported_as_done(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store
) -> None:
    """Its compute carried it out, and a destroy, before eschedule read whether it was delivered."""
    compute, order = cloud.make_order()
    request_key = keys.request(compute, order.instance)

    def end_once_delivered() -> bool:
        if cloud.etcd.get(request_key) is None:
            return False
        gone = make_record(compute, cloud.read_request(compute, order.instance), 'now').enter_state(GONE, 'now', 'gone')
        cloud.etcd.put_record(to_json(gone))
        cloud.etcd.delete(request_key)
        return True

    etcd_proxy.lose_answer(request_key.encode(), end_once_delivered)
    assert cloud.create(order, store=shaky_store) == DeliveryOutcome(compute)
    assert etcd_proxy.has_lost
    assert cloud.etcd.get(keys.attempt(order.instance)) is None


@pytest.mark.parametrize('is_ours', [True, False])
def test_key_of_a_new_stack_is_read_back_after_a_lost_message(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, is_ours: bool
) -> None:
    """Of two first applies of a stack, the one whose write was lost finds the key of the other."""
    ours, theirs = (Stack(f's{make_uuid()[:8]}', epoch=make_uuid()) for _ in range(2))
    theirs = replace(theirs, name=ours.name)
    key = keys.stack(ours.name)
    if is_ours:
        etcd_proxy.lose_answer(key.encode(), lambda: cloud.etcd.get(key))
        assert write_stack(shaky_store, ours, 0) > 0
    else:
        assert write_stack(cloud.store, theirs, 0) > 0
        etcd_proxy.lose_request(key.encode())
        with pytest.raises(Conflict, match='another eschedule changed it; nothing was changed'):
            write_stack(shaky_store, ours, 0)
    assert etcd_proxy.has_lost
    entry = cloud.store.get(key)
    assert entry is not None
    assert entry.value == stack_to_json(ours if is_ours else theirs).encode()


@pytest.mark.parametrize('arrives', [True, False])
def test_attempt_is_announced_despite_a_lost_message(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, arrives: bool
) -> None:
    compute, order = cloud.make_order()
    attempt_key = keys.attempt(order.instance)
    etcd_proxy.lose(attempt_key.encode(), (lambda: cloud.etcd.get(attempt_key)) if arrives else None)
    assert cloud.create(order, store=shaky_store) == DeliveryOutcome(compute)
    assert etcd_proxy.has_lost
    cloud.assert_placed(compute, order)


# Messages to placement


@pytest.mark.parametrize('arrives', [True, False])
def test_claim_is_made_once_despite_a_lost_message(
    cloud: Cloud, placement_proxy: Proxy, shaky_placement: Placement, arrives: bool
) -> None:
    compute, order = cloud.make_order()
    applied = (lambda: cloud.server.read_allocations(order.instance)) if arrives else None
    placement_proxy.lose(f'PUT /allocations/{order.instance}'.encode(), applied)
    assert cloud.create(order, placement=shaky_placement) == DeliveryOutcome(compute)
    assert placement_proxy.has_lost
    assert cloud.server.read_consumers(compute) == {order.instance: SMALL}
    cloud.assert_placed(compute, order)


@pytest.mark.parametrize('arrives', [True, False])
def test_unknown_claim_is_not_released_and_is_resumed(
    cloud: Cloud, placement_proxy: Proxy, shaky_placement: Placement, arrives: bool
) -> None:
    compute, order = cloud.make_order()
    candidates: list[Allocations] = [{compute: SMALL}]
    applied = (lambda: cloud.server.read_allocations(order.instance)) if arrives else None
    placement_proxy.lose(f'PUT /allocations/{order.instance}'.encode(), applied, stay_away=True)
    with pytest.raises(UnknownOutcome) as caught:
        cloud.create(order, placement=shaky_placement, candidates=candidates)
    assert caught.value.exit_code == 7
    # The attempt key stays until its lease ends, so no compute releases the possible claim.
    assert cloud.etcd.get(keys.attempt(order.instance)) is not None
    assert cloud.create(order, resume=True) == DeliveryOutcome(compute)
    cloud.assert_placed(compute, order)
