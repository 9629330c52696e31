"""Placement queries: parsed as placement parses them, and checked for errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.query import (
    Amount,
    Constraint,
    Has,
    HasNot,
    Named,
    Unexplained,
    check_query,
    enabled_only,
    limit,
    named,
    on_one,
    parse,
    words,
)
from ecomp.model.status import DISABLED

# Queries are parsed as placement parses them.


AGGREGATE = 'a66e9a7e-0000-4000-8000-000000000001'
OTHER = 'a66e9a7e-0000-4000-8000-000000000002'
VCPU = Amount('VCPU', 1)


@pytest.mark.parametrize(
    ('query', 'asked'),
    [
        ('resources=VCPU:1,DISK_GB:2', (VCPU, Amount('DISK_GB', 2))),
        ('resources=VCPU%3A1%2CDISK_GB:2', (VCPU, Amount('DISK_GB', 2))),
        ('resources=VCPU:1&limit=3', (VCPU,)),
        # The last value of a repeated parameter counts.
        ('resources=DISK_GB:2&resources=VCPU:7,VCPU:1', (VCPU,)),
        ('resources=VCPU:1&in_tree=x&in_tree=+y+', (VCPU, Has('in_tree', ('y',)))),
        ('resources=VCPU:1&required=A,%20!B', (VCPU, Has('required', ('A',)), HasNot('required', 'B'))),
        ('resources=VCPU:1&required=!!B', (VCPU, HasNot('required', 'B'))),
        ('resources=VCPU:1&required=in:B, A,B', (VCPU, Has('required', ('A', 'B')))),
        ('required=A&resources=VCPU:1&required=A,C', (VCPU, Has('required', ('A',)), Has('required', ('C',)))),
        ('resources=VCPU:1&root_required=A,!B', (VCPU, Has('root_required', ('A',)), HasNot('root_required', 'B'))),
        (f'resources=VCPU:1&member_of={AGGREGATE}', (VCPU, Has('member_of', (AGGREGATE,)))),
        (f'resources=VCPU:1&member_of=in:{OTHER},{AGGREGATE}', (VCPU, Has('member_of', (AGGREGATE, OTHER)))),
        (f'resources=VCPU:1&member_of=!{AGGREGATE}', (VCPU, HasNot('member_of', AGGREGATE))),
        (
            f'resources=VCPU:1&member_of=!in:{OTHER},{AGGREGATE}',
            (VCPU, HasNot('member_of', AGGREGATE), HasNot('member_of', OTHER)),
        ),
    ],
)
def test_what_is_asked(query: str, asked: tuple[Constraint, ...]) -> None:
    assert parse(query) == asked


@pytest.mark.parametrize(
    ('query', 'why'),
    [
        *((query, 'granular groups') for query in (
            'resources1=VCPU:1',
            'resources=VCPU:1&required_NET=A',
            'resources=VCPU:1&group_policy=none',
            'resources=VCPU:1&resources2=DISK_GB:1&same_subtree=2',
            'resources=VCPU:1&member_of1=x',
            'resources=VCPU:1&in_tree1=x',
        )),
        # Placement refuses these.
        *((query, None) for query in ('', 'required=A', 'resources=', 'resources=VCPU', 'resources=VCPU:x', 'a:b:c')),
    ],
)
def test_what_is_beyond_it(query: str, why: str | None) -> None:
    with pytest.raises(Unexplained, match=why):
        parse(query)


@pytest.mark.parametrize(
    ('query', 'where'),
    [
        ('resources=VCPU:1', '&in_tree=x'),
        ('resources=VCPU:1&resources1=DISK_GB:1', '&in_tree=x'),
        ('resources_a=VCPU:1&resources2=DISK_GB:1&required_a=T', '&in_tree_a=x&in_tree2=x'),
    ],
)
def test_a_query_for_one_compute(query: str, where: str) -> None:
    assert on_one(query, 'x') == query + where


def test_the_limit_of_a_query() -> None:
    assert limit('resources=VCPU:1&limit=3') == '3'
    assert limit('resources=VCPU:1') is None


names = st.text('ABC_', min_size=1, max_size=4)
keys = st.sampled_from(['required', 'root_required', 'member_of'])
several = st.sets(names, min_size=2, max_size=3).map(lambda found: tuple(sorted(found)))
constraints = st.one_of(
    st.builds(lambda key, of: Has(key, of), keys, st.tuples(names)),
    st.builds(lambda key, of: Has(key, of), st.sampled_from(['required', 'member_of']), several),
    st.builds(HasNot, keys, names),
)
amounts = st.dictionaries(names, st.integers(1, 2**31), min_size=1).map(lambda each: [Amount(*a) for a in each.items()])


@given(amounts, st.lists(constraints), st.none() | names)
def test_what_is_written_is_what_is_read(asked: list[Constraint], more: list[Constraint], tree: str | None) -> None:
    asked = [*asked, *more, *([] if tree is None else [Has('in_tree', (tree,))])]
    assert set(parse(words(asked))) == set(asked)
    assert set(parse(f'limit=1&{words(asked)}')) == set(asked)


PIECES = ['resources=', 'required=', 'member_of=', 'VCPU', ':', '1', ',', '&', '!', 'in:', '%', '%2C', '+', ' ', 'A']
pieces = st.lists(st.sampled_from(PIECES)).map(''.join)


@given(pieces | pieces.map('resources=VCPU:1&{}'.format) | pieces.map('resources=VCPU:1&required={}'.format))
def test_any_text_is_read_or_beyond_it(query: str) -> None:
    try:
        parsed = parse(query)
    except Unexplained:
        return
    assert any(isinstance(constraint, Amount) for constraint in parsed)


def test_a_query_with_an_end_of_any_kind_is_read() -> None:
    for end in ('', '&', '&&', '&required=A', '&required=!A', '&limit=1', '&member_of=in:A,B', '&required=%41'):
        assert parse(f'resources=VCPU:1{end}')[0] == Amount('VCPU', 1)


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
        *((query, query) for query in (
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
        )),
    ],
)
def test_what_is_sent(query: str, sent: str) -> None:
    assert enabled_only(query) == sent
    assert enabled_only(sent) == sent


@given(st.text(max_size=60))
def test_whatever_is_asked_is_sent_once_more_the_same(text: str) -> None:
    assert enabled_only(enabled_only(text)) == enabled_only(text)


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
        (f'{SMALL}&in_tree={SOME_AGGREGATE}&in_tree={SOME_AGGREGATE}', 'in_tree= is there twice'),
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
    query = f'{SMALL}&{where}={SOME_AGGREGATE}'
    assert check_query(query) == query
    with pytest.raises(ValueError, match=f'--on is said in place of {where}=, not beside it'):
        check_query(query, on=True)


def test_what_a_query_names() -> None:
    query = f'{SMALL}&required=A,!B&root_required=C&required1=in:D,E&resources1=CUSTOM_G:1&member_of={SOME_AGGREGATE}'
    assert named(query) == Named(frozenset(['VCPU', 'DISK_GB', 'MEMORY_MB', 'CUSTOM_G']), frozenset('ABCDE'))
