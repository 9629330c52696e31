"""Fixtures and helpers that run docker.sh beside a Docker Engine of the tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.scenario import docker_engine
from tests.scenario.docker_engine import BASE, POSTGRES, Engine

TOP = Path(__file__).resolve().parents[2]
SCRIPT = TOP / 'docker.sh'
# The first test also makes the images: 90 seconds on an idle machine.
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope='module')
def engine() -> Iterator[Engine]:
    if missing := docker_engine.find_missing_requirement():
        pytest.skip(f'no Docker Engine can be started here: {missing}')
    with docker_engine.start_engine() as started:
        yield started


@pytest.fixture
def run(engine: Engine, tmp_path: Path) -> Iterator[Run]:
    """Provide a function that runs a command in a network where the README's ports are free."""
    settings = {'DOCKER_HOST': engine.host, 'ETCD_IMAGE': BASE, 'POSTGRES_IMAGE': POSTGRES, 'PYTHON_IMAGE': BASE}
    if authorities := os.environ.get('PIP_CERT') or os.environ.get('REQUESTS_CA_BUNDLE'):
        settings['PLACEMENT_BUILD_CA'] = authorities
    inherited = {name: value for name, value in os.environ.items() if not name.startswith('DOCKER_')}
    paths = {'PYTHONPATH': f'{TOP}:{TOP / "md_server"}'}

    def run_command(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            engine.wrap_command([str(word) for word in words]),
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=inherited | paths | settings | more,
        )

    yield run_command
    run_command(SCRIPT, 'down')
    if volumes := engine.run_docker('volume', 'ls', '--quiet'):
        engine.run_docker('volume', 'rm', *volumes.split())


def expect_success(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f'{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}'
    return done.stdout
