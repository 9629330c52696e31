"""Story 6: many requests in a queue, many computes that take them, half of them killed while they do."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.kit.commands import Control
from tests.kit.hands import Armed, guests, killed_at, settled
from tests.kit.invariants import allocations, everything
from tests.kit.servers import until
from tests.kit.story import SMALL, called, reached
from tests.kit.tuned import Tuned, tuned
from tests.scenario.queued import queue

ROOM = 'VCPU:16,DISK_GB:100,MEMORY_MB:16384'
STEPS = 'marked', 'taken', 'moved'
LONG = 600.0

FEW = pytest.param(4, 32, id='few')
MANY = pytest.param(50, 500, id='many', marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


def computes(control: Control, count: int) -> list[Tuned]:
    """So many that take from queues, not started."""
    return [tuned(control, ROOM, start=False, queues=True) for _ in range(count)]


def start(made: Sequence[Armed]) -> None:
    """Start them, a few side by side."""
    for first in range(0, len(made), 4):
        few = made[first : first + 4]
        # Not in threads of their own: whoever starts one takes it along when it ends.
        for each in few:
            each.launch()
        for each in few:
            each.wait_ready()


def enqueue(control: Control, count: int) -> set[str]:
    """Put so many into the queue."""
    return {queue(control) for _ in range(count)}


def states(control: Control) -> dict[str, str]:
    """The state of every instance that etcd knows of; that none is in two places is settled()'s to say."""
    queued, scheduled, recorded = {}, {}, {}
    for key, kept in everything(control).items():
        family, name = key.split('/')[1], key.rsplit('/', 1)[1]
        if family == 'instances':
            recorded[name] = json.loads(kept.value)['state']
        elif family == 'hosts':
            scheduled[name] = 'scheduled'
        elif family == 'queues' and name != 'taker':
            queued[name] = 'queued'
    return queued | scheduled | recorded


def balance(control: Control, made: Sequence[Armed]) -> float:
    """The largest share of used VCPU less the smallest."""
    used = Counter(provider for held in allocations(control).values() for provider in held)
    shares = [used[each.uuid] / 16 for each in made]
    return max(shares) - min(shares)


@pytest.mark.slow
@pytest.mark.parametrize(('count', 'requests'), [FEW, MANY])
def test_half_of_the_computes_are_killed_while_they_take(small: Control, count: int, requests: int) -> None:
    made = computes(small, count)
    dying = made[: count // 2]
    for number, each in enumerate(dying):
        each.failpoint = f'{STEPS[number % len(STEPS)]}:kill'
    start(made)
    instances = enqueue(small, requests)
    for each in dying:
        killed_at(each, each.failpoint.removesuffix(':kill'), LONG)
        each.failpoint = ''
    start(dying)
    until(lambda: set(states(small).values()) == {'active'}, LONG, 'all are active')
    assert states(small).keys() == instances
    held = allocations(small)
    assert held.keys() == instances
    assert all(len(providers) == 1 for providers in held.values())
    settled(small, *made)
    there = [instance for each in made for instance in guests(each)]
    assert sorted(there) == sorted(instances), 'each has one guest, on one compute'


def test_an_idle_one_takes_before_one_that_is_nearly_full(small: Control) -> None:
    made = computes(small, 2)
    start(made)
    full, idle = made
    done = called(small, SMALL, '--count', '15', '--on', full.uuid)
    assert done.code == 0, done
    # One after the other: so each is for the two of them, and the full one waits nearly 0.2 s longer.
    for _ in range(4):
        (instance,) = enqueue(small, 1)
        assert reached(small, instance, 'active')['compute'] == idle.uuid
    settled(small, *made)


# How even it is in the end hangs on waits of a few ms, which a busy machine's clocks do not keep.
@pytest.mark.slow
@pytest.mark.parametrize(('count', 'requests'), [FEW, MANY])
def test_the_idlest_take_first(small: Control, count: int, requests: int) -> None:
    """The balance of the pull queue against that of eschedule's own spread, on the same load."""
    made = computes(small, count)
    start(made)
    for _ in range(requests):
        assert called(small, SMALL).code == 0
    pushed = balance(small, made)
    # A few at a time: all at once would be more than this placement, of one thread, answers in time.
    until(lambda: set(states(small).values()) == {'active'}, LONG, 'all of them are active')
    placed = sorted(allocations(small))
    for first in range(0, len(placed), 10):
        assert called(small, 'destroy', '--wait', '--timeout', str(LONG), *placed[first : first + 10]).code == 0

    instances = enqueue(small, requests)

    # etcd is asked and not placement, which has enough to do.
    until(lambda: Counter(states(small).values())['active'] == requests, LONG, 'all of them are active')
    assert allocations(small).keys() == instances
    pulled = balance(small, made)
    sys.stdout.write(f'\n{count} computes, {requests} requests: spread {pushed:.3f}, pull {pulled:.3f}\n')
    assert pulled <= pushed + 0.2
    settled(small, *made)
