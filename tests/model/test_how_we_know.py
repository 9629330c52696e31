"""The tests, scenarios and paths that docs/explanation/how-we-know.md names exist."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.kit.plan import LAST_RUN_PATH, LastRuns
from tests.kit.servers import TOP
from tests.model.scenarios import SCENARIOS

PAGE = (TOP / 'docs/explanation/how-we-know.md').read_text()
pytestmark = pytest.mark.fast
TESTS = re.findall(r'`(\w+/test_\w+\.py)::(test_\w+)`', PAGE)


def test_page_names_a_proof_for_each_defect() -> None:
    rows = PAGE[PAGE.index('| defect |') :].splitlines()[2:]
    assert len(rows) > 20
    proof = re.compile(r'\| (`\w+/test_\w+\.py::test_\w+`|the scenario `\w+`) \|$')
    assert [row for row in rows if row and not proof.search(row)] == []


@pytest.mark.parametrize(('path', 'name'), TESTS)
def test_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((TOP / 'tests' / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize('name', re.findall(r'the scenario `(\w+)`', PAGE))
def test_named_scenario_exists(name: str) -> None:
    assert name in SCENARIOS


@pytest.mark.parametrize('path', re.findall(r'`(tests/[\w/.]+)`', PAGE))
def test_named_path_exists(path: str) -> None:
    assert (TOP / path).exists()


def test_slow_tests_that_the_page_names_have_passed() -> None:
    # `tests/last_run` has the date of the last pass of each slow test.
    passed = {re.sub(r'\[.*', '', name) for name in LastRuns(LAST_RUN_PATH).dates}
    named = {(path, name) for path, name in TESTS}
    named |= {
        (path, name) for path in re.findall(r'`tests/(\w+/test_\w+\.py)`', PAGE) for name in find_slow_tests(path)
    }
    slow = {f'tests/{path}::{name}' for path, name in named if name in find_slow_tests(path)}
    assert len(slow) > 3
    assert slow - passed == set(), 'run them: tests/run --all PART'


@functools.cache
def find_slow_tests(path: str) -> set[str]:
    """Return the names of a module's tests that are slow with all their parameters."""
    tree = ast.parse((TOP / 'tests' / path).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if any(ast.unparse(mark).endswith('.slow') for mark in node.decorator_list)}
