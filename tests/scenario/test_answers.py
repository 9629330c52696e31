"""The JSON documents of commands, and their message after Ctrl-C."""

from __future__ import annotations

import json
import signal
from typing import Any

from jsonschema import Draft202012Validator

from docs.shapes import REFUSED, SHAPES
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import Eschedule
from tests.kit.invariants import check_invariants
from tests.kit.servers import wait_until
from tests.kit.story import SMALL_QUERY, UNKNOWN_UUID, run_in_process, wait_address, wait_state


def read_document(control: Control, shape: str, *words: str, code: int = 0) -> Any:
    """Run a command with -f json and return its validated document."""
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
