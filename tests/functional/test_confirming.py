"""Rule 2: a build waits for what placement says of its claim, which is asked while all before it is written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ecomp.agent.compute import note_ends
from ecomp.agent.instance.instances import allocations, aside
from ecomp.errors import EcompError, NotFound, Unreachable
from ecomp.model import keys
from ecomp.model.record import ACTIVE, BUILDING
from ecomp.placement.allocations import Consumer
from ecomp.store.client import Delete
from tests.functional.cloud import Cloud
from tests.functional.toy import toy

pytestmark = pytest.mark.fast


@pytest.mark.parametrize('says', [Unreachable('placement is away', 'placement'), EcompError('too old'), NotFound('no')])
def test_a_build_waits_as_long_as_placement_does_not_confirm(cloud: Cloud, tmp_path: Path, says: EcompError) -> None:
    """It says nothing to etcd, does nothing twice, and no answer but a claim that differs ends it."""
    with toy(cloud, tmp_path) as compute:
        instance = compute.place()

        def asked(*_: object) -> Consumer:
            raise says

        revision = cloud.store.snapshot('/').revision
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allocations, 'consumer', asked)
            assert compute.step() == [f'build {instance}']
            remembered = compute.memory.all()[instance].record
            assert (remembered.state, remembered.attempts) == (BUILDING, 0)
            patch.setattr(compute.hypervisor, 'reserve', None)
            for _ in range(4):
                compute.planner.works_again()
                assert compute.step() == [f'build {instance}']
            assert cloud.store.snapshot('/').revision == revision
            assert compute.instances.records.get(instance) is None
            assert compute.hypervisor.guests() == {}
        compute.planner.works_again()
        compute.step()
        assert compute.record(instance).state == ACTIVE


@pytest.mark.parametrize('restarts', [False, True])
def test_what_was_begun_and_is_not_asked_for_any_more_is_taken_back(
    cloud: Cloud, tmp_path: Path, restarts: bool
) -> None:
    """Its request was deleted by hand while placement did not answer, or its compute was down."""
    with toy(cloud, tmp_path) as compute:
        instance = compute.place()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allocations, 'consumer', lambda *_: (_ for _ in ()).throw(Unreachable('placement is away')))
            compute.step()
        assert [each.instance for each in compute.hypervisor.reservations().values()] == [instance]
        cloud.store.commit([], [Delete(keys.request(compute.compute, instance))])
        if restarts:
            compute.restart()
            note_ends(compute.compute, cloud.store, compute.memory, compute.hypervisor.guests().keys())
        compute.step()
        compute.planner.recheck()
        assert compute.hypervisor.reservations() == {}
        assert list((tmp_path / 'metadata').glob('*')) == []
        assert cloud.server.allocations(instance) == {}
        assert compute.memory.all() == {}
        compute.instances.records.forget(instance)
        assert compute.instances.records.get(instance) is None


@pytest.mark.parametrize('restarts', [False, True])
def test_what_ended_while_its_host_was_down_does_not_come_back(cloud: Cloud, tmp_path: Path, restarts: bool) -> None:
    """It died in a build, was destroyed and forgotten, and its record has gone since: nothing is given back twice."""
    with toy(cloud, tmp_path) as compute:
        instance = compute.place()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compute.host.runner, 'run', lambda _: (_ for _ in ()).throw(Unreachable('its host died')))
            compute.step()
        assert compute.record(instance).state == BUILDING
        key = keys.record(compute.compute, instance)
        # As host forget does, and clear.
        allocations.release_once(cloud.placement, instance, allocations.consumer(cloud.placement, instance))
        cloud.store.commit([], [Delete(key), Delete(keys.request(compute.compute, instance))])
        if restarts:
            compute.restart()
            note_ends(compute.compute, cloud.store, compute.memory, compute.hypervisor.guests().keys())
        compute.step()
        for _ in range(3):
            compute.planner.recheck()
        assert cloud.store.get(key) is None
        assert compute.memory.all() == {}
        assert compute.hypervisor.reservations() == {}


def test_nothing_is_left_of_what_placement_does_not_confirm(cloud: Cloud, tmp_path: Path) -> None:
    with toy(cloud, tmp_path) as compute:
        instance = compute.place()
        client = cloud.placement
        allocations.release_once(client, instance, allocations.consumer(client, instance))
        compute.step()
        assert compute.failed(instance)[1].stage == 'scheduled'
        assert compute.hypervisor.reservations() == {}
        assert list((tmp_path / 'metadata').glob('*')) == []
        assert compute.hypervisor.guests() == {}


def test_placement_is_asked_while_an_address_is_reserved(cloud: Cloud, tmp_path: Path) -> None:
    """The one waits here until the other was begun."""
    with toy(cloud, tmp_path) as compute:
        instance = compute.place()
        reserving, consumer, reserve = threading.Event(), allocations.consumer, compute.hypervisor.reserve

        def asked(*given: object) -> Consumer:
            assert reserving.wait(20)
            return consumer(*given)  # type: ignore[arg-type]

        def reserved(*given: object) -> str | None:
            reserving.set()
            return reserve(*given)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allocations, 'consumer', asked)
            patch.setattr(compute.hypervisor, 'reserve', reserved)
            compute.step()
        assert compute.record(instance).state == ACTIVE


def test_what_cannot_be_asked_aside_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', none)
    found = Consumer({}, 7)

    def away() -> Consumer:
        raise Unreachable('placement is away')

    assert aside(lambda: found).result(0) == found
    with pytest.raises(Unreachable, match='is away'):
        aside(away).result(0)
