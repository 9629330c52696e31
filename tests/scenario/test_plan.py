"""Planning: where instances would go, compared with where they go."""

from __future__ import annotations

import json
import socket
from collections import Counter

from tests.kit.commands import Control, Result
from tests.kit.story import IMAGE, SMALL_QUERY, assert_one_line, place

TOY = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'


def plan_computes(cluster: Control, *words: str) -> list[str]:
    result = cluster.eschedule('plan', SMALL_QUERY, '-f', 'json', *words)
    assert result.code == 0, result
    return [row['compute'] for row in json.loads(result.stdout)]


def test_instances_are_spread_by_default_and_packed_on_request(cluster: Control) -> None:
    computes = [cluster.ecompute(TOY).uuid for _ in range(3)]
    # Each goes to a compute that has the fewest, and every compute gets some.
    assert Counter(place(cluster, SMALL_QUERY, IMAGE)[0] for _ in range(6)) == dict.fromkeys(computes, 2)
    fullest = place(cluster, SMALL_QUERY, IMAGE, '--on', computes[1])[0]
    assert fullest == computes[1]
    assert [place(cluster, SMALL_QUERY, IMAGE, '--weigh', 'pack')[0] for _ in range(3)] == [fullest] * 3
    assert {place(cluster, SMALL_QUERY, IMAGE)[0] for _ in range(2)} == set(computes) - {fullest}


def test_plan_predicts_the_placement_of_an_instance(cluster: Control) -> None:
    sizes = ('VCPU:8,DISK_GB:100,MEMORY_MB:4096', 'VCPU:2,DISK_GB:100,MEMORY_MB:4096', TOY)
    computes = [cluster.ecompute(size).uuid for size in sizes]
    for number in (0, 0, 2):
        place(cluster, SMALL_QUERY, '--on', computes[number])
    expected = [computes[number] for number in (2, 0, 1)]
    before = cluster.placement.read_consumers(computes[2])
    assert plan_computes(cluster) == expected
    assert plan_computes(cluster, '--weigh', 'pack') == expected[::-1]
    assert cluster.placement.read_consumers(computes[2]) == before, 'nothing is claimed'
    assert place(cluster, SMALL_QUERY, IMAGE)[0] == expected[0]
    lines = cluster.eschedule('plan', SMALL_QUERY, '--weigh=pack').stdout.splitlines()
    assert lines[0].split() == ['COMPUTE', 'HOST', 'WEIGHT', *(
        word for name in ('VCPU', 'MEMORY_MB', 'DISK_GB') for word in (name, 'USED/CAPACITY')
    ), 'INSTANCES']  # fmt: skip
    assert lines[1].split()[:4] == [computes[1], socket.gethostname(), '0.50', '0/2']
    assert [line.split()[-1] for line in lines[1:]] == ['1', '0', '0']
    done = cluster.eschedule('plan', SMALL_QUERY.replace('VCPU:1', 'VCPU:9'))
    assert (done.code, done.stdout) == (3, 'NO ALLOCATIONS LEFT\n')


def count_by_compute(done: Result) -> Counter[str]:
    """Return the number of instances of each compute, placed or planned."""
    assert done.code == 0, done
    if done.stdout.startswith('NOTIFIED'):
        return Counter(line.split(', ')[1] for line in done.stdout.splitlines())
    return Counter({row['compute']: row['instances'] for row in json.loads(done.stdout) if row['instances']})


def test_plan_predicts_the_placement_of_a_set(cluster: Control) -> None:
    computes = [cluster.ecompute(f'VCPU:{size},DISK_GB:100,MEMORY_MB:4096').uuid for size in (2, 4, 8)]
    place(cluster, SMALL_QUERY, '--on', computes[2])
    place(cluster, SMALL_QUERY, '--on', computes[0])
    for words in (
        ('--count', '5'),
        ('--count', '2', '--weigh', 'pack'),
        ('--count', '2', '--group', 'web', '--policy', 'anti-affinity'),
        ('--count', '3', '--group', 'db', '--policy', 'affinity', '--weigh', 'pack'),
    ):
        # Options of a new instance, such as the image, are accepted but do not affect a plan.
        planned = count_by_compute(cluster.eschedule('plan', SMALL_QUERY, IMAGE, *words, '-f', 'json'))
        assert sum(planned.values()) == int(words[1])
        if words[-1] != 'anti-affinity':  # any of equal computes
            assert count_by_compute(cluster.eschedule(SMALL_QUERY, IMAGE, *words)) == planned
        else:
            assert set(planned.values()) == {1}
    # Fourteen slots had two left; now one.
    assert sum(count_by_compute(cluster.eschedule(SMALL_QUERY, IMAGE, '--count', '1')).values()) == 1
    results = [cluster.eschedule(*words, SMALL_QUERY, '--count', '2') for words in (('plan',), ())]
    for done in results:
        assert (done.code, done.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
        assert 'there is room for 1 of 2' in done.stderr
    assert results[0].stderr == results[1].stderr
    done = cluster.eschedule('plan', SMALL_QUERY, '--count', '2', '--min', '1', '-f', 'json')
    assert sum(count_by_compute(done).values()) == 1
    assert '1 of 2 instances would be placed: there is no room or quota for more' in done.stderr


def test_plan_refuses_what_create_refuses(cluster: Control) -> None:
    cluster.ecompute(TOY)
    assert_one_line(cluster.eschedule('quota', 'set', 'shop', 'instances=2'), 0, 'quota of project shop')
    place(cluster, SMALL_QUERY, '--project', 'shop')
    assert count_by_compute(cluster.eschedule('plan', SMALL_QUERY, '--project', 'shop', '-f', 'json')).total() == 1
    for words in (('--project', 'shop', '--count', '2'), ('--count', '2', '--project', 'shop', '--group', 'new')):
        real, planned = cluster.eschedule(SMALL_QUERY, *words), cluster.eschedule('plan', SMALL_QUERY, *words)
        assert real.code == planned.code != 0
        assert (planned.stdout, planned.stderr) == (real.stdout, real.stderr)
    done = cluster.eschedule('plan', SMALL_QUERY, '--project', 'shop', '--count', '2')
    assert 'instances: limit 2, used 1, requested 2' in done.stderr
    assert cluster.eschedule('plan', SMALL_QUERY, '--project', 'other', '--count', '2').code == 0
    for query in ('resources=VCPU:1', 'resources=VCPU:1,MEMORY_MB:64'):
        real, planned = cluster.eschedule(query), cluster.eschedule('plan', query)
        assert real.code == planned.code == 2
        assert real.stderr == planned.stderr
