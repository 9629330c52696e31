"""The audit of stacks: silent beside an apply, and repairs of what was changed without apply."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from ecomp.conf import EtcdConfig
from ecomp.model.stack import Stack, from_json
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.audit import fix
from ecomp.store.client import Store
from tests.kit.audit import run_audit, wait_audit_clean
from tests.kit.commands import Control
from tests.kit.hands import Eschedule
from tests.kit.story import IMAGE, SMALL_QUERY

STEPS = ('stack-begun', 'stack-announced', 'stack-claimed', 'stack-delivered')


def write_stack(control: Control, count: int, query: str = SMALL_QUERY) -> str:
    """Write the file of a stack with one member as JSON, which is YAML, and return its path."""
    path = control.directory / 'shop.yaml'
    member = {'count': count, 'query': query, 'image': IMAGE}
    path.write_text(json.dumps({'stack': 'shop', 'instances': {'web': member}}))
    return str(path)


def read_stack(control: Control) -> Stack:
    return from_json('shop', control.etcd.get('/stacks/shop') or b'')


def repair(control: Control) -> list[str]:
    """Run `audit --fix` with a short interval, and return its messages."""
    messages: list[str] = []
    with (
        closing(Store(EtcdConfig((control.etcd.endpoint,)))) as store,
        closing(Placement(control.placement.url)) as api,
    ):
        assert fix(store, api, messages.append, interval_seconds=0.2).findings == []
    return messages


@pytest.mark.usefixtures('compute')
@pytest.mark.parametrize('step', STEPS)
def test_apply_in_flight_is_never_a_finding(cluster: Control, step: str) -> None:
    with Eschedule(cluster, 'apply', write_stack(cluster, 2), failpoint=f'{step}:stop') as eschedule:
        eschedule.wait_frozen_at(step)
        assert run_audit(cluster) == []
        eschedule.resume()
        assert eschedule.wait().code == 0
    assert cluster.eschedule('apply', write_stack(cluster, 2), '--wait').code == 0
    assert cluster.eschedule('destroy', 'shop-web-1', '--wait').code == 0
    changed = write_stack(cluster, 2, SMALL_QUERY.replace('128', '129'))
    words = 'apply', changed, '--replace', 'web', '--yes'
    if step != 'stack-begun':  # only of a new stack
        with Eschedule(cluster, *words, failpoint=f'{step}:stop') as eschedule:
            eschedule.wait_frozen_at(step)
            assert run_audit(cluster) == []
            eschedule.resume()
            assert eschedule.wait().code == 0
    else:
        assert cluster.eschedule(*words).code == 0
    wait_audit_clean(cluster)


@pytest.mark.usefixtures('compute')
def test_entry_of_a_member_destroyed_manually_is_marked_as_ended(cluster: Control) -> None:
    path = write_stack(cluster, 2)
    assert cluster.eschedule('apply', path, '--wait').code == 0
    stored = cluster.etcd.get('/stacks/shop') or b''
    assert cluster.eschedule('destroy', 'shop-web-1', '--wait').code == 0
    wait_audit_clean(cluster)
    cluster.etcd.put('/stacks/shop', stored.decode())  # as after a destroy by an earlier version
    result = cluster.eschedule('audit', '-f', 'json')
    (finding,) = json.loads(result.stdout)
    assert (result.code, finding['code'], finding['subject']) == (8, 'stack-entry', 'shop')
    assert finding['sentence'].endswith('so the next apply creates new ones: web/1')
    _, line = repair(cluster)
    assert line == 'stack-entry shop: web/1 is marked as ended'
    assert {name: entry.is_ended for name, entry in read_stack(cluster).entries.items()} == {
        'web/1': True,
        'web/2': False,
    }
    assert cluster.eschedule('apply', path).code == 0
    assert read_stack(cluster).entries['web/1']._replace(compute='') == (2, '', False)
    events = [line.partition(' stack shop: ')[2] for line in cluster.eschedule('events').stdout.splitlines()]
    # etcd has the events of earlier tests, too.
    assert list(filter(None, events))[-2:] == ['web/1 ended', 'web/1 delivered']


@pytest.mark.usefixtures('compute')
def test_lost_stack_is_restored_and_a_foreign_one_only_reported(cluster: Control) -> None:
    path = write_stack(cluster, 2)
    assert cluster.eschedule('apply', path, '--wait').code == 0
    before = read_stack(cluster)
    cluster.etcd.delete('/stacks/shop')
    _, line = repair(cluster)
    assert line == 'stack-mismatch shop: /stacks/shop is restored'
    restored = read_stack(cluster)
    assert (restored.epoch, restored.entries) == (before.epoch, before.entries)
    cluster.etcd.put('/stacks/shop', '{"version": 1, "epoch": "eeeeeeee-0000-4000-8000-000000000000", "entries": {}}')
    findings = run_audit(cluster)
    assert {finding['subject'] for finding in findings} == set(before.list_instances().values())
    assert all('`etcdctl del /stacks/shop` and `eschedule audit --fix`' in finding['how'] for finding in findings)
    cluster.etcd.delete('/stacks/shop')
    assert len(repair(cluster)) == 2
    assert cluster.eschedule('apply', path).stdout == ''
