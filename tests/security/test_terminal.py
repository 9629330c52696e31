"""Foreign text cannot control the terminal: all output of eschedule is printable."""

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

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
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
    """Render everything about the record; only the renderer itself adds colours and tabs."""
    outputs = [rendered_details([value], look, several=False) for value in (as_detail(RECORD), as_detail(BROKEN))]
    outputs += [rendered(as_list([RECORD, BROKEN]), look)]
    if look.form == TABLE:
        return [*outputs, in_sentences(TOLD), drawn([RECORD], look)]
    values = (explanation_to_dict(TOLD), timeline_to_dict([RECORD])) if look.form in ('json', 'yaml') else ()
    return [*outputs, *(document(value, look.form) for value in values)]


@pytest.mark.parametrize('look', [*LOOKS, Look(width=80, colour=True)], ids=str)
def test_what_is_drawn_is_printable(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    """`eschedule why` was the only output that passed control characters on (ENEMY 16)."""
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
    """This protects output formats that are added later, too."""
    terminal().put(text)
    terminal().say(text)
    for output in capsys.readouterr():
        assert output.replace('\n', '').isprintable()
        assert 'NOTIFIED TARGET, x' in output


def test_nothing_is_cut_off_what_is_put(capsys: pytest.CaptureFixture[str]) -> None:
    terminal().put(dump({'query': 'x' * 300_000}, indent=2))
    assert json.loads(capsys.readouterr().out) == {'query': 'x' * 300_000}


def test_what_is_waited_for_is_printable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
    with Live() as show_progress:
        show_progress(EVIL)
    (shown, end) = capsys.readouterr().err.removeprefix('\r\x1b[K').split('\r\x1b[K')
    assert shown.isprintable()
    assert end == ''
