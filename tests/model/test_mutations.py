"""Planted bugs are found: one that is not says that something which matters is looked at by nobody."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.servers import TOP, environment
from tests.model.mutations import CHEAP, MUTATIONS
from tests.model.scenarios import SCENARIOS


@pytest.mark.fast
@pytest.mark.parametrize('name', MUTATIONS)
def test_each_has_its_place_in_the_source(name: str) -> None:
    mutation = MUTATIONS[name]
    compile(mutation.source(), mutation.path, 'exec')
    assert [each for each in mutation.scenarios if each not in SCENARIOS] == []


@pytest.mark.parametrize('name', CHEAP)
def test_a_planted_bug_is_found(name: str) -> None:
    look_for(name)


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in MUTATIONS if name not in CHEAP])
def test_every_planted_bug_is_found(name: str) -> None:
    look_for(name)


def look_for(name: str) -> None:
    """In a process of its own: the product is imported with the bug."""
    command = [sys.executable, '-m', 'tests.model.mutations', name]
    done = subprocess.run(command, cwd=TOP, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f'{name}: not found\n{done.stdout}{done.stderr}'
