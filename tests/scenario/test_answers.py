"""The JSON documents of commands, their message after Ctrl-C, waiting, and `events`."""

from __future__ import annotations

import json
import re
import signal
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from docs.shapes import REFUSED, SHAPES
from ecomp.model.states import STAGES
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import Eschedule, read_revision
from tests.kit.invariants import check_invariants
from tests.kit.servers import wait_until
from tests.kit.story import (
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    boot,
    parse_notice,
    place,
    require_record,
    run_in_process,
    wait_address,
    wait_state,
)


def read_document(control: Control, shape: str, *words: str, code: int = 0) -> Any:
    done = run_in_process(control, *words, '-f', 'json')
    assert done.code == code, done
    return validate_document(done, shape)


def validate_document(done: Result, shape: str) -> Any:
    document = json.loads(done.stdout)
    Draft202012Validator(REFUSED if done.code == 3 else SHAPES[shape]).validate(document)
    return document


def test_json_document_of_each_command_has_its_shape(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:4,DISK_GB:10,MEMORY_MB:1024')
    (created,) = read_document(cluster, 'create', SMALL_QUERY, '--name', 'one', '--wait')
    assert (created['state'], created['compute'], created['error']) == ('active', compute.uuid, None)
    assert created['address'] == wait_address(cluster, created['instance'])
    members = read_document(cluster, 'create', SMALL_QUERY, '--name', 'pair', '--count', '2')
    assert [member['name'] for member in members] == ['pair-1', 'pair-2']
    outcomes = read_document(cluster, 'wait', 'wait', 'pair-1', 'pair-2', 'nobody', code=4)
    assert [result['state'] for result in outcomes] == ['active', 'active', None]
    assert outcomes[2]['error']['code'] == 4
    assert read_document(cluster, 'query', 'one')['address'] == created['address']
    assert [record['name'] for record in read_document(cluster, 'show', 'show', 'pair-2', 'one')] == ['pair-2', 'one']
    assert read_document(cluster, 'show', 'show', 'one')['name'] == 'one'
    for command, state in (('stop', 'stopped'), ('start', 'active'), ('reboot', 'active')):
        power_results = read_document(cluster, command, command, 'one', 'pair-1', UNKNOWN_UUID, '--wait', code=4)
        assert [result['state'] for result in power_results] == [state, state, None]
        assert read_document(cluster, command, command, 'pair-2', '--wait')['state'] == state
    report = read_document(cluster, 'host drain', 'host', 'drain', compute.uuid)
    assert len(report['said']) == 5
    assert read_document(cluster, 'host enable', 'host', 'enable', compute.uuid)['compute'] == compute.uuid
    refusal = read_document(cluster, 'create', 'resources=VCPU:9,DISK_GB:1,MEMORY_MB:1', code=3)['refused']
    assert 'VCPU short by' in refusal['details'][0]
    results = read_document(cluster, 'destroy', 'destroy', 'one', 'pair-1', 'nobody', 'pair-2', '--wait', code=4)
    assert [(result['state'], result['error'] is None) for result in results] == [('gone', True)] * 2 + [
        (None, False), ('gone', True)
    ]  # fmt: skip
    check_invariants(cluster, compute)


def test_destroy_of_several_requests_all_before_it_waits(cluster: Control, compute: Ecompute) -> None:
    names = ('web-1', 'web-2', 'web-3')
    assert run_in_process(cluster, SMALL_QUERY, '--name', 'web', '--count', '3', '--wait').code == 0
    instances = [json.loads(run_in_process(cluster, 'show', name, '-f', 'json').stdout)['instance'] for name in names]
    compute.pause()
    with Eschedule(cluster, 'destroy', '--wait', '-f', 'json', *names) as destroy:
        wait_until(lambda: destroy.stderr.count('destroy accepted') == 3, 20, 'all are asked for')
        destroy.send_signal(signal.SIGINT)
        result = destroy.wait(30)
    command_line = f'eschedule --config {cluster.schedule_yaml} destroy --wait web-1 web-2 web-3'
    assert (result.code, result.stderr.splitlines()[3:]) == (
        6,
        [f'eschedule: interrupted; the operation continues. Try: {command_line}'],
    )
    assert [outcome['error']['code'] for outcome in validate_document(result, 'destroy')] == [6, 6, 6]
    compute.resume()
    for instance in instances:
        wait_state(cluster, instance, 'gone')


# Waiting: for a stage or the end, with a time limit.


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
    report = json.loads(cluster.eschedule('show', '--timeline', '-f', 'json', instances[0]).stdout)
    # A fake guest has no cloud-init that could become ready.
    assert [stage['stage'] for stage in report['stages']] == list(STAGES[: STAGES.index('ready')])

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


# `eschedule events`: the history that etcd keeps, and changes as they happen.


def strip_times(lines: str) -> list[str]:
    return [re.sub(r'^(revision \d+|\S+) +', '', line) for line in lines.splitlines()]


def is_subsequence(lines: Sequence[str], *expected: str) -> bool:
    remaining = iter(lines)
    return all(line in remaining for line in expected)


def test_events_lists_the_history_in_order(cluster: Control, compute: Ecompute) -> None:
    placed = cluster.eschedule(SMALL_QUERY, '--name', 'listed', '--wait')
    assert placed.code == 0, placed
    instance = boot(cluster)
    assert cluster.eschedule('reboot', 'listed', '--wait').code == 0
    assert cluster.eschedule('wait', 'listed').code == 0  # for its address, which it gets after it is active
    assert cluster.eschedule('destroy', 'listed', '--wait').code == 0

    done = cluster.eschedule('events')
    assert done.code == 0, done
    assert_one_line(done, 0, 'printing all events')
    words = strip_times(done.stdout)
    of_listed = [line.removeprefix('listed: ').partition(', by ')[0] for line in words if line.startswith('listed: ')]
    address = placed.stdout.splitlines()[-1]
    assert is_subsequence(
        of_listed, 'name taken', f'address {address} on default', 'reboot accepted', 'stopped', 'active',
        'boot 2: reboot', f'has its address {address} again', 'destroy accepted', 'destroying', 'gone',
        'name released',
    ), of_listed  # fmt: skip
    assert any(line.startswith('compute ') and ' came up, ecomp ' in line for line in words)

    alone = cluster.eschedule('events', instance, '-f', 'json')
    events = [json.loads(line) for line in alone.stdout.splitlines()]
    assert {event['instance'] for event in events} == {instance}
    assert [event['revision'] for event in events] == sorted(event['revision'] for event in events)
    assert events[0]['compute'] == compute.uuid
    fields = {'revision', 'time', 'kind', 'instance', 'name', 'compute', 'says', 'by'}
    assert all(set(event) == fields for event in events)
    nobody = str(uuid.uuid4())  # etcd's history includes earlier tests
    nothing = cluster.eschedule('events', nobody)
    assert (nothing.code, nothing.stdout) == (4, '')
    assert f'{nobody}: no event in the history that etcd keeps' in nothing.stderr


def test_events_watch_prints_changes_until_ctrl_c(cluster: Control, compute: Ecompute) -> None:
    before = boot(cluster)
    for form in ('table', 'json'):
        lines = cluster.eschedule('events', before, '-f', form).stdout.splitlines()
        last = cluster.eschedule('events', before, '-f', form, '-n', '2')
        assert_one_line(last, 0, 'printing the last 2 of all events')
        assert last.stdout.splitlines() == lines[-2:]
    with Eschedule(cluster, 'events', '--watch', '-n', '1') as watching:
        wait_until(lambda: watching.stdout, 20, 'the last change is told')
        compute.pause()
        _, new_instance = place(cluster)
        wait_until(
            lambda: f'{new_instance}: request accepted, for ' in watching.stdout, 20, 'it is told when it happens'
        )
        assert f'{new_instance}: active' not in watching.stdout
        compute.resume()
        wait_until(lambda: f'{new_instance}: active' in watching.stdout, 20, 'and what comes of it')
        watching.send_signal(signal.SIGINT)
        ended = watching.wait(20)
    assert_one_line(ended, 0, 'printing the last 1 of all events')


@pytest.mark.usefixtures('compute')
def test_events_after_compaction_name_the_first_kept_revision(own_control: Control) -> None:
    instance = boot(own_control)
    assert f'{instance}: active' in strip_times(own_control.eschedule('events', instance).stdout)
    compacted = read_revision(own_control)
    own_control.etcd.compact()
    assert own_control.eschedule('stop', '--wait', instance).code == 0
    done = own_control.eschedule('events', instance)
    assert_one_line(done, 0, f'printing the events since revision {compacted}; etcd keeps no older ones')
    words = strip_times(done.stdout)
    assert is_subsequence(
        [line.partition(', by ')[0] for line in words], f'{instance}: stop accepted', f'{instance}: stopped'
    ), words
    assert f'{instance}: active' not in words
