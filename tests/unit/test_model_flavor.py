"""A flavor as it is written, kept, and asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.flavor import Flavor, from_json, on_top, parse_flavor, to_json

SMALL = Flavor('m1.small', {'VCPU': 1, 'MEMORY_MB': 512}, ('HW_CPU_X86_AVX2',), ('COMPUTE_STATUS_DISABLED',))

names = st.text('ABCXYZ019_', min_size=1, max_size=8)
flavors = st.builds(
    Flavor,
    st.text('abcXYZ019', min_size=1, max_size=10),
    st.dictionaries(names, st.integers(1, 2**31 - 1), min_size=1, max_size=4),
    st.lists(names.map('R_{}'.format), unique=True, max_size=3).map(tuple),
    st.lists(names.map('F_{}'.format), unique=True, max_size=3).map(tuple),
)


@given(flavors)
def test_what_is_kept_and_what_is_asked_is_the_same_flavor(flavor: Flavor) -> None:
    assert from_json(flavor.name, to_json(flavor).encode()) == flavor
    assert parse_flavor(flavor.name, flavor.query) == flavor


def test_a_query_on_top() -> None:
    traits = 'required=HW_CPU_X86_AVX2,!COMPUTE_STATUS_DISABLED'
    assert on_top(SMALL, '') == SMALL.query == f'resources=VCPU:1,MEMORY_MB:512&{traits}'
    added = 'resources=VCPU:4,DISK_GB:9&required=STORAGE_DISK_SSD&member_of=in:a,b'
    assert on_top(SMALL, added) == (
        f'resources=VCPU:4,MEMORY_MB:512,DISK_GB:9&{traits}&required=STORAGE_DISK_SSD&member_of=in:a,b'
    )
    # Placement says what is wrong with an amount; what is no amount at all would be lost among the flavor's.
    assert 'VCPU:one' in on_top(SMALL, 'resources=VCPU:one')
    with pytest.raises(ValueError, match="'VCPU' is not CLASS:AMOUNT"):
        on_top(SMALL, 'resources=VCPU')


@pytest.mark.parametrize(
    ('name', 'text', 'why'),
    [
        ('a b', 'resources=VCPU:1', "'a b' is no name of a flavor"),
        ('', 'resources=VCPU:1', 'is no name of a flavor'),
        ('a/b', 'resources=VCPU:1', 'is no name of a flavor'),
        ('small', '', 'it asks for no resources'),
        ('small', 'required=A', 'it asks for no resources'),
        ('small', 'resources=VCPU', "'VCPU' is not CLASS:AMOUNT"),
        ('small', 'resources=VCPU:0', "VCPU: '0' is not a whole number from 1"),
        ('small', 'resources=VCPU:-1', 'is not a whole number'),
        ('small', 'resources=VCPU:1.5', 'is not a whole number'),
        ('small', 'resources=vcpu:1', "'vcpu' is no resource class"),
        ('small', 'resources=VCPU:1&required=a', "'a' is no trait"),
        ('small', 'resources=VCPU:1&required=in:A,B', 'and nothing else'),
        ('small', 'resources=VCPU:1&in_tree=x', 'and nothing else'),
        ('small', 'resources=VCPU:1&required=A,!A', 'A: required and forbidden at once'),
    ],
)
def test_what_is_none(name: str, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_flavor(name, text)


@pytest.mark.parametrize(
    ('value', 'why'),
    [
        ('', 'not JSON'),
        ('[]', 'expected a JSON object'),
        ('{}', 'expected resources'),
        ('{"resources": []}', 'expected resources'),
        ('{"resources": {}}', 'is not CLASS:AMOUNT'),
        ('{"resources": {"VCPU": 0}}', 'not a whole number'),
        ('{"resources": {"VCPU": "x"}}', 'not a whole number'),
        ('{"resources": {"VCPU": 1}, "required": "A"}', 'expected resources, required and forbidden'),
        ('{"resources": {"VCPU": 1}, "required": [1.5]}', 'is no trait'),
        ('{"version": 2, "resources": {"VCPU": 1}}', 'version 2 of a flavor is not known here'),
    ],
)
def test_what_cannot_be_read(value: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        from_json('small', value.encode())
