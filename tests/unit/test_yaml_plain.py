"""Plain YAML is read like PyYAML reads it, and the usual configurations are plain."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ecomp.errors import UsageError
from ecomp.yaml_file import _parse_with_pyyaml
from ecomp.yaml_plain import Node, parse_plain

TOP = Path(__file__).resolve().parents[2]

WORDS = st.sampled_from([
    *('etcd', 'a_b', 'yes', 'No', 'true', 'True', 'FALSE', 'null', 'Null', 'y', 'nan', '_', '_1', 'e3', 'inf', 'x:y'),
    *('/etc/x.crt', 'https://ds1:8080', 'http://ds1:8080/', 'ds1:2379', '127.0.0.1:2379', '10.0.0.1', '1.2', '1:30'),
    *('0', '7', '010', '0x1f', '1_000', '-1', '1e3', '12:30:45', '2026-11-24', '~', '""', "''", '"a b"', "'it''s'"),
    *('"a\\n"', "'# no comment'", '"a#b"', 'a#b', 'a b', 'a: b', 'a:', '-', '- x', '-x', '?', '? x', '!x', '&a', '*a'),
    *('[a, b]', '[]', '[ a ]', '[a,b]', '[a, b', '[[a]]', '[a: b]', '{a: b}', '{}', '[1, 2]', '["a", \'b\']', '|', '>'),
    *('%x', '@x', '`x', 'a,b', 'a]', 'a}', 'é', '...', '---', '[a, ]', '[,]', "[a'b]", 'a"b', '.5', '[true, ~]', '<<'),
    *('a#b', 'x.img#sha256=07e4', 'resources=VCPU:1,DISK_GB:5&required=!A', 'a,b: c', '[x.img#a, b]'),
])  # fmt: skip
KEYS = st.sampled_from(['etcd', 'a_b', 'on', 'ca_cert', 'a-b', 'a.b', '1', 'null', 'a', 'b', '"q"', '?', '<<', 'x y'])
ENDS = st.sampled_from(['', '', '', ' ', ' # why', '#x', ' #', '\t', '\r', '  # a: b'])
INDENTS = st.sampled_from(['', '', '  ', '  ', '    ', ' ', '\t'])
LINES = st.one_of(
    st.builds('{}{}: {}{}'.format, INDENTS, KEYS, WORDS, ENDS),
    st.builds('{}{}:{}'.format, INDENTS, KEYS, ENDS),
    st.builds('{}- {}{}'.format, INDENTS, WORDS, ENDS),
    st.builds('{}-{}'.format, INDENTS, ENDS),
    st.builds('{}{}'.format, INDENTS, ENDS),
    st.builds('{}{}{}'.format, INDENTS, WORDS, ENDS),
)
WELL_FORMED = st.one_of(
    st.builds('{}: {}'.format, st.sampled_from(['a', 'b', 'etcd']), WORDS),
    st.builds('etcd:\n  host: {}\n  port: {}'.format, WORDS, WORDS),
    st.builds('keys:\n- {}\n- {}'.format, WORDS, WORDS),
    st.builds('keys:\n  - {}\n\n  # why\n  - {}'.format, WORDS, WORDS),
)


def is_plain_like_pyyaml(text: str) -> bool:
    """Return whether the text is plain; if it is, check that PyYAML reads the same."""
    result = parse_plain(text)
    if result is not None:
        assert (None if result.kind == 'null' else result) == _parse_with_pyyaml(text.encode(), 'x.yaml'), text
    return result is not None


NAMES = st.sampled_from(['etcd', 'etcd', 'a_b', 'ca_cert', 'a', 'b', '_1', 'on', 'a-b'])
GOOD = st.sampled_from([
    *('ds1:2379', '10.0.0.1', '/etc/x.crt', 'https://h:1', 'a', '# b', 'x.img#sha256=07e4', 'a=B:1,C:5&d=!E')
])  # fmt: skip
VALUES = st.one_of(GOOD, GOOD, GOOD, WORDS, st.booleans(), st.integers(-1, 70_000), st.lists(GOOD, max_size=3))
DUMPED_VALUES = st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=3)
FILES = st.one_of(
    DUMPED_VALUES.map(yaml.safe_dump),
    DUMPED_VALUES.map(yaml.safe_dump),
    st.lists(LINES, max_size=6).map('\n'.join),
    st.lists(WELL_FORMED, max_size=4).map('\n'.join),
    st.text('ab:- #\n\'"[],{}1.0~', max_size=25),
)


@pytest.mark.parametrize('examples', [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_plain_files_are_read_like_pyyaml(examples: int) -> None:
    plain_texts: list[str] = []

    @settings(max_examples=examples)
    @given(FILES)
    def read(text: str) -> None:
        if is_plain_like_pyyaml(text):
            plain_texts.append(text)

    read()
    assert len(plain_texts) > examples / 20, 'too few are plain for this to say anything'


def read_outcome(text: str, loader: type) -> object:
    """Return the nodes of a text, or the error, with this class in place of libyaml's loader."""
    with patch.object(yaml, 'CSafeLoader', loader):
        try:
            root = _parse_with_pyyaml(text.encode(), 'x.yaml', 100)
        except UsageError as error:
            return str(error)
    return root and remove_null_lines(root)


def remove_null_lines(node: Node) -> Node:
    """Remove the lines of null nodes: libyaml has another idea of where a value is that is not written."""
    return Node(
        node.kind,
        0 if node.kind == 'null' else node.line,
        node.text,
        tuple(map(remove_null_lines, node.items)),
        tuple((remove_null_lines(key), remove_null_lines(value)) for key, value in node.pairs),
    )


@given(FILES)
def test_libyaml_and_pyyaml_read_the_same(text: str) -> None:
    assert read_outcome(text, yaml.CSafeLoader) == read_outcome(text, yaml.SafeLoader)


SECURED_CONFIGURATION = {
    'etcd': {'endpoints': ['ds1:2379', '10.0.0.1:2379'], 'ca_cert': '/etc/ecomp/ca.crt', 'timeout': 5},
    'placement': {'endpoint': 'https://ds1:8080', 'token_file': '/etc/ecomp/token', 'insecure': True},
    'project_id': 'web',
    'image': 'https://images.invalid/x.img#sha256=07e4',
    'flavors': {'small': 'resources=VCPU:1,DISK_GB:5&required=HW_CPU_X86_AVX2,!A'},
    'ssh_keys': ['id_ed25519.pub'],
}


def test_example_is_plain() -> None:
    assert is_plain_like_pyyaml((TOP / 'schedule.yaml').read_text())


def test_output_of_pyyaml_is_plain() -> None:
    assert is_plain_like_pyyaml(yaml.safe_dump(SECURED_CONFIGURATION))


@pytest.mark.parametrize('text', ['a: é\n', 'a: |\n  b\n', ' a: b\n', 'a: b\n c: d\n', 'a: yes\n'])
def test_other_yaml_is_not_plain(text: str) -> None:
    assert parse_plain(text) is None
