"""F34: values of the previous version are read; values of the next version are refused and kept."""

from __future__ import annotations

import json

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import read_guests
from tests.kit.servers import wait_until
from tests.kit.sharing import ANTI_AFFINITY, read_members, read_usage
from tests.kit.story import (
    SMALL_QUERY,
    boot,
    place,
    read_record,
    wait_state,
)


def test_refused_newer_request_frees_group_quota_and_name(cluster: Control, compute: Ecompute) -> None:
    """F34: a refused request of a newer version leaves its group and quota, and its name is free (fake)."""
    assert cluster.eschedule('quota', 'set', 'q', 'instances=1').code == 0
    words = (SMALL_QUERY, '--name', 'web', '--group', 'g', *ANTI_AFFINITY, '--project', 'q')
    compute.pause()  # so that it does not take the request before that is rewritten
    _, instance = place(cluster, *words)
    key = f'/hosts/{compute.uuid}/{instance}'
    cluster.etcd.put(key, json.dumps({**json.loads(cluster.etcd.get(key) or b''), 'version': 2}))
    compute.resume()
    failed = wait_state(cluster, instance, 'error')
    assert (failed['name'], failed['project_id']) == ('web', 'q')
    assert (read_members(cluster, 'g'), read_usage(cluster, 'q')) == ({}, {})
    _, repeated = place(cluster, *words)
    wait_state(cluster, repeated, 'active')


def test_newer_request_of_a_running_guest_is_a_fault(cluster: Control, compute: Ecompute) -> None:
    """F34: the request of a running guest rewritten by a newer eschedule: it stays, with a fault (fake)."""
    instance = boot(cluster)
    key = f'/hosts/{compute.uuid}/{instance}'
    original = cluster.etcd.get(key)
    assert original is not None
    newer = json.dumps({**json.loads(original), 'version': 2, 'power': 'off'})
    cluster.etcd.put(key, newer)
    wait_until(lambda: (read_record(cluster, instance) or {})['fault'], 20, 'a fault says so')
    status = read_record(cluster, instance) or {}
    assert 'version 2' in status['fault']
    assert (status['state'], set(read_guests(compute))) == ('active', {instance})
    assert cluster.etcd.get(key) == newer.encode()
    # A destroy by this version's eschedule can be parsed and is carried out.
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
