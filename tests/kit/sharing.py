"""Sets, groups, quotas and hosts: what their stories and their faults both ask."""

from __future__ import annotations

import json
from typing import Any

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import lapse
from tests.kit.story import NOTIFIED

ROOMY = 'VCPU:20,DISK_GB:100,MEMORY_MB:4096'
APART, TOGETHER = ('--policy', 'anti-affinity'), ('--policy', 'affinity')


def started(cluster: Control, *inventories: str) -> list[Ecompute]:
    """Computes, started side by side. From this thread, with whose end they would end."""
    computes = [Ecompute(cluster.etcd.endpoint, cluster.placement.url, each) for each in inventories]
    for compute in computes:
        cluster.at_exit.callback(compute.close)
        compute.launch()
    for compute in computes:
        compute.wait_ready()
    return computes


def all_notified(stdout: str) -> list[tuple[str, str]]:
    """(compute, instance) of each line; there is no other."""
    found = NOTIFIED.findall(stdout)
    assert len(found) == len(stdout.splitlines()), stdout
    return found


def members(cluster: Control, name: str) -> dict[str, str]:
    value = cluster.etcd.get(f'/groups/{name}')
    return {} if value is None else dict(json.loads(value)['members'])


def used(cluster: Control, project: str) -> dict[str, int]:
    value = cluster.etcd.get(f'/quotas/{project}')
    assert value is not None
    return dict(json.loads(value)['used'])


def hosts(control: Control) -> dict[str, dict[str, Any]]:
    result = control.eschedule('hosts', '-f', 'json')
    assert (result.code, result.stderr) == (0, ''), result
    return {each['compute']: each for each in json.loads(result.stdout)}


def states(control: Control) -> dict[str, str]:
    return {compute: each['state'] for compute, each in hosts(control).items()}


def silence(control: Control, compute: Ecompute) -> None:
    """kill -9, and as long after as its lease lasts."""
    compute.kill()
    lapse(control, f'/computes/{compute.uuid}')
