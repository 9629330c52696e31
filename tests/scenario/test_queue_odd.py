"""The pull queue where something is odd: a mark of nobody, a value nobody understands, what has changed meanwhile."""

from __future__ import annotations

import json
import time
import uuid

import pytest

from tests.kit.commands import Control
from tests.kit.hands import lapse, settled
from tests.kit.invariants import allocations
from tests.kit.servers import b64, until
from tests.kit.story import SMALL, addressed, called, known, one_line, place, reached, record
from tests.kit.tuned import tuned
from tests.scenario.queued import TOY, leaves_it, overheard, queue, waiting

SHORTLY = 0.5
"""Seconds for which a compute of these tests believes what it saw of its own room."""


def test_a_mark_that_nobody_is_behind_any_more(small: Control) -> None:
    instance = queue(small)
    mark = json.dumps({'version': 1, 'compute': str(uuid.uuid4())})
    lease = small.etcd.call('lease/grant', {'TTL': 3600})['ID']
    key = f'/queues/small/{instance}/taker'
    small.etcd.call('kv/put', {'key': b64(key), 'value': b64(mark), 'lease': lease})
    compute = small.ecompute(queues=True)
    later = queue(small)
    reached(small, later, 'active')
    assert record(small, instance) is None
    lapse(small, key)
    reached(small, instance, 'active')
    settled(small, compute)


def test_what_cannot_be_understood_waits_and_harms_nobody(small: Control) -> None:
    names = [str(uuid.uuid4()) for _ in range(3)]
    small.etcd.put(f'/queues/small/{names[0]}', 'no request')
    small.etcd.put(f'/queues/small/{names[1]}', json.dumps({'version': 99}))
    small.etcd.put(f'/queues/none/{names[2]}', json.dumps({'version': 1, 'instance': names[2], 'flavor': 'small'}))
    small.etcd.put('/queues/small/not-a-uuid', '{}')
    compute = small.ecompute(queues=True)
    reached(small, queue(small), 'active')
    listed = small.eschedule('list')
    assert listed.code == 0
    assert sum(' queued ' in line for line in listed.stdout.splitlines()) == 3
    assert 'nobody takes it: not JSON' in small.eschedule('show', names[0]).stdout
    for name in names:
        assert small.eschedule('destroy', name).code == 0
    small.etcd.delete('/queues/small/not-a-uuid')
    until(lambda: small.etcd.keys('/queues/') == [], 10, 'all of them are gone')
    settled(small, compute)


def test_groups_and_quotas_hold_for_what_is_taken(small: Control) -> None:
    assert called(small, 'quota', 'set', 'shop', 'instances=4').code == 0
    words = ('--project', 'shop', '--group', 'web', '--policy', 'anti-affinity')
    instances = [queue(small, *words) for _ in range(3)]
    # It counts from the moment it waits, and what a group is its first one says, though it is nowhere yet.
    assert json.loads(called(small, 'quota', 'show', 'shop', '-f', 'json').stdout)['used']['instances'] == 3
    one_line(called(small, '--queue', '--flavor', 'small', '--group', 'web', '--soft'), 5, 'strict anti-affinity')
    one_line(called(small, '--queue', '--flavor', 'small', '--group', 'new'), 2, 'no group new yet')
    queue(small, '--project', 'shop')
    refused = called(small, '--queue', '--flavor', 'small', '--project', 'shop')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert 'the quota of project shop does not allow it: instances: limit 4, used 4, asked 1' in refused.stderr
    one, other = small.ecompute(TOY, queues=True), small.ecompute(TOY, queues=True)
    taken = until(lambda: len(waiting(small)) == 1 and allocations(small), 30, 'all but one are taken')
    assert taken
    (left,) = waiting(small)
    assert left in instances
    found = json.loads(called(small, 'group', 'show', 'web', '-f', 'json').stdout)['members']
    on = {each['instance']: each['compute'] for each in found}
    assert {on[each] for each in instances if each != left} == {one.uuid, other.uuid}
    assert on[left] is None
    # With the end of one the next is taken, and cancelled it would be gone from both.
    first = next(each for each in instances if each != left)
    assert called(small, 'destroy', '--wait', first).code == 0
    until(lambda: waiting(small) == [], 30, 'the last one is taken')
    addressed(small, left)
    last = queue(small, '--project', 'shop', '--group', 'web')
    assert called(small, 'destroy', last).code == 0
    assert json.loads(called(small, 'quota', 'show', 'shop', '-f', 'json').stdout)['used']['instances'] == 3
    assert last not in called(small, 'group', 'show', 'web').stdout
    assert 'took it by itself' in called(small, 'why', left).stdout
    settled(small, one, other)


@pytest.mark.unaudited('the audit finds the key that is planted here')
def test_a_group_that_cannot_be_understood_holds_up_nobody_else(small: Control) -> None:
    stuck = queue(small, '--group', 'web', '--policy', 'affinity')
    small.etcd.put('/groups/web', '{"version": 99}')
    other = queue(small)
    small.ecompute(queues=True)
    addressed(small, other)
    assert waiting(small) == [stuck]
    one_line(called(small, '--queue', '--flavor', 'small', '--group', 'web'), 1, '/groups/web', 'etcdctl del')
    found = called(small, 'audit')
    assert (found.code, found.stdout.count('group-unreadable')) == (8, 1), found
    # With the cure that it names, it is taken.
    small.etcd.delete('/groups/web')
    addressed(small, stuck)
    assert stuck in called(small, 'group', 'show', 'web').stdout


@pytest.mark.unaudited('the audit finds those that wait in vain')
def test_those_whose_flavor_is_gone_hold_up_nobody_else(small: Control) -> None:
    compute = small.ecompute(queues=True)
    for _ in range(3):  # the fuller it is, the longer it lets others go first
        addressed(small, place(small)[1])
    flavors = [f'old-{number}' for number in range(20)]
    compute.pause()  # it is to find all of them without their flavors
    for each in flavors:
        assert called(small, 'flavor', 'set', each, SMALL).code == 0
        queue(small, '--flavor', each)
        words = 'nobody takes what still waits in its queue (1): set it again, or destroy those'
        one_line(called(small, 'flavor', 'delete', each), 0, f'flavor {each}: removed', words)
    good = queue(small)
    compute.resume()
    reached(small, good, 'active')
    assert len(waiting(small)) == len(flavors)
    found = called(small, 'audit')
    assert (found.code, found.stdout.count('queued-flavorless')) == (8, len(flavors)), found
    # With its flavor the oldest of them is taken as soon as there is room.
    assert called(small, 'destroy', '--wait', good).code == 0
    last = waiting(small)
    assert called(small, 'flavor', 'set', flavors[0], SMALL).code == 0
    until(lambda: len(waiting(small)) < len(last), 20, 'one is taken')
    (taken,) = set(last) - set(waiting(small))
    addressed(small, taken)


def test_one_request_has_one_compute_ask_placement(small: Control) -> None:
    """However many wait for work: else a thousand would ask for each."""
    with overheard(small) as (placement, asked):
        computes = [tuned(small, TOY, placement=placement, queues=True) for _ in range(6)]
        looks = {f'/resource_providers/{each.uuid}/traits' for each in computes}
        asked.clear()
        instance = queue(small)
        addressed(small, instance)
        took = known(small, instance)
        assert set(asked) & looks == {f'/resource_providers/{took["compute"]}/traits'}
        settled(small, *computes)


def test_what_placement_says_by_now_counts(small: Control) -> None:
    """Disabled unseen by the compute: it finds out when it is about to take, and another takes it."""
    with overheard(small) as (placement, asked):
        one = tuned(small, TOY, numbers={'queue.BELIEVED': SHORTLY}, placement=placement, queues=True)
        addressed(small, queue(small))  # it has looked
        time.sleep(2 * SHORTLY)  # until it does not believe what it saw
        trait = f'/resource_providers/{one.uuid}/traits'
        now = small.placement.call('GET', trait)
        generation = now['resource_provider_generation']
        body = {'traits': ['COMPUTE_STATUS_DISABLED', *now['traits']], 'resource_provider_generation': generation}
        small.placement.call('PUT', trait, body)
        asked.clear()
        instance = queue(small)
        leaves_it(small, asked, one, instance)
        other = small.ecompute(TOY, queues=True)
        addressed(small, instance)
        took = known(small, instance)
        assert took['compute'] == other.uuid
        settled(small, one, other)
