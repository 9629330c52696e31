"""Output for people: tables, terminals, and text made safe for them."""

from __future__ import annotations

import csv
import io
import json
import re
from io import StringIO

import pytest
import yaml
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
    Look,
    Row,
    across,
    coloured,
    cut,
    document,
    fill,
    folded,
    natural,
    rendered,
    rendered_details,
    short_times,
    short_uuids,
)
from ecomp.cli.terminal import Live, Terminal
from ecomp.errors import EcompError, Unreachable, UsageError
from ecomp.model.text import printable, printable_lines, renamed, some

# Rows as tables that fit, JSON, YAML, CSV and bare values; sorted, selected, coloured.


ONE, TWO, NEAR = (f'{start}-0000-4000-8000-000000000001' for start in ('1a5c0de0', '2b5c0de0', '2b5c0de0'))
NEAR = NEAR.replace('0000-4', '0001-4')
NOW = '2026-01-31T12:00:00.000Z'
COLUMNS = (
    *(Column('INSTANCE', kind=UUID), Column('NAME'), Column('STATE', kind=STATE)),
    *(Column('VCPU USED/CAPACITY', 1, short='VCPU'),),
    *(Column('REASON', 2, least=6), Column('REQUESTED', 3, TIME), Column('IMAGE', wide=True)),
)
ROWS = (
    Row((ONE, 'web-10', 'active', '1/4', None, NOW, 'a'), {'name': 'web-10'}),
    Row((TWO, 'web-2', 'error', '3/4', 'it is broken', NOW, 'b'), {'name': 'web-2'}),
    Row((NEAR, None, 'building', None, None, NOW, 'b c'), {'name': None}),
)
LISTING = Listing(COLUMNS, ROWS)

WHOLE = f"""\
INSTANCE                              NAME    STATE     VCPU USED/CAPACITY  REASON        REQUESTED
{ONE}  web-10  active    1/4                 -             {NOW}
{TWO}  web-2   error     3/4                 it is broken  {NOW}
{NEAR}  -       building  -                   -             {NOW}"""

def test_without_a_terminal_a_table_has_all_of_each_column() -> None:
    assert rendered(LISTING, Look()) == WHOLE
    assert rendered(LISTING, Look(header=False)).splitlines()[0].split() == WHOLE.splitlines()[1].split()


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
def test_on_a_terminal_it_fits(width: int, heading: str) -> None:
    lines = rendered(LISTING, Look(width=width)).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split() == heading.split()
    assert len(lines) == 4


def test_what_was_asked_for_is_cut_and_never_left_out() -> None:
    assert rendered(LISTING, Look(width=8, columns=('requested',))).splitlines()[1] == '2026-01…'


def test_wide_has_all_columns() -> None:
    assert rendered(LISTING, Look(wide=True)).splitlines()[0].split()[-1] == 'IMAGE'


def test_columns_are_chosen_by_their_beginning_and_in_that_order() -> None:
    chosen = rendered(LISTING, Look(columns=('name', 'VCPU', 'image'), header=False))
    assert chosen.splitlines() == ['web-10  1/4  a', 'web-2   3/4  b', '-       -    b c']


@pytest.mark.parametrize(
    ('look', 'said'),
    [
        (Look(columns=('names',)), '-c names: there is no such column; there are INSTANCE, NAME'),
        (Look(columns=('re',)), '-c re: 2 columns begin so'),
        (Look(columns=('',)), '-c : there is no such column'),
        (Look(sort='\x1b[2J'), '--sort \\x1b[2J: there is no such column'),
    ],
)
def test_what_is_no_column_is_refused(look: Look, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        rendered(LISTING, look)
    assert str(refused.value).startswith(said)


def test_it_is_sorted_as_people_count_and_what_is_not_there_is_last() -> None:
    lines = rendered(LISTING, Look(sort='NAME')).splitlines()[1:]
    assert [line.split()[1] for line in lines] == ['web-2', 'web-10', '-']
    values = json.loads(rendered(LISTING, Look('json', sort='name')))
    assert [item['name'] for item in values] == ['web-2', 'web-10', None]
    cells = [10, 2, 2.5, 'B2', 'b10', 'a', None, '', '-1']
    assert sorted(cells, key=natural) == ['', 2, 2.5, 10, '-1', 'a', 'B2', 'b10', None]


@given(st.lists(st.one_of(st.none(), st.text(), st.integers(), st.floats(allow_nan=False))))
def test_whatever_there_is_can_be_sorted(cells: list[str | int | float | None]) -> None:
    sorted(cells, key=natural)


def test_json_and_yaml_are_the_values() -> None:
    values = [row.value for row in ROWS]
    for form, load in (('json', json.loads), ('yaml', yaml.safe_load)):
        assert load(rendered(LISTING, Look(form))) == values
        assert load(rendered(Listing(COLUMNS, ()), Look(form))) == []
        assert load(rendered(Listing(COLUMNS, ROWS, {'all': values}), Look(form))) == {'all': values}
    twice = {'of': NOW}
    output = document([twice, twice, 1, 'yes', None], 'yaml')
    assert output == f"- of: '{NOW}'\n- of: '{NOW}'\n- 1\n- 'yes'\n- null"
    assert document('x', 'yaml') == 'x'


@pytest.mark.parametrize(
    'text', ['1e3', '12e5', '+1E-3', '1.5e3', '-.5', '5.', '0o17', '08', '-012', '0x1F', '1_0', '.inf', '-.INF', '.NaN']
)
def test_text_that_is_a_number_to_some_reader_of_yaml_is_quoted(text: str) -> None:
    """yq, which reads YAML 1.2, made 1000 of a name or uuid prefix 1e3."""
    assert document([text], 'yaml') == f"- '{text}'"
    assert document({text: 1}, 'yaml') == f"'{text}': 1"


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_stand_unquoted_in_yaml(number: float) -> None:
    output = document([number], 'yaml')
    assert output.removeprefix('- ')[:1] in '-0123456789'
    assert yaml.safe_load(output) == [number]


def test_csv_has_all_columns_whole() -> None:
    records = list(csv.reader(io.StringIO(rendered(LISTING, Look('csv', width=20)))))
    assert records[0] == [column.name for column in COLUMNS]
    assert records[1] == [ONE, 'web-10', 'active', '1/4', '', NOW, 'a']
    assert rendered(Listing([Column('A')], [Row(['x,"\ny'])]), Look('csv', header=False)) == '"x,""\\ny"'


def test_bare_values_are_for_other_programs() -> None:
    assert rendered(LISTING, Look('value', columns=('name', 'reason'))) == 'web-10\t-\nweb-2\tit is broken'
    assert rendered(LISTING, Look('value', columns=('name',))) == 'web-10\nweb-2'
    assert rendered(Listing([Column('A')], [Row(['x\ty\nz'])]), Look('value')) == 'x\\ty\\nz'


def test_rows_with_titles_are_tables_of_their_own() -> None:
    columns = Column('GROUP', wide=True), Column('A')
    rows = Row(('g', 1), title='g: one'), Row(('h', 2), title='h: two')
    assert rendered(Listing(columns, rows), Look()) == 'g: one\nA\n1\n\nh: two\nA\n2'
    assert rendered(Listing(columns, rows), Look('csv')) == 'GROUP,A\ng,1\nh,2'
    assert rendered(Listing(columns, rows), Look(header=False)) == '1\n2'


def test_a_cell_that_folds_takes_several_lines() -> None:
    columns = Column('CODE'), Column('SAID', least=10, folds=True)
    rows = Row(('x', 'one two three four')), Row(('y', 'z'))
    assert rendered(Listing(columns, rows), Look(width=16)) == 'CODE  SAID\nx     one two\n      three four\ny     z'


def test_only_states_have_colours_and_they_take_no_room() -> None:
    plain, bright = (rendered(LISTING, Look(width=80, colour=colour)) for colour in (False, True))
    assert '\x1b[32mactive\x1b[0m  ' in bright
    assert '\x1b[31merror\x1b[0m' in bright
    assert re.sub('\x1b\\[3?[0123]m', '', bright) == plain
    assert coloured('up, disabled') == '\x1b[32mup, disabled\x1b[0m'
    assert coloured('gone  ') == 'gone  '


def test_details_are_a_line_a_field_and_folded_on_a_terminal() -> None:
    one = Details([('state', 'active'), ('image', 'http://h/' + 'i' * 30), ('fault', None)], {'state': 'active'})
    two = Details([('state', 'error'), ('error', 'it broke')], {'state': 'error'})
    assert rendered_details([one], Look(), False).splitlines()[1:] == ['image  http://h/' + 'i' * 30, 'fault  -']
    assert rendered_details([one], Look(width=27, colour=True), False).splitlines() == [
        'state  \x1b[32mactive\x1b[0m', f'image  http://h/{"i" * 11}', f'       {"i" * 19}', 'fault  -'
    ]  # fmt: skip
    assert rendered_details([one, two], Look(), True) == (
        f'state  active\nimage  http://h/{"i" * 30}\nfault  -\n\nstate  error\nerror  it broke'
    )
    chosen = Look(columns=('error', 'state'), header=False)
    assert rendered_details([one, two], chosen, True) == '-\nactive\n\nit broke\nerror'
    assert rendered_details([one, two], Look('value', columns=('state', 'error')), True) == 'active\t-\nerror\tit broke'
    assert json.loads(rendered_details([one], Look('json'), False)) == {'state': 'active'}
    assert json.loads(rendered_details([one], Look('json'), True)) == [{'state': 'active'}]


def test_what_may_be_asked_of_details_is_the_same_whatever_one_has() -> None:
    kind = {'may_have': ('state', 'group', 'gone', 'boot 1'), 'numbered': ('boot',)}
    one = Details([('state', 'active'), ('name', None), ('boot 2', 'start')], None, **kind)
    columns = ('group', 'name', 'boot', 'boot 2', 'Boot 30')
    assert rendered_details([one], Look(columns=columns), False).splitlines() == [
        'group    -', 'name     -', 'boot 1   -', 'boot 2   start', 'boot 30  -',
    ]  # fmt: skip
    assert rendered_details([one], Look('value', columns=('group', 'name')), False) == '-\t-'
    assert rendered_details([one], Look('csv', columns=('group', 'boot 2')), False) == 'group,boot 2\n,start'
    assert rendered_details([one], Look('csv'), False) == 'state,group,gone,boot 1\nactive,,,'
    assert rendered_details([one], Look('value'), False) == 'active\t-\t-\t-'
    # A prefix selects an existing field, even if other possible fields begin alike.
    two = one._replace(fields=[*one.fields, ('group', 'web')])
    assert rendered_details([two], Look('value', columns=('g',)), False) == 'web'
    assert rendered_details([one, two], Look('value', columns=('g',)), True) == '-\nweb'
    assert rendered_details([two], Look('value', columns=('gone',)), False) == '-'
    for form in ('table', 'csv', 'value'):
        with pytest.raises(UsageError, match=r'-c g: 2 columns begin so; there are state, group, gone, boot 1, name$'):
            rendered_details([one], Look(form, columns=('g',)), False)
        with pytest.raises(UsageError, match='-c boots: there is no such column'):
            rendered_details([one], Look(form, columns=('boots',)), False)


def test_a_uuid_is_as_short_as_it_can_be_told_from_the_others() -> None:
    assert short_uuids([ONE, TWO, NEAR, ONE, '-', 'waits']) == {ONE: '1a5c0de0', TWO: TWO[:13], NEAR: NEAR[:13]}
    other = TWO[:9] + 'f' + TWO[10:]
    assert short_uuids([TWO, other]) == {TWO: TWO[:10], other: other[:10]}  # never a - at the end
    last = TWO[:-1] + '2'
    assert short_uuids([TWO, last]) == {TWO: TWO, last: last}


@given(st.lists(st.uuids().map(str), unique=True))
def test_what_is_short_is_unique(uuids: list[str]) -> None:
    short = short_uuids(uuids)
    for whole in uuids:
        assert len(short[whole]) >= 8
        assert [other for other in uuids if other.startswith(short[whole])] == [whole]


def test_a_time_is_told_to_the_minute() -> None:
    assert short_times([NOW, 'yesterday', '-']) == {NOW: '2026-01-31 12:00'}


@given(st.text(st.characters(categories=['L', 'N', 'P', 'Zs'])), st.integers(1, 30))
def test_text_is_cut_filled_and_folded_to_its_width(text: str, width: int) -> None:
    assert across(cut(text, width)) <= width
    assert across(fill(cut(text, width), width)) == width
    lines = folded(text, max(width, 2))  # a letter of two places does not fit into one
    assert max(map(across, lines)) <= max(width, 2)
    assert ''.join(lines).replace(' ', '') == ''.join(text.split(' ')) or not text.isascii()


def test_a_long_text_is_folded_by_looking_at_each_character_once_or_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(tables, '_places', lambda each: calls.append(each) or 1)
    assert len(folded('é' * 10_000, 4)) == 2_500
    assert len(calls) <= 20_000


# Messages of a command.


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
    """A wider line would wrap, and only one of its two lines would be overwritten."""
    stream = StringIO()
    monkeypatch.setattr('sys.stderr', stream)
    monkeypatch.setattr(stream, 'isatty', lambda: True)
    monkeypatch.setenv('COLUMNS', '20')
    with Live() as show:
        show('waiting for: its image, 34 of 600 MB')
        show('waiting for: x, 1 s')
    assert stream.getvalue() == '\r\x1b[Kwaiting for: its i…\r\x1b[Kwaiting for: x, 1 s\r\x1b[K'


# Untrusted text in a terminal: one line, without codes that move the cursor.


@given(st.text())
def test_whatever_comes_out_is_one_line(text: str) -> None:
    assert printable(text).isprintable()
    assert printable_lines(text).count('\n') == text.count('\n')


def test_what_can_be_printed_stays() -> None:
    assert printable('Zürich: 5 %, "ok"') == 'Zürich: 5 %, "ok"'
    assert printable('a\x1b[2J\nb\ud800\u202ec') == r'a\x1b[2J\nb\ud800\u202ec'


def test_what_is_long_ends() -> None:
    assert printable('x' * 100, 100) == 'x' * 100
    assert printable('x' * 101, 100) == 'x' * 100 + '…'


def test_a_uuid_is_called_what_it_is_called_and_a_path_stays() -> None:
    one, two = '1a5c0de0-0000-4000-8000-000000000001', '2a5c0de0-0000-4000-8000-000000000002'
    names = {one: 'web1'}
    assert renamed(f'{one}: is on {two}, and so is {one}', names) == f'web1: is on {two}, and so is web1'
    assert renamed(f'etcdctl del /names/{one}', names) == f'etcdctl del /names/{one}'
    assert renamed(f'{one}0 x{one} {one.upper()}', names) == f'{one}0 x{one} {one.upper()}'


def test_what_is_called_by_a_name_and_its_uuid_is_called_so_once() -> None:
    one, two = '1a5c0de0-0000-4000-8000-000000000001', '2a5c0de0-0000-4000-8000-000000000002'
    names = {compute: f'hv1 ({compute})' for compute in (one, two)}
    once = f'web1 is on hv1 ({one}), not on hv1 ({two})'
    assert renamed(f'web1 is on {one}, not on {two}', names) == renamed(once, names) == once
    assert renamed(f'(see {one})', names) == f'(see hv1 ({one}))'


def test_of_many_names_the_first_are_said_and_how_many_more_there_are() -> None:
    assert [some('abcd'[:n], 2) for n in range(5)] == ['', 'a', 'a, b', 'a, b and 1 more', 'a, b and 2 more']
    assert some(['web1', 'web2', 'web3'], 2, between=' ') == 'web1 web2 and 1 more'
