"""Groups: together or apart, however many ask at once; and what is said where that cannot be."""

from __future__ import annotations

import json
import socket
from collections import Counter

import pytest

from tests.kit.commands import Control
from tests.kit.hands import settled
from tests.kit.sharing import all_notified, members, started
from tests.kit.story import SMALL, addressed, at_once, called, one_line, place, reached

ROOMY = 'VCPU:20,DISK_GB:100,MEMORY_MB:4096'
APART, TOGETHER = ('--policy', 'anti-affinity'), ('--policy', 'affinity')


def called_so(compute: str) -> str:
    """What a compute is called: those of a test have all one host."""
    return f'{socket.gethostname()} ({compute})'


def test_apart_until_there_is_no_other_compute(cluster: Control) -> None:
    computes = started(cluster, ROOMY, ROOMY)
    first, second = (place(cluster, SMALL, '--group', 'web', *APART) for _ in range(2))
    assert {first[0], second[0]} == {each.uuid for each in computes}
    assert members(cluster, 'web') == {first[1]: first[0], second[1]: second[0]}
    refused = called(cluster, SMALL, '--group', 'web')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert 'there is room, but not where group web allows it (strict anti-affinity)' in refused.stderr
    assert refused.stderr.count('group web has a member there (strict anti-affinity)') == 2
    assert 'the smallest change that fits: ask without --group web' in refused.stderr
    # And that change fits indeed.
    other = place(cluster, SMALL)
    listed = called(cluster, 'group', 'list').stdout
    assert listed.splitlines()[1].split() == ['web', 'strict', 'anti-affinity', '2', '2']
    shown = json.loads(called(cluster, 'group', 'show', 'web', '-f', 'json').stdout)
    assert {each['instance']: each['compute'] for each in shown['members']} == members(cluster, 'web')
    assert first[1] in called(cluster, 'group', 'show', 'web').stdout
    for _, instance in (first, second, other):
        addressed(cluster, instance)
    # Whoever ends makes room for the next, and with the last one the group is gone.
    assert called(cluster, 'destroy', '--wait', first[1]).code == 0
    assert members(cluster, 'web') == {second[1]: second[0]}
    third = place(cluster, SMALL, '--group', 'web')
    assert third[0] == first[0]
    addressed(cluster, third[1])
    assert called(cluster, 'destroy', '--wait', second[1], third[1]).code == 0
    assert cluster.etcd.get('/groups/web') is None
    one_line(called(cluster, 'group', 'show', 'web'), 4, 'no such group')
    settled(cluster, *computes)


def test_together_where_all_of_them_fit(cluster: Control) -> None:
    computes = started(cluster, 'VCPU:2,DISK_GB:10,MEMORY_MB:512', 'VCPU:4,DISK_GB:10,MEMORY_MB:1024')
    found = all_notified(called(cluster, SMALL, '--count', '3', '--group', 'db', *TOGETHER).stdout)
    assert {compute for compute, _ in found} == {computes[1].uuid}
    assert place(cluster, SMALL, '--group', 'db')[0] == computes[1].uuid
    refused = called(cluster, SMALL, '--group', 'db')
    assert refused.code == 3
    assert f'group db is on {called_so(computes[1].uuid)} (strict affinity)' in refused.stderr
    assert 'VCPU short by 1 (free 0 of 4)' in refused.stderr
    settled(cluster, *computes)


def test_softly(cluster: Control) -> None:
    computes = started(cluster, 'VCPU:2,DISK_GB:10,MEMORY_MB:512', 'VCPU:2,DISK_GB:10,MEMORY_MB:512')
    found = all_notified(called(cluster, SMALL, '--count', '3', '--group', 'web', *APART, '--soft').stdout)
    assert sorted(Counter(compute for compute, _ in found).values()) == [1, 2]
    called(cluster, 'destroy', '--wait', *(instance for _, instance in found))
    # Spread, they would be one on each.
    two = called(cluster, SMALL, '--count', '2', '--group', 'db', *TOGETHER, '--soft')
    (first, second) = (compute for compute, _ in all_notified(two.stdout))
    assert first == second
    assert place(cluster, SMALL, '--group', 'db')[0] != first, 'there is no room with them'
    settled(cluster, *computes)


def test_what_it_is_the_first_one_says(cluster: Control) -> None:
    computes = started(cluster, ROOMY)
    one_line(called(cluster, SMALL, '--group', 'web'), 2, 'no group web yet', '--policy')
    place(cluster, SMALL, '--group', 'web', *APART)
    for other in (TOGETHER, ('--soft',)):
        one_line(called(cluster, SMALL, '--group', 'web', *other), 5, 'group web is strict anti-affinity')
    for words in (APART, ('--soft',)):
        one_line(called(cluster, SMALL, *words), 2, 'go with --group')
    one_line(called(cluster, SMALL, '--group', 'a/b', *APART), 2, '--group')
    settled(cluster, *computes)


def test_a_set_that_is_to_be_apart_is_all_or_none(cluster: Control) -> None:
    computes = started(cluster, ROOMY, ROOMY, ROOMY)
    refused = called(cluster, SMALL, '--count', '4', '--group', 'web', *APART)
    assert refused.code == 3
    assert 'there is room for 3 of 4 in group web (strict anti-affinity)' in refused.stderr
    assert 'the smallest change that fits: --count 3' in refused.stderr
    assert [cluster.placement.consumers(each.uuid) for each in computes] == [{}, {}, {}]
    assert members(cluster, 'web') == {}
    found = all_notified(called(cluster, SMALL, '--count', '4', '--min', '2', '--group', 'web', *APART).stdout)
    assert {compute for compute, _ in found} == {each.uuid for each in computes}
    settled(cluster, *computes)


def test_plan_and_then_the_real_thing(cluster: Control) -> None:
    started(cluster, ROOMY, ROOMY, ROOMY)
    place(cluster, SMALL, '--group', 'web', *APART)
    for _ in range(2):
        planned = json.loads(called(cluster, 'plan', SMALL, '--group', 'web', '-f', 'json').stdout)
        compute, _ = place(cluster, SMALL, '--group', 'web')
        assert compute in {each['compute'] for each in planned}
        assert len(planned) == 3 - len(members(cluster, 'web')) + 1
    assert called(cluster, 'plan', SMALL, '--group', 'web').code == 3


@pytest.mark.parametrize('racers', [8, pytest.param(32, marks=pytest.mark.slow)])
def test_never_two_on_a_compute_however_many_ask_at_once(cluster: Control, racers: int) -> None:
    size = 20 if racers > 20 else 5
    computes = started(cluster, *[ROOMY] * size)
    words = [SMALL, '--group', 'web', *APART]
    results = at_once(cluster, [words] * racers, width=racers)
    placed = [all_notified(each.stdout)[0] for each in results if each.code == 0]
    assert Counter(each.code for each in results) == {0: size, 3: racers - size}
    assert len({compute for compute, _ in placed}) == size
    assert members(cluster, 'web') == {instance: compute for compute, instance in placed}
    for each in results:
        assert each.code == 0 or 'not where group web allows it (strict anti-affinity)' in each.stderr, each
    for _, instance in placed:
        reached(cluster, instance, 'active')
    settled(cluster, *computes)


def test_why_it_is_where_it_is(cluster: Control) -> None:
    computes = started(cluster, ROOMY, ROOMY)
    first, second = (place(cluster, SMALL, '--group', 'web', *APART) for _ in range(2))
    for _, instance in (first, second):
        addressed(cluster, instance)
    told = called(cluster, 'why', first[1]).stdout.splitlines()
    assert told[0].startswith(f'{first[1]} is on ')
    assert first[0] in told[0]
    assert told[1] == f'it asked for {SMALL}'
    assert told[2].startswith('2 computes could have taken it then; spread (the emptiest first) was asked for, and')
    assert told[3].endswith(f'(strict anti-affinity), apart from its others: {second[1]} on {called_so(second[0])}')
    data = json.loads(called(cluster, 'why', second[1], '-f', 'json').stdout)
    assert data['why'] == {'weigh': 'spread', 'weight': 0.95, 'of': 1}
    assert data['group']['others'] == {first[1]: first[0]}
    # Also of one that is gone, as long as its record is there.
    assert called(cluster, 'destroy', '--wait', first[1]).code == 0
    assert '2 computes could have taken it' in called(cluster, 'why', first[1]).stdout
    one_line(called(cluster, 'why', 'nobody-1'), 4, 'nobody-1')
    settled(cluster, *computes)
