"""Repeated requests, and many concurrent requests.

Attempts that are killed, frozen or interrupted are in tests/faults/test_eschedule.py, their orders in tests/model.
"""

from __future__ import annotations

import uuid

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check_invariants, read_allocations, read_lasting_keys
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    assert_one_line,
    parse_notice,
    place,
    run_concurrently,
    wait_address,
    wait_log_lines,
    wait_state,
)

# A repeated uuid: nothing is made twice, however often it is requested and wherever the first attempt died.


def test_repeated_request_changes_nothing(cluster: Control, compute: Ecompute, instance: str) -> None:
    assert place(cluster, '--uuid', instance, SMALL_QUERY, IMAGE) == (compute.uuid, instance)
    wait_address(cluster, instance)
    before = read_lasting_keys(cluster), read_allocations(cluster)
    revision = cluster.etcd.call('kv/range', {'key': 'AA=='})['header']['revision']

    repeated = cluster.eschedule('--uuid', instance, SMALL_QUERY, IMAGE)

    assert parse_notice(repeated) == (compute.uuid, instance)
    assert_one_line(repeated, 0, instance, 'requested before', 'this command changed nothing')
    # A uuid is compared without regard to case.
    assert parse_notice(cluster.eschedule('--uuid', instance.upper(), SMALL_QUERY, IMAGE))[1] == instance
    waited = cluster.eschedule('--uuid', instance, '--wait', SMALL_QUERY, IMAGE)
    assert waited.stdout.splitlines()[1:] == [wait_address(cluster, instance)]
    assert (read_lasting_keys(cluster), read_allocations(cluster)) == before
    assert cluster.etcd.call('kv/range', {'key': 'AA=='})['header']['revision'] == revision

    for words in ([f'{SMALL_QUERY}&limit=1', IMAGE], [SMALL_QUERY]):
        refused = cluster.eschedule('--uuid', instance, *words)
        assert_one_line(refused, 5, instance, 'exists', SMALL_QUERY, IMAGE)
        assert refused.stdout == ''
    assert (read_lasting_keys(cluster), read_allocations(cluster)) == before
    assert len(wait_log_lines(compute, 'INSTANTIATE')) == 1


def test_concurrent_requests_with_one_uuid_place_one_instance(cluster: Control) -> None:
    computes, instance = (cluster.ecompute(), cluster.ecompute()), str(uuid.uuid4())
    results = run_concurrently(cluster, [['--uuid', instance, SMALL_QUERY]] * 3, width=3)
    # One command creates it; the others report it as requested before, or that they were overtaken.
    assert {result.code for result in results} <= {0, 5}, results
    targets = {parse_notice(result) for result in results if result.code == 0}
    assert len(targets) == 1, results
    active_record = wait_state(cluster, instance, 'active')
    assert targets == {(active_record['compute'], instance)}
    check_invariants(cluster, *computes)
