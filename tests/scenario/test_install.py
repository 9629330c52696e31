"""`pip install .` without libvirt: all four commands exist and do what they can without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.commands import Control
from tests.kit.journal import JOURNAL
from tests.kit.servers import wait_until
from tests.kit.story import NOTIFIED_PATTERN, SMALL_QUERY

TOP = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

COMMANDS = ('eschedule', 'ecompute', 'elab', 'mdserver')


@pytest.fixture(scope='module')
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide the commands of a virtual environment with only ecomp and its dependencies."""
    directory = tmp_path_factory.mktemp('plain')
    subprocess.run([sys.executable, '-m', 'venv', str(directory / 'venv')], check=True)
    # setuptools builds beside setup.py, so the installation uses a copy of the tree.
    ignored = shutil.ignore_patterns('.git', '.venv', 'build', '*.egg-info', '.*_cache', '__pycache__', '.hypothesis')
    shutil.copytree(TOP, directory / 'ecomp', ignore=ignored)
    pip = [str(directory / 'venv/bin/python'), '-m', 'pip', 'install', '-q', str(directory / 'ecomp')]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield directory / 'venv/bin'
    shutil.rmtree(directory)


def run_installed(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of that environment, without access to this one's packages."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=make_clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def make_clean_environment() -> dict[str, str]:
    """Return the environment variables without those that lead to this test's own Python."""
    return {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'VIRTUAL_ENV')}


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_is_installed(programs: Path, tmp_path: Path, command: str) -> None:
    done = run_installed(programs / command, '--version', cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith(f'{command} ')


def test_grpc_is_not_installed(programs: Path, tmp_path: Path) -> None:
    result = run_installed(programs / 'python', '-m', 'pip', 'list', '--format=freeze', cwd=tmp_path)
    assert result.returncode == 0, result
    packages = {line.partition('==')[0] for line in result.stdout.splitlines()}
    assert 'h2' in packages
    assert packages & {'etcd3', 'grpcio', 'protobuf', 'tenacity'} == set()


def test_placing_on_a_fake_compute_needs_no_libvirt(programs: Path, tmp_path: Path, cluster: Control) -> None:
    assert cluster.directory == tmp_path  # the directory of its compute.yaml and schedule.yaml
    with (tmp_path / 'log').open('w') as log:
        ecompute = subprocess.Popen(
            [programs / 'ecompute', '--fake', 'VCPU:4,DISK_GB:10,MEMORY_MB:512'],
            cwd=tmp_path,
            env=make_clean_environment(),
            stderr=log,
        )
    try:
        wait_until(lambda: ' ready: ' in (tmp_path / 'log').read_text(), 20, 'ecompute is ready')
        started_at = time.monotonic()
        done = run_installed(programs / 'eschedule', SMALL_QUERY, '--wait=started', cwd=tmp_path)
        JOURNAL.add_run([SMALL_QUERY, '--wait=started'], done.returncode, (done.stdout, done.stderr), started_at, 0)
        assert done.returncode == 0, done
        assert NOTIFIED_PATTERN.match(done.stdout)
    finally:
        ecompute.terminate()
        assert ecompute.wait(20) == 0


def test_missing_extras_are_named(programs: Path, tmp_path: Path, cluster: Control) -> None:
    assert cluster.directory == tmp_path
    done = run_installed(programs / 'ecompute', cwd=tmp_path)
    assert done.returncode == 2
    message = 'ecompute: libvirt-python is missing. Fix: install libvirt-dev, pkg-config and gcc, then run `'
    assert done.stderr.splitlines()[-1].startswith(message)
    assert "-m pip install '.[hypervisor]'` in a clone of ecomp" in done.stderr.splitlines()[-1]
    done = run_installed(programs / 'elab', 'control', cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith('elab: ')
    assert 'placement. Fix: pip install ' in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = run_installed(programs / 'elab', 'certs', 'certs', '--disable', cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "cryptography, etcd3. Fix: pip install '.[lab]'" in done.stderr
