"""Requests, names and uuid prefixes: what is accepted, and why the rest is refused."""

from __future__ import annotations

import base64
import json
import re
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecomp.cli.commands import COMMANDS, PLANNED
from ecomp.model import keys
from ecomp.model.choose import Why
from ecomp.model.command_names import RESERVED
from ecomp.model.group import ANTI_AFFINITY, Membership
from ecomp.model.guest import KEYS_LIMIT, USER_DATA_LIMIT
from ecomp.model.order import (
    SIZE_LIMIT,
    Invalid,
    Power,
    Request,
    Shares,
    name_to_json,
    named,
    parse_request,
    shares,
    to_json,
)
from ecomp.model.record import new_record
from ecomp.model.record import to_json as record_to_json
from ecomp.model.text import check_name, is_label, is_name, uuid_prefix
from tests.kit.hostile import (
    ALLOCATIONS,
    COMPUTE,
    HOSTILE,
    IMAGE,
    INSTANCE,
    JSON,
    NAMES,
    OTHER,
    RESOURCES,
    XML,
    request,
)

# Values of /hosts/<compute>/<instance>: current requests and those of 2019; others are refused with a reason.


ETCD_LIMIT = 1_500_000  # etcd's limit is 1.5 MiB, with the rest of the transaction
KEY = keys.request(COMPUTE, INSTANCE)


def parsed(value: bytes | str | dict[str, Any], key: str = KEY) -> Request | Invalid:
    if isinstance(value, dict):
        value = json.dumps(value)
    return parse_request(COMPUTE, key, value.encode() if isinstance(value, str) else value)


def test_a_request_of_2019_is_taken_as_it_is() -> None:
    # The 2019 eschedule copied its claim and added two fields: no version, no query, no stages.
    message = {
        'allocations': ALLOCATIONS,
        'user_id': '3f0a7b59-6b93-4ca7-8d47-4ac21e5e8d1c',
        'project_id': 'b1e5ae4a-9f6f-4c0c-9f92-bb3b5d8e9a11',
        'consumer_generation': None,
        'instance': INSTANCE,
        'image': IMAGE,
    }
    result = parsed(message)
    assert isinstance(result, Request)
    assert not result.is_tombstone
    assert result.allocations == {COMPUTE: RESOURCES}
    assert (result.instance, result.image, result.query) == (INSTANCE, IMAGE, None)
    assert result.user_id == message['user_id']


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
    result = parsed(message)
    assert isinstance(result, Request)
    assert result.is_tombstone
    assert result.image is None


def test_a_disk_may_come_from_a_shared_provider() -> None:
    allocations = {COMPUTE: {'resources': {'VCPU': 1, 'MEMORY_MB': 256}}, OTHER: {'resources': {'DISK_GB': 1}}}
    result = parsed(request(allocations=allocations))
    assert isinstance(result, Request)
    assert result.allocations[OTHER] == {'DISK_GB': 1}


def test_what_is_asked_of_its_power() -> None:
    assert isinstance(plain := parsed(request()), Request)
    assert plain.power is None
    assert 'power' not in json.loads(to_json(plain))
    power = {'action': 'reboot', 'id': OTHER}
    result = parsed(request(power=power))
    assert isinstance(result, Request)
    assert result.power == Power('reboot', OTHER)
    assert json.loads(to_json(result))['power'] == power
    assert parsed(to_json(result)) == result


@pytest.mark.parametrize('junk', [7, [], {}, {'weigh': 7, 'weight': 1, 'of': 1}, {'weigh': 'x', 'of': '1'}])
def test_why_it_is_there_is_passed_over_where_it_says_nothing(junk: object) -> None:
    result = parsed(request(why=junk))
    assert isinstance(result, Request)
    assert result.why is None


def test_groups_resources_and_reasons_are_read_as_they_were_written() -> None:
    group, why = Membership('web', ANTI_AFFINITY, True), Why('spread', 0.75, 3)
    original = Request(INSTANCE, {COMPUTE: RESOURCES}, image=IMAGE, user_id='u', project_id='p', group=group, why=why)
    assert parsed(to_json(original)) == original
    tombstone = Request(INSTANCE, {}, image=None, user_id='u', project_id='p', group=group, left=RESOURCES)
    result = parsed(to_json(tombstone))
    assert isinstance(result, Request)
    assert (result.is_tombstone, result.resources, result.group) == (True, RESOURCES, group)


@pytest.mark.parametrize(
    ('value', 'reason'), HOSTILE, ids=[f'{n}-{reason[:30]}' for n, (_, reason) in enumerate(HOSTILE)]
)
def test_what_cannot_be_understood_is_refused_with_its_reason(value: bytes | str | dict[str, Any], reason: str) -> None:
    result = parsed(value)
    assert isinstance(result, Invalid)
    assert reason in result.reason
    assert '\n' not in result.reason
    assert 'canary' not in result.reason
    assert result.instance == INSTANCE


GROUP = {'name': 'g', 'policy': ANTI_AFFINITY, 'strict': True}


def shared(value: dict[str, Any]) -> Shares:
    result = parsed(value)
    assert isinstance(result, Invalid)
    return result.shares


def test_what_is_refused_says_what_it_was_delivered_with() -> None:
    newer = request(version=2, name='web', group=GROUP, project_id='p')
    assert shared(newer) == Shares('web', 'g', 'p', RESOURCES)
    tombstone = {**newer, 'allocations': {}, 'image': None, 'resources': RESOURCES}
    assert shared(tombstone) == Shares('web', 'g', 'p', RESOURCES)
    # Valid fields count although others are malformed.
    assert shared({**newer, 'name': 'no name', 'allocations': 7}) == Shares(None, 'g', 'p')
    assert shared({**newer, 'group': {'name': 7}, 'project_id': 7}) == Shares('web', None, '', RESOURCES)
    # No quota was charged for a request that eschedule would not have written.
    assert shared(request(image=7, name='web', group=GROUP, project_id='p')) == Shares('web', 'g')
    assert shares(Invalid(INSTANCE, 'no', Shares('web'))) == Shares('web')


def test_what_is_understood_says_it_too() -> None:
    assert isinstance(result := parsed(request(name='web', group=GROUP, project_id='p')), Request)
    assert shares(result) == Shares('web', 'g', 'p', RESOURCES)
    assert isinstance(plain := parsed(request(project_id='p')), Request)
    assert shares(plain) == Shares(None, None, 'p', RESOURCES)


@pytest.mark.parametrize('name', NAMES)
def test_a_key_that_names_no_uuid_is_refused(name: str) -> None:
    # The uuid becomes a file name, a domain name and a consumer.
    result = parsed(request(instance=name), keys.request_prefix(COMPUTE) + name)
    assert isinstance(result, Invalid)
    assert 'not a uuid' in result.reason


def test_a_reason_is_short_however_long_the_value() -> None:
    # The reason is written to the record and to the log.
    result = parsed(request(instance='é' * (SIZE_LIMIT // 8)))
    assert isinstance(result, Invalid)
    assert len(result.reason) < 1000


def test_what_is_taken_fits_into_a_record() -> None:
    # Otherwise etcd refuses the record each time, and the request is neither carried out nor refused. The text is raw
    # UTF-8 here and \u-escaped in the record, where it is three times as long.
    room = SIZE_LIMIT - len(json.dumps(request(query='')).encode())
    message = json.dumps(request(query='é' * (room // 2)), ensure_ascii=False).encode()
    assert len(message) > SIZE_LIMIT - 10
    result = parsed(message)
    if isinstance(result, Request):
        assert len(record_to_json(new_record(COMPUTE, result, 'now'))) < ETCD_LIMIT


@pytest.mark.parametrize('text', XML)
def test_text_that_means_something_elsewhere_stays_text(text: str) -> None:
    result = parsed(request(user_id=text, project_id=text, query=text, stages={text: text}))
    assert isinstance(result, Request)
    assert (result.user_id, result.query, result.stages) == (text, text, {text: text})
    parsed_again = parsed(to_json(result))
    assert parsed_again == result


@given(st.binary(max_size=300) | JSON.map(json.dumps).map(str.encode))
@settings(max_examples=200)
def test_no_bytes_raise(value: bytes) -> None:
    assert isinstance(parsed(value), Request | Invalid)


@given(st.sampled_from([*request(), 'stages', 'query', 'name', 'ssh_keys', 'user_data']), JSON)
def test_no_field_raises_whatever_it_holds(name: str, value: Any) -> None:
    result = parsed(request(**{name: value}))
    if isinstance(result, Request):
        assert parsed(to_json(result)) == result


PROVIDERS = st.sampled_from([COMPUTE, OTHER, '', '../x'])


@given(st.dictionaries(PROVIDERS, st.dictionaries(st.text(max_size=9), JSON, max_size=3)))
def test_no_allocations_raise(allocations: Any) -> None:
    result = parsed(request(allocations={name: {'resources': amounts} for name, amounts in allocations.items()}))
    assert isinstance(result, Invalid)


@given(st.text(max_size=60), st.binary(max_size=60))
def test_no_key_raises(name: str, value: bytes) -> None:
    assert isinstance(parse_request(COMPUTE, keys.request_prefix(COMPUTE) + name, value), Invalid)


@given(
    st.dictionaries(st.sampled_from(['VCPU', 'MEMORY_MB', 'DISK_GB', 'CUSTOM_X']), st.integers(1, 2**31 - 1)),
    st.text(max_size=20),
    st.none() | st.text(min_size=1, max_size=20),
    st.dictionaries(st.sampled_from(['requested', 'scheduled']), st.text(max_size=30)),
    st.none() | st.just('web1'),
    st.none() | st.binary(min_size=1, max_size=30),
)
def test_what_is_written_is_what_is_read(
    resources: dict[str, int], who: str, query: str | None, stages: dict[str, str], name: str | None, data: bytes | None
) -> None:
    ssh_keys = ('ssh-rsa A', 'ssh-rsa B mé') if data else None
    fields = {'name': name, 'ssh_keys': ssh_keys, 'user_data': data}
    original = Request(
        INSTANCE,
        {COMPUTE: {**RESOURCES, **resources}},
        image=IMAGE,
        user_id=who,
        project_id=who,
        query=query,
        stages=stages,
        **fields,
    )
    assert parsed(to_json(original)) == original
    tombstone = Request(INSTANCE, {}, image=None, user_id=who, project_id=who, query=query, stages=stages, name=name)
    assert parsed(to_json(tombstone)) == tombstone


def test_as_much_as_may_be_given_is_taken() -> None:
    ssh_keys = ['ssh-rsa ' + 'A' * 992] * (KEYS_LIMIT // 1000)
    value = request(ssh_keys=ssh_keys, user_data=base64.b64encode(b'\xff' * USER_DATA_LIMIT).decode(), query='q' * 2000)
    result = parsed(value)
    assert isinstance(result, Request)
    assert len(to_json(result)) < SIZE_LIMIT
    record = new_record(COMPUTE, result, 'now')
    assert len(record_to_json(record)) < 4000, 'it does not grow by them'
    assert 'AAAA' not in repr(result)
    assert 'xff' not in repr(result)


def test_what_a_name_key_says() -> None:
    assert named(name_to_json(INSTANCE).encode()) == INSTANCE
    for value in (b'', b'[]', b'{}', b'{"instance": 7}', b'{"instance": "../x"}', b'\xff'):
        with pytest.raises(ValueError, match='.'):
            named(value)


def test_2019s_fields_keep_their_names() -> None:
    result = parsed(request())
    assert isinstance(result, Request)
    written = json.loads(to_json(result))
    names = ('allocations', 'instance', 'image', 'user_id', 'project_id', 'consumer_generation')
    assert {name: written[name] for name in names} == {name: request()[name] for name in names}
    assert written['version'] == 1


# Valid names of instances, and the words that are uuid prefixes.


UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
HEXADECIMAL = ['cafe', 'db1', 'db-1', 'dc1', '7', 'dead-beef', 'd578fb7c', UUID[:-1]]


@pytest.mark.parametrize(
    'name', ['web1', 'w', 'a-0-z', '1web', 'x' * 63, 'database', 'facade1g', 'xn--bcher-kva', *HEXADECIMAL]
)
def test_a_name(name: str) -> None:
    assert check_name(name) == name
    assert is_name(name)


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('', 'becomes a host name'),
        ('-web', 'no - at either end'),
        ('web-', 'no - at either end'),
        ('we b', '1 to 63 letters'),
        ('web.example', '1 to 63 letters'),
        ('web_1', '1 to 63 letters'),
        ('x' * 64, '1 to 63 letters'),
        ('wéb', '1 to 63 letters'),
        ('web\n', '1 to 63 letters'),
        ('\x1b[2J', '1 to 63 letters'),
        ('../etc', '1 to 63 letters'),
        ('resources=vcpu', '1 to 63 letters'),
        ('Web1', 'use lower case'),
        (UUID, 'looks like a uuid'),
        (UUID.replace('-', ''), 'looks like a uuid'),
        ('a' * 33, 'looks like a uuid'),
        *((word, 'is reserved for a command') for word in ('list', 'reboot', 'ssh-config', 'what-if', 'rename', 'set')),
    ],
)
def test_no_name_and_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        check_name(text)
    assert str(caught.value).isprintable()
    assert not is_name(text)


def test_no_instance_can_be_called_as_a_command_or_a_planned_one_is() -> None:
    assert {name.split()[0] for name in COMMANDS} | PLANNED == RESERVED


@given(st.text(max_size=70))
def test_what_passes_is_a_label_and_no_uuid(text: str) -> None:
    try:
        check_name(text)
    except ValueError:
        return
    assert re.fullmatch('[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?', text)
    assert is_label(text)
    assert len(text.replace('-', '')) < 32 or uuid_prefix(text) is None


@pytest.mark.parametrize(
    ('word', 'prefix'),
    [
        ('d578', 'd578'),
        ('D578FB7C', 'd578fb7c'),
        ('d578fb7c-', 'd578fb7c'),
        ('d578fb7c77', 'd578fb7c-77'),
        ('d578fb7c-77', 'd578fb7c-77'),
        (UUID[:-1], UUID[:-1]),
        ('d57', None),
        ('d5-78', None),
        ('d578fb7c-7-787', None),
        ('d578-', None),
        ('-d578', None),
        ('----', None),
        ('d57g', None),
        (UUID, None),
        (UUID.replace('-', ''), None),
        ('', None),
        ('d578\n', None),
        ('１２３４', None),
    ],
)
def test_the_beginning_of_a_uuid(word: str, prefix: str | None) -> None:
    assert uuid_prefix(word) == prefix


@given(st.uuids(), st.integers(4, 35), st.booleans())
def test_every_beginning_is_one(number: uuid.UUID, length: int, dashes: bool) -> None:
    beginning = str(number)[:length]
    prefix = uuid_prefix(beginning if dashes else beginning.replace('-', ''))
    if prefix is None:
        assert len(beginning.replace('-', '')) < 4
    else:
        assert str(number).startswith(prefix)
        assert prefix == beginning.rstrip('-')
