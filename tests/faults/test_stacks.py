"""A stack is applied exactly once, whatever kills, freezes or repeats the apply."""

from __future__ import annotations

import json
import signal

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule
from tests.kit.invariants import check_invariants, read_allocations
from tests.kit.many import ManyComputes
from tests.kit.servers import wait_until
from tests.kit.stacks import QUERY, list_instances, list_states, write_stack

SHOP = {'db': {}, 'web': {'count': 3}}
APPLY_FAILPOINTS = ('stack-begun', 'stack-announced', 'claimed-some', 'stack-claimed', 'stack-delivered')
CHANGE_FAILPOINTS = REMOVED, PART_DELIVERED = 'stack-removed', 'stack-part'
NAMES = {'shop-db', 'shop-web-1', 'shop-web-2', 'shop-web-3'}


@pytest.mark.parametrize('step', APPLY_FAILPOINTS)
def test_killed_apply_is_continued_by_the_next(cluster: Control, compute: Ecompute, step: str) -> None:
    path = write_stack(cluster, SHOP)
    with Eschedule(cluster, 'apply', path, failpoint=f'{step}:kill') as eschedule:
        eschedule.assert_killed_at(step)
        check_invariants(cluster, compute, dead=[eschedule.pid])
    repeated = cluster.eschedule('apply', path, '-f', 'json')
    assert repeated.code == 0, repeated
    instances = list_instances(cluster)
    assert instances.keys() == NAMES
    assert read_allocations(cluster).keys() == set(instances.values())
    assert {each['instance'] for each in json.loads(repeated.stdout)['instances']} == set(instances.values())
    assert cluster.etcd.list_keys('/requests/') == []
    again = cluster.eschedule('apply', path)
    assert (again.code, again.stdout) == (0, '')
    assert list_instances(cluster) == instances


@pytest.mark.usefixtures('compute')
def test_second_apply_is_refused_while_one_is_in_flight(cluster: Control) -> None:
    path = write_stack(cluster, SHOP)
    with Eschedule(cluster, 'apply', path, failpoint='stack-claimed:stop') as eschedule:
        eschedule.wait_frozen_at('stack-claimed')
        second = cluster.eschedule('apply', path)
        assert second.code == 5
        assert f'another apply is in flight, process {eschedule.pid} on ' in second.stderr
        eschedule.resume()
        assert eschedule.wait().code == 0
    assert list_instances(cluster).keys() == NAMES


@pytest.mark.usefixtures('compute')
@pytest.mark.parametrize('step', ['claimed-some', 'stack-claimed'])
def test_frozen_apply_that_was_overtaken_changes_nothing(cluster: Control, step: str) -> None:
    path = write_stack(cluster, SHOP)
    with Eschedule(cluster, 'apply', path, failpoint=f'{step}:stop:1') as eschedule:
        eschedule.wait_frozen_at(step)
        (attempt,) = cluster.etcd.list_keys('/requests/')
        value = json.loads(cluster.etcd.get(attempt) or b'')
        cluster.etcd.put(attempt, json.dumps({**value, 'pid': 2**22 - 1}), cluster.etcd.grant())
        second = cluster.eschedule('apply', path)
        assert second.code == 0, second
        instances = list_instances(cluster)
        eschedule.resume()
        first = eschedule.wait()
        assert first.code == 5, first
    assert list_instances(cluster) == instances
    assert read_allocations(cluster).keys() == set(instances.values())


@pytest.mark.usefixtures('compute')
def test_replacement_killed_anywhere_is_continued(cluster: Control) -> None:
    assert cluster.eschedule('apply', write_stack(cluster, {'web': {'count': 2}})).code == 0
    before = list_instances(cluster)
    path = write_stack(cluster, {'web': {'count': 2, 'query': QUERY.replace('64', '65')}})
    refused = cluster.eschedule('apply', path)
    assert refused.code == 5
    assert 'query: it has' in refused.stdout
    for step in ('stack-announced', 'stack-claimed', 'stack-delivered'):
        with Eschedule(cluster, 'apply', path, '--replace', 'web', '--yes', failpoint=f'{step}:kill') as eschedule:
            eschedule.assert_killed_at(step)
    final = cluster.eschedule('apply', path, '--wait')
    assert final.code == 0, final
    after = list_instances(cluster)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


@pytest.mark.usefixtures('compute')
def test_prune_destroys_only_what_the_file_lacks(cluster: Control) -> None:
    assert cluster.eschedule('apply', write_stack(cluster, SHOP)).code == 0
    before = list_instances(cluster)
    path = write_stack(cluster, {'web': {'count': 3}})
    assert cluster.eschedule('apply', path).code == 0
    assert list_instances(cluster) == before
    unconfirmed = cluster.eschedule('apply', path, '--prune')
    assert (unconfirmed.code, 'would destroy 1 instance, with their disks: shop-db' in unconfirmed.stderr) == (2, True)
    with Eschedule(cluster, 'apply', path, '--prune', '--yes', failpoint=f'{REMOVED}:kill') as eschedule:
        eschedule.assert_killed_at(REMOVED)
    assert cluster.eschedule('apply', path, '--prune', '--yes', '--wait').code == 0
    assert list_instances(cluster).keys() == NAMES - {'shop-db'}


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


@pytest.mark.usefixtures('compute')
def test_lost_key_is_restored_from_the_requests(cluster: Control) -> None:
    path = write_stack(cluster, SHOP)
    assert cluster.eschedule('apply', path, '--wait').code == 0
    before = list_instances(cluster)
    stored = json.loads(cluster.etcd.get('/stacks/shop') or b'')
    cluster.etcd.delete('/stacks/shop')
    assert cluster.eschedule('apply', path).code == 0
    cluster.eschedule('destroy', 'shop-db', '--wait')
    assert cluster.eschedule('apply', path).code == 0
    assert json.loads(cluster.etcd.get('/stacks/shop') or b'')['epoch'] == stored['epoch']
    after = list_instances(cluster)
    assert {name for name in NAMES if after[name] != before[name]} == {'shop-db'}


@pytest.mark.usefixtures('compute')
def test_key_that_is_lost_during_an_apply_loses_no_claim(cluster: Control) -> None:
    path = write_stack(cluster, SHOP)
    with Eschedule(cluster, 'apply', path, failpoint='stack-claimed:stop') as eschedule:
        eschedule.wait_frozen_at('stack-claimed')
        cluster.etcd.delete('/stacks/shop')
        eschedule.resume()
        refused = eschedule.wait()
    assert refused.code == 5, refused
    assert 'another eschedule changed it; nothing was placed, and the claim is released. Try: ' in refused.stderr
    assert (read_allocations(cluster), cluster.etcd.list_keys('/requests/')) == ({}, [])
    assert cluster.eschedule('apply', path).code == 0
    assert read_allocations(cluster).keys() == set(list_instances(cluster).values())


@pytest.mark.usefixtures('compute')
def test_no_room_creates_nothing_and_names_the_member(cluster: Control) -> None:
    path = write_stack(cluster, {'db': {'query': QUERY.replace('VCPU:1', 'VCPU:3')}, 'web': {'count': 2}})
    for words in ((), ('--dry-run',)):
        refused = cluster.eschedule('apply', path, *words)
        assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
        assert 'web: there is room for 1 of 2; nothing was created' in refused.stderr
        assert 'then VCPU is short by' in refused.stderr
    assert list_instances(cluster) == {}
    assert read_allocations(cluster) == {}


def test_delivery_is_split_on_an_etcd_with_the_default_limit(cluster: Control) -> None:
    cluster.at_exit.enter_context(ManyComputes(cluster, 20))
    members = {'web': {'count': 40}, 'db': {'count': 30, 'query': QUERY.replace('64', '65')}}
    path = write_stack(cluster, members)
    with Eschedule(cluster, 'apply', path, failpoint=f'{PART_DELIVERED}:kill') as eschedule:
        eschedule.assert_killed_at(PART_DELIVERED)
    assert len(list_instances(cluster)) == 25
    repeated = cluster.eschedule('apply', path)
    assert repeated.code == 0, repeated
    instances = list_instances(cluster)
    assert len(instances) == 70
    assert read_allocations(cluster).keys() == set(instances.values())
    assert cluster.eschedule('destroy', '--file', path, '--yes', '--wait').code == 0
    assert list_instances(cluster) == {}


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


def test_invalid_stack_name_is_one_mistake(cluster: Control) -> None:
    refused = cluster.eschedule('apply', write_stack(cluster, {'db': {}}, name='my-shop'))
    assert (refused.code, refused.stderr.count('\n')) == (2, 1), refused
    assert "'my-shop' is not a valid stack name" in refused.stderr


def test_missing_query_is_reported_with_the_line_of_its_member(cluster: Control) -> None:
    path = cluster.directory / 'lines.yaml'
    path.write_text('stack: shop\ninstances:\n  db: {query: resources=VCPU:1}\n  web: {count: 2}\n')
    refused = cluster.eschedule('apply', str(path))
    assert (refused.code, refused.stderr.count('\n')) == (2, 1), refused
    assert 'lines.yaml:4: instances.web.query: is missing' in refused.stderr


@pytest.mark.usefixtures('compute')
def test_selected_instances_are_in_the_order_of_list(cluster: Control) -> None:
    assert cluster.eschedule('apply', write_stack(cluster, {'web': {'count': 4}})).code == 0
    asked = cluster.eschedule('destroy', '--stack', 'shop')
    assert (asked.code, 'shop-web-1, shop-web-2, shop-web-3, shop-web-4' in asked.stderr) == (2, True), asked


def test_pruned_instance_on_a_silent_host_does_not_block_the_others(cluster: Control, compute: Ecompute) -> None:
    assert cluster.eschedule('apply', write_stack(cluster, {**SHOP, 'web': {'count': 2}}), '--wait').code == 0
    path = write_stack(cluster, {'web': {'count': 2}})
    compute.kill()
    assert cluster.eschedule('apply', path, '--prune', '--yes').code == 0
    assert cluster.eschedule('apply', path, '--dry-run').code == 0
    again = cluster.eschedule('apply', path)
    assert (again.code, again.stderr) == (0, 'eschedule: stack shop: 2 as the file asks\n')
    compute.start()


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


def test_interrupted_split_delivery_says_how_many_exist(cluster: Control) -> None:
    cluster.at_exit.enter_context(ManyComputes(cluster, 20))
    path = write_stack(cluster, {'web': {'count': 70}})
    with Eschedule(cluster, 'apply', path, failpoint='stack-part:stop:1') as eschedule:
        eschedule.wait_frozen_at('stack-part')
        eschedule.send_signal(signal.SIGINT)
        eschedule.resume()
        interrupted = eschedule.wait()
    existing = list_instances(cluster)
    assert interrupted.code == 6
    assert f'eschedule: {len(existing)} of 70 new instances exist\n' in interrupted.stderr
    assert 'all or none' not in interrupted.stderr
    assert read_allocations(cluster).keys() == set(existing.values())


@pytest.mark.usefixtures('compute')
def test_preview_with_destroy_first_needs_no_room_for_both(cluster: Control) -> None:
    assert cluster.eschedule('apply', write_stack(cluster, {'web': {'count': 4}}), '--wait').code == 0
    path = write_stack(cluster, {'web': {'count': 4, 'query': QUERY.replace('64', '65')}})
    assert cluster.eschedule('apply', path, '--replace-all', '--dry-run').code == 3
    preview = cluster.eschedule('apply', path, '--replace-all', '--destroy-first', '--dry-run')
    assert preview.code == 8, preview
    assert 'whether there is room is known only after the replaced instances are destroyed' in preview.stderr
    assert cluster.eschedule('apply', path, '--replace-all', '--destroy-first', '--yes').code == 0


@pytest.mark.usefixtures('compute')
def test_replacement_that_the_quota_refuses_hints_at_destroy_first(cluster: Control) -> None:
    assert cluster.eschedule('apply', write_stack(cluster, {'web': {'count': 2}}), '--wait').code == 0
    (project,) = {record['project_id'] for record in json.loads(cluster.eschedule('list', '-f', 'json').stdout)}
    assert cluster.eschedule('quota', 'set', project, 'instances=3').code == 0
    path = write_stack(cluster, {'web': {'count': 2, 'query': QUERY.replace('64', '65')}})
    refused = cluster.eschedule('apply', path, '--replace', 'web', '--yes')
    assert refused.code == 3
    assert 'Try: --destroy-first' in refused.stderr
    assert cluster.eschedule('apply', path, '--replace', 'web', '--yes', '--destroy-first').code == 0


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
def test_claim_of_a_killed_apply_with_another_query_names_no_uuid_as_cure(cluster: Control) -> None:
    path = write_stack(cluster, SHOP)
    with Eschedule(cluster, 'apply', path, failpoint='stack-claimed:kill') as eschedule:
        eschedule.assert_killed_at('stack-claimed')
    changed = cluster.eschedule('apply', write_stack(cluster, {**SHOP, 'db': {'query': QUERY.replace('64', '65')}}))
    assert changed.code == 5
    assert 'Fix: wait two minutes (' in changed.stderr
    assert 'use another uuid' not in changed.stderr
    assert cluster.eschedule('apply', path).code == 0
    assert read_allocations(cluster).keys() == set(list_instances(cluster).values())


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
