"""Ctrl-C in eschedule's first moments: whatever is being loaded, it ends in one line; and in ecompute --check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.servers import environment

INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = {words!r}
{run}
"""
SCHEDULE = 'from ecomp.schedule import run; run()'
CHECK = 'from ecomp.compute import main; sys.exit(main())'
LOADED = ('ecomp.log', 'ecomp.errors', 'ecomp.cli.options', 'ecomp.cli.commands', 'ecomp.model.record')
LOADED = (*LOADED, 'ecomp.conf', 'yaml')


def interrupted(directory: Path, **words: object) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a program that is interrupted as it loads a module."""
    command = [sys.executable, '-c', INTERRUPTED.format(**words)]
    done = subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize('name', [*LOADED, 'ecomp.scheduler.looking.find', 'h2', 'ssl'])
def test_ctrl_c_while_modules_load_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / 'schedule.yaml').write_text('etcd: {endpoints: ["127.0.0.1:1"]}\n')
    said = interrupted(tmp_path, name=name, words=['list'], number='SIGINT', run=SCHEDULE)
    assert said == (1, '', 'eschedule: interrupted\n')


@pytest.mark.parametrize('number', ['SIGINT', 'SIGTERM'])
def test_a_check_that_is_interrupted_says_not_that_all_is_well(number: str, tmp_path: Path) -> None:
    said = interrupted(tmp_path, name='ecomp.agent.checking', words=['--check'], number=number, run=CHECK)
    assert said == (1, '', 'ecompute: interrupted: not everything was looked at\n')
