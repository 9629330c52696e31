"""The JSON documents of commands, and their message after Ctrl-C."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from docs.shapes import REFUSED, SHAPES
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import Eschedule
from tests.kit.invariants import check
from tests.kit.servers import until
from tests.kit.story import NOBODY, SMALL, addressed, called, reached


def told(control: Control, name: str, *words: str, code: int = 0) -> Any:
    """Run a command with -f json and return its validated document."""
    done = called(control, *words, '-f', 'json')
    assert done.code == code, done
    return shaped(done, name)


def shaped(done: Result, name: str) -> Any:
    document = json.loads(done.stdout)
    Draft202012Validator(REFUSED if done.code == 3 else SHAPES[name]).validate(document)
    return document


def test_one_document_for_whatever_is_asked(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:4,DISK_GB:10,MEMORY_MB:1024')
    (created,) = told(cluster, 'create', SMALL, '--name', 'one', '--wait')
    assert (created['state'], created['compute'], created['error']) == ('active', compute.uuid, None)
    assert created['address'] == addressed(cluster, created['instance'])
    members = told(cluster, 'create', SMALL, '--name', 'pair', '--count', '2')
    assert [member['name'] for member in members] == ['pair-1', 'pair-2']
    outcomes = told(cluster, 'wait', 'wait', 'pair-1', 'pair-2', 'nobody', code=4)
    assert [result['state'] for result in outcomes] == ['active', 'active', None]
    assert outcomes[2]['error']['code'] == 4
    assert told(cluster, 'query', 'one')['address'] == created['address']
    assert [record['name'] for record in told(cluster, 'show', 'show', 'pair-2', 'one')] == ['pair-2', 'one']
    assert told(cluster, 'show', 'show', 'one')['name'] == 'one'
    for command, state in (('stop', 'stopped'), ('start', 'active'), ('reboot', 'active')):
        power_results = told(cluster, command, command, 'one', 'pair-1', NOBODY, '--wait', code=4)
        assert [result['state'] for result in power_results] == [state, state, None]
        assert told(cluster, command, command, 'pair-2', '--wait')['state'] == state
    report = told(cluster, 'host drain', 'host', 'drain', compute.uuid)
    assert len(report['said']) == 5
    assert told(cluster, 'host enable', 'host', 'enable', compute.uuid)['compute'] == compute.uuid
    refusal = told(cluster, 'create', 'resources=VCPU:9,DISK_GB:1,MEMORY_MB:1', code=3)['refused']
    assert 'VCPU short by' in refusal['details'][0]
    results = told(cluster, 'destroy', 'destroy', 'one', 'pair-1', 'nobody', 'pair-2', '--wait', code=4)
    assert [(result['state'], result['error'] is None) for result in results] == [('gone', True)] * 2 + [
        (None, False), ('gone', True)
    ]  # fmt: skip
    check(cluster, compute)


def test_a_document_comes_though_the_time_is_up(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    (result,) = told(cluster, 'create', SMALL, '--wait', '--timeout', '0', code=6)
    assert (result['state'], result['error']['code']) == (None, 6)
    compute.resume()
    addressed(cluster, result['instance'])


def test_a_destroy_of_many_asks_for_all_and_then_waits(cluster: Control, compute: Ecompute) -> None:
    names = ('web-1', 'web-2', 'web-3')
    assert called(cluster, SMALL, '--name', 'web', '--count', '3', '--wait').code == 0
    instances = [json.loads(called(cluster, 'show', name, '-f', 'json').stdout)['instance'] for name in names]
    compute.pause()
    with Eschedule(cluster, 'destroy', '--wait', '-f', 'json', *names) as destroy:
        until(lambda: destroy.stderr.count('destroy accepted') == 3, 20, 'all are asked for')
        destroy.send(signal.SIGINT)
        result = destroy.end(30)
    command_line = f'eschedule --config {cluster.schedule_yaml} destroy --wait web-1 web-2 web-3'
    assert (result.code, result.stderr.splitlines()[3:]) == (
        6,
        [f'eschedule: interrupted, and it goes on: {command_line}'],
    )
    assert [outcome['error']['code'] for outcome in shaped(result, 'destroy')] == [6, 6, 6]
    compute.resume()
    for instance in instances:
        reached(cluster, instance, 'gone')


@pytest.mark.parametrize('command', ['stop', 'reboot'])
def test_ctrl_c_says_how_to_wait_again(cluster: Control, compute: Ecompute, command: str) -> None:
    assert called(cluster, SMALL, '--name', 'one', '--wait').code == 0
    compute.pause()
    with Eschedule(cluster, command, '--wait', 'one') as process:
        until(lambda: 'accepted' in process.stderr, 20, 'it is asked for')
        process.send(signal.SIGINT)
        result = process.end(30)
    next_command = {'stop': 'stop --wait one', 'reboot': 'show one'}[command]
    assert (result.code, result.stderr.splitlines()[1:]) == (
        6, [f'eschedule: interrupted, and it goes on: eschedule --config {cluster.schedule_yaml} {next_command}']
    )  # fmt: skip
    compute.resume()
    assert called(cluster, *next_command.split()).code == 0
    assert called(cluster, 'destroy', '--wait', 'one').code == 0
