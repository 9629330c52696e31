"""Each mistake of the frozen list has its place in the product, and is found by its tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kit.servers import TOP
from tests.kit.tree import copy_tree
from tests.mutations.rows import ROWS, Row
from tests.mutations.trial import make_mistake, run_tests


def name_row(row: Row) -> str:
    return row.description


@pytest.mark.fast
def test_rows_differ() -> None:
    assert len({row.description for row in ROWS}) == len({(row.file, row.old) for row in ROWS}) == len(ROWS)


@pytest.mark.fast
@pytest.mark.parametrize('row', ROWS, ids=name_row)
def test_mistake_has_its_place_and_tests(row: Row) -> None:
    text = (TOP / row.file).read_text()
    assert text.count(row.old) == 1
    assert ast.unparse(ast.parse(text.replace(row.old, row.new))) != ast.unparse(ast.parse(text))
    for test in row.tests:
        file, _, function = test.partition('::')
        assert f'def {function.partition("[")[0]}' in (TOP / file).read_text(), test
    assert row.tests or row.note


@pytest.mark.slow
@pytest.mark.parametrize('row', [row for row in ROWS if row.tests], ids=name_row)
def test_mistake_is_found(row: Row, tmp_path: Path) -> None:
    copy_tree(tmp_path)
    with make_mistake(row, tmp_path):
        assert run_tests(row, tmp_path).has_failed, f'none of these finds it: {row.tests}'
