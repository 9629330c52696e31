"""Nothing that somebody wrote drives a terminal: what eschedule puts and says is printable, whichever form it has."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from ecomp.model.choose import Why
from ecomp.model.group import Group
from ecomp.model.json_object import dump
from ecomp.model.record import ACTIVE, ERROR, Failure, Interface, Record
from ecomp.schedule import TERMINAL
from ecomp.scheduler.live import Live
from ecomp.scheduler.show import as_detail, as_list
from ecomp.scheduler.timeline import as_timeline
from ecomp.scheduler.why import Told, as_why

pytestmark = pytest.mark.fast

COMPUTE, INSTANCE = 'b8756be5-a30d-4311-920c-0ad996367a8e', 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
EVIL = '\x1b]0;owned\x07\x1b[2J\x9b1m\u202e\ud800\x7f\r\nNOTIFIED TARGET, x'
RECORD = Record(
    *(INSTANCE, COMPUTE, ACTIVE, EVIL, {EVIL: 1}, EVIL, EVIL, EVIL),
    addresses=(Interface(EVIL, EVIL, EVIL, EVIL, EVIL),),
    console=EVIL,
    stages={'scheduled': EVIL, 'requested': '2026-01-31\n12:00:00', EVIL: EVIL},
    fault=EVIL,
    power=f'x:{EVIL}',
    group=EVIL,
    why=Why(EVIL, 0.5, 3),
)
TOLD = Told(RECORD, EVIL, RECORD.why, Group('g', 'affinity', True, {INSTANCE: COMPUTE, COMPUTE: EVIL}))
FORMS: list[Callable[[str], str]] = [
    lambda form: as_why(TOLD, form),
    lambda form: as_detail(RECORD, form),
    lambda form: as_detail(replace(RECORD, state=ERROR, error=Failure(EVIL, EVIL, EVIL)), form),
    lambda form: as_list([RECORD], form),
    lambda form: as_timeline([RECORD], form),
]


@pytest.mark.parametrize('as_form', FORMS)
@pytest.mark.parametrize('form', ['table', 'json'])
def test_what_is_put_is_printable(as_form: Callable[[str], str], form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`eschedule why` drove the terminal: it alone of all forms did (ENEMY 16)."""
    TERMINAL.put(as_form(form))
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert [line for line in lines if not line.isprintable() or line.startswith('NOTIFIED')] == []
    if form == 'json':
        assert json.loads('\n'.join(lines)) == json.loads(as_form(form))


@pytest.mark.parametrize('text', [EVIL, EVIL * 100, 'a\n' + EVIL])
def test_whatever_is_put_or_said_is_printable(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Once for all, for the form that is yet to come."""
    TERMINAL.put(text)
    TERMINAL.say(text)
    for said in capsys.readouterr():
        assert said.replace('\n', '').isprintable()
        assert 'NOTIFIED TARGET, x' in said


def test_nothing_is_cut_off_what_is_put(capsys: pytest.CaptureFixture[str]) -> None:
    TERMINAL.put(dump({'query': 'x' * 300_000}, indent=2))
    assert json.loads(capsys.readouterr().out) == {'query': 'x' * 300_000}


def test_what_is_waited_for_is_printable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
    with Live() as tell:
        tell(EVIL)
    (said, end) = capsys.readouterr().err.removeprefix('\r\x1b[K').split('\r\x1b[K')
    assert said.isprintable()
    assert end == ''
