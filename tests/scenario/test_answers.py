"""What commands answer to programs, and to people who press Ctrl-C: one document, and what goes on."""

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
    """The document of a command, which has its shape."""
    done = called(control, *words, '-f', 'json')
    assert done.code == code, done
    return shaped(done, name)


def shaped(done: Result, name: str) -> Any:
    document = json.loads(done.stdout)
    Draft202012Validator(REFUSED if done.code == 3 else SHAPES[name]).validate(document)
    return document


def test_one_document_for_whatever_is_asked(cluster: Control) -> None:
    """-f json through a life: created and waited for, looked at, stopped, started, destroyed (fake)"""
    compute = cluster.ecompute('VCPU:4,DISK_GB:10,MEMORY_MB:1024')
    (one,) = told(cluster, 'create', SMALL, '--name', 'one', '--wait')
    assert (one['state'], one['compute'], one['error']) == ('active', compute.uuid, None)
    assert one['address'] == addressed(cluster, one['instance'])
    pair = told(cluster, 'create', SMALL, '--name', 'pair', '--count', '2')
    assert [each['name'] for each in pair] == ['pair-1', 'pair-2']
    waited = told(cluster, 'wait', 'wait', 'pair-1', 'pair-2', 'nobody', code=4)
    assert [each['state'] for each in waited] == ['active', 'active', None]
    assert waited[2]['error']['code'] == 4
    assert told(cluster, 'query', 'one')['address'] == one['address']
    assert [each['name'] for each in told(cluster, 'show', 'show', 'pair-2', 'one')] == ['pair-2', 'one']
    assert told(cluster, 'show', 'show', 'one')['name'] == 'one'
    for command, state in (('stop', 'stopped'), ('start', 'active'), ('reboot', 'active')):
        several = told(cluster, command, command, 'one', 'pair-1', NOBODY, '--wait', code=4)
        assert [each['state'] for each in several] == [state, state, None]
        assert told(cluster, command, command, 'pair-2', '--wait')['state'] == state
    drained = told(cluster, 'host drain', 'host', 'drain', compute.uuid)
    assert len(drained['said']) == 5
    assert told(cluster, 'host enable', 'host', 'enable', compute.uuid)['compute'] == compute.uuid
    refused = told(cluster, 'create', 'resources=VCPU:9,DISK_GB:1,MEMORY_MB:1', code=3)['refused']
    assert 'VCPU short by' in refused['details'][0]
    gone = told(cluster, 'destroy', 'destroy', 'one', 'pair-1', 'nobody', 'pair-2', '--wait', code=4)
    assert [(each['state'], each['error'] is None) for each in gone] == [('gone', True)] * 2 + [
        (None, False), ('gone', True)
    ]  # fmt: skip
    check(cluster, compute)


def test_a_document_comes_though_the_time_is_up(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    (late,) = told(cluster, 'create', SMALL, '--wait', '--timeout', '0', code=6)
    assert (late['state'], late['error']['code']) == (None, 6)
    compute.resume()
    addressed(cluster, late['instance'])


def test_a_destroy_of_many_asks_for_all_and_then_waits(cluster: Control, compute: Ecompute) -> None:
    """A4: they go together, and a time-out or Ctrl-C leaves none of them unasked (fake)"""
    names = ('web-1', 'web-2', 'web-3')
    assert called(cluster, SMALL, '--name', 'web', '--count', '3', '--wait').code == 0
    instances = [json.loads(called(cluster, 'show', name, '-f', 'json').stdout)['instance'] for name in names]
    compute.pause()
    with Eschedule(cluster, 'destroy', '--wait', '-f', 'json', *names) as destroy:
        until(lambda: destroy.stderr.count('destroy accepted') == 3, 20, 'all are asked for')
        destroy.send(signal.SIGINT)
        ended = destroy.end(30)
    again = f'eschedule --config {cluster.schedule_yaml} destroy --wait web-1 web-2 web-3'
    assert (ended.code, ended.stderr.splitlines()[3:]) == (6, [f'eschedule: interrupted, and it goes on: {again}'])
    assert [each['error']['code'] for each in shaped(ended, 'destroy')] == [6, 6, 6]
    compute.resume()
    for each in instances:
        reached(cluster, each, 'gone')


@pytest.mark.parametrize('command', ['stop', 'reboot'])
def test_ctrl_c_says_how_to_wait_again(cluster: Control, compute: Ecompute, command: str) -> None:
    assert called(cluster, SMALL, '--name', 'one', '--wait').code == 0
    compute.pause()
    with Eschedule(cluster, command, '--wait', 'one') as waiting:
        until(lambda: 'accepted' in waiting.stderr, 20, 'it is asked for')
        waiting.send(signal.SIGINT)
        ended = waiting.end(30)
    again = {'stop': 'stop --wait one', 'reboot': 'show one'}[command]
    assert (ended.code, ended.stderr.splitlines()[1:]) == (
        6, [f'eschedule: interrupted, and it goes on: eschedule --config {cluster.schedule_yaml} {again}']
    )  # fmt: skip
    compute.resume()
    assert called(cluster, *again.split()).code == 0
    assert called(cluster, 'destroy', '--wait', 'one').code == 0
