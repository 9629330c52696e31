"""Compare etcd and placement in memory with the real ones: equal calls, equal answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ecomp.conf import EtcdConfig
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Fence, Put, Store, Unchanged
from ecomp.store.http2_client import EtcdMember
from tests.kit.in_process import remove_providers, start_placement
from tests.kit.memory_etcd import Etcd as EtcdModel
from tests.kit.memory_etcd import MemoryMember, NoWorld
from tests.kit.memory_placement import PlacementModel
from tests.kit.servers import Etcd
from tests.model.acting import Bounds
from tests.model.alike import get_answer, make_random_uuid
from tests.model.etcd import ModelStore
from tests.model.explorer import RecordingChooser
from tests.model.messages import MemberPair
from tests.model.pair import PlacementPair
from tests.model.placement_client import ModelPlacement
from tests.model.planting import (
    Constant,
    Plant,
    always,
    drop_statement,
    never,
    plant_bugs,
    replace_assignment,
    replace_call,
    replace_condition,
    replace_return,
    return_constant,
)
from tests.model.twins import StorePair
from tests.model.world import World

# Calls of each server in every run; those of placement take ten times as long.
CALLS = 1_000
PLACEMENT_CALLS = 300
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


@pytest.fixture(scope='module')
def quiet_etcd() -> Iterator[Etcd]:
    """An etcd that nobody else writes to, so that each new revision is of this test."""
    with Etcd() as server:
        yield server


def compare_members(etcd: Etcd, steps: int, seed: int) -> None:
    member = EtcdMember(EtcdConfig((etcd.endpoint,)), etcd.endpoint)
    try:
        for number in range(steps // CALLS_OF_SEQUENCE):
            rng = random.Random(f'{seed} {number}')
            memory = MemoryMember(EtcdModel(NoWorld()))
            pair = MemberPair(member, memory, f'/{make_random_uuid()[:8]}/'.encode(), rng)
            for _ in range(CALLS_OF_SEQUENCE):
                pair.step()
            pair.compare_watches()
    finally:
        member.close()


def test_member_in_memory_answers_like_etcd(quiet_etcd: Etcd) -> None:
    compare_members(quiet_etcd, CALLS, 1)


@pytest.mark.slow
def test_member_in_memory_answers_like_etcd_for_long(quiet_etcd: Etcd) -> None:
    compare_members(quiet_etcd, CALLS_SLOW, 2)


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
    compare_placement(in_process_placement, world, PLACEMENT_CALLS, 1)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(2, 2 + PARTS))
def test_placement_model_answers_like_placement_for_long(
    in_process_placement: Placement, world: World, seed: int
) -> None:
    compare_placement(in_process_placement, world, CALLS_SLOW // PARTS, seed)


# Differences that are planted in the models; each must be noticed.

ETCD, PLACEMENT = 'tests.kit.memory_etcd:', 'tests.kit.memory_placement:PlacementModel.'
ETCD_DIFFERENCES = {
    'a key may be written twice': Plant(ETCD + 'Etcd.check_transaction', never('put', 'deleted')),
    'a transaction may be long': Plant(ETCD + 'MAX_TRANSACTION_OPERATIONS', Constant(200)),
    'a lease need not exist': Plant(ETCD + 'Etcd.check_leases', return_constant(None)),
    'a missing key is unchanged': Plant(
        ETCD + 'Etcd.is_met', replace_return('entry is None or entry.revision == condition.revision')
    ),
    'keys outlive their lease': Plant(ETCD + 'Etcd.end_lease', never('expired')),
    'keys of a lease end in another order': Plant(ETCD + 'Etcd.end_lease', replace_call('sorted', 'expired')),
    'deleting nothing is a change': Plant(ETCD + 'Etcd.write', never('entries')),
    'each write creates its key': Plant(ETCD + 'Etcd.write', replace_assignment('created', 'self.revision')),
    'a limit is ignored': Plant(ETCD + 'MemoryMember._answer_range', replace_assignment('limited', 'selected')),
    'the future can be read': Plant(ETCD + 'MemoryMember._answer_range', never('request', 'etcd')),
    'keys are unsorted': Plant(ETCD + 'MemoryMember._answer_range', drop_statement('sort')),
    'old writes are read': Plant(ETCD + 'MemoryMember._answer_range', replace_assignment('selected', 'matching')),
    'the past is as the present': Plant(ETCD + 'MemoryMember._list_entries', always('revision')),
    'an unknown lease can be revoked': Plant(ETCD + 'MemoryMember._answer_revoke', never('leases')),
    'a watch reports what did not change': Plant(ETCD + 'MemoryMember._record_changes', always('before', 'after')),
}
PLACEMENT_DIFFERENCES = {
    'a generation is not compared': Plant(PLACEMENT + 'begin', never('row', 'generation')),
    'a claim needs no room': Plant(
        PLACEMENT + '_check', replace_condition('inventory is None', 'inventory', 'used_then')
    ),
    'a consumer outlives its allocations': Plant(PLACEMENT + 'finish', never('before')),
    'a claim changes no provider': Plant(PLACEMENT + 'finish', drop_statement('providers', 'generation')),
    'a provider may exist twice': Plant(PLACEMENT + 'write', never('body', 'other')),
    'a provider in use can be deleted': Plant(PLACEMENT + 'write', never('held')),
    'the generation of a provider is not compared': Plant(PLACEMENT + 'write', never('body', 'generation')),
    'more may be reserved than there is': Plant(PLACEMENT + '_set_part', never('fields')),
    'an inventory in use can be removed': Plant(PLACEMENT + '_set_part', never('get_usage')),
    'an unknown trait can be set': Plant(PLACEMENT + '_set_part', never('unknown')),
    'an unknown trait can be required': Plant(PLACEMENT + '_matches_parameter', never('unknown')),
    'a full provider is a candidate': Plant(
        PLACEMENT + '_can_allocate', replace_condition('inventory is None', 'get_usage')
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('difference', ETCD_DIFFERENCES)
def test_planted_difference_from_etcd_is_noticed(quiet_etcd: Etcd, difference: str) -> None:
    with plant_bugs([ETCD_DIFFERENCES[difference]]), pytest.raises(AssertionError):
        compare_members(quiet_etcd, CALLS, 1)


@pytest.mark.slow
@pytest.mark.parametrize('difference', PLACEMENT_DIFFERENCES)
def test_planted_difference_from_placement_is_noticed(
    in_process_placement: Placement, world: World, difference: str
) -> None:
    with plant_bugs([PLACEMENT_DIFFERENCES[difference]]), pytest.raises(AssertionError):
        # At most as many calls as a part of the long run.
        compare_placement(in_process_placement, world, CALLS_SLOW // PARTS, 1)
