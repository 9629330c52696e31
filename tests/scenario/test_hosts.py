"""Hosts: names, tables, disable, drain, enable and forget.

What happens beside a forget is in tests/model (scenarios with "forget") and tests/functional/test_claims.py.
"""

from __future__ import annotations

import json
import socket
import uuid
from pathlib import Path

from ecomp.model.host import StoredHostname
from ecomp.model.stored import decode_lenient
from tests.kit.by_hand import put_claim
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule
from tests.kit.invariants import check_invariants, read_allocations, read_lasting_keys
from tests.kit.servers import wait_until
from tests.kit.sharing import kill_and_lapse, list_hosts
from tests.kit.story import (
    SMALL_QUERY,
    assert_one_line,
    boot,
    place,
    read_record,
    require_record,
    wait_address,
    wait_state,
)

# A host that cannot build is used last, and says why.


def break_builds(compute: Ecompute) -> Path:
    """Let each build of a fake compute without guests fail at stage disk."""
    obstacle = compute.directory / 'state' / 'fake.json'
    obstacle.mkdir()
    return obstacle


def read_trouble(control: Control, compute: Ecompute) -> str | None:
    trouble = list_hosts(control)[compute.uuid]['trouble']
    assert trouble is None or isinstance(trouble, str)
    return trouble


def test_two_of_five_requests_fail_beside_a_host_that_fails_all_builds(cluster: Control) -> None:
    broken, good = cluster.ecompute(queues=True), cluster.ecompute('VCPU:5,DISK_GB:10,MEMORY_MB:1024')
    boot(cluster, f'{SMALL_QUERY}&in_tree={good.uuid}')  # so the broken one is the emptiest
    obstacle, failed, words = break_builds(broken), 0, ('--wait', '--timeout', '60')
    for number in range(5):
        result = cluster.eschedule(SMALL_QUERY, f'http://images.invalid/{"ab"[number % 2]}.qcow2', *words)
        failed += result.code
        if failed == 2:
            wait_until(lambda: cluster.etcd.get(f'/troubles/{broken.uuid}'), 20, 'it reports its trouble')
    assert failed == 2

    trouble = 'builds of different images fail at stage disk'
    assert read_trouble(cluster, broken) == trouble
    assert read_trouble(cluster, good) is None
    states = cluster.eschedule('hosts', '-f', 'value', '-c', 'state').stdout.splitlines()
    assert sorted(states) == ['up', f'up, cannot build: {trouble}']
    audit = cluster.eschedule('check', '-f', 'json')
    found = {(each['code'], each['level'], each['subject']) for each in json.loads(audit.stdout)}
    assert {each for each in found if each[0] != 'etcd-version'} == {('host-trouble', 'warning', broken.uuid)}
    assert audit.code == 0
    assert 'ecomp_cluster_hosts_troubled 1.0' in cluster.eschedule('top', '-f', 'prometheus').stdout
    preview = json.loads(cluster.eschedule('create', '--dry-run', SMALL_QUERY, '-f', 'json').stdout)
    assert [each['compute'] for each in preview] == [good.uuid, broken.uuid]

    # It takes nothing from a queue, and gets what no other host has room for.
    assert cluster.eschedule('flavor', 'set', 'small', SMALL_QUERY).code == 0
    waiting = cluster.eschedule('--queue', '--flavor', 'small', '--name', 'waits').stdout.split()[-1]
    assert f'cannot build: {trouble}' in cluster.eschedule('why', waiting).stdout
    obstacle.rmdir()
    (_, fits), (compute, last) = place(cluster), place(cluster)
    assert compute == broken.uuid
    wait_address(cluster, fits)
    assert 'the chosen compute reported that it could not build' in cluster.eschedule('why', last).stdout
    # That build succeeds, which ends the trouble.
    for instance in (last, waiting):
        wait_address(cluster, instance)
    wait_until(lambda: read_trouble(cluster, broken) is None, 20, 'its trouble is over')
    check_invariants(cluster, broken, good)


# A compute has its host's name wherever users read or type it, even while it is down.


def test_computes_with_one_host_name_need_their_uuids(cluster: Control) -> None:
    first, second = cluster.ecompute(), cluster.ecompute()
    name = socket.gethostname()
    wait_until(lambda: len(cluster.etcd.list_keys('/hostnames/')) == 2, 30, 'both have written down their names')
    assert place(cluster, SMALL_QUERY, '--on', second.uuid[:6])[0] == second.uuid
    # The dead one keeps its name until it is forgotten, for example after the host was installed again.
    first.stop()
    for words in (('--on', name, SMALL_QUERY), ('host', 'drain', name), ('host', 'forget', name)):
        result = cluster.eschedule(*words)
        assert_one_line(result, 5, f'{name}: 2 computes have this host name', first.uuid, second.uuid)
    assert cluster.eschedule('host', 'forget', first.uuid[:8]).code == 0
    assert place(cluster, SMALL_QUERY, '--on', name)[0] == second.uuid


def test_host_name_is_written_once_and_restored_when_malformed(cluster: Control) -> None:
    compute = cluster.ecompute()
    key = f'/hostnames/{compute.uuid}'
    wait_until(lambda: cluster.etcd.list_keys(key), 30, 'it has written down its name')
    value = cluster.etcd.get(key)
    compute.restart()
    assert cluster.etcd.get(key) == value
    compute.stop()
    cluster.etcd.put(key, 'rubbish')
    name = str(list_hosts(cluster)[compute.uuid]['hostname'])
    assert name == 'None', 'what makes no sense is no name'
    compute.start()
    named = decode_lenient(StoredHostname, value or b'').hostname
    wait_until(
        lambda: decode_lenient(StoredHostname, cluster.etcd.get(key) or b'').hostname == named,
        30,
        'it has written it down again',
    )


# host drain.


def run_host_command(control: Control, command: str, compute: str, *options: str) -> list[str]:
    result = control.eschedule('host', command, compute, *options)
    assert (result.code, result.stdout) == (0, ''), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def test_drain_lists_the_instances_and_waits_for_their_end(cluster: Control, compute: Ecompute) -> None:
    assert run_host_command(cluster, 'drain', compute.uuid, '--wait') == [
        f'{compute.uuid}: disabled: no new instances are placed there; those that run there continue',
        f'{compute.uuid}: no instances there',
        f'{compute.uuid}: no instances remain',
    ]
    run_host_command(cluster, 'enable', compute.uuid)
    web1 = place(cluster, SMALL_QUERY, '--name', 'web1')[1]
    instances = sorted([web1, place(cluster)[1]])
    for instance in instances:
        wait_address(cluster, instance)
    messages = run_host_command(cluster, 'drain', compute.uuid)
    assert messages[1] == f'{compute.uuid}: 2 instances there'
    assert messages[2:] == [f'{"web1" if instance == web1 else instance}: active' for instance in instances]
    timed_out = cluster.eschedule('host', 'drain', '--wait', '--timeout', '0', compute.uuid)
    assert timed_out.code == 6, timed_out
    assert 'still waiting for 2 instances to leave; the host stays disabled' in timed_out.stderr.splitlines()[-1]
    # It can stop the guests instead, and those that it stopped are started again.
    assert cluster.eschedule('stop', '--wait', instances[0]).code == 0
    assert run_host_command(cluster, 'drain', compute.uuid, '--stop', '--wait')[-1].endswith('no guest runs')
    wait_state(cluster, instances[1], 'stopped')
    run_host_command(cluster, 'enable', compute.uuid, '--start')
    assert cluster.eschedule('wait', instances[1]).code == 0
    assert require_record(cluster, instances[0])['state'] == 'stopped'
    with Eschedule(cluster, 'host', 'drain', '--wait', compute.uuid) as draining:
        # Draining destroys nothing by itself.
        assert cluster.eschedule('destroy', '--wait', instances[0]).code == 0
        assert not draining.has_ended
        assert cluster.eschedule('destroy', instances[1]).code == 0
        result = draining.wait()
    assert result.code == 0, result
    assert result.stderr.splitlines()[-1].endswith(f'{compute.uuid}: no instances remain')
    assert not cluster.etcd.list_keys(f'/hosts/{compute.uuid}/')
    assert cluster.placement.read_consumers(compute.uuid) == {}


# eschedule host forget: refusals, and removal of a lost compute.


def forget(control: Control, compute: str) -> list[str]:
    result = control.eschedule('host', 'forget', '--fenced', compute)
    assert (result.code, result.stdout) == (0, ''), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def place_unseen(control: Control, compute: Ecompute) -> str:
    compute.pause()
    _, instance = place(control, f'{SMALL_QUERY}&in_tree={compute.uuid}')
    kill_and_lapse(control, compute)
    assert read_record(control, instance) is None
    return instance


def expect_forgotten(control: Control, compute: str) -> None:
    assert control.etcd.list_keys(f'/hosts/{compute}/') == []
    assert control.placement.read_inventory(compute) == {}
    providers = control.placement.call('GET', '/resource_providers')['resource_providers']
    assert compute not in {provider['uuid'] for provider in providers}
    assert compute not in list_hosts(control)
    assert control.etcd.list_keys(f'/hostnames/{compute}') == []


def test_forget_finishes_pending_destroys(cluster: Control) -> None:
    compute = cluster.ecompute()
    seen_instance = boot(cluster)
    unseen_instance = place_unseen(cluster, compute)
    orphan = str(uuid.uuid4())
    put_claim(cluster, orphan, compute.uuid, amounts={'VCPU': 1})
    cluster.etcd.put(f'/hosts/{compute.uuid}/by-hand', '')
    for instance in (seen_instance, unseen_instance):
        assert_one_line(cluster.eschedule('host', 'forget', compute.uuid), 5, 'it still has instance')
        assert_one_line(cluster.eschedule('destroy', instance), 0, 'once this compute is no longer silent')
    shown = list_hosts(cluster)[compute.uuid]
    # Both are there, as `hosts` lists them, until they are destroyed.
    assert (shown['state'], shown['instances'], shown['resources']['VCPU']['used']) == ('silent', 2, 3)

    refused = assert_one_line(
        cluster.eschedule('host', 'forget', compute.uuid), 5, 'it holds claims and may run', '--fenced'
    )
    assert len(read_allocations(cluster)) == 3, refused
    messages = forget(cluster, compute.uuid)
    assert len(messages) == 5
    for line, words in zip(
        messages,
        [
            *(
                (destroyed, 'its claim and its keys are removed')
                for destroyed in sorted((seen_instance, unseen_instance))
            ),
            (f'/hosts/{compute.uuid}/by-hand: removed',),
            (f'{orphan}: its claim is released',),
            (f'{compute.uuid}: its resource provider is removed',),
        ],
        strict=True,
    ):
        assert all(word in line for word in words), messages
    for instance in (seen_instance, unseen_instance):
        gone = wait_state(cluster, instance, 'gone')
        assert 'forgotten' in gone['fault']
        assert 'gone' in gone['stages']
        assert_one_line(cluster.eschedule(instance), 4, 'gone since')
        assert_one_line(cluster.eschedule('--uuid', instance, SMALL_QUERY), 5, 'never used twice')
    assert read_allocations(cluster) == {}
    expect_forgotten(cluster, compute.uuid)
    assert set(read_lasting_keys(cluster)) - {'/cluster'} == {
        f'/instances/{compute.uuid}/{destroyed}' for destroyed in (seen_instance, unseen_instance)
    }
    check_invariants(cluster)
    assert_one_line(cluster.eschedule('host', 'forget', compute.uuid), 4, 'no host has this name or uuid')
