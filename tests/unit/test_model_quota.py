"""Quotas: what they allow, what they count, and how they are typed and written down."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.allocation import summed
from ecomp.model.quota import Quota, charge, from_json, parse_limits, refusal, times, to_json

SMALL = charge({'VCPU': 2, 'MEMORY_MB': 128})
amounts = st.dictionaries(st.sampled_from(['VCPU', 'MEMORY_MB', 'CUSTOM_X', 'instances']), st.integers(0, 50))


def test_what_exceeds_is_named_with_its_numbers() -> None:
    quota = Quota('web', {'VCPU': 10, 'instances': 5, 'DISK_GB': 0}, {'VCPU': 9, 'instances': 4})
    (excess,) = quota.excess(SMALL)
    assert str(excess) == 'VCPU: limit 10, used 9, asked 2'
    assert refusal('web', [excess]).startswith('the quota of project web does not allow it: VCPU: limit 10')
    # What is not asked for is not refused, also where there is more of it than a limit set later allows.
    assert Quota('web', {'DISK_GB': 1}, {'DISK_GB': 9}).excess(SMALL) == []
    assert quota.excess(charge({})) == []
    assert [str(each) for each in quota.excess(times(charge({}), 2))] == ['instances: limit 5, used 4, asked 2']


@given(amounts, amounts, amounts, st.integers(1, 20))
def test_there_is_room_for_just_so_many(
    limits: dict[str, int], used: dict[str, int], each: dict[str, int], count: int
) -> None:
    quota = Quota('web', limits, used)
    room = quota.room(each, count)
    assert 0 <= room <= count
    assert quota.excess(times(each, room)) == []
    assert room == count or quota.excess(times(each, room + 1))


@given(amounts, st.lists(amounts))
def test_what_comes_and_goes_leaves_nothing(used: dict[str, int], charges: list[dict[str, int]]) -> None:
    quota = Quota('web', {}, {name: each for name, each in used.items() if each})
    more = quota.with_used(summed(charges))
    for each in charges:
        more = more.without_used(each)
    assert more == quota


def test_never_less_than_nothing() -> None:
    assert Quota('web', {}, {'VCPU': 1}).without_used(SMALL).used == {}


@given(amounts, amounts)
def test_it_is_read_as_it_was_written(limits: dict[str, int], used: dict[str, int]) -> None:
    quota = Quota('web', limits, used)
    assert from_json('web', to_json(quota).encode()) == quota


@pytest.mark.parametrize(
    'change', [{'version': 2}, {'limits': []}, {'limits': {'VCPU': -1}}, {'used': {'VCPU': True}}, {'used': None}]
)
def test_anything_else_is_no_quota(change: dict[str, object]) -> None:
    value = {**json.loads(to_json(Quota('web'))), **change}
    with pytest.raises(ValueError, match='quota'):
        from_json('web', json.dumps(value).encode())


def test_limits_as_they_are_typed() -> None:
    assert parse_limits(['VCPU=10', 'instances=0', 'DISK_GB=none']) == {'VCPU': 10, 'instances': 0, 'DISK_GB': None}
    for words, said in (
        (['vcpu=1'], r'is no limit \(did you mean VCPU\?\): give '),
        (['instnaces=5'], r'is no limit \(did you mean instances\?\): give '),
        (['VCPU'], 'a whole number from 0'),
        (['VCPU='], 'a whole number'),
        (['VCPU=-1'], 'a whole number'),
        (['VCPU=1.5'], 'a whole number'),
        (['VCPU=\u00b2'], 'a whole number'),
        (['VCPU=2147483648'], 'from 0 to 2147483647'),
        (['VCPU=1', 'VCPU=2'], 'VCPU is given twice'),
    ):
        with pytest.raises(ValueError, match=said):
            parse_limits(words)
