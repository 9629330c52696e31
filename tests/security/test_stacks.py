"""Malformed values of /stacks/<name>, and stacks in requests: refused in one sentence, and no instance is harmed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ecomp.errors import Unreadable
from ecomp.model import keys, stack
from ecomp.scheduler.queries.stacks import load_stack
from tests.kit.audit import run_audit
from tests.kit.commands import Control
from tests.kit.hostile import COMPUTE, OTHER_UUID
from tests.kit.invariants import read_allocations
from tests.kit.stacks import list_instances, write_stack
from tests.kit.store_client import open_store
from tests.kit.story import assert_one_line

KEY = keys.stack('shop')
ENTRY = {'incarnation': 1, 'compute': COMPUTE}
PLACE = stack.Stack('shop', OTHER_UUID).make_place('web/2', 7)


def make_value(**fields: Any) -> bytes:
    return json.dumps({'version': 1, 'epoch': OTHER_UUID, 'entries': {}, **fields}).encode()


def make_entries(name: str, **fields: Any) -> bytes:
    return make_value(entries={name: {**ENTRY, **fields}})


@pytest.mark.fast
@pytest.mark.parametrize('name', ['', 'a' * 31, 'my-shop', '../x', 'shop\n', '\ud800', 'Shop'])
def test_stack_of_an_invalid_name_is_refused(name: str) -> None:
    """Its key can be written by anybody, and its name would be part of the names of instances."""
    with pytest.raises(ValueError, match='not a valid stack name'):
        stack.from_json(name, make_value())
    with pytest.raises(ValueError, match='not a valid stack name'):
        stack.parse_place({**PLACE._asdict(), 'name': name})


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
