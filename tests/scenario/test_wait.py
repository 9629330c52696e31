"""Waiting: for a stage or the end, with a time limit."""

from __future__ import annotations

import json

from ecomp.model.record import STAGES
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    parse_notice,
    require_record,
    wait_address,
    wait_state,
)


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
