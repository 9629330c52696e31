"""Allocations: placement's shape, sums, and the sentence that says how two differ."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.allocation import Allocations, compute_of, difference, missing, parse_allocations, to_wire, total

A, B = 'provider-a', 'provider-b'

allocations = st.dictionaries(
    st.sampled_from([A, B, 'provider-c']),
    st.dictionaries(st.sampled_from(['VCPU', 'DISK_GB']), st.integers(1, 2**31 - 1), min_size=1),
)


@given(allocations)
def test_placement_s_shape_there_and_back(given_: Allocations) -> None:
    assert parse_allocations(to_wire(given_)) == given_


def test_what_placement_adds_is_passed_over() -> None:
    # GET /allocations has a generation beside the resources; candidates have mappings.
    wire = {A: {'resources': {'VCPU': 1}, 'generation': 7}}
    assert parse_allocations(wire) == {A: {'VCPU': 1}}


@pytest.mark.parametrize(
    'value', [None, 7, [], 'x', {A: 7}, {A: {}}, {A: {'resources': {}}}, {A: {'resources': {'VCPU': True}}}]
)
def test_another_shape_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match='allocations: '):
        parse_allocations(value)


def test_a_sum_is_over_all_providers() -> None:
    assert total({A: {'VCPU': 1, 'DISK_GB': 1}, B: {'DISK_GB': 2}}) == {'VCPU': 1, 'DISK_GB': 3}
    assert total({}) == {}


def test_what_a_guest_needs() -> None:
    assert missing({'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1, 'CUSTOM_X': 1}) == []
    assert missing({'MEMORY_MB': 1}) == ['VCPU', 'DISK_GB']


DIFFERENCES: list[tuple[Allocations, Allocations, str | None]] = [
    ({}, {}, None),
    ({A: {'VCPU': 1, 'DISK_GB': 2}}, {A: {'DISK_GB': 2, 'VCPU': 1}}, None),
    ({A: {'VCPU': 1}}, {}, 'placement holds no allocation for it'),
    (
        {A: {'VCPU': 1, 'DISK_GB': 1}},
        {A: {'VCPU': 2, 'DISK_GB': 1}},
        'the request and placement differ: requested DISK_GB:1,VCPU:1, held DISK_GB:1,VCPU:2 on provider-a',
    ),
    (
        {A: {'VCPU': 1}},
        {A: {'VCPU': 1, 'DISK_GB': 1}},
        'the request and placement differ: requested VCPU:1, held DISK_GB:1,VCPU:1 on provider-a',
    ),
    (
        {A: {'VCPU': 1}},
        {B: {'VCPU': 1}},
        'the request and placement differ: nothing is held on provider-a; VCPU:1 held on provider-b was not requested',
    ),
    ({}, {B: {'VCPU': 1}}, 'the request and placement differ: VCPU:1 held on provider-b was not requested'),
]


@pytest.mark.parametrize(('asked', 'held', 'sentence'), DIFFERENCES)
def test_a_difference_is_one_sentence(asked: Allocations, held: Allocations, sentence: str | None) -> None:
    assert difference(asked, held) == sentence


@given(allocations, allocations)
def test_no_difference_means_the_same(asked: Allocations, held: Allocations) -> None:
    assert (difference(asked, held) is None) == (asked == held)


def test_an_allocation_is_on_the_compute_that_gives_its_vcpus() -> None:
    shared, compute = 'a-shared-disk', 'a-compute'
    assert compute_of({shared: {'DISK_GB': 1}, compute: {'VCPU': 1, 'MEMORY_MB': 1}}) == compute
    assert compute_of({shared: {'DISK_GB': 1}}) == ''
    assert compute_of({}) == ''
