"""F40: a compute killed or frozen while it takes a queued request; a request cancelled during that.

The taker key is on its compute's lease. Where a dead compute's lease has to expire, it is revoked through etcd.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable

import pytest

from tests.kit.commands import Control
from tests.kit.hands import Armed, Eschedule, killed_at, lapse, settled, start_again
from tests.kit.invariants import allocations
from tests.kit.servers import until
from tests.kit.story import SMALL, logs, one_line, reached
from tests.kit.tuned import tuned

TAKING_FAILPOINTS = ('marked', 'taken', 'moved')
QUEUED_FAILPOINTS = QUEUED, UNQUEUED = 'queued', 'unqueued'
# All the room of a compute.
WHOLE = SMALL.replace('VCPU:1', 'VCPU:4')

Make = Callable[..., Armed]


@pytest.fixture
def taker(cluster: Control) -> Make:
    """A function that starts a taker: a compute with room for four, armed with a failpoint."""
    assert cluster.eschedule('flavor', 'set', 'small', SMALL).code == 0
    assert cluster.eschedule('flavor', 'set', 'whole', WHOLE).code == 0
    return lambda failpoint='': tuned(cluster, failpoint=failpoint, queues=True)


def queue(control: Control, flavor: str = 'small') -> str:
    """Queue a request; return its uuid."""
    instance = str(uuid.uuid4())
    result = control.eschedule('--queue', '--flavor', flavor, '--uuid', instance)
    assert (result.code, result.stdout) == (0, f'QUEUED INSTANCE {instance}\n'), result
    return instance


def mark_of(instance: str, flavor: str = 'small') -> str:
    return f'/queues/{flavor}/{instance}/taker'


def active_once(control: Control, instance: str, *on: Armed) -> Armed:
    """Wait until it is active on one of these computes, and no other one holds a claim for it."""
    compute = reached(control, instance, 'active')['compute']
    (claiming,) = allocations(control)[instance]
    assert claiming == compute
    return next(candidate for candidate in on if candidate.uuid == compute)


@pytest.mark.parametrize('step', TAKING_FAILPOINTS)
def test_killed_while_taking_and_started_again(cluster: Control, taker: Make, step: str) -> None:
    """F40: kill -9 of a taker at each step: started again immediately it takes the same request, once (fake)."""
    compute = taker(f'{step}:kill')
    instance = queue(cluster, 'whole')
    killed_at(compute, step)
    assert (cluster.etcd.get(mark_of(instance, 'whole')) is None) == (step == 'moved')
    assert bool(allocations(cluster)) == (step != 'marked')
    start_again(compute)
    active_once(cluster, instance, compute)
    settled(cluster, compute)


@pytest.mark.parametrize('step', ['marked', 'taken'])
def test_killed_while_taking_and_taken_by_another(cluster: Control, taker: Make, step: str) -> None:
    """F40: kill -9 of a taker with its taker key: another takes it; with its claim: it waits for the first (fake)."""
    other = taker()
    other.stop()
    compute = taker(f'{step}:kill')
    instance = queue(cluster)
    killed_at(compute, step)
    lapse(cluster, mark_of(instance))
    other.start()
    if step == 'taken':
        logs(other, f'{instance} is claimed on compute {compute.uuid}')
    else:
        assert active_once(cluster, instance, other) is other
    start_again(compute)
    assert active_once(cluster, instance, compute, other) is (compute if step == 'taken' else other)
    settled(cluster, compute, other)


def test_killed_with_a_claim_that_fills_it(cluster: Control, taker: Make) -> None:
    """F40: kill -9 of a taker whose claim uses all its room, lease expired: its own claim does not block it (fake)."""
    compute = taker('taken:kill')
    instance = queue(cluster, 'whole')
    killed_at(compute, 'taken')
    lapse(cluster, mark_of(instance, 'whole'))
    assert allocations(cluster).keys() == {instance}
    start_again(compute)
    active_once(cluster, instance, compute)
    settled(cluster, compute)


@pytest.mark.parametrize('step', ['marked', 'taken'])
def test_frozen_while_taking(cluster: Control, taker: Make, step: str) -> None:
    """F40: a taker frozen with its taker key until another one took the request, or with its claim: once (fake)."""
    other = taker()
    other.stop()
    compute = taker(f'{step}:stop:1')
    instance = queue(cluster)
    compute.stopped_at(step)
    other.start()
    lapse(cluster, mark_of(instance))
    if step == 'taken':
        logs(other, f'{instance} is claimed on compute {compute.uuid}')
    else:
        assert active_once(cluster, instance, other) is other
    compute.resume()
    # These fill both computes, so the late taker has left the step at which it was frozen.
    more = [queue(cluster) for _ in range(7)]
    for name in more:
        active_once(cluster, name, compute, other)
    active_once(cluster, instance, compute, other)
    settled(cluster, compute, other)


def test_frozen_when_it_has_taken(cluster: Control, taker: Make) -> None:
    """F40: a taker frozen after it took a request, then continued: it is built there, once (fake)."""
    compute = taker('moved:stop:1')
    instance = queue(cluster)
    compute.stopped_at('moved')
    other = taker()
    compute.resume()
    assert active_once(cluster, instance, compute, other) is compute
    settled(cluster, compute, other)


@pytest.mark.parametrize('step', ['marked', 'taken'])
def test_frozen_past_its_lease_with_nobody_else_there(cluster: Control, taker: Make, step: str) -> None:
    """F40: a taker frozen beyond its lease, without another taker: continued, it takes the request, once (fake)."""
    compute = taker(f'{step}:stop:1')
    instance = queue(cluster, 'whole')
    compute.stopped_at(step)
    lapse(cluster, mark_of(instance, 'whole'))
    compute.resume()
    active_once(cluster, instance, compute)
    settled(cluster, compute)


@pytest.mark.parametrize('step', TAKING_FAILPOINTS)
def test_cancelled_while_it_is_taken(cluster: Control, taker: Make, step: str) -> None:
    """F40: a request destroyed while a frozen taker is at each step: gone, and nothing is left (fake)."""
    compute = taker(f'{step}:stop:1')
    instance = queue(cluster)
    compute.stopped_at(step)
    result = cluster.eschedule('destroy', instance)
    one_line(result, 0, 'destroy accepted' if step == 'moved' else 'taken out of its queue')
    compute.resume()
    reached(cluster, instance, 'gone')
    until(lambda: allocations(cluster) == {}, 30, 'its claim is released')
    later = queue(cluster)
    active_once(cluster, later, compute)
    settled(cluster, compute)


@pytest.mark.parametrize('step', ['marked', 'taken'])
def test_asked_to_stop_while_taking(cluster: Control, taker: Make, step: str) -> None:
    """F40: a taker stopped in the middle completes or returns the request: it is taken, once (fake)."""
    compute = taker(f'{step}:stop:1')
    instance = queue(cluster)
    compute.stopped_at(step)
    os.kill(compute.pid, signal.SIGTERM)
    os.kill(compute.pid, signal.SIGCONT)
    until(lambda: not compute.is_running, 30, 'it ends')
    assert compute._process is not None
    assert compute._process.returncode == 0
    assert cluster.etcd.get(mark_of(instance)) is None
    start_again(compute)
    active_once(cluster, instance, compute)
    settled(cluster, compute)


def test_eschedule_killed_after_it_queued(cluster: Control, taker: Make) -> None:
    """F1: kill -9 of eschedule --queue after its transaction: it is taken, and a repeat reports it (fake)."""
    instance = str(uuid.uuid4())
    words = '--queue', '--flavor', 'small', '--uuid', instance
    with Eschedule(cluster, *words, failpoint=f'{QUEUED}:kill') as eschedule:
        eschedule.killed_at(QUEUED)
    one_line(cluster.eschedule(*words), 0, 'requested before', 'nothing is changed')
    compute = taker()
    active_once(cluster, instance, compute)
    settled(cluster, compute)


def test_eschedule_killed_after_it_cancelled(cluster: Control, taker: Make) -> None:
    """F1: kill -9 of eschedule destroy after it removed a request from its queue: permanently gone (fake)."""
    instance = queue(cluster)
    with Eschedule(cluster, 'destroy', instance, failpoint=f'{UNQUEUED}:kill') as eschedule:
        eschedule.killed_at(UNQUEUED)
    reached(cluster, instance, 'gone')
    one_line(cluster.eschedule('destroy', instance), 4, 'gone since')
    settled(cluster, taker())
