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
)

# Queries are parsed as placement parses them.


VCPU = Amount('VCPU', 1)


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


@given(st.text(max_size=60))
def test_enabled_only_is_idempotent(text: str) -> None:
    assert exclude_disabled(exclude_disabled(text)) == exclude_disabled(text)


# Errors are found before placement is asked, and no query that placement accepts is refused.


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
