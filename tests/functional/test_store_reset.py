"""Test streams that etcd resets after the call took effect: a write is never sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from h2.errors import ErrorCodes

from ecomp.conf import EtcdConfig
from ecomp.errors import UnknownOutcome
from ecomp.model import keys
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.store.client import Put, Store, Unchanged
from tests.functional.cloud import Cloud
from tests.kit.resetting import ResettingProxy
from tests.kit.servers import Etcd
from tests.kit.store_client import read_entry

CODES = [
    ErrorCodes.NO_ERROR,
    ErrorCodes.INTERNAL_ERROR,
    # It means "not processed", but a proxy may send it for a call that its etcd has carried out.
    ErrorCodes.REFUSED_STREAM,
    ErrorCodes.CANCEL,
    ErrorCodes.ENHANCE_YOUR_CALM,
]


@pytest.fixture
def front(etcd: Etcd) -> Iterator[ResettingProxy]:
    with ResettingProxy(etcd.endpoint) as server:
        yield server


@pytest.fixture
def store(front: ResettingProxy) -> Iterator[Store]:
    with closing(Store(EtcdConfig((front.address,), timeout=5.0))) as resetting_store:
        yield resetting_store


@pytest.mark.parametrize('code', CODES, ids=lambda code: code.name)
@pytest.mark.parametrize('sends_answer', [False, True], ids=['before the answer', 'behind the message'])
def test_reset_write_has_an_unknown_outcome(
    front: ResettingProxy, store: Store, prefix: str, code: ErrorCodes, sends_answer: bool
) -> None:
    key = f'{prefix}x'
    front.reset(key.encode(), code, sends_answer)
    with pytest.raises(UnknownOutcome):
        store.commit([Unchanged(key, 0)], [Put(key, 'written')])
    assert front.has_reset
    assert front.count(key.encode()) == 1
    entry = read_entry(store, key)
    assert (entry.value, entry.created) == (b'written', entry.revision)


def test_reset_read_is_sent_again(front: ResettingProxy, store: Store, prefix: str) -> None:
    key = f'{prefix}x'
    store.commit([], [Put(key, 'written')])
    front.reset(key.encode(), ErrorCodes.INTERNAL_ERROR)
    assert read_entry(store, key).value == b'written'
    assert front.has_reset


@pytest.mark.parametrize('code', CODES, ids=lambda code: code.name)
def test_reset_delivery_is_made_once(cloud: Cloud, front: ResettingProxy, store: Store, code: ErrorCodes) -> None:
    compute, order = cloud.make_order()
    front.reset(keys.request(compute, order.instance).encode(), code)
    assert cloud.create(order, store=store) == DeliveryOutcome(compute)
    assert front.has_reset
    cloud.assert_placed(compute, order)


def test_reset_destroy_is_accepted_once(cloud: Cloud, front: ResettingProxy, store: Store) -> None:
    compute, order = cloud.make_order()
    cloud.create(order)
    front.reset(b'"allocations": {}', ErrorCodes.INTERNAL_ERROR)
    assert 'is already being destroyed' in destroy(store, order.instance)
    assert front.has_reset
    assert cloud.read_request(compute, order.instance).is_tombstone
    assert front.count(b'"allocations": {}') == 1
