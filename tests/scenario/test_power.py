"""Stop, start and reboot of fake guests."""

from __future__ import annotations

import json
import socket
from datetime import datetime

import pytest

from ecomp.model.guest import PAUSED, UNLIKE
from ecomp.model.order import ACTIONS
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, list_running_guests
from tests.kit.invariants import check_invariants, read_lasting_keys
from tests.kit.servers import wait_until
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    boot,
    find_log_lines,
    place,
    read_record,
    wait_address,
    wait_log_lines,
    wait_state,
)


def switch(control: Control, action: str, *instances: str) -> None:
    """Switch instances with --wait and check the messages about each."""
    done = control.eschedule(action, '--wait', *instances)
    state = 'stopped' if action == 'stop' else 'active'
    assert (done.code, done.stdout) == (0, '')
    lines = [line.removeprefix('eschedule: ') for line in done.stderr.splitlines()]
    accepted = [f'{instance}: {action} accepted; {socket.gethostname()} carries it out' for instance in instances]
    assert lines == [*accepted, *(f'{instance}: {state}' for instance in instances)]


def test_stop_start_and_reboot_keep_claim_and_address(cluster: Control, compute: Ecompute) -> None:
    instances = [place(cluster)[1] for _ in range(2)]
    first, second = instances
    addresses = [wait_address(cluster, instance) for instance in instances]
    held = cluster.placement.read_allocations(first)

    switch(cluster, 'stop', *instances)
    assert list_running_guests(compute) == set()
    assert [read_record(cluster, instance)['state'] for instance in instances] == ['stopped'] * 2  # type: ignore[index]
    assert cluster.placement.read_allocations(first) == held, 'its claim stays'
    assert cluster.eschedule(first).stdout == f'{addresses[0]}\n', 'and its address'
    check_invariants(cluster, compute)

    switch(cluster, 'start', first)
    assert list_running_guests(compute) == {first}
    switch(cluster, 'reboot', *instances)
    assert list_running_guests(compute) == set(instances), 'a reboot ends running, also of one that was stopped'
    assert len(wait_log_lines(compute, 'START INSTANCE', first, number=2)) == 2
    assert [wait_address(cluster, instance) for instance in instances] == addresses
    assert cluster.placement.read_allocations(first) == held
    check_invariants(cluster, compute)

    switch(cluster, 'stop', second)
    assert cluster.eschedule('destroy', '--wait', second).code == 0


def test_wait_after_reboot_waits_for_the_new_boot(cluster: Control, compute: Ecompute) -> None:
    _, instance = place(cluster)
    address = wait_address(cluster, instance)
    compute.pause()
    assert cluster.eschedule('reboot', instance).code == 0
    # The first boot got its address long ago; the boot of the reboot has none yet.
    assert_one_line(
        cluster.eschedule('wait', instance, '--timeout', '0'), 6, 'still waiting for its compute to accept it'
    )
    assert cluster.eschedule('wait', instance, '--for', 'disk') == (0, '', '')
    compute.resume()
    assert cluster.eschedule('wait', instance) == (0, f'{address}\n', '')
    switch(cluster, 'stop', instance)
    stopped_result = cluster.eschedule(instance)
    assert (stopped_result.code, stopped_result.stdout) == (0, f'{address}\n')
    assert_one_line(stopped_result, 0, instance, ': stopped since 20')
    assert_one_line(cluster.eschedule('wait', instance, '--timeout', '0'), 6, 'a user to start it (it is stopped)')
    switch(cluster, 'start', instance)
    assert cluster.eschedule('wait', instance) == (0, f'{address}\n', '')
    boots = (read_record(cluster, instance) or {})['boots']
    assert [(entry['number'], entry['reason']) for entry in boots] == [(1, 'created'), (2, 'reboot'), (3, 'start')]
    assert [sorted(entry['stages']) for entry in boots] == [['addressed', 'started', 'stopped']] * 2 + [
        ['addressed', 'started']
    ]
    last = cluster.eschedule('timeline', instance).stdout.splitlines()
    assert last[0].startswith(f'{instance}  active  boot 3, start  started {boots[2]["stages"]["started"]}')
    assert [line.split()[0] for line in last[1:]] == ['addressed', 'ready', '0']
    report = json.loads(cluster.eschedule('timeline', instance, '--boot', '2', '-f', 'json').stdout)
    (shown,) = report['instances']
    assert (shown['boot'], shown['reason']) == (2, 'reboot')
    assert [stage['stage'] for stage in shown['stages']] == ['started', 'addressed']
    assert_one_line(
        cluster.eschedule('timeline', instance, '--boot', '4'), 4, 'boot 4 is not kept: only boots 1 to 3 are kept'
    )
    rows = dict(line.split(maxsplit=1) for line in cluster.eschedule('show', instance).stdout.splitlines())
    assert rows['since'] == boots[2]['stages']['started']


@pytest.mark.usefixtures('compute')
def test_start_and_stop_in_the_same_state_change_nothing(cluster: Control) -> None:
    instance = boot(cluster)
    before = read_lasting_keys(cluster)
    assert_one_line(cluster.eschedule('start', '--wait', instance), 0, instance, 'is already active')
    assert read_lasting_keys(cluster) == before
    switch(cluster, 'stop', instance)
    before = read_lasting_keys(cluster)
    assert_one_line(cluster.eschedule('stop', instance, instance), 0, instance, 'is already stopped')
    assert read_lasting_keys(cluster) == before


def test_only_built_instances_can_be_switched(cluster: Control, compute: Ecompute) -> None:
    gone = boot(cluster)
    assert cluster.eschedule('destroy', '--wait', gone).code == 0
    compute.pause()
    _, scheduled = place(cluster)
    for action in ACTIONS:
        assert_one_line(cluster.eschedule(action, UNKNOWN_UUID), 4, UNKNOWN_UUID, 'no such instance')
        assert_one_line(cluster.eschedule(action, gone), 4, gone, 'gone since')
        assert_one_line(cluster.eschedule(action, scheduled), 5, scheduled, 'is not built yet. Fix: wait')
    compute.resume()
    wait_address(cluster, scheduled)
    compute.pause()
    assert cluster.eschedule('destroy', scheduled).code == 0
    mixed = cluster.eschedule('stop', scheduled, UNKNOWN_UUID)
    assert (mixed.code, len(mixed.stderr.splitlines())) == (5, 2)
    assert f'{scheduled}: is being destroyed' in mixed.stderr
    compute.resume()
    wait_state(cluster, scheduled, 'gone')


def test_silent_compute_carries_out_the_last_action_later(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    compute.stop()
    assert_one_line(cluster.eschedule('stop', instance), 0, 'stop accepted', 'once this compute is no longer silent')
    timed_out = cluster.eschedule('stop', '--wait', '--timeout', '0', instance)
    assert timed_out.code == 6
    repeated, waited = timed_out.stderr.splitlines()
    assert f'{instance}: stop was requested before; {socket.gethostname()} is carrying it out' in repeated
    assert 'timed out after 0 s (the operation continues), still waiting for its compute to accept it' in waited
    # Only the last request counts; a request that never began has no effect.
    assert_one_line(cluster.eschedule('reboot', instance), 0, 'reboot accepted')
    assert_one_line(cluster.eschedule('stop', instance), 0, 'stop accepted')
    compute.start()
    wait_state(cluster, instance, 'stopped')
    assert list_running_guests(compute) == set()
    assert find_log_lines(compute, 'START INSTANCE', instance) == []
    compute.restart()
    switch(cluster, 'start', instance)
    assert len(wait_log_lines(compute, 'START INSTANCE', instance)) == 1
    compute.restart()
    assert list_running_guests(compute) == {instance}, 'done once'


def test_power_action_keeps_unknown_fields_of_the_request(cluster: Control, compute: Ecompute) -> None:
    """Unknown fields of a newer eschedule are kept, too."""
    instance = boot(cluster, SMALL_QUERY, IMAGE)
    key = f'/hosts/{compute.uuid}/{instance}'
    request = {**json.loads(cluster.etcd.get(key) or b''), 'later': {'names': ['web1', 1.5, None]}}
    cluster.etcd.put(key, json.dumps(request))
    switch(cluster, 'stop', instance)
    stored = json.loads(cluster.etcd.get(key) or b'')
    power = stored.pop('power')
    assert datetime.fromisoformat(stored.pop('written_at')).tzinfo is not None
    assert stored == request
    assert (power['action'], read_record(cluster, instance)['power']) == ('stop', power['id'])  # type: ignore[index]


def test_guest_that_turns_itself_off_stays_off(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    switch(cluster, 'reboot', instance)
    compute.stop()
    path = compute.directory / 'state' / 'fake.json'
    path.write_text(json.dumps([{**guest, 'running': False} for guest in json.loads(path.read_text())]))
    compute.start()
    wait_state(cluster, instance, 'stopped')
    compute.restart()
    assert list_running_guests(compute) == set()
    switch(cluster, 'start', instance)


def test_failed_start_reports_its_reason_and_is_not_retried(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    switch(cluster, 'stop', instance)
    compute.stop()
    path = compute.directory / 'state' / 'fake.json'
    intact = path.read_text()
    path.write_text(json.dumps([{**guest, 'disk': False} for guest in json.loads(intact)]))
    compute.start()
    failed = cluster.eschedule('start', '--wait', instance)
    assert failed.code == 1
    assert failed.stderr.endswith('its disk is gone\n')
    # The record has the fault that the compute observes.
    wait_until(
        lambda: (read_record(cluster, instance) or {})['fault'] == 'its disk is gone', 20, 'the fault is what is seen'
    )
    assert len(wait_log_lines(compute, instance, 'it could not be started: its disk is gone')) == 1
    compute.stop()
    path.write_text(intact)
    compute.start()
    wait_until(lambda: (read_record(cluster, instance) or {})['fault'] is None, 20, 'it is mended')
    assert list_running_guests(compute) == set(), 'what failed is over'
    switch(cluster, 'start', instance)


@pytest.mark.parametrize(
    ('changed', 'fault'),
    [
        ({'trouble': PAUSED}, PAUSED),
        ({'size': {'VCPU': 8, 'DISK_GB': 2}}, f'{UNLIKE}: VCPU:8 for 1, DISK_GB:2 for 1'),
    ],
)
def test_guest_changed_outside_ecomp_has_a_fault_until_it_is_as_claimed(
    cluster: Control, compute: Ecompute, changed: dict[str, object], fault: str
) -> None:
    instance = boot(cluster)
    assert (read_record(cluster, instance) or {})['fault'] is None
    path = compute.directory / 'state' / 'fake.json'
    compute.stop()
    intact = path.read_text()
    path.write_text(json.dumps([guest | changed for guest in json.loads(intact)]))
    compute.start()

    def has_fault(expected: str | None) -> bool:
        return (read_record(cluster, instance) or {})['fault'] == expected

    wait_until(lambda: has_fault(fault), 20, 'the fault is recorded')
    assert json.loads(cluster.eschedule('show', instance, '-f', 'json').stdout)['state'] == 'active'
    audit = cluster.eschedule('audit', '-f', 'json')
    assert [(finding['code'], finding['sentence'].partition('fault: ')[2]) for finding in json.loads(audit.stdout)] == [
        ('domain-differs', fault)
    ]
    compute.stop()
    path.write_text(intact)
    compute.start()
    wait_until(lambda: has_fault(None), 20, 'the fault ends')
    assert cluster.eschedule('audit', '-f', 'json').stdout == '[]\n'


@pytest.mark.parametrize('meanwhile', ['start', 'destroy'])
def test_waiting_stop_reports_a_later_request(cluster: Control, compute: Ecompute, meanwhile: str) -> None:
    instance = boot(cluster)
    compute.pause()
    with Eschedule(cluster, 'stop', '--wait', instance) as stop_command:
        wait_until(
            lambda: b'"stop"' in (cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') or b''), 20, 'it is asked'
        )
        assert cluster.eschedule(meanwhile, instance).code == 0
        compute.resume()
        ended = stop_command.wait()
    code, message = {'start': (5, 'another power change was requested'), 'destroy': (4, 'destroyed during the wait')}[
        meanwhile
    ]
    assert ended.code == code, ended
    assert message in ended.stderr
