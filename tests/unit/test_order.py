"""Requests, names and uuid prefixes: what is accepted, and why the rest is refused."""

from __future__ import annotations

import base64
import json
import re
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.commands import COMMANDS, PLANNED_WORDS
from ecomp.model import keys
from ecomp.model.choose import PlacementReason
from ecomp.model.command_names import RESERVED
from ecomp.model.group import ANTI_AFFINITY, Membership
from ecomp.model.guest import MAX_SSH_KEYS_BYTES, MAX_USER_DATA_BYTES
from ecomp.model.order import MAX_REQUEST_BYTES, Holdings, InvalidRequest, Request, get_holdings, parse_request, to_json
from ecomp.model.record import make_record
from ecomp.model.record import to_json as record_to_json
from ecomp.model.text import check_name, is_label, parse_uuid_prefix
from tests.kit.hostile import COMPUTE, HOSTILE, IMAGE, INSTANCE, OTHER_UUID, RESOURCES, make_request

KEY = keys.request(COMPUTE, INSTANCE)


def parse_value(value: bytes | str | dict[str, Any], key: str = KEY) -> Request | InvalidRequest:
    if isinstance(value, dict):
        value = json.dumps(value)
    return parse_request(COMPUTE, key, value.encode() if isinstance(value, str) else value)


def test_a_destroy_of_2019_is_a_tombstone() -> None:
    # The 2019 destroy took the body of GET /allocations/<uuid>, emptied it and added two fields.
    message = {
        'allocations': {},
        'consumer_generation': 1,
        'project_id': 'p',
        'user_id': 'u',
        'consumer_type': 'INSTANCE',
        'instance': INSTANCE,
        'image': None,
    }
    result = parse_value(message)
    assert isinstance(result, Request)
    assert result.is_tombstone
    assert result.image is None


def test_evacuated_instances_name_each_other() -> None:
    assert isinstance(plain := parse_value(make_request()), Request)
    assert {'replaces', 'replaced_by'}.isdisjoint(json.loads(to_json(plain)))
    value = make_request(replaces=OTHER_UUID, replaced_by=OTHER_UUID)
    assert isinstance(request := parse_value(value), Request)
    assert (request.replaces, request.replaced_by) == (OTHER_UUID, OTHER_UUID)
    assert parse_value(to_json(request)) == request
    stored = json.loads(record_to_json(make_record(COMPUTE, request, '')))
    assert (stored['replaces'], stored['replaced_by']) == (OTHER_UUID, OTHER_UUID)
    assert isinstance(parse_value(make_request(replaces='web')), InvalidRequest)


def test_group_resources_and_reason_round_trip() -> None:
    group, why = Membership('web', ANTI_AFFINITY, True), PlacementReason('spread', 0.75, 3)
    original = Request(INSTANCE, {COMPUTE: RESOURCES}, image=IMAGE, user_id='u', project_id='p', group=group, why=why)
    assert parse_value(to_json(original)) == original
    tombstone = Request(INSTANCE, {}, image=None, user_id='u', project_id='p', group=group, former_resources=RESOURCES)
    result = parse_value(to_json(tombstone))
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
    assert len(to_json(result)) < MAX_REQUEST_BYTES
    record = make_record(COMPUTE, result, 'now')
    assert len(record_to_json(record)) < 4000, 'it does not grow by them'
    assert 'AAAA' not in repr(result)
    assert 'xff' not in repr(result)


# Valid names of instances, and the words that are uuid prefixes.


UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'


def test_names_of_commands_are_reserved() -> None:
    assert {name.split()[0] for name in COMMANDS} | PLANNED_WORDS == RESERVED


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
