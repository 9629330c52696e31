"""The benchmark runner: it parses figures, and cleans up and reports scripts that fail."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.kit.servers import TOP, wait_until

BENCH = TOP / 'bench'
STAND_IN = """
import os, signal, sys, time
from result import arguments, asked
options = asked(arguments('', 1))
try:
    open('ready', 'w').close()
    {body}
finally:
    open('cleaned', 'w').close()
"""
HANGING_SCRIPT = STAND_IN.format(body='time.sleep(3600)')


class TimesOutWhenReady(subprocess.Popen[str]):
    """A process that times out as soon as it is ready, however slow the machine is."""

    def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
        if not Path('ready').exists():
            wait_until(lambda: Path('ready').exists(), 10, 'the script is ready')
            raise subprocess.TimeoutExpired('script', timeout or 0)
        return super().communicate(input, timeout)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The benchmark runner, with the test's directory for its scripts and labs."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv('PYTHONPATH', f'{BENCH}{os.pathsep}{TOP}')
    monkeypatch.chdir(tmp_path)
    module, lab = importlib.import_module('every'), importlib.import_module('lab')
    monkeypatch.setattr(module, 'HERE', tmp_path)
    monkeypatch.setattr(module.os, 'geteuid', lambda: 0)
    monkeypatch.setattr(lab, 'LABS', tmp_path)
    note = 'import sys; open("elab", "a").write(" ".join(sys.argv[1:]) + "\\n")'
    monkeypatch.setattr(lab, 'ELAB', (sys.executable, '-c', note))
    return module


def test_hanging_script_cleans_up_and_is_reported(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path('hangs.py').write_text(HANGING_SCRIPT)
    monkeypatch.setattr(runner.subprocess, 'Popen', TimesOutWhenReady)
    ran = runner.run(runner.Script('hangs', 7, 7), quick=True)
    assert Path('cleaned').exists()
    assert runner.report({'hangs': ran}, 0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == '0 figures, 0 missed their target, failed: hangs, 0 min'
    assert ran.said.splitlines()[0] == 'not done after 7 s'


@pytest.mark.parametrize(
    ('body', 'reason', 'is_clean'),
    [
        ('raise SystemExit(3)', 'exit 3', True),
        ('os.kill(os.getpid(), signal.SIGTERM); time.sleep(3600)', 'ended by SIGINT', True),
        ('os.kill(os.getpid(), signal.SIGKILL)', 'ended by SIGKILL', False),
    ],
)
def test_failing_script_is_reported_and_its_lab_removed(
    runner: ModuleType, capsys: pytest.CaptureFixture[str], body: str, reason: str, is_clean: bool
) -> None:
    Path('fails.py').write_text(STAND_IN.format(body=body))
    Path('its-lab').mkdir()
    ran = runner.run(runner.Script('fails', 60, 60, lab='its-lab'), quick=False)
    assert (ran.said.splitlines()[0], Path('cleaned').exists()) == (reason, is_clean)
    assert Path('elab').read_text() == 'down --name its-lab\n'
    runner.report({'good': runner.Ran(), 'fails': ran}, 0)
    assert capsys.readouterr().out.splitlines()[-1].endswith(', failed: fails, 0 min')


def test_each_script_entry_names_its_lab(runner: ModuleType) -> None:
    for script in runner.SCRIPTS:
        source = (BENCH / f'{script.name}.py').read_text()
        assert ("Lab('" in source) == bool(script.lab), script.name
        assert not script.lab or f"Lab('{script.lab}')" in source, script.name
