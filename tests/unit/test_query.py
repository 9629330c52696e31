"""Placement queries: checked for errors, and the names in them."""

from __future__ import annotations

import pytest

from ecomp.model.query import (
    QueryNames,
    check_query,
    parse_names,
    resolve_trees,
    restrict_to_compute,
    split_restriction,
)

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


@pytest.mark.parametrize('query', [SMALL, 'resources1=VCPU:1&resources_2=MEMORY_MB:1', f'{SMALL}&required=A&limit=1'])
def test_restriction_of_on_is_found_again(query: str) -> None:
    assert split_restriction(restrict_to_compute(query, SOME_AGGREGATE)) == (query, SOME_AGGREGATE)
    assert split_restriction(query) == (query, '')


@pytest.mark.parametrize('part', ['in_tree1={0}', 'in_tree={0}&required=A', 'in_tree={0}&in_tree1={0}'])
def test_other_restrictions_are_kept(part: str) -> None:
    query = f'{SMALL}&{part.format(SOME_AGGREGATE)}'
    assert split_restriction(query) == (query, '')


@pytest.mark.parametrize('name', ['hv1', 'HV1', 'hv%31', ' hv1', 'hv1+'])
@pytest.mark.parametrize('parameter', ['in_tree', 'in_tree1', 'in_tree_A-b'])
def test_host_names_become_uuids(name: str, parameter: str) -> None:
    hosts = {'hv1': SOME_AGGREGATE, 'HV1': SOME_AGGREGATE}
    query = f'{SMALL}&{parameter}={name}&required=in_tree=x'
    assert resolve_trees(query, hosts.__getitem__) == query.replace(f'={name}&', f'={SOME_AGGREGATE}&')


def test_only_host_names_are_replaced() -> None:
    query = f'in_tree={SOME_AGGREGATE}&in_tree=&{SMALL}&xin_tree=hv1&required=in_tree'
    assert resolve_trees(query, {}.__getitem__) == query


def test_named_lists_classes_and_traits() -> None:
    query = f'{SMALL}&required=A,!B&root_required=C&required1=in:D,E&resources1=CUSTOM_G:1&member_of={SOME_AGGREGATE}'
    assert parse_names(query) == QueryNames(frozenset(['VCPU', 'DISK_GB', 'MEMORY_MB', 'CUSTOM_G']), frozenset('ABCDE'))
