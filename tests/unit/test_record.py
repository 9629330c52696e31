"""Requests, records and boots: written, read back whole, and refused if malformed."""

from __future__ import annotations

import base64
import json
import re
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.instance.plan import has_new_address, is_address_pending, is_unready
from ecomp.cli.commands import COMMANDS, PLANNED_WORDS
from ecomp.cli.suggestions import OLD_WORDS
from ecomp.model import keys, order
from ecomp.model.boots import CREATED, HOST_REBOOT, MANUAL, Boot, parse_last
from ecomp.model.choose import PlacementReason
from ecomp.model.command_names import RESERVED
from ecomp.model.group import ANTI_AFFINITY, Membership
from ecomp.model.guest import Address
from ecomp.model.order import Holdings, InvalidRequest, PowerAction, Request, get_holdings, parse_request
from ecomp.model.record import (
    Failure,
    Interface,
    Progress,
    Record,
    from_json,
    is_stopped_by_drain,
    make_record,
    plan_drain,
)
from ecomp.model.states import ACTIVE, BUILDING, GONE, SCHEDULED, STOPPED
from ecomp.model.stored import encode
from ecomp.model.text import check_name, format_time, is_label, parse_uuid_prefix
from ecomp.model.user_data import MAX_SSH_KEYS_BYTES, MAX_USER_DATA_BYTES, GuestFailure
from ecomp.scheduler.changes.wait import is_before_boot, is_pending
from tests.kit.hostile import COMPUTE, HOSTILE, IMAGE, INSTANCE, OTHER_UUID, RESOURCES, make_request

NOW = '2026-01-31T12:00:00.000Z'
LATER = '2026-01-31T12:00:01.000Z'
RECORD = Record(INSTANCE, COMPUTE, SCHEDULED, image='http://h/i')


FIELDS = json.loads(encode(RECORD))


def make_stored_record(**changed: Any) -> bytes:
    return json.dumps({**FIELDS, **changed}).encode()


def test_new_record_contains_the_request() -> None:
    allocations = {COMPUTE: {'VCPU': 1, 'MEMORY_MB': 256}, 'a sharing provider': {'DISK_GB': 2}}
    request = Request(INSTANCE, allocations, image='http://h/i', query='resources=…', stages={'requested': NOW})
    record = make_record(COMPUTE, request, LATER)
    assert (record.state, record.compute, record.query) == (SCHEDULED, COMPUTE, 'resources=…')
    assert record.resources == {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 2}
    assert record.stages == {'requested': NOW, 'scheduled': LATER}


def test_schedulers_time_of_scheduling_is_kept() -> None:
    request = Request(INSTANCE, {}, image=None, user_id='u', project_id='p', query=None, stages={'scheduled': NOW})
    assert make_record(COMPUTE, request, LATER).stages == {'scheduled': NOW}


def test_a_stage_keeps_its_first_time() -> None:
    record = RECORD.enter_state(BUILDING, NOW, 'image').enter_state(BUILDING, LATER, 'image', 'disk')
    assert record.state == BUILDING
    assert record.stages == {'image': NOW, 'disk': LATER}


def test_address_is_that_of_the_first_interface() -> None:
    assert RECORD.address is None
    both = (Interface('default', 'm0', '10.0.0.1'), Interface('br0', 'm1', '10.1.0.1'))
    assert replace(RECORD, addresses=both).address == '10.0.0.1'
    assert replace(RECORD, addresses=(both[0]._replace(address=None), both[1])).address is None


def test_times_are_utc_and_sort_as_text() -> None:
    moment = datetime(2026, 1, 31, 13, 0, 0, 123456, timezone(timedelta(hours=1)))
    assert format_time(moment) == '2026-01-31T12:00:00.123Z'
    assert format_time(moment.astimezone(UTC)) == format_time(moment)


INTERFACE = Interface('default', 'm0', '10.0.0.1')
FAILURE = Failure('image', 'broken', 'nothing is left')
OLDER = {'network': 'default', 'mac': 'm0', 'address': '10.0.0.1'}


@pytest.mark.parametrize(
    ('value', 'record'),
    [
        (
            {'version': 1, 'instance': INSTANCE, 'compute': COMPUTE, 'state': ACTIVE, 'image': None},
            Record(INSTANCE, COMPUTE, ACTIVE),
        ),
        ({**FIELDS, 'addresses': [OLDER]}, replace(RECORD, addresses=(INTERFACE,))),
        ({**FIELDS, 'more': 'x'}, RECORD),
        (
            {**FIELDS, 'addresses': [{**OLDER, 'family': 4}], 'error': {**vars(FAILURE), 'code': 7}},
            replace(RECORD, addresses=(INTERFACE,), error=FAILURE),
        ),
    ],
)
def test_record_of_an_older_or_newer_ecomp_is_read(value: dict[str, Any], record: Record) -> None:
    """A missing field has its default, and an unknown field is ignored."""
    assert from_json(json.dumps(value).encode()) == record


def test_record_of_another_instance_is_refused() -> None:
    assert from_json(make_stored_record(), INSTANCE) == RECORD
    with pytest.raises(ValueError, match=f"instance: '{INSTANCE}' differs from '{COMPUTE}' in its key"):
        from_json(make_stored_record(), COMPUTE)


def test_progress_is_removed_when_its_stage_is_reached() -> None:
    for progress in (Progress('image', 34_000_000, 600_000_000), Progress('image', 1)):
        assert replace(RECORD, state=BUILDING, progress=progress).enter_state(BUILDING, NOW, 'image').progress is None
    assert str(Progress('image', 34_400_000, 600_000_000)) == 'image, 34 of 600 MB'
    assert str(Progress('image', 34_400_000)) == 'image, 34 MB'


# Boots of a guest: their stages, the limit of five, and strict parsing.


BOOTED = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
ITS_HOST = 'b8756be5-a30d-4311-920c-0ad996367a8e'
MAC = '52:54:00:00:00:01'
NEW = Record(BOOTED, ITS_HOST, 'building', image='http://h/i', stages={'requested': '2026-01-31T12:00:00.000Z'})
REBOOT = PowerAction('reboot', ITS_HOST)
STOP = PowerAction('stop', BOOTED)


def format_minute(minute: int) -> str:
    return f'2026-01-31T12:{minute:02}:00.000Z'


FIRST = (
    NEW.mark_running(CREATED, format_minute(1))
    .mark_stage('addressed', format_minute(2))
    .mark_stage('ready', format_minute(3))
)
OFF = FIRST.mark_off(format_minute(4))
SECOND = OFF.mark_running('reboot', format_minute(5))


def test_each_start_of_a_guest_is_a_boot() -> None:
    assert FIRST.last_boot == Boot(
        1, CREATED, {'started': format_minute(1), 'addressed': format_minute(2), 'ready': format_minute(3)}
    )
    assert OFF.state == STOPPED
    assert OFF.last_boot is not None
    assert OFF.last_boot.stages['stopped'] == format_minute(4)
    assert SECOND.state == ACTIVE
    assert SECOND.last_boot == Boot(2, 'reboot', {'started': format_minute(5)}, format_minute(4))
    # A second sighting, on or off, is the same boot and keeps the first time.
    assert SECOND.mark_running(MANUAL, format_minute(6)) == SECOND
    assert OFF.mark_off(format_minute(9)).last_boot == OFF.last_boot
    assert FIRST.mark_stage('ready', format_minute(9)) == FIRST
    assert FIRST.last_boot is not None
    assert list(FIRST.last_boot.stages) == ['started', 'addressed', 'ready']


def test_reached_is_of_the_last_boot_and_stages_of_the_first() -> None:
    assert SECOND.reached_stages == {'requested': format_minute(0), 'started': format_minute(5)}
    assert SECOND.mark_stage('addressed', format_minute(7)).reached_stages['addressed'] == format_minute(7)
    assert SECOND.mark_stage('addressed', format_minute(7)).stages['addressed'] == format_minute(2)


def test_only_the_last_boot_is_kept() -> None:
    record = SECOND.mark_off(format_minute(6)).mark_running(HOST_REBOOT, format_minute(7))
    assert record.last_boot == Boot(3, HOST_REBOOT, {'started': format_minute(7)}, format_minute(6))
    assert from_json(encode(record).encode()) == record


def test_new_boot_awaits_its_own_address_and_report() -> None:
    interface = Interface('default', MAC, '10.0.0.1', 'lease')
    first, second = replace(FIRST, addresses=(interface,)), replace(SECOND, addresses=(interface,))
    assert (is_address_pending(first), is_unready(first)) == (False, False)
    assert (is_address_pending(second), is_unready(second)) == (True, True)
    leases = {
        '10.0.0.1 of before': (format_minute(3), False),
        '10.0.0.1 since': (format_minute(5), True),
        'unknown': ('', True),
    }
    for since, new in leases.values():
        assert has_new_address(second, {MAC: Address('10.0.0.1', 'lease', since)}) is new
    assert has_new_address(second, {MAC: Address('10.0.0.2', 'lease', format_minute(3))})
    assert not has_new_address(first, {MAC: Address('10.0.0.1', 'lease', format_minute(5))})
    assert not has_new_address(second, {})
    # The clock was set back after the stop, so times do not tell what came later.
    assert has_new_address(second, {MAC: Address('10.0.0.1', 'lease', format_minute(2))}, format_minute(3))
    assert not has_new_address(second, {MAC: Address('10.0.0.1', 'lease', format_minute(2))}, format_minute(5))


def test_wait_after_a_reboot_is_for_the_new_boot() -> None:
    requested = replace(FIRST, power=REBOOT.format_phase('asked'))
    completed = replace(SECOND, power=REBOOT.id)
    assert is_before_boot('ready', FIRST, FIRST, REBOOT)
    assert is_before_boot('ready', FIRST, requested, REBOOT)
    assert not is_before_boot('ready', FIRST, completed, REBOOT)
    # The disk stage belongs to no boot, and a stop starts none.
    assert not is_before_boot('disk', FIRST, FIRST, REBOOT)
    assert not is_before_boot('ready', FIRST, FIRST, STOP)
    assert not is_before_boot('ready', FIRST, FIRST, None)
    # Another user's action has replaced this one and is carried out.
    assert not is_pending(REBOOT, FIRST, replace(SECOND, power=STOP.id))


def test_wait_for_a_stopped_guest_is_for_its_next_boot() -> None:
    assert is_before_boot('addressed', OFF, OFF, None)
    assert not is_before_boot('addressed', OFF, SECOND, None)
    # The stage was reached during the wait, and the guest is off again.
    assert not is_before_boot('ready', FIRST, OFF, None)
    assert not is_before_boot(
        'ready', OFF, SECOND.mark_stage('ready', format_minute(6)).mark_off(format_minute(7)), None
    )


def test_cloud_init_failure_belongs_to_its_boot() -> None:
    failed = replace(FIRST, cloud_init=GuestFailure('init', 'no'))
    assert not is_unready(failed)
    assert failed.mark_running(MANUAL, format_minute(4)).cloud_init == failed.cloud_init
    restarted = failed.mark_off(format_minute(4)).mark_running('reboot', format_minute(5))
    assert restarted.cloud_init is None
    assert is_unready(restarted)


def test_console_is_removed_when_the_instance_is_gone() -> None:
    assert replace(FIRST, console='hv1:/c').enter_state(GONE, format_minute(9), 'gone').console is None
    assert replace(FIRST, console='hv1:/c').mark_off(format_minute(9)).console == 'hv1:/c'


def test_only_the_last_boot_and_known_stages_are_read() -> None:
    stages = {'started': 'T', 'stopped': 'U', 'more': 7}
    many = [{'number': number, 'reason': 'later', 'stages': stages} for number in range(1, 99)]
    assert parse_last(many) == Boot(98, 'later', {'started': 'T', 'stopped': 'U'}, previous_stop='U')


# What `host drain --stop` stops and waits for.


HERE = replace(NEW, state=ACTIVE)
DRAIN_STOP = PowerAction('stop', BOOTED, 'drain')


@pytest.mark.parametrize(
    ('record', 'power', 'stopped_before', 'expected'),
    [
        (HERE, None, (), 'stop'),
        (HERE, PowerAction('start', MAC), (), 'stop'),
        (replace(HERE, power=MAC), PowerAction('start', MAC), (), 'stop'),
        (replace(HERE, power=MAC), PowerAction('start', MAC), (BOOTED,), None),  # its user started it in between
        (HERE, STOP, (), 'await'),  # its user's stop stays its user's
        (HERE, DRAIN_STOP, (BOOTED,), 'await'),
        (replace(HERE, state=STOPPED), None, (), None),
        (replace(HERE, state=STOPPED, power=BOOTED), DRAIN_STOP, (BOOTED,), None),
        (replace(HERE, state=STOPPED), PowerAction('start', MAC), (), 'stop'),
        (replace(HERE, state=STOPPED), PowerAction('start', MAC), (BOOTED,), None),
        *((replace(HERE, state=state), None, (), 'await') for state in ('scheduled', 'building', 'destroying')),
        *((replace(HERE, state=state), None, (), None) for state in ('gone', 'error')),
        (None, None, (), 'await'),
    ],
)
def test_drain_stops_what_runs_and_awaits_what_will_be_off(
    record: Record | None, power: PowerAction | None, stopped_before: tuple[str, ...], expected: str | None
) -> None:
    to_stop, to_await = plan_drain({BOOTED: record}, {BOOTED: power}, stopped_before)
    assert (to_stop, to_await) == ([BOOTED] if expected == 'stop' else [], [BOOTED] if expected == 'await' else [])


@pytest.mark.parametrize(
    ('record', 'power', 'expected'),
    [
        (replace(HERE, state=STOPPED, power=BOOTED), DRAIN_STOP, True),
        (HERE, DRAIN_STOP, True),  # it is shutting down
        (replace(HERE, power=BOOTED), DRAIN_STOP, False),  # it was started outside ecomp
        (replace(HERE, state=STOPPED, power=BOOTED), STOP, False),
        (replace(HERE, state=STOPPED), None, False),
        (replace(HERE, state='error'), DRAIN_STOP, False),
        (None, DRAIN_STOP, False),
    ],
)
def test_only_guests_that_a_drain_stopped_are_started(
    record: Record | None, power: PowerAction | None, expected: bool
) -> None:
    assert is_stopped_by_drain(record, power) is expected


# Requests, names and uuid prefixes: what is accepted, and why the rest is refused.


KEY = keys.request(COMPUTE, INSTANCE)


def parse_value(value: bytes | str | dict[str, Any], key: str = KEY) -> Request | InvalidRequest:
    if isinstance(value, dict):
        value = json.dumps(value)
    return parse_request(COMPUTE, key, value.encode() if isinstance(value, str) else value)


def test_a_destroy_of_2019_is_a_tombstone() -> None:
    # The 2019 destroy took the body of GET /allocations/<uuid>, emptied it and added two fields.
    message = {
        'allocations': {}, 'consumer_generation': 1, 'project_id': 'p', 'user_id': 'u', 'consumer_type': 'INSTANCE',
        'instance': INSTANCE, 'image': None,
    }  # fmt: skip
    result = parse_value(message)
    assert isinstance(result, Request)
    assert result.is_tombstone
    assert result.image is None


def test_evacuated_instances_name_each_other() -> None:
    assert isinstance(plain := parse_value(make_request()), Request)
    assert {'replaces', 'replaced_by'}.isdisjoint(json.loads(encode(plain)))
    value = make_request(replaces=OTHER_UUID, replaced_by=OTHER_UUID)
    assert isinstance(request := parse_value(value), Request)
    assert (request.replaces, request.replaced_by) == (OTHER_UUID, OTHER_UUID)
    assert parse_value(encode(request)) == request
    stored = json.loads(encode(make_record(COMPUTE, request, '')))
    assert (stored['replaces'], stored['replaced_by']) == (OTHER_UUID, OTHER_UUID)
    assert isinstance(parse_value(make_request(replaces='web')), InvalidRequest)


def test_group_resources_and_reason_round_trip() -> None:
    group, why = Membership('web', ANTI_AFFINITY, True), PlacementReason('spread', 0.75, 3)
    original = Request(INSTANCE, {COMPUTE: RESOURCES}, image=IMAGE, user_id='u', project_id='p', group=group, why=why)
    assert parse_value(encode(original)) == original
    tombstone = Request(INSTANCE, {}, image=None, user_id='u', project_id='p', group=group, former_resources=RESOURCES)
    result = parse_value(encode(tombstone))
    assert isinstance(result, Request)
    assert (result.is_tombstone, result.resources, result.group) == (True, RESOURCES, group)


@pytest.mark.parametrize(
    ('value', 'reason'), HOSTILE, ids=[f'{n}-{reason[:30]}' for n, (_, reason) in enumerate(HOSTILE)]
)
def test_malformed_request_is_refused_with_its_reason(value: bytes | str | dict[str, Any], reason: str) -> None:
    result = parse_value(value)
    assert isinstance(result, InvalidRequest)
    assert reason in result.reason
    assert '\n' not in result.reason
    assert 'canary' not in result.reason
    assert result.instance == INSTANCE


GROUP = {'name': 'g', 'policy': ANTI_AFFINITY, 'strict': True}


def parse_shares(value: dict[str, Any]) -> Holdings:
    result = parse_value(value)
    assert isinstance(result, InvalidRequest)
    return result.holdings


def test_refused_request_reports_its_shares() -> None:
    newer = make_request(version=2, name='web', group=GROUP, project_id='p')
    assert parse_shares(newer) == Holdings('web', 'g', 'p', RESOURCES)
    tombstone = {**newer, 'allocations': {}, 'image': None, 'resources': RESOURCES}
    assert parse_shares(tombstone) == Holdings('web', 'g', 'p', RESOURCES)
    # Valid fields count although others are malformed.
    assert parse_shares({**newer, 'name': 'no name', 'allocations': 7}) == Holdings(None, 'g', 'p')
    assert parse_shares({**newer, 'group': {'name': 7}, 'project_id': 7}) == Holdings('web', None, '', RESOURCES)
    # No quota was charged for a request that eschedule would not have written.
    assert parse_shares(make_request(image=7, name='web', group=GROUP, project_id='p')) == Holdings('web', 'g')
    assert get_holdings(InvalidRequest(INSTANCE, 'no', Holdings('web'))) == Holdings('web')


def test_valid_request_reports_its_shares() -> None:
    assert isinstance(result := parse_value(make_request(name='web', group=GROUP, project_id='p')), Request)
    assert get_holdings(result) == Holdings('web', 'g', 'p', RESOURCES)
    assert isinstance(plain := parse_value(make_request(project_id='p')), Request)
    assert get_holdings(plain) == Holdings(None, None, 'p', RESOURCES)


def test_largest_allowed_request_is_accepted() -> None:
    ssh_keys = ['ssh-rsa ' + 'A' * 992] * (MAX_SSH_KEYS_BYTES // 1000)
    value = make_request(
        ssh_keys=ssh_keys, user_data=base64.b64encode(b'\xff' * MAX_USER_DATA_BYTES).decode(), query='q' * 2000
    )
    result = parse_value(value)
    assert isinstance(result, Request)
    assert len(encode(result)) < order.MAX_REQUEST_BYTES
    record = make_record(COMPUTE, result, 'now')
    assert len(encode(record)) < 4000, 'it does not grow by them'
    assert 'AAAA' not in repr(result)
    assert 'xff' not in repr(result)


# Valid names of instances, and the words that are uuid prefixes.


UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'


def test_names_of_commands_are_reserved() -> None:
    assert {name.split()[0] for name in {*COMMANDS, *OLD_WORDS}} | PLANNED_WORDS == RESERVED


@pytest.mark.parametrize(
    'word',
    [
        *('adopt', 'release', 'resize', 'rebuild', 'protect', 'unprotect'),
        *('rename', 'check', 'stack', 'run', 'results', 'ui'),
    ],
)
def test_word_of_a_planned_command_is_no_name(word: str) -> None:
    with pytest.raises(ValueError, match='reserved for a command'):
        check_name(word)


@given(st.text(max_size=70))
def test_valid_name_is_a_label_and_not_a_uuid(text: str) -> None:
    try:
        check_name(text)
    except ValueError:
        return
    assert re.fullmatch('[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?', text)
    assert is_label(text)
    assert len(text.replace('-', '')) < 32 or parse_uuid_prefix(text) is None


@given(st.uuids(), st.integers(4, 35), st.booleans())
def test_uuid_prefix_of_any_uuid(number: uuid.UUID, length: int, dashes: bool) -> None:
    beginning = str(number)[:length]
    prefix = parse_uuid_prefix(beginning if dashes else beginning.replace('-', ''))
    if prefix is None:
        assert len(beginning.replace('-', '')) < 4
    else:
        assert str(number).startswith(prefix)
        assert prefix == beginning.rstrip('-')
