"""A stack is applied exactly once, whatever kills, freezes or repeats the apply."""

from __future__ import annotations

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import read_allocations
from tests.kit.servers import wait_until
from tests.kit.stacks import list_instances, list_states, write_stack

SHOP = {'db': {}, 'web': {'count': 3}}
NAMES = {'shop-db', 'shop-web-1', 'shop-web-2', 'shop-web-3'}


def test_pruned_instance_on_a_silent_host_does_not_block_the_others(cluster: Control, compute: Ecompute) -> None:
    assert cluster.eschedule('apply', write_stack(cluster, {**SHOP, 'web': {'count': 2}}), '--wait').code == 0
    path = write_stack(cluster, {'web': {'count': 2}})
    compute.kill()
    assert cluster.eschedule('apply', path, '--prune', '--yes').code == 0
    assert cluster.eschedule('apply', path, '--dry-run').code == 0
    again = cluster.eschedule('apply', path)
    assert (again.code, again.stderr) == (0, 'eschedule: stack shop: 2 as the file asks\n')
    compute.start()


def test_every_selects_no_failed_instance(cluster: Control, compute: Ecompute) -> None:
    user_data = cluster.directory / 'user-data'
    user_data.write_text('#cloud-config\n{}\n')
    assert cluster.eschedule('apply', write_stack(cluster, {'web': {}}), '--wait').code == 0
    compute.pause()
    assert cluster.eschedule('apply', write_stack(cluster, {'db': {'user_data': str(user_data)}})).code == 0
    for key in cluster.etcd.list_keys('/user-data/'):
        cluster.etcd.delete(key)
    compute.resume()
    wait_until(lambda: list_states(cluster, 'error'), 60, 'it has failed')
    stopped = cluster.eschedule('stop', '--every', '--wait')
    assert stopped.code == 0, stopped
    assert len(list_states(cluster, 'stopped')) == 1
    assert cluster.eschedule('destroy', '--state', 'error', '--yes').code == 0
    assert list_states(cluster, 'error') == []


@pytest.mark.usefixtures('compute')
def test_older_key_delivers_no_uuid_twice(cluster: Control) -> None:
    assert cluster.eschedule('apply', write_stack(cluster, {'db': {}}), '--wait').code == 0
    older = cluster.etcd.get('/stacks/shop') or b''
    path = write_stack(cluster, {'db': {}, 'web': {}})
    assert cluster.eschedule('apply', path, '--wait').code == 0
    before = list_instances(cluster)
    assert cluster.eschedule('destroy', 'shop-web', '--wait').code == 0
    cluster.etcd.put('/stacks/shop', older)
    refused = cluster.eschedule('apply', path)
    assert refused.code == 5
    assert f'/stacks/shop is older than its instance {before["shop-web"]}' in refused.stderr
    assert read_allocations(cluster).keys() == {before['shop-db']}
    cluster.etcd.delete('/stacks/shop')
    assert cluster.eschedule('apply', path).code == 0
    after = list_instances(cluster)
    assert after.keys() == before.keys()
    assert after['shop-db'] == before['shop-db']
    assert after['shop-web'] != before['shop-web']
