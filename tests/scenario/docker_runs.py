"""docker.sh and other commands, run beside a Docker Engine of the tests' own."""

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
# The first test makes the images as well: a minute and a half, on a machine that has nothing else to do.
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope='module')
def engine() -> Iterator[Engine]:
    if missing := docker_engine.missing():
        pytest.skip(f'no Docker Engine can be started here: {missing}')
    with docker_engine.engine() as running:
        yield running


@pytest.fixture
def run(engine: Engine, tmp_path: Path) -> Iterator[Run]:
    """Run a command where the containers' ports are, with docker.sh's settings for the local images.

    The network is the test's own, so that the ports of the README are free, whatever runs on the machine.
    """
    settings = {'DOCKER_HOST': engine.host, 'ETCD_IMAGE': BASE, 'POSTGRES_IMAGE': POSTGRES, 'PYTHON_IMAGE': BASE}
    if authorities := os.environ.get('PIP_CERT') or os.environ.get('REQUESTS_CA_BUNDLE'):
        settings['PLACEMENT_BUILD_CA'] = authorities
    inherited = {name: value for name, value in os.environ.items() if not name.startswith('DOCKER_')}
    paths = {'PYTHONPATH': f'{TOP}:{TOP / "md_server"}'}

    def command(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            engine.inside([str(word) for word in words]),
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=inherited | paths | settings | more,
        )

    yield command
    command(SCRIPT, 'down')
    if volumes := engine.docker('volume', 'ls', '--quiet'):
        engine.docker('volume', 'rm', *volumes.split())


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f'{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}'
    return done.stdout
