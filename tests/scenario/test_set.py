"""Many in one request: placed in one go, all or none, and never half delivered."""

from __future__ import annotations

import base64
import json
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute, eschedule, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.hands import lapse, settled
from tests.kit.invariants import everything
from tests.kit.sharing import all_notified, started
from tests.kit.story import IMAGE, SMALL, addressed, one_line, reached

TOY = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'
SCRIPT = '#!/bin/sh\necho canary\n'


def held(cluster: Control, computes: list[Ecompute]) -> dict[str, dict[str, int]]:
    """What each consumer on these computes holds."""
    return {name: each for compute in computes for name, each in cluster.placement.consumers(compute.uuid).items()}


@pytest.mark.parametrize('count', [40, pytest.param(100, marks=pytest.mark.slow)])
def test_a_hundred_cost_one_question_and_one_claim(cluster: Control, count: int) -> None:
    computes = started(cluster, *[TOY] * (count // 5))
    asked: list[tuple[str, str]] = []
    with FaultyPlacement(cluster.placement.port) as placement:
        # Every request passes, and is written down.
        placement.fail('broken', lambda method, path: bool(asked.append((method, path.split('?')[0]))))
        config = write_config(cluster.directory / 'counted.yaml', cluster.etcd.endpoint, placement.url)
        done = eschedule(config, SMALL, IMAGE, '--count', '100', '--name', 'web')
        assert done.code == 2
        assert '1 to 60 with names' in done.stderr
        assert asked == []
        done = eschedule(config, SMALL, IMAGE, '--count', str(count))
    assert done.code == 0, done
    assert Counter(asked)['GET', '/allocation_candidates'] == 1
    assert 1 <= Counter(asked)['POST', '/allocations'] <= 2
    assert {path for _, path in asked} == {'/allocation_candidates', '/allocations'}
    pairs = all_notified(done.stdout)
    assert len({instance for _, instance in pairs}) == count
    # Spread: five on each.
    assert Counter(compute for compute, _ in pairs) == {each.uuid: 5 for each in computes}
    for _, instance in pairs:
        reached(cluster, instance, 'active')
    small = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
    assert held(cluster, computes) == {instance: small for _, instance in pairs}
    assert cluster.etcd.keys('/requests/') == []


def test_all_or_none_and_at_least(cluster: Control) -> None:
    computes = started(cluster, *['VCPU:3,DISK_GB:100,MEMORY_MB:4096'] * 3)
    for least in ((), ('--min', '10')):
        done = cluster.eschedule(SMALL, IMAGE, '--count', '10', *least)
        assert (done.code, done.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
        assert 'there is room for 9 of 10' in done.stderr
        assert held(cluster, computes) == {}
        assert cluster.etcd.keys('/requests/') == cluster.etcd.keys('/hosts/') == []
    done = cluster.eschedule(SMALL, IMAGE, '--count', '10', '--min', '4', '-f', 'json')
    one_line(done, 0, '9 of 10 are placed')
    told = json.loads(done.stdout)
    assert Counter(each['compute'] for each in told) == {each.uuid: 3 for each in computes}
    assert held(cluster, computes).keys() == {each['instance'] for each in told}
    many = cluster.directory / 'keys.pub'
    blob = base64.b64encode(b'\0\0\0\x0bssh-ed25519\0\0\x02\0' + bytes(512)).decode()
    many.write_text(''.join(f'ssh-ed25519 {blob} {number}\n' for number in range(40)))
    done = cluster.eschedule(SMALL, IMAGE, '--count', '100', '--ssh-key', str(many))
    one_line(done, 2, 'bytes of ssh keys each', 'more than etcd takes at once')
    # They are delivered in one transaction with their user-data.
    many.write_text(''.join(f'ssh-ed25519 {blob} {number}\n' for number in range(17)))
    data = cluster.directory / 'user-data'
    data.write_text('#!/bin/sh\n' + '#' * 200_000)
    done = cluster.eschedule(SMALL, IMAGE, '--count', '100', '--ssh-key', str(many), '--user-data', str(data))
    one_line(done, 2, 'bytes of user-data', 'more than etcd takes at once')
    assert cluster.placement.database.allocations().keys() == {each['instance'] for each in told}


def test_names_data_and_waiting(cluster: Control, tmp_path: Path) -> None:
    computes = started(cluster, TOY, TOY)
    script = tmp_path / 'script'
    script.write_text(SCRIPT)
    words = (SMALL, IMAGE, '--count', '3', '--name', 'web', '--user-data', str(script), '--uuid', str(uuid.uuid4()))
    done = cluster.eschedule(*words, '--wait')
    assert done.code == 0, done
    lines = done.stdout.splitlines()
    instances = [instance for _, instance in all_notified('\n'.join(lines[:3]) + '\n')]
    assert lines[3:] == [addressed(cluster, instance) for instance in instances]
    named = [json.loads(cluster.eschedule('show', name, '-f', 'json').stdout) for name in ('web-1', 'web-2', 'web-3')]
    assert [each['instance'] for each in named] == instances
    # In etcd once, and nowhere else.
    assert len(cluster.etcd.keys('/user-data/')) == 1
    told = {
        data['hostname']: data['user_data']
        for compute in computes
        for path in (compute.directory / 'state/metadata').glob('*.json')
        if (data := json.loads(path.read_text()))
    }
    assert told == dict.fromkeys(('web-1', 'web-2', 'web-3'), SCRIPT)
    # Asked again, the same changes nothing and says so; another thing is a conflict.
    before = {key: value for key, value in everything(cluster).items() if key.startswith('/')}
    again = cluster.eschedule(*words)
    assert again.code == 0, again
    assert again.stdout.splitlines() == lines[:3]
    assert again.stderr.count('requested before: nothing is changed') == 3
    # The set's uuid is no instance's, an instance's is no set's, and another number of them is another request.
    whole = words[-1]
    one_line(cluster.eschedule(SMALL, IMAGE, '--uuid', whole), 5, 'is the uuid of a set')
    one_line(cluster.eschedule(SMALL, IMAGE, '--count', '2', '--uuid', instances[0]), 5, 'is the uuid of an instance')
    fewer = tuple('2' if word == '3' else word for word in words)
    one_line(cluster.eschedule(*fewer), 5, 'one of 3 that were asked for at once')
    script.write_text(SCRIPT + 'echo more\n')
    one_line(cluster.eschedule(*words), 5, 'with other user-data')
    assert {key: value for key, value in everything(cluster).items() if key.startswith('/')} == before


def test_user_data_that_is_gone_from_etcd_is_said(cluster: Control, tmp_path: Path) -> None:
    compute = cluster.ecompute(TOY)
    compute.pause()
    (tmp_path / 'script').write_text(SCRIPT)
    done = cluster.eschedule(SMALL, IMAGE, '--count', '2', '--user-data', str(tmp_path / 'script'))
    (key,) = cluster.etcd.keys('/user-data/')
    lapse(cluster, key)
    compute.resume()
    for _, instance in all_notified(done.stdout):
        found = reached(cluster, instance, 'error')
        assert 'its user-data is not in etcd any more' in found['error']['reason']
    settled(cluster, compute)


def test_sets_that_race_are_whole_or_not_at_all(cluster: Control) -> None:
    """Room for 24, and four sets of ten: two get all of theirs, two nothing."""
    computes = started(cluster, *['VCPU:8,DISK_GB:100,MEMORY_MB:4096'] * 3)
    with ThreadPoolExecutor(4) as threads:
        racing = [threads.submit(cluster.eschedule, SMALL, IMAGE, '--count', '10') for _ in range(4)]
        results = [each.result() for each in racing]
    assert all(each.code in (0, 3) for each in results), results
    placed = [pair for each in results for pair in (all_notified(each.stdout) if each.code == 0 else [])]
    assert len(placed) in (10, 20)
    assert held(cluster, computes).keys() == {instance for _, instance in placed}
    assert len(cluster.etcd.keys('/hosts/')) == len(placed)
    assert cluster.etcd.keys('/requests/') == []
