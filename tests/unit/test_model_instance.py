"""What may stand at /hosts/<compute>/<instance>: requests of today and of 2019; all else is refused in words."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys
from ecomp.model.choose import Why
from ecomp.model.group import ANTI_AFFINITY, Membership
from ecomp.model.guest_data import KEYS_LIMIT, USER_DATA_LIMIT
from ecomp.model.instance import SIZE_LIMIT, Invalid, Request, name_to_json, named, parse_request, to_json
from ecomp.model.power import Power
from ecomp.model.record import new_record
from ecomp.model.record import to_json as record_to_json

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
OTHER = '0a1b2c3d-0000-4000-8000-000000000001'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
IMAGE = 'http://images.example/cirros.img'
RESOURCES = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 256}
ALLOCATIONS = {COMPUTE: {'resources': RESOURCES}}
ETCD_LIMIT = 1_500_000  # 1.5 MiB, and some for the rest of the transaction
KEY = keys.host(COMPUTE, INSTANCE)


def request(**changed: Any) -> dict[str, Any]:
    return {
        'version': 1,
        'instance': INSTANCE,
        'allocations': ALLOCATIONS,
        'image': IMAGE,
        'user_id': 'a user',
        'project_id': 'a project',
        'consumer_generation': None,
        **changed,
    }


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in request().items() if name not in names}


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
    found = parsed(message)
    assert isinstance(found, Request)
    assert not found.is_tombstone
    assert found.allocations == {COMPUTE: RESOURCES}
    assert (found.instance, found.image, found.query) == (INSTANCE, IMAGE, None)
    assert found.user_id == message['user_id']


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
    found = parsed(message)
    assert isinstance(found, Request)
    assert found.is_tombstone
    assert found.image is None


def test_a_disk_may_come_from_a_shared_provider() -> None:
    allocations = {COMPUTE: {'resources': {'VCPU': 1, 'MEMORY_MB': 256}}, OTHER: {'resources': {'DISK_GB': 1}}}
    found = parsed(request(allocations=allocations))
    assert isinstance(found, Request)
    assert found.allocations[OTHER] == {'DISK_GB': 1}


def test_what_is_asked_of_its_power() -> None:
    assert isinstance(plain := parsed(request()), Request)
    assert plain.power is None
    assert 'power' not in json.loads(to_json(plain))
    asked = {'action': 'reboot', 'id': OTHER}
    found = parsed(request(power=asked))
    assert isinstance(found, Request)
    assert found.power == Power('reboot', OTHER)
    assert json.loads(to_json(found))['power'] == asked
    assert parsed(to_json(found)) == found


# What each value is refused for.
HOSTILE: list[tuple[bytes | str | dict[str, Any], str]] = [
    (b'', 'not JSON'),
    (b'\xff\xfe{}', 'not text in UTF-8'),
    ('not JSON', 'not JSON'),
    ('{"a": 1', 'not JSON'),
    (json.dumps(request()) + ' and more', 'not JSON'),
    ('null', 'expected a JSON object, not NoneType'),
    ('[]', 'expected a JSON object, not list'),
    ('"text"', 'expected a JSON object, not str'),
    ('[' * 100_000, 'nested too deeply'),
    ('{"a":' * 50_000 + '1' + '}' * 50_000, 'nested too deeply'),
    (b' ' * (SIZE_LIMIT + 1), f'the limit is {SIZE_LIMIT}'),
    (b'x' * 2**20, f'the limit is {SIZE_LIMIT}'),
    ('{"version": NaN}', 'NaN is not a number'),
    ('{"version": Infinity}', 'Infinity is not a number'),
    ('{"version": -Infinity}', '-Infinity is not a number'),
    ('{"version": ' + '9' * 5000 + '}', '4300 digits'),
    ('{"version": 1, "version": 1}', 'a key stands twice'),
    ('{"allocations": {"' + COMPUTE + '": {}, "' + COMPUTE + '": {}}}', 'a key stands twice'),
    ({}, 'lacks allocations, instance, image'),
    (without('allocations'), 'lacks allocations'),
    (without('instance'), 'lacks instance'),
    (without('image'), 'lacks image'),
    *((request(power=wrong), 'power: expected') for wrong in (7, 'stop', [], {}, {'action': 'stop'}, {'id': OTHER})),
    (request(power={'action': 'explode', 'id': OTHER}), "'explode'"),
    (request(power={'action': ['stop'], 'id': OTHER}), 'power: expected'),
    (request(power={'action': 'stop', 'id': 'now'}), "'now'"),
    (request(power={'action': 'stop', 'id': 7}), 'power: expected'),
    (request(version=2), 'version 2 of the request is not known here'),
    (request(version=0), 'version 0'),
    (request(version=-1), 'version -1'),
    (request(version='1'), "version '1'"),
    (request(version=True), 'version True'),
    (request(version=1.0), 'version 1.0'),
    (request(version=None), 'version None'),
    (request(instance=OTHER), f'for instance {OTHER!r} but its key says {INSTANCE}'),
    (request(instance=INSTANCE.upper()), 'but its key says'),
    (request(instance=None), 'for instance None'),
    (request(instance=['x']), 'but its key says'),
    (request(allocations=None), 'expected an object, not NoneType'),
    (request(allocations=[]), 'expected an object, not list'),
    (request(allocations={COMPUTE: None}), 'has no resources'),
    (request(allocations={COMPUTE: []}), 'has no resources'),
    (request(allocations={COMPUTE: {}}), 'has no resources'),
    (request(allocations={COMPUTE: {'resources': {}}}), 'has no resources'),
    (request(allocations={COMPUTE: {'resources': 7}}), 'has no resources'),
    (request(allocations={COMPUTE: {'resources': {**RESOURCES, 'VCPU': 0}}}), 'VCPU is 0'),
    (request(allocations={COMPUTE: {'resources': {**RESOURCES, 'VCPU': -1}}}), 'VCPU is -1'),
    (request(allocations={COMPUTE: {'resources': {**RESOURCES, 'VCPU': True}}}), 'VCPU is True'),
    (request(allocations={COMPUTE: {'resources': {**RESOURCES, 'VCPU': 1.5}}}), 'VCPU is 1.5'),
    (request(allocations={COMPUTE: {'resources': {**RESOURCES, 'VCPU': '1'}}}), "VCPU is '1'"),
    (request(allocations={COMPUTE: {'resources': {**RESOURCES, 'VCPU': None}}}), 'VCPU is None'),
    (request(allocations={COMPUTE: {'resources': {**RESOURCES, 'VCPU': 2**31}}}), 'not a whole number from 1 to'),
    (request(allocations={COMPUTE: {'resources': {**RESOURCES, 'VCPU': 10**100}}}), 'not a whole number from 1 to'),
    (request(allocations={OTHER: {'resources': RESOURCES}}), f'are for {OTHER}, not for this compute {COMPUTE}'),
    (request(allocations={COMPUTE: {'resources': {'VCPU': 1}}}), 'have no MEMORY_MB, DISK_GB'),
    (request(image=None), 'image: expected a URL, not None'),
    (request(image=7), 'image: expected a URL, not 7'),
    (request(image=''), 'must be a URL'),
    (request(image='/etc/shadow'), 'must be a URL'),
    (request(image='ftp://host/x'), 'must be a URL'),
    (request(image='--os-variant=x'), 'must be a URL'),
    (request(image='http://'), 'names no host'),
    (request(image='http://host/a b'), 'a space or a control character'),
    (request(image='http://host/\x00'), 'a space or a control character'),
    (request(image='http://host/\ud800'), 'not a URL'),
    (request(image='http://host/' + 'x' * 2048), 'more than 2048'),
    (request(allocations={}, image=IMAGE), 'allocations {} with an image'),
    (request(user_id=7), 'user_id: expected text, not int'),
    (request(project_id=['x']), 'project_id: expected text, not list'),
    (request(query={'a': 1}), 'query: expected text, not dict'),
    (request(stages=[]), 'stages: expected an object'),
    (request(stages={'requested': 7}), 'stages: expected an object'),
    (request(stages=None), 'stages: expected an object'),
    (request(name=7), 'name: expected text, not int'),
    (request(name='Web 1'), 'is no host name'),
    (request(name='../../x'), 'is no host name'),
    (request(name='x' * 64), 'is no host name'),
    (request(ssh_keys='ssh-ed25519 canary'), 'ssh_keys: expected a list of public keys'),
    (request(ssh_keys=['ssh-ed25519 a\ncanary']), 'ssh_keys: expected a list of public keys'),
    (request(ssh_keys=['']), 'ssh_keys: expected a list of public keys'),
    (request(ssh_keys=[7]), 'ssh_keys: expected a list of public keys'),
    (request(user_data={'canary': 1}), 'user_data: expected base64'),
    (request(user_data='#!/bin/sh canary'), 'user_data: expected base64'),
    (request(user_data='canary\ud800'), 'user_data: expected base64'),
    (request(user_data=''), 'user_data: expected base64'),
    (request(user_data=base64.b64encode(bytes(USER_DATA_LIMIT + 1)).decode()), f'the limit is {USER_DATA_LIMIT}'),
    *(
        (request(user_data_sha256=junk), 'user_data_sha256: expected 64 hexadecimal digits')
        for junk in ('', 'canary', 7, ['canary'], 'f' * 63, 'F' * 64, '../' + 'f' * 61, 'f' * 64 + '\n')
    ),
    *((request(count=junk), 'is no number of instances') for junk in (0, -1, True, 1.5, '3', None, [2])),
    *((request(group=junk), 'group: expected an object with a name') for junk in ('web', [], {}, {'name': 7})),
    (request(group={'name': 'web', 'policy': 'spread', 'strict': True}), "not a group: policy is 'spread'"),
    (request(group={'name': 'web', 'policy': 'affinity'}), "strict 'None'"),
    (request(group={'name': '../x', 'policy': 'affinity', 'strict': True}), 'is no name of a group'),
    *(
        (request(resources=junk), 'resources: expected an object of amounts')
        for junk in ([], {'VCPU': 0}, {'VCPU': True}, {'VCPU': '1'}, {'VCPU': 2**31}, None)
    ),
]


@pytest.mark.parametrize('junk', [7, [], {}, {'weigh': 7, 'weight': 1, 'of': 1}, {'weigh': 'x', 'of': '1'}])
def test_why_it_is_there_is_passed_over_where_it_says_nothing(junk: object) -> None:
    found = parsed(request(why=junk))
    assert isinstance(found, Request)
    assert found.why is None


def test_groups_resources_and_reasons_are_read_as_they_were_written() -> None:
    group, why = Membership('web', ANTI_AFFINITY, True), Why('spread', 0.75, 3)
    wanted = Request(INSTANCE, {COMPUTE: RESOURCES}, IMAGE, 'u', 'p', group=group, why=why)
    assert parsed(to_json(wanted)) == wanted
    tombstone = Request(INSTANCE, {}, None, 'u', 'p', group=group, left=RESOURCES)
    found = parsed(to_json(tombstone))
    assert isinstance(found, Request)
    assert (found.is_tombstone, found.resources, found.group) == (True, RESOURCES, group)


@pytest.mark.parametrize(
    ('value', 'reason'), HOSTILE, ids=[f'{n}-{reason[:30]}' for n, (_, reason) in enumerate(HOSTILE)]
)
def test_what_cannot_be_understood_is_refused_with_its_reason(value: bytes | str | dict[str, Any], reason: str) -> None:
    found = parsed(value)
    assert isinstance(found, Invalid)
    assert reason in found.reason
    assert '\n' not in found.reason
    assert 'canary' not in found.reason
    assert found.instance == INSTANCE


NAMES = [
    '../../etc/passwd',
    '..',
    '',
    INSTANCE.upper(),
    '{' + INSTANCE + '}',
    'urn:uuid:' + INSTANCE,
    INSTANCE.replace('-', ''),
    INSTANCE + '\n',
    ' ' + INSTANCE,
    '-x',
    'a b',
    '<disk/>',
    "\"/><source file='/etc/shadow'/>",
    'x' * 300,
    'd578fb7c-7787-4e73-b69a-a7b3ef9bf73а',  # the last letter is Cyrillic
    'd578fb7c\x00',
    '�',
]


@pytest.mark.parametrize('name', NAMES)
def test_a_key_that_names_no_uuid_is_refused(name: str) -> None:
    # It would become a file name, a domain's name, a consumer.
    found = parsed(request(instance=name), keys.host_prefix(COMPUTE) + name)
    assert isinstance(found, Invalid)
    assert 'not a uuid' in found.reason


def test_a_reason_is_short_however_long_the_value() -> None:
    # It goes into the record and into the log.
    found = parsed(request(instance='é' * (SIZE_LIMIT // 8)))
    assert isinstance(found, Invalid)
    assert len(found.reason) < 1000


def test_what_is_taken_fits_into_a_record() -> None:
    # Else etcd refuses the record for ever, and the request is neither carried out nor refused. The text is raw UTF-8
    # here and \u-escaped in the record: three times as long.
    room = SIZE_LIMIT - len(json.dumps(request(query='')).encode())
    message = json.dumps(request(query='é' * (room // 2)), ensure_ascii=False).encode()
    assert len(message) > SIZE_LIMIT - 10
    found = parsed(message)
    if isinstance(found, Request):
        assert len(record_to_json(new_record(COMPUTE, found, 'now'))) < ETCD_LIMIT


XML = [
    '<x/>',
    ']]>',
    '&x;',
    '"/><source file="/etc/shadow"/>',
    '\x00',
    '\x1b[2J',
    '$(reboot)',
    "'; --",
    '\ud800',
    '\r\n',
]


@pytest.mark.parametrize('text', XML)
def test_text_that_means_something_elsewhere_stays_text(text: str) -> None:
    found = parsed(request(user_id=text, project_id=text, query=text, stages={text: text}))
    assert isinstance(found, Request)
    assert (found.user_id, found.query, found.stages) == (text, text, {text: text})
    again = parsed(to_json(found))
    assert again == found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=300))
def test_no_bytes_raise(value: bytes) -> None:
    assert isinstance(parsed(value), Request | Invalid)


@given(JSON)
def test_no_json_raises(value: Any) -> None:
    assert isinstance(parsed(json.dumps(value)), Request | Invalid)


@given(st.sampled_from([*request(), 'stages', 'query', 'name', 'ssh_keys', 'user_data']), JSON)
def test_no_field_raises_whatever_it_holds(name: str, value: Any) -> None:
    found = parsed(request(**{name: value}))
    if isinstance(found, Request):
        assert parsed(to_json(found)) == found


@given(
    st.dictionaries(
        st.sampled_from([COMPUTE, OTHER, '', '../x']), st.dictionaries(st.text(max_size=9), JSON, max_size=3)
    )
)
def test_no_allocations_raise(allocations: Any) -> None:
    found = parsed(request(allocations={provider: {'resources': each} for provider, each in allocations.items()}))
    assert isinstance(found, Invalid)


@given(st.text(max_size=60), st.binary(max_size=60))
def test_no_key_raises(name: str, value: bytes) -> None:
    assert isinstance(parse_request(COMPUTE, keys.host_prefix(COMPUTE) + name, value), Invalid)


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
    given = {'name': name, 'ssh_keys': ssh_keys, 'user_data': data}
    asked = Request(INSTANCE, {COMPUTE: {**RESOURCES, **resources}}, IMAGE, who, who, query, stages, **given)
    assert parsed(to_json(asked)) == asked
    tombstone = Request(INSTANCE, {}, None, who, who, query, stages, name)
    assert parsed(to_json(tombstone)) == tombstone


def test_as_much_as_may_be_given_is_taken() -> None:
    ssh_keys = ['ssh-rsa ' + 'A' * 992] * (KEYS_LIMIT // 1000)
    most = request(ssh_keys=ssh_keys, user_data=base64.b64encode(b'\xff' * USER_DATA_LIMIT).decode(), query='q' * 2000)
    found = parsed(most)
    assert isinstance(found, Request)
    assert len(to_json(found)) < SIZE_LIMIT
    record = new_record(COMPUTE, found, 'now')
    assert len(record_to_json(record)) < 4000, 'it does not grow by them'
    assert 'AAAA' not in repr(found)
    assert 'xff' not in repr(found)


def test_what_a_name_key_says() -> None:
    assert named(name_to_json(INSTANCE).encode()) == INSTANCE
    for value in (b'', b'[]', b'{}', b'{"instance": 7}', b'{"instance": "../x"}', b'\xff'):
        with pytest.raises(ValueError, match='.'):
            named(value)


def test_2019s_fields_keep_their_names() -> None:
    asked = parsed(request())
    assert isinstance(asked, Request)
    written = json.loads(to_json(asked))
    of_2019 = ('allocations', 'instance', 'image', 'user_id', 'project_id', 'consumer_generation')
    assert {name: written[name] for name in of_2019} == {name: request()[name] for name in of_2019}
    assert written['version'] == 1
