"""The linters find nothing: ruff, with bandit's rules for the product, mypy, and a shell for each script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


def run(*command: str) -> None:
    """Run a linter at the top of the tree; what it says is the failure."""
    done = subprocess.run([sys.executable, '-m', *command], cwd=TOP, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f'{" ".join(command)}\n{done.stdout}{done.stderr}', pytrace=False)


def test_ruff() -> None:
    trees = [name for name in ('ecomp', 'md_server', 'tests', 'bench', 'docs', 'setup.py') if (TOP / name).exists()]
    run('ruff', 'check', '--config=pyproject.toml', *trees)


# bandit's rules, as ruff has them, that are not asked for in the product, with the reason.
NOT_OF_BANDIT = {
    'S101': 'an assert tells mypy what holds; what comes from outside is checked by its reader',
    'S103': 'the mode of /dev/kvm in a host of a lab, which its QEMU has to open',
    'S104': 'compared with, and written into filters; nothing binds to it',
    'S310': 'the URLs are of a lab, and made by it',
    'S311': 'what is left to chance is who waits how long; tokens and uuids come from the system',
    'S314': "the XML is libvirt's, which a guest does not write",
    'S603': 'lists of words, never a shell (see SHELLS in rooms.py)',
    'S606': 'the same',
}


def test_bandit() -> None:
    left = f'--ignore={",".join(NOT_OF_BANDIT)}'
    run('ruff', 'check', '--isolated', '--target-version=py311', '--select=S', left, 'ecomp', 'md_server', 'setup.py')


def test_modules_classes_and_functions_have_docstrings() -> None:
    # Methods are looked at in test_house.py. The tree of errors is drawn and explained in its module's docstring.
    own = ['--config=lint.per-file-ignores={"ecomp/errors.py"=["D101"]}']
    run('ruff', 'check', '--isolated', '--select=D100,D101,D103,D104', *own, 'ecomp', 'md_server')


def test_mypy() -> None:
    run('mypy', '--config-file=pyproject.toml', 'ecomp', 'md_server/mdserver')


def test_shell_scripts_parse() -> None:
    scripts = [TOP / 'tests/run', TOP / '.ci/run', TOP / 'bench/run', *TOP.glob('*.sh')]
    for script in scripts:
        done = subprocess.run(['bash', '-n', str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ''), script
        assert os.access(script, os.X_OK), f'{script} is not executable'
