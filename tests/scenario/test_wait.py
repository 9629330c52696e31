"""Waiting: for a stage or the end, with a time limit, and with the reason of a failure."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from ecomp.model.record import STAGES
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import Eschedule
from tests.kit.servers import wait_until
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    parse_notice,
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


def test_wait_for_stages_and_for_several_instances(cluster: Control, compute: Ecompute) -> None:
    instances = []
    for words, printed in ((['--wait'], True), (['--wait=addressed'], True), (['--wait=started'], None)):
        done = cluster.eschedule(*words, SMALL_QUERY)
        first, *rest = done.stdout.splitlines()
        _, instance = parse_notice(Result(done.code, f'{first}\n', done.stderr))
        assert done.stderr == ''  # the status line is for a terminal
        assert require_record(cluster, instance)['state'] == 'active'
        # A fake gets its address immediately, so it may already be printed for `started`.
        assert rest == [wait_address(cluster, instance)] or (printed is None and rest == [])
        instances.append(instance)
    addresses = [wait_address(cluster, instance) for instance in instances]
    assert cluster.eschedule('wait', *instances) == (0, ''.join(f'{address}\n' for address in addresses), '')
    for stage in STAGES[: STAGES.index('addressed')]:
        assert cluster.eschedule('wait', '--for', stage, *instances) == (0, '', '')
    # The others are waited for even if one fails; the first failure is the exit code.
    mixed = cluster.eschedule('wait', UNKNOWN_UUID, *instances[:2], '--timeout', '10')
    assert (mixed.code, mixed.stdout.splitlines()) == (4, addresses[:2])
    assert mixed.stderr == f'eschedule: {UNKNOWN_UUID}: no such instance\n'
    report = json.loads(cluster.eschedule('timeline', '-f', 'json', *instances[:2]).stdout)
    # A fake guest has no cloud-init that could become ready.
    stages = list(STAGES[: STAGES.index('ready')])
    assert [[stage['stage'] for stage in timeline['stages']] for timeline in report['instances']] == [stages] * 2

    # A timeout does not stop the work.
    compute.pause()
    assert cluster.eschedule('destroy', instances[0]).code == 0
    assert_one_line(cluster.eschedule('wait', instances[0]), 4, instances[0], 'is being destroyed')
    done = cluster.eschedule('--wait', '--timeout', '0.5', SMALL_QUERY)
    _, unseen = parse_notice(Result(0, done.stdout, ''))
    assert_one_line(done, 6, unseen, 'timed out after 0.5 s (the operation continues), still waiting for')
    assert_one_line(cluster.eschedule(unseen), 6, unseen, 'no address yet', 'scheduled')
    compute.resume()
    wait_state(cluster, instances[0], 'gone')
    assert_one_line(cluster.eschedule('wait', instances[0]), 4, instances[0], 'gone since')
    assert cluster.eschedule('wait', unseen).stdout == f'{wait_address(cluster, unseen)}\n'


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
