"""What is wrong with a query is seen before placement is asked, and nothing that placement takes is refused."""

from __future__ import annotations

import pytest

from ecomp.model.query import Named, check_query, named

SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
AGGREGATE = 'a66e9a7e-0000-4000-8000-000000000001'


@pytest.mark.parametrize(
    'query',
    [
        SMALL,
        'resources=VCPU%3A1%2CDISK_GB:2',
        'resources=VCPU:1&resources1=DISK_GB:1&resources_x-2=CUSTOM_A:1&group_policy=isolate',
        f'{SMALL}&required=A,!B&required=in:C,D&member_of=in:{AGGREGATE}&in_tree={AGGREGATE}&limit=3',
        f'{SMALL}&root_required=A&same_subtree=_a,_b&required1=X',
        'resources=VCPU:2147483647',
        'resources=VCPU:007',
    ],
)
def test_what_placement_takes(query: str) -> None:
    assert check_query(query) == query


@pytest.mark.parametrize(
    ('query', 'says'),
    [
        ('', 'it asks for no resources'),
        ('required=A', 'it asks for no resources'),
        ('resource=VCPU:1', r"'resource' is nothing .* \(did you mean resources\?\)"),
        ('x' * 1000, "'x{40}' is nothing that placement asks for$"),
        ('resources=', "'' is not CLASS:AMOUNT"),
        ('resources=VCPU', "'VCPU' is not CLASS:AMOUNT"),
        ('resources=VCPU:1,', "'' is not CLASS:AMOUNT"),
        ('resources=VCPU:1,+DISK_GB:1', 'there is a blank in resources='),
        ('resources=VCPU:1:2', "VCPU: '1:2' is not a whole number"),
        ('resources=VCPU:٣', 'is not a whole number'),
        ('resources=VCPU:2147483648', 'is not from 1 to 2147483647'),
        ('resources=VCPU:' + '9' * 5000, f'VCPU: {"9" * 40} is not from 1'),
        ('resources=VCPU:1,VCPU:1', 'VCPU is there twice'),
        ('resources=VCPU:1&resources=VCPU:1', 'resources= is there twice'),
        (f'{SMALL}&in_tree={AGGREGATE}&in_tree={AGGREGATE}', 'in_tree= is there twice'),
        (f'{SMALL}&limit=-1', 'limit=-1: '),
        (f'{SMALL}&limit=', 'limit=: '),
    ],
)
def test_what_it_does_not(query: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_query(query)


def test_on_top_of_a_flavor_no_resources_need_be_asked_for() -> None:
    assert check_query('required=A', needs_resources=False) == 'required=A'
    assert check_query('', needs_resources=False) == ''


@pytest.mark.parametrize('where', ['in_tree', 'in_tree1'])
def test_who_names_a_compute_beside_it_does_not_name_one_in_it(where: str) -> None:
    query = f'{SMALL}&{where}={AGGREGATE}'
    assert check_query(query) == query
    with pytest.raises(ValueError, match=f'--on is said in place of {where}=, not beside it'):
        check_query(query, on=True)


def test_what_a_query_names() -> None:
    query = f'{SMALL}&required=A,!B&root_required=C&required1=in:D,E&resources1=CUSTOM_G:1&member_of={AGGREGATE}'
    assert named(query) == Named(frozenset(['VCPU', 'DISK_GB', 'MEMORY_MB', 'CUSTOM_G']), frozenset('ABCDE'))
