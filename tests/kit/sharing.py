"""Helpers of the scenario and fault tests about sets, groups, quotas and hosts."""

from __future__ import annotations

import json
from typing import Any

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import expire_key
from tests.kit.story import NOTIFIED_PATTERN

LARGE_INVENTORY = 'VCPU:20,DISK_GB:100,MEMORY_MB:4096'
ANTI_AFFINITY = ('--policy', 'anti-affinity')
AFFINITY = ('--policy', 'affinity')


def start_computes(cluster: Control, *inventories: str) -> list[Ecompute]:
    # Computes are started from this thread, because they die with the thread that starts them.
    computes = [Ecompute(cluster.etcd.endpoint, cluster.placement.url, inventory) for inventory in inventories]
    for compute in computes:
        cluster.at_exit.callback(compute.close)
        compute.launch()
    for compute in computes:
        compute.wait_ready()
    return computes


def parse_notices(stdout: str) -> list[tuple[str, str]]:
    notices = NOTIFIED_PATTERN.findall(stdout)
    assert len(notices) == len(stdout.splitlines()), stdout
    return notices


def read_members(cluster: Control, name: str) -> dict[str, str]:
    value = cluster.etcd.get(f'/groups/{name}')
    return {} if value is None else dict(json.loads(value)['members'])


def read_usage(cluster: Control, project: str) -> dict[str, int]:
    value = cluster.etcd.get(f'/quotas/{project}')
    assert value is not None
    return dict(json.loads(value)['used'])


def list_hosts(control: Control) -> dict[str, dict[str, Any]]:
    result = control.eschedule('hosts', '-f', 'json')
    assert (result.code, result.stderr) == (0, ''), result
    return {host['compute']: host for host in json.loads(result.stdout)}


def list_states(control: Control) -> dict[str, str]:
    return {compute: host['state'] for compute, host in list_hosts(control).items()}


def kill_and_lapse(control: Control, compute: Ecompute) -> None:
    compute.kill()
    expire_key(control, f'/computes/{compute.uuid}')
