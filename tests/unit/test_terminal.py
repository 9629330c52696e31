"""What a command says, and to whom."""

from __future__ import annotations

from io import StringIO

import pytest

from ecomp.cli.terminal import Live, Terminal
from ecomp.errors import EcompError, Unreachable

AWAY = Unreachable('etcd at ds1:2379 cannot be reached', 'etcd at ds1:2379')


def test_of_a_backend_that_is_away_it_says_who_told_where_it_is() -> None:
    terminal = Terminal(print, print, print, 'told by /etc/ecomp/schedule.yaml')
    assert terminal.words(AWAY) == f'{AWAY} (told by /etc/ecomp/schedule.yaml)'
    assert terminal._replace(told='told by a\nb').words(AWAY).endswith(r'(told by a\nb)')


def test_and_of_nothing_else() -> None:
    terminal = Terminal(print, print, print, 'told by /etc/ecomp/schedule.yaml')
    for error in (EcompError('no'), Unreachable('etcd takes no writes')):
        assert terminal.words(error) == str(error)
    assert Terminal(print, print, print).words(AWAY) == str(AWAY)


def test_the_live_line_is_no_wider_than_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be two lines, of which one is written over."""
    written = StringIO()
    monkeypatch.setattr('sys.stderr', written)
    monkeypatch.setattr(written, 'isatty', lambda: True)
    monkeypatch.setenv('COLUMNS', '20')
    with Live() as tell:
        tell('waiting for: its image, 34 of 600 MB')
        tell('waiting for: x, 1 s')
    assert written.getvalue() == '\r\x1b[Kwaiting for: its i…\r\x1b[Kwaiting for: x, 1 s\r\x1b[K'
