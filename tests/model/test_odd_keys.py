"""What somebody has put into etcd by hand, and what operators' commands say and do then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ecomp.model import keys
from ecomp.scheduler.changing.wait import Deadline
from ecomp.scheduler.operating.drain import disable, drained, inhabitants
from ecomp.store.client import Put
from tests.model.acting import Bounds
from tests.model.cloud import A, Cloud, U
from tests.model.explorer import Follow
from tests.model.virtual import inside, virtual
from tests.model.world import World

pytestmark = pytest.mark.fast


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    world = World(Bounds(), Follow())
    with virtual(), inside(world):
        yield Cloud(world)


@pytest.mark.parametrize('junk', ['junk', '', f'junk/{U}'])
def test_a_drain_waits_for_no_key_that_names_no_instance(cloud: Cloud, junk: str) -> None:
    cloud.host(A)
    cloud.store.commit([], [Put(keys.request(A, junk), 'x')])
    disable(cloud.placement, A, 'hv1')
    assert inhabitants(cloud.store, cloud.placement, A, 'hv1') == ['hv1: no instances there']
    drained(cloud.store, cloud.placement, A, 'hv1', Deadline(5.0), lambda _: None)
