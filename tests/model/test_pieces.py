"""A long run in pieces: each piece has its own seeds, and `--sum` adds up their output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model.__main__ import TOTAL_PREFIX, main


@pytest.fixture
def pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The output files of two short pieces, with the seeds 2 and 3."""
    paths = []
    for seed in ('2', '3'):
        assert main(['--seconds', '0.1', '--seed', seed, 'strict_anti_affinity']) == 0
        paths.append(str(tmp_path / seed))
        Path(paths[-1]).write_text(capsys.readouterr().out)
    return paths


def test_sum_adds_up_pieces(pieces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [Path(path).read_text().splitlines()[-1] for path in pieces]
    schedules = [json.loads(line.removeprefix(TOTAL_PREFIX))['schedules'] for line in lines]
    assert min(schedules) > 0
    assert main(['--sum', *pieces]) == 0
    out = capsys.readouterr().out
    assert out.startswith('2 pieces, seeds 2, 3, ')
    assert f' {sum(schedules):,} schedules' in out
    assert ' 0 violations' in out


def test_sum_reports_a_seed_counted_twice(pieces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['--sum', pieces[0], pieces[0]]) == 0
    assert 'have one seed' in capsys.readouterr().out
