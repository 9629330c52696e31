"""A build waits until placement confirms its claim (rule: confirmed-claim).

The question is sent while a build prepares.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ecomp.agent.compute import record_missed_ends
from ecomp.agent.instance.instances import allocations, query_aside
from ecomp.errors import EcompError, NotFound, Unreachable
from ecomp.model import keys
from ecomp.model.record import ACTIVE, BUILDING
from ecomp.placement.allocations import Consumer
from ecomp.store.client import Delete
from tests.functional.cloud import SMALL, Cloud
from tests.functional.toy import ToyCompute

pytestmark = pytest.mark.fast


@pytest.mark.parametrize('says', [Unreachable('placement is away', 'placement'), EcompError('too old'), NotFound('no')])
def test_build_waits_until_placement_confirms_its_claim(
    toy_compute: ToyCompute, cloud: Cloud, says: EcompError
) -> None:
    """It writes nothing to etcd and repeats no step; only a different claim ends it."""
    instance = toy_compute.place()

    def raise_error(*_: object) -> Consumer:
        raise says

    revision = cloud.store.snapshot('/').revision
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, 'read_consumer', raise_error)
        assert toy_compute.step() == [f'build {instance}']
        remembered = toy_compute.memory.get_entries()[instance].record
        assert (remembered.state, remembered.attempts) == (BUILDING, 0)
        patch.setattr(toy_compute.hypervisor, 'reserve_address', None)
        for _ in range(4):
            toy_compute.planner.retry_now()
            assert toy_compute.step() == [f'build {instance}']
        assert cloud.store.snapshot('/').revision == revision
        assert toy_compute.instances.records.get(instance) is None
        assert toy_compute.hypervisor.list_guests() == {}
    toy_compute.planner.retry_now()
    toy_compute.step()
    assert toy_compute.read_record(instance).state == ACTIVE


@pytest.mark.parametrize('restarts', [False, True])
def test_unconfirmed_build_is_undone_when_its_request_is_deleted(
    toy_compute: ToyCompute, cloud: Cloud, tmp_path: Path, restarts: bool
) -> None:
    """The request is deleted manually while placement is unreachable or the compute is down."""
    instance = toy_compute.place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, 'read_consumer', lambda *_: (_ for _ in ()).throw(Unreachable('placement is away')))
        toy_compute.step()
    assert [reservation.instance for reservation in toy_compute.hypervisor.list_reservations().values()] == [instance]
    cloud.store.commit([], [Delete(keys.request(toy_compute.compute, instance))])
    if restarts:
        toy_compute.restart()
        record_missed_ends(
            toy_compute.compute, cloud.store, toy_compute.memory, toy_compute.hypervisor.list_guests().keys()
        )
    toy_compute.step()
    toy_compute.planner.recheck()
    assert toy_compute.hypervisor.list_reservations() == {}
    assert list((tmp_path / 'metadata').glob('*')) == []
    assert cloud.server.read_allocations(instance) == {}
    assert toy_compute.memory.get_entries() == {}
    toy_compute.instances.records.forget(instance)
    assert toy_compute.instances.records.get(instance) is None


@pytest.mark.parametrize('restarts', [False, True])
def test_instance_forgotten_while_its_host_was_down_stays_gone(
    toy_compute: ToyCompute, cloud: Cloud, restarts: bool
) -> None:
    """Its host died during the build; then `host forget` and `clear` removed all of it."""
    instance = toy_compute.place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_compute.host.runner, 'run', lambda _: (_ for _ in ()).throw(Unreachable('its host died')))
        toy_compute.step()
    assert toy_compute.read_record(instance).state == BUILDING
    key = keys.record(toy_compute.compute, instance)
    # As `host forget` and `clear` do.
    allocations.release_once(cloud.placement, instance, allocations.read_consumer(cloud.placement, instance))
    cloud.store.commit([], [Delete(key), Delete(keys.request(toy_compute.compute, instance))])
    if restarts:
        toy_compute.restart()
        record_missed_ends(
            toy_compute.compute, cloud.store, toy_compute.memory, toy_compute.hypervisor.list_guests().keys()
        )
    toy_compute.step()
    for _ in range(3):
        toy_compute.planner.recheck()
    assert cloud.store.get(key) is None
    assert toy_compute.memory.get_entries() == {}
    assert toy_compute.hypervisor.list_reservations() == {}


def test_nothing_is_left_of_a_build_without_a_claim(toy_compute: ToyCompute, cloud: Cloud, tmp_path: Path) -> None:
    instance = toy_compute.place()
    client = cloud.placement
    allocations.release_once(client, instance, allocations.read_consumer(client, instance))
    toy_compute.step()
    assert toy_compute.read_failure(instance)[1].stage == 'scheduled'
    assert toy_compute.hypervisor.list_reservations() == {}
    assert list((tmp_path / 'metadata').glob('*')) == []
    assert toy_compute.hypervisor.list_guests() == {}


@pytest.mark.parametrize(('is_elsewhere', 'size'), [(True, SMALL), (False, {**SMALL, 'VCPU': 2})])
def test_request_whose_claim_is_elsewhere_or_differs_is_not_built(
    toy_compute: ToyCompute, cloud: Cloud, is_elsewhere: bool, size: dict[str, int]
) -> None:
    """Only the request is here, as a client of 2019 may write it."""
    instance, other = toy_compute.place(), cloud.make_compute()
    client, claimed = cloud.placement, {other if is_elsewhere else toy_compute.compute: size}
    generation = allocations.read_consumer(client, instance).generation
    allocations.replace_allocations(client, instance, claimed, 'a-user', 'a-project', generation)
    toy_compute.step()
    assert toy_compute.read_failure(instance)[1].stage == 'scheduled'
    assert toy_compute.hypervisor.list_guests() == {}
    assert cloud.server.read_allocations(instance) == ({other: SMALL} if is_elsewhere else {})


def test_placement_is_queried_while_an_address_is_reserved(toy_compute: ToyCompute) -> None:
    """The query of placement blocks until the reservation has begun."""
    instance = toy_compute.place()
    reserving, consumer, reserve = threading.Event(), allocations.read_consumer, toy_compute.hypervisor.reserve_address

    def query_claim(*args: object) -> Consumer:
        assert reserving.wait(20)
        return consumer(*args)  # type: ignore[arg-type]

    def reserve_address(*args: object) -> str | None:
        reserving.set()
        return reserve(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, 'read_consumer', query_claim)
        patch.setattr(toy_compute.hypervisor, 'reserve_address', reserve_address)
        toy_compute.step()
    assert toy_compute.read_record(instance).state == ACTIVE


def test_query_runs_in_the_caller_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', fail_to_start)
    consumer = Consumer({}, 7)

    def fail_to_query() -> Consumer:
        raise Unreachable('placement is away')

    assert query_aside(lambda: consumer).result(0) == consumer
    with pytest.raises(Unreachable, match='is away'):
        query_aside(fail_to_query).result(0)
