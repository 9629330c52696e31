"""Concurrent requests for the last places of a compute with fake guests."""

from __future__ import annotations

from collections import Counter

from tests.kit.commands import Control
from tests.kit.invariants import check_invariants
from tests.kit.story import (
    SMALL_QUERY,
    parse_notice,
    run_concurrently,
    wait_state,
)


def test_concurrent_requests_fill_a_compute_exactly(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:7,DISK_GB:100,MEMORY_MB:4096')
    first = [parse_notice(result)[1] for result in run_concurrently(cluster, [[SMALL_QUERY]] * 5, width=5)]
    assert len(set(first)) == 5
    for instance in first:
        assert wait_state(cluster, instance, 'active')['compute'] == compute.uuid

    second = run_concurrently(cluster, [[SMALL_QUERY]] * 5, width=5)

    assert Counter(result.code for result in second) == {0: 2, 3: 3}
    assert [result.stdout for result in second if result.code == 3] == ['NO ALLOCATIONS LEFT\n'] * 3
    usages = cluster.placement.call('GET', f'/resource_providers/{compute.uuid}/usages')['usages']
    assert usages == {'VCPU': 7, 'DISK_GB': 7, 'MEMORY_MB': 7 * 128}
    check_invariants(cluster, compute)
    log = compute.log.read_text()
    wire = f"{{'{compute.uuid}': {{'resources': {{'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}}}}}}"
    assert log.count('INSTANTIATE INSTANCE ') == log.count(f'ALLOCATIONS ARE {wire}') == 7
