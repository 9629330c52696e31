"""Killed between the writes by which a compute says what it is: the next start, or the same command, ends it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.kit.commands import Control, Ecompute, write_config
from tests.kit.hands import Armed, Eschedule, killed_at, settled, start_again
from tests.kit.story import SMALL, one_line, place, reserved
from tests.kit.tuned import tuned

DESCRIBED_FAILPOINTS = NOTED, SET = 'described-here', 'described'
HOST_FAILPOINTS = DISABLED, ENABLED = 'host-disabled', 'host-enabled'

GROUPS = [f'5ca1ab1e-0000-4000-8000-00000000000{number}' for number in range(2)]
STATUS = {'COMPUTE_STATUS_DISABLED', 'CUSTOM_ECOMP_DISABLED'}


def names(control: Control, compute: Armed, kind: str = 'traits') -> set[str]:
    return set(control.placement.call('GET', f'/resource_providers/{compute.uuid}/{kind}')[kind])


def add(control: Control, compute: Armed, trait: str) -> None:
    """Somebody else's trait."""
    path = f'/resource_providers/{compute.uuid}/traits'
    there = control.placement.call('GET', path)
    control.placement.call('PUT', path, {**there, 'traits': [*there['traits'], trait]})


# What is noted is noted four times: of traits and of aggregates, before they are set and after.
@pytest.mark.parametrize(('step', 'times'), [(SET, 1), *((NOTED, times) for times in (1, 2, 3, 4))])
def test_killed_while_it_says_what_it_is(cluster: Control, step: str, times: int) -> None:
    """F2: kill -9 of ecompute between what it notes and what it sets of its traits and aggregates (fake)"""

    def settings(number: int) -> dict[str, Any]:
        return {'traits': ['STORAGE_DISK_SSD', f'CUSTOM_NUMBER_{number}'], 'aggregates': [GROUPS[number]]}

    compute = tuned(cluster, **settings(0))
    add(cluster, compute, 'HW_CPU_X86_AVX2')
    compute.stop()
    where = (compute.config, cluster.etcd.endpoint, cluster.placement.url)
    fixed = {'uuid': compute.uuid, 'state': str(compute.directory / 'state')}
    write_config(*where, **fixed, **settings(1))
    compute.failpoint = f'{step}:kill'
    for _ in range(times):
        compute.launch()
        killed_at(compute, step)
    assert reserved(cluster, compute.uuid) == 4
    start_again(compute)
    assert names(cluster, compute) == {'STORAGE_DISK_SSD', 'CUSTOM_NUMBER_1', 'HW_CPU_X86_AVX2'}
    assert names(cluster, compute, 'aggregates') == {GROUPS[1]}
    compute.stop()
    write_config(*where, **fixed)
    compute.start()
    assert names(cluster, compute) == {'HW_CPU_X86_AVX2'}
    assert names(cluster, compute, 'aggregates') == set()
    place(cluster)
    settled(cluster, compute)


@pytest.mark.parametrize('disabled', [False, True])
def test_killed_in_the_middle_of_its_end(cluster: Control, disabled: bool) -> None:
    """F2: kill -9 of ecompute that has reserved its VCPU and not said that it is stopped, disabled or not (fake)"""
    compute = tuned(cluster, failpoint='closed:kill')
    if disabled:
        assert cluster.eschedule('host', 'disable', compute.uuid).code == 0
    os.kill(compute.pid, signal.SIGTERM)
    killed_at(compute, 'closed')
    assert reserved(cluster, compute.uuid) == 4
    assert names(cluster, compute) == (STATUS if disabled else set())
    start_again(compute)
    assert reserved(cluster, compute.uuid) == 0
    assert names(cluster, compute) == (STATUS if disabled else set())
    if disabled:
        assert cluster.eschedule(SMALL).code == 3
        assert cluster.eschedule('host', 'enable', compute.uuid).code == 0
    place(cluster)
    settled(cluster, compute)


@pytest.mark.parametrize(
    ('command', 'already', 'step'),
    [('disable', 'is disabled already', DISABLED), ('enable', 'is enabled already', ENABLED)],
)
def test_killed_before_it_says_so(cluster: Control, compute: Ecompute, command: str, already: str, step: str) -> None:
    """F1: kill -9 of host disable, and of host enable, once it is done: said again, it is so already (fake)"""
    if command == 'enable':
        assert cluster.eschedule('host', 'disable', compute.uuid).code == 0
    with Eschedule(cluster, 'host', command, compute.uuid, failpoint=f'{step}:kill') as killed:
        killed.killed_at(step)
    one_line(cluster.eschedule('host', command, compute.uuid), 0, already)
    assert cluster.eschedule(SMALL).code == (3 if command == 'disable' else 0)
