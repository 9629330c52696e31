"""Resize, with a compute in this process and etcd and placement in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest

from ecomp.agent.host.claims import ClaimKeeper
from ecomp.errors import BuildFailed, EcompError
from ecomp.model import keys
from ecomp.model.guest import NO_SPACE, GuestTrouble
from ecomp.model.order import REBOOT, START, STOP, PowerAction
from ecomp.model.stored import encode
from ecomp.placement.allocations import read_consumer, replace_allocations
from ecomp.scheduler.changes.change import change_power
from ecomp.scheduler.operations.audit import audit
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.scheduler.placing.modify import resize
from ecomp.store.client import Put
from tests.functional.cloud import OWNER, SMALL, Cloud, make_uuid
from tests.functional.toy import ToyCompute
from tests.kit.store_client import read_entry

pytestmark = pytest.mark.fast


def change_size(toy: ToyCompute, instance: str, restart: bool = False, **amounts: int) -> str:
    power = PowerAction(REBOOT, make_uuid()) if restart else None
    return resize(toy.cloud.store, toy.cloud.placement, instance, amounts, OWNER, power).message


def require_sizes(toy: ToyCompute, instance: str, held: int, runs: int, next_vcpus: int | None = None) -> None:
    """Require how many VCPU the instance claims and is charged, how many run, and how many it gets next."""
    request, amounts = toy.cloud.read_request(toy.compute, instance), {**SMALL, 'VCPU': held}
    assert toy.cloud.server.read_allocations(instance) == request.allocations == {toy.compute: amounts}
    assert (request.resize.resources['VCPU'] if request.resize else None) == next_vcpus
    assert toy.read_record(instance).resources['VCPU'] == runs
    assert toy.hypervisor.list_guests()[instance].size['VCPU'] == runs
    # Also not of its quota. The computes publish nothing here.
    findings = audit(toy.cloud.store, toy.cloud.placement, 0.0).findings
    assert [each.sentence for each in findings if 'compute' not in each.code] == []


@pytest.fixture
def sized(toy_compute: ToyCompute, cloud: Cloud) -> str:
    set_limits(cloud.store, 'a-project', ['VCPU=12'])
    return toy_compute.build()


def test_wait_for_a_restart_is_not_ended_by_an_earlier_reboot(
    toy_compute: ToyCompute, cloud: Cloud, sized: str
) -> None:
    earlier, power = (PowerAction(REBOOT, make_uuid()) for _ in range(2))
    change_power(cloud.store, sized, earlier)
    toy_compute.settle()
    accepted = resize(cloud.store, cloud.placement, sized, {'VCPU': 2}, OWNER, power)
    assert (accepted.power, accepted.previous_ids) == (power, {earlier.id})


@pytest.mark.parametrize('actions', [(REBOOT,), (STOP, START)])
def test_resize_takes_effect_when_the_guest_starts(
    toy_compute: ToyCompute, cloud: Cloud, sized: str, actions: Sequence[str]
) -> None:
    assert 'takes effect when the guest starts' in change_size(toy_compute, sized, VCPU=4)
    require_sizes(toy_compute, sized, 4, 1, 4)
    assert toy_compute.step()[0] == f'resize {sized}'
    # The guest may have started with 4, so that the claim stays.
    change_size(toy_compute, sized, VCPU=2)
    for action in actions:
        toy_compute.settle()
        require_sizes(toy_compute, sized, 4, 1, 2)
        change_power(cloud.store, sized, PowerAction(action, make_uuid()))
    while f'resized {sized}' not in toy_compute.step():
        pass
    written = [*toy_compute.list_keys(sized)[:2], keys.quota('a-project')]
    assert len({read_entry(cloud.store, key).revision for key in written}) == 1
    toy_compute.settle()
    require_sizes(toy_compute, sized, 2, 2)
    assert cloud.read_request(toy_compute.compute, sized).query.startswith('resources=VCPU:2,MEMORY_MB:64,DISK_GB:1&')
    assert change_size(toy_compute, sized, VCPU=2) == f'{sized}: already has this size'
    for vcpus in (3, 2):  # back, before it has started
        change_size(toy_compute, sized, VCPU=vcpus)
        toy_compute.settle()
    require_sizes(toy_compute, sized, 2, 2)


REFUSALS = {
    'quota of project .* VCPU': {'VCPU': 13},
    'lacks MEMORY_MB 1024, .* lacks VCPU 2. Fix: give less': {'VCPU': 12, 'MEMORY_MB': 2048},
    'has no VGPU to change. Fix: give amounts of DISK_GB, MEMORY_MB, VCPU': {'VGPU': 1},
    'its disk of 1 GiB cannot shrink': {'DISK_GB': 0},
    'VCPU: expected a whole number from 1': {'VCPU': 0},
    'is adopted, so ecomp does not change it': {'VCPU': 2},
}


@pytest.mark.parametrize('words', REFUSALS)
def test_refused_resize_changes_nothing(toy_compute: ToyCompute, cloud: Cloud, sized: str, words: str) -> None:
    if 'adopted' in words:
        adopted = replace(cloud.read_request(toy_compute.compute, sized), is_adopted=True)
        cloud.store.commit([], [Put(keys.request(toy_compute.compute, sized), encode(adopted))])
    before = cloud.store.snapshot('/').entries, cloud.server.read_allocations(sized)
    with pytest.raises(EcompError, match=words):
        change_size(toy_compute, sized, **REFUSALS[words])
    assert (cloud.store.snapshot('/').entries, cloud.server.read_allocations(sized)) == before


def test_failed_resize_stays_pending_until_it_is_repeated(
    toy_compute: ToyCompute, cloud: Cloud, sized: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = BuildFailed('disk', 'its disk has a snapshot')
    with monkeypatch.context() as patched:
        patched.setattr(toy_compute.hypervisor, 'resize', Mock(side_effect=error))
        change_size(toy_compute, sized, DISK_GB=2)
        toy_compute.settle()
    assert toy_compute.read_record(sized).fault == f'its size could not be changed: {error.reason}'
    # Another trouble takes the place of this fault, and ends.
    for trouble in (GuestTrouble(NO_SPACE, ''), None):
        guest = replace(toy_compute.hypervisor.list_guests()[sized], troubles=())
        toy_compute.hypervisor._save_guest(guest.with_trouble(trouble))
        toy_compute.settle()
    assert cloud.read_request(toy_compute.compute, sized).resize
    change_size(toy_compute, sized, DISK_GB=2)
    toy_compute.settle()
    assert toy_compute.hypervisor.list_guests()[sized].size['DISK_GB'] == 2
    assert (toy_compute.read_record(sized).fault, cloud.read_request(toy_compute.compute, sized).resize) == (None, None)


def test_claim_unlike_its_request_is_set_to_it(toy_compute: ToyCompute, cloud: Cloud, sized: str) -> None:
    keeper = ClaimKeeper(toy_compute.compute, cloud.store, cloud.placement)

    def claim(vcpus: int, instance: str = sized) -> None:
        generation = read_consumer(cloud.placement, instance).generation
        amounts = {toy_compute.compute: {**SMALL, 'VCPU': vcpus}}
        replace_allocations(cloud.placement, instance, amounts, 'a-user', 'a-project', generation)

    def look(*times: int, generation: int = 1) -> list[int]:
        held, guests = [], toy_compute.hypervisor.list_guests()
        for now in times:
            keeper.reconcile(guests, now, generation, guests, toy_compute.planner.targets)
            held.append(cloud.server.read_allocations(sized)[toy_compute.compute]['VCPU'])
        return held

    change_size(toy_compute, sized, VCPU=3)
    claim(1)
    assert look(0, 60) == [1, 1]  # it has not read the request yet
    toy_compute.plan()
    # A request that differs does not change the generation of the provider.
    assert look(61, 120, 121) == [1, 1, 3]
    claim(1)
    claim(9, make_uuid())  # nothing is left for the rest
    assert look(122, 183, generation=2) == [1, 1]


def test_older_etcd_is_charged_for_a_resize(toy_compute: ToyCompute, cloud: Cloud, sized: str) -> None:
    keys_before = [keys.request(toy_compute.compute, sized), keys.quota('a-project')]
    before = [Put(key, read_entry(cloud.store, key).value.decode()) for key in keys_before]
    change_size(toy_compute, sized, restart=True, VCPU=4)
    toy_compute.settle()
    cloud.store.commit([], before)
    set_limits(cloud.store, 'a-project', ['VCPU=2'])
    toy_compute.restart()
    toy_compute.republish([sized])
    toy_compute.settle()
    require_sizes(toy_compute, sized, 4, 4)
