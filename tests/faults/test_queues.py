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
from tests.kit.hands import ArmedEcompute, Eschedule, check_settled, expire_key, restart_unarmed, wait_killed_at
from tests.kit.invariants import read_allocations
from tests.kit.servers import wait_until
from tests.kit.story import SMALL_QUERY, assert_one_line, wait_log_lines, wait_state
from tests.kit.tuned import make_tuned

TAKING_FAILPOINTS = ('marked', 'taken', 'moved')
QUEUED_FAILPOINTS = QUEUED_STEP, UNQUEUED_STEP = 'queued', 'unqueued'
# All the room of a compute.
WHOLE_COMPUTE = SMALL_QUERY.replace('VCPU:1', 'VCPU:4')

MakeTaker = Callable[..., ArmedEcompute]


@pytest.fixture
def make_taker(cluster: Control) -> MakeTaker:
    """A function that starts a taker: a compute with room for four, armed with a failpoint."""
    assert cluster.eschedule('flavor', 'set', 'small', SMALL_QUERY).code == 0
    assert cluster.eschedule('flavor', 'set', 'whole', WHOLE_COMPUTE).code == 0
    return lambda failpoint='': make_tuned(cluster, failpoint=failpoint, queues=True)


def queue_request(control: Control, flavor: str = 'small') -> str:
    """Queue a request; return its uuid."""
    instance = str(uuid.uuid4())
    result = control.eschedule('--queue', '--flavor', flavor, '--uuid', instance)
    assert (result.code, result.stdout) == (0, f'QUEUED INSTANCE {instance}\n'), result
    return instance


def taker_key(instance: str, flavor: str = 'small') -> str:
    return f'/queues/{flavor}/{instance}/taker'


def wait_until_active_once(control: Control, instance: str, *on: ArmedEcompute) -> ArmedEcompute:
    """Wait until it is active on one of these computes, and no other one holds a claim for it."""
    compute = wait_state(control, instance, 'active')['compute']
    (claiming,) = read_allocations(control)[instance]
    assert claiming == compute
    return next(candidate for candidate in on if candidate.uuid == compute)


@pytest.mark.parametrize('step', TAKING_FAILPOINTS)
def test_killed_taker_started_again_takes_the_same(cluster: Control, make_taker: MakeTaker, step: str) -> None:
    """F40: kill -9 of a taker at each step: started again immediately it takes the same request, once (fake)."""
    compute = make_taker(f'{step}:kill')
    instance = queue_request(cluster, 'whole')
    wait_killed_at(compute, step)
    assert (cluster.etcd.get(taker_key(instance, 'whole')) is None) == (step == 'moved')
    assert bool(read_allocations(cluster)) == (step != 'marked')
    restart_unarmed(compute)
    wait_until_active_once(cluster, instance, compute)
    check_settled(cluster, compute)


@pytest.mark.parametrize('step', ['marked', 'taken'])
def test_killed_taker_is_replaced_unless_it_has_claimed(cluster: Control, make_taker: MakeTaker, step: str) -> None:
    """F40: kill -9 of a taker with its taker key: another takes it; with its claim: it waits for the first (fake)."""
    other = make_taker()
    other.stop()
    compute = make_taker(f'{step}:kill')
    instance = queue_request(cluster)
    wait_killed_at(compute, step)
    expire_key(cluster, taker_key(instance))
    other.start()
    if step == 'taken':
        wait_log_lines(other, f'{instance} is claimed on compute {compute.uuid}')
    else:
        assert wait_until_active_once(cluster, instance, other) is other
    restart_unarmed(compute)
    assert wait_until_active_once(cluster, instance, compute, other) is (compute if step == 'taken' else other)
    check_settled(cluster, compute, other)


def test_killed_taker_is_not_blocked_by_its_own_claim(cluster: Control, make_taker: MakeTaker) -> None:
    """F40: kill -9 of a taker whose claim uses all its room, lease expired: its own claim does not block it (fake)."""
    compute = make_taker('taken:kill')
    instance = queue_request(cluster, 'whole')
    wait_killed_at(compute, 'taken')
    expire_key(cluster, taker_key(instance, 'whole'))
    assert read_allocations(cluster).keys() == {instance}
    restart_unarmed(compute)
    wait_until_active_once(cluster, instance, compute)
    check_settled(cluster, compute)


@pytest.mark.parametrize('step', ['marked', 'taken'])
def test_frozen_taker_overtaken_by_another(cluster: Control, make_taker: MakeTaker, step: str) -> None:
    """F40: a taker frozen with its taker key until another one took the request, or with its claim: once (fake)."""
    other = make_taker()
    other.stop()
    compute = make_taker(f'{step}:stop:1')
    instance = queue_request(cluster)
    compute.wait_frozen_at(step)
    other.start()
    expire_key(cluster, taker_key(instance))
    if step == 'taken':
        wait_log_lines(other, f'{instance} is claimed on compute {compute.uuid}')
    else:
        assert wait_until_active_once(cluster, instance, other) is other
    compute.resume()
    # These fill both computes, so the late taker has left the step at which it was frozen.
    more = [queue_request(cluster) for _ in range(7)]
    for name in more:
        wait_until_active_once(cluster, name, compute, other)
    wait_until_active_once(cluster, instance, compute, other)
    check_settled(cluster, compute, other)


def test_taker_frozen_after_taking_builds_once(cluster: Control, make_taker: MakeTaker) -> None:
    """F40: a taker frozen after it took a request, then continued: it is built there, once (fake)."""
    compute = make_taker('moved:stop:1')
    instance = queue_request(cluster)
    compute.wait_frozen_at('moved')
    other = make_taker()
    compute.resume()
    assert wait_until_active_once(cluster, instance, compute, other) is compute
    check_settled(cluster, compute, other)


@pytest.mark.parametrize('step', ['marked', 'taken'])
def test_taker_frozen_beyond_its_lease_without_another(cluster: Control, make_taker: MakeTaker, step: str) -> None:
    """F40: a taker frozen beyond its lease, without another taker: continued, it takes the request, once (fake)."""
    compute = make_taker(f'{step}:stop:1')
    instance = queue_request(cluster, 'whole')
    compute.wait_frozen_at(step)
    expire_key(cluster, taker_key(instance, 'whole'))
    compute.resume()
    wait_until_active_once(cluster, instance, compute)
    check_settled(cluster, compute)


@pytest.mark.parametrize('step', TAKING_FAILPOINTS)
def test_request_cancelled_during_a_take(cluster: Control, make_taker: MakeTaker, step: str) -> None:
    """F40: a request destroyed while a frozen taker is at each step: gone, and nothing is left (fake)."""
    compute = make_taker(f'{step}:stop:1')
    instance = queue_request(cluster)
    compute.wait_frozen_at(step)
    result = cluster.eschedule('destroy', instance)
    assert_one_line(result, 0, 'destroy accepted' if step == 'moved' else 'removed from its queue')
    compute.resume()
    wait_state(cluster, instance, 'gone')
    wait_until(lambda: read_allocations(cluster) == {}, 30, 'its claim is released')
    later = queue_request(cluster)
    wait_until_active_once(cluster, later, compute)
    check_settled(cluster, compute)


@pytest.mark.parametrize('step', ['marked', 'taken'])
def test_taker_stopped_during_a_take(cluster: Control, make_taker: MakeTaker, step: str) -> None:
    """F40: a taker stopped in the middle completes or returns the request: it is taken, once (fake)."""
    compute = make_taker(f'{step}:stop:1')
    instance = queue_request(cluster)
    compute.wait_frozen_at(step)
    os.kill(compute.pid, signal.SIGTERM)
    os.kill(compute.pid, signal.SIGCONT)
    wait_until(lambda: not compute.is_running, 30, 'it ends')
    assert compute._process is not None
    assert compute._process.returncode == 0
    assert cluster.etcd.get(taker_key(instance)) is None
    restart_unarmed(compute)
    wait_until_active_once(cluster, instance, compute)
    check_settled(cluster, compute)


def test_eschedule_killed_after_queueing(cluster: Control, make_taker: MakeTaker) -> None:
    """F1: kill -9 of eschedule --queue after its transaction: it is taken, and a repeat reports it (fake)."""
    instance = str(uuid.uuid4())
    words = '--queue', '--flavor', 'small', '--uuid', instance
    with Eschedule(cluster, *words, failpoint=f'{QUEUED_STEP}:kill') as eschedule:
        eschedule.assert_killed_at(QUEUED_STEP)
    assert_one_line(cluster.eschedule(*words), 0, 'requested before', 'this command changed nothing')
    compute = make_taker()
    wait_until_active_once(cluster, instance, compute)
    check_settled(cluster, compute)


def test_eschedule_killed_after_cancelling(cluster: Control, make_taker: MakeTaker) -> None:
    """F1: kill -9 of eschedule destroy after it removed a request from its queue: permanently gone (fake)."""
    instance = queue_request(cluster)
    with Eschedule(cluster, 'destroy', instance, failpoint=f'{UNQUEUED_STEP}:kill') as eschedule:
        eschedule.assert_killed_at(UNQUEUED_STEP)
    wait_state(cluster, instance, 'gone')
    assert_one_line(cluster.eschedule('destroy', instance), 4, 'gone since')
    check_settled(cluster, make_taker())
