"""How long etcd is waited for by a command that says how long it waits."""

from __future__ import annotations

import pytest

from ecomp.cli.command import SHORTEST, Context
from ecomp.cli.commands import parse
from ecomp.cli.terminal import Terminal
from ecomp.conf import ScheduleConfig


@pytest.mark.parametrize(
    ('words', 'seconds'),
    [
        (['wait', 'web1'], 5.0),
        (['wait', 'web1', '--timeout', '3'], 3.0),
        (['wait', 'web1', '--timeout', '300'], 5.0),
        (['wait', 'web1', '--timeout', '0'], SHORTEST),
        (['destroy', 'web1', '--wait', '--timeout', '1'], 5.0),  # what is written is given its time
    ],
)
def test_one_answer_takes_no_longer_than_all_of_a_wait(words: list[str], seconds: float) -> None:
    assert Context(Terminal(print, print, print), ScheduleConfig(), parse(words)).etcd.timeout == seconds
