"""Text from outside in a person's terminal: one line, and nothing that moves the cursor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.text import printable, printable_lines, renamed, some


@given(st.text())
def test_whatever_comes_out_is_one_line(text: str) -> None:
    assert printable(text).isprintable()
    assert printable_lines(text).count('\n') == text.count('\n')


def test_what_can_be_printed_stays() -> None:
    assert printable('Zürich: 5 %, "ok"') == 'Zürich: 5 %, "ok"'
    assert printable('a\x1b[2J\nb\ud800\u202ec') == r'a\x1b[2J\nb\ud800\u202ec'


def test_what_is_long_ends() -> None:
    assert printable('x' * 100, 100) == 'x' * 100
    assert printable('x' * 101, 100) == 'x' * 100 + '…'


def test_a_uuid_is_called_what_it_is_called_and_a_path_stays() -> None:
    one, two = '1a5c0de0-0000-4000-8000-000000000001', '2a5c0de0-0000-4000-8000-000000000002'
    called = {one: 'web1'}
    assert renamed(f'{one}: is on {two}, and so is {one}', called) == f'web1: is on {two}, and so is web1'
    assert renamed(f'etcdctl del /names/{one}', called) == f'etcdctl del /names/{one}'
    assert renamed(f'{one}0 x{one} {one.upper()}', called) == f'{one}0 x{one} {one.upper()}'


def test_what_is_called_by_a_name_and_its_uuid_is_called_so_once() -> None:
    one, two = '1a5c0de0-0000-4000-8000-000000000001', '2a5c0de0-0000-4000-8000-000000000002'
    called = {each: f'hv1 ({each})' for each in (one, two)}
    once = f'web1 is on hv1 ({one}), not on hv1 ({two})'
    assert renamed(f'web1 is on {one}, not on {two}', called) == renamed(once, called) == once
    assert renamed(f'(see {one})', called) == f'(see hv1 ({one}))'


def test_of_many_names_the_first_are_said_and_how_many_more_there_are() -> None:
    assert [some('abcd'[:n], 2) for n in range(5)] == ['', 'a', 'a, b', 'a, b and 1 more', 'a, b and 2 more']
    assert some(['web1', 'web2', 'web3'], 2, between=' ') == 'web1 web2 and 1 more'
