"""`eschedule apply FILE` on real etcd and placement: exit codes, questions and writes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ecomp.cli.commands import COMMANDS
from ecomp.cli.completion import print_candidates
from ecomp.model import keys
from ecomp.model.roles import WRITE, Permission, RevokePermission
from ecomp.model.stack import MAX_STACK_SIZE
from ecomp.model.stored import encode
from ecomp.scheduler.placing import stack as placing
from ecomp.scheduler.queries.stacks import load_stack
from ecomp.store.messages import Range, Transaction
from ecomp.store.roles import Accounts
from tests.functional.cloud import Cloud
from tests.kit.behind_roles import start_etcd_with_roles
from tests.kit.commands import Control, Ecompute, Result, run_in_process
from tests.kit.hands import Eschedule
from tests.kit.invariants import read_allocations
from tests.kit.journal import JOURNAL
from tests.kit.many import ManyComputes
from tests.kit.secured import load_etcd_config
from tests.kit.servers import Etcd, PlacementServer, make_environment, wait_until
from tests.kit.store_client import open_store
from tests.kit.story import IMAGE, read_record, wait_state

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'


def write_stack(directory: Path, **members: dict[str, Any]) -> str:
    path = directory / f'stack-{len(list(directory.iterdir()))}.yaml'
    instances = {member: {'query': QUERY, 'image': IMAGE, **values} for member, values in members.items()}
    path.write_text(json.dumps({'stack': 'shop', 'instances': instances}))  # JSON is YAML
    return str(path)


def change_memory(megabytes: int, vcpus: int = 1) -> dict[str, str]:
    return {'query': f'resources=VCPU:{vcpus},DISK_GB:1,MEMORY_MB:{megabytes}'}


def list_names(control: Control, *words: str) -> list[str]:
    result = control.eschedule('list', *words, '-f', 'json')
    assert result.code == 0, result
    return sorted(
        record['name'] for record in json.loads(result.stdout) if record['state'] not in ('gone', 'destroying')
    )


def list_memory(control: Control) -> list[int]:
    return sorted(held['MEMORY_MB'] for claim in read_allocations(control).values() for held in claim.values())


def read_actions(result: Result) -> dict[str, str]:
    return {each['name']: each['action'] for each in json.loads(result.stdout)['instances']}


@pytest.mark.usefixtures('placement')
def test_mistakes_that_only_the_servers_know_are_reported_together(control: Control) -> None:
    control.ecompute()  # placement looks at no name that comes after the last compute is ruled out
    assert control.eschedule('flavor', 'set', 'fast', f'{QUERY}&required=HW_CPU_X86_AVX2').code == 0
    path = control.directory / 'wrong.yaml'
    path.write_text(f"""\
stack: wrong
instances:
  db:
    query: {QUERY},VGPUS:1
  web:
    query: {QUERY}&required=HW_CPU_X86_AVX3,CUSTOM_NOWHERE
    group: {{name: g, strict: false}}
  api: {{query: resources=VCPU:1, group: g}}
  one: {{flavor: fast, on: hv9}}
  two: {{query: '{QUERY}&in_tree=hv8'}}
  own: {{query: '{QUERY}&member_of=mine', count: 2}}
""")
    for options in ((), ('--dry-run',)):
        refused = control.eschedule('apply', str(path), *options)
        assert (refused.code, refused.stdout) == (2, ''), refused
        lines = refused.stderr.removeprefix('eschedule: ').replace(f'{path}:', '').splitlines()
        assert lines == [
            '4: instances.db.query: placement knows no resource class VGPUS (did you mean VGPU?)',
            '6: instances.web.query: placement knows no trait HW_CPU_X86_AVX3 (did you mean HW_CPU_X86_AVX?); '
            'placement knows no trait CUSTOM_NOWHERE',
            '7: instances.web.group: group g does not exist. Fix: give its policy, as {name: g, policy: affinity}',
            '8: instances.api.query: lacks MEMORY_MB, DISK_GB, which every guest needs. '
            'Fix: add MEMORY_MB:…,DISK_GB:… to resources=',
            '9: instances.one.on: hv9: no host has this name or uuid. Try: eschedule hosts',
            '10: instances.two.query: hv8: no host has this name or uuid. Try: eschedule hosts',
            '11: instances.own.query: placement refuses the request: Invalid query string parameters: Expected '
            "'member_of' parameter to contain valid UUID(s). Got: mine",
        ]
    assert control.etcd.list_keys('/stacks/wrong') == []
    # A host or group that is gone does not keep the instances from being destroyed.
    path.write_text(f"stack: wrong\ninstances: {{db: {{query: '{QUERY}', on: hv9, group: g}}}}\n")
    assert control.eschedule('destroy', '--file', str(path), '--yes').code == 0
    assert control.eschedule('flavor', 'delete', 'fast').code == 0


@pytest.mark.usefixtures('compute')
def test_protected_instances_are_neither_replaced_nor_pruned(cluster: Control) -> None:
    directory = cluster.directory
    assert cluster.eschedule('apply', write_stack(directory, db={}, web={}), '--wait').code == 0
    assert cluster.eschedule('protect', 'shop-db', 'shop-web').code == 0
    refused = cluster.eschedule('apply', write_stack(directory, db={}, web=change_memory(96)), '--replace-all', '--yes')
    assert (refused.code, 'it is protected. Fix: eschedule unprotect shop-web' in refused.stderr) == (5, True), refused
    pruned = cluster.eschedule('apply', write_stack(directory, web={}), '--prune', '--yes')
    assert (pruned.code, 'it is protected. Fix: eschedule unprotect shop-db' in pruned.stdout) == (0, True), pruned
    assert 'which --prune destroys' not in pruned.stderr
    assert list_names(cluster) == ['shop-db', 'shop-web']
    for words in (('unprotect', 'shop-db'), ('destroy', 'shop-db', '--wait')):
        assert cluster.eschedule(*words).code == 0


def test_host_names_in_a_file_and_in_a_query(cluster: Control, compute: Ecompute) -> None:
    (host,) = json.loads(cluster.eschedule('hosts', '-f', 'json').stdout)
    path = cluster.directory / 'named.yaml'
    path.write_text(f"""\
stack: shop
instances:
  db:
    query: {QUERY}
    image: {IMAGE}
    on: {host['hostname']}
  web: {{query: '{QUERY}&in_tree={host['hostname']}', image: '{IMAGE}'}}
""")
    for words in (('--wait',), (), ('--dry-run',)):  # a repetition finds no difference
        applied = cluster.eschedule('apply', str(path), *words)
        assert applied.code == 0, applied
    created = cluster.eschedule(f'{QUERY}&in_tree={host["hostname"]}', IMAGE, '--name', 'alone', '--wait')
    assert created.code == 0, created
    queries = [record['query'] for record in json.loads(cluster.eschedule('list', '-f', 'json').stdout)]
    assert queries == [f'{QUERY}&in_tree={compute.uuid}'] * 3
    refused = cluster.eschedule(f'{QUERY}&in_tree=hv9', IMAGE)
    assert (refused.code, 'hv9: no host has this name' in refused.stderr) == (4, True), refused
    joined = cluster.eschedule('apply', str(path), '--wait', 'ready', '--', '--wait=ready')
    assert joined.code == 2
    assert joined.stderr == 'eschedule: apply: --wait takes its stage after =. Fix: write --wait=ready\n'


@pytest.mark.unaudited('its compute is a key that nobody keeps')
def test_dry_run_predicts_each_outcome_and_writes_nothing(cluster: Control, requests: list[Any]) -> None:
    Cloud(cluster.etcd, cluster.placement, None, None).make_compute(VCPU=4, MEMORY_MB=512, DISK_GB=10)  # type: ignore[arg-type]
    assert cluster.eschedule(QUERY, IMAGE, '--name', 'shop-taken').code == 0
    shop = write_stack(cluster.directory, db={}, web={'count': 2})
    more = write_stack(cluster.directory, db=change_memory(65), web={'count': 2})
    most = write_stack(cluster.directory, db={}, web={'count': 4})
    less = write_stack(cluster.directory, web={'count': 2})
    odd = write_stack(cluster.directory, db={}, taken={})
    (broken := cluster.directory / 'broken.yaml').write_text('stack: shop\ninstances: {db: {flavour: x}}\n')

    def dry_run(path: str, *options: str) -> tuple[int, dict[str, str]]:
        requests.clear()
        before, claims = cluster.etcd.call('kv/range', {'key': 'AA=='})['header'], read_allocations(cluster)
        result = cluster.eschedule('apply', path, '--dry-run', '-f', 'json', *options)
        after = cluster.etcd.call('kv/range', {'key': 'AA=='})['header']
        assert (after['revision'], read_allocations(cluster)) == (before['revision'], claims)
        reads = [each for each in requests if isinstance(each, Transaction)]
        assert all(isinstance(part, Range) for each in reads for part in each.success)
        assert {type(each) for each in requests} <= {Range, Transaction}  # no lease either
        return result.code, read_actions(result) if result.code in (0, 1, 5, 8) else {}

    new = dict.fromkeys(('shop-db', 'shop-web-1', 'shop-web-2'), 'create')
    kept = dict.fromkeys(new, 'keep')
    assert dry_run(shop) == (8, new)
    assert dry_run(most) == (3, {})
    assert dry_run(odd) == (5, {'shop-db': 'create', 'shop-taken': 'taken'})
    assert cluster.eschedule('apply', most).code == 3
    assert cluster.eschedule('apply', odd).code == 5
    assert cluster.eschedule('apply', shop).code == 0
    assert dry_run(shop) == (0, kept)
    assert dry_run(more) == (5, kept | {'shop-db': 'differs'})
    assert dry_run(more, '--replace', 'web') == (5, kept | {'shop-db': 'differs'})
    assert dry_run(most) == (3, {})
    # The old one holds its claim, and nothing is left.
    assert dry_run(more, '--replace', 'db,web') == (3, {})
    assert dry_run(more, '--replace', 'db/1') == (3, {})
    assert dry_run(more, '--replace', 'web/2') == (5, kept | {'shop-db': 'differs'})
    assert dry_run(more, '--replace-all', '--destroy-first') == (8, kept | {'shop-db': 'replace'})
    assert dry_run(less) == (0, kept | {'shop-db': 'surplus'})
    assert dry_run(less, '--prune') == (8, kept | {'shop-db': 'destroy'})
    for words in (
        (shop, '--replace', 'wep'),
        (shop, '--replace', 'web/3'),
        (str(broken),),
        (shop, shop),
        (shop, '--timeout', '1'),
    ):
        refused = cluster.eschedule('apply', *words)
        assert (refused.code, refused.stdout) == (2, ''), refused
    # An unchanged apply costs the stack's key and one batch, and a flavor of etcd one more read.
    requests.clear()
    unchanged = cluster.eschedule('apply', shop)
    assert (unchanged.code, unchanged.stdout) == (0, '')
    assert unchanged.stderr == 'eschedule: stack shop: 3 as the file asks\n'
    assert [type(each) for each in requests] == [Range, Transaction]
    assert b''.join(each.key for each in requests[:1]) == b'/stacks/shop'


@pytest.mark.unaudited('its compute is a key that nobody keeps')
def test_file_that_a_stack_was_last_applied_from_is_named_beside_its_surplus(cluster: Control) -> None:
    """Two people may have files with one stack name: --prune destroys the other's instances."""
    Cloud(cluster.etcd, cluster.placement, None, None).make_compute(VCPU=4, MEMORY_MB=512, DISK_GB=10)  # type: ignore[arg-type]
    ann, bob = write_stack(cluster.directory, shop={'count': 2}), write_stack(cluster.directory, blog={})
    assert 'last applied' not in cluster.eschedule('apply', ann).stderr
    assert 'last applied' not in cluster.eschedule('apply', ann).stderr
    for options, effect in ((('--dry-run',), ''), (('--prune', '--yes'), ', which --prune destroys')):
        result = cluster.eschedule('apply', bob, *options)
        assert f':{ann}; this file lacks shop-shop-1, shop-shop-2{effect}\n' in result.stderr, result
    assert 'last applied' not in cluster.eschedule('apply', bob, '--prune', '--yes').stderr


@pytest.mark.unaudited('its compute is a key that nobody keeps')
def test_first_instance_keeps_its_name_when_its_member_gets_a_count(cluster: Control) -> None:
    Cloud(cluster.etcd, cluster.placement, None, None).make_compute(VCPU=4, MEMORY_MB=512, DISK_GB=10)  # type: ignore[arg-type]
    assert cluster.eschedule('apply', write_stack(cluster.directory, db={})).code == 0
    counted = write_stack(cluster.directory, db={'count': 2})
    for action in ('create', 'keep'):
        applied = cluster.eschedule('apply', counted, '-f', 'json')
        assert (applied.code, read_actions(applied)) == (0, {'shop-db': 'keep', 'shop-db-2': action}), applied


@pytest.mark.unaudited('its compute is a key that nobody keeps')
def test_name_of_a_former_instance_that_is_being_destroyed_is_waited_for(cluster: Control) -> None:
    """After a restore of etcd a stack's key may name a later instance, which is gone."""
    Cloud(cluster.etcd, cluster.placement, None, None).make_compute(VCPU=4, MEMORY_MB=512, DISK_GB=10)  # type: ignore[arg-type]
    shop = write_stack(cluster.directory, db={})
    assert cluster.eschedule('apply', shop).code == 0
    with open_store(cluster.etcd.endpoint) as store:
        stack = load_stack(store, 'shop').stack
    assert stack is not None
    later = stack.with_delivered({stack.make_place('db/1'): stack.entries['db/1'].compute}).with_ended(['db/1'])
    assert cluster.eschedule('destroy', 'shop-db').code == 0
    cluster.etcd.put(keys.stack('shop'), encode(later))
    applied = cluster.eschedule('apply', shop)
    assert (applied.code, 'shop-db: still being destroyed' in applied.stderr) == (6, True), applied


def test_replace_with_and_without_room(cluster: Control, compute: Ecompute) -> None:
    shop = write_stack(cluster.directory, db=change_memory(64, 2), web={})
    created = cluster.eschedule('apply', shop, '-f', 'json')
    assert (created.code, read_actions(created)) == (0, {'shop-db': 'create', 'shop-web': 'create'})
    waited = cluster.eschedule('apply', shop, '-f', 'json', '--wait')
    states = {each['state'] for each in json.loads(waited.stdout)['instances']}
    assert (waited.code, set(read_actions(waited).values()), states) == (0, {'keep'}, {'active'})
    before = {each['name']: each['instance'] for each in json.loads(created.stdout)['instances']}
    with_room = write_stack(cluster.directory, db=change_memory(64, 2), web=change_memory(65))
    replaced = cluster.eschedule('apply', with_room, '--replace-all', '--yes', '--wait', '-f', 'json')
    assert replaced.code == 0, replaced
    db, web = json.loads(replaced.stdout)['instances']
    assert (db['action'], db['instance'], db['replaced']) == ('keep', before['shop-db'], None)
    assert (web['action'], web['replaced'], web['state']) == ('replace', before['shop-web'], 'active')
    assert (web['compute'], web['instance'] != before['shop-web']) == (compute.uuid, True)
    assert wait_state(cluster, before['shop-web'], 'gone')
    large = write_stack(cluster.directory, db=change_memory(65, 3), web=change_memory(65))
    refused = cluster.eschedule('apply', large, '--replace', 'db', '--yes')
    assert (refused.code, 'Try: --destroy-first' in refused.stderr) == (3, True), refused
    assert 'db: no compute satisfies the whole query; nothing was created' in refused.stderr
    assert read_allocations(cluster).keys() == {db['instance'], web['instance']}
    done = cluster.eschedule('apply', large, '--replace', 'db', '--yes', '--destroy-first', '--wait', '-f', 'json')
    assert (done.code, json.loads(done.stdout)['instances'][0]['state']) == (0, 'active'), done
    assert list_names(cluster) == ['shop-db', 'shop-web']


@pytest.mark.usefixtures('compute')
def test_replaced_members_leave_a_strict_group_that_fills_all_hosts(cluster: Control) -> None:
    web = {'group': {'name': 'web', 'policy': 'anti-affinity', 'strict': True}}
    assert cluster.eschedule('apply', write_stack(cluster.directory, web=web), '--wait').code == 0
    changed = write_stack(cluster.directory, web=web | change_memory(65))
    replaced = cluster.eschedule('apply', changed, '--replace', 'web', '--yes', '--wait', '-f', 'json')
    assert (replaced.code, read_actions(replaced)) == (0, {'shop-web': 'replace'}), replaced


@pytest.mark.usefixtures('compute')
def test_apply_over_a_quota_names_the_quota_and_claims_nothing(cluster: Control) -> None:
    assert cluster.eschedule('quota', 'set', 'shop', 'instances=1').code == 0
    path = write_stack(cluster.directory, db={}, web={})
    (Path(path)).write_text(json.dumps(json.loads(Path(path).read_text()) | {'project': 'shop'}))
    refused = cluster.eschedule('apply', path)
    assert (refused.code, read_allocations(cluster)) == (3, {}), refused
    assert 'quota of project shop' in refused.stderr
    assert 'another eschedule' not in refused.stderr


@pytest.mark.parametrize('options', [(), ('--destroy-first',)])
def test_failed_and_ending_instances(cluster: Control, compute: Ecompute, options: tuple[str, ...]) -> None:
    shop = write_stack(cluster.directory, db={}, web={})
    compute.pause()
    created = json.loads(cluster.eschedule('apply', shop, '-f', 'json').stdout)['instances']
    cluster.placement.call('DELETE', f'/allocations/{created[0]["instance"]}')
    compute.resume()
    failed = cluster.eschedule('apply', shop, '--wait')
    # On a slow machine the compute is faster than the command.
    # During the wait it fails, and exits 1. Later it is an instance that differs.
    is_late = '1 in error (--replace MEMBER replaces them)' in failed.stderr
    is_told = is_late or 'failed at stage' in failed.stderr
    assert (failed.code, is_told) == (5 if is_late else 1, True), failed
    for words in ((), ('--wait',), ('--dry-run',)):
        again = cluster.eschedule('apply', shop, *words, '-f', 'json')
        assert (again.code, read_actions(again)) == (5, {'shop-db': 'failed', 'shop-web': 'keep'}), again
        assert 'placement holds no allocation' in json.loads(again.stdout)['instances'][0]['reasons'][0]
    replaced = cluster.eschedule('apply', shop, '--replace', 'db', '--yes', '--wait', *options)
    assert replaced.code == 0, replaced
    assert list_names(cluster) == ['shop-db', 'shop-web']
    compute.pause()
    assert cluster.eschedule('destroy', 'shop-web').code == 0
    ending = cluster.eschedule('apply', shop)
    assert (ending.code, 'shop-web: still being destroyed; nothing was changed' in ending.stderr) == (6, True), ending
    assert cluster.eschedule('apply', shop, '--dry-run').code == 8
    late = cluster.eschedule('apply', shop, '--wait', '--timeout', '0.5')
    assert (late.code, 'Try: ' in late.stderr) == (6, True), late
    # One that the file does not have is in nobody's way.
    only = write_stack(cluster.directory, db={}, api={})
    assert cluster.eschedule('apply', only).code == 0
    late = cluster.eschedule('apply', only, '--wait', '--timeout', '0.5')
    assert (late.code, 'not all instances have reached the stage. Try: ' in late.stderr) == (6, True), late
    compute.resume()
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    assert list_names(cluster) == ['shop-api', 'shop-db', 'shop-web']
    assert cluster.eschedule('destroy', '--file', shop, '--yes', '--wait').code == 0
    assert list_names(cluster) == ['shop-api']
    assert cluster.eschedule('apply', write_stack(cluster.directory), '--prune', '--yes').code == 0
    wait_until(lambda: list_names(cluster) == [], 30, 'the pruned one is gone')


def answer(control: Control, text: str, *words: str) -> Result:
    """Run eschedule with a terminal as its standard input, on which `text` was typed."""
    ours, theirs = pty.openpty()
    os.write(ours, text.encode())
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(control.schedule_yaml), *words]
    began = time.monotonic()
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=make_environment()
    ) as process:
        out, err = process.communicate(timeout=120)
    os.close(ours)
    os.close(theirs)
    JOURNAL.add_run(words, process.returncode, (out, err), began, process.pid)
    return Result(process.returncode, out, err)


@pytest.mark.usefixtures('compute')
def test_destroying_asks_on_a_terminal_and_needs_yes_without(cluster: Control) -> None:
    shop = write_stack(cluster.directory, db={}, web={'count': 2})
    less = write_stack(cluster.directory, web={'count': 2})
    other = write_stack(cluster.directory, db=change_memory(65), web={'count': 2})
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    names = ['shop-db', 'shop-web-1', 'shop-web-2']
    (record,) = json.loads(cluster.eschedule('list', '--name', 'shop-db', '-f', 'json').stdout)
    questions: dict[tuple[str, ...], str] = {
        ('apply', less, '--prune'): '1 instance, with their disks: shop-db',
        ('apply', other, '--replace', 'db'): '1 instance, with their disks: shop-db',
        ('apply', other, '--replace-all', '--destroy-first'): '1 instance, with their disks: shop-db',
        ('destroy', '--file', shop): '3 instances, with their disks: shop-db, shop-web-1, shop-web-2',
        ('destroy', '--stack', 'shop'): '3 instances, with their disks: ',
        ('destroy', '--name', 'shop-web-?'): '2 instances, with their disks: ',
        ('destroy', '--every'): '3 instances, with their disks: ',
    }
    answers = ['n\n', '\n', 'yes\n', 'Y\n', '\x04', 'n\n', '\n']  # each once: all commands ask by one function
    for text, (words, question) in zip(answers, questions.items(), strict=True):
        refused = cluster.eschedule(*words)
        assert (refused.code, f'would destroy {question}' in refused.stderr) == (2, True), refused
        assert 'Fix: confirm with --yes' in refused.stderr
        asked = answer(cluster, text, *words)
        assert (asked.code, f'Destroy {question}' in asked.stderr) == (1, True), asked
        assert asked.stderr.endswith('eschedule: nothing was changed\n')
    asked = answer(cluster, 'n\n', 'destroy', record['instance'][:8])
    assert (asked.code, 'Destroy 1 instance, with their disks: ' in asked.stderr) == (1, True), asked
    assert list_names(cluster) == names
    assert answer(cluster, 'y\n', 'apply', less, '--prune').code == 0
    assert wait_state(cluster, record['instance'], 'gone')
    assert list_names(cluster) == names[1:]
    asked = answer(cluster, '', 'destroy', 'shop-web-1')  # a whole name is no guess
    assert (asked.code, 'Destroy' in asked.stderr) == (0, False), asked
    second = json.loads(cluster.eschedule('list', '--name', 'shop-web-2', '-f', 'json').stdout)[0]['instance']
    assert answer(cluster, 'y\n', 'destroy', second[:8], '--wait').code == 0
    assert list_names(cluster) == []


def test_selectors_of_all_commands(cluster: Control, compute: Ecompute) -> None:
    shop = write_stack(cluster.directory, db={}, web={'count': 2, 'group': {'name': 'g', 'policy': 'affinity'}})
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    assert cluster.eschedule(QUERY, IMAGE, '--name', 'alone', '--wait').code == 0
    web = {'shop-web-1', 'shop-web-2'}
    every = {*web, 'shop-db', 'alone'}
    selections = {'--name *-web-*': web, '--stack shop': every - {'alone'}, '--group g': web, '--every': every}
    selections |= {f'--host {compute.uuid}': every, '--state active,stopped': every}
    selections |= {'--stack shop --name *-1': {'shop-web-1'}}
    for text, expected in selections.items():
        selectors = text.split()
        assert cluster.eschedule('wait', *selectors, '--for', 'started').code == 0
        for command, state in (('stop', 'stopped'), ('start', 'active'), ('reboot', 'active')):
            result = cluster.eschedule(command, *selectors, '--wait')
            assert result.code == 0, result
            assert set(list_names(cluster, '--state', state)) == expected | (every if state == 'active' else set())
    for command in ('stop', 'start', 'reboot', 'destroy', 'wait'):
        for words, code, reason in (
            (('--name', 'none-*'), 4, 'no instance is selected'),
            (('--stack', 'none'), 4, 'none: no such stack'),
            (('alone', '--every'), 2, 'give either instances, or options that select them'),
        ):
            refused = cluster.eschedule(command, *words)
            assert (refused.code, reason in refused.stderr) == (code, True), refused
    assert cluster.eschedule('stop').code == 2
    unreported = cluster.eschedule('ssh', '--print-config')
    assert (unreported.code, unreported.stdout) == (0, ''), unreported
    assert all(name in unreported.stderr for name in every), unreported
    assert cluster.eschedule('destroy', '--stack', 'shop', '--yes', '--wait').code == 0
    assert list_names(cluster) == ['alone']
    assert cluster.eschedule('destroy', '--every', '--yes', '--wait').code == 0


def test_role_without_stacks_is_refused_with_the_remedy(tmp_path: Path, own_placement: PlacementServer) -> None:
    with start_etcd_with_roles(tmp_path) as cloud:
        cloud.enable()
        config = cloud.write_config('scheduler-shell', own_placement.url)
        shop = write_stack(tmp_path, web={})
        permission = Permission(WRITE, keys.STACKS, '/stacks0')
        with closing(Accounts(load_etcd_config(cloud.certs, 'operator-ann'))) as accounts:
            accounts.apply(RevokePermission('scheduler', permission))
        refused = run_in_process(config, 'apply', shop)
        assert refused.code == 1, refused
        assert 'write /stacks/shop: its role does not allow that' in refused.stderr
        assert '`elab certs DIR --enable`' in refused.stderr
        assert cloud.enable()
        assert run_in_process(config, 'apply', shop).code == 3  # it may write, and there is no compute


def test_300_instances_are_one_transaction_if_etcd_takes_it(
    own_placement: PlacementServer, tmp_path: Path, requests: list[Any]
) -> None:
    with Etcd(tmp_path / 'etcd', '--max-txn-ops=2048') as etcd:
        control = Control(etcd, own_placement, tmp_path)
        with closing(control), ManyComputes(control, 100):
            group = {'name': 'g', 'policy': 'anti-affinity', 'strict': False}
            members: dict[str, Any] = {'web': {'count': 150, 'group': group}, 'api': {'count': 50}}
            members['db'] = {'count': 100, **change_memory(65)}
            (tmp_path / 'data').write_text('#cloud-config\n' + '# ' * 10_000)
            assert sum(each['count'] for each in members.values()) == MAX_STACK_SIZE
            shop = write_stack(tmp_path, **{name: {**each, 'user_data': 'data'} for name, each in members.items()})
            applied = control.eschedule('apply', shop)
            assert applied.code == 0, applied
            deliveries = [each for each in requests if isinstance(each, Transaction) and b'/hosts/' in each.to_bytes()]
            writes = [each for each in deliveries if any(not isinstance(part, Range) for part in each.success)]
            assert len(writes) == 1
            assert len(writes[0].to_bytes()) < 1_400_000
            revisions = etcd.call('kv/range', {'key': 'L2hvc3RzLw==', 'range_end': 'L2hvc3RzMA=='})['kvs']
            assert (len(revisions), len({each['mod_revision'] for each in revisions})) == (300, 1)
            assert etcd.list_keys('/requests/') == []
            requests.clear()
            assert control.eschedule('apply', shop).code == 0
            assert len(requests) <= 9
            assert control.eschedule('destroy', '--file', shop, '--yes').code == 0


@pytest.mark.parametrize('is_checked', [True, False])
def test_stack_too_large_for_etcd_is_refused_and_a_smaller_one_works(
    cluster: Control, requests: list[Any], monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """This etcd takes 128 operations in a transaction, which is its default."""
    cluster.at_exit.enter_context(ManyComputes(cluster, 20))
    large, small = (write_stack(cluster.directory, web={'count': count}) for count in (63, 62))
    if not is_checked:  # as for instances in error, which the check counts once: only the delivery is refused
        monkeypatch.setattr(placing, 'MAX_TRANSACTION_OPERATIONS', 1000)
    requests.clear()
    refused = cluster.eschedule('apply', large)
    cause = 'refuses: etcdserver: too many operations in txn request. Fix: start etcd with --max-txn-ops=2048'
    assert (refused.code, refused.stdout, cause in refused.stderr) == (1, '', True), refused
    assert any(b'/requests/' in each.to_bytes() for each in requests) is not is_checked
    assert read_allocations(cluster) == {}
    prefixes = [keys.HOSTS, keys.ATTEMPTS, keys.NAMES, *([keys.STACKS] if is_checked else [])]
    assert [cluster.etcd.list_keys(prefix) for prefix in prefixes] == [[] for _ in prefixes]
    if is_checked:
        assert cluster.eschedule('apply', large, '--dry-run') == refused
    applied = cluster.eschedule('apply', small)
    assert applied.code == 0, applied
    assert len(list_names(cluster)) == 62
    assert cluster.eschedule('destroy', '--file', small, '--yes').code == 0


@pytest.mark.parametrize('step', ['stack-delivered', ''])
def test_interrupted_wait_is_continued_by_the_same_command(cluster: Control, compute: Ecompute, step: str) -> None:
    shop = write_stack(cluster.directory, db={}, web={'count': 2})
    compute.pause()
    with Eschedule(cluster, 'apply', shop, '--wait', failpoint=step and f'{step}:stop') as eschedule:
        if step:
            eschedule.wait_frozen_at(step)
        wait_until(lambda: len(cluster.etcd.list_keys(keys.HOSTS)) == 3, 30, 'all are delivered')
        time.sleep(0 if step else 1.5)  # it waits by then; before, the other sentence is right
        eschedule.send_signal(signal.SIGINT)
        eschedule.resume()
        interrupted = eschedule.wait()
    before = read_allocations(cluster)
    assert (interrupted.code, 'interrupted' in interrupted.stderr) == (6, True), interrupted
    assert 'Try: the same command' in interrupted.stderr
    assert ('wait shop-db shop-web-1 shop-web-2' in interrupted.stderr) == (step == ''), interrupted
    late = cluster.eschedule('apply', shop, '--wait', '--timeout', '1', '-f', 'json')
    assert (late.code, set(read_actions(late).values())) == (6, {'keep'}), late
    assert 'stack shop: not all instances have reached the stage. Try: the same command' in late.stderr
    compute.resume()
    again = cluster.eschedule('apply', shop, '--wait', '-f', 'json')
    assert (again.code, set(read_actions(again).values())) == (0, {'keep'}), again
    assert {each['state'] for each in json.loads(again.stdout)['instances']} == {'active'}
    assert read_allocations(cluster) == before
    assert len(before) == 3


def count_tombstones(control: Control) -> int:
    requests = [json.loads(control.etcd.get(key) or b'{}') for key in control.etcd.list_keys(keys.HOSTS)]
    return sum(request.get('allocations') == {} for request in requests)


@pytest.mark.parametrize('words', [('apply', '--prune'), ('destroy', '--file')])
def test_wait_of_a_destroy_ends_when_the_instances_are_gone(
    cluster: Control, compute: Ecompute, words: tuple[str, ...]
) -> None:
    shop = write_stack(cluster.directory, db={}, web={'count': 2})
    created = json.loads(cluster.eschedule('apply', shop, '--wait', '-f', 'json').stdout)['instances']
    instances = {each['name']: each['instance'] for each in created}
    is_prune = words[0] == 'apply'
    path = write_stack(cluster.directory, db={}) if is_prune else write_stack(cluster.directory, web={'count': 2})
    command = [*words, path, '--yes', '--wait', '-f', 'json']
    compute.pause()
    with Eschedule(cluster, *command) as eschedule:
        wait_until(lambda: count_tombstones(cluster) == 2, 30, 'both are to be destroyed')
        time.sleep(1.0)
        assert not eschedule.has_ended
        late = cluster.eschedule(*command, '--timeout', '0.5')
        assert (late.code, 'timed out' in late.stderr) == (6, True), late
        compute.resume()
        done = eschedule.wait()
    assert done.code == 0, done
    if is_prune:
        assert set(read_actions(done).values()) == {'keep', 'destroy'}
    else:
        assert [each['state'] for each in json.loads(done.stdout)] == ['gone', 'gone']
        again = cluster.eschedule(*command)
        assert (again.code, 'no instance of this file exists' in again.stderr) == (0, True), again
    for name in ('shop-web-1', 'shop-web-2'):
        assert (read_record(cluster, instances[name]) or {})['state'] == 'gone'
    assert read_allocations(cluster).keys() == {instances['shop-db']}


def test_queued_instance_keeps_the_name_of_a_member(cluster: Control, compute: Ecompute) -> None:
    assert cluster.eschedule('flavor', 'set', 'small', QUERY).code == 0
    queued = cluster.eschedule('--queue', '--flavor', 'small', IMAGE, '--name', 'shop-db', '-f', 'json')
    (record,) = json.loads(cluster.eschedule('list', '-f', 'json').stdout)
    assert (queued.code, record['state'], record['name']) == (0, 'queued', 'shop-db')
    shop = write_stack(cluster.directory, db={}, web={})
    for options in ((), ('--dry-run',), ('--replace-all', '--prune', '--yes'), ('--wait',)):
        refused = cluster.eschedule('apply', shop, *options, '-f', 'json')
        assert (refused.code, read_actions(refused)) == (5, {'shop-db': 'taken', 'shop-web': 'create'}), refused
        (db, _) = json.loads(refused.stdout)['instances']
        assert (record['instance'] in db['reasons'][0], db['instance']) == (True, None)
    assert (read_allocations(cluster), cluster.etcd.list_keys(keys.HOSTS)) == ({}, [])
    assert cluster.eschedule('destroy', 'shop-db').code == 0
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    assert {
        each['compute'] for each in json.loads(cluster.eschedule('list', '--state', 'active', '-f', 'json').stdout)
    } == {compute.uuid}
    assert cluster.eschedule('flavor', 'delete', 'small').code == 0


@pytest.mark.usefixtures('compute')
def test_refusal_says_what_was_changed_and_what_helps(cluster: Control) -> None:
    assert cluster.eschedule('apply', write_stack(cluster.directory, web={}, db={}), '--wait').code == 0
    renamed = write_stack(cluster.directory, api={'name': 'shop-web'})
    refused = cluster.eschedule('apply', renamed, '--prune', '--yes')
    assert refused.code == 5, refused
    assert refused.stderr.splitlines() == [
        'eschedule: stack shop: would have 2 destroyed, 1 with the name of another instance',
        'eschedule: stack shop: names taken by other instances: 1; nothing was changed. '
        'Fix: give other names in the file, or first destroy the instances that have these',
    ]
    differs = cluster.eschedule('apply', write_stack(cluster.directory, web=change_memory(65), db={}))
    assert differs.code == 5, differs
    assert differs.stderr.startswith('eschedule: stack shop: 1 as the file asks, 1 different\n')
    assert differs.stderr.endswith(
        'stack shop: 1 of its instances differ. Fix: give --resize for 1 of them, which keep their disks, '
        '--replace MEMBER or --replace-all to destroy and recreate them, or correct the file\n'
    )
    assert list_names(cluster) == ['shop-db', 'shop-web']
    # With --destroy-first, another instance may take the name before the new one is placed.
    changed = write_stack(cluster.directory, web=change_memory(65), db={})
    words = 'apply', changed, '--replace', 'web', '--destroy-first', '--yes'
    with Eschedule(cluster, *words, failpoint='stack-removed:stop') as eschedule:
        eschedule.wait_frozen_at('stack-removed')
        wait_until(lambda: len(cluster.etcd.list_keys('/hosts/')) == 1, 30, 'the replaced one is gone')
        assert cluster.eschedule(QUERY, IMAGE, '--name', 'shop-web').code == 0
        eschedule.resume()
        overtaken = eschedule.wait()
    assert overtaken.code == 5, overtaken
    assert 'names taken by other instances: 1; the replaced instances were destroyed. Fix: ' in overtaken.stderr


def test_difference_stops_nothing_else(cluster: Control) -> None:
    """What is missing is created, and what is named is done, while a sister differs."""
    cluster.ecompute('VCPU:16,DISK_GB:100,MEMORY_MB:64000')
    shop = write_stack(cluster.directory, db={}, web={'count': 2}, old={})
    first = cluster.eschedule('apply', shop, '--wait', '-f', 'json')
    assert (first.code, 'stack shop is new\n' in first.stderr) == (0, True), first
    assert cluster.eschedule('destroy', 'shop-web-2', '--wait').code == 0
    changed = write_stack(cluster.directory, db=change_memory(65), web={'count': 2, **change_memory(65)})
    predicted = cluster.eschedule('apply', changed, '--dry-run', '-f', 'json')
    created = cluster.eschedule('apply', changed, '--wait', '-f', 'json')
    actions = {'shop-db': 'differs', 'shop-web-1': 'differs', 'shop-web-2': 'create', 'shop-old': 'surplus'}
    for result in (predicted, created):
        assert (result.code, read_actions(result), 'is new' in result.stderr) == (5, actions, False), result
    assert (
        '2 of its instances differ. Fix: give --resize for 2 of them, which keep their disks, --replace MEMBER'
        in created.stderr
    )
    more = write_stack(cluster.directory, db=change_memory(65), web={'count': 2, **change_memory(66)})
    done = cluster.eschedule('apply', more, '--replace', 'web/2', '--prune', '--yes', '--wait', '-f', 'json')
    actions |= {'shop-web-2': 'replace', 'shop-old': 'destroy'}
    assert (done.code, read_actions(done)) == (5, actions), done
    assert list_names(cluster) == ['shop-db', 'shop-web-1', 'shop-web-2']
    # Nobody is asked for what the file alone decides.
    assert cluster.eschedule('apply', more, '--replace', 'web/2').code == 5
    assert cluster.eschedule('apply', more, '--replace', 'db,web/1', '--yes', '--wait').code == 0


def test_resize_gives_instances_the_amounts_of_the_file_and_keeps_their_disks(cluster: Control) -> None:
    cluster.ecompute('VCPU:5,DISK_GB:100,MEMORY_MB:64000')
    shop = write_stack(cluster.directory, db={}, web={'count': 2})
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    first = read_allocations(cluster)
    larger = {'count': 2, **change_memory(65, 2)}
    changed = write_stack(cluster.directory, db={**change_memory(65), 'image': f'{IMAGE}2'}, web=larger, api={})
    actions = {'shop-db': 'differs', 'shop-web-1': 'resize', 'shop-web-2': 'resize', 'shop-api': 'create'}
    predicted = cluster.eschedule('apply', changed, '--resize', '--dry-run', '-f', 'json')
    assert (predicted.code, read_actions(predicted)) == (5, actions), predicted
    # A replacement keeps no disk, so a resize goes before it. There is no room for the second one.
    partly = cluster.eschedule('apply', changed, '--resize', '--replace', 'web', '-f', 'json')
    assert (partly.code, read_actions(partly)) == (5, actions | {'shop-web-2': 'differs'}), partly
    assert 'lacks VCPU 1. Fix: give less' in partly.stderr
    smaller = write_stack(cluster.directory, db={}, web={'count': 2, **change_memory(65)}, api={})
    assert cluster.eschedule('apply', smaller, '--resize', '--wait').code == 0
    assert '\neschedule: 2 of them get their new size when they start.' in cluster.eschedule('apply', smaller).stderr
    assert cluster.eschedule('reboot', 'shop-web-1', 'shop-web-2', '--wait').code == 0
    assert cluster.eschedule('apply', smaller).code == 0
    wait_until(lambda: list_memory(cluster) == [64, 64, 65, 65], 30, 'the claims are lowered')
    assert first.keys() < read_allocations(cluster).keys()


@pytest.mark.parametrize('limit', ['room', 'quota'])
def test_room_that_prune_frees_counts(cluster: Control, limit: str) -> None:
    compute = cluster.ecompute(
        'VCPU:2,DISK_GB:10,MEMORY_MB:1024' if limit == 'room' else 'VCPU:9,DISK_GB:9,MEMORY_MB:999'
    )
    assert cluster.eschedule('apply', write_stack(cluster.directory, old={}, web={}), '--wait').code == 0
    project = json.loads(cluster.eschedule('list', '-f', 'json').stdout)[0]['project_id']
    if limit == 'quota':
        assert cluster.eschedule('quota', 'set', project, 'instances=2').code == 0
    new = write_stack(cluster.directory, web={}, new={})
    command = ('apply', new, '--prune', '--yes', '-f', 'json')
    predicted = cluster.eschedule(*command, '--dry-run')
    actions = {'shop-web': 'keep', 'shop-new': 'create', 'shop-old': 'destroy'}
    assert (predicted.code, read_actions(predicted)) == (8, actions), predicted
    assert '; --prune destroys shop-old first, and then there may be room\n' in predicted.stderr
    compute.pause()
    late = cluster.eschedule(*command, '--wait', '--timeout', '1')
    assert (late.code, 'timed out after 1 s' in late.stderr, late.stdout) == (6, True, ''), late
    assert (count_tombstones(cluster), len(read_allocations(cluster))) == (1, 2)
    compute.resume()
    done = cluster.eschedule(*command)
    assert (done.code, read_actions(done)) == (0, {'shop-web': 'keep', 'shop-new': 'create'}), done
    assert list_names(cluster) == ['shop-new', 'shop-web']
    # What this command destroys is in its report.
    last = cluster.eschedule('apply', write_stack(cluster.directory, web={}, api={}), *command[2:], '--wait')
    assert (last.code, read_actions(last)) == (0, {'shop-web': 'keep', 'shop-api': 'create', 'shop-new': 'destroy'})
    # There may be too little room even then.
    vain = write_stack(cluster.directory, web={}, huge=change_memory(64, 16))
    refused = cluster.eschedule('apply', vain, '--prune', '--yes')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), refused
    assert list_names(cluster) == ['shop-web']


def test_placement_is_asked_before_the_person(cluster: Control) -> None:
    cluster.ecompute('VCPU:2,DISK_GB:10,MEMORY_MB:1024')
    assert cluster.eschedule('apply', write_stack(cluster.directory, web={'count': 2}), '--wait').code == 0
    changed = write_stack(cluster.directory, web={'count': 2, **change_memory(65)})
    refused = answer(cluster, 'y\n', 'apply', changed, '--replace', 'web/2')
    assert (refused.code, 'Destroy' in refused.stderr) == (3, False), refused
    assert 'web: no compute satisfies the whole query; nothing was created' in refused.stderr
    assert 'Try: --destroy-first' in refused.stderr
    asked = answer(cluster, 'n\n', 'apply', changed, '--replace', 'web/2', '--destroy-first')
    assert (asked.code, 'Destroy 1 instance, with their disks: shop-web-2?' in asked.stderr) == (1, True), asked
    assert 'whether there is room is known only after' in asked.stderr
    assert list_names(cluster) == ['shop-web-1', 'shop-web-2']


def test_renamed_instance_keeps_its_entry(cluster: Control) -> None:
    cluster.ecompute('VCPU:16,DISK_GB:100,MEMORY_MB:64000')
    assert cluster.eschedule('apply', write_stack(cluster.directory, db={}), '--wait').code == 0
    (before,) = json.loads(cluster.eschedule('list', '-f', 'json').stdout)
    assert cluster.eschedule('rename', 'shop-db', 'front').code == 0
    # Its old name is free, also for another one.
    assert cluster.eschedule(QUERY, IMAGE, '--name', 'shop-db').code == 0
    counted = write_stack(cluster.directory, db={'count': 2})
    for action in ('create', 'keep'):
        applied = cluster.eschedule('apply', counted, '--wait', '-f', 'json')
        assert (applied.code, read_actions(applied)) == (0, {'front': 'keep', 'shop-db-2': action}), applied
    assert json.loads(applied.stdout)['instances'][0]['instance'] == before['instance']
    named = write_stack(cluster.directory, db={'count': 2, 'name': 'base'})
    for options in ((), ('--replace', 'db')):
        differs = cluster.eschedule('apply', named, *options, '-f', 'json')
        assert (differs.code, read_actions(differs)) == (5, {'front': 'differs', 'shop-db-2': 'differs'}), differs
        for old, new in ('front', 'base-1'), ('shop-db-2', 'base-2'):
            assert f'db: name: {old} → {new}. Try: eschedule rename {old} {new}\n' in differs.stderr
        assert 'give --replace' not in differs.stderr
    for old, new in ('front', 'base-1'), ('shop-db-2', 'base-2'):
        assert cluster.eschedule('rename', old, new).code == 0
    assert cluster.eschedule('apply', named).code == 0
    # What replaces it keeps the name, as far as the file gives none.
    larger = write_stack(cluster.directory, db={'count': 2, **change_memory(65)})
    for options in ((), ('--destroy-first',)):
        replaced = cluster.eschedule('apply', larger, '--replace', 'db/1', '--yes', '--wait', *options)
        assert replaced.code == 5, replaced
        assert cluster.eschedule('list', '--stack', 'shop', '-f', 'value', '-c', 'name').stdout == 'base-2\nbase-1\n'
        larger = write_stack(cluster.directory, db={'count': 2, **change_memory(66)})


@pytest.mark.usefixtures('compute')
def test_stacks_are_listed_and_completed(cluster: Control) -> None:
    empty = cluster.eschedule('stack', '-f', 'json')
    assert (empty.code, empty.stdout) == (0, '[]\n'), empty
    shop = write_stack(cluster.directory, db={}, web={'count': 2})
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    assert cluster.eschedule('stop', 'shop-db', '--wait').code == 0

    def read() -> dict[str, Any]:
        (listed,) = json.loads(cluster.eschedule('stack', '-f', 'json').stdout)
        assert json.loads(cluster.eschedule('stack', 'shop', '-f', 'json').stdout) == listed
        return listed

    before = read()
    assert before['applied_from'].endswith(f':{shop}')
    assert before['applied_at'].startswith('20')
    assert (before['instances'], before['members']) == ({'active': 2, 'stopped': 1}, ['db', 'web'])
    # A destroy changes the key of the stack, but nobody applied it.
    assert cluster.eschedule('destroy', 'shop-web-2', '--wait').code == 0
    assert read() == before | {'instances': {'active': 1, 'stopped': 1}}
    key = cluster.etcd.get(keys.stack('shop')) or b''
    cluster.etcd.delete(keys.stack('shop'))
    lost = cluster.eschedule('stack', '-f', 'value', '-c', 'stack,members,applied at')
    assert lost.stdout == 'shop\tdb, web\t-\n', lost
    cluster.etcd.put(keys.stack('shop'), key)
    missing = cluster.eschedule('stack', 'shp', 'shop')
    assert (missing.code, 'shp: no such stack (did you mean shop?). Try: eschedule stack' in missing.stderr) == (
        4,
        True,
    )
    assert missing.stdout.startswith('STACK  INSTANCES'), missing
    config = ['--config', str(cluster.schedule_yaml)]
    candidates = {'stack': ['shop'], 'list --stack': ['shop'], 'apply shop.yaml --replace': ['db', 'web']}
    for line, expected in candidates.items():
        names: list[str] = []
        print_candidates(names.append, COMMANDS, '', *config, *line.split())
        assert names == expected, line


def test_image_list_says_where_each_image_is_cached(cluster: Control, compute: Ecompute) -> None:
    images = {'small': IMAGE, 'other': 'http://images.invalid/other.qcow2'}
    assert cluster.eschedule('image').stdout == 'NAME  IMAGE  HOSTS\n'
    assert cluster.eschedule('image', '-f', 'json').stdout == '[]\n'
    cluster.schedule_yaml.write_text(f'{cluster.schedule_yaml.read_text()}images: {json.dumps(images)}\n')
    old = Cloud(cluster.etcd, cluster.placement, None, None).make_compute()  # type: ignore[arg-type]
    cluster.etcd.put(keys.compute(old), '{"token": "x", "hostname": "old", "version": "1.1.0"}', cluster.etcd.grant())

    def read_cached() -> dict[str, dict[str, bool | None]]:
        result = cluster.eschedule('image', '-f', 'json')
        assert (result.code, result.stderr) == (0, ''), result
        rows = json.loads(result.stdout)
        assert {row['name']: row['image'] for row in rows} == images
        return {row['name']: {host['compute']: host['cached'] for host in row['hosts']} for row in rows}

    nowhere = {compute.uuid: False, old: None}
    wait_until(lambda: read_cached() == {'small': nowhere, 'other': nowhere}, 60, 'its compute reports its cache')
    shop = write_stack(cluster.directory, db={'image': 'small', 'query': f'{QUERY}&in_tree={compute.uuid}'})
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    wait_until(lambda: read_cached()['small'][compute.uuid], 60, 'its compute reports the image')
    assert read_cached() == {'small': {compute.uuid: True, old: None}, 'other': nowhere}
    cluster.etcd.delete(keys.compute(old))
    cluster.placement.call('DELETE', f'/resource_providers/{old}')
