"""Placement queries: checked for errors, and the names in them."""

from __future__ import annotations

import pytest

from ecomp.model.query import QueryNames, check_query, parse_names

# Errors are found before placement is asked. Queries and their parts are in tests/golden/texts/requests.txt.


SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
SOME_AGGREGATE = 'a66e9a7e-0000-4000-8000-000000000001'


def test_query_beside_a_flavor_needs_no_resources() -> None:
    assert check_query('required=A', needs_resources=False) == 'required=A'
    assert check_query('', needs_resources=False) == ''


@pytest.mark.parametrize('parameter', ['in_tree', 'in_tree1'])
def test_in_tree_cannot_be_combined_with_on(parameter: str) -> None:
    query = f'{SMALL}&{parameter}={SOME_AGGREGATE}'
    assert check_query(query) == query
    with pytest.raises(ValueError, match=f'--on cannot be combined with {parameter}='):
        check_query(query, has_on_option=True)


def test_named_lists_classes_and_traits() -> None:
    query = f'{SMALL}&required=A,!B&root_required=C&required1=in:D,E&resources1=CUSTOM_G:1&member_of={SOME_AGGREGATE}'
    assert parse_names(query) == QueryNames(frozenset(['VCPU', 'DISK_GB', 'MEMORY_MB', 'CUSTOM_G']), frozenset('ABCDE'))
