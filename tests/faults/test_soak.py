"""The short soak: 100 operations on ten fakes and two real hosts, a fault every 3 s.

Two cores carry this size in about two minutes, including the start and removal of the lab. The long one is run
manually: see tests/faults/soak.py. Every client asks again after a lost answer, because a claim without a client is
released only after two checks a minute apart; the long soak covers that.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.history import read_history
from tests.faults.soak import compute_figures, print_report, run_soak
from tests.faults.soak_plan import Size, make_plan
from tests.kit.lab import make_lab_name

SEED = 11
SIZE = Size(seconds=80, operations=100, clients=12, fakes=10, hosts=2, fault_every=3, longest=6, patient=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='hypervisors in namespaces need root')
def test_random_faults_lose_double_or_leak_nothing(tmp_path: Path) -> None:
    """F33: the short soak: 100 operations on ten fakes and two real hosts, a fault every three seconds (libvirt)."""
    path = run_soak(make_plan(SEED, SIZE), make_lab_name('soak'), tmp_path)

    assert print_report(path) == [], f'the history is {path}'
    # A soak without faults or answers would prove nothing.
    results = compute_figures(read_history(path))
    assert results['acknowledged'] >= 40, results
    assert results['faults'] >= 20, results
    assert len(results['by kind']) >= 15, results
    assert results['states']['gone'] >= 10, results
