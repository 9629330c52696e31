"""F24: a foreign client's values in etcd are refused with a reason, once, without harm."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.host.state import Memory
from ecomp.model import keys
from ecomp.model.json_object import MAX_VALUE_BYTES
from ecomp.model.order import MAX_REQUEST_BYTES, InvalidRequest, Request, parse_request
from ecomp.model.parsers import MAX_REASON_CHARACTERS
from ecomp.model.record import Record, from_json
from ecomp.model.stored import encode
from ecomp.shared.attempts import list_attempted_instances
from ecomp.store.client import Entry, Snapshot
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import read_guests
from tests.kit.hostile import COMPUTE, HOSTILE, HOSTILE_TEXTS, INSTANCE, make_request
from tests.kit.invariants import check_invariants
from tests.kit.servers import wait_until
from tests.kit.sharing import ANTI_AFFINITY, read_members, read_usage
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    assert_one_line,
    boot,
    find_log_lines,
    place,
    read_record,
    run_in_process,
    wait_address,
    wait_log_lines,
    wait_state,
)

DEEP = b'[' * 100_000
DEEP_OBJECT = b'{"a":' * 100_000 + b'1' + b'}' * 100_000
EXECUTED = 'executed-by-nobody'
SHELL_COMMANDS = [f'$(touch {EXECUTED})', f'`touch {EXECUTED}`', f'; touch {EXECUTED} #', f"'; touch {EXECUTED}; '"]

# Values that ecomp never writes to any key.
JUNK = [
    *(b'', b'\0', b'\xff\xfe{}', b'not JSON', b'null', b'[]', b'7', b'"text"', b'{}', b'{"version": 1}'),
    *(b'{"version": 2}', b'{"token": NaN}', b'{"instances": 7, "token": 7, "hostname": "\\u001b[2J\\n", "since": {}}'),
    *(b'{"instances": [["x"]], "instances": []}', b'9' * 5000, DEEP, DEEP_OBJECT, b'x' * MAX_VALUE_BYTES),
    b' ' * (MAX_VALUE_BYTES + 1),
]


def parse_with_all(value: bytes) -> list[str]:
    """Parse a value with each parser, and return the reasons of their refusals.

    Any other exception is a defect.
    """
    reasons = []
    parsed = parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), value)
    if isinstance(parsed, InvalidRequest):
        reasons.append(parsed.reason)
    try:
        from_json(value)
    except ValueError as error:
        reasons.append(str(error))
    assert 'key' in list_attempted_instances(Snapshot(1, {'/requests/key': Entry('/requests/key', value, 1, 1)}))
    return reasons


@pytest.mark.parametrize('value', JUNK, ids=range(len(JUNK)))
def test_junk_is_neither_request_nor_record(value: bytes) -> None:
    """F24: junk is no request and no record, and more than 1 MiB is not parsed (fake)."""
    reasons = parse_with_all(value)
    assert len(reasons) == 2, reasons
    if len(value) > MAX_VALUE_BYTES:
        assert sum('the limit is' in reason for reason in reasons) == 2


@pytest.fixture
def compute(cluster: Control) -> Ecompute:
    """A fake ecompute with the uuid that the unit tests' requests name."""
    return cluster.ecompute('VCPU:8,DISK_GB:100,MEMORY_MB:8192', uuid=COMPUTE)


def replace_instance(value: bytes | str | dict[str, Any], instance: str) -> bytes:
    if isinstance(value, dict):
        value = json.dumps(value)
    raw = value.encode() if isinstance(value, str) else value
    for name, replacement in ((INSTANCE, instance), (INSTANCE.upper(), instance.upper())):
        raw = raw.replace(name.encode(), replacement.encode())
    return raw


def check_full_scans(cluster: Control) -> None:
    """Check that commands that read all of etcd end with an expected code and printable lines."""
    for words, codes in ((['hosts'], {0, 1}), (['check', '--now'], {0, 8}), (['check', '-f', 'json'], {0, 8})):
        result = run_in_process(cluster, *words)
        assert result.code in codes, result
        for line in [*result.stdout.splitlines(), *result.stderr.splitlines()]:
            assert line.isprintable(), line


def check_valid_request(cluster: Control, compute: Ecompute) -> str:
    target, instance = place(cluster, f'{SMALL_QUERY}&in_tree={compute.uuid}')
    assert target == compute.uuid
    wait_address(cluster, instance)
    return instance


def test_hostile_requests_fail_with_their_reason(cluster: Control, compute: Ecompute) -> None:
    """F24: each hostile request fails with its reason, once, and valid ones are built (fake)."""
    # JSON's `\ud800` in an image's name is refused by the parser, not by etcd.
    planted = {str(uuid.uuid4()): (value, reason) for value, reason in HOSTILE}
    for text in SHELL_COMMANDS:
        allocations = {COMPUTE: {'resources': {text: 1, 'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 1}}}
        hostile = make_request(user_id=text, project_id=text, query=text, allocations=allocations)
        planted[str(uuid.uuid4())] = hostile, 'placement holds no allocation'
        planted[str(uuid.uuid4())] = {**hostile, 'image': text}, 'image'
    for text in HOSTILE_TEXTS:
        planted[str(uuid.uuid4())] = make_request(user_id=text, query=text, stages={text: text}), 'no allocation'
    before = check_valid_request(cluster, compute)
    for instance, (value, _) in planted.items():
        cluster.etcd.put(f'/hosts/{COMPUTE}/{instance}', replace_instance(value, instance))
    during = check_valid_request(cluster, compute)
    for instance, (_, reason) in planted.items():
        failed = wait_state(cluster, instance, 'error')
        assert replace_instance(reason, instance).decode() in failed['error']['reason'], failed
        assert len(failed['error']['reason']) <= MAX_REASON_CHARACTERS
        assert failed['error']['stage'] == 'scheduled'
        assert len(wait_log_lines(compute, 'failed', instance)) == 1
        assert cluster.etcd.get(f'/hosts/{COMPUTE}/{instance}') is None
    assert set(read_guests(compute)) == {before, during}
    for directory in (compute.directory, compute.directory / 'state', cluster.directory, Path.cwd()):
        assert not (directory / EXECUTED).exists()
    listed = cluster.eschedule('list')
    assert (listed.code, listed.stderr) == (0, '')
    for line in listed.stdout.splitlines():
        assert line.isprintable()
    first = next(iter(planted))
    assert_one_line(cluster.eschedule(first), 1, first, 'failed at stage scheduled')
    assert cluster.eschedule('show', first).code == 0
    assert cluster.eschedule('destroy', '--wait', first, before).code == 0
    check_invariants(cluster, compute)


@pytest.mark.slow
def test_malformed_record_defers_its_instance(cluster: Control, compute: Ecompute) -> None:
    """F24: an instance with a malformed record waits, logged once, until that is gone (fake)."""
    values = [*JUNK, *map(str.encode, (format_record(compute=7), format_record(instance=str(uuid.uuid4()))))]
    values += [
        text.encode() for text in (format_record(state='x'), format_record(version=99), format_record(image=['x']))
    ]
    earlier = check_valid_request(cluster, compute)
    planted = {str(uuid.uuid4()): value for value in values}
    for instance, value in planted.items():
        cluster.etcd.put(f'/instances/{COMPUTE}/{instance}', value.replace(INSTANCE.encode(), instance.encode()))
    waiting = list(planted)[-3:]
    for instance in waiting:
        body = claim_and_make_request(cluster, instance)
        cluster.etcd.put(f'/hosts/{COMPUTE}/{instance}', json.dumps(body))
    odd_keys = {b'/instances/', b'/instances/x', b'/instances/\xff', b'/instances/a/b', b'/instances/' + b'y' * 10_000}
    for key in odd_keys:
        cluster.etcd.put(key, b'{}')  # type: ignore[arg-type]
    later = check_valid_request(cluster, compute)
    for instance in waiting:
        wait_until(
            lambda instance=instance: find_log_lines(compute, f'/instances/{COMPUTE}/{instance}'), 20, 'it is said'
        )  # type: ignore[misc]
        assert instance not in read_guests(compute)
    # eschedule reports each record that it cannot parse in one line, and lists the others.
    listed = cluster.eschedule('list')
    assert listed.code == 1
    assert {line.split()[0] for line in listed.stdout.splitlines()} == {'INSTANCE', earlier, later}
    lines = listed.stderr.splitlines()
    assert len(lines) == len(planted) + len(odd_keys)
    for line in lines:
        assert line.startswith('eschedule: /instances/'), line
        assert line.isprintable()
        assert len(line) < 1000
    check_full_scans(cluster)
    for instance in planted:
        # An instance that is requested of a compute can be destroyed in spite of this: tests/security/test_records.py.
        for words in (['show', instance], *([] if instance in waiting else [['destroy', instance]]), [instance]):
            assert_one_line(run_in_process(cluster, *words), 1, f'/instances/{COMPUTE}/{instance}')
    for key in [*odd_keys, *(f'/instances/{COMPUTE}/{instance}'.encode() for instance in planted)]:
        cluster.etcd.delete(key)  # type: ignore[arg-type]
    last = check_valid_request(cluster, compute)  # its event triggers a plan for all; otherwise the periodic check does
    for instance in waiting:
        wait_state(cluster, instance, 'active')
        assert len(wait_log_lines(compute, f'/instances/{COMPUTE}/{instance}', 'trying again')) == 1
    assert set(read_guests(compute)) == {earlier, later, last, *waiting}
    check_invariants(cluster, compute)


def format_record(**changed: Any) -> str:
    return json.dumps({**json.loads(encode(Record(INSTANCE, COMPUTE, 'active', image=IMAGE))), **changed})


def claim_and_make_request(cluster: Control, instance: str) -> dict[str, Any]:
    allocations = {COMPUTE: {'resources': {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}}}
    owner = {'user_id': 'u', 'project_id': 'p', 'consumer_generation': None}
    claim = {'allocations': allocations, **owner, 'consumer_type': 'INSTANCE'}
    cluster.placement.call('PUT', f'/allocations/{instance}', claim)
    return {'allocations': allocations, 'instance': instance, 'image': IMAGE, **owner}


@pytest.mark.slow
def test_junk_in_other_keys_disturbs_nothing(cluster: Control, compute: Ecompute) -> None:
    """F24: junk in other keys disturbs neither ecompute nor eschedule (fake)."""
    earlier = check_valid_request(cluster, compute)
    address = wait_address(cluster, earlier)
    planted = [
        f'/{plane}/{name}'
        for plane in ('requests', 'booted', 'computes', 'queues')
        for name in [*(str(uuid.uuid4()) for _ in JUNK), '', 'x', '../x', 'a/b', 'y' * 10_000, 'é\0']
    ]
    for number, key in enumerate(planted):
        cluster.etcd.put(key, JUNK[number % len(JUNK)])
    compute.restart()  # it reads all of them at its start
    later = check_valid_request(cluster, compute)
    assert cluster.eschedule('list').code == 0
    for key in planted:
        if key.startswith('/computes/'):
            assert run_in_process(cluster, 'hosts').code in (0, 1)
            cluster.etcd.delete(key)
    check_full_scans(cluster)
    # Its own keys, too: an address that any client may write is not trusted, a malformed presence is rewritten.
    for junk in JUNK:
        cluster.etcd.put(f'/booted/{earlier}', junk)
        assert cluster.eschedule(earlier).stdout.strip() == address
    cluster.etcd.put(f'/booted/{earlier}', address)
    assert cluster.eschedule(earlier).stdout == f'{address}\n'
    for key in planted:
        cluster.etcd.delete(key)
    assert cluster.eschedule('destroy', '--wait', earlier, later).code == 0
    check_invariants(cluster, compute)


@pytest.mark.slow
def test_unread_hostile_requests_can_be_shown_and_destroyed(cluster: Control) -> None:
    """F24: eschedule lists, shows and destroys requests that no compute has read (fake)."""
    planted = {str(uuid.uuid4()): value for value, _ in HOSTILE}
    for instance, value in planted.items():
        cluster.etcd.put(f'/hosts/{COMPUTE}/{instance}', replace_instance(value, instance))
    listed = cluster.eschedule('list')
    assert (listed.code, listed.stderr) == (0, '')
    assert len(listed.stdout.splitlines()) == 1 + len(planted)
    results: list[Result] = []
    for instance in planted:
        results.append(run_in_process(cluster, 'show', instance))
        assert 'fault' in results[-1].stdout
        assert_one_line(run_in_process(cluster, instance), 6, instance, 'waiting for')
        assert_one_line(run_in_process(cluster, 'destroy', instance), 0, 'destroy accepted')
    assert {result.code for result in results} == {0}
    for instance in planted:
        cluster.etcd.delete(f'/hosts/{COMPUTE}/{instance}')
    check_invariants(cluster)


def test_foreign_state_files_are_ignored(tmp_path: Path) -> None:
    """F24: foreign files in the state directory are ignored and stay (fake)."""
    boot = tmp_path / 'boot_id'
    boot.write_text('a boot\n')
    directory = tmp_path / 'state' / 'instances'
    directory.mkdir(parents=True)
    for number, value in enumerate(JUNK):
        (directory / f'{uuid.UUID(int=number)}.json').write_bytes(value)
    (directory / 'not-a-uuid.json').write_text('{"version": 1, "ended": "today"}')
    memory = Memory(tmp_path / 'state', COMPUTE, lambda: '2026-01-31T12:00:00.000Z', boot)
    assert (memory.get_entries(), memory.get_ended()) == ({}, frozenset())
    assert len(list(directory.iterdir())) == len(JUNK) + 1


def test_unchanged_request_is_valid() -> None:
    """F24: the request that the hostile ones are made from is valid (fake)."""
    parsed = parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), json.dumps(make_request()).encode())
    assert isinstance(parsed, Request)
    assert len(json.dumps(make_request())) < MAX_REQUEST_BYTES


SHARED_WORDS = (SMALL_QUERY, '--project', 'web', '--group', 'web', *ANTI_AFFINITY)


def test_malformed_group_and_quota_affect_only_their_users(cluster: Control) -> None:
    """F24: malformed group and quota: reported to commands that need them, others work (fake)."""
    compute = cluster.ecompute('VCPU:20,DISK_GB:100,MEMORY_MB:4096')
    run_in_process(cluster, 'quota', 'set', 'web', 'instances=9')
    _, instance = place(cluster, *SHARED_WORDS)
    place(cluster, SMALL_QUERY, '--group', 'other', *ANTI_AFFINITY)
    run_in_process(cluster, 'quota', 'set', 'other', 'instances=9')
    wait_address(cluster, instance)
    broken, rubbish = ('/groups/web', '/quotas/web'), '{"version": 99}'
    for key in broken:
        cluster.etcd.put(key, rubbish)
    assert_one_line(
        run_in_process(cluster, SMALL_QUERY, '--group', 'web', *ANTI_AFFINITY), 1, broken[0], f'etcdctl del {broken[0]}'
    )
    assert_one_line(run_in_process(cluster, SMALL_QUERY, '--project', 'web'), 1, broken[1], f'etcdctl del {broken[1]}')
    for word, key in (('group', broken[0]), ('quota', broken[1])):
        listed = run_in_process(cluster, word)
        assert_one_line(listed, 1, key)
        assert 'other' in listed.stdout, listed
    # The refused commands hold no claims; commands without these keys are placed, and existing instances can be
    # destroyed.
    assert len(cluster.placement.read_consumers(compute.uuid)) == 2
    wait_address(cluster, place(cluster, SMALL_QUERY, '--project', 'other')[1])
    assert_one_line(run_in_process(cluster, 'destroy', instance), 0, 'destroy accepted')
    wait_state(cluster, instance, 'gone')
    # The suggested fix works.
    for key in broken:
        assert cluster.etcd.get(key) == rubbish.encode()
        cluster.etcd.delete(key)
    wait_address(cluster, place(cluster, *SHARED_WORDS)[1])
    check_invariants(cluster, compute)


# F34: values of the next version are refused and kept.


def test_refused_newer_request_frees_group_quota_and_name(cluster: Control, compute: Ecompute) -> None:
    """F34: a refused newer request leaves its group and quota, and its name is free (fake)."""
    assert cluster.eschedule('quota', 'set', 'q', 'instances=1').code == 0
    words = (SMALL_QUERY, '--name', 'web', '--group', 'g', *ANTI_AFFINITY, '--project', 'q')
    compute.pause()  # so that it does not take the request before that is rewritten
    _, instance = place(cluster, *words)
    key = f'/hosts/{compute.uuid}/{instance}'
    cluster.etcd.put(key, json.dumps({**json.loads(cluster.etcd.get(key) or b''), 'version': 2}))
    compute.resume()
    failed = wait_state(cluster, instance, 'error')
    assert (failed['name'], failed['project_id']) == ('web', 'q')
    assert (read_members(cluster, 'g'), read_usage(cluster, 'q')) == ({}, {})
    _, repeated = place(cluster, *words)
    wait_state(cluster, repeated, 'active')


def test_newer_request_of_a_running_guest_is_a_fault(cluster: Control, compute: Ecompute) -> None:
    """F34: a running guest's request rewritten by a newer eschedule: it stays, a fault (fake)."""
    instance = boot(cluster)
    key = f'/hosts/{compute.uuid}/{instance}'
    original = cluster.etcd.get(key)
    assert original is not None
    newer = json.dumps({**json.loads(original), 'version': 2, 'power': 'off'})
    cluster.etcd.put(key, newer)
    wait_until(lambda: (read_record(cluster, instance) or {})['fault'], 20, 'a fault says so')
    status = read_record(cluster, instance) or {}
    assert 'version 2' in status['fault']
    assert (status['state'], set(read_guests(compute))) == ('active', {instance})
    assert cluster.etcd.get(key) == newer.encode()
    # A destroy by this version's eschedule can be parsed and is carried out.
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
