"""Placement queries: parsed as placement parses them, and checked for errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.query import (
    Amount,
    Constraint,
    Exclusion,
    QueryNames,
    Requirement,
    UnsupportedQueryError,
    check_query,
    exclude_disabled,
    format_query,
    parse_names,
    parse_query,
    read_limit,
    restrict_to_compute,
)
from ecomp.model.status import DISABLED

# Queries are parsed as placement parses them.


AGGREGATE = 'a66e9a7e-0000-4000-8000-000000000001'
OTHER = 'a66e9a7e-0000-4000-8000-000000000002'
VCPU = Amount('VCPU', 1)


@pytest.mark.parametrize(
    ('query', 'expected'),
    [
        ('resources=VCPU:1,DISK_GB:2', (VCPU, Amount('DISK_GB', 2))),
        ('resources=VCPU%3A1%2CDISK_GB:2', (VCPU, Amount('DISK_GB', 2))),
        ('resources=VCPU:1&limit=3', (VCPU,)),
        # The last value of a repeated parameter counts.
        ('resources=DISK_GB:2&resources=VCPU:7,VCPU:1', (VCPU,)),
        ('resources=VCPU:1&in_tree=x&in_tree=+y+', (VCPU, Requirement('in_tree', ('y',)))),
        ('resources=VCPU:1&required=A,%20!B', (VCPU, Requirement('required', ('A',)), Exclusion('required', 'B'))),
        ('resources=VCPU:1&required=!!B', (VCPU, Exclusion('required', 'B'))),
        ('resources=VCPU:1&required=in:B, A,B', (VCPU, Requirement('required', ('A', 'B')))),
        (
            'required=A&resources=VCPU:1&required=A,C',
            (VCPU, Requirement('required', ('A',)), Requirement('required', ('C',))),
        ),
        (
            'resources=VCPU:1&root_required=A,!B',
            (VCPU, Requirement('root_required', ('A',)), Exclusion('root_required', 'B')),
        ),
        (f'resources=VCPU:1&member_of={AGGREGATE}', (VCPU, Requirement('member_of', (AGGREGATE,)))),
        (f'resources=VCPU:1&member_of=in:{OTHER},{AGGREGATE}', (VCPU, Requirement('member_of', (AGGREGATE, OTHER)))),
        (f'resources=VCPU:1&member_of=!{AGGREGATE}', (VCPU, Exclusion('member_of', AGGREGATE))),
        (
            f'resources=VCPU:1&member_of=!in:{OTHER},{AGGREGATE}',
            (VCPU, Exclusion('member_of', AGGREGATE), Exclusion('member_of', OTHER)),
        ),
    ],
)
def test_parse(query: str, expected: tuple[Constraint, ...]) -> None:
    assert parse_query(query) == expected


@pytest.mark.parametrize(
    ('query', 'why'),
    [
        *(
            (query, 'granular groups')
            for query in (
                'resources1=VCPU:1',
                'resources=VCPU:1&required_NET=A',
                'resources=VCPU:1&group_policy=none',
                'resources=VCPU:1&resources2=DISK_GB:1&same_subtree=2',
                'resources=VCPU:1&member_of1=x',
                'resources=VCPU:1&in_tree1=x',
            )
        ),
        # Placement refuses these.
        *((query, None) for query in ('', 'required=A', 'resources=', 'resources=VCPU', 'resources=VCPU:x', 'a:b:c')),
    ],
)
def test_unsupported_queries_are_unexplained(query: str, why: str | None) -> None:
    with pytest.raises(UnsupportedQueryError, match=why):
        parse_query(query)


@pytest.mark.parametrize(
    ('query', 'suffix'),
    [
        ('resources=VCPU:1', '&in_tree=x'),
        ('resources=VCPU:1&resources1=DISK_GB:1', '&in_tree=x'),
        ('resources_a=VCPU:1&resources2=DISK_GB:1&required_a=T', '&in_tree_a=x&in_tree2=x'),
    ],
)
def test_a_query_for_one_compute(query: str, suffix: str) -> None:
    assert restrict_to_compute(query, 'x') == query + suffix


def test_the_limit_of_a_query() -> None:
    assert read_limit('resources=VCPU:1&limit=3') == '3'
    assert read_limit('resources=VCPU:1') is None


names = st.text('ABC_', min_size=1, max_size=4)
keys = st.sampled_from(['required', 'root_required', 'member_of'])
several = st.sets(names, min_size=2, max_size=3).map(lambda found: tuple(sorted(found)))
constraints = st.one_of(
    st.builds(lambda key, of: Requirement(key, of), keys, st.tuples(names)),
    st.builds(lambda key, of: Requirement(key, of), st.sampled_from(['required', 'member_of']), several),
    st.builds(Exclusion, keys, names),
)
amounts = st.dictionaries(names, st.integers(1, 2**31), min_size=1).map(lambda each: [Amount(*a) for a in each.items()])


@given(amounts, st.lists(constraints), st.none() | names)
def test_words_and_parse_round_trip(expected: list[Constraint], more: list[Constraint], tree: str | None) -> None:
    expected = [*expected, *more, *([] if tree is None else [Requirement('in_tree', (tree,))])]
    assert set(parse_query(format_query(expected))) == set(expected)
    assert set(parse_query(f'limit=1&{format_query(expected)}')) == set(expected)


PIECES = ['resources=', 'required=', 'member_of=', 'VCPU', ':', '1', ',', '&', '!', 'in:', '%', '%2C', '+', ' ', 'A']
pieces = st.lists(st.sampled_from(PIECES)).map(''.join)


@given(pieces | pieces.map('resources=VCPU:1&{}'.format) | pieces.map('resources=VCPU:1&required={}'.format))
def test_any_text_parses_or_is_unexplained(query: str) -> None:
    try:
        parsed = parse_query(query)
    except UnsupportedQueryError:
        return
    assert any(isinstance(constraint, Amount) for constraint in parsed)


def test_parse_accepts_any_following_parameters() -> None:
    for end in ('', '&', '&&', '&required=A', '&required=!A', '&limit=1', '&member_of=in:A,B', '&required=%41'):
        assert parse_query(f'resources=VCPU:1{end}')[0] == Amount('VCPU', 1)


# The query that is sent excludes disabled computes.


@pytest.mark.parametrize(
    ('query', 'sent'),
    [
        ('resources=VCPU:1', 'resources=VCPU:1&root_required=!COMPUTE_STATUS_DISABLED'),
        ('resources=VCPU:1&required=A', 'resources=VCPU:1&required=A&root_required=!COMPUTE_STATUS_DISABLED'),
        (
            'resources=VCPU:1&root_required=A,!B&limit=2',
            'resources=VCPU:1&root_required=A,!B,!COMPUTE_STATUS_DISABLED&limit=2',
        ),
        ('resources=VCPU:1&root%5Frequired=A', 'resources=VCPU:1&root%5Frequired=A,!COMPUTE_STATUS_DISABLED'),
        (
            'resources1=VCPU:1&required1=A&group_policy=none',
            'resources1=VCPU:1&required1=A&group_policy=none&root_required=!COMPUTE_STATUS_DISABLED',
        ),
        *(
            (query, query)
            for query in (
                f'resources=VCPU:1&required={DISABLED}',
                f'resources=VCPU:1&required=A,!{DISABLED}',
                f'resources=VCPU:1&required=in:A,{DISABLED}',
                f'resources=VCPU:1&root_required=A,%20{DISABLED}',
                f'resources=VCPU:1&root%5Frequired={DISABLED}',
                f'resources1=VCPU:1&required1=!{DISABLED}',
                # Placement refuses these with its own message.
                'resources=VCPU:1&root_required=',
                'resources=VCPU:1&root_required=in:A,B',
                'resources=VCPU:1&root_required=A&root_required=B',
            )
        ),
    ],
)
def test_enabled_only(query: str, sent: str) -> None:
    assert exclude_disabled(query) == sent
    assert exclude_disabled(sent) == sent


@given(st.text(max_size=60))
def test_enabled_only_is_idempotent(text: str) -> None:
    assert exclude_disabled(exclude_disabled(text)) == exclude_disabled(text)


# Errors are found before placement is asked, and no query that placement accepts is refused.


SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
SOME_AGGREGATE = 'a66e9a7e-0000-4000-8000-000000000001'


@pytest.mark.parametrize(
    'query',
    [
        SMALL,
        'resources=VCPU%3A1%2CDISK_GB:2',
        'resources=VCPU:1&resources1=DISK_GB:1&resources_x-2=CUSTOM_A:1&group_policy=isolate',
        f'{SMALL}&required=A,!B&required=in:C,D&member_of=in:{SOME_AGGREGATE}&in_tree={SOME_AGGREGATE}&limit=3',
        f'{SMALL}&root_required=A&same_subtree=_a,_b&required1=X',
        'resources=VCPU:2147483647',
        'resources=VCPU:007',
    ],
)
def test_check_query_accepts_valid_queries(query: str) -> None:
    assert check_query(query) == query


@pytest.mark.parametrize(
    ('query', 'says'),
    [
        ('', 'resources= is missing'),
        ('required=A', 'resources= is missing'),
        ('resource=VCPU:1', r"placement has no parameter 'resource' \(did you mean resources\?\)"),
        ('x' * 1000, "placement has no parameter 'x{40}'$"),
        ('resources=', "'' is not CLASS:AMOUNT"),
        ('resources=VCPU', "'VCPU' is not CLASS:AMOUNT"),
        ('resources=VCPU:1,', "'' is not CLASS:AMOUNT"),
        ('resources=VCPU:1,+DISK_GB:1', 'resources= contains a blank'),
        ('resources=VCPU:1:2', "VCPU: '1:2' is not a whole number"),
        ('resources=VCPU:٣', 'is not a whole number'),
        ('resources=VCPU:2147483648', 'is not from 1 to 2147483647'),
        ('resources=VCPU:' + '9' * 5000, f'VCPU: {"9" * 40} is not from 1'),
        ('resources=VCPU:1,VCPU:1', 'VCPU is given more than once'),
        ('resources=VCPU:1&resources=VCPU:1', 'resources= is given more than once'),
        (f'{SMALL}&in_tree={SOME_AGGREGATE}&in_tree={SOME_AGGREGATE}', 'in_tree= is given more than once'),
        (f'{SMALL}&limit=-1', 'limit=-1: '),
        (f'{SMALL}&limit=', 'limit=: '),
    ],
)
def test_check_query_refuses_invalid_queries(query: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_query(query)


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
