"""What waits in a queue, as it is written and read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys
from ecomp.model.choose import Why
from ecomp.model.flavor import Flavor
from ecomp.model.group import ANTI_AFFINITY, Membership
from ecomp.model.order import SIZE_LIMIT, Invalid, Shares, parse_request
from ecomp.model.order import to_json as request_to_json
from ecomp.model.queue import QueueEntry, mark_to_json, marked_by, parse_waiting, record_of, to_json
from ecomp.model.record import QUEUED, STATES

INSTANCE, COMPUTE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a', 'b8756be5-a30d-4311-920c-0ad996367a8e'
SIZE = {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}
SMALL = Flavor('small', SIZE)
IMAGE = 'http://images.example/i.qcow2'
WAITING = QueueEntry(
    INSTANCE,
    Flavor('small', SIZE, ('T_A',), ('T_B',)),
    image=IMAGE,
    user_id='a user',
    project_id='a project',
    stages={'requested': 'then'},
    name='web1',
    ssh_keys=('ssh-ed25519 AAAA',),
    user_data_sha256='f' * 64,
)


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(to_json(WAITING)), **fields}).encode()


def refused(value: bytes) -> Invalid:
    found = parse_waiting(WAITING.key, value)
    assert isinstance(found, Invalid)
    return found


def test_what_is_written_is_read() -> None:
    assert parse_waiting(WAITING.key, to_json(WAITING).encode()) == WAITING
    plain = QueueEntry(INSTANCE, SMALL, image=IMAGE, user_id='u', project_id='p')
    assert parse_waiting(plain.key, to_json(plain).encode()) == plain
    grouped = replace(plain, group=Membership('web', ANTI_AFFINITY, True))
    assert parse_waiting(grouped.key, to_json(grouped).encode()) == grouped
    request = grouped.request(COMPUTE, 'now')
    assert (request.group, request.why) == (grouped.group, Why('queue', None, 1))
    assert set(json.loads(to_json(plain))) == {
        'version', 'instance', 'flavor', 'query', 'image', 'user_id', 'project_id', 'stages'
    }  # fmt: skip


def test_what_a_taker_makes_of_it_is_a_request() -> None:
    request = WAITING.request(COMPUTE, 'now')
    assert parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), request_to_json(request).encode()) == request
    assert (request.allocations, request.query) == ({COMPUTE: SIZE}, WAITING.flavor.query)
    assert request.stages == {'requested': 'then', 'scheduled': 'now'}
    assert (request.name, request.ssh_keys, request.user_data_sha256) == ('web1', ('ssh-ed25519 AAAA',), 'f' * 64)


@pytest.mark.parametrize(
    ('value', 'said'),
    [
        (b'', 'not JSON'),
        (b'[]', 'expected a JSON object'),
        (b'\xff', 'not text in UTF-8'),
        (b'[' * 100_000, 'nested too deeply'),
        (b' ' * (SIZE_LIMIT + 1), 'the limit is'),
        (changed(version=2), 'version 2 of a waiting request is not known here'),
        (changed(version=True), 'version True'),
        (changed(instance=COMPUTE), f"its key says small/{INSTANCE}, and it says 'small' and '{COMPUTE}'"),
        (changed(flavor='large'), "and it says 'large'"),
        (changed(query=None), 'lacks query'),
        (changed(query='resources=VCPU:1'), 'no MEMORY_MB, DISK_GB'),
        (changed(query='resources=VCPU:1&in_tree=x'), 'a flavor has resources'),
        (changed(query=7), 'query: expected text'),
        (changed(image=None), 'lacks image'),
        (changed(image='ftp://x/y'), 'ftp'),
        (changed(user_id=''), 'lacks user_id'),
        (changed(project_id=[]), 'project_id: expected text'),
        (changed(stages=[]), 'stages: expected an object of times'),
        (changed(name='no name'), 'is no host name'),
        (changed(ssh_keys='x'), 'ssh_keys: expected a list'),
        (changed(user_data_sha256='x'), 'expected 64 hexadecimal digits'),
    ],
)
def test_what_cannot_be_understood_has_a_reason(value: bytes, said: str) -> None:
    found = parse_waiting(WAITING.key, value)
    assert isinstance(found, Invalid)
    assert said in found.reason
    shown = record_of(WAITING.key, value)
    assert (shown.instance, shown.state, shown.compute) == (INSTANCE, QUEUED, '')
    assert said in (shown.fault or '')


def test_what_cannot_be_understood_says_what_it_shares_as_far_as_it_can_be_told() -> None:
    group = {'name': 'g', 'policy': ANTI_AFFINITY, 'strict': True}
    newer = changed(version=2, group=group)
    assert refused(newer).shares == Shares('web1', 'g', 'a project', SIZE)
    shown = record_of(WAITING.key, newer)
    assert (shown.name, shown.group_name, shown.project_id, shown.resources) == ('web1', 'g', 'a project', SIZE)
    assert refused(changed(query='x', name=3, group=group)).shares == Shares(None, 'g')
    assert refused(b'[').shares == Shares()


@pytest.mark.parametrize('place', ['small', 'small/', '/x', 'small/a/b', 'small/x'])
def test_a_key_that_is_none(place: str) -> None:
    assert isinstance(parse_waiting(keys.QUEUES + place, to_json(WAITING).encode()), Invalid)


@given(st.binary(max_size=300))
def test_nothing_breaks_the_parser(value: bytes) -> None:
    assert isinstance(parse_waiting(WAITING.key, value), Invalid)


def test_what_is_shown_of_it() -> None:
    shown = record_of(WAITING.key, to_json(WAITING).encode())
    assert (shown.state, shown.compute, shown.name, shown.query) == ('queued', '', 'web1', WAITING.flavor.query)
    assert shown.resources == SIZE
    assert QUEUED not in STATES, 'no record in etcd says so'


def test_keys_of_the_queues() -> None:
    key, mark = WAITING.key, keys.taker(WAITING.key)
    assert key == f'/queues/small/{INSTANCE}'
    assert keys.queued(key) == ('small', INSTANCE)
    assert keys.queued(mark) is None
    assert keys.in_queue(key) == keys.in_queue(mark) == INSTANCE
    assert marked_by(mark_to_json(COMPUTE).encode()) == COMPUTE
    for rubbish in (b'no mark', b'[]', b'{}', b'{"compute": 1}', b'\xff', b'[' * 100_000):
        assert marked_by(rubbish) is None
