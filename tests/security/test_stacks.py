"""Malformed values of /stacks/<name>, and stacks in requests: refused in one sentence, and no instance is harmed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ecomp.errors import Unreadable
from ecomp.model import keys, stack
from ecomp.model.json_object import MAX_DEPTH
from ecomp.model.order import InvalidRequest, parse_request
from ecomp.model.stack import MAX_INCARNATION
from ecomp.scheduler.queries.stacks import load_stack
from tests.kit.audit import run_audit
from tests.kit.commands import Control
from tests.kit.hostile import COMPUTE, HOSTILE_NAMES, INSTANCE, OTHER_UUID, make_request
from tests.kit.invariants import read_allocations
from tests.kit.stacks import list_instances, write_stack
from tests.kit.store_client import open_store
from tests.kit.story import assert_one_line
from tests.security.mutants import make_nested

KEY = keys.stack('shop')
ENTRY = {'incarnation': 1, 'compute': COMPUTE}
PLACE = stack.Stack('shop', OTHER_UUID).make_place('web/2', 7)


def make_value(**fields: Any) -> bytes:
    return json.dumps({'version': 1, 'epoch': OTHER_UUID, 'entries': {}, **fields}).encode()


def make_entries(name: str, **fields: Any) -> bytes:
    return make_value(entries={name: {**ENTRY, **fields}})


# (value, reason of its refusal)
REFUSED: list[tuple[bytes, str]] = [
    (b'', 'not JSON'),
    (b'\0', 'not JSON'),
    (b'\xff\xfe' + make_value(), 'not text in UTF-8'),
    (b'\xef\xbb\xbf' + make_value(), 'not JSON'),
    (make_value()[:-1], 'not JSON'),
    (b'null', 'expected a JSON object'),
    (b'[' * 100_000, 'nested too deeply'),
    (make_value(entries=make_nested(MAX_DEPTH)), 'nested too deeply'),
    (make_value(junk=make_nested(MAX_DEPTH)), 'nested too deeply'),
    (make_value(junk='x' * 1_499_900), 'the limit is'),
    (b'x' * 1_500_000, 'the limit is'),
    (make_value().replace(b'{}', b'{"a/1": 1, "a/1": 1}'), 'a duplicate key'),
    (make_value(version=2), 'a newer ecomp may read it'),
    (make_value(epoch='\x1b[2J\n' + OTHER_UUID), 'epoch is not a uuid'),
    (make_value(epoch=OTHER_UUID.upper()), 'epoch is not a uuid'),
    (make_value(floor=2**63), 'floor: expected a number'),
    (make_value(floor=10**400), 'floor: expected a number'),
    *((make_entries('web/1', incarnation=number), 'incarnation: expected') for number in (10**400, -1, 1.0, 2**31 + 1)),
    (make_entries('web/1', incarnation='NUMBER').replace(b'"NUMBER"', b'1e999'), 'the number 1e999 is too large'),
    (make_entries('web/1', incarnation='NUMBER').replace(b'"NUMBER"', b'9' * 5000), 'a number of 5000 digits'),
    *((make_entries('web/1', compute=name), "entry 'web/1' is malformed") for name in HOSTILE_NAMES),
    *(
        (make_entries(name), 'is malformed')
        for name in (
            *('', '/', 'web/1\n', 'web/\u0661', 'web/+1', 'web/1e1', 'web/1 ', '../../hosts/1', 'w\x00b/1', '\ud800/1'),
            *('\x1b]0;x\x07\x1b[2J/1', '$(reboot)/1', 'x' * 100_000 + '/1', 'web/' + '9' * 5000),
        )
    ),
]


@pytest.mark.fast
@pytest.mark.parametrize(('value', 'reason'), REFUSED, ids=range(len(REFUSED)))
def test_malformed_stack_is_refused_with_a_short_reason(value: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match='.') as error:
        stack.from_json('shop', value)
    assert reason in str(error.value)
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()


@pytest.mark.fast
@pytest.mark.parametrize('name', ['', 'a' * 31, 'my-shop', '../x', 'shop\n', '\ud800', 'Shop'])
def test_stack_of_an_invalid_name_is_refused(name: str) -> None:
    """Its key can be written by anybody, and its name would be part of the names of instances."""
    with pytest.raises(ValueError, match='not a valid stack name'):
        stack.from_json(name, make_value())
    with pytest.raises(ValueError, match='not a valid stack name'):
        stack.parse_place({**PLACE._asdict(), 'name': name})


@pytest.mark.fast
@pytest.mark.parametrize(
    'fields',
    [
        *({name: wrong} for name in ('number', 'incarnation') for wrong in (0, -1, True, 1.0, '1', None, 10**400, [1])),
        {'number': stack.MAX_STACK_SIZE + 1},
        {'incarnation': MAX_INCARNATION + 1},
        *({name: wrong} for name in ('name', 'member', 'epoch') for wrong in (None, 7, '', '-', '../x', '\x1b[2J', [])),
    ],
)
def test_request_with_a_malformed_stack_is_invalid(fields: dict[str, object]) -> None:
    request = make_request(stack={**PLACE._asdict(), **fields})
    parsed = parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), json.dumps(request).encode())
    assert isinstance(parsed, InvalidRequest)
    assert parsed.reason.startswith('stack: ') or 'is not a valid' in parsed.reason
    assert parsed.reason.isprintable()


@pytest.mark.usefixtures('compute')
def test_malformed_stack_is_refused_by_all_commands_and_harms_no_instance(cluster: Control) -> None:
    path = write_stack(cluster, {'db': {}, 'web': {}})
    assert cluster.eschedule('apply', path, '--wait').code == 0
    before, good = list_instances(cluster), cluster.etcd.get(KEY) or b''
    commands = [
        ('apply', path),
        ('apply', path, '--dry-run'),
        ('apply', path, '--prune', '--replace-all', '--yes'),
        ('list', '--stack', 'shop'),
        ('stop', '--stack', 'shop'),
        ('destroy', '--file', path, '--yes'),
        ('destroy', '--stack', 'shop', '--yes'),
    ]
    for value in (b'x' * 1_500_000, b'[' * 100_000, b'\xff', make_entries('\x1b]0;x\x07\x1b[2J/1')):
        cluster.etcd.put(KEY, value)
        with open_store(cluster.etcd.endpoint) as store, pytest.raises(Unreadable):
            load_stack(store, 'shop')
        for words in commands:
            result = cluster.eschedule(*words)
            line = assert_one_line(result, 1, KEY)
            assert (line.isprintable(), len(line) < 400, result.stdout) == (True, True, ''), result
        (finding,) = run_audit(cluster)
        assert (finding['code'], finding['subject']) == ('stack-unreadable', 'shop')
        assert finding['sentence'].startswith(f'{KEY} is malformed: ')
        assert finding['sentence'].isprintable()
        assert cluster.eschedule('list').code == 0
    assert list_instances(cluster) == before
    assert read_allocations(cluster).keys() == set(before.values())
    # A malformed stack keeps nobody from destroying its instances.
    assert cluster.eschedule('destroy', 'shop-db', '--wait').code == 0
    # As the audit says: without the key, the stack is restored.
    cluster.etcd.delete(KEY)
    assert cluster.eschedule('apply', path, '--wait').code == 0
    after = list_instances(cluster)
    assert (after.keys(), after['shop-web']) == (before.keys(), before['shop-web'])
    assert json.loads(cluster.etcd.get(KEY) or b'')['epoch'] == json.loads(good)['epoch']
