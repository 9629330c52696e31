"""F24: a foreign client's values in etcd are refused with a reason, once, without harm."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.host.state import Memory
from ecomp.model.json_object import MAX_VALUE_BYTES
from ecomp.model.parsers import MAX_REASON_CHARACTERS
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import read_guests
from tests.kit.hostile import COMPUTE, HOSTILE, HOSTILE_TEXTS, INSTANCE, make_request
from tests.kit.invariants import check_invariants
from tests.kit.servers import wait_until
from tests.kit.sharing import ANTI_AFFINITY, read_members, read_usage
from tests.kit.story import (
    SMALL_QUERY,
    assert_one_line,
    boot,
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
