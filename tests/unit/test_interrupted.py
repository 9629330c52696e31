"""Ctrl-C in eschedule's first moments: whatever is being loaded, it ends in one line."""

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
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = {words!r}
from ecomp.schedule import run
run()
"""
LOADED = ('ecomp.log', 'ecomp.errors', 'ecomp.cli.reading', 'ecomp.cli.commands', 'ecomp.model.record')
LOADED = (*LOADED, 'ecomp.conf', 'yaml')


@pytest.mark.parametrize('name', [*LOADED, 'ecomp.scheduler.looking.find', 'h2', 'ssl'])
def test_ctrl_c_while_modules_load_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / 'schedule.yaml').write_text('etcd: {endpoints: ["127.0.0.1:1"]}\n')
    command = [sys.executable, '-c', INTERRUPTED.format(name=name, words=['list'])]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, '', 'eschedule: interrupted\n')
