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
from jsonschema import Draft202012Validator

from docs.shapes import RECORD as RECORD_SHAPE
from docs.shapes import REFUSED, SHAPES
from ecomp.cli.commands import COMMANDS, parse
from ecomp.cli.inspect import explain_no_address, make_record_details, make_record_listing
from ecomp.cli.operators import make_evacuation_listing
from ecomp.cli.tables import OutputStyle, render_details, render_listing
from ecomp.model.boots import Boot
from ecomp.model.events import Event, event_to_dict
from ecomp.model.group import Membership
from ecomp.model.guest import GuestFailure
from ecomp.model.host import NO_COMPUTES, Computes, PresenceFacts
from ecomp.model.order import FIELDS, Order, make_create_words
from ecomp.model.record import (
    ACTIVE,
    BUILDING,
    ERROR,
    STAGES,
    STOPPED,
    WAIT_REASONS,
    Failure,
    Interface,
    Progress,
    Record,
    describe_failure,
    describe_wait,
    from_json,
    to_json,
)
from ecomp.model.stack import Place
from ecomp.scheduler.placing.evacuate import Evacuated
from tests.kit.forms import render

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
FAILED = replace(RECORD, state=ERROR, error=Failure('image', 'the server returned HTTP 404', 'nothing remains'))


# A value of each field of an order that is not its default.
ORDER_VALUES: dict[str, Any] = {
    'image': 'http://h/other',
    'user_id': 'ann',
    'project_id': 'shop',
    'query': 'resources=VCPU:2',
    'stages': {'requested': '2026-01-31T13:00:00.000Z'},
    'name': 'web1',
    'ssh_keys': ('ssh-ed25519 A',),
    'user_data_sha256': 'a' * 64,
    'user_data': b'#!/bin/sh',
    'count': 2,
    'group': Membership('web'),
    'stack': Place('shop', 'web', 1, COMPUTE, 1),
    'replaces': INSTANCE,
    'replaced_by': COMPUTE,
}
RECORDED_VALUES = {row.name: ORDER_VALUES.get(row.name) for row in FIELDS if row.recorded}
# What the command of `again` does not set: who asked and when, the number of a set, the places in a stack and of an
# evacuation. Keys and user-data are options, too, but name files, which tests/scenario/test_again.py reads.
NOT_REPEATED = {
    *('user_id', 'stages', 'count', 'stack', 'replaces', 'replaced_by'),
    *('ssh_keys', 'user_data', 'user_data_sha256'),
}


def test_no_field_of_an_order_is_forgotten_by_again() -> None:
    assert {row.name for row in FIELDS} == ORDER_VALUES.keys(), 'give each field a value above'
    bare = make_create_words(Order(INSTANCE))
    repeated = {
        name for name, value in ORDER_VALUES.items() if make_create_words(Order(INSTANCE, **{name: value})) != bare
    }
    assert ORDER_VALUES.keys() - repeated == NOT_REPEATED


@pytest.mark.parametrize('name', RECORDED_VALUES)
def test_no_field_of_an_order_is_forgotten_by_show(name: str) -> None:
    changed = make_record_details(replace(RECORD, **{name: RECORDED_VALUES[name]}))
    assert changed.fields != make_record_details(RECORD).fields
    assert changed.value != make_record_details(RECORD).value
    problems = Draft202012Validator(RECORD_SHAPE).iter_errors(json.loads(json.dumps(changed.value)))
    assert [problem.message for problem in problems] == []


def test_recorded_fields_of_an_order_are_read_as_they_were_written() -> None:
    record = replace(RECORD, **RECORDED_VALUES)
    assert from_json(to_json(record).encode()) == record


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
    boots = tuple(Boot(number, 'start', {'started': NOW}) for number in (1, 2))
    whole = replace(
        ADDRESSED,
        **(RECORDED_VALUES | {'stages': dict.fromkeys([*STAGES, 'gone', 'error'], NOW)}),
        boots=boots,
        console='hv1:/log',
        progress=Progress('image', 1, 2),
        error=Failure('image', 'no', 'nothing'),
        power='x:asked',
        fault='it is so',
        cloud_init=GuestFailure('final', 'no'),
        host_keys=('ssh-ed25519 A',),
    )
    waits = make_record_details(
        replace(RECORD, state='queued'), Computes({COMPUTE: PresenceFacts('hv1', queues=False)}, {})
    )
    fields = {name for details in (make_record_details(whole), waits) for name, _ in details.fields if name != 'boot 2'}
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
        f'10.0.0.1 expected ({mac} on default)': Interface('default', mac, expected='10.0.0.1'),
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
    assert explain_no_address(expecting).endswith('waiting for its compute to accept it (10.0.0.1 is expected)')


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
    assert describe_wait(None) == 'its compute to accept it'
    assert describe_wait(RECORD) == 'its compute to accept it'
    everything = dict.fromkeys(STAGES, NOW)
    assert describe_wait(replace(RECORD, stages=everything)) == WAIT_REASONS['ready']
    assert describe_wait(replace(RECORD, state=STOPPED)) == 'a user to start it (it is stopped)'
    assert set(WAIT_REASONS) == set(STAGES)


# Every answer in JSON has its documented shape; the golden transcripts have answers of each command.


# Commands whose output is for people only.
TEXT_COMMANDS = {'help', 'completion', 'metrics', 'ssh', 'ssh-config', 'console', 'log'}

# The golden transcripts contain no events, because their etcd keeps no history.
EVENT = Event(7, 'instance', 'active', '1a5c0de0-0000-4000-8000-000000000001', 'web1')

GOLDEN = Path(__file__).parents[1] / 'golden/commands'


def parse_answers() -> Iterator[tuple[str, str, Any, int]]:
    """Yield line, name, parsed output (or None) and exit code of golden JSON and YAML commands."""
    for path in sorted(GOLDEN.glob('eschedule-*.txt')):
        for block in path.read_text().split('\n$ eschedule ')[1:]:
            line, *lines = block.splitlines()
            printed = '\n'.join(row[2:] for row in lines if row.startswith('|'))
            code = next(int(row[2:]) for row in lines if row.startswith('= '))
            if code != 2 and (command := parse(shlex.split(line))).options.format in ('json', 'yaml'):
                load = json.loads if command.options.format == 'json' else yaml.safe_load
                yield line, command.name, load(printed) if printed else None, code


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
        is_refused = code == 3 and name not in ('what-if', 'evacuate')  # of which 3 is a result
        shape = Draft202012Validator(REFUSED if is_refused else SHAPES[name])
        if printed is None and code not in (4, 7):
            problems[line] = 'something is to be said of it'
        elif printed is not None and not shape.is_valid(printed):
            problems[line] = next(shape.iter_errors(printed)).message
    assert problems == {}


def test_every_json_command_has_a_shape_and_an_answer() -> None:
    shaped = {name for name, command in COMMANDS.items() if 'format' in command.options}
    assert shaped == SHAPES.keys()
    assert shaped - {name for _, name, printed, _ in ANSWERS if printed} == set()
    assert COMMANDS.keys() - SHAPES.keys() == TEXT_COMMANDS


@pytest.mark.parametrize('name', SHAPES)
def test_shape_is_a_valid_schema_that_refuses_wrong_answers(name: str) -> None:
    Draft202012Validator.check_schema(SHAPES[name])
    refuses = Draft202012Validator(SHAPES[name])
    good = next(
        printed for _, command, printed, code in ANSWERS
        if command == name and printed and (code != 3 or name in ('what-if', 'evacuate'))
    )  # fmt: skip
    one = good[0] if isinstance(good, list) else good
    for wrong in ({**one, 'more': 1}, {field: value for field, value in one.items() if field != next(iter(one))}, 'x'):
        assert not refuses.is_valid([wrong] if isinstance(good, list) else wrong)
