"""Malformed requests, and texts that are special elsewhere (paths, XML, shells, terminals)."""

from __future__ import annotations

import base64
import json
from typing import Any

from ecomp.model.order import MAX_REQUEST_BYTES
from ecomp.model.user_data import MAX_USER_DATA_BYTES

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
OTHER_UUID = '0a1b2c3d-0000-4000-8000-000000000001'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
IMAGE = 'http://images.example/cirros.img'
RESOURCES = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 256}
ALLOCATIONS = {COMPUTE: {'resources': RESOURCES}}


def make_request(**fields: Any) -> dict[str, Any]:
    return {
        'version': 1,
        'instance': INSTANCE,
        'allocations': ALLOCATIONS,
        'image': IMAGE,
        'user_id': 'a user',
        'project_id': 'a project',
        'consumer_generation': None,
        **fields,
    }


# (value, reason of its refusal). Values of a wrong type are in tests/security/fields.txt.
HOSTILE: list[tuple[bytes | str | dict[str, Any], str]] = [
    (b'', 'not JSON'),
    (b'\xff\xfe{}', 'not text in UTF-8'),
    ('not JSON', 'not JSON'),
    ('{"a": 1', 'not JSON'),
    (json.dumps(make_request()) + ' and more', 'not JSON'),
    ('null', 'expected a JSON object, not NoneType'),
    ('[]', 'expected a JSON object, not list'),
    ('"text"', 'expected a JSON object, not str'),
    ('[' * 100_000, 'nested too deeply'),
    ('{"a":' * 50_000 + '1' + '}' * 50_000, 'nested too deeply'),
    (b' ' * (MAX_REQUEST_BYTES + 1), f'the limit is {MAX_REQUEST_BYTES}'),
    (b'x' * 2**20, f'the limit is {MAX_REQUEST_BYTES}'),
    ('{"version": NaN}', 'NaN is not a JSON number'),
    ('{"version": Infinity}', 'Infinity is not a JSON number'),
    ('{"version": -Infinity}', '-Infinity is not a JSON number'),
    ('{"version": ' + '9' * 5000 + '}', 'a number of 5000 digits'),
    ('{"why": {"weight": 1e999}}', 'the number 1e999 is too large'),
    ('{"version": 1, "version": 1}', 'a duplicate key'),
    ('{"allocations": {"' + COMPUTE + '": {}, "' + COMPUTE + '": {}}}', 'a duplicate key'),
    ({}, 'instance is missing'),
    (make_request(power={'action': 'explode', 'id': OTHER_UUID}), "'explode'"),
    (make_request(version=2), 'version 2 of the request is not supported'),
    (make_request(instance=OTHER_UUID), f'instance: {OTHER_UUID!r} differs from {INSTANCE!r} in its key'),
    (
        make_request(allocations={OTHER_UUID: {'resources': RESOURCES}}),
        f'are for {OTHER_UUID}, not for this compute {COMPUTE}',
    ),
    (make_request(allocations={COMPUTE: {'resources': {'VCPU': 1}}}), 'lack MEMORY_MB, DISK_GB'),
    *((make_request(image=wrong), 'must be a URL') for wrong in ('', '/etc/shadow', 'ftp://host/x', '--os-variant=x')),
    (make_request(image='http://'), 'must name a host'),
    *((make_request(image=f'http://host/{wrong}'), 'a space or a control character') for wrong in ('a b', '\x00')),
    (make_request(image='http://host/\ud800'), 'not a URL'),
    (make_request(image='http://host/' + 'x' * 2048), 'more than 2048'),
    (make_request(allocations={}, image=IMAGE), 'allocations are {}, but image is not null'),
    *((make_request(name=wrong), 'is not a valid host name') for wrong in ('Web 1', '../../x', 'x' * 64)),
    *(
        (make_request(ssh_keys=wrong), 'ssh_keys: expected a list of public keys')
        for wrong in ('ssh-ed25519 canary', ['ssh-ed25519 a\ncanary'], [''], [7])
    ),
    *(
        (make_request(user_data=wrong), 'user_data: expected base64')
        for wrong in ({'canary': 1}, '#!/bin/sh canary', 'canary\ud800', '')
    ),
    (
        make_request(user_data=base64.b64encode(bytes(MAX_USER_DATA_BYTES + 1)).decode()),
        f'the limit is {MAX_USER_DATA_BYTES}',
    ),
    *(
        (make_request(user_data_sha256=junk), 'user_data_sha256: expected 64 hexadecimal digits')
        for junk in ('', 'canary', 7, ['canary'], 'f' * 63, 'F' * 64, '../' + 'f' * 61, 'f' * 64 + '\n')
    ),
]


HOSTILE_TEXTS = [
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
