"""Files that are to be a configuration and cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ecomp.compute_conf import load_compute
from ecomp.conf import load_schedule
from ecomp.errors import UsageError


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='none.yaml: cannot be read: No such file or directory'):
        load_compute(tmp_path / 'none.yaml')
    with pytest.raises(UsageError, match='cannot be read: Is a directory'):
        load_schedule(tmp_path)


def test_a_file_that_is_there_and_cannot_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path('compute.yaml').symlink_to('gone')
    Path('schedule.yaml').mkdir()
    with pytest.raises(UsageError, match='^compute.yaml: cannot be read'):
        load_compute(None)
    with pytest.raises(UsageError, match='^schedule.yaml: cannot be read'):
        load_schedule(None)


def test_a_message_stays_one_line_whatever_the_file_is_called(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_compute(tmp_path / 'a\nb')
    assert '\n' not in str(caught.value)


def test_a_current_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / 'gone'
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match='compute.yaml: cannot be read'):
        load_compute(None)
    os.chdir(tmp_path)
