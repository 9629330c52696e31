"""What a command says, and to whom."""

from __future__ import annotations

from ecomp.cli.terminal import Terminal
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
