"""Output for people and programs: instances, tables, terminals, and the shapes of JSON."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from docs.shapes import RECORD as RECORD_SHAPE
from docs.shapes import REFUSED, SHAPES
from ecomp.cli import tables
from ecomp.cli.command import Invocation
from ecomp.cli.commands import COMMANDS, parse
from ecomp.cli.inspect import explain_no_address, make_record_details, make_record_listing
from ecomp.cli.operators import make_evacuation_listing
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
from ecomp.model import keys
from ecomp.model.apply import Desired, list_differences
from ecomp.model.boots import Boot
from ecomp.model.events import Event, event_to_dict
from ecomp.model.group import AFFINITY, Membership
from ecomp.model.host import NO_COMPUTES, Computes, PresenceFacts
from ecomp.model.order import (
    ORDER_FIELDS,
    RECORDED_FIELDS,
    USER_TEXTS,
    Order,
    Request,
    Resize,
    describe_difference,
    make_create_words,
    parse_request,
)
from ecomp.model.record import (
    WAIT_REASONS,
    Failure,
    Interface,
    Progress,
    Record,
    describe_failure,
    describe_wait,
    from_json,
)
from ecomp.model.stack import Place
from ecomp.model.states import ACTIVE, BUILDING, ERROR, STAGES, STOPPED
from ecomp.model.stored import encode
from ecomp.model.text import join_some, make_printable, replace_uuids
from ecomp.model.user_data import GuestFailure
from ecomp.scheduler.changes.change import make_tombstone
from ecomp.scheduler.placing.evacuate import Evacuated
from ecomp.scheduler.queries.find import InstanceEntries
from ecomp.store.client import Entry
from tests.kit.forms import render

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
NOW = '2026-01-31T12:00:00.000Z'
RECORD = Record(
    INSTANCE, COMPUTE, ACTIVE, image='http://h/i', resources={'VCPU': 1}, query='resources=VCPU:1',
    stages={'requested': NOW},
)  # fmt: skip
ADDRESSED = replace(RECORD, addresses=(Interface('default', '52:54:00:00:00:01', '10.0.0.1'),))
FAILED = replace(RECORD, state=ERROR, error=Failure('image', 'the server returned HTTP 404', 'nothing remains'))


# A value of each field of an order that is not its default.
ORDER_VALUES: dict[str, Any] = {
    'image': 'http://h/other', 'user_id': 'ann', 'project_id': 'shop', 'query': 'resources=VCPU:2',
    'stages': {'requested': '2026-01-31T13:00:00.000Z'}, 'name': 'web1', 'ssh_keys': ('ssh-ed25519 A',),
    'user_data_sha256': 'a' * 64, 'user_data': b'#!/bin/sh', 'count': 2, 'group': Membership('web'),
    'stack': Place('shop', 'web', 1, COMPUTE, 1), 'replaces': INSTANCE, 'replaced_by': COMPUTE, 'is_adopted': True,
    'is_protected': True,
}  # fmt: skip
RECORDED_VALUES = {name: ORDER_VALUES[name] for name in RECORDED_FIELDS}
# What `show --command` does not set: who asked and when, the number of a set, the places in a stack and of an
# evacuation; and no command creates an adopted one. Keys and user-data are options, too, but name files, which
# tests/scenario/test_again.py reads.
NOT_REPEATED = {
    *('user_id', 'stages', 'count', 'stack', 'replaces', 'replaced_by', 'is_adopted', 'is_protected'),
    *('ssh_keys', 'user_data', 'user_data_sha256'),
}


def test_no_field_of_an_order_is_forgotten_by_again() -> None:
    assert ORDER_FIELDS.keys() == ORDER_VALUES.keys(), 'give each field a value above'
    bare = make_create_words(Order(INSTANCE))
    repeated = {
        name for name, value in ORDER_VALUES.items() if make_create_words(Order(INSTANCE, **{name: value})) != bare
    }
    assert ORDER_VALUES.keys() - repeated == NOT_REPEATED
    words = make_create_words(Order(INSTANCE, **{name: ORDER_VALUES[name] for name in repeated}))
    assert parse(words).name == 'create', 'the options exist'


def test_words_of_again_keep_a_value_that_looks_like_an_option() -> None:
    assert make_create_words(Order(INSTANCE, project_id='-x', name='web')) == ['--name', 'web', '--project=-x']


# What is not compared with an order of the same uuid. A file of `apply` has no count in its orders.
NOT_COMPARED = {'user_id', 'stages', 'stack', 'replaces', 'replaced_by', 'is_protected'}


def test_no_field_of_an_order_is_forgotten_when_it_is_compared() -> None:
    old = Order(INSTANCE, project_id='q')
    orders = {name: replace(old, **{name: value}) for name, value in ORDER_VALUES.items()}
    told = {name for name, order in orders.items() if describe_difference(old, order)}
    assert ORDER_VALUES.keys() - told == NOT_COMPARED
    request = Request(**old.copy_fields(), allocations={})
    applied = {name for name, order in orders.items() if list_differences(RECORD, request, Desired(order, ''))}
    # A stack has no adopted instance, and plan_steps() compares a name that the file gives.
    assert told - applied == {'count', 'is_adopted', 'name'}


@pytest.mark.parametrize('name', RECORDED_VALUES)
def test_no_field_of_an_order_is_forgotten_by_show(name: str) -> None:
    changed = make_record_details(replace(RECORD, **{name: RECORDED_VALUES[name]}))
    assert changed.fields != make_record_details(RECORD).fields
    assert changed.value != make_record_details(RECORD).value
    problems = Draft202012Validator(RECORD_SHAPE).iter_errors(json.loads(json.dumps(changed.value)))
    assert [problem.message for problem in problems] == []


@pytest.mark.parametrize('name', USER_TEXTS)
def test_no_text_of_a_user_is_forgotten_by_list(name: str) -> None:
    listing = make_record_listing([replace(RECORD, **{name: RECORDED_VALUES[name]})])
    cells = dict(zip([column.name for column in listing.columns], listing.rows[0].cells, strict=True))
    assert cells[name.upper()] == RECORDED_VALUES[name]


def test_no_recorded_field_of_an_order_is_forgotten_by_a_tombstone() -> None:
    record = replace(RECORD, **RECORDED_VALUES)
    group = Membership('web', AFFINITY, True)
    request = Request(**record.copy_fields(group=group), allocations={COMPUTE: {'VCPU': 1}})
    entries = InstanceEntries(record, None, Entry(keys.request(COMPUTE, INSTANCE), encode(request).encode(), 1))
    tombstone = make_tombstone(SimpleNamespace(make_stamp=dict), entries)[1]  # type: ignore[arg-type]
    parsed = parse_request(COMPUTE, tombstone.key, tombstone.value.encode())
    forgotten = {name for name in RECORDED_FIELDS if getattr(parsed, name) != getattr(request, name)}
    assert forgotten == {'image', 'replaces', 'replaced_by'}  # of a request to destroy the new instance


def test_recorded_fields_of_an_order_are_read_as_they_were_written() -> None:
    record = replace(RECORD, **RECORDED_VALUES)
    assert from_json(encode(record).encode()) == record


@pytest.mark.parametrize('length', [40, 63])
def test_long_name_hides_neither_address_nor_host(length: int) -> None:
    names = ('web1', 'w' * length)
    listed = [replace(ADDRESSED, name=name, addresses=(Interface('d', 'm', '192.168.122.211'),)) for name in names]
    table = render_listing(
        make_record_listing(listed, Computes({}, {COMPUTE: 'hv1'})), OutputStyle(width=80)
    ).splitlines()
    assert {'NAME', 'STATE', 'ADDRESS', 'HOST'} <= {*table[0].split()}
    assert f'{"w" * 23}…' in table[1] + table[2]
    # An instance without a name can only be identified by its uuid.
    unnamed = render_listing(make_record_listing([RECORD, *listed]), OutputStyle(width=60)).splitlines()
    assert unnamed[0].split()[0] == 'INSTANCE'


def test_uuid_is_omitted_first_if_each_instance_has_a_name() -> None:
    listed = make_record_listing([replace(ADDRESSED, name='web1')], Computes({}, {COMPUTE: 'hv1'}))
    whole = render_listing(listed, OutputStyle(width=80)).splitlines()[0].split()
    assert render_listing(listed, OutputStyle(width=50)).splitlines()[0].split() == whole[1:]


@pytest.mark.parametrize(
    ('reason', 'shown'),
    [
        ('http://images.invalid/debian-12-genericcloud-amd64.qcow2: answers 404', 'answers 404 (stage image: http://i'),
        ('/var/lib/ecomp/images/a.part: No space left', 'No space left (stage image: /var/lib/e'),
        ('it is not an image: no magic', 'it is not an image: no magic (stage image)'),
        ('no image', 'no image (stage image)'),
    ],
)
def test_cause_of_a_failure_comes_first_in_a_list(reason: str, shown: str) -> None:
    assert shown in render(make_record_listing([replace(FAILED, error=Failure('image', reason, 'nothing'))]))


def test_every_field_may_be_requested_of_any_instance() -> None:
    whole = replace(
        ADDRESSED,
        **(RECORDED_VALUES | {'stages': dict.fromkeys([*STAGES, 'gone', 'error'], NOW)}),
        last_boot=Boot(2, 'start', {'started': NOW}),
        console='hv1:/log',
        progress=Progress('image', 1, 2),
        error=Failure('image', 'no', 'nothing'),
        power='x:asked',
        fault='it is so',
        cloud_init=GuestFailure('final', 'no'),
        host_keys=('ssh-ed25519 A',),
        resize=Resize(1, {'VCPU': 2}),
    )
    waits = make_record_details(
        replace(RECORD, state='queued'), Computes({COMPUTE: PresenceFacts('hv1', queues=False)}, {})
    )
    details = (make_record_details(whole), waits)
    fields = {name for each in details for name, _ in each.fields}
    assert fields == set(waits.possible_fields)
    assert waits.possible_fields == make_record_details(RECORD).possible_fields


def test_details_have_the_same_columns_for_each_instance() -> None:
    assert {column.name.lower() for column in make_record_listing([ADDRESSED]).columns} <= {
        *make_record_details(ADDRESSED).possible_fields
    }
    headings = {
        render_details([make_record_details(item)], OutputStyle('csv'), False).split('\n')[0]
        for item in (ADDRESSED, FAILED)
    }
    [names] = headings
    assert len({*names.split(',')}) == len(names.split(',')), 'each is there once'


@pytest.mark.parametrize(('name', 'shown'), [('address', '10.0.0.1'), ('ADDRESS', '10.0.0.1'), ('image', 'http://h/i')])
def test_exact_field_name_precedes_a_prefix(name: str, shown: str) -> None:
    detail = make_record_details(replace(ADDRESSED, stages=dict.fromkeys(STAGES, NOW)))
    assert render_details([detail], OutputStyle('value', columns=(name,)), False) == shown


def test_power_is_shown_only_while_it_is_switched() -> None:
    for power, shown in ((f'{COMPUTE}:asked', 'asked to shut down'), (f'{COMPUTE}:off', 'about to start')):
        assert shown in render(make_record_details(replace(RECORD, power=power)))
    assert 'power' not in render(make_record_details(replace(RECORD, power=COMPUTE)))
    assert json.loads(render(make_record_details(replace(RECORD, power=COMPUTE)), 'json'))['power'] == COMPUTE


def test_address_is_expected_until_the_guest_has_it() -> None:
    mac = '52:54:00:00:00:01'
    rows = {
        f'no address yet ({mac} on br0)': Interface('br0', mac),
        f'10.0.0.1 expected ({mac} on default)': Interface('default', mac, reservation='10.0.0.1'),
        f'10.0.0.1 ({mac} on default, by lease)': Interface('default', mac, '10.0.0.1', 'lease', '10.0.0.1'),
        f'10.0.0.9 ({mac} on br0, by arp)': Interface('br0', mac, '10.0.0.9', 'arp'),
    }
    shown = render(
        make_record_details(replace(RECORD, addresses=tuple(rows.values()), console='hv1:/c/i.log'))
    ).splitlines()
    assert [line.split('  ', 1)[1].strip() for line in shown if line.startswith('interface')] == list(rows)
    assert 'console      hv1:/c/i.log' in shown
    expecting = replace(RECORD, addresses=(rows[f'10.0.0.1 expected ({mac} on default)'],))
    assert render(make_record_listing([expecting])).splitlines()[1].split()[3] == '-'
    assert explain_no_address(expecting).endswith('its compute to accept the request (10.0.0.1 is expected)')


def test_missing_address_is_explained() -> None:
    assert explain_no_address(replace(RECORD, state=BUILDING, stages={'requested': NOW, 'scheduled': NOW})) == (
        f'{INSTANCE}: no address yet: building, waiting for its image'
    )
    assert explain_no_address(FAILED) == describe_failure(FAILED)
    assert 'failed at stage image' in describe_failure(FAILED)
    assert describe_failure(RECORD) == f'{INSTANCE}: failed'


@pytest.mark.parametrize(
    ('reason', 'described'),
    [
        ('http://h/a.img: HTTP 404', 'HTTP 404 (gone; http://h/a.img)'),
        ('http://h/a.img: too large. Fix: a smaller one', 'too large (gone; http://h/a.img). Fix: a smaller one'),
        ('/var/lib/x.img: no: really', 'no: really (gone; /var/lib/x.img)'),
        ('no room: 3/4 are used', 'no room: 3/4 are used (gone)'),
    ],
)
def test_cause_of_a_failure_stands_before_the_url(reason: str, described: str) -> None:
    record = replace(RECORD, error=Failure('image', reason, 'gone'))
    assert describe_failure(record) == f'{INSTANCE}: failed at stage image: {described}'


def test_waits_for_names_the_next_stage() -> None:
    assert describe_wait(None) == 'its compute to accept the request'
    assert describe_wait(RECORD) == 'its compute to accept the request'
    everything = dict.fromkeys(STAGES, NOW)
    assert describe_wait(replace(RECORD, stages=everything)) == WAIT_REASONS['ready']
    assert describe_wait(replace(RECORD, state=STOPPED)) == 'a user to start it (it is stopped)'
    assert set(WAIT_REASONS) == set(STAGES)


# Every answer in JSON has its documented shape; the golden transcripts have answers of each command.


# Commands whose output is for people only.
TEXT_COMMANDS = {'help', 'ui', 'completion', 'ssh', 'console', 'log'}

# The golden transcripts contain no events, because their etcd keeps no history.
EVENT = Event(7, 'instance', 'active', '1a5c0de0-0000-4000-8000-000000000001', 'web1')

GOLDEN = Path(__file__).parents[1] / 'golden/commands'


def name_shape(command: Invocation) -> str:
    """Return the key in SHAPES: an option may change what a command prints."""
    if command.name == 'adopt' and (command.words[1:] or command.options.all):
        return 'adopt --all'
    given = {field: value for field, value in command.options._asdict().items() if value}
    flags = (given[field] if field == 'view' else field.replace('_', '-') for field in given)
    names = (f'{command.name} --{flag}' for flag in flags)
    return next((name for name in names if name in SHAPES), command.name)


def parse_answers() -> Iterator[tuple[str, str, Any, int]]:
    """Yield line, name, parsed output (or None) and exit code of golden JSON and YAML commands."""
    for path in sorted(GOLDEN.glob('eschedule-*.txt')):
        for block in path.read_text().split('\n$ eschedule ')[1:]:
            line, *lines = block.splitlines()
            printed = '\n'.join(row[2:] for row in lines if row.startswith('|'))
            code = next(int(row[2:]) for row in lines if row.startswith('= '))
            if code != 2 and (command := parse(shlex.split(line))).options.format in ('json', 'yaml'):
                load = json.loads if command.options.format == 'json' else yaml.safe_load
                yield line, name_shape(command), load(printed) if printed else None, code


EVACUATED = [Evacuated(INSTANCE, 'web', COMPUTE, COMPUTE), Evacuated(INSTANCE, None, reason='no room')]
ROWS = [row.value for row in make_evacuation_listing(EVACUATED, {}, NO_COMPUTES).rows]
ANSWERS = [
    *parse_answers(),
    ('events -f json', 'events', event_to_dict(EVENT), 0),
    ('evacuate hv1 --fenced -f json', 'evacuate', ROWS, 0),
]


def test_each_answer_has_its_shape() -> None:
    problems = {}
    for line, name, printed, code in ANSWERS:
        is_refused = code == 3 and not name.startswith('evacuate')  # of which 3 is a result
        shape = Draft202012Validator(REFUSED if is_refused else SHAPES[name])
        if printed is None and code not in (4, 7):
            problems[line] = 'something is to be said of it'
        elif printed is not None and not shape.is_valid(printed):
            problems[line] = next(shape.iter_errors(printed)).message
    assert problems == {}


def test_every_json_command_has_a_shape_and_an_answer() -> None:
    shaped = {name for name, command in COMMANDS.items() if 'format' in command.options}
    assert shaped == {name.partition(' --')[0] for name in SHAPES}
    assert SHAPES.keys() - {name for _, name, printed, _ in ANSWERS if printed} == set()
    assert COMMANDS.keys() - SHAPES.keys() == TEXT_COMMANDS


@pytest.mark.parametrize('name', SHAPES)
def test_shape_is_a_valid_schema_that_refuses_wrong_answers(name: str) -> None:
    Draft202012Validator.check_schema(SHAPES[name])
    refuses = Draft202012Validator(SHAPES[name])
    good = next(
        printed for _, command, printed, code in ANSWERS
        if command == name and printed and (code != 3 or name.startswith('evacuate'))
    )  # fmt: skip
    one = good[0] if isinstance(good, list) else good
    for wrong in ({**one, 'more': 1}, {field: value for field, value in one.items() if field != next(iter(one))}, 'x'):
        assert not refuses.is_valid([wrong] if isinstance(good, list) else wrong)


# Tables, terminals, and text made safe for them.


ONE, TWO, SIMILAR = (f'{start}-0000-4000-8000-000000000001' for start in ('1a5c0de0', '2b5c0de0', '2b5c0de0'))
SIMILAR = SIMILAR.replace('0000-4', '0001-4')
COLUMNS = (
    *(Column('INSTANCE', kind=UUID), Column('NAME'), Column('STATE', kind=STATE)),
    *(Column('VCPU USED/CAPACITY', 1, short='VCPU'),),
    *(Column('REASON', 2, min_width=6), Column('REQUESTED', 3, TIME), Column('IMAGE', wide=True)),
)
TABLE_ROWS = (
    Row((ONE, 'web-10', 'active', '1/4', None, NOW, 'a'), {'name': 'web-10'}),
    Row((TWO, 'web-2', 'error', '3/4', 'it is broken', NOW, 'b'), {'name': 'web-2'}),
    Row((SIMILAR, None, 'building', None, None, NOW, 'b c'), {'name': None}),
)
LISTING = Listing(COLUMNS, TABLE_ROWS)


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
    # A beginning means the fields that any of them has.
    three = Details([('error', None)], {})
    assert render_details([two, three], OutputStyle('value', columns=('err',)), True) == 'it broke\n-'
    with pytest.raises(UsageError, match='2 columns begin'):
        render_details([Details([('errors', '1'), *two.fields], {}), three], OutputStyle(columns=('err',)), True)
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
    assert terminal.format_error(AWAY) == f'{AWAY} (as configured in /etc/ecomp/schedule.yaml). Try: eschedule check'
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
