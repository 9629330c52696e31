"""Anything at all is a configuration or a usage error."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ecomp.compute_conf import ComputeConfig, load_compute, parse_inventory
from ecomp.conf import EtcdConfig, ScheduleConfig, load_schedule
from ecomp.errors import UsageError

UUID = 'b8756be5-a30d-4311-920c-0ad996367a8e'
KEYS = [f.name for kind in (ComputeConfig, ScheduleConfig) for f in dataclasses.fields(kind)]
KEYS += EtcdConfig._fields
WORDS = st.sampled_from([*KEYS, 'host', 'port', 'endpoint', 'user', 'VCPU', 'http://ds1', 'ds1:2379', UUID, '.', '<<'])
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | WORDS
    | st.dates()
    | st.binary(max_size=4)
)
TREES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | PLAIN, inner, max_size=6), max_leaves=12
)


def config_or_usage_error(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix='.yaml') as file:
        file.write(content)
        file.flush()
        for load in (load_compute, load_schedule):
            try:
                load(Path(file.name))
            except UsageError as error:
                for line in str(error).split('\n'):
                    assert line.isprintable()
                    assert line.startswith(file.name)
                    assert len(line) < 500


anything = settings(max_examples=300)


@anything
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode('utf-8', 'replace')))
@example(b'a: "\\ud800"')
@example(b'2001-13-45: 2001-13-45')
@example(b'? {a: b}\n: c')
@example(b'%YAML 9.9\n---\na: b')
@example(b'%TAG ! x\n')
@example(b'{' * 65000)
@example(b'[' * 65000)
@example(b'- ' * 32000)
@example(b'"\\xZZ"')
@example(b'? ' * 32000)
def test_any_bytes_are_a_config_or_a_usage_error(content: bytes) -> None:
    config_or_usage_error(content)


@anything
@given(TREES)
def test_any_tree_is_a_config_or_a_usage_error(tree: object) -> None:
    config_or_usage_error(yaml.dump(tree, allow_unicode=True).encode('utf-8', 'replace'))


@anything
@given(st.text(alphabet='abuid:-[]{}#&*!|>%@,?"\'\n \t~0189.<', max_size=60))
def test_any_punctuation_is_a_config_or_a_usage_error(text: str) -> None:
    config_or_usage_error(text.encode())


@anything
@given(st.text(max_size=40) | st.text(alphabet='VCPU:4, 019', max_size=20))
def test_any_inventory_is_totals_or_a_usage_error(text: str) -> None:
    totals, message = {}, ''
    try:
        totals = parse_inventory(text)
    except UsageError as error:
        message = str(error)
    assert message.isprintable()
    assert bool(totals) != bool(message)
    assert all(total > 0 for total in totals.values())
