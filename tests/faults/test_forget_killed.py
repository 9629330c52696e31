"""F1: host forget killed between its steps: the same command again goes on."""

from __future__ import annotations

import socket

import pytest

from tests.kit.commands import Control
from tests.kit.hands import Eschedule, lapse, settled
from tests.kit.invariants import everything
from tests.kit.story import boot_all, one_line, reached

FORGET_FAILPOINTS = {'host-released': 3, 'host-emptied': 1, 'host-unregistered': 1}
"""Where it dies, and how many things the second one removes, of two instances and a provider; a name goes with that."""


@pytest.mark.parametrize(('step', 'left'), FORGET_FAILPOINTS.items())
def test_killed_in_the_middle_it_is_run_again(cluster: Control, step: str, left: int) -> None:
    """F1: kill -9 of host forget with a claim released, with all gone but the provider, and but its name (fake)"""
    compute = cluster.ecompute()
    instances = boot_all(cluster, 2)
    compute.kill()
    lapse(cluster, f'/computes/{compute.uuid}')
    assert cluster.eschedule('destroy', *instances).code == 0
    with Eschedule(cluster, 'host', 'forget', '--fenced', compute.uuid, failpoint=f'{step}:kill') as killed:
        killed.killed_at(step)
    assert (compute.uuid in cluster.eschedule('hosts').stdout) == (step != 'host-unregistered')
    again = cluster.eschedule('host', 'forget', '--fenced', socket.gethostname())
    assert again.code == 0, again
    assert len(again.stderr.splitlines()) == left, again
    for instance in instances:
        reached(cluster, instance, 'gone')
    gone = {f'/instances/{compute.uuid}/{instance}' for instance in instances}
    assert set(everything(cluster)) - {'/cluster'} == gone
    one_line(cluster.eschedule('host', 'forget', '--fenced', compute.uuid), 4, 'no such compute')
    settled(cluster)
