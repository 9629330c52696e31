"""The tests, scenarios and paths that docs/explanation/how-we-know.md names exist."""

from __future__ import annotations

import ast
import re

import pytest

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
