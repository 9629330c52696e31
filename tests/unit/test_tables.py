"""Output for people: tables, terminals, and text made safe for them."""

from __future__ import annotations

import csv
import io
import json
import re
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli import tables
from ecomp.cli.tables import (
    STATE,
    TIME,
    UUID,
    Column,
    Details,
    Listing,
    OutputStyle,
    Row,
    colour_state,
    cut,
    fold,
    format_document,
    make_sort_key,
    measure_width,
    pad,
    render_details,
    render_listing,
    shorten_times,
    shorten_uuids,
)
from ecomp.cli.terminal import LiveLine, Terminal
from ecomp.errors import EcompError, Unreachable, UsageError
from ecomp.model.text import join_some, make_printable, replace_uuids

ONE, TWO, SIMILAR = (f'{start}-0000-4000-8000-000000000001' for start in ('1a5c0de0', '2b5c0de0', '2b5c0de0'))
SIMILAR = SIMILAR.replace('0000-4', '0001-4')
NOW = '2026-01-31T12:00:00.000Z'
COLUMNS = (
    *(Column('INSTANCE', kind=UUID), Column('NAME'), Column('STATE', kind=STATE)),
    *(Column('VCPU USED/CAPACITY', 1, short='VCPU'),),
    *(Column('REASON', 2, min_width=6), Column('REQUESTED', 3, TIME), Column('IMAGE', wide=True)),
)
ROWS = (
    Row((ONE, 'web-10', 'active', '1/4', None, NOW, 'a'), {'name': 'web-10'}),
    Row((TWO, 'web-2', 'error', '3/4', 'it is broken', NOW, 'b'), {'name': 'web-2'}),
    Row((SIMILAR, None, 'building', None, None, NOW, 'b c'), {'name': None}),
)
LISTING = Listing(COLUMNS, ROWS)


@pytest.mark.parametrize(
    ('width', 'heading'),
    [
        (90, 'INSTANCE NAME STATE VCPU USED/CAPACITY REASON REQUESTED'),
        (74, 'INSTANCE NAME STATE VCPU REASON REQUESTED'),  # the short heading
        (66, 'INSTANCE NAME STATE VCPU REASON REQUESTED'),  # and the reason cut
        (60, 'INSTANCE NAME STATE VCPU REASON'),
        (40, 'INSTANCE NAME STATE VCPU'),
        (34, 'INSTANCE NAME STATE'),
        (20, 'INST… NAME STATE'),  # columns that always stay are cut if nothing else helps
    ],
)
def test_table_fits_the_terminal(width: int, heading: str) -> None:
    lines = render_listing(LISTING, OutputStyle(width=width)).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split() == heading.split()
    assert len(lines) == 4


def test_selected_column_is_cut_but_never_omitted() -> None:
    assert render_listing(LISTING, OutputStyle(width=8, columns=('requested',))).splitlines()[1] == '2026-01…'


def test_columns_are_selected_by_prefix_and_in_order() -> None:
    chosen = render_listing(LISTING, OutputStyle(columns=('name', 'VCPU', 'image'), header=False))
    assert chosen.splitlines() == ['web-10  1/4  a', 'web-2   3/4  b', '-       -    b c']


@pytest.mark.parametrize(
    ('look', 'message'),
    [
        (OutputStyle(columns=('names',)), '-c names: no such column. Fix: give one of INSTANCE, NAME'),
        (OutputStyle(columns=('re',)), '-c re: 2 columns begin with this text'),
        (OutputStyle(columns=('',)), '-c : no such column'),
        (OutputStyle(sort='\x1b[2J'), '--sort \\x1b[2J: no such column'),
    ],
)
def test_unknown_column_is_refused(look: OutputStyle, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        render_listing(LISTING, look)
    assert str(refused.value).startswith(message)


def test_sort_is_natural_with_missing_values_last() -> None:
    lines = render_listing(LISTING, OutputStyle(sort='NAME')).splitlines()[1:]
    assert [line.split()[1] for line in lines] == ['web-2', 'web-10', '-']
    values = json.loads(render_listing(LISTING, OutputStyle('json', sort='name')))
    assert [item['name'] for item in values] == ['web-2', 'web-10', None]
    cells = [10, 2, 2.5, 'B2', 'b10', 'a', None, '', '-1']
    assert sorted(cells, key=make_sort_key) == ['', 2, 2.5, 10, '-1', 'a', 'B2', 'b10', None]


def test_yaml_has_no_aliases_and_quotes_texts_like_other_values() -> None:
    """Listings in JSON and YAML are in tests/golden/commands."""
    twice = {'of': NOW}
    output = format_document([twice, twice, 1, 'yes', None], 'yaml')
    assert output == f"- of: '{NOW}'\n- of: '{NOW}'\n- 1\n- 'yes'\n- null"
    assert format_document('x', 'yaml') == 'x'


def test_csv_has_all_columns_uncut() -> None:
    records = list(csv.reader(io.StringIO(render_listing(LISTING, OutputStyle('csv', width=20)))))
    assert records[0] == [column.name for column in COLUMNS]
    assert records[1] == [ONE, 'web-10', 'active', '1/4', '', NOW, 'a']
    assert render_listing(Listing([Column('A')], [Row(['x,"\ny'])]), OutputStyle('csv', header=False)) == '"x,""\\ny"'


def test_rows_with_titles_are_separate_tables() -> None:
    columns = Column('GROUP', wide=True), Column('A')
    rows = Row(('g', 1), title='g: one'), Row(('h', 2), title='h: two')
    assert render_listing(Listing(columns, rows), OutputStyle()) == 'g: one\nA\n1\n\nh: two\nA\n2'
    assert render_listing(Listing(columns, rows), OutputStyle('csv')) == 'GROUP,A\ng,1\nh,2'
    assert render_listing(Listing(columns, rows), OutputStyle(header=False)) == '1\n2'


def test_folding_cell_takes_several_lines() -> None:
    columns = Column('CODE'), Column('SAID', min_width=10, folds=True)
    rows = Row(('x', 'one two three four')), Row(('y', 'z'))
    assert (
        render_listing(Listing(columns, rows), OutputStyle(width=16))
        == 'CODE  SAID\nx     one two\n      three four\ny     z'
    )


def test_only_states_are_coloured_without_changing_the_width() -> None:
    plain, bright = (render_listing(LISTING, OutputStyle(width=80, colour=colour)) for colour in (False, True))
    assert '\x1b[32mactive\x1b[0m  ' in bright
    assert '\x1b[31merror\x1b[0m' in bright
    assert re.sub('\x1b\\[3?[0123]m', '', bright) == plain
    assert colour_state('up, disabled') == '\x1b[32mup, disabled\x1b[0m'
    assert colour_state('gone  ') == 'gone  '


def test_details_have_a_line_per_field_and_fold_on_a_terminal() -> None:
    one = Details([('state', 'active'), ('image', 'http://h/' + 'i' * 30), ('fault', None)], {'state': 'active'})
    two = Details([('state', 'error'), ('error', 'it broke')], {'state': 'error'})
    assert render_details([one], OutputStyle(), False).splitlines()[1:] == ['image  http://h/' + 'i' * 30, 'fault  -']
    assert render_details([one], OutputStyle(width=27, colour=True), False).splitlines() == [
        'state  \x1b[32mactive\x1b[0m', f'image  http://h/{"i" * 11}', f'       {"i" * 19}', 'fault  -'
    ]  # fmt: skip
    assert render_details([one, two], OutputStyle(), True) == (
        f'state  active\nimage  http://h/{"i" * 30}\nfault  -\n\nstate  error\nerror  it broke'
    )
    chosen = OutputStyle(columns=('error', 'state'), header=False)
    assert render_details([one, two], chosen, True) == '-\nactive\n\nit broke\nerror'
    assert (
        render_details([one, two], OutputStyle('value', columns=('state', 'error')), True)
        == 'active\t-\nerror\tit broke'
    )
    assert json.loads(render_details([one], OutputStyle('json'), False)) == {'state': 'active'}
    assert json.loads(render_details([one], OutputStyle('json'), True)) == [{'state': 'active'}]


def test_possible_columns_of_details_do_not_depend_on_values() -> None:
    kind = {'possible_fields': ('state', 'group', 'gone', 'boot 1'), 'numbered_fields': ('boot',)}
    one = Details([('state', 'active'), ('name', None), ('boot 2', 'start')], None, **kind)
    columns = ('group', 'name', 'boot', 'boot 2', 'Boot 30')
    assert render_details([one], OutputStyle(columns=columns), False).splitlines() == [
        'group    -', 'name     -', 'boot 1   -', 'boot 2   start', 'boot 30  -',
    ]  # fmt: skip
    assert render_details([one], OutputStyle('value', columns=('group', 'name')), False) == '-\t-'
    assert render_details([one], OutputStyle('csv', columns=('group', 'boot 2')), False) == 'group,boot 2\n,start'
    assert render_details([one], OutputStyle('csv'), False) == 'state,group,gone,boot 1\nactive,,,'
    assert render_details([one], OutputStyle('value'), False) == 'active\t-\t-\t-'
    # A prefix selects an existing field, even if other possible fields begin alike.
    two = one._replace(fields=[*one.fields, ('group', 'web')])
    assert render_details([two], OutputStyle('value', columns=('g',)), False) == 'web'
    assert render_details([one, two], OutputStyle('value', columns=('g',)), True) == '-\nweb'
    assert render_details([two], OutputStyle('value', columns=('gone',)), False) == '-'
    for form in ('table', 'csv', 'value'):
        with pytest.raises(
            UsageError,
            match=r'-c g: 2 columns begin with this text\. Fix: give one of state, group, gone, boot 1, name$',
        ):
            render_details([one], OutputStyle(form, columns=('g',)), False)
        with pytest.raises(UsageError, match='-c boots: no such column'):
            render_details([one], OutputStyle(form, columns=('boots',)), False)


def test_short_uuids_are_the_shortest_unique_prefixes() -> None:
    assert shorten_uuids([ONE, TWO, SIMILAR, ONE, '-', 'waits']) == {
        ONE: '1a5c0de0',
        TWO: TWO[:13],
        SIMILAR: SIMILAR[:13],
    }
    other = TWO[:9] + 'f' + TWO[10:]
    assert shorten_uuids([TWO, other]) == {TWO: TWO[:10], other: other[:10]}  # never a - at the end
    last = TWO[:-1] + '2'
    assert shorten_uuids([TWO, last]) == {TWO: TWO, last: last}


@given(st.lists(st.uuids().map(str), unique=True))
def test_short_uuids_are_unique(uuids: list[str]) -> None:
    short = shorten_uuids(uuids)
    for whole in uuids:
        assert len(short[whole]) >= 8
        assert [other for other in uuids if other.startswith(short[whole])] == [whole]


def test_short_times_end_at_the_minute() -> None:
    assert shorten_times([NOW, 'yesterday', '-']) == {NOW: '2026-01-31 12:00'}


@given(st.text(st.characters(categories=['L', 'N', 'P', 'Zs'])), st.integers(1, 30))
def test_text_is_cut_filled_and_folded_to_a_width(text: str, width: int) -> None:
    assert measure_width(cut(text, width)) <= width
    assert measure_width(pad(cut(text, width), width)) == width
    lines = fold(text, max(width, 2))  # a letter of two places does not fit into one
    assert max(map(measure_width, lines)) <= max(width, 2)
    assert ''.join(lines).replace(' ', '') == ''.join(text.split(' ')) or not text.isascii()


def test_folding_measures_each_character_at_most_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(tables, '_measure_character', lambda each: calls.append(each) or 1)
    assert len(fold('é' * 10_000, 4)) == 2_500
    assert len(calls) <= 20_000


# Messages of a command.


AWAY = Unreachable('etcd at ds1:2379 cannot be reached', 'etcd at ds1:2379')


def test_unreachable_backend_names_the_source_of_its_address() -> None:
    terminal = Terminal(print, print, print, 'as configured in /etc/ecomp/schedule.yaml')
    assert terminal.format_error(AWAY) == f'{AWAY} (as configured in /etc/ecomp/schedule.yaml). Try: eschedule doctor'
    assert r'(as configured in a\nb). Try: ' in terminal._replace(config_source='as configured in a\nb').format_error(
        AWAY
    )
    cured = Unreachable(f'{AWAY}. Fix: wait', AWAY.backend)
    assert terminal.format_error(cured) == f'{AWAY} (as configured in /etc/ecomp/schedule.yaml). Fix: wait'


def test_other_errors_name_no_source() -> None:
    terminal = Terminal(print, print, print, 'as configured in /etc/ecomp/schedule.yaml')
    for error in (EcompError('no'), Unreachable('etcd takes no writes')):
        assert terminal.format_error(error) == str(error)
    assert Terminal(print, print, print).format_error(AWAY) == str(AWAY)


def test_live_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider line would wrap, and only one of its two lines would be overwritten."""
    stream = StringIO()
    monkeypatch.setattr('sys.stderr', stream)
    monkeypatch.setattr(stream, 'isatty', lambda: True)
    monkeypatch.setenv('COLUMNS', '20')
    with LiveLine() as show:
        show('waiting for its image, 34 of 600 MB')
        show('waiting for x, 1 s')
    assert stream.getvalue() == '\r\x1b[Kwaiting for its im…\r\x1b[Kwaiting for x, 1 s\r\x1b[K'


# Untrusted text in a terminal: one line, without codes that move the cursor.


def test_printable_characters_stay() -> None:
    assert make_printable('Zürich: 5 %, "ok"') == 'Zürich: 5 %, "ok"'
    assert make_printable('a\x1b[2J\nb\ud800\u202ec') == r'a\x1b[2J\nb\ud800\u202ec'


def test_long_text_is_cut() -> None:
    assert make_printable('x' * 100, 100) == 'x' * 100
    assert make_printable('x' * 101, 100) == 'x' * 100 + '…'


def test_renamed_replaces_uuids_but_not_in_paths() -> None:
    one, two = '1a5c0de0-0000-4000-8000-000000000001', '2a5c0de0-0000-4000-8000-000000000002'
    names = {one: 'web1'}
    assert replace_uuids(f'{one}: is on {two}, and so is {one}', names) == f'web1: is on {two}, and so is web1'
    assert replace_uuids(f'etcdctl del /names/{one}', names) == f'etcdctl del /names/{one}'
    assert replace_uuids(f'{one}0 x{one} {one.upper()}', names) == f'{one}0 x{one} {one.upper()}'


def test_renamed_does_not_repeat_a_name_with_its_uuid() -> None:
    one, two = '1a5c0de0-0000-4000-8000-000000000001', '2a5c0de0-0000-4000-8000-000000000002'
    names = {compute: f'hv1 ({compute})' for compute in (one, two)}
    once = f'web1 is on hv1 ({one}), not on hv1 ({two})'
    assert replace_uuids(f'web1 is on {one}, not on {two}', names) == replace_uuids(once, names) == once
    assert replace_uuids(f'(see {one})', names) == f'(see hv1 ({one}))'


def test_some_lists_the_first_names_and_counts_the_rest() -> None:
    assert [join_some('abcd'[:n], 2) for n in range(5)] == ['', 'a', 'a, b', 'a, b and 1 more', 'a, b and 2 more']
    assert join_some(['web1', 'web2', 'web3'], 2, separator=' ') == 'web1 web2 and 1 more'
