"""Planning: where instances would go, compared with where they go."""

from __future__ import annotations

import json
from collections import Counter

from tests.kit.commands import Control, Result
from tests.kit.story import IMAGE, SMALL_QUERY, assert_one_line, place

TOY = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'


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
