"""The short soak: a hundred operations on ten fake computes and two real hosts, with a fault every three seconds.

Its size is what two cores carry in about two minutes, starting and removing the lab included. The long one is by hand:
see tests/faults/soak.py. Every client asks again when its answer was lost, for a claim that nobody asks about again is
released only after two looks a minute apart: that is the long one's.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.history import read
from tests.faults.soak import figures, report, soak
from tests.faults.soak_plan import Size, make
from tests.kit.lab import lab_name

SEED = 11
SIZE = Size(seconds=80, operations=100, clients=12, fakes=10, hosts=2, fault_every=3, longest=6, patient=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='hypervisors in namespaces need root')
def test_nothing_is_lost_doubled_or_leaked_whatever_breaks(tmp_path: Path) -> None:
    """F33: the short soak: 100 operations on ten fakes and two real hosts, a fault every three seconds (libvirt)"""
    path = soak(make(SEED, SIZE), lab_name('soak'), tmp_path)

    assert report(path) == [], f'the history is {path}'
    # A soak in which nothing happened would show nothing.
    counted = figures(read(path))
    assert counted['acknowledged'] >= 40, counted
    assert counted['faults'] >= 20, counted
    assert len(counted['by kind']) >= 15, counted
    assert counted['states']['gone'] >= 10, counted
