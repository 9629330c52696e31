"""What a machine has to give, and what of it is not ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.host.provider import Machine, closed, default_cache, inventory, look, with_ratios
from ecomp.agent.host.provider import given as stated
from ecomp.errors import UsageError
from ecomp.model.allocation import GIB, MIB

MACHINE = Machine(
    cores=4,
    memory=8 * GIB,
    memory_used=3 * GIB,
    memory_ours=1 * GIB,
    disk=100 * GIB,
    disk_used=40 * GIB,
    disk_ours=10 * GIB,
    disk_cached=2 * GIB,
)


def test_what_others_use_is_reserved_and_what_ours_use_is_not() -> None:
    assert inventory(MACHINE, 5) == {
        'VCPU': {'total': 4, 'reserved': 0},
        'MEMORY_MB': {'total': 8192, 'reserved': 2048},
        'DISK_GB': {'total': 100, 'reserved': 28 + 5},
    }


def test_room_for_images_is_reserved_before_it_is_used_and_beyond_if_more_is() -> None:
    assert inventory(replace(MACHINE, disk_used=38 * GIB, disk_cached=0), 5)['DISK_GB']['reserved'] == 28 + 5
    assert inventory(replace(MACHINE, disk_used=45 * GIB, disk_cached=7 * GIB), 5)['DISK_GB']['reserved'] == 28 + 7
    assert inventory(MACHINE, 1000)['DISK_GB'] == {'total': 100, 'reserved': 100}


def test_a_unit_somebody_uses_a_part_of_cannot_be_given() -> None:
    almost = replace(MACHINE, memory=8 * GIB + MIB - 1, memory_used=2 * GIB + 1, memory_ours=GIB)
    assert inventory(almost, 1)['MEMORY_MB'] == {'total': 8192, 'reserved': 1025}


amounts = st.integers(0, 2**50)


@given(amounts, amounts, amounts)
def test_placement_takes_whatever_a_machine_says(total: int, used: int, ours: int) -> None:
    for each in inventory(replace(MACHINE, memory=total, memory_used=used, memory_ours=ours), 1).values():
        assert each['total'] >= 1
        assert 0 <= each['reserved'] <= each['total']


def test_what_a_person_states_is_theirs_to_give() -> None:
    assert stated({'VCPU': 4, 'CUSTOM_X': 2}) == {
        'VCPU': {'total': 4, 'reserved': 0},
        'CUSTOM_X': {'total': 2, 'reserved': 0},
    }


def test_a_closed_inventory_has_no_vcpu_left_and_is_otherwise_the_same() -> None:
    before = inventory(MACHINE, 1)
    shut = closed(before)
    assert shut == {**before, 'VCPU': {'total': 4, 'reserved': 4}}
    assert before['VCPU']['reserved'] == 0
    assert closed({'DISK_GB': {'total': 1, 'reserved': 0}}) == {'DISK_GB': {'total': 1, 'reserved': 0}}


def test_ratios() -> None:
    totals = {'VCPU': {'total': 4, 'reserved': 0}, 'DISK_GB': {'total': 10, 'reserved': 1}}
    found = with_ratios(totals, {'VCPU': 16})
    assert found == {
        'VCPU': {'total': 4, 'reserved': 0, 'allocation_ratio': 16},
        'DISK_GB': {'total': 10, 'reserved': 1, 'allocation_ratio': 1},
    }
    assert closed(found)['VCPU'] == {'total': 4, 'reserved': 4, 'allocation_ratio': 16}
    with pytest.raises(UsageError, match='allocation_ratios: there is no VGPU here, only VCPU, DISK_GB'):
        with_ratios(totals, {'VCPU': 16, 'VGPU': 2})


def test_this_machine(tmp_path: Path) -> None:
    overlays = tmp_path / 'images'
    overlays.mkdir()
    (overlays / 'ours.qcow2').write_bytes(b'x' * 10_000)
    (overlays / 'another.qcow2').write_bytes(b'x' * 100_000)
    (overlays / 'base-1.qcow2').write_bytes(b'x' * 200_000)
    (overlays / 'base-2.raw').write_bytes(b'x' * 200_000)
    (overlays / 'base-3.part').write_bytes(b'x' * 200_000)
    machine = look(tmp_path, ['ours'])
    assert machine.cores >= 1
    assert 0 < machine.memory_used < machine.memory
    assert 0 < machine.disk_used < machine.disk
    assert 10_000 <= machine.disk_ours < 100_000
    assert 600_000 <= machine.disk_cached < 700_000
    assert machine.memory_ours == 0
    assert 1 <= default_cache(tmp_path) <= 20
