"""elab's command line: what is refused, with one line and which exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ecomp.lab.elab import main


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        ([], 'COMMAND'),
        (['dwon'], 'invalid choice'),
        (['up', '--hosts', '0'], 'not a number from 1 to 64'),
        (['up', '--hosts', '65'], 'not a number from 1 to 64'),
        (['up', '--hosts', 'three'], 'not a number from 1 to 64'),
        (['up', '--name', '../x'], 'a lab is named'),
        (['down', '--name', ''], 'a lab is named'),
        (['exec'], 'HOST'),
        (['guest'], 'OUT.qcow2'),
        (['control', '--etcd-port', 'x'], 'invalid int value'),
    ],
)
def test_what_is_refused_is_one_line_and_exit_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert said in err
    assert err.count('\n') == 1


@pytest.mark.parametrize('words', [['up'], ['status'], ['exec', 'hv1', 'true'], ['down']])
def test_only_root_makes_and_enters_labs(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, '-m', 'ecomp.lab.elab', *words]
    if os.geteuid() == 0:
        if shutil.which('setpriv') is None:
            pytest.skip('setpriv is not installed: apt-get install util-linux')
        command = ['setpriv', '--reuid', '65534', '--clear-groups', *command]
    top = Path(__file__).resolve().parents[2]
    env = {**os.environ, 'PYTHONPATH': str(top)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    if 'Permission denied' in done.stderr:
        pytest.skip(f'another user cannot read {top}')
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr == f'elab: elab {words[0]} needs root: run it with sudo\n'


def test_a_guest_into_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['guest', str(tmp_path / 'none/guest.qcow2')]) == 2
    assert capsys.readouterr().err.count('\n') == 1
