"""The display of instances, and the shapes of answers in JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from docs.shapes import REFUSED, SHAPES
from ecomp.cli.commands import COMMANDS, parse
from ecomp.cli.inspect import COLUMNS, as_detail, as_list, no_address
from ecomp.cli.tables import Column, Listing, Look, Row, rendered, rendered_details
from ecomp.model.boots import Boot
from ecomp.model.events import Event, as_object
from ecomp.model.group import Membership
from ecomp.model.guest import GuestFailure
from ecomp.model.host import Computes, Living
from ecomp.model.record import (
    ACTIVE,
    BUILDING,
    ERROR,
    SCHEDULED,
    STAGES,
    STOPPED,
    WAITS_FOR,
    Failure,
    Interface,
    Progress,
    Record,
    failure,
    waits_for,
)
from tests.kit.forms import text

# Output about instances: tables, JSON, and what an instance waits for.


COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
NOW = '2026-01-31T12:00:00.000Z'
RECORD = Record(
    INSTANCE,
    COMPUTE,
    ACTIVE,
    image='http://h/i',
    resources={'VCPU': 1},
    query='resources=VCPU:1',
    stages={'requested': NOW},
)
ADDRESSED = replace(RECORD, addresses=(Interface('default', '52:54:00:00:00:01', '10.0.0.1'),))
FAILED = replace(RECORD, state=ERROR, error=Failure('image', 'the server answers HTTP 404', 'nothing of it is left'))


@given(st.lists(st.lists(st.text(alphabet='ab c', max_size=5), min_size=3, max_size=3), min_size=1, max_size=5))
def test_columns_stand_below_each_other(rows: list[list[str]]) -> None:
    shown = rendered(Listing([Column(name) for name in 'xyz'], list(map(Row, rows))), Look(header=False))
    lines = shown.split('\n')
    assert len(lines) == len(rows)
    starts = [sum(max(len(row[i]) for row in rows) + 2 for i in range(column)) for column in range(3)]
    for line, row in zip(lines, rows, strict=True):
        for start, cell in zip(starts, row, strict=True):
            assert line[start:].startswith(cell.rstrip())


def test_a_list_has_a_line_for_each() -> None:
    listed = [replace(ADDRESSED, name='web1'), replace(RECORD, state=SCHEDULED)]
    lines = text(as_list(listed, Computes({}, {COMPUTE: 'hv1'}))).splitlines()
    assert lines[0].split() == [column.name for column in COLUMNS if not column.wide]
    assert lines[1].split() == [INSTANCE, 'web1', 'active', '10.0.0.1', 'hv1', NOW]
    assert lines[2].split() == [INSTANCE, '-', 'scheduled', '-', 'hv1', NOW]
    # An unknown host is shown by its compute's uuid.
    assert text(as_list(listed)).splitlines()[1].split()[4] == COMPUTE
    assert json.loads(text(as_list(listed, Computes({}, {COMPUTE: 'hv1'})), 'json'))[0]['host'] == 'hv1'


@pytest.mark.parametrize('length', [40, 63])
def test_one_long_name_costs_neither_address_nor_host(length: int) -> None:
    names = ('web1', 'w' * length)
    listed = [replace(ADDRESSED, name=name, addresses=(Interface('d', 'm', '192.168.122.211'),)) for name in names]
    table = rendered(as_list(listed, Computes({}, {COMPUTE: 'hv1'})), Look(width=80)).splitlines()
    assert {'NAME', 'STATE', 'ADDRESS', 'HOST'} <= {*table[0].split()}
    assert f'{"w" * 23}…' in table[1] + table[2]
    # An instance without a name can only be identified by its uuid.
    unnamed = rendered(as_list([RECORD, *listed]), Look(width=60)).splitlines()
    assert unnamed[0].split()[0] == 'INSTANCE'


def test_the_uuid_is_left_out_first_where_each_has_a_name() -> None:
    listed = as_list([replace(ADDRESSED, name='web1')], Computes({}, {COMPUTE: 'hv1'}))
    whole = rendered(listed, Look(width=80)).splitlines()[0].split()
    assert rendered(listed, Look(width=50)).splitlines()[0].split() == whole[1:]


@pytest.mark.parametrize(
    ('reason', 'shown'),
    [
        ('http://images.invalid/debian-12-genericcloud-amd64.qcow2: answers 404', 'answers 404 (stage image: http://i'),
        ('/var/lib/ecomp/images/a.part: No space left', 'No space left (stage image: /var/lib/e'),
        ('it is not an image: no magic', 'it is not an image: no magic (stage image)'),
        ('no image', 'no image (stage image)'),
    ],
)
def test_the_cause_of_a_failure_comes_first_in_a_list(reason: str, shown: str) -> None:
    assert shown in text(as_list([replace(FAILED, error=Failure('image', reason, 'nothing'))]))


def test_no_instances_are_a_heading_or_an_empty_array() -> None:
    assert text(as_list([])).split() == [column.name for column in COLUMNS if not column.wide]
    assert json.loads(text(as_list([]), 'json')) == []


def test_json_is_the_record_as_etcd_has_it() -> None:
    (listed,) = json.loads(text(as_list([ADDRESSED]), 'json'))
    assert listed == json.loads(text(as_detail(ADDRESSED), 'json'))
    interface = {'network': 'default', 'mac': '52:54:00:00:00:01', 'address': '10.0.0.1'}
    assert listed['addresses'] == [{**interface, 'source': None, 'expected': None}]
    assert listed['version'] == 1


def test_every_field_is_one_that_any_instance_may_be_asked_for() -> None:
    boots = tuple(Boot(number, 'start', {'started': NOW}) for number in (1, 2))
    whole = replace(
        ADDRESSED,
        stages=dict.fromkeys([*STAGES, 'gone', 'error'], NOW),
        boots=boots,
        group=Membership('web'),
        console='hv1:/log',
        progress=Progress('image', 1, 2),
        error=Failure('image', 'no', 'nothing'),
        power='x:asked',
        fault='it is so',
        cloud_init=GuestFailure('final', 'no'),
        host_keys=('ssh-ed25519 A',),
    )
    waits = as_detail(replace(RECORD, state='queued'), Computes({COMPUTE: Living('hv1', queues=False)}, {}))
    fields = {name for details in (as_detail(whole), waits) for name, _ in details.fields if name != 'boot 2'}
    assert fields == set(waits.may_have)
    assert waits.may_have == as_detail(RECORD).may_have


def test_the_columns_of_details_are_those_of_a_list_and_the_same_for_each_instance() -> None:
    assert {column.name.lower() for column in as_list([ADDRESSED]).columns} <= {*as_detail(ADDRESSED).may_have}
    headings = {rendered_details([as_detail(item)], Look('csv'), False).split('\n')[0] for item in (ADDRESSED, FAILED)}
    [names] = headings
    assert len({*names.split(',')}) == len(names.split(',')), 'each is there once'


@pytest.mark.parametrize(('name', 'shown'), [('address', '10.0.0.1'), ('ADDRESS', '10.0.0.1'), ('image', 'http://h/i')])
def test_the_exact_name_of_a_field_comes_first(name: str, shown: str) -> None:
    detail = as_detail(replace(ADDRESSED, stages=dict.fromkeys(STAGES, NOW)))
    assert rendered_details([detail], Look('value', columns=(name,)), False) == shown


def test_one_instance_whole() -> None:
    shown = text(as_detail(replace(ADDRESSED, fault='its record was lost', name='web1')))
    for part in (INSTANCE, 'web1', COMPUTE, '10.0.0.1', 'VCPU:1', 'resources=VCPU:1', 'its record was lost', NOW):
        assert part in shown
    failed = text(as_detail(FAILED))
    assert 'at stage image: the server answers HTTP 404' in failed
    assert 'nothing of it is left' in failed


def test_a_power_that_is_being_switched_is_shown_while_it_is() -> None:
    for power, shown in ((f'{COMPUTE}:asked', 'asked to turn itself off'), (f'{COMPUTE}:off', 'about to be started')):
        assert shown in text(as_detail(replace(RECORD, power=power)))
    assert 'power' not in text(as_detail(replace(RECORD, power=COMPUTE)))
    assert json.loads(text(as_detail(replace(RECORD, power=COMPUTE)), 'json'))['power'] == COMPUTE


def test_an_address_is_expected_until_the_guest_has_it() -> None:
    mac = '52:54:00:00:00:01'
    rows = {
        f'no address yet ({mac} on br0)': Interface('br0', mac),
        f'10.0.0.1 expected ({mac} on default)': Interface('default', mac, expected='10.0.0.1'),
        f'10.0.0.1 ({mac} on default, by lease)': Interface('default', mac, '10.0.0.1', 'lease', '10.0.0.1'),
        f'10.0.0.9 ({mac} on br0, by arp)': Interface('br0', mac, '10.0.0.9', 'arp'),
    }
    shown = text(as_detail(replace(RECORD, addresses=tuple(rows.values()), console='hv1:/c/i.log'))).splitlines()
    assert [line.split('  ', 1)[1].strip() for line in shown if line.startswith('interface')] == list(rows)
    assert 'console      hv1:/c/i.log' in shown
    expecting = replace(RECORD, addresses=(rows[f'10.0.0.1 expected ({mac} on default)'],))
    assert text(as_list([expecting])).splitlines()[1].split()[3] == '-'
    assert no_address(expecting).endswith('waiting for: its compute to take it (10.0.0.1 is expected)')


def test_why_there_is_no_address() -> None:
    assert no_address(replace(RECORD, state=BUILDING, stages={'requested': NOW, 'scheduled': NOW})) == (
        f'{INSTANCE}: no address yet: building, waiting for: its image'
    )
    assert no_address(FAILED) == failure(FAILED)
    assert 'failed at stage image' in failure(FAILED)
    assert failure(RECORD) == f'{INSTANCE}: failed'


def test_what_is_waited_for() -> None:
    assert waits_for(None) == 'its compute to take it'
    assert waits_for(RECORD) == 'its compute to take it'
    everything = dict.fromkeys(STAGES, NOW)
    assert waits_for(replace(RECORD, stages=everything)) == WAITS_FOR['ready']
    assert waits_for(replace(RECORD, state=STOPPED)) == 'somebody to start it: it is stopped'
    assert set(WAITS_FOR) == set(STAGES)


# Every answer in JSON has its documented shape; the golden transcripts have answers of each command.


# Commands whose output is for people only.
WITHOUT = {'help', 'completion', 'ssh', 'ssh-config', 'console', 'log'}

# The golden transcripts contain no events, because their etcd keeps no history.
EVENT = Event(7, 'instance', 'active', '1a5c0de0-0000-4000-8000-000000000001', 'web1')

GOLDEN = Path(__file__).parents[1] / 'golden/commands'


def answers() -> Iterator[tuple[str, str, Any, int]]:
    """Yield line, name, parsed output (or None) and exit code of golden JSON and YAML commands."""
    for path in sorted(GOLDEN.glob('eschedule-*.txt')):
        for block in path.read_text().split('\n$ eschedule ')[1:]:
            line, *lines = block.splitlines()
            printed = '\n'.join(row[2:] for row in lines if row.startswith('|'))
            code = next(int(row[2:]) for row in lines if row.startswith('= '))
            if code != 2 and (command := parse(shlex.split(line))).options.format in ('json', 'yaml'):
                load = json.loads if command.options.format == 'json' else yaml.safe_load
                yield line, command.name, load(printed) if printed else None, code


ANSWERS = [*answers(), ('events -f json', 'events', as_object(EVENT), 0)]


@pytest.mark.parametrize(('line', 'name', 'printed', 'code'), ANSWERS, ids=[line for line, *_ in ANSWERS])
def test_an_answer_has_its_shape(line: str, name: str, printed: Any, code: int) -> None:
    if printed is None:
        assert code in (4, 7), f'{line}: something is to be said of it'
    else:
        Draft202012Validator(REFUSED if code == 3 else SHAPES[name]).validate(printed)


def test_every_command_that_prints_json_has_a_shape_and_is_tried() -> None:
    shaped = {name for name, command in COMMANDS.items() if 'format' in command.options}
    assert shaped == SHAPES.keys()
    assert shaped - {name for _, name, printed, _ in ANSWERS if printed} == set()
    assert COMMANDS.keys() - SHAPES.keys() == WITHOUT


@pytest.mark.parametrize('name', SHAPES)
def test_a_shape_is_a_schema_that_refuses(name: str) -> None:
    Draft202012Validator.check_schema(SHAPES[name])
    refuses = Draft202012Validator(SHAPES[name])
    good = next(printed for _, command, printed, code in ANSWERS if command == name and printed and code != 3)
    one = good[0] if isinstance(good, list) else good
    for wrong in ({**one, 'more': 1}, {field: value for field, value in one.items() if field != next(iter(one))}, 'x'):
        assert not refuses.is_valid([wrong] if isinstance(good, list) else wrong)
