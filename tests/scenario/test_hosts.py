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
from tests.kit.hands import Eschedule, read_guests
from tests.kit.invariants import check_invariants, read_allocations, read_lasting_keys
from tests.kit.servers import wait_until
from tests.kit.sharing import kill_and_lapse, list_hosts, list_states
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    boot,
    find_log_lines,
    place,
    read_log,
    read_record,
    read_reserved,
    require_record,
    wait_address,
    wait_state,
)

# eschedule hosts: computes that are up, closed, silent or orphaned, as placement and etcd know them.


def test_hosts_shows_up_closed_silent_and_orphaned(cluster: Control) -> None:
    up_compute, closed, silent, orphaned = (cluster.ecompute() for _ in range(4))
    for compute in (up_compute, closed, silent):
        wait_address(cluster, place(cluster, f'{SMALL_QUERY}&in_tree={compute.uuid}')[1])
    assert set(list_states(cluster).values()) == {'up'}
    wait_until(lambda: cluster.etcd.list_keys(f'/hostnames/{orphaned.uuid}'), 30, 'it has written down its name')
    closed.stop()
    kill_and_lapse(cluster, silent)
    kill_and_lapse(cluster, orphaned)

    name = socket.gethostname()
    shown = list_hosts(cluster)
    assert {compute: (row['state'], row['hostname'], row['instances']) for compute, row in shown.items()} == {
        up_compute.uuid: ('up', name, 1),
        closed.uuid: ('closed', name, 1),
        silent.uuid: ('silent', name, 1),
        orphaned.uuid: ('orphaned', name, 0),
    }
    assert shown[up_compute.uuid]['resources'] == {
        'VCPU': {'used': 1, 'free': 3, 'capacity': 4, 'over': 0},
        'DISK_GB': {'used': 1, 'free': 9, 'capacity': 10, 'over': 0},
        'MEMORY_MB': {'used': 128, 'free': 384, 'capacity': 512, 'over': 0},
    }
    assert shown[closed.uuid]['resources']['VCPU'] == {'used': 1, 'free': 0, 'capacity': 0, 'over': 0}

    # They have their earlier state as soon as they are back.
    for compute in (closed, silent, orphaned):
        compute.start()
    assert set(list_states(cluster).values()) == {'up'}
    check_invariants(cluster, up_compute, closed, silent, orphaned)


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


def rename_host(control: Control, compute: Ecompute, name: str) -> None:
    """Change the host name in etcd of a compute that is down: all of a test share one host."""
    key = f'/hostnames/{compute.uuid}'
    wait_until(lambda: control.etcd.list_keys(key), 30, 'it has written down its name')
    control.etcd.put(key, json.dumps({'version': 1, 'hostname': name}))


def test_closed_and_silent_computes_keep_their_host_names(cluster: Control) -> None:
    up_compute, closed, silent = (cluster.ecompute() for _ in range(3))
    instance = boot(cluster, f'{SMALL_QUERY}&in_tree={silent.uuid}')
    closed.stop()
    rename_host(cluster, closed, 'hv4')
    kill_and_lapse(cluster, silent)
    rename_host(cluster, silent, 'hv5')

    names = {compute: shown['hostname'] for compute, shown in list_hosts(cluster).items()}
    assert names == {up_compute.uuid: socket.gethostname(), closed.uuid: 'hv4', silent.uuid: 'hv5'}
    assert json.loads(cluster.eschedule('show', '-f', 'json', instance).stdout)['host'] == 'hv5'
    for command in ('drain', 'enable'):
        assert cluster.eschedule('host', command, 'hv4').code == 0
    refusal = cluster.eschedule('--on', 'hv4', SMALL_QUERY)
    assert (refusal.code, refusal.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), refusal
    assert 'eschedule: hv4: is not alive' in refusal.stderr.splitlines()

    assert_one_line(cluster.eschedule('host', 'forget', 'hv5'), 5, 'compute hv5 is not forgotten', instance)
    assert cluster.eschedule('destroy', instance).code == 0
    forgotten = cluster.eschedule('host', 'forget', '--fenced', 'hv4', 'hv5', 'hv6')
    assert forgotten.code == 4, forgotten
    for name in ('hv4', 'hv5'):
        assert f'eschedule: {name}: its resource provider is removed' in forgotten.stderr
    assert list(list_hosts(cluster)) == [up_compute.uuid]
    assert cluster.etcd.list_keys('/hostnames/') == [f'/hostnames/{up_compute.uuid}']
    # The record of a gone instance is kept for a day and is not evidence of a compute.
    assert silent.uuid not in cluster.eschedule('check').stderr


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


# host drain and enable: a disabled compute gets no new instances, even after a restart or a kill.


DISABLED_TRAITS = {'COMPUTE_STATUS_DISABLED', 'CUSTOM_ECOMP_DISABLED'}


def read_traits(control: Control, compute: Ecompute) -> set[str]:
    return set(control.placement.call('GET', f'/resource_providers/{compute.uuid}/traits')['traits'])


def run_host_command(control: Control, command: str, compute: str, *options: str) -> list[str]:
    result = control.eschedule('host', command, compute, *options)
    assert (result.code, result.stdout) == (0, ''), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def expect_refusal(control: Control, *words: str) -> list[str]:
    result = control.eschedule(*(words or (SMALL_QUERY,)))
    assert (result.code, result.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), result
    return [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]


def test_disabled_compute_gets_no_instances_until_enabled(cluster: Control) -> None:
    first, second = cluster.ecompute(), cluster.ecompute()
    guest = place(cluster, f'{SMALL_QUERY}&in_tree={first.uuid}')[1]
    address = wait_address(cluster, guest)
    assert 'disabled: no new instances' in run_host_command(cluster, 'drain', first.uuid)[0]
    assert run_host_command(cluster, 'drain', first.uuid.upper())[0] == f'{first.uuid}: is already disabled'
    assert list_states(cluster) == {first.uuid: 'disabled', second.uuid: 'up'}
    # The other compute has room for four. --count and --dry-run respect the disabled state, too.
    plan = cluster.eschedule('create', '--dry-run', SMALL_QUERY).stdout
    assert (second.uuid in plan, first.uuid in plan) == (True, False)
    placed = cluster.eschedule('--count', '4', SMALL_QUERY)
    assert placed.stdout.count(f'NOTIFIED TARGET, {second.uuid}, ') == 4
    assert any('is disabled (eschedule host enable ' in line for line in expect_refusal(cluster))
    assert wait_address(cluster, guest) == address
    assert run_host_command(cluster, 'enable', first.uuid) == [f'{first.uuid}: enabled']
    assert place(cluster)[0] == first.uuid
    check_invariants(cluster, first, second)


def test_restarted_compute_keeps_its_disabled_state(cluster: Control) -> None:
    compute = cluster.ecompute(traits=['CUSTOM_RACK_7'])
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7'}
    compute.stop()
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7', 'COMPUTE_STATUS_DISABLED'}
    assert (list_states(cluster), list_hosts(cluster)[compute.uuid]['disabled']) == ({compute.uuid: 'closed'}, False)
    compute.start()
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7'}
    run_host_command(cluster, 'drain', compute.uuid)
    for stop in (compute.stop, compute.kill):
        stop()
        compute.start()
        assert read_traits(cluster, compute) == {'CUSTOM_RACK_7', *DISABLED_TRAITS}
        expect_refusal(cluster)
    # Enabled while it is stopped, it is open as soon as it starts.
    compute.stop()
    assert (list_states(cluster), list_hosts(cluster)[compute.uuid]['disabled']) == ({compute.uuid: 'closed'}, True)
    assert 'closed, disabled' in cluster.eschedule('hosts').stdout
    assert run_host_command(cluster, 'enable', compute.uuid) == [
        f'{compute.uuid}: enabled; instances are placed there once its ecompute is started'
    ]
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7', 'COMPUTE_STATUS_DISABLED'}
    compute.start()
    place(cluster)
    # Disabled and enabled while it is silent and may not come back.
    kill_and_lapse(cluster, compute)
    assert 'disabled: no new instances' in run_host_command(cluster, 'drain', compute.uuid)[0]
    run_host_command(cluster, 'enable', compute.uuid)
    compute.start()
    assert read_traits(cluster, compute) == {'CUSTOM_RACK_7'}
    place(cluster)


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


def test_traits_aggregates_and_ratios(cluster: Control) -> None:
    group, traits_of_one = UNKNOWN_UUID, ['CUSTOM_RACK_7', 'STORAGE_DISK_SSD']
    settings = {'traits': traits_of_one, 'aggregates': [group], 'allocation_ratios': {'VCPU': 2}}
    tuned_compute = cluster.ecompute('VCPU:1,DISK_GB:10,MEMORY_MB:512', **settings)
    cluster.ecompute()
    assert read_traits(cluster, tuned_compute) == {'CUSTOM_RACK_7', 'STORAGE_DISK_SSD'}, 'a fake has no processor'
    assert place(cluster, f'{SMALL_QUERY}&required=CUSTOM_RACK_7')[0] == tuned_compute.uuid
    assert place(cluster, f'{SMALL_QUERY}&member_of={group}&required=STORAGE_DISK_SSD')[0] == tuned_compute.uuid
    messages = expect_refusal(cluster, f'{SMALL_QUERY}&required=CUSTOM_RACK_7')
    assert any('VCPU short by 1 (free 0 of 2)' in line for line in messages), messages
    assert any(line.endswith('lacks CUSTOM_RACK_7') for line in messages), messages


# eschedule host forget: refusals, removal of a lost compute, and returning computes.


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


def test_forgotten_compute_that_returns_removes_what_was_destroyed(cluster: Control) -> None:
    compute = cluster.ecompute()
    instance = boot(cluster)
    kill_and_lapse(cluster, compute)
    assert list_states(cluster) == {compute.uuid: 'silent'}
    assert cluster.eschedule('destroy', instance).code == 0
    forget(cluster, compute.uuid)
    expect_forgotten(cluster, compute.uuid)
    assert_one_line(cluster.eschedule('host', 'forget', compute.uuid), 4, compute.uuid, 'no host has this name or uuid')
    compute.start()
    # It registers again, and accepts new instances.
    assert list_states(cluster) == {compute.uuid: 'up'}
    assert read_reserved(cluster, compute.uuid) == 0
    wait_until(lambda: instance not in read_guests(compute), 20, 'the guest is removed')
    assert read_record(cluster, instance)['state'] == 'gone'  # type: ignore[index]
    assert not find_log_lines(compute, instance, 'the guest is kept')
    boot(cluster)
    check_invariants(cluster, compute)
    read_log(compute)


def test_compute_that_returns_in_time_carries_out_its_destroys(cluster: Control, compute: Ecompute) -> None:
    instances = [boot(cluster) for _ in range(2)]
    kill_and_lapse(cluster, compute)
    assert cluster.eschedule('destroy', *instances).code == 0
    with Eschedule(
        cluster, 'host', 'forget', '--fenced', compute.uuid, failpoint='host-released:stop'
    ) as forget_command:
        forget_command.wait_frozen_at('host-released')
        compute.start()
        forget_command.resume()
        assert_one_line(forget_command.wait(), 5, compute.uuid, 'is not forgotten', 'it is alive')
    for instance in instances:
        assert wait_state(cluster, instance, 'gone')['fault'] is None
    assert list_states(cluster) == {compute.uuid: 'up'}
