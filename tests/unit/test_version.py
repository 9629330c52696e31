"""The version that ecomp reports: with the commit in a git checkout, without it in a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mdserver
import pytest

import ecomp

TOP = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / 'ecomp').mkdir()
    for name in ('__init__.py', 'version.py'):
        shutil.copy(TOP / 'ecomp' / name, tmp_path / 'ecomp')
    return tmp_path


def git(tree: Path, *words: str) -> str:
    command = ['git', '-C', str(tree), '-c', 'user.name=x', '-c', 'user.email=x@example.org', *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def read_version(tree: Path, **environment: str) -> str:
    command = [sys.executable, '-c', 'from ecomp.version import read_version; print(read_version())']
    env = {'PATH': '/usr/bin:/bin', **environment}
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_checkout_reports_its_commit(tree: Path) -> None:
    git(tree, 'init', '-q')
    git(tree, 'add', '.')
    git(tree, 'commit', '-q', '-m', 'x')
    commit = git(tree, 'rev-parse', '--short=8', 'HEAD')
    assert read_version(tree) == f'{ecomp.__version__}+g{commit}'
    assert read_version(tree, GIT_DIR='/nonexistent') == f'{ecomp.__version__}+g{commit}'


@pytest.mark.skipif(os.geteuid() != 0, reason='only root gives files to another user')
def test_checkout_of_another_user_reports_its_commit(tree: Path) -> None:
    test_checkout_reports_its_commit(tree)
    subprocess.run(['chown', '-R', '12345', str(tree)], check=True)
    assert '+g' in read_version(tree)


def test_mdserver_has_the_version_of_its_package() -> None:
    assert mdserver.__version__ == ecomp.__version__


def test_tree_without_git_reports_the_release(tree: Path) -> None:
    assert read_version(tree) == ecomp.__version__


def test_checkout_without_a_commit_reports_the_release(tree: Path) -> None:
    git(tree, 'init', '-q')
    assert read_version(tree) == ecomp.__version__


def test_checkout_without_the_program_git_reports_the_release(tree: Path) -> None:
    (tree / '.git').mkdir()
    assert read_version(tree, PATH='/nonexistent') == ecomp.__version__
