"""Stop, start and reboot of fake guests."""

from __future__ import annotations

import json
import socket

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import list_running_guests
from tests.kit.invariants import check_invariants
from tests.kit.servers import wait_until
from tests.kit.story import (
    assert_one_line,
    boot,
    place,
    read_record,
    wait_address,
    wait_log_lines,
)


def switch(control: Control, action: str, *instances: str) -> None:
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
        cluster.eschedule('wait', instance, '--timeout', '0'), 6, 'still waiting for its compute to accept the request'
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
    assert [(entry['number'], entry['reason']) for entry in boots] == [(3, 'start')]
    assert sorted(boots[0]['stages']) == ['addressed', 'started']
    last = cluster.eschedule('show', '--timeline', instance).stdout.splitlines()
    assert last[0].startswith(f'{instance}  active  boot 3, start  started {boots[0]["stages"]["started"]}')
    assert [line.split()[0] for line in last[1:]] == ['addressed', 'ready', '0']
    rows = dict(line.split(maxsplit=1) for line in cluster.eschedule('show', instance).stdout.splitlines())
    assert rows['since'] == boots[0]['stages']['started']


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
