"""`eschedule evacuate --dry-run` on real etcd and placement: places, refusals and calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ecomp.model import keys
from ecomp.placement.client import Placement
from ecomp.store.messages import Range, Transaction
from tests.kit.commands import Control, Result
from tests.kit.invariants import read_allocations
from tests.kit.story import IMAGE

pytestmark = pytest.mark.unaudited('its computes are keys that no ecompute keeps')

SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
LARGE = 'resources=VCPU:2,DISK_GB:1,MEMORY_MB:64'
MALFORMED = '11111111-2222-3333-4444-555555555555'
MakeHost = Callable[..., str]


@pytest.fixture
def make_host(cluster: Control) -> MakeHost:
    def make(hostname: str, vcpus: int = 4) -> str:
        compute = cluster.placement.make_provider(VCPU=vcpus, MEMORY_MB=512, DISK_GB=10)
        value = json.dumps({'token': 'x', 'hostname': hostname})
        cluster.etcd.put(keys.compute(compute), value, cluster.etcd.grant())
        return compute

    return make


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that eschedule asks placement for in this process, in their order."""
    paths: list[str] = []
    get = Placement.get

    def record(self: Placement, path: str, *rest: Any, **more: Any) -> Any:
        paths.append(path)
        return get(self, path, *rest, **more)

    monkeypatch.setattr(Placement, 'get', record)
    return paths


def create(cluster: Control, name: str, query: str, *words: str) -> str:
    result = cluster.eschedule(query, IMAGE, '--name', name, '-f', 'json', *words)
    assert result.code == 0, result
    return str(json.loads(result.stdout)[0]['instance'])


def rewrite_request(cluster: Control, compute: str, instance: str, **fields: Any) -> None:
    key = keys.request(compute, instance)
    value = json.loads(cluster.etcd.get(key) or b'')
    cluster.etcd.put(key, json.dumps({**value, **fields}))


def read_places(result: Result) -> dict[str, str | None]:
    return {row['name']: row['new_host'] for row in json.loads(result.stdout)}


def test_each_guest_of_a_dead_host_has_a_place_or_a_reason(
    cluster: Control, make_host: MakeHost, questions: list[str], requests: list[Any]
) -> None:
    hosts = {name: make_host(name, vcpus) for name, vcpus in (('hv1', 9), ('hv2', 4), ('hv3', 3))}
    anti = ('--group', 'anti', '--policy', 'anti-affinity')
    near = ('--group', 'near', '--policy', 'affinity')
    for name in ('hv1', 'hv2'):
        instance = create(cluster, f'anti-{name}', f'{SMALL}&in_tree={hosts[name]}', *anti)
        rewrite_request(cluster, hosts[name], instance, query=SMALL)
    for name in ('near-1', 'near-2'):
        rewrite_request(cluster, hosts['hv1'], create(cluster, name, SMALL, '--on', 'hv1', *near), query=SMALL)
    create(cluster, 'pinned', SMALL, '--on', 'hv1')
    large = create(cluster, 'large', LARGE, '--on', 'hv1')
    rewrite_request(cluster, hosts['hv1'], large, query=LARGE)
    questions.clear(), requests.clear()
    before, claims = cluster.etcd.call('kv/range', {'key': 'AA=='})['header'], read_allocations(cluster)

    result = cluster.eschedule('evacuate', '--dry-run', 'hv1', '-f', 'json')

    assert result.code == 3, result
    # hv2 and hv3 have 3 free VCPU each. The group that stays together comes first, then the one that avoids hv2.
    places = read_places(result)
    assert places == {'near-1': 'hv3', 'near-2': 'hv3', 'anti-hv1': 'hv3', 'large': 'hv2', 'pinned': None}
    [pinned] = [row for row in json.loads(result.stdout) if row['name'] == 'pinned']
    assert (pinned['fits'], pinned['reason']) == (False, 'its query allows only hv1 (in_tree=, or --on)')
    assert 'eschedule: 1 of 5 guests would have no place.' in result.stderr
    after = cluster.etcd.call('kv/range', {'key': 'AA=='})['header']
    assert (after['revision'], read_allocations(cluster)) == (before['revision'], claims)
    assert {type(each) for each in requests} <= {Range, Transaction}
    asked = [path for path in questions if 'allocation_candidates' in path]
    assert len(asked) == 2  # SMALL and LARGE
    table = cluster.eschedule('evacuate', '--dry-run', 'hv1', hosts['hv3'])
    assert table.code == 3
    names = [line.split()[0] for line in table.stdout.splitlines()[1:]]
    assert names == ['anti-hv1', 'large', 'near-1', 'near-2', 'pinned']
    assert 'there is room, but not where group anti allows it (strict anti-affinity)' in table.stdout


def test_a_line_for_each_host_and_exit_3_if_one_cannot_be_absorbed(
    cluster: Control, make_host: MakeHost, questions: list[str]
) -> None:
    hosts = {name: make_host(name, 4) for name in ('hv1', 'hv2', 'hv3')}
    for name in hosts:
        for number in (1, 2):
            instance = create(cluster, f'{name}-{number}', SMALL, '--on', name)
            rewrite_request(cluster, hosts[name], instance, query=SMALL)
    questions.clear()

    result = cluster.eschedule('evacuate', '--dry-run', '--each')

    assert (result.code, result.stderr) == (0, ''), result
    assert [line.split() for line in result.stdout.splitlines()] == [
        ['HOST', 'GUESTS', 'FIT', 'REASON'], *([name, '2', '2', '-'] for name in hosts)
    ]  # fmt: skip
    assert len([path for path in questions if 'allocation_candidates' in path]) == 1
    rewrite_request(cluster, hosts['hv2'], create(cluster, 'big', LARGE, '--on', 'hv2'), query=LARGE)
    create(cluster, 'more', LARGE, '--on', 'hv3')
    full = cluster.eschedule('evacuate', '--dry-run', '--each', '-f', 'json')
    assert full.code == 3, full
    rows = {row['host']: row for row in json.loads(full.stdout)}
    counts = {name: (row['guests'], row['fit']) for name, row in rows.items()}
    assert counts == {'hv1': (2, 0), 'hv2': (3, 1), 'hv3': (3, 2)}
    assert rows['hv2']['reason'] == 'hv2-1: other guests took all the room first (1 more)'
    assert rows['hv1']['reason'] == 'hv1-1: no compute satisfies the whole query (1 more)'
    assert rows['hv3']['reason'] == 'more: its query allows only hv3 (in_tree=, or --on)'
    assert [row['unknown'] for row in rows.values()] == [0, 0, 0]


def test_what_cannot_be_evaluated_is_not_known(cluster: Control, make_host: MakeHost) -> None:
    compute, _ = make_host('hv1'), make_host('hv2')
    made = {name: create(cluster, name, SMALL, '--on', 'hv1') for name in ('few', 'old', 'odd')}
    rewrite_request(cluster, compute, made['few'], query=f'{SMALL}&limit=1')
    rewrite_request(cluster, compute, made['old'], query=None)
    rewrite_request(cluster, compute, made['odd'], query=f'{SMALL}&required=CUSTOM_UNKNOWN_TRAIT')

    result = cluster.eschedule('evacuate', '--dry-run', 'hv1', '-f', 'json')

    assert result.code == 3
    rows = {row['name']: (row['fits'], row['reason']) for row in json.loads(result.stdout)}
    assert rows['few'] == (None, 'not known: limit=1 in its query hides candidates')
    assert rows['old'] == (None, 'not known: its request has no query')
    assert rows['odd'][0] is False
    assert 'CUSTOM_UNKNOWN_TRAIT' in rows['odd'][1]
    each = cluster.eschedule('evacuate', '--dry-run', '--each', '-f', 'json')
    assert (each.code, [row['unknown'] for row in json.loads(each.stdout)]) == (3, [2, 0])


def test_only_guests_that_live_on_the_host_move(cluster: Control, make_host: MakeHost) -> None:
    compute, other = make_host('hv1'), make_host('hv2')
    made = {name: create(cluster, name, SMALL, '--on', 'hv1') for name in ('lives', 'ends')}
    rewrite_request(cluster, compute, made['lives'], query=SMALL)
    assert cluster.eschedule('destroy', 'ends').code == 0
    cluster.etcd.put(keys.request(compute, MALFORMED), '{}')

    result = cluster.eschedule('evacuate', '--dry-run', 'hv1', '-f', 'json')

    rows = {row['name'] or row['instance']: (row['new_compute'], row['reason']) for row in json.loads(result.stdout)}
    assert rows == {
        'lives': (other, None),
        MALFORMED: (None, 'not known: instance is missing'),
    }
    assert result.code == 3
    cluster.etcd.delete(keys.request(compute, MALFORMED))
    # A silent host is no place, and its guests would go elsewhere all the same.
    cluster.etcd.delete(keys.compute(compute))
    cluster.etcd.put(keys.hostname(compute), json.dumps({'version': 1, 'hostname': 'hv1'}))
    silent = cluster.eschedule('evacuate', '--dry-run', 'hv1', '-f', 'json')
    assert (silent.code, read_places(silent)) == (0, {'lives': 'hv2'})
    emptied = cluster.eschedule('evacuate', '--dry-run', 'hv2', '-f', 'json')
    assert (emptied.code, json.loads(emptied.stdout)) == (0, [])


def test_the_command_line_names_hosts_or_each(cluster: Control, make_host: MakeHost) -> None:
    make_host('hv1')
    assert cluster.eschedule('evacuate', '--dry-run').code == 2
    assert cluster.eschedule('evacuate', '--dry-run', 'hv1', '--each').code == 2
    assert cluster.eschedule('evacuate', '--dry-run', 'hv9').code == 4
    unknown = cluster.eschedule('evacuate', '--dry-run', MALFORMED)
    assert (unknown.code, unknown.stdout) == (4, '')
