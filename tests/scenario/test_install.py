"""The wheel without libvirt: all four commands exist and do what they can without it."""

from __future__ import annotations

import os
import re
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
from tests.kit.tree import copy_tree
from tests.kit.wheels import build_wheel

pytestmark = pytest.mark.slow

COMMANDS = ('eschedule', 'ecompute', 'elab', 'mdserver')


@pytest.fixture(scope='module')
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide the commands of the environment that pipx makes of the wheel, without a compiler."""
    directory = tmp_path_factory.mktemp('plain')
    copy_tree(directory / 'clone')
    wheel = build_wheel(directory / 'clone', directory)
    # Whatever has no wheel of its own would be compiled, and is refused.
    pipx = ['pipx', 'install', '--python', sys.executable, '--pip-args=--only-binary=:all:', str(wheel)]
    env = {**make_clean_environment(), 'PIPX_HOME': str(directory), 'PIPX_BIN_DIR': str(directory / 'bin')}
    done = subprocess.run(pipx, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (directory / 'bin').iterdir()) == sorted(COMMANDS)
    yield directory / 'venvs/etcd-compute/bin'
    shutil.rmtree(directory)


def run_installed(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=make_clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def make_clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'VIRTUAL_ENV')}


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_is_installed(programs: Path, tmp_path: Path, command: str) -> None:
    done = run_installed(programs / command, '--version', cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith(f'{command} ')


def test_grpc_and_libvirt_are_not_installed(programs: Path, tmp_path: Path) -> None:
    result = run_installed(programs / 'python', '-m', 'pip', 'list', '--format=freeze', cwd=tmp_path)
    assert result.returncode == 0, result
    packages = {re.split('==| @ ', line)[0] for line in result.stdout.splitlines()}
    assert packages >= {'etcd-compute', 'h2'}
    assert packages & {'etcd3', 'grpcio', 'libvirt-python', 'protobuf', 'tenacity'} == set()


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
    assert "cryptography. Fix: pip install '.[lab]'" in done.stderr
