"""Quotas: what a project may have, however many ask at once; counted right whatever comes and goes."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.kit.commands import Control
from tests.kit.hands import settled
from tests.kit.sharing import all_notified, started, used
from tests.kit.story import SMALL, addressed, at_once, called, one_line, place

ROOMY = 'VCPU:60,DISK_GB:100,MEMORY_MB:8192'


def test_limit_used_and_asked_are_named(cluster: Control) -> None:
    computes = started(cluster, ROOMY)
    place(cluster, SMALL, '--project', 'web')  # before there is a limit: counted all the same
    place(cluster, SMALL, '--project', 'other')
    one_line(called(cluster, 'quota', 'set', 'web', 'VCPU=3', 'instances=5'), 0, 'web: VCPU 1/3, instances 1/5')
    _, second = place(cluster, SMALL, '--project', 'web')
    refused = called(cluster, SMALL, '--count', '2', '--project', 'web')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    one_line(refused, 3, 'the quota of project web does not allow it: VCPU: limit 3, used 2, asked 2')
    assert len(cluster.placement.consumers(computes[0].uuid)) == 3
    # At least one of two does.
    assert len(all_notified(called(cluster, SMALL, '--count', '2', '--min', '1', '--project', 'web').stdout)) == 1
    assert used(cluster, 'web') == {'VCPU': 3, 'DISK_GB': 3, 'MEMORY_MB': 384, 'instances': 3}
    table = called(cluster, 'quota', 'show', 'web').stdout.splitlines()
    assert [line.split() for line in table if line.startswith(('VCPU', 'DISK_GB'))] == [
        ['DISK_GB', '-', '3', '-'],
        ['VCPU', '3', '3', '0'],
    ]
    assert called(cluster, 'quota', 'list').stdout.splitlines()[1].split()[0] == 'web'
    assert json.loads(called(cluster, 'quota', 'list', '-f', 'json').stdout)[0]['limits'] == {'VCPU': 3, 'instances': 5}
    # What ends makes room, to the last one.
    addressed(cluster, second)
    assert called(cluster, 'destroy', '--wait', second).code == 0
    assert used(cluster, 'web')['VCPU'] == 2
    place(cluster, SMALL, '--project', 'web')
    one_line(called(cluster, 'quota', 'set', 'web', 'VCPU=1'), 0, 'VCPU 3/1', 'more VCPU than that already')
    one_line(called(cluster, 'quota', 'set', 'web', 'VCPU=none', 'instances=none'), 0, 'no limits any more')
    one_line(called(cluster, 'quota', 'show', 'web'), 4, 'no limits are set')
    place(cluster, SMALL, '--project', 'web')
    settled(cluster, *computes)


def test_what_is_destroyed_unseen_is_given_back(cluster: Control) -> None:
    (compute,) = started(cluster, ROOMY)
    called(cluster, 'quota', 'set', 'web', 'instances=2')
    compute.pause()
    _, unseen = place(cluster, SMALL, '--project', 'web', '--group', 'all', '--policy', 'affinity')
    assert used(cluster, 'web')['instances'] == 1
    one_line(called(cluster, 'destroy', unseen), 0, 'destroy accepted')
    compute.resume()
    assert called(cluster, 'destroy', '--wait', unseen).code in (0, 4)
    assert used(cluster, 'web') == {}
    assert cluster.etcd.get('/groups/all') is None
    settled(cluster, compute)


@pytest.mark.parametrize(('racers', 'most'), [(10, 4), pytest.param(32, 10, marks=pytest.mark.slow)])
def test_however_many_ask_at_once_it_is_just_so_many(cluster: Control, racers: int, most: int) -> None:
    computes = started(cluster, ROOMY, ROOMY)
    called(cluster, 'quota', 'set', 'web', f'instances={most}')
    results = at_once(cluster, [[SMALL, '--project', 'web']] * racers, width=racers)
    assert Counter(each.code for each in results) == {0: most, 3: racers - most}, results
    assert used(cluster, 'web')['instances'] == most
    for each in results:
        assert each.code == 0 or f'instances: limit {most}, used ' in each.stderr
    placed = [all_notified(each.stdout)[0][1] for each in results if each.code == 0]
    for instance in placed:
        addressed(cluster, instance)
    ended = at_once(cluster, [['destroy', '--wait', each] for each in placed], width=most)
    assert {each.code for each in ended} == {0}
    assert used(cluster, 'web') == {}
    settled(cluster, *computes)


def test_what_is_delivered_while_a_quota_is_made_is_counted(cluster: Control) -> None:
    (compute,) = started(cluster, ROOMY)
    place(cluster, SMALL, '--project', 'web')
    words = [[SMALL, '--project', 'web'] for _ in range(6)]
    words[2:2] = [['quota', 'set', 'web', 'instances=100']]
    assert {each.code for each in at_once(cluster, words, width=7)} == {0}
    assert used(cluster, 'web')['instances'] == 7
    settled(cluster, compute)
