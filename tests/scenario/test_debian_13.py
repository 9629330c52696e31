"""Debian 13, with its Python 3.13, libvirt 11.3, QEMU 10.0 and etcd 3.5: the quickstart, and the tests that say most.

A minimal system from Debian's packages, on a machine of its own, with a copy of this tree in it as a clone has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.kept import kept
from tests.kit.machine import Machine, lacking, machine
from tests.kit.tree import copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

CLONE = Path('/clone')
RECIPE = ['--variant=minbase', '--include=git,python3,python3-venv,ca-certificates,iproute2,procps', 'trixie']
CERTIFICATES = Path('/etc/ssl/certs/ca-certificates.crt')
PIP = [path for path in (Path('/etc/pip.conf'),) if path.exists()]


@pytest.fixture(scope='module')
def trixie(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Debian 13 with this tree at CLONE: nothing it needs is installed."""
    if why := lacking():
        pytest.skip(why)
    root = tmp_path_factory.mktemp('trixie') / 'root'
    root.mkdir(mode=0o755)
    try:
        subprocess.run(['tar', '-xf', str(kept('debian-13.tar', RECIPE, _make)), '-C', str(root)], check=True)
        # Where the machine's packages come through a proxy of its own, its authority and where pip looks are needed.
        shutil.copyfile(CERTIFICATES, root / CERTIFICATES.relative_to('/'))
        for path in PIP:
            shutil.copyfile(path, root / path.relative_to('/'))
        copy_tree(root / CLONE.relative_to('/'))
        with machine(root) as made:
            for words in (['init', '--quiet'], ['add', '--all']):
                run(made, 'git', *words)
            yield made
    finally:
        shutil.rmtree(root.parent, ignore_errors=True)


def _make(work: Path) -> Path:
    archive = work / 'root.tar'
    made = subprocess.run(['mmdebstrap', '--quiet', *RECIPE, str(archive)], check=False, capture_output=True, text=True)
    assert made.returncode == 0, f'mmdebstrap cannot make Debian 13: {made.stderr[-2000:]}'
    return archive


def run(trixie: Machine, *command: str) -> str:
    """Run a command in the clone, as root's shell there would; what it printed, which is shown if it fails."""
    passed_on = [f'{name}={value}' for name, value in os.environ.items() if name.startswith('PIP_')]
    clean = ['env', '-i', 'HOME=/root', 'LC_ALL=C.UTF-8', 'PATH=/usr/sbin:/usr/bin:/sbin:/bin', *passed_on]
    done = trixie.run([*clean, *command], CLONE)
    print(done.stdout)
    assert done.returncode == 0, f'{command}: {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-4000:]}'
    return done.stdout


def test_the_quickstart_and_its_commands(trixie: Machine) -> None:
    said = run(trixie, './quickstart.sh')
    assert 'NOTIFIED TARGET' in said
    assert 'This took ' in said
    tried = [line.strip() for line in said.partition('Try next')[2].splitlines() if line.startswith('  .venv')]
    assert len(tried) == 3
    placed, status, destroyed = (run(trixie, 'sh', '-c', each) for each in tried)
    assert placed.startswith('NOTIFIED TARGET')
    assert status.count('ready') == 8
    assert destroyed == ''
    assert '3 computes' in run(trixie, 'sh', '-c', f'{tried[2].split(" destroy ")[0]} audit 2>&1')
    run(trixie, './quickstart.sh', 'down')
    assert trixie.run(['ls', '/var/lib/elab']).stdout == ''


@pytest.mark.parametrize('part', ['unit', 'functional'])
def test_the_tests(trixie: Machine, part: str) -> None:
    said = run(trixie, 'tests/run', part)
    assert ' passed' in said
