"""Rule 2: a build waits until placement confirms its claim.

The question is sent while a build prepares.
"""

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
from tests.functional.toy import Toy

pytestmark = pytest.mark.fast


@pytest.mark.parametrize('says', [Unreachable('placement is away', 'placement'), EcompError('too old'), NotFound('no')])
def test_a_build_waits_as_long_as_placement_does_not_confirm(one: Toy, cloud: Cloud, says: EcompError) -> None:
    """It writes nothing to etcd and repeats no step; only a different claim ends it."""
    instance = one.place()

    def raise_error(*_: object) -> Consumer:
        raise says

    revision = cloud.store.snapshot('/').revision
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, 'consumer', raise_error)
        assert one.step() == [f'build {instance}']
        remembered = one.memory.all()[instance].record
        assert (remembered.state, remembered.attempts) == (BUILDING, 0)
        patch.setattr(one.hypervisor, 'reserve', None)
        for _ in range(4):
            one.planner.works_again()
            assert one.step() == [f'build {instance}']
        assert cloud.store.snapshot('/').revision == revision
        assert one.instances.records.get(instance) is None
        assert one.hypervisor.guests() == {}
    one.planner.works_again()
    one.step()
    assert one.record(instance).state == ACTIVE


@pytest.mark.parametrize('restarts', [False, True])
def test_what_was_begun_and_is_not_asked_for_any_more_is_taken_back(
    one: Toy, cloud: Cloud, tmp_path: Path, restarts: bool
) -> None:
    """The request is deleted manually while placement is unreachable or the compute is down."""
    instance = one.place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, 'consumer', lambda *_: (_ for _ in ()).throw(Unreachable('placement is away')))
        one.step()
    assert [reservation.instance for reservation in one.hypervisor.reservations().values()] == [instance]
    cloud.store.commit([], [Delete(keys.request(one.compute, instance))])
    if restarts:
        one.restart()
        note_ends(one.compute, cloud.store, one.memory, one.hypervisor.guests().keys())
    one.step()
    one.planner.recheck()
    assert one.hypervisor.reservations() == {}
    assert list((tmp_path / 'metadata').glob('*')) == []
    assert cloud.server.allocations(instance) == {}
    assert one.memory.all() == {}
    one.instances.records.forget(instance)
    assert one.instances.records.get(instance) is None


@pytest.mark.parametrize('restarts', [False, True])
def test_what_ended_while_its_host_was_down_does_not_come_back(one: Toy, cloud: Cloud, restarts: bool) -> None:
    """Its host died during the build; then `host forget` and `clear` removed all of it."""
    instance = one.place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.host.runner, 'run', lambda _: (_ for _ in ()).throw(Unreachable('its host died')))
        one.step()
    assert one.record(instance).state == BUILDING
    key = keys.record(one.compute, instance)
    # As `host forget` and `clear` do.
    allocations.release_once(cloud.placement, instance, allocations.consumer(cloud.placement, instance))
    cloud.store.commit([], [Delete(key), Delete(keys.request(one.compute, instance))])
    if restarts:
        one.restart()
        note_ends(one.compute, cloud.store, one.memory, one.hypervisor.guests().keys())
    one.step()
    for _ in range(3):
        one.planner.recheck()
    assert cloud.store.get(key) is None
    assert one.memory.all() == {}
    assert one.hypervisor.reservations() == {}


def test_nothing_is_left_of_what_placement_does_not_confirm(one: Toy, cloud: Cloud, tmp_path: Path) -> None:
    instance = one.place()
    client = cloud.placement
    allocations.release_once(client, instance, allocations.consumer(client, instance))
    one.step()
    assert one.read_failure(instance)[1].stage == 'scheduled'
    assert one.hypervisor.reservations() == {}
    assert list((tmp_path / 'metadata').glob('*')) == []
    assert one.hypervisor.guests() == {}


def test_placement_is_asked_while_an_address_is_reserved(one: Toy) -> None:
    """The query of placement blocks until the reservation has begun."""
    instance = one.place()
    reserving, consumer, reserve = threading.Event(), allocations.consumer, one.hypervisor.reserve

    def asked(*given: object) -> Consumer:
        assert reserving.wait(20)
        return consumer(*given)  # type: ignore[arg-type]

    def reserved(*given: object) -> str | None:
        reserving.set()
        return reserve(*given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, 'consumer', asked)
        patch.setattr(one.hypervisor, 'reserve', reserved)
        one.step()
    assert one.record(instance).state == ACTIVE


def test_what_cannot_be_asked_aside_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', fail_to_start)
    consumer = Consumer({}, 7)

    def fail_to_query() -> Consumer:
        raise Unreachable('placement is away')

    assert aside(lambda: consumer).result(0) == consumer
    with pytest.raises(Unreachable, match='is away'):
        aside(fail_to_query).result(0)
