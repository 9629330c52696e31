"""Who may import whom among the tests: what several folders need is in tests/kit, and no test module is a library."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


def read() -> dict[str, str]:
    """The source of every module of the tests and benchmarks, by its full name."""
    paths = [path for folder in ('tests', 'bench') for path in sorted((TOP / folder).rglob('*.py'))]
    return {'.'.join(path.relative_to(TOP).with_suffix('').parts): path.read_text() for path in paths}


def imports(source: str) -> Iterator[str]:
    """Every module of the tests that is imported, and each name taken from one, as `module.name`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def wrong(modules: Mapping[str, str]) -> list[str]:
    """`who imports what`, for each import that the rules forbid. What a module says to a child is of itself alone."""
    found = []
    for name, source in modules.items():
        folder = name.rpartition('.')[0]
        for other in imports(source):
            top, _, rest = other.partition('.')
            if top != 'tests' or other.startswith(f'{name}.') or other == name:
                continue
            theirs = '.'.join(['tests', rest.split('.')[0]])
            of_a_test = any(part.startswith('test_') for part in other.split('.')[:3])
            if of_a_test or theirs not in ('tests.kit', folder):
                found.append(f'{name} imports {other}')
    return found


def test_nobody_imports_a_test_or_another_folder_s_helpers() -> None:
    assert wrong(read()) == []


@pytest.mark.parametrize(
    ('module', 'source'),
    [
        ('tests.faults.test_x', 'from tests.faults.test_y import claim'),
        ('tests.faults.test_x', 'from tests.faults import test_y'),
        ('tests.faults.test_x', 'from tests.scenario.story import place'),
        ('tests.faults.x', 'import tests.functional.cloud'),
        ('tests.kit.x', 'from tests.faults.islands import Island'),
        ('tests.conftest', 'from tests.scenario.x import y'),
        ('bench.x', 'def late():\n    from tests.faults.soak import soak'),
    ],
)
def test_a_planted_wrong_is_found(module: str, source: str) -> None:
    assert wrong({module: source})


def test_what_is_right_is_let_through() -> None:
    fine = {
        'tests.faults.test_x': 'from tests.kit.story import place\nfrom tests.faults import table',
        'tests.faults.test_y': 'from tests.faults import test_y',
        'bench.x': 'from tests.kit.servers import Etcd',
    }
    assert wrong(fine) == []
