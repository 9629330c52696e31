"""Earlier releases of ecomp, from this repository's history, beside the version of the tree.

They run with this Python and its packages, whose versions satisfy their requirements, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from functools import cache
from pathlib import Path

from tests.kit.commands import Command, Control, Ecompute
from tests.kit.kept import cache_file
from tests.kit.servers import TOP, make_environment

# The version of the tree; it is no release.
CURRENT = 'current'
COMMITS = {
    '1.0.0': '3d33c687acdd4d6f5d58bf99691f42636d77140c',
    '1.1.0': '8bf4bff8a72c352ace5ca6863ad3da342c4d0725',
}
# -P keeps the working directory out of sys.path. With it a process also starts cold: a warm one has the tree's modules.
PYTHON = (sys.executable, '-P')
REPORT = 'import ecomp, mdserver; print(ecomp.__version__, ecomp.__file__, mdserver.__file__)'


@cache
def export_release(release: str) -> Path:
    """Return a directory with the files of a release, cached between runs.

    Raises:
        AssertionError: the clone lacks the release's commit, or its code would not run from that directory.
    """
    commit = COMMITS[release]

    def make(work: Path) -> Path:
        command = ['git', '-C', str(TOP), 'archive', '--format=tar', commit]
        result = subprocess.run(command, capture_output=True, check=False)
        problem = f'commit {commit}, which is ecomp {release}, cannot be read: {result.stderr.decode().strip()}'
        cure = 'run the tests in a clone with its whole history (git fetch --unshallow)'
        assert result.returncode == 0, f'{problem}. Fix: {cure}'
        tree = work / 'tree'
        tree.mkdir()
        subprocess.run(['tar', '--extract', '--directory', str(tree)], input=result.stdout, check=True)
        return tree

    tree = cache_file(f'ecomp-{commit[:8]}', commit, make)
    program = [*PYTHON, '-c', REPORT]
    environment = _make_tree_environment(tree)
    reported = subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert reported == [release, str(tree / 'ecomp/__init__.py'), str(tree / 'md_server/mdserver/__init__.py')]
    return tree


def _make_tree_environment(tree: Path) -> dict[str, str]:
    return {**os.environ, 'PYTHONPATH': os.pathsep.join([str(tree), str(tree / 'md_server')])}


def make_release_environment(release: str) -> dict[str, str]:
    """Return this process's environment, with ecomp and mdserver importable in this version."""
    return make_environment() if release == CURRENT else _make_tree_environment(export_release(release))


def make_release_command(release: str, module: str, *words: str) -> list[str]:
    """Return the command that runs a module of this version, in make_release_environment()."""
    return [*([sys.executable] if release == CURRENT else PYTHON), '-m', module, *words]


def run_program(release: str, program: str, stdin: str) -> str:
    """Run a Python program with the modules of this version, and return its stdout."""
    command, environment = [*PYTHON, '-c', program], make_release_environment(release)
    return subprocess.run(
        command, env=environment, input=stdin, capture_output=True, text=True, check=True, timeout=60
    ).stdout


class ReleasedEschedule(Command):
    """A running eschedule of this version; `with` kills it."""

    def __init__(self, control: Control, release: str, *words: str) -> None:
        command = make_release_command(release, 'ecomp.schedule', '--config', str(control.schedule_yaml), *words)
        super().__init__(command, control.directory, make_release_environment(release))


class ReleasedEcompute(Ecompute):
    """`ecompute --fake` of a release, which takes from queues.

    `release` may be changed while it is stopped: the next start upgrades it.
    """

    def __init__(self, control: Control, release: str, inventory: str) -> None:
        self.release = release
        identifier = str(uuid.uuid4())
        directory = control.directory / identifier
        super().__init__(
            control.etcd.endpoint, control.placement.url, inventory, directory, uuid=identifier, queues=True
        )
        control.at_exit.callback(self.close)

    def command(self) -> list[str]:
        words = ['--config', str(self.config), '--fake', str(self.inventory), *self.options]
        return make_release_command(self.release, 'ecomp.compute', *words)

    def environment(self) -> dict[str, str]:
        return make_release_environment(self.release)
