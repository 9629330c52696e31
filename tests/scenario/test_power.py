"""Stop, start and reboot of fake guests."""

from __future__ import annotations

import json
import socket

import pytest

from ecomp.model.order import ACTIONS
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, running
from tests.kit.invariants import check, everything
from tests.kit.servers import until
from tests.kit.story import IMAGE, NOBODY, SMALL, addressed, boot, logged, logs, one_line, place, reached, record


def switched(control: Control, action: str, *instances: str) -> None:
    """Switch instances with --wait and check the messages about each."""
    done = control.eschedule(action, '--wait', *instances)
    state = 'stopped' if action == 'stop' else 'active'
    assert (done.code, done.stdout) == (0, '')
    lines = [line.removeprefix('eschedule: ') for line in done.stderr.splitlines()]
    accepted = [f'{instance}: {action} accepted, {socket.gethostname()} carries it out' for instance in instances]
    assert lines == [*accepted, *(f'{instance}: {state}' for instance in instances)]


def test_stopped_started_and_rebooted(cluster: Control, compute: Ecompute) -> None:
    instances = [place(cluster)[1] for _ in range(2)]
    first, second = instances
    addresses = [addressed(cluster, instance) for instance in instances]
    held = cluster.placement.allocations(first)

    switched(cluster, 'stop', *instances)
    assert running(compute) == set()
    assert [record(cluster, instance)['state'] for instance in instances] == ['stopped'] * 2  # type: ignore[index]
    assert cluster.placement.allocations(first) == held, 'its claim stays'
    assert cluster.eschedule(first).stdout == f'{addresses[0]}\n', 'and its address'
    check(cluster, compute)

    switched(cluster, 'start', first)
    assert running(compute) == {first}
    switched(cluster, 'reboot', *instances)
    assert running(compute) == set(instances), 'a reboot ends running, also of one that was stopped'
    assert len(logs(compute, 'START INSTANCE', first, number=2)) == 2
    assert [addressed(cluster, instance) for instance in instances] == addresses
    assert cluster.placement.allocations(first) == held
    check(cluster, compute)

    switched(cluster, 'stop', second)
    assert cluster.eschedule('destroy', '--wait', second).code == 0


def test_each_boot_has_its_stages_and_a_wait_is_for_the_one_that_comes(cluster: Control, compute: Ecompute) -> None:
    _, instance = place(cluster)
    address = addressed(cluster, instance)
    compute.pause()
    assert cluster.eschedule('reboot', instance).code == 0
    # The first boot got its address long ago; the boot of the reboot has none yet.
    one_line(cluster.eschedule('wait', instance, '--timeout', '0'), 6, 'waiting for: its compute to take it')
    assert cluster.eschedule('wait', instance, '--for', 'disk') == (0, '', '')
    compute.resume()
    assert cluster.eschedule('wait', instance) == (0, f'{address}\n', '')
    switched(cluster, 'stop', instance)
    stopped_result = cluster.eschedule(instance)
    assert (stopped_result.code, stopped_result.stdout) == (0, f'{address}\n')
    one_line(stopped_result, 0, instance, 'it is stopped, since 20')
    one_line(cluster.eschedule('wait', instance, '--timeout', '0'), 6, 'somebody to start it: it is stopped')
    switched(cluster, 'start', instance)
    assert cluster.eschedule('wait', instance) == (0, f'{address}\n', '')
    boots = (record(cluster, instance) or {})['boots']
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
    one_line(cluster.eschedule('timeline', instance, '--boot', '4'), 4, 'boot 4 is not kept: 1 to 3 are')
    rows = dict(line.split(maxsplit=1) for line in cluster.eschedule('show', instance).stdout.splitlines())
    assert rows['since'] == boots[2]['stages']['started']


@pytest.mark.usefixtures('compute')
def test_what_is_so_already_is_said_and_nothing_changed(cluster: Control) -> None:
    instance = boot(cluster)
    before = everything(cluster)
    one_line(cluster.eschedule('start', '--wait', instance), 0, instance, 'is active already')
    assert everything(cluster) == before
    switched(cluster, 'stop', instance)
    before = everything(cluster)
    one_line(cluster.eschedule('stop', instance, instance), 0, instance, 'is stopped already')
    assert everything(cluster) == before


def test_only_what_lives_can_be_switched(cluster: Control, compute: Ecompute) -> None:
    gone = boot(cluster)
    assert cluster.eschedule('destroy', '--wait', gone).code == 0
    compute.pause()
    _, scheduled = place(cluster)
    for action in ACTIONS:
        one_line(cluster.eschedule(action, NOBODY), 4, NOBODY, 'no such instance')
        one_line(cluster.eschedule(action, gone), 4, gone, 'gone since')
        one_line(cluster.eschedule(action, scheduled), 5, scheduled, 'is not built yet: wait for it')
    compute.resume()
    addressed(cluster, scheduled)
    compute.pause()
    assert cluster.eschedule('destroy', scheduled).code == 0
    mixed = cluster.eschedule('stop', scheduled, NOBODY)
    assert (mixed.code, len(mixed.stderr.splitlines())) == (5, 2)
    assert f'{scheduled}: is being destroyed' in mixed.stderr
    compute.resume()
    reached(cluster, scheduled, 'gone')


def test_a_silent_compute_does_it_when_it_is_back(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    compute.stop()
    one_line(cluster.eschedule('stop', instance), 0, 'stop accepted', 'when it is back: it is silent now')
    timed_out = cluster.eschedule('stop', '--wait', '--timeout', '0', instance)
    assert timed_out.code == 6
    repeated, waited = timed_out.stderr.splitlines()
    assert f'{instance}: stop was asked for before, {socket.gethostname()} is at it' in repeated
    assert '0 s are up, still waiting for: its compute to take it; it goes on' in waited
    # Only the last request counts; a request that never began has no effect.
    one_line(cluster.eschedule('reboot', instance), 0, 'reboot accepted')
    one_line(cluster.eschedule('stop', instance), 0, 'stop accepted')
    compute.start()
    reached(cluster, instance, 'stopped')
    assert running(compute) == set()
    assert logged(compute, 'START INSTANCE', instance) == []
    compute.restart()
    switched(cluster, 'start', instance)
    assert len(logs(compute, 'START INSTANCE', instance)) == 1
    compute.restart()
    assert running(compute) == {instance}, 'done once'


def test_a_request_keeps_what_is_in_it(cluster: Control, compute: Ecompute) -> None:
    """Unknown fields of a newer eschedule are kept, too."""
    instance = boot(cluster, SMALL, IMAGE)
    key = f'/hosts/{compute.uuid}/{instance}'
    request = {**json.loads(cluster.etcd.get(key) or b''), 'later': {'names': ['web1', 1.5, None]}}
    cluster.etcd.put(key, json.dumps(request))
    switched(cluster, 'stop', instance)
    stored = json.loads(cluster.etcd.get(key) or b'')
    power = stored.pop('power')
    assert stored == request
    assert (power['action'], record(cluster, instance)['power']) == ('stop', power['id'])  # type: ignore[index]


def test_a_guest_that_turns_itself_off_stays_off(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    switched(cluster, 'reboot', instance)
    compute.stop()
    path = compute.directory / 'state' / 'fake.json'
    path.write_text(json.dumps([{**guest, 'running': False} for guest in json.loads(path.read_text())]))
    compute.start()
    reached(cluster, instance, 'stopped')
    compute.restart()
    assert running(compute) == set()
    switched(cluster, 'start', instance)


def test_a_start_that_fails_says_why_and_is_not_tried_again(cluster: Control, compute: Ecompute) -> None:
    instance = boot(cluster)
    switched(cluster, 'stop', instance)
    compute.stop()
    path = compute.directory / 'state' / 'fake.json'
    intact = path.read_text()
    path.write_text(json.dumps([{**guest, 'disk': False} for guest in json.loads(intact)]))
    compute.start()
    failed = cluster.eschedule('start', '--wait', instance)
    assert failed.code == 1
    assert failed.stderr.endswith('its disk is gone\n')
    # The record has the fault that the compute observes.
    until(lambda: (record(cluster, instance) or {})['fault'] == 'its disk is gone', 20, 'the fault is what is seen')
    assert len(logs(compute, instance, 'it could not be started: its disk is gone')) == 1
    compute.stop()
    path.write_text(intact)
    compute.start()
    until(lambda: (record(cluster, instance) or {})['fault'] is None, 20, 'it is mended')
    assert running(compute) == set(), 'what failed is over'
    switched(cluster, 'start', instance)


@pytest.mark.parametrize('meanwhile', ['start', 'destroy'])
def test_who_waits_learns_that_something_else_was_asked(cluster: Control, compute: Ecompute, meanwhile: str) -> None:
    instance = boot(cluster)
    compute.pause()
    with Eschedule(cluster, 'stop', '--wait', instance) as stop_command:
        until(lambda: b'"stop"' in (cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') or b''), 20, 'it is asked')
        assert cluster.eschedule(meanwhile, instance).code == 0
        compute.resume()
        ended = stop_command.end()
    code, message = {'start': (5, 'somebody has asked for something else'), 'destroy': (4, 'destroyed while waiting')}[
        meanwhile
    ]
    assert ended.code == code, ended
    assert message in ended.stderr
