"""Compare etcd and placement in memory with the real ones: equal calls, equal answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ecomp.conf import EtcdConfig
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Fence, Put, Store, Unchanged
from tests.kit.in_process import remove_providers, start_placement
from tests.kit.servers import Etcd
from tests.model.acting import Bounds
from tests.model.alike import get_answer, make_random_uuid
from tests.model.etcd import Etcd as EtcdModel
from tests.model.etcd import ModelStore
from tests.model.explorer import RecordingChooser
from tests.model.pair import PlacementPair
from tests.model.placement import PlacementModel
from tests.model.placement_client import ModelPlacement
from tests.model.twins import StorePair
from tests.model.world import World

# Calls of each server in every run.
CALLS = 1_000
# Calls of each server with --all.
CALLS_SLOW = 25_000
# Placement's slow run is split: each part starts with an empty placement, because calls of a full one take several
# times as long.
PARTS = 5
# Calls in one sequence, which has its own names.
CALLS_OF_SEQUENCE = 50


@pytest.fixture
def world() -> World:
    return World(Bounds(), RecordingChooser())


def compare_etcd(etcd: Etcd, world: World, steps: int, seed: int) -> None:
    store = Store(EtcdConfig((etcd.endpoint,)))
    try:
        for number in range(steps // CALLS_OF_SEQUENCE):
            rng = random.Random(f'{seed} {number}')
            twins = StorePair(store, ModelStore(EtcdModel(world)), f'/twins/{make_random_uuid()}/', rng)
            for _ in range(CALLS_OF_SEQUENCE):
                twins.step()
    finally:
        store.close()


def test_etcd_model_answers_like_etcd(etcd: Etcd, world: World) -> None:
    compare_etcd(etcd, world, CALLS, 1)


@pytest.mark.slow
def test_etcd_model_answers_like_etcd_for_long(etcd: Etcd, world: World) -> None:
    compare_etcd(etcd, world, CALLS_SLOW, 2)


def test_fence_refuses_the_same_writes_in_both(etcd: Etcd, world: World) -> None:
    real, model = Store(EtcdConfig((etcd.endpoint,))), ModelStore(EtcdModel(world))
    notices: list[str] = []
    prefix = f'/twins/{make_random_uuid()}/'
    try:
        answers: list[list[object]] = [[], []]
        for store, results in zip((real, model), answers, strict=True):
            written = store.commit([], [Put(f'{prefix}me', 'x')])
            assert written
            store.fence = Fence(Unchanged(f'{prefix}me', written), lambda: notices.append('broken'))
            results.append(get_answer(lambda each: each.commit([], [Put(f'{prefix}a', '1')]) is not None, store))
            results.append(
                get_answer(lambda each: each.commit([Unchanged(f'{prefix}b', 7)], [Put(f'{prefix}a', '2')]), store)
            )
            store.commit([], [Delete(f'{prefix}me')], use_fence=False)
            results.append(get_answer(lambda each: each.commit([], [Put(f'{prefix}a', '3')]), store))
            results.append(store.get(f'{prefix}a').value)  # type: ignore[union-attr]
        assert answers[0] == answers[1] == [True, None, 'Unreachable', b'1']
        assert set(notices) == {'broken'}
    finally:
        real.close()


def compare_placement(client: Placement, world: World, steps: int, seed: int) -> None:
    calls = number = 0
    while calls < steps:
        number += 1
        pair = PlacementPair(client, ModelPlacement(PlacementModel(world), world), random.Random(f'{seed} {number}'))
        for _ in range(CALLS_OF_SEQUENCE // 4):
            pair.step()
        calls += len(pair.calls)


@pytest.fixture
def in_process_placement() -> Iterator[Placement]:
    """The real placement, inside this process: a separate server would take ten times as long."""
    pytest.importorskip('placement', reason="openstack-placement is not installed: pip install '.[lab]'")
    yield start_placement()
    remove_providers(start_placement())


def test_placement_model_answers_like_placement(in_process_placement: Placement, world: World) -> None:
    compare_placement(in_process_placement, world, CALLS, 1)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(2, 2 + PARTS))
def test_placement_model_answers_like_placement_for_long(
    in_process_placement: Placement, world: World, seed: int
) -> None:
    compare_placement(in_process_placement, world, CALLS_SLOW // PARTS, seed)
