"""Nothing that somebody wrote drives a terminal: what eschedule puts and says is printable, whichever form it has."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import yaml

from ecomp.cli.history import Explanation, drawn, explanation_to_dict, in_sentences, timeline_to_dict
from ecomp.cli.inspect import as_detail, as_list
from ecomp.cli.options import TABLE
from ecomp.cli.tables import Look, document, rendered, rendered_details
from ecomp.cli.terminal import Live
from ecomp.model.choose import Why
from ecomp.model.group import Group, Membership
from ecomp.model.host import Computes
from ecomp.model.json_object import dump
from ecomp.model.record import ACTIVE, ERROR, Failure, Interface, Record
from ecomp.schedule import terminal
from tests.kit.forms import LOOKS

pytestmark = pytest.mark.fast

COMPUTE, INSTANCE = 'b8756be5-a30d-4311-920c-0ad996367a8e', 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
EVIL = '\x1b]0;owned\x07\x1b[2J\x9b1m\u202e\ud800\x7f\r\nNOTIFIED TARGET, x'
RECORD = Record(
    *(INSTANCE, COMPUTE, ACTIVE),
    image=EVIL,
    resources={EVIL: 1},
    query=EVIL,
    user_id=EVIL,
    project_id=EVIL,
    addresses=(Interface(EVIL, EVIL, EVIL, EVIL, EVIL),),
    console=EVIL,
    stages={'scheduled': EVIL, 'requested': '2026-01-31\n12:00:00', EVIL: EVIL},
    fault=EVIL,
    power=f'x:{EVIL}',
    group=Membership(EVIL),
    why=Why(EVIL, 0.5, 3),
)
TOLD = Explanation(
    RECORD, Computes({}, {COMPUTE: EVIL}), RECORD.why, Group('g', 'affinity', True, {INSTANCE: COMPUTE, COMPUTE: EVIL})
)
COLOURS = re.compile('\x1b\\[3[123]m|\x1b\\[0m')
BROKEN = replace(RECORD, state=ERROR, error=Failure(EVIL, EVIL, EVIL))


def forms(look: Look) -> list[str]:
    """All that is told of it, as it is drawn; formats alone make what drives a terminal: colours and tabs."""
    told = [rendered_details([each], look, several=False) for each in (as_detail(RECORD), as_detail(BROKEN))]
    told += [rendered(as_list([RECORD, BROKEN]), look)]
    if look.form == TABLE:
        return [*told, in_sentences(TOLD), drawn([RECORD], look)]
    values = (explanation_to_dict(TOLD), timeline_to_dict([RECORD])) if look.form in ('json', 'yaml') else ()
    return [*told, *(document(each, look.form) for each in values)]


@pytest.mark.parametrize('look', [*LOOKS, Look(width=80, colour=True)], ids=str)
def test_what_is_drawn_is_printable(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    """`eschedule why` drove the terminal: it alone of all forms did (ENEMY 16)."""
    for text in forms(look):
        terminal().draw(text)
        lines = [COLOURS.sub('', line).replace('\t', ' ') for line in capsys.readouterr().out.split('\n')]
        assert lines
        assert [line for line in lines if not line.isprintable() or line.startswith('NOTIFIED')] == []
        if look.form == 'json':
            assert json.loads('\n'.join(lines)) == json.loads(text)
        if look.form == 'yaml':
            yaml.safe_load(text)


@pytest.mark.parametrize('text', [EVIL, EVIL * 100, 'a\n' + EVIL])
def test_whatever_is_put_or_said_is_printable(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Once for all, for the form that is yet to come."""
    terminal().put(text)
    terminal().say(text)
    for said in capsys.readouterr():
        assert said.replace('\n', '').isprintable()
        assert 'NOTIFIED TARGET, x' in said


def test_nothing_is_cut_off_what_is_put(capsys: pytest.CaptureFixture[str]) -> None:
    terminal().put(dump({'query': 'x' * 300_000}, indent=2))
    assert json.loads(capsys.readouterr().out) == {'query': 'x' * 300_000}


def test_what_is_waited_for_is_printable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
    with Live() as tell:
        tell(EVIL)
    (said, end) = capsys.readouterr().err.removeprefix('\r\x1b[K').split('\r\x1b[K')
    assert said.isprintable()
    assert end == ''
