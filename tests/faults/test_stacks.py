"""A stack is applied exactly once, whatever kills, freezes or repeats the apply."""

from __future__ import annotations

import json

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule
from tests.kit.invariants import read_allocations
from tests.kit.many import ManyComputes
from tests.kit.servers import wait_until
from tests.kit.stacks import list_instances, list_states, write_stack

SHOP = {'db': {}, 'web': {'count': 3}}
NAMES = {'shop-db', 'shop-web-1', 'shop-web-2', 'shop-web-3'}


@pytest.mark.usefixtures('compute')
def test_member_destroyed_manually_gets_a_new_uuid_once(cluster: Control) -> None:
    path = write_stack(cluster, SHOP)
    assert cluster.eschedule('apply', path, '--wait').code == 0
    before = list_instances(cluster)
    assert cluster.eschedule('destroy', 'shop-web-2', '--wait').code == 0
    assert cluster.eschedule('apply', path).code == 0
    after = list_instances(cluster)
    assert after.keys() == NAMES
    assert {name for name in NAMES if after[name] != before[name]} == {'shop-web-2'}


@pytest.mark.slow
def test_refused_part_of_a_split_delivery_says_how_many_instances_exist(cluster: Control) -> None:
    cluster.at_exit.enter_context(ManyComputes(cluster, 20))
    path = write_stack(cluster, {'web': {'count': 70}})
    with Eschedule(cluster, 'apply', path, failpoint='stack-part:stop') as eschedule:
        eschedule.wait_frozen_at('stack-part')
        stored = json.loads(cluster.etcd.get('/stacks/shop') or b'')
        cluster.etcd.put('/stacks/shop', json.dumps(stored))
        eschedule.resume()
        refused = eschedule.wait()
    assert refused.code == 5, refused
    assert 'another eschedule changed it; 25 of 70 new instances exist. Try: the same command' in refused.stderr
    assert cluster.eschedule('apply', path).code == 0
    assert len(list_instances(cluster)) == 70


def test_pruned_instance_on_a_silent_host_does_not_block_the_others(cluster: Control, compute: Ecompute) -> None:
    assert cluster.eschedule('apply', write_stack(cluster, {**SHOP, 'web': {'count': 2}}), '--wait').code == 0
    path = write_stack(cluster, {'web': {'count': 2}})
    compute.kill()
    assert cluster.eschedule('apply', path, '--prune', '--yes').code == 0
    assert cluster.eschedule('apply', path, '--dry-run').code == 0
    again = cluster.eschedule('apply', path)
    assert (again.code, again.stderr) == (0, 'eschedule: stack shop: 2 as the file asks\n')
    compute.start()


@pytest.mark.slow
def test_failed_members_of_many_groups_are_replaced_on_an_etcd_with_the_default_limit(cluster: Control) -> None:
    user_data = cluster.directory / 'user-data'
    user_data.write_text('#cloud-config\n{}\n')
    computes = cluster.at_exit.enter_context(ManyComputes(cluster, 20))
    groups = {f'web{number}': {'name': f'g{number}', 'policy': 'affinity'} for number in range(40)}
    members = {name: {'group': group, 'user_data': str(user_data)} for name, group in groups.items()}
    path = write_stack(cluster, members)
    computes.pause()
    assert cluster.eschedule('apply', path).code == 0
    for key in cluster.etcd.list_keys('/user-data/'):
        cluster.etcd.delete(key)
    computes.resume()
    wait_until(lambda: len(list_states(cluster, 'error')) == 40, 60, 'all have failed')
    replaced = cluster.eschedule('apply', path, '--replace-all', '--yes', '--wait')
    assert replaced.code == 0, replaced
    assert len(list_states(cluster, 'active')) == 40


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
