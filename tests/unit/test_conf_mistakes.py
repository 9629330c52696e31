"""Mistakes in compute.yaml, schedule.yaml and --fake: each is reported with its line."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ecomp.compute_conf import ComputeConfig, load_compute, parse_inventory
from ecomp.conf import EtcdConfig, ScheduleConfig, load_schedule
from ecomp.errors import UsageError
from tests.unit.conf_text import UUID


@pytest.fixture
def mistakes(compute_config: Callable[[str | bytes], ComputeConfig]) -> Callable[[str | bytes], list[str]]:
    """A function that loads a text as compute.yaml and returns the lines of its error.

    The directory of the file is removed from the lines.
    """

    def load(content: str | bytes) -> list[str]:
        with pytest.raises(UsageError) as error:
            compute_config(content)
        return [re.sub(r'^\S*/compute.yaml', 'compute.yaml', line) for line in str(error.value).split('\n')]

    return load


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        ('a: ' + '[' * 5000, 'compute.yaml:1:11: is nested too deeply'),
        (b'ok: 1\nuuid: \xff', 'compute.yaml:2: is not UTF-8 text'),
        ('#' * 65537, 'compute.yaml: is larger than 64 KiB'),
    ],
)
def test_large_or_binary_file_is_refused(
    mistakes: Callable[[str | bytes], list[str]], content: str | bytes, reason: str
) -> None:
    """Other mistakes are in tests/golden/texts/files.txt."""
    (line,) = mistakes(content)
    assert line.startswith(reason)


# Unreadable files


def test_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='none.yaml: cannot be read: No such file or directory'):
        load_compute(tmp_path / 'none.yaml')
    with pytest.raises(UsageError, match='cannot be read: Is a directory'):
        load_schedule(tmp_path)


def test_unreadable_default_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path('compute.yaml').symlink_to('gone')
    Path('schedule.yaml').mkdir()
    with pytest.raises(UsageError, match='^compute.yaml: cannot be read'):
        load_compute(None)
    with pytest.raises(UsageError, match='^schedule.yaml: cannot be read'):
        load_schedule(None)


def test_message_with_odd_file_name_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_compute(tmp_path / 'a\nb')
    assert '\n' not in str(caught.value)


def test_deleted_current_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / 'gone'
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match='compute.yaml: cannot be read'):
        load_compute(None)
    os.chdir(tmp_path)


# The inventory of --fake


@given(st.text(max_size=40) | st.text(alphabet='VCPU:4, 019', max_size=20))
def test_any_inventory_is_parsed_or_a_usage_error(text: str) -> None:
    totals, message = {}, ''
    try:
        totals = parse_inventory(text)
    except UsageError as error:
        message = str(error)
    assert message.isprintable()
    assert bool(totals) != bool(message)
    assert all(total > 0 for total in totals.values())


# Arbitrary input


KEYS = [f.name for kind in (ComputeConfig, ScheduleConfig) for f in dataclasses.fields(kind)]
KEYS += EtcdConfig._fields
LIKELY_WORDS = st.sampled_from(
    [*KEYS, 'host', 'port', 'endpoint', 'user', 'VCPU', 'http://ds1', 'ds1:2379', UUID, '.', '<<']
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.text(max_size=20) | st.binary(max_size=4)
)
TREES = st.recursive(
    SCALARS | LIKELY_WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(LIKELY_WORDS | SCALARS, inner, max_size=6),
    max_leaves=12,
)
ANY_CONTENT = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode('utf-8', 'replace')),
    TREES.map(lambda tree: yaml.dump(tree, allow_unicode=True).encode('utf-8', 'replace')),
    st.text(alphabet='abuid:-[]{}#&*!|>%@,?"\'\n \t~0189.<', max_size=60).map(str.encode),
)


@settings(max_examples=200)
@given(ANY_CONTENT)
@example(b'a: "\\ud800"')
@example(b'2001-13-45: 2001-13-45')
@example(b'? {a: b}\n: c')
@example(b'%YAML 9.9\n---\na: b')
@example(b'%TAG ! x\n')
@example(b'{' * 65000)
@example(b'[' * 65000)
@example(b'- ' * 32000)
@example(b'"\\xZZ"')
@example(b'a: "\\UFFFFFFFF"')
@example(b'? ' * 32000)
def test_any_bytes_are_loaded_or_a_usage_error(content: bytes) -> None:
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
