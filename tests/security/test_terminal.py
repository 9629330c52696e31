"""Foreign text cannot control the terminal: all output of eschedule is printable."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import yaml

from ecomp.cli.history import Explanation, draw_timeline, explanation_to_dict, format_explanation, timeline_to_dict
from ecomp.cli.inspect import make_record_details, make_record_listing
from ecomp.cli.options import TABLE
from ecomp.cli.tables import OutputStyle, format_document, render_details, render_listing
from ecomp.cli.terminal import LiveLine
from ecomp.model.choose import PlacementReason
from ecomp.model.group import Group, Membership
from ecomp.model.host import Computes
from ecomp.model.json_object import dump
from ecomp.model.record import Failure, Interface, Record
from ecomp.model.states import ACTIVE, ERROR
from ecomp.schedule import make_terminal
from tests.kit.forms import ALL_LOOKS

pytestmark = pytest.mark.fast

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
EVIL = '\x1b]0;owned\x07\x1b[2J\x9b1m\u202e\ud800\x7f\r\nNOTIFIED TARGET, x'
RECORD = Record(
    *(INSTANCE, COMPUTE, ACTIVE), image=EVIL, resources={EVIL: 1}, query=EVIL, user_id=EVIL, project_id=EVIL,
    addresses=(Interface(EVIL, EVIL, EVIL, EVIL, EVIL),), console=EVIL,
    stages={'scheduled': EVIL, 'requested': '2026-01-31\n12:00:00', EVIL: EVIL}, fault=EVIL, power=f'x:{EVIL}',
    group=Membership(EVIL), why=PlacementReason(EVIL, 0.5, 3),
)  # fmt: skip
EXPLANATION = Explanation(
    RECORD, Computes({}, {COMPUTE: EVIL}), RECORD.why, Group('g', 'affinity', True, {INSTANCE: COMPUTE, COMPUTE: EVIL})
)
COLOURS = re.compile('\x1b\\[3[123]m|\x1b\\[0m')
FAILED_RECORD = replace(RECORD, state=ERROR, error=Failure(EVIL, EVIL, EVIL))


def render_all(look: OutputStyle) -> list[str]:
    """Render everything about the record, where only the renderer adds colours and tabs."""
    outputs = [
        render_details([value], look, is_array=False)
        for value in (make_record_details(RECORD), make_record_details(FAILED_RECORD))
    ]
    outputs += [render_listing(make_record_listing([RECORD, FAILED_RECORD]), look)]
    if look.form == TABLE:
        return [*outputs, format_explanation(EXPLANATION), draw_timeline(RECORD, look)]
    values = (explanation_to_dict(EXPLANATION), timeline_to_dict(RECORD)) if look.form in ('json', 'yaml') else ()
    return [*outputs, *(format_document(value, look.form) for value in values)]


@pytest.mark.parametrize('look', [*ALL_LOOKS, OutputStyle(width=80, colour=True)], ids=str)
def test_drawn_output_is_printable(look: OutputStyle, capsys: pytest.CaptureFixture[str]) -> None:
    """`eschedule why` was the only output that passed control characters on (ENEMY 16)."""
    for text in render_all(look):
        make_terminal().draw(text)
        lines = [COLOURS.sub('', line).replace('\t', ' ') for line in capsys.readouterr().out.split('\n')]
        assert lines
        assert [line for line in lines if not line.isprintable() or line.startswith('NOTIFIED')] == []
        if look.form == 'json':
            assert json.loads('\n'.join(lines)) == json.loads(text)
        if look.form == 'yaml':
            yaml.safe_load(text)


@pytest.mark.parametrize('text', [EVIL, EVIL * 100, 'a\n' + EVIL])
def test_put_and_say_print_only_printable_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """This protects output formats that are added later, too."""
    make_terminal().put(text)
    make_terminal().say(text)
    for output in capsys.readouterr():
        assert output.replace('\n', '').isprintable()
        assert 'NOTIFIED TARGET, x' in output


def test_put_does_not_truncate(capsys: pytest.CaptureFixture[str]) -> None:
    make_terminal().put(dump({'query': 'x' * 300_000}, indent=2))
    assert json.loads(capsys.readouterr().out) == {'query': 'x' * 300_000}


def test_live_progress_is_printable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
    with LiveLine() as show_progress:
        show_progress(EVIL)
    (shown, end) = capsys.readouterr().err.removeprefix('\r\x1b[K').split('\r\x1b[K')
    assert shown.isprintable()
    assert end == ''
