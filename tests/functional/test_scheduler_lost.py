"""eschedule's create when a request, or its answer, is lost on the way: nothing is lost, leaked or there twice."""

from __future__ import annotations

import pytest

from ecomp.errors import Conflict, UnknownOutcome
from ecomp.model import keys
from ecomp.model.allocation import Allocations
from ecomp.model.record import new_record, to_json
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.store.client import Store
from tests.functional.cloud import SMALL, Cloud, new
from tests.kit.proxy import Proxy

# Lost on the way to etcd


@pytest.mark.parametrize('applied', [True, False])
def test_when_it_stays_unknown_nothing_is_released_and_the_same_uuid_goes_on(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, applied: bool
) -> None:
    compute, wanted = cloud.make_order()
    request_key = keys.request(compute, wanted.instance)
    arrived = (lambda: cloud.etcd.get(request_key)) if applied else None
    etcd_proxy.lose(request_key.encode(), arrived, and_stay_away=True)
    with pytest.raises(UnknownOutcome, match=wanted.instance) as caught:
        cloud.create(wanted, store=shaky_store)
    assert caught.value.exit_code == 7
    assert cloud.server.allocations(wanted.instance) == {compute: SMALL}
    assert (cloud.etcd.get(request_key) is not None) is applied
    assert cloud.create(wanted, resume=True) == DeliveryOutcome(compute, again=applied)
    cloud.is_whole(compute, wanted)


def test_anothers_delivery_is_not_taken_for_the_one_that_was_lost(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store
) -> None:
    here, there, instance = cloud.compute(), cloud.compute(), new()

    def meanwhile() -> str:
        # This one is so slow that its compute has released its claim.
        assert allocations.release_once(cloud.placement, instance, allocations.consumer(cloud.placement, instance))
        assert cloud.create(cloud.wanted(there, instance), resume=True) == DeliveryOutcome(there)
        record = new_record(there, cloud.delivered(there, instance), 'now')
        cloud.etcd.put_record(to_json(record))
        return 'now'

    etcd_proxy.lose_request(keys.request(here, instance).encode())
    with pytest.raises(Conflict, match='not delivered'):
        cloud.create(cloud.wanted(here, instance), store=shaky_store, now=meanwhile)
    assert etcd_proxy.has_lost
    cloud.is_whole(there, cloud.wanted(there, instance))
    assert cloud.etcd.get(keys.request(here, instance)) is None


@pytest.mark.parametrize('arrives', [True, False])
def test_an_announcement_that_is_lost_or_whose_answer_is(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, arrives: bool
) -> None:
    compute, wanted = cloud.make_order()
    attempt_key = keys.attempt(wanted.instance)
    etcd_proxy.lose(attempt_key.encode(), (lambda: cloud.etcd.get(attempt_key)) if arrives else None)
    assert cloud.create(wanted, store=shaky_store) == DeliveryOutcome(compute)
    assert etcd_proxy.has_lost
    cloud.is_whole(compute, wanted)


# Lost on the way to placement


@pytest.mark.parametrize('arrives', [True, False])
def test_a_claim_that_is_lost_or_whose_answer_is_ends_in_exactly_one(
    cloud: Cloud, placement_proxy: Proxy, shaky_placement: Placement, arrives: bool
) -> None:
    compute, wanted = cloud.make_order()
    applied = (lambda: cloud.server.allocations(wanted.instance)) if arrives else None
    placement_proxy.lose(f'PUT /allocations/{wanted.instance}'.encode(), applied)
    assert cloud.create(wanted, placement=shaky_placement) == DeliveryOutcome(compute)
    assert placement_proxy.has_lost
    assert cloud.server.consumers(compute) == {wanted.instance: SMALL}
    cloud.is_whole(compute, wanted)


@pytest.mark.parametrize('arrives', [True, False])
def test_when_a_claim_stays_unknown_nothing_is_released_and_the_same_uuid_goes_on(
    cloud: Cloud, placement_proxy: Proxy, shaky_placement: Placement, arrives: bool
) -> None:
    compute, wanted = cloud.make_order()
    found: list[Allocations] = [{compute: SMALL}]
    applied = (lambda: cloud.server.allocations(wanted.instance)) if arrives else None
    placement_proxy.lose(f'PUT /allocations/{wanted.instance}'.encode(), applied, and_stay_away=True)
    with pytest.raises(UnknownOutcome) as caught:
        cloud.create(wanted, placement=shaky_placement, found=found)
    assert caught.value.exit_code == 7
    # Somebody is still at it, as long as the lease lives: no compute releases the claim that may be there.
    assert cloud.etcd.get(keys.attempt(wanted.instance)) is not None
    assert cloud.create(wanted, resume=True) == DeliveryOutcome(compute)
    cloud.is_whole(compute, wanted)
