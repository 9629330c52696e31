"""The plugin of tests/run: forbidden skips, tests that share a lab, overdue tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.plan import FOLDERS, PARTS, TESTS, find_part
from tests.kit.servers import make_environment

TEST_FILE = """
import os
import pytest

@pytest.fixture(scope='session')
def shared_lab():
    return os.getpid()

@pytest.fixture(scope='session')
def pids(tmp_path_factory):
    return tmp_path_factory.getbasetemp().parent / 'pids'

@pytest.mark.parametrize('number', range(12))
def test_of_a_lab(shared_lab, number, pids):
    with open(pids, 'a') as file:
        file.write(f'{shared_lab}\\n')

@pytest.mark.parametrize('number', range(12))
def test_of_none(number):
    pass
"""


def run_pytest(directory: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin on one file, without other configuration than the markers."""
    (directory / 'test_them.py').write_text(text)
    (directory / 'pytest.ini').write_text('[pytest]\nmarkers =\n    slow\n    fast\n    long\n')
    command = [sys.executable, '-m', 'pytest', '-p', 'tests.kit.plan', '-p', 'no:cacheprovider', *words]
    return subprocess.run(command, cwd=directory, env=make_environment(), capture_output=True, text=True, check=False)


@pytest.mark.long
def test_nothing_skipped_turns_skips_into_failures(tmp_path: Path) -> None:
    (tmp_path / 'test_gone.py').write_text('import pytest\npytest.importorskip("nothing_of_that_name")\n')
    text = """
import pytest

def test_one():
    pytest.skip('no root')

@pytest.mark.skip(reason='not here')
def test_two():
    pass
"""
    assert '3 skipped' in run_pytest(tmp_path, text).stdout
    refused = run_pytest(tmp_path, text, '--nothing-skipped', '--continue-on-collection-errors')
    assert refused.returncode == 1, refused.stdout
    # A mark and an importorskip of a module skip before the test runs, so they count as errors.
    assert '1 failed, 2 errors' in refused.stdout
    assert refused.stdout.count('skipped, where nothing may be') >= 3


@pytest.mark.long
def test_tests_of_one_lab_run_in_one_process(tmp_path: Path) -> None:
    base = tmp_path / 'base'
    words = ['-n', '2', '--dist', 'loadgroup', '--no-loadscope-reorder', '--basetemp', str(base)]
    process = run_pytest(tmp_path, TEST_FILE, *words)
    assert (process.returncode, '24 passed' in process.stdout) == (0, True), process.stdout
    assert len(set((base / 'pids').read_text().split())) == 1


def test_each_part_of_all_is_known_to_the_script_and_has_files() -> None:
    listed = re.search(r'^PARTS=\((.*)\)$', (TESTS / 'run').read_text(), re.MULTILINE)
    assert listed is not None
    assert listed[1].split() == [*FOLDERS, *PARTS]
    assert [file for files in PARTS.values() for file in files if not (TESTS / file).exists()] == []
    assert {path.parent.name for path in TESTS.glob('*/test_*.py')} == set(FOLDERS)
    assert find_part(TESTS / 'faults/test_soak.py') == 'kills'
    assert find_part(TESTS / 'faults/test_etcd.py') == 'faults'
