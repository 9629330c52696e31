"""What a compute says of the room it has left, and what is made of that."""

from __future__ import annotations

import json

import pytest

from ecomp.model.host import Left, fits, living_in, parse_room_hint, room_hint, share_left

INVENTORY = {
    'VCPU': {'total': 4, 'reserved': 1, 'allocation_ratio': 2.0},
    'MEMORY_MB': {'total': 8000, 'reserved': 0},
    'DISK_GB': {'total': 3, 'reserved': 3},
}


def test_what_is_left_is_what_was_not_given() -> None:
    assert room_hint(INVENTORY, []) == {'DISK_GB': [0, 0], 'MEMORY_MB': [8000, 100], 'VCPU': [6, 100]}
    given = [{'VCPU': 1, 'MEMORY_MB': 1}, {'VCPU': 2, 'MEMORY_MB': 7998}]
    assert room_hint(INVENTORY, given) == {'DISK_GB': [0, 0], 'MEMORY_MB': [8000, 1], 'VCPU': [6, 50]}
    assert room_hint(INVENTORY, [{'VCPU': 9, 'VGPU': 1}])['VCPU'] == [6, -50]


@pytest.mark.parametrize(('name', 'capacity'), [('DISK_GB', 0), ('MEMORY_MB', 8000)])
def test_where_more_is_given_than_there_is_that_is_said_however_little_it_is(name: str, capacity: int) -> None:
    for more in (1, 11, 10**12):
        hint = parse_room_hint(room_hint(INVENTORY, [{name: capacity + more}]))
        assert hint is not None
        assert hint[name].hundredths < 0
        assert not fits(hint, {name: 1})


@pytest.mark.parametrize('used', range(7))
def test_what_is_free_is_never_said_not_to_be(used: int) -> None:
    hint = parse_room_hint(room_hint(INVENTORY, [{'VCPU': used}]))
    assert hint is not None
    for asked in range(1, 7):
        assert fits(hint, {'VCPU': asked}) == (used + asked <= 6)
    for amount in range(1, 8000, 7):
        hint = parse_room_hint(room_hint(INVENTORY, [{'MEMORY_MB': 8000 - amount}]))
        assert hint is not None
        assert fits(hint, {'MEMORY_MB': amount})
        assert not fits(hint, {'MEMORY_MB': amount + 80})


def test_the_class_with_least_counts() -> None:
    hint = {'VCPU': Left(4, 50), 'MEMORY_MB': Left(1000, 80), 'DISK_GB': Left(0, 0)}
    assert share_left(hint, {'VCPU': 1, 'MEMORY_MB': 100, 'DISK_GB': 1}) == 0.25
    assert share_left(hint, {'MEMORY_MB': 100}) == 0.7
    assert share_left(hint, {'VCPU': 3}) == 0
    assert not fits(hint, {'VGPU': 1})
    assert not fits({'VCPU': Left(4, -25)}, {'VCPU': 1})


@pytest.mark.parametrize('rubbish', [
    None, 5, 'x', [], {}, {'VCPU': 4}, {'VCPU': [4]}, {'VCPU': [4, 101]}, {'VCPU': [-4, 10]}, {'VCPU': [4, 1.5]},
    {'VCPU': [True, 1]}, {'VCPU': [4, True]}, {'VCPU': [4, None]}, {'VCPU': [10**40, 1]}, {'VCPU': [4, -(10**20)]},
    {'v cpu': [4, 4]}, {'A' * 300: [4, 4]}, {f'CUSTOM_{each}': [1, 1] for each in range(100)},
])  # fmt: skip
def test_rubbish_is_no_hint(rubbish: object) -> None:
    assert parse_room_hint(rubbish) is None
    told = living_in(json.dumps({'hostname': 'hv1', 'token': 'x', 'room': rubbish}).encode())
    assert (told.hostname, told.room) == ('hv1', None)


def test_a_living_compute_s_value_has_it() -> None:
    told = living_in(json.dumps({'hostname': 'hv1', 'room': room_hint(INVENTORY, [])}).encode())
    assert told.room == {'VCPU': Left(6, 100), 'MEMORY_MB': Left(8000, 100), 'DISK_GB': Left(0, 0)}
