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


@pytest.mark.parametrize('name', [*LOADED, 'ecomp.scheduler.looking.find', 'h2', 'ssl'])
def test_ctrl_c_while_modules_load_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / 'schedule.yaml').write_text('etcd: {endpoints: ["127.0.0.1:1"]}\n')
    command = [sys.executable, '-c', INTERRUPTED.format(name=name, words=['list'], number='SIGINT', run=SCHEDULE)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, '', 'eschedule: interrupted\n')


@pytest.mark.parametrize('number', ['SIGINT', 'SIGTERM'])
def test_a_check_that_is_interrupted_says_not_that_all_is_well(number: str, tmp_path: Path) -> None:
    words = {'name': 'ecomp.agent.checking', 'words': ['--check'], 'number': number, 'run': CHECK}
    done = subprocess.run(
        [sys.executable, '-c', INTERRUPTED.format(**words)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    said = 'ecompute: interrupted: not everything was looked at\n'
    assert (done.returncode, done.stdout, done.stderr) == (1, '', said)
