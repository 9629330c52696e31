"""What is read without argparse is what argparse reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.options import OPTIONS
from ecomp.cli.reading import by_argparse, plainly

FLAGS = [flag for rows in OPTIONS.values() for each in rows for flag in each.flags]
VALUES = ['', '-', '5', '-5', '0.5', 'nan', 'json', 'spread', 'affinity', 'web1', 'addressed', 'a b', '-x', '--all']
VALUES += ['=', 'c0ffee00-0000-4000-8000-000000000001', 'C0FFEE00000040008000000000000001', 'a=b', '-n5', '-fjson']
WORDS = ['list', 'show', 'log', 'resources=VCPU:1', 'http://x/y', 'web1', '--', '--help', '--nam', '--coun=3', '-', '']
PARTS = st.one_of(
    st.sampled_from(FLAGS).map(lambda flag: [flag]),
    st.builds(lambda flag, value: [f'{flag}={value}'], st.sampled_from(FLAGS), st.sampled_from(VALUES)),
    st.builds(lambda flag, value: [flag, value], st.sampled_from(FLAGS), st.sampled_from(VALUES)),
    st.sampled_from(WORDS).map(lambda word: [word]),
    st.sampled_from(VALUES).map(lambda word: [word]),
)


@given(st.lists(PARTS, max_size=5).map(lambda parts: [word for part in parts for word in part]))
def test_argparse_reads_the_same(argv: list[str]) -> None:
    found = plainly(argv)
    if found is not None:
        assert repr(found) == repr(by_argparse(argv, argv, lambda _: '')), argv  # nan is not nan


@pytest.mark.parametrize(
    'line',
    [
        'resources=VCPU:1 http://x/y --name web1 --count 3 --wait=ready --timeout 5',
        'list -f value -c NAME --no-header',
        'list --state active --state=gone --wide',
        'destroy web1 web2 --wait',
        '--config x.yaml web1',
        'resources=VCPU:1 --user-data - --strict --group a --ssh-key a --ssh-key b',
    ],
)
def test_what_people_type_is_plain(line: str) -> None:
    assert plainly(line.split()) == by_argparse(line.split(), line.split(), lambda _: '')


@pytest.mark.parametrize(
    'line', ['--help', 'list --nam x', 'log -f', 'list -fjson', '--count x', '--all --all', 'a -- b']
)
def test_all_else_is_argparse_s(line: str) -> None:
    assert plainly(line.split()) is None
