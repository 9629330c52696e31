"""Waiting: for a stage or the end, with a time limit, and with the reason of a failure."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ecomp.model.record import STAGES
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import Eschedule
from tests.kit.servers import wait_until
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    parse_notice,
    place,
    require_record,
    wait_address,
    wait_state,
)


@contextmanager
def start_waiting(control: Control, instance: str) -> Iterator[Eschedule]:
    """Start an eschedule that waits for a new instance, and yield it after the delivery."""
    with Eschedule(control, '--uuid', instance, '--wait', SMALL_QUERY) as wait_command:
        wait_until(
            lambda: any(key.endswith(instance) for key in control.etcd.list_keys('/hosts/')), 20, 'it is delivered'
        )
        yield wait_command


@pytest.mark.usefixtures('compute')
def test_wait_for_each_stage(cluster: Control) -> None:
    for words, printed in ((['--wait'], True), (['--wait=addressed'], True), (['--wait=started'], None)):
        done = cluster.eschedule(*words, SMALL_QUERY)
        first, *rest = done.stdout.splitlines()
        _, instance = parse_notice(Result(done.code, f'{first}\n', done.stderr))
        assert done.stderr == ''  # the status line is for a terminal
        active_record = require_record(cluster, instance)
        assert active_record['state'] == 'active'
        # A fake gets its address immediately, so it may already be printed for `started`.
        assert rest == [wait_address(cluster, instance)] or (printed is None and rest == [])


def test_wait_for_several_instances(cluster: Control, compute: Ecompute) -> None:
    instances = [place(cluster)[1] for _ in range(3)]
    done = cluster.eschedule('wait', *instances)
    assert (done.code, done.stderr) == (0, '')
    assert done.stdout.splitlines() == [wait_address(cluster, instance) for instance in instances]
    for stage in STAGES[: STAGES.index('addressed')]:
        assert cluster.eschedule('wait', '--for', stage, *instances) == (0, '', '')
    # The others are waited for even if one fails; the first failure is the exit code.
    mixed = cluster.eschedule('wait', UNKNOWN_UUID, *instances[:2], '--timeout', '10')
    assert (mixed.code, mixed.stdout.splitlines()) == (
        4,
        [wait_address(cluster, instance) for instance in instances[:2]],
    )
    assert mixed.stderr == f'eschedule: {UNKNOWN_UUID}: no such instance\n'
    compute.pause()
    assert cluster.eschedule('destroy', instances[0]).code == 0
    assert_one_line(cluster.eschedule('wait', instances[0]), 4, instances[0], 'is being destroyed')
    unseen = place(cluster)[1]
    late_result = cluster.eschedule('wait', unseen, '--timeout', '0.5')
    assert_one_line(
        late_result, 6, 'timed out after 0.5 s (the operation continues), still waiting for its compute to accept it'
    )
    compute.resume()
    wait_state(cluster, instances[0], 'gone')
    assert_one_line(cluster.eschedule('wait', instances[0]), 4, instances[0], 'gone since')
    assert cluster.eschedule('wait', unseen).stdout == f'{wait_address(cluster, unseen)}\n'


@pytest.mark.usefixtures('compute')
def test_timeline_of_several_instances(cluster: Control) -> None:
    first, second = (place(cluster)[1] for _ in range(2))
    assert cluster.eschedule('wait', first, second).code == 0
    single_result = cluster.eschedule('timeline', first)
    assert (single_result.code, single_result.stderr) == (0, '')
    assert [line.split()[0] for line in single_result.stdout.splitlines()] == [first, *STAGES[1:], '0']
    pair_result = cluster.eschedule('timeline', second, UNKNOWN_UUID, first)
    assert (pair_result.code, pair_result.stderr) == (4, f'eschedule: {UNKNOWN_UUID}: no such instance\n')
    assert pair_result.stdout.splitlines()[0].startswith(second)
    assert pair_result.stdout.splitlines()[-1].split()[:2] == ['total', '2']
    report = json.loads(cluster.eschedule('timeline', '-f', 'json', first, second).stdout)
    # A fake guest has no cloud-init that could become ready.
    stages = list(STAGES[: STAGES.index('ready')])
    assert [[stage['stage'] for stage in timeline['stages']] for timeline in report['instances']] == [stages] * 2


def test_wait_timeout_does_not_stop_the_work(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    for seconds in ('0', '1'):
        done = cluster.eschedule('--wait', '--timeout', seconds, SMALL_QUERY)
        _, instance = parse_notice(Result(0, done.stdout, ''))
        line = assert_one_line(
            done, 6, instance, f'timed out after {seconds} s (the operation continues), still waiting for'
        )
        assert 'did not answer' not in line
        assert_one_line(cluster.eschedule(instance), 6, instance, 'no address yet', 'scheduled')
    destroy_result = cluster.eschedule('destroy', '--wait', '--timeout', '0', instance)
    assert destroy_result.code == 6
    accepted, timed_out = destroy_result.stderr.splitlines()
    assert 'destroy accepted' in accepted
    assert 'its compute to destroy it' in timed_out
    compute.resume()
    wait_state(cluster, instance, 'gone')


def test_interrupted_wait_does_not_stop_the_work(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    instance = str(uuid.uuid4())
    with start_waiting(cluster, instance) as wait_command:
        output = wait_until(lambda: wait_command.stdout, 20, 'it says where it is')
        assert parse_notice(Result(0, output, '')) == (compute.uuid, instance)
        wait_command.send_signal(signal.SIGINT)
        next_command = f'eschedule --config {cluster.schedule_yaml} wait {instance}'
        assert_one_line(wait_command.wait(30), 6, f'interrupted; the operation continues. Try: {next_command}')
    compute.resume()
    wait_address(cluster, instance)


@pytest.mark.usefixtures('compute')
def test_wait_with_timeout_0_for_an_addressed_instance_succeeds(cluster: Control) -> None:
    _, instance = place(cluster)
    address = wait_address(cluster, instance)
    done = cluster.eschedule('--uuid', instance, '--wait', '--timeout', '0', SMALL_QUERY)
    assert (done.code, done.stdout.splitlines()[1:]) == (0, [address])


def test_wait_reports_a_failed_build(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    instance = str(uuid.uuid4())
    with start_waiting(cluster, instance) as wait_command:
        # Its allocation is deleted, so it must not be built.
        cluster.placement.call('DELETE', f'/allocations/{instance}')
        compute.resume()
        ended = wait_command.wait(30)
    reason = 'placement holds no allocation'
    assert_one_line(ended, 1, instance, 'failed at stage scheduled', reason)
    failed = cluster.eschedule(instance)
    assert_one_line(failed, 1, instance, 'failed at stage scheduled', reason)
    assert failed.stdout == ''
    shown = json.loads(cluster.eschedule('show', '-f', 'json', instance).stdout)
    assert (shown['state'], shown['error']['stage']) == ('error', 'scheduled')


def test_wait_reports_a_destroyed_instance(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    instance = str(uuid.uuid4())
    with start_waiting(cluster, instance) as wait_command:
        assert cluster.eschedule('destroy', instance).code == 0
        compute.resume()
        ended = wait_command.wait(30)
    assert_one_line(ended, 4, instance, 'destroyed during the wait')
