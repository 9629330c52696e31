"""What a command makes of its options: how long etcd is waited for, and what is to be typed next."""

from __future__ import annotations

import sys
from io import BytesIO, TextIOWrapper

import pytest

from ecomp.cli.command import SHORTEST, SLOW_SECONDS, SLOW_SECONDS_IN_A_SCRIPT, Context
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


@pytest.mark.parametrize(('is_terminal', 'seconds'), [(True, SLOW_SECONDS), (False, SLOW_SECONDS_IN_A_SCRIPT)])
def test_a_frozen_placement_is_named_once_in_a_pipe_too(
    is_terminal: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, 'stderr', TextIOWrapper(BytesIO()))
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: is_terminal)
    said: list[str] = []
    do = Context(Terminal(print, print, said.append), ScheduleConfig(), parse(['hosts']))
    for _ in range(3):  # a call to placement each
        after, tell = do.slow
        assert after == seconds
        tell('placement at p1', after)
    assert said == [f'waiting for placement at p1, which has not answered for {seconds:g} s']


@pytest.mark.parametrize(
    ('words', 'typed'),
    [
        (['list'], 'eschedule'),
        (['list', '--config', 'far.yaml'], 'eschedule --config far.yaml'),
        (['--config=my far.yaml', 'list'], "eschedule --config 'my far.yaml'"),
    ],
)
def test_what_is_to_be_typed_next_asks_the_same_cluster(words: list[str], typed: str) -> None:
    assert Context(Terminal(print, print, print), ScheduleConfig(), parse(words)).typed == typed
